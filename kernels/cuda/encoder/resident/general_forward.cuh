/* The forward of encoder/resident/resident.cuh. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_GENERAL_FORWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_GENERAL_FORWARD_CUH

#include "kernels/cuda/encoder/embed.cuh"

namespace ps_resident
{

/* c [d columns] = W_2 of the warp's share of the hidden columns. */
template <bool DROP, class T, int D, int NT>
static __device__ __forceinline__ void feed_forward(float (&c)[D / 8][4], const ps_pair<T> (&a)[D / 16][4], const encoder<T> &x,
                                                    const layer_weights<T, D> &w, uint64_t step, int site, uint32_t *keep,
                                                    const place<T, D, NT> &at)
{
    const int share_f = x.f / sharing(D);
    clear(c);
#pragma unroll 1
    for (int column = at.share * share_f; column < (at.share + 1) * share_f; column += 16) {
        ps_pair<T> hidden[4];
        uint32_t bits = 0;
        float y[2][4];
        if constexpr (DROP) {
            bits = new_masks(x, step, site, x.f, column, keep ? keep + column / 2 : NULL, at);
        }
        set_bias(y, w.b_1 + column, at.q);
        multiply(y, a, w.w_1 + column, x.f + 8, at);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            y[i / 4][i % 4] = ps_gelu_twice(y[i / 4][i % 4]);
        }
        pack_operand<T>(hidden, y[0], y[1]);
        if constexpr (DROP) {
            drop_operand(hidden, bits);
        }
        multiply_columns(c, hidden, w.w_2 + column * w.LD, w.LD, at);
    }
}

/* own = the warp's 16 columns of the sum of c over the warps that share a tile, in a fixed order; partial is the unit's. */
template <class T, int D, int NT>
static __device__ __forceinline__ void add_shares(float (&own)[2][4], const float (&c)[D / 8][4], float4 *partial,
                                                  const place<T, D, NT> &at)
{
    constexpr int W = sharing(D);
    if constexpr (W == 1) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            own[i / 4][i % 4] = c[i / 4][i % 4];
        }
    } else {
        float4 *const tile = partial + at.tile * (W * W * 64) + at.lane; /* [to][from][2][32] */
#pragma unroll
        for (int t = 0; t < D / 8; t++) {
            tile[((t / 2 * W + at.share) * 2 + t % 2) * 32] = make_float4(c[t][0], c[t][1], c[t][2], c[t][3]);
        }
        at.sync();
        clear(own);
#pragma unroll
        for (int w = 0; w < W; w++) {
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const float4 v = tile[((at.share * W + w) * 2 + t) * 32];
                own[t][0] += v.x;
                own[t][1] += v.y;
                own[t][2] += v.z;
                own[t][3] += v.w;
            }
        }
    }
}

