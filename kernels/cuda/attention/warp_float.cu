/* Attention of short sequences and narrow heads in float32: a warp has a matrix to itself, and its scores never leave the
 * registers. Tiles of 64 by 64 (attention/tiled.cu) are half empty at 42 patches, and at heads of 8 their time goes into shared
 * memory.
 *
 * All products are mma.m16n8k8 of tf32. A tile of scores as it comes out, 16 rows by 8 columns, two neighbouring columns a lane, is
 * the left operand of the next product as it stands when that sums its rows in the order 0, 2, 4, 6, 1, 3, 5, 7; so rows of q, k, v
 * are read as 8 bytes a lane, or by two lanes of neighbouring rows, both whole sectors of global memory. Backward takes 16 queries
 * at a time; dk and dv want the tiles turned, which go through shared memory for that (computing them again by rows of keys took a
 * quarter more time).
 *
 * exact (fp32): three products of operands split into hi, the nearest tf32, and lo, the rest (2^-23 of x stay out); the tensor
 * cores' sums, which are cut off and not rounded, run over one step of 8, and FADD adds the steps. Else (tf32) operands are
 * rounded to nearest.
 *
 * Bytes: 4 S h N e elements and S h N sums forward, 8 S h N e and 3 S h N backward. Tensor FLOPs, padded to 16 and 8: 4 and 10
 * S h N^2 e, three times that where exact. 42 patches, heads of 8, 43,008 matrices: 231 and 462 MB, 55 and 110 us at 4.2 TB/s; in
 * tf32 about 1,200 and 2,200 instructions a matrix, 55 and 100 us at one a clock of each scheduler. Measured in tf32 85 and 201 us:
 * what is short is warps to hide the waits, for the operands of a matrix take 77 to 128 registers a lane. */
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/reduce.cuh"

enum { WARPS = 4, THREADS = WARPS * 32 };

/* The left operand, 16 rows by 8 ET elements, and the right one, 8 by 8 ET: by element of the sum, or by column. */
template <int ET> struct left {
    uint32_t hi[ET][4], lo[ET][4];
};

template <int ET> struct right {
    uint32_t hi[ET][2], lo[ET][2];
};

/* Of KT tiles of 8 rows, the first so many are whole at every N that KT is taken for (launch_size). */
template <int KT> static constexpr int whole_tiles = KT <= 2 ? KT - 1 : KT - 2;

/* One matrix of a tensor: rows of e elements, e even. The lane's own elements, by what it is read for; an address is one
 * multiplication and addition. */
struct rows {
    const char *pairs, *ones, *ordered_ones; /* of row g, from column 2q; of row 2q and of row q, column g */
    uint32_t stride;                         /* bytes */
    int count, e, g, q;

    __device__ __forceinline__ rows(const struct ps_attention_view &v, int sequence, int head, const struct ps_attention_launch &x)
        : stride((uint32_t)v.row * (uint32_t)sizeof(float)), count(x.patches), e(x.e), g((int)threadIdx.x % 32 / 4),
          q((int)threadIdx.x % 4)
    {
        const char *const data = (const char *)((const float *)v.data + sequence * v.sequence + head * v.head);
        pairs = data + (g * stride + q * 8);
        ones = data + (q * 2 * stride + g * 4);
        ordered_ones = data + (q * stride + g * 4);
        asm("" : "+l"(pairs)); /* found once: the compiler would do so at each load */
        asm("" : "+l"(ones));
        asm("" : "+l"(ordered_ones));
    }
    /* Of row + g: columns 2q and 2q + 1 of 8. whole: all eight rows are there. */
    __device__ __forceinline__ float2 pair(int row, int column, bool whole = false) const
    {
        float2 v = make_float2(0, 0);
        if ((whole || g < count - row) && q * 2 < e - column) {
            v = __ldg((const float2 *)(pairs + (uint64_t)(uint32_t)row * stride + column * 4));
        }
        return v;
    }
    /* Of rows row + 2q + i: column g of 8. */
    __device__ __forceinline__ float one(int row, int i, int column, bool whole = false) const
    {
        float v = 0;
        if ((whole || q * 2 < count - row - i) && g < e - column) {
            v = __ldg((const float *)(ones + (uint64_t)(uint32_t)(row + i) * stride + column * 4));
        }
        return v;
    }
    /* Of row + q: column g of 8. */
    __device__ __forceinline__ float ordered(int row, int column) const
    {
        float v = 0;
        if (q < count - row && g < e - column) {
            v = __ldg((const float *)(ordered_ones + (uint64_t)(uint32_t)row * stride + column * 4));
        }
        return v;
    }
};

