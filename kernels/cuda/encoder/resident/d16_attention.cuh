/* Attention of d_model 16 and heads of 4 columns: a warp's 16 queries and, backward, keys of a sequence in TILES tiles, whose q, k
 * and v lie in shared memory as 8 x 8 matrices. Two heads are a pair of 8 columns: a lane's two columns are the first one's where
 * its q (place) is below 2. q has been scaled by log2(e) / sqrt(e). */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_ATTENTION_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_ATTENTION_CUH

#include "kernels/cuda/encoder/resident/d16_units.cuh"

namespace ps_resident
{

/* Residual attention's: q and k of the layers below, whose scores are added, in shared memory, two matrices each. The lane's places
 * in the first one's: where it loads matrices of all rows, and of the warp's. */
struct d16_pieces {
    uint32_t all, own;
    int count, row, bytes; /* layers; bytes of a row of matrices, and of a layer's */
};
enum { PIECE_KEYS = 2 * MATRIX }; /* from q's to k's */

/* Of none. */
struct d16_alone {
};
template <class PIECES> static constexpr bool IS_ALONE = std::is_same<PIECES, struct d16_alone>::value;

/* s += the pieces' scores of pair p, of the head whose lanes `mine` says. */
template <int TILES, class T>
static __device__ __forceinline__ void add_scores(float (&s)[2 * TILES][4], const struct d16_pieces &pieces, int p, bool mine)
{
#pragma unroll 1
    for (int j = 0; j < pieces.count; j++) {
        uint32_t q[2], keys[2 * TILES];
        ps_ldmatrix2_at(q, pieces.own + j * pieces.bytes + p * MATRIX);
        load_matrices<false, TILES>(keys, pieces.all + PIECE_KEYS + j * pieces.bytes + p * MATRIX, pieces.row);
#pragma unroll
        for (int t = 0; t < 2 * TILES; t++) {
            ps_mma8<T>(s[t], mine ? q[0] : 0, mine ? q[1] : 0, keys[t], s[t]);
        }
    }
}

/* o = sum over keys of exp2(s) v, sum = that of exp2(s), most = what was taken off s: 0 unless MOST. s is begun by a's product with
 * the keys. last: ones for the last tile's keys that exist. */
template <bool MOST, int TILES, class T, class PIECES>
static __device__ __forceinline__ void attend(float (&o)[4], float (&sum)[4], float (&most)[2], uint32_t a0, uint32_t a1,
                                              const uint32_t (&keys)[2 * TILES], const uint32_t (&values)[2 * TILES],
                                              const PIECES &pieces, int p, bool mine, const uint32_t (&last)[2], int n,
                                              const place<T, D, TILES> &at)
{
    float s[2 * TILES][4], zero[4] = {0, 0, 0, 0};
#pragma unroll
    for (int t = 0; t < 2 * TILES; t++) {
        ps_mma8<T>(s[t], mine ? a0 : 0, mine ? a1 : 0, keys[t], zero);
    }
    if constexpr (!IS_ALONE<PIECES>) {
        add_scores<TILES, T>(s, pieces, p, mine);
    }
    most[0] = most[1] = 0;
    if constexpr (MOST) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = -INFINITY;
#pragma unroll
            for (int i = 0; i < 4 * TILES; i++) {
                const int column = i / 2 * 8 + at.q * 2 + i % 2;
                float &v = s[i / 2][2 * r + i % 2];
                v = column < n ? v : -INFINITY;
                most[r] = fmaxf(most[r], v);
            }
            most[r] = ps_quad_max(most[r]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        o[i] = sum[i] = 0;
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        uint32_t a[4];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float &v = s[2 * j + k / 4][k % 4];
            v = ps_exp2(MOST ? v - most[k % 4 / 2] : v);
        }
        pack_operand<T>(a, s[2 * j], s[2 * j + 1]);
        ps_mma16<T>(o, a, values[2 * j], values[2 * j + 1], o);
        ps_mma16<T>(sum, a, j == TILES - 1 ? last[0] : ps_ones<T>(), j == TILES - 1 ? last[1] : ps_ones<T>(), sum);
    }
}

