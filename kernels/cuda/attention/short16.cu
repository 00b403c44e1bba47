/* Attention of 16 bits for short sequences, N up to 64: scores, weights and their gradients stay in a warp's registers.
 *
 * A block takes a group of heads of one sequence or several: it brings their rows to shared memory once, in units of 16 bytes where
 * they are aligned so, and takes the results back the same way. Forward a warp owns 16 queries of a head. Backward it owns first 16
 * keys: with scores turned, 16 keys by all queries, dv and dk are its own sums; the scores' gradients go to shared memory, from
 * where they are read turned back for dq, of which a warp owns 16 queries. What dk and dq are added to comes with all else, before
 * it is needed. So no score is computed twice, and every sum has one owner and a fixed order. e is anything: chunks of 8 columns,
 * of which two are a product's m16n8k16, a last one an m16n8k8.
 *
 * Bytes: 8 S h N e forward, 18 S h N e backward, and the sums; S h N^2 exponentials each way and tensor FLOPs 4 S h N^2 e forward,
 * 10 S h N^2 e backward, of N in whole 16 and e in whole 8. 42 patches, heads of 8, 43,008 matrices: 116 and 260 MB, 39 and 87 us
 * at 3.0 TB/s; the exponentials 32 us each way, at 16 a clock and multiprocessor. A warp issues 890 instructions a matrix forward,
 * 1,600 backward: 43 and 77 us of all schedulers' time. */
#include <algorithm>

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/attention/operands16.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/reduce.cuh"

/* Most threads of a block, and fewest; what a block takes at most: units of a row (of one head more), tiles of 16 rows, bytes of
 * shared memory (of one matrix more). */
enum { THREADS = 128, FEWEST = 96, UNITS = FEWEST };

/* A tensor, in bytes: strides, and from the thread's row to its next. */
struct tensor {
    char *data;
    int64_t sequence, head, piece, next_sequence, next_row;
    int32_t near_sequence, near_head, row; /* the same within a block */
};

struct short16 {
    struct tensor mixed, q, k, v, dq, dk, dv, d_mixed;
    float *logsum, *delta;
    /* A thread moves the same unit of `e` columns of every `rows`th row of every `sequences`th of the block's sequences: units of
     * a piece; of the block's heads side by side. */
    struct ps_divisor units, across;
    uint32_t step_sequences, step_rows;
    struct ps_divisor groups, group;           /* blocks side by side; heads of one */
    uint32_t patches, heads, sequences, taken; /* all; a block's */
    uint32_t e, pieces, chunks_q, chunks_v;
    uint32_t chunk; /* bytes from chunk to chunk in shared memory */
    uint32_t tiles; /* of a warp */
    int unit;       /* bytes */
    bool accumulate;
    bool by_l1; /* backward copies by the first-level cache */
    float scale;
};

/* The block's first sequence and head, and how many sequences and matrices it has. */
struct place {
    uint32_t sequence, head, sequences, matrices;

    __device__ __forceinline__ place(const struct short16 &p)
    {
        const uint32_t before = ps_divide(blockIdx.x, p.groups);
        sequence = before * p.taken;
        head = (blockIdx.x - before * p.groups.divisor) * p.group.divisor;
        sequences = min(p.taken, p.sequences - sequence);
        matrices = sequences * p.group.divisor;
    }
};

/* A thread's unit of the rows: the first row and sequence of the block's, head of the block's, column of the head's. */
struct unit {
    uint32_t sequence, row, head, column;

