/* What the resident kernels share: a layer's weights in shared memory, a warp's place, and the parts of a layer that work on a
 * warp's 16 rows by 16 columns. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_DEVICE_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_DEVICE_CUH

#include "kernels/cuda/encoder/resident/arguments.cuh"
#include "kernels/cuda/tile/activation.cuh"
#include "kernels/cuda/tile/count.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace ps_resident
{

static __device__ __forceinline__ void add_four(float4 &sum, float4 more)
{
    sum.x += more.x;
    sum.y += more.y;
    sum.z += more.z;
    sum.w += more.w;
}

/* from[i stride] for i = first, first + step, .. below count, added up in that order, FLIGHT of them on their way at once. ONCE:
 * they are not read again. */
template <int FLIGHT, bool ONCE>
static __device__ __forceinline__ float4 sum_every(const float4 *from, int64_t stride, int first, int step, int count)
{
    float4 sum = make_float4(0, 0, 0, 0);
    for (int begin = first; begin < count; begin += step * FLIGHT) {
        float4 v[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            const int at = begin + i * step;
            v[i] = at >= count ? make_float4(0, 0, 0, 0) : ONCE ? __ldcs(from + at * stride) : __ldcg(from + at * stride);
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            add_four(sum, v[i]);
        }
    }
    return sum;
}

/* sum += parts[step], parts[2 step], .., the last of `count` parts whose first is the thread's own. */
static __device__ __forceinline__ void add_parts(float4 &sum, const float4 *parts, int step, int count)
{
    for (int i = 1; i < count; i++) {
        add_four(sum, parts[i * step]);
    }
}

/* Warps that share a tile of rows. */
static __host__ __device__ constexpr int sharing(int d)
{
    return d / 16;
}

static __host__ __device__ constexpr int most_threads(int d)
{
    return d == 16 ? 672 : 512;
}

/* ---- shared memory ---- */

template <class T> static constexpr int REAL_BYTES = (int)sizeof(T);

/* One layer's parameters. Rows are 8 elements longer than the matrix, a multiple of 16: see store_operand. */
template <class T, int D> struct layer_weights {
    T *w_qkv, *w_o, *w_1, *w_2;
    float *b_qkv, *b_o, *b_1, *b_2, *ln1_gamma, *ln1_beta, *ln2_gamma, *ln2_beta;
    static constexpr int LD_QKV = 3 * D + 8, LD = D + 8;

    __device__ __forceinline__ layer_weights(char *p, int f)
    {
        w_qkv = (T *)p;
        w_o = w_qkv + D * LD_QKV;
        w_1 = w_o + D * LD;
        w_2 = w_1 + D * (f + 8);
        b_qkv = (float *)(w_2 + f * LD);
        b_o = b_qkv + 3 * D;
        b_2 = b_o + D;
        ln1_gamma = b_2 + D;
        ln1_beta = ln1_gamma + D;
        ln2_gamma = ln1_beta + D;
        ln2_beta = ln2_gamma + D;
        b_1 = ln2_beta + D;
    }
};

template <class T> static __host__ __device__ constexpr int layer_bytes(int d, int f)
{
    return REAL_BYTES<T> * (d * (3 * d + 8) + d * (d + 8) + d * (f + 8) + f * (d + 8)) + 4 * (9 * d + f);
}

/* Bytes of hidden scores' table (place::hidden), which lies first. */
enum { TABLE_BYTES = 1024 };

/* Bytes of a unit's statistics: 4 kinds of two floats a row and warp. */
static __host__ __device__ constexpr int statistics_bytes(int d, int tiles)
{
    return d == 16 ? 0 : 4 * tiles * sharing(d) * 16 * 8;
}

/* Bytes of a row in the buffers: forward A [d] (d > 16) and QKV [3d]; backward X, G, M [d] and QKV. */
template <class T> static __host__ __device__ constexpr int row_bytes(int d, bool backward)
{
    return REAL_BYTES<T> * ((backward ? 3 : d > 16 ? 1 : 0) * (d + 8) + 3 * d + 8);
}

/* Bytes of what comes last in a unit backward: each warp's A and its gradient, or the staged columns of d_ff. */
template <class T> static __host__ __device__ constexpr int scratch_bytes(int d, int tiles, int staged)
{
    const int pairs = sharing(d) * 2 * tiles * 16 * (tiles * 16 + 8), staging = tiles * 16 * (2 * staged + 8);
    return REAL_BYTES<T> * (pairs > staging ? pairs : staging);
}

/* Bytes of a unit: its rows' buffers, its statistics, and what comes last: forward the warps' partial sums, backward the
 * scratch above. */
template <class T> static __host__ __device__ constexpr int unit_bytes(int d, int tiles, bool backward, int staged)
{
    const int W = sharing(d), partial = W > 1 ? tiles * W * 16 * d * 4 : 0;
    return tiles * 16 * row_bytes<T>(d, backward) + statistics_bytes(d, tiles) +
           (backward ? scratch_bytes<T>(d, tiles, staged) : partial);
}

