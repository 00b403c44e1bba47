/* Sums over the rows of [rows, d] by column, for batchnorm: who takes which rows and columns, and how the last block of a tile of
 * columns to finish adds up what the blocks' shares of the rows have left. */
#ifndef PS_KERNELS_CUDA_COLUMNS_CUH
#define PS_KERNELS_CUDA_COLUMNS_CUH

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/count.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 512;
static const int resident = 2;       /* blocks a multiprocessor */
static const int pass_rows = 4;      /* a share is a multiple of so many rows a thread */
static const int most_columns = 128; /* of a block */

/* How x [rows, d] is shared out: blocks (share, tile), tiles fastest; 2^tx_bits threads along the columns, the rest down. */
struct sharing {
    int64_t rows, share_rows, shares;
    int d, tiles, tx_bits;
};

static __device__ __forceinline__ int64_t share_length(const struct sharing &s, int64_t share)
{
    const int64_t left = s.rows - share * s.share_rows;
    return left < s.share_rows ? left : s.share_rows;
}

/* A thread's part of it: rows ty, ty + height, .. below length, VEC columns from `column` on; at: the element of row 0. */
template <int VEC> struct place {
    int ty, height, column, length, tile;
    int64_t share, at;
    bool inside;
    __device__ __forceinline__ explicit place(const struct sharing &s)
    {
        const int tx = threadIdx.x & ((1 << s.tx_bits) - 1);
        ty = threadIdx.x >> s.tx_bits;
        height = block >> s.tx_bits;
        share = blockIdx.x / s.tiles;
        tile = (int)(blockIdx.x % s.tiles);
        column = ((tile << s.tx_bits) + tx) * VEC;
        length = (int)share_length(s, share);
        at = share * s.share_rows * s.d + column;
        inside = column < s.d;
    }
    __device__ __forceinline__ bool live(int row) const
    {
        return inside && row < length;
    }
};

/* VEC columns of a parameter or a statistic, which may begin anywhere; 0 beyond d. */
template <int VEC> static __device__ __forceinline__ void load_columns(float (&r)[VEC], const float *p, int column, bool inside)
{
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        r[j] = inside ? p[column + j] : 0.0f;
    }
}

template <int N> static __device__ __forceinline__ void zero(float (&r)[N])
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        r[j] = 0.0f;
    }
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
        for (int64_t share = ty; share < s.shares; share += height) {
            const float *from = partials + share * values * s.d + column;
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
    for (int half = height / 2; half > 0; half /= 2) {
        if (ty < half) {
#pragma unroll
            for (int j = 0; j < 2 * FV; j++) {
                shared[j * block + threadIdx.x] += shared[j * block + threadIdx.x + (half << tx_bits)];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < FV; j++) {
        first[j] = shared[j * block + threadIdx.x];
        second[j] = shared[(FV + j) * block + threadIdx.x];
    }
}

/* Columns a thread of add_shares, and log2 of how many times as many it makes of VEC's threads along the columns. */
template <int VEC> static constexpr int final_vec = VEC == 1 ? 1 : 4;
template <int VEC> static constexpr int final_bits = VEC == 8 ? 1 : 0;

/* How rows are shared out depends on the shape and the device alone. vec: columns a thread. The workspace has room for the shares'
 * three values a column, and as much as a share's behind them. */
static enum ps_status sharing_make(const struct ps_cuda_context *c, const char *op, int64_t rows, int64_t d, int vec,
                                   struct sharing *s)
{
    const int64_t columns = d / vec;
    const int most_bits = vec == 8 ? 4 : 5;
    s->tx_bits = 0;
    while (s->tx_bits < most_bits && ((int64_t)1 << s->tx_bits) < columns) {
        s->tx_bits++;
    }
    const int64_t tiles = (columns + (1 << s->tx_bits) - 1) >> s->tx_bits, pass = (int64_t)pass_rows * (block >> s->tx_bits);
    if (rows > INT32_MAX / 2 || tiles > PS_COLUMN_TILES) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld rows of %lld columns are too many", op, (long long)rows, (long long)d);
    }
    int64_t shares = (int64_t)resident * c->multiprocessors / tiles;
    const int64_t most = (rows + pass - 1) / pass;
    shares = shares < 1 ? 1 : shares > most ? most : shares;
    s->share_rows = ((rows + shares - 1) / shares + pass - 1) / pass * pass;
    s->shares = (rows + s->share_rows - 1) / s->share_rows;
    s->rows = rows;
    s->d = (int)d;
    s->tiles = (int)tiles;
    return ps_cuda_workspace(c, op, (size_t)((s->shares + 1) * 3 * d) * sizeof(float));
}

static inline unsigned sharing_blocks(const struct sharing &s)
{
    return (unsigned)(s.shares * s.tiles);
}

#endif