/* Rows row0 + g and row0 + g + 8, two elements of every 8. */
template <int ET> static __device__ __forceinline__ void read(float2 (&to)[ET][2], const struct rows &from, int row0)
{
#pragma unroll
    for (int t = 0; t < ET; t++) {
        to[t][0] = from.pair(row0, t * 8);
        to[t][1] = from.pair(row0 + 8, t * 8);
    }
}

template <bool EXACT, int ET> static __device__ __forceinline__ void split_left(struct left<ET> &to, const float2 (&from)[ET][2])
{
#pragma unroll
    for (int t = 0; t < ET; t++) {
        ps_split<EXACT>(to.hi[t][0], to.lo[t][0], from[t][0].x);
        ps_split<EXACT>(to.hi[t][1], to.lo[t][1], from[t][1].x);
        ps_split<EXACT>(to.hi[t][2], to.lo[t][2], from[t][0].y);
        ps_split<EXACT>(to.hi[t][3], to.lo[t][3], from[t][1].y);
    }
}

/* A tile that a product gave, as a left operand. */
template <bool EXACT> static __device__ __forceinline__ void split_tile(struct left<1> &to, const float (&from)[4])
{
    ps_split<EXACT>(to.hi[0][0], to.lo[0][0], from[0]);
    ps_split<EXACT>(to.hi[0][1], to.lo[0][1], from[2]);
    ps_split<EXACT>(to.hi[0][2], to.lo[0][2], from[1]);
    ps_split<EXACT>(to.hi[0][3], to.lo[0][3], from[3]);
}

/* All rows, turned: columns of the product are rows, its sum is over elements. */
template <bool EXACT, int ET, int KT>
static __device__ __forceinline__ void read_turned(struct right<ET> (&to)[KT], const struct rows &from)
{
#pragma unroll
    for (int j = 0; j < KT; j++) {
#pragma unroll
        for (int t = 0; t < ET; t++) {
            const float2 v = from.pair(j * 8, t * 8, j < whole_tiles<KT>);
            ps_split<EXACT>(to[j].hi[t][0], to[j].lo[t][0], v.x);
            ps_split<EXACT>(to[j].hi[t][1], to[j].lo[t][1], v.y);
        }
    }
}

/* All rows as they are: the sum is over rows, 8 of them an entry. */
template <bool EXACT, int ET, int KT>
static __device__ __forceinline__ void read_summed(struct right<ET> (&to)[KT], const struct rows &from)
{
#pragma unroll
    for (int j = 0; j < KT; j++) {
#pragma unroll
        for (int t = 0; t < ET; t++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ps_split<EXACT>(to[j].hi[t][i], to[j].lo[t][i], from.one(j * 8, i, t * 8, j < whole_tiles<KT>));
            }
        }
    }
}

/* Rows row0 .. row0 + 15 as they are, 8 of them an entry, in their order. */
template <bool EXACT, int ET>
static __device__ __forceinline__ void read_queries(struct right<ET> (&to)[2], const struct rows &from, int row0)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int t = 0; t < ET; t++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ps_split<EXACT>(to[h].hi[t][i], to[h].lo[t][i], from.ordered(row0 + h * 8 + i * 4, t * 8));
            }
        }
    }
}

/* A tile of scores: rows of a, 8 rows of b. */
template <bool EXACT, int ET>
static __device__ __forceinline__ void scores(float (&s)[4], const struct left<ET> &a, const struct right<ET> &b)
{
    ps_mma_split<EXACT, false>(s, a.hi[0], a.lo[0], b.hi[0], b.lo[0]);
#pragma unroll
    for (int t = 1; t < ET; t++) {
        ps_mma_split<EXACT, true>(s, a.hi[t], a.lo[t], b.hi[t], b.lo[t]);
    }
}

