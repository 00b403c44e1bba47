/* gemm/wgmma16.cuh's products whose rows a warp has whole, with a norm of them done on the way out: behind the residual a LayerNorm
 * or RMSNorm of what was written (RESIDUAL), or in place of the product its backward (SUM). The norm's pass over rows would read
 * them again, backward's what the product had written for it alone.
 *
 * As in wgmma16_held.cuh a block holds the right operand, here all of its columns, up to 64, and its warpgroups let tiles of 64
 * rows pass, each by itself. A warp's sums go through shared memory as they are, a row to as many neighbouring lanes as it has
 * pieces of 8 columns, so a row's sums are those of a few lanes. The sums over rows of a norm's backward stay in registers, a
 * lane's columns being always the same, and leave a block as one row of partial sums.
 *
 * Bytes: 2 m k, 2 k n for each block, and 2 m n for each of c, addend, normed, x and masked; 8 m of statistics; backward 12 n for
 * each block's partial sums (L2). FLOPs 2 m n k + 8 m n, of backward 14 m n. Memory bounds it. */
#ifndef PS_KERNELS_CUDA_GEMM_WGMMA16_NORM_CUH
#define PS_KERNELS_CUDA_GEMM_WGMMA16_NORM_CUH

#include "kernels/cuda/gemm/wgmma16_held.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace wgmma16
{

/* The norm's part of what a kernel is told; its x and the addend are in struct call. */
struct norm {
    float *mean, *rstd; /* [m]: RESIDUAL writes them, SUM reads them; mean NULL: RMSNorm */
    const float *gamma, *beta;
    void *normed;                    /* RESIDUAL: what the norm gives */
    void *masked;                    /* SUM: drop'(c), or NULL */
    float *partials, *bias_partials; /* SUM: [blocks, 2n] dgamma, dbeta ([blocks, n] of RMSNorm); [blocks, n] of masked */
    float epsilon;
};

/* Rows that a lane takes at a step: of SUM, whose sums over rows want registers, one. */
template <enum ps_finish FINISH> static constexpr int rows_each = FINISH == PS_FINISH_SUM ? 1 : 2;

/* A warp's 16 rows of N sums on their way out, EACH of which a lane takes at a step. */
template <int N, int EACH> struct whole_rows {
    static constexpr int LANES = N / 8, AT_ONCE = 32 / LANES, STEPS = 16 / AT_ONCE / EACH;

    static __device__ __forceinline__ int column()
    {
        return (int)threadIdx.x % LANES * 8;
    }
    static __device__ __forceinline__ int row(int step, int i)
    {
        return (EACH * step + i) * AT_ONCE + (int)threadIdx.x % 32 / LANES;
    }
};

/* A lane's sums over its rows. */
struct norm_sums {
    float gamma[8], beta[8], bias[8];
};

/* What a step reads of the tensors beside c. */
template <enum ps_finish FINISH> struct beside_rows {
    eight addend[rows_each<FINISH>], x[rows_each<FINISH>];
};

template <typename T, int N, enum ps_finish FINISH>
static __device__ __forceinline__ void fetch_rows(const struct call &x, struct beside_rows<FINISH> &b, const struct corner &corner,
                                                  int step)
{
    using out = whole_rows<N, rows_each<FINISH>>;
#pragma unroll
    for (int i = 0; i < rows_each<FINISH>; i++) {
        const int row = out::row(step, i);
        const uint32_t at = (uint32_t)row * (uint32_t)x.ldc + (uint32_t)out::column();
        const bool here = row < corner.rows && out::column() < x.n;
        b.addend[i].words = b.x[i].words = make_uint4(0, 0, 0, 0);
        if (here && x.addend) {
            b.addend[i].words = *(const uint4 *)((const T *)x.addend + corner.at + at);
        }
        if (here && FINISH == PS_FINISH_SUM) {
            b.x[i].words = *(const uint4 *)((const T *)x.x + corner.at + at);
        }
    }
}

/* Whether dropout drops the j-th of 8: a word has two draws, of which the upper one decides a word as it is. */
static __device__ __forceinline__ bool goes(const struct ps_block &draws, int j, uint32_t least)
{
    return (j % 2 ? draws.word[j / 2] : draws.word[j / 2] << 16) < least;
}

/* A step of RESIDUAL: c, and the norm of c as it is stored. */
template <typename T, int N>
static __device__ __forceinline__ void norm_forward(const struct call &x, const struct norm &norm, float (&v)[2][8],
                                                    const struct beside_rows<PS_FINISH_RESIDUAL> &now, const struct corner &corner,
                                                    int64_t row0, int step, uint4 drawn)
{
    using out = whole_rows<N, 2>;
    const int column = out::column();
    const bool inside = column < x.n, dropped = x.dropout.threshold;
    const float scale = dropped ? x.dropout.scale : 1.0f, share = 1.0f / (float)x.n;
    const uint32_t least = x.dropout.threshold << 16;
    float sum[2] = {}, squares[2] = {};
    if (inside) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            float add[4];
            ps_load<4>(add, x.bias + column + j);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[i / 4][j + i % 4] += add[i % 4];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = out::row(step, i);
        float other[8];
        eight words;
        unpack<T>(other, now.addend[i]);
        if (dropped) {
            const struct ps_block draws =
                ps_draws_after(x.keys, drawn, corner.block + (uint32_t)row * ((uint32_t)x.n / 8) + (uint32_t)column / 8);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[i][j] = goes(draws, j, least) ? 0.0f : v[i][j];
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[i][j] = fmaf(v[i][j], scale, other[j]);
        }
        pack<T>(words, v[i]);
        if (inside && row < corner.rows) {
            *(uint4 *)((T *)x.c + corner.at + ((uint32_t)row * (uint32_t)x.ldc + (uint32_t)column)) = words.words;
        }
        unpack<T>(v[i], words);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum[i] += v[i][j];
        }
    }
    const bool centred = norm.mean;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] = centred ? ps_group_sum<out::LANES>(sum[i]) * share : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[i][j] -= sum[i];
            squares[i] = fmaf(v[i][j], v[i][j], squares[i]);
        }
        squares[i] = rsqrtf(ps_group_sum<out::LANES>(inside ? squares[i] : 0.0f) * share + norm.epsilon);
    }
    if (inside) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            float gamma[4], beta[4] = {};
            ps_load<4>(gamma, norm.gamma + column + j);
            if (centred) {
                ps_load<4>(beta, norm.beta + column + j);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float &one = v[i / 4][j + i % 4];
                one = fmaf(one * squares[i / 4], gamma[i % 4], beta[i % 4]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = out::row(step, i);
        if (inside && row < corner.rows) {
            eight words;
            pack<T>(words, v[i]);
            *(uint4 *)((T *)norm.normed + corner.at + ((uint32_t)row * (uint32_t)x.ldc + (uint32_t)column)) = words.words;
            if (column == 0) {
                norm.rstd[row0 + row] = squares[i];
                if (centred) {
                    norm.mean[row0 + row] = sum[i];
                }
            }
        }
    }
}

