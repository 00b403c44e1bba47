/* What encoder/resident/d16_halves.cu's kernels share: what they are told, what lies in memory between them, and BatchNorm's sums
 * over all rows, by which a layer is cut in halves: attention with W_o, and the feed-forward part. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HALVES_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HALVES_CUH

#include "kernels/cuda/encoder/embed.cuh"
#include "kernels/cuda/encoder/resident/d16_any_attention.cuh"
#include "kernels/cuda/encoder/resident/d16_hidden.cuh"

namespace ps_resident
{

/* What is kept of a layer. By rows, as stream_at has them: the sums that its norms read. By tiles of a sequence's rows, 16 by 16
 * columns of 16 bits, 16 bytes a lane in the order of an operand: q (scaled), k, v, merged, and the logarithms of softmax's sums
 * (lanes of q 0 and 2: [pair][row g, g + 8] of the pair's first head, of its second; of ANY_TILES a lane's first 8 bytes: rows g
 * and g + 8 of head q). */
enum { SLOT_SUM_1, SLOT_SUM_2, SLOT_Q, SLOT_K, SLOT_V, SLOT_MERGED, SLOT_LOGS, SLOTS };
enum { SLOT_BYTES = 512, ROW_BYTES = 32 };

/* Words of dropout's masks, one a lane and tile: after W_o (tiles of sequences), after W_2, and of the hidden values one for 64
 * columns (tiles of all rows). */
enum { MASKS_O, MASKS_Y, MASKS_HIDDEN };

/* One of BatchNorm's two in a layer. */
enum { NORM_1, NORM_2 };

struct halves {
    char *kept;      /* [layers][SLOTS][tiles] */
    char *gradient;  /* [2][tiles]: of what norm 1 gives, of the layer's input, by rows */
    char *pieces;    /* [pairs][2][tiles]: gradients that a layer has found of q and k of one below it */
    uint32_t *masks; /* [layers][MASKS_HIDDEN + f / 64][tiles][32] */
    float2 *sums;    /* [blocks][16]: the kernel's own */
    float2 *before;  /* and of the kernel before */
    int blocks, blocks_before;
    float *statistics; /* [layers][2][2][16]: mean and 1 / deviation of each norm */
    struct ahead *ahead;
    float2 *top;                        /* the sums that the kernel with the loss leaves */
    float *parameters;                  /* flat: the running ones are moved there */
    int64_t tiles;                      /* of a layer, and more: no unit or tile of a block is left out */
    int row_tiles;                      /* R / 16 */
    int layer;                          /* the kernel's */
    int training;                       /* else the running statistics serve, and nothing is kept */
    int staged;                         /* times 64 hidden columns that the backward has in shared memory at once */
    int residual;                       /* residual attention: scores of the layers below are added */
    double momentum, per_row, unbiased; /* the last two: 1 / R, 1 / (R - 1) */
    uint32_t hidden_threshold, hidden_below, hidden_minus_below; /* the encoder's are of the rows that the kernel ends with */
    float hidden_scale;
};

/* The lane's 16 bytes of a tile. */
static __device__ __forceinline__ char *slot_at(const struct halves &h, int layer, int slot, int64_t tile, int lane)
{
    return h.kept + ((int64_t)(layer * SLOTS + slot) * h.tiles + tile) * SLOT_BYTES + lane * 16;
}

/* The stream by rows, of 16 columns in 32 bytes: 8 a lane, columns 2q, 2q + 1, 2q + 8 and 2q + 9. So either kind of tile finds its
 * rows. */
template <class P> static __device__ __forceinline__ char *stream_at(const struct halves &h, int layer, int slot, const P &at)
{
    return h.kept + (int64_t)(layer * SLOTS + slot) * h.tiles * SLOT_BYTES + at.first * ROW_BYTES + at.q * 8;
}

template <class P> static __device__ __forceinline__ char *gradient_at(const struct halves &h, int which, const P &at)
{
    return h.gradient + (int64_t)which * h.tiles * SLOT_BYTES + at.first * ROW_BYTES + at.q * 8;
}

/* Pairs of a layer and one below it, in order. */
static __host__ __device__ constexpr int64_t pair_of(int layer, int below)
{
    return (int64_t)layer * (layer - 1) / 2 + below;
}

/* Those of q, and SLOT_BYTES h.tiles behind them of k. */
static __device__ __forceinline__ char *piece_at(const struct halves &h, int layer, int below, int64_t tile, int lane)
{
    return h.pieces + (pair_of(layer, below) * 2 * h.tiles + tile) * SLOT_BYTES + lane * 16;
}

