/* The backward of encoder/resident/d64_short.cu: the gradients of rows. It leaves in memory what encoder/resident/d64_weights.cuh
 * makes the weights' gradients of, and tells it so. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D64_BACKWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D64_BACKWARD_CUH

#include "kernels/cuda/encoder/resident/d64_panels.cuh"

namespace ps_resident
{

/* The thread's stores so far, but for the last PENDING, can be seen by d64_weights: 1 those of the feed-forward, 2 all of the
 * layer. */
template <int PENDING> static __device__ __forceinline__ void announce(unsigned *flag, unsigned stage)
{
    ps_bulk_wait<PENDING>();
    asm volatile("fence.proxy.async.global;\nst.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(stage) : "memory");
}

/* What the warp's rows add to gamma's and beta's gradients: [2][64] of the unit. */
template <class T>
static __device__ __forceinline__ void norm_sums(float *to, const float (&dx)[2][4], const uint32_t (&xhat)[4],
                                                 const panel_place<T> &at)
{
    float v[2][2][2]; /* gamma or beta, tile, column */
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float low = i ? ps_high<T>(xhat[2 * t]) : ps_low<T>(xhat[2 * t]);
            const float high = i ? ps_high<T>(xhat[2 * t + 1]) : ps_low<T>(xhat[2 * t + 1]);
            v[0][t][i] = dx[t][i] * low + dx[t][2 + i] * high;
            v[1][t][i] = dx[t][i] + dx[t][2 + i];
        }
    }
    /* Over the rows: lanes give away half of their values at each step, so that each is left with one. */
    const bool beta = at.lane & 16, right = at.lane & 8, odd = at.lane & 4;
    float w[2][2], y[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float give = beta ? v[0][i / 2][i % 2] : v[1][i / 2][i % 2];
        const float keep = beta ? v[1][i / 2][i % 2] : v[0][i / 2][i % 2];
        w[i / 2][i % 2] = keep + __shfl_xor_sync(0xffffffffu, give, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float give = right ? w[0][i] : w[1][i], keep = right ? w[1][i] : w[0][i];
        y[i] = keep + __shfl_xor_sync(0xffffffffu, give, 8);
    }
    const float give = odd ? y[0] : y[1], keep = odd ? y[1] : y[0];
    to[(beta ? D : 0) + at.share * 16 + (right ? 8 : 0) + at.q * 2 + odd] = keep + __shfl_xor_sync(0xffffffffu, give, 4);
}

/* gamma's and beta's sums over the units. */
static __device__ __forceinline__ void put_norm_sums(float *to, const float *from)
{
    if (threadIdx.x < 2 * D) {
        float sum = from[threadIdx.x];
#pragma unroll
        for (int u = 1; u < UNITS; u++) {
            sum += from[u * 2 * D + threadIdx.x];
        }
        to[threadIdx.x] = sum;
    }
}

/* 1 / deviation of a group's rows; zero for those that do not exist. */
template <class T> static __device__ __forceinline__ void stage_rstd(float *to, const encoder<T> &x, int group)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < x.layers * 128; i += THREADS) {
        const int64_t unit = (int64_t)group * UNITS + i % 64 / 16, row = unit * x.unit_rows + i % 16;
        const bool here = unit < x.units && i % 16 < x.unit_rows && row < x.rows;
        to[i] = here ? x.d64.rstd[i / 64 * x.rows + row] : 0.0f;
    }
}

/* The operand scale * g, zero where dropped. */
template <class T, bool DROP>
static __device__ __forceinline__ void branch_operand(uint32_t (&a)[4], const float (&g)[2][4], float scale, uint32_t bits)
{
    scale_operand<T>(a, g, scale);
    if (DROP) {
        drop_operand(a, bits);
    }
}

