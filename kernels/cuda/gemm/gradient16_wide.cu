/* gradient16's larger problems: dw [m, n] += x' dy, db [n] += the columns' sums of dy, 16 bits on Hopper, several in one launch
 * whose sums all run over the same R rows.
 *
 * Why: where wgmma bounds the product and not memory, a tile must be large, since every tile brings its panels from L2: 128 x 256
 * are 48 KB a step of 64 rows, for 1,024 clocks of wgmma. And a layer's four gradients are few such tiles, which fill the
 * multiprocessors in one launch better than in four.
 *
 * A tile is 128 columns of the one operand, `high`, by 192 or 256 of the other, `wide`, the same width in a launch; two
 * warpgroups have 64 of high's columns each and all of wide's, both operands read across as they lie. high is x, or dy where steps
 * bring fewer columns then (turned: d_model 160 fills 192 columns of tiles, not 256), and dw is written turned. Blocks go in
 * pairs, clusters of two, whose tiles lie below one another or side by side: the panels that both read are brought once, by the one
 * or the other block, to both. A ninth warp brings panels, as many steps ahead as shared memory has stages, and goes on to the
 * block's next tile while the last one's sums go out.
 *
 * Clusters stay. While there are more pairs than clusters each takes whole ones, and adds them to dw. The sums of the pairs that
 * are left are cut by rows: as many equal slices of all as there are clusters for, then of as many pairs as clusters are left all
 * rows that are, then the same with the pairs that are left, as Euclid measures. So pieces of different pairs that run at the same
 * time lie at the same rows, and what pairs share is read from memory once: R 16,384 rows of d_model 384 are 206 MB by count, of
 * which 201 are all that there is, and 339 where each cluster left takes a piece behind the other. Pieces of sums go to a
 * workspace, and a second kernel adds them in a fixed order. Columns are summed by three more warps, since a product with ones
 * takes a fifth of a step and more; of tiles that have the same ones of dy each sums every so manieth step, and the second kernel
 * adds up theirs.
 *
 * Bytes: 2 R (m + n); from L2 2 R (m ceil(n / 256) + n ceil(m / 256)) where 256 columns are below one another; 8 bytes an element
 * of a piece. FLOPs: 2 R m n. A layer of d_model 384 (R 16,384): 201 MB, 67 us at 3 TB/s, and 58 GFLOP, 73 us at 790 TFLOP/s. */
#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/operands.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

enum {
    EDGE = 64,          /* rows of a step, columns of a panel */
    PANEL = EDGE * 128, /* bytes */
    DEEP = 16 * 128,    /* of which one wgmma reads */
    HIGH = 2,           /* panels of high in a tile, a warpgroup each */
    MOST_WIDE = 4,      /* of wide; or one less: tiles of two always take longer than either */
    RING = 25,          /* of all stages, at most */
    STAGES = 6,         /* at most */
    BLOCKS = 2,         /* of a cluster */
    MULTIPLY_WARPS = 4 * HIGH,
    MULTIPLY_THREADS = 32 * MULTIPLY_WARPS,
    SUM_WARPS = 3, /* behind the one that fetches */
    THREADS = MULTIPLY_THREADS + 32 + 32 * SUM_WARPS,
    LANES = 8,    /* of the second kernel: those that share a column's sums */
    TOGETHER = 4, /* fours that a thread of it adds */
    MOST_PARTS = 8,
    LEAST_OUTPUTS = 1 << 18,
    MOST_OUTPUTS = 1 << 26, /* of a problem; its pairs' sums of columns fit the workspace then */
    MOST_COLUMNS = 1 << 15,
};

struct problem {
    CUtensorMap high, wide;
    float *dw, *db;             /* db: or NULL */
    int m, n, tiles_m, tiles_n; /* high's columns, wide's */
    bool turned;                /* high is dy and dw [n, m]; else high is x and dw [m, n] */
    bool below;                 /* a pair's tiles lie below one another, else side by side */
    int pairs, pairs_n;         /* all, and those of a row of pairs */
    int first;                  /* pair among the launch's */
    int sum_blocks;             /* of the second kernel */
};

/* Slices of the rows of some cut pairs, counted from the first cut one; a piece is a pair's slice, those of a slice one by one. */
struct part {
    int pair, pairs, slices;
    int cluster, number; /* of the first piece; the next has the next */
    int first, end;      /* steps */
    int steps;           /* of a slice; the last may have fewer */
};

