/* attention/long16.cu's kernels by wgmma, of heads of more than 32 columns: a warpgroup has 64 queries or keys of a head, and the
 * other side passes by in tiles of 64 rows, which the copy engine brings to a ring ahead and all warpgroups of a block read.
 * Weights and gradients, rounded, are the next product's left operand as they lie in registers; all else is panels of 64 columns,
 * of which the last of a head is filled with zeros (tile/wgmma.cuh). A multiprocessor has as many warpgroups as registers allow,
 * two to four, in blocks of one or more: while one finds powers the others multiply.
 *
 * Forward takes off the largest score of a row so far, and a new one only where weights would pass 2^8. Backward is two kernels, by
 * queries for dq, with delta on the way, and by keys for dk and dv.
 *
 * Bytes of memory as in long16.cu; from L2 a block reads the other side's rows whole, 4 N e bytes of two tensors for every 64 rows
 * a warpgroup. With N in whole 64 and 32, e in whole 16 and 64: S h N^2 exponentials forward, 2 S h N^2 backward; FLOPs 4 S h N^2 e
 * forward, 14 S h N^2 e backward. 64 by 64 scores of heads of 64 take a multiprocessor's tensor cores 256 clocks forward, 384 and
 * 512 backward, its exponentials' unit 256, and each scheduler 280 to 330 instructions. 332 patches, 96 matrices of heads of 64:
 * 3,168 such tiles of scores, 24 a multiprocessor: 7 thousand clocks forward and 21 backward if nothing waited, 4 and 12 us at
 * 1.75 GHz, beside 16 and 49 MB, 4 and 12 us at 4.2 TB/s. */
#ifndef PS_KERNELS_CUDA_LONG16_WIDE_CUH
#define PS_KERNELS_CUDA_LONG16_WIDE_CUH

#include <algorithm>

#include "kernels/cuda/attention/long16_rows.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

enum { PANEL = 64 * 128 }; /* bytes of 64 rows of 64 columns */

/* E: columns of a head, in whole 16. Scores are sums over these; what is summed over rows has all of its panels' columns. */
template <int E> static constexpr int panels = (E + 63) / 64;
template <int E> using panel_sums = float[panels<E> * 8][4];

/* Warpgroups that a multiprocessor has, as many as registers allow, and a block at most. */
template <int E, bool BY_KEYS> static constexpr int resident = (E > 64 ? 3 : 4) - BY_KEYS;
template <int E, bool BY_KEYS> static constexpr int most_groups = resident<E, BY_KEYS> == 4 ? 2 : resident<E, BY_KEYS>;

struct wide {
    CUtensorMap q, k, v, up; /* up: d_mixed */
    CUtensorMap out[2];      /* mixed; dq; dk and dv */
    struct ps_attention_launch x;
    struct ps_divisor blocks, heads; /* blocks of a matrix */
    uint32_t depth, behind;          /* tiles in the ring; a warpgroup may have so many tiles less behind it than the first */
};

extern __shared__ __align__(1024) char wide_memory[];

