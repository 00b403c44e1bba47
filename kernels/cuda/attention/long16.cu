/* Attention of 16 bits for long sequences, N above 64, by tiles (Milakov and Gimelshein 2018; Dao et al. 2022). Scores stay in a
 * warp's registers, where weights and gradients, rounded, are the next product's operand; every sum has one owner and a fixed
 * order.
 *
 * Forward a block has up to 128 queries of one head, 32 a warp, or 16 of heads of more than 16 columns, and brings keys and values
 * to shared memory by steps of 64, the next step's behind the present one's; it keeps the logarithm of each row's sum, from which
 * backward computes the scores again. Backward a block takes a whole head, where e is up to 32 and shared memory holds its queries,
 * so that no score is computed twice; of few heads several blocks, a cluster, share a head's keys, each with all its queries, and
 * add up dq in each other's shared memory, and a warp has fewer keys. Otherwise there are two kernels built like forward, one by
 * queries for dq and delta, one by keys for dk and dv. N is anything; e, of all pieces, up to 128: chunks of 8 columns, of which
 * two are a product's m16n8k16, a last one an m16n8k8. For e up to 16 forward, and 8 backward, one side of the scores is held
 * scaled, so that a product makes the exponents as they are; on Hopper forward of them is long16_wgmma.cu's where a block has 128
 * queries, of up to 8 columns from 512 patches on, both ways of heads of more than 32 columns are long16_wide.cuh's, and
 * backward of up to 128 patches long16_whole.cuh's.
 *
 * Bytes: 8 S h N e forward, 16 S h N e backward, or 24 in two kernels, and the sums; 6 S h N e more for each further block of a
 * head; by steps those of the other side once for every 128 rows, from L2. S h N^2 exponentials each way, or twice as many; tensor
 * FLOPs 4 S h N^2 e forward, 10 or 14 S h N^2 e backward, 2 more of scaled rows, of N in whole 16 or 64 and e in whole 8. For e up
 * to 16 the exponentials bound it, 16 a clock and multiprocessor: of 360 patches, heads of 8, 1,792 matrices 63 us each way at 1.75
 * GHz, beside 41 and 83 MB, 10 and 20 us at 4.2 TB/s. Forward an eighth of them is a polynomial: 55 us. Backward has 42
 * instructions for 16 by 16 scores: 45 us; heads of 16 have 53 and 10 products of 6 to 8 clocks, which bound it, and two warps a
 * scheduler, so that what one waits for counts. */
#include <algorithm>

#include "kernels/cuda/attention/long16_rows.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/reduce.cuh"

/* The most warps of a block: heads of more than 64 columns take twice the registers and shared memory. */
template <int CHUNKS> static constexpr int most_warps = CHUNKS > 8 ? 4 : 8;

/* A lane's part of delta, of its quad's: of a row of mixed and of d_mixed in their tiles, `of_mixed` and `of_up` from chunk to
 * chunk. */
template <typename T>
static __device__ __forceinline__ float part_of_delta(const char *mixed, uint32_t of_mixed, const char *up, uint32_t of_up,
                                                      uint32_t chunks)
{
    float sum = 0.0f;
#pragma unroll 1
    for (uint32_t i = 0; i < chunks; i++) {
        const uint32_t a = *(const uint32_t *)(mixed + i * of_mixed + threadIdx.x % 4 * 4);
        const uint32_t b = *(const uint32_t *)(up + i * of_up + threadIdx.x % 4 * 4);
        sum = fmaf(ps_low<T>(a), ps_low<T>(b), fmaf(ps_high<T>(a), ps_high<T>(b), sum));
    }
    return sum;
}

/* delta of a row that the thread has for itself. */
template <typename T>
static __device__ __forceinline__ float delta_of(const char *mixed, const char *up, uint32_t chunk, uint32_t chunks)
{
    float sum = 0.0f;
#pragma unroll 1
    for (uint32_t i = 0; i < chunks; i++) {
        const uint4 a = *(const uint4 *)(mixed + i * chunk), b = *(const uint4 *)(up + i * chunk);
        const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sum = fmaf(ps_low<T>(x[j]), ps_low<T>(y[j]), fmaf(ps_high<T>(x[j]), ps_high<T>(y[j]), sum));
        }
    }
    return sum;
}

/* 2^x; of every so many values that a lane has one is computed beside the unit that has the others. */
enum { POLYNOMIAL = 8 };

static __device__ __forceinline__ float power(float x, int index)
{
    return index % POLYNOMIAL == POLYNOMIAL - 1 ? ps_exp2_polynomial(x) : ps_exp2(x);
}

/* ---- rows of up to 16 columns, held, whose products are powers as they come ---- */

/* 16 rows as second operands of such: 8 rows' two registers, then the others'; of 8 columns the same twice. */
template <int CHUNKS> static __device__ __forceinline__ void load_second(uint32_t (&to)[4], uint32_t first, uint32_t chunk)
{
    const uint32_t lane = threadIdx.x % 32;
    ps_ldmatrix4_at(to, first + (lane / 16 * 8 + lane % 8) * 16 + (CHUNKS == 1 ? 0 : lane / 8 % 2 * chunk));
}

/* sum [16, 16] = start + scaled rows times rows; start: a quadruple for each half, or one for both. */
template <typename T, int CHUNKS, int STARTS>
static __device__ __forceinline__ void multiply_scaled(float (&sum)[2][4], const float (&start)[STARTS][4],
                                                       const uint32_t (&a)[CHUNKS][4], const uint32_t (&b)[4])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        ps_mma16<T>(sum[half], a[0], b[2 * half], b[2 * half + 1], start[half % STARTS]);
        if constexpr (CHUNKS == 2) {
            ps_mma16<T>(sum[half], a[1], b[2 * half], b[2 * half + 1], sum[half]);
        }
    }
}

/* ---- forward ---- */

/* Forward a warp has so many tiles of 16 queries, for which it loads keys and values once, and takes keys by PART_TILES tiles. */
template <int CHUNKS> static constexpr int query_tiles = CHUNKS > 2 ? 1 : 2;
enum { PART_TILES = 2, PART = PART_TILES * 16 };

/* The most warps of forward's blocks, and so many blocks whose registers a multiprocessor has. */
template <int CHUNKS> static constexpr int forward_warps = most_warps<CHUNKS> / query_tiles<CHUNKS>;
template <int CHUNKS> static constexpr int forward_blocks = CHUNKS == 1 ? 5 : CHUNKS == 2 ? 4 : CHUNKS == 8 ? 2 : 3;

/* Weights are powers of 2 of a row's scores less the largest of its first keys: of most rows that does, as their sums tell. Else
 * the block does all again and looks for the largest at every part (`again`). HELD: q has no more chunks than v, and each warp's
 * queries are held, scaled. */
