/* gemm/wgmma16.cuh's products of few terms: a block holds a slice of the right operand's columns, and each of its four or six
 * warpgroups takes tiles of 64 rows of its own, alone. Its first thread brings the next tile's rows as soon as this one's have been
 * multiplied for the last time, so a warpgroup's rows are on their way, another's sums too, while a third one multiplies, and no
 * warpgroup waits for another. Sums over rows stay in shared memory until the last tile; the last block of a slice merges the
 * blocks' in a fixed order.
 *
 * Bytes: 2 m k for each slice, from L2 but for the first; 2 k n for as many blocks as a slice has; and 2 m n for c and for each
 * tensor beside it. FLOPs 2 m n k. Memory bounds it, then what follows the products. */
#ifndef PS_KERNELS_CUDA_GEMM_WGMMA16_HELD_CUH
#define PS_KERNELS_CUDA_GEMM_WGMMA16_HELD_CUH

#include <math.h>

#include "kernels/cuda/gemm/wgmma16_out.cuh"

namespace wgmma16
{

enum {
    CREWS = 4,                    /* warpgroups, each with tiles of 64 rows */
    MORE_CREWS = 6,               /* of some with an activation or its slope, which 80 registers a thread hold */
    HELD_THREADS = CREWS * GROUP, /* of those that sum over rows, and of most others */
    MOST_DEPTH = 8,               /* panels of a crew's ring */
    MOST_HELD = 226 * 1024,       /* bytes of shared memory */
};

/* All threads: barriers for the right operand and, behind it, for each crew's ring; where READERS share one, half of these are
 * theirs. */
template <int READERS = 1, int ALL_CREWS = CREWS>
static __device__ __forceinline__ void open_barriers(const CUtensorMap &a_map, const CUtensorMap &b_map, uint32_t held_full)
{
    if (threadIdx.x == 0) {
        ps_tensor_prefetch(&a_map);
        ps_tensor_prefetch(&b_map);
        for (int i = 0; i < 1 + ALL_CREWS * MOST_DEPTH; i++) {
            ps_mbarrier_init(held_full + 8 * i, i > ALL_CREWS * MOST_DEPTH / 2 ? READERS : 1);
        }
        ps_mbarrier_publish();
    }
    __syncthreads();
}

/* hold, which asks for the right operand, and the wait for the kernel before: that first where the operand is settled. */
template <typename HOLD> static __device__ __forceinline__ void begin_with(const struct call &x, HOLD hold)
{
    if (x.settled) {
        hold();
    }
    ps_grid_begin();
    if (!x.settled) {
        hold();
    }
}

/* From the warps' sums of a slice's columns, [warps, columns] (MOMENTS: about the warps' pivots, of `rows` rows each), to the
 * whole's. room: a pair of doubles a thread. */
template <int N, bool MOMENTS>
static __device__ __forceinline__ void gather_held(const struct call &x, const float2 *counted, const float *pivots,
                                                   const int *rows, double *room, int block, int slice)
{
    constexpr int WARPS = HELD_THREADS / 32, PARTS = HELD_THREADS / N;
    constexpr int AHEAD = 144 / PARTS; /* parts that a thread asks for at once: the last block waits for L2, once for all */
    const int own = (int)threadIdx.x % N, part = (int)threadIdx.x / N, width = x.chunks * N;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < width && slice * width + i < x.n; i += HELD_THREADS) {
        float2 all = make_float2(0, 0);
        float count = 0;
        const float pivot = MOMENTS ? pivots[i] : 0;
#pragma unroll 4
        for (int w = 0; w < WARPS; w++) {
            const float2 one = counted[w * width + i];
            if (MOMENTS && rows[w] > 0) {
                const float of = (float)rows[w], away = pivots[w * width + i] - pivot;
                count += of;
                all.x += one.x + of * away;
                all.y += one.y + away * (2.0f * one.x + of * away);
            } else if (!MOMENTS) {
                all.x += one.x;
                all.y += one.y;
            }
        }
        if constexpr (MOMENTS) {
            const float away = all.x / count, m2 = all.y - all.x * away;
            all = make_float2(pivot + away, m2 < 0 ? 0 : m2); /* what is not a number stays that */
        }
        x.partials[(int64_t)block * x.n + slice * width + i] = all;
    }
    if (!comes_last<HELD_THREADS>(x.tickets + slice, x.blocks)) {
        return;
    }
    /* Rows of a block: tiles of 64, of the first `longer` one more than of the others, and the last tile lacks some. */
    const int tiles = (x.tiles_m - 1) / x.blocks, longer = (x.tiles_m - 1) % x.blocks + 1;
    const int lacks = (int)((int64_t)x.tiles_m * 64 - x.m);
    for (int chunk = 0; chunk < x.chunks; chunk++) {
        const int column = slice * width + chunk * N + own;
        const bool inside = column < x.n;
        const double pivot = MOMENTS && inside ? (double)__ldcg(x.partials + column).x : 0;
        const column_before before = part == 0 && inside ? begin_column<MOMENTS>(x, column) : column_before{};
        double a = 0, b = 0;
#pragma unroll 1
        for (int first = part; first < x.blocks; first += AHEAD * PARTS) {
            float2 v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int row = first + i * PARTS;
                v[i] = inside && row < x.blocks ? __ldcg(x.partials + (int64_t)row * x.n + column) : make_float2(0, 0);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int row = first + i * PARTS;
                const double own_rows = 64.0 * (tiles + (row < longer)) - (row == longer - 1 ? lacks : 0);
                const double of = !MOMENTS ? 1.0 : row < x.blocks ? own_rows : 0.0, away = (double)v[i].x - pivot;
                a += of * away;
                b += MOMENTS ? (double)v[i].y + of * away * away : (double)v[i].y;
            }
        }
        room[threadIdx.x] = a;
        room[HELD_THREADS + threadIdx.x] = b;
        __syncthreads();
        if (part == 0 && inside) {
#pragma unroll
            for (int i = 1; i < PARTS; i++) {
                a += room[own + i * N];
                b += room[HELD_THREADS + own + i * N];
            }
            if constexpr (MOMENTS) {
                const double away = a / (double)x.m;
                b -= a * away;
                a = pivot + away;
                b = b < 0 ? 0 : b;
            }
            finish_column<MOMENTS>(x, column, before, a, b);
        }
        __syncthreads();
    }
}

