/* Attention of 16 bits for short sequences, N up to 64, and where all rows are boxes up to 128, backward of heads of 8 up to 96:
 * scores, weights and their gradients stay in a warp's registers.
 *
 * A block takes a group of heads of one sequence or several: it brings their rows to shared memory once and takes the results back
 * the same way (short16_rows.cuh). Forward a warp owns 16 queries of a head. Backward it owns first 16 keys: with scores turned, 16
 * keys by all queries, dv and dk are its own sums; the scores' gradients go to shared memory, from where they are read turned back
 * for dq, of which a warp owns 16 queries. What dk and dq are added to comes with all else, before it is needed; the copy engine
 * has L2 add them, a sum that is rounded twice. So no score is computed twice, and every sum has one owner and a fixed order. e is
 * anything: chunks of 8 columns, of which two are a product's m16n8k16, a last one an m16n8k8.
 *
 * Bytes: 8 S h N e forward, 18 S h N e backward, and the sums; S h N^2 exponentials each way and tensor FLOPs 4 S h N^2 e forward,
 * 10 S h N^2 e backward, of N in whole 16 and e in whole 8. 42 patches, heads of 8, 43,008 matrices: 116 and 260 MB, 28 and 62 us
 * at 4.2 TB/s; the exponentials 32 us each way, at 16 a clock and multiprocessor. In boxes a warp issues 530 instructions a matrix
 * forward, 1,200 backward: 24 and 55 us of all schedulers' time; by threads 720 and 1,900. Heads of 16 in boxes: 630 and 1,500. */
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/attention/boxes16.cuh"
#include "kernels/cuda/attention/short16_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/reduce.cuh"

/* A block's threads: as a rule, fewest and most; what a block takes at most of units of a row (of one head more). */
enum { THREADS = 128, FEWEST = 96, MOST_THREADS = 256, UNITS = FEWEST };