template <typename T, int CHUNKS, bool HELD>
static __global__ void __launch_bounds__(forward_warps<CHUNKS> * 32, forward_blocks<CHUNKS>)
    forward_kernel(const __grid_constant__ struct long16 p)
{
    ps_grid_begin();
    extern __shared__ float4 shared_memory[];
    constexpr int TILES = query_tiles<CHUNKS>;
    const uint32_t rows_here = blockDim.x / 2 * TILES;
    const struct place at(p, rows_here);
    const uint32_t lane = threadIdx.x % 32, count = (uint32_t)p.x.patches, row0 = threadIdx.x / 32 * 16 * TILES;
    const uint32_t of_k = (HELD ? CHUNKS : p.chunks_q) * p.chunk_step, of_step = of_k + CHUNKS * p.chunk_step;
    char *const q = (char *)shared_memory, *const steps = q + p.chunks_q * p.chunk;
    if (p.clear) {
        ps_attention_clear(q, p.shared);
    }
    const struct unit unit_q(p, p.units_q, true), unit_v(p, p.units_v, false);
    const struct rows from_k(p.x.k, at, unit_q), from_v(p.x.v, at, unit_v);
    fetch(q, p.chunk, rows(p.x.q, at, unit_q), unit_q, at.row, rows_here, p);
    const float factor = p.x.scale * PS_LOG2_E, zero[1][4] = {};
    const bool active = at.row + row0 < count;
    uint32_t queries[TILES][HELD ? CHUNKS : 1][4];
    float mixed[TILES][CHUNKS][4], sum[TILES][4], start[TILES][1][4]; /* start: negative, what is taken off; two are of a row */
#pragma unroll 1
    for (bool again = false;; again = true) {
        fetch(steps, p.chunk_step, from_k, unit_q, 0, STEP, p);
        fetch(steps + of_k, p.chunk_step, from_v, unit_v, 0, STEP, p);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            ps_zero(mixed[i]);
            ps_zero(start[i]);
            sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0;
        }
#pragma unroll 1
        for (uint32_t key0 = 0, now = 0; key0 < count; key0 += STEP, now ^= of_step) {
            ps_copy_wait();
            __syncthreads(); /* the step is there, the one before is read */
            if (key0 + STEP < count) {
                char *const next = steps + (now ^ of_step);
                fetch(next, p.chunk_step, from_k, unit_q, key0 + STEP, STEP, p);
                fetch(next + of_k, p.chunk_step, from_v, unit_v, key0 + STEP, STEP, p);
            }
            if constexpr (HELD) {
#pragma unroll
                for (int i = 0; i < TILES && key0 == 0; i++) {
                    load_scaled<T>(queries[i], ps_shared_address(q + (row0 + i * 16) * 16), p.chunk, factor);
                }
            }
#pragma unroll 1
            for (uint32_t part = key0; active && part < min(key0 + STEP, count); part += PART) {
                const auto take = [&](auto count_of_tiles) {
                    constexpr int KEYS = decltype(count_of_tiles)::value; /* tiles of them */
                    const uint32_t keys = ps_shared_address(steps + now) + (part - key0) * 16;
                    float s[TILES][2 * KEYS][4];
                    uint32_t weights[TILES][KEYS][4];
                    const auto exponents = [&] {
                        if constexpr (HELD) {
#pragma unroll
                            for (int j = 0; j < KEYS; j++) {
                                uint32_t y[4];
                                load_second<CHUNKS>(y, keys + j * 256, p.chunk_step);
#pragma unroll
                                for (int i = 0; i < TILES; i++) {
                                    multiply_scaled<T, CHUNKS>((float(&)[2][4])s[i][2 * j], start[i], queries[i], y);
                                }
                            }
                        }
                    };
                    exponents();
#pragma unroll
                    for (int i = 0; i < TILES && !HELD; i++) {
                        ps_attention_scores<T, KEYS>(s[i], zero, ps_chunks(q + (row0 + i * 16) * 16, p.chunk),
                                                     ps_chunked{keys, p.chunk_step}, p.chunks_q);
#pragma unroll
                        for (int j = 0; j < 8 * KEYS; j++) {
                            s[i][j / 4][j % 4] = fmaf(s[i][j / 4][j % 4], factor, start[i][0][j % 4]);
                        }
                    }
                    if (again || part == 0) {
#pragma unroll
                        for (int i = 0; i < TILES; i++) {
                            float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
                            for (int j = 0; j < 8 * KEYS; j++) {
                                most[j % 4 / 2] = fmaxf(most[j % 4 / 2], s[i][j / 4][j % 4]);
                            }
#pragma unroll
                            for (int r = 0; r < 2; r++) {
                                most[r] = ps_group_max<4>(most[r]);
                                most[r] = part == 0 ? most[r] : fmaxf(most[r], 0.0f);
                                const float rescale = part == 0 ? 0.0f : ps_exp2(-most[r]);
                                sum[i][2 * r] *= rescale;
                                start[i][0][2 * r] -= most[r];
                                start[i][0][2 * r + 1] -= most[r];
#pragma unroll
                                for (int j = 0; j < CHUNKS; j++) {
                                    mixed[i][j][2 * r] *= rescale;
                                    mixed[i][j][2 * r + 1] *= rescale;
                                }
                            }
#pragma unroll
                            for (int j = 0; j < 8 * KEYS && !HELD; j++) {
                                s[i][j / 4][j % 4] -= most[j % 4 / 2];
                            }
                        }
                        exponents();
                    }
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
#pragma unroll
                        for (int j = 0; j < 8 * KEYS; j++) {
                            s[i][j / 4][j % 4] = power(s[i][j / 4][j % 4], j);
                        }
                        ps_attention_round<T, KEYS>(weights[i], s[i]);
                    }
                    if (part + KEYS * 16 > count) { /* nothing of what is no key */
#pragma unroll
                        for (int j = 0; j < 4 * KEYS; j++) {
                            const uint32_t pair = ps_attention_pair(part + j / 4 * 16 + j % 4 / 2 * 8 + lane % 4 * 2, count);
#pragma unroll
                            for (int i = 0; i < TILES; i++) {
                                weights[i][j / 4][j % 4] &= pair;
                            }
                        }
                    }
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
#pragma unroll
                        for (int j = 0; j < KEYS; j++) {
                            ps_mma16<T>(sum[i], weights[i][j], ps_ones<T>(), ps_ones<T>(), sum[i]); /* in every column */
                        }
                    }
                    ps_attention_mix<T, KEYS, CHUNKS>(mixed, weights, ps_chunked{keys + of_k, p.chunk_step});
                };
                if (!HELD || part + PART - 16 < count) {
                    take(std::integral_constant<int, PART_TILES>());
                } else { /* the last keys fill half a part at most */
                    take(std::integral_constant<int, PART_TILES / 2>());
                }
            }
        }
        bool fine = true;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            fine = fine && ps_sums_hold<T>(fminf(sum[i][0], sum[i][2]), fmaxf(sum[i][0], sum[i][2]));
        }
        if (again || !__syncthreads_or(active && !fine)) {
            break;
        }
    }
