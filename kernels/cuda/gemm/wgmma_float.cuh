/* How gemm/wgmma.cu and gemm/wgmma_long.cu multiply float32 on Hopper's tensor cores.
 *
 * tf32 rounds the operands to nearest. fp32 takes three products of fp16, at twice the rate of tf32, whose mantissa is as long:
 * each operand is brought to fp16's range by powers of two (scale_of) and split into hi, its nearest fp16, and lo, the rest's, and
 * c = hi hi' + hi lo' + lo hi'. x = hi + lo to 2^-23 of x, or, where x is small, to 2^-39 of the largest that has its scale: DEEP
 * terms of a row on the left; a column of a weight on the right, and of a gradient's operands a row. The tensor cores' own sums are
 * not rounded to nearest but cut off, so they run over DEEP terms only; what they give is added in float32, with the row's scale
 * taken back. The errors against a double product are no larger than those of a chain of FFMA (tests/test_products.c). */
#ifndef PS_KERNELS_CUDA_GEMM_WGMMA_FLOAT_CUH
#define PS_KERNELS_CUDA_GEMM_WGMMA_FLOAT_CUH

#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

enum { DEEP = 32, LINE = DEEP * 4 }; /* terms at once; bytes of a panel's line of them: of 32 bits, or hi's and behind them lo's */

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* The power of two that brings a largest magnitude to 2^14 .. 2^15, which fp16 holds, and its inverse. Below 2^-112 it is brought
 * less far, so that both are normal numbers. */
struct scale {
    float to, from;
};
static __device__ __forceinline__ struct scale scale_of(float largest)
{
    const int exponent = max(__float_as_int(largest) >> 23, 15); /* 127 is that of 1 */
    return {__int_as_float((127 + 14 + 127 - exponent) << 23), __int_as_float((exponent - 14) << 23)};
}

/* Two scaled elements as words of fp16. */
static __device__ __forceinline__ void split_pair(uint32_t &hi, uint32_t &lo, float x, float y)
{
    hi = ps_pack<ps_fp16>(x, y);
    lo = ps_pack<ps_fp16>(x - ps_low<ps_fp16>(hi), y - ps_high<ps_fp16>(hi));
}

/* Which of DEEP terms is at a place of a panel's line, if of every 16 a lane takes four neighbours, 4 q to 4 q + 3, to its
 * fragment: tf32's has places q and q + 4 of 8, fp16's 2 q, 2 q + 1 and 8 behind these. */
template <bool EXACT> static __device__ __forceinline__ int term_at(int place)
{
    return place / 16 * 16 + (EXACT ? place % 8 / 2 * 4 + place / 8 % 2 * 2 + place % 2 : place % 4 * 4 + place % 16 / 4);
}

/* A weight is made ready by units of 4 words of a line: in fp32 8 terms' hi and, half a line on, their lo. */
template <bool EXACT> static constexpr int units_of = EXACT ? 4 : 8;

/* A lane's part of 64 rows of the left operand: 8 of DEEP terms of two rows, in the order of its fragments. from: fp32's scales,
 * to be taken back. */
template <bool EXACT> struct left_part {
    uint32_t hi[EXACT ? 2 : 4][4], lo[EXACT ? 2 : 1][4];
    float from[2];

    __device__ __forceinline__ void split(const float (&x)[2][8])
    {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if constexpr (EXACT) {
                float largest = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    largest = fmaxf(largest, fabsf(x[r][j]));
                }
                const struct scale scale = scale_of(ps_quad_max(largest));
                from[r] = scale.from;
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    split_pair(hi[j / 4][j / 2 % 2 * 2 + r], lo[j / 4][j / 2 % 2 * 2 + r], scale.to * x[r][j],
                               scale.to * x[r][j + 1]);
                }
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    hi[j / 2][j % 2 * 2 + r] = ps_round_up(x[r][j]);
                }
            }
        }
    }
};

/* d (+)= a b of one piece of DEEP. b: its panel; EXACT: lo's `further` bytes on; ACROSS: its lines run across the terms. */
template <int N, bool EXACT, int ACROSS = 0>
static __device__ __forceinline__ void piece(float (&d)[N / 8][4], const struct left_part<EXACT> &a, uint32_t b, int further,
                                             int add)
{
    ps_wgmma_begin();
    if constexpr (EXACT) {
        constexpr int STEP = ACROSS ? 16 * LINE : 32;
#pragma unroll
        for (int s = 0; s < 2; s++) { /* small ones first */
            ps_wgmma<ps_fp16, ACROSS>(d, a.lo[s], ps_wgmma_operand(b, s * STEP), add | s);
            ps_wgmma<ps_fp16, ACROSS>(d, a.hi[s], ps_wgmma_operand(b, s * STEP + further), 1);
        }
#pragma unroll
        for (int s = 0; s < 2; s++) {
            ps_wgmma<ps_fp16, ACROSS>(d, a.hi[s], ps_wgmma_operand(b, s * STEP), 1);
        }
    } else {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            ps_wgmma<float>(d, a.hi[s], ps_wgmma_operand(b, s * 32), add | s);
        }
    }
    ps_wgmma_commit();
}

/* EXACT: what a piece gave to the sum. */
template <int N, bool EXACT>
static __device__ __forceinline__ void add_to(float (&sum)[N / 8][4], const float (&d)[N / 8][4], const struct left_part<EXACT> &a)
{
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        sum[i / 4][i % 4] = fmaf(d[i / 4][i % 4], a.from[i % 4 / 2], sum[i / 4][i % 4]);
    }
}

#endif
