/* What encoder/split/rows.cu asks of encoder/split/gradients.cu. */
#ifndef PS_KERNELS_CUDA_ENCODER_SPLIT_GRADIENTS_CUH
#define PS_KERNELS_CUDA_ENCODER_SPLIT_GRADIENTS_CUH

#include "kernels/cuda/encoder/request.cuh"

namespace PS_REAL16_SPACE
{

/* encoder/split/gradients.cu: weights' gradients of a layer, W_qkv's, W_o's, W_1's, W_2's, from the gradients behind them and the
 * rows before them, [R, ..]; all behind LayerNorm as xhat'. To `parts` of encoder/streamed/float.cuh, so many slabs of rows. */
struct ps_encoder_rows_operands {
    const float *dy[4];
    const __half *x[4];
};
int ps_encoder_rows_slabs(const struct ps_kernels *k, const struct ps_encoder_small *e);
enum ps_status ps_encoder_rows_gradients(const struct ps_kernels *k, const struct ps_encoder_small *e, int layer,
                                         const struct ps_encoder_rows_operands *operands, float *parts);

} // namespace PS_REAL16_SPACE

#endif
