/* What encoder/split/rows.cu's kernels are made of: a layer's tensors, a warpgroup's 64 rows in shared memory and in registers,
 * their products, dropout and LayerNorm's gradient, and how a block's shared memory is laid out. */
#ifndef PS_KERNELS_CUDA_ENCODER_SPLIT_ROWS_CUH
#define PS_KERNELS_CUDA_ENCODER_SPLIT_ROWS_CUH

#include "kernels/cuda/encoder/split/pieces.cuh"
#include "kernels/cuda/encoder/streamed/float_device.cuh"
#include "kernels/cuda/tile/activation.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

namespace PS_REAL16_SPACE
{

struct rows_layer {
    int64_t rows; /* R */
    int f;
    float epsilon;
    const uint8_t *halves, *words;           /* the layer's pieces */
    const float *b_qkv, *b_o, *b_1, *b_2;    /* b_qkv and b_1 with beta's share */
    const float *u;                          /* [R, d] */
    __half *xhat1, *qkv, *merged, *xhat2;    /* [R, d], [R, 3d], [R, d], [R, d]; xhat and rstd NULL: nothing is kept */
    float *rstd1, *rstd2, *logsum, *y;       /* [R]; attention's, [S, h, N]; [R, d] */
    const float *dy, *d_qkv;                 /* [R, d], [R, 3d] */
    float *du;                               /* the gradient of the residual stream, then u's; may be dy */
    __half *hidden;                          /* [R, f]: what W_2 is multiplied with, */
    float *d_hidden;                         /* and the gradient entering W_1 */
    float *masked_2, *masked_o, *d_merged;   /* [R, d]: gradients entering W_2 and W_o, and that of merged */
    struct ps_dropout after_o, gelu, output; /* after W_o, after gelu, after W_2 */
    /* What they keep, drawn by ln1_qkv: quad_bits of 32 columns a word, [R, 4], [R, f / 32], [R, 4]. */
    uint32_t *kept_o, *kept_gelu, *kept_output;
};

/* ---- a warpgroup's rows ----
 *
 * Sums of products: c[n][2 i + e] is row 16 w + g + 8 i, column spread(8 n + 2 q + e), of warp w and lane 4 g + q (`seat`): of each
 * 16 columns, sums n = 2 m and 2 m + 1, a lane has columns 16 m + 4 q + 0 .. 3. Left operands lie in panels, of fp16 two of 64
 * columns, of tf32 four of 32. By rows: a warp takes four of its 16 at a time, lane 8 r + c has columns 4 c + 32 j + 0 .. 3.
 */

struct seat {
    int lane, g, q, warp, group; /* the warp in its warpgroup; the warpgroup */
    __device__ __forceinline__ seat()
    {
        const int all = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* a uniform register */
        lane = (int)threadIdx.x % 32;
        g = lane / 4;
        q = lane % 4;
        warp = all % 4;
        group = all / 4;
    }
    __device__ __forceinline__ int row(int i) const
    {
        return 16 * warp + g + 8 * i;
    }
    /* The lane's row of a pass by rows. */
    __device__ __forceinline__ int passing(int pass) const
    {
        return 16 * warp + 4 * pass + lane / 8;
    }
    /* What follows from the lane's place is found anew: kept through the tiles it would drive sums out of registers. */
    __device__ __forceinline__ void refresh()
    {
        asm volatile("" : "+r"(lane), "+r"(g), "+r"(q));
    }
    /* Of the warpgroup's threads. */
    __device__ __forceinline__ void sync() const
    {
        ps_barrier(1 + group, 128);
    }
};

/* Where the lane's columns 16 m + 4 q .. of its row i lie in panels, BYTES of them: of fp16 8, of tf32 16. */
template <int BYTES> struct fours_place {
    uint32_t base;
    __device__ __forceinline__ fours_place(uint32_t panels, const seat &at)
        : base(panels + at.row(0) * 128 + ((at.q / (16 / BYTES) ^ at.g) << 4) + at.q % (16 / BYTES) * BYTES)
    {
    }
    __device__ __forceinline__ uint32_t of(int m, int i) const
    {
        return (base ^ m % (32 / BYTES) * (4 * BYTES)) + m / (32 / BYTES) * PANEL_BYTES + i * 1024;
    }
};

static __device__ __forceinline__ void put_shared(uint32_t address, uint2 v)
{
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

static __device__ __forceinline__ void put_shared(uint32_t address, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

static __device__ __forceinline__ void put_shared(uint32_t address, float4 v)
{
    put_shared(address, make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)));
}

/* To global memory, in one piece: left to itself the compiler takes sums apart again, four times as many stores. */
static __device__ __forceinline__ void put_global(float *to, float4 v)
{
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

static __device__ __forceinline__ void put_global(__half *to, uint2 v)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}

static __device__ __forceinline__ uint2 get_shared(uint32_t address)
{
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ uint2 as_halves(const float4 &v)
{
    return make_uint2(ps_pack<ps_fp16>(&v.x), ps_pack<ps_fp16>(&v.z));
}

static __device__ __forceinline__ float4 as_floats(const uint2 &v)
{
    float4 r;
    ps_unpack<ps_fp16>(&r.x, v.x);
    ps_unpack<ps_fp16>(&r.z, v.y);
    return r;
}

static __device__ __forceinline__ float4 as_operand(const float4 &v)
{
    return make_float4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
}

/* The lane's four columns of 16. */
template <int N> static __device__ __forceinline__ float4 four(const float (&c)[N][4], int m, int i)
{
    return make_float4(c[2 * m][2 * i], c[2 * m][2 * i + 1], c[2 * m + 1][2 * i], c[2 * m + 1][2 * i + 1]);
}

/* Row r, columns 4 c + 32 j, of panels of tf32. */
static __device__ __forceinline__ uint32_t word_row(int row, int j, const seat &at)
{
    return (uint32_t)(j * PANEL_BYTES + row * 128 + ((at.lane % 8 ^ row % 8) << 4));
}

/* The same of fp16. */
static __device__ __forceinline__ uint32_t half_row(int row, int j, const seat &at)
{
    return (uint32_t)(j / 2 * PANEL_BYTES + row * 128 + (((at.lane % 8 / 2 + j % 2 * 4) ^ row % 8) << 4) + at.lane % 2 * 8);
}

/* Row r, 16 bytes of fp16: columns 8 c + 64 p. */
static __device__ __forceinline__ uint32_t half_unit(int row, int p, const seat &at)
{
    return (uint32_t)(p * PANEL_BYTES + row * 128 + ((at.lane % 8 ^ row % 8) << 4));
}

/* The lane's part of a row; zero where the row does not exist. */
static __device__ __forceinline__ void take_row(float4 (&v)[4], const float *from, int ld, int row, int count, const seat &at)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        v[j] = row < count ? *(const float4 *)(from + (int64_t)row * ld + at.lane % 8 * 4 + 32 * j) : make_float4(0, 0, 0, 0);
    }
}

