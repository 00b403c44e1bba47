/* The last step of every sum over rows: partial rows, one a block of the kernel before, are summed by column.
 *
 * Why: gradients are sums over all R rows, and floating-point atomics would make them differ from run to run. One kernel leaves a
 * partial row a block in the workspace, this one sums them in an order that depends on their number alone.
 * += both outputs. Bytes: 4 rows columns read; the partials come from L2. Flops: rows columns.
 *
 * Many rows are shared by a block's threads; of a few, such as W_pos's of long windows, a thread adds a column's. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"

struct sums {
    struct ps_cuda_columns job[2];
    unsigned first_blocks; /* of the first job */
};

/* As many rows as one thread adds. */
enum { FEW_ROWS = 8 };

/* Columns of a block. */
static __host__ __device__ int width_of(const struct ps_cuda_columns &job, int block)
{
    return job.rows <= FEW_ROWS ? block : 8;
}

/* Blocks of 8 columns (one sector of 32 bytes) by BLOCK / 8 threads down the rows, or of a column a thread. */
template <int BLOCK> static __global__ void __launch_bounds__(BLOCK) add_columns(const __grid_constant__ struct sums sums)
{
    __shared__ float shared[BLOCK / 32][8];
    const bool other = blockIdx.x >= sums.first_blocks;
    const struct ps_cuda_columns &job = sums.job[other];
    const int width = width_of(job, BLOCK);
    const int64_t column = (int64_t)(blockIdx.x - (other ? sums.first_blocks : 0)) * width + threadIdx.x % width;
    ps_grid_begin();
    const bool live = column < job.columns;
    float total = 0.0f;
    if (width == 8) {
        total = ps_column_sum<BLOCK>(job.partials, job.rows, job.columns, column, live, shared);
    } else {
#pragma unroll
        for (int row = 0; row < FEW_ROWS; row++) {
            total += live && row < job.rows ? job.partials[row * job.columns + column] : 0.0f;
        }
    }
    if ((int)threadIdx.x < width && live) {
        if (column < job.split) {
            job.first[column] += total;
        } else {
            job.second[column - job.split] += total;
        }
    }
}

enum ps_status ps_cuda_add_columns(const struct ps_cuda_context *c, const char *op, const struct ps_cuda_columns *jobs, int count)
{
    enum { FEW = 256, MANY = 512, AT_ONCE = FEW / 8 * PS_COLUMN_AHEAD /* that so few threads ask for at once */ };
    struct sums sums = {};
    const bool few = jobs[0].rows <= AT_ONCE && jobs[count - 1].rows <= AT_ONCE;
    unsigned blocks = 0;
    for (int i = 0; i < count; i++) {
        sums.job[i] = jobs[i];
        blocks += ps_cuda_blocks(jobs[i].columns, width_of(jobs[i], few ? FEW : MANY));
        sums.first_blocks = i == 0 ? blocks : sums.first_blocks;
    }
    if (few) {
        ps_cuda_launch(c, add_columns<FEW>, blocks, FEW, 0, sums);
    } else {
        ps_cuda_launch(c, add_columns<MANY>, blocks, MANY, 0, sums);
    }
    PS_CUDA_LAUNCHED(op);
}
