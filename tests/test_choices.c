/* Which of CUDA's ways a product or an attention takes: a changed choice gives other bits, so each is written down here. The choice
 * asks shape, layout, precision and a few numbers of the GPU alone, so no GPU is needed, only a build with CUDA. */
#include "tests/run.h"

#include "kernels/kernels.h"
#include "tests/length.h"
#include "tests/suite.h"

static const struct ps_gpu h200 = {90, 132, 232448}, a100 = {80, 108, 166912};

static struct ps_kernels *table(const struct ps_gpu *gpu, enum ps_precision precision, int tiny_gemm)
{
    struct ps_kernels *k;
    OK(ps_kernels_choices(gpu, precision, &(struct ps_kernels_options){.tiny_gemm = tiny_gemm}, &k));
    return k;
}

/* Tensors lie here, and are never read. */
static void *memory(int64_t offset)
{
    return (void *)(uintptr_t)((1 << 20) + offset);
}

static struct ps_tensor matrix(enum ps_type type, int64_t rows, int64_t columns)
{
    return ps_tensor_2d(memory(0), type, rows, columns);
}

static const char *or_refused(const char *way)
{
    return way ? way : "refused";
}

/* ---- the models of configs/, at level gemm ---- */

struct model {
    const char *name;
    int64_t sequences, patches, d, heads, f, patch_len, horizon;
};

static const struct model models[] = {
    {"seed28k", 64 * 20, 5, 64, 4, 256, 8, 1},
    {"etth1", 128 * 7, 42, 16, 4, 128, 16, 96},
    {"weather", 128 * 21, 42, 128, 16, 256, 16, 96},
    {"electricity", 32 * 321, 42, 128, 16, 256, 16, 96},
};

struct text {
    char of[1024];
    size_t used;
};

static void say(struct text *text, const char *what, const char *way)
{
    text->used += (size_t)snprintf(text->of + text->used, sizeof text->of - text->used, "%s%s %s", text->used ? ", " : "", what,
                                   or_refused(way));
    ck_assert_uint_lt(text->used, sizeof text->of);
}

static const char *gemm(const struct ps_kernels *k, struct ps_tensor c, struct ps_tensor a, struct ps_tensor b, double beta)
{
    return k->way(k, PS_OP_gemm, &(struct ps_gemm){c, a, b, 1, beta});
}

/* x [rows, from] times a weight: forward with its bias where the table adds it; backward for x and for the weight. */
static void linear(struct text *text, const struct ps_kernels *k, const char *what, int64_t rows, int64_t from, int64_t to)
{
    char name[32];
    const struct ps_tensor x = matrix(k->real, rows, from), y = matrix(k->real, rows, to), w = matrix(k->real, from, to);
    const struct ps_tensor dw = matrix(PS_F32, from, to), row = ps_tensor_1d(memory(0), PS_F32, to);
    const int fused = k->real == PS_F32;
    say(text, what,
        fused ? k->way(k, PS_OP_gemm_bias, &(struct ps_gemm_bias){.c = y, .a = x, .b = w, .bias = row}) : gemm(k, y, x, w, 0));
    snprintf(name, sizeof name, "%s dx", what);
    say(text, name, gemm(k, x, y, ps_tensor_transpose(w, 0, 1), 0));
    snprintf(name, sizeof name, "%s dw", what);
    say(text, name, k->way(k, PS_OP_gemm_gradient, &(struct ps_gemm_gradient){.dw = dw, .db = row, .x = x, .dy = y}));
}

static void products(struct text *text, const struct ps_kernels *k, const struct model *m)
{
    const int64_t rows = m->sequences * m->patches, e = m->d / m->heads, wide = m->patches * m->d;
    const int64_t heads[4] = {m->sequences, m->heads, m->patches, e}, scores[4] = {heads[0], heads[1], heads[2], heads[2]};
    const struct ps_tensor embedded = matrix(k->real, rows, m->d), patches = matrix(k->real, rows, m->patch_len);
    say(text, "embedding", gemm(k, embedded, patches, matrix(k->real, m->patch_len, m->d), 0));
    say(text, "embedding dw", gemm(k, matrix(PS_F32, m->patch_len, m->d), ps_tensor_transpose(patches, 0, 1), embedded, 1));
    linear(text, k, "qkv", rows, m->d, 3 * m->d);
    linear(text, k, "wo", rows, m->d, m->d);
    linear(text, k, "ffn1", rows, m->d, m->f);
    linear(text, k, "ffn2", rows, m->f, m->d);
    const struct ps_tensor q = ps_tensor_nd(memory(0), k->real, 4, heads), s = ps_tensor_nd(memory(0), k->real, 4, scores);
    say(text, "scores", gemm(k, s, q, ps_tensor_transpose(q, 2, 3), 0));
    say(text, "mixed", gemm(k, q, s, q, 0));
    say(text, "dv", gemm(k, q, ps_tensor_transpose(s, 2, 3), q, 0));
    const struct ps_tensor z = matrix(k->real, m->sequences, wide), w = matrix(k->real, wide, m->horizon);
    const struct ps_tensor dx = matrix(k->real, m->sequences, m->horizon);
    say(text, "head", gemm(k, matrix(PS_F32, m->sequences, m->horizon), z, w, 0));
    say(text, "head dz", gemm(k, z, dx, ps_tensor_transpose(w, 0, 1), 0));
    say(text, "head dw", gemm(k, matrix(PS_F32, wide, m->horizon), ps_tensor_transpose(z, 0, 1), dx, 1));
}

static struct ps_tensor heads_of(enum ps_type type, const struct model *m, int64_t columns)
{
    return ps_tensor_heads(memory(0), type, m->sequences, m->heads, m->patches, m->d / m->heads, columns);
}

/* kept: of q, k, v and mixed. */
static const char *forward(const struct ps_kernels *k, const struct model *m, enum ps_type kept)
{
    const struct ps_tensor rows = heads_of(kept, m, 3 * m->d);
    return k->way(k, PS_OP_attention,
                  &(struct ps_attention){.mixed = heads_of(kept, m, m->d),
                                         .logsum = ps_tensor_1d(memory(0), PS_F32, m->sequences * m->heads * m->patches),
                                         .q = rows,
                                         .k = rows,
                                         .v = rows,
                                         .scale = 0.25});
}

