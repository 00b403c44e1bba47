/* bench: how long a config's step and epoch take, and where the time goes. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/files.h"
#include "src/clock.h"
#include "src/options.h"
#include "src/passive.h"
#include "src/together.h"
#include "src/version.h"
#include "src/writer.h"

enum { GROUP = 20, PARTS = 256, SHOWN = 40, CHECKPOINTS = 20, COMPARED_SECONDS = 2 };

struct arguments {
    const char *config, *device, *checkpoints, *tune;
    struct ps_overrides overrides;
    int json, trace, compare;
    int several; /* ranks */
    uint64_t epochs, steps;
};

static const char usage[] =
    "usage: bench CONFIG [--set section.key=value]... [--device auto|cpu|cuda[:N]] [--epochs N] [--steps N] [--checkpoint DIR]\n"
    "             [--json] [--trace] [--compare] [--tune FILE]\n"
    "\n"
    "  --epochs N  whole training epochs to time (default: 1; 0: none)\n"
    "  --steps N   steps to time, in groups of 20 that follow one another without a pause (default: 100)\n"
    "  --checkpoint DIR\n"
    "              write 20 checkpoints into the folder DIR, which holds none, time them and remove them\n"
    "  --json      print one JSON object\n"
    "  --trace     print every operation of one step in order: name, shapes, bytes, FLOPs\n"
    "  --compare   time the step at every level of fusion in every precision, side by side (no epochs, no parts);\n"
    "              at most about 2 s each: slow ones are timed over fewer steps, as the column says\n"
    "  --tune FILE time the algorithms of every product of the step that cuBLASLt computes, and write the fastest to FILE, for\n"
    "              runtime.tuning; what is timed after that uses them\n"
    "\n"
    "Under mpirun or srun the ranks share the step, and rank 0 times it alone too: with the whole batch, and with one rank's part\n"
    "of it. Of the options --epochs, --steps and --json are for several ranks.\n"
    "\n"
    "exit codes: 0 done, 2 usage or config, 3 data, 4 checkpoint, 5 device\n";

static enum ps_status parse(int argc, char **argv, struct arguments *a)
{
    const struct ps_option options[] = {{"set", .overrides = &a->overrides},
                                        {"device", .text = &a->device},
                                        {"epochs", .number = &a->epochs, .most = 1000000},
                                        {"steps", .number = &a->steps, .least = 1, .most = 1000000},
                                        {"checkpoint", .text = &a->checkpoints},
                                        {"json", .given = &a->json},
                                        {"trace", .given = &a->trace},
                                        {"compare", .given = &a->compare},
                                        {"tune", .text = &a->tune},
                                        {0}};
    a->epochs = 1;
    a->steps = 100;
    PS_TRY(ps_options_read(argc, argv, options, 1, "one CONFIG", usage));
    a->config = argv[argc - 1];
    if (a->trace && (a->json || a->compare)) {
        return ps_fail(PS_USAGE, "--trace: prints lines of one step: leave out %s", a->json ? "--json" : "--compare");
    }
    if (a->several && (a->trace || a->compare || a->tune || a->checkpoints)) {
        return ps_fail(PS_USAGE, "--%s: is of one rank: start bench without mpirun",
                       a->trace     ? "trace"
                       : a->compare ? "compare"
                       : a->tune    ? "tune"
                                    : "checkpoint");
    }
    if (a->tune && a->compare) {
        return ps_fail(PS_USAGE, "--tune: a table is of one precision: leave out --compare");
    }
    return PS_OK;
}

/* What it costs that ranks share the step, and what it gains: ms. */
struct spreading {
    double exchange;     /* the gradient's sum over the ranks, with nothing else to do */
    double least, most;  /* of the ranks: a step's time in exchanges, waiting for others included; NaN where a GPU does them */
    double whole, share; /* one rank's step with the whole batch, and with a rank's part of it; medians */
    double whole_least, share_least;
};

