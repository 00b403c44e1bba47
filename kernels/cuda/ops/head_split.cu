/* Where heads lie: head_split and head_merge, pad_heads and unpad_heads.
 *
 * head_split and head_merge: between rows [S*N, parts*h*e] and heads [parts, S, h, N, e].
 *
 * Why: the attention products want each head's matrices whole. For one part of one sequence both sides are contiguous runs (h*e
 * elements of each of N rows; h*N*e elements), so a block takes that: it walks the side that it writes, and finds the other side's
 * sectors in its multiprocessor's cache when an element of e floats is shorter than one.
 *
 * Both =. Bytes: 8 parts R h e, half of that in 16 bits. Flops: none.
 *
 * pad_heads and unpad_heads: between the weights around attention, all layers', and those of wider heads.
 *
 * Why: attention in 16 bits is two to three times as fast where rows of heads begin at multiples of 16 bytes. One launch takes all
 * tensors of all layers, a thread some elements of the wide side; most lie in L2.
 *
 * pad_heads =; bytes of 16 bits 2 (e + e') (4 d h), flops none. unpad_heads +=, and its source = 0; bytes 8 (e + e') (4 d h), flops
 * 4 d h e, each for a layer. The launch bounds both. */
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

/* ---- weights of wider heads ---- */

enum { THREADS = 256, EACH = 4 }; /* EACH: elements of a thread */

/* A tensor of either side: units of n elements in `wide` ones, each layer's `units` of them `apart` elements from the next one's on
 * the side of n. */
struct padding {
    void *many, *few;
    int64_t apart;
    struct ps_divisor by_wide, by_units;
    uint32_t n, count /* on the wide side */, blocks;
};

struct paddings {
    struct padding w_qkv, w_o, b_qkv;
};

/* does(many[.], few[.]) for elements of the block, few NULL for the zeros behind. */
template <typename T, typename F> static __device__ __forceinline__ void pad(const struct padding &p, uint32_t tile, F does)
{
#pragma unroll
    for (int t = 0; t < EACH; t++) {
        const uint32_t index = (tile * EACH + t) * THREADS + threadIdx.x;
        if (index < p.count) {
            const uint32_t row = ps_divide(index, p.by_wide), layer = ps_divide(row, p.by_units);
            const uint32_t i = index - row * p.by_wide.divisor, u = row - layer * p.by_units.divisor;
            does((T *)p.many + index, i < p.n ? (T *)p.few + layer * p.apart + (int64_t)u * p.n + i : NULL);
        }
    }
}

/* The tensor that a block has a part of, and which. */
template <typename T, typename F> static __device__ __forceinline__ void pad_all(const struct paddings &p, F does)
{
    const uint32_t first = p.w_qkv.blocks, second = first + p.w_o.blocks;
    ps_grid_begin();
    if (blockIdx.x < first) {
        pad<T>(p.w_qkv, blockIdx.x, does);
    } else if (blockIdx.x < second) {
        pad<T>(p.w_o, blockIdx.x - first, does);
    } else {
        pad<float>(p.b_qkv, blockIdx.x - second, does);
    }
}

template <typename T> static __global__ void __launch_bounds__(THREADS) pad_weights(const struct paddings p)
{
    pad_all<T>(p, [](auto *many, const auto *few) { ps_put(many, few ? ps_float(*few) : 0.0f); });
}

static __global__ void __launch_bounds__(THREADS) unpad_gradients(const struct paddings p)
{
    pad_all<float>(p, [](float *many, float *few) {
        if (few) {
            *few += *many;
        }
        *many = 0;
    });
}

/* w_qkv, w_o and b_qkv of either side. */
static enum ps_status paddings_of(const char *op, const struct ps_tensor *const few[3], const struct ps_tensor *const many[3],
                                  enum ps_type weight, struct paddings *p)
{
    struct padding *const each[] = {&p->w_qkv, &p->w_o, &p->b_qkv};
    const int64_t layers = many[2]->size[0], h = many[1]->size[1], e = few[2]->size[2], wide = many[2]->size[2];
    const int64_t d = e > 0 ? few[1]->size[2] / e : 0, units[] = {3 * d * h, h, 3 * h}, times[] = {1, d, 1};
    for (int i = 0; i < 3; i++) {
        const struct ps_tensor *t = few[i], *w = many[i];
        const int64_t n = e * times[i], count = layers * units[i] * wide * times[i];
        const enum ps_type type = i < 2 ? weight : PS_F32;
        PS_TRY(ps_cuda_expect(op, "a wide weight", w, type, count));
        if (t->rank != 3 || w->rank != 3 || t->type != type || !t->data || t->size[0] != layers || w->size[0] != layers ||
            t->size[1] != units[i] || w->size[1] != units[i] || t->size[2] != n || w->size[2] != wide * times[i] ||
            t->stride[1] != n || t->stride[2] != 1 || wide < e || count < 1 || count > INT32_MAX) {
            return ps_fail(PS_UNSUPPORTED,
                           "%s (cuda): weights [%lld, %lld, %lld] and [%lld, %lld, %lld] are not those of heads of %lld columns in "
                           "%lld",
                           op, (long long)t->size[0], (long long)t->size[1], (long long)t->size[2], (long long)w->size[0],
                           (long long)w->size[1], (long long)w->size[2], (long long)e, (long long)wide);
        }
        *each[i] = {w->data,
                    t->data,
                    t->stride[0],
                    ps_divisor_make(wide * times[i]),
                    ps_divisor_make(units[i]),
                    (uint32_t)n,
                    (uint32_t)count,
                    ps_cuda_blocks(count, THREADS * EACH)};
    }
    return PS_OK;
}

static unsigned blocks_of(const struct paddings *p)
{
    return p->w_qkv.blocks + p->w_o.blocks + p->b_qkv.blocks;
}

template <typename T> static enum ps_status pad_heads(const struct ps_kernels *k, const struct ps_pad_heads *a)
{
    const char *op = "pad_heads";
    const struct ps_tensor *const few[] = {&a->w_qkv, &a->w_o, &a->b_qkv}, *const many[] = {&a->w_qkv_out, &a->w_o_out,
                                                                                            &a->b_qkv_out};
    struct paddings p;
    PS_TRY(paddings_of(op, few, many, ps_type_of<T>, &p));
    ps_cuda_launch(ps_cuda(k), pad_weights<T>, blocks_of(&p), THREADS, 0, p);
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_pad_heads(const struct ps_kernels *k, const struct ps_pad_heads *a)
{
    return PS_BY_REAL(k, pad_heads, k, a);
}

extern "C" enum ps_status ps_cuda_unpad_heads(const struct ps_kernels *k, const struct ps_unpad_heads *a)
{
    const char *op = "unpad_heads";
    const struct ps_tensor *const few[] = {&a->dw_qkv, &a->dw_o, &a->db_qkv}, *const many[] = {&a->g_qkv, &a->g_o, &a->g_b};
    struct paddings p;
    PS_TRY(paddings_of(op, few, many, PS_F32, &p));
    ps_cuda_launch(ps_cuda(k), unpad_gradients, blocks_of(&p), THREADS, 0, p);
    PS_CUDA_LAUNCHED(op);
}
