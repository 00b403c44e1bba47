/* Elements in memory and in registers: float, bf16 and fp16, up to 16 bytes at once. */
#ifndef PS_KERNELS_CUDA_VECTOR_CUH
#define PS_KERNELS_CUDA_VECTOR_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

#include "kernels/tensor.h"

typedef __nv_bfloat16 ps_bf16;
typedef __half ps_fp16;

/* Elements of type T in 16 bytes: 4 floats, 8 bf16 or fp16. */
template <typename T> static constexpr int ps_vector = 16 / (int)sizeof(T);

template <typename T>
static constexpr enum ps_type ps_type_of = std::is_same<T, ps_bf16>::value   ? PS_BF16
                                           : std::is_same<T, ps_fp16>::value ? PS_F16
                                                                             : PS_F32;

/* ---- 1, 4 or 8 consecutive elements, aligned to their size (at most 16 bytes); in registers they are floats ---- */

template <int VEC> static __device__ __forceinline__ void ps_load(float *r, const float *p)
{
    static_assert(VEC == 1 || VEC == 4 || VEC == 8, "1, 4 or 8 elements");
    if constexpr (VEC == 8) {
        ps_load<4>(r, p);
        ps_load<4>(r + 4, p + 4);
    } else if constexpr (VEC == 4) {
        const float4 v = *(const float4 *)p;
        r[0] = v.x;
        r[1] = v.y;
        r[2] = v.z;
        r[3] = v.w;
    } else {
        r[0] = *p;
    }
}

template <int VEC> static __device__ __forceinline__ void ps_store(float *p, const float *r)
{
    static_assert(VEC == 1 || VEC == 4 || VEC == 8, "1, 4 or 8 elements");
    if constexpr (VEC == 8) {
        ps_store<4>(p, r);
        ps_store<4>(p + 4, r + 4);
    } else if constexpr (VEC == 4) {
        *(float4 *)p = make_float4(r[0], r[1], r[2], r[3]);
    } else {
        *p = r[0];
    }
}

static __device__ __forceinline__ float ps_float(float x)
{
    return x;
}

static __device__ __forceinline__ float ps_float(ps_bf16 x)
{
    return __bfloat162float(x);
}

static __device__ __forceinline__ float ps_float(ps_fp16 x)
{
    return __half2float(x);
}

/* Rounded to nearest, ties to even, here and below. */
static __device__ __forceinline__ void ps_put(float *p, float x)
{
    *p = x;
}

static __device__ __forceinline__ void ps_put(ps_bf16 *p, float x)
{
    *p = __float2bfloat16_rn(x);
}

static __device__ __forceinline__ void ps_put(ps_fp16 *p, float x)
{
    *p = __float2half_rn(x);
}

/* Two reals of type T in a word, the first in its low half. */
template <typename T> static __device__ __forceinline__ void ps_unpack(float *r, uint32_t word)
{
    if constexpr (std::is_same<T, ps_bf16>::value) { /* the high half of a float */
        r[0] = __uint_as_float(word << 16);
        r[1] = __uint_as_float(word & 0xffff0000u);
    } else {
        static_assert(std::is_same<T, ps_fp16>::value, "fp16 or bf16");
        const float2 pair = __half22float2(*(const __half2 *)&word);
        r[0] = pair.x;
        r[1] = pair.y;
    }
}

template <typename T> static __device__ __forceinline__ uint32_t ps_pack(const float *r)
{
    if constexpr (std::is_same<T, ps_bf16>::value) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(r[0], r[1]);
        return *(const uint32_t *)&pair;
    } else {
        static_assert(std::is_same<T, ps_fp16>::value, "fp16 or bf16");
        const __half2 pair = __floats2half2_rn(r[0], r[1]);
        return *(const uint32_t *)&pair;
    }
}

template <int VEC, typename T> static __device__ __forceinline__ void ps_load(float *r, const T *p)
{
    static_assert(VEC == 1 || VEC == 4 || VEC == 8, "1, 4 or 8 elements");
    static_assert(sizeof(T) == 2, "float has its own");
    if constexpr (VEC == 8) {
        const uint4 v = *(const uint4 *)p;
        ps_unpack<T>(r, v.x);
        ps_unpack<T>(r + 2, v.y);
        ps_unpack<T>(r + 4, v.z);
        ps_unpack<T>(r + 6, v.w);
    } else if constexpr (VEC == 4) {
        const uint2 v = *(const uint2 *)p;
        ps_unpack<T>(r, v.x);
        ps_unpack<T>(r + 2, v.y);
    } else {
        r[0] = ps_float(*p);
    }
}

template <int VEC, typename T> static __device__ __forceinline__ void ps_store(T *p, const float *r)
{
    static_assert(VEC == 1 || VEC == 4 || VEC == 8, "1, 4 or 8 elements");
    static_assert(sizeof(T) == 2, "float has its own");
    if constexpr (VEC == 8) {
        *(uint4 *)p = make_uint4(ps_pack<T>(r), ps_pack<T>(r + 2), ps_pack<T>(r + 4), ps_pack<T>(r + 6));
    } else if constexpr (VEC == 4) {
        *(uint2 *)p = make_uint2(ps_pack<T>(r), ps_pack<T>(r + 2));
    } else {
        ps_put(p, r[0]);
    }
}

/* function<T>(..) with that type; of another, float, whose function refuses the tensors. */
#define PS_BY_TYPE(type, function, ...)                  \
    ((type) == PS_BF16  ? function<ps_bf16>(__VA_ARGS__) \
     : (type) == PS_F16 ? function<ps_fp16>(__VA_ARGS__) \
                        : function<float>(__VA_ARGS__))

/* With that of the table's activations. */
#define PS_BY_REAL(k, function, ...) PS_BY_TYPE((k)->real, function, __VA_ARGS__)

#endif
