/* The backward of encoder/resident/resident.cuh in tf32. Its elements take twice the room of 16 bits', and no instruction
 * transposes them, so:
 *
 * - What weight gradients are made of lies by columns ("columns" below), where four neighbouring rows are operands of two products
 *   at once (over rows any order will do). The hidden columns of d_ff are staged 16 a warp at a time, in two buffers: some warps
 *   form the gradients of those before while the others go on.
 * - Softmax's probabilities are not exchanged between the warps of a unit: a warp computes those of its rows' queries with all
 * keys, and those of its rows' keys with all queries, transposed, from softmax's sums and sum_j A dA of each row, which are. For
 * these forward keeps merged, too.
 * - Weights are copied while the layer before is at work, where two layers' fit.
 *
 * Counts, etth1 (d 16, f 128, N 42 in 48 rows, 3 layers, S 896; 128 blocks of 21 warps): a tile and layer take 192 exponentials, 64
 * tanh and 400 products m16n8k8 a lane, 108 of them for weight gradients. u, r and merged are 7.2 MB each, partial gradients 7.9
 * MB.
 */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_GENERAL_BACKWARD_TF32_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_GENERAL_BACKWARD_TF32_CUH

#include "kernels/cuda/encoder/embed.cuh"

namespace ps_resident
{

/* ---- matrices by columns: column f of row t at f / 2 PAIR + f % 2 T + t for a right operand; for a left one columns f and f + 8
 * of each 16 lie together, so that a load's four words are an operand: at f % 8 / 2 PAIR + f % 2 T + 2 t + f / 8. A warp's accesses
 * meet each bank once: T is 16 modulo 32, PAIR 8. ---- */

static __host__ __device__ constexpr int column_rows(int tiles)
{
    return tiles % 2 ? tiles * 16 : tiles * 16 + 16;
}

/* Elements of so many columns. */
static __host__ __device__ constexpr int columns_size(int tiles, int columns)
{
    return columns / 2 * (2 * column_rows(tiles) + 8);
}

static __host__ __device__ constexpr int left_rows(int tiles)
{
    return tiles * 32 + 16;
}

/* Columns are a multiple of 16. */
static __host__ __device__ constexpr int left_size(int tiles, int columns)
{
    return columns / 4 * (2 * left_rows(tiles) + 8);
}

/* The operand of 16 rows and 16 columns to a left operand's, the first element of which is `to`. */
template <int NT, class P> static __device__ __forceinline__ void put_left(float *to, const uint2 (&a)[4], const P &at)
{
    constexpr int T = left_rows(NT), PAIR = 2 * T + 8;
    to += at.q * PAIR + at.g * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        *(uint2 *)(to + h * 16) = make_uint2(a[h].x, a[h + 2].x);
        *(uint2 *)(to + h * 16 + T) = make_uint2(a[h].y, a[h + 2].y);
    }
}

template <int NT, class P> static __device__ __forceinline__ void get_left(uint2 (&a)[4], const float *from, const P &at)
{
    constexpr int T = left_rows(NT), PAIR = 2 * T + 8;
    from += at.q * PAIR + at.g * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint2 even = *(const uint2 *)(from + h * 16), odd = *(const uint2 *)(from + h * 16 + T);
        a[h] = make_uint2(even.x, odd.x);
        a[h + 2] = make_uint2(even.y, odd.y);
    }
}

/* The same for a right operand's. */
template <int NT, class P> static __device__ __forceinline__ void put_columns(float *to, const uint2 (&a)[4], const P &at)
{
    constexpr int T = column_rows(NT), PAIR = columns_size(NT, 2);
    to += at.q * PAIR + at.g;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[i / 2 * 4 * PAIR + i % 2 * 8] = __uint_as_float(a[i].x);
        to[i / 2 * 4 * PAIR + i % 2 * 8 + T] = __uint_as_float(a[i].y);
    }
}

