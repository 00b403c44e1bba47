/* What ends/head.cu's kernels and ends/head_large.cu's share. */
#ifndef PS_KERNELS_CUDA_HEAD_CUH
#define PS_KERNELS_CUDA_HEAD_CUH

#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/types.cuh"
#include "kernels/cuda/tile/windows.cuh"

namespace PS_REAL16_SPACE
{

struct ps_cuda_loss {
    ps_real *dx;
    double *partials;
    const float *x, *bias, *mean, *std;
    struct ps_cuda_windows windows;
    const struct ps_step_state *state;
    int64_t sequences;
    int channels, horizon;
    struct ps_divisor by_channels;
    float scale; /* gradient_scale 2 / (S H) */
};

#ifndef PS_COMPILE_TF32
/* head_step for a weight [k, horizon] of more rows than a block holds, on sm_90, horizon up to 96: PS_UNSUPPORTED where k or
 * horizon is no multiple of 8, a tensor is not aligned to 16 bytes, or there are too many sequences for a block a multiprocessor.
 * ends/head_large.cu */
enum ps_status ps_cuda_head_large(const struct ps_cuda_context *c, const char *op, const struct ps_cuda_loss *loss, real16 *dz,
                                  const real16 *z, const real16 *weight, int k);
#endif

} // namespace PS_REAL16_SPACE

#endif