static const char *backward(const struct ps_kernels *k, const struct model *m, enum ps_type kept)
{
    const struct ps_tensor rows = heads_of(kept, m, 3 * m->d), gradients = heads_of(k->real, m, 3 * m->d);
    const struct ps_tensor sums = ps_tensor_1d(memory(0), PS_F32, m->sequences * m->heads * m->patches);
    return k->way(k, PS_OP_attention_backward,
                  &(struct ps_attention_backward){.dq = gradients,
                                                  .dk = gradients,
                                                  .dv = gradients,
                                                  .delta = sums,
                                                  .d_mixed = heads_of(k->real, m, m->d),
                                                  .q = rows,
                                                  .k = rows,
                                                  .v = rows,
                                                  .mixed = heads_of(kept, m, m->d),
                                                  .logsum = sums,
                                                  .scale = 0.25});
}

struct expected {
    int model;
    enum ps_precision precision;
    const struct ps_gpu *gpu;
    const char *ways;
};

enum { SEED28K, ETTH1, WEATHER, ELECTRICITY };

static const struct expected of_models[] = {
    {SEED28K, PS_FP32, &h200,
     "embedding rows, embedding dw split, qkv rows, qkv dx rows, qkv dw gradient, wo rows, wo dx rows, "
     "wo dw gradient, ffn1 rows, ffn1 dx rows, ffn1 dw gradient, ffn2 rows, ffn2 dx rows, ffn2 dw gradient, "
     "scores tiny, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, attention warp_float, "
     "backward warp_float"},
    {SEED28K, PS_TF32, &h200,
     "embedding rows, embedding dw split, qkv rows, qkv dx rows, qkv dw gradient, wo rows, wo dx rows, "
     "wo dw gradient, ffn1 rows, ffn1 dx rows, ffn1 dw gradient, ffn2 rows, ffn2 dx rows, ffn2 dw gradient, "
     "scores tiny, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, attention warp_float, "
     "backward warp_float"},
    {SEED28K, PS_PRECISION_BF16, &h200,
     "embedding wgmma16, embedding dw cublaslt, qkv wgmma16, qkv dx wgmma16, qkv dw gradient16, wo wgmma16, wo dx "
     "wgmma16, wo dw gradient16, ffn1 wgmma16, ffn1 dx wgmma16, ffn1 dw gradient16, ffn2 wgmma16, ffn2 dx wgmma16, ffn2"
     " dw gradient16, scores tiny, mixed tiny, dv tiny, head panel, head dz panel, head dw panel, attention short16, "
     "backward short16"},
    {SEED28K, PS_FP16, &h200,
     "embedding wgmma16, embedding dw cublaslt, qkv wgmma16, qkv dx wgmma16, qkv dw gradient16, wo wgmma16, wo dx "
     "wgmma16, wo dw gradient16, ffn1 wgmma16, ffn1 dx wgmma16, ffn1 dw gradient16, ffn2 wgmma16, ffn2 dx wgmma16, ffn2"
     " dw gradient16, scores tiny, mixed tiny, dv tiny, head panel, head dz panel, head dw panel, attention short16, "
     "backward short16"},
    {ETTH1, PS_FP32, &h200,
     "embedding cublaslt, embedding dw split, qkv rows, qkv dx cublaslt, qkv dw apart, wo cublaslt, wo dx cublaslt, "
     "wo dw apart, ffn1 rows, ffn1 dx cublaslt, ffn1 dw apart, ffn2 cublaslt, ffn2 dx rows, ffn2 dw apart, "
     "scores warp, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, attention warp_float, "
     "backward warp_float"},
    {ETTH1, PS_TF32, &h200,
     "embedding cublaslt, embedding dw split, qkv rows, qkv dx cublaslt, qkv dw apart, wo cublaslt, wo dx cublaslt, "
     "wo dw apart, ffn1 rows, ffn1 dx cublaslt, ffn1 dw apart, ffn2 cublaslt, ffn2 dx rows, ffn2 dw apart, "
     "scores warp, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, attention warp_float, "
     "backward warp_float"},
    {ETTH1, PS_PRECISION_BF16, &h200,
     "embedding wgmma16, embedding dw cublaslt, qkv wgmma16, qkv dx wgmma16, qkv dw gradient16, wo wgmma16, wo dx "
     "wgmma16, wo dw gradient16, ffn1 wgmma16, ffn1 dx wgmma16, ffn1 dw gradient16, ffn2 wgmma16, ffn2 dx wgmma16, ffn2"
     " dw gradient16, scores warp, mixed tiny, dv tiny, head panel, head dz panel, head dw panel, attention short16, "
     "backward short16"},
    {ETTH1, PS_FP16, &h200,
     "embedding wgmma16, embedding dw cublaslt, qkv wgmma16, qkv dx wgmma16, qkv dw gradient16, wo wgmma16, wo dx "
     "wgmma16, wo dw gradient16, ffn1 wgmma16, ffn1 dx wgmma16, ffn1 dw gradient16, ffn2 wgmma16, ffn2 dx wgmma16, ffn2"
     " dw gradient16, scores warp, mixed tiny, dv tiny, head panel, head dz panel, head dw panel, attention short16, "
     "backward short16"},
    {WEATHER, PS_FP32, &h200,
     "embedding rows, embedding dw split, qkv rows, qkv dx rows, qkv dw gradient, wo rows, wo dx rows, "
     "wo dw gradient, ffn1 rows, ffn1 dx rows, ffn1 dw gradient, ffn2 rows, ffn2 dx rows, ffn2 dw gradient, "
     "scores tiny, mixed tiny, dv tiny, head cublaslt, head dz rows, head dw gradient, attention warp_float, "
     "backward warp_float"},
    {WEATHER, PS_TF32, &h200,
     "embedding rows, embedding dw split, qkv rows, qkv dx rows, qkv dw gradient, wo rows, wo dx rows, "
     "wo dw gradient, ffn1 rows, ffn1 dx rows, ffn1 dw gradient, ffn2 rows, ffn2 dx rows, ffn2 dw gradient, "
     "scores tiny, mixed tiny, dv tiny, head cublaslt, head dz rows, head dw gradient, attention warp_float, "
     "backward warp_float"},
    {WEATHER, PS_PRECISION_BF16, &h200,
     "embedding wgmma16, embedding dw cublaslt, qkv wgmma16, qkv dx wgmma16, qkv dw gradient16, wo wgmma16, wo dx "
     "wgmma16, wo dw gradient16, ffn1 wgmma16, ffn1 dx wgmma16, ffn1 dw gradient16, ffn2 wgmma16, ffn2 dx wgmma16, ffn2"
     " dw gradient16, scores tiny, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, attention "
     "short16, backward short16"},
    {WEATHER, PS_FP16, &h200,
     "embedding wgmma16, embedding dw cublaslt, qkv wgmma16, qkv dx wgmma16, qkv dw gradient16, wo wgmma16, wo dx "
     "wgmma16, wo dw gradient16, ffn1 wgmma16, ffn1 dx wgmma16, ffn1 dw gradient16, ffn2 wgmma16, ffn2 dx wgmma16, ffn2"
     " dw gradient16, scores tiny, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, attention "
     "short16, backward short16"},
    {ELECTRICITY, PS_FP32, &h200,
     "embedding rows, embedding dw split, qkv rows, qkv dx rows, qkv dw gradient, wo rows, wo dx rows, "
     "wo dw gradient, ffn1 rows, ffn1 dx rows, ffn1 dw gradient, ffn2 rows, ffn2 dx rows, ffn2 dw gradient, "
     "scores tiny, mixed tiny, dv tiny, head cublaslt, head dz rows, head dw gradient, attention warp_float, "
     "backward warp_float"},
    {ELECTRICITY, PS_TF32, &h200,
     "embedding rows, embedding dw split, qkv rows, qkv dx rows, qkv dw gradient, wo rows, wo dx rows, "
     "wo dw gradient, ffn1 rows, ffn1 dx rows, ffn1 dw gradient, ffn2 rows, ffn2 dx rows, ffn2 dw gradient, "
     "scores tiny, mixed tiny, dv tiny, head cublaslt, head dz rows, head dw gradient, attention warp_float, "
     "backward warp_float"},
    {ELECTRICITY, PS_PRECISION_BF16, &h200,
     "embedding wgmma16, embedding dw cublaslt, qkv wgmma16, qkv dx wgmma16, qkv dw gradient16, wo wgmma16, wo dx "
     "wgmma16, wo dw gradient16, ffn1 wgmma16, ffn1 dx wgmma16, ffn1 dw gradient16, ffn2 wgmma16, ffn2 dx wgmma16, ffn2"
     " dw gradient16, scores tiny, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, attention "
     "short16, backward short16"},
    {ELECTRICITY, PS_FP16, &h200,
     "embedding wgmma16, embedding dw cublaslt, qkv wgmma16, qkv dx wgmma16, qkv dw gradient16, wo wgmma16, wo dx "
     "wgmma16, wo dw gradient16, ffn1 wgmma16, ffn1 dx wgmma16, ffn1 dw gradient16, ffn2 wgmma16, ffn2 dx wgmma16, ffn2"
     " dw gradient16, scores tiny, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, attention "
     "short16, backward short16"},
    {SEED28K, PS_FP16, &a100,
     "embedding panel, embedding dw cublaslt, qkv panel, qkv dx panel, qkv dw apart, wo panel, wo dx panel, wo dw apart, ffn1 "
     "panel, ffn1 dx panel, ffn1 dw apart, ffn2 panel, ffn2 dx panel, ffn2 dw apart, scores tiny, mixed tiny, dv tiny, head panel, "
     "head dz panel, head dw panel, attention short16, backward short16"},
    {SEED28K, PS_TF32, &a100,
     "embedding cublaslt, embedding dw split, qkv cublaslt, qkv dx cublaslt, qkv dw apart, wo cublaslt, "
     "wo dx cublaslt, wo dw apart, ffn1 cublaslt, ffn1 dx cublaslt, ffn1 dw apart, ffn2 cublaslt, ffn2 dx cublaslt, "
     "ffn2 dw apart, scores tiny, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, "
     "attention warp_float, backward warp_float"},
    {ETTH1, PS_TF32, &a100,
     "embedding cublaslt, embedding dw split, qkv cublaslt, qkv dx cublaslt, qkv dw apart, wo cublaslt, "
     "wo dx cublaslt, wo dw apart, ffn1 cublaslt, ffn1 dx cublaslt, ffn1 dw apart, ffn2 cublaslt, ffn2 dx cublaslt, "
     "ffn2 dw apart, scores warp, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, "
     "attention warp_float, backward warp_float"},
    {WEATHER, PS_TF32, &a100,
     "embedding cublaslt, embedding dw split, qkv cublaslt, qkv dx cublaslt, qkv dw apart, wo cublaslt, "
     "wo dx cublaslt, wo dw apart, ffn1 cublaslt, ffn1 dx cublaslt, ffn1 dw apart, ffn2 cublaslt, ffn2 dx cublaslt, "
     "ffn2 dw apart, scores tiny, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, "
     "attention warp_float, backward warp_float"},
    {ELECTRICITY, PS_TF32, &a100,
     "embedding cublaslt, embedding dw split, qkv cublaslt, qkv dx cublaslt, qkv dw apart, wo cublaslt, "
     "wo dx cublaslt, wo dw apart, ffn1 cublaslt, ffn1 dx cublaslt, ffn1 dw apart, ffn2 cublaslt, ffn2 dx cublaslt, "
     "ffn2 dw apart, scores tiny, mixed tiny, dv tiny, head cublaslt, head dz cublaslt, head dw cublaslt, "
     "attention warp_float, backward warp_float"},
};

