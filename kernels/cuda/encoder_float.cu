/* Level `layer` with fp32 activations: tf32 rounds the operands of products to nearest, fp32 splits each in two (ps_mma_split).
 * d_model 64 or 128, heads of 8, 16 or 32 columns, N <= 64, d_ff a multiple of 128.
 *
 * A block of 16 warps takes a tile of whole sequences, up to 64 (d 64) or 128 rows, through all layers; a layer's rows pass through
 * three buffers of shared memory. By rows (LayerNorm, residual, dropout after W_o and W_2) a warp has whole rows; in products 4 x 4
 * warps share a tile's rows and columns, 16 or 32 rows a warp. Weights, 0.4 to 1 MB a layer with their transposes, do not fit
 * beside that: a kernel before (`pack`) lays them out as lanes read them, 16 bytes each, and warps read them past shared memory,
 * from L2 and what it leaves of L1, a step of 16 rows ahead. q, k and v come by groups of heads, hidden columns 128 at a time.
 *
 * Backward recomputes softmax's exponentials only: what fits no block is read again from memory (xhat of both LayerNorms, q, k, v,
 * the hidden columns before gelu), and gradients take their places or lie beside them. Weights' gradients are products of their own
 * behind it, over all rows: with G = xhat' dy and s the column sums of dy, that of a weight behind LayerNorm is gamma_i G_ij +
 * beta_i s_j, gamma's own is sum_j W_ij G_ij and beta's sum_j W_ij s_j, so that no sum over rows is formed elsewhere.
 *
 * Counts a layer, R rows. Forward 8 R d^2 + 4 R d f + 4 R N d flops, R exponentials a head and column, 4 R (8 d + f) bytes written
 * (R d and the logarithms in inference) and 4 R d read; weights 4 (4 d^2 + 2 d f) bytes a tile from L2. Backward twice the flops of
 * products with weights and 14 R N d; 4 R (9 d + 2 f) bytes read, 4 R (6 d + 2 f) written. Weights' gradients as many flops as
 * forward's products with weights, 4 R (8 d + 2 f) bytes read. weather (R 112,896, d 128, f 256): forward 30 GFLOP, 0.58 GB and
 * 0.47 GB of weights; seed28k (6,400, 64, 256): 0.6 GFLOP, 20 MB. */
#include "kernels/cuda/encoder_float.cuh"

#include "kernels/cuda/warp_mma.cuh"

namespace PS_REAL16_SPACE
{

#ifdef PS_COMPILE_FP32
static constexpr bool exact = true;
#else
static constexpr bool exact = false;
#endif

enum { WARPS = 16, THREADS = WARPS * 32, ACROSS = 4 /* warps along a tile's columns */, HIDDEN = 128 /* columns at once */ };

/* Sizes for d columns. */
template <int D> struct tile_of {
    static constexpr int MT = D / 64, ROWS = 64 * MT; /* tiles of 16 rows a warp; rows of a block */
    static constexpr int GROUP = D == 128 ? 32 : D;   /* columns of q, of k and of v at once */
    static constexpr int LD = 3 * GROUP;
    static constexpr int A = ROWS * D, B = ROWS * HIDDEN, C = ROWS * (LD > HIDDEN ? LD : HIDDEN); /* floats of the buffers */
    static constexpr int SUMS = 2 * GROUP / 8 * ROWS; /* softmax's sums and those of A dA, a group's: backward */
    /* By rows: lanes and rows of a warp's pass, passes. */
    static constexpr int LANES = D / 4, TOGETHER = 32 / LANES, PASSES = ROWS / WARPS / TOGETHER;
};

struct floats {
    int64_t rows, tiles; /* R */
    int n, tile_sequences, heads, f, layers;
    float epsilon, scale, scale_log2e; /* 1 / sqrt(e), that times log2(e) */
    const float *parameters;
    struct ps_encoder_layout at;
    const uint4 *packed; /* [layers, 2, ..]: as products read them, then their transposes: see pack */
    float *stream;       /* [layers + 1, R, d] */
    /* A layer's, `kept_layer` floats apart: [R, d], [R, 3d], [R, d], [R, d], [R, f], [heads, R] (log2), [R], [R]. xhat1 NULL:
     * nothing is kept. Backward leaves the gradients of q, k and v in qkv, and in hidden what W_2 was multiplied with. */
    float *xhat1, *qkv, *merged, *xhat2, *hidden, *logsum, *rstd1, *rstd2;
    float *d_hidden, *masked_o, *masked_2; /* [R, f], [R, d], [R, d]: gradients entering W_1, W_o, W_2 */
    int64_t kept_layer;
    const float *dy; /* [R, d] */
    float *du;
    struct ps_dropout dropout;
};

/* ---- operands ----
 *
 * In shared memory a matrix's columns are moved by rows, within each 32: the column of row r is column ^ turn(r). So lanes that
 * read pairs of columns of 4 neighbouring rows, or one column of rows 0, 2, 4, 6 (1, 3, 5, 7) meet no bank twice. */

static __device__ __forceinline__ int turn(int row)
{
    return ((row & 3) ^ (row >> 2 & 1)) << 3;
}

/* x as an operand in memory or registers. */
static __device__ __forceinline__ float operand(float x)
{
    return exact ? x : __uint_as_float(ps_round_up(x));
}

/* c += a b of 8 terms: pairs of columns 2q, 2q + 1 of rows g and g + 8 of a, rows 2q, 2q + 1 of column g of b. */
static __device__ __forceinline__ void multiply_add(float (&c)[4], float2 a, float2 a8, float b0, float b1)
{
    const float a_of[4] = {a.x, a8.x, a.y, a8.y}, b_of[2] = {b0, b1};
    uint32_t a_hi[4], a_lo[4], b_hi[2], b_lo[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (exact) {
            ps_split<true>(a_hi[i], a_lo[i], a_of[i]);
        } else {
            a_hi[i] = __float_as_uint(a_of[i]);
            a_lo[i] = 0;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (exact) {
            ps_split<true>(b_hi[i], b_lo[i], b_of[i]);
        } else {
            b_hi[i] = __float_as_uint(b_of[i]);
            b_lo[i] = 0;
        }
    }
    ps_mma_split<exact, true>(c, a_hi, a_lo, b_hi, b_lo);
}

struct lane_place {
    int lane, g, q, warp, down, across; /* the warp's place among 4 x 4 */
    __device__ __forceinline__ lane_place()
    {
        lane = (int)threadIdx.x % 32;
        warp = (int)threadIdx.x / 32;
        g = lane / 4;
        q = lane % 4;
        down = warp / ACROSS;
        across = warp % ACROSS;
    }
};

template <int MT, int NT> static __device__ __forceinline__ void clear(float (&c)[MT][NT][4])
{
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        c[i / 4 / NT][i / 4 % NT][i % 4] = 0;
    }
}

/* c += a b over STEPS of 16: a [rows, LD] in shared memory; b: the lane's first fragment, NT of them `apart`, a step's `step` from
 * the next one's (in fragments). */
template <int STEPS, int MT, int NT, int LD>
static __device__ __forceinline__ void multiply(float (&c)[MT][NT][4], const float *a, const uint4 *b, int step,
                                                const int (&apart)[NT], const lane_place &at)
{
    const int moved = turn(at.g);
    a += (at.down * 16 * MT + at.g) * LD + 2 * at.q;
    uint4 next[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        next[t] = b[apart[t]];
    }
#pragma unroll 2
    for (int k = 0; k < STEPS; k++) {
        uint4 w[NT];
#pragma unroll
        for (int t = 0; t < NT; t++) {
            w[t] = next[t];
        }
        if (k + 1 < STEPS) {
            b += step;
#pragma unroll
            for (int t = 0; t < NT; t++) {
                next[t] = b[apart[t]];
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float *from = a + ((k * 16 + half * 8) ^ moved);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const float2 low = *(const float2 *)(from + m * 16 * LD), high = *(const float2 *)(from + (m * 16 + 8) * LD);
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    multiply_add(c[m][t], low, high, __uint_as_float(half ? w[t].z : w[t].x),
                                 __uint_as_float(half ? w[t].w : w[t].y));
                }
            }
        }
    }
}

/* The same with neighbouring fragments of a packed weight of `width` columns, from step `first` and column `column` of its on. */
template <int STEPS, int MT, int NT, int LD>
static __device__ __forceinline__ void multiply(float (&c)[MT][NT][4], const float *a, const uint4 *weight, int width, int first,
                                                int column, const lane_place &at)
{
    int apart[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        apart[t] = t * 32;
    }
    multiply<STEPS, MT, NT, LD>(c, a, weight + (first * (width / 8) + column / 8 + at.across * NT) * 32 + at.lane, width / 8 * 32,
                                apart, at);
}

