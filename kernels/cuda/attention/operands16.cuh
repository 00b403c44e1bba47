/* Tiles of 16-bit rows in shared memory, and the products of attention that a warp makes of them. A tile has chunks of 8 columns; a
 * chunk lies row by row, 16 bytes each, so that the 8 rows of a matrix that ldmatrix reads lie side by side, in all banks.
 * tile/mma.cuh says how a fragment lies in the lanes. */
#ifndef PS_KERNELS_CUDA_OPERANDS16_CUH
#define PS_KERNELS_CUDA_OPERANDS16_CUH

#include "kernels/cuda/tile/mma.cuh"

/* sum [16, 16 TILES] += rows of a times rows of b, over chunks of columns, `chunk` bytes apart. a, b: their first rows. */
template <typename T, int TILES>
static __device__ __forceinline__ void ps_attention_scores(float (&sum)[2 * TILES][4], uint32_t a, uint32_t b, uint32_t chunks,
                                                           uint32_t chunk)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t last = b + lane % 16 * 16;
    a += lane % 16 * 16 + lane / 16 * chunk;
    b += (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * chunk;
    uint32_t t = 0;
#pragma unroll 1
    for (; t + 2 <= chunks; t += 2) {
        uint32_t x[4];
        ps_ldmatrix4_at(x, a + t * chunk);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            uint32_t y[4];
            ps_ldmatrix4_at(y, b + t * chunk + j * 256);
            ps_mma16<T>(sum[2 * j], x, y[0], y[1], sum[2 * j]);
            ps_mma16<T>(sum[2 * j + 1], x, y[2], y[3], sum[2 * j + 1]);
        }
    }
    if (t < chunks) {
        uint32_t x[2];
        ps_ldmatrix2_at(x, a + t * chunk);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            uint32_t y[2];
            ps_ldmatrix2_at(y, last + t * chunk + j * 256);
            ps_mma8<T>(sum[2 * j], x[0], x[1], y[0], sum[2 * j]);
            ps_mma8<T>(sum[2 * j + 1], x[0], x[1], y[1], sum[2 * j + 1]);
        }
    }
}

/* A matrix [16, 16 TILES], rounded, as operands of the next product. */
template <typename T, int TILES>
static __device__ __forceinline__ void ps_attention_round(uint32_t (&to)[TILES][4], const float (&from)[2 * TILES][4])
{
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) {
        to[i / 4][i % 4] = ps_pack<T>(from[i / 2][i % 2 * 2], from[i / 2][i % 2 * 2 + 1]);
    }
}

/* sum [16, 8 CHUNKS] += a b, b [16 TILES, 8 CHUNKS] from its first row and chunk on. */
template <typename T, int TILES, int CHUNKS>
static __device__ __forceinline__ void ps_attention_mix(float (&sum)[CHUNKS][4], const uint32_t (&a)[TILES][4], uint32_t b,
                                                        uint32_t chunk)
{
    const uint32_t lane = threadIdx.x % 32;
    b += lane % 16 * 16;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        if constexpr (CHUNKS == 2) {
            uint32_t y[4];
            ps_ldmatrix4_transposed_at(y, b + lane / 16 * chunk + j * 256);
            ps_mma16<T>(sum[0], a[j], y[0], y[1], sum[0]);
            ps_mma16<T>(sum[1], a[j], y[2], y[3], sum[1]);
        } else {
            static_assert(CHUNKS == 1, "what an ldmatrix reads");
            uint32_t y[2];
            ps_ldmatrix2_transposed_at(y, b + j * 256);
            ps_mma16<T>(sum[0], a[j], y[0], y[1], sum[0]);
        }
    }
}

/* 16 rows by 8 CHUNKS columns, times a factor for each of the lane's two rows, rounded, to a tile from its first of these rows on.
 */
template <typename T, int CHUNKS>
static __device__ __forceinline__ void ps_attention_put(char *to, const float (&sum)[CHUNKS][4], float upper, float lower,
                                                        uint32_t chunk)
{
    to += threadIdx.x % 32 * 4; /* row lane / 4, and of its four words number lane % 4 */
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        *(uint32_t *)(to + i * chunk) = ps_pack<T>(sum[i][0] * upper, sum[i][1] * upper);
        *(uint32_t *)(to + i * chunk + 128) = ps_pack<T>(sum[i][2] * lower, sum[i][3] * lower);
    }
}

/* Both, of all chunks: tile `to` = factors a b. */
template <typename T, int TILES>
static __device__ __forceinline__ void ps_attention_mixed(char *to, const uint32_t (&a)[TILES][4], uint32_t b, float upper,
                                                          float lower, uint32_t chunks, uint32_t chunk)
{
    uint32_t t = 0;
#pragma unroll 1
    for (; t + 2 <= chunks; t += 2) {
        float sum[2][4];
        ps_zero(sum);
        ps_attention_mix<T, TILES, 2>(sum, a, b + t * chunk, chunk);
        ps_attention_put<T, 2>(to + t * chunk, sum, upper, lower, chunk);
    }
    if (t < chunks) {
        float sum[1][4];
        ps_zero(sum);
        ps_attention_mix<T, TILES, 1>(sum, a, b + t * chunk, chunk);
        ps_attention_put<T, 1>(to + t * chunk, sum, upper, lower, chunk);
    }
}

#endif
