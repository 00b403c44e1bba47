/* Random models end to end: each is drawn from all that a config allows, trains one short epoch the way that train does, and is
 * scored, on every backend, precision and level that is there. Each must agree with backend cpu in fp32, or be refused with
 * PS_USAGE and one line where a refusal is right; a crash, a hang, a NaN or another status fails.
 *
 * What agrees: the training loss, the validation MSE, AdamW's first moments tensor by tensor (they hold the gradients of all steps)
 * and the parameters' change. A learning rate of at most 0.2 / the longest product's terms moves an output by a fraction of its
 * size a step, so roundings are not amplified from step to step, and wrong gradients are seen in the moments whatever the rate is.
 *
 * Models are trained in a process of its own, which alone opens devices: when it dies or hangs, that is noted and another goes on
 * behind it. A model depends on the seed and its number alone, so shards can run side by side:
 *   PS_SEED=S             another seed
 *   PS_RANDOM_MODELS=N    as many models (40; 1,000 with PS_TEST_FULL=1)
 *   PS_RANDOM_FIRST=K     beginning with model K (0)
 *   PS_TEST_SMALL=1       a few small ones in this process, for compute-sanitizer */
#include <math.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "data/import.h"
#include "src/session.h"
#include "tests/asked.h"
#include "tests/model_fixture.h"
#include "tests/run.h"
#include "tests/suite.h"

enum { QUICK = 40, FULL = 1000, SMALL = 6, HANGS = 300 /* seconds for one run, on a machine under load */ };
enum { TEXT = 600, KINDS = 32, AGAIN = 77 /* exit code: go on in a new process */ };

/* ---- variants ---- */

struct variant {
    const char *backend, *precision, *fusion;
};

static const struct variant baseline = {"cpu", "fp32", "auto"};
static const struct variant with_cuda[] = {{"cuda", "fp32", "none"}, {"cuda", "fp32", "gemm"}, {"cuda", "fp32", "auto"},
                                           {"cuda", "tf32", "none"}, {"cuda", "tf32", "gemm"}, {"cuda", "tf32", "layer"},
                                           {"cuda", "tf32", "auto"}, {"cuda", "bf16", "gemm"}, {"cuda", "bf16", "layer"},
                                           {"cuda", "bf16", "auto"}, {"cuda", "fp16", "gemm"}, {"cuda", "fp16", "layer"},
                                           {"cuda", "fp16", "auto"}};
static const struct variant without_cuda[] = {{"cpu", "fp32", "none"},
                                              {"cpu", "fp32", "gemm"},
                                              {"reference", "fp32", "auto"},
                                              {"cpu", "fp32", "layer"},
                                              {"cpu", "bf16", "auto"}};
enum { MOST_VARIANTS = sizeof with_cuda / sizeof *with_cuda };
_Static_assert(sizeof without_cuda <= sizeof with_cuda, "room for the outcomes of every variant");

static const struct variant *variants;
static int n_variants;

/* What is compared; errors are relative. */
enum { LOSS, VALIDATION, MOMENTS, CHANGE, FIGURES };
static const char *const figures[FIGURES] = {"training loss", "validation mse", "first moments", "parameters' change"};

struct bounds {
    const char *precision;
    double of[FIGURES], relu; /* relu: of its models' moments, where a rounding may turn a hidden column on or off */
};
/* Of the moments, measured: fp32 2.2e-5, tf32 1.3e-2; bf16 2.2e-2 but for q and k of a single patch, whose gradients are zero and
 * at level layer the difference of two roundings, 2.2e-4 of the whole gradient: 0.22 by the rule. Of 100 models with ReLU one had
 * 1.5e-3 in fp32; on CUDA theirs are not measured. */
static const struct bounds bounds[] = {{"fp32", {3e-4, 3e-4, 1e-3, 0.1}, 1e-2},
                                       {"tf32", {4e-3, 4e-3, 5e-2, 0.3}, 0.1},
                                       {"fp16", {4e-3, 4e-3, 5e-2, 0.3}, 0.1},
                                       {"bf16", {3e-2, 3e-2, 4e-1, 0.5}, 4e-1}};
enum { PRECISIONS = sizeof bounds / sizeof *bounds };
/* With dropout masks are the same everywhere, and fp32 must agree as without; in fewer bits what is left is only held together. */
static const double broad[FIGURES] = {0.5, 0.5, INFINITY, INFINITY};

static int precision_of(const struct variant *v)
{
    int i = 0;
    while (strcmp(bounds[i].precision, v->precision) != 0) {
        i++;
    }
    return i;
}

/* ---- models ---- */

struct model {
    struct ps_model_shape shape; /* channels too */
    int64_t batch, steps, windows, validation;
    double lr, clip_norm, work;
    int ready_made, drop_last, merge_qkv, epilogue, tiny_gemm, skip, variant;
    const char *attention, *placement;
    uint64_t seed;
};

struct draw {
    uint64_t seed, model, n;
};

static double uniform(struct draw *d)
{
    return ps_uniform(d->seed, d->n++, 12, d->model);
}

static int chance(struct draw *d, double p)
{
    return uniform(d) < p;
}

static int64_t whole(struct draw *d, int64_t least, int64_t most)
{
    return least + (int64_t)(uniform(d) * (double)(most - least + 1));
}

/* As many from 1 to 2 as from 100 to 200. */
static double spread(struct draw *d, double least, double most)
{
    return least * pow(most / least, uniform(d));
}

static int64_t whole_spread(struct draw *d, int64_t least, int64_t most)
{
    int64_t value = (int64_t)spread(d, (double)least, (double)most + 1);
    return value < most ? value : most;
}

