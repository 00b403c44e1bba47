/* attention/long16.cu's backward by wgmma of 65 to 128 patches, in one kernel: a block of two warpgroups has a head, or two of 8
 * columns that lie side by side, whole in shared memory, where the copy engine brings it; a warpgroup has 64 keys. With scores
 * turned, keys by 32 or 64 queries at a time, weights and gradients, rounded, are dv's and dk's left operands as they lie in
 * registers; the gradients go to shared memory too, from where, read across, they are dq's, of which a warpgroup has 64 queries.
 * Residual attention's pieces add to the same scores, and each has its dk and dq; the copy engine has L2 add these to what is
 * there. Blocks of narrow heads stay, and bring the next heads beside the present ones.
 *
 * Two heads of 8 columns are one operand of 16: the left one's columns of the other head are zeros, and of sums that have both
 * heads' columns one's are kept.
 *
 * Bytes: 16 S h N e, and the sums. With 128 keys, N in whole 32 and e in whole 16: S h 128 N exponentials, FLOPs 10 S h 128 N e.
 * 128 patches, heads of 8: a head takes a multiprocessor's exponentials' unit 1,024 clocks, its schedulers some 1,300, its tensor
 * cores, at 16 clocks for 64 by 16 by 16, 1,000; heads of 40 take products of 1,730 clocks. 116 patches, heads of 8, 2,576
 * matrices: instructions of 15 us at 1.75 GHz beside 38 MB, 9 us at 4.2 TB/s; 125 patches, heads of 40, 1,764 matrices: 141 MB, 34
 * us. */
#ifndef PS_KERNELS_CUDA_LONG16_WHOLE_CUH
#define PS_KERNELS_CUDA_LONG16_WHOLE_CUH

#include <algorithm>

#include "kernels/cuda/attention/boxes16.cuh"
#include "kernels/cuda/attention/long16_rows.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

/* Rows of a box, threads; bytes of a matrix of gradients: two panels of 64 queries. */
enum { WHOLE_ROWS = 128, WHOLE_THREADS = 256, WHOLE_GRADIENTS = 2 * WHOLE_ROWS * 128 };

struct whole {
    CUtensorMap q, k, v, mixed, up, dq, dk, dv; /* [columns, heads, N, S, pieces]; of one head if two share a box. up: d_mixed */
    struct ps_attention_launch x;
    struct ps_divisor groups; /* blocks of a sequence */
    uint32_t group, units;    /* heads of a block at a time, and how many such there are */
};

/* E: columns of a head, in whole 16. Its boxes, of W bytes a row, and a tensor's bytes. */
template <int E> struct whole_box {
    static constexpr int W = E > 32 ? 128 : 2 * E, PANELS = (2 * E + W - 1) / W, PANEL = WHOLE_ROWS * W, TENSOR = PANELS * PANEL;
};

/* A block's heads, one or two, and their boxes. */
template <int E> struct whole_block {
    const struct whole &p;
    uint32_t sequence, first, heads;
    int64_t matrix; /* the first head's */

    __device__ __forceinline__ whole_block(const struct whole &told, uint32_t unit) : p(told)
    {
        sequence = ps_divide(unit, p.groups);
        first = (unit - sequence * p.groups.divisor) * p.group;
        heads = min(p.group, (uint32_t)p.x.heads - first);
        matrix = (int64_t)sequence * p.x.heads + first;
    }
    /* act with each box of a tensor, its place and coordinates. */
    template <class F> __device__ __forceinline__ void each(uint32_t all, int pieces, F act) const
    {
        typedef whole_box<E> box;
        for (int i = 0; i < pieces * box::PANELS; i++) {
            act(all + i * box::PANEL, p.group > 1 ? (int)first * 8 : i % box::PANELS * (box::W / 2), p.group > 1 ? 0 : (int)first,
                i / box::PANELS);
        }
    }
    /* By one thread: a tensor to shared memory, and back, or added to what is there. */
    __device__ __forceinline__ void bring(uint32_t to, const CUtensorMap *map, int pieces, uint32_t barrier) const
    {
        each(to, pieces, [&](uint32_t there, int column, int head, int piece) {
            ps_tensor_copy5(there, map, column, head, 0, (int)sequence, piece, barrier);
        });
    }
    __device__ __forceinline__ void put(const CUtensorMap *map, uint32_t from, int pieces, bool add) const
    {
        each(from, pieces, [&](uint32_t there, int column, int head, int piece) {
            if (add) {
                ps_tensor_add5(map, there, column, head, 0, (int)sequence, piece);
            } else {
                ps_tensor_store5(map, there, column, head, 0, (int)sequence, piece);
            }
        });
    }
};

