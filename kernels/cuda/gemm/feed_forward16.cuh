/* A layer's feed-forward of 16 bits on Hopper, one kernel each way: y = residual + drop(drop(activation(x W_1 + b_1)) W_2 + b_2),
 * and from the gradient of what W_2 gives, already masked, that of x, with the hidden columns and their gradient for the weights'.
 *
 * Why: between its two products stand d_ff columns a row, two to four times d_model, written once and read twice forward and as
 * often again backward, and what is done to them is more work than the products. Here they never leave the registers: a warpgroup
 * has 64 rows, makes 64 hidden columns at a time, and multiplies them as they are, an operand in registers. What follows W_2 is
 * gemm/wgmma16.cuh's: bias, dropout, residual, BatchNorm's sums; backward the addend and the sums of the norm below.
 *
 * A tile is 128 rows, of two warpgroups; forward a block has two such crews, backward, whose sums take twice the registers, one.
 * Blocks stay. Weights lie in shared memory by chunks of 64 hidden columns (W_1's 64 columns, W_2's 64 rows, as they lie in memory:
 * one way they are read along, the other across), all of them where they fit, else in a ring that all crews go through together. A
 * crew's rows come by the copy engine while the tile before ends.
 *
 * Bytes: forward 6 m d (x, residual, y), backward 6 m d + 4 m f (x, the gradient, dx; hidden columns and their gradient), and the
 * addend's and the norm's 2 m d each; weights from L2 once a block, or once a round of tiles where they do not stay. FLOPs: 4 m d f
 * forward, 6 m d f backward. What is done to a hidden column bounds it, about 20 instructions each way (half of them dropout's
 * draws). */
#ifndef PS_KERNELS_CUDA_GEMM_FEED_FORWARD16_CUH
#define PS_KERNELS_CUDA_GEMM_FEED_FORWARD16_CUH

#include "kernels/cuda/gemm/wgmma16.cuh"

namespace wgmma16
{

enum { CHUNK = 64 }; /* hidden columns at once */

/* Beside `call`, which says how it ends: n is d_model. */
struct chain {
    int f, chunks, stages; /* stages: chunks that shared memory has room for at once */
    const float *b_1;
    struct ps_dropout hidden_dropout;
    void *hidden, *d_hidden; /* backward: [m, f] */
};

/* D: d_model, or more: what is beyond it is zeros. */
template <int D> static constexpr int wide_panels = (D + 63) / 64;
template <int D> static constexpr int chunk_bytes = D * 128 + wide_panels<D> *PANEL;
template <int D> static constexpr int tile_bytes = wide_panels<D> *ROWS_BYTES;

/* The copy engine's maps: rows of 128, W_1's chunks, W_2's; backward the gradient's rows too. */
struct chain_maps {
    CUtensorMap x, dy, w_1, w_2;
};

template <int D> static __device__ __forceinline__ void bring_rows(const CUtensorMap &map, uint32_t to, uint32_t barrier, int tile)
{
#pragma unroll
    for (int p = 0; p < wide_panels<D>; p++) {
        ps_tensor_copy2(to + p * ROWS_BYTES, &map, 64 * p, tile * ROWS, barrier);
    }
}

template <int D>
static __device__ __forceinline__ void bring_chunk(const struct chain_maps &maps, uint32_t to, uint32_t barrier, int chunk)
{
    ps_mbarrier_expect(barrier, chunk_bytes<D>);
    ps_tensor_copy2(to, &maps.w_1, chunk * CHUNK, 0, barrier);
#pragma unroll
    for (int p = 0; p < wide_panels<D>; p++) {
        ps_tensor_copy2(to + D * 128 + p * PANEL, &maps.w_2, 64 * p, chunk * CHUNK, barrier);
    }
}

/* sum [64 rows, 64] = rows times W_1's chunk, or (ALONG) times W_2's turned. rows: the warpgroup's place in its tile. */
template <typename T, int D, bool ALONG>
static __device__ __forceinline__ void multiply_rows(float (&sum)[CHUNK / 8][4], uint32_t rows, uint32_t weights)
{
    const uint32_t left = ps_wgmma_place(rows), right = ps_wgmma_place(weights);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const int further = k / 4 * ROWS_BYTES + k % 4 * 32;
        if constexpr (ALONG) {
            ps_wgmma<T, 0, 0>(sum, ps_wgmma_operand(left, further), ps_wgmma_operand(right, k / 4 * PANEL + k % 4 * 32), k);
        } else {
            ps_wgmma<T, 0, 1>(sum, ps_wgmma_operand(left, further), ps_wgmma_operand(right, k * 16 * 128), k);
        }
    }
}