/* c to rows of shared memory, as it is. */
template <int MT, int NT, int LD>
static __device__ __forceinline__ void put(float *to, const float (&c)[MT][NT][4], bool as_operand, const lane_place &at)
{
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        float *row = to + (at.down * 16 * MT + i * 8 + at.g) * LD;
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const float low = c[i / 2][t][i % 2 * 2], high = c[i / 2][t][i % 2 * 2 + 1];
            float2 *p = (float2 *)(row + (((at.across * NT + t) * 8) ^ turn(at.g)) + 2 * at.q);
            *p = as_operand ? make_float2(operand(low), operand(high)) : make_float2(low, high);
        }
    }
}

/* ---- packed weights ---- */

/* Fragments of a layer: W_qkv [d, 3d], W_o [d, d], W_1 [d, f], W_2 [f, d]; then W_2', W_1', W_o', W_qkv'. That of 16 rows (step), 8
 * columns and a lane: rows 2q, 2q + 1, 2q + 8, 2q + 9 of column g, rounded in tf32. */
struct packed_places {
    int w_qkv, w_o, w_1, w_2, w_2t, w_1t, w_ot, w_qkvt, all;
};

static __host__ __device__ __forceinline__ struct packed_places places_of(int d, int f)
{
    struct packed_places p = {};
    p.w_o = 3 * d * d / 4;
    p.w_1 = p.w_o + d * d / 4;
    p.w_2 = p.w_1 + d * f / 4;
    p.w_2t = p.w_2 + f * d / 4;
    p.w_1t = p.w_2t + f * d / 4;
    p.w_ot = p.w_1t + d * f / 4;
    p.w_qkvt = p.w_ot + d * d / 4;
    p.all = p.w_qkvt + 3 * d * d / 4;
    return p;
}

/* weights: the flat ones. One fragment a thread, a layer to each blockIdx.y; count: fragments of a layer, transposes or not. 4
 * bytes read and written for each weight and direction. */
static __global__ void __launch_bounds__(256)
    pack(uint4 *packed, const float *weights, const struct ps_encoder_layout at, int d, int f, int count)
{
    ps_grid_begin();
    const struct packed_places p = places_of(d, f);
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) {
        return;
    }
    const bool transposed = i >= p.w_2t;
    int64_t from;
    int first, width; /* of the product's right side */
    if (!transposed) {
        first = i >= p.w_2 ? p.w_2 : i >= p.w_1 ? p.w_1 : i >= p.w_o ? p.w_o : 0;
        from = i >= p.w_2 ? at.w_2 : i >= p.w_1 ? at.w_1 : i >= p.w_o ? at.w_o : at.w_qkv;
        width = i >= p.w_2 ? d : i >= p.w_1 ? f : i >= p.w_o ? d : 3 * d;
    } else {
        first = i >= p.w_qkvt ? p.w_qkvt : i >= p.w_ot ? p.w_ot : i >= p.w_1t ? p.w_1t : p.w_2t;
        from = i >= p.w_qkvt ? at.w_qkv : i >= p.w_ot ? at.w_o : i >= p.w_1t ? at.w_1 : at.w_2;
        width = i >= p.w_ot ? d : i >= p.w_1t ? d : f;
    }
    /* Of a transposed weight [width, length] the product's rows are its columns. */
    const int length = !transposed ? 0 : i >= p.w_qkvt ? 3 * d : i >= p.w_ot ? d : i >= p.w_1t ? f : d;
    const int fragment = i - first, lane = fragment % 32, tile = fragment / 32;
    const int row = tile / (width / 8) * 16 + lane % 4 * 2, column = tile % (width / 8) * 8 + lane / 4;
    const float *w = weights + blockIdx.y * at.matrix_stride + from;
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int r = row + j / 2 * 8 + j % 2;
        v[j] = transposed ? w[column * length + r] : w[r * width + column];
    }
    packed[(int64_t)blockIdx.y * p.all + i] = make_uint4(__float_as_uint(operand(v[0])), __float_as_uint(operand(v[1])),
                                                         __float_as_uint(operand(v[2])), __float_as_uint(operand(v[3])));
}

/* ---- by rows ----
 *
 * A warp's rows are neighbours; a lane has four columns of a row in each pass. Two passes are drawn for together. */

template <int D> struct row_place {
    typedef tile_of<D> T;
    int row, column; /* of pass 0 */
    __device__ __forceinline__ explicit row_place(const lane_place &at)
    {
        row = at.warp * T::TOGETHER * T::PASSES + at.lane / T::LANES;
        column = at.lane % T::LANES * 4;
    }
    __device__ __forceinline__ int of(int pass) const
    {
        return row + pass * T::TOGETHER;
    }
    /* Where the lane's columns of a row lie in a buffer of D columns. */
    __device__ __forceinline__ int in(int r) const
    {
        return r * D + (column ^ turn(r));
    }
};

static __device__ __forceinline__ struct ps_dropout at_site(const struct ps_dropout &d, int layer, int which)
{
    struct ps_dropout moved = d;
    moved.site += 3 * (uint32_t)layer + (uint32_t)which;
    return moved;
}

/* v[2][4], rows first and second of all, dropped. */
template <int D>
static __device__ __forceinline__ void drop_rows(float (&v)[2][4], const struct ps_dropout &dropout, int64_t first, int64_t second,
                                                 int column)
{
    uint32_t words[2][2];
    ps_draw_pair(dropout, dropout.state->step, (uint64_t)(first * D + column) / 8, (uint64_t)(second * D + column) / 8, words[0],
                 words[1]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] = ps_dropped(dropout, ps_pair_draw(words[i / 4], i % 4), v[i / 4][i % 4]);
    }
}

static __device__ __forceinline__ void take4(float (&v)[4], const float *from)
{
    ps_load<4>(v, from);
}

/* Forward: y = residual + drop(a + bias), to `out`; then LayerNorm's xhat to memory and what follows it to a. Tensors are of the
 * tile's first row on. bias NULL: y = residual, which is not written again; gamma NULL: no LayerNorm; xhat NULL: it is not kept. */
template <int D>
static __device__ __forceinline__ void
finish_rows(float *a, const float *residual, float *out, const float *bias, const struct ps_dropout &dropout, const float *gamma,
            const float *beta, float *xhat, float *rstd, float epsilon, int64_t row0, int count, const lane_place &at)
{
    typedef tile_of<D> T;
    const row_place<D> p(at);
    float b[4] = {0, 0, 0, 0}, scale[4], shift[4];
    if (bias) {
        take4(b, bias + p.column);
    }
    if (gamma) {
        take4(scale, gamma + p.column);
        take4(shift, beta + p.column);
    }
#pragma unroll 1
    for (int pass = 0; pass < T::PASSES; pass += 2) {
        const int row[2] = {p.of(pass), p.of(pass + 1)};
        float v[2][4] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (bias) {
                take4(v[i], a + p.in(row[i]));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    v[i][j] += b[j];
                }
            }
        }
        if (bias && dropout.threshold) {
            drop_rows<D>(v, dropout, row0 + row[0], row0 + row[1], p.column);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool here = row[i] < count;
            float u[4] = {};
            if (here) {
                take4(u, residual + row[i] * D + p.column);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[i][j] += u[j];
            }
            if (bias && here) {
                ps_store<4>(out + row[i] * D + p.column, v[i]);
            }
            if (gamma) {
                const float mean = ps_group_sum<T::LANES>(v[i][0] + v[i][1] + v[i][2] + v[i][3]) * (1.0f / D);
                float squares = 0;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    v[i][j] -= mean;
                    squares += v[i][j] * v[i][j];
                }
                const float r = rsqrtf(fmaf(ps_group_sum<T::LANES>(squares), 1.0f / D, epsilon));
                float y[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    v[i][j] *= r;
                    y[j] = here ? operand(fmaf(v[i][j], scale[j], shift[j])) : 0.0f;
                }
                ps_store<4>(a + p.in(row[i]), y);
                if (xhat && here) {
                    ps_store<4>(xhat + row[i] * D + p.column, v[i]);
                    if (p.column == 0) {
                        rstd[row[i]] = r;
                    }
                }
            }
        }
    }
}