/* A warpgroup's place, and its block's memory: a ring of tiles of two tensors, OWN tensors' 64 rows a warpgroup, barriers. */
template <int E, int OWN> struct warpgroup {
    static constexpr uint32_t TENSOR = panels<E> * PANEL, TILE = 2 * TENSOR;
    const struct wide &p;
    uint32_t matrix, sequence, head, row, id, active, count, tiles;
    uint32_t ring, own, full, empty, held, rest;          /* addresses; rest: what follows */
    uint32_t slot, phase, bring_slot, bring_phase, bring; /* bring: the next tile to bring, first thread alone */

    __device__ __forceinline__ explicit warpgroup(const struct wide &w) : p(w)
    {
        const uint32_t groups = blockDim.x / 128;
        matrix = ps_divide(blockIdx.x, p.blocks);
        sequence = ps_divide(matrix, p.heads);
        head = matrix - sequence * p.heads.divisor;
        count = (uint32_t)p.x.patches;
        tiles = (count + 63) / 64;
        const uint32_t first = (blockIdx.x - matrix * p.blocks.divisor) * groups;
        active = min(groups, tiles - first);
        id = threadIdx.x / 128;
        row = (first + id) * 64;
        ring = ps_shared_address(wide_memory);
        own = ring + p.depth * TILE + id * OWN * TENSOR;
        full = ring + p.depth * TILE + groups * OWN * TENSOR;
        empty = full + p.depth * 8;
        held = empty + p.depth * 8;
        rest = held + 16;
        slot = phase = bring_slot = bring_phase = bring = 0;
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < p.depth; i++) {
                ps_mbarrier_init(full + i * 8, 1);
                ps_mbarrier_init(empty + i * 8, (int)active * 4);
            }
            ps_mbarrier_init(held, 1);
            ps_mbarrier_publish();
        }
    }

    static __device__ __forceinline__ void fetch(uint32_t to, const CUtensorMap *map, uint32_t row, uint32_t head,
                                                 uint32_t sequence, uint32_t barrier)
    {
#pragma unroll
        for (int i = 0; i < panels<E>; i++) {
            ps_tensor_copy4(to + i * PANEL, map, i * 64, (int)row, (int)head, (int)sequence, barrier);
        }
    }

    /* A tile of both tensors of the other side. */
    __device__ __forceinline__ void fetch_tile(const CUtensorMap *a, const CUtensorMap *b)
    {
        const uint32_t to = ring + bring_slot * TILE, barrier = full + bring_slot * 8;
        ps_mbarrier_expect(barrier, TILE);
        fetch(to, a, bring * 64, head, sequence, barrier);
        fetch(to + TENSOR, b, bring * 64, head, sequence, barrier);
        bring++;
        if (++bring_slot == p.depth) {
            bring_slot = 0;
        }
    }

    /* By one thread: every warpgroup's own rows, and the first tiles. */
    __device__ __forceinline__ void begin(const CUtensorMap *const (&mine)[OWN], const CUtensorMap *a, const CUtensorMap *b)
    {
        ps_mbarrier_expect(held, active * OWN * TENSOR);
        for (uint32_t i = 0; i < active; i++) {
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                fetch(own + (i * OWN + j) * TENSOR, mine[j], row + i * 64, head, sequence, held);
            }
        }
        while (bring < min(p.depth, tiles)) {
            fetch_tile(a, b);
        }
    }

    /* The tile's first address; before it, the next one is brought where the block's warpgroups have left the room. */
    __device__ __forceinline__ uint32_t take(uint32_t tile, const CUtensorMap *a, const CUtensorMap *b)
    {
        if (threadIdx.x == 0 && tile >= p.behind && bring < tiles) {
            ps_mbarrier_wait(empty + bring_slot * 8, bring_phase);
            fetch_tile(a, b);
            bring_phase ^= bring_slot == 0;
        }
        __syncwarp();
        ps_mbarrier_wait(full + slot * 8, phase);
        return ring + slot * TILE;
    }

    /* Its products have ended. */
    __device__ __forceinline__ void leave()
    {
        if (threadIdx.x % 32 == 0) {
            ps_mbarrier_arrive(empty + slot * 8);
        }
        if (++slot == p.depth) {
            slot = 0;
            phase ^= 1;
        }
    }

    /* step(TILES, tile) for each tile: four of 16 rows, or two at the end. */
    template <class STEP> __device__ __forceinline__ void each(STEP step) const
    {
#pragma unroll 1
        for (uint32_t tile = 0; tile < tiles; tile++) {
            if (tile * 64 + 32 < count) {
                step(std::integral_constant<int, 4>(), tile);
            } else {
                step(std::integral_constant<int, 2>(), tile);
            }
        }
    }

    /* All its threads meet. */
    __device__ __forceinline__ void meet() const
    {
        ps_barrier((int)id + 1, 128);
    }

    /* Sums, times factors of the lane's two rows, in the place of own tensor `which`, which all have read. */
    template <typename T> __device__ __forceinline__ void put(int which, const panel_sums<E> &sum, float upper, float lower) const
    {
        const uint32_t row0 = threadIdx.x % 128 / 32 * 16;
        ps_attention_put<T, panels<E> * 8>(ps_boxed<128>{own + which * TENSOR + row0 * 128, 0, 3, PANEL}, sum, upper, lower, E / 8);
    }

    /* Own tensors, put by all, to memory. */
    __device__ __forceinline__ void store(int tensors) const
    {
        ps_publish();
        meet();
        if (threadIdx.x % 128 == 0) {
            for (int j = 0; j < tensors; j++) {
#pragma unroll
                for (int i = 0; i < panels<E>; i++) {
                    ps_tensor_store4(&p.out[j], own + j * TENSOR + i * PANEL, i * 64, (int)row, (int)head, (int)sequence);
                }
            }
            ps_bulk_commit();
            ps_bulk_wait_read();
        }
    }
};

