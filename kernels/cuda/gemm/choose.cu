/* Which way computes a product: the first that wants it, by shape, layout, precision and the context's numbers alone, so that a run
 * always takes the same.
 *
 * A product moves at least (m k + k n + m n) elements a matrix (m n more when beta is not 0) and costs 2 m n k FLOPs. */
#include "kernels/cuda/gemm/product.cuh"

struct way {
    const char *name;
    bool (*wanted)(const struct ps_kernels *k, const struct ps_product *p);
    enum ps_status (*run)(const struct ps_kernels *k, const struct ps_product *p);
};

/* What gemm/tiny.cu takes. */
static bool small(const struct ps_kernels *k, const struct ps_product *p)
{
    (void)k;
    return p->c_type == p->type && p->m <= 64 && p->n <= 64 && p->k <= 64;
}

/* A batch of them, in one launch whatever the strides. Of more than 48^3 multiplications only in fp32, and in 16 bits with even
 * sizes: the library is faster for the others, where it can, as measured on an H200 (docs/benchmarks.md). */
static bool tiny_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    const bool even = p->m % 2 == 0 && p->n % 2 == 0 && p->k % 2 == 0;
    return small(k, p) && ps_cuda(k)->tiny_gemm && p->batch[0] * p->batch[1] >= 2 &&
           !(p->m * p->n * p->k > 48 * 48 * 48 && !ps_cuda_exact(k) && !(p->type != PS_F32 && even) && p->batch[0] == 1 &&
             ps_cuda_cublaslt_wanted(k, p));
}

static bool warp_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    return tiny_wanted(k, p) && ps_cuda_warp_wanted(k, p);
}

/* Where gemm/warp.cu and gemm/tiny.cu take all of attention's products, heads in whole pieces of 16 bytes. */
int ps_cuda_strided_heads_faster(const struct ps_kernels *k, int64_t patches, int64_t head)
{
    return ps_cuda(k)->tiny_gemm && patches <= 64 && head <= 64 && head * (int64_t)ps_type_bytes(k->real) % 16 == 0;
}

static const struct way ways[] = {
    {"warp", warp_wanted, ps_cuda_warp_product}, /* up to 16 rows, or sums of 4 terms, in whole pieces */
    {"tiny", tiny_wanted, ps_cuda_tiny_product},
    {"split", ps_cuda_split_wanted, ps_cuda_split_product}, /* a long sum over few outputs */
#ifdef PS_FUSED_ENCODER
    {"rows", ps_cuda_rows_wanted, ps_cuda_rows_product},             /* many rows times a weight of few terms */
    {"long", ps_cuda_long_wanted, ps_cuda_long_product},             /* or of more */
    {"gradient", ps_cuda_gradient_wanted, ps_cuda_gradient_product}, /* a sum over many rows */
    {"wgmma16", ps_cuda_wgmma16_wanted, ps_cuda_wgmma16_product},    /* many rows of 16 bits times a weight */
#endif
    {"panel", ps_cuda_panel_wanted, ps_cuda_panel_product}, /* a single small one of 16 bits */
    {"cublaslt", ps_cuda_cublaslt_wanted, ps_cuda_cublaslt_product},
    {"tiny", small, ps_cuda_tiny_product}, /* strides that the library does not take */
};

/* Where there is none the operation's parts follow one another. */
static const struct way ways_with_bias[] = {
#ifdef PS_FUSED_ENCODER
    {"rows", ps_cuda_rows_wanted, ps_cuda_rows_product},
    {"long", ps_cuda_long_wanted, ps_cuda_long_product},
    {"wgmma16", ps_cuda_wgmma16_serves, ps_cuda_wgmma16_product},
#endif
    {"cublaslt", ps_cuda_cublaslt_wanted, ps_cuda_cublaslt_product},
};

#ifdef PS_FUSED_ENCODER
static const struct way ways_of_gradients[] = {
    {"gradient", ps_cuda_gradient_wanted, ps_cuda_gradient_product},
    {"gradient16", ps_cuda_gradient16_wanted, ps_cuda_gradient16_product},
};
#endif

/* NULL where none wants it. */
static const struct way *way_of(const struct ps_kernels *k, const struct ps_product *p)
{
    const struct way *from = ways, *end = ways + sizeof ways / sizeof *ways;
    if (p->bias) {
        from = ways_with_bias;
        end = from + sizeof ways_with_bias / sizeof *from;
    } else if (p->gradient) {
#ifdef PS_FUSED_ENCODER
        from = ways_of_gradients;
        end = from + sizeof ways_of_gradients / sizeof *from;
#else
        end = from;
#endif
    }
    for (; from < end; from++) {
        if (p->bias && p->type != PS_F32 && from->run == ps_cuda_cublaslt_product) {
            continue; /* there the library takes rounded biases only */
        }
        if (from->wanted(k, p)) {
            return from;
        }
    }
    return NULL;
}

/* ---- the operations, taken apart ---- */

