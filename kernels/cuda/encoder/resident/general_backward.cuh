/* The backward of encoder/resident/resident.cuh. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_GENERAL_BACKWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_GENERAL_BACKWARD_CUH

#include "kernels/cuda/encoder/embed.cuh"

namespace ps_resident
{

/* Rows of one operand as the block staged them. */
template <class T> struct operand {
    const T *p;
    int ld, unit; /* elements from row to row, from unit to unit */
};

/* A job is 16 rows by COLUMNS of a weight's gradient. */
template <int D> static __host__ __device__ constexpr int job_columns()
{
    return D == 16 ? 8 : D;
}

/* out[16, COLUMNS of d] (and bias[16]) = or += a' b over the block's rows; a [rows, 16], b [rows, COLUMNS]. */
template <class T, int D, int NT>
static __device__ __forceinline__ void weight_gradient(float *out, float *bias, bool first, const operand<T> &a,
                                                       const operand<T> &b, int units, const place<T, D, NT> &at)
{
    constexpr int COLUMNS = job_columns<D>();
    float c[COLUMNS / 8][4], ones[1][4];
    clear(c);
    clear(ones);
    const T *pa = lane_a_transposed(a.p, a.ld, at), *pb = lane_b<4>(b.p, b.ld, at);
#pragma unroll(D == 16 ? 2 : 1)
    for (int unit = 0; unit < units; unit++) {
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
            ps_pair<T> ra[4];
            ps_ldmatrix4_transposed(ra, pa + unit * a.unit + tile * 16 * a.ld);
            if constexpr (COLUMNS == 8) {
                ps_pair<T> rb[2];
                load_b(rb, pb + unit * b.unit + tile * 16 * b.ld);
                ps_mma16<T>(c[0], ra, rb[0], rb[1], c[0]);
            } else {
#pragma unroll
                for (int n = 0; n < COLUMNS / 16; n++) {
                    ps_pair<T> rb[4];
                    load_b(rb, pb + unit * b.unit + tile * 16 * b.ld + n * 16);
                    ps_mma16<T>(c[2 * n], ra, rb[0], rb[1], c[2 * n]);
                    ps_mma16<T>(c[2 * n + 1], ra, rb[2], rb[3], c[2 * n + 1]);
                }
            }
            add_ones<T>(ones[0], ra);
        }
    }
    put_tiles<D>(out + at.g * D + at.q * 2, c, first);
    if (bias && at.q == 0) {
        put_ones(bias, ones[0], first, at);
    }
}

/* bias[16] = or += the column sums of a. */
template <class T, int D, int NT>
static __device__ __forceinline__ void bias_gradient(float *bias, bool first, const operand<T> &a, int units,
                                                     const place<T, D, NT> &at)
{
    float ones[1][4];
    clear(ones);
    const T *p = lane_a_transposed(a.p, a.ld, at);
    for (int unit = 0; unit < units; unit++) {
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
            ps_pair<T> ra[4];
            ps_ldmatrix4_transposed(ra, p + unit * a.unit + tile * 16 * a.ld);
            add_ones<T>(ones[0], ra);
        }
    }
    if (at.q == 0) {
        put_ones(bias, ones[0], first, at);
    }
}

/* The operand scale * g, zero where dropped, of the gradient that enters a branch; also to the warp's place in G. */
template <class T, int D, int NT>
static __device__ __forceinline__ void branch_gradient(ps_pair<T> (&all)[D / 16][4], T *G, const float (&g)[2][4], float scale,
                                                       const uint32_t *masks, const place<T, D, NT> &at)
{
    ps_pair<T> a[4];
    scale_operand<T>(a, g, scale);
    if (masks) {
        drop_operand(a, *masks >> at.q);
    }
    if (D == 16) {
        ps_store_operand(G + at.row * (D + 8), 2 * (D + 8), a);
    }
    gather(all, a, G, at);
}

