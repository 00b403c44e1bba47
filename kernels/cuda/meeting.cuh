/* Blocks of one kernel that wait for one another. They must all have their places at once: no more of them than run together, and
 * none before ps_grid_begin, so that the kernel before leaves them theirs. A meeting is zeros before its first use, and can be used
 * again by the next kernel, of as many blocks as that has. */
#ifndef PS_KERNELS_CUDA_MEETING_CUH
#define PS_KERNELS_CUDA_MEETING_CUH

#include <cuda_runtime.h>

/* Blocks that have come, and how often all had come. */
struct ps_meeting {
    unsigned arrived, met;
};

/* Until all `blocks` are here; what they wrote before can be read past L1. All threads of a block. */
static __device__ __forceinline__ void ps_meet(struct ps_meeting *meeting, unsigned blocks)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned before, now, come;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(&meeting->met) : "memory");
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(come) : "l"(&meeting->arrived) : "memory");
        if (come == blocks - 1) {
            asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(&meeting->arrived) : "memory");
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&meeting->met) : "memory");
        } else {
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&meeting->met) : "memory");
            } while (now == before);
        }
    }
    __syncthreads();
}

#endif