/* ---- products of 64 rows ---- */

/* sum [64, 16 TILES] = rows of a times rows of b, E columns in panels. Under way. */
template <typename T, int E, int TILES>
static __device__ __forceinline__ void begin_scores(float (&sum)[2 * TILES][4], uint32_t a, uint32_t b)
{
    ps_wgmma_begin();
    const uint32_t of_a = ps_wgmma_place(a), of_b = ps_wgmma_place(b);
#pragma unroll
    for (int i = 0; i < E / 16; i++) {
        const int there = i / 4 * PANEL + i % 4 * 32;
        ps_wgmma<T>(sum, ps_wgmma_operand(of_a, there), ps_wgmma_operand(of_b, there), i > 0);
    }
    ps_wgmma_commit();
}

/* sum += a [64, 16 TILES] rows of b. */
template <typename T, int E, int TILES>
static __device__ __forceinline__ void begin_mix(panel_sums<E> &sum, const uint32_t (&a)[TILES][4], uint32_t b)
{
    ps_wgmma_begin();
    const uint32_t of_b = ps_wgmma_place(b);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
#pragma unroll
        for (int i = 0; i < panels<E>; i++) {
            ps_wgmma<T, 1>((float(&)[8][4])sum[i * 8], a[j], ps_wgmma_operand(of_b, i * PANEL + j * 2048), 1);
        }
    }
    ps_wgmma_commit();
}

/* Nothing of columns of scores that are no keys. */
template <int TILES> static __device__ __forceinline__ void drop_beyond(uint32_t (&a)[TILES][4], uint32_t first, uint32_t count)
{
#pragma unroll
    for (int j = 0; j < 4 * TILES; j++) {
        a[j / 4][j % 4] &= ps_attention_pair(first + j / 4 * 16 + j % 4 / 2 * 8 + threadIdx.x % 4 * 2, count);
    }
}

/* ---- kernels ---- */

template <typename T, int E>
static __global__ void __launch_bounds__(most_groups<E, false> * 128, resident<E, false> / most_groups<E, false>)
    forward_wide_kernel(const __grid_constant__ struct wide p)
{
    enum { LARGER = 8 }; /* weights are at most 2 to this power */
    struct warpgroup<E, 1> g(p);
    __syncthreads();
    ps_grid_begin();
    if (threadIdx.x == 0) {
        const CUtensorMap *const mine[] = {&p.q};
        g.begin(mine, &p.k, &p.v);
    }
    if (g.id >= g.active) {
        return;
    }
    const float factor = p.x.scale * PS_LOG2_E;
    panel_sums<E> mixed;
    float sum[2] = {0, 0}, less[2] = {-INFINITY, -INFINITY}; /* less: what is taken off the exponents */
    ps_zero(mixed);
    ps_mbarrier_wait(g.held, 0);
    g.each([&](auto tiles, uint32_t tile) {
        constexpr int TILES = decltype(tiles)::value;
        const uint32_t keys = g.take(tile, &p.k, &p.v);
        float s[2 * TILES][4];
        uint32_t weights[TILES][4];
        begin_scores<T, E, TILES>(s, g.own, keys);
        ps_wgmma_wait<0>();
        ps_pin(s);
        if (tile + 1 == g.tiles) {
#pragma unroll
            for (int j = 0; j < 8 * TILES; j++) {
                s[j / 4][j % 4] = tile * 64 + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2 < g.count ? s[j / 4][j % 4] : -INFINITY;
            }
        }
        float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < 8 * TILES; j++) {
            most[j % 4 / 2] = fmaxf(most[j % 4 / 2], s[j / 4][j % 4]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = ps_quad_max(most[r]) * factor;
        }
        if (__any_sync(0xffffffffu, most[0] > less[0] + LARGER || most[1] > less[1] + LARGER)) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float now = fmaxf(most[r], less[r]), rescale = ps_exp2(less[r] - now);
                less[r] = now;
                sum[r] *= rescale;
#pragma unroll
                for (int j = 0; j < panels<E> * 8; j++) {
                    mixed[j][2 * r] *= rescale;
                    mixed[j][2 * r + 1] *= rescale;
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 8 * TILES; j++) {
            float &value = s[j / 4][j % 4];
            value = ps_exp2(fmaf(value, factor, -less[j % 4 / 2]));
            sum[j % 4 / 2] += value;
        }
        ps_attention_round<T, TILES>(weights, s);
        begin_mix<T, E, TILES>(mixed, weights, keys + g.TENSOR);
        ps_wgmma_wait<0>();
        ps_pin(mixed);
        ps_pin(weights);
        g.leave();
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] = ps_quad_sum(sum[r]);
        const uint32_t row = g.row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + r * 8;
        if (threadIdx.x % 4 == 0 && row < g.count) {
            p.x.logsum[(int64_t)g.matrix * g.count + row] = (ps_log2(sum[r]) + less[r]) * (1 / PS_LOG2_E);
        }
    }
    g.meet();
    g.template put<T>(0, mixed, ps_reciprocal(sum[0]), ps_reciprocal(sum[1]));
    g.store(1);
}