template <int NT, class P> static __device__ __forceinline__ void get_columns(uint2 (&a)[4], const float *from, const P &at)
{
    constexpr int T = column_rows(NT), PAIR = columns_size(NT, 2);
    from += at.q * PAIR + at.g;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i].x = __float_as_uint(from[i / 2 * 4 * PAIR + i % 2 * 8]);
        a[i].y = __float_as_uint(from[i / 2 * 4 * PAIR + i % 2 * 8 + T]);
    }
}

/* A job is 16 rows by so many columns of a weight's gradient. */
static __host__ __device__ constexpr int job_columns(int d)
{
    return d / 2;
}

/* out[16, job_columns] of rows of d (and bias[16]) = or += a' b over the block's rows; a 16 left columns, b right columns of each
 * unit, `stride` apart. Of four rows the first two and the last two make a product each. */
template <int D, int NT>
static __device__ __forceinline__ void columns_gradient(float *out, float *bias, bool first, const float *a, const float *b,
                                                        int stride, int units, const place<float, D, NT> &at)
{
    constexpr int T = column_rows(NT), PAIR = columns_size(NT, 2), N = job_columns(D) / 8, SETS = N == 1 ? 2 : 1; /* of sums */
    constexpr int T_LEFT = left_rows(NT), PAIR_LEFT = 2 * T_LEFT + 8;
    float c[SETS][N][4], ones[1][4];
    for (int i = 0; i < SETS; i++) {
        clear(c[i]);
    }
    clear(ones);
    a += at.g / 2 * PAIR_LEFT + at.g % 2 * T_LEFT + at.q * 8;
    b += at.g / 2 * PAIR + at.g % 2 * T + at.q * 4;
#pragma unroll 1
    for (int unit = 0; unit < units; unit++, a += stride, b += stride) {
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
            const uint4 low = *(const uint4 *)(a + tile * 32), high = *(const uint4 *)(a + tile * 32 + 4);
            const uint32_t a0[4] = {low.x, low.y, low.z, low.w}, a1[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
            for (int n = 0; n < N; n++) {
                const uint4 v = *(const uint4 *)(b + n * 4 * PAIR + tile * 16);
                ps_mma_tf32(c[0][n], a0, v.x, v.y, c[0][n]);
                ps_mma_tf32(c[SETS - 1][n], a1, v.z, v.w, c[SETS - 1][n]);
            }
            if (bias) {
                ps_mma_tf32(ones[0], a0, ps_one<float>, ps_one<float>, ones[0]);
                ps_mma_tf32(ones[0], a1, ps_one<float>, ps_one<float>, ones[0]);
            }
        }
    }
    if constexpr (SETS == 2) {
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            c[0][i / 4][i % 4] += c[1][i / 4][i % 4];
        }
    }
    put_tiles<D>(out + at.g * D + at.q * 2, c[0], first);
    if (bias && at.q == 0) {
        put_ones(bias, ones[0], first, at);
    }
}

/* bias[d] = or += the sums of b's columns. */
template <int D, int NT>
static __device__ __forceinline__ void columns_sum(float *bias, bool first, const float *b, int stride, int units,
                                                   const place<float, D, NT> &at)
{
    constexpr int T = column_rows(NT), PAIR = columns_size(NT, 2);
    const uint32_t one[4] = {ps_one<float>, ps_one<float>, ps_one<float>, ps_one<float>};
    float c[D / 8][4];
    clear(c);
    b += at.g / 2 * PAIR + at.g % 2 * T + at.q * 4;
#pragma unroll 1
    for (int unit = 0; unit < units; unit++, b += stride) {
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const uint4 v = *(const uint4 *)(b + n * 4 * PAIR + tile * 16);
                ps_mma_tf32(c[n], one, v.x, v.y, c[n]);
                ps_mma_tf32(c[n], one, v.z, v.w, c[n]);
            }
        }
    }
    if (at.g == 0) {
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            add_pair(bias + n * 8 + at.q * 2, c[n][0], c[n][1], 1.0f, first);
        }
    }
}

