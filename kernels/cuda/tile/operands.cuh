/* Operands of 16 bits, T ps_bf16 or ps_fp16: two to a word, the first in its low half, and the products of a warp (mma.sync) that
 * take them. tile/mma.cuh says how a fragment lies in the lanes. */
#ifndef PS_KERNELS_CUDA_OPERANDS_CUH
#define PS_KERNELS_CUDA_OPERANDS_CUH

#include <stdint.h>

#include "kernels/cuda/tile/vector.cuh"

/* Rounded to nearest, ties to even. */
template <typename T> static __device__ __forceinline__ uint32_t ps_pack(float low, float high)
{
    uint32_t pair;
    if constexpr (std::is_same<T, ps_bf16>::value) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
}

template <typename T> static __device__ __forceinline__ float ps_low(uint32_t pair)
{
    if constexpr (std::is_same<T, ps_bf16>::value) { /* the high half of a float */
        return __uint_as_float(pair << 16);
    } else {
        return __half2float(__ushort_as_half((unsigned short)pair));
    }
}

template <typename T> static __device__ __forceinline__ float ps_high(uint32_t pair)
{
    if constexpr (std::is_same<T, ps_bf16>::value) {
        return __uint_as_float(pair & 0xffff0000u);
    } else {
        return __half2float(__ushort_as_half((unsigned short)(pair >> 16)));
    }
}

/* Two ones. */
template <typename T> static constexpr uint32_t ps_ones_of = std::is_same<T, ps_bf16>::value ? 0x3f803f80u : 0x3c003c00u;

/* KIND: the types in the instruction's name. */
#define PS_MMA16(KIND)                                                                                                           \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]))
#define PS_MMA8(KIND)                                                                                            \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." KIND ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};" \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                         \
        : "r"(a0), "r"(a1), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]))

/* d = a b + c; a m16k16, b k16n8. c may be d. */
template <typename T>
static __device__ __forceinline__ void ps_mma16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                const float (&c)[4])
{
    if constexpr (std::is_same<T, ps_bf16>::value) {
        PS_MMA16("bf16.bf16");
    } else {
        PS_MMA16("f16.f16");
    }
}

/* d = a b + c; a m16k8, b k8n8. */
template <typename T>
static __device__ __forceinline__ void ps_mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, const float (&c)[4])
{
    if constexpr (std::is_same<T, ps_bf16>::value) {
        PS_MMA8("bf16.bf16");
    } else {
        PS_MMA8("f16.f16");
    }
}

#undef PS_MMA16
#undef PS_MMA8

#endif
