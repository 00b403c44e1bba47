/* What encoder/resident/d16_e4_f128.cu's two kernels share: a layer's parameters in shared memory, what is kept between them, the
 * masks that are drawn ahead, and products of 16 columns. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_UNITS_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_UNITS_CUH

#include "kernels/cuda/encoder/resident/device.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

namespace ps_resident
{

enum { D = 16, F = 128, NT = 3, THREADS = 672, DRAWING = 96, MATRIX = 128 };

/* Bytes of a row of a unit's matrices backward: of attention's columns, of rows beside ones, of staged hidden columns. */
enum { COLUMNS_ROW = 8 * MATRIX, ROWS_ROW = 5 * MATRIX, STAGED_ROW = 16 * MATRIX };

/* A unit of as many tiles as is told at run time. */
enum { ANY_TILES = 0 };

template <class T> struct place<T, D, ANY_TILES> : place<T, D, 1> {
    int count;

    __device__ __forceinline__ explicit place(int tiles) : count(tiles)
    {
        const int warp = (int)threadIdx.x / 32;
        this->unit = warp / tiles;
        this->tile = warp - this->unit * tiles;
        this->row = this->tile * 16;
    }
    __device__ __forceinline__ int tiles() const
    {
        return count;
    }
    __device__ __forceinline__ void take(const encoder<T> &x, int64_t u)
    {
        place<T, D, 1>::take(x, u);
        this->global_tile = u * count + this->tile;
    }
    __device__ __forceinline__ void sync() const
    {
        if (count == 1) {
            __syncwarp();
        } else {
            ps_barrier(1 + this->unit, count * 32);
        }
    }
};

template <class T> using d16_place = place<T, D, NT>;
enum { LD = D + 8, LD_QKV = 3 * D + 8, LD_F = F + 8 }; /* rows of 16 bytes more: 8 rows of 16 bytes lie in all banks */

/* One layer's parameters. Biases: each two of them twice, as an accumulator has them; all follow one another. */
template <class T> struct d16_weights {
    T w_qkv[D * LD_QKV], w_o[D * LD], w_1[D * LD_F], w_2[F * LD];
    float4 b_qkv[3 * D / 2], b_o[D / 2], b_2[D / 2], b_1[F / 2];
    float ln1_gamma[D], ln1_beta[D], ln2_gamma[D], ln2_beta[D];
};
enum { LAYER_BYTES = sizeof(d16_weights<ps_bf16>) }; /* fp16's too */

/* ---- what is kept: rows of each layer and tile, masks of two steps, their tags ---- */

/* Of a layer and tile, 16 bytes a lane each. */
enum {
    KEPT_XHAT1 = 0,
    KEPT_XHAT2 = 512,
    KEPT_MERGED = 1024,
    KEPT_ROWS = 1536, /* lanes q 0 and 2: log2 of sums, [pair][row g, g + 8] of the head q / 2 of each pair; q 1: rstd [LN][row] */
    KEPT_BYTES = 2048
};

template <class T> static __device__ __forceinline__ char *kept_at(const encoder<T> &x, int layer, const d16_place<T> &at)
{
    return x.d16.kept + ((int64_t)layer * x.d16.tiles + at.global_tile) * KEPT_BYTES;
}

/* Three words a lane: columns 0 .. 63 of d_ff: bit t + 4h + 8 (group of 32) + 16i of position 8t + 2q + i, row g + 8h; 64 .. 127;
 * and those after W_o, element (g + 8h, 8t + 2q + i) in bit 8h + 4t + 16i, and after W_2, one bit further. */
enum { MASKS_BYTES = 3 * 128 };

template <class T>
static __device__ __forceinline__ uint32_t *masks_at(const encoder<T> &x, uint64_t step, int layer, int64_t tile, int lane)
{
    char *const p = x.d16.kept + x.layers * x.d16.tiles * KEPT_BYTES;
    return (uint32_t *)(p + (((int64_t)(step & 1) * x.layers + layer) * x.d16.tiles + tile) * MASKS_BYTES) + lane;
}