/* ---- a unit's buffers, in elements ---- */

/* X: xhat of LN2, right, then the gradient of merged by rows, then that entering W_o, left. G, right: the gradient entering W_2,
 * then xhat of LN1. M, right: where d > 16, LN2's output, the gradient entering W_o, LN1's output; then merged. QKV: q, k and v by
 * rows, then their gradients, left. ROWS: [heads][rows] softmax's sum and -sum_j A dA. Over the last three lie, left, two buffers
 * of 16 hidden columns a warp of a tile and their gradients, and in the end du and the patches by rows. */
struct unit_places {
    int g, statistics, m, qkv, rows, size;
};

static __host__ __device__ constexpr struct unit_places places_of(int d, int tiles)
{
    const int columns = columns_size(tiles, d), by_rows = tiles * 16 * (d + 8), left = left_size(tiles, d);
    const int qkv_rows = tiles * 16 * (3 * d + 8);
    struct unit_places p = {};
    p.g = left > by_rows ? left : by_rows;
    p.g = p.g > columns ? p.g : columns;
    p.statistics = p.g + columns;
    p.m = p.statistics + statistics_bytes(d, tiles) / 4;
    p.qkv = p.m + columns;
    p.rows = p.qkv + (3 * left > qkv_rows ? 3 * left : qkv_rows);
    p.size = p.rows + d / 4 * tiles * 16 * 2;
    p.size = p.size > p.m + 4 * left ? p.size : p.m + 4 * left;
    return p;
}

/* ---- attention ---- */

/* The rows' operand of one head from the warp's 16 columns, `p` as lane_a has it. */
template <bool E8> static __device__ __forceinline__ void load_head(uint2 (&a)[4], const float *p, int ld, const struct head &h)
{
    if constexpr (E8) {
        p += h.half * 8;
        a[0] = h.active ? *(const uint2 *)p : uint2();
        a[1] = h.active ? *(const uint2 *)(p + 8 * ld) : uint2();
        a[2] = a[3] = uint2();
    } else {
        load_a(a, p, ld);
    }
}

/* Softmax's sums of the warp's rows and columns' heads, and -sum_j A dA, which is that of merged and its gradient over the head's
 * columns, to rows [heads][rows]. */
template <int D, int NT>
static __device__ __forceinline__ void put_sums(float2 *rows, const float (&merged)[2][4], const float (&gradient)[2][4],
                                                const float *log_sums, const encoder<float> &x, const struct sizes &z,
                                                const place<float, D, NT> &at)
{
    float sum[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int t = i / 2, r = i % 2;
        float v = -merged[t][2 * r] * gradient[t][2 * r] - merged[t][2 * r + 1] * gradient[t][2 * r + 1];
        v += __shfl_xor_sync(0xffffffffu, v, 1);
        sum[t][r] = z.e > 4 ? v + __shfl_xor_sync(0xffffffffu, v, 2) : v;
    }
    if (at.q % 2 == 0 && (z.e == 4 || at.q == 0)) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = i / 2, r = i % 2, head = z.e == 4 ? 2 * t + at.q / 2 : z.e == 8 ? t : 0;
            if (z.e < 16 || t == 0) {
                const float both = z.e < 16 ? sum[t][r] : sum[0][r] + sum[1][r];
                /* A row that does not exist has no part in anything. */
                rows[head * (NT * 16) + at.row + at.g + 8 * r] =
                    make_float2(at.here[r] ? log_sums[(int64_t)head * x.rows + 8 * r] : 1e30f, both);
            }
        }
    }
}

/* From q, k, v and the gradient of merged, all by rows, the operands of the gradients of the warp's rows and columns of q, k and v.
 * rows: put_sums's, of the warp's heads. Ends when the unit's warps have done with what they have read. */
