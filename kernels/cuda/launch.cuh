/* How kernels of this folder are launched and follow one another.
 *
 * Nearly every kernel of this folder begins with ps_grid_begin() and is launched by ps_cuda_launch, as a programmatic dependent of
 * the kernel before it on the stream (a captured graph keeps that as a programmatic edge): from sm_90 on its blocks take their
 * places while that kernel's last ones still run, and ps_grid_begin waits until that kernel has ended and its memory can be seen.
 * A kernel lets the next one start only after its own wait, and the next one's first block starts when every block has: so the
 * kernel before it has ended then, and what was written two or more kernels ago can be read before ps_grid_begin; nothing may be
 * written before it. Within a pass of encoder/streamed/ launches start one another and write earlier, but none behind it (struct
 * turn, copy_weights). Other launches (attention/tiled.cu's, gemm/split.cu's and gemm/panel.cu's products, the library's), and
 * copies and fills, are full dependencies as ever. ps_grid_begin is ps_grid_wait and ps_grid_release.
 */
#ifndef PS_KERNELS_CUDA_LAUNCH_CUH
#define PS_KERNELS_CUDA_LAUNCH_CUH

#include "kernels/cuda/context.cuh"

static __device__ __forceinline__ void ps_grid_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel may start. Its blocks take the multiprocessors that this one leaves free: a kernel beside which another is to run
 * calls this late. */
static __device__ __forceinline__ void ps_grid_release()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ __forceinline__ void ps_grid_begin()
{
    ps_grid_wait();
    ps_grid_release();
}

/* ps_cuda_launch of clusters of `cluster` blocks (sm_90). */
template <typename... P, typename... A>
static inline void ps_cuda_launch_clusters(const struct ps_cuda_context *c, void (*kernel)(P...), unsigned cluster, dim3 blocks,
                                           unsigned threads, size_t shared, A... arguments)
{
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = c->stream;
    config.attrs = attributes;
    config.numAttrs = c->ordered ? 1 : 2;
    c->ordered = false;
    (void)cudaLaunchKernelEx(&config, kernel, P(arguments)...);
}

/* kernel<<<blocks, threads, shared>>>(arguments...) on the context's stream; PS_CUDA_LAUNCHED has its error. */
template <typename... P, typename... A>
static inline void ps_cuda_launch(const struct ps_cuda_context *c, void (*kernel)(P...), dim3 blocks, unsigned threads,
                                  size_t shared, A... arguments)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = c->stream;
    config.attrs = &attribute;
    config.numAttrs = c->compute_capability >= 90 && !c->ordered ? 1 : 0;
    c->ordered = false;
    (void)cudaLaunchKernelEx(&config, kernel, P(arguments)...);
}

/* Before a launch with so many bytes of dynamic shared memory, more than a kernel may have unasked. The device keeps one number a
 * kernel for all threads of the process, so it is always set to all that there is: another thread's, of a launch with less, could
 * come between this one's and its launch. */
static inline enum ps_status ps_cuda_allow_shared(const void *kernel, size_t bytes, const char *what)
{
    int device, block;
    cudaFuncAttributes has;
    PS_TRY(ps_cuda_check(cudaGetDevice(&device), what));
    PS_TRY(ps_cuda_check(cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), what));
    PS_TRY(ps_cuda_check(cudaFuncGetAttributes(&has, kernel), what));
    const size_t most = (size_t)block - has.sharedSizeBytes;
    return ps_cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes > most ? bytes : most)), what);
}

/* As much shared memory as a multiprocessor can have, whatever a block wants: it is cut anew only where nothing runs, so kernels
 * that are to share one ask alike. */
static inline enum ps_status ps_cuda_prefer_shared(const void *kernel, const char *what)
{
    return ps_cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), what);
}

/* Blocks of `each` items, at least 1. */
static inline unsigned ps_cuda_blocks(int64_t items, int64_t each)
{
    int64_t blocks = (items + each - 1) / each;
    return blocks < 1 ? 1u : (unsigned)blocks;
}

#endif