/* Of `pairs` the first `whole` are whole; the sums of `cut` more are cut to pieces. */
struct problems {
    struct problem each[PS_GRADIENTS];
    int count, wide, steps; /* steps of 64 rows */
    int clusters, pairs, whole, cut;
    struct part part[MOST_PARTS]; /* a pair's by rows, a cluster's by time */
    int parts, pieces;
    float *partial; /* [pieces, 2, 128 wide 64] in the order of the threads' registers */
    float *sums;    /* [pieces + whole, 2, wide 64] */
};

struct piece {
    int pair, number, first, steps;
};

/* The i-th that the cluster has; false behind the last. */
static __device__ __forceinline__ bool piece_of(const struct problems &x, int cluster, int i, struct piece &p)
{
    for (int k = 0; k < x.parts; k++) {
        const struct part &part = x.part[k];
        const int at = cluster - part.cluster;
        if (at >= 0 && at < part.pairs * part.slices && i-- == 0) {
            p.pair = x.whole + part.pair + at % part.pairs;
            p.number = part.number + at;
            p.first = part.first + at / part.pairs * part.steps;
            p.steps = min(part.steps, part.end - p.first);
            return true;
        }
    }
    p.pair = cluster + i * x.clusters;
    p.number = x.pieces + p.pair;
    p.first = 0;
    p.steps = x.steps;
    return p.pair < x.whole;
}

/* The other way round: the numbers of a pair's pieces in the order of rows. */
struct pieces {
    int pair, turn, slice; /* the next one's */
};

static __device__ __forceinline__ bool next_piece(const struct problems &x, struct pieces &p, int &number)
{
    if (p.pair < x.whole) {
        number = x.pieces + p.pair;
        return p.slice++ == 0;
    }
    for (; p.turn < x.parts; p.turn++, p.slice = 0) {
        const struct part &part = x.part[p.turn];
        const int at = p.pair - x.whole - part.pair;
        if (at >= 0 && at < part.pairs && p.slice < part.slices) {
            number = part.number + p.slice++ * part.pairs + at;
            return true;
        }
    }
    return false;
}

static __device__ __forceinline__ const struct problem &problem_of(const struct problems &x, int pair)
{
    int i = 0;
    while (pair >= x.each[i].first + x.each[i].pairs) {
        i++;
    }
    return x.each[i];
}

/* A block's tile of a pair: whose, and where it lies, in tiles. */
struct tile {
    const struct problem &of;
    int m, n;

    __device__ __forceinline__ tile(const struct problems &x, int pair, int rank) : of(problem_of(x, pair))
    {
        const int row = (pair - of.first) / of.pairs_n, column = (pair - of.first) % of.pairs_n;
        m = of.below ? BLOCKS * row + rank : row;
        n = of.below ? column : BLOCKS * column + rank;
    }
};

