/* The whole encoder of a small model, forward and backward, each in one kernel. Equations: docs/design.md section 3.
 *
 * A warp owns 16 rows by 16 columns of the residual stream, in registers (fp32), with the heads in those columns of q, k and v and
 * d / 16th of d_ff. The d / 16 warps that share a tile of 16 rows give each other operands and partial sums through shared memory;
 * at d 16 a warp owns its tile alone. A unit is one sequence in ceil(N / 16) tiles, or, when N <= 16, floor(16 / N) sequences in
 * one tile, which must not see each other. A block works on a few units at once; its weights lie in shared memory: of every layer
 * where they fit, else of the layer at hand.
 *
 * Forward keeps what is dear to compute again and small: the residual r after attention (real), the logarithm of softmax's sums
 * and the masks' bits. Backward recomputes the rest from each layer's u and r. Weight gradients: all rows of the block stage their
 * operands in shared memory (real); then each warp owns tiles of the gradient and adds over the block's rows with mma; biases are
 * one more product with a column of ones. A block's sums go to memory, and another kernel adds the blocks in order. What follows a
 * LayerNorm stages xhat and not gamma xhat + beta: with X = xhat' dout, dW = diag(gamma) X + beta db', dgamma_j = sum_k W_jk X_jk
 * and dbeta = W db, so no sum over rows is needed for gamma and beta.
 *
 * gelu(x) = x (1 + tanh) / 2 is computed as x (1 + tanh); the half, and dropout's scale, are put on W_2's output, or on the
 * gradient that enters it.
 *
 * Counts, etth1 (d 16, f 128, N 42 in 48 rows, 3 layers, S 896; 128 blocks of 21 warps): a tile of 16 rows and a layer take 10
 * Philox blocks (of 8 elements), 96 exponentials and 64 tanh a lane, 88 products m16n8k16 forward; backward the same exponentials
 * and tanh, no Philox, 330 products. Forward writes 3.6 MB of u, 3.6 MB of r, 1.8 MB of sums, 2.6 MB of bits; partial gradients
 * 7.9 MB. In tf32 u and r are 7.2 MB each, and so is merged, which its backward reads.
 *
 * d_ff, the head's size and what is staged are told at run time. encoder/resident/d64_short.cu serves d_model 64 with heads of 16
 * columns and N <= 16, encoder/resident/d16_e4_f128.cu d_model 16 with heads of 4 columns and N from 33 to 48. */
#ifdef PS_COMPILE_TF32
#include "kernels/cuda/encoder/resident/backward_tf32.cuh"
#else
#include "kernels/cuda/encoder/embed.cuh"
#endif

namespace PS_REAL16_SPACE
{

/* ---- forward ---- */

/* c [d columns] = W_2 of the warp's share of the hidden columns. */
template <int D, int NT, bool DROP>
static __device__ __forceinline__ void feed_forward(float (&c)[D / 8][4], const ps_pair (&a)[D / 16][4], const struct small &x,
                                                    const struct sizes &z, const layer_weights<D> &w, uint64_t step, int site,
                                                    uint32_t *keep, const place<D, NT> &at)
{
    const int share_f = z.f / sharing(D);
    clear(c);
#pragma unroll 1
    for (int column = at.share * share_f; column < (at.share + 1) * share_f; column += 16) {
        ps_pair hidden[4];
        uint32_t bits = 0;
        float y[2][4];
        if constexpr (DROP) {
            bits = new_masks<D, NT>(x, step, site, z.f, column, keep ? keep + column / 2 : NULL, at);
        }
        set_bias(y, w.b_1 + column, at.q);
        multiply<D, NT>(y, a, w.w_1 + column, z.f + 8, at);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float &v = y[i / 4][i % 4];
            v = fmaf(v, ps_tanh(v * fmaf(v * v, GELU_B, GELU_A)), v);
        }
        pack_operand(hidden, y[0], y[1]);
        if constexpr (DROP) {
            drop_operand(hidden, bits);
        }
        multiply_wide<D, NT>(c, hidden, w.w_2 + column * w.LD, w.LD, at);
    }
}

/* own = the warp's 16 columns of the sum of c over the warps that share a tile, in a fixed order; partial is the unit's. */
template <int D, int NT>
static __device__ __forceinline__ void add_shares(float (&own)[2][4], const float (&c)[D / 8][4], float4 *partial,
                                                  const place<D, NT> &at)
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

