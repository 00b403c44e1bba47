/* Weights' gradients of fp32 in parts, as encoder/streamed/float.cu lays them out and adds them up. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_CUH

#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/encoder/streamed/types.cuh"

namespace PS_REAL16_SPACE
{

/* What encoder/split/rows.cu shares: sums of rows' products, `splits` of them one behind the other, each of so many floats. */
int64_t ps_encoder_float_parts(const struct ps_encoder_request *e);
/* Where those of W_qkv, W_o, W_1 or W_2 (which 0 to 3) are in the first: xhat' dy or x' dy [m, n], dy's columns [n]. */
void ps_encoder_float_part(const struct ps_encoder_request *e, int layer, int which, float *parts, float **products, float **sums);
/* All layers' added up, in their order, with LayerNorm's, to the gradients (+=). */
enum ps_status ps_encoder_float_add(const struct ps_kernels *k, const struct ps_encoder_request *e, const float *parts, int splits);

} // namespace PS_REAL16_SPACE

#endif
