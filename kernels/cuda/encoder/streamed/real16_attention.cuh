/* Attention of encoder/streamed/real16.cuh, forward and backward, on the q, k and v of a tile in shared memory. */
#ifndef PS_KERNELS_CUDA_ENCODER_REAL16_ATTENTION_CUH
#define PS_KERNELS_CUDA_ENCODER_REAL16_ATTENTION_CUH

#include "kernels/cuda/encoder/streamed/real16_tile.cuh"

namespace PS_REAL16_SPACE
{

/* ---- attention: a warp takes one (sequence, head) at a time ---- */

/* Where a row of the tile is in a panel; its low bits are those that the unit is exchanged with. */
static __device__ __forceinline__ uint32_t row_place(uint32_t row)
{
    return row * 128 + row / 64 * (HALF_BYTES - 64 * 128) + (row % 8 << 4);
}

/* The heads' columns from d on are zero: the product after attention reads them. */
static __device__ __forceinline__ void clear_columns(unsigned char *heads, int d)
{
    for (int i = lane_id(); i < WARP_ROWS * 16; i += 32) {
        const int row = first_row() + i / 16, unit = i % 16;
        if (8 * unit >= d) {
            *(uint4 *)(heads + unit / 8 * PANEL_BYTES + row * 128 + ((unit % 8 ^ row % 8) << 4)) = make_uint4(0, 0, 0, 0);
        }
    }
}

/* A head's columns: 8 J of them from column 8 J head on. */
template <int J> struct head {
    uint32_t panel, unit; /* bytes: of its panel behind the part's first; the first unit in it */

    __device__ __forceinline__ explicit head(uint32_t index) : panel(index * J / 8 * PANEL_BYTES), unit(index * J % 8 << 4)
    {
    }

    /* The address of unit j of a row, in the first half's first panel of q. */
    __device__ __forceinline__ uint32_t at(uint32_t place, int j) const
    {
        return (place ^ (unit + (j << 4))) + panel;
    }
};

/* sums = a b' + start over e = 8 J: rows of a against the 8 rows of b whose fragments these are. */
template <int J>
static __device__ __forceinline__ void head_product(float (&sums)[4], const uint32_t (&a)[J][2], const uint32_t (&b)[J],
                                                    const float (&start)[4])
{
    if constexpr (J == 1) {
        ps_mma8<real16>(sums, a[0][0], a[0][1], b[0], start);
    } else {
        const uint32_t first[4] = {a[0][0], a[0][1], a[1][0], a[1][1]};
        ps_mma16<real16>(sums, first, b[0], b[1], start);
#pragma unroll
        for (int j = 2; j < J; j += 2) {
            const uint32_t next[4] = {a[j][0], a[j][1], a[j + 1][0], a[j + 1][1]};
            ps_mma16<real16>(sums, next, b[j], b[j + 1], sums);
        }
    }
}

/* The same 16 rows of two parts at once: of `first`'s the two matrices of rows 0 .. 7 and 8 .. 15, and of `second`'s. address: of
 * the lane's row lane_id() % 16 in the first part; lanes from 16 on have the second's, `far` bytes further. */
template <bool TRANSPOSED>
static __device__ __forceinline__ void load_two(uint32_t (&first)[2], uint32_t (&second)[2], uint32_t address)
{
    uint32_t r[4];
    if (TRANSPOSED) {
        ps_ldmatrix4_transposed_at(r, address);
    } else {
        ps_ldmatrix4_at(r, address);
    }
    first[0] = r[0];
    first[1] = r[1];
    second[0] = r[2];
    second[1] = r[3];
}

/* Places of the lane's rows of a sequence for load_two, rows beyond the last replaced by the last. */
template <int KT> static __device__ __forceinline__ void row_places(uint32_t (&places)[KT], uint32_t base, int first, int N)
{
#pragma unroll
    for (int kt = 0; kt < KT; kt++) {
        places[kt] = base + row_place(first + at_most(16 * kt + lane_id() % 16, N - 1));
    }
}

/* load_two's inverse, for sums of products. there: the lane's row exists. */
static __device__ __forceinline__ void store_two(uint32_t address, uint32_t aside, bool there, const float (&first)[4],
                                                 float scale1, const float (&second)[4], float scale2)
{
    const uint32_t words[4] = {
        ps_pack<real16>(first[0] * scale1, first[1] * scale1), ps_pack<real16>(first[2] * scale1, first[3] * scale1),
        ps_pack<real16>(second[0] * scale2, second[1] * scale2), ps_pack<real16>(second[2] * scale2, second[3] * scale2)};
    ps_stmatrix4_at(there ? address : aside, words);
}

/* scores = q k' + start of 16 queries over KT times 16 keys, those from N on -infinity. q is scaled: 2 to the power of a score is
 * its exponential. */
template <int KT, int J>
static __device__ __forceinline__ void raw_scores(float (&scores)[2 * KT][4], const uint32_t (&q)[J][2],
                                                  const uint32_t (&k)[2 * KT][J], const float (&start)[4], int N)
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < 2 * KT; n++) {
        head_product<J>(scores[n], q, k[n], start);
        if (n >= 2 * KT - 2) { /* KT = ceil(N / 16): only here can keys be missing */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool there = 8 * n + 2 * t + i < N;
                scores[n][i] = there ? scores[n][i] : -INFINITY;
                scores[n][2 + i] = there ? scores[n][2 + i] : -INFINITY;
            }
        }
    }
}