/* What a warp has written of its tiles, others of the block read, where a matrix is not one warp's. */
template <class WAY, int TILES> static __device__ __forceinline__ void meet(const struct short16 &p)
{
    if (WAY::BOXES && p.tiles % TILES == 0) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

/* N at most 16 TILES and more than one tile less. */
template <typename T, int TILES, class WAY>
static __global__ void __launch_bounds__(MOST_THREADS) forward_kernel(const __grid_constant__ typename WAY::told p)
{
#if __CUDA_ARCH__ < 900
    if constexpr (!WAY::BOXES)
#endif
    {
        ps_grid_begin();
        extern __shared__ __align__(1024) char shared_memory[];
        constexpr int ROWS = 16 * TILES;
        const struct place at(p);
        WAY way(p, at);
        const auto chunks_q = way.chunks_q();
        const auto chunks_v = way.chunks_v();
        const uint32_t of_q = way.bytes_q(), of_v = way.bytes_v();
        char *const q = shared_memory, *const k = q + of_q, *const v = k + of_q;
        way.begin(q, 2 * of_q + of_v, v + of_v);
        way.bring_q({k, q}, p.k, p.q);
        way.bring_v(v, p.v);
        const uint32_t lane = threadIdx.x % 32, count = p.patches;
        const float factor = p.scale * PS_LOG2_E, zero[1][4] = {};
        uint32_t last[2]; /* ones, of the last tile's keys */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            last[i] = ps_ones<T>() & ps_attention_pair(ROWS - 16 + i * 8 + lane % 4 * 2, count);
            asm volatile("" : "+r"(last[i])); /* found once: the compiler would do so at each tile */
        }
        way.wait();
#pragma unroll 1
        for (struct tiles<TILES> own(p, at); own.more(p, at);) {
            float *const logsum = p.logsum + own.matrix * count;
            const auto keys = way.tile(k, chunks_q, own, 0);
            const auto values = way.tile(v, chunks_v, own, 0);
#pragma unroll 1
            for (uint32_t row0 = own.row; row0 < own.stop; row0 += 16) {
                const auto queries = way.tile(q, chunks_q, own, row0);
                float sum[4], less[2] = {0, 0};
                uint32_t weights[TILES][4];
                /* Of most scores the exponentials are fine as they are; else all again, less each row's largest, which of a single
                 * key makes logsum exact. */
#pragma unroll 1
                for (bool again = count == 1;; again = true) {
                    float s[2 * TILES][4];
                    ps_attention_scores<T, TILES>(s, zero, queries, keys, chunks_q);
                    if (again) {
                        less[0] = less[1] = -INFINITY;
#pragma unroll
                        for (int j = 0; j < 8 * TILES; j++) {
                            float &value = s[j / 4][j % 4];
                            value = j / 4 < 2 * TILES - 2 || j / 4 * 8 + lane % 4 * 2 + j % 2 < count ? value : -INFINITY;
                            less[j % 4 / 2] = fmaxf(less[j % 4 / 2], value);
                        }
                        less[0] = ps_group_max<4>(less[0]) * factor; /* of a key at least: finite */
                        less[1] = ps_group_max<4>(less[1]) * factor;
                    }
#pragma unroll
                    for (int j = 0; j < 8 * TILES; j++) {
                        s[j / 4][j % 4] = ps_exp2(fmaf(s[j / 4][j % 4], factor, -less[j % 4 / 2]));
                    }
                    ps_attention_round<T, TILES>(weights, s);
                    sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
                    for (int j = 0; j < TILES; j++) { /* in every column */
                        const bool end = j == TILES - 1;
                        ps_mma16<T>(sum, weights[j], end ? last[0] : ps_ones<T>(), end ? last[1] : ps_ones<T>(), sum);
                    }
                    if (again || __all_sync(0xffffffffu, ps_sums_hold<T>(fminf(sum[0], sum[2]), fmaxf(sum[0], sum[2])))) {
                        break;
                    }
                }
                const uint32_t half = lane % 4, row = row0 + lane / 4 + half * 8;
                if (half < 2 && row < count) {
                    logsum[row] = ((half ? less[1] : less[0]) + ps_log2(half ? sum[2] : sum[0])) * (1 / PS_LOG2_E);
                }
                __syncwarp(); /* all have read the queries, whose place mixed takes */
                ps_attention_mixed<T, TILES>(queries, weights, values, ps_reciprocal(sum[0]), ps_reciprocal(sum[2]), chunks_v);
            }
        }
        way.end();
        way.template put_v<T>(p.mixed, q, chunks_q);
        way.finish();
    }
}

/* Of a warp's rows logsum to the base of 2, and delta, which goes to memory too. Both negative; of every two queries delta twice,
 * as the products start from it. Waits for what has been asked for. */
template <typename T, int TILES, class WAY>
static __device__ __forceinline__ void sums(float *logsum, float *delta, const char *mixed, const char *up,
                                            const typename WAY::told &p, const struct place &at, const WAY &way)
{
    constexpr uint32_t ROWS = 16 * TILES, LANES = (ROWS + 31) / 32;
    const uint32_t lane = threadIdx.x % 32;
    if (!WAY::BOXES) {
        way.wait();
    }
#pragma unroll 1
    for (struct tiles<TILES> own(p, at); own.more(p, at);) {
        const auto of_mixed = way.tile(mixed, way.chunks_v(), own, own.row), of_up = way.tile(up, way.chunks_v(), own, own.row);
        const int64_t first = own.matrix * p.patches;
        float from[LANES];
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) {
            const uint32_t row = own.row + i * 32 + lane;
            from[i] = row < own.stop && row < p.patches ? p.logsum[first + row] * -PS_LOG2_E : 0;
        }
        if (WAY::BOXES) {
            way.wait();
        }
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) {
            const uint32_t row = own.row + i * 32 + lane;
            if (row < own.stop) {
                const uint32_t a = of_mixed.lane(i * 32 + lane, 0), b = of_up.lane(i * 32 + lane, 0);
                const float sum = ps_attention_row_product<T>(of_mixed, a, of_up, b, way.chunks_v());
                const uint32_t to = own.own * ROWS + row;
                delta[to / 2 * 4 + to % 2] = delta[to / 2 * 4 + to % 2 + 2] = -sum;
                logsum[to] = from[i];
                if (row < p.patches) {
                    p.delta[first + row] = sum;
                }
            }
        }
    }
}

