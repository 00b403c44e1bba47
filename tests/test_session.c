/* The session in one process: what a captured step changes, allocates and waits for; placements, scores, repetition.
 *
 * PS_TEST_SMALL=1 takes two of the tests, on CUDA alone, for compute-sanitizer (scripts/sanitize_gpu.sh). */
#include <math.h>

#include "data/import.h"
#include "src/session.h"
#include "src/snapshot.h"
#include "src/writer.h"
#include "tests/asked.h"
#include "tests/real16.h"
#include "tests/fused.h"
#include "tests/recorder.h"
#include "tests/run.h"
#include "tests/suite.h"

enum { ROWS = 660, CHANNELS = 3, L = 48, H = 12, BATCH = 16, WINDOWS = 150, MANY = 2400 };

static struct path folder, series_file, windows_file, large_file; /* large: more than LIMIT bytes */
static const char *device_kind, *precision, *fusion;              /* of the tests that run now */
#define SMALLEST "d_model: 16, n_heads: 4, d_ff: 32"
/* The paper's layer, whose running statistics are a part of the state. */
#define PAPER SMALLEST ", norm: batch, norm_place: post, residual_attention: true"
static const char *sizes = SMALLEST;

#define LIMIT "data.memory_limit=1200000"

/* A small model with dropout. */
static const char *model_text(void)
{
    static char text[1024];
    snprintf(text, sizeof text,
             "model: {seq_len: 48, pred_len: 12, patch_len: 8, stride: 4, n_layers: 2, dropout: 0.2, %s}\n"
             "optim: {lr: 2e-3, schedule: constant, clip_norm: 1}\n"
             "train: {epochs: 4, batch_size: 16, seed: 7}\n",
             sizes);
    return text;
}

struct run {
    struct ps_config config;
    struct ps_session *s;
};

/* overrides: NULL-terminated. */
static enum ps_status run_try(struct run *run, const char *data, char *const *overrides)
{
    char text[4096];
    snprintf(text, sizeof text, "data: {path: %s}\n%sruntime: {threads: 2, precision: %s, fusion: %s}\n", data, model_text(),
             precision, fusion);
    int n = 0;
    while (overrides[n]) {
        n++;
    }
    OK(ps_config_parse(text, "config", overrides, n, &run->config));
    return ps_session_open(&run->config, &(struct ps_session_options){.device = device_kind, .training = 1}, &run->s);
}

static void run_open(struct run *run, const char *data, char *const *overrides)
{
    OK(run_try(run, data, overrides));
    OK(ps_session_initialise(run->s));
}
#define OVERRIDES(...) ((char *const[]){__VA_ARGS__ __VA_OPT__(, ) NULL})

static void run_close(struct run *run)
{
    ps_session_close(run->s);
    ps_config_free(&run->config);
}

/* Everything that training changes. */
struct bits {
    size_t bytes, stored; /* of gradients and m; of parameters and the running statistics behind them */
    char *parameters, *gradients, *m, *v;
    struct ps_step_state state;
};

static char *bits_part(struct ps_session *s, const void *memory, size_t bytes)
{
    char *host = malloc(bytes);
    OK(s->device->download(s->device, PS_COMPUTE, host, memory, bytes));
    return host;
}

/* In bf16 and fp16 what products read are the parameters, rounded. */
static void expect_copy(struct ps_session *s, const char *parameters)
{
    if (ps_type_bytes(s->kernels->real) != 2) {
        ck_assert_ptr_eq(s->model->weights, s->model->parameters);
        return;
    }
    size_t count = (size_t)s->model->layout->count;
    char *weights = bits_part(s, s->model->weights, count * sizeof(uint16_t));
    for (size_t i = 0; i < count; i++) {
        float parameter;
        uint16_t weight;
        memcpy(&parameter, parameters + i * sizeof parameter, sizeof parameter);
        memcpy(&weight, weights + i * sizeof weight, sizeof weight);
        double value = s->kernels->real == PS_F16 ? fp16_value(weight) : bf16_value(weight);
        ck_assert_msg(value == rounded_to(s->kernels->real, (double)parameter), "weight %zu is %g, its parameter %g", i, value,
                      (double)parameter);
    }
    free(weights);
}

static struct bits bits_of(struct ps_session *s)
{
    size_t count = (size_t)s->model->layout->count, bytes = count * sizeof(float);
    size_t stored = (size_t)s->model->layout->stored * sizeof(float);
    struct bits b = {.bytes = bytes,
                     .stored = stored,
                     .parameters = bits_part(s, s->model->parameters, stored),
                     .gradients = bits_part(s, s->model->gradients, bytes),
                     .m = bits_part(s, s->optimizer.m, bytes),
                     .v = bits_part(s, s->optimizer.v, count * sizeof(double))};
    OK(s->device->download(s->device, PS_COMPUTE, &b.state, s->state, sizeof b.state));
    expect_copy(s, b.parameters);
    return b;
}

static void bits_free(struct bits *b)
{
    free(b->parameters);
    free(b->gradients);
    free(b->m);
    free(b->v);
}

static void expect_equal(const struct bits *a, const struct bits *b, const char *what)
{
    ck_assert(a->bytes == b->bytes && a->stored == b->stored);
    ck_assert_msg(memcmp(a->parameters, b->parameters, a->bytes) == 0, "%s: the parameters differ", what);
    ck_assert_msg(memcmp(a->parameters + a->bytes, b->parameters + b->bytes, a->stored - a->bytes) == 0,
                  "%s: the running statistics differ", what);
    ck_assert_msg(memcmp(a->gradients, b->gradients, a->bytes) == 0, "%s: the gradients differ", what);
    ck_assert_msg(memcmp(a->m, b->m, a->bytes) == 0, "%s: m differs", what);
    ck_assert_msg(memcmp(a->v, b->v, 2 * a->bytes) == 0, "%s: v differs", what);
    ck_assert_msg(a->state.step == b->state.step && a->state.cursor == b->state.cursor &&
                      memcmp(&a->state.loss_sum, &b->state.loss_sum, sizeof(double)) == 0,
                  "%s: the state differs", what);
}

/* Trains up to max_steps (0: to the epoch's end); the loss. */
static double train(struct ps_session *s, int64_t max_steps)
{
    int finished;
    double loss;
    OK(ps_session_train_epoch(s, &(struct ps_epoch_watch){.max_steps = max_steps}, &finished, &loss));
    ck_assert_int_eq(finished, max_steps == 0);
    return loss;
}

/* The bits after `epochs` epochs of a run of its own. */
static struct bits trained(const char *data, int epochs, char *const *overrides)
{
    struct run run;
    run_open(&run, data, overrides);
    for (int i = 0; i < epochs; i++) {
        train(run.s, 0);
    }
    struct bits bits = bits_of(run.s);
    run_close(&run);
    return bits;
}

/* ---- the captured step ---- */