/* The ring: its stages follow one another through all pieces. */
template <int WIDE> struct place {
    static constexpr int COUNT = RING / (HIGH + WIDE), BYTES = (HIGH + WIDE) * PANEL, SHARED = COUNT * BYTES;
    int stage;
    uint32_t parity;

    __device__ __forceinline__ void advance()
    {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* One lane: panels of all steps. Those that both blocks read the one or the other brings to both. */
template <int WIDE>
static __device__ __forceinline__ void fetch(const struct problems &x, uint32_t ring, uint32_t full, uint32_t empty, int cluster,
                                             int rank)
{
    struct place<WIDE> at = {
        0, 1
    }; /* a new ring is empty */
    struct piece piece;
    for (int i = 0; piece_of(x, cluster, i, piece); i++) {
        const struct tile tile(x, piece.pair, rank);
        for (int s = 0; s < piece.steps; s++, at.advance()) {
            const uint32_t to = ring + at.stage * place<WIDE>::BYTES, barrier = full + 8 * at.stage;
            const int row = (piece.first + s) * EDGE;
            ps_mbarrier_wait(empty + 8 * at.stage, at.parity);
            ps_mbarrier_expect(barrier, place<WIDE>::BYTES);
#pragma unroll
            for (int j = 0; j < HIGH + WIDE; j++) {
                const bool of_high = j < HIGH, shared = of_high != tile.of.below;
                const CUtensorMap *const map = of_high ? &tile.of.high : &tile.of.wide;
                const int column = of_high ? (tile.m * HIGH + j) * EDGE : (tile.n * WIDE + j - HIGH) * EDGE;
                if (!shared) {
                    ps_tensor_copy2(to + j * PANEL, map, column, row, barrier);
                } else if (j % BLOCKS == rank) {
                    ps_tensor_copy2_to(to + j * PANEL, map, column, row, barrier, (1 << BLOCKS) - 1);
                }
            }
        }
    }
}

/* Where a tile's sums lie in dw as a thread of the multiplying ones has them: in two rows, two of every 8 columns, fours from the
 * `four`-th on. Turned, rows are dw's columns. */
struct spot {
    float *first, *second;
    int first_left, second_left; /* columns from there on, none where the row is not of dw */
    int apart;                   /* floats from a column to the next */
};

template <int WIDE> static __device__ __forceinline__ struct spot spot_of(const struct tile &tile, int thread, int four)
{
    const struct problem &p = tile.of;
    const int row = tile.m * HIGH * EDGE + thread / 32 * 16 + thread / 4 % 8,
              column = tile.n * WIDE * EDGE + 8 * four + thread % 4 * 2;
    const int down = p.turned ? 1 : p.n, apart = p.turned ? p.m : 1; /* of MOST_OUTPUTS all places are 32 bits */
    float *const first = p.dw + row * down + column * apart;
    return {first, first + 8 * down, row < p.m ? p.n - column : 0, row + 8 < p.m ? p.n - column : 0, apart};
}

/* Two columns of a row, if there are any: their number is even. No other thread of a launch adds to the same ones, so that the bits
 * do not depend on the order. What is below 2^-126 becomes 0 there. */
static __device__ __forceinline__ void add_two(float *row, int left, int j, int apart, float first, float second)
{
    if (8 * j < left && apart == 1) {
        asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(row + 8 * j), "f"(first), "f"(second) : "memory");
    } else if (8 * j < left) {
        float *const to = row + 8 * j * apart;
        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(first) : "memory");
        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + apart), "f"(second) : "memory");
    }
}

/* dw += the j-th four. */
static __device__ __forceinline__ void add_four(const struct spot &s, int j, float4 v)
{
    add_two(s.first, s.first_left, j, s.apart, v.x, v.y);
    add_two(s.second, s.second_left, j, s.apart, v.z, v.w);
}

/* A warpgroup's panel of high times all of wide, for all of the cluster's pieces. */
template <typename T, int WIDE>
static __device__ __forceinline__ void multiply(const struct problems &x, uint32_t ring, uint32_t full, uint32_t empty, int cluster,
                                                int rank, int warp)
{
    constexpr int COLUMNS = WIDE * EDGE;
    const int group = warp / 4, lane = (int)threadIdx.x % 32;
    /* Operands without the block's number in its cluster, which addresses of shared memory begin with. */
    const uint32_t inside = ring & 0x3ffff;
    struct place<WIDE> at = {
        0, 0
    };
    struct piece piece;
    for (int i = 0; piece_of(x, cluster, i, piece); i++) {
        const struct tile tile(x, piece.pair, rank);
        float sum[COLUMNS / 8][4];
        ps_zero(sum);
        int before = 0;
#pragma unroll 1
        for (int s = 0; s < piece.steps; s++) {
            const uint32_t panels = inside + at.stage * place<WIDE>::BYTES;
            const uint32_t left = ps_wgmma_place(panels + group * PANEL), right = ps_wgmma_place(panels + HIGH * PANEL, PANEL);
            ps_mbarrier_wait(full + 8 * at.stage, at.parity);
            ps_wgmma_begin();
#pragma unroll
            for (int k = 0; k < EDGE / 16; k++) {
                ps_wgmma_onto<T, 1, 1>(sum, ps_wgmma_operand(left, k * DEEP), ps_wgmma_operand(right, k * DEEP));
            }
            ps_wgmma_commit();
            ps_wgmma_wait<1>();
            if (s > 0 && lane < BLOCKS) { /* the products of the step before have read their stage */
                ps_mbarrier_arrive_at(empty + 8 * before, lane);
            }
            before = at.stage;
            at.advance();
        }
        ps_wgmma_wait<0>();
        ps_pin(sum);
        if (lane < BLOCKS) {
            ps_mbarrier_arrive_at(empty + 8 * before, lane);
        }
        const int thread = (int)threadIdx.x, slot = piece.number * BLOCKS + rank;
        const struct spot spot = spot_of<WIDE>(tile, thread, 0);
        if (piece.pair < x.whole) {
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) {
                add_four(spot, j, make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]));
            }
        } else { /* what there is of it */
            float4 *const to = (float4 *)x.partial + (int64_t)slot * (COLUMNS / 8 * MULTIPLY_THREADS) + thread;
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) {
                if (8 * j < spot.first_left) {
                    to[j * MULTIPLY_THREADS] = make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
                }
            }
        }
    }
}

