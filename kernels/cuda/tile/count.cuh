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

/* True in the block that is the last of `count` to come here: it sees what the others wrote before. The ticket is 0 before and
 * after. */
static __device__ __forceinline__ bool ps_comes_last(unsigned *ticket, unsigned count)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1u) == count - 1;
        if (last) {
            *ticket = 0;
        }
    }
    __syncthreads();
    if (last) {
        __threadfence();
    }
    return last;
}

#endif