START_TEST(capture_changes_nothing)
{
    struct run run;
    run_open(&run, series_file.text, OVERRIDES());
    OK(ps_session_rewind(run.s));
    struct bits before = bits_of(run.s);
    double squares = 0;
    for (size_t i = 0; i < before.bytes / sizeof(float); i++) {
        float x;
        memcpy(&x, before.parameters + i * sizeof x, sizeof x);
        squares += (double)x * (double)x;
    }
    ck_assert_double_gt(squares, 1);
    struct ps_graph *graph;
    OK(ps_session_full_step(run.s, &graph));
    struct bits after = bits_of(run.s);
    expect_equal(&before, &after, "after capture");
    OK(run.s->device->replay(run.s->device, graph));
    struct bits stepped = bits_of(run.s);
    ck_assert_uint_eq(stepped.state.step, 1);
    ck_assert_uint_eq(stepped.state.cursor, BATCH);
    ck_assert(memcmp(stepped.parameters, before.parameters, before.bytes) != 0);
    bits_free(&before);
    bits_free(&after);
    bits_free(&stepped);
    run_close(&run);
}
END_TEST

/* The kernels are named where the level does not say which they are. */
START_TEST(described)
{
    struct run run;
    char text[PS_SESSION_TEXT], expected[PS_SESSION_TEXT];
    run_open(&run, series_file.text, OVERRIDES());
    struct ps_session *s = run.s;
    snprintf(expected, sizeof expected, "%s on %s, %s, level %s", s->kernels->backend, s->device->name, precision, fusion);
    snprintf(s->model->kernels, sizeof s->model->kernels, "%s", fusion);
    ps_session_describe(s, text);
    ck_assert_str_eq(text, expected);
    snprintf(s->model->kernels, sizeof s->model->kernels, "two kernels");
    snprintf(expected, sizeof expected, "%s on %s, %s, level %s, two kernels", s->kernels->backend, s->device->name, precision,
             fusion);
    ps_session_describe(s, text);
    ck_assert_str_eq(text, expected);
    run_close(&run);
}
END_TEST

/* Every precision and level, and at level layer every family of kernels. */
static const struct way {
    const char *precision, *fusion, *sizes;
} ways[] = {{"fp32", "none", SMALLEST},
            {"fp32", "gemm", SMALLEST},
            {"fp32", "none", PAPER},
            {"fp32", "gemm", PAPER},
            {"tf32", "gemm", SMALLEST}, /* the CPU's last */
            {"fp16", "gemm", PAPER},
            {"fp16", "gemm", SMALLEST},
            {"bf16", "gemm", PAPER},
            {"bf16", "gemm", SMALLEST}, /* the last that needs no sm_90 */
            {"tf32", "layer", SMALLEST},
            {"fp16", "layer", SMALLEST},
            {"bf16", "layer", SMALLEST},
            {"fp16", "layer", "d_model: 16, n_heads: 4, d_ff: 128"},
            {"bf16", "layer", "d_model: 16, n_heads: 4, d_ff: 128"},
            {"tf32", "layer", "d_model: 64, n_heads: 4, d_ff: 128"},
            {"fp16", "layer", "d_model: 64, n_heads: 4, d_ff: 128"},
            {"bf16", "layer", "d_model: 64, n_heads: 4, d_ff: 128"},
            {"tf32", "layer", "d_model: 64, n_heads: 8, d_ff: 128"},
            {"tf32", "layer", "d_model: 128, n_heads: 16, d_ff: 192"},
            {"fp16", "layer", "d_model: 128, n_heads: 16, d_ff: 256"},
            {"bf16", "layer", "d_model: 128, n_heads: 16, d_ff: 256"}};
enum { WAYS = sizeof ways / sizeof *ways, CPU_WAYS = 5, PLAIN_WAYS = 9 };

static void take_way(int i)
{
    precision = ways[i].precision;
    fusion = ways[i].fusion;
    sizes = ways[i].sizes;
}

/* An epoch of replayed graphs, of several steps, of one and of a short batch, leaves the bits that the same steps leave whose
 * operations are enqueued one by one. */
START_TEST(replayed_is_uncaptured)
{
    char *clip = _i % 2 ? "optim.clip_norm=1" : "optim.clip_norm=0", *drop = "data.drop_last=false";
    struct run replayed, direct;
    take_way(_i / 2);
    run_open(&replayed, series_file.text, OVERRIDES(clip, drop));
    train(replayed.s, 0);
    run_open(&direct, series_file.text, OVERRIDES(clip, drop));
    struct ps_session *s = direct.s;
    ck_assert_int_eq(s->train_windows, 402); /* 25 batches and 2 windows */
    OK(ps_session_rewind(s));
    for (int64_t left = s->train_windows; left > 0; left -= BATCH) {
        OK(ps_session_step(s, left < BATCH ? left : BATCH));
    }
    ck_assert_uint_gt(replayed.s->device->counters.launches, 0);
    ck_assert_uint_eq(s->device->counters.launches, 0);
    struct bits a = bits_of(replayed.s), b = bits_of(s);
    a.state = replayed.s->ended;
    char what[256];
    snprintf(what, sizeof what, "%s, level %s, {%s}, %s, uncaptured", precision, fusion, sizes, clip);
    expect_equal(&a, &b, what);
    ck_assert_uint_eq(b.state.step, 26);
    bits_free(&a);
    bits_free(&b);
    run_close(&replayed);
    run_close(&direct);
}
END_TEST

/* Gradients that are summed over ranks while backward goes on: those of layers' weights, each once, when they are final; in a step
 * of several batches those of its last one. The step is the same. */
START_TEST(sums_beside_backward)
{
    enum { LAYERS = 4, STEPS = 3 };
    static const struct {
        int layers, begun; /* in a part at least; parts */
    } parts[] = {{1, 4}, {2, 2}, {3, 1}, {5, 0}};
    char *const more[][4] = {{"model.n_layers=4", "optim.clip_norm=0", "train.accumulate=1", NULL},
                             {"model.n_layers=4", "optim.clip_norm=1", "train.accumulate=3", NULL}};
    struct run plain, summed;
    take_way(_i / 2);
    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) {
        run_open(&plain, series_file.text, more[_i % 2]);
        run_open(&summed, series_file.text, more[_i % 2]);
        struct ps_session *s = summed.s;
        const struct ps_parameters *layout = s->model->layout;
        const int64_t layer = layout->table[layout->layer[1][PS_W_QKV]].offset - layout->table[layout->layer[0][PS_W_QKV]].offset;
        struct recorder recorder = recorder_of(1, (size_t)(parts[p].layers * layer) * sizeof(float));
        s->exchange = &recorder.table;
        OK(ps_session_rewind(plain.s));
        OK(ps_session_rewind(s));
        for (int i = 0; i < STEPS; i++) {
            const int64_t windows = i < 2 ? s->step_windows : BATCH / 2;
            recorder.n = 0;
            OK(ps_session_step(s, windows));
            ck_assert_int_eq(recorder_sums(&recorder, s->model->gradients, (size_t)layout->count * sizeof(float)), parts[p].begun);
            OK(ps_session_step(plain.s, windows));
        }
        struct bits a = bits_of(plain.s), b = bits_of(s);
        expect_equal(&a, &b, "with sums beside backward");
        bits_free(&a);
        bits_free(&b);
        s->exchange = NULL;
        run_close(&plain);
        run_close(&summed);
    }
}
END_TEST

