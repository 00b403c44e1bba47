/* Attention of a tile's sequences, and its gradients; what it reads lies in shared memory by rows. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_ATTENTION_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_ATTENTION_CUH

#include "kernels/cuda/encoder/streamed/float_tile.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace PS_REAL16_SPACE
{

/* A job is a head and 16 rows: of one sequence, with all of its rows as keys; or, of short sequences, the tile's next 16, with the
 * rows of all sequences that these belong to. */
template <int E> struct job {
    static constexpr int HEADS = D / E, PARTS = E / 8, MOST = 8; /* tiles of keys: N <= 64 */
    int head, base, tiles;                                       /* the first key's row in the tile; tiles of 8 keys */
    int row[2], seen[2]; /* the lane's rows g and g + 8 in the tile; the first of the N keys, less base, that each sees */
    bool here[2];
    int whole; /* tiles of keys that every row sees */

    static __device__ __forceinline__ bool together(int n)
    {
        return n <= 16;
    }
    static __device__ __forceinline__ int count(int sequences, int n)
    {
        return HEADS * (together(n) ? (sequences * n + 15) / 16 : sequences * ((n + 15) / 16));
    }
    __device__ __forceinline__ job(int i, int n, int count, const lane_place &at)
    {
        head = i % HEADS;
        i /= HEADS;
        if (together(n)) {
            const int first = i * 16, last = min(first + 15, count - 1);
            base = first / n * n;
            tiles = (last / n * n + n - base + 7) / 8;
            whole = 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                row[h] = first + at.g + 8 * h;
                here[h] = row[h] < count;
                seen[h] = row[h] / n * n - base;
            }
        } else {
            const int parts = (n + 15) / 16, first = i % parts * 16 + at.g;
            base = i / parts * n;
            tiles = (n + 7) / 8;
            whole = n / 8;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                here[h] = first + 8 * h < n;
                row[h] = min(base + first + 8 * h, ROWS - 1);
                seen[h] = 0;
            }
        }
    }
    /* Whether row h sees column `column` of the keys. */
    __device__ __forceinline__ bool sees(int h, int column, int n) const
    {
        return (unsigned)(column - seen[h]) < (unsigned)n;
    }
};

/* The lane's pair of 8 columns of a row. */
static __device__ __forceinline__ float2 pair_of(const float *from, int ld, int row, int column, const lane_place &at)
{
    return *(const float2 *)(from + row * ld + (column ^ turn(row)) + 2 * at.q);
}

/* A left operand of the lane's two rows. */
static __device__ __forceinline__ void take_left(float (&a)[4], const float *from, int ld, const int (&row)[2], int column,
                                                 const lane_place &at)
{
    const float2 low = pair_of(from, ld, row[0], column, at), high = pair_of(from, ld, row[1], column, at);
    a[0] = low.x;
    a[1] = high.x;
    a[2] = low.y;
    a[3] = high.y;
}

/* Right operands of PARTS times 8 columns: where the lane finds them, 8 rows further each time. By rows: products with the
 * transpose. */
template <int PARTS> struct right_rows {
    const float *from[PARTS];
    __device__ __forceinline__ right_rows(const float *b, int ld, int row, int column, const lane_place &at)
    {
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            from[t] = b + (row + at.g) * ld + ((column + 8 * t) ^ turn(row + at.g)) + 2 * at.q;
        }
    }
    __device__ __forceinline__ float2 at(int t, int further) const
    {
        return *(const float2 *)(from[t] + further);
    }
};

template <int PARTS> struct right_columns {
    const float *even[PARTS], *odd[PARTS];
    __device__ __forceinline__ right_columns(const float *b, int ld, int row, int column, const lane_place &at)
    {
        const int r = row + 2 * at.q;
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            even[t] = b + r * ld + ((column + 8 * t) ^ turn(r)) + at.g;
            odd[t] = b + (r + 1) * ld + ((column + 8 * t) ^ turn(r + 1)) + at.g;
        }
    }
};