/* Begins to fill a panel for the block's units from `unit` on: a row's patch, a one, and a one for its place in the sequence. */
template <class T> static __device__ __forceinline__ void stage_embed_panel(char *panel, const encoder<T> &x, int64_t unit)
{
    const int row = (int)threadIdx.x / 8, piece = (int)threadIdx.x % 8, i = row % 16;
    unit += row / 16;
    const int64_t from = unit * x.unit_rows + i;
    const bool here = unit < x.units && i < x.unit_rows && from < x.rows;
    stage_patch((T *)(panel + row * 128 + (piece ^ (row & 7)) * 16), here ? x.embed.patches + from * x.embed.patch : NULL, piece,
                x.embed.patch, i % x.n);
}

/* The panel's columns' du: [P + 1 + N, d] of the block, to or onto its sums. */
template <class T>
static __device__ __forceinline__ void embed_gradient_panels(const encoder<T> &x, panel_place<T> &at, uint32_t panel, uint32_t du,
                                                             bool first)
{
    const int rows = embed_rows_of(x.embed.patch, x.n);
    float c[2][4];
    products_begin(at, c);
    product<T, true, true>(c, panel, du, false);
    ps_wgmma_commit();
    products_wait<0>(c);
    float *const to = x.embed.partial + (int64_t)blockIdx.x * (rows * D) + at.share * 16 + at.q * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = at.unit * 16 + at.g + 8 * h;
        if (row < rows) {
            add_pair(to + row * D, c[0][2 * h], c[0][2 * h + 1], x.drop_scale, first);
            add_pair(to + row * D + 8, c[1][2 * h], c[1][2 * h + 1], x.drop_scale, first);
        }
    }
}

/* The gradient before gelu of the unit's rows and the warpgroup's panel of d_ff, of LN2's output in panel m and the gradient that
 * enters W_2 in panel g, to the panels from `to` on. Meanwhile the layer before is announced. */
template <int P, bool DROP, class T>
static __device__ __forceinline__ void hidden_gradient(int m, int g, int to, const float *vectors, const uint32_t *masks,
                                                       const encoder<T> &x, int group, int groups, int l, panel_place<T> &at)
{
    float y[8][4], c[8][4];
    uint32_t bits[4];
    set_bias(y, vectors + B_1 + at.template mine<P>() * 64, at.q);
    products_begin(at, y, c);
    product<T, false, true>(y, at.of(m), at.of(W_1 + at.template mine<P>()), true);
    product<T, false, false>(c, at.of(g), at.of(W_1 + P + at.template mine<P>()), false);
    ps_wgmma_commit();
    if (threadIdx.x == 0 && l + 1 < x.layers) {
        announce<1>(x.d64.flags + (int64_t)(l + 1) * groups + group, 2); /* G's is of this layer */
    }
    if (DROP) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bits[i] = masks[D / 2 + at.template mine<P>() * 32 + i * 8] >> at.q;
        }
    }
    products_wait<0>(y, c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t d_hidden[4];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            ps_gelu_twice_backward(y[2 * i + j / 4][j % 4], c[2 * i + j / 4][j % 4]);
        }
        pack_operand<T>(d_hidden, c[2 * i], c[2 * i + 1]);
        if (DROP) {
            drop_operand(d_hidden, bits[i]);
        }
        ps_stmatrix4_at((at.begin ^ i * 32) + (to + at.template mine<P>()) * PANEL, d_hidden);
    }
}

/* The gradients of q, k and v of the warp's rows and head, to three panels from `to` on, of that which enters W_o in panel `from`.
 */