/* sum += 8 columns of a panel's rows, every fourth: a lane 16 bytes of a line. */
template <typename T> static __device__ __forceinline__ void add_rows(float (&sum)[8], uint32_t panel, int lane)
{
    enum { LINES = 4, LOADS = 8 }; /* at once */
    const uint32_t first = lane / 8 * 128 + ((lane % 8 ^ lane / 8) << 4);
#pragma unroll
    for (int i = 0; i < EDGE / LINES; i += LOADS) {
        uint4 v[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; j++) { /* units are exchanged by a line's number modulo 8 */
            v[j] = ps_shared_load4(panel + (i + j) * LINES * 128 + (first ^ (j % 2 * LINES) << 4));
        }
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            const uint32_t words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float two[2];
                ps_unpack<T>(two, words[k]);
                sum[2 * k] += two[0];
                sum[2 * k + 1] += two[1];
            }
        }
    }
}

/* The columns' sums of all pieces, a warp those of every SUM_WARPS-th panel of dy. */
template <typename T, int WIDE>
static __device__ __forceinline__ void sum_columns(const struct problems &x, uint32_t ring, uint32_t full, uint32_t empty,
                                                   int cluster, int rank, int warp)
{
    constexpr int PANELS = (WIDE + SUM_WARPS - 1) / SUM_WARPS;
    const int lane = (int)threadIdx.x % 32;
    struct place<WIDE> at = {
        0, 0
    };
    struct piece piece;
    for (int i = 0; piece_of(x, cluster, i, piece); i++) {
        const struct tile tile(x, piece.pair, rank);
        const struct problem &p = tile.of;
        const int panels = p.turned ? HIGH : WIDE, begin = p.turned ? 0 : HIGH; /* dy's */
        const int turn = p.turned ? tile.n : tile.m, turns = p.turned ? p.tiles_n : p.tiles_m;
        /* Until this tile sums columns. */
        int until = p.db && turn < turns ? (turn + turns - piece.first % turns) % turns : piece.steps;
        float sum[PANELS][8] = {};
#pragma unroll 1
        for (int s = 0; s < piece.steps; s++) {
            ps_mbarrier_wait(full + 8 * at.stage, at.parity);
            if (s == until) {
                until += turns;
#pragma unroll
                for (int j = 0; j < PANELS; j++) {
                    const int panel = warp + j * SUM_WARPS;
                    if (panel < panels) {
                        add_rows<T>(sum[j], ring + at.stage * place<WIDE>::BYTES + (begin + panel) * PANEL, lane);
                    }
                }
                __syncwarp();
            }
            if (lane < BLOCKS) {
                ps_mbarrier_arrive_at(empty + 8 * at.stage, lane);
            }
            at.advance();
        }
#pragma unroll
        for (int j = 0; j < PANELS; j++) {
            const int panel = warp + j * SUM_WARPS;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                sum[j][k] += __shfl_xor_sync(0xffffffffu, sum[j][k], 8);
                sum[j][k] += __shfl_xor_sync(0xffffffffu, sum[j][k], 16);
            }
            if (p.db && lane < 8 && panel < panels) {
                ps_store<8>(x.sums + (int64_t)(piece.number * BLOCKS + rank) * (WIDE * EDGE) + panel * EDGE + lane * 8, sum[j]);
            }
        }
    }
}