/* A step of SUM: v is the gradient of what the norm gave, c that of its x, + addend. statistics: mean and rstd of the warp's row
 * whose number the lane has. */
template <typename T, int N>
static __device__ __forceinline__ void norm_backward(const struct call &x, const struct norm &norm, float (&v)[8],
                                                     const struct beside_rows<PS_FINISH_SUM> &now, float2 statistics,
                                                     struct norm_sums &sums, const struct corner &corner, int step, uint4 drawn)
{
    using out = whole_rows<N, 1>;
    const int row = out::row(step, 0), column = out::column();
    const uint32_t at = (uint32_t)row * (uint32_t)x.ldc + (uint32_t)column;
    const bool inside = column < x.n, here = inside && row < corner.rows, centred = norm.mean, dropped = x.dropout.threshold;
    const float scale = dropped ? x.dropout.scale : 1.0f, share = 1.0f / (float)x.n;
    const uint32_t least = x.dropout.threshold << 16;
    const float mean = __shfl_sync(0xffffffffu, statistics.x, row), rstd = __shfl_sync(0xffffffffu, statistics.y, row);
    float gamma[8] = {}, xhat[8], add[8], sum = 0, product = 0;
    if (inside) {
        ps_load<8>(gamma, norm.gamma + column);
    }
    unpack<T>(xhat, now.x[0]);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        xhat[j] = (xhat[j] - mean) * rstd;
        sums.beta[j] += v[j]; /* 0 beyond the rows and columns */
        sums.gamma[j] = fmaf(v[j], xhat[j], sums.gamma[j]);
        v[j] *= gamma[j];
        sum += v[j];
        product = fmaf(v[j], xhat[j], product);
    }
    sum = centred ? ps_group_sum<out::LANES>(sum) * share : 0.0f;
    product = ps_group_sum<out::LANES>(product) * share;
    eight words;
    unpack<T>(add, now.addend[0]);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        v[j] = fmaf(rstd, fmaf(-xhat[j], product, v[j] - sum), add[j]);
    }
    pack<T>(words, v);
    if (here) {
        *(uint4 *)((T *)x.c + corner.at + at) = words.words;
    }
    if (norm.masked) {
        unpack<T>(v, words);
        if (dropped) {
            const struct ps_block draws =
                ps_draws_after(x.keys, drawn, corner.block + (uint32_t)row * ((uint32_t)x.n / 8) + (uint32_t)column / 8);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = goes(draws, j, least) ? 0.0f : v[j] * scale;
            }
        }
        pack<T>(words, v);
        if (here) {
            *(uint4 *)((T *)norm.masked + corner.at + at) = words.words;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sums.bias[j] += v[j];
            }
        }
    }
}

