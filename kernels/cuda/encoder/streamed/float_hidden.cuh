/* What stands between the two products of the feed-forward part: bias, gelu and dropout, and their gradients. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_HIDDEN_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_HIDDEN_CUH

#include "kernels/cuda/encoder/streamed/float_tile.cuh"
#include "kernels/cuda/tile/activation.cuh"

namespace PS_REAL16_SPACE
{

enum { HT = HIDDEN / 8 / ACROSS }; /* a warp's tiles of 8 of the hidden columns at hand */

/* quad_mask of a row's columns from `column` on; all ones without dropout. */
static __device__ __forceinline__ uint32_t hidden_mask(const struct ps_dropout &dropout, uint64_t step, int64_t row, int f,
                                                       int column, const lane_place &at)
{
    return dropout.threshold ? quad_mask(dropout, step, (uint32_t)(((uint64_t)row * f + column) / 8 + at.q), at.q) : 0xffffffffu;
}

/* From products c of columns `chunk` on of the hidden layer: z = c + bias to memory (hidden NULL: not) and drop(gelu(z)) to h.
 * hidden: of the tile's first row on. */
static __device__ __forceinline__ void hidden_forward(float *h, float (&c)[HT][4], const float *bias, float *hidden, int f,
                                                      int chunk, const struct ps_dropout &dropout, int64_t row0, int count,
                                                      const lane_place &at)
{
    const int column = chunk + at.across * (HT * 8);
    const uint64_t step = dropout.threshold ? dropout.state->step : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.down * 16 + i * 8 + at.g;
        const uint32_t mask = hidden_mask(dropout, step, row0 + row, f, column, at);
#pragma unroll
        for (int t = 0; t < HT; t++) {
            const float2 b = *(const float2 *)(bias + column + t * 8 + 2 * at.q);
            float *z = &c[t][i * 2];
            z[0] += b.x;
            z[1] += b.y;
            if (hidden && row < count) {
                *(float2 *)(hidden + (int64_t)row * f + column + t * 8 + 2 * at.q) = make_float2(z[0], z[1]);
            }
            z[0] *= ps_gelu_sigmoid(z[0]) * kept_scale(mask, t, 0, dropout.scale);
            z[1] *= ps_gelu_sigmoid(z[1]) * kept_scale(mask, t, 1, dropout.scale);
        }
    }
    put_fragments<HT, HIDDEN, true>(h, c, at);
}

/* The lane's z of a chunk of the hidden columns, asked for before the products. */
struct hidden_values {
    float2 z[2][HT];
    __device__ __forceinline__ hidden_values(const float *hidden, int f, int chunk, int count, const lane_place &at)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = at.down * 16 + i * 8 + at.g;
#pragma unroll
            for (int t = 0; t < HT; t++) {
                z[i][t] = row < count ? *(const float2 *)(hidden + (int64_t)row * f + chunk + (at.across * HT + t) * 8 + 2 * at.q)
                                      : make_float2(0, 0);
            }
        }
    }
};

/* From products c, the gradient of what follows dropout: hidden, z, becomes what W_2 was multiplied with; d_hidden and h the
 * gradient of z. */
static __device__ __forceinline__ void hidden_backward(float *h, float (&c)[HT][4], const hidden_values &ahead, float *hidden,
                                                       float *d_hidden, int f, int chunk, const struct ps_dropout &dropout,
                                                       int64_t row0, int count, const lane_place &at)
{
    const int column = chunk + at.across * (HT * 8);
    const uint64_t step = dropout.threshold ? dropout.state->step : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.down * 16 + i * 8 + at.g;
        const bool here = row < count;
        const int64_t first = (int64_t)row * f + column + 2 * at.q;
        float2 z[HT];
#pragma unroll
        for (int t = 0; t < HT; t++) {
            z[t] = ahead.z[i][t];
        }
        const uint32_t mask = hidden_mask(dropout, step, row0 + row, f, column, at);
#pragma unroll
        for (int t = 0; t < HT; t++) {
            float *d = &c[t][i * 2];
            const float keep[2] = {kept_scale(mask, t, 0, dropout.scale), kept_scale(mask, t, 1, dropout.scale)};
            float v[2] = {z[t].x, z[t].y};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float s = ps_gelu_sigmoid(v[j]);
                d[j] *= keep[j] * ps_gelu_slope(v[j], s);
                v[j] *= keep[j] * s;
            }
            if (here) {
                *(float2 *)(hidden + first + t * 8) = make_float2(rounded(v[0]), rounded(v[1]));
                *(float2 *)(d_hidden + first + t * 8) = make_float2(rounded(d[0]), rounded(d[1]));
            }
        }
    }
    put_fragments<HT, HIDDEN, true>(h, c, at);
}

} // namespace PS_REAL16_SPACE

#endif
