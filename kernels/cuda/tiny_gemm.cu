/* Batches of small products, m, n, k <= 64, any strides, in one launch. Attention at level gemm is made of them: q k', A v and
 * their gradients, with matrices of N x N and N x e, where general libraries launch tiles far larger than the matrices.
 *
 * Each matrix has its own few threads of a block. They copy a and b to shared memory (16 bytes a time where the layout allows it),
 * each sums a TM x TN tile of c in registers (FFMA, for tf32 too: the kernel is bound by memory), and c leaves through shared
 * memory so that its stores are whole lines. In bf16 the copies to and from shared memory convert: there and in registers all is
 * float.
 *
 * Bytes: 4 batch (m k + k n + m n), half of that in bf16, and m n more when beta is not 0. FLOPs 2 m n k batch.
 * 42 x 42 x 8, batch 43,008: 419 MB, 1.2 GFLOP. */
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/primitives.cuh"

#include <stdlib.h>

#define LIMIT 64
#define THREADS 128                   /* the most in a block */
#define SHARED_FLOATS (48 * 1024 / 4) /* what every device gives without asking */
#define SLACK 8                       /* a thread's last tile may read (never write) this far past its matrix */

/* A matrix in global memory and its copy, of floats, in shared memory: `outer` lines of `inner` pieces of 1, 4 or (bf16) 8
 * elements.
 */
struct lines {
    char *data;
    int64_t batch[2];
    int inner, count;              /* pieces of a line; of the matrix */
    int line_stride, piece_stride; /* global, in elements */
    int ld;                        /* of a line in shared memory */
    int wide;                      /* elements of a piece, 0 for single ones */
    int line_step, piece_step;     /* the pieces a thread takes lie `threads` apart: so many lines and pieces */
    int row, column;               /* strides of the matrix in shared memory */
    int floats;                    /* of shared memory */
};

struct tiny {
    struct lines c, a, b;
    int m, n, k;
    int batch, inner_batch; /* matrices in all; in the second batch dimension */
    int threads, per_block; /* of one matrix; matrices of one block */
    int tiles_n, tiles_m;   /* threads across and down */
    float alpha, beta;
};

__device__ static inline void copy_async(float *shared, const float *global, bool wide)
{
    unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    if (wide) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
    }
}

/* Calls body(offset in shared memory, offset in global memory) for each of this thread's pieces of W elements. */
template <int W, typename F> __device__ static inline void each_piece(const struct lines &x, int thread, int threads, F body)
{
    int line = thread / x.inner, piece = thread - line * x.inner;
    for (int i = thread; i < x.count; i += threads) {
        body(line * x.ld + piece * W, line * x.line_stride + piece * x.piece_stride);
        line += x.line_step;
        piece += x.piece_step;
        if (piece >= x.inner) {
            piece -= x.inner;
            line++;
        }
    }
}

__device__ static inline void load_pieces(const struct lines &x, float *shared, const float *global, int thread, int threads)
{
    if (x.wide) {
        each_piece<4>(x, thread, threads, [&](int to, int from) { copy_async(shared + to, global + from, true); });
    } else {
        each_piece<1>(x, thread, threads, [&](int to, int from) { copy_async(shared + to, global + from, false); });
    }
}

/* Through registers, which convert; several loads are on their way at once. */
template <int W>
__device__ static inline void convert_pieces(const struct lines &x, float *shared, const ps_bf16 *global, int thread, int threads)
{
    constexpr int FLIGHT = 4;
    int line = thread / x.inner, piece = thread - line * x.inner;
    for (int i = thread; i < x.count; i += FLIGHT * threads) {
        float values[FLIGHT][W];
        int to[FLIGHT];
#pragma unroll
        for (int q = 0; q < FLIGHT; q++) {
            to[q] = line * x.ld + piece * W;
            if (i + q * threads < x.count) {
                ps_load<W>(values[q], global + line * x.line_stride + piece * x.piece_stride);
            }
            line += x.line_step;
            piece += x.piece_step;
            if (piece >= x.inner) {
                piece -= x.inner;
                line++;
            }
        }
#pragma unroll
        for (int q = 0; q < FLIGHT; q++) {
            if (i + q * threads < x.count) {
                ps_store<W>(shared + to[q], values[q]);
            }
        }
    }
}

