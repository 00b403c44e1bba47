/* The feed-forward part of d_model 16: a warp's 16 rows, 64 hidden columns at a time, in the places that d16_units.cuh gives them.
 */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HIDDEN_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HIDDEN_CUH

#include "kernels/cuda/encoder/resident/d16_units.cuh"

namespace ps_resident
{

/* W_1 [16, d_ff] and W_2 [d_ff, 16] from the 64 columns at hand on, W_1's rows `ld` elements apart; b_1 as set_bias takes it. */
template <class T> struct d16_columns {
    const T *w_1, *w_2;
    const float4 *b_1;
    int ld;
};

template <class T> static __device__ __forceinline__ d16_columns<T> hidden_columns(const d16_weights<T> &w, int half)
{
    return {w.w_1 + half * 64, w.w_2 + half * 64 * LD, w.b_1 + half * 32, LD_F};
}

/* What either gelu's value and slope are too large by: the half is left to who scales them. */
static __host__ __device__ constexpr float d16_times(enum ps_activation activation)
{
    return activation == PS_GELU || activation == PS_GELU_TANH ? 2.0f : 1.0f;
}

template <enum ps_activation ACTIVATION> static __device__ __forceinline__ float d16_activated(float x)
{
    if constexpr (ACTIVATION == PS_GELU) {
        return fmaf(x, ps_erf_near(x, fminf(x * x, 36.0f)), x);
    } else {
        return ACTIVATION == PS_GELU_TANH ? ps_gelu_twice(x) : ps_activated<ACTIVATION>(x);
    }
}

/* x becomes its activation, and `gradient`, of that, x's; both d16_times. */
template <enum ps_activation ACTIVATION> static __device__ __forceinline__ void d16_activated_backward(float &x, float &gradient)
{
    if constexpr (ACTIVATION == PS_GELU_TANH) {
        ps_gelu_twice_backward(x, gradient);
    } else if constexpr (ACTIVATION == PS_GELU) {
        const float square = fminf(x * x, 36.0f), t = ps_erf_near(x, square);
        const float density = ps_exp2(fmaf(square, -0.5f * PS_LOG2_E, -0.32574806f)); /* twice: sqrt(2/pi) is 2^-0.32574806 */
        gradient = fmaf(gradient, fmaf(x, density, t), gradient);
        x = fmaf(x, t, x);
    } else {
        gradient *= ps_activation_slope<ACTIVATION>(x);
        x = ps_activated<ACTIVATION>(x);
    }
}

/* c += activation(a W_1 + b_1) W_2, d16_times, of 64 hidden columns, zero where dropped. */
template <bool DROP, enum ps_activation ACTIVATION, class T, class P>
static __device__ __forceinline__ void feed_forward(float (&c)[2][4], const uint32_t (&a)[4], uint32_t bits,
                                                    const d16_columns<T> &w, const P &at)
{
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const int column = part * 32;
        float z[4][4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t b[4];
            set_bias(z[2 * j], w.b_1 + column / 2 + j * 8, at.q);
            set_bias(z[2 * j + 1], w.b_1 + column / 2 + j * 8 + 4, at.q);
            ps_ldmatrix4_transposed(b, w.w_1 + column + j * 16 + at.near * w.ld + at.far);
            ps_mma16<T>(z[2 * j], a, b[0], b[1], z[2 * j]);
            ps_mma16<T>(z[2 * j + 1], a, b[2], b[3], z[2 * j + 1]);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            z[i / 4][i % 4] = d16_activated<ACTIVATION>(z[i / 4][i % 4]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t hidden[4], b[4];
            pack_operand<T>(hidden, z[2 * j], z[2 * j + 1]);
            if constexpr (DROP) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    hidden[i] &= spread(bits, 2 * j + i / 2 + i % 2 * 4 + part * 8);
                }
            }
            ps_ldmatrix4_transposed(b, w.w_2 + (column + j * 16 + at.near) * LD + at.far);
            ps_mma16<T>(c[0], hidden, b[0], b[1], c[0]);
            ps_mma16<T>(c[1], hidden, b[2], b[3], c[1]);
        }
    }
}

/* y = y scale + b_2. */
template <class W, class P>
static __device__ __forceinline__ void finish_hidden(float (&y)[2][4], const W &w, float scale, const P &at)
{
    float bias[2][4];
    set_bias(bias[0], w.b_2, at.q);
    set_bias(bias[1], w.b_2 + 4, at.q);
    scale_add_rows(y, scale, bias);
}

/* 64 hidden columns, d16_times, and the gradient before the activation, to the tile's staged columns; dx += that gradient W_1'. dm:
 * the gradient that enters W_2. */
