/* attention/long16.cu's forward kernel by wgmma, of heads of up to 16 columns: a block's 128 queries are two tiles of 64, and while
 * one tile's weights are computed the other's scores are under way. Tiles of chunks are operands as they lie, without swizzle: keys
 * by rows, values across, with a chunk of ones behind them, whose column of sums is the rows' own. Queries become two parts in
 * shared memory, scaled, so that scores come as exponents; bf16's are powers as they are, of fp16 the largest of a row's first keys
 * is taken off, and where a row's sum says that this does not do the block does all again (`again`), as long16.cu's does.
 *
 * Bytes and FLOPs are that file's, and 8 S h N^2 FLOPs of the sums. For 16 by 16 scores of 16 columns a warp has 8 exponentials,
 * every fourth a polynomial of 9 instructions, 4 pairs to round, and of products, copies and loops 15 instructions: 43 beside 48
 * clocks of the exponentials' unit; by mma 52, 56, and 7 products of 6 to 8 clocks. */
#include "kernels/cuda/attention/long16_rows.cuh"
#include "kernels/cuda/attention/long16_whole.cuh"
#include "kernels/cuda/attention/long16_wide.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

enum { TILES = 2, ROWS = 128, BRING = 128 /* keys between barriers */ };

/* Rows of chunks as an operand: 8 rows follow one another in 128 bytes; `across`, from one such to the next of the summed
 * dimension, and `along` of the other. */
static __device__ __forceinline__ uint64_t operand(uint32_t first, uint32_t across, uint32_t along)
{
    return (uint64_t)(along >> 4) << 32 | ((first >> 4) + (across >> 4 << 16));
}