static int64_t one_of(struct draw *d, const int64_t *values, int n)
{
    return values[whole(d, 0, n - 1)];
}
#define ONE_OF(draw, ...) \
    one_of(draw, (const int64_t[]){__VA_ARGS__}, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

static int64_t divisor(struct draw *d, int64_t value)
{
    int64_t all[64];
    int n = 0;
    for (int64_t i = 1; i <= value && n < 64; i++) {
        if (value % i == 0) {
            all[n++] = i;
        }
    }
    return one_of(d, all, n);
}

static int64_t least_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Windows, patches and the horizon. */
static void draw_lengths(struct draw *d, struct ps_model_shape *s)
{
    enum { MOST_PATCHES = 400 };
    s->seq_len = whole_spread(d, 16, 900);
    s->patch_len = chance(d, 0.2) ? ONE_OF(d, 8, 12, 16, 24, 32) : whole_spread(d, 1, chance(d, 0.8) ? 40 : s->seq_len);
    s->patch_len = least_of(s->patch_len, s->seq_len);
    s->stride = chance(d, 0.5)   ? whole(d, (s->patch_len + 1) / 2, s->patch_len)
                : chance(d, 0.8) ? whole_spread(d, 1, s->patch_len)
                                 : whole_spread(d, 1, 2 * s->seq_len);
    s->pad_end = chance(d, 0.5);
    if (chance(d, 0.15)) { /* many patches */
        s->seq_len = whole(d, 200, 900);
        s->patch_len = whole(d, 1, 24);
        s->stride = whole(d, 1, 1 + s->seq_len / 300);
    }
    while (ps_patches(s) > MOST_PATCHES) {
        s->stride++;
    }
    s->pred_len = chance(d, 0.3) ? ONE_OF(d, 1, 24, 96, 96, 192) : whole_spread(d, 1, 200);
}

/* Widths: a share near what the fused kernels serve, the rest anything. */
static void draw_widths(struct draw *d, struct ps_model_shape *s)
{
    if (chance(d, 0.5)) {
        s->d_model = ONE_OF(d, 16, 16, 32, 48, 64, 64, 128, 128, 256);
        int64_t e = ONE_OF(d, 2, 4, 8, 8, 16, 16, 32);
        s->n_heads = s->d_model % e == 0 && chance(d, 0.8) ? s->d_model / e : divisor(d, s->d_model);
        s->d_ff = chance(d, 0.6)   ? s->d_model * ONE_OF(d, 1, 2, 2, 4)
                  : chance(d, 0.5) ? ONE_OF(d, 128, 256, 384, 512)
                                   : 8 * whole(d, 1, s->d_model / 2);
        return;
    }
    s->d_model = chance(d, 0.2) ? 8 * whole(d, 1, 40) : chance(d, 0.5) ? whole_spread(d, 4, 320) : whole(d, 4, 320);
    s->n_heads = divisor(d, s->d_model);
    s->d_ff = chance(d, 0.15) ? whole(d, 1, 1300) : whole(d, 1, 4 * s->d_model);
}

static double parameters_of(const struct ps_model_shape *s)
{
    double d = (double)s->d_model, N = (double)ps_patches(s), heads = s->individual_head ? (double)s->channels : 1;
    double matrices = s->activation == PS_SWIGLU ? 3 : 2;
    return d * (double)s->patch_len + N * d * (1 + heads * (double)s->pred_len) +
           (double)s->n_layers * d * (4 * d + matrices * (double)s->d_ff);
}

/* Scores of all layers, which levels without tiles keep. */
static double scores_of(const struct model *m)
{
    const struct ps_model_shape *s = &m->shape;
    double N = (double)ps_patches(s);
    return (double)(s->n_layers * m->batch * s->channels * s->n_heads) * N * N;
}

/* Of a run: products' FLOPs, and passes over activations, scores and parameters in as many. */
static double work_of(const struct model *m)
{
    const struct ps_model_shape *s = &m->shape;
    double R = (double)(m->batch * s->channels * ps_patches(s));
    double step = ps_model_step_flops(s, m->batch) + (double)s->n_layers * R * (600 * (double)s->d_model + 300 * (double)s->d_ff) +
                  200 * scores_of(m);
    return step * ((double)m->steps + (double)m->validation / (double)m->batch) + 300 * parameters_of(s);
}

/* The config's keys of the places, and how likely each has a rate of its own. */
static const struct place {
    const char *key;
    double chance;
} places[PS_DROP_PLACES] = {[PS_DROP_EMBEDDING] = {"dropout_embedding", 0.5},
                            [PS_DROP_ATTENTION] = {"dropout_attention", 0.5},
                            [PS_DROP_HIDDEN] = {"dropout_hidden", 0.5},
                            [PS_DROP_OUTPUT] = {"dropout_output", 0.5},
                            [PS_DROP_ATTENTION_WEIGHTS] = {"dropout_attention_weights", 0.3},
                            [PS_DROP_HEAD] = {"dropout_head", 0.3}};

static int drops(const struct ps_model_shape *s)
{
    double most = 0;
    for (int i = 0; i < PS_DROP_PLACES; i++) {
        most = fmax(most, ps_dropout_rate(s, (enum ps_dropout_place)i));
    }
    return most > 0;
}

static void take_bounds(const struct variant *v, const struct ps_model_shape *s, double limits[FIGURES])
{
    const struct bounds *b = &bounds[precision_of(v)];
    const int together = drops(s) && strcmp(v->precision, "fp32") != 0;
    memcpy(limits, together ? broad : b->of, sizeof broad);
    if (s->activation == PS_RELU && !together) {
        limits[MOMENTS] = b->relu;
    }
}

/* Of the shortest training batch. */
static int64_t rows_of(const struct model *m)
{
    const int64_t left = m->drop_last ? 0 : m->windows % m->batch;
    return (left ? left : m->batch) * m->shape.channels * ps_patches(&m->shape);
}

/* Half the models are PatchTST's as it stands, which alone level layer has; the others have any of the family's variants. They are
 * drawn by themselves, when the sizes are there: a batch of a few rows is left to the other norms, since its normalised columns are
 * nearly all of the same two or three numbers whatever they were. */
static void draw_variant(struct model *m, uint64_t seed, int64_t number, double most_parameters)
{
    enum { LEAST_ROWS = 16 };
    struct draw draw = {.seed = seed, .model = (uint64_t)number | (uint64_t)1 << 41}, *d = &draw;
    struct ps_model_shape *s = &m->shape;
    m->variant = chance(d, 0.5);
    if (!m->variant) {
        return;
    }
    s->norm = (enum ps_norm)ONE_OF(d, PS_NORM_LAYER, PS_NORM_BATCH, PS_NORM_BATCH, PS_NORM_RMS);
    s->norm = s->norm == PS_NORM_BATCH && rows_of(m) < LEAST_ROWS ? PS_NORM_RMS : s->norm;
    /* The gradient of a bias that BatchNorm's mean takes away again is roundings alone, which AdamW makes steps of, and the running
     * mean, which scoring takes, follows them by a tenth: the rate holds what that adds to a validation far below its bound. */
    m->lr = s->norm == PS_NORM_BATCH ? fmin(m->lr, 3e-5) : m->lr;
    s->norm_place = chance(d, 0.5) ? PS_NORM_POST : PS_NORM_PRE;
    s->residual_attention = chance(d, 0.5);
    s->activation = (enum ps_activation)ONE_OF(d, PS_GELU_TANH, PS_GELU, PS_RELU, PS_SWIGLU);
    s->positions = (enum ps_positions)ONE_OF(d, PS_POSITIONS_LEARNED, PS_POSITIONS_SINCOS, PS_POSITIONS_NONE, PS_POSITIONS_ROPE);
    s->positions = s->positions == PS_POSITIONS_ROPE && s->d_model / s->n_heads % 2 ? PS_POSITIONS_LEARNED : s->positions;
    s->individual_head = chance(d, 0.3);
    s->individual_head = s->individual_head && parameters_of(s) <= most_parameters && s->mask_ratio == 0;
    s->revin_affine = chance(d, 0.4) && s->revin && s->mask_ratio == 0;
    s->revin_subtract_last = chance(d, 0.3) && s->revin;
    s->patches_from_end = chance(d, 0.5);
    const int by_place = chance(d, 0.3);
    for (int i = 0; i < PS_DROP_PLACES; i++) {
        const double rate = floor(400 * uniform(d)) / 1000;
        if (chance(d, places[i].chance) && by_place) {
            s->dropout_at[i].set = 1;
            s->dropout_at[i].rate = rate;
        }
    }
}

/* A fifth of the models reconstruct masked patches, as few as one or all but one, of patches that lie side by side or apart. */
static void draw_objective(struct model *m, uint64_t seed, int64_t number)
{
    struct draw draw = {.seed = seed, .model = (uint64_t)number | (uint64_t)1 << 42}, *d = &draw;
    struct ps_model_shape *s = &m->shape;
    if (!chance(d, 0.2)) {
        return;
    }
    s->pad_end = 0;
    s->patch_len = least_of(s->patch_len, s->seq_len / 2);
    s->stride = s->stride < s->patch_len || s->stride > s->seq_len - s->patch_len ? s->patch_len : s->stride;
    const int64_t N = ps_patches(s);
    s->mask_ratio = ((double)whole(d, 1, N - 1) - 0.5) / (double)N;
}

/* Model `number` of the seed. Any shape whose least batch can be done is taken; batch, channels and then layers make room. */
static struct model draw_model(uint64_t seed, int64_t number)
{
    const int small = asked("PS_TEST_SMALL");
    const double most_parameters = small ? 3e5 : 4e6, most_scores = small ? 1e6 : 3e7;
    const double least_work = small ? 3e6 : 5e8, most_work = small ? 1e8 : 1.5e10;
    struct draw draw = {.seed = seed, .model = (uint64_t)number}, *d = &draw;
    for (;;) {
        struct model m = {.seed = (uint64_t)number + 1};
        struct ps_model_shape *s = &m.shape;
        draw_lengths(d, s);
        draw_widths(d, s);
        s->n_layers = whole(d, 1, 4);
        s->revin = chance(d, 0.6);
        s->dropout = chance(d, 0.25) ? floor((0.05 + 0.55 * uniform(d)) * 1000) / 1000 : 0;
        s->channels = whole_spread(d, 1, 24);
        m.batch = whole_spread(d, 1, 64);
        m.steps = whole(d, 2, 4);
        m.ready_made = chance(d, 0.25);
        m.drop_last = chance(d, 0.5);
        m.merge_qkv = chance(d, 0.7);
        m.epilogue = chance(d, 0.7);
        m.tiny_gemm = chance(d, 0.7);
        m.skip = chance(d, 0.15);
        m.clip_norm = chance(d, 0.25) ? 0.5 : 0;
        m.attention = (const char *[]){"auto", "auto", "gemm", "tiled"}[whole(d, 0, 3)];
        m.placement = (const char *[]){"auto", "device", "host"}[whole(d, 0, 2)];
        double aim = spread(d, least_work, most_work), last = uniform(d), validation = uniform(d);
        while (parameters_of(s) > most_parameters && s->pred_len > 1) {
            s->pred_len = s->pred_len / 2;
        }
        for (;;) {
            /* drop_last: some windows more than whole batches; else the last batch is maybe short. */
            m.windows = m.drop_last ? m.steps * m.batch + (int64_t)(last * (double)m.batch)
                                    : (m.steps - 1) * m.batch + 1 + (int64_t)(last * (double)m.batch);
            m.validation = 1 + (int64_t)(validation * 2 * (double)m.batch);
            m.work = work_of(&m);
            if (m.work <= aim && scores_of(&m) <= most_scores) {
                break;
            }
            if (m.batch > 1 && chance(d, s->channels == 1 ? 0.8 : 0.5)) {
                m.batch = (m.batch + 1) / 2;
            } else if (s->channels > 1 && (s->n_layers == 1 || chance(d, 0.8))) {
                s->channels = (s->channels + 1) / 2;
            } else if (s->n_layers > 1) {
                s->n_layers--;
            } else {
                break;
            }
        }
        if (m.work <= most_work && scores_of(&m) <= most_scores && parameters_of(s) <= most_parameters) {
            double terms = fmax(fmax((double)(ps_patches(s) * s->d_model), (double)s->d_ff),
                                fmax(3 * (double)s->d_model, (double)s->patch_len));
            m.lr = fmin(1e-3, spread(d, 0.03, 0.2) / terms);
            draw_objective(&m, seed, number);
            draw_variant(&m, seed, number, most_parameters);
            return m;
        }
    }
}

/* ---- its data and its config ---- */

/* Seasons, a trend and noise, each channel with its own scale; now and then a constant channel, but never all. */
static enum ps_status write_series(const struct model *m, const char *path, int64_t rows)
{
    int64_t C = m->shape.channels;
    struct draw draw = {.seed = m->seed, .model = (uint64_t)1 << 40}, *d = &draw;
    float *values = malloc((size_t)(rows * C) * sizeof *values);
    char(*text)[24] = malloc((size_t)C * sizeof *text), **names = malloc((size_t)C * sizeof *names);
    for (int64_t c = 0; c < C; c++) {
        snprintf(text[c], sizeof text[c], "c%lld", (long long)c);
        names[c] = text[c];
        double scale = spread(d, 1e-2, 1e3), level = 6 * uniform(d) - 3, trend = uniform(d) - 0.5, noise = spread(d, 0.05, 1);
        double period = spread(d, 5, 200), phase = 6.28 * uniform(d);
        int constant = c > 0 && chance(d, 0.15);
        for (int64_t t = 0; t < rows; t++) {
            double value = trend * (double)t / (double)rows + sin(6.283185307179586 * (double)t / period + phase) +
                           noise * normal(m->seed, (uint64_t)(t * C + c), 97);
            values[t * C + c] = (float)(scale * (level + (constant ? 0 : value)));
        }
    }
    enum ps_status status = ps_series_write(path, values, rows, C, names, NULL, NULL, NULL);
    free(names);
    free(text);
    free(values);
    return status;
}

/* Rows, or ready-made windows, of the three parts: just enough for the windows, and one for the test part. */
static void parts_of(const struct model *m, int64_t part[3])
{
    int64_t L = m->shape.seq_len, H = m->shape.pred_len, more = m->ready_made ? 0 : H - 1;
    part[0] = m->windows + (m->ready_made ? 0 : L + H - 1);
    part[1] = m->validation + more;
    part[2] = 1 + more;
}

static enum ps_status write_data(const struct model *m, const char *path)
{
    int64_t part[3];
    parts_of(m, part);
    int64_t rows = part[0] + part[1] + part[2];
    return m->ready_made ? ps_sample_windows(path, rows, m->shape.channels, m->shape.seq_len, m->shape.pred_len, m->seed)
                         : write_series(m, path, rows);
}

static struct path folder;

static struct path data_path(int64_t number)
{
    return path_of("%.400s/model-%lld.h5", folder.text, (long long)number);
}

static struct path config_path(int64_t number, const struct variant *v)
{
    return path_of("%.400s/model-%lld-%s-%s-%s.yaml", folder.text, (long long)number, v->backend, v->precision, v->fusion);
}

/* On the CPU auto is gemm, so gemm has attention, merge_qkv and epilogue as the baseline does not have them. */
static int other_of(const struct variant *v)
{
    return strcmp(v->backend, "cpu") == 0 && strcmp(v->fusion, "gemm") == 0;
}

/* As the CPU backend takes it, where tiles have what the model asks for. */
static const char *attention_of(const struct model *m, const struct variant *v, int other)
{
    const struct ps_model_shape *s = &m->shape;
    const int weights = ps_dropout_rate(s, PS_DROP_ATTENTION_WEIGHTS) > 0;
    if (strcmp(v->backend, "cpu") == 0 && weights) {
        return strcmp(m->attention, "gemm") == 0 || other ? "gemm" : "auto";
    }
    const int64_t pieces = s->residual_attention ? s->n_layers : 1, columns = s->d_model / s->n_heads * pieces;
    const int faster = pieces == 1 || columns <= 24 || ps_patches(s) >= 128;
    int tiled = strcmp(m->attention, "tiled") == 0 || (strcmp(m->attention, "auto") == 0 && faster);
    return !other ? m->attention : tiled ? "gemm" : "tiled";
}

static const char *word(int on)
{
    return on ? "true" : "false";
}

static enum ps_status write_config(const struct model *m, int64_t number, const struct variant *v)
{
    struct path path = config_path(number, v);
    const struct ps_model_shape *s = &m->shape;
    int64_t part[3];
    int other = other_of(v);
    parts_of(m, part);
    FILE *file = fopen(path.text, "w");
    if (!file) {
        return ps_fail(PS_DEVICE, "%s: %s", path.text, strerror(errno));
    }
    fprintf(file, "data:\n  path: \"%s\"\n  split: [%lld, %lld, %lld]\n  drop_last: %s\n  placement: %s\n", data_path(number).text,
            (long long)part[0], (long long)part[1], (long long)part[2], word(m->drop_last), m->placement);
    fprintf(file, "model:\n  seq_len: %lld\n  pred_len: %lld\n  patch_len: %lld\n  stride: %lld\n  padding: %s\n",
            (long long)s->seq_len, (long long)s->pred_len, (long long)s->patch_len, (long long)s->stride,
            s->pad_end ? "end" : "none");
    fprintf(file, "  d_model: %lld\n  n_heads: %lld\n  d_ff: %lld\n  n_layers: %lld\n  dropout: %g\n  revin: %s\n",
            (long long)s->d_model, (long long)s->n_heads, (long long)s->d_ff, (long long)s->n_layers, s->dropout, word(s->revin));
    if (m->variant) {
        static const char *const norms[] = {[PS_NORM_LAYER] = "layer", [PS_NORM_BATCH] = "batch", [PS_NORM_RMS] = "rms"};
        static const char *const activations[] = {
            [PS_GELU_TANH] = "gelu_tanh", [PS_GELU] = "gelu", [PS_RELU] = "relu", [PS_SWIGLU] = "swiglu"};
        static const char *const positions[] = {[PS_POSITIONS_LEARNED] = "learned",
                                                [PS_POSITIONS_SINCOS] = "sincos",
                                                [PS_POSITIONS_NONE] = "none",
                                                [PS_POSITIONS_ROPE] = "rope"};
        fprintf(file, "  norm: %s\n  norm_place: %s\n  residual_attention: %s\n  activation: %s\n  positions: %s\n", norms[s->norm],
                s->norm_place == PS_NORM_POST ? "post" : "pre", word(s->residual_attention), activations[s->activation],
                positions[s->positions]);
        fprintf(file, "  head: %s\n  revin_affine: %s\n  revin_subtract_last: %s\n  patches_from: %s\n",
                s->individual_head ? "individual" : "shared", word(s->revin_affine), word(s->revin_subtract_last),
                s->patches_from_end ? "end" : "start");
    }
    for (int i = 0; i < PS_DROP_PLACES; i++) {
        if (s->dropout_at[i].set) {
            fprintf(file, "  %s: %g\n", places[i].key, s->dropout_at[i].rate);
        }
    }
    if (s->mask_ratio > 0) {
        fprintf(file, "  mask_ratio: %g\n", s->mask_ratio);
    }
    fprintf(file, "optim:\n  lr: %.3g\n  clip_norm: %g\n  schedule: constant\n", m->lr, m->clip_norm);
    fprintf(file, "train:\n  epochs: 1\n  batch_size: %lld\n  seed: %llu\n  on_nonfinite: %s\n  objective: %s\n",
            (long long)m->batch, (unsigned long long)m->seed, m->skip ? "skip" : "stop", s->mask_ratio > 0 ? "masked" : "forecast");
    fprintf(file, "runtime:\n  device: %s\n  backend: %s\n  precision: %s\n  fusion: %s\n  attention: %s\n  merge_qkv: %s\n",
            strcmp(v->backend, "cuda") == 0 ? "cuda" : "cpu", v->backend, v->precision, v->fusion, attention_of(m, v, other),
            word(m->merge_qkv ^ other));
    fprintf(file, "  epilogue: %s\n  tiny_gemm: %s\n  threads: 2\n", word(m->epilogue ^ other), word(m->tiny_gemm));
    return fclose(file) == 0 ? PS_OK : ps_fail(PS_DEVICE, "%s: %s", path.text, strerror(errno));
}

/* Only where nobody could serve it, never what auto chooses from. */
static int may_be_refused(const struct variant *v, const struct model *m, const char *why)
{
    int low = strcmp(v->precision, "fp32") != 0, on_cuda = strcmp(v->backend, "cuda") == 0;
    return strcmp(v->fusion, "layer") == 0 || (strcmp(v->fusion, "none") == 0 && low) ||
           (!on_cuda && strcmp(v->precision, "bf16") == 0) ||
           (strcmp(m->attention, "tiled") == 0 && strstr(why, "runtime.attention")) ||
           (strcmp(v->fusion, "none") == 0 && m->skip && m->shape.norm == PS_NORM_BATCH && strstr(why, "train.on_nonfinite"));
}

/* ---- one run ---- */

/* What training and scoring left; buffers of the layout's count, malloc'ed. */
struct trained {
    double loss, validation, untrained; /* untrained: the validation's before */
    double *moments, *change;
};

static void trained_drop(struct trained *r)
{
    free(r->moments);
    free(r->change);
    *r = (struct trained){0};
}

static enum ps_status flat(struct ps_session *s, const void *memory, double **values)
{
    size_t count = (size_t)s->model->layout->count;
    float *host = malloc(count * sizeof *host);
    *values = malloc(count * sizeof **values);
    enum ps_status status = s->device->download(s->device, PS_COMPUTE, host, memory, count * sizeof *host);
    for (size_t i = 0; i < count && status == PS_OK; i++) {
        (*values)[i] = (double)host[i];
    }
    free(host);
    return status;
}

/* An epoch with validation, as train does it. */
static enum ps_status run_epoch(struct ps_session *s, int score_before, struct trained *r)
{
    double *before = NULL;
    struct ps_accuracy accuracy;
    int finished = 0;
    PS_TRY(ps_session_initialise(s));
    if (score_before) {
        PS_TRY(ps_session_score(s, PS_VALIDATION, &accuracy));
        r->untrained = accuracy.all.mse;
    }
    enum ps_status status = flat(s, s->model->parameters, &before);
    if (status == PS_OK) {
        status = ps_session_train_epoch(s, &(struct ps_epoch_watch){0}, &finished, &r->loss);
    }
    if (status == PS_OK && !finished) {
        status = ps_fail(PS_DEVICE, "the epoch did not end");
    }
    if (status == PS_OK) {
        status = ps_session_score(s, PS_VALIDATION, &accuracy);
        r->validation = accuracy.all.mse;
    }
    if (status == PS_OK) {
        status = flat(s, s->optimizer.m, &r->moments);
    }
    if (status == PS_OK) {
        status = flat(s, s->model->parameters, &r->change);
    }
    for (int64_t i = 0; i < s->model->layout->count && status == PS_OK; i++) {
        r->change[i] -= before[i];
    }
    free(before);
    return status;
}

static double norm_of(const double *values, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += values[i] * values[i];
    }
    return sqrt(sum);
}

