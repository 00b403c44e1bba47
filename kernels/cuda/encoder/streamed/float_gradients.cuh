/* Weights' gradients of all layers, and of the embedding: products over splits of the rows, and the splits' sums. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_GRADIENTS_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_GRADIENTS_CUH

#include "kernels/cuda/encoder/streamed/float_tile.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace PS_REAL16_SPACE
{

enum { EDGE = 64, DEEP = 32, STAGES = 3, PRODUCT_THREADS = 128 };

/* Copies of DEEP rows of EDGE columns after another, a thread's 16 bytes of every 8th row. */
struct staging {
    const float *from;
    int64_t left; /* rows, less the thread's first */
    int ld;
    uint32_t to; /* in the first stage */

    __device__ __forceinline__ staging(const float *matrix, int ld_, int64_t rows, const float *stage) : ld(ld_)
    {
        const int row = (int)threadIdx.x / (EDGE / 4), column = (int)threadIdx.x % (EDGE / 4) * 4;
        from = matrix + (int64_t)row * ld + column;
        left = rows - row;
        to = ps_shared_address(stage + row * EDGE + (column ^ turn(row)));
    }
    /* The next ones; zeros beyond the last row. */
    __device__ __forceinline__ void copy(int stage)
    {
        constexpr int STEP = PRODUCT_THREADS / (EDGE / 4);
#pragma unroll
        for (int i = 0; i < DEEP / STEP; i++) {
            const bool here = i * STEP < left;
            ps_copy_async_part(to + (uint32_t)(stage * 2 * DEEP + i * STEP) * EDGE * 4, here ? from + i * STEP * ld : from,
                               here ? 16 : 0);
        }
        from += left > DEEP ? DEEP * ld : 0;
        left -= DEEP;
    }
};

/* The same of the embedding's left columns: the patch, then one in that of W_pos's row. A thread has a column of every other row.
 */
struct placing {
    enum { STEP = PRODUCT_THREADS / EDGE };
    const float *from;
    int64_t left;
    float *to;
    int patch, n, position; /* N; the row's patch, less the column's */
    bool copies;

    __device__ __forceinline__ placing(const struct floats &x, int64_t first, int64_t rows, float *stage)
    {
        const int column = (int)threadIdx.x % EDGE, row = (int)threadIdx.x / EDGE;
        patch = x.embed.patch;
        n = x.n;
        copies = column < patch;
        from = x.embed.patches + (first + row) * patch + column;
        left = rows - row;
        to = stage + row * EDGE + (column ^ turn(row)); /* turned otherwise from row to row: see copy */
        position = (int)((first + row) % n) + patch - column;
    }
    __device__ __forceinline__ void copy(int stage)
    {
        const int column = (int)threadIdx.x % EDGE, row = (int)threadIdx.x / EDGE;
        float *const at = to - (column ^ turn(row)) + stage * 2 * DEEP * EDGE;
#pragma unroll
        for (int i = 0; i < DEEP / STEP; i++) {
            const bool here = i * STEP < left;
            float *const p = at + i * STEP * EDGE + (column ^ turn(row + i * STEP));
            if (copies) {
                ps_copy_async4_if(p, here ? from + i * STEP * patch : from, here);
            } else {
                *p = here && position == 0 ? 1.0f : 0.0f;
            }
            position += STEP;
            position -= position >= patch + n - column ? n : 0;
            position -= position >= patch + n - column ? n : 0; /* N 1 */
        }
        from += left > DEEP ? DEEP * patch : 0;
        left -= DEEP;
    }
};

/* A tile of 64 x 64 of a layer's G over a split of the rows (blockIdx.y), by four warps of 32 x 32; tiles in the first column of
 * tiles of rows sum up the columns of dy too. */