struct result {
    double open_seconds, first_step_seconds;
    double median, least, most;                     /* ms a step */
    double processor;                               /* ms a step that processors spent on it, the median too */
    int64_t steps, group;                           /* timed; in groups of */
    double epoch_seconds, epoch_processor, waiting; /* NaN without an epoch; processors' seconds; share of it */
    struct ps_graph_nodes nodes;
    int64_t operations; /* of one step, as the table counts them */
    struct ps_writer_times checkpoints;
    struct spreading spread; /* of several ranks */
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Untimed: the first step alone; then another, for what a step takes about. */
static enum ps_status warm_up(struct ps_session *s, double *first_seconds, double *seconds)
{
    for (int i = 0; i < 2; i++) {
        const double begin = ps_seconds();
        int finished;
        double loss;
        PS_TRY(ps_session_rewind(s));
        PS_TRY(ps_feed_resident(s->feed) ? ps_session_full_steps(s, 1)
                                         : ps_session_train_epoch(s, &(struct ps_epoch_watch){.max_steps = 1}, &finished, &loss));
        PS_TRY(s->device->synchronize(s->device));
        *(i == 0 ? first_seconds : seconds) = ps_seconds() - begin;
    }
    return PS_OK;
}

/* Groups of steps, each timed from an idle device to an idle device, after an untimed one; fewer and shorter ones where they would
 * take more than about `most_seconds`. */
static enum ps_status time_steps(struct ps_session *s, int64_t steps, double most_seconds, struct result *r)
{
    int64_t whole = s->train_windows / s->step_windows; /* full batches an epoch */
    if (whole == 0) {
        return ps_fail(PS_USAGE,
                       "train.batch_size: %lld is more than the %lld training windows: a step of a full batch is timed: lower it",
                       (long long)s->step_windows, (long long)s->train_windows);
    }
    double seconds;
    PS_TRY(warm_up(s, &r->first_step_seconds, &seconds));
    const double fit = most_seconds / seconds;
    int64_t group = GROUP < whole ? GROUP : whole;
    group = fit < (double)(4 * group) ? (int64_t)(fit / 4) : group;
    group = group < 1 ? 1 : group;
    int64_t groups = (steps + group - 1) / group;
    groups = fit < (double)((groups + 1) * group) ? (int64_t)(fit / (double)group) - 1 : groups;
    groups = groups < 1 ? 1 : groups;
    double *ms = malloc(2 * (size_t)groups * sizeof *ms);
    if (!ms) {
        return ps_fail(PS_DEVICE, "--steps: no memory for %lld timings", (long long)steps);
    }
    double *processor = ms + groups;
    enum ps_status status = PS_OK;
    for (int64_t i = -1; i < groups && status == PS_OK; i++) {
        struct ps_epoch_watch watch = {.max_steps = group};
        int finished;
        double loss;
        status = ps_session_rewind(s);
        const double begin = ps_seconds(), processor_begin = ps_processor_seconds();
        if (status == PS_OK) {
            status =
                ps_feed_resident(s->feed) ? ps_session_full_steps(s, group) : ps_session_train_epoch(s, &watch, &finished, &loss);
        }
        if (status == PS_OK) {
            status = s->device->synchronize(s->device);
        }
        if (i >= 0) {
            ms[i] = 1e3 * (ps_seconds() - begin) / (double)group;
            processor[i] = 1e3 * (ps_processor_seconds() - processor_begin) / (double)group;
        }
    }
    qsort(ms, (size_t)groups, sizeof *ms, by_value);
    qsort(processor, (size_t)groups, sizeof *processor, by_value);
    r->median = ms[groups / 2];
    r->processor = processor[groups / 2];
    r->least = ms[0];
    r->most = ms[groups - 1];
    r->steps = groups * group;
    r->group = group;
    free(ms);
    return status;
}

static enum ps_status time_epochs(struct ps_session *s, int64_t epochs, struct result *r)
{
    double seconds = 0, processor = 0;
    const double waited = ps_feed_waited(s->feed);
    for (int64_t i = 0; i < epochs; i++) {
        PS_TRY(ps_session_rewind(s));
        int finished;
        double loss, begin = ps_seconds(), processor_begin = ps_processor_seconds();
        PS_TRY(ps_session_train_epoch(s, &(struct ps_epoch_watch){0}, &finished, &loss));
        seconds += ps_seconds() - begin;
        processor += ps_processor_seconds() - processor_begin;
    }
    r->epoch_seconds = epochs ? seconds / (double)epochs : NAN;
    r->epoch_processor = epochs ? processor / (double)epochs : NAN;
    r->waiting = epochs ? (ps_feed_waited(s->feed) - waited) / seconds : NAN;
    return PS_OK;
}

/* ---- several ranks ---- */

/* The median and the least step of this rank alone, with so many windows. */
static enum ps_status time_alone(const struct arguments *a, const struct ps_config *config, int64_t batch, double *median,
                                 double *least)
{
    struct ps_config alone = *config;
    struct ps_session *s;
    struct result r = {0};
    alone.train.batch_size = batch;
    PS_TRY(ps_session_open(&alone, &(struct ps_session_options){.device = a->device, .training = 1}, &s));
    enum ps_status status = ps_session_initialise(s);
    status = status == PS_OK ? time_steps(s, (int64_t)a->steps, INFINITY, &r) : status;
    ps_session_close(s);
    *median = r.median;
    *least = r.least;
    return status;
}

/* Rank 0 alone, while the others wait. */
static enum ps_status time_one_rank(const struct arguments *a, const struct ps_config *config, struct ps_ranks *ranks,
                                    struct spreading *p)
{
    const int64_t size = ps_ranks_size(ranks), batch = config->train.batch_size;
    enum ps_status status = PS_OK;
    if (ps_ranks_rank(ranks) == 0) {
        status = time_alone(a, config, batch, &p->whole, &p->whole_least);
        status = status == PS_OK ? time_alone(a, config, (batch + size - 1) / size, &p->share, &p->share_least) : status;
    }
    return ps_ranks_check(ranks, status);
}

/* The exchange of the gradient alone, and what the timed steps took for all exchanges: `seconds` a step of this rank. */
static enum ps_status time_exchange(struct ps_session *s, double seconds, struct spreading *p)
{
    enum { SUMS = 20, TURNS = 5 };
    const struct ps_model *m = s->model;
    PS_TRY(
        s->device->fill_zero(s->device, PS_COMPUTE, m->gradients, (size_t)m->layout->count * ps_type_bytes(s->kernels->parameter)));
    p->exchange = INFINITY;
    for (int turn = 0; turn < TURNS; turn++) {
        PS_TRY(s->device->synchronize(s->device));
        const double begin = ps_seconds();
        for (int i = 0; i < SUMS; i++) {
            PS_TRY(s->exchange->sum(s->exchange, m->gradients, s->kernels->parameter, m->layout->count));
        }
        PS_TRY(s->device->synchronize(s->device));
        const double ms = 1e3 * (ps_seconds() - begin) / SUMS;
        p->exchange = ms < p->exchange ? ms : p->exchange;
    }
    const int size = ps_ranks_size(s->ranks);
    double *all = malloc((size_t)size * sizeof *all);
    if (!all) {
        return ps_fail(PS_DEVICE, "no memory for the times of %d ranks", size);
    }
    enum ps_status status = ps_ranks_gather(s->ranks, &seconds, sizeof seconds, all);
    p->least = INFINITY;
    p->most = 0;
    for (int i = 0; i < size; i++) {
        p->least = fmin(p->least, 1e3 * all[i]);
        p->most = fmax(p->most, 1e3 * all[i]);
    }
    if (seconds == 0) { /* of all ranks alike: the device does them, and the host sees nothing */
        p->least = p->most = NAN;
    }
    free(all);
    return status;
}

/* Checkpoints of best weights and state, each after a few steps and with the disk at rest. */
static enum ps_status time_checkpoints(struct ps_session *s, const char *folder, struct result *r)
{
    struct ps_kept kept = {.keep_last = 2, .keep_best = 1};
    int length = snprintf(kept.folder, sizeof kept.folder, "%s", folder);
    if (length >= (int)sizeof kept.folder || ps_kept_any(&kept)) {
        return ps_fail(PS_USAGE, "--checkpoint: %.200s: %s", folder,
                       length >= (int)sizeof kept.folder ? "the path is too long" : "holds checkpoints: name an empty folder");
    }
    struct ps_writer *writer;
    PS_TRY(ps_session_rewind(s));
    PS_TRY(ps_session_keep_best(s));
    PS_TRY(ps_writer_open(s, &kept, &writer));
    enum ps_status status = PS_OK;
    for (int i = 0; i < CHECKPOINTS && status == PS_OK; i++) {
        int finished;
        double loss;
        status = ps_session_train_epoch(s, &(struct ps_epoch_watch){.max_steps = 2}, &finished, &loss);
        s->best_epoch = s->best_holds = (uint64_t)i + 1;
        if (status == PS_OK) {
            status = ps_writer_submit(writer, 1);
        }
        if (status == PS_OK) {
            status = ps_writer_drain(writer);
        }
    }
    if (status == PS_OK) {
        r->checkpoints = ps_writer_times(writer);
        status = ps_kept_discard(&kept);
    }
    ps_writer_close(writer);
    return status;
}

/* ---- one step, operation by operation ---- */

enum { PRODUCT_TEXT = 4 * PS_TENSOR_NAME };

struct part {
    enum ps_op op;
    char shape[PS_SHAPES_TEXT];
    char product[PRODUCT_TEXT]; /* "hidden_in = norm2_out w_1": which of the products; "" of other operations */
    int64_t calls;
    double ms, bytes, flops;
};

struct tracer {
    const struct ps_model *model;
    struct ps_device *device;
    struct ps_event *before, *after;
    int print, n;
    int64_t operations;
    struct part part[PARTS];
    enum ps_status status; /* of the first operation that the device could not do; later ones may fail for the same reason */
    char message[1024];
};

/* By shapes alone one product looks like another. A product's output comes first, then what is multiplied, but for gemm_gradient,
 * whose second output is the bias's. */
static void name_product(const struct ps_model *m, enum ps_op op, const void *arguments, char text[PRODUCT_TEXT])
{
    const struct ps_tensor *t = arguments;
    const int factor = op == PS_OP_gemm_gradient ? 2 : 1;
    char names[3][PS_TENSOR_NAME];
    *text = 0;
    if (ps_op_kind(op) == PS_KIND_GEMM) {
        ps_model_tensor_name(m, t[0].data, names[0]);
        ps_model_tensor_name(m, t[factor].data, names[1]);
        ps_model_tensor_name(m, t[factor + 1].data, names[2]);
        snprintf(text, PRODUCT_TEXT, "%s = %s %s", names[0], names[1], names[2]);
    }
}

static enum ps_status trace_call(struct tracer *t, enum ps_op op, const void *arguments, int after)
{
    if (!after) {
        return t->device->event_record(t->device, PS_COMPUTE, t->before);
    }
    double ms;
    PS_TRY(t->device->event_record(t->device, PS_COMPUTE, t->after));
    PS_TRY(t->device->synchronize(t->device));
    PS_TRY(t->device->event_elapsed(t->device, t->before, t->after, &ms));
    struct part found = {.op = op, .bytes = ps_op_bytes(op, arguments), .flops = ps_op_flops(op, arguments)};
    ps_op_shapes(op, arguments, found.shape);
    name_product(t->model, op, arguments, found.product);
    if (t->print) {
        printf("%4lld  %-20s %10.1f KB %10.2f MFLOP  %s  %s\n", (long long)t->operations, ps_op_name(op), found.bytes / 1e3,
               found.flops / 1e6, found.shape, found.product);
    }
    t->operations++;
    int i = 0;
    while (i < t->n &&
           (t->part[i].op != op || strcmp(t->part[i].shape, found.shape) != 0 || strcmp(t->part[i].product, found.product) != 0)) {
        i++;
    }
    if (i == t->n) {
        if (t->n == PARTS) {
            return PS_OK; /* more kinds than the table shows */
        }
        t->part[t->n++] = found;
    }
    t->part[i].calls++;
    t->part[i].ms += ms;
    return PS_OK;
}

static void trace_hook(void *argument, enum ps_op op, const void *arguments, int after)
{
    struct tracer *t = argument;
    if (t->status == PS_OK && (t->status = ps_op_result(op, arguments, trace_call(t, op, arguments, after))) != PS_OK) {
        snprintf(t->message, sizeof t->message, "%s", ps_error_message());
    }
}

static int by_time(const void *a, const void *b)
{
    double x = ((const struct part *)a)->ms, y = ((const struct part *)b)->ms;
    return (x < y) - (x > y);
}

/* One step through a hooked table, after one that only warms up. */
static enum ps_status trace_step(struct ps_session *s, struct tracer *t, int print)
{
    t->device = s->device;
    t->model = s->model;
    PS_TRY(s->device->event_create(s->device, &t->before));
    PS_TRY(s->device->event_create(s->device, &t->after));
    struct ps_kernels *hooked;
    PS_TRY(ps_kernels_hooked(s->kernels, trace_hook, t, &hooked));
    const struct ps_kernels *plain = s->model->k;
    s->model->k = s->optimizer.k = hooked;
    enum ps_status status = PS_OK;
    for (int i = 0; i < 2 && status == PS_OK; i++) {
        t->n = 0;
        t->operations = 0;
        t->print = print && i == 1;
        status = ps_session_rewind(s);
        if (status == PS_OK) {
            status = ps_session_step(s, s->step_windows);
        }
    }
    s->model->k = s->optimizer.k = plain;
    hooked->close(hooked);
    s->device->event_destroy(s->device, t->before);
    s->device->event_destroy(s->device, t->after);
    qsort(t->part, (size_t)t->n, sizeof *t->part, by_time);
    return t->status == PS_OK ? status : ps_fail(t->status, "%s", t->message);
}

/* ---- output ---- */

static int on_cpu(const struct ps_session *s)
{
    return strcmp(s->device->kind, "cpu") == 0;
}

static void print_text(const struct ps_session *s, const struct result *r, const struct tracer *t)
{
    double flops = ps_model_step_flops(&s->model->shape, s->step_windows), windows = (double)s->step_windows;
    char description[PS_SESSION_TEXT];
    ps_session_describe(s, description);
    if (s->ranks) {
        printf("%d ranks of ", ps_ranks_size(s->ranks));
    }
    printf("%s, batch %lld\n", description, (long long)s->step_windows);
    printf("step            %.4f ms  (min %.4f  max %.4f, groups of %lld steps in %lld)\n", r->median, r->least, r->most,
           (long long)r->group, (long long)r->steps);
    printf("processor time  %.4f ms a step: %.2f processors busy\n", r->processor, r->processor / r->median);
    printf("windows/s       %.0f\n", windows / (r->median * 1e-3));
    printf("FLOP/s          %.3f T  (%.3f GFLOP counted a step)\n", flops / (r->median * 1e9), flops / 1e9);
    if (r->epoch_seconds >= 0) {
        printf("epoch           %.4f s, %.4f s of processor time  (%lld steps; %.1f %% of it waiting for data)\n", r->epoch_seconds,
               r->epoch_processor, (long long)s->steps_per_epoch, 100 * r->waiting);
    }
    if (s->ranks) {
        const struct spreading *p = &r->spread;
        printf("exchange        %.4f ms the gradient's sum alone: %.1f %% of the step", p->exchange, 100 * p->exchange / r->median);
        if (p->least >= 0) {
            printf("; %.4f to %.4f ms a step in exchanges, with waiting", p->least, p->most);
        }
        printf("\none rank        %.4f ms with the whole batch: %d ranks are %.2f times as fast; %.4f ms with a rank's part: "
               "efficiency "
               "%.2f\n",
               p->whole, ps_ranks_size(s->ranks), p->whole / r->median, p->share, p->share / r->median);
    }
    const struct ps_writer_times *c = &r->checkpoints;
    if (c->checkpoints) {
        printf("checkpoint      %.2f ms to write  (max %.2f), %.2f ms stall of the loop  (max %.2f), %lld of them\n",
               1e3 * c->writing / (double)c->checkpoints, 1e3 * c->longest_write, 1e3 * c->stalled / (double)c->checkpoints,
               1e3 * c->longest_stall, (long long)c->checkpoints);
    }
    if (on_cpu(s)) { /* which launches nothing, and reads the data where they are */
        printf("graph           none on the CPU, which calls each operation; %lld operations\n", (long long)r->operations);
        printf("host memory     %.1f MiB at its peak, beside the data\n", (double)s->device->counters.peak_bytes / 0x1p20);
    } else {
        printf("graph           %d kernels, %d copies, %d fills a step; %lld operations\n", r->nodes.kernels, r->nodes.copies,
               r->nodes.fills, (long long)r->operations);
        printf("device memory   %.1f MiB at its peak\n", (double)s->device->counters.peak_bytes / 0x1p20);
    }
    printf("start-up        %.3f s to open, %.3f s to the end of the first step\n\n", r->open_seconds, r->first_step_seconds);
    double total = 0;
    for (int i = 0; i < t->n; i++) {
        total += t->part[i].ms;
    }
    printf("%-20s %5s %9s %6s %8s %9s  %s\n", "part", "calls", "ms", "share", "GB/s", "GFLOP/s",
           "which product; shapes, outputs first");
    for (int i = 0; i < t->n && i < SHOWN; i++) {
        const struct part *p = &t->part[i];
        char named[PRODUCT_TEXT + 2] = "";
        if (*p->product) {
            snprintf(named, sizeof named, "%s  ", p->product);
        }
        printf("%-20s %5lld %9.4f %5.1f%% %8.0f %9.0f  %s%s\n", ps_op_name(p->op), (long long)p->calls, p->ms, 100 * p->ms / total,
               p->bytes * (double)p->calls / (p->ms * 1e6), p->flops * (double)p->calls / (p->ms * 1e6), named, p->shape);
    }
    printf("%-20s %5lld %9.4f         (each timed alone, launch included)\n", "sum", (long long)r->operations, total);
}

static enum ps_status print_json(const struct ps_session *s, const struct result *r, const struct tracer *t)
{
    json_t *parts = json_array();
    for (int i = 0; i < t->n; i++) {
        const struct part *p = &t->part[i];
        json_array_append_new(parts, json_pack("{s:s, s:s, s:s, s:I, s:f, s:f, s:f}", "name", ps_op_name(p->op), "product",
                                               p->product, "shapes", p->shape, "calls", (json_int_t)p->calls, "ms", p->ms, "bytes",
                                               p->bytes, "flops", p->flops));
    }
    double flops = ps_model_step_flops(&s->model->shape, s->step_windows), windows = (double)s->step_windows;
    json_t *root = json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:I, s:{s:f, s:f, s:f, s:f, s:I}, s:f, s:f, s:f, s:{s:i, s:i, s:i}, s:I, s:I, s:f, s:f, "
        "s:o}",
        "version", ps_version, "backend", s->kernels->backend, "device", s->device->name, "precision",
        ps_precision_name(s->kernels->precision), "level", ps_level_name(s->level), "kernels", ps_model_kernels(s->model), "batch",
        (json_int_t)s->step_windows, "ms_per_step", "median", r->median, "min", r->least, "max", r->most, "processor", r->processor,
        "steps", (json_int_t)r->steps, "windows_per_second", windows / (r->median * 1e-3), "flops_per_step", flops,
        "flops_per_second", flops / (r->median * 1e-3), "graph", "kernels", r->nodes.kernels, "copies", r->nodes.copies, "fills",
        r->nodes.fills, "operations", (json_int_t)r->operations, "peak_device_bytes", (json_int_t)s->device->counters.peak_bytes,
        "open_seconds", r->open_seconds, "first_step_seconds", r->first_step_seconds, "parts", parts);
    if (root && r->epoch_seconds >= 0) {
        json_object_set_new(root, "seconds_per_epoch", json_real(r->epoch_seconds));
        json_object_set_new(root, "processor_seconds_per_epoch", json_real(r->epoch_processor));
        json_object_set_new(root, "waiting_for_data", json_real(r->waiting));
    }
    if (root && s->ranks) {
        const struct spreading *p = &r->spread;
        json_t *ranks =
            json_pack("{s:i, s:f, s:f, s:I, s:{s:f, s:f}, s:{s:f, s:f}, s:f, s:f}", "ranks", ps_ranks_size(s->ranks), "exchange_ms",
                      p->exchange, "exchange_share", p->exchange / r->median, "exchange_bytes",
                      (json_int_t)((size_t)s->model->layout->count * ps_type_bytes(s->kernels->parameter)), "one_rank_whole_ms",
                      "median", p->whole, "min", p->whole_least, "one_rank_part_ms", "median", p->share, "min", p->share_least,
                      "speedup", p->whole / r->median, "efficiency", p->share / r->median);
        if (ranks && p->least >= 0) {
            json_object_set_new(ranks, "in_exchanges_ms", json_pack("{s:f, s:f}", "least", p->least, "most", p->most));
        }
        json_object_set_new(root, "ranks", ranks);
    }
    const struct ps_writer_times *c = &r->checkpoints;
    if (root && c->checkpoints) {
        json_object_set_new(root, "checkpoint_ms",
                            json_pack("{s:f, s:f, s:f, s:f}", "write", 1e3 * c->writing / (double)c->checkpoints, "longest_write",
                                      1e3 * c->longest_write, "stall", 1e3 * c->stalled / (double)c->checkpoints, "longest_stall",
                                      1e3 * c->longest_stall));
    }
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (!text) {
        return ps_fail(PS_USAGE, "--json: no memory");
    }
    puts(text);
    free(text);
    return PS_OK;
}