template <int D, int NT, bool NARROW>
static __global__ void __launch_bounds__(most_threads(D)) forward_kernel(const __grid_constant__ struct small x)
{
    ps_grid_begin();
    constexpr int LD = D + 8, LD_QKV = layer_weights<D>::LD_QKV, W = sharing(D);
    extern __shared__ uint4 shared_memory[];
    float4 *const table = (float4 *)shared_memory;
    char *const weights = (char *)shared_memory + TABLE_BYTES;
    const struct sizes z = sizes_of(x);
    const int bytes = layer_bytes(D, z.f);
    place<D, NT> at;
    ps_real *const A = (ps_real *)(weights + (x.resident ? x.layers : 1) * bytes + at.unit * unit_bytes(D, NT, false, z.f));
    ps_real *const qkv = A + (W > 1 ? NT * 16 * LD : 0);
    char *const statistics = (char *)(qkv + NT * 16 * LD_QKV);
    float4 *const partial = (float4 *)(statistics + statistics_bytes(D, NT));
    const uint64_t step = z.drop ? x.state->step : 0;
    const int heads = 16 / z.e;
    fill_table<D, NT>(table, x.n, at);
    if (x.resident) {
        for (int l = 0; l < x.layers; l++) {
            stage_layer(x, z, l, layer_weights<D>(weights + l * bytes, z.f));
        }
    }
    for (int64_t group = blockIdx.x; group * x.block_units < x.units; group += gridDim.x) {
        at.take(x, group * x.block_units + at.unit);
        float u[2][4];
        if (x.embed.weight) {
            ps_pair rows[4];
            if (group != blockIdx.x) {
                at.sync(); /* the units before have done with qkv */
            }
            if (z.drop) {
                embed_unit<D, NT, true>(rows, (float *)qkv, x, group * x.block_units + at.unit, step, at);
            } else {
                embed_unit<D, NT, false>(rows, (float *)qkv, x, group * x.block_units + at.unit, step, at);
            }
            if (NT * W == 1) {
                at.sync(); /* others wait for one another before qkv is written */
            }
            unpack_operand(u, rows);
        } else {
            load_rows<D, NT>(u, x.u, at);
        }
        for (int l = 0; l < x.layers; l++) {
            const layer_weights<D> w(weights + (x.resident ? l : 0) * bytes, z.f);
            uint32_t *const keep = (z.drop && x.masks) && at.global_tile < x.units * NT ? masks_at<D, NT>(x, z, l, at) : NULL;
            if (!x.resident) {
                __syncthreads();
                stage_layer(x, z, l, w);
            }
            if (!x.resident || (group == blockIdx.x && l == 0)) {
                ps_copy_wait();
                for (int i = 0; i < (x.resident ? x.layers : 1); i++) {
                    round_layer(z, layer_weights<D>(weights + i * bytes, z.f));
                }
                __syncthreads();
            }
            ps_pair all[D / 16][4], a[4];
            float rstd[2], xhat[2][4], own[2][4], c[D / 8][4];
            normalise<D, NT>(xhat, rstd, u, x.epsilon, statistics_at<D, NT>(statistics, 0, at), at);
            scale_shift(a, xhat, w.ln1_gamma + at.share * 16, w.ln1_beta + at.share * 16, at.q);
            if (NT > 1 && W == 1) {
                at.sync(); /* the layer before has read k and v; otherwise normalise has waited */
            }
            gather<D, NT>(all, a, A, at);
            project<D, NT>(qkv, all, w, at);
            at.sync();

            /* merged = softmax(q k' / sqrt(e)) v, in the place of q */
            const ps_real *const keys = qkv + D + at.share * 16, *const values = keys + D;
            ps_real *const mine = qkv + at.row * LD_QKV + at.share * 16;
            ps_pair queries[4];
            load_a(queries, lane_a(mine, LD_QKV, at), LD_QKV, at);
            __syncwarp();
#pragma unroll 1
            for (int i = 0; i < heads; i++) {
                const struct head h = head_at(i, z.e, at.q);
                float s[2 * NT][4], o[NARROW ? 1 : 2][4], most[2], sum[1][4];
                head_operand<NARROW>(a, queries, h);
                masked_scores<D, NT, NARROW>(s, a, h, keys, LD_QKV, table, at);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    most[r] = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
                    for (int t = 1; t < 2 * NT; t++) {
                        most[r] = fmaxf(most[r], fmaxf(s[t][2 * r], s[t][2 * r + 1]));
                    }
                    most[r] = quad_max(most[r]) * x.scale_log2e;
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
                    pack_operand(a, s[2 * j], s[2 * j + 1]);
                    mix<D, NT, NARROW>(o, a, h, values + j * 16 * LD_QKV, LD_QKV, at);
                    add_ones(sum[0], a);
                }
                put_head<D, NT, NARROW>(mine, LD_QKV, o, __fdividef(1.0f, sum[0][0]), __fdividef(1.0f, sum[0][2]), h, at);
                if (x.lse && at.q == 0) {
                    float *lse = x.lse + ((int64_t)l * x.heads + at.share * heads + i) * x.rows + at.first;
                    if (at.here[0]) {
                        lse[0] = most[0] + ps_log2(sum[0][0]);
                    }
                    if (at.here[1]) {
                        lse[8] = most[1] + ps_log2(sum[0][2]);
                    }
                }
            }

            /* u = r = u + drop(merged W_o + b_o) */
            if (W > 1) {
                at.sync();
            } else {
                __syncwarp();
            }
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                load_a(all[k], lane_a(qkv + at.row * LD_QKV, LD_QKV, at) + k * 16, LD_QKV, at);
            }
#pragma unroll
            for (int k = 0; k < W; k++) {
                if (REAL_BYTES == 4 && x.merged && k == at.share) {
                    unpack_operand(own, all[k]);
                    store_rows<D, NT>(x.merged + l * x.rows * D, own, at);
                }
            }
            set_bias(own, w.b_o + at.share * 16, at.q);
            multiply<D, NT>(own, all, w.w_o + at.share * 16, LD, at);
            uint32_t bits = 0xffffffffu;
            if (z.drop) {
                bits = new_masks<D, NT>(x, step, 3 * l, D, at.share * 16, keep ? keep + at.share * 8 : NULL, at);
            }
            add_kept(u, own, bits, x.drop_scale);
            if (x.r) {
                store_rows<D, NT>(x.r + l * x.rows * D, u, at);
            }

            /* u = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2) */
            normalise<D, NT>(xhat, rstd, u, x.epsilon, statistics_at<D, NT>(statistics, 1, at), at);
            scale_shift(a, xhat, w.ln2_gamma + at.share * 16, w.ln2_beta + at.share * 16, at.q);
            gather<D, NT>(all, a, A, at);
            if (z.drop) {
                feed_forward<D, NT, true>(c, all, x, z, w, step, 3 * l + 1, keep ? keep + D / 2 : NULL, at);
            } else {
                feed_forward<D, NT, false>(c, all, x, z, w, step, 0, NULL, at);
            }
            add_shares<D, NT>(own, c, partial, at);
            set_bias(xhat, w.b_2 + at.share * 16, at.q);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                own[i / 4][i % 4] = fmaf(own[i / 4][i % 4], x.half_scale, xhat[i / 4][i % 4]);
            }
            if (z.drop) {
                const int chunk = D / 16 + z.f / 16 + at.share;
                bits = new_masks<D, NT>(x, step, 3 * l + 2, D, at.share * 16, keep ? keep + chunk * 8 : NULL, at);
            }
            add_kept(u, own, bits, x.drop_scale);
            store_rows<D, NT>(x.u + (l + 1) * x.rows * D, u, at);
        }
    }
}

/* ---- backward; tf32's is encoder/resident/backward_tf32.cuh ---- */

#ifndef PS_COMPILE_TF32
/* Rows of one operand as the block staged them. */
struct operand {
    const ps_real *p;
    int ld, unit; /* elements from row to row, from unit to unit */
};

/* A job is 16 rows by COLUMNS of a weight's gradient. */
template <int D> static __host__ __device__ constexpr int job_columns()
{
    return D == 16 ? 8 : D;
}

/* out[16, COLUMNS of d] (and bias[16]) = or += a' b over the block's rows; a [rows, 16], b [rows, COLUMNS]. */
template <int D, int NT>
static __device__ __forceinline__ void weight_gradient(float *out, float *bias, bool first, const struct operand &a,
                                                       const struct operand &b, int units, const place<D, NT> &at)
{
    constexpr int COLUMNS = job_columns<D>();
    float c[COLUMNS / 8][4], ones[1][4];
    clear(c);
    clear(ones);
    const ps_real *pa = lane_a_transposed(a.p, a.ld, at), *pb = lane_b<4>(b.p, b.ld, at);
#pragma unroll(D == 16 ? 2 : 1)
    for (int unit = 0; unit < units; unit++) {
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
            ps_pair ra[4];
            load_a_transposed(ra, pa + unit * a.unit + tile * 16 * a.ld, a.ld, at);
            if constexpr (COLUMNS == 8) {
                ps_pair rb[2];
                load_b(rb, pb + unit * b.unit + tile * 16 * b.ld, b.ld, at);
                ps_mma16(c[0], ra, rb[0], rb[1], c[0]);
            } else {
#pragma unroll
                for (int n = 0; n < COLUMNS / 16; n++) {
                    ps_pair rb[4];
                    load_b(rb, pb + unit * b.unit + tile * 16 * b.ld + n * 16, b.ld, at);
                    ps_mma16(c[2 * n], ra, rb[0], rb[1], c[2 * n]);
                    ps_mma16(c[2 * n + 1], ra, rb[2], rb[3], c[2 * n + 1]);
                }
            }
            add_ones(ones[0], ra);
        }
    }
#pragma unroll
    for (int t = 0; t < COLUMNS / 8; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 *p = (float2 *)(out + (at.g + 8 * h) * D + t * 8 + at.q * 2), v = make_float2(c[t][2 * h], c[t][2 * h + 1]);
            if (!first) {
                v.x += p->x;
                v.y += p->y;
            }
            *p = v;
        }
    }
    if (bias && at.q == 0) {
        put_ones(bias, ones[0], first, at);
    }
}

