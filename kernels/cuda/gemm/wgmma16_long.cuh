/* gemm/wgmma16.cuh's products of many terms: blocks stay, a warpgroup to a tile of 128 rows by 128 or 96 columns, two taking turns,
 * so that the one multiplies while the other's sums go out; a third one's warp brings panels, as far ahead as the ring is long, and
 * pairs of blocks share those of the right operand. Sums over rows leave a tile as one row of partial sums; the last warpgroup of a
 * few rows of tiles to finish merges those, and the last of these merges theirs, in a fixed order.
 *
 * Bytes: 2 m k ceil(n / 128) + k n ceil(m / 128), the repeats from L2, and 2 m n for c and for each tensor beside it. FLOPs 2 m n
 * k. L2 and wgmma bound it. */
#ifndef PS_KERNELS_CUDA_GEMM_WGMMA16_LONG_CUH
#define PS_KERNELS_CUDA_GEMM_WGMMA16_LONG_CUH

#include "kernels/cuda/gemm/wgmma16_out.cuh"

namespace wgmma16
{

enum {
    ROWS = 128,              /* of a tile */
    ROWS_BYTES = ROWS * 128, /* of a stage */
    CLUSTER = 2,
    LONG_THREADS = 3 * GROUP,
    MOST_STAGES = 6,
    FEW_REGISTERS = 40, /* of who brings panels, and of who multiplies */
    MANY_REGISTERS = 232,
};

template <int N, bool ACROSS> static constexpr int stage_bytes = ROWS_BYTES + right_bytes<N, ACROSS>;

/* One pair a column of `count` rows of pairs, each over `rows` rows of c from `row` on: two sums, or (MOMENTS) a mean and M2,
 * merged about the first one's mean. In the first N threads. */
template <int N, bool MOMENTS>
static __device__ __forceinline__ void merge(double &first, double &second, const float2 *from, int n, int column, int count,
                                             int64_t row, int64_t rows, int64_t m)
{
    __shared__ double all[2][2][GROUP];
    double(&shared)[2][GROUP] = all[crew<GROUP>::side()];
    const int thread = crew<GROUP>::thread(), part = thread / N;
    double a = 0, b = 0, total = 0;
    const double pivot = MOMENTS && column < n ? (double)__ldcg(from + column).x : 0;
    if (column < n) {
#pragma unroll 4
        for (int i = part; i < count; i += GROUP / N) {
            const float2 v = __ldcg(from + (int64_t)i * n + column);
            if constexpr (MOMENTS) {
                const int64_t left = m - row - i * rows;
                const double of = (double)(left < rows ? left : rows), away = (double)v.x - pivot;
                a += of * away;
                b += (double)v.y + of * away * away;
            } else {
                a += (double)v.x;
                b += (double)v.y;
            }
        }
    }
    shared[0][thread] = a;
    shared[1][thread] = b;
    crew<GROUP>::meet();
    if (part == 0) {
#pragma unroll
        for (int i = 1; i < GROUP / N; i++) {
            a += shared[0][thread + i * N];
            b += shared[1][thread + i * N];
        }
        if constexpr (MOMENTS) {
            const int64_t left = m - row;
            total = (double)(left < count * rows ? left : count * rows);
            const double away = a / total;
            b -= a * away;
            a = pivot + away;
            b = b < 0 ? 0 : b; /* what is not a number stays that */
        }
    }
    crew<GROUP>::meet();
    first = a;
    second = b;
}

/* From the warps' pairs of each column to the whole's. */
template <bool MOMENTS>
static __device__ __forceinline__ void gather_sums(const struct call &x, const float2 (*warps)[WIDE], int tile_m, int tile_n)
{
    const int thread = crew<GROUP>::thread(), own = thread % WIDE, column = tile_n * WIDE + own;
    crew<GROUP>::meet();
    if (thread < WIDE && column < x.n) {
        float2 all = make_float2(0, 0);
        if constexpr (MOMENTS) {
            const float count = (float)rows_at(x.m, (int64_t)tile_m * ROWS, ROWS);
            float sum = 0, m2 = 0;
#pragma unroll
            for (int w = 0; w < 8; w++) {
                sum += (float)rows_at(x.m, (int64_t)tile_m * ROWS + 16 * w, 16) * (warps[w][own].x - warps[0][own].x);
            }
            const float away = sum / count;
#pragma unroll
            for (int w = 0; w < 8; w++) {
                const float difference = warps[w][own].x - warps[0][own].x - away;
                m2 += warps[w][own].y + (float)rows_at(x.m, (int64_t)tile_m * ROWS + 16 * w, 16) * difference * difference;
            }
            all = make_float2(warps[0][own].x + away, m2);
        } else {
#pragma unroll
            for (int w = 0; w < 8; w++) {
                all.x += warps[w][own].x;
                all.y += warps[w][own].y;
            }
        }
        x.partials[(int64_t)tile_m * x.n + column] = all;
    }
    const int group = tile_m / x.share, first = group * x.share;
    const int count = x.tiles_m - first < x.share ? x.tiles_m - first : x.share;
    unsigned *const tickets = x.tickets + tile_n * (x.groups + 1);
    if (!comes_last<GROUP>(tickets + group, count)) {
        return;
    }
    double a, b;
    const column_before before = thread < WIDE && column < x.n ? begin_column<MOMENTS>(x, column) : column_before{};
    merge<WIDE, MOMENTS>(a, b, x.partials + (int64_t)first * x.n, x.n, column, count, (int64_t)first * ROWS, ROWS, x.m);
    if (x.groups > 1) {
        float2 *const groups = x.partials + (int64_t)x.tiles_m * x.n;
        if (thread < WIDE && column < x.n) {
            groups[(int64_t)group * x.n + column] = make_float2((float)a, (float)b);
        }
        if (!comes_last<GROUP>(tickets + x.groups, x.groups)) {
            return;
        }
        merge<WIDE, MOMENTS>(a, b, groups, x.n, column, x.groups, 0, (int64_t)x.share * ROWS, x.m);
    }
    if (thread < WIDE && column < x.n) {
        finish_column<MOMENTS>(x, column, before, a, b);
    }
}

/* One lane: a piece of the right operand's tile, and of the tile's rows, to a stage. */
template <int N, bool ACROSS>
static __device__ __forceinline__ void bring_panels(const CUtensorMap &a_map, const CUtensorMap &b_map, uint32_t stage,
                                                    uint32_t barrier, int tile_m, int tile_n, int piece, int rank)
{
    ps_mbarrier_expect(barrier, stage_bytes<N, ACROSS>);
    ps_tensor_copy2(stage, &a_map, piece * DEEP, tile_m * ROWS, barrier);
    bring_right<N, ACROSS, CLUSTER>(b_map, stage + ROWS_BYTES, barrier, tile_n, piece, rank);
}

/* Sums over rows take room from the ring. */
template <bool COUNTED> static constexpr int long_stages = COUNTED ? MOST_STAGES - 1 : MOST_STAGES;

/* Tiles go round by clusters, a block's to its two warpgroups in turn: a warpgroup multiplies when the other has asked for all of
 * its products, so panels are taken in the order in which they come. */
template <typename T, int N, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static __global__ void __launch_bounds__(LONG_THREADS, 1)
    long_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ struct call x)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * MOST_STAGES];
    __shared__ float2 counted[COUNTED ? 2 : 1][COUNTED ? 8 : 1][COUNTED ? N : 1];
    static_assert(!COUNTED || N == WIDE, "sums over rows are of 128 columns");
    constexpr int STAGE = stage_bytes<N, ACROSS>, COUNT = long_stages<COUNTED>;
    enum { TURN = 3 }; /* the first barrier of those by which warpgroups take turns */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), side = warp / 4, rank = ps_cluster_rank();
    const uint32_t ring = (ps_shared_address(memory) + 1023u) & ~1023u, full = ps_shared_address(barriers),
                   empty = full + 8 * MOST_STAGES;
    if (threadIdx.x == 0) {
        ps_tensor_prefetch(&a_map);
        ps_tensor_prefetch(&b_map);
        for (int s = 0; s < COUNT; s++) {
            ps_mbarrier_init(full + 8 * s, 1);
            ps_mbarrier_init(empty + 8 * s, CLUSTER);
        }
        ps_mbarrier_publish();
    }
    ps_cluster_arrive();
    ps_cluster_wait();
    ps_grid_begin();
    const int first = (int)blockIdx.x / CLUSTER;
    if (side == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)FEW_REGISTERS));
        if (threadIdx.x == 2 * GROUP) {
            int stage = 0;
            uint32_t parity = 1; /* a new ring is empty */
            for (int place = first; place < x.places; place += x.strides) {
                const int tile_n = place % x.tiles_n, tile_m = place / x.tiles_n * CLUSTER + rank;
                for (int piece = 0; piece < x.pieces; piece++) {
                    ps_mbarrier_wait(empty + 8 * stage, parity);
                    bring_panels<N, ACROSS>(a_map, b_map, ring + stage * STAGE, full + 8 * stage, tile_m, tile_n, piece, rank);
                    if (++stage == COUNT) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)MANY_REGISTERS));
        const uint4 drawn = begin_draws(x);
        const uint32_t staged = ring + COUNT * STAGE + warp * STAGED_BYTES;
        const uint32_t panels = ring & 0x3ffff; /* without the block's number in its cluster: an operand has no room for that */
        int number = side;                      /* of the tile among the block's */
        for (int place = first + side * x.strides; place < x.places; place += 2 * x.strides, number += 2) {
            const int tile_n = place % x.tiles_n, tile_m = place / x.tiles_n * CLUSTER + rank;
            const int column0 = tile_n * N;
            const struct corner corner = corner_of<2>(x, (int64_t)tile_m * ROWS + warp % 4 * 16, column0);
            struct beside next;
            fetch<T, N, 2, FINISH, COUNTED>(x, next, corner, 0);
            call_near<T, N, 2, FINISH, COUNTED>(x, corner);
            if (number > 0) {
                ps_barrier(TURN + side, 2 * GROUP);
            }
            const unsigned brought = (unsigned)number * (unsigned)x.pieces; /* before */
            int stage = (int)(brought % COUNT), before = 0;
            uint32_t parity = brought / COUNT & 1;
            float sum[2][N / 8][4]; /* of 64 rows each */
            auto release = [&](int which) {
                if (threadIdx.x % GROUP < CLUSTER) {
                    ps_mbarrier_arrive_at(empty + 8 * which, (int)threadIdx.x % GROUP);
                }
            };
            for (int piece = 0; piece < x.pieces; piece++) {
                ps_mbarrier_wait(full + 8 * stage, parity);
                const uint32_t left = ps_wgmma_place(panels + stage * STAGE);
                const uint32_t right = ps_wgmma_place(panels + stage * STAGE + ROWS_BYTES, ACROSS ? PANEL : 0);
                ps_wgmma_begin();
#pragma unroll
                for (int k = 0; k < DEEP / 16; k++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        ps_wgmma<T, 0, ACROSS>(sum[half], ps_wgmma_operand(left, half * PANEL + k * 32),
                                               ps_wgmma_operand(right, k * (ACROSS ? 16 * 128 : 32)), piece | k);
                    }
                }
                ps_wgmma_commit();
                if (piece > 0) {
                    ps_wgmma_wait<1>();
                    release(before);
                }
                before = stage;
                if (++stage == COUNT) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            if (place + x.strides < x.places) {
                ps_barrier_arrive(TURN + 1 - side, 2 * GROUP);
            }
            ps_wgmma_wait<0>();
            ps_pin(sum[0]);
            ps_pin(sum[1]);
            release(before);
            finish_rows<T, N, 2, FINISH, COUNTED, false>(x, sum, next, staged, corner, column0, drawn,
                                                         counted[COUNTED ? side : 0] + (COUNTED ? warp % 4 : 0), NULL, true);
            if constexpr (COUNTED) {
                if (tile_m < x.tiles_m) {
                    gather_sums<FINISH == PS_FINISH_RESIDUAL>(x, counted[side], tile_m, tile_n);
                }
            }
        }
    }
    ps_cluster_arrive(); /* until the others are here too, the barriers must stay */
    ps_cluster_wait();
}

