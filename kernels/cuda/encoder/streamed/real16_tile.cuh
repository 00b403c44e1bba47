/* What all of encoder/streamed/real16.cuh's kernels stand on: sizes and places in shared memory, the kernels' arguments, which rows
 * of a tile a thread owns, which tiles a block takes, dropout's draws. */
#ifndef PS_KERNELS_CUDA_ENCODER_REAL16_TILE_CUH
#define PS_KERNELS_CUDA_ENCODER_REAL16_TILE_CUH

#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/count.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

namespace PS_REAL16_SPACE
{

enum { SITE_ATTENTION, SITE_HIDDEN, SITE_OUTPUT, SITES }; /* of dropout */

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
    BOTH_BYTES = STAGES * STAGE_BYTES + 2 * HALF_BYTES + VECTORS * 4 + ASIDE_BYTES,
    FORWARD_BYTES = BOTH_BYTES + SITES * 16,                  /* ps_draws_begin's of each */
    BACKWARD_BYTES = BOTH_BYTES + ROWS * 8 + MAX_SOFTMAX * 4, /* the mean and 1/deviation of each row, and softmax's sums */
};

/* Factors that are taken out of elements and put where sums are finished anyway.
 * gelu's tanh is of u = sqrt(2/pi) (z + 0.044715 z^3) = y (y^2 + GELU_LINEAR) for y = GELU_SCALE z, the cube root of 0.044715
 * sqrt(2/pi) times z. So LN2's gamma and beta and b_1 have that factor, and y (1 + tanh u) = 2 GELU_SCALE gelu(z) is what W_2
 * multiplies. Dropout makes zeros and nothing else: its scale is on W_2's product and the branches' biases forward, and backward
 * on what each LayerNorm passes on and on the sums over rows, so that
 *   dy as W_2's operand   is 1 / s_output of the gradient that it stands for,
 *   d_hidden and dz of LN2   2 / (s_hidden s_output),
 *   dr as W_o's operand, dqkv and dz of LN1   1 / s_attention. */
static constexpr float GELU_SCALE = 0.3292034911525734f, GELU_LINEAR = 2.423681954311584f;

/* The operands of the weights' gradients, as the tensor cores and the copy engine take them: each tile's 128 rows in two halves of
 * 64, a half in panels of 64 columns, a panel as in shared memory. In the rows without a sequence the right operands (dqkv, dr,
 * d_hidden, dy) are zero and the left ones finite. Panels: dqkv 6 (2 each for q, k and v), hidden and d_hidden f/64, the rest 2. */
struct operands {
    real16 *a, *dqkv, *merged, *dr, *ln2, *d_hidden, *hidden, *dy;
};

/* What dropout keeps, a bit an element, by the warps and threads that have drawn it (kept_pairs): hidden [tiles][WARPS][f/64][8
 * rows and as many 8 further][2], see hidden_draw; the others [tiles][THREADS], row_draw's of one pass beside the other's. */
struct kept {
    uint32_t *hidden, *attention, *output;
};

enum { HIDDEN_WORDS = 16 }; /* of a warp, of a chunk */

/* What draws need beside their index, the same for all three sites. */
struct drawing {
    struct ps_round_keys keys;
    uint32_t below, minus_below; /* ps_kept2's */
};

enum weight { WEIGHT_QKV, WEIGHT_O, WEIGHT_1, WEIGHT_2, WEIGHTS };

/* q, k and v are made of fp16 operands in bf16 too: LN1's output and W_qkv are in its range, and with bf16's 8 bits they were the
 * largest errors of a layer's gradients (docs/benchmarks.md). Then both exist in bf16 besides, for the products backward: W_qkv
 * has six parts, q's, k's and v's as fp16 and then in bf16. */
static constexpr bool PROJECTION_APART = !std::is_same<real16, ps_fp16>::value;
enum { QKV_PARTS = PROJECTION_APART ? 6 : 3, FIRST_REAL16_PART = QKV_PARTS - 3 };

/* Parameters of a layer as model/parameters.h names them. */
struct layer_vectors {
    const float *ln1_gamma, *ln1_beta, *b_qkv, *b_o, *ln2_gamma, *ln2_beta, *b_1, *b_2;
};

/* How a launch of many follows the others. What it reads, and what it writes over, is from the launch two before or older, so
 * neighbours may overlap, in one of two ways.
 *
 * late: blocks wait for the launch before only before their last tile. The next one starts when all have, so whatever is two before
 * has ended then.
 * counted, for blocks of few tiles, which late would leave waiting: each launch lets the next one start at once, and its blocks
 * begin when those of the launch two before have counted up at their ends. Some of each launch wait for the one before, so that
 * who has ended has ended with all before; the last one starts nothing early, since the kernel behind relies on that. Beginning and
 * end cost about 1 us a launch more. */
