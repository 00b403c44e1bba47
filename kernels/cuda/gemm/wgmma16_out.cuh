/* How sums of gemm/wgmma16.cuh go out, which kernels share: what they are told; a bias, an activation, dropout and an addend; sums
 * over rows; panels of the right operand.
 *
 * A warp's 16 rows of sums go through shared memory, 64 columns at a time, rounded where what follows reads them so. From there a
 * lane takes 8 neighbouring columns: 16 bytes of each tensor, whole lines of memory a warp, and one block of dropout's draws. What
 * follows is written once, in a loop that is not unrolled: straight on it is longer than what the instructions' caches hold. */
#ifndef PS_KERNELS_CUDA_GEMM_WGMMA16_OUT_CUH
#define PS_KERNELS_CUDA_GEMM_WGMMA16_OUT_CUH

#include <string.h>

#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tile/activation.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/count.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/vector.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

namespace wgmma16
{

enum {
    DEEP = 64,               /* of the summed dimension at once: a panel's lines of 128 bytes */
    PANEL = DEEP * DEEP * 2, /* bytes of 64 lines */
    STAGED_BYTES = 4096,     /* of a warp's sums on their way out: 16 rows of 64 */
    WIDE = 128,              /* columns of a wide tile */
    GROUP = 128,             /* threads of a warpgroup */
};

/* What a kernel is told. */
struct call {
    int64_t m;
    int n, k, tiles_n;
    int pieces, places, strides;               /* long_kernel's: panels of a sum; tiles, counted by those of a cluster; clusters */
    int slices, chunks, blocks, depth, staged; /* held_kernel's: of n; tiles of columns and blocks of a slice; panels of a crew's
                                                  ring; bytes of a warp's sums on their way out */
    int64_t ldc;
    struct ps_divisor by_slices; /* held_kernel's: a block's slice */
    bool settled;                /* the right operand: brought while the kernel before still runs where it is held */
    void *c, *kept;              /* kept: the slope; NULL: not wanted */
    const void *addend, *x;
    const float *bias, *addend_scale, *addend_shift; /* the latter two NULL: 1 and 0 */
    struct ps_dropout dropout;
    struct ps_round_keys keys; /* of its draws */
    enum ps_activation activation;
    /* Of sums over rows: held_kernel's [blocks, n] pairs, and a ticket a slice; long_kernel's [tiles + groups, n], and for each
     * tile_n a ticket for each group of `share` tiles and one more. */
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

/* Zeros in both where the draws drop them. */
static __device__ __forceinline__ void drop(eight &a, eight &b, const struct ps_dropout &d, const struct ps_block &draws)
{
    uint32_t *const first = &a.words.x, *const second = &b.words.x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t goes_on = ps_kept_mask(d, draws.word[i]);
        first[i] &= goes_on;
        second[i] &= goes_on;
    }
}

/* Element by element, rounded once. */
template <typename T> static __device__ __forceinline__ uint32_t product_of(uint32_t a, uint32_t b)
{
    if constexpr (std::is_same<T, ps_bf16>::value) {
        const __nv_bfloat162 c = __hmul2(*(const __nv_bfloat162 *)&a, *(const __nv_bfloat162 *)&b);
        return *(const uint32_t *)&c;
    } else {
        const __half2 c = __hmul2(*(const __half2 *)&a, *(const __half2 *)&b);
        return *(const uint32_t *)&c;
    }
}

template <typename T> static __device__ __forceinline__ eight product_of(const eight &a, const eight &b)
{
    return {make_uint4(product_of<T>(a.words.x, b.words.x), product_of<T>(a.words.y, b.words.y),
                       product_of<T>(a.words.z, b.words.z), product_of<T>(a.words.w, b.words.w))};
}

/* v becomes scale times the activation of v + bias; SLOPE: slope is scale times its derivative there. gelu by the instruction for
 * tanh, whose error 16 bits hide. */
template <typename T, enum ps_activation ACTIVATION, bool SLOPE>
static __device__ __forceinline__ void activate(eight (&v)[2], eight (&slope)[2], const float (&bias)[8], float scale)
{
    const float half = 0.5f * scale, peak = SLOPE && ACTIVATION == PS_GELU ? ps_log2(0.39894228040143268f * scale) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float y[8], s[8];
        unpack<T>(y, v[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float x = y[j] + bias[j];
            if constexpr (ACTIVATION == PS_GELU_TANH) {
                y[j] = SLOPE ? ps_gelu_with_slope(x, half, s[j]) : half * ps_gelu_twice(x);
            } else if constexpr (ACTIVATION == PS_GELU) {
                y[j] = SLOPE ? ps_gelu_near_with_slope(x, half, peak, s[j]) : ps_gelu_near(x, scale);
            } else {
                y[j] = scale * ps_activated<ACTIVATION>(x);
                s[j] = scale * ps_activation_slope<ACTIVATION>(x);
            }
        }
        pack<T>(v[i], y);
        if constexpr (SLOPE) {
            pack<T>(slope[i], s);
        } else {
            slope[i] = {};
        }
    }
}

template <typename T, bool SLOPE>
static __device__ __forceinline__ void activate(enum ps_activation which, eight (&v)[2], eight (&slope)[2], const float (&bias)[8],
                                                float scale)
{
    if (which == PS_GELU) {
        activate<T, PS_GELU, SLOPE>(v, slope, bias, scale);
    } else if (which == PS_RELU) {
        activate<T, PS_RELU, SLOPE>(v, slope, bias, scale);
    } else {
        activate<T, PS_GELU_TANH, SLOPE>(v, slope, bias, scale);
    }
}

/* ---- sums over rows ---- */

/* Rows from `row` on, at most `most`. */
static __device__ __forceinline__ int rows_at(int64_t m, int64_t row, int most)
{
    return row >= m ? 0 : m - row < most ? (int)(m - row) : most;
}

/* Threads that meet: M of them, one of the block's warpgroups or all of it. */
template <int M> struct crew {
    static __device__ __forceinline__ int side()
    {
        return (int)threadIdx.x / M;
    }
    static __device__ __forceinline__ int thread()
    {
        return (int)threadIdx.x % M;
    }
    static __device__ __forceinline__ void meet()
    {
        ps_barrier(1 + side(), M);
    }
};

/* True in the crew that is the last of `count` to come here: it sees what the others wrote before. */
template <int M> static __device__ __forceinline__ bool comes_last(unsigned *ticket, int count)
{
    __shared__ bool last[M == GROUP ? 2 : 1];
    bool &mine = last[crew<M>::side()];
    crew<M>::meet();
    if (crew<M>::thread() == 0) {
        mine = ps_take_ticket(ticket, (unsigned)count);
    }
    crew<M>::meet();
    return mine;
}

/* What finish_column reads of a column and adds to, fetched while the parts of its sums are on their way. */
struct column_before {
    float var, first, second;
};

template <bool MOMENTS> static __device__ __forceinline__ struct column_before begin_column(const struct call &x, int column)
{
    return MOMENTS ? column_before{0, x.running_mean[column], x.running_var[column]}
                   : column_before{x.var[column], x.dbeta[column], x.dgamma[column]};
}

/* The whole's mean and M2, or sums, of a column. */
template <bool MOMENTS>
static __device__ __forceinline__ void finish_column(const struct call &x, int column, const struct column_before &before,
                                                     double first, double second)
{
    const double count = (double)x.m;
    if constexpr (MOMENTS) {
        const double var = second / count;
        x.mean[column] = (float)first;
        x.var[column] = (float)var;
        if (isfinite((float)first) && isfinite((float)var)) {
            x.running_mean[column] = before.first + (float)(x.momentum * (first - before.first));
            x.running_var[column] = before.second + (float)(x.momentum * (second / (count - 1.0) - before.second));
        }
    } else {
        const double product = second * (double)rsqrtf(before.var + x.epsilon);
        x.dbeta[column] = before.first + (float)first;
        x.dgamma[column] = before.second + (float)product;
        x.means[column] = (float)(first / count);
        x.means[x.n + column] = (float)(product / count);
    }
}

/* ---- panels ---- */

/* One lane: the piece-th 64 of the summed dimension of the right operand's tile. Of `BLOCKS` blocks that share it this one, `rank`,
 * brings its part to all. */
template <int N, bool ACROSS, int BLOCKS>
static __device__ __forceinline__ void bring_right(const CUtensorMap &b_map, uint32_t place, uint32_t barrier, int tile_n,
                                                   int piece, int rank)
{
    auto copy = [&](uint32_t to, int column, int line) {
        BLOCKS > 1 ? ps_tensor_copy2_to(to, &b_map, column, line, barrier, (1 << BLOCKS) - 1)
                   : ps_tensor_copy2(to, &b_map, column, line, barrier);
    };
    if constexpr (ACROSS) {
        constexpr int LINES = DEEP / BLOCKS;
#pragma unroll
        for (int p = 0; p < (N + 63) / 64; p++) {
            copy(place + p * PANEL + rank * LINES * 128, tile_n * N + p * 64, piece * DEEP + rank * LINES);
        }
    } else {
        constexpr int LINES = N / BLOCKS;
        copy(place + rank * LINES * 128, piece * DEEP, tile_n * N + rank * LINES);
    }
}

/* Maps of both operands: boxes of `rows` of the left one's, and of the right one's as BLOCKS that share it bring them. */
template <int N, bool ACROSS, int BLOCKS>
static enum ps_status open_maps(CUtensorMap *a, CUtensorMap *b, const struct ps_product *p, int rows)
{
    PS_TRY(ps_tensor_map_2d(a, p->a.data, p->m, p->k, 2 * p->a.row, rows, DEEP));
    return ACROSS ? ps_tensor_map_2d(b, p->b.data, p->k, p->n, 2 * p->b.row, DEEP / BLOCKS, 64)
                  : ps_tensor_map_2d(b, p->b.data, p->n, p->k, 2 * p->b.column, N / BLOCKS, DEEP);
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
            x.dropout.first + (uint32_t)row * ((uint32_t)x.n / 8) + (uint32_t)column / 8};
}

