/* Attention of 16 bits for short sequences, N up to 64: scores, weights and their gradients stay in a warp's registers.
 *
 * A block takes a group of heads of one sequence or several: it brings their rows to shared memory once, in units of 16 bytes where
 * they are aligned so, and takes the results back the same way. Forward a warp owns 16 queries of a head. Backward it owns first 16
 * keys: with scores turned, 16 keys by all queries, dv and dk are its own sums; the scores' gradients go to shared memory, from
 * where they are read turned back for dq, of which a warp owns 16 queries. So no score is computed twice, and every sum has one
 * owner and a fixed order. e is anything: chunks of 8 columns, of which two are a product's m16n8k16, a last one an m16n8k8.
 *
 * Bytes: 8 S h N e forward, 18 S h N e backward, and the sums; S h N^2 exponentials each way and tensor FLOPs 4 S h N^2 e forward,
 * 10 S h N^2 e backward, of N in whole 16 and e in whole 8. 42 patches, heads of 8, 43,008 matrices: 116 and 260 MB, 28 and 62 us
 * at 4.2 TB/s; the exponentials 27 us each way, at 16 a clock and multiprocessor. */
#include <algorithm>

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/attention/operands16.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/reduce.cuh"

/* Most threads of a block, and fewest; what a block takes at most: units of a row (of one head more), tiles of 16 rows, bytes of
 * shared memory (of one matrix more). */
enum { THREADS = 128, FEWEST = 96, UNITS = FEWEST, TILES_TAKEN = 12, BYTES_TAKEN = 40 << 10 };

/* How a block's threads go over rows of q, k and their gradients, or of the other tensors: a thread moves the same unit of every
 * `step`th row. */
struct sweep {
    uint32_t columns, chunks;        /* of a head */
    struct ps_divisor units, across; /* of a head; of the block's heads */
    uint32_t step;
};

struct short16 {
    struct ps_attention_launch x;
    struct sweep of_q, of_v;
    struct ps_divisor groups, group; /* blocks side by side; heads of one */
    struct ps_divisor piece;         /* columns of a piece of q and k */
    uint32_t sequences, taken;       /* all; a block's */
    uint32_t chunk;                  /* bytes from chunk to chunk in shared memory */
};

/* The block's first sequence and head. */
struct place {
    uint32_t sequence, head;

    __device__ __forceinline__ place(const struct short16 &p)
    {
        const uint32_t before = ps_divide(blockIdx.x, p.groups);
        sequence = before * p.taken;
        head = (blockIdx.x - before * p.groups.divisor) * p.group.divisor;
    }
};

/* A thread's unit of the rows. */
struct unit {
    uint32_t row, step;           /* the thread's first row */
    uint32_t head, piece, column; /* of the block's; of the head's pieces; of the piece */
    uint32_t to;                  /* its place in row 0 of a matrix's tile */
    bool there;

    /* elements: of a unit; rows: of the block. */
    __device__ __forceinline__ unit(const struct short16 &p, const struct sweep &s, const struct place &at, uint32_t elements,
                                    uint32_t rows, bool pieces)
    {
        const uint32_t line = ps_divide(threadIdx.x, s.across), across = threadIdx.x - line * s.across.divisor;
        row = line < s.step ? line : rows; /* threads that are left over have none */
        step = s.step;
        head = ps_divide(across, s.units);
        column = (across - head * s.units.divisor) * elements;
        to = column / 8 * p.chunk + column % 8 * 2;
        piece = pieces ? ps_divide(column, p.piece) : 0;
        column -= piece * p.piece.divisor;
        there = at.head + head < (uint32_t)p.x.heads;
    }
};

/* The unit in a tensor's rows. */
struct rows {
    char *data;
    int64_t sequence, row;

    __device__ __forceinline__ rows(const struct ps_attention_view &v, const struct place &at, const struct unit &u)
        : data(v.data + (at.sequence * v.sequence + (at.head + u.head) * v.head + u.piece * v.piece + u.column) * 2),
          sequence(v.sequence * 2), row(v.row * 2)
    {
    }
    __device__ __forceinline__ char *at(uint32_t s, uint32_t r) const
    {
        return data + s * sequence + r * row;
    }
};

/* All rows of a tensor, on their way to tiles `matrix` bytes apart; zeros where there are none. They come by L1, but backward with
 * pieces of several layers: those would drive one another out (weather's layer 3: 0.37 ms against 0.40). */
