/* The hardware's approximations, one instruction each. */
#ifndef PS_KERNELS_CUDA_MATH_CUH
#define PS_KERNELS_CUDA_MATH_CUH

#include <stdint.h>

#define PS_LOG2_E 1.4426950408889634f

static __device__ __forceinline__ float ps_tanh(float x)
{
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float ps_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 2^x without that unit, of x between -126 and 127, or what is next to x there, within 8e-5 of it: the whole number next to x goes
 * into the exponent, a polynomial of degree 3 (of least relative error) has the rest. NaN gives what is no finite bf16 or fp16.
 * Where exponentials bound a kernel it takes some of them so (Zadouri et al. 2026). */
static __device__ __forceinline__ float ps_exp2_polynomial(float x)
{
    const float shift = 0x1.8p+23f; /* the sum's last bits are the whole number */
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-126.0f));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(127.0f));
    const float whole = x + shift, rest = x - (whole - shift);
    const float power = fmaf(fmaf(fmaf(0.0551716797f, rest, 0.24261117f), rest, 0.693260968f), rest, 0.999928057f);
    return __int_as_float(__float_as_int(power) + (int)((uint32_t)__float_as_int(whole) << 23));
}

static __device__ __forceinline__ float ps_log2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float ps_reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