/* One step, not captured, whose products are tuned as they come, in a session of its own: sums are added to again and again. */
static enum ps_status tune_step(struct ps_session *s, const char *path)
{
    const struct ps_kernels *k = s->kernels;
    if (!k->tune) {
        return ps_fail(PS_USAGE, "--tune: backend %s has nothing to choose from", k->backend);
    }
    PS_TRY(k->tune(k));
    PS_TRY(ps_session_initialise(s));
    PS_TRY(ps_session_rewind(s));
    PS_TRY(ps_session_step(s, s->step_windows));
    PS_TRY(s->device->synchronize(s->device));
    char *text;
    PS_TRY(k->tuning(k, &text));
    enum ps_status status = ps_file_replace(PS_USAGE, path, text, strlen(text));
    free(text);
    return status;
}

/* The table at path, which config then names. */
static enum ps_status tune(const struct arguments *a, struct ps_config *config)
{
    free(config->runtime.tuning);
    config->runtime.tuning = strdup("");
    if (!config->runtime.tuning) {
        return ps_fail(PS_DEVICE, "--tune: no memory");
    }
    struct ps_session *s;
    PS_TRY(ps_session_open(config, &(struct ps_session_options){.device = a->device, .training = 1}, &s));
    ps_session_warn_threads(s, "bench");
    enum ps_status status = tune_step(s, a->tune);
    ps_session_close(s);
    PS_TRY(status);
    free(config->runtime.tuning);
    config->runtime.tuning = strdup(a->tune);
    return config->runtime.tuning ? PS_OK : ps_fail(PS_DEVICE, "--tune: no memory");
}

