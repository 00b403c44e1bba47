/* batchnorm_backward: two passes over the rows.
 *
 * Why: dx needs the sums of g and g xhat over all rows. The first pass makes them (ops/columns.cuh: a block's share, then the last
 * block of a tile of columns in double, in a fixed order, which also adds to dgamma and dbeta), the second reads the same again,
 * each share from its end, which the second-level cache still holds. With `more` both passes read it: to leave dy + more in dx
 * between them would move as many bytes and round once more. Where ranks share the rows, each pass is a call of its own.
 *
 * dx =; dgamma, dbeta +=. Memory bounds it. Bytes, in float and half of them in 16 bits: 20 R d, 28 R d with more, 24 R d with an
 * addend. Flops: 10 R d. */
#include "kernels/cuda/ops/columns.cuh"
#include "kernels/cuda/tile/dropout.cuh"

/* What else is read besides dy and x: nothing, a second part of g, or what is added to dx. */
enum other { NOTHING, MORE, ADDEND };

template <typename T> struct gradient {
    T *dx;     /* may be dy or the addend */
    T *masked; /* or NULL */
    const T *dy, *x, *other;
    const float *mean, *var, *gamma;
    float *dgamma, *dbeta, *partials, *means /* [2, d]: of g and of g xhat */;
    unsigned *tickets;
    struct ps_dropout dropout; /* of masked */
    float epsilon;
    int64_t all; /* rows that the means are over */
};

/* Rows whose loads a thread has under way at once. */
template <int VEC> static constexpr int rows_in_flight = VEC == 8 ? 1 : 2;

/* By the last block of a tile. */
template <int VEC, typename T>
static __device__ __forceinline__ void finish_sums(const struct gradient<T> &a, const struct sharing &s, int tile, double *shared)
{
    constexpr int fv = final_vec<VEC>;
    const int bits = s.tx_bits + final_bits<VEC>, tx = threadIdx.x & ((1 << bits) - 1), ty = threadIdx.x >> bits;
    const int column = ((tile << bits) + tx) * fv;
    double sum[fv], product[fv];
    float origin[fv];
    add_shares<fv, false>(sum, product, origin, a.partials, s, column, ty, bits, shared);
    if (ty > 0 || column >= s.d) {
        return;
    }
#pragma unroll
    for (int j = 0; j < fv; j++) {
        const int i = column + j;
        a.dbeta[i] += (float)sum[j];
        a.dgamma[i] += (float)product[j];
        a.means[i] = (float)(sum[j] / (double)a.all);
        a.means[s.d + i] = (float)(product[j] / (double)a.all);
    }
}

template <typename T, int VEC, enum other OTHER>
static __global__ void __launch_bounds__(block, resident) gradient_sums(const struct gradient<T> a, const struct sharing s)
{
    ps_grid_begin();
    constexpr int flight = rows_in_flight<VEC>;
    __shared__ double shared[2 * final_vec<VEC> * block];
    const place<VEC> at(s);
    float mean[VEC], sum[VEC], product[VEC];
    load_columns(mean, a.mean, at.column, at.inside);
    zero(sum);
    zero(product);
#pragma unroll 2
    for (int base = at.ty; base < at.length; base += flight * at.height) {
        float g[flight][VEC], x[flight][VEC], other[OTHER == MORE ? flight : 1][VEC];
#pragma unroll
        for (int r = 0; r < flight; r++) {
            const int row = base + r * at.height;
            const int64_t element = at.at + (int64_t)row * s.d;
            if (at.live(row)) {
                ps_load<VEC>(g[r], a.dy + element);
                ps_load<VEC>(x[r], a.x + element);
                if constexpr (OTHER == MORE) {
                    ps_load<VEC>(other[r], a.other + element);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < flight; r++) {
            if (at.live(base + r * at.height)) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    const float up = OTHER == MORE ? g[r][j] + other[OTHER == MORE ? r : 0][j] : g[r][j];
                    sum[j] += up;
                    product[j] += up * (x[r][j] - mean[j]);
                }
            }
        }
    }
    float *const sums = (float *)shared; /* [2 VEC][block] */
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        sums[j * block + threadIdx.x] = sum[j];
        sums[(VEC + j) * block + threadIdx.x] = product[j];
    }
    __syncthreads();
    for (int half = at.height / 2; half > 0; half /= 2) {
        if (at.ty < half) {
#pragma unroll
            for (int j = 0; j < 2 * VEC; j++) {
                sums[j * block + threadIdx.x] += sums[j * block + threadIdx.x + (half << s.tx_bits)];
            }
        }
        __syncthreads();
    }
    if (at.ty == 0 && at.inside) {
        load_columns(mean, a.var, at.column, true);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            sum[j] = sums[j * block + threadIdx.x];
            product[j] = sums[(VEC + j) * block + threadIdx.x] * rsqrtf(mean[j] + a.epsilon);
        }
        float *const to = a.partials + at.share * 2 * s.d + at.column;
        ps_store<VEC>(to, sum);
        ps_store<VEC>(to + s.d, product);
    }
    if (ps_comes_last(a.tickets + at.tile, (unsigned)s.shares)) {
        finish_sums<VEC>(a, s, at.tile, shared);
    }
}

