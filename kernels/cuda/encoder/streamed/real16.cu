/* One encoder layer, forward and backward, for d_model up to 128: operands of 16 bits (tile/types.cuh) on tensor cores, fp32 sums,
 * softmax and LayerNorm.
 *
 * Why: at level gemm a layer's activations cross device memory about 40 times. Here a block of 512 threads owns the 128 rows of
 * G = 128/N whole sequences; they stay in shared memory and registers from LN1 to the residual out. The rows are two halves of
 * 64, each of two warpgroups (sides) that share its products: by columns, or, between the two products of the feed-forward part, by
 * depth, so that a hidden layer's operand stays in registers. The other left operands are in shared memory in the panels that wgmma
 * reads, q, k and v too, of which a warp takes one (sequence, head) at a time. The layer's weights (2 (4 d^2 + 2 d f) bytes: 256 KB
 * at d 128, f 256) are more than an SM holds, so the copy engine streams them from L2 in chunks of 16 KB, five slots of them, each
 * used by all 128 rows; the warp that is the last to release a slot asks for its next chunk.
 *
 * Counts, weather (d 128, h 16, f 256, N 42, R 112,896 rows, 896 tiles of 126 rows, 6.8 a block of 132), a layer; at 1.8 GHz:
 *
 * forward: device memory 512 B a row read and 580 written (58 + 65 MB, 29 us at 4.3 TB/s); weights from L2 256 KB a tile (235 MB,
 * 43 us at 5.5 TB/s, beside the arithmetic); 262 kFLOP a row in the products (8.2 k clocks a tile at wgmma's 4,096 FLOP a clock)
 * and 24 k in attention; exponentials 16 heads x 42 x 48 a sequence and 256 tanh a row (8 k clocks a tile at 16 a clock); Philox 64
 * blocks a row. All in all 95 k instructions of a warp a tile, 24 k clocks at one a clock of each scheduler: 90 us at best; it
 * issues in half of the clocks.
 *
 * backward: keeps r, each query's softmax sum and dropout's bits from the forward pass (256 + 4 h + (f + 2 d) / 8 bytes a row, once
 * written and once read: 21 us), which saves the first of two rounds of exponentials, W_o's product and A v before the
 * feed-forward part, the maxima, sums and divisions of the second round, and Philox. 426 kFLOP a row in products (13 k clocks a
 * tile) and 60 k in attention. Weights from L2: 26 chunks, 416 KB a tile. 136 k instructions of a warp a tile: 128 us at best; it
 * issues in 0.4 of the clocks. Its code has to be small: straight-line code of 222 KB was fetched from L2 for every tile (an SM
 * caches 128 KB) at 15 clocks an instruction of a warp. So have its registers: a spilled one is read back from L2, for shared
 * memory leaves no L1 to speak of.
 *
 * weights' gradients: dW needs 262 kFLOP a row and 512 KB of fp32 sums a layer. On chip it would take a cluster of four SMs, each
 * with half its registers given to sums, and every operand sent to all four. Instead backward writes the operands once in 16 bits
 * (a, dqkv, merged, dr, ln2_out, d_hidden, hidden, dy masked: 3 KB a row, 352 MB with the empty rows), as panels, a chunk of a
 * layer's tiles a launch, and the last blocks of a launch (21 of 132) form the products and bias gradients of the chunk before: so
 * device memory, which they would wait for if all multiprocessors did that at once (82 us for 352 MB at 4.3 TB/s), is read beside
 * backward's arithmetic. A job's 64 rows are 1,024 clocks of wgmma, in which shared memory brings 96 KB to it and takes 48 to
 * 64 KB from L2; such a block takes 1,160 clocks alone, and beside backward, waiting for operands, 1,420 (1,850 in the job of 64).
 * Launches follow one another without a wait, since a chunk needs what the last launch but one wrote or an older one; operands and
 * scratch have three and two places for that. The last chunk of all is left for a launch of its own (117 MB). Operands are more
 * than L2 holds by the time they are read, so they pass it by (evict_first), and what a block parks for half a tile is held there
 * (evict_last): 30 us of a weather step.
 *
 * Dropout's bits are drawn in forward. Sums over rows are taken in a fixed order: the only atomic additions are of one thread. */
#include "kernels/cuda/encoder/streamed/real16.cuh"

#include "kernels/cuda/encoder/streamed/device.cuh"

namespace PS_REAL16_SPACE
{

enum {
    D = 128,    /* d_model, padded with zeros */
    ROWS = 128, /* of a tile */
    WARPS = 16,
    THREADS = 32 * WARPS,
    CHUNK = 64, /* columns or rows of a weight staged at once */
    STAGES = 5,
    STAGE_BYTES = CHUNK * D * 2,
    PANEL_BYTES = 64 * 64 * 2,
    WARP_ROWS = ROWS / WARPS, /* that a warp has between the products */
    MAX_F = 512,
    /* a half's panels: operands of the products, and sums of products in fp32 over four of them. v, k and q are made in this order,
     * so that LN1's output can lie where q will */
    Q_PANEL = 0,
    K_PANEL = 2,
    V_PANEL = 4,
    HEADS_PANEL = 6, /* A v, and its gradient */
    HALF_PANELS = 8,
    HALF_BYTES = HALF_PANELS * PANEL_BYTES,
    /* fp32 vectors in shared memory, zero beyond d or f */
    LN1_GAMMA = 0,
    LN1_BETA = LN1_GAMMA + D,
    B_QKV = LN1_BETA + D,
    B_O = B_QKV + 3 * D,
    LN2_GAMMA = B_O + D,
    LN2_BETA = LN2_GAMMA + D,
    B_2 = LN2_BETA + D,
    B_1 = B_2 + D,
    VECTORS = B_1 + MAX_F,
    /* column sums that a backward block keeps: dgamma and dbeta of both LayerNorms */
    NORM_SUMS = 4 * D,
    ASIDE_BYTES = 16 * WARPS,     /* where rows that do not exist are stored, 16 bytes a warp */
    MAX_SOFTMAX = ROWS * (D / 8), /* statistics of a tile: rows times heads */
    FORWARD_BYTES = STAGES * STAGE_BYTES + 2 * HALF_BYTES + VECTORS * 4 + ASIDE_BYTES,
    BACKWARD_BYTES = FORWARD_BYTES + ROWS * 8 + MAX_SOFTMAX * 4, /* the mean and 1/deviation of each row, and softmax's sums */
};

/* The operands of the weights' gradients, as the tensor cores and the copy engine take them: each tile's 128 rows in two halves of
 * 64, a half in panels of 64 columns, a panel as in shared memory. In the rows without a sequence the right operands (dqkv, dr,
 * d_hidden, dy) are zero and the left ones finite. Panels: dqkv 6 (2 each for q, k and v), hidden and d_hidden f/64, the rest 2. */
struct operands {
    real16 *a, *dqkv, *merged, *dr, *ln2, *d_hidden, *hidden, *dy;
};

/* What dropout keeps, a bit an element, the first in the lowest. hidden: words of a row, [rows][2 f/64]; the others by threads, in
 * whose rows (see below) they are: [tiles][THREADS], the first pass's 16 in the lower half. */
struct kept {
    uint32_t *hidden, *attention, *output;
};

enum weight { WEIGHT_QKV, WEIGHT_O, WEIGHT_1, WEIGHT_2, WEIGHTS };

struct arguments {
    CUtensorMap weights[WEIGHTS];  /* boxes of 64 x 64 of them for the copy engine */
    int sequences, N, d, heads, f; /* sequences of this launch */
    int blocks;                    /* that have tiles: all but, in backward, those of weights' gradients */
    int group;                     /* sequences of a tile */
    int64_t first;                 /* the launch's first row */
    int first_tile;
    float epsilon, scale, per; /* scale: 1/sqrt(e); per: 1/d */
    struct ps_dropout attention, hidden, output;
    const real16 *u;
    struct ps_encoder_large_vectors vectors;
    real16 *r, *y;    /* forward's outputs; backward reads r and softmax */
    float *softmax;   /* [S][h][N]: log2 of each query's sum of exponentials */
    struct kept kept; /* forward writes it */
    const real16 *dy;
    real16 *du;
    struct operands operands;
    float *parked;    /* [blocks][ROWS * D]: dr while attention runs */
    float *warp_sums; /* [blocks][WARPS][NORM_SUMS] */
    float *norm_sums; /* [blocks][NORM_SUMS] */
    bool first_norms; /* warp_sums begin here, */
    bool last_norms;  /* and are added up here, */
    int norm_blocks;  /* or, in blocks from this one on, which later launches do not have, always */
    bool wait;        /* u, or dy, is from the kernel before */
};

/* ---- who owns what. A tile's rows are two halves of 64, each of two warpgroups (sides), which share its products by columns or
 * by depth. In a product lane 4 g + t of the side's warp w owns rows 16 w + g and 16 w + g + 8 of the half, and of every 8 columns
 * 2 t and 2 t + 1. ---- */

static __device__ __forceinline__ int lane_id()
{
    return threadIdx.x % 32;
}

static __device__ __forceinline__ int warp_id()
{
    return threadIdx.x / 32;
}

/* The same, known to be one for all lanes: what products' operands are made of. */
static __device__ __forceinline__ int uniform_warp_id()
{
    return __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
}

static __device__ __forceinline__ int half_id()
{
    return threadIdx.x / (THREADS / 2);
}

static __device__ __forceinline__ int side_id()
{
    return threadIdx.x / 128 % 2;
}

/* The warp's first row in a product, of its half; lane_id() / 4 further is the lane's first. */
static __device__ __forceinline__ int product_row()
{
    return 16 * (warp_id() % 4);
}

/* Local row, of the tile, of the lane's first or second row. */
static __device__ __forceinline__ int own_row(int second)
{
    return 64 * half_id() + product_row() + lane_id() / 4 + 8 * second;
}

/* The first of the rows of the half that the warp has between products: the two sides share those of a product. */
static __device__ __forceinline__ int first_row()
{
    return product_row() + WARP_ROWS * side_id();
}

/* Barrier of a half's threads. */
static __device__ __forceinline__ void half_sync()
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + half_id()), "n"(THREADS / 2) : "memory");
}

/* The thread that asks the copy engine to store the half's operands. warp: uniform. */
static __device__ __forceinline__ bool half_leader(int warp)
{
    return warp % (WARPS / 2) == 0 && ps_elect();
}

/* Before a barrier after which the half's panels are written again: its stores have read them. */
static __device__ __forceinline__ void half_stores_wait(int warp)
{
    if (half_leader(warp)) {
        ps_bulk_wait_read();
    }
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* ---- left operands: fragment[k][4] holds columns 16 k .. 16 k + 15 of the warp's rows as mma takes them; group n of 8 columns of
 * row half h is fragment[n / 2][2 (n % 2) + h] ---- */

/* Row `row` of the tile, columns 8 unit .. 8 unit + 7 of a panel. */
static __device__ __forceinline__ uint4 *operand_at(real16 *operand, int panels, int tile, int row, int panel, int unit)
{
    const int64_t place = ((int64_t)(2 * tile + row / 64) * panels + panel) * 64 + row % 64;
    return (uint4 *)(operand + place * 64) + (unit ^ (row % 8));
}

/* Columns of the hidden layer stand in panels as lanes have them, so that no lane has to exchange any: of each 32 columns,
 * 8 t + 2 c + i is the place of 8 c + 2 t + i (and the other way round). */
static __device__ __forceinline__ int hidden_column(int place)
{
    return (place & ~31) + 8 * (place % 8 / 2) + 2 * (place % 32 / 8) + place % 2;
}

/* The side's 32 columns of the hidden layer, to a panel. */
static __device__ __forceinline__ void fragment_store(const uint32_t (&fragment)[2][4], real16 *operand, int panels, int tile,
                                                      int panel)
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = fragment[i / 2][2 * (i % 2) + half];
        }
        ps_store_once(operand_at(operand, panels, tile, own_row(half), panel, 4 * side_id() + t),
                      make_uint4(words[0], words[1], words[2], words[3]));
    }
}

/* From sums: x[n][2 h], x[n][2 h + 1] are columns 8 n + 2 t, + 1 of row half h. */
template <int K> static __device__ __forceinline__ void fragment_pack(uint32_t (&fragment)[K][4], const float (&x)[2 * K][4])
{
#pragma unroll
    for (int n = 0; n < 2 * K; n++) {
        fragment[n / 2][2 * (n % 2)] = ps_pack(x[n][0], x[n][1]);
        fragment[n / 2][2 * (n % 2) + 1] = ps_pack(x[n][2], x[n][3]);
    }
}

/* ---- dropout: forward draws, and keeps a bit an element for backward ---- */

/* Bit i: element i of a Philox block of 8 is kept. */
static __device__ __forceinline__ uint32_t kept_bits(const struct ps_dropout &d, uint64_t step, uint32_t index)
{
    const struct ps_block block = ps_philox(d.seed, index, d.site, step);
    const uint32_t below = ps_below(d.threshold), minus = ps_minus_below(d.threshold);
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        bits += ps_kept2(block.word[k], below, minus) << 2 * k;
    }
    return (bits | bits >> 15) & 0xffu;
}

/* Kept bits of 32 columns of a row, of which each lane of the quad has drawn a block. */
static __device__ __forceinline__ uint32_t quad_bits(uint32_t bits)
{
    bits <<= 8 * (lane_id() % 4);
    bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
    return bits | __shfl_xor_sync(0xffffffffu, bits, 2);
}

/* ---- weights: a ring of chunks in shared memory ---- */

/* A chunk is 64 columns of 128 rows ("tall") or 64 rows of 128 columns ("wide"), in panels of 64 columns: 128 bytes a row, its
 * units of 16 bytes exchanged by the row's number modulo 8. The copy engine brings it as two boxes of 64 x 64. */
struct chunk {
    int weight, column, part, row; /* part: of W_qkv */
    bool wide;
};

static __device__ __forceinline__ int at_most(int x, int most)
{
    return x < most ? x : most;
}

/* Chunk number i of the tile, in the order in which forward uses them. */
static __device__ __forceinline__ struct chunk forward_chunk(int i)
{
    if (i < 6) {
        return {WEIGHT_QKV, CHUNK * (i % 2), 2 - i / 2, 0, false};
    }
    if (i < 8) {
        return {WEIGHT_O, CHUNK * (i - 6), 0, 0, false};
    }
    const int at = CHUNK * ((i - 8) / 2);
    return i % 2 ? chunk{WEIGHT_2, 0, 0, at, true} : chunk{WEIGHT_1, at, 0, 0, false};
}

static __device__ __forceinline__ struct chunk backward_chunk(int i, int hidden)
{
    if (i < 2 * hidden) {
        const int at = CHUNK * (i / 2);
        return i % 2 ? chunk{WEIGHT_1, at, 0, 0, false} : chunk{WEIGHT_2, 0, 0, at, true};
    }
    i -= 2 * hidden;
    if (i < 2) {
        return {WEIGHT_O, 0, 0, CHUNK * i, true};
    }
    i -= 2;
    return {WEIGHT_QKV, CHUNK * (i % 2), i < 6 ? 2 - i / 2 : (i - 6) / 2, 0, false};
}

