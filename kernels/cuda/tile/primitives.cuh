/* Device code that several kernels share: 16-byte accesses, reductions in a fixed order, dropout's draws. */
#ifndef PS_KERNELS_CUDA_PRIMITIVES_CUH
#define PS_KERNELS_CUDA_PRIMITIVES_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

#include "kernels/cuda/context.cuh"

#define PS_LOG2_E 1.4426950408889634f

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

/* function<T>(..) with the table's activations. Level gemm's operations have no fp16: those get float, and refuse the tensors. */
#define PS_BY_REAL(k, function, ...) ((k)->real == PS_BF16 ? function<ps_bf16>(__VA_ARGS__) : function<float>(__VA_ARGS__))

/* The same for what level layer needs too. */
#define PS_BY_ANY_REAL(k, function, ...) \
    ((k)->real == PS_F16 ? function<ps_fp16>(__VA_ARGS__) : PS_BY_REAL(k, function, __VA_ARGS__))

/* ---- reductions: every lane of the warp takes part; a group is LANES neighbouring lanes, and all of it gets the result ---- */

template <int LANES, typename T> static __device__ __forceinline__ T ps_group_sum(T value)
{
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

template <int LANES> static __device__ __forceinline__ float ps_group_max(float value)
{
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    return value;
}

/* The block's sum, in all its threads; BLOCK threads, a multiple of 32. shared [BLOCK / 32] may be used again at once. */
template <int BLOCK, typename T> static __device__ __forceinline__ T ps_block_sum(T value, T *shared)
{
    value = ps_group_sum<32>(value);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    T sum = shared[0];
#pragma unroll
    for (int i = 1; i < BLOCK / 32; i++) {
        sum += shared[i];
    }
    __syncthreads();
    return sum;
}

template <int BLOCK> static __device__ __forceinline__ float ps_block_max(float value, float *shared)
{
    value = ps_group_max<32>(value);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float max = shared[0];
#pragma unroll
    for (int i = 1; i < BLOCK / 32; i++) {
        max = fmaxf(max, shared[i]);
    }
    __syncthreads();
    return max;
}

/* The block's sum of partials[i * stride] for i < count, in a fixed order. */
template <int BLOCK>
static __device__ __forceinline__ double ps_sum_partials(const double *partials, int count, int stride, double *shared)
{
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += BLOCK) {
        sum += partials[(int64_t)i * stride];
    }
    return ps_block_sum<BLOCK>(sum, shared);
}

/* ---- gelu, tanh's form ---- */

/* Its weight s: 0.5 t (1 + tanh(u)) = t / (1 + exp(-2u)) = t s, 2u = t (a + b t^2). */
static __device__ __forceinline__ float ps_gelu_sigmoid(float t)
{
    const float a = -1.59576912160573f * PS_LOG2_E, b = -0.0713548162726f * PS_LOG2_E; /* 2 sqrt(2/pi), that times 0.044715 */
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t * fmaf(b, t * t, a)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s;
}

/* Its derivative s + t s (1 - s) 2u', 2u' = a + 3 b t^2. */
static __device__ __forceinline__ float ps_gelu_slope(float t, float s)
{
    const float slope = 1.59576912160573f + 0.2140644488178f * t * t;
    return s + t * s * (1.0f - s) * slope;
}

/* ---- index arithmetic ---- */

/* Division by a divisor fixed on the host: one multiplication. Dividends and divisor below 2^31. Granlund and Montgomery 1994. */
struct ps_divisor {
    uint32_t divisor, multiplier, shift;
};

static inline struct ps_divisor ps_divisor_make(int64_t divisor)
{
    struct ps_divisor d = {(uint32_t)divisor, 0, 0};
    while (((uint64_t)1 << d.shift) < (uint64_t)divisor) {
        d.shift++;
    }
    d.multiplier = (uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << d.shift) - (uint64_t)divisor)) / (uint64_t)divisor + 1);
    return d;
}

static __device__ __forceinline__ uint32_t ps_divide(uint32_t x, struct ps_divisor d)
{
    return (__umulhi(x, d.multiplier) + x) >> d.shift;
}

/* i mod n; 32-bit arithmetic where it will do. */
static __device__ __forceinline__ uint32_t ps_modulo(uint64_t i, uint32_t n)
{
    return i >> 32 ? (uint32_t)(i % n) : (uint32_t)i % n;
}

/* ---- dropout ---- */

/* Element of a dropped tensor whose draw is given. */
static __device__ __forceinline__ float ps_dropped(const struct ps_dropout &d, uint32_t draw, float value)
{
    return draw >= d.threshold ? value * d.scale : 0.0f;
}

/* The draw of one element. */
static __device__ __forceinline__ uint32_t ps_draw(const struct ps_dropout &d, uint64_t step, uint64_t element)
{
    const struct ps_block block = ps_philox(d.seed, (uint32_t)(element / 8), d.site, step);
    const uint32_t part = (uint32_t)element % 8;
    const uint32_t low = part / 2 & 1 ? block.word[1] : block.word[0], high = part / 2 & 1 ? block.word[3] : block.word[2];
    return (part & 4 ? high : low) >> (16 * (part & 1)) & 0xffffu;
}

/* Draws for two float4 a lane with one Philox block a lane. Even lanes hold the first half of a block of 8 elements and the lane
 * beside the second half; `first` and `second` number the blocks of the lane's two float4. The even lane draws the first, the odd
 * lane the second, and they exchange halves. All lanes of the warp take part. Draw j of a float4 is ps_pair_draw(words, j). */
static __device__ __forceinline__ void ps_draw_pair(const struct ps_dropout &d, uint64_t step, uint64_t first, uint64_t second,
                                                    uint32_t (&first_words)[2], uint32_t (&second_words)[2])
{
    const bool odd = threadIdx.x & 1;
    const struct ps_block block = ps_philox(d.seed, (uint32_t)(odd ? second : first), d.site, step);
    const uint32_t low = __shfl_xor_sync(0xffffffffu, odd ? block.word[0] : block.word[2], 1);
    const uint32_t high = __shfl_xor_sync(0xffffffffu, odd ? block.word[1] : block.word[3], 1);
    first_words[0] = odd ? low : block.word[0];
    first_words[1] = odd ? high : block.word[1];
    second_words[0] = odd ? block.word[2] : low;
    second_words[1] = odd ? block.word[3] : high;
}

static __device__ __forceinline__ uint32_t ps_pair_draw(const uint32_t (&words)[2], int j)
{
    return words[j / 2] >> (16 * (j % 2)) & 0xffffu;
}

#endif