/* The largest of each of the lane's two rows. */
template <int KT> static __device__ __forceinline__ void row_maxima(float (&largest)[2], const float (&scores)[2 * KT][4])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        largest[half] = -INFINITY;
#pragma unroll
        for (int n = 0; n < 2 * KT; n++) {
            largest[half] = fmaxf(largest[half], fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        }
        largest[half] = ps_quad_max(largest[half]);
    }
}

/* A v to the heads' panels, head by head. softmax: of the tile; halves: address of the first half's panels. The largest score is
 * taken off only where the exponentials would else leave the exponents that hold them: nowhere in a model that learns. */
template <int KT, int E>
static __device__ __forceinline__ void attention_forward(const struct arguments &p, uint32_t halves, uint32_t aside, float *softmax,
                                                         int sequences)
{
    constexpr int J = E / 8;
    const uint32_t ones = ps_ones<real16>(), far = lane_id() < 16 ? 0 : (K_PANEL - Q_PANEL) * PANEL_BYTES;
#pragma unroll 1
    for (int pair = warp_id(); pair < sequences * p.heads; pair += WARPS) {
        const int sequence = ps_divide(pair, p.by_heads), first = sequence * p.N;
        const struct head<J> head(pair - sequence * p.heads);
        uint32_t places[KT];
        row_places<KT>(places, halves, first, p.N);
        uint32_t k[2 * KT][J], v[KT][J][2], a[KT][J][2];
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
#pragma unroll
            for (int j = 0; j < J; j++) {
                uint32_t rows[2];
                load_two<false>(a[kt][j], rows, head.at(places[kt], j) + far);
                k[2 * kt][j] = rows[0];
                k[2 * kt + 1][j] = rows[1];
                ps_ldmatrix2_transposed_at(v[kt][j], head.at(places[kt], j) + V_PANEL * PANEL_BYTES);
            }
        }
#pragma unroll
        for (int m = 0; m < KT; m++) {
            float scores[2 * KT][4], shift[2] = {0.0f, 0.0f}, mixed[J][4], sums[1][4];
            const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            raw_scores<KT, J>(scores, a[m], k, none, p.N);
            uint32_t probability[KT][4];
            bool shifted = false;
            while (true) {
#pragma unroll
                for (int n = 0; n < 2 * KT; n++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        probability[n / 2][n % 2 * 2 + half] =
                            ps_pack<real16>(ps_exp2(scores[n][2 * half]), ps_exp2(scores[n][2 * half + 1]));
                    }
                }
                ps_zero(sums);
#pragma unroll
                for (int kt = 0; kt < KT; kt++) { /* every column: the row's sum */
                    const uint32_t(&s)[4] = probability[kt];
                    ps_mma16<real16>(sums[0], s, ones, ones, sums[0]);
                }
                const float low = fminf(sums[0][0], sums[0][2]), high = fmaxf(sums[0][0], sums[0][2]);
                if (__all_sync(0xffffffffu, ps_sums_hold<real16>(low, high)) || shifted) {
                    break;
                }
                shifted = true;
                row_maxima<KT>(shift, scores);
#pragma unroll
                for (int n = 0; n < 2 * KT; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        scores[n][i] -= shift[i / 2];
                    }
                }
            }
            ps_zero(mixed);
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                const uint32_t(&s)[4] = probability[kt];
#pragma unroll
                for (int j = 0; j < J; j++) {
                    ps_mma16<real16>(mixed[j], s, v[kt][j][0], v[kt][j][1], mixed[j]);
                }
            }
            const float inverse[2] = {ps_reciprocal(sums[0][0]), ps_reciprocal(sums[0][2])};
            const bool there = 16 * m + lane_id() % 16 < p.N;