/* Backward: g = from + LayerNorm's gradient of a (gamma NULL: g = from), to `du`; then drop'(g) to `masked` and, as operand, to a
 * (masked NULL: neither). from may be du. */
template <int D>
static __device__ __forceinline__ void gradient_rows(float *a, const float *from, float *du, const float *gamma, const float *xhat,
                                                     const float *rstd, const struct ps_dropout &dropout, float *masked,
                                                     int64_t row0, int count, const lane_place &at)
{
    typedef tile_of<D> T;
    const row_place<D> p(at);
    float scale[4];
    if (gamma) {
        take4(scale, gamma + p.column);
    }
#pragma unroll 1
    for (int pass = 0; pass < T::PASSES; pass += 2) {
        const int row[2] = {p.of(pass), p.of(pass + 1)};
        float g[2][4] = {}, x[2][4] = {}, r[2] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row[i] < count) {
                take4(g[i], from + row[i] * D + p.column);
                if (gamma) {
                    take4(x[i], xhat + row[i] * D + p.column);
                    r[i] = rstd[row[i]];
                }
            }
        }
        if (gamma) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float d[4], sum = 0, dot = 0;
                take4(d, a + p.in(row[i]));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    d[j] *= scale[j];
                    sum += d[j];
                    dot += d[j] * x[i][j];
                }
                sum = ps_group_sum<T::LANES>(sum) * (1.0f / D);
                dot = ps_group_sum<T::LANES>(dot) * (1.0f / D);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    g[i][j] += r[i] * (d[j] - sum - x[i][j] * dot);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row[i] < count) {
                ps_store<4>(du + row[i] * D + p.column, g[i]);
            }
        }
        if (masked) {
            if (dropout.threshold) {
                drop_rows<D>(g, dropout, row0 + row[0], row0 + row[1], p.column);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool here = row[i] < count;
                if (here) {
                    ps_store<4>(masked + row[i] * D + p.column, g[i]);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    g[i][j] = here ? operand(g[i][j]) : 0.0f;
                }
                ps_store<4>(a + p.in(row[i]), g[i]);
            }
        }
    }
}

/* ---- hidden columns ---- */

/* Which of a row's 32 hidden columns from `element` on (of the whole tensor) are kept, moved down by q: of tile t the lane's
 * columns 2q and 2q + 1 when bits 4t and 4t + 16 are set. Each lane draws 8 columns. */
static __device__ __forceinline__ uint32_t hidden_mask(const struct ps_dropout &d, uint64_t step, uint64_t element, int q)
{
    const struct ps_block block = ps_philox(d.seed, (uint32_t)(element / 8 + (uint64_t)q), d.site, step);
    const uint32_t below = (d.threshold - 1) * 0x10001u, minus_below = (0x10000u - (d.threshold - 1)) % 0x10000u * 0x10001u;
    uint32_t bits = ps_kept2(block.word[0], below, minus_below) + 2 * ps_kept2(block.word[1], below, minus_below) +
                    4 * ps_kept2(block.word[2], below, minus_below) + 8 * ps_kept2(block.word[3], below, minus_below);
    bits <<= 4 * q;
    bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
    bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
    return bits >> q;
}

static __device__ __forceinline__ float kept_scale(uint32_t mask, int t, int i, float scale)
{
    return mask >> (4 * t + 16 * i) & 1 ? scale : 0.0f;
}

enum { HT = HIDDEN / 8 / ACROSS }; /* a warp's tiles of 8 of the hidden columns at hand */

/* From products c of columns `chunk` on of the hidden layer: z = c + bias to memory (hidden NULL: not) and drop(gelu(z)) to h.
 * hidden: of the tile's first row on. */
template <int D>
static __device__ __forceinline__ void hidden_forward(float *h, float (&c)[tile_of<D>::MT][HT][4], const float *bias, float *hidden,
                                                      int f, int chunk, const struct ps_dropout &dropout, int64_t row0, int count,
                                                      const lane_place &at)
{
    constexpr int MT = tile_of<D>::MT;
    const int column = chunk + at.across * (HT * 8);
    const uint64_t step = dropout.threshold ? dropout.state->step : 0;
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        const int row = at.down * 16 * MT + i * 8 + at.g;
        const uint32_t mask =
            dropout.threshold ? hidden_mask(dropout, step, (uint64_t)(row0 + row) * f + column, at.q) : 0xffffffffu;
#pragma unroll
        for (int t = 0; t < HT; t++) {
            const float2 b = *(const float2 *)(bias + column + t * 8 + 2 * at.q);
            float *z = &c[i / 2][t][i % 2 * 2];
            z[0] += b.x;
            z[1] += b.y;
            if (hidden && row < count) {
                *(float2 *)(hidden + (int64_t)row * f + column + t * 8 + 2 * at.q) = make_float2(z[0], z[1]);
            }
            z[0] *= ps_gelu_sigmoid(z[0]) * kept_scale(mask, t, 0, dropout.scale);
            z[1] *= ps_gelu_sigmoid(z[1]) * kept_scale(mask, t, 1, dropout.scale);
        }
    }
    put<MT, HT, HIDDEN>(h, c, true, at);
}

/* From products c, the gradient of what follows dropout: hidden, z, becomes what W_2 was multiplied with; d_hidden and h the
 * gradient of z. */
template <int D>
static __device__ __forceinline__ void hidden_backward(float *h, float (&c)[tile_of<D>::MT][HT][4], float *hidden, float *d_hidden,
                                                       int f, int chunk, const struct ps_dropout &dropout, int64_t row0, int count,
                                                       const lane_place &at)
{
    constexpr int MT = tile_of<D>::MT;
    const int column = chunk + at.across * (HT * 8);
    const uint64_t step = dropout.threshold ? dropout.state->step : 0;
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        const int row = at.down * 16 * MT + i * 8 + at.g;
        const bool here = row < count;
        const int64_t first = (int64_t)row * f + column + 2 * at.q;
        float2 z[HT];
#pragma unroll
        for (int t = 0; t < HT; t++) {
            z[t] = here ? *(const float2 *)(hidden + first + t * 8) : make_float2(0, 0);
        }
        const uint32_t mask =
            dropout.threshold ? hidden_mask(dropout, step, (uint64_t)(row0 + row) * f + column, at.q) : 0xffffffffu;
#pragma unroll
        for (int t = 0; t < HT; t++) {
            float *d = &c[i / 2][t][i % 2 * 2];
            const float keep[2] = {kept_scale(mask, t, 0, dropout.scale), kept_scale(mask, t, 1, dropout.scale)};
            float v[2] = {z[t].x, z[t].y};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float s = ps_gelu_sigmoid(v[j]);
                d[j] *= keep[j] * ps_gelu_slope(v[j], s);
                v[j] *= keep[j] * s;
            }
            if (here) {
                *(float2 *)(hidden + first + t * 8) = make_float2(v[0], v[1]);
                *(float2 *)(d_hidden + first + t * 8) = make_float2(d[0], d[1]);
            }
        }
    }
    put<MT, HT, HIDDEN>(h, c, true, at);
}

/* ---- attention: a job is 16 rows of a sequence and a head ---- */

template <int D, int E> struct job {
    typedef tile_of<D> T;
    static constexpr int HEADS = T::GROUP / E, PARTS = E / 8;
    int head, base, first; /* of the group; the sequence's first row in the tile; the lane's row g in the sequence */
    int row[2];            /* rows g and g + 8 in the tile, kept inside it */
    bool here[2];

    __device__ __forceinline__ job(int i, int n, const lane_place &at)
    {
        const int tiles = (n + 15) / 16, part = i % tiles, rest = i / tiles;
        head = rest % HEADS;
        base = rest / HEADS * n;
        first = part * 16 + at.g;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            here[h] = first + 8 * h < n;
            row[h] = min(base + first + 8 * h, T::ROWS - 1);
        }
    }
    static __device__ __forceinline__ int count(int sequences, int n)
    {
        return sequences * HEADS * ((n + 15) / 16);
    }
};

/* The lane's pair of 8 columns of a row. */
static __device__ __forceinline__ float2 pair_of(const float *from, int ld, int row, int column, const lane_place &at)
{
    return *(const float2 *)(from + row * ld + (column ^ turn(row)) + 2 * at.q);
}

/* One element. */
static __device__ __forceinline__ float one_of(const float *from, int ld, int row, int column, const lane_place &at)
{
    return from[row * ld + (column ^ turn(row)) + at.g];
}

