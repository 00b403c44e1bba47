/* Level `layer` in tf32 for d_model 128: all of a layer that goes by rows, in two kernels each way around the table's attention.
 *
 * Why: a layer's weights in fp32, 512 KB at d_ff 256, and what attention wants of a tile do not fit a multiprocessor together, and
 * with mma.sync (encoder/streamed/float.cu) shared memory cannot feed the tensor cores: 6.4 ms at weather, where level gemm
 * takes 4.6. Rows know nothing of each other but in attention, so the rest is cut there: `enter` LN1 and W_qkv; `finish` W_o, the
 * residual, LN2, the feed-forward part; backward `back` the feed-forward part, LN2, W_o'; `leave` W_qkv', LN1. Between a kernel's
 * products rows stay in registers; what weights' gradients read is written: encoder/split/gradients.cu.
 *
 * Memory bounds it, so what tf32 would round anyway is kept in 16 bits: fp16 has its 10 bits of mantissa, and forward's operands
 * lie in its range: rows that LayerNorm has made, what weights make of them, weights (one beyond 65,504 shows as a loss that is not
 * finite; below 2^-14 the error stays 2^-25). They are multiplied as fp16 too. The residual stream, sums and statistics are fp32,
 * and so are gradients, whose range nobody knows, and tf32 their products.
 *
 * A warpgroup takes 64 rows of its own through all of a kernel; wgmma multiplies them, in shared memory or in registers, with
 * pieces of weights that stay in shared memory, or that one thread has the copy engine bring from L2. `pack_rows` lays the pieces
 * out before, the summed dimension contiguous, since wgmma takes tf32 in no other way. It multiplies W_qkv and W_1 with LayerNorm's
 * gamma and adds beta W to their biases: the left operand is xhat itself, which is what weights' gradients are made of too (G =
 * xhat' dy; encoder/streamed/float.cu says how the rest follows), and gradients come out as xhat's. The hidden columns before gelu
 * are not kept: backward computes them again. Dropout's bits are, a bit an element.
 *
 * Counts a layer, R rows, beside attention's and those of weights' gradients; products' flops, bytes of tensors read and written.
 * enter: 6 R d^2; 4 R d, 8 R d; finish: 2 R d^2 + 4 R d f; 6 R d, 6 R d; back: 6 R d f + 2 R d^2; 10 R d (dy twice), 16 R d + 6 R
 * f; leave: 6 R d^2; 18 R d, 4 R d; dropout's bits R (2 d + f) / 8 each. Weights from L2: enter's and, up to f 256, finish's once a
 * block, 96 and 32 + f / 2 KB; a tile of 128 rows of back 64 + 5 f / 4 KB, of leave 192. weather (R 112,896, f 256), us at wgmma's
 * 797 TFLOP/s (fp16) and 415, and at 4.2 TB/s: enter 14, 41; finish 23, 41; back 54, 131; leave 27, 76. Measured 75, 99, 192, 103,
 * where schedulers issue in 38, 31, 31 and 15 % of the clocks: eight warps of 240 registers multiply (in enter twelve), and their
 * waits for memory and for their own products lie open. */
#include "kernels/cuda/encoder/split/rows.cuh"

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/encoder/streamed/float.cuh"
#include "kernels/cuda/encoder/streamed/float_device.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