/* The draws of a lane's elements of 64 columns, two rows each: of element (row i, tile t, pair's half) the bit 8 i + t, 16 further
 * for the second half of a pair, is set where it is kept. `block`: the first block of draws of the lane's row, and from there to
 * the other row. Each lane draws two blocks of 8 columns a row, and gives the others of its quad their words. */
static __device__ __forceinline__ uint32_t kept_of_chunk(const struct ps_dropout &d, uint64_t step, uint32_t block,
                                                         uint32_t to_other)
{
    const uint32_t below = ps_below(d.threshold), minus_below = ps_minus_below(d.threshold), q = threadIdx.x % 4;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const struct ps_block draws = ps_draws(d, step, block + i * to_other + half * 4 + q);
            uint32_t words[4] = {draws.word[0], draws.word[1], draws.word[2], draws.word[3]};
            ps_quad_transpose(words);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                bits |= ps_kept2(words[t], below, minus_below) << (8 * i + 4 * half + t);
            }
        }
    }
    return bits;
}

/* All ones in the halves of a word whose elements are kept. */
static __device__ __forceinline__ uint32_t kept_pair_of(uint32_t bits, int i, int t)
{
    return (bits >> (8 * i + t) & 0x00010001u) * 0xffffu;
}

/* Pairs [row i][tile t] of the activations of z + bias, zeros where dropped. */
template <typename T, enum ps_activation ACTIVATION>
static __device__ __forceinline__ void hidden_values(uint32_t (&words)[2][CHUNK / 8], const float (&z)[CHUNK / 8][4],
                                                     const float2 (&bias)[CHUNK / 8], uint32_t bits)
{
    const auto value = [](float t) {
        return ACTIVATION == PS_GELU_TANH ? 0.5f * ps_gelu_twice(t)
               : ACTIVATION == PS_GELU    ? ps_gelu_near(t)
                                          : ps_activated<ACTIVATION>(t);
    };
#pragma unroll
    for (int t = 0; t < CHUNK / 8; t++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            words[i][t] = ps_pack<T>(value(z[t][2 * i] + bias[t].x), value(z[t][2 * i + 1] + bias[t].y)) & kept_pair_of(bits, i, t);
        }
    }
}

/* t becomes its activation, and `gradient`, of that, t's. */
template <enum ps_activation ACTIVATION> static __device__ __forceinline__ void hidden_slope(float &t, float &gradient)
{
    if constexpr (ACTIVATION == PS_GELU_TANH) {
        gradient *= 0.5f;
        ps_gelu_twice_backward(t, gradient);
        t *= 0.5f;
    } else if constexpr (ACTIVATION == PS_GELU) {
        const float square = fminf(t * t, 36.0f), density = 0.39894228040143268f * ps_exp2(-0.5f * PS_LOG2_E * square);
        const float weight = ps_gelu_weight(t, square);
        gradient *= fmaf(t, density, weight);
        t *= weight;
    } else {
        gradient *= ps_activation_slope<ACTIVATION>(t);
        t = ps_activated<ACTIVATION>(t);
    }
}

