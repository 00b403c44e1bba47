/* Barriers in shared memory, copies by the copy engine, and what L2 is to keep (sm_90). Addresses are of shared memory. */
#ifndef PS_KERNELS_CUDA_BULK_CUH
#define PS_KERNELS_CUDA_BULK_CUH

#include <cuda.h>
#include <stdint.h>

/* True in one lane of the warp, the same each time; the whole warp comes here. Of this lane, unlike the first, the compiler knows
 * that it is one: it has what a copy needs in uniform registers, in place of a loop over lanes around each. */
static __device__ __forceinline__ bool ps_elect()
{
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

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

/* A box of a two-dimensional tensor, as its map says (PTX ISA, cp.async.bulk.tensor), to shared memory. */
static __device__ __forceinline__ void ps_tensor_copy2(uint32_t to, const CUtensorMap *map, int column, int row, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

/* Of a three-dimensional one. */
static __device__ __forceinline__ void ps_tensor_copy3(uint32_t to, const CUtensorMap *map, int i0, int i1, int i2,
                                                       uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            to),
        "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(barrier)
        : "memory");
}

/* ---- clusters of blocks ---- */

/* The block's number in its cluster. */
static __device__ __forceinline__ int ps_cluster_rank()
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return (int)rank;
}

/* All threads of the cluster's blocks meet: what they wrote before is seen behind the wait. */
static __device__ __forceinline__ void ps_cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

static __device__ __forceinline__ void ps_cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* ps_mbarrier_arrive at the same place of another block of the cluster. It orders nothing but reads by wgmma that have ended: an
 * arrival that releases ordinary writes to the cluster waits for all that are under way. */
static __device__ __forceinline__ void ps_mbarrier_arrive_at(uint32_t barrier, int rank)
{
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

/* ps_tensor_copy2 to the same place of each block of the cluster whose bit is set, and to its barrier there. */
static __device__ __forceinline__ void ps_tensor_copy2_to(uint32_t to, const CUtensorMap *map, int i0, int i1, uint32_t barrier,
                                                          uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
                 "{%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(i0), "r"(i1), "r"(barrier), "h"(blocks)
                 : "memory");
}

/* A box of a four-dimensional tensor, as its map says (PTX ISA, cp.async.bulk.tensor), to shared memory. */
static __device__ __forceinline__ void ps_tensor_copy4(uint32_t to, const CUtensorMap *map, int i0, int i1, int i2, int i3,
                                                       uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
                 "[%6];" ::"r"(to),
                 "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(barrier)
                 : "memory");
}

/* A box of shared memory, published, to such a tensor, in the thread's group of stores. */
static __device__ __forceinline__ void ps_tensor_store4(const CUtensorMap *map, uint32_t from, int i0, int i1, int i2, int i3)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from),
                 "r"(i0), "r"(i1), "r"(i2), "r"(i3)
                 : "memory");
}

/* The first of a five-dimensional one. */
static __device__ __forceinline__ void ps_tensor_copy5(uint32_t to, const CUtensorMap *map, int i0, int i1, int i2, int i3, int i4,
                                                       uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
                 "%6}], [%7];" ::"r"(to),
                 "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4), "r"(barrier)
                 : "memory");
}

/* The second. */
static __device__ __forceinline__ void ps_tensor_store5(const CUtensorMap *map, uint32_t from, int i0, int i1, int i2, int i3,
                                                        int i4)
{
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(from), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4)
                 : "memory");
}

/* The second, added to what is there, elements of the map's type: by L2, each sum rounded. */
static __device__ __forceinline__ void ps_tensor_add5(const CUtensorMap *map, uint32_t from, int i0, int i1, int i2, int i3, int i4)
{
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
        "r"(from), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4)
        : "memory");
}

static __device__ __forceinline__ void ps_bulk_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* The map will be used. */
static __device__ __forceinline__ void ps_tensor_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
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

/* For what is read or written once, of more than L2 holds: it does not drive out what is used again. volatile: made where it is
 * used, not held in registers. */
static __device__ __forceinline__ uint64_t ps_cache_once()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* For what is soon used again, while more than L2 holds passes by. */
static __device__ __forceinline__ uint64_t ps_cache_keep()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

static __device__ __forceinline__ float4 ps_load_keep(const float4 *from)
{
    float4 v;
    asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from), "l"(ps_cache_keep())
                 : "memory");
    return v;
}

static __device__ __forceinline__ void ps_store_keep(float4 *to, float4 v)
{
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w),
                 "l"(ps_cache_keep())
                 : "memory");
}

/* Of what is not kept in L2. */
static __device__ __forceinline__ uint4 ps_load_once(const uint4 *from)
{
    uint4 v;
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from), "l"(ps_cache_once())
                 : "memory");
    return v;
}

static __device__ __forceinline__ void ps_store_once(uint4 *to, uint4 v)
{
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
                 "l"(ps_cache_once())
                 : "memory");
}

/* ps_bulk_store of what is not kept in L2. */
static __device__ __forceinline__ void ps_bulk_store_once(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\ncp.async.bulk.commit_group;" ::"l"(to),
        "r"(from), "r"(bytes), "l"(ps_cache_once())
        : "memory");
}

/* The line of memory to L2. */
static __device__ __forceinline__ void ps_prefetch_near(const void *from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

/* bytes, a multiple of 16, of global memory to L2. */
static __device__ __forceinline__ void ps_bulk_prefetch(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/* bytes, a multiple of 16, from global memory. */
static __device__ __forceinline__ void ps_bulk_fetch(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

/* The same, of what L2 keeps by a policy. */
static __device__ __forceinline__ void ps_bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                                    uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

#endif