template <class T, int D, int NT, bool E8>
static __global__ void __launch_bounds__(most_threads(D)) forward_kernel(const __grid_constant__ encoder<T> x)
{
    ps_grid_begin();
    constexpr int LD = D + 8, LD_QKV = layer_weights<T, D>::LD_QKV, W = sharing(D);
    extern __shared__ uint4 shared_memory[];
    float4 *const table = (float4 *)shared_memory;
    char *const weights = (char *)shared_memory + TABLE_BYTES;
    const bool drop = x.threshold != 0;
    const int bytes = layer_bytes<T>(D, x.f);
    place<T, D, NT> at;
    T *const A = (T *)(weights + (x.general.resident ? x.layers : 1) * bytes + at.unit * unit_bytes<T>(D, NT, false, x.f));
    T *const qkv = A + (W > 1 ? NT * 16 * LD : 0);
    char *const statistics = (char *)(qkv + NT * 16 * LD_QKV);
    float4 *const partial = (float4 *)(statistics + statistics_bytes(D, NT));
    const uint64_t step = drop ? x.state->step : 0;
    const int heads = 16 / x.e;
    fill_table(table, x.n, at);
    if (x.general.resident) {
        for (int l = 0; l < x.layers; l++) {
            stage_layer(x, l, layer_weights<T, D>(weights + l * bytes, x.f));
        }
    }
    for (int64_t group = blockIdx.x; group * x.block_units < x.units; group += gridDim.x) {
        at.take(x, group * x.block_units + at.unit);
        float u[2][4];
        if (x.embed.weight) {
            ps_pair<T> rows[4];
            if (group != blockIdx.x) {
                at.sync(); /* the units before have done with qkv */
            }
            if (drop) {
                embed_unit<true>(rows, (float *)qkv, x, group * x.block_units + at.unit, step, at);
            } else {
                embed_unit<false>(rows, (float *)qkv, x, group * x.block_units + at.unit, step, at);
            }
            if (NT * W == 1) {
                at.sync(); /* others wait for one another before qkv is written */
            }
            unpack_operand<T>(u, rows);
        } else {
            load_rows(u, (const T *)x.u, at);
        }
        for (int l = 0; l < x.layers; l++) {
            const layer_weights<T, D> w(weights + (x.general.resident ? l : 0) * bytes, x.f);
            uint32_t *const keep = (drop && x.masks) && at.global_tile < x.units * NT ? masks_at(x, x.f, l, at) : NULL;
            if (!x.general.resident) {
                __syncthreads();
                stage_layer(x, l, w);
            }
            if (!x.general.resident || (group == blockIdx.x && l == 0)) {
                ps_copy_wait();
                __syncthreads();
            }
            ps_pair<T> all[D / 16][4], a[4];
            float rstd[2], xhat[2][4], own[2][4], c[D / 8][4];
            normalise(xhat, rstd, u, x.epsilon, statistics_at(statistics, 0, at), at);
            scale_shift<T>(a, xhat, w.ln1_gamma + at.share * 16, w.ln1_beta + at.share * 16, at.q);
            if (NT > 1 && W == 1) {
                at.sync(); /* the layer before has read k and v; otherwise normalise has waited */
            }
            gather(all, a, A, at);
            project(qkv, all, w, at);
            at.sync();

            /* merged = softmax(q k' / sqrt(e)) v, in the place of q */
            const T *const keys = qkv + D + at.share * 16, *const values = keys + D;
            T *const mine = qkv + at.row * LD_QKV + at.share * 16;
            ps_pair<T> queries[4];
            ps_ldmatrix4(queries, lane_a(mine, LD_QKV, at));
            __syncwarp();
#pragma unroll 1
            for (int i = 0; i < heads; i++) {
                const struct head h = head_at(i, x.e, at.q);
                float s[2 * NT][4], o[E8 ? 1 : 2][4], most[2], sum[1][4];
                head_operand<E8>(a, queries, h);
                masked_scores<E8>(s, a, h, keys, LD_QKV, table, at);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    most[r] = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
                    for (int t = 1; t < 2 * NT; t++) {
                        most[r] = fmaxf(most[r], fmaxf(s[t][2 * r], s[t][2 * r + 1]));
                    }
                    most[r] = ps_quad_max(most[r]) * x.scale_log2e;
                }
                clear(o);
                clear(sum);
#pragma unroll
                for (int j = 0; j < NT; j++) {
#pragma unroll
                    for (int k = 0; k < 8; k++) {
                        float &v = s[2 * j + k / 4][k % 4];
                        v = ps_exp2(fmaf(v, x.scale_log2e, -most[k % 4 / 2]));
                    }
                    pack_operand<T>(a, s[2 * j], s[2 * j + 1]);
                    mix<E8>(o, a, h, values + j * 16 * LD_QKV, LD_QKV, at);
                    add_ones<T>(sum[0], a);
                }
                put_head<E8>(mine, LD_QKV, o, __fdividef(1.0f, sum[0][0]), __fdividef(1.0f, sum[0][2]), h, at);
                keep_log_sums(x, l, at.share * heads + i, most, sum[0][0], sum[0][2], at);
            }

            /* u = r = u + drop(merged W_o + b_o) */
            if (W > 1) {
                at.sync();
            } else {
                __syncwarp();
            }
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                ps_ldmatrix4(all[k], lane_a(qkv + at.row * LD_QKV, LD_QKV, at) + k * 16);
            }
            set_bias(own, w.b_o + at.share * 16, at.q);
            multiply(own, all, w.w_o + at.share * 16, LD, at);
            uint32_t bits = 0xffffffffu;
            if (drop) {
                bits = new_masks(x, step, 3 * l, D, at.share * 16, keep ? keep + at.share * 8 : NULL, at);
            }
            add_kept(u, own, bits, x.drop_scale);
            if (x.general.r) {
                store_rows(x.general.r + l * x.rows * D, u, at);
            }

            /* u = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2) */
            normalise(xhat, rstd, u, x.epsilon, statistics_at(statistics, 1, at), at);
            scale_shift<T>(a, xhat, w.ln2_gamma + at.share * 16, w.ln2_beta + at.share * 16, at.q);
            gather(all, a, A, at);
            if (drop) {
                feed_forward<true>(c, all, x, w, step, 3 * l + 1, keep ? keep + D / 2 : NULL, at);
            } else {
                feed_forward<false>(c, all, x, w, step, 0, NULL, at);
            }
            add_shares(own, c, partial, at);
            set_bias(xhat, w.b_2 + at.share * 16, at.q);
            scale_add_rows(own, x.half_scale, xhat);
            if (drop) {
                const int chunk = D / 16 + x.f / 16 + at.share;
                bits = new_masks(x, step, 3 * l + 2, D, at.share * 16, keep ? keep + chunk * 8 : NULL, at);
            }
            add_kept(u, own, bits, x.drop_scale);
            store_rows((T *)x.u + (l + 1) * x.rows * D, u, at);
        }
    }
}

} // namespace ps_resident

#endif