/* Every warp takes every chunk and releases them in pairs, in their order. The warp that is the last to release a pair asks for the
 * chunks that take their slots. */
template <bool BACKWARD> struct weight_ring {
    const CUtensorMap *maps;
    uint32_t base, full, readers; /* addresses: of the slots, of their barriers, and of how many warps have released a pair that
                                     begins in each */
    int hidden, chunks, left;     /* chunks of the hidden layer; of a tile; of this block, not yet asked for */
    int next, slot, release_slot; /* number in the tile of the next to ask for; slots of the next to take and to release */
    uint32_t parity;

    /* One thread: chunk number i of the tile to this slot. */
    __device__ __forceinline__ void ask(int i, int into) const
    {
        const struct chunk c = BACKWARD ? backward_chunk(i, hidden) : forward_chunk(i);
        const uint32_t to = base + into * STAGE_BYTES, barrier = full + 8 * into;
        ps_mbarrier_expect(barrier, STAGE_BYTES);
        ps_box_copy(to, &maps[c.weight], c.column, c.part, c.row, barrier);
        ps_box_copy(to + PANEL_BYTES, &maps[c.weight], c.column + (c.wide ? CHUNK : 0), c.part, c.row + (c.wide ? 0 : CHUNK),
                    barrier);
    }

    static __device__ __forceinline__ int slot_after(int i)
    {
        return i + 1 == STAGES ? 0 : i + 1;
    }

    __device__ __forceinline__ int chunk_after(int i) const
    {
        return i + 1 == chunks ? 0 : i + 1;
    }

    __device__ __forceinline__ void start(const struct arguments &p, uint32_t shared, uint32_t barriers, int tiles)
    {
        maps = p.weights;
        base = __shfl_sync(0xffffffffu, shared, 0); /* so that they stay in registers */
        full = __shfl_sync(0xffffffffu, barriers, 0);
        readers = full + 8 * STAGES;
        hidden = (p.f + CHUNK - 1) / CHUNK;
        chunks = 2 * hidden + (BACKWARD ? 14 : 8);
        left = tiles * chunks;
        next = slot = release_slot = 0;
        parity = 0;
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) {
                ps_mbarrier_init(full + 8 * i, 1);
                ps_shared_store(readers + 4 * i, 0);
            }
            ps_mbarrier_publish();
        }
        __syncthreads();
        for (int i = 0; i < STAGES && left > 0; i++) {
            if (threadIdx.x == 0) {
                ask(next, i);
            }
            next = chunk_after(next);
            left--;
        }
    }

    /* The next chunk, when it has come. */
    __device__ __forceinline__ uint32_t take()
    {
        ps_mbarrier_wait(full + 8 * slot, parity);
        const uint32_t stage = base + slot * STAGE_BYTES;
        slot = slot_after(slot);
        parity ^= slot == 0;
        return stage;
    }

    /* The warp is done with its two oldest chunks. */
    __device__ __forceinline__ void release()
    {
        const int second = slot_after(release_slot), second_next = chunk_after(next);
        if (left > 0 && ps_elect() && ps_shared_count(readers + 4 * release_slot, WARPS)) {
            ask(next, release_slot);
            if (left > 1) {
                ask(second_next, second);
            }
        }
        left -= 2;
        next = chunk_after(second_next);
        release_slot = slot_after(second);
    }
};

/* ---- products: 64 rows of a half times a weight. Left operands in a half's panels, or a warp's fragments. All are under way until
 * product_wait ---- */

/* sums += left B, 16 K deep, for 8 NT columns: B's row k and column n at row k, column n of the panel. */
template <int K, int NT> static __device__ __forceinline__ void product(float (&sums)[NT][4], uint32_t left, uint32_t panel)
{
    const uint32_t a = ps_wgmma_place(left), b = ps_wgmma_place(panel);
#pragma unroll
    for (int k = 0; k < K; k++) {
        ps_wgmma_shared<8 * NT, 1>(sums, ps_wgmma_operand(a, k / 4 * PANEL_BYTES + k % 4 * 32), ps_wgmma_operand(b, k * 2048));
    }
}

/* The same with B's row k and column n at row n, column k of the panels. */
template <int K, int NT>
static __device__ __forceinline__ void product_transposed(float (&sums)[NT][4], uint32_t left, uint32_t panels)
{
    const uint32_t a = ps_wgmma_place(left), b = ps_wgmma_place(panels);
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int column = k / 4 * PANEL_BYTES + k % 4 * 32;
        ps_wgmma_shared<8 * NT, 0>(sums, ps_wgmma_operand(a, column), ps_wgmma_operand(b, column));
    }
}

/* ---- rows: between the products a warp takes its rows four at a time. Lane 8 g + c has, of row g of the four, columns 8 c .. 8 c
 * + 7 and 64 + 8 c .. 64 + 8 c + 7, x[0 .. 7] and x[8 .. 15]; rolled loops, since the backward kernel's code has to stay in the
 * instruction cache ---- */

enum { LANE_COLUMNS = 16, PASS_ROWS = 4, PASSES = WARP_ROWS / PASS_ROWS };

/* A lane's part of a row, 16 bits each. */
struct row_words {
    uint4 part[2];
};

/* Local row of pass i, and the same within the warp's rows. */
static __device__ __forceinline__ int pass_row(int i)
{
    return PASS_ROWS * i + lane_id() / 8;
}

static __device__ __forceinline__ int lane_column(int part)
{
    return 8 * (lane_id() % 8) + 64 * part;
}

static __device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x + __shfl_xor_sync(0xffffffffu, x, 4);
}

/* From a tensor whose first row is the tile's, d wide; zeros beyond `valid` rows and d columns. */
static __device__ __forceinline__ struct row_words row_read(const real16 *rows, int d, int row, int valid)
{
    struct row_words w;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        w.part[i] = make_uint4(0, 0, 0, 0);
        if (row < valid && lane_column(i) < d) {
            w.part[i] = *(const uint4 *)(rows + (int64_t)row * d + lane_column(i));
        }
    }
    return w;
}

static __device__ __forceinline__ void row_write(real16 *rows, int d, int row, int valid, const struct row_words &w)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row < valid && lane_column(i) < d) {
            *(uint4 *)(rows + (int64_t)row * d + lane_column(i)) = w.part[i];
        }
    }
}

/* To the panels of an operand in shared memory; row: of the half. */
static __device__ __forceinline__ void row_stage(unsigned char *panels, int row, const struct row_words &w)
{
    unsigned char *to = panels + row * 128 + ((lane_id() % 8 ^ row % 8) << 4);
    *(uint4 *)to = w.part[0];
    *(uint4 *)(to + PANEL_BYTES) = w.part[1];
}

/* Back from there. */
static __device__ __forceinline__ struct row_words row_staged(const unsigned char *panels, int row)
{
    const unsigned char *from = panels + row * 128 + ((lane_id() % 8 ^ row % 8) << 4);
    struct row_words w;
    w.part[0] = *(const uint4 *)from;
    w.part[1] = *(const uint4 *)(from + PANEL_BYTES);
    return w;
}

static __device__ __forceinline__ void row_unpack(float (&x)[LANE_COLUMNS], const struct row_words &w)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t words[4] = {w.part[i].x, w.part[i].y, w.part[i].z, w.part[i].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[8 * i + 2 * k] = ps_low(words[k]);
            x[8 * i + 2 * k + 1] = ps_high(words[k]);
        }
    }
}

static __device__ __forceinline__ struct row_words row_pack(const float (&x)[LANE_COLUMNS])
{
    struct row_words w;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        w.part[i] = make_uint4(ps_pack(x[8 * i], x[8 * i + 1]), ps_pack(x[8 * i + 2], x[8 * i + 3]),
                               ps_pack(x[8 * i + 4], x[8 * i + 5]), ps_pack(x[8 * i + 6], x[8 * i + 7]));
    }
    return w;
}

/* A lane's columns of an fp32 vector. */
static __device__ __forceinline__ void row_vector(float (&x)[LANE_COLUMNS], const float *vector)
{
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 4; i++) {
        const float4 v = *(const float4 *)(vector + lane_column(i / 2) + 4 * (i % 2));
        x[4 * i] = v.x;
        x[4 * i + 1] = v.y;
        x[4 * i + 2] = v.z;
        x[4 * i + 3] = v.w;
    }
}

/* ---- sums of products in fp32, [64, D] in shared memory. Columns 64 j + 8 n + 4 h .. + 3 of a row are unit 16 j + 8 h + (n ^ (h +
 * 2 (row % 4))) of 16 bytes: no bank conflicts by products' rows and columns, nor by rows ---- */

/* Of 8 groups of 8 columns from 64 part on: where the lane's first row's are, but for n and the second row. */
static __device__ __forceinline__ uint32_t sums_place(unsigned char *stage, int part)
{
    const int row = product_row() + lane_id() / 4, t = lane_id() % 4;
    return ps_shared_address(stage) + row * 512 + part * 256 + t / 2 * 128 + ((t / 2 + 2 * (row % 4)) << 4) + t % 2 * 8;
}

/* Group FIRST + n to columns 64 part + 8 n; ADD: to what is there. */
template <int FIRST, bool ADD, int N>
static __device__ __forceinline__ void sums_store(unsigned char *stage, int part, const float (&x)[N][4])
{
    const uint32_t place = sums_place(stage, part);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const uint32_t to = place ^ (n << 4); /* the stage is aligned */
#pragma unroll
        for (int second = 0; second < 2; second++) {
            float2 v = make_float2(x[FIRST + n][2 * second], x[FIRST + n][2 * second + 1]);
            if (ADD) {
                const float2 old = ps_shared_load2(to + second * 8 * 512);
                v = make_float2(old.x + v.x, old.y + v.y);
            }
            ps_shared_store2(to + second * 8 * 512, v);
        }
    }
}

/* Each side tells the other that it has come, and waits for it. Where the sides' code differs, half_sync would have threads of one
 * barrier wait at two instructions. */
template <int SIDE> static __device__ __forceinline__ void sides_meet()
{
    const int barrier = 3 + 2 * half_id();
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier + SIDE), "n"(THREADS / 2) : "memory");
    asm volatile("bar.sync %0, %1;" ::"r"(barrier + 1 - SIDE), "n"(THREADS / 2) : "memory");
}

/* Both sides' sums over their parts of the depth, added up; between barriers of the half. The branches are kept apart from end to
 * end: meeting between them makes ptxas spill sums, 36 us of a weather step. */
static __device__ __forceinline__ void sums_of_sides(unsigned char *stage, const float (&x)[D / 8][4])
{
    if (side_id() == 0) {
        sums_store<8, false>(stage, 1, x);
        sides_meet<0>();
        sums_store<0, true>(stage, 0, x);
    } else {
        sums_store<0, false>(stage, 0, x);
        sides_meet<1>();
        sums_store<8, true>(stage, 1, x);
    }
}

/* By rows: where the lane's columns 4 h .. of part 0 are, but for h and part. */
static __device__ __forceinline__ float4 *sum_row_at(unsigned char *stage, int row, int i)
{
    return (float4 *)(stage + row * 512 + i / 2 * 256 + i % 2 * 128 + ((lane_id() % 8 ^ (i % 2 + 2 * (row % 4))) << 4));
}

static __device__ __forceinline__ void sum_row(float (&x)[LANE_COLUMNS], unsigned char *stage, int row)
{
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 4; i++) {
        const float4 v = *sum_row_at(stage, row, i);
        x[4 * i] = v.x;
        x[4 * i + 1] = v.y;
        x[4 * i + 2] = v.z;
        x[4 * i + 3] = v.w;
    }
}

static __device__ __forceinline__ void sum_row_store(unsigned char *stage, int row, const float (&x)[LANE_COLUMNS])
{
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 4; i++) {
        *sum_row_at(stage, row, i) = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
}

/* What dropout keeps of the lane's columns of a row: bit i is x[i]. row: in the tensor. */
static __device__ __forceinline__ uint32_t row_draw(const struct ps_dropout &drop, uint64_t step, int64_t row, int d)
{
    uint32_t bits = ~0u;
    if (drop.threshold) {
        const uint32_t index = (uint32_t)row * (uint32_t)(d / 8) + lane_id() % 8;
        bits = kept_bits(drop, step, index) | kept_bits(drop, step, index + 8) << 8;
    }
    return bits;
}

/* The thread's word of a tile, and what of it is for the next pass. */
static __device__ __forceinline__ uint32_t kept_word(const struct ps_dropout &drop, const uint32_t *kept, int tile)
{
    return drop.threshold ? kept[(int64_t)tile * THREADS + threadIdx.x] : ~0u;
}

static __device__ __forceinline__ uint32_t kept_next(uint32_t &word)
{
    const uint32_t bits = word;
    word >>= LANE_COLUMNS;
    return bits;
}

/* x = drop(x). */
static __device__ __forceinline__ void row_drop(float (&x)[LANE_COLUMNS], const struct ps_dropout &drop, uint32_t bits)
{
    const float scale = drop.threshold ? drop.scale : 1.0f;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        x[i] = bits & 1u << i ? x[i] * scale : 0.0f;
    }
}

/* x = (x - mean) rstd of a row over its first d columns (per: 1/d), 0 beyond; x is 0 there on entry. Returns mean, rstd. */
static __device__ __forceinline__ float2 row_normalise(float (&x)[LANE_COLUMNS], int d, float per, float epsilon)
{
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        sum += x[i];
    }
    const float mean = row_sum(sum) * per, means[2] = {lane_column(0) < d ? mean : 0.0f, lane_column(1) < d ? mean : 0.0f};
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        x[i] -= means[i / 8];
        squares += x[i] * x[i];
    }
    const float rstd = rsqrtf(row_sum(squares) * per + epsilon);
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        x[i] *= rstd;
    }
    return make_float2(mean, rstd);
}

/* The products' operand xhat gamma + beta. */
static __device__ __forceinline__ struct row_words row_affine(const float (&xhat)[LANE_COLUMNS], const float (&gamma)[LANE_COLUMNS],
                                                              const float (&beta)[LANE_COLUMNS])
{
    float x[LANE_COLUMNS];
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        x[i] = xhat[i] * gamma[i] + beta[i];
    }
    return row_pack(x);
}

/* dz becomes the gradient with respect to LayerNorm's input; sums, of the lane's columns, += dz xhat and dz. */
static __device__ __forceinline__ void row_normalise_backward(float (&dz)[LANE_COLUMNS], const float (&xhat)[LANE_COLUMNS],
                                                              float rstd, float per, const float (&gamma)[LANE_COLUMNS],
                                                              float (&sums)[2 * LANE_COLUMNS])
{
    float mean = 0.0f, projection = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        sums[i] += dz[i] * xhat[i];
        sums[LANE_COLUMNS + i] += dz[i];
        dz[i] *= gamma[i];
        mean += dz[i];
        projection += dz[i] * xhat[i];
    }
    mean = row_sum(mean) * per;
    projection = row_sum(projection) * per;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        dz[i] = rstd * (dz[i] - mean - xhat[i] * projection);
    }
}

