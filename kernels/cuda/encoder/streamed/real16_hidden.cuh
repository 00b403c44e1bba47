/* The hidden layer of encoder/streamed/real16.cu: gelu and dropout of a side's 32 columns, forward and backward, and those columns
 * as the left operand of the next product. */
#ifndef PS_KERNELS_CUDA_ENCODER_REAL16_HIDDEN_CUH
#define PS_KERNELS_CUDA_ENCODER_REAL16_HIDDEN_CUH

#include "kernels/cuda/encoder/streamed/real16_tile.cuh"

namespace PS_REAL16_SPACE
{

/* ---- left operands: fragment[k][4] holds columns 16 k .. 16 k + 15 of the warp's rows as mma takes them; group n of 8 columns of
 * row half h is fragment[n / 2][2 (n % 2) + h] ---- */

/* Row `row` of the tile, columns 8 unit .. 8 unit + 7 of a panel. */
static __device__ __forceinline__ uint4 *operand_at(real16 *operand, int panels, int tile, int row, int panel, int unit)
{
    const int64_t place = ((int64_t)(2 * tile + row / 64) * panels + panel) * 64 + row % 64;
    return (uint4 *)(operand + place * 64) + (unit ^ (row % 8));
}

/* Columns of the hidden layer stand in panels as lanes have them, so that no lane has to exchange any: of each 32 columns,
 * 8 t + 2 c + i is the place of 8 c + 2 t + i (and the other way round). */
static __device__ __forceinline__ int hidden_column(int place)
{
    return (place & ~31) + 8 * (place % 8 / 2) + 2 * (place % 32 / 8) + place % 2;
}

/* The side's 32 columns of the hidden layer, to a panel. */
static __device__ __forceinline__ void fragment_store(const uint32_t (&fragment)[2][4], real16 *operand, int panels, int tile,
                                                      int panel)
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = fragment[i / 2][2 * (i % 2) + half];
        }
        ps_store_once(operand_at(operand, panels, tile, own_row(half), panel, 4 * side_id() + t),
                      make_uint4(words[0], words[1], words[2], words[3]));
    }
}

/* From sums: x[n][2 h], x[n][2 h + 1] are columns 8 n + 2 t, + 1 of row half h. */
template <int K> static __device__ __forceinline__ void fragment_pack(uint32_t (&fragment)[K][4], const float (&x)[2 * K][4])
{
#pragma unroll
    for (int n = 0; n < 2 * K; n++) {
        fragment[n / 2][2 * (n % 2)] = ps_pack(x[n][0], x[n][1]);
        fragment[n / 2][2 * (n % 2) + 1] = ps_pack(x[n][2], x[n][3]);
    }
}

/* t = tanh of gelu, see kernels.h: sqrt(2 / pi), and 0.044715 of that. */
static constexpr float GELU_LINEAR = 0.7978845608028654f, GELU_CUBIC = 0.044715f * GELU_LINEAR;

static __device__ __forceinline__ float gelu_tanh(float x)
{
    return ps_tanh(x * fmaf(GELU_CUBIC, x * x, GELU_LINEAR));
}

/* What dropout keeps of the side's 32 columns of hidden chunk j in the lane's two rows (row: the tile's first): bit 8 c + k is
 * column 8 c + 2 t + k. */
static __device__ __forceinline__ void hidden_draw(uint32_t (&kept)[2], const struct arguments &p, uint64_t step,
                                                   const struct tile &tile, int j, int side)
{
    kept[0] = kept[1] = ~0u;
    if (p.hidden.threshold) {
        const int t = lane_id() % 4, words = 2 * hidden_chunks_of(p);
#pragma unroll
        for (int second = 0; second < 2; second++) {
            const uint32_t index = (uint32_t)(tile.row + own_row(second)) * (uint32_t)(p.f / 8) + 8 * j + 4 * side + t;
            kept[second] = quad_bits(kept_bits(p.hidden, step, index));
        }
        if (t < 2 && own_row(t) < tile.all) { /* chosen, not indexed: else they would be kept in memory */
            p.kept.hidden[(tile.row + own_row(t)) * words + 2 * j + side] = t ? kept[1] : kept[0];
        }
        kept[0] >>= 2 * t;
        kept[1] >>= 2 * t;
    }
}

/* The same as forward left it. */
static __device__ __forceinline__ void hidden_read(uint32_t (&kept)[2], const struct arguments &p, const struct tile &tile, int j,
                                                   int side)
{
    const int words = 2 * hidden_chunks_of(p);
#pragma unroll
    for (int second = 0; second < 2; second++) {
        kept[second] = ~0u;
        if (p.hidden.threshold && own_row(second) < tile.all) {
            kept[second] = p.kept.hidden[(tile.row + own_row(second)) * words + 2 * j + side];
        }
    }
}

/* What backward will read of dropout's bits of a tile, to L2. */
static __device__ __forceinline__ void kept_prefetch(const struct arguments &p, const struct tile &tile)
{
    const int lane = lane_id(), row = 64 * half_id() + first_row() + lane, words = 2 * hidden_chunks_of(p);
    if (p.hidden.threshold && lane < WARP_ROWS && row < tile.all) {
        ps_prefetch(p.kept.hidden + (tile.row + row) * words);
    }
    if (p.attention.threshold && lane == WARP_ROWS) {
        ps_prefetch(p.kept.attention + (int64_t)tile.number * THREADS + threadIdx.x);
    }
    if (p.output.threshold && lane == WARP_ROWS) {
        ps_prefetch(p.kept.output + (int64_t)tile.number * THREADS + threadIdx.x);
    }
}

/* z, the product for these columns and b_1, becomes drop(gelu(z)). */
static __device__ __forceinline__ void hidden_forward(float (&z)[4][4], const struct arguments &p, const uint32_t (&kept)[2])
{
    const float scale = p.hidden.threshold ? 0.5f * p.hidden.scale : 0.5f;
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = z[c][i], s = kept[i / 2] & 1u << (8 * c + i % 2) ? x * scale : 0.0f;
            z[c][i] = fmaf(s, gelu_tanh(x), s);
        }
    }
}

/* z, the product for these columns plus b_1, becomes drop(gelu(z)), and dh, the gradient of that, the gradient of z. */
static __device__ __forceinline__ void hidden_backward(float (&z)[4][4], float (&dh)[4][4], const struct arguments &p,
                                                       const uint32_t (&kept)[2])
{
    const float scale = p.hidden.threshold ? 0.5f * p.hidden.scale : 0.5f;
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = z[c][i], square = x * x, h = ps_tanh(x * fmaf(GELU_CUBIC, square, GELU_LINEAR));
            const float slope = fmaf(3.0f * GELU_CUBIC, square, GELU_LINEAR) * fmaf(-h, h, 1.0f);
            const float m = kept[i / 2] & 1u << (8 * c + i % 2) ? scale : 0.0f, share = fmaf(m, h, m);
            z[c][i] = x * share;
            dh[c][i] *= fmaf(x * m, slope, share);
        }
    }
}

} // namespace PS_REAL16_SPACE

#endif
