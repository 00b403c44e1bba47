/* The forward of encoder/resident/d16_e4_f128.cu: embedding, layers, head. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_FORWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_FORWARD_CUH

#include "kernels/cuda/encoder/head.cuh"
#include "kernels/cuda/encoder/resident/d16_attention.cuh"
#include "kernels/cuda/encoder/resident/d16_hidden.cuh"

namespace ps_resident
{

/* K and V of a unit: 6 x 8 rows by 4 matrices: columns of the first pair of heads and of the second, of K and of V. */
enum { KV_BYTES = 6 * KV_ROW };

/* The thread's target, a column of the unit's sequence; NAN where there is none. */
template <class T>
static __device__ __forceinline__ float fetch_target(const encoder<T> &x, int64_t u, uint64_t cursor, const d16_place<T> &at)
{
    const struct ps_cuda_windows &t = x.head.targets;
    const int column = at.tile * 32 + at.lane;
    const float *from = x.head.weight && column < x.head.horizon ? window_at(x, t, cursor, (uint32_t)u) : NULL;
    const float target = *(from ? from + column * t.by_time : x.embed.windows.data);
    return from ? target : NAN;
}

/* The warp's place, found anew: what follows from it would fill the registers, and spills leave the multiprocessor, most of whose
 * first cache is shared memory. */
template <class T> static __device__ __forceinline__ d16_place<T> place_again(const encoder<T> &x)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    d16_place<T> at(thread);
    at.take(x, (int64_t)blockIdx.x * x.block_units + at.unit);
    return at;
}

