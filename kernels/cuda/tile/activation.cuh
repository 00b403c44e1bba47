/* gelu, tanh's form. */
#ifndef PS_KERNELS_CUDA_ACTIVATION_CUH
#define PS_KERNELS_CUDA_ACTIVATION_CUH

#include "kernels/cuda/tile/math.cuh"

/* Its weight s: 0.5 t (1 + tanh(u)) = t / (1 + exp(-2u)) = t s, 2u = t (a + b t^2). */
static __device__ __forceinline__ float ps_gelu_sigmoid(float t)
{
    const float a = -1.59576912160573f * PS_LOG2_E, b = -0.0713548162726f * PS_LOG2_E; /* 2 sqrt(2/pi), that times 0.044715 */
    return ps_reciprocal(1.0f + ps_exp2(t * fmaf(b, t * t, a)));
}

/* Its derivative s + t s (1 - s) 2u', 2u' = a + 3 b t^2. */
static __device__ __forceinline__ float ps_gelu_slope(float t, float s)
{
    const float slope = 1.59576912160573f + 0.2140644488178f * t * t;
    return s + t * s * (1.0f - s) * slope;
}

#endif