/* What a step's draws begin with. */
static __device__ __forceinline__ uint4 begin_draws(const struct call &x)
{
    return x.dropout.threshold ? ps_draws_begin(x.keys, x.dropout.site, x.dropout.state->step) : make_uint4(0, 0, 0, 0);
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
                b.addend[i].words = FINISH == PS_FINISH_SLOPE ? ps_load_once((const uint4 *)(from + corner.at + at))
                                                              : *(const uint4 *)(from + corner.at + at);
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

/* The part that begins. */
template <typename T, int N, int HALVES, bool FLOATS>
static __device__ __forceinline__ void stage_parts(const float (&sum)[HALVES][N / 8][4], uint32_t stage, int begin)
{
    using out = way_out<N, HALVES>;
    __syncwarp();
#pragma unroll
    for (int part = 0; part < out::PARTS; part++) {
        if (part == begin) {
            const int first = part / HALVES * out::COLUMNS;
            stage_part<T, out::COLUMNS, FLOATS>(sum[part % HALVES], first / 8, stage);
        }
    }
    __syncwarp();
}

static __device__ __forceinline__ eight staged(uint32_t stage, int line, int unit)
{
    return {ps_shared_load4(stage + line * 128 + ((unit ^ (line & 7)) << 4))};
}

static __device__ __forceinline__ void staged(float (&v)[8], uint32_t stage, int line, int unit)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint4 words = ps_shared_load4(stage + line * 256 + h * 128 + ((unit ^ (line & 7) ^ h * 4) << 4));
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

/* A lane's sums over the rows of a part, [8] columns, to the warp's, or (further) to what is there. pivot: of MOMENTS what was
 * taken from each value before. */
template <int UNITS, bool MOMENTS>
static __device__ __forceinline__ void count_part(float (&first)[8], float (&second)[8], const float (&pivot)[8], int rows,
                                                  float2 *counted, bool further)
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
        float2 &all = counted[8 * ((int)threadIdx.x % UNITS) + own];
        all = further ? make_float2(all.x + pair.x, all.y + pair.y) : pair;
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

/* A sum without an addend, by whole lines of memory, through the warp's room at `stage`. bias: of the tile, in shared memory. */
template <typename T, int N>
static __device__ __forceinline__ void store_lines(const struct call &x, const float (&sum)[N / 8][4], const struct corner &corner,
                                                   uint32_t stage, const float *bias)
{
    using out = way_out<N, 1>;
    const int lane = (int)threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int part = 0; part < out::PARTS; part++) {
        float all[out::COLUMNS / 8][4];
#pragma unroll
        for (int j = 0; j < out::COLUMNS / 8; j++) {
            const float2 b = *(const float2 *)(bias + part * out::COLUMNS + 8 * j + 2 * q);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                all[j][i] = sum[part * (out::COLUMNS / 8) + j][i] + (i % 2 ? b.y : b.x);
            }
        }
        __syncwarp();
        stage_part<T, out::COLUMNS, false>(all, 0, stage);
        __syncwarp();
        const int column = part * out::COLUMNS + 8 * out::unit();
#pragma unroll
        for (int i = 0; i < 16 / out::LINES; i++) {
            const int line = i * out::LINES + lane / out::UNITS;
            if (line < corner.rows && column < corner.columns) {
                *(uint4 *)((T *)x.c + corner.at + ((uint32_t)line * (uint32_t)x.ldc + (uint32_t)column)) =
                    staged(stage, line, out::unit()).words;
            }
        }
    }
}