/* c += p b of 8 rows of b; p an accumulator's four. */
template <int PARTS>
static __device__ __forceinline__ void mix(float (&c)[PARTS][4], const float (&p)[4], const right_columns<PARTS> &b, int further)
{
    const float a[4] = {operand(p[0]), operand(p[2]), operand(p[1]), operand(p[3])};
#pragma unroll
    for (int t = 0; t < PARTS; t++) {
        multiply_add(c[t], a, b.even[t][further], b.odd[t][further]);
    }
}

/* merged = softmax(q k') v. qkv: in shared memory; to: merged as fragments; merged, logsum: in memory, of the tile's first row on;
 * or NULL. */
template <int E>
static __device__ __forceinline__ void attend(float *to, const float *qkv, float *merged, float *logsum, int group,
                                              const struct floats &x, int sequences, const lane_place &at)
{
    typedef job<E> J;
    constexpr int LD = QKV, PARTS = J::PARTS;
    for (int i = at.warp; i < J::count(sequences, x.n); i += WARPS) {
        const J j(i, x.n, sequences * x.n, at);
        float query[PARTS][4];
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            take_left(query[t], qkv, LD, j.row, j.head * E + t * 8, at);
        }
        const right_rows<PARTS> keys(qkv, LD, j.base, D + j.head * E, at);
        const right_columns<PARTS> values(qkv, LD, j.base, 2 * D + j.head * E, at);
        float s[J::MOST][4], high[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < J::MOST; k++) {
            if (k < j.tiles) {
                s[k][0] = s[k][1] = s[k][2] = s[k][3] = 0;
#pragma unroll
                for (int t = 0; t < PARTS; t++) {
                    const float2 key = keys.at(t, k * 8 * LD);
                    multiply_add(s[k], query[t], key.x, key.y);
                }
                if (k >= j.whole) {
#pragma unroll
                    for (int l = 0; l < 4; l++) {
                        s[k][l] = j.sees(l / 2, k * 8 + 2 * at.q + l % 2, x.n) ? s[k][l] : -INFINITY;
                    }
                }
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    high[l / 2] = fmaxf(high[l / 2], s[k][l]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            high[h] = ps_group_max<4>(high[h]) * x.scale_log2e;
        }
        float o[PARTS][4] = {};
#pragma unroll
        for (int k = 0; k < J::MOST; k++) {
            if (k < j.tiles) {
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] = ps_exp2(fmaf(s[k][l], x.scale_log2e, -high[l / 2]));
                    sum[l / 2] += s[k][l];
                }
                mix<PARTS>(o, s[k], values, k * 8 * LD);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = ps_group_sum<4>(sum[h]);
            const float part = 1.0f / sum[h];
            if (j.here[h]) {
                const int row = j.row[h];
#pragma unroll
                for (int t = 0; t < PARTS; t++) {
                    const float2 v = make_float2(o[t][2 * h] * part, o[t][2 * h + 1] * part);
                    const int column = group * (GROUP / 8) + j.head * (E / 8) + t; /* of fragments */
                    float *p =
                        to + ((row / 16 * (D / 8) + column) * 32 + ((row % 8 * 4 + at.q) ^ (column & 1) << 2)) * 4 + row / 8 % 2;
                    p[0] = operand(v.x);
                    p[2] = operand(v.y);
                    if (merged) {
                        *(float2 *)(merged + row * D + j.head * E + t * 8 + 2 * at.q) = make_float2(rounded(v.x), rounded(v.y));
                    }
                }
                if (logsum && at.q == 0) {
                    logsum[j.head * x.rows + row] = high[h] + ps_log2(sum[h]);
                }
            }
        }
    }
}

/* The gradient of q, to memory (d_qkv: rows of 3 d), and sum_j A dA of each row. qkv, gradient (of merged, rows of d): in shared
 * memory; sums [2, heads, rows]: logarithms of softmax's sums, and the other sums. */
