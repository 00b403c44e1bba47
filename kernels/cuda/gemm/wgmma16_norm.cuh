/* gemm/wgmma16.cuh's products whose rows a warp has whole, with a norm of them done on the way out: behind the residual a LayerNorm
 * or RMSNorm of what was written (RESIDUAL), or in place of the product its backward (SUM). The norm's pass over rows would read
 * them again, backward's what the product had written for it alone.
 *
 * As in wgmma16_held.cuh a block holds the right operand, here all of its columns, up to 256, backward 128, and its warpgroups let
 * tiles of 64 rows pass: of up to 64 columns each by itself, else side by side in teams, of which each has a part of the columns.
 * These read the same panels and tell one another what they have of a row's sums. The held columns change places first, so that
 * what wgmma leaves a lane is 8 neighbouring columns of each 32: sums go out from the registers that they are in, and a row's sums
 * are those of four lanes. The sums over rows of a norm's backward stay in registers, a lane's columns being always the same, and
 * leave a block as one row of partial sums; for these it has fewer warpgroups. The last rows come first: the kernel before has just
 * written them, and L2 still has them.
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

/* Warpgroups, in teams of TEAM that have N columns each: SUM's sums over rows want registers. */
template <int N, int TEAM, enum ps_finish FINISH>
static constexpr int most_crews = (FINISH == PS_FINISH_SUM && N > 32 ? 3 : CREWS) / TEAM *TEAM;

/* Panels of a team's ring: where warpgroups share it, half of the barriers say that they have read. */
template <int N, int TEAM, enum ps_finish FINISH>
static constexpr int most_depth = TEAM == 1 ? MOST_DEPTH : CREWS *MOST_DEPTH / 2 / (most_crews<N, TEAM, FINISH> / TEAM);

/* The warps of a team that have the same 16 rows. */
template <int TEAM> struct meeting {
    float2 (*room)[TEAM]; /* a line a row of the tile; the next tile has another one */
    int part, barrier;
};

/* What each of them has of a lane's two rows. */
template <int TEAM>
static __device__ __forceinline__ void gather_rows(float2 (&all)[2][TEAM], const struct meeting<TEAM> &meeting,
                                                   const float2 (&mine)[2])
{
    float2(*const lines)[TEAM] = meeting.room + (int)threadIdx.x % GROUP / 32 * 16 + (int)threadIdx.x % 32 / 4;
    if (threadIdx.x % 4 == 0) {
        lines[0][meeting.part] = mine[0];
        lines[8][meeting.part] = mine[1];
    }
    ps_barrier(meeting.barrier, 32 * TEAM);
#pragma unroll
    for (int i = 0; i < 2 * TEAM; i++) {
        all[i / TEAM][i % TEAM] = lines[i / TEAM * 8][i % TEAM];
    }
}

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
            const bool inside = here && own::column(group) < corner.columns;
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
template <typename T, int N, int TEAM>
static __device__ __forceinline__ void norm_forward(const struct call &x, const struct norm &norm, float (&sum)[N / 8][4],
                                                    const struct beside_rows<N> &beside, const struct ps_block (&draws)[2][N / 32],
                                                    const struct parameters<N> &parameters, const struct meeting<TEAM> &meeting,
                                                    const struct corner &corner, int64_t at, int64_t row0)
{
    using own = lane_part<N>;
    const bool dropped = x.dropout.threshold, centred = norm.mean;
    const float scale = dropped ? x.dropout.scale : 1.0f, share = 1.0f / (float)x.n;
    const float own_share = 1.0f / (float)min(N, corner.columns);
    const uint32_t least = x.dropout.threshold << 16;
    T *const c = (T *)x.c + at, *const normed = (T *)norm.normed + at;
    float all[2] = {}, mean[2] = {}, rstd[2], shift[2] = {};
    float2 mine[2];
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
            if (own::row(i) < corner.rows && own::column(group) < corner.columns) {
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
            mean[i] = ps_quad_sum(all[i]) * own_share;
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
            squares += own::column(group) < corner.columns ? part : 0.0f;
        }
        mine[i] = make_float2(mean[i], ps_quad_sum(squares));
    }
    if constexpr (TEAM > 1) { /* about a warp's own mean */
        float2 parts[2][TEAM];
        gather_rows<TEAM>(parts, meeting, mine);
        const float last = (float)(x.n - (TEAM - 1) * N);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float whole = parts[i][TEAM - 1].x * last, squares = 0;
#pragma unroll
            for (int p = 0; p < TEAM - 1; p++) {
                whole = fmaf(parts[i][p].x, (float)N, whole);
            }
            whole *= share;
#pragma unroll
            for (int p = 0; p < TEAM; p++) {
                const float away = parts[i][p].x - whole;
                squares += fmaf(away * away, p < TEAM - 1 ? (float)N : last, parts[i][p].y);
            }
            shift[i] = mean[i] - whole;
            mine[i] = make_float2(whole, squares);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rstd[i] = rsqrtf(mine[i].y * share + norm.epsilon);
        shift[i] *= rstd[i];
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
                v[j] = fmaf(fmaf(own::of(sum, i, group, j), rstd[i], shift[i]), gamma[j], beta[j]);
            }
            pack<T>(words, v);
            if (own::row(i) < corner.rows && own::column(group) < corner.columns) {
                put(normed + i * 8 * x.ldc + 32 * group, words);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x % 4 == 0 && meeting.part == 0 && own::row(i) < corner.rows) {
            norm.rstd[row0 + own::row(i)] = rstd[i];
            if (centred) {
                norm.mean[row0 + own::row(i)] = mine[i].x;
            }
        }
    }
}