#pragma unroll
            for (int j = 0; j < J; j++) {
                const uint32_t to = head.at(places[m], j) + HEADS_PANEL * PANEL_BYTES;
                ps_stmatrix2_at(there ? to : aside, {ps_pack<real16>(mixed[j][0] * inverse[0], mixed[j][1] * inverse[0]),
                                                     ps_pack<real16>(mixed[j][2] * inverse[1], mixed[j][3] * inverse[1])});
            }
            const int half = lane_id() % 4, row = 16 * m + lane_id() / 4 + 8 * half;
            if (half < 2 && row < p.N) {
                softmax[pair * p.N + row] = (half ? shift[1] : shift[0]) + ps_log2(half ? sums[0][2] : sums[0][0]);
            }
        }
    }
}

/* 16 queries of 16 keys as a left operand, and transposed. */
static __device__ __forceinline__ void fragment_pair(uint32_t (&s)[4], uint32_t (&s_trans)[4], const float (&left)[4],
                                                     const float (&right)[4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s[i] = ps_pack<real16>(left[2 * i], left[2 * i + 1]);
        s[2 + i] = ps_pack<real16>(right[2 * i], right[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { /* blocks [0][1] and [1][0] of the 16 x 16 change places */
        s_trans[i] = ps_movmatrix(s[i % 2 * 2 + i / 2]);
    }
}

/* q, k, v become their gradients, and the gradient of A v in the heads' panels becomes A v. softmax: of the tile. */
template <int KT, int E>
static __device__ __forceinline__ void attention_backward(const struct arguments &p, uint32_t halves, uint32_t aside,
                                                          const float *softmax, int sequences)
{
    constexpr int J = E / 8;
    const int g = lane_id() / 4;
    const uint32_t to_v = K_PANEL * PANEL_BYTES + (lane_id() < 16 ? 0 : (V_PANEL - K_PANEL) * PANEL_BYTES);
    const uint32_t to_heads = lane_id() < 16 ? 0 : HEADS_PANEL * PANEL_BYTES;
#pragma unroll 1
    for (int pair = warp_id(); pair < sequences * p.heads; pair += WARPS) {
        const int sequence = ps_divide(pair, p.by_heads), first = sequence * p.N;
        const struct head<J> head(pair - sequence * p.heads);
        uint32_t places[KT];
        row_places<KT>(places, halves, first, p.N);
        uint32_t k[2 * KT][J], v[2 * KT][J];
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
#pragma unroll
            for (int j = 0; j < J; j++) {
                uint32_t k_rows[2], v_rows[2];
                load_two<false>(k_rows, v_rows, head.at(places[kt], j) + to_v);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    k[2 * kt + i][j] = k_rows[i];
                    v[2 * kt + i][j] = v_rows[i];
                }
            }
        }
        float dk[KT][J][4], dv[KT][J][4];
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
            ps_zero(dk[kt]);
            ps_zero(dv[kt]);
        }
#pragma unroll
        for (int m = 0; m < KT; m++) {
            uint32_t a[J][2], da[J][2], q_trans[J][2], d_trans[J][2];
#pragma unroll
            for (int j = 0; j < J; j++) {
                load_two<false>(a[j], da[j], head.at(places[m], j) + to_heads);
                load_two<true>(q_trans[j], d_trans[j], head.at(places[m], j) + to_heads);
            }
            const int row = 16 * m + g;
            float start[4]; /* infinite, so that their probabilities are 0, for queries beyond the last */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                start[2 * half] = row + 8 * half < p.N ? -softmax[pair * p.N + row + 8 * half] : -INFINITY;
                start[2 * half + 1] = start[2 * half];
            }
            float scores[2 * KT][4], mixed[J][4], dq[J][4];
            raw_scores<KT, J>(scores, a, k, start, p.N);
#pragma unroll
            for (int n = 0; n < 2 * KT; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[n][i] = ps_exp2(scores[n][i]);
                }
            }
            ps_zero(mixed);
            ps_zero(dq);
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                uint32_t s[4], s_trans[4];
                fragment_pair(s, s_trans, scores[2 * kt], scores[2 * kt + 1]);
#pragma unroll
                for (int j = 0; j < J; j++) {
                    uint32_t v_trans[2];
                    ps_ldmatrix2_transposed_at(v_trans, head.at(places[kt], j) + V_PANEL * PANEL_BYTES);
                    ps_mma16<real16>(mixed[j], s, v_trans[0], v_trans[1], mixed[j]);
                    ps_mma16<real16>(dv[kt][j], s_trans, d_trans[j][0], d_trans[j][1], dv[kt][j]);
                }
            }
            /* the scores' gradient but for the factor p.scale: P (dP - sum of P dP), and that sum is A v's gradient times A v */
            float projection[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < J; j++) {
                    sum -= mixed[j][2 * half] * ps_low<real16>(da[j][half]) + mixed[j][2 * half + 1] * ps_high<real16>(da[j][half]);
                }
                projection[2 * half] = projection[2 * half + 1] = ps_quad_sum(sum);
            }
