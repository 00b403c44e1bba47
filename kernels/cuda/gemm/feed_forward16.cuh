/* A layer's feed-forward of 16 bits on Hopper, one kernel each way: y = residual + drop(drop(activation(x W_1 + b_1)) W_2 + b_2),
 * and from the gradient of what W_2 gives, already masked, that of x, with the hidden columns and their gradient for the weights'.
 *
 * Why: between its two products stand d_ff columns a row, two to four times d_model, written once and read twice forward and as
 * often again backward, and what is done to them is more work than the products. Here they never leave the registers: a warpgroup
 * has 64 rows, makes 32 hidden columns at a time, and multiplies them as they are, an operand in registers. What follows W_2 is
 * gemm/wgmma16.cuh's: bias, dropout, residual, BatchNorm's sums; backward the addend and the sums of the norm below.
 *
 * A tile is 128 rows, of a crew of two warpgroups; a block has two crews, and stays. Weights lie in shared memory by chunks of 64
 * hidden columns (W_1's 64 columns, W_2's 64 rows, as they lie in memory: one way they are read along, the other across), all of
 * them where they fit, else in a ring that both crews go through together. Rows come by the copy engine; when they have been
 * multiplied, the crew's sums go out through their place.
 *
 * Bytes: forward 6 m d (x, residual, y), backward 6 m d + 4 m f (x, the gradient, dx; hidden columns and their gradient), and the
 * addend's and the norm's 2 m d each; weights from L2 once a block, or once a round of tiles where they do not stay. FLOPs: 4 m d f
 * forward, 6 m d f backward. What is done to a hidden column bounds it: about 15 instructions forward and 22 backward, 5 of them
 * dropout's draws; and registers do: two crews have 128 a thread, of which a tile's sums take d_model / 2. */
#ifndef PS_KERNELS_CUDA_GEMM_FEED_FORWARD16_CUH
#define PS_KERNELS_CUDA_GEMM_FEED_FORWARD16_CUH

#include "kernels/cuda/gemm/wgmma16.cuh"

namespace wgmma16
{

enum {
    CHUNK = 64, /* hidden columns that come at once */
    PART = 32,  /* and that a warpgroup has in registers */
    CREWS = 2,
    CREW_STAGED = THREADS / 32 * STAGED_BYTES,
    MOST_CHUNKS = 16,
};

/* Beside `call`, which says how it ends: n is d_model. */
struct chain {
    int f, chunks, stages; /* stages: chunks that shared memory has room for at once */
    const float *b_1;
    struct ps_dropout hidden_dropout;
    void *hidden, *d_hidden; /* backward: [m, f] */
};

/* D: d_model, or more: what is beyond it is zeros. OPERANDS: of [128, D], that a tile begins with. */
template <int D> static constexpr int wide_panels = (D + 63) / 64;
template <int D> static constexpr int chunk_bytes = D * 128 + wide_panels<D> *PANEL;
template <int D> static constexpr int tile_bytes = wide_panels<D> *ROWS_BYTES;
template <int D, int OPERANDS>
static constexpr int crew_bytes = OPERANDS *tile_bytes<D> > CREW_STAGED ? OPERANDS *tile_bytes<D> : CREW_STAGED;

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

/* sum [64 rows, 32] = rows times columns of W_1's chunk, or (ALONG) times rows of W_2's turned. rows: the warpgroup's place in its
 * tile; weights: that of the first of the 32. */
template <typename T, int D, bool ALONG>
static __device__ __forceinline__ void multiply_rows(float (&sum)[PART / 8][4], uint32_t rows, uint32_t weights)
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

/* The draws of a lane's elements of 32 columns, two rows each: of element (row i, tile t, pair's half) the bit 4 i + t, 16 further
 * for the second half of a pair, is set where it is kept. `block`: the first block of draws of the lane's row, and from there to
 * the other row. Each lane draws a block of 8 columns a row, and gives the others of its quad their words. */
static __device__ __forceinline__ uint32_t kept_of_part(const struct ps_dropout &d, uint64_t step, uint32_t block,
                                                        uint32_t to_other)
{
    const uint32_t below = ps_below(d.threshold), minus_below = ps_minus_below(d.threshold), q = threadIdx.x % 4;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const struct ps_block draws = ps_draws(d, step, block + i * to_other + q);
        uint32_t words[4] = {draws.word[0], draws.word[1], draws.word[2], draws.word[3]};
        ps_quad_transpose(words);
#pragma unroll
        for (int t = 0; t < 4; t++) {
            bits |= ps_kept2(words[t], below, minus_below) << (4 * i + t);
        }
    }
    return bits;
}

