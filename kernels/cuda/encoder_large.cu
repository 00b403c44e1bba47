/* One encoder layer, forward and backward, for d_model up to 128: bf16 operands on tensor cores, fp32 sums, softmax and LayerNorm.
 *
 * Why: at level gemm a layer's activations cross device memory about 40 times. Here a block of 256 threads owns the 128 rows of
 * G = 128/N whole sequences; they stay in registers and shared memory from LN1 to the residual out. A warp owns 16 rows through
 * every product, with its left operand in registers; between them q, k and v pass through shared memory, where a warp takes one
 * (sequence, head) at a time. The layer's weights (2 (4 d^2 + 2 d f) bytes: 256 KB at d 128, f 256) are more than an SM holds, so
 * they stream from L2 in chunks of 16 KB, four in flight, each used by all 128 rows.
 *
 * Counts, weather (d 128, h 16, f 256, N 42, R 112,896 rows, 896 tiles of 126 rows, 6.8 a block of 132), a layer:
 *   forward    device memory 512 B a row read, 512 written (58 + 58 MB, 27 us at 4.3 TB/s); weights from L2 256 KB a tile (235 MB,
 *              43 us at 5.5 TB/s, beside the arithmetic); 262 kFLOP a row in the products (33 MFLOP a tile: 16 k clocks of an SM at
 *              mma.sync's 2,060 FLOP a clock, 8.2 k at wgmma's 4,096) and 24 k in attention; B operands from shared memory 256 KB a
 *              warp, 2 MB a tile (16 k clocks at 128 B a clock: as much as the arithmetic; wgmma reads them once for 64 rows, 4 k);
 *              exponentials 16 heads x 42 x 48 a sequence and 256 tanh a row (8 k clocks a tile at 16 a clock); Philox 64 blocks a
 *              row, about 100 instructions each (6.3 k clocks a tile).
 *   backward   keeps r and each query's softmax sum from the forward pass (256 + 4 h bytes a row, once written and once read: 17
 * us), which saves the first of two rounds of exponentials (27 us), W_o's product and A v before the feed-forward part, and the
 * maxima, sums and divisions of the second round. 426 kFLOP a row in products (27 k clocks a tile with mma.sync) and 60 k in
 * attention. Weights from L2: 26 chunks, 416 KB a tile. Its code is what had to be small: straight-line code of 222 KB was fetched
 * from L2 for every tile (an SM caches 128 KB) at 15 clocks an instruction of a warp.
 *   weights'   dW needs 262 kFLOP a row and 512 KB of fp32 sums a layer. On chip it would take a cluster of four SMs, each with half
 *   gradients  its registers given to sums, and every operand sent to all four. Instead backward writes the operands once in bf16
 *              (a, dqkv, merged, dr, ln2_out, d_hidden, hidden, dy masked: 3 KB a row, 352 MB with the empty rows, 81 us of bandwidth
 *              beside the arithmetic), in the panels that the copy engine and wgmma take as they are, and one more kernel reads each
 *              of them once (82 us; 30 GFLOP, 38 us at wgmma's rate, beside it) and forms all products and bias gradients in 286
 *              parts of 128 x 128 sums (19 MB written, and read from L2 by their sum).
 *
 * Dropout is drawn again in backward. Sums over rows are taken in a fixed order; no atomics. */
#include "kernels/cuda/encoder_large.cuh"

#include "kernels/cuda/encoder_large_device.cuh"

typedef uint16_t bf16;

enum {
    D = 128,    /* d_model, padded with zeros */
    ROWS = 128, /* of a tile */
    WARPS = 8,
    THREADS = 32 * WARPS,
    CHUNK = 64, /* columns or rows of a weight staged at once */
    STAGES = 4,
    STAGE_BYTES = CHUNK * D * 2,
    QKV_STRIDE = 3 * D + 24, /* q, k, v of a row; 48 bytes more, so that 8 rows lie in different banks */
    ROW_STRIDE = D + 8,
    SUM_STRIDE = D + 8,   /* floats of a row of sums */
    SUM_HALF = D / 2 + 4, /* of a row: columns 4 .. 7 of each 8 */
    WARP_ROWS = ROWS / WARPS,
    MAX_F = 512,
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
    QKV_BYTES = ROWS * QKV_STRIDE * 2,
    ROW_BYTES = ROWS * ROW_STRIDE * 2,
    MAX_CHUNKS = 2 * (MAX_F / CHUNK) + 14, /* of a tile */
    CHUNK_BYTES = MAX_CHUNKS * 32,
    FORWARD_BYTES = STAGES * STAGE_BYTES + QKV_BYTES + VECTORS * 4 + CHUNK_BYTES,
    BACKWARD_BYTES = FORWARD_BYTES + ROW_BYTES + WARPS * NORM_SUMS * 4 + ROWS * 8, /* and the mean and 1/deviation of each row */
};
static_assert(WARP_ROWS * QKV_STRIDE * 2 >= WARP_ROWS * (SUM_STRIDE * 4 + ROW_STRIDE * 2),
              "a warp's rows of q, k, v hold both stages");

/* The operands of the weights' gradients, as the tensor cores and the copy engine take them: each tile's 128 rows in two blocks of
 * 64, a block in panels of 64 columns, a panel as in chunk_load below. In the rows without a sequence the right operands (dqkv, dr,
 * d_hidden, dy) are zero and the left ones finite. Panels: dqkv 6 (2 each for q, k and v), hidden and d_hidden f/64, the rest 2. */
struct operands {
    bf16 *a, *dqkv, *merged, *dr, *ln2, *d_hidden, *hidden, *dy;
};

struct arguments {
    int sequences, N, d, heads, f; /* sequences of this launch */
    int group;                     /* sequences of a tile */
    int64_t first;                 /* the launch's first row */
    float epsilon, scale;          /* scale: 1/sqrt(e) */
    struct ps_dropout attention, hidden, output;
    const bf16 *u, *w_qkv, *w_o, *w_1, *w_2;
    struct ps_encoder_large_vectors vectors;
    bf16 *r, *y;    /* forward's outputs; backward reads r and softmax */
    float *softmax; /* [S][h][N]: log2 of each query's sum of exponentials */
    const bf16 *dy;
    bf16 *du;
    struct operands operands;
    float *parked;    /* [blocks][ROWS * D]: dr while attention runs */
    float *norm_sums; /* [blocks][NORM_SUMS] */
};

/* ---- who owns what: lane 4 g + t of warp w owns rows 16 w + g and 16 w + g + 8, and of every 8 columns 2 t and 2 t + 1 ---- */

static __device__ __forceinline__ int lane_id()
{
    return threadIdx.x % 32;
}

static __device__ __forceinline__ int warp_id()
{
    return threadIdx.x / 32;
}

/* Local row of half 0 or 1. */
static __device__ __forceinline__ int own_row(int half)
{
    return 16 * warp_id() + lane_id() / 4 + 8 * half;
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

/* v[i] of lane t and v[t] of lane i of each quad change places: 16 bytes that one lane holds of one group of 8 columns become its
 * 4 bytes of four groups, and back. */
static __device__ __forceinline__ void quad_transpose(uint32_t (&v)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
        v[i] = odd ? got : v[i];
        v[i + 1] = odd ? v[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2);
        v[i] = high ? got : v[i];
        v[i + 2] = high ? v[i + 2] : got;
    }
}

/* ---- left operands: fragment[k][4] holds columns 16 k .. 16 k + 15 of the warp's rows as mma takes them; group n of 8 columns of
 * row half h is fragment[n / 2][2 (n % 2) + h] ---- */

/* Row `row` of the tile, columns 8 unit .. 8 unit + 7 of a panel. */
static __device__ __forceinline__ uint4 *operand_at(bf16 *operand, int panels, int tile, int row, int panel, int unit)
{
    const int64_t place = ((int64_t)(2 * tile + row / 64) * panels + panel) * 64 + row % 64;
    return (uint4 *)(operand + place * 64) + (unit ^ (row % 8));
}

/* The 64 columns of a panel. */
static __device__ __forceinline__ void fragment_store(const uint32_t (&fragment)[4][4], bf16 *operand, int panels, int tile,
                                                      int panel)
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                words[i] = fragment[2 * j + i / 2][2 * (i % 2) + half];
            }
            quad_transpose(words);
            *operand_at(operand, panels, tile, own_row(half), panel, 4 * j + t) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
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

/* ---- dropout ---- */

/* Draws for groups 4 j .. 4 j + 3 of 8 columns of own_row(half): words[i] has those of the lane's two columns of group 4 j + i. A
 * lane draws one block for a whole group, and the quad exchanges. row: the row's number in the tensor; blocks: of one row. */
static __device__ __forceinline__ void draw_groups(uint32_t (&words)[4], const struct ps_dropout &d, uint64_t step, int64_t row,
                                                   int blocks, int j)
{
    const uint32_t index = (uint32_t)(row * blocks) + 4 * j + lane_id() % 4;
    const struct ps_block block = ps_philox(d.seed, index, d.site, step);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        words[i] = block.word[i];
    }
    quad_transpose(words);
}

/* ---- weights: a ring of chunks in shared memory ---- */

/* A chunk is 64 columns of 128 rows ("tall") or 64 rows of 128 columns ("wide"), in panels of 64 columns: 128 bytes a row, its
 * units of 16 bytes exchanged by the row's number modulo 8, so that 8 rows of one unit lie in different banks. */
struct __align__(32) chunk
{
    const bf16 *from;
    int stride, rows, columns;      /* of the weight; what exists of the chunk, the rest is zero */
    int far, far_rows, far_columns; /* from a thread's first two units to its last two: elements; rows and columns */
};

/* rows, columns: what the weight has from here on. */
static __device__ __forceinline__ struct chunk chunk_of(const bf16 *from, int stride, int rows, int columns, bool wide)
{
    struct chunk c = {from, stride, rows, columns, wide ? CHUNK : CHUNK * stride, wide ? 0 : CHUNK, wide ? CHUNK : 0};
    return c;
}

static __device__ __forceinline__ void chunk_load(uint32_t stage, const struct chunk &c)
{
    const int row = threadIdx.x / 8, unit = threadIdx.x % 8;
    const uint32_t to = stage + row * 128 + ((unit ^ (row % 8)) << 4);
    const bf16 *from = c.from + row * c.stride + 8 * unit;
#pragma unroll
    for (int i = 0; i < 4; i++) { /* 32 rows of a panel each */
        const bool valid = row + 32 * (i % 2) + i / 2 * c.far_rows < c.rows && 8 * unit + i / 2 * c.far_columns < c.columns;
        ps_cp_async(to + 4096 * i, from + i % 2 * 32 * c.stride + i / 2 * c.far, valid);
    }
}