template <class T>
static __device__ __forceinline__ void attention_gradient(int from, int to, const uint4 &q4, const uint4 &k4, const uint4 &v4,
                                                          const float (&log_sum)[2], const float4 *table, const encoder<T> &x,
                                                          panel_place<T> &at)
{
    float dx[2][4], v[2][4];
    uint32_t a[4];
    const uint32_t queries[4] = {q4.x, q4.y, q4.z, q4.w}, keys[4] = {k4.x, k4.y, k4.z, k4.w};
    const uint32_t values[4] = {v4.x, v4.y, v4.z, v4.w};
    uint32_t d_merged[4], p_operand[4], operand[4];
    products_begin(at, dx);
    product<T, false, false>(dx, at.of(from), at.of(W_O) + at.rows(), false);
    ps_wgmma_commit();
    float p[2][4], y[2][4], hidden0[4], hidden1[4];
    take_hidden(hidden0, hidden1, table, at.lane);
    times_transposed<T>(p, queries, keys, hidden0, hidden1);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        p[i / 4][i % 4] = ps_exp2(fmaf(p[i / 4][i % 4], x.scale_log2e, -log_sum[i % 4 / 2]));
    }
    pack_operand<T>(p_operand, p[0], p[1]);
    transpose_operand(operand, p_operand);
    products_wait<0>(dx);
    pack_operand<T>(d_merged, dx[0], dx[1]);
    const float zero[4] = {0, 0, 0, 0};
    times_transposed<T>(y, d_merged, values, zero, zero); /* of A */
    times<T>(v, operand, d_merged);                       /* of values */
    pack_operand<T>(a, v[0], v[1]);
    ps_stmatrix4_at(at.own() + (to + 2) * PANEL, a);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum = fmaf(p[i / 2][2 * r + i % 2], y[i / 2][2 * r + i % 2], sum);
        }
        sum = ps_quad_sum(sum);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            y[i / 2][2 * r + i % 2] = p[i / 2][2 * r + i % 2] * (y[i / 2][2 * r + i % 2] - sum);
        }
    }
    pack_operand<T>(p_operand, y[0], y[1]);
    times<T>(v, p_operand, keys); /* of queries */
    transpose_operand(operand, p_operand);
    times<T>(y, operand, queries); /* of keys */
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] *= x.scale;
        y[i / 4][i % 4] *= x.scale;
    }
    pack_operand<T>(a, v[0], v[1]);
    ps_stmatrix4_at(at.own() + to * PANEL, a);
    pack_operand<T>(a, y[0], y[1]);
    ps_stmatrix4_at(at.own() + (to + 1) * PANEL, a);
}

template <class T, class S, int P, bool DROP>
static __global__ void __launch_bounds__(THREADS, 1)
    d64_backward(const __grid_constant__ encoder<T> x, const __grid_constant__ struct weight_panels panels)
{
    extern __shared__ __align__(1024) char memory[];
    __shared__ uint64_t barriers[3];
    constexpr int F = P * 64;
    /* Panels. M: LN2's output. G, K: the gradient that enters W_2, W_o. H: the gradients of q, k, v. E: of hidden. */
    enum { W_2 = W_1 + P, M = W_2 + P, G, K, H, E = H + 3 };
    float4 *const table = (float4 *)(memory + panels_of(P, true) * PANEL);
    panel_place<T> at(memory);
    char *const statistics = memory + panels_of(P, true) * PANEL + TABLE_BYTES + at.unit * STATISTICS;
    float *const column_sums = (float *)(memory + panels_of(P, true) * PANEL + TABLE_BYTES + UNITS * STATISTICS);
    float *const all_vectors = column_sums + COLUMN_SUMS / 4;
    float *const all_rstd = all_vectors + x.layers * vector_floats(F);
    float *const norms = column_sums + at.unit * 2 * D;
    stream_rows<S> gradient; /* of y */
    uint32_t after[4];       /* LN2's xhat of the layer that comes */
    /* Of W_1 and W_2, W_qkv and W_o, M; one thread asks for all. */
    const uint32_t came = ps_shared_address(barriers);
    const bool asks = threadIdx.x == 32;
    uint32_t parity = 0;
    const auto fetch_feed_forward = [&](int l) {
        ps_mbarrier_expect(came, 2 * P * PANEL);
        ps_tensor_copy4(ps_shared_address(memory) + W_1 * PANEL, &panels.w_1, 0, 0, 0, l, came);
        ps_tensor_copy4(ps_shared_address(memory) + W_2 * PANEL, &panels.w_2, 0, 0, 0, l, came);
    };
    const auto fetch_normalised = [&](int group, int l) {
        ps_mbarrier_expect(came + 16, PANEL);
        ps_bulk_fetch(ps_shared_address(memory) + M * PANEL, kept_at(x, group, l) + KEPT_MIDDLE * PANEL, PANEL, came + 16);
    };
    if (x.d64.fresh) {
        ps_grid_begin();
    }
    if (asks) {
        for (int i = 0; i < 3; i++) {
            ps_mbarrier_init(came + i * 8, 1);
        }
        ps_mbarrier_publish();
        fetch_feed_forward(x.layers - 1);
    }
    stage_vectors(x, all_vectors, F);
    fill_table(table, x.n, at);
    /* Nothing of this block's is there yet: d64_weights, whose blocks may begin once all of these have, must find that. */
    const int groups = groups_of(x);
    if (threadIdx.x < 32) {
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < x.layers; i += 32) {
#pragma unroll 1
            for (int group = (int)blockIdx.x; group < groups; group += (int)gridDim.x) {
                x.d64.flags[(int64_t)i * groups + group] = 0;
            }
        }
        __threadfence();
    }
    __syncthreads();
    ps_grid_begin();