/* bias[16] = or += the column sums of a. */
template <int D, int NT>
static __device__ __forceinline__ void bias_gradient(float *bias, bool first, const struct operand &a, int units,
                                                     const place<D, NT> &at)
{
    float ones[1][4];
    clear(ones);
    const ps_real *p = lane_a_transposed(a.p, a.ld, at);
    for (int unit = 0; unit < units; unit++) {
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
            ps_pair ra[4];
            load_a_transposed(ra, p + unit * a.unit + tile * 16 * a.ld, a.ld, at);
            add_ones(ones[0], ra);
        }
    }
    if (at.q == 0) {
        put_ones(bias, ones[0], first, at);
    }
}

/* The operand scale * g, zero where dropped, of the gradient that enters a branch; also to the warp's place in G. */
template <int D, int NT>
static __device__ __forceinline__ void branch_gradient(ps_pair (&all)[D / 16][4], ps_real *G, const float (&g)[2][4], float scale,
                                                       const uint32_t *masks, const place<D, NT> &at)
{
    ps_pair a[4];
    float v[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] = g[i / 4][i % 4] * scale;
    }
    pack_operand(a, v[0], v[1]);
    if (masks) {
        drop_operand(a, *masks >> at.q);
    }
    if (D == 16) {
        store_operand(G + at.row * (D + 8), D + 8, a, at);
    }
    gather<D, NT>(all, a, G, at);
}

/* Recomputes the warp's hidden columns begin .. begin + count of its share and stages x (1 + tanh) and the gradient before gelu;
 * dx += that gradient W_1' when d is 16. */
template <int D, int NT, bool DROP>
static __device__ __forceinline__ void
feed_forward_backward(float (&dx)[2][4], const ps_pair (&a)[D / 16][4], const ps_pair (&dm)[D / 16][4], ps_real *staged, int begin,
                      int count, const struct sizes &s, const layer_weights<D> &w, const uint32_t *masks, const place<D, NT> &at)
{
    const int ld_staged = 2 * s.staged + 8, from = at.share * (s.f / sharing(D)) + begin;
    ps_real *to = staged + at.share * count;
    uint32_t next = DROP ? masks[from / 2] : 0;
#pragma unroll 1
    for (int column = from; column < from + count; column += 16, to += 16) {
        const uint32_t bits = next >> at.q;
        ps_pair hidden[4], d_hidden[4];
        if (DROP && column + 16 < from + count) {
            next = masks[column / 2 + 8];
        }
        hidden_backward<D, NT>(hidden, d_hidden, a, dm, column, s, w, at);
        if constexpr (DROP) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t m = mask_pair(bits, j % 2, j / 2);
                hidden[j] &= m;
                d_hidden[j] &= m;
            }
        }
        store_operand(to, ld_staged, hidden, at);
        store_operand(to + s.staged, ld_staged, d_hidden, at);
        if constexpr (D == 16) {
            ps_pair b[4];
            load_b_transposed(b, lane_b_transposed<4>(w.w_1 + column, s.f + 8, at), s.f + 8, at);
            ps_mma16(dx[0], d_hidden, b[0], b[1], dx[0]);
            ps_mma16(dx[1], d_hidden, b[2], b[3], dx[1]);
        }
    }
}

