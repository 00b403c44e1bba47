/* Batches of products of few rows or of few terms, whose operands lie in whole pieces of 4 elements, without shared memory.
 *
 * Few rows, m <= 16, n, k <= 64: a warp for 16 rows by 8 or 32 columns of a matrix. So small a batch is over in 3 us, of which
 * gemm/tiny.cu's way through shared memory takes more than half: 1,300 to 2,400 instructions a matrix of 12 x 12 x 64 or 12 x 64
 * x 12. Here it is 600 to 700. A lane asks for all it needs of both operands at once, 4 neighbours a load, and the loads say where
 * a row, a column and a place in the sum go in the tensor cores' fragments: lane q of four holds k = 4q .. 4q + 3 of 16; of an
 * operand whose lines run the other way lane g of eight holds 4 columns of b (2 rows of a) side by side, each in a fragment of its
 * own. So c, too, is stored 2 or 4 elements at a time. fp32: three products of split operands, added up in FADD every 8 of k; tf32
 * and 16 bits: one. Bytes: 4 batch (m k + k n + m n), half of that in 16 bits, and m n more when beta is not 0; a again from the
 * first cache for the other warp of a matrix. FLOPs 2 m n k batch, three times that in fp32. 12 x 12 x 64, batch 1,024: 6.9 MB,
 * 19 MFLOP.
 *
 * Few terms, k = 4, m, n <= 64: c is most of what is moved, and on tensor cores half of k would be empty. A block for a matrix,
 * by FFMA: 740 instructions for 42 x 42 x 4, in tf32 the same as in fp32. Only where beta is 0, in 16 bits only for n > 32. Bytes:
 * as above. FLOPs 2 m n k batch. 42 x 42 x 4, batch 3,584: 30.1 MB, 51 MFLOP. */
#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/mma.cuh"

#include <stdlib.h>

enum { WARPS = 4, THREADS = WARPS * 32, ROWS = 16, DEEP = 16, MOST = 64 };

enum { FEW_THREADS = 128, FEW_OUTPUTS = 1024, TERMS = 4 };

enum { C, A, B };

/* As short as can be: a kernel's first read of every 64 bytes of its arguments waits for memory. Strides in bytes. */
struct product {
    char *data[3];
    int line[3], batch[3][2]; /* from line to line, whose elements are neighbours; from matrix to matrix */
    struct ps_divisor inner_batch;
    int matrices;
    uint8_t m, n, k, shared; /* shared: 1 where two warps share a matrix, else 0 */
    float alpha, beta;
};

/* 2 or 4 elements side by side. */
template <typename T, int COUNT> struct piece {
    enum { WORDS = COUNT * (int)sizeof(T) / 4 };
    uint32_t word[WORDS];

    __device__ __forceinline__ void read(const char *p)
    {
        if constexpr (WORDS == 1) {
            word[0] = *(const uint32_t *)p;
        } else if constexpr (WORDS == 2) {
            const uint2 v = *(const uint2 *)p;
            word[0] = v.x;
            word[1] = v.y;
        } else {
            const uint4 v = *(const uint4 *)p;
            word[0] = v.x;
            word[1] = v.y;
            word[2] = v.z;
            word[3] = v.w;
        }
    }

    __device__ __forceinline__ void read_if(bool there, const char *p)
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            word[i] = 0;
        }
        if (there) {
            read(p);
        }
    }

    __device__ __forceinline__ void write(char *p) const
    {
        if constexpr (WORDS == 1) {
            *(uint32_t *)p = word[0];
        } else if constexpr (WORDS == 2) {
            *(uint2 *)p = make_uint2(word[0], word[1]);
        } else {
            *(uint4 *)p = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
};

/* The lane's part of an operand for one DEEP of k: of LINES rows of a (or columns of b) what the tensor cores take, k = 4q .. 4q +
 * 3 in order. Rows g + 8 i; or, ACROSS, LINES g + i. from: the first of them at this k; rows_left and k_left from there on. What is
 * not there is 0. */
template <typename T, int LINES, bool ACROSS>
static __device__ __forceinline__ void load(uint32_t (&to)[LINES][sizeof(T)], const char *from, int line, int rows_left, int k_left)
{
    constexpr int WORDS = (int)sizeof(T); /* of 4 elements */
    if constexpr (!ACROSS) {
#pragma unroll
        for (int i = 0; i < LINES; i++) {
            piece<T, 4> v;
            v.read_if(8 * i < rows_left && k_left > 0, from + (int64_t)line * (8 * i));
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                to[i][w] = v.word[w];
            }
        }
    } else {
        piece<T, LINES> v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i].read_if(i < k_left && rows_left > 0, from + (int64_t)line * i);
        }