#pragma unroll
    for (int i = 0; i < TILES && active; i++) {
        const struct ps_chunked own = ps_chunks(q + (row0 + i * 16) * 16, p.chunk);
        const uint32_t half = lane % 4, row = at.row + row0 + i * 16 + lane / 4 + half * 8;
        if (half < 2 && row < count) {
            p.x.logsum[(int64_t)at.matrix * count + row] =
                (ps_log2(half ? sum[i][2] : sum[i][0]) - (half ? start[i][0][2] : start[i][0][0])) * (1 / PS_LOG2_E);
        }
        ps_attention_put<T, CHUNKS>(own, mixed[i], ps_reciprocal(sum[i][0]), ps_reciprocal(sum[i][2]), p.chunks_v);
    }
    __syncthreads();
    put<T>(rows(p.x.mixed, at, unit_v), q, p.chunk, false, unit_v, at.row, rows_here, p);
}

/* dq, and delta on the way. */
template <typename T, int CHUNKS>
static __global__ void __launch_bounds__(most_warps<CHUNKS> * 32) query_gradient_kernel(const __grid_constant__ struct long16 p)
{
    ps_grid_begin();
    extern __shared__ float4 shared_memory[];
    const struct place at(p, blockDim.x / 2);
    const uint32_t lane = threadIdx.x % 32, count = (uint32_t)p.x.patches, row0 = threadIdx.x / 32 * 16;
    const uint32_t of_k = CHUNKS * p.chunk_step, of_step = of_k + p.chunks_v * p.chunk_step;
    char *const q = (char *)shared_memory, *const up = q + p.chunks_q * p.chunk, *const steps = up + p.chunks_v * p.chunk;
    if (p.clear) {
        ps_attention_clear(q, p.shared);
    }
    const struct unit unit_q(p, p.units_q, true), unit_v(p, p.units_v, false);
    const struct rows from_k(p.x.k, at, unit_q), from_v(p.x.v, at, unit_v);
    fetch(q, p.chunk, rows(p.x.q, at, unit_q), unit_q, at.row, blockDim.x / 2, p);
    fetch(up, p.chunk, rows(p.x.d_mixed, at, unit_v), unit_v, at.row, blockDim.x / 2, p);
    char *const mixed = steps + of_step; /* in the place of the second step */
    fetch(mixed, p.chunk, rows(p.x.mixed, at, unit_v), unit_v, at.row, blockDim.x / 2, p);
    fetch(steps, p.chunk_step, from_k, unit_q, 0, STEP, p);
    fetch(steps + of_k, p.chunk_step, from_v, unit_v, 0, STEP, p);
    ps_copy_wait();
    __syncthreads();
    const float factor = p.x.scale * PS_LOG2_E, zero[1][4] = {};
    float dq[CHUNKS][4], logsum[2], less[1][4]; /* less: delta, negative */
    ps_zero(dq);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t own = row0 + lane / 4 + r * 8, row = at.row + own;
        const int64_t sums = (int64_t)at.matrix * count + row;
        const float delta = ps_quad_sum(part_of_delta<T>(mixed + own * 16, p.chunk, up + own * 16, p.chunk, p.chunks_v));
        logsum[r] = row < count ? p.x.logsum[sums] * PS_LOG2_E : 0.0f;
        less[0][2 * r] = less[0][2 * r + 1] = -delta;
        if (lane % 4 == 0 && row < count) {
            p.x.delta[sums] = delta;
        }
    }
#pragma unroll 1
    for (uint32_t key0 = 0, now = 0; key0 < count; key0 += STEP, now ^= of_step) {
        ps_copy_wait();
        __syncthreads();
        if (key0 + STEP < count) {
            char *const next = steps + (now ^ of_step);
            fetch(next, p.chunk_step, from_k, unit_q, key0 + STEP, STEP, p);
            fetch(next + of_k, p.chunk_step, from_v, unit_v, key0 + STEP, STEP, p);
        }
        if (at.row + row0 >= count) {
            continue;
        }
        const uint32_t keys = ps_shared_address(steps + now);
        float s[2 * STEP_TILES][4], g[2 * STEP_TILES][4];
        ps_attention_scores<T, STEP_TILES>(s, zero, ps_chunks(q + row0 * 16, p.chunk), ps_chunked{keys, p.chunk_step}, p.chunks_q);
        ps_attention_scores<T, STEP_TILES>(g, less, ps_chunks(up + row0 * 16, p.chunk), ps_chunked{keys + of_k, p.chunk_step},
                                           p.chunks_v);
#pragma unroll
        for (int j = 0; j < 8 * STEP_TILES; j++) {
            g[j / 4][j % 4] *= ps_exp2(fmaf(s[j / 4][j % 4], factor, -logsum[j % 4 / 2]));
        }
        uint32_t gradients[STEP_TILES][4];
        ps_attention_round<T, STEP_TILES>(gradients, g);
        if (key0 + STEP > count) { /* nothing of what is no key */
#pragma unroll
            for (int j = 0; j < 4 * STEP_TILES; j++) {
                gradients[j / 4][j % 4] &= ps_attention_pair(key0 + j / 4 * 16 + j % 4 / 2 * 8 + lane % 4 * 2, count);
            }
        }
        ps_attention_mix<T, STEP_TILES, CHUNKS>(dq, gradients, ps_chunked{keys, p.chunk_step});
    }
    __syncwarp();
    if (at.row + row0 < count) {
        ps_attention_put<T, CHUNKS>(ps_chunks(q + row0 * 16, p.chunk), dq, p.x.scale, p.x.scale, p.chunks_q);
    }
    __syncthreads();
    put<T>(rows(p.x.dq, at, unit_q), q, p.chunk, p.x.accumulate, unit_q, at.row, blockDim.x / 2, p);
}

