/* The whole encoder of a small model with d_model 64, heads of 16 columns, N <= 16 and d_ff 128 or 256, forward and backward:
 * what encoder/resident/resident.cu does, with the products by wgmma. Equations: docs/design.md section 3.
 *
 * A block works on four units of 16 rows, a product's 64 rows. Its four warpgroups have 16 of the 64 columns each, and so a head,
 * and one panel of d_ff; warp u of each has unit u. What one warp knows and all need lies in shared memory in panels of 64 x 64
 * real16, from which wgmma reads both operands; attention is a warp's own and never leaves its registers. A layer's weights are one
 * set of panels, fetched as tensors by one thread; a matrix of the next layer takes the place of this one's as soon as that has
 * been used, behind the products.
 *
 * Forward leaves q, k, v, its LayerNorms' xhat and 1 / deviation, and LN2's output for backward. Weight gradients are a kernel of
 * their own, wide_weights: their operands, the panels, go to memory as they come, by the copy engine, and its blocks begin where
 * backward's leave multiprocessors free, on what backward has announced so far; the first of them form W_h's gradient before.
 * gamma's and beta's gradients are column sums of registers. The thread that has a gradient's sum does AdamW's update of the
 * parameter too where that is asked for: a step is three kernels.
 *
 * Registers: what follows from a warp's place is found anew at each product (refresh). Left to itself the compiler finds all
 * addresses before the first layer and spills them, which made backward slower by a sixth.
 *
 * Counts, seed28k (f 256, 3 x 5 rows in 16, 2 layers; 107 blocks of 16 warps): a layer's panels 96 KB; a warpgroup and a layer take
 * 20 products m64n16k16, 4 m64n48k16 and 4 m64n64k16 forward, 32, none and 8 backward, and 24 movmatrix a warp in place of
 * attention's transposes; 6 barriers each way. q, k, v and xhat 8.8 MB. Weight gradients: operands 28 MB, read 1.2 times, a
 * multiprocessor's copy engine has 24 KB in 600 clocks; partial sums 7 MB (one a block would be 43).
 *
 * Compiled with PS_COMPILE_HALVES it is tf32's: fp16 operands, u and gradients in memory of fp32, no ends:
 * encoder/resident/d64_short_tf32.cu. */
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/encoder/head.cuh"

#include <cudaTypedefs.h>

namespace PS_REAL16_SPACE
{

enum { D = 64, UNITS = 4, THREADS = 512, PANEL = 64 * 64 * 2, STEP = 16 * 128 };
static_assert((int)UNITS == (int)WIDE_HEAD_UNITS, "the head's threads fetch their targets as forward begins");

typedef place<D, 1> narrow_place;

/* warpgroup = share, warp of it = unit. Addresses in shared memory are of a panel 0; others are so many panels further. */
struct wide_place : narrow_place {
    uint32_t wide;  /* where the warp's rows begin in a panel; 16 i columns further: exclusive or 32 i */
    uint32_t panel; /* of wgmma's operand: its lower word */
    __device__ __forceinline__ wide_place(const void *memory)
    {
        /* The same in all lanes, so that the compiler keeps what follows from it once a warp. */
        const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
        const uint32_t address = ps_shared_address(memory);
        unit = warp % UNITS;
        share = warp / UNITS;
        tile = 0;
        row = 0;
        wide = address + (uint32_t)((unit * 16 + lane % 16) * 128 + ((lane / 16) ^ (lane & 7)) * 16);
        panel = (address >> 4 & 0x3fff) | 1 << 16;
    }
    /* What follows from the warp's place is found anew: kept for all of the kernel it would fill the registers. */
    __device__ __forceinline__ void refresh()
    {
        asm volatile("" : "+r"(panel), "+r"(share), "+r"(wide), "+r"(g), "+r"(q));
    }
    /* The warp's 16 columns. */
    __device__ __forceinline__ uint32_t own() const
    {
        return wide ^ (uint32_t)share * 32;
    }
    /* The operand in another panel; further to the warpgroup's 16 columns, 16 rows, panel. */
    __device__ __forceinline__ uint32_t of(int panels_further) const
    {
        return panel + (uint32_t)panels_further * (PANEL / 16);
    }
    __device__ __forceinline__ uint32_t columns() const
    {
        return (uint32_t)share * 2;
    }
    __device__ __forceinline__ uint32_t rows() const
    {
        return (uint32_t)share * (STEP / 16);
    }
    /* The warpgroup's panel of d_ff; when there are fewer than warpgroups, some do the same. */
    template <int P> __device__ __forceinline__ int mine() const
    {
        return P == 4 ? share : share % P;
    }
};

/* ---- wgmma ---- */

/* An operand in a panel: rows of 128 bytes, 16-byte pieces exchanged by the row's number modulo 8, groups of 8 rows after one
 * another. Its address, in 16 bytes, is the lower word's. */
static __device__ __forceinline__ uint64_t operand_at(uint32_t low)
{
    return (uint64_t)(1024 >> 4 | 1 << 30) << 32 | low;
}

/* d = or += a b, 16 deep, for the warpgroup's 64 rows and 16, 32 or 64 columns. A_ROWS, B_ROWS: the depth runs over the operand's
 * rows.
 */
template <bool A_ROWS, bool B_ROWS> static __device__ __forceinline__ void step(float (&d)[2][4], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, %12;\n}"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                   "+f"(d[1][3])
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_ROWS), "n"((int)B_ROWS));
}

template <bool A_ROWS, bool B_ROWS> static __device__ __forceinline__ void step(float (&d)[4][4], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, %16, %17, p, 1, 1, %19, %20;\n}"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                   "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
                   "+f"(d[3][2]), "+f"(d[3][3])
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_ROWS), "n"((int)B_ROWS));
}

/* d += a b, 16 deep, 48 columns: three slices of 16. a as it lies in a panel, b's depth runs over its rows. */
static __device__ __forceinline__ void step_slices(float (&d)[6][4], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
                 "}, %24, %25, 1, 1, 1, 0, 1;"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                   "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
                   "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
                   "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
                 : "l"(a), "l"(b));
}

template <bool A_ROWS, bool B_ROWS> static __device__ __forceinline__ void step(float (&d)[8][4], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, p, 1, 1, %35, %36;\n}"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                   "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
                   "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
                   "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
                   "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_ROWS), "n"((int)B_ROWS));
}

/* The same, 64 deep: a and b are panels, or the part of one where the columns begin. */
template <bool A_ROWS, bool B_ROWS, int T>
static __device__ __forceinline__ void product(float (&d)[T][4], uint32_t a, uint32_t b, bool add)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        step<A_ROWS, B_ROWS>(d, operand_at(a + k * (A_ROWS ? STEP / 16 : 2)), operand_at(b + k * (B_ROWS ? STEP / 16 : 2)),
                             add || k > 0);
    }
}

/* d += the warpgroup's columns of q, k and v, 64 deep: W_qkv lies as slices of 64 rows by 16 columns, rows of 32 bytes whose halves
 * are exchanged by the row's number / 4 modulo 2, q's 64 columns, k's, v's. */
static __device__ __forceinline__ void product_slices(float (&d)[6][4], uint32_t a, uint32_t b)
{
    b = (b & 0x3fff) | (PANEL >> 4) << 16; /* from q's columns to k's, to v's */
#pragma unroll
    for (int k = 0; k < 4; k++) {
        step_slices(d, operand_at(a + k * 2), (uint64_t)(256 >> 4 | 3u << 30) << 32 | (b + k * (16 * 32 / 16)));
    }
}

/* The values are in their registers now: no product under way meets a move of them. */
template <int T> static __device__ __forceinline__ void settle(float (&d)[T][4])
{
#pragma unroll
    for (int t = 0; t < T; t++) {
        asm volatile("" : "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])::"memory");
    }
}

/* Before a batch of products with these sums. Operands' addresses are found anew: kept for all of the kernel they would fill the
 * registers. */
template <typename... SUMS> static __device__ __forceinline__ void products_begin(wide_place &at, SUMS &...sums)
{
    at.refresh();
    (settle(sums), ...);
    ps_wgmma_begin();
}

/* Until at most PENDING batches are under way, these sums' not among them. */
template <int PENDING, typename... SUMS> static __device__ __forceinline__ void products_wait(SUMS &...sums)
{
    ps_wgmma_wait<PENDING>();
    (settle(sums), ...);
}

/* All the block's stores to shared memory are seen by all, wgmma too. */
static __device__ __forceinline__ void publish()
{
    ps_publish();
    __syncthreads();
}

/* ---- panels ---- */

/* The weights as panels: [layers][panels][64 rows][64 columns] of a matrix; W_qkv forward as slices of 16 columns (product_slices).
 */
struct weight_panels {
    CUtensorMap qkv, o, w_1, w_2;
};

/* Begins to copy layer l's PANELS panels; by one thread. The barrier's phase ends when they are there. */
template <int PANELS>
static __device__ __forceinline__ void fetch_panels(const char *to, const CUtensorMap &from, int l, uint32_t barrier)
{
    ps_mbarrier_expect(barrier, PANELS * PANEL);
    ps_tensor_copy4(ps_shared_address(to), &from, 0, 0, 0, l, barrier);
}

/* Layer's vectors in shared memory, in order: b_qkv, b_o, b_2, ln1 gamma, beta, ln2 gamma, beta, b_1. */
enum { B_QKV = 0, B_O = 3 * D, B_2 = 4 * D, LN1_GAMMA = 5 * D, LN1_BETA = 6 * D, LN2_GAMMA = 7 * D, LN2_BETA = 8 * D, B_1 = 9 * D };

static __host__ __device__ constexpr int vector_floats(int f)
{
    return 9 * D + f;
}

static __device__ __forceinline__ void stage_vectors(const struct small &x, float *to, int f)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x * 4; i < vector_floats(f); i += THREADS * 4) {
        const int64_t of = i < B_O         ? x.at.b_qkv + i
                           : i < B_2       ? x.at.b_o + i - B_O
                           : i < LN1_GAMMA ? x.at.b_2 + i - B_2
                           : i < LN1_BETA  ? x.at.ln1_gamma + i - LN1_GAMMA
                           : i < LN2_GAMMA ? x.at.ln1_beta + i - LN1_BETA
                           : i < LN2_BETA  ? x.at.ln2_gamma + i - LN2_GAMMA
                           : i < B_1       ? x.at.ln2_beta + i - LN2_BETA
                                           : x.at.b_1 + i - B_1;
#pragma unroll 1
        for (int l = 0; l < x.layers; l++) {
            ps_copy_async(to + l * vector_floats(f) + i, x.parameters + l * x.at.vector_stride + of);
        }
    }
}

/* Shared memory: panels of W_qkv (3), W_o, W_1 and W_2 (f / 64 each), the working ones, hidden scores' table, statistics, backward
 * column sums [2][units][2][64], the vectors of all layers, backward their rows' 1 / deviation [layers][2][64]. */
enum { STATISTICS = 2 * 4 * 16 * 8, COLUMN_SUMS = 2 * UNITS * 2 * D * 4, RSTD = 2 * 64 * 4 };

/* Beside it, of copies: bytes, as many as either direction has. */
enum { BARRIERS = 4 * 8 };

