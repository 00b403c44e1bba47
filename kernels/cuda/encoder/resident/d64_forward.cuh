/* The forward of encoder/resident/d64_short.cu: with the embedding before the layers and the head behind them, where they are asked
 * for. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D64_FORWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D64_FORWARD_CUH

#include "kernels/cuda/encoder/resident/d64_panels.cuh"

namespace ps_resident
{

/* Of LayerNorm `which` of all, for backward; one of the warps that share the rows does it. */
template <class T>
static __device__ __forceinline__ void keep_rstd(const encoder<T> &x, int which, int share, const float (&rstd)[2],
                                                 const panel_place<T> &at)
{
    if (x.d64.rstd && at.share == share && at.q == 0) {
        float *const to = x.d64.rstd + which * x.rows + at.first;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (at.here[h]) {
                to[8 * h] = rstd[h];
            }
        }
    }
}

/* The thread's of the unit's first values, and of the block's forecasts: sequence thread / H from u0 on, column thread % H. NAN
 * where there is none. */
struct early {
    float value, target;
};

template <class T>
static __device__ __forceinline__ void fetch_early(struct early &e, const encoder<T> &x, int64_t u0, uint64_t cursor,
                                                   const panel_place<T> &at)
{
    const auto &m = x.embed;
    const uint32_t first = (uint32_t)u0 * m.sequences;
    const int i = at.share * 32 + at.lane, s = (int)ps_divide(i, m.by_length);
    const float *value = window_at(x, m.windows, cursor, s < m.sequences ? first + at.unit * m.sequences + s : m.all);
    value = value ? value + (i - s * m.length) * m.windows.by_time : NULL;
    const float *target = NULL;
    if (x.head.weight) {
        const int of = (int)threadIdx.x / x.head.horizon, column = (int)threadIdx.x - of * x.head.horizon;
        target = window_at(x, x.head.targets, cursor, of < UNITS * m.sequences ? first + of : m.all);
        target = target ? target + column * x.head.targets.by_time : NULL;
    }
    e.value = *(value ? value : m.windows.data);
    e.target = *(target ? target : m.windows.data);
    e.value = value ? e.value : NAN;
    e.target = target ? e.target : NAN;
}

/* Mean and deviation of the unit's windows, a window a warp. */
template <class T>
static __device__ __forceinline__ void embed_scales(float2 *scales, const float *values, const encoder<T> &x,
                                                    const panel_place<T> &at)
{
    const auto &e = x.embed;
#pragma unroll 1
    for (int s = at.share; s < e.sequences; s += sharing(D)) {
        float mean = 0.0f, deviation = 1.0f;
        if (e.revin) {
            ps_window_statistics<1, true>(values + s * e.length, e.length, e.epsilon, mean, deviation);
        }
        if (at.lane == 0) {
            scales[s] = make_float2(mean, deviation);
        }
    }
}

/* The unit's means and deviations to memory. */
template <class T>
static __device__ __forceinline__ void keep_scales(const encoder<T> &x, const float2 *scales, int64_t unit,
                                                   const panel_place<T> &at)
{
    const uint32_t of = (uint32_t)unit * x.embed.sequences + at.lane;
    if (at.share == 0 && at.lane < x.embed.sequences && of < x.embed.all) {
        x.embed.mean[of] = scales[at.lane].x;
        x.embed.std[of] = scales[at.lane].y;
    }
}

/* The unit's windows to `values`, what brings them to mean 0 and deviation 1, and the operand of their patches' first values.
 * first: the block's first units, of which the thread's early values come too. */
template <class T>
static __device__ __forceinline__ void first_patches(uint32_t (&patches)[4], float (&centre)[2], float (&factor)[2],
                                                     struct early &early, float *values, float2 *scales, const int (&sequence)[2],
                                                     const int (&n)[2], const encoder<T> &x, int64_t unit, uint64_t cursor,
                                                     bool first, const panel_place<T> &at)
{
    if (first) {
        fetch_early(early, x, (int64_t)blockIdx.x * UNITS, cursor, at);
        values[at.share * 32 + at.lane] = early.value;
    }
    gather_windows(values, x, unit, cursor, first ? THREADS / UNITS : 0, at);
    at.sync();
    embed_scales(scales, values, x, at);
    at.sync();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float2 v = scales[at.here[h] ? sequence[h] : 0];
        centre[h] = v.x;
        factor[h] = 1.0f / v.y;
    }
    patch_operand(patches, 0, values, sequence, n, centre, factor, x, at);
}

