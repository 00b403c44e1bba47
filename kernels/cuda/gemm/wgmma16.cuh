/* Products of 16 bits on Hopper, c = a b of many rows, with what follows them done on the way out (ps_gemm_finish, ps_gemm_bias).
 *
 * Why: between two products of a layer stand a bias, an activation, dropout, the residual stream and a norm's sums over rows, each
 * a pass over [m, n] of its own otherwise. A tile is 128 rows by N columns. The copy engine brings 64 of the summed dimension at a
 * time to a ring of panels, zeros beyond the edges; wgmma multiplies them there. A warp's 16 rows of sums then go through shared
 * memory, 64 columns at a time, rounded where what follows reads them so. From there a lane takes 8 neighbouring columns: 16 bytes
 * of each tensor, whole lines of memory a warp, and one block of dropout's draws. What follows is written once, in a loop that is
 * not unrolled: straight on it is longer than what the instructions' caches hold. Sums over rows by column (BatchNorm's) leave the
 * block as one row of partial sums; the last block of a few rows of tiles to finish merges those, and the last of these merges
 * theirs, in a fixed order.
 *
 * Two kernels. product_kernel: a block of two warpgroups to a tile, 64 rows each, and several blocks a multiprocessor. long_kernel:
 * blocks stay, a warpgroup to a tile, two taking turns, so that the one multiplies while the other's sums go out; a third one's
 * warp brings panels, as far ahead as the ring is long, and pairs of blocks share those of the right operand.
 *
 * Bytes: 2 (m k ceil(n / N) + k n ceil(m / 128)), the repeats from L2, half of the second term's where blocks share, and 2 m n for
 * c and for each tensor beside it. FLOPs 2 m n k. Memory bounds products of up to 256 terms, L2 and wgmma longer ones. */
#ifndef PS_KERNELS_CUDA_GEMM_WGMMA16_CUH
#define PS_KERNELS_CUDA_GEMM_WGMMA16_CUH

#include <string.h>

#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tile/activation.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/vector.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

namespace wgmma16
{

enum {
    ROWS = 128, /* of a tile */
    DEEP = 64,  /* of the summed dimension at once: a panel's lines of 128 bytes */
    THREADS = 256,
    STAGES = 3,               /* of the ring */
    PANEL = DEEP * DEEP * 2,  /* bytes of 64 lines */
    ROWS_BYTES = ROWS * 128,  /* of a stage */
    STAGED_BYTES = 4096,      /* of a warp's sums on their way out: 16 rows of 64 */
    MOST_SHARED = 100 * 1024, /* two blocks a multiprocessor */
    /* long_kernel's */
    WIDE = 128, /* columns of a tile */
    CLUSTER = 2,
    GROUP = 128, /* threads of a warpgroup */
    LONG_THREADS = 3 * GROUP,
    MOST_STAGES = 6,
    FEW_REGISTERS = 40, /* of who brings panels, and of who multiplies */
    MANY_REGISTERS = 232,
};

/* What a kernel is told. */
struct call {
    int64_t m;
    int n, k, tiles_n;
    int pieces, places, strides; /* long_kernel's: panels of a sum; tiles, counted by those of a cluster; clusters */
    int64_t ldc;
    void *c, *kept;
    const void *addend, *x;
    const float *bias;
    struct ps_dropout dropout;
    enum ps_activation activation;
    /* Of sums over rows: [tiles + groups, n] pairs, a ticket for each group of `share` tiles and one more, for each tile_n. */
    float2 *partials;
    unsigned *tickets;
    int tiles_m, share, groups;
    float *mean, *var, *running_mean, *running_var; /* SUM: mean and var are read */
    float *means, *dgamma, *dbeta;
    double momentum;
    float epsilon;
};

/* Bytes of a stage's right operand: panels of 64 lines by 64 columns, or N lines by 64. */
template <int N, bool ACROSS> static constexpr int right_bytes = ACROSS ? (N + 63) / 64 * PANEL : N * 128;

template <int N, bool ACROSS> static constexpr int stage_bytes = ROWS_BYTES + right_bytes<N, ACROSS>;

/* 8 neighbouring elements as they lie in memory. */
struct eight {
    uint4 words;
};

template <typename T> static __device__ __forceinline__ void unpack(float (&v)[8], const eight &from)
{
    ps_unpack<T>(v, from.words.x);
    ps_unpack<T>(v + 2, from.words.y);
    ps_unpack<T>(v + 4, from.words.z);
    ps_unpack<T>(v + 6, from.words.w);
}

template <typename T> static __device__ __forceinline__ void pack(eight &to, const float (&v)[8])
{
    to.words = make_uint4(ps_pack<T>(v), ps_pack<T>(v + 2), ps_pack<T>(v + 4), ps_pack<T>(v + 6));
}

/* Of two neighbours: in each half ones where the draw keeps it. */
static __device__ __forceinline__ uint32_t kept(const struct ps_dropout &d, uint32_t draws)
{
    return ps_kept2(draws, ps_below(d.threshold), ps_minus_below(d.threshold)) * 0xffffu;
}

/* Zeros where the draws drop it: in words, and in floats. */
static __device__ __forceinline__ void drop(eight &v, const struct ps_dropout &d, const struct ps_block &draws)
{
    v.words.x &= kept(d, draws.word[0]);
    v.words.y &= kept(d, draws.word[1]);
    v.words.z &= kept(d, draws.word[2]);
    v.words.w &= kept(d, draws.word[3]);
}

static __device__ __forceinline__ void drop(float (&v)[8], const struct ps_dropout &d, const struct ps_block &draws)
{
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const uint32_t masks = kept(d, draws.word[j / 2]);
        v[j] = __uint_as_float(__float_as_uint(v[j]) & __byte_perm(masks, 0, 0x1010));
        v[j + 1] = __uint_as_float(__float_as_uint(v[j + 1]) & __byte_perm(masks, 0, 0x3232));
    }
}

/* v = scale times the activation of t, SLOPE: v times its derivative at t. gelu by the instruction for tanh, whose error 16 bits
 * hide. */