static __host__ __device__ constexpr int panels_of(int p, bool backward)
{
    return 4 + 2 * p + (backward ? 6 + p : 2 + p);
}

static size_t shared_bytes(int f, int64_t layers, bool backward)
{
    return (size_t)panels_of(f / 64, backward) * PANEL + TABLE_BYTES + UNITS * STATISTICS + (backward ? COLUMN_SUMS : 0) +
           (size_t)layers * ((size_t)vector_floats(f) * 4 + (backward ? RSTD : 0));
}

/* ---- rows ---- */

/* Two neighbours of row g and of row g + 8, and again 8 columns on, as they lie in memory. */
#ifdef PS_COMPILE_HALVES
static __device__ __forceinline__ void fetch_rows(float (&v)[2][4], const float *from, const narrow_place &at)
{
    load_rows<D, 1>(v, from, at);
}

/* Rows as they came. */
static __device__ __forceinline__ void unpack_operand(float (&x)[2][4], const float (&v)[2][4])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i / 4][i % 4] = v[i / 4][i % 4];
    }
}

typedef float stream_rows[2][4];

/* Gradients are multiplied with the power of two that brings dy's largest element, whose bits are `peak`, to 1 .. 2; back: by its
 * reciprocal. */
static __device__ __forceinline__ float gradient_range(const unsigned *peak, bool back)
{
    const int exponent = max(-120, min(120, 127 - (int)(__ldcg(peak) >> 23)));
    return __int_as_float(((back ? -exponent : exponent) + 127) << 23);
}
#else
static __device__ __forceinline__ void fetch_rows(uint32_t (&v)[4], const real16 *from, const narrow_place &at)
{
    const real16 *p = from + at.first * D + at.share * 16 + at.q * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = at.here[i % 2] ? *(const uint32_t *)(p + i % 2 * 8 * D + i / 2 * 8) : 0;
    }
}

typedef uint32_t stream_rows[4];

static __device__ __forceinline__ float gradient_range(const unsigned *, bool)
{
    return 1.0f;
}
#endif

static __device__ __forceinline__ void scale_rows(float (&v)[2][4], float by)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] *= by;
    }
}

/* y = a b', b [16 rows, 16] in registers as it lies. */
static __device__ __forceinline__ void times_transposed(float (&y)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                                        const float (&c0)[4], const float (&c1)[4])
{
    ps_mma16(y[0], a, b[0], b[2], c0);
    ps_mma16(y[1], a, b[1], b[3], c1);
}

/* y = a b, b [16 rows, 16] in registers as it lies. */
static __device__ __forceinline__ void times(float (&y)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4])
{
    const float zero[4] = {0, 0, 0, 0};
    ps_mma16(y[0], a, ps_movmatrix(b[0]), ps_movmatrix(b[1]), zero);
    ps_mma16(y[1], a, ps_movmatrix(b[2]), ps_movmatrix(b[3]), zero);
}

/* The operand a'. */
static __device__ __forceinline__ void transpose_operand(uint32_t (&y)[4], const uint32_t (&a)[4])
{
    y[0] = ps_movmatrix(a[0]);
    y[1] = ps_movmatrix(a[2]);
    y[2] = ps_movmatrix(a[1]);
    y[3] = ps_movmatrix(a[3]);
}

/* ---- forward ---- */

/* What weight gradients are made of, of each layer for each 64 rows, in panels, as backward names them: E's first two, M, E's
 * others; H's first two, G, H's others; the gradients of q and k, N, that of v, merged, K. So what a pair of products needs lies
 * together. Forward leaves M, H, N and merged, backward the others. */
static __host__ __device__ constexpr int kept_panels(int p)
{
    return 8 + 2 * p;
}

/* Where M or G stands among E or H, and where H and the gradient of q begin. */
enum { KEPT_MIDDLE = 2 };

static __host__ __device__ constexpr int kept_hidden(int p)
{
    return p + 1;
}

static __host__ __device__ constexpr int kept_attention(int p)
{
    return 2 * p + 2;
}

static __device__ __forceinline__ char *kept_at(const struct small &x, int group, int l)
{
    return x.operands + ((int64_t)group * x.layers + l) * (kept_panels(x.f / 64) * PANEL);
}

/* Those from `first` on to global memory, behind the thread's back. */
static __device__ __forceinline__ void store_panels(char *kept, int first, const char *memory, int from, int panels)
{
    ps_bulk_store(kept + first * PANEL, ps_shared_address(memory + from * PANEL), (uint32_t)panels * PANEL);
}

/* The same of the P panels of E or H, around the one in their middle. */
template <int P> static __device__ __forceinline__ void store_around(char *kept, int first, const char *memory, int from)
{
    store_panels(kept, first, memory, from, KEPT_MIDDLE);
    if (P > KEPT_MIDDLE) {
        store_panels(kept, first + KEPT_MIDDLE + 1, memory, from + KEPT_MIDDLE, P - KEPT_MIDDLE);
    }
}

/* What forward leaves of the warp's own for backward, operands: q, k, v, LN1's xhat, LN2's. */
enum { LEFT_Q, LEFT_K, LEFT_V, LEFT_1, LEFT_2, LEFT };

static __device__ __forceinline__ uint4 *left_at(const struct small &x, int group, int l, int which)
{
    return x.left + (((int64_t)group * x.layers + l) * LEFT + which) * THREADS + threadIdx.x;
}

static __device__ __forceinline__ void leave_own(uint4 *to, const uint32_t (&a)[4])
{
    *to = make_uint4(a[0], a[1], a[2], a[3]);
}

static __device__ __forceinline__ void take_own(uint32_t (&a)[4], const uint4 *from)
{
    const uint4 v = *from;
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
}

/* Of LayerNorm `which` of all, for backward; one of the warps that share the rows does it. */
static __device__ __forceinline__ void keep_rstd(const struct small &x, int which, int share, const float (&rstd)[2],
                                                 const wide_place &at)
{
    if (x.rstd && at.share == share && at.q == 0) {
        float *const to = x.rstd + which * x.rows + at.first;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (at.here[h]) {
                to[8 * h] = rstd[h];
            }
        }
    }
}

/* A unit's windows are gathered where its rows of a panel will lie. */
enum { WINDOW_FLOATS = 16 * 128 / 4 };

/* Counters: tickets of products' jobs taken, products' jobs done and parts of W_h's gradient, blocks that wait for nothing any
 * more, tickets of slices taken; the place in the order of windows that a forward expects of the next one, 8 bytes, or, where the
 * embedding is not asked for, encoder/resident/d64_short_tf32.cu's peak; then flags [layers, groups]. */
enum { TICKETS, DONE, ENDED, SLICE_TICKETS, AHEAD, PEAK = AHEAD, FLAGS = 6 };

/* The thread's of the unit's first values, and of the block's forecasts: sequence thread / H from u0 on, column thread % H. NAN
 * where there is none. */
struct early {
    float value, target;
};

static __device__ __forceinline__ void fetch_early(struct early &e, const struct small &x, int64_t u0, uint64_t cursor,
                                                   const wide_place &at)
{
    const struct small_embedding &m = x.embed;
    const uint32_t first = (uint32_t)u0 * m.sequences;
    const int i = at.share * 32 + at.lane, s = (int)ps_divide(i, m.by_length);
    const float *value = window_at(x, m.windows, cursor, s < m.sequences ? first + at.unit * m.sequences + s : m.all);
    value = value ? value + (i - s * m.length) * m.windows.by_time : NULL;
    const float *target = NULL;
    if (x.head.weight) {
        const int of = (int)threadIdx.x / x.head.horizon, column = (int)threadIdx.x - of * x.head.horizon;
        target = window_at(x, x.head.targets, cursor, of < UNITS * m.sequences ? first + of : m.all);
        target = target ? target + column * x.head.targets.by_time : NULL;
    }
    e.value = *(value ? value : m.windows.data);
    e.target = *(target ? target : m.windows.data);
    e.value = value ? e.value : NAN;
    e.target = target ? e.target : NAN;
}

/* Mean and deviation of the unit's windows, a window a warp. */
static __device__ __forceinline__ void embed_scales(float2 *scales, const float *values, const struct small &x,
                                                    const wide_place &at)
{
    const struct small_embedding &e = x.embed;
#pragma unroll 1
    for (int s = at.share; s < e.sequences; s += sharing(D)) {
        float mean = 0.0f, deviation = 1.0f;
        if (e.revin) {
            ps_window_statistics<1, true>(values + s * e.length, e.length, e.epsilon, mean, deviation);
        }
        if (at.lane == 0) {
            scales[s] = make_float2(mean, deviation);
        }
    }
}

