/* batchnorm_backward: two passes over the rows.
 *
 * Why: dx needs the sums of g and g xhat over all rows. The first pass makes them (ops/columns.cuh: a block's share, then the last
 * block of a tile of columns in double, in a fixed order, which also adds to dgamma and dbeta), the second reads the same again,
 * from the last rows, which the second-level cache still holds, to the first, which the next product will read first. Both fetch
 * x, its statistics and parameters before they wait for who wrote dy: x has had a product or the loss behind it since. With `more`
 * both passes read it: to leave dy + more in dx between them would move as many bytes and round once more. Where ranks share the
 * rows, each pass is a call of its own.
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

/* By the last block of a tile. */
template <int VEC, typename T>
static __device__ __forceinline__ void finish_sums(const struct gradient<T> &a, const struct sharing &s, int tile, double *shared)
{
    constexpr int fv = final_vec<VEC>;
    const int bits = s.tx_bits + final_bits<VEC>, tx = threadIdx.x & ((1 << bits) - 1), ty = threadIdx.x >> bits;
    const int column = ((tile << bits) + tx) * fv;
    double sum[fv], product[fv];
    float origin[fv], dgamma[fv], dbeta[fv];
    const bool mine = ty == 0 && column < s.d;
    load_columns(dgamma, a.dgamma, column, mine);
    load_columns(dbeta, a.dbeta, column, mine);
    add_shares<fv, false>(sum, product, origin, a.partials, s, column, ty, bits, shared);
    if (!mine) {
        return;
    }
#pragma unroll
    for (int j = 0; j < fv; j++) {
        const int i = column + j;
        a.dbeta[i] = dbeta[j] + (float)sum[j];
        a.dgamma[i] = dgamma[j] + (float)product[j];
        a.means[i] = (float)(sum[j] / (double)a.all);
        a.means[s.d + i] = (float)(product[j] / (double)a.all);
    }
}

template <typename T, int VEC, enum other OTHER>
static __global__ void __launch_bounds__(block, resident) gradient_sums(const struct gradient<T> a, const struct sharing s)
{
    constexpr int flight = 2;
    __shared__ double shared[2 * final_vec<VEC> * block];
    const place<VEC> at(s);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float mean[VEC], sum[VEC], product[VEC];
    held<T, VEC> x[flight], dy[flight], more[OTHER == MORE ? flight : 1];
    load_columns(mean, a.mean, at.column, at.inside);
    zero(sum);
    zero(product);
    int64_t element = at.at;
#pragma unroll
    for (int r = 0; r < flight; r++) {
        x[r] = hold<VEC>(a.x + element + r * at.step, r < at.count);
    }
    ps_grid_begin();
    for (int turn = 0; turn < s.turns; turn += flight) {
#pragma unroll
        for (int r = 0; r < flight; r++) {
            dy[r] = hold<VEC>(a.dy + element + r * at.step, turn + r < at.count);
            if constexpr (OTHER == MORE) {
                more[r] = hold<VEC>(a.other + element + r * at.step, turn + r < at.count);
            }
        }
#pragma unroll
        for (int r = 0; r < flight; r++) {
            float g[VEC], value[VEC];
            unpack<VEC, T>(g, dy[r]);
            if constexpr (OTHER == MORE) {
                float extra[VEC];
                unpack<VEC, T>(extra, more[r]);
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    g[j] += extra[j];
                }
            }
            unpack<VEC, T>(value, x[r]);
#pragma unroll
            for (int j = 0; j < VEC; j++) { /* of a row that is not there g is 0 */
                sum[j] += g[j];
                product[j] += g[j] * (value[j] - mean[j]);
            }
        }
        element += flight * at.step;
#pragma unroll
        for (int r = 0; r < flight; r++) {
            x[r] = hold<VEC>(a.x + element + r * at.step, turn + flight + r < at.count);
        }
    }
    float *const sums = (float *)shared; /* [2 VEC][block] */
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        sums[j * block + threadIdx.x] = sum[j];
        sums[(VEC + j) * block + threadIdx.x] = product[j];
    }
    __syncthreads();
    if (warp < 2 * VEC) { /* a value each */
        const int column = (at.tile * s.across + lane) * VEC + warp % VEC;
        const bool mine = lane < s.across && column < s.d;
        const float factor = mine && warp >= VEC ? rsqrtf(a.var[column] + a.epsilon) : 1.0f,
                    all = sum_threads(sums + warp * block, s.tx_bits);
        if (mine) {
            a.partials[((int64_t)at.share * 2 + warp / VEC) * s.d + column] = all * factor;
        }
    }
    if (ps_comes_last(a.tickets + at.tile, (unsigned)s.shares)) {
        finish_sums<VEC>(a, s, at.tile, shared);
    }
}

/* Which of the VEC elements from `element` on are kept: bit j / 2 of the low half for an even j, of the high half for an odd one.
 */
static __device__ __forceinline__ uint32_t kept_bits(const struct ps_dropout &d, uint64_t step, int64_t element)
{
    const struct ps_block draws = ps_draws(d, step, (uint32_t)(element / 8));
    const uint32_t below = ps_below(d.threshold), minus_below = ps_minus_below(d.threshold);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        bits |= ps_kept2(draws.word[j], below, minus_below) << j;
    }
    return bits;
}

