/* Tiles of 16-bit rows in shared memory, and the products of attention that a warp makes of them. A tile has chunks of 8 columns,
 * 16 bytes a row, which lie so that the 8 rows of a matrix that ldmatrix reads are in all banks: one of the ways below.
 * tile/mma.cuh says how a fragment lies in the lanes. */
#ifndef PS_KERNELS_CUDA_OPERANDS16_CUH
#define PS_KERNELS_CUDA_OPERANDS16_CUH

#include "kernels/cuda/tile/mma.cuh"

/* ---- units of rows, of 2, 4, 8 or 16 bytes, between tensors and tiles ---- */

/* On its way to a tile; zeros where it is not there: `from` is any address then. near: by L1, for what neighbouring units and
 * blocks ask for as well. */
static __device__ __forceinline__ void ps_attention_fetch(char *to, const char *from, bool there, int unit, bool near = false)
{
    if (unit == 16) { /* copies of a size that is told only when they run would cost more than this */
        if (!there) {
            *(uint4 *)to = make_uint4(0, 0, 0, 0);
        } else if (near) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(ps_shared_address(to)), "l"(from) : "memory");
        } else {
            ps_copy_async(to, from);
        }
    } else if (unit == 8) {
        ps_copy_async8_if(to, from, there);
    } else if (unit == 4) {
        ps_copy_async4_if(to, from, there);
    } else {
        *(uint16_t *)to = there ? *(const uint16_t *)from : 0;
    }
}

/* Pairs, added. */
template <typename T> static __device__ __forceinline__ uint32_t ps_attention_add(uint32_t a, uint32_t b)
{
    return ps_pack<T>(ps_low<T>(a) + ps_low<T>(b), ps_high<T>(a) + ps_high<T>(b));
}

/* From a tile, or added to what is there. */
template <typename T> static __device__ __forceinline__ void ps_attention_return(char *to, const char *from, bool add, int unit)
{
    if (unit == 16) {
        uint4 w = *(const uint4 *)from;
        if (add) {
            const uint4 old = *(const uint4 *)to;
            w = make_uint4(ps_attention_add<T>(w.x, old.x), ps_attention_add<T>(w.y, old.y), ps_attention_add<T>(w.z, old.z),
                           ps_attention_add<T>(w.w, old.w));
        }
        *(uint4 *)to = w;
    } else if (unit == 2) {
        ps_put((T *)to, ps_float(*(const T *)from) + (add ? ps_float(*(const T *)to) : 0.0f));
    } else {
#pragma unroll 1
        for (int word = 0; word < unit; word += 4) {
            const uint32_t w = *(const uint32_t *)(from + word);
            *(uint32_t *)(to + word) = add ? ps_attention_add<T>(w, *(const uint32_t *)(to + word)) : w;
        }
    }
}

/* Zeros. The block waits. */
static __device__ __forceinline__ void ps_attention_clear(char *memory, uint32_t bytes)
{
    for (uint32_t i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
        *(float4 *)(memory + i) = make_float4(0, 0, 0, 0);
    }
    __syncthreads();
}

/* The bits of keys `key` and the next that are below the count. */
static __device__ __forceinline__ uint32_t ps_attention_pair(uint32_t key, uint32_t count)
{
    return key + 1 < count ? ~0u : key < count ? 0xffffu : 0;
}

/* ---- tiles ---- */

/* A tile that has a chunk's rows one after the other, 16 bytes each, and `chunk` bytes from chunk to chunk. first: its first row,
 * in shared memory. */
struct ps_chunked {
    static constexpr uint32_t ROW = 16; /* bytes from row to row */
    uint32_t first, chunk;

    /* The lane's own of 16 or more rows, of the first chunk or the next, */
    __device__ __forceinline__ uint32_t lane(uint32_t row, uint32_t next) const
    {
        return first + row * ROW + next * chunk;
    }
    /* and t chunks on from there: an even number where lanes have two chunks. */
    __device__ __forceinline__ uint32_t step(uint32_t from, uint32_t t) const
    {
        return from + t * chunk;
    }
};