/* A tensor, or the q, k or v third of one: attention's slopes are small beside those of the values. */
struct part {
    int tensor, third; /* third: of w_qkv and b_qkv, else -1 */
    int64_t first, rows, columns, stride;
};

/* Part `i` of the layout; 0 behind the last. */
static int part_of(const struct ps_parameters *layout, int i, struct part *part)
{
    for (int t = 0; t < layout->n; t++) {
        const struct ps_parameter *p = &layout->table[t];
        int thirds = strstr(p->name, "qkv") ? 3 : 1;
        if (i < thirds) {
            int64_t rows = p->rank == 2 ? p->size[0] : 1, columns = ps_parameter_count(p) / rows / thirds;
            *part = (struct part){.tensor = t,
                                  .third = thirds == 3 ? i : -1,
                                  .first = p->offset + i * columns,
                                  .rows = rows,
                                  .columns = columns,
                                  .stride = thirds * columns};
            return 1;
        }
        i -= thirds;
    }
    return 0;
}

static struct path part_name(const struct ps_parameters *layout, const struct part *part)
{
    static const char *const thirds[] = {" (q)", " (k)", " (v)"};
    return path_of("%s%s", layout->table[part->tensor].name, part->third < 0 ? "" : thirds[part->third]);
}

/* Of a part of x - y, or of x where y is NULL. */
static double part_norm(const struct part *part, const double *x, const double *y)
{
    double sum = 0;
    for (int64_t row = 0; row < part->rows; row++) {
        for (int64_t i = part->first + row * part->stride; i < part->first + row * part->stride + part->columns; i++) {
            double value = x[i] - (y ? y[i] : 0);
            sum += value * value;
        }
    }
    return sqrt(sum);
}

