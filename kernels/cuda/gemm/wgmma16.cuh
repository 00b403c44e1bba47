/* Products of 16 bits on Hopper, c = a b of many rows, with what follows them done on the way out (ps_gemm_finish, ps_gemm_bias).
 *
 * Why: between two products of a layer stand a bias, an activation, dropout, the residual stream and a norm's sums over rows, each
 * a pass over [m, n] of its own otherwise. A tile is 128 rows by N columns. The copy engine brings 64 of the summed dimension at a
 * time to a ring of panels, zeros beyond the edges; wgmma multiplies them there. Sums then change places within quads of lanes, so
 * that a lane holds 8 neighbouring columns: 16 bytes of each tensor, and one block of dropout's draws. Sums over rows by column
 * (BatchNorm's) leave the block as one row of partial sums; the last block of a few rows of tiles to finish merges those, and the
 * last of these merges theirs, in a fixed order.
 *
 * Two kernels. product_kernel: a block of two warpgroups to a tile, 64 rows each, and several blocks a multiprocessor, for short
 * sums, which end with more than they multiply. long_kernel: a warpgroup to a tile, two taking turns, so that the one multiplies
 * while the other's sums go out; a third one's warp brings panels, and pairs of blocks share those of the right operand.
 *
 * Bytes: 2 (m k ceil(n / N) + k n ceil(m / 128)), the repeats from L2, half of the second term's where blocks share, and 2 m n for
 * c and for each tensor beside it. FLOPs 2 m n k. Memory bounds products of up to 256 columns, wgmma wider ones. */
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
    MOST_SHARED = 100 * 1024, /* two blocks a multiprocessor */
    /* long_kernel's */
    WIDE = 128, /* columns of a tile */
    CLUSTER = 2,
    GROUP = 128, /* threads of a warpgroup */
    LONG_THREADS = 3 * GROUP,
    LONG_STAGES = 6,
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

template <typename T> static __device__ __forceinline__ float rounded(float v)
{
    T r;
    ps_put(&r, v);
    return ps_float(r);
}

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

static __device__ __forceinline__ void load_floats(float (&v)[8], const float *from)
{
    ps_load<8>(v, from);
}

/* drop() of the 8 from `element` on, but for the scale. */
static __device__ __forceinline__ void drop(float (&v)[8], const struct ps_dropout &d, uint64_t step, int64_t element)
{
    const struct ps_block draws = ps_draws(d, step, (uint32_t)(element / 8));
    const uint32_t below = ps_below(d.threshold), minus_below = ps_minus_below(d.threshold);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const uint32_t masks = ps_kept2(draws.word[j / 2], below, minus_below) * 0xffffu;
        v[j] = __uint_as_float(__float_as_uint(v[j]) & __byte_perm(masks, 0, 0x1010));
        v[j + 1] = __uint_as_float(__float_as_uint(v[j + 1]) & __byte_perm(masks, 0, 0x3232));
    }
}

/* gelu by the instruction for tanh, whose error 16 bits hide. SLOPE: v times the derivative at t, else of t. */
template <enum ps_activation ACTIVATION, bool SLOPE>
static __device__ __forceinline__ void activate(float (&v)[8], const float (&t)[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if constexpr (ACTIVATION == PS_GELU_TANH && SLOPE) {
            float x = t[j];
            ps_gelu_twice_backward(x, v[j]);
            v[j] *= 0.5f;
        } else if constexpr (ACTIVATION == PS_GELU_TANH) {
            v[j] = 0.5f * ps_gelu_twice(t[j]);
        } else if constexpr (ACTIVATION == PS_GELU) {
            v[j] = SLOPE ? v[j] * ps_gelu_near_slope(t[j]) : ps_gelu_near(t[j]);
        } else {
            v[j] = SLOPE ? v[j] * ps_activation_slope<ACTIVATION>(t[j]) : ps_activated<ACTIVATION>(t[j]);
        }
    }
}

template <bool SLOPE> static __device__ __forceinline__ void activate(enum ps_activation which, float (&v)[8], const float (&t)[8])
{
    if (which == PS_GELU) {
        activate<PS_GELU, SLOPE>(v, t);
    } else if (which == PS_RELU) {
        activate<PS_RELU, SLOPE>(v, t);
    } else {
        activate<PS_GELU_TANH, SLOPE>(v, t);
    }
}

/* ---- sums over rows ---- */

/* Two sums a column of the warp's 16 rows: of each group of 8 columns a lane's part becomes the whole of one column, 8 q +
 * own_column, in first[0] and second[0]. */