template <typename T, int TILES, class WAY>
static __global__ void __launch_bounds__(MOST_THREADS) backward_kernel(const __grid_constant__ typename WAY::told p)
{
#if __CUDA_ARCH__ < 900
    if constexpr (!WAY::BOXES)
#endif
    {
        ps_grid_begin();
        extern __shared__ __align__(1024) char shared_memory[];
        constexpr int ROWS = 16 * TILES;
        constexpr uint32_t BLOCK = ROWS * 16, OF_D = 2 * TILES * BLOCK; /* gradients of scores: 8 queries, all keys; a matrix */
        const struct place at(p);
        WAY way(p, at);
        const auto chunks_q = way.chunks_q();
        const auto chunks_v = way.chunks_v();
        const uint32_t of_q = way.bytes_q(), of_v = way.bytes_v();
        char *const q = shared_memory, *const k = q + of_q, *const v = k + of_q, *const up = v + of_v;
        /* What dk and dq are added to, if to anything and here; else dk takes the place of mixed, which is read first, and dq that
         * of q. */
        const bool add = !WAY::BOXES && p.accumulate;
        char *const dk = up + of_v, *const dq = add ? dk + of_q : q;
        char *const mixed = add ? dq + of_q : dk, *const d = mixed + (add ? of_v : of_q);
        float *const delta = (float *)(d + at.matrices * OF_D), *const logsum = delta + at.matrices * ROWS * 2;
        way.begin(q, (add ? 4 : 2) * of_q + 3 * of_v, (char *)(logsum + at.matrices * ROWS));
        way.bring_v(up, p.d_mixed);
        way.bring_v(mixed, p.mixed);
        way.bring_v(v, p.v);
        way.bring_q({k, q}, p.k, p.q);
        if (add) {
            way.bring_q({dk, dq}, p.dk, p.dq);
        }
        sums<T, TILES>(logsum, delta, mixed, up, p, at, way);
        meet<WAY, TILES>(p);
        const uint32_t lane = threadIdx.x % 32;
        const float factor = p.scale * PS_LOG2_E, zero[1][4] = {};
#pragma unroll 1
        for (struct tiles<TILES> own(p, at); own.more(p, at);) { /* 16 keys: dv, dk */
            const auto queries = way.tile(q, chunks_q, own, 0);
            const auto ups = way.tile(up, chunks_v, own, 0);
#pragma unroll 1
            for (uint32_t row0 = own.row; row0 < own.stop; row0 += 16) {
                const auto keys = way.tile(k, chunks_q, own, row0);
                const auto values = way.tile(v, chunks_v, own, row0);
                uint32_t weights[TILES][4], gradients[TILES][4];
                {
                    float s[2 * TILES][4], g[2 * TILES][4];
                    ps_attention_scores<T, TILES>(s, zero, keys, queries, chunks_q);
#pragma unroll
                    for (int j = 0; j < 2 * TILES; j++) {
                        const float2 less = *(const float2 *)(logsum + own.own * ROWS + j * 8 + lane % 4 * 2);
                        const float4 from = *(const float4 *)(delta + own.own * ROWS * 2 + j * 16 + lane % 4 * 4);
#pragma unroll
                        for (int r = 0; r < 4; r++) {
                            s[j][r] = ps_exp2(fmaf(s[j][r], factor, r % 2 ? less.y : less.x));
                        }
                        g[j][0] = from.x;
                        g[j][1] = from.y;
                        g[j][2] = from.z;
                        g[j][3] = from.w;
                    }
                    ps_attention_scores<T, TILES>(g, g, values, ups, chunks_v);
#pragma unroll
                    for (int j = 0; j < 8 * TILES; j++) {
                        g[j / 4][j % 4] *= s[j / 4][j % 4];
                    }
                    ps_attention_round<T, TILES>(weights, s);
                    ps_attention_round<T, TILES>(gradients, g);
                }
                if (row0 + 16 > p.patches) { /* nothing of what is no key */
                    const bool first = row0 + lane / 4 < p.patches, second = row0 + lane / 4 + 8 < p.patches;
#pragma unroll
                    for (int j = 0; j < 4 * TILES; j++) {
                        gradients[j / 4][j % 4] = (j % 2 ? second : first) ? gradients[j / 4][j % 4] : 0;
                    }
                }
                const struct ps_chunked to = ps_chunks(d + own.own * OF_D + row0 * 16, BLOCK);
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    ps_attention_store<2>(to, gradients[j], 2 * j);
                }
                __syncwarp(); /* all have read the values, whose place dv takes */
                ps_attention_mixed<T, TILES>(values, weights, ups, 1.0f, 1.0f, chunks_v);
                ps_attention_mixed<T, TILES>(way.tile(dk, chunks_q, own, row0), gradients, queries, p.scale, p.scale, chunks_q,
                                             add);
            }
        }
        meet<WAY, TILES>(p);
        if (!WAY::BOXES) {
            way.template put_v<T>(p.dv, v, chunks_v);
            way.template put_q<T>(p.dk, dk);
        }
#pragma unroll 1
        for (struct tiles<TILES> own(p, at); own.more(p, at);) { /* 16 queries: dq */
            const auto keys = way.tile(k, chunks_q, own, 0);
#pragma unroll 1
            for (uint32_t row0 = own.row; row0 < own.stop; row0 += 16) {
                const uint32_t from =
                    ps_shared_address(d + own.own * OF_D) + (row0 / 8 + lane / 8 % 2) * BLOCK + (lane / 16 * 8 + lane % 8) * 16;
                uint32_t gradients[TILES][4];
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    ps_ldmatrix4_transposed_at(gradients[j], from + j * 256);
                }
                ps_attention_mixed<T, TILES>(way.tile(dq, chunks_q, own, row0), gradients, keys, p.scale, p.scale, chunks_q, add);
            }
        }
        way.end();
        if (WAY::BOXES) {
            way.template put_v<T>(p.dv, v, chunks_v);
            way.template put_q<T>(p.dk, dk);
        }
        way.template put_q<T>(p.dq, dq);
        way.finish();
    }
}

