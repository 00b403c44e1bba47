/* Batches of small products, m, n, k <= 64, any strides, in one launch. Attention at level gemm is made of them: q k', A v and
 * their gradients, with matrices of N x N and N x e, where general libraries launch tiles far larger than the matrices.
 * A block takes a few matrices of the batch. All its threads copy a and b to shared memory (a dense run of matrices 16 bytes at a
 * time, whatever their size), its warps take tiles of up to 32 x 32 of c, and c leaves through shared memory likewise, so that
 * stores are whole lines; on Hopper as one bulk copy. All types multiply on tensor cores (mma.sync, k 8 a step): bf16, fp16, tf32
 * (operands rounded to nearest) and fp32 (three products of split operands, each step's sum added in FADD). Elements stay in their
 * own type until they are in registers. Lane q of four holds k = 2q and 2q + 1: for tf32 that is another order of the sum than the
 * instruction's own, the same for a and b, and one 8-byte read a row. Few rows or terms in whole pieces go without shared
 * memory (gemm/warp.cu). Bytes: 4 batch (m k + k n + m n), half of that in 16 bits, and m n more when beta is not 0. FLOPs 2 m n k
 * batch, three times that in fp32. 42 x 42 x 8, batch 43,008: 419 MB, 1.2 GFLOP. */
#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/mma.cuh"

#include <stdlib.h>

#define LIMIT 64
#define WARPS 4
#define THREADS (WARPS * 32)
#define BLOCK_BYTES (20 * 1024)      /* of shared memory, when a block takes several matrices; measured, as are the next */
#define LONG_BLOCK_BYTES (32 * 1024) /* where the batch is long and c is most of it */
#define MOST_BLOCK_BYTES (46 * 1024) /* to give every warp a tile */
#define LONG_BATCH 128               /* matrices a multiprocessor */

/* How a side is copied between global and shared memory. RUN: the batch is one dense array, which is copied as it is. PADDED: dense
 * too, but its lines would fall into the same banks: each is followed by a gap in shared memory. LINES: of whole pieces of 16
 * bytes, wherever they lie, such as heads in their rows. SINGLE: any strides, element by element. */
enum copy { RUN, PADDED, LINES, SINGLE };

struct side {
    char *data;
    int64_t batch[2];
    int64_t line_stride, piece_stride; /* global, in elements */
    struct ps_divisor inner, lines;    /* elements (PADDED, LINES: 16-byte pieces) of a line; lines of a matrix */
    int elements;                      /* of a matrix */
    int ld, size;                      /* shared, in elements: from line to line, from matrix to matrix */
    int row, column;                   /* strides of the matrix in shared memory */
    int offset;                        /* bytes to the block's first matrix in shared memory */
    enum copy copy;
};

struct tiny {
    struct side c, a, b;
    int64_t c_row, c_column;                       /* global strides, for beta */
    struct ps_divisor inner_batch, tiles, tiles_n; /* matrices of the second batch dimension; tiles of a matrix, across it */
    int m, n, k, batch, per_block;
    bool overlay, pairs; /* c takes the place of a and b; two neighbours of a row of c can be stored at once */
    float alpha, beta;
};

__device__ static __forceinline__ int64_t batch_offset(const struct tiny &x, const struct side &s, int matrix)
{
    const uint32_t outer = ps_divide((uint32_t)matrix, x.inner_batch);
    return outer * s.batch[0] + ((uint32_t)matrix - outer * x.inner_batch.divisor) * s.batch[1];
}

/* A run keeps its address modulo 16 bytes in shared memory: so many elements late. */
template <typename T> __device__ static __forceinline__ int late(const void *global)
{
    return (int)((uint32_t)(uintptr_t)global % 16 / sizeof(T));
}

/* A block's part of a side in global memory; of RUN and PADDED. */
template <typename T> __device__ static __forceinline__ T *global_of(const struct side &s, int first)
{
    return (T *)s.data + (int64_t)first * s.elements;
}

template <typename T> __device__ static __forceinline__ T *shared_of(const struct side &s, char *shared, int first)
{
    return (T *)(shared + s.offset) + (s.copy == RUN ? late<T>(global_of<T>(s, first)) : 0);
}