static __device__ __forceinline__ void sum_rows(float (&first)[8], float (&second)[8])
{
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        const bool upper = threadIdx.x & (4 * half);
#pragma unroll
        for (int j = 0; j < half; j++) {
            const float a = __shfl_xor_sync(0xffffffffu, upper ? first[j] : first[j + half], 4 * half);
            const float b = __shfl_xor_sync(0xffffffffu, upper ? second[j] : second[j + half], 4 * half);
            first[j] = (upper ? first[j + half] : first[j]) + a;
            second[j] = (upper ? second[j + half] : second[j]) + b;
        }
    }
}

static __device__ __forceinline__ int own_column(int lane)
{
    return lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
}

static __device__ __forceinline__ float pick(const float (&v)[8], int i)
{
    const float a = i & 4 ? v[4] : v[0], b = i & 4 ? v[5] : v[1], c = i & 4 ? v[6] : v[2], d = i & 4 ? v[7] : v[3];
    const float e = i & 2 ? c : a, f = i & 2 ? d : b;
    return i & 1 ? f : e;
}

/* Rows from `row` on, at most `most`. */
static __device__ __forceinline__ int rows_at(int64_t m, int64_t row, int most)
{
    return row >= m ? 0 : m - row < most ? (int)(m - row) : most;
}

/* A tile's threads: M of them, of a block that has several such CREWS. */
template <int M, int CREWS> struct crew {
    static __device__ __forceinline__ int side()
    {
        return CREWS == 1 ? 0 : (int)threadIdx.x / M;
    }
    static __device__ __forceinline__ int thread()
    {
        return CREWS == 1 ? (int)threadIdx.x : (int)threadIdx.x % M;
    }
    static __device__ __forceinline__ void meet()
    {
        ps_barrier(1 + side(), M);
    }
};

/* True in the crew that is the last of `count` to come here: it sees what the others wrote before. */
template <int M, int CREWS> static __device__ __forceinline__ bool comes_last(unsigned *ticket, int count)
{
    __shared__ bool last[CREWS];
    bool &mine = last[crew<M, CREWS>::side()];
    __threadfence();
    crew<M, CREWS>::meet();
    if (crew<M, CREWS>::thread() == 0) {
        mine = atomicAdd(ticket, 1u) == (unsigned)(count - 1);
        if (mine) {
            *ticket = 0;
        }
    }
    crew<M, CREWS>::meet();
    if (mine) {
        __threadfence();
    }
    return mine;
}

/* One pair a column of `count` rows of pairs, each over `rows` rows of c from `row` on: two sums, or (MOMENTS) a mean and M2,
 * merged about the first one's mean. In the first N threads. */
