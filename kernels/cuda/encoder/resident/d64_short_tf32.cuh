/* Level layer in tf32 for d_model 64 with short sequences: encoder/resident/d64_short.cu's kernels, compiled with operands of fp16
 * and a residual stream of fp32. encoder/resident/d64_short_tf32.cu has the launchers. */
#ifndef PS_KERNELS_CUDA_ENCODER_HALVES_CUH
#define PS_KERNELS_CUDA_ENCODER_HALVES_CUH

#include "kernels/cuda/encoder/request.cuh"

namespace level_halves
{

/* The request is as the small family's; embedding, head and update are not served. Forward leaves fp16 weights in the workspace
 * that backward reads: another model's forward on the same table may not come between. */
enum ps_status ps_encoder_halves_supported(const struct ps_encoder_small *e);
size_t ps_encoder_halves_kept_bytes(const struct ps_encoder_small *e);
size_t ps_encoder_halves_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_small *e);
enum ps_status ps_encoder_halves_forward(const struct ps_kernels *k, const struct ps_encoder_small *e);
enum ps_status ps_encoder_halves_backward(const struct ps_kernels *k, const struct ps_encoder_small *e);

} // namespace level_halves

#endif