/* Element by element, in either direction. */
template <typename T, bool LOAD>
__device__ static __noinline__ void copy_single(const struct tiny &x, const struct side &s, T *shared, int first, int count)
{
    const uint32_t total = (uint32_t)(count * s.elements);
    T *global = (T *)s.data;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < total; i += THREADS) {
        const uint32_t all = ps_divide(i, s.inner), piece = i - all * s.inner.divisor;
        const uint32_t matrix = ps_divide(all, s.lines), line = all - matrix * s.lines.divisor;
        T *to = shared + matrix * s.size + line * s.ld + piece;
        T *from = global + batch_offset(x, s, first + (int)matrix) + line * s.line_stride + piece * s.piece_stride;
        if constexpr (LOAD) {
            *to = *from;
        } else {
            *from = *to;
        }
    }
}

/* By pieces of 16 bytes, likewise. */
template <typename T, bool LOAD>
__device__ static __noinline__ void copy_lines(const struct tiny &x, const struct side &s, T *shared, int first, int count)
{
    constexpr int V = ps_vector<T>;
    const uint32_t total = (uint32_t)(count * s.elements / V);
    T *global = (T *)s.data;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < total; i += THREADS) {
        const uint32_t all = ps_divide(i, s.inner), piece = i - all * s.inner.divisor;
        const uint32_t matrix = ps_divide(all, s.lines), line = all - matrix * s.lines.divisor;
        T *to = shared + matrix * s.size + line * s.ld + piece * V;
        T *from = global + batch_offset(x, s, first + (int)matrix) + line * s.line_stride + piece * V;
        if constexpr (LOAD) {
            ps_copy_async(to, from);
        } else {
            *(uint4 *)from = *(const uint4 *)to;
        }
    }
}

template <typename T>
__device__ static __forceinline__ void load(const struct tiny &x, const struct side &s, T *to, int first, int count)
{
    constexpr int V = ps_vector<T>;
    if (s.copy == SINGLE) {
        copy_single<T, true>(x, s, to, first, count);
        return;
    }
    if (s.copy == LINES) {
        copy_lines<T, true>(x, s, to, first, count);
        return;
    }
    const T *from = global_of<T>(s, first);
    const int n = count * s.elements;
    if (s.copy == PADDED) {
        const int gap = s.ld - (int)s.inner.divisor * V;
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < n / V; i += THREADS) {
            ps_copy_async(to + i * V + (int)ps_divide((uint32_t)i, s.inner) * gap, from + i * V);
        }
        return;
    }
    const int before = late<T>(from), head = min(n, before ? V - before : 0), pieces = (n - head) / V, done = head + pieces * V;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < pieces; i += THREADS) {
        ps_copy_async(to + head + i * V, from + head + i * V);
    }
    if ((int)threadIdx.x < head) {
        to[threadIdx.x] = from[threadIdx.x];
    }
    if ((int)threadIdx.x < n - done) {
        to[done + threadIdx.x] = from[done + threadIdx.x];
    }
}

template <typename T>
__device__ static __forceinline__ void store(const struct tiny &x, const struct side &s, T *from, int first, int count)
{
    constexpr int V = ps_vector<T>;
    if (s.copy == SINGLE) {
        copy_single<T, false>(x, s, from, first, count);
        return;
    }
    if (s.copy == LINES) {
        copy_lines<T, false>(x, s, from, first, count);
        return;
    }
    T *to = global_of<T>(s, first);
    const int n = count * s.elements;
    if (s.copy == PADDED) {
        const int gap = s.ld - (int)s.inner.divisor * V;
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < n / V; i += THREADS) {
            *(uint4 *)(to + i * V) = *(const uint4 *)(from + i * V + (int)ps_divide((uint32_t)i, s.inner) * gap);
        }
        return;
    }
    const int before = late<T>(to), head = min(n, before ? V - before : 0), pieces = (n - head) / V, done = head + pieces * V;
#if __CUDA_ARCH__ >= 900
    if (pieces > 0 && threadIdx.x == 0) {
        ps_bulk_store(to + head, ps_shared_address(from + head), pieces * 16);
    }
#else
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < pieces; i += THREADS) {
        *(uint4 *)(to + head + i * V) = *(const uint4 *)(from + head + i * V);
    }
#endif
    if ((int)threadIdx.x < head) {
        to[threadIdx.x] = from[threadIdx.x];
    }
    if ((int)threadIdx.x < n - done) {
        to[done + threadIdx.x] = from[done + threadIdx.x];
    }
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        ps_bulk_wait_read();
    }
#endif
}