static __device__ __forceinline__ int at_most(int x, int most)
{
    return x < most ? x : most;
}

/* Columns 64 half .. of part 0, 1, 2 (q, k, v). */
static __device__ __forceinline__ struct chunk chunk_qkv(const struct arguments &p, int index)
{
    const int column = CHUNK * (index % 2);
    return chunk_of(p.w_qkv + (index / 2) * p.d + column, 3 * p.d, p.d, p.d - column, false);
}

static __device__ __forceinline__ struct chunk chunk_1(const struct arguments &p, int j)
{
    return chunk_of(p.w_1 + CHUNK * j, p.f, p.d, p.f - CHUNK * j, false);
}

static __device__ __forceinline__ struct chunk chunk_2(const struct arguments &p, int j)
{
    return chunk_of(p.w_2 + (int64_t)CHUNK * j * p.d, p.d, p.f - CHUNK * j, p.d, true);
}

/* Chunk number i of the tile, in the order in which forward uses them. */
static __device__ __forceinline__ struct chunk forward_chunk(const struct arguments &p, int i)
{
    if (i < 6) {
        return chunk_qkv(p, i);
    }
    if (i < 8) {
        const int column = CHUNK * (i - 6);
        return chunk_of(p.w_o + column, p.d, p.d, p.d - column, false);
    }
    return i % 2 ? chunk_2(p, (i - 9) / 2) : chunk_1(p, (i - 8) / 2);
}

static __device__ __forceinline__ struct chunk backward_chunk(const struct arguments &p, int i)
{
    const int hidden = (p.f + CHUNK - 1) / CHUNK;
    if (i < 2 * hidden) {
        return i % 2 ? chunk_1(p, i / 2) : chunk_2(p, i / 2);
    }
    i -= 2 * hidden;
    if (i < 2) {
        return chunk_of(p.w_o + (int64_t)CHUNK * i * p.d, p.d, p.d - CHUNK * i, p.d, true);
    }
    return chunk_qkv(p, (i - 2) % 6);
}

template <bool BACKWARD> struct weight_ring {
    uint32_t base;
    const struct chunk *chunks; /* of a tile, in shared memory */
    int tile_chunks, left;      /* chunks of a tile; chunks not yet asked for */
    int next, slot;             /* number in the tile of the next to ask for; slot of the next to use */

    __device__ __forceinline__ void ask(int into)
    {
        if (left > 0) {
            chunk_load(base + into * STAGE_BYTES, chunks[next]);
            left--;
            next = next + 1 == tile_chunks ? 0 : next + 1;
        }
        ps_cp_async_commit();
    }

    __device__ __forceinline__ void start(const struct arguments &p, uint32_t shared, struct chunk *list, int tiles)
    {
        const int hidden = (p.f + CHUNK - 1) / CHUNK;
        base = shared;
        chunks = list;
        tile_chunks = 2 * hidden + (BACKWARD ? 14 : 8);
        left = tiles * tile_chunks;
        next = 0;
        slot = 0;
        if ((int)threadIdx.x < tile_chunks) {
            list[threadIdx.x] = BACKWARD ? backward_chunk(p, threadIdx.x) : forward_chunk(p, threadIdx.x);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < STAGES - 2; i++) {
            ask(i);
        }
    }

    /* The next chunk, there for all threads until the call after the next; each call is a barrier of the block. So the products of
     * one chunk may be under way while the next is taken. */
    __device__ __forceinline__ uint32_t take()
    {
        ps_cp_async_wait<STAGES - 3>();
        ps_publish();
        __syncthreads();
        const uint32_t stage = base + slot * STAGE_BYTES;
        ask((slot + STAGES - 2) % STAGES);
        slot = (slot + 1) % STAGES;
        return stage;
    }
};

/* ---- products ---- */

/* Until at most PENDING of the batches that ..._begin started are under way; the registers of this one stay where they are until
 * here. With mma.sync they are done at once. */
template <int PENDING, int FIRST, int NT, int A0, int K, int N, int KA>
static __device__ __forceinline__ void product_wait(float (&sums)[N][4], const uint32_t (&a)[KA][4])
{
    ps_wgmma_wait<PENDING>();
#pragma unroll
    for (int n = FIRST; n < FIRST + NT; n++) {
        asm volatile("" : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])::"memory");
    }
#pragma unroll
    for (int k = A0; k < A0 + K; k++) {
        asm volatile("" ::"r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]), "r"(a[k][3]) : "memory");
    }
}

/* sums[FIRST + n] += a B for 8 groups of 8 columns, 16 K deep, a from fragment A0 on: B's row k and column n at row k, column n of
 * the panel. */
template <int K, int FIRST, int A0, int KA, int N>
static __device__ __forceinline__ void product_begin(float (&sums)[N][4], const uint32_t (&a)[KA][4], uint32_t panel)
{
    ps_wgmma_begin();
#pragma unroll
    for (int k = 0; k < K; k++) {
        ps_wgmma_n64<1>(sums + FIRST, a[A0 + k], ps_wgmma_operand(panel + k * 2048));
    }
    ps_wgmma_commit();
}

template <int K, int FIRST, int A0, int KA, int N>
static __device__ __forceinline__ void product(float (&sums)[N][4], const uint32_t (&a)[KA][4], uint32_t panel)
{
    product_begin<K, FIRST, A0>(sums, a, panel);
    product_wait<0, FIRST, 8, A0, K>(sums, a);
}

/* The same for NT groups (8 or 16), 64 PANELS deep, with B's row k and column n at row n, column k of the panel. */
template <int NT, int PANELS, int KA, int N>
static __device__ __forceinline__ void product_transposed_begin(float (&sums)[N][4], const uint32_t (&a)[KA][4], uint32_t panel)
{
    ps_wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4 * PANELS; k++) {
        const uint32_t place = panel + k / 4 * (NT * 1024) + k % 4 * 32;
        if constexpr (NT == 8) {
            ps_wgmma_n64<0>(sums, a[k], ps_wgmma_operand(place));
        } else {
            ps_wgmma_n128<0>(sums, a[k], ps_wgmma_operand(place));
        }
    }
    ps_wgmma_commit();
}

template <int NT, int PANELS, int KA, int N>
static __device__ __forceinline__ void product_transposed(float (&sums)[N][4], const uint32_t (&a)[KA][4], uint32_t panel)
{
    product_transposed_begin<NT, PANELS>(sums, a, panel);
    product_wait<0, 0, NT, 0, 4 * PANELS>(sums, a);
}

template <int N> static __device__ __forceinline__ void zero(float (&sums)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[n][i] = 0.0f;
        }
    }
}

/* ---- rows: between the products a warp takes its rows four at a time. Lane 8 g + c has, of row g of the four, columns 8 c .. 8 c
 * + 7 and 64 + 8 c .. 64 + 8 c + 7, x[0 .. 7] and x[8 .. 15]; rolled loops, since the backward kernel's code has to stay in the
 * instruction cache ---- */

enum { LANE_COLUMNS = 16, PASS_ROWS = 4, PASSES = WARP_ROWS / PASS_ROWS };

/* A lane's part of a row in bf16. */
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
static __device__ __forceinline__ struct row_words row_read(const bf16 *rows, int d, int row, int valid)
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

static __device__ __forceinline__ void row_write(bf16 *rows, int d, int row, int valid, const struct row_words &w)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row < valid && lane_column(i) < d) {
            *(uint4 *)(rows + (int64_t)row * d + lane_column(i)) = w.part[i];
        }
    }
}

/* To an operand of D columns. */
static __device__ __forceinline__ void row_write_operand(bf16 *operand, int tile, int row, const struct row_words &w)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        *operand_at(operand, 2, tile, row, i, lane_id() % 8) = w.part[i];
    }
}

/* To the warp's rows in shared memory, of which load_fragments makes an operand. */
static __device__ __forceinline__ void row_stage(bf16 *stage, int i, const struct row_words &w)
{
    bf16 *to = stage + pass_row(i) * ROW_STRIDE;
    *(uint4 *)(to + lane_column(0)) = w.part[0];
    *(uint4 *)(to + lane_column(1)) = w.part[1];
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

/* Sums of a product, [16, D], to the warp's fp32 rows in shared memory; row: the first of the two that the lane has. Column 8 n + 4
 * h + k is at SUM_HALF h + 4 n + k: no bank conflicts here nor in sum_row. */
template <int HALF> static __device__ __forceinline__ void sums_stage(float *stage, int row, const float (&x)[D / 8][4])
{
    const int t = lane_id() % 4;
    float *to = stage + row * SUM_STRIDE + (t / 2) * SUM_HALF + 2 * (t % 2);
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        *(float2 *)(to + 4 * n) = make_float2(x[n][2 * HALF], x[n][2 * HALF + 1]);
    }
}

static __device__ __forceinline__ void sum_row(float (&x)[LANE_COLUMNS], const float *stage, int row)
{
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 4; i++) {
        const float4 v = *(const float4 *)(stage + row * SUM_STRIDE + i % 2 * SUM_HALF + lane_column(i / 2) / 2);
        x[4 * i] = v.x;
        x[4 * i + 1] = v.y;
        x[4 * i + 2] = v.z;
        x[4 * i + 3] = v.w;
    }
}

static __device__ __forceinline__ void sum_row_store(float *stage, int row, const float (&x)[LANE_COLUMNS])
{
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 4; i++) {
        *(float4 *)(stage + row * SUM_STRIDE + i % 2 * SUM_HALF + lane_column(i / 2) / 2) =
            make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
}

/* x = drop(x), row number `row` of a tensor that is d wide. */
static __device__ __forceinline__ void row_drop(float (&x)[LANE_COLUMNS], const struct ps_dropout &drop, uint64_t step, int64_t row,
                                                int d)
{
    if (drop.threshold == 0) {
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const struct ps_block block = ps_philox(drop.seed, (uint32_t)(row * (d / 8)) + lane_column(i) / 8, drop.site, step);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float *pair = &x[8 * i + 2 * k];
            pair[0] = ps_dropped(drop, block.word[k] & 0xffffu, pair[0]);
            pair[1] = ps_dropped(drop, block.word[k] >> 16, pair[1]);
        }
    }
}