/* c += p b for 8 rows of b from `row` on (kept below `rows`), columns from `column` on; p an accumulator's four. */
template <int PARTS>
static __device__ __forceinline__ void mix(float (&c)[PARTS][4], const float (&p)[4], const float *b, int ld, int row, int column,
                                           int rows, const lane_place &at)
{
    const int r0 = min(row + 2 * at.q, rows - 1), r1 = min(row + 2 * at.q + 1, rows - 1);
    const float2 low = make_float2(operand(p[0]), operand(p[1])), high = make_float2(operand(p[2]), operand(p[3]));
#pragma unroll
    for (int t = 0; t < PARTS; t++) {
        multiply_add(c[t], low, high, one_of(b, ld, r0, column + 8 * t, at), one_of(b, ld, r1, column + 8 * t, at));
    }
}

enum { MOST = 8 }; /* tiles of 8 columns of scores: N <= 64 */

/* merged = softmax(q k') v of a group of heads. qkv: its columns in shared memory; to: the whole merged [rows, d] there; merged,
 * logsum: in memory, of the tile's first row on, the group's first column and head; or NULL. */
template <int D, int E>
static __device__ __forceinline__ void attend(float *to, const float *qkv, float *merged, float *logsum, int group,
                                              const struct floats &x, int sequences, const lane_place &at)
{
    typedef tile_of<D> T;
    typedef job<D, E> J;
    const int tiles = (x.n + 7) / 8;
    for (int i = at.warp; i < J::count(sequences, x.n); i += WARPS) {
        const J j(i, x.n, at);
        float2 query[J::PARTS][2];
#pragma unroll
        for (int t = 0; t < J::PARTS * 2; t++) {
            query[t / 2][t % 2] = pair_of(qkv, T::LD, j.row[t % 2], j.head * E + t / 2 * 8, at);
        }
        float s[MOST][4], high[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < MOST; k++) {
            s[k][0] = s[k][1] = s[k][2] = s[k][3] = 0;
            if (k < tiles) {
                const int row = min(j.base + k * 8 + at.g, T::ROWS - 1);
#pragma unroll
                for (int t = 0; t < J::PARTS; t++) {
                    const float2 key = pair_of(qkv, T::LD, row, T::GROUP + j.head * E + t * 8, at);
                    multiply_add(s[k], query[t][0], query[t][1], key.x, key.y);
                }
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] = k * 8 + 2 * at.q + l % 2 < x.n ? s[k][l] : -INFINITY;
                    high[l / 2] = fmaxf(high[l / 2], s[k][l]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            high[h] = ps_group_max<4>(high[h]) * x.scale_log2e;
        }
        float o[J::PARTS][4] = {};
#pragma unroll
        for (int k = 0; k < MOST; k++) {
            if (k < tiles) {
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] = ps_exp2(fmaf(s[k][l], x.scale_log2e, -high[l / 2]));
                    sum[l / 2] += s[k][l];
                }
                mix<J::PARTS>(o, s[k], qkv, T::LD, j.base + k * 8, 2 * T::GROUP + j.head * E, T::ROWS, at);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = ps_group_sum<4>(sum[h]);
            const float part = 1.0f / sum[h];
            if (j.here[h]) {
                const int row = j.row[h];
#pragma unroll
                for (int t = 0; t < J::PARTS; t++) {
                    const float2 v = make_float2(o[t][2 * h] * part, o[t][2 * h + 1] * part);
                    const int column = j.head * E + t * 8;
                    *(float2 *)(to + row * D + ((group * T::GROUP + column) ^ turn(row)) + 2 * at.q) =
                        make_float2(operand(v.x), operand(v.y));
                    if (merged) {
                        *(float2 *)(merged + row * D + column + 2 * at.q) = v;
                    }
                }
                if (logsum && at.q == 0) {
                    logsum[j.head * x.rows + row] = high[h] + ps_log2(sum[h]);
                }
            }
        }
    }
}

/* The gradient of q of a group of heads, to memory (d_qkv: q's columns of the group), and sum_j A dA of each row. qkv, gradient (of
 * merged, [rows, d]): in shared memory; sums [2, heads, rows]: logarithms of softmax's sums, 1e30 for rows that do not exist, and
 * the other sums.
 */
template <int D, int E>
static __device__ __forceinline__ void attend_queries(float *d_qkv, float *sums, const float *qkv, const float *gradient, int group,
                                                      const struct floats &x, int sequences, const lane_place &at)
{
    typedef tile_of<D> T;
    typedef job<D, E> J;
    const int tiles = (x.n + 7) / 8;
    for (int i = at.warp; i < J::count(sequences, x.n); i += WARPS) {
        const J j(i, x.n, at);
        float2 query[J::PARTS][2], d_merged[J::PARTS][2];
#pragma unroll
        for (int t = 0; t < J::PARTS * 2; t++) {
            query[t / 2][t % 2] = pair_of(qkv, T::LD, j.row[t % 2], j.head * E + t / 2 * 8, at);
            d_merged[t / 2][t % 2] = pair_of(gradient, D, j.row[t % 2], group * T::GROUP + j.head * E + t / 2 * 8, at);
        }
        float *const logs = sums + j.head * T::ROWS, *const dots = logs + J::HEADS * T::ROWS;
        const float log_sum[2] = {j.here[0] ? logs[j.row[0]] : 1e30f, j.here[1] ? logs[j.row[1]] : 1e30f};
        float s[MOST][4], d[MOST][4], dot[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < MOST; k++) {
            if (k < tiles) {
                const int row = min(j.base + k * 8 + at.g, T::ROWS - 1);
                s[k][0] = s[k][1] = s[k][2] = s[k][3] = 0;
                d[k][0] = d[k][1] = d[k][2] = d[k][3] = 0;
#pragma unroll
                for (int t = 0; t < J::PARTS; t++) {
                    const float2 key = pair_of(qkv, T::LD, row, T::GROUP + j.head * E + t * 8, at);
                    const float2 value = pair_of(qkv, T::LD, row, 2 * T::GROUP + j.head * E + t * 8, at);
                    multiply_add(s[k], query[t][0], query[t][1], key.x, key.y);
                    multiply_add(d[k], d_merged[t][0], d_merged[t][1], value.x, value.y);
                }
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] = k * 8 + 2 * at.q + l % 2 < x.n ? ps_exp2(fmaf(s[k][l], x.scale_log2e, -log_sum[l / 2])) : 0.0f;
                    dot[l / 2] += s[k][l] * d[k][l];
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            dot[h] = ps_group_sum<4>(dot[h]);
            if (j.here[h] && at.q == 0) {
                dots[j.row[h]] = dot[h];
            }
        }
        float dq[J::PARTS][4] = {};
#pragma unroll
        for (int k = 0; k < MOST; k++) {
            if (k < tiles) {
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] *= d[k][l] - dot[l / 2];
                }
                mix<J::PARTS>(dq, s[k], qkv, T::LD, j.base + k * 8, T::GROUP + j.head * E, T::ROWS, at);
            }
        }
#pragma unroll
        for (int t = 0; t < J::PARTS * 2; t++) {
            if (j.here[t % 2]) {
                *(float2 *)(d_qkv + (int64_t)j.row[t % 2] * (3 * D) + j.head * E + t / 2 * 8 + 2 * at.q) =
                    make_float2(dq[t / 2][t % 2 * 2] * x.scale, dq[t / 2][t % 2 * 2 + 1] * x.scale);
            }
        }
    }
}