/* Two neighbours along k as a fragment holds them: two words of tf32, hi and EXACT lo, or one of 16 bits. PAIRS: they lie side by
 * side, aligned. `left` elements are still in the sum; the rest count 0. */
template <enum arithmetic ARITHMETIC, bool PAIRS, bool TAIL, typename T>
__device__ static __forceinline__ void fragment(uint32_t (&hi)[2], uint32_t (&lo)[2], const T *from, int stride, int left)
{
    if constexpr (ARITHMETIC == REAL16) {
        if constexpr (PAIRS) {
            hi[0] = !TAIL || left > 0 ? *(const uint32_t *)from : 0; /* k is even */
        } else {
            const uint32_t low = !TAIL || left > 0 ? *(const uint16_t *)from : 0;
            const uint32_t high = !TAIL || left > 1 ? *(const uint16_t *)(from + stride) : 0;
            hi[0] = high << 16 | low;
        }
    } else {
        float2 v = make_float2(0, 0);
        if constexpr (PAIRS) {
            if (!TAIL || left > 0) {
                v = *(const float2 *)from;
            }
        } else {
            v.x = !TAIL || left > 0 ? from[0] : 0.0f;
            v.y = !TAIL || left > 1 ? from[stride] : 0.0f;
        }
        ps_split<ARITHMETIC == EXACT>(hi[0], lo[0], v.x);
        ps_split<ARITHMETIC == EXACT>(hi[1], lo[1], v.y);
    }
}

/* A warp's tile of up to 32 x NT 8: rows g, g + 8, g + 16, g + 24 of g = lane / 4; of every 8 columns 2q and 2q + 1 of
 * q = lane % 4. Rows and columns beyond the matrix repeat its last. */
template <int NT> struct warp_tile {
    float sum[2][NT][4]; /* [upper, lower half][8 columns][row * 2 + column] */
    int row, column;     /* the thread's first */
};

/* sum += a b over 8 of k. */
template <enum arithmetic ARITHMETIC, bool A_PAIRS, bool B_PAIRS, bool TAIL, int NT, typename T>
__device__ static __forceinline__ void step(struct warp_tile<NT> &t, const T *a, const T *b, const int (&a_at)[4],
                                            const int (&b_at)[NT], const struct tiny &x, int k, bool lower)
{
    const int lane = (int)threadIdx.x % 4 * 2, left = x.k - k - lane, ka = (k + lane) * (A_PAIRS ? 1 : x.a.column);
    const int kb = (k + lane) * (B_PAIRS ? 1 : x.b.row);
    uint32_t b_hi[NT][2], b_lo[NT][2];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        fragment<ARITHMETIC, B_PAIRS, TAIL>(b_hi[j], b_lo[j], b + b_at[j] + kb, x.b.row, left);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half == 1 && !lower) {
            return;
        }
        uint32_t hi[2][2], lo[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            fragment<ARITHMETIC, A_PAIRS, TAIL>(hi[i], lo[i], a + a_at[2 * half + i] + ka, x.a.column, left);
        }
#pragma unroll
        for (int j = 0; j < NT; j++) {
            if constexpr (ARITHMETIC == REAL16) {
                ps_mma8<T>(t.sum[half][j], hi[0][0], hi[1][0], b_hi[j][0], t.sum[half][j]);
            } else {
                const uint32_t a_hi[4] = {hi[0][0], hi[1][0], hi[0][1], hi[1][1]};
                const uint32_t a_lo[4] = {lo[0][0], lo[1][0], lo[0][1], lo[1][1]};
                ps_mma_split<ARITHMETIC == EXACT, true>(t.sum[half][j], a_hi, a_lo, b_hi[j], b_lo[j]);
            }
        }
    }
}

template <enum arithmetic ARITHMETIC, bool A_PAIRS, bool B_PAIRS, int NT, typename T>
__device__ static __forceinline__ void compute(struct warp_tile<NT> &t, const T *a, const T *b, const struct tiny &x, int row0,
                                               int column0)
{
    const int g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
    const bool lower = row0 + 16 < x.m;
    t.row = row0 + g;
    t.column = column0 + 2 * q;
    int a_at[4], b_at[NT], k = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a_at[i] = min(t.row + i * 8, x.m - 1) * x.a.row;
    }
#pragma unroll
    for (int j = 0; j < NT; j++) {
        b_at[j] = min(column0 + g + j * 8, x.n - 1) * x.b.column;
    }
