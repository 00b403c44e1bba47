/* gemm/wgmma16.cuh's products whose rows a warp has whole, with a norm of them done on the way out: behind the residual a LayerNorm
 * or RMSNorm of what was written (RESIDUAL), or in place of the product its backward (SUM). The norm's pass over rows would read
 * them again, backward's what the product had written for it alone.
 *
 * As in wgmma16_held.cuh a block holds the right operand, here all of its columns, up to 64, and its warpgroups let tiles of 64
 * rows pass, each by itself. The held columns change places first, so that what wgmma leaves a lane is 8 neighbouring columns of
 * each 32: sums go out from the registers that they are in, and a row's sums are those of four lanes. The sums over rows of a
 * norm's backward stay in registers, a lane's columns being always the same, and leave a block as one row of partial sums; for
 * these it has fewer warpgroups. The last rows come first: the kernel before has just written them, and L2 still has them.
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

/* Warpgroups: SUM's sums over rows want registers. */
template <int N, enum ps_finish FINISH> static constexpr int most_crews = FINISH == PS_FINISH_SUM ? (N > 32 ? 3 : CREWS) : CREWS;

/* What a lane has of a warp's 16 rows: of two, 8 neighbouring columns of each group of 32. */
template <int N> struct lane_part {
    static constexpr int GROUPS = N / 32;

    static __device__ __forceinline__ int row(int i)
    {
        return (int)threadIdx.x % 32 / 4 + 8 * i;
    }
    static __device__ __forceinline__ int column(int group)
    {
        return 32 * group + (int)threadIdx.x % 4 * 8;
    }
    /* Of its sums, where the held columns have changed places. */
    static __device__ __forceinline__ float &of(float (&sum)[N / 8][4], int i, int group, int j)
    {
        return sum[4 * group + j / 2][2 * i + j % 2];
    }
};

/* Columns of the norm's rows, 0 beyond them. */
template <int N> struct parameters {
    float bias[N], gamma[N], beta[N];
};

/* A lane's sums over its rows. */
template <int N> struct norm_sums {
    float gamma[N / 32][8], beta[N / 32][8], bias[N / 32][8];
};

/* A lane's part of the tensors beside c. */
template <int N> struct beside_rows {
    eight addend[2][N / 32], x[2][N / 32];
    float mean[2], rstd[2];
};

/* All threads: the held columns 8 j + 2 q and the next of each 32 become 8 q + 2 j and the next: ACROSS by quads of lanes in a
 * line, else whole lines. */
template <int N, bool ACROSS> static __device__ __forceinline__ void spread_columns(uint4 *held, int pieces)
{
    const int units = pieces * right_bytes<N, ACROSS> / 16;
    for (int i = (int)threadIdx.x; i < units; i += (int)blockDim.x) {
        const int line = i / 8, unit = i % 8, q = line / 2 % 4, j = line / 8 % 4, other = (line & ~30) | q << 3 | j << 1;
        uint4 &here = held[line * 8 + (unit ^ (line & 7))], &there = held[other * 8 + (unit ^ (other & 7))];
        const uint4 v = here;
        if constexpr (ACROSS) {
            uint32_t words[4] = {v.x, v.y, v.z, v.w};
            ps_quad_transpose(words);
            here = make_uint4(words[0], words[1], words[2], words[3]);
        } else if (q < j) {
            here = there;
            there = v;
        }
    }
}

/* at: the lane's first element. */
template <typename T, int N, enum ps_finish FINISH>
static __device__ __forceinline__ beside_rows<N> fetch_rows(const struct call &x, const struct norm &norm,
                                                            const struct corner &corner, int64_t at, int64_t row0)
{
    using own = lane_part<N>;
    struct beside_rows<N> b;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool here = own::row(i) < corner.rows;
        const int64_t row_at = at + i * 8 * x.ldc;
        b.mean[i] = b.rstd[i] = 0.0f;
        if (FINISH == PS_FINISH_SUM && here) {
            b.rstd[i] = norm.rstd[row0 + own::row(i)];
            if (norm.mean) {
                b.mean[i] = norm.mean[row0 + own::row(i)];
            }
        }
#pragma unroll
        for (int group = 0; group < own::GROUPS; group++) {
            const bool inside = here && own::column(group) < x.n;
            b.addend[i][group].words = b.x[i][group].words = make_uint4(0, 0, 0, 0);
            if (inside && x.addend) {
                b.addend[i][group].words = *(const uint4 *)((const T *)x.addend + row_at + 32 * group);
            }
            if (FINISH == PS_FINISH_SUM && inside) {
                b.x[i][group].words = *(const uint4 *)((const T *)x.x + row_at + 32 * group);
            }
        }
    }
    return b;
}