template <enum ps_activation ACTIVATION, bool SLOPE>
static __device__ __forceinline__ void activate(float (&v)[2][8], const float (&t)[2][8], float scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float x = t[i][j];
            if constexpr (ACTIVATION == PS_GELU_TANH && SLOPE) {
                v[i][j] *= 0.5f * scale;
                ps_gelu_twice_backward(x, v[i][j]);
            } else if constexpr (ACTIVATION == PS_GELU_TANH) {
                v[i][j] = 0.5f * scale * ps_gelu_twice(x);
            } else if constexpr (ACTIVATION == PS_GELU) {
                v[i][j] = SLOPE ? v[i][j] * ps_gelu_near_slope(x, scale) : ps_gelu_near(x, scale);
            } else {
                v[i][j] = scale * (SLOPE ? v[i][j] * ps_activation_slope<ACTIVATION>(x) : ps_activated<ACTIVATION>(x));
            }
        }
    }
}

template <bool SLOPE>
static __device__ __forceinline__ void activate(enum ps_activation which, float (&v)[2][8], const float (&t)[2][8], float scale)
{
    if (which == PS_GELU) {
        activate<PS_GELU, SLOPE>(v, t, scale);
    } else if (which == PS_RELU) {
        activate<PS_RELU, SLOPE>(v, t, scale);
    } else {
        activate<PS_GELU_TANH, SLOPE>(v, t, scale);
    }
}

/* ---- sums over rows ---- */

/* Rows from `row` on, at most `most`. */
static __device__ __forceinline__ int rows_at(int64_t m, int64_t row, int most)
{
    return row >= m ? 0 : m - row < most ? (int)(m - row) : most;
}

/* A tile's threads: M of them, the block's or (of LONG_THREADS) the warpgroup's. */
template <int M> struct crew {
    static __device__ __forceinline__ int side()
    {
        return M == THREADS ? 0 : (int)threadIdx.x / M;
    }
    static __device__ __forceinline__ int thread()
    {
        return M == THREADS ? (int)threadIdx.x : (int)threadIdx.x % M;
    }
    static __device__ __forceinline__ void meet()
    {
        ps_barrier(1 + side(), M);
    }
};

/* True in the crew that is the last of `count` to come here: it sees what the others wrote before. */
template <int M> static __device__ __forceinline__ bool comes_last(unsigned *ticket, int count)
{
    __shared__ bool last[THREADS / M];
    bool &mine = last[crew<M>::side()];
    __threadfence();
    crew<M>::meet();
    if (crew<M>::thread() == 0) {
        mine = atomicAdd(ticket, 1u) == (unsigned)(count - 1);
        if (mine) {
            *ticket = 0;
        }
    }
    crew<M>::meet();
    if (mine) {
        __threadfence();
    }
    return mine;
}

/* One pair a column of `count` rows of pairs, each over `rows` rows of c from `row` on: two sums, or (MOMENTS) a mean and M2,
 * merged about the first one's mean. In the first N threads. */
template <int M, int N, bool MOMENTS>
static __device__ __forceinline__ void merge(double &first, double &second, const float2 *from, int n, int column, int count,
                                             int64_t row, int64_t rows, int64_t m)
{
    __shared__ double all[THREADS / M][2][M];
    double(&shared)[2][M] = all[crew<M>::side()];
    const int thread = crew<M>::thread(), part = thread / N;
    double a = 0, b = 0, total = 0;
    const double pivot = MOMENTS && column < n ? (double)__ldcg(from + column).x : 0;
    if (column < n) {
#pragma unroll 4
        for (int i = part; i < count; i += M / N) {
            const float2 v = __ldcg(from + (int64_t)i * n + column);
            if constexpr (MOMENTS) {
                const int64_t left = m - row - i * rows;
                const double of = (double)(left < rows ? left : rows), away = (double)v.x - pivot;
                a += of * away;
                b += (double)v.y + of * away * away;
            } else {
                a += (double)v.x;
                b += (double)v.y;
            }
        }
    }
    shared[0][thread] = a;
    shared[1][thread] = b;
    crew<M>::meet();
    if (part == 0) {
#pragma unroll
        for (int i = 1; i < M / N; i++) {
            a += shared[0][thread + i * N];
            b += shared[1][thread + i * N];
        }
        if constexpr (MOMENTS) {
            const int64_t left = m - row;
            total = (double)(left < count * rows ? left : count * rows);
            const double away = a / total;
            b -= a * away;
            a = pivot + away;
            b = b < 0 ? 0 : b; /* what is not a number stays that */
        }
    }
    crew<M>::meet();
    first = a;
    second = b;
}

/* The whole's mean and M2, or sums, of a column. */
template <bool MOMENTS>
static __device__ __forceinline__ void finish_column(const struct call &x, int column, double first, double second)
{
    const double count = (double)x.m;
    if constexpr (MOMENTS) {
        const double var = second / count;
        x.mean[column] = (float)first;
        x.var[column] = (float)var;
        if (isfinite((float)first) && isfinite((float)var)) {
            x.running_mean[column] += (float)(x.momentum * (first - x.running_mean[column]));
            x.running_var[column] += (float)(x.momentum * (second / (count - 1.0) - x.running_var[column]));
        }
    } else {
        const double product = second * (double)rsqrtf(x.var[column] + x.epsilon);
        x.dbeta[column] += (float)first;
        x.dgamma[column] += (float)product;
        x.means[column] = (float)(first / count);
        x.means[x.n + column] = (float)(product / count);
    }
}

