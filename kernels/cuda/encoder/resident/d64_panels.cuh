/* What encoder/resident/d64_short.cu's kernels share: a warp's place, products by wgmma, the panels of weights and of rows, what
 * forward leaves for backward and for the weights' gradients, and the counters that tell one another how far they are. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D64_PANELS_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D64_PANELS_CUH

#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/encoder/head.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

namespace ps_resident
{

enum { D = 64, UNITS = 4, THREADS = 512, PANEL = 64 * 64 * 2, STEP = 16 * 128 };

/* Floats of a unit's windows that there is room for: where the unit's rows of a panel will lie. */
enum { D64_WINDOW_FLOATS = 16 * 128 / 4 };

/* The workspace begins with counters: tickets of products' jobs taken, products' jobs done and parts of W_h's gradient, blocks that
 * wait for nothing any more, tickets of slices taken; the place in the order of windows that a forward expects of the next one, 8
 * bytes, or, where the stream is of fp32, the bits of dy's largest magnitude, found before backward, whose last kernel takes it
 * away; then flags [layers, groups]. All but the flags are zero before a step. */
enum { TICKETS, DONE, ENDED, SLICE_TICKETS, AHEAD, PEAK = AHEAD, FLAGS = 6 };
static_assert((int)UNITS == (int)D64_HEAD_UNITS, "the head's threads fetch their targets as forward begins");

/* warpgroup = share, warp of it = unit. Addresses in shared memory are of a panel 0; others are so many panels further. */
template <class T> struct panel_place : place<T, D, 1> {
    using tile_place = place<T, D, 1>;
    using tile_place::g, tile_place::lane, tile_place::q, tile_place::row, tile_place::share, tile_place::tile, tile_place::unit;
    uint32_t begin; /* where the warp's rows begin in a panel; 16 i columns further: exclusive or 32 i */
    uint32_t panel; /* of wgmma's operand: its lower word */
    __device__ __forceinline__ panel_place(const void *memory)
    {
        /* The same in all lanes, so that the compiler keeps what follows from it once a warp. */
        const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
        const uint32_t address = ps_shared_address(memory);
        unit = warp % UNITS;
        share = warp / UNITS;
        tile = 0;
        row = 0;
        begin = address + (uint32_t)((unit * 16 + lane % 16) * 128 + ((lane / 16) ^ (lane & 7)) * 16);
        panel = (address >> 4 & 0x3fff) | 1 << 16;
    }
    /* What follows from the warp's place is found anew: kept for all of the kernel it would fill the registers. */
    __device__ __forceinline__ void refresh()
    {
        asm volatile("" : "+r"(panel), "+r"(share), "+r"(begin), "+r"(g), "+r"(q));
    }
    /* The warp's 16 columns. */
    __device__ __forceinline__ uint32_t own() const
    {
        return begin ^ (uint32_t)share * 32;
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

/* d = or += a b, 64 deep, for the warpgroup's 64 rows and 16, 32 or 64 columns: a and b are panels, or the part of one where the
 * columns begin. A_ROWS, B_ROWS: the depth runs over the operand's rows. */
template <class T, bool A_ROWS, bool B_ROWS, int TILES>
static __device__ __forceinline__ void product(float (&d)[TILES][4], uint32_t a, uint32_t b, bool add)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        ps_wgmma<T, A_ROWS, B_ROWS>(d, ps_wgmma_operand(a, k * (A_ROWS ? STEP : 32)), ps_wgmma_operand(b, k * (B_ROWS ? STEP : 32)),
                                    add || k > 0);
    }
}

/* d += the warpgroup's columns of q, k and v, 64 deep, three slices of 16 columns: W_qkv lies as slices of 64 rows by 16 columns,
 * rows of 32 bytes whose halves are exchanged by the row's number / 4 modulo 2, q's 64 columns, k's, v's. */
template <class T> static __device__ __forceinline__ void product_slices(float (&d)[6][4], uint32_t a, uint32_t b)
{
    b = (b & 0x3fff) | (PANEL >> 4) << 16; /* from q's columns to k's, to v's */
#pragma unroll
    for (int k = 0; k < 4; k++) {
        ps_wgmma_onto<T, 0, 1>(d, ps_wgmma_operand(a, k * 32), (uint64_t)(256 >> 4 | 3u << 30) << 32 | (b + k * (16 * 32 / 16)));
    }
}

/* Before a batch of products with these sums. Operands' addresses are found anew: kept for all of the kernel they would fill the
 * registers. */
template <class T, typename... SUMS> static __device__ __forceinline__ void products_begin(panel_place<T> &at, SUMS &...sums)
{
    at.refresh();
    (ps_pin(sums), ...);
    ps_wgmma_begin();
}

/* Until at most PENDING batches are under way, these sums' not among them. */
template <int PENDING, typename... SUMS> static __device__ __forceinline__ void products_wait(SUMS &...sums)
{
    ps_wgmma_wait<PENDING>();
    (ps_pin(sums), ...);
}