template <typename T, int WIDE>
static __global__ void __launch_bounds__(THREADS, 1) wide_kernel(const __grid_constant__ struct problems x)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), rank = ps_cluster_rank();
    const int cluster = (int)blockIdx.x / BLOCKS;
    const uint32_t ring = ps_shared_address(shared), full = ps_shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            ps_mbarrier_init(full + 8 * i, 1);
            ps_mbarrier_init(empty + 8 * i, BLOCKS * (MULTIPLY_WARPS + SUM_WARPS));
        }
        ps_mbarrier_publish();
    }
    if (warp == MULTIPLY_WARPS && ps_elect()) {
        for (int i = 0; i < x.count; i++) {
            ps_tensor_prefetch(&x.each[i].high);
            ps_tensor_prefetch(&x.each[i].wide);
        }
    }
    __syncthreads();
    ps_cluster_arrive();
    ps_cluster_wait();
    ps_grid_begin();
    if (warp == MULTIPLY_WARPS) {
        if (ps_elect()) {
            fetch<WIDE>(x, ring, full, empty, cluster, rank);
        }
        __syncwarp();
    } else if (warp < MULTIPLY_WARPS) {
        multiply<T, WIDE>(x, ring, full, empty, cluster, rank, warp);
    } else {
        sum_columns<T, WIDE>(x, ring, full, empty, cluster, rank, warp - MULTIPLY_WARPS - 1);
    }
    ps_cluster_arrive(); /* until the other is here too, the barriers must stay */
    ps_cluster_wait();
}

/* dw += the cut pairs' pieces, db += the columns' sums. Blocks: of each tile of a cut pair its float4s, TOGETHER a thread, since
 * what finds a piece takes more instructions than what adds it; then of each problem's columns 32, LANES threads a column. */
template <int WIDE>
static __global__ void __launch_bounds__(MULTIPLY_THREADS, 4) add_kernel(const __grid_constant__ struct problems x)
{
    constexpr int COLUMNS = WIDE * EDGE, TILE_BLOCKS = COLUMNS / 8 / TOGETHER;
    static_assert(LANES * 32 == MULTIPLY_THREADS, "a block of either kind");
    __shared__ float all[LANES][32];
    const int thread = (int)threadIdx.x;
    int block = (int)blockIdx.x;
    if (block < x.cut * BLOCKS * TILE_BLOCKS) {
        const int pair = x.whole + block / (BLOCKS * TILE_BLOCKS), rank = block / TILE_BLOCKS % BLOCKS,
                  first = block % TILE_BLOCKS * TOGETHER;
        struct pieces pieces = {pair, 0, 0};
        const struct spot spot = spot_of<WIDE>(tile(x, pair, rank), thread, first);
        float4 sum[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            sum[j] = make_float4(0, 0, 0, 0);
        }
        ps_grid_begin();
        for (int number; next_piece(x, pieces, number);) {
            const int64_t slot = (int64_t)number * BLOCKS + rank;
            const float4 *const from = (const float4 *)x.partial + (slot * (COLUMNS / 8) + first) * MULTIPLY_THREADS + thread;
            float4 v[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                v[j] = 8 * j < spot.first_left ? from[j * MULTIPLY_THREADS] : make_float4(0, 0, 0, 0);
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                sum[j] = make_float4(sum[j].x + v[j].x, sum[j].y + v[j].y, sum[j].z + v[j].z, sum[j].w + v[j].w);
            }
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            add_four(spot, j, sum[j]);
        }
        return;
    }
    ps_grid_begin();
    block -= x.cut * BLOCKS * TILE_BLOCKS;
    int number = 0;
    for (; block >= x.each[number].sum_blocks; number++) {
        block -= x.each[number].sum_blocks;
    }
    const struct problem &p = x.each[number];
    const int column = block * 32 + thread % 32, lane = thread / 32;
    const int columns = p.turned ? p.m : p.n /* dy's */, of_tile = p.turned ? HIGH * EDGE : COLUMNS;
    float sum = 0;
    if (column < columns) {
        for (int turn = lane; turn < (p.turned ? p.tiles_n : p.tiles_m); turn += LANES) {
            const int tile_m = p.turned ? column / of_tile : turn, tile_n = p.turned ? turn : column / of_tile;
            const int rank = (p.below ? tile_m : tile_n) % BLOCKS;
            const int pair = p.first + (p.below ? tile_m / BLOCKS * p.pairs_n + tile_n : tile_m * p.pairs_n + tile_n / BLOCKS);
            struct pieces pieces = {pair, 0, 0};
            for (int piece; next_piece(x, pieces, piece);) {
                sum += x.sums[(int64_t)(piece * BLOCKS + rank) * COLUMNS + column % of_tile];
            }
        }
    }
    all[lane][thread % 32] = sum;
    __syncthreads();
    if (lane == 0 && column < columns) {
#pragma unroll
        for (int i = 1; i < LANES; i++) {
            sum += all[i][thread];
        }
        p.db[column] += sum;
    }
}