/* And backward: the same, times scale, and the gradient before the activation, from that behind it. */
template <typename T, enum ps_activation ACTIVATION>
static __device__ __forceinline__ void hidden_gradients(uint32_t (&words)[2][CHUNK / 8], uint32_t (&gradients)[2][CHUNK / 8],
                                                        const float (&z)[CHUNK / 8][4], const float (&dz)[CHUNK / 8][4],
                                                        const float2 (&bias)[CHUNK / 8], float scale, uint32_t bits)
{
#pragma unroll
    for (int t = 0; t < CHUNK / 8; t++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float low = z[t][2 * i] + bias[t].x, high = z[t][2 * i + 1] + bias[t].y;
            float d_low = dz[t][2 * i] * scale, d_high = dz[t][2 * i + 1] * scale;
            hidden_slope<ACTIVATION>(low, d_low);
            hidden_slope<ACTIVATION>(high, d_high);
            const uint32_t kept = kept_pair_of(bits, i, t);
            words[i][t] = ps_pack<T>(low * scale, high * scale) & kept;
            gradients[i][t] = ps_pack<T>(d_low, d_high) & kept;
        }
    }
}

/* 16 rows by 64 columns as pairs, [row i][tile t], to rows of f elements from `column` on, 16 bytes a lane. */
static __device__ __forceinline__ void store_chunk(void *to, uint32_t (&words)[2][CHUNK / 8], int64_t m, int64_t row0, int f,
                                                   int column)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int64_t row = row0 + lane / 4 + 8 * i;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t v[4] = {words[i][4 * half], words[i][4 * half + 1], words[i][4 * half + 2], words[i][4 * half + 3]};
            ps_quad_transpose(v);
            const int own = column + 32 * half + lane % 4 * 8;
            if (row < m && own < f) {
                *(uint4 *)((uint16_t *)to + row * f + own) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}

/* Pairs as the operand of the next product, columns 16 k .. of the chunk. */
static __device__ __forceinline__ void operand_of(uint32_t (&a)[4], const uint32_t (&words)[2][CHUNK / 8], int k)
{
    a[0] = words[0][2 * k];
    a[1] = words[1][2 * k];
    a[2] = words[0][2 * k + 1];
    a[3] = words[1][2 * k + 1];
}

/* What both directions begin with: barriers, the first chunks, the crews' first rows. */
struct chain_place {
    uint32_t chunks, rows, full, empty, rows_full, rows_empty; /* in shared memory: chunks; the crew's rows; barriers */
};

enum { MOST_CHUNKS = 16, MOST_CREWS = 2 };

template <int D, int CREWS, int OPERANDS>
static __device__ __forceinline__ struct chain_place begin_chain(const struct chain_maps &maps, const struct chain &h,
                                                                 uint8_t *memory, uint64_t *barriers, int crew)
{
    const uint32_t start = (ps_shared_address(memory) + 1023u) & ~1023u, first = ps_shared_address(barriers);
    const uint32_t rows = start + h.stages * chunk_bytes<D>;
    struct chain_place at = {start,
                             rows + crew * OPERANDS * tile_bytes<D>,
                             first,
                             first + 8 * MOST_CHUNKS,
                             first + 8 * (2 * MOST_CHUNKS + crew),
                             first + 8 * (2 * MOST_CHUNKS + MOST_CREWS + crew)};
    if (threadIdx.x == 0) {
        ps_tensor_prefetch(&maps.x);
        ps_tensor_prefetch(&maps.w_1);
        ps_tensor_prefetch(&maps.w_2);
        for (int s = 0; s < h.stages; s++) {
            ps_mbarrier_init(at.full + 8 * s, 1);
            ps_mbarrier_init(at.empty + 8 * s, 2 * CREWS);
        }
        for (int c = 0; c < CREWS; c++) {
            ps_mbarrier_init(first + 8 * (2 * MOST_CHUNKS + c), 1);
            ps_mbarrier_init(first + 8 * (2 * MOST_CHUNKS + MOST_CREWS + c), 2);
        }
        ps_mbarrier_publish();
    }
    __syncthreads();
    return at;
}

/* The crew's tile of a round. */
template <int CREWS> static __device__ __forceinline__ int tile_of(int round, int crew)
{
    return (round * (int)gridDim.x + (int)blockIdx.x) * CREWS + crew;
}

/* The rounds in which the block has a tile, of CREWS or fewer. */
template <int CREWS> static __device__ __forceinline__ int rounds_of(int tiles)
{
    return ((tiles + CREWS - 1) / CREWS - 1 - (int)blockIdx.x) / (int)gridDim.x + 1;
}