template <int ROWS, bool WIDE, bool NEAR>
static __device__ __forceinline__ void fetch(char *to, uint32_t matrix, const struct ps_attention_view &v, const struct short16 &p,
                                             const struct place &at, const struct unit &u)
{
    const struct rows from(v, at, u);
    to += u.head * matrix + u.to;
    matrix *= p.group.divisor;
#pragma unroll 2
    for (uint32_t i = u.row; i < ROWS * p.taken; i += u.step) {
        const uint32_t sequence = i / ROWS, row = i % ROWS;
        const bool here = u.there && row < (uint32_t)p.x.patches && at.sequence + sequence < p.sequences;
        const char *source = here ? from.at(sequence, row) : v.data;
        char *target = to + sequence * matrix + row * 16;
        ps_attention_fetch(target, source, here, WIDE ? 16 : p.x.unit, NEAR || p.of_q.columns == p.of_v.columns);
    }
}

/* All rows of such tiles to a tensor, or added to what is there. */
template <typename T, int ROWS, bool WIDE>
static __device__ __forceinline__ void put(const struct ps_attention_view &v, const char *from, uint32_t matrix, bool add,
                                           const struct short16 &p, const struct place &at, const struct unit &u)
{
    const struct rows to(v, at, u);
    from += u.head * matrix + u.to;
    matrix *= p.group.divisor;
#pragma unroll 2
    for (uint32_t i = u.row; i < ROWS * p.taken; i += u.step) {
        const uint32_t sequence = i / ROWS, row = i % ROWS;
        if (!u.there || row >= (uint32_t)p.x.patches || at.sequence + sequence >= p.sequences) {
            continue;
        }
        char *const target = to.at(sequence, row);
        const char *const source = from + sequence * matrix + row * 16;
        ps_attention_return<T>(target, source, add, WIDE ? 16 : p.x.unit);
    }
}

/* Zeros for the columns that fill a head's last chunk, which no unit reaches. */
template <bool WIDE> static __device__ __forceinline__ void clear(char *memory, uint32_t bytes, const struct short16 &p)
{
    if (!WIDE && (p.of_q.columns % 8 || p.of_v.columns % 8)) {
        ps_attention_clear(memory, bytes);
    }
}

/* Matrix `matrix` of the block's among all; -1 where there is none. */
static __device__ __forceinline__ int64_t matrix_of(const struct short16 &p, const struct place &at, uint32_t matrix)
{
    const uint32_t before = ps_divide(matrix, p.group), sequence = at.sequence + before,
                   head = at.head + matrix - before * p.group.divisor;
    return sequence < p.sequences && head < (uint32_t)p.x.heads ? (int64_t)sequence * p.x.heads + head : -1;
}

