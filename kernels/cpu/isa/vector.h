/* The native vector of floats of the instruction set that this file is compiled for, V with VW lanes, and the narrower ones that
 * small products use. Arithmetic is the compiler's (vector extensions); here stands what those lack. */
#ifndef PS_KERNELS_CPU_ISA_VECTOR_H
#define PS_KERNELS_CPU_ISA_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float v4 __attribute__((vector_size(16)));
typedef float v4_unaligned __attribute__((vector_size(16), aligned(4), may_alias));

INLINE v4 v4_load(const float *p)
{
    return *(const v4_unaligned *)p;
}

INLINE void v4_store(float *p, v4 v)
{
    *(v4_unaligned *)p = v;
}

#if defined(__AVX2__)

typedef float v8 __attribute__((vector_size(32)));
typedef float v8_unaligned __attribute__((vector_size(32), aligned(4), may_alias));

INLINE __m256i lanes_below(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The first n lanes; the rest read as 0. */
INLINE v4 v4_load_part(const float *p, int64_t n)
{
    return (v4)_mm_maskload_ps(p, _mm256_castsi256_si128(lanes_below(n)));
}

INLINE void v4_store_part(float *p, v4 v, int64_t n)
{
    _mm_maskstore_ps(p, _mm256_castsi256_si128(lanes_below(n)), (__m128)v);
}

INLINE v8 v8_load(const float *p)
{
    return *(const v8_unaligned *)p;
}

INLINE void v8_store(float *p, v8 v)
{
    *(v8_unaligned *)p = v;
}

INLINE v8 v8_load_part(const float *p, int64_t n)
{
    return (v8)_mm256_maskload_ps(p, lanes_below(n));
}

INLINE void v8_store_part(float *p, v8 v, int64_t n)
{
    _mm256_maskstore_ps(p, lanes_below(n), (__m256)v);
}

#else

INLINE v4 v4_load_part(const float *p, int64_t n)
{
    v4 v = {0};
    for (int i = 0; i < 4 && i < n; i++) {
        v[i] = p[i];
    }
    return v;
}

INLINE void v4_store_part(float *p, v4 v, int64_t n)
{
    for (int i = 0; i < 4 && i < n; i++) {
        p[i] = v[i];
    }
}

#endif

#if defined(__AVX512F__)

typedef float v16 __attribute__((vector_size(64)));
typedef float v16_unaligned __attribute__((vector_size(64), aligned(4), may_alias));

INLINE v16 v16_load(const float *p)
{
    return *(const v16_unaligned *)p;
}

INLINE void v16_store(float *p, v16 v)
{
    *(v16_unaligned *)p = v;
}

INLINE v16 v16_load_part(const float *p, int64_t n)
{
    return (v16)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}

INLINE void v16_store_part(float *p, v16 v, int64_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
}

enum { VW = 16 };
typedef v16 V;
typedef int32_t VI __attribute__((vector_size(64)));
typedef uint32_t VU __attribute__((vector_size(64)));
typedef uint64_t VL __attribute__((vector_size(64)));
typedef uint16_t VH __attribute__((vector_size(32)));
typedef double VD __attribute__((vector_size(64)));
#define V_NAME(name) v16_##name

INLINE V v_max(V a, V b)
{
    return (V)_mm512_max_ps((__m512)a, (__m512)b);
}

INLINE V v_min(V a, V b)
{
    return (V)_mm512_min_ps((__m512)a, (__m512)b);
}

INLINE float v_sum(V v)
{
    return _mm512_reduce_add_ps((__m512)v);
}

/* Products of the lower halves of the 64-bit lanes. */
INLINE VL v_multiply_low(VL a, VL b)
{
    return (VL)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}

INLINE VD v_add_double(VD sum, V v)
{
    return sum + (VD)(_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)) + _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1)));
}

INLINE double v_sum_double(VD v)
{
    return _mm512_reduce_add_pd((__m512d)v);
}

INLINE float v_largest(V v)
{
    return _mm512_reduce_max_ps((__m512)v);
}

#elif defined(__AVX2__)

enum { VW = 8 };
typedef v8 V;
typedef int32_t VI __attribute__((vector_size(32)));
typedef uint32_t VU __attribute__((vector_size(32)));
typedef uint64_t VL __attribute__((vector_size(32)));
typedef uint16_t VH __attribute__((vector_size(16)));
typedef double VD __attribute__((vector_size(32)));
#define V_NAME(name) v8_##name

INLINE V v_max(V a, V b)
{
    return (V)_mm256_max_ps((__m256)a, (__m256)b);
}

INLINE V v_min(V a, V b)
{
    return (V)_mm256_min_ps((__m256)a, (__m256)b);
}

INLINE float v_sum(V v)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}

INLINE VL v_multiply_low(VL a, VL b)
{
    return (VL)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}

INLINE VD v_add_double(VD sum, V v)
{
    return sum + (VD)(_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)) + _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)));
}