template <int M, int N, bool MOMENTS, int CREWS>
static __device__ __forceinline__ void merge(double &first, double &second, const float2 *from, int n, int column, int count,
                                             int64_t row, int64_t rows, int64_t m)
{
    __shared__ double all[CREWS][2][M];
    double(&shared)[2][M] = all[crew<M, CREWS>::side()];
    const int thread = crew<M, CREWS>::thread(), part = thread / N;
    double a = 0, b = 0, total = 0;
    const double pivot = MOMENTS && column < n ? (double)__ldcg(from + column).x : 0;
    if (column < n && part < M / N) {
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
    crew<M, CREWS>::meet();
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
    crew<M, CREWS>::meet();
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
template <int M, int N, bool MOMENTS, int CREWS = 1>
static __device__ __forceinline__ void gather_sums(const struct call &x, const float2 (*warps)[N], int tile_m, int tile_n)
{
    const int thread = crew<M, CREWS>::thread(), own = thread % N, column = tile_n * N + own;
    crew<M, CREWS>::meet();
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
    if (!comes_last<M, CREWS>(tickets + group, count)) {
        return;
    }
    double a, b;
    merge<M, N, MOMENTS, CREWS>(a, b, x.partials + (int64_t)first * x.n, x.n, column, count, (int64_t)first * ROWS, ROWS, x.m);
    if (x.groups > 1) {
        float2 *const groups = x.partials + (int64_t)x.tiles_m * x.n;
        if (thread < N && column < x.n) {
            groups[(int64_t)group * x.n + column] = make_float2((float)a, (float)b);
        }
        if (!comes_last<M, CREWS>(tickets + x.groups, x.groups)) {
            return;
        }
        merge<M, N, MOMENTS, CREWS>(a, b, groups, x.n, column, x.groups, 0, (int64_t)x.share * ROWS, x.m);
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

/* A lane's part of the tensors beside c: 8 columns of two rows. */
struct beside {
    eight addend[2], more[2];
};

/* Of the warp's 16 rows from row0 on; column: the lane's first. */
template <typename T, enum ps_finish FINISH, bool COUNTED>
static __device__ __forceinline__ void fetch(const struct call &x, struct beside &b, int64_t row0, int column)
{
    constexpr bool READS = FINISH == PS_FINISH_SUM || FINISH == PS_FINISH_RESIDUAL || FINISH == PS_FINISH_SLOPE;
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int64_t row = row0 + lane / 4 + 8 * i;
        b.addend[i].words = b.more[i].words = make_uint4(0, 0, 0, 0);
        if (row < x.m && column < x.n) {
            const int64_t at = row * x.ldc + column;
            const T *const from = (const T *)(FINISH == PS_FINISH_SLOPE ? x.kept : x.addend);
            if (READS && from) {
                b.addend[i].words = *(const uint4 *)(from + at);
            }
            if (FINISH == PS_FINISH_SUM && COUNTED) {
                b.more[i].words = *(const uint4 *)((const T *)x.x + at);
            }
        }
    }
}

/* Of a sum without an addend: what is stored is rounded before it changes places, half the words. */
template <typename T, int N>
static __device__ __forceinline__ void store_rows(const struct call &x, const float (&sum)[N / 8][4], int64_t row0, int column0)
{
    const int lane = (int)threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int group = 0; group < N / 32; group++) {
        const int own = column0 - 6 * q + 32 * group; /* the lane's first two, as wgmma leaves them, and every 8 from there */
        float2 bias[4] = {};
#pragma unroll
        for (int t = 0; t < 4; t++) {
            if (x.bias && own + 8 * t < x.n) {
                bias[t] = *(const float2 *)(x.bias + own + 8 * t);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t row = row0 + lane / 4 + 8 * i;
            uint32_t words[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                words[t] = ps_pack<T>(sum[4 * group + t][2 * i] + bias[t].x, sum[4 * group + t][2 * i + 1] + bias[t].y);
            }
            ps_quad_transpose(words);
            if (row < x.m && column0 + 32 * group < x.n) {
                *(uint4 *)((T *)x.c + row * x.ldc + column0 + 32 * group) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

/* The warp's 16 rows from row0 on, N columns from column0 on (the lane's first). next: what fetch found of the first 32. counted
 * [N]: the warp's sums over its rows. */
template <typename T, int N, enum ps_finish FINISH, bool COUNTED>
static __device__ __forceinline__ void finish_rows(const struct call &x, const float (&sum)[N / 8][4], struct beside &next,
                                                   int64_t row0, int column0, uint64_t step, float2 *counted)
{
    constexpr int GROUPS = N / 32;
    constexpr bool MOMENTS = FINISH == PS_FINISH_RESIDUAL;
    const int lane = (int)threadIdx.x % 32, q = lane % 4;
    if (FINISH == PS_FINISH_SUM && !COUNTED && !x.addend) {
        store_rows<T, N>(x, sum, row0, column0);
        return;
    }
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int column = column0 + 32 * group;
        const bool inside = column < x.n;
        const struct beside now = next;
        if (group + 1 < GROUPS) {
            fetch<T, FINISH, COUNTED>(x, next, row0, column + 32);
        }
        float bias[8] = {}, mean[8] = {};
        if (inside && x.bias) {
            load_floats(bias, x.bias + column);
        }
        if (inside && COUNTED && !MOMENTS) {
            load_floats(mean, x.mean + column);
        }
        float first[8] = {}, second[8] = {}, pivot[8] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t row = row0 + lane / 4 + 8 * i, at = row * x.ldc + column, element = row * x.n + column;
            const bool here = inside && row < x.m;
            float v[8], other[8];
            if constexpr (FINISH == PS_FINISH_ACTIVATION || FINISH == PS_FINISH_SLOPE) { /* the product is rounded as it is kept */
                uint32_t words[4];
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    words[t] = ps_pack<T>(&sum[4 * group + t][2 * i]);
                }
                ps_quad_transpose(words);
                const eight product = {make_uint4(words[0], words[1], words[2], words[3])};
                if (FINISH == PS_FINISH_ACTIVATION && here) {
                    *(uint4 *)((T *)x.kept + at) = product.words;
                }
                unpack<T>(v, product);
            } else {
                uint32_t low[4], high[4];
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    low[t] = __float_as_uint(sum[4 * group + t][2 * i]);
                    high[t] = __float_as_uint(sum[4 * group + t][2 * i + 1]);
                }
                ps_quad_transpose(low);
                ps_quad_transpose(high);
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    v[2 * t] = __uint_as_float(low[t]);
                    v[2 * t + 1] = __uint_as_float(high[t]);
                }
            }
            unpack<T>(other, now.addend[i]);
            if constexpr (FINISH == PS_FINISH_SLOPE) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    other[j] += bias[j];
                }
                activate<true>(x.activation, v, other);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] += bias[j];
                }
            }
            if constexpr (FINISH == PS_FINISH_ACTIVATION) {
                const float t[8] = {v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]};
                activate<false>(x.activation, v, t);
            }
            if (FINISH != PS_FINISH_SUM && x.dropout.threshold) {
                drop(v, x.dropout, step, element);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] *= x.dropout.scale;
                }
            }
            if constexpr (FINISH == PS_FINISH_SUM || FINISH == PS_FINISH_RESIDUAL) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] += other[j];
                }
            }
            if (here) {
                ps_store<8>((T *)x.c + at, v);
            }
            if constexpr (COUNTED) {
                unpack<T>(other, now.more[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] = rounded<T>(v[j]);
                    if (MOMENTS && i == 0) { /* the warp's first row */
                        pivot[j] = __shfl_sync(0xffffffffu, v[j], q);
                    }
                    const float one = MOMENTS ? v[j] - pivot[j] : v[j];
                    const float two = one * (MOMENTS ? one : other[j] - mean[j]);
                    first[j] += here ? one : 0.0f;
                    second[j] += here ? two : 0.0f;
                }
            }
        }
        if constexpr (COUNTED) {
            sum_rows(first, second);
            const int own = own_column(lane);
            float2 pair = make_float2(first[0], second[0]);
            if constexpr (MOMENTS) {
                const int rows = rows_at(x.m, row0, 16);
                const float away = rows ? first[0] / (float)rows : 0.0f;
                pair = make_float2(pick(pivot, own) + away, fmaxf(second[0] - first[0] * away, 0.0f));
                if (second[0] != second[0]) { /* not a number */
                    pair.y = second[0];
                }
            }
            counted[32 * group + 8 * q + own] = pair;
        }
    }
}