#pragma unroll
        for (int i = 0; i < LINES; i++) {
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if constexpr (WORDS == 4) {
                    to[i][w] = v[w].word[i];
                } else {
                    to[i][w] = __byte_perm(v[2 * w].word[i / 2], v[2 * w + 1].word[i / 2], i % 2 ? 0x7632 : 0x5410);
                }
            }
        }
    }
}

/* sum += a b over one DEEP of k. */
template <typename T, enum arithmetic ARITHMETIC, int NT, int WORDS>
static __device__ __forceinline__ void multiply(float (&sum)[NT][4], const uint32_t (&a)[2][WORDS], const uint32_t (&b)[NT][WORDS])
{
    if constexpr (ARITHMETIC == REAL16) {
        const uint32_t words[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
#pragma unroll
        for (int j = 0; j < NT; j++) {
            ps_mma16<T>(sum[j], words, b[j][0], b[j][1], sum[j]);
        }
    } else {
#pragma unroll
        for (int s = 0; s < WORDS; s += 2) {
            uint32_t hi[4], lo[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ps_split<ARITHMETIC == EXACT>(hi[i], lo[i], __uint_as_float(a[i % 2][s + i / 2]));
            }
#pragma unroll
            for (int j = 0; j < NT; j++) {
                uint32_t b_hi[2], b_lo[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    ps_split<ARITHMETIC == EXACT>(b_hi[i], b_lo[i], __uint_as_float(b[j][s + i]));
                }
                ps_mma_split<ARITHMETIC == EXACT, true>(sum[j], hi, lo, b_hi, b_lo);
            }
        }
    }
}

template <typename T, int COUNT> static __device__ __forceinline__ void put(char *to, const float (&v)[COUNT])
{
    piece<T, COUNT> p;
#pragma unroll
    for (int w = 0; w < piece<T, COUNT>::WORDS; w++) {
        if constexpr (sizeof(T) == 4) {
            p.word[w] = __float_as_uint(v[w]);
        } else {
            p.word[w] = ps_pack<T>(v + 2 * w);
        }
    }
    p.write(to);
}

/* COUNT neighbours of c. */
template <typename T, int COUNT> static __device__ __forceinline__ void store(char *to, float (&v)[COUNT], const struct product &x)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        v[i] *= x.alpha;
    }
    if (x.beta != 0) {
        piece<T, COUNT> p;
        p.read(to);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float old[2];
            if constexpr (sizeof(T) == 4) {
                old[i % 2] = __uint_as_float(p.word[i]);
            } else {
                ps_unpack<T>(old, p.word[i / 2]);
            }
            v[i] = fmaf(x.beta, old[i % 2], v[i]);
        }
    }
    put<T>(to, v);
}