START_TEST(of_the_models)
{
    for (size_t i = 0; i < sizeof of_models / sizeof *of_models; i++) {
        const struct expected *x = &of_models[i];
        const struct model *m = &models[x->model];
        struct ps_kernels *k = table(x->gpu, x->precision, 1);
        struct text text = {.used = 0};
        products(&text, k, m);
        say(&text, "attention", forward(k, m, k->real));
        say(&text, "backward", backward(k, m, k->real));
        k->close(k);
        ck_assert_msg(strcmp(text.of, x->ways) == 0, "%s in %s, compute capability %d:\n%s\nnot\n%s", m->name,
                      ps_precision_name(x->precision), x->gpu->compute_capability, text.of, x->ways);
    }
}
END_TEST

/* ---- others: the edges of each way ---- */

/* c [batch, m, n] = a b, where a is a transposed view of [.., k, m] when `a_turned`. */
struct product {
    enum ps_precision precision;
    int64_t batch, m, n, k;
    int a_turned, b_turned;
    int64_t offset; /* bytes from an aligned place */
    const char *way;
};

static struct ps_tensor batched(enum ps_type type, int64_t batch, int64_t rows, int64_t columns, int turned, int64_t offset)
{
    return turned ? ps_tensor_transpose(ps_tensor_3d(memory(offset), type, batch, columns, rows), 1, 2)
                  : ps_tensor_3d(memory(offset), type, batch, rows, columns);
}

