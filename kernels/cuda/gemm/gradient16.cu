/* Gradients of weights of 16 bits on Hopper's tensor cores, several in one launch: dw [m, n] += x' dy and, where it is wanted,
 * db [n] += the columns' sums of dy, with x [R, m] and dy [R, n] row by row, R long.
 *
 * Why: cuBLASLt takes two launches for each, the product and the sum of its splits, and dy is read once more for db; a layer has
 * four of them, of a few microseconds each where d_model is small.
 *
 * A block has a tile of dw, 64 or 128 each way, and a slice of the rows, 64 of them a step. A warp asks the copy engine for panels
 * of 64 rows by 64 columns, as many steps ahead as shared memory has stages; two warpgroups multiply them as they lie (wgmma reads
 * both operands across, since the summed dimension is the slow one). Column sums are a product with ones, of 8 columns where the
 * others have 64 or 128, so they cost little beside it: dy' ones. Tiles of a slice are neighbours in the grid, so that what they
 * share comes from L2. Partial tiles, only what there is of them, go to a workspace, or where sums wait; ops/reduce.cu adds them to
 * dw and db in a fixed order, for all problems of the launch or of the pass. How rows are sliced depends on the shapes of the
 * launch's problems and the number of multiprocessors.
 *
 * Bytes: 2 R (m + n), and from L2 2 R (m ceil(n / 128) + n ceil(m / 128)); partial sums 8 slices (m n + n). FLOPs: 2 R m n. Memory
 * bounds it up to d_model 128: a step of a tile of 128 x 128 is 32 KB, 1,360 clocks of L2's 5.5 TB/s on 132 multiprocessors, for
 * 512 clocks of wgmma. So launches of more than 2^18 elements of dw, where memory does not bound the product itself, have the
 * larger tiles of gradient16_wide.cu. etth1's four of a layer (R 37,632; 16 x 48, 16 x 16, 16 x 128, 128 x 16) are 29 MB, 7 us
 * at 4.2 TB/s; weather's (R 112,896; 128 x 384, 128 x 128, 128 x 256, 256 x 128) are 347 MB, 83 us, and 30 GFLOP. */
#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/operands.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

enum {
    EDGE = 64,          /* rows of a step, columns of a panel */
    PANEL = EDGE * 128, /* bytes */
    DEEP = 16 * 128,    /* of which one wgmma reads */
    ONES = 1024,        /* bytes of ones, an operand of 8 columns, in front of the stages */
    RING = 24,          /* panels of all stages */
    STAGES = RING / 2,  /* at most: of a panel of each operand */
    MULTIPLY_WARPS = 8, /* two warpgroups; one more warp fetches */
    THREADS = 32 * (MULTIPLY_WARPS + 1),
    SHARED_BYTES = ONES + RING * PANEL,
    LEAST_ROWS = 256,
    MOST_OUTPUTS = 1 << 18,
};

struct problem {
    CUtensorMap x, dy;
    float *dw, *db;       /* db: or NULL */
    float *partial;       /* [slices, floats]: m n of dw, row by row, then n of db */
    int m, n, high, wide; /* high, wide: panels of x and of dy in a tile */
    int tiles;
    struct ps_divisor by_tiles, by_tiles_n; /* tiles, and those along n */
    int steps, slices, slice_steps;         /* of 64 rows: all, and those of a slice */
    int floats;                             /* of a slice's sums */
};

struct problems {
    struct problem each[PS_GRADIENTS];
};

/* What a block does of its problem. */
struct part {
    int m0, n0, slice, first, steps;  /* first element of dw; steps, from `first` on */
    uint32_t ones, ring, full, empty; /* in shared memory; barriers of the stages */
};