template <class T>
static __device__ __forceinline__ uint32_t *halves_masks_at(const encoder<T> &x, const struct halves &h, int word, int64_t tile,
                                                            int lane)
{
    return h.masks + ((int64_t)(h.layer * (MASKS_HIDDEN + x.f / 64) + word) * h.tiles + tile) * 32 + lane;
}

/* What other kernels have left is read past L1, which knows nothing of what they write while a kernel waits for them. */
static __device__ __forceinline__ void take_left(uint32_t (&a)[4], const char *from)
{
    const uint4 v = __ldcg((const uint4 *)from);
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
}

/* The operand there, zeros in rows that do not exist. */
template <class P> static __device__ __forceinline__ void take_rows(uint32_t (&a)[4], const char *from, const P &at)
{
    take_left(a, from);
    clear_missing(a, at);
}

/* The operand of a tile's rows there, g and g + 8; zeros in those that do not exist. */
template <class P> static __device__ __forceinline__ void take_stream(uint32_t (&a)[4], const char *from, const P &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint2 v = at.here[i] ? __ldcg((const uint2 *)(from + i * 8 * ROW_BYTES)) : make_uint2(0, 0);
        a[i] = v.x, a[2 + i] = v.y;
    }
}

/* Rounded, zeros in rows that do not exist, to its place; v becomes that. */
template <class T, class P> static __device__ __forceinline__ void leave_stream(char *to, float (&v)[2][4], const P &at)
{
    uint32_t a[4];
    pack_operand<T>(a, v[0], v[1]);
    clear_missing(a, at);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (at.here[i]) {
            *(uint2 *)(to + i * 8 * ROW_BYTES) = make_uint2(a[i], a[2 + i]);
        }
    }
    unpack_operand<T>(v, a);
}

static __device__ __forceinline__ uint64_t step_at(const uint64_t *from)
{
    return __ldcg((const unsigned long long *)from);
}

/* Masks are drawn before the kernel before has ended: of the step that AdamW has left two kernels ago or more. */
template <class T> static __device__ __forceinline__ uint64_t step_of(const encoder<T> &x, bool drawn)
{
    return drawn ? step_at(&x.state->step) : 0;
}

/* What is worked out before the wait stays before it. */
static __device__ __forceinline__ void settle(uint32_t &word)
{
    asm volatile("" : "+r"(word)::"memory");
}

/* ---- BatchNorm ---- */

/* Columns' factors, in shared memory: y = x scale + shift; xhat = x rstd + centre; dx = g slope + x bend + level; and what is taken
 * off what a kernel leaves before it is squared. */
struct halves_columns {
    float scale[D], shift[D], rstd[D], centre[D], slope[D], bend[D], level[D], minus_pivot[D], one[D];
};

/* Warps of a block's units at most: up to 16 leave a thread 128 registers, 20 of them 96, more 80. */
static constexpr int halves_warps(int tiles)
{
    return tiles == 3 || tiles == ANY_TILES ? 21 : tiles == 4 ? 16 : 20;
}

/* A unit's place, of n rows. */
template <class T, int TILES> static __device__ __forceinline__ place<T, D, TILES> unit_place(int n)
{
    if constexpr (TILES == ANY_TILES) {
        return place<T, D, TILES>((n + 15) / 16);
    } else {
        return place<T, D, TILES>();
    }
}

/* Warps that a kernel has at most, and shared memory for sums over them. */
enum { MOST_WARPS = THREADS / 32 };
union halves_scratch {
    double2 merged[MOST_WARPS][D];
    float left[MOST_WARPS][2][D];
};

static __device__ __forceinline__ const float *of_column(const float *column, int t, int q)
{
    return column + t * 8 + q * 2;
}

/* v = v factor + add of the lane's columns. */
static __device__ __forceinline__ void affine(float (&v)[2][4], const float *factor, const float *add, int q)
{
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const float2 m = *(const float2 *)of_column(factor, t, q), b = *(const float2 *)of_column(add, t, q);
        v[t][0] = fmaf(v[t][0], m.x, b.x), v[t][1] = fmaf(v[t][1], m.y, b.y);
        v[t][2] = fmaf(v[t][2], m.x, b.x), v[t][3] = fmaf(v[t][3], m.y, b.y);
    }
}