    template <int ROWS>
    __device__ __forceinline__ unit(const struct short16 &p, const struct place &at, uint32_t elements,
                                    std::integral_constant<int, ROWS>)
    {
        const uint32_t line = ps_divide(threadIdx.x, p.across), side = threadIdx.x - line * p.across.divisor;
        head = ps_divide(side, p.units);
        column = (side - head * p.units.divisor) * elements;
        sequence = line / ROWS;
        row = line % ROWS;
        /* Threads that are left over have none. */
        const bool there = line < p.step_sequences * p.step_rows && at.head + head < p.heads;
        sequence = there ? sequence : p.taken;
    }
    __device__ __forceinline__ char *start(const struct tensor &t, const struct place &at) const
    {
        return t.data + (at.sequence * t.sequence + at.head * t.head) +
               (int32_t)(sequence * t.near_sequence + head * t.near_head + row * t.row + column * 2);
    }
    /* Its place in tiles `matrix` bytes apart. */
    __device__ __forceinline__ uint32_t in_tile(const struct short16 &p, uint32_t matrix, uint32_t piece) const
    {
        const uint32_t of_head = piece * p.e + column;
        return (sequence * p.group.divisor + head) * matrix + row * 16 + of_head / 8 * p.chunk + of_head % 8 * 2;
    }
};

/* All rows of some tensors, on their way to tiles `matrix` bytes apart; zeros in place of rows that there are not. They come by L1
 * (`near`), but backward where so many are under way that they would drive one another out. */
template <int ROWS, bool WIDE, int COUNT>
static __device__ __forceinline__ void fetch(char *const (&to)[COUNT], const struct tensor *const (&t)[COUNT], uint32_t matrix,
                                             uint32_t pieces, bool near, const struct short16 &p, const struct place &at,
                                             const struct unit &u)
{
    const char *first[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        first[i] = u.start(*t[i], at);
    }
#pragma unroll 1
    for (uint32_t piece = 0; piece < pieces; piece++) {
        uint32_t target = u.in_tile(p, matrix, piece);
        const char *side[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            side[i] = first[i];
            first[i] += t[i]->piece;
        }
#pragma unroll 1
        for (uint32_t sequence = u.sequence; sequence < at.sequences; sequence += p.step_sequences) {
            const char *from[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                from[i] = side[i];
                side[i] += t[i]->next_sequence;
            }
            uint32_t into = target;
            target += p.step_sequences * p.group.divisor * matrix;
#pragma unroll 1
            for (uint32_t row = u.row; row < ROWS; row += p.step_rows, into += p.step_rows * 16) {
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    ps_attention_fetch(to[i] + into, from[i], row < p.patches, WIDE ? 16 : p.unit, near);
                    from[i] += t[i]->next_row;
                }
            }
        }
    }
}

/* All rows of such tiles to a tensor. */
template <typename T, int ROWS, bool WIDE>
static __device__ __forceinline__ void put(const struct tensor &t, const char *from, uint32_t matrix, uint32_t pieces,
                                           const struct short16 &p, const struct place &at, const struct unit &u)
{
    char *first = u.start(t, at);
#pragma unroll 1
    for (uint32_t piece = 0; piece < pieces; piece++, first += t.piece) {
        const char *source = from + u.in_tile(p, matrix, piece);
        char *side = first;
#pragma unroll 1
        for (uint32_t sequence = u.sequence; sequence < at.sequences; sequence += p.step_sequences) {
            const char *out = source;
            char *to = side;
#pragma unroll 1
            for (uint32_t row = u.row; row < p.patches; row += p.step_rows, out += p.step_rows * 16, to += t.next_row) {
                ps_attention_return<T>(to, out, false, WIDE ? 16 : p.unit);
            }
            source += p.step_sequences * p.group.divisor * matrix;
            side += t.next_sequence;
        }
    }
}

/* Zeros for the columns that fill a head's last chunk, which no unit reaches. */
template <bool WIDE> static __device__ __forceinline__ void clear(char *memory, uint32_t bytes, const struct short16 &p)
{
    if (!WIDE && p.e % 8) {
        ps_attention_clear(memory, bytes);
    }
}

/* A warp's tiles of 16 rows, the block's in turn; those of one matrix at a time: rows from `row` to `stop` of the block's matrix
 * `own`, which is `matrix` of all. */