/* Whether a gradient is next to nothing beside that of all tensors, as BatchNorm makes of the biases before it, whose effect its
 * mean takes away again: then it is a sum of roundings. */
static int next_to_nothing(const struct ps_parameters *layout, double norm, double all)
{
    return norm < (layout->all > layout->n ? 3e-3 : 1e-3) * all;
}

/* What docs/design.md, "Comparing gradients", divides by; and twentyfold what it adds where BatchNorm has left next to nothing. */
static double part_scale(const struct ps_parameters *layout, double norm, double all)
{
    return norm + (layout->all > layout->n && next_to_nothing(layout, norm, all) ? 2e-2 : 1e-3) * all;
}

static double moments_error(const struct ps_parameters *layout, const double *got, const double *expected, struct part *worst)
{
    double all = norm_of(expected, layout->count), largest = -1;
    struct part part;
    for (int i = 0; part_of(layout, i, &part); i++) {
        double error = part_norm(&part, got, expected) / part_scale(layout, part_norm(&part, expected, NULL), all);
        if (!(error <= largest)) {
            largest = error;
            *worst = part;
        }
        if (isnan(error)) {
            break;
        }
    }
    return largest;
}

/* AdamW's step is nearly lr times the gradient's sign, however small the gradient: the change is compared where that is not a
 * matter of rounding, at elements of at least half their tensor's root mean square, of tensors that are not nearly zero. */