/* One lane: panels of all steps, each when the stage's last ones have been read. */
static __device__ __forceinline__ void fetch(const struct problem &p, const struct part &at)
{
    const int panels = p.high + p.wide, stages = RING / panels;
    const int x_panels = min(p.high, (p.m - at.m0 + EDGE - 1) / EDGE), dy_panels = min(p.wide, (p.n - at.n0 + EDGE - 1) / EDGE);
    int stage = 0;
    uint32_t parity = 0;
    for (int s = 0; s < at.steps; s++) {
        const uint32_t to = at.ring + stage * panels * PANEL, full = at.full + 8 * stage;
        const int row = (at.first + s) * EDGE;
        if (s >= stages) {
            ps_mbarrier_wait(at.empty + 8 * stage, parity ^ 1);
        }
        ps_mbarrier_expect(full, (x_panels + dy_panels) * PANEL);
        for (int i = 0; i < x_panels; i++) {
            ps_tensor_copy2(to + i * PANEL, &p.x, at.m0 + i * EDGE, row, full);
        }
        for (int i = 0; i < dy_panels; i++) {
            ps_tensor_copy2(to + (p.high + i) * PANEL, &p.dy, at.n0 + i * EDGE, row, full);
        }
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
}

/* A warpgroup's part of a tile of HIGH x WIDE panels: with two panels of x one of them times all of dy, else x times its panel of
 * dy. SUMS: the columns' sums too, of its panel of dy; of one panel both make them, and the first leaves them. */
template <typename T, int HIGH, int WIDE, bool SUMS>
static __device__ __forceinline__ void multiply(const struct problem &p, const struct part &at, int warp)
{
    constexpr int COLUMNS = HIGH == 2 ? WIDE * EDGE : EDGE, STAGE = (HIGH + WIDE) * PANEL;
    const int group = warp / 4, lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if (group >= (HIGH > WIDE ? HIGH : WIDE)) {
        return;
    }
    const int x_panel = HIGH == 2 ? group : 0, dy_panel = HIGH == 2 ? 0 : group, sums_panel = WIDE == 2 ? group : 0;
    const uint32_t ones = ps_wgmma_place(at.ones);
    float sum[COLUMNS / 8][4], column_sum[1][4];
    ps_zero(sum);
    ps_zero(column_sum);
    int stage = 0, before = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int s = 0; s < at.steps; s++) {
        const uint32_t panels = at.ring + stage * STAGE;
        const uint32_t x = ps_wgmma_place(panels + x_panel * PANEL);
        const uint32_t dy = ps_wgmma_place(panels + (HIGH + dy_panel) * PANEL, PANEL);
        const uint32_t own = ps_wgmma_place(panels + (HIGH + sums_panel) * PANEL);
        ps_mbarrier_wait(at.full + 8 * stage, parity);
        ps_wgmma_begin();
#pragma unroll
        for (int k = 0; k < EDGE / 16; k++) {
            ps_wgmma_onto<T, 1, 1>(sum, ps_wgmma_operand(x, k * DEEP), ps_wgmma_operand(dy, k * DEEP));
            if constexpr (SUMS) {
                ps_wgmma_onto<T, 1, 0>(column_sum, ps_wgmma_operand(own, k * DEEP), ps_wgmma_operand(ones, 0));
            }
        }
        ps_wgmma_commit();
        ps_wgmma_wait<1>();
        if (s > 0 && lane == 0) { /* the products of the step before have read their stage */
            ps_mbarrier_arrive(at.empty + 8 * before);
        }
        before = stage;
        if (++stage == RING / (HIGH + WIDE)) {
            stage = 0;
            parity ^= 1;
        }
    }
    ps_wgmma_wait<0>();
    ps_pin(sum);
    ps_pin(column_sum);
    float *const partial = p.partial + (int64_t)at.slice * p.floats;
    const int row = at.m0 + x_panel * EDGE + warp % 4 * 16 + g, column = at.n0 + dy_panel * EDGE + q * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float *const to = partial + (row + h * 8) * p.n + column;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            if (row + h * 8 < p.m && column + j * 8 < p.n) {
                *(float2 *)(to + j * 8) = make_float2(sum[j][h * 2], sum[j][h * 2 + 1]);
            }
        }
    }
    if (SUMS && group < WIDE && q == 0) { /* every column is the same */
        float *const to = partial + p.m * p.n;
        const int first = at.n0 + sums_panel * EDGE + warp % 4 * 16 + g;
        if (first < p.n) {
            to[first] = column_sum[0][0];
        }
        if (first + 8 < p.n) {
            to[first + 8] = column_sum[0][2];
        }
    }
}

template <typename T, bool SUMS>
static __device__ __forceinline__ void multiply_tile(const struct problem &p, const struct part &at, int warp)
{
    if (p.high == 2) {
        p.wide == 2 ? multiply<T, 2, 2, SUMS>(p, at, warp) : multiply<T, 2, 1, SUMS>(p, at, warp);
    } else {
        p.wide == 2 ? multiply<T, 1, 2, SUMS>(p, at, warp) : multiply<T, 1, 1, SUMS>(p, at, warp);
    }
}