/* Rows x columns of T, to rows of ld elements; a row is `pieces` pieces of 16 bytes. */
template <class T> static __device__ __forceinline__ void stage_matrix(T *to, int ld, const T *from, int rows, int pieces)
{
    const int step_row = (int)blockDim.x / pieces, step_piece = (int)blockDim.x - step_row * pieces;
    int row = (int)threadIdx.x / pieces, piece = (int)threadIdx.x - row * pieces;
    while (row < rows) {
        ps_copy_async(to + row * ld + piece * ps_vector<T>, from + (row * pieces + piece) * ps_vector<T>);
        row += step_row;
        piece += step_piece;
        if (piece >= pieces) {
            piece -= pieces;
            row++;
        }
    }
}

static __device__ __forceinline__ void stage_vector(float *to, const float *from, int n)
{
    for (int i = (int)threadIdx.x * 4; i < n; i += (int)blockDim.x * 4) {
        ps_copy_async(to + i, from + i);
    }
}

/* Begins to copy a layer's parameters. */
template <int D, class T>
static __device__ __forceinline__ void stage_layer(const encoder<T> &x, int layer, const layer_weights<T, D> &to)
{
    constexpr int PIECE = ps_vector<T>;
    const T *w = x.weights + layer * x.at.matrix_stride;
    const float *p = x.parameters + layer * x.at.vector_stride;
    stage_matrix(to.w_qkv, to.LD_QKV, w + x.at.w_qkv, D, 3 * D / PIECE);
    stage_matrix(to.w_o, to.LD, w + x.at.w_o, D, D / PIECE);
    stage_matrix(to.w_1, x.f + 8, w + x.at.w_1, D, x.f / PIECE);
    stage_matrix(to.w_2, to.LD, w + x.at.w_2, x.f, D / PIECE);
    stage_vector(to.b_qkv, p + x.at.b_qkv, 3 * D);
    stage_vector(to.b_o, p + x.at.b_o, D);
    stage_vector(to.b_2, p + x.at.b_2, D);
    stage_vector(to.ln1_gamma, p + x.at.ln1_gamma, D);
    stage_vector(to.ln1_beta, p + x.at.ln1_beta, D);
    stage_vector(to.ln2_gamma, p + x.at.ln2_gamma, D);
    stage_vector(to.ln2_beta, p + x.at.ln2_beta, D);
    stage_vector(to.b_1, p + x.at.b_1, x.f);
}

/* ---- a warp's place ---- */

template <class T, int D, int NT> struct place {
    static constexpr int W = sharing(D), TEAM = NT * W;
    int lane, g, q;        /* g = lane / 4, q = lane % 4: see tile/mma.cuh */
    int unit, tile, share; /* of the block; of the unit; of the tile */
    int row;               /* the tile's first row in the unit's buffers */
    /* The lane's row and column of operands as they lie, and of transposed ones. */
    int near, far, other, across;
    /* Of the unit at hand: */
    int64_t first; /* row g of the tile in [R, ..] */
    bool here[2];  /* rows g and g + 8 exist */
    int64_t global_tile;

    __device__ __forceinline__ place() : place((int)threadIdx.x)
    {
    }
    __device__ __forceinline__ explicit place(int thread)
    {
        const int warp = thread / 32;
        lane = thread % 32;
        g = lane / 4;
        q = lane % 4;
        unit = warp / TEAM;
        tile = warp % TEAM / W;
        share = warp % W;
        row = tile * 16;
        near = lane % 16;
        far = lane / 16 * 8;
        other = (lane & 7) + (lane >> 1 & 8);
        across = lane & 8;
    }
    __device__ __forceinline__ constexpr int tiles() const
    {
        return NT;
    }
    __device__ __forceinline__ void take(const encoder<T> &x, int64_t u)
    {
        const int i = tile * 16 + g;
        first = u * x.unit_rows + i;
        here[0] = u < x.units && i < x.unit_rows && first < x.rows;
        here[1] = u < x.units && i + 8 < x.unit_rows && first + 8 < x.rows;
        global_tile = u * NT + tile;
    }
    /* All warps of the unit. */
    __device__ __forceinline__ void sync() const
    {
        if (TEAM == 1) {
            __syncwarp();
        } else {
            ps_barrier(1 + unit, TEAM * 32);
        }
    }
};

/* ---- operands in shared memory: what the lane loads from, p the first element of 16 rows by 16 columns in rows of ld elements; ld
 * is 8 beyond a multiple of 16 ---- */

/* Of an A operand, and of B operands of the matrix. */
template <class P, class T> static __device__ __forceinline__ const T *lane_a(const T *p, int ld, const P &at)
{
    return p + at.near * ld + at.far;
}

template <int R, class P, class T> static __device__ __forceinline__ const T *lane_b(const T *p, int ld, const P &at)
{
    return p + at.near * ld + (R == 4 ? at.far : 0);
}

/* Of the matrix transposed. */
template <class P, class T> static __device__ __forceinline__ const T *lane_a_transposed(const T *p, int ld, const P &at)
{
    return p + at.other * ld + at.across;
}

template <int R, class P, class T> static __device__ __forceinline__ const T *lane_b_transposed(const T *p, int ld, const P &at)
{
    return R == 4 ? lane_a_transposed(p, ld, at) : p + at.near * ld;
}

