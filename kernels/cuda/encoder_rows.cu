/* Level `layer` in tf32 for d_model 128: all of a layer that goes by rows, in two kernels each way around the table's attention.
 *
 * Why: a layer's weights in fp32, 512 KB at d_ff 256, and what attention wants of a tile do not fit a multiprocessor together, and
 * with mma.sync (encoder_float.cu) shared memory cannot feed the tensor cores: 6.4 ms at weather, where level gemm takes 4.6. Rows
 * know nothing of each other but in attention, so the rest is cut there: `enter` LN1 and W_qkv; `finish` W_o, the residual, LN2,
 * the feed-forward part; backward `back` the feed-forward part, LN2, W_o'; `leave` W_qkv', LN1. Between a kernel's products rows
 * stay in registers; what weights' gradients read is written, and those are products of the table, over all rows.
 *
 * A warpgroup takes 64 rows of its own through all of a kernel; wgmma multiplies them, in shared memory or in registers, with
 * pieces of weights of 32 KB, which one thread has the copy engine bring from L2 for both warpgroups. `pack_rows` lays the pieces
 * out before, the summed dimension contiguous, since wgmma takes tf32 in no other way. It multiplies W_qkv and W_1 with LayerNorm's
 * gamma and adds beta W to their biases: the left operand is xhat itself, which is what weights' gradients are made of too (G =
 * xhat' dy; encoder_float.cu says how the rest follows), and gradients come out as xhat's. The hidden columns before gelu are not
 * kept: backward computes them again. Dropout's bits are, a bit an element.
 *
 * Counts a layer, R rows, beside attention's and those of weights' gradients; products' flops, bytes of tensors. enter: 6 R d^2; 4
 * R d read, 16 R d written; finish: 2 R d^2 + 4 R d f; 8 R d, 8 R d; back: 6 R d f + 2 R d^2; 12 R d (dy twice), 16 R d + 8 R f;
 * leave: 6 R d^2; 20 R d, 4 R d. Weights from L2 a tile of 128 rows: 192, 64 + f, 3 f / 2 + 64 and 192 KB. weather (R 112,896, f
 * 256), us at wgmma's 415 TFLOP/s and at 4.2 TB/s: enter 27, 69; finish 45, 55; back 62, 151; leave 27, 83. Measured 92, 154, 228,
 * 114, where schedulers issue in 20, 41, 29 and 15 % of the clocks: eight warps multiply, 240 registers each, and their waits for
 * memory lie open where the next tile's rows are not asked for ahead. */
#include "kernels/cuda/encoder_rows.cuh"

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/encoder_float.cuh"
#include "kernels/cuda/encoder_float_device.cuh"
#include "kernels/cuda/wgmma_tf32.cuh"

namespace PS_REAL16_SPACE
{

enum {
    D = 128,
    GROUPS = 2,                   /* warpgroups that multiply, */
    THREADS = (GROUPS + 1) * 128, /* and one of which a thread brings the weights */
    ROWS = 64,                    /* of a warpgroup */
    TILE = GROUPS * ROWS,
    /* Registers a thread: taken from, and given to, what the block has (else the kernel waits for ever), in steps of 8. */
    FEW_REGISTERS = 24,
    REGISTERS = 240,
    COLUMNS = 64,
    PANEL_BYTES = ROWS * 128, /* of 32 columns */
    LEFT_BYTES = D / 32 * PANEL_BYTES,
    PIECE = COLUMNS * D, /* floats */
    PIECE_BYTES = PIECE * 4
};

static_assert(GROUPS * REGISTERS + FEW_REGISTERS <= (GROUPS + 1) * (65536 / THREADS / 8 * 8), "of the multiprocessor's");

/* Pieces of a layer, in this order, HIDDEN = f / 64: of W_qkv 6 and W_o 2, 64 columns each; W_1's 64 columns and W_2's 64 rows in
 * turns, HIDDEN of each; then backward's: W_2' and W_1' likewise, W_o' 2, W_qkv' 6, 64 rows each. A piece of columns holds
 * [64][128], the product's columns and what it sums over; one of rows [128][64], whose summed dimension stands, when the left
 * operand is in registers, in the order 0, 2, 4, 6, 1, 3, 5, 7 of each eight (as sums come out). In panels of 32 of the summed
 * dimension, 128 bytes a line, whose units of 16 are exchanged by the line's number modulo 8. */
static __host__ __device__ __forceinline__ int pieces_of(int hidden)
{
    return 16 + 4 * hidden;
}

struct row_places {
    int back, w_ot, w_qkvt; /* first pieces */
    __host__ __device__ __forceinline__ explicit row_places(int hidden)
        : back(8 + 2 * hidden), w_ot(8 + 4 * hidden), w_qkvt(10 + 4 * hidden)
    {
    }
};

struct rows_layer {
    int64_t rows; /* R */
    int f;
    float epsilon;
    const float *pieces;                     /* the layer's */
    const float *b_qkv, *b_o, *b_1, *b_2;    /* b_qkv and b_1 with beta's share */
    const float *u;                          /* [R, d] */
    float *xhat1, *rstd1, *qkv;              /* [R, d], [R], [R, 3d]; xhat and rstd NULL: nothing is kept */
    float *merged, *logsum;                  /* [R, d]; attention's, [S, h, N] */
    float *xhat2, *rstd2, *y;                /* [R, d], [R], [R, d] */
    const float *dy, *d_qkv;                 /* [R, d], [R, 3d] */
    float *du;                               /* back: the gradient of the residual stream; may be dy. leave: u's */
    float *hidden, *d_hidden;                /* [R, f]: what W_2 is multiplied with, and the gradient entering W_1 */
    float *masked_2, *masked_o, *d_merged;   /* [R, d]: gradients entering W_2 and W_o, and that of merged */
    struct ps_dropout after_o, gelu, output; /* after W_o, after gelu, after W_2 */
    /* What they keep: quad_bits of 32 columns a word, [R, 4], [R, f / 32], [R, 4]. Written with xhat. */
    uint32_t *kept_o, *kept_gelu, *kept_output;
};

/* ---- packing ---- */

struct packing {
    float *pieces, *biases; /* [layers, pieces_of, PIECE]; [layers, 3d + f] */
    const float *weights, *parameters;
    struct ps_encoder_layout at;
    int f, units; /* 16 bytes each, of a layer's pieces */
};

/* The element of a piece: its summed index k, its column n. */
static __device__ __forceinline__ float packed_element(const struct packing &x, const float *w, const float *p, int piece, int k,
                                                       int n)
{
    const int hidden = x.f / COLUMNS;
    const row_places at(hidden);
    if (piece < 6) {
        return w[x.at.w_qkv + k * (3 * D) + piece * COLUMNS + n] * p[x.at.ln1_gamma + k];
    }
    if (piece < 8) {
        return w[x.at.w_o + k * D + (piece - 6) * COLUMNS + n];
    }
    if (piece < at.back) {
        const int j = (piece - 8) / 2 * COLUMNS;
        return piece % 2 == 0 ? w[x.at.w_1 + k * x.f + j + n] * p[x.at.ln2_gamma + k] : w[x.at.w_2 + (j + k) * D + n];
    }
    if (piece < at.w_ot) {
        const int j = (piece - at.back) / 2 * COLUMNS;
        return piece % 2 == 0 ? w[x.at.w_2 + (j + n) * D + k] : w[x.at.w_1 + n * x.f + j + k] * p[x.at.ln2_gamma + n];
    }
    if (piece < at.w_qkvt) {
        return w[x.at.w_o + ((piece - at.w_ot) * COLUMNS + n) * D + k];
    }
    return w[x.at.w_qkv + n * (3 * D) + (piece - at.w_qkvt) * COLUMNS + k] * p[x.at.ln1_gamma + n];
}

/* A unit of 16 bytes, or a bias, a thread; a layer to each blockIdx.y. Reads 8 bytes for each 4 written. */
static __global__ void __launch_bounds__(256) pack_rows(const __grid_constant__ struct packing x)
{
    ps_grid_begin();
    const int layer = (int)blockIdx.y, hidden = x.f / COLUMNS;
    const row_places at(hidden);
    const float *const w = x.weights + layer * x.at.matrix_stride, *const p = x.parameters + layer * x.at.vector_stride;
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < x.units) {
        const int piece = i / (PIECE / 4), in = i % (PIECE / 4);
        const bool of_rows = piece >= at.w_qkvt || (piece >= 8 && piece < at.w_ot && piece % 2 == 1);
        const bool moved = of_rows && piece < at.w_qkvt;
        const int lines = of_rows ? D : COLUMNS, n = in / 8 % lines, unit = in % 8 ^ n % 8;
        float v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int place = unit % 2 * 4 + j,
                      k = in / 8 / lines * 32 + unit / 2 * 8 + (moved ? 2 * (place % 4) + place / 4 : place);
            v[j] = __uint_as_float(ps_tf32(packed_element(x, w, p, piece, k, n)));
        }
        ps_store<4>(x.pieces + ((int64_t)layer * pieces_of(hidden) * PIECE + (int64_t)i * 4), v);
        return;
    }
    i -= x.units;
    if (i < 3 * D + x.f) {
        const bool first = i < 3 * D;
        const int column = first ? i : i - 3 * D, width = first ? 3 * D : x.f;
        const float *const matrix = w + (first ? x.at.w_qkv : x.at.w_1) + column, *const beta =
                                                                                      p + (first ? x.at.ln1_beta : x.at.ln2_beta);
        float sum = p[(first ? x.at.b_qkv : x.at.b_1) + column];
        for (int k = 0; k < D; k++) {
            sum = fmaf(beta[k], matrix[k * width], sum);
        }
        x.biases[layer * (3 * D + x.f) + i] = sum;
    }
}

