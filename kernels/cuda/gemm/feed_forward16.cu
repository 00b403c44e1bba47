/* A layer's feed-forward in 16 bits: gemm/feed_forward16.cuh's kernels, their instances and their launches. */
#include "kernels/cuda/gemm/feed_forward16.cuh"

using namespace wgmma16;

bool ps_cuda_feed_forward16_serves(const struct ps_kernels *k, int64_t rows, int64_t d, int64_t f, enum ps_activation activation)
{
    return ps_cuda(k)->compute_capability == 90 && k->real != PS_F32 && activation != PS_SWIGLU && rows >= 1 && d >= 16 &&
           d <= 128 && d % 8 == 0 && f >= 16 && f % 8 == 0 && f <= 1 << 16 && rows <= (int64_t)1 << 30 &&
           rows * f / 8 < (int64_t)1 << 32;
}

/* The chunks that shared memory has room for beside `rest` bytes: all of them, or 2 to 4. */
template <int D> static int stages_of(const struct ps_cuda_context *c, int chunks, int rest)
{
    const int room = (c->shared_bytes - rest) / chunk_bytes<D>;
    return chunks <= room && chunks <= MOST_CHUNKS ? chunks : room < 4 ? room : 4;
}

/* Static shared memory and what aligns the rest, at most. */
template <int D, bool COUNTED>
static constexpr int static_bytes = 2048 +
                                    (COUNTED ? CREWS * (8 * D * (int)sizeof(float2) + 2 * THREADS * (int)sizeof(double)) : 0);

static struct call call_of(int64_t rows, int d)
{
    struct call x = {};
    x.m = rows;
    x.n = d;
    x.ldc = d;
    x.tiles_n = 1;
    x.tiles_m = (int)((rows + ROWS - 1) / ROWS);
    return x;
}

template <int D>
static enum ps_status maps_of(struct chain_maps *maps, const void *x, const void *dy, const void *w_1, const void *w_2,
                              int64_t rows, int d, int f)
{
    PS_TRY(ps_tensor_map_2d(&maps->x, x, rows, d, 2 * d, ROWS, 64));
    PS_TRY(ps_tensor_map_2d(&maps->dy, dy, rows, d, 2 * d, ROWS, 64));
    PS_TRY(ps_tensor_map_2d(&maps->w_1, w_1, d, f, 2 * f, D, CHUNK));
    return ps_tensor_map_2d(&maps->w_2, w_2, f, d, 2 * d, CHUNK, 64);
}

template <typename K>
static enum ps_status launch_chain(const struct ps_cuda_context *c, const char *op, K *kernel, const struct chain_maps &maps,
                                   const struct call &x, const struct chain &h, int bytes)
{
    const int blocks = (x.tiles_m + CREWS - 1) / CREWS, grid = blocks < c->multiprocessors ? blocks : c->multiprocessors;
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op));
    ps_cuda_launch(c, kernel, dim3((unsigned)grid), (unsigned)(CREWS * THREADS), (size_t)bytes, maps, x, h);
    PS_CUDA_LAUNCHED(op);
}

template <typename T, int D, bool COUNTED>
static enum ps_status forward(const struct ps_cuda_context *c, const struct ps_feed_forward *a)
{
    static const char op[] = "feed_forward";
    const int64_t rows = a->x.size[0];
    const int d = (int)a->x.size[1], f = (int)a->w_2.size[0];
    struct call x = call_of(rows, d);
    x.c = a->y.data;
    x.addend = a->residual.data;
    x.bias = (const float *)a->b_2.data;
    x.dropout = a->output_dropout;
    x.activation = a->activation;
    x.mean = (float *)a->mean.data;
    x.var = (float *)a->var.data;
    x.running_mean = (float *)a->running_mean.data;
    x.running_var = (float *)a->running_var.data;
    x.momentum = a->momentum;
    struct chain h = {};
    h.f = f;
    h.chunks = (f + CHUNK - 1) / CHUNK;
    h.stages = stages_of<D>(c, h.chunks, static_bytes<D, COUNTED> + CREWS * crew_bytes<D, 1>);
    h.b_1 = (const float *)a->b_1.data;
    h.hidden_dropout = a->hidden_dropout;
    struct chain_maps maps;
    PS_TRY(maps_of<D>(&maps, a->x.data, a->x.data, a->w_1.data, a->w_2.data, rows, d, f));
    if (COUNTED) {
        PS_TRY((open_sums<THREADS, D>(c, op, x)));
    }
    return launch_chain(c, op, feed_forward_kernel<T, D, COUNTED>, maps, x, h,
                        h.stages * chunk_bytes<D> + CREWS * crew_bytes<D, 1> + 1024);
}

template <typename T, int D, bool COUNTED>
static enum ps_status backward(const struct ps_cuda_context *c, const struct ps_feed_forward_backward *a)
{
    static const char op[] = "feed_forward_backward";
    const int64_t rows = a->x.size[0];
    const int d = (int)a->x.size[1], f = (int)a->w_2.size[0];
    struct call x = call_of(rows, d);
    x.c = a->dx.data;
    x.addend = a->addend.data;
    x.x = a->norm_x.data;
    x.activation = a->activation;
    x.mean = (float *)a->mean.data;
    x.var = (float *)a->var.data;
    x.means = (float *)a->means.data;
    x.dgamma = (float *)a->dgamma.data;
    x.dbeta = (float *)a->dbeta.data;
    x.epsilon = (float)a->epsilon;
    struct chain h = {};
    h.f = f;
    h.chunks = (f + CHUNK - 1) / CHUNK;
    h.stages = stages_of<D>(c, h.chunks, static_bytes<D, COUNTED> + CREWS * crew_bytes<D, 2>);
    h.b_1 = (const float *)a->b_1.data;
    h.hidden_dropout = a->hidden_dropout;
    h.hidden = a->hidden.data;
    h.d_hidden = a->d_hidden.data;
    struct chain_maps maps;
    PS_TRY(maps_of<D>(&maps, a->x.data, a->dy.data, a->w_1.data, a->w_2.data, rows, d, f));
    if (COUNTED) {
        PS_TRY((open_sums<THREADS, D>(c, op, x)));
    }
    return launch_chain(c, op, feed_forward_backward_kernel<T, D, COUNTED>, maps, x, h,
                        h.stages * chunk_bytes<D> + CREWS * crew_bytes<D, 2> + 1024);
}