/* The lane's two sums of each of its columns, 8 t + 2 q + i of [2 t + i], over the rows it has seen. */
struct halves_sums {
    float first[4], second[4];

    __device__ __forceinline__ halves_sums()
    {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            first[j] = second[j] = 0;
        }
    }
    /* v and v w of rows that exist. */
    template <class P> __device__ __forceinline__ void add(const float (&v)[2][4], const float (&w)[2][4], const P &at)
    {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float a = at.here[i % 4 / 2] ? v[i / 4][i % 4] : 0.0f;
            float &sum = first[i / 4 * 2 + i % 2], &product = second[i / 4 * 2 + i % 2];
            sum += a;
            product = fmaf(a, w[i / 4][i % 4], product);
        }
    }
};

/* The block's to memory. All of its threads take part; they have met since `scratch` was last read. */
static __device__ __forceinline__ void leave_sums(const struct halves &h, const struct halves_sums &sums,
                                                  union halves_scratch &scratch)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    float v[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        v[j] = sums.first[j];
        v[4 + j] = sums.second[j];
    }
#pragma unroll
    for (int half = 4; half > 0; half /= 2) { /* over rows: a lane is left with one of the eight */
        const bool upper = lane & (4 * half);
#pragma unroll
        for (int j = 0; j < half; j++) {
            const float other = __shfl_xor_sync(0xffffffffu, upper ? v[j] : v[j + half], 4 * half);
            v[j] = (upper ? v[j + half] : v[j]) + other;
        }
    }
    scratch.left[warp][lane / 16][lane / 8 % 2 * 8 + lane % 4 * 2 + lane / 4 % 2] = v[0];
    __syncthreads();
    if (warp == 0) {
        float part[4] = {0, 0, 0, 0};
#pragma unroll
        for (int w = 0; w < MOST_WARPS; w++) {
            part[w % 4] += w < warps ? scratch.left[w][lane / 16][lane % 16] : 0.0f;
        }
        const float sum = (part[0] + part[1]) + (part[2] + part[3]);
        const float second = __shfl_down_sync(0xffffffffu, sum, 16);
        if (lane < D) {
            h.sums[(int)blockIdx.x * D + lane] = make_float2(sum, second);
        }
    }
}

/* All blocks' sums of the kernel before, in threads 0 .. 15, a column each. */
static __device__ __forceinline__ double2 merge_sums(const struct halves &h, union halves_scratch &scratch)
{
    enum { FLIGHT = 4 }; /* on their way at once */
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    const float2 *const from = h.before + lane % D;
    double2 sum = make_double2(0, 0);
    for (int b = (int)threadIdx.x / D; b < h.blocks_before; b += FLIGHT * (int)blockDim.x / D) {
        float2 v[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            const int block = b + i * (int)blockDim.x / D;
            v[i] = block < h.blocks_before ? __ldcg(from + block * D) : make_float2(0, 0);
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            sum.x += (double)v[i].x;
            sum.y += (double)v[i].y;
        }
    }
    sum.x += __shfl_xor_sync(0xffffffffu, sum.x, 16);
    sum.y += __shfl_xor_sync(0xffffffffu, sum.y, 16);
    if (lane < D) {
        scratch.merged[warp][lane] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        double2 part[4] = {};
#pragma unroll
        for (int i = 0; i < (MOST_WARPS + 1) / 2; i++) {
            const int w = lane / D + 2 * i;
            const double2 v = w < warps ? scratch.merged[w][lane % D] : make_double2(0, 0);
            part[i % 4].x += v.x;
            part[i % 4].y += v.y;
        }
        sum.x = (part[0].x + part[1].x) + (part[2].x + part[3].x);
        sum.y = (part[0].y + part[1].y) + (part[2].y + part[3].y);
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, 16);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, 16);
    }
    return sum;
}

template <class T> static __device__ __forceinline__ int64_t vector_at(const encoder<T> &x, int64_t first, int layer)
{
    return first + layer * x.at.vector_stride;
}

/* What is taken off what norm `norm` of `layer` reads before it is squared, so that the sums stay exact where means are far from 0:
 * beta of the norm before, about which the rows lie. */
template <class T> static __device__ __forceinline__ float pivot_of(const encoder<T> &x, int layer, int norm, int column)
{
    return norm == NORM_2 ? __ldcg(x.parameters + vector_at(x, x.at.ln1_beta, layer) + column)
           : layer > 0    ? __ldcg(x.parameters + vector_at(x, x.at.ln2_beta, layer - 1) + column)
                          : 0.0f;
}

