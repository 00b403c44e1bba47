/* Softmax of rows, forward and backward.
 *
 * Why: attention has S h N rows (1.8 million) of N (42) elements: too short for a warp a row, and no multiple of a sector. So a
 * warp takes a tile of rows that is contiguous and begins at a multiple of 16 bytes whatever N is, copies it to shared memory by
 * 16-byte asynchronous copies (all in flight at once), works on rows held by 1 to 16 lanes each, and writes the tile back by 16
 * bytes. Longer rows (n > 128) are coalesced by themselves: a warp holds one in registers up to 1024, a block walks it beyond.
 *
 * Forward: y =. Bytes: 8 rows n. Flops: 5 rows n. Backward: dx =. Bytes: 12 rows n, 16 with an addend. Flops: 4 rows n. Half in
 * 16 bits, which tiles in shared memory are too; arithmetic is fp32. Both in place if asked: a tile, row or element is read by
 * those who write it, before. */
#include <cuda_pipeline.h>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int warps = 4; /* a block */

/* count elements of global memory to the warp's shared memory (16-byte aligned). ALIGNED: from begins at a multiple of 16 bytes. */
template <bool ALIGNED, typename T> static __device__ __forceinline__ void fetch(T *to, const T *from, int count)
{
    constexpr int vec = ps_vector<T>;
    const int lane = threadIdx.x % 32, vectors = ALIGNED ? count / vec : 0;
    for (int i = lane; i < vectors; i += 32) {
        __pipeline_memcpy_async(to + vec * i, from + vec * i, 16);
    }
    for (int i = vec * vectors + lane; i < count; i += 32) {
        if constexpr (sizeof(T) == 4) {
            __pipeline_memcpy_async(to + i, from + i, 4);
        } else {
            to[i] = from[i]; /* asynchronous copies begin at 4 bytes */
        }
    }
}

template <bool ALIGNED, typename T> static __device__ __forceinline__ void put(T *to, const T *from, int count)
{
    constexpr int vec = ps_vector<T>;
    const int lane = threadIdx.x % 32, vectors = ALIGNED ? count / vec : 0;
    for (int i = lane; i < vectors; i += 32) {
        ((float4 *)to)[i] = ((const float4 *)from)[i];
    }
    for (int i = vec * vectors + lane; i < count; i += 32) {
        to[i] = from[i];
    }
}

/* A row's values in LANES lanes become its softmax; values beyond the row are -infinity. */
template <int LANES, int ITEMS> static __device__ __forceinline__ void softmax_row(float (&v)[ITEMS])
{
    float max = v[0];
#pragma unroll
    for (int i = 1; i < ITEMS; i++) {
        max = fmaxf(max, v[i]);
    }
    max = ps_group_max<LANES>(max);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        v[i] = __expf(v[i] - max);
        sum += v[i];
    }
    const float scale = 1.0f / ps_group_sum<LANES>(sum);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        v[i] *= scale;
    }
}

/* A row's gradient v from its y; both 0 beyond the row. */
template <int LANES, int ITEMS>
static __device__ __forceinline__ void softmax_backward_row(float (&v)[ITEMS], const float (&y)[ITEMS])
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        sum += v[i] * y[i];
    }
    sum = ps_group_sum<LANES>(sum);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        v[i] = y[i] * (v[i] - sum);
    }
}