namespace PS_REAL16_SPACE
{

enum {
    D = 128,
    ROWS = 64, /* of a warpgroup */
    COLUMNS = 64,
    /* `enter`'s warpgroups; of the others those that multiply, beside one of which a thread brings weights. */
    ENTER_GROUPS = 3,
    ENTER_THREADS = ENTER_GROUPS * 128,
    GROUPS = 2,
    THREADS = (GROUPS + 1) * 128,
    TILE = GROUPS * ROWS,
    /* Registers a thread: taken from, and given to, what the block has (else the kernel waits for ever), in steps of 8. */
    FEW_REGISTERS = 24,
    REGISTERS = 240,
    PANEL_BYTES = ROWS * 128, /* 64 columns of fp16, 32 of tf32 */
    HALF_BYTES = D / 64 * PANEL_BYTES,
    WORD_BYTES = D / 32 * PANEL_BYTES
};

static_assert(GROUPS * REGISTERS + FEW_REGISTERS <= (GROUPS + 1) * (65536 / THREADS / 8 * 8), "of the multiprocessor's");

/* Pieces of a layer, in this order, HIDDEN = f / 64. fp16, HALF_BYTES each: of W_qkv 6 and W_o 2, 64 columns each; W_1's 64 columns
 * and W_2's 64 rows in turns, HIDDEN of each. tf32, WORD_BYTES each, backward's: W_2' and W_1' likewise, W_o' 2, W_qkv' 6, 64 rows
 * each. A piece of columns holds [64][128], the product's columns and what it sums over, a piece of rows [128][64]. In panels of
 * 128 bytes of the summed dimension a line, whose units of 16 are exchanged by the line's number modulo 8.
 *
 * Lines of a piece are columns in the order of `spread`, so that a lane's sums of two neighbouring groups of 8 are four columns in
 * a row, 16 bytes of fp32. What sums over hidden columns in registers has them in that order too; tf32 takes the columns 0, 2, 4,
 * 6, 1, 3, 5, 7 of each eight of those (as sums come out). */
static __host__ __device__ __forceinline__ int halves_of(int hidden)
{
    return 8 + 2 * hidden;
}

struct row_places {
    int w_ot, w_qkvt, all; /* pieces of tf32; those of W_2' and W_1' come first */
    __host__ __device__ __forceinline__ explicit row_places(int hidden)
        : w_ot(2 * hidden), w_qkvt(2 * hidden + 2), all(2 * hidden + 8)
    {
    }
};

static __host__ __device__ __forceinline__ int64_t layer_bytes(int hidden)
{
    return (int64_t)halves_of(hidden) * HALF_BYTES + (int64_t)row_places(hidden).all * WORD_BYTES;
}

/* The column that sum 8 n + 2 q + e stands for. */
static __device__ __forceinline__ int spread(int sum)
{
    const int n = sum / 8, q = sum % 8 / 2, e = sum % 2;
    return n / 2 * 16 + q * 4 + n % 2 * 2 + e;
}

struct rows_layer {
    int64_t rows; /* R */
    int f;
    float epsilon;
    const uint8_t *halves, *words;           /* the layer's pieces */
    const float *b_qkv, *b_o, *b_1, *b_2;    /* b_qkv and b_1 with beta's share */
    const float *u;                          /* [R, d] */
    __half *xhat1, *qkv, *merged, *xhat2;    /* [R, d], [R, 3d], [R, d], [R, d]; xhat and rstd NULL: nothing is kept */
    float *rstd1, *rstd2, *logsum, *y;       /* [R]; attention's, [S, h, N]; [R, d] */
    const float *dy, *d_qkv;                 /* [R, d], [R, 3d] */
    float *du;                               /* back: the gradient of the residual stream; may be dy. leave: u's */
    __half *hidden;                          /* [R, f]: what W_2 is multiplied with, */
    float *d_hidden;                         /* and the gradient entering W_1 */
    float *masked_2, *masked_o, *d_merged;   /* [R, d]: gradients entering W_2 and W_o, and that of merged */
    struct ps_dropout after_o, gelu, output; /* after W_o, after gelu, after W_2 */
    /* What they keep, drawn by `enter`: quad_bits of 32 columns a word, [R, 4], [R, f / 32], [R, 4]. */
    uint32_t *kept_o, *kept_gelu, *kept_output;
};

/* ---- packing ---- */

struct packing {
    uint8_t *pieces; /* [layers, layer_bytes] */
    float *biases;   /* [layers, 3d + f] */
    const float *weights, *parameters;
    struct ps_encoder_layout at;
    int f, units; /* 16 bytes each, of a layer's pieces */
};

/* Forward: what is summed index k and column n of a piece of fp16. */
static __device__ __forceinline__ float forward_element(const struct packing &x, const float *w, const float *p, int piece, int k,
                                                        int n)
{
    if (piece < 6) {
        return w[x.at.w_qkv + k * (3 * D) + piece * COLUMNS + n] * p[x.at.ln1_gamma + k];
    }
    if (piece < 8) {
        return w[x.at.w_o + k * D + (piece - 6) * COLUMNS + n];
    }
    const int j = (piece - 8) / 2 * COLUMNS;
    return piece % 2 == 0 ? w[x.at.w_1 + k * x.f + j + n] * p[x.at.ln2_gamma + k] : w[x.at.w_2 + (j + k) * D + n];
}

/* Backward, of tf32. */
static __device__ __forceinline__ float backward_element(const struct packing &x, const float *w, const float *p, int piece, int k,
                                                         int n)
{
    const row_places at(x.f / COLUMNS);
    if (piece < at.w_ot) {
        const int j = piece / 2 * COLUMNS;
        return piece % 2 == 0 ? w[x.at.w_2 + (j + n) * D + k] : w[x.at.w_1 + n * x.f + j + k] * p[x.at.ln2_gamma + n];
    }
    if (piece < at.w_qkvt) {
        return w[x.at.w_o + ((piece - at.w_ot) * COLUMNS + n) * D + k];
    }
    return w[x.at.w_qkv + n * (3 * D) + (piece - at.w_qkvt) * COLUMNS + k] * p[x.at.ln1_gamma + n];
}

/* A unit of 16 bytes, or a bias, a thread; a layer to each blockIdx.y. Reads 8 bytes for each element. */
static __global__ void __launch_bounds__(256) pack_rows(const __grid_constant__ struct packing x)
{
    ps_grid_begin();
    const int layer = (int)blockIdx.y, hidden = x.f / COLUMNS, halves = halves_of(hidden) * (HALF_BYTES / 16);
    const row_places at(hidden);
    const float *const w = x.weights + layer * x.at.matrix_stride, *const p = x.parameters + layer * x.at.vector_stride;
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < x.units) {
        const bool half = i < halves;
        const int bytes = half ? HALF_BYTES : WORD_BYTES, from = half ? i : i - halves;
        const int piece = from / (bytes / 16), in = from % (bytes / 16);
        const bool of_rows = half ? piece >= 8 && piece % 2 == 1 : piece >= at.w_qkvt || (piece < at.w_ot && piece % 2 == 1);
        const int lines = of_rows ? D : COLUMNS, line = in / 8 % lines, unit = in % 8 ^ line % 8, panel = in / 8 / lines;
        uint4 out;
        uint32_t *const word = (uint32_t *)&out;
        if (half) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float v[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int k = panel * 64 + unit * 8 + 2 * j + h;
                    v[h] = forward_element(x, w, p, piece, of_rows ? spread(k) : k, spread(line));
                }
                word[j] = ps_pack<ps_fp16>(v);
            }
        } else {
            const bool in_registers = of_rows && piece < at.w_qkvt;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int place = unit % 2 * 4 + j, eight = panel * 32 + unit / 2 * 8;
                const int k = in_registers ? spread(eight + 2 * (place % 4) + place / 4) : eight + place;
                word[j] = ps_tf32(backward_element(x, w, p, piece, k, spread(line)));
            }
        }
        *(uint4 *)(x.pieces + layer * layer_bytes(hidden) + (int64_t)i * 16) = out;
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

/* The slots that pieces pass through; where there are as many as pieces, these stay. */
template <int SLOTS, int SLOT_BYTES, int FULL> struct piece_ring {
    static constexpr int EMPTY = FULL + 8 * SLOTS; /* where the slots' barriers are, from the first slot on */
    uint32_t slots;                                /* their address */
    int count;                                     /* slots in use */
    int slot, oldest;                              /* of the next piece to take, of the first not yet released */
    uint32_t parity;
    bool stay;

    /* By all threads. readers: warps. pieces: of a turn. */
    __device__ __forceinline__ piece_ring(uint32_t slots_, int readers, int pieces)
        : slots(slots_), count(pieces < SLOTS ? pieces : SLOTS), slot(0), oldest(0), parity(0), stay(pieces <= SLOTS)
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
    /* One thread, for all readers: `pieces` of them, `times` over; piece(j, bytes) is where number j is, of how many bytes; rows(i)
     * goes before turn i. */
    template <typename P, typename R> __device__ __forceinline__ void bring(int times, int pieces, P piece, R rows)
    {
        int to = 0;
        uint32_t turn = 1; /* the first turn finds the slots empty */
        for (int i = 0; i < times; i++) {
            rows(i);
            for (int j = 0; j < (stay && i > 0 ? 0 : pieces); j++) {
                int bytes;
                const uint8_t *const from = piece(j, bytes);
                ps_mbarrier_wait(slots + EMPTY + 8 * to, turn);
                ps_mbarrier_expect(slots + FULL + 8 * to, bytes);
                ps_bulk_fetch(slots + to * SLOT_BYTES, from, bytes, slots + FULL + 8 * to);
                if (++to == SLOTS) {
                    to = 0;
                    turn ^= 1;
                }
            }
        }
    }
    template <typename P> __device__ __forceinline__ void bring(int times, int pieces, P piece)
    {
        bring(times, pieces, piece, [](int) {});
    }
    /* The next piece, once it is there: its place as wgmma's operand. */
    __device__ __forceinline__ uint32_t take()
    {
        ps_mbarrier_wait(slots + FULL + 8 * slot, parity);
        const uint32_t place = ps_wgmma_place(slots + slot * SLOT_BYTES);
        if (++slot == count) {
            slot = 0;
            parity ^= stay ? 0 : 1;
        }
        return place;
    }
    /* The oldest piece taken, which no product reads any more. */
    __device__ __forceinline__ void release()
    {
        if (!stay) {
            ps_mbarrier_arrive(slots + EMPTY + 8 * oldest);
            oldest = oldest + 1 == SLOTS ? 0 : oldest + 1;
        }
    }
};