template <int E>
static __device__ __forceinline__ void attend_queries(float *d_qkv, float *sums, const float *qkv, const float *gradient, int group,
                                                      const struct floats &x, int sequences, const lane_place &at)
{
    typedef job<E> J;
    constexpr int LD = QKV, PARTS = J::PARTS;
    for (int i = at.warp; i < J::count(sequences, x.n); i += WARPS) {
        const J j(i, x.n, sequences * x.n, at);
        float query[PARTS][4], d_merged[PARTS][4];
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            take_left(query[t], qkv, LD, j.row, j.head * E + t * 8, at);
            take_left(d_merged[t], gradient, D, j.row, group * GROUP + j.head * E + t * 8, at);
        }
        const right_rows<PARTS> keys(qkv, LD, j.base, D + j.head * E, at), values(qkv, LD, j.base, 2 * D + j.head * E, at);
        float *const logs = sums + j.head * ROWS, *const dots = logs + J::HEADS * ROWS;
        /* A row that does not exist has no part in anything. */
        const float log_sum[2] = {j.here[0] ? logs[j.row[0]] : 1e30f, j.here[1] ? logs[j.row[1]] : 1e30f};
        float s[J::MOST][4], d[J::MOST][4], dot[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < J::MOST; k++) {
            if (k < j.tiles) {
                s[k][0] = s[k][1] = s[k][2] = s[k][3] = 0;
                d[k][0] = d[k][1] = d[k][2] = d[k][3] = 0;
#pragma unroll
                for (int t = 0; t < PARTS; t++) {
                    const float2 key = keys.at(t, k * 8 * LD), value = values.at(t, k * 8 * LD);
                    multiply_add(s[k], query[t], key.x, key.y);
                    multiply_add(d[k], d_merged[t], value.x, value.y);
                }
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] = ps_exp2(fmaf(s[k][l], x.scale_log2e, -log_sum[l / 2]));
                }
                if (k >= j.whole) {
#pragma unroll
                    for (int l = 0; l < 4; l++) {
                        s[k][l] = j.sees(l / 2, k * 8 + 2 * at.q + l % 2, x.n) ? s[k][l] : 0.0f;
                    }
                }
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    dot[l / 2] = fmaf(s[k][l], d[k][l], dot[l / 2]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            dot[h] = ps_group_sum<4>(dot[h]);
            if (j.here[h] && at.q == 0) {
                dots[j.row[h]] = dot[h];
            }
        }
        const right_columns<PARTS> by_column(qkv, LD, j.base, D + j.head * E, at);
        float dq[PARTS][4] = {};
#pragma unroll
        for (int k = 0; k < J::MOST; k++) {
            if (k < j.tiles) {
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] *= d[k][l] - dot[l / 2];
                }
                mix<PARTS>(dq, s[k], by_column, k * 8 * LD);
            }
        }
#pragma unroll
        for (int t = 0; t < PARTS * 2; t++) {
            if (j.here[t % 2]) {
                *(float2 *)(d_qkv + (int64_t)j.row[t % 2] * QKV + j.head * E + t / 2 * 8 + 2 * at.q) =
                    make_float2(rounded(dq[t / 2][t % 2 * 2] * x.scale), rounded(dq[t / 2][t % 2 * 2 + 1] * x.scale));
            }
        }
    }
}