static enum ps_status bench(const struct arguments *a, const struct ps_config *config, struct ps_ranks *ranks)
{
    struct ps_session *s = NULL;
    struct result result = {0};
    if (ranks) {
        PS_TRY(time_one_rank(a, config, ranks, &result.spread));
    }
    double begin = ps_seconds();
    enum ps_status opened =
        ps_session_open(config, &(struct ps_session_options){.device = a->device, .training = 1, .ranks = ranks}, &s);
    opened = opened != PS_OK && ps_ranks_known(ranks) ? opened : ps_ranks_check(ranks, opened);
    if (opened == PS_OK) {
        opened = ps_session_check_same(s);
    }
    if (opened != PS_OK) {
        ps_session_close(s);
        return opened;
    }
    const int first = ps_ranks_rank(ranks) == 0;
    if (first) {
        ps_session_warn_threads(s, "bench");
    }
    struct tracer *tracer = calloc(1, sizeof *tracer);
    enum ps_status status = tracer ? ps_session_initialise(s) : ps_fail(PS_DEVICE, "no memory for the trace");
    result.open_seconds = ps_seconds() - begin;
    if (status == PS_OK && a->trace) { /* first: a fault of the device is told with the operation that met it */
        status = trace_step(s, tracer, 1);
    }
    const double exchanged = ps_ranks_seconds(ranks);
    if (status == PS_OK) {
        status = time_steps(s, (int64_t)a->steps, INFINITY, &result);
    }
    if (status == PS_OK && ranks) { /* the steps before them are so many more */
        const double all = (double)(result.steps + result.group + 2);
        status = time_exchange(s, (ps_ranks_seconds(ranks) - exchanged) / all, &result.spread);
    }
    if (status == PS_OK) {
        status = time_epochs(s, (int64_t)a->epochs, &result);
    }
    if (status == PS_OK && a->checkpoints) {
        status = time_checkpoints(s, a->checkpoints, &result);
    }
    if (status == PS_OK) {
        struct ps_graph *graph;
        status = ps_session_full_step(s, &graph);
        if (status == PS_OK) {
            s->device->graph_nodes(s->device, graph, &result.nodes);
            status = a->trace ? PS_OK : trace_step(s, tracer, 0);
            result.operations = tracer->operations;
        }
    }
    if (status == PS_OK && first) {
        if (a->json) {
            status = print_json(s, &result, tracer);
        } else {
            print_text(s, &result, tracer);
        }
    }
    free(tracer);
    ps_session_close(s);
    return status;
}