template <int D, int NT, bool NARROW>
static __global__ void __launch_bounds__(most_threads(D)) backward_kernel(const __grid_constant__ struct small x)
{
    ps_grid_begin();
    constexpr int LD = D + 8, LD_QKV = layer_weights<D>::LD_QKV, W = sharing(D), LD_P = NT * 16 + 8;
    constexpr int COLUMNS = job_columns<D>(), PARTS = D / COLUMNS;
    extern __shared__ uint4 shared_memory[];
    float4 *const table = (float4 *)shared_memory;
    char *const weights = (char *)shared_memory + TABLE_BYTES;
    const struct sizes z = sizes_of(x);
    const int bytes = layer_bytes(D, z.f), unit_stride = unit_bytes(D, NT, true, z.staged) / REAL_BYTES;
    place<D, NT> at;
    ps_real *const units = (ps_real *)(weights + (x.resident ? x.layers : 1) * bytes);
    /* X: xhat of LN2, then the gradient of merged, then xhat of LN1. G: the gradient entering W_2, then W_o. M: LN2's output, LN1's
     * output, merged. */
    constexpr int TO_G = NT * 16 * LD, TO_M = 2 * TO_G, TO_QKV = 3 * TO_G, TO_STATISTICS = TO_QKV + NT * 16 * LD_QKV;
    constexpr int TO_SCRATCH = TO_STATISTICS + statistics_bytes(D, NT) / REAL_BYTES;
    ps_real *const X = units + at.unit * unit_stride, *const G = X + TO_G, *const M = X + TO_M, *const qkv = X + TO_QKV;
    char *const statistics = (char *)(X + TO_STATISTICS);
    ps_real *const scratch = X + TO_SCRATCH;
    const int share_f = z.f / W, share_staged = z.staged / W, heads = 16 / z.e, warps = (int)blockDim.x / 32;
    const int warp = (int)threadIdx.x / 32, ld_staged = 2 * z.staged + 8;
    fill_table<D, NT>(table, x.n, at);
    if (x.resident) {
        for (int l = 0; l < x.layers; l++) {
            stage_layer(x, z, l, layer_weights<D>(weights + l * bytes, z.f));
        }
    }
    for (int64_t group = blockIdx.x; group * x.block_units < x.units; group += gridDim.x) {
        const bool first = group == blockIdx.x;
        at.take(x, group * x.block_units + at.unit);
        float g[2][4];
        load_rows<D, NT>(g, x.dy, at);
        for (int l = x.layers - 1; l >= 0; l--) {
            const layer_weights<D> w(weights + (x.resident ? l : 0) * bytes, z.f);
            float *const sums = x.partial + ((int64_t)blockIdx.x * x.layers + l) * layer_sums(D, z.f);
            float *const bias_sums = sums + (4 * D + 2 * z.f) * D;
            /* Units beyond the last read some masks: their gradients are zero. */
            const uint32_t *const masks = !z.drop                         ? NULL
                                          : at.global_tile < x.units * NT ? masks_at<D, NT>(x, z, l, at)
                                                                          : x.masks + at.g;
            ps_pair all[D / 16][4], xhat[4], a[4];
            float rstd[2], dx[2][4], v[2][4];

            /* y = r + drop(hidden W_2 + b_2) */
            __syncthreads(); /* the layer before has done with all buffers */
            if (!x.resident) {
                stage_layer(x, z, l, w);
            }
            load_rows<D, NT>(dx, x.r + l * x.rows * D, at);
            if (!x.resident || (first && l == x.layers - 1)) {
                ps_copy_wait();
                __syncthreads();
            }
            normalise<D, NT>(v, rstd, dx, x.epsilon, statistics_at<D, NT>(statistics, 0, at), at);
            pack_operand(xhat, v[0], v[1]);
            store_operand(X + at.row * LD + at.share * 16, LD, xhat, at);
            scale_shift(a, v, w.ln2_gamma + at.share * 16, w.ln2_beta + at.share * 16, at.q);
            gather<D, NT>(all, a, M, at);
            clear(dx);
            {
                ps_pair dm[D / 16][4];
                branch_gradient<D, NT>(dm, G, g, x.drop_scale * x.half_scale,
                                       z.drop ? masks + (D / 16 + z.f / 16 + at.share) * 8 : NULL, at);
                ps_real *const staged = scratch + at.tile * 16 * ld_staged;
#pragma unroll 1
                for (int begin = 0; begin < share_f; begin += share_staged) {
                    if (begin > 0) {
                        __syncthreads();
                    }
                    if (z.drop) {
                        feed_forward_backward<D, NT, true>(dx, all, dm, staged, begin, share_staged, z, w, masks + D / 2, at);
                    } else {
                        feed_forward_backward<D, NT, false>(dx, all, dm, staged, begin, share_staged, z, w, NULL, at);
                    }
                    __syncthreads();
                    if constexpr (W > 1) {
                        for (int i = 0; i < W; i++) {
                            multiply_shared<D, NT>(dx, staged + z.staged + i * share_staged, ld_staged,
                                                   w.w_1 + at.share * 16 * (z.f + 8) + i * share_f + begin, z.f + 8, share_staged,
                                                   at);
                        }
                    }
                    const int tiles = z.staged / 16;
                    const int jobs = 2 * tiles * PARTS;
                    for (int job = warp; job < jobs + (begin == 0 ? D / 16 : 0); job += warps) {
                        if (job < jobs) {
                            const int part = job % PARTS, block = job / PARTS;
                            const bool second = block >= tiles; /* W_2 */
                            const int from = (second ? block - tiles : block) * 16, share = from / share_staged;
                            const int column = share * share_f + begin + from - share * share_staged;
                            const int row = second ? 4 * D + z.f + column : 4 * D + column;
                            weight_gradient<D, NT>(
                                sums + row * D + part * COLUMNS, second || part > 0 ? NULL : bias_sums + row, first,
                                {units + TO_SCRATCH + (second ? from : z.staged + from), ld_staged, unit_stride},
                                {units + (second ? TO_G : 0) + part * COLUMNS, LD, unit_stride}, x.block_units, at);
                        } else {
                            const int column = (job - jobs) * 16;
                            bias_gradient<D, NT>(bias_sums + 4 * D + z.f + column, first, {units + TO_G + column, LD, unit_stride},
                                                 x.block_units, at);
                        }
                    }
                }
            }
            normalise_backward<D, NT>(g, dx, w.ln2_gamma + at.share * 16, xhat, rstd, statistics_at<D, NT>(statistics, 1, at), at);
            __syncthreads();

            /* r = u + drop(merged W_o + b_o) */
            branch_gradient<D, NT>(all, G, g, x.drop_scale, z.drop ? masks + at.share * 8 : NULL, at);
            clear(dx);
            multiply_transposed<D, NT>(dx, all, w.w_o + at.share * 16 * LD, LD, at);
            pack_operand(a, dx[0], dx[1]);
            store_operand(X + at.row * LD + at.share * 16, LD, a, at);

            load_rows<D, NT>(dx, x.u + l * x.rows * D, at);
            normalise<D, NT>(v, rstd, dx, x.epsilon, statistics_at<D, NT>(statistics, 2, at), at);
            pack_operand(xhat, v[0], v[1]);
            scale_shift(a, v, w.ln1_gamma + at.share * 16, w.ln1_beta + at.share * 16, at.q);
            gather<D, NT>(all, a, M, at);
            project<D, NT>(qkv, all, w, at);
            at.sync();

            /* A = softmax(q k' / sqrt(e)), merged = A v */
            ps_real *const mine = qkv + at.row * LD_QKV + at.share * 16;
            const ps_real *const queries = qkv + at.share * 16, *const keys = queries + D;
            const ps_real *const values = keys + D, *const d_merged = X + at.share * 16;
            ps_real *const P = scratch + at.share * (2 * NT * 16 * LD_P), *const S = P + NT * 16 * LD_P;
            ps_pair all_queries[4], all_d_merged[4];
            load_a(all_queries, lane_a(mine, LD_QKV, at), LD_QKV, at);
            load_a(all_d_merged, lane_a(d_merged + at.tile * 16 * LD, LD, at), LD, at);
#pragma unroll 1
            for (int i = 0; i < heads; i++) {
                constexpr int HT = NARROW ? 1 : 2;
                const struct head h = head_at(i, z.e, at.q);
                float p[2 * NT][4], dp[2 * NT][4], dq[HT][4], delta[4];
                const float *lse = x.lse + ((int64_t)l * x.heads + at.share * heads + i) * x.rows + at.first;
                const float log_sum[2] = {at.here[0] ? lse[0] : 0.0f, at.here[1] ? lse[8] : 0.0f};
                head_operand<NARROW>(a, all_queries, h);
                masked_scores<D, NT, NARROW>(p, a, h, keys, LD_QKV, table, at);
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
                        pack_operand(a, p[2 * j], p[2 * j + 1]);
                        store_operand(P + at.tile * 16 * LD_P + j * 16, LD_P, a, at);
                        mix<D, NT, NARROW>(o, a, h, values + j * 16 * LD_QKV, LD_QKV, at);
                    }
                    put_head<D, NT, NARROW>(M + at.row * LD + at.share * 16, LD, o, 1.0f, 1.0f, h, at);
                    /* sum_j A dA = sum over the head's columns of merged and its gradient */
                    head_operand<NARROW>(a, all_d_merged, h);
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float sum = 0;
#pragma unroll
                        for (int t = 0; t < HT; t++) {
                            sum -= o[t][2 * r] * ps_low(a[2 * t + r]);
                            sum -= o[t][2 * r + 1] * ps_high(a[2 * t + r]);
                        }
                        delta[2 * r] = delta[2 * r + 1] = quad_sum(sum);
                    }
                }
                scores<D, NT, NARROW>(dp, a, h, values, LD_QKV, delta, delta, delta, at);
                clear(dq);
#pragma unroll
                for (int j = 0; j < NT; j++) {
#pragma unroll
                    for (int k = 0; k < 8; k++) {
                        dp[2 * j + k / 4][k % 4] *= p[2 * j + k / 4][k % 4];
                    }
                    pack_operand(a, dp[2 * j], dp[2 * j + 1]);
                    store_operand(S + at.tile * 16 * LD_P + j * 16, LD_P, a, at);
                    mix<D, NT, NARROW>(dq, a, h, keys + j * 16 * LD_QKV, LD_QKV, at);
                }
                at.sync(); /* the head's k and v are free, A and its gradient are there */
                float dk[HT][4], dv[HT][4];
                clear(dk);
                clear(dv);
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    const int from = j * 16 * LD_P + at.tile * 16;
                    load_a_transposed(a, lane_a_transposed(P, LD_P, at) + from, LD_P, at);
                    mix<D, NT, NARROW>(dv, a, h, d_merged + j * 16 * LD, LD, at);
                    load_a_transposed(a, lane_a_transposed(S, LD_P, at) + from, LD_P, at);
                    mix<D, NT, NARROW>(dk, a, h, queries + j * 16 * LD_QKV, LD_QKV, at);
                }
                put_head<D, NT, NARROW>(mine + D, LD_QKV, dk, x.scale, x.scale, h, at);
                put_head<D, NT, NARROW>(mine + 2 * D, LD_QKV, dv, 1.0f, 1.0f, h, at);
                at.sync();
                put_head<D, NT, NARROW>(mine, LD_QKV, dq, x.scale, x.scale, h, at);
            }
            store_operand(X + at.row * LD + at.share * 16, LD, xhat, at);
            const bool embed = l == 0 && x.embed.partial;
            if (embed) {
                stage_patches<D, NT>(scratch, x, group * x.block_units + at.unit, at);
            }
            if (W > 1) {
                at.sync();
            } else {
                __syncwarp();
            }
            clear(dx);
            multiply_shared<D, NT>(dx, qkv + at.row * LD_QKV, LD_QKV, w.w_qkv + at.share * 16 * LD_QKV, LD_QKV, 3 * D, at);
            normalise_backward<D, NT>(g, dx, w.ln1_gamma + at.share * 16, xhat, rstd, statistics_at<D, NT>(statistics, 3, at), at);
            if (embed) {
                const int pitch = embed_pitch(D, x.embed.patch);
                if (z.drop) {
                    embed_operand<D, NT, true>(a, g, x, at);
                } else {
                    embed_operand<D, NT, false>(a, g, x, at);
                }
                store_operand(scratch + at.row * pitch + at.share * 16, pitch, a, at);
                ps_copy_wait();
            }
            __syncthreads();
            constexpr int JOBS = 4 * D / 16 * PARTS;
            for (int job = warp; job < JOBS + (embed ? embed_jobs<D>(x) : 0); job += warps) {
                if (job >= JOBS) {
                    embed_gradient<D, NT>(x, job - JOBS, units + TO_SCRATCH, unit_stride, first, at);
                    continue;
                }
                const int part = job % PARTS, row = job / PARTS * 16;
                const bool of_o = row >= 3 * D;
                weight_gradient<D, NT>(sums + row * D + part * COLUMNS, part > 0 ? NULL : bias_sums + row, first,
                                       {units + (of_o ? TO_G + row - 3 * D : TO_QKV + row), of_o ? LD : LD_QKV, unit_stride},
                                       {units + (of_o ? TO_M : 0) + part * COLUMNS, LD, unit_stride}, x.block_units, at);
            }
        }
        if (!x.embed.partial) {
            store_rows<D, NT>(x.du, g, at);
        }
    }
}
#endif

