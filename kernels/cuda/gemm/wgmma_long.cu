/* Products of float32 on Hopper's tensor cores, many rows times a weight of many terms, with what follows them done on the way out:
 * c [m, n] = a b with a [m, k] row by row (ps_gemm_bias, ps_gemm_finish). gemm/wgmma_float.cuh says how they are multiplied.
 *
 * wgmma reads tf32 with the summed dimension contiguous only, and as it lies, not rounded. So the weight is made ready first, by
 * kernels of its own: turned where it lies the other way, rounded or split, its terms in the order of a lane's fragments. A block
 * then takes tiles of 128 rows by N columns, in tf32 up to 256, in fp32 up to 128. The copy engine brings 32 terms at a time to a
 * ring of stages, the weight's panels by halves to both blocks of a pair; two warpgroups take 64 rows each, split their rows in
 * registers and multiply them with the weight's panel. Sums go out through shared memory, 32 columns at a time, in a loop that is
 * not unrolled; from there a lane takes 4 neighbouring columns of four rows.
 *
 * Bytes: 4 m (k + n), 4 m n for each tensor beside c, and 12 k n (fp32: 16) for the weight; a again from L2 for every other tile of
 * columns, the weight for every tile of rows. FLOPs: 2 m n k of tf32, in fp32 6 m n k of fp16. Few terms are bound by memory, from
 * 512 on the tensor cores.
 *
 * Why not cuBLASLt: its fp32 is FFMA's, 51 TFLOP/s at best; in tf32 its first heuristic moves 0.5 to 0.77 of the bytes a second
 * that a copy does, and what follows are passes of their own. */
#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/gemm/wgmma_float.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tile/activation.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/dropout.cuh"

enum {
    PAIR = 2,   /* blocks that share a weight's panels */
    ROWS = 128, /* of a tile */
    WARPS = 8,  /* that multiply; a warpgroup more brings panels */
    THREADS = (WARPS + 4) * 32,
    PART = 32,              /* columns that go out at once */
    LINES = 4,              /* a lane's rows of them, of each 4 columns */
    STAGED = 16 * PART * 4, /* bytes of a warp's rows of them */
    MOST_STAGES = 6,
    FEW_REGISTERS = 40,
    MANY_REGISTERS = 232,
};

struct long_product {
    int64_t m, ldc;
    int n, k, tiles_n, places, pieces, first, stages; /* pairs of tiles; the slice's first column; of the ring */
    float *c, *kept;                                  /* kept: the slope; NULL: not wanted */
    const float *addend, *bias, *from;                /* from: of the slice's columns, fp32's scales to be taken back */
    float alpha, beta;                                /* SUM's */
    struct ps_dropout dropout;
    enum ps_activation activation;
};

/* ---- the weight, made ready ---- */

struct weight {
    const float *b; /* [k, n]: a slice's columns; beyond its edges zeros are taken */
    int64_t row, column;
    int k, n, pieces, columns, slabs; /* of DEEP terms; of whole tiles; parts of k */
    float *to;                        /* [columns, pieces] lines */
    float *from, *largest;            /* fp32: [columns], [slabs, columns] */
};

enum { MOST_SLABS = 8, SLAB = 128, PREPARING = 256 }; /* terms of a slab at least; threads */

