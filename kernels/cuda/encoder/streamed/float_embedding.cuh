/* The embedding inside forward: a tile's windows, their patches and the rows made of them. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_EMBEDDING_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_EMBEDDING_CUH

#include "kernels/cuda/encoder/streamed/float_arguments.cuh"
#include "kernels/cuda/encoder/streamed/float_rows.cuh"

namespace PS_REAL16_SPACE
{

/* The tile's windows, means and deviations to shared memory: values [sequences, length], then (mean, 1 / std) of each; to memory
 * mean and std. A warp a sequence. */
static __device__ __forceinline__ void gather_windows(float *values, const struct floats &x, int64_t first, int sequences,
                                                      const lane_place &at)
{
    const struct float_embedding &e = x.embed;
    float2 *const statistics = (float2 *)(values + (sequences * e.length + 1) / 2 * 2);
    for (int i = at.warp; i < sequences; i += WARPS) {
        const uint32_t sequence = (uint32_t)(first + i), b = ps_divide(sequence, e.by_channels);
        const float *const window = ps_window_of(e.windows, e.state, b);
        const float *const from = window ? window + (sequence - b * e.by_channels.divisor) * e.windows.by_channel : NULL;
        float *const to = values + i * e.length;
        for (int l = at.lane; l < e.length; l += 32) {
            to[l] = from ? from[l * e.windows.by_time] : NAN;
        }
        __syncwarp();
        float mean = 0.0f, deviation = 1.0f;
        if (e.revin) {
            ps_window_statistics<12, true>(to, e.length, e.epsilon, mean, deviation);
        }
        if (at.lane == 0) {
            statistics[i] = make_float2(mean, 1.0f / deviation);
            e.mean[sequence] = mean;
            e.std[sequence] = deviation;
        }
    }
}

/* v = drop(patches W_P + b_P + W_pos), in FFMA, and the patches to memory; values, statistics as gather_windows leaves them, weight
 * [P, d] in shared memory. */
static __device__ __forceinline__ void embed_rows(row_values &v, const float *values, const float2 *statistics, const float *weight,
                                                  const struct floats &x, int64_t row0, int count, const row_place &at)
{
    const struct float_embedding &e = x.embed;
    const row_vector bias(e.bias, at);
    const float *window[4];
    float2 statistic[4];
    int first[4];
    bool here[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = at.row(i / 2) + i % 2 * 8, sequence = row / x.n, n = row - sequence * x.n;
        here[i] = row < count;
        window[i] = values + (here[i] ? sequence : 0) * e.length;
        statistic[i] = statistics[here[i] ? sequence : 0];
        first[i] = n * e.stride;
        const row_vector position(e.position + n * D, at);
        v.v[i / 2][i % 2] = bias.of.x + position.of.x;
        v.v[i / 2][i % 2 + 2] = bias.of.y + position.of.y;
    }
#pragma unroll 1
    for (int k = 0; k < e.patch; k++) {
        const row_vector w(weight + k * D, at);
#pragma unroll
        for (int i = 0; i < 4; i++) { /* beyond the window's end the last value repeats */
            const float z = (window[i][min(first[i] + k, e.length - 1)] - statistic[i].x) * statistic[i].y;
            if (here[i] && at.lane == k % 32) {
                e.patches[(row0 + at.row(i / 2) + i % 2 * 8) * e.patch + k] = rounded(z);
            }
            v.v[i / 2][i % 2] = fmaf(z, w.of.x, v.v[i / 2][i % 2]);
            v.v[i / 2][i % 2 + 2] = fmaf(z, w.of.y, v.v[i / 2][i % 2 + 2]);
        }
    }
    if (e.dropout.threshold) {
        drop_rows(v, e.dropout, row0, at);
    }
}

} // namespace PS_REAL16_SPACE

#endif