/* A warp's room for sums over rows. */
template <int N, enum ps_finish FINISH, bool COUNTED>
static constexpr int counted_bytes = !COUNTED ? 0 : N * (int)sizeof(float2) + (FINISH == PS_FINISH_RESIDUAL ? N * 4 : 0);

template <int N, enum ps_finish FINISH, bool COUNTED>
static constexpr int bias_bytes = FINISH == PS_FINISH_SUM && !COUNTED ? N * 4 : 0;

template <typename T, int N, bool ACROSS, enum ps_finish FINISH, bool COUNTED, int ALL_CREWS>
static __global__ void __launch_bounds__(ALL_CREWS *GROUP, 1)
    held_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ struct call x)
{
    static_assert(!COUNTED || ALL_CREWS == CREWS, "gather_held has HELD_THREADS");
    extern __shared__ uint8_t memory[];
    constexpr int RIGHT = right_bytes<N, ACROSS>, THREADS = ALL_CREWS * GROUP, WARPS = THREADS / 32;
    __shared__ __align__(8) uint64_t barriers[1 + ALL_CREWS * MOST_DEPTH];
    __shared__ int rows_counted[WARPS];
    constexpr bool MOMENTS = FINISH == PS_FINISH_RESIDUAL;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), side = warp / 4;
    const int block = (int)ps_divide(blockIdx.x, x.by_slices), slice = (int)blockIdx.x - block * x.slices;
    const int first_chunk = slice * x.chunks, chunks = min(x.chunks, x.tiles_n - first_chunk);
    const uint32_t held = (ps_shared_address(memory) + 1023u) & ~1023u, rings = held + x.chunks * x.pieces * RIGHT;
    const uint32_t ring = rings + side * x.depth * PANEL, staging = rings + ALL_CREWS * x.depth * PANEL;
    const uint32_t held_full = ps_shared_address(barriers), full = held_full + 8 + 8 * MOST_DEPTH * side;
    uint8_t *const sums = memory + (staging + WARPS * x.staged - ps_shared_address(memory));
    constexpr bool PLAIN = FINISH == PS_FINISH_SUM && !COUNTED; /* if it has no addend */
    float *const bias = (float *)sums;
    float2 *const counted = (float2 *)sums;
    float *const pivots = (float *)(counted + WARPS * x.chunks * N);
    open_barriers<1, ALL_CREWS>(a_map, b_map, held_full);
    auto hold_right = [&]() {
        if (threadIdx.x == 0) {
            uint32_t to = held;
            ps_mbarrier_expect(held_full, chunks * x.pieces * RIGHT);
            for (int chunk = first_chunk; chunk < first_chunk + chunks; chunk++) {
                for (int piece = 0; piece < x.pieces; piece++, to += RIGHT) {
                    bring_right<N, ACROSS, 1>(b_map, to, held_full, chunk, piece, 0);
                }
            }
        }
    };
    begin_with(x, hold_right);
    if (PLAIN) {
        for (int i = (int)threadIdx.x; i < chunks * N; i += THREADS) {
            const int column = first_chunk * N + i;
            bias[i] = x.bias && column < x.n ? x.bias[column] : 0.0f;
        }
        __syncthreads();
    }
    const int first = side * x.blocks + block, stride = ALL_CREWS * x.blocks;
    int coming = first, coming_piece = 0, coming_stage = 0; /* the leader's: what it brings next */
    auto bring = [&]() {
        if (coming < x.tiles_m) {
            ps_mbarrier_expect(full + 8 * coming_stage, PANEL);
            ps_tensor_copy2(ring + coming_stage * PANEL, &a_map, coming_piece * DEEP, coming * 64, full + 8 * coming_stage);
            coming_stage = coming_stage + 1 == x.depth ? 0 : coming_stage + 1;
            if (++coming_piece == x.pieces) {
                coming_piece = 0;
                coming += stride;
            }
        }
    };
    const bool leader = threadIdx.x % GROUP == 0;
    if (leader) {
        for (int i = 0; i < x.depth; i++) {
            bring();
        }
    }
    const uint4 drawn = begin_draws(x);
    const uint32_t staged = staging + warp * x.staged;
    int begin = 0, rows = 0; /* stage of a tile's first panel; rows counted */
    uint32_t parity = 0;
    for (int tile = first; tile < x.tiles_m; tile += stride) {
        int stage = begin;
        uint32_t turn = parity;
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int column0 = (first_chunk + chunk) * N;
            const struct corner corner = corner_of<1>(x, (int64_t)tile * 64 + warp % 4 * 16, column0);
            struct beside next;
            fetch<T, N, 1, FINISH, COUNTED>(x, next, corner, 0);
            call_near<T, N, 1, FINISH, COUNTED>(x, corner);
            if (tile == first && chunk == 0) {
                ps_mbarrier_wait(held_full, 0);
            }
            stage = begin;
            turn = parity;
            float sum[1][N / 8][4];
            for (int piece = 0; piece < x.pieces; piece++) {
                ps_mbarrier_wait(full + 8 * stage, turn);
                const uint32_t left = ps_wgmma_place(ring + stage * PANEL);
                const uint32_t right = ps_wgmma_place(held + (chunk * x.pieces + piece) * RIGHT, ACROSS ? PANEL : 0);
                ps_wgmma_begin();
#pragma unroll
                for (int k = 0; k < DEEP / 16; k++) {
                    ps_wgmma<T, 0, ACROSS>(sum[0], ps_wgmma_operand(left, k * 32),
                                           ps_wgmma_operand(right, k * (ACROSS ? 16 * 128 : 32)), piece | k);
                }
                ps_wgmma_commit();
                if (piece > 0) {
                    ps_wgmma_wait<1>();
                    if (leader && chunk == chunks - 1) { /* the panel before has been read for the last time */
                        bring();
                    }
                }
                if (++stage == x.depth) {
                    stage = 0;
                    turn ^= 1;
                }
            }
            ps_wgmma_wait<0>();
            ps_pin(sum[0]);
            if (leader && chunk == chunks - 1) {
                bring();
            }
            if (PLAIN && !x.addend) {
                store_lines<T, N>(x, sum[0], corner, staged, bias + chunk * N);
                continue;
            }
            finish_rows<T, N, 1, FINISH, COUNTED, true>(x, sum, next, staged, corner, column0, drawn,
                                                        (float2(*)[COUNTED ? N : 1])(counted + (warp * x.chunks + chunk) * N),
                                                        pivots + (warp * x.chunks + chunk) * N, tile == first);
            if (COUNTED && chunk == 0) {
                rows += corner.rows < 16 ? corner.rows : 16;
            }
        }
        begin = stage;
        parity = turn;
    }
    if constexpr (COUNTED) {
        if (first >= x.tiles_m) { /* without a tile */
            for (int i = (int)threadIdx.x % 32; i < x.chunks * N; i += 32) {
                counted[warp * x.chunks * N + i] = make_float2(0, 0);
            }
        }
        if (threadIdx.x % 32 == 0) {
            rows_counted[warp] = rows;
        }
        gather_held<N, MOMENTS>(x, counted, pivots, rows_counted, (double *)(memory + (rings - ps_shared_address(memory))), block,
                                slice);
    }
}