/* to [2][D], this warp's, += the lanes' sums: dgamma, dbeta. */
static __device__ __forceinline__ void add_column_sums(float *to, float (&v)[2 * LANE_COLUMNS])
{
    const bool odd = lane_id() & 8, high = lane_id() & 16;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) { /* over the four rows of a pass: each lane ends with 8 sums */
        const float got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + LANE_COLUMNS], 8);
        v[i] = (odd ? v[i + LANE_COLUMNS] : v[i]) + got;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 8], 16);
        v[i] = (high ? v[i + 8] : v[i]) + got;
    }
    float4 *place = (float4 *)(to + (odd ? D : 0) + lane_column(high));
#pragma unroll
    for (int i = 0; i < 2; i++) { /* no other thread adds to these, so that the order is fixed; and nothing waits for them */
        atomicAdd(place + i, make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]));
    }
}

/* The lane's parts of the warp's rows, asked for before they are needed; loops over them are rolled, so the first is always the
 * next. */
struct rows_ahead {
    struct row_words pass[PASSES];
};

/* rows: the half's first, of which `valid` exist. */
static __device__ __forceinline__ struct rows_ahead rows_read(const real16 *rows, int d, int valid)
{
    struct rows_ahead ahead;
    asm volatile("" : "+r"(d)); /* else the rows' offsets would be kept, in memory, for the next call */
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        ahead.pass[i] = row_read(rows, d, first_row() + pass_row(i), valid);
    }
    return ahead;
}

static __device__ __forceinline__ struct row_words rows_next(struct rows_ahead &ahead)
{
    const struct row_words next = ahead.pass[0];
#pragma unroll
    for (int i = 1; i < PASSES; i++) {
        ahead.pass[i - 1] = ahead.pass[i];
    }
    return next;
}

/* The warp's rows to L2, long before they are read. */
static __device__ __forceinline__ void rows_prefetch(const real16 *rows, int d, int valid)
{
    const int line = first_row() * d + lane_id() * 64;
    if (lane_id() * 64 < WARP_ROWS * d && line < valid * d) {
        ps_prefetch(rows + line);
    }
}

/* The same to panels, behind the threads' backs: for rows_staged, of the same thread, after ps_copy_wait. */
static __device__ __forceinline__ void rows_stage(const unsigned char *panels, const real16 *rows, int d, int valid)
{
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int row = first_row() + pass_row(i);
        const uint32_t to = ps_shared_address(panels) + row * 128 + ((lane_id() % 8 ^ row % 8) << 4);
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const bool there = row < valid && lane_column(part) < d;
            ps_copy_async_part(to + part * PANEL_BYTES, there ? rows + (int64_t)row * d + lane_column(part) : rows, there ? 16 : 0);
        }
    }
}

static __device__ __forceinline__ struct rows_ahead rows_staged(const unsigned char *panels)
{
    struct rows_ahead ahead;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        ahead.pass[i] = row_staged(panels, first_row() + pass_row(i));
    }
    return ahead;
}

/* As rows_ahead, of rows that the same thread has put into panels. */
struct rows_kept {
    const unsigned char *panels;
    int pass;
};

static __device__ __forceinline__ struct row_words rows_next(struct rows_kept &kept)
{
    return row_staged(kept.panels, first_row() + pass_row(kept.pass++));
}

/* The operand LN(input) of the warp's rows, to its panels and, where stats is not NULL, the rows' statistics. */
static __device__ __forceinline__ void rows_normalise(unsigned char *panels, float2 *stats, struct rows_ahead &input,
                                                      const float *gamma_beta, int d, float per, float epsilon)
{
    const int first = first_row();
    float gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
    row_vector(gamma, gamma_beta);
    row_vector(beta, gamma_beta + D);
#pragma unroll 1
    for (int i = 0; i < PASSES; i++) {
        const int row = first + pass_row(i);
        float x[LANE_COLUMNS];
        row_unpack(x, rows_next(input));
        const float2 s = row_normalise(x, d, per, epsilon);
        if (stats && lane_id() % 8 == 0) {
            stats[row] = s;
        }
        row_stage(panels, row, row_affine(x, gamma, beta));
    }
}

/* ---- attention: a warp takes one (sequence, head) at a time ---- */

/* Where a row of the tile is in a panel; its low bits are those that the unit is exchanged with. */
static __device__ __forceinline__ uint32_t row_place(uint32_t row)
{
    return row * 128 + row / 64 * (HALF_BYTES - 64 * 128) + (row % 8 << 4);
}

/* The heads' columns from d on are zero: the product after attention reads them. */
static __device__ __forceinline__ void clear_columns(unsigned char *heads, int d)
{
    for (int i = lane_id(); i < WARP_ROWS * 16; i += 32) {
        const int row = first_row() + i / 16, unit = i % 16;
        if (8 * unit >= d) {
            *(uint4 *)(heads + unit / 8 * PANEL_BYTES + row * 128 + ((unit % 8 ^ row % 8) << 4)) = make_uint4(0, 0, 0, 0);
        }
    }
}

/* A head's columns: 8 J of them from column 8 J head on. */
template <int J> struct head {
    uint32_t panel, unit; /* bytes: of its panel behind the part's first; the first unit in it */

    __device__ __forceinline__ explicit head(uint32_t index) : panel(index * J / 8 * PANEL_BYTES), unit(index * J % 8 << 4)
    {
    }

    /* The address of unit j of a row, in the first half's first panel of q. */
    __device__ __forceinline__ uint32_t at(uint32_t place, int j) const
    {
        return (place ^ (unit + (j << 4))) + panel;
    }
};

/* sums = a b' + start over e = 8 J: rows of a against the 8 rows of b whose fragments these are. */
template <int J>
static __device__ __forceinline__ void head_product(float (&sums)[4], const uint32_t (&a)[J][2], const uint32_t (&b)[J],
                                                    const float (&start)[4])
{
    if constexpr (J == 1) {
        ps_mma8(sums, a[0][0], a[0][1], b[0], start);
    } else {
        const uint32_t first[4] = {a[0][0], a[0][1], a[1][0], a[1][1]};
        ps_mma16(sums, first, b[0], b[1], start);
#pragma unroll
        for (int j = 2; j < J; j += 2) {
            const uint32_t next[4] = {a[j][0], a[j][1], a[j + 1][0], a[j + 1][1]};
            ps_mma16(sums, next, b[j], b[j + 1], sums);
        }
    }
}

/* The same 16 rows of two parts at once: of `first`'s the two matrices of rows 0 .. 7 and 8 .. 15, and of `second`'s. address: of
 * the lane's row lane_id() % 16 in the first part; lanes from 16 on have the second's, `far` bytes further. */
template <bool TRANSPOSED>
static __device__ __forceinline__ void load_two(uint32_t (&first)[2], uint32_t (&second)[2], uint32_t address)
{
    uint32_t r[4];
    if (TRANSPOSED) {
        ps_ldmatrix4_transposed_at(r, address);
    } else {
        ps_ldmatrix4_at(r, address);
    }
    first[0] = r[0];
    first[1] = r[1];
    second[0] = r[2];
    second[1] = r[3];
}

/* Places of the lane's rows of a sequence for load_two, rows beyond the last replaced by the last. */
template <int KT> static __device__ __forceinline__ void row_places(uint32_t (&places)[KT], uint32_t base, int first, int N)
{
#pragma unroll
    for (int kt = 0; kt < KT; kt++) {
        places[kt] = base + row_place(first + at_most(16 * kt + lane_id() % 16, N - 1));
    }
}

/* load_two's inverse, for sums of products. there: the lane's row exists. */
static __device__ __forceinline__ void store_two(uint32_t address, uint32_t aside, bool there, const float (&first)[4],
                                                 float scale1, const float (&second)[4], float scale2)
{
    const uint32_t words[4] = {ps_pack(first[0] * scale1, first[1] * scale1), ps_pack(first[2] * scale1, first[3] * scale1),
                               ps_pack(second[0] * scale2, second[1] * scale2), ps_pack(second[2] * scale2, second[3] * scale2)};
    ps_stmatrix4_at(there ? address : aside, words);
}

/* scores = q k' + start of 16 queries over KT times 16 keys, those from N on -infinity. q is scaled: 2 to the power of a score is
 * its exponential. */
template <int KT, int J>
static __device__ __forceinline__ void raw_scores(float (&scores)[2 * KT][4], const uint32_t (&q)[J][2],
                                                  const uint32_t (&k)[2 * KT][J], const float (&start)[4], int N)
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < 2 * KT; n++) {
        head_product<J>(scores[n], q, k[n], start);
        if (n >= 2 * KT - 2) { /* KT = ceil(N / 16): only here can keys be missing */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool there = 8 * n + 2 * t + i < N;
                scores[n][i] = there ? scores[n][i] : -INFINITY;
                scores[n][2 + i] = there ? scores[n][2 + i] : -INFINITY;
            }
        }
    }
}

/* The largest of each of the lane's two rows. */
template <int KT> static __device__ __forceinline__ void row_maxima(float (&largest)[2], const float (&scores)[2 * KT][4])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        largest[half] = -INFINITY;
#pragma unroll
        for (int n = 0; n < 2 * KT; n++) {
            largest[half] = fmaxf(largest[half], fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        }
        largest[half] = quad_max(largest[half]);
    }
}

/* A v to the heads' panels, head by head. softmax: of the tile; halves: address of the first half's panels. The largest score is
 * taken off only where the exponentials would else leave the exponents that hold them: nowhere in a model that learns. */
template <int KT, int E>
static __device__ __forceinline__ void attention_forward(const struct arguments &p, uint32_t halves, uint32_t aside, float *softmax,
                                                         int sequences)
{
    constexpr int J = E / 8;
    const uint32_t ones = PS_REAL16_ONES, far = lane_id() < 16 ? 0 : (K_PANEL - Q_PANEL) * PANEL_BYTES;
#pragma unroll 1
    for (int pair = warp_id(); pair < sequences * p.heads; pair += WARPS) {
        const int sequence = pair / p.heads, first = sequence * p.N;
        const struct head<J> head(pair - sequence * p.heads);
        uint32_t places[KT];
        row_places<KT>(places, halves, first, p.N);
        uint32_t k[2 * KT][J], v[KT][J][2], a[KT][J][2];
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
#pragma unroll
            for (int j = 0; j < J; j++) {
                uint32_t rows[2];
                load_two<false>(a[kt][j], rows, head.at(places[kt], j) + far);
                k[2 * kt][j] = rows[0];
                k[2 * kt + 1][j] = rows[1];
                ps_ldmatrix2_transposed_at(v[kt][j], head.at(places[kt], j) + V_PANEL * PANEL_BYTES);
            }
        }
#pragma unroll
        for (int m = 0; m < KT; m++) {
            float scores[2 * KT][4], shift[2] = {0.0f, 0.0f}, mixed[J][4], sums[1][4];
            const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            raw_scores<KT, J>(scores, a[m], k, none, p.N);
            uint32_t probability[KT][4];
            bool shifted = false;
            while (true) {
#pragma unroll
                for (int n = 0; n < 2 * KT; n++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        probability[n / 2][n % 2 * 2 + half] =
                            ps_pack(ps_exp2(scores[n][2 * half]), ps_exp2(scores[n][2 * half + 1]));
                    }
                }
                ps_zero(sums);
#pragma unroll
                for (int kt = 0; kt < KT; kt++) { /* every column: the row's sum */
                    const uint32_t(&s)[4] = probability[kt];
                    ps_mma16(sums[0], s, ones, ones, sums[0]);
                }
                const float low = fminf(sums[0][0], sums[0][2]), high = fmaxf(sums[0][0], sums[0][2]);
                if (__all_sync(0xffffffffu, ps_sums_hold(low, high)) || shifted) {
                    break;
                }
                shifted = true;
                row_maxima<KT>(shift, scores);
#pragma unroll
                for (int n = 0; n < 2 * KT; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        scores[n][i] -= shift[i / 2];
                    }
                }
            }
            ps_zero(mixed);
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                const uint32_t(&s)[4] = probability[kt];
#pragma unroll
                for (int j = 0; j < J; j++) {
                    ps_mma16(mixed[j], s, v[kt][j][0], v[kt][j][1], mixed[j]);
                }
            }
            const float inverse[2] = {ps_reciprocal(sums[0][0]), ps_reciprocal(sums[0][2])};
            const bool there = 16 * m + lane_id() % 16 < p.N;
#pragma unroll
            for (int j = 0; j < J; j++) {
                const uint32_t to = head.at(places[m], j) + HEADS_PANEL * PANEL_BYTES;
                ps_stmatrix_x2(there ? to : aside, ps_pack(mixed[j][0] * inverse[0], mixed[j][1] * inverse[0]),
                               ps_pack(mixed[j][2] * inverse[1], mixed[j][3] * inverse[1]));
            }
            const int half = lane_id() % 4, row = 16 * m + lane_id() / 4 + 8 * half;
            if (half < 2 && row < p.N) {
                softmax[pair * p.N + row] = (half ? shift[1] : shift[0]) + ps_log2(half ? sums[0][2] : sums[0][0]);
            }
        }
    }
}

/* 16 queries of 16 keys as a left operand, and transposed. */
static __device__ __forceinline__ void fragment_pair(uint32_t (&s)[4], uint32_t (&s_trans)[4], const float (&left)[4],
                                                     const float (&right)[4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s[i] = ps_pack(left[2 * i], left[2 * i + 1]);
        s[2 + i] = ps_pack(right[2 * i], right[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { /* blocks [0][1] and [1][0] of the 16 x 16 change places */
        s_trans[i] = ps_movmatrix(s[i % 2 * 2 + i / 2]);
    }
}

/* q, k, v become their gradients, and the gradient of A v in the heads' panels becomes A v. softmax: of the tile. */
template <int KT, int E>
static __device__ __forceinline__ void attention_backward(const struct arguments &p, uint32_t halves, uint32_t aside,
                                                          const float *softmax, int sequences)
{
    constexpr int J = E / 8;
    const int g = lane_id() / 4;
    const uint32_t to_v = K_PANEL * PANEL_BYTES + (lane_id() < 16 ? 0 : (V_PANEL - K_PANEL) * PANEL_BYTES);
    const uint32_t to_heads = lane_id() < 16 ? 0 : HEADS_PANEL * PANEL_BYTES;
#pragma unroll 1
    for (int pair = warp_id(); pair < sequences * p.heads; pair += WARPS) {
        const int sequence = pair / p.heads, first = sequence * p.N;
        const struct head<J> head(pair - sequence * p.heads);
        uint32_t places[KT];
        row_places<KT>(places, halves, first, p.N);
        uint32_t k[2 * KT][J], v[2 * KT][J];
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
#pragma unroll
            for (int j = 0; j < J; j++) {
                uint32_t k_rows[2], v_rows[2];
                load_two<false>(k_rows, v_rows, head.at(places[kt], j) + to_v);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    k[2 * kt + i][j] = k_rows[i];
                    v[2 * kt + i][j] = v_rows[i];
                }
            }
        }
        float dk[KT][J][4], dv[KT][J][4];
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
            ps_zero(dk[kt]);
            ps_zero(dv[kt]);
        }
#pragma unroll
        for (int m = 0; m < KT; m++) {
            uint32_t a[J][2], da[J][2], q_trans[J][2], d_trans[J][2];
#pragma unroll
            for (int j = 0; j < J; j++) {
                load_two<false>(a[j], da[j], head.at(places[m], j) + to_heads);
                load_two<true>(q_trans[j], d_trans[j], head.at(places[m], j) + to_heads);
            }
            const int row = 16 * m + g;
            float start[4]; /* infinite, so that their probabilities are 0, for queries beyond the last */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                start[2 * half] = row + 8 * half < p.N ? -softmax[pair * p.N + row + 8 * half] : -INFINITY;
                start[2 * half + 1] = start[2 * half];
            }
            float scores[2 * KT][4], mixed[J][4], dq[J][4];
            raw_scores<KT, J>(scores, a, k, start, p.N);
#pragma unroll
            for (int n = 0; n < 2 * KT; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[n][i] = ps_exp2(scores[n][i]);
                }
            }
            ps_zero(mixed);
            ps_zero(dq);
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                uint32_t s[4], s_trans[4];
                fragment_pair(s, s_trans, scores[2 * kt], scores[2 * kt + 1]);
#pragma unroll
                for (int j = 0; j < J; j++) {
                    uint32_t v_trans[2];
                    ps_ldmatrix2_transposed_at(v_trans, head.at(places[kt], j) + V_PANEL * PANEL_BYTES);
                    ps_mma16(mixed[j], s, v_trans[0], v_trans[1], mixed[j]);
                    ps_mma16(dv[kt][j], s_trans, d_trans[j][0], d_trans[j][1], dv[kt][j]);
                }
            }
            /* the scores' gradient but for the factor p.scale: P (dP - sum of P dP), and that sum is A v's gradient times A v */
            float projection[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < J; j++) {
                    sum -= mixed[j][2 * half] * ps_low(da[j][half]) + mixed[j][2 * half + 1] * ps_high(da[j][half]);
                }
                projection[2 * half] = projection[2 * half + 1] = quad_sum(sum);
            }