/* ---- pieces on their way ---- */

/* The ring of slots that pieces pass through. */
template <int SLOTS, int FULL> struct piece_ring {
    static constexpr int EMPTY = FULL + 8 * SLOTS; /* where the slots' barriers are, from the first slot on */
    uint32_t slots;                                /* their address */
    int slot, oldest;                              /* of the next piece to take, of the first not yet released */
    uint32_t parity;

    /* By all threads. readers: warps. */
    __device__ __forceinline__ piece_ring(uint32_t slots_, int readers) : slots(slots_), slot(0), oldest(0), parity(0)
    {
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < SLOTS; i++) {
                ps_mbarrier_init(slots + FULL + 8 * i, 1);
                ps_mbarrier_init(slots + EMPTY + 8 * i, readers * 32);
            }
            ps_mbarrier_publish();
        }
        __syncthreads();
    }
    /* One thread, for all readers: pieces number(0) .. number(count - 1) of the layer, `times` over; rows(i) goes before turn i. */
    template <typename N, typename R>
    __device__ __forceinline__ void bring(const float *pieces, int times, int count, N number, R rows)
    {
        int to = 0;
        uint32_t turn = 1; /* the first turn finds the slots empty */
        for (int i = 0; i < times; i++) {
            rows(i);
            for (int j = 0; j < count; j++) {
                ps_mbarrier_wait(slots + EMPTY + 8 * to, turn);
                ps_mbarrier_expect(slots + FULL + 8 * to, PIECE_BYTES);
                ps_bulk_fetch(slots + to * PIECE_BYTES, pieces + (int64_t)number(j) * PIECE, PIECE_BYTES, slots + FULL + 8 * to);
                if (++to == SLOTS) {
                    to = 0;
                    turn ^= 1;
                }
            }
        }
    }
    /* The next piece, once it is there: its place as wgmma's operand. */
    __device__ __forceinline__ uint32_t take()
    {
        ps_mbarrier_wait(slots + FULL + 8 * slot, parity);
        const uint32_t place = ps_wgmma_place(slots + slot * PIECE_BYTES);
        if (++slot == SLOTS) {
            slot = 0;
            parity ^= 1;
        }
        return place;
    }
    /* The oldest piece taken, which no product reads any more. */
    __device__ __forceinline__ void release()
    {
        ps_mbarrier_arrive(slots + EMPTY + 8 * oldest);
        oldest = oldest + 1 == SLOTS ? 0 : oldest + 1;
    }
};

/* ---- a warpgroup's rows ----
 *
 * Sums of products: c[n][2 i + e] is row 16 w + g + 8 i, column 8 n + 2 q + e, of warp w and lane 4 g + q (`seat`). Left operands
 * lie in four panels of 32 columns. By rows: a warp takes four of its 16 at a time, lane 8 r + c has columns 4 c + 32 j + 0 .. 3.
 */

struct seat {
    int lane, g, q, warp, group; /* the warp in its warpgroup; the warpgroup */
    __device__ __forceinline__ seat()
    {
        const int all = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* said to be one for the warp */
        lane = (int)threadIdx.x % 32;
        g = lane / 4;
        q = lane % 4;
        warp = all % 4;
        group = all / 4;
    }
    __device__ __forceinline__ int row(int i) const
    {
        return 16 * warp + g + 8 * i;
    }
    /* The lane's row of a pass by rows. */
    __device__ __forceinline__ int passing(int pass) const
    {
        return 16 * warp + 4 * pass + lane / 8;
    }
    /* What follows from the lane's place is found anew: kept through the tiles it would drive sums out of registers. */
    __device__ __forceinline__ void refresh()
    {
        asm volatile("" : "+r"(lane), "+r"(g), "+r"(q));
    }
    /* Of the warpgroup's threads. */
    __device__ __forceinline__ void sync() const
    {
        ps_barrier(1 + group, 128);
    }
};