static double change_error(const struct ps_parameters *layout, const struct trained *got, const struct trained *expected)
{
    double all = norm_of(expected->moments, layout->count), delta = 0, size = 0;
    for (int t = 0; t < layout->n; t++) {
        const struct ps_parameter *p = &layout->table[t];
        int64_t n = ps_parameter_count(p);
        double norm = norm_of(expected->moments + p->offset, n), least = 0.5 * norm / sqrt((double)n);
        for (int64_t i = p->offset; i < p->offset + n && norm > 1e-2 * all; i++) {
            if (fabs(expected->moments[i]) >= least) {
                delta += (got->change[i] - expected->change[i]) * (got->change[i] - expected->change[i]);
                size += expected->change[i] * expected->change[i];
            }
        }
    }
    return sqrt(delta / size);
}

/* *worst: where the moments are furthest apart. */
static void compare(const struct ps_parameters *layout, const struct trained *got, const struct trained *expected,
                    double error[FIGURES], struct part *worst)
{
    error[LOSS] = fabs(got->loss / expected->loss - 1);
    error[VALIDATION] = fabs(got->validation / expected->validation - 1);
    error[MOMENTS] = moments_error(layout, got->moments, expected->moments, worst);
    error[CHANGE] = change_error(layout, got, expected);
}

/* The first figure that is not within its bound, FIGURES when all are. */
static int beyond(const double error[FIGURES], const double limits[FIGURES])
{
    int i = 0;
    while (i < FIGURES && error[i] <= limits[i]) { /* NaN is not */
        i++;
    }
    return i;
}

/* ---- what the worker reports ---- */

enum state { NOT_DONE, UNDER_WAY, AGREED, REFUSED, FAILED };

struct outcome {
    _Atomic int state; /* enum state */
    double error[FIGURES];
    char text[TEXT]; /* why it was refused or failed */
};

struct model_report {
    double moved;            /* how much training changed the validation's MSE, relative */
    int parts;               /* of the model's tensors */
    int unseen[PRECISIONS];  /* whose gradient is so small that none at all would be within the bound */
    struct outcome baseline; /* UNDER_WAY: data and baseline */
    struct outcome outcome[MOST_VARIANTS];
};

/* Memory shared with the worker. variant: -1 for the baseline. */
struct report {
    _Atomic int64_t model, runs;
    _Atomic int variant;
    struct model_report of[];
};

static struct report *report;
static int64_t first, models;
static uint64_t seed;

static struct model_report *report_of(int64_t number)
{
    return &report->of[number - first];
}

/* ---- the worker ---- */