/* The B operands of 16 columns, r[0] and r[1] the first 8's, or of 8. */
template <int R> static __device__ __forceinline__ void load_b(uint32_t (&r)[R], const void *p)
{
    if constexpr (R == 4) {
        ps_ldmatrix4_transposed(r, p);
    } else {
        ps_ldmatrix2_transposed(r, p);
    }
}

/* The B operands of the matrix transposed; two of them are the first half of k for 16 columns. */
template <int R> static __device__ __forceinline__ void load_b_transposed(uint32_t (&r)[R], const void *p)
{
    if constexpr (R == 4) {
        ps_ldmatrix4(r, p);
    } else {
        ps_ldmatrix2(r, p);
    }
}

/* ---- 16 rows x 16 columns in registers: x[t] is columns 8t .. 8t + 7 of the warp's ---- */

template <typename S, class T, int D, int NT>
static __device__ __forceinline__ void load_rows(float (&x)[2][4], const S *from, const place<T, D, NT> &at)
{
    const S *p = from + at.first * D + at.share * 16 + at.q * 2;
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            ps_get_pair(x[t][2 * h], x[t][2 * h + 1], p + h * 8 * D + t * 8, at.here[h]);
        }
    }
}

/* The floats of an operand of two tiles. */
template <class T> static __device__ __forceinline__ void unpack_operand(float (&x)[2][4], const ps_pair<T> (&v)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i / 2][i % 2 * 2] = ps_low<T>(v[i]);
        x[i / 2][i % 2 * 2 + 1] = ps_high<T>(v[i]);
    }
}

template <typename S, class T, int D, int NT>
static __device__ __forceinline__ void store_rows(S *to, const float (&x)[2][4], const place<T, D, NT> &at)
{
    S *p = to + at.first * D + at.share * 16 + at.q * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (at.here[h]) {
            ps_put_pair(p + h * 8 * D, x[0][2 * h], x[0][2 * h + 1]);
            ps_put_pair(p + h * 8 * D + 8, x[1][2 * h], x[1][2 * h + 1]);
        }
    }
}

template <int TILES> static __device__ __forceinline__ void clear(float (&c)[TILES][4])
{
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        c[t][0] = c[t][1] = c[t][2] = c[t][3] = 0;
    }
}

/* c = the bias of the tiles' columns. */
template <int TILES> static __device__ __forceinline__ void set_bias(float (&c)[TILES][4], const float *bias, int q)
{
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const float2 v = *(const float2 *)(bias + t * 8 + q * 2);
        c[t][0] = c[t][2] = v.x;
        c[t][1] = c[t][3] = v.y;
    }
}

/* Two tiles as an operand. */
template <class T>
static __device__ __forceinline__ void pack_operand(ps_pair<T> (&a)[4], const float (&low)[4], const float (&high)[4])
{
    a[0] = ps_pack<T>(low[0], low[1]);
    a[1] = ps_pack<T>(low[2], low[3]);
    a[2] = ps_pack<T>(high[0], high[1]);
    a[3] = ps_pack<T>(high[2], high[3]);
}

template <class O> static __device__ __forceinline__ void copy_operand(O (&to)[4], const O (&from)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[i] = from[i];
    }
}

/* An operand of 16 bits to memory and from there. */
static __device__ __forceinline__ void leave_operand(void *to, const uint32_t (&a)[4])
{
    *(uint4 *)to = make_uint4(a[0], a[1], a[2], a[3]);
}

static __device__ __forceinline__ void take_operand(uint32_t (&a)[4], const void *from)
{
    const uint4 v = *(const uint4 *)from;
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
}

static __device__ __forceinline__ void scale_rows(float (&v)[2][4], float by)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] *= by;
    }
}

static __device__ __forceinline__ void add_rows(float (&v)[2][4], const float (&w)[2][4])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] += w[i / 4][i % 4];
    }
}

/* v = v by + w. */
static __device__ __forceinline__ void scale_add_rows(float (&v)[2][4], float by, const float (&w)[2][4])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] = fmaf(v[i / 4][i % 4], by, w[i / 4][i % 4]);
    }
}

/* The operand scale * x. */
template <class T> static __device__ __forceinline__ void scale_operand(ps_pair<T> (&a)[4], const float (&x)[2][4], float scale)
{
    float v[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] = x[i / 4][i % 4] * scale;
    }
    pack_operand<T>(a, v[0], v[1]);
}

/* The operands of a tile's d columns from those of its warps, through rows of a buffer [.., d]. */
template <class T, int D, int NT>
static __device__ __forceinline__ void gather(ps_pair<T> (&all)[D / 16][4], const ps_pair<T> (&own)[4], T *buffer,
                                              const place<T, D, NT> &at)
{
    constexpr int LD = D + 8;
    if constexpr (D == 16) {
        copy_operand(all[0], own);
    } else {
        ps_store_operand(buffer + at.row * LD + at.share * 16, 2 * LD, own);
        at.sync();
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            ps_ldmatrix4(all[k], lane_a(buffer + at.row * LD, LD, at) + k * 16);
        }
    }
}