/* 16 bytes at once, which the compiler sometimes takes apart. */
template <typename T> static __device__ __forceinline__ void put(T *to, const eight &from)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(from.words.x), "r"(from.words.y), "r"(from.words.z),
                 "r"(from.words.w)
                 : "memory");
}

/* Whether dropout drops the j-th of 8: a word has two draws, of which the upper one decides a word as it is. */
static __device__ __forceinline__ bool goes(const struct ps_block &draws, int j, uint32_t least)
{
    return (j % 2 ? draws.word[j / 2] : draws.word[j / 2] << 16) < least;
}

/* Draws of 8 columns. */
template <int N>
static __device__ __forceinline__ struct ps_block draw(const struct call &x, const struct corner &corner, int i, int group,
                                                       uint4 drawn)
{
    using own = lane_part<N>;
    return ps_draws_after(x.keys, drawn,
                          corner.block + (uint32_t)own::row(i) * ((uint32_t)x.n / 8) + (uint32_t)own::column(group) / 8);
}

/* RESIDUAL: c, and the norm of c as it is stored. */
template <typename T, int N>
static __device__ __forceinline__ void norm_forward(const struct call &x, const struct norm &norm, float (&sum)[N / 8][4],
                                                    const struct beside_rows<N> &beside, const struct ps_block (&draws)[2][N / 32],
                                                    const struct parameters<N> &parameters, const struct corner &corner, int64_t at,
                                                    int64_t row0)
{
    using own = lane_part<N>;
    const bool dropped = x.dropout.threshold, centred = norm.mean;
    const float scale = dropped ? x.dropout.scale : 1.0f, share = 1.0f / (float)x.n;
    const uint32_t least = x.dropout.threshold << 16;
    T *const c = (T *)x.c + at, *const normed = (T *)norm.normed + at;
    float all[2] = {}, mean[2] = {}, rstd[2];
#pragma unroll
    for (int group = 0; group < own::GROUPS; group++) {
        float bias[8];
        ps_load<8>(bias, parameters.bias + own::column(group));
#pragma unroll
        for (int j = 0; j < 16; j++) {
            own::of(sum, j / 8, group, j % 8) += bias[j % 8];
        }
    }
    if (dropped) {
#pragma unroll
        for (int group = 0; group < own::GROUPS; group++) {
#pragma unroll
            for (int j = 0; j < 16; j++) {
                float &one = own::of(sum, j / 8, group, j % 8);
                one = goes(draws[j / 8][group], j % 8, least) ? 0.0f : one;
            }
        }
    }
#pragma unroll
    for (int group = 0; group < own::GROUPS; group++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[8], part = 0;
            eight words;
            unpack<T>(v, beside.addend[i][group]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = fmaf(own::of(sum, i, group, j), scale, v[j]);
            }
            pack<T>(words, v);
            if (own::row(i) < corner.rows && own::column(group) < x.n) {
                put(c + i * 8 * x.ldc + 32 * group, words);
            }
            unpack<T>(v, words);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                own::of(sum, i, group, j) = v[j];
                part += v[j];
            }
            all[i] += part;
        }
    }
    if (centred) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            mean[i] = ps_quad_sum(all[i]) * share;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float squares = 0;
#pragma unroll
        for (int group = 0; group < own::GROUPS; group++) {
            float part = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float &one = own::of(sum, i, group, j);
                one -= mean[i];
                part = fmaf(one, one, part);
            }
            squares += own::column(group) < x.n ? part : 0.0f;
        }
        rstd[i] = rsqrtf(ps_quad_sum(squares) * share + norm.epsilon);
    }