static enum ps_status product_with_bias(const struct ps_gemm_bias *a, struct ps_product *p)
{
    const struct ps_tensor *c = &a->c, *addend = &a->addend;
    const struct ps_gemm plain = {a->c, a->a, a->b, 1, 0};
    PS_TRY(ps_cuda_product(&plain, p));
    PS_TRY(ps_cuda_expect("gemm_bias", "bias", &a->bias, PS_F32, p->n));
    if (c->rank != 2 || (c->stride[1] != 1 && p->n > 1) ||
        (addend->data && (addend->rank != 2 || addend->type != c->type || addend->size[0] != p->m || addend->size[1] != p->n ||
                          addend->stride[0] != c->stride[0] || addend->stride[1] != c->stride[1]))) {
        return ps_fail(PS_UNSUPPORTED, "gemm_bias: c [%lld, %lld] with strides %lld, %lld, or an addend that does not lie alike",
                       (long long)p->m, (long long)p->n, (long long)c->stride[0], (long long)c->stride[1]);
    }
    p->bias = (char *)a->bias.data;
    p->addend = (char *)addend->data;
    p->beta = addend->data ? 1.0f : 0.0f;
    return PS_OK;
}

static struct ps_gemm plain_gradient(const struct ps_gemm_gradient *a)
{
    return {a->dw, ps_tensor_transpose(a->x, 0, 1), a->dy, 1, 1};
}

static enum ps_status product_of_gradient(const struct ps_gemm_gradient *a, struct ps_product *p)
{
    const struct ps_gemm plain = plain_gradient(a);
    PS_TRY(ps_cuda_product(&plain, p));
    if (a->db.data) {
        PS_TRY(ps_cuda_expect("gemm_gradient", "db", &a->db, PS_F32, p->n));
    }
    p->gradient = true;
    p->waits = a->waits;
    p->sums = (float *)a->db.data;
    return PS_OK;
}

#ifdef PS_FUSED_ENCODER
/* What the operation's tensors are, and that they lie as kernels take them. */
static enum ps_status product_to_finish(const struct ps_kernels *k, const struct ps_gemm_finish *a, struct ps_product *p)
{
    const char *op = "gemm_finish";
    const struct ps_gemm plain = {a->c, a->a, a->b, 1, 0};
    PS_TRY(ps_cuda_product(&plain, p));
    const int64_t count = p->m * p->n;
    const bool counted = a->finish == PS_FINISH_SUM ? a->means.data != NULL : a->finish == PS_FINISH_RESIDUAL && a->mean.data;
    const bool activated = a->finish == PS_FINISH_ACTIVATION, slope = a->finish == PS_FINISH_SLOPE;
    const bool biased = activated || a->finish == PS_FINISH_RESIDUAL, moments = counted && a->finish == PS_FINISH_RESIDUAL;
    const bool scaled = a->finish == PS_FINISH_RESIDUAL && a->addend_scale.data;
    const bool forward = a->finish == PS_FINISH_RESIDUAL && a->normed.data, backward = a->finish == PS_FINISH_SUM && a->rstd.data;
    const bool normed = forward || backward, masked = backward && a->masked.data;
    const bool centred = normed && (a->row_mean.data || (forward ? a->beta.data : a->dbeta.data)); /* not RMSNorm */
    const struct {
        bool needed;
        const char *name;
        const struct ps_tensor *tensor;
        enum ps_type type;
        int64_t count;
    } tensors[] = {
        {true, "c", &a->c, k->real, count},
        {slope || (activated && a->kept.data), "kept", &a->kept, k->real, count},
        {a->finish == PS_FINISH_RESIDUAL || (a->finish == PS_FINISH_SUM && a->addend.data), "addend", &a->addend, k->real, count},
        {scaled, "addend_scale", &a->addend_scale, PS_F32, p->n},
        {scaled, "addend_shift", &a->addend_shift, PS_F32, p->n},
        {biased, "bias", &a->bias, PS_F32, p->n},
        {backward || (counted && !moments), "x", &a->x, k->real, count},
        {counted && !moments, "means", &a->means, PS_F32, 2 * p->n},
        {backward || (counted && !moments), "dgamma", &a->dgamma, PS_F32, p->n},
        {(backward && centred) || (counted && !moments), "dbeta", &a->dbeta, PS_F32, p->n},
        {counted, "mean", &a->mean, PS_F32, p->n},
        {counted, "var", &a->var, PS_F32, p->n},
        {moments, "running_mean", &a->running_mean, PS_F32, p->n},
        {moments, "running_var", &a->running_var, PS_F32, p->n},
        {forward, "normed", &a->normed, k->real, count},
        {centred, "row_mean", &a->row_mean, PS_F32, p->m},
        {normed, "rstd", &a->rstd, PS_F32, p->m},
        {normed, "gamma", &a->gamma, PS_F32, p->n},
        {forward && centred, "beta", &a->beta, PS_F32, p->n},
        {masked, "masked", &a->masked, k->real, count},
        {masked, "dbias", &a->dbias, PS_F32, p->n}};
    for (const auto &t : tensors) {
        if (t.needed) {
            PS_TRY(ps_cuda_expect(op, t.name, t.tensor, t.type, t.count));
            if (!ps_cuda_aligned(t.tensor)) {
                return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s does not begin at a multiple of 16 bytes", op, t.name);
            }
        }
    }
    if (moments && p->m < 2) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a variance of %lld rows", op, (long long)p->m);
    }
    const bool served = k->real == PS_F32 ? !counted && !scaled && !normed && ps_cuda_long_finishes(k, p)
                                          : !(normed && (counted || scaled)) && ps_cuda_wgmma16_serves(k, p);
    if (!served || ((activated || slope) && a->activation == PS_SWIGLU)) {
        return ps_fail(
            PS_UNSUPPORTED,
            "%s (cuda): [%lld, %lld] of %lld terms, swiglu, two norms, or sums over rows and norms of float32 are not served", op,
            (long long)p->m, (long long)p->n, (long long)p->k);
    }
    return PS_OK;
}
#endif