/* ---- the sum over blocks ---- */

enum { SUM_THREADS = 512, SUM_TILE = 256, SUM_PARTS = SUM_THREADS / (SUM_TILE / 4), SUM_FLIGHT = 14 };

/* A block adds 256 / d rows of a layer's partial sums over all blocks, in 8 parts and then those in order, and adds them to the
 * gradients; the last block of a matrix that follows a LayerNorm adds up what the others found of gamma's and beta's. Grid
 * ((4d + 2f) d / 256, layers), and a row of blocks for the embedding. */
template <int D> static __global__ void __launch_bounds__(SUM_THREADS) sum_kernel(const __grid_constant__ struct small x)
{
    constexpr int ROWS = SUM_TILE / D;
    __shared__ float4 sums[SUM_PARTS][SUM_TILE / 4];
    __shared__ float bias_sums[SUM_PARTS][2 * ROWS], total[ROWS], found[2][SUM_TILE];
    __shared__ bool last;
    const int f = x.f, thread = (int)threadIdx.x, l = (int)blockIdx.y, row0 = (int)blockIdx.x * ROWS, size = layer_sums(D, f);
    const int64_t stride = (int64_t)x.layers * size;
    const bool of_o = row0 >= 3 * D && row0 < 4 * D; /* W_o's blocks add b_2 as well */
    const bool after_norm = row0 < 4 * D + f && !of_o;
    const int which = row0 >= 4 * D; /* LN2 */
    float *const matrices = x.gradients + l * x.at.matrix_stride, *const vectors = x.gradients + l * x.at.vector_stride;
    /* The thread's element of the matrices and what it needs beside the sums, all of it written before the backward. */
    int64_t at = 0;
    float weight = 0, gamma = 1, beta = 0, old = 0;
    if (thread < SUM_TILE && l < x.layers) {
        const int j = thread % D, row = row0 + thread / D;
        at = of_o          ? x.at.w_o + j * D + row - 3 * D
             : !after_norm ? x.at.w_2 + (int64_t)(row - 4 * D - f) * D + j
             : which       ? x.at.w_1 + (int64_t)j * f + row - 4 * D
                           : x.at.w_qkv + j * 3 * D + row;
        old = matrices[at];
        if (after_norm) {
            const float *const p = x.parameters + l * x.at.vector_stride;
            weight = ps_float(x.weights[l * x.at.matrix_stride + at]);
            gamma = p[(which ? x.at.ln2_gamma : x.at.ln1_gamma) + j];
            beta = p[(which ? x.at.ln2_beta : x.at.ln1_beta) + j];
        }
    }
    ps_grid_begin();
    /* Backward may have added the blocks itself. */
    const bool added = x.summed && (l > 0 || row0 >= 4 * D);
    const float *const from = (added ? x.summed : x.partial) + (int64_t)l * size;
    const int blocks_here = added ? 1 : x.blocks;
    if (x.summed && l + blockIdx.x == 0 && thread < 2 * x.layers) {
        x.finished[thread] = 0; /* for the next time */
    }
    if (l == x.layers) {
        add_embedding<D, SUM_THREADS>(x, sums[0], (int)blockIdx.x, (int)gridDim.x);
        return;
    }
    float bias_part = 0;
    if (thread < SUM_PARTS * 2 * ROWS && row0 < 4 * D + f) {
        const int part = thread / (2 * ROWS), i = thread % (2 * ROWS);
        if (i < ROWS || of_o) {
            const bool b_2 = i >= ROWS;
            const float *p = (b_2 && x.summed ? x.summed + (int64_t)l * size : from) + (4 * D + 2 * f) * D +
                             (b_2 ? 4 * D + f + row0 - 3 * D + i - ROWS : row0 + i);
            const int count = b_2 && x.summed ? 1 : blocks_here;
#pragma unroll 16
            for (int b = part; b < count; b += SUM_PARTS) {
                bias_part += p[b * stride];
            }
        }
    }
    {
        const int part = thread / (SUM_TILE / 4), i = thread % (SUM_TILE / 4);
        const float4 *const parts = (const float4 *)(from + (int64_t)row0 * D) + i;
        sums[part][i] = sum_every<SUM_FLIGHT, true>(parts, stride / 4, part, SUM_PARTS, blocks_here);
    }
    if (thread < SUM_PARTS * 2 * ROWS) {
        bias_sums[thread / (2 * ROWS)][thread % (2 * ROWS)] = bias_part;
    }
    __syncthreads();
    if (thread < 2 * ROWS && row0 < 4 * D + f && (thread < ROWS || of_o)) {
        float sum = bias_sums[0][thread];
        for (int part = 1; part < SUM_PARTS; part++) {
            sum += bias_sums[part][thread];
        }
        const int row = row0 + thread % ROWS;
        if (thread >= ROWS) {
            vectors[x.at.b_2 + row - 3 * D] += sum / x.half_scale; /* see feed_forward_backward */
        } else {
            total[thread] = sum;
            vectors[row < 3 * D ? x.at.b_qkv + row : row < 4 * D ? x.at.b_o + row - 3 * D : x.at.b_1 + row - 4 * D] += sum;
        }
    }
    __syncthreads();
    if (thread < SUM_TILE) {
        float sum = ((const float *)sums[0])[thread];
        for (int part = 1; part < SUM_PARTS; part++) {
            sum += ((const float *)sums[part])[thread];
        }
        if (after_norm) {
            const float by = total[thread / D];
            matrices[at] = old + (gamma * sum + beta * by);
            found[0][thread] = weight * sum;
            found[1][thread] = weight * by;
        } else {
            matrices[at] = old + sum;
        }
    }
    if (!after_norm) {
        return;
    }
    const int block0 = which ? 4 * D / ROWS : 0, blocks = (which ? f : 3 * D) / ROWS;
    float *const norms = x.norms + (int64_t)l * gridDim.x * 2 * D;
    __syncthreads();
    if (thread < 2 * D) {
        const int j = thread % D;
        float sum = 0;
        for (int i = 0; i < ROWS; i++) {
            sum += found[thread / D][i * D + j];
        }
        norms[blockIdx.x * 2 * D + thread] = sum;
        __threadfence();
    }
    __syncthreads();
    if (thread == 0) {
        last = atomicAdd(&x.arrived[2 * l + which], 1u) == (unsigned)blocks - 1;
    }
    __syncthreads();
    if (last) {
        __threadfence();
        if (thread < 2 * D) {
            float sum = 0;
#pragma unroll 8
            for (int b = 0; b < blocks; b++) {
                sum += __ldcg(norms + (block0 + b) * 2 * D + thread);
            }
            const int64_t at = which ? thread < D ? x.at.ln2_gamma : x.at.ln2_beta : thread < D ? x.at.ln1_gamma : x.at.ln1_beta;
            vectors[at + thread % D] += sum;
        }
        if (thread == 0) {
            x.arrived[2 * l + which] = 0;
        }
    }
}