/* ---- launching ---- */

/* From an element of a block's part of a tensor to another, in bytes. */
static bool near(const struct ps_attention_launch &x)
{
    for (const struct ps_attention_view *v : {&x.mixed, &x.q, &x.k, &x.v, &x.dq, &x.dk, &x.dv, &x.d_mixed}) {
        const int64_t most = std::max({std::abs(v->sequence), std::abs(v->head), std::abs(v->row)});
        if (most >= 1 << 23) {
            return false;
        }
    }
    return true;
}

static struct tensor tensor_of(const struct ps_attention_view &v, uint32_t sequences, uint32_t rows)
{
    return {v.data,           v.sequence * 2,          v.head * 2,          v.piece * 2,       sequences * v.sequence * 2,
            rows * v.row * 2, (int32_t)v.sequence * 2, (int32_t)v.head * 2, (int32_t)v.row * 2};
}

/* A block's heads side by side, and its sequences. */
struct share {
    int group, taken;
};

/* How many warps of so many blocks of so many tiles a multiprocessor has that work at once. What the query fails of fails the
 * launch. */
static int warps_at_once(const struct ps_cuda_context *c, const void *kernel, unsigned blocks, int tiles, int threads, int shared)
{
    int most = 0;
    (void)cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, kernel, threads, (size_t)shared);
    return (int)std::min((unsigned)most, ps_cuda_blocks(blocks, c->multiprocessors)) * tiles /
           (int)ps_cuda_blocks(tiles, threads / 32);
}