static __global__ void __launch_bounds__(PRODUCT_THREADS, 4) products(const __grid_constant__ struct float_sums x)
{
    ps_grid_begin();
    __shared__ __align__(16) float stages[STAGES][2][DEEP * EDGE];
    const struct floats &o = x.of;
    const int d = x.d, f = o.f, wide = d / EDGE, deep = f / EDGE;
    const int per_layer = 4 * wide * wide + 2 * wide * deep, layer = (int)blockIdx.x / per_layer;
    int i = (int)blockIdx.x % per_layer;
    const bool embedding = layer == o.layers;
    const int which = embedding ? 4 : i < 3 * wide * wide ? 0 : i < 4 * wide * wide ? 1 : i < 4 * wide * wide + wide * deep ? 2 : 3;
    i -= which == 0 || embedding ? 0 : which == 1 ? 3 * wide * wide : which == 2 ? 4 * wide * wide : 4 * wide * wide + wide * deep;
    const int m = embedding ? EDGE : which == 3 ? f : d, n = which == 0 ? 3 * d : which == 2 ? f : d;
    const int tiles_n = n / EDGE, row = i / tiles_n * EDGE, column = i % tiles_n * EDGE;
    const int64_t kept = embedding ? 0 : layer * o.kept_layer, begin = (int64_t)blockIdx.y * x.split_rows;
    const int64_t rows = o.rows - begin < x.split_rows ? o.rows - begin : x.split_rows;
    const float *const l_all = which == 0 ? o.xhat1 : which == 1 ? o.merged : which == 2 ? o.xhat2 : o.hidden;
    const float *const r_all = embedding    ? o.du
                               : which == 0 ? o.qkv
                               : which == 1 ? o.masked_o
                               : which == 2 ? o.d_hidden
                                            : o.masked_2;
    placing positions(o, begin, rows, stages[0][0]);
    staging left(l_all + kept + begin * m + row, m, rows, stages[0][0]),
        right(r_all + kept + begin * n + column, n, rows, stages[0][1]);
    const int steps = rows <= 0 ? 0 : (int)((rows + DEEP - 1) / DEEP);
    const lane_place at;
    const int down = at.warp / 2 * 32, across = at.warp % 2 * 32;
    const bool sums = row == 0 && down == 0;
    /* The lane's four columns: of a rows g and g + 8 of two tiles of 16, of b one of four tiles of 8. */
    const int even = 2 * at.q * EDGE, moved = turn(2 * at.q), odd = even + EDGE, moved_odd = turn(2 * at.q + 1);
    float c[2][4][4], column_sum[4] = {0, 0, 0, 0};
    clear(c[0]);
    clear(c[1]);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) {
            embedding ? positions.copy(s) : left.copy(s);
            right.copy(s);
        }
        ps_copy_commit();
    }
    int now = 0; /* the stage */
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        ps_copy_wait_group<STAGES - 2>();
        __syncthreads();
        if (s + STAGES - 1 < steps) {
            const int ahead = now == 0 ? STAGES - 1 : now - 1;
            embedding ? positions.copy(ahead) : left.copy(ahead);
            right.copy(ahead);
        }
        ps_copy_commit();
        const float *const l = stages[now][0], *const r = stages[now][1];
        now = now + 1 == STAGES ? 0 : now + 1;
#pragma unroll
        for (int k = 0; k < DEEP; k += 8) {
            float a[2][4], b[2][4];
            ps_load<4>(a[0], l + k * EDGE + even + ((down + 4 * at.g) ^ moved));
            ps_load<4>(a[1], l + k * EDGE + odd + ((down + 4 * at.g) ^ moved_odd));
            ps_load<4>(b[0], r + k * EDGE + even + ((across + 4 * at.g) ^ moved));
            ps_load<4>(b[1], r + k * EDGE + odd + ((across + 4 * at.g) ^ moved_odd));
            if (sums) {
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    column_sum[t] += b[0][t] + b[1][t];
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float both[4] = {a[0][2 * h], a[0][2 * h + 1], a[1][2 * h], a[1][2 * h + 1]};
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    multiply_add(c[h][t], both, b[0][t], b[1][t]);
                }
            }
        }
    }
    const struct sum_places places = sums_of(d, f);
    float *const to = x.parts + blockIdx.y * x.split_floats + (int64_t)layer * places.all;
    const int w_at = embedding ? 0 : places.w[which], b_at = embedding ? EDGE * d : places.b[which];
#pragma unroll
    for (int h = 0; h < 4; h++) {
        float *const out = to + w_at + (row + down + 4 * at.g + h) * n + column + across + 8 * at.q;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                v[t] = c[h / 2][t][h % 2 * 2 + i];
            }
            ps_store<4>(out + 4 * i, v);
        }
    }
    if (sums) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            column_sum[t] = ps_group_sum<4>(column_sum[t]);
        }
        if (at.q == 0) {
            ps_store<4>(to + b_at + column + across + 4 * at.g, column_sum);
        }
    }
}

/* The sum of from[0], from[step], .., `count` of them, in that order; many are on their way at once. */
template <typename V> static __device__ __forceinline__ V sum_parts(const V *from, int64_t step, int count)
{
    constexpr int FLIGHT = 10;
    V sum = V();
    for (int begin = 0; begin < count; begin += FLIGHT) {
        V v[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            v[i] = begin + i < count ? __ldcg(from + (begin + i) * step) : V();
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            if constexpr (sizeof(V) == sizeof(float)) {
                sum += v[i];
            } else {
                sum.x += v[i].x;
                sum.y += v[i].y;
            }
        }
    }
    return sum;
}

enum { SUM_THREADS = 256, SUM_ROWS = 2, SUM_WARPS = SUM_THREADS / 32 / SUM_ROWS /* a row's */ };