/* ---- every level and precision ---- */

/* The median step, launches and peak memory at one of them; *served 0 when the device or the shapes are not for it, and the message
 * says why. */
static enum ps_status time_level(const struct arguments *a, const struct ps_config *config, struct result *r, size_t *peak,
                                 int *served)
{
    struct ps_session *s;
    enum ps_status status = ps_session_open(config, &(struct ps_session_options){.device = a->device, .training = 1}, &s);
    *served = status == PS_OK;
    if (status != PS_OK) {
        return status == PS_USAGE || status == PS_DEVICE ? PS_OK : status;
    }
    ps_session_warn_threads(s, "bench");
    struct ps_graph *graph;
    status = ps_session_initialise(s);
    if (status == PS_OK) {
        status = time_steps(s, (int64_t)a->steps, COMPARED_SECONDS, r);
    }
    if (status == PS_OK) {
        status = ps_session_full_step(s, &graph);
    }
    if (status == PS_OK) {
        s->device->graph_nodes(s->device, graph, &r->nodes);
        *peak = s->device->counters.peak_bytes;
    }
    ps_session_close(s);
    return status;
}

static enum ps_status compare(const struct arguments *a, struct ps_config *config)
{
    static const enum ps_fusion levels[] = {PS_FUSION_NONE, PS_FUSION_GEMM, PS_FUSION_LAYER};
    static const char *const level_names[] = {"none", "gemm", "layer"};
    static const enum ps_precision precisions[] = {PS_FP32, PS_TF32, PS_PRECISION_BF16, PS_FP16};
    json_t *rows = json_array();
    int any = 0;
    if (!a->json) {
        printf("%-10s %-6s %10s %10s %10s %10s %6s %8s %10s\n", "precision", "level", "ms/step", "min", "max", "processor", "steps",
               "kernels", "peak MiB");
    }
    for (size_t i = 0; i < 3 * sizeof precisions / sizeof *precisions; i++) {
        struct result r = {0};
        size_t peak = 0;
        int served;
        const char *precision = ps_precision_name(precisions[i / 3]), *level = level_names[i % 3];
        config->runtime.precision = precisions[i / 3];
        config->runtime.fusion = levels[i % 3];
        enum ps_status status = time_level(a, config, &r, &peak, &served);
        if (status != PS_OK) {
            json_decref(rows);
            return status;
        }
        any |= served;
        if (a->json) {
            json_array_append_new(
                rows, served
                          ? json_pack("{s:s, s:s, s:f, s:f, s:f, s:f, s:I, s:i, s:I}", "precision", precision, "level", level,
                                      "median", r.median, "min", r.least, "max", r.most, "processor", r.processor, "steps",
                                      (json_int_t)r.steps, "kernels", r.nodes.kernels, "peak_device_bytes", (json_int_t)peak)
                          : json_pack("{s:s, s:s, s:s}", "precision", precision, "level", level, "not_served", ps_error_message()));
        } else if (served) {
            char kernels[16] = "-"; /* the CPU has none */
            if (r.nodes.kernels > 0) {
                snprintf(kernels, sizeof kernels, "%d", r.nodes.kernels);
            }
            printf("%-10s %-6s %10.4f %10.4f %10.4f %10.4f %6lld %8s %10.1f\n", precision, level, r.median, r.least, r.most,
                   r.processor, (long long)r.steps, kernels, (double)peak / 0x1p20);
        } else {
            printf("%-10s %-6s not served: %s\n", precision, level, ps_error_message());
        }
        fflush(stdout);
    }
    json_t *root = json_pack("{s:s, s:o}", "config", a->config, "levels", rows);
    char *text = a->json && root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (a->json && !text) {
        return ps_fail(PS_USAGE, "--json: no memory");
    }
    if (text) {
        puts(text);
        free(text);
    }
    return any ? PS_OK : PS_USAGE; /* the message of the last stands */
}

int main(int argc, char **argv)
{
    ps_streams_open();
    ps_wait_passively(argv);
    struct arguments arguments = {0};
    struct ps_config config;
    struct ps_ranks *ranks;
    enum ps_status status = ps_ranks_open(&ranks);
    if (status == PS_OK) {
        arguments.several = ranks != NULL;
        status = ps_ranks_check(ranks, parse(argc, argv, &arguments));
    }
    if (status == PS_OK) {
        status = ps_ranks_load_config(ranks, arguments.config, arguments.overrides.text, arguments.overrides.n, &config);
    }
    if (status == PS_OK) {
        status = arguments.tune ? tune(&arguments, &config) : PS_OK;
        if (status == PS_OK) {
            status = arguments.compare ? compare(&arguments, &config) : bench(&arguments, &config, ranks);
        }
        ps_config_free(&config);
    }
    if (status == PS_OK) {
        status = ps_stdout_flush(PS_USAGE);
    }
    if (status != PS_OK) {
        ps_ranks_say(ranks, "bench");
    }
    ps_ranks_close(ranks, status);
    return (int)status;
}