/* Those of k and v, from scores computed again, transposed: the job's rows are keys, its columns queries. */
template <int E>
static __device__ __forceinline__ void attend_keys(float *d_qkv, const float *sums, const float *qkv, const float *gradient,
                                                   int group, const struct floats &x, int sequences, const lane_place &at)
{
    typedef job<E> J;
    constexpr int LD = QKV, PARTS = J::PARTS;
    for (int i = at.warp; i < J::count(sequences, x.n); i += WARPS) {
        const J j(i, x.n, sequences * x.n, at);
        const int wide = group * GROUP + j.head * E;
        float key[PARTS][4], value[PARTS][4];
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            take_left(key[t], qkv, LD, j.row, D + j.head * E + t * 8, at);
            take_left(value[t], qkv, LD, j.row, 2 * D + j.head * E + t * 8, at);
        }
        const right_rows<PARTS> queries(qkv, LD, j.base, j.head * E, at), d_merged(gradient, D, j.base, wide, at);
        const right_columns<PARTS> query_columns(qkv, LD, j.base, j.head * E, at), d_merged_columns(gradient, D, j.base, wide, at);
        const float *const logs = sums + j.head * ROWS + j.base + 2 * at.q, *const dots = logs + J::HEADS * ROWS;
        float dk[PARTS][4] = {}, dv[PARTS][4] = {};
#pragma unroll 2
        for (int k = 0; k < j.tiles; k++) {
            float s[4] = {}, d[4] = {};
#pragma unroll
            for (int t = 0; t < PARTS; t++) {
                const float2 query = queries.at(t, k * 8 * LD), of = d_merged.at(t, k * 8 * D);
                multiply_add(s, key[t], query.x, query.y);
                multiply_add(d, value[t], of.x, of.y);
            }
#pragma unroll
            for (int l = 0; l < 4; l++) {
                s[l] = ps_exp2(fmaf(s[l], x.scale_log2e, -logs[k * 8 + l % 2]));
                d[l] = s[l] * (d[l] - dots[k * 8 + l % 2]);
            }
            if (k >= j.whole) {
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    const bool sees = j.sees(l / 2, k * 8 + 2 * at.q + l % 2, x.n);
                    s[l] = sees ? s[l] : 0.0f;
                    d[l] = sees ? d[l] : 0.0f;
                }
            }
            mix<PARTS>(dv, s, d_merged_columns, k * 8 * D);
            mix<PARTS>(dk, d, query_columns, k * 8 * LD);
        }
#pragma unroll
        for (int t = 0; t < PARTS * 2; t++) {
            if (j.here[t % 2]) {
                float *to = d_qkv + (int64_t)j.row[t % 2] * QKV + j.head * E + t / 2 * 8 + 2 * at.q;
                *(float2 *)(to + D) =
                    make_float2(rounded(dk[t / 2][t % 2 * 2] * x.scale), rounded(dk[t / 2][t % 2 * 2 + 1] * x.scale));
                *(float2 *)(to + 2 * D) = make_float2(rounded(dv[t / 2][t % 2 * 2]), rounded(dv[t / 2][t % 2 * 2 + 1]));
            }
        }
    }
}

/* A group's columns of q, k and v of the tile's rows, in memory 3 d apart, as operands to rows of shared memory; rows that do not
 * exist are zero. */
static __device__ __forceinline__ void fetch_group(float *to, const float *from, int count)
{
    constexpr int PIECES = QKV / 4;
    static_assert(ROWS * PIECES % THREADS == 0, "the same for all threads");
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / THREADS; i++) {
        const int piece = i * THREADS + (int)threadIdx.x, row = piece / PIECES, column = piece % PIECES * 4;
        float v[4] = {};
        if (row < count) {
            ps_load<4>(v, from + (int64_t)row * (3 * D) + column / GROUP * D + column % GROUP);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = operand(v[j]);
        }
        ps_store<4>(to + row * QKV + (column ^ turn(row)), v);
    }
}

/* No NaN from before the kernel where attention reads beyond a tile's rows. */
static __device__ __forceinline__ void clear_beyond(float *b, float *c)
{
    for (int i = (int)threadIdx.x; i < 8 * (D + QKV); i += THREADS) {
        (i < 8 * D ? b + ROWS * D : c + ROWS * QKV - 8 * D)[i] = 0;
    }
}

} // namespace PS_REAL16_SPACE

#endif