template <class T, bool DROP> static __global__ void __launch_bounds__(THREADS) d16_forward(const __grid_constant__ encoder<T> x)
{
    extern __shared__ uint4 shared_memory[];
    __shared__ uint64_t staged_barrier;
    const uint32_t staged = ps_shared_address(&staged_barrier);
    char *const weights = (char *)shared_memory;
    d16_place<T> at;
    const int64_t own_unit = (int64_t)blockIdx.x * x.block_units + at.unit;
    at.take(x, own_unit);
    float *const values = (float *)(weights + x.layers * LAYER_BYTES + at.unit * 2 * KV_BYTES);
    struct ahead now = {0, 0};
    float target = NAN;
    const bool expects = x.embed.weight && x.d16.kept;
    if (expects) {
        now = *ahead_at(x);
    }
    int sequence[2], patch[2];
    float u[2][4], mean = 0, deviation = 1;
    uint32_t embed_weight[2][2], patches[4], embed_bits = 0xffffffffu;
    uint64_t step = 0;
    embed_places(sequence, patch, x, at);
    /* Round 0: windows and draws of the step that is expected, before the kernel before has ended: no kernel writes what they
     * depend on. Round 1: all else, and windows and draws if they are others. */
#pragma unroll 1
    for (int round = expects ? 0 : 1;; round++) {
        if (round == 1) {
            ps_grid_begin();
            if (x.embed.weight) {
                load_embed_sum(u, patch, x, at);
                load_embed_weight(embed_weight, x, 0, at);
            }
            const struct ahead found = {DROP ? x.state->step : 0, x.embed.weight ? x.embed.state->cursor : 0};
            stage_weights(x, (d16_weights<T> *)weights, 0, 1);
            if (threadIdx.x == 0) {
                ps_mbarrier_init(staged, (int)blockDim.x);
            }
            step = found.step;
            if (!x.embed.weight || (expects && found.step == now.step && found.cursor == now.cursor)) {
                break;
            }
            now = found;
        }
        target = fetch_target(x, own_unit, now.cursor, at);
        gather_windows(values, x, own_unit, now.cursor, 0, at);
        if constexpr (DROP) {
            embed_bits = embed_draw(x, now.step, at);
        }
        at.sync();
        if (x.embed.revin) {
            ps_window_statistics<12, true>(values, x.embed.length, x.embed.epsilon, mean, deviation);
        }
        const float centre[2] = {mean, mean}, factor[2] = {1.0f / deviation, 1.0f / deviation};
        patch_operand(patches, 0, values, sequence, patch, centre, factor, x, at);
        if (round == 1) {
            break;
        }
        at.sync(); /* the values may be others yet */
    }
    bool drawn = false; /* by the backward of the step before */
    if (DROP && x.d16.kept) {
        const struct tag found = *tag_at(x, step), own = tag_of(x, step);
        drawn = found.step == own.step && found.seed == own.seed && found.draws == own.draws && found.tiles == own.tiles;
    }
    if (x.embed.weight) {
        uint32_t rows[4];
        if (DROP && x.embed.masks && at.q == 0 && at.global_tile < x.units * NT) {
            *embed_masks_at(x, at) = embed_bits;
        }
        if (at.lane == 0 && at.tile == 0 && own_unit < x.units) {
            x.embed.mean[own_unit] = mean;
            x.embed.std[own_unit] = deviation;
        }
        const float centre[2] = {mean, mean}, factor[2] = {1.0f / deviation, 1.0f / deviation};
        embed_product<DROP, T>(rows, patches, u, embed_weight, embed_bits >> at.q, values, sequence, patch, centre, factor, x, at);
        unpack_operand<T>(u, rows);
    } else {
        load_rows(u, (const T *)x.u, at);
    }
    ps_copy_wait();
    __syncthreads();
    if (x.layers > 1) { /* the other layers' while the first is worked on */
        stage_weights(x, (d16_weights<T> *)weights, 1, x.layers);
        ps_mbarrier_arrive_copied(staged);
    }
    if (x.head.weight) { /* behind all layers' work */
        stage_head_d16<D, NT>(x, (T *)(weights + x.head.at), target);
    }
#pragma unroll 1
    for (int l = 0; l < x.layers; l++) {
        const d16_weights<T> &w = ((const d16_weights<T> *)weights)[l];
        const d16_place<T> at = place_again(x);
        if (l == 1) {
            ps_mbarrier_wait(staged, 0);
        }
        char *const keep = x.d16.kept ? kept_at(x, l, at) + at.lane * 16 : NULL;
        /* The lane's place in the unit's matrices: of operands of all rows, and of its own tile's. */
        const uint32_t kv = ps_shared_address(weights + x.layers * LAYER_BYTES) + (uint32_t)(at.unit * 2 * KV_BYTES);
        const uint32_t all_rows = kv + (uint32_t)(at.lane / 8 * KV_ROW + at.lane % 8 * 16);
        const uint32_t own_rows =
            kv + (uint32_t)(at.tile * 2 * KV_ROW + at.lane / 8 % 2 * KV_ROW + at.lane / 16 * MATRIX + at.lane % 8 * 16);
        uint32_t last[2]; /* the operand that adds up the last probabilities */
        last_keys(last, ps_one<T>, x.n, at);
        const uint32_t buffer = (uint32_t)(l % 2 * KV_BYTES);
        uint32_t a[4], q[4], words[3] = {0, 0, 0xffffffffu};
        float rstd[2], xhat[2][4], c[2][4];
        if constexpr (DROP) {
            uint32_t *const masks = masks_at(x, step, l, at.global_tile, at.lane);
            if (drawn) {
                words[0] = masks[0], words[1] = masks[32], words[2] = masks[64];
            } else {
                draw_tile(words, x, step, l, (uint32_t)at.first, at.q);
                if (keep) {
                    masks[0] = words[0], masks[32] = words[1], masks[64] = words[2];
                }
            }
        }
        normalise(xhat, rstd, u, x.epsilon, NULL, at);
        scale_shift<T>(a, xhat, w.ln1_gamma, w.ln1_beta, at.q);
        project_heads<T>(q, a, w, x.scale_log2e, own_rows + buffer, at, [](int, const uint32_t(&)[4]) {});
        if (keep) {
            uint32_t packed[4];
            pack_operand<T>(packed, xhat[0], xhat[1]);
            leave_operand(keep + KEPT_XHAT1, packed);
            if (at.q == 1) {
                *(float2 *)(keep + KEPT_ROWS) = make_float2(rstd[0], rstd[1]);
            }
        }
        at.sync(); /* twice as many buffers: the layer before the last has been read */

        /* merged = softmax(q k' / sqrt(e)) v */
        float lse[4];
        attention(a, lse, q, all_rows + buffer, d16_alone(), last, x.n, at);

        const d16_place<T> again = place_again(x);
        /* u = r = u + drop(merged W_o + b_o) */
        project16(c, a, w.w_o, LD, w.b_o, again);
        add_kept(u, c, words[2], x.drop_scale);

        /* u = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2) */
        normalise(xhat, rstd, u, x.epsilon, NULL, again);
        if (x.d16.kept) {
            char *const keep = kept_at(x, l, again) + again.lane * 16;
            uint32_t packed[4];
            leave_operand(keep + KEPT_MERGED, a);
            pack_operand<T>(packed, xhat[0], xhat[1]);
            leave_operand(keep + KEPT_XHAT2, packed);
            if (again.q == 1) {
                *(float2 *)(keep + KEPT_ROWS + 8) = make_float2(rstd[0], rstd[1]);
            }
            if (again.q % 2 == 0) {
                *(float4 *)(keep + KEPT_ROWS) = make_float4(lse[0], lse[1], lse[2], lse[3]);
            }
        }
        scale_shift<T>(a, xhat, w.ln2_gamma, w.ln2_beta, again.q);
        clear(c);
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            feed_forward<DROP, PS_GELU_TANH>(c, a, half ? words[1] : words[0], hidden_columns(w, half), again);
        }
        finish_hidden(c, w, x.half_scale, again);
        add_kept(u, c, words[2] >> 1, x.drop_scale);
    }
    if (DROP && x.d16.kept && !drawn && threadIdx.x == 0) {
        *tag_at(x, step) = tag_of(x, step);
    }
    if (x.embed.weight && x.d16.kept && blockIdx.x == 0 && threadIdx.x == 0) {
        *ahead_at(x) = {DROP ? step + 1 : 0, x.embed.state->cursor + x.embed.step};
    }
    store_rows((T *)x.u + x.layers * x.rows * D, u, at);
    if (x.head.weight) {
        head_d16<D, NT>(u, x, (T *)(weights + x.layers * LAYER_BYTES), (const T *)(weights + x.head.at),
                        (int64_t)blockIdx.x * x.block_units);
    }
}

} // namespace ps_resident

#endif