/* x = (x - mean) rstd of a row over its first d columns, 0 beyond; x is 0 there on entry. Returns mean, rstd. */
static __device__ __forceinline__ float2 row_normalise(float (&x)[LANE_COLUMNS], int d, float epsilon)
{
    const float per = 1.0f / (float)d;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        sum += x[i];
    }
    const float mean = row_sum(sum) * per;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        x[i] = lane_column(i / 8) < d ? x[i] - mean : 0.0f;
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
                                                              float rstd, int d, const float (&gamma)[LANE_COLUMNS],
                                                              float (&sums)[2 * LANE_COLUMNS])
{
    const float per = 1.0f / (float)d;
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
    for (int i = 0; i < 2; i++) {
        const float4 old = place[i];
        place[i] = make_float4(old.x + v[4 * i], old.y + v[4 * i + 1], old.z + v[4 * i + 2], old.w + v[4 * i + 3]);
    }
}

/* The operand LN(input) of the warp's rows, to its stage and, where these are not NULL, the rows' statistics and the operand to
 * device memory (tile: its number in the launch). */
static __device__ __forceinline__ void rows_normalise(bf16 *stage, float2 *stats, bf16 *to, int tile, const bf16 *input,
                                                      const float *gamma_beta, int d, float epsilon, int valid)
{
    const int first = WARP_ROWS * warp_id();
    float gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
    struct row_words next = row_read(input, d, first + pass_row(0), valid);
    row_vector(gamma, gamma_beta);
    row_vector(beta, gamma_beta + D);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < PASSES; i++) {
        float x[LANE_COLUMNS];
        row_unpack(x, next);
        if (i + 1 < PASSES) {
            next = row_read(input, d, first + pass_row(i + 1), valid);
        }
        const float2 s = row_normalise(x, d, epsilon);
        if (stats && lane_id() % 8 == 0) {
            stats[pass_row(i)] = s;
        }
        const struct row_words out = row_affine(x, gamma, beta);
        row_stage(stage, i, out);
        if (to) {
            row_write_operand(to, tile, first + pass_row(i), out);
        }
    }
    __syncwarp();
}

/* ---- attention: a warp takes one (sequence, head) at a time ---- */

/* Address of row `first + lane % 16` of a sequence, rows beyond the last replaced by the last. */
static __device__ __forceinline__ uint32_t sequence_row(uint32_t sequence, int stride, int first, int N)
{
    return sequence + at_most(first + lane_id() % 16, N - 1) * (2 * stride);
}

/* sums += a b' over e = 8 J: rows of a against the 8 rows of b whose fragments these are. */
template <int J>
static __device__ __forceinline__ void head_product(float (&sums)[4], const uint32_t (&a)[J][2], const uint32_t (&b)[J])
{
    if constexpr (J == 1) {
        ps_mma_k8(sums, a[0][0], a[0][1], b[0]);
    } else {
#pragma unroll
        for (int j = 0; j < J; j += 2) {
            ps_mma_k16(sums, a[j][0], a[j][1], a[j + 1][0], a[j + 1][1], b[j], b[j + 1]);
        }
    }
}

/* Fragments of KT times 16 rows, e = 8 J columns, as b of head_product. */
template <int KT, int J>
static __device__ __forceinline__ void load_rows(uint32_t (&b)[2 * KT][J], uint32_t sequence, int stride, int N)
{
#pragma unroll
    for (int kt = 0; kt < KT; kt++) {
#pragma unroll
        for (int j = 0; j < J; j++) {
            uint32_t r[2];
            ps_ldmatrix_x2(r, sequence_row(sequence, stride, 16 * kt, N) + 16 * j);
            b[2 * kt][j] = r[0];
            b[2 * kt + 1][j] = r[1];
        }
    }
}

/* scores = q k' of 16 queries over KT times 16 keys, those from N on -infinity. */
template <int KT, int J>
static __device__ __forceinline__ void raw_scores(float (&scores)[2 * KT][4], const uint32_t (&q)[J][2],
                                                  const uint32_t (&k)[2 * KT][J], int N)
{
    const int t = lane_id() % 4;
    zero(scores);
#pragma unroll
    for (int n = 0; n < 2 * KT; n++) {
        head_product<J>(scores[n], q, k[n]);
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

/* exp2(exponent (scores - the largest of the row)), the inverse of their sum, and the log2 of the sum without the shift. */
template <int KT>
static __device__ __forceinline__ void softmax_scores(float (&scores)[2 * KT][4], float (&inverse)[2], float (&log_sum)[2],
                                                      float exponent)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * KT; n++) {
            largest = fmaxf(largest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        }
        const float shift = quad_max(largest) * exponent;
#pragma unroll
        for (int n = 0; n < 2 * KT; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float *v = &scores[n][2 * half + i];
                *v = ps_exp2(fmaf(*v, exponent, -shift));
                sum += *v;
            }
        }
        sum = quad_sum(sum);
        inverse[half] = 1.0f / sum;
        log_sum[half] = shift + ps_log2(sum);
    }
}

/* 16 rows of e = 8 J columns to shared memory, rows from N on left out. */
template <int J>
static __device__ __forceinline__ void store_head(bf16 *sequence, int stride, int first, int N, const float (&x)[J][4],
                                                  float scale0, float scale1)
{
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < J; j++) {
        if (first + g < N) {
            *(uint32_t *)(sequence + (first + g) * stride + 8 * j + 2 * t) = ps_pack(x[j][0] * scale0, x[j][1] * scale0);
        }
        if (first + g + 8 < N) {
            *(uint32_t *)(sequence + (first + g + 8) * stride + 8 * j + 2 * t) = ps_pack(x[j][2] * scale1, x[j][3] * scale1);
        }
    }
}

/* q becomes A v, head by head. softmax: of the tile. */
template <int KT, int E>
static __device__ __forceinline__ void attention_forward(const struct arguments &p, bf16 *qkv, float *softmax, int sequences)
{
    constexpr int J = E / 8;
    const int g = lane_id() / 4;
    const float exponent = p.scale * 1.4426950408889634f;
#pragma unroll 1
    for (int pair = warp_id(); pair < sequences * p.heads; pair += WARPS) {
        bf16 *q = qkv + (pair / p.heads) * p.N * QKV_STRIDE + (pair % p.heads) * E;
        const uint32_t q_address = ps_shared_address(q), k_address = q_address + 2 * D, v_address = q_address + 4 * D;
        uint32_t k[2 * KT][J], v[KT][J][2], a[KT][J][2];
        load_rows<KT, J>(k, k_address, QKV_STRIDE, p.N);
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
#pragma unroll
            for (int j = 0; j < J; j++) {
                ps_ldmatrix_x2(a[kt][j], sequence_row(q_address, QKV_STRIDE, 16 * kt, p.N) + 16 * j);
                ps_ldmatrix_x2_trans(v[kt][j], sequence_row(v_address, QKV_STRIDE, 16 * kt, p.N) + 16 * j);
            }
        }
        __syncwarp(); /* q's place is free */
#pragma unroll
        for (int m = 0; m < KT; m++) {
            float scores[2 * KT][4], inverse[2], log_sum[2], mixed[J][4];
            raw_scores<KT, J>(scores, a[m], k, p.N);
            softmax_scores<KT>(scores, inverse, log_sum, exponent);
            uint32_t probability[KT][4];
            fragment_pack<KT>(probability, scores);
            zero(mixed);
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
#pragma unroll
                for (int j = 0; j < J; j++) {
                    ps_mma_k16(mixed[j], probability[kt][0], probability[kt][1], probability[kt][2], probability[kt][3],
                               v[kt][j][0], v[kt][j][1]);
                }
            }
            store_head<J>(q, QKV_STRIDE, 16 * m, p.N, mixed, inverse[0], inverse[1]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 16 * m + g + 8 * half;
                if (lane_id() % 4 == 0 && row < p.N) {
                    softmax[pair * p.N + row] = log_sum[half];
                }
            }
        }
    }
}

/* The softmax statistics of the lane's queries of a pair; infinite, so that their probabilities are 0, beyond the last. */
template <int KT>
static __device__ __forceinline__ void load_softmax(float (&log_sum)[2 * KT], const float *softmax, int N, bool there)
{
#pragma unroll
    for (int i = 0; i < 2 * KT; i++) {
        const int row = 8 * i + lane_id() / 4;
        log_sum[i] = there && row < N ? softmax[row] : INFINITY;
    }
}

/* q, k, v become their gradients, and d_merged (the gradient of A v) becomes A v. softmax: of the tile. */
template <int KT, int E>
static __device__ __forceinline__ void attention_backward(const struct arguments &p, bf16 *qkv, bf16 *d_merged,
                                                          const float *softmax, int sequences)
{
    constexpr int J = E / 8;
    const float exponent = p.scale * 1.4426950408889634f;
    const int pairs = sequences * p.heads;
    float next_sum[2 * KT];
    load_softmax<KT>(next_sum, softmax + warp_id() * p.N, p.N, warp_id() < pairs);
#pragma unroll 1
    for (int pair = warp_id(); pair < pairs; pair += WARPS) {
        const int first = (pair / p.heads) * p.N, column = (pair % p.heads) * E;
        bf16 *q = qkv + first * QKV_STRIDE + column, *merged = d_merged + first * ROW_STRIDE + column;
        const uint32_t q_address = ps_shared_address(q), k_address = q_address + 2 * D, v_address = q_address + 4 * D;
        const uint32_t d_address = ps_shared_address(merged);
        float log_sum[2 * KT];
#pragma unroll
        for (int i = 0; i < 2 * KT; i++) {
            log_sum[i] = next_sum[i];
        }
        load_softmax<KT>(next_sum, softmax + (pair + WARPS) * p.N, p.N, pair + WARPS < pairs);
        uint32_t k[2 * KT][J], v[2 * KT][J], k_trans[KT][J][2], v_trans[KT][J][2];
        load_rows<KT, J>(k, k_address, QKV_STRIDE, p.N);
        load_rows<KT, J>(v, v_address, QKV_STRIDE, p.N);
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
#pragma unroll
            for (int j = 0; j < J; j++) {
                ps_ldmatrix_x2_trans(k_trans[kt][j], sequence_row(k_address, QKV_STRIDE, 16 * kt, p.N) + 16 * j);
                ps_ldmatrix_x2_trans(v_trans[kt][j], sequence_row(v_address, QKV_STRIDE, 16 * kt, p.N) + 16 * j);
            }
        }
        float dk[KT][J][4], dv[KT][J][4];
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
            zero(dk[kt]);
            zero(dv[kt]);
        }