/* Where sums' columns 8 n + 2 q of the lane's row i lie in panels. */
struct left_place {
    uint32_t base;
    __device__ __forceinline__ left_place(uint32_t panels, const seat &at)
        : base(panels + at.row(0) * 128 + (((at.q / 2) ^ at.g) << 4) + at.q % 2 * 8)
    {
    }
    __device__ __forceinline__ uint32_t of(int n, int i) const
    {
        return (base ^ n % 4 << 5) + n / 4 * PANEL_BYTES + i * 1024;
    }
};

/* Row r, columns 4 c + 32 j, of panels. */
static __device__ __forceinline__ uint32_t panel_place(int row, int j, const seat &at)
{
    return (uint32_t)(j * PANEL_BYTES + row * 128 + ((at.lane % 8 ^ row % 8) << 4));
}

static __device__ __forceinline__ void put_left(uint32_t panels, int row, int j, const float4 &v, const seat &at)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(panels + panel_place(row, j, at)), "f"(rounded(v.x)),
                 "f"(rounded(v.y)), "f"(rounded(v.z)), "f"(rounded(v.w))
                 : "memory");
}

/* The lane's part of a row; zero where the row does not exist. */
static __device__ __forceinline__ void take_row(float4 (&v)[4], const float *from, int ld, int row, int count, const seat &at)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        v[j] = row < count ? *(const float4 *)(from + (int64_t)row * ld + at.lane % 8 * 4 + 32 * j) : make_float4(0, 0, 0, 0);
    }
}

static __device__ __forceinline__ void keep_row(float *to, int row, int count, const float4 (&v)[4], const seat &at)
{
    if (row < count) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            *(float4 *)(to + (int64_t)row * D + at.lane % 8 * 4 + 32 * j) =
                make_float4(rounded(v[j].x), rounded(v[j].y), rounded(v[j].z), rounded(v[j].w));
        }
    }
}

/* How many of the warpgroup's rows from row0 on there are: none, if negative. */
static __device__ __forceinline__ int rows_from(int64_t rows, int64_t row0)
{
    return (int)(rows - row0 < ROWS ? rows - row0 : ROWS);
}

/* The warp's 16 rows of [R, columns], all asked for before the first is used: lane's part of row 16 w + 4 pass + lane / 8. row0:
 * the warpgroup's first. */
static __device__ __forceinline__ void take_rows(float4 (&v)[4][4], const float *from, int columns, int64_t row0, int64_t rows,
                                                 const seat &at)
{
#pragma unroll
    for (int pass = 0; pass < 4; pass++) {
        take_row(v[pass], from + row0 * columns, columns, at.passing(pass), rows_from(rows, row0), at);
    }
}

/* Those as operands. Between the warpgroup's barriers. */
static __device__ __forceinline__ void put_rows(uint32_t panels, const float4 (&v)[4][4], const seat &at)
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        put_left(panels, at.passing(i / 4), i % 4, v[i / 4][i % 4], at);
    }
}

/* The same rows of [R, d], which are operands as they are, on their way to panels until ps_copy_wait; zeros where there are none.
 */
static __device__ __forceinline__ void copy_rows(uint32_t panels, const float *from, int64_t row0, int64_t rows, const seat &at)
{
#pragma unroll
    for (int pass = 0; pass < 4; pass++) {
        const int row = at.passing(pass);
        const bool here = row < rows - row0;
        const float *const part = from + (here ? row0 + row : 0) * D + at.lane % 8 * 4;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            ps_copy_async_part(panels + panel_place(row, j, at), part + 32 * j, here ? 16 : 0);
        }
    }
}

/* c = left piece, 128 deep, 64 columns. Under way until ps_wgmma_wait. */
static __device__ __forceinline__ void multiply_columns(float (&c)[8][4], uint32_t left, uint32_t piece)
{
    const uint32_t a = ps_wgmma_place(left);
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const int further = k / 4 * PANEL_BYTES + k % 4 * 32;
        ps_wgmma_tf32<64>(c, ps_wgmma_operand(a, further), ps_wgmma_operand(piece, further), k > 0);
    }
}

/* c (add: +=) left piece, 64 deep, 128 columns: left two panels, */
static __device__ __forceinline__ void multiply_rows(float (&c)[16][4], uint32_t left, uint32_t piece, int add)
{
    const uint32_t a = ps_wgmma_place(left);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        ps_wgmma_tf32<128>(c, ps_wgmma_operand(a, k / 4 * PANEL_BYTES + k % 4 * 32),
                           ps_wgmma_operand(piece, k / 4 * (D * 128) + k % 4 * 32), add | k);
    }
}

/* or sums of 64 columns as they came out. */
static __device__ __forceinline__ void multiply_rows(float (&c)[16][4], const uint32_t (&left)[8][4], uint32_t piece, int add)
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        ps_wgmma_tf32<128>(c, left[k], ps_wgmma_operand(piece, k / 4 * (D * 128) + k % 4 * 32), add | k);
    }
}

/* c = left times a square weight: the ring's next two pieces, each its half of c's columns. */
template <typename RING> static __device__ __forceinline__ void multiply_square(float (&c)[2][8][4], uint32_t left, RING &ring)
{
    const uint32_t first = ring.take(), second = ring.take();
    ps_wgmma_begin();
    multiply_columns(c[0], left, first);
    multiply_columns(c[1], left, second);
    ps_wgmma_commit();
    ps_wgmma_wait<0>();
    ps_pin(c[0]);
    ps_pin(c[1]);
    ring.release();
    ring.release();
}

/* c = drop(c), 32 columns of the lane's row i: those of groups n .. n + 3. bits: quad_bits'. */
template <int N>
static __device__ __forceinline__ void drop_32(float (&c)[N][4], int n, int i, uint32_t bits, float scale, const seat &at)
{
    const uint32_t mask = bits >> at.q;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        c[n + t][2 * i] *= kept_scale(mask, t, 0, scale);
        c[n + t][2 * i + 1] *= kept_scale(mask, t, 1, scale);
    }
}

