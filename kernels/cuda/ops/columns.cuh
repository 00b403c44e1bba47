/* Sums over the rows of [rows, d] by column, for batchnorm: who takes which rows and columns, and how the last block of a tile of
 * columns to finish adds up what the blocks' shares of the rows have left. */
#ifndef PS_KERNELS_CUDA_COLUMNS_CUH
#define PS_KERNELS_CUDA_COLUMNS_CUH

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/count.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 512;
static const int resident = 2;       /* blocks a multiprocessor */
static const int least_turns = 2;    /* rows a thread of a sum, where there are as many */
static const int most_columns = 128; /* of a block */

/* How x [rows, d] is shared out: blocks (tile, share), `tiles` of them along the columns; `across` threads lie along the columns,
 * the rest `height` rows down. A block takes every `shares`-th group of that many rows: all blocks together go through x from its
 * first rows to its last, or back. */
struct sharing {
    int rows, height, shares, turns, d, tiles, across, tx_bits /* of a sum: across is 2^tx_bits */;
    struct ps_divisor by_across;
};

/* Rows of a share. */
static __device__ __forceinline__ int share_length(const struct sharing &s, int share)
{
    const int full = (s.turns - 1) * s.height, left = s.rows - full * s.shares - share * s.height;
    return full + (left < 0 ? 0 : left < s.height ? left : s.height);
}

/* A thread's part of it: `count` rows ty, ty + height, .. of the share, VEC columns from `column` on; at: the element of the first,
 * step: from one to the next. */
template <int VEC> struct place {
    int tx, ty, column, count, share, tile;
    int64_t at, step;
    bool inside;
    __device__ __forceinline__ explicit place(const struct sharing &s)
    {
        ty = (int)ps_divide(threadIdx.x, s.by_across);
        tx = (int)threadIdx.x - ty * s.across;
        share = (int)blockIdx.y;
        tile = (int)blockIdx.x;
        column = (tile * s.across + tx) * VEC;
        inside = column < s.d && ty < s.height;
        const int first = share * s.height + ty, last = first + (s.turns - 1) * s.shares * s.height;
        count = !inside ? 0 : last < s.rows ? s.turns : s.turns - 1;
        at = (int64_t)first * s.d + column;
        step = (int64_t)s.shares * s.height * s.d;
    }
};

/* What a thread reads at once, and VEC floats of it. */
template <typename T, int VEC> using held = typename std::conditional<VEC == 1, T, uint4>::type;

template <int VEC, typename T> static __device__ __forceinline__ held<T, VEC> hold(const T *from, bool live)
{
    held<T, VEC> v = {};
    if (live) {
        v = *(const held<T, VEC> *)from;
    }
    return v;
}

template <int VEC, typename T> static __device__ __forceinline__ void unpack(float (&r)[VEC], const held<T, VEC> &v)
{
    ps_load<VEC>(r, (const T *)&v);
}

/* VEC columns of a parameter or a statistic, which may begin anywhere; 0 beyond d. */
template <int VEC> static __device__ __forceinline__ void load_columns(float (&r)[VEC], const float *p, int column, bool inside)
{
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        r[j] = 0.0f;
    }
    if (inside && VEC > 1 && (uintptr_t)p % 16 == 0) {
        ps_load<VEC>(r, p + column);
    } else if (inside) {
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            r[j] = p[column + j];
        }
    }
}

template <int N> static __device__ __forceinline__ void zero(float (&r)[N])
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        r[j] = 0.0f;
    }
}

/* from [block], by a warp: in its lanes below 2^tx_bits, and at from[lane], the sum over the threads that have this lane's number
 * modulo 2^tx_bits, up to 32. */