#pragma unroll 1
    for (int group = (int)blockIdx.x; group < groups; group += (int)gridDim.x) {
        const bool more = group + (int)gridDim.x < groups;
        at.take(x, (int64_t)group * UNITS + at.unit);
        if (asks) {
            fetch_normalised(group, x.layers - 1);
        }
        fetch_rows(gradient, (const S *)x.dy, at);
        take_operand(after, left_at(x, group, x.layers - 1, LEFT_2));
        stage_rstd(all_rstd, x, group);
        ps_copy_wait(); /* vectors */
        __syncthreads();
        float g[2][4];
        unpack_operand<T>(g, gradient);
        scale_rows(g, gradient_range<T, S>(x.d64.counters + PEAK, false));
#pragma unroll 1
        for (int l = x.layers - 1; l >= 0; l--) {
            const float *const vectors = all_vectors + l * vector_floats(F), *const own_vectors = vectors + at.share * 16;
            /* What the first thread leaves of the layer. */
            const auto kept = [&]() { return kept_at(x, group, l); };
            const auto norms_to = [&](int layer) { return x.d64.norms + ((int64_t)group * x.layers + layer) * (4 * D); };
            const float *const own_rstd = all_rstd + 2 * l * 64 + at.unit * 16 + at.g; /* LN1's rows; LN2's 64 further */
            /* Units beyond the last read some masks: their gradients are zero. */
            const uint32_t *const masks = !DROP ? NULL : at.global_tile < x.units ? masks_at(x, F, l, at) : x.masks + at.g;
            uint32_t xhat[4], a[4];
            float rstd[2], dx[2][4];

            /* y = r + drop(hidden W_2 + b_2) */
            branch_operand<T, DROP>(a, g, x.drop_scale * x.half_scale, DROP ? masks[(D / 16 + F / 16 + at.share) * 8] >> at.q : 0);
            ps_stmatrix4_at(at.own() + G * PANEL, a);
            publish();
            if (threadIdx.x == 0) {
                store_panels(kept(), kept_hidden(P) + KEPT_MIDDLE, memory, G, 1);
            }
            if (l + 1 < x.layers) { /* what the layer before left */
                put_norm_sums(norms_to(l + 1), column_sums + UNITS * 2 * D);
            }
            if (asks) {
                ps_mbarrier_expect(came + 8, 4 * PANEL);
                ps_tensor_copy4(ps_shared_address(memory) + W_QKV * PANEL, &panels.qkv, 0, 0, 0, l, came + 8);
                ps_tensor_copy4(ps_shared_address(memory) + W_O * PANEL, &panels.o, 0, 0, 0, l, came + 8);
            }
            ps_mbarrier_wait(came, parity);
            ps_mbarrier_wait(came + 16, parity);
            hidden_gradient<P, DROP>(M, G, E, vectors, masks, x, group, groups, l, at);
            publish();
            if (threadIdx.x == 0) {
                store_around<P>(kept(), 0, memory, E);
            }
            const uint4 x4 = *left_at(x, group, l, LEFT_1);
            products_begin(at, dx);
#pragma unroll
            for (int i = 0; i < P; i++) {
                product<T, false, false>(dx, at.of(E + i), at.of(W_1 + i) + at.rows(), i > 0);
            }
            ps_wgmma_commit();
            const uint4 q4 = *left_at(x, group, l, LEFT_Q), k4 = *left_at(x, group, l, LEFT_K);
            const uint4 v4 = *left_at(x, group, l, LEFT_V);
            products_wait<0>(dx);
            norm_sums(norms, dx, after, at);
            rstd[0] = own_rstd[64];
            rstd[1] = own_rstd[64 + 8];
            normalise_backward(g, dx, own_vectors + LN2_GAMMA, after, rstd, statistics_at(statistics, 0, at), at);

            /* r = u + drop(merged W_o + b_o) */
            branch_operand<T, DROP>(a, g, x.drop_scale, DROP ? masks[at.share * 8] >> at.q : 0);
            ps_stmatrix4_at(at.own() + K * PANEL, a);
            float log_sum[2]; /* rows that do not exist see nothing */
            {
                const float *lse = x.lse + ((int64_t)l * x.heads + at.share) * x.rows + at.first;
                log_sum[0] = at.here[0] ? lse[0] : 1e30f;
                log_sum[1] = at.here[1] ? lse[8] : 1e30f;
            }
            if (threadIdx.x == 0 && l > 0) { /* the first layer's: all at once, soon enough, and nobody waits for this thread */
                announce<0>(x.d64.flags + (int64_t)l * groups + group, 1);
            }
            publish();
            if (threadIdx.x == 0) {
                store_panels(kept(), kept_attention(P) + 5, memory, K, 1);
            }
            if (asks && (l > 0 || more)) {
                fetch_feed_forward(l > 0 ? l - 1 : x.layers - 1);
            }
            if (asks && l > 0) {
                fetch_normalised(group, l - 1);
            }
            put_norm_sums(norms_to(l) + 2 * D, column_sums);
            if (l == 0 && x.embed.partial) {
                stage_embed_panel(memory + M * PANEL, x, (int64_t)group * UNITS);
            }
            if (l > 0) {
                take_operand(after, left_at(x, group, l - 1, LEFT_2));
            }
            ps_mbarrier_wait(came + 8, parity);
            parity ^= 1;

            /* A = softmax(q k' / sqrt(e)), merged = A v */
            attention_gradient(K, H, q4, k4, v4, log_sum, table, x, at);
            if (threadIdx.x == 0) {
                ps_bulk_wait_read(); /* M, G, E and K will be written */
            }
            publish();
            if (threadIdx.x == 0) {
                store_panels(kept(), kept_attention(P), memory, H, 2);
                store_panels(kept(), kept_attention(P) + 3, memory, H + 2, 1);
            }
            products_begin(at, dx);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                product<T, false, false>(dx, at.of(H + i), at.of(W_QKV + i) + at.rows(), i > 0);
            }
            ps_wgmma_commit();
            products_wait<0>(dx);
            take_operand(xhat, &x4);
            norm_sums(norms + UNITS * 2 * D, dx, xhat, at);
            rstd[0] = own_rstd[0];
            rstd[1] = own_rstd[8];
            normalise_backward(g, dx, own_vectors + LN1_GAMMA, xhat, rstd, statistics_at(statistics, 1, at), at);
        }
        if (threadIdx.x == 0) {
            announce<0>(x.d64.flags + group, 2);
        }
        if (x.embed.partial) {
            uint32_t a[4];
            embed_operand(a, g, x, DROP, at);
            ps_stmatrix4_at(at.own() + G * PANEL, a);
            ps_copy_wait(); /* the patches */
            publish();
            embed_gradient_panels(x, at, at.of(M), at.of(G) + at.columns(), group == (int)blockIdx.x);
            if (more) { /* M is the copy engine's again */
                publish();
            }
        } else {
            __syncthreads();
            scale_rows(g, gradient_range<T, S>(x.d64.counters + PEAK, true));
            store_rows((S *)x.du, g, at);
        }
        put_norm_sums(x.d64.norms + (int64_t)group * x.layers * (4 * D), column_sums + UNITS * 2 * D);
    }
}

} // namespace ps_resident

#endif