/* The block's sums over rows to its rows of partial sums. room: a float a warp, column and kind of sum. */
template <int N>
static __device__ __forceinline__ void leave_sums(const struct call &x, const struct norm &norm, struct norm_sums &sums,
                                                  float *room)
{
    using out = whole_rows<N, 1>;
    const int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32, column = out::column(), n = x.n;
    __syncthreads(); /* the room was the rings' */
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float of[3] = {ps_across_sum<out::LANES>(sums.gamma[j]), ps_across_sum<out::LANES>(sums.beta[j]),
                             ps_across_sum<out::LANES>(sums.bias[j])};
#pragma unroll
        for (int kind = 0; kind < 3; kind++) {
            if ((int)threadIdx.x % 32 < out::LANES) {
                room[(warp * 3 + kind) * N + column + j] = of[kind];
            }
        }
    }
    __syncthreads();
    const int first = norm.mean ? 2 : 1; /* kinds in `partials` */
    for (int i = (int)threadIdx.x; i < 3 * N; i += (int)blockDim.x) {
        const int kind = i / N, own = i % N;
        float all = 0;
        for (int w = 0; w < warps; w++) {
            all += room[(w * 3 + kind) * N + own];
        }
        if (own < n && kind == 2) {
            norm.bias_partials[(int64_t)blockIdx.x * n + own] = all;
        } else if (own < n && kind < first) {
            norm.partials[((int64_t)blockIdx.x * first + kind) * n + own] = all;
        }
    }
}

/* A warp's rows of a tile, when its products have ended. next: what fetch_rows found of the first step. */
template <typename T, int N, enum ps_finish FINISH>
static __device__ __forceinline__ void
finish_whole_rows(const struct call &x, const struct norm &norm, const float (&sum)[N / 8][4], struct beside_rows<FINISH> &next,
                  float2 statistics, struct norm_sums &sums, uint32_t stage, const struct corner &corner, int64_t row0, uint4 drawn)
{
    using out = whole_rows<N, rows_each<FINISH>>;
    __syncwarp();
    stage_part<T, N, true>(sum, 0, stage);
    __syncwarp();
#pragma unroll 1
    for (int step = 0; step < out::STEPS; step++) {
        const struct beside_rows<FINISH> now = next;
        if (step + 1 < out::STEPS) {
            fetch_rows<T, N, FINISH>(x, next, corner, step + 1);
        }
        float v[rows_each<FINISH>][8] = {};
        if (out::column() < x.n) {
#pragma unroll
            for (int i = 0; i < rows_each<FINISH>; i++) {
                staged(v[i], stage, out::row(step, i), out::column() / 8);
            }
        }
        if constexpr (FINISH == PS_FINISH_RESIDUAL) {
            norm_forward<T, N>(x, norm, v, now, corner, row0, step, drawn);
        } else {
            norm_backward<T, N>(x, norm, v[0], now, statistics, sums, corner, step, drawn);
        }
    }
}