#pragma unroll
        for (int m = 0; m < KT; m++) {
            uint32_t a[J][2], da[J][2], q_trans[J][2], d_trans[J][2];
#pragma unroll
            for (int j = 0; j < J; j++) {
                const uint32_t q_row = sequence_row(q_address, QKV_STRIDE, 16 * m, p.N) + 16 * j;
                const uint32_t d_row = sequence_row(d_address, ROW_STRIDE, 16 * m, p.N) + 16 * j;
                ps_ldmatrix_x2(a[j], q_row);
                ps_ldmatrix_x2_trans(q_trans[j], q_row);
                ps_ldmatrix_x2(da[j], d_row);
                ps_ldmatrix_x2_trans(d_trans[j], d_row);
            }
            float scores[2 * KT][4], d_scores[2 * KT][4], mixed[J][4], dq[J][4];
            raw_scores<KT, J>(scores, a, k, p.N);
            zero(d_scores);
#pragma unroll
            for (int n = 0; n < 2 * KT; n++) {
                head_product<J>(d_scores[n], da, v[n]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[n][i] = ps_exp2(fmaf(scores[n][i], exponent, -log_sum[2 * m + i / 2]));
                }
            }
            uint32_t probability[KT][4], d_probability[KT][4];
            fragment_pack<KT>(probability, scores);
            zero(mixed);
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                const uint32_t *s = probability[kt];
                uint32_t s_trans[4];
#pragma unroll
                for (int i = 0; i < 4; i++) { /* blocks [0][1] and [1][0] of the 16 x 16 change places */
                    s_trans[i] = ps_movmatrix(s[i % 2 * 2 + i / 2]);
                }
#pragma unroll
                for (int j = 0; j < J; j++) {
                    ps_mma_k16(mixed[j], s[0], s[1], s[2], s[3], v_trans[kt][j][0], v_trans[kt][j][1]);
                    ps_mma_k16(dv[kt][j], s_trans[0], s_trans[1], s_trans[2], s_trans[3], d_trans[j][0], d_trans[j][1]);
                }
            }
            /* the scores' gradient but for the factor p.scale: P (dP - sum of P dP), and that sum is A v's gradient times A v */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float projection = 0.0f;
#pragma unroll
                for (int j = 0; j < J; j++) {
                    projection += mixed[j][2 * half] * ps_low(da[j][half]) + mixed[j][2 * half + 1] * ps_high(da[j][half]);
                }
                projection = quad_sum(projection);
#pragma unroll
                for (int n = 0; n < 2 * KT; n++) {
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; i++) {
                        d_scores[n][i] = scores[n][i] * (d_scores[n][i] - projection);
                    }
                }
            }
            fragment_pack<KT>(d_probability, d_scores);
            zero(dq);
#pragma unroll
            for (int kt = 0; kt < KT; kt++) {
                const uint32_t *ds = d_probability[kt];
                uint32_t ds_trans[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    ds_trans[i] = ps_movmatrix(ds[i % 2 * 2 + i / 2]);
                }
#pragma unroll
                for (int j = 0; j < J; j++) {
                    ps_mma_k16(dq[j], ds[0], ds[1], ds[2], ds[3], k_trans[kt][j][0], k_trans[kt][j][1]);
                    ps_mma_k16(dk[kt][j], ds_trans[0], ds_trans[1], ds_trans[2], ds_trans[3], q_trans[j][0], q_trans[j][1]);
                }
            }
            __syncwarp();
            store_head<J>(q, QKV_STRIDE, 16 * m, p.N, dq, p.scale, p.scale);
            store_head<J>(merged, ROW_STRIDE, 16 * m, p.N, mixed, 1.0f, 1.0f);
        }
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
            store_head<J>(q + D, QKV_STRIDE, 16 * kt, p.N, dk[kt], p.scale, p.scale);
            store_head<J>(q + 2 * D, QKV_STRIDE, 16 * kt, p.N, dv[kt], 1.0f, 1.0f);
        }
    }
}

/* ---- what forward and backward share ---- */

static __device__ __forceinline__ void load_vector(float *to, int width, const float *from, int n)
{
    for (int i = threadIdx.x; i < width; i += THREADS) {
        to[i] = i < n ? from[i] : 0.0f;
    }
}

static __device__ __forceinline__ void load_vectors(const struct arguments &p, float *vectors)
{
    load_vector(vectors + LN1_GAMMA, D, p.vectors.ln1_gamma, p.d);
    load_vector(vectors + LN1_BETA, D, p.vectors.ln1_beta, p.d);
    for (int part = 0; part < 3; part++) {
        load_vector(vectors + B_QKV + part * D, D, p.vectors.b_qkv + part * p.d, p.d);
    }
    load_vector(vectors + B_O, D, p.vectors.b_o, p.d);
    load_vector(vectors + LN2_GAMMA, D, p.vectors.ln2_gamma, p.d);
    load_vector(vectors + LN2_BETA, D, p.vectors.ln2_beta, p.d);
    load_vector(vectors + B_2, D, p.vectors.b_2, p.d);
    load_vector(vectors + B_1, MAX_F, p.vectors.b_1, p.f);
}

/* [16, 8 NT] + bias to the warp's rows of shared memory in bf16. */
template <int NT>
static __device__ __forceinline__ void store_rows(bf16 *rows, int stride, const float (&x)[NT][4], const float *bias)
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 b = bias ? *(const float2 *)(bias + 8 * n + 2 * t) : make_float2(0.0f, 0.0f);
        *(uint32_t *)(rows + lane_id() / 4 * stride + 8 * n + 2 * t) = ps_pack(x[n][0] + b.x, x[n][1] + b.y);
        *(uint32_t *)(rows + (lane_id() / 4 + 8) * stride + 8 * n + 2 * t) = ps_pack(x[n][2] + b.x, x[n][3] + b.y);
    }
}

/* qkv = a W_qkv + b_qkv. */
template <bool BACKWARD>
static __device__ __forceinline__ void project_qkv(struct weight_ring<BACKWARD> &weights, bf16 *qkv, const uint32_t (&a)[D / 16][4],
                                                   const float *vectors)
{
    float sums[2][8][4]; /* one chunk's are stored while the next one's product is under way */
    zero(sums[0]);
    product_begin<8, 0, 0>(sums[0], a, weights.take());
#pragma unroll
    for (int c = 0; c < 6; c++) { /* no branch: the compiler would let each product end at once */
        if (c < 5) {
            zero(sums[(c + 1) % 2]);
            product_begin<8, 0, 0>(sums[(c + 1) % 2], a, weights.take());
            product_wait<1, 0, 8, 0, 8>(sums[c % 2], a);
        } else {
            product_wait<0, 0, 8, 0, 8>(sums[c % 2], a);
        }
        store_rows<8>(qkv + CHUNK * c, QKV_STRIDE, sums[c % 2], vectors + B_QKV + CHUNK * c);
    }
}

/* Fragments of 16 rows of shared memory, 16 K columns. */
template <int K> static __device__ __forceinline__ void load_fragments(uint32_t (&a)[K][4], const bf16 *rows, int stride)
{
    const uint32_t address = ps_shared_address(rows) + lane_id() % 16 * (2 * stride) + lane_id() / 16 * 16;
#pragma unroll
    for (int k = 0; k < K; k++) {
        ps_ldmatrix_x4(a[k], address + 32 * k);
    }
}

struct tile {
    int index;            /* in the launch */
    int sequences, valid; /* sequences and rows */
    int64_t row;          /* the first, in the tensors */
};

static __device__ __forceinline__ struct tile tile_at(const struct arguments &p, int index)
{
    struct tile t;
    t.index = index;
    t.sequences = at_most(p.group, p.sequences - index * p.group);
    t.valid = t.sequences * p.N;
    t.row = p.first + (int64_t)index * p.group * p.N;
    return t;
}

static __device__ __forceinline__ int tiles_of_block(const struct arguments &p)
{
    const int tiles = (p.sequences + p.group - 1) / p.group;
    return ((int)blockIdx.x < tiles) ? (tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
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

/* Draws of hidden chunk j: words[k][half] as draw_groups gives them for columns 32 k .. 32 k + 31; all kept when nothing is
 * dropped. They need no product, so they are drawn while one is under way. */
static __device__ __forceinline__ void hidden_draws(uint32_t (&words)[2][2][4], const struct arguments &p, uint64_t step,
                                                    int64_t row, int j)
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                words[k][half][i] = 0;
            }
        }
    }
    if (p.hidden.threshold) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                draw_groups(words[k][half], p.hidden, step, row + own_row(half), p.f / 8, 2 * j + k);
            }
        }
    }
}

/* z, the product of hidden chunk j, becomes drop(gelu(z + b_1)). */
static __device__ __forceinline__ void hidden_forward(float (&z)[8][4], const struct arguments &p, const uint32_t (&words)[2][2][4],
                                                      const float *bias)
{
    const int t = lane_id() % 4;
    const float scale = p.hidden.threshold ? 0.5f * p.hidden.scale : 0.5f;
    const uint32_t threshold = p.hidden.threshold << 16; /* of draws in the high half of a word */
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float2 b = *(const float2 *)(bias + 8 * (4 * k + c) + 2 * t);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float *v = &z[4 * k + c][2 * half + i];
                    const float x = *v + (i ? b.y : b.x), s = x * scale;
                    *v = (i ? words[k][half][c] : words[k][half][c] << 16) >= threshold ? fmaf(s, gelu_tanh(x), s) : 0.0f;
                }
            }
        }
    }
}