/* dq, and delta on the way. */
template <typename T, int E>
static __global__ void __launch_bounds__(most_groups<E, false> * 128, resident<E, false> / most_groups<E, false>)
    query_gradient_wide_kernel(const __grid_constant__ struct wide p)
{
    struct warpgroup<E, 2> g(p);
    __syncthreads();
    ps_grid_wait();
    if (threadIdx.x == 0) {
        const CUtensorMap *const mine[] = {&p.q, &p.up};
        g.begin(mine, &p.k, &p.v);
    }
    /* Two lanes have a row, each every other 8 columns of it; a warp's rows are those of its sums. */
    const uint32_t lane = threadIdx.x % 32, half = lane % 2, own_row = g.row + threadIdx.x % 128 / 2;
    const int64_t sums = (int64_t)g.matrix * g.count;
    float delta = 0.0f;
    if (own_row < g.count) {
        const auto row_of = [&](const struct ps_attention_view &v) {
            return (const uint4 *)(v.data + (g.sequence * v.sequence + g.head * v.head + own_row * v.row) * 2);
        };
        const uint4 *const mixed = row_of(p.x.mixed), *const up = row_of(p.x.d_mixed);
#pragma unroll
        for (uint32_t i = 0; i < E / 8; i += 2) {
            if (i + half < (uint32_t)p.x.e / 8) {
                const uint4 a = mixed[i + half], b = up[i + half];
                const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    delta = fmaf(ps_low<T>(x[j]), ps_low<T>(y[j]), fmaf(ps_high<T>(x[j]), ps_high<T>(y[j]), delta));
                }
            }
        }
    }
    delta += __shfl_xor_sync(0xffffffffu, delta, 1);
    if (half == 0 && own_row < g.count) {
        p.x.delta[sums + own_row] = delta;
    }
    ps_grid_release();
    if (g.id >= g.active) {
        return;
    }
    const float factor = p.x.scale * PS_LOG2_E;
    panel_sums<E> dq;
    float logsum[2], less[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t row = g.row + threadIdx.x % 128 / 32 * 16 + lane / 4 + r * 8;
        logsum[r] = row < g.count ? p.x.logsum[sums + row] * PS_LOG2_E : 0.0f;
        less[r] = __shfl_sync(0xffffffffu, delta, lane / 4 * 2 + r * 16);
    }
    ps_zero(dq);
    ps_mbarrier_wait(g.held, 0);
    g.each([&](auto tiles, uint32_t tile) {
        constexpr int TILES = decltype(tiles)::value;
        const uint32_t keys = g.take(tile, &p.k, &p.v);
        float s[2 * TILES][4], up[2 * TILES][4];
        uint32_t gradients[TILES][4];
        begin_scores<T, E, TILES>(s, g.own, keys);
        begin_scores<T, E, TILES>(up, g.own + g.TENSOR, keys + g.TENSOR);
        ps_wgmma_wait<1>();
        ps_pin(s);
#pragma unroll
        for (int j = 0; j < 8 * TILES; j++) {
            s[j / 4][j % 4] = ps_exp2(fmaf(s[j / 4][j % 4], factor, -logsum[j % 4 / 2]));
        }
        ps_wgmma_wait<0>();
        ps_pin(up);
#pragma unroll
        for (int j = 0; j < 8 * TILES; j++) {
            s[j / 4][j % 4] *= up[j / 4][j % 4] - less[j % 4 / 2];
        }
        ps_attention_round<T, TILES>(gradients, s);
        if (tile + 1 == g.tiles) {
            drop_beyond(gradients, tile * 64, g.count);
        }
        begin_mix<T, E, TILES>(dq, gradients, keys);
        ps_wgmma_wait<0>();
        ps_pin(dq);
        ps_pin(gradients);
        g.leave();
    });
    g.meet();
    g.template put<T>(0, dq, p.x.scale, p.x.scale);
    g.store(1);
}