/* NT: columns of a warp, in eights; 4 where b's lines run across. CHUNKS: DEEPs of k. */
template <typename T, enum arithmetic ARITHMETIC, bool A_ACROSS, bool B_ACROSS, int NT, int CHUNKS>
static __global__ void __launch_bounds__(THREADS) warp_kernel(const __grid_constant__ struct product x)
{
    constexpr int SIZE = (int)sizeof(T);
    const int warp = (int)(blockIdx.x * WARPS + threadIdx.x / 32), matrix = warp >> x.shared;
    const int outer = (int)ps_divide((uint32_t)matrix, x.inner_batch), inner = matrix - outer * (int)x.inner_batch.divisor;
    const int g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4, column = (warp & x.shared) * (NT * 8);
    /* Of the lane: its first row of a and column of b, of c too. */
    const int row = A_ACROSS ? 2 * g : g, b_column = column + (B_ACROSS ? 4 * g : g),
              c_column = column + (B_ACROSS ? 8 * q : 2 * q);
    char *at[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        at[i] = x.data[i] + (int64_t)outer * x.batch[i][0] + (int64_t)inner * x.batch[i][1];
    }
    const char *const a = at[A] + (int64_t)x.line[A] * (A_ACROSS ? 4 * q : row) + SIZE * (A_ACROSS ? row : 4 * q);
    const char *const b = at[B] + (int64_t)x.line[B] * (B_ACROSS ? 4 * q : b_column) + SIZE * (B_ACROSS ? b_column : 4 * q);
    char *const c = at[C] + (int64_t)x.line[C] * row + SIZE * c_column;
    asm volatile("" ::"l"(a), "l"(b), "l"(c), "r"((int)x.k), "f"(x.beta)); /* by here, while the kernel before still runs */
    ps_grid_wait();
    if (matrix >= x.matrices) {
        return;
    }
    uint32_t of_a[CHUNKS][2][SIZE], of_b[CHUNKS][NT][SIZE];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int k = i * DEEP, left = x.k - 4 * q - k;
        load<T, 2, A_ACROSS>(of_a[i], a + (A_ACROSS ? (int64_t)x.line[A] * k : SIZE * k), x.line[A], x.m - row, left);
        load<T, NT, B_ACROSS>(of_b[i], b + (B_ACROSS ? (int64_t)x.line[B] * k : SIZE * k), x.line[B], x.n - b_column, left);
    }
    ps_grid_release();
    float sum[NT][4] = {}; /* two columns of the first row, and of the second */
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        multiply<T, ARITHMETIC>(sum, of_a[i], of_b[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int step = A_ACROSS ? half : 8 * half;
        if (step >= x.m - row) {
            return;
        }
        char *const to = c + (int64_t)x.line[C] * step;
        if constexpr (B_ACROSS) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (4 * i < x.n - c_column) {
                    float v[4] = {sum[0][2 * half + i], sum[1][2 * half + i], sum[2][2 * half + i], sum[3][2 * half + i]};
                    store<T>(to + 4 * i * SIZE, v, x);
                }
            }
        } else {
#pragma unroll
            for (int j = 0; j < NT; j++) {
                if (8 * j < x.n - c_column) {
                    float v[2] = {sum[j][2 * half], sum[j][2 * half + 1]};
                    store<T>(to + 8 * j * SIZE, v, x);
                }
            }
        }
    }
}

typedef void kernel_type(struct product);

/* Both a and b across would be a kernel that nothing asks for. */
template <typename T, enum arithmetic ARITHMETIC, int CHUNKS> static kernel_type *kernel_of(bool a_across, bool b_across, int nt)
{
    return a_across   ? warp_kernel<T, ARITHMETIC, true, true, 4, CHUNKS>
           : b_across ? warp_kernel<T, ARITHMETIC, false, true, 4, CHUNKS>
           : nt == 4  ? warp_kernel<T, ARITHMETIC, false, false, 4, CHUNKS>
                      : warp_kernel<T, ARITHMETIC, false, false, 1, CHUNKS>;
}

template <typename T, enum arithmetic ARITHMETIC> static kernel_type *kernel_of_depth(int k, bool a_across, bool b_across, int nt)
{
    return k <= DEEP ? kernel_of<T, ARITHMETIC, 1>(a_across, b_across, nt)
                     : kernel_of<T, ARITHMETIC, MOST / DEEP>(a_across, b_across, nt);
}

/* ---- sums of few terms ---- */

struct few {
    struct product product;
    struct ps_divisor pairs; /* of columns of c */
    int step[2];             /* bytes of c and of a from a thread's row to its next */
    uint8_t groups;          /* of `pairs` threads, a row at a time */
    uint8_t rows, more;      /* of a group; the first `more` have another */
};