/* dx = scale (g - g_mean - (x - mean) slope), + other. */
template <typename T, int VEC, enum other OTHER>
static __global__ void __launch_bounds__(block, resident) gradient_rows(const struct gradient<T> a, const struct sharing s)
{
    ps_grid_begin();
    constexpr int flight = rows_in_flight<VEC>;
    const place<VEC> at(s);
    float mean[VEC], g_mean[VEC], slope[VEC], scale[VEC];
    {
        float var[VEC];
        load_columns(var, a.var, at.column, at.inside);
        load_columns(mean, a.mean, at.column, at.inside);
        load_columns(g_mean, a.means, at.column, at.inside);
        load_columns(slope, a.means + s.d, at.column, at.inside);
        load_columns(scale, a.gamma, at.column, at.inside);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const float rstd = rsqrtf(var[j] + a.epsilon);
            slope[j] *= rstd;
            scale[j] *= rstd;
            if constexpr (VEC == 8) { /* for the registers' sake; x of 16 bits is rounded more coarsely than this sum */
                g_mean[j] -= mean[j] * slope[j];
                mean[j] = 0.0f;
            }
        }
    }
    const uint64_t steps = a.masked && a.dropout.threshold ? a.dropout.state->step : 0;
    const int step = flight * at.height;
    const int last = (at.length - 1) / step * step + at.ty;
    int64_t element = at.at + (int64_t)last * s.d;
    for (int base = last; base >= 0; base -= step, element -= (int64_t)step * s.d) {
        float g[flight][VEC], x[flight][VEC], other[OTHER == NOTHING ? 1 : flight][VEC];
#pragma unroll
        for (int r = 0; r < flight; r++) {
            const int64_t at_row = element + r * at.height * (int64_t)s.d;
            if (at.live(base + r * at.height)) {
                ps_load<VEC>(g[r], a.dy + at_row);
                ps_load<VEC>(x[r], a.x + at_row);
                if constexpr (OTHER != NOTHING) {
                    ps_load<VEC>(other[r], a.other + at_row);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < flight; r++) {
            if (at.live(base + r * at.height)) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    const float extra = OTHER == NOTHING ? 0.0f : other[OTHER == NOTHING ? 0 : r][j];
                    const float up = OTHER == MORE ? g[r][j] + extra : g[r][j];
                    const float out = scale[j] * (up - g_mean[j] - (x[r][j] - mean[j]) * slope[j]);
                    g[r][j] = OTHER == ADDEND ? out + extra : out;
                }
                const int64_t to = element + r * at.height * (int64_t)s.d;
                ps_store<VEC>(a.dx + to, g[r]);
                if (a.masked) {
                    ps_store_dropped<VEC>(a.masked, to, g[r], a.dropout, steps);
                }
            }
        }
    }
}

template <typename T, int VEC, enum other OTHER>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, struct gradient<T> a, int64_t rows, int64_t d)
{
    struct sharing s;
    PS_TRY(sharing_make(c, op, rows, d, VEC, &s));
    if (!a.means || !a.dx) {
        a.partials = (float *)c->workspace;
        a.means = a.means ? a.means : a.partials + s.shares * 2 * d;
        a.tickets = c->tiles_done;
        ps_cuda_launch(c, gradient_sums < T, VEC, OTHER == MORE ? MORE : NOTHING >, sharing_blocks(s), block, 0, a, s);
        PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    }
    if (!a.dx) {
        return PS_OK;
    }
    ps_cuda_launch(c, gradient_rows<T, VEC, OTHER>, sharing_blocks(s), block, 0, a, s);
    PS_CUDA_LAUNCHED(op);
}

