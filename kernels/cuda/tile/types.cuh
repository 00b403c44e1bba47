/* The reals of activations and of products' operands at level `layer`: 16 bits, bf16, or fp16 in a file compiled with
 * PS_COMPILE_FP16; and fp32, rounded to tf32 as operands, with PS_COMPILE_TF32, which some of the files know (ps_real), and as it
 * is with PS_COMPILE_FP32 besides. The kernels are compiled once for each (CMakeLists.txt), encoder/resident/d64_short.cu's for
 * fp16 a second time with a stream of fp32 (PS_COMPILE_HALVES), and share no name: namespace PS_REAL16_SPACE. */
#ifndef PS_KERNELS_CUDA_TYPES_CUH
#define PS_KERNELS_CUDA_TYPES_CUH

#include "kernels/cuda/tile/operands.cuh"

#if defined PS_COMPILE_TF32
typedef float ps_real;
#define PS_REAL16 PS_F32
#ifdef PS_COMPILE_FP32
#define PS_REAL16_SPACE level_fp32
#else
#define PS_REAL16_SPACE level_tf32
#endif
#define PS_REAL16_ONE 0x3f800000u
#elif defined PS_COMPILE_FP16
typedef ps_fp16 real16;
#define PS_REAL16 PS_F16
#define PS_REAL16_PTX "f16" /* in the names of instructions */
#ifdef PS_COMPILE_HALVES    /* fp16's operands with a stream of fp32, for tf32: encoder/resident/d64_short_tf32.cu */
#define PS_REAL16_SPACE level_halves
#else
#define PS_REAL16_SPACE level_fp16
#endif
#define PS_REAL16_ONE 0x3c00u
#else
typedef ps_bf16 real16;
#define PS_REAL16 PS_BF16
#define PS_REAL16_PTX "bf16"
#define PS_REAL16_SPACE level_bf16
#define PS_REAL16_ONE 0x3f80u
#endif

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

/* A function of kernels that this type has not: it serves nothing and refuses. */
#define PS_ABSENT(type, name, refusal)                  \
    template <class... P> static inline type name(P...) \
    {                                                   \
        return refusal;                                 \
    }

/* Two neighbours of fp32 to memory and from there. */
static __device__ __forceinline__ void ps_put_pair(float *to, float low, float high)
{
    *(float2 *)to = make_float2(low, high);
}

static __device__ __forceinline__ void ps_get_pair(float &low, float &high, const float *from, bool there)
{
    const float2 v = there ? *(const float2 *)from : make_float2(0, 0);
    low = v.x;
    high = v.y;
}

/* Neighbours of a row as an operand has them, ps_pair: a word of two, or two words of tf32. */
#ifdef PS_COMPILE_TF32
typedef uint2 ps_pair;
typedef uint32_t ps_bits;

static __device__ __forceinline__ ps_pair ps_pack(float low, float high)
{
    return make_uint2(ps_round_up(low), ps_round_up(high));
}

static __device__ __forceinline__ ps_pair ps_ones()
{
    return make_uint2(PS_REAL16_ONE, PS_REAL16_ONE);
}

/* From two elements of memory. */
static __device__ __forceinline__ ps_pair ps_join(uint32_t low, uint32_t high)
{
    return ps_pack(__uint_as_float(low), __uint_as_float(high));
}

static __device__ __forceinline__ ps_bits ps_low_bits(ps_pair pair)
{
    return pair.x & 0xffffe000u;
}

static __device__ __forceinline__ ps_bits ps_high_bits(ps_pair pair)
{
    return pair.y & 0xffffe000u;
}

/* One of two that were zero. */
static __device__ __forceinline__ void ps_put_bits(ps_pair &pair, int which, uint32_t bits)
{
    (which ? pair.y : pair.x) = bits;
}

static __device__ __forceinline__ void ps_put_pairs(ps_real *to, const ps_pair (&pair)[4])
{
    ((uint4 *)to)[0] = make_uint4(pair[0].x, pair[0].y, pair[1].x, pair[1].y);
    ((uint4 *)to)[1] = make_uint4(pair[2].x, pair[2].y, pair[3].x, pair[3].y);
}

/* To memory. */
static __device__ __forceinline__ void ps_put_operand(ps_real *to, ps_pair pair)
{
    *(ps_pair *)to = make_uint2(ps_low_bits(pair), ps_high_bits(pair));
}

static __device__ __forceinline__ float ps_low(ps_pair pair)
{
    return __uint_as_float(pair.x & 0xffffe000u);
}

static __device__ __forceinline__ float ps_high(ps_pair pair)
{
    return __uint_as_float(pair.y & 0xffffe000u);
}

#else
typedef real16 ps_real;
typedef uint32_t ps_pair;
typedef uint16_t ps_bits;
#define PS_REAL16_ONES ps_ones_of<real16>

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
    return ps_pack<real16>(low, high);
}

static __device__ __forceinline__ float ps_low(uint32_t pair)
{
    return ps_low<real16>(pair);
}

static __device__ __forceinline__ float ps_high(uint32_t pair)
{
    return ps_high<real16>(pair);
}

static __device__ __forceinline__ ps_pair ps_ones()
{
    return PS_REAL16_ONES;
}

static __device__ __forceinline__ ps_pair ps_join(uint32_t low, uint32_t high)
{
    return low | high << 16;
}

static __device__ __forceinline__ ps_bits ps_low_bits(ps_pair pair)
{
    return (ps_bits)pair;
}

static __device__ __forceinline__ ps_bits ps_high_bits(ps_pair pair)
{
    return (ps_bits)(pair >> 16);
}

static __device__ __forceinline__ void ps_put_bits(ps_pair &pair, int which, uint32_t bits)
{
    pair |= bits << 16 * which;
}

static __device__ __forceinline__ void ps_put_pairs(ps_real *to, const ps_pair (&pair)[4])
{
    *(uint4 *)to = make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

static __device__ __forceinline__ void ps_put_operand(ps_real *to, ps_pair pair)
{
    *(ps_pair *)to = pair;
}

/* The same of 16 bits. */
static __device__ __forceinline__ void ps_put_pair(ps_real *to, float low, float high)
{
    *(ps_pair *)to = ps_pack(low, high);
}

static __device__ __forceinline__ void ps_get_pair(float &low, float &high, const ps_real *from, bool there)
{
    const ps_pair v = there ? *(const ps_pair *)from : 0;
    low = ps_low(v);
    high = ps_high(v);
}

#endif /* 16 bits */

#endif
