/* What ends/head.cu's kernels and ends/head_large.cu's share. */
#ifndef PS_KERNELS_CUDA_HEAD_CUH
#define PS_KERNELS_CUDA_HEAD_CUH

#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/windows.cuh"

/* T: what dx is of. */
template <typename T> struct ps_cuda_loss {
    T *dx;
    double *partials;
    const float *x, *bias, *mean, *std;
    struct ps_cuda_windows windows;
    const struct ps_step_state *state;
    int64_t sequences;
    int channels, horizon;
    struct ps_divisor by_channels;
    float scale; /* gradient_scale 2 / (S H) */
};

/* head_step for a weight [k, horizon] of more rows than a block holds, on sm_90, horizon up to 96: PS_UNSUPPORTED where k or
 * horizon is no multiple of 8, a tensor is not aligned to 16 bytes, or there are too many sequences for a block a multiprocessor.
 * ends/head_large.cu, of bf16 and fp16 */
template <typename T>
enum ps_status ps_cuda_head_large(const struct ps_cuda_context *c, const char *op, const struct ps_cuda_loss<T> *loss, T *dz,
                                  const T *z, const T *weight, int k);

#endif