/* A slab's largest magnitudes of 32 columns. */
static __global__ void __launch_bounds__(PREPARING) largest_kernel(const __grid_constant__ struct weight w)
{
    ps_grid_begin();
    __shared__ int largest[32];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, column0 = (int)blockIdx.x * 32;
    const int slab = (w.k + w.slabs - 1) / w.slabs, k0 = (int)blockIdx.y * slab, k1 = min(w.k, k0 + slab);
    if (warp == 0) {
        largest[lane] = 0;
    }
    __syncthreads();
    /* Lanes take neighbours in memory: of terms, or of columns. */
    const bool along_k = w.row == 1;
    const int column_step = along_k ? PREPARING / 32 : 32, k_step = along_k ? 32 : PREPARING / 32;
    for (int column = along_k ? warp : lane; column < 32 && column0 + column < w.n; column += column_step) {
        float most = 0.0f;
#pragma unroll 4
        for (int k = k0 + (along_k ? lane : warp); k < k1; k += k_step) {
            most = fmaxf(most, fabsf(w.b[k * w.row + (column0 + column) * w.column]));
        }
        atomicMax(&largest[column], __float_as_int(most)); /* in any order, the same */
    }
    __syncthreads();
    if (warp == 0) {
        w.largest[blockIdx.y * w.columns + column0 + lane] = __int_as_float(largest[lane]);
    }
}

/* A unit a thread. */
template <bool EXACT> static __global__ void __launch_bounds__(PREPARING) prepare_kernel(const __grid_constant__ struct weight w)
{
    ps_grid_begin();
    constexpr int UNITS = units_of<EXACT>, TERMS = DEEP / UNITS;
    const int i = (int)(blockIdx.x * PREPARING + threadIdx.x), units = w.pieces * UNITS;
    const bool along_k = w.row == 1;
    const int column = along_k ? i / units : i % w.columns, unit = along_k ? i % units : i / w.columns;
    if (i >= units * w.columns) {
        return;
    }
    struct scale scale = {1.0f, 1.0f};
    if constexpr (EXACT) {
        float largest = 0.0f;
        for (int slab = 0; slab < w.slabs; slab++) {
            largest = fmaxf(largest, w.largest[slab * w.columns + column]);
        }
        scale = scale_of(largest);
        if (unit == 0) {
            w.from[column] = scale.from;
        }
    }
    float x[TERMS];
#pragma unroll
    for (int t = 0; t < TERMS; t++) {
        const int k = unit / UNITS * DEEP + term_at<EXACT>(unit % UNITS * TERMS + t);
        x[t] = column < w.n && k < w.k ? scale.to * w.b[k * w.row + column * w.column] : 0.0f;
    }
    uint32_t *const to = (uint32_t *)w.to + ((int64_t)column * w.pieces + unit / UNITS) * DEEP + unit % UNITS * 4;
    uint32_t hi[4], lo[4] = {};
#pragma unroll
    for (int t = 0; t < 4; t++) {
        if constexpr (EXACT) {
            split_pair(hi[t], lo[t], x[2 * t], x[2 * t + 1]);
        } else {
            hi[t] = ps_round_up(x[t]);
        }
    }
    *(uint4 *)to = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    if (EXACT) {
        *(uint4 *)(to + DEEP / 2) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
}

/* ---- a tile on its way out ---- */

/* v becomes scale times its activation; SLOPE: slope is scale times the derivative there. What tf32 hides is taken from the faster
 * forms. */
template <enum ps_activation ACTIVATION, bool EXACT, bool SLOPE>
static __device__ __forceinline__ void activate(float (&v)[LINES][4], float (&slope)[LINES][4], float scale)
{
    const float half = 0.5f * scale, peak = SLOPE && ACTIVATION == PS_GELU ? ps_log2(0.39894228040143268f * scale) : 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * LINES; i++) {
        const float t = v[i / 4][i % 4];
        float &y = v[i / 4][i % 4], &s = slope[i / 4][i % 4];
        if constexpr (ACTIVATION == PS_GELU && !EXACT) {
            y = SLOPE ? ps_gelu_near_with_slope(t, half, peak, s) : ps_gelu_near(t, scale);
        } else {
            y = scale * ps_activated<ACTIVATION>(t);
            s = SLOPE ? scale * ps_activation_slope<ACTIVATION>(t) : 0.0f;
        }
    }
}