/* Recomputes the warp's hidden columns begin .. begin + count of its share and stages x (1 + tanh) and the gradient before gelu;
 * dx += that gradient W_1' when d is 16. */
template <bool DROP, class T, int D, int NT>
static __device__ __forceinline__ void feed_forward_backward(float (&dx)[2][4], const ps_pair<T> (&a)[D / 16][4],
                                                             const ps_pair<T> (&dm)[D / 16][4], T *staged, int begin, int count,
                                                             const encoder<T> &x, const layer_weights<T, D> &w,
                                                             const uint32_t *masks, const place<T, D, NT> &at)
{
    const int ld_staged = 2 * x.general.staged + 8, from = at.share * (x.f / sharing(D)) + begin;
    T *to = staged + at.share * count;
    uint32_t next = DROP ? masks[from / 2] : 0;
#pragma unroll 1
    for (int column = from; column < from + count; column += 16, to += 16) {
        const uint32_t bits = next >> at.q;
        ps_pair<T> hidden[4], d_hidden[4];
        if (DROP && column + 16 < from + count) {
            next = masks[column / 2 + 8];
        }
        hidden_backward(hidden, d_hidden, a, dm, column, x.f, w, at);
        if constexpr (DROP) {
            drop_operand(hidden, bits);
            drop_operand(d_hidden, bits);
        }
        ps_store_operand(to, 2 * ld_staged, hidden);
        ps_store_operand(to + x.general.staged, 2 * ld_staged, d_hidden);
        if constexpr (D == 16) {
            ps_pair<T> b[4];
            load_b_transposed(b, lane_b_transposed<4>(w.w_1 + column, x.f + 8, at));
            ps_mma16<T>(dx[0], d_hidden, b[0], b[1], dx[0]);
            ps_mma16<T>(dx[1], d_hidden, b[2], b[3], dx[1]);
        }
    }
}