/* Of what the kernel leaves for that norm. A barrier follows. */
template <class T>
static __device__ __forceinline__ void set_pivot(struct halves_columns &to, const encoder<T> &x, int layer, int norm)
{
    if (threadIdx.x < D) {
        to.minus_pivot[threadIdx.x] = -pivot_of(x, layer, norm, (int)threadIdx.x);
        to.one[threadIdx.x] = 1.0f;
    }
}

/* A norm's column, one each of threads 0 .. 15: what is in memory before the kernel that a kernel waits for. */
struct halves_norm {
    float gamma, beta, pivot, mean, rstd; /* the last two: running ones, or those that forward has kept */
    float first, second;                  /* block 0's: running mean and variance, or the gradients of beta and gamma */
};

template <class T> static __device__ __forceinline__ struct halves_norm look_parameters(const encoder<T> &x, int layer, int norm)
{
    struct halves_norm n = {};
    if (threadIdx.x < D) {
        const int column = (int)threadIdx.x;
        n.gamma = __ldcg(x.parameters + vector_at(x, norm == NORM_2 ? x.at.ln2_gamma : x.at.ln1_gamma, layer) + column);
        n.beta = __ldcg(x.parameters + vector_at(x, norm == NORM_2 ? x.at.ln2_beta : x.at.ln1_beta, layer) + column);
        n.pivot = pivot_of(x, layer, norm, column);
    }
    return n;
}

template <class T>
static __device__ __forceinline__ float *running_of(const encoder<T> &x, const struct halves &h, int layer, int of, int column)
{
    return h.parameters + layer * x.at.running_stride + x.at.running[of] + column;
}

/* For begin_forward. */
template <class T>
static __device__ __forceinline__ struct halves_norm look_forward(const encoder<T> &x, const struct halves &h, int layer, int norm)
{
    struct halves_norm n = look_parameters(x, layer, norm);
    if (threadIdx.x < D && (!h.training || blockIdx.x == 0)) {
        n.first = __ldcg(running_of(x, h, layer, 2 * norm, (int)threadIdx.x));
        n.second = __ldcg(running_of(x, h, layer, 2 * norm + 1, (int)threadIdx.x));
        n.mean = n.first;
        n.rstd = rsqrtf(n.second + x.epsilon);
    }
    return n;
}

/* Of a norm that is to be taken forward again. */
template <class T>
static __device__ __forceinline__ struct halves_norm look_kept(const encoder<T> &x, const struct halves &h, int layer, int norm)
{
    struct halves_norm n = look_parameters(x, layer, norm);
    if (threadIdx.x < D) {
        const float *const kept = h.statistics + (layer * 2 + norm) * 2 * D + threadIdx.x;
        n.mean = __ldcg(kept);
        n.rstd = __ldcg(kept + D);
    }
    return n;
}

/* Where the gradient of beta or gamma goes. */
template <class T> static __device__ __forceinline__ float *gradient_of(const encoder<T> &x, int layer, int norm, bool gamma)
{
    const int64_t first = gamma ? norm == NORM_2 ? x.at.ln2_gamma : x.at.ln1_gamma : norm == NORM_2 ? x.at.ln2_beta : x.at.ln1_beta;
    return x.gradients + vector_at(x, first, layer) + (int)threadIdx.x;
}

/* For begin_backward. */
template <class T>
static __device__ __forceinline__ struct halves_norm look_backward(const encoder<T> &x, const struct halves &h, int layer, int norm)
{
    struct halves_norm n = look_kept(x, h, layer, norm);
    if (threadIdx.x < D && blockIdx.x == 0) {
        n.first = __ldcg(gradient_of(x, layer, norm, false));
        n.second = __ldcg(gradient_of(x, layer, norm, true));
    }
    return n;
}

/* scale, shift, rstd and centre, by threads 0 .. 15. */
static __device__ __forceinline__ void set_forward(struct halves_columns &to, const struct halves_norm &n)
{
    const int column = (int)threadIdx.x;
    if (column < D) {
        to.scale[column] = n.gamma * n.rstd;
        to.shift[column] = fmaf(-n.mean, n.gamma * n.rstd, n.beta);
        to.rstd[column] = n.rstd;
        to.centre[column] = -n.mean * n.rstd;
    }
}

