/* Level `layer` with fp32 activations: tf32 rounds the operands of products to nearest, fp32 splits each in two (ps_mma_split).
 * d_model 64, heads of 8, 16 or 32 columns, N <= 64, d_ff a multiple of 128.
 *
 * A block of 16 warps takes a tile of whole sequences, up to 64 rows, through all layers; a layer's rows pass through three buffers
 * of shared memory. By rows (LayerNorm, residual, dropout after W_o and W_2) a warp has whole rows; in products 4 x 4 warps share a
 * tile's rows and columns, 16 rows a warp. Weights, 0.13 to 0.33 MB a layer and direction, do not fit beside that: a kernel before
 * (`pack`) lays them out as lanes read them, 16 bytes each, and the copy engine brings them from L2 through a ring of shared
 * memory. Hidden columns come 128 at a time.
 *
 * Backward recomputes softmax's exponentials only: what fits no block is read again from memory (xhat of both LayerNorms, q, k, v,
 * the hidden columns before gelu), and gradients take their places or lie beside them. Weights' gradients are products of their own
 * behind it, over all rows: with G = xhat' dy and s the column sums of dy, that of a weight behind LayerNorm is gamma_i G_ij +
 * beta_i s_j, gamma's own is sum_j W_ij G_ij and beta's sum_j W_ij s_j, so that no sum over rows is formed elsewhere.
 *
 * Counts a layer, R rows. Forward 8 R d^2 + 4 R d f + 4 R N d flops, R exponentials a head and column, 4 R (8 d + f) bytes written
 * (8 R d when nothing is kept) and 8 R d read; weights 4 (4 d^2 + 2 d f) bytes a tile from L2. Backward as many flops of products
 * with weights and 14 R N d; 4 R (10 d + f) bytes read, 4 R (7 d + 2 f) written. Weights' gradients as many flops as forward's
 * products with weights, 4 R (8 d + 2 f) bytes read. seed28k (R 6,400, f 256): forward 0.6 GFLOP and 20 MB.
 *
 * Sequences of a tile share 8-row pieces of attention's products, whose other rows count with a weight of 0: a NaN in one
 * sequence's values may spoil its neighbours in the tile. */
#include "kernels/cuda/encoder/streamed/float.cuh"

#include "kernels/cuda/encoder/streamed/float_device.cuh"
#include "kernels/cuda/tile/activation.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/windows.cuh"

namespace PS_REAL16_SPACE
{

enum {
    D = 64 /* d_model */,
    ROWS = 64 /* of a block's tile */,
    WARPS = 16,
    THREADS = WARPS * 32,
    ACROSS = 4 /* warps along a tile's columns; as many share its rows, 16 each */,
    HIDDEN = 128 /* hidden columns at once */,
    GROUP = D /* columns of q, of k and of v at once */,
    QKV = 3 * GROUP,
    /* Floats of the buffers. Attention may read 8 rows more, of finite numbers that count for nothing. */
    FLOATS_A = ROWS * D,
    FLOATS_B = ROWS * HIDDEN,
    FLOATS_C = (ROWS + 8) * QKV,
    FLOATS_SUMS = 2 * D / 8 * ROWS + 8 /* backward: softmax's sums and those of A dA, for as many heads as there may be */,
    SLOT = 16384 /* bytes of a slot of the ring that weights pass through */,
    SLOTS = 6
};
static_assert(ROWS * HIDDEN >= (ROWS + 8) * D && (ROWS + 8) * QKV >= ROWS * HIDDEN, "buffers hold rows and hidden columns");

/* The embedding's part. Forward it is asked for when `weight` is there, backward when d_weight is. */
struct float_embedding {
    const float *weight, *bias, *position; /* [P, d], [d], [N, d] */
    float *patches, *mean, *std;           /* [R, P], [S], [S] */
    struct ps_cuda_windows windows;
    const struct ps_step_state *state;
    int length, patch, stride, revin;
    float epsilon;
    struct ps_divisor by_channels;
    struct ps_dropout dropout;
    float *d_weight, *d_bias, *d_position;
};

struct floats {
    int64_t rows, tiles; /* R */
    int n, tile_sequences, heads, f, layers;
    float epsilon, scale, scale_log2e; /* 1 / sqrt(e), that times log2(e) */
    const float *parameters;
    struct ps_encoder_layout at;
    const uint4 *packed; /* [layers, 2, ..]: as products read them, then their transposes: see pack */
    float *stream;       /* [layers + 1, R, d] */
    /* A layer's, `kept_layer` floats apart: [R, d], [R, 3d], [R, d], [R, d], [R, f], [heads, R] (log2), [R], [R]. xhat1 NULL:
     * nothing is kept. Backward leaves the gradients of q, k and v in qkv, and in hidden what W_2 was multiplied with. */
    float *xhat1, *qkv, *merged, *xhat2, *hidden, *logsum, *rstd1, *rstd2;
    float *d_hidden, *masked_o, *masked_2; /* [R, f], [R, d], [R, d]: gradients entering W_1, W_o, W_2 */
    int64_t kept_layer;
    const float *dy; /* [R, d] */
    float *du;
    struct ps_dropout dropout;
    struct float_embedding embed;
};

/* ---- operands ----
 *
 * The left operand of a product lies in shared memory as lanes want it, a "fragment" of 16 bytes for 16 rows, 8 columns and a lane:
 * (g, 2q), (g + 8, 2q), (g, 2q + 1), (g + 8, 2q + 1), where lane 4 g + q has place 4 g + q, or that with its bit 2 turned over in
 * odd columns of fragments: so a warp that has whole rows meets no bank twice either.
 *
 * What attention reads lies by rows, whose columns are moved within each 32: the column of row r is column ^ turn(r). So lanes that
 * read pairs of columns of 4 neighbouring rows, or one column of rows 0, 2, 4, 6 (1, 3, 5, 7) meet no bank twice. */

static __device__ __forceinline__ int turn(int row)
{
    return ((row & 3) ^ (row >> 2 & 1)) << 3;
}

/* x as an operand in memory or registers. */
static __device__ __forceinline__ float operand(float x)
{
    return exact ? x : __uint_as_float(ps_round_up(x));
}

/* quad_bits of lane q's pairs: elements 2q and 2q + 1 of what lane t has drawn when bits 4t and 4t + 16 are set. */
static __device__ __forceinline__ uint32_t quad_mask(const struct ps_dropout &d, uint64_t step, uint32_t index, int q)
{
    return quad_bits(d, step, index, q) >> q;
}

static __device__ __forceinline__ float kept_scale(uint32_t mask, int t, int i, float scale)
{
    return mask >> (4 * t + 16 * i) & 1 ? scale : 0.0f;
}

/* Operands as multiply_add's products take them: in fp32 two parts of each. */
template <int N> static __device__ __forceinline__ void split(uint32_t (&hi)[N], uint32_t (&lo)[N], const float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        if constexpr (exact) {
            ps_split<true>(hi[i], lo[i], x[i]);
        } else {
            hi[i] = __float_as_uint(x[i]);
            lo[i] = 0;
        }
    }
}

/* c += a b of 8 terms; a a fragment, b rows 2q, 2q + 1 of column g. */
static __device__ __forceinline__ void multiply_add(float (&c)[4], const float (&a)[4], float b0, float b1)
{
    const float b[2] = {b0, b1};
    uint32_t a_hi[4], a_lo[4], b_hi[2], b_lo[2];
    split(a_hi, a_lo, a);
    split(b_hi, b_lo, b);
    ps_mma_split<exact, true>(c, a_hi, a_lo, b_hi, b_lo);
}

struct lane_place {
    int lane, g, q, warp, down, across; /* the warp's place among 4 x 4 */
    __device__ __forceinline__ lane_place()
    {
        lane = (int)threadIdx.x % 32;
        warp = (int)threadIdx.x / 32;
        g = lane / 4;
        q = lane % 4;
        down = warp / ACROSS;
        across = warp % ACROSS;
    }
};

template <int NT> static __device__ __forceinline__ void clear(float (&c)[NT][4])
{
#pragma unroll
    for (int i = 0; i < NT * 4; i++) {
        c[i / 4][i % 4] = 0;
    }
}

/* c += a b of a step of 16 terms: a, the lane's fragments of columns 2k and 2k + 1; b the lane's fragments. */
template <int NT>
static __device__ __forceinline__ void multiply_step(float (&c)[NT][4], const float *even, const float *odd, const float4 *b)
{
    float4 w[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        w[t] = b[t * 32];
    }
    float a[4];
    ps_load<4>(a, even);
#pragma unroll
    for (int t = 0; t < NT; t++) {
        multiply_add(c[t], a, w[t].x, w[t].y);
    }
    ps_load<4>(a, odd);
#pragma unroll
    for (int t = 0; t < NT; t++) {
        multiply_add(c[t], a, w[t].z, w[t].w);
    }
}

/* ---- weights on their way ----
 *
 * They pass through a ring in the order in which products take them, a piece of some steps of 16 rows and all of a product's
 * columns at a time. The warps take turns to ask for the next one, into the place of the piece before the one that they have done
 * with. */

struct piece {
    uint32_t from, bytes; /* 16-byte units from the layer's packed weights on */
};

enum { MOST_PIECES = 5 + MOST_HIDDEN / HIDDEN * 4 };

/* Of a layer, in the order of its products. */
struct piece_list {
    int count;
    struct piece of[MOST_PIECES];
};

struct ring_shared {
    unsigned long long full[SLOTS], empty[SLOTS];
};

struct ring {
    uint32_t slots, full, empty; /* addresses */
    const float4 *own;           /* the lane's first fragment in the first slot */
    int slot, before;            /* of the piece at hand, of the one before */
    uint32_t parity, parity_before;
    /* What is to be asked for next: a layer's weights, which of its pieces, and how many are left. */
    const uint4 *first, *packed;
    const struct piece_list &pieces; /* the kernel's argument */
    int step_layer, layers, layer, next, left, whose;

    /* By all threads; `first`: the first layer's packed weights in the order of the layers, step_layer fragments apart, `tiles`
     * times. */
    __device__ __forceinline__ ring(const float *memory, struct ring_shared *shared, const struct piece_list &pieces_,
                                    const uint4 *first_, int step_, int layers_, int64_t tiles)
        : slot(0), before(-1), parity(0), parity_before(0), first(first_), packed(first_), pieces(pieces_), step_layer(step_),
          layers(layers_), layer(0), next(0), left((int)tiles * layers_ * pieces_.count), whose(0)
    {
        slots = ps_shared_address(memory);
        full = ps_shared_address(shared->full);
        empty = ps_shared_address(shared->empty);
        own = (const float4 *)memory + threadIdx.x % 32;
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < SLOTS; i++) {
                ps_mbarrier_init(full + 8 * i, 1);
                ps_mbarrier_init(empty + 8 * i, THREADS);
            }
            ps_mbarrier_publish();
        }
        __syncthreads();
    }
    __device__ __forceinline__ void ask(int to, bool mine)
    {
        if (mine) {
            const struct piece p = pieces.of[next];
            ps_mbarrier_expect(full + 8 * to, p.bytes);
            ps_bulk_fetch(slots + (uint32_t)to * SLOT, packed + p.from, p.bytes, full + 8 * to);
        }
        left--;
        if (++next == pieces.count) {
            next = 0;
            packed += step_layer;
            if (++layer == layers) {
                layer = 0;
                packed = first;
            }
        }
    }
    /* Fills the ring, once the weights may be read. */
    __device__ __forceinline__ void begin()
    {
        for (int i = 0; i < SLOTS && left > 0; i++) {
            ask(i, threadIdx.x == 0);
        }
    }
    /* The piece at hand, once it is there: the lane's first fragment. */
    __device__ __forceinline__ const float4 *wait() const
    {
        ps_mbarrier_wait(full + 8 * slot, parity);
        return own + slot * (SLOT / 16);
    }
    __device__ __forceinline__ void release(const lane_place &at)
    {
        ps_mbarrier_arrive(empty + 8 * slot); /* each for itself: racecheck does not follow one lane's arrival for all */
        if (before >= 0 && left > 0) {
            const bool mine = at.lane == 0 && at.warp == whose;
            if (mine) {
                ps_mbarrier_wait(empty + 8 * before, parity_before);
            }
            ask(before, mine);
            whose = (whose + 1) % WARPS;
        }
        before = slot;
        parity_before = parity;
        if (++slot == SLOTS) {
            slot = 0;
            parity ^= 1;
        }
    }
};