#pragma unroll
    for (int group = 0; group < own::GROUPS; group++) {
        float gamma[8], beta[8];
        ps_load<8>(gamma, parameters.gamma + own::column(group));
        ps_load<8>(beta, parameters.beta + own::column(group));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[8];
            eight words;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = fmaf(own::of(sum, i, group, j) * rstd[i], gamma[j], beta[j]);
            }
            pack<T>(words, v);
            if (own::row(i) < corner.rows && own::column(group) < x.n) {
                put(normed + i * 8 * x.ldc + 32 * group, words);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x % 4 == 0 && own::row(i) < corner.rows) {
            norm.rstd[row0 + own::row(i)] = rstd[i];
            if (centred) {
                norm.mean[row0 + own::row(i)] = mean[i];
            }
        }
    }
}

/* SUM: the product is the gradient of what the norm gave, c that of its x, + addend. */
template <typename T, int N>
static __device__ __forceinline__ void norm_backward(const struct call &x, const struct norm &norm, float (&sum)[N / 8][4],
                                                     const struct beside_rows<N> &beside, const struct parameters<N> &parameters,
                                                     struct norm_sums<N> &sums, const struct corner &corner, int64_t at,
                                                     uint4 drawn)
{
    using own = lane_part<N>;
    const bool centred = norm.mean, dropped = x.dropout.threshold;
    const float scale = dropped ? x.dropout.scale : 1.0f, share = 1.0f / (float)x.n;
    const uint32_t least = x.dropout.threshold << 16;
    T *const c = (T *)x.c + at, *const masked = (T *)norm.masked + at;
    float all[2] = {}, product[2] = {};
#pragma unroll
    for (int group = 0; group < own::GROUPS; group++) {
        float gamma[8];
        ps_load<8>(gamma, parameters.gamma + own::column(group));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float xhat[8];
            unpack<T>(xhat, beside.x[i][group]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float &one = own::of(sum, i, group, j);
                xhat[j] = (xhat[j] - beside.mean[i]) * beside.rstd[i];
                sums.beta[group][j] += one; /* 0 beyond the rows and columns */
                sums.gamma[group][j] = fmaf(one, xhat[j], sums.gamma[group][j]);
                one *= gamma[j];
                all[i] += one;
                product[i] = fmaf(one, xhat[j], product[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        product[i] = ps_quad_sum(product[i]) * share;
    }
    if (centred) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            all[i] = ps_quad_sum(all[i]) * share;
        }
    } else {
        all[0] = all[1] = 0.0f;
    }
#pragma unroll
    for (int group = 0; group < own::GROUPS; group++) {
        eight words[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[8], add[8];
            unpack<T>(v, beside.x[i][group]);
            unpack<T>(add, beside.addend[i][group]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float xhat = (v[j] - beside.mean[i]) * beside.rstd[i];
                v[j] = fmaf(beside.rstd[i], fmaf(-xhat, product[i], own::of(sum, i, group, j) - all[i]), add[j]);
            }
            pack<T>(words[i], v);
            if (own::row(i) < corner.rows && own::column(group) < x.n) {
                put(c + i * 8 * x.ldc + 32 * group, words[i]);
            }
        }
        if (norm.masked) {
            struct ps_block draws[2];
            if (dropped) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    draws[i] = draw<N>(x, corner, i, group, drawn);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float v[8];
                unpack<T>(v, words[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] = dropped && goes(draws[i], j, least) ? 0.0f : v[j] * scale;
                    sums.bias[group][j] += v[j]; /* 0 beyond the rows; beyond the columns nobody reads it */
                }
                pack<T>(words[i], v);
                if (own::row(i) < corner.rows && own::column(group) < x.n) {
                    put(masked + i * 8 * x.ldc + 32 * group, words[i]);
                }
            }
        }
    }
}