/* COUNTED: with BatchNorm's statistics of y. */
template <typename T, int D, bool COUNTED, int CREWS>
static __global__ void __launch_bounds__(CREWS *THREADS, 1)
    feed_forward_kernel(const __grid_constant__ struct chain_maps maps, const __grid_constant__ struct call x,
                        const __grid_constant__ struct chain h)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * (MOST_CHUNKS + MOST_CREWS)];
    __shared__ float2 counted[COUNTED ? CREWS : 1][COUNTED ? 8 : 1][COUNTED ? D : 1];
    const int all_warps = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), crew = all_warps / 8, warp = all_warps % 8,
              side = warp / 4;
    const struct chain_place at = begin_chain<D, CREWS, 1>(maps, h, memory, barriers, crew);
    ps_grid_begin();
    const bool stays = h.stages == h.chunks, leads = threadIdx.x % THREADS == 0;
    if (threadIdx.x == 0) {
        for (int c = 0; c < h.stages; c++) {
            bring_chunk<D>(maps, at.chunks + c * chunk_bytes<D>, at.full + 8 * c, c);
        }
    }
    auto bring = [&](int round) {
        const int tile = tile_of<CREWS>(round, crew);
        if (tile < x.tiles_m) {
            ps_mbarrier_expect(at.rows_full, tile_bytes<D>);
            bring_rows<D>(maps.x, at.rows, at.rows_full, tile);
        }
    };
    if (leads) {
        bring(0);
    }
    const uint64_t step = x.dropout.threshold          ? x.dropout.state->step
                          : h.hidden_dropout.threshold ? h.hidden_dropout.state->step
                                                       : 0;
    const float scale = h.hidden_dropout.threshold ? h.hidden_dropout.scale : 1.0f;
    const int lane = (int)threadIdx.x % 32, rounds = rounds_of<CREWS>(x.tiles_m), total = rounds * h.chunks;
    int number = 0; /* of the chunk, over all rounds */
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int tile = tile_of<CREWS>(round, crew);
        if (tile >= x.tiles_m) { /* the second crew, the last time: one thread of each warpgroup passes the chunks on */
            for (int c = 0; c < h.chunks && !stays && threadIdx.x % GROUP == 0; c++, number++) {
                const int stage = number % h.stages;
                ps_mbarrier_wait(at.full + 8 * stage, number / h.stages & 1);
                ps_mbarrier_arrive(at.empty + 8 * stage);
            }
            break;
        }
        const int64_t row0 = (int64_t)tile * ROWS + warp * 16;
        const int column0 = 8 * (lane % 4);
        struct beside next;
        float out[D / 8][4];
        fetch<T, PS_FINISH_RESIDUAL, COUNTED>(x, next, row0, column0);
        ps_mbarrier_wait(at.rows_full, round & 1);
