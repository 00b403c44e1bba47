/* Products of 16 bits on Hopper, c = a b of many rows, with what follows them done on the way out (ps_gemm_finish, ps_gemm_bias).
 *
 * Why: between two products of a layer stand a bias, an activation, dropout, the residual stream and a norm's sums over rows, each
 * a pass over [m, n] of its own otherwise. The copy engine brings 64 of the summed dimension at a time to panels in shared memory,
 * zeros beyond the edges; wgmma multiplies them there. Three kernels: held_kernel (wgmma16_held.cuh), whose blocks keep columns of
 * the right operand and let rows pass, for few terms; norm_kernel (wgmma16_norm.cuh), whose blocks keep all columns, for what ends
 * with a norm of rows; long_kernel (wgmma16_long.cuh), for the others. wgmma16_out.cuh is what they do with the sums. Bytes and
 * FLOPs stand there. */
#ifndef PS_KERNELS_CUDA_GEMM_WGMMA16_CUH
#define PS_KERNELS_CUDA_GEMM_WGMMA16_CUH

#include "kernels/cuda/gemm/wgmma16_held.cuh"
#include "kernels/cuda/gemm/wgmma16_long.cuh"
#include "kernels/cuda/gemm/wgmma16_norm.cuh"

namespace wgmma16
{

/* Which kernel: held where the rows are read few times or the outputs are more, else the long one. Tiles may be wide where the sums
 * go out as they are or by an activation, and where the last one is not half empty; else the registers are better spent on what
 * follows. Where they are not wide, an activation or its slope may have more warpgroups. Measured on an H200,
 * docs/experiments/products.md. */
template <typename T, bool ACROSS, enum ps_finish FINISH, bool COUNTED>
static enum ps_status launch_columns(const struct ps_cuda_context *c, const char *op, const struct ps_product *p,
                                     const struct call &x)
{
    enum { MOST_TERMS = 512, READ_AT_MOST = 2304 /* terms of a row, over all slices */ };
    constexpr bool SLOPES = FINISH == PS_FINISH_ACTIVATION || FINISH == PS_FINISH_SLOPE;
    constexpr bool WIDER = SLOPES || (FINISH == PS_FINISH_SUM && !COUNTED);
    const int rest = x.n % WIDE;
    auto few = [&](const struct call &held) { return x.k <= MOST_TERMS && (x.n > x.k || held.slices * x.k <= READ_AT_MOST); };
    struct call held = x, wide = x;
    if (x.n <= 32) {
        return hold<32, ACROSS, FINISH, COUNTED>(c, held) < INFINITY && few(held)
                   ? launch_held<T, 32, ACROSS, FINISH, COUNTED>(c, op, p, held)
                   : launch_long<T, ACROSS, FINISH, COUNTED>(c, op, p, x);
    }
    const double cost = hold<64, ACROSS, FINISH, COUNTED>(c, held);
    if constexpr (WIDER) {
        if (x.n > 64 && !(rest > 0 && rest <= 64) && !x.addend && hold<WIDE, ACROSS, FINISH, COUNTED>(c, wide) < cost &&
            few(wide)) {
            return launch_held<T, WIDE, ACROSS, FINISH, COUNTED>(c, op, p, wide);
        }
    }
    if constexpr (SLOPES) {
        struct call more = x;
        if (hold<64, ACROSS, FINISH, COUNTED, MORE_CREWS>(c, more) < cost && few(more)) {
            return launch_held<T, 64, ACROSS, FINISH, COUNTED, MORE_CREWS>(c, op, p, more);
        }
    }
    return cost < INFINITY && few(held) ? launch_held<T, 64, ACROSS, FINISH, COUNTED>(c, op, p, held)
                                        : launch_long<T, ACROSS, FINISH, COUNTED>(c, op, p, x);
}

/* c = a b + bias + addend. */
template <typename T> enum ps_status product(const struct ps_cuda_context *c, const char *op, const struct ps_product *p)
{
    struct call x = {};
    x.m = p->m;
    x.n = (int)p->n;
    x.k = (int)p->k;
    x.ldc = p->c.row;
    x.settled = p->settled;
    x.c = p->c.data;
    x.bias = (const float *)p->bias;
    x.addend = p->addend;
    return p->b.column == 1 ? launch_columns<T, true, PS_FINISH_SUM, false>(c, op, p, x)
                            : launch_columns<T, false, PS_FINISH_SUM, false>(c, op, p, x);
}

/* Which weights' products end how: forward along n, backward along k. */
template <typename T>
enum ps_status finish(const struct ps_cuda_context *c, const char *op, const struct ps_product *p, const struct ps_gemm_finish *f)
{
    struct call x = {};
    x.m = p->m;
    x.n = (int)p->n;
    x.k = (int)p->k;
    x.ldc = p->c.row;
    x.settled = p->settled;
    x.c = p->c.data;
    x.kept = f->kept.data;
    x.addend = f->addend.data;
    x.x = f->x.data;
    x.bias = (const float *)f->bias.data;
    x.addend_scale = (const float *)f->addend_scale.data;
    x.addend_shift = (const float *)f->addend_shift.data;
    x.dropout = f->dropout;
    x.keys = ps_round_keys_make(f->dropout.seed);
    x.activation = f->activation;
    x.mean = (float *)f->mean.data;
    x.var = (float *)f->var.data;
    x.running_mean = (float *)f->running_mean.data;
    x.running_var = (float *)f->running_var.data;
    x.means = (float *)f->means.data;
    x.dgamma = (float *)f->dgamma.data;
    x.dbeta = (float *)f->dbeta.data;
    x.momentum = f->momentum;
    x.epsilon = (float)f->epsilon;
    const bool across = p->b.column == 1;
    switch (f->finish) {
    case PS_FINISH_SUM:
        return across          ? PS_UNSUPPORTED
               : f->rstd.data  ? launch_norm_columns<T, PS_FINISH_SUM>(c, op, p, x, f)
               : f->means.data ? launch_columns<T, false, PS_FINISH_SUM, true>(c, op, p, x)
                               : launch_columns<T, false, PS_FINISH_SUM, false>(c, op, p, x);
    case PS_FINISH_RESIDUAL:
        return !across          ? PS_UNSUPPORTED
               : f->normed.data ? launch_norm_columns<T, PS_FINISH_RESIDUAL>(c, op, p, x, f)
               : f->mean.data   ? launch_columns<T, true, PS_FINISH_RESIDUAL, true>(c, op, p, x)
                                : launch_columns<T, true, PS_FINISH_RESIDUAL, false>(c, op, p, x);
    case PS_FINISH_ACTIVATION:
        return across ? launch_columns<T, true, PS_FINISH_ACTIVATION, false>(c, op, p, x) : PS_UNSUPPORTED;
    case PS_FINISH_SLOPE:
        return across ? PS_UNSUPPORTED : launch_columns<T, false, PS_FINISH_SLOPE, false>(c, op, p, x);
    }
    return PS_UNSUPPORTED;
}

/* WHERE: nothing, or extern where another file has them. */
#define PS_WGMMA16_OF(WHERE, T)                                                                                            \
    WHERE template enum ps_status product<T>(const struct ps_cuda_context *c, const char *op, const struct ps_product *p); \
    WHERE template enum ps_status finish<T>(const struct ps_cuda_context *c, const char *op, const struct ps_product *p,   \
                                            const struct ps_gemm_finish *f);

} // namespace wgmma16

#endif
