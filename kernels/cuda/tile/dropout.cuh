/* Dropout's draws. */
#ifndef PS_KERNELS_CUDA_DROPOUT_CUH
#define PS_KERNELS_CUDA_DROPOUT_CUH

#include "kernels/cuda/tile/vector.cuh"
#include "kernels/kernels.h"
#include "kernels/philox.h"

/* Element of a dropped tensor whose draw is given. */
static __device__ __forceinline__ float ps_dropped(const struct ps_dropout &d, uint32_t draw, float value)
{
    return draw >= d.threshold ? value * d.scale : 0.0f;
}

/* Block `index` of a tensor's draws, which may be a part of a larger one. */
static __device__ __forceinline__ struct ps_block ps_draws(const struct ps_dropout &d, uint64_t step, uint32_t index)
{
    return ps_philox(d.seed, d.first + index, d.site, step);
}

/* ---- the same blocks where a kernel draws many of one site: each round's key from the arguments, and the step's and the site's
 * part in the first three rounds found once ---- */

struct ps_round_keys {
    uint32_t x[10], y[10]; /* of the rounds of Philox4x32-10 */
};

static inline struct ps_round_keys ps_round_keys_make(uint64_t seed)
{
    struct ps_round_keys keys;
    for (uint32_t i = 0; i < 10; i++) {
        keys.x[i] = (uint32_t)seed + i * 0x9e3779b9u;
        keys.y[i] = (uint32_t)(seed >> 32) + i * 0xbb67ae85u;
    }
    return keys;
}

static __device__ __forceinline__ uint2 ps_philox_product(uint32_t a, uint32_t b)
{
    const uint64_t product = (uint64_t)a * b;
    return make_uint2((uint32_t)product, (uint32_t)(product >> 32));
}

enum { PS_PHILOX_0 = 0xd2511f53, PS_PHILOX_1 = 0xcd9e8d57 };

/* What ps_draws_after needs of a site at a step. */
static __device__ __forceinline__ uint4 ps_draws_begin(const struct ps_round_keys &keys, uint32_t site, uint64_t step)
{
    const uint2 first = ps_philox_product(PS_PHILOX_1, (uint32_t)step);
    const uint2 second = ps_philox_product(PS_PHILOX_0, first.y ^ site ^ keys.x[0]);
    return make_uint4((uint32_t)(step >> 32) ^ keys.y[0], first.x ^ keys.x[1], second.y ^ keys.y[1], second.x ^ keys.y[2]);
}

/* Block `index` of the site, its `first` added. */
static __device__ __forceinline__ struct ps_block ps_draws_after(const struct ps_round_keys &keys, uint4 begin, uint32_t index)
{
    const uint2 first = ps_philox_product(PS_PHILOX_0, index);
    const uint2 second = ps_philox_product(PS_PHILOX_1, first.y ^ begin.x);
    uint2 a = ps_philox_product(PS_PHILOX_0, second.y ^ begin.y), b = ps_philox_product(PS_PHILOX_1, first.x ^ begin.z);
    struct ps_block block = {{b.y ^ second.x ^ keys.x[2], b.x, a.y ^ begin.w, a.x}};
#pragma unroll
    for (int i = 3; i < 10; i++) {
        a = ps_philox_product(PS_PHILOX_0, block.word[0]);
        b = ps_philox_product(PS_PHILOX_1, block.word[2]);
        block = {{b.y ^ block.word[1] ^ keys.x[i], b.x, a.y ^ block.word[3] ^ keys.y[i], a.x}};
    }
    return block;
}

/* The draw of one element. */
static __device__ __forceinline__ uint32_t ps_draw(const struct ps_dropout &d, uint64_t step, uint64_t element)
{
    const struct ps_block block = ps_draws(d, step, (uint32_t)(element / 8));
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
    const struct ps_block block = ps_draws(d, step, (uint32_t)(odd ? second : first));
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

/* threshold - 1 and its negative, of 16 bits, in both halves. threshold > 0. */
static __host__ __device__ __forceinline__ uint32_t ps_below(uint32_t threshold)
{
    return (threshold - 1) * 0x10001u;
}

static __host__ __device__ __forceinline__ uint32_t ps_minus_below(uint32_t threshold)
{
    return (1 - threshold & 0xffffu) * 0x10001u;
}

/* In each half: 1 where draw >= threshold, else 0. */
static __device__ __forceinline__ uint32_t ps_kept2(uint32_t draws, uint32_t below, uint32_t minus_below)
{
    return __viaddmin_u16x2(__vmaxu2(draws, below), minus_below, 0x00010001u);
}

/* Of two neighbours: in each half ones where the draw keeps it. threshold > 0. */
static __device__ __forceinline__ uint32_t ps_kept_mask(const struct ps_dropout &d, uint32_t draws)
{
    return ps_kept2(draws, ps_below(d.threshold), ps_minus_below(d.threshold)) * 0xffffu;
}

/* to = drop(v) of VEC elements from `element` on, of v as it would be stored; v becomes that, before it is rounded. */
template <int VEC, typename T>
static __device__ __forceinline__ void ps_store_dropped(T *to, int64_t element, float (&v)[VEC], const struct ps_dropout &d,
                                                        uint64_t step)
{
    struct ps_block draws;
    if (VEC > 1 && d.threshold) {
        draws = ps_draws(d, step, (uint32_t)(element / 8));
    }
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        T stored;
        ps_put(&stored, v[j]);
        v[j] = ps_float(stored);
        if (d.threshold) { /* 8 columns are a block of draws, 4 the first or the second half of one */
            const uint32_t draw = VEC == 8   ? ps_draw16(&draws, j)
                                  : VEC == 4 ? (element % 8 ? ps_draw16(&draws, j + 4 & 7) : ps_draw16(&draws, j))
                                             : ps_draw(d, step, (uint64_t)element);
            v[j] = ps_dropped(d, draw, v[j]);
        }
    }
    ps_store<VEC>(to + element, v);
}

#endif