/* A step at level layer calls the encoder once each way, however many layers there are. */
START_TEST(one_call_each_way)
{
    static char *const layers[] = {"model.n_layers=1", "model.n_layers=3"};
    take_way(_i / 2);
    struct run run;
    run_open(&run, series_file.text, OVERRIDES("optim.clip_norm=0", layers[_i % 2]));
    struct ps_session *s = run.s;
    struct ps_counts counts = {0};
    struct ps_kernels *counting;
    ck_assert_int_eq(s->level, PS_LEVEL_LAYER);
    OK(ps_kernels_hooked(s->kernels, ps_count_hook, &counts, &counting));
    s->model->k = s->optimizer.k = counting;
    OK(ps_session_rewind(s));
    OK(ps_session_step(s, BATCH));
    OK(s->device->synchronize(s->device));
    s->model->k = s->optimizer.k = s->kernels;
    counting->close(counting);
    expect_encoder_alone(&counts);
    ck_assert_int_eq(counts.calls[PS_OP_adamw], !ps_model_steps(s->model));
    run_close(&run);
}
END_TEST

/* Kernels of a captured step in bf16 of the configs that come with the project, on shorter data of their shape. Those of d_model
 * 128 divide their work by the device's multiprocessors: the figures are an H200's. */
static const struct shipped {
    const char *name;
    int64_t rows, channels, kernels;
} shipped[] = {{"seed28k", 0, 20, 3},
               {"etth1", 14400, 7, 6},
               {"etth1_paper", 14400, 7, 19},
               {"weather", 3000, 21, 27},
               {"electricity", 3000, 321, 54}};

START_TEST(kernels_of_shipped)
{
    const struct shipped *c = &shipped[_i];
    ck_assert_msg(getenv("PS_SOURCE") != NULL, "set PS_SOURCE to the project's root");
    struct path data = path_of("%.400s/%s.h5", folder.text, c->name),
                file = path_of("%.400s/configs/%s.yaml", getenv("PS_SOURCE"), c->name),
                path = path_of("data.path=%.500s", data.text);
    if (c->rows) {
        OK(ps_sample_series(data.text, c->rows, c->channels, 3));
    } else {
        OK(ps_sample_windows(data.text, 1000, c->channels, 24, 1, 3));
    }
    struct ps_config config;
    struct ps_session *s;
    struct ps_graph *graph;
    struct ps_graph_nodes nodes;
    OK(ps_config_load(file.text, OVERRIDES(path.text, "runtime.precision=bf16"), 2, &config));
    OK(ps_session_open(&config, &(struct ps_session_options){.device = device_kind, .training = 1}, &s));
    ck_assert_int_eq(s->level, PS_LEVEL_LAYER);
    OK(ps_session_initialise(s));
    OK(ps_session_rewind(s));
    OK(ps_session_full_step(s, &graph));
    s->device->graph_nodes(s->device, graph, &nodes);
    printf("%s in bf16: %d kernels a step\n", c->name, nodes.kernels);
    ck_assert_msg(nodes.kernels == c->kernels, "%s in bf16: %d kernels a step, not %lld", c->name, nodes.kernels,
                  (long long)c->kernels);
    ps_session_close(s);
    ps_config_free(&config);
}
END_TEST

/* Variants of the model, and how level layer refuses what it has not; NULL: it serves them, and leaves the ends to others. */
static const struct kind {
    char *set;
    const char *says;
} kinds[] = {{"model.norm=batch", "encoder (cuda"},
             {"model.norm=rms", "encoder (cuda"},
             {"model.norm_place=post", "encoder (cuda"},
             {"model.residual_attention=true", "encoder (cuda"},
             {"model.activation=gelu", "encoder (cuda"},
             {"model.activation=relu", "encoder (cuda"},
             {"model.activation=swiglu", "encoder (cuda"},
             {"model.positions=rope", "model.positions: rope"},
             {"model.dropout_attention_weights=0.1", "model.dropout_attention_weights"},
             {"model.dropout_attention=0.1", "encoder (cuda"},
             {"model.dropout_hidden=0.1", "encoder (cuda"},
             {"model.dropout_output=0", "encoder (cuda"},
             {"model.positions=sincos", NULL},
             {"model.positions=none", NULL},
             {"model.head=individual", NULL},
             {"model.revin_affine=true", NULL},
             {"model.revin_subtract_last=true", NULL},
             {"model.patches_from=end", NULL},
             {"model.dropout_head=0.1", NULL},
             {"model.dropout_embedding=0.1", NULL}};
enum { VARIANT_KINDS = sizeof kinds / sizeof *kinds };

/* Asked for, it is refused with what it is, or, where the device has no such level, by its own; auto takes gemm then, and in
 * fp32, where there is no level layer. */
START_TEST(variant_without_level_layer)
{
    const struct kind *kind = &kinds[_i];
    const int there = strcmp(device_kind, "cuda") == 0 && fused_encoder();
    struct run run = {0};
    if (!there || kind->says) {
        const char *says = there ? kind->says : "is not there for backend";
        ck_assert_int_eq(run_try(&run, series_file.text, OVERRIDES(kind->set, "runtime.fusion=layer")), PS_USAGE);
        const char *message = ps_error_message();
        ck_assert_msg(strstr(message, "runtime.fusion: layer") && strstr(message, says) && !strchr(message, '\n'),
                      "with %s: \"%s\" is not in: %s", kind->set, says, message);
        ps_config_free(&run.config);
    }
    run_open(&run, series_file.text, OVERRIDES(kind->set, "runtime.fusion=auto"));
    ck_assert_int_eq(run.s->level, there && !kind->says && strcmp(precision, "fp32") != 0 ? PS_LEVEL_LAYER : PS_LEVEL_GEMM);
    train(run.s, 1);
    run_close(&run);
}
END_TEST

static const char *const placements[] = {"data.placement=device", "data.placement=host"};

/* After the first step: no allocation, a launch for each graph of one or several steps, and as many waits in a long epoch as in a
 * short one. */