/* One of the unit's 4 kinds of statistics, the tile's: [W][16]. */
template <class T, int D, int NT>
static __device__ __forceinline__ float2 *statistics_at(char *statistics, int kind, const place<T, D, NT> &at)
{
    return (float2 *)statistics + (kind * NT + at.tile) * (sharing(D) * 16);
}

/* xhat = (x - mean) rstd, statistics over the row's d columns (the warps' moments are put together as Chan et al. 1979). */
template <class T, int D, int NT>
static __device__ __forceinline__ void normalise(float (&xhat)[2][4], float (&rstd)[2], const float (&x)[2][4], float epsilon,
                                                 float2 *statistics, const place<T, D, NT> &at)
{
    constexpr int W = sharing(D);
    float mean[2], squares[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        mean[h] = ps_quad_sum(x[0][2 * h] + x[0][2 * h + 1] + x[1][2 * h] + x[1][2 * h + 1]) * (1.0f / 16);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float v = x[i / 2][2 * h + i % 2] - mean[h];
            sum += v * v;
        }
        squares[h] = ps_quad_sum(sum);
    }
    if constexpr (W > 1) {
        if (at.q == 0) {
            statistics[at.share * 16 + at.g] = make_float2(mean[0], squares[0]);
            statistics[at.share * 16 + at.g + 8] = make_float2(mean[1], squares[1]);
        }
        at.sync();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 v[W];
            float sum = 0, spread = 0, within = 0;
#pragma unroll
            for (int w = 0; w < W; w++) {
                v[w] = statistics[w * 16 + at.g + 8 * h];
                sum += v[w].x;
                within += v[w].y;
            }
            mean[h] = sum * (1.0f / W);
#pragma unroll
            for (int w = 0; w < W; w++) {
                spread += (v[w].x - mean[h]) * (v[w].x - mean[h]);
            }
            squares[h] = fmaf(16.0f, spread, within);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rstd[h] = rsqrtf(fmaf(squares[h], 1.0f / D, epsilon));
        const float shift = -mean[h] * rstd[h];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            xhat[i / 2][2 * h + i % 2] = fmaf(x[i / 2][2 * h + i % 2], rstd[h], shift);
        }
    }
}

/* The operand gamma xhat + beta. */
template <class T>
static __device__ __forceinline__ void scale_shift(ps_pair<T> (&a)[4], const float (&xhat)[2][4], const float *gamma,
                                                   const float *beta, int q)
{
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const float2 m = *(const float2 *)(gamma + t * 8 + q * 2), b = *(const float2 *)(beta + t * 8 + q * 2);
        a[2 * t] = ps_pack<T>(fmaf(xhat[t][0], m.x, b.x), fmaf(xhat[t][1], m.y, b.y));
        a[2 * t + 1] = ps_pack<T>(fmaf(xhat[t][2], m.x, b.x), fmaf(xhat[t][3], m.y, b.y));
    }
}

/* With dxhat = dx gamma: g += rstd (dxhat - mean_d(dxhat) - xhat mean_d(dxhat xhat)). */
template <class T, int D, int NT>
static __device__ __forceinline__ void normalise_backward(float (&g)[2][4], float (&dx)[2][4], const float *gamma,
                                                          const ps_pair<T> (&xhat)[4], const float (&rstd)[2], float2 *statistics,
                                                          const place<T, D, NT> &at)
{
    constexpr int W = sharing(D);
    float sum[2] = {0, 0}, dot[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const float2 m = *(const float2 *)(gamma + t * 8 + at.q * 2);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const ps_pair<T> v = xhat[2 * t + h];
            dx[t][2 * h] *= m.x;
            dx[t][2 * h + 1] *= m.y;
            sum[h] += dx[t][2 * h] + dx[t][2 * h + 1];
            dot[h] += dx[t][2 * h] * ps_low<T>(v) + dx[t][2 * h + 1] * ps_high<T>(v);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] = ps_quad_sum(sum[h]);
        dot[h] = ps_quad_sum(dot[h]);
    }
    if constexpr (W > 1) {
        if (at.q == 0) {
            statistics[at.share * 16 + at.g] = make_float2(sum[0], dot[0]);
            statistics[at.share * 16 + at.g + 8] = make_float2(sum[1], dot[1]);
        }
        at.sync();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = dot[h] = 0;
#pragma unroll
            for (int w = 0; w < W; w++) {
                const float2 v = statistics[w * 16 + at.g + 8 * h];
                sum[h] += v.x;
                dot[h] += v.y;
            }
        }
    }
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const ps_pair<T> v = xhat[2 * t + h];
            const float mean = sum[h] * (1.0f / D), slope = dot[h] * (1.0f / D);
            g[t][2 * h] += rstd[h] * (dx[t][2 * h] - mean - ps_low<T>(v) * slope);
            g[t][2 * h + 1] += rstd[h] * (dx[t][2 * h + 1] - mean - ps_high<T>(v) * slope);
        }
    }
}

/* ---- products with weights in shared memory; the result is 16 columns unless it says d ---- */

