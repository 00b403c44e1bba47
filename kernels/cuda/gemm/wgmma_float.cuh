/* How gemm/wgmma.cu and gemm/wgmma_long.cu multiply float32 on Hopper's tensor cores.
 *
 * tf32 rounds the operands to nearest. fp32 takes three products: each operand is split into hi = its nearest tf32 and lo = the
 * rest (x = hi + lo to 2^-23), and c = hi hi' + hi lo' + lo hi'. The tensor cores' own sums are not rounded to nearest but cut off,
 * so they run over 32 of the summed dimension only; what they give is added in float32 with FADD. The errors against a double
 * product are no larger than those of a chain of FFMA (tests/test_kernels.c). */
#ifndef PS_KERNELS_CUDA_GEMM_WGMMA_FLOAT_CUH
#define PS_KERNELS_CUDA_GEMM_WGMMA_FLOAT_CUH

#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

enum { DEEP = 32, LINE = DEEP * 4 }; /* of the summed dimension at once; its bytes, a line of a panel */

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* d (+)= a b of one piece of DEEP: fragments of a, panels of b hi and, EXACT, b lo `further` bytes on. */
template <int N, bool EXACT>
static __device__ __forceinline__ void piece(float (&d)[N / 8][4], const uint32_t (&hi)[4][4], const uint32_t (&lo)[4][4],
                                             uint32_t place, int further, int add)
{
    ps_wgmma_begin();
    if constexpr (EXACT) { /* small ones first */
#pragma unroll
        for (int s = 0; s < 4; s++) {
            ps_wgmma<float>(d, lo[s], ps_wgmma_operand(place, s * 32), add | s);
            ps_wgmma<float>(d, hi[s], ps_wgmma_operand(place, s * 32 + further), 1);
        }
    }
#pragma unroll
    for (int s = 0; s < 4; s++) {
        ps_wgmma<float>(d, hi[s], ps_wgmma_operand(place, s * 32), EXACT ? 1 : add | s);
    }
    ps_wgmma_commit();
}

template <int N> static __device__ __forceinline__ void add_to(float (&sum)[N / 8][4], const float (&d)[N / 8][4])
{
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        sum[i / 4][i % 4] += d[i / 4][i % 4];
    }
}

#endif
