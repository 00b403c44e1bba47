/* Reductions in a fixed order. Every lane of the warp takes part; a group is LANES neighbouring lanes, and all of it gets the
 * result. */
#ifndef PS_KERNELS_CUDA_REDUCE_CUH
#define PS_KERNELS_CUDA_REDUCE_CUH

#include <stdint.h>

template <int LANES, typename T> static __device__ __forceinline__ T ps_group_sum(T value)
{
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

template <int LANES> static __device__ __forceinline__ float ps_group_max(float value)
{
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    return value;
}

/* Of four lanes, neighbours first, unlike ps_group_sum. */
static __device__ __forceinline__ float ps_quad_sum(float value)
{
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

static __device__ __forceinline__ float ps_quad_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

/* The sum over the lanes whose numbers are the same modulo LANES, in all of them. */
template <int LANES, typename T> static __device__ __forceinline__ T ps_across_sum(T value)
{
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

enum { PS_COLUMN_AHEAD = 8 };

/* The sum over rows of partials[row, column] in threads 0 .. 7, `column` being a block's first + threadIdx.x % 8. BLOCK threads go
 * down the rows, each with PS_COLUMN_AHEAD of its rows on their way at once, since it is their way from L2 that takes time; live:
 * there is such a column. */
template <int BLOCK, typename T>
static __device__ __forceinline__ T ps_column_sum(const T *partials, int64_t rows, int64_t columns, int64_t column, bool live,
                                                  T (*shared)[8])
{
    constexpr int AHEAD = PS_COLUMN_AHEAD, STRIDE = BLOCK / 8;
    const int x = threadIdx.x % 8;
    T sum = 0;
    if (live) {
        for (int64_t row = threadIdx.x / 8; row < rows; row += AHEAD * STRIDE) {
            T v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                v[i] = row + i * STRIDE < rows ? partials[(row + i * STRIDE) * columns + column] : (T)0;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                sum += v[i];
            }
        }
    }
    sum = ps_across_sum<8>(sum);
    if (threadIdx.x % 32 < 8) {
        shared[threadIdx.x / 32][x] = sum;
    }
    __syncthreads();
    T total = shared[0][x];
#pragma unroll
    for (int i = 1; i < BLOCK / 32; i++) {
        total += shared[i][x];
    }
    return total;
}

/* The block's sum, in all its threads; BLOCK threads, a multiple of 32. shared [BLOCK / 32] may be used again at once. */
template <int BLOCK, typename T> static __device__ __forceinline__ T ps_block_sum(T value, T *shared)
{
    value = ps_group_sum<32>(value);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    T sum = shared[0];
#pragma unroll
    for (int i = 1; i < BLOCK / 32; i++) {
        sum += shared[i];
    }
    __syncthreads();
    return sum;
}

template <int BLOCK> static __device__ __forceinline__ float ps_block_max(float value, float *shared)
{
    value = ps_group_max<32>(value);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float max = shared[0];
#pragma unroll
    for (int i = 1; i < BLOCK / 32; i++) {
        max = fmaxf(max, shared[i]);
    }
    __syncthreads();
    return max;
}

/* The block's sum of partials[i * stride] for i < count, in a fixed order. */
template <int BLOCK>
static __device__ __forceinline__ double ps_sum_partials(const double *partials, int count, int stride, double *shared)
{
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += BLOCK) {
        sum += partials[(int64_t)i * stride];
    }
    return ps_block_sum<BLOCK>(sum, shared);
}

#endif