/* ---- a warpgroup's rows ----
 *
 * Sums of products: c[n][2 i + e] is row 16 w + g + 8 i, column spread(8 n + 2 q + e), of warp w and lane 4 g + q (`seat`): of each
 * 16 columns, sums n = 2 m and 2 m + 1, a lane has columns 16 m + 4 q + 0 .. 3. Left operands lie in panels, of fp16 two of 64
 * columns, of tf32 four of 32. By rows: a warp takes four of its 16 at a time, lane 8 r + c has columns 4 c + 32 j + 0 .. 3.
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

/* Where the lane's columns 16 m + 4 q .. of its row i lie in panels: of fp16, 8 bytes; */
struct half_place {
    uint32_t base;
    __device__ __forceinline__ half_place(uint32_t panels, const seat &at)
        : base(panels + at.row(0) * 128 + (((at.q / 2) ^ at.g) << 4) + at.q % 2 * 8)
    {
    }
    __device__ __forceinline__ uint32_t of(int m, int i) const
    {
        return (base ^ m % 4 << 5) + m / 4 * PANEL_BYTES + i * 1024;
    }
};

/* of tf32, 16. */
struct word_place {
    uint32_t base;
    __device__ __forceinline__ word_place(uint32_t panels, const seat &at) : base(panels + at.row(0) * 128 + ((at.q ^ at.g) << 4))
    {
    }
    __device__ __forceinline__ uint32_t of(int m, int i) const
    {
        return (base ^ m % 2 << 6) + m / 2 * PANEL_BYTES + i * 1024;
    }
};

static __device__ __forceinline__ void put_shared(uint32_t address, float4 v)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

static __device__ __forceinline__ void put_shared(uint32_t address, uint2 v)
{
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

static __device__ __forceinline__ void put_shared(uint32_t address, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

/* To global memory, in one piece: left to itself the compiler takes sums apart again, four times as many stores. */
static __device__ __forceinline__ void put_global(float *to, float4 v)
{
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

static __device__ __forceinline__ void put_global(__half *to, uint2 v)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}

static __device__ __forceinline__ uint2 get_shared(uint32_t address)
{
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ uint2 as_halves(const float4 &v)
{
    return make_uint2(ps_pack<ps_fp16>(&v.x), ps_pack<ps_fp16>(&v.z));
}

static __device__ __forceinline__ float4 as_floats(const uint2 &v)
{
    float4 r;
    ps_unpack<ps_fp16>(&r.x, v.x);
    ps_unpack<ps_fp16>(&r.z, v.y);
    return r;
}

static __device__ __forceinline__ float4 as_operand(const float4 &v)
{
    return make_float4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
}

/* The lane's four columns of 16. */
template <int N> static __device__ __forceinline__ float4 four(const float (&c)[N][4], int m, int i)
{
    return make_float4(c[2 * m][2 * i], c[2 * m][2 * i + 1], c[2 * m + 1][2 * i], c[2 * m + 1][2 * i + 1]);
}

/* Row r, columns 4 c + 32 j, of panels of tf32. */
static __device__ __forceinline__ uint32_t word_row(int row, int j, const seat &at)
{
    return (uint32_t)(j * PANEL_BYTES + row * 128 + ((at.lane % 8 ^ row % 8) << 4));
}

/* The same of fp16. */
static __device__ __forceinline__ uint32_t half_row(int row, int j, const seat &at)
{
    return (uint32_t)(j / 2 * PANEL_BYTES + row * 128 + (((at.lane % 8 / 2 + j % 2 * 4) ^ row % 8) << 4) + at.lane % 2 * 8);
}

/* Row r, 16 bytes of fp16: columns 8 c + 64 p. */
static __device__ __forceinline__ uint32_t half_unit(int row, int p, const seat &at)
{
    return (uint32_t)(p * PANEL_BYTES + row * 128 + ((at.lane % 8 ^ row % 8) << 4));
}

/* The lane's part of a row; zero where the row does not exist. */
static __device__ __forceinline__ void take_row(float4 (&v)[4], const float *from, int ld, int row, int count, const seat &at)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        v[j] = row < count ? *(const float4 *)(from + (int64_t)row * ld + at.lane % 8 * 4 + 32 * j) : make_float4(0, 0, 0, 0);
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

/* Of [R, d] of fp16: units c and c + 8 of those rows. */
static __device__ __forceinline__ void take_rows(uint4 (&v)[4][2], const __half *from, int64_t row0, int64_t rows, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = at.passing(i / 2);
        v[i / 2][i % 2] = row < rows_from(rows, row0) ? *(const uint4 *)(from + (row0 + row) * D + at.lane % 8 * 8 + i % 2 * 64)
                                                      : make_uint4(0, 0, 0, 0);
    }
}

/* Those as operands. Between the warpgroup's barriers. */
static __device__ __forceinline__ void put_rows(uint32_t panels, const float4 (&v)[4][4], const seat &at)
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        put_shared(panels + word_row(at.passing(i / 4), i % 4, at), as_operand(v[i / 4][i % 4]));
    }
}

static __device__ __forceinline__ void put_rows(uint32_t panels, const uint4 (&v)[4][2], const seat &at)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        put_shared(panels + half_unit(at.passing(i / 2), i % 2, at), v[i / 2][i % 2]);
    }
}

/* The same rows on their way to panels until ps_copy_wait; zeros where there are none. */
template <typename T>
static __device__ __forceinline__ void copy_rows(uint32_t panels, const T *from, int64_t row0, int64_t rows, const seat &at)
{
    constexpr int UNIT = 16 / (int)sizeof(T); /* elements */
#pragma unroll
    for (int pass = 0; pass < 4; pass++) {
        const int row = at.passing(pass);
        const bool here = row < rows - row0;
        const T *const part = from + (here ? row0 + row : 0) * D + at.lane % 8 * UNIT;
#pragma unroll
        for (int j = 0; j < D / UNIT / 8; j++) {
            ps_copy_async_part(panels + (sizeof(T) == 2 ? half_unit(row, j, at) : word_row(row, j, at)), part + 8 * UNIT * j,
                               here ? 16 : 0);
        }
    }
}

/* c = left piece, 128 deep, 64 columns, of fp16 or tf32. Under way until ps_wgmma_wait, as all products here. */
template <bool HALF> static __device__ __forceinline__ void multiply_columns(float (&c)[8][4], uint32_t left, uint32_t piece)
{
    const uint32_t a = ps_wgmma_place(left);
#pragma unroll
    for (int k = 0; k < (HALF ? 8 : 16); k++) {
        const int further = k / 4 * PANEL_BYTES + k % 4 * 32;
        const uint64_t left_at = ps_wgmma_operand(a, further), piece_at = ps_wgmma_operand(piece, further);
        HALF ? ps_wgmma_fp16<64>(c, left_at, piece_at, k > 0) : ps_wgmma_tf32<64>(c, left_at, piece_at, k > 0);
    }
}