#pragma unroll
    for (int i = 0; i < 2 * NT * 4; i++) {
        t.sum[i / (NT * 4)][i / 4 % NT][i % 4] = 0;
    }
#pragma unroll ARITHMETIC == EXACT ? 1 : 4
    for (; k + 8 <= x.k; k += 8) {
        step<ARITHMETIC, A_PAIRS, B_PAIRS, false>(t, a, b, a_at, b_at, x, k, lower);
    }
    if (k < x.k) {
        step<ARITHMETIC, A_PAIRS, B_PAIRS, true>(t, a, b, a_at, b_at, x, k, lower);
    }
}

/* sum = alpha sum + beta old, the matrix in global memory. */
template <int NT, typename T>
__device__ static __forceinline__ void blend(struct warp_tile<NT> &t, const T *old, const struct tiny &x)
{
#pragma unroll
    for (int i = 0; i < 2 * NT * 4; i++) {
        const int r = t.row + i / (NT * 4) * 16 + i % 4 / 2 * 8, to = t.column + i / 4 % NT * 8 + i % 2;
        float &v = t.sum[i / (NT * 4)][i / 4 % NT][i % 4];
        v = r < x.m && to < x.n ? fmaf(x.beta, ps_float(old[r * x.c_row + to * x.c_column]), x.alpha * v) : 0.0f;
    }
}

/* sum times scale to shared memory. */
template <int NT, typename T>
__device__ static __forceinline__ void put(T *c, const struct warp_tile<NT> &t, float scale, const struct tiny &x)
{
    const int left = x.n - t.column;
    c += t.row * x.c.row + t.column * x.c.column;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (t.row + i * 8 >= x.m) {
            return;
        }
        T *at = c + i * 8 * x.c.row;
        const int half = i / 2, r = i % 2 * 2;
        if (x.pairs) {
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const float v[2] = {scale * t.sum[half][j][r], scale * t.sum[half][j][r + 1]};
                if (j * 8 < left) {
                    if constexpr (sizeof(T) == 2) {
                        *(uint32_t *)(at + j * 8) = ps_pack<T>(v);
                    } else {
                        *(float2 *)(at + j * 8) = make_float2(v[0], v[1]);
                    }
                }
            }
        } else {
#pragma unroll
            for (int j = 0; j < 2 * NT; j++) {
                const int to = j / 2 * 8 + j % 2;
                if (to < left) {
                    ps_put(at + to * x.c.column, scale * t.sum[half][j / 2][r + j % 2]);
                }
            }
        }
    }
}

/* Blocks a multiprocessor, 0: as ptxas has it. 42 x 42 x 4 at 3,584 is over in two rounds then, not in three. */
template <enum arithmetic ARITHMETIC, int NT> constexpr int least_blocks()
{
    return ARITHMETIC == EXACT && NT == 3 ? 7 : 0;
}

template <typename T, enum arithmetic ARITHMETIC, int NT, bool A_PAIRS, bool B_PAIRS>
__global__ void __launch_bounds__(THREADS, least_blocks<ARITHMETIC, NT>()) tiny_kernel(const __grid_constant__ struct tiny x)
{
    extern __shared__ float4 shared_memory[];
    const int first = (int)blockIdx.x * x.per_block, count = min(x.per_block, x.batch - first);
    T *a = shared_of<T>(x.a, (char *)shared_memory, first), *b = shared_of<T>(x.b, (char *)shared_memory, first);
    T *c = shared_of<T>(x.c, (char *)shared_memory, first);
    ps_grid_wait();
    load<T>(x, x.a, a, first, count);
    load<T>(x, x.b, b, first, count);
    ps_copy_wait();
    __syncthreads();
    const int tiles = count * (int)x.tiles.divisor;
    for (int base = 0; base < tiles; base += WARPS) {
        const int at = base + (int)threadIdx.x / 32;
        const uint32_t matrix = ps_divide((uint32_t)at, x.tiles), tile = (uint32_t)at - matrix * x.tiles.divisor;
        const uint32_t down = ps_divide(tile, x.tiles_n);
        struct warp_tile<NT> t;
        if (at < tiles) {
            compute<ARITHMETIC, A_PAIRS, B_PAIRS>(t, a + matrix * x.a.size, b + matrix * x.b.size, x, (int)down * 32,
                                                  (int)(tile - down * x.tiles_n.divisor) * NT * 8);
        }
        if (x.overlay) { /* there is one turn only */
            __syncthreads();
        }
        if (at < tiles) {
            if (x.beta != 0) {
                blend(t, (const T *)x.c.data + batch_offset(x, x.c, first + (int)matrix), x);
            }
            put(c + matrix * x.c.size, t, x.beta != 0 ? 1.0f : x.alpha, x);
        }
    }
    ps_grid_release(); /* late: blocks that wait would be spread over multiprocessors as these leave room, unevenly */
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* what was written is what the bulk copy reads */
#endif
    __syncthreads();
    store<T>(x, x.c, c, first, count);
}