template <int P, bool DROP>
static __global__ void __launch_bounds__(THREADS, 1)
    wide_forward(const __grid_constant__ struct small x, const __grid_constant__ struct weight_panels panels)
{
    extern __shared__ __align__(1024) char memory[];
    __shared__ uint64_t barriers[4];
    constexpr int F = P * 64;
    enum { W_QKV = 0, W_O = 3, W_1 = 4, W_2 = 4 + P, A = 4 + 2 * P, M, H }; /* panels */
    float4 *const table = (float4 *)(memory + panels_of(P, false) * PANEL);
    wide_place at(memory);
    char *const statistics = memory + panels_of(P, false) * PANEL + TABLE_BYTES + at.unit * STATISTICS;
    float *const all_vectors = (float *)(memory + panels_of(P, false) * PANEL + TABLE_BYTES + UNITS * STATISTICS);
    const struct sizes z = {F, 16, F, DROP};
    uint64_t now = 0, cursor = 0;
    uint32_t rows[4];
#ifdef PS_COMPILE_HALVES
    stream_rows given; /* the embedding is not asked for */
#else
    stream_rows &given = rows;
#endif
    /* The windows that are expected, before the kernel before has ended: no kernel writes what they depend on. */
    const bool expects = x.embed.weight && x.left;
    struct early early = {};
    uint64_t *const ahead = (uint64_t *)(x.arrived + AHEAD);
    const int64_t u0 = (int64_t)blockIdx.x * UNITS;
    if (expects) {
        cursor = *ahead;
    }
    float *const values = (float *)(memory + A * PANEL) + at.unit * WINDOW_FLOATS;
    float2 *const scales = statistics_at<D, 1>(statistics, 0, at);
    fill_table<D, 1>(table, x.n, at);
    real16 *const head = (real16 *)(memory + x.head.at);
    /* Of W_qkv, W_o, W_1, W_2; one thread asks for all. */
    const uint32_t came = ps_shared_address(barriers);
    const bool asks = threadIdx.x == 32;
    uint32_t parity = 0;
    if (asks) {
        for (int i = 0; i < 4; i++) {
            ps_mbarrier_init(came + i * 8, 1);
        }
        ps_mbarrier_publish();
        ps_tensor_prefetch(&panels.qkv);
        ps_tensor_prefetch(&panels.o);
        ps_tensor_prefetch(&panels.w_1);
        ps_tensor_prefetch(&panels.w_2);
    }
    const int groups = (int)((x.units + UNITS - 1) / UNITS);
#pragma unroll 1
    for (int group = (int)blockIdx.x; group < groups; group += (int)gridDim.x) {
        const bool more = group + (int)gridDim.x < groups, first = group == (int)blockIdx.x;
        const int64_t unit = (int64_t)group * UNITS + at.unit;
        struct embed_ready ready;
        int sequence[2], n[2];
        uint32_t patches[4];
        float centre[2], factor[2];
        at.take(x, unit);
        embed_places<D, 1>(sequence, n, x, at);
        /* Round 0: the windows that are expected. Round 1: all else, and the windows if they are others. */
#pragma unroll 1
        for (int round = first && expects ? 0 : 1;; round++) {
            if (round == 1) {
                if (first) {
                    ps_grid_begin();
                    if (asks) {
                        fetch_panels<3>(memory + W_QKV * PANEL, panels.qkv, 0, came);
                        fetch_panels<1>(memory + W_O * PANEL, panels.o, 0, came + 8);
                        fetch_panels<P>(memory + W_1 * PANEL, panels.w_1, 0, came + 16);
                    }
                    now = DROP ? x.state->step : 0;
                }
                if (x.embed.weight) {
                    embed_begin<D, 1, DROP>(ready, n, x, now, at);
                } else {
                    fetch_rows(given, x.u, at);
                }
                if (first) {
                    stage_vectors(x, all_vectors, F);
                    if (x.head.weight) {
                        stage_wide_head(x, head);
                    }
                }
                if (!x.embed.weight || (first && expects && ready.cursor == cursor)) {
                    break;
                }
                cursor = ready.cursor;
            }
            if (first) {
                fetch_early(early, x, u0, cursor, at);
                values[at.share * 32 + at.lane] = early.value;
            }
            gather_windows<D, 1>(values, x, unit, cursor, first ? THREADS / UNITS : 0, at);
            at.sync();
            embed_scales(scales, values, x, at);
            at.sync();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 v = scales[at.here[h] ? sequence[h] : 0];
                centre[h] = v.x;
                factor[h] = 1.0f / v.y;
            }
            patch_operand<D, 1>(patches, 0, values, sequence, n, centre, factor, x, at);
            if (round == 1) {
                break;
            }
            at.sync(); /* the values may be others yet */
        }
        if (x.embed.weight) {
            const uint32_t of = (uint32_t)unit * x.embed.sequences + at.lane;
            if (at.share == 0 && at.lane < x.embed.sequences && of < x.embed.all) {
                x.embed.mean[of] = scales[at.lane].x;
                x.embed.std[of] = scales[at.lane].y;
            }
            embed_product<D, 1, DROP>(rows, patches, ready.sum, ready.weight, ready.bits, values, sequence, n, centre, factor, x,
                                      at);
        }
        ps_copy_wait(); /* vectors, W_h */
        __syncthreads();
        float u[2][4];
        unpack_operand(u, given);
#pragma unroll 1
        for (int l = 0; l < x.layers; l++) {
            const float *const vectors = all_vectors + l * vector_floats(F);
            const float *const own_vectors = vectors + at.share * 16;
            uint32_t *const keep = DROP && x.masks && at.global_tile < x.units ? masks_at<D, 1>(x, z, l, at) : NULL;
            /* What takes the place of this layer's weights: the next layer's, or the first one's for the next units. */
            const bool stage = l + 1 < x.layers || more;
            const int next = l + 1 < x.layers ? l + 1 : 0;
            /* By the first thread, when there will be a backward; and before what lies in the panels is overwritten. */
            const auto leave = [&](int panel, int from) {
                if (x.left && threadIdx.x == 0) {
                    store_panels(kept_at(x, group, l), panel, memory, from, 1);
                }
            };
            const auto left = [&]() {
                if (x.left && threadIdx.x == 0) {
                    ps_bulk_wait_read();
                }
            };
            uint32_t a[4];
            float rstd[2], xhat[2][4], own[2][4];
            normalise<D, 1>(xhat, rstd, u, x.epsilon, statistics_at<D, 1>(statistics, 0, at), at);
            scale_shift(a, xhat, own_vectors + LN1_GAMMA, own_vectors + LN1_BETA, at.q);
            ps_stmatrix4_at(at.own() + A * PANEL, a);
            publish();
            leave(kept_attention(P) + 2, A);
            if (asks) {
                fetch_panels<P>(memory + W_2 * PANEL, panels.w_2, l, came + 24);
            }
            ps_mbarrier_wait(came, parity);

            /* merged = softmax(q k' / sqrt(e)) v */
            {
                float qkv[6][4], p[2][4], sum[4], most[2];
                uint32_t rows[4], others[4];
#pragma unroll
                for (int t = 0; t < 6; t++) {
                    const float2 b = *(const float2 *)(own_vectors + B_QKV + t / 2 * D + t % 2 * 8 + at.q * 2);
                    qkv[t][0] = qkv[t][2] = b.x;
                    qkv[t][1] = qkv[t][3] = b.y;
                }
                products_begin(at, qkv);
                product_slices(qkv, at.of(A), at.of(W_QKV) + (uint32_t)at.share * (64 * 32 / 16));
                ps_wgmma_commit();
                const float4 low = table[at.lane], high = table[32 + at.lane];
                const float hidden0[4] = {low.x, low.y, low.z, low.w}, hidden1[4] = {high.x, high.y, high.z, high.w};
                if (x.left) { /* stores and sums that the products hide */
                    pack_operand(rows, xhat[0], xhat[1]);
                    leave_own(left_at(x, group, l, LEFT_1), rows);
                    keep_rstd(x, 2 * l, 0, rstd, at);
                }
                products_wait<0>(qkv);
                pack_operand(rows, qkv[0], qkv[1]);
                pack_operand(others, qkv[2], qkv[3]);
                times_transposed(p, rows, others, hidden0, hidden1);
                if (x.left) {
                    leave_own(left_at(x, group, l, LEFT_Q), rows);
                    leave_own(left_at(x, group, l, LEFT_K), others);
                }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    most[r] = fmaxf(fmaxf(p[0][2 * r], p[0][2 * r + 1]), fmaxf(p[1][2 * r], p[1][2 * r + 1]));
                    most[r] = quad_max(most[r]) * x.scale_log2e;
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    p[i / 4][i % 4] = ps_exp2(fmaf(p[i / 4][i % 4], x.scale_log2e, -most[i % 4 / 2]));
                }
                pack_operand(rows, p[0], p[1]);
                pack_operand(others, qkv[4], qkv[5]);
                times(own, rows, others);
                if (x.left) {
                    leave_own(left_at(x, group, l, LEFT_V), others);
                }
                sum[0] = sum[1] = sum[2] = sum[3] = 0;
                add_ones(sum, rows);
                const float scale[2] = {__fdividef(1.0f, sum[0]), __fdividef(1.0f, sum[2])};
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    own[i / 4][i % 4] *= scale[i % 4 / 2];
                }
                pack_operand(a, own[0], own[1]);
                ps_stmatrix4_at(at.own() + M * PANEL, a);
                if (x.lse && at.q == 0) {
                    float *lse = x.lse + ((int64_t)l * x.heads + at.share) * x.rows + at.first;
                    if (at.here[0]) {
                        lse[0] = most[0] + ps_log2(sum[0]);
                    }
                    if (at.here[1]) {
                        lse[8] = most[1] + ps_log2(sum[2]);
                    }
                }
            }

            /* u = r = u + drop(merged W_o + b_o) */
            left();
            publish();
            leave(kept_attention(P) + 4, M);
            if (asks && stage) {
                fetch_panels<3>(memory + W_QKV * PANEL, panels.qkv, next, came);
            }
            ps_mbarrier_wait(came + 8, parity);
            set_bias(own, own_vectors + B_O, at.q);
            products_begin(at, own);
            product<false, true>(own, at.of(M), at.of(W_O) + at.columns(), true);
            ps_wgmma_commit();
            uint32_t bits = 0xffffffffu;
            if (DROP) {
                bits = new_masks<D, 1>(x, now, 3 * l, D, at.share * 16, keep ? keep + at.share * 8 : NULL, at);
            }
            products_wait<0>(own);
            add_kept(u, own, bits, x.drop_scale);

            /* u = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2) */
            normalise<D, 1>(xhat, rstd, u, x.epsilon, statistics_at<D, 1>(statistics, 1, at), at);
            scale_shift(a, xhat, own_vectors + LN2_GAMMA, own_vectors + LN2_BETA, at.q);
            ps_stmatrix4_at(at.own() + A * PANEL, a);
            publish();
            leave(KEPT_MIDDLE, A);
            if (asks && stage) {
                fetch_panels<1>(memory + W_O * PANEL, panels.o, next, came + 8);
            }
            ps_mbarrier_wait(came + 16, parity);
            {
                float y[8][4];
                uint32_t drawn[4];
#pragma unroll
                for (int t = 0; t < 8; t++) {
                    const float2 b = *(const float2 *)(vectors + B_1 + at.mine<P>() * 64 + t * 8 + at.q * 2);
                    y[t][0] = y[t][2] = b.x;
                    y[t][1] = y[t][3] = b.y;
                }
                products_begin(at, y);
                product<false, true>(y, at.of(A), at.of(W_1 + at.mine<P>()), true);
                ps_wgmma_commit();
                if (x.left) {
                    pack_operand(a, xhat[0], xhat[1]);
                    leave_own(left_at(x, group, l, LEFT_2), a);
                    keep_rstd(x, 2 * l + 1, 1, rstd, at);
                }
                if (DROP) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int column = at.mine<P>() * 64 + i * 16;
                        drawn[i] = new_masks<D, 1>(x, now, 3 * l + 1, F, column, keep ? keep + D / 2 + column / 2 : NULL, at);
                    }
                }
                products_wait<0>(y);
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    float &v = y[i / 4][i % 4];
                    v = fmaf(v, ps_tanh(v * fmaf(v * v, GELU_B, GELU_A)), v);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    pack_operand(a, y[2 * i], y[2 * i + 1]);
                    if (DROP) {
                        drop_operand(a, drawn[i]);
                    }
                    ps_stmatrix4_at((at.wide ^ i * 32) + (H + at.mine<P>()) * PANEL, a);
                }
            }
            left();
            publish();
            if (x.left && threadIdx.x == 0) {
                store_around<P>(kept_at(x, group, l), kept_hidden(P), memory, H);
            }
            if (asks && stage) {
                fetch_panels<P>(memory + W_1 * PANEL, panels.w_1, next, came + 16);
            }
            ps_mbarrier_wait(came + 24, parity);
            parity ^= 1;
            products_begin(at, own);
#pragma unroll
            for (int i = 0; i < P; i++) {
                product<false, true>(own, at.of(H + i), at.of(W_2 + i) + at.columns(), i > 0);
            }
            ps_wgmma_commit();
            if (DROP) {
                const int chunk = D / 16 + F / 16 + at.share;
                bits = new_masks<D, 1>(x, now, 3 * l + 2, D, at.share * 16, keep ? keep + chunk * 8 : NULL, at);
            }
            set_bias(xhat, own_vectors + B_2, at.q);
            products_wait<0>(own);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                own[i / 4][i % 4] = fmaf(own[i / 4][i % 4], x.half_scale, xhat[i / 4][i % 4]);
            }
            add_kept(u, own, bits, x.drop_scale);
            if (l + 1 == x.layers) {
                store_rows<D, 1>(x.u + x.layers * x.rows * D, u, at);
            }
        }
        if (x.head.weight) {
            head_wide(u, x, (float *)(memory + A * PANEL), head, u0, early.target, at); /* A and M are free */
        }
    }
    if (threadIdx.x == 0 && x.left) {
        ps_bulk_wait_read();
        if (expects && blockIdx.x == 0) {
            *ahead = cursor + ps_divide(x.embed.all, x.embed.by_channels);
        }
    }
}