/* The gradients of q, k and v in their places; merged to M, whose gradient is in X. */
template <bool E8, class T, int D, int NT>
static __device__ __forceinline__ void attention_backward(T *qkv, const T *X, T *M, T *scratch, const float4 *table, int l,
                                                          int heads, const encoder<T> &x, const place<T, D, NT> &at)
{
    constexpr int LD = D + 8, LD_QKV = layer_weights<T, D>::LD_QKV, LD_P = NT * 16 + 8;
    ps_pair<T> a[4];
    T *const mine = qkv + at.row * LD_QKV + at.share * 16;
    const T *const queries = qkv + at.share * 16, *const keys = queries + D;
    const T *const values = keys + D, *const d_merged = X + at.share * 16;
    T *const P = scratch + at.share * (2 * NT * 16 * LD_P), *const S = P + NT * 16 * LD_P;
    ps_pair<T> all_queries[4], all_d_merged[4];
    ps_ldmatrix4(all_queries, lane_a(mine, LD_QKV, at));
    ps_ldmatrix4(all_d_merged, lane_a(d_merged + at.tile * 16 * LD, LD, at));
#pragma unroll 1
    for (int i = 0; i < heads; i++) {
        constexpr int HT = E8 ? 1 : 2;
        const struct head h = head_at(i, x.e, at.q);
        float p[2 * NT][4], dp[2 * NT][4], dq[HT][4], delta[4];
        const float *lse = x.lse + ((int64_t)l * x.heads + at.share * heads + i) * x.rows + at.first;
        const float log_sum[2] = {at.here[0] ? lse[0] : 0.0f, at.here[1] ? lse[8] : 0.0f};
        head_operand<E8>(a, all_queries, h);
        masked_scores<E8>(p, a, h, keys, LD_QKV, table, at);
        {
            float o[HT][4];
            clear(o);
#pragma unroll
            for (int j = 0; j < NT; j++) {
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    float &s = p[2 * j + k / 4][k % 4];
                    s = ps_exp2(fmaf(s, x.scale_log2e, -log_sum[k % 4 / 2]));
                }
                pack_operand<T>(a, p[2 * j], p[2 * j + 1]);
                ps_store_operand(P + at.tile * 16 * LD_P + j * 16, 2 * LD_P, a);
                mix<E8>(o, a, h, values + j * 16 * LD_QKV, LD_QKV, at);
            }
            put_head<E8>(M + at.row * LD + at.share * 16, LD, o, 1.0f, 1.0f, h, at);
            /* sum_j A dA = sum over the head's columns of merged and its gradient */
            head_operand<E8>(a, all_d_merged, h);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float sum = 0;
#pragma unroll
                for (int t = 0; t < HT; t++) {
                    sum -= o[t][2 * r] * ps_low<T>(a[2 * t + r]);
                    sum -= o[t][2 * r + 1] * ps_high<T>(a[2 * t + r]);
                }
                delta[2 * r] = delta[2 * r + 1] = ps_quad_sum(sum);
            }
        }
        scores<E8>(dp, a, h, values, LD_QKV, delta, delta, delta, at);
        clear(dq);
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int k = 0; k < 8; k++) {
                dp[2 * j + k / 4][k % 4] *= p[2 * j + k / 4][k % 4];
            }
            pack_operand<T>(a, dp[2 * j], dp[2 * j + 1]);
            ps_store_operand(S + at.tile * 16 * LD_P + j * 16, 2 * LD_P, a);
            mix<E8>(dq, a, h, keys + j * 16 * LD_QKV, LD_QKV, at);
        }
        at.sync(); /* the head's k and v are free, A and its gradient are there */
        float dk[HT][4], dv[HT][4];
        clear(dk);
        clear(dv);
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const int from = j * 16 * LD_P + at.tile * 16;
            ps_ldmatrix4_transposed(a, lane_a_transposed(P, LD_P, at) + from);
            mix<E8>(dv, a, h, d_merged + j * 16 * LD, LD, at);
            ps_ldmatrix4_transposed(a, lane_a_transposed(S, LD_P, at) + from);
            mix<E8>(dk, a, h, queries + j * 16 * LD_QKV, LD_QKV, at);
        }
        put_head<E8>(mine + D, LD_QKV, dk, x.scale, x.scale, h, at);
        put_head<E8>(mine + 2 * D, LD_QKV, dv, 1.0f, 1.0f, h, at);
        at.sync();
        put_head<E8>(mine, LD_QKV, dq, x.scale, x.scale, h, at);
    }
}