static const char *way_of(const struct ps_kernels *k, const struct product *x)
{
    const struct ps_tensor c = batched(k->real, x->batch, x->m, x->n, 0, x->offset);
    const struct ps_tensor a = batched(k->real, x->batch, x->m, x->k, x->a_turned, x->offset);
    return or_refused(gemm(k, c, a, batched(k->real, x->batch, x->k, x->n, x->b_turned, x->offset), 0));
}

static const struct product edges[] = {
    {PS_FP32, 2, 16, 16, 16, 0, 0, 0, "warp"},
    {PS_FP32, 2, 17, 16, 16, 0, 0, 0, "tiny"},
    {PS_FP32, 2, 64, 64, 64, 0, 0, 0, "tiny"},
    {PS_FP32, 2, 65, 64, 64, 0, 0, 0, "cublaslt"},
    {PS_FP32, 2, 64, 63, 64, 0, 0, 0, "tiny"},
    {PS_FP32, 1, 64, 64, 64, 0, 0, 0, "cublaslt"},
    {PS_FP32, 2, 48, 48, 48, 0, 0, 0, "tiny"},
    {PS_FP32, 2, 48, 49, 48, 0, 0, 0, "tiny"},
    {PS_FP32, 2, 32, 32, 4, 0, 1, 0, "warp"},
    {PS_FP32, 2, 64, 40, 4, 0, 1, 0, "warp"},
    {PS_FP32, 2, 31, 32, 4, 0, 1, 0, "tiny"},
    {PS_FP32, 2, 16, 16, 16, 0, 0, 4, "tiny"},
    {PS_TF32, 2, 16, 16, 16, 0, 0, 0, "warp"},
    {PS_TF32, 2, 17, 16, 16, 0, 0, 0, "tiny"},
    {PS_TF32, 2, 64, 64, 64, 0, 0, 0, "cublaslt"},
    {PS_TF32, 2, 65, 64, 64, 0, 0, 0, "cublaslt"},
    {PS_TF32, 2, 64, 63, 64, 0, 0, 0, "cublaslt"},
    {PS_TF32, 1, 64, 64, 64, 0, 0, 0, "cublaslt"},
    {PS_TF32, 2, 48, 48, 48, 0, 0, 0, "tiny"},
    {PS_TF32, 2, 48, 49, 48, 0, 0, 0, "cublaslt"},
    {PS_TF32, 2, 32, 32, 4, 0, 1, 0, "warp"},
    {PS_TF32, 2, 64, 40, 4, 0, 1, 0, "warp"},
    {PS_TF32, 2, 31, 32, 4, 0, 1, 0, "tiny"},
    {PS_TF32, 2, 16, 16, 16, 0, 0, 4, "tiny"},
    {PS_PRECISION_BF16, 2, 16, 16, 16, 0, 0, 0, "warp"},
    {PS_PRECISION_BF16, 2, 17, 16, 16, 0, 0, 0, "tiny"},
    {PS_PRECISION_BF16, 2, 64, 64, 64, 0, 0, 0, "tiny"},
    {PS_PRECISION_BF16, 2, 65, 64, 64, 0, 0, 0, "cublaslt"},
    {PS_PRECISION_BF16, 2, 64, 63, 64, 0, 0, 0, "cublaslt"},
    {PS_PRECISION_BF16, 1, 64, 64, 64, 0, 0, 0, "panel"},
    {PS_PRECISION_BF16, 2, 48, 48, 48, 0, 0, 0, "tiny"},
    {PS_PRECISION_BF16, 2, 48, 49, 48, 0, 0, 0, "cublaslt"},
    {PS_PRECISION_BF16, 2, 32, 32, 4, 0, 1, 0, "tiny"},
    {PS_PRECISION_BF16, 2, 64, 40, 4, 0, 1, 0, "warp"},
    {PS_PRECISION_BF16, 2, 31, 32, 4, 0, 1, 0, "tiny"},
    {PS_PRECISION_BF16, 2, 16, 16, 16, 0, 0, 4, "tiny"},
    {PS_FP16, 2, 16, 16, 16, 0, 0, 0, "warp"},
    {PS_FP16, 2, 17, 16, 16, 0, 0, 0, "tiny"},
    {PS_FP16, 2, 64, 64, 64, 0, 0, 0, "tiny"},
    {PS_FP16, 2, 65, 64, 64, 0, 0, 0, "cublaslt"},
    {PS_FP16, 2, 64, 63, 64, 0, 0, 0, "cublaslt"},
    {PS_FP16, 1, 64, 64, 64, 0, 0, 0, "panel"},
    {PS_FP16, 2, 48, 48, 48, 0, 0, 0, "tiny"},
    {PS_FP16, 2, 48, 49, 48, 0, 0, 0, "cublaslt"},
    {PS_FP16, 2, 32, 32, 4, 0, 1, 0, "tiny"},
    {PS_FP16, 2, 64, 40, 4, 0, 1, 0, "warp"},
    {PS_FP16, 2, 31, 32, 4, 0, 1, 0, "tiny"},
    {PS_FP16, 2, 16, 16, 16, 0, 0, 4, "tiny"},
    {PS_FP32, 1, 16, 512, 1024, 1, 0, 0, "split"},
    {PS_FP32, 1, 16, 513, 1024, 1, 0, 0, "cublaslt"},
    {PS_FP32, 1, 16, 516, 1024, 1, 0, 0, "cublaslt"},
    {PS_FP32, 1, 16, 512, 1020, 1, 0, 0, "cublaslt"},
    {PS_FP32, 1, 64, 192, 1024, 1, 0, 0, "split"},
    {PS_FP32, 1, 64, 196, 1024, 1, 0, 0, "gradient"},
    {PS_FP32, 1, 128, 64, 1024, 1, 0, 8, "cublaslt"},
    {PS_FP32, 1, 32, 32, 1020, 1, 0, 0, "cublaslt"},
    {PS_FP32, 1, 1024, 32, 384, 0, 0, 0, "rows"},
    {PS_FP32, 1, 1023, 32, 384, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 1024, 30, 384, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 1024, 33, 384, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 1024, 32, 388, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 1024, 32, 768, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 1024, 32, 772, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 1024, 8448, 64, 0, 0, 0, "rows"},
    {PS_FP32, 1, 1024, 8450, 64, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 1024, 8452, 64, 0, 0, 0, "long"},
    {PS_FP32, 1, 16769, 32, 388, 0, 0, 0, "long"},
    {PS_FP32, 1, 16768, 32, 388, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 16769, 32, 32768, 0, 0, 0, "long"},
    {PS_FP32, 1, 16769, 32, 32772, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 8321, 132, 388, 0, 1, 0, "long"},
    {PS_FP32, 1, 8321, 260, 260, 0, 1, 0, "long"},
    {PS_FP32, 1, 8321, 256, 384, 0, 1, 0, "rows"},
    {PS_FP32, 1, 8321, 260, 256, 0, 1, 0, "rows"},
    {PS_FP32, 1, 4096, 260, 260, 0, 1, 0, "rows"},
    {PS_TF32, 1, 8321, 260, 260, 0, 1, 0, "rows"},
    {PS_FP32, 1, 16769, 28, 388, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 16769, 34, 388, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 16769, 32, 390, 0, 0, 0, "cublaslt"},
    {PS_FP32, 1, 16769, 32, 388, 0, 0, 8, "cublaslt"},
    {PS_FP32, 1, 4096, 64, 64, 0, 1, 0, "rows"},
    {PS_FP32, 1, 4096, 64, 64, 1, 0, 0, "cublaslt"},
    {PS_FP32, 1, 16896, 128, 2048, 1, 0, 0, "gradient"},
    {PS_FP32, 1, 17024, 128, 2048, 1, 0, 0, "gradient"},
    {PS_FP32, 1, 65536, 128, 2048, 1, 0, 0, "gradient"},
    {PS_FP32, 1, 65540, 128, 2048, 1, 0, 0, "cublaslt"},
    {PS_TF32, 1, 16, 512, 1024, 1, 0, 0, "split"},
    {PS_TF32, 1, 16, 513, 1024, 1, 0, 0, "cublaslt"},
    {PS_TF32, 1, 16, 516, 1024, 1, 0, 0, "cublaslt"},
    {PS_TF32, 1, 16, 512, 1020, 1, 0, 0, "cublaslt"},
    {PS_TF32, 1, 64, 192, 1024, 1, 0, 0, "split"},
    {PS_TF32, 1, 64, 196, 1024, 1, 0, 0, "gradient"},
    {PS_TF32, 1, 128, 64, 1024, 1, 0, 8, "cublaslt"},
    {PS_TF32, 1, 32, 32, 1020, 1, 0, 0, "cublaslt"},
    {PS_TF32, 1, 1024, 32, 384, 0, 0, 0, "rows"},
    {PS_TF32, 1, 1023, 32, 384, 0, 0, 0, "cublaslt"},
    {PS_TF32, 1, 1024, 30, 384, 0, 0, 0, "cublaslt"},
    {PS_TF32, 1, 1024, 33, 384, 0, 0, 0, "cublaslt"},
    {PS_TF32, 1, 1024, 32, 388, 0, 0, 0, "cublaslt"},
    {PS_TF32, 1, 16769, 32, 388, 0, 0, 0, "long"},
    {PS_TF32, 1, 16769, 32, 388, 0, 1, 0, "cublaslt"},
    {PS_TF32, 1, 16768, 32, 388, 0, 0, 0, "cublaslt"},
    {PS_TF32, 1, 1024, 32, 772, 0, 0, 0, "cublaslt"},
    {PS_TF32, 1, 1024, 8448, 64, 0, 0, 0, "rows"},
    {PS_TF32, 1, 1024, 8450, 64, 0, 0, 0, "cublaslt"},
    {PS_TF32, 1, 4096, 64, 64, 0, 1, 0, "rows"},
    {PS_TF32, 1, 4096, 64, 64, 1, 0, 0, "cublaslt"},
    {PS_TF32, 1, 16896, 128, 2048, 1, 0, 0, "gradient"},
    {PS_TF32, 1, 17024, 128, 2048, 1, 0, 0, "cublaslt"},
    {PS_PRECISION_BF16, 1, 64, 64, 2048, 0, 0, 0, "panel"},
    {PS_PRECISION_BF16, 1, 64, 64, 2056, 0, 0, 0, "cublaslt"},
    {PS_PRECISION_BF16, 1, 2048, 256, 256, 0, 0, 0, "wgmma16"},
    {PS_PRECISION_BF16, 1, 2048, 264, 256, 0, 0, 0, "wgmma16"},
    {PS_PRECISION_BF16, 1, 2048, 258, 248, 0, 0, 0, "panel"},
    {PS_PRECISION_BF16, 1, 16896, 32, 288, 0, 0, 0, "wgmma16"},
    {PS_PRECISION_BF16, 1, 16928, 32, 192, 0, 0, 0, "wgmma16"},
    {PS_PRECISION_BF16, 1, 33856, 16, 16, 0, 0, 0, "wgmma16"},
    {PS_PRECISION_BF16, 1, 64, 64, 64, 1, 1, 0, "panel"},
    {PS_PRECISION_BF16, 1, 1024, 64, 512, 0, 0, 0, "wgmma16"},
    {PS_PRECISION_BF16, 1, 1023, 64, 512, 0, 0, 0, "panel"},
    {PS_PRECISION_BF16, 1, 1024, 60, 512, 0, 0, 0, "panel"},
    {PS_PRECISION_BF16, 1, 1024, 64, 520, 0, 0, 0, "panel"},
    {PS_PRECISION_BF16, 1, 1024, 2056, 64, 0, 0, 0, "cublaslt"},
    {PS_FP16, 1, 64, 64, 2048, 0, 0, 0, "panel"},
    {PS_FP16, 1, 64, 64, 2056, 0, 0, 0, "cublaslt"},
    {PS_FP16, 1, 2048, 256, 256, 0, 0, 0, "wgmma16"},
    {PS_FP16, 1, 2048, 264, 256, 0, 0, 0, "wgmma16"},
    {PS_FP16, 1, 2048, 258, 248, 0, 0, 0, "panel"},
    {PS_FP16, 1, 16896, 32, 288, 0, 0, 0, "wgmma16"},
    {PS_FP16, 1, 16928, 32, 192, 0, 0, 0, "wgmma16"},
    {PS_FP16, 1, 33856, 16, 16, 0, 0, 0, "wgmma16"},
    {PS_FP16, 1, 64, 64, 64, 1, 1, 0, "panel"},
    {PS_FP16, 1, 1024, 64, 512, 0, 0, 0, "wgmma16"},
    {PS_FP16, 1, 1023, 64, 512, 0, 0, 0, "panel"},
    {PS_FP16, 1, 1024, 60, 512, 0, 0, 0, "panel"},
    {PS_FP16, 1, 1024, 64, 520, 0, 0, 0, "panel"},
    {PS_FP16, 1, 1024, 2056, 64, 0, 0, 0, "cublaslt"},
};

