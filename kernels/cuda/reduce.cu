/* The last step of every sum over rows: partial rows, one a block of the kernel before, are summed by column.
 *
 * Why: gradients are sums over all R rows, and floating-point atomics would make them differ from run to run. One kernel leaves a
 * partial row a block in the workspace, this one sums them in an order that depends on their number alone.
 * += both outputs. Bytes: 4 rows columns read; the partials come from L2. Flops: rows columns. */
#include "kernels/cuda/primitives.cuh"

/* Blocks of 8 columns (one sector of 32 bytes) by 32 threads down the rows. */
static __global__ void __launch_bounds__(256)
    add_columns(float *first, float *second, int64_t split, const float *__restrict__ partials, int64_t rows, int64_t columns)
{
    __shared__ float shared[8][8];
    const int x = threadIdx.x % 8, warp = threadIdx.x / 32;
    const int64_t column = (int64_t)blockIdx.x * 8 + x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (int64_t row = threadIdx.x / 8; row < rows; row += 32) {
            sum += partials[row * columns + column];
        }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    if (threadIdx.x % 32 < 8) {
        shared[warp][x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 8 && column < columns) {
        float total = shared[0][x];
#pragma unroll
        for (int i = 1; i < 8; i++) {
            total += shared[i][x];
        }
        if (column < split) {
            first[column] += total;
        } else {
            second[column - split] += total;
        }
    }
}

enum ps_status ps_cuda_add_columns(const struct ps_cuda_context *c, const char *op, float *first, float *second, int64_t split,
                                   const float *partials, int64_t rows, int64_t columns)
{
    add_columns<<<ps_cuda_blocks(columns, 8), 256, 0, c->stream>>>(first, second, split, partials, rows, columns);
    PS_CUDA_LAUNCHED(op);
}
