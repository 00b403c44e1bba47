/* What the kernels of float.cu are told: the encoder's sizes and tensors, and where sums for weights' gradients lie. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_ARGUMENTS_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_ARGUMENTS_CUH

#include "kernels/cuda/encoder/streamed/float_device.cuh"
#include "kernels/cuda/tile/windows.cuh"
#include "kernels/cuda/tile/divide.cuh"

namespace PS_REAL16_SPACE
{

/* The embedding's part. Forward it is asked for when `weight` is there, backward when d_weight is. */
struct float_embedding {
    const float *weight, *bias, *position; /* [P, d], [d], [N, d] */
    float *patches, *mean, *std;           /* [R, P], [S], [S] */
    struct ps_cuda_windows windows;
    const struct ps_step_state *state;
    int length, patch, stride, revin;
    float epsilon;
    struct ps_divisor by_channels;
    struct ps_dropout dropout;
    float *d_weight, *d_bias, *d_position;
};

struct floats {
    int64_t rows, tiles; /* R */
    int n, tile_sequences, heads, f, layers;
    float epsilon, scale, scale_log2e; /* 1 / sqrt(e), that times log2(e) */
    const float *parameters;
    struct ps_encoder_layout at;
    const uint4 *packed; /* [layers, 2, ..]: as products read them, then their transposes: see pack */
    float *stream;       /* [layers + 1, R, d] */
    /* A layer's, `kept_layer` floats apart: [R, d], [R, 3d], [R, d], [R, d], [R, f], [heads, R] (log2), [R], [R]. xhat1 NULL:
     * nothing is kept. Backward leaves the gradients of q, k and v in qkv, and in hidden what W_2 was multiplied with. */
    float *xhat1, *qkv, *merged, *xhat2, *hidden, *logsum, *rstd1, *rstd2;
    float *d_hidden, *masked_o, *masked_2; /* [R, f], [R, d], [R, d]: gradients entering W_1, W_o, W_2 */
    int64_t kept_layer;
    const float *dy; /* [R, d] */
    float *du;
    struct ps_dropout dropout;
    uint32_t hidden_first; /* its `first` after gelu */
    struct float_embedding embed;
};

static __device__ __forceinline__ struct ps_dropout hidden_site(const struct floats &x, int layer)
{
    struct ps_dropout hidden = at_site(x.dropout, layer, 1);
    hidden.first = x.hidden_first;
    return hidden;
}

/* Offsets, in floats, of a layer's sums: G of W_qkv [d, 3d], W_o [d, d], W_1 [d, f], W_2 [f, d]; column sums [3d], [d], [f], [d].
 */
struct sum_places {
    int w[4], b[4], all;
};

static __host__ __device__ __forceinline__ struct sum_places sums_of(int d, int f)
{
    struct sum_places p = {};
    p.w[1] = 3 * d * d;
    p.w[2] = p.w[1] + d * d;
    p.w[3] = p.w[2] + d * f;
    p.b[0] = p.w[3] + f * d;
    p.b[1] = p.b[0] + 3 * d;
    p.b[2] = p.b[1] + d;
    p.b[3] = p.b[2] + f;
    p.all = p.b[3] + d;
    return p;
}

struct float_sums {
    struct floats of;
    float *parts; /* [splits, split_floats]: the layers' sums, then the embedding's, [EDGE, d] and [d] */
    int64_t split_floats;
    float *gradients;
    int d, splits;
    int64_t split_rows; /* a multiple of DEEP */
};

} // namespace PS_REAL16_SPACE

#endif