#pragma unroll
            for (int n = 0; n < 2 * KT; n++) {
                float d_score[4];
                head_product<J>(d_score, da, v[n], projection);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[n][i] *= d_score[i];
                }
            }
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                uint32_t s[4], s_trans[4];
                fragment_pair(s, s_trans, scores[2 * kt], scores[2 * kt + 1]);
#pragma unroll
                for (int j = 0; j < J; j++) {
                    uint32_t k_trans[2];
                    ps_ldmatrix2_transposed_at(k_trans, head.at(places[kt], j) + K_PANEL * PANEL_BYTES);
                    ps_mma16(dq[j], s, k_trans[0], k_trans[1], dq[j]);
                    ps_mma16(dk[kt][j], s_trans, q_trans[j][0], q_trans[j][1], dk[kt][j]);
                }
            }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < J; j++) {
                store_two(head.at(places[m], j) + to_heads, aside, 16 * m + lane_id() % 16 < p.N, dq[j], p.scale, mixed[j], 1.0f);
            }
        }
        __syncwarp();
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
#pragma unroll
            for (int j = 0; j < J; j++) {
                store_two(head.at(places[kt], j) + to_v, aside, 16 * kt + lane_id() % 16 < p.N, dk[kt][j], 1.0f / PS_LOG2_E,
                          dv[kt][j], 1.0f);
            }
        }
    }
}

/* ---- what forward and backward share ---- */

/* All at once, since each would be waited for. */
static __device__ __forceinline__ void load_vectors(const struct arguments &p, float *vectors)
{
    constexpr int EACH = (VECTORS + THREADS - 1) / THREADS;
    const struct ps_encoder_large_vectors &v = p.vectors;
    float x[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = threadIdx.x + k * THREADS, vector = at_most(i / D, B_1 / D), place = i - vector * D;
        const float *from = vector == LN1_GAMMA / D   ? v.ln1_gamma
                            : vector == LN1_BETA / D  ? v.ln1_beta
                            : vector < B_O / D        ? v.b_qkv + (vector - B_QKV / D) * p.d
                            : vector == B_O / D       ? v.b_o
                            : vector == LN2_GAMMA / D ? v.ln2_gamma
                            : vector == LN2_BETA / D  ? v.ln2_beta
                            : vector == B_2 / D       ? v.b_2
                                                      : v.b_1;
        x[k] = place < (vector == B_1 / D ? p.f : p.d) ? from[place] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        if (threadIdx.x + k * THREADS < VECTORS) {
            vectors[threadIdx.x + k * THREADS] = x[k];
        }
    }
}

/* What a product's sums begin with. */
template <int NT> static __device__ __forceinline__ void add_bias_first(float (&sums)[NT][4], const float *bias)
{
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 b = *(const float2 *)(bias + 8 * n + lane_id() % 4 * 2);
        sums[n][0] = sums[n][2] = b.x;
        sums[n][1] = sums[n][3] = b.y;
    }
}

/* [16, 64] to the warp's rows of a panel, rows from `valid` of the half on as zeros. */
static __device__ __forceinline__ void store_panel(unsigned char *panel, const float (&x)[8][4], int valid)
{
    const int lane = lane_id(), row = product_row() + lane / 4;
    const bool there[2] = {row < valid, row + 8 < valid};
    const uint32_t to = ps_shared_address(panel) + (product_row() + lane % 16) * 128, unit = ((lane / 16) ^ (lane % 8)) << 4;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            words[2 * i] = there[0] ? ps_pack(x[n + i][0], x[n + i][1]) : 0;
            words[2 * i + 1] = there[1] ? ps_pack(x[n + i][2], x[n + i][3]) : 0;
        }
        ps_stmatrix4_at(to + (unit ^ (n << 4)), words);
    }
}

/* q, k, v = a W_qkv + b_qkv of the half, q times q_scale; a, its address, is where q goes. */
template <bool BACKWARD>
static __device__ __forceinline__ void project_qkv(struct weight_ring<BACKWARD> &weights, unsigned char *half, uint32_t a, int warp,
                                                   const float *vectors, float q_scale, int valid)
{
    const int side = warp / 4 % 2;
#pragma unroll 1
    for (int part = 2; part >= 0; part--) {
        float sums[8][4];
        add_bias_first(sums, vectors + B_QKV + part * D + CHUNK * side);
        const uint32_t first = weights.take(), second = weights.take();
        ps_wgmma_begin();
        product<8>(sums, a, side ? second : first);
        ps_wgmma_commit();
        ps_wgmma_wait<0>();
        ps_pin(sums);
        weights.release();
        if (part == 0) {
            half_stores_wait(warp);
            half_sync();
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[n][i] *= q_scale;
                }
            }
        }
        store_panel(half + (2 * part + side) * PANEL_BYTES, sums, valid);
    }
}

struct tile {
    int index, number;         /* in the launch; in the tensors */
    int sequences, all, valid; /* sequences, their rows, and how many of those are in this thread's half or after it */
    int64_t row;               /* the first, in the tensors */
    int64_t half_row;          /* the first of this thread's half */
};

static __device__ __forceinline__ struct tile tile_at(const struct arguments &p, int index, int half)
{
    struct tile t;
    t.index = index;
    t.number = p.first_tile + index;
    t.sequences = at_most(p.group, p.sequences - index * p.group);
    t.all = t.sequences * p.N;
    t.valid = t.all - 64 * half;
    t.row = p.first + (int64_t)index * p.group * p.N;
    t.half_row = t.row + 64 * half;
    return t;
}

/* The rows of the block's first tile to L2. */
static __device__ __forceinline__ void first_prefetch(const struct arguments &p, const real16 *rows)
{
    int index = blockIdx.x, thread = threadIdx.x;
    asm volatile("" : "+r"(index), "+r"(thread)); /* else what both have in common with the tiles' loop would be kept, in memory */
    const int line = thread * 64, rest = at_most(p.group, p.sequences - index * p.group) * p.N * p.d;
    if (line < rest) {
        ps_prefetch(rows + (p.first + (int64_t)index * p.group * p.N) * p.d + line);
    }
}

static __device__ __forceinline__ int tiles_of_block(const struct arguments &p)
{
    const int tiles = (p.sequences + p.group - 1) / p.group;
    return ((int)blockIdx.x < tiles) ? (tiles - 1 - (int)blockIdx.x) / p.blocks + 1 : 0;
}

/* Where nothing is from the kernel before, its last blocks are still at work while these are: they wait for it before their last
 * tile only, because the kernel after this one relies on that. */
static __device__ __forceinline__ void grid_begin_once(const struct arguments &p, int i, int tiles)
{
    if (i == (p.wait ? 0 : tiles - 1)) {
        ps_grid_begin();
    }
}

static __device__ __forceinline__ uint64_t dropout_step(const struct arguments &p)
{
    const struct ps_step_state *state = p.attention.state ? p.attention.state : p.hidden.state ? p.hidden.state : p.output.state;
    return state ? state->step : 0;
}

/* t = tanh of gelu, see kernels.h: sqrt(2 / pi), and 0.044715 of that. */
static constexpr float GELU_LINEAR = 0.7978845608028654f, GELU_CUBIC = 0.044715f * GELU_LINEAR;

static __device__ __forceinline__ float gelu_tanh(float x)
{
    return ps_tanh(x * fmaf(GELU_CUBIC, x * x, GELU_LINEAR));
}

/* What dropout keeps of the side's 32 columns of hidden chunk j in the lane's two rows (row: the tile's first): bit 8 c + k is
 * column 8 c + 2 t + k. */
static __device__ __forceinline__ void hidden_draw(uint32_t (&kept)[2], const struct arguments &p, uint64_t step,
                                                   const struct tile &tile, int j, int side)
{
    kept[0] = kept[1] = ~0u;
    if (p.hidden.threshold) {
        const int t = lane_id() % 4, words = (p.f + CHUNK - 1) / CHUNK * 2;
#pragma unroll
        for (int second = 0; second < 2; second++) {
            const uint32_t index = (uint32_t)(tile.row + own_row(second)) * (uint32_t)(p.f / 8) + 8 * j + 4 * side + t;
            kept[second] = quad_bits(kept_bits(p.hidden, step, index));
        }
        if (t < 2 && own_row(t) < tile.all) { /* chosen, not indexed: else they would be kept in memory */
            p.kept.hidden[(tile.row + own_row(t)) * words + 2 * j + side] = t ? kept[1] : kept[0];
        }
        kept[0] >>= 2 * t;
        kept[1] >>= 2 * t;
    }
}

/* The same as forward left it. */
static __device__ __forceinline__ void hidden_read(uint32_t (&kept)[2], const struct arguments &p, const struct tile &tile, int j,
                                                   int side)
{
    const int words = (p.f + CHUNK - 1) / CHUNK * 2;
#pragma unroll
    for (int second = 0; second < 2; second++) {
        kept[second] = ~0u;
        if (p.hidden.threshold && own_row(second) < tile.all) {
            kept[second] = p.kept.hidden[(tile.row + own_row(second)) * words + 2 * j + side];
        }
    }
}

/* What backward will read of dropout's bits of a tile, to L2. */
static __device__ __forceinline__ void kept_prefetch(const struct arguments &p, const struct tile &tile)
{
    const int lane = lane_id(), row = 64 * half_id() + first_row() + lane, words = (p.f + CHUNK - 1) / CHUNK * 2;
    if (p.hidden.threshold && lane < WARP_ROWS && row < tile.all) {
        ps_prefetch(p.kept.hidden + (tile.row + row) * words);
    }
    if (p.attention.threshold && lane == WARP_ROWS) {
        ps_prefetch(p.kept.attention + (int64_t)tile.number * THREADS + threadIdx.x);
    }
    if (p.output.threshold && lane == WARP_ROWS) {
        ps_prefetch(p.kept.output + (int64_t)tile.number * THREADS + threadIdx.x);
    }
}

/* z, the product for these columns and b_1, becomes drop(gelu(z)). */
static __device__ __forceinline__ void hidden_forward(float (&z)[4][4], const struct arguments &p, const uint32_t (&kept)[2])
{
    const float scale = p.hidden.threshold ? 0.5f * p.hidden.scale : 0.5f;
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = z[c][i], s = kept[i / 2] & 1u << (8 * c + i % 2) ? x * scale : 0.0f;
            z[c][i] = fmaf(s, gelu_tanh(x), s);
        }
    }
}

/* z, the product for these columns plus b_1, becomes drop(gelu(z)), and dh, the gradient of that, the gradient of z. */
static __device__ __forceinline__ void hidden_backward(float (&z)[4][4], float (&dh)[4][4], const struct arguments &p,
                                                       const uint32_t (&kept)[2])
{
    const float scale = p.hidden.threshold ? 0.5f * p.hidden.scale : 0.5f;
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = z[c][i], square = x * x, h = ps_tanh(x * fmaf(GELU_CUBIC, square, GELU_LINEAR));
            const float slope = fmaf(3.0f * GELU_CUBIC, square, GELU_LINEAR) * fmaf(-h, h, 1.0f);
            const float m = kept[i / 2] & 1u << (8 * c + i % 2) ? scale : 0.0f, share = fmaf(m, h, m);
            z[c][i] = x * share;
            dh[c][i] *= fmaf(x * m, slope, share);
        }
    }
}

/* ---- forward ---- */