/* Rows of n <= LANES * ITEMS; a warp takes TILE rows. Forward: in is x, y is unused; backward: in is dy. */
template <typename T, int LANES, int ITEMS, int TILE, bool BACKWARD, bool ALIGNED, bool ADD>
static __global__ void __launch_bounds__(warps * 32)
    softmax_tiles(T *out, const T *in, const T *y, int64_t rows, int n, const T *addend)
{
    ps_grid_begin();
    static_assert(TILE % ps_vector<T> == 0 && TILE % (32 / LANES) == 0, "whole vectors, whole passes");
    extern __shared__ float4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / LANES, sub = lane % LANES;
    const int64_t first = ((int64_t)blockIdx.x * warps + warp) * TILE;
    if (first >= rows) {
        return; /* whole warps; there is no barrier of the block */
    }
    const int live = rows - first < TILE ? (int)(rows - first) : TILE;
    T *values = (T *)shared + warp * (BACKWARD ? 2 : 1) * TILE * n, *weights = values + TILE * n;
    fetch<ALIGNED>(values, in + first * n, live * n);
    if constexpr (BACKWARD) {
        fetch<ALIGNED>(weights, y + first * n, live * n);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncwarp();
#pragma unroll
    for (int pass = 0; pass < TILE; pass += 32 / LANES) {
        const int row = pass + group;
        float v[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int column = i * LANES + sub;
            v[i] = BACKWARD ? 0.0f : -INFINITY;
            if (row < live && column < n) {
                v[i] = ps_float(values[row * n + column]);
            }
        }
        if constexpr (BACKWARD) {
            float w[ITEMS];
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const int column = i * LANES + sub;
                w[i] = row < live && column < n ? ps_float(weights[row * n + column]) : 0.0f;
            }
            softmax_backward_row<LANES>(v, w);
            if constexpr (ADD) {
#pragma unroll
                for (int i = 0; i < ITEMS; i++) {
                    const int column = i * LANES + sub;
                    v[i] += row < live && column < n ? ps_float(addend[(first + row) * n + column]) : 0.0f;
                }
            }
        } else {
            softmax_row<LANES>(v);
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int column = i * LANES + sub;
            if (row < live && column < n) {
                ps_put(values + row * n + column, v[i]);
            }
        }
    }
    __syncwarp();
    put<ALIGNED>(out + first * n, values, live * n);
}

/* A warp a row of n <= 32 * ITEMS. */
template <typename T, int ITEMS, bool BACKWARD, bool ADD>
static __global__ void __launch_bounds__(warps * 32)
    softmax_rows(T *out, const T *in, const T *y, int64_t rows, int n, const T *addend)
{
    ps_grid_begin();
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * warps + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    float v[ITEMS], w[BACKWARD ? ITEMS : 1];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int column = i * 32 + lane;
        v[i] = column < n ? ps_float(in[row * n + column]) : BACKWARD ? 0.0f : -INFINITY;
        if constexpr (BACKWARD) {
            w[i] = column < n ? ps_float(y[row * n + column]) : 0.0f;
        }
    }
    if constexpr (BACKWARD) {
        softmax_backward_row<32>(v, w);
    } else {
        softmax_row<32>(v);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int column = i * 32 + lane;
        if (column < n) {
            if constexpr (ADD) {
                v[i] += ps_float(addend[row * n + column]);
            }
            ps_put(out + row * n + column, v[i]);
        }
    }
}

/* A block a row of any length; a thread reads and writes its own elements only. */
template <typename T, bool BACKWARD, bool ADD>
static __global__ void __launch_bounds__(256) softmax_long_rows(T *out, const T *in, const T *y, int n, const T *addend)
{
    ps_grid_begin();
    __shared__ float shared[8];
    const int64_t begin = (int64_t)blockIdx.x * n;
    if constexpr (BACKWARD) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < n; i += 256) {
            sum += ps_float(in[begin + i]) * ps_float(y[begin + i]);
        }
        sum = ps_block_sum<256>(sum, shared);
        for (int i = threadIdx.x; i < n; i += 256) {
            if constexpr (ADD) {
                ps_put(out + begin + i, ps_float(y[begin + i]) * (ps_float(in[begin + i]) - sum) + ps_float(addend[begin + i]));
            } else {
                ps_put(out + begin + i, ps_float(y[begin + i]) * (ps_float(in[begin + i]) - sum));
            }
        }
    } else {
        float max = -INFINITY, sum = 0.0f;
        for (int i = threadIdx.x; i < n; i += 256) {
            max = fmaxf(max, ps_float(in[begin + i]));
        }
        max = ps_block_max<256>(max, shared);
        for (int i = threadIdx.x; i < n; i += 256) {
            sum += __expf(ps_float(in[begin + i]) - max);
        }
        const float scale = 1.0f / ps_block_sum<256>(sum, shared);
        for (int i = threadIdx.x; i < n; i += 256) {
            ps_put(out + begin + i, __expf(ps_float(in[begin + i]) - max) * scale);
        }
    }
}

template <int LANES, int ITEMS, int TILE, bool BACKWARD, bool ADD, typename T>
static void launch_tiles(const struct ps_cuda_context *c, T *out, const T *in, const T *y, int64_t rows, int n, const T *addend,
                         bool aligned)
{
    const unsigned blocks = ps_cuda_blocks(rows, warps * TILE);
    const size_t bytes = (size_t)warps * (BACKWARD ? 2 : 1) * TILE * (size_t)n * sizeof(T); /* at most 48 KiB */
    static_assert(warps * 2 * TILE * LANES * ITEMS * sizeof(float) <= 48 * 1024, "fits without asking for more");
    if (aligned) {
        ps_cuda_launch(c, softmax_tiles<T, LANES, ITEMS, TILE, BACKWARD, true, ADD>, blocks, warps * 32, bytes, out, in, y, rows, n,
                       addend);
    } else {
        ps_cuda_launch(c, softmax_tiles<T, LANES, ITEMS, TILE, BACKWARD, false, ADD>, blocks, warps * 32, bytes, out, in, y, rows,
                       n, addend);
    }
}