/* dx = scale (g - g_mean - (x - mean) slope), + other. Rows of a thread from its last to its first: what the next one needs is on
 * its way while one is worked out. */
template <typename T, int VEC, enum other OTHER>
static __global__ void __launch_bounds__(pass_block, pass_resident)
    gradient_rows(const struct gradient<T> a, const struct sharing s)
{
    const place<VEC> at(s);
    const bool drops = a.masked && a.dropout.threshold;
    const uint64_t step = drops ? a.dropout.state->step : 0;
    int turn = s.turns - 1;
    int64_t element = at.at + turn * at.step;
    constexpr int ahead = OTHER == NOTHING ? 2 : 1; /* rows of x: registers */
    held<T, VEC> x[ahead], dy, other;
#pragma unroll
    for (int r = 0; r < ahead; r++) {
        x[r] = hold<VEC>(a.x + element - r * at.step, turn >= r && turn - r < at.count);
    }
    float mean[VEC], g_mean[VEC], slope[VEC], scale[VEC];
    {
        float var[VEC];
        load_columns(var, a.var, at.column, at.inside);
        load_columns(mean, a.mean, at.column, at.inside);
        load_columns(scale, a.gamma, at.column, at.inside);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            slope[j] = rsqrtf(var[j] + a.epsilon);
            scale[j] *= slope[j];
        }
    }
    uint32_t kept = 0;
    if (VEC == 8 && drops) {
        kept = kept_bits(a.dropout, step, element);
    }
    ps_grid_begin();
    dy = hold<VEC>(a.dy + element, turn < at.count);
    if constexpr (OTHER != NOTHING) {
        other = hold<VEC>(a.other + element, turn < at.count);
    }
    {
        float of_product[VEC];
        load_columns(g_mean, a.means, at.column, at.inside);
        load_columns(of_product, a.means + s.d, at.column, at.inside);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            slope[j] *= of_product[j];
            if constexpr (VEC == 8) { /* for the registers' sake; x of 16 bits is rounded more coarsely than this sum */
                g_mean[j] -= mean[j] * slope[j];
                mean[j] = 0.0f;
            }
        }
    }
#pragma unroll 1
    for (; turn >= 0; turn--, element -= at.step) {
        const bool next = turn >= 1 && turn - 1 < at.count;
        const held<T, VEC> next_dy = hold<VEC>(a.dy + element - at.step, next),
                           next_x = hold<VEC>(a.x + element - ahead * at.step, turn >= ahead && turn - ahead < at.count);
        held<T, VEC> next_other;
        if constexpr (OTHER != NOTHING) {
            next_other = hold<VEC>(a.other + element - at.step, next);
        }
        if (turn < at.count) {
            float g[VEC], value[VEC], extra[VEC];
            unpack<VEC, T>(g, dy);
            unpack<VEC, T>(value, x[0]);
            if constexpr (OTHER != NOTHING) {
                unpack<VEC, T>(extra, other);
            }
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const float up = OTHER == MORE ? g[j] + extra[j] : g[j];
                const float out = scale[j] * (up - g_mean[j] - (value[j] - mean[j]) * slope[j]);
                g[j] = OTHER == ADDEND ? out + extra[j] : out;
            }
            ps_store<VEC>(a.dx + element, g);
            if constexpr (VEC == 8) {
                if (a.masked) {
                    uint32_t words[VEC / 2];
#pragma unroll
                    for (int j = 0; j < VEC / 2; j++) {
                        words[j] = ps_pack<T>(g + 2 * j);
                    }
                    if (drops) { /* of dx as it is stored */
#pragma unroll
                        for (int j = 0; j < VEC / 2; j++) {
                            float pair[2];
                            ps_unpack<T>(pair, words[j]);
                            pair[0] *= a.dropout.scale;
                            pair[1] *= a.dropout.scale;
                            words[j] = ps_pack<T>(pair) & (kept >> j & 0x00010001u) * 0xffffu;
                        }
                    }
                    *(uint4 *)(a.masked + element) = make_uint4(words[0], words[1], words[2], words[3]);
                }
            } else if (a.masked) {
                ps_store_dropped<VEC>(a.masked, element, g, a.dropout, step);
            }
        }
        if (VEC == 8 && drops && turn > 0) {
            kept = kept_bits(a.dropout, step, element - at.step);
        }
        x[0] = x[ahead - 1];
        x[ahead - 1] = next_x;
        dy = next_dy;
        if constexpr (OTHER != NOTHING) {
            other = next_other;
        }
    }
}

template <typename T, int VEC, enum other OTHER>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, struct gradient<T> a, int64_t rows, int64_t d)
{
    struct sharing s;
    if (!a.means || !a.dx) {
        PS_TRY(sharing_of_sum(c, op, rows, d, VEC, &s));
        a.partials = (float *)c->workspace;
        a.means = a.means ? a.means : a.partials + (int64_t)s.shares * 2 * d;
        a.tickets = c->tiles_done;
        ps_cuda_launch(c, gradient_sums < T, VEC, OTHER == MORE ? MORE : NOTHING >, sharing_blocks(s), block, 0, a, s);
        PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    }
    if (!a.dx) {
        return PS_OK;
    }
    PS_TRY(sharing_of_pass(c, op, rows, d, VEC, &s));
    ps_cuda_launch(c, gradient_rows<T, VEC, OTHER>, sharing_blocks(s), pass_block, 0, a, s);
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