START_TEST(counters)
{
    struct run run;
    run_open(&run, series_file.text, OVERRIDES((char *)placements[_i]));
    struct ps_session *s = run.s;
    ck_assert_int_eq(ps_feed_resident(s->feed), _i == 0);
    train(s, 1);
    struct ps_device_counters start = s->device->counters, few, whole;
    train(s, 2);
    few = s->device->counters;
    ck_assert_uint_eq(few.launches - start.launches, 2);
    int64_t left = s->steps_per_epoch - 3;
    ck_assert_int_ge(left, 10);
    train(s, 0);
    whole = s->device->counters;
    int64_t full = s->train_windows / BATCH - 3;
    ck_assert_int_eq(s->graph_steps, _i == 0 && strcmp(s->device->kind, "cuda") == 0 ? 20 : 1);
    ck_assert_int_gt(full, s->graph_steps);
    ck_assert_uint_eq(whole.launches - few.launches, (uint64_t)(full / s->graph_steps + full % s->graph_steps + left - full));
    ck_assert_uint_eq(whole.synchronizations - few.synchronizations, few.synchronizations - start.synchronizations);
    ck_assert_uint_le(few.synchronizations - start.synchronizations, 4);
    struct ps_accuracy accuracy;
    OK(ps_session_score(s, PS_VALIDATION, &accuracy));
    train(s, 0);
    ck_assert_uint_eq(s->device->counters.allocations, start.allocations);
    ck_assert_uint_eq(s->device->counters.bytes, start.bytes);
    if (strcmp(s->device->kind, "cuda") == 0) {
        struct ps_graph_nodes nodes;
        struct ps_graph *graph;
        OK(ps_session_full_step(s, &graph));
        s->device->graph_nodes(s->device, graph, &nodes);
        ck_assert_int_gt(nodes.kernels, 0);
    }
    run_close(&run);
}
END_TEST

/* ---- placement ---- */

/* Batches that stream from the host give the same bits as data on the device, with a short last batch too. */
START_TEST(streamed_is_resident)
{
    const char *data = _i % 2 ? windows_file.text : series_file.text;
    char *drop = _i < 2 ? "data.drop_last=true" : "data.drop_last=false";
    struct bits resident = trained(data, 2, OVERRIDES("data.placement=device", drop)),
                streamed = trained(data, 2, OVERRIDES("data.placement=host", drop));
    expect_equal(&resident, &streamed, "streamed");
    bits_free(&resident);
    bits_free(&streamed);
}
END_TEST

START_TEST(drop_last)
{
    struct run run;
    int64_t windows = (int64_t)(0.7 * ROWS) - L - H + 1;
    ck_assert_int_ne(windows % BATCH, 0);
    run_open(&run, series_file.text, OVERRIDES());
    ck_assert_int_eq(run.s->steps_per_epoch, windows / BATCH);
    ck_assert_int_eq(run.s->train_windows, windows - windows % BATCH);
    train(run.s, 0);
    ck_assert_uint_eq(run.s->now.step, (uint64_t)(windows / BATCH));
    ck_assert_uint_eq(run.s->now.cursor, 0);
    ck_assert_uint_eq(run.s->epoch, 1);
    run_close(&run);
    /* Every window once, the short batch weighted by its size: with a rate too small to change a weight and no dropout, the epoch's
     * loss is the score of the training windows. */
    run_open(&run, series_file.text,
             OVERRIDES("data.drop_last=false", "optim.lr=1e-30", "model.dropout=0", "optim.weight_decay=0"));
    ck_assert_int_eq(run.s->steps_per_epoch, windows / BATCH + 1);
    ck_assert_int_eq(run.s->train_windows, windows);
    double loss = train(run.s, 0);
    ck_assert_uint_eq(run.s->now.step, (uint64_t)(windows / BATCH + 1));
    struct ps_accuracy accuracy;
    OK(ps_session_score(run.s, PS_TRAIN, &accuracy));
    ck_assert_int_eq(accuracy.all.windows, windows);
    /* In 16 bits a rounding may fall the other way where the batch's size changes a product's algorithm. */
    ck_assert_double_eq_tol(loss / accuracy.all.mse, 1,
                            strcmp(precision, "bf16") == 0 || strcmp(precision, "fp16") == 0 ? 1e-3 : 1e-6);
    run_close(&run);
}
END_TEST

/* ---- scores ---- */

struct sums {
    struct ps_session *s;
    enum ps_split split;
    int64_t next; /* window expected next */
    double squares, absolutes, full_squares, full_absolutes;
};

static enum ps_status add_batch(void *argument, int64_t first, int64_t n, const float *inputs, const float *targets,
                                const float *forecasts, const float *quantiles)
{
    (void)quantiles;
    struct sums *sums = argument;
    ck_assert_int_eq(first, sums->next);
    sums->next += n;
    int32_t index[BATCH];
    static float true_inputs[BATCH * CHANNELS * L], true_targets[BATCH * CHANNELS * H];
    ck_assert_int_le(n, BATCH);
    ps_sequence(sums->s->splits.first[sums->split] + first, n, index);
    ps_windows_gather(&sums->s->view, index, n, true_inputs, true_targets);
    ck_assert_mem_eq(inputs, true_inputs, (size_t)(n * CHANNELS * L) * sizeof *inputs);
    ck_assert_mem_eq(targets, true_targets, (size_t)(n * CHANNELS * H) * sizeof *targets);
    for (int64_t i = 0; i < n * CHANNELS * H; i++) {
        double e = (double)forecasts[i] - (double)targets[i];
        sums->squares += e * e;
        sums->absolutes += fabs(e);
    }
    if (n == BATCH) {
        sums->full_squares = sums->squares;
        sums->full_absolutes = sums->absolutes;
    }
    return PS_OK;
}

START_TEST(scores)
{
    struct run run;
    run_open(&run, series_file.text, OVERRIDES((char *)placements[_i]));
    train(run.s, 0);
    for (int split = PS_TRAIN; split < PS_SPLITS; split++) {
        struct ps_accuracy a;
        OK(ps_session_score(run.s, split, &a));
        struct sums sums = {.s = run.s, .split = split};
        OK(ps_session_forecast(run.s, split, add_batch, &sums));
        int64_t count = run.s->splits.count[split];
        ck_assert_int_eq(sums.next, count);
        ck_assert_int_ne(count % BATCH, 0);
        ck_assert_int_eq(a.all.windows, count);
        ck_assert_int_eq(a.full_batches.windows, count - count % BATCH);
        double all = (double)(count * CHANNELS * H), full = (double)((count - count % BATCH) * CHANNELS * H);
        ck_assert_double_eq_tol(a.all.mse * all / sums.squares, 1, 1e-6);
        ck_assert_double_eq_tol(a.all.mae * all / sums.absolutes, 1, 1e-6);
        ck_assert_double_eq_tol(a.full_batches.mse * full / sums.full_squares, 1, 1e-6);
        ck_assert_double_eq_tol(a.full_batches.mae * full / sums.full_absolutes, 1, 1e-6);
    }
    run_close(&run);
}
END_TEST

START_TEST(scoring_leaves_training_alone)
{
    struct bits plain = trained(series_file.text, 2, OVERRIDES((char *)placements[_i]));
    struct run run;
    run_open(&run, series_file.text, OVERRIDES((char *)placements[_i]));
    struct ps_accuracy a;
    for (int epoch = 0; epoch < 2; epoch++) {
        OK(ps_session_score(run.s, PS_TEST, &a));
        train(run.s, 3);
        OK(ps_session_score(run.s, PS_TRAIN, &a));
        train(run.s, 0);
        struct sums sums = {.s = run.s, .split = PS_TEST};
        OK(ps_session_forecast(run.s, PS_TEST, add_batch, &sums));
    }
    struct bits scored = bits_of(run.s);
    expect_equal(&plain, &scored, "with scoring in between");
    bits_free(&plain);
    bits_free(&scored);
    run_close(&run);
}
END_TEST