/* dk and dv: the rows of scores are keys, their columns queries. */
template <typename T, int CHUNKS>
static __global__ void __launch_bounds__(most_warps<CHUNKS> * 32) key_gradient_kernel(const __grid_constant__ struct long16 p)
{
    ps_grid_begin();
    extern __shared__ float4 shared_memory[];
    constexpr int TILES = CHUNKS > 8 ? STEP_TILES / 2 : STEP_TILES; /* at a time */
    const struct place at(p, blockDim.x / 2);
    const uint32_t lane = threadIdx.x % 32, count = (uint32_t)p.x.patches, row0 = threadIdx.x / 32 * 16;
    const uint32_t of_q = CHUNKS * p.chunk_step, of_step = 2 * of_q + 2 * STEP * sizeof(float); /* queries, d_mixed, sums */
    char *const k = (char *)shared_memory, *const v = k + p.chunks_q * p.chunk, *const steps = v + p.chunks_v * p.chunk;
    if (p.clear) {
        ps_attention_clear(k, p.shared);
    }
    const struct unit unit_q(p, p.units_q, true), unit_v(p, p.units_v, false);
    const struct rows from_q(p.x.q, at, unit_q), from_up(p.x.d_mixed, at, unit_v);
    const float *const logsum = p.x.logsum + (int64_t)at.matrix * count, *const delta = p.x.delta + (int64_t)at.matrix * count;
    fetch(k, p.chunk, rows(p.x.k, at, unit_q), unit_q, at.row, blockDim.x / 2, p);
    fetch(v, p.chunk, rows(p.x.v, at, unit_v), unit_v, at.row, blockDim.x / 2, p);
    fetch(steps, p.chunk_step, from_q, unit_q, 0, STEP, p);
    fetch(steps + of_q, p.chunk_step, from_up, unit_v, 0, STEP, p);
    /* Of this thread's query: the logarithm to the base of 2, and delta, negative; where there is none its weights are 0. */
    for (uint32_t i = threadIdx.x; i < STEP; i += blockDim.x) {
        float *const sums = (float *)(steps + 2 * of_q) + i;
        sums[0] = i < count ? logsum[i] * PS_LOG2_E : INFINITY;
        sums[STEP] = i < count ? -delta[i] : 0.0f;
    }
    const float factor = p.x.scale * PS_LOG2_E, zero[1][4] = {};
    float dk[CHUNKS][4], dv[CHUNKS][4];
    ps_zero(dk);
    ps_zero(dv);
#pragma unroll 1
    for (uint32_t query0 = 0, now = 0; query0 < count; query0 += STEP, now ^= of_step) {
        ps_copy_wait();
        __syncthreads();
        const uint32_t after = query0 + STEP + threadIdx.x; /* this thread's query of the next step */
        float next_sum = INFINITY, next_delta = 0.0f;
        if (query0 + STEP < count) {
            char *const next = steps + (now ^ of_step);
            fetch(next, p.chunk_step, from_q, unit_q, query0 + STEP, STEP, p);
            fetch(next + of_q, p.chunk_step, from_up, unit_v, query0 + STEP, STEP, p);
            if (threadIdx.x < STEP && after < count) {
                next_sum = logsum[after] * PS_LOG2_E;
                next_delta = delta[after];
            }
        }
        const char *const sums = steps + now + 2 * of_q + lane % 4 * 8;
#pragma unroll 1
        for (int part = 0; part < STEP_TILES && at.row + row0 < count; part += TILES) {
            const uint32_t queries = ps_shared_address(steps + now) + part * 256;
            float s[2 * TILES][4], g[2 * TILES][4], less[2 * TILES][4];
            ps_attention_scores<T, TILES>(s, zero, ps_chunks(k + row0 * 16, p.chunk), ps_chunked{queries, p.chunk_step},
                                          p.chunks_q);
#pragma unroll
            for (int j = 0; j < 2 * TILES; j++) {
                const float2 there = *(const float2 *)(sums + (2 * part + j) * 32);
                const float2 delta = *(const float2 *)(sums + (2 * part + j) * 32 + STEP * sizeof(float));
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    s[j][2 * r] = ps_exp2(fmaf(s[j][2 * r], factor, -there.x));
                    s[j][2 * r + 1] = ps_exp2(fmaf(s[j][2 * r + 1], factor, -there.y));
                    less[j][2 * r] = delta.x;
                    less[j][2 * r + 1] = delta.y;
                }
            }
            ps_attention_scores<T, TILES>(g, less, ps_chunks(v + row0 * 16, p.chunk), ps_chunked{queries + of_q, p.chunk_step},
                                          p.chunks_v);
#pragma unroll
            for (int j = 0; j < 8 * TILES; j++) {
                g[j / 4][j % 4] *= s[j / 4][j % 4];
            }
            uint32_t weights[TILES][4], gradients[TILES][4];
            ps_attention_round<T, TILES>(weights, s);
            ps_attention_round<T, TILES>(gradients, g);
            ps_attention_mix<T, TILES, CHUNKS>(dv, weights, ps_chunked{queries + of_q, p.chunk_step});
            ps_attention_mix<T, TILES, CHUNKS>(dk, gradients, ps_chunked{queries, p.chunk_step});
        }
        if (query0 + STEP < count && threadIdx.x < STEP) {
            float *const next = (float *)(steps + (now ^ of_step) + 2 * of_q) + threadIdx.x;
            next[0] = next_sum;
            next[STEP] = -next_delta;
        }
    }
    __syncwarp(); /* all have read the warp's rows, whose places dk and dv take */
    if (at.row + row0 < count) {
        ps_attention_put<T, CHUNKS>(ps_chunks(k + row0 * 16, p.chunk), dk, p.x.scale, p.x.scale, p.chunks_q);
        ps_attention_put<T, CHUNKS>(ps_chunks(v + row0 * 16, p.chunk), dv, 1.0f, 1.0f, p.chunks_v);
    }
    __syncthreads();
    put<T>(rows(p.x.dk, at, unit_q), k, p.chunk, p.x.accumulate, unit_q, at.row, blockDim.x / 2, p);
    put<T>(rows(p.x.dv, at, unit_v), v, p.chunk, false, unit_v, at.row, blockDim.x / 2, p);
}

/* ---- backward in one: heads of up to 32 columns, whose queries shared memory holds ---- */

/* Tiles of 16 keys that a warp has at a time, in registers, and the warps whose registers a multiprocessor has; fewer tiles for few
 * heads. 16 queries then take a warp so many clocks, and a scheduler so many for each of its warps, about. By chunks of 1, 2 and 4.
 */
struct form {
    int tiles, warps, alone, each;
};
static constexpr struct form forms[3][3] = {{{3, 16, 900, 252}, {2, 16, 660, 168}, {1, 24, 420, 136}},
                                            {{4, 8, 1200, 500}, {2, 12, 700, 330}, {1, 16, 440, 240}},
                                            {{2, 8, 800, 400}, {1, 12, 500, 320}}};

/* 16 rows of CHUNKS columns as an operand: of two chunks a first one has the upper 8 rows, the lower, and both of the next chunk; a
 * second one both chunks of the upper rows, then of the lower. */
template <int CHUNKS> using operand = uint32_t[(CHUNKS + 1) / 2][4];

template <int CHUNKS, bool SECOND> static __device__ __forceinline__ void load(operand<CHUNKS> &to, uint32_t first, uint32_t chunk)
{
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (CHUNKS == 1) {
        uint32_t y[2];
        ps_ldmatrix2_at(y, first + lane % 16 * 16);
        to[0][0] = y[0];
        to[0][1] = y[1];
    } else {
        const uint32_t row = SECOND ? lane / 16 * 8 + lane % 8 : lane % 16, next = SECOND ? lane / 8 % 2 : lane / 16;
#pragma unroll
        for (int i = 0; i < CHUNKS / 2; i++) {
            ps_ldmatrix4_at(to[i], first + row * 16 + (2 * i + next) * chunk);
        }
    }
}