/* By the thread that asks for panels: its barriers, of W_qkv, W_o, W_1, W_2. */
static __device__ __forceinline__ void panels_begin(uint32_t came, const struct weight_panels &panels)
{
    for (int i = 0; i < 4; i++) {
        ps_mbarrier_init(came + i * 8, 1);
    }
    ps_mbarrier_publish();
    ps_tensor_prefetch(&panels.qkv);
    ps_tensor_prefetch(&panels.o);
    ps_tensor_prefetch(&panels.w_1);
    ps_tensor_prefetch(&panels.w_2);
}

/* softmax(q k' / sqrt(e)) v of the warp's rows and head, of LN1's output in panel `from`, to panel `to`; vectors: from the warp's
 * columns on. LN1's xhat and 1 / deviation are left for backward meanwhile. */
template <class T>
static __device__ __forceinline__ void attention(int from, int to, const float (&xhat)[2][4], const float (&rstd)[2],
                                                 const float *vectors, const float4 *table, const encoder<T> &x, int group, int l,
                                                 panel_place<T> &at)
{
    float own[2][4];
    uint32_t a[4];
    float qkv[6][4], p[2][4], sum[4], most[2];
    uint32_t rows[4], others[4];
#pragma unroll
    for (int t = 0; t < 6; t++) {
        const float2 b = *(const float2 *)(vectors + B_QKV + t / 2 * D + t % 2 * 8 + at.q * 2);
        qkv[t][0] = qkv[t][2] = b.x;
        qkv[t][1] = qkv[t][3] = b.y;
    }
    products_begin(at, qkv);
    product_slices<T>(qkv, at.of(from), at.of(W_QKV) + (uint32_t)at.share * (64 * 32 / 16));
    ps_wgmma_commit();
    float hidden0[4], hidden1[4];
    take_hidden(hidden0, hidden1, table, at.lane);
    if (x.d64.left) { /* stores and sums that the products hide */
        pack_operand<T>(rows, xhat[0], xhat[1]);
        leave_operand(left_at(x, group, l, LEFT_1), rows);
        keep_rstd(x, 2 * l, 0, rstd, at);
    }
    products_wait<0>(qkv);
    pack_operand<T>(rows, qkv[0], qkv[1]);
    pack_operand<T>(others, qkv[2], qkv[3]);
    times_transposed<T>(p, rows, others, hidden0, hidden1);
    if (x.d64.left) {
        leave_operand(left_at(x, group, l, LEFT_Q), rows);
        leave_operand(left_at(x, group, l, LEFT_K), others);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = fmaxf(fmaxf(p[0][2 * r], p[0][2 * r + 1]), fmaxf(p[1][2 * r], p[1][2 * r + 1]));
        most[r] = ps_quad_max(most[r]) * x.scale_log2e;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        p[i / 4][i % 4] = ps_exp2(fmaf(p[i / 4][i % 4], x.scale_log2e, -most[i % 4 / 2]));
    }
    pack_operand<T>(rows, p[0], p[1]);
    pack_operand<T>(others, qkv[4], qkv[5]);
    times<T>(own, rows, others);
    if (x.d64.left) {
        leave_operand(left_at(x, group, l, LEFT_V), others);
    }
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
    add_ones<T>(sum, rows);
    const float scale[2] = {__fdividef(1.0f, sum[0]), __fdividef(1.0f, sum[2])};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        own[i / 4][i % 4] *= scale[i % 4 / 2];
    }
    pack_operand<T>(a, own[0], own[1]);
    ps_stmatrix4_at(at.own() + to * PANEL, a);
    keep_log_sums(x, l, at.share, most, sum[0], sum[2], at);
}

/* 2 gelu(LN2(r) W_1 + b_1), zero where dropped, of the unit's rows and the warpgroup's panel of d_ff, of LN2's output in panel
 * `from`, to the panels from `to` on. LN2's xhat and 1 / deviation are left for backward meanwhile. */
template <int P, bool DROP, class T>
static __device__ __forceinline__ void hidden_columns(int from, int to, const float (&xhat)[2][4], const float (&rstd)[2],
                                                      const float *vectors, uint64_t now, uint32_t *keep, const encoder<T> &x,
                                                      int group, int l, panel_place<T> &at)
{
    constexpr int F = P * 64;
    uint32_t a[4];
    float y[8][4];
    uint32_t drawn[4];
    set_bias(y, vectors + B_1 + at.template mine<P>() * 64, at.q);
    products_begin(at, y);
    product<T, false, true>(y, at.of(from), at.of(W_1 + at.template mine<P>()), true);
    ps_wgmma_commit();
    if (x.d64.left) {
        pack_operand<T>(a, xhat[0], xhat[1]);
        leave_operand(left_at(x, group, l, LEFT_2), a);
        keep_rstd(x, 2 * l + 1, 1, rstd, at);
    }
    if (DROP) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = at.template mine<P>() * 64 + i * 16;
            drawn[i] = new_masks(x, now, 3 * l + 1, F, column, keep ? keep + D / 2 + column / 2 : NULL, at);
        }
    }
    products_wait<0>(y);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        y[i / 4][i % 4] = ps_gelu_twice(y[i / 4][i % 4]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        pack_operand<T>(a, y[2 * i], y[2 * i + 1]);
        if (DROP) {
            drop_operand(a, drawn[i]);
        }
        ps_stmatrix4_at((at.begin ^ i * 32) + (to + at.template mine<P>()) * PANEL, a);
    }
}

