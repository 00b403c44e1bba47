/* Counters in memory by which blocks tell one another how far they are. */
#ifndef PS_KERNELS_CUDA_COUNT_CUH
#define PS_KERNELS_CUDA_COUNT_CUH

/* What the thread, and those whom it has met at a barrier, wrote before it counted up can be read by who then looks. */
static __device__ __forceinline__ void ps_count_up(unsigned *counter, unsigned by)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(by) : "memory");
}

static __device__ __forceinline__ unsigned ps_look(const unsigned *at)
{
    unsigned seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
    return seen;
}

/* One thread of `count` parties, each behind a barrier of its own: whether its party is the last to come here; then who meets it at
 * a barrier sees what the others wrote before. The ticket is 0 before and after. A fence of every thread would wait for the stores
 * of each. */
static __device__ __forceinline__ bool ps_take_ticket(unsigned *ticket, unsigned count)
{
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
    const bool last = before == count - 1;
    if (last) {
        *ticket = 0;
    }
    return last;
}

/* The same of blocks, for all their threads. */
static __device__ __forceinline__ bool ps_comes_last(unsigned *ticket, unsigned count)
{
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = ps_take_ticket(ticket, count);
    }
    __syncthreads();
    return last;
}

#endif