/* c (add: +=) left piece, 64 deep, 128 columns: left two panels of tf32, */
static __device__ __forceinline__ void multiply_rows(float (&c)[16][4], uint32_t left, uint32_t piece, int add)
{
    const uint32_t a = ps_wgmma_place(left);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        ps_wgmma_tf32<128>(c, ps_wgmma_operand(a, k / 4 * PANEL_BYTES + k % 4 * 32),
                           ps_wgmma_operand(piece, k / 4 * (D * 128) + k % 4 * 32), add | k);
    }
}

/* or sums of 64 columns as they came out, of tf32 */
static __device__ __forceinline__ void multiply_rows(float (&c)[16][4], const uint32_t (&left)[8][4], uint32_t piece, int add)
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        ps_wgmma_tf32<128>(c, left[k], ps_wgmma_operand(piece, k / 4 * (D * 128) + k % 4 * 32), add | k);
    }
}

/* or of fp16. */
static __device__ __forceinline__ void multiply_rows(float (&c)[16][4], const uint32_t (&left)[4][4], uint32_t piece, int add)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        ps_wgmma_fp16<128>(c, left[k], ps_wgmma_operand(piece, k * 32), add | k);
    }
}

/* c = left times a square weight: the ring's next two pieces, each its half of c's columns. */
template <bool HALF, typename RING>
static __device__ __forceinline__ void multiply_square(float (&c)[2][8][4], uint32_t left, RING &ring)
{
    const uint32_t first = ring.take(), second = ring.take();
    ps_wgmma_begin();
    multiply_columns<HALF>(c[0], left, first);
    multiply_columns<HALF>(c[1], left, second);
    ps_wgmma_commit();
    ps_wgmma_wait<0>();
    ps_pin(c[0]);
    ps_pin(c[1]);
    ring.release();
    ring.release();
}

/* The factor of sum t of four, column e of its two, by quad_bits' word of those 32 columns, shifted by 2 q. */
static __device__ __forceinline__ float kept_factor(uint32_t mask, int t, int e, float scale)
{
    return mask >> (t / 2 * 8 + t % 2 + 16 * e) & 1 ? scale : 0.0f;
}

/* c = drop(c), 32 columns of the lane's row i: those of sums n .. n + 3. */
template <int N>
static __device__ __forceinline__ void drop_32(float (&c)[N][4], int n, int i, uint32_t bits, float scale, const seat &at)
{
    const uint32_t mask = bits >> 2 * at.q;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        c[n + t][2 * i] *= kept_factor(mask, t, 0, scale);
        c[n + t][2 * i + 1] *= kept_factor(mask, t, 1, scale);
    }
}

/* c = drop(c), all columns of the lane's rows. */
static __device__ __forceinline__ void drop_128(float (&c)[16][4], const uint4 (&kept)[2], float scale, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        drop_32(c, 0, i, kept[i].x, scale, at);
        drop_32(c, 4, i, kept[i].y, scale, at);
        drop_32(c, 8, i, kept[i].z, scale, at);
        drop_32(c, 12, i, kept[i].w, scale, at);
    }
}

/* c = drop(c), two words' columns of each of the lane's rows. */
static __device__ __forceinline__ void drop_64(float (&c)[8][4], const uint2 (&kept)[2], float scale, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        drop_32(c, 0, i, kept[i].x, scale, at);
        drop_32(c, 4, i, kept[i].y, scale, at);
    }
}

/* Words of the lane's rows, from the warpgroup's first row and a first word on; all are kept where nothing drops. */
template <typename V>
static __device__ __forceinline__ void take_kept(V (&kept)[2], const uint32_t *from, int width, bool drops, int count,
                                                 const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (sizeof(V) == 8) {
            kept[i] = drops && at.row(i) < count ? *(const uint2 *)(from + at.row(i) * width) : make_uint2(~0u, ~0u);
        } else {
            kept[i] = drops && at.row(i) < count ? *(const uint4 *)(from + at.row(i) * width) : make_uint4(~0u, ~0u, ~0u, ~0u);
        }
    }
}

/* Draws the words of rows `words` long, of the warpgroup's first row on. */
static __device__ __forceinline__ void draw_words(uint32_t *kept, const struct ps_dropout &dropout, int64_t row0, int words,
                                                  uint64_t step, int count, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll 1
        for (int first = 0; first < words; first += 4) {
            uint32_t own = 0;
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const uint64_t block = ((uint64_t)(row0 + at.row(i)) * words + first + m) * 4 + at.q;
                const uint32_t bits = quad_bits(dropout, step, (uint32_t)block, at.q);
                own = at.q == m ? bits : own;
            }
            if (at.row(i) < count && first + at.q < words) {
                kept[at.row(i) * words + first + at.q] = own;
            }
        }
    }
}

/* Of the lane's rows of a tensor [R, d], from the warpgroup's first row on: columns as sums have them. */
template <typename T, typename V> struct row_fours {
    V of[8][2];
    __device__ __forceinline__ row_fours(const T *from, int count, const seat &at)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const V *const row = (const V *)(from + at.row(i) * D + 4 * at.q);
#pragma unroll
            for (int m = 0; m < 8; m++) {
                of[m][i] = at.row(i) < count ? row[4 * m] : V();
            }
        }
    }
};

typedef row_fours<float, float4> float_fours;
typedef row_fours<__half, uint2> half_fours;

/* c, the gradient of xhat, becomes residual + LayerNorm's gradient of it: rstd (c - mean(c) - xhat mean(c xhat)). residual and
 * xhat: columns 16 m + 4 q .. of row i. */
template <typename R, typename X>
static __device__ __forceinline__ void normalise_gradient(float (&c)[16][4], const float (&rstd)[2], R residual, X xhat)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float mean = 0, slope = 0;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const float4 x = xhat(m, i), v = four(c, m, i);
            mean += (v.x + v.y) + (v.z + v.w);
            slope += v.x * x.x + v.y * x.y + v.z * x.z + v.w * x.w;
        }
        mean = ps_group_sum<4>(mean) * (1.0f / D);
        slope = ps_group_sum<4>(slope) * (1.0f / D);
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const float4 x = xhat(m, i), old = residual(m, i);
            float *const low = &c[2 * m][2 * i], *const high = &c[2 * m + 1][2 * i];
            low[0] = old.x + rstd[i] * (low[0] - mean - x.x * slope);
            low[1] = old.y + rstd[i] * (low[1] - mean - x.y * slope);
            high[0] = old.z + rstd[i] * (high[0] - mean - x.z * slope);
            high[1] = old.w + rstd[i] * (high[1] - mean - x.w * slope);
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

/* c += b, of the first sums' columns on. */
template <int N> static __device__ __forceinline__ void add_bias(float (&c)[N][4], const float *b, const seat &at)
{
#pragma unroll
    for (int m = 0; m < N / 2; m++) {
        const float4 v = *(const float4 *)(b + 16 * m + 4 * at.q);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            c[2 * m][2 * i] += v.x;
            c[2 * m][2 * i + 1] += v.y;
            c[2 * m + 1][2 * i] += v.z;
            c[2 * m + 1][2 * i + 1] += v.w;
        }
    }
}