static __device__ __forceinline__ struct ps_chunked ps_chunks(const char *first, uint32_t chunk)
{
    return {ps_shared_address(first), chunk};
}

/* A head's part of rows of W bytes, 32, 64 or 128, as the copy engine leaves them: a row's units of 16 bytes exchanged, by the row,
 * so that 8 rows' same unit lies in all banks. first: its first row, a multiple of 8 in a box that begins at a multiple of 1,024
 * bytes; unit: the head's first, of 2^shift that it has in a row; as many chunks more lie `part` bytes on. */
template <int W> struct ps_boxed {
    static constexpr uint32_t ROW = W;
    uint32_t first, unit, shift, part;

    __device__ __forceinline__ uint32_t lane(uint32_t row, uint32_t next) const
    {
        const uint32_t there = (unit ^ row / (128 / W)) % (W / 16) * 16;
        return first + row * ROW + (shift ? there ^ next * 16 : there + next * part);
    }
    __device__ __forceinline__ uint32_t step(uint32_t from, uint32_t t) const
    {
        return (from ^ (t & ((1u << shift) - 1)) * 16) + (t >> shift) * part;
    }
};

/* ---- products ---- */

/* How many chunks there are, where the compiler is to know it; and how many turns of a loop over them it unrolls then. */
template <uint32_t N> struct ps_chunk_count {
    __device__ __forceinline__ constexpr operator uint32_t() const
    {
        return N;
    }
};
template <class COUNT> static constexpr int ps_unrolled = 1;
template <uint32_t N> static constexpr int ps_unrolled<ps_chunk_count<N>> = N;

/* The sum of a row of a times one of b, of so many chunks; of_a, of_b: where the rows lie. */
template <typename T, class A, class B, class COUNT>
static __device__ __forceinline__ float ps_attention_row_product(const A &a, uint32_t of_a, const B &b, uint32_t of_b, COUNT chunks)
{
    constexpr int TURNS = ps_unrolled<COUNT>;
    float sum = 0.0f;
#pragma unroll TURNS
    for (uint32_t t = 0; t < chunks; t++) {
        const uint4 x = ps_shared_load4(a.step(of_a, t)), y = ps_shared_load4(b.step(of_b, t));
        const uint32_t words[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sum = fmaf(ps_low<T>(words[0][j]), ps_low<T>(words[1][j]), sum);
            sum = fmaf(ps_high<T>(words[0][j]), ps_high<T>(words[1][j]), sum);
        }
    }
    return sum;
}

/* Matrices of 8 rows, one below the other, 16 TILES rows, of chunk t; or their transposes. */
template <int TILES, bool TURNED, class B>
static __device__ __forceinline__ void ps_attention_rows(uint32_t (&to)[2 * TILES], const B &b, uint32_t t)
{
    /* The upper half's addresses are not looked at where two matrices are read. */
    const uint32_t first = b.step(b.lane(threadIdx.x % 32, 0), t);
#pragma unroll
    for (int j = 0; j < TILES; j += 2) {
        if (j + 1 < TILES) {
            uint32_t y[4];
            if constexpr (TURNED) {
                ps_ldmatrix4_transposed_at(y, first + j * 16 * B::ROW);
            } else {
                ps_ldmatrix4_at(y, first + j * 16 * B::ROW);
            }
            to[2 * j] = y[0];
            to[2 * j + 1] = y[1];
            to[2 * j + 2] = y[2];
            to[2 * j + 3] = y[3];
        } else {
            uint32_t y[2];
            if constexpr (TURNED) {
                ps_ldmatrix2_transposed_at(y, first + j * 16 * B::ROW);
            } else {
                ps_ldmatrix2_at(y, first + j * 16 * B::ROW);
            }
            to[2 * j] = y[0];
            to[2 * j + 1] = y[1];
        }
    }
}

/* sum [16, 16 TILES] = start + rows of a times rows of b, over 16 columns; over the 8 of chunk t. start: a quadruple for every 8
 * columns, in turn. a, b: the lane's. */