template <bool DROP, enum ps_activation ACTIVATION, class T, class P>
static __device__ __forceinline__ void hidden_backward(float (&dx)[2][4], const uint32_t (&a)[4], const uint32_t (&dm)[4],
                                                       uint32_t bits, uint32_t own_staged, const d16_columns<T> &w, const P &at)
{
    /* The products of a chunk of 16 columns are made while the one before is worked on. */
    float next_z[2][4], next_dz[2][4];
    const auto begin = [&](int chunk) {
        uint32_t b[4];
        set_bias(next_z[0], w.b_1 + chunk * 8, at.q);
        set_bias(next_z[1], w.b_1 + chunk * 8 + 4, at.q);
        ps_ldmatrix4_transposed(b, w.w_1 + chunk * 16 + at.near * w.ld + at.far);
        ps_mma16<T>(next_z[0], a, b[0], b[1], next_z[0]);
        ps_mma16<T>(next_z[1], a, b[2], b[3], next_z[1]);
        clear(next_dz);
        multiply16_transposed(next_dz, dm, w.w_2 + chunk * 16 * LD, LD, at);
    };
    begin(0);
#pragma unroll
    for (int chunk = 0; chunk < 4; chunk++) {
        uint32_t hidden[4], d_hidden[4];
        float z[2][4], dz[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            z[i / 4][i % 4] = next_z[i / 4][i % 4];
            dz[i / 4][i % 4] = next_dz[i / 4][i % 4];
        }
        if (chunk < 3) {
            begin(chunk + 1);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            d16_activated_backward<ACTIVATION>(z[i / 4][i % 4], dz[i / 4][i % 4]);
        }
        pack_operand<T>(hidden, z[0], z[1]);
        pack_operand<T>(d_hidden, dz[0], dz[1]);
        if constexpr (DROP) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t mask = spread(bits, chunk % 2 * 2 + i / 2 + i % 2 * 4 + chunk / 2 * 8);
                hidden[i] &= mask;
                d_hidden[i] &= mask;
            }
        }
        ps_stmatrix4_at(own_staged + chunk * 2 * MATRIX, hidden);
        ps_stmatrix4_at(own_staged + (8 + chunk * 2) * MATRIX, d_hidden);
        multiply16_transposed(dx, d_hidden, w.w_1 + chunk * 16, w.ld, at);
    }
}

/* ---- weights' gradients, by wgmma over the rows that a block has staged; and of the attention ---- */

/* An operand, 16 rows of matrices, a row of which is `row` bytes. */
static __device__ __forceinline__ uint64_t operand(uint32_t address, int row)
{
    return (uint64_t)(MATRIX / 16) << 32 | (uint32_t)(row / 16) << 16 | (address >> 4 & 0x3fff);
}

/* d = a' b over the rows of `units` times TILES (or `tiles`) tiles, `unit` bytes apart; a and b: addresses of the first one's. */
template <class T, int TILES, int COLUMNS>
static __device__ __forceinline__ void block_product(float (&d)[COLUMNS][4], uint32_t a, int a_row, uint32_t b, int b_row,
                                                     int units, int unit, int tiles = TILES)
{
    constexpr int AT_ONCE = TILES == ANY_TILES ? 1 : TILES;
    uint64_t from = operand(a, a_row), by = operand(b, b_row);
    clear(d);
    ps_pin(d);
    ps_wgmma_begin();
#pragma unroll 1
    for (int i = 0; i < units; i++) {
#pragma unroll AT_ONCE
        for (int tile = 0; tile < (TILES == ANY_TILES ? tiles : TILES); tile++) {
            ps_wgmma_onto<T, 1, 1>(d, from + (uint32_t)(tile * 2 * a_row / 16), by + (uint32_t)(tile * 2 * b_row / 16));
        }
        from += (uint32_t)(unit / 16);
        by += (uint32_t)(unit / 16);
    }
    ps_wgmma_commit();
    ps_wgmma_wait<0>();
    ps_pin(d);
}

/* 16 columns of rows `row` and `other` of a layer's sums; onto: of what is there. */
static __device__ __forceinline__ void put_sums(float *sums, int row, int other, const float (&low)[4], const float (&high)[4],
                                                int q, bool onto)
{
    const auto put = [&](float *p, float first, float second) {
        const float2 old = onto ? *(const float2 *)p : make_float2(0, 0);
        *(float2 *)p = make_float2(first + old.x, second + old.y);
    };
    float *const p = sums + row * D + q * 2, *const o = sums + other * D + q * 2;
    put(p, low[0], low[1]);
    put(p + 8, high[0], high[1]);
    put(o, low[2], low[3]);
    put(o + 8, high[2], high[3]);
}

