/* The 16-bit reals of activations and of products' operands: bf16, or fp16 in a file compiled with PS_COMPILE_FP16. The kernels of
 * level `layer` are compiled once for each (CMakeLists.txt); the two do not share a name: namespace PS_REAL16_SPACE. */
#ifndef PS_KERNELS_CUDA_REAL16_CUH
#define PS_KERNELS_CUDA_REAL16_CUH

#include "kernels/cuda/primitives.cuh"

#ifdef PS_COMPILE_FP16
typedef ps_fp16 real16;
#define PS_REAL16 PS_F16
#define PS_REAL16_PTX "f16" /* in the names of instructions */
#define PS_REAL16_SPACE level_fp16
#define PS_REAL16_ONE 0x3c00u
#else
typedef ps_bf16 real16;
#define PS_REAL16 PS_BF16
#define PS_REAL16_PTX "bf16"
#define PS_REAL16_SPACE level_bf16
#define PS_REAL16_ONE 0x3f80u
#endif

#define PS_REAL16_ONES (PS_REAL16_ONE << 16 | PS_REAL16_ONE) /* two, in a word */

/* Whether softmax's exponentials, rounded to this type, are right as they are, so that the row's largest score need not be taken
 * off first: by their sum, in which one that is infinite shows. fp16 loses bits below 2^-14: what counts in a sum above 2^-4 of up
 * to 64 does not lie there. */
static __device__ __forceinline__ bool ps_sums_hold(float low, float high)
{
#ifdef PS_COMPILE_FP16
    return low > 0x1p-4f && high < 0x1p+16f;
#else
    return low > 0x1p-90f && high < 0x1p+90f;
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