/* dk and dv: the rows of scores are keys, their columns queries. All that it reads but delta is older than the kernel before. */
template <typename T, int E>
static __global__ void __launch_bounds__(most_groups<E, true> * 128, resident<E, true> / most_groups<E, true>)
    key_gradient_wide_kernel(const __grid_constant__ struct wide p)
{
    struct warpgroup<E, 2> g(p);
    if (threadIdx.x == 0) {
        const CUtensorMap *const mine[] = {&p.k, &p.v};
        g.begin(mine, &p.q, &p.up);
    }
    /* Of each query the logarithm to the base of 2, and delta; where there is none its weights are 0. */
    float *const logsums = (float *)(wide_memory + (g.rest - g.ring)), *const deltas = logsums + g.tiles * 64;
    const int64_t sums = (int64_t)g.matrix * g.count;
    for (uint32_t i = threadIdx.x; i < g.tiles * 64; i += blockDim.x) {
        logsums[i] = i < g.count ? p.x.logsum[sums + i] * PS_LOG2_E : INFINITY;
    }
    ps_grid_begin();
    for (uint32_t i = threadIdx.x; i < g.tiles * 64; i += blockDim.x) {
        deltas[i] = i < g.count ? __ldcg(p.x.delta + sums + i) : 0.0f;
    }
    __syncthreads();
    if (g.id >= g.active) {
        return;
    }
    const float factor = p.x.scale * PS_LOG2_E;
    panel_sums<E> dk, dv;
    ps_zero(dk);
    ps_zero(dv);
    ps_mbarrier_wait(g.held, 0);
    g.each([&](auto tiles, uint32_t tile) {
        constexpr int TILES = decltype(tiles)::value;
        const uint32_t queries = g.take(tile, &p.q, &p.up), column = tile * 64 + threadIdx.x % 4 * 2;
        float s[2 * TILES][4], up[2 * TILES][4];
        uint32_t weights[TILES][4], gradients[TILES][4];
        begin_scores<T, E, TILES>(s, g.own, queries);
        begin_scores<T, E, TILES>(up, g.own + g.TENSOR, queries + g.TENSOR);
        ps_wgmma_wait<1>();
        ps_pin(s);
#pragma unroll
        for (int j = 0; j < 2 * TILES; j++) {
            const float2 there = *(const float2 *)(logsums + column + j * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] = ps_exp2(fmaf(s[j][i], factor, i % 2 ? -there.y : -there.x));
            }
        }
        ps_attention_round<T, TILES>(weights, s);
        begin_mix<T, E, TILES>(dv, weights, queries + g.TENSOR);
        ps_wgmma_wait<1>();
        ps_pin(up);
#pragma unroll
        for (int j = 0; j < 2 * TILES; j++) {
            const float2 there = *(const float2 *)(deltas + column + j * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] *= up[j][i] - (i % 2 ? there.y : there.x);
            }
        }
        ps_attention_round<T, TILES>(gradients, s);
        begin_mix<T, E, TILES>(dk, gradients, queries);
        ps_wgmma_wait<0>();
        ps_pin(dv);
        ps_pin(dk);
        ps_pin(weights);
        ps_pin(gradients);
        g.leave();
    });
    g.meet();
    g.template put<T>(0, dk, p.x.scale, p.x.scale);
    g.template put<T>(1, dv, 1.0f, 1.0f);
    g.store(2);
}

/* ---- launching ---- */