/* Blocks: of each problem its slices, of each slice its tiles. */
template <typename T>
static __global__ void __launch_bounds__(THREADS, 1) gradients_kernel(const __grid_constant__ struct problems x)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ uint64_t barriers[2 * STAGES];
    int number = 0, block = (int)blockIdx.x;
    for (; block >= x.each[number].slices * x.each[number].tiles; number++) {
        block -= x.each[number].slices * x.each[number].tiles;
    }
    const struct problem &p = x.each[number];
    /* The same for a whole warp, and said so: else the compiler waits after every wgmma. */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    struct part at;
    at.slice = (int)ps_divide(block, p.by_tiles);
    const int tile = block - at.slice * p.tiles, line = (int)ps_divide(tile, p.by_tiles_n);
    at.m0 = line * p.high * EDGE;
    at.n0 = (tile - line * (int)p.by_tiles_n.divisor) * p.wide * EDGE;
    at.first = at.slice * p.slice_steps;
    at.steps = min(p.slice_steps, p.steps - at.first);
    at.ones = ps_shared_address(shared);
    at.ring = at.ones + ONES;
    at.full = ps_shared_address(barriers);
    at.empty = at.full + 8 * STAGES;
    if (threadIdx.x < ONES / 4) {
        ((uint32_t *)shared)[threadIdx.x] = ps_ones<T>();
    }
    ps_publish();
    if (threadIdx.x == 0) {
        const int groups = max(p.high, p.wide);
        for (int i = 0; i < STAGES; i++) {
            ps_mbarrier_init(at.full + 8 * i, 1);
            ps_mbarrier_init(at.empty + 8 * i, 4 * groups);
        }
        ps_mbarrier_publish();
    }
    ps_grid_begin();
    __syncthreads();
    if (warp == MULTIPLY_WARPS) {
        if (threadIdx.x % 32 == 0) {
            fetch(p, at);
        }
    } else if (p.db && at.m0 == 0) {
        multiply_tile<T, true>(p, at, warp);
    } else {
        multiply_tile<T, false>(p, at, warp);
    }
}

/* ---- the choice, by shape and layout, and how rows are sliced ---- */

static int ceil_div(int64_t a, int64_t b)
{
    return (int)((a + b - 1) / b);
}

/* Of an operand that lies with the summed dimension slow: rows apart by `stride`. */
static bool rows_served(const char *data, int64_t stride, int64_t columns)
{
    return (uintptr_t)data % 16 == 0 && stride % 8 == 0 && stride >= columns && columns % 8 == 0;
}

bool ps_cuda_gradient16_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    return context->compute_capability == 90 && context->shared_bytes >= SHARED_BYTES + 1024 && p->type != PS_F32 && p->gradient &&
           p->a.row == 1 && p->b.column == 1 && p->c.column == 1 && p->c.row == p->n && p->k >= LEAST_ROWS && p->k <= 1 << 30 &&
           ((p->m <= MOST_OUTPUTS && p->n <= MOST_OUTPUTS && p->m * p->n <= MOST_OUTPUTS) || ps_cuda_gradient16_wide_serves(p)) &&
           rows_served(p->a.data, p->a.column, p->m) && rows_served(p->b.data, p->b.row, p->n);
}

/* Blocks take a multiprocessor each. The slowest problem is sliced once more as long as blocks and the workspace's floats last;
 * where tiles are many, blocks come in so many waves that each problem can be sliced. A step of a tile takes as long as the columns
 * that it reads, and what a barrier costs. */
static void slice(const struct ps_cuda_context *context, struct problem *each, int count, size_t floats)
{
    enum { BARRIER = 16 }; /* columns */
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) {
        each[i].slices = 1;
        blocks += each[i].tiles;
        floats -= (size_t)each[i].floats;
    }
    const int64_t most = (int64_t)context->multiprocessors * ceil_div(2 * blocks, context->multiprocessors);
    for (;;) {
        struct problem *slowest = NULL;
        int64_t longest = 0;
        for (int i = 0; i < count; i++) {
            struct problem *p = &each[i];
            const int columns = (p->m < p->high * EDGE ? p->m : p->high * EDGE) + (p->n < p->wide * EDGE ? p->n : p->wide * EDGE);
            const int64_t time = (int64_t)ceil_div(p->steps, p->slices) * (columns + BARRIER);
            if (time > longest) {
                slowest = p;
                longest = time;
            }
        }
        if (blocks + slowest->tiles > most || (size_t)slowest->floats > floats || slowest->slices == slowest->steps) {
            break;
        }
        slowest->slices++;
        blocks += slowest->tiles;
        floats -= (size_t)slowest->floats;
    }
}