#pragma unroll
            for (int n = 0; n < 2 * KT; n++) {
                float d_score[4];
                head_product<J>(d_score, da, v[n], projection);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[n][i] *= d_score[i];
                }
            }
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                uint32_t s[4], s_trans[4];
                fragment_pair(s, s_trans, scores[2 * kt], scores[2 * kt + 1]);
#pragma unroll
                for (int j = 0; j < J; j++) {
                    uint32_t k_trans[2];
                    ps_ldmatrix2_transposed_at(k_trans, head.at(places[kt], j) + K_PANEL * PANEL_BYTES);
                    ps_mma16<real16>(dq[j], s, k_trans[0], k_trans[1], dq[j]);
                    ps_mma16<real16>(dk[kt][j], s_trans, q_trans[j][0], q_trans[j][1], dk[kt][j]);
                }
            }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < J; j++) {
                store_two(head.at(places[m], j) + to_heads, aside, 16 * m + lane_id() % 16 < p.N, dq[j], p.scale, mixed[j], 1.0f);
            }
        }
        __syncwarp();
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
#pragma unroll
            for (int j = 0; j < J; j++) {
                store_two(head.at(places[kt], j) + to_v, aside, 16 * kt + lane_id() % 16 < p.N, dk[kt][j], 1.0f / PS_LOG2_E,
                          dv[kt][j], 1.0f);
            }
        }
    }
}

} // namespace PS_REAL16_SPACE

#endif