__device__ static inline void load_pieces(const struct lines &x, float *shared, const ps_bf16 *global, int thread, int threads)
{
    if (x.wide == 8) {
        convert_pieces<8>(x, shared, global, thread, threads);
    } else if (x.wide == 4) {
        convert_pieces<4>(x, shared, global, thread, threads);
    } else {
        convert_pieces<1>(x, shared, global, thread, threads);
    }
}

template <typename T>
__device__ static inline void load(const struct lines &x, float *shared, int64_t batch_offset, int thread, int threads)
{
    load_pieces(x, shared, (const T *)x.data + batch_offset, thread, threads);
}

__device__ static inline float blend(float sum, float old, float alpha, float beta)
{
    return fmaf(beta, old, alpha * sum);
}

__device__ static inline void store_pieces(const struct lines &x, const float *shared, float *global, int thread, int threads,
                                           float alpha, float beta)
{
    if (x.wide) {
        each_piece<4>(x, thread, threads, [&](int from, int to) {
            float4 v = *(const float4 *)(shared + from), *out = (float4 *)(global + to);
            if (beta != 0) {
                float4 old = *out;
                v = make_float4(blend(v.x, old.x, alpha, beta), blend(v.y, old.y, alpha, beta), blend(v.z, old.z, alpha, beta),
                                blend(v.w, old.w, alpha, beta));
            } else {
                v = make_float4(alpha * v.x, alpha * v.y, alpha * v.z, alpha * v.w);
            }
            *out = v;
        });
    } else {
        each_piece<1>(x, thread, threads, [&](int from, int to) {
            float v = shared[from], *out = global + to;
            *out = beta != 0 ? blend(v, *out, alpha, beta) : alpha * v;
        });
    }
}

template <int W>
__device__ static inline void round_pieces(const struct lines &x, const float *shared, ps_bf16 *global, int thread, int threads,
                                           float alpha, float beta)
{
    each_piece<W>(x, thread, threads, [&](int from, int to) {
        float v[W];
        ps_load<W>(v, shared + from);
        if (beta != 0) {
            float old[W];
            ps_load<W>(old, global + to);
#pragma unroll
            for (int i = 0; i < W; i++) {
                v[i] = blend(v[i], old[i], alpha, beta);
            }
        } else {
#pragma unroll
            for (int i = 0; i < W; i++) {
                v[i] *= alpha;
            }
        }
        ps_store<W>(global + to, v);
    });
}

__device__ static inline void store_pieces(const struct lines &x, const float *shared, ps_bf16 *global, int thread, int threads,
                                           float alpha, float beta)
{
    if (x.wide == 8) {
        round_pieces<8>(x, shared, global, thread, threads, alpha, beta);
    } else if (x.wide == 4) {
        round_pieces<4>(x, shared, global, thread, threads, alpha, beta);
    } else {
        round_pieces<1>(x, shared, global, thread, threads, alpha, beta);
    }
}

template <typename T>
__device__ static inline void store(const struct lines &x, const float *shared, int64_t batch_offset, int thread, int threads,
                                    float alpha, float beta)
{
    store_pieces(x, shared, (T *)x.data + batch_offset, thread, threads, alpha, beta);
}

/* W consecutive floats; aligned when VECTOR. */
template <int W, bool VECTOR> __device__ static inline void read(float *to, const float *from)
{
    if constexpr (VECTOR && W == 4) {
        float4 v = *(const float4 *)from;
        to[0] = v.x;
        to[1] = v.y;
        to[2] = v.z;
        to[3] = v.w;
    } else if constexpr (VECTOR && W == 2) {
        float2 v = *(const float2 *)from;
        to[0] = v.x;
        to[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) {
            to[i] = from[i];
        }
    }
}

/* The T x KS part of an operand that a thread needs at k = p. ALONG_K: its copy has unit stride along k, and the thread's rows lie
 * `tiles` apart, so that a warp's reads fall into different banks; else unit stride across, and the rows lie in groups of W. */
