/* The one place that says which random bits belong to which element. Philox4x32-10 (Salmon et al. 2011): Random123's on the host,
 * cuRAND's on the device, the same bits. */
#ifndef PS_KERNELS_PHILOX_H
#define PS_KERNELS_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#include <curand_philox4x32_x.h>
#else
#include <Random123/philox.h>
#endif

/* What a block is drawn for; dropout sites count up from PS_SITE_DROPOUT (model/). */
enum {
    PS_SITE_DROPOUT = 0,
    PS_SITE_INIT = 0x40000000,
    PS_SITE_SHUFFLE = 0x50000000,
    PS_SITE_SAMPLE = 0x60000000,
    PS_SITE_MASK = 0x70000000
};

struct ps_block {
    uint32_t word[4];
};

/* Block `index` of `site` at `step`, keyed by seed. */
#ifdef __CUDACC__
static __device__ __forceinline__ struct ps_block ps_philox(uint64_t seed, uint32_t index, uint32_t site, uint64_t step)
{
    uint4 counter = make_uint4(index, site, (uint32_t)step, (uint32_t)(step >> 32));
    uint2 key = make_uint2((uint32_t)seed, (uint32_t)(seed >> 32));
    uint4 r = curand_Philox4x32_10(counter, key);
    struct ps_block block = {{r.x, r.y, r.z, r.w}};
    return block;
}
#else
static inline struct ps_block ps_philox(uint64_t seed, uint32_t index, uint32_t site, uint64_t step)
{
    philox4x32_ctr_t counter = {{index, site, (uint32_t)step, (uint32_t)(step >> 32)}};
    philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    philox4x32_ctr_t r = philox4x32(counter, key);
    struct ps_block block = {{r.v[0], r.v[1], r.v[2], r.v[3]}};
    return block;
}

/* Uniform in [0, 1) with 53 bits, number `index` of site at step: two to a block. */
static inline double ps_uniform(uint64_t seed, uint64_t index, uint32_t site, uint64_t step)
{
    struct ps_block block = ps_philox(seed, (uint32_t)(index / 2), site, step);
    uint64_t bits = (uint64_t)block.word[2 * (index % 2)] << 32 | block.word[2 * (index % 2) + 1];
    return (double)(bits >> 11) * 0x1p-53;
}
#endif

/* The 16 bits of element i (0..7) of a block. */
#ifdef __CUDACC__
__device__ __forceinline__
#else
static inline
#endif
    uint32_t
    ps_draw16(const struct ps_block *block, int i)
{
    return block->word[i / 2] >> (16 * (i % 2)) & 0xffffu;
}

/* What orders patches where some of them are masked: four places to a block, and a site for every 2^32 blocks. */
#ifdef __CUDACC__
__device__ __forceinline__
#else
static inline
#endif
    uint32_t
    ps_mask_key(uint64_t seed, uint64_t place, uint64_t step)
{
    const struct ps_block block = ps_philox(seed, (uint32_t)(place / 4), PS_SITE_MASK + (uint32_t)(place >> 34), step);
    const uint32_t low = place & 1 ? block.word[1] : block.word[0], high = place & 1 ? block.word[3] : block.word[2];
    return place & 2 ? high : low;
}

#endif
