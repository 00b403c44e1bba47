/* Forward: all layers of a tile of sequences, from the embedding, where it is asked for, to the last residual. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_FORWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_FORWARD_CUH

#include "kernels/cuda/encoder/streamed/float_attention.cuh"
#include "kernels/cuda/encoder/streamed/float_hidden.cuh"
#include "kernels/cuda/encoder/streamed/float_rows.cuh"
#include "kernels/cuda/encoder/streamed/float_weights.cuh"

namespace PS_REAL16_SPACE
{

/* ---- the embedding: a tile's windows, their patches and the rows made of them ---- */

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

/* ---- the kernel ---- */

template <int E>
static __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ struct floats x, const __grid_constant__ struct piece_list pieces)
{
    constexpr int NT = D / 8 / ACROSS, GT = QKV / 8 / ACROSS;
    extern __shared__ float4 shared_memory[];
    float *const a = (float *)shared_memory, *const b = a + FLOATS_A, *const c = b + FLOATS_B, *const slots = c + FLOATS_C;
    const lane_place at;
    clear_beyond(b, c);
    const struct packed_places places = places_of(D, x.f);
    struct ring_shared *const shared = (struct ring_shared *)(slots + SLOTS * SLOT / 4);
    ring weights(slots, shared, pieces, x.packed, places.all, x.layers, (x.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
    ps_grid_begin();
    weights.begin();
    for (int64_t tile = blockIdx.x; tile < x.tiles; tile += gridDim.x) {
        const int64_t row0 = tile * x.tile_sequences * x.n;
        const int count = (int)(x.rows - row0 < x.tile_sequences * x.n ? x.rows - row0 : x.tile_sequences * x.n);
        const int sequences = count / x.n;
        for (int layer = 0; layer < x.layers; layer++) {
            const int64_t kept = layer * x.kept_layer;
            const float *p = x.parameters + layer * x.at.vector_stride;
            const float *u = x.stream + (layer * x.rows + row0) * D;
            float *out = x.stream + ((layer + 1) * x.rows + row0) * D;
            if (layer == 0) {
                const row_place rows(at);
                if (x.embed.weight) {
                    __syncthreads(); /* b and c are free */
                    for (int i = (int)threadIdx.x; i < x.embed.patch * D; i += THREADS) {
                        b[i] = x.embed.weight[i];
                    }
                    gather_windows(c, x, tile * x.tile_sequences, sequences, at);
                    __syncthreads();
                }
                row_values v;
                if (x.embed.weight) {
                    embed_rows(v, c, (const float2 *)(c + (sequences * x.embed.length + 1) / 2 * 2), b, x, row0, count, rows);
                    keep_rows<false>(x.stream + row0 * D, v, count, rows);
                } else {
                    take_rows(v, u, D, count, rows);
                }
                normalise_rows(a, v, p + x.at.ln1_gamma, p + x.at.ln1_beta, x.xhat1 ? x.xhat1 + kept + row0 * D : NULL,
                               x.rstd1 + kept + row0, x.epsilon, count, rows);
            }
            __syncthreads();
#pragma unroll 1
            for (int group = 0; group < D / GROUP; group++) {
                float s[GT][4];
                int column[GT];
                clear(s);
#pragma unroll
                for (int t = 0; t < GT; t++) {
                    const int of = at.across * GT + t, part = of / (GROUP / 8);
                    column[t] = part * D + group * GROUP + of % (GROUP / 8) * 8;
                    const float2 bias = *(const float2 *)(p + x.at.b_qkv + column[t] + 2 * at.q);
                    s[t][0] = s[t][2] = bias.x;
                    s[t][1] = s[t][3] = bias.y;
                }
                multiply<D / 16, GT, D>(s, a, weights, at);
                put_rows<GT, QKV>(c, s, at);
                if (x.xhat1) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int row = at.down * 16 + i * 8 + at.g;
#pragma unroll
                        for (int t = 0; t < GT; t++) {
                            if (row < count) {
                                *(float2 *)(x.qkv + kept + (row0 + row) * QKV + column[t] + 2 * at.q) =
                                    make_float2(s[t][i * 2], s[t][i * 2 + 1]);
                            }
                        }
                    }
                }
                __syncthreads();
                attend<E>(b, c, x.xhat1 ? x.merged + kept + row0 * D + group * GROUP : NULL,
                          x.xhat1 ? x.logsum + kept + group * (GROUP / E) * x.rows + row0 : NULL, group, x, sequences, at);
                __syncthreads();
            }
            {
                float s[NT][4];
                clear(s);
                multiply<D / 16, NT, D>(s, b, weights, at);
                put_fragments<NT, D, false>(a, s, at);
            }
            __syncthreads();
            finish_rows(a, u, out, p + x.at.b_o, at_site(x.dropout, layer, 0), p + x.at.ln2_gamma, p + x.at.ln2_beta,
                        x.xhat1 ? x.xhat2 + kept + row0 * D : NULL, x.rstd2 + kept + row0, x.epsilon, row0, count, at);
            __syncthreads();
            float y[NT][4];
            clear(y);
#pragma unroll 1
            for (int chunk = 0; chunk < x.f; chunk += HIDDEN) {
                float s[HT][4];
                float *const h = chunk / HIDDEN % 2 ? c : b;
                clear(s);
                multiply<D / 16, HT, D>(s, a, weights, at);
                hidden_forward(h, s, p + x.at.b_1, x.xhat1 ? x.hidden + kept + row0 * x.f : NULL, x.f, chunk, hidden_site(x, layer),
                               row0, count, at);
                __syncthreads();
                multiply<HIDDEN / 16, NT, HIDDEN>(y, h, weights, at);
            }
            put_fragments<NT, D, false>(a, y, at); /* which all have done with */
            __syncthreads();
            const bool more = layer + 1 < x.layers;
            const float *next = p + x.at.vector_stride;
            finish_rows(a, out, out, p + x.at.b_2, at_site(x.dropout, layer, 2), more ? next + x.at.ln1_gamma : NULL,
                        more ? next + x.at.ln1_beta : NULL, x.xhat1 && more ? x.xhat1 + kept + x.kept_layer + row0 * D : NULL,
                        x.rstd1 + kept + x.kept_layer + row0, x.epsilon, row0, count, at);
        }
    }
}

} // namespace PS_REAL16_SPACE

#endif