/* What masks depend on: says of a block's in memory whose they are. */
struct tag {
    uint64_t step, seed, draws, tiles;
};

static __host__ __device__ constexpr int64_t tags_of(int64_t tiles)
{
    return tiles / (D16_LEAST_UNITS * NT) + 1;
}

template <class T> static __device__ __forceinline__ struct tag *tag_at(const encoder<T> &x, uint64_t step)
{
    char *const p = x.d16.kept + x.layers * x.d16.tiles * (KEPT_BYTES + 2 * MASKS_BYTES);
    return (struct tag *)p + (int64_t)(step & 1) * tags_of(x.d16.tiles) + blockIdx.x;
}

template <class T> static __device__ __forceinline__ struct tag tag_of(const encoder<T> &x, uint64_t step)
{
    return {step + 1, (uint64_t)x.keys.y[0] << 32 | x.keys.x[0], (uint64_t)x.site << 32 | x.below,
            (uint64_t)x.rows_before << 32 | (uint32_t)(x.n << 16 | x.block_units)};
}

/* The step and place in the order of windows that a forward expects of the next one. */
struct ahead {
    uint64_t step, cursor;
};

template <class T> static __device__ __forceinline__ struct ahead *ahead_at(const encoder<T> &x)
{
    char *const p = x.d16.kept + x.layers * x.d16.tiles * (KEPT_BYTES + 2 * MASKS_BYTES);
    return (struct ahead *)(p + 2 * tags_of(x.d16.tiles) * sizeof(struct tag));
}

/* Masks of columns 64 half .. 64 half + 63 of the tile's hidden values, d_ff of them a row, whose row g is `first` of the batch. */
template <class T>
static __device__ __forceinline__ uint32_t draw_hidden(const encoder<T> &x, uint32_t below, uint32_t minus_below, uint4 site,
                                                       uint32_t first, int f, int half, int q)
{
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int part = i / 2, h = i % 2;
        const struct ps_block drawn = ps_draws_after(x.keys, site, (first + 8 * h) * (f / 8) + half * 8 + part * 4 + q);
#pragma unroll
        for (int t = 0; t < 4; t++) {
            bits += ps_kept2(drawn.word[t], below, minus_below) << (t + 4 * h + 8 * part);
        }
    }
    return bits;
}

/* Draws the masks of a layer's tile whose row g is `first`. */
template <class T>
static __device__ __forceinline__ void draw_tile(uint32_t (&words)[3], const encoder<T> &x, uint64_t step, int layer,
                                                 uint32_t first, int q)
{
    const uint4 hidden = ps_draws_begin(x.keys, x.site + 3 * layer + 1, step);
    first += x.rows_before;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        const uint32_t bits = draw_hidden(x, x.below, x.minus_below, hidden, first, F, half, q);
        words[0] = half ? words[0] : bits;
        words[1] = bits;
    }
    const uint32_t block = (first + q / 2 * 8) * (D / 8) + q % 2;
    const uint32_t o = draw_masks(x, step, x.site + 3 * layer, block, q) >> q;
    const uint32_t y = draw_masks(x, step, x.site + 3 * layer + 2, block, q) >> q;
    words[2] = (o & 0x11111111u) | (y & 0x11111111u) << 1;
}

/* ---- shared memory ---- */

static __device__ __forceinline__ int column_of(int position)
{
    return (position & ~31) + (position & 6) * 4 + (position >> 2 & 6) + (position & 1);
}