/* z, the product of hidden chunk j, becomes drop(gelu(z + b_1)), and dh, the gradient of that, the gradient of z. */
static __device__ __forceinline__ void hidden_backward(float (&z)[8][4], float (&dh)[8][4], const struct arguments &p,
                                                       const uint32_t (&words)[2][2][4], const float *bias)
{
    const int t = lane_id() % 4;
    const float scale = p.hidden.threshold ? 0.5f * p.hidden.scale : 0.5f;
    const uint32_t threshold = p.hidden.threshold << 16; /* of draws in the high half of a word */
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float2 b = *(const float2 *)(bias + 8 * (4 * k + c) + 2 * t);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float *v = &z[4 * k + c][2 * half + i], *dv = &dh[4 * k + c][2 * half + i];
                    const float x = *v + (i ? b.y : b.x), square = x * x;
                    const float h = ps_tanh(x * fmaf(GELU_CUBIC, square, GELU_LINEAR));
                    const float slope = fmaf(3.0f * GELU_CUBIC, square, GELU_LINEAR) * fmaf(-h, h, 1.0f);
                    const float share = fmaf(scale, h, scale);
                    const bool kept = (i ? words[k][half][c] : words[k][half][c] << 16) >= threshold;
                    *v = kept ? x * share : 0.0f;
                    *dv = kept ? *dv * fmaf(x * scale, slope, share) : 0.0f;
                }
            }
        }
    }
}

/* ---- forward ---- */

template <int KT, int E>
static __global__ void __launch_bounds__(THREADS, 1) layer_forward(const __grid_constant__ struct arguments p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    bf16 *qkv = (bf16 *)(shared + STAGES * STAGE_BYTES), *own = qkv + WARP_ROWS * warp_id() * QKV_STRIDE;
    float *vectors = (float *)(shared + STAGES * STAGE_BYTES + QKV_BYTES);
    float *sum_stage = (float *)own; /* the warp's rows of q, k, v, when those are not there: r, and an operand behind it */
    bf16 *operand = (bf16 *)(sum_stage + WARP_ROWS * SUM_STRIDE);
    const int d = p.d, t = lane_id() % 4, first = WARP_ROWS * warp_id(), hidden_chunks = (p.f + CHUNK - 1) / CHUNK;
    const uint64_t step = dropout_step(p);
    const int tiles = tiles_of_block(p);
    struct weight_ring<false> weights;
    weights.start(p, ps_shared_address(shared), (struct chunk *)(vectors + VECTORS), tiles);
    load_vectors(p, vectors);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        const struct tile tile = tile_at(p, blockIdx.x + i * gridDim.x);
        uint32_t a[D / 16][4];
        float x[D / 8][4];
        rows_normalise(operand, NULL, NULL, 0, p.u + tile.row * d, vectors + LN1_GAMMA, d, p.epsilon, tile.valid);
        load_fragments<D / 16>(a, operand, ROW_STRIDE);
        __syncwarp();
        project_qkv(weights, own, a, vectors);
        __syncthreads();
        attention_forward<KT, E>(p, qkv, p.softmax + tile.row * p.heads, tile.sequences);
        __syncthreads();

        /* r = u + drop(merged W_o + b_o) */
        load_fragments<D / 16>(a, own, QKV_STRIDE);
        zero(x);
        product<8, 0, 0>(x, a, weights.take());
        product<8, 8, 0>(x, a, weights.take());
        sums_stage<0>(sum_stage, lane_id() / 4, x);
        sums_stage<1>(sum_stage, lane_id() / 4 + 8, x);
        {
            float bias[LANE_COLUMNS], gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
            struct row_words next = row_read(p.u + tile.row * d, d, first + pass_row(0), tile.valid);
            row_vector(bias, vectors + B_O);
            row_vector(gamma, vectors + LN2_GAMMA);
            row_vector(beta, vectors + LN2_BETA);
            __syncwarp();
#pragma unroll 1
            for (int pass = 0; pass < PASSES; pass++) {
                const int row = first + pass_row(pass);
                float r[LANE_COLUMNS], u[LANE_COLUMNS];
                row_unpack(u, next);
                if (pass + 1 < PASSES) {
                    next = row_read(p.u + tile.row * d, d, first + pass_row(pass + 1), tile.valid);
                }
                sum_row(r, sum_stage, pass_row(pass));
#pragma unroll
                for (int k = 0; k < LANE_COLUMNS; k++) {
                    r[k] += bias[k];
                }
                row_drop(r, p.attention, step, tile.row + row, d);
#pragma unroll
                for (int k = 0; k < LANE_COLUMNS; k++) {
                    r[k] += u[k];
                }
                sum_row_store(sum_stage, pass_row(pass), r);
                row_write(p.r + tile.row * d, d, row, tile.valid, row_pack(r));
                row_normalise(r, d, p.epsilon);
                row_stage(operand, pass, row_affine(r, gamma, beta));
            }
        }
        __syncwarp();
        load_fragments<D / 16>(a, operand, ROW_STRIDE);

        /* y = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2) */
        zero(x);
#pragma unroll 1
        for (int j = 0; j < hidden_chunks; j++) {
            float sums[8][4];
            uint32_t hidden[4][4], words[2][2][4];
            zero(sums);
            product_begin<8, 0, 0>(sums, a, weights.take());
            hidden_draws(words, p, step, tile.row, j);
            product_wait<0, 0, 8, 0, 8>(sums, a);
            hidden_forward(sums, p, words, vectors + B_1 + CHUNK * j);
            fragment_pack<4>(hidden, sums);
            const uint32_t stage = weights.take();
            product<4, 0, 0>(x, hidden, stage);
            product<4, 8, 0>(x, hidden, stage + STAGE_BYTES / 2);
        }
        float bias[LANE_COLUMNS];
        row_vector(bias, vectors + B_2);
#pragma unroll
        for (int half = 0; half < 2; half++) { /* the operand's place holds the sums of 8 rows */
            __syncwarp();
            if (half == 0) {
                sums_stage<0>((float *)operand, lane_id() / 4, x);
            } else {
                sums_stage<1>((float *)operand, lane_id() / 4, x);
            }
            __syncwarp();
#pragma unroll 1
            for (int pass = 0; pass < PASSES / 2; pass++) {
                const int row = pass_row(pass) + 8 * half;
                float y[LANE_COLUMNS], r[LANE_COLUMNS];
                sum_row(y, (const float *)operand, pass_row(pass));
                sum_row(r, sum_stage, row);
#pragma unroll
                for (int k = 0; k < LANE_COLUMNS; k++) {
                    y[k] += bias[k];
                }
                row_drop(y, p.output, step, tile.row + first + row, d);
#pragma unroll
                for (int k = 0; k < LANE_COLUMNS; k++) {
                    y[k] += r[k];
                }
                row_write(p.y + tile.row * d, d, first + row, tile.valid, row_pack(y));
            }
        }
        __syncwarp();
    }
}

/* ---- backward ---- */

/* The warp's rows of parts of D columns from shared memory to an operand, zeros from row `valid` on. */
static __device__ __forceinline__ void copy_rows(bf16 *operand, const bf16 *from, int stride, int parts, int tile, int valid)
{
    const int local = lane_id() / 16, column = lane_id() % 16 * 8, row = local + WARP_ROWS * warp_id();
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
        const bf16 *source = from + local * stride + part * D + column;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 2; i++) {
            *operand_at(operand, 2 * parts, tile, row + 2 * i, 2 * part + lane_id() % 16 / 8, lane_id() % 8) =
                row + 2 * i < valid ? *(const uint4 *)(source + 2 * i * stride) : make_uint4(0, 0, 0, 0);
        }
    }
}

/* Operands of the feed-forward part: LN2(r) and the dropped dy, to the stage and to device memory; the rows' means and 1/deviation.
 */
static __device__ __forceinline__ void feed_forward_operands(const struct arguments &p, const struct tile &tile, uint64_t step,
                                                             const float *vectors, bf16 *stage, float2 *stats)
{
    const int d = p.d, first = WARP_ROWS * warp_id();
    const bf16 *from_r = p.r + tile.row * d, *from_dy = p.dy + tile.row * d;
    float gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
    struct row_words next_r = row_read(from_r, d, first + pass_row(0), tile.valid);
    struct row_words next_dy = row_read(from_dy, d, first + pass_row(0), tile.valid);
    row_vector(gamma, vectors + LN2_GAMMA);
    row_vector(beta, vectors + LN2_BETA);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < PASSES; i++) {
        const int row = first + pass_row(i);
        float x[LANE_COLUMNS], dy[LANE_COLUMNS];
        row_unpack(x, next_r);
        row_unpack(dy, next_dy);
        if (i + 1 < PASSES) {
            next_r = row_read(from_r, d, first + pass_row(i + 1), tile.valid);
            next_dy = row_read(from_dy, d, first + pass_row(i + 1), tile.valid);
        }
        row_drop(dy, p.output, step, tile.row + row, d);
        const struct row_words masked = row_pack(dy);
        row_stage(stage + WARP_ROWS * ROW_STRIDE, i, masked);
        row_write_operand(p.operands.dy, tile.index, row, masked);
        const float2 s = row_normalise(x, d, p.epsilon);
        if (lane_id() % 8 == 0) {
            stats[pass_row(i)] = s;
        }
        const struct row_words ln2 = row_affine(x, gamma, beta);
        row_stage(stage, i, ln2);
        row_write_operand(p.operands.ln2, tile.index, row, ln2);
    }
    __syncwarp();
}

/* d_r = the gradient of LN2's output. */
static __device__ __forceinline__ void feed_forward_backward(const struct arguments &p, struct weight_ring<true> &weights,
                                                             const struct tile &tile, uint64_t step, const float *vectors,
                                                             const uint32_t (&a)[D / 16][4], const uint32_t (&m)[D / 16][4],
                                                             float (&d_r)[D / 8][4])
{
    const int hidden_chunks = (p.f + CHUNK - 1) / CHUNK;
    zero(d_r);
#pragma unroll 1
    for (int j = 0; j < hidden_chunks; j++) {
        float dh[8][4], z[8][4];
        uint32_t d_hidden[4][4], words[2][2][4];
        zero(dh);
        zero(z);
        uint32_t stage = weights.take();
        product_transposed_begin<8, 2>(dh, m, stage);
        stage = weights.take();
        product_begin<8, 0, 0>(z, a, stage);
        hidden_draws(words, p, step, tile.row, j);
        product_wait<0, 0, 8, 0, 8>(dh, m);
        product_wait<0, 0, 8, 0, 8>(z, a);
        hidden_backward(z, dh, p, words, vectors + B_1 + CHUNK * j);
        fragment_pack<4>(d_hidden, z);
        fragment_store(d_hidden, p.operands.hidden, hidden_chunks, tile.index, j);
        fragment_pack<4>(d_hidden, dh);
        fragment_store(d_hidden, p.operands.d_hidden, hidden_chunks, tile.index, j);
        product_transposed<16, 1>(d_r, d_hidden, stage);
    }
}