template <int T, int W, bool ALONG_K, bool VECTOR, int KS>
__device__ static inline void fragment(float (&to)[T][KS], const float *shared, const int (&offset)[T], int p, int ld)
{
    if constexpr (ALONG_K) {
#pragma unroll
        for (int i = 0; i < T; i++) {
            read<KS, VECTOR>(to[i], shared + offset[i] + p);
        }
    } else {
#pragma unroll
        for (int q = 0; q < KS; q++) {
#pragma unroll
            for (int i = 0; i < T; i += W) {
                float group[W];
                read<W, VECTOR>(group, shared + (p + q) * ld + offset[i]);
#pragma unroll
                for (int j = 0; j < W; j++) {
                    to[i + j][q] = group[j];
                }
            }
        }
    }
}

template <typename T, int TM, int TN, bool A_ALONG_K, bool B_ALONG_K, bool VECTOR>
__global__ void __launch_bounds__(THREADS) tiny_kernel(const __grid_constant__ struct tiny x)
{
    ps_grid_begin();
    constexpr int WM = A_ALONG_K ? 1 : TM < 4 ? TM : 4, WN = B_ALONG_K ? 1 : TN < 4 ? TN : 4;
    constexpr int KS = VECTOR && (A_ALONG_K || B_ALONG_K) ? 4 : 1;
    extern __shared__ float4 shared_memory[];
    int group = threadIdx.x / x.threads, thread = threadIdx.x - group * x.threads;
    int matrix = (int)blockIdx.x * x.per_block + group;
    bool active = group < x.per_block && matrix < x.batch;
    int outer = active ? matrix / x.inner_batch : 0, inner = active ? matrix - outer * x.inner_batch : 0;
    int inputs = x.a.floats + x.b.floats, each = inputs > x.c.floats ? inputs : x.c.floats;
    float *a = (float *)shared_memory + (active ? group : 0) * each, *b = a + x.a.floats, *c = a;
    if (active) {
        load<T>(x.a, a, outer * x.a.batch[0] + inner * x.a.batch[1], thread, x.threads);
        load<T>(x.b, b, outer * x.b.batch[0] + inner * x.b.batch[1], thread, x.threads);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    int tile_m = thread / x.tiles_n, tile_n = thread - tile_m * x.tiles_n;
    bool computes = active && tile_m < x.tiles_m;
    int row[TM], column[TN];
    float sum[TM][TN] = {};
#pragma unroll
    for (int i = 0; i < TM; i++) {
        row[i] = (tile_m + i / WM * x.tiles_m) * WM + i % WM;
    }
#pragma unroll
    for (int j = 0; j < TN; j++) {
        column[j] = (tile_n + j / WN * x.tiles_n) * WN + j % WN;
    }
    if (computes) {
        int a_offset[TM], b_offset[TN];
#pragma unroll
        for (int i = 0; i < TM; i++) {
            a_offset[i] = A_ALONG_K ? min(row[i], x.m - 1) * x.a.row : row[i];
        }
#pragma unroll
        for (int j = 0; j < TN; j++) {
            b_offset[j] = B_ALONG_K ? min(column[j], x.n - 1) * x.b.column : column[j];
        }
#pragma unroll(VECTOR ? 1 : 4)
        for (int p = 0; p < x.k; p += KS) {
            float fa[TM][KS], fb[TN][KS];
            fragment<TM, WM, A_ALONG_K, VECTOR, KS>(fa, a, a_offset, p, x.a.column);
            fragment<TN, WN, B_ALONG_K, VECTOR, KS>(fb, b, b_offset, p, x.b.row);
#pragma unroll
            for (int q = 0; q < KS; q++) {
#pragma unroll
                for (int i = 0; i < TM; i++) {
#pragma unroll
                    for (int j = 0; j < TN; j++) {
                        sum[i][j] = fmaf(fa[i][q], fb[j][q], sum[i][j]);
                    }
                }
            }
        }
    }
    __syncthreads(); /* c takes the place of a and b */
    if (computes) {
#pragma unroll
        for (int i = 0; i < TM; i++) {
            if (row[i] >= x.m) {
                continue;
            }
            float *line = c + row[i] * x.c.row;
            if (WN == 4 && x.c.column == 1 && x.c.row % 4 == 0) {
#pragma unroll
                for (int j = 0; j + 3 < TN; j += 4) { /* a line's length is padded to 4, so the last piece stays within it */
                    if (column[j] < x.n) {
                        *(float4 *)(line + column[j]) = make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
                    }
                }
            } else {
#pragma unroll
                for (int j = 0; j < TN; j++) {
                    if (column[j] < x.n) {
                        line[column[j] * x.c.column] = sum[i][j];
                    }
                }
            }
        }
    }
    __syncthreads();
    if (active) {
        store<T>(x.c, c, outer * x.c.batch[0] + inner * x.c.batch[1], thread, x.threads, x.alpha, x.beta);
    }
}

typedef void tiny_kernel_type(struct tiny);

template <typename T, int TM, int TN> static tiny_kernel_type *kernel_of(bool a_along_k, bool b_along_k, bool vector)
{
    static tiny_kernel_type *const kernels[2][2][2] = {
        {{tiny_kernel<T, TM, TN, false, false, false>, tiny_kernel<T, TM, TN, false, false, true>},
         {tiny_kernel<T, TM, TN, false, true, false>, tiny_kernel<T, TM, TN, false, true, true>}},
        {{tiny_kernel<T, TM, TN, true, false, false>, tiny_kernel<T, TM, TN, true, false, true>},
         {tiny_kernel<T, TM, TN, true, true, false>, tiny_kernel<T, TM, TN, true, true, true>}}};
    return kernels[a_along_k][b_along_k][vector];
}

template <typename T> static tiny_kernel_type *kernel_of_tile(int tile, bool a_along_k, bool b_along_k, bool vector)
{
    return tile == 2   ? kernel_of<T, 2, 2>(a_along_k, b_along_k, vector)
           : tile == 4 ? kernel_of<T, 4, 4>(a_along_k, b_along_k, vector)
                       : kernel_of<T, 8, 8>(a_along_k, b_along_k, vector);
}

/* How a matrix is copied: lines along the dimension of the smaller stride; wide where every piece of so many elements is aligned.
 */
static struct lines lines_of(const struct ps_operand *o, enum ps_type type, const int64_t *batch, int rows, int columns)
{
    struct lines x = {};
    x.data = o->data;
    x.batch[0] = batch[0] > 1 ? o->batch[0] : 0;
    x.batch[1] = batch[1] > 1 ? o->batch[1] : 0;
    bool by_rows = columns == 1 ? false : rows == 1 ? true : llabs(o->column) <= llabs(o->row);
    int outer = by_rows ? rows : columns, inner = by_rows ? columns : rows;
    x.line_stride = outer == 1 ? 0 : (int)(by_rows ? o->row : o->column);
    x.piece_stride = inner == 1 ? 0 : (int)(by_rows ? o->column : o->row);
    x.inner = inner;
    x.ld = inner | 1;
    for (int width = 16 / (int)ps_type_bytes(type); width >= 4 && !x.wide; width /= 2) {
        bool aligned = (uintptr_t)x.data % (width * ps_type_bytes(type)) == 0 && x.batch[0] % width == 0 &&
                       x.batch[1] % width == 0 && (inner == 1 || x.piece_stride == 1);
        if (aligned && inner % width == 0 && x.line_stride % width == 0) {
            x.wide = width;
            x.ld = inner + 4; /* aligned, and 8 lines start in different banks */
        } else if (aligned && outer * inner % width == 0 && (outer == 1 || x.line_stride == inner)) {
            x.wide = width;
            x.ld = inner;
        }
    }
    x.row = by_rows ? x.ld : 1;
    x.column = by_rows ? 1 : x.ld;
    x.floats = (outer * x.ld + SLACK + 3) / 4 * 4;
    if (x.wide && x.ld == inner) { /* dense: one line */
        x.inner = outer * inner / x.wide;
        x.count = x.inner;
    } else {
        x.inner = x.wide ? inner / x.wide : inner;
        x.count = outer * x.inner;
    }
    if (x.wide) {
        x.piece_stride = x.wide;
    }
    return x;
}

static void steps_set(struct lines *x, int threads)
{
    x->line_step = threads / x->inner;
    x->piece_step = threads % x->inner;
}

static int ceil_div(int64_t a, int64_t b)
{
    return (int)((a + b - 1) / b);
}

static bool far(const struct ps_operand *o, int64_t rows, int64_t columns)
{
    return (rows - 1) * llabs(o->row) + (columns - 1) * llabs(o->column) > INT32_MAX;
}

enum ps_status ps_cuda_tiny_product(const struct ps_cuda_context *context, const struct ps_product *p)
{
    if (p->type != p->c_type || p->m > LIMIT || p->n > LIMIT || p->k > LIMIT) {
        return ps_fail(PS_UNSUPPORTED,
                       "gemm: m %lld, n %lld, k %lld of types %d and %d; small products have one type, at most %d each",
                       (long long)p->m, (long long)p->n, (long long)p->k, (int)p->type, (int)p->c_type, LIMIT);
    }
    if (far(&p->c, p->m, p->n) || far(&p->a, p->m, p->k) || far(&p->b, p->k, p->n) || p->batch[0] * p->batch[1] > INT32_MAX) {
        return ps_fail(PS_UNSUPPORTED, "gemm: a matrix of m %lld, n %lld, k %lld spans, or a batch of %lld has, more than 2^31",
                       (long long)p->m, (long long)p->n, (long long)p->k, (long long)(p->batch[0] * p->batch[1]));
    }
    struct tiny x = {};
    x.m = (int)p->m;
    x.n = (int)p->n;
    x.k = (int)p->k;
    x.batch = (int)(p->batch[0] * p->batch[1]);
    x.inner_batch = (int)p->batch[1];
    x.alpha = p->alpha;
    x.beta = p->beta;
    x.c = lines_of(&p->c, p->type, p->batch, x.m, x.n);
    x.a = lines_of(&p->a, p->type, p->batch, x.m, x.k);
    x.b = lines_of(&p->b, p->type, p->batch, x.k, x.n);

    bool a_along_k = x.a.column == 1, b_along_k = x.b.row == 1;
    bool vector = x.a.ld % 4 == 0 && x.b.ld % 4 == 0 && (!(a_along_k || b_along_k) || x.k % 4 == 0);
    /* Small tiles spread little work over more threads; large ones read shared memory less often. */
    int tile = x.m * x.n <= 144 ? 2 : ceil_div(x.m, 4) * ceil_div(x.n, 4) <= THREADS ? 4 : 8;
    x.tiles_m = ceil_div(x.m, tile);
    x.tiles_n = ceil_div(x.n, tile);
    x.threads = x.tiles_m * x.tiles_n > 8 ? x.tiles_m * x.tiles_n : 8;
    int inputs = x.a.floats + x.b.floats, each = inputs > x.c.floats ? inputs : x.c.floats;
    x.per_block = THREADS / x.threads;
    if (x.per_block * each > SHARED_FLOATS) {
        x.per_block = SHARED_FLOATS / each;
    }
    int spread = ceil_div(x.batch, 4 * context->multiprocessors); /* short batches: at least four blocks a multiprocessor */
    if (x.per_block > spread) {
        x.per_block = spread;
    }
    steps_set(&x.c, x.threads);
    steps_set(&x.a, x.threads);
    steps_set(&x.b, x.threads);

    tiny_kernel_type *kernel = p->type == PS_BF16 ? kernel_of_tile<ps_bf16>(tile, a_along_k, b_along_k, vector)
                                                  : kernel_of_tile<float>(tile, a_along_k, b_along_k, vector);
    int threads = ceil_div(x.per_block * x.threads, 32) * 32;
    ps_cuda_launch(context, kernel, (unsigned)ceil_div(x.batch, x.per_block), threads, (size_t)(x.per_block * each) * 4, x);
    PS_CUDA_LAUNCHED("tiny gemm");
}

enum ps_status ps_cuda_tiny_gemm(const struct ps_kernels *k, const struct ps_gemm *arguments)
{
    struct ps_product product;
    PS_TRY(ps_cuda_product(arguments, &product));
    return ps_cuda_tiny_product(ps_cuda(k), &product);
}