/* ---- the host's side ---- */

typedef void kernel_function(const struct small);

/* d_model 64 with longer sequences and heads of 16 columns is encoder/streamed/real16.cu's. */
static constexpr bool heads_fit(int d, int tiles, bool narrow)
{
    return narrow || d < 64 || tiles == 1;
}

template <int D, int NT> static kernel_function *kernel_of_head(bool backward, bool narrow)
{
    if constexpr (!heads_fit(D, NT, false)) {
        return backward ? backward_kernel<D, NT, true> : forward_kernel<D, NT, true>;
    } else if (backward) {
        return narrow ? backward_kernel<D, NT, true> : backward_kernel<D, NT, false>;
    } else {
        return narrow ? forward_kernel<D, NT, true> : forward_kernel<D, NT, false>;
    }
}

template <int D> static kernel_function *kernel_of_tiles(int tiles, bool backward, bool narrow)
{
    switch (tiles) {
    case 1:
        return kernel_of_head<D, 1>(backward, narrow);
    case 2:
        return kernel_of_head<D, 2>(backward, narrow);
    case 3:
        return kernel_of_head<D, 3>(backward, narrow);
    default:
        return kernel_of_head<D, 4>(backward, narrow);
    }
}

struct plan {
    int tiles, unit_rows; /* of a unit */
    int64_t units;
    int block_units, resident, staged, blocks, threads;
    int wide;   /* encoder/resident/d64_short.cu's kernels */
    int narrow; /* encoder/resident/d16_e4_f128.cu's */
    int multiprocessors;
    size_t shared;
};

static kernel_function *kernel_of(int d, const struct plan &p, bool backward, const struct small &x)
{
    const bool narrow = x.e < 16;
    const int tiles = p.tiles;
#ifndef PS_COMPILE_TF32
    if (d == 64) {
        return kernel_of_tiles<64>(tiles, backward, narrow);
    }
#endif
    return d == 16 ? kernel_of_tiles<16>(tiles, backward, narrow) : kernel_of_tiles<32>(tiles, backward, narrow);
}

static int sizes_fit(const struct ps_encoder_small *e)
{
    const int64_t d = e->d_model, head = e->n_heads > 0 ? d / e->n_heads : 0;
    return (d == 16 || d == 32 || (d == 64 && PS_REAL16 != PS_F32)) && head * e->n_heads == d &&
           (head == 4 || head == 8 || head == 16) && e->patches >= 1 && e->patches <= 64 &&
           heads_fit((int)d, ((int)e->patches + 15) / 16, head < 16) && e->d_ff >= d && e->d_ff <= 256 && e->d_ff % d == 0 &&
           e->layers >= 1 && e->layers <= 64 && e->sequences >= 1 && e->sequences <= INT32_MAX;
}

static void units_of(const struct ps_encoder_small *e, struct plan *p)
{
    p->tiles = ((int)e->patches + 15) / 16;
    p->unit_rows = (int)(ps_small_sequences(e) * e->patches);
    p->units = ps_small_units(e);
}

static int64_t unit_of(int d, int tiles, bool backward, int staged)
{
#ifdef PS_COMPILE_TF32
    if (backward) {
        return places_of(d, tiles).size * (int64_t)sizeof(ps_real);
    }
#endif
    return unit_bytes(d, tiles, backward, staged);
}

/* Fewest rounds over the units first, then weights that stay, then the fewest stages of d_ff. */
static enum ps_status plan_make(const struct ps_cuda_context *c, const struct ps_encoder_small *e, bool backward, struct plan *best)
{
    const int multiprocessors = c->multiprocessors, shared = c->shared_bytes;
    int64_t best_rounds = INT64_MAX;
    if (sizes_fit(e) && ps_encoder_wide_serves(e, shared)) {
        *best = {};
        units_of(e, best);
        best->wide = 1;
        best->blocks = ps_encoder_wide_blocks(best->units, multiprocessors);
        best->multiprocessors = multiprocessors;
        return PS_OK;
    }
    if (sizes_fit(e) && ps_encoder_narrow_serves(e)) {
        *best = {};
        units_of(e, best);
        best->narrow = 1;
        best->multiprocessors = multiprocessors;
        best->block_units = (int)((best->units + multiprocessors - 1) / multiprocessors);
        best->block_units = best->block_units < NARROW_LEAST_UNITS ? NARROW_LEAST_UNITS : best->block_units;
        best->blocks = (int)((best->units + best->block_units - 1) / best->block_units);
        if (ps_encoder_narrow_shared(e, best->block_units) <= (size_t)shared) {
            return PS_OK;
        }
    }
    if (sizes_fit(e)) {
        const int d = (int)e->d_model, f = (int)e->d_ff, W = sharing(d);
        struct plan p = {};
        units_of(e, &p);
        p.multiprocessors = multiprocessors;
        const int warps = p.tiles * W;
        const int most = most_threads(d) / 32 / warps;
        const bool turns = backward && PS_REAL16 == PS_F32, stages = backward && !turns;
        for (int there = (int)e->layers; there >= 1; there = turns && there > 2 ? 2 : there > 1 ? 1 : 0) {
            p.resident = turns ? there : there == e->layers;
            for (p.staged = f; p.staged >= (stages ? d : f); p.staged -= d) {
                if (f % p.staged != 0) {
                    continue;
                }
                const int64_t weights = TABLE_BYTES + there * (int64_t)layer_bytes(d, f);
                const int64_t unit = unit_of(d, p.tiles, backward, p.staged);
                int64_t units = (shared - weights) / unit;
                units = shared < weights ? 0 : units > most ? most : units;
                units = warps > 1 && units > 15 ? 15 : units; /* a barrier each */
                if (units < 1) {
                    continue;
                }
                const int64_t rounds = (p.units + units * multiprocessors - 1) / (units * multiprocessors);
                if (rounds < best_rounds) {
                    best_rounds = rounds;
                    p.block_units = (int)((p.units + rounds * multiprocessors - 1) / (rounds * multiprocessors));
                    const int64_t blocks = (p.units + p.block_units - 1) / p.block_units;
                    p.blocks = (int)((blocks + rounds - 1) / rounds);
                    p.threads = p.block_units * warps * 32;
                    p.shared = (size_t)(weights + p.block_units * unit);
                    *best = p;
                }
            }
        }
    }
    if (best_rounds == INT64_MAX) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda, whole): d_model %lld, n_heads %lld, d_ff %lld, %lld patches, %lld layers are not served with "
            "%d bytes of shared memory a block: d_model 16%s, heads of 4, 8 or 16, d_ff a multiple of d_model up to 256, up to 64 "
            "patches",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, (long long)e->layers, shared,
            PS_REAL16 == PS_F32 ? " or 32" : ", 32 or 64");
    }
    return PS_OK;
}