/* The block's sums over rows to its rows of partial sums. room: all of the block's. */
template <int N>
static __device__ __forceinline__ void leave_sums(const struct call &x, const struct norm &norm, const struct norm_sums<N> &sums,
                                                  float *room)
{
    using own = lane_part<N>;
    constexpr int LINE = 3 * N + 4; /* floats, of eight lanes in different banks */
    const int lines = (int)blockDim.x / 4, first = norm.mean ? 2 : 1 /* kinds in `partials` */, n = x.n;
    float *const to = room + (int)threadIdx.x / 4 * LINE;
    __syncthreads(); /* the room was the operands' */
#pragma unroll
    for (int group = 0; group < own::GROUPS; group++) {
        ps_store<8>(to + own::column(group), sums.gamma[group]);
        ps_store<8>(to + N + own::column(group), sums.beta[group]);
        ps_store<8>(to + 2 * N + own::column(group), sums.bias[group]);
    }
    __syncthreads();
    if (const int i = (int)threadIdx.x; i < 3 * N) {
        const int kind = i / N, column = i % N;
        float all[4] = {};
        for (int line = 0; line < lines; line += 8) {
#pragma unroll
            for (int l = 0; l < 8; l++) {
                all[l % 4] += room[(line + l) * LINE + i];
            }
        }
        const float whole = all[0] + all[1] + (all[2] + all[3]);
        if (column < n && kind == 2) {
            norm.bias_partials[(int64_t)blockIdx.x * n + column] = whole;
        } else if (column < n && kind < first) {
            norm.partials[((int64_t)blockIdx.x * first + kind) * n + column] = whole;
        }
    }
}