/* How many of the warpgroup's rows from row0 on there are: none, if negative. */
static __device__ __forceinline__ int rows_from(int64_t rows, int64_t row0)
{
    return (int)(rows - row0 < ROWS ? rows - row0 : ROWS);
}

/* The warp's 16 rows of [R, columns], all asked for before the first is used: lane's part of row 16 w + 4 pass + lane / 8. row0:
 * the warpgroup's first. */
static __device__ __forceinline__ void take_rows(float4 (&v)[4][4], const float *from, int columns, int64_t row0, int64_t rows,
                                                 const seat &at)
{
#pragma unroll
    for (int pass = 0; pass < 4; pass++) {
        take_row(v[pass], from + row0 * columns, columns, at.passing(pass), rows_from(rows, row0), at);
    }
}

/* Of [R, d] of fp16: units c and c + 8 of those rows. */
static __device__ __forceinline__ void take_rows(uint4 (&v)[4][2], const __half *from, int64_t row0, int64_t rows, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = at.passing(i / 2);
        v[i / 2][i % 2] = row < rows_from(rows, row0) ? *(const uint4 *)(from + (row0 + row) * D + at.lane % 8 * 8 + i % 2 * 64)
                                                      : make_uint4(0, 0, 0, 0);
    }
}

/* Those as operands. Between the warpgroup's barriers. */
static __device__ __forceinline__ void put_rows(uint32_t panels, const float4 (&v)[4][4], const seat &at)
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        put_shared(panels + word_row(at.passing(i / 4), i % 4, at), as_operand(v[i / 4][i % 4]));
    }
}