/* c += a w, w [16 rows, d columns]; c has d columns. */
template <class T, int D, int NT>
static __device__ __forceinline__ void multiply_columns(float (&c)[D / 8][4], const ps_pair<T> (&a)[4], const T *w, int ld,
                                                        const place<T, D, NT> &at)
{
    const T *p = lane_b<4>(w, ld, at);
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        ps_pair<T> b[4];
        load_b(b, p + n * 16);
        ps_mma16<T>(c[2 * n], a, b[0], b[1], c[2 * n]);
        ps_mma16<T>(c[2 * n + 1], a, b[2], b[3], c[2 * n + 1]);
    }
}

/* c += a w, w [d rows, 16 columns]. */
template <class T, int D, int NT>
static __device__ __forceinline__ void multiply(float (&c)[2][4], const ps_pair<T> (&a)[D / 16][4], const T *w, int ld,
                                                const place<T, D, NT> &at)
{
    const T *p = lane_b<4>(w, ld, at);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        ps_pair<T> b[4];
        load_b(b, p + k * 16 * ld);
        ps_mma16<T>(c[0], a[k], b[0], b[1], c[0]);
        ps_mma16<T>(c[1], a[k], b[2], b[3], c[1]);
    }
}

/* c += a w', w [16 rows, d columns]. */
template <class T, int D, int NT>
static __device__ __forceinline__ void multiply_transposed(float (&c)[2][4], const ps_pair<T> (&a)[D / 16][4], const T *w, int ld,
                                                           const place<T, D, NT> &at)
{
    const T *p = lane_b_transposed<4>(w, ld, at);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        ps_pair<T> b[4];
        load_b_transposed(b, p + k * 16);
        ps_mma16<T>(c[0], a[k], b[0], b[1], c[0]);
        ps_mma16<T>(c[1], a[k], b[2], b[3], c[1]);
    }
}

/* c += a w', 16 x k times k x 16 columns, both operands in shared memory as they lie. */
template <class T, int D, int NT>
static __device__ __forceinline__ void multiply_shared(float (&c)[2][4], const T *a, int lda, const T *w, int ldw, int k,
                                                       const place<T, D, NT> &at)
{
    const T *pa = lane_a(a, lda, at), *pw = lane_b_transposed<4>(w, ldw, at);
#pragma unroll 4
    for (int i = 0; i < k; i += 16) {
        ps_pair<T> ra[4], b[4];
        ps_ldmatrix4(ra, pa + i);
        load_b_transposed(b, pw + i);
        ps_mma16<T>(c[0], ra, b[0], b[1], c[0]);
        ps_mma16<T>(c[1], ra, b[2], b[3], c[1]);
    }
}

/* The warp's columns of q, k and v to its rows of qkv [.., 3d]. */
template <class T, int D, int NT>
static __device__ __forceinline__ void project(T *qkv, const ps_pair<T> (&a)[D / 16][4], const layer_weights<T, D> &w,
                                               const place<T, D, NT> &at)
{
    constexpr int LD = layer_weights<T, D>::LD_QKV;
#pragma unroll
    for (int part = 0; part < 3; part++) {
        const int column = part * D + at.share * 16;
        float c[2][4];
        ps_pair<T> packed[4];
        set_bias(c, w.b_qkv + column, at.q);
        multiply(c, a, w.w_qkv + column, LD, at);
        pack_operand<T>(packed, c[0], c[1]);
        ps_store_operand(qkv + at.row * LD + column, 2 * LD, packed);
    }
}

/* ---- attention ---- */

/* y += the column sums of p's rows: every column of y [16, 8] is the same. */
template <class T> static __device__ __forceinline__ void add_ones(float (&y)[4], const ps_pair<T> (&p)[4])
{
    ps_mma16<T>(y, p, ps_ones<T>(), ps_ones<T>(), y);
}

/* One head of the warp's 16 columns. E8: heads of 4 or 8 columns, which work on the 8 columns that hold them, where operands of the
 * rows' side are zero in the other head's columns. */
struct head {
    int half;    /* which 8 columns; 0 unless E8 */
    bool active; /* the lane's two columns of those 8 are this head's */
};

static __device__ __forceinline__ struct head head_at(int i, int e, int q)
{
    return {i * e / 8, e == 8 || q / 2 == i % 2};
}

/* s = a b' + c for 16 rows of b. */
template <bool E8, class T, int D, int NT>
static __device__ __forceinline__ void score_tile(float (&s0)[4], float (&s1)[4], const ps_pair<T> (&a)[4], const struct head &h,
                                                  const T *b, int ld, const float (&c0)[4], const float (&c1)[4],
                                                  const place<T, D, NT> &at)
{
    if constexpr (E8) {
        ps_pair<T> k[2];
        load_b_transposed(k, lane_b_transposed<2>(b, ld, at) + h.half * 8);
        ps_mma8<T>(s0, a[0], a[1], k[0], c0);
        ps_mma8<T>(s1, a[0], a[1], k[1], c1);
    } else {
        ps_pair<T> k[4];
        load_b_transposed(k, lane_b_transposed<4>(b, ld, at));
        ps_mma16<T>(s0, a, k[0], k[1], c0);
        ps_mma16<T>(s1, a, k[2], k[3], c1);
    }
}