/* The thread's parked values of pass i. */
static __device__ __forceinline__ void unpark(float4 (&v)[LANE_COLUMNS / 4], const float4 *parked, int i)
{
#pragma unroll
    for (int k = 0; k < LANE_COLUMNS / 4; k++) {
        v[k] = parked[(i * (LANE_COLUMNS / 4) + k) * THREADS + threadIdx.x];
    }
}

/* Both LayerNorms' backward over the warp's rows; stage: the gradient of its output, in fp32. LN2: dr = that of its input + dy, to
 * `parked` in fp32, and dropped to `operand` and to device memory. LN1: du = that of its input + parked. sums: see add_column_sums.
 */
template <bool LN1>
static __device__ __forceinline__ void layernorm_backward(const struct arguments &p, const struct tile &tile, uint64_t step,
                                                          const float *stage, const float2 *stats, const float *gamma_vector,
                                                          float *sums, float4 *parked, bf16 *operand)
{
    const int d = p.d, first = WARP_ROWS * warp_id();
    const bf16 *input = (LN1 ? p.u : p.r) + tile.row * d, *from_dy = p.dy + tile.row * d;
    float gamma[LANE_COLUMNS], column_sums[2 * LANE_COLUMNS];
    struct row_words next = row_read(input, d, first + pass_row(0), tile.valid), next_dy = {};
    float4 next_parked[LANE_COLUMNS / 4];
    if (LN1) {
        unpark(next_parked, parked, 0);
    } else {
        next_dy = row_read(from_dy, d, first + pass_row(0), tile.valid);
    }
    row_vector(gamma, gamma_vector);
#pragma unroll
    for (int i = 0; i < 2 * LANE_COLUMNS; i++) {
        column_sums[i] = 0.0f;
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < PASSES; i++) {
        const int row = first + pass_row(i);
        float x[LANE_COLUMNS], dz[LANE_COLUMNS], rest[LANE_COLUMNS];
        row_unpack(x, next);
        if (LN1) {
#pragma unroll
            for (int k = 0; k < LANE_COLUMNS / 4; k++) {
                const float4 v = next_parked[k];
                rest[4 * k] = v.x;
                rest[4 * k + 1] = v.y;
                rest[4 * k + 2] = v.z;
                rest[4 * k + 3] = v.w;
            }
        } else {
            row_unpack(rest, next_dy);
        }
        if (i + 1 < PASSES) {
            next = row_read(input, d, first + pass_row(i + 1), tile.valid);
            if (LN1) {
                unpark(next_parked, parked, i + 1);
            } else {
                next_dy = row_read(from_dy, d, first + pass_row(i + 1), tile.valid);
            }
        }
        sum_row(dz, stage, pass_row(i));
        const float2 s = stats[pass_row(i)];
#pragma unroll
        for (int k = 0; k < LANE_COLUMNS; k++) {
            x[k] = lane_column(k / 8) < d ? (x[k] - s.x) * s.y : 0.0f;
            dz[k] = row < tile.valid ? dz[k] : 0.0f; /* no sequence wrote a gradient there */
        }
        row_normalise_backward(dz, x, s.y, d, gamma, column_sums);
#pragma unroll
        for (int k = 0; k < LANE_COLUMNS; k++) {
            dz[k] += rest[k];
        }
        if (LN1) {
            row_write(p.du + tile.row * d, d, row, tile.valid, row_pack(dz));
        } else {
#pragma unroll
            for (int k = 0; k < LANE_COLUMNS / 4; k++) {
                parked[(i * (LANE_COLUMNS / 4) + k) * THREADS + threadIdx.x] =
                    make_float4(dz[4 * k], dz[4 * k + 1], dz[4 * k + 2], dz[4 * k + 3]);
            }
            row_drop(dz, p.attention, step, tile.row + row, d);
            const struct row_words out = row_pack(dz);
            row_stage(operand, i, out);
            row_write_operand(p.operands.dr, tile.index, row, out);
        }
    }
    add_column_sums(sums, column_sums);
    __syncwarp();
}

template <int KT, int E>
static __global__ void __launch_bounds__(THREADS, 1) layer_backward(const __grid_constant__ struct arguments p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    bf16 *qkv = (bf16 *)(shared + STAGES * STAGE_BYTES), *merged = qkv + ROWS * QKV_STRIDE;
    bf16 *own = qkv + WARP_ROWS * warp_id() * QKV_STRIDE, *own_merged = merged + WARP_ROWS * warp_id() * ROW_STRIDE;
    float *vectors = (float *)(merged + ROWS * ROW_STRIDE), *block_sums = vectors + VECTORS;
    float2 *stats = (float2 *)(block_sums + WARPS * NORM_SUMS) + WARP_ROWS * warp_id();
    float *sums = block_sums + warp_id() * NORM_SUMS;
    float4 *parked = (float4 *)p.parked + (int64_t)blockIdx.x * (ROWS * D / 4);
    const int d = p.d;
    const uint64_t step = dropout_step(p);
    const int tiles = tiles_of_block(p);
    struct weight_ring<true> weights;
    weights.start(p, ps_shared_address(shared), (struct chunk *)(block_sums + WARPS * NORM_SUMS + 2 * ROWS), tiles);
    load_vectors(p, vectors);
    for (int i = lane_id(); i < NORM_SUMS; i += 32) {
        sums[i] = 0.0f;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        const struct tile tile = tile_at(p, blockIdx.x + i * gridDim.x);
        uint32_t a[D / 16][4];
        float x[D / 8][4];
        feed_forward_operands(p, tile, step, vectors, own, stats);
        {
            uint32_t m[D / 16][4];
            load_fragments<D / 16>(a, own, ROW_STRIDE);
            load_fragments<D / 16>(m, own + WARP_ROWS * ROW_STRIDE, ROW_STRIDE);
            __syncwarp();
            feed_forward_backward(p, weights, tile, step, vectors, a, m, x);
        }
        sums_stage<0>((float *)own, lane_id() / 4, x);
        sums_stage<1>((float *)own, lane_id() / 4 + 8, x);
        layernorm_backward<false>(p, tile, step, (const float *)own, stats, vectors + LN2_GAMMA, sums + 2 * D, parked, own_merged);
        load_fragments<D / 16>(a, own_merged, ROW_STRIDE);
        __syncwarp();
#pragma unroll 1
        for (int c = 0; c < 2; c++) {
            const uint32_t stage = weights.take();
            float d_merged[8][4];
            zero(d_merged);
            product_transposed<8, 2>(d_merged, a, stage);
            store_rows<8>(own_merged + CHUNK * c, ROW_STRIDE, d_merged, NULL);
        }
        rows_normalise(own, stats, p.operands.a, tile.index, p.u + tile.row * d, vectors + LN1_GAMMA, d, p.epsilon, tile.valid);
        load_fragments<D / 16>(a, own, ROW_STRIDE);
        __syncwarp();
        project_qkv(weights, own, a, vectors);
        __syncthreads();
        attention_backward<KT, E>(p, qkv, merged, p.softmax + tile.row * p.heads, tile.sequences);
        __syncthreads();
        copy_rows(p.operands.dqkv, own, QKV_STRIDE, 3, tile.index, tile.valid);
        copy_rows(p.operands.merged, own_merged, ROW_STRIDE, 1, tile.index, tile.valid);
        zero(x);
#pragma unroll 1
        for (int c = 0; c < 6; c++) {
            const uint32_t stage = weights.take();
            uint32_t dqkv[4][4];
            load_fragments<4>(dqkv, own + CHUNK * c, QKV_STRIDE);
            product_transposed<16, 1>(x, dqkv, stage);
        }
        __syncwarp();
        sums_stage<0>((float *)own, lane_id() / 4, x);
        sums_stage<1>((float *)own, lane_id() / 4 + 8, x);
        layernorm_backward<true>(p, tile, step, (const float *)own, stats, vectors + LN1_GAMMA, sums, parked, NULL);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NORM_SUMS; i += THREADS) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            sum += block_sums[w * NORM_SUMS + i];
        }
        p.norm_sums[(int64_t)blockIdx.x * NORM_SUMS + i] = sum;
    }
}

/* ---- weights' gradients ---- */

/* A block forms one product left' right over every so manieth block of 64 rows, up to 128 x 384 or 384 x 128: a warpgroup each has
 * 128 x 128 of it (a part). The first thread asks the copy engine for the operands, a stage of 64 rows at once. */
enum {
    PART = 128,                       /* rows and columns of a part */
    PART_FLOATS = PART * PART + PART, /* its sums in the order of the threads' registers, and its right operand's column sums */
    MAX_PARTS = 3,                    /* of a job */
    PANEL_BYTES = 64 * 64 * 2,
    GRADIENT_THREADS = 128 * MAX_PARTS,
    GRADIENT_PANELS = 24, /* in shared memory */
    GRADIENT_BYTES = GRADIENT_PANELS * PANEL_BYTES,
    MAX_STAGES = GRADIENT_PANELS / 4, /* of the smallest job */
    MAX_JOBS = 2 + 2 * ((MAX_F / 64 + 2 * MAX_PARTS - 1) / (2 * MAX_PARTS)),
    ADD_BLOCKS = PART_FLOATS / (4 * 32), /* of add_gradients for a part: 32 times 4 columns each */
};
static_assert(PART_FLOATS % (4 * 32) == 0 && NORM_SUMS % 32 == 0, "whole blocks");

enum gradient_kind { GRADIENT_QKV, GRADIENT_O, GRADIENT_1, GRADIENT_2 };

/* One product: which, panels first .. first + panels - 1 of its wide operand (the left one of W_2's gradient, else the right one),
 * and where its blocks and partial sums are. */
struct gradient_job {
    int kind, first, panels, parts;
    int slot, slices; /* its first block, and how many share the rows */
    int partial;      /* the first of its slices * parts parts */
    int column;       /* its first part among all jobs' parts */
};

struct gradient_arguments {
    struct operands operands;
    struct ps_encoder_large_gradients gradients;
    int d, f, hidden_panels;
    int row_blocks;                         /* of 64 rows */
    int jobs_count, slots, columns, blocks; /* blocks of weight_gradients; parts; blocks of layer_backward */
    struct gradient_job jobs[MAX_JOBS];
    float *partials;        /* [jobs: slices, parts][PART_FLOATS] */
    const float *norm_sums; /* [blocks][NORM_SUMS] */
};