static void fail_outcome(struct outcome *o, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void fail_outcome(struct outcome *o, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(o->text, sizeof o->text, format, arguments);
    va_end(arguments);
    o->state = FAILED;
}

static const char *const status_names[] = {"PS_OK", "PS_UNSUPPORTED", "PS_USAGE", "PS_DATA", "PS_CHECKPOINT", "PS_DEVICE"};

/* Parts whose gradient could be left out without notice, by each precision's bound; but for b_qkv's k, whose gradient is 0. */
static void count_unseen(const struct ps_parameters *layout, const struct trained *r, struct model_report *of)
{
    double all = norm_of(r->moments, layout->count);
    struct part part;
    memset(of->unseen, 0, sizeof of->unseen);
    of->parts = 0;
    for (int n = 0; part_of(layout, n, &part); n++) {
        if (part.third == 1 && part.rows == 1) {
            continue;
        }
        of->parts++;
        double norm = part_norm(&part, r->moments, NULL);
        for (int i = 0; i < PRECISIONS; i++) {
            of->unseen[i] += !(norm / part_scale(layout, norm, all) > bounds[i].of[MOMENTS]);
        }
    }
}

/* Trains the variant and compares with `expected`, or is the baseline that fills it. The status with which that ended. */
static enum ps_status run_variant(const struct model *m, int64_t number, const struct variant *v, struct trained *expected,
                                  struct outcome *o)
{
    struct ps_config config;
    struct ps_session *s = NULL;
    struct trained got = {0};
    int is_baseline = v == &baseline;
    if (write_config(m, number, v) != PS_OK) {
        fail_outcome(o, "%s", ps_error_message());
        return PS_DATA;
    }
    enum ps_status status = ps_config_load(config_path(number, v).text, NULL, 0, &config);
    int loaded = status == PS_OK;
    if (loaded) {
        status = ps_session_open(&config, &(struct ps_session_options){.training = 1}, &s);
    }
    if (status != PS_OK) {
        const char *why = ps_error_message();
        int allowed = !is_baseline && may_be_refused(v, m, why), line = *why && !strchr(why, '\n');
        if (status == PS_USAGE && allowed && line) {
            snprintf(o->text, sizeof o->text, "%s", why);
            o->state = REFUSED;
        } else {
            fail_outcome(o, "%s with %s%s: %s", loaded ? "the session was not opened," : "the config was not taken,",
                         status_names[status],
                         status != PS_USAGE ? ""
                         : !allowed         ? ", where nothing may be refused"
                                            : ", not in one line",
                         why);
        }
    } else if ((status = run_epoch(s, is_baseline, is_baseline ? expected : &got)) != PS_OK) {
        fail_outcome(o, "the epoch ended with %s: %s", status_names[status], ps_error_message());
    } else if (is_baseline) {
        struct model_report *of = report_of(number);
        of->moved = fabs(expected->validation / expected->untrained - 1);
        count_unseen(s->model->layout, expected, of);
        o->state = AGREED;
        if (!isfinite(expected->loss) || !isfinite(expected->validation)) {
            fail_outcome(o, "training loss %g, validation mse %g", expected->loss, expected->validation);
        }
    } else {
        struct part part;
        compare(s->model->layout, &got, expected, o->error, &part);
        double limits[FIGURES];
        take_bounds(v, &m->shape, limits);
        int worst = beyond(o->error, limits);
        if (worst < FIGURES) {
            fail_outcome(o,
                         "%s off by %.3g, at most %g; level %s: training loss %.7g, not %.7g; validation mse %.7g, not %.7g; first "
                         "moments off by %.3g, most at %s; parameters' change by %.3g",
                         figures[worst], o->error[worst], limits[worst], ps_level_name(s->level), got.loss, expected->loss,
                         got.validation, expected->validation, o->error[MOMENTS], part_name(s->model->layout, &part).text,
                         o->error[CHANGE]);
        } else {
            o->state = AGREED;
        }
    }
    ps_session_close(s);
    if (loaded) {
        ps_config_free(&config);
    }
    trained_drop(&got);
    return status;
}

/* Plain loops: only for models that take no more than a moment. */
static int too_slow(const struct variant *v, const struct model *m)
{
    return strcmp(v->backend, "reference") == 0 && m->work > 6e8;
}

static void begin(int64_t number, int variant, struct outcome *o)
{
    report->model = number;
    report->variant = variant;
    report->runs++;
    o->state = UNDER_WAY;
}

/* Models from `number` on, the first one's variants from `variant` on. alone: a process of its own, which ends after an error
 * that may have left the device of no more use. */
static void work(int64_t number, int variant, int alone)
{
    for (; number < first + models; number++, variant = 0) {
        const struct model m = draw_model(seed, number);
        struct model_report *of = report_of(number);
        struct trained expected = {0};
        begin(number, -1, &of->baseline);
        if (write_data(&m, data_path(number).text) != PS_OK) {
            fail_outcome(&of->baseline, "its data: %s", ps_error_message());
        } else {
            run_variant(&m, number, &baseline, &expected, &of->baseline);
        }
        for (; variant < n_variants && of->baseline.state == AGREED; variant++) {
            struct outcome *o = &of->outcome[variant];
            if (!too_slow(&variants[variant], &m)) {
                begin(number, variant, o);
                enum ps_status status = run_variant(&m, number, &variants[variant], &expected, o);
                if (alone && status != PS_OK && status != PS_USAGE) {
                    _exit(AGAIN);
                }
            }
        }
        trained_drop(&expected);
    }
    report->model = first + models;
}

/* ---- what it adds up to ---- */

/* The spread of a size over the models. */
struct range {
    int64_t least, most, above; /* above: how many are larger than `limit` */
};

static void widen(struct range *r, int64_t value, int64_t limit)
{
    r->least = r->most == 0 || value < r->least ? value : r->least;
    r->most = value > r->most ? value : r->most;
    r->above += value > limit;
}

/* Of a variant, without dropout and with. */
struct sum {
    int64_t agreed;
    double worst[FIGURES];
    int64_t where[FIGURES];
};

static struct tally {
    struct sum sum[2];
    int64_t refused, failed, not_done;
} tallies[MOST_VARIANTS];
static struct kind {
    char text[TEXT];
    int64_t count;
} kinds[KINDS];
static int n_kinds;
static struct range widths, patches, sequences;
static int64_t failures, told; /* told: models from `first` on */
static struct {
    int64_t models, norm[3], post, residual, activation[4], positions[4], heads, affine, last, end, rates, masked;
} drawn;

/* Texts that differ in numbers are one kind. */
static void count_kind(const char *text)
{
    char kind[TEXT];
    size_t n = 0;
    for (const char *c = text; *c && n + 1 < sizeof kind; c++) {
        int digit = *c >= '0' && *c <= '9';
        if (!digit || n == 0 || kind[n - 1] != '#') {
            kind[n++] = (char)(digit ? '#' : *c);
        }
    }
    kind[n] = 0;
    char *path = strstr(kind, ".yaml:"); /* the config's name and line */
    const char *begin = path ? path + strcspn(path, " ") : kind;
    int i = 0;
    while (i < n_kinds && strcmp(kinds[i].text, begin) != 0) {
        i++;
    }
    i = i < KINDS ? i : KINDS - 1;
    if (i == n_kinds) {
        snprintf(kinds[n_kinds++].text, sizeof kinds->text, "%s", begin);
    }
    kinds[i].count++;
}

static void print_failure(int64_t number, const struct variant *v, const struct outcome *o)
{
    struct path path = config_path(number, v);
    failures++;
    printf("FAILED: model %lld, %s %s %s: %s\n", (long long)number, v->backend, v->precision, v->fusion, o->text);
    printf("  again: PS_SEED=%llu PS_RANDOM_FIRST=%lld PS_RANDOM_MODELS=1 test_random; or train %s, which is:\n",
           (unsigned long long)seed, (long long)number, path.text);
    if (file_exists(path.text)) {
        char *text = file_read(path.text, NULL);
        printf("%s", text);
        free(text);
    }
    fflush(stdout);
}

/* Counts a model that is done, prints what failed, and removes the files of what did not. */
static void tell(int64_t number)
{
    const struct model m = draw_model(seed, number);
    struct model_report *of = report_of(number);
    int failed = of->baseline.state == FAILED;
    widen(&widths, m.shape.d_model, 128);
    widen(&patches, ps_patches(&m.shape), 128);
    widen(&sequences, m.batch * m.shape.channels, 128);
    const struct ps_model_shape *s = &m.shape;
    drawn.models += m.variant;
    drawn.norm[s->norm]++;
    drawn.activation[s->activation]++;
    drawn.positions[s->positions]++;
    drawn.post += s->norm_place == PS_NORM_POST;
    drawn.residual += s->residual_attention;
    drawn.heads += s->individual_head;
    drawn.affine += s->revin_affine;
    drawn.last += s->revin_subtract_last;
    drawn.end += s->patches_from_end;
    drawn.masked += s->mask_ratio > 0;
    for (int i = 0, set = 0; i < PS_DROP_PLACES && !set; i++) {
        drawn.rates += set = s->dropout_at[i].set;
    }
    if (failed) {
        print_failure(number, &baseline, &of->baseline);
    }
    for (int i = 0; i < n_variants; i++) {
        struct outcome *o = &of->outcome[i];
        struct tally *t = &tallies[i];
        struct sum *sum = &t->sum[drops(&m.shape)];
        switch (o->state) {
        case AGREED:
            sum->agreed++;
            for (int f = 0; f < FIGURES; f++) {
                if (o->error[f] > sum->worst[f]) {
                    sum->worst[f] = o->error[f];
                    sum->where[f] = number;
                }
            }
            break;
        case REFUSED:
            t->refused++;
            count_kind(o->text);
            break;
        case FAILED:
            t->failed++;
            failed = 1;
            print_failure(number, &variants[i], o);
            break;
        default:
            t->not_done++;
        }
        if (o->state == AGREED || o->state == REFUSED) {
            remove(config_path(number, &variants[i]).text);
        }
    }
    if (of->baseline.state != FAILED) {
        remove(config_path(number, &baseline).text);
    }
    if (!failed) {
        remove(data_path(number).text);
    }
}

static void tell_until(int64_t number)
{
    for (; first + told < number; told++) {
        tell(first + told);
    }
}

static void print_summary(double seconds)
{
    int64_t moved[PRECISIONS] = {0}, unseen[PRECISIONS] = {0}, parts = 0, baselines = 0;
    for (int64_t i = 0; i < models; i++) {
        const struct model_report *of = &report->of[i];
        baselines += of->baseline.state == AGREED;
        parts += of->parts;
        for (int p = 0; p < PRECISIONS; p++) {
            moved[p] += of->moved > bounds[p].of[VALIDATION];
            unseen[p] += of->unseen[p];
        }
    }
    printf("%lld models from %lld on, seed %llu, %lld runs in %.0f s: %lld failed\n", (long long)models, (long long)first,
           (unsigned long long)seed, (long long)report->runs, seconds, (long long)failures);
    printf("d_model %lld to %lld, patches %lld to %lld, sequences a batch %lld to %lld; above 128: %lld, %lld, %lld models\n",
           (long long)widths.least, (long long)widths.most, (long long)patches.least, (long long)patches.most,
           (long long)sequences.least, (long long)sequences.most, (long long)widths.above, (long long)patches.above,
           (long long)sequences.above);
#define COUNT(name) (long long)drawn.name
    printf(
        "variants in %lld models: norm layer %lld, batch %lld, rms %lld; post %lld; residual attention %lld; activation %lld, "
        "%lld, "
        "%lld, %lld; positions %lld, %lld, %lld, %lld; heads %lld; RevIN's affine %lld, last value %lld; from the end %lld; rates "
        "by place %lld; masked patches in %lld models\n",
        COUNT(models), COUNT(norm[PS_NORM_LAYER]), COUNT(norm[PS_NORM_BATCH]), COUNT(norm[PS_NORM_RMS]), COUNT(post),
        COUNT(residual), COUNT(activation[PS_GELU_TANH]), COUNT(activation[PS_GELU]), COUNT(activation[PS_RELU]),
        COUNT(activation[PS_SWIGLU]), COUNT(positions[PS_POSITIONS_LEARNED]), COUNT(positions[PS_POSITIONS_SINCOS]),
        COUNT(positions[PS_POSITIONS_NONE]), COUNT(positions[PS_POSITIONS_ROPE]), COUNT(heads), COUNT(affine), COUNT(last),
        COUNT(end), COUNT(rates), COUNT(masked));
#undef COUNT
    for (int i = 0; i < n_variants; i++) {
        const struct tally *t = &tallies[i];
        printf("%-9s %s %-5s: %lld agreed, %lld refused, %lld failed, %lld not done\n", variants[i].backend, variants[i].precision,
               variants[i].fusion, (long long)(t->sum[0].agreed + t->sum[1].agreed), (long long)t->refused, (long long)t->failed,
               (long long)t->not_done);
        for (int dropout = 0; dropout < 2; dropout++) {
            const struct sum *sum = &t->sum[dropout];
            if (sum->agreed) {
                printf("  worst of %lld with%s dropout:", (long long)sum->agreed, dropout ? "" : "out");
                for (int f = 0; f < FIGURES; f++) {
                    printf("%s %s %.2g (model %lld)", f ? "," : "", figures[f], sum->worst[f], (long long)sum->where[f]);
                }
                printf("\n");
            }
        }
    }
    for (int i = 0; i < n_kinds; i++) {
        printf("refused %lld times: %s\n", (long long)kinds[i].count, kinds[i].text);
    }
    for (int p = 0; p < PRECISIONS; p++) {
        printf(
            "%s: training moved the validation's mse by more than its bound in %lld of %lld models; a gradient left out would be "
            "seen but for %lld of %lld tensors or thirds of them\n",
            bounds[p].precision, (long long)moved[p], (long long)baselines, (long long)unseen[p], (long long)parts);
    }
    fflush(stdout);
}

/* ---- the parent ---- */

static pid_t start_worker(int64_t number, int variant)
{
    fflush(stdout);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        work(number, variant, 1);
        _exit(0);
    }
    return pid;
}