/* s[j] = a b', added to `last[0]`, `last[1]` in the last two tiles and to `rest` in the others. b has a row for each of the unit's,
 * columns of the warp's share. */
template <bool E8, class T, int D, int NT>
static __device__ __forceinline__ void scores(float (&s)[2 * NT][4], const ps_pair<T> (&a)[4], const struct head &h, const T *b,
                                              int ld, const float (&rest)[4], const float (&last0)[4], const float (&last1)[4],
                                              const place<T, D, NT> &at)
{
#pragma unroll
    for (int j = 0; j < NT; j++) {
        score_tile<E8>(s[2 * j], s[2 * j + 1], a, h, b + j * 16 * ld, ld, j == NT - 1 ? last0 : rest, j == NT - 1 ? last1 : rest,
                       at);
    }
}

/* o += p b for 16 of the summed rows; b points at them. */
template <bool E8, class T, int D, int NT>
static __device__ __forceinline__ void mix(float (&o)[E8 ? 1 : 2][4], const ps_pair<T> (&p)[4], const struct head &h, const T *b,
                                           int ld, const place<T, D, NT> &at)
{
    if constexpr (E8) {
        ps_pair<T> v[2];
        load_b(v, lane_b<2>(b, ld, at) + h.half * 8);
        ps_mma16<T>(o[0], p, v[0], v[1], o[0]);
    } else {
        ps_pair<T> v[4];
        load_b(v, lane_b<4>(b, ld, at));
        ps_mma16<T>(o[0], p, v[0], v[1], o[0]);
        ps_mma16<T>(o[1], p, v[2], v[3], o[1]);
    }
}

/* The head's columns of the tile's rows, scaled, to a buffer whose first element of the warp's share is `to`. */
template <bool E8, class T, int D, int NT>
static __device__ __forceinline__ void put_head(T *to, int ld, const float (&o)[E8 ? 1 : 2][4], float scale0, float scale1,
                                                const struct head &h, const place<T, D, NT> &at)
{
#pragma unroll
    for (int t = 0; t < (E8 ? 1 : 2); t++) {
        if (!E8 || h.active) {
            T *p = to + at.g * ld + (E8 ? h.half : t) * 8 + at.q * 2;
            *(ps_pair<T> *)p = ps_pack<T>(o[t][0] * scale0, o[t][1] * scale0);
            *(ps_pair<T> *)(p + 8 * ld) = ps_pack<T>(o[t][2] * scale1, o[t][3] * scale1);
        }
    }
}

/* The rows' operand of one head from that of the warp's 16 columns. */
template <bool E8, class O> static __device__ __forceinline__ void head_operand(O (&a)[4], const O (&all)[4], const struct head &h)
{
    if constexpr (E8) {
        a[0] = h.active ? h.half ? all[2] : all[0] : O();
        a[1] = h.active ? h.half ? all[3] : all[1] : O();
        a[2] = a[3] = O();
    } else {
        copy_operand(a, all);
    }
}

/* table[t][lane]: what is added to the scores of the last two tiles: 0 where the row may see the column, else so low that its
 * exponential is 0. Rows that do not exist see some column, so that they stay finite. */