/* A block for a matrix, a and b along k: a thread keeps two columns of b and takes every `groups`th row, so that neighbours
 * store neighbours. */
template <typename T> static __global__ void __launch_bounds__(FEW_THREADS) few_kernel(const __grid_constant__ struct few f)
{
    constexpr int SIZE = (int)sizeof(T), ROWS_AT_ONCE = 7; /* loads under way together */
    const struct product &x = f.product;
    const int outer = (int)ps_divide(blockIdx.x, x.inner_batch), inner = (int)blockIdx.x - outer * (int)x.inner_batch.divisor;
    const int group = (int)ps_divide(threadIdx.x, f.pairs), column = 2 * ((int)threadIdx.x - group * (int)f.pairs.divisor);
    char *at[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        at[i] = x.data[i] + (int64_t)outer * x.batch[i][0] + (int64_t)inner * x.batch[i][1];
    }
    const char *a = at[A] + (int64_t)x.line[A] * group;
    const char *const b = at[B] + (int64_t)x.line[B] * column;
    char *c = at[C] + (int64_t)x.line[C] * group + SIZE * column;
    int rows = f.rows + (group < f.more);
    asm volatile("" ::"l"(a), "l"(b), "l"(c), "r"(rows), "f"(x.alpha)); /* by here, as above */
    ps_grid_wait();
    if (group >= f.groups) {
        return;
    }
    float of_b[2][TERMS];
    ps_load<TERMS>(of_b[0], (const T *)b);
    ps_load<TERMS>(of_b[1], (const T *)(b + x.line[B]));
    for (; rows > 0; rows -= ROWS_AT_ONCE) {
        float of_a[ROWS_AT_ONCE][TERMS], v[ROWS_AT_ONCE][2];
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            ps_load<TERMS>(of_a[i], (const T *)(a + (int64_t)f.step[A] * min(i, rows - 1)));
        }
        ps_grid_release(); /* here, it also keeps ptxas from placing loads behind waits for others */
#pragma unroll
        for (int i = 0; i < 2 * ROWS_AT_ONCE; i++) {
            float &sum = v[i / 2][i % 2];
            sum = of_a[i / 2][0] * of_b[i % 2][0];
#pragma unroll
            for (int k = 1; k < TERMS; k++) {
                sum = fmaf(of_a[i / 2][k], of_b[i % 2][k], sum);
            }
            sum *= x.alpha;
        }
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            if (i < rows) {
                put<T>(c + (int64_t)f.step[C] * i, v[i]);
            }
        }
        a += (int64_t)f.step[A] * ROWS_AT_ONCE;
        c += (int64_t)f.step[C] * ROWS_AT_ONCE;
    }
}

/* Whether o's lines, `line` apart and of `length` elements, are pieces of `each`, wherever in the batch, and strides fit. */
static bool in_pieces(const struct ps_product *p, const struct ps_operand *o, int64_t line, int64_t length, int each)
{
    const int64_t outer = p->batch[0] > 1 ? o->batch[0] : 0, inner = p->batch[1] > 1 ? o->batch[1] : 0, most = INT32_MAX / 4;
    return length % each == 0 && line % each == 0 && outer % each == 0 && inner % each == 0 && llabs(line) <= most &&
           llabs(outer) <= most && llabs(inner) <= most && (uintptr_t)o->data % (each * ps_type_bytes(p->type)) == 0;
}

/* How a and b lie, or false. Of a across 2 rows are read at once, of b 4 columns. */
static bool orient(const struct ps_product *p, bool *a_across, bool *b_across)
{
    const bool b_along = p->b.row == 1 && in_pieces(p, &p->b, p->b.column, p->k, 4);
    const bool a_along = p->a.column == 1 && in_pieces(p, &p->a, p->a.row, p->k, 4);
    *a_across = !a_along;
    *b_across = !b_along;
    return (a_along || (*b_across && p->a.row == 1 && in_pieces(p, &p->a, p->a.column, p->m, 2))) &&
           (b_along || (p->b.column == 1 && in_pieces(p, &p->b, p->b.row, p->n, 4)));
}