enum { COUNTS = PS_TURN_COUNTS - 1 };
struct turn {
    bool late;
    unsigned *ended;  /* NULL: not counted. [COUNTS] blocks that have ended, of the launches with that number modulo COUNTS, and a
                         ticket of the last launch's */
    int own, before;  /* which count: this launch's, and that of two before; */
    unsigned awaited; /* what that has come to then; 0: nothing has to be awaited */
    bool first, last; /* of the launches */
};

struct arguments {
    CUtensorMap weights[WEIGHTS];  /* boxes of 64 x 64 of them for the copy engine */
    int sequences, N, d, heads, f; /* sequences of this launch */
    int blocks;                    /* that have tiles: all but, in backward, those of weights' gradients */
    int group;                     /* sequences of a tile */
    struct ps_divisor by_heads;
    int64_t first; /* the launch's first row */
    int first_tile;
    float epsilon, scale, per;                   /* scale: 1/sqrt(e); per: 1/d */
    struct ps_dropout attention, hidden, output; /* scale 1 where nothing is dropped */
    struct drawing drawing;
    float w_2_scale; /* of W_2's product forward, of LN2's gradient and of the gradients of W_1 and W_2 backward */
    const real16 *u;
    struct layer_vectors vectors;
    real16 *r, *y;    /* forward's outputs; backward reads r and softmax */
    float *softmax;   /* [S][h][N]: log2 of each query's sum of exponentials */
    struct kept kept; /* forward writes it */
    const real16 *dy;
    real16 *du;
    struct operands operands;
    float *parked;    /* [blocks][ROWS * D]: dr while attention runs */
    float *warp_sums; /* [blocks][WARPS][NORM_SUMS] */
    float *norm_sums; /* [blocks][NORM_SUMS] */
    bool first_norms; /* the launch sets warp_sums to zero first */
    bool last_norms;  /* the launch adds warp_sums up to norm_sums */
    int norm_blocks;  /* blocks from this one on always do that: later launches do not have them */
    struct turn turn;
    bool copied; /* the kernel before makes copies of weights, which are awaited before they are asked for */
    int a;       /* columns of q, k, v and merged, heads times 8, 16 or 32, and of all vectors but b_1 */
};

/* ---- products of a warpgroup, sums += a b: 64 rows times 8 NT columns, 16 deep, a right operand with ACROSS read across its
 * lines. Under way until ps_wgmma_wait. tile/wgmma.cuh has them, but for a predicate that ptxas sees to be true: with its other
 * forms it allocates other registers ---- */

#define PS_REAL16_PRODUCT(TYPE, N, A, B, REST)                                                                                \
    "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PS_NAMES_##N \
        "}, " A ", " B ", p, 1, 1, " REST ";\n}"

/* Both operands, of type T, in shared memory. */
template <int ACROSS, typename T> static __device__ __forceinline__ void multiply_add(float (&sums)[4][4], uint64_t a, uint64_t b)
{
    static_assert(std::is_same<T, real16>::value, "real16");
    asm volatile(PS_REAL16_PRODUCT(PS_REAL16_PTX, 32, "%16", "%17", "0, %18") : PS_SUMS_32(sums) : "l"(a), "l"(b), "n"(ACROSS));
}

template <int ACROSS, typename T> static __device__ __forceinline__ void multiply_add(float (&sums)[8][4], uint64_t a, uint64_t b)
{
    if constexpr (std::is_same<T, real16>::value) {
        asm volatile(PS_REAL16_PRODUCT(PS_REAL16_PTX, 64, "%32", "%33", "0, %34") : PS_SUMS_64(sums) : "l"(a), "l"(b), "n"(ACROSS));
    } else {
        static_assert(std::is_same<T, ps_fp16>::value, "fp16 or real16");
        asm volatile(PS_REAL16_PRODUCT("f16", 64, "%32", "%33", "0, %34") : PS_SUMS_64(sums) : "l"(a), "l"(b), "n"(ACROSS));
    }
}

/* The left one in registers; warp w's rows are rows 16 w on. */
template <int ACROSS> static __device__ __forceinline__ void multiply_add(float (&sums)[16][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile(PS_REAL16_PRODUCT(PS_REAL16_PTX, 128, "{%64, %65, %66, %67}", "%68", "%69")
                 : PS_SUMS_128(sums)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACROSS));
}

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

/* The same in a uniform register: wgmma's operands are made of it. */
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

/* Chunks of the hidden layer. */
static __device__ __forceinline__ int hidden_chunks_of(const struct arguments &p)
{
    return (p.f + CHUNK - 1) / CHUNK;
}