/* Blocks of a multiprocessor, as registers allow. */
template <int E, int PIECES> static constexpr int whole_blocks = E <= 64 && E *PIECES <= 64 ? 2 : 1;

/* Whether a block's next heads are brought beside its present ones, as shared memory allows. */
template <int E> static constexpr bool whole_ahead = E == 16;

/* Tiles of 16 queries at a time, as registers allow. */
template <int E, int PIECES> static constexpr int whole_tiles = PIECES == 1 && E <= 32 ? 4 : 2;

/* An operand in boxes of W bytes a row, as one number (ps_wgmma_further). */
template <int W> static __device__ __forceinline__ uint64_t whole_operand(uint32_t address)
{
    constexpr uint32_t EXCHANGED = W == 128 ? 1 : W == 64 ? 2 : 3;
    uint64_t operand = (uint64_t)(EXCHANGED << 30 | 8 * W >> 4) << 32 | ps_wgmma_place(address);
    asm("" : "+l"(operand));
    return operand;
}

/* sum [64, E] += a [64, 16] times 16 rows of b, read across, a panel after the other. */
template <typename T, int E, int ACROSS, class A>
static __device__ __forceinline__ void whole_mix(float (&sum)[E / 8][4], const A &a, uint64_t rows, int further, int add)
{
    typedef whole_box<E> box;
    constexpr int FIRST = E > 64 ? 64 : E, REST = E - FIRST;
    const auto one = [&](auto &part, int panel) {
        const uint64_t b = ps_wgmma_further(rows, panel * box::PANEL + further);
        if constexpr (ACROSS) {
            ps_wgmma<T, 1, 1>(part, a, b, add);
        } else {
            ps_wgmma<T, 1>(part, a, b, add);
        }
    };
    one((float(&)[FIRST / 8][4]) sum[0], 0);
    if constexpr (REST > 0) {
        one((float(&)[REST / 8][4]) sum[FIRST / 8], 1);
    }
}

/* 16 rows of up to 16 columns of each piece as operands: of two heads of 8 columns one's. */
template <int PIECES>
static __device__ __forceinline__ void whole_hold(uint32_t (&to)[PIECES][4], uint32_t rows, bool half, bool odd)
{
    typedef whole_box<16> box;
    const uint32_t lane = threadIdx.x % 32, low = odd ? 0 : ~0u, high = half && !odd ? 0 : ~0u;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const ps_boxed<box::W> from = {rows + i * box::TENSOR, 0, 1, box::PANEL};
        ps_ldmatrix4_at(to[i], from.lane(lane % 16, lane / 16));
        to[i][0] &= low;
        to[i][1] &= low;
        to[i][2] &= high;
        to[i][3] &= high;
    }
}

/* sum [64, 8 TILES] = rows of a times rows of b, over all pieces' columns; of heads of up to 16 columns a is in registers; ONTO:
 * added. Under way. */
template <typename T, int E, bool ONTO, int TILES, int PIECES>
static __device__ __forceinline__ void whole_scores(float (&sum)[TILES][4], const uint32_t (&held)[PIECES][4], uint32_t a,
                                                    uint64_t b)
{
    typedef whole_box<E> box;
    const uint64_t of_a = whole_operand<box::W>(a);
    ps_wgmma_begin();
#pragma unroll
    for (int i = 0; i < PIECES * E / 16; i++) {
        const int piece = i / (E / 16), step = i % (E / 16), further = piece * box::TENSOR + step / 4 * box::PANEL + step % 4 * 32;
        if constexpr (E == 16) {
            ps_wgmma<T>(sum, held[piece], ps_wgmma_further(b, further), ONTO || i > 0);
        } else {
            ps_wgmma<T>(sum, ps_wgmma_further(of_a, further), ps_wgmma_further(b, further), ONTO || i > 0);
        }
    }
    ps_wgmma_commit();
}

/* A head's sums, times factors of the lane's two rows, in the place of the warp's 16; odd: of two heads of 8 columns that have the
 * sums, the second. */
template <typename T, int E>
static __device__ __forceinline__ void whole_put(const ps_boxed<whole_box<E>::W> &to, const float (&sum)[E / 8][4], float upper,
                                                 float lower, bool half, bool odd)
{
    if (E == 16 && half) {
        float own[1][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            own[0][i] = odd ? sum[1][i] : sum[0][i];
        }
        ps_attention_put<T, 1>(to, own, upper, lower, 1);
    } else {
        ps_attention_put<T, E / 8>(to, sum, upper, lower, E / 8);
    }
}