/* With outputs enough for every thread of a block to have a few; in 16 bits gemm/tiny.cu is faster at 32 x 32 and 64 x 16. */
static bool of_few_terms(const struct ps_product *p, bool across)
{
    const int64_t most = INT32_MAX / (MOST * 4);
    return p->k == TERMS && p->m <= MOST && p->m * p->n >= FEW_OUTPUTS && (p->type == PS_F32 || p->n > 32) && p->beta == 0 &&
           !across && llabs(p->c.row) <= most && llabs(p->a.row) <= most;
}

bool ps_cuda_warp_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    (void)k;
    bool a_across, b_across;
    return p->type == p->c_type && p->n <= MOST && p->k <= MOST && p->batch[0] * p->batch[1] <= INT32_MAX / 4 && p->c.column == 1 &&
           orient(p, &a_across, &b_across) && (p->m <= ROWS || of_few_terms(p, a_across || b_across)) &&
           in_pieces(p, &p->c, p->c.row, p->n, b_across ? 4 : 2);
}

enum ps_status ps_cuda_warp_product(const struct ps_kernels *k, const struct ps_product *p)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    bool a_across, b_across;
    (void)orient(p, &a_across, &b_across);
    const struct ps_operand *const from[3] = {&p->c, &p->a, &p->b};
    const int64_t lines[3] = {p->c.row, a_across ? p->a.column : p->a.row, b_across ? p->b.row : p->b.column};
    const int64_t size = (int64_t)ps_type_bytes(p->type);
    struct product x = {};
    for (int i = 0; i < 3; i++) {
        x.data[i] = from[i]->data;
        x.line[i] = (int)(lines[i] * size);
        x.batch[i][0] = p->batch[0] > 1 ? (int)(from[i]->batch[0] * size) : 0;
        x.batch[i][1] = p->batch[1] > 1 ? (int)(from[i]->batch[1] * size) : 0;
    }
    const int nt = !b_across && p->n <= 16 ? 1 : 4;
    x.m = (uint8_t)p->m;
    x.n = (uint8_t)p->n;
    x.k = (uint8_t)p->k;
    x.shared = p->n > nt * 8;
    x.matrices = (int)(p->batch[0] * p->batch[1]);
    x.inner_batch = ps_divisor_make(p->batch[1]);
    x.alpha = p->alpha;
    x.beta = p->beta;
    if (p->m > ROWS) {
        const int pairs = (int)p->n / 2, groups = FEW_THREADS / pairs; /* fewer than m */
        struct few few = {};
        few.product = x;
        few.pairs = ps_divisor_make(pairs);
        few.step[C] = x.line[C] * groups;
        few.step[A] = x.line[A] * groups;
        few.groups = (uint8_t)groups;
        few.rows = (uint8_t)(p->m / groups);
        few.more = (uint8_t)(p->m % groups);
        void (*const kernel)(struct few) = p->type == PS_BF16  ? few_kernel<ps_bf16>
                                           : p->type == PS_F16 ? few_kernel<ps_fp16>
                                                               : few_kernel<float>;
        ps_cuda_launch(context, kernel, (unsigned)x.matrices, FEW_THREADS, 0, few);
        PS_CUDA_LAUNCHED("gemm of few terms");
    }
    kernel_type *const kernel = p->type == PS_BF16  ? kernel_of_depth<ps_bf16, REAL16>(x.k, a_across, b_across, nt)
                                : p->type == PS_F16 ? kernel_of_depth<ps_fp16, REAL16>(x.k, a_across, b_across, nt)
                                : ps_cuda_exact(k)  ? kernel_of_depth<float, EXACT>(x.k, a_across, b_across, nt)
                                                    : kernel_of_depth<float, TF32>(x.k, a_across, b_across, nt);
    ps_cuda_launch(context, kernel, ps_cuda_blocks((int64_t)x.matrices << x.shared, WARPS), THREADS, 0, x);
    PS_CUDA_LAUNCHED("warp gemm");
}