template <bool E8, int D, int NT>
static __device__ __forceinline__ void attention_backward_tf32(uint2 (&da)[3][4], const float2 *rows, float *qkv,
                                                               const float *d_merged, const float4 *table, const encoder<float> &x,
                                                               const struct sizes &z, const place<float, D, NT> &at)
{
    constexpr int LD = D + 8, LD_QKV = layer_weights<float, D>::LD_QKV, HT = E8 ? 1 : 2;
    const int heads = 16 / z.e;
    float *const queries = qkv + at.share * 16, *const keys = queries + D, *const values = keys + D;
    const float *const mine = lane_a(queries + at.row * LD_QKV, LD_QKV, at);
    d_merged += at.share * 16;
    float d[2][4];
    clear(d);
    const float zero[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < heads; i++) {
        const struct head h = head_at(i, z.e, at.q);
        const float2 sum[2] = {rows[i * (NT * 16) + at.row + at.g], rows[i * (NT * 16) + at.row + at.g + 8]};
        uint2 query[4], gradient[4];
        float dq[HT][4];
        load_head<E8>(query, mine, LD_QKV, h);
        load_head<E8>(gradient, lane_a(d_merged + at.row * LD, LD, at), LD, h);
        clear(dq);
#pragma unroll
        for (int j = 0; j < NT; j++) {
            float s[2][4], ds[2][4];
            uint2 a[4];
            float hide0[4] = {}, hide1[4] = {};
            if (j == NT - 1) {
                take_hidden(hide0, hide1, table, at.lane);
            }
            score_tile<E8>(s[0], s[1], query, h, keys + j * 16 * LD_QKV, LD_QKV, hide0, hide1, at);
            score_tile<E8>(ds[0], ds[1], gradient, h, values + j * 16 * LD_QKV, LD_QKV, zero, zero, at);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float &v = ds[k / 4][k % 4];
                v = (v + sum[k % 4 / 2].y) * ps_exp2(fmaf(s[k / 4][k % 4], x.scale_log2e, -sum[k % 4 / 2].x));
            }
            pack_operand<float>(a, ds[0], ds[1]);
            mix<E8>(dq, a, h, keys + j * 16 * LD_QKV, LD_QKV, at);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if constexpr (E8) {
                d[k / 4][k % 4] = h.active && h.half == k / 4 ? dq[0][k % 4] : d[k / 4][k % 4];
            } else {
                d[k / 4][k % 4] = dq[k / 4][k % 4];
            }
        }
    }
    scale_rows(d, x.scale);
    pack_operand<float>(da[0], d[0], d[1]);
    at.sync(); /* k and v are each warp's own from here on: their gradients take their places */
#pragma unroll 1
    for (int i = 0; i < heads; i++) {
        const struct head h = head_at(i, z.e, at.q);
        uint2 key[4], value[4];
        float dk[HT][4], dv[HT][4];
        load_head<E8>(key, mine + D, LD_QKV, h);
        load_head<E8>(value, mine + 2 * D, LD_QKV, h);
        clear(dk);
        clear(dv);
#pragma unroll
        for (int j = 0; j < NT; j++) {
            float s[2][4], ds[2][4];
            uint2 a[4];
            const float4 *const sums = (const float4 *)(rows + i * (NT * 16) + j * 16 + at.q * 2);
            const float4 sum[2] = {sums[0], sums[4]};
            float hide0[4] = {}, hide1[4] = {};
            if (NT == 1) { /* what does not see one another: the table is its own transpose */
                take_hidden(hide0, hide1, table, at.lane);
            }
            score_tile<E8>(s[0], s[1], key, h, queries + j * 16 * LD_QKV, LD_QKV, hide0, hide1, at);
            score_tile<E8>(ds[0], ds[1], value, h, d_merged + j * 16 * LD, LD, zero, zero, at);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float &v = s[k / 4][k % 4];
                v = ps_exp2(fmaf(v, x.scale_log2e, k % 2 ? -sum[k / 4].z : -sum[k / 4].x));
                ds[k / 4][k % 4] = (ds[k / 4][k % 4] + (k % 2 ? sum[k / 4].w : sum[k / 4].y)) * v;
            }
            pack_operand<float>(a, s[0], s[1]);
            mix<E8>(dv, a, h, d_merged + j * 16 * LD, LD, at);
            pack_operand<float>(a, ds[0], ds[1]);
            mix<E8>(dk, a, h, queries + j * 16 * LD_QKV, LD_QKV, at);
        }
        /* Keys that do not exist. */