template <bool EXACT, bool SLOPE>
static __device__ __forceinline__ void activate(enum ps_activation which, float (&v)[LINES][4], float (&slope)[LINES][4],
                                                float scale)
{
    if (which == PS_GELU) {
        activate<PS_GELU, EXACT, SLOPE>(v, slope, scale);
    } else if (which == PS_RELU) {
        activate<PS_RELU, EXACT, SLOPE>(v, slope, scale);
    } else {
        activate<PS_GELU_TANH, EXACT, SLOPE>(v, slope, scale);
    }
}

/* A lane's rows of a part, each fourth: the first one's element, how many rows there are from that one on, and its column. */
struct spot {
    int64_t first;
    int rows, column;

    __device__ __forceinline__ spot(const struct long_product &x, int64_t row0, int column0)
    {
        const int lane = (int)threadIdx.x % 32;
        const int64_t row = row0 + lane / 8;
        column = column0 + lane % 8 * 4;
        first = row * x.ldc + column;
        rows = column < x.n ? (int)min((int64_t)INT32_MAX, x.m - row) : 0;
    }
    __device__ __forceinline__ bool here(int i) const
    {
        return i * 4 < rows;
    }
    __device__ __forceinline__ int64_t at(const struct long_product &x, int i) const
    {
        return first + i * 4 * x.ldc;
    }
};

template <enum ps_finish FINISH>
static __device__ __forceinline__ void fetch(float (&beside)[LINES][4], const struct long_product &x, const struct spot &spot)
{
    const float *const from = FINISH == PS_FINISH_SLOPE ? x.kept : x.addend;
#pragma unroll
    for (int i = 0; i < LINES; i++) {
        *(float4 *)beside[i] = make_float4(0, 0, 0, 0);
        if (FINISH != PS_FINISH_ACTIVATION && from && spot.here(i)) {
            *(float4 *)beside[i] = *(const float4 *)(from + spot.at(x, i));
        }
    }
}