/* ---- backward ---- */

/* The thread's stores so far, but for the last PENDING, can be seen by wide_weights: 1 those of the feed-forward, 2 all of the
 * layer. */
template <int PENDING> static __device__ __forceinline__ void announce(unsigned *flag, unsigned stage)
{
    ps_bulk_wait<PENDING>();
    asm volatile("fence.proxy.async.global;\nst.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(stage) : "memory");
}

/* What the warp's rows add to gamma's and beta's gradients: [2][64] of the unit. */
static __device__ __forceinline__ void norm_sums(float *to, const float (&dx)[2][4], const uint32_t (&xhat)[4],
                                                 const wide_place &at)
{
    float v[2][2][2]; /* gamma or beta, tile, column */
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float low = i ? ps_high(xhat[2 * t]) : ps_low(xhat[2 * t]);
            const float high = i ? ps_high(xhat[2 * t + 1]) : ps_low(xhat[2 * t + 1]);
            v[0][t][i] = dx[t][i] * low + dx[t][2 + i] * high;
            v[1][t][i] = dx[t][i] + dx[t][2 + i];
        }
    }
    /* Over the rows: lanes give away half of their values at each step, so that each is left with one. */
    const bool beta = at.lane & 16, right = at.lane & 8, odd = at.lane & 4;
    float w[2][2], y[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float give = beta ? v[0][i / 2][i % 2] : v[1][i / 2][i % 2];
        const float keep = beta ? v[1][i / 2][i % 2] : v[0][i / 2][i % 2];
        w[i / 2][i % 2] = keep + __shfl_xor_sync(0xffffffffu, give, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float give = right ? w[0][i] : w[1][i], keep = right ? w[1][i] : w[0][i];
        y[i] = keep + __shfl_xor_sync(0xffffffffu, give, 8);
    }
    const float give = odd ? y[0] : y[1], keep = odd ? y[1] : y[0];
    to[(beta ? D : 0) + at.share * 16 + (right ? 8 : 0) + at.q * 2 + odd] = keep + __shfl_xor_sync(0xffffffffu, give, 4);
}

/* gamma's and beta's sums over the units. */
static __device__ __forceinline__ void put_norm_sums(float *to, const float *from)
{
    if (threadIdx.x < 2 * D) {
        float sum = from[threadIdx.x];
#pragma unroll
        for (int u = 1; u < UNITS; u++) {
            sum += from[u * 2 * D + threadIdx.x];
        }
        to[threadIdx.x] = sum;
    }
}

/* 1 / deviation of a group's rows; zero for those that do not exist. */
static __device__ __forceinline__ void stage_rstd(float *to, const struct small &x, int group)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < x.layers * 128; i += THREADS) {
        const int64_t unit = (int64_t)group * UNITS + i % 64 / 16, row = unit * x.unit_rows + i % 16;
        const bool here = unit < x.units && i % 16 < x.unit_rows && row < x.rows;
        to[i] = here ? x.rstd[i / 64 * x.rows + row] : 0.0f;
    }
}

/* The operand scale * g, zero where dropped. */
template <bool DROP>
static __device__ __forceinline__ void branch_operand(uint32_t (&a)[4], const float (&g)[2][4], float scale, uint32_t bits)
{
    float v[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] = g[i / 4][i % 4] * scale;
    }
    pack_operand(a, v[0], v[1]);
    if (DROP) {
        drop_operand(a, bits);
    }
}

/* Begins to fill a panel for the block's units from `unit` on: a row's patch, a one, and a one for its place in the sequence. */
static __device__ __forceinline__ void stage_embed_panel(char *panel, const struct small &x, int64_t unit)
{
    const int row = (int)threadIdx.x / 8, piece = (int)threadIdx.x % 8, i = row % 16;
    unit += row / 16;
    const int64_t from = unit * x.unit_rows + i;
    const bool here = unit < x.units && i < x.unit_rows && from < x.rows;
    stage_patch((real16 *)(panel + row * 128 + (piece ^ (row & 7)) * 16), here ? x.embed.patches + from * x.embed.patch : NULL,
                piece, x.embed.patch, i % x.n);
}

/* The panel's columns' du: [P + 1 + N, d] of the block, to or onto its sums. */
static __device__ __forceinline__ void embed_gradient_panels(const struct small &x, wide_place &at, uint32_t panel, uint32_t du,
                                                             bool first)
{
    const int rows = embed_rows_of(x.embed.patch, x.n);
    float c[2][4];
    products_begin(at, c);
    product<true, true>(c, panel, du, false);
    ps_wgmma_commit();
    products_wait<0>(c);
    float *const to = x.embed.partial + (int64_t)blockIdx.x * (rows * D) + at.share * 16 + at.q * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = at.unit * 16 + at.g + 8 * h;
        if (row < rows) {
            add_pair(to + row * D, c[0][2 * h], c[0][2 * h + 1], x.drop_scale, first);
            add_pair(to + row * D + 8, c[1][2 * h], c[1][2 * h + 1], x.drop_scale, first);
        }
    }
}

template <int P, bool DROP>
static __global__ void __launch_bounds__(THREADS, 1)
    wide_backward(const __grid_constant__ struct small x, const __grid_constant__ struct weight_panels panels)
{
    extern __shared__ __align__(1024) char memory[];
    __shared__ uint64_t barriers[3];
    constexpr int F = P * 64;
    /* Panels. M: LN2's output. G, K: the gradient that enters W_2, W_o. H: the gradients of q, k, v. E: of hidden. */
    enum { W_QKV = 0, W_O = 3, W_1 = 4, W_2 = 4 + P, M = 4 + 2 * P, G, K, H, E = H + 3 };
    float4 *const table = (float4 *)(memory + panels_of(P, true) * PANEL);
    wide_place at(memory);
    char *const statistics = memory + panels_of(P, true) * PANEL + TABLE_BYTES + at.unit * STATISTICS;
    float *const column_sums = (float *)(memory + panels_of(P, true) * PANEL + TABLE_BYTES + UNITS * STATISTICS);
    float *const all_vectors = column_sums + COLUMN_SUMS / 4;
    float *const all_rstd = all_vectors + x.layers * vector_floats(F);
    float *const norms = column_sums + at.unit * 2 * D;
    const struct sizes z = {F, 16, F, DROP};
    stream_rows gradient; /* of y */
    uint32_t after[4];    /* LN2's xhat of the layer that comes */
    /* Of W_1 and W_2, W_qkv and W_o, M; one thread asks for all. */
    const uint32_t came = ps_shared_address(barriers);
    const bool asks = threadIdx.x == 32;
    uint32_t parity = 0;
    const auto fetch_feed_forward = [&](int l) {
        ps_mbarrier_expect(came, 2 * P * PANEL);
        ps_tensor_copy4(ps_shared_address(memory) + W_1 * PANEL, &panels.w_1, 0, 0, 0, l, came);
        ps_tensor_copy4(ps_shared_address(memory) + W_2 * PANEL, &panels.w_2, 0, 0, 0, l, came);
    };
    const auto fetch_normalised = [&](int group, int l) {
        ps_mbarrier_expect(came + 16, PANEL);
        ps_bulk_fetch(ps_shared_address(memory) + M * PANEL, kept_at(x, group, l) + KEPT_MIDDLE * PANEL, PANEL, came + 16);
    };
    if (x.fresh) {
        ps_grid_begin();
    }
    if (asks) {
        for (int i = 0; i < 3; i++) {
            ps_mbarrier_init(came + i * 8, 1);
        }
        ps_mbarrier_publish();
        fetch_feed_forward(x.layers - 1);
    }
    stage_vectors(x, all_vectors, F);
    fill_table<D, 1>(table, x.n, at);
    /* Nothing of this block's is there yet: wide_weights, whose blocks may begin once all of these have, must find that. */
    const int groups = (int)((x.units + UNITS - 1) / UNITS);
    if (threadIdx.x < 32) {
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < x.layers; i += 32) {
#pragma unroll 1
            for (int group = (int)blockIdx.x; group < groups; group += (int)gridDim.x) {
                x.flags[(int64_t)i * groups + group] = 0;
            }
        }
        __threadfence();
    }
    __syncthreads();
    ps_grid_begin();
#pragma unroll 1
    for (int group = (int)blockIdx.x; group < groups; group += (int)gridDim.x) {
        const bool more = group + (int)gridDim.x < groups;
        at.take(x, (int64_t)group * UNITS + at.unit);
        if (asks) {
            fetch_normalised(group, x.layers - 1);
        }
        fetch_rows(gradient, x.dy, at);
        take_own(after, left_at(x, group, x.layers - 1, LEFT_2));
        stage_rstd(all_rstd, x, group);
        ps_copy_wait(); /* vectors */
        __syncthreads();
        float g[2][4];
        unpack_operand(g, gradient);
        scale_rows(g, gradient_range(x.arrived + PEAK, false));
#pragma unroll 1
        for (int l = x.layers - 1; l >= 0; l--) {
            const float *const vectors = all_vectors + l * vector_floats(F), *const own_vectors = vectors + at.share * 16;
            /* What the first thread leaves of the layer. */
            const auto kept = [&]() { return kept_at(x, group, l); };
            const auto norms_to = [&](int layer) { return x.norms + ((int64_t)group * x.layers + layer) * (4 * D); };
            const float *const own_rstd = all_rstd + 2 * l * 64 + at.unit * 16 + at.g; /* LN1's rows; LN2's 64 further */
            /* Units beyond the last read some masks: their gradients are zero. */
            const uint32_t *const masks = !DROP ? NULL : at.global_tile < x.units ? masks_at<D, 1>(x, z, l, at) : x.masks + at.g;
            uint32_t xhat[4], a[4];
            float rstd[2], dx[2][4], v[2][4];

            /* y = r + drop(hidden W_2 + b_2) */
            branch_operand<DROP>(a, g, x.drop_scale * x.half_scale, DROP ? masks[(D / 16 + F / 16 + at.share) * 8] >> at.q : 0);
            ps_stmatrix4_at(at.own() + G * PANEL, a);
            publish();
            if (threadIdx.x == 0) {
                store_panels(kept(), kept_hidden(P) + KEPT_MIDDLE, memory, G, 1);
            }
            if (l + 1 < x.layers) { /* what the layer before left */
                put_norm_sums(norms_to(l + 1), column_sums + UNITS * 2 * D);
            }
            if (asks) {
                ps_mbarrier_expect(came + 8, 4 * PANEL);
                ps_tensor_copy4(ps_shared_address(memory) + W_QKV * PANEL, &panels.qkv, 0, 0, 0, l, came + 8);
                ps_tensor_copy4(ps_shared_address(memory) + W_O * PANEL, &panels.o, 0, 0, 0, l, came + 8);
            }
            ps_mbarrier_wait(came, parity);
            ps_mbarrier_wait(came + 16, parity);
            {
                float y[8][4], c[8][4];
                uint32_t bits[4];
#pragma unroll
                for (int t = 0; t < 8; t++) {
                    const float2 b = *(const float2 *)(vectors + B_1 + at.mine<P>() * 64 + t * 8 + at.q * 2);
                    y[t][0] = y[t][2] = b.x;
                    y[t][1] = y[t][3] = b.y;
                }
                products_begin(at, y, c);
                product<false, true>(y, at.of(M), at.of(W_1 + at.mine<P>()), true);
                product<false, false>(c, at.of(G), at.of(W_2 + at.mine<P>()), false);
                ps_wgmma_commit();
                if (threadIdx.x == 0 && l + 1 < x.layers) {
                    announce<1>(x.flags + (int64_t)(l + 1) * groups + group, 2); /* G's is of this layer */
                }
                if (DROP) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        bits[i] = masks[D / 2 + at.mine<P>() * 32 + i * 8] >> at.q;
                    }
                }
                products_wait<0>(y, c);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint32_t d_hidden[4];
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const float h = y[2 * i + j / 4][j % 4];
                        const float square = h * h, t = ps_tanh(h * fmaf(square, GELU_B, GELU_A)), one = 1.0f + t;
                        c[2 * i + j / 4][j % 4] *= fmaf(h * fmaf(square, 3 * GELU_B, GELU_A), fmaf(-t, t, 1.0f), one);
                    }
                    pack_operand(d_hidden, c[2 * i], c[2 * i + 1]);
                    if (DROP) {
                        drop_operand(d_hidden, bits[i]);
                    }
                    ps_stmatrix4_at((at.wide ^ i * 32) + (E + at.mine<P>()) * PANEL, d_hidden);
                }
            }
            publish();
            if (threadIdx.x == 0) {
                store_around<P>(kept(), 0, memory, E);
            }
            const uint4 x4 = *left_at(x, group, l, LEFT_1);
            products_begin(at, dx);