static void progress(double *last, double start)
{
    double now = seconds_now();
    if (now - *last >= 10) {
        *last = now;
        printf("%lld of %lld models, %lld runs, %lld failed, %.0f s\n", (long long)told, (long long)models, (long long)report->runs,
               (long long)failures, now - start);
        fflush(stdout);
    }
}

/* Waits for the worker's end; a run without one is killed after HANGS seconds. What waitpid said, or -1: it hung. */
static int watch_worker(pid_t pid, double *last, double start)
{
    int64_t runs = report->runs;
    double since = seconds_now();
    int status;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (report->runs != runs) {
            runs = report->runs;
            since = seconds_now();
        } else if (seconds_now() - since > HANGS) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1;
        }
        tell_until(report->model);
        progress(last, start);
        sleep_seconds(0.05);
    }
    return status;
}

/* One worker after another, until all models are done. */
static void work_apart(double start)
{
    int64_t number = first;
    int variant = 0;
    double last = start;
    while (number < first + models) {
        report->model = number;
        int status = watch_worker(start_worker(number, variant), &last, start);
        if (status == 0) {
            return;
        }
        number = report->model;
        variant = report->variant;
        struct outcome *o = variant < 0 ? &report_of(number)->baseline : &report_of(number)->outcome[variant];
        if (status == -1) {
            fail_outcome(o, "did not end within %d s", HANGS);
        } else if (WIFSIGNALED(status)) {
            fail_outcome(o, "died of signal %d, %s", WTERMSIG(status), strsignal(WTERMSIG(status)));
        } else if (WEXITSTATUS(status) != AGAIN) {
            fail_outcome(o, "ended the process with exit code %d", WEXITSTATUS(status));
        }
        number += variant < 0;
        variant++;
    }
}