/* The statistics of all rows, which the kernel before has summed, or the running ones; block 0 keeps them, and moves the running
 * ones as batchnorm_statistics does. All threads take part, and may read what any has copied to shared memory. */
template <class T>
static __device__ __forceinline__ void begin_forward(struct halves_columns &to, const encoder<T> &x, const struct halves &h,
                                                     int layer, int norm, struct halves_norm n, union halves_scratch &scratch)
{
    const int column = (int)threadIdx.x;
    double mean = 0, squares = 0;
    if (h.training) {
        const double2 sum = merge_sums(h, scratch);
        if (column < D) {
            const double away = sum.x * h.per_row;
            mean = away + (double)n.pivot;
            squares = sum.y - away * sum.x;
            squares = squares < 0 ? 0 : squares; /* what is not a number stays that */
            n.mean = (float)mean;
            n.rstd = rsqrtf((float)(squares * h.per_row) + x.epsilon);
        }
    }
    set_forward(to, n);
    ps_copy_wait();
    __syncthreads();
    if (h.training && blockIdx.x == 0 && column < D) { /* no other thread waits for it */
        float *const keep = h.statistics + (layer * 2 + norm) * 2 * D + column;
        keep[0] = n.mean;
        keep[D] = n.rstd;
        if (isfinite(n.mean) && isfinite((float)(squares * h.per_row))) {
            *running_of(x, h, layer, 2 * norm, column) = n.first + (float)(h.momentum * (mean - (double)n.first));
            *running_of(x, h, layer, 2 * norm + 1, column) =
                n.second + (float)(h.momentum * (squares * h.unbiased - (double)n.second));
        }
    }
}

/* slope, bend and level of a norm's backward, from the sums of its output's gradient g and of g xhat, which are those of beta and
 * gamma; block 0 adds them there. dx = gamma rstd (g - mean(g) - xhat mean(g xhat)). All threads take part, and meet. */
template <class T>
static __device__ __forceinline__ void begin_backward(struct halves_columns &to, const encoder<T> &x, const struct halves &h,
                                                      int layer, int norm, const struct halves_norm &n,
                                                      union halves_scratch &scratch)
{
    const double2 sum = merge_sums(h, scratch);
    const int column = (int)threadIdx.x;
    if (column < D) {
        const float by = n.gamma * n.rstd, of_g = (float)(sum.x * h.per_row), of_xhat = (float)(sum.y * h.per_row);
        to.slope[column] = by;
        to.bend[column] = -by * of_xhat * n.rstd;
        to.level[column] = by * fmaf(of_xhat * n.rstd, n.mean, -of_g);
    }
    __syncthreads();
    if (blockIdx.x == 0 && column < D) {
        *gradient_of(x, layer, norm, false) = n.first + (float)sum.x;
        *gradient_of(x, layer, norm, true) = n.second + (float)sum.y;
    }
}

/* dx of those, g of rows that exist becoming dx; s: what the norm read. */
template <class P>
static __device__ __forceinline__ void norm_backward(float (&g)[2][4], const float (&s)[2][4], const struct halves_columns &c,
                                                     const P &at)
{
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const float2 slope = *(const float2 *)of_column(c.slope, t, at.q), bend = *(const float2 *)of_column(c.bend, t, at.q),
                     level = *(const float2 *)of_column(c.level, t, at.q);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float by = i % 2 ? slope.y : slope.x, of_s = i % 2 ? bend.y : bend.x, add = i % 2 ? level.y : level.x;
            g[t][i] = at.here[i / 2] ? fmaf(g[t][i], by, fmaf(s[t][i], of_s, add)) : 0.0f;
        }
    }
}

/* ---- weights in shared memory ---- */

template <class T> struct halves_attention_weights {
    T w_qkv[D * LD_QKV], w_o[D * LD];
    float4 b_qkv[3 * D / 2], b_o[D / 2];
};

/* Two neighbours of a bias, twice, as an accumulator has them. */
static __device__ __forceinline__ void stage_pair(float4 *to, const float *from)
{
    ps_copy_async8(to, from);
    ps_copy_async8((float *)to + 2, from);
}