/* `one` in the halves of words whose keys of the last tile exist: the lane's columns of its first 8 keys, and of the others. */
template <class T, int TILES>
static __device__ __forceinline__ void last_keys(uint32_t (&last)[2], uint32_t one, int n, const place<T, D, TILES> &at)
{
    const int left = n - (at.tiles() - 1) * 16 - at.q * 2;
    last[0] = (left > 0 ? one : 0u) | (left > 1 ? one << 16 : 0u);
    last[1] = (left > 8 ? one : 0u) | (left > 9 ? one << 16 : 0u);
}

/* merged = softmax(q k' / sqrt(e)) v of the warp's rows; kv: the lane's place in the unit's k, whose rows of matrices, k's two and
 * v's two, are KV_ROW bytes; logs: log2 of softmax's sums. Softmax is taken without its row's largest score, and again with it by a
 * warp that has found a sum out of range. */
enum { KV_ROW = 4 * MATRIX };

template <int TILES, class T, class PIECES>
static __device__ __forceinline__ void attention(uint32_t (&merged)[4], float (&logs)[4], const uint32_t (&q)[4], uint32_t kv,
                                                 const PIECES &pieces, const uint32_t (&last)[2], int n,
                                                 const place<T, D, TILES> &at)
{
    const bool low = at.q < 2; /* the first head of a pair */
#pragma unroll
    for (int p = 0; p < 2; p++) {
        uint32_t keys[2 * TILES], values[2 * TILES];
        float o[4], sum[2], most[2] = {0, 0}, first_o[4], first_sum[4], second_o[4], second_sum[4], none[2];
        load_matrices<false, TILES>(keys, kv + p * MATRIX, KV_ROW);
        load_matrices<true, TILES>(values, kv + (2 + p) * MATRIX, KV_ROW);
        const uint32_t q0 = q[2 * p], q1 = q[2 * p + 1];
        attend<false>(first_o, first_sum, none, q0, q1, keys, values, pieces, p, low, last, n, at);
        attend<false>(second_o, second_sum, none, q0, q1, keys, values, pieces, p, !low, last, n, at);
        sum[0] = low ? first_sum[0] : second_sum[0];
        sum[1] = low ? first_sum[2] : second_sum[2];
        const bool fine = ps_sums_hold<T>(fminf(sum[0], sum[1]), fmaxf(sum[0], sum[1]));
        if (!__all_sync(0xffffffffu, fine)) {
            float second_most[2];
            attend<true>(first_o, first_sum, most, q0, q1, keys, values, pieces, p, low, last, n, at);
            attend<true>(second_o, second_sum, second_most, q0, q1, keys, values, pieces, p, !low, last, n, at);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                sum[r] = low ? first_sum[2 * r] : second_sum[2 * r];
                most[r] = low ? most[r] : second_most[r];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            o[i] = (low ? first_o[i] : second_o[i]) * __fdividef(1.0f, sum[i / 2]);
        }
        merged[2 * p] = ps_pack<T>(o[0], o[1]);
        merged[2 * p + 1] = ps_pack<T>(o[2], o[3]);
        logs[2 * p] = most[0] + ps_log2(sum[0]);
        logs[2 * p + 1] = most[1] + ps_log2(sum[1]);
    }
}

/* ---- backward ---- */

/* Addresses in shared memory: the lane's places in the unit's columns (matrices of all rows, and of the warp's: q, k, v and the
 * gradient of merged, a pair of heads each), and where the probabilities and their gradient, `gradients` bytes behind them, are
 * written by rows and read by keys. */
struct d16_attention_places {
    uint32_t all_columns, own_columns, own_scores, own_keys;
    int columns_row, scores_row, gradients; /* bytes of a row of matrices */
};

/* The lane's 8 bytes of pair p: `scale` times o, of the head that is the lane's; 16 bits. */
template <class T> static __device__ __forceinline__ void put_pair(char *to, int p, const float (&o)[4], float scale)
{
    *(uint2 *)(to + p * 8) = make_uint2(ps_pack<T>(o[0] * scale, o[1] * scale), ps_pack<T>(o[2] * scale, o[3] * scale));
}