/* Steps of 16 rows in a piece of a product of so many columns. */
static __host__ __device__ constexpr int steps_of(int columns)
{
    return SLOT / (columns * 64);
}

/* c += a b over STEPS of 16 terms: a, fragments of COLUMNS columns; b, what comes through the ring. */
template <int STEPS, int NT, int COLUMNS>
static __device__ __forceinline__ void multiply(float (&c)[NT][4], const float *a, ring &weights, const lane_place &at)
{
    constexpr int WIDE = NT * ACROSS, EACH = steps_of(WIDE * 8); /* tiles of columns; steps of a piece */
    static_assert(STEPS % EACH == 0, "whole pieces");
    const float *even = a + at.down * (16 * COLUMNS) + at.lane * 4, *odd = a + at.down * (16 * COLUMNS) + 128 + (at.lane ^ 4) * 4;
#pragma unroll 1
    for (int k = 0; k < STEPS; k += EACH) {
        const float4 *const b = weights.wait() + at.across * NT * 32;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            multiply_step<NT>(c, even + i * 256, odd + i * 256, b + i * (WIDE * 32));
        }
        weights.release(at);
        even += EACH * 256;
        odd += EACH * 256;
    }
}

/* c to fragments of COLUMNS columns, as operands or as they are. */
template <int NT, int COLUMNS, bool OPERANDS>
static __device__ __forceinline__ void put_fragments(float *to, const float (&c)[NT][4], const lane_place &at)
{
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const int column = at.across * NT + t;
        float v[4] = {c[t][0], c[t][2], c[t][1], c[t][3]};
        if (OPERANDS) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = operand(v[i]);
            }
        }
        ps_store<4>(to + ((at.down * (COLUMNS / 8) + column) * 32 + (at.lane ^ (column & 1) << 2)) * 4, v);
    }
}

/* c as operands to rows of LD. */
template <int NT, int LD> static __device__ __forceinline__ void put_rows(float *to, const float (&c)[NT][4], const lane_place &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float *row = to + (at.down * 16 + i * 8 + at.g) * LD;
#pragma unroll
        for (int t = 0; t < NT; t++) {
            *(float2 *)(row + (((at.across * NT + t) * 8) ^ turn(at.g)) + 2 * at.q) =
                make_float2(operand(c[t][i * 2]), operand(c[t][i * 2 + 1]));
        }
    }
}

/* ---- packed weights ---- */

/* Fragments of a layer: W_qkv [d, 3d], W_o [d, d], W_1 [d, f] by HIDDEN columns, W_2 [f, d]; then W_2' by HIDDEN columns, W_1',
 * W_o', W_qkv'. In a matrix, or what it is divided in, that of 16 rows (step), 8 columns and a lane: rows 2q, 2q + 1, 2q + 8,
 * 2q + 9 of column g, rounded in tf32. */
struct packed_places {
    int w_qkv, w_o, w_1, w_2, w_2t, w_1t, w_ot, w_qkvt, all;
};

static __host__ __device__ __forceinline__ struct packed_places places_of(int d, int f)
{
    struct packed_places p = {};
    p.w_o = 3 * d * d / 4;
    p.w_1 = p.w_o + d * d / 4;
    p.w_2 = p.w_1 + d * f / 4;
    p.w_2t = p.w_2 + f * d / 4;
    p.w_1t = p.w_2t + f * d / 4;
    p.w_ot = p.w_1t + d * f / 4;
    p.w_qkvt = p.w_ot + d * d / 4;
    p.all = p.w_qkvt + 3 * d * d / 4;
    return p;
}

/* weights: the flat ones; group: columns of q, k and v that go together. One fragment a thread, a layer to each blockIdx.y; count:
 * fragments of a layer, transposes or not. 4 bytes read and written for each weight and direction. */
static __global__ void __launch_bounds__(256)
    pack(uint4 *packed, const float *weights, const struct ps_encoder_layout at, int d, int f, int group, int count)
{
    ps_grid_begin();
    const struct packed_places p = places_of(d, f);
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) {
        return;
    }
    const bool transposed = i >= p.w_2t;
    int64_t from;
    int first, deep, wide; /* of the product's right side: rows, and columns that go together */
    if (!transposed) {
        first = i >= p.w_2 ? p.w_2 : i >= p.w_1 ? p.w_1 : i >= p.w_o ? p.w_o : 0;
        from = i >= p.w_2 ? at.w_2 : i >= p.w_1 ? at.w_1 : i >= p.w_o ? at.w_o : at.w_qkv;
        deep = i >= p.w_2 ? f : d;
        wide = i >= p.w_2 ? d : i >= p.w_1 ? (int)HIDDEN : i >= p.w_o ? d : 3 * group;
    } else {
        first = i >= p.w_qkvt ? p.w_qkvt : i >= p.w_ot ? p.w_ot : i >= p.w_1t ? p.w_1t : p.w_2t;
        from = i >= p.w_qkvt ? at.w_qkv : i >= p.w_ot ? at.w_o : i >= p.w_1t ? at.w_1 : at.w_2;
        deep = i >= p.w_qkvt ? 3 * d : i >= p.w_ot ? d : i >= p.w_1t ? f : d;
        wide = i >= p.w_1t ? d : (int)HIDDEN;
    }
    const int fragment = (i - first) % (deep * wide / 4), part = (i - first) / (deep * wide / 4), lane = fragment % 32;
    const int tile = fragment / 32, row = tile / (wide / 8) * 16 + lane % 4 * 2;
    int column = tile % (wide / 8) * 8 + lane / 4;
    column = i < p.w_o ? column / group * d + part * group + column % group : part * wide + column;
    const int width = i < p.w_o                 ? 3 * d
                      : i >= p.w_1 && i < p.w_2 ? f
                                                : d; /* of the weight as it lies, where it is not transposed */
    const float *w = weights + blockIdx.y * at.matrix_stride + from;
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int r = row + j / 2 * 8 + j % 2;
        v[j] = transposed ? w[column * deep + r] : w[r * width + column];
    }
    packed[(int64_t)blockIdx.y * p.all + i] = make_uint4(__float_as_uint(operand(v[0])), __float_as_uint(operand(v[1])),
                                                         __float_as_uint(operand(v[2])), __float_as_uint(operand(v[3])));
}

/* The pieces of a layer in the order of its products. */
static struct piece_list list_pieces(int f, bool backward)
{
    struct piece_list list = {};
    const struct packed_places p = places_of(D, f);
    const int chunk = D / 16 / steps_of(HIDDEN), back = HIDDEN / 16 / steps_of(D); /* pieces of D by HIDDEN, HIDDEN by D */
    const int square = D / 16 / steps_of(D), qkv = D / 16 / steps_of(QKV);
    const int before = backward ? 0 : qkv + square, chunks = f / HIDDEN * (chunk + back);
    list.count = before + chunks + (backward ? 4 * square : 0);
    for (int i = 0; i < list.count; i++) {
        int of, columns, first, after = i - before - chunks;
        if (i < before - square || after >= square) { /* W_qkv, W_qkv' */
            columns = backward ? D : QKV;
            first = backward ? p.w_qkvt : 0;
            of = backward ? after - square : i;
        } else if (i < before || after >= 0) { /* W_o, W_o' */
            columns = D;
            first = backward ? p.w_ot : p.w_o;
            of = backward ? after : i - (before - square);
        } else {
            const int in = (i - before) % (chunk + back), number = (i - before) / (chunk + back);
            const bool second = in >= chunk;
            columns = second ? D : HIDDEN;
            first = second ? (backward ? p.w_1t : p.w_2) : (backward ? p.w_2t : p.w_1);
            of = second ? number * back + in - chunk : number * chunk + in;
        }
        const int fragments = steps_of(columns) * columns * 4;
        list.of[i] = {(uint32_t)(first + of * fragments), (uint32_t)fragments * 16};
    }
    return list;
}

/* ---- by rows ----
 *
 * A warp has two pairs of rows, g and g + 8 of 16, for neighbouring g; a lane has columns 2 lane and 2 lane + 1 of them. What it
 * has of a pair is a fragment, v[pair]. */

struct row_place {
    int lane, first; /* of the 32 pairs */
    __device__ __forceinline__ explicit row_place(const lane_place &at) : lane(at.lane), first(at.warp * 2)
    {
    }
    /* The pair's first row. */
    __device__ __forceinline__ int row(int pair) const
    {
        return (first + pair) / 8 * 16 + (first + pair) % 8;
    }
    /* Where the fragment lies, in floats. */
    __device__ __forceinline__ int in(int pair) const
    {
        return (((first + pair) / 8 * (D / 8) + lane / 4) * 32 + (((first + pair) % 8 * 4 + lane % 4) ^ (lane / 4 & 1) << 2)) * 4;
    }
};

struct row_values {
    float v[2][4];
};

/* From rows of a tensor in memory, ld columns apart, of the tile's first row on; rows that do not exist are zero. */
static __device__ __forceinline__ void take_rows(row_values &x, const float *from, int ld, int count, const row_place &at)
{
    const int first = at.row(0), left = count - first;
    from += (int64_t)first * ld + at.lane * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i / 2 + i % 2 * 8;
        float2 v = make_float2(0, 0);
        if (row < left) {
            v = *(const float2 *)(from + row * ld);
        }
        x.v[i / 2][i % 2] = v.x;
        x.v[i / 2][i % 2 + 2] = v.y;
    }
}

/* ROUNDED: for a weight's gradient. */
template <bool ROUNDED>
static __device__ __forceinline__ void keep_rows(float *to, const row_values &x, int count, const row_place &at)
{
    const int first = at.row(0), left = count - first;
    to += (int64_t)first * D + at.lane * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i / 2 + i % 2 * 8;
        if (row < left) {
            const float low = x.v[i / 2][i % 2], high = x.v[i / 2][i % 2 + 2];
            *(float2 *)(to + row * D) = ROUNDED ? make_float2(rounded(low), rounded(high)) : make_float2(low, high);
        }
    }
}