#pragma unroll
            for (int i = 0; i < P; i++) {
                product<false, false>(dx, at.of(E + i), at.of(W_1 + i) + at.rows(), i > 0);
            }
            ps_wgmma_commit();
            const uint4 q4 = *left_at(x, group, l, LEFT_Q), k4 = *left_at(x, group, l, LEFT_K);
            const uint4 v4 = *left_at(x, group, l, LEFT_V);
            products_wait<0>(dx);
            norm_sums(norms, dx, after, at);
            rstd[0] = own_rstd[64];
            rstd[1] = own_rstd[64 + 8];
            normalise_backward<D, 1>(g, dx, own_vectors + LN2_GAMMA, after, rstd, statistics_at<D, 1>(statistics, 0, at), at);

            /* r = u + drop(merged W_o + b_o) */
            branch_operand<DROP>(a, g, x.drop_scale, DROP ? masks[at.share * 8] >> at.q : 0);
            ps_stmatrix4_at(at.own() + K * PANEL, a);
            float log_sum[2]; /* rows that do not exist see nothing */
            {
                const float *lse = x.lse + ((int64_t)l * x.heads + at.share) * x.rows + at.first;
                log_sum[0] = at.here[0] ? lse[0] : 1e30f;
                log_sum[1] = at.here[1] ? lse[8] : 1e30f;
            }
            if (threadIdx.x == 0 && l > 0) { /* the first layer's: all at once, soon enough, and nobody waits for this thread */
                announce<0>(x.flags + (int64_t)l * groups + group, 1);
            }
            publish();
            if (threadIdx.x == 0) {
                store_panels(kept(), kept_attention(P) + 5, memory, K, 1);
            }
            if (asks && (l > 0 || more)) {
                fetch_feed_forward(l > 0 ? l - 1 : x.layers - 1);
            }
            if (asks && l > 0) {
                fetch_normalised(group, l - 1);
            }
            put_norm_sums(norms_to(l) + 2 * D, column_sums);
            if (l == 0 && x.embed.partial) {
                stage_embed_panel(memory + M * PANEL, x, (int64_t)group * UNITS);
            }
            if (l > 0) {
                take_own(after, left_at(x, group, l - 1, LEFT_2));
            }
            ps_mbarrier_wait(came + 8, parity);
            parity ^= 1;

            /* A = softmax(q k' / sqrt(e)), merged = A v */
            {
                const uint32_t queries[4] = {q4.x, q4.y, q4.z, q4.w}, keys[4] = {k4.x, k4.y, k4.z, k4.w};
                const uint32_t values[4] = {v4.x, v4.y, v4.z, v4.w};
                uint32_t d_merged[4], p_operand[4], operand[4];
                products_begin(at, dx);
                product<false, false>(dx, at.of(K), at.of(W_O) + at.rows(), false);
                ps_wgmma_commit();
                float p[2][4], y[2][4];
                {
                    const float4 low = table[at.lane], high = table[32 + at.lane];
                    const float hidden0[4] = {low.x, low.y, low.z, low.w}, hidden1[4] = {high.x, high.y, high.z, high.w};
                    times_transposed(p, queries, keys, hidden0, hidden1);
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    p[i / 4][i % 4] = ps_exp2(fmaf(p[i / 4][i % 4], x.scale_log2e, -log_sum[i % 4 / 2]));
                }
                pack_operand(p_operand, p[0], p[1]);
                transpose_operand(operand, p_operand);
                products_wait<0>(dx);
                pack_operand(d_merged, dx[0], dx[1]);
                const float zero[4] = {0, 0, 0, 0};
                times_transposed(y, d_merged, values, zero, zero); /* of A */
                times(v, operand, d_merged);                       /* of values */
                pack_operand(a, v[0], v[1]);
                ps_stmatrix4_at(at.own() + (H + 2) * PANEL, a);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float sum = 0;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        sum = fmaf(p[i / 2][2 * r + i % 2], y[i / 2][2 * r + i % 2], sum);
                    }
                    sum = quad_sum(sum);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        y[i / 2][2 * r + i % 2] = p[i / 2][2 * r + i % 2] * (y[i / 2][2 * r + i % 2] - sum);
                    }
                }
                pack_operand(p_operand, y[0], y[1]);
                times(v, p_operand, keys); /* of queries */
                transpose_operand(operand, p_operand);
                times(y, operand, queries); /* of keys */
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    v[i / 4][i % 4] *= x.scale;
                    y[i / 4][i % 4] *= x.scale;
                }
                pack_operand(a, v[0], v[1]);
                ps_stmatrix4_at(at.own() + H * PANEL, a);
                pack_operand(a, y[0], y[1]);
                ps_stmatrix4_at(at.own() + (H + 1) * PANEL, a);
            }
            if (threadIdx.x == 0) {
                ps_bulk_wait_read(); /* M, G, E and K will be written */
            }
            publish();
            if (threadIdx.x == 0) {
                store_panels(kept(), kept_attention(P), memory, H, 2);
                store_panels(kept(), kept_attention(P) + 3, memory, H + 2, 1);
            }
            products_begin(at, dx);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                product<false, false>(dx, at.of(H + i), at.of(W_QKV + i) + at.rows(), i > 0);
            }
            ps_wgmma_commit();
            products_wait<0>(dx);
            take_own(xhat, &x4);
            norm_sums(norms + UNITS * 2 * D, dx, xhat, at);
            rstd[0] = own_rstd[0];
            rstd[1] = own_rstd[8];
            normalise_backward<D, 1>(g, dx, own_vectors + LN1_GAMMA, xhat, rstd, statistics_at<D, 1>(statistics, 1, at), at);
        }
        if (threadIdx.x == 0) {
            announce<0>(x.flags + group, 2);
        }
        if (x.embed.partial) {
            uint32_t a[4];
            embed_operand<D, 1, DROP>(a, g, x, at);
            ps_stmatrix4_at(at.own() + G * PANEL, a);
            ps_copy_wait(); /* the patches */
            publish();
            embed_gradient_panels(x, at, at.of(M), at.of(G) + at.columns(), group == (int)blockIdx.x);
            if (more) { /* M is the copy engine's again */
                publish();
            }
        } else {
            __syncthreads();
            scale_rows(g, gradient_range(x.arrived + PEAK, true));
            store_rows<D, 1>(x.du, g, at);
        }
        put_norm_sums(x.norms + (int64_t)group * x.layers * (4 * D), column_sums + UNITS * 2 * D);
    }
}

/* ---- weight gradients ---- */

enum { STAGES = 6, STAGE = 4 * PANEL, LOADER = THREADS, JOB_FLOATS = 2 * 64 * 64, SLICE = 256, SLICES = JOB_FLOATS / 4 / SLICE };
enum { VECTOR_SLICE = 32 };

static __host__ __device__ constexpr int pairs_of(int p)
{
    return p + 2;
}

static __host__ __device__ constexpr int items_slices(int items)
{
    return (items + VECTOR_SLICE - 1) / VECTOR_SLICE;
}

static __host__ __device__ constexpr int vector_slices(int p)
{
    return items_slices(vector_floats(p * 64) / 4);
}

static __device__ __forceinline__ unsigned look(const unsigned *at)
{
    unsigned seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
    return seen;
}

/* Until the counter has come so far; then what was written before can be read. */
static __device__ __forceinline__ void await_count(const unsigned *counter, unsigned count)
{
    while (look(counter) < count) {
    }
}

/* sum += the column sums of 32 rows: their transpose times ones, every column the same. */
static __device__ __forceinline__ void add_columns(float (&sum)[4], uint32_t rows, uint32_t ones)
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX
                     " {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 1, 0;"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "l"(operand_at(rows + k * (STEP / 16))), "l"(operand_at(ones)));
    }
}

/* A product's job: the gradients of a pair of 64 x 64, over the rows of a split. Pairs: f / 128 of W_1, as many of W_2, W_q and
 * W_k, W_v and W_o. */
struct weight_job {
    int l, pair, split, begin, end; /* groups of 64 rows */

    __device__ __forceinline__ weight_job(const struct small &x, int ticket)
    {
        /* A layer's feed-forward comes first. No divisions: the loader is one warp, for which all of the block wait. */
        const int P = x.f >> 6, products = pairs_of(P) * x.splits; /* P is 2 or 4 */
        for (l = x.layers - 1; ticket >= products; l--) {
            ticket -= products;
        }
        const int later = ticket - P * x.splits;
        pair = later < 0 ? ticket & (P - 1) : P + (later & 1);
        split = later < 0 ? ticket >> (P >> 1) : later >> 1;
        begin = split * x.split_groups + min(split, x.split_more);
        end = begin + x.split_groups + (split < x.split_more);
    }
};

/* It is not waited for until it is used: atomicAdd would be, since the compiler lets one lane add for all. */
static __device__ __forceinline__ int take_ticket(const struct small &x)
{
    int ticket;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(ticket) : "l"(x.arrived + TICKETS) : "memory");
    return ticket;
}

/* What the thread, and those whom it has met at a barrier, wrote before can be read by who sees this. */
static __device__ __forceinline__ void count_up(unsigned *counter, int by)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(by) : "memory");
}