/* From the warps' pairs, of N columns each, to the whole's. */
template <int M, int N, bool MOMENTS>
static __device__ __forceinline__ void gather_sums(const struct call &x, const float2 (*warps)[N], int tile_m, int tile_n)
{
    const int thread = crew<M>::thread(), own = thread % N, column = tile_n * N + own;
    crew<M>::meet();
    if (thread < N && column < x.n) {
        float2 all = make_float2(0, 0);
        if constexpr (MOMENTS) {
            const float count = (float)rows_at(x.m, (int64_t)tile_m * ROWS, ROWS);
            float sum = 0, m2 = 0;
#pragma unroll
            for (int w = 0; w < 8; w++) {
                sum += (float)rows_at(x.m, (int64_t)tile_m * ROWS + 16 * w, 16) * (warps[w][own].x - warps[0][own].x);
            }
            const float away = sum / count;
#pragma unroll
            for (int w = 0; w < 8; w++) {
                const float difference = warps[w][own].x - warps[0][own].x - away;
                m2 += warps[w][own].y + (float)rows_at(x.m, (int64_t)tile_m * ROWS + 16 * w, 16) * difference * difference;
            }
            all = make_float2(warps[0][own].x + away, m2);
        } else {
#pragma unroll
            for (int w = 0; w < 8; w++) {
                all.x += warps[w][own].x;
                all.y += warps[w][own].y;
            }
        }
        x.partials[(int64_t)tile_m * x.n + column] = all;
    }
    const int group = tile_m / x.share, first = group * x.share;
    const int count = x.tiles_m - first < x.share ? x.tiles_m - first : x.share;
    unsigned *const tickets = x.tickets + tile_n * (x.groups + 1);
    if (!comes_last<M>(tickets + group, count)) {
        return;
    }
    double a, b;
    merge<M, N, MOMENTS>(a, b, x.partials + (int64_t)first * x.n, x.n, column, count, (int64_t)first * ROWS, ROWS, x.m);
    if (x.groups > 1) {
        float2 *const groups = x.partials + (int64_t)x.tiles_m * x.n;
        if (thread < N && column < x.n) {
            groups[(int64_t)group * x.n + column] = make_float2((float)a, (float)b);
        }
        if (!comes_last<M>(tickets + x.groups, x.groups)) {
            return;
        }
        merge<M, N, MOMENTS>(a, b, groups, x.n, column, x.groups, 0, (int64_t)x.share * ROWS, x.m);
    }
    if (thread < N && column < x.n) {
        finish_column<MOMENTS>(x, column, a, b);
    }
}

/* ---- panels ---- */

/* One lane: the piece-th 64 of the summed dimension, of the tile's rows and columns, to a stage. Of `BLOCKS` blocks that share the
 * right operand this one, `rank`, brings its part of that to all. */
template <int N, bool ACROSS, int BLOCKS>
static __device__ __forceinline__ void bring_panels(const CUtensorMap &a_map, const CUtensorMap &b_map, uint32_t stage,
                                                    uint32_t barrier, int tile_m, int tile_n, int piece, int rank)
{
    auto copy = [&](uint32_t to, int column, int line) {
        BLOCKS > 1 ? ps_tensor_copy2_to(to, &b_map, column, line, barrier, (1 << BLOCKS) - 1)
                   : ps_tensor_copy2(to, &b_map, column, line, barrier);
    };
    ps_mbarrier_expect(barrier, stage_bytes<N, ACROSS>);
    ps_tensor_copy2(stage, &a_map, piece * DEEP, tile_m * ROWS, barrier);
    if constexpr (ACROSS) {
        constexpr int LINES = DEEP / BLOCKS;
#pragma unroll
        for (int p = 0; p < (N + 63) / 64; p++) {
            copy(stage + ROWS_BYTES + p * PANEL + rank * LINES * 128, tile_n * N + p * 64, piece * DEEP + rank * LINES);
        }
    } else {
        constexpr int LINES = N / BLOCKS;
        copy(stage + ROWS_BYTES + rank * LINES * 128, piece * DEEP, tile_n * N + rank * LINES);
    }
}

/* ---- a tile on its way out ---- */

/* A warp's 16 rows, HALVES times with 64 between, go out by parts of 64 columns (32 where tiles are no multiple of 64), the halves
 * of a part one after the other. A step takes two pieces a lane: 8 columns of two rows. */
template <int N, int HALVES> struct way_out {
    static constexpr int COLUMNS = N % 64 ? 32 : 64, UNITS = COLUMNS / 8, LINES = 32 / UNITS, PAIRS = 8 / LINES,
                         PARTS = HALVES * N / COLUMNS, STEPS = PARTS * PAIRS;

    static __device__ __forceinline__ int unit()
    {
        return (int)threadIdx.x % UNITS;
    }
    static __device__ __forceinline__ int half(int step)
    {
        return step / PAIRS % HALVES;
    }
    static __device__ __forceinline__ int part(int step) /* its first column */
    {
        return step / PAIRS / HALVES * COLUMNS;
    }
    static __device__ __forceinline__ int line(int step, int i)
    {
        return (step % PAIRS * 2 + i) * LINES + (int)threadIdx.x % 32 / UNITS;
    }
    static __device__ __forceinline__ int row(int step, int i)
    {
        return 64 * half(step) + line(step, i);
    }
    static __device__ __forceinline__ int column(int step)
    {
        return part(step) + 8 * unit();
    }
};

/* Where a warp's part of a tile begins: its first element; rows from there on, and columns; block of dropout's draws. */
struct corner {
    int64_t at;
    int rows, columns;
    uint32_t block;
};

template <int HALVES> static __device__ __forceinline__ struct corner corner_of(const struct call &x, int64_t row, int column)
{
    return {row * x.ldc + column, rows_at(x.m, row, HALVES * 64), x.n - column,
            (uint32_t)row * ((uint32_t)x.n / 8) + (uint32_t)column / 8};
}

/* A lane's part of the tensors beside c. */
struct beside {
    eight addend[2], more[2];
};

/* What a step reads of them. */
template <typename T, int N, int HALVES, enum ps_finish FINISH, bool COUNTED>
static __device__ __forceinline__ void fetch(const struct call &x, struct beside &b, const struct corner &corner, int step)
{
    using out = way_out<N, HALVES>;
    constexpr bool READS = FINISH == PS_FINISH_SUM || FINISH == PS_FINISH_RESIDUAL || FINISH == PS_FINISH_SLOPE;
    const T *const from = (const T *)(FINISH == PS_FINISH_SLOPE ? x.kept : x.addend), *const more = (const T *)x.x;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = out::row(step, i), column = out::column(step);
        const uint32_t at = (uint32_t)row * (uint32_t)x.ldc + (uint32_t)column;
        b.addend[i].words = b.more[i].words = make_uint4(0, 0, 0, 0);
        if (row < corner.rows && column < corner.columns) {
            if (READS && from) {
                b.addend[i].words = *(const uint4 *)(from + corner.at + at);
            }
            if (FINISH == PS_FINISH_SUM && COUNTED) {
                b.more[i].words = *(const uint4 *)(more + corner.at + at);
            }
        }
    }
}

