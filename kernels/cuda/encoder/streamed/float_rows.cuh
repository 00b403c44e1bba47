/* What goes by rows: LayerNorm, residuals and dropout, and their gradients.
 *
 * A warp has two pairs of rows, g and g + 8 of 16, for neighbouring g; a lane has columns 2 lane and 2 lane + 1 of them. What it
 * has of a pair is a fragment, v[pair]. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_ROWS_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_ROWS_CUH

#include "kernels/cuda/encoder/streamed/float_tile.cuh"

namespace PS_REAL16_SPACE
{

struct row_place {
    int lane, first; /* of the 32 pairs */
    __device__ __forceinline__ explicit row_place(const lane_place &at) : lane(at.lane), first(at.warp * 2)
    {
    }
    /* The pair's first row. */
    __device__ __forceinline__ int row(int pair) const
    {
        return (first + pair) / 8 * 16 + (first + pair) % 8;
    }
    /* Where the fragment lies, in floats. */
    __device__ __forceinline__ int in(int pair) const
    {
        return (((first + pair) / 8 * (D / 8) + lane / 4) * 32 + (((first + pair) % 8 * 4 + lane % 4) ^ (lane / 4 & 1) << 2)) * 4;
    }
};

struct row_values {
    float v[2][4];
};

/* From rows of a tensor in memory, ld columns apart, of the tile's first row on; rows that do not exist are zero. */
static __device__ __forceinline__ void take_rows(row_values &x, const float *from, int ld, int count, const row_place &at)
{
    const int first = at.row(0), left = count - first;
    from += (int64_t)first * ld + at.lane * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i / 2 + i % 2 * 8;
        float2 v = make_float2(0, 0);
        if (row < left) {
            v = *(const float2 *)(from + row * ld);
        }
        x.v[i / 2][i % 2] = v.x;
        x.v[i / 2][i % 2 + 2] = v.y;
    }
}

/* ROUNDED: for a weight's gradient. */
template <bool ROUNDED>
static __device__ __forceinline__ void keep_rows(float *to, const row_values &x, int count, const row_place &at)
{
    const int first = at.row(0), left = count - first;
    to += (int64_t)first * D + at.lane * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i / 2 + i % 2 * 8;
        if (row < left) {
            const float low = x.v[i / 2][i % 2], high = x.v[i / 2][i % 2 + 2];
            *(float2 *)(to + row * D) = ROUNDED ? make_float2(rounded(low), rounded(high)) : make_float2(low, high);
        }
    }
}

/* As operands to fragments; rows that do not exist are zero. */
static __device__ __forceinline__ void put_operands(float *a, const row_values &x, int count, const row_place &at)
{
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        const int row = at.row(pair);
        float v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = row + j % 2 * 8 < count ? operand(x.v[pair][j]) : 0.0f;
        }
        ps_store<4>(a + at.in(pair), v);
    }
}

/* x, rows of a tensor of d columns whose first is row0, dropped. Each of four lanes draws one of their rows. */
static __device__ __forceinline__ void drop_rows(row_values &x, const struct ps_dropout &dropout, int64_t row0, const row_place &at)
{
    const int q = at.lane % 4;
    const uint64_t block = (uint64_t)(row0 + at.row(q / 2) + q % 2 * 8) * (D / 8) + at.lane / 4;
    const uint32_t mask = quad_mask(dropout, dropout.state->step, (uint32_t)block, q);
#pragma unroll
    for (int j = 0; j < 8; j++) { /* row t, column e of the lane's two */
        const int t = j / 2, e = j % 2;
        x.v[t / 2][t % 2 + 2 * e] *= kept_scale(mask, t, e, dropout.scale);
    }
}

static __device__ __forceinline__ float row_sum(const row_values &x, int i)
{
    float sum = 0;
    sum += x.v[i / 2][i % 2] + x.v[i / 2][i % 2 + 2];
    return ps_group_sum<32>(sum);
}

static __device__ __forceinline__ float row_dot(const row_values &x, const row_values &y, int i)
{
    float sum = 0;
    sum += x.v[i / 2][i % 2] * y.v[i / 2][i % 2] + x.v[i / 2][i % 2 + 2] * y.v[i / 2][i % 2 + 2];
    return ps_group_sum<32>(sum);
}

/* A vector of d: the lane's columns. */
struct row_vector {
    float2 of;
    __device__ __forceinline__ row_vector(const float *from, const row_place &at) : of(*(const float2 *)(from + at.lane * 2))
    {
    }
    /* That of element j of a fragment. */
    __device__ __forceinline__ float at(int j) const
    {
        return j < 2 ? of.x : of.y;
    }
};