template <class T, int D, int NT, bool E8>
static __global__ void __launch_bounds__(most_threads(D)) backward_kernel(const __grid_constant__ encoder<T> x)
{
    ps_grid_begin();
    constexpr int LD = D + 8, LD_QKV = layer_weights<T, D>::LD_QKV, W = sharing(D);
    constexpr int COLUMNS = job_columns<D>(), PARTS = D / COLUMNS;
    extern __shared__ uint4 shared_memory[];
    float4 *const table = (float4 *)shared_memory;
    char *const weights = (char *)shared_memory + TABLE_BYTES;
    const bool drop = x.threshold != 0;
    const int bytes = layer_bytes<T>(D, x.f), unit_stride = unit_bytes<T>(D, NT, true, x.general.staged) / REAL_BYTES<T>;
    place<T, D, NT> at;
    T *const units = (T *)(weights + (x.general.resident ? x.layers : 1) * bytes);
    /* X: xhat of LN2, then the gradient of merged, then xhat of LN1. G: the gradient entering W_2, then W_o. M: LN2's output, LN1's
     * output, merged. */
    constexpr int TO_G = NT * 16 * LD, TO_M = 2 * TO_G, TO_QKV = 3 * TO_G, TO_STATISTICS = TO_QKV + NT * 16 * LD_QKV;
    constexpr int TO_SCRATCH = TO_STATISTICS + statistics_bytes(D, NT) / REAL_BYTES<T>;
    T *const X = units + at.unit * unit_stride, *const G = X + TO_G, *const M = X + TO_M, *const qkv = X + TO_QKV;
    char *const statistics = (char *)(X + TO_STATISTICS);
    T *const scratch = X + TO_SCRATCH;
    const int share_f = x.f / W, share_staged = x.general.staged / W, heads = 16 / x.e, warps = (int)blockDim.x / 32;
    const int warp = (int)threadIdx.x / 32, ld_staged = 2 * x.general.staged + 8;
    fill_table(table, x.n, at);
    if (x.general.resident) {
        for (int l = 0; l < x.layers; l++) {
            stage_layer(x, l, layer_weights<T, D>(weights + l * bytes, x.f));
        }
    }
    for (int64_t group = blockIdx.x; group * x.block_units < x.units; group += gridDim.x) {
        const bool first = group == blockIdx.x;
        at.take(x, group * x.block_units + at.unit);
        float g[2][4];
        load_rows(g, (const T *)x.dy, at);
        for (int l = x.layers - 1; l >= 0; l--) {
            const layer_weights<T, D> w(weights + (x.general.resident ? l : 0) * bytes, x.f);
            float *const sums = x.sums.partial + ((int64_t)blockIdx.x * x.layers + l) * layer_sums(D, x.f);
            float *const bias_sums = sums + (4 * D + 2 * x.f) * D;
            /* Units beyond the last read some masks: their gradients are zero. */
            const uint32_t *const masks = !drop ? NULL : at.global_tile < x.units * NT ? masks_at(x, x.f, l, at) : x.masks + at.g;
            ps_pair<T> all[D / 16][4], xhat[4], a[4];
            float rstd[2], dx[2][4], v[2][4];

            /* y = r + drop(hidden W_2 + b_2) */
            __syncthreads(); /* the layer before has done with all buffers */
            if (!x.general.resident) {
                stage_layer(x, l, w);
            }
            load_rows(dx, x.general.r + l * x.rows * D, at);
            if (!x.general.resident || (first && l == x.layers - 1)) {
                ps_copy_wait();
                __syncthreads();
            }
            normalise(v, rstd, dx, x.epsilon, statistics_at(statistics, 0, at), at);
            pack_operand<T>(xhat, v[0], v[1]);
            ps_store_operand(X + at.row * LD + at.share * 16, 2 * LD, xhat);
            scale_shift<T>(a, v, w.ln2_gamma + at.share * 16, w.ln2_beta + at.share * 16, at.q);
            gather(all, a, M, at);
            clear(dx);
            {
                ps_pair<T> dm[D / 16][4];
                branch_gradient(dm, G, g, x.drop_scale * x.half_scale, drop ? masks + (D / 16 + x.f / 16 + at.share) * 8 : NULL,
                                at);
                T *const staged = scratch + at.tile * 16 * ld_staged;
#pragma unroll 1
                for (int begin = 0; begin < share_f; begin += share_staged) {
                    if (begin > 0) {
                        __syncthreads();
                    }
                    if (drop) {
                        feed_forward_backward<true>(dx, all, dm, staged, begin, share_staged, x, w, masks + D / 2, at);
                    } else {
                        feed_forward_backward<false>(dx, all, dm, staged, begin, share_staged, x, w, NULL, at);
                    }
                    __syncthreads();
                    if constexpr (W > 1) {
                        for (int i = 0; i < W; i++) {
                            multiply_shared(dx, staged + x.general.staged + i * share_staged, ld_staged,
                                            w.w_1 + at.share * 16 * (x.f + 8) + i * share_f + begin, x.f + 8, share_staged, at);
                        }
                    }
                    const int tiles = x.general.staged / 16;
                    const int jobs = 2 * tiles * PARTS;
                    for (int job = warp; job < jobs + (begin == 0 ? D / 16 : 0); job += warps) {
                        if (job < jobs) {
                            const int part = job % PARTS, block = job / PARTS;
                            const bool second = block >= tiles; /* W_2 */
                            const int from = (second ? block - tiles : block) * 16, share = from / share_staged;
                            const int column = share * share_f + begin + from - share * share_staged;
                            const int row = second ? 4 * D + x.f + column : 4 * D + column;
                            weight_gradient(
                                sums + row * D + part * COLUMNS, second || part > 0 ? NULL : bias_sums + row, first,
                                {units + TO_SCRATCH + (second ? from : x.general.staged + from), ld_staged, unit_stride},
                                {units + (second ? TO_G : 0) + part * COLUMNS, LD, unit_stride}, x.block_units, at);
                        } else {
                            const int column = (job - jobs) * 16;
                            bias_gradient(bias_sums + 4 * D + x.f + column, first, {units + TO_G + column, LD, unit_stride},
                                          x.block_units, at);
                        }
                    }
                }
            }
            normalise_backward(g, dx, w.ln2_gamma + at.share * 16, xhat, rstd, statistics_at(statistics, 1, at), at);
            __syncthreads();

            /* r = u + drop(merged W_o + b_o) */
            branch_gradient(all, G, g, x.drop_scale, drop ? masks + at.share * 8 : NULL, at);
            clear(dx);
            multiply_transposed(dx, all, w.w_o + at.share * 16 * LD, LD, at);
            pack_operand<T>(a, dx[0], dx[1]);
            ps_store_operand(X + at.row * LD + at.share * 16, 2 * LD, a);

            load_rows(dx, (const T *)x.u + l * x.rows * D, at);
            normalise(v, rstd, dx, x.epsilon, statistics_at(statistics, 2, at), at);
            pack_operand<T>(xhat, v[0], v[1]);
            scale_shift<T>(a, v, w.ln1_gamma + at.share * 16, w.ln1_beta + at.share * 16, at.q);
            gather(all, a, M, at);
            project(qkv, all, w, at);
            at.sync();

            /* A = softmax(q k' / sqrt(e)), merged = A v */
            attention_backward<E8>(qkv, X, M, scratch, table, l, heads, x, at);
            ps_store_operand(X + at.row * LD + at.share * 16, 2 * LD, xhat);
            const bool embed = l == 0 && x.embed.partial;
            if (embed) {
                stage_patches(scratch, x, group * x.block_units + at.unit, at);
            }
            if (W > 1) {
                at.sync();
            } else {
                __syncwarp();
            }
            clear(dx);
            multiply_shared(dx, qkv + at.row * LD_QKV, LD_QKV, w.w_qkv + at.share * 16 * LD_QKV, LD_QKV, 3 * D, at);
            normalise_backward(g, dx, w.ln1_gamma + at.share * 16, xhat, rstd, statistics_at(statistics, 3, at), at);
            if (embed) {
                const int pitch = embed_pitch(D, x.embed.patch);
                embed_operand(a, g, x, drop, at);
                ps_store_operand(scratch + at.row * pitch + at.share * 16, 2 * pitch, a);
                ps_copy_wait();
            }
            __syncthreads();
            constexpr int JOBS = 4 * D / 16 * PARTS;
            for (int job = warp; job < JOBS + (embed ? embed_jobs<D>(x) : 0); job += warps) {
                if (job >= JOBS) {
                    embed_gradient(x, job - JOBS, units + TO_SCRATCH, unit_stride, first, at);
                    continue;
                }
                const int part = job % PARTS, row = job / PARTS * 16;
                const bool of_o = row >= 3 * D;
                weight_gradient(sums + row * D + part * COLUMNS, part > 0 ? NULL : bias_sums + row, first,
                                {units + (of_o ? TO_G + row - 3 * D : TO_QKV + row), of_o ? LD : LD_QKV, unit_stride},
                                {units + (of_o ? TO_M : 0) + part * COLUMNS, LD, unit_stride}, x.block_units, at);
            }
        }
        if (!x.embed.partial) {
            store_rows((T *)x.du, g, at);
        }
    }
}

} // namespace ps_resident

#endif
