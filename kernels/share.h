/* Which windows of a batch are whose, when ranks share it: contiguous shares in the ranks' order, which may differ by a granule. */
#ifndef PS_KERNELS_SHARE_H
#define PS_KERNELS_SHARE_H

#include <stdint.h>

/* How a batch is shared. granule: shares begin at multiples of so many windows, where a dropout block begins (kernels/philox.h). */
struct ps_shares {
    int64_t windows, granule;
    int ranks;
};

#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int64_t
    ps_share_begin(const struct ps_shares *s, int rank)
{
    const int64_t granules = (s->windows + s->granule - 1) / s->granule, begin = granules * rank / s->ranks * s->granule;
    return begin < s->windows ? begin : s->windows;
}

#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int64_t
    ps_share_count(const struct ps_shares *s, int rank)
{
    return ps_share_begin(s, rank + 1) - ps_share_begin(s, rank);
}

/* Windows of the largest share. */
static inline int64_t ps_share_most(const struct ps_shares *s)
{
    const int64_t granules = (s->windows + s->granule - 1) / s->granule, most = (granules + s->ranks - 1) / s->ranks * s->granule;
    return most < s->windows ? most : s->windows;
}

#endif
