/* gelu(x) = x (1 + tanh(u)) / 2, u = sqrt(2/pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016), and its derivative, written in two
 * ways: by an exponential and a division, which fp32 needs, and by the instruction for tanh, whose error 16 bits and tf32 hide. */
#ifndef PS_KERNELS_CUDA_ACTIVATION_CUH
#define PS_KERNELS_CUDA_ACTIVATION_CUH

#include "kernels/cuda/tile/math.cuh"
#include "kernels/kernels.h"

/* gelu's weight s: 0.5 t (1 + tanh(u)) = t / (1 + exp(-2u)) = t s, 2u = t (a + b t^2). */
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

/* An activation of one input, and its derivative. */
template <enum ps_activation ACTIVATION> static __device__ __forceinline__ float ps_activated(float t)
{
    if constexpr (ACTIVATION == PS_GELU) {
        return 0.5f * t * (1.0f + erff(t * 0.70710678118654752f));
    } else if constexpr (ACTIVATION == PS_RELU) {
        return t > 0.0f || t != t ? t : 0.0f;
    } else {
        return t * ps_gelu_sigmoid(t);
    }
}

template <enum ps_activation ACTIVATION> static __device__ __forceinline__ float ps_activation_slope(float t)
{
    if constexpr (ACTIVATION == PS_GELU) {
        return 0.5f * (1.0f + erff(t * 0.70710678118654752f)) + t * 0.39894228040143268f * __expf(-0.5f * t * t);
    } else if constexpr (ACTIVATION == PS_RELU) {
        return t > 0.0f ? 1.0f : 0.0f;
    } else {
        return ps_gelu_slope(t, ps_gelu_sigmoid(t));
    }
}

#define PS_GELU_A 0.7978845608028654f  /* sqrt(2/pi) */
#define PS_GELU_B 0.03567740813636141f /* 0.044715 sqrt(2/pi) */

/* 2 gelu(x). */
static __device__ __forceinline__ float ps_gelu_twice(float x)
{
    return fmaf(x, ps_tanh(x * fmaf(x * x, PS_GELU_B, PS_GELU_A)), x);
}

/* gelu(x), and its derivative in `slope`; half: the 1/2, or as much of a multiple of both. */
static __device__ __forceinline__ float ps_gelu_with_slope(float x, float half, float &slope)
{
    const float square = x * x, t = ps_tanh(x * fmaf(square, PS_GELU_B, PS_GELU_A)), weight = fmaf(half, t, half);
    const float rise = x * fmaf(square, 3 * PS_GELU_B, PS_GELU_A);
    slope = fmaf(weight, fmaf(-t, rise, rise), weight); /* 1 - t^2 = (1 + t) (1 - t) */
    return x * weight;
}

/* x becomes 2 gelu(x), and `gradient`, of gelu(x), twice that of x. */
static __device__ __forceinline__ void ps_gelu_twice_backward(float &x, float &gradient)
{
    const float square = x * x, t = ps_tanh(x * fmaf(square, PS_GELU_B, PS_GELU_A));
    const float slope = fmaf(x * fmaf(square, 3 * PS_GELU_B, PS_GELU_A), fmaf(-t, t, 1.0f), t); /* less 1 */
    gradient = fmaf(gradient, slope, gradient);
    x = fmaf(x, t, x);
}

/* erf(x / sqrt(2)) where 16 bits hide the instruction's error: the tanh of a polynomial fitted to it, within 8e-5 (the fit 6.4e-5);
 * square: x^2, or 36 where it is more, beyond which it is 1. */
static __device__ __forceinline__ float ps_erf_near(float x, float square)
{
    return ps_tanh(x * fmaf(square, fmaf(square, -3.42038374e-4f, 3.69301100e-2f), 0.797624208f));
}

/* gelu(x) = x w, w = (1 + erf(x / sqrt(2))) / 2, and its derivative by that; half: the 1/2, or as much of a multiple. */
static __device__ __forceinline__ float ps_gelu_weight(float x, float square, float half = 0.5f)
{
    return fmaf(half, ps_erf_near(x, square), half);
}

static __device__ __forceinline__ float ps_gelu_near(float x, float scale = 1.0f)
{
    return x * ps_gelu_weight(x, fminf(x * x, 36.0f), 0.5f * scale);
}

/* And its derivative w + x times the normal density; peak: the logarithm to base 2 of that at 0, times the same multiple. */
static __device__ __forceinline__ float ps_gelu_near_with_slope(float x, float half, float peak, float &slope)
{
    const float square = fminf(x * x, 36.0f), weight = ps_gelu_weight(x, square, half);
    slope = fmaf(x, ps_exp2(fmaf(square, -0.5f * PS_LOG2_E, peak)), weight);
    return x * weight;
}

#endif
