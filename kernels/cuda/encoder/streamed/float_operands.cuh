/* Sizes of a block's tile, and how the operands of its products lie in shared memory.
 *
 * The left operand of a product lies in shared memory as lanes want it, a "fragment" of 16 bytes for 16 rows, 8 columns and a lane:
 * (g, 2q), (g + 8, 2q), (g, 2q + 1), (g + 8, 2q + 1), where lane 4 g + q has place 4 g + q, or that with its bit 2 turned over in
 * odd columns of fragments: so a warp that has whole rows meets no bank twice either.
 *
 * What attention reads lies by rows, whose columns are moved within each 32: the column of row r is column ^ turn(r). So lanes that
 * read pairs of columns of 4 neighbouring rows, or one column of rows 0, 2, 4, 6 (1, 3, 5, 7) meet no bank twice. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_OPERANDS_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_OPERANDS_CUH

#include "kernels/cuda/encoder/streamed/float_device.cuh"

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
