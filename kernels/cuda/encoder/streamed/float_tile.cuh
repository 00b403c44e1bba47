/* What all of encoder/streamed/float.cu's kernels stand on: what they are told, sizes of a block's tile, and how the operands of
 * its products lie in shared memory.
 *
 * The left operand of a product lies in shared memory as lanes want it, a "fragment" of 16 bytes for 16 rows, 8 columns and a lane:
 * (g, 2q), (g + 8, 2q), (g, 2q + 1), (g + 8, 2q + 1), where lane 4 g + q has place 4 g + q, or that with its bit 2 turned over in
 * odd columns of fragments: so a warp that has whole rows meets no bank twice either.
 *
 * What attention reads lies by rows, whose columns are moved within each 32: the column of row r is column ^ turn(r). So lanes that
 * read pairs of columns of 4 neighbouring rows, or one column of rows 0, 2, 4, 6 (1, 3, 5, 7) meet no bank twice. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_TILE_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_TILE_CUH

#include "kernels/cuda/encoder/streamed/float_device.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/windows.cuh"

namespace PS_REAL16_SPACE
{

enum {
    D = 64 /* d_model */,
    ROWS = 64 /* of a block's tile */,
    WARPS = 16,
    THREADS = WARPS * 32,
    ACROSS = 4 /* warps along a tile's columns; as many share its rows, 16 each */,
    HIDDEN = 128 /* hidden columns at once */,
    GROUP = D /* columns of q, of k and of v at once */,
    QKV = 3 * GROUP,
    /* Floats of the buffers. Attention may read 8 rows more, of finite numbers that count for nothing. */
    FLOATS_A = ROWS * D,
    FLOATS_B = ROWS * HIDDEN,
    FLOATS_C = (ROWS + 8) * QKV,
    FLOATS_SUMS = 2 * D / 8 * ROWS + 8 /* backward: softmax's sums and those of A dA, for as many heads as there may be */,
    SLOT = 16384 /* bytes of a slot of the ring that weights pass through */,
    SLOTS = 6
};
static_assert(ROWS * HIDDEN >= (ROWS + 8) * D && (ROWS + 8) * QKV >= ROWS * HIDDEN, "buffers hold rows and hidden columns");

/* ---- arguments ---- */

/* The embedding's part. Forward it is asked for when `weight` is there, backward when d_weight is. */
struct float_embedding {
    const float *weight, *bias, *position; /* [P, d], [d], [N, d] */
    float *patches, *mean, *std;           /* [R, P], [S], [S] */
    struct ps_cuda_windows windows;
    const struct ps_step_state *state;
    int length, patch, stride, revin;
    float epsilon;
    struct ps_divisor by_channels;
    struct ps_dropout dropout;
    float *d_weight, *d_bias, *d_position;
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
    uint32_t hidden_first; /* its `first` after gelu */
    struct float_embedding embed;
};

static __device__ __forceinline__ struct ps_dropout hidden_site(const struct floats &x, int layer)
{
    struct ps_dropout hidden = at_site(x.dropout, layer, 1);
    hidden.first = x.hidden_first;
    return hidden;
}

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
    float *parts; /* [splits, split_floats]: the layers' sums, then the embedding's, [EDGE, d] and [d] */
    int64_t split_floats;
    float *gradients;
    int d, splits;
    int64_t split_rows; /* a multiple of DEEP */
};

/* ---- operands ---- */

static __device__ __forceinline__ int turn(int row)
{
    return ((row & 3) ^ (row >> 2 & 1)) << 3;
}

/* x as an operand in memory or registers. */
static __device__ __forceinline__ float operand(float x)
{
    return exact ? x : __uint_as_float(ps_round_up(x));
}

/* quad_bits of lane q's pairs: elements 2q and 2q + 1 of what lane t has drawn when bits 4t and 4t + 16 are set. */
static __device__ __forceinline__ uint32_t quad_mask(const struct ps_dropout &d, uint64_t step, uint32_t index, int q)
{
    return quad_bits(d, step, index, q) >> q;
}

static __device__ __forceinline__ float kept_scale(uint32_t mask, int t, int i, float scale)
{
    return mask >> (4 * t + 16 * i) & 1 ? scale : 0.0f;
}

/* Operands as multiply_add's products take them: in fp32 two parts of each. */
template <int N> static __device__ __forceinline__ void split(uint32_t (&hi)[N], uint32_t (&lo)[N], const float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        if constexpr (exact) {
            ps_split<true>(hi[i], lo[i], x[i]);
        } else {
            hi[i] = __float_as_uint(x[i]);
            lo[i] = 0;
        }
    }
}

/* c += a b of 8 terms; a a fragment, b rows 2q, 2q + 1 of column g. */
static __device__ __forceinline__ void multiply_add(float (&c)[4], const float (&a)[4], float b0, float b1)
{
    const float b[2] = {b0, b1};
    uint32_t a_hi[4], a_lo[4], b_hi[2], b_lo[2];
    split(a_hi, a_lo, a);
    split(b_hi, b_lo, b);
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

template <int NT> static __device__ __forceinline__ void clear(float (&c)[NT][4])
{
#pragma unroll
    for (int i = 0; i < NT * 4; i++) {
        c[i / 4][i % 4] = 0;
    }
}

/* c to fragments of COLUMNS columns, as operands or as they are. */
template <int NT, int COLUMNS, bool OPERANDS>
static __device__ __forceinline__ void put_fragments(float *to, const float (&c)[NT][4], const lane_place &at)
{
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const int column = at.across * NT + t;
        float v[4] = {c[t][0], c[t][2], c[t][1], c[t][3]};
        if (OPERANDS) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = operand(v[i]);
            }
        }
        ps_store<4>(to + ((at.down * (COLUMNS / 8) + column) * 32 + (at.lane ^ (column & 1) << 2)) * 4, v);
    }
}

/* c as operands to rows of LD. */
template <int NT, int LD> static __device__ __forceinline__ void put_rows(float *to, const float (&c)[NT][4], const lane_place &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float *row = to + (at.down * 16 + i * 8 + at.g) * LD;
#pragma unroll
        for (int t = 0; t < NT; t++) {
            *(float2 *)(row + (((at.across * NT + t) * 8) ^ turn(at.g)) + 2 * at.q) =
                make_float2(operand(c[t][i * 2]), operand(c[t][i * 2 + 1]));
        }
    }
}

} // namespace PS_REAL16_SPACE

#endif