static __device__ __forceinline__ void put_rows(uint32_t panels, const uint4 (&v)[4][2], const seat &at)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        put_shared(panels + half_unit(at.passing(i / 2), i % 2, at), v[i / 2][i % 2]);
    }
}

/* The same rows on their way to panels until ps_copy_wait; zeros where there are none. */
template <typename T>
static __device__ __forceinline__ void copy_rows(uint32_t panels, const T *from, int64_t row0, int64_t rows, const seat &at)
{
    constexpr int UNIT = 16 / (int)sizeof(T); /* elements */
#pragma unroll
    for (int pass = 0; pass < 4; pass++) {
        const int row = at.passing(pass);
        const bool here = row < rows - row0;
        const T *const part = from + (here ? row0 + row : 0) * D + at.lane % 8 * UNIT;
#pragma unroll
        for (int j = 0; j < D / UNIT / 8; j++) {
            ps_copy_async_part(panels + (sizeof(T) == 2 ? half_unit(row, j, at) : word_row(row, j, at)), part + 8 * UNIT * j,
                               here ? 16 : 0);
        }
    }
}

/* c = left piece, 128 deep, 64 columns, of fp16 or tf32. Under way until ps_wgmma_wait, as all products here. */
template <bool HALF> static __device__ __forceinline__ void multiply_columns(float (&c)[8][4], uint32_t left, uint32_t piece)
{
    const uint32_t a = ps_wgmma_place(left);
#pragma unroll
    for (int k = 0; k < (HALF ? 8 : 16); k++) {
        const int further = k / 4 * PANEL_BYTES + k % 4 * 32;
        const uint64_t left_at = ps_wgmma_operand(a, further), piece_at = ps_wgmma_operand(piece, further);
        HALF ? ps_wgmma<ps_fp16>(c, left_at, piece_at, k > 0) : ps_wgmma<float>(c, left_at, piece_at, k > 0);
    }
}

/* c (add: +=) left piece, 64 deep, 128 columns: left two panels of tf32, */
static __device__ __forceinline__ void multiply_rows(float (&c)[16][4], uint32_t left, uint32_t piece, int add)
{
    const uint32_t a = ps_wgmma_place(left);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        ps_wgmma<float>(c, ps_wgmma_operand(a, k / 4 * PANEL_BYTES + k % 4 * 32),
                        ps_wgmma_operand(piece, k / 4 * (D * 128) + k % 4 * 32), add | k);
    }
}

/* or sums of 64 columns as they came out, of tf32 (K 8) or fp16 (K 4). */
template <int K>
static __device__ __forceinline__ void multiply_rows(float (&c)[16][4], const uint32_t (&left)[K][4], uint32_t piece, int add)
{
#pragma unroll
    for (int k = 0; k < K; k++) {
        const uint64_t piece_at = ps_wgmma_operand(piece, k / 4 * (D * 128) + k % 4 * 32);
        K == 4 ? ps_wgmma<ps_fp16>(c, left[k], piece_at, add | k) : ps_wgmma<float>(c, left[k], piece_at, add | k);
    }
}

/* c = left times a square weight: the ring's next two pieces, each its half of c's columns. */
template <bool HALF, typename RING>
static __device__ __forceinline__ void multiply_square(float (&c)[2][8][4], uint32_t left, RING &ring)
{
    const uint32_t first = ring.take(), second = ring.take();
    ps_wgmma_begin();
    multiply_columns<HALF>(c[0], left, first);
    multiply_columns<HALF>(c[1], left, second);
    ps_wgmma_commit();
    ps_wgmma_wait<0>();
    ps_pin(c[0]);
    ps_pin(c[1]);
    ring.release();
    ring.release();
}

/* The factor of sum t of four, column e of its two, by quad_bits' word of those 32 columns, shifted by 2 q. */
static __device__ __forceinline__ float kept_factor(uint32_t mask, int t, int e, float scale)
{
    return mask >> (t / 2 * 8 + t % 2 + 16 * e) & 1 ? scale : 0.0f;
}

/* c = drop(c), 32 columns of the lane's row i: those of sums n .. n + 3. */
template <int N>
static __device__ __forceinline__ void drop_32(float (&c)[N][4], int n, int i, uint32_t bits, float scale, const seat &at)
{
    const uint32_t mask = bits >> 2 * at.q;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        c[n + t][2 * i] *= kept_factor(mask, t, 0, scale);
        c[n + t][2 * i + 1] *= kept_factor(mask, t, 1, scale);
    }
}