template <int KT, int E>
static __global__ void __launch_bounds__(THREADS, 1) layer_forward(const __grid_constant__ struct arguments p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ uint64_t barriers[STAGES + (STAGES + 1) / 2]; /* and how many warps have released each */
    const int warp = uniform_warp_id(), half_index = warp / (WARPS / 2), side = warp / 4 % 2;
    unsigned char *halves = shared + STAGES * STAGE_BYTES, *half = halves + half_index * HALF_BYTES;
    unsigned char *r_sums = half, *y_sums = half + 4 * PANEL_BYTES, *heads = half + HEADS_PANEL * PANEL_BYTES;
    float *vectors = (float *)(halves + 2 * HALF_BYTES);
    unsigned char *aside = (unsigned char *)(vectors + VECTORS) + 16 * warp;
    const int d = p.d, first = first_row(), hidden_chunks = (p.f + CHUNK - 1) / CHUNK;
    const uint32_t half_address = ps_shared_address(halves) + half_index * HALF_BYTES;
    const uint32_t heads_address = half_address + HEADS_PANEL * PANEL_BYTES;
    const uint64_t step = dropout_step(p);
    const int tiles = tiles_of_block(p);
    first_prefetch(p, p.u);
    struct weight_ring<false> weights;
    weights.start(p, ps_shared_address(shared), ps_shared_address(barriers), tiles);
    load_vectors(p, vectors);
    __syncthreads();
    struct rows_ahead u; /* a tile ahead: reading takes longer than the end of a tile */
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        grid_begin_once(p, i, tiles);
        const struct tile tile = tile_at(p, blockIdx.x + i * p.blocks, half_index);
        const real16 *u_rows = p.u + tile.half_row * d;
        if (i == 0) {
            u = rows_read(u_rows, d, tile.valid);
        }
        half_sync();
        rows_normalise(half + Q_PANEL * PANEL_BYTES, NULL, u, vectors + LN1_GAMMA, d, p.per, p.epsilon);
        ps_publish();
        half_sync();
        project_qkv(weights, half, half_address, warp, vectors, p.scale * PS_LOG2_E, tile.valid);
        clear_columns(heads, d);
        if (i + 1 < tiles) {
            const struct tile next = tile_at(p, blockIdx.x + (i + 1) * p.blocks, half_index);
            rows_prefetch(p.u + next.half_row * d, d, next.valid);
        }
        __syncthreads();
        attention_forward<KT, E>(p, ps_shared_address(halves), ps_shared_address(aside), p.softmax + tile.row * p.heads,
                                 tile.sequences);
        ps_publish();
        __syncthreads();

        /* r = u + drop(merged W_o + b_o) */
        u = rows_read(u_rows, d, tile.valid);
        {
            float sums[8][4];
            ps_zero(sums);
            const uint32_t left = weights.take(), right = weights.take();
            ps_wgmma_begin();
            product<8>(sums, heads_address, side ? right : left);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(sums);
            weights.release();
            sums_store<0, false>(r_sums, side, sums);
        }
        {
            float bias[LANE_COLUMNS], gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
            row_vector(bias, vectors + B_O);
            row_vector(gamma, vectors + LN2_GAMMA);
            row_vector(beta, vectors + LN2_BETA);
            uint32_t kept = 0;
            half_sync();
#pragma unroll 1
            for (int pass = 0; pass < PASSES; pass++) {
                const int row = first + pass_row(pass);
                float r[LANE_COLUMNS], x[LANE_COLUMNS];
                row_unpack(x, rows_next(u));
                sum_row(r, r_sums, row);
#pragma unroll
                for (int k = 0; k < LANE_COLUMNS; k++) {
                    r[k] += bias[k];
                }
                const uint32_t bits = row_draw(p.attention, step, tile.half_row + row, d);
                kept |= (bits & 0xffffu) << LANE_COLUMNS * pass;
                row_drop(r, p.attention, bits);
#pragma unroll
                for (int k = 0; k < LANE_COLUMNS; k++) {
                    r[k] += x[k];
                }
                sum_row_store(r_sums, row, r);
                row_write(p.r + tile.half_row * d, d, row, tile.valid, row_pack(r));
                row_normalise(r, d, p.per, p.epsilon);
                row_stage(heads, row, row_affine(r, gamma, beta));
            }
            if (p.attention.threshold) {
                p.kept.attention[(int64_t)tile.number * THREADS + threadIdx.x] = kept;
            }
        }
        ps_publish();
        half_sync();

        /* y = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2): a side has 32 columns of each chunk of the hidden layer, and sums
         * their part of the second product */
        {
            float x[D / 8][4];
            uint32_t hidden[2][4];
            ps_zero(x);
#pragma unroll 1
            for (int j = 0; j < hidden_chunks; j++) {
                float z[4][4];
                uint32_t kept[2];
                add_bias_first(z, vectors + B_1 + CHUNK * j + 32 * side);
                const uint32_t w_1 = weights.take();
                ps_wgmma_begin();
                product<8>(z, heads_address, w_1 + 64 * side);
                ps_wgmma_commit();
                hidden_draw(kept, p, step, tile, j, side);
                ps_wgmma_wait<0>(); /* for the second product of the chunk before, too */
                ps_pin(z);
                if (j > 0) {
                    weights.release();
                }
                hidden_forward(z, p, kept);
                fragment_pack<2>(hidden, z);
                const uint32_t w_2 = ps_wgmma_place(weights.take() + 2 * side * 2048, PANEL_BYTES);
                ps_wgmma_begin();
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    ps_wgmma_n128<1>(x, hidden[k], ps_wgmma_operand(w_2, k * 2048));
                }
                ps_wgmma_commit();
            }
            ps_wgmma_wait<0>();
            ps_pin(x);
            ps_pin(hidden);
            weights.release();
            half_sync();
            sums_of_sides(y_sums, x);
            half_sync();
        }
        if (i + 1 < tiles) {
            const struct tile next = tile_at(p, blockIdx.x + (i + 1) * p.blocks, half_index);
            u = rows_read(p.u + next.half_row * d, d, next.valid);
        }
        float bias[LANE_COLUMNS];
        uint32_t kept = 0;
        row_vector(bias, vectors + B_2);
#pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++) {
            const int row = first + pass_row(pass);
            float y[LANE_COLUMNS], r[LANE_COLUMNS];
            sum_row(y, y_sums, row);
            sum_row(r, r_sums, row);
#pragma unroll
            for (int k = 0; k < LANE_COLUMNS; k++) {
                y[k] += bias[k];
            }
            const uint32_t bits = row_draw(p.output, step, tile.half_row + row, d);
            kept |= (bits & 0xffffu) << LANE_COLUMNS * pass;
            row_drop(y, p.output, bits);
#pragma unroll
            for (int k = 0; k < LANE_COLUMNS; k++) {
                y[k] += r[k];
            }
            row_write(p.y + tile.half_row * d, d, row, tile.valid, row_pack(y));
        }
        if (p.output.threshold) {
            p.kept.output[(int64_t)tile.number * THREADS + threadIdx.x] = kept;
        }
    }
}

/* ---- weights' gradients ---- */

/* A block of backward's launch, or of one of its own, forms a job of products over every so manieth block of 64 rows of the chunk
 * before: a warpgroup each has 64 columns of the right operand times 128 of the left (a part: that much of the gradient,
 * transposed), since what bounds it is shared memory, and so the right operand's columns are read once for product and sums. A
 * stage is 64 rows of the operands, in pairs of panels; the first thread of each warpgroup asks the copy engine for one of them:
 * one thread that asks for all holds its warpgroup up, and so the others. */
enum {
    PART_ROWS = 64,     /* columns of the right operand */
    PART_COLUMNS = 128, /* of the left one */
    /* its sums in the order of the threads' registers, 64 column sums of its right operand, and as many more for whole lines */
    PART_SUMS = PART_ROWS * PART_COLUMNS,
    PART_FLOATS = PART_SUMS + 2 * PART_ROWS,
    PARTS = THREADS / 128, /* of a job */
    JOB_PANELS = 4,        /* of the hidden layer in a job, at most */
    MAX_JOBS = 2 + 2 * ((MAX_F / 64 + JOB_PANELS - 1) / JOB_PANELS),
    GRADIENT_PANELS = 24, /* in shared memory */
    GRADIENT_BYTES = GRADIENT_PANELS * PANEL_BYTES,
    MAX_STAGES = GRADIENT_PANELS / 4, /* of the smallest job */
    JOB_PAIRS = 4,
    ADD_BLOCKS = PART_COLUMNS / 8 + 1, /* of add_gradients for a part: 8 columns of the left operand each, and the biases */
    ADD_WARPS = 8,
};
static_assert(32 * ADD_WARPS == 2 * 128 && NORM_SUMS % 32 == 0, "whole blocks");
static_assert((int)GRADIENT_BYTES <= (int)BACKWARD_BYTES, "the same kernel has both");

/* QK: a' dq, a' dk; VO: a' dv, merged' dr; 1: ln2' d_hidden, 2: hidden' dy, of up to 4 panels of the hidden layer. */
enum gradient_kind { GRADIENT_QK, GRADIENT_VO, GRADIENT_1, GRADIENT_2 };

/* Two panels of an operand, or one: its neighbour in the stage is not filled then, and makes columns that do not exist. */
struct gradient_pair {
    const real16 *from;
    int all, panels; /* of a block of 64 rows, and those of the pair */
};

struct gradient_job {
    int kind, first, panels; /* of the hidden layer's panels */
    int pairs_count;
    int slices, usual_slices; /* of this launch, and of one of backward's: blocks */
    struct gradient_pair pairs[JOB_PAIRS];
};

struct gradient_arguments {
    struct ps_encoder_large_gradients gradients; /* of the first layer; add_gradients only */
    int d, f, layers;
    int row_blocks; /* of 64 rows */
    int jobs_count;
    bool add; /* to the partial sums of chunks before */
    struct gradient_job jobs[MAX_JOBS];
    float *partials; /* of this launch, [slices][jobs][PARTS][PART_FLOATS]: a layer's of `beside`, or the last chunk's own */
    /* for add_gradients: [layers from the last][most slices of a job][jobs][PARTS][PART_FLOATS], of launches beside backward, and
     * whether the first layer has any; blocks of layer_backward at most, and those with norm_sums of even and odd chunks of the
     * last layer, and of the others */
    const float *beside;
    bool first_beside;
    int most_slices, most_blocks, norm_blocks[2][2];
    const float *norm_sums; /* [layers from the last][2][most_blocks][NORM_SUMS] */
};

/* Never fewer than pairs. */
static __device__ __forceinline__ int job_parts(const struct gradient_job &job)
{
    return job.kind == GRADIENT_1 || job.kind == GRADIENT_2 ? (job.panels + 1) / 2 * 2 : PARTS;
}

/* A pair of panels, from there on in device memory, to its place in a stage. */
static __device__ __forceinline__ void ask_pair(const struct gradient_pair &pair, const real16 *from, uint32_t to, uint32_t full)
{
    ps_mbarrier_expect(full, pair.panels * PANEL_BYTES);
    ps_bulk_copy(to, from, pair.panels * PANEL_BYTES, full, ps_cache_once());
}

/* Block `index` of them. The chunk's last tiles may still be in L2, so the row blocks are taken from the last to the first. */
static __device__ __forceinline__ void gradient_block(const struct gradient_arguments &p, unsigned char *shared, int index)
{
    __shared__ uint64_t gradient_barriers[2 * MAX_STAGES];
    int number = 0, slice = index;
    for (; slice >= p.jobs[number].slices; number++) {
        slice -= p.jobs[number].slices;
    }
    const struct gradient_job &job = p.jobs[number];
    const int part = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
    const int steps = slice < p.row_blocks ? (p.row_blocks - 1 - slice) / job.slices + 1 : 0;
    const bool tall = job.kind == GRADIENT_2, both = job.kind == GRADIENT_VO;
    const int parts = job_parts(job), panels = 2 * job.pairs_count, stages = GRADIENT_PANELS / panels;
    const uint32_t stage_bytes = panels * PANEL_BYTES, base = ps_shared_address(shared);
    const uint32_t full = ps_shared_address(gradient_barriers), empty = full + 8 * MAX_STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            ps_mbarrier_init(full + 8 * i, job.pairs_count);
            ps_mbarrier_init(empty + 8 * i, 128 * parts);
        }
        ps_mbarrier_publish();
    }
    ps_grid_begin();
    __syncthreads();
    if (part >= parts) {
        return;
    }
    const bool asks = threadIdx.x % 128 == 0 && part < job.pairs_count;
    const struct gradient_pair pair = job.pairs[asks ? part : 0];
    const int64_t row_block = (int64_t)pair.all * (64 * 64); /* reals from one to the next */
    const real16 *next = pair.from + (p.row_blocks - 1 - slice) * row_block;
    const int64_t further = job.slices * row_block;
    const uint32_t place = base + part * (2 * PANEL_BYTES);
    if (asks) {
        for (int s = 0; s < stages && s < steps; s++, next -= further) {
            ask_pair(pair, next, place + s * stage_bytes, full + 8 * s);
        }
    }
    const int first_panel = both ? part / 2 * 4 : tall ? part / 2 * 2 : 0; /* of the left operand */
    const uint32_t left = PANEL_BYTES * first_panel;
    const uint32_t right = PANEL_BYTES * (tall ? panels - 2 + part % 2 : both ? first_panel + 2 + part % 2 : 2 + part);
    const int lane = lane_id(), wj = warp_id() % 4, thread = threadIdx.x % 128;
    const uint32_t right_place = right + (lane % 8 + lane / 16 * 8) * 128 + ((2 * wj + lane / 8 % 2 ^ lane % 8) << 4);
    float *out = p.partials + (int64_t)((slice * p.jobs_count + number) * PARTS + part) * PART_FLOATS;
    float sums[16][4], bias[2] = {};
    ps_zero(sums);
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        const uint32_t stage = base + slot * stage_bytes;
        const uint32_t b = ps_wgmma_place(stage + left, PANEL_BYTES);
        uint32_t a[4][4];
        ps_mbarrier_wait(full + 8 * slot, parity);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            ps_ldmatrix4_transposed_at(a[k], stage + right_place + k * 2048);
        }
        ps_wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            ps_wgmma_n128<1>(sums, a[k], ps_wgmma_operand(b, k * 2048));
#pragma unroll
            for (int i = 0; i < 4; i++) { /* while the next product waits for its turn */
                bias[i % 2] += ps_low(a[k][i]) + ps_high(a[k][i]);
            }
            asm volatile("" : "+f"(bias[0]), "+f"(bias[1])::"memory");
        }
        ps_wgmma_commit();
        if (asks && s > 0 && s - 1 + stages < steps) { /* the stage of the step before, when all have read it */
            const int before = slot == 0 ? stages - 1 : slot - 1;
            ps_mbarrier_wait(empty + 8 * before, slot == 0 ? parity ^ 1 : parity);
            ask_pair(pair, next, place + before * stage_bytes, full + 8 * before);
            next -= further;
        }
        ps_wgmma_wait<0>();
        ps_pin(sums);
        ps_pin(a);
        ps_mbarrier_arrive(empty + 8 * slot); /* every lane: its own reads of the stage are ordered by its own arrival */
        slot++;
        if (slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    const bool add = p.add;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        float4 *to = (float4 *)out + n * 128 + thread;
        const float4 old = add ? *to : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *to = make_float4(old.x + sums[n][0], old.y + sums[n][1], old.z + sums[n][2], old.w + sums[n][3]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sum = quad_sum(bias[i]);
        if (lane % 4 == 0) {
            float *to = out + PART_SUMS + 16 * wj + 8 * i + lane / 4;
            *to = add ? *to + sum : sum;
        }
    }
}

/* ---- backward ---- */

/* The half's panels to an operand, asked for by its first thread; the writers have published them before a barrier. */
static __device__ __forceinline__ void store_operand(real16 *operand, int panels, int tile, int warp, const unsigned char *from)
{
    if (half_leader(warp)) {
        ps_bulk_store_once(operand + (int64_t)(2 * tile + warp / (WARPS / 2)) * panels * (64 * 64), ps_shared_address(from),
                           panels * PANEL_BYTES);
    }
}

/* What a tile begins with, behind the threads' backs: r, dy and what dropout keeps of that, to where u and softmax's sums will be.
 * Reading them when the tile begins takes longer than all that is done with them. */
static __device__ __forceinline__ void feed_forward_stage(const struct arguments &p, const struct tile &tile,
                                                          const unsigned char *r_panels, const unsigned char *dy_panels,
                                                          float *kept)
{
    const int d = p.d;
    rows_stage(r_panels, p.r + tile.half_row * d, d, tile.valid);
    rows_stage(dy_panels, p.dy + tile.half_row * d, d, tile.valid);
    if (p.output.threshold) {
        ps_copy_async4(kept + threadIdx.x, p.kept.output + (int64_t)tile.number * THREADS + threadIdx.x);
    }
}