/* ---- the choice, by shape and layout, and how rows are cut ---- */

static int ceil_div(int64_t a, int64_t b)
{
    return (int)((a + b - 1) / b);
}

bool ps_cuda_gradient16_wide_serves(const struct ps_product *p)
{
    return p->m > EDGE && p->n > EDGE && p->m <= MOST_COLUMNS && p->n <= MOST_COLUMNS && p->m * p->n <= MOST_OUTPUTS &&
           (uintptr_t)p->c.data % 16 == 0;
}

/* Measured (docs/experiments/products.md): of a side beyond 128 gradient16.cu's last tiles are often mostly empty. */
bool ps_cuda_gradient16_wide_wanted(int64_t outputs, int64_t side)
{
    return outputs > (side > HIGH * EDGE ? LEAST_OUTPUTS / 2 : LEAST_OUTPUTS);
}

/* A step of a tile takes as long as the columns that it brings, and what a barrier costs. Returns that of all pairs. */
static int64_t pair_up(struct problem *p, const struct ps_product *of, int wide, bool turned)
{
    enum { BARRIER = 16 }; /* columns */
    p->turned = turned;
    p->m = (int)(turned ? of->n : of->m);
    p->n = (int)(turned ? of->m : of->n);
    p->tiles_m = ceil_div(p->m, HIGH * EDGE);
    p->tiles_n = ceil_div(p->n, wide * EDGE);
    const int below = ceil_div(p->tiles_m, BLOCKS) * p->tiles_n, beside = p->tiles_m * ceil_div(p->tiles_n, BLOCKS);
    const int64_t below_time = (int64_t)below * (HIGH * EDGE + wide * EDGE / BLOCKS + BARRIER),
                  beside_time = (int64_t)beside * (HIGH * EDGE / BLOCKS + wide * EDGE + BARRIER);
    p->below = below_time <= beside_time;
    p->pairs = p->below ? below : beside;
    p->pairs_n = p->below ? p->tiles_n : ceil_div(p->tiles_n, BLOCKS);
    return p->below ? below_time : beside_time;
}

/* Floats of the workspace that the pieces take, and all. */
static size_t piece_floats(const struct problems *x)
{
    return (size_t)x->pieces * BLOCKS * HIGH * EDGE * (size_t)(x->wide * EDGE);
}

static size_t sum_floats(const struct problems *x)
{
    return piece_floats(x) + (size_t)(x->pieces + x->whole) * BLOCKS * (size_t)(x->wide * EDGE);
}

/* Cuts the cut pairs to parts of which no cluster has more than `most` steps; false where that does not go. deepest: pieces of the
 * cluster that has most of them. */
static bool divide(struct problems *x, int most, int *deepest)
{
    enum { LEAST = 4 }; /* steps of a slice */
    int pair = 0, cluster = 0, first = 0;
    x->parts = x->pieces = 0;
    *deepest = 1;
    while (pair < x->cut) {
        const int pairs = x->cut - pair, clusters = x->clusters - cluster, steps = x->steps - first;
        if (clusters == 0 || x->parts == MOST_PARTS || most < LEAST || (clusters < pairs && steps > most)) {
            return false;
        }
        struct part *p = &x->part[x->parts++];
        p->pair = pair;
        p->cluster = cluster;
        p->number = x->pieces;
        p->first = first;
        if (clusters < pairs) { /* all rows of as many */
            p->pairs = clusters;
            p->slices = 1;
            p->steps = steps;
            p->end = x->steps;
            pair += clusters;
            most -= steps;
            ++*deepest;
        } else { /* as many rows of all */
            const int slices = min(clusters / pairs, ceil_div(steps, most));
            p->pairs = pairs;
            p->steps = min(most, ceil_div(steps, slices));
            p->slices = min(slices, ceil_div(steps, p->steps));
            p->end = min(x->steps, first + p->slices * p->steps);
            first = p->end;
            cluster += p->slices * pairs;
            pair += first == x->steps ? pairs : 0;
        }
        x->pieces += p->pairs * p->slices;
    }
    return true;
}