/* What is kept, in order: r, lse, deviations or merged, masks, the embedding's masks. */
static size_t kept_r(const struct ps_encoder_small *e)
{
    return ((size_t)(e->layers * e->sequences * e->patches * e->d_model) * sizeof(ps_real) + 255) / 256 * 256;
}

/* encoder/resident/d64_short.cu's deviations, or tf32's merged. */
static size_t kept_beside(const struct ps_encoder_small *e)
{
    return PS_REAL16 == PS_F32 ? kept_r(e) : ps_encoder_wide_fits(e) ? ps_small_deviation_bytes(e) : 0;
}

/* The batch size decides which kernels run: the larger of what they keep. */
static size_t kept_bytes(const struct ps_encoder_small *e, const struct plan &p)
{
    const int64_t words = e->dropout.threshold ? p.units * p.tiles * (e->d_model / 16) * 8 : 0; /* the embedding's */
    const size_t bytes =
        kept_r(e) + ps_small_lse_bytes(e) + kept_beside(e) + ps_small_mask_bytes(e, p.tiles) + (size_t)words * sizeof(uint32_t);
    const size_t narrow = ps_encoder_narrow_serves(e) ? ps_encoder_narrow_kept_bytes(e) : 0;
    return bytes > narrow ? bytes : narrow;
}

/* The workspace, in order: counters (256 bytes a 16 layers), norms, encoder/resident/d16_e4_f128.cu's sums, partial sums, the
 * embedding's. */
static size_t counter_bytes(const struct ps_encoder_small *e)
{
    return (size_t)(e->layers * 4 * sizeof(unsigned) + 255) / 256 * 256;
}

static size_t sums_bytes(const struct ps_encoder_small *e)
{
    return (size_t)e->layers * (size_t)layer_sums((int)e->d_model, (int)e->d_ff) * sizeof(float);
}

static size_t embed_sums(const struct ps_encoder_small *e)
{
    return (size_t)embed_rows_of((int)e->patch_len, (int)e->patches) * (size_t)e->d_model * sizeof(float);
}

static size_t norm_bytes(const struct ps_encoder_small *e)
{
    const size_t row_blocks = (size_t)((4 * e->d_model + 2 * e->d_ff) * e->d_model / SUM_TILE);
    return ((size_t)e->layers * row_blocks * 2 * (size_t)e->d_model * sizeof(float) + 255) / 256 * 256;
}

/* Of both directions. */
struct plans {
    struct plan forward, backward;
};

static const struct plans &plans_of(const struct ps_encoder_plan *plan)
{
    return *(const struct plans *)plan->own;
}

static enum ps_status resident_plan(const struct ps_kernels *k, const struct ps_encoder_small *e, struct ps_encoder_plan *plan)
{
    struct plans p;
    PS_TRY(plan_make(ps_cuda(k), e, false, &p.forward));
    PS_TRY(plan_make(ps_cuda(k), e, true, &p.backward));
    plan->own = malloc(sizeof p);
    if (!plan->own) {
        return ps_fail(PS_DEVICE, "encoder: out of host memory");
    }
    memcpy(plan->own, &p, sizeof p);
    plan->kernels = p.forward.wide ? "resident/d64_short" : p.forward.narrow ? "resident/d16_e4_f128" : "resident";
    plan->kept_bytes = kept_bytes(e, p.forward);
    return PS_OK;
}

/* Whether a unit's windows fit where they are gathered, and du and patches where they are staged. */
static bool can_embed(const struct ps_encoder_small *e, const struct plan &p)
{
    if (e->seq_len < e->patch_len || e->patch_len < 1 || e->patch_len > 32) {
        return false;
    }
    const int64_t d = e->d_model, floats = p.unit_rows / e->patches * e->seq_len;
    if (p.wide) {
        return floats <= ps_encoder_wide_window_floats();
    }
    if (p.narrow) {
        return floats <= ps_encoder_narrow_window_floats();
    }
#ifdef PS_COMPILE_TF32
    const struct unit_places places = places_of((int)d, p.tiles);
    const size_t room = (size_t)(places.size - places.m) * sizeof(ps_real);
#else
    const size_t room = (size_t)scratch_bytes((int)d, p.tiles, p.staged);
#endif
    return floats * (int)sizeof(float) <= p.tiles * 16 * (3 * d + 8) * REAL_BYTES &&
           (size_t)(p.tiles * 16 * embed_pitch((int)d, (int)e->patch_len)) * sizeof(ps_real) <= room;
}

static enum ps_encoder_span resident_span(const struct ps_kernels *k, const struct ps_encoder_small *e,
                                          const struct ps_encoder_plan *plan)
{
    const struct plan &p = plans_of(plan).forward;
    const int shared = ps_cuda(k)->shared_bytes;
    if (!can_embed(e, plans_of(plan).backward)) {
        return PS_SPAN_LAYERS;
    }
    if (p.blocks > PS_PARTIAL_BLOCKS || e->pred_len < 1) {
        return PS_SPAN_EMBEDDING;
    }
    if (p.wide) {
        return ps_encoder_wide_heads(e, p.blocks, shared) ? PS_SPAN_UPDATE : PS_SPAN_EMBEDDING;
    }
    return p.narrow && ps_encoder_narrow_heads(e, p.block_units, shared) ? PS_SPAN_LOSS : PS_SPAN_EMBEDDING;
}

static size_t resident_workspace_bytes(const struct ps_kernels *, const struct ps_encoder_small *e,
                                       const struct ps_encoder_plan *plan)
{
    const struct plan &p = plans_of(plan).backward;
    /* A shorter batch may have more blocks, of fewer units each: 980 units are 123 blocks of 8, 660 are 132 of 5. */
    const size_t blocks = p.units < p.multiprocessors ? p.units : p.multiprocessors;
    const size_t embed = can_embed(e, p) ? blocks * embed_sums(e) : 0;
    if (p.wide) {
        return ps_encoder_wide_workspace(e, p.units, p.multiprocessors) + embed;
    }
    return counter_bytes(e) + norm_bytes(e) + (blocks + 1) * sums_bytes(e) + embed;
}