/* ---- a block to a tile ---- */

/* ACROSS: b's lines run along n, as a weight lies; else along k, as its transpose does. COUNTED: with sums over rows. */
template <typename T, int N, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static __global__ void __launch_bounds__(THREADS, N == 128 || (N == 64 && (COUNTED || FINISH == PS_FINISH_SLOPE)) ? 2 : 3)
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
    const int64_t row0 = (int64_t)tile_m * ROWS + warp * 16;
    const int column0 = tile_n * N + 8 * ((int)threadIdx.x % 4);
    struct beside next;
    fetch<T, FINISH, COUNTED>(x, next, row0, column0);
    float sum[N / 8][4];
    for (int piece = 0; piece < pieces; piece++) {
        const int stage = piece % stages;
        ps_mbarrier_wait(full + 8 * stage, piece / stages & 1);
        const uint32_t left = ps_wgmma_place(ring + stage * STAGE + side * PANEL);
        const uint32_t right = ps_wgmma_place(ring + stage * STAGE + ROWS_BYTES, ACROSS ? PANEL : 0);
        ps_wgmma_begin();
#pragma unroll
        for (int k = 0; k < DEEP / 16; k++) {
            ps_wgmma<T, 0, ACROSS>(sum, ps_wgmma_operand(left, k * 32), ps_wgmma_operand(right, k * (ACROSS ? 16 * 128 : 32)),
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
    ps_pin(sum);
    const uint64_t step = x.dropout.threshold ? x.dropout.state->step : 0;
    finish_rows<T, N, FINISH, COUNTED>(x, sum, next, row0, column0, step, counted[COUNTED ? warp : 0]);
    if constexpr (COUNTED) {
        gather_sums<THREADS, N, FINISH == PS_FINISH_RESIDUAL>(x, counted, tile_m, tile_n);
    }
}

/* ---- a warpgroup to a tile ---- */

/* Blocks of a cluster have tiles below one another, and each brings its part of the right operand's panels to all of them. Tiles go
 * round by clusters, a block's to its two warpgroups in turn: a warpgroup multiplies when the other has asked for all of its
 * products, so panels are taken in the order in which they come. */
template <typename T, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static __global__ void __launch_bounds__(LONG_THREADS, 1)
    long_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ struct call x)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * LONG_STAGES];
    __shared__ float2 counted[COUNTED ? 2 : 1][COUNTED ? 8 : 1][COUNTED ? WIDE : 1];
    constexpr int STAGE = stage_bytes<WIDE, ACROSS>;
    enum { TURN = 3 }; /* the first barrier of those by which warpgroups take turns */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), side = warp / 4, rank = ps_cluster_rank();
    const uint32_t ring = (ps_shared_address(memory) + 1023u) & ~1023u, full = ps_shared_address(barriers),
                   empty = full + 8 * LONG_STAGES;
    if (threadIdx.x == 0) {
        ps_tensor_prefetch(&a_map);
        ps_tensor_prefetch(&b_map);
        for (int s = 0; s < LONG_STAGES; s++) {
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
                    if (++stage == LONG_STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)MANY_REGISTERS));
        const uint64_t step = x.dropout.threshold ? x.dropout.state->step : 0;
        int number = side; /* of the tile among the block's */
        for (int place = first + side * x.strides; place < x.places; place += 2 * x.strides, number += 2) {
            const int tile_n = place % x.tiles_n, tile_m = place / x.tiles_n * CLUSTER + rank;
            const int64_t row0 = (int64_t)tile_m * ROWS + warp % 4 * 16;
            const int column0 = tile_n * WIDE + 8 * ((int)threadIdx.x % 4);
            struct beside next;
            fetch<T, FINISH, COUNTED>(x, next, row0, column0);
            if (number > 0) {
                ps_barrier(TURN + side, 2 * GROUP);
            }
            const uint32_t panels = ring & 0x3ffff; /* without the block's number in its cluster: an operand has no room for that */
            const unsigned brought = (unsigned)number * (unsigned)x.pieces; /* before */
            int stage = (int)(brought % LONG_STAGES), before = 0;
            uint32_t parity = brought / LONG_STAGES & 1;
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
                if (++stage == LONG_STAGES) {
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
            auto finish = [&](int half, struct beside &first) {
                finish_rows<T, WIDE, FINISH, COUNTED>(x, sum[half], first, row0 + 64 * half, column0, step,
                                                      counted[COUNTED ? side : 0][COUNTED ? 4 * half + warp % 4 : 0]);
            };
            struct beside later;
            fetch<T, FINISH, COUNTED>(x, later, row0 + 64, column0);
            finish(0, next);
            finish(1, later);
            if constexpr (COUNTED) {
                if (tile_m < x.tiles_m) {
                    gather_sums<GROUP, WIDE, FINISH == PS_FINISH_RESIDUAL, 2>(x, counted[side], tile_m, tile_n);
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
    const size_t shared = (size_t)stages * stage_bytes<N, ACROSS> + 1024;
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
    PS_TRY((open_maps<WIDE, ACROSS, CLUSTER>(&a, &b, x, p)));
    if (COUNTED) {
        PS_TRY((open_sums<GROUP, WIDE>(c, op, x)));
    }
    constexpr size_t shared = LONG_STAGES * stage_bytes<WIDE, ACROSS> + 1024;
    auto *const kernel = long_kernel<T, ACROSS, FINISH, COUNTED>;
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), op));
    const int clusters = c->multiprocessors / CLUSTER;
    x.pieces = (x.k + DEEP - 1) / DEEP;
    x.places = (x.tiles_m + CLUSTER - 1) / CLUSTER * x.tiles_n;
    x.strides = x.places < clusters ? x.places : clusters;
    ps_cuda_launch_clusters(c, kernel, CLUSTER, dim3((unsigned)(x.strides * CLUSTER)), LONG_THREADS, shared, a, b, x);
    PS_CUDA_LAUNCHED(op);
}

/* Columns of a tile: few where there are few, and where 128 would leave half a tile empty. */
template <typename T, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static enum ps_status launch_columns(const struct ps_cuda_context *c, const char *op, const struct ps_product *p,
                                     const struct call &x)
{
    enum { LONG_TERMS = 512, LONG_ROWS = 1024 };
    const int rest = x.n % WIDE;
    return x.n <= 32                               ? launch<T, 32, ACROSS, FINISH, COUNTED>(c, op, p, x)
           : rest > 0 && rest <= 64                ? launch<T, 64, ACROSS, FINISH, COUNTED>(c, op, p, x)
           : x.k >= LONG_TERMS && x.m >= LONG_ROWS ? launch_long<T, ACROSS, FINISH, COUNTED>(c, op, p, x)
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