/* Begins to copy a layer's (ps_copy_wait). */
template <class T>
static __device__ __forceinline__ void stage_attention(halves_attention_weights<T> &to, const encoder<T> &x, int layer)
{
    const T *const matrices = x.weights + layer * x.at.matrix_stride;
    const float *const vectors = x.parameters + layer * x.at.vector_stride;
    stage_matrix(to.w_qkv, LD_QKV, matrices + x.at.w_qkv, D, 3 * D / 8);
    stage_matrix(to.w_o, LD, matrices + x.at.w_o, D, D / 8);
    for (int i = (int)threadIdx.x; i < 3 * D / 2 + D / 2; i += (int)blockDim.x) {
        const bool of_o = i >= 3 * D / 2;
        stage_pair(to.b_qkv + i, of_o ? vectors + x.at.b_o + 2 * i - 3 * D : vectors + x.at.b_qkv + 2 * i);
    }
}

/* Of what lies before a kernel's units or tiles: the weights' bytes, columns, scratch. */
static __host__ __device__ constexpr int halves_front_bytes(int weights)
{
    return (weights + (int)sizeof(struct halves_columns) + (int)sizeof(union halves_scratch) + 127) / 128 * 128;
}

/* The feed-forward part's: W_1 [16, f], f's columns in their positions, W_2 [f, 16], then b_1 and b_2. */
static __host__ __device__ constexpr int halves_hidden_bytes(int f)
{
    return 2 * (D * (f + 8) + f * LD) + 16 * (f / 2 + D / 2);
}

template <class T> struct halves_hidden_weights {
    T *w_1, *w_2;
    float4 *b_1, *b_2;
    int ld;

    __device__ __forceinline__ halves_hidden_weights(char *p, int f)
        : w_1((T *)p), w_2(w_1 + D * (f + 8)), b_1((float4 *)(w_2 + f * LD)), b_2(b_1 + f / 2), ld(f + 8)
    {
    }
    __device__ __forceinline__ d16_columns<T> columns(int half) const
    {
        return {w_1 + half * 64, w_2 + half * 64 * LD, b_1 + half * 32, ld};
    }
};

/* Warps of the feed-forward part's kernels: at most five for each quarter of a multiprocessor, which leaves a thread 96 registers.
 */
enum { HIDDEN_WARPS = 20 };

/* A tile's masks of its hidden values. */
static __host__ __device__ constexpr int halves_words_bytes(int f)
{
    return f / 64 * 32 * 4;
}

/* The lane's, a word for 64 columns, 32 words apart: behind the front, tile by tile. */
static __device__ __forceinline__ uint32_t *hidden_words(void *shared_memory, int f, int lane)
{
    return (uint32_t *)((char *)shared_memory + halves_front_bytes(halves_hidden_bytes(f)) +
                        (int)threadIdx.x / 32 * halves_words_bytes(f)) +
           lane;
}

template <class T>
static __device__ __forceinline__ void stage_hidden(const halves_hidden_weights<T> &to, const encoder<T> &x, int layer)
{
    const T *const matrices = x.weights + layer * x.at.matrix_stride;
    const float *const vectors = x.parameters + layer * x.at.vector_stride;
    const int pieces = x.f / 8;
    for (int i = (int)threadIdx.x; i < D * pieces; i += (int)blockDim.x) {
        const int row = i / pieces, of = i - row * pieces;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            ps_copy_async4(to.w_1 + row * to.ld + of / 4 * 32 + of % 4 * 2 + t * 8,
                           matrices + x.at.w_1 + row * x.f + of * 8 + t * 2);
        }
    }
    for (int i = (int)threadIdx.x; i < 2 * x.f; i += (int)blockDim.x) {
        ps_copy_async(to.w_2 + i / 2 * LD + i % 2 * 8, matrices + x.at.w_2 + column_of(i / 2) * D + i % 2 * 8);
    }
    for (int i = (int)threadIdx.x; i < x.f / 2 + D / 2; i += (int)blockDim.x) {
        const bool of_2 = i >= x.f / 2;
        stage_pair(to.b_1 + i, of_2 ? vectors + x.at.b_2 + 2 * i - x.f : vectors + x.at.b_1 + column_of(2 * i));
    }
}

/* ---- places ---- */

/* A warp's tile of 16 rows, whosever they are. */
template <class T> using tile_place = place<T, D, 1>;

template <class T> static __device__ __forceinline__ int take_tile(tile_place<T> &at, const encoder<T> &x, int group)
{
    const int tile = group * ((int)blockDim.x / 32) + (int)threadIdx.x / 32;
    at.first = (int64_t)tile * 16 + at.g;
    at.here[0] = at.first < x.rows;
    at.here[1] = at.first + 8 < x.rows;
    return tile;
}

} // namespace ps_resident

#endif