/* Those of k and v, from scores computed again, transposed. */
template <int D, int E>
static __device__ __forceinline__ void attend_keys(float *d_qkv, const float *sums, const float *qkv, const float *gradient,
                                                   int group, const struct floats &x, int sequences, const lane_place &at)
{
    typedef tile_of<D> T;
    typedef job<D, E> J;
    const int tiles = (x.n + 7) / 8;
    for (int i = at.warp; i < J::count(sequences, x.n); i += WARPS) {
        const J j(i, x.n, at);
        float2 key[J::PARTS][2], value[J::PARTS][2];
#pragma unroll
        for (int t = 0; t < J::PARTS * 2; t++) {
            key[t / 2][t % 2] = pair_of(qkv, T::LD, j.row[t % 2], T::GROUP + j.head * E + t / 2 * 8, at);
            value[t / 2][t % 2] = pair_of(qkv, T::LD, j.row[t % 2], 2 * T::GROUP + j.head * E + t / 2 * 8, at);
        }
        const float *const logs = sums + j.head * T::ROWS + j.base, *const dots = logs + J::HEADS * T::ROWS;
        const int wide = group * T::GROUP + j.head * E;
        float dk[J::PARTS][4] = {}, dv[J::PARTS][4] = {};
#pragma unroll 2
        for (int k = 0; k < tiles; k++) {
            const int row = min(j.base + k * 8 + at.g, T::ROWS - 1);
            float s[4] = {}, d[4] = {};
#pragma unroll
            for (int t = 0; t < J::PARTS; t++) {
                const float2 query = pair_of(qkv, T::LD, row, j.head * E + t * 8, at);
                const float2 d_merged = pair_of(gradient, D, row, wide + t * 8, at);
                multiply_add(s, key[t][0], key[t][1], query.x, query.y);
                multiply_add(d, value[t][0], value[t][1], d_merged.x, d_merged.y);
            }
#pragma unroll
            for (int l = 0; l < 2; l++) {
                const int of = k * 8 + 2 * at.q + l;
                const float log_sum = of < x.n ? logs[of] : 1e30f, dot = of < x.n ? dots[of] : 0.0f;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    s[2 * h + l] = of < x.n ? ps_exp2(fmaf(s[2 * h + l], x.scale_log2e, -log_sum)) : 0.0f;
                    d[2 * h + l] = of < x.n ? s[2 * h + l] * (d[2 * h + l] - dot) : 0.0f;
                }
            }
            mix<J::PARTS>(dv, s, gradient, D, j.base + k * 8, wide, T::ROWS, at);
            mix<J::PARTS>(dk, d, qkv, T::LD, j.base + k * 8, j.head * E, T::ROWS, at);
        }
#pragma unroll
        for (int t = 0; t < J::PARTS * 2; t++) {
            if (j.here[t % 2]) {
                float *to = d_qkv + (int64_t)j.row[t % 2] * (3 * D) + j.head * E + t / 2 * 8 + 2 * at.q;
                *(float2 *)(to + D) = make_float2(dk[t / 2][t % 2 * 2] * x.scale, dk[t / 2][t % 2 * 2 + 1] * x.scale);
                *(float2 *)(to + 2 * D) = make_float2(dv[t / 2][t % 2 * 2], dv[t / 2][t % 2 * 2 + 1]);
            }
        }
    }
}

/* `columns` (a multiple of 4, a power of two times one) of each of the parts of a tile's rows, `ld` apart in memory and `part` from
 * part to part there, as operands to rows of shared memory with PARTS * COLUMNS; rows that do not exist are zero. */
template <int D, int PARTS, int COLUMNS>
static __device__ __forceinline__ void fetch_rows(float *to, const float *from, int ld, int part, int count)
{
    constexpr int ROWS = tile_of<D>::ROWS, PIECES = PARTS * COLUMNS / 4;
    static_assert(ROWS * PIECES % THREADS == 0, "the same for all threads");
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / THREADS; i++) {
        const int piece = i * THREADS + (int)threadIdx.x, row = piece / PIECES, column = piece % PIECES * 4;
        float v[4] = {};
        if (row < count) {
            take4(v, from + (int64_t)row * ld + column / COLUMNS * part + column % COLUMNS);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = operand(v[j]);
        }
        ps_store<4>(to + row * (PARTS * COLUMNS) + (column ^ turn(row)), v);
    }
}

/* ---- the kernels ---- */

template <int D> static constexpr size_t shared_bytes(bool backward)
{
    typedef tile_of<D> T;
    return sizeof(float) * (size_t)(T::A + T::B + T::C + (backward ? T::SUMS : 0));
}

template <int D, int E> static __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ struct floats x)
{
    typedef tile_of<D> T;
    constexpr int MT = T::MT, NT = D / 8 / ACROSS, GT = T::LD / 8 / ACROSS;
    ps_grid_begin();
    extern __shared__ float4 shared_memory[];
    float *const a = (float *)shared_memory, *const b = a + T::A, *const c = b + T::B;
    const lane_place at;
    const struct packed_places places = places_of(D, x.f);
    for (int64_t tile = blockIdx.x; tile < x.tiles; tile += gridDim.x) {
        const int64_t row0 = tile * x.tile_sequences * x.n;
        const int count = (int)(x.rows - row0 < x.tile_sequences * x.n ? x.rows - row0 : x.tile_sequences * x.n);
        const int sequences = count / x.n;
        for (int layer = 0; layer < x.layers; layer++) {
            const int64_t kept = layer * x.kept_layer;
            const float *p = x.parameters + layer * x.at.vector_stride;
            const uint4 *w = x.packed + (int64_t)layer * places.all;
            const float *u = x.stream + (layer * x.rows + row0) * D;
            float *out = x.stream + ((layer + 1) * x.rows + row0) * D;
            if (layer == 0) {
                finish_rows<D>(a, u, NULL, NULL, x.dropout, p + x.at.ln1_gamma, p + x.at.ln1_beta,
                               x.xhat1 ? x.xhat1 + kept + row0 * D : NULL, x.rstd1 + kept + row0, x.epsilon, row0, count, at);
            }
            __syncthreads();
#pragma unroll 1
            for (int group = 0; group < D / T::GROUP; group++) {
                float s[MT][GT][4];
                int apart[GT];
                clear(s);
#pragma unroll
                for (int t = 0; t < GT; t++) {
                    const int of = at.across * GT + t, part = of / (T::GROUP / 8);
                    apart[t] = (part * (D / 8) + group * (T::GROUP / 8) + of % (T::GROUP / 8)) * 32;
                    const float2 bias = *(const float2 *)(p + x.at.b_qkv + apart[t] / 4 + 2 * at.q);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        s[m][t][0] = s[m][t][2] = bias.x;
                        s[m][t][1] = s[m][t][3] = bias.y;
                    }
                }
                multiply<D / 16, MT, GT, D>(s, a, w + places.w_qkv + at.lane, 3 * D / 8 * 32, apart, at);
                put<MT, GT, T::LD>(c, s, true, at);
                if (x.xhat1) {
#pragma unroll
                    for (int i = 0; i < MT * 2; i++) {
                        const int row = at.down * 16 * MT + i * 8 + at.g;
#pragma unroll
                        for (int t = 0; t < GT; t++) {
                            if (row < count) {
                                *(float2 *)(x.qkv + kept + (row0 + row) * (3 * D) + apart[t] / 4 + 2 * at.q) =
                                    make_float2(s[i / 2][t][i % 2 * 2], s[i / 2][t][i % 2 * 2 + 1]);
                            }
                        }
                    }
                }
                __syncthreads();
                attend<D, E>(b, c, x.xhat1 ? x.merged + kept + row0 * D + group * T::GROUP : NULL,
                             x.xhat1 ? x.logsum + kept + group * (T::GROUP / E) * x.rows + row0 : NULL, group, x, sequences, at);
                __syncthreads();
            }
            {
                float s[MT][NT][4];
                clear(s);
                multiply<D / 16, MT, NT, D>(s, b, w + places.w_o, D, 0, 0, at);
                put<MT, NT, D>(a, s, false, at);
            }
            __syncthreads();
            finish_rows<D>(a, u, out, p + x.at.b_o, at_site(x.dropout, layer, 0), p + x.at.ln2_gamma, p + x.at.ln2_beta,
                           x.xhat1 ? x.xhat2 + kept + row0 * D : NULL, x.rstd2 + kept + row0, x.epsilon, row0, count, at);
            __syncthreads();
            float y[MT][NT][4];
            clear(y);
#pragma unroll 1
            for (int chunk = 0; chunk < x.f; chunk += HIDDEN) {
                float s[MT][HT][4];
                float *const h = chunk / HIDDEN % 2 ? c : b;
                clear(s);
                multiply<D / 16, MT, HT, D>(s, a, w + places.w_1, x.f, 0, chunk, at);
                hidden_forward<D>(h, s, p + x.at.b_1, x.xhat1 ? x.hidden + kept + row0 * x.f : NULL, x.f, chunk,
                                  at_site(x.dropout, layer, 1), row0, count, at);
                __syncthreads();
                multiply<HIDDEN / 16, MT, NT, HIDDEN>(y, h, w + places.w_2, D, chunk / 16, 0, at);
            }
            put<MT, NT, D>(a, y, false, at); /* which all have done with */
            __syncthreads();
            const bool more = layer + 1 < x.layers;
            const float *next = p + x.at.vector_stride;
            finish_rows<D>(a, out, out, p + x.at.b_2, at_site(x.dropout, layer, 2), more ? next + x.at.ln1_gamma : NULL,
                           more ? next + x.at.ln1_beta : NULL, x.xhat1 && more ? x.xhat1 + kept + x.kept_layer + row0 * D : NULL,
                           x.rstd1 + kept + x.kept_layer + row0, x.epsilon, row0, count, at);
        }
    }
}