/* SUM: the product is the gradient of what the norm gave, c that of its x, + addend. */
template <typename T, int N, int TEAM>
static __device__ __forceinline__ void norm_backward(const struct call &x, const struct norm &norm, float (&sum)[N / 8][4],
                                                     const struct beside_rows<N> &beside, const struct parameters<N> &parameters,
                                                     const struct meeting<TEAM> &meeting, struct norm_sums<N> &sums,
                                                     const struct corner &corner, int64_t at, uint4 drawn)
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
        product[i] = ps_quad_sum(product[i]);
        all[i] = centred ? ps_quad_sum(all[i]) : 0.0f;
    }
    if constexpr (TEAM > 1) {
        const float2 mine[2] = {make_float2(all[0], product[0]), make_float2(all[1], product[1])};
        float2 parts[2][TEAM];
        gather_rows<TEAM>(parts, meeting, mine);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            all[i] = product[i] = 0.0f;
#pragma unroll
            for (int p = 0; p < TEAM; p++) {
                all[i] += parts[i][p].x;
                product[i] += parts[i][p].y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        all[i] *= share;
        product[i] *= share;
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
            if (own::row(i) < corner.rows && own::column(group) < corner.columns) {
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
                if (own::row(i) < corner.rows && own::column(group) < corner.columns) {
                    put(masked + i * 8 * x.ldc + 32 * group, words[i]);
                }
            }
        }
    }
}