typedef void tiny_kernel_type(struct tiny);

template <typename T, enum arithmetic ARITHMETIC, int NT> static tiny_kernel_type *kernel_of(bool a_pairs, bool b_pairs)
{
    static tiny_kernel_type *const kernels[2][2] = {
        {tiny_kernel<T, ARITHMETIC, NT, false, false>, tiny_kernel<T, ARITHMETIC, NT, false, true>},
        {tiny_kernel<T, ARITHMETIC, NT, true, false>, tiny_kernel<T, ARITHMETIC, NT, true, true>}};
    return kernels[a_pairs][b_pairs];
}

template <typename T, enum arithmetic ARITHMETIC> static tiny_kernel_type *kernel_of_width(int nt, bool a_pairs, bool b_pairs)
{
    return nt == 1   ? kernel_of<T, ARITHMETIC, 1>(a_pairs, b_pairs)
           : nt == 2 ? kernel_of<T, ARITHMETIC, 2>(a_pairs, b_pairs)
           : nt == 3 ? kernel_of<T, ARITHMETIC, 3>(a_pairs, b_pairs)
                     : kernel_of<T, ARITHMETIC, 4>(a_pairs, b_pairs);
}

/* Lines run along the dimension of the smaller stride. k_columns: the columns are summed over, or (c) stored in pairs. */
static struct side side_of(const struct ps_operand *o, enum ps_type type, const int64_t *batch, int rows, int columns,
                           bool k_columns)
{
    struct side s = {};
    const int bytes = (int)ps_type_bytes(type), vector = 16 / bytes;
    s.data = o->data;
    s.batch[0] = batch[0] > 1 ? o->batch[0] : 0;
    s.batch[1] = batch[1] > 1 ? o->batch[1] : 0;
    const bool by_rows = columns == 1 ? false : rows == 1 ? true : llabs(o->column) <= llabs(o->row);
    const int outer = by_rows ? rows : columns, inner = by_rows ? columns : rows;
    s.line_stride = outer == 1 ? 0 : by_rows ? o->row : o->column;
    s.piece_stride = inner == 1 ? 1 : by_rows ? o->column : o->row;
    s.elements = outer * inner;
    const bool dense = s.piece_stride == 1 && (outer == 1 || s.line_stride == inner) &&
                       (batch[1] == 1 || s.batch[1] == s.elements) && (batch[0] == 1 || s.batch[0] == batch[1] * s.elements);
    const bool banked = inner * bytes % 64 == 0 && (uintptr_t)s.data % 16 == 0;
    const bool whole = s.piece_stride == 1 && inner % vector == 0 && (uintptr_t)s.data % 16 == 0 &&
                       (s.line_stride | s.batch[0] | s.batch[1]) % vector == 0;
    s.copy = dense ? banked ? PADDED : RUN : whole ? LINES : SINGLE;
    const bool apart = banked && (s.copy == PADDED || s.copy == LINES);
    s.ld = inner + (!apart ? 0 : bytes == 4 && by_rows == k_columns ? 8 : vector);
    s.row = by_rows ? s.ld : 1;
    s.column = by_rows ? 1 : s.ld;
    s.size = outer * s.ld;
    s.inner = ps_divisor_make(s.copy == PADDED || s.copy == LINES ? inner / vector : inner);
    s.lines = ps_divisor_make(outer);
    return s;
}

/* Whether every pair of elements along the stride `along` = 1 begins at an even element. */
static bool pairs_aligned(const struct side *s, enum ps_type type, int along, int length)
{
    return along == 1 && length % 2 == 0 && s->ld % 2 == 0 && s->size % 2 == 0 &&
           (s->copy != RUN || (uintptr_t)s->data % (2 * ps_type_bytes(type)) == 0);
}

static int ceil_div(int64_t a, int64_t b)
{
    return (int)((a + b - 1) / b);
}