START_TEST(of_edges)
{
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
        struct ps_kernels *k = table(&h200, edges[i].precision, 1);
        const char *way = way_of(k, &edges[i]);
        ck_assert_msg(strcmp(way, edges[i].way) == 0, "product %zu: %s, not %s", i, way, edges[i].way);
        k->close(k);
    }
}
END_TEST

/* Two batch dimensions that cannot be one, and elements that are apart in both directions, are the small products' alone. */
START_TEST(of_strides)
{
    struct ps_kernels *k = table(&h200, PS_TF32, 0);
    const struct product large = {PS_TF32, 8, 32, 32, 32, 0, 0, 0, NULL};
    ck_assert_str_eq(way_of(k, &large), "cublaslt"); /* without tiny_gemm */
    struct ps_tensor t = ps_tensor_3d(memory(0), PS_F32, 8, 32, 32), apart = ps_tensor_3d(memory(0), PS_F32, 8, 32, 64);
    apart.size[2] = 32;
    apart.stride[2] = 2;
    ck_assert_str_eq(or_refused(gemm(k, t, t, apart, 0)), "tiny");
    t = ps_tensor_3d(memory(0), PS_F32, 8, 65, 65);
    apart = ps_tensor_3d(memory(0), PS_F32, 8, 65, 130);
    apart.size[2] = 65;
    apart.stride[2] = 2;
    ck_assert_str_eq(or_refused(gemm(k, t, t, apart, 0)), "refused");
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "strides"));
    k->close(k);
}
END_TEST