/* c = drop(c): 8 N columns from `column` on of rows `width` wide, row0 the warpgroup's first. kept: of that row on, or NULL. */
template <int N>
static __device__ __forceinline__ void drop_sums(float (&c)[N][4], const struct ps_dropout &dropout, uint32_t *kept, int64_t row0,
                                                 int width, int column, uint64_t step, int count, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t own = 0;
#pragma unroll
        for (int m = 0; m < N / 4; m++) {
            const uint64_t block = ((uint64_t)(row0 + at.row(i)) * width + column + 32 * m) / 8 + at.q;
            const uint32_t bits = quad_bits(dropout, step, (uint32_t)block, at.q);
            drop_32(c, 4 * m, i, bits, dropout.scale, at);
            own = at.q == m ? bits : own;
        }
        if (kept && at.row(i) < count && at.q < N / 4) {
            kept[(at.row(i) * width + column) / 32 + at.q] = own;
        }
    }
}

/* Of the lane's rows of a tensor [R, d], from the warpgroup's first row on: groups of 8 columns, pairs as sums have them. */
struct row_pairs {
    float2 of[16][2];
    __device__ __forceinline__ row_pairs(const float *from, int count, const seat &at)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 *const row = (const float2 *)(from + at.row(i) * D + 2 * at.q);
#pragma unroll
            for (int n = 0; n < 16; n++) {
                of[n][i] = at.row(i) < count ? row[4 * n] : make_float2(0, 0);
            }
        }
    }
};

/* c, the gradient of xhat, becomes residual + LayerNorm's gradient of it: rstd (c - mean(c) - xhat mean(c xhat)). residual and
 * xhat: the lane's pair of group n of row i. */
template <typename R, typename X>
static __device__ __forceinline__ void normalise_gradient(float (&c)[16][4], const float (&rstd)[2], R residual, X xhat)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float mean = 0, slope = 0;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const float2 x = xhat(n, i);
            mean += c[n][2 * i] + c[n][2 * i + 1];
            slope += c[n][2 * i] * x.x + c[n][2 * i + 1] * x.y;
        }
        mean = ps_group_sum<4>(mean) * (1.0f / D);
        slope = ps_group_sum<4>(slope) * (1.0f / D);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const float2 x = xhat(n, i), old = residual(n, i);
            c[n][2 * i] = old.x + rstd[i] * (c[n][2 * i] - mean - x.x * slope);
            c[n][2 * i + 1] = old.y + rstd[i] * (c[n][2 * i + 1] - mean - x.y * slope);
        }
    }
}

/* rstd of the lane's rows. */
static __device__ __forceinline__ void take_rstd(float (&rstd)[2], const float *from, int count, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rstd[i] = at.row(i) < count ? from[at.row(i)] : 0.0f;
    }
}

/* c += b, of the first group's first column on. */
template <int N> static __device__ __forceinline__ void add_bias(float (&c)[N][4], const float *b, const seat &at)
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 v = *(const float2 *)(b + 8 * n + 2 * at.q);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            c[n][k] += k % 2 ? v.y : v.x;
        }
    }
}

/* Sums as a left operand in registers. */
static __device__ __forceinline__ void as_left(uint32_t (&left)[8][4], const float (&c)[8][4])
{
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            left[n][k] = ps_round_up(c[n][k / 2 + k % 2 * 2]);
        }
    }
}

/* Vectors to shared memory, by all threads before the ring's barrier. */
static __device__ __forceinline__ void stage_vector(float *to, const float *from, int count)
{
    for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) {
        to[i] = from[i];
    }
}

/* Sums of two neighbouring groups of 8 columns, n even and n + 1, as 16 bytes a lane: lanes of even q have the first group's
 * columns 2 q .. 2 q + 3, those of odd q the second's 2 (q - 1) .. . All lanes of a warp come here. */
static __device__ __forceinline__ float4 joined(const float *first, const float *second, const seat &at)
{
    const bool odd = at.q % 2;
    const float x = __shfl_xor_sync(0xffffffffu, odd ? first[0] : second[0], 1);
    const float y = __shfl_xor_sync(0xffffffffu, odd ? first[1] : second[1], 1);
    return odd ? make_float4(x, y, second[0], second[1]) : make_float4(first[0], first[1], x, y);
}

/* Where that goes, from n's first column on. */
static __device__ __forceinline__ int joined_column(const seat &at)
{
    return at.q % 2 * 8 + at.q / 2 * 4;
}

/* To rows of `ld`, from the warpgroup's first row and first column on. */
template <int N>
static __device__ __forceinline__ void keep_sums(float *to, int ld, const float (&c)[N][4], int count, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float *const row = to + (int64_t)at.row(i) * ld + joined_column(at);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const float4 v = joined(&c[n][2 * i], &c[n + 1][2 * i], at);
            if (at.row(i) < count) {
                *(float4 *)(row + 8 * n) = v;
            }
        }
    }
}

/* ---- the kernels ---- */

static __device__ __forceinline__ void fewer_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)FEW_REGISTERS));
}

static __device__ __forceinline__ void more_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)REGISTERS));
}

/* Shared memory: the warpgroups' left operands, LEFTS each; the ring of SLOTS; vectors; the ring's barriers. */
extern __shared__ __align__(1024) uint8_t row_memory[];

template <int LEFTS, int SLOTS, int VECTORS> struct row_kernel {
    static constexpr int LEFT = GROUPS * LEFTS * LEFT_BYTES, VECTOR = LEFT + SLOTS * PIECE_BYTES, BARRIERS = VECTOR + VECTORS * 4;
    static constexpr size_t SHARED = BARRIERS + 16 * SLOTS;

    static __device__ __forceinline__ uint32_t shared()
    {
        return ps_shared_address(row_memory);
    }
    static __device__ __forceinline__ float *vectors()
    {
        return (float *)(row_memory + VECTOR);
    }
    typedef piece_ring<SLOTS, BARRIERS - LEFT> ring_of;
    static __device__ __forceinline__ ring_of ring()
    {
        return ring_of(shared() + LEFT, GROUPS * 4);
    }
};

static __host__ __device__ __forceinline__ int tiles_of(int64_t rows)
{
    return (int)((rows + TILE - 1) / TILE);
}