/* Blocks whose shared memory or number leaves a multiprocessor few warps have more than the usual threads. */
static int threads_of(const struct ps_cuda_context *c, const void *kernel, unsigned blocks, int tiles, int usual, int shared)
{
    const int more = warps_at_once(c, kernel, blocks, tiles, MOST_THREADS, shared);
    return more * 3 >= warps_at_once(c, kernel, blocks, tiles, usual, shared) * 4 ? MOST_THREADS : usual;
}

/* What both ways tell; then the launch. */
template <class WAY, typename T, int TILES, bool BACKWARD>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                             const struct share &share, int threads, int shared, typename WAY::told p)
{
    const int groups = (x.heads + share.group - 1) / share.group, sequences = (int)(x.matrices / x.heads);
    p.logsum = x.logsum;
    p.delta = x.delta;
    p.groups = ps_divisor_make(groups);
    p.group = ps_divisor_make(share.group);
    p.patches = (uint32_t)x.patches;
    p.heads = (uint32_t)x.heads;
    p.sequences = (uint32_t)sequences;
    p.taken = (uint32_t)share.taken;
    p.chunks_v = (uint32_t)(x.e + 7) / 8;
    p.accumulate = x.accumulate;
    p.scale = x.scale;
    const auto kernel = [] {
        if constexpr (BACKWARD) {
            return backward_kernel<T, TILES, WAY>;
        } else {
            return forward_kernel<T, TILES, WAY>;
        }
    }();
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, shared, op));
    const unsigned blocks = (unsigned)groups * ps_cuda_blocks(sequences, share.taken);
    if (WAY::BOXES) {
        threads = threads_of(c, (const void *)kernel, blocks, share.group * share.taken * TILES, threads, shared);
    }
    p.tiles = ps_cuda_blocks(share.group * share.taken * TILES, threads / 32);
    ps_cuda_launch(c, kernel, blocks, (unsigned)threads, (size_t)shared, p);
    PS_CUDA_LAUNCHED(op);
}

static int usual_threads(int tiles)
{
    return tiles % 4 != 0 && tiles % 3 == 0 ? FEWEST : THREADS;
}

/* Chunks of a matrix in shared memory, or parts of a sequence; ADD: with what is added to. */
static int tensors_of(bool backward, bool add, int of_q, int of_v)
{
    return !backward ? 2 * of_q + of_v : add ? 4 * of_q + 3 * of_v : 3 * of_q + 2 * of_v;
}

/* What backward has there besides, of a matrix: gradients of scores, and sums. */
static int more_bytes(int tiles, bool backward)
{
    return backward ? 2 * tiles * tiles * 256 + 3 * tiles * 16 * 4 : 0;
}