/* Operands of the feed-forward part, after a barrier of the half: LN2(r) and the dropped dy, to their panels, of rows that
 * feed_forward_stage asked for; the rows' means and 1/deviation. */
static __device__ __forceinline__ void feed_forward_operands(const struct arguments &p, const float *vectors,
                                                             const unsigned char *r_panels, const unsigned char *staged_dy,
                                                             const float *staged_kept, unsigned char *ln2_panels,
                                                             unsigned char *dy_panels, float2 *stats)
{
    const int d = p.d, first = first_row();
    float gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
    ps_copy_wait();
    uint32_t kept = p.output.threshold ? __float_as_uint(staged_kept[threadIdx.x]) : ~0u;
    half_sync();
    row_vector(gamma, vectors + LN2_GAMMA);
    row_vector(beta, vectors + LN2_BETA);
#pragma unroll 1
    for (int i = 0; i < PASSES; i++) {
        const int row = first + pass_row(i);
        float x[LANE_COLUMNS], dy[LANE_COLUMNS];
        row_unpack(x, row_staged(r_panels, row));
        row_unpack(dy, row_staged(staged_dy, row));
        row_drop(dy, p.output, kept_next(kept));
        row_stage(dy_panels, row, row_pack(dy));
        const float2 s = row_normalise(x, d, p.per, p.epsilon);
        if (lane_id() % 8 == 0) {
            stats[row] = s;
        }
        row_stage(ln2_panels, row, row_affine(x, gamma, beta));
    }
}

/* d_r = the side's part of the gradient of LN2's output. kept_ahead: dropout's bits of the first chunk, then those of the next one,
 * since reading takes longer than the products. */
static __device__ __forceinline__ void feed_forward_backward(const struct arguments &p, struct weight_ring<true> &weights,
                                                             const struct tile &tile, const float *vectors, int side, uint32_t ln2,
                                                             uint32_t dy, uint32_t (&kept_ahead)[2], float (&d_r)[D / 8][4])
{
    const int hidden_chunks = (p.f + CHUNK - 1) / CHUNK;
    ps_zero(d_r);
#pragma unroll 1
    for (int j = 0; j < hidden_chunks; j++) {
        float dh[4][4], z[4][4];
        uint32_t hidden[2][4], d_hidden[2][4];
        ps_zero(dh);
        add_bias_first(z, vectors + B_1 + CHUNK * j + 32 * side);
        const uint32_t w_2 = weights.take() + side * (PANEL_BYTES / 2), w_1 = weights.take() + 64 * side;
        ps_pin(z);
        ps_wgmma_begin();
        product_transposed<8>(dh, dy, w_2);
        product<8>(z, ln2, w_1);
        ps_wgmma_commit();
        ps_wgmma_wait<0>();
        ps_pin(dh);
        ps_pin(z);
        uint32_t kept[2] = {kept_ahead[0] >> 2 * (lane_id() % 4), kept_ahead[1] >> 2 * (lane_id() % 4)};
        if (j + 1 < hidden_chunks) {
            hidden_read(kept_ahead, p, tile, j + 1, side);
        }
        hidden_backward(z, dh, p, kept);
        fragment_pack<2>(hidden, z);
        fragment_store(hidden, p.operands.hidden, hidden_chunks, tile.index, j);
        fragment_pack<2>(d_hidden, dh);
        fragment_store(d_hidden, p.operands.d_hidden, hidden_chunks, tile.index, j);
        ps_wgmma_begin();
#pragma unroll
        for (int k = 0; k < 2; k++) {
            ps_wgmma_n128<0>(d_r, d_hidden[k], ps_wgmma_operand(ps_wgmma_place(w_1), 32 * k));
        }
        ps_wgmma_commit();
        ps_wgmma_wait<0>();
        ps_pin(d_r);
        ps_pin(d_hidden);
        weights.release();
    }
}

/* The thread's parked values, as rows_ahead. */
struct parked_ahead {
    float4 pass[PASSES][LANE_COLUMNS / 4];
};

static __device__ __forceinline__ struct parked_ahead unpark(const float4 *parked)
{
    struct parked_ahead ahead;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
#pragma unroll
        for (int k = 0; k < LANE_COLUMNS / 4; k++) {
            ahead.pass[i][k] = ps_load_keep(parked + (i * (LANE_COLUMNS / 4) + k) * THREADS + threadIdx.x);
        }
    }
    return ahead;
}

static __device__ __forceinline__ void rest_next(float (&x)[LANE_COLUMNS], struct parked_ahead &ahead)
{
#pragma unroll
    for (int k = 0; k < LANE_COLUMNS / 4; k++) {
        const float4 v = ahead.pass[0][k];
        x[4 * k] = v.x;
        x[4 * k + 1] = v.y;
        x[4 * k + 2] = v.z;
        x[4 * k + 3] = v.w;
#pragma unroll
        for (int i = 1; i < PASSES; i++) {
            ahead.pass[i - 1][k] = ahead.pass[i][k];
        }
    }
}

static __device__ __forceinline__ void rest_next(float (&x)[LANE_COLUMNS], struct rows_ahead &ahead)
{
    row_unpack(x, rows_next(ahead));
}

/* Both LayerNorms' backward over the warp's rows; stage: the gradient of its output, in fp32; input: r or u. LN2: dr = that of its
 * input + dy (rest), to `parked` in fp32, and dropped to the panels of `operand`. LN1: du = that of its input + the parked (rest).
 * sums: see add_column_sums. */
template <bool LN1, typename INPUT, typename REST>
static __device__ __forceinline__ void layernorm_backward(const struct arguments &p, const struct tile &tile, unsigned char *stage,
                                                          const float2 *stats, const float *gamma_vector, float *sums, INPUT &input,
                                                          REST &rest, uint32_t &kept, float4 *parked, unsigned char *operand)
{
    const int d = p.d, first = first_row();
    float column_sums[2 * LANE_COLUMNS];
#pragma unroll
    for (int i = 0; i < 2 * LANE_COLUMNS; i++) {
        column_sums[i] = 0.0f;
    }
#pragma unroll 1
    for (int i = 0; i < PASSES; i++) {
        const int row = first + pass_row(i);
        float x[LANE_COLUMNS], dz[LANE_COLUMNS], gamma[LANE_COLUMNS];
        row_unpack(x, rows_next(input));
        sum_row(dz, stage, row);
        const float2 s = stats[row];
        row_vector(gamma, gamma_vector);
        const float shift = -s.x * s.y, shifts[2] = {lane_column(0) < d ? shift : 0.0f, lane_column(1) < d ? shift : 0.0f};
#pragma unroll
        for (int k = 0; k < LANE_COLUMNS; k++) {
            x[k] = fmaf(x[k], s.y, shifts[k / 8]);
        }
        row_normalise_backward(dz, x, s.y, p.per, gamma, column_sums);
        rest_next(x, rest);
#pragma unroll
        for (int k = 0; k < LANE_COLUMNS; k++) {
            dz[k] += x[k];
        }
        if (LN1) {
            row_write(p.du + tile.half_row * d, d, row, tile.valid, row_pack(dz));
        } else {
#pragma unroll
            for (int k = 0; k < LANE_COLUMNS / 4; k++) {
                ps_store_keep(parked + (i * (LANE_COLUMNS / 4) + k) * THREADS + threadIdx.x,
                              make_float4(dz[4 * k], dz[4 * k + 1], dz[4 * k + 2], dz[4 * k + 3]));
            }
            row_drop(dz, p.attention, kept_next(kept));
            row_stage(operand, row, row_pack(dz));
        }
    }
    add_column_sums(sums, column_sums);
}

/* The warp's column sums; found anew each time, else they would be kept in memory. */
static __device__ __forceinline__ float *own_sums(const struct arguments &p)
{
    int block = blockIdx.x, warp = warp_id();
    asm volatile("" : "+r"(block), "+r"(warp));
    return p.warp_sums + ((int64_t)block * WARPS + warp) * NORM_SUMS;
}

template <int KT, int E>
static __global__ void __launch_bounds__(THREADS, 1)
    layer_backward(const __grid_constant__ struct arguments p, const __grid_constant__ struct gradient_arguments gradients)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    if ((int)blockIdx.x >= p.blocks) {
        gradient_block(gradients, shared, blockIdx.x - p.blocks);
        return;
    }
    __shared__ uint64_t barriers[STAGES + (STAGES + 1) / 2]; /* and how many warps have released each */
    const int warp = uniform_warp_id(), half_index = warp / (WARPS / 2), side = warp / 4 % 2;
    unsigned char *halves = shared + STAGES * STAGE_BYTES, *half = halves + half_index * HALF_BYTES;
    unsigned char *dr = half + 4 * PANEL_BYTES, *heads = half + HEADS_PANEL * PANEL_BYTES;
    const uint32_t half_address = ps_shared_address(halves) + half_index * HALF_BYTES;
    float *vectors = (float *)(halves + 2 * HALF_BYTES);
    unsigned char *aside = (unsigned char *)(vectors + VECTORS) + 16 * warp;
    float2 *stats = (float2 *)((unsigned char *)(vectors + VECTORS) + ASIDE_BYTES) + 64 * half_index;
    float *softmax = (float *)((unsigned char *)(vectors + VECTORS) + ASIDE_BYTES) + 2 * ROWS;
    float4 *parked = (float4 *)p.parked + (int64_t)blockIdx.x * (ROWS * D / 4);
    const int d = p.d;
    const int tiles = tiles_of_block(p);
    first_prefetch(p, p.r);
    first_prefetch(p, p.dy);
    struct weight_ring<true> weights;
    weights.start(p, ps_shared_address(shared), ps_shared_address(barriers), tiles);
    if (tiles > 0) {
        int index = blockIdx.x, side_of = half_index;
        asm volatile("" : "+r"(index), "+r"(side_of)); /* as in first_prefetch */
        grid_begin_once(p, 0, tiles);
        const struct tile tile = tile_at(p, index, side_of);
        feed_forward_stage(p, tile, dr, heads, softmax);
        kept_prefetch(p, tile);
    }
    load_vectors(p, vectors);
    if (p.first_norms) {
        float *const sums = own_sums(p);
        for (int i = lane_id(); i < NORM_SUMS; i += 32) {
            sums[i] = 0.0f;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        if (i > 0) {
            grid_begin_once(p, i, tiles);
        }
        const struct tile tile = tile_at(p, blockIdx.x + i * p.blocks, half_index);
        uint32_t hidden_kept[2];
        hidden_read(hidden_kept, p, tile, 0, side);
        feed_forward_operands(p, vectors, dr, heads, softmax, half, half + 2 * PANEL_BYTES, stats);
        for (int k = threadIdx.x; k < tile.sequences * p.N * p.heads; k += THREADS) {
            ps_copy_async4(softmax + k, p.softmax + tile.row * p.heads + k);
        }
        rows_stage(heads, p.u + tile.half_row * d, d, tile.valid); /* as softmax, where the thread has read what was there */
        ps_publish();
        half_sync();
        store_operand(p.operands.ln2, 2, tile.index, warp, half);
        store_operand(p.operands.dy, 2, tile.index, warp, half + 2 * PANEL_BYTES);
        struct rows_ahead dy;
        uint32_t kept;
        {
            float x[D / 8][4];
            feed_forward_backward(p, weights, tile, vectors, side, half_address, half_address + 2 * PANEL_BYTES, hidden_kept, x);
            half_stores_wait(warp);
            half_sync();
            dy = rows_read(p.dy + tile.half_row * d, d, tile.valid);
            kept = kept_word(p.attention, p.kept.attention, tile.number);
            sums_of_sides(half, x);
        }
        {
            struct rows_kept r = {dr, 0}; /* each row until its gradient takes its place */
            half_sync();
            layernorm_backward<false>(p, tile, half, stats, vectors + LN2_GAMMA, own_sums(p) + 2 * D, r, dy, kept, parked, dr);
        }
        ps_copy_wait();
        struct rows_ahead u = rows_staged(heads);
        ps_publish();
        half_sync();
        store_operand(p.operands.dr, 2, tile.index, warp, dr);
        rows_normalise(half + Q_PANEL * PANEL_BYTES, stats, u, vectors + LN1_GAMMA, d, p.per, p.epsilon);
        ps_publish();
        {
            float d_heads[8][4];
            ps_zero(d_heads);
            const uint32_t left = weights.take(), right = weights.take();
            ps_wgmma_begin();
            product_transposed<8>(d_heads, half_address + 4 * PANEL_BYTES, side ? right : left);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(d_heads);
            weights.release();
            store_panel(heads + side * PANEL_BYTES, d_heads, 64);
        }
        half_stores_wait(warp);
        half_sync();
        store_operand(p.operands.a, 2, tile.index, warp, half + Q_PANEL * PANEL_BYTES);
        project_qkv(weights, half, half_address, warp, vectors, p.scale * PS_LOG2_E, tile.valid);
        if (i + 1 < tiles) {
            const struct tile next = tile_at(p, blockIdx.x + (i + 1) * p.blocks, half_index);
            rows_prefetch(p.r + next.half_row * d, d, next.valid);
            rows_prefetch(p.dy + next.half_row * d, d, next.valid);
            kept_prefetch(p, next);
        }
        __syncthreads();
        attention_backward<KT, E>(p, ps_shared_address(halves), ps_shared_address(aside), softmax, tile.sequences);
        ps_publish();
        __syncthreads();
        store_operand(p.operands.dqkv, 6, tile.index, warp, half);
        store_operand(p.operands.merged, 2, tile.index, warp, heads);
        {
            float x[8][4];
            struct parked_ahead rest = unpark(parked);
            u = rows_read(p.u + tile.half_row * d, d, tile.valid);
            ps_zero(x);
#pragma unroll
            for (int c = 0; c < 6; c++) {
                const uint32_t stage = weights.take();
                ps_wgmma_begin();
                product_transposed<4>(x, half_address + c * PANEL_BYTES, stage + side * PANEL_BYTES);
                ps_wgmma_commit();
                if (c == 2 || c == 4) { /* those before are done */
                    ps_wgmma_wait<1>();
                    weights.release();
                }
            }
            ps_wgmma_wait<0>();
            ps_pin(x);
            weights.release();
            half_stores_wait(warp);
            half_sync();
            if (i + 1 < tiles) {
                const struct tile next = tile_at(p, blockIdx.x + (i + 1) * p.blocks, half_index);
                feed_forward_stage(p, next, dr, heads, softmax);
            }
            sums_store<0, false>(half, side, x);
            half_sync();
            uint32_t none = 0;
            layernorm_backward<true>(p, tile, half, stats, vectors + LN1_GAMMA, own_sums(p), u, rest, none, parked, NULL);
        }
    }
    if (!p.last_norms && (int)blockIdx.x < p.norm_blocks) {
        return;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NORM_SUMS; i += THREADS) {
        const float *from = p.warp_sums + (int64_t)blockIdx.x * WARPS * NORM_SUMS + i;
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            sum += from[w * NORM_SUMS];
        }
        p.norm_sums[(int64_t)blockIdx.x * NORM_SUMS + i] = sum;
    }
}

/* The weights' gradients of the last chunk. */
static __global__ void __launch_bounds__(THREADS, 1) weight_gradients(const __grid_constant__ struct gradient_arguments p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    gradient_block(p, shared, blockIdx.x);
}