/* Sums as a left operand in registers, of tf32, */
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

/* of fp16. */
static __device__ __forceinline__ void as_left(uint32_t (&left)[4][4], const float (&c)[8][4])
{
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const float *const pair = &c[k / 4 * 2 + k % 4 / 2][k % 2 * 2];
        left[k / 4][k % 4] = ps_pack<ps_fp16>(pair);
    }
}

/* Vectors to shared memory, by all threads before the ring's barrier. */
static __device__ __forceinline__ void stage_vector(float *to, const float *from, int count)
{
    for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) {
        to[i] = from[i];
    }
}

/* To rows of `ld`, from the warpgroup's first row and first column on: fp32, or fp16. */
template <int N, typename T>
static __device__ __forceinline__ void keep_sums(T *to, int ld, const float (&c)[N][4], int count, const seat &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        T *const row = to + (int64_t)at.row(i) * ld + 4 * at.q;
#pragma unroll
        for (int m = 0; m < N / 2; m++) {
            if (at.row(i) < count) {
                if constexpr (sizeof(T) == 2) {
                    put_global(row + 16 * m, as_halves(four(c, m, i)));
                } else {
                    put_global(row + 16 * m, four(c, m, i));
                }
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

extern __shared__ __align__(1024) uint8_t row_memory[];

/* Shared memory: the warpgroups' left operands, LEFT_BYTES each; the ring of SLOTS; vectors; the ring's barriers. */
template <int LEFT_BYTES, int SLOTS, int SLOT_BYTES, int VECTORS> struct row_kernel {
    static constexpr int LEFT = GROUPS * LEFT_BYTES, VECTOR = LEFT + SLOTS * SLOT_BYTES, BARRIERS = VECTOR + VECTORS * 4;
    static constexpr size_t SHARED = BARRIERS + 16 * SLOTS;
    static_assert(SHARED <= 232448, "a block's");
    typedef piece_ring<SLOTS, SLOT_BYTES, BARRIERS - LEFT> ring_of;

    static __device__ __forceinline__ uint32_t left(const seat &at)
    {
        return ps_shared_address(row_memory) + at.group * LEFT_BYTES;
    }
    static __device__ __forceinline__ float *vectors()
    {
        return (float *)(row_memory + VECTOR);
    }
    static __device__ __forceinline__ ring_of ring(int pieces)
    {
        return ring_of(ps_shared_address(row_memory) + LEFT, GROUPS * 4, pieces);
    }
};

static __host__ __device__ __forceinline__ int tiles_of(int64_t rows, int tile)
{
    return (int)((rows + tile - 1) / tile);
}

/* Of this block. */
static __device__ __forceinline__ int turns_of(int64_t rows)
{
    return (tiles_of(rows, TILE) - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
}

/* Rows [.., columns] of a tile to L2, while the warpgroups have the one before in hand. */
template <typename T> static __device__ __forceinline__ void prefetch_tile(int64_t tile, int64_t rows, const T *from, int columns)
{
    const int64_t row0 = tile * TILE;
    if (row0 < rows) {
        const uint32_t bytes = (uint32_t)(rows - row0 < TILE ? rows - row0 : TILE) * columns * (uint32_t)sizeof(T);
        ps_bulk_prefetch(from + row0 * columns, (bytes + 15) & ~15u); /* padded_rows are there */
    }
}

/* `enter`: left operands of fp16, W_qkv, its bias, a barrier. */
enum {
    ENTER_PIECES = ENTER_GROUPS * HALF_BYTES,
    ENTER_BIAS = ENTER_PIECES + 6 * HALF_BYTES,
    ENTER_BARRIER = ENTER_BIAS + 3 * D * 4,
    ENTER_SHARED = ENTER_BARRIER + 8
};
typedef row_kernel<HALF_BYTES, 10, HALF_BYTES, 2 * D + MOST_HIDDEN> finish_kernel;
typedef row_kernel<HALF_BYTES + WORD_BYTES, 4, WORD_BYTES, MOST_HIDDEN> back_kernel;
typedef row_kernel<WORD_BYTES, 5, WORD_BYTES, 0> leave_kernel;

/* xhat1 = LN1's of u without gamma and beta, qkv = the products' rows; and the layer's dropout, for `finish`, whose schedulers are
 * busier: of the instructions there it was two fifths. */
static __global__ void __launch_bounds__(ENTER_THREADS, 1) enter(const __grid_constant__ struct rows_layer x)
{
    seat at;
    const uint32_t shared = ps_shared_address(row_memory), left = shared + at.group * HALF_BYTES;
    const uint32_t pieces = shared + ENTER_PIECES, barrier = shared + ENTER_BARRIER;
    const float *const bias = (const float *)(row_memory + ENTER_BIAS);
    ps_grid_begin();
    stage_vector((float *)(row_memory + ENTER_BIAS), x.b_qkv, 3 * D);
    if (threadIdx.x == 0) {
        ps_mbarrier_init(barrier, 1);
        ps_mbarrier_publish();
        ps_mbarrier_expect(barrier, 6 * HALF_BYTES);
        ps_bulk_fetch(pieces, x.halves, 6 * HALF_BYTES, barrier);
    }
    __syncthreads();
    const uint64_t steps = x.gelu.threshold ? x.gelu.state->step : 0;
    const int64_t step = (int64_t)gridDim.x * ENTER_GROUPS * ROWS;
    int64_t row0 = ((int64_t)at.group * gridDim.x + blockIdx.x) * ROWS;
    float4 rows[4][4];
    take_rows(rows, x.u, D, row0, x.rows, at);
    ps_mbarrier_wait(barrier, 0);
    for (; row0 < x.rows; row0 += step) {
        at.refresh();
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
            const bool keeps = x.xhat1 && row < count;
            __half *const to = x.xhat1 + (row0 + row) * D + at.lane % 8 * 4;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint2 xhat = as_halves(make_float4(v[j].x * rstd, v[j].y * rstd, v[j].z * rstd, v[j].w * rstd));
                put_shared(left + half_row(row, j, at), xhat);
                if (keeps) {
                    put_global(to + 32 * j, xhat);
                }
            }
            if (keeps && at.lane % 8 == 0) {
                x.rstd1[row0 + row] = rstd;
            }
        }
        ps_publish();
        at.sync();
        take_rows(rows, x.u, D, row0 + step, x.rows, at);
        if (x.gelu.threshold) { /* while they come */
            draw_words(x.kept_o + row0 * 4, x.after_o, row0, 4, steps, count, at);
            draw_words(x.kept_gelu + row0 * (x.f / 32), x.gelu, row0, x.f / 32, steps, count, at);
            draw_words(x.kept_output + row0 * 4, x.output, row0, 4, steps, count, at);
        }
#pragma unroll 1
        for (int i = 0; i < 6; i += 2) {
            at.refresh();
            float c[2][8][4];
            ps_wgmma_begin();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                multiply_columns<true>(c[h], left, ps_wgmma_place(pieces + (i + h) * HALF_BYTES));
                ps_wgmma_commit();
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                h ? ps_wgmma_wait<0>() : ps_wgmma_wait<1>();
                ps_pin(c[h]);
                const int column = (i + h) * COLUMNS;
                add_bias(c[h], bias + column, at);
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
    K::ring_of ring = K::ring(2 + 2 * hidden);
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            ring.bring(turns_of(x.rows), 2 + 2 * hidden, [&](int i, int &bytes) {
                bytes = HALF_BYTES;
                return x.halves + (6 + i) * HALF_BYTES;
            });
        }
        return;
    }
    more_registers();
    const uint32_t left = K::left(at);
    const bool drops = x.gelu.threshold != 0;
    const float scale = x.gelu.scale; /* of all three */
    uint4 rows[4][2];
    take_rows(rows, x.merged, (int64_t)blockIdx.x * TILE + at.group * ROWS, x.rows, at);
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows, TILE); tile += (int)gridDim.x) {
        at.refresh();
        const int64_t row0 = (int64_t)tile * TILE + at.group * ROWS;
        const int count = rows_from(x.rows, row0);
        at.sync();
        put_rows(left, rows, at);
        ps_publish();
        at.sync();
        if (at.group == 0 && at.warp == 0 && at.lane == 0) { /* the bringing warpgroup is done where pieces stay */
            const int64_t next = tile + (int64_t)gridDim.x;
            prefetch_tile(next, x.rows, x.u, D);
            if (drops) {
                prefetch_tile(next, x.rows, x.kept_o, 4);
                prefetch_tile(next, x.rows, x.kept_gelu, x.f / 32);
                prefetch_tile(next, x.rows, x.kept_output, 4);
            }
        }
        const float_fours u(x.u + row0 * D, count, at);
        float r[2][8][4]; /* halves of the columns */
        uint2 kept[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            take_kept(kept[h], x.kept_o + row0 * 4 + 2 * h, 4, drops, count, at);
        }
        multiply_square<true>(r, left, ring);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            add_bias(r[h], b_o + COLUMNS * h, at);
            if (drops) {
                drop_64(r[h], kept[h], scale, at);
            }
        }
        at.sync(); /* merged has been read */
        const half_place place(left, at);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = 0, squares = 0;
#pragma unroll
            for (int m = 0; m < 8; m++) {
                float *const low = &r[m / 4][m % 4 * 2][2 * i], *const high = &r[m / 4][m % 4 * 2 + 1][2 * i];
                low[0] += u.of[m][i].x;
                low[1] += u.of[m][i].y;
                high[0] += u.of[m][i].z;
                high[1] += u.of[m][i].w;
                sum += (low[0] + low[1]) + (high[0] + high[1]);
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
            __half *const to = x.xhat2 + (row0 + at.row(i)) * D + 4 * at.q;
#pragma unroll
            for (int m = 0; m < 8; m++) {
                const float4 v = four(r[m / 4], m % 4, i);
                const uint2 xhat =
                    as_halves(make_float4((v.x - mean) * rstd, (v.y - mean) * rstd, (v.z - mean) * rstd, (v.w - mean) * rstd));
                put_shared(place.of(m, i), xhat);
                if (keeps) {
                    put_global(to + 16 * m, xhat);
                }
            }
        }
        ps_publish();
        at.sync();
        float c[16][4];
#pragma unroll 1
        for (int j = 0; j < hidden; j++) {
            at.refresh();
            uint2 kept[2];
            take_kept(kept, x.kept_gelu + row0 * (x.f / 32) + 2 * j, x.f / 32, drops, count, at);
            float z[8][4];
            uint32_t piece = ring.take();
            ps_wgmma_begin();
            multiply_columns<true>(z, left, piece);
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
            if (drops) {
                drop_64(z, kept, scale, at);
            }
            uint32_t h[4][4];
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
        uint4 kept_output[2];
        take_kept(kept_output, x.kept_output + row0 * 4, 4, drops, count, at);
        add_bias(c, b_2, at);
        if (drops) {
            drop_128(c, kept_output, scale, at);
        }
#pragma unroll
        for (int n = 0; n < 16; n++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                c[n][k] += r[n / 8][n % 8][k];
            }
        }
        take_rows(rows, x.merged, row0 + (int64_t)gridDim.x * TILE, x.rows, at);
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
    K::ring_of ring = K::ring(3 * hidden + 2);
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            ring.bring(
                turns_of(x.rows), 3 * hidden + 2,
                [&](int i, int &bytes) {
                    const bool half = i < 3 * hidden && i % 3 == 0; /* W_1's, for the hidden columns again */
                    bytes = half ? HALF_BYTES : WORD_BYTES;
                    return half             ? x.halves + (8 + i / 3 * 2) * HALF_BYTES
                           : i < 3 * hidden ? x.words + (i / 3 * 2 + i % 3 - 1) * WORD_BYTES
                                            : x.words + (pieces.w_ot + i - 3 * hidden) * WORD_BYTES;
                },
                [&](int i) {
                    const int64_t tile = blockIdx.x + (int64_t)i * gridDim.x;
                    prefetch_tile(tile, x.rows, x.xhat2, D);
                    prefetch_tile(tile, x.rows, x.dy, D);
                });
        }
        return;
    }
    more_registers();
    const uint32_t gradient = K::left(at), left = gradient + WORD_BYTES; /* xhat2 */
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
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows, TILE); tile += (int)gridDim.x) {
        at.refresh();
        const int64_t row0 = (int64_t)tile * TILE + at.group * ROWS;
        const int count = rows_from(x.rows, row0);
        ps_copy_wait(); /* for what the lane itself has asked for */
#pragma unroll
        for (int pass = 0; pass < 4; pass++) {
            const int row = at.passing(pass);
            float *const to = x.masked_2 + (row0 + row) * D + at.lane % 8 * 4;
#pragma unroll
            for (int j = 0; j < 4; j++) { /* columns 4 c .. 4 c + 3 of the word's 32 */
                const uint32_t mask = __shfl_sync(0xffffffffu, kept_rows[pass], (at.lane & 24) + j) >> (at.lane % 8 * 2);
                const uint32_t place = gradient + word_row(row, j, at);
                float4 v = *(const float4 *)(row_memory + (place - ps_shared_address(row_memory)));
                v = as_operand(make_float4(mask & 1 ? v.x * scale : 0, mask >> 16 & 1 ? v.y * scale : 0, mask & 2 ? v.z * scale : 0,
                                           mask >> 17 & 1 ? v.w * scale : 0));
                put_shared(place, v);
                if (row < count) {
                    put_global(to + 32 * j, v);
                }
            }
        }
        ps_publish();
        at.sync();
        float c[16][4];
#pragma unroll 1
        for (int j = 0; j < hidden; j++) {
            at.refresh();
            const int column = COLUMNS * j;
            uint2 kept[2];
            take_kept(kept, x.kept_gelu + row0 * (x.f / 32) + 2 * j, x.f / 32, drops, count, at);
            float z[8][4], d[8][4];
            uint32_t piece = ring.take();
            const uint32_t second = ring.take();
            ps_wgmma_begin();
            multiply_columns<true>(z, left, piece);
            multiply_columns<false>(d, gradient, second);
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
                    const uint32_t mask = (n / 4 ? kept[k / 2].y : kept[k / 2].x) >> 2 * at.q;
                    const float keep = kept_factor(mask, n % 4, k % 2, scale), v = z[n][k], s = ps_gelu_sigmoid(v);
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
        const float_fours dy(x.dy + row0 * D, count, at);
        float rstd[2];
        uint4 kept[2];
        take_rstd(rstd, x.rstd2 + row0, count, at);
        take_kept(kept, x.kept_o + row0 * 4, 4, drops, count, at);
        const half_place place(left, at);
        normalise_gradient(
            c, rstd, [&](int m, int i) { return dy.of[m][i]; },
            [&](int m, int i) { return as_floats(get_shared(place.of(m, i))); });
        keep_sums(x.du + row0 * D, D, c, count, at);
        drop_128(c, kept, scale, at);
        at.sync(); /* all have multiplied with the gradient */
        const word_place gradient_place(gradient, at);
#pragma unroll
        for (int m = 0; m < 8; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                put_shared(gradient_place.of(m, i), as_operand(four(c, m, i)));
            }
        }
        ps_publish();
        at.sync();
        keep_sums(x.masked_o + row0 * D, D, c, count, at);
        float m[2][8][4];
        multiply_square<false>(m, gradient, ring);
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
    K::ring_of ring = K::ring(6);
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            const int first = row_places(x.f / COLUMNS).w_qkvt;
            ring.bring(turns_of(x.rows), 6, [&](int i, int &bytes) {
                bytes = WORD_BYTES;
                return x.words + (first + i) * WORD_BYTES;
            });
        }
        return;
    }
    more_registers();
    const uint32_t left = K::left(at);
    float4 rows[4][4];
    take_rows(rows, x.d_qkv, 3 * D, (int64_t)blockIdx.x * TILE + at.group * ROWS, x.rows, at);
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows, TILE); tile += (int)gridDim.x) {
        at.refresh();
        const int64_t row0 = (int64_t)tile * TILE + at.group * ROWS;
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
        const half_fours xhat(x.xhat1 + row0 * D, count, at);
        const float_fours residual(x.du + row0 * D, count, at);
        ps_wgmma_wait<0>();
        ps_pin(c);
        ring.release();
        ring.release();
        normalise_gradient(
            c, rstd, [&](int m, int i) { return residual.of[m][i]; }, [&](int m, int i) { return as_floats(xhat.of[m][i]); });
        at.refresh();
        take_rows(rows, x.d_qkv, 3 * D, row0 + (int64_t)gridDim.x * TILE, x.rows, at);
        keep_sums(x.du + row0 * D, D, c, count, at);
    }
}