/* How the right operand is held, and what that costs a block: the least of all ways to share its columns out, INFINITY where not
 * one tile of them leaves a ring room. The unit is what 64 columns of a tile take a warpgroup while four are at work. What counts:
 * a block's columns, and beyond them those of the warpgroup that has the most, each tile's end, and its panels; the right operand's
 * way to shared memory; the rows, which every slice reads; a ring that has not the next tile's. Fitted to 364 products of sizes
 * drawn at random on an H200, the rows' part and that of more crews to steps: docs/experiments/products.md. */
template <int N, bool ACROSS, enum ps_finish FINISH, bool COUNTED, int ALL_CREWS = CREWS>
static double hold(const struct ps_cuda_context *c, struct call &x)
{
    constexpr int WARPS = ALL_CREWS * GROUP / 32;
    constexpr bool BY_MORE = ALL_CREWS > CREWS;
    /* Weights of what a warpgroup does alone, of a ring that has not the next tile's, and of the rows that slices read. */
    constexpr double ALONE = BY_MORE ? 1.15 : 1.0, RING = BY_MORE ? 0.5 : 1.0, ROWS = BY_MORE ? 0.56e-7 : 0.28e-7;
    const bool plain = FINISH == PS_FINISH_SUM && !COUNTED && !x.addend;
    const bool floats = FINISH == PS_FINISH_SUM || FINISH == PS_FINISH_RESIDUAL;
    x.staged = floats && !plain ? STAGED_BYTES : STAGED_BYTES / 2;
    x.pieces = (x.k + DEEP - 1) / DEEP;
    x.tiles_n = (x.n + N - 1) / N;
    x.tiles_m = (int)((x.m + 63) / 64);
    const int room = MOST_HELD - 1024 - WARPS * x.staged, right = x.pieces * right_bytes<N, ACROSS>;
    const int each = right + WARPS * counted_bytes<N, FINISH, COUNTED> + bias_bytes<N, FINISH, COUNTED>;
    const double columns = (x.n < N ? (x.n + 31) / 32 * 32 : N) / 64.0;
    double least = INFINITY;
    for (int slices = 1; slices <= x.tiles_n && slices <= 4 * c->multiprocessors; slices++) {
        const int chunks = (x.tiles_n + slices - 1) / slices, depth = (room - chunks * each) / (ALL_CREWS * PANEL);
        if (depth < 2 || (chunks > 1 && depth < x.pieces)) {
            continue;
        }
        int blocks = c->multiprocessors / slices;
        blocks = blocks < 1 ? 1 : blocks > x.tiles_m ? x.tiles_m : blocks;
        const int tiles = (x.tiles_m + blocks - 1) / blocks;  /* a block's */
        const int most = (tiles + ALL_CREWS - 1) / ALL_CREWS; /* a warpgroup's */
        if (BY_MORE && most == (tiles + CREWS - 1) / CREWS) { /* no fewer turns than by four */
            continue;
        }
        const double cost = chunks * (tiles * columns / CREWS + most * ALONE * (0.6 * columns + 0.33)) + 0.2 * x.pieces * most +
                            1.1 * chunks * right / 65536.0 + ROWS * slices * (double)x.m * x.k + RING * (depth < 2 * x.pieces);
        if (cost < least) {
            least = cost;
            x.slices = slices;
            x.chunks = chunks;
            x.blocks = blocks;
            x.depth = depth < MOST_DEPTH ? depth : MOST_DEPTH;
        }
    }
    return least;
}