template <typename T, int TILES, bool WIDE, bool BACKWARD>
static enum ps_status launch_copied(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    constexpr int ROWS = 16 * TILES;
    const int elements = x.unit / 2, sequences = (int)(x.matrices / x.heads);
    const int tensors = tensors_of(BACKWARD, x.accumulate, (x.columns + 7) / 8, (x.e + 7) / 8);
    const auto bytes = [&](int chunk) { return tensors * chunk + more_bytes(TILES, BACKWARD); };
    /* Blocks as large as measured best on an H100: backward of heads of 16 to 32 columns an eighth of a multiprocessor, whose
     * copies leave the first-level cache out. */
    const bool small = BACKWARD && x.e >= 16 && x.e <= 32;
    const int most_bytes = (small ? 28 : 56) << 10, most_tiles = 12, filled = 32;
    /* Heads that fill so many columns of a row, or half as many, as far as the block has room; then sequences. */
    const int room = std::max(1, std::min(most_bytes / bytes(ROWS * 16 + 16), most_tiles / TILES));
    const int units = x.e / elements;
    int most = std::max(1, std::min({x.heads, filled / x.e, UNITS / units}));
    while (most > room) {
        most = (most + 1) / 2;
    }
    const int groups = (x.heads + most - 1) / most, group = (x.heads + groups - 1) / groups;
    const struct share share = {group, std::min(sequences, std::max(1, room / group))};
    const int threads = usual_threads(share.taken * group * TILES), lines = threads / (units * group);
    struct copied p = {};
    p.units = ps_divisor_make(units);
    p.across = ps_divisor_make(units * group);
    p.step_sequences = (uint32_t)std::max(1, lines / ROWS);
    p.step_rows = (uint32_t)std::min(lines, ROWS);
    const auto tensor = [&](const struct ps_attention_view &v) { return tensor_of(v, p.step_sequences, p.step_rows); };
    p.mixed = tensor(x.mixed);
    p.q = tensor(x.q);
    p.k = tensor(x.k);
    p.v = tensor(x.v);
    p.dq = tensor(x.dq);
    p.dk = tensor(x.dk);
    p.dv = tensor(x.dv);
    p.d_mixed = tensor(x.d_mixed);
    p.chunks_q = (uint32_t)(x.columns + 7) / 8;
    p.e = (uint32_t)x.e;
    p.pieces = (uint32_t)x.pieces;
    p.unit = x.unit;
    p.near = !BACKWARD || (x.pieces == 1 && !small);
    /* Units that a quarter of a warp brings at once lie in different banks. */
    p.chunk = ROWS * 16 + (units * group > 4 ? 16 : units * group > 2 ? 32 : units * group > 1 ? 64 : 0);
    const int shared = bytes((int)p.chunk) * group * share.taken;
    return launch<by_threads<ROWS, WIDE>, T, TILES, BACKWARD>(c, op, x, share, threads, shared, p);
}

/* Whether heads fill a row's box, or a half, quarter or eighth, side by side; else each has its own, filled in part. */
static bool side_by_side(const struct ps_attention_launch &x)
{
    return (x.e & (x.e - 1)) == 0;
}

/* Whether all rows are boxes: heads of whole 16 bytes, of any layout where each has its own. */
static bool in_boxes(const struct ps_cuda_context *c, const struct ps_attention_launch &x, bool backward)
{
    bool fit = c->compute_capability >= 90 && x.unit == 16;
    const struct ps_attention_view *const views[] = {&x.mixed, &x.q, &x.k, &x.v, &x.dq, &x.dk, &x.dv, &x.d_mixed};
    for (int i = 0; i < (backward ? 8 : 4); i++) {
        const struct ps_attention_view &v = *views[i];
        const bool there = side_by_side(x) ? v.head == x.e || x.heads == 1 : v.head >= 0;
        fit = fit && there && v.row >= 0 && v.sequence >= 0 && v.piece >= 0;
    }
    return fit;
}

/* A head's columns of a row's box of so many bytes, how many boxes it has, of a piece, heads side by side in one, and shared memory
 * that a sequence takes. */
struct box {
    int columns, parts, group, bytes;
};

static struct box box_of(const struct ps_attention_launch &x, int tiles, bool backward, int width)
{
    const int columns = side_by_side(x) ? std::min(x.e, width / 2) : width / 2, parts = (x.e + columns - 1) / columns;
    const int group = std::min(x.heads, width / 2 / columns), tensors = tensors_of(backward, false, x.pieces * parts, parts);
    return {columns, parts, group, tensors * 16 * tiles * width + group * more_bytes(tiles, backward)};
}

static int tiles_of(const struct ps_attention_launch &x)
{
    return (x.patches + 15) / 16;
}