/* Of this block. */
static __device__ __forceinline__ int turns_of(int64_t rows)
{
    return (tiles_of(rows) - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
}

/* Rows [.., d] of the block's tile number i to L2, while the warpgroups have the tile before in hand. */
static __device__ __forceinline__ void prefetch_tile(int i, int64_t rows, const float *from)
{
    const int64_t row0 = ((int64_t)blockIdx.x + (int64_t)i * gridDim.x) * TILE;
    ps_bulk_prefetch(from + row0 * D, (uint32_t)(rows - row0 < TILE ? rows - row0 : TILE) * D * 4);
}

typedef row_kernel<1, 5, 3 * D> enter_kernel;
typedef row_kernel<1, 4, 2 * D + MOST_HIDDEN> finish_kernel;
typedef row_kernel<2, 3, MOST_HIDDEN> back_kernel;
typedef row_kernel<1, 5, 0> leave_kernel;

/* xhat1 = LN1's of u without gamma and beta, qkv = the products' rows. */
static __global__ void __launch_bounds__(THREADS, 1) enter(const __grid_constant__ struct rows_layer x)
{
    typedef enter_kernel K;
    seat at;
    ps_grid_begin();
    stage_vector(K::vectors(), x.b_qkv, 3 * D);
    K::ring_of ring = K::ring();
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            ring.bring(
                x.pieces, turns_of(x.rows), 6, [](int i) { return i; }, [&](int i) { prefetch_tile(i, x.rows, x.u); });
        }
        return;
    }
    more_registers();
    const uint32_t left = K::shared() + at.group * LEFT_BYTES;
    float4 rows[4][4];
    take_rows(rows, x.u, D, (int64_t)blockIdx.x * TILE + at.group * ROWS, x.rows, at);
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows); tile += (int)gridDim.x) {
        at.refresh();
        const int64_t row0 = (int64_t)tile * TILE + at.group * ROWS;
        const int count = rows_from(x.rows, row0);
        at.sync(); /* the panels are free */
#pragma unroll
        for (int pass = 0; pass < 4; pass++) {
            const int row = at.passing(pass);
            float4(&v)[4] = rows[pass];
            float sum = 0, squares = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum += (v[j].x + v[j].y) + (v[j].z + v[j].w);
            }
            const float mean = ps_group_sum<8>(sum) * (1.0f / D);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = make_float4(v[j].x - mean, v[j].y - mean, v[j].z - mean, v[j].w - mean);
                squares += (v[j].x * v[j].x + v[j].y * v[j].y) + (v[j].z * v[j].z + v[j].w * v[j].w);
            }
            const float rstd = rsqrtf(fmaf(ps_group_sum<8>(squares), 1.0f / D, x.epsilon));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = make_float4(v[j].x * rstd, v[j].y * rstd, v[j].z * rstd, v[j].w * rstd);
                put_left(left, row, j, v[j], at);
            }
            if (x.xhat1) {
                keep_row(x.xhat1 + row0 * D, row, count, v, at);
                if (row < count && at.lane % 8 == 0) {
                    x.rstd1[row0 + row] = rstd;
                }
            }
        }
        ps_publish();
        at.sync();
        take_rows(rows, x.u, D, row0 + (int64_t)gridDim.x * TILE, x.rows, at);
#pragma unroll 1
        for (int i = 0; i < 6; i += 2) {
            at.refresh();
            float c[2][8][4];
            const uint32_t pieces[2] = {ring.take(), ring.take()};
            ps_wgmma_begin();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                multiply_columns(c[h], left, pieces[h]);
                ps_wgmma_commit();
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                h ? ps_wgmma_wait<0>() : ps_wgmma_wait<1>();
                ps_pin(c[h]);
                ring.release();
                const int column = (i + h) * COLUMNS;
                add_bias(c[h], K::vectors() + column, at);
                keep_sums(x.qkv + row0 * (3 * D) + column, 3 * D, c[h], count, at);
            }
        }
    }
}

/* r = u + drop(merged W_o + b_o), xhat2 of it, y = r + drop(drop(gelu(z)) W_2 + b_2) of z = xhat2 W_1 + b_1. */
static __global__ void __launch_bounds__(THREADS, 1) finish(const __grid_constant__ struct rows_layer x)
{
    typedef finish_kernel K;
    seat at;
    ps_grid_begin();
    const int hidden = x.f / COLUMNS;
    const float *const b_o = K::vectors(), *const b_2 = b_o + D, *const b_1 = b_2 + D;
    stage_vector(K::vectors(), x.b_o, D);
    stage_vector(K::vectors() + D, x.b_2, D);
    stage_vector(K::vectors() + 2 * D, x.b_1, x.f);
    K::ring_of ring = K::ring();
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            ring.bring(
                x.pieces, turns_of(x.rows), 2 + 2 * hidden, [](int i) { return 6 + i; },
                [&](int i) {
                    prefetch_tile(i, x.rows, x.merged);
                    prefetch_tile(i, x.rows, x.u);
                });
        }
        return;
    }
    more_registers();
    const uint32_t left = K::shared() + at.group * LEFT_BYTES;
    const uint64_t step = x.output.threshold ? x.output.state->step : 0;
    float4 rows[4][4];
    take_rows(rows, x.merged, D, (int64_t)blockIdx.x * TILE + at.group * ROWS, x.rows, at);
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows); tile += (int)gridDim.x) {
        at.refresh();
        const int64_t row0 = (int64_t)tile * TILE + at.group * ROWS;
        const int count = rows_from(x.rows, row0);
        at.sync();
        put_rows(left, rows, at);
        ps_publish();
        at.sync();
        const row_pairs u(x.u + row0 * D, count, at);
        float r[2][8][4]; /* halves of the columns */
        multiply_square(r, left, ring);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            add_bias(r[h], b_o + COLUMNS * h, at);
            if (x.after_o.threshold) {
                drop_sums(r[h], x.after_o, x.xhat2 ? x.kept_o + row0 * 4 : NULL, row0, D, COLUMNS * h, step, count, at);
            }
        }
        at.sync(); /* merged has been read */
        const left_place place(left, at);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = 0, squares = 0;
#pragma unroll
            for (int n = 0; n < 16; n++) {
                float *const v = &r[n / 8][n % 8][2 * i];
                v[0] += u.of[n][i].x;
                v[1] += u.of[n][i].y;
                sum += v[0] + v[1];
            }
            const float mean = ps_group_sum<4>(sum) * (1.0f / D);
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const float *const v = &r[n / 8][n % 8][2 * i];
                squares += (v[0] - mean) * (v[0] - mean) + (v[1] - mean) * (v[1] - mean);
            }
            const float rstd = rsqrtf(fmaf(ps_group_sum<4>(squares), 1.0f / D, x.epsilon));
            const bool keeps = x.xhat2 && at.row(i) < count;
            if (keeps && at.q == 0) {
                x.rstd2[row0 + at.row(i)] = rstd;
            }