/* ---- the operations ---- */

extern "C" enum ps_status ps_cuda_gemm(const struct ps_kernels *k, const struct ps_gemm *arguments)
{
    struct ps_product p;
    PS_TRY(ps_cuda_product(arguments, &p));
    const struct way *way = way_of(k, &p);
    return way ? way->run(k, &p) : PS_UNSUPPORTED; /* as ps_cuda_cublaslt_wanted says */
}

extern "C" enum ps_status ps_cuda_gemm_bias(const struct ps_kernels *k, const struct ps_gemm_bias *a)
{
    struct ps_product p;
    PS_TRY(product_with_bias(a, &p));
    const struct way *way = way_of(k, &p);
    if (way) {
        return way->run(k, &p);
    }
    const struct ps_gemm plain = {a->c, a->a, a->b, 1, 0};
    if (p.type != PS_F32) {
        return ps_fail(PS_UNSUPPORTED, "gemm_bias (cuda): [%lld, %lld] of %lld terms of 16 bits is not served", (long long)p.m,
                       (long long)p.n, (long long)p.k);
    }
    PS_TRY(ps_cuda_gemm(k, &plain));
    struct ps_tensor bias = a->bias;
    bias.rank = 2;
    bias.size[0] = a->c.size[0];
    bias.size[1] = a->c.size[1];
    bias.stride[0] = 0;
    bias.stride[1] = 1;
    const struct ps_binary first = {a->c, a->c, bias, PS_ADD};
    PS_TRY(ps_cuda_binary(k, &first));
    const struct ps_binary rest = {a->c, a->c, a->addend, PS_ADD};
    return a->addend.data ? ps_cuda_binary(k, &rest) : PS_OK;
}

#ifdef PS_FUSED_ENCODER
extern "C" enum ps_status ps_cuda_gemm_finish(const struct ps_kernels *k, const struct ps_gemm_finish *a)
{
    struct ps_product p;
    PS_TRY(product_to_finish(k, a, &p));
    return k->real == PS_F32 ? ps_cuda_long_finish(k, &p, a) : ps_cuda_wgmma16_finish(k, &p, a);
}
#endif

extern "C" enum ps_status ps_cuda_gemm_gradient(const struct ps_kernels *k, const struct ps_gemm_gradient *a)
{
    struct ps_product p;
    PS_TRY(product_of_gradient(a, &p));
    const struct way *way = way_of(k, &p);
    if (way) {
        return way->run(k, &p);
    }
    if (a->db.data) {
        const struct ps_bias_grad bias = {.dbias = a->db, .masked = {}, .dy = a->dy, .dropout = {}};
        PS_TRY(ps_cuda_bias_grad(k, &bias));
    }
    const struct ps_gemm plain = plain_gradient(a);
    return ps_cuda_gemm(k, &plain);
}

#ifdef PS_FUSED_ENCODER
enum ps_status ps_cuda_gemm_gradients(const struct ps_kernels *k, const struct ps_gemm_gradient *each, int count)
{
    struct ps_product together[PS_GRADIENTS];
    int found = 0;
    for (int i = 0; i < count; i++) {
        PS_TRY(product_of_gradient(&each[i], &together[found]));
        if (!ps_cuda_gradient16_wanted(k, &together[found])) {
            PS_TRY(ps_cuda_gemm_gradient(k, &each[i]));
        } else if (++found == PS_GRADIENTS) {
            PS_TRY(ps_cuda_gradient16_products(k, together, found));
            found = 0;
        }
    }
    return found ? ps_cuda_gradient16_products(k, together, found) : PS_OK;
}
#endif

const char *ps_cuda_gemm_way(const struct ps_kernels *k, enum ps_op op, const void *arguments)
{
    struct ps_product p;
    const enum ps_status status = op == PS_OP_gemm_bias       ? product_with_bias((const struct ps_gemm_bias *)arguments, &p)
                                  : op == PS_OP_gemm_gradient ? product_of_gradient((const struct ps_gemm_gradient *)arguments, &p)
                                                              : ps_cuda_product((const struct ps_gemm *)arguments, &p);
    if (status != PS_OK) {
        return NULL;
    }
    const struct way *way = way_of(k, &p);
    const bool refused = op == PS_OP_gemm || (op == PS_OP_gemm_bias && p.type != PS_F32);
    return way ? way->name : refused ? NULL : "apart";
}