/* Bytes of a row of the boxes; 0 where rows are none. */
static int width_of(const struct ps_cuda_context *c, const struct ps_attention_launch &x, bool backward)
{
    /* A multiprocessor is to hold two blocks: of many pieces a box's heads may take more. */
    const int most = std::min(c->shared_bytes - (int)sizeof(uint64_t), 112 << 10);
    const auto fit = [&](int width) { return box_of(x, tiles_of(x), backward, width).bytes <= most; };
    /* Rows of 128 bytes cost L2 least; backward of narrow heads has too few blocks at once then. Boxes that a head does not fill
     * are as narrow as leaves the least of them empty. */
    const bool wide =
        side_by_side(x) && x.e <= 32 ? x.heads * x.e % 64 == 0 && (!backward || x.e == 32) && fit(128) : (x.e + 31) / 32 % 2 == 0;
    return !in_boxes(c, x, backward) || !fit(wide ? 128 : 64) ? 0 : wide ? 128 : 64;
}

/* Scores of more than 64 patches fit a warp's registers, but not many blocks' rows by threads a multiprocessor's shared memory;
 * backward long16 is the faster then but for narrow heads. */
enum { BY_THREADS = 64, MOST_BACKWARD = 96, MOST_PATCHES = 128 };

bool ps_cuda_attention_short16_wanted(const struct ps_kernels *k, const struct ps_attention_call *call)
{
    const struct ps_attention_launch &x = call->x;
    const int most = !call->backward ? MOST_PATCHES : x.e <= 8 ? MOST_BACKWARD : BY_THREADS;
    return k->real != PS_F32 && near(x) &&
           (x.patches <= BY_THREADS || (x.patches <= most && width_of(ps_cuda(k), x, call->backward) > 0));
}

template <typename T, int TILES, int W, int CHUNKS, bool ONE, bool BACKWARD>
static enum ps_status launch_boxed(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    constexpr int ROWS = 16 * TILES;
    const struct box box = box_of(x, TILES, BACKWARD, W);
    const int sequences = (int)(x.matrices / x.heads);
    /* Blocks as large as measured best on an H200, of a sequence at least. */
    const int most_bytes = 36 << 10, most_tiles = 12;
    const struct share share = {box.group,
                                std::max(1, std::min({sequences, most_bytes / box.bytes, most_tiles / (TILES * box.group)}))};
    struct boxed p = {};
    const struct {
        CUtensorMap *map;
        const struct ps_attention_view *view;
        int pieces;
    } all[] = {{&p.mixed, &x.mixed, 1},  {&p.q, &x.q, x.pieces},   {&p.k, &x.k, x.pieces}, {&p.v, &x.v, 1},
               {&p.dq, &x.dq, x.pieces}, {&p.dk, &x.dk, x.pieces}, {&p.dv, &x.dv, 1},      {&p.d_mixed, &x.d_mixed, 1}};
    for (int i = 0; i < (BACKWARD ? 8 : 4); i++) {
        PS_TRY((ps_attention_map<T, W>(all[i].map, *all[i].view, x, all[i].pieces, side_by_side(x), ROWS, share.taken)));
    }
    /* A piece begins a part: between pieces the products take what is not filled along. */
    p.chunks_q = (uint32_t)((x.pieces - 1) * box.parts * box.columns + x.e) / 8;
    p.parts_q = (uint32_t)(x.pieces * box.parts);
    p.parts_v = (uint32_t)box.parts;
    p.e = (uint32_t)x.e;
    p.along = side_by_side(x) ? p.e : 0;
    p.apart = !side_by_side(x);
    for (p.shift = 0; 8 << p.shift < box.columns; p.shift++) {
    }
    p.part = (uint32_t)(share.taken * ROWS * W);
    const int shared = share.taken * box.bytes + (int)sizeof(uint64_t); /* and the barrier */
    return launch<by_boxes<ROWS, W, CHUNKS, ONE>, T, TILES, BACKWARD>(c, op, x, share,
                                                                      usual_threads(share.taken * box.group * TILES), shared, p);
}

template <typename T, int TILES, int W, int CHUNKS, bool BACKWARD>
static enum ps_status launch_chunks(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    return x.pieces == 1 ? launch_boxed<T, TILES, W, CHUNKS, true, BACKWARD>(c, op, x)
                         : launch_boxed<T, TILES, W, CHUNKS, false, BACKWARD>(c, op, x);
}

