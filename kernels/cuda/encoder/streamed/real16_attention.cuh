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

/* Where the lane's rows of a sequence are, rows beyond the last replaced by the last: row lane_id() % 16 of each 16, in the place
 * of the second unit for lanes from 16 on; KEYS: row lane_id() % 8 + lane_id() / 16 * 8, in the place of the second unit for every
 * other 8 lanes. One unit (J 1) is only loaded and stored by lanes up to 16. */
template <bool KEYS, int J> static __device__ __forceinline__ uint32_t rows_place(uint32_t base, int first, int tile, int N)
{
    const int lane = lane_id(), row = KEYS && J > 1 ? lane % 8 + lane / 16 * 8 : lane % 16;
    const uint32_t place = base + row_place(first + at_most(16 * tile + row, N - 1));
    return J > 1 ? place ^ (KEYS ? lane / 8 % 2 : lane / 16) << 4 : place;
}

/* A head's columns of 16 rows of one part: [j] are unit j's two matrices, of rows 0 .. 7 and 8 .. 15. */
template <bool TRANSPOSED, int J>
static __device__ __forceinline__ void load_rows(uint32_t (&rows)[J][2], const struct head<J> &head, uint32_t place)
{
#pragma unroll
    for (int j = 0; j < J; j += 2) {
        if constexpr (J == 1) {
            TRANSPOSED ? ps_ldmatrix2_transposed_at(rows[0], head.at(place, 0)) : ps_ldmatrix2_at(rows[0], head.at(place, 0));
        } else {
            uint32_t r[4];
            TRANSPOSED ? ps_ldmatrix4_transposed_at(r, head.at(place, j)) : ps_ldmatrix4_at(r, head.at(place, j));
            rows[j][0] = r[0];
            rows[j][1] = r[1];
            rows[j + 1][0] = r[2];
            rows[j + 1][1] = r[3];
        }
    }
}

/* The same as right operands of head_product, whose units are neighbours in registers: [n][j], n: rows 0 .. 7 and 8 .. 15. place:
 * of KEYS. */
template <int J>
static __device__ __forceinline__ void load_keys(uint32_t (&keys)[2][J], const struct head<J> &head, uint32_t place)
{
#pragma unroll
    for (int j = 0; j < J; j += 2) {
        if constexpr (J == 1) {
            uint32_t r[2];
            ps_ldmatrix2_at(r, head.at(place, 0));
            keys[0][0] = r[0];
            keys[1][0] = r[1];
        } else {
            uint32_t r[4];
            ps_ldmatrix4_at(r, head.at(place, j));
            keys[0][j] = r[0];
            keys[0][j + 1] = r[1];
            keys[1][j] = r[2];
            keys[1][j + 1] = r[3];
        }
    }
}

/* load_rows' inverse, for sums of products: of the lane's first row times scale1, of its second times scale2. there: the row that
 * the lane's place is of exists. */
template <int J>
static __device__ __forceinline__ void store_rows(const struct head<J> &head, uint32_t place, uint32_t aside, bool there,
                                                  const float (&x)[J][4], float scale1, float scale2)
{
#pragma unroll
    for (int j = 0; j < J; j += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < (J == 1 ? 1 : 2); i++) {
            words[2 * i] = ps_pack<real16>(x[j + i][0] * scale1, x[j + i][1] * scale1);
            words[2 * i + 1] = ps_pack<real16>(x[j + i][2] * scale2, x[j + i][3] * scale2);
        }
        const uint32_t to = there ? head.at(place, j) : aside;
        if constexpr (J == 1) {
            ps_stmatrix2_at(to, {words[0], words[1]});
        } else {
            ps_stmatrix4_at(to, words);
        }
    }
}

/* Where registers hold all that forward and backward need of keys and values, and one unit of two parts is moved at once. */
template <int KT, int J> static constexpr bool HELD_AT_ONCE = J == 1 && KT < 4;

/* One unit (J 1) of two parts at once: place has the second part's for lanes from 16 on. */
template <bool TRANSPOSED>
static __device__ __forceinline__ void load_two(uint32_t (&first)[2], uint32_t (&second)[2], uint32_t place)
{
    uint32_t r[4];
    TRANSPOSED ? ps_ldmatrix4_transposed_at(r, place) : ps_ldmatrix4_at(r, place);
    first[0] = r[0];
    first[1] = r[1];
    second[0] = r[2];
    second[1] = r[3];
}

static __device__ __forceinline__ void store_two(uint32_t place, uint32_t aside, bool there, const float (&first)[4], float scale1,
                                                 const float (&second)[4], float scale2)
{
    const uint32_t words[4] = {
        ps_pack<real16>(first[0] * scale1, first[1] * scale1), ps_pack<real16>(first[2] * scale1, first[3] * scale1),
        ps_pack<real16>(second[0] * scale2, second[1] * scale2), ps_pack<real16>(second[2] * scale2, second[3] * scale2)};
    ps_stmatrix4_at(there ? place : aside, words);
}

/* scores = q k' + start of 16 queries and 16 keys from key `first` on; last: of the sequence's last, where those from N on become
 * -infinity. q is scaled: 2 to the power of a score is its exponential. */
