/* Weights' gradients of fp32 in parts: laid out and added up by encoder/streamed/float.cu, formed there or, of
 * encoder/split/rows.cu's layers, by encoder/split/gradients.cu. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_CUH

#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/encoder/streamed/types.cuh"

namespace PS_REAL16_SPACE
{

/* Sums of rows' products, `splits` of them one behind the other, each of so many floats. */
int64_t ps_encoder_float_parts(const struct ps_encoder_request *e);
/* Where those of W_qkv, W_o, W_1 or W_2 (which 0 to 3) are in the first: xhat' dy or x' dy [m, n], dy's columns [n]. */
void ps_encoder_float_part(const struct ps_encoder_request *e, int layer, int which, float *parts, float **products, float **sums);
/* For W_qkv, W_o, W_1 and W_2: the gradient of the product, and its left operand, [R, ..]. LayerNorm's output is taken as xhat,
 * without gamma and beta. */
struct ps_encoder_rows_operands {
    const float *dy[4];
    const __half *x[4];
};
/* Into how many slabs of rows, which are their splits, split/'s sums are cut. */
int ps_encoder_rows_slabs(const struct ps_kernels *k, const struct ps_encoder_request *e);
/* A layer's, to each slab's place in `parts`. */
enum ps_status ps_encoder_rows_gradients(const struct ps_kernels *k, const struct ps_encoder_request *e, int layer,
                                         const struct ps_encoder_rows_operands *operands, float *parts);
/* All layers' added up, in their order, with LayerNorm's, to the gradients (+=). */
enum ps_status ps_encoder_float_add(const struct ps_kernels *k, const struct ps_encoder_request *e, const float *parts, int splits);

} // namespace PS_REAL16_SPACE

#endif