/* Begins to copy the parameters of layers first .. end - 1 (ps_copy_wait); d_ff's columns to their positions. */
template <class T> static __device__ __forceinline__ void stage_weights(const encoder<T> &x, d16_weights<T> *to, int first, int end)
{
    enum { OF_1 = 256, OF_2 = 512, OF_QKV = 608, OF_O = 640, OF_BIAS = 744, PIECES = 768 }; /* whole warps, but for the last two */
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < (end - first) * PIECES; i += (int)blockDim.x) {
        const int l = i / PIECES, piece = i - l * PIECES;
        d16_weights<T> &w = to[first + l];
        const T *const matrices = x.weights + (first + l) * x.at.matrix_stride;
        const float *const vectors = x.parameters + (first + l) * x.at.vector_stride;
        if (piece < OF_1) { /* W_1: 8 columns of a row */
            const int row = piece / 16, of = piece % 16;
            const T *const from = matrices + x.at.w_1 + row * F + of * 8;
            T *const p = w.w_1 + row * LD_F + of / 4 * 32 + of % 4 * 2;
#pragma unroll
            for (int t = 0; t < 4; t++) {
                ps_copy_async4(p + t * 8, from + t * 2);
            }
        } else if (piece < OF_2) { /* W_2: half a row */
            const int row = (piece - OF_1) / 2, far = piece % 2 * 8;
            ps_copy_async(w.w_2 + row * LD + far, matrices + x.at.w_2 + column_of(row) * D + far);
        } else if (piece < OF_QKV) { /* W_qkv: 8 columns of a row */
            const int row = (piece - OF_2) / 6, column = (piece - OF_2 - row * 6) * 8;
            ps_copy_async(w.w_qkv + row * LD_QKV + column, matrices + x.at.w_qkv + row * 3 * D + column);
        } else if (piece < OF_O) {
            const int row = (piece - OF_QKV) / 2, column = piece % 2 * 8;
            ps_copy_async(w.w_o + row * LD + column, matrices + x.at.w_o + row * D + column);
        } else if (piece < OF_BIAS) { /* two columns */
            const int item = piece - OF_O;
            const float *const from = vectors + (item < 24   ? x.at.b_qkv + item * 2
                                                 : item < 32 ? x.at.b_o + (item - 24) * 2
                                                 : item < 40 ? x.at.b_2 + (item - 32) * 2
                                                             : x.at.b_1 + column_of((item - 40) * 2));
            float *const pair = (float *)(w.b_qkv + item); /* and those that follow */
            ps_copy_async8(pair, from);
            ps_copy_async8(pair + 2, from);
        } else if (piece < OF_BIAS + 16) { /* LayerNorms: 4 columns */
            const int item = piece - OF_BIAS, which = item / 4;
            ps_copy_async(w.ln1_gamma + item * 4, vectors + item % 4 * 4 +
                                                      (which == 0   ? x.at.ln1_gamma
                                                       : which == 1 ? x.at.ln1_beta
                                                       : which == 2 ? x.at.ln2_gamma
                                                                    : x.at.ln2_beta));
        }
    }
}

/* 0xffff in each half whose bit `bit` (of 0 .. 15) is set: a byte's highest bit is spread. */
static __device__ __forceinline__ uint32_t spread(uint32_t bits, int bit)
{
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(bits << (7 - bit % 8)), "r"(bit < 8 ? 0xaa88 : 0xbb99));
    return mask;
}

/* The operand's rows that do not exist, zero. */
template <class P> static __device__ __forceinline__ void clear_missing(uint32_t (&a)[4], const P &at)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = at.here[i % 2] ? a[i] : 0;
    }
}

/* ---- products ---- */

/* c = the biases of a tile's columns. */
static __device__ __forceinline__ void set_bias(float (&c)[4], const float4 *bias, int q)
{
    const float4 v = bias[q];
    c[0] = v.x, c[1] = v.y, c[2] = v.z, c[3] = v.w;
}

/* c = a w + bias, w [16, 16 columns]. */
template <class T, class P>
static __device__ __forceinline__ void project16(float (&c)[2][4], const uint32_t (&a)[4], const T *w, int ld, const float4 *bias,
                                                 const P &at)
{
    uint32_t b[4];
    set_bias(c[0], bias, at.q);
    set_bias(c[1], bias + 4, at.q);
    ps_ldmatrix4_transposed(b, w + at.near * ld + at.far);
    ps_mma16<T>(c[0], a, b[0], b[1], c[0]);
    ps_mma16<T>(c[1], a, b[2], b[3], c[1]);
}