/* All of it to L2, before the products. */
template <typename T, int N, int HALVES, enum ps_finish FINISH, bool COUNTED>
static __device__ __forceinline__ void call_near(const struct call &x, const struct corner &corner)
{
    constexpr int LINES = (N + 63) / 64; /* of 128 bytes, of a row */
    const T *const from = (const T *)(FINISH == PS_FINISH_SLOPE ? x.kept : x.addend), *const more = (const T *)x.x;
#pragma unroll
    for (int i = 0; i < HALVES * 16 * LINES; i += 32) {
        const int line = (i + (int)threadIdx.x % 32) / LINES, row = line / 16 * 64 + line % 16;
        const int column = (i + (int)threadIdx.x % 32) % LINES * 64;
        if (line < HALVES * 16 && row < corner.rows && column < corner.columns) {
            const int64_t at = corner.at + (uint32_t)row * (uint32_t)x.ldc + (uint32_t)column;
            if (FINISH != PS_FINISH_ACTIVATION && from) {
                ps_prefetch_near(from + at);
            }
            if (FINISH == PS_FINISH_SUM && COUNTED) {
                ps_prefetch_near(more + at);
            }
        }
    }
}

/* COLUMNS columns of the warp's 16 rows of sums, from the first-th 8 on, to `stage`: FLOATS as they are, 256 bytes a row, of 32
 * bytes the second half 128 further; else rounded, 128 bytes a row. Units of 16 bytes change places by the row, and of floats by
 * the half, so that neither writes nor reads meet in a bank. */
template <typename T, int COLUMNS, bool FLOATS, int M>
static __device__ __forceinline__ void stage_part(const float (&sum)[M][4], int first, uint32_t stage)
{
    const int lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if constexpr (FLOATS) {
        const uint32_t to = stage + g * 256 + q / 2 * 128 + ((g ^ q / 2 * 4) << 4) + q % 2 * 8;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            ps_shared_store2(to ^ j << 4, make_float2(sum[first + j][0], sum[first + j][1]));
            ps_shared_store2((to ^ j << 4) + 8 * 256, make_float2(sum[first + j][2], sum[first + j][3]));
        }
    } else {
        const uint32_t to = stage + lane % 16 * 128 + ((lane % 8 ^ lane / 16) << 4);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                words[2 * t] = ps_pack<T>(&sum[first + j + t][0]);
                words[2 * t + 1] = ps_pack<T>(&sum[first + j + t][2]);
            }
            ps_stmatrix4_at(to ^ j << 4, words);
        }
    }
}

/* TOGETHER: all parts, before the first step; else the one that begins. */
template <typename T, int N, int HALVES, bool TOGETHER, bool FLOATS>
static __device__ __forceinline__ void stage_parts(const float (&sum)[HALVES][N / 8][4], uint32_t stage, int begin)
{
    using out = way_out<N, HALVES>;
    __syncwarp();
#pragma unroll
    for (int part = 0; part < out::PARTS; part++) {
        if (TOGETHER || part == begin) {
            const int first = part / HALVES * out::COLUMNS;
            stage_part<T, out::COLUMNS, FLOATS>(sum[part % HALVES], first / 8, stage + (TOGETHER ? part * STAGED_BYTES : 0));
        }
    }
    __syncwarp();
}

static __device__ __forceinline__ eight staged(uint32_t stage, int line, int unit)
{
    return {ps_shared_load4(stage + line * 128 + ((unit ^ line % 8) << 4))};
}

static __device__ __forceinline__ void staged(float (&v)[8], uint32_t stage, int line, int unit)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint4 words = ps_shared_load4(stage + line * 256 + h * 128 + ((unit ^ line % 8 ^ h * 4) << 4));
        v[4 * h] = __uint_as_float(words.x);
        v[4 * h + 1] = __uint_as_float(words.y);
        v[4 * h + 2] = __uint_as_float(words.z);
        v[4 * h + 3] = __uint_as_float(words.w);
    }
}

/* Two sums a column over the lanes of the same columns: of these a lane's part becomes the whole of UNITS / 4, from own_column on,
 * in first[0 ..] and second[0 ..]. */
template <int UNITS> static __device__ __forceinline__ void sum_lanes(float (&first)[8], float (&second)[8])
{
#pragma unroll
    for (int half = 4, apart = 16; apart >= UNITS; half /= 2, apart /= 2) {
        const bool upper = threadIdx.x & apart;
#pragma unroll
        for (int j = 0; j < half; j++) {
            const float a = __shfl_xor_sync(0xffffffffu, upper ? first[j] : first[j + half], apart);
            const float b = __shfl_xor_sync(0xffffffffu, upper ? second[j] : second[j + half], apart);
            first[j] = (upper ? first[j + half] : first[j]) + a;
            second[j] = (upper ? second[j + half] : second[j]) + b;
        }
    }
}

template <int UNITS> static __device__ __forceinline__ int own_column()
{
    const int lane = (int)threadIdx.x % 32;
    return lane / 16 * 4 + lane / 8 % 2 * 2 + (UNITS == 4 ? lane / 4 % 2 : 0);
}

static __device__ __forceinline__ float pick(const float (&v)[8], int i)
{
    const float a = i & 4 ? v[4] : v[0], b = i & 4 ? v[5] : v[1], c = i & 4 ? v[6] : v[2], d = i & 4 ? v[7] : v[3];
    const float e = i & 2 ? c : a, f = i & 2 ? d : b;
    return i & 1 ? f : e;
}

/* A lane's sums over the rows of a part, [8] columns, to the warp's. pivot: of MOMENTS what was taken from each value before. */
template <int UNITS, bool MOMENTS>
static __device__ __forceinline__ void count_part(float (&first)[8], float (&second)[8], const float (&pivot)[8], int rows,
                                                  float2 *counted)
{
    sum_lanes<UNITS>(first, second);
#pragma unroll
    for (int j = 0; j < UNITS / 4; j++) {
        const int own = own_column<UNITS>() + j;
        float2 pair = make_float2(first[j], second[j]);
        if constexpr (MOMENTS) {
            const float away = rows ? first[j] / (float)rows : 0.0f;
            pair = make_float2(pick(pivot, own) + away, fmaxf(second[j] - first[j] * away, 0.0f));
            if (second[j] != second[j]) { /* not a number */
                pair.y = second[j];
            }
        }
        counted[8 * ((int)threadIdx.x % UNITS) + own] = pair;
    }
}