template <typename T, int D, typename A> static enum ps_status run(const struct ps_cuda_context *c, const A *a)
{
    if constexpr (std::is_same<A, struct ps_feed_forward>::value) {
        return a->mean.data ? forward<T, D, true>(c, a) : forward<T, D, false>(c, a);
    } else {
        return a->means.data ? backward<T, D, true>(c, a) : backward<T, D, false>(c, a);
    }
}

template <typename T, typename A> static enum ps_status run_width(const struct ps_cuda_context *c, const A *a)
{
    const int64_t d = a->x.size[1];
    return d <= 32 ? run<T, 32>(c, a) : d <= 64 ? run<T, 64>(c, a) : d <= 96 ? run<T, 96>(c, a) : run<T, 128>(c, a);
}

/* What both check: rows of 16 bits, weights, b_1; all at multiples of 16 bytes. */
template <typename A> static enum ps_status check(const struct ps_kernels *k, const char *op, const A *a)
{
    const int64_t rows = a->x.size[0], d = ps_cuda_width(&a->x), f = a->w_2.size[0];
    if (a->x.rank != 2 || a->w_2.rank != 2 || !ps_cuda_feed_forward16_serves(k, rows, d, f, a->activation)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): [%lld, %lld] by %lld hidden columns is not served in one", op, (long long)rows,
                       (long long)d, (long long)f);
    }
    const struct {
        const char *name;
        const struct ps_tensor *t;
        int64_t count;
    } tensors[] = {{"x", &a->x, rows * d}, {"w_1", &a->w_1, d * f}, {"w_2", &a->w_2, f * d}};
    for (const auto &t : tensors) {
        PS_TRY(ps_cuda_expect(op, t.name, t.t, k->real, t.count));
        if (!ps_cuda_aligned(t.t)) {
            return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s does not begin at a multiple of 16 bytes", op, t.name);
        }
    }
    return ps_cuda_expect(op, "b_1", &a->b_1, PS_F32, f);
}

struct expected {
    const char *name;
    const struct ps_tensor *t;
    enum ps_type type;
    int64_t count;
};

template <size_t COUNT> static enum ps_status check_all(const char *op, const struct expected (&tensors)[COUNT])
{
    for (const struct expected &t : tensors) {
        if (t.t->data) {
            PS_TRY(ps_cuda_expect(op, t.name, t.t, t.type, t.count));
            if (!ps_cuda_aligned(t.t)) {
                return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s does not begin at a multiple of 16 bytes", op, t.name);
            }
        }
    }
    return PS_OK;
}

extern "C" enum ps_status ps_cuda_feed_forward(const struct ps_kernels *k, const struct ps_feed_forward *a)
{
    static const char op[] = "feed_forward";
    PS_TRY(check(k, op, a));
    const int64_t d = a->x.size[1], count = a->x.size[0] * d;
    const struct expected tensors[] = {{"y", &a->y, k->real, count},
                                       {"residual", &a->residual, k->real, count},
                                       {"b_2", &a->b_2, PS_F32, d},
                                       {"mean", &a->mean, PS_F32, d},
                                       {"var", &a->var, PS_F32, d},
                                       {"running_mean", &a->running_mean, PS_F32, d},
                                       {"running_var", &a->running_var, PS_F32, d}};
    PS_TRY(check_all(op, tensors));
    if (a->mean.data && a->x.size[0] < 2) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a variance of one row", op);
    }
    return k->real == PS_BF16 ? run_width<ps_bf16>(ps_cuda(k), a) : run_width<ps_fp16>(ps_cuda(k), a);
}

extern "C" enum ps_status ps_cuda_feed_forward_backward(const struct ps_kernels *k, const struct ps_feed_forward_backward *a)
{
    static const char op[] = "feed_forward_backward";
    PS_TRY(check(k, op, a));
    const int64_t rows = a->x.size[0], d = a->x.size[1], count = rows * d, hidden = rows * a->w_2.size[0];
    if (!a->hidden.data || a->dw_1.data || a->output_dropout.threshold) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): weights' gradients, and dropout of the output, are left to others", op);
    }
    const struct expected tensors[] = {{"dx", &a->dx, k->real, count},
                                       {"dy", &a->dy, k->real, count},
                                       {"hidden", &a->hidden, k->real, hidden},
                                       {"d_hidden", &a->d_hidden, k->real, hidden},
                                       {"addend", &a->addend, k->real, count},
                                       {"norm_x", &a->norm_x, k->real, count},
                                       {"means", &a->means, PS_F32, 2 * d},
                                       {"dgamma", &a->dgamma, PS_F32, d},
                                       {"dbeta", &a->dbeta, PS_F32, d},
                                       {"mean", &a->mean, PS_F32, d},
                                       {"var", &a->var, PS_F32, d}};
    PS_TRY(check_all(op, tensors));
    return k->real == PS_BF16 ? run_width<ps_bf16>(ps_cuda(k), a) : run_width<ps_fp16>(ps_cuda(k), a);
}