template <typename T, int N, enum ps_finish FINISH>
static __global__ void __launch_bounds__(HELD_THREADS, 1)
    norm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ struct call x, const __grid_constant__ struct norm norm)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[1 + CREWS * MOST_DEPTH];
    constexpr bool ACROSS = FINISH == PS_FINISH_RESIDUAL;
    constexpr int RIGHT = right_bytes<N, ACROSS>;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), side = warp / 4, crews = (int)blockDim.x / GROUP;
    const uint32_t held = (ps_shared_address(memory) + 1023u) & ~1023u, rings = held + x.pieces * RIGHT;
    const uint32_t ring = rings + side * x.depth * PANEL, stage = rings + crews * x.depth * PANEL + warp * STAGED_BYTES;
    const uint32_t held_full = ps_shared_address(barriers), full = held_full + 8 + 8 * MOST_DEPTH * side;
    open_barriers(a_map, b_map, held_full);
    auto hold_right = [&]() {
        if (threadIdx.x == 0) {
            ps_mbarrier_expect(held_full, x.pieces * RIGHT);
            for (int i = 0; i < x.pieces; i++) {
                bring_right<N, ACROSS, 1>(b_map, held + i * RIGHT, held_full, 0, i, 0);
            }
        }
    };
    begin_with(x, hold_right);
    const int first = side * x.blocks + (int)blockIdx.x, stride = crews * x.blocks;
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
    auto near = [&](int tile) { /* a tile ahead: few products are shorter than the way from memory */
                                call_near<T, N, 1, FINISH, FINISH == PS_FINISH_SUM>(
                                    x, corner_of<1>(x, (int64_t)tile * 64 + warp % 4 * 16, 0));
    };
    near(first);
    struct norm_sums sums = {};
    const int lane_row = (int)threadIdx.x % 16;
    int panel = 0;
    uint32_t parity = 0;
    for (int tile = first; tile < x.tiles_m; tile += stride) {
        const int64_t row0 = (int64_t)tile * 64 + warp % 4 * 16;
        const struct corner corner = corner_of<1>(x, row0, 0);
        struct beside_rows<FINISH> next;
        float2 statistics = make_float2(0, 0);
        fetch_rows<T, N, FINISH>(x, next, corner, 0);
        if (FINISH == PS_FINISH_SUM && lane_row < corner.rows) {
            statistics = make_float2(norm.mean ? norm.mean[row0 + lane_row] : 0.0f, norm.rstd[row0 + lane_row]);
        }
        near(tile + stride);
        if (tile == first) {
            ps_mbarrier_wait(held_full, 0);
        }
        float sum[N / 8][4];
        for (int piece = 0; piece < x.pieces; piece++) {
            ps_mbarrier_wait(full + 8 * panel, parity);
            const uint32_t left = ps_wgmma_place(ring + panel * PANEL);
            const uint32_t right = ps_wgmma_place(held + piece * RIGHT, ACROSS ? PANEL : 0);
            ps_wgmma_begin();
#pragma unroll
            for (int k = 0; k < DEEP / 16; k++) {
                ps_wgmma<T, 0, ACROSS>(sum, ps_wgmma_operand(left, k * 32), ps_wgmma_operand(right, k * (ACROSS ? 16 * 128 : 32)),
                                       piece | k);
            }
            ps_wgmma_commit();
            if (piece > 0) {
                ps_wgmma_wait<1>();
                if (leader) { /* the panel before has been read */
                    bring();
                }
            }
            if (++panel == x.depth) {
                panel = 0;
                parity ^= 1;
            }
        }
        ps_wgmma_wait<0>();
        ps_pin(sum);
        if (leader) {
            bring();
        }
        finish_whole_rows<T, N, FINISH>(x, norm, sum, next, statistics, sums, stage, corner, row0, drawn);
    }
    if constexpr (FINISH == PS_FINISH_SUM) {
        leave_sums<N>(x, norm, sums, (float *)(memory + (rings - ps_shared_address(memory))));
    }
}