/* All ones in the halves of a word whose elements are kept. */
static __device__ __forceinline__ uint32_t kept_pair_of(uint32_t bits, int i, int t)
{
    return (bits >> (4 * i + t) & 0x00010001u) * 0xffffu;
}

/* Pairs [row i][tile t] of the activations of z + bias, zeros where dropped. */
template <typename T, enum ps_activation ACTIVATION>
static __device__ __forceinline__ void hidden_values(uint32_t (&words)[2][PART / 8], const float (&z)[PART / 8][4],
                                                     const float2 (&bias)[PART / 8], uint32_t bits)
{
    const auto value = [](float t) {
        return ACTIVATION == PS_GELU_TANH ? 0.5f * ps_gelu_twice(t)
               : ACTIVATION == PS_GELU    ? ps_gelu_near(t)
                                          : ps_activated<ACTIVATION>(t);
    };
#pragma unroll
    for (int t = 0; t < PART / 8; t++) {
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
static __device__ __forceinline__ void hidden_gradients(uint32_t (&words)[2][PART / 8], uint32_t (&gradients)[2][PART / 8],
                                                        const float (&z)[PART / 8][4], const float (&dz)[PART / 8][4],
                                                        const float2 (&bias)[PART / 8], float scale, uint32_t bits)
{
#pragma unroll
    for (int t = 0; t < PART / 8; t++) {
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

/* 16 rows by 32 columns as pairs, [row i][tile t], to rows of f elements from `column` on, 16 bytes a lane. */
static __device__ __forceinline__ void store_part(void *to, const uint32_t (&words)[2][PART / 8], int64_t m, int64_t row0, int f,
                                                  int column)
{
    const int lane = (int)threadIdx.x % 32, own = column + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int64_t row = row0 + lane / 4 + 8 * i;
        uint32_t v[4] = {words[i][0], words[i][1], words[i][2], words[i][3]};
        ps_quad_transpose(v);
        if (row < m && own < f) {
            *(uint4 *)((uint16_t *)to + row * f + own) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

/* Pairs as the operand of the next product, columns 16 k .. of the 32. */
static __device__ __forceinline__ void operand_of(uint32_t (&a)[4], const uint32_t (&words)[2][PART / 8], int k)
{
    a[0] = words[0][2 * k];
    a[1] = words[1][2 * k];
    a[2] = words[0][2 * k + 1];
    a[3] = words[1][2 * k + 1];
}

/* What both directions begin with: barriers, the first chunks, the crews' first rows. */
struct chain_place {
    uint32_t chunks, rows, full, empty, rows_full; /* in shared memory: chunks; the crew's rows; barriers */
};

/* Tiles go round by blocks, two a block. */
static __device__ __forceinline__ int tile_of(int round, int crew)
{
    return (round * (int)gridDim.x + (int)blockIdx.x) * CREWS + crew;
}

/* The rounds in which the block has a tile, or two. */
static __device__ __forceinline__ int rounds_of(int tiles)
{
    return ((tiles + CREWS - 1) / CREWS - 1 - (int)blockIdx.x) / (int)gridDim.x + 1;
}

template <int D, int OPERANDS>
static __device__ __forceinline__ struct chain_place begin_chain(const struct chain_maps &maps, const struct chain &h,
                                                                 uint8_t *memory, uint64_t *barriers, int crew)
{
    const uint32_t start = (ps_shared_address(memory) + 1023u) & ~1023u, first = ps_shared_address(barriers);
    const struct chain_place at = {start, start + h.stages * chunk_bytes<D> + crew * crew_bytes<D, OPERANDS>, first,
                                   first + 8 * MOST_CHUNKS, first + 8 * (2 * MOST_CHUNKS + crew)};
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
        }
        ps_mbarrier_publish();
    }
    __syncthreads();
    ps_grid_begin();
    if (threadIdx.x == 0) {
        for (int c = 0; c < h.stages; c++) {
            bring_chunk<D>(maps, at.chunks + c * chunk_bytes<D>, at.full + 8 * c, c);
        }
    }
    return at;
}

/* One lane of the crew: the rows of its tile, where it has one. */
template <int D, int OPERANDS>
static __device__ __forceinline__ void bring_tile(const struct chain_maps &maps, const struct call &x, const struct chain_place &at,
                                                  int round, int crew)
{
    const int tile = tile_of(round, crew);
    if (tile < x.tiles_m) {
        ps_mbarrier_expect(at.rows_full, OPERANDS * tile_bytes<D>);
        bring_rows<D>(maps.x, at.rows, at.rows_full, tile);
        if (OPERANDS == 2) {
            bring_rows<D>(maps.dy, at.rows + tile_bytes<D>, at.rows_full, tile);
        }
    }
}

/* Chunk `number` of the block's `total` has been used: where chunks do not stay, the next one comes in the place of the one before.
 */
template <int D>
static __device__ __forceinline__ void pass_chunk(const struct chain_maps &maps, const struct chain &h,
                                                  const struct chain_place &at, int number, int total)
{
    if (threadIdx.x % GROUP == 0) {
        ps_mbarrier_arrive(at.empty + 8 * (number % h.stages));
    }
    const int following = number - 1 + h.stages;
    if (threadIdx.x == 0 && number > 0 && following < total) {
        const int before = (number - 1) % h.stages;
        ps_mbarrier_wait(at.empty + 8 * before, (number - 1) / h.stages & 1);
        bring_chunk<D>(maps, at.chunks + before * chunk_bytes<D>, at.full + 8 * before, following % h.chunks);
    }
    __syncwarp();
}

/* A crew without a tile, which is the second one's last round: a thread of each warpgroup alone goes through the chunks. All of
 * them would: a warp that ran far ahead of another would leave it waiting for a phase that has passed. */
static __device__ __forceinline__ void pass_chunks(const struct chain &h, const struct chain_place &at, int number)
{
    for (int c = 0; c < h.chunks && threadIdx.x % GROUP == 0; c++, number++) {
        const int stage = number % h.stages;
        ps_mbarrier_wait(at.full + 8 * stage, number / h.stages & 1);
        ps_mbarrier_arrive(at.empty + 8 * stage);
    }
}

/* b_1 of a lane's columns, from `column` on. */
static __device__ __forceinline__ void part_bias(float2 (&bias)[PART / 8], const struct chain &h, int column)
{
#pragma unroll
    for (int t = 0; t < PART / 8; t++) {
        const int own = column + 8 * t + (int)threadIdx.x % 4 * 2;
        bias[t] = own < h.f ? *(const float2 *)(h.b_1 + own) : make_float2(0, 0);
    }
}

/* A tile's sums go out, through the place of its rows; the next one's come. */
template <typename T, int D, int OPERANDS, enum ps_finish FINISH, bool COUNTED>
static __device__ __forceinline__ void end_tile(const struct chain_maps &maps, const struct call &x, const struct chain_place &at,
                                                const float (&out)[1][D / 8][4], struct beside &next, const struct corner &corner,
                                                uint64_t step, float2 (*counted)[COUNTED ? D : 1], int round, int crew)
{
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 % 8, 0);
    wgmma16::crew<THREADS, CREWS>::meet(); /* the rows have been read */
    finish_rows<T, D, 1, false, FINISH, COUNTED>(x, out, next, at.rows + warp * STAGED_BYTES, corner, 0, step,
                                                 counted + (COUNTED ? warp : 0));
    ps_publish();
    if constexpr (COUNTED) {
        gather_sums<THREADS, D, FINISH == PS_FINISH_RESIDUAL, CREWS>(x, counted, tile_of(round, crew), 0);
    } else {
        wgmma16::crew<THREADS, CREWS>::meet();
    }
    if (threadIdx.x % THREADS == 0) {
        bring_tile<D, OPERANDS>(maps, x, at, round + 1, crew);
    }
    __syncwarp();
}

/* COUNTED: with BatchNorm's statistics of y. */
template <typename T, int D, bool COUNTED>
static __global__ void __launch_bounds__(CREWS *THREADS, 1)
    feed_forward_kernel(const __grid_constant__ struct chain_maps maps, const __grid_constant__ struct call x,
                        const __grid_constant__ struct chain h)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * MOST_CHUNKS + CREWS];
    __shared__ float2 counted[CREWS][COUNTED ? 8 : 1][COUNTED ? D : 1];
    const int all_warps = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), crew = all_warps / 8, warp = all_warps % 8;
    const struct chain_place at = begin_chain<D, 1>(maps, h, memory, barriers, crew);
    if (threadIdx.x % THREADS == 0) {
        bring_tile<D, 1>(maps, x, at, 0, crew);
    }
    __syncwarp();
    const bool stays = h.stages == h.chunks;
    const uint64_t step = x.dropout.threshold          ? x.dropout.state->step
                          : h.hidden_dropout.threshold ? h.hidden_dropout.state->step
                                                       : 0;
    const float scale = h.hidden_dropout.threshold ? h.hidden_dropout.scale : 1.0f;
    const int lane = (int)threadIdx.x % 32, rounds = rounds_of(x.tiles_m), total = rounds * h.chunks;
    const uint32_t left = at.rows + warp / 4 * PANEL;
    int number = 0; /* of the chunk, over all rounds */
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int tile = tile_of(round, crew);
        if (tile >= x.tiles_m) {
            if (!stays) {
                pass_chunks(h, at, number);
            }
            break;
        }
        const int64_t row0 = (int64_t)tile * ROWS + warp * 16;
        const struct corner corner = corner_of<1>(x, row0, 0);
        const uint32_t block = (uint32_t)((row0 + lane / 4) * h.f / 8);
        struct beside next;
        float out[1][D / 8][4];
        fetch<T, D, 1, PS_FINISH_RESIDUAL, COUNTED>(x, next, corner, 0);
        call_near<T, D, 1, PS_FINISH_RESIDUAL, COUNTED>(x, corner);
        ps_mbarrier_wait(at.rows_full, round & 1);
#pragma unroll 1
        for (int c = 0; c < h.chunks; c++, number++) {
            const int stage = stays ? c : number % h.stages;
            const uint32_t chunk = at.chunks + stage * chunk_bytes<D>;
            ps_mbarrier_wait(at.full + 8 * stage, stays ? 0 : number / h.stages & 1);
#pragma unroll 1
            for (int part = 0; part < CHUNK / PART; part++) {
                const int column = c * CHUNK + part * PART;
                float z[PART / 8][4];
                ps_wgmma_begin();
                multiply_rows<T, D, false>(z, left, chunk + part * PART * 2);
                ps_wgmma_commit();
                float2 bias[PART / 8];
                part_bias(bias, h, column);
                uint32_t bits = 0xffffffffu;
                if (h.hidden_dropout.threshold) {
                    bits = kept_of_part(h.hidden_dropout, step, block + column / 8, h.f);
                }
                ps_wgmma_wait<0>();
                ps_pin(z);
                uint32_t words[2][PART / 8];
                if (x.activation == PS_GELU) {
                    hidden_values<T, PS_GELU>(words, z, bias, bits);
                } else if (x.activation == PS_RELU) {
                    hidden_values<T, PS_RELU>(words, z, bias, bits);
                } else {
                    hidden_values<T, PS_GELU_TANH>(words, z, bias, bits);
                }
                const uint32_t right = ps_wgmma_place(chunk + D * 128 + part * PART * 128, PANEL);
                uint32_t a[PART / 16][4];
#pragma unroll
                for (int k = 0; k < PART / 16; k++) {
                    operand_of(a[k], words, k);
                }
                ps_pin(a);
                ps_wgmma_begin();
#pragma unroll
                for (int k = 0; k < PART / 16; k++) {
                    ps_wgmma<T, 1>(out[0], a[k], ps_wgmma_operand(right, k * 16 * 128), column | k);
                }
                ps_wgmma_commit();
                ps_wgmma_wait<0>();
                ps_pin(out[0]);
                ps_pin(a);
            }
            if (!stays) {
                pass_chunk<D>(maps, h, at, number, total);
            }
        }
#pragma unroll
        for (int t = 0; t < D / 8; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                out[0][t][i] *= scale;
            }
        }
        end_tile<T, D, 1, PS_FINISH_RESIDUAL, COUNTED>(maps, x, at, out, next, corner, step, counted[crew], round, crew);
    }
}