/* The gradient at the part's column `right` of its right operand and column `left` of its left one += v. */
static __device__ __forceinline__ void add_weight(const struct gradient_arguments &p, const struct gradient_job &job, int part,
                                                  int layer, int right, int left, float v)
{
    const struct ps_encoder_large_gradients &g = p.gradients;
    int column = right + PART_ROWS * (part % 2), rows = p.d, columns = p.d, width = p.d;
    float *to = g.w_o;
    if (job.kind == GRADIENT_1) {
        column = hidden_column(right + PART_ROWS * (job.first + part));
        columns = width = p.f;
        to = g.w_1;
    } else if (job.kind == GRADIENT_2) {
        left = hidden_column(left + PART_ROWS * job.first + PART_COLUMNS * (part / 2));
        rows = p.f;
        to = g.w_2;
    } else if (job.kind == GRADIENT_QK || part < 2) {
        width = 3 * p.d;
        to = g.w_qkv + (job.kind == GRADIENT_QK ? part / 2 : 2) * p.d;
    }
    if (left < rows && column < columns) {
        to[layer * g.matrix_stride + (int64_t)left * width + column] += v;
    }
}

/* The bias's gradient at the part's column `right` += v. */
static __device__ __forceinline__ void add_bias(const struct gradient_arguments &p, const struct gradient_job &job, int part,
                                                int layer, int right, float v)
{
    const struct ps_encoder_large_gradients &g = p.gradients;
    int column = right + PART_ROWS * (part % 2), columns = p.d;
    float *to = g.b_o;
    if (job.kind == GRADIENT_1) {
        column = hidden_column(right + PART_ROWS * (job.first + part));
        columns = p.f;
        to = g.b_1;
    } else if (job.kind == GRADIENT_2) {
        columns = part < 2 && job.first == 0 ? p.d : 0;
        to = g.b_2;
    } else if (job.kind == GRADIENT_QK || part < 2) {
        to = g.b_qkv + (job.kind == GRADIENT_QK ? part / 2 : 2) * p.d;
    }
    if (column < columns) {
        to[layer * g.vector_stride + column] += v;
    }
}

static __device__ __forceinline__ float4 sum_of(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Gradients += their partial sums. Blocks: those of the parts, whose threads add up every second slice of 4 floats, two threads for
 * the same ones; then LayerNorm's, for each layer from the last on. */
static __global__ void __launch_bounds__(32 * ADD_WARPS) add_gradients(const __grid_constant__ struct gradient_arguments p)
{
    __shared__ float4 sums[32 * ADD_WARPS / 2];
    const int lane = lane_id(), warp = warp_id(), parts = p.jobs_count * PARTS, blocks = parts * ADD_BLOCKS + NORM_SUMS / 32;
    const int number = blockIdx.x / blocks, layer = p.layers - 1 - number, block = blockIdx.x % blocks, column = block / ADD_BLOCKS;
    ps_grid_begin();
    if (column < parts) {
        const struct gradient_job &job = p.jobs[column / PARTS];
        const int part = column % PARTS, n = block % ADD_BLOCKS, thread = threadIdx.x % 128, odd = threadIdx.x / 128;
        if (part >= job_parts(job)) {
            return;
        }
        const bool biases = n == PART_COLUMNS / 8;
        const int64_t place = (int64_t)column * (PART_FLOATS / 4) + n * 128 + thread, slice = (int64_t)parts * (PART_FLOATS / 4);
        const float4 *beside = (const float4 *)p.beside + number * p.most_slices * slice + place;
        const float4 *last = (const float4 *)p.partials + place;
        const bool there = !biases || thread < PART_ROWS / 4;
        const int beside_slices = there && (layer || p.first_beside) ? job.usual_slices : 0;
        const int last_slices = there && layer == 0 ? job.slices : 0;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int s = odd; s < beside_slices; s += 2) {
            sum = sum_of(sum, beside[s * slice]);
        }
#pragma unroll 8
        for (int s = odd; s < last_slices; s += 2) {
            sum = sum_of(sum, last[s * slice]);
        }
        if (odd) {
            sums[thread] = sum;
        }
        __syncthreads();
        if (odd) {
            return;
        }
        sum = sum_of(sum, sums[thread]);
        if (!biases) {
            const int row = thread / 4 % 8 + 16 * (thread / 32), first = 8 * n + 2 * (thread % 4);
            add_weight(p, job, part, layer, row, first, sum.x);
            add_weight(p, job, part, layer, row, first + 1, sum.y);
            add_weight(p, job, part, layer, row + 8, first, sum.z);
            add_weight(p, job, part, layer, row + 8, first + 1, sum.w);
        } else if (thread < PART_ROWS / 4) {
            const int first = 4 * thread;
            add_bias(p, job, part, layer, first, sum.x);
            add_bias(p, job, part, layer, first + 1, sum.y);
            add_bias(p, job, part, layer, first + 2, sum.z);
            add_bias(p, job, part, layer, first + 3, sum.w);
        }
        return;
    }
    const int index = (block - parts * ADD_BLOCKS) * 32 + lane, vector = index / D, place = index % D;
    float *out = (float *)sums, sum = 0.0f;
    for (int chunk = 0; chunk < 2; chunk++) {
        const float *from = p.norm_sums + (int64_t)(2 * number + chunk) * p.most_blocks * NORM_SUMS + index;
        const int all = p.norm_blocks[number > 0][chunk];
#pragma unroll 8
        for (int b = warp; b < all; b += ADD_WARPS) {
            sum += from[(int64_t)b * NORM_SUMS];
        }
    }
    out[warp * 32 + lane] = sum;
    __syncthreads();
    if (warp > 0 || place >= p.d) {
        return;
    }
#pragma unroll
    for (int i = 1; i < ADD_WARPS; i++) {
        sum += out[i * 32 + lane];
    }
    float *to = vector == 0   ? p.gradients.ln1_gamma
                : vector == 1 ? p.gradients.ln1_beta
                : vector == 2 ? p.gradients.ln2_gamma
                              : p.gradients.ln2_beta;
    to[layer * p.gradients.vector_stride + place] += sum;
}

/* ---- launchers ---- */

static int group_of(const struct ps_encoder_large *l)
{
    return (int)(ROWS / l->patches);
}

static enum ps_status supported(const struct ps_encoder_large *l)
{
    const int64_t d = l->d_model, e = l->n_heads > 0 && d % l->n_heads == 0 ? d / l->n_heads : 0;
    if (d > D || d % 8 || l->d_ff > MAX_F || l->d_ff % 8 || l->patches > 64 || (e != 8 && e != 16 && e != 32) ||
        l->sequences * l->patches > INT32_MAX / 2) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder layer on chip: d_model %lld, n_heads %lld, d_ff %lld, %lld patches of %lld sequences: d_model up to %d "
            "and d_ff up to %d (multiples of 8), heads of 8, 16 or 32, and up to 64 patches fit",
            (long long)d, (long long)l->n_heads, (long long)l->d_ff, (long long)l->patches, (long long)l->sequences, D, MAX_F);
    }
    if (l->context->shared_bytes < BACKWARD_BYTES) {
        return ps_fail(PS_UNSUPPORTED, "encoder layer on chip: needs %d bytes of shared memory a block, the device has %d",
                       (int)BACKWARD_BYTES, l->context->shared_bytes);
    }
    return PS_OK;
}

/* A weight [rows, parts * columns] for the copy engine: boxes of 64 rows and 64 columns of a part, zero outside, as panels. */
static enum ps_status weight_map(CUtensorMap *map, const void *weight, int64_t rows, int64_t parts, int64_t columns)
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
    PS_TRY(ps_cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
                         "cuTensorMapEncodeTiled"));
    const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)parts, (cuuint64_t)rows};
    const cuuint64_t strides[] = {(cuuint64_t)(2 * columns), (cuuint64_t)(2 * columns * parts)}; /* bytes, of all but the first */
    const cuuint32_t box[] = {64, 1, 64}, every[] = {1, 1, 1};
    if (!function || ((PFN_cuTensorMapEncodeTiled_v12000)function)(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, (void *)weight, sizes,
                                                                   strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                                                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
        return ps_fail(PS_DEVICE, "cuda: encoder layer: no tensor map of a weight [%lld, %lld]", (long long)rows,
                       (long long)(parts * columns));
    }
    return PS_OK;
}

/* Of dropout's bits in `kept`: bytes from its start. */
struct kept_places {
    size_t hidden, attention, output, bytes;
};

static struct kept_places kept_places_of(const struct ps_encoder_large *l)
{
    const size_t rows = (size_t)(l->sequences * l->patches), tiles = (size_t)((l->sequences + group_of(l) - 1) / group_of(l));
    struct kept_places places = {};
    places.attention = l->hidden.threshold ? rows * 2 * sizeof(uint32_t) * (size_t)((l->d_ff + CHUNK - 1) / CHUNK) : 0;
    places.output = places.attention + (l->attention.threshold ? tiles * THREADS * sizeof(uint32_t) : 0);
    places.bytes = places.output + (l->output.threshold ? tiles * THREADS * sizeof(uint32_t) : 0);
    return places;
}

static enum ps_status arguments_of(const struct ps_encoder_large *l, struct arguments *arguments)
{
    struct arguments p = {};
    PS_TRY(weight_map(&p.weights[WEIGHT_QKV], l->w_qkv, l->d_model, 3, l->d_model));
    PS_TRY(weight_map(&p.weights[WEIGHT_O], l->w_o, l->d_model, 1, l->d_model));
    PS_TRY(weight_map(&p.weights[WEIGHT_1], l->w_1, l->d_model, 1, l->d_ff));
    PS_TRY(weight_map(&p.weights[WEIGHT_2], l->w_2, l->d_ff, 1, l->d_model));
    p.sequences = (int)l->sequences;
    p.N = (int)l->patches;
    p.d = (int)l->d_model;
    p.heads = (int)l->n_heads;
    p.f = (int)l->d_ff;
    p.group = group_of(l);
    p.epsilon = l->epsilon;
    p.per = 1.0f / (float)l->d_model;
    p.scale = 1.0f / sqrtf((float)(l->d_model / l->n_heads));
    p.attention = l->attention;
    p.hidden = l->hidden;
    p.output = l->output;
    p.u = (const real16 *)l->u;
    p.r = (real16 *)l->residual;
    p.softmax = (float *)l->softmax;
    const struct kept_places places = kept_places_of(l);
    p.kept.hidden = (uint32_t *)((char *)l->kept + places.hidden);
    p.kept.attention = (uint32_t *)((char *)l->kept + places.attention);
    p.kept.output = (uint32_t *)((char *)l->kept + places.output);
    p.vectors = l->vectors;
    *arguments = p;
    return PS_OK;
}

typedef void forward_kernel(const struct arguments);
typedef void backward_kernel(const struct arguments, const struct gradient_arguments);

template <int E> static forward_kernel *forward_for(int64_t N)
{
    static forward_kernel *const kernels[4] = {layer_forward<1, E>, layer_forward<2, E>, layer_forward<3, E>, layer_forward<4, E>};
    return kernels[(N - 1) / 16];
}

template <int E> static backward_kernel *backward_for(int64_t N)
{
    static backward_kernel *const kernels[4] = {layer_backward<1, E>, layer_backward<2, E>, layer_backward<3, E>,
                                                layer_backward<4, E>};
    return kernels[(N - 1) / 16];
}

static enum ps_status shared_bytes(const void *kernel, int bytes)
{
    return ps_cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                         "encoder layer: shared memory");
}

/* y = the layer of u; residual = r. y real16 [S, N, d], 16-byte aligned like every such tensor here. */
static enum ps_status forward_layer(const struct ps_encoder_large *l, void *y)
{
    PS_TRY(supported(l));
    struct arguments p;
    PS_TRY(arguments_of(l, &p));
    p.y = (real16 *)y;
    const int64_t e = l->d_model / l->n_heads, tiles = (l->sequences + p.group - 1) / p.group, all = l->context->multiprocessors;
    forward_kernel *kernel = e == 8    ? forward_for<8>(l->patches)
                             : e == 16 ? forward_for<16>(l->patches)
                                       : forward_for<32>(l->patches);
    PS_TRY(shared_bytes((const void *)kernel, FORWARD_BYTES));
    /* Two launches of whole waves, so that blocks of the next fill those that are left empty by the last one of a layer. */
    const int64_t waves = (tiles + all - 1) / all, most = (waves + 1) / 2 * all;
    for (int64_t first = 0; first < tiles; first += most) {
        const int64_t mine = tiles - first < most ? tiles - first : most, sequences = first * p.group;
        p.sequences = (int)(l->sequences - sequences < mine * p.group ? l->sequences - sequences : mine * p.group);
        p.first = sequences * l->patches;
        p.first_tile = (int)first;
        p.blocks = (int)(mine < all ? mine : all);
        p.wait = waves == 1 || (first == 0 && l->number + 1 == l->layers);
        ps_cuda_launch(l->context, kernel, (unsigned)p.blocks, THREADS, FORWARD_BYTES, p);
        PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, forward"));
    }
    return PS_OK;
}

/* How the launches share the work: chunks of a layer's tiles, each a launch of layer_backward, whose last blocks form the weights'
 * gradients of the chunk before; those of the last chunk have a launch of their own, and one more adds everything up. */
struct plan {
    int tiles, chunks;                                 /* of a chunk, but for the last; of a layer */
    int jobs, slices;                                  /* of weights' gradients; of a job beside backward */
    int most_slices, gradient_blocks, blocks;          /* of GRADIENT_VO; of all jobs; those that are left for tiles */
    int last_slices;                                   /* of a job, of the last chunk */
    size_t a, dqkv, merged, dr, ln2, d_hidden, hidden; /* operands of a chunk: bytes from its start, */
    size_t dy, operands;                               /* and of all; there are three of them */
    size_t parked, warp_sums;                          /* of a launch; there are two */
    size_t norm_sums, partials, bytes;                 /* the workspace: [3] operands, [2] parked and warp_sums, then these; the
                                                          last chunk's partial sums lie where operands of an older one were */
};

static size_t part(size_t *end, int64_t bytes)
{
    const size_t begin = *end;
    *end += ((size_t)bytes + 255) / 256 * 256;
    return begin;
}

static int pieces_of(int hidden_panels)
{
    return (hidden_panels + JOB_PANELS - 1) / JOB_PANELS;
}

/* A tile takes 45 us, and its gradients 2 times 0.8 us in each of the jobs: one multiprocessor in 26 keeps up with the others, with
 * one more for GRADIENT_VO, which brings more bytes. Chunks: three tiles a block, and three chunks' operands at most 351 MiB. */