/* Rows `row` .. + SUM_ROWS - 1 of the embedding's, of P + N and b_P's. */
static __device__ __forceinline__ void sum_embedding(const struct float_sums &x, int row, const float *parts)
{
    const struct float_embedding &e = x.of.embed;
    for (int i = (int)threadIdx.x; i < SUM_ROWS * x.d; i += SUM_THREADS) {
        const int r = row + i / x.d, column = i % x.d;
        if (r <= e.patch + x.of.n) {
            const bool bias = r == e.patch + x.of.n;
            float *const to = bias ? e.d_bias : r < e.patch ? e.d_weight + r * x.d : e.d_position + (r - e.patch) * x.d;
            to[column] += sum_parts(parts + (bias ? EDGE : r) * x.d + column, x.split_floats, x.splits);
        }
    }
}

/* gradients += the sums of the splits' parts, in their order, LayerNorm's share included (the file's head); a warp a row of a
 * weight. 4 bytes a part read. */
static __global__ void __launch_bounds__(SUM_THREADS, 4) sum_up(const __grid_constant__ struct float_sums x)
{
    ps_grid_begin();
    __shared__ float sums[MOST_HIDDEN];
    __shared__ float2 vectors[SUM_ROWS][SUM_WARPS];
    const struct floats &o = x.of;
    const int d = x.d, f = o.f, layer = (int)blockIdx.y;
    const struct sum_places places = sums_of(d, f);
    int row = (int)blockIdx.x * SUM_ROWS;
    const int which = row >= 3 * d ? 3 : row / d;
    row -= layer == o.layers ? 0 : which * d;
    const int n = which == 0 ? 3 * d : which == 2 ? f : d;
    const float *const parts = x.parts + (int64_t)layer * places.all;
    const int64_t split = x.split_floats;
    if (layer == o.layers) {
        sum_embedding(x, row, parts);
        return;
    }
    const bool normalised = which % 2 == 0;
    const struct ps_encoder_layout &at = o.at;
    const int64_t matrix = layer * at.matrix_stride, vector = layer * at.vector_stride;
    const int64_t weights[4] = {at.w_qkv, at.w_o, at.w_1, at.w_2}, biases[4] = {at.b_qkv, at.b_o, at.b_1, at.b_2};
    if (normalised || row == 0) {
        for (int i = (int)threadIdx.x; i < n; i += SUM_THREADS) {
            const float sum = sum_parts(parts + places.b[which] + i, split, x.splits);
            sums[i] = sum;
            if (row == 0) {
                x.gradients[vector + biases[which] + i] += sum;
            }
        }
    }
    __syncthreads();
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    row += warp / SUM_WARPS;
    const float *const part = parts + places.w[which] + row * n;
    float *const to = x.gradients + matrix + weights[which] + (int64_t)row * n;
    const float *const w = o.parameters + matrix + weights[which] + (int64_t)row * n;
    const int64_t gamma = vector + (which == 0 ? at.ln1_gamma : at.ln2_gamma) + row,
                  beta = vector + (which == 0 ? at.ln1_beta : at.ln2_beta) + row;
    const float scale = normalised ? o.parameters[gamma] : 1.0f, shift = normalised ? o.parameters[beta] : 0.0f;
    float d_gamma = 0, d_beta = 0;
    for (int i = (warp % SUM_WARPS * 32 + lane) * 2; i < n; i += SUM_WARPS * 64) {
        float2 g = sum_parts((const float2 *)(part + i), split / 2, x.splits);
        float2 *const p = (float2 *)(to + i), old = *p;
        if (normalised) {
            const float2 v = *(const float2 *)(w + i), s = *(const float2 *)(sums + i);
            d_gamma += v.x * g.x + v.y * g.y;
            d_beta += v.x * s.x + v.y * s.y;
            g = make_float2(fmaf(scale, g.x, shift * s.x), fmaf(scale, g.y, shift * s.y));
        }
        *p = make_float2(old.x + g.x, old.y + g.y);
    }
    if (normalised) {
        d_gamma = ps_group_sum<32>(d_gamma);
        d_beta = ps_group_sum<32>(d_beta);
        if (lane == 0) {
            vectors[warp / SUM_WARPS][warp % SUM_WARPS] = make_float2(d_gamma, d_beta);
        }
        __syncthreads();
        if (lane == 0 && warp % SUM_WARPS == 0) {
            float2 sum = vectors[warp / SUM_WARPS][0];
            for (int i = 1; i < SUM_WARPS; i++) {
                sum.x += vectors[warp / SUM_WARPS][i].x;
                sum.y += vectors[warp / SUM_WARPS][i].y;
            }
            x.gradients[gamma] += sum.x;
            x.gradients[beta] += sum.y;
        }
    }
}

} // namespace PS_REAL16_SPACE

#endif