/* ---- repetition and state ---- */

START_TEST(two_sessions)
{
    struct bits a = trained(series_file.text, 2, OVERRIDES()), b = trained(series_file.text, 2, OVERRIDES()),
                c = trained(series_file.text, 2, OVERRIDES("train.seed=8"));
    expect_equal(&a, &b, "a second session");
    ck_assert(memcmp(a.parameters, c.parameters, a.bytes) != 0);
    bits_free(&a);
    bits_free(&b);
    bits_free(&c);
}
END_TEST

START_TEST(best_weights)
{
    struct run run;
    run_open(&run, series_file.text, OVERRIDES());
    train(run.s, 3);
    OK(ps_session_keep_best(run.s));
    struct bits kept = bits_of(run.s);
    train(run.s, 3);
    struct bits later = bits_of(run.s);
    ck_assert(memcmp(kept.parameters, later.parameters, kept.bytes) != 0);
    OK(ps_session_take_best(run.s));
    struct bits taken = bits_of(run.s);
    ck_assert(memcmp(kept.parameters, taken.parameters, kept.stored) == 0);
    ck_assert(memcmp(later.m, taken.m, later.bytes) == 0);
    bits_free(&kept);
    bits_free(&later);
    bits_free(&taken);
    run_close(&run);
}
END_TEST

/* A snapshot from the middle of an epoch, restored into another session, ends on the same bits. */
START_TEST(snapshot_and_restore)
{
    char *placement = (char *)placements[_i];
    struct run first, second;
    run_open(&first, series_file.text, OVERRIDES(placement, "data.drop_last=false"));
    train(first.s, 0);
    train(first.s, 5);
    struct ps_snapshot snapshot;
    OK(ps_snapshot_open(first.s, 0, &snapshot));
    OK(ps_snapshot_take(&snapshot));
    OK(ps_snapshot_wait(&snapshot));
    const struct ps_checkpoint *checkpoint = &snapshot.checkpoint;
    ck_assert_uint_eq(checkpoint->epoch, 1);
    ck_assert_uint_eq(checkpoint->cursor, 5 * BATCH);
    ck_assert_double_gt(checkpoint->loss_sum, 0);
    run_open(&second, series_file.text, OVERRIDES(placement, "data.drop_last=false"));
    /* Places that are not this run's: step and cursor would index its tables. */
    for (int i = 0; i < 4; i++) {
        struct ps_checkpoint wrong = *checkpoint;
        *(i == 0 ? &wrong.step : i < 3 ? &wrong.cursor : &wrong.epoch) += i == 2 ? BATCH * (uint64_t)1000 : 1;
        wrong.cursor -= i == 1 ? BATCH + 1 : 0;
        ck_assert_int_eq(ps_session_restore(second.s, &wrong), PS_CHECKPOINT);
        ck_assert_ptr_nonnull(strstr(ps_error_message(), "cannot resume: step"));
    }
    OK(ps_session_restore(second.s, checkpoint));
    ps_snapshot_close(&snapshot);
    double loss = train(first.s, 0), resumed = train(second.s, 0);
    ck_assert_msg(loss == resumed, "the epoch's loss is %.17g resumed, %.17g in one go", resumed, loss);
    struct bits a = bits_of(first.s), b = bits_of(second.s);
    expect_equal(&a, &b, "resumed");
    bits_free(&a);
    bits_free(&b);
    run_close(&first);
    run_close(&second);
}
END_TEST

/* A device that fails between two steps: what it has done is kept, and a run goes on from there to the same bits. */
static int replays_left;
static enum ps_status (*replay_of_device)(struct ps_device *d, struct ps_graph *graph);

static enum ps_status failing_replay(struct ps_device *d, struct ps_graph *graph)
{
    return replays_left-- > 0 ? replay_of_device(d, graph) : ps_fail(PS_DEVICE, "no more");
}

START_TEST(kept_after_an_error)
{
    char *placement = (char *)placements[_i];
    struct bits plain = trained(series_file.text, 2, OVERRIDES(placement));
    struct run first, second;
    run_open(&first, series_file.text, OVERRIDES(placement));
    train(first.s, 0);
    replay_of_device = first.s->device->replay;
    first.s->device->replay = failing_replay;
    replays_left = 1;
    int finished;
    double loss;
    ck_assert_int_eq(ps_session_train_epoch(first.s, &(struct ps_epoch_watch){0}, &finished, &loss), PS_DEVICE);
    OK(ps_session_recall(first.s));
    ck_assert_uint_eq(first.s->now.cursor, (uint64_t)first.s->graph_steps * BATCH);
    struct ps_snapshot snapshot;
    OK(ps_snapshot_open(first.s, 0, &snapshot));
    OK(ps_snapshot_take(&snapshot));
    OK(ps_snapshot_wait(&snapshot));
    run_open(&second, series_file.text, OVERRIDES(placement));
    OK(ps_session_restore(second.s, &snapshot.checkpoint));
    ps_snapshot_close(&snapshot);
    train(second.s, 0);
    struct bits resumed = bits_of(second.s);
    expect_equal(&plain, &resumed, "after an error");
    bits_free(&plain);
    bits_free(&resumed);
    run_close(&first);
    run_close(&second);
}
END_TEST

/* Checkpoints inside an epoch see the step they are made at. */
struct seen {
    int n;
    uint64_t step[64];
};

static enum ps_status see(struct ps_session *s, void *argument)
{
    struct seen *seen = argument;
    ck_assert_int_lt(seen->n, 64);
    seen->step[seen->n++] = s->now.step;
    return PS_OK;
}

START_TEST(checkpoints_within_an_epoch)
{
    struct run run;
    struct seen seen = {0};
    run_open(&run, series_file.text, OVERRIDES((char *)placements[_i]));
    const struct ps_epoch_watch watch = {.checkpoint_every = 4, .checkpoint = see, .argument = &seen};
    int finished;
    double loss;
    OK(ps_session_train_epoch(run.s, &watch, &finished, &loss));
    ck_assert_int_eq(seen.n, (int)((run.s->steps_per_epoch - 1) / 4));
    for (int i = 0; i < seen.n; i++) {
        ck_assert_uint_eq(seen.step[i], 4 * ((uint64_t)i + 1));
    }
    run_close(&run);
}
END_TEST

/* Each epoch has an order of its own, that of the seed and the epoch's number. */
START_TEST(orders)
{
    struct run run;
    run_open(&run, series_file.text, OVERRIDES());
    struct ps_session *s = run.s;
    const int64_t count = s->splits.count[PS_TRAIN];
    int32_t *expected = malloc((size_t)count * sizeof *expected);
    for (uint64_t epoch = 0; epoch < 3; epoch++) {
        const struct ps_epoch_watch watch = {0};
        int finished;
        double loss;
        OK(ps_session_train_epoch(s, &watch, &finished, &loss));
        ps_shuffle(s->config->train.seed, epoch, s->splits.first[PS_TRAIN], count, expected);
        ck_assert_mem_eq(ps_feed_order(s->feed), expected, (size_t)count * sizeof *expected);
    }
    free(expected);
    run_close(&run);
}
END_TEST