START_TEST(of_heads_by_row)
{
    static const struct {
        int64_t patches, head;
        int faster;
    } cases[] = {{12, 64, 1}, {64, 4, 1}, {65, 32, 0}, {13, 32, 1}, {12, 68, 0}, {12, 30, 0}};
    for (int tiny = 0; tiny < 2; tiny++) {
        struct ps_kernels *k = table(&h200, PS_TF32, tiny);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            ck_assert_int_eq(k->strided_heads_faster(k, cases[i].patches, cases[i].head), tiny && cases[i].faster);
        }
        k->close(k);
    }
}
END_TEST

START_TEST(of_biases)
{
    struct ps_kernels *k = table(&h200, PS_TF32, 1);
    const struct ps_tensor x = matrix(PS_F32, 1024, 128), w = matrix(PS_F32, 128, 64), y = matrix(PS_F32, 1024, 64);
    struct ps_gemm_bias a = {.c = y, .a = x, .b = w, .bias = ps_tensor_1d(memory(0), PS_F32, 64)};
    ck_assert_str_eq(k->way(k, PS_OP_gemm_bias, &a), "rows");
    a.addend = y;
    ck_assert_str_eq(k->way(k, PS_OP_gemm_bias, &a), "rows");
    a.bias.data = memory(4);
    ck_assert_str_eq(k->way(k, PS_OP_gemm_bias, &a), "apart");
    a.bias.data = memory(8); /* pairs are what rows needs */
    ck_assert_str_eq(k->way(k, PS_OP_gemm_bias, &a), "rows");
    a = (struct ps_gemm_bias){.c = matrix(PS_F32, 1000, 64), .a = matrix(PS_F32, 1000, 128), .b = w, .bias = a.bias};
    ck_assert_str_eq(k->way(k, PS_OP_gemm_bias, &a), "apart");
    a.bias.data = memory(0);
    ck_assert_str_eq(k->way(k, PS_OP_gemm_bias, &a), "cublaslt");
    a.c = matrix(PS_F32, 64, 64); /* which of the two is turned cannot be told */
    a.a = matrix(PS_F32, 64, 128);
    ck_assert_str_eq(k->way(k, PS_OP_gemm_bias, &a), "apart");
    struct ps_gemm_gradient g = {.dw = w, .db = ps_tensor_1d(memory(0), PS_F32, 64), .x = x, .dy = y};
    ck_assert_str_eq(k->way(k, PS_OP_gemm_gradient, &g), "gradient");
    g.x = matrix(PS_F32, 1020, 128);
    g.dy = matrix(PS_F32, 1020, 64);
    ck_assert_str_eq(k->way(k, PS_OP_gemm_gradient, &g), "apart");
    ck_assert_ptr_null(k->way(k, PS_OP_layernorm, NULL));
    k->close(k);
}
END_TEST