template <int TILES> struct tiles {
    uint32_t own, row, stop, next, end;
    int64_t matrix;

    __device__ __forceinline__ tiles(const struct short16 &p, const struct place &at)
        : next(threadIdx.x / 32 * p.tiles), end(min(next + p.tiles, at.matrices * TILES))
    {
    }
    __device__ __forceinline__ bool more(const struct short16 &p, const struct place &at)
    {
        while (next < end) {
            own = next / TILES;
            row = next % TILES * 16;
            stop = min(TILES * 16u, row + (end - next) * 16);
            next = own * TILES + TILES;
            const uint32_t sequence = ps_divide(own, p.group), head = at.head + own - sequence * p.group.divisor;
            if (head < p.heads) {
                matrix = (int64_t)(at.sequence + sequence) * p.heads + head;
                return true;
            }
        }
        return false;
    }
};

/* N at most 16 TILES and more than one tile less; NARROW: of a single chunk, here and below. */
template <typename T, int TILES, bool WIDE, bool NARROW>
static __global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ struct short16 p)
{
    ps_grid_begin();
    extern __shared__ float4 shared_memory[];
    constexpr int ROWS = 16 * TILES;
    const struct place at(p);
    const struct unit u(p, at, WIDE ? 8 : (uint32_t)p.unit / 2, std::integral_constant<int, ROWS>());
    const uint32_t chunks_q = NARROW ? 1 : p.chunks_q, chunks_v = NARROW ? 1 : p.chunks_v, pieces = NARROW ? 1 : p.pieces;
    const uint32_t of_q = chunks_q * p.chunk, of_v = chunks_v * p.chunk; /* bytes of a matrix */
    char *const q = (char *)shared_memory, *const k = q + at.matrices * of_q, *const v = k + at.matrices * of_q;
    clear<WIDE>(q, at.matrices * (2 * of_q + of_v), p);
    fetch<ROWS, WIDE, 2>({k, q}, {&p.k, &p.q}, of_q, pieces, true, p, at, u);
    fetch<ROWS, WIDE, 1>({v}, {&p.v}, of_v, 1, true, p, at, u);
    ps_copy_wait();
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32, count = p.patches;
    const float factor = p.scale * PS_LOG2_E, zero[1][4] = {};
    uint32_t last[2]; /* ones, of the last tile's keys */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        last[i] = ps_ones<T>() & ps_attention_pair(ROWS - 16 + i * 8 + lane % 4 * 2, count);
        asm volatile("" : "+r"(last[i])); /* found once: the compiler would do so at each tile */
    }
#pragma unroll 1
    for (struct tiles<TILES> own(p, at); own.more(p, at);) {
        float *const logsum = p.logsum + own.matrix * count;
        const uint32_t keys = ps_shared_address(k + own.own * of_q), values = ps_shared_address(v + own.own * of_v);
#pragma unroll 1
        for (uint32_t row0 = own.row; row0 < own.stop; row0 += 16) {
            char *const queries = q + own.own * of_q + row0 * 16;
            float sum[4], less[2] = {0, 0};
            uint32_t weights[TILES][4];
            /* Of most scores the exponentials are fine as they are; else all again, less each row's largest, which of a single key
             * makes logsum exact. */
#pragma unroll 1
            for (bool again = count == 1;; again = true) {
                float s[2 * TILES][4];
                ps_attention_scores<T, TILES>(s, zero, ps_shared_address(queries), keys, chunks_q, p.chunk, p.chunk);
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
            ps_attention_mixed<T, TILES>(queries, weights, values, ps_reciprocal(sum[0]), ps_reciprocal(sum[2]), chunks_v, p.chunk);
        }
    }
    __syncthreads();
    put<T, ROWS, WIDE>(p.mixed, q, of_q, 1, p, at, u);
}

/* logsum to the base of 2, which is on its way as it is; delta, to memory too. Both negative; of every two queries delta twice, as
 * the products start from it. mixed, up: tiles. */
