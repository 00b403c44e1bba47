/* Operands of products, of type T: ps_bf16 or ps_fp16, two to a word, the first in its low half; and float, rounded to tf32. And
 * the products of a warp (mma.sync) that take them: tile/mma.cuh says how a fragment lies in the lanes. */
#ifndef PS_KERNELS_CUDA_OPERANDS_CUH
#define PS_KERNELS_CUDA_OPERANDS_CUH

#include <stdint.h>

#include "kernels/cuda/tile/vector.cuh"

/* Two neighbours of a row as an operand has them. */
template <typename T> using ps_pair = uint32_t;

/* Rounded to the nearest tf32. */
static __device__ __forceinline__ uint32_t ps_tf32(float x)
{
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

/* The tensor cores leave out the low 13 bits: with half of what the others count added, that rounds, ties away from zero. The NaN
 * that arithmetic makes, whose bits are all ones but for the sign, stays one. */
static __device__ __forceinline__ uint32_t ps_round_up(float x)
{
    return (uint32_t)(min(__float_as_int(x), 0x7fffefff) + 0x1000);
}

/* Rounded to nearest, ties to even. */
template <typename T> static __device__ __forceinline__ ps_pair<T> ps_pack(float low, float high)
{
    ps_pair<T> pair;
    if constexpr (std::is_same<T, ps_bf16>::value) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        static_assert(std::is_same<T, ps_fp16>::value, "fp16 or bf16");
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
}

template <typename T> static __device__ __forceinline__ float ps_low(ps_pair<T> pair)
{
    if constexpr (std::is_same<T, ps_bf16>::value) { /* the high half of a float */
        return __uint_as_float(pair << 16);
    } else {
        static_assert(std::is_same<T, ps_fp16>::value, "fp16 or bf16");
        return __half2float(__ushort_as_half((unsigned short)pair));
    }
}

template <typename T> static __device__ __forceinline__ float ps_high(ps_pair<T> pair)
{
    if constexpr (std::is_same<T, ps_bf16>::value) {
        return __uint_as_float(pair & 0xffff0000u);
    } else {
        static_assert(std::is_same<T, ps_fp16>::value, "fp16 or bf16");
        return __half2float(__ushort_as_half((unsigned short)(pair >> 16)));
    }
}

/* The bits of one, and two ones. */
template <typename T> static constexpr uint32_t ps_one = std::is_same<T, ps_bf16>::value ? 0x3f80u : 0x3c00u;

template <typename T> static __device__ __forceinline__ ps_pair<T> ps_ones()
{
    return ps_one<T> << 16 | ps_one<T>;
}

/* Two elements to memory. */
template <typename T> static __device__ __forceinline__ void ps_put_operand(T *to, uint32_t pair)
{
    *(uint32_t *)to = pair;
}

/* One of them. */
template <typename T> static __device__ __forceinline__ void ps_put_bits(T *to, uint32_t pair, int which)
{
    *(uint16_t *)to = (uint16_t)(pair >> 16 * which);
}

/* Two neighbours of memory, and to there. */
template <typename T> static __device__ __forceinline__ void ps_get_pair(float &low, float &high, const T *from, bool there)
{
    if constexpr (std::is_same<T, float>::value) {
        const float2 v = there ? *(const float2 *)from : make_float2(0, 0);
        low = v.x;
        high = v.y;
    } else {
        const uint32_t v = there ? *(const uint32_t *)from : 0;
        low = ps_low<T>(v);
        high = ps_high<T>(v);
    }
}

template <typename T> static __device__ __forceinline__ void ps_put_pair(T *to, float low, float high)
{
    if constexpr (std::is_same<T, float>::value) {
        *(float2 *)to = make_float2(low, high);
    } else {
        *(uint32_t *)to = ps_pack<T>(low, high);
    }
}

/* Whether softmax's exponentials, rounded to T, are right as they are, so that the row's largest score need not be taken off
 * first: by their sum, in which one that is infinite shows. fp16 loses bits below 2^-14: what counts in a sum above 2^-4 of up to
 * 64 does not lie there. */
template <typename T> static __device__ __forceinline__ bool ps_sums_hold(float low, float high)
{
    return std::is_same<T, ps_fp16>::value ? low > 0x1p-4f && high < 0x1p+16f : low > 0x1p-90f && high < 0x1p+90f;
}

/* d = a b + c in tf32; a m16k8, b k8n8. Lane q holds k = q and q + 4: a rows g, g + 8 of the first, then of the second. */
static __device__ __forceinline__ void ps_mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                   const float (&c)[4])
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

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
static __device__ __forceinline__ void ps_mma16(float (&d)[4], const ps_pair<T> (&a)[4], ps_pair<T> b0, ps_pair<T> b1,
                                                const float (&c)[4])
{
    if constexpr (std::is_same<T, ps_bf16>::value) {
        PS_MMA16("bf16.bf16");
    } else {
        static_assert(std::is_same<T, ps_fp16>::value, "fp16 or bf16");
        PS_MMA16("f16.f16");
    }
}

/* d = a b + c; a m16k8, b k8n8. */
template <typename T>
static __device__ __forceinline__ void ps_mma8(float (&d)[4], ps_pair<T> a0, ps_pair<T> a1, ps_pair<T> b, const float (&c)[4])
{
    if constexpr (std::is_same<T, ps_bf16>::value) {
        PS_MMA8("bf16.bf16");
    } else {
        static_assert(std::is_same<T, ps_fp16>::value, "fp16 or bf16");
        PS_MMA8("f16.f16");
    }
}

#undef PS_MMA16
#undef PS_MMA8

#endif