/* As operands to fragments; rows that do not exist are zero. */
static __device__ __forceinline__ void put_operands(float *a, const row_values &x, int count, const row_place &at)
{
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        const int row = at.row(pair);
        float v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = row + j % 2 * 8 < count ? operand(x.v[pair][j]) : 0.0f;
        }
        ps_store<4>(a + at.in(pair), v);
    }
}

/* x, rows of a tensor of d columns whose first is row0, dropped. Each of four lanes draws one of their rows. */
static __device__ __forceinline__ void drop_rows(row_values &x, const struct ps_dropout &dropout, int64_t row0, const row_place &at)
{
    const int q = at.lane % 4;
    const uint64_t block = (uint64_t)(row0 + at.row(q / 2) + q % 2 * 8) * (D / 8) + at.lane / 4;
    const uint32_t mask = quad_mask(dropout, dropout.state->step, (uint32_t)block, q);
#pragma unroll
    for (int j = 0; j < 8; j++) { /* row t, column e of the lane's two */
        const int t = j / 2, e = j % 2;
        x.v[t / 2][t % 2 + 2 * e] *= kept_scale(mask, t, e, dropout.scale);
    }
}

static __device__ __forceinline__ float row_sum(const row_values &x, int i)
{
    float sum = 0;
    sum += x.v[i / 2][i % 2] + x.v[i / 2][i % 2 + 2];
    return ps_group_sum<32>(sum);
}

static __device__ __forceinline__ float row_dot(const row_values &x, const row_values &y, int i)
{
    float sum = 0;
    sum += x.v[i / 2][i % 2] * y.v[i / 2][i % 2] + x.v[i / 2][i % 2 + 2] * y.v[i / 2][i % 2 + 2];
    return ps_group_sum<32>(sum);
}

/* A vector of d: the lane's columns. */
struct row_vector {
    float2 of;
    __device__ __forceinline__ row_vector(const float *from, const row_place &at) : of(*(const float2 *)(from + at.lane * 2))
    {
    }
    /* That of element j of a fragment. */
    __device__ __forceinline__ float at(int j) const
    {
        return j < 2 ? of.x : of.y;
    }
};

/* Each element of x: pair and j of it. */
#define PS_EACH _Pragma("unroll") for (int pair = 0; pair < 2; pair++) _Pragma("unroll") for (int j = 0; j < 4; j++)

/* x = xhat, in fp32, whose factors are rstd [4]. */
static __device__ __forceinline__ void normalise(row_values &x, float (&rstd)[4], float epsilon)
{
    float mean[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        mean[i] = row_sum(x, i) * (1.0f / D);
    }
    PS_EACH
    {
        x.v[pair][j] -= mean[pair * 2 + j % 2];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        rstd[i] = rsqrtf(fmaf(row_dot(x, x, i), 1.0f / D, epsilon));
    }
    PS_EACH
    {
        x.v[pair][j] *= rstd[pair * 2 + j % 2];
    }
}

/* LayerNorm of x, y = gamma xhat + beta, as operand to a; xhat and rstd to memory, unless xhat is NULL. */
static __device__ __forceinline__ void normalise_rows(float *a, row_values &x, const float *gamma, const float *beta, float *xhat,
                                                      float *rstd, float epsilon, int count, const row_place &at)
{
    const row_vector scale(gamma, at), shift(beta, at);
    float r[4];
    normalise(x, r, epsilon);
    if (xhat) {
        keep_rows<true>(xhat, x, count, at);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = at.row(i / 2) + i % 2 * 8;
            if (row < count && at.lane == 0) {
                rstd[row] = r[i];
            }
        }
    }
    PS_EACH
    {
        x.v[pair][j] = fmaf(x.v[pair][j], scale.at(j), shift.at(j));
    }
    put_operands(a, x, count, at);
}

/* Forward: y = residual + drop(a + bias), to `out`; then LayerNorm of it, if there is a gamma. Tensors are of the tile's first row
 * on. */
static __device__ __forceinline__ void finish_rows(float *a, const float *residual, float *out, const float *bias,
                                                   const struct ps_dropout &dropout, const float *gamma, const float *beta,
                                                   float *xhat, float *rstd, float epsilon, int64_t row0, int count,
                                                   const lane_place &lane)
{
    const row_place at(lane);
    row_values x, u;
    take_rows(u, residual, D, count, at);
    const row_vector b(bias, at);
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        ps_load<4>(x.v[pair], a + at.in(pair));
    }
    PS_EACH
    {
        x.v[pair][j] += b.at(j);
    }
    if (dropout.threshold) {
        drop_rows(x, dropout, row0, at);
    }
    PS_EACH
    {
        x.v[pair][j] += u.v[pair][j];
    }
    keep_rows<false>(out, x, count, at);
    if (gamma) {
        normalise_rows(a, x, gamma, beta, xhat, rstd, epsilon, count, at);
    }
}

/* Backward: g = from + LayerNorm's gradient of a (gamma NULL: g = from), to `du`; then drop'(g) to `masked` and, as operand, to a
 * (masked NULL: neither). from may be du. */
static __device__ __forceinline__ void gradient_rows(float *a, const float *from, float *du, const float *gamma, const float *xhat,
                                                     const float *rstd, const struct ps_dropout &dropout, float *masked,
                                                     int64_t row0, int count, const lane_place &lane)
{
    const row_place at(lane);
    row_values g;
    take_rows(g, from, D, count, at);
    if (gamma) {
        row_values x, d;
        float r[4], mean[4], slope[4];
        take_rows(x, xhat, D, count, at);
        const row_vector scale(gamma, at);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = at.row(i / 2) + i % 2 * 8;
            r[i] = row < count ? rstd[row] : 0.0f;
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            ps_load<4>(d.v[pair], a + at.in(pair));
        }
        PS_EACH
        {
            d.v[pair][j] *= scale.at(j);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            mean[i] = row_sum(d, i) * (1.0f / D);
            slope[i] = row_dot(d, x, i) * (1.0f / D);
        }
        PS_EACH
        {
            const int i = pair * 2 + j % 2;
            g.v[pair][j] += r[i] * (d.v[pair][j] - mean[i] - x.v[pair][j] * slope[i]);
        }
    }
    keep_rows<false>(du, g, count, at);
    if (masked) {
        if (dropout.threshold) {
            drop_rows(g, dropout, row0, at);
        }
        keep_rows<true>(masked, g, count, at);
        put_operands(a, g, count, at);
    }
}

/* ---- hidden columns ---- */

enum { HT = HIDDEN / 8 / ACROSS }; /* a warp's tiles of 8 of the hidden columns at hand */

/* From products c of columns `chunk` on of the hidden layer: z = c + bias to memory (hidden NULL: not) and drop(gelu(z)) to h.
 * hidden: of the tile's first row on. */
static __device__ __forceinline__ void hidden_forward(float *h, float (&c)[HT][4], const float *bias, float *hidden, int f,
                                                      int chunk, const struct ps_dropout &dropout, int64_t row0, int count,
                                                      const lane_place &at)
{
    const int column = chunk + at.across * (HT * 8);
    const uint64_t step = dropout.threshold ? dropout.state->step : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.down * 16 + i * 8 + at.g;
        const uint32_t mask = dropout.threshold
                                  ? quad_mask(dropout, step, (uint32_t)(((uint64_t)(row0 + row) * f + column) / 8 + at.q), at.q)
                                  : 0xffffffffu;
#pragma unroll
        for (int t = 0; t < HT; t++) {
            const float2 b = *(const float2 *)(bias + column + t * 8 + 2 * at.q);
            float *z = &c[t][i * 2];
            z[0] += b.x;
            z[1] += b.y;
            if (hidden && row < count) {
                *(float2 *)(hidden + (int64_t)row * f + column + t * 8 + 2 * at.q) = make_float2(z[0], z[1]);
            }
            z[0] *= ps_gelu_sigmoid(z[0]) * kept_scale(mask, t, 0, dropout.scale);
            z[1] *= ps_gelu_sigmoid(z[1]) * kept_scale(mask, t, 1, dropout.scale);
        }
    }
    put_fragments<HT, HIDDEN, true>(h, c, at);
}

/* The lane's z of a chunk of the hidden columns, asked for before the products. */
struct hidden_values {
    float2 z[2][HT];
    __device__ __forceinline__ hidden_values(const float *hidden, int f, int chunk, int count, const lane_place &at)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = at.down * 16 + i * 8 + at.g;
#pragma unroll
            for (int t = 0; t < HT; t++) {
                z[i][t] = row < count ? *(const float2 *)(hidden + (int64_t)row * f + chunk + (at.across * HT + t) * 8 + 2 * at.q)
                                      : make_float2(0, 0);
            }
        }
    }
};

/* From products c, the gradient of what follows dropout: hidden, z, becomes what W_2 was multiplied with; d_hidden and h the
 * gradient of z. */
static __device__ __forceinline__ void hidden_backward(float *h, float (&c)[HT][4], const hidden_values &ahead, float *hidden,
                                                       float *d_hidden, int f, int chunk, const struct ps_dropout &dropout,
                                                       int64_t row0, int count, const lane_place &at)
{
    const int column = chunk + at.across * (HT * 8);
    const uint64_t step = dropout.threshold ? dropout.state->step : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.down * 16 + i * 8 + at.g;
        const bool here = row < count;
        const int64_t first = (int64_t)row * f + column + 2 * at.q;
        float2 z[HT];
#pragma unroll
        for (int t = 0; t < HT; t++) {
            z[t] = ahead.z[i][t];
        }
        const uint32_t mask = dropout.threshold
                                  ? quad_mask(dropout, step, (uint32_t)(((uint64_t)(row0 + row) * f + column) / 8 + at.q), at.q)
                                  : 0xffffffffu;
#pragma unroll
        for (int t = 0; t < HT; t++) {
            float *d = &c[t][i * 2];
            const float keep[2] = {kept_scale(mask, t, 0, dropout.scale), kept_scale(mask, t, 1, dropout.scale)};
            float v[2] = {z[t].x, z[t].y};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float s = ps_gelu_sigmoid(v[j]);
                d[j] *= keep[j] * ps_gelu_slope(v[j], s);
                v[j] *= keep[j] * s;
            }
            if (here) {
                *(float2 *)(hidden + first + t * 8) = make_float2(rounded(v[0]), rounded(v[1]));
                *(float2 *)(d_hidden + first + t * 8) = make_float2(rounded(d[0]), rounded(d[1]));
            }
        }
    }
    put_fragments<HT, HIDDEN, true>(h, c, at);
}

/* ---- attention ---- */

/* A job is a head and 16 rows: of one sequence, with all of its rows as keys; or, of short sequences, the tile's next 16, with the
 * rows of all sequences that these belong to. */