template <typename T, int TILES, int ROW, int STARTS>
static __device__ __forceinline__ void ps_attention_scores16(float (&sum)[2 * TILES][4], const float (&start)[STARTS][4],
                                                             uint32_t a, uint32_t b)
{
    uint32_t x[4];
    ps_ldmatrix4_at(x, a);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        uint32_t y[4];
        ps_ldmatrix4_at(y, b + j * 16 * ROW);
        ps_mma16<T>(sum[2 * j], x, y[0], y[1], start[2 * j % STARTS]);
        ps_mma16<T>(sum[2 * j + 1], x, y[2], y[3], start[(2 * j + 1) % STARTS]);
    }
}

template <typename T, int TILES, int STARTS, class A, class B>
static __device__ __forceinline__ void ps_attention_scores8(float (&sum)[2 * TILES][4], const float (&start)[STARTS][4], const A &a,
                                                            const B &b, uint32_t t)
{
    uint32_t x[2], y[2 * TILES];
    ps_ldmatrix2_at(x, a.step(a.lane(threadIdx.x % 16, 0), t));
    ps_attention_rows<TILES, false>(y, b, t);
#pragma unroll
    for (int j = 0; j < 2 * TILES; j++) {
        ps_mma8<T>(sum[j], x[0], x[1], y[j], start[j % STARTS]);
    }
}