/* The warp's 16 rows of sums, from row0 and column0 on; room: its own. c may be what it is added to. */
template <int N, bool EXACT, enum ps_finish FINISH>
static __device__ __forceinline__ void finish_rows(const struct long_product &x, const float (&sum)[N / 8][4], uint32_t room,
                                                   int64_t row0, int column0, uint64_t drawn_at)
{
    constexpr int PARTS = N / PART;
    const int lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    constexpr bool DRAWS = FINISH == PS_FINISH_RESIDUAL || FINISH == PS_FINISH_ACTIVATION;
    const bool dropped = DRAWS && x.dropout.threshold;
    const float scale = dropped ? x.dropout.scale : 1.0f;
    float next[LINES][4];
    auto spot_of = [&](int part) { return spot(x, row0, column0 + part * PART); };
    fetch<FINISH>(next, x, spot_of(0));
#pragma unroll 1
    for (int part = 0; part < PARTS && column0 + part * PART < x.n; part++) {
        const struct spot own = spot_of(part);
        __syncwarp();
#pragma unroll
        for (int p = 0; p < PARTS; p++) { /* units of 16 bytes change places by the row: neither writes nor reads meet in a bank */
            if (p == part) {
                const float(*const from)[4] = sum + p * (PART / 8);
#pragma unroll
                for (int j = 0; j < PART / 8; j++) {
                    const uint32_t to = room + g * LINE + ((2 * j + q / 2 ^ g % 4 * 2) << 4) + q % 2 * 8;
                    ps_shared_store2(to, make_float2(from[j][0], from[j][1]));
                    ps_shared_store2(to + 8 * LINE, make_float2(from[j][2], from[j][3]));
                }
            }
        }
        __syncwarp();
        float v[LINES][4], beside[LINES][4], bias[4] = {}, from[4] = {};
        if (EXACT) {
            *(float4 *)from = *(const float4 *)(x.from + own.column - x.first);
        }
        if (FINISH != PS_FINISH_SLOPE && x.bias && own.column < x.n) {
            *(float4 *)bias = *(const float4 *)(x.bias + own.column);
        }
#pragma unroll
        for (int i = 0; i < LINES; i++) {
            const int line = i * 4 + lane / 8;
            *(uint4 *)v[i] = ps_shared_load4(room + line * LINE + ((lane % 8 ^ line % 4 * 2) << 4));
            *(float4 *)beside[i] = *(const float4 *)next[i];
#pragma unroll
            for (int j = 0; EXACT && j < 4; j++) {
                v[i][j] *= from[j];
            }
        }
        if (part + 1 < PARTS) {
            fetch<FINISH>(next, x, spot_of(part + 1));
        }
        uint32_t draws[LINES][2];
        if (dropped) {
#pragma unroll
            for (int i = 0; i < LINES; i += 2) {
                ps_draw_pair(x.dropout, drawn_at, (uint64_t)own.at(x, i) / 8, (uint64_t)own.at(x, i + 1) / 8, draws[i],
                             draws[i + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < LINES; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if constexpr (FINISH == PS_FINISH_SUM) {
                    v[i][j] = fmaf(x.beta, beside[i][j], fmaf(x.alpha, v[i][j], bias[j]));
                } else if constexpr (FINISH == PS_FINISH_SLOPE) {
                    v[i][j] *= beside[i][j];
                } else {
                    v[i][j] += bias[j];
                }
            }
        }
        float slope[LINES][4] = {};
        if constexpr (FINISH == PS_FINISH_ACTIVATION) {
            x.kept ? activate<EXACT, true>(x.activation, v, slope, scale) : activate<EXACT, false>(x.activation, v, slope, scale);
        }
#pragma unroll
        for (int i = 0; i < LINES; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bool goes = dropped && ps_pair_draw(draws[i], j) < x.dropout.threshold;
                if constexpr (FINISH == PS_FINISH_RESIDUAL) {
                    v[i][j] = goes ? beside[i][j] : fmaf(v[i][j], scale, beside[i][j]);
                } else {
                    v[i][j] = goes ? 0.0f : v[i][j];
                    slope[i][j] = goes ? 0.0f : slope[i][j];
                }
            }
            if (FINISH == PS_FINISH_ACTIVATION && x.kept && own.here(i)) {
                *(float4 *)(x.kept + own.at(x, i)) = *(const float4 *)slope[i];
            }
            if (own.here(i)) {
                *(float4 *)(x.c + own.at(x, i)) = *(const float4 *)v[i];
            }
        }
    }
}

/* ---- the kernel ---- */

/* Bytes of a stage: rows of a in two boxes of 16 terms, then the weight's panel. */
enum { LEFT = ROWS * LINE };
template <int N> static constexpr int stage_bytes = LEFT + N *LINE;

/* A lane's fragments of 64 rows of a stage, from `from` on: its four of every 16 terms of two rows. */
template <bool EXACT> static __device__ __forceinline__ void read_rows(struct left_part<EXACT> &rows, uint32_t from)
{
    float x[2][8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        *(uint4 *)&x[i / 2][i % 2 * 4] = ps_shared_load4(from + i % 2 * (LEFT / 2) + i / 2 * 8 * (LINE / 2));
    }
    rows.split(x);
}

/* Two warpgroups have 64 rows of each tile: one multiplies while the other splits its rows and adds. */
template <int N, bool EXACT, enum ps_finish FINISH>
static __global__ void __launch_bounds__(THREADS, 1)
    long_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ struct long_product x)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * MOST_STAGES];
    constexpr int STAGE = stage_bytes<N>;
    const uint32_t ring = (ps_shared_address(memory) + 1023u) & ~1023u, rooms = ring + x.stages * STAGE;
    const uint32_t full = ps_shared_address(barriers), empty = full + 8 * MOST_STAGES;
    /* The same for a whole warp, and said so: else the compiler waits after every wgmma. */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32;
    const int rank = ps_cluster_rank(), first = (int)blockIdx.x / PAIR, stride = (int)gridDim.x / PAIR;
    if (threadIdx.x == 0) {
        ps_tensor_prefetch(&a_map);
        ps_tensor_prefetch(&b_map);
        for (int i = 0; i < x.stages; i++) {
            ps_mbarrier_init(full + 8 * i, 1);
            ps_mbarrier_init(empty + 8 * i, PAIR * WARPS);
        }
        ps_mbarrier_publish();
    }
    ps_cluster_arrive();
    ps_cluster_wait();
    ps_grid_begin();
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)FEW_REGISTERS));
        /* A thread brings a's panels, and its share of the weight's to both blocks. */
        constexpr int SHARE = N / PAIR;
        int stage = 0;
        uint32_t parity = 1; /* a new ring is empty */
        for (int place = first; threadIdx.x == WARPS * 32 && place < x.places; place += stride) {
            const int row = (place / x.tiles_n * PAIR + rank) * ROWS, column = place % x.tiles_n * N + rank * SHARE;
            for (int p = 0; p < x.pieces; p++) {
                const uint32_t to = ring + stage * STAGE, share = to + LEFT + rank * SHARE * LINE, barrier = full + 8 * stage;
                ps_mbarrier_wait(empty + 8 * stage, parity);
                ps_mbarrier_expect(barrier, STAGE);
                ps_tensor_copy2(to, &a_map, p * DEEP, row, barrier);
                ps_tensor_copy2(to + LEFT / 2, &a_map, p * DEEP + DEEP / 2, row, barrier);
                ps_tensor_copy2_to(share, &b_map, p * DEEP, column, barrier, (1 << PAIR) - 1);
                if (++stage == x.stages) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)MANY_REGISTERS));
        const uint64_t drawn_at = FINISH != PS_FINISH_SUM && x.dropout.threshold ? x.dropout.state->step : 0;
        const uint32_t from = ring + (warp * 16 + lane / 4) * (LINE / 2) + lane % 4 * 16, room = rooms + warp * STAGED;
        /* Without the block's number in its cluster: an operand has no room for that. */
        const uint32_t right = ps_wgmma_place((ring & 0x3ffff) + LEFT);
        int stage = 0, coming = 0; /* of the product; of the rows that are read next */
        uint32_t parity = 0;
        auto read = [&](struct left_part<EXACT> &rows) {
            ps_mbarrier_wait(full + 8 * coming, parity);
            read_rows<EXACT>(rows, from + coming * STAGE);
            if (++coming == x.stages) {
                coming = 0;
                parity ^= 1;
            }
        };
        /* The stage, to both blocks' next panels. */
        auto leave = [&]() {
            ps_wgmma_wait<0>();
            if (lane == 0) {
                ps_mbarrier_arrive(empty + 8 * stage);
                ps_mbarrier_arrive_at(empty + 8 * stage, rank ^ 1);
            }
            stage = stage + 1 == x.stages ? 0 : stage + 1;
        };
        for (int place = first; place < x.places; place += stride) {
            struct left_part<EXACT> now, next; /* the next rows are read while these are multiplied */
            float sum[N / 8][4], part[EXACT ? N / 8 : 1][4];
            auto multiply = [&](const struct left_part<EXACT> &rows, struct left_part<EXACT> &others, int p) {
                const uint32_t panel = right + (stage * STAGE >> 4);
                if constexpr (EXACT) {
                    piece<N, true>(part, rows, panel, LINE / 2, 0);
                } else {
                    piece<N, false>(sum, rows, panel, 0, p);
                }
                if (p + 1 < x.pieces) {
                    read(others);
                }
                leave();
                if constexpr (EXACT) {
                    ps_pin(part);
                    add_to<N>(sum, part, rows);
                }
            };
            if (EXACT) {
                ps_zero(sum);
            }
            read(now);
            for (int p = 0; p < x.pieces; p += 2) {
                multiply(now, next, p);
                if (p + 1 < x.pieces) {
                    multiply(next, now, p + 1);
                }
            }
            ps_pin(sum);
            finish_rows<N, EXACT, FINISH>(x, sum, room, (int64_t)(place / x.tiles_n * PAIR + rank) * ROWS + warp * 16,
                                          x.first + place % x.tiles_n * N, drawn_at);
        }
    }
    ps_cluster_arrive(); /* the other block may still arrive here, and share with this one */
    ps_cluster_wait();
}