/* addend: NULL without ADD. */
template <typename T, bool BACKWARD, bool ADD>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const struct ps_tensor *out,
                             const struct ps_tensor *in, const struct ps_tensor *weights, const struct ps_tensor *addend)
{
    const int64_t n = ps_cuda_width(in), count = ps_tensor_count(in);
    PS_TRY(ps_cuda_expect(op, BACKWARD ? "dy" : "x", in, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect(op, BACKWARD ? "dx" : "y", out, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect(op, "y", weights, ps_type_of<T>, count));
    PS_TRY(ADD ? ps_cuda_expect(op, "addend", addend, ps_type_of<T>, count) : PS_OK);
    if (count == 0) {
        return PS_OK;
    }
    if (n > INT32_MAX / 2) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): rows of %lld elements are too long", op, (long long)n);
    }
    const int64_t rows = count / n;
    const bool aligned = ps_cuda_aligned(in) && ps_cuda_aligned(out) && ps_cuda_aligned(weights);
    T *to = (T *)out->data;
    const T *from = (const T *)in->data, *y = (const T *)weights->data, *added = ADD ? (const T *)addend->data : NULL;
    const int width = (int)n;
    if (n <= 8) {
        launch_tiles<1, 8, 32, BACKWARD, ADD>(c, to, from, y, rows, width, added, aligned);
    } else if (n <= 16) {
        launch_tiles<4, 4, 16, BACKWARD, ADD>(c, to, from, y, rows, width, added, aligned);
    } else if (n <= 32) {
        launch_tiles<8, 4, 16, BACKWARD, ADD>(c, to, from, y, rows, width, added, aligned);
    } else if (n <= 48) {
        launch_tiles<8, 6, 16, BACKWARD, ADD>(c, to, from, y, rows, width, added, aligned);
    } else if (n <= 64) {
        launch_tiles<8, 8, 16, BACKWARD, ADD>(c, to, from, y, rows, width, added, aligned);
    } else if (n <= 128) {
        launch_tiles<16, 8, 8, BACKWARD, ADD>(c, to, from, y, rows, width, added, aligned);
    } else if (n <= 256) {
        ps_cuda_launch(c, softmax_rows<T, 8, BACKWARD, ADD>, ps_cuda_blocks(rows, warps), warps * 32, 0, to, from, y, rows, width,
                       added);
    } else if (n <= 1024) {
        ps_cuda_launch(c, softmax_rows<T, 32, BACKWARD, ADD>, ps_cuda_blocks(rows, warps), warps * 32, 0, to, from, y, rows, width,
                       added);
    } else {
        ps_cuda_launch(c, softmax_long_rows<T, BACKWARD, ADD>, (unsigned)rows, 256, 0, to, from, y, width, added);
    }
    PS_CUDA_LAUNCHED(op);
}

template <bool BACKWARD, bool ADD>
static enum ps_status launch_real(const struct ps_kernels *k, const char *op, const struct ps_tensor *out,
                                  const struct ps_tensor *in, const struct ps_tensor *weights, const struct ps_tensor *addend)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    return k->real == PS_BF16  ? launch<ps_bf16, BACKWARD, ADD>(c, op, out, in, weights, addend)
           : k->real == PS_F16 ? launch<ps_fp16, BACKWARD, ADD>(c, op, out, in, weights, addend)
                               : launch<float, BACKWARD, ADD>(c, op, out, in, weights, addend);
}

extern "C" enum ps_status ps_cuda_softmax(const struct ps_kernels *k, const struct ps_softmax *a)
{
    return launch_real<false, false>(k, "softmax", &a->y, &a->x, &a->x, NULL);
}

extern "C" enum ps_status ps_cuda_softmax_backward(const struct ps_kernels *k, const struct ps_softmax_backward *a)
{
    const char *op = "softmax_backward";
    return a->addend.data ? launch_real<true, true>(k, op, &a->dx, &a->dy, &a->y, &a->addend)
                          : launch_real<true, false>(k, op, &a->dx, &a->dy, &a->y, NULL);
}