/* An operand: `panels` of its `all` from `first` on. */
struct gradient_operand {
    const bf16 *from;
    int all, first, panels;
};

static __device__ __forceinline__ void gradient_operands(struct gradient_operand &left, struct gradient_operand &right,
                                                         const struct gradient_arguments &p, const struct gradient_job &job)
{
    const struct operands &o = p.operands;
    const int all = p.hidden_panels;
    left = {job.kind == GRADIENT_QKV ? o.a : job.kind == GRADIENT_O ? o.merged : o.ln2, 2, 0, 2};
    right = {job.kind == GRADIENT_QKV ? o.dqkv : o.dr, job.panels, 0, job.panels};
    if (job.kind == GRADIENT_1) {
        right = {o.d_hidden, all, job.first, job.panels};
    } else if (job.kind == GRADIENT_2) {
        left = {o.hidden, all, job.first, job.panels};
        right = {o.dy, 2, 0, 2};
    }
}

static __device__ __forceinline__ const struct gradient_job &gradient_job_at(const struct gradient_arguments &p, int slot)
{
    int j = 0;
    while (j + 1 < p.jobs_count && slot >= p.jobs[j + 1].slot) {
        j++;
    }
    return p.jobs[j];
}

/* The last tiles of layer_backward may still be in L2, so the row blocks are taken from the last to the first. */
static __global__ void __launch_bounds__(GRADIENT_THREADS, 1) weight_gradients(const __grid_constant__ struct gradient_arguments p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ uint64_t barriers[2 * MAX_STAGES];
    const struct gradient_job &job = gradient_job_at(p, blockIdx.x);
    struct gradient_operand left, right;
    gradient_operands(left, right, p, job);
    const int slice = blockIdx.x - job.slot, part = threadIdx.x / 128;
    const int steps = slice < p.row_blocks ? (p.row_blocks - 1 - slice) / job.slices + 1 : 0;
    /* An odd panel's neighbour is there but not filled: it makes columns that do not exist. */
    const uint32_t left_bytes = (left.panels + 1) / 2 * 2 * PANEL_BYTES, right_bytes = (right.panels + 1) / 2 * 2 * PANEL_BYTES;
    const uint32_t stage_bytes = left_bytes + right_bytes, base = ps_shared_address(shared);
    const int stages = GRADIENT_BYTES / stage_bytes;
    const uint32_t full = ps_shared_address(barriers), empty = full + 8 * MAX_STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            ps_mbarrier_init(full + 8 * i, 1);
            ps_mbarrier_init(empty + 8 * i, 4 * job.parts);
        }
        ps_mbarrier_publish();
    }
    __syncthreads();
    const auto ask = [&](int step,
                         int slot) { /* for the rows of a step */
                                     const int64_t block = p.row_blocks - 1 - slice - (int64_t)step * job.slices;
                                     const uint32_t left_size = left.panels * PANEL_BYTES, right_size = right.panels * PANEL_BYTES;
                                     const uint32_t to = base + slot * stage_bytes;
                                     ps_mbarrier_expect(full + 8 * slot, left_size + right_size);
                                     ps_bulk_copy(to, left.from + (block * left.all + left.first) * (64 * 64), left_size,
                                                  full + 8 * slot);
                                     ps_bulk_copy(to + left_bytes, right.from + (block * right.all + right.first) * (64 * 64),
                                                  right_size, full + 8 * slot);
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages && s < steps; s++) {
            ask(s, s);
        }
    }
    if (part >= job.parts) {
        return;
    }
    const bool tall = job.kind == GRADIENT_2;
    const uint32_t left_place = tall ? part * 2 * PANEL_BYTES : 0, right_place = left_bytes + (tall ? 0 : part * 2 * PANEL_BYTES);
    const bool with_bias = !tall || (part == 0 && job.first == 0);
    const int lane = lane_id(), wj = warp_id() % 4;
    const uint32_t bias_row = (lane % 16) * 128, bias_unit = ((lane / 16) ^ (lane % 8)) << 4;
    float sums[2][16][4], bias[4][4];
    zero(sums[0]);
    zero(sums[1]);
    zero(bias);
    int slot = 0;
    uint32_t parity = 0;
    for (int s = 0; s < steps; s++) {
        const uint32_t a = base + slot * stage_bytes + left_place, b = base + slot * stage_bytes + right_place;
        ps_mbarrier_wait(full + 8 * slot, parity);
        ps_wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
                ps_wgmma_shared_n128(sums[m], ps_wgmma_operand(a + m * PANEL_BYTES + k * 2048),
                                     ps_wgmma_operand_pair(b + k * 2048, PANEL_BYTES));
            }
        }
        ps_wgmma_commit();
        if (with_bias) { /* a row of ones times the warp's 32 columns of the right operand */
            const uint32_t panel = b + wj / 2 * PANEL_BYTES + bias_row, one = 0x3f803f80u;
#pragma unroll
            for (int k = 0; k < 4; k++) {
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    uint32_t r[4];
                    ps_ldmatrix_x4_trans(r, panel + k * 2048 + (bias_unit ^ ((wj % 2 * 4 + n) << 4)));
                    ps_mma_k16(bias[n], one, one, one, one, r[0], r[1]);
                    ps_mma_k16(bias[n + 1], one, one, one, one, r[2], r[3]);
                }
            }
        }
        if (threadIdx.x == 0 && s > 0 && s - 1 + stages < steps) { /* the stage of the step before, when all have read it */
            const int before = slot == 0 ? stages - 1 : slot - 1;
            ps_mbarrier_wait(empty + 8 * before, slot == 0 ? parity ^ 1 : parity);
            ask(s - 1 + stages, before);
        }
        ps_wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int n = 0; n < 16; n++) {
                asm volatile("" : "+f"(sums[m][n][0]), "+f"(sums[m][n][1]), "+f"(sums[m][n][2]), "+f"(sums[m][n][3])::"memory");
            }
        }
        if (lane == 0) {
            ps_mbarrier_arrive(empty + 8 * slot);
        }
        slot++;
        if (slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    float *out = p.partials + (int64_t)(job.partial + slice * job.parts + part) * PART_FLOATS;
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 16; n++) {
            *(float4 *)(out + ((m * 16 + n) * 128 + thread) * 4) =
                make_float4(sums[m][n][0], sums[m][n][1], sums[m][n][2], sums[m][n][3]);
        }
    }
    if (lane < 4) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            *(float2 *)(out + PART * PART + 32 * wj + 8 * n + 2 * lane) = make_float2(bias[n][0], bias[n][1]);
        }
    }
}

/* Columns `column`, column + 1 of row `row` of the job's product += v. */
static __device__ __forceinline__ void add_weights(const struct gradient_arguments &p, const struct gradient_job &job, int part,
                                                   int row, int column, float v0, float v1)
{
    const struct ps_encoder_large_gradients &g = p.gradients;
    float *to;
    bool there = row < p.d && column < p.d;
    if (job.kind == GRADIENT_QKV) {
        to = g.w_qkv + (int64_t)row * 3 * p.d + part * p.d + column;
    } else if (job.kind == GRADIENT_O) {
        to = g.w_o + (int64_t)row * p.d + column;
    } else if (job.kind == GRADIENT_1) {
        column += 64 * job.first + PART * part;
        there = row < p.d && column < p.f;
        to = g.w_1 + (int64_t)row * p.f + column;
    } else {
        row += 64 * job.first + PART * part;
        there = row < p.f && column < p.d;
        to = g.w_2 + (int64_t)row * p.d + column;
    }
    if (there) {
        const float2 old = *(float2 *)to;
        *(float2 *)to = make_float2(old.x + v0, old.y + v1);
    }
}

/* 4 columns of a part's bias += v. */
static __device__ __forceinline__ void add_bias(const struct gradient_arguments &p, const struct gradient_job &job, int part,
                                                int column, float4 v)
{
    const struct ps_encoder_large_gradients &g = p.gradients;
    float *to;
    bool there = column < p.d;
    if (job.kind == GRADIENT_QKV) {
        to = g.b_qkv + part * p.d + column;
    } else if (job.kind == GRADIENT_O) {
        to = g.b_o + column;
    } else if (job.kind == GRADIENT_1) {
        column += 64 * job.first + PART * part;
        there = column < p.f;
        to = g.b_1 + column;
    } else {
        there = there && job.first == 0 && part == 0;
        to = g.b_2 + column;
    }
    if (there) {
        const float4 old = *(float4 *)to;
        *(float4 *)to = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
    }
}

/* Gradients += their partial sums: a warp sums every eighth slice, and the eight sums are added in their order. Blocks: those of
 * the parts, then LayerNorm's. */
static __global__ void __launch_bounds__(THREADS) add_gradients(const __grid_constant__ struct gradient_arguments p)
{
    __shared__ float4 sums[WARPS][32];
    const int lane = lane_id(), warp = warp_id(), column = blockIdx.x / ADD_BLOCKS;
    if (column < p.columns) {
        int j = 0;
        while (j + 1 < p.jobs_count && column >= p.jobs[j + 1].column) {
            j++;
        }
        const struct gradient_job &job = p.jobs[j];
        const int part = column - job.column, place = blockIdx.x % ADD_BLOCKS * 32 + lane; /* 4 floats each */
        const float4 *from = (const float4 *)(p.partials + (int64_t)(job.partial + part) * PART_FLOATS) + place;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int s = warp; s < job.slices; s += WARPS) {
            const float4 v = from[(int64_t)s * job.parts * (PART_FLOATS / 4)];
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp > 0) {
            return;
        }
#pragma unroll
        for (int i = 1; i < WARPS; i++) {
            const float4 v = sums[i][lane];
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
        if (place < PART * PART / 4) {
            const int thread = place % 128, n = place / 128 % 16, m = place / (128 * 16);
            const int row = 64 * m + thread / 4 % 8 + 16 * (thread / 32), first = 8 * n + 2 * (thread % 4);
            add_weights(p, job, part, row, first, sum.x, sum.y);
            add_weights(p, job, part, row + 8, first, sum.z, sum.w);
        } else {
            add_bias(p, job, part, 4 * (place - PART * PART / 4), sum);
        }
        return;
    }
    const int index = (blockIdx.x - p.columns * ADD_BLOCKS) * 32 + lane, vector = index / D, place = index % D;
    float *out = (float *)sums, sum = 0.0f;
#pragma unroll 4
    for (int b = warp; b < p.blocks; b += WARPS) {
        sum += p.norm_sums[(int64_t)b * NORM_SUMS + index];
    }
    out[warp * 32 + lane] = sum;
    __syncthreads();
    if (warp > 0 || place >= p.d) {
        return;
    }
#pragma unroll
    for (int i = 1; i < WARPS; i++) {
        sum += out[i * 32 + lane];
    }
    float *to = vector == 0   ? p.gradients.ln1_gamma
                : vector == 1 ? p.gradients.ln1_beta
                : vector == 2 ? p.gradients.ln2_gamma
                              : p.gradients.ln2_beta;
    to[place] += sum;
}