template <typename T, int TILES>
static __device__ __forceinline__ void sums(float *logsum, float *delta, const char *mixed, const char *up, uint32_t chunks,
                                            const struct short16 &p, const struct place &at)
{
    constexpr uint32_t ROWS = 16 * TILES;
    const uint32_t half = threadIdx.x % 2;
#pragma unroll 1
    for (struct tiles<TILES> own(p, at); own.more(p, at);) {
#pragma unroll 1
        for (uint32_t row = own.row + threadIdx.x % 32 / 2; row < own.stop; row += 16) {
            const uint32_t from = own.own * chunks * p.chunk + row * 16 + half * 8;
            float sum = 0.0f;
#pragma unroll 1
            for (uint32_t t = 0; t < chunks; t++) {
                float a[4], b[4];
                ps_load<4>(a, (const T *)(mixed + from + t * p.chunk));
                ps_load<4>(b, (const T *)(up + from + t * p.chunk));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum = fmaf(a[j], b[j], sum);
                }
            }
            sum = ps_group_sum<2>(sum);
            const uint32_t i = own.own * ROWS + row;
            delta[i / 2 * 4 + i % 2 + half * 2] = -sum;
            if (half == 0) {
                logsum[i] *= -PS_LOG2_E;
                if (row < p.patches) {
                    p.delta[own.matrix * p.patches + row] = sum;
                }
            }
        }
    }
}