template <typename T>
static enum ps_status products(const struct ps_cuda_context *context, const struct ps_product *each, int count)
{
    struct problems x = {};
    size_t workspace_bytes, used = 0;
    float *partial = (float *)ps_cuda_gemm_workspace(context, &workspace_bytes);
    for (int i = 0; i < count; i++) {
        const struct ps_product *p = &each[i];
        struct problem *to = &x.each[i];
        PS_TRY(ps_tensor_map_2d(&to->x, p->a.data, p->k, p->m, 2 * p->a.column, EDGE, EDGE));
        PS_TRY(ps_tensor_map_2d(&to->dy, p->b.data, p->k, p->n, 2 * p->b.row, EDGE, EDGE));
        to->dw = (float *)p->c.data;
        to->db = p->sums;
        to->m = (int)p->m;
        to->n = (int)p->n;
        to->high = p->m > EDGE ? 2 : 1;
        to->wide = p->n > EDGE ? 2 : 1;
        const int tiles_n = ceil_div(p->n, to->wide * EDGE);
        to->tiles = ceil_div(p->m, to->high * EDGE) * tiles_n;
        to->by_tiles = ps_divisor_make(to->tiles);
        to->by_tiles_n = ps_divisor_make(tiles_n);
        to->steps = ceil_div(p->k, EDGE);
        to->floats = to->m * to->n + (p->sums ? to->n : 0);
        used += sizeof(float) * (size_t)to->floats;
    }
    if (used > workspace_bytes) {
        return ps_fail(PS_UNSUPPORTED, "gemm: partial sums of %d gradients take %zu bytes, the workspace has %zu", count, used,
                       workspace_bytes);
    }
    slice(context, x.each, count, workspace_bytes / sizeof(float));
    unsigned blocks = 0;
    size_t waiting = 0;
    int waits = 0;
    for (int i = 0; i < count; i++) {
        struct problem *p = &x.each[i];
        p->slice_steps = ceil_div(p->steps, p->slices);
        p->slices = ceil_div(p->steps, p->slice_steps);
        blocks += (unsigned)(p->slices * p->tiles);
        waiting += each[i].waits ? (size_t)p->slices * (size_t)p->floats : 0;
        waits += each[i].waits;
    }
    float *later = waits ? ps_cuda_waiting_room(context, waiting, waits) : NULL;
    struct ps_cuda_columns now[PS_GRADIENTS], then[PS_GRADIENTS];
    int now_count = 0, then_count = 0;
    for (int i = 0; i < count; i++) {
        struct problem *p = &x.each[i];
        const bool put_off = later && each[i].waits;
        float *&room = put_off ? later : partial;
        p->partial = room;
        room += (size_t)p->slices * (size_t)p->floats;
        (put_off ? then[then_count++] : now[now_count++]) = {p->dw, p->db, (int64_t)p->m * p->n, p->partial, p->slices, p->floats};
    }
    PS_TRY(ps_cuda_allow_shared((const void *)gradients_kernel<T>, SHARED_BYTES, "gemm"));
    ps_cuda_launch(context, gradients_kernel<T>, blocks, THREADS, SHARED_BYTES, x);
    PS_TRY(ps_cuda_check(cudaGetLastError(), "gemm"));
    PS_TRY(then_count ? ps_cuda_add_columns(context, "gemm", then, then_count) : PS_OK);
    return now_count ? ps_cuda_add_columns(context, "gemm", now, now_count) : PS_OK;
}

/* Those of the launch that gradient16_wide.cu has, of the same sum's length in one, and the rest. */
enum ps_status ps_cuda_gradient16_products(const struct ps_kernels *k, const struct ps_product *each, int count)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    struct ps_product rest[PS_GRADIENTS], together[PS_GRADIENTS];
    int64_t outputs = 0, side = 0;
    for (int i = 0; i < count; i++) {
        rest[i] = each[i];
        if (ps_cuda_gradient16_wide_serves(&each[i])) {
            outputs += each[i].m * each[i].n;
            side = max(side, min(each[i].m, each[i].n));
        }
    }
    for (int i = 0; ps_cuda_gradient16_wide_wanted(outputs, side) && i < count;) {
        const int64_t length = rest[i].k;
        int found = 0, left = i;
        if (!ps_cuda_gradient16_wide_serves(&rest[i])) {
            i++;
            continue;
        }
        for (int j = i; j < count; j++) {
            if (rest[j].k == length && ps_cuda_gradient16_wide_serves(&rest[j])) {
                together[found++] = rest[j];
            } else {
                rest[left++] = rest[j];
            }
        }
        count = left;
        PS_TRY(ps_cuda_gradient16_wide_products(context, together, found));
    }
    if (count == 0) {
        return PS_OK;
    }
    return each->type == PS_BF16 ? products<ps_bf16>(context, rest, count) : products<ps_fp16>(context, rest, count);
}

enum ps_status ps_cuda_gradient16_product(const struct ps_kernels *k, const struct ps_product *product)
{
    return ps_cuda_gradient16_products(k, product, 1);
}
