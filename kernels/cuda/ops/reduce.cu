/* The last step of every sum over rows: partial rows, one a block of a kernel before, are summed by column.
 *
 * Why: gradients are sums over all R rows, and floating-point atomics would make them differ from run to run. One kernel leaves a
 * partial row a block in the workspace, this one sums them in an order that depends on their number alone. Where sums may wait
 * (ps_kernels.later_sums) those of a whole pass are one launch, whose start is what most of its time is.
 * += both outputs. Bytes: 4 rows columns read; the partials come from L2. Flops: rows columns.
 *
 * Many rows are shared by a block's threads; of a few, such as W_pos's of long windows, a thread adds a column's. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"

struct sums {
    struct ps_cuda_columns job[PS_COLUMN_JOBS];
    unsigned end[PS_COLUMN_JOBS]; /* blocks of the jobs so far */
};

enum {
    BLOCK = 512,  /* threads */
    FEW_ROWS = 8, /* as many as one thread adds */
};

/* Columns of a block. */
static __host__ __device__ int width_of(const struct ps_cuda_columns &job)
{
    return job.rows <= FEW_ROWS ? BLOCK : 8;
}

/* Blocks of 8 columns (one sector of 32 bytes) by BLOCK / 8 threads down the rows, or of a column a thread. */
static __global__ void __launch_bounds__(BLOCK) add_columns(const __grid_constant__ struct sums sums)
{
    __shared__ float shared[BLOCK / 32][8];
    int number = 0;
    unsigned begin = 0;
    for (; blockIdx.x >= sums.end[number]; number++) {
        begin = sums.end[number];
    }
    const struct ps_cuda_columns &job = sums.job[number];
    const int width = width_of(job);
    const int64_t column = (int64_t)(blockIdx.x - begin) * width + threadIdx.x % width;
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

static enum ps_status add(const struct ps_cuda_context *c, const char *op, const struct ps_cuda_columns *jobs, int count)
{
    struct sums sums = {};
    unsigned blocks = 0;
    for (int i = 0; i < count; i++) {
        sums.job[i] = jobs[i];
        blocks += ps_cuda_blocks(jobs[i].columns, width_of(jobs[i]));
        sums.end[i] = blocks;
    }
    ps_cuda_launch(c, add_columns, blocks, BLOCK, 0, sums);
    PS_CUDA_LAUNCHED(op);
}

/* Adds what waits. */
static enum ps_status add_waiting(const struct ps_cuda_context *c)
{
    struct ps_cuda_later *const later = &c->later;
    const int count = later->count;
    later->count = 0;
    later->used = 0;
    return count ? add(c, "later_sums", later->job, count) : PS_OK;
}

enum ps_status ps_cuda_partials(const struct ps_cuda_context *c, const char *op, size_t floats, float **partials)
{
    struct ps_cuda_later *const later = &c->later;
    const size_t bytes = (floats * sizeof(float) + 15) / 16 * 16;
    if (later->memory && !c->beside && bytes <= later->bytes) {
        if (bytes > later->bytes - later->used || later->count > PS_COLUMN_JOBS - 2) {
            PS_TRY(add_waiting(c));
        }
        *partials = (float *)(later->memory + later->used);
        later->used += bytes;
        return PS_OK;
    }
    *partials = (float *)c->workspace;
    return ps_cuda_workspace(c, op, bytes);
}

enum ps_status ps_cuda_add_columns(const struct ps_cuda_context *c, const char *op, const struct ps_cuda_columns *jobs, int count)
{
    struct ps_cuda_later *const later = &c->later;
    if (jobs->partials == c->workspace) {
        return add(c, op, jobs, count);
    }
    for (int i = 0; i < count; i++) {
        later->job[later->count++] = jobs[i];
    }
    return PS_OK;
}

enum ps_status ps_cuda_later_sums(const struct ps_kernels *k, void *memory, size_t bytes)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const enum ps_status status = add_waiting(c);
    c->later.memory = (char *)memory;
    c->later.bytes = bytes;
    return status;
}