/* Of a sum without an addend, which is stored as it is: rounded, the words of a quad of lanes change places, and each has 8 columns
 * of its rows. Of the 16 rows from `row` of the warp's part on. */
template <typename T, int N>
static __device__ __forceinline__ void store_rows(const struct call &x, const float (&sum)[N / 8][4], const struct corner &corner,
                                                  int row, int column0)
{
    const int lane = (int)threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int group = 0; group < N / 32; group++) {
        float2 bias[4] = {};
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int own = 32 * group + 8 * t + 2 * q; /* as wgmma leaves them */
            if (x.bias && own < corner.columns) {
                bias[t] = *(const float2 *)(x.bias + column0 + own);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int line = row + lane / 4 + 8 * i, column = 32 * group + 8 * q;
            uint32_t words[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                words[t] = ps_pack<T>(sum[4 * group + t][2 * i] + bias[t].x, sum[4 * group + t][2 * i + 1] + bias[t].y);
            }
            ps_quad_transpose(words);
            if (line < corner.rows && column < corner.columns) {
                *(uint4 *)((T *)x.c + corner.at + ((uint32_t)line * (uint32_t)x.ldc + (uint32_t)column)) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

/* The warp's rows of a tile, when its products have ended. next: what fetch found of the first step. stage: STAGED_BYTES of
 * the warp's, or (TOGETHER) as many for each part. counted: of each half its sums over rows, four warps apart. */
template <typename T, int N, int HALVES, bool TOGETHER, enum ps_finish FINISH, bool COUNTED>
static __device__ __forceinline__ void finish_rows(const struct call &x, const float (&sum)[HALVES][N / 8][4], struct beside &next,
                                                   uint32_t stage, const struct corner &corner, int column0, uint64_t drawn_at,
                                                   float2 (*counted)[COUNTED ? N : 1])
{
    using out = way_out<N, HALVES>;
    constexpr bool FLOATS = FINISH == PS_FINISH_SUM || FINISH == PS_FINISH_RESIDUAL; /* else rounded, as it is kept */
    constexpr bool MOMENTS = FINISH == PS_FINISH_RESIDUAL;
    const int unit = out::unit();
    T *const c = (T *)x.c + corner.at, *const keep = (T *)x.kept + corner.at;
    if (FINISH == PS_FINISH_SUM && !COUNTED && !x.addend) {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            store_rows<T, N>(x, sum[half], corner, 64 * half, column0);
        }
        return;
    }
    const bool dropped = FINISH != PS_FINISH_SUM && x.dropout.threshold;
    float scale = dropped ? x.dropout.scale : 1.0f;
    asm volatile("" : "+f"(scale)); /* in a register of each thread: else every use copies it there */
    float bias[8] = {}, mean[8] = {}, first[8] = {}, second[8] = {}, pivot[8] = {};
    stage_parts<T, N, HALVES, TOGETHER, FLOATS>(sum, stage, 0);
#pragma unroll 1
    for (int step = 0; step < out::STEPS && out::part(step) < corner.columns; step++) {
        const int column = out::column(step);
        if (!TOGETHER && step > 0 && step % out::PAIRS == 0) {
            stage_parts<T, N, HALVES, false, FLOATS>(sum, stage, step / out::PAIRS);
        }
        const uint32_t from = stage + (TOGETHER ? step / out::PAIRS * STAGED_BYTES : 0);
        if (step % (HALVES * out::PAIRS) == 0 && column < corner.columns) {
            if (FINISH != PS_FINISH_SUM || x.bias) {
                ps_load<8>(bias, x.bias + column0 + column);
            }
            if (COUNTED && !MOMENTS) {
                ps_load<8>(mean, x.mean + column0 + column);
            }
        }
        const struct beside now = next;
        if (step + 1 < out::STEPS) {
            fetch<T, N, HALVES, FINISH, COUNTED>(x, next, corner, step + 1);
        }
        float v[2][8], other[2][8];
        eight words[2];
        uint32_t at[2];
        bool here[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int line = out::line(step, i), row = out::row(step, i);
            at[i] = (uint32_t)row * (uint32_t)x.ldc + (uint32_t)column;
            here[i] = column < corner.columns && row < corner.rows;
            if constexpr (FLOATS) {
                staged(v[i], from, line, unit);
            } else {
                const eight product = staged(from, line, unit);
                if (FINISH == PS_FINISH_ACTIVATION && here[i]) {
                    *(uint4 *)(keep + at[i]) = product.words;
                }
                unpack<T>(v[i], product);
            }
            unpack<T>(other[i], now.addend[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                (FINISH == PS_FINISH_SLOPE ? other : v)[i][j] += bias[j];
            }
        }
        struct ps_block draws[2];
        if (dropped) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t row = (uint32_t)out::row(step, i);
                draws[i] = ps_draws(x.dropout, drawn_at, corner.block + row * ((uint32_t)x.n / 8) + (uint32_t)column / 8);
            }
        }
        if constexpr (FINISH == PS_FINISH_ACTIVATION) {
            activate<false>(x.activation, v, v, scale);
        } else if constexpr (FINISH == PS_FINISH_SLOPE) {
            activate<true>(x.activation, v, other, scale);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (FLOATS) {
                if (dropped) {
                    drop(v[i], x.dropout, draws[i]);
                }
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[i][j] = fmaf(v[i][j], scale, other[i][j]);
                }
            }
            pack<T>(words[i], v[i]);
            if (!FLOATS && dropped) {
                drop(words[i], x.dropout, draws[i]);
            }
            if (here[i]) {
                *(uint4 *)(c + at[i]) = words[i].words;
            }
        }
        if constexpr (COUNTED) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                unpack<T>(v[i], words[i]);
                unpack<T>(other[i], now.more[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (i == 0 && step % out::PAIRS == 0) {
                        first[j] = second[j] = 0;
                        if (MOMENTS) { /* the first row of 16 */
                            pivot[j] = __shfl_sync(0xffffffffu, v[i][j], unit);
                        }
                    }
                    const float one = MOMENTS ? v[i][j] - pivot[j] : v[i][j];
                    const float two = one * (MOMENTS ? one : other[i][j] - mean[j]);
                    first[j] += here[i] ? one : 0.0f;
                    second[j] += here[i] ? two : 0.0f;
                }
            }
            if (step % out::PAIRS == out::PAIRS - 1) {
                const int left = corner.rows - 64 * out::half(step), rows = left < 0 ? 0 : left < 16 ? left : 16;
                count_part<out::UNITS, MOMENTS>(first, second, pivot, rows, &counted[4 * out::half(step)][out::part(step)]);
            }
        }
    }
}