template <int E> struct job {
    static constexpr int HEADS = D / E, PARTS = E / 8, MOST = 8; /* tiles of keys: N <= 64 */
    int head, base, tiles;                                       /* the first key's row in the tile; tiles of 8 keys */
    int row[2], seen[2]; /* the lane's rows g and g + 8 in the tile; the first of the N keys, less base, that each sees */
    bool here[2];
    int whole; /* tiles of keys that every row sees */

    static __device__ __forceinline__ bool together(int n)
    {
        return n <= 16;
    }
    static __device__ __forceinline__ int count(int sequences, int n)
    {
        return HEADS * (together(n) ? (sequences * n + 15) / 16 : sequences * ((n + 15) / 16));
    }
    __device__ __forceinline__ job(int i, int n, int count, const lane_place &at)
    {
        head = i % HEADS;
        i /= HEADS;
        if (together(n)) {
            const int first = i * 16, last = min(first + 15, count - 1);
            base = first / n * n;
            tiles = (last / n * n + n - base + 7) / 8;
            whole = 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                row[h] = first + at.g + 8 * h;
                here[h] = row[h] < count;
                seen[h] = row[h] / n * n - base;
            }
        } else {
            const int parts = (n + 15) / 16, first = i % parts * 16 + at.g;
            base = i / parts * n;
            tiles = (n + 7) / 8;
            whole = n / 8;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                here[h] = first + 8 * h < n;
                row[h] = min(base + first + 8 * h, ROWS - 1);
                seen[h] = 0;
            }
        }
    }
    /* Whether row h sees column `column` of the keys. */
    __device__ __forceinline__ bool sees(int h, int column, int n) const
    {
        return (unsigned)(column - seen[h]) < (unsigned)n;
    }
};

/* The lane's pair of 8 columns of a row. */
static __device__ __forceinline__ float2 pair_of(const float *from, int ld, int row, int column, const lane_place &at)
{
    return *(const float2 *)(from + row * ld + (column ^ turn(row)) + 2 * at.q);
}

/* A left operand of the lane's two rows. */
static __device__ __forceinline__ void take_left(float (&a)[4], const float *from, int ld, const int (&row)[2], int column,
                                                 const lane_place &at)
{
    const float2 low = pair_of(from, ld, row[0], column, at), high = pair_of(from, ld, row[1], column, at);
    a[0] = low.x;
    a[1] = high.x;
    a[2] = low.y;
    a[3] = high.y;
}

/* Right operands of PARTS times 8 columns: where the lane finds them, 8 rows further each time. By rows: products with the
 * transpose. */
template <int PARTS> struct right_rows {
    const float *from[PARTS];
    __device__ __forceinline__ right_rows(const float *b, int ld, int row, int column, const lane_place &at)
    {
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            from[t] = b + (row + at.g) * ld + ((column + 8 * t) ^ turn(row + at.g)) + 2 * at.q;
        }
    }
    __device__ __forceinline__ float2 at(int t, int further) const
    {
        return *(const float2 *)(from[t] + further);
    }
};

template <int PARTS> struct right_columns {
    const float *even[PARTS], *odd[PARTS];
    __device__ __forceinline__ right_columns(const float *b, int ld, int row, int column, const lane_place &at)
    {
        const int r = row + 2 * at.q;
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            even[t] = b + r * ld + ((column + 8 * t) ^ turn(r)) + at.g;
            odd[t] = b + (r + 1) * ld + ((column + 8 * t) ^ turn(r + 1)) + at.g;
        }
    }
};

/* c += p b of 8 rows of b; p an accumulator's four. */
template <int PARTS>
static __device__ __forceinline__ void mix(float (&c)[PARTS][4], const float (&p)[4], const right_columns<PARTS> &b, int further)
{
    const float a[4] = {operand(p[0]), operand(p[2]), operand(p[1]), operand(p[3])};
#pragma unroll
    for (int t = 0; t < PARTS; t++) {
        multiply_add(c[t], a, b.even[t][further], b.odd[t][further]);
    }
}

/* merged = softmax(q k') v. qkv: in shared memory; to: merged as fragments; merged, logsum: in memory, of the tile's first row on;
 * or NULL. */
template <int E>
static __device__ __forceinline__ void attend(float *to, const float *qkv, float *merged, float *logsum, int group,
                                              const struct floats &x, int sequences, const lane_place &at)
{
    typedef job<E> J;
    constexpr int LD = QKV, PARTS = J::PARTS;
    for (int i = at.warp; i < J::count(sequences, x.n); i += WARPS) {
        const J j(i, x.n, sequences * x.n, at);
        float query[PARTS][4];
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            take_left(query[t], qkv, LD, j.row, j.head * E + t * 8, at);
        }
        const right_rows<PARTS> keys(qkv, LD, j.base, D + j.head * E, at);
        const right_columns<PARTS> values(qkv, LD, j.base, 2 * D + j.head * E, at);
        float s[J::MOST][4], high[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < J::MOST; k++) {
            if (k < j.tiles) {
                s[k][0] = s[k][1] = s[k][2] = s[k][3] = 0;
#pragma unroll
                for (int t = 0; t < PARTS; t++) {
                    const float2 key = keys.at(t, k * 8 * LD);
                    multiply_add(s[k], query[t], key.x, key.y);
                }
                if (k >= j.whole) {
#pragma unroll
                    for (int l = 0; l < 4; l++) {
                        s[k][l] = j.sees(l / 2, k * 8 + 2 * at.q + l % 2, x.n) ? s[k][l] : -INFINITY;
                    }
                }
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    high[l / 2] = fmaxf(high[l / 2], s[k][l]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            high[h] = ps_group_max<4>(high[h]) * x.scale_log2e;
        }
        float o[PARTS][4] = {};
#pragma unroll
        for (int k = 0; k < J::MOST; k++) {
            if (k < j.tiles) {
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] = ps_exp2(fmaf(s[k][l], x.scale_log2e, -high[l / 2]));
                    sum[l / 2] += s[k][l];
                }
                mix<PARTS>(o, s[k], values, k * 8 * LD);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = ps_group_sum<4>(sum[h]);
            const float part = 1.0f / sum[h];
            if (j.here[h]) {
                const int row = j.row[h];
#pragma unroll
                for (int t = 0; t < PARTS; t++) {
                    const float2 v = make_float2(o[t][2 * h] * part, o[t][2 * h + 1] * part);
                    const int column = group * (GROUP / 8) + j.head * (E / 8) + t; /* of fragments */
                    float *p =
                        to + ((row / 16 * (D / 8) + column) * 32 + ((row % 8 * 4 + at.q) ^ (column & 1) << 2)) * 4 + row / 8 % 2;
                    p[0] = operand(v.x);
                    p[2] = operand(v.y);
                    if (merged) {
                        *(float2 *)(merged + row * D + j.head * E + t * 8 + 2 * at.q) = make_float2(rounded(v.x), rounded(v.y));
                    }
                }
                if (logsum && at.q == 0) {
                    logsum[j.head * x.rows + row] = high[h] + ps_log2(sum[h]);
                }
            }
        }
    }
}

/* The gradient of q, to memory (d_qkv: rows of 3 d), and sum_j A dA of each row. qkv, gradient (of merged, rows of d): in shared
 * memory; sums [2, heads, rows]: logarithms of softmax's sums, and the other sums. */
template <int E>
static __device__ __forceinline__ void attend_queries(float *d_qkv, float *sums, const float *qkv, const float *gradient, int group,
                                                      const struct floats &x, int sequences, const lane_place &at)
{
    typedef job<E> J;
    constexpr int LD = QKV, PARTS = J::PARTS;
    for (int i = at.warp; i < J::count(sequences, x.n); i += WARPS) {
        const J j(i, x.n, sequences * x.n, at);
        float query[PARTS][4], d_merged[PARTS][4];
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            take_left(query[t], qkv, LD, j.row, j.head * E + t * 8, at);
            take_left(d_merged[t], gradient, D, j.row, group * GROUP + j.head * E + t * 8, at);
        }
        const right_rows<PARTS> keys(qkv, LD, j.base, D + j.head * E, at), values(qkv, LD, j.base, 2 * D + j.head * E, at);
        float *const logs = sums + j.head * ROWS, *const dots = logs + J::HEADS * ROWS;
        /* A row that does not exist has no part in anything. */
        const float log_sum[2] = {j.here[0] ? logs[j.row[0]] : 1e30f, j.here[1] ? logs[j.row[1]] : 1e30f};
        float s[J::MOST][4], d[J::MOST][4], dot[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < J::MOST; k++) {
            if (k < j.tiles) {
                s[k][0] = s[k][1] = s[k][2] = s[k][3] = 0;
                d[k][0] = d[k][1] = d[k][2] = d[k][3] = 0;
#pragma unroll
                for (int t = 0; t < PARTS; t++) {
                    const float2 key = keys.at(t, k * 8 * LD), value = values.at(t, k * 8 * LD);
                    multiply_add(s[k], query[t], key.x, key.y);
                    multiply_add(d[k], d_merged[t], value.x, value.y);
                }
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] = ps_exp2(fmaf(s[k][l], x.scale_log2e, -log_sum[l / 2]));
                }
                if (k >= j.whole) {
#pragma unroll
                    for (int l = 0; l < 4; l++) {
                        s[k][l] = j.sees(l / 2, k * 8 + 2 * at.q + l % 2, x.n) ? s[k][l] : 0.0f;
                    }
                }
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    dot[l / 2] = fmaf(s[k][l], d[k][l], dot[l / 2]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            dot[h] = ps_group_sum<4>(dot[h]);
            if (j.here[h] && at.q == 0) {
                dots[j.row[h]] = dot[h];
            }
        }
        const right_columns<PARTS> by_column(qkv, LD, j.base, D + j.head * E, at);
        float dq[PARTS][4] = {};
#pragma unroll
        for (int k = 0; k < J::MOST; k++) {
            if (k < j.tiles) {
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    s[k][l] *= d[k][l] - dot[l / 2];
                }
                mix<PARTS>(dq, s[k], by_column, k * 8 * LD);
            }
        }
#pragma unroll
        for (int t = 0; t < PARTS * 2; t++) {
            if (j.here[t % 2]) {
                *(float2 *)(d_qkv + (int64_t)j.row[t % 2] * QKV + j.head * E + t / 2 * 8 + 2 * at.q) =
                    make_float2(rounded(dq[t / 2][t % 2 * 2] * x.scale), rounded(dq[t / 2][t % 2 * 2 + 1] * x.scale));
            }
        }
    }
}