template <typename T, int TILES, bool WIDE, bool NARROW>
static __global__ void __launch_bounds__(THREADS) backward_kernel(const __grid_constant__ struct short16 p)
{
    ps_grid_begin();
    extern __shared__ float4 shared_memory[];
    constexpr int ROWS = 16 * TILES;
    constexpr uint32_t BLOCK = ROWS * 16, OF_D = 2 * TILES * BLOCK; /* gradients of scores: 8 queries, all keys; a matrix */
    const struct place at(p);
    const struct unit u(p, at, WIDE ? 8 : (uint32_t)p.unit / 2, std::integral_constant<int, ROWS>());
    const uint32_t chunks_q = NARROW ? 1 : p.chunks_q, chunks_v = NARROW ? 1 : p.chunks_v, pieces = NARROW ? 1 : p.pieces;
    const uint32_t of_q = chunks_q * p.chunk, of_v = chunks_v * p.chunk;
    char *const d = (char *)shared_memory, *const q = d + at.matrices * OF_D, *const k = q + at.matrices * of_q;
    char *const v = k + at.matrices * of_q, *const up = v + at.matrices * of_v;
    /* What dk and dq are added to, if to anything; else dk takes the place of mixed, which is read first, and dq that of q. */
    char *const dk = up + at.matrices * of_v, *const dq = p.accumulate ? dk + at.matrices * of_q : q;
    char *const mixed = p.accumulate ? dq + at.matrices * of_q : dk;
    float *const delta = (float *)(mixed + at.matrices * (p.accumulate ? of_v : of_q));
    float *const logsum = delta + at.matrices * ROWS * 2;
    clear<WIDE>(q, (uint32_t)((char *)delta - q), p);
    fetch<ROWS, WIDE, 3>({up, mixed, v}, {&p.d_mixed, &p.mixed, &p.v}, of_v, 1, p.by_l1, p, at, u);
#pragma unroll 1
    for (struct tiles<TILES> own(p, at); own.more(p, at);) {
        for (uint32_t row = own.row + threadIdx.x % 32; row < own.stop; row += 32) {
            ps_copy_async4_if(logsum + own.own * ROWS + row, p.logsum + own.matrix * p.patches + row, row < p.patches);
        }
    }
    fetch<ROWS, WIDE, 2>({k, q}, {&p.k, &p.q}, of_q, pieces, p.by_l1, p, at, u);
    if (p.accumulate) {
        fetch<ROWS, WIDE, 2>({dk, dq}, {&p.dk, &p.dq}, of_q, pieces, p.by_l1, p, at, u);
    }
    ps_copy_wait();
    __syncthreads();
    sums<T, TILES>(logsum, delta, mixed, up, chunks_v, p, at);
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32;
    const float factor = p.scale * PS_LOG2_E, zero[1][4] = {};
#pragma unroll 1
    for (struct tiles<TILES> own(p, at); own.more(p, at);) { /* 16 keys: dv, dk */
        const uint32_t queries = ps_shared_address(q + own.own * of_q), ups = ps_shared_address(up + own.own * of_v);
#pragma unroll 1
        for (uint32_t row0 = own.row; row0 < own.stop; row0 += 16) {
            char *const keys = k + own.own * of_q + row0 * 16, *const values = v + own.own * of_v + row0 * 16;
            uint32_t weights[TILES][4], gradients[TILES][4];
            {
                float s[2 * TILES][4], g[2 * TILES][4];
                ps_attention_scores<T, TILES>(s, zero, ps_shared_address(keys), queries, chunks_q, p.chunk, p.chunk);
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
                ps_attention_scores<T, TILES>(g, g, ps_shared_address(values), ups, chunks_v, p.chunk, p.chunk);
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
            char *const to = d + own.own * OF_D + row0 * 16;
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                ps_attention_store<2>(to + 2 * j * BLOCK, gradients[j], BLOCK);
            }
            __syncwarp(); /* all have read the values, whose place dv takes */
            ps_attention_mixed<T, TILES>(values, weights, ups, 1.0f, 1.0f, chunks_v, p.chunk);
            ps_attention_mixed<T, TILES>(dk + own.own * of_q + row0 * 16, gradients, queries, p.scale, p.scale, chunks_q, p.chunk,
                                         p.accumulate);
        }
    }
    __syncthreads();
    put<T, ROWS, WIDE>(p.dv, v, of_v, 1, p, at, u);
    put<T, ROWS, WIDE>(p.dk, dk, of_q, pieces, p, at, u);
#pragma unroll 1
    for (struct tiles<TILES> own(p, at); own.more(p, at);) { /* 16 queries: dq */
        const uint32_t keys = ps_shared_address(k + own.own * of_q);
#pragma unroll 1
        for (uint32_t row0 = own.row; row0 < own.stop; row0 += 16) {
            const uint32_t from =
                ps_shared_address(d + own.own * OF_D) + (row0 / 8 + lane / 8 % 2) * BLOCK + (lane / 16 * 8 + lane % 8) * 16;
            uint32_t gradients[TILES][4];
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                ps_ldmatrix4_transposed_at(gradients[j], from + j * 256);
            }
            ps_attention_mixed<T, TILES>(dq + own.own * of_q + row0 * 16, gradients, keys, p.scale, p.scale, chunks_q, p.chunk,
                                         p.accumulate);
        }
    }
    __syncthreads();
    put<T, ROWS, WIDE>(p.dq, dq, of_q, pieces, p, at, u);
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

bool ps_cuda_attention_short16_wanted(const struct ps_kernels *k, const struct ps_attention_call *call)
{
    return k->real != PS_F32 && call->x.patches <= 64 && near(call->x);
}

static struct tensor tensor_of(const struct ps_attention_view &v, uint32_t sequences, uint32_t rows)
{
    return {v.data,           v.sequence * 2,          v.head * 2,          v.piece * 2,       sequences * v.sequence * 2,
            rows * v.row * 2, (int32_t)v.sequence * 2, (int32_t)v.head * 2, (int32_t)v.row * 2};
}