/* ---- data larger than memory ---- */

/* Each batch holds the windows that it holds in memory. */
static enum ps_status compare_batch(void *argument, int64_t first, int64_t n, const float *inputs, const float *targets,
                                    const float *forecasts, const float *quantiles)
{
    (void)forecasts;
    const struct sums *resident = argument;
    struct sums sums = {.s = resident->s, .split = resident->split, .next = first};
    return add_batch(&sums, first, n, inputs, targets, forecasts, quantiles);
}

/* The same data, scores and forecasts as from memory, to the bit; training differs by the order of windows alone. Batches of 16,
 * and of 20, which begin elsewhere in each thousand of windows. */
START_TEST(larger_than_memory)
{
    struct run resident, streamed;
    char *batch = _i ? "train.batch_size=12" : "train.batch_size=16";
    run_open(&resident, large_file.text, OVERRIDES(batch));
    run_open(&streamed, large_file.text, OVERRIDES(LIMIT, batch));
    ck_assert_ptr_null(resident.s->groups);
    ck_assert_ptr_nonnull(streamed.s->groups);
    ck_assert(!ps_feed_resident(streamed.s->feed) && !ps_feed_order(streamed.s->feed) && !streamed.s->series->inputs);
    ck_assert_uint_eq(streamed.s->series->fingerprint, resident.s->series->fingerprint);
    for (int split = PS_TRAIN; split < PS_SPLITS; split++) {
        struct ps_accuracy a, b;
        struct ps_naive x, y;
        OK(ps_session_score(resident.s, split, &a));
        OK(ps_session_score(streamed.s, split, &b));
        ck_assert_mem_eq(&a, &b, sizeof a);
        OK(ps_session_naive(resident.s, split, &x));
        OK(ps_session_naive(streamed.s, split, &y));
        ck_assert_mem_eq(&x, &y, sizeof x);
        struct sums sums = {.s = resident.s, .split = split};
        OK(ps_session_forecast(streamed.s, split, compare_batch, &sums));
    }
    double in_memory = train(resident.s, 0), from_file = train(streamed.s, 0);
    ck_assert(in_memory != from_file);
    ck_assert_double_eq_tol(from_file / in_memory, 1, 0.05);
    run_close(&resident);
    run_close(&streamed);
    struct ps_config config;
    char text[4096];
    snprintf(text, sizeof text, "data: {path: %s, placement: device, memory_limit: 1200000}\n%s", large_file.text, model_text());
    OK(ps_config_parse(text, "config", NULL, 0, &config));
    struct ps_session *none;
    ck_assert_int_eq(ps_session_open(&config, &(struct ps_session_options){.device = device_kind}, &none), PS_USAGE);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "data.placement: device needs the whole series in host memory first"));
    ps_config_free(&config);
}
END_TEST

/* Nothing is allocated and no wait is added once the first step is done. */
START_TEST(streaming_counters)
{
    struct run run;
    run_open(&run, large_file.text, OVERRIDES(LIMIT));
    struct ps_session *s = run.s;
    train(s, 1);
    struct ps_device_counters start = s->device->counters, few, whole;
    train(s, 2);
    few = s->device->counters;
    train(s, 0);
    whole = s->device->counters;
    ck_assert_uint_eq(whole.launches - few.launches, (uint64_t)(s->steps_per_epoch - 3));
    ck_assert_uint_eq(whole.synchronizations - few.synchronizations, few.synchronizations - start.synchronizations);
    ck_assert_uint_eq(whole.allocations, start.allocations);
    ck_assert_double_ge(ps_feed_waited(s->feed), 0);
    run_close(&run);
}
END_TEST

/* A checkpoint from anywhere in an epoch, of the loop's own making or of a file that went away, ends on the bits of an undisturbed
 * run. */
START_TEST(streamed_resume)
{
    struct bits whole = trained(large_file.text, 2, OVERRIDES(LIMIT, "data.drop_last=false"));
    struct path copy = path_of("%.400s/copy.h5", folder.text);
    size_t size;
    char *bytes = file_read(large_file.text, &size);
    file_write(copy.text, bytes, size);
    free(bytes);
    static const int64_t steps[] = {1, 3, 40, 77, 104};
    struct run first, second;
    run_open(&first, copy.text, OVERRIDES(LIMIT, "data.drop_last=false"));
    int finished;
    double loss;
    if (_i < 5) {
        train(first.s, 0);
        train(first.s, steps[_i]);
    } else {
        train(first.s, 60);
        ck_assert_int_eq(unlink(copy.text), 0);
        ck_assert_int_eq(ps_session_train_epoch(first.s, &(struct ps_epoch_watch){0}, &finished, &loss), PS_DATA);
        ck_assert_msg(strstr(ps_error_message(), "copy.h5: went away while it was being read") != NULL, "%s", ps_error_message());
        OK(ps_session_recall(first.s));
        ck_assert_uint_ge(first.s->now.step, 60);
        ck_assert_uint_lt(first.s->now.step, (uint64_t)first.s->steps_per_epoch);
    }
    struct ps_snapshot snapshot;
    OK(ps_snapshot_open(first.s, 0, &snapshot));
    OK(ps_snapshot_take(&snapshot));
    OK(ps_snapshot_wait(&snapshot));
    ck_assert_uint_eq(snapshot.checkpoint.cursor, first.s->now.cursor);
    run_open(&second, large_file.text, OVERRIDES(LIMIT, "data.drop_last=false"));
    OK(ps_session_restore(second.s, &snapshot.checkpoint));
    ps_snapshot_close(&snapshot);
    run_close(&first);
    while (second.s->epoch < 2) {
        train(second.s, 0);
    }
    struct bits resumed = bits_of(second.s);
    expect_equal(&whole, &resumed, "resumed");
    bits_free(&whole);
    bits_free(&resumed);
    run_close(&second);
}
END_TEST

/* ---- what is not finite ---- */

/* Puts a value that is not finite into the gradient of one tensor, to which the next step's is added. */
static void spoil(struct ps_session *s, const char *tensor, float value)
{
    const struct ps_parameters *layout = s->model->layout;
    int t = 0;
    while (strcmp(layout->table[t].name, tensor) != 0) {
        t++;
    }
    OK(s->device->upload(s->device, PS_COMPUTE, (float *)s->model->gradients + layout->table[t].offset + 1, &value, sizeof value));
    OK(s->device->synchronize(s->device));
}