/* sum += a tile times 8 rows. */
template <bool EXACT, int ET>
static __device__ __forceinline__ void add(float (&sum)[ET][4], const struct left<1> &a, const struct right<ET> &b)
{
#pragma unroll
    for (int t = 0; t < ET; t++) {
        ps_mma_split<EXACT, true>(sum[t], a.hi[0], a.lo[0], b.hi[t], b.lo[t]);
    }
}

template <int ET> static __device__ __forceinline__ void clear(float (&sum)[ET][4])
{
#pragma unroll
    for (int i = 0; i < ET * 4; i++) {
        sum[i / 4][i % 4] = 0.0f;
    }
}

/* Rows row0 + g times the first factor, row0 + g + 8 times the second. */
template <int ET>
static __device__ __forceinline__ void put(const struct ps_attention_view &v, int sequence, int head, int row0,
                                           const float (&sum)[ET][4], float upper, float lower, const struct ps_attention_launch &x)
{
    const int g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
    const int stride = (int)v.row;
    float *const to = (float *)v.data + sequence * v.sequence + head * v.head + row0 * stride + (g * stride + q * 2);
#pragma unroll
    for (int t = 0; t < ET; t++) {
        const int column = t * 8 + q * 2;
        if (column < x.e && row0 + g < x.patches) {
            *(float2 *)(to + t * 8) = make_float2(sum[t][0] * upper, sum[t][1] * upper);
        }
        if (column < x.e && row0 + g + 8 < x.patches) {
            *(float2 *)(to + 8 * stride + t * 8) = make_float2(sum[t][2] * lower, sum[t][3] * lower);
        }
    }
}

/* e <= 8 ET, N <= 8 KT. */
template <int ET, int KT, bool EXACT>
static __global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ struct ps_attention_launch x)
{
    ps_grid_begin();
    const int g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
    const int64_t matrix = (int64_t)blockIdx.x * WARPS + (int)threadIdx.x / 32;
    if (matrix >= x.matrices) {
        return;
    }
    const int sequence = (int)matrix / x.heads, head = (int)matrix - sequence * x.heads;
    const struct rows q_rows(x.q, sequence, head, x), k_rows(x.k, sequence, head, x), v_rows(x.v, sequence, head, x);
    struct right<ET> k[KT], v[KT];
    read_turned<EXACT>(k, k_rows);
    read_summed<EXACT>(v, v_rows);
    const float factor = x.scale * PS_LOG2_E;
    float2 next[ET][2];
    read<ET>(next, q_rows, 0);
    for (int row0 = 0; row0 < x.patches; row0 += 16) {
        struct left<ET> a;
        split_left<EXACT>(a, next);
        read<ET>(next, q_rows, row0 + 16);
        float s[KT][4], out[ET][4], most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < KT; j++) {
            scores<EXACT>(s[j], a, k[j]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] = j < whole_tiles<KT> || j * 8 + i % 2 < x.patches - q * 2 ? s[j][i] * factor : -INFINITY;
                most[i / 2] = fmaxf(most[i / 2], s[j][i]);
            }
        }
        most[0] = ps_group_max<4>(most[0]); /* of a key at least: finite */
        most[1] = ps_group_max<4>(most[1]);
        clear(out);
#pragma unroll
        for (int j = 0; j < KT; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] = ps_exp2(s[j][i] - most[i / 2]);
                sum[i / 2] += s[j][i];
            }
            struct left<1> weight;
            split_tile<EXACT>(weight, s[j]);
            add<EXACT>(out, weight, v[j]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] = ps_group_sum<4>(sum[r]);
            if (q == 0 && row0 + g + r * 8 < x.patches) {
                x.logsum[matrix * x.patches + row0 + g + r * 8] = (most[r] + ps_log2(sum[r])) * (1 / PS_LOG2_E);
            }
        }
        put<ET>(x.mixed, sequence, head, row0, out, __fdividef(1.0f, sum[0]), __fdividef(1.0f, sum[1]), x);
    }
}