/* ---- a block to a tile ---- */

/* ACROSS: b's lines run along n, as a weight lies; else along k, as its transpose does. COUNTED: with sums over rows. */
template <typename T, int N, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static __global__ void
__launch_bounds__(THREADS, N == 128 || (N == 64 && (COUNTED || FINISH == PS_FINISH_SLOPE || FINISH == PS_FINISH_RESIDUAL)) ? 2 : 3)
    product_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                   const __grid_constant__ struct call x)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    __shared__ float2 counted[COUNTED ? 8 : 1][COUNTED ? N : 1];
    constexpr int STAGE = stage_bytes<N, ACROSS>;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), side = warp / 4;
    const int tile_n = (int)blockIdx.x % x.tiles_n, tile_m = (int)blockIdx.x / x.tiles_n;
    const int pieces = (x.k + DEEP - 1) / DEEP, stages = pieces < STAGES ? pieces : STAGES;
    const uint32_t ring = (ps_shared_address(memory) + 1023u) & ~1023u, full = ps_shared_address(barriers),
                   empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        ps_tensor_prefetch(&a_map);
        ps_tensor_prefetch(&b_map);
        for (int s = 0; s < stages; s++) {
            ps_mbarrier_init(full + 8 * s, 1);
            ps_mbarrier_init(empty + 8 * s, 2);
        }
        ps_mbarrier_publish();
    }
    __syncthreads();
    ps_grid_begin();
    auto bring = [&](int piece) {
        const int stage = piece % stages;
        bring_panels<N, ACROSS, 1>(a_map, b_map, ring + stage * STAGE, full + 8 * stage, tile_m, tile_n, piece, 0);
    };
    if (threadIdx.x == 0) {
        for (int piece = 0; piece < stages; piece++) {
            bring(piece);
        }
    }
    const int column0 = tile_n * N;
    const struct corner corner = corner_of<1>(x, (int64_t)tile_m * ROWS + warp * 16, column0);
    struct beside next;
    fetch<T, N, 1, FINISH, COUNTED>(x, next, corner, 0);
    call_near<T, N, 1, FINISH, COUNTED>(x, corner);
    float sum[1][N / 8][4];
    for (int piece = 0; piece < pieces; piece++) {
        const int stage = piece % stages;
        ps_mbarrier_wait(full + 8 * stage, piece / stages & 1);
        const uint32_t left = ps_wgmma_place(ring + stage * STAGE + side * PANEL);
        const uint32_t right = ps_wgmma_place(ring + stage * STAGE + ROWS_BYTES, ACROSS ? PANEL : 0);
        ps_wgmma_begin();
#pragma unroll
        for (int k = 0; k < DEEP / 16; k++) {
            ps_wgmma<T, 0, ACROSS>(sum[0], ps_wgmma_operand(left, k * 32), ps_wgmma_operand(right, k * (ACROSS ? 16 * 128 : 32)),
                                   piece | k);
        }
        ps_wgmma_commit();
        const int following = piece - 1 + stages;
        if (piece > 0 && following < pieces) { /* the panels of the piece before are free: the next one's come */
            ps_wgmma_wait<1>();
            const int before = (piece - 1) % stages;
            if (threadIdx.x % 128 == 0) {
                ps_mbarrier_arrive(empty + 8 * before);
            }
            if (threadIdx.x == 0) {
                ps_mbarrier_wait(empty + 8 * before, (piece - 1) / stages & 1);
                bring(following);
            }
        }
    }
    ps_wgmma_wait<0>();
    ps_pin(sum[0]);
    __syncthreads(); /* the panels have been read: sums take their place */
    const uint64_t drawn_at = x.dropout.threshold ? x.dropout.state->step : 0;
    finish_rows<T, N, 1, true, FINISH, COUNTED>(x, sum, next, ring + warp * way_out<N, 1>::PARTS * STAGED_BYTES, corner, column0,
                                                drawn_at, counted + (COUNTED ? warp : 0));
    if constexpr (COUNTED) {
        gather_sums<THREADS, N, FINISH == PS_FINISH_RESIDUAL>(x, counted, tile_m, tile_n);
    }
}

/* ---- a warpgroup to a tile ---- */

/* Sums over rows take room from the ring. */
template <bool COUNTED> static constexpr int long_stages = COUNTED ? MOST_STAGES - 1 : MOST_STAGES;

/* Tiles go round by clusters, a block's to its two warpgroups in turn: a warpgroup multiplies when the other has asked for all of
 * its products, so panels are taken in the order in which they come. */