template <typename T, int CHUNKS>
static __global__ void __launch_bounds__(ROWS, 4) forward_wgmma_kernel(const __grid_constant__ struct long16 p)
{
    ps_grid_begin();
    constexpr bool NARROW = std::is_same<T, ps_fp16>::value;
    constexpr int POLYNOMIAL = CHUNKS == 1 ? 8 : 4; /* one exponential of so many: narrow heads have other work beside */
    extern __shared__ float4 shared_memory[];
    const struct place at(p, ROWS);
    const uint32_t lane = threadIdx.x % 32, count = (uint32_t)p.x.patches, row0 = threadIdx.x / 32 * 16;
    const uint32_t of_k = CHUNKS * p.chunk_step, of_step = of_k + (CHUNKS + 1) * p.chunk_step;
    char *const q = (char *)shared_memory, *const steps = q + 2 * CHUNKS * p.chunk;
    if (p.clear) {
        ps_attention_clear(q, p.shared);
    }
    const struct unit unit_q(p, p.units_q, true), unit_v(p, p.units_v, false);
    const struct rows from_k(p.x.k, at, unit_q), from_v(p.x.v, at, unit_v);
    fetch(q, p.chunk, rows(p.x.q, at, unit_q), unit_q, at.row, ROWS, p);
    const uint32_t ones = ps_ones<T>();
    for (uint32_t i = 0; i < 2; i++) {
        *(uint4 *)(steps + i * of_step + of_k + CHUNKS * p.chunk_step + threadIdx.x * 16) = make_uint4(ones, ones, ones, ones);
    }
    const float factor = p.x.scale * PS_LOG2_E;
    float mixed[TILES][CHUNKS + 1][4], start[TILES][2]; /* start: negative, what is taken off */
#pragma unroll 1
    for (bool again = false;; again = true) {
        fetch(steps, p.chunk_step, from_k, unit_q, 0, BRING, p);
        fetch(steps + of_k, p.chunk_step, from_v, unit_v, 0, BRING, p);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            ps_zero(mixed[i]);
            start[i][0] = start[i][1] = 0;
        }
#pragma unroll 1
        for (uint32_t key0 = 0, now = 0; key0 < count; key0 += BRING, now ^= of_step) {
            ps_copy_wait();
            ps_publish();
            __syncthreads(); /* the step is there, the one before is read */
            if (key0 + BRING < count) {
                char *const next = steps + (now ^ of_step);
                fetch(next, p.chunk_step, from_k, unit_q, key0 + BRING, BRING, p);
                fetch(next + of_k, p.chunk_step, from_v, unit_v, key0 + BRING, BRING, p);
            }
            if (key0 == 0 && !again) { /* queries become their two parts */
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    const struct ps_chunked own = ps_chunks(q + (i * 64 + row0) * 16, p.chunk);
                    uint32_t parts[CHUNKS][4];
                    load_scaled<T>(parts, own.first, p.chunk, factor);
#pragma unroll
                    for (int j = 0; j < CHUNKS; j++) {
                        ps_attention_store<2>(own, parts[j], 2 * j);
                    }
                }
                ps_publish();
                __syncthreads();
            }
#pragma unroll 1
            for (uint32_t part = key0; part < min(key0 + BRING, count); part += STEP) {
                const auto take = [&](auto count_of_tiles) {
                    constexpr int KEYS = decltype(count_of_tiles)::value; /* tiles of 16 */
                    const uint32_t keys = ps_shared_address(steps + now) + (part - key0) * 16;
                    const uint64_t k = operand(keys, CHUNKS == 1 ? 0 : p.chunk_step, 128);
                    float s[TILES][2 * KEYS][4];
                    uint32_t weights[TILES][KEYS][4];
                    ps_wgmma_begin();
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
#pragma unroll
                        for (int j = 0; j < CHUNKS; j++) {
                            const uint32_t own = ps_shared_address(q) + i * 64 * 16 + 2 * j * p.chunk;
                            ps_wgmma<T>(s[i], operand(own, p.chunk, 128), k, j);
                        }
                        ps_wgmma_commit();
                    }
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        ps_wgmma_wait<1>();
                        ps_pin(s[i]);
                        if (again || (NARROW && part == 0)) {
#pragma unroll
                            for (int r = 0; r < 2; r++) {
                                float most = -INFINITY;
#pragma unroll
                                for (int j = 0; j < 4 * KEYS; j++) {
                                    most = fmaxf(most, s[i][j / 2][2 * r + j % 2]);
                                }
                                most = ps_group_max<4>(most) + start[i][r];
                                most = part == 0 ? most : fmaxf(most, 0.0f);
                                const float rescale = part == 0 ? 0.0f : ps_exp2(-most);
                                start[i][r] -= most;
#pragma unroll
                                for (int j = 0; j <= CHUNKS; j++) {
                                    mixed[i][j][2 * r] *= rescale;
                                    mixed[i][j][2 * r + 1] *= rescale;
                                }
                            }
                        }
                        if (again || NARROW) {
#pragma unroll
                            for (int j = 0; j < 8 * KEYS; j++) {
                                s[i][j / 4][j % 4] += start[i][j % 4 / 2];
                            }
                        }
#pragma unroll
                        for (int j = 0; j < 8 * KEYS; j++) {
                            float &value = s[i][j / 4][j % 4];
                            value = j % POLYNOMIAL == POLYNOMIAL - 1 ? ps_exp2_polynomial(value) : ps_exp2(value);
                        }
                        ps_attention_round<T, KEYS>(weights[i], s[i]);
                        if (part + KEYS * 16 > count) { /* nothing of what is no key */
#pragma unroll
                            for (int j = 0; j < 4 * KEYS; j++) {
                                weights[i][j / 4][j % 4] &=
                                    ps_attention_pair(part + j / 4 * 16 + j % 4 / 2 * 8 + lane % 4 * 2, count);
                            }
                        }
                        ps_wgmma_begin();
#pragma unroll
                        for (int j = 0; j < KEYS; j++) {
                            ps_wgmma<T, 1>(mixed[i], weights[i][j], operand(keys + of_k + j * 256, 128, p.chunk_step), 1);
                        }
                        ps_wgmma_commit();
                    }
                    ps_wgmma_wait<0>();
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        ps_pin(mixed[i]);
                        ps_pin(weights[i]);
                    }
                };
                if (part + STEP / 2 < count) {
                    take(std::integral_constant<int, STEP_TILES>());
                } else { /* the last keys fill half a part at most */
                    take(std::integral_constant<int, STEP_TILES / 2>());
                }
            }
        }
        bool fine = true;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const float upper = mixed[i][CHUNKS][0], lower = mixed[i][CHUNKS][2];
            fine = fine && ps_sums_hold<T>(fminf(upper, lower), fmaxf(upper, lower));
        }
        const bool once_more = __syncthreads_or(!fine); /* and what lies in shared memory is read */
        if (again || !once_more) {
            break;
        }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const float upper = mixed[i][CHUNKS][0], lower = mixed[i][CHUNKS][2];
        const uint32_t own = i * 64 + row0, half = lane % 4, row = at.row + own + lane / 4 + half * 8;
        if (half < 2 && row < count) {
            p.x.logsum[(int64_t)at.matrix * count + row] =
                (ps_log2(half ? lower : upper) - (half ? start[i][1] : start[i][0])) * (1 / PS_LOG2_E);
        }
        ps_attention_put<T, CHUNKS>(ps_chunks(q + own * 16, p.chunk), (const float(&)[CHUNKS][4])mixed[i], ps_reciprocal(upper),
                                    ps_reciprocal(lower), p.chunks_v);
    }
    __syncthreads();
    put<T>(rows(p.x.mixed, at, unit_v), q, p.chunk, false, unit_v, at.row, ROWS, p);
}

template <typename T, int CHUNKS>
enum ps_status ps_long16_forward_wgmma(const struct ps_cuda_context *c, const char *op, struct long16 *p)
{
    p->chunk_step += (BRING - STEP) * 16;
    return launch_kernel(c, op, forward_wgmma_kernel<T, CHUNKS>, ROWS / 32, p,
                         (int)(2 * CHUNKS * p->chunk + 2 * (2 * CHUNKS + 1) * p->chunk_step));
}

#define INSTANCE(T, CHUNKS) \
    template enum ps_status ps_long16_forward_wgmma<T, CHUNKS>(const struct ps_cuda_context *, const char *, struct long16 *);
INSTANCE(ps_bf16, 1)
INSTANCE(ps_bf16, 2)
INSTANCE(ps_fp16, 1)
INSTANCE(ps_fp16, 2)