/* Those of k and v, from scores computed again, transposed: the job's rows are keys, its columns queries. */
template <int E>
static __device__ __forceinline__ void attend_keys(float *d_qkv, const float *sums, const float *qkv, const float *gradient,
                                                   int group, const struct floats &x, int sequences, const lane_place &at)
{
    typedef job<E> J;
    constexpr int LD = QKV, PARTS = J::PARTS;
    for (int i = at.warp; i < J::count(sequences, x.n); i += WARPS) {
        const J j(i, x.n, sequences * x.n, at);
        const int wide = group * GROUP + j.head * E;
        float key[PARTS][4], value[PARTS][4];
#pragma unroll
        for (int t = 0; t < PARTS; t++) {
            take_left(key[t], qkv, LD, j.row, D + j.head * E + t * 8, at);
            take_left(value[t], qkv, LD, j.row, 2 * D + j.head * E + t * 8, at);
        }
        const right_rows<PARTS> queries(qkv, LD, j.base, j.head * E, at), d_merged(gradient, D, j.base, wide, at);
        const right_columns<PARTS> query_columns(qkv, LD, j.base, j.head * E, at), d_merged_columns(gradient, D, j.base, wide, at);
        const float *const logs = sums + j.head * ROWS + j.base + 2 * at.q, *const dots = logs + J::HEADS * ROWS;
        float dk[PARTS][4] = {}, dv[PARTS][4] = {};
#pragma unroll 2
        for (int k = 0; k < j.tiles; k++) {
            float s[4] = {}, d[4] = {};
#pragma unroll
            for (int t = 0; t < PARTS; t++) {
                const float2 query = queries.at(t, k * 8 * LD), of = d_merged.at(t, k * 8 * D);
                multiply_add(s, key[t], query.x, query.y);
                multiply_add(d, value[t], of.x, of.y);
            }
#pragma unroll
            for (int l = 0; l < 4; l++) {
                s[l] = ps_exp2(fmaf(s[l], x.scale_log2e, -logs[k * 8 + l % 2]));
                d[l] = s[l] * (d[l] - dots[k * 8 + l % 2]);
            }
            if (k >= j.whole) {
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    const bool sees = j.sees(l / 2, k * 8 + 2 * at.q + l % 2, x.n);
                    s[l] = sees ? s[l] : 0.0f;
                    d[l] = sees ? d[l] : 0.0f;
                }
            }
            mix<PARTS>(dv, s, d_merged_columns, k * 8 * D);
            mix<PARTS>(dk, d, query_columns, k * 8 * LD);
        }
#pragma unroll
        for (int t = 0; t < PARTS * 2; t++) {
            if (j.here[t % 2]) {
                float *to = d_qkv + (int64_t)j.row[t % 2] * QKV + j.head * E + t / 2 * 8 + 2 * at.q;
                *(float2 *)(to + D) =
                    make_float2(rounded(dk[t / 2][t % 2 * 2] * x.scale), rounded(dk[t / 2][t % 2 * 2 + 1] * x.scale));
                *(float2 *)(to + 2 * D) = make_float2(rounded(dv[t / 2][t % 2 * 2]), rounded(dv[t / 2][t % 2 * 2 + 1]));
            }
        }
    }
}

/* A group's columns of q, k and v of the tile's rows, in memory 3 d apart, as operands to rows of shared memory; rows that do not
 * exist are zero. */
static __device__ __forceinline__ void fetch_group(float *to, const float *from, int count)
{
    constexpr int PIECES = QKV / 4;
    static_assert(ROWS * PIECES % THREADS == 0, "the same for all threads");
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / THREADS; i++) {
        const int piece = i * THREADS + (int)threadIdx.x, row = piece / PIECES, column = piece % PIECES * 4;
        float v[4] = {};
        if (row < count) {
            ps_load<4>(v, from + (int64_t)row * (3 * D) + column / GROUP * D + column % GROUP);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = operand(v[j]);
        }
        ps_store<4>(to + row * QKV + (column ^ turn(row)), v);
    }
}

/* ---- the embedding ---- */

/* The tile's windows, means and deviations to shared memory: values [sequences, length], then (mean, 1 / std) of each; to memory
 * mean and std. A warp a sequence. */
static __device__ __forceinline__ void gather_windows(float *values, const struct floats &x, int64_t first, int sequences,
                                                      const lane_place &at)
{
    const struct float_embedding &e = x.embed;
    float2 *const statistics = (float2 *)(values + (sequences * e.length + 1) / 2 * 2);
    for (int i = at.warp; i < sequences; i += WARPS) {
        const uint32_t sequence = (uint32_t)(first + i), b = ps_divide(sequence, e.by_channels);
        const float *const window = ps_window_of(e.windows, e.state, b);
        const float *const from = window ? window + (sequence - b * e.by_channels.divisor) * e.windows.by_channel : NULL;
        float *const to = values + i * e.length;
        for (int l = at.lane; l < e.length; l += 32) {
            to[l] = from ? from[l * e.windows.by_time] : NAN;
        }
        __syncwarp();
        float mean = 0.0f, deviation = 1.0f;
        if (e.revin) {
            ps_window_statistics<12, true>(to, e.length, e.epsilon, mean, deviation);
        }
        if (at.lane == 0) {
            statistics[i] = make_float2(mean, 1.0f / deviation);
            e.mean[sequence] = mean;
            e.std[sequence] = deviation;
        }
    }
}

/* v = drop(patches W_P + b_P + W_pos), in FFMA, and the patches to memory; values, statistics as gather_windows leaves them, weight
 * [P, d] in shared memory. */
static __device__ __forceinline__ void embed_rows(row_values &v, const float *values, const float2 *statistics, const float *weight,
                                                  const struct floats &x, int64_t row0, int count, const row_place &at)
{
    const struct float_embedding &e = x.embed;
    const row_vector bias(e.bias, at);
    const float *window[4];
    float2 statistic[4];
    int first[4];
    bool here[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = at.row(i / 2) + i % 2 * 8, sequence = row / x.n, n = row - sequence * x.n;
        here[i] = row < count;
        window[i] = values + (here[i] ? sequence : 0) * e.length;
        statistic[i] = statistics[here[i] ? sequence : 0];
        first[i] = n * e.stride;
        const row_vector position(e.position + n * D, at);
        v.v[i / 2][i % 2] = bias.of.x + position.of.x;
        v.v[i / 2][i % 2 + 2] = bias.of.y + position.of.y;
    }
#pragma unroll 1
    for (int k = 0; k < e.patch; k++) {
        const row_vector w(weight + k * D, at);
#pragma unroll
        for (int i = 0; i < 4; i++) { /* beyond the window's end the last value repeats */
            const float z = (window[i][min(first[i] + k, e.length - 1)] - statistic[i].x) * statistic[i].y;
            if (here[i] && at.lane == k % 32) {
                e.patches[(row0 + at.row(i / 2) + i % 2 * 8) * e.patch + k] = rounded(z);
            }
            v.v[i / 2][i % 2] = fmaf(z, w.of.x, v.v[i / 2][i % 2]);
            v.v[i / 2][i % 2 + 2] = fmaf(z, w.of.y, v.v[i / 2][i % 2 + 2]);
        }
    }
    if (e.dropout.threshold) {
        drop_rows(v, e.dropout, row0, at);
    }
}

/* No NaN from before the kernel where attention reads beyond a tile's rows. */
static __device__ __forceinline__ void clear_beyond(float *b, float *c)
{
    for (int i = (int)threadIdx.x; i < 8 * (D + QKV); i += THREADS) {
        (i < 8 * D ? b + ROWS * D : c + ROWS * QKV - 8 * D)[i] = 0;
    }
}

/* ---- the kernels ---- */

static constexpr size_t shared_bytes(bool backward)
{
    return sizeof(float) * (size_t)(FLOATS_A + FLOATS_B + FLOATS_C + (backward ? FLOATS_SUMS : 0)) + SLOTS * SLOT +
           sizeof(struct ring_shared);
}

template <int E>
static __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ struct floats x, const __grid_constant__ struct piece_list pieces)
{
    constexpr int NT = D / 8 / ACROSS, GT = QKV / 8 / ACROSS;
    extern __shared__ float4 shared_memory[];
    float *const a = (float *)shared_memory, *const b = a + FLOATS_A, *const c = b + FLOATS_B, *const slots = c + FLOATS_C;
    const lane_place at;
    clear_beyond(b, c);
    const struct packed_places places = places_of(D, x.f);
    struct ring_shared *const shared = (struct ring_shared *)(slots + SLOTS * SLOT / 4);
    ring weights(slots, shared, pieces, x.packed, places.all, x.layers, (x.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
    ps_grid_begin();
    weights.begin();
    for (int64_t tile = blockIdx.x; tile < x.tiles; tile += gridDim.x) {
        const int64_t row0 = tile * x.tile_sequences * x.n;
        const int count = (int)(x.rows - row0 < x.tile_sequences * x.n ? x.rows - row0 : x.tile_sequences * x.n);
        const int sequences = count / x.n;
        for (int layer = 0; layer < x.layers; layer++) {
            const int64_t kept = layer * x.kept_layer;
            const float *p = x.parameters + layer * x.at.vector_stride;
            const float *u = x.stream + (layer * x.rows + row0) * D;
            float *out = x.stream + ((layer + 1) * x.rows + row0) * D;
            if (layer == 0) {
                const row_place rows(at);
                if (x.embed.weight) {
                    __syncthreads(); /* b and c are free */
                    for (int i = (int)threadIdx.x; i < x.embed.patch * D; i += THREADS) {
                        b[i] = x.embed.weight[i];
                    }
                    gather_windows(c, x, tile * x.tile_sequences, sequences, at);
                    __syncthreads();
                }
                row_values v;
                if (x.embed.weight) {
                    embed_rows(v, c, (const float2 *)(c + (sequences * x.embed.length + 1) / 2 * 2), b, x, row0, count, rows);
                    keep_rows<false>(x.stream + row0 * D, v, count, rows);
                } else {
                    take_rows(v, u, D, count, rows);
                }
                normalise_rows(a, v, p + x.at.ln1_gamma, p + x.at.ln1_beta, x.xhat1 ? x.xhat1 + kept + row0 * D : NULL,
                               x.rstd1 + kept + row0, x.epsilon, count, rows);
            }
            __syncthreads();
#pragma unroll 1
            for (int group = 0; group < D / GROUP; group++) {
                float s[GT][4];
                int column[GT];
                clear(s);
#pragma unroll
                for (int t = 0; t < GT; t++) {
                    const int of = at.across * GT + t, part = of / (GROUP / 8);
                    column[t] = part * D + group * GROUP + of % (GROUP / 8) * 8;
                    const float2 bias = *(const float2 *)(p + x.at.b_qkv + column[t] + 2 * at.q);
                    s[t][0] = s[t][2] = bias.x;
                    s[t][1] = s[t][3] = bias.y;
                }
                multiply<D / 16, GT, D>(s, a, weights, at);
                put_rows<GT, QKV>(c, s, at);
                if (x.xhat1) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int row = at.down * 16 + i * 8 + at.g;
#pragma unroll
                        for (int t = 0; t < GT; t++) {
                            if (row < count) {
                                *(float2 *)(x.qkv + kept + (row0 + row) * QKV + column[t] + 2 * at.q) =
                                    make_float2(s[t][i * 2], s[t][i * 2 + 1]);
                            }
                        }
                    }
                }
                __syncthreads();
                attend<E>(b, c, x.xhat1 ? x.merged + kept + row0 * D + group * GROUP : NULL,
                          x.xhat1 ? x.logsum + kept + group * (GROUP / E) * x.rows + row0 : NULL, group, x, sequences, at);
                __syncthreads();
            }
            {
                float s[NT][4];
                clear(s);
                multiply<D / 16, NT, D>(s, b, weights, at);
                put_fragments<NT, D, false>(a, s, at);
            }
            __syncthreads();
            finish_rows(a, u, out, p + x.at.b_o, at_site(x.dropout, layer, 0), p + x.at.ln2_gamma, p + x.at.ln2_beta,
                        x.xhat1 ? x.xhat2 + kept + row0 * D : NULL, x.rstd2 + kept + row0, x.epsilon, row0, count, at);
            __syncthreads();
            float y[NT][4];
            clear(y);
#pragma unroll 1
            for (int chunk = 0; chunk < x.f; chunk += HIDDEN) {
                float s[HT][4];
                float *const h = chunk / HIDDEN % 2 ? c : b;
                clear(s);
                multiply<D / 16, HT, D>(s, a, weights, at);
                hidden_forward(h, s, p + x.at.b_1, x.xhat1 ? x.hidden + kept + row0 * x.f : NULL, x.f, chunk,
                               at_site(x.dropout, layer, 1), row0, count, at);
                __syncthreads();
                multiply<HIDDEN / 16, NT, HIDDEN>(y, h, weights, at);
            }
            put_fragments<NT, D, false>(a, y, at); /* which all have done with */
            __syncthreads();
            const bool more = layer + 1 < x.layers;
            const float *next = p + x.at.vector_stride;
            finish_rows(a, out, out, p + x.at.b_2, at_site(x.dropout, layer, 2), more ? next + x.at.ln1_gamma : NULL,
                        more ? next + x.at.ln1_beta : NULL, x.xhat1 && more ? x.xhat1 + kept + x.kept_layer + row0 * D : NULL,
                        x.rstd1 + kept + x.kept_layer + row0, x.epsilon, row0, count, at);
        }
    }
}

