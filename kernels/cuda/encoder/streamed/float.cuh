/* The whole encoder in one kernel each way with activations of fp32 and operands of fp32 or tf32, d_model 64 or 128: a layer's
 * weights, which do not fit beside the rows, pass by from L2. encoder/streamed/float.cu has the launchers. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_CUH

#include "kernels/cuda/encoder/request.cuh"

namespace PS_REAL16_SPACE
{

#ifdef PS_COMPILE_TF32
/* The request is as the small family's; head and update are not served. */
enum ps_status ps_encoder_float_supported(const struct ps_encoder_small *e);
/* Whether level gemm is faster. */
int ps_encoder_float_slower(const struct ps_kernels *k, const struct ps_encoder_small *e);
/* Whether it can be asked for the embedding too. */
int ps_encoder_float_embeds(const struct ps_encoder_small *e);
/* Bytes that forward leaves for backward and backward for weights' gradients. */
size_t ps_encoder_float_kept_bytes(const struct ps_encoder_small *e);
/* Bytes of both directions' workspace. Forward leaves the transposed weights there that backward reads: another model's forward on
 * the same table may not come between. */
size_t ps_encoder_float_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_small *e);
enum ps_status ps_encoder_float_forward(const struct ps_kernels *k, const struct ps_encoder_small *e);
enum ps_status ps_encoder_float_backward(const struct ps_kernels *k, const struct ps_encoder_small *e);

/* What encoder/split/rows.cu shares: sums of rows' products, `splits` of them one behind the other, each of so many floats. */
int64_t ps_encoder_float_parts(const struct ps_encoder_small *e);
/* Where those of W_qkv, W_o, W_1 or W_2 (which 0 to 3) are in the first: xhat' dy or x' dy [m, n], dy's columns [n]. */
void ps_encoder_float_part(const struct ps_encoder_small *e, int layer, int which, float *parts, float **products, float **sums);
/* All layers' added up, in their order, with LayerNorm's, to the gradients (+=). */
enum ps_status ps_encoder_float_add(const struct ps_kernels *k, const struct ps_encoder_small *e, const float *parts, int splits);
#else
PS_ABSENT(ps_status, ps_encoder_float_supported, PS_UNSUPPORTED)
PS_ABSENT(int, ps_encoder_float_slower, 0)
PS_ABSENT(int, ps_encoder_float_embeds, 0)
PS_ABSENT(size_t, ps_encoder_float_kept_bytes, 0)
PS_ABSENT(size_t, ps_encoder_float_workspace_bytes, 0)
PS_ABSENT(ps_status, ps_encoder_float_forward, PS_UNSUPPORTED)
PS_ABSENT(ps_status, ps_encoder_float_backward, PS_UNSUPPORTED)
#endif

} // namespace PS_REAL16_SPACE

#endif