#pragma unroll
            for (int n = 0; n < 16; n += 2) {
                float xhat[2][2];
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const float *const v = &r[n / 8][n % 8 + t][2 * i];
                    xhat[t][0] = rounded((v[0] - mean) * rstd);
                    xhat[t][1] = rounded((v[1] - mean) * rstd);
                    ps_shared_store2(place.of(n + t, i), make_float2(xhat[t][0], xhat[t][1]));
                }
                const float4 both = joined(xhat[0], xhat[1], at);
                if (keeps) {
                    *(float4 *)(x.xhat2 + (row0 + at.row(i)) * D + 8 * n + joined_column(at)) = both;
                }
            }
        }
        ps_publish();
        at.sync();
        float c[16][4];
#pragma unroll 1
        for (int j = 0; j < hidden; j++) {
            at.refresh();
            float z[8][4];
            uint32_t piece = ring.take();
            ps_wgmma_begin();
            multiply_columns(z, left, piece);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(z);
            ring.release();
            add_bias(z, b_1 + COLUMNS * j, at);
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    z[n][k] *= ps_gelu_sigmoid(z[n][k]);
                }
            }
            if (x.gelu.threshold) {
                drop_sums(z, x.gelu, x.xhat2 ? x.kept_gelu + row0 * (x.f / 32) : NULL, row0, x.f, COLUMNS * j, step, count, at);
            }
            uint32_t h[8][4];
            as_left(h, z);
            piece = ring.take();
            ps_wgmma_begin();
            multiply_rows(c, h, piece, j > 0);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(h);
            ps_pin(c);
            ring.release();
        }
        add_bias(c, b_2, at);
        if (x.output.threshold) {
            drop_sums(c, x.output, x.xhat2 ? x.kept_output + row0 * 4 : NULL, row0, D, 0, step, count, at);
        }
#pragma unroll
        for (int n = 0; n < 16; n++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                c[n][k] += r[n / 8][n % 8][k];
            }
        }
        take_rows(rows, x.merged, D, row0 + (int64_t)gridDim.x * TILE, x.rows, at);
        keep_sums(x.y + row0 * D, D, c, count, at);
    }
}

/* From dy: masked_2 = drop'(dy), hidden, d_hidden, du = dy + LN2's gradient, masked_o = drop'(du), d_merged = masked_o W_o'. */
static __global__ void __launch_bounds__(THREADS, 1) back(const __grid_constant__ struct rows_layer x)
{
    typedef back_kernel K;
    seat at;
    ps_grid_begin();
    const int hidden = x.f / COLUMNS;
    const row_places pieces(hidden);
    const float *const b_1 = K::vectors();
    stage_vector(K::vectors(), x.b_1, x.f);
    K::ring_of ring = K::ring();
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            ring.bring(
                x.pieces, turns_of(x.rows), 3 * hidden + 2,
                [=](int i) {
                    return i >= 3 * hidden ? pieces.w_ot + i - 3 * hidden
                           : i % 3 == 0    ? 8 + i / 3 * 2
                                           : pieces.back + i / 3 * 2 + i % 3 - 1;
                },
                [&](int i) {
                    prefetch_tile(i, x.rows, x.xhat2);
                    prefetch_tile(i, x.rows, x.dy);
                });
        }
        return;
    }
    more_registers();
    const uint32_t gradient = K::shared() + at.group * 2 * LEFT_BYTES, left = gradient + LEFT_BYTES;
    const bool drops = x.gelu.threshold != 0;
    const float scale = drops ? x.gelu.scale : 1.0f; /* of all three */
    uint32_t kept_rows[4];                           /* of each pass, word c of the row that lane 8 r + c has */
    const auto ahead = [&](int64_t first) {
        copy_rows(left, x.xhat2, first, x.rows, at);
        copy_rows(gradient, x.dy, first, x.rows, at);
#pragma unroll
        for (int pass = 0; pass < 4; pass++) {
            const int64_t row = first + at.passing(pass);
            kept_rows[pass] = drops && row < x.rows ? x.kept_output[row * 4 + at.lane % 4] : ~0u;
        }
    };
    ahead((int64_t)blockIdx.x * TILE + at.group * ROWS);
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows); tile += (int)gridDim.x) {
        at.refresh();
        const int64_t row0 = (int64_t)tile * TILE + at.group * ROWS;
        const int count = rows_from(x.rows, row0);
        ps_copy_wait(); /* for what the lane itself has asked for */
#pragma unroll
        for (int pass = 0; pass < 4; pass++) {
            float4 v[4];
            const int row = at.passing(pass);
#pragma unroll
            for (int j = 0; j < 4; j++) { /* columns 4 c .. 4 c + 3 of the word's 32 */
                const uint32_t mask = __shfl_sync(0xffffffffu, kept_rows[pass], (at.lane & 24) + j) >> (at.lane % 8 * 2);
                v[j] = *(const float4 *)(row_memory + (gradient - K::shared()) + panel_place(row, j, at));
                v[j] = make_float4(mask & 1 ? v[j].x * scale : 0, mask >> 16 & 1 ? v[j].y * scale : 0,
                                   mask & 2 ? v[j].z * scale : 0, mask >> 17 & 1 ? v[j].w * scale : 0);
                put_left(gradient, row, j, v[j], at);
            }
            keep_row(x.masked_2 + row0 * D, row, count, v, at);
        }
        ps_publish();
        at.sync();
        float c[16][4];
#pragma unroll 1
        for (int j = 0; j < hidden; j++) {
            at.refresh();
            const int column = COLUMNS * j;
            uint2 kept[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                kept[i] = drops && at.row(i) < count ? *(const uint2 *)(x.kept_gelu + ((row0 + at.row(i)) * x.f + column) / 32)
                                                     : make_uint2(~0u, ~0u);
            }
            float z[8][4], d[8][4];
            uint32_t piece = ring.take();
            const uint32_t second = ring.take();
            ps_wgmma_begin();
            multiply_columns(z, left, piece);
            multiply_columns(d, gradient, second);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(z);
            ps_pin(d);
            ring.release();
            ring.release();
            add_bias(z, b_1 + column, at);
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const uint32_t mask = (n / 4 ? kept[k / 2].y : kept[k / 2].x) >> at.q;
                    const float keep = kept_scale(mask, n % 4, k % 2, scale), v = z[n][k], s = ps_gelu_sigmoid(v);
                    z[n][k] = keep * v * s;
                    d[n][k] *= keep * ps_gelu_slope(v, s);
                }
            }
            keep_sums(x.hidden + row0 * x.f + column, x.f, z, count, at);
            keep_sums(x.d_hidden + row0 * x.f + column, x.f, d, count, at);
            uint32_t h[8][4];
            as_left(h, d);
            piece = ring.take();
            ps_wgmma_begin();
            multiply_rows(c, h, piece, j > 0);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(h);
            ps_pin(c);
            ring.release();
        }
        at.refresh();
        const row_pairs dy(x.dy + row0 * D, count, at);
        float rstd[2];
        uint4 kept[2];
        take_rstd(rstd, x.rstd2 + row0, count, at);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            kept[i] =
                drops && at.row(i) < count ? *(const uint4 *)(x.kept_o + (row0 + at.row(i)) * 4) : make_uint4(~0u, ~0u, ~0u, ~0u);
        }
        const left_place place(left, at);
        normalise_gradient(
            c, rstd, [&](int n, int i) { return dy.of[n][i]; }, [&](int n, int i) { return ps_shared_load2(place.of(n, i)); });
        keep_sums(x.du + row0 * D, D, c, count, at);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            drop_32(c, 0, i, kept[i].x, scale, at);
            drop_32(c, 4, i, kept[i].y, scale, at);
            drop_32(c, 8, i, kept[i].z, scale, at);
            drop_32(c, 12, i, kept[i].w, scale, at);
        }
        at.sync(); /* all have multiplied with the gradient */
        const left_place gradient_place(gradient, at);
