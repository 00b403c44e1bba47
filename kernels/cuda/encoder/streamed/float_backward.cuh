/* Backward: gradients of a tile of sequences through all layers, and the operands that the weights' gradients are made of. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_BACKWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_BACKWARD_CUH

#include "kernels/cuda/encoder/streamed/float_attention.cuh"
#include "kernels/cuda/encoder/streamed/float_hidden.cuh"
#include "kernels/cuda/encoder/streamed/float_rows.cuh"
#include "kernels/cuda/encoder/streamed/float_weights.cuh"

namespace PS_REAL16_SPACE
{

template <int E>
static __global__ void __launch_bounds__(THREADS, 1)
    backward(const __grid_constant__ struct floats x, const __grid_constant__ struct piece_list pieces)
{
    constexpr int NT = D / 8 / ACROSS;
    extern __shared__ float4 shared_memory[];
    float *const a = (float *)shared_memory, *const b = a + FLOATS_A, *const c = b + FLOATS_B, *const sums = c + FLOATS_C;
    float *const slots = sums + FLOATS_SUMS;
    const lane_place at;
    clear_beyond(b, c);
    const struct packed_places places = places_of(D, x.f);
    struct ring_shared *const shared = (struct ring_shared *)(slots + SLOTS * SLOT / 4);
    ring weights(slots, shared, pieces, x.packed + (x.layers - 1) * (int64_t)places.all, -places.all, x.layers,
                 (x.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
    ps_grid_begin();
    weights.begin();
    for (int64_t tile = blockIdx.x; tile < x.tiles; tile += gridDim.x) {
        const int64_t row0 = tile * x.tile_sequences * x.n;
        const int count = (int)(x.rows - row0 < x.tile_sequences * x.n ? x.rows - row0 : x.tile_sequences * x.n);
        const int sequences = count / x.n;
        float *const du = x.du + row0 * D;
        for (int layer = x.layers - 1; layer >= 0; layer--) {
            const int64_t kept = layer * x.kept_layer;
            const float *p = x.parameters + layer * x.at.vector_stride;
            if (layer == x.layers - 1) {
                gradient_rows(a, x.dy + row0 * D, du, NULL, NULL, NULL, at_site(x.dropout, layer, 2), x.masked_2 + kept + row0 * D,
                              row0, count, at);
            }
            __syncthreads();
            {
                float y[NT][4];
                clear(y);
#pragma unroll 1
                for (int chunk = 0; chunk < x.f; chunk += HIDDEN) {
                    float s[HT][4];
                    float *const h = chunk / HIDDEN % 2 ? c : b;
                    const hidden_values z(x.hidden + kept + row0 * x.f, x.f, chunk, count, at);
                    clear(s);
                    multiply<D / 16, HT, D>(s, a, weights, at);
                    hidden_backward(h, s, z, x.hidden + kept + row0 * x.f, x.d_hidden + kept + row0 * x.f, x.f, chunk,
                                    hidden_site(x, layer), row0, count, at);
                    __syncthreads();
                    multiply<HIDDEN / 16, NT, HIDDEN>(y, h, weights, at);
                }
                put_fragments<NT, D, false>(a, y, at);
            }
            __syncthreads();
            gradient_rows(a, du, du, p + x.at.ln2_gamma, x.xhat2 + kept + row0 * D, x.rstd2 + kept + row0,
                          at_site(x.dropout, layer, 0), x.masked_o + kept + row0 * D, row0, count, at);
            __syncthreads();
            {
                float s[NT][4];
                clear(s);
                multiply<D / 16, NT, D>(s, a, weights, at);
                put_rows<NT, D>(b, s, at);
            }
#pragma unroll 1
            for (int group = 0; group < D / GROUP; group++) {
                constexpr int HEADS = GROUP / E;
                float *const qkv = x.qkv + kept + row0 * (3 * D) + group * GROUP;
                fetch_group(c, qkv, count);
                for (int i = (int)threadIdx.x; i < HEADS * ROWS; i += THREADS) {
                    const int row = i % ROWS;
                    sums[i] = row < count ? x.logsum[kept + (group * HEADS + i / ROWS) * x.rows + row0 + row] : 1e30f;
                }
                __syncthreads();
                attend_queries<E>(qkv, sums, c, b, group, x, sequences, at);
                __syncthreads();
                attend_keys<E>(qkv, sums, c, b, group, x, sequences, at);
                __syncthreads();
            }
            {
                const float *qkv = x.qkv + kept + row0 * (3 * D);
                const row_place rows(at);
                row_values v[3];
#pragma unroll
                for (int part = 0; part < 3; part++) {
                    take_rows(v[part], qkv + part * D, QKV, count, rows);
                }
#pragma unroll
                for (int part = 0; part < 3; part++) {
                    put_operands(part == 0 ? a : part == 1 ? b : c, v[part], count, rows);
                }
                __syncthreads();
                float s[NT][4];
                clear(s);
                multiply<D / 16, NT, D>(s, a, weights, at);
                multiply<D / 16, NT, D>(s, b, weights, at);
                multiply<D / 16, NT, D>(s, c, weights, at);
                __syncthreads();
                put_fragments<NT, D, false>(a, s, at);
            }
            __syncthreads();
            /* The embedding's gradient is that of u, masked in place. */
            const bool embeds = layer == 0 && x.embed.d_weight;
            gradient_rows(a, du, du, p + x.at.ln1_gamma, x.xhat1 + kept + row0 * D, x.rstd1 + kept + row0,
                          embeds ? x.embed.dropout : at_site(x.dropout, layer - 1, 2),
                          embeds      ? du
                          : layer > 0 ? x.masked_2 + kept - x.kept_layer + row0 * D
                                      : NULL,
                          row0, count, at);
        }
    }
}

} // namespace PS_REAL16_SPACE

#endif