template <typename T, int E, int PIECES>
static __global__ void __launch_bounds__(WHOLE_THREADS, whole_blocks<E, PIECES>)
    backward_whole_kernel(const __grid_constant__ struct whole p)
{
    typedef whole_box<E> box;
    constexpr int W = box::W, TENSOR = box::TENSOR, PANEL = box::PANEL;
    extern __shared__ __align__(1024) char whole_memory[];
    constexpr bool AHEAD = whole_ahead<E>;
    constexpr uint32_t OF_MIXED = (2 * PIECES + 2) * TENSOR, STAGE = OF_MIXED + AHEAD * TENSOR;
    /* What is brought, once or twice; then gradients, [2 panels of 64 queries][128 keys], which have mixed before where it is once.
     */
    const uint32_t brought = ps_shared_address(whole_memory), gradients_at = brought + (1 + AHEAD) * STAGE;
    /* Of each head, negative: of every two queries delta twice, as sums begin with it; the logarithms to the base of 2. */
    float4 *const deltas = (float4 *)(whole_memory + (1 + AHEAD) * STAGE + WHOLE_GRADIENTS);
    float *const logsums = (float *)(deltas + p.group * (WHOLE_ROWS / 2));
    const uint32_t barrier = ps_shared_address(logsums + p.group * WHOLE_ROWS);
    ps_grid_begin();
    const auto bring = [&](uint32_t unit, uint32_t turn) {
        if (unit < p.units) {
            const struct whole_block<E> at(p, unit);
            const uint32_t q = brought + turn * STAGE, there = barrier + turn * 8;
            ps_mbarrier_expect(there, (2 * PIECES + 3) * TENSOR);
            at.bring(q + (2 * PIECES + 1) * TENSOR, &p.up, 1, there);
            at.bring(q + OF_MIXED, &p.mixed, 1, there);
            at.bring(q + PIECES * TENSOR, &p.k, PIECES, there);
            at.bring(q, &p.q, PIECES, there);
            at.bring(q + 2 * PIECES * TENSOR, &p.v, 1, there);
        }
    };
    if (threadIdx.x == 0) { /* in one branch: apart, racecheck takes the barriers' words for those of other lanes */
        ps_mbarrier_init(barrier, 1);
        ps_mbarrier_init(barrier + 8, 1);
        ps_mbarrier_publish();
        bring(blockIdx.x, 0);
        if (AHEAD) {
            bring(blockIdx.x + gridDim.x, 1);
        }
    }
    __syncthreads();
    const float factor = p.x.scale * PS_LOG2_E;
    const uint32_t lane = threadIdx.x % 32, count = (uint32_t)p.x.patches, chunks = (uint32_t)p.x.e / 8,
                   shift = W == 32   ? chunks - 1
                           : W == 64 ? 2
                                     : 3;
    const uint32_t id = threadIdx.x / 128, row0 = threadIdx.x / 32 * 16; /* of keys; of queries too, in the end */
    const bool half = E == 16 && chunks == 1;
    /* A row a thread: two heads have 256. */
    const uint32_t of_head = threadIdx.x / WHOLE_ROWS, query = threadIdx.x % WHOLE_ROWS;
    uint32_t turn = 0;
#pragma unroll 1
    for (uint32_t unit_of_all = blockIdx.x; unit_of_all < p.units; unit_of_all += gridDim.x, turn++) {
        const struct whole_block<E> at(p, unit_of_all);
        const uint32_t q = brought + (AHEAD ? turn % 2 * STAGE : 0), k = q + PIECES * TENSOR, v = k + PIECES * TENSOR,
                       up = v + TENSOR;
        const int64_t own_sum = (at.matrix + of_head) * count + query;
        const bool there = of_head < at.heads && query < count;
        const float logsum = there ? p.x.logsum[own_sum] * -PS_LOG2_E : -INFINITY; /* a weight of 0 */
        ps_mbarrier_wait(barrier + (AHEAD ? turn % 2 * 8 : 0), AHEAD ? turn / 2 % 2 : 0);
        if (of_head < at.heads) {
            const ps_boxed<W> a = {q + OF_MIXED, of_head << shift, shift, PANEL}, b = {up, of_head << shift, shift, PANEL};
            const uint32_t of_a = a.lane(query, 0), of_b = b.lane(query, 0);
            const float delta = ps_attention_row_product<T>(a, of_a, b, of_b, chunks);
            float *const to = (float *)(deltas + threadIdx.x / 2) + threadIdx.x % 2;
            to[0] = to[2] = -delta;
            logsums[threadIdx.x] = logsum;
            if (there) {
                p.x.delta[own_sum] = delta;
            }
        }
        __syncthreads();
        if (AHEAD && threadIdx.x == 0 && turn > 0) { /* in the place of the unit before, whose results have left */
            ps_bulk_wait_read();
            bring(unit_of_all + gridDim.x, (turn + 1) % 2);
        }
#pragma unroll 1
        for (uint32_t head = 0; head < at.heads; head++) {
            const bool odd = half && head % 2 != 0;
            const uint32_t unit = head << shift;
            float dv[E / 8][4], dk[PIECES][E / 8][4];
            uint32_t keys[PIECES][4], values[1][4]; /* as operands, of heads of up to 16 columns */
            if constexpr (E == 16) {
                whole_hold<PIECES>(keys, k + row0 * W, half, odd);
                whole_hold<1>(values, v + row0 * W, half, odd);
            }
            ps_zero(dv);
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                ps_zero(dk[i]);
            }
            const auto take = [&](auto count_of_tiles, uint32_t query0) {
                constexpr int TILES = decltype(count_of_tiles)::value; /* of 16 queries */
                float s[2 * TILES][4], g[2 * TILES][4];
                uint32_t weights[TILES][4], gradients[TILES][4];
                const uint64_t queries = whole_operand<W>(q + query0 * W), ups = whole_operand<W>(up + query0 * W);
                const uint32_t first = head * WHOLE_ROWS + query0;
                whole_scores<T, E, false>(s, keys, k + id * 64 * W, queries);
#pragma unroll
                for (int j = 0; j < 2 * TILES; j++) {
                    *(float4 *)g[j] = deltas[first / 2 + j * 4 + lane % 4];
                }
                whole_scores<T, E, true>(g, values, v + id * 64 * W, ups);
                ps_wgmma_wait<1>();
                ps_pin(s);
#pragma unroll
                for (int j = 0; j < 2 * TILES; j++) {
                    const float2 less = *(const float2 *)(logsums + first + j * 8 + lane % 4 * 2);
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        s[j][r] = ps_exp2(fmaf(s[j][r], factor, r % 2 ? less.y : less.x));
                    }
                }
                ps_wgmma_wait<0>();
                ps_pin(g);
#pragma unroll
                for (int j = 0; j < 8 * TILES; j++) {
                    g[j / 4][j % 4] *= s[j / 4][j % 4];
                }
                ps_attention_round<T, TILES>(weights, s);
                ps_attention_round<T, TILES>(gradients, g);
                if (row0 + 16 > count) { /* nothing of what is no key */
                    const bool upper = row0 + lane / 4 < count, lower = row0 + lane / 4 + 8 < count;
#pragma unroll
                    for (int j = 0; j < 4 * TILES; j++) {
                        gradients[j / 4][j % 4] = (j % 2 ? lower : upper) ? gradients[j / 4][j % 4] : 0;
                    }
                }
                ps_wgmma_begin();
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    whole_mix<T, E, 0>(dv, weights[j], ups, j * 16 * W, 1);
                }
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
#pragma unroll
                    for (int j = 0; j < TILES; j++) {
                        whole_mix<T, E, 0>(dk[i], gradients[j], queries, i * TENSOR + j * 16 * W, 1);
                    }
                }
                ps_wgmma_commit();
                const ps_boxed<128> to = {gradients_at + query0 / 64 * (WHOLE_GRADIENTS / 2) + row0 * 128, 0, 3, 0};
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    ps_attention_store<2>(to, gradients[j], query0 % 64 / 8 + 2 * j);
                }
                ps_wgmma_wait<0>();
                ps_pin(dv);
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    ps_pin(dk[i]);
                }
                ps_pin(weights);
                ps_pin(gradients);
            };
            constexpr int MOST = whole_tiles<E, PIECES>;