/* The warp's rows of a tile, when its products have ended. next: what fetch found of the first step. stage: the warp's
 * room there. counted: of each half its sums over rows, four warps apart; ONWARD: over all the warp's tiles, of MOMENTS about
 * `pivots`, which its first one sets. */
template <typename T, int N, int HALVES, enum ps_finish FINISH, bool COUNTED, bool ONWARD>
static __device__ __forceinline__ void finish_rows(const struct call &x, const float (&sum)[HALVES][N / 8][4], struct beside &next,
                                                   uint32_t stage, const struct corner &corner, int column0, uint4 drawn,
                                                   float2 (*counted)[COUNTED ? N : 1], float *pivots, bool first_tile)
{
    using out = way_out<N, HALVES>;
    constexpr bool FLOATS = FINISH == PS_FINISH_SUM || FINISH == PS_FINISH_RESIDUAL; /* else rounded, as passes would read it */
    constexpr bool MOMENTS = FINISH == PS_FINISH_RESIDUAL;
    constexpr bool DRAWS = FINISH == PS_FINISH_RESIDUAL || FINISH == PS_FINISH_ACTIVATION;
    const int unit = out::unit();
    T *const c = (T *)x.c + corner.at, *const keep = (T *)x.kept + corner.at;
    if (FINISH == PS_FINISH_SUM && !COUNTED && !x.addend) {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            store_rows<T, N>(x, sum[half], corner, 64 * half, column0);
        }
        return;
    }
    const bool dropped = DRAWS && x.dropout.threshold;
    float scale = dropped ? x.dropout.scale : 1.0f;
    asm volatile("" : "+f"(scale)); /* in a register of each thread: else every use copies it there */
    const uint32_t least = x.dropout.threshold << 16;
    float bias[8] = {}, mean[8] = {}, first[8] = {}, second[8] = {}, pivot[8] = {};