/* ---- launches ---- */

static enum ps_status supported(const struct ps_encoder_small *e)
{
    if (e->d_model != D || e->n_heads < D / PS_ATTENTION_HEAD || e->n_heads > D / 2 || D % e->n_heads != 0 || e->patches < 1 ||
        e->patches > PS_ATTENTION_PATCHES || e->d_ff < COLUMNS || e->d_ff > MOST_HIDDEN || e->d_ff % COLUMNS != 0) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda): d_model %lld with %lld heads, d_ff %lld and %lld patches: level layer in tf32 has d_model %d "
            "with heads of 2 to %d, d_ff a multiple of %d up to %d, up to %d patches",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, D, PS_ATTENTION_HEAD, COLUMNS,
            MOST_HIDDEN, PS_ATTENTION_PATCHES);
    }
    return PS_OK;
}

/* Floats of a layer in what is kept; dropout's bits are always there. */
static int64_t kept_floats(const struct ps_encoder_small *e)
{
    return padded_rows(e) * (6 * D / 2 + e->n_heads + 2 + (2 * D + e->d_ff) / 32);
}

static enum ps_status split_plan(const struct ps_kernels *, const struct ps_encoder_small *e, struct ps_encoder_plan *plan)
{
    PS_TRY(supported(e));
    plan->kernels = "split/rows";
    plan->kept_bytes = (size_t)(kept_floats(e) * e->layers) * sizeof(float);
    plan->slower = e->sequences * e->patches < 768; /* at weather with a batch of 1, 882 rows, it is faster */
    return PS_OK;
}