/* N at most 16 TILES and more than one tile less, here and below. */
template <typename T, int TILES, bool WIDE>
static __global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ struct short16 p)
{
    ps_grid_begin();
    extern __shared__ float4 shared_memory[];
    constexpr int ROWS = 16 * TILES;
    const struct place at(p);
    const uint32_t matrices = p.taken * p.group.divisor, elements = WIDE ? 8 : (uint32_t)p.x.unit / 2;
    const uint32_t of_q = p.of_q.chunks * p.chunk, of_v = p.of_v.chunks * p.chunk; /* bytes of a matrix */
    char *const q = (char *)shared_memory, *const k = q + matrices * of_q, *const v = k + matrices * of_q;
    clear<WIDE>(q, matrices * (2 * of_q + of_v), p);
    const struct unit unit_q(p, p.of_q, at, elements, ROWS * p.taken, true), unit_v(p, p.of_v, at, elements, ROWS * p.taken, false);
    fetch<ROWS, WIDE, true>(k, of_q, p.x.k, p, at, unit_q);
    fetch<ROWS, WIDE, true>(q, of_q, p.x.q, p, at, unit_q);
    fetch<ROWS, WIDE, true>(v, of_v, p.x.v, p, at, unit_v);
    ps_copy_wait();
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32, count = (uint32_t)p.x.patches;
    const float factor = p.x.scale * PS_LOG2_E, zero[1][4] = {};
#pragma unroll 1
    for (uint32_t i = threadIdx.x / 32; i < matrices * TILES; i += blockDim.x / 32) {
        const uint32_t own = i / TILES, row0 = i % TILES * 16;
        const int64_t matrix = matrix_of(p, at, own);
        if (matrix < 0) {
            continue;
        }
        char *const queries = q + own * of_q + row0 * 16;
        float s[2 * TILES][4], most[2] = {-INFINITY, -INFINITY}, sum[4] = {0, 0, 0, 0};
        ps_attention_scores<T, TILES>(s, zero, ps_shared_address(queries), ps_shared_address(k + own * of_q), p.of_q.chunks,
                                      p.chunk, p.chunk);
#pragma unroll
        for (int j = 0; j < 8 * TILES; j++) {
            float &value = s[j / 4][j % 4];
            value = j / 4 < 2 * TILES - 2 || j / 4 * 8 + lane % 4 * 2 + j % 2 < count ? value : -INFINITY;
            most[j % 4 / 2] = fmaxf(most[j % 4 / 2], value);
        }
        most[0] = ps_group_max<4>(most[0]) * factor; /* of a key at least: finite */
        most[1] = ps_group_max<4>(most[1]) * factor;
#pragma unroll
        for (int j = 0; j < 8 * TILES; j++) {
            s[j / 4][j % 4] = ps_exp2(fmaf(s[j / 4][j % 4], factor, -most[j % 4 / 2]));
        }
        uint32_t weights[TILES][4];
        ps_attention_round<T, TILES>(weights, s);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            ps_mma16<T>(sum, weights[j], ps_ones<T>(), ps_ones<T>(), sum); /* in every column */
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t row = row0 + lane / 4 + r * 8;
            if (lane % 4 == 0 && row < count) {
                p.x.logsum[matrix * count + row] = (most[r] + ps_log2(sum[2 * r])) * (1 / PS_LOG2_E);
            }
        }
        __syncwarp(); /* all have read the queries, whose place mixed takes */
        ps_attention_mixed<T, TILES>(queries, weights, ps_shared_address(v + own * of_v), __fdividef(1.0f, sum[0]),
                                     __fdividef(1.0f, sum[2]), p.of_v.chunks, p.chunk);
    }
    __syncthreads();
    put<T, ROWS, WIDE>(p.x.mixed, q, of_q, false, p, at, unit_v);
}

/* logsum of the block's queries, on its way. */
template <int TILES>
static __device__ __forceinline__ void fetch_logsum(float *logsum, const struct short16 &p, const struct place &at)
{
    constexpr uint32_t ROWS = 16 * TILES;
    for (uint32_t i = threadIdx.x; i < p.taken * p.group.divisor * ROWS; i += blockDim.x) {
        const int64_t matrix = i % ROWS < (uint32_t)p.x.patches ? matrix_of(p, at, i / ROWS) : -1;
        ps_copy_async4_if(logsum + i, p.x.logsum + (matrix < 0 ? 0 : matrix * p.x.patches + i % ROWS), matrix >= 0);
    }
}

/* logsum to the base of 2; delta, to memory too. mixed, up: tiles. */
template <typename T, int TILES>
static __device__ __forceinline__ void sums(float *logsum, float *delta, const char *mixed, uint32_t of_mixed, const char *up,
                                            uint32_t of_up, const struct short16 &p, const struct place &at)
{
    constexpr uint32_t ROWS = 16 * TILES;
    const uint32_t chunks = p.of_v.chunks, lanes = chunks > 2 ? 4 : 1, part = threadIdx.x % lanes; /* of a row */
#pragma unroll 1
    for (uint32_t i = threadIdx.x / lanes; i < p.taken * p.group.divisor * ROWS; i += blockDim.x / lanes) {
        const uint32_t own = i / ROWS, row = i % ROWS;
        const int64_t matrix = row < (uint32_t)p.x.patches ? matrix_of(p, at, own) : -1;
        float sum = 0.0f;
#pragma unroll 1
        for (uint32_t t = part; t < chunks; t += lanes) {
            float a[8], b[8];
            ps_load<8>(a, (const T *)(mixed + own * of_mixed + t * p.chunk + row * 16));
            ps_load<8>(b, (const T *)(up + own * of_up + t * p.chunk + row * 16));
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum = fmaf(a[j], b[j], sum);
            }
        }
        if (lanes == 4) { /* a warp's 8 rows are all there or none: the block has whole 16 */
            sum = ps_quad_sum(sum);
        }
        if (part == 0) {
            logsum[i] *= PS_LOG2_E;
            delta[i] = sum;
            if (matrix >= 0) {
                p.x.delta[matrix * p.x.patches + row] = sum;
            }
        }
    }
}

