/* Barriers in shared memory, and copies by the copy engine (sm_90). Addresses are of shared memory. */
#ifndef PS_KERNELS_CUDA_BULK_CUH
#define PS_KERNELS_CUDA_BULK_CUH

#include <stdint.h>

static __device__ __forceinline__ void ps_mbarrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* The inits above, for the copy engine and the block's other threads (after its next barrier). */
static __device__ __forceinline__ void ps_mbarrier_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void ps_mbarrier_arrive(uint32_t barrier)
{
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

/* Arrives when the thread's copies by cp.async so far have ended. */
static __device__ __forceinline__ void ps_mbarrier_arrive_copied(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and the phase ends only when so many bytes have come too. */
static __device__ __forceinline__ void ps_mbarrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* Until the phase of this parity has ended. */
static __device__ __forceinline__ void ps_mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* Whether it has. */
static __device__ __forceinline__ bool ps_mbarrier_ended(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

/* To global memory; published and after a barrier where other threads wrote the source. */
static __device__ __forceinline__ void ps_bulk_store(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

/* Until the thread's stores have read their sources. */
static __device__ __forceinline__ void ps_bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Until the thread's stores, but for the last PENDING, can be seen. */
template <int PENDING> static __device__ __forceinline__ void ps_bulk_wait()
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* bytes, a multiple of 16, from global memory. */
static __device__ __forceinline__ void ps_bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

#endif