/* ---- launching ---- */

static bool aligned(const void *data, int64_t stride)
{
    return (uintptr_t)data % 16 == 0 && stride % 4 == 0;
}

static bool serves(const struct ps_kernels *k, const struct ps_product *p)
{
    enum { MOST_TERMS = PS_FLOAT_WORKSPACE / 1024 }; /* of a tile of 256 columns */
    return ps_cuda(k)->compute_capability == 90 && p->type == PS_F32 && p->batch[0] * p->batch[1] == 1 && p->n % 4 == 0 &&
           p->k % 4 == 0 && p->k <= MOST_TERMS && (p->m + 512) * (p->n + 256) < (int64_t)1 << 43 && p->m < INT32_MAX - 512 &&
           p->a.column == 1 && p->c.column == 1 && (p->b.column == 1 || p->b.row == 1) && aligned(p->a.data, p->a.row) &&
           aligned(p->c.data, p->c.row) && aligned(p->addend, 0) && aligned(p->bias, 0);
}

/* Where there are tiles for all multiprocessors; the library cuts the sum where there are not, and in tf32 is the faster where the
 * weight lies along its terms. */
bool ps_cuda_long_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    return serves(k, p) && p->n >= 32 && ceil_div(p->m, ROWS) * ceil_div(p->n, 128) >= ps_cuda(k)->multiprocessors &&
           (ps_cuda_exact(k) || p->b.column == 1);
}