/* Where the gradients of the pieces' queries and keys go: the lane's place in the first one's, a layer `further` on the next
 * one's. */
struct d16_piece_gradients {
    char *queries, *keys;
    int64_t further;
};

/* The pieces' dq of pair p from the gradient of the warp's rows of scores; or, OF_KEYS, their dk from that of the warp's keys by
 * all queries. */
template <bool OF_KEYS, int TILES, class T>
static __device__ __forceinline__ void put_piece_gradients(const uint32_t (&ds)[TILES][4], const struct d16_pieces &pieces,
                                                           const struct d16_piece_gradients &to, int p, bool mine, float scale)
{
#pragma unroll 1
    for (int j = 0; j < pieces.count; j++) {
        uint32_t others[2 * TILES];
        float o[4] = {0, 0, 0, 0};
        load_matrices<true, TILES>(others, pieces.all + (OF_KEYS ? 0 : PIECE_KEYS) + j * pieces.bytes + p * MATRIX, pieces.row);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            ps_mma16<T>(o, ds[t], others[2 * t], others[2 * t + 1], o);
        }
        if (mine) {
            put_pair<T>((OF_KEYS ? to.keys : to.queries) + j * to.further, p, o, scale);
        }
    }
}

/* delta = less sum_j A dA, of head, pair and row: the sum over the head's columns of merged and its gradient dx. */
template <class T>
static __device__ __forceinline__ void less_delta(float (&delta)[2][2][2], const float (&dx)[2][4], const uint32_t (&merged)[4],
                                                  int q)
{
    const bool low = q < 2;
#pragma unroll
    for (int i = 0; i < 4; i++) { /* pair i / 2, row i % 2 */
        float v = -dx[i / 2][i % 2 * 2] * ps_low<T>(merged[i]) - dx[i / 2][i % 2 * 2 + 1] * ps_high<T>(merged[i]);
        v += __shfl_xor_sync(0xffffffffu, v, 1);
        const float other = __shfl_xor_sync(0xffffffffu, v, 2);
        delta[0][i / 2][i % 2] = low ? v : other;
        delta[1][i / 2][i % 2] = low ? other : v;
    }
}

/* The gradients of q, k and v of the warp's rows. sums: of the first head of each pair and of the second, its sums' logarithms;
 * last: all ones for the last tile's keys that exist. */
