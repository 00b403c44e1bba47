/* The 16-bit reals of activations and of products' operands: bf16, or fp16 in a file compiled with PS_COMPILE_FP16. The kernels of level
 * `layer` are compiled once for each (CMakeLists.txt); what a file gives others bears its type in its name. */
#ifndef PS_KERNELS_CUDA_REAL16_CUH
#define PS_KERNELS_CUDA_REAL16_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#ifdef PS_COMPILE_FP16
typedef __half real16;
#define PS_REAL16 PS_F16
#define PS_REAL16_PTX "f16" /* in the names of instructions */
#define PS_REAL16_NAME(name) name##_fp16
#else
typedef __nv_bfloat16 real16;
#define PS_REAL16 PS_BF16
#define PS_REAL16_PTX "bf16"
#define PS_REAL16_NAME(name) name##_bf16
#endif

static __device__ __forceinline__ float ps_wide(real16 x)
{
#ifdef PS_COMPILE_FP16
    return __half2float(x);
#else
    return __bfloat162float(x);
#endif
}

/* Rounded to nearest, ties to even, here and below. */
static __device__ __forceinline__ real16 ps_round(float x)
{
#ifdef PS_COMPILE_FP16
    return __float2half_rn(x);
#else
    return __float2bfloat16_rn(x);
#endif
}

/* Two in a word, the first in its low half. */
static __device__ __forceinline__ uint32_t ps_pack(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn." PS_REAL16_PTX "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#ifdef PS_COMPILE_FP16
static __device__ __forceinline__ float ps_low(uint32_t pair)
{
    return __half2float(__ushort_as_half((unsigned short)pair));
}

static __device__ __forceinline__ float ps_high(uint32_t pair)
{
    return __half2float(__ushort_as_half((unsigned short)(pair >> 16)));
}
#else /* a bf16 is the high half of a float */
static __device__ __forceinline__ float ps_low(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

static __device__ __forceinline__ float ps_high(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}
#endif

#endif