static bool far(const struct ps_operand *o, int64_t rows, int64_t columns)
{
    return (rows - 1) * llabs(o->row) + (columns - 1) * llabs(o->column) > INT32_MAX;
}

/* Bytes of `matrices` in shared memory; a run may begin 16 bytes late. */
static int shared_bytes(const struct side *s, enum ps_type type, int matrices)
{
    return (matrices * s->size * (int)ps_type_bytes(type) + 15) / 16 * 16 + (s->copy == RUN ? 16 : 0);
}

enum ps_status ps_cuda_tiny_product(const struct ps_kernels *k, const struct ps_product *p)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    if (p->type != p->c_type || p->m > LIMIT || p->n > LIMIT || p->k > LIMIT) {
        return ps_fail(PS_UNSUPPORTED,
                       "gemm: m %lld, n %lld, k %lld of types %d and %d; small products have one type, and at most %d each",
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
    x.inner_batch = ps_divisor_make(p->batch[1]);
    x.alpha = p->alpha;
    x.beta = p->beta;
    x.c = side_of(&p->c, p->type, p->batch, x.m, x.n, true);
    x.a = side_of(&p->a, p->type, p->batch, x.m, x.k, true);
    x.b = side_of(&p->b, p->type, p->batch, x.k, x.n, false);
    x.c_row = p->c.row;
    x.c_column = p->c.column;
    x.pairs = pairs_aligned(&x.c, p->type, x.c.column, x.n);
    const bool a_pairs = pairs_aligned(&x.a, p->type, x.a.column, x.k), b_pairs = pairs_aligned(&x.b, p->type, x.b.row, x.k);

    const int eights = ceil_div(x.n, 8), tiles_n = ceil_div(eights, 4), nt = ceil_div(eights, tiles_n);
    const int tiles = ceil_div(x.m, 32) * tiles_n;
    x.tiles = ps_divisor_make(tiles);
    x.tiles_n = ps_divisor_make(tiles_n);
    const int each = shared_bytes(&x.a, p->type, 1) + shared_bytes(&x.b, p->type, 1) + shared_bytes(&x.c, p->type, 1);
    const bool long_batch = x.batch >= LONG_BATCH * context->multiprocessors;
    const bool outputs_most = 2 * shared_bytes(&x.c, p->type, 1) > each;
    const int least = tiles == 1 ? WARPS : 2; /* matrices, for every warp to have a tile and loads to follow one another */
    x.per_block = (long_batch && outputs_most ? LONG_BLOCK_BYTES : BLOCK_BYTES) / each;
    x.per_block = x.per_block > least ? x.per_block : least < MOST_BLOCK_BYTES / each ? least : MOST_BLOCK_BYTES / each;
    const int turns = (long_batch ? 16 : 8) / tiles;
    const int spread = ceil_div(x.batch, 4 * context->multiprocessors); /* short batches: at least four blocks a multiprocessor */
    x.per_block = x.per_block < turns ? x.per_block : turns;
    x.per_block = x.per_block < spread ? x.per_block : spread;
    x.per_block = x.per_block > 1 ? x.per_block : 1;
    x.overlay = x.per_block == 1 && each > BLOCK_BYTES; /* of at most four tiles */
    const int inputs = shared_bytes(&x.a, p->type, x.per_block) + shared_bytes(&x.b, p->type, x.per_block);
    const int outputs = shared_bytes(&x.c, p->type, x.per_block);
    x.b.offset = shared_bytes(&x.a, p->type, x.per_block);
    x.c.offset = x.overlay ? 0 : inputs;

    tiny_kernel_type *kernel = p->type == PS_BF16  ? kernel_of_width<ps_bf16, REAL16>(nt, a_pairs, b_pairs)
                               : p->type == PS_F16 ? kernel_of_width<ps_fp16, REAL16>(nt, a_pairs, b_pairs)
                               : ps_cuda_exact(k)  ? kernel_of_width<float, EXACT>(nt, a_pairs, b_pairs)
                                                   : kernel_of_width<float, TF32>(nt, a_pairs, b_pairs);
    const int bytes = !x.overlay ? inputs + outputs : inputs > outputs ? inputs : outputs; /* at most 48 KiB */
    ps_cuda_launch(context, kernel, (unsigned)ceil_div(x.batch, x.per_block), THREADS, (size_t)bytes, x);
    PS_CUDA_LAUNCHED("tiny gemm");
}