#pragma unroll
        for (int n = 0; n < 16; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ps_shared_store2(gradient_place.of(n, i), make_float2(rounded(c[n][2 * i]), rounded(c[n][2 * i + 1])));
            }
        }
        ps_publish();
        at.sync();
        keep_sums(x.masked_o + row0 * D, D, c, count, at);
        float m[2][8][4];
        multiply_square(m, gradient, ring);
        at.sync(); /* the panels are free */
        ahead(row0 + (int64_t)gridDim.x * TILE);
        keep_sums(x.d_merged + row0 * D, D, m[0], count, at);
        keep_sums(x.d_merged + row0 * D + COLUMNS, D, m[1], count, at);
    }
}

/* du += LN1's gradient of d_qkv W_qkv'. */
static __global__ void __launch_bounds__(THREADS, 1) leave(const __grid_constant__ struct rows_layer x)
{
    typedef leave_kernel K;
    seat at;
    ps_grid_begin();
    K::ring_of ring = K::ring();
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            const int first = row_places(x.f / COLUMNS).w_qkvt;
            ring.bring(
                x.pieces, turns_of(x.rows), 6, [=](int i) { return first + i; }, [](int) {});
        }
        return;
    }
    more_registers();
    const uint32_t left = K::shared() + at.group * LEFT_BYTES;
    int64_t row0 = (int64_t)blockIdx.x * TILE + at.group * ROWS;
    float4 rows[4][4];
    take_rows(rows, x.d_qkv, 3 * D, row0, x.rows, at);
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows); tile += (int)gridDim.x) {
        at.refresh();
        const int count = rows_from(x.rows, row0);
        float c[16][4];
#pragma unroll
        for (int part = 0; part < 3; part++) {
            at.refresh();
            at.sync();
            put_rows(left, rows, at);
            ps_publish();
            at.sync();
            const uint32_t first = ring.take(), second = ring.take();
            ps_wgmma_begin();
            multiply_rows(c, left, first, part > 0);
            multiply_rows(c, left + 2 * PANEL_BYTES, second, 1);
            ps_wgmma_commit();
            if (part < 2) {
                take_rows(rows, x.d_qkv + (part + 1) * D, 3 * D, row0, x.rows, at);
                ps_wgmma_wait<0>();
                ps_pin(c);
                ring.release();
                ring.release();
            }
        }
        at.refresh();
        float rstd[2];
        take_rstd(rstd, x.rstd1 + row0, count, at);
        const row_pairs xhat(x.xhat1 + row0 * D, count, at), residual(x.du + row0 * D, count, at);
        ps_wgmma_wait<0>();
        ps_pin(c);
        ring.release();
        ring.release();
        normalise_gradient(
            c, rstd, [&](int n, int i) { return residual.of[n][i]; }, [&](int n, int i) { return xhat.of[n][i]; });
        at.refresh();
        const int64_t done = row0;
        row0 += (int64_t)gridDim.x * TILE;
        take_rows(rows, x.d_qkv, 3 * D, row0, x.rows, at);
        keep_sums(x.du + done * D, D, c, count, at);
    }
}

/* ---- launches ---- */

enum ps_status ps_encoder_rows_supported(const struct ps_encoder_small *e)
{
    if (e->d_model != D || e->n_heads < D / PS_ATTENTION_HEAD || D % e->n_heads != 0 || e->patches < 1 ||
        e->patches > PS_ATTENTION_PATCHES || e->d_ff < COLUMNS || e->d_ff > MOST_HIDDEN || e->d_ff % COLUMNS != 0) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda): d_model %lld with %lld heads, d_ff %lld and %lld patches: level layer in tf32 has d_model %d "
            "with heads of up to %d, d_ff a multiple of %d up to %d, up to %d patches",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, D, PS_ATTENTION_HEAD, COLUMNS,
            MOST_HIDDEN, PS_ATTENTION_PATCHES);
    }
    return PS_OK;
}

int ps_encoder_rows_slower(const struct ps_encoder_small *e)
{
    return e->sequences * e->patches < 1536; /* measured at weather with batches of 1 and 2 */
}

/* Floats of a layer in what is kept; dropout's bits are always there. */
static int64_t kept_floats(const struct ps_encoder_small *e)
{
    return padded_rows(e) * (6 * D + e->n_heads + 2 + (2 * D + e->d_ff) / 32);
}

size_t ps_encoder_rows_kept_bytes(const struct ps_encoder_small *e)
{
    return (size_t)(kept_floats(e) * e->layers) * sizeof(float);
}

/* The workspace, in floats: where things begin. */
struct row_workspace {
    int64_t biases, parts, hidden, d_hidden, masked_2, masked_o, d_merged, d_qkv, delta, all;
};

static struct row_workspace workspace_of(const struct ps_encoder_small *e)
{
    const int64_t R = padded_rows(e);
    struct row_workspace w = {};
    w.biases = e->layers * pieces_of((int)(e->d_ff / COLUMNS)) * PIECE;
    w.parts = w.biases + e->layers * (3 * D + e->d_ff);
    w.hidden = w.parts + ps_encoder_float_parts(e);
    w.d_hidden = w.hidden + R * e->d_ff;
    w.masked_2 = w.d_hidden + R * e->d_ff;
    w.masked_o = w.masked_2 + R * D;
    w.d_merged = w.masked_o + R * D;
    w.d_qkv = w.d_merged + R * D;
    w.delta = w.d_qkv + R * 3 * D;
    w.all = w.delta + R * e->n_heads;
    return w;
}

size_t ps_encoder_rows_workspace_bytes(const struct ps_encoder_small *e)
{
    return (size_t)workspace_of(e).all * sizeof(float);
}