/* The block's sums over rows to its rows of partial sums. room: all of the block's. */
template <int N, int TEAM>
static __device__ __forceinline__ void leave_sums(const struct call &x, const struct norm &norm, const struct norm_sums<N> &sums,
                                                  float *room)
{
    using own = lane_part<N>;
    constexpr int LINE = 3 * N + 4, COLUMNS = N * TEAM; /* floats, of eight lanes in different banks */
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
    for (int i = (int)threadIdx.x; i < 3 * COLUMNS; i += (int)blockDim.x) {
        const int kind = i / COLUMNS, column = i % COLUMNS;
        const float *const from = room + column / N * 32 * LINE + kind * N + column % N;
        float all[4] = {};
        for (int line = 0; line < lines; line += 32 * TEAM) { /* a warpgroup's with these columns */
#pragma unroll 8
            for (int l = 0; l < 32; l++) {
                all[l % 4] += from[(line + l) * LINE];
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

template <typename T, int N, int TEAM, enum ps_finish FINISH>
static __global__ void __launch_bounds__((most_crews<N, TEAM, FINISH>)*GROUP, 1)
    norm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ struct call x, const __grid_constant__ struct norm norm)
{
    extern __shared__ uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[1 + CREWS * MOST_DEPTH];
    __shared__ __align__(16) struct parameters<N> parameters[TEAM];
    __shared__ __align__(16) float2 rooms[2 * CREWS / TEAM][TEAM > 1 ? 64 : 1][TEAM];
    constexpr bool ACROSS = FINISH == PS_FINISH_RESIDUAL;
    constexpr int COLUMNS = N * TEAM, RIGHT = right_bytes<COLUMNS, ACROSS>;
    using own = lane_part<N>;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), teams = (int)blockDim.x / (GROUP * TEAM);
    const int team = warp / (4 * TEAM), part = warp / 4 % TEAM, column0 = part * N;
    const uint32_t held = (ps_shared_address(memory) + 1023u) & ~1023u, rings = held + x.pieces * RIGHT;
    const uint32_t ring = rings + team * x.depth * PANEL,
                   own_right = ACROSS ? column0 / 64 * PANEL + column0 % 64 * 2 : column0 * 128;
    const uint32_t held_full = ps_shared_address(barriers), full = held_full + 8 + 8 * most_depth<N, TEAM, FINISH> * team;
    const uint32_t empty = full + 8 * (CREWS * MOST_DEPTH / 2); /* where warpgroups share a ring */
    open_barriers<TEAM>(a_map, b_map, held_full);
    const int first = team * x.blocks + (int)blockIdx.x, stride = teams * x.blocks;
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
                bring_right<COLUMNS, ACROSS, 1>(b_map, held + i * RIGHT, held_full, 0, i, 0);
            }
        }
    };
    auto lead_team = [&](auto what) {
        if (part == 0) {
            lead(what);
        }
    };
    lead_team([&]() {
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
    lead_team([&]() {
        for (int i = 0; i < x.depth; i++) {
            bring();
        }
    });
    const uint4 drawn = begin_draws(x);
    if (const int i = (int)threadIdx.x; i < COLUMNS) {
        const bool inside = i < x.n;
        auto &to = parameters[i / N];
        to.bias[i % N] = ACROSS && inside ? x.bias[i] : 0.0f;
        to.gamma[i % N] = inside ? norm.gamma[i] : 0.0f;
        to.beta[i % N] = ACROSS && inside && norm.mean ? norm.beta[i] : 0.0f;
    }
    ps_mbarrier_wait(held_full, 0);
    spread_columns<COLUMNS, ACROSS>((uint4 *)(memory + (held - ps_shared_address(memory))), x.pieces);
    ps_publish();
    __syncthreads();
    struct norm_sums<N> sums = {
    };
    int panel = 0;
    uint32_t parity = 0;
    /* One panel more has been read. All lanes wait: where one does, ptxas takes the warp for one that has parted. */
    int read = 0;
    uint32_t read_parity = 0;
    auto pass_on = [&]() {
        if constexpr (TEAM > 1) {
            lead([&]() { ps_mbarrier_arrive(empty + 8 * read); });
            if (part == 0 && warp % 4 == 0) {
                ps_mbarrier_wait(empty + 8 * read, read_parity);
            }
            if (++read == x.depth) {
                read = 0;
                read_parity ^= 1;
            }
        }
        lead_team(bring);
    };
    struct meeting<TEAM> meeting;
    meeting.room = rooms[2 * team];
    meeting.part = part;
    meeting.barrier = 1 + 4 * team + warp % 4;
    for (int turn = first; turn < x.tiles_m; turn += stride) {
        const int64_t row0 = row_of(turn) + warp % 4 * 16, at = (row0 + own::row(0)) * x.ldc + column0 + own::column(0);
        const struct corner corner = corner_of<1>(x, row0, column0);
        const struct beside_rows<N> beside = fetch_rows<T, N, FINISH>(x, norm, corner, at, row0);
        lead_team([&]() { near(turn + 2 * stride); });
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
            const uint32_t right = ps_wgmma_place(held + piece * RIGHT + own_right, ACROSS ? PANEL : 0);
            ps_wgmma_begin();
#pragma unroll
            for (int k = 0; k < DEEP / 16; k++) {
                ps_wgmma<T, 0, ACROSS>(sum, ps_wgmma_operand(left, k * 32), ps_wgmma_operand(right, k * (ACROSS ? 16 * 128 : 32)),
                                       piece | k);
            }
            ps_wgmma_commit();
            if (piece > 0) {
                ps_wgmma_wait<1>();
                pass_on();
            }
            if (++panel == x.depth) {
                panel = 0;
                parity ^= 1;
            }
        }
        ps_wgmma_wait<0>();
        ps_pin(sum);
        pass_on();
        if constexpr (ACROSS) {
            norm_forward<T, N, TEAM>(x, norm, sum, beside, draws, parameters[part], meeting, corner, at, row0);
        } else {
            norm_backward<T, N, TEAM>(x, norm, sum, beside, parameters[part], meeting, sums, corner, at, drawn);
        }
        meeting.room = meeting.room == rooms[2 * team] ? rooms[2 * team + 1] : rooms[2 * team];
    }
    if constexpr (FINISH == PS_FINISH_SUM) {
        leave_sums<N, TEAM>(x, norm, sums, (float *)(memory + (held - ps_shared_address(memory))));
    }
}