/* Each element of x: pair and j of it. */
#define PS_EACH _Pragma("unroll") for (int pair = 0; pair < 2; pair++) _Pragma("unroll") for (int j = 0; j < 4; j++)

/* x = xhat, in fp32, whose factors are rstd [4]. */
static __device__ __forceinline__ void normalise(row_values &x, float (&rstd)[4], float epsilon)
{
    float mean[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        mean[i] = row_sum(x, i) * (1.0f / D);
    }
    PS_EACH
    {
        x.v[pair][j] -= mean[pair * 2 + j % 2];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        rstd[i] = rsqrtf(fmaf(row_dot(x, x, i), 1.0f / D, epsilon));
    }
    PS_EACH
    {
        x.v[pair][j] *= rstd[pair * 2 + j % 2];
    }
}

/* LayerNorm of x, y = gamma xhat + beta, as operand to a; xhat and rstd to memory, unless xhat is NULL. */
static __device__ __forceinline__ void normalise_rows(float *a, row_values &x, const float *gamma, const float *beta, float *xhat,
                                                      float *rstd, float epsilon, int count, const row_place &at)
{
    const row_vector scale(gamma, at), shift(beta, at);
    float r[4];
    normalise(x, r, epsilon);
    if (xhat) {
        keep_rows<true>(xhat, x, count, at);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = at.row(i / 2) + i % 2 * 8;
            if (row < count && at.lane == 0) {
                rstd[row] = r[i];
            }
        }
    }
    PS_EACH
    {
        x.v[pair][j] = fmaf(x.v[pair][j], scale.at(j), shift.at(j));
    }
    put_operands(a, x, count, at);
}

/* Forward: y = residual + drop(a + bias), to `out`; then LayerNorm of it, if there is a gamma. Tensors are of the tile's first row
 * on. */
static __device__ __forceinline__ void finish_rows(float *a, const float *residual, float *out, const float *bias,
                                                   const struct ps_dropout &dropout, const float *gamma, const float *beta,
                                                   float *xhat, float *rstd, float epsilon, int64_t row0, int count,
                                                   const lane_place &lane)
{
    const row_place at(lane);
    row_values x, u;
    take_rows(u, residual, D, count, at);
    const row_vector b(bias, at);
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        ps_load<4>(x.v[pair], a + at.in(pair));
    }
    PS_EACH
    {
        x.v[pair][j] += b.at(j);
    }
    if (dropout.threshold) {
        drop_rows(x, dropout, row0, at);
    }
    PS_EACH
    {
        x.v[pair][j] += u.v[pair][j];
    }
    keep_rows<false>(out, x, count, at);
    if (gamma) {
        normalise_rows(a, x, gamma, beta, xhat, rstd, epsilon, count, at);
    }
}

/* Backward: g = from + LayerNorm's gradient of a (gamma NULL: g = from), to `du`; then drop'(g) to `masked` and, as operand, to a
 * (masked NULL: neither). from may be du. */
static __device__ __forceinline__ void gradient_rows(float *a, const float *from, float *du, const float *gamma, const float *xhat,
                                                     const float *rstd, const struct ps_dropout &dropout, float *masked,
                                                     int64_t row0, int count, const lane_place &lane)
{
    const row_place at(lane);
    row_values g;
    take_rows(g, from, D, count, at);
    if (gamma) {
        row_values x, d;
        float r[4], mean[4], slope[4];
        take_rows(x, xhat, D, count, at);
        const row_vector scale(gamma, at);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = at.row(i / 2) + i % 2 * 8;
            r[i] = row < count ? rstd[row] : 0.0f;
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            ps_load<4>(d.v[pair], a + at.in(pair));
        }
        PS_EACH
        {
            d.v[pair][j] *= scale.at(j);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            mean[i] = row_sum(d, i) * (1.0f / D);
            slope[i] = row_dot(d, x, i) * (1.0f / D);
        }
        PS_EACH
        {
            const int i = pair * 2 + j % 2;
            g.v[pair][j] += r[i] * (d.v[pair][j] - mean[i] - x.v[pair][j] * slope[i]);
        }
    }
    keep_rows<false>(du, g, count, at);
    if (masked) {
        if (dropout.threshold) {
            drop_rows(g, dropout, row0, at);
        }
        keep_rows<true>(masked, g, count, at);
        put_operands(a, g, count, at);
    }
}

} // namespace PS_REAL16_SPACE

#endif