/* A step whose gradient is not finite ends the run, which says where it began; and no checkpoint is written of it. */
START_TEST(nonfinite_stops)
{
    struct run run;
    char *clip[] = {"optim.clip_norm=0", "optim.clip_norm=1"};
    run_open(&run, series_file.text, OVERRIDES(clip[_i]));
    struct ps_kept kept = {.keep_last = 2, .keep_best = 1};
    snprintf(kept.folder, sizeof kept.folder, "%.400s", folder.text);
    struct ps_writer *writer;
    OK(ps_writer_open(run.s, &kept, &writer));
    train(run.s, 5);
    OK(ps_writer_submit(writer, 0));
    spoil(run.s, "layers.1.w_o", NAN);
    spoil(run.s, "layers.0.b_1", INFINITY);
    int finished;
    double loss;
    ck_assert_int_eq(ps_session_train_epoch(run.s, &(struct ps_epoch_watch){0}, &finished, &loss), PS_USAGE);
    const char *says[] = {"step 6, in epoch 1: a gradient is not finite", "2 of 29 tensors, first layers.1.w_o", "optim.clip_norm",
                          "train.on_nonfinite: skip",
                          strcmp(precision, "fp16") == 0                                     ? "take bf16 or tf32"
                          : strcmp(precision, "tf32") == 0 && run.s->level == PS_LEVEL_LAYER ? "take runtime.fusion: gemm"
                                                                                             : ""};
    for (size_t i = 0; i < sizeof says / sizeof *says; i++) {
        ck_assert_msg(strstr(ps_error_message(), says[i]) != NULL, "\"%s\" is not in: %s", says[i], ps_error_message());
    }
    OK(ps_writer_submit(writer, 0));
    OK(ps_writer_drain(writer));
    struct ps_resumption r;
    OK(ps_kept_load(&kept, &r));
    ck_assert_uint_eq(r.last.step, 5);
    ps_resumption_free(&r);
    OK(ps_kept_discard(&kept));
    ps_writer_close(writer);
    run_close(&run);
}
END_TEST

/* Left out, the step changes nothing but the counters, is told, and is in what a run is resumed from. */
START_TEST(nonfinite_skips)
{
    struct run first, second;
    run_open(&first, series_file.text, OVERRIDES("train.on_nonfinite=skip"));
    train(first.s, 5);
    struct bits before = bits_of(first.s);
    spoil(first.s, "w_p", -INFINITY);
    train(first.s, 1);
    struct bits after = bits_of(first.s);
    ck_assert_uint_eq(after.state.step, 6);
    ck_assert_uint_eq(after.state.skipped, 1);
    ck_assert_uint_eq(after.state.nonfinite, 0);
    before.state.step = after.state.step;
    before.state.cursor = after.state.cursor;
    before.state.loss_sum = after.state.loss_sum;
    expect_equal(&before, &after, "a step that was left out");
    struct ps_snapshot snapshot;
    OK(ps_snapshot_open(first.s, 0, &snapshot));
    OK(ps_snapshot_take(&snapshot));
    OK(ps_snapshot_wait(&snapshot));
    run_open(&second, series_file.text, OVERRIDES("train.on_nonfinite=skip"));
    OK(ps_session_restore(second.s, &snapshot.checkpoint));
    ps_snapshot_close(&snapshot);
    train(first.s, 0);
    train(second.s, 0);
    ck_assert_uint_eq(first.s->ended.skipped, 1);
    ck_assert_uint_eq(second.s->ended.skipped, 1);
    struct bits a = bits_of(first.s), b = bits_of(second.s);
    ck_assert_uint_eq(a.state.skipped, 0); /* of the next epoch */
    expect_equal(&a, &b, "resumed");
    bits_free(&before);
    bits_free(&after);
    bits_free(&a);
    bits_free(&b);
    run_close(&first);
    run_close(&second);
}
END_TEST

/* With nothing to leave out, both ways give the same bits. */
START_TEST(nonfinite_nothing)
{
    struct bits a = trained(series_file.text, 2, OVERRIDES("optim.clip_norm=0")),
                b = trained(series_file.text, 2, OVERRIDES("optim.clip_norm=0", "train.on_nonfinite=skip"));
    expect_equal(&a, &b, "skip, with nothing to skip");
    bits_free(&a);
    bits_free(&b);
}
END_TEST

static void add_tests(TCase *tests)
{
    const int small = asked("PS_TEST_SMALL");
    tcase_add_test(tests, capture_changes_nothing);
    tcase_add_loop_test(tests, scores, 0, small ? 1 : 2);
    if (small) {
        return;
    }
    tcase_add_loop_test(tests, larger_than_memory, 0, 2);
    tcase_add_test(tests, orders);
    tcase_add_test(tests, streaming_counters);
    tcase_add_loop_test(tests, streamed_resume, 0, 6);
    tcase_add_loop_test(tests, counters, 0, 2);
    tcase_add_loop_test(tests, streamed_is_resident, 0, 4);
    tcase_add_test(tests, drop_last);
    tcase_add_test(tests, described);
    tcase_add_loop_test(tests, scoring_leaves_training_alone, 0, 2);
    tcase_add_test(tests, two_sessions);
    tcase_add_test(tests, best_weights);
    tcase_add_loop_test(tests, snapshot_and_restore, 0, 2);
    tcase_add_loop_test(tests, checkpoints_within_an_epoch, 0, 2);
    tcase_add_loop_test(tests, kept_after_an_error, 0, 2);
    tcase_add_loop_test(tests, nonfinite_stops, 0, 2);
    tcase_add_test(tests, nonfinite_skips);
    tcase_add_test(tests, nonfinite_nothing);
}

/* What the running statistics are a part of. */
static void add_paper_tests(TCase *tests)
{
    tcase_add_test(tests, capture_changes_nothing);
    if (asked("PS_TEST_SMALL")) {
        return;
    }
    tcase_add_loop_test(tests, streamed_resume, 0, 6);
    tcase_add_loop_test(tests, streamed_is_resident, 0, 4);
    tcase_add_loop_test(tests, scoring_leaves_training_alone, 0, 2);
    tcase_add_test(tests, two_sessions);
    tcase_add_test(tests, best_weights);
    tcase_add_loop_test(tests, snapshot_and_restore, 0, 2);
    tcase_add_loop_test(tests, kept_after_an_error, 0, 2);
}

/* Larger models' kernels at level layer: graphs, repetition, resume. */
static void add_wide_tests(TCase *tests)
{
    tcase_add_test(tests, capture_changes_nothing);
    if (!asked("PS_TEST_SMALL")) {
        tcase_add_test(tests, two_sessions);
        tcase_add_loop_test(tests, snapshot_and_restore, 0, 2);
    }
}

static void set_up(const char *device, const char *with_precision, const char *with_fusion)
{
    device_kind = device;
    precision = with_precision;
    fusion = with_fusion;
    folder = folder_make();
    series_file = path_of("%.400s/series.h5", folder.text);
    windows_file = path_of("%.400s/windows.h5", folder.text);
    OK(ps_sample_series(series_file.text, ROWS, CHANNELS, 3));
    large_file = path_of("%.400s/large.h5", folder.text);
    OK(ps_sample_windows(windows_file.text, WINDOWS, CHANNELS, L, H, 3));
    OK(ps_sample_windows(large_file.text, MANY, CHANNELS, L, H, 5));
}

static void tear_down(void)
{
    sizes = SMALLEST;
    folder_remove(folder.text);
}

static void on_cpu(void)
{
    set_up("cpu", "fp32", "gemm");
}