#pragma unroll
        for (int k = 0; k < 4 * HT; k++) {
            dk[k / 4][k % 4] = at.here[k % 4 / 2] ? dk[k / 4][k % 4] : 0.0f;
            dv[k / 4][k % 4] = at.here[k % 4 / 2] ? dv[k / 4][k % 4] : 0.0f;
        }
        __syncwarp(); /* all lanes have the operands */
        put_head<E8>(keys + at.row * LD_QKV, LD_QKV, dk, x.scale, x.scale, h, at);
        put_head<E8>(values + at.row * LD_QKV, LD_QKV, dv, 1.0f, 1.0f, h, at);
    }
    __syncwarp();
    load_a(da[1], mine + D, LD_QKV);
    load_a(da[2], mine + 2 * D, LD_QKV);
    at.sync();
}

/* ---- the kernel ---- */

/* `all` = the operands of the tile's d columns from those of its warps, through right columns of a buffer, where they stay. */
template <int D, int NT>
static __device__ __forceinline__ void gather_columns(uint2 (&all)[D / 16][4], const uint2 (&own)[4], float *buffer,
                                                      const place<float, D, NT> &at)
{
    put_columns<NT>(buffer + columns_size(NT, at.share * 16) + at.row, own, at);
    if constexpr (D == 16) {
        copy_operand(all[0], own);
    } else {
        at.sync();
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            get_columns<NT>(all[k], buffer + columns_size(NT, k * 16) + at.row, at);
        }
    }
}

/* The same where nothing need stay. */
template <int D, int NT>
static __device__ __forceinline__ void gather_rows(uint2 (&all)[D / 16][4], const uint2 (&own)[4], float *buffer,
                                                   const place<float, D, NT> &at)
{
    if constexpr (D == 16) {
        copy_operand(all[0], own);
    } else {
        gather_columns(all, own, buffer, at);
    }
}

/* The operand scale * g, zero where dropped, of the gradient that enters a branch. */
static __device__ __forceinline__ void branch_operand(uint2 (&a)[4], const float (&g)[2][4], float scale, const uint32_t *masks,
                                                      int q)
{
    scale_operand<float>(a, g, scale);
    if (masks) {
        drop_operand(a, *masks >> q);
    }
}

/* dx += the gradient before gelu W_1', 16 columns of the share at a time; the block's sums of W_1, b_1, W_2 and b_2 to or onto
 * sums. M: the unit's; units: the block's. */
