/* Weights' gradients of encoder/split/rows.cu's layers. */
#ifndef PS_KERNELS_CUDA_ENCODER_SPLIT_GRADIENTS_CUH
#define PS_KERNELS_CUDA_ENCODER_SPLIT_GRADIENTS_CUH

#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/encoder/streamed/types.cuh"

namespace PS_REAL16_SPACE
{

/* For W_qkv, W_o, W_1 and W_2: the gradient of the product, and its left operand, [R, ..]. LayerNorm's output is taken as xhat,
 * without gamma and beta. */
struct ps_encoder_rows_operands {
    const float *dy[4];
    const __half *x[4];
};
/* Into how many slabs of rows the sums are cut. */
int ps_encoder_rows_slabs(const struct ps_kernels *k, const struct ps_encoder_request *e);
/* A layer's, to each slab's place in `parts` as encoder/streamed/float.cuh lays them out. */
enum ps_status ps_encoder_rows_gradients(const struct ps_kernels *k, const struct ps_encoder_request *e, int layer,
                                         const struct ps_encoder_rows_operands *operands, float *parts);

} // namespace PS_REAL16_SPACE

#endif