template <int J>
static __device__ __forceinline__ void raw_scores(float (&scores)[2][4], const uint32_t (&q)[J][2], const uint32_t (&k)[2][J],
                                                  const float (&start)[4], int first, bool last, int N)
{
#pragma unroll
    for (int n = 0; n < 2; n++) {
        head_product<J>(scores[n], q, k[n], start);
#pragma unroll
        for (int i = 0; last && i < 2; i++) {
            const bool there = first + 8 * n + lane_id() % 4 * 2 + i < N;
            scores[n][i] = there ? scores[n][i] : -INFINITY;
            scores[n][2 + i] = there ? scores[n][2 + i] : -INFINITY;
        }
    }
}

/* The largest of each of the lane's two rows. */
template <int KT> static __device__ __forceinline__ void row_maxima(float (&largest)[2], const float (&scores)[KT][2][4])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        largest[half] = -INFINITY;
#pragma unroll
        for (int n = 0; n < 2 * KT; n++) {
            largest[half] = fmaxf(largest[half], fmaxf(scores[n / 2][n % 2][2 * half], scores[n / 2][n % 2][2 * half + 1]));
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
    constexpr bool HELD = HELD_AT_ONCE<KT, J>;
    const uint32_t ones = ps_ones<real16>(), far = lane_id() < 16 ? 0 : (K_PANEL - Q_PANEL) * PANEL_BYTES;
#pragma unroll 1
    for (int pair = warp_id(); pair < sequences * p.heads; pair += WARPS) {
        const int sequence = ps_divide(pair, p.by_heads), first = sequence * p.N;
        const struct head<J> head(pair - sequence * p.heads);
        uint32_t places[KT], k[KT][2][J], v[KT][J][2], a[HELD ? KT : 1][J][2];
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
            places[kt] = rows_place<false, J>(halves, first, kt, p.N);
            if constexpr (HELD) {
                uint32_t keys[2];
                load_two<false>(a[kt][0], keys, head.at(places[kt], 0) + far);
                k[kt][0][0] = keys[0];
                k[kt][1][0] = keys[1];
            } else {
                load_keys(k[kt], head, rows_place<true, J>(halves + K_PANEL * PANEL_BYTES, first, kt, p.N));
            }
            load_rows<true>(v[kt], head, places[kt] + V_PANEL * PANEL_BYTES);
        }
#pragma unroll
        for (int m = 0; m < KT; m++) {
            float scores[KT][2][4], shift[2] = {0.0f, 0.0f}, mixed[J][4], sums[1][4];
            const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (!HELD) {
                load_rows<false>(a[0], head, places[m]);
            }
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                raw_scores<J>(scores[kt], a[HELD ? m : 0], k[kt], none, 16 * kt, kt == KT - 1, p.N);
            }
            uint32_t probability[KT][4];
            bool shifted = false;
            while (true) {
#pragma unroll
                for (int n = 0; n < 2 * KT; n++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        probability[n / 2][n % 2 * 2 + half] =
                            ps_pack<real16>(ps_exp2(scores[n / 2][n % 2][2 * half]), ps_exp2(scores[n / 2][n % 2][2 * half + 1]));
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
                        scores[n / 2][n % 2][i] -= shift[i / 2];
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
            store_rows<J>(head, places[m] + HEADS_PANEL * PANEL_BYTES, aside, there, mixed, inverse[0], inverse[1]);
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
    /* Registers: keys and values stay in them; or a tile of queries' probabilities do; or those are formed a second time. */
    constexpr bool HELD = HELD_AT_ONCE<KT, J>, AGAIN = KT * (J + 1) > 10;
    const uint32_t to_v = K_PANEL * PANEL_BYTES + (lane_id() < 16 ? 0 : (V_PANEL - K_PANEL) * PANEL_BYTES);
    const uint32_t to_heads = lane_id() < 16 ? 0 : HEADS_PANEL * PANEL_BYTES;
#pragma unroll 1
    for (int pair = warp_id(); pair < sequences * p.heads; pair += WARPS) {
        const int sequence = ps_divide(pair, p.by_heads), first = sequence * p.N;
        const struct head<J> head(pair - sequence * p.heads);
        uint32_t places[KT], key_places[KT], k[HELD ? KT : 1][2][J], v[HELD ? KT : 1][2][J];
        float dk[KT][J][4], dv[KT][J][4];
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
            places[kt] = rows_place<false, J>(halves, first, kt, p.N);
            key_places[kt] = rows_place<true, J>(halves, first, kt, p.N);
            if constexpr (HELD) {
                uint32_t k_rows[2], v_rows[2];
                load_two<false>(k_rows, v_rows, head.at(places[kt], 0) + to_v);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    k[kt][n][0] = k_rows[n];
                    v[kt][n][0] = v_rows[n];
                }
            }
            ps_zero(dk[kt]);
            ps_zero(dv[kt]);
        }
#pragma unroll
        for (int m = 0; m < KT; m++) {
            const uint32_t place = places[m];
            const bool there = 16 * m + lane_id() % 16 < p.N;
            const int row = 16 * m + lane_id() / 4;
            float start[4]; /* infinite, so that their probabilities are 0, for queries beyond the last */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                start[2 * half] = row + 8 * half < p.N ? -softmax[pair * p.N + row + 8 * half] : -INFINITY;
                start[2 * half + 1] = start[2 * half];
            }
            float scores[AGAIN ? 1 : KT][2][4], mixed[J][4], dq[J][4];
            uint32_t a[J][2], da[J][2], q_trans[J][2], d_trans[J][2];
            if constexpr (HELD) {
                load_two<false>(a[0], da[0], head.at(place, 0) + to_heads);
                load_two<true>(q_trans[0], d_trans[0], head.at(place, 0) + to_heads);
            } else {
                load_rows<false>(a, head, place);
            }
            const auto exponentials = [&](float(&s)[2][4], int kt) {
                if (!HELD) {
                    load_keys(k[0], head, key_places[kt] + K_PANEL * PANEL_BYTES);
                }
                raw_scores<J>(s, a, k[HELD ? kt : 0], start, 16 * kt, kt == KT - 1, p.N);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    s[i / 4][i % 4] = ps_exp2(s[i / 4][i % 4]);
                }
            };
#pragma unroll
            for (int kt = 0; !AGAIN && kt < KT; kt++) {
                exponentials(scores[AGAIN ? 0 : kt], kt);
            }
            if (!HELD) {
                load_rows<true>(d_trans, head, place + HEADS_PANEL * PANEL_BYTES);
            }
            ps_zero(mixed);
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                uint32_t s[4], s_trans[4], v_trans[J][2];
                if (AGAIN) {
                    exponentials(scores[0], kt);
                }
                fragment_pair(s, s_trans, scores[AGAIN ? 0 : kt][0], scores[AGAIN ? 0 : kt][1]);
                load_rows<true>(v_trans, head, places[kt] + V_PANEL * PANEL_BYTES);
#pragma unroll
                for (int j = 0; j < J; j++) {
                    ps_mma16<real16>(mixed[j], s, v_trans[j][0], v_trans[j][1], mixed[j]);
                    ps_mma16<real16>(dv[kt][j], s_trans, d_trans[j][0], d_trans[j][1], dv[kt][j]);
                }
            }
            /* the scores' gradient but for the factor p.scale: P (dP - sum of P dP), and that sum is A v's gradient times A v */
            float projection[4];
            if (!HELD) {
                load_rows<false>(da, head, place + HEADS_PANEL * PANEL_BYTES);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < J; j++) {
                    sum -= mixed[j][2 * half] * ps_low<real16>(da[j][half]) + mixed[j][2 * half + 1] * ps_high<real16>(da[j][half]);
                }
                projection[2 * half] = projection[2 * half + 1] = ps_quad_sum(sum);
            }
            if (!HELD) {
                __syncwarp();
                store_rows<J>(head, place + HEADS_PANEL * PANEL_BYTES, aside, there, mixed, 1.0f, 1.0f);
                load_rows<true>(q_trans, head, place);
            }
            ps_zero(dq);
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                float(&rows)[2][4] = scores[AGAIN ? 0 : kt];
                if (AGAIN) {
                    exponentials(rows, kt);
                }
                if (!HELD) {
                    load_keys(v[0], head, key_places[kt] + V_PANEL * PANEL_BYTES);
                }
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float d_score[4];
                    head_product<J>(d_score, da, v[HELD ? kt : 0][n], projection);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        rows[n][i] *= d_score[i];
                    }
                }
                uint32_t s[4], s_trans[4], k_trans[J][2];
                fragment_pair(s, s_trans, rows[0], rows[1]);
                load_rows<true>(k_trans, head, places[kt] + K_PANEL * PANEL_BYTES);
