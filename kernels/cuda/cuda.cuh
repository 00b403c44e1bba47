/* What the CUDA backend's files share. No header of CUDA's is included outside this folder. */
#ifndef PS_KERNELS_CUDA_CUDA_CUH
#define PS_KERNELS_CUDA_CUDA_CUH

#include <cuda_runtime.h>

#include "kernels/backends.h"
#include "kernels/philox.h"

struct ps_cuda_gemm; /* cuBLASLt's handle and plans: gemm.cu */

/* ps_kernels.context. */
struct ps_cuda_context {
    cudaStream_t stream; /* PS_COMPUTE */
    int multiprocessors;
    int compute_capability;
    /* Partial sums of the reductions; operations follow one another on the stream, so they share it. */
    void *workspace;
    size_t workspace_bytes;
    struct ps_cuda_gemm *gemm;
    int tiny_gemm;
};

static inline struct ps_cuda_context *ps_cuda(const struct ps_kernels *k)
{
    return (struct ps_cuda_context *)k->context;
}

/* The stream of a CUDA device. */
cudaStream_t ps_cuda_stream(const struct ps_device *device, enum ps_stream s);

/* PS_OK, or PS_DEVICE with "cuda: <what>: <CUDA's text>". */
enum ps_status ps_cuda_check(cudaError_t error, const char *what);
/* After a launch. */
#define PS_CUDA_LAUNCHED(name) return ps_cuda_check(cudaGetLastError(), name)

/* gemm.cu: the entry of the table, and its state (workspace of its own, fixed size, so that a plan never depends on what ran
 * before). */
extern "C" enum ps_status ps_cuda_gemm(const struct ps_kernels *k, const struct ps_gemm *arguments);
enum ps_status ps_cuda_gemm_open(const struct ps_kernels *k, struct ps_cuda_gemm **gemm);
void ps_cuda_gemm_close(const struct ps_kernels *k, struct ps_cuda_gemm *gemm);

/* tiny_gemm.cu: PS_UNSUPPORTED when m, n or k > 64 or the type is not float32. */
enum ps_status ps_cuda_tiny_gemm(const struct ps_kernels *k, const struct ps_gemm *arguments);

#endif