/* Whether the job's operands of up to 32 groups from `group` on are there; AWAIT: until they are. All of the warp. */
template <bool AWAIT>
static __device__ __forceinline__ bool announced(const struct small &x, const struct weight_job &job, int group)
{
    const int lane = (int)threadIdx.x % 32, groups = (int)((x.units + UNITS - 1) / UNITS);
    const unsigned *const flag = x.flags + (int64_t)job.l * groups + group + lane;
    const unsigned wanted = job.pair < x.f / 64 ? 1 : 2;
    unsigned seen = wanted;
    if (group + lane < job.end) {
        do {
            seen = look(flag);
        } while (AWAIT && seen < wanted);
    }
    const bool all = __all_sync(0xffffffffu, seen >= wanted);
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return all;
}

/* The loader's warp: takes tickets and fetches what their jobs need, a stage for 64 rows: three panels that lie together, or four.
 * jobs: the layer, pair, split and groups, in a job's first stage; layer -1: there are no more. At the end it counts the jobs as
 * done. first: lane 0's first ticket. */
static __device__ __forceinline__ void load_products(const struct small &x, const char *memory, uint32_t full, uint32_t empty,
                                                     int4 *jobs, int first)
{
    const int P = x.f / 64, lane = (int)threadIdx.x % 32, all = x.layers * pairs_of(P) * x.splits;
    const int64_t stride = (int64_t)x.layers * (kept_panels(P) * PANEL); /* from group to group */
    const uint32_t stages = ps_shared_address(memory);
    const uint64_t once = ps_cache_once();
    int slot = 0, next = first, taken = 0, ticket = __shfl_sync(0xffffffffu, first, 0);
    uint32_t parity = 1;
    bool ready = false;
    while (ticket < all) {
        taken++;
        const struct weight_job job(x, ticket);
        const uint32_t bytes = (job.pair == P + 1 ? 4 : 3) * PANEL;
        const char *from = kept_at(x, job.begin, job.l) + (2 * job.pair + (job.pair >= P / 2) + (job.pair >= P)) * PANEL;
        if (!ready) {
            announced<true>(x, job, job.begin);
        }
#pragma unroll 1
        for (int i = job.begin; i < job.end; i++, from += stride) {
            if (i > job.begin && (i - job.begin) % 32 == 0) {
                announced<true>(x, job, i);
            }
            if (i == job.end - 1 && i > job.begin) { /* the copy engine still has the stages before */
                ticket = __shfl_sync(0xffffffffu, next, 0);
                ready = ticket < all && announced<false>(x, weight_job(x, ticket), weight_job(x, ticket).begin);
            }
            if (lane == 0) {
                const uint32_t barrier = full + slot * 8;
                ps_mbarrier_wait(empty + slot * 8, parity);
                if (i == job.begin) {
                    jobs[slot] = make_int4(job.l, job.pair, job.split, job.end - job.begin);
                    /* Not before: blocks that begin now would find none left, and this one has two. */
                    next = take_ticket(x);
                }
                ps_mbarrier_expect(barrier, bytes);
                ps_bulk_copy(stages + slot * STAGE, from, bytes, barrier, once);
            }
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            parity ^= slot == 0;
        }
        if (job.end - job.begin == 1) {
            ticket = __shfl_sync(0xffffffffu, next, 0);
            ready = false;
        }
    }
    if (lane == 0) { /* no more */
        ps_mbarrier_wait(empty + slot * 8, parity);
        jobs[slot] = make_int4(-1, 0, 0, 0);
        ps_mbarrier_arrive(full + slot * 8);
        for (int i = 1; i < STAGES; i++) {
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            parity ^= slot == 0;
            ps_mbarrier_wait(empty + slot * 8, parity);
        }
        count_up(x.arrived + DONE, taken);
    }
}

/* Shared memory: the stages, eight columns of ones, the sums' parts. */
enum {
    ONES = STAGES * STAGE,
    PARTS = ONES + 8 * 128,
    WEIGHTS_SHARED = PARTS + THREADS * 32,
    WEIGHTS_STATIC = STAGES * (2 * 8 + 16) + (int)sizeof(struct ps_adamw_step) + 8
};

/* The products, to x.partial, and the column sums that are the biases' gradients. Two warpgroups have a product, half of its
 * columns each, and the column sums of half of its rows. */
static __device__ __forceinline__ void weight_products(const struct small &x, char *memory, uint32_t full, uint32_t empty,
                                                       const int4 *jobs, wide_place &at)
{
    const int P = x.f / 64, half = at.share / 2, part = at.share % 2;
    int slot = 0;
    uint32_t parity = 0;
    for (;;) {
        ps_mbarrier_wait(full + slot * 8, parity);
        const int l = jobs[slot].x, pair = jobs[slot].y, split = jobs[slot].z, groups = jobs[slot].w;
        if (l < 0) {
            return;
        }
        const bool of_2 = pair >= P / 2 && pair < P, of_o = pair == P + 1;
        /* The panel that both products of the pair share stands behind the others or before them. */
        const bool behind = pair == 0 || pair == P / 2 || pair == P;
        const int shared = behind ? KEPT_MIDDLE : 0, own = behind ? half : 1 + half;
        const int left = of_2 ? own : of_o ? 2 * half : shared, right = of_2 ? shared : of_o ? 1 + 2 * half : own;
        float c[4][4], columns[1][4];
        int before = 0;
        clear(c);
        clear(columns);
#pragma unroll 1
        for (int i = 0; i < groups; i++) {
            ps_mbarrier_wait(full + slot * 8, parity);
            products_begin(at, c, columns);
            product<true, true>(c, at.of(4 * slot + left), at.of(4 * slot + right) + (uint32_t)part * 4, true);
            add_columns(columns[0], at.of(4 * slot + right) + (uint32_t)part * (2 * STEP / 16), at.panel + ONES / 16);
            ps_wgmma_commit();
            if (i > 0) {
                ps_wgmma_wait<1>();
                /* Every lane: what it has read is then ordered by its own arrival. It costs nothing. */
                ps_mbarrier_arrive(empty + before * 8);
            }
            before = slot;
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            parity ^= slot == 0;
        }
        products_wait<0>(c, columns);
        float4 *const to = (float4 *)x.partial + ((int64_t)(l * pairs_of(P) + pair) * x.splits + split) * (JOB_FLOATS / 4) +
                           (half * 8 + part * 4) * 128 + threadIdx.x % 128;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            to[t * 128] = make_float4(c[t][0], c[t][1], c[t][2], c[t][3]);
        }
        if ((!of_2 || (pair == P / 2 && half == 0)) && at.q == 0) { /* the others' are the same once more */
            const int first = pair < P / 2 ? B_1 + (2 * pair + half) * 64
                              : pair < P   ? (int)B_2
                              : pair == P  ? B_QKV + half * D
                              : half       ? (int)B_O
                                           : B_QKV + 2 * D;
            float *const vector = x.column_sums + ((int64_t)(2 * split + part) * x.layers + l) * vector_floats(x.f) + first;
            vector[at.unit * 16 + at.g] = columns[0][0];
            vector[at.unit * 16 + at.g + 8] = columns[0][2];
        }
        ps_mbarrier_arrive(empty + before * 8); /* the loader takes the job for done with its last stage */
    }
}

/* Parts of W_h's gradient: fewer than the multiprocessors that backward leaves free at seed28k. */
enum { HEAD_JOBS = 24 };

static __host__ __device__ __forceinline__ int head_jobs(const struct small &x)
{
    const int64_t groups = (x.units + UNITS - 1) / UNITS;
    return !x.head.d_weight ? 0 : groups < HEAD_JOBS ? (int)groups : (int)HEAD_JOBS;
}

/* A part: z' dx over some of the sequences, to x.head.parts; all of the block but the loader. parts: [threads][8]. forward, two
 * kernels ago, has written both: backward's blocks, all of which have begun, have waited for its end. */
static __device__ __forceinline__ void head_products(const struct small &x, float4 *parts, int job)
{
    const int horizon = x.head.horizon, pieces = x.n * (D / 8), rows = THREADS / pieces, jobs = head_jobs(x);
    const int thread = (int)threadIdx.x, row = thread / pieces, piece = thread - row * pieces;
    const int all = (int)x.embed.all, begin = all * job / jobs, end = all * (job + 1) / jobs;
    const uint4 *const z = (const uint4 *)(x.u + x.layers * x.rows * D) + piece;
#pragma unroll 1
    for (int t = 0; t < horizon; t++) {
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 4
        for (int s = begin + row; s < (row < rows ? end : 0); s += rows) {
            const uint4 v = __ldcg(z + (int64_t)s * pieces);
            const float by = ps_low(__ldcg((const uint16_t *)x.head.dx + s * horizon + t));
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[2 * i] = fmaf(ps_low(words[i]), by, sum[2 * i]);
                sum[2 * i + 1] = fmaf(ps_high(words[i]), by, sum[2 * i + 1]);
            }
        }
        parts[2 * thread] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        parts[2 * thread + 1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        ps_barrier(0, THREADS);
#pragma unroll 1
        for (int k = thread; k < pieces * 8; k += THREADS) {
            const float *const part = (const float *)parts + k;
            float all_rows = part[0];
            for (int i = 1; i < rows; i++) {
                all_rows += part[i * pieces * 8];
            }
            x.head.parts[((int64_t)job * pieces * 8 + k) * horizon + t] = all_rows;
        }
        ps_barrier(0, THREADS);
    }
    if (thread == 0) {
        count_up(x.arrived + DONE, 1);
    }
}

/* Pieces of 16 bytes of the embedding's gradients. */
static __device__ __forceinline__ int embed_items(const struct small &x)
{
    return x.embed.partial ? embed_rows_of(x.embed.patch, x.n) * D / 4 : 0;
}

/* .. and of W_h's. */
static __device__ __forceinline__ int head_items(const struct small &x)
{
    return x.head.d_weight ? x.n * D / 4 * x.head.horizon : 0;
}

/* What a thread has of a slice of partial sums: from[i] for i < count, `stride` apart, go onto low and high, times scale. A slice
 * has so many items, powers of two; thread / items has a part of an item's sum, and the first threads put them together. */
struct summands {
    const float4 *from;
    int64_t stride;
    int count, items;
    float scale;
    float2 *low, *high;

    /* Of a pair, over the splits. */
    __device__ __forceinline__ void of_matrix(const struct small &x, int l, int pair, int slice)
    {
        const int P = x.f / 64, pairs = pairs_of(P), item = slice * SLICE + (int)threadIdx.x % SLICE;
        /* Where the float4 of warpgroup item / 512 lies. */
        const int share = item / 512, lane = item % 32, row = item / 32 % 4 * 16 + lane / 4;
        const int column = share % 2 * 32 + item / 128 % 4 * 8 + lane % 4 * 2, half = share / 2;
        float *to = x.gradients + l * x.at.matrix_stride;
        int ld = D;
        if (pair < P / 2) {
            to += x.at.w_1 + (2 * pair + half) * D;
            ld = x.f;
        } else if (pair < P) {
            to += x.at.w_2 + (2 * pair - P + half) * 64 * D;
        } else if (pair == P + 1 && half) {
            to += x.at.w_o;
        } else {
            to += x.at.w_qkv + ((pair - P) * 2 + half) * D;
            ld = 3 * D;
        }
        low = (float2 *)(to + row * ld + column);
        high = (float2 *)(to + (row + 8) * ld + column);
        from = (const float4 *)x.partial + (int64_t)(l * pairs + pair) * x.splits * (JOB_FLOATS / 4) + item;
        stride = JOB_FLOATS / 4;
        count = x.splits;
        items = SLICE;
        scale = 1.0f;
    }