/* ---- launchers ---- */

static int group_of(const struct ps_encoder_large *l)
{
    return (int)(ROWS / l->patches);
}

enum ps_status ps_cuda_encoder_large_supported(const struct ps_encoder_large *l)
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
    if (l->shared_bytes < BACKWARD_BYTES) {
        return ps_fail(PS_UNSUPPORTED, "encoder layer on chip: needs %d bytes of shared memory a block, the device has %d",
                       (int)BACKWARD_BYTES, l->shared_bytes);
    }
    return PS_OK;
}

static struct arguments arguments_of(const struct ps_encoder_large *l)
{
    struct arguments p = {};
    p.sequences = (int)l->sequences;
    p.N = (int)l->patches;
    p.d = (int)l->d_model;
    p.heads = (int)l->n_heads;
    p.f = (int)l->d_ff;
    p.group = group_of(l);
    p.epsilon = l->epsilon;
    p.scale = 1.0f / sqrtf((float)(l->d_model / l->n_heads));
    p.attention = l->attention;
    p.hidden = l->hidden;
    p.output = l->output;
    p.u = (const bf16 *)l->u;
    p.r = (bf16 *)l->residual;
    p.softmax = (float *)l->softmax;
    p.w_qkv = (const bf16 *)l->w_qkv;
    p.w_o = (const bf16 *)l->w_o;
    p.w_1 = (const bf16 *)l->w_1;
    p.w_2 = (const bf16 *)l->w_2;
    p.vectors = l->vectors;
    return p;
}

typedef void layer_kernel(const struct arguments);

template <int E> static layer_kernel *kernel_for(int backward, int64_t N)
{
    static layer_kernel *const kernels[2][4] = {
        {layer_forward<1, E>, layer_forward<2, E>, layer_forward<3, E>, layer_forward<4, E>},
        {layer_backward<1, E>, layer_backward<2, E>, layer_backward<3, E>, layer_backward<4, E>}};
    return kernels[backward][(N - 1) / 16];
}

static enum ps_status layer_launch(const struct ps_encoder_large *l, const struct arguments &p, int backward, int blocks)
{
    const int64_t e = l->d_model / l->n_heads;
    const int bytes = backward ? BACKWARD_BYTES : FORWARD_BYTES;
    layer_kernel *kernel = e == 8    ? kernel_for<8>(backward, l->patches)
                           : e == 16 ? kernel_for<16>(backward, l->patches)
                                     : kernel_for<32>(backward, l->patches);
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                         "encoder layer: shared memory"));
    kernel<<<blocks, THREADS, bytes, l->stream>>>(p);
    return ps_cuda_check(cudaGetLastError(), backward ? "encoder layer, backward" : "encoder layer, forward");
}

static int blocks_for(const struct ps_encoder_large *l, int64_t sequences)
{
    const int64_t tiles = (sequences + group_of(l) - 1) / group_of(l);
    return (int)(tiles < l->multiprocessors ? tiles : l->multiprocessors);
}

enum ps_status ps_cuda_encoder_large_forward(const struct ps_encoder_large *l, void *y)
{
    PS_TRY(ps_cuda_encoder_large_supported(l));
    struct arguments p = arguments_of(l);
    p.y = (bf16 *)y;
    return layer_launch(l, p, 0, blocks_for(l, l->sequences));
}

/* The workspace's parts, each a multiple of 256 bytes, for chunks of so many sequences. */
struct plan {
    int64_t sequences;                   /* of a chunk */
    struct gradient_arguments gradients; /* all but the pointers */
    size_t a, dqkv, merged, dr, ln2, d_hidden, hidden, dy, parked, norm_sums, partials, bytes;
};

static size_t part(size_t *end, int64_t bytes)
{
    const size_t begin = *end;
    *end += ((size_t)bytes + 255) / 256 * 256;
    return begin;
}

/* The products, and the device's multiprocessors shared among them by the bytes that each reads. */
static struct gradient_arguments gradients_of(const struct ps_encoder_large *l)
{
    struct gradient_arguments g = {};
    g.d = (int)l->d_model;
    g.f = (int)l->d_ff;
    g.hidden_panels = (g.f + 63) / 64;
    int panels = 0;
    const auto add = [&](int kind, int first, int wide) {
        struct gradient_job *job = &g.jobs[g.jobs_count++];
        *job = {kind, first, wide, (wide + 1) / 2};
        panels += 2 + wide;
    };
    add(GRADIENT_QKV, 0, 6);
    add(GRADIENT_O, 0, 2);
    const int pieces = (g.hidden_panels + 2 * MAX_PARTS - 1) / (2 * MAX_PARTS);
    for (int kind = GRADIENT_1; kind <= GRADIENT_2; kind++) {
        for (int i = 0, first = 0; i < pieces; i++) { /* an even number of panels each, but for the last */
            const int rest = g.hidden_panels - first, wide = ((rest + pieces - i - 1) / (pieces - i) + 1) / 2 * 2;
            add(kind, first, wide < rest ? wide : rest);
            first += wide;
        }
    }
    int partial = 0;
    for (int j = 0; j < g.jobs_count; j++) {
        struct gradient_job *job = &g.jobs[j];
        job->slices = l->multiprocessors * (2 + job->panels) / panels;
        job->slices = job->slices < 1 ? 1 : job->slices;
        job->slot = g.slots;
        job->partial = partial;
        job->column = g.columns;
        g.slots += job->slices;
        g.columns += job->parts;
        partial += job->slices * job->parts;
    }
    return g;
}

/* Chunks: whole waves of tiles whose operands take at most 384 MiB. */
static struct plan plan_of(const struct ps_encoder_large *l)
{
    struct plan plan = {};
    plan.gradients = gradients_of(l);
    const int64_t group = group_of(l), f = 64 * plan.gradients.hidden_panels, row = 2 * (8 * D + 2 * f);
    const int64_t wave = (int64_t)l->multiprocessors * group, waves = ((int64_t)384 << 20) / (l->multiprocessors * ROWS * row);
    plan.sequences = waves * wave < l->sequences ? (waves < 1 ? 1 : waves) * wave : l->sequences;
    const int64_t rows = (plan.sequences + group - 1) / group * ROWS;
    const struct gradient_job *last = &plan.gradients.jobs[plan.gradients.jobs_count - 1];
    size_t end = 0;
    plan.a = part(&end, 2 * rows * D);
    plan.dqkv = part(&end, 6 * rows * D);
    plan.merged = part(&end, 2 * rows * D);
    plan.dr = part(&end, 2 * rows * D);
    plan.ln2 = part(&end, 2 * rows * D);
    plan.d_hidden = part(&end, 2 * rows * f);
    plan.hidden = part(&end, 2 * rows * f);
    plan.dy = part(&end, 2 * rows * D);
    plan.parked = part(&end, (int64_t)4 * l->multiprocessors * ROWS * D);
    plan.norm_sums = part(&end, (int64_t)4 * l->multiprocessors * NORM_SUMS);
    plan.partials = part(&end, (int64_t)4 * (last->partial + last->slices * last->parts) * PART_FLOATS);
    plan.bytes = end;
    return plan;
}

size_t ps_cuda_encoder_large_workspace(const struct ps_encoder_large *l)
{
    return plan_of(l).bytes;
}

enum ps_status ps_cuda_encoder_large_backward(const struct ps_encoder_large *l, void *du, const void *dy,
                                              const struct ps_encoder_large_gradients *gradients, void *workspace,
                                              size_t workspace_bytes)
{
    PS_TRY(ps_cuda_encoder_large_supported(l));
    const struct plan plan = plan_of(l);
    if (workspace_bytes < plan.bytes) {
        return ps_fail(PS_UNSUPPORTED, "encoder layer, backward: needs %zu bytes of workspace, has %zu", plan.bytes,
                       workspace_bytes);
    }
    char *w = (char *)workspace;
    struct arguments p = arguments_of(l);
    p.dy = (const bf16 *)dy;
    p.du = (bf16 *)du;
    p.operands.a = (bf16 *)(w + plan.a);
    p.operands.dqkv = (bf16 *)(w + plan.dqkv);
    p.operands.merged = (bf16 *)(w + plan.merged);
    p.operands.dr = (bf16 *)(w + plan.dr);
    p.operands.ln2 = (bf16 *)(w + plan.ln2);
    p.operands.d_hidden = (bf16 *)(w + plan.d_hidden);
    p.operands.hidden = (bf16 *)(w + plan.hidden);
    p.operands.dy = (bf16 *)(w + plan.dy);
    p.parked = (float *)(w + plan.parked);
    p.norm_sums = (float *)(w + plan.norm_sums);
    PS_TRY(ps_cuda_check(
        cudaFuncSetAttribute((const void *)weight_gradients, cudaFuncAttributeMaxDynamicSharedMemorySize, GRADIENT_BYTES),
        "encoder layer: shared memory"));
    struct gradient_arguments g = plan.gradients;
    g.operands = p.operands;
    g.gradients = *gradients;
    g.partials = (float *)(w + plan.partials);
    g.norm_sums = p.norm_sums;
    for (int64_t s = 0; s < l->sequences; s += plan.sequences) {
        p.sequences = (int)(l->sequences - s < plan.sequences ? l->sequences - s : plan.sequences);
        p.first = s * l->patches;
        g.row_blocks = 2 * (int)((p.sequences + p.group - 1) / p.group);
        g.blocks = blocks_for(l, p.sequences);
        PS_TRY(layer_launch(l, p, 1, g.blocks));
        weight_gradients<<<g.slots, GRADIENT_THREADS, GRADIENT_BYTES, l->stream>>>(g);
        PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, weights' gradients"));
        add_gradients<<<g.columns * ADD_BLOCKS + NORM_SUMS / 32, THREADS, 0, l->stream>>>(g);
        PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, sums of gradients"));
    }
    return PS_OK;
}