static struct rows_layer layer_of(const struct ps_encoder_small *e, int layer)
{
    const struct row_workspace at = workspace_of(e);
    const struct ps_encoder_layout *const l = &e->offsets;
    float *const w = (float *)e->workspace, *const stream = (float *)e->u;
    const float *const p = e->parameters + layer * l->vector_stride;
    const int64_t R = padded_rows(e), rows = e->sequences * e->patches;
    struct rows_layer x = {};
    x.rows = rows;
    x.f = (int)e->d_ff;
    x.epsilon = (float)e->epsilon;
    x.pieces = w + (int64_t)layer * pieces_of(x.f / COLUMNS) * PIECE;
    x.b_qkv = w + at.biases + layer * (3 * D + x.f);
    x.b_o = p + l->b_o;
    x.b_1 = x.b_qkv + 3 * D;
    x.b_2 = p + l->b_2;
    x.u = stream + layer * rows * D;
    x.y = stream + (layer + 1) * rows * D;
    x.qkv = w + at.d_qkv; /* where nothing is kept */
    x.merged = w + at.d_merged;
    x.logsum = w + at.delta;
    if (e->kept) {
        x.xhat1 = (float *)e->kept + layer * kept_floats(e);
        x.qkv = x.xhat1 + R * D;
        x.merged = x.qkv + R * 3 * D;
        x.xhat2 = x.qkv + R * 4 * D;
        x.rstd1 = x.xhat2 + R * D;
        x.rstd2 = x.rstd1 + R;
        x.kept_o = (uint32_t *)(x.rstd2 + R);
        x.kept_output = x.kept_o + R * (D / 32);
        x.kept_gelu = x.kept_output + R * (D / 32);
        x.logsum = (float *)(x.kept_gelu + R * (x.f / 32));
    }
    x.dy = layer + 1 == e->layers ? (const float *)e->dy : (const float *)e->du;
    x.d_qkv = w + at.d_qkv;
    x.du = (float *)e->du;
    x.hidden = w + at.hidden;
    x.d_hidden = w + at.d_hidden;
    x.masked_2 = w + at.masked_2;
    x.masked_o = w + at.masked_o;
    x.d_merged = w + at.d_merged;
    x.after_o = at_site(e->dropout, layer, 0);
    x.gelu = at_site(e->dropout, layer, 1);
    x.output = at_site(e->dropout, layer, 2);
    return x;
}

/* [S, h, N, e] of rows of `columns`. */
static struct ps_tensor heads_of(const struct ps_encoder_small *e, const float *rows, int64_t columns)
{
    return ps_tensor_heads((void *)rows, PS_F32, e->sequences, e->n_heads, e->patches, D / e->n_heads, columns);
}

static struct ps_tensor statistics_of(const struct ps_encoder_small *e, float *data)
{
    return ps_tensor_3d(data, PS_F32, e->sequences, e->n_heads, e->patches);
}

template <typename K>
static enum ps_status launch_rows(const struct ps_cuda_context *c, void (*run)(const struct rows_layer), const char *what,
                                  const struct rows_layer &x)
{
    const int tiles = tiles_of(x.rows);
    return launch(c, run, dim3((unsigned)(tiles < c->multiprocessors ? tiles : c->multiprocessors)), THREADS, K::SHARED, what, x);
}

enum ps_status ps_encoder_rows_forward(const struct ps_kernels *k, const struct ps_encoder_small *e)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const char *name = "encoder_forward";
    const int hidden = (int)(e->d_ff / COLUMNS);
    struct packing pack = {};
    pack.pieces = (float *)e->workspace;
    pack.biases = pack.pieces + workspace_of(e).biases;
    pack.weights = (const float *)e->weights;
    pack.parameters = e->parameters;
    pack.at = e->offsets;
    pack.f = (int)e->d_ff;
    pack.units = (e->kept ? pieces_of(hidden) : row_places(hidden).back) * (PIECE / 4); /* backward's too, or not */
    PS_TRY(launch(c, pack_rows, dim3(ps_cuda_blocks(pack.units + 3 * D + pack.f, 256), (unsigned)e->layers), 256, 0, name, pack));
    const double scale = 1 / sqrt((double)D / (double)e->n_heads);
    for (int layer = 0; layer < e->layers; layer++) {
        const struct rows_layer x = layer_of(e, layer);
        PS_TRY(launch_rows<enter_kernel>(c, enter, name, x));
        const struct ps_attention attention = {heads_of(e, x.merged, D),          statistics_of(e, x.logsum),
                                               heads_of(e, x.qkv, 3 * D),         heads_of(e, x.qkv + D, 3 * D),
                                               heads_of(e, x.qkv + 2 * D, 3 * D), scale};
        PS_TRY(k->attention(k, &attention));
        PS_TRY(launch_rows<finish_kernel>(c, finish, name, x));
    }
    return PS_OK;
}

enum ps_status ps_encoder_rows_backward(const struct ps_kernels *k, const struct ps_encoder_small *e)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const char *name = "encoder_backward";
    const struct row_workspace at = workspace_of(e);
    float *const workspace = (float *)e->workspace;
    const double scale = 1 / sqrt((double)D / (double)e->n_heads);
    for (int layer = (int)e->layers; layer-- > 0;) {
        const struct rows_layer x = layer_of(e, layer);
        float *const d_qkv = workspace + at.d_qkv;
        PS_TRY(launch_rows<back_kernel>(c, back, name, x));
        const struct ps_attention_backward attention = {heads_of(e, d_qkv, 3 * D),
                                                        heads_of(e, d_qkv + D, 3 * D),
                                                        heads_of(e, d_qkv + 2 * D, 3 * D),
                                                        statistics_of(e, workspace + at.delta),
                                                        heads_of(e, x.d_merged, D),
                                                        heads_of(e, x.merged, D),
                                                        statistics_of(e, x.logsum),
                                                        heads_of(e, x.qkv, 3 * D),
                                                        heads_of(e, x.qkv + D, 3 * D),
                                                        heads_of(e, x.qkv + 2 * D, 3 * D),
                                                        scale};
        PS_TRY(k->attention_backward(k, &attention));
        PS_TRY(launch_rows<leave_kernel>(c, leave, name, x));
        const struct ps_encoder_float_operands operands = {{x.xhat1, x.merged, x.xhat2, x.hidden},
                                                           {x.d_qkv, x.masked_o, x.d_hidden, x.masked_2}};
        PS_TRY(ps_encoder_float_products(k, e, layer, &operands, workspace + at.parts));
    }
    return ps_encoder_float_sums(k, e, workspace + at.parts);
}

} // namespace PS_REAL16_SPACE