/* Such rows as a second operand: the rows are summed over. */
template <int CHUNKS> static __device__ __forceinline__ void load_turned(uint32_t (&to)[CHUNKS][2], uint32_t first, uint32_t chunk)
{
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (CHUNKS == 1) {
        ps_ldmatrix2_transposed_at(to[0], first + lane % 16 * 16);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNKS; i += 2) {
            uint32_t y[4];
            ps_ldmatrix4_transposed_at(y, first + lane % 16 * 16 + (i + lane / 16) * chunk);
            to[i][0] = y[0];
            to[i][1] = y[1];
            to[i + 1][0] = y[2];
            to[i + 1][1] = y[3];
        }
    }
}

/* sum [16, 16] = start + rows of a times rows of b; start: a quadruple for each half. */
template <typename T, int CHUNKS>
static __device__ __forceinline__ void multiply(float (&sum)[2][4], const float (&start)[2][4], const operand<CHUNKS> &a,
                                                const operand<CHUNKS> &b)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if constexpr (CHUNKS == 1) {
            ps_mma8<T>(sum[half], a[0][0], a[0][1], b[0][half], start[half]);
        } else {
            ps_mma16<T>(sum[half], a[0], b[0][2 * half], b[0][2 * half + 1], start[half]);
#pragma unroll
            for (int i = 1; i < CHUNKS / 2; i++) {
                ps_mma16<T>(sum[half], a[i], b[i][2 * half], b[i][2 * half + 1], sum[half]);
            }
        }
    }
}

/* Blocks that share a head are a cluster (sm_90): how many, and the block's number. */
static __device__ __forceinline__ uint32_t blocks_of(const struct long16 &p)
{
#if __CUDA_ARCH__ >= 900
    return p.blocks.divisor;
#else
    return 1;
#endif
}

static __device__ __forceinline__ uint32_t block_number()
{
#if __CUDA_ARCH__ >= 900
    return (uint32_t)ps_cluster_rank();
#else
    return 0;
#endif
}

/* The same place in another block of the cluster. */
template <typename P> static __device__ __forceinline__ const P *place_in(const P *place, uint32_t block)
{
    asm("mapa.u64 %0, %0, %1;" : "+l"(place) : "r"(block));
    return place;
}

/* A block takes a whole head, or its part of the keys: queries, d_mixed and dq's sums, in float, lie in shared memory; a warp has
 * 16 to 64 keys, and dk and dv of them, in registers, and goes over the queries by 16, several in a turn, so that barriers are few.
 * With scores turned, keys by queries, weights and gradients are dv's and dk's operands at once; the gradients turned back are
 * dq's, whose sums go from one warp to the next: warp w begins with turn w, and a barrier lies between one turn and the next, so no
 * two warps add to the same sums. Keys that the block's warps cannot hold at once come round by round. */
template <typename T, int CHUNKS, int FORM>
static __global__ void __launch_bounds__(forms[CHUNKS / 2][FORM].warps * 32, 1)
    backward_kernel(const __grid_constant__ struct long16 p)
{
    ps_grid_wait();
    extern __shared__ float4 shared_memory[];
    constexpr int TILES = forms[CHUNKS / 2][FORM].tiles;
    /* A tile's rows come behind the tile before: its last products wait for nothing then. */
    constexpr bool AHEAD = CHUNKS == 2 && FORM == 0;
    const struct place at(p, 0);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const uint32_t count = (uint32_t)p.x.patches, tiles = (count + 15) / 16, all = tiles * 16;
    const uint32_t turns = (tiles + p.turn - 1) / p.turn, round = warps * TILES * 16; /* at least as many turns as warps */
    char *const q = (char *)shared_memory, *const up = q + CHUNKS * p.chunk;
    float4 *const dq = (float4 *)(up + CHUNKS * p.chunk); /* [tiles, CHUNKS, 32] */
    /* Of 8 queries logsum to the base of 2 and delta, negative, as sums start with them: two queries' in a quadruple, twice. */
    float4 *const starts = dq + tiles * CHUNKS * 32;                  /* [all / 8, 2, 4] */
    char *k = (char *)(starts + all), *v = k + CHUNKS * p.chunk_step; /* a round's */
    if (p.clear) {
        ps_attention_clear(q, p.shared);
    }
    const struct unit unit_q(p, p.units_q, true), unit_v(p, p.units_v, false);
    const struct rows from_k(p.x.k, at, unit_q), from_v(p.x.v, at, unit_v), to_k(p.x.dk, at, unit_q), to_v(p.x.dv, at, unit_v);
    char *const mixed = (char *)dq;
    fetch(up, p.chunk, rows(p.x.d_mixed, at, unit_v), unit_v, 0, all, p);
    fetch(mixed, p.chunk, rows(p.x.mixed, at, unit_v), unit_v, 0, all, p);
    ps_copy_commit();
    const auto bring = [&](int32_t further, uint32_t first) {
        fetch(k + further, p.chunk_step, from_k, unit_q, first, round, p);
        fetch(v + further, p.chunk_step, from_v, unit_v, first, round, p);
    };
    bring(0, block_number() * p.keys);
    fetch(q, p.chunk, rows(p.x.q, at, unit_q), unit_q, 0, all, p);
    ps_copy_commit();
    const int64_t sums = (int64_t)at.matrix * count;
    float next = p.x.logsum[sums + min(threadIdx.x, count - 1)];
    ps_copy_wait_group<1>();
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < all; i += blockDim.x) {
        float *const start = (float *)(starts + i / 8 * 8 + i % 8 / 2) + i % 2;
        const float logsum = next, delta = delta_of<T>(mixed + i * 16, up + i * 16, p.chunk, p.chunks_v);
        next = p.x.logsum[sums + min(i + blockDim.x, count - 1)];
        start[0] = start[2] = i < count ? logsum * -PS_LOG2_E : -INFINITY; /* a weight of 0 */
        start[16] = start[18] = -delta;
        if (i < count && block_number() == 0) {
            p.x.delta[sums + i] = delta;
        }
    }
    ps_copy_wait();
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < tiles * CHUNKS * 32; i += blockDim.x) {
        dq[i] = make_float4(0, 0, 0, 0);
    }
    const float factor = p.x.scale * PS_LOG2_E, zero[2][4] = {};
    int32_t other = CHUNKS > 1 ? p.other : 0; /* narrow heads have no registers left for it */