/* The same over all chunks of columns, 1 at least. */
template <typename T, int TILES, int STARTS, class A, class B, class COUNT>
static __device__ __forceinline__ void ps_attention_scores(float (&sum)[2 * TILES][4], const float (&start)[STARTS][4], const A &a,
                                                           const B &b, COUNT chunks)
{
    constexpr int TURNS = ps_unrolled<COUNT>;
    const uint32_t lane = threadIdx.x % 32;
    if (chunks == 1) {
        ps_attention_scores8<T, TILES>(sum, start, a, b, 0);
        return;
    }
    const uint32_t of_a = a.lane(lane % 16, lane / 16), of_b = b.lane(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    ps_attention_scores16<T, TILES, B::ROW>(sum, start, of_a, of_b);
    uint32_t t = 2;
#pragma unroll TURNS
    for (; t + 2 <= chunks; t += 2) {
        ps_attention_scores16<T, TILES, B::ROW>(sum, sum, a.step(of_a, t), b.step(of_b, t));
    }
    if (t < chunks) {
        ps_attention_scores8<T, TILES>(sum, sum, a, b, t);
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

/* sums [16, 8 CHUNKS] += a b of several a, b [16 TILES, 8 CHUNKS] from chunk t on, an even one. */
template <typename T, int TILES, int CHUNKS, int COUNT, class B>
static __device__ __forceinline__ void ps_attention_mix(float (&sum)[COUNT][CHUNKS][4], const uint32_t (&a)[COUNT][TILES][4],
                                                        const B &b, uint32_t t = 0)
{
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (CHUNKS % 2 != 0) {
        uint32_t y[2 * TILES];
        ps_attention_rows<TILES, true>(y, b, t + CHUNKS - 1);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
#pragma unroll
            for (int n = 0; n < COUNT; n++) {
                ps_mma16<T>(sum[n][CHUNKS - 1], a[n][j], y[2 * j], y[2 * j + 1], sum[n][CHUNKS - 1]);
            }
        }
    }
    if constexpr (CHUNKS > 1) {
        const uint32_t first = b.lane(lane % 16, lane / 16);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
#pragma unroll
            for (int i = 0; i + 2 <= CHUNKS; i += 2) {
                uint32_t y[4];
                ps_ldmatrix4_transposed_at(y, b.step(first, t + i) + j * 16 * B::ROW);
#pragma unroll
                for (int n = 0; n < COUNT; n++) {
                    ps_mma16<T>(sum[n][i], a[n][j], y[0], y[1], sum[n][i]);
                    ps_mma16<T>(sum[n][i + 1], a[n][j], y[2], y[3], sum[n][i + 1]);
                }
            }
        }
    }
}

/* The same of one. */
template <typename T, int TILES, int CHUNKS, class B>
static __device__ __forceinline__ void ps_attention_mix(float (&sum)[CHUNKS][4], const uint32_t (&a)[TILES][4], const B &b,
                                                        uint32_t t = 0)
{
    ps_attention_mix<T, TILES, CHUNKS, 1>((float(&)[1][CHUNKS][4])sum, (const uint32_t(&)[1][TILES][4])a, b, t);
}

/* An operand of 16 rows by 16 columns, or by 8, its first half, to a tile's first rows, chunk t. */
template <int HALVES, class C>
static __device__ __forceinline__ void ps_attention_store(const C &to, const uint32_t (&r)[2 * HALVES], uint32_t t = 0)
{
    const uint32_t lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    const uint32_t at = to.step(to.lane(lane % 16, HALVES == 2 ? lane / 16 : 0), t);
    if constexpr (HALVES == 2) {
        ps_stmatrix4_at(at, r);
    } else {
        ps_stmatrix2_at(at, r);
    }
#else
#pragma unroll
    for (int i = 0; i < 2 * HALVES; i++) { /* row lane / 4, and of its four words number lane % 4 */
        ps_shared_store(to.step(to.lane(lane / 4 + i % 2 * 8, i / 2), t) + lane % 4 * 4, r[i]);
    }
#endif
}

/* 16 rows by 8 CHUNKS columns, times a factor for each of the lane's two rows, rounded, to a tile's first rows and so many of its
 * chunks, from t on; add: to what is there, rounded once. */
template <typename T, int CHUNKS, class C>
static __device__ __forceinline__ void ps_attention_put(const C &to, const float (&sum)[CHUNKS][4], float upper, float lower,
                                                        uint32_t chunks, bool add = false, uint32_t t = 0)
{
    constexpr int HALVES = CHUNKS > 1 ? 2 : 1;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < CHUNKS; i += HALVES) {
        if ((uint32_t)i < chunks) {
            float v[4 * HALVES];
            uint32_t r[2 * HALVES];
#pragma unroll
            for (int j = 0; j < 4 * HALVES; j++) {
                v[j] = sum[i + j / 4][j % 4] * (j % 4 < 2 ? upper : lower);
            }
            if (add) {
#pragma unroll
                for (int j = 0; j < 2 * HALVES; j++) {
                    const uint32_t old = ps_shared_load(to.step(to.lane(lane / 4 + j % 2 * 8, j / 2), t + i) + lane % 4 * 4);
                    v[2 * j] += ps_low<T>(old);
                    v[2 * j + 1] += ps_high<T>(old);
                }
                __syncwarp();
            }
#pragma unroll
            for (int j = 0; j < 2 * HALVES; j++) {
                r[j] = ps_pack<T>(v[2 * j], v[2 * j + 1]);
            }
            if (HALVES == 1 || (uint32_t)i + 1 < chunks) {
                ps_attention_store<HALVES>(to, r, t + i);
            } else {
                const uint32_t first[2] = {r[0], r[1]};
                ps_attention_store<1>(to, first, t + i);
            }
        }
    }
}

/* Both, of all chunks: tile `to` = factors a b, or += that. */
template <typename T, int TILES, class B, class C, class COUNT>
static __device__ __forceinline__ void ps_attention_mixed(const C &to, const uint32_t (&a)[TILES][4], const B &b, float upper,
                                                          float lower, COUNT chunks, bool add = false)
{
    constexpr int TURNS = ps_unrolled<COUNT>;
    uint32_t t = 0;
#pragma unroll TURNS
    for (; t + 2 <= chunks; t += 2) {
        float sum[2][4];
        ps_zero(sum);
        ps_attention_mix<T, TILES, 2>(sum, a, b, t);
        ps_attention_put<T, 2>(to, sum, upper, lower, 2, add, t);
    }
    if (t < chunks) {
        float sum[1][4];
        ps_zero(sum);
        ps_attention_mix<T, TILES, 1>(sum, a, b, t);
        ps_attention_put<T, 1>(to, sum, upper, lower, 1, add, t);
    }
}

#endif