/* Memory for the reports of `models` models, shared with the worker. */
static void open_report(void)
{
    report =
        mmap(NULL, sizeof *report + (size_t)models * sizeof *report->of, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert(report != MAP_FAILED);
    folder = folder_make();
}

static void close_report(void)
{
    munmap(report, sizeof *report + (size_t)models * sizeof *report->of);
}

START_TEST(random_models)
{
    double start = seconds_now();
    open_report();
    if (asked("PS_TEST_SMALL")) {
        work(first, 0, 0);
    } else {
        work_apart(start);
    }
    tell_until(first + models);
    print_summary(seconds_now() - start);
    close_report();
    if (failures == 0) {
        folder_remove(folder.text);
    }
    ck_assert_msg(failures == 0, "%lld runs failed; their configs and data are in %s", (long long)failures, folder.text);
}
END_TEST

/* That the comparison sees what it is there for: a gradient, an update or a loss that is missing or wrong. */
START_TEST(wrong_is_seen)
{
    enum { LOOKED_AT = 3 };
    models = LOOKED_AT;
    open_report();
    for (int64_t number = first, n = 0; n < LOOKED_AT; number++) {
        struct model m = draw_model(seed, number);
        if (drops(&m.shape) || m.work > 3e8) {
            continue;
        }
        struct trained expected = {0}, wrong;
        struct outcome outcome = {0};
        struct ps_parameters *layout;
        OK(write_data(&m, data_path(first + n).text));
        run_variant(&m, first + n++, &baseline, &expected, &outcome);
        ck_assert_msg(outcome.state == AGREED, "%s", outcome.text);
        OK(ps_parameters_layout(&m.shape, &layout));
        size_t bytes = (size_t)layout->count * sizeof(double);
        double all = norm_of(expected.moments, layout->count), error[FIGURES];
        struct part part, worst;
        wrong = expected;
        wrong.moments = malloc(bytes);
        wrong.change = malloc(bytes);
        memcpy(wrong.change, expected.change, bytes);
        for (int i = 0; part_of(layout, i, &part); i++) { /* no gradient there */
            double norm = part_norm(&part, expected.moments, NULL);
            memcpy(wrong.moments, expected.moments, bytes);
            for (int64_t row = 0; row < part.rows; row++) {
                memset(wrong.moments + part.first + row * part.stride, 0, (size_t)part.columns * sizeof(double));
            }
            compare(layout, &wrong, &expected, error, &worst);
            for (int p = 0; p < PRECISIONS; p++) {
                ck_assert_msg(beyond(error, bounds[p].of) == MOMENTS || next_to_nothing(layout, norm, all),
                              "%s: no gradient of %s, %.2g of %.2g, passes", bounds[p].precision, part_name(layout, &part).text,
                              norm, all);
            }
        }
        memcpy(wrong.moments, expected.moments, bytes);
        compare(layout, &wrong, &expected, error, &worst);
        ck_assert_int_eq(beyond(error, bounds[0].of), FIGURES);
        wrong.moments[0] = NAN;
        compare(layout, &wrong, &expected, error, &worst);
        ck_assert_int_eq(beyond(error, bounds[0].of), MOMENTS);
        wrong.moments[0] = expected.moments[0];
        for (int i = 0; i < PRECISIONS; i++) {
            memset(wrong.change, 0, bytes); /* no update */
            compare(layout, &wrong, &expected, error, &worst);
            ck_assert_int_eq(beyond(error, bounds[i].of), CHANGE);
            wrong.loss = NAN;
            compare(layout, &wrong, &expected, error, &worst);
            ck_assert_int_eq(beyond(error, bounds[i].of), LOSS);
            wrong.loss = expected.loss;
            wrong.validation = 1.04 * expected.validation;
            compare(layout, &wrong, &expected, error, &worst);
            ck_assert_int_eq(beyond(error, bounds[i].of), VALIDATION);
            wrong.validation = expected.validation;
        }
        trained_drop(&wrong);
        trained_drop(&expected);
        ps_parameters_free(layout);
    }
    close_report();
    folder_remove(folder.text);
}
END_TEST

static int64_t number_from(const char *variable, int64_t preset)
{
    const char *text = getenv(variable);
    return text && *text ? (int64_t)strtoull(text, NULL, 10) : preset;
}

/* Asked in a process that ends, since CUDA does not survive a fork. */
static int cuda_is_there(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        _exit(ps_cuda_device_count() > 0);
    }
    int status;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) {
        fprintf(stderr, "test_random: whether there is a CUDA device cannot be found out\n");
        exit(1);
    }
    return WEXITSTATUS(status);
}

int main(void)
{
    seed = (uint64_t)number_from("PS_SEED", 20240607);
    first = number_from("PS_RANDOM_FIRST", 0);
    models = number_from("PS_RANDOM_MODELS", asked("PS_TEST_SMALL") ? SMALL : asked("PS_TEST_FULL") ? FULL : QUICK);
    if (asked("PS_TEST_SMALL") ? ps_cuda_device_count() > 0 : cuda_is_there()) {
        variants = with_cuda;
        n_variants = sizeof with_cuda / sizeof *with_cuda;
    } else {
        variants = without_cuda;
        n_variants = sizeof without_cuda / sizeof *without_cuda;
        printf("skipped: random models on CUDA, in fp32, tf32, bf16 and fp16 at all levels: no CUDA device\n");
    }
    Suite *suite = suite_create("random");
    TCase *tests = tcase_create("random");
    tcase_add_test(tests, random_models);
    tcase_add_test(tests, wrong_is_seen); /* last: it uses OpenMP, which does not survive a fork */
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_NOFORK) != 0; /* it forks itself */
}