/* c = the gradient of x, + addend; hidden columns and their gradient to memory. COUNTED: with the sums of the norm below. */
template <typename T, int D, bool COUNTED>
static __global__ void __launch_bounds__(CREWS *THREADS, 1)
    feed_forward_backward_kernel(const __grid_constant__ struct chain_maps maps, const __grid_constant__ struct call x,
                                 const __grid_constant__ struct chain h)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * MOST_CHUNKS + CREWS];
    __shared__ float2 counted[CREWS][COUNTED ? 8 : 1][COUNTED ? D : 1];
    const int all_warps = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), crew = all_warps / 8, warp = all_warps % 8;
    const struct chain_place at = begin_chain<D, 2>(maps, h, memory, barriers, crew);
    if (threadIdx.x % THREADS == 0) {
        bring_tile<D, 2>(maps, x, at, 0, crew);
    }
    __syncwarp();
    const bool stays = h.stages == h.chunks;
    const uint64_t step = h.hidden_dropout.threshold ? h.hidden_dropout.state->step : 0;
    const float scale = h.hidden_dropout.threshold ? h.hidden_dropout.scale : 1.0f;
    const int lane = (int)threadIdx.x % 32, rounds = rounds_of(x.tiles_m), total = rounds * h.chunks;
    const uint32_t left = at.rows + warp / 4 * PANEL;
    int number = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int tile = tile_of(round, crew);
        if (tile >= x.tiles_m) {
            if (!stays) {
                pass_chunks(h, at, number);
            }
            break;
        }
        const int64_t row0 = (int64_t)tile * ROWS + warp * 16;
        const struct corner corner = corner_of<1>(x, row0, 0);
        const uint32_t block = (uint32_t)((row0 + lane / 4) * h.f / 8);
        struct beside next;
        float out[1][D / 8][4];
        fetch<T, D, 1, PS_FINISH_SUM, COUNTED>(x, next, corner, 0);
        call_near<T, D, 1, PS_FINISH_SUM, COUNTED>(x, corner);
        ps_mbarrier_wait(at.rows_full, round & 1);