template <int D, int E> static __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ struct floats x)
{
    typedef tile_of<D> T;
    constexpr int MT = T::MT, NT = D / 8 / ACROSS;
    ps_grid_begin();
    extern __shared__ float4 shared_memory[];
    float *const a = (float *)shared_memory, *const b = a + T::A, *const c = b + T::B, *const sums = c + T::C;
    const lane_place at;
    const struct packed_places places = places_of(D, x.f);
    for (int64_t tile = blockIdx.x; tile < x.tiles; tile += gridDim.x) {
        const int64_t row0 = tile * x.tile_sequences * x.n;
        const int count = (int)(x.rows - row0 < x.tile_sequences * x.n ? x.rows - row0 : x.tile_sequences * x.n);
        const int sequences = count / x.n;
        float *const du = x.du + row0 * D;
        for (int layer = x.layers - 1; layer >= 0; layer--) {
            const int64_t kept = layer * x.kept_layer;
            const float *p = x.parameters + layer * x.at.vector_stride;
            const uint4 *w = x.packed + (int64_t)layer * places.all;
            if (layer == x.layers - 1) {
                gradient_rows<D>(a, x.dy + row0 * D, du, NULL, NULL, NULL, at_site(x.dropout, layer, 2),
                                 x.masked_2 + kept + row0 * D, row0, count, at);
            }
            __syncthreads();
            {
                float y[MT][NT][4];
                clear(y);
#pragma unroll 1
                for (int chunk = 0; chunk < x.f; chunk += HIDDEN) {
                    float s[MT][HT][4];
                    float *const h = chunk / HIDDEN % 2 ? c : b;
                    clear(s);
                    multiply<D / 16, MT, HT, D>(s, a, w + places.w_2t, x.f, 0, chunk, at);
                    hidden_backward<D>(h, s, x.hidden + kept + row0 * x.f, x.d_hidden + kept + row0 * x.f, x.f, chunk,
                                       at_site(x.dropout, layer, 1), row0, count, at);
                    __syncthreads();
                    multiply<HIDDEN / 16, MT, NT, HIDDEN>(y, h, w + places.w_1t, D, chunk / 16, 0, at);
                }
                put<MT, NT, D>(a, y, false, at);
            }
            __syncthreads();
            gradient_rows<D>(a, du, du, p + x.at.ln2_gamma, x.xhat2 + kept + row0 * D, x.rstd2 + kept + row0,
                             at_site(x.dropout, layer, 0), x.masked_o + kept + row0 * D, row0, count, at);
            __syncthreads();
            {
                float s[MT][NT][4];
                clear(s);
                multiply<D / 16, MT, NT, D>(s, a, w + places.w_ot, D, 0, 0, at);
                put<MT, NT, D>(b, s, true, at);
            }
#pragma unroll 1
            for (int group = 0; group < D / T::GROUP; group++) {
                constexpr int HEADS = T::GROUP / E;
                float *const qkv = x.qkv + kept + row0 * (3 * D) + group * T::GROUP;
                fetch_rows<D, 3, T::GROUP>(c, qkv, 3 * D, D, count);
                for (int i = (int)threadIdx.x; i < HEADS * T::ROWS; i += THREADS) {
                    const int row = i % T::ROWS;
                    sums[i] = row < count ? x.logsum[kept + (group * HEADS + i / T::ROWS) * x.rows + row0 + row] : 1e30f;
                }
                __syncthreads();
                attend_queries<D, E>(qkv, sums, c, b, group, x, sequences, at);
                __syncthreads();
                attend_keys<D, E>(qkv, sums, c, b, group, x, sequences, at);
                __syncthreads();
            }
            {
                const float *qkv = x.qkv + kept + row0 * (3 * D);
                fetch_rows<D, 1, D>(a, qkv, 3 * D, 0, count);
                fetch_rows<D, 1, D>(b, qkv + D, 3 * D, 0, count);
                fetch_rows<D, 1, D>(c, qkv + 2 * D, 3 * D, 0, count);
                __syncthreads();
                float s[MT][NT][4];
                clear(s);
                multiply<D / 16, MT, NT, D>(s, a, w + places.w_qkvt, D, 0, 0, at);
                multiply<D / 16, MT, NT, D>(s, b, w + places.w_qkvt, D, D / 16, 0, at);
                multiply<D / 16, MT, NT, D>(s, c, w + places.w_qkvt, D, D / 8, 0, at);
                __syncthreads();
                put<MT, NT, D>(a, s, false, at);
            }
            __syncthreads();
            gradient_rows<D>(a, du, du, p + x.at.ln1_gamma, x.xhat1 + kept + row0 * D, x.rstd1 + kept + row0,
                             at_site(x.dropout, layer - 1, 2), layer > 0 ? x.masked_2 + kept - x.kept_layer + row0 * D : NULL, row0,
                             count, at);
        }
    }
}

/* ---- weights' gradients ---- */

/* Offsets, in floats, of a layer's sums: G of W_qkv [d, 3d], W_o [d, d], W_1 [d, f], W_2 [f, d]; column sums [3d], [d], [f], [d].
 */
struct sum_places {
    int w[4], b[4], all;
};

static __host__ __device__ __forceinline__ struct sum_places sums_of(int d, int f)
{
    struct sum_places p = {};
    p.w[1] = 3 * d * d;
    p.w[2] = p.w[1] + d * d;
    p.w[3] = p.w[2] + d * f;
    p.b[0] = p.w[3] + f * d;
    p.b[1] = p.b[0] + 3 * d;
    p.b[2] = p.b[1] + d;
    p.b[3] = p.b[2] + f;
    p.all = p.b[3] + d;
    return p;
}

struct float_sums {
    struct floats of;
    float *parts; /* [splits, layers, sums] */
    float *gradients;
    int d, splits;
    int64_t split_rows; /* a multiple of DEEP */
};

enum { EDGE = 64, DEEP = 32, STAGES = 3, PRODUCT_THREADS = 128 };

/* Rows x columns DEEP x EDGE from `from`, zeros from row `rows` on, to a stage. */
static __device__ __forceinline__ void stage_rows(float *to, const float *from, int ld, int64_t rows)
{
#pragma unroll
    for (int i = 0; i < DEEP * EDGE / 4 / PRODUCT_THREADS; i++) {
        const int piece = i * PRODUCT_THREADS + (int)threadIdx.x, row = piece / (EDGE / 4), column = piece % (EDGE / 4) * 4;
        const bool here = row < rows;
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ps_shared_address(to + row * EDGE + (column ^ turn(row)))),
            "l"(here ? from + (int64_t)row * ld + column : from), "r"(here ? 16 : 0)
            : "memory");
    }
}

/* A tile of 64 x 64 of a layer's G over a split of the rows (blockIdx.y), by four warps of 32 x 32; tiles in the first column of
 * tiles of rows sum up the columns of dy too. */