static void on_cpu_paper(void)
{
    sizes = PAPER;
    set_up("cpu", "fp32", "gemm");
}

static void on_cuda(void)
{
    set_up("cuda", "fp32", "gemm");
}

static void on_cuda_paper(void)
{
    sizes = PAPER;
    set_up("cuda", "fp32", "gemm");
}

static void on_cuda_bf16_paper(void)
{
    sizes = PAPER;
    set_up("cuda", "bf16", "gemm");
}

static void on_cuda_fp16_paper(void)
{
    sizes = PAPER;
    set_up("cuda", "fp16", "gemm");
}

static void on_cuda_bf16(void)
{
    set_up("cuda", "bf16", "gemm");
}

static void on_cuda_fp16(void)
{
    set_up("cuda", "fp16", "gemm");
}

static void on_cuda_layer(void)
{
    set_up("cuda", "bf16", "layer");
}

static void on_cuda_fp16_layer(void)
{
    set_up("cuda", "fp16", "layer");
}

static void on_cuda_tf32(void)
{
    set_up("cuda", "tf32", "layer");
}

static void on_cuda_tf32_d64(void)
{
    sizes = "d_model: 64, n_heads: 4, d_ff: 128";
    set_up("cuda", "tf32", "layer");
}

static void on_cuda_tf32_d128(void)
{
    sizes = "d_model: 128, n_heads: 16, d_ff: 192";
    set_up("cuda", "tf32", "layer");
}

static const struct {
    const char *name;
    void (*set_up)(void);
} wide[] = {{"cuda tf32, level layer, d 64", on_cuda_tf32_d64}, {"cuda tf32, level layer, d 128", on_cuda_tf32_d128}};

/* What the table of kernels a step was counted on. */
static int is_h200(void)
{
    struct ps_device *device;
    if (ps_device_open("cuda", 0, &device) != PS_OK) {
        return 0;
    }
    int is = strstr(device->name, "H200") != NULL;
    device->close(device);
    return is;
}

static void add_captured(Suite *suite, int fused)
{
    TCase *captured = tcase_create("captured, cuda");
    tcase_add_unchecked_fixture(captured, on_cuda, tear_down);
    tcase_add_loop_test(captured, replayed_is_uncaptured, 0, 2 * (fused ? WAYS : PLAIN_WAYS));
    if (fused) {
        tcase_add_loop_test(captured, one_call_each_way, 2 * PLAIN_WAYS, 2 * WAYS);
    }
    suite_add_tcase(suite, captured);
    if (!fused || !is_h200()) {
        printf("skipped: the shipped configs' kernels a step: the device is no H200, or the build has no sm_90\n");
        return;
    }
    TCase *kernels = tcase_create("kernels a step");
    tcase_add_unchecked_fixture(kernels, on_cuda, tear_down);
    tcase_add_loop_test(kernels, kernels_of_shipped, 0, sizeof shipped / sizeof *shipped);
    suite_add_tcase(suite, kernels);
}

int main(void)
{
    Suite *suite = suite_create("session");
    if (!asked("PS_TEST_SMALL")) {
        TCase *cpu = tcase_create("cpu");
        tcase_add_unchecked_fixture(cpu, on_cpu, tear_down);
        add_tests(cpu);
        tcase_add_loop_test(cpu, variant_without_level_layer, 0, VARIANT_KINDS);
        suite_add_tcase(suite, cpu);
        TCase *paper = tcase_create("the paper's layer, cpu");
        tcase_add_unchecked_fixture(paper, on_cpu_paper, tear_down);
        add_paper_tests(paper);
        suite_add_tcase(suite, paper);
        TCase *captured = tcase_create("captured, cpu");
        tcase_add_unchecked_fixture(captured, on_cpu, tear_down);
        tcase_add_loop_test(captured, replayed_is_uncaptured, 0, 2 * CPU_WAYS);
        tcase_add_loop_test(captured, sums_beside_backward, 0, 2 * CPU_WAYS);
        suite_add_tcase(suite, captured);
    }
    if (ps_cuda_device_count() > 0) {
        TCase *cuda = tcase_create("cuda");
        tcase_add_unchecked_fixture(cuda, on_cuda, tear_down);
        add_tests(cuda);
        suite_add_tcase(suite, cuda);
        TCase *bf16 = tcase_create("cuda bf16");
        tcase_add_unchecked_fixture(bf16, on_cuda_bf16, tear_down);
        add_tests(bf16);
        suite_add_tcase(suite, bf16);
        TCase *fp16 = tcase_create("cuda fp16");
        tcase_add_unchecked_fixture(fp16, on_cuda_fp16, tear_down);
        add_tests(fp16);
        suite_add_tcase(suite, fp16);
        static const struct {
            const char *name;
            void (*set_up)(void);
        } papers[] = {{"the paper's layer, cuda", on_cuda_paper},
                      {"the paper's layer, cuda bf16", on_cuda_bf16_paper},
                      {"the paper's layer, cuda fp16", on_cuda_fp16_paper}};
        for (size_t i = 0; i < sizeof papers / sizeof *papers; i++) {
            TCase *tests = tcase_create(papers[i].name);
            tcase_add_unchecked_fixture(tests, papers[i].set_up, tear_down);
            add_paper_tests(tests);
            suite_add_tcase(suite, tests);
        }
        if (!asked("PS_TEST_SMALL")) {
            tcase_add_loop_test(cuda, variant_without_level_layer, 0, VARIANT_KINDS);
            tcase_add_loop_test(bf16, variant_without_level_layer, 0, VARIANT_KINDS);
            tcase_add_loop_test(fp16, variant_without_level_layer, 0, VARIANT_KINDS);
        }
        const int fused = fused_encoder();
        if (!asked("PS_TEST_SMALL")) {
            add_captured(suite, fused);
        }
        if (fused) {
            TCase *layer = tcase_create("cuda bf16, level layer");
            tcase_add_unchecked_fixture(layer, on_cuda_layer, tear_down);
            add_tests(layer);
            suite_add_tcase(suite, layer);
            TCase *fp16_layer = tcase_create("cuda fp16, level layer");
            tcase_add_unchecked_fixture(fp16_layer, on_cuda_fp16_layer, tear_down);
            add_tests(fp16_layer);
            suite_add_tcase(suite, fp16_layer);
            TCase *tf32 = tcase_create("cuda tf32, level layer");
            tcase_add_unchecked_fixture(tf32, on_cuda_tf32, tear_down);
            add_tests(tf32);
            suite_add_tcase(suite, tf32);
            for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
                TCase *tests = tcase_create(wide[i].name);
                tcase_add_unchecked_fixture(tests, wide[i].set_up, tear_down);
                add_wide_tests(tests);
                suite_add_tcase(suite, tests);
            }
        } else {
            printf("skipped: the session at level layer: the device is not of compute capability 9.0, or the build has no sm_90\n");
        }
    } else {
        printf("skipped: the session and the shipped configs' kernels on CUDA: no CUDA device\n");
    }
    return run_suite(suite, CK_NOFORK) != 0; /* CUDA and OpenMP do not survive a fork */
}