#pragma unroll 1
    for (uint32_t round0 = block_number() * p.keys; round0 < min((block_number() + 1) * p.keys, count);
         round0 += round, k += other, v += other, other = -other) {
        const bool more = round0 + round < min((block_number() + 1) * p.keys, count);
        if (more && other) { /* the next round's, beside this one's */
            bring(other, round0 + round);
        }
        const uint32_t own = warp * TILES * 16 * 16, key0 = round0 + warp * TILES * 16;
        uint32_t keys[TILES][(CHUNKS + 1) / 2][4];
        operand<CHUNKS> values[TILES];
        uint32_t keys_turned[TILES][CHUNKS][2];
        float dk[TILES][CHUNKS][4], dv[TILES][CHUNKS][4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if constexpr (CHUNKS == 1) {
                load_scaled<T>(keys[i], ps_shared_address(k + own + i * 256), p.chunk_step, factor);
            } else {
                load<CHUNKS, false>(keys[i], ps_shared_address(k + own + i * 256), p.chunk_step);
            }
            load<CHUNKS, false>(values[i], ps_shared_address(v + own + i * 256), p.chunk_step);
            load_turned(keys_turned[i], ps_shared_address(k + own + i * 256), p.chunk_step);
#pragma unroll
            for (int j = 0; j < 2 * CHUNKS; j++) { /* dq takes nothing of what is no key */
                keys_turned[i][j / 2][j % 2] &= ps_attention_pair(key0 + i * 16 + j % 2 * 8 + lane % 4 * 2, count);
            }
            ps_zero(dk[i]);
            ps_zero(dv[i]);
        }
#pragma unroll 1
        for (uint32_t step = 0, turn = warp; step < turns; step++, turn = turn + 1 < turns ? turn + 1 : 0) {
            __syncthreads(); /* the warp before has added to this turn's dq */
            const uint32_t first = turn * p.turn, end = key0 < count ? min(first + p.turn, tiles) : 0;
            uint32_t there = ps_shared_address(q + first * 256);
            const float4 *sums = starts + first * 16 + lane % 4;
            float4 *to = dq + first * CHUNKS * 32 + lane;
            operand<CHUNKS> queries, ups;
            uint32_t queries_turned[CHUNKS][2], ups_turned[CHUNKS][2];
            /* A tile's rows. */
            const auto begin = [&] {
                if constexpr (CHUNKS == 1) {
                    load_second<CHUNKS>(queries[0], there, p.chunk);
                } else {
                    load<CHUNKS, true>(queries, there, p.chunk);
                }
                load<CHUNKS, true>(ups, there + CHUNKS * p.chunk, p.chunk);
                load_turned(queries_turned, there, p.chunk);
                load_turned(ups_turned, there + CHUNKS * p.chunk, p.chunk);
                there += 256;
            };
            if (AHEAD) {
                begin();
            }
#pragma unroll 1
            for (uint32_t tile = first; tile < end; tile++, sums += 16, to += CHUNKS * 32) {
                float log[2][4], less[2][4], sum[CHUNKS][4], scores[TILES][2][4], products[TILES][2][4];
                if (!AHEAD) {
                    begin();
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    *(float4 *)log[i] = sums[i * 8];
                    *(float4 *)less[i] = sums[i * 8 + 4];
                }
#pragma unroll
                for (int i = 0; i < CHUNKS; i++) {
                    const float4 before = to[i * 32];
                    sum[i][0] = before.x;
                    sum[i][1] = before.y;
                    sum[i][2] = before.z;
                    sum[i][3] = before.w;
                }
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    if constexpr (CHUNKS == 1) {
                        multiply_scaled<T, CHUNKS>(scores[i], log, keys[i], queries[0]);
                    } else {
                        multiply<T, CHUNKS>(scores[i], zero, keys[i], queries);
                    }
                    multiply<T, CHUNKS>(products[i], less, values[i], ups);
                }
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    float(&s)[2][4] = scores[i], (&g)[2][4] = products[i];
                    uint32_t weights[1][4], gradients[1][4];
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        float &value = s[j / 4][j % 4];
                        value = ps_exp2(CHUNKS == 1 ? value : fmaf(value, factor, log[j / 4][j % 4]));
                        g[j / 4][j % 4] *= value;
                    }
                    ps_attention_round<T, 1>(weights, s);
                    ps_attention_round<T, 1>(gradients, g);
                    const uint32_t turned[4] = {ps_movmatrix(gradients[0][0]), ps_movmatrix(gradients[0][2]),
                                                ps_movmatrix(gradients[0][1]), ps_movmatrix(gradients[0][3])};
#pragma unroll
                    for (int j = 0; j < CHUNKS; j++) {
                        ps_mma16<T>(dv[i][j], weights[0], ups_turned[j][0], ups_turned[j][1], dv[i][j]);
                        ps_mma16<T>(dk[i][j], gradients[0], queries_turned[j][0], queries_turned[j][1], dk[i][j]);
                        ps_mma16<T>(sum[j], turned, keys_turned[i][j][0], keys_turned[i][j][1], sum[j]);
                    }
                }
#pragma unroll
                for (int i = 0; i < CHUNKS; i++) {
                    to[i * 32] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
                }
                if (AHEAD && tile + 1 < end) { /* behind the last rows lie sums that other warps write */
                    begin();
                }
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) { /* in the place of the warp's keys and values */
            ps_attention_put<T, CHUNKS>(ps_chunks(k + own + i * 256, p.chunk_step), dk[i], p.x.scale, p.x.scale, CHUNKS);
            ps_attention_put<T, CHUNKS>(ps_chunks(v + own + i * 256, p.chunk_step), dv[i], 1.0f, 1.0f, CHUNKS);
        }
        __syncthreads();
        if (blocks_of(p) > 1 && !more) {
            ps_cluster_arrive(); /* dq's part is whole */
        }
        put<T>(to_k, k, p.chunk_step, p.x.accumulate, unit_q, round0, round, p);
        put<T>(to_v, v, p.chunk_step, false, unit_v, round0, round, p);
        if (more) {
            if (!other) {
                __syncthreads();
                bring(0, round0 + round);
            }
            ps_copy_wait();
            __syncthreads();
        }
    }
    ps_grid_release(); /* late: else blocks that wait fill the multiprocessors that are left to the head's gradient and AdamW */
    const uint32_t blocks = blocks_of(p), share = (tiles + blocks - 1) / blocks, first = block_number() * share;
    if (blocks > 1) {
        ps_cluster_wait();
    }
#pragma unroll 1
    for (uint32_t tile = first + warp; tile < min(first + share, tiles); tile += warps) { /* in the place of the queries */
        float sum[CHUNKS][4];
        ps_zero(sum);
#pragma unroll 4
        for (uint32_t block = 0; block < blocks; block++) { /* in their order */
            const float4 *const part = blocks > 1 ? place_in(dq, block) : dq;
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                const float4 more = part[(tile * CHUNKS + i) * 32 + lane];
                sum[i][0] += more.x;
                sum[i][1] += more.y;
                sum[i][2] += more.z;
                sum[i][3] += more.w;
            }
        }
        ps_attention_put<T, CHUNKS>(ps_chunks(q + tile * 256, p.chunk), sum, p.x.scale, p.x.scale, CHUNKS);
    }
    if (blocks > 1) {
        ps_cluster_arrive();
    }
    __syncthreads();
    put<T>(rows(p.x.dq, at, unit_q), q + first * 256, p.chunk, p.x.accumulate, unit_q, first * 16, share * 16, p);
    if (blocks > 1) {
        ps_cluster_wait(); /* the others have read */
    }
}