/* All the block's stores to shared memory are seen by all, wgmma too. */
static __device__ __forceinline__ void publish()
{
    ps_publish();
    __syncthreads();
}

/* ---- panels ---- */

/* Panels of a layer's weights, in both directions; W_2 follows W_1. */
enum { W_QKV = 0, W_O = 3, W_1 = 4 };

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

/* Where the layer's float i of them stands among the parameters, and among their gradients. */
template <class T> static __device__ __forceinline__ int64_t vector_at(const encoder<T> &x, int i)
{
    return i < B_O         ? x.at.b_qkv + i
           : i < B_2       ? x.at.b_o + i - B_O
           : i < LN1_GAMMA ? x.at.b_2 + i - B_2
           : i < LN1_BETA  ? x.at.ln1_gamma + i - LN1_GAMMA
           : i < LN2_GAMMA ? x.at.ln1_beta + i - LN1_BETA
           : i < LN2_BETA  ? x.at.ln2_gamma + i - LN2_GAMMA
           : i < B_1       ? x.at.ln2_beta + i - LN2_BETA
                           : x.at.b_1 + i - B_1;
}

template <class T> static __device__ __forceinline__ void stage_vectors(const encoder<T> &x, float *to, int f)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x * 4; i < vector_floats(f); i += THREADS * 4) {
        const int64_t of = vector_at(x, i);
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

/* Two neighbours of row g and of row g + 8, and again 8 columns on, as they lie in memory: of fp32, or an operand. */
template <class S> using stream_rows = std::conditional_t<std::is_same<S, float>::value, float[2][4], uint32_t[4]>;

template <class T> static __device__ __forceinline__ void fetch_rows(float (&v)[2][4], const float *from, const place<T, D, 1> &at)
{
    load_rows(v, from, at);
}

template <class T> static __device__ __forceinline__ void fetch_rows(uint32_t (&v)[4], const T *from, const place<T, D, 1> &at)
{
    const T *p = from + at.first * D + at.share * 16 + at.q * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = at.here[i % 2] ? *(const uint32_t *)(p + i % 2 * 8 * D + i / 2 * 8) : 0;
    }
}

/* Rows as they came. */
template <class T> static __device__ __forceinline__ void unpack_operand(float (&x)[2][4], const float (&v)[2][4])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i / 4][i % 4] = v[i / 4][i % 4];
    }
}

/* Where the stream S is not of the operands' type T, gradients are multiplied with the power of two that brings dy's largest
 * element, whose bits are `peak`, to 1 .. 2; back: by its reciprocal. */
template <class T, class S> static __device__ __forceinline__ float gradient_range(const unsigned *peak, bool back)
{
    if constexpr (std::is_same<S, T>::value) {
        return 1.0f;
    } else {
        const int exponent = max(-120, min(120, 127 - (int)(__ldcg(peak) >> 23)));
        return __int_as_float(((back ? -exponent : exponent) + 127) << 23);
    }
}

/* y = a b', b [16 rows, 16] in registers as it lies. */
template <class T>
static __device__ __forceinline__ void times_transposed(float (&y)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                                        const float (&c0)[4], const float (&c1)[4])
{
    ps_mma16<T>(y[0], a, b[0], b[2], c0);
    ps_mma16<T>(y[1], a, b[1], b[3], c1);
}

/* y = a b, b [16 rows, 16] in registers as it lies. */
template <class T> static __device__ __forceinline__ void times(float (&y)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4])
{
    const float zero[4] = {0, 0, 0, 0};
    ps_mma16<T>(y[0], a, ps_movmatrix(b[0]), ps_movmatrix(b[1]), zero);
    ps_mma16<T>(y[1], a, ps_movmatrix(b[2]), ps_movmatrix(b[3]), zero);
}

/* The operand a'. */
static __device__ __forceinline__ void transpose_operand(uint32_t (&y)[4], const uint32_t (&a)[4])
{
    y[0] = ps_movmatrix(a[0]);
    y[1] = ps_movmatrix(a[2]);
    y[2] = ps_movmatrix(a[1]);
    y[3] = ps_movmatrix(a[3]);
}

/* Groups of 64 rows. */
template <class T> static __host__ __device__ __forceinline__ int groups_of(const encoder<T> &x)
{
    return (int)((x.units + UNITS - 1) / UNITS);
}

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

template <class T> static __device__ __forceinline__ char *kept_at(const encoder<T> &x, int group, int l)
{
    return x.d64.operands + ((int64_t)group * x.layers + l) * (kept_panels(x.f / 64) * PANEL);
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

template <class T> static __device__ __forceinline__ uint4 *left_at(const encoder<T> &x, int group, int l, int which)
{
    return x.d64.left + (((int64_t)group * x.layers + l) * LEFT + which) * THREADS + threadIdx.x;
}

} // namespace ps_resident

#endif