template <typename V> static __device__ __forceinline__ V sum_threads(V *from, int tx_bits)
{
    const int lane = (int)threadIdx.x % 32;
    V sum = from[lane];
#pragma unroll
    for (int i = 1; i < block / 32; i++) {
        sum += from[lane + 32 * i];
    }
    for (int offset = 16; offset >> tx_bits; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    from[lane] = sum;
    return sum;
}

/* A share's values of a column are added up in double, first and second [FV] in the threads with ty 0 of 2^tx_bits along the
 * columns from `column` on. MOMENTS: they are a pivot, the sum of differences from it, and M2 (of squared differences from the
 * share's mean), and first and second become sums of x and of its square less origin, the first share's pivot. Else two sums, and
 * origin 0. partials [shares, 3 or 2, d]; shared [2 FV block]. */
template <int FV, bool MOMENTS>
static __device__ __forceinline__ void add_shares(double (&first)[FV], double (&second)[FV], float (&origin)[FV],
                                                  const float *partials, const struct sharing &s, int column, int ty, int tx_bits,
                                                  double *shared)
{
    constexpr int values = MOMENTS ? 3 : 2;
    const int height = block >> tx_bits;
    const bool inside = column < s.d;
#pragma unroll
    for (int j = 0; j < FV; j++) {
        first[j] = second[j] = 0.0;
        origin[j] = MOMENTS && inside ? __ldcg(partials + column + j) : 0.0f;
    }
    if (inside) {
#pragma unroll 4
        for (int share = ty; share < s.shares; share += height) {
            const float *from = partials + (int64_t)share * values * s.d + column;
            const double n = MOMENTS ? (double)share_length(s, share) : 1.0;
            float a[values][FV];
#pragma unroll
            for (int i = 0; i < values; i++) {
                if constexpr (FV == 4) {
                    const float4 four = __ldcg((const float4 *)(from + i * s.d));
                    a[i][0] = four.x, a[i][1] = four.y, a[i][2] = four.z, a[i][3] = four.w;
                } else {
                    a[i][0] = __ldcg(from + i * s.d);
                }
            }
#pragma unroll
            for (int j = 0; j < FV; j++) {
                if constexpr (MOMENTS) {
                    const double sum = n * ((double)a[0][j] - origin[j]) + a[1][j];
                    first[j] += sum;
                    second[j] += a[2][j] + sum * sum / n;
                } else {
                    first[j] += a[0][j];
                    second[j] += a[1][j];
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < FV; j++) {
        shared[j * block + threadIdx.x] = first[j];
        shared[(FV + j) * block + threadIdx.x] = second[j];
    }
    __syncthreads();
    const int warp = (int)threadIdx.x / 32;
    if (warp < 2 * FV) {
        sum_threads(shared + warp * block, tx_bits);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < FV; j++) {
        first[j] = shared[j * block + threadIdx.x];
        second[j] = shared[(FV + j) * block + threadIdx.x];
    }
}

/* Columns a thread of add_shares, and log2 of how many times as many it makes of VEC's threads along the columns. */
template <int VEC> static constexpr int final_vec = VEC == 1 ? 1 : 4;
template <int VEC> static constexpr int final_bits = VEC == 8 ? 1 : 0;

/* How rows are shared out depends on the shape and the device alone: by blocks of `threads`, of which the device holds `most`, with
 * vec columns a thread; of a sum a power of two threads lie across. */
static enum ps_status sharing_make(const struct ps_cuda_context *c, const char *op, int64_t rows, int64_t d, int vec, int threads,
                                   int most, bool sum, struct sharing *s)
{
    const int64_t columns = d / vec;
    int64_t tiles;
    s->tx_bits = 0;
    if (sum) {
        const int most_bits = vec == 8 ? 4 : 5;
        while (s->tx_bits < most_bits && ((int64_t)1 << s->tx_bits) < columns) {
            s->tx_bits++;
        }
        s->across = 1 << s->tx_bits;
        tiles = (columns + s->across - 1) / s->across;
    } else {
        tiles = (columns + threads - 1) / threads;
        s->across = (int)((columns + tiles - 1) / tiles);
    }
    if (rows > INT32_MAX / 2 || tiles > PS_COLUMN_TILES) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld rows of %lld columns are too many", op, (long long)rows, (long long)d);
    }
    s->by_across = ps_divisor_make(s->across);
    s->height = threads / s->across;
    const int64_t groups = (rows + s->height - 1) / s->height, least = sum ? least_turns : 1;
    int64_t shares = most / tiles;
    shares = shares < 1 ? 1 : shares;
    shares = shares < (groups + least - 1) / least ? shares : (groups + least - 1) / least;
    s->turns = (int)((groups + shares - 1) / shares);
    s->shares = (int)shares;
    s->rows = (int)rows;
    s->d = (int)d;
    s->tiles = (int)tiles;
    return PS_OK;
}

/* A sum's, with room in the workspace for the shares' three values a column, and as much as a share's behind them. */
static enum ps_status sharing_of_sum(const struct ps_cuda_context *c, const char *op, int64_t rows, int64_t d, int vec,
                                     struct sharing *s)
{
    PS_TRY(sharing_make(c, op, rows, d, vec, block, resident * c->multiprocessors, true, s));
    return ps_cuda_workspace(c, op, (size_t)((int64_t)(s->shares + 1) * 3 * d) * sizeof(float));
}

/* Of a pass over rows that sums nothing: smaller blocks, whose first rows are on their way sooner. */
static const int pass_block = 256;
static const int pass_resident = 4; /* blocks a multiprocessor */

static enum ps_status sharing_of_pass(const struct ps_cuda_context *c, const char *op, int64_t rows, int64_t d, int vec,
                                      struct sharing *s)
{
    return sharing_make(c, op, rows, d, vec, pass_block, pass_resident * c->multiprocessors, false, s);
}

static inline dim3 sharing_blocks(const struct sharing &s)
{
    return dim3((unsigned)s.tiles, (unsigned)s.shares);
}

#endif