template <int D, int NT>
static __device__ __forceinline__ void
feed_forward_backward_tf32(float (&dx)[2][4], const uint2 (&all)[D / 16][4], const uint2 (&dm)[D / 16][4], const uint32_t *masks,
                           float *M, const float *units, float *sums, bool first, const encoder<float> &x, const struct sizes &z,
                           const layer_weights<float, D> &w, const place<float, D, NT> &at)
{
    constexpr int W = sharing(D), COLUMNS = job_columns(D), STAGED = left_size(NT, 16 * W); /* of one kind */
    constexpr struct unit_places to = places_of(D, NT);
    const int share_f = z.f / W, warps = (int)blockDim.x / 32, warp = (int)threadIdx.x / 32;
    float *const bias_sums = sums + (4 * D + 2 * z.f) * D;
    const uint32_t *const hidden_masks = masks + D / 2 + at.share * share_f / 2;
    uint32_t bits = z.drop ? *hidden_masks : 0xffffffffu;
    int turn = 0; /* the warp that has the round's first job */
#pragma unroll 1
    for (int column = 0; column < share_f; column += 16) {
        uint2 hidden[4], d_hidden[4];
        float *const staged = M + column / 16 % 2 * 2 * STAGED, *const d_staged = staged + STAGED;
        const uint32_t kept = bits >> at.q;
        if (z.drop && column + 16 < share_f) {
            bits = hidden_masks[column / 2 + 8];
        }
        hidden_backward(hidden, d_hidden, all, dm, at.share * share_f + column, z, w, at);
        drop_operand(hidden, kept);
        drop_operand(d_hidden, kept);
        put_left<NT>(staged + left_size(NT, at.share * 16) + at.row * 2, hidden, at);
        put_left<NT>(d_staged + left_size(NT, at.share * 16) + at.row * 2, d_hidden, at);
        if constexpr (W == 1) {
            uint2 b[4];
            load_b_transposed(b, lane_b_transposed<4>(w.w_1 + column, z.f + 8, at), z.f + 8);
            ps_mma16<float>(dx[0], d_hidden, b[0], b[1], dx[0]);
            ps_mma16<float>(dx[1], d_hidden, b[2], b[3], dx[1]);
        }
        __syncthreads();
        if constexpr (W > 1) {
#pragma unroll
            for (int i = 0; i < W; i++) {
                uint2 b[4];
                get_left<NT>(d_hidden, d_staged + left_size(NT, i * 16) + at.row * 2, at);
                load_b_transposed(b, lane_b_transposed<4>(w.w_1 + at.share * 16 * (z.f + 8) + i * share_f + column, z.f + 8, at),
                                  z.f + 8);
                ps_mma16<float>(dx[0], d_hidden, b[0], b[1], dx[0]);
                ps_mma16<float>(dx[1], d_hidden, b[2], b[3], dx[1]);
            }
        }
        const bool end = column + 16 == share_f;
        for (int job = warp >= turn ? warp - turn : warp - turn + warps; job < 4 * W + (end ? 1 : 0); job += warps) {
            if (job == 4 * W) {
                columns_sum(bias_sums + 4 * D + z.f, first, units + to.g, to.size, x.block_units, at);
                continue;
            }
            const bool second = job >= 2 * W; /* W_2 */
            const int share = job / 2 % W, part = job % 2 * COLUMNS;
            const int row = 4 * D + (second ? z.f : 0) + share * share_f + column;
            const float *const from = units + to.m + (second ? 0 : STAGED) + (column / 16 % 2) * 2 * STAGED;
            columns_gradient(sums + row * D + part, second || part > 0 ? NULL : bias_sums + row, first,
                             from + left_size(NT, share * 16), units + (second ? to.g : 0) + columns_size(NT, part), to.size,
                             x.block_units, at);
        }
        turn += 4 * W;
        turn = turn >= warps ? turn % warps : turn;
    }
}

