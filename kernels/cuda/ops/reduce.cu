/* The last step of sums over rows: partial rows, one a block of a kernel before, or one a slice of rows, are summed by column.
 *
 * Why: gradients are sums over all R rows, and floating-point atomics would make them differ from run to run. One kernel leaves a
 * partial row a block in the workspace, this one sums them in an order that depends on their number alone. Where sums may wait
 * (ps_kernels.later_sums) those of a pass's layers are one launch, whose start is what most of its time is.
 * += both outputs. Bytes: 4 rows columns read; the partials come from L2. Flops: rows columns.
 *
 * Many rows are shared by a block's threads; of a few, such as W_pos's of long windows, a thread adds a column's; of many columns,
 * as of weights, 8 warps share the rows, a lane adds 4 columns. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"

struct sums {
    struct ps_cuda_columns job[PS_COLUMN_JOBS];
    unsigned end[PS_COLUMN_JOBS]; /* blocks of the jobs so far */
};

enum {
    BLOCK = 512,      /* threads */
    FEW_ROWS = 8,     /* as many as one thread adds */
    WARPS = 8,        /* that share the rows of many columns */
    AHEAD = 4,        /* such rows on their way at once */
    MANY = 16,        /* columns a row, from which on they are many */
    LANE_COLUMNS = 4, /* of those */
    WARP_COLUMNS = 128,
    TEAMS = BLOCK / 32 / WARPS,
};

/* Columns of a block. */
static __host__ __device__ int width_of(const struct ps_cuda_columns &job)
{
    const bool many = job.columns >= MANY * job.rows && job.columns % LANE_COLUMNS == 0 && job.split % LANE_COLUMNS == 0;
    return job.rows <= FEW_ROWS ? BLOCK : many ? TEAMS * WARP_COLUMNS : 8;
}

/* Of many columns: the lane's 4 from `column` on. */
static __device__ __forceinline__ void add_many(const struct ps_cuda_columns &job, int64_t column, float4 (*shared)[32])
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % WARPS, team = (int)threadIdx.x / 32 / WARPS;
    const bool live = column < job.columns, adds = live && warp == 0;
    float *const to = column < job.split ? job.first + column : job.second + (column - job.split);
    float before[LANE_COLUMNS] = {}; /* comes together with the rows' */
    if (adds) {
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++) {
            before[j] = to[j];
        }
    }
    float4 sum = make_float4(0, 0, 0, 0);
    for (int64_t row = warp; live && row < job.rows; row += AHEAD * WARPS) {
        float4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            v[i] = row + i * WARPS < job.rows ? *(const float4 *)(job.partials + (row + i * WARPS) * job.columns + column)
                                              : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            sum = make_float4(sum.x + v[i].x, sum.y + v[i].y, sum.z + v[i].z, sum.w + v[i].w);
        }
    }
    shared[team * WARPS + warp][lane] = sum;
    __syncthreads();
    if (!adds) {
        return;
    }
#pragma unroll
    for (int i = 1; i < WARPS; i++) {
        const float4 v = shared[team * WARPS + i][lane];
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    to[0] = before[0] + sum.x;
    to[1] = before[1] + sum.y;
    to[2] = before[2] + sum.z;
    to[3] = before[3] + sum.w;
}

/* Blocks of 8 columns (one sector of 32 bytes) by BLOCK / 8 threads down the rows, of a column a thread, or of many. */
static __global__ void __launch_bounds__(BLOCK) add_columns(const __grid_constant__ struct sums sums)
{
    __shared__ float shared[BLOCK / 32][8];
    __shared__ float4 of_many[BLOCK / 32][32];
    int number = 0;
    unsigned begin = 0;
    for (; blockIdx.x >= sums.end[number]; number++) {
        begin = sums.end[number];
    }
    const struct ps_cuda_columns &job = sums.job[number];
    const int width = width_of(job);
    const int64_t first = (int64_t)(blockIdx.x - begin) * width, column = first + threadIdx.x % width;
    ps_grid_begin();
    if (width == TEAMS * WARP_COLUMNS) {
        const int team = (int)threadIdx.x / 32 / WARPS, lane = (int)threadIdx.x % 32;
        add_many(job, first + team * WARP_COLUMNS + lane * LANE_COLUMNS, of_many);
        return;
    }
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

/* Whole units of 16 bytes, so that what follows is aligned. */
static size_t room_bytes(size_t floats)
{
    return (floats * sizeof(float) + 15) / 16 * 16;
}

static float *take_room(struct ps_cuda_later *later, size_t bytes)
{
    float *const room = (float *)(later->memory + later->used);
    later->used += bytes;
    return room;
}

enum ps_status ps_cuda_partials(const struct ps_cuda_context *c, const char *op, size_t floats, float **partials)
{
    struct ps_cuda_later *const later = &c->later;
    const size_t bytes = room_bytes(floats);
    if (later->memory && !c->beside && bytes <= later->bytes) {
        if (bytes > later->bytes - later->used || later->count > PS_COLUMN_JOBS - 2) {
            PS_TRY(add_waiting(c));
        }
        *partials = take_room(later, bytes);
        return PS_OK;
    }
    *partials = (float *)c->workspace;
    return ps_cuda_workspace(c, op, bytes);
}

float *ps_cuda_waiting_room(const struct ps_cuda_context *c, size_t floats, int count)
{
    struct ps_cuda_later *const later = &c->later;
    const size_t bytes = room_bytes(floats);
    if (!later->memory || c->beside || bytes > (later->bytes - later->used) / 2 || later->count + count > PS_COLUMN_JOBS - 2) {
        return NULL;
    }
    return take_room(later, bytes);
}

enum ps_status ps_cuda_add_columns(const struct ps_cuda_context *c, const char *op, const struct ps_cuda_columns *jobs, int count)
{
    struct ps_cuda_later *const later = &c->later;
    const char *const partials = (const char *)jobs->partials;
    if (!later->memory || partials < later->memory || partials >= later->memory + later->bytes) {
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