#pragma unroll
                for (int j = 0; j < J; j++) {
                    ps_mma16<real16>(dq[j], s, k_trans[j][0], k_trans[j][1], dq[j]);
                    ps_mma16<real16>(dk[kt][j], s_trans, q_trans[j][0], q_trans[j][1], dk[kt][j]);
                }
            }
            __syncwarp();
            if constexpr (HELD) {
                store_two(head.at(place, 0) + to_heads, aside, there, dq[0], p.scale, mixed[0], 1.0f);
            } else {
                store_rows<J>(head, place, aside, there, dq, p.scale, p.scale);
            }
        }
        __syncwarp();
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
            const bool there = 16 * kt + lane_id() % 16 < p.N;
            if constexpr (HELD) {
                store_two(head.at(places[kt], 0) + to_v, aside, there, dk[kt][0], 1.0f / PS_LOG2_E, dv[kt][0], 1.0f);
            } else {
                store_rows<J>(head, places[kt] + K_PANEL * PANEL_BYTES, aside, there, dk[kt], 1.0f / PS_LOG2_E, 1.0f / PS_LOG2_E);
                store_rows<J>(head, places[kt] + V_PANEL * PANEL_BYTES, aside, there, dv[kt], 1.0f, 1.0f);
            }
        }
    }
}

} // namespace PS_REAL16_SPACE

#endif