#pragma unroll 1
    for (int step = 0; step < out::STEPS && out::part(step) < corner.columns; step++) {
        const int column = out::column(step);
        if (step % out::PAIRS == 0) {
            stage_parts<T, N, HALVES, FLOATS>(sum, stage, step / out::PAIRS);
        }
        if (step % (HALVES * out::PAIRS) == 0 && column < corner.columns) {
            if (FINISH == PS_FINISH_ACTIVATION || (FINISH == PS_FINISH_SUM && x.bias)) {
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
        eight words[2], slope[2];
        uint32_t at[2];
        bool here[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int line = out::line(step, i), row = out::row(step, i);
            at[i] = (uint32_t)row * (uint32_t)x.ldc + (uint32_t)column;
            here[i] = column < corner.columns && row < corner.rows;
            if constexpr (FLOATS) {
                staged(v[i], stage, line, unit);
            } else {
                words[i] = staged(stage, line, unit);
            }
            unpack<T>(other[i], now.addend[i]);
            if constexpr (FINISH == PS_FINISH_SUM) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[i][j] += bias[j];
                }
            }
        }
        if (FINISH == PS_FINISH_RESIDUAL && column < corner.columns) { /* registers are scarce: loaded at each step */
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
                float add[4];
                ps_load<4>(add, x.bias + column0 + column + j);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    v[i / 4][j + i % 4] += add[i % 4];
                }
            }
        }
        if (FINISH == PS_FINISH_RESIDUAL && x.addend_scale && column < corner.columns) {
#pragma unroll
            for (int j = 0; j < 8; j += 2) { /* a few at a time, for the registers' sake */
                const float2 line = *(const float2 *)(x.addend_scale + column0 + column + j);
                const float2 from = *(const float2 *)(x.addend_shift + column0 + column + j);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    other[i][j] = fmaf(other[i][j], line.x, from.x);
                    other[i][j + 1] = fmaf(other[i][j + 1], line.y, from.y);
                }
                asm volatile("" ::: "memory");
            }
        }
        struct ps_block draws[2];
        if (dropped) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t row = (uint32_t)out::row(step, i);
                draws[i] = ps_draws_after(x.keys, drawn, corner.block + row * ((uint32_t)x.n / 8) + (uint32_t)column / 8);
            }
        }
        if constexpr (FINISH == PS_FINISH_ACTIVATION) {
            x.kept ? activate<T, true>(x.activation, words, slope, bias, scale)
                   : activate<T, false>(x.activation, words, slope, bias, scale);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (FLOATS) {
#pragma unroll
                for (int j = 0; j < 8; j++) { /* a word has two draws, of which the upper one decides a word as it is */
                    const bool goes = dropped && (j % 2 ? draws[i].word[j / 2] : draws[i].word[j / 2] << 16) < least;
                    v[i][j] = goes ? other[i][j] : fmaf(v[i][j], scale, other[i][j]);
                }
                pack<T>(words[i], v[i]);
            } else if constexpr (FINISH == PS_FINISH_SLOPE) {
                words[i] = product_of<T>(words[i], now.addend[i]);
            } else {
                if (dropped) {
                    drop(words[i], slope[i], x.dropout, draws[i]);
                }
                if (x.kept && here[i]) {
                    ps_store_once((uint4 *)(keep + at[i]), slope[i].words);
                }
            }
            if (here[i]) {
                *(uint4 *)(c + at[i]) = words[i].words;
            }
        }
        if constexpr (COUNTED) {
            unpack<T>(v[0], words[0]);
            unpack<T>(v[1], words[1]);
            float *const own_pivots = ONWARD ? pivots + out::part(step) + 8 * unit : NULL;
            if (step % out::PAIRS == 0) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    first[j] = second[j] = 0;
                }
                if (MOMENTS && (!ONWARD || first_tile)) { /* the first row of 16 */
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const float one = __shfl_sync(0xffffffffu, v[0][j], unit);
                        if (!ONWARD) {
                            pivot[j] = one;
                        } else if ((int)threadIdx.x % 32 < out::UNITS) {
                            own_pivots[j] = one;
                        }
                    }
                    __syncwarp();
                }
            }
            unpack<T>(other[0], now.more[0]);
            unpack<T>(other[1], now.more[1]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float from = !MOMENTS ? 0.0f : ONWARD ? own_pivots[j] : pivot[j];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float one = here[i] ? MOMENTS ? v[i][j] - from : v[i][j] : 0.0f;
                    first[j] += one;
                    second[j] = fmaf(one, MOMENTS ? one : other[i][j] - mean[j], second[j]);
                }
            }
            if (step % out::PAIRS == out::PAIRS - 1) {
                const int left = corner.rows - 64 * out::half(step), rows = left < 0 ? 0 : left < 16 ? left : 16;
                count_part<out::UNITS, MOMENTS && !ONWARD>(first, second, pivot, rows,
                                                           &counted[4 * out::half(step)][out::part(step)], ONWARD && !first_tile);
            }
        }
    }
}

} // namespace wgmma16

#endif