template <typename T, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static __global__ void __launch_bounds__(LONG_THREADS, 1)
    long_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ struct call x)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * MOST_STAGES];
    __shared__ float2 counted[COUNTED ? 2 : 1][COUNTED ? 8 : 1][COUNTED ? WIDE : 1];
    constexpr int STAGE = stage_bytes<WIDE, ACROSS>, COUNT = long_stages<COUNTED>;
    enum { TURN = 3 }; /* the first barrier of those by which warpgroups take turns */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), side = warp / 4, rank = ps_cluster_rank();
    const uint32_t ring = (ps_shared_address(memory) + 1023u) & ~1023u, full = ps_shared_address(barriers),
                   empty = full + 8 * MOST_STAGES;
    if (threadIdx.x == 0) {
        ps_tensor_prefetch(&a_map);
        ps_tensor_prefetch(&b_map);
        for (int s = 0; s < COUNT; s++) {
            ps_mbarrier_init(full + 8 * s, 1);
            ps_mbarrier_init(empty + 8 * s, CLUSTER);
        }
        ps_mbarrier_publish();
    }
    ps_cluster_arrive();
    ps_cluster_wait();
    ps_grid_begin();
    const int first = (int)blockIdx.x / CLUSTER;
    if (side == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)FEW_REGISTERS));
        if (threadIdx.x == 2 * GROUP) {
            int stage = 0;
            uint32_t parity = 1; /* a new ring is empty */
            for (int place = first; place < x.places; place += x.strides) {
                const int tile_n = place % x.tiles_n, tile_m = place / x.tiles_n * CLUSTER + rank;
                for (int piece = 0; piece < x.pieces; piece++) {
                    ps_mbarrier_wait(empty + 8 * stage, parity);
                    bring_panels<WIDE, ACROSS, CLUSTER>(a_map, b_map, ring + stage * STAGE, full + 8 * stage, tile_m, tile_n, piece,
                                                        rank);
                    if (++stage == COUNT) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)MANY_REGISTERS));
        const uint64_t drawn_at = x.dropout.threshold ? x.dropout.state->step : 0;
        const uint32_t staged = ring + COUNT * STAGE + warp * STAGED_BYTES;
        const uint32_t panels = ring & 0x3ffff; /* without the block's number in its cluster: an operand has no room for that */
        int number = side;                      /* of the tile among the block's */
        for (int place = first + side * x.strides; place < x.places; place += 2 * x.strides, number += 2) {
            const int tile_n = place % x.tiles_n, tile_m = place / x.tiles_n * CLUSTER + rank;
            const int column0 = tile_n * WIDE;
            const struct corner corner = corner_of<2>(x, (int64_t)tile_m * ROWS + warp % 4 * 16, column0);
            struct beside next;
            fetch<T, WIDE, 2, FINISH, COUNTED>(x, next, corner, 0);
            call_near<T, WIDE, 2, FINISH, COUNTED>(x, corner);
            if (number > 0) {
                ps_barrier(TURN + side, 2 * GROUP);
            }
            const unsigned brought = (unsigned)number * (unsigned)x.pieces; /* before */
            int stage = (int)(brought % COUNT), before = 0;
            uint32_t parity = brought / COUNT & 1;
            float sum[2][WIDE / 8][4]; /* of 64 rows each */
            auto release = [&](int which) {
                if (threadIdx.x % GROUP < CLUSTER) {
                    ps_mbarrier_arrive_at(empty + 8 * which, (int)threadIdx.x % GROUP);
                }
            };
            for (int piece = 0; piece < x.pieces; piece++) {
                ps_mbarrier_wait(full + 8 * stage, parity);
                const uint32_t left = ps_wgmma_place(panels + stage * STAGE);
                const uint32_t right = ps_wgmma_place(panels + stage * STAGE + ROWS_BYTES, ACROSS ? PANEL : 0);
                ps_wgmma_begin();
#pragma unroll
                for (int k = 0; k < DEEP / 16; k++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        ps_wgmma<T, 0, ACROSS>(sum[half], ps_wgmma_operand(left, half * PANEL + k * 32),
                                               ps_wgmma_operand(right, k * (ACROSS ? 16 * 128 : 32)), piece | k);
                    }
                }
                ps_wgmma_commit();
                if (piece > 0) {
                    ps_wgmma_wait<1>();
                    release(before);
                }
                before = stage;
                if (++stage == COUNT) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            if (place + x.strides < x.places) {
                ps_barrier_arrive(TURN + 1 - side, 2 * GROUP);
            }
            ps_wgmma_wait<0>();
            ps_pin(sum[0]);
            ps_pin(sum[1]);
            release(before);
            finish_rows<T, WIDE, 2, false, FINISH, COUNTED>(x, sum, next, staged, corner, column0, drawn_at,
                                                            counted[COUNTED ? side : 0] + (COUNTED ? warp % 4 : 0));
            if constexpr (COUNTED) {
                if (tile_m < x.tiles_m) {
                    gather_sums<GROUP, WIDE, FINISH == PS_FINISH_RESIDUAL>(x, counted[side], tile_m, tile_n);
                }
            }
        }
    }
    ps_cluster_arrive(); /* until the others are here too, the barriers must stay */
    ps_cluster_wait();
}

/* ---- launching ---- */

/* Room for sums over rows, of tiles of N columns, M threads each. */
template <int M, int N> static enum ps_status open_sums(const struct ps_cuda_context *c, const char *op, struct call &x)
{
    /* One group while a thread has few partial sums to add, else as many groups as tiles in each. */
    x.share = x.tiles_m;
    if (x.tiles_m > 8 * M / N) {
        for (x.share = 1; x.share * x.share < x.tiles_m; x.share++) {
        }
    }
    x.groups = (x.tiles_m + x.share - 1) / x.share;
    if ((int64_t)x.tiles_n * (x.groups + 1) > PS_COLUMN_TILES) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): sums over %lld rows of %d columns are too many", op, (long long)x.m, x.n);
    }
    PS_TRY(ps_cuda_workspace(c, op, (size_t)(x.tiles_m + x.groups) * (size_t)x.n * sizeof(float2)));
    x.partials = (float2 *)c->workspace;
    x.tickets = c->tiles_done;
    return PS_OK;
}

/* BLOCKS: that share the right operand's panels. */
template <int N, bool ACROSS, int BLOCKS>
static enum ps_status open_maps(CUtensorMap *a, CUtensorMap *b, struct call &x, const struct ps_product *p)
{
    x.tiles_n = (x.n + N - 1) / N;
    x.tiles_m = (int)((x.m + ROWS - 1) / ROWS);
    PS_TRY(ps_tensor_map_2d(a, p->a.data, p->m, p->k, 2 * p->a.row, ROWS, DEEP));
    return ACROSS ? ps_tensor_map_2d(b, p->b.data, p->k, p->n, 2 * p->b.row, DEEP / BLOCKS, 64)
                  : ps_tensor_map_2d(b, p->b.data, p->n, p->k, 2 * p->b.column, N / BLOCKS, DEEP);
}

template <typename T, int N, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, struct call x)
{
    CUtensorMap a, b;
    PS_TRY((open_maps<N, ACROSS, 1>(&a, &b, x, p)));
    if (COUNTED) {
        PS_TRY((open_sums<THREADS, N>(c, op, x)));
    }
    const int pieces = (x.k + DEEP - 1) / DEEP, stages = pieces < STAGES ? pieces : STAGES;
    const int bytes = stages * stage_bytes<N, ACROSS>, out_bytes = THREADS / 32 * way_out<N, 1>::PARTS * STAGED_BYTES;
    const size_t shared = (size_t)(bytes > out_bytes ? bytes : out_bytes) + 1024;
    static_assert(STAGES * stage_bytes<N, ACROSS> + 1024 <= MOST_SHARED, "a block's");
    auto *const kernel = product_kernel<T, N, ACROSS, FINISH, COUNTED>;
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), op));
    ps_cuda_launch(c, kernel, dim3((unsigned)(x.tiles_m * x.tiles_n)), THREADS, shared, a, b, x);
    PS_CUDA_LAUNCHED(op);
}