template <typename T, int VEC>
static enum ps_status launch_other(const struct ps_cuda_context *c, const char *op, const struct gradient<T> &a, enum other other,
                                   int64_t rows, int64_t d)
{
    return other == MORE     ? launch<T, VEC, MORE>(c, op, a, rows, d)
           : other == ADDEND ? launch<T, VEC, ADDEND>(c, op, a, rows, d)
                             : launch<T, VEC, NOTHING>(c, op, a, rows, d);
}

template <typename T> static enum ps_status batchnorm_backward(const struct ps_kernels *k, const struct ps_batchnorm_backward *a)
{
    const char *op = "batchnorm_backward";
    const int64_t d = ps_cuda_width(&a->gamma), rows = d > 0 ? ps_tensor_count(&a->x) / d : 0;
    PS_TRY(ps_cuda_expect(op, "x", &a->x, ps_type_of<T>, rows * d));
    const bool alone = a->means.data && !a->dx.data; /* the sums */
    PS_TRY(alone ? PS_OK : ps_cuda_expect(op, "dx", &a->dx, ps_type_of<T>, rows * d));
    PS_TRY(ps_cuda_expect(op, "dy", &a->dy, ps_type_of<T>, rows * d));
    PS_TRY(a->more.data ? ps_cuda_expect(op, "more", &a->more, ps_type_of<T>, rows * d) : PS_OK);
    PS_TRY(a->addend.data ? ps_cuda_expect(op, "addend", &a->addend, ps_type_of<T>, rows * d) : PS_OK);
    PS_TRY(ps_cuda_expect(op, "mean", &a->mean, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "var", &a->var, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "gamma", &a->gamma, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "dgamma", &a->dgamma, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "dbeta", &a->dbeta, PS_F32, d));
    PS_TRY(a->masked.data ? ps_cuda_expect(op, "masked", &a->masked, ps_type_of<T>, rows * d) : PS_OK);
    PS_TRY(a->means.data ? ps_cuda_expect(op, "means", &a->means, PS_F32, 2 * d) : PS_OK);
    if (a->more.data && (a->addend.data || (a->means.data && !alone))) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): more and %s, both", op, a->addend.data ? "addend" : "means");
    }
    if (rows == 0) {
        return PS_OK;
    }
    const struct ps_tensor &other = a->more.data ? a->more : a->addend; /* absent: NULL, which is aligned */
    const bool vector = d % ps_vector<T> == 0 && ps_cuda_aligned(&a->x) && ps_cuda_aligned(&a->dx) && ps_cuda_aligned(&a->dy) &&
                        ps_cuda_aligned(&other) && ps_cuda_aligned(&a->masked);
    struct gradient<T> g = {
    };
    g.dx = (T *)a->dx.data;
    g.masked = (T *)a->masked.data;
    g.dy = (const T *)a->dy.data;
    g.x = (const T *)a->x.data;
    g.other = (const T *)other.data;
    g.mean = (const float *)a->mean.data;
    g.var = (const float *)a->var.data;
    g.gamma = (const float *)a->gamma.data;
    g.dgamma = (float *)a->dgamma.data;
    g.dbeta = (float *)a->dbeta.data;
    g.means = (float *)a->means.data;
    g.dropout = a->dropout;
    g.epsilon = (float)a->epsilon;
    g.all = alone ? a->rows : rows;
    const enum other which = a->more.data ? MORE : a->addend.data ? ADDEND : NOTHING;
    return vector ? launch_other<T, ps_vector<T>>(ps_cuda(k), op, g, which, rows, d)
                  : launch_other<T, 1>(ps_cuda(k), op, g, which, rows, d);
}

extern "C" enum ps_status ps_cuda_batchnorm_backward(const struct ps_kernels *k, const struct ps_batchnorm_backward *a)
{
    return PS_BY_REAL(k, batchnorm_backward, k, a);
}