/* c = drop(c), the words' columns of each of the lane's rows. */
template <int N, typename V>
static __device__ __forceinline__ void drop(float (&c)[N][4], const V (&kept)[2], float scale, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        drop_32(c, 0, i, kept[i].x, scale, at);
        drop_32(c, 4, i, kept[i].y, scale, at);
        if constexpr (N == 16) {
            drop_32(c, 8, i, kept[i].z, scale, at);
            drop_32(c, 12, i, kept[i].w, scale, at);
        }
    }
}

/* Words of the lane's rows, from the warpgroup's first row and a first word on; all are kept where nothing drops. */
template <typename V>
static __device__ __forceinline__ void take_kept(V (&kept)[2], const uint32_t *from, int width, bool drops, int count,
                                                 const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (sizeof(V) == 8) {
            kept[i] = drops && at.row(i) < count ? *(const uint2 *)(from + at.row(i) * width) : make_uint2(~0u, ~0u);
        } else {
            kept[i] = drops && at.row(i) < count ? *(const uint4 *)(from + at.row(i) * width) : make_uint4(~0u, ~0u, ~0u, ~0u);
        }
    }
}

/* Draws the words of rows `words` long, of the warpgroup's first row on. */
static __device__ __forceinline__ void draw_words(uint32_t *kept, const struct ps_dropout &dropout, int64_t row0, int words,
                                                  uint64_t step, int count, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll 1
        for (int first = 0; first < words; first += 4) {
            uint32_t own = 0;
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const uint64_t block = ((uint64_t)(row0 + at.row(i)) * words + first + m) * 4 + at.q;
                const uint32_t bits = quad_bits(dropout, step, (uint32_t)block, at.q);
                own = at.q == m ? bits : own;
            }
            if (at.row(i) < count && first + at.q < words) {
                kept[at.row(i) * words + first + at.q] = own;
            }
        }
    }
}

/* Of the lane's rows of a tensor [R, d], from the warpgroup's first row on: columns as sums have them. */
template <typename T, typename V> struct row_fours {
    V of[8][2];
    __device__ __forceinline__ row_fours(const T *from, int count, const seat &at)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const V *const row = (const V *)(from + at.row(i) * D + 4 * at.q);
#pragma unroll
            for (int m = 0; m < 8; m++) {
                of[m][i] = at.row(i) < count ? row[4 * m] : V();
            }
        }
    }
};

typedef row_fours<float, float4> float_fours;
typedef row_fours<__half, uint2> half_fours;

/* c, the gradient of xhat, becomes residual + LayerNorm's gradient of it: rstd (c - mean(c) - xhat mean(c xhat)). residual and
 * xhat: columns 16 m + 4 q .. of row i. */
template <typename R, typename X>
static __device__ __forceinline__ void normalise_gradient(float (&c)[16][4], const float (&rstd)[2], R residual, X xhat)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float mean = 0, slope = 0;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const float4 x = xhat(m, i), v = four(c, m, i);
            mean += (v.x + v.y) + (v.z + v.w);
            slope += v.x * x.x + v.y * x.y + v.z * x.z + v.w * x.w;
        }
        mean = ps_group_sum<4>(mean) * (1.0f / D);
        slope = ps_group_sum<4>(slope) * (1.0f / D);
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const float4 x = xhat(m, i), old = residual(m, i);
            float *const low = &c[2 * m][2 * i], *const high = &c[2 * m + 1][2 * i];
            low[0] = old.x + rstd[i] * (low[0] - mean - x.x * slope);
            low[1] = old.y + rstd[i] * (low[1] - mean - x.y * slope);
            high[0] = old.z + rstd[i] * (high[0] - mean - x.z * slope);
            high[1] = old.w + rstd[i] * (high[1] - mean - x.w * slope);
        }
    }
}

/* rstd of the lane's rows. */
static __device__ __forceinline__ void take_rstd(float (&rstd)[2], const float *from, int count, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rstd[i] = at.row(i) < count ? from[at.row(i)] : 0.0f;
    }
}