/* A tile of 16 queries by 8 keys, to rows of `line` floats: as products take it, rounded or, EXACT, as it is. */
template <bool EXACT>
static __device__ __forceinline__ void keep_tile(float *to, int line, const float (&tile)[4], const struct left<1> &operand)
{
    const int g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = EXACT ? tile[i] : __uint_as_float(operand.hi[0][i / 2 + i % 2 * 2]);
    }
    *(float2 *)(to + g * line + q * 2) = make_float2(v[0], v[1]);
    *(float2 *)(to + (g + 8) * line + q * 2) = make_float2(v[2], v[3]);
}

/* From there, turned, as a left operand: 16 keys by 8 queries, in their order. */
template <bool EXACT> static __device__ __forceinline__ void take_turned(struct left<1> &to, const float *from, int line)
{
    const int g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float v = from[(q + i / 2 * 4) * line + g + i % 2 * 8];
        if constexpr (EXACT) {
            ps_split<EXACT>(to.hi[0][i], to.lo[0][i], v);
        } else {
            to.hi[0][i] = __float_as_uint(v);
            to.lo[0][i] = 0;
        }
    }
}

template <int ET, int KT, bool EXACT>
static __global__ void __launch_bounds__(THREADS, ET *KT > 6 ? 1
                                                  : EXACT    ? 3
                                                          : 4) backward_kernel(const __grid_constant__ struct ps_attention_launch x)
{
    ps_grid_begin();
    /* Of 16 queries: the weights, and the gradients of the scores. Lanes of a turned operand read 32 banks. */
    constexpr int KEYS = (KT + 1) / 2, LINE = (KT * 8 + 15) / 16 * 16 + 8;
    __shared__ float tiles[WARPS][2][16 * LINE];
    const int g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
    const int64_t matrix = (int64_t)blockIdx.x * WARPS + (int)threadIdx.x / 32;
    if (matrix >= x.matrices) {
        return;
    }
    const int sequence = (int)matrix / x.heads, head = (int)matrix - sequence * x.heads;
    const struct rows q_rows(x.q, sequence, head, x), k_rows(x.k, sequence, head, x), v_rows(x.v, sequence, head, x);
    const struct rows up_rows(x.d_mixed, sequence, head, x), mixed_rows(x.mixed, sequence, head, x);
    float *const weights = tiles[threadIdx.x / 32][0], *const gradients = tiles[threadIdx.x / 32][1];
    const float factor = x.scale * PS_LOG2_E;
    struct right<ET> k[KT], v[KT], k_summed[KT];
    read_turned<EXACT>(k, k_rows);
    read_turned<EXACT>(v, v_rows);
    read_summed<EXACT>(k_summed, k_rows);
    float2 queries[ET][2], up[ET][2], mixed[ET][2];
    read<ET>(queries, q_rows, 0);
    read<ET>(up, up_rows, 0);
    read<ET>(mixed, mixed_rows, 0);
    float dk[KEYS][ET][4], dv[KEYS][ET][4];
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        clear(dk[i]);
        clear(dv[i]);
        if (KT % 2 && i == KEYS - 1) { /* keys that are in no tile */
            for (int at = (int)threadIdx.x % 32; at < 2 * 16 * 8; at += 32) {
                weights[at / 8 * LINE + KT * 8 + at % 8] = 0.0f; /* gradients follow: 16 lines more */
            }
        }
    }
    for (int row0 = 0; row0 < x.patches; row0 += 16) {
        float logsum[2], delta[2] = {0, 0}, dq[ET][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = row0 + g + r * 8;
            const bool inside = row < x.patches;
            logsum[r] = inside ? x.logsum[matrix * x.patches + row] * PS_LOG2_E : INFINITY; /* a weight of 0 */
#pragma unroll
            for (int t = 0; t < ET; t++) {
                delta[r] = fmaf(mixed[t][r].x, up[t][r].x, fmaf(mixed[t][r].y, up[t][r].y, delta[r]));
            }
            delta[r] = ps_group_sum<4>(delta[r]);
            if (q == 0 && inside) {
                x.delta[matrix * x.patches + row] = delta[r];
            }
        }
        struct left<ET> a, b;
        split_left<EXACT>(a, queries);
        split_left<EXACT>(b, up);
        struct right<ET> queries_summed[2], up_summed[2];
        read_queries<EXACT>(queries_summed, q_rows, row0);
        read_queries<EXACT>(up_summed, up_rows, row0);
        read<ET>(queries, q_rows, row0 + 16);
        read<ET>(up, up_rows, row0 + 16);
        read<ET>(mixed, mixed_rows, row0 + 16);
        clear(dq);
        __syncwarp(); /* the tiles before have been read */
#pragma unroll
        for (int j = 0; j < KT; j++) {
            float s[4], d[4];
            scores<EXACT>(s, a, k[j]);
            scores<EXACT>(d, b, v[j]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool there = j < whole_tiles<KT> || j * 8 + i % 2 < x.patches - q * 2;
                s[i] = there ? ps_exp2(fmaf(s[i], factor, -logsum[i / 2])) : 0.0f;
                d[i] = s[i] * (d[i] - delta[i / 2]);
            }
            struct left<1> weight, gradient;
            split_tile<EXACT>(weight, s);
            split_tile<EXACT>(gradient, d);
            keep_tile<EXACT>(weights + j * 8, LINE, s, weight);
            keep_tile<EXACT>(gradients + j * 8, LINE, d, gradient);
            add<EXACT>(dq, gradient, k_summed[j]);
        }
        put<ET>(x.dq, sequence, head, row0, dq, x.scale, x.scale, x);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                struct left<1> weight, gradient;
                take_turned<EXACT>(weight, weights + h * 8 * LINE + i * 16, LINE);
                take_turned<EXACT>(gradient, gradients + h * 8 * LINE + i * 16, LINE);
                add<EXACT>(dv[i], weight, up_summed[h]);
                add<EXACT>(dk[i], gradient, queries_summed[h]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        put<ET>(x.dk, sequence, head, i * 16, dk[i], x.scale, x.scale, x);
        put<ET>(x.dv, sequence, head, i * 16, dv[i], 1.0f, 1.0f, x);
    }
}