static __global__ void __launch_bounds__(PRODUCT_THREADS) products(const __grid_constant__ struct float_sums x)
{
    ps_grid_begin();
    __shared__ __align__(16) float stages[STAGES][2][DEEP * EDGE];
    const struct floats &o = x.of;
    const int d = x.d, f = o.f, wide = d / EDGE, deep = f / EDGE;
    const int each[4] = {wide * 3 * wide, wide * wide, wide * deep, deep * wide};
    const int per_layer = each[0] + each[1] + each[2] + each[3], layer = (int)blockIdx.x / per_layer;
    int i = (int)blockIdx.x % per_layer, which = 0;
    while (i >= each[which]) {
        i -= each[which++];
    }
    const int m = which == 3 ? f : d, n = which == 0 ? 3 * d : which == 2 ? f : d;
    const int tiles_n = n / EDGE, row = i / tiles_n * EDGE, column = i % tiles_n * EDGE;
    const int64_t kept = layer * o.kept_layer, begin = (int64_t)blockIdx.y * x.split_rows;
    const int64_t rows = o.rows - begin < x.split_rows ? o.rows - begin : x.split_rows;
    const float *const lefts[4] = {o.xhat1, o.merged, o.xhat2, o.hidden}, *const rights[4] = {o.qkv, o.masked_o, o.d_hidden,
                                                                                              o.masked_2};
    const float *left = lefts[which] + kept + begin * m + row, *right = rights[which] + kept + begin * n + column;
    const int steps = rows <= 0 ? 0 : (int)((rows + DEEP - 1) / DEEP);
    const lane_place at;
    const int down = at.warp / 2 * 32, across = at.warp % 2 * 32;
    float c[2][4][4], column_sum[4] = {0, 0, 0, 0};
    clear(c);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) {
            stage_rows(stages[s][0], left + (int64_t)s * DEEP * m, m, rows - s * DEEP);
            stage_rows(stages[s][1], right + (int64_t)s * DEEP * n, n, rows - s * DEEP);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        const int ahead = s + STAGES - 1;
        if (ahead < steps) {
            stage_rows(stages[ahead % STAGES][0], left + (int64_t)ahead * DEEP * m, m, rows - (int64_t)ahead * DEEP);
            stage_rows(stages[ahead % STAGES][1], right + (int64_t)ahead * DEEP * n, n, rows - (int64_t)ahead * DEEP);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        const float *const l = stages[s % STAGES][0], *const r = stages[s % STAGES][1];
#pragma unroll
        for (int k = 0; k < DEEP; k += 8) {
            const int even = k + 2 * at.q, odd = even + 1;
            float b[4][2];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                b[t][0] = one_of(r, EDGE, even, across + t * 8, at);
                b[t][1] = one_of(r, EDGE, odd, across + t * 8, at);
                column_sum[t] += b[t][0] + b[t][1];
                b[t][0] = operand(b[t][0]);
                b[t][1] = operand(b[t][1]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 low = make_float2(operand(one_of(l, EDGE, even, down + h * 16, at)),
                                               operand(one_of(l, EDGE, odd, down + h * 16, at)));
                const float2 high = make_float2(operand(one_of(l, EDGE, even, down + h * 16 + 8, at)),
                                                operand(one_of(l, EDGE, odd, down + h * 16 + 8, at)));
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    multiply_add(c[h][t], low, high, b[t][0], b[t][1]);
                }
            }
        }
    }
    const struct sum_places places = sums_of(d, f);
    float *const to = x.parts + ((int64_t)blockIdx.y * o.layers + layer) * places.all;
#pragma unroll
    for (int h = 0; h < 4; h++) {
        float *const out = to + places.w[which] + (row + down + h * 8 + at.g) * n + column + across + 2 * at.q;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            *(float2 *)(out + t * 8) = make_float2(c[h / 2][t][h % 2 * 2], c[h / 2][t][h % 2 * 2 + 1]);
        }
    }
    if (row == 0 && down == 0) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const float sum = ps_group_sum<4>(column_sum[t]);
            if (at.q == 0) {
                to[places.b[which] + column + across + t * 8 + at.g] = sum;
            }
        }
    }
}

enum { SUM_THREADS = 256, SUM_ROWS = SUM_THREADS / 32, MOST_HIDDEN = 512 };

/* gradients += the sums of the splits' parts, in their order, LayerNorm's share included (the file's head); a warp a row of a
 * weight. HALF: of W_qkv and W_1 alone, the others have theirs. 4 bytes a part read. */
template <bool HALF> static __global__ void __launch_bounds__(SUM_THREADS) sum_up(const __grid_constant__ struct float_sums x)
{
    ps_grid_begin();
    __shared__ float sums[MOST_HIDDEN];
    const struct floats &o = x.of;
    const int d = x.d, f = o.f, layer = (int)blockIdx.y;
    const struct sum_places places = sums_of(d, f);
    int row = (int)blockIdx.x * SUM_ROWS, which;
    if (HALF) {
        which = row >= d ? 2 : 0;
        row -= row >= d ? d : 0;
    } else {
        which = row >= 3 * d ? 3 : row / d;
        row -= which * d;
    }
    const int n = which == 0 ? 3 * d : which == 2 ? f : d;
    const float *const parts = x.parts + (int64_t)layer * places.all;
    const int64_t split = (int64_t)o.layers * places.all;
    const bool normalised = which % 2 == 0;
    const struct ps_encoder_layout &at = o.at;
    const int64_t matrix = layer * at.matrix_stride, vector = layer * at.vector_stride;
    const int64_t weights[4] = {at.w_qkv, at.w_o, at.w_1, at.w_2}, biases[4] = {at.b_qkv, at.b_o, at.b_1, at.b_2};
    if (normalised || row == 0) {
        for (int i = (int)threadIdx.x; i < n; i += SUM_THREADS) {
            float sum = 0;
            for (int s = 0; s < x.splits; s++) {
                sum += parts[s * split + places.b[which] + i];
            }
            sums[i] = sum;
            if (row == 0) {
                x.gradients[vector + biases[which] + i] += sum;
            }
        }
    }
    __syncthreads();
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    row += warp;
    const float *const part = parts + places.w[which] + row * n;
    float *const to = x.gradients + matrix + weights[which] + (int64_t)row * n;
    const float *const w = o.parameters + matrix + weights[which] + (int64_t)row * n;
    const int64_t gamma = vector + (which == 0 ? at.ln1_gamma : at.ln2_gamma) + row,
                  beta = vector + (which == 0 ? at.ln1_beta : at.ln2_beta) + row;
    const float scale = normalised ? o.parameters[gamma] : 1.0f, shift = normalised ? o.parameters[beta] : 0.0f;
    float d_gamma = 0, d_beta = 0;
    for (int i = lane * 2; i < n; i += 64) {
        float2 g = make_float2(0, 0);
        for (int s = 0; s < x.splits; s++) {
            const float2 v = *(const float2 *)(part + s * split + i);
            g.x += v.x;
            g.y += v.y;
        }
        float2 *const p = (float2 *)(to + i), old = *p;
        if (normalised) {
            const float2 v = *(const float2 *)(w + i), s = *(const float2 *)(sums + i);
            d_gamma += v.x * g.x + v.y * g.y;
            d_beta += v.x * s.x + v.y * s.y;
            g = make_float2(fmaf(scale, g.x, shift * s.x), fmaf(scale, g.y, shift * s.y));
        }
        *p = make_float2(old.x + g.x, old.y + g.y);
    }
    if (normalised) {
        d_gamma = ps_group_sum<32>(d_gamma);
        d_beta = ps_group_sum<32>(d_beta);
        if (lane == 0) {
            x.gradients[gamma] += d_gamma;
            x.gradients[beta] += d_beta;
        }
    }
}

/* ---- launches ---- */

typedef void kernel(const struct floats);

struct kernels_of {
    kernel *forward, *backward;
    size_t shared, shared_backward;
    int rows;
};

template <int D, int E> static struct kernels_of kernels_with()
{
    return {forward<D, E>, backward<D, E>, shared_bytes<D>(false), shared_bytes<D>(true), tile_of<D>::ROWS};
}

/* rows 0: not served. */
static struct kernels_of kernels_for(int64_t d, int64_t heads)
{
    const int64_t e = heads > 0 && d % heads == 0 ? d / heads : 0;
    switch (d * 100 + e) {
    case 6408:
        return kernels_with<64, 8>();
    case 6416:
        return kernels_with<64, 16>();
    case 6432:
        return kernels_with<64, 32>();
    case 12808:
        return kernels_with<128, 8>();
    case 12816:
        return kernels_with<128, 16>();
    case 12832:
        return kernels_with<128, 32>();
    default:
        return {};
    }
}

enum ps_status ps_encoder_float_supported(const struct ps_encoder_small *e)
{
    const struct kernels_of k = kernels_for(e->d_model, e->n_heads);
    if (!k.rows || e->patches < 1 || e->patches > 64 || e->d_ff < HIDDEN || e->d_ff > MOST_HIDDEN || e->d_ff % HIDDEN != 0) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda): d_model %lld with %lld heads, d_ff %lld and %lld patches: level layer in %s has d_model 64 and "
            "128 with heads of 8, 16 or 32, d_ff 128, 256, 384 or 512, up to 64 patches",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, exact ? "fp32" : "tf32");
    }
    return PS_OK;
}

/* Floats of a layer in what is kept. */
static int64_t kept_floats(const struct ps_encoder_small *e)
{
    const int64_t R = (e->sequences * e->patches + 3) / 4 * 4;
    return R * (8 * e->d_model + 2 * e->d_ff + e->n_heads + 2);
}

size_t ps_encoder_float_kept_bytes(const struct ps_encoder_small *e)
{
    return (size_t)(kept_floats(e) * e->layers) * sizeof(float);
}