template <int E>
static __global__ void __launch_bounds__(THREADS, 1)
    backward(const __grid_constant__ struct floats x, const __grid_constant__ struct piece_list pieces)
{
    constexpr int NT = D / 8 / ACROSS;
    extern __shared__ float4 shared_memory[];
    float *const a = (float *)shared_memory, *const b = a + FLOATS_A, *const c = b + FLOATS_B, *const sums = c + FLOATS_C;
    float *const slots = sums + FLOATS_SUMS;
    const lane_place at;
    clear_beyond(b, c);
    const struct packed_places places = places_of(D, x.f);
    struct ring_shared *const shared = (struct ring_shared *)(slots + SLOTS * SLOT / 4);
    ring weights(slots, shared, pieces, x.packed + (x.layers - 1) * (int64_t)places.all, -places.all, x.layers,
                 (x.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
    ps_grid_begin();
    weights.begin();
    for (int64_t tile = blockIdx.x; tile < x.tiles; tile += gridDim.x) {
        const int64_t row0 = tile * x.tile_sequences * x.n;
        const int count = (int)(x.rows - row0 < x.tile_sequences * x.n ? x.rows - row0 : x.tile_sequences * x.n);
        const int sequences = count / x.n;
        float *const du = x.du + row0 * D;
        for (int layer = x.layers - 1; layer >= 0; layer--) {
            const int64_t kept = layer * x.kept_layer;
            const float *p = x.parameters + layer * x.at.vector_stride;
            if (layer == x.layers - 1) {
                gradient_rows(a, x.dy + row0 * D, du, NULL, NULL, NULL, at_site(x.dropout, layer, 2), x.masked_2 + kept + row0 * D,
                              row0, count, at);
            }
            __syncthreads();
            {
                float y[NT][4];
                clear(y);
#pragma unroll 1
                for (int chunk = 0; chunk < x.f; chunk += HIDDEN) {
                    float s[HT][4];
                    float *const h = chunk / HIDDEN % 2 ? c : b;
                    const hidden_values z(x.hidden + kept + row0 * x.f, x.f, chunk, count, at);
                    clear(s);
                    multiply<D / 16, HT, D>(s, a, weights, at);
                    hidden_backward(h, s, z, x.hidden + kept + row0 * x.f, x.d_hidden + kept + row0 * x.f, x.f, chunk,
                                    at_site(x.dropout, layer, 1), row0, count, at);
                    __syncthreads();
                    multiply<HIDDEN / 16, NT, HIDDEN>(y, h, weights, at);
                }
                put_fragments<NT, D, false>(a, y, at);
            }
            __syncthreads();
            gradient_rows(a, du, du, p + x.at.ln2_gamma, x.xhat2 + kept + row0 * D, x.rstd2 + kept + row0,
                          at_site(x.dropout, layer, 0), x.masked_o + kept + row0 * D, row0, count, at);
            __syncthreads();
            {
                float s[NT][4];
                clear(s);
                multiply<D / 16, NT, D>(s, a, weights, at);
                put_rows<NT, D>(b, s, at);
            }
#pragma unroll 1
            for (int group = 0; group < D / GROUP; group++) {
                constexpr int HEADS = GROUP / E;
                float *const qkv = x.qkv + kept + row0 * (3 * D) + group * GROUP;
                fetch_group(c, qkv, count);
                for (int i = (int)threadIdx.x; i < HEADS * ROWS; i += THREADS) {
                    const int row = i % ROWS;
                    sums[i] = row < count ? x.logsum[kept + (group * HEADS + i / ROWS) * x.rows + row0 + row] : 1e30f;
                }
                __syncthreads();
                attend_queries<E>(qkv, sums, c, b, group, x, sequences, at);
                __syncthreads();
                attend_keys<E>(qkv, sums, c, b, group, x, sequences, at);
                __syncthreads();
            }
            {
                const float *qkv = x.qkv + kept + row0 * (3 * D);
                const row_place rows(at);
                row_values v[3];
#pragma unroll
                for (int part = 0; part < 3; part++) {
                    take_rows(v[part], qkv + part * D, QKV, count, rows);
                }
#pragma unroll
                for (int part = 0; part < 3; part++) {
                    put_operands(part == 0 ? a : part == 1 ? b : c, v[part], count, rows);
                }
                __syncthreads();
                float s[NT][4];
                clear(s);
                multiply<D / 16, NT, D>(s, a, weights, at);
                multiply<D / 16, NT, D>(s, b, weights, at);
                multiply<D / 16, NT, D>(s, c, weights, at);
                __syncthreads();
                put_fragments<NT, D, false>(a, s, at);
            }
            __syncthreads();
            /* The embedding's gradient is that of u, masked in place. */
            const bool embeds = layer == 0 && x.embed.d_weight;
            gradient_rows(a, du, du, p + x.at.ln1_gamma, x.xhat1 + kept + row0 * D, x.rstd1 + kept + row0,
                          embeds ? x.embed.dropout : at_site(x.dropout, layer - 1, 2),
                          embeds      ? du
                          : layer > 0 ? x.masked_2 + kept - x.kept_layer + row0 * D
                                      : NULL,
                          row0, count, at);
        }
    }
}

/* ---- weights' gradients ---- */

/* Offsets, in floats, of a layer's sums: G of W_qkv [d, 3d], W_o [d, d], W_1 [d, f], W_2 [f, d]; column sums [3d], [d], [f], [d].
 */
struct sum_places {
    int w[4], b[4], all;
};

static __host__ __device__ __forceinline__ struct sum_places sums_of(int d, int f)
{
    struct sum_places p = {};
    p.w[1] = 3 * d * d;
    p.w[2] = p.w[1] + d * d;
    p.w[3] = p.w[2] + d * f;
    p.b[0] = p.w[3] + f * d;
    p.b[1] = p.b[0] + 3 * d;
    p.b[2] = p.b[1] + d;
    p.b[3] = p.b[2] + f;
    p.all = p.b[3] + d;
    return p;
}

struct float_sums {
    struct floats of;
    float *parts; /* [splits, split_floats]: the layers' sums, then the embedding's, [EDGE, d] and [d] */
    int64_t split_floats;
    float *gradients;
    int d, splits;
    int64_t split_rows; /* a multiple of DEEP */
};

enum { EDGE = 64, DEEP = 32, STAGES = 3, PRODUCT_THREADS = 128 };

/* Copies of DEEP rows of EDGE columns after another, a thread's 16 bytes of every 8th row. */
struct staging {
    const float *from;
    int64_t left; /* rows, less the thread's first */
    int ld;
    uint32_t to; /* in the first stage */

    __device__ __forceinline__ staging(const float *matrix, int ld_, int64_t rows, const float *stage) : ld(ld_)
    {
        const int row = (int)threadIdx.x / (EDGE / 4), column = (int)threadIdx.x % (EDGE / 4) * 4;
        from = matrix + (int64_t)row * ld + column;
        left = rows - row;
        to = ps_shared_address(stage + row * EDGE + (column ^ turn(row)));
    }
    /* The next ones; zeros beyond the last row. */
    __device__ __forceinline__ void copy(int stage)
    {
        constexpr int STEP = PRODUCT_THREADS / (EDGE / 4);
#pragma unroll
        for (int i = 0; i < DEEP / STEP; i++) {
            const bool here = i * STEP < left;
            ps_copy_async_part(to + (uint32_t)(stage * 2 * DEEP + i * STEP) * EDGE * 4, here ? from + i * STEP * ld : from,
                               here ? 16 : 0);
        }
        from += left > DEEP ? DEEP * ld : 0;
        left -= DEEP;
    }
};

/* The same of the embedding's left columns: the patch, then one in that of W_pos's row. A thread has a column of every other row.
 */
struct placing {
    enum { STEP = PRODUCT_THREADS / EDGE };
    const float *from;
    int64_t left;
    float *to;
    int patch, n, position; /* N; the row's patch, less the column's */
    bool copies;

    __device__ __forceinline__ placing(const struct floats &x, int64_t first, int64_t rows, float *stage)
    {
        const int column = (int)threadIdx.x % EDGE, row = (int)threadIdx.x / EDGE;
        patch = x.embed.patch;
        n = x.n;
        copies = column < patch;
        from = x.embed.patches + (first + row) * patch + column;
        left = rows - row;
        to = stage + row * EDGE + (column ^ turn(row)); /* turned otherwise from row to row: see copy */
        position = (int)((first + row) % n) + patch - column;
    }
    __device__ __forceinline__ void copy(int stage)
    {
        const int column = (int)threadIdx.x % EDGE, row = (int)threadIdx.x / EDGE;
        float *const at = to - (column ^ turn(row)) + stage * 2 * DEEP * EDGE;
#pragma unroll
        for (int i = 0; i < DEEP / STEP; i++) {
            const bool here = i * STEP < left;
            float *const p = at + i * STEP * EDGE + (column ^ turn(row + i * STEP));
            if (copies) {
                ps_copy_async4_if(p, here ? from + i * STEP * patch : from, here);
            } else {
                *p = here && position == 0 ? 1.0f : 0.0f;
            }
            position += STEP;
            position -= position >= patch + n - column ? n : 0;
            position -= position >= patch + n - column ? n : 0; /* N 1 */
        }
        from += left > DEEP ? DEEP * patch : 0;
        left -= DEEP;
    }
};

/* A tile of 64 x 64 of a layer's G over a split of the rows (blockIdx.y), by four warps of 32 x 32; tiles in the first column of
 * tiles of rows sum up the columns of dy too. */
static __global__ void __launch_bounds__(PRODUCT_THREADS, 4) products(const __grid_constant__ struct float_sums x)
{
    ps_grid_begin();
    __shared__ __align__(16) float stages[STAGES][2][DEEP * EDGE];
    const struct floats &o = x.of;
    const int d = x.d, f = o.f, wide = d / EDGE, deep = f / EDGE;
    const int per_layer = 4 * wide * wide + 2 * wide * deep, layer = (int)blockIdx.x / per_layer;
    int i = (int)blockIdx.x % per_layer;
    const bool embedding = layer == o.layers;
    const int which = embedding ? 4 : i < 3 * wide * wide ? 0 : i < 4 * wide * wide ? 1 : i < 4 * wide * wide + wide * deep ? 2 : 3;
    i -= which == 0 || embedding ? 0 : which == 1 ? 3 * wide * wide : which == 2 ? 4 * wide * wide : 4 * wide * wide + wide * deep;
    const int m = embedding ? EDGE : which == 3 ? f : d, n = which == 0 ? 3 * d : which == 2 ? f : d;
    const int tiles_n = n / EDGE, row = i / tiles_n * EDGE, column = i % tiles_n * EDGE;
    const int64_t kept = embedding ? 0 : layer * o.kept_layer, begin = (int64_t)blockIdx.y * x.split_rows;
    const int64_t rows = o.rows - begin < x.split_rows ? o.rows - begin : x.split_rows;
    const float *const l_all = which == 0 ? o.xhat1 : which == 1 ? o.merged : which == 2 ? o.xhat2 : o.hidden;
    const float *const r_all = embedding    ? o.du
                               : which == 0 ? o.qkv
                               : which == 1 ? o.masked_o
                               : which == 2 ? o.d_hidden
                                            : o.masked_2;
    placing positions(o, begin, rows, stages[0][0]);
    staging left(l_all + kept + begin * m + row, m, rows, stages[0][0]),
        right(r_all + kept + begin * n + column, n, rows, stages[0][1]);
    const int steps = rows <= 0 ? 0 : (int)((rows + DEEP - 1) / DEEP);
    const lane_place at;
    const int down = at.warp / 2 * 32, across = at.warp % 2 * 32;
    const bool sums = row == 0 && down == 0;
    /* The lane's four columns: of a rows g and g + 8 of two tiles of 16, of b one of four tiles of 8. */
    const int even = 2 * at.q * EDGE, moved = turn(2 * at.q), odd = even + EDGE, moved_odd = turn(2 * at.q + 1);
    float c[2][4][4], column_sum[4] = {0, 0, 0, 0};
    clear(c[0]);
    clear(c[1]);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) {
            embedding ? positions.copy(s) : left.copy(s);
            right.copy(s);
        }
        ps_copy_commit();
    }
    int now = 0; /* the stage */
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        ps_copy_wait_group<STAGES - 2>();
        __syncthreads();
        if (s + STAGES - 1 < steps) {
            const int ahead = now == 0 ? STAGES - 1 : now - 1;
            embedding ? positions.copy(ahead) : left.copy(ahead);
            right.copy(ahead);
        }
        ps_copy_commit();
        const float *const l = stages[now][0], *const r = stages[now][1];
        now = now + 1 == STAGES ? 0 : now + 1;
#pragma unroll
        for (int k = 0; k < DEEP; k += 8) {
            float a[2][4], b[2][4];
            ps_load<4>(a[0], l + k * EDGE + even + ((down + 4 * at.g) ^ moved));
            ps_load<4>(a[1], l + k * EDGE + odd + ((down + 4 * at.g) ^ moved_odd));
            ps_load<4>(b[0], r + k * EDGE + even + ((across + 4 * at.g) ^ moved));
            ps_load<4>(b[1], r + k * EDGE + odd + ((across + 4 * at.g) ^ moved_odd));
            if (sums) {
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    column_sum[t] += b[0][t] + b[1][t];
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float both[4] = {a[0][2 * h], a[0][2 * h + 1], a[1][2 * h], a[1][2 * h + 1]};
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    multiply_add(c[h][t], both, b[0][t], b[1][t]);
                }
            }
        }
    }
    const struct sum_places places = sums_of(d, f);
    float *const to = x.parts + blockIdx.y * x.split_floats + (int64_t)layer * places.all;
    const int w_at = embedding ? 0 : places.w[which], b_at = embedding ? EDGE * d : places.b[which];