template <typename T, int TILES, bool WIDE>
static __global__ void __launch_bounds__(THREADS) backward_kernel(const __grid_constant__ struct short16 p)
{
    ps_grid_begin();
    extern __shared__ float4 shared_memory[];
    constexpr int ROWS = 16 * TILES;
    constexpr uint32_t BLOCK = ROWS * 16, OF_D = 2 * TILES * BLOCK; /* gradients of scores: 8 queries, all keys; a matrix */
    const struct place at(p);
    const uint32_t matrices = p.taken * p.group.divisor, elements = WIDE ? 8 : (uint32_t)p.x.unit / 2;
    const uint32_t of_q = p.of_q.chunks * p.chunk, of_v = p.of_v.chunks * p.chunk;
    char *const q = (char *)shared_memory, *const k = q + matrices * of_q, *const mixed = k + matrices * of_q; /* then dk */
    char *const v = mixed + matrices * of_q, *const up = v + matrices * of_v, *const d = up + matrices * of_v;
    float *const logsum = (float *)(d + matrices * OF_D), *const delta = logsum + matrices * ROWS;
    clear<WIDE>(q, matrices * (3 * of_q + 2 * of_v), p);
    const struct unit unit_q(p, p.of_q, at, elements, ROWS * p.taken, true), unit_v(p, p.of_v, at, elements, ROWS * p.taken, false);
    fetch<ROWS, WIDE, false>(up, of_v, p.x.d_mixed, p, at, unit_v);
    fetch<ROWS, WIDE, false>(mixed, of_q, p.x.mixed, p, at, unit_v);
    fetch_logsum<TILES>(logsum, p, at);
    fetch<ROWS, WIDE, false>(k, of_q, p.x.k, p, at, unit_q);
    fetch<ROWS, WIDE, false>(q, of_q, p.x.q, p, at, unit_q);
    fetch<ROWS, WIDE, false>(v, of_v, p.x.v, p, at, unit_v);
    ps_copy_wait();
    __syncthreads();
    sums<T, TILES>(logsum, delta, mixed, of_q, up, of_v, p, at);
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32;
    const float factor = p.x.scale * PS_LOG2_E, zero[1][4] = {};
#pragma unroll 1
    for (uint32_t i = threadIdx.x / 32; i < matrices * TILES; i += blockDim.x / 32) { /* 16 keys: dv, dk */
        const uint32_t own = i / TILES, row0 = i % TILES * 16;
        if (matrix_of(p, at, own) < 0) {
            continue;
        }
        const uint32_t queries = ps_shared_address(q + own * of_q), ups = ps_shared_address(up + own * of_v);
        char *const keys = k + own * of_q + row0 * 16, *const values = v + own * of_v + row0 * 16;
        float s[2 * TILES][4], g[2 * TILES][4];
        ps_attention_scores<T, TILES>(s, zero, ps_shared_address(keys), queries, p.of_q.chunks, p.chunk, p.chunk);
#pragma unroll
        for (int j = 0; j < 2 * TILES; j++) {
            const float2 there = *(const float2 *)(logsum + own * ROWS + j * 8 + lane % 4 * 2);
            const float2 less = *(const float2 *)(delta + own * ROWS + j * 8 + lane % 4 * 2);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                s[j][2 * r] = ps_exp2(fmaf(s[j][2 * r], factor, -there.x));
                s[j][2 * r + 1] = ps_exp2(fmaf(s[j][2 * r + 1], factor, -there.y));
                g[j][2 * r] = -less.x;
                g[j][2 * r + 1] = -less.y;
            }
        }
        ps_attention_scores<T, TILES>(g, g, ps_shared_address(values), ups, p.of_v.chunks, p.chunk, p.chunk);
#pragma unroll
        for (int j = 0; j < 8 * TILES; j++) {
            g[j / 4][j % 4] *= s[j / 4][j % 4];
        }
        uint32_t weights[TILES][4], gradients[TILES][4];
        ps_attention_round<T, TILES>(weights, s);
        ps_attention_round<T, TILES>(gradients, g);
        char *const to = d + own * OF_D + row0 * 16 + lane * 4;
#pragma unroll
        for (int j = 0; j < 4 * TILES; j++) { /* nothing of what is no key */
            const bool key = row0 + lane / 4 + j % 2 * 8 < (uint32_t)p.x.patches;
            *(uint32_t *)(to + j / 2 * BLOCK + j % 2 * 128) = key ? gradients[j / 4][j % 4] : 0;
        }
        __syncwarp(); /* all have read the values, whose place dv takes */
        ps_attention_mixed<T, TILES>(values, weights, ups, 1.0f, 1.0f, p.of_v.chunks, p.chunk);
        ps_attention_mixed<T, TILES>(mixed + own * of_q + row0 * 16, gradients, queries, p.x.scale, p.x.scale, p.of_q.chunks,
                                     p.chunk);
    }
    __syncthreads();
    put<T, ROWS, WIDE>(p.x.dv, v, of_v, false, p, at, unit_v);
    put<T, ROWS, WIDE>(p.x.dk, mixed, of_q, p.x.accumulate, p, at, unit_q);
