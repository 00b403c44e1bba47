/* The hidden layer of encoder/streamed/real16.cuh: gelu and dropout of a side's 32 columns, forward and backward, and those columns
 * as the left operand of the next product. */
#ifndef PS_KERNELS_CUDA_ENCODER_REAL16_HIDDEN_CUH
#define PS_KERNELS_CUDA_ENCODER_REAL16_HIDDEN_CUH

#include "kernels/cuda/encoder/streamed/real16_tile.cuh"

namespace PS_REAL16_SPACE
{

/* ---- left operands: fragment[k][4] holds columns 16 k .. 16 k + 15 of the warp's rows as mma takes them; group n of 8 columns of
 * row half h is fragment[n / 2][2 (n % 2) + h] ---- */

/* Columns of the hidden layer stand in panels as lanes have them, so that no lane has to exchange any: of each 32 columns,
 * 8 t + 2 c + i is the place of 8 c + 2 t + i (and the other way round). */
static __device__ __forceinline__ int hidden_column(int place)
{
    return (place & ~31) + 8 * (place % 8 / 2) + 2 * (place % 32 / 8) + place % 2;
}

/* Where the lane's columns of its first row are in the half's first panel of an operand of the hidden layer: bytes from the panel's
 * start. Its second row's are 8 rows further, the next panel's PANEL_BYTES. */
static __device__ __forceinline__ uint32_t fragment_place()
{
    const int row = product_row() + lane_id() / 4, unit = 4 * side_id() + lane_id() % 4;
    return row * 128 + ((unit ^ row % 8) << 4);
}

/* The side's 32 columns of the hidden layer, to a panel; place: fragment_place() further. */
static __device__ __forceinline__ void fragment_store(const uint32_t (&fragment)[2][4], char *place)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = fragment[i / 2][2 * (i % 2) + half];
        }
        ps_store_once((uint4 *)(place + half * 8 * 128), make_uint4(words[0], words[1], words[2], words[3]));
    }
}

/* What dropout keeps of the side's 32 columns of a chunk in the lane's two rows, whose blocks are `index` and f further (8 rows):
 * bit 16 i + 8 (c % 2) + 2 t + h of word c / 2 is column 8 c + 2 t + i of row half h. to: the warp's
 * words of the chunk. */
static __device__ __forceinline__ void hidden_draw(uint32_t (&kept)[2], const struct arguments &p, uint4 begin, uint32_t index,
                                                   uint32_t *to)
{
    kept[0] = kept[1] = ~0u;
    if (p.hidden.threshold) {
        const int t = lane_id() % 4;
        uint32_t bits = kept_pairs(p.drawing, begin, index, index + (uint32_t)p.f) << 8 * (t % 2);
        bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
        if (t % 2 == 0) {
            to[lane_id() / 2] = bits;
        }
        const uint32_t other = __shfl_xor_sync(0xffffffffu, bits, 2);
        kept[0] = t < 2 ? bits : other;
        kept[1] = t < 2 ? other : bits;
    }
}

/* The same as forward left it. */
static __device__ __forceinline__ void hidden_read(uint32_t (&kept)[2], const struct arguments &p, const uint32_t *from)
{
    kept[0] = kept[1] = ~0u;
    if (p.hidden.threshold) {
        const uint2 words = *(const uint2 *)(from + lane_id() / 4 * 2);
        kept[0] = words.x;
        kept[1] = words.y;
    }
}

/* A warp's words of a tile, of its first chunk; the next chunk's are HIDDEN_WORDS further. */
static __device__ __forceinline__ uint32_t *hidden_kept(const struct arguments &p, const struct tile &tile, int warp)
{
    return p.kept.hidden + ((int64_t)tile.number * WARPS + warp) * (HIDDEN_WORDS * hidden_chunks_of(p));
}

/* What backward will read of dropout's bits of a tile, to L2. */
static __device__ __forceinline__ void kept_prefetch(const struct arguments &p, const struct tile &tile)
{
    const int lane = lane_id();
    if (p.hidden.threshold && 2 * lane < hidden_chunks_of(p)) { /* 128 bytes are two chunks */
        ps_prefetch_near(hidden_kept(p, tile, warp_id()) + 2 * HIDDEN_WORDS * lane);
    }
    if (p.attention.threshold && lane == WARP_ROWS) {
        ps_prefetch_near(p.kept.attention + (int64_t)tile.number * THREADS + threadIdx.x);
    }
    if (p.output.threshold && lane == WARP_ROWS) {
        ps_prefetch_near(p.kept.output + (int64_t)tile.number * THREADS + threadIdx.x);
    }
}

/* Zeros where dropout keeps nothing, in columns of the hidden layer. */
static __device__ __forceinline__ void hidden_masks(uint32_t (&masks)[2][4], const uint32_t (&kept)[2])
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            masks[c / 2][2 * (c % 2) + half] = pair_mask(kept[c / 2] << (7 - 2 * t - half), c % 2);
        }
    }
}

/* The operand of dropped sums: x[n][2 h], x[n][2 h + 1] are columns 8 n + 2 t, + 1 of row half h. */
static __device__ __forceinline__ void fragment_pack(uint32_t (&fragment)[2][4], const float (&x)[4][4],
                                                     const uint32_t (&masks)[2][4])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        fragment[i / 4][i % 4] = ps_pack<real16>(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        fragment[i / 4][i % 4] &= masks[i / 4][i % 4];
    }
}

/* y, W_1's sums for these columns, to the next product's operand. */
static __device__ __forceinline__ void hidden_forward(uint32_t (&hidden)[2][4], float (&y)[4][4], const uint32_t (&kept)[2])
{
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = y[c][i];
            y[c][i] = fmaf(x, ps_tanh(x * fmaf(x, x, GELU_LINEAR)), x);
        }
    }
    uint32_t masks[2][4];
    hidden_masks(masks, kept);
    fragment_pack(hidden, y, masks);
}

/* The same, and of the gradient dh that W_2 passes on that of z, twice: 2 gelu'(z) is 1 + t + (1 - t^2) z u'(z). */
static __device__ __forceinline__ void hidden_backward(uint32_t (&hidden)[2][4], uint32_t (&d_hidden)[2][4], float (&y)[4][4],
                                                       float (&dh)[4][4], const uint32_t (&kept)[2])
{
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = y[c][i], g = dh[c][i], part = fmaf(x, x, GELU_LINEAR), t = ps_tanh(x * part);
            const float slope = fmaf(x * fmaf(3.0f, part, -2.0f * GELU_LINEAR), fmaf(-t, t, 1.0f), t); /* less 1 */
            y[c][i] = fmaf(x, t, x);
            dh[c][i] = fmaf(g, slope, g);
        }
    }
    uint32_t masks[2][4];
    hidden_masks(masks, kept);
    fragment_pack(hidden, y, masks);
    fragment_pack(d_hidden, dh, masks);
}

} // namespace PS_REAL16_SPACE

#endif