/* Cuts what does not fill the clusters, if that is faster: by what their steps and pieces take, in steps. */
static void cut(struct problems *x, size_t floats)
{
    enum { PIECE = 3, PIECES = 5, SECOND = 4 }; /* a cluster's piece; so many of the second kernel take a step; its start */
    struct problems tried = *x;
    tried.whole = x->pairs / x->clusters * x->clusters;
    tried.cut = x->pairs - tried.whole;
    const int least = ceil_div((int64_t)tried.cut * x->steps, x->clusters);
    int time = x->steps + PIECE;
    for (int most = least; tried.cut > 0 && most < time; most += 1 + least / 32) {
        int deepest;
        if (divide(&tried, most, &deepest) && sum_floats(&tried) <= floats) {
            const int takes = most + PIECE * deepest + tried.pieces / PIECES + SECOND;
            if (takes < time) {
                time = takes;
                *x = tried;
            }
        }
    }
}

template <typename T, int WIDE>
static enum ps_status launch(const struct ps_cuda_context *c, const struct ps_product *each, struct problems *x)
{
    int sum_blocks = 0;
    for (int i = 0; i < x->count; i++) {
        struct problem *p = &x->each[i];
        CUtensorMap *const x_map = p->turned ? &p->wide : &p->high, *const dy_map = p->turned ? &p->high : &p->wide;
        PS_TRY(ps_tensor_map_2d(x_map, each[i].a.data, each[i].k, each[i].m, 2 * each[i].a.column, EDGE, EDGE));
        PS_TRY(ps_tensor_map_2d(dy_map, each[i].b.data, each[i].k, each[i].n, 2 * each[i].b.row, EDGE, EDGE));
        p->sum_blocks = p->db ? ceil_div(each[i].n, 32) : 0;
        sum_blocks += p->sum_blocks;
    }
    const int add_blocks = x->cut * BLOCKS * (WIDE * EDGE / 8 / TOGETHER) + sum_blocks;
    constexpr size_t shared = place<WIDE>::SHARED;
    PS_TRY(ps_cuda_allow_shared((const void *)wide_kernel<T, WIDE>, shared, "gemm"));
    ps_cuda_launch_clusters(c, wide_kernel<T, WIDE>, BLOCKS, (unsigned)(x->clusters * BLOCKS), THREADS, shared, *x);
    if (add_blocks > 0) {
        PS_TRY(ps_cuda_check(cudaGetLastError(), "gemm"));
        ps_cuda_launch(c, add_kernel<WIDE>, (unsigned)add_blocks, MULTIPLY_THREADS, 0, *x);
    }
    PS_CUDA_LAUNCHED("gemm");
}

/* How they are cut, and of which tiles: of those that bring the fewest columns. */
static enum ps_status plan(const struct ps_cuda_context *c, const struct ps_product *each, int count, struct problems *x)
{
    int64_t least = INT64_MAX;
    for (int wide = MOST_WIDE; wide >= MOST_WIDE - 1; wide--) {
        struct problems tried = {};
        tried.wide = wide;
        tried.count = count;
        tried.steps = ceil_div(each->k, EDGE);
        int64_t time = 0;
        for (int i = 0; i < count; i++) {
            struct problem *p = &tried.each[i];
            p->dw = (float *)each[i].c.data;
            p->db = each[i].sums;
            p->first = tried.pairs;
            const bool turned = pair_up(p, &each[i], wide, true) < pair_up(p, &each[i], wide, false);
            time += pair_up(p, &each[i], wide, turned);
            tried.pairs += p->pairs;
        }
        if (time < least) {
            least = time;
            *x = tried;
        }
    }
    x->whole = x->pairs;
    x->clusters = c->multiprocessors / BLOCKS;
    const size_t floats = c->workspace_bytes / sizeof(float);
    if (sum_floats(x) > floats) {
        return ps_fail(PS_UNSUPPORTED, "gemm: sums of %d gradients take %zu floats, the workspace has %zu", count, sum_floats(x),
                       floats);
    }
    cut(x, floats);
    x->partial = (float *)c->workspace;
    x->sums = x->partial + piece_floats(x);
    return PS_OK;
}

template <typename T> static enum ps_status products(const struct ps_cuda_context *c, const struct ps_product *each, int count)
{
    struct problems x;
    PS_TRY(plan(c, each, count, &x));
    return x.wide == MOST_WIDE ? launch<T, MOST_WIDE>(c, each, &x) : launch<T, MOST_WIDE - 1>(c, each, &x);
}

enum ps_status ps_cuda_gradient16_wide_products(const struct ps_cuda_context *c, const struct ps_product *each, int count)
{
    return each->type == PS_BF16 ? products<ps_bf16>(c, each, count) : products<ps_fp16>(c, each, count);
}