#pragma unroll
    for (int h = 0; h < 4; h++) {
        float *const out = to + w_at + (row + down + 4 * at.g + h) * n + column + across + 8 * at.q;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                v[t] = c[h / 2][t][h % 2 * 2 + i];
            }
            ps_store<4>(out + 4 * i, v);
        }
    }
    if (sums) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            column_sum[t] = ps_group_sum<4>(column_sum[t]);
        }
        if (at.q == 0) {
            ps_store<4>(to + b_at + column + across + 4 * at.g, column_sum);
        }
    }
}

/* The sum of from[0], from[step], .., `count` of them, in that order; many are on their way at once. */
template <typename V> static __device__ __forceinline__ V sum_parts(const V *from, int64_t step, int count)
{
    constexpr int FLIGHT = 10;
    V sum = V();
    for (int begin = 0; begin < count; begin += FLIGHT) {
        V v[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            v[i] = begin + i < count ? __ldcg(from + (begin + i) * step) : V();
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            if constexpr (sizeof(V) == sizeof(float)) {
                sum += v[i];
            } else {
                sum.x += v[i].x;
                sum.y += v[i].y;
            }
        }
    }
    return sum;
}

enum { SUM_THREADS = 256, SUM_ROWS = 2, SUM_WARPS = SUM_THREADS / 32 / SUM_ROWS /* a row's */ };

/* Rows `row` .. + SUM_ROWS - 1 of the embedding's, of P + N and b_P's. */
static __device__ __forceinline__ void sum_embedding(const struct float_sums &x, int row, const float *parts)
{
    const struct float_embedding &e = x.of.embed;
    for (int i = (int)threadIdx.x; i < SUM_ROWS * x.d; i += SUM_THREADS) {
        const int r = row + i / x.d, column = i % x.d;
        if (r <= e.patch + x.of.n) {
            const bool bias = r == e.patch + x.of.n;
            float *const to = bias ? e.d_bias : r < e.patch ? e.d_weight + r * x.d : e.d_position + (r - e.patch) * x.d;
            to[column] += sum_parts(parts + (bias ? EDGE : r) * x.d + column, x.split_floats, x.splits);
        }
    }
}

/* gradients += the sums of the splits' parts, in their order, LayerNorm's share included (the file's head); a warp a row of a
 * weight. HALF: of W_qkv and W_1 alone, the others have theirs. 4 bytes a part read. */
template <bool HALF> static __global__ void __launch_bounds__(SUM_THREADS, 4) sum_up(const __grid_constant__ struct float_sums x)
{
    ps_grid_begin();
    __shared__ float sums[MOST_HIDDEN];
    __shared__ float2 vectors[SUM_ROWS][SUM_WARPS];
    const struct floats &o = x.of;
    const int d = x.d, f = o.f, layer = (int)blockIdx.y;
    const struct sum_places places = sums_of(d, f);
    int row = (int)blockIdx.x * SUM_ROWS, which;
    if (HALF) {
        which = row >= d ? 2 : 0;
        row -= row >= d ? d : 0;
    } else {
        which = row >= 3 * d ? 3 : row / d;
        row -= layer == o.layers ? 0 : which * d;
    }
    const int n = which == 0 ? 3 * d : which == 2 ? f : d;
    const float *const parts = x.parts + (int64_t)layer * places.all;
    const int64_t split = x.split_floats;
    if (layer == o.layers) {
        sum_embedding(x, row, parts);
        return;
    }
    const bool normalised = which % 2 == 0;
    const struct ps_encoder_layout &at = o.at;
    const int64_t matrix = layer * at.matrix_stride, vector = layer * at.vector_stride;
    const int64_t weights[4] = {at.w_qkv, at.w_o, at.w_1, at.w_2}, biases[4] = {at.b_qkv, at.b_o, at.b_1, at.b_2};
    if (normalised || row == 0) {
        for (int i = (int)threadIdx.x; i < n; i += SUM_THREADS) {
            const float sum = sum_parts(parts + places.b[which] + i, split, x.splits);
            sums[i] = sum;
            if (row == 0) {
                x.gradients[vector + biases[which] + i] += sum;
            }
        }
    }
    __syncthreads();
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    row += warp / SUM_WARPS;
    const float *const part = parts + places.w[which] + row * n;
    float *const to = x.gradients + matrix + weights[which] + (int64_t)row * n;
    const float *const w = o.parameters + matrix + weights[which] + (int64_t)row * n;
    const int64_t gamma = vector + (which == 0 ? at.ln1_gamma : at.ln2_gamma) + row,
                  beta = vector + (which == 0 ? at.ln1_beta : at.ln2_beta) + row;
    const float scale = normalised ? o.parameters[gamma] : 1.0f, shift = normalised ? o.parameters[beta] : 0.0f;
    float d_gamma = 0, d_beta = 0;
    for (int i = (warp % SUM_WARPS * 32 + lane) * 2; i < n; i += SUM_WARPS * 64) {
        float2 g = sum_parts((const float2 *)(part + i), split / 2, x.splits);
        float2 *const p = (float2 *)(to + i), old = *p;
        if (normalised) {
            const float2 v = *(const float2 *)(w + i), s = *(const float2 *)(sums + i);
            d_gamma += v.x * g.x + v.y * g.y;
            d_beta += v.x * s.x + v.y * s.y;
            g = make_float2(fmaf(scale, g.x, shift * s.x), fmaf(scale, g.y, shift * s.y));
        }
        *p = make_float2(old.x + g.x, old.y + g.y);
    }
    if (normalised) {
        d_gamma = ps_group_sum<32>(d_gamma);
        d_beta = ps_group_sum<32>(d_beta);
        if (lane == 0) {
            vectors[warp / SUM_WARPS][warp % SUM_WARPS] = make_float2(d_gamma, d_beta);
        }
        __syncthreads();
        if (lane == 0 && warp % SUM_WARPS == 0) {
            float2 sum = vectors[warp / SUM_WARPS][0];
            for (int i = 1; i < SUM_WARPS; i++) {
                sum.x += vectors[warp / SUM_WARPS][i].x;
                sum.y += vectors[warp / SUM_WARPS][i].y;
            }
            x.gradients[gamma] += sum.x;
            x.gradients[beta] += sum.y;
        }
    }
}

/* ---- launches ---- */

typedef void kernel(const struct floats, const struct piece_list);

struct kernels_of {
    kernel *forward, *backward;
};

/* NULL: not served. */
static struct kernels_of kernels_for(int64_t d, int64_t heads)
{
    switch (d == D && heads > 0 && d % heads == 0 ? d / heads : 0) {
    case 8:
        return {forward<8>, backward<8>};
    case 16:
        return {forward<16>, backward<16>};
    case 32:
        return {forward<32>, backward<32>};
    default:
        return {};
    }
}

static enum ps_status supported(const struct ps_encoder_small *e)
{
    if (!kernels_for(e->d_model, e->n_heads).forward || e->patches < 1 || e->patches > 64 || e->d_ff < HIDDEN ||
        e->d_ff > MOST_HIDDEN || e->d_ff % HIDDEN != 0) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda): d_model %lld with %lld heads, d_ff %lld and %lld patches: level layer in %s has d_model 64 with "
            "heads of 8, 16 or 32, d_ff 128, 256, 384 or 512, up to 64 patches",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, exact ? "fp32" : "tf32");
    }
    return PS_OK;
}

/* Floats of a layer in what is kept. */
static int64_t kept_floats(const struct ps_encoder_small *e)
{
    return padded_rows(e) * (8 * e->d_model + 2 * e->d_ff + e->n_heads + 2);
}

/* Of the rows, for weights' gradients; the workspace is of the most. */
static int splits_of(const struct ps_encoder_small *e, int multiprocessors)
{
    const int64_t d = e->d_model / EDGE, f = e->d_ff / EDGE, tiles = e->layers * (4 * d * d + 2 * d * f);
    return (int)(4 * multiprocessors > tiles ? 4 * multiprocessors / tiles : 1);
}

/* Whether weights' gradients are the products of level gemm's table, one by one: of many rows. */
static bool by_table(const struct ps_encoder_small *e)
{
    return e->sequences * e->patches >= 32768;
}