/* Gradients of 16 bits: long sums, rows in whole pieces of 16 bytes, and more than 2^18 outputs only in tiles large both ways. */
START_TEST(of_gradients)
{
    static const struct {
        int64_t rows, m, n, offset;
        const char *way;
    } cases[] = {{256, 8, 8, 0, "gradient16"},
                 {255, 8, 8, 0, "apart"},
                 {256, 12, 8, 0, "apart"},
                 {256, 8, 12, 0, "apart"},
                 {1000, 64, 64, 2, "apart"},
                 {1000, 64, 64, 16, "gradient16"},
                 {9000, 512, 512, 0, "gradient16"},
                 {9000, 512, 520, 0, "gradient16"},
                 {300, 8, 32768, 0, "gradient16"},
                 {300, 8, 32776, 0, "apart"},
                 {16384, 1024, 1024, 0, "gradient16"},
                 {300, 72, 32768, 0, "gradient16"},
                 {300, 64, 8192, 0, "apart"},
                 {300, 72, 32776, 0, "apart"},
                 {300, 8192, 8192, 0, "gradient16"},
                 {300, 8192, 8200, 0, "apart"},
                 {9000, 512, 520, 2, "apart"}};
    static const enum ps_precision precisions[] = {PS_PRECISION_BF16, PS_FP16};
    for (int i = 0; i < 2 * LENGTH(cases); i++) {
        struct ps_kernels *k = table(&h200, precisions[i % 2], 1);
        const int64_t rows = cases[i / 2].rows, m = cases[i / 2].m, n = cases[i / 2].n;
        struct ps_gemm_gradient g = {.dw = matrix(PS_F32, m, n),
                                     .db = ps_tensor_1d(memory(0), PS_F32, n),
                                     .x = matrix(k->real, rows, m),
                                     .dy = matrix(k->real, rows, n)};
        g.x.data = memory(cases[i / 2].offset);
        ck_assert_str_eq(k->way(k, PS_OP_gemm_gradient, &g), cases[i / 2].way);
        g.db.data = NULL;
        ck_assert_str_eq(k->way(k, PS_OP_gemm_gradient, &g), cases[i / 2].way);
        g.x.data = memory(0);
        g.dy.data = memory(cases[i / 2].offset);
        ck_assert_str_eq(k->way(k, PS_OP_gemm_gradient, &g), cases[i / 2].way);
        k->close(k);
    }
    /* Of fp32 as many as have their partial sums in the workspace, with those of db's columns. */
    static const struct {
        int64_t m, n;
        const char *way, *alone;
    } sums[] = {{2048, 4096, "apart", "gradient"},    {4096, 2048, "apart", "gradient"}, {2048, 4092, "apart", "gradient"},
                {2048, 3968, "gradient", "gradient"}, {2052, 4096, "apart", "apart"},    {40000, 160, "apart", "apart"},
                {32640, 160, "gradient", "gradient"}, {131072, 64, "apart", "gradient"}, {131076, 64, "apart", "apart"}};
    struct ps_kernels *exact = table(&h200, PS_FP32, 1);
    for (size_t i = 0; i < LENGTH(sums); i++) {
        struct ps_gemm_gradient g = {.dw = matrix(PS_F32, sums[i].m, sums[i].n),
                                     .db = ps_tensor_1d(memory(0), PS_F32, sums[i].n),
                                     .x = matrix(PS_F32, 1024, sums[i].m),
                                     .dy = matrix(PS_F32, 1024, sums[i].n)};
        ck_assert_str_eq(exact->way(exact, PS_OP_gemm_gradient, &g), sums[i].way);
        g.db.data = NULL;
        ck_assert_str_eq(exact->way(exact, PS_OP_gemm_gradient, &g), sums[i].alone);
    }
    exact->close(exact);
    struct ps_kernels *k = table(&a100, PS_PRECISION_BF16, 1);
    const struct ps_gemm_gradient g = {.dw = matrix(PS_F32, 64, 64),
                                       .db = ps_tensor_1d(memory(0), PS_F32, 64),
                                       .x = matrix(PS_BF16, 1000, 64),
                                       .dy = matrix(PS_BF16, 1000, 64)};
    ck_assert_str_eq(k->way(k, PS_OP_gemm_gradient, &g), "apart");
    k->close(k);
}
END_TEST

/* ---- attention ---- */

struct attention {
    enum ps_precision precision;
    int64_t heads, patches, e;
    const char *forward, *backward;
};

static const struct attention attentions[] = {
    {PS_FP32, 4, 64, 8, "warp_float", "warp_float"},
    {PS_FP32, 4, 65, 8, "tiled", "tiled"},
    {PS_FP32, 4, 32, 16, "warp_float", "warp_float"},
    {PS_FP32, 4, 33, 16, "tiled", "tiled"},
    {PS_FP32, 4, 32, 7, "tiled", "tiled"},
    {PS_FP32, 4, 32, 10, "warp_float", "warp_float"},
    {PS_FP32, 4, 32, 18, "tiled", "tiled"},
    {PS_TF32, 4, 64, 8, "warp_float", "warp_float"},
    {PS_TF32, 4, 65, 8, "tiled", "tiled"},
    {PS_TF32, 4, 32, 64, "tiled", "tiled"},
    {PS_TF32, 4, 32, 65, "refused", "refused"},
    {PS_TF32, 4, 1025, 8, "refused", "refused"},
};

/* Of either type of 16 bits. */
static const struct {
    int64_t heads, patches, e;
    const char *forward, *backward;
} attentions16[] = {
    {4, 64, 8, "short16", "short16"},   {4, 65, 8, "short16", "short16"},   {4, 65, 4, "long16", "long16"},
    {4, 96, 8, "short16", "short16"},   {4, 97, 8, "short16", "long16"},    {4, 128, 8, "short16", "long16"},
    {8, 65, 16, "short16", "long16"},   {3, 100, 24, "short16", "long16"},  {4, 128, 32, "short16", "long16"},
    {4, 129, 16, "long16", "long16"},   {4, 3000, 128, "long16", "long16"}, {4, 65, 129, "refused", "refused"},
    {4, 64, 128, "short16", "short16"}, {4, 42, 7, "short16", "short16"},   {3, 5, 64, "short16", "short16"},
    {3, 113, 40, "short16", "long16"},  {3, 64, 104, "short16", "short16"}, {3, 128, 120, "short16", "long16"},
    {3, 65, 20, "long16", "long16"},
};