#pragma unroll 1
        for (int c = 0; c < h.chunks; c++, number++) {
            const int stage = stays ? c : number % h.stages;
            const uint32_t chunk = at.chunks + stage * chunk_bytes<D>;
            ps_mbarrier_wait(at.full + 8 * stage, stays ? 0 : number / h.stages & 1);
            float z[CHUNK / 8][4];
            uint32_t words[2][CHUNK / 8];
            ps_wgmma_begin();
            multiply_rows<T, D, false>(z, at.rows + side * PANEL, chunk);
            ps_wgmma_commit();
            float2 bias[CHUNK / 8];
#pragma unroll
            for (int t = 0; t < CHUNK / 8; t++) {
                const int column = c * CHUNK + 8 * t + lane % 4 * 2;
                bias[t] = column < h.f ? *(const float2 *)(h.b_1 + column) : make_float2(0, 0);
            }
            uint32_t bits = 0xffffffffu;
            if (h.hidden_dropout.threshold) {
                const uint32_t block = (uint32_t)((row0 + lane / 4) * h.f / 8) + c * (CHUNK / 8);
                bits = kept_of_chunk(h.hidden_dropout, step, block, h.f);
            }
            ps_wgmma_wait<0>();
            ps_pin(z);
            if (c + 1 == h.chunks && threadIdx.x % GROUP == 0) {
                ps_mbarrier_arrive(at.rows_empty);
            }
            if (x.activation == PS_GELU) {
                hidden_values<T, PS_GELU>(words, z, bias, bits);
            } else if (x.activation == PS_RELU) {
                hidden_values<T, PS_RELU>(words, z, bias, bits);
            } else {
                hidden_values<T, PS_GELU_TANH>(words, z, bias, bits);
            }
            const uint32_t right = ps_wgmma_place(chunk + D * 128, PANEL);
            uint32_t a[CHUNK / 16][4];
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++) {
                operand_of(a[k], words, k);
            }
            ps_pin(a);
            ps_wgmma_begin();
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++) {
                ps_wgmma<T, 1>(out, a[k], ps_wgmma_operand(right, k * 16 * 128), c | k);
            }
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(out);
            ps_pin(a);
            if (!stays) {
                if (threadIdx.x % GROUP == 0) {
                    ps_mbarrier_arrive(at.empty + 8 * stage);
                }
                const int following = number - 1 + h.stages; /* in the place of the chunk before */
                if (threadIdx.x == 0 && number > 0 && following < total) {
                    const int before = (number - 1) % h.stages;
                    ps_mbarrier_wait(at.empty + 8 * before, (number - 1) / h.stages & 1);
                    bring_chunk<D>(maps, at.chunks + before * chunk_bytes<D>, at.full + 8 * before, following % h.chunks);
                }
            }
        }
        if (leads) {
            ps_mbarrier_wait(at.rows_empty, round & 1);
            bring(round + 1);
        }
#pragma unroll
        for (int t = 0; t < D / 8; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                out[t][i] *= scale;
            }
        }
        finish_rows<T, D, PS_FINISH_RESIDUAL, COUNTED>(x, out, next, row0, column0, step,
                                                       counted[COUNTED ? crew : 0][COUNTED ? warp : 0]);
        if constexpr (COUNTED) {
            gather_sums<THREADS, D, true, CREWS>(x, counted[crew], tile, 0);
        }
    }
}

/* c = the gradient of x, + addend; hidden columns and their gradient to memory. COUNTED: with the sums of the norm below. */
template <typename T, int D, bool COUNTED>
static __global__ void __launch_bounds__(THREADS, 1)
    feed_forward_backward_kernel(const __grid_constant__ struct chain_maps maps, const __grid_constant__ struct call x,
                                 const __grid_constant__ struct chain h)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * (MOST_CHUNKS + MOST_CREWS)];
    __shared__ float2 counted[COUNTED ? 8 : 1][COUNTED ? D : 1];
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), side = warp / 4;
    const struct chain_place at = begin_chain<D, 1, 2>(maps, h, memory, barriers, 0);
    ps_grid_begin();
    const bool stays = h.stages == h.chunks;
    auto bring = [&](int round) {
        const int tile = tile_of<1>(round, 0);
        if (tile < x.tiles_m) {
            ps_mbarrier_expect(at.rows_full, 2 * tile_bytes<D>);
            bring_rows<D>(maps.x, at.rows, at.rows_full, tile);
            bring_rows<D>(maps.dy, at.rows + tile_bytes<D>, at.rows_full, tile);
        }
    };
    if (threadIdx.x == 0) {
        ps_tensor_prefetch(&maps.dy);
        for (int c = 0; c < h.stages; c++) {
            bring_chunk<D>(maps, at.chunks + c * chunk_bytes<D>, at.full + 8 * c, c);
        }
        bring(0);
    }
    const uint64_t step = h.hidden_dropout.threshold ? h.hidden_dropout.state->step : 0;
    const float scale = h.hidden_dropout.threshold ? h.hidden_dropout.scale : 1.0f;
    const int lane = (int)threadIdx.x % 32, rounds = rounds_of<1>(x.tiles_m), total = rounds * h.chunks;
    int number = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int tile = tile_of<1>(round, 0);
        const int64_t row0 = (int64_t)tile * ROWS + warp * 16;
        const int column0 = 8 * (lane % 4);
        struct beside next;
        float out[D / 8][4];
        fetch<T, PS_FINISH_SUM, COUNTED>(x, next, row0, column0);
        ps_mbarrier_wait(at.rows_full, round & 1);