/* Smaller weights are multiplied by `rows`, and what follows is a pass of its own: measured on an H100,
 * docs/experiments/products.md. Dropout draws by 8 columns. */
bool ps_cuda_long_finishes(const struct ps_kernels *k, const struct ps_product *p)
{
    enum { LEAST = 1 << 16 }; /* elements of the weight */
    return serves(k, p) && p->n % 8 == 0 && p->m >= 1024 && p->n * p->k >= LEAST;
}

template <int N, bool EXACT, enum ps_finish FINISH>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, struct long_product x)
{
    constexpr int STAGE = stage_bytes<N>;
    size_t bytes;
    struct weight w = {};
    w.to = (float *)ps_cuda_gemm_workspace(c, &bytes);
    auto *const kernel = long_kernel<N, EXACT, FINISH>;
    x.pieces = (int)ceil_div(x.k, DEEP);
    w.pieces = x.pieces;
    w.k = x.k;
    w.slabs = (int)(ceil_div(x.k, SLAB) < MOST_SLABS ? ceil_div(x.k, SLAB) : MOST_SLABS);
    w.row = p->b.row;
    w.column = p->b.column;
    const int64_t terms = (int64_t)x.pieces * DEEP, tile_bytes = N * 4 * (terms + (EXACT ? 1 + MOST_SLABS : 0));
    const int64_t most = (int64_t)bytes / tile_bytes, all = ceil_div(x.n, N); /* tiles of columns: made ready at once; there are */
    if (most < 1) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %d terms of a weight do not fit the workspace", op, x.k);
    }
    const int room = c->shared_bytes - 2 * 1024 - WARPS * STAGED;
    x.stages = room / STAGE < MOST_STAGES ? room / STAGE : MOST_STAGES;
    const int shared = 1024 + x.stages * STAGE + WARPS * STAGED;
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, shared, op));
    CUtensorMap a, b;
    PS_TRY(ps_tensor_map_2d_float(&a, p->a.data, p->m, p->k, 4 * p->a.row, ROWS, DEEP / 2));
    for (int64_t first = 0; first < all; first += x.tiles_n) {
        x.first = (int)first * N;
        x.tiles_n = (int)(all - first < most ? all - first : most);
        x.places = (int)ceil_div(x.m, PAIR * ROWS) * x.tiles_n;
        w.columns = x.tiles_n * N;
        w.n = x.n - x.first;
        w.b = (const float *)p->b.data + x.first * p->b.column;
        w.from = w.to + w.columns * terms;
        w.largest = w.from + w.columns;
        x.from = w.from;
        const int pairs = c->multiprocessors / PAIR;
        if (EXACT) {
            ps_cuda_launch(c, largest_kernel, dim3((unsigned)w.columns / 32, (unsigned)w.slabs), PREPARING, 0, w);
        }
        ps_cuda_launch(c, prepare_kernel<EXACT>, (unsigned)ceil_div((int64_t)w.columns * w.pieces * units_of<EXACT>, PREPARING),
                       PREPARING, 0, w);
        PS_TRY(ps_cuda_check(cudaGetLastError(), op));
        PS_TRY(ps_tensor_map_2d_float(&b, w.to, w.columns, terms, 4 * terms, N / PAIR, DEEP));
        ps_cuda_launch_clusters(c, kernel, PAIR, dim3((unsigned)(PAIR * (x.places < pairs ? x.places : pairs))), THREADS,
                                (size_t)shared, a, b, x);
        PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    }
    return PS_OK;
}