static enum ps_encoder_span split_span(const struct ps_kernels *, const struct ps_encoder_small *, const struct ps_encoder_plan *)
{
    return PS_SPAN_LAYERS;
}

/* The workspace, in floats: where things begin, the pieces first. */
struct row_workspace {
    int64_t biases, parts, hidden, d_hidden, masked_2, masked_o, d_merged, d_qkv, delta, all;
};

static struct row_workspace workspace_of(const struct ps_kernels *k, const struct ps_encoder_small *e)
{
    const int64_t R = padded_rows(e);
    struct row_workspace w = {};
    w.biases = e->layers * layer_bytes((int)(e->d_ff / COLUMNS)) / 4;
    w.parts = w.biases + e->layers * (3 * D + e->d_ff);
    w.hidden = w.parts + ps_encoder_rows_slabs(k, e) * ps_encoder_float_parts(e);
    w.d_hidden = w.hidden + R * e->d_ff / 2;
    w.masked_2 = w.d_hidden + R * e->d_ff;
    w.masked_o = w.masked_2 + R * D;
    w.d_merged = w.masked_o + R * D;
    w.d_qkv = w.d_merged + R * D;
    w.delta = w.d_qkv + R * 3 * D;
    w.all = w.delta + R * e->n_heads;
    return w;
}

static size_t split_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_small *e, const struct ps_encoder_plan *)
{
    return (size_t)workspace_of(k, e).all * sizeof(float);
}