#pragma unroll 1
    for (uint32_t i = threadIdx.x / 32; i < matrices * TILES; i += blockDim.x / 32) { /* 16 queries: dq, in q's place */
        const uint32_t own = i / TILES, row0 = i % TILES * 16;
        if (matrix_of(p, at, own) < 0) {
            continue;
        }
        const uint32_t from =
            ps_shared_address(d + own * OF_D) + (row0 / 8 + lane / 8 % 2) * BLOCK + (lane / 16 * 8 + lane % 8) * 16;
        uint32_t gradients[TILES][4];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            ps_ldmatrix4_transposed_at(gradients[j], from + j * 256);
        }
        ps_attention_mixed<T, TILES>(q + own * of_q + row0 * 16, gradients, ps_shared_address(k + own * of_q), p.x.scale, p.x.scale,
                                     p.of_q.chunks, p.chunk);
    }
    __syncthreads();
    put<T, ROWS, WIDE>(p.x.dq, q, of_q, p.x.accumulate, p, at, unit_q);
}

/* ---- launching ---- */

bool ps_cuda_attention_short16_wanted(const struct ps_kernels *k, const struct ps_attention_call *call)
{
    return k->real != PS_F32 && call->x.patches <= 64;
}

static struct sweep sweep_of(int columns, int elements, int heads, int threads)
{
    const int units = columns / elements;
    return {(uint32_t)columns, (uint32_t)(columns + 7) / 8, ps_divisor_make(units), ps_divisor_make(units * heads),
            (uint32_t)(threads / (units * heads))};
}

template <typename T, int TILES, bool WIDE>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x, bool backward)
{
    constexpr int ROWS = 16 * TILES;
    const int elements = x.unit / 2, sequences = (int)(x.matrices / x.heads);
    const int of_q = (x.columns + 7) / 8, of_v = (x.e + 7) / 8; /* chunks */
    const auto bytes = [&](int chunk) {
        return backward ? (3 * of_q + 2 * of_v) * chunk + 2 * TILES * ROWS * 16 + 2 * ROWS * 4 : (2 * of_q + of_v) * chunk;
    };
    /* Heads that fill 64 bytes of a row, as far as the block has room; then sequences. */
    const int room = std::max(1, std::min(BYTES_TAKEN / bytes(ROWS * 16 + 16), TILES_TAKEN / TILES));
    const int most = std::max(1, std::min({x.heads, 32 / x.e, room, UNITS / (x.columns / elements)}));
    const int groups = (x.heads + most - 1) / most, group = (x.heads + groups - 1) / groups;
    const int taken = std::min(sequences, std::max(1, room / group)), tiles = taken * group * TILES;
    const int threads = tiles % 4 != 0 && tiles % 3 == 0 && x.columns / elements <= FEWEST ? FEWEST : THREADS;
    struct short16 p = {x, sweep_of(x.columns, elements, group, threads), sweep_of(x.e, elements, group, threads)};
    p.groups = ps_divisor_make(groups);
    p.group = ps_divisor_make(group);
    p.piece = ps_divisor_make(x.e);
    p.sequences = (uint32_t)sequences;
    p.taken = (uint32_t)taken;
    /* Units that a quarter of a warp brings at once lie in different banks. */
    const uint32_t side_by_side = p.of_q.across.divisor;
    p.chunk = ROWS * 16 + (side_by_side > 4 ? 16 : side_by_side > 2 ? 32 : side_by_side > 1 ? 64 : 0);
    const int shared = bytes((int)p.chunk) * group * taken;
    const auto kernel = backward ? backward_kernel<T, TILES, WIDE> : forward_kernel<T, TILES, WIDE>;
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), op));
    ps_cuda_launch(c, kernel, (unsigned)groups * ps_cuda_blocks(sequences, taken), (unsigned)threads, (size_t)shared, p);
    PS_CUDA_LAUNCHED(op);
}

template <typename T, int TILES>
static enum ps_status launch_rows(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                  bool backward)
{
    return x.unit == 16 ? launch<T, TILES, true>(c, op, x, backward) : launch<T, TILES, false>(c, op, x, backward);
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