/* Two elements of a bias's. */
static __device__ __forceinline__ void put_bias_sums(float *sums, int row, int other, const float (&d)[4], int q, bool onto)
{
    if (q == 0) {
        sums[row] = d[0] + (onto ? sums[row] : 0.0f);
        sums[other] = d[2] + (onto ? sums[other] : 0.0f);
    }
}

/* Where the rows lie that hidden columns are multiplied with: tiles as block_product has them, in rows of `row` bytes; those that
 * W_1 has read, ones, and the gradient that enters W_2. */
struct d16_normed {
    uint32_t at;
    int row, units, unit;
};

/* The block's sums of the 64 columns `half` that hidden_backward has staged at `staged`, of f in all, by four warps: OF_1: of W_1
 * and b_1, else of W_2. */
template <class T, int TILES, bool OF_1, class P>
static __device__ __forceinline__ void put_columns_sums(float *sums, int half, int f, int warp, uint32_t staged, int staged_row,
                                                        const struct d16_normed &with, bool onto, const P &at)
{
    /* Position 16 w + g of the 64 columns, and the one 8 further. */
    const int column = column_of(half * 64 + warp % 4 * 16 + at.g);
    if constexpr (OF_1) {
        float d[3][4];
        block_product<T, TILES>(d, staged + 8 * MATRIX, staged_row, with.at, with.row, with.units, with.unit);
        put_sums(sums, 4 * D + column, 4 * D + column + 2, d[0], d[1], at.q, onto);
        put_bias_sums(sums + (4 * D + 2 * f) * D, 4 * D + column, 4 * D + column + 2, d[2], at.q, onto);
    } else {
        float d[2][4];
        block_product<T, TILES>(d, staged, staged_row, with.at + 3 * MATRIX, with.row, with.units, with.unit);
        put_sums(sums, 4 * D + f + column, 4 * D + f + column + 2, d[0], d[1], at.q, onto);
    }
}

/* Of b_2, by one warp. */
template <class T, int TILES, class P>
static __device__ __forceinline__ void put_b_2_sums(float *sums, int f, const struct d16_normed &with, bool onto, const P &at)
{
    constexpr int AHEAD = TILES == 1 ? 4 : 1; /* loads on their way */
    float d[4] = {0, 0, 0, 0};
    uint32_t p = with.at + (uint32_t)(at.lane / 16 * with.row + (3 + at.lane / 8 % 2) * MATRIX + at.lane % 8 * 16);
#pragma unroll AHEAD
    for (int i = 0; i < with.units; i++, p += with.unit) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            uint32_t r[4];
            ps_ldmatrix4_transposed_at(r, p + tile * 2 * with.row);
            add_ones<T>(d, r);
        }
    }
    put_bias_sums(sums + (4 * D + 2 * f) * D, 4 * D + f + at.g, 4 * D + f + at.g + 8, d, at.q, onto);
}

/* Of W_qkv', b_qkv, W_o' and b_o, by warps 8 to 11: units' matrices at `columns` (the gradients of q, k, v and of W_o's output, two
 * each) and at `rows` (those that W_qkv has read, ones, merged). */
template <class T, int TILES, class P>
static __device__ __forceinline__ void put_attention_sums(float *sums, float *bias_sums, int warp, uint32_t columns,
                                                          int columns_row, uint32_t rows, int rows_row, int units, int unit,
                                                          bool onto, const P &at)
{
    float d[5][4];
    block_product<T, TILES>(d, columns, columns_row, rows, rows_row, units, unit, at.tiles());
    const int row = warp % 4 * 16 + at.g;
    if (warp == 11) {
        put_sums(sums, row, row + 8, d[3], d[4], at.q, onto);
    } else {
        put_sums(sums, row, row + 8, d[0], d[1], at.q, onto);
    }
    put_bias_sums(bias_sums, row, row + 8, d[2], at.q, onto);
}

/* The operand scale g, zero where dropped: bit 8h + 4t + 16i, moved up by `shift`. */
template <class T, bool DROP>
static __device__ __forceinline__ void branch_operand(uint32_t (&a)[4], const float (&g)[2][4], float scale, uint32_t bits,
                                                      int shift)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = ps_pack<T>(g[i / 2][i % 2 * 2] * scale, g[i / 2][i % 2 * 2 + 1] * scale);
        if constexpr (DROP) {
            a[i] &= spread(bits, i % 2 * 8 + i / 2 * 4 + shift);
        }
    }
}

} // namespace ps_resident

#endif