static __device__ __forceinline__ int at_most(int x, int most)
{
    return x < most ? x : most;
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

/* Brings the rows of the block's first tile to L2. */
static __device__ __forceinline__ void first_prefetch(const struct arguments &p, const real16 *rows)
{
    int index = blockIdx.x, thread = threadIdx.x;
    asm volatile("" : "+r"(index), "+r"(thread)); /* else what both have in common with the tiles' loop would be kept, in memory */
    const int line = thread * 64, rest = at_most(p.group, p.sequences - index * p.group) * p.N * p.d;
    if (line < rest) {
        ps_prefetch_near(rows + (p.first + (int64_t)index * p.group * p.N) * p.d + line);
    }
}

static __device__ __forceinline__ int tiles_of_block(const struct arguments &p)
{
    const int tiles = (p.sequences + p.group - 1) / p.group;
    return ((int)blockIdx.x < tiles) ? (tiles - 1 - (int)blockIdx.x) / p.blocks + 1 : 0;
}

/* All threads, before tile i of the block, also where it has none: before anything is read that a launch has left, or written. */
static __device__ __forceinline__ void turn_begin(const struct turn &t, int i, int tiles)
{
    if (!t.ended || t.first) {
        if (i == (t.late ? tiles - 1 : 0)) {
            ps_grid_begin();
        }
        return;
    }
    if (i > 0) {
        return;
    }
    if (!t.last) {
        ps_grid_release();
    }
    if (t.awaited) {
        if (threadIdx.x == 0) {
            while (ps_look(t.ended + t.before) < t.awaited) {
            }
        }
        __syncthreads();
    }
}

/* All threads, at a block's end. waits: it has not waited for the launch before, and is the one that has to. */
static __device__ __forceinline__ void turn_end(const struct turn &t, bool waits)
{
    if (!t.ended) {
        return;
    }
    if (waits && !t.first) {
        ps_grid_wait();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (!t.last) {
            ps_count_up(t.ended + t.own, 1);
        } else if (atomicInc(t.ended + COUNTS, gridDim.x - 1) == gridDim.x - 1) { /* nobody looks any longer */
#pragma unroll
            for (int i = 0; i < COUNTS; i++) {
                t.ended[i] = 0;
            }
        }
    }
}

/* Number `vector` of the vectors as they stand in shared memory; columns: of each part of b_qkv. */
static __device__ __forceinline__ const float *vector_at(const struct layer_vectors &v, int vector, int columns)
{
    return vector == LN1_GAMMA / D   ? v.ln1_gamma
           : vector == LN1_BETA / D  ? v.ln1_beta
           : vector < B_O / D        ? v.b_qkv + (vector - B_QKV / D) * columns
           : vector == B_O / D       ? v.b_o
           : vector == LN2_GAMMA / D ? v.ln2_gamma
           : vector == LN2_BETA / D  ? v.ln2_beta
           : vector == B_2 / D       ? v.b_2
                                     : v.b_1;
}

/* The layer's vectors to shared memory, those of W_1's operand and sums times GELU_SCALE, the branches' biases times dropout's
 * scale. All are asked for before the first is stored, so that their latencies overlap. */
static __device__ __forceinline__ void load_vectors(const struct arguments &p, float *vectors)
{
    constexpr int EACH = (VECTORS + THREADS - 1) / THREADS;
    float x[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = threadIdx.x + k * THREADS, vector = at_most(i / D, B_1 / D), place = i - vector * D;
        const float *from = vector_at(p.vectors, vector, p.a);
        const float scale = vector == B_O / D                                                        ? p.attention.scale
                            : vector == B_2 / D                                                      ? p.output.scale
                            : vector == LN2_GAMMA / D || vector == LN2_BETA / D || vector == B_1 / D ? GELU_SCALE
                                                                                                     : 1.0f;
        x[k] = place < (vector == B_1 / D ? p.f : p.a) ? scale * from[place] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        if (threadIdx.x + k * THREADS < VECTORS) {
            vectors[threadIdx.x + k * THREADS] = x[k];
        }
    }
}

/* ---- dropout: forward draws, and keeps a bit an element for backward ---- */

/* Of two Philox blocks of 8 elements: bit 16 i + 2 k + j is set where element 2 k + i of block j is kept. */
static __device__ __forceinline__ uint32_t kept_pairs(const struct drawing &d, uint4 begin, uint32_t first, uint32_t second)
{
    const struct ps_block blocks[2] = {ps_draws_after(d.keys, begin, first), ps_draws_after(d.keys, begin, second)};
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            bits += ps_kept2(blocks[j].word[k], d.below, d.minus_below) << (2 * k + j);
        }
    }
    return bits;
}

/* A pair's mask: its low half all ones where bit 7 is set, its high half where bit 23 is; 8 bits further up where `upper`. */
static __device__ __forceinline__ uint32_t pair_mask(uint32_t bits, bool upper)
{
    uint32_t mask; /* the selector's high bits: the byte's sign instead of the byte */
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(bits), "r"(upper ? 0xbb99 : 0xaa88));
    return mask;
}

static __device__ __forceinline__ uint64_t dropout_step(const struct arguments &p)
{
    const struct ps_step_state *state = p.attention.state ? p.attention.state : p.hidden.state ? p.hidden.state : p.output.state;
    return state ? state->step : 0;
}

} // namespace PS_REAL16_SPACE

#endif