/* Of the rows, for weights' gradients. */
static int splits_of(const struct ps_encoder_small *e, int multiprocessors)
{
    const int64_t R = e->sequences * e->patches, d = e->d_model / EDGE, f = e->d_ff / EDGE;
    const int64_t tiles = e->layers * (4 * d * d + 2 * d * f), most = (R + 127) / 128, wanted = 3 * multiprocessors / tiles;
    return (int)(wanted < 1 ? 1 : wanted > most ? most : wanted);
}

/* Whether weights' gradients are the products of level gemm's table, one by one: of many rows. */
static bool by_table(const struct ps_encoder_small *e)
{
    return e->sequences * e->patches >= 32768;
}

static size_t packed_bytes(const struct ps_encoder_small *e)
{
    return (size_t)e->layers * (size_t)places_of((int)e->d_model, (int)e->d_ff).all * sizeof(uint4);
}

static enum ps_status multiprocessors_of(int *count)
{
    int device = 0;
    PS_TRY(ps_cuda_check(cudaGetDevice(&device), "asking for the device"));
    return ps_cuda_check(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device), "asking for multiprocessors");
}

size_t ps_encoder_float_workspace_bytes(const struct ps_encoder_small *e)
{
    int multiprocessors = 0;
    if (multiprocessors_of(&multiprocessors) != PS_OK) {
        return 0;
    }
    const size_t sums = (size_t)e->layers * (size_t)sums_of((int)e->d_model, (int)e->d_ff).all * sizeof(float);
    return packed_bytes(e) + sums * (by_table(e) ? 1 : (size_t)splits_of(e, multiprocessors));
}

static struct floats floats_of(const struct ps_encoder_small *e, int rows, int multiprocessors)
{
    struct floats x = {};
    x.rows = e->sequences * e->patches;
    x.n = (int)e->patches;
    /* As many sequences as fill the device evenly. */
    const int64_t most = rows / e->patches, turns = (e->sequences + most * multiprocessors - 1) / (most * multiprocessors);
    x.tile_sequences = (int)((e->sequences + turns * multiprocessors - 1) / (turns * multiprocessors));
    x.tiles = (e->sequences + x.tile_sequences - 1) / x.tile_sequences;
    x.heads = (int)e->n_heads;
    x.f = (int)e->d_ff;
    x.layers = (int)e->layers;
    x.epsilon = (float)e->epsilon;
    x.scale = (float)(1 / sqrt((double)e->d_model / (double)e->n_heads));
    x.scale_log2e = x.scale * PS_LOG2_E;
    x.parameters = e->parameters;
    x.at = e->offsets;
    x.packed = (const uint4 *)e->workspace;
    x.stream = (float *)e->u;
    x.dropout = e->dropout;
    if (e->kept) {
        const int64_t R = (x.rows + 3) / 4 * 4, d = e->d_model;
        x.xhat1 = (float *)e->kept;
        x.qkv = x.xhat1 + R * d;
        x.merged = x.qkv + R * 3 * d;
        x.xhat2 = x.merged + R * d;
        x.hidden = x.xhat2 + R * d;
        x.d_hidden = x.hidden + R * x.f;
        x.masked_o = x.d_hidden + R * x.f;
        x.masked_2 = x.masked_o + R * d;
        x.logsum = x.masked_2 + R * d;
        x.rstd1 = x.logsum + R * x.heads;
        x.rstd2 = x.rstd1 + R;
        x.kept_layer = kept_floats(e);
    }
    x.dy = (const float *)e->dy;
    x.du = (float *)e->du;
    return x;
}

template <typename... P, typename... A>
static enum ps_status launch(const struct ps_cuda_context *c, void (*run)(P...), dim3 grid, unsigned threads, size_t shared,
                             const char *what, const A &...arguments)
{
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)run, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), what));
    ps_cuda_launch(c, run, grid, threads, shared, arguments...);
    PS_CUDA_LAUNCHED(what);
}

static dim3 blocks_of(const struct ps_cuda_context *c, const struct floats &x)
{
    return dim3((unsigned)(x.tiles < c->multiprocessors ? x.tiles : c->multiprocessors));
}

enum ps_status ps_encoder_float_forward(const struct ps_kernels *k, const struct ps_encoder_small *e)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const struct kernels_of kernels = kernels_for(e->d_model, e->n_heads);
    const struct floats x = floats_of(e, kernels.rows, c->multiprocessors);
    const struct packed_places places = places_of((int)e->d_model, x.f);
    const int count = e->kept ? places.all : places.w_2t;
    PS_TRY(launch(c, pack, dim3((unsigned)(count + 255) / 256, (unsigned)x.layers), 256, 0, "encoder_forward",
                  (uint4 *)e->workspace, (const float *)e->weights, e->offsets, (int)e->d_model, x.f, count));
    return launch(c, kernels.forward, blocks_of(c, x), THREADS, kernels.shared, "encoder_forward", x);
}

/* The products of weights' gradients by the table: W_o's and W_2's, and W_qkv's and W_1's as one split. */
static enum ps_status products_by_table(const struct ps_kernels *k, const struct float_sums &x)
{
    const struct floats &o = x.of;
    const struct ps_encoder_layout &at = o.at;
    const struct sum_places places = sums_of(x.d, o.f);
    const float *const lefts[4] = {o.xhat1, o.merged, o.xhat2, o.hidden}, *const rights[4] = {o.qkv, o.masked_o, o.d_hidden,
                                                                                              o.masked_2};
    PS_TRY(ps_cuda_check(cudaMemsetAsync(x.parts, 0, (size_t)o.layers * (size_t)places.all * sizeof(float), ps_cuda(k)->stream),
                         "encoder_backward"));
    for (int layer = 0; layer < o.layers; layer++) {
        const int64_t matrix = layer * at.matrix_stride, vector = layer * at.vector_stride, kept = layer * o.kept_layer;
        float *const sums = x.parts + (int64_t)layer * places.all;
        for (int i = 0; i < 4; i++) {
            const int64_t m = i == 3 ? o.f : x.d, n = i == 0 ? 3 * x.d : i == 2 ? o.f : x.d;
            float *const dw = i % 2 == 0 ? sums + places.w[i] : x.gradients + matrix + (i == 1 ? at.w_o : at.w_2);
            float *const db = i % 2 == 0 ? sums + places.b[i] : x.gradients + vector + (i == 1 ? at.b_o : at.b_2);
            const struct ps_gemm_gradient g = {ps_tensor_2d(dw, PS_F32, m, n), ps_tensor_1d(db, PS_F32, n),
                                               ps_tensor_2d((void *)(lefts[i] + kept), PS_F32, o.rows, m),
                                               ps_tensor_2d((void *)(rights[i] + kept), PS_F32, o.rows, n)};
            PS_TRY(ps_cuda_gemm_gradient(k, &g));
        }
    }
    return PS_OK;
}

enum ps_status ps_encoder_float_backward(const struct ps_kernels *k, const struct ps_encoder_small *e)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const struct kernels_of kernels = kernels_for(e->d_model, e->n_heads);
    struct float_sums x = {};
    x.of = floats_of(e, kernels.rows, c->multiprocessors);
    x.parts = (float *)((char *)e->workspace + packed_bytes(e));
    x.gradients = e->gradients;
    x.d = (int)e->d_model;
    const char *name = "encoder_backward";
    PS_TRY(launch(c, kernels.backward, blocks_of(c, x.of), THREADS, kernels.shared_backward, name, x.of));
    const unsigned d = (unsigned)x.d, f = (unsigned)x.of.f, layers = (unsigned)x.of.layers;
    if (by_table(e)) {
        x.splits = 1;
        PS_TRY(products_by_table(k, x));
        return launch(c, sum_up<true>, dim3(2 * d / SUM_ROWS, layers), SUM_THREADS, 0, name, x);
    }
    x.splits = splits_of(e, c->multiprocessors);
    x.split_rows = ((x.of.rows + x.splits - 1) / x.splits + DEEP - 1) / DEEP * DEEP;
    const unsigned tiles = d / EDGE * (4 * d / EDGE + 2 * f / EDGE) * layers;
    PS_TRY(launch(c, products, dim3(tiles, (unsigned)x.splits), PRODUCT_THREADS, 0, name, x));
    return launch(c, sum_up<false>, dim3((3 * d + f) / SUM_ROWS, layers), SUM_THREADS, 0, name, x);
}

} // namespace PS_REAL16_SPACE