/* As many warpgroups as leave each or each team a ring beside the right operand; false where there is none. */
template <int N, int TEAM, enum ps_finish FINISH> static bool hold_rows(const struct ps_cuda_context *c, struct call &x, int &crews)
{
    constexpr int LEAST = TEAM > 1 ? 4 : 2, MOST = most_depth<N, TEAM, FINISH>;
    constexpr int ROOM = MOST_HELD - (TEAM > 3 ? 8 : TEAM > 1 ? 6 : 1) * 1024; /* teams' rooms and parameters are more */
    x.pieces = (x.k + DEEP - 1) / DEEP;
    x.tiles_m = (int)((x.m + 63) / 64);
    x.blocks = x.tiles_m < c->multiprocessors ? x.tiles_m : c->multiprocessors;
    for (crews = most_crews<N, TEAM, FINISH>; crews >= (TEAM > 1 ? TEAM : 2); crews -= TEAM) {
        x.depth = (ROOM - x.pieces * right_bytes<N * TEAM, FINISH == PS_FINISH_RESIDUAL>) / (crews / TEAM * PANEL);
        if (x.depth >= LEAST) {
            x.depth = x.depth < MOST ? x.depth : MOST;
            return true;
        }
    }
    return false;
}

template <typename T, int N, int TEAM, enum ps_finish FINISH>
static enum ps_status launch_norm(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, struct call x,
                                  struct norm norm, const struct ps_gemm_finish *f)
{
    constexpr bool ACROSS = FINISH == PS_FINISH_RESIDUAL;
    CUtensorMap a, b;
    int crews;
    if (!hold_rows<N, TEAM, FINISH>(c, x, crews)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a norm of %d columns behind %d terms is not served", op, x.n, x.k);
    }
    const int shared = 1024 + x.pieces * right_bytes<N * TEAM, ACROSS> + crews / TEAM * x.depth * PANEL;
    auto *const kernel = norm_kernel<T, N, TEAM, FINISH>;
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, shared, op));
    PS_TRY((open_maps<N * TEAM, ACROSS, 1>(&a, &b, p, 64)));
    const int64_t rows = x.blocks, kinds = f->row_mean.data ? 2 : 1;
    if (!ACROSS) {
        PS_TRY(ps_cuda_partials(c, op, (size_t)(rows * 3 * x.n), &norm.partials));
        norm.bias_partials = norm.partials + rows * kinds * x.n;
    }
    ps_cuda_launch(c, kernel, dim3((unsigned)x.blocks), (unsigned)(crews * GROUP), (size_t)shared, a, b, x, norm);
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    const struct ps_cuda_columns jobs[] = {{(float *)f->dgamma.data, (float *)f->dbeta.data, x.n, norm.partials, rows, kinds * x.n},
                                           {(float *)f->dbias.data, NULL, x.n, norm.bias_partials, rows, x.n}};
    return ACROSS ? PS_OK : ps_cuda_add_columns(c, op, jobs, norm.masked ? 2 : 1);
}

/* The narrowest tile that has all columns. */
template <typename T, enum ps_finish FINISH>
static enum ps_status launch_norm_columns(const struct ps_cuda_context *c, const char *op, const struct ps_product *p,
                                          const struct call &x, const struct ps_gemm_finish *f)
{
    if (x.n > (FINISH == PS_FINISH_SUM ? 128 : 256)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a norm of %d columns is not served", op, x.n);
    }
    struct norm norm = {};
    norm.mean = (float *)f->row_mean.data;
    norm.rstd = (float *)f->rstd.data;
    norm.gamma = (const float *)f->gamma.data;
    norm.beta = (const float *)f->beta.data;
    norm.normed = f->normed.data;
    norm.masked = f->masked.data;
    norm.epsilon = (float)f->epsilon;
    if constexpr (FINISH == PS_FINISH_SUM) {
        if (x.n > 64 && x.n <= 96) {
            return launch_norm<T, 32, 3, FINISH>(c, op, p, x, norm, f);
        }
    }
    if constexpr (FINISH == PS_FINISH_RESIDUAL) {
        if (x.n > 128) {
            return x.n > 192 ? launch_norm<T, 64, 4, FINISH>(c, op, p, x, norm, f)
                             : launch_norm<T, 64, 3, FINISH>(c, op, p, x, norm, f);
        }
    }
    if (x.n > 64) {
        return launch_norm<T, 64, 2, FINISH>(c, op, p, x, norm, f);
    }
    return x.n <= 32 ? launch_norm<T, 32, 1, FINISH>(c, op, p, x, norm, f) : launch_norm<T, 64, 1, FINISH>(c, op, p, x, norm, f);
}

} // namespace wgmma16

#endif