/* ---- launching ---- */

/* More would not fit the registers. */
bool ps_cuda_attention_warp_float_wanted(const struct ps_kernels *k, const struct ps_attention_call *call)
{
    const struct ps_attention_launch *x = &call->x;
    return x->pieces == 1 && !x->accumulate && k->real == PS_F32 && x->pairs &&
           ((x->e <= 8 && x->patches <= 64) || (x->e <= 16 && x->patches <= 32));
}

template <int ET, int KT, bool EXACT>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x, bool backward)
{
    ps_cuda_launch(c, backward ? backward_kernel<ET, KT, EXACT> : forward_kernel<ET, KT, EXACT>, ps_cuda_blocks(x.matrices, WARPS),
                   THREADS, 0, x);
    PS_CUDA_LAUNCHED(op);
}

template <bool EXACT>
static enum ps_status launch_size(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                  bool backward)
{
    if (x.e <= 8) {
        return x.patches <= 8    ? launch<1, 1, EXACT>(c, op, x, backward)
               : x.patches <= 16 ? launch<1, 2, EXACT>(c, op, x, backward)
               : x.patches <= 32 ? launch<1, 4, EXACT>(c, op, x, backward)
               : x.patches <= 48 ? launch<1, 6, EXACT>(c, op, x, backward)
                                 : launch<1, 8, EXACT>(c, op, x, backward);
    }
    return x.patches <= 8    ? launch<2, 1, EXACT>(c, op, x, backward)
           : x.patches <= 16 ? launch<2, 2, EXACT>(c, op, x, backward)
                             : launch<2, 4, EXACT>(c, op, x, backward);
}

static enum ps_status launch_precision(const struct ps_kernels *k, const char *op, const struct ps_attention_launch &x,
                                       bool backward)
{
    return k->precision == PS_FP32 ? launch_size<true>(ps_cuda(k), op, x, backward)
                                   : launch_size<false>(ps_cuda(k), op, x, backward);
}

enum ps_status ps_cuda_attention_warp_float(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return launch_precision(k, op, call->x, false);
}

enum ps_status ps_cuda_attention_warp_float_backward(const struct ps_kernels *k, const char *op,
                                                     const struct ps_attention_call *call)
{
    return launch_precision(k, op, call->x, true);
}