template <typename T, int TILES, bool WIDE, bool NARROW>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x, bool backward)
{
    constexpr int ROWS = 16 * TILES;
    const int elements = x.unit / 2, sequences = (int)(x.matrices / x.heads);
    const int of_q = (x.columns + 7) / 8, of_v = (x.e + 7) / 8; /* chunks */
    const int chunks = !backward ? 2 * of_q + of_v : x.accumulate ? 4 * of_q + 3 * of_v : 3 * of_q + 2 * of_v;
    const auto bytes = [&](int chunk) { return chunks * chunk + (backward ? 2 * TILES * ROWS * 16 + 3 * ROWS * 4 : 0); };
    /* Blocks as large as measured best on an H100: forward of one piece of narrow heads a multiprocessor's half, backward of wider
     * ones an eighth, whose copies leave the first-level cache out. */
    const bool large = NARROW && !backward, small = backward && x.e >= 16 && x.e <= 32;
    const int most_bytes = (large ? 112 : small ? 28 : 56) << 10, most_tiles = large ? 24 : 12, filled = large ? 64 : 32;
    /* Heads that fill so many columns of a row, or half as many, as far as the block has room; then sequences. */
    const int room = std::max(1, std::min(most_bytes / bytes(ROWS * 16 + 16), most_tiles / TILES));
    const int units = x.e / elements;
    int most = std::max(1, std::min({x.heads, filled / x.e, UNITS / units}));
    while (most > room) {
        most = (most + 1) / 2;
    }
    const int groups = (x.heads + most - 1) / most, group = (x.heads + groups - 1) / groups;
    const int taken = std::min(sequences, std::max(1, room / group)), tiles = taken * group * TILES;
    const int threads = tiles % 4 != 0 && tiles % 3 == 0 ? FEWEST : THREADS, lines = threads / (units * group);
    struct short16 p = {};
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
    p.logsum = x.logsum;
    p.delta = x.delta;
    p.groups = ps_divisor_make(groups);
    p.group = ps_divisor_make(group);
    p.patches = (uint32_t)x.patches;
    p.heads = (uint32_t)x.heads;
    p.sequences = (uint32_t)sequences;
    p.taken = (uint32_t)taken;
    p.e = (uint32_t)x.e;
    p.pieces = (uint32_t)x.pieces;
    p.chunks_q = (uint32_t)of_q;
    p.chunks_v = (uint32_t)of_v;
    p.tiles = ps_cuda_blocks(tiles, threads / 32);
    p.unit = x.unit;
    p.accumulate = x.accumulate;
    p.by_l1 = x.pieces == 1 && !small;
    p.scale = x.scale;
    /* Units that a quarter of a warp brings at once lie in different banks. */
    p.chunk = ROWS * 16 + (units * group > 4 ? 16 : units * group > 2 ? 32 : units * group > 1 ? 64 : 0);
    const int shared = bytes((int)p.chunk) * group * taken;
    const auto kernel = backward ? backward_kernel<T, TILES, WIDE, NARROW> : forward_kernel<T, TILES, WIDE, NARROW>;
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), op));
    ps_cuda_launch(c, kernel, (unsigned)groups * ps_cuda_blocks(sequences, taken), (unsigned)threads, (size_t)shared, p);
    PS_CUDA_LAUNCHED(op);
}

template <typename T, int TILES>
static enum ps_status launch_rows(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                  bool backward)
{
    return x.unit < 16      ? launch<T, TILES, false, false>(c, op, x, backward)
           : x.columns == 8 ? launch<T, TILES, true, true>(c, op, x, backward)
                            : launch<T, TILES, true, false>(c, op, x, backward);
}

template <typename T>
static enum ps_status launch_size(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                  bool backward)
{
    return x.patches <= 16   ? launch_rows<T, 1>(c, op, x, backward)
           : x.patches <= 32 ? launch_rows<T, 2>(c, op, x, backward)
           : x.patches <= 48 ? launch_rows<T, 3>(c, op, x, backward)
                             : launch_rows<T, 4>(c, op, x, backward);
}

static enum ps_status launch_type(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call, bool backward)
{
    return k->real == PS_BF16 ? launch_size<ps_bf16>(ps_cuda(k), op, call->x, backward)
                              : launch_size<ps_fp16>(ps_cuda(k), op, call->x, backward);
}

enum ps_status ps_cuda_attention_short16(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return launch_type(k, op, call, false);
}

enum ps_status ps_cuda_attention_short16_backward(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return launch_type(k, op, call, true);
}