static struct plan plan_of(const struct ps_encoder_large *l)
{
    struct plan plan = {};
    const int64_t panels = (l->d_ff + 63) / 64, f = 64 * panels, tile = 2 * ROWS * (8 * D + 2 * f);
    const int all = l->context->multiprocessors;
    plan.jobs = 2 + 2 * pieces_of((int)panels);
    plan.slices = all < 26 ? 1 : all / 26;
    plan.most_slices = plan.slices + 1;
    plan.gradient_blocks = plan.slices * (plan.jobs - 1) + plan.most_slices;
    plan.blocks = all > plan.gradient_blocks ? all - plan.gradient_blocks : 1;
    plan.last_slices = all / plan.jobs > plan.most_slices ? all / plan.jobs : plan.most_slices;
    const int64_t tiles = (l->sequences + group_of(l) - 1) / group_of(l), fit = ((int64_t)351 << 20) / (3 * tile);
    const int64_t three = 3 * plan.blocks, most = three < fit ? three : fit;
    plan.chunks = (int)((tiles + most - 1) / most);
    plan.tiles = (int)((tiles + plan.chunks - 1) / plan.chunks);
    plan.chunks = (int)((tiles + plan.tiles - 1) / plan.tiles);
    const int64_t rows = (tiles < most ? tiles : most) * ROWS; /* so that fewer sequences never need more */
    plan.a = part(&plan.operands, 2 * rows * D);
    plan.dqkv = part(&plan.operands, 6 * rows * D);
    plan.merged = part(&plan.operands, 2 * rows * D);
    plan.dr = part(&plan.operands, 2 * rows * D);
    plan.ln2 = part(&plan.operands, 2 * rows * D);
    plan.d_hidden = part(&plan.operands, 2 * rows * f);
    plan.hidden = part(&plan.operands, 2 * rows * f);
    plan.dy = part(&plan.operands, 2 * rows * D);
    const int64_t partials = plan.jobs * PARTS * (int64_t)(4 * PART_FLOATS); /* of a slice */
    const size_t last_partials = plan.last_slices * partials;                /* where operands of an older chunk were */
    plan.operands = plan.operands > last_partials ? plan.operands : last_partials;
    plan.bytes = 3 * plan.operands;
    plan.parked = (size_t)4 * all * ROWS * D;
    plan.warp_sums = (size_t)4 * all * WARPS * NORM_SUMS;
    part(&plan.bytes, (int64_t)(2 * (plan.parked + plan.warp_sums)));
    plan.norm_sums = part(&plan.bytes, l->layers * 2 * 4 * all * NORM_SUMS);
    plan.partials = part(&plan.bytes, l->layers * plan.most_slices * partials);
    return plan;
}

/* Operands of launch number n. */
static struct operands operands_of(const struct plan &plan, char *workspace, int64_t n)
{
    char *w = workspace + n % 3 * plan.operands;
    return {(real16 *)(w + plan.a),   (real16 *)(w + plan.dqkv),     (real16 *)(w + plan.merged), (real16 *)(w + plan.dr),
            (real16 *)(w + plan.ln2), (real16 *)(w + plan.d_hidden), (real16 *)(w + plan.hidden), (real16 *)(w + plan.dy)};
}

/* Of the chunk of launch number n; last: of all, in a launch of its own. */
static struct gradient_arguments gradients_of(const struct ps_encoder_large *l, const struct plan &plan, char *workspace, int64_t n,
                                              bool last)
{
    const struct operands o = operands_of(plan, workspace, n);
    const int panels = ((int)l->d_ff + 63) / 64, chunk = (int)(n % plan.chunks);
    const int64_t tiles = (l->sequences + group_of(l) - 1) / group_of(l), number = n / plan.chunks;
    struct gradient_arguments g = {};
    g.d = (int)l->d_model;
    g.f = (int)l->d_ff;
    g.layers = (int)l->layers;
    g.row_blocks = 2 * (int)(chunk + 1 < plan.chunks ? plan.tiles : tiles - (int64_t)chunk * plan.tiles);
    g.add = !last && chunk > 0;
    g.partials = last ? (float *)(workspace + (n + 1) % 3 * plan.operands)
                      : (float *)(workspace + plan.partials) + number * plan.most_slices * plan.jobs * PARTS * PART_FLOATS;
    const auto panels_of = [](const real16 *from, int first) { return from + (int64_t)first * (64 * 64); };
    g.jobs[g.jobs_count++] = {GRADIENT_QK, 0, 0, 3, 0, 0, {{o.a, 2, 2}, {o.dqkv, 6, 2}, {panels_of(o.dqkv, 2), 6, 2}}};
    g.jobs[g.jobs_count++] = {
        GRADIENT_VO, 0, 0, 4, 0, 0, {{o.a, 2, 2}, {panels_of(o.dqkv, 4), 6, 2}, {o.merged, 2, 2}, {o.dr, 2, 2}}};
    const int pieces = pieces_of(panels);
    for (int i = 0, first = 0; i < pieces; i++) { /* an even number of panels each, but for the last */
        const int rest = panels - first, wide = ((rest + pieces - i - 1) / (pieces - i) + 1) / 2 * 2;
        const int count = wide < rest ? wide : rest;
        struct gradient_job &one = g.jobs[g.jobs_count++], &two = g.jobs[g.jobs_count++];
        one = {GRADIENT_1, first, count, 0, 0, 0, {{o.ln2, 2, 2}}};
        two = {GRADIENT_2, first, count, 0, 0, 0, {}};
        for (int k = 0; k < count; k += 2) {
            const int both = count - k < 2 ? 1 : 2;
            one.pairs[++one.pairs_count] = {panels_of(o.d_hidden, first + k), panels, both};
            two.pairs[two.pairs_count++] = {panels_of(o.hidden, first + k), panels, both};
        }
        one.pairs_count++;
        two.pairs[two.pairs_count++] = {o.dy, 2, 2};
        first += wide;
    }
    for (int i = 0; i < g.jobs_count; i++) {
        struct gradient_job &job = g.jobs[i];
        job.usual_slices = job.kind == GRADIENT_VO ? plan.most_slices : plan.slices;
        job.slices = last ? plan.last_slices : job.usual_slices;
    }
    return g;
}

/* du =, gradients += (fp32). du may be dy; dy, du real16 [S, N, d]. To be called for the last layer first, each with the same
 * workspace: the weights' gradients of all layers are complete after the first layer's call, which is given its own. */
static enum ps_status backward_layer(const struct ps_encoder_large *l, void *du, const void *dy,
                                     const struct ps_encoder_large_gradients *gradients, void *workspace)
{
    PS_TRY(supported(l));
    const struct plan plan = plan_of(l);
    const int64_t e = l->d_model / l->n_heads, tiles = (l->sequences + group_of(l) - 1) / group_of(l), number = l->number;
    const int all = l->context->multiprocessors;
    backward_kernel *kernel = e == 8    ? backward_for<8>(l->patches)
                              : e == 16 ? backward_for<16>(l->patches)
                                        : backward_for<32>(l->patches);
    PS_TRY(shared_bytes((const void *)kernel, BACKWARD_BYTES));
    char *w = (char *)workspace;
    struct arguments p;
    PS_TRY(arguments_of(l, &p));
    p.dy = (const real16 *)dy;
    p.du = (real16 *)du;
    int norm_blocks[2] = {}; /* of this layer's even and odd chunks */
    for (int chunk = 0; chunk < plan.chunks; chunk++) {
        const int64_t n = number * plan.chunks + chunk, first = (int64_t)chunk * plan.tiles, sequences = first * p.group;
        const int64_t mine = tiles - first < plan.tiles ? tiles - first : plan.tiles, most = n ? plan.blocks : all;
        char *const of_launch = w + 3 * plan.operands + n % 2 * (plan.parked + plan.warp_sums);
        p.sequences = (int)(l->sequences - sequences < mine * p.group ? l->sequences - sequences : mine * p.group);
        p.first = sequences * l->patches;
        p.first_tile = (int)first;
        p.blocks = (int)(plan.chunks == 1 && mine < most ? mine : most);
        p.operands = operands_of(plan, w, n);
        p.parked = (float *)of_launch;
        p.warp_sums = (float *)(of_launch + plan.parked);
        p.norm_sums = (float *)(w + plan.norm_sums) + (2 * number + chunk % 2) * all * NORM_SUMS;
        p.first_norms = chunk < 2; /* a layer's even launches share warp_sums, and so do the odd ones */
        p.last_norms = chunk + 2 >= plan.chunks;
        p.norm_blocks = plan.blocks;
        p.wait = n == 0 || plan.chunks == 1;
        norm_blocks[chunk % 2] = norm_blocks[chunk % 2] > p.blocks ? norm_blocks[chunk % 2] : p.blocks;
        struct gradient_arguments before = {};
        if (n) {
            before = gradients_of(l, plan, w, n - 1, false);
        }
        ps_cuda_launch(l->context, kernel, (unsigned)(p.blocks + (n ? plan.gradient_blocks : 0)), THREADS, BACKWARD_BYTES, p,
                       before);
        PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, backward"));
    }
    if (number + 1 < l->layers) {
        return PS_OK;
    }
    struct gradient_arguments g = gradients_of(l, plan, w, l->layers * plan.chunks - 1, true);
    g.gradients = *gradients;
    g.norm_sums = (const float *)(w + plan.norm_sums);
    g.beside = (const float *)(w + plan.partials);
    g.first_beside = plan.chunks > 1;
    g.most_slices = plan.most_slices;
    g.most_blocks = all;
    const int64_t first_tiles = plan.chunks > 1 ? plan.tiles : tiles;
    for (int chunk = 0; chunk < 2; chunk++) {
        g.norm_blocks[1][chunk] = norm_blocks[chunk];
        g.norm_blocks[0][chunk] = norm_blocks[chunk];
    }
    g.norm_blocks[0][0] = (int)(first_tiles < all ? first_tiles : all);
    PS_TRY(shared_bytes((const void *)weight_gradients, GRADIENT_BYTES));
    ps_cuda_launch(l->context, weight_gradients, (unsigned)(plan.last_slices * plan.jobs), THREADS, GRADIENT_BYTES, g);
    PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, weights' gradients"));
    ps_cuda_launch(l->context, add_gradients, (unsigned)(l->layers * (plan.jobs * PARTS * ADD_BLOCKS + NORM_SUMS / 32)),
                   32 * ADD_WARPS, 0, g);
    return ps_cuda_check(cudaGetLastError(), "encoder layer, sums of gradients");
}

/* ---- all layers ---- */

/* What a layer keeps: r (real16 [S, N, d]), the logarithm of softmax's sums (fp32 [S, h, N]) and dropout's bits. */
static size_t layer_kept_bytes(const struct ps_encoder_large *l)
{
    const int64_t rows = l->sequences * l->patches;
    const size_t one = (size_t)(2 * rows * l->d_model + 4 * rows * l->n_heads) + kept_places_of(l).bytes;
    return (one + 255) / 256 * 256;
}

/* Of any layer, without its memory. */
static struct ps_encoder_large sizes_of(const struct ps_kernels *k, const struct ps_encoder_small *r)
{
    struct ps_encoder_large l = {};
    l.sequences = r->sequences;
    l.patches = r->patches;
    l.d_model = r->d_model;
    l.n_heads = r->n_heads;
    l.d_ff = r->d_ff;
    l.layers = r->layers;
    l.epsilon = (float)r->epsilon;
    l.attention = l.hidden = l.output = r->dropout;
    l.context = ps_cuda(k);
    return l;
}

static struct ps_encoder_large layer_of(const struct ps_kernels *k, const struct ps_encoder_small *r, int64_t layer)
{
    const struct ps_encoder_layout *at = &r->offsets;
    const int64_t rows = r->sequences * r->patches * r->d_model, matrix = layer * at->matrix_stride;
    const char *weights = (const char *)r->weights;
    struct ps_encoder_large l = sizes_of(k, r);
    l.number = r->layers - 1 - layer;
    l.attention.site += 3 * (uint32_t)layer;
    l.hidden.site += 3 * (uint32_t)layer + 1;
    l.output.site += 3 * (uint32_t)layer + 2;
    l.u = (const char *)r->u + 2 * layer * rows;
    l.residual = (char *)r->kept + (size_t)layer * layer_kept_bytes(&l);
    l.softmax = (float *)((char *)l.residual + 2 * rows);
    l.kept = l.softmax + r->sequences * r->patches * r->n_heads;
    l.w_qkv = weights + 2 * (at->w_qkv + matrix);
    l.w_o = weights + 2 * (at->w_o + matrix);
    l.w_1 = weights + 2 * (at->w_1 + matrix);
    l.w_2 = weights + 2 * (at->w_2 + matrix);
    const float *p = r->parameters + layer * at->vector_stride;
    l.vectors = {p + at->ln1_gamma, p + at->ln1_beta, p + at->b_qkv, p + at->b_o,
                 p + at->ln2_gamma, p + at->ln2_beta, p + at->b_1,   p + at->b_2};
    return l;
}

static enum ps_status streamed_plan(const struct ps_kernels *k, const struct ps_encoder_small *r, struct ps_encoder_plan *plan)
{
    const struct ps_encoder_large l = sizes_of(k, r);
    PS_TRY(supported(&l));
    plan->kernels = "streamed/real16";
    plan->kept_bytes = layer_kept_bytes(&l) * (size_t)r->layers;
    return PS_OK;
}

static enum ps_encoder_span streamed_span(const struct ps_kernels *, const struct ps_encoder_small *,
                                          const struct ps_encoder_plan *)
{
    return PS_SPAN_LAYERS;
}

/* The rows are taken in chunks, so that it stays below 400 MiB whatever S, and 4 to 6 MB a layer. */
static size_t streamed_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_small *r, const struct ps_encoder_plan *)
{
    const struct ps_encoder_large l = sizes_of(k, r);
    return plan_of(&l).bytes;
}

static enum ps_status streamed_forward(const struct ps_kernels *k, const struct ps_encoder_small *r, const struct ps_encoder_plan *)
{
    const int64_t rows = r->sequences * r->patches * r->d_model;
    for (int64_t layer = 0; layer < r->layers; layer++) {
        const struct ps_encoder_large l = layer_of(k, r, layer);
        PS_TRY(forward_layer(&l, (char *)r->u + 2 * (layer + 1) * rows));
    }
    return PS_OK;
}

static enum ps_status streamed_backward(const struct ps_kernels *k, const struct ps_encoder_small *r,
                                        const struct ps_encoder_plan *)
{
    const struct ps_encoder_layout *at = &r->offsets;
    for (int64_t layer = r->layers; layer-- > 0;) {
        const struct ps_encoder_large l = layer_of(k, r, layer);
        float *matrix = r->gradients + layer * at->matrix_stride, *vector = r->gradients + layer * at->vector_stride;
        const struct ps_encoder_large_gradients g = {
            matrix + at->w_qkv,    matrix + at->w_o,   matrix + at->w_1,  matrix + at->w_2,       vector + at->ln1_gamma,
            vector + at->ln1_beta, vector + at->b_qkv, vector + at->b_o,  vector + at->ln2_gamma, vector + at->ln2_beta,
            vector + at->b_1,      vector + at->b_2,   at->matrix_stride, at->vector_stride};
        PS_TRY(backward_layer(&l, r->du, layer == r->layers - 1 ? r->dy : r->du, &g, r->workspace));
    }
    return PS_OK;
}

const struct ps_encoder_family ps_encoder_streamed = {streamed_plan, streamed_span, streamed_workspace_bytes, streamed_forward,
                                                      streamed_backward};

} // namespace PS_REAL16_SPACE