/* c += a w', w [16, 16]. */
template <class T, class P>
static __device__ __forceinline__ void multiply16_transposed(float (&c)[2][4], const uint32_t (&a)[4], const T *w, int ld,
                                                             const P &at)
{
    uint32_t b[4];
    ps_ldmatrix4(b, w + at.other * ld + at.across);
    ps_mma16<T>(c[0], a, b[0], b[1], c[0]);
    ps_mma16<T>(c[1], a, b[2], b[3], c[1]);
}

/* Queries, scaled, to q, keys and values to their places, of the operand a; w: the layer's weights. left(part, operand): each,
 * rounded. */
template <class T, class W, class P, class LEFT>
static __device__ __forceinline__ void project_heads(uint32_t (&q)[4], const uint32_t (&a)[4], const W &w, float scale,
                                                     uint32_t own, const P &at, const LEFT &left)
{
    float y[2][4];
    uint32_t packed[4];
    project16(y, a, w.w_qkv, LD_QKV, w.b_qkv, at);
    scale_rows(y, scale);
    pack_operand<T>(q, y[0], y[1]);
    left(0, q);
    project16(y, a, w.w_qkv + D, LD_QKV, w.b_qkv + D / 2, at);
    pack_operand<T>(packed, y[0], y[1]);
    ps_stmatrix4_at(own, packed);
    left(1, packed);
    project16(y, a, w.w_qkv + 2 * D, LD_QKV, w.b_qkv + D, at);
    pack_operand<T>(packed, y[0], y[1]);
    clear_missing(packed, at);
    ps_stmatrix4_at(own + 2 * MATRIX, packed);
    left(2, packed);
}

/* The gradients of queries, keys and values to their places, and dx, that of what W_qkv has read. */
template <class W, class P>
static __device__ __forceinline__ void project_heads_backward(float (&dx)[2][4], const uint32_t (&dq)[4], const uint32_t (&dk)[4],
                                                              const uint32_t (&dv)[4], const W &w, uint32_t own, const P &at)
{
    ps_stmatrix4_at(own, dq);
    ps_stmatrix4_at(own + 2 * MATRIX, dk);
    ps_stmatrix4_at(own + 4 * MATRIX, dv);
    clear(dx);
    multiply16_transposed(dx, dq, w.w_qkv, LD_QKV, at);
    multiply16_transposed(dx, dk, w.w_qkv + D, LD_QKV, at);
    multiply16_transposed(dx, dv, w.w_qkv + 2 * D, LD_QKV, at);
}

/* Ones beside the operands of weights' gradients, for biases: matrix 2 of each of `rows` rows of matrices. */
template <class T> static __device__ __forceinline__ void fill_ones(char *memory, int rows, int thread, int threads)
{
    for (int i = thread; i < rows * 8; i += threads) {
        *(uint4 *)(memory + i / 8 * ROWS_ROW + 2 * MATRIX + i % 8 * 16) =
            make_uint4(ps_ones<T>(), ps_ones<T>(), ps_ones<T>(), ps_ones<T>());
    }
}

/* Operands from 2 TILES matrices, `stride` bytes apart, of 16 TILES rows by 8 columns; p is the lane's place in the first. */
template <bool TRANSPOSED, int TILES>
static __device__ __forceinline__ void load_matrices(uint32_t (&r)[2 * TILES], uint32_t p, int stride)
{
#pragma unroll
    for (int i = 0; i < 2 * TILES; i += 4) {
        if (i + 2 < 2 * TILES) {
            uint32_t m[4];
            if constexpr (TRANSPOSED) {
                ps_ldmatrix4_transposed_at(m, p + i * stride);
            } else {
                ps_ldmatrix4_at(m, p + i * stride);
            }
            r[i] = m[0], r[i + 1] = m[1], r[i + 2] = m[2], r[i + 3] = m[3];
        } else {
            uint32_t m[2];
            if constexpr (TRANSPOSED) {
                ps_ldmatrix2_transposed_at(m, p + i * stride);
            } else {
                ps_ldmatrix2_at(m, p + i * stride);
            }
            r[i] = m[0], r[i + 1] = m[1];
        }
    }
}

} // namespace ps_resident

#endif