/* Room for sums over rows. */
static enum ps_status open_sums(const struct ps_cuda_context *c, const char *op, struct call &x)
{
    /* One group while a thread has few partial sums to add, else as many groups as tiles in each. */
    x.share = x.tiles_m;
    if (x.tiles_m > 8 * GROUP / WIDE) {
        for (x.share = 1; x.share * x.share < x.tiles_m; x.share++) {
        }
    }
    x.groups = (x.tiles_m + x.share - 1) / x.share;
    if ((int64_t)x.tiles_n * (x.groups + 1) > PS_COLUMN_TILES) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): sums over %lld rows of %d columns are too many", op, (long long)x.m, x.n);
    }
    PS_TRY(ps_cuda_workspace(c, op, (size_t)(x.tiles_m + x.groups) * (size_t)x.n * sizeof(float2)));
    x.partials = (float2 *)c->workspace;
    x.tickets = c->tiles_done;
    return PS_OK;
}

template <typename T, int N, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static enum ps_status launch_tiles(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, struct call x)
{
    CUtensorMap a, b;
    constexpr size_t shared = long_stages<COUNTED> * stage_bytes<N, ACROSS> + 2 * GROUP / 32 * STAGED_BYTES + 1024;
    auto *const kernel = long_kernel<T, N, ACROSS, FINISH, COUNTED>;
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, shared, op));
    PS_TRY((open_maps<N, ACROSS, CLUSTER>(&a, &b, p, ROWS)));
    const int clusters = c->multiprocessors / CLUSTER;
    x.tiles_n = (x.n + N - 1) / N;
    x.tiles_m = (int)((x.m + ROWS - 1) / ROWS);
    x.pieces = (x.k + DEEP - 1) / DEEP;
    x.places = (x.tiles_m + CLUSTER - 1) / CLUSTER * x.tiles_n;
    x.strides = x.places < clusters ? x.places : clusters;
    if (COUNTED) {
        PS_TRY(open_sums(c, op, x));
    }
    ps_cuda_launch_clusters(c, kernel, CLUSTER, dim3((unsigned)(x.strides * CLUSTER)), LONG_THREADS, shared, a, b, x);
    PS_CUDA_LAUNCHED(op);
}

/* Beyond 128 columns narrower tiles where they are no more; measured for a residual and for nothing behind the product. */
template <typename T, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static enum ps_status launch_long(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, const struct call &x)
{
    enum { NARROW = 96 };
    if constexpr (!COUNTED && (FINISH == PS_FINISH_SUM || FINISH == PS_FINISH_RESIDUAL)) {
        if (x.n > WIDE && (x.n + NARROW - 1) / NARROW == (x.n + WIDE - 1) / WIDE) {
            return launch_tiles<T, NARROW, ACROSS, FINISH, COUNTED>(c, op, p, x);
        }
    }
    return launch_tiles<T, WIDE, ACROSS, FINISH, COUNTED>(c, op, p, x);
}

} // namespace wgmma16

#endif