template <class T, int D, int NT> static __device__ __forceinline__ void fill_table(float4 *table, int n, const place<T, D, NT> &at)
{
    if (threadIdx.x < 32) {
        for (int t = 0; t < 2; t++) {
            float v[4];
            for (int i = 0; i < 4; i++) {
                const int column = (2 * NT - 2 + t) * 8 + at.q * 2 + i % 2, row = at.g + i / 2 * 8;
                v[i] = (NT == 1 ? column / n == row / n : column < n) ? 0.0f : -1e30f;
            }
            table[t * 32 + at.lane] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
}

/* That of the lane. */
static __device__ __forceinline__ void take_hidden(float (&low)[4], float (&high)[4], const float4 *table, int lane)
{
    const float4 v = table[lane], w = table[32 + lane];
    low[0] = v.x, low[1] = v.y, low[2] = v.z, low[3] = v.w;
    high[0] = w.x, high[1] = w.y, high[2] = w.z, high[3] = w.w;
}

/* s = q k' of one head, hidden where it must be. */
template <bool E8, class T, int D, int NT>
static __device__ __forceinline__ void masked_scores(float (&s)[2 * NT][4], const ps_pair<T> (&a)[4], const struct head &h,
                                                     const T *keys, int ld, const float4 *table, const place<T, D, NT> &at)
{
    const float zero[4] = {0, 0, 0, 0};
    float last0[4], last1[4];
    take_hidden(last0, last1, table, at.lane);
    scores<E8>(s, a, h, keys, ld, zero, last0, last1, at);
}

/* log2 of the sums of the tile's rows of a head, the first of which are `most` high, where they are kept. */
template <class T, int D, int NT>
static __device__ __forceinline__ void keep_log_sums(const encoder<T> &x, int layer, int head, const float (&most)[2], float low,
                                                     float high, const place<T, D, NT> &at)
{
    if (x.lse && at.q == 0) {
        float *lse = x.lse + ((int64_t)layer * x.heads + head) * x.rows + at.first;
        if (at.here[0]) {
            lse[0] = most[0] + ps_log2(low);
        }
        if (at.here[1]) {
            lse[8] = most[1] + ps_log2(high);
        }
    }
}

/* ---- dropout ---- */

/* Masks of 16 columns of the tile, all of them in each lane, moved down by q: element (g + 8h, 8t + 2q + i) of a pair of tiles t is
 * kept when bit 8h + 4t + 16i is set. Each lane draws one block of 8 elements: row g + 8 (q / 2), tile q % 2. */
template <class T>
static __device__ __forceinline__ uint32_t draw_masks(const encoder<T> &x, uint32_t below, uint32_t minus_below, uint64_t step,
                                                      uint32_t site, uint32_t block, int q)
{
    const struct ps_block drawn = ps_draws_after(x.keys, ps_draws_begin(x.keys, site, step), block);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bits += ps_kept2(drawn.word[i], below, minus_below) << i;
    }
    bits <<= 4 * q;
    bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
    bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
    return bits;
}

template <class T>
static __device__ __forceinline__ uint32_t draw_masks(const encoder<T> &x, uint64_t step, uint32_t site, uint32_t block, int q)
{
    return draw_masks(x, x.below, x.minus_below, step, site, block, q);
}

/* The masks of the tile, for lane's g: [f/16 + 2d/16][8] words: d/16 after W_o, f/16 of the hidden, d/16 after W_2, a word for 16
 * columns and 2 rows. */
template <class T, int D, int NT>
static __device__ __forceinline__ uint32_t *masks_at(const encoder<T> &x, int f, int layer, const place<T, D, NT> &at)
{
    const int chunks = f / 16 + D / 8;
    return x.masks + ((int64_t)layer * x.units * NT + at.global_tile) * chunks * 8 + at.g;
}

/* Draws the masks of 16 columns of a tensor `width` wide and keeps them. */
template <class T, int D, int NT>
static __device__ __forceinline__ uint32_t new_masks(const encoder<T> &x, uint64_t step, int site, int width, int column,
                                                     uint32_t *keep, const place<T, D, NT> &at)
{
    const uint32_t row = x.rows_before + (uint32_t)at.first + at.q / 2 * 8;
    const uint32_t bits = draw_masks(x, step, x.site + site, row * (width / 8) + column / 8 + at.q % 2, at.q);
    if (keep && at.q == 0) {
        *keep = bits;
    }
    return bits >> at.q;
}

/* Rows g + 8h, tile t of an operand, zero where dropped. */
static __device__ __forceinline__ uint32_t kept_pair(uint32_t x, uint32_t bits, int h, int t)
{
    return x & (bits >> (8 * h + 4 * t) & 0x00010001u) * 0xffffu;
}

/* The operand, zero where dropped. */
template <class O> static __device__ __forceinline__ void drop_operand(O (&a)[4], uint32_t bits)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = kept_pair(a[i], bits, i % 2, i / 2);
    }
}

/* u += scale x where kept: element (g + 8h, 8t + 2q + i) where bit 8h + 4t + 16i is set. */
static __device__ __forceinline__ void add_kept(float (&u)[2][4], const float (&x)[2][4], uint32_t bits, float scale)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (bits & 1u << (i % 4 / 2 * 8 + i % 2 * 16 + i / 4 * 4)) {
            u[i / 4][i % 4] = fmaf(x[i / 4][i % 4], scale, u[i / 4][i % 4]);
        }
    }
}

/* ---- backward ---- */

/* The hidden columns from `column` on, 16 of them: x (1 + tanh) and the gradient before gelu as operands. */
template <class T, int D, int NT>
static __device__ __forceinline__ void hidden_backward(ps_pair<T> (&hidden)[4], ps_pair<T> (&d_hidden)[4],
                                                       const ps_pair<T> (&a)[D / 16][4], const ps_pair<T> (&dm)[D / 16][4],
                                                       int column, int f, const layer_weights<T, D> &w, const place<T, D, NT> &at)
{
    float z[2][4], dz[2][4];
    set_bias(z, w.b_1 + column, at.q);
    multiply(z, a, w.w_1 + column, f + 8, at);
    clear(dz);
    multiply_transposed(dz, dm, w.w_2 + column * w.LD, w.LD, at);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        ps_gelu_twice_backward(z[j / 4][j % 4], dz[j / 4][j % 4]);
    }
    pack_operand<T>(hidden, z[0], z[1]);
    pack_operand<T>(d_hidden, dz[0], dz[1]);
}

/* c to or onto 16 rows of d, from row g's column 2 q on. */
template <int D, int TILES> static __device__ __forceinline__ void put_tiles(float *out, const float (&c)[TILES][4], bool first)
{
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 *p = (float2 *)(out + 8 * h * D + t * 8), v = make_float2(c[t][2 * h], c[t][2 * h + 1]);
            if (!first) {
                v.x += p->x;
                v.y += p->y;
            }
            *p = v;
        }
    }
}