/* Common numbers of a head's chunks have kernels of their own, whose loops over them are unrolled: heads of 16 columns issue 0.7 of
 * the instructions so. Rows of W bytes are for some numbers alone (width_of). */
template <typename T, int TILES, int W, bool BACKWARD>
static enum ps_status launch_width(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    constexpr bool NARROW = BACKWARD && 16 * TILES > BY_THREADS; /* no others are wanted */
    const int chunks = x.e / 8;
    if constexpr (W == 64 || !BACKWARD) {
        if (chunks == 1) {
            return launch_chunks<T, TILES, W, 1, BACKWARD>(c, op, x);
        }
    }
    if constexpr (!NARROW && (W == 64 || !BACKWARD)) {
        if (chunks == 2) {
            return launch_chunks<T, TILES, W, 2, BACKWARD>(c, op, x);
        }
    }
    if constexpr (!NARROW) {
        constexpr int LAST = W == 64 ? 3 : 8;
        return chunks == 4                       ? launch_chunks<T, TILES, W, 4, BACKWARD>(c, op, x)
               : chunks == LAST && x.pieces == 1 ? launch_boxed<T, TILES, W, LAST, true, BACKWARD>(c, op, x)
                                                 : launch_boxed<T, TILES, W, 0, false, BACKWARD>(c, op, x);
    } else {
        return PS_UNSUPPORTED; /* was not wanted */
    }
}

template <typename T, int TILES, bool BACKWARD>
static enum ps_status launch_rows(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    const int width = width_of(c, x, BACKWARD);
    if (width == 64) {
        return launch_width<T, TILES, 64, BACKWARD>(c, op, x);
    }
    if constexpr (!BACKWARD || 16 * TILES <= BY_THREADS) { /* of more patches only narrow heads are wanted */
        if (width == 128) {
            return launch_width<T, TILES, 128, BACKWARD>(c, op, x);
        }
    }
    if constexpr (16 * TILES <= BY_THREADS) {
        return x.unit < 16 ? launch_copied<T, TILES, false, BACKWARD>(c, op, x) : launch_copied<T, TILES, true, BACKWARD>(c, op, x);
    } else {
        return PS_UNSUPPORTED; /* was not wanted */
    }
}

template <typename T, bool BACKWARD>
static enum ps_status launch_size(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    constexpr int MOST = (BACKWARD ? MOST_BACKWARD : MOST_PATCHES) / 16, LAST = std::min(7, MOST);
    typedef enum ps_status size(const struct ps_cuda_context *, const char *, const struct ps_attention_launch &);
    static size *const sizes[] = {launch_rows<T, 1, BACKWARD>,    launch_rows<T, 2, BACKWARD>,   launch_rows<T, 3, BACKWARD>,
                                  launch_rows<T, 4, BACKWARD>,    launch_rows<T, 5, BACKWARD>,   launch_rows<T, 6, BACKWARD>,
                                  launch_rows<T, LAST, BACKWARD>, launch_rows<T, MOST, BACKWARD>};
    static_assert(sizeof sizes / sizeof *sizes == MOST_PATCHES / 16,
                  "one for every 16 patches; backward no more are wanted than MOST_BACKWARD");
    return sizes[tiles_of(x) - 1](c, op, x);
}

enum ps_status ps_cuda_attention_short16(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return k->real == PS_BF16 ? launch_size<ps_bf16, false>(ps_cuda(k), op, call->x)
                              : launch_size<ps_fp16, false>(ps_cuda(k), op, call->x);
}

enum ps_status ps_cuda_attention_short16_backward(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return k->real == PS_BF16 ? launch_size<ps_bf16, true>(ps_cuda(k), op, call->x)
                              : launch_size<ps_fp16, true>(ps_cuda(k), op, call->x);
}