static struct rows_layer layer_of(const struct ps_kernels *k, const struct ps_encoder_small *e, int layer)
{
    const struct row_workspace at = workspace_of(k, e);
    const struct ps_encoder_layout *const l = &e->offsets;
    float *const w = (float *)e->workspace, *const stream = (float *)e->u;
    const float *const p = e->parameters + layer * l->vector_stride;
    const int64_t R = padded_rows(e), rows = e->sequences * e->patches;
    struct rows_layer x = {};
    x.rows = rows;
    x.f = (int)e->d_ff;
    x.epsilon = (float)e->epsilon;
    x.halves = (const uint8_t *)w + layer * layer_bytes(x.f / COLUMNS);
    x.words = x.halves + halves_of(x.f / COLUMNS) * HALF_BYTES;
    x.b_qkv = w + at.biases + layer * (3 * D + x.f);
    x.b_o = p + l->b_o;
    x.b_1 = x.b_qkv + 3 * D;
    x.b_2 = p + l->b_2;
    x.u = stream + layer * rows * D;
    x.y = stream + (layer + 1) * rows * D;
    x.qkv = (__half *)(w + at.d_qkv); /* where nothing is kept */
    x.merged = (__half *)(w + at.d_merged);
    x.logsum = w + at.delta;
    x.kept_o = (uint32_t *)(w + at.masked_o);
    x.kept_output = (uint32_t *)(w + at.masked_2);
    x.kept_gelu = (uint32_t *)(w + at.d_hidden);
    if (e->kept) {
        x.xhat1 = (__half *)((float *)e->kept + layer * kept_floats(e));
        x.qkv = x.xhat1 + R * D;
        x.merged = x.qkv + R * 3 * D;
        x.xhat2 = x.merged + R * D;
        x.rstd1 = (float *)(x.xhat2 + R * D);
        x.rstd2 = x.rstd1 + R;
        x.kept_o = (uint32_t *)(x.rstd2 + R);
        x.kept_output = x.kept_o + R * (D / 32);
        x.kept_gelu = x.kept_output + R * (D / 32);
        x.logsum = (float *)(x.kept_gelu + R * (x.f / 32));
    }
    x.dy = layer + 1 == e->layers ? (const float *)e->dy : (const float *)e->du;
    x.d_qkv = w + at.d_qkv;
    x.du = (float *)e->du;
    x.hidden = (__half *)(w + at.hidden);
    x.d_hidden = w + at.d_hidden;
    x.masked_2 = w + at.masked_2;
    x.masked_o = w + at.masked_o;
    x.d_merged = w + at.d_merged;
    x.after_o = at_site(e->dropout, layer, 0);
    x.gelu = at_site(e->dropout, layer, 1);
    x.output = at_site(e->dropout, layer, 2);
    return x;
}

/* [S, h, N, e] of rows of `columns`, fp16 what is kept, fp32 gradients. */
static struct ps_tensor heads_of(const struct ps_encoder_small *e, const __half *rows, int64_t columns)
{
    return ps_tensor_heads((void *)rows, PS_F16, e->sequences, e->n_heads, e->patches, D / e->n_heads, columns);
}

static struct ps_tensor heads_of(const struct ps_encoder_small *e, const float *rows, int64_t columns)
{
    return ps_tensor_heads((void *)rows, PS_F32, e->sequences, e->n_heads, e->patches, D / e->n_heads, columns);
}

static struct ps_tensor statistics_of(const struct ps_encoder_small *e, float *data)
{
    return ps_tensor_3d(data, PS_F32, e->sequences, e->n_heads, e->patches);
}

/* A block a multiprocessor, or a tile of so many rows. */
static enum ps_status launch_rows(const struct ps_cuda_context *c, void (*run)(const struct rows_layer), int tile, unsigned threads,
                                  size_t shared, const char *what, const struct rows_layer &x)
{
    const int tiles = tiles_of(x.rows, tile);
    return launch(c, run, dim3((unsigned)(tiles < c->multiprocessors ? tiles : c->multiprocessors)), threads, shared, what, x);
}

static enum ps_status split_forward(const struct ps_kernels *k, const struct ps_encoder_small *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const char *name = "encoder_forward";
    const int hidden = (int)(e->d_ff / COLUMNS);
    struct packing pack = {};
    pack.pieces = (uint8_t *)e->workspace;
    pack.biases = (float *)e->workspace + workspace_of(k, e).biases;
    pack.weights = (const float *)e->weights;
    pack.parameters = e->parameters;
    pack.at = e->offsets;
    pack.f = (int)e->d_ff;
    pack.units = (int)((e->kept ? layer_bytes(hidden) : halves_of(hidden) * HALF_BYTES) / 16); /* backward's too, or not */
    PS_TRY(launch(c, pack_rows, dim3(ps_cuda_blocks(pack.units + 3 * D + pack.f, 256), (unsigned)e->layers), 256, 0, name, pack));
    const double scale = 1 / sqrt((double)D / (double)e->n_heads);
    for (int layer = 0; layer < e->layers; layer++) {
        const struct rows_layer x = layer_of(k, e, layer);
        PS_TRY(launch_rows(c, enter, ROWS, ENTER_THREADS, ENTER_SHARED, name, x));
        const struct ps_attention attention = {heads_of(e, x.merged, D),          statistics_of(e, x.logsum),
                                               heads_of(e, x.qkv, 3 * D),         heads_of(e, x.qkv + D, 3 * D),
                                               heads_of(e, x.qkv + 2 * D, 3 * D), scale};
        PS_TRY(k->attention(k, &attention));
        PS_TRY(launch_rows(c, finish, TILE, THREADS, finish_kernel::SHARED, name, x));
    }
    return PS_OK;
}

static enum ps_status split_backward(const struct ps_kernels *k, const struct ps_encoder_small *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const char *name = "encoder_backward";
    const struct row_workspace at = workspace_of(k, e);
    float *const workspace = (float *)e->workspace;
    const double scale = 1 / sqrt((double)D / (double)e->n_heads);
    for (int layer = (int)e->layers; layer-- > 0;) {
        const struct rows_layer x = layer_of(k, e, layer);
        PS_TRY(launch_rows(c, back, TILE, THREADS, back_kernel::SHARED, name, x));
        const struct ps_attention_backward attention = {heads_of(e, x.d_qkv, 3 * D),
                                                        heads_of(e, x.d_qkv + D, 3 * D),
                                                        heads_of(e, x.d_qkv + 2 * D, 3 * D),
                                                        statistics_of(e, workspace + at.delta),
                                                        heads_of(e, x.d_merged, D),
                                                        heads_of(e, x.merged, D),
                                                        statistics_of(e, x.logsum),
                                                        heads_of(e, x.qkv, 3 * D),
                                                        heads_of(e, x.qkv + D, 3 * D),
                                                        heads_of(e, x.qkv + 2 * D, 3 * D),
                                                        scale};
        PS_TRY(k->attention_backward(k, &attention));
        PS_TRY(launch_rows(c, leave, TILE, THREADS, leave_kernel::SHARED, name, x));
        const struct ps_encoder_rows_operands operands = {{x.d_qkv, x.masked_o, x.d_hidden, x.masked_2},
                                                          {x.xhat1, x.merged, x.xhat2, x.hidden}};
        PS_TRY(ps_encoder_rows_gradients(k, e, layer, &operands, workspace + at.parts));
    }
    return ps_encoder_float_add(k, e, workspace + at.parts, ps_encoder_rows_slabs(k, e));
}

const struct ps_encoder_family ps_encoder_split = {split_plan, split_span, split_workspace_bytes, split_forward, split_backward};

} // namespace PS_REAL16_SPACE