/* c += b, of the first sums' columns on. */
template <int N> static __device__ __forceinline__ void add_bias(float (&c)[N][4], const float *b, const seat &at)
{
#pragma unroll
    for (int m = 0; m < N / 2; m++) {
        const float4 v = *(const float4 *)(b + 16 * m + 4 * at.q);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            c[2 * m][2 * i] += v.x;
            c[2 * m][2 * i + 1] += v.y;
            c[2 * m + 1][2 * i] += v.z;
            c[2 * m + 1][2 * i + 1] += v.w;
        }
    }
}

/* Sums as a left operand in registers, of tf32, */
static __device__ __forceinline__ void as_left(uint32_t (&left)[8][4], const float (&c)[8][4])
{
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            left[n][k] = ps_round_up(c[n][k / 2 + k % 2 * 2]);
        }
    }
}

/* of fp16. */
static __device__ __forceinline__ void as_left(uint32_t (&left)[4][4], const float (&c)[8][4])
{
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const float *const pair = &c[k / 4 * 2 + k % 4 / 2][k % 2 * 2];
        left[k / 4][k % 4] = ps_pack<ps_fp16>(pair);
    }
}

/* Copies a vector to shared memory; all threads, before the ring's barrier. */
static __device__ __forceinline__ void stage_vector(float *to, const float *from, int count)
{
    for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) {
        to[i] = from[i];
    }
}

/* To rows of `ld`, from the warpgroup's first row and first column on: fp32, or fp16. */
template <int N, typename T>
static __device__ __forceinline__ void keep_sums(T *to, int ld, const float (&c)[N][4], int count, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        T *const row = to + (int64_t)at.row(i) * ld + 4 * at.q;
#pragma unroll
        for (int m = 0; m < N / 2; m++) {
            if (at.row(i) < count) {
                if constexpr (sizeof(T) == 2) {
                    put_global(row + 16 * m, as_halves(four(c, m, i)));
                } else {
                    put_global(row + 16 * m, four(c, m, i));
                }
            }
        }
    }
}

/* ---- what the kernels have in common ---- */

static __device__ __forceinline__ void fewer_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)FEW_REGISTERS));
}

static __device__ __forceinline__ void more_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)REGISTERS));
}

extern __shared__ __align__(1024) uint8_t row_memory[];

/* Shared memory: the warpgroups' left operands, LEFT_BYTES each; the ring of SLOTS; vectors; the ring's barriers. */
template <int LEFT_BYTES, int SLOTS, int SLOT_BYTES, int VECTORS> struct row_kernel {
    static constexpr int LEFT = GROUPS * LEFT_BYTES, VECTOR = LEFT + SLOTS * SLOT_BYTES, BARRIERS = VECTOR + VECTORS * 4;
    static constexpr size_t SHARED = BARRIERS + 16 * SLOTS;
    static_assert(SHARED <= 232448, "a block's");
    typedef piece_ring<SLOTS, SLOT_BYTES, BARRIERS - LEFT> ring_of;

    static __device__ __forceinline__ uint32_t left(const seat &at)
    {
        return ps_shared_address(row_memory) + at.group * LEFT_BYTES;
    }
    static __device__ __forceinline__ float *vectors()
    {
        return (float *)(row_memory + VECTOR);
    }
    static __device__ __forceinline__ ring_of ring(int pieces)
    {
        return ring_of(ps_shared_address(row_memory) + LEFT, GROUPS * 4, pieces);
    }
};

static __host__ __device__ __forceinline__ int tiles_of(int64_t rows, int tile)
{
    return (int)((rows + tile - 1) / tile);
}

/* Of this block. */
static __device__ __forceinline__ int turns_of(int64_t rows)
{
    return (tiles_of(rows, TILE) - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
}

/* Brings rows [.., columns] of a tile to L2, while the warpgroups work on the tile before. */
template <typename T> static __device__ __forceinline__ void prefetch_tile(int64_t tile, int64_t rows, const T *from, int columns)
{
    const int64_t row0 = tile * TILE;
    if (row0 < rows) {
        const uint32_t bytes = (uint32_t)(rows - row0 < TILE ? rows - row0 : TILE) * columns * (uint32_t)sizeof(T);
        ps_bulk_prefetch(from + row0 * columns, (bytes + 15) & ~15u); /* padded_rows are there */
    }
}

} // namespace PS_REAL16_SPACE

#endif