static size_t packed_bytes(const struct ps_encoder_small *e)
{
    return (size_t)e->layers * (size_t)places_of(D, (int)e->d_ff).all * sizeof(uint4);
}

/* Floats of all sums of a split. */
static int64_t split_floats(const struct ps_encoder_small *e)
{
    return ps_encoder_float_parts(e) + (EDGE + 1) * e->d_model;
}

static enum ps_status float_plan(const struct ps_kernels *k, const struct ps_encoder_small *e, struct ps_encoder_plan *plan)
{
    PS_TRY(supported(e));
    const int turns = exact ? 1 : 3; /* measured at seed28k, and at weather with d 64 */
    plan->kernels = "streamed/float";
    plan->kept_bytes = (size_t)(kept_floats(e) * e->layers) * sizeof(float);
    plan->slower = e->sequences > turns * (ROWS / e->patches) * ps_cuda(k)->multiprocessors;
    return PS_OK;
}

static enum ps_encoder_span float_span(const struct ps_kernels *, const struct ps_encoder_small *e, const struct ps_encoder_plan *)
{
    const int64_t most = ROWS / e->patches;
    return !by_table(e) && e->patch_len >= 1 && e->patch_len + e->patches <= EDGE && e->patch_len * D <= ROWS * HIDDEN &&
                   most * (e->seq_len + 2) + 2 <= ROWS * HIDDEN
               ? PS_SPAN_EMBEDDING
               : PS_SPAN_LAYERS;
}

static size_t float_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_small *e, const struct ps_encoder_plan *)
{
    return packed_bytes(e) + (size_t)split_floats(e) * (size_t)splits_of(e, ps_cuda(k)->multiprocessors) * sizeof(float);
}

static struct floats floats_of(const struct ps_encoder_small *e, int blocks)
{
    struct floats x = {};
    x.rows = e->sequences * e->patches;
    x.n = (int)e->patches;
    /* As many sequences as fill the device evenly. */
    const int64_t most = ROWS / e->patches, turns = (e->sequences + most * blocks - 1) / (most * blocks);
    x.tile_sequences = (int)((e->sequences + turns * blocks - 1) / (turns * blocks));
    x.tiles = (e->sequences + x.tile_sequences - 1) / x.tile_sequences;
    x.heads = (int)e->n_heads;
    x.f = (int)e->d_ff;
    x.layers = (int)e->layers;
    x.epsilon = (float)e->epsilon;
    x.scale = (float)(1 / sqrt((double)e->d_model / (double)e->n_heads));
    x.scale_log2e = x.scale * PS_LOG2_E;
    x.parameters = e->parameters;
    x.at = e->offsets;
    x.packed = (const uint4 *)e->workspace;
    x.stream = (float *)e->u;
    x.dropout = e->dropout;
    if (e->kept) {
        const int64_t R = padded_rows(e), d = e->d_model;
        x.xhat1 = (float *)e->kept;
        x.qkv = x.xhat1 + R * d;
        x.merged = x.qkv + R * 3 * d;
        x.xhat2 = x.merged + R * d;
        x.hidden = x.xhat2 + R * d;
        x.d_hidden = x.hidden + R * x.f;
        x.masked_o = x.d_hidden + R * x.f;
        x.masked_2 = x.masked_o + R * d;
        x.logsum = x.masked_2 + R * d;
        x.rstd1 = x.logsum + R * x.heads;
        x.rstd2 = x.rstd1 + R;
        x.kept_layer = kept_floats(e);
    }
    x.dy = (const float *)e->dy;
    x.du = (float *)e->du;
    if (e->embed) {
        const struct ps_embed_forward *a = e->embed;
        x.embed.weight = (const float *)a->weight.data;
        x.embed.bias = (const float *)a->bias.data;
        x.embed.position = (const float *)a->position.data;
        x.embed.patches = (float *)a->patches.data;
        x.embed.mean = (float *)a->mean.data;
        x.embed.std = (float *)a->std.data;
        x.embed.windows = ps_windows_of(&a->inputs, &a->indices);
        x.embed.state = a->state;
        x.embed.length = (int)e->seq_len;
        x.embed.patch = (int)e->patch_len;
        x.embed.stride = (int)a->stride;
        x.embed.revin = a->revin;
        x.embed.epsilon = (float)a->epsilon;
        x.embed.by_channels = ps_divisor_make(a->inputs.size[1]);
        x.embed.dropout = a->dropout;
    }
    if (e->embed_gradient) {
        const struct ps_embed_backward *a = e->embed_gradient;
        x.embed.patches = (float *)a->patches.data;
        x.embed.patch = (int)e->patch_len;
        x.embed.dropout = a->dropout;
        x.embed.d_weight = (float *)a->d_weight.data;
        x.embed.d_bias = (float *)a->d_bias.data;
        x.embed.d_position = (float *)a->d_position.data;
    }
    return x;
}

static dim3 blocks_of(const struct ps_cuda_context *c, const struct floats &x)
{
    return dim3((unsigned)(x.tiles < c->multiprocessors ? x.tiles : c->multiprocessors));
}

static enum ps_status float_forward(const struct ps_kernels *k, const struct ps_encoder_small *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const struct kernels_of kernels = kernels_for(e->d_model, e->n_heads);
    const struct floats x = floats_of(e, c->multiprocessors);
    const struct packed_places places = places_of(D, x.f);
    const int count = e->kept ? places.all : places.w_2t;
    PS_TRY(launch(c, pack, dim3((unsigned)(count + 255) / 256, (unsigned)x.layers), 256, 0, "encoder_forward",
                  (uint4 *)e->workspace, (const float *)e->weights, e->offsets, (int)D, x.f, (int)GROUP, count));
    return launch(c, kernels.forward, blocks_of(c, x), THREADS, shared_bytes(false), "encoder_forward", x, list_pieces(x.f, false));
}

int64_t ps_encoder_float_parts(const struct ps_encoder_small *e)
{
    return e->layers * sums_of((int)e->d_model, (int)e->d_ff).all;
}

void ps_encoder_float_part(const struct ps_encoder_small *e, int layer, int which, float *parts, float **products, float **sums)
{
    const struct sum_places places = sums_of((int)e->d_model, (int)e->d_ff);
    parts += (int64_t)layer * places.all;
    *products = parts + places.w[which];
    *sums = parts + places.b[which];
}

static struct float_sums adding(const struct ps_encoder_small *e, const float *parts, int splits)
{
    struct float_sums x = {};
    x.of.f = (int)e->d_ff;
    x.of.layers = (int)e->layers;
    x.of.parameters = e->parameters;
    x.of.at = e->offsets;
    x.parts = (float *)parts;
    x.split_floats = ps_encoder_float_parts(e);
    x.gradients = e->gradients;
    x.d = (int)e->d_model;
    x.splits = splits;
    return x;
}

enum ps_status ps_encoder_float_add(const struct ps_kernels *k, const struct ps_encoder_small *e, const float *parts, int splits)
{
    const struct float_sums x = adding(e, parts, splits);
    return launch(ps_cuda(k), sum_up<false>, dim3((3 * (unsigned)x.d + (unsigned)x.of.f) / SUM_ROWS, (unsigned)x.of.layers),
                  SUM_THREADS, 0, "encoder_backward", x);
}

/* Weights' gradients of many rows by the table's products: W_o's and W_2's to the gradients (+=), the others' to parts, and from
 * there with LayerNorm's to the gradients. */
static enum ps_status by_products(const struct ps_kernels *k, const struct ps_encoder_small *e, const struct floats &o,
                                  float *parts)
{
    const struct ps_encoder_layout &at = e->offsets;
    const int64_t d = e->d_model, f = e->d_ff, R = e->sequences * e->patches;
    PS_TRY(ps_cuda_check(cudaMemsetAsync(parts, 0, (size_t)ps_encoder_float_parts(e) * sizeof(float), ps_cuda(k)->stream),
                         "encoder_backward"));
    for (int layer = 0; layer < o.layers; layer++) {
        const int64_t kept = layer * o.kept_layer;
        const float *const left[4] = {o.xhat1 + kept, o.merged + kept, o.xhat2 + kept, o.hidden + kept};
        const float *const right[4] = {o.qkv + kept, o.masked_o + kept, o.d_hidden + kept, o.masked_2 + kept};
        float *const matrix = e->gradients + layer * at.matrix_stride, *const vector = e->gradients + layer * at.vector_stride;
        for (int i = 0; i < 4; i++) {
            const int64_t m = i == 3 ? f : d, n = i == 0 ? 3 * d : i == 2 ? f : d;
            float *dw = matrix + (i == 1 ? at.w_o : at.w_2), *db = vector + (i == 1 ? at.b_o : at.b_2);
            if (i % 2 == 0) {
                ps_encoder_float_part(e, layer, i, parts, &dw, &db);
            }
            const struct ps_gemm_gradient g = {ps_tensor_2d(dw, PS_F32, m, n), ps_tensor_1d(db, PS_F32, n),
                                               ps_tensor_2d((void *)left[i], PS_F32, R, m),
                                               ps_tensor_2d((void *)right[i], PS_F32, R, n)};
            PS_TRY(ps_cuda_gemm_gradient(k, &g));
        }
    }
    const struct float_sums x = adding(e, parts, 1);
    return launch(ps_cuda(k), sum_up<true>, dim3(2 * (unsigned)x.d / SUM_ROWS, (unsigned)e->layers), SUM_THREADS, 0,
                  "encoder_backward", x);
}

static enum ps_status float_backward(const struct ps_kernels *k, const struct ps_encoder_small *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const struct kernels_of kernels = kernels_for(e->d_model, e->n_heads);
    struct float_sums x = {};
    x.of = floats_of(e, c->multiprocessors);
    x.parts = (float *)((char *)e->workspace + packed_bytes(e));
    x.gradients = e->gradients;
    x.d = (int)e->d_model;
    x.split_floats = split_floats(e);
    const char *name = "encoder_backward";
    PS_TRY(launch(c, kernels.backward, blocks_of(c, x.of), THREADS, shared_bytes(true), name, x.of, list_pieces(x.of.f, true)));
    const unsigned d = (unsigned)x.d, f = (unsigned)x.of.f, layers = (unsigned)x.of.layers;
    if (by_table(e)) {
        return by_products(k, e, x.of, x.parts);
    }
    const int splits = splits_of(e, c->multiprocessors);
    x.split_rows = ((x.of.rows + splits - 1) / splits + DEEP - 1) / DEEP * DEEP;
    x.splits = (int)((x.of.rows + x.split_rows - 1) / x.split_rows);
    const unsigned embeds = e->embed_gradient ? 1 : 0; /* one layer more */
    const unsigned tiles = d / EDGE * (4 * d / EDGE + 2 * f / EDGE) * layers + embeds * (d / EDGE);
    PS_TRY(launch(c, products, dim3(tiles, (unsigned)x.splits), PRODUCT_THREADS, 0, name, x));
    return launch(c, sum_up<false>, dim3((3 * d + f) / SUM_ROWS, layers + embeds), SUM_THREADS, 0, name, x);
}

const struct ps_encoder_family ps_encoder_streamed = {float_plan, float_span, float_workspace_bytes, float_forward, float_backward};

} // namespace PS_REAL16_SPACE