static enum ps_status map_of(CUtensorMap *map, const struct ps_attention_view &v, const struct ps_attention_launch &x)
{
    PFN_cuTensorMapEncodeTiled_v12000 encode;
    PS_TRY(ps_tensor_map_encoder(&encode));
    const cuuint64_t sizes[] = {(cuuint64_t)x.e, (cuuint64_t)x.patches, (cuuint64_t)x.heads, (cuuint64_t)(x.matrices / x.heads)};
    /* What is there once has any stride; a map needs one. */
    const auto stride = [](cuuint64_t size, int64_t elements) { return (cuuint64_t)(size > 1 ? elements * 2 : 16); };
    const cuuint64_t strides[] = {stride(sizes[1], v.row), stride(sizes[2], v.head), stride(sizes[3], v.sequence)};
    const cuuint32_t box[] = {64, 64, 1, 1}, every[] = {1, 1, 1, 1};
    const CUresult result =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, v.data, sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? PS_OK
                                  : ps_fail(PS_DEVICE, "cuda: attention: no tensor map of %d patches, %d heads of %d (error %d)",
                                            x.patches, x.heads, x.e, (int)result);
}

template <int E, int OWN, bool BY_KEYS>
static enum ps_status launch_wide(const struct ps_cuda_context *c, const char *op, void (*kernel)(struct wide), struct wide *p,
                                  int more_bytes)
{
    /* As many warpgroups a block as share the tiles, unless more than a sixth of them had nothing to do. */
    const int tiles = (p->x.patches + 63) / 64, most = most_groups<E, BY_KEYS>, blocks = (tiles + most - 1) / most;
    const int groups = 6 * tiles >= 5 * blocks * most ? most : 1, of_tensor = panels<E> * PANEL;
    p->blocks = ps_divisor_make((tiles + groups - 1) / groups);
    p->heads = ps_divisor_make(p->x.heads);
    p->behind = groups > 1 ? 2 : 1;
    /* As deep as lets a multiprocessor have the blocks that its registers hold. */
    const auto bytes = [&](uint32_t depth) {
        return ((int)depth * 2 + groups * OWN) * of_tensor + (int)depth * 16 + 16 + more_bytes;
    };
    for (p->depth = 4;
         p->depth > p->behind + 1 && resident<E, BY_KEYS> / groups * (bytes(p->depth) + 1024) > c->shared_bytes + 1024;) {
        p->depth--;
    }
    const int shared = bytes(p->depth);
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, (size_t)shared, op));
    ps_cuda_launch(c, kernel, (unsigned)(p->x.matrices * p->blocks.divisor), (unsigned)groups * 128, (size_t)shared, *p);
    PS_CUDA_LAUNCHED(op);
}

template <typename T, int E>
static enum ps_status launch_wide(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                  bool backward)
{
    struct wide p = {};
    p.x = x;
    PS_TRY(map_of(&p.q, x.q, x));
    PS_TRY(map_of(&p.k, x.k, x));
    PS_TRY(map_of(&p.v, x.v, x));
    if (!backward) {
        PS_TRY(map_of(&p.out[0], x.mixed, x));
        return launch_wide<E, 1, false>(c, op, forward_wide_kernel<T, E>, &p, 0);
    }
    PS_TRY(map_of(&p.up, x.d_mixed, x));
    PS_TRY(map_of(&p.out[0], x.dq, x));
    PS_TRY((launch_wide<E, 2, false>(c, op, query_gradient_wide_kernel<T, E>, &p, 0)));
    PS_TRY(map_of(&p.out[0], x.dk, x));
    PS_TRY(map_of(&p.out[1], x.dv, x));
    return launch_wide<E, 2, true>(c, op, key_gradient_wide_kernel<T, E>, &p, (x.patches + 63) / 64 * 64 * 2 * (int)sizeof(float));
}

template <typename T>
enum ps_status ps_long16_wide(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x, bool backward)
{
    return x.e <= 48   ? launch_wide<T, 48>(c, op, x, backward)
           : x.e <= 64 ? launch_wide<T, 64>(c, op, x, backward)
           : x.e <= 96 ? launch_wide<T, 96>(c, op, x, backward)
                       : launch_wide<T, 128>(c, op, x, backward);
}

template enum ps_status ps_long16_wide<ps_bf16>(const struct ps_cuda_context *, const char *, const struct ps_attention_launch &,
                                                bool);
template enum ps_status ps_long16_wide<ps_fp16>(const struct ps_cuda_context *, const char *, const struct ps_attention_launch &,
                                                bool);

#endif