template <int TILES, class T, class PIECES>
static __device__ __forceinline__ void
attention_backward(uint32_t (&dq)[4], uint32_t (&dk)[4], uint32_t (&dv)[4], const float (&delta)[2][2][2], const float4 &sums0,
                   const float4 &sums1, const struct d16_attention_places &to, const PIECES &pieces,
                   const struct d16_piece_gradients &below, const uint32_t (&last)[2], float scale, const place<T, D, TILES> &at)
{
    const float ln2 = 0.6931471805599453f; /* q was scaled */
    const bool low = at.q < 2;             /* the first head of a pair */
#pragma unroll
    for (int p = 0; p < 2; p++) {
        float dq_of[2][4], dk_of[2][4], dv_of[2][4];
        clear(dq_of);
        clear(dk_of);
        clear(dv_of);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const bool mine = low == (h == 0);
            const float4 logs = h == 0 ? sums0 : sums1;
            const float log0 = p == 0 ? logs.x : logs.z, log1 = p == 0 ? logs.y : logs.w;
            const float less[4] = {-log0, -log0, -log1, -log1};
            const float less_delta[4] = {delta[h][p][0], delta[h][p][0], delta[h][p][1], delta[h][p][1]};
            uint32_t q[2], d_merged[2], keys[2 * TILES], values[2 * TILES], keys_across[2 * TILES];
            ps_ldmatrix2_at(q, to.own_columns + p * MATRIX);
            ps_ldmatrix2_at(d_merged, to.own_columns + (6 + p) * MATRIX);
            const uint32_t q0 = mine ? q[0] : 0, q1 = mine ? q[1] : 0;
            const uint32_t d0 = mine ? d_merged[0] : 0, d1 = mine ? d_merged[1] : 0;
            load_matrices<false, TILES>(keys, to.all_columns + (2 + p) * MATRIX, to.columns_row);
            load_matrices<false, TILES>(values, to.all_columns + (4 + p) * MATRIX, to.columns_row);
            load_matrices<true, TILES>(keys_across, to.all_columns + (2 + p) * MATRIX, to.columns_row);
            if (p + h > 0) {
                at.sync(); /* the head before has been read */
            }
            uint32_t turned[TILES][4];
            float s[2 * TILES][4];
            constexpr bool ALONE = IS_ALONE<PIECES>; /* a tile's scores when they are wanted */
            if constexpr (!ALONE) {
#pragma unroll
                for (int t = 0; t < 2 * TILES; t++) {
                    ps_mma8<T>(s[t], q0, q1, keys[t], less);
                }
                add_scores<TILES, T>(s, pieces, p, mine);
            }
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                float ds[2][4];
                if constexpr (ALONE) {
                    ps_mma8<T>(s[2 * j], q0, q1, keys[2 * j], less);
                    ps_mma8<T>(s[2 * j + 1], q0, q1, keys[2 * j + 1], less);
                }
                ps_mma8<T>(ds[0], d0, d1, values[2 * j], less_delta);
                ps_mma8<T>(ds[1], d0, d1, values[2 * j + 1], less_delta);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float &v = s[2 * j + i / 4][i % 4];
                    v = ps_exp2(v);
                    ds[i / 4][i % 4] *= v;
                }
                uint32_t packed[4], (&d_packed)[4] = turned[j];
                pack_operand<T>(packed, s[2 * j], s[2 * j + 1]);
                pack_operand<T>(d_packed, ds[0], ds[1]);
                if (j == TILES - 1) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        packed[i] &= last[i / 2];
                        d_packed[i] &= last[i / 2];
                    }
                }
                ps_stmatrix4_at(to.own_scores + j * 2 * MATRIX, packed);
                ps_stmatrix4_at(to.own_scores + to.gradients + j * 2 * MATRIX, d_packed);
                ps_mma16<T>(dq_of[h], d_packed, keys_across[2 * j], keys_across[2 * j + 1], dq_of[h]);
            }
            if constexpr (!ALONE) {
                put_piece_gradients<false, TILES, T>(turned, pieces, below, p, mine, scale);
            }
            uint32_t queries[2 * TILES], d_mixed[2 * TILES];
            load_matrices<true, TILES>(queries, to.all_columns + p * MATRIX, to.columns_row);
            load_matrices<true, TILES>(d_mixed, to.all_columns + (6 + p) * MATRIX, to.columns_row);
            at.sync(); /* A and its gradient are there */
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                uint32_t r[4];
                ps_ldmatrix4_transposed_at(r, to.own_keys + j * 2 * to.scores_row);
                ps_mma16<T>(dv_of[h], r, d_mixed[2 * j], d_mixed[2 * j + 1], dv_of[h]);
                ps_ldmatrix4_transposed_at(turned[j], to.own_keys + to.gradients + j * 2 * to.scores_row);
                ps_mma16<T>(dk_of[h], turned[j], queries[2 * j], queries[2 * j + 1], dk_of[h]);
            }
            if constexpr (!ALONE) {
                put_piece_gradients<true, TILES, T>(turned, pieces, below, p, mine, ln2);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            dq[2 * p + i] = ps_pack<T>((low ? dq_of[0][2 * i] : dq_of[1][2 * i]) * scale,
                                       (low ? dq_of[0][2 * i + 1] : dq_of[1][2 * i + 1]) * scale);
            dk[2 * p + i] = ps_pack<T>((low ? dk_of[0][2 * i] : dk_of[1][2 * i]) * ln2,
                                       (low ? dk_of[0][2 * i + 1] : dk_of[1][2 * i + 1]) * ln2);
            dv[2 * p + i] = ps_pack<T>(low ? dv_of[0][2 * i] : dv_of[1][2 * i], low ? dv_of[0][2 * i + 1] : dv_of[1][2 * i + 1]);
        }
    }
}

} // namespace ps_resident

#endif