    /* Of the vectors: biases' over the splits, LayerNorms' over the groups of rows. */
    __device__ __forceinline__ void of_vectors(const struct small &x, int l, int slice)
    {
        const int i = (slice * VECTOR_SLICE + (int)threadIdx.x % VECTOR_SLICE) * 4;
        const bool here = i < vector_floats(x.f), of_norm = i >= LN1_GAMMA && i < B_1;
        const int groups = (int)((x.units + UNITS - 1) / UNITS), width = of_norm ? 4 * D : vector_floats(x.f);
        float *const p = x.gradients + l * x.at.vector_stride;
        low = (float2 *)(i < B_O         ? p + x.at.b_qkv + i
                         : i < B_2       ? p + x.at.b_o + i - B_O
                         : i < LN1_GAMMA ? p + x.at.b_2 + i - B_2
                         : i < LN1_BETA  ? p + x.at.ln1_gamma + i - LN1_GAMMA
                         : i < LN2_GAMMA ? p + x.at.ln1_beta + i - LN1_BETA
                         : i < LN2_BETA  ? p + x.at.ln2_gamma + i - LN2_GAMMA
                         : i < B_1       ? p + x.at.ln2_beta + i - LN2_BETA
                         : here          ? p + x.at.b_1 + i - B_1
                                         : p);
        high = low + 1;
        from = (const float4 *)(of_norm ? x.norms + l * 4 * D + i - LN1_GAMMA : x.column_sums + l * vector_floats(x.f) + i);
        stride = (int64_t)x.layers * (width / 4);
        count = !here ? 0 : of_norm ? groups : 2 * x.splits;
        items = VECTOR_SLICE;
        scale = i / D == B_2 / D ? 1.0f / x.half_scale : 1.0f; /* G holds half_scale times the gradient */
    }

    /* Of the embedding, over backward's blocks. */
    __device__ __forceinline__ void of_embedding(const struct small &x, int slice)
    {
        const int all = embed_items(x), item = slice * VECTOR_SLICE + (int)threadIdx.x % VECTOR_SLICE;
        low = (float2 *)embed_item_at<D>(x, item < all ? item : 0);
        high = low + 1;
        from = (const float4 *)x.embed.partial + item;
        stride = all;
        count = item < all ? x.blocks : 0;
        items = VECTOR_SLICE;
        scale = 1.0f;
    }

    /* Of W_h, over its parts. */
    __device__ __forceinline__ void of_head(const struct small &x, int slice)
    {
        const int all = head_items(x), item = slice * VECTOR_SLICE + (int)threadIdx.x % VECTOR_SLICE;
        low = (float2 *)(x.head.d_weight + (item < all ? item : 0) * 4);
        high = low + 1;
        from = (const float4 *)x.head.parts + item;
        stride = all;
        count = item < all ? head_jobs(x) : 0;
        items = VECTOR_SLICE;
        scale = 1.0f;
    }

    __device__ __forceinline__ summands(const struct small &x, int job)
    {
        const int P = x.f / 64, pairs = pairs_of(P), matrices = x.layers * pairs * SLICES;
        const int vectors = matrices + x.layers * vector_slices(P), embedding = vectors + items_slices(embed_items(x));
        if (job < matrices) {
            of_matrix(x, job / (pairs * SLICES), job / SLICES % pairs, job % SLICES);
        } else if (job < vectors) {
            of_vectors(x, (job - matrices) / vector_slices(P), (job - matrices) % vector_slices(P));
        } else if (job < embedding) {
            of_embedding(x, job - vectors);
        } else {
            of_head(x, job - embedding);
        }
    }

    /* The pair of an item that the thread finishes: low by the first threads, high by as many more; or NULL. */
    __device__ __forceinline__ float2 *own() const
    {
        return count == 0 ? NULL : threadIdx.x < items ? low : threadIdx.x < 2 * items ? high : NULL;
    }

    /* All of the block but the loader: the pair's sum, times scale and back, onto `sum`; parts [2][threads]. The order is fixed. */
    __device__ __forceinline__ void add(float2 *parts, float back, float2 &sum) const
    {
        const int all = THREADS / items, thread = (int)threadIdx.x;
        const float4 v = sum_every<11, false>(from, stride, thread / items, all, count);
        parts[thread] = make_float2(v.x, v.y);
        parts[THREADS + thread] = make_float2(v.z, v.w);
        ps_barrier(0, THREADS);
        if (thread < 2 * items) {
            const float2 *const part = parts + thread / items * THREADS + thread % items;
            float2 total = part[0];
            for (int i = 1; i < all; i++) {
                total.x += part[i * items].x;
                total.y += part[i * items].y;
            }
            sum = make_float2(fmaf(total.x, scale * back, sum.x), fmaf(total.y, scale * back, sum.y));
        }
    }
};

/* Two neighbouring gradients and what AdamW keeps beside them. They are fetched while their sums are not there yet: the last kernel
 * that wrote them was this one, of the step before. */
struct pair {
    float2 *to; /* NULL: none */
    float2 gradient, parameter, m;
    double2 v;

    __device__ __forceinline__ pair(const struct small &x, float2 *gradients)
    {
        to = gradients;
        gradient = parameter = m = make_float2(0, 0);
        v = make_double2(0, 0);
        if (to) {
            gradient = __ldcg(to);
            if (x.update.parameters) {
                const int64_t at = (float *)to - x.gradients;
                parameter = __ldcg((const float2 *)(x.update.parameters + at));
                m = __ldcg((const float2 *)(x.update.m + at));
                v = __ldcg((const double2 *)(x.update.v + at));
            }
        }
    }

    /* The gradient is `sum` now; or AdamW takes it, and it is zero. */
    __device__ __forceinline__ void put(const struct small &x, const struct ps_adamw_step &s, float2 sum)
    {
        if (!x.update.parameters) {
            *to = sum;
            return;
        }
        if (gradient.x != 0.0f || gradient.y != 0.0f) {
            *to = make_float2(0, 0);
        }
        if (s.halted) {
            return;
        }
        const struct ps_adamw_plain &a = x.update.plain;
        const int64_t at = (float *)to - x.gradients;
        ps_adamw_update(parameter.x, sum.x, m.x, v.x, a, s, at < a.decayed);
        ps_adamw_update(parameter.y, sum.y, m.y, v.y, a, s, at < a.decayed);
        *(float2 *)(x.update.parameters + at) = parameter;
        *(uint32_t *)(x.update.copy + at) = ps_pack(parameter.x, parameter.y);
        *(float2 *)(x.update.m + at) = m;
        *(double2 *)(x.update.v + at) = v;
        if (!isfinite(sum.x) || !isfinite(sum.y)) {
            x.update.state->nonfinite = s.nonfinite;
        }
    }
};

/* The same of one. */
static __device__ __forceinline__ void put_single(const struct small &x, const struct ps_adamw_step &s, float *to, float sum)
{
    if (!x.update.parameters) {
        *to = sum;
        return;
    }
    *to = 0.0f;
    if (s.halted) {
        return;
    }
    const int64_t at = to - x.gradients;
    float parameter = x.update.parameters[at], m = x.update.m[at];
    double v = x.update.v[at];
    ps_adamw_update(parameter, sum, m, v, x.update.plain, s, at < x.update.plain.decayed);
    x.update.parameters[at] = parameter;
    x.update.copy[at] = ps_round(parameter);
    x.update.m[at] = m;
    x.update.v[at] = v;
    if (!isfinite(sum)) {
        x.update.state->nonfinite = s.nonfinite;
    }
}