#pragma unroll 1
            for (uint32_t query0 = 0; query0 < count; query0 += MOST * 16) {
                if (MOST == 2 || query0 + 32 < count) {
                    take(std::integral_constant<int, MOST>(), query0);
                } else {
                    take(std::integral_constant<int, 2>(), query0);
                }
            }
            ps_publish();
            __syncthreads(); /* all gradients are there, all queries are read */
            float dq[PIECES][E / 8][4];
            const uint64_t left = whole_operand<128>(gradients_at + id * (WHOLE_GRADIENTS / 2)), right = whole_operand<W>(k);
            ps_wgmma_begin();
#pragma unroll
            for (int j = 0; j < WHOLE_ROWS / 16; j++) {
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    whole_mix<T, E, 1>(dq[i], ps_wgmma_further(left, j * 16 * 128), right, i * TENSOR + j * 16 * W, j > 0);
                }
            }
            ps_wgmma_commit();
            whole_put<T, E>({v + row0 * W, unit, shift, PANEL}, dv, 1.0f, 1.0f, half, odd);
            ps_wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                ps_pin(dq[i]);
                whole_put<T, E>({q + i * TENSOR + row0 * W, unit, shift, PANEL}, dq[i], p.x.scale, p.x.scale, half, odd);
            }
            __syncthreads(); /* all keys and gradients are read */
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                whole_put<T, E>({k + i * TENSOR + row0 * W, unit, shift, PANEL}, dk[i], p.x.scale, p.x.scale, half, odd);
            }
        }
        ps_publish();
        __syncthreads();
        if (threadIdx.x == 0) {
            at.put(&p.dv, v, 1, false);
            at.put(&p.dq, q, PIECES, p.x.accumulate);
            at.put(&p.dk, k, PIECES, p.x.accumulate);
            ps_bulk_commit();
        }
        if (!AHEAD) { /* a block a unit */
            break;
        }
    }
    if (threadIdx.x == 0) {
        ps_bulk_wait_read();
    }
}