INLINE double v_sum_double(VD v)
{
    return (v[0] + v[2]) + (v[1] + v[3]);
}

INLINE float v_largest(V v)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}

#else

enum { VW = 4 };
typedef v4 V;
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
typedef uint64_t VL __attribute__((vector_size(16)));
typedef uint16_t VH __attribute__((vector_size(8)));
typedef double VD __attribute__((vector_size(16)));
#define V_NAME(name) v4_##name

INLINE V v_max(V a, V b)
{
    VI larger = a > b;
    return (V)((larger & (VI)a) | (~larger & (VI)b));
}

INLINE V v_min(V a, V b)
{
    VI smaller = a < b;
    return (V)((smaller & (VI)a) | (~smaller & (VI)b));
}

INLINE float v_sum(V v)
{
    return (v[0] + v[2]) + (v[1] + v[3]);
}

INLINE VL v_multiply_low(VL a, VL b)
{
#if defined(__SSE2__)
    return (VL)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

INLINE VD v_add_double(VD sum, V v)
{
    return sum + (VD){(double)v[0] + (double)v[2], (double)v[1] + (double)v[3]};
}

INLINE double v_sum_double(VD v)
{
    return v[0] + v[1];
}

INLINE float v_largest(V v)
{
    float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}

#endif

/* VD: doubles in a register as wide as V; v_add_double adds all of v to its lanes.
 * v_max(a, b) is a > b ? a : b in every lane, v_min a < b ? a : b, so a NaN in b stays. */

INLINE V v_set(float x)
{
    return x - (V){0};
}

/* The next vector of a row of which `left` elements are still to come; lanes beyond it read as 0. */
INLINE V v_get(const float *p, int64_t left)
{
    return left >= VW ? V_NAME(load)(p) : V_NAME(load_part)(p, left);
}

INLINE void v_put(float *p, V v, int64_t left)
{
    if (left >= VW) {
        V_NAME(store)(p, v);
    } else {
        V_NAME(store_part)(p, v, left);
    }
}

INLINE V v_select(VI mask, V v)
{
    return (V)(mask & (VI)v);
}

/* The upper halves of the 64-bit lanes in the lower; what the upper then hold is of no use. A shuffle, where a shift would wait for
 * the port of the products. */
INLINE VL v_high(VL a)
{
#if defined(__AVX512F__)
    return (VL)_mm512_shuffle_epi32((__m512i)a, _MM_PERM_CDAB);
#else
    return a >> 32;
#endif
}

/* The sums over the lanes of four vectors. */
INLINE v4 v_sum4(const V sum[4])
{
    v4 part[4];
    for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)sum[i]), _mm512_extractf32x8_ps((__m512)sum[i], 1));
        part[i] = (v4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
        part[i] = (v4)_mm_add_ps(_mm256_castps256_ps128((__m256)sum[i]), _mm256_extractf128_ps((__m256)sum[i], 1));
#else
        part[i] = sum[i];
#endif
    }
    typedef int32_t order __attribute__((vector_size(16)));
    const v4 first =
        __builtin_shuffle(part[0], part[1], (order){0, 4, 1, 5}) + __builtin_shuffle(part[0], part[1], (order){2, 6, 3, 7});
    const v4 second =
        __builtin_shuffle(part[2], part[3], (order){0, 4, 1, 5}) + __builtin_shuffle(part[2], part[3], (order){2, 6, 3, 7});
    return __builtin_shuffle(first, second, (order){0, 1, 4, 5}) + __builtin_shuffle(first, second, (order){2, 3, 6, 7});
}

/* All ones in the first n lanes. */
INLINE VI v_lanes(int64_t n)
{
    VI lane;
    for (int i = 0; i < VW; i++) {
        lane[i] = i;
    }
    return lane < ((int)(n < VW ? n : VW) - (VI){0});
}

/* 1/x within an ulp or two where that is a normal number; 0 or near it beyond. */
INLINE V v_reciprocal(V x)
{
#if defined(__AVX512F__)
    const V r = (V)_mm512_rcp14_ps((__m512)x);
    return r * (2.0f - x * r);
#else
    return 1.0f / x;
#endif
}

/* e^x within 2 units in the last place for x up to 88: x = n ln 2 + r, a polynomial in r (Moshier, Cephes expf), times 2^n. Below
 * -87 it stays at 1e-38; NaN stays NaN. */
INLINE V v_exp_below_88(V x)
{
    const float to_integer = 0x1.8p23f;
    x = v_max(v_set(-87.33654f), x);
    const V shifted = x * 0x1.715476p+0f + to_integer, n = shifted - to_integer;
    const V r = x - n * 0.693359375f - n * -2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return (V)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (V)(((VU)shifted << 23) + 0x3f800000u); /* 2^n by its exponent bits */
#endif
}

/* For any x; from 88.4 on it stays at 2.4e38. */
INLINE V v_exp(V x)
{
    return v_exp_below_88(v_min(v_set(88.37626f), x));
}

#endif