#pragma unroll 1
        for (int c = 0; c < h.chunks; c++, number++) {
            const int stage = stays ? c : number % h.stages;
            const uint32_t chunk = at.chunks + stage * chunk_bytes<D>;
            ps_mbarrier_wait(at.full + 8 * stage, stays ? 0 : number / h.stages & 1);
#pragma unroll 1
            for (int part = 0; part < CHUNK / PART; part++) {
                const int column = c * CHUNK + part * PART;
                float z[PART / 8][4], dz[PART / 8][4];
                ps_wgmma_begin();
                multiply_rows<T, D, false>(z, left, chunk + part * PART * 2);
                multiply_rows<T, D, true>(dz, left + tile_bytes<D>, chunk + D * 128 + part * PART * 128);
                ps_wgmma_commit();
                float2 bias[PART / 8];
                part_bias(bias, h, column);
                uint32_t bits = 0xffffffffu;
                if (h.hidden_dropout.threshold) {
                    bits = kept_of_part(h.hidden_dropout, step, block + column / 8, h.f);
                }
                ps_wgmma_wait<0>();
                ps_pin(z);
                ps_pin(dz);
                uint32_t words[2][PART / 8], gradients[2][PART / 8];
                if (x.activation == PS_GELU) {
                    hidden_gradients<T, PS_GELU>(words, gradients, z, dz, bias, scale, bits);
                } else if (x.activation == PS_RELU) {
                    hidden_gradients<T, PS_RELU>(words, gradients, z, dz, bias, scale, bits);
                } else {
                    hidden_gradients<T, PS_GELU_TANH>(words, gradients, z, dz, bias, scale, bits);
                }
                const uint32_t right = ps_wgmma_place(chunk + part * PART * 2);
                uint32_t a[PART / 16][4];
#pragma unroll
                for (int k = 0; k < PART / 16; k++) {
                    operand_of(a[k], gradients, k);
                }
                ps_pin(a);
                ps_wgmma_begin();
#pragma unroll
                for (int k = 0; k < PART / 16; k++) {
                    ps_wgmma<T, 0>(out[0], a[k], ps_wgmma_operand(right, k * 32), column | k);
                }
                ps_wgmma_commit();
                store_part(h.hidden, words, x.m, row0, h.f, column);
                store_part(h.d_hidden, gradients, x.m, row0, h.f, column);
                ps_wgmma_wait<0>();
                ps_pin(out[0]);
                ps_pin(a);
            }
            if (!stays) {
                pass_chunk<D>(maps, h, at, number, total);
            }
        }
        end_tile<T, D, 2, PS_FINISH_SUM, COUNTED>(maps, x, at, out, next, corner, 0, counted[crew], round, crew);
    }
}

} // namespace wgmma16

#endif