/* b_h's gradient and the loss, in head_sums' order; all of the block but the loader. parts: [warps][8]. */
static __device__ __forceinline__ void add_head_sums(const struct small &x, const struct ps_adamw_step &s, double *parts)
{
    constexpr int GROUP = 256;
    const int thread = (int)threadIdx.x, horizon = x.head.horizon, column = thread / GROUP * 8 + thread % 8;
    double sum = 0.0;
    if (column <= horizon) {
#pragma unroll 8
        for (int row = thread % GROUP / 8; row < x.head.rows; row += GROUP / 8) {
            sum += __ldcg(x.head.partials + row * (int64_t)(horizon + 1) + column);
        }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    if (thread % 32 < 8) {
        parts[thread / 32 * 8 + thread % 8] = sum;
    }
    ps_barrier(0, THREADS);
    if (thread % GROUP < 8 && column <= horizon) {
        const double *const part = parts + thread / 32 * 8 + thread % 8;
        sum = part[0];
#pragma unroll
        for (int i = 1; i < GROUP / 32; i++) {
            sum += part[i * 8];
        }
        const double loss = x.head.loss_scale * sum;
        struct ps_step_state *const state = x.head.state;
        if (column < horizon) {
            put_single(x, s, x.head.d_bias + column, (float)(x.head.d_bias[column] + sum));
        } else if (isfinite(loss)) {
            state->loss_sum += loss;
        } else if (x.update.parameters ? !s.halted : state->nonfinite == 0) { /* this launch may have left its note there */
            state->lost += (uint64_t)x.head.batch;
        }
    }
    ps_barrier(0, THREADS);
}

/* Beside a block there are registers for 256 threads of 64: AdamW, where it is a kernel of its own, begins before this one has
 * ended. */
enum { WEIGHTS_BOUND = 736 }; /* threads for which 88 registers are left */

/* First the products, by ticket from the last layer to the first: each waits for what it needs of backward alone, so the blocks
 * that find a multiprocessor free while backward still runs begin with what that has left. Then the sums of all. */
static __global__ void __launch_bounds__(WEIGHTS_BOUND, 1) wide_weights(const __grid_constant__ struct small x)
{
    extern __shared__ __align__(1024) char memory[];
    __shared__ uint64_t barriers[2 * STAGES];
    __shared__ int4 jobs[STAGES];
    __shared__ struct ps_adamw_step step;
    __shared__ int ticket;
    const uint32_t full = ps_shared_address(barriers), empty = full + 8 * STAGES;
    unsigned *const counters = x.arrived;
    const int first = threadIdx.x == LOADER ? take_ticket(x) : 0;
    if (threadIdx.x < STAGES) {
        ps_mbarrier_init(full + threadIdx.x * 8, 1);
        ps_mbarrier_init(empty + threadIdx.x * 8, THREADS);
        ps_mbarrier_publish();
    }
    if (threadIdx.x < 8 * 128 / 4) {
        *((uint32_t *)(memory + ONES) + threadIdx.x) = PS_REAL16_ONES;
    }
    publish();
    if (threadIdx.x >= LOADER) {
        load_products(x, memory, full, empty, jobs, first);
        return;
    }
    if (x.update.parameters) {
        ps_adamw_begin(step, x.update.plain, x.update.learning_rates, x.update.state);
        if (threadIdx.x == 96) {
            (void)ps_adamw_judge(step, x.update.plain, x.update.state);
        }
    }
    wide_place at(memory);
    /* The first blocks begin on free multiprocessors, where backward has announced nothing yet. */
    for (int job = (int)blockIdx.x; job < head_jobs(x); job += (int)gridDim.x) {
        head_products(x, (float4 *)(memory + PARTS), job);
    }
    weight_products(x, memory, full, empty, jobs, at);
    const int P = x.f / 64, sums = x.layers * (pairs_of(P) * SLICES + vector_slices(P)) + items_slices(embed_items(x)) +
                                   items_slices(head_items(x));
    const int slices = sums + (x.head.d_weight ? 1 : 0), parts = x.layers * pairs_of(P) * x.splits + head_jobs(x);
    /* In the order in which the blocks come here: the last ones, for which all wait, have none where there are more blocks. */
    if (threadIdx.x == 0) {
        ticket = (int)atomicAdd(counters + SLICE_TICKETS, 1);
    }
    ps_grid_begin();
    const float back = gradient_range(counters + PEAK, true);
    ps_barrier(0, THREADS);
    unsigned ended = 0;
    if (threadIdx.x == 0 && ticket >= slices) {
        ended = atomicAdd(counters + ENDED, 1) + 1;
    }
#pragma unroll 1
    for (int turn = ticket; turn < slices; turn += (int)gridDim.x) {
        const int slice = turn - (slices - sums);
        const struct summands s(x, slice < 0 ? 0 : slice);
        struct pair own(x, slice < 0 ? NULL : s.own());
        if (slice < 0) { /* it waits for nothing */
            add_head_sums(x, step, (double *)(memory + PARTS));
        }
        if (turn == ticket && threadIdx.x == 0) {
            await_count(counters + DONE, (unsigned)parts);
        }
        ps_barrier(0, THREADS);
        if (turn == ticket && threadIdx.x == 0) {
            ended = atomicAdd(counters + ENDED, 1) + 1;
        }
        if (slice >= 0) {
            float2 sum = own.gradient;
            s.add((float2 *)(memory + PARTS), back, sum);
            if (own.to) {
                own.put(x, step, sum);
            }
        }
    }
    if (threadIdx.x == 0 && ended == gridDim.x) { /* no block looks at them any more; for the next time */
        counters[TICKETS] = counters[DONE] = counters[ENDED] = counters[SLICE_TICKETS] = 0;
#ifdef PS_COMPILE_HALVES
        counters[PEAK] = 0;
#endif
        if (x.update.parameters) {
            ps_adamw_end(x.update.plain, x.update.state);
        }
    }
}

/* ---- the host's side ---- */

bool ps_encoder_wide_fits(const struct ps_encoder_small *e)
{
    return e->d_model == D && e->n_heads == 4 && e->patches <= 16 && (e->d_ff == 128 || e->d_ff == 256);
}

bool ps_encoder_wide_serves(const struct ps_encoder_small *e, int shared)
{
    return ps_encoder_wide_fits(e) && shared_bytes((int)e->d_ff, e->layers, true) + BARRIERS <= (size_t)shared &&
           WEIGHTS_SHARED + WEIGHTS_STATIC <= shared;
}

int ps_encoder_wide_blocks(int64_t units, int multiprocessors)
{
    const int64_t groups = (units + UNITS - 1) / UNITS, rounds = (groups + multiprocessors - 1) / multiprocessors;
    return (int)((groups + rounds - 1) / rounds);
}

int ps_encoder_wide_window_floats(void)
{
    return WINDOW_FLOATS;
}

/* Products' jobs of a pair. Of all together there is about one for each of backward's blocks, when they have ended, and two a layer
 * for each multiprocessor that is free before: with more some blocks have a second one, and all wait for it. None has more groups
 * of rows than that leaves, rounded down: the largest is what is waited for. */
static int splits_of(const struct small &x, int64_t groups, int multiprocessors)
{
    const int64_t blocks = ps_encoder_wide_blocks(x.units, multiprocessors);
    const int64_t splits = (blocks + 2 * x.layers * (multiprocessors - blocks)) / (x.layers * pairs_of(x.f / 64));
    const int64_t each = splits < 1 ? groups : splits > groups ? 1 : groups / splits;
    return (int)((groups + each - 1) / each);
}

/* The workspace, in order: counters and flags, norms, q, k and v, operands, column sums, partial products, W_h's. */
static size_t workspace_take(struct small *x, char *workspace, int multiprocessors)
{
    const int p = x->f / 64;
    const int64_t groups = (x->units + UNITS - 1) / UNITS;
    size_t at = 0;
    const auto take = [&](int64_t bytes) {
        char *const begin = workspace + at;
        at += ((size_t)bytes + 255) / 256 * 256;
        return begin;
    };
    x->splits = splits_of(*x, groups, multiprocessors);
    x->split_groups = (int)(groups / x->splits);
    x->split_more = (int)(groups % x->splits);
    x->arrived = (unsigned *)take((FLAGS + x->layers * groups) * (int64_t)sizeof(unsigned));
    x->flags = x->arrived + FLAGS;
    x->norms = (float *)take(groups * x->layers * (4 * D) * (int64_t)sizeof(float));
    x->left = (uint4 *)take(groups * x->layers * LEFT * (THREADS * (int64_t)sizeof(uint4)));
    x->operands = take(groups * x->layers * (kept_panels(p) * PANEL));
    x->column_sums = (float *)take(2 * (int64_t)x->splits * x->layers * vector_floats(x->f) * (int64_t)sizeof(float));
    x->partial = (float *)take((int64_t)x->layers * pairs_of(p) * x->splits * JOB_FLOATS * (int64_t)sizeof(float));
    x->head.parts = (float *)take((int64_t)HEAD_JOBS * x->n * D * x->head.horizon * (int64_t)sizeof(float));
    return at;
}

size_t ps_encoder_wide_workspace(const struct ps_encoder_small *e, int64_t units, int multiprocessors)
{
    struct small x = {};
    x.f = (int)e->d_ff;
    x.layers = (int)e->layers;
    x.n = (int)e->patches;
    x.head.horizon = e->pred_len <= WIDE_HORIZON ? (int)e->pred_len : 0;
    /* For shorter batches too, whose products may be split more often; not for those that lack more operands than that can add. */
    const int64_t groups = (units + UNITS - 1) / UNITS;
    size_t most = 0;
    for (int64_t i = groups; i > 0 && i > groups - 2 * multiprocessors; i--) {
        x.units = i * UNITS;
        const size_t bytes = workspace_take(&x, NULL, multiprocessors);
        most = bytes > most ? bytes : most;
    }
    return most;
}

#ifdef PS_COMPILE_HALVES
unsigned *ps_encoder_wide_counters(char *workspace, int *count)
{
    *count = FLAGS;
    return (unsigned *)workspace;
}

unsigned *ps_encoder_wide_peak(char *workspace)
{
    return (unsigned *)workspace + PEAK;
}
#endif

/* A matrix of all layers, [rows, ld] of the flat weights from `at` on, as panels of 64 rows by `columns` that lie `apart` elements
 * from one another. */
static enum ps_status panel_map(CUtensorMap *map, const struct small &x, int64_t at, int ld, int columns, int panels, int apart)
{
    static PFN_cuTensorMapEncodeTiled_v12000 encode = NULL;
    if (!encode) {
        void *found = NULL;
        cudaDriverEntryPointQueryResult result;
        PS_TRY(ps_cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
                             "cuTensorMapEncodeTiled"));
        encode = (PFN_cuTensorMapEncodeTiled_v12000)found;
    }
    const cuuint64_t size[4] = {(cuuint64_t)columns, 64, (cuuint64_t)panels, (cuuint64_t)x.layers};
    const cuuint64_t stride[3] = {(cuuint64_t)ld * 2, (cuuint64_t)apart * 2, (cuuint64_t)x.at.matrix_stride * 2};
    const cuuint32_t box[4] = {(cuuint32_t)columns, 64, (cuuint32_t)panels, 1}, one[4] = {1, 1, 1, 1};
    const CUtensorMapDataType type = PS_REAL16 == PS_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult status = encode(map, type, 4, (void *)(x.weights + at), size, stride, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? PS_OK
                                  : ps_fail(PS_DEVICE, "encoder: weights at %p, %lld elements a layer: no tensor map (error %d)",
                                            (const void *)(x.weights + at), (long long)x.at.matrix_stride, (int)status);
}

static enum ps_status panels_of(const struct small &x, bool backward, struct weight_panels *p)
{
    PS_TRY(backward ? panel_map(&p->qkv, x, x.at.w_qkv, 3 * D, D, 3, D) : panel_map(&p->qkv, x, x.at.w_qkv, 3 * D, 16, 12, 16));
    PS_TRY(panel_map(&p->o, x, x.at.w_o, D, D, 1, D));
    PS_TRY(panel_map(&p->w_1, x, x.at.w_1, x.f, D, x.f / 64, D));
    return panel_map(&p->w_2, x, x.at.w_2, D, D, x.f / 64, 64 * D);
}

typedef void wide_kernel(const struct small, const struct weight_panels);

static wide_kernel *kernel_of(const struct small &x, bool backward)
{
    const bool drop = x.threshold != 0;
    if (x.f == 128) {
        return backward ? drop ? wide_backward<2, true> : wide_backward<2, false>
               : drop ? wide_forward<2, true>
                        : wide_forward<2, false>;
    }
    return backward ? drop ? wide_backward<4, true> : wide_backward<4, false>
           : drop ? wide_forward<4, true>
                    : wide_forward<4, false>;
}

bool ps_encoder_wide_heads(const struct ps_encoder_small *e, int blocks, int shared)
{
    return e->pred_len <= WIDE_HORIZON && (int64_t)blocks * UNITS >= ps_small_units(e) &&
           shared_bytes((int)e->d_ff, e->layers, false) + BARRIERS + wide_head_bytes((int)e->patches, (int)e->pred_len) <=
               (size_t)shared;
}

enum ps_status ps_encoder_wide_forward(const struct small &given, char *workspace, int multiprocessors, cudaStream_t stream)
{
    struct small x = given;
    struct weight_panels panels;
    if (x.lse) {
        (void)workspace_take(&x, workspace, multiprocessors);
    }
    PS_TRY(panels_of(x, false, &panels));
    const size_t bytes = shared_bytes(x.f, x.layers, false);
    x.head.at = (int)bytes;
    return ps_small_launch(kernel_of(x, false), dim3((unsigned)x.blocks), THREADS,
                           bytes + (x.head.weight ? wide_head_bytes(x.n, x.head.horizon) : 0), stream, "encoder forward", x,
                           panels);
}

enum ps_status ps_encoder_wide_backward(const struct small &given, char *workspace, int multiprocessors, cudaStream_t stream)
{
    struct small x = given;
    struct weight_panels panels;
    (void)workspace_take(&x, workspace, multiprocessors);
    PS_TRY(panels_of(x, true, &panels));
    PS_TRY(ps_small_launch(kernel_of(x, true), dim3((unsigned)x.blocks), THREADS, shared_bytes(x.f, x.layers, true), stream,
                           "encoder backward", x, panels));
    return ps_small_launch(wide_weights, dim3((unsigned)multiprocessors), THREADS + 32, WEIGHTS_SHARED, stream,
                           "encoder weight gradients", x);
}

} // namespace PS_REAL16_SPACE