/* Tiles of as many columns as registers allow; fewer where the last one would be half empty. */
template <enum ps_finish FINISH>
static enum ps_status launch_columns(const struct ps_kernels *k, const char *op, const struct ps_product *p,
                                     const struct long_product &x)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const bool wide = (x.n - 1) % 128 >= 64;
    if (ps_cuda_exact(k)) {
        return wide ? launch<128, true, FINISH>(c, op, p, x) : launch<64, true, FINISH>(c, op, p, x);
    }
    return (x.n - 1) % 256 >= 128 ? launch<256, false, FINISH>(c, op, p, x)
           : wide                 ? launch<128, false, FINISH>(c, op, p, x)
                                  : launch<64, false, FINISH>(c, op, p, x);
}

static struct long_product long_of(const struct ps_product *p)
{
    struct long_product x = {};
    x.m = p->m;
    x.n = (int)p->n;
    x.k = (int)p->k;
    x.ldc = p->c.row;
    x.c = (float *)p->c.data;
    x.alpha = 1.0f;
    return x;
}

enum ps_status ps_cuda_long_product(const struct ps_kernels *k, const struct ps_product *p)
{
    struct long_product x = long_of(p);
    x.bias = (const float *)p->bias;
    x.addend = p->beta != 0 ? (const float *)(p->addend ? p->addend : p->c.data) : NULL;
    x.alpha = p->alpha;
    x.beta = p->beta;
    return launch_columns<PS_FINISH_SUM>(k, "gemm", p, x);
}

enum ps_status ps_cuda_long_finish(const struct ps_kernels *k, const struct ps_product *p, const struct ps_gemm_finish *f)
{
    struct long_product x = long_of(p);
    x.kept = (float *)f->kept.data;
    x.addend = (const float *)f->addend.data;
    x.beta = f->addend.data ? 1.0f : 0.0f;
    x.bias = (const float *)f->bias.data;
    x.dropout = f->dropout;
    x.activation = f->activation;
    switch (f->finish) {
    case PS_FINISH_SUM:
        x.bias = NULL;
        return launch_columns<PS_FINISH_SUM>(k, "gemm_finish", p, x);
    case PS_FINISH_RESIDUAL:
        return launch_columns<PS_FINISH_RESIDUAL>(k, "gemm_finish", p, x);
    case PS_FINISH_ACTIVATION:
        return launch_columns<PS_FINISH_ACTIVATION>(k, "gemm_finish", p, x);
    case PS_FINISH_SLOPE:
        return launch_columns<PS_FINISH_SLOPE>(k, "gemm_finish", p, x);
    }
    return PS_UNSUPPORTED;
}
