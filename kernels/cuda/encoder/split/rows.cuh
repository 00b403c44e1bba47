/* Level layer in tf32 for d_model 128, in kernels by rows around the table's attention. encoder/split/rows.cu has the launchers. */
#ifndef PS_KERNELS_CUDA_ENCODER_ROWS_CUH
#define PS_KERNELS_CUDA_ENCODER_ROWS_CUH

#include "kernels/cuda/encoder/request.cuh"

namespace PS_REAL16_SPACE
{

#if defined PS_COMPILE_TF32 && !defined PS_COMPILE_FP32
/* The request is as the small family's; embedding, head and update are not served. Forward leaves packed weights in the workspace
 * that backward reads: another model's forward on the same table may not come between. */
enum ps_status ps_encoder_rows_supported(const struct ps_encoder_small *e);
/* Whether level gemm is faster. */
int ps_encoder_rows_slower(const struct ps_encoder_small *e);
/* Bytes that forward leaves for backward. */
size_t ps_encoder_rows_kept_bytes(const struct ps_encoder_small *e);
size_t ps_encoder_rows_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_small *e);
enum ps_status ps_encoder_rows_forward(const struct ps_kernels *k, const struct ps_encoder_small *e);
enum ps_status ps_encoder_rows_backward(const struct ps_kernels *k, const struct ps_encoder_small *e);

/* encoder/split/gradients.cu: weights' gradients of a layer, W_qkv's, W_o's, W_1's, W_2's, from the gradients behind them and the
 * rows before them, [R, ..]; all behind LayerNorm as xhat'. To `parts` of encoder/streamed/float.cuh, so many slabs of rows. */
struct ps_encoder_rows_operands {
    const float *dy[4];
    const __half *x[4];
};
int ps_encoder_rows_slabs(const struct ps_kernels *k, const struct ps_encoder_small *e);
enum ps_status ps_encoder_rows_gradients(const struct ps_kernels *k, const struct ps_encoder_small *e, int layer,
                                         const struct ps_encoder_rows_operands *operands, float *parts);
#else
PS_ABSENT(ps_status, ps_encoder_rows_supported, PS_UNSUPPORTED)
PS_ABSENT(int, ps_encoder_rows_slower, 0)
PS_ABSENT(size_t, ps_encoder_rows_kept_bytes, 0)
PS_ABSENT(size_t, ps_encoder_rows_workspace_bytes, 0)
PS_ABSENT(ps_status, ps_encoder_rows_forward, PS_UNSUPPORTED)
PS_ABSENT(ps_status, ps_encoder_rows_backward, PS_UNSUPPORTED)
#endif

} // namespace PS_REAL16_SPACE

#endif
