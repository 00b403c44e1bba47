/* The last step of every sum over rows: partial rows, one a block of the kernel before, are summed by column.
 *
 * Why: gradients are sums over all R rows, and floating-point atomics would make them differ from run to run. One kernel leaves a
 * partial row a block in the workspace, this one sums them in an order that depends on their number alone.
 * += both outputs. Bytes: 4 rows columns read; the partials come from L2. Flops: rows columns. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"

struct sums {
    struct ps_cuda_columns job[2];
    unsigned first_blocks; /* of the first job */
};

/* Blocks of 8 columns (one sector of 32 bytes) by BLOCK / 8 threads down the rows. */
template <int BLOCK> static __global__ void __launch_bounds__(BLOCK) add_columns(const __grid_constant__ struct sums sums)
{
    __shared__ float shared[BLOCK / 32][8];
    const bool other = blockIdx.x >= sums.first_blocks;
    const struct ps_cuda_columns &job = sums.job[other];
    const int64_t column = (int64_t)(blockIdx.x - (other ? sums.first_blocks : 0)) * 8 + threadIdx.x % 8;
    ps_grid_begin();
    const bool live = column < job.columns;
    const float total = ps_column_sum<BLOCK>(job.partials, job.rows, job.columns, column, live, shared);
    if (threadIdx.x < 8 && live) {
        if (column < job.split) {
            job.first[column] += total;
        } else {
            job.second[column - job.split] += total;
        }
    }
}

enum ps_status ps_cuda_add_columns(const struct ps_cuda_context *c, const char *op, const struct ps_cuda_columns *jobs, int count)
{
    enum { FEW = 256, MANY = 512, FEW_ROWS = FEW / 8 * PS_COLUMN_AHEAD /* that so few threads ask for at once */ };
    struct sums sums = {};
    unsigned blocks = 0;
    int64_t rows = 0;
    for (int i = 0; i < count; i++) {
        sums.job[i] = jobs[i];
        sums.first_blocks = i == 0 ? ps_cuda_blocks(jobs[i].columns, 8) : sums.first_blocks;
        blocks += ps_cuda_blocks(jobs[i].columns, 8);
        rows = jobs[i].rows > rows ? jobs[i].rows : rows;
    }
    if (rows <= FEW_ROWS) {
        ps_cuda_launch(c, add_columns<FEW>, blocks, FEW, 0, sums);
    } else {
        ps_cuda_launch(c, add_columns<MANY>, blocks, MANY, 0, sums);
    }
    PS_CUDA_LAUNCHED(op);
}