template <typename T, int N, bool ACROSS, enum ps_finish FINISH, bool COUNTED, int ALL_CREWS = CREWS>
static enum ps_status launch_held(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, struct call x)
{
    constexpr int THREADS = ALL_CREWS * GROUP;
    CUtensorMap a, b;
    const int shared =
        1024 + x.chunks * x.pieces * right_bytes<N, ACROSS> + ALL_CREWS * x.depth * PANEL +
        THREADS / 32 * (x.staged + x.chunks * counted_bytes<N, FINISH, COUNTED>)+x.chunks * bias_bytes<N, FINISH, COUNTED>;
    x.by_slices = ps_divisor_make(x.slices);
    auto *const kernel = held_kernel<T, N, ACROSS, FINISH, COUNTED, ALL_CREWS>;
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, shared, op));
    PS_TRY((open_maps<N, ACROSS, 1>(&a, &b, p, 64)));
    if (COUNTED) {
        if (x.slices > PS_COLUMN_TILES) {
            return ps_fail(PS_UNSUPPORTED, "%s (cuda): sums over %d columns are too many", op, x.n);
        }
        PS_TRY(ps_cuda_workspace(c, op, (size_t)x.blocks * (size_t)x.n * sizeof(float2)));
        x.partials = (float2 *)c->workspace;
        x.tickets = c->tiles_done;
    }
    ps_cuda_launch(c, kernel, dim3((unsigned)(x.slices * x.blocks)), THREADS, (size_t)shared, a, b, x);
    PS_CUDA_LAUNCHED(op);
}

} // namespace wgmma16

#endif