#pragma unroll 1
        for (int c = 0; c < h.chunks; c++, number++) {
            const int stage = stays ? c : number % h.stages;
            const uint32_t chunk = at.chunks + stage * chunk_bytes<D>;
            float z[CHUNK / 8][4], dz[CHUNK / 8][4];
            uint32_t words[2][CHUNK / 8], gradients[2][CHUNK / 8];
            ps_mbarrier_wait(at.full + 8 * stage, stays ? 0 : number / h.stages & 1);
            ps_wgmma_begin();
            multiply_rows<T, D, false>(z, at.rows + side * PANEL, chunk);
            multiply_rows<T, D, true>(dz, at.rows + tile_bytes<D> + side * PANEL, chunk + D * 128);
            ps_wgmma_commit();
            float2 bias[CHUNK / 8];
#pragma unroll
            for (int t = 0; t < CHUNK / 8; t++) {
                const int column = c * CHUNK + 8 * t + lane % 4 * 2;
                bias[t] = column < h.f ? *(const float2 *)(h.b_1 + column) : make_float2(0, 0);
            }
            uint32_t bits = 0xffffffffu;
            if (h.hidden_dropout.threshold) {
                const uint32_t block = (uint32_t)((row0 + lane / 4) * h.f / 8) + c * (CHUNK / 8);
                bits = kept_of_chunk(h.hidden_dropout, step, block, h.f);
            }
            ps_wgmma_wait<0>();
            ps_pin(z);
            ps_pin(dz);
            if (c + 1 == h.chunks && threadIdx.x % GROUP == 0) {
                ps_mbarrier_arrive(at.rows_empty);
            }
            if (x.activation == PS_GELU) {
                hidden_gradients<T, PS_GELU>(words, gradients, z, dz, bias, scale, bits);
            } else if (x.activation == PS_RELU) {
                hidden_gradients<T, PS_RELU>(words, gradients, z, dz, bias, scale, bits);
            } else {
                hidden_gradients<T, PS_GELU_TANH>(words, gradients, z, dz, bias, scale, bits);
            }
            const uint32_t right = ps_wgmma_place(chunk);
            uint32_t a[CHUNK / 16][4];
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++) {
                operand_of(a[k], gradients, k);
            }
            ps_pin(a);
            ps_wgmma_begin();
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++) {
                ps_wgmma<T, 0>(out, a[k], ps_wgmma_operand(right, k * 32), c | k);
            }
            ps_wgmma_commit();
            store_chunk(h.hidden, words, x.m, row0, h.f, c * CHUNK);
            store_chunk(h.d_hidden, gradients, x.m, row0, h.f, c * CHUNK);
            ps_wgmma_wait<0>();
            ps_pin(out);
            ps_pin(a);
            if (!stays) {
                if (threadIdx.x % GROUP == 0) {
                    ps_mbarrier_arrive(at.empty + 8 * stage);
                }
                const int following = number - 1 + h.stages;
                if (threadIdx.x == 0 && number > 0 && following < total) {
                    const int before = (number - 1) % h.stages;
                    ps_mbarrier_wait(at.empty + 8 * before, (number - 1) / h.stages & 1);
                    bring_chunk<D>(maps, at.chunks + before * chunk_bytes<D>, at.full + 8 * before, following % h.chunks);
                }
            }
        }
        if (threadIdx.x == 0) {
            ps_mbarrier_wait(at.rows_empty, round & 1);
            bring(round + 1);
        }
        finish_rows<T, D, PS_FINISH_SUM, COUNTED>(x, out, next, row0, column0, 0, counted[COUNTED ? warp : 0]);
        if constexpr (COUNTED) {
            gather_sums<THREADS, D, false>(x, counted, tile, 0);
        }
    }
}

} // namespace wgmma16

#endif
