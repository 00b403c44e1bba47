/* head_split and head_merge: between rows [S*N, parts*h*e] and heads [parts, S, h, N, e].
 *
 * Why: the attention products want each head's matrices whole. For one part of one sequence both sides are contiguous runs (h*e
 * elements of each of N rows; h*N*e elements), so a block takes that: it walks the side that it writes, and finds the other side's
 * sectors in its multiprocessor's cache when an element of e floats is shorter than one.
 *
 * Both =. Bytes: 8 parts R h e, half of that in 16 bits. Flops: none. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/vector.cuh"

/* T: an element, or a vector of them with e counted in vectors. Grid: parts * S. width = parts*h*e. */
template <typename T, bool MERGE>
static __global__ void __launch_bounds__(256)
    move_heads(T *__restrict__ to, const T *__restrict__ from, int64_t sequences, int64_t width, int h, int patches, int e,
               struct ps_divisor by_e, struct ps_divisor by_rows)
{
    ps_grid_begin();
    const int64_t part = blockIdx.x / sequences, s = blockIdx.x % sequences;
    const int64_t heads = (int64_t)blockIdx.x * h * patches * e; /* heads[part, s] */
    const int64_t rows = s * patches * width + part * h * e;     /* rows[s*N, part*h*e] */
    const int total = h * patches * e;
#pragma unroll 4
    for (int index = threadIdx.x; index < total; index += blockDim.x) {
        const int outer = (int)ps_divide(index, by_e), i = index - outer * e;
        if constexpr (MERGE) { /* outer = n*h + j */
            const int n = (int)ps_divide(outer, by_rows), j = outer - n * h;
            to[rows + n * width + j * e + i] = from[heads + ((int64_t)j * patches + n) * e + i];
        } else { /* outer = j*N + n */
            const int j = (int)ps_divide(outer, by_rows), n = outer - j * patches;
            to[heads + index] = from[rows + n * width + j * e + i];
        }
    }
}

template <typename T, bool MERGE>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, void *to, const void *from, int64_t parts,
                             int64_t sequences, int64_t h, int64_t patches, int64_t units)
{
    const int64_t total = h * patches * units;
    const unsigned threads = total >= 256 ? 256u : (unsigned)((total + 31) / 32 * 32);
    ps_cuda_launch(c, move_heads<T, MERGE>, (unsigned)(parts * sequences), threads, 0, (T *)to, (const T *)from, sequences,
                   parts * h * units, (int)h, (int)patches, (int)units, ps_divisor_make(units),
                   ps_divisor_make(MERGE ? h : patches));
    PS_CUDA_LAUNCHED(op);
}

template <bool MERGE>
static enum ps_status move(const struct ps_kernels *k, const char *op, const struct ps_tensor *heads, const struct ps_tensor *rows)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    if (heads->rank != 5) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): heads has rank %d, 5 is needed", op, heads->rank);
    }
    const int64_t parts = heads->size[0], sequences = heads->size[1], h = heads->size[2], patches = heads->size[3],
                  e = heads->size[4], count = ps_tensor_count(heads);
    PS_TRY(ps_cuda_expect(op, "heads", heads, k->real, count));
    PS_TRY(ps_cuda_expect(op, "rows", rows, k->real, count));
    if (count == 0) {
        return PS_OK;
    }
    if (h * patches * e > INT32_MAX / 2 || parts * sequences > INT32_MAX) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld x %lld sequences of %lld x %lld x %lld elements are too many", op,
                       (long long)parts, (long long)sequences, (long long)h, (long long)patches, (long long)e);
    }
    void *to = MERGE ? rows->data : heads->data;
    const void *from = MERGE ? heads->data : rows->data;
    const bool aligned = ps_cuda_aligned(heads) && ps_cuda_aligned(rows);
    const int64_t bytes = (int64_t)ps_type_bytes(k->real), row = e * bytes; /* of a head */
    if (aligned && row % 16 == 0) {
        return launch<float4, MERGE>(c, op, to, from, parts, sequences, h, patches, row / 16);
    }
    if (bytes == 4) {
        return launch<float, MERGE>(c, op, to, from, parts, sequences, h, patches, e);
    }
    if (aligned && row % 8 == 0) {
        return launch<float2, MERGE>(c, op, to, from, parts, sequences, h, patches, row / 8);
    }
    return launch<uint16_t, MERGE>(c, op, to, from, parts, sequences, h, patches, e);
}

extern "C" enum ps_status ps_cuda_head_split(const struct ps_kernels *k, const struct ps_head_split *a)
{
    return move<false>(k, "head_split", &a->heads, &a->rows);
}

extern "C" enum ps_status ps_cuda_head_merge(const struct ps_kernels *k, const struct ps_head_merge *a)
{
    return move<true>(k, "head_merge", &a->heads, &a->rows);
}