/* As many warpgroups as leave each a ring beside the right operand; false where not two have one. */
template <int N, bool ACROSS> static bool hold_rows(const struct ps_cuda_context *c, struct call &x, int &crews)
{
    x.pieces = (x.k + DEEP - 1) / DEEP;
    x.tiles_m = (int)((x.m + 63) / 64);
    x.blocks = x.tiles_m < c->multiprocessors ? x.tiles_m : c->multiprocessors;
    for (crews = CREWS; crews >= 2; crews--) {
        x.depth = (MOST_HELD - 1024 - x.pieces * right_bytes<N, ACROSS> - crews * 4 * STAGED_BYTES) / (crews * PANEL);
        if (x.depth >= 2) {
            x.depth = x.depth < MOST_DEPTH ? x.depth : MOST_DEPTH;
            return true;
        }
    }
    return false;
}

template <typename T, int N, enum ps_finish FINISH>
static enum ps_status launch_norm(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, struct call x,
                                  struct norm norm, const struct ps_gemm_finish *f)
{
    constexpr bool ACROSS = FINISH == PS_FINISH_RESIDUAL;
    CUtensorMap a, b;
    int crews;
    if (!hold_rows<N, ACROSS>(c, x, crews)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a norm of %d columns behind %d terms is not served", op, x.n, x.k);
    }
    const int shared = 1024 + x.pieces * right_bytes<N, ACROSS> + crews * (x.depth * PANEL + 4 * STAGED_BYTES);
    auto *const kernel = norm_kernel<T, N, FINISH>;
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, shared, op));
    PS_TRY((open_maps<N, ACROSS, 1>(&a, &b, p, 64)));
    const int64_t rows = x.blocks, kinds = f->row_mean.data ? 2 : 1;
    if (!ACROSS) {
        PS_TRY(ps_cuda_workspace(c, op, (size_t)(rows * 3 * x.n) * sizeof(float)));
        norm.partials = (float *)c->workspace;
        norm.bias_partials = norm.partials + rows * kinds * x.n;
    }
    ps_cuda_launch(c, kernel, dim3((unsigned)x.blocks), (unsigned)(crews * GROUP), (size_t)shared, a, b, x, norm);
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    const struct ps_cuda_columns jobs[] = {{(float *)f->dgamma.data, (float *)f->dbeta.data, x.n, norm.partials, rows, kinds * x.n},
                                           {(float *)f->dbias.data, NULL, x.n, norm.bias_partials, rows, x.n}};
    return ACROSS ? PS_OK : ps_cuda_add_columns(c, op, jobs, norm.masked ? 2 : 1);
}

/* The narrowest tile that has all columns. Of more than 64, tiles of 64 rows are too few for four warpgroups of each
 * multiprocessor, and a pass of its own is faster. */
template <typename T, enum ps_finish FINISH>
static enum ps_status launch_norm_columns(const struct ps_cuda_context *c, const char *op, const struct ps_product *p,
                                          const struct call &x, const struct ps_gemm_finish *f)
{
    struct norm norm = {};
    norm.mean = (float *)f->row_mean.data;
    norm.rstd = (float *)f->rstd.data;
    norm.gamma = (const float *)f->gamma.data;
    norm.beta = (const float *)f->beta.data;
    norm.normed = f->normed.data;
    norm.masked = f->masked.data;
    norm.epsilon = (float)f->epsilon;
    return x.n <= 32   ? launch_norm<T, 32, FINISH>(c, op, p, x, norm, f)
           : x.n <= 64 ? launch_norm<T, 64, FINISH>(c, op, p, x, norm, f)
                       : ps_fail(PS_UNSUPPORTED, "%s (cuda): a norm of %d columns is not served", op, x.n);
}

} // namespace wgmma16

#endif