static void expect_attention(const struct attention *x)
{
    const struct model m = {"", 8, x->patches, x->heads * x->e, x->heads, 0, 0, 0};
    struct ps_kernels *k = table(&h200, x->precision, 1);
    const char *ways[] = {or_refused(forward(k, &m, k->real)), or_refused(backward(k, &m, k->real))};
    ck_assert_msg(strcmp(ways[0], x->forward) == 0 && strcmp(ways[1], x->backward) == 0,
                  "attention of precision %d, %lld patches, %lld heads of %lld: %s and %s, not %s and %s", (int)x->precision,
                  (long long)x->patches, (long long)x->heads, (long long)x->e, ways[0], ways[1], x->forward, x->backward);
    k->close(k);
}

START_TEST(of_attention)
{
    for (size_t i = 0; i < sizeof attentions / sizeof *attentions; i++) {
        expect_attention(&attentions[i]);
    }
    for (size_t i = 0; i < sizeof attentions16 / sizeof *attentions16; i++) {
        struct attention x = {PS_PRECISION_BF16, attentions16[i].heads,   attentions16[i].patches,
                              attentions16[i].e, attentions16[i].forward, attentions16[i].backward};
        expect_attention(&x);
        x.precision = PS_FP16;
        expect_attention(&x);
    }
}
END_TEST

/* Short sequences whose rows lie further apart than a block's offsets of 32 bits reach. */
START_TEST(of_attention_far_apart)
{
    const int64_t size[4] = {2, 4, 42, 8}, stride[4] = {INT64_C(1) << 23, 8, 32, 1};
    struct ps_kernels *k = table(&h200, PS_PRECISION_BF16, 1);
    struct ps_tensor rows = ps_tensor_nd(memory(0), PS_BF16, 4, size);
    const struct ps_attention near = {
        .mixed = rows, .logsum = ps_tensor_1d(memory(0), PS_F32, 2 * 4 * 42), .q = rows, .k = rows, .v = rows, .scale = 0.25};
    struct ps_attention far = near;
    memcpy(far.k.stride, stride, sizeof stride);
    ck_assert_str_eq(k->way(k, PS_OP_attention, &near), "short16");
    ck_assert_str_eq(k->way(k, PS_OP_attention, &far), "long16");
    k->close(k);
}
END_TEST

/* What runtime.attention: auto takes, at the edges of what was measured. */
START_TEST(of_attention_or_products)
{
    static const struct {
        enum ps_precision precision;
        int64_t patches, head, pieces;
        int faster;
    } cases[] = {
        {PS_PRECISION_BF16, 1, 8, 1, 1},
        {PS_PRECISION_BF16, 42, 128, 1, 1},
        {PS_PRECISION_BF16, 42, 129, 1, 0},
        {PS_PRECISION_BF16, 3000, 64, 1, 1},
        {PS_PRECISION_BF16, 100, 16, 8, 1},
        {PS_PRECISION_BF16, 100, 16, 9, 0},
        {PS_FP16, 1, 8, 1, 1},
        {PS_FP16, 42, 128, 1, 1},
        {PS_FP16, 42, 129, 1, 0},
        {PS_FP16, 3000, 64, 1, 1},
        {PS_FP16, 100, 16, 8, 1},
        {PS_FP16, 100, 16, 9, 0},
        {PS_TF32, 5, 16, 1, 1},
        {PS_TF32, 33, 16, 1, 0},
        {PS_TF32, 64, 8, 1, 1},
        {PS_TF32, 41, 9, 1, 0},
        {PS_TF32, 42, 32, 1, 1},
        {PS_TF32, 42, 33, 1, 0},
        {PS_FP32, 64, 8, 1, 1},
        {PS_FP32, 65, 8, 1, 0},
        {PS_FP32, 127, 32, 1, 0},
        {PS_FP32, 128, 32, 1, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_kernels *k = table(&h200, cases[i].precision, 1);
        const int faster = k->attention_faster(k, cases[i].patches, cases[i].head, cases[i].pieces);
        ck_assert_msg(faster == cases[i].faster, "%s, %d patches, heads of %d x %d: %d", ps_precision_name(cases[i].precision),
                      (int)cases[i].patches, (int)cases[i].pieces, (int)cases[i].head, faster);
        k->close(k);
    }
}
END_TEST

/* Heads that are no whole pieces of 16 bytes lie in whole ones, in 16 bits from sm_90 on, where they stay within what attention
 * takes. */
START_TEST(of_padded_heads)
{
    static const struct {
        enum ps_precision precision;
        int64_t head, pieces, columns;
    } cases[] = {
        {PS_FP16, 4, 1, 8},     {PS_FP16, 3, 1, 3},  {PS_FP16, 5, 3, 8},   {PS_FP16, 5, 16, 8},           {PS_FP16, 5, 17, 5},
        {PS_FP16, 8, 1, 8},     {PS_FP16, 9, 1, 16}, {PS_FP16, 26, 1, 32}, {PS_FP16, 121, 1, 128},        {PS_FP16, 64, 1, 64},
        {PS_FP16, 129, 1, 129}, {PS_FP32, 9, 1, 9},  {PS_TF32, 5, 1, 5},   {PS_PRECISION_BF16, 20, 1, 24}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_kernels *k = table(&h200, cases[i].precision, 1);
        ck_assert_int_eq(k->attention_columns(k, 42, cases[i].head, cases[i].pieces), cases[i].columns);
        k->close(k);
    }
    struct ps_kernels *k = table(&a100, PS_FP16, 1);
    ck_assert_int_eq(k->attention_columns(k, 42, 9, 1), 9);
    k->close(k);
}
END_TEST

int main(void)
{
    struct ps_kernels *k;
    if (ps_kernels_choices(&h200, PS_FP32, NULL, &k) != PS_OK) {
        printf("skipped: CUDA's choices: %s\n", ps_error_message());
        return 0;
    }
    k->close(k);
    Suite *suite = suite_create("choices");
    TCase *tests = tcase_create("choices");
    tcase_add_test(tests, of_the_models);
    tcase_add_test(tests, of_edges);
    tcase_add_test(tests, of_strides);
    tcase_add_test(tests, of_heads_by_row);
    tcase_add_test(tests, of_biases);
    tcase_add_test(tests, of_gradients);
    tcase_add_test(tests, of_attention);
    tcase_add_test(tests, of_attention_far_apart);
    tcase_add_test(tests, of_attention_or_products);
    tcase_add_test(tests, of_padded_heads);
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