template <typename T, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static enum ps_status launch_long(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, struct call x)
{
    CUtensorMap a, b;
    constexpr size_t shared = long_stages<COUNTED> * stage_bytes<WIDE, ACROSS> + 2 * GROUP / 32 * STAGED_BYTES + 1024;
    auto *const kernel = long_kernel<T, ACROSS, FINISH, COUNTED>;
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), op));
    PS_TRY((open_maps<WIDE, ACROSS, CLUSTER>(&a, &b, x, p)));
    if (COUNTED) {
        PS_TRY((open_sums<GROUP, WIDE>(c, op, x)));
    }
    const int clusters = c->multiprocessors / CLUSTER;
    x.pieces = (x.k + DEEP - 1) / DEEP;
    x.places = (x.tiles_m + CLUSTER - 1) / CLUSTER * x.tiles_n;
    x.strides = x.places < clusters ? x.places : clusters;
    ps_cuda_launch_clusters(c, kernel, CLUSTER, dim3((unsigned)(x.strides * CLUSTER)), LONG_THREADS, shared, a, b, x);
    PS_CUDA_LAUNCHED(op);
}

/* Which kernel: the long one where blocks that stay outdo those that hide one another's ends. The more follows a product, the
 * longer must its sum be. Measured on an H100, docs/experiments/products.md. */
template <enum ps_finish FINISH, bool COUNTED> static bool is_long(const struct call &x, bool plain)
{
    enum { COLUMNS = 72, ROWS_EACH = 1024, MANY = 32768 };
    const int terms = COUNTED                          ? 1024
                      : plain                          ? 128
                      : FINISH == PS_FINISH_SLOPE      ? 1024
                      : FINISH == PS_FINISH_ACTIVATION ? (x.m >= MANY ? 128 : 384)
                                                       : 384;
    return x.n >= COLUMNS && x.m >= (plain && x.k < 320 ? MANY : ROWS_EACH) && x.k >= terms;
}

/* Columns of a tile of short sums: few where there are few, and where 128 would leave half a tile empty. */
template <typename T, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static enum ps_status launch_columns(const struct ps_cuda_context *c, const char *op, const struct ps_product *p,
                                     const struct call &x)
{
    const int rest = x.n % WIDE;
    return is_long<FINISH, COUNTED>(x, FINISH == PS_FINISH_SUM && !x.addend) ? launch_long<T, ACROSS, FINISH, COUNTED>(c, op, p, x)
           : x.n <= 32                                                       ? launch<T, 32, ACROSS, FINISH, COUNTED>(c, op, p, x)
           : rest > 0 && rest <= 64                                          ? launch<T, 64, ACROSS, FINISH, COUNTED>(c, op, p, x)
                                                                             : launch<T, 128, ACROSS, FINISH, COUNTED>(c, op, p, x);
}

/* c = a b + bias + addend. */
template <typename T> enum ps_status product(const struct ps_cuda_context *c, const char *op, const struct ps_product *p)
{
    struct call x = {};
    x.m = p->m;
    x.n = (int)p->n;
    x.k = (int)p->k;
    x.ldc = p->c.row;
    x.c = p->c.data;
    x.bias = (const float *)p->bias;
    x.addend = p->addend;
    return p->b.column == 1 ? launch_columns<T, true, PS_FINISH_SUM, false>(c, op, p, x)
                            : launch_columns<T, false, PS_FINISH_SUM, false>(c, op, p, x);
}

/* Which weights' products end how: forward along n, backward along k. */
template <typename T>
enum ps_status finish(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, const struct ps_gemm_finish *f)
{
    struct call x = {};
    x.m = p->m;
    x.n = (int)p->n;
    x.k = (int)p->k;
    x.ldc = p->c.row;
    x.c = p->c.data;
    x.kept = f->kept.data;
    x.addend = f->addend.data;
    x.x = f->x.data;
    x.bias = (const float *)f->bias.data;
    x.dropout = f->dropout;
    x.activation = f->activation;
    x.mean = (float *)f->mean.data;
    x.var = (float *)f->var.data;
    x.running_mean = (float *)f->running_mean.data;
    x.running_var = (float *)f->running_var.data;
    x.means = (float *)f->means.data;
    x.dgamma = (float *)f->dgamma.data;
    x.dbeta = (float *)f->dbeta.data;
    x.momentum = f->momentum;
    x.epsilon = (float)f->epsilon;
    const bool across = p->b.column == 1;
    switch (f->finish) {
    case PS_FINISH_SUM:
        return across          ? PS_UNSUPPORTED
               : f->means.data ? launch_columns<T, false, PS_FINISH_SUM, true>(c, op, p, x)
                               : launch_columns<T, false, PS_FINISH_SUM, false>(c, op, p, x);
    case PS_FINISH_RESIDUAL:
        return !across        ? PS_UNSUPPORTED
               : f->mean.data ? launch_columns<T, true, PS_FINISH_RESIDUAL, true>(c, op, p, x)
                              : launch_columns<T, true, PS_FINISH_RESIDUAL, false>(c, op, p, x);
    case PS_FINISH_ACTIVATION:
        return across ? launch_columns<T, true, PS_FINISH_ACTIVATION, false>(c, op, p, x) : PS_UNSUPPORTED;
    case PS_FINISH_SLOPE:
        return across ? PS_UNSUPPORTED : launch_columns<T, false, PS_FINISH_SLOPE, false>(c, op, p, x);
    }
    return PS_UNSUPPORTED;
}

/* WHERE: nothing, or extern where another file has them. */
#define PS_WGMMA16_OF(WHERE, T)                                                                                            \
    WHERE template enum ps_status product<T>(const struct ps_cuda_context *c, const char *op, const struct ps_product *p); \
    WHERE template enum ps_status finish<T>(const struct ps_cuda_context *c, const char *op, const struct ps_product *p,   \
                                            const struct ps_gemm_finish *f);

} // namespace wgmma16

#endif