/* ---- launching ---- */

template <typename T, int E, int PIECES>
static enum ps_status launch_whole(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    struct whole p = {};
    const struct {
        CUtensorMap *map;
        const struct ps_attention_view *view;
        int pieces;
    } all[] = {{&p.mixed, &x.mixed, 1}, {&p.q, &x.q, PIECES},   {&p.k, &x.k, PIECES}, {&p.v, &x.v, 1},
               {&p.dq, &x.dq, PIECES},  {&p.dk, &x.dk, PIECES}, {&p.dv, &x.dv, 1},    {&p.up, &x.d_mixed, 1}};
    bool side_by_side = x.e == 8 && x.heads > 1;
    for (const auto &tensor : all) {
        side_by_side = side_by_side && tensor.view->head == x.e;
    }
    p.x = x;
    p.group = side_by_side ? 2 : 1;
    p.groups = ps_divisor_make((x.heads + (int)p.group - 1) / (int)p.group);
    for (const auto &tensor : all) {
        PS_TRY((ps_attention_map<T, whole_box<E>::W>(tensor.map, *tensor.view, x, tensor.pieces, side_by_side, WHOLE_ROWS, 1)));
    }
    p.units = (uint32_t)(x.matrices / x.heads) * p.groups.divisor;
    constexpr bool AHEAD = whole_ahead<E>;
    const int shared = (1 + AHEAD) * (2 * PIECES + 2 + AHEAD) * whole_box<E>::TENSOR + WHOLE_GRADIENTS +
                       (int)p.group * WHOLE_ROWS * 3 * (int)sizeof(float) + 2 * (int)sizeof(uint64_t);
    const unsigned most = AHEAD ? (unsigned)(c->multiprocessors * whole_blocks<E, PIECES>) : p.units;
    const auto kernel = backward_whole_kernel<T, E, PIECES>;
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, (size_t)shared, op));
    ps_cuda_launch(c, kernel, std::min(most, (unsigned)p.units), WHOLE_THREADS, (size_t)shared, p);
    PS_CUDA_LAUNCHED(op);
}

template <typename T, int E>
static enum ps_status launch_whole(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    return x.pieces == 1   ? launch_whole<T, E, 1>(c, op, x)
           : x.pieces == 2 ? launch_whole<T, E, 2>(c, op, x)
                           : launch_whole<T, E, 3>(c, op, x);
}

template <typename T>
enum ps_status ps_long16_whole(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x)
{
    return x.e <= 16   ? launch_whole<T, 16>(c, op, x)
           : x.e <= 32 ? launch_whole<T, 32>(c, op, x)
           : x.e <= 48 ? launch_whole<T, 48, 1>(c, op, x)
           : x.e <= 64 ? launch_whole<T, 64, 1>(c, op, x)
           : x.e <= 96 ? launch_whole<T, 96, 1>(c, op, x)
                       : launch_whole<T, 128, 1>(c, op, x);
}

template enum ps_status ps_long16_whole<ps_bf16>(const struct ps_cuda_context *, const char *, const struct ps_attention_launch &);
template enum ps_status ps_long16_whole<ps_fp16>(const struct ps_cuda_context *, const char *, const struct ps_attention_launch &);

#endif