template <typename T, int N, enum ps_finish FINISH>
static __global__ void __launch_bounds__((most_crews<N, FINISH>)*GROUP, 1)
    norm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ struct call x, const __grid_constant__ struct norm norm)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[1 + CREWS * MOST_DEPTH];
    __shared__ __align__(16) struct parameters<N> parameters;
    constexpr bool ACROSS = FINISH == PS_FINISH_RESIDUAL;
    constexpr int RIGHT = right_bytes<N, ACROSS>;
    using own = lane_part<N>;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), side = warp / 4, crews = (int)blockDim.x / GROUP;
    const uint32_t held = (ps_shared_address(memory) + 1023u) & ~1023u, rings = held + x.pieces * RIGHT;
    const uint32_t ring = rings + side * x.depth * PANEL;
    const uint32_t held_full = ps_shared_address(barriers), full = held_full + 8 + 8 * MOST_DEPTH * side;
    open_barriers(a_map, b_map, held_full);
    const int first = side * x.blocks + (int)blockIdx.x, stride = crews * x.blocks;
    auto row_of = [&](int turn) { return (int64_t)(x.tiles_m - 1 - turn) * 64; };
    auto lead = [&](auto what) {
        if (warp % 4 == 0 && ps_elect()) {
            what();
        }
    };
    /* What lies beside a tile to L2: few products are shorter than the way from memory. It may be anyone's still to write. */
    auto near = [&](int turn) {
        if (turn < x.tiles_m) {
            const int64_t row = row_of(turn);
            const uint32_t rows = (uint32_t)rows_at(x.m, row, 64), bytes = rows * (uint32_t)x.n * 2;
            if (x.addend) {
                ps_bulk_prefetch((const T *)x.addend + row * x.ldc, bytes);
            }
            if constexpr (FINISH == PS_FINISH_SUM) {
                ps_bulk_prefetch((const T *)x.x + row * x.ldc, bytes);
                if (rows == 64 && !(((uintptr_t)norm.rstd | (uintptr_t)norm.mean) & 15)) {
                    ps_bulk_prefetch(norm.rstd + row, 256);
                    if (norm.mean) {
                        ps_bulk_prefetch(norm.mean + row, 256);
                    }
                }
            }
        }
    };
    auto hold_right = [&]() {
        if (threadIdx.x == 0) {
            ps_mbarrier_expect(held_full, x.pieces * RIGHT);
            for (int i = 0; i < x.pieces; i++) {
                bring_right<N, ACROSS, 1>(b_map, held + i * RIGHT, held_full, 0, i, 0);
            }
        }
    };
    lead([&]() {
        near(first);
        near(first + stride);
    });
    begin_with(x, hold_right);
    int coming = first, coming_piece = 0, coming_stage = 0; /* the leader's: what it brings next */
    auto bring = [&]() {
        if (coming < x.tiles_m) {
            ps_mbarrier_expect(full + 8 * coming_stage, PANEL);
            ps_tensor_copy2(ring + coming_stage * PANEL, &a_map, coming_piece * DEEP, (int)row_of(coming), full + 8 * coming_stage);
            coming_stage = coming_stage + 1 == x.depth ? 0 : coming_stage + 1;
            if (++coming_piece == x.pieces) {
                coming_piece = 0;
                coming += stride;
            }
        }
    };
    lead([&]() {
        for (int i = 0; i < x.depth; i++) {
            bring();
        }
    });
    const uint4 drawn = begin_draws(x);
    if (const int i = (int)threadIdx.x; i < N) {
        const bool inside = i < x.n;
        parameters.bias[i] = ACROSS && inside ? x.bias[i] : 0.0f;
        parameters.gamma[i] = inside ? norm.gamma[i] : 0.0f;
        parameters.beta[i] = ACROSS && inside && norm.mean ? norm.beta[i] : 0.0f;
    }
    ps_mbarrier_wait(held_full, 0);
    spread_columns<N, ACROSS>((uint4 *)(memory + (held - ps_shared_address(memory))), x.pieces);
    ps_publish();
    __syncthreads();
    struct norm_sums<N> sums = {
    };
    int panel = 0;
    uint32_t parity = 0;
    for (int turn = first; turn < x.tiles_m; turn += stride) {
        const int64_t row0 = row_of(turn) + warp % 4 * 16, at = (row0 + own::row(0)) * x.ldc + own::column(0);
        const struct corner corner = corner_of<1>(x, row0, 0);
        const struct beside_rows<N> beside = fetch_rows<T, N, FINISH>(x, norm, corner, at, row0);
        lead([&]() { near(turn + 2 * stride); });
        struct ps_block draws[2][own::GROUPS];
        if (ACROSS && x.dropout.threshold) { /* while the rows are on their way */
#pragma unroll
            for (int i = 0; i < 2 * own::GROUPS; i++) {
                draws[i % 2][i / 2] = draw<N>(x, corner, i % 2, i / 2, drawn);
            }
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
                lead(bring); /* the panel before has been read */
            }
            if (++panel == x.depth) {
                panel = 0;
                parity ^= 1;
            }
        }
        ps_wgmma_wait<0>();
        ps_pin(sum);
        lead(bring);
        if constexpr (ACROSS) {
            norm_forward<T, N>(x, norm, sum, beside, draws, parameters, corner, at, row0);
        } else {
            norm_backward<T, N>(x, norm, sum, beside, parameters, sums, corner, at, drawn);
        }
    }
    if constexpr (FINISH == PS_FINISH_SUM) {
        leave_sums<N>(x, norm, sums, (float *)(memory + (held - ps_shared_address(memory))));
    }
}

/* As many warpgroups as leave each a ring beside the right operand; false where not two have one. */
template <int N, bool ACROSS, int MOST> static bool hold_rows(const struct ps_cuda_context *c, struct call &x, int &crews)
{
    x.pieces = (x.k + DEEP - 1) / DEEP;
    x.tiles_m = (int)((x.m + 63) / 64);
    x.blocks = x.tiles_m < c->multiprocessors ? x.tiles_m : c->multiprocessors;
    for (crews = MOST; crews >= 2; crews--) {
        x.depth = (MOST_HELD - 1024 - x.pieces * right_bytes<N, ACROSS>) / (crews * PANEL);
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
    if (!hold_rows<N, ACROSS, most_crews<N, FINISH>>(c, x, crews)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a norm of %d columns behind %d terms is not served", op, x.n, x.k);
    }
    const int shared = 1024 + x.pieces * right_bytes<N, ACROSS> + crews * x.depth * PANEL;
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