template <class T, class S, int P, bool DROP>
static __global__ void __launch_bounds__(THREADS, 1)
    d64_forward(const __grid_constant__ encoder<T> x, const __grid_constant__ struct weight_panels panels)
{
    extern __shared__ __align__(1024) char memory[];
    __shared__ uint64_t barriers[4];
    constexpr int F = P * 64;
    enum { W_2 = W_1 + P, A = W_2 + P, M, H }; /* panels */
    float4 *const table = (float4 *)(memory + panels_of(P, false) * PANEL);
    panel_place<T> at(memory);
    char *const statistics = memory + panels_of(P, false) * PANEL + TABLE_BYTES + at.unit * STATISTICS;
    float *const all_vectors = (float *)(memory + panels_of(P, false) * PANEL + TABLE_BYTES + UNITS * STATISTICS);
    uint64_t now = 0, cursor = 0;
    uint32_t rows[4];
    float floats[2][4]; /* in rows' place where the stream is of fp32; the embedding is not asked for then */
    auto &given = *[&] {
        if constexpr (std::is_same<S, T>::value) {
            return &rows;
        } else {
            return &floats;
        }
    }();
    /* The windows that are expected, before the kernel before has ended: no kernel writes what they depend on. */
    const bool expects = x.embed.weight && x.d64.left;
    struct early early = {};
    uint64_t *const ahead = (uint64_t *)(x.d64.counters + AHEAD);
    const int64_t u0 = (int64_t)blockIdx.x * UNITS;
    if (expects) {
        cursor = *ahead;
    }
    float *const values = (float *)(memory + A * PANEL) + at.unit * D64_WINDOW_FLOATS;
    float2 *const scales = statistics_at(statistics, 0, at);
    fill_table(table, x.n, at);
    T *const head = (T *)(memory + x.head.at);
    /* Of W_qkv, W_o, W_1, W_2; one thread asks for all. */
    const uint32_t came = ps_shared_address(barriers);
    const bool asks = threadIdx.x == 32;
    uint32_t parity = 0;
    if (asks) {
        panels_begin(came, panels);
    }
    const int groups = groups_of(x);
#pragma unroll 1
    for (int group = (int)blockIdx.x; group < groups; group += (int)gridDim.x) {
        const bool more = group + (int)gridDim.x < groups, first = group == (int)blockIdx.x;
        const int64_t unit = (int64_t)group * UNITS + at.unit;
        embed_ready<T> ready;
        int sequence[2], n[2];
        uint32_t patches[4];
        float centre[2], factor[2];
        at.take(x, unit);
        embed_places(sequence, n, x, at);
        /* Round 0: the windows that are expected. Round 1: all else, and the windows if they are others. */
#pragma unroll 1
        for (int round = first && expects ? 0 : 1;; round++) {
            if (round == 1) {
                if (first) {
                    ps_grid_begin();
                    if (asks) {
                        fetch_panels<3>(memory + W_QKV * PANEL, panels.qkv, 0, came);
                        fetch_panels<1>(memory + W_O * PANEL, panels.o, 0, came + 8);
                        fetch_panels<P>(memory + W_1 * PANEL, panels.w_1, 0, came + 16);
                    }
                    now = DROP ? x.state->step : 0;
                }
                if (x.embed.weight) {
                    embed_begin<DROP>(ready, n, x, now, at);
                } else {
                    fetch_rows(given, (const S *)x.u, at);
                }
                if (first) {
                    stage_vectors(x, all_vectors, F);
                    if (x.head.weight) {
                        stage_head_d64(x, head);
                    }
                }
                if (!x.embed.weight || (first && expects && ready.cursor == cursor)) {
                    break;
                }
                cursor = ready.cursor;
            }
            first_patches(patches, centre, factor, early, values, scales, sequence, n, x, unit, cursor, first, at);
            if (round == 1) {
                break;
            }
            at.sync(); /* the values may be others yet */
        }
        if (x.embed.weight) {
            keep_scales(x, scales, unit, at);
            embed_product<DROP, S>(rows, patches, ready.sum, ready.weight, ready.bits, values, sequence, n, centre, factor, x, at);
        }
        ps_copy_wait(); /* vectors, W_h */
        __syncthreads();
        float u[2][4];
        unpack_operand<T>(u, given);
#pragma unroll 1
        for (int l = 0; l < x.layers; l++) {
            const float *const vectors = all_vectors + l * vector_floats(F);
            const float *const own_vectors = vectors + at.share * 16;
            uint32_t *const keep = DROP && x.masks && at.global_tile < x.units ? masks_at(x, F, l, at) : NULL;
            /* What takes the place of this layer's weights: the next layer's, or the first one's for the next units. */
            const bool stage = l + 1 < x.layers || more;
            const int next = l + 1 < x.layers ? l + 1 : 0;
            /* By the first thread, when there will be a backward; and before what lies in the panels is overwritten. */
            const auto leave = [&](int panel, int from) {
                if (x.d64.left && threadIdx.x == 0) {
                    store_panels(kept_at(x, group, l), panel, memory, from, 1);
                }
            };
            const auto left = [&]() {
                if (x.d64.left && threadIdx.x == 0) {
                    ps_bulk_wait_read();
                }
            };
            uint32_t a[4];
            float rstd[2], xhat[2][4], own[2][4];
            normalise(xhat, rstd, u, x.epsilon, statistics_at(statistics, 0, at), at);
            scale_shift<T>(a, xhat, own_vectors + LN1_GAMMA, own_vectors + LN1_BETA, at.q);
            ps_stmatrix4_at(at.own() + A * PANEL, a);
            publish();
            leave(kept_attention(P) + 2, A);
            if (asks) {
                fetch_panels<P>(memory + W_2 * PANEL, panels.w_2, l, came + 24);
            }
            ps_mbarrier_wait(came, parity);

            /* merged = softmax(q k' / sqrt(e)) v */
            attention(A, M, xhat, rstd, own_vectors, table, x, group, l, at);

            /* u = r = u + drop(merged W_o + b_o) */
            left();
            publish();
            leave(kept_attention(P) + 4, M);
            if (asks && stage) {
                fetch_panels<3>(memory + W_QKV * PANEL, panels.qkv, next, came);
            }
            ps_mbarrier_wait(came + 8, parity);
            set_bias(own, own_vectors + B_O, at.q);
            products_begin(at, own);
            product<T, false, true>(own, at.of(M), at.of(W_O) + at.columns(), true);
            ps_wgmma_commit();
            uint32_t bits = 0xffffffffu;
            if (DROP) {
                bits = new_masks(x, now, 3 * l, D, at.share * 16, keep ? keep + at.share * 8 : NULL, at);
            }
            products_wait<0>(own);
            add_kept(u, own, bits, x.drop_scale);

            /* u = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2) */
            normalise(xhat, rstd, u, x.epsilon, statistics_at(statistics, 1, at), at);
            scale_shift<T>(a, xhat, own_vectors + LN2_GAMMA, own_vectors + LN2_BETA, at.q);
            ps_stmatrix4_at(at.own() + A * PANEL, a);
            publish();
            leave(KEPT_MIDDLE, A);
            if (asks && stage) {
                fetch_panels<1>(memory + W_O * PANEL, panels.o, next, came + 8);
            }
            ps_mbarrier_wait(came + 16, parity);
            hidden_columns<P, DROP>(A, H, xhat, rstd, vectors, now, keep, x, group, l, at);
            left();
            publish();
            if (x.d64.left && threadIdx.x == 0) {
                store_around<P>(kept_at(x, group, l), kept_hidden(P), memory, H);
            }
            if (asks && stage) {
                fetch_panels<P>(memory + W_1 * PANEL, panels.w_1, next, came + 16);
            }
            ps_mbarrier_wait(came + 24, parity);
            parity ^= 1;
            products_begin(at, own);
#pragma unroll
            for (int i = 0; i < P; i++) {
                product<T, false, true>(own, at.of(H + i), at.of(W_2 + i) + at.columns(), i > 0);
            }
            ps_wgmma_commit();
            if (DROP) {
                const int chunk = D / 16 + F / 16 + at.share;
                bits = new_masks(x, now, 3 * l + 2, D, at.share * 16, keep ? keep + chunk * 8 : NULL, at);
            }
            set_bias(xhat, own_vectors + B_2, at.q);
            products_wait<0>(own);
            scale_add_rows(own, x.half_scale, xhat);
            add_kept(u, own, bits, x.drop_scale);
            if (l + 1 == x.layers) {
                store_rows((S *)x.u + x.layers * x.rows * D, u, at);
            }
        }
        if (x.head.weight) {
            head_d64(u, x, (float *)(memory + A * PANEL), head, u0, early.target, at); /* A and M are free */
        }
    }
    if (threadIdx.x == 0 && x.d64.left) {
        ps_bulk_wait_read();
        if (expects && blockIdx.x == 0) {
            *ahead = cursor + x.embed.step;
        }
    }
}

} // namespace ps_resident

#endif