/* ---- launching ---- */

bool ps_cuda_attention_long16_wanted(const struct ps_kernels *k, const struct ps_attention_call *call)
{
    (void)call;
    return k->real != PS_F32;
}

static struct long16 told(const struct ps_attention_launch &x, int blocks, int warps)
{
    struct long16 p = {};
    p.x = x;
    p.units_q = ps_divisor_make(x.columns * 2 / x.unit);
    p.units_v = ps_divisor_make(x.e * 2 / x.unit);
    p.blocks = ps_divisor_make(blocks);
    p.heads = ps_divisor_make(x.heads);
    p.piece = ps_divisor_make(x.e);
    p.chunks_q = (uint32_t)(x.columns + 7) / 8;
    p.chunks_v = (uint32_t)(x.e + 7) / 8;
    p.turned = (uint32_t)(warps * 32) - p.units_q.divisor * STEP % (uint32_t)(warps * 32);
    return p;
}

/* Bytes from chunk to chunk of a tile: units that a quarter of a warp brings at once lie in different banks. */
static uint32_t chunk_of(int rows, int units)
{
    return (uint32_t)(rows * 16 + (units > 4 ? 16 : units > 2 ? 32 : units > 1 ? 64 : 0));
}

/* Forward, and backward in two kernels. CHUNKS: at least those of v, backward of q. */
template <typename T, int CHUNKS>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x, bool backward)
{
    const int rows = backward ? 16 : 16 * query_tiles<CHUNKS>, most = backward ? most_warps<CHUNKS> : forward_warps<CHUNKS>;
    const int tiles = (x.patches + rows - 1) / rows, units = x.columns * 2 / x.unit, blocks = (tiles + most - 1) / most;
    const int warps = std::max((tiles + blocks - 1) / blocks, (units + 31) / 32); /* a unit a thread */
    struct long16 p = told(x, (tiles + warps - 1) / warps, warps);
    const int of_q = (int)p.chunks_q, of_v = (int)p.chunks_v;
    p.chunk = chunk_of(warps * rows, units);
    p.chunk_step = chunk_of(STEP, units);
    p.clear = x.columns % 8 != 0 || x.e % 8 != 0;
    const auto bytes = [&](int own, int of_step) { return own * (int)p.chunk + 2 * of_step * (int)p.chunk_step; };
    if (!backward) {
        kernel_type *kernel = forward_kernel<T, CHUNKS, false>;
        if constexpr (holds<CHUNKS>) {
            kernel = of_q == CHUNKS ? forward_kernel<T, CHUNKS, true> : kernel;
#ifdef PS_FUSED_ENCODER
            /* Narrow heads from where it was measured to be the faster, and not where a multiprocessor finds a place for all of
             * these kernels' blocks, 5 or 4, here alone. */
            const int64_t places = x.matrices * p.blocks.divisor - 4 * c->multiprocessors;
            const bool narrow = x.patches >= 512 && (places <= 0 || places > c->multiprocessors);
            if (of_q == CHUNKS && warps == forward_warps<CHUNKS> && c->compute_capability == 90 && (CHUNKS > 1 || narrow)) {
                return ps_long16_forward_wgmma<T, CHUNKS>(c, op, &p);
            }
#endif
        }
        return launch_kernel(c, op, kernel, warps, &p, bytes(of_q, of_q + CHUNKS));
    }
    PS_TRY(launch_kernel(c, op, query_gradient_kernel<T, CHUNKS>, warps, &p, bytes(of_q + of_v, CHUNKS + of_v)));
    return launch_kernel(c, op, key_gradient_kernel<T, CHUNKS>, warps, &p,
                         bytes(of_q + of_v, 2 * CHUNKS) + 4 * STEP * (int)sizeof(float));
}

/* How backward in one kernel cuts a head: the form, warps of a block, blocks of a head; clocks: what it takes, about. */
struct plan {
    int form, warps, blocks;
    double clocks;
};

/* Of a block with so many keys at a time. */
template <int CHUNKS> static int64_t backward_bytes(const struct ps_attention_launch &x, int keys)
{
    const int rows = (x.patches + 15) / 16 * 16, units = x.columns * 2 / x.unit;
    return 2 * CHUNKS * ((int64_t)chunk_of(rows, units) + chunk_of(keys, units)) + (int64_t)rows * (CHUNKS * 32 + 16);
}

/* The fastest plan whose blocks all find a place at once, if one takes fewer clocks than the best so far. */
template <int CHUNKS> static void plan_few(const struct ps_cuda_context *c, const struct ps_attention_launch &x, struct plan *best)
{
    enum { BEGIN = 4000, ROUND = 1500, CLUSTER = 2000, MOST_BLOCKS = 8, GROUP = 16 /* multiprocessors that have a cluster */ };
    const int queries = (x.patches + 15) / 16, least = (x.columns * 2 / x.unit + 31) / 32;
    for (int i = 0; i < 3 && forms[CHUNKS / 2][i].tiles > 0; i++) {
        const struct form &form = forms[CHUNKS / 2][i];
        const int owners = (queries + form.tiles - 1) / form.tiles;
        for (int blocks = 1; blocks <= (c->compute_capability == 90 ? MOST_BLOCKS : 1); blocks++) {
            for (int warps = least; warps <= form.warps; warps++) {
                const int64_t bytes = backward_bytes<CHUNKS>(x, warps * form.tiles * 16);
                const int64_t fit = std::min<int64_t>(form.warps / warps, (c->shared_bytes + 1024) / (bytes + 1024));
                const int64_t places = blocks > 1 ? c->multiprocessors / GROUP * (GROUP * fit / blocks) : c->multiprocessors * fit;
                const int rounds = (owners + blocks * warps - 1) / (blocks * warps);
                if (x.matrices > places || (blocks - 1) * rounds * warps >= owners) {
                    continue;
                }
                const int64_t beside = (x.matrices * blocks + c->multiprocessors - 1) / c->multiprocessors;
                const double tile = std::max<double>(form.alone, (double)(beside * warps * form.each) / 4);
                const double clocks = BEGIN + (blocks > 1 ? CLUSTER : 0) + 2.0 * (double)beside * x.patches * CHUNKS +
                                      rounds * (ROUND + queries * tile);
                if (clocks < best->clocks) {
                    *best = {i, warps, blocks, clocks};
                }
            }
        }
    }
}

