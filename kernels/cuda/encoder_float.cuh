/* The whole encoder in one kernel each way with activations of fp32 and operands of fp32 or tf32, d_model 64 or 128: a layer's
 * weights, which do not fit beside the rows, pass by from L2. encoder_float.cu has the launchers. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_CUH

#include "kernels/cuda/encoder_small.cuh"

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

/* Weights' gradients of a layer of many rows, W_qkv's, W_o's, W_1's, W_2's: what their products read, fp32 [R, ..]. left: xhat of
 * LN1, merged, xhat of LN2, hidden; right: the gradients entering them. */
struct ps_encoder_float_operands {
    const float *left[4], *right[4];
};

/* Floats of the sums of all layers. */
int64_t ps_encoder_float_parts(const struct ps_encoder_small *e);
/* By the table's products: W_o's and W_2's to the gradients (+=), the others' to parts; */
enum ps_status ps_encoder_float_products(const struct ps_kernels *k, const struct ps_encoder_small *e, int layer,
                                         const struct ps_encoder_float_operands *operands, float *parts);
/* and from there, all layers', with LayerNorm's, to the gradients (+=). */
enum ps_status ps_encoder_float_sums(const struct ps_kernels *k, const struct ps_encoder_small *e, float *parts);
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