static void embed_make(const struct ps_encoder_small *e, const struct plan *p, struct small_embedding *x)
{
    const struct ps_embed_forward *f = e->embed;
    const struct ps_embed_backward *b = e->embed_gradient;
    x->length = (int)e->seq_len;
    x->patch = (int)e->patch_len;
    x->sequences = p->unit_rows / (int)e->patches;
    x->all = (uint32_t)e->sequences;
    if (f) {
        x->weight = (const ps_real *)f->weight.data;
        x->bias = (const float *)f->bias.data;
        x->position = (const float *)f->position.data;
        x->patches = (ps_real *)f->patches.data;
        x->mean = (float *)f->mean.data;
        x->std = (float *)f->std.data;
        x->windows = ps_windows_of(&f->inputs, &f->indices);
        x->state = f->state;
        x->stride = (int)f->stride;
        x->revin = f->revin;
        x->epsilon = (float)f->epsilon;
        x->by_channels = ps_divisor_make(f->inputs.size[1]);
        x->by_length = ps_divisor_make(e->seq_len);
        x->by_count = ps_divisor_make(e->patches);
        x->site = f->dropout.site;
    }
    if (b) {
        x->patches = (ps_real *)b->patches.data;
        x->d_weight = (float *)b->d_weight.data;
        x->d_bias = (float *)b->d_bias.data;
        x->d_position = (float *)b->d_position.data;
    }
}

static void head_make(const struct ps_encoder_small *e, struct small_head *x)
{
    const struct ps_head_step *h = e->head;
    const struct ps_head_gradient *g = e->head_gradient;
    if (h) {
        x->weight = (const ps_real *)h->weight.data;
        x->bias = (const float *)h->bias.data;
        x->targets = ps_windows_of(&h->targets, &h->indices);
        x->dx = (ps_real *)h->dx.data;
        x->dz = (ps_real *)h->dz.data;
        x->partials = (double *)h->partials.data;
        x->rows = (int)h->partials.size[0];
        x->horizon = (int)e->pred_len;
        x->scale = (float)(2.0 * ps_gradient_scale(h->gradient_scale) / ((double)e->sequences * (double)e->pred_len));
    }
    if (g) {
        x->d_weight = (float *)g->d_weight.data;
        x->d_bias = (float *)g->d_bias.data;
        x->dx = (ps_real *)g->dx.data;
        x->partials = (double *)g->partials.data;
        x->rows = (int)g->partials.size[0];
        x->horizon = (int)e->pred_len;
        x->state = g->state;
        x->loss_scale = (double)g->batch / ((double)e->sequences * (double)e->pred_len);
        x->batch = g->batch;
    }
}

static void update_make(const struct ps_encoder_small *e, struct small_update *x)
{
    const struct ps_adamw *u = e->update;
    if (u) {
        x->parameters = (float *)u->parameters.data;
        x->m = (float *)u->m.data;
        x->v = (double *)u->v.data;
        x->copy = (ps_real *)u->copy.data;
        x->learning_rates = (const double *)u->learning_rates.data;
        x->state = u->state;
        x->plain = ps_adamw_plain_of(u);
    }
}

static struct small small_make(const struct ps_encoder_small *e, const struct plan *p)
{
    struct small x = ps_small_of(e, p->blocks);
    x.block_units = p->block_units;
    x.resident = p->resident;
    x.staged = p->staged;
    if (p->narrow) {
        x.masks = (uint32_t *)e->kept;
        x.kept_tiles = ps_encoder_narrow_tiles(e);
        if (e->kept && e->dropout.threshold) {
            x.embed.masks = (uint32_t *)((char *)e->kept + ps_encoder_narrow_layers_bytes(e));
        }
    } else if (e->kept) {
        char *kept = (char *)e->kept;
        x.r = (ps_real *)kept;
        x.lse = (float *)(kept + kept_r(e));
        x.rstd = (float *)(kept + kept_r(e) + ps_small_lse_bytes(e));
        x.merged = (ps_real *)x.rstd;
        if (e->dropout.threshold) {
            x.masks = (uint32_t *)(kept + kept_r(e) + ps_small_lse_bytes(e) + kept_beside(e));
            x.embed.masks = (uint32_t *)((char *)x.masks + ps_small_mask_bytes(e, p->tiles));
        }
    }
    embed_make(e, p, &x.embed);
    head_make(e, &x.head);
    update_make(e, &x.update);
    return x;
}

static enum ps_status resident_forward(const struct ps_kernels *k, const struct ps_encoder_small *e,
                                       const struct ps_encoder_plan *plan)
{
    const struct plan &p = plans_of(plan).forward;
    const cudaStream_t stream = ps_cuda(k)->stream;
    ps_cuda(k)->ordered = false; /* `fresh` takes care of what was */
    struct small x = small_make(e, &p);
    if (p.wide) {
        return ps_encoder_wide_forward(x, (char *)e->workspace, p.multiprocessors, stream);
    }
    if (p.narrow) {
        return ps_encoder_narrow_forward(x, ps_encoder_narrow_shared(e, p.block_units), stream);
    }
    return ps_small_launch(kernel_of((int)e->d_model, p, false, x), dim3((unsigned)p.blocks), p.threads, p.shared, stream,
                           "encoder forward", x);
}

static enum ps_status resident_backward(const struct ps_kernels *k, const struct ps_encoder_small *e,
                                        const struct ps_encoder_plan *plan)
{
    const struct plan &p = plans_of(plan).backward;
    const cudaStream_t stream = ps_cuda(k)->stream;
    /* `fresh` takes care of what was. With an update the weights have just been written: the next kernel must not prefetch them. */
    ps_cuda(k)->ordered = e->update != NULL;
    struct small x = small_make(e, &p);
    const int d = (int)e->d_model, f = (int)e->d_ff;
    char *workspace = (char *)e->workspace;
    if (p.wide) {
        if (e->embed_gradient) {
            x.embed.partial = (float *)(workspace + ps_encoder_wide_workspace(e, p.units, p.multiprocessors));
        }
        return ps_encoder_wide_backward(x, workspace, p.multiprocessors, stream);
    }
    x.arrived = (unsigned *)workspace;
    x.norms = (float *)(workspace + counter_bytes(e));
    float *const summed = (float *)(workspace + counter_bytes(e) + norm_bytes(e));
    x.summed = p.narrow && x.threshold ? summed : NULL;
    x.finished = x.arrived + 2 * e->layers;
    x.partial = (float *)((char *)summed + sums_bytes(e));
    if (e->embed_gradient) {
        x.embed.partial = (float *)((char *)x.partial + (size_t)p.blocks * sums_bytes(e));
    }
    PS_TRY(p.narrow ? ps_encoder_narrow_backward(x, ps_encoder_narrow_shared(e, p.block_units), stream)
                    : ps_small_launch(kernel_of(d, p, true, x), dim3((unsigned)p.blocks), p.threads, p.shared, stream,
                                      "encoder backward", x));
#ifdef PS_COMPILE_TF32
    kernel_function *const sum = d == 16 ? sum_kernel<16> : sum_kernel<32>;
#else
    kernel_function *const sum = d == 16 ? sum_kernel<16> : d == 32 ? sum_kernel<32> : sum_kernel<64>;
#endif
    return ps_small_launch(sum,
                           dim3((unsigned)((4 * d + 2 * f) * d / SUM_TILE), (unsigned)(e->layers + (e->embed_gradient ? 1 : 0))),
                           SUM_THREADS, 0, stream, "encoder weight gradients", x);
}

const struct ps_encoder_family ps_encoder_resident = {resident_plan, resident_span, resident_workspace_bytes, resident_forward,
                                                      resident_backward};

} // namespace PS_REAL16_SPACE