/* As many warps as go over the keys in the fewest rounds of a multiprocessor's blocks: few, so that few wait together. */
template <int CHUNKS> static void plan_many(const struct ps_cuda_context *c, const struct ps_attention_launch &x, struct plan *best)
{
    enum { MOST_WARPS = 8 };
    const struct form &form = forms[CHUNKS / 2][0];
    const int owners = (x.patches + form.tiles * 16 - 1) / (form.tiles * 16);
    double most = 0;
    for (int w = (x.columns * 2 / x.unit + 31) / 32; w <= std::min<int>(MOST_WARPS, owners); w++) {
        const int64_t bytes = backward_bytes<CHUNKS>(x, w * form.tiles * 16);
        const int64_t fit = std::min<int64_t>(form.warps / w, (c->shared_bytes + 1024) / (bytes + 1024));
        const int64_t blocks = std::min(fit, (x.matrices + c->multiprocessors - 1) / c->multiprocessors);
        const double speed = (double)blocks / ((owners + w - 1) / w);
        if (speed > most) {
            most = speed;
            *best = {0, w, 1, 0};
        }
    }
}

template <typename T, int CHUNKS, int FORM>
static enum ps_status launch_plan(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                  const struct plan &plan)
{
    constexpr struct form form = forms[CHUNKS / 2][FORM];
    const int rows = (x.patches + 15) / 16 * 16, units = x.columns * 2 / x.unit, keys = plan.warps * form.tiles * 16;
    const int rounds = (rows + keys * plan.blocks - 1) / (keys * plan.blocks), tiles = rows / 16;
    struct long16 p = told(x, plan.blocks, plan.warps);
    p.chunk = chunk_of(rows, units);
    p.chunk_step = chunk_of(keys, units);
    p.keys = (uint32_t)(rounds * keys);
    p.clear = x.columns % 8 != 0 || x.e % 8 != 0 || p.chunks_q < CHUNKS || p.chunks_v < CHUNKS;
    const int64_t bytes = backward_bytes<CHUNKS>(x, keys), of_round = 2 * CHUNKS * (int64_t)p.chunk_step, both = bytes + of_round;
    const bool fits = (both + 1024) * (form.warps / plan.warps) <= c->shared_bytes + 1024;
    p.other = CHUNKS > 1 && rounds > 1 && fits ? (int32_t)of_round : 0;
    /* The fewest tiles in all of as many turns as warps, or more, a barrier counted as half a tile. */
    int least = INT32_MAX;
    for (int turn = 1; turn <= tiles && (tiles + turn - 1) / turn >= plan.warps; turn++) {
        const int halves = (tiles + turn - 1) / turn * (2 * turn + 1);
        if (halves < least) {
            least = halves;
            p.turn = (uint32_t)turn;
        }
    }
    return launch_kernel(c, op, backward_kernel<T, CHUNKS, FORM>, plan.warps, &p, (int)bytes + p.other, plan.blocks);
}

/* Backward in one kernel where shared memory and the number of heads let it; else in two. */
template <typename T, int CHUNKS>
static enum ps_status launch_backward(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    /* Two kernels compute the scores twice, but have a block for every 128 rows. */
    enum { BEGIN_TWO = 13000, ALONE_TWO = 1400, EACH_TWO = 4 * (250 + 50 * CHUNKS) }; /* both steps; of a multiprocessor's block */
    const bool few = 2 * x.matrices < c->multiprocessors;
    const int64_t beside = (x.matrices * ((x.patches + 127) / 128) + c->multiprocessors - 1) / c->multiprocessors;
    const double two = BEGIN_TWO + (x.patches + STEP - 1.0) / STEP * std::max<double>(ALONE_TWO, (double)(beside * EACH_TWO));
    struct plan plan = {0, 0, 0, few ? two : INFINITY};
    if (x.matrices <= 2 * c->multiprocessors) {
        plan_few<CHUNKS>(c, x, &plan);
    }
    if (plan.warps == 0 && !few) {
        plan_many<CHUNKS>(c, x, &plan);
    }
    if (plan.warps == 0) {
        return launch<T, CHUNKS>(c, op, x, true);
    }
    if constexpr (CHUNKS < 4) {
        if (plan.form == 2) {
            return launch_plan<T, CHUNKS, 2>(c, op, x, plan);
        }
    }
    return plan.form == 0 ? launch_plan<T, CHUNKS, 0>(c, op, x, plan) : launch_plan<T, CHUNKS, 1>(c, op, x, plan);
}

#ifdef PS_FUSED_ENCODER
/* Whether the copy engine can bring the rows, to be multiplied by wgmma. */
static bool in_boxes(const struct ps_cuda_context *c, const struct ps_attention_launch &x, bool backward)
{
    bool fit = c->compute_capability == 90 && x.unit == 16 && x.patches > 64 && x.scale >= 0;
    const struct ps_attention_view *const views[] = {&x.mixed, &x.q, &x.k, &x.v, &x.dq, &x.dk, &x.dv, &x.d_mixed};
    for (int i = 0; i < (backward ? 8 : 4); i++) {
        const struct ps_attention_view &v = *views[i];
        fit = fit && v.row >= 0 && v.head >= 0 && v.sequence >= 0 && v.piece >= 0;
    }
    return fit;
}

/* Whether attention/long16_whole.cuh takes such a call, backward, */
static bool whole(const struct ps_attention_launch &x)
{
    return x.patches <= 128 && x.pieces <= (x.e <= 32 ? 3 : 1);
}

/* or attention/long16_wide.cuh: wide heads of a single piece. */
static bool in_panels(const struct ps_attention_launch &x)
{
    return x.e > 32 && x.patches <= 4096 && x.pieces == 1 && !x.accumulate;
}
#endif

template <typename T>
static enum ps_status launch_size(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                  bool backward)
{
#ifdef PS_FUSED_ENCODER
    if (in_boxes(c, x, backward)) {
        if (backward && whole(x)) {
            return ps_long16_whole<T>(c, op, x);
        }
        if (in_panels(x)) {
            return ps_long16_wide<T>(c, op, x, backward);
        }
    }
#endif
    const int columns = backward ? x.columns : x.e;
    return columns <= 8    ? backward ? launch_backward<T, 1>(c, op, x) : launch<T, 1>(c, op, x, false)
              : columns <= 16 ? backward ? launch_backward<T, 2>(c, op, x) : launch<T, 2>(c, op, x, false)
              : columns <= 32 ? backward ? launch_backward<T, 4>(c, op, x) : launch<T, 4>(c, op, x, false)
              : columns <= 64 ? launch<T, 8>(c, op, x, backward)
                           : launch<T, 16>(c, op, x, backward);
}

static enum ps_status launch_type(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call, bool backward)
{
    return k->real == PS_BF16 ? launch_size<ps_bf16>(ps_cuda(k), op, call->x, backward)
                              : launch_size<ps_fp16>(ps_cuda(k), op, call->x, backward);
}

enum ps_status ps_cuda_attention_long16(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return launch_type(k, op, call, false);
}

enum ps_status ps_cuda_attention_long16_backward(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return launch_type(k, op, call, true);
}