template <int D, int NT, bool E8>
static __global__ void __launch_bounds__(most_threads(D)) backward_kernel_tf32(const __grid_constant__ encoder<float> x)
{
    ps_grid_begin();
    constexpr int LD = D + 8, LD_QKV = layer_weights<float, D>::LD_QKV, W = sharing(D), COLUMNS = job_columns(D);
    constexpr struct unit_places to = places_of(D, NT);
    extern __shared__ uint4 shared_memory[];
    float4 *const table = (float4 *)shared_memory;
    char *const weights = (char *)shared_memory + TABLE_BYTES;
    const struct sizes z = sizes_of(x);
    const int bytes = layer_bytes<float>(D, z.f);
    place<float, D, NT> at;
    float *const units = (float *)(weights + x.general.resident * bytes);
    float *const X = units + at.unit * to.size, *const G = X + to.g, *const M = X + to.m, *const qkv = X + to.qkv;
    char *const statistics = (char *)(X + to.statistics);
    const int heads = 16 / z.e, warps = (int)blockDim.x / 32, warp = (int)threadIdx.x / 32;
    fill_table(table, x.n, at);
    /* All layers' weights are there, or those of one, or two by turns. */
    const bool resident = x.general.resident == x.layers, turns = !resident && x.general.resident > 1;
    for (int l = resident ? 0 : x.layers - 1; l < x.layers; l++) {
        stage_layer(x, z, l, layer_weights<float, D>(weights + (resident ? l : 0) * bytes, z.f));
    }
    int slot = 0;
    for (int64_t group = blockIdx.x; group * x.block_units < x.units; group += gridDim.x) {
        const bool first = group == blockIdx.x, last = (group + gridDim.x) * x.block_units >= x.units;
        at.take(x, group * x.block_units + at.unit);
        float g[2][4];
        load_rows(g, (const float *)x.dy, at);
        for (int l = x.layers - 1; l >= 0; l--) {
            const layer_weights<float, D> w(weights + (resident ? l : slot) * bytes, z.f);
            float *const sums = x.sums.partial + ((int64_t)blockIdx.x * x.layers + l) * layer_sums(D, z.f);
            float *const bias_sums = sums + (4 * D + 2 * z.f) * D;
            /* Units beyond the last read some masks: their gradients are zero. */
            const uint32_t *const masks = !z.drop ? NULL : at.global_tile < x.units * NT ? masks_at(x, z, l, at) : x.masks + at.g;
            uint2 all[D / 16][4], a[4];
            float rstd[2], dx[2][4], v[2][4];

            /* y = r + drop(hidden W_2 + b_2) */
            load_rows(dx, x.general.r + l * x.rows * D, at);
            if (first && l == x.layers - 1) {
                ps_copy_wait();
                for (int i = resident ? 0 : l; i < x.layers; i++) {
                    round_layer(z, layer_weights<float, D>(weights + (resident ? i : 0) * bytes, z.f));
                }
            }
            __syncthreads(); /* the layer before has done with all buffers */
            if (!resident && !turns && !(first && l == x.layers - 1)) {
                stage_layer(x, z, l, w);
                ps_copy_wait();
                round_layer(z, w);
                __syncthreads();
            }
            slot ^= turns ? 1 : 0;
            const bool fetch = turns && !(last && l == 0);
            const layer_weights<float, D> next(weights + slot * bytes, z.f);
            if (fetch) {
                stage_layer(x, z, l > 0 ? l - 1 : x.layers - 1, next);
            }
            normalise(v, rstd, dx, x.epsilon, statistics_at(statistics, 0, at), at);
            pack_operand<float>(a, v[0], v[1]);
            put_columns<NT>(X + columns_size(NT, at.share * 16) + at.row, a, at);
            scale_shift<float>(a, v, w.ln2_gamma + at.share * 16, w.ln2_beta + at.share * 16, at.q);
            gather_rows(all, a, M, at);
            clear(dx);
            {
                uint2 dm[D / 16][4];
                branch_operand(a, g, x.drop_scale * x.half_scale, z.drop ? masks + (D / 16 + z.f / 16 + at.share) * 8 : NULL, at.q);
                gather_columns(dm, a, G, at);
                feed_forward_backward_tf32(dx, all, dm, masks, M, units, sums, first, x, z, w, at);
            }
            get_columns<NT>(a, X + columns_size(NT, at.share * 16) + at.row, at);
            normalise_backward(g, dx, w.ln2_gamma + at.share * 16, a, rstd, statistics_at(statistics, 1, at), at);
            load_rows(v, x.general.merged + l * x.rows * D, at);
            __syncthreads();

            /* r = u + drop(merged W_o + b_o) */
            branch_operand(a, g, x.drop_scale, z.drop ? masks + at.share * 8 : NULL, at.q);
            gather_rows(all, a, M, at);
            clear(dx);
            multiply_transposed(dx, all, w.w_o + at.share * 16 * LD, LD, at);
            pack_operand<float>(a, dx[0], dx[1]);
            store_operand(X + at.row * LD + at.share * 16, LD, a, at);
            float2 *const rows = (float2 *)(X + to.rows) + at.share * heads * (NT * 16);
            put_sums(rows, v, dx, x.lse + ((int64_t)l * x.heads + at.share * heads) * x.rows + at.first, x, z, at);
            load_rows(dx, (const float *)x.u + l * x.rows * D, at);
            if (W == 1) {
                pack_operand<float>(a, v[0], v[1]);
                put_columns<NT>(M + columns_size(NT, at.share * 16) + at.row, a, at);
            }
            normalise(v, rstd, dx, x.epsilon, statistics_at(statistics, 2, at), at);
            pack_operand<float>(a, v[0], v[1]);
            put_columns<NT>(G + columns_size(NT, at.share * 16) + at.row, a, at);
            scale_shift<float>(a, v, w.ln1_gamma + at.share * 16, w.ln1_beta + at.share * 16, at.q);
            gather_rows(all, a, M, at);
            project(qkv, all, w, at);
            at.sync();
            uint2 da[3][4];
            attention_backward_tf32<E8>(da, rows, qkv, X, table, x, z, at);
            branch_operand(a, g, x.drop_scale, z.drop ? masks + at.share * 8 : NULL, at.q);
            put_left<NT>(X + left_size(NT, at.share * 16) + at.row * 2, a, at);
            if (W > 1) { /* M is free now */
                load_rows(v, x.general.merged + l * x.rows * D, at);
                pack_operand<float>(a, v[0], v[1]);
                put_columns<NT>(M + columns_size(NT, at.share * 16) + at.row, a, at);
            }
#pragma unroll
            for (int i = 0; i < 3; i++) {
                put_left<NT>(qkv + left_size(NT, i * D + at.share * 16) + at.row * 2, da[i], at);
            }
            if (W > 1) {
                at.sync();
            }
            clear(dx);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                if constexpr (W > 1) {
#pragma unroll
                    for (int k = 0; k < W; k++) {
                        get_left<NT>(all[k], qkv + left_size(NT, i * D + k * 16) + at.row * 2, at);
                    }
                } else {
                    copy_operand(all[0], da[i]);
                }
                multiply_transposed(dx, all, w.w_qkv + at.share * 16 * LD_QKV + i * D, LD_QKV, at);
            }
            get_columns<NT>(a, G + columns_size(NT, at.share * 16) + at.row, at);
            normalise_backward(g, dx, w.ln1_gamma + at.share * 16, a, rstd, statistics_at(statistics, 3, at), at);
            if (fetch) {
                ps_copy_wait();
                round_layer(z, next);
            }
            __syncthreads();
            for (int job = warp; job < 8 * W; job += warps) {
                const int row = job / 2 * 16, part = job % 2 * COLUMNS;
                const bool of_o = row >= 3 * D;
                columns_gradient(sums + row * D + part, part > 0 ? NULL : bias_sums + row, first,
                                 units + (of_o ? left_size(NT, row - 3 * D) : to.qkv + left_size(NT, row)),
                                 units + (of_o ? to.m : to.g) + columns_size(NT, part), to.size, x.block_units, at);
            }
            if (l == 0 && x.embed.partial) {
                const int pitch = embed_pitch(D, x.embed.patch);
                __syncthreads();
                stage_patches(M, x, group * x.block_units + at.unit, at);
                embed_operand(a, g, x, z.drop, at);
                store_operand(M + at.row * pitch + at.share * 16, pitch, a, at);
                ps_copy_wait();
                __syncthreads();
                for (int job = warp; job < embed_jobs<D>(x); job += warps) {
                    embed_gradient(x, job, units + to.m, to.size, first, at);
                }
            }
        }
        if (!x.embed.partial) {
            store_rows((float *)x.du, g, at);
        }
    }
}

} // namespace ps_resident

#endif