/* The sums of 16 rows, from their product with ones, to or onto sum. */
template <class T, int D, int NT>
static __device__ __forceinline__ void put_ones(float *sum, const float (&ones)[4], bool first, const place<T, D, NT> &at)
{
    sum[at.g] = first ? ones[0] : sum[at.g] + ones[0];
    sum[at.g + 8] = first ? ones[2] : sum[at.g + 8] + ones[2];
}

/* ---- launches ---- */

/* ps_cuda_launch, with more shared memory than a kernel has unasked. */
template <typename... P>
static inline enum ps_status ps_resident_launch(const struct ps_cuda_context *c, const char *what, void (*kernel)(P...), dim3 grid,
                                                int threads, size_t shared, const P &...arguments)
{
    if (shared > 48 * 1024) {
        PS_TRY(ps_cuda_allow_shared((const void *)kernel, shared, what));
    }
    ps_cuda_launch(c, kernel, grid, (unsigned)threads, shared, arguments...);
    PS_CUDA_LAUNCHED(what);
}

/* Memory that is taken piece after piece; its size alone with `begin` NULL. */
struct arena {
    char *begin;
    size_t bytes; /* so far */

    template <class T> void take(T *&to, int64_t count)
    {
        to = (T *)(begin + bytes);
        bytes += ((size_t)count * sizeof(T) + 255) / 256 * 256;
    }
};

/* Sequences of a unit, which may share a tile of 16 rows; units. */
static inline int64_t ps_resident_sequences(const struct ps_encoder_request *e)
{
    return e->patches <= 16 ? 16 / e->patches : 1;
}

static inline int64_t ps_resident_units(const struct ps_encoder_request *e)
{
    return (e->sequences + ps_resident_sequences(e) - 1) / ps_resident_sequences(e);
}

/* Dropout's masks, of units of so many tiles, and the embedding's. */
template <class T>
static inline void ps_resident_take_masks(struct arena &m, encoder<T> *x, const struct ps_encoder_request *e, int64_t tiles)
{
    const int64_t words = e->dropout.threshold ? ps_resident_units(e) * tiles * 8 : 0;
    m.take(x->masks, e->layers * words * (e->d_ff / 16 + e->d_model / 8));
    m.take(x->embed.masks, words * (e->d_model / 16));
}

/* The request, as kernels are told; what is kept, embedding, head and update are for the caller to add. */
template <class T> static inline encoder<T> ps_resident_of(const struct ps_encoder_request *e, int blocks)
{
    const int head = (int)(e->d_model / e->n_heads);
    const float scale = 1.0f / sqrtf((float)head);
    encoder<T> x = {};
    x.n = (int)e->patches;
    x.unit_rows = (int)(ps_resident_sequences(e) * e->patches);
    x.e = head;
    x.f = (int)e->d_ff;
    x.heads = (int)e->n_heads;
    x.layers = (int)e->layers;
    x.rows = e->sequences * e->patches;
    x.units = ps_resident_units(e);
    x.at = e->layout;
    x.weights = (const T *)e->weights;
    x.parameters = e->parameters;
    x.gradients = e->gradients;
    x.u = e->u;
    x.du = e->du;
    x.dy = e->dy;
    x.blocks = blocks;
    x.sums.hidden_blocks = blocks;
    x.scale = scale;
    x.scale_log2e = scale * PS_LOG2_E;
    x.epsilon = (float)e->epsilon;
    x.threshold = e->dropout.threshold;
    x.below = ps_below(x.threshold);
    x.minus_below = ps_minus_below(x.threshold);
    x.site = e->dropout.site;
    x.rows_before = ps_rows_before(e);
    x.drop_scale = x.threshold ? e->dropout.scale : 1.0f;
    x.half_scale = 0.5f * x.drop_scale;
    x.keys = ps_round_keys_make(e->dropout.seed);
    x.state = e->dropout.state;
    x.d64.fresh = e->fresh;
    return x;
}

/* ---- encoder/resident/d16_e4_f128.cu, of 16 bits ---- */

/* Of a block; floats of a unit's windows that it has room for: where its keys and values will lie. */
enum { D16_LEAST_UNITS = 4, D16_WINDOW_FLOATS = 1536 };

/* Whether it serves these sizes; with so much shared memory for so many units a block. */
bool ps_encoder_d16_serves(const struct ps_encoder_request *e);
size_t ps_encoder_d16_shared(const struct ps_encoder_request *e, int block_units);
/* Whether forward can do the head. */
bool ps_encoder_d16_heads(const struct ps_encoder_request *e, int block_units, int shared);
/* Tiles of a layer that it keeps: more than there are, since no unit of a block is left out. Then bytes of all layers', and with
 * the embedding's masks. */
int64_t ps_encoder_d16_tiles(const struct ps_encoder_request *e);
size_t ps_encoder_d16_layers_bytes(const struct ps_encoder_request *e);
size_t ps_encoder_d16_kept_bytes(const struct ps_encoder_request *e);
template <class T> enum ps_status ps_encoder_d16_forward(const struct ps_cuda_context *c, encoder<T> x, size_t shared);
template <class T> enum ps_status ps_encoder_d16_backward(const struct ps_cuda_context *c, const encoder<T> &x, size_t shared);

} // namespace ps_resident

#endif
