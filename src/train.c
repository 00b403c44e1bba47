/* train: a config in, a trained and tested model out. */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/files.h"
#include "data/panel.h"
#include "src/clock.h"
#include "src/options.h"
#include "src/passive.h"
#include "src/together.h"
#include "src/version.h"
#include "src/writer.h"

enum { PATH_ROOM = 4096 };

static volatile sig_atomic_t stop_signal;

static void on_signal(int number)
{
    stop_signal = number;
}

struct arguments {
    const char *config, *device, *run_dir, *init_from;
    struct ps_overrides overrides;
    int resume, overwrite, new_head;
};

/* Where a run keeps what. */
struct run {
    char dir[PATH_ROOM], lock_file[PATH_ROOM + 32], config[PATH_ROOM + 32], metrics[PATH_ROOM + 32], last[PS_KEPT_PATH],
        best[PS_KEPT_PATH], test[PATH_ROOM + 32];
    int lock;   /* on lock_file, for as long as the process lives; -1: not yet, or there are no locks */
    int warned; /* that there are none */
    struct ps_kept kept;
    struct ps_writer *writer;
    int best_written; /* the best weights are in best.h5, or on their way there */
    int last_written; /* last.h5 is, or will be, of this step and epoch */
    uint64_t last_step, last_epoch;
    char from[PS_KEPT_PATH];    /* the checkpoint that --init-from names */
    char resumed[PS_KEPT_PATH]; /* the checkpoint that it goes on from; "": a new run */
    uint64_t recorded;          /* epochs whose validation is in metrics.jsonl, but for what `record` holds */
    struct ps_progress *progress;
    struct ps_epoch_record record; /* of the last epoch, while it is not told */
    int untold;
    struct ps_naive naive; /* forecasts of the test windows, once the last epoch is done */
    int stopped;           /* the signal that ended it before its time; 0: none. One that comes later no longer matters */
};

static const char usage[] =
    "usage: train CONFIG [--set section.key=value]... [--device auto|cpu|cuda[:N]] [--run-dir DIR] [--resume] [--overwrite]\n"
    "             [--init-from CHECKPOINT|RUN [--new-head]]\n"
    "\n"
    "  --set section.key=value  override a key of the config; may be repeated\n"
    "  --device DEVICE          override runtime.device\n"
    "  --run-dir DIR            where the run is kept (default: runs/ and the config's name)\n"
    "  --resume                 go on from the run's last checkpoint\n"
    "  --overwrite              discard the run that is there\n"
    "  --init-from CHECKPOINT   begin with its weights, or a run's best; all else begins anew\n"
    "  --new-head               but with a head of the seed's\n"
    "\n"
    "exit codes: 0 done, 2 usage or config, 3 data, 4 checkpoint, 5 device, 128+n after signal n with a checkpoint written\n";

static enum ps_status parse(int argc, char **argv, struct arguments *a)
{
    const struct ps_option options[] = {{"set", .overrides = &a->overrides},   {"device", .text = &a->device},
                                        {"run-dir", .text = &a->run_dir},      {"resume", .given = &a->resume},
                                        {"overwrite", .given = &a->overwrite}, {"init-from", .text = &a->init_from},
                                        {"new-head", .given = &a->new_head},   {NULL}};
    PS_TRY(ps_options_read(argc, argv, options, 1, "one CONFIG", usage));
    a->config = argv[argc - 1];
    if (a->run_dir && !*a->run_dir) {
        return ps_fail(PS_USAGE, "--run-dir: \"\" is no folder: name one, or leave the option out");
    }
    if (a->resume && a->overwrite) {
        return ps_fail(PS_USAGE, "--resume and --overwrite exclude each other");
    }
    if (a->resume && a->init_from) {
        return ps_fail(PS_USAGE, "--resume and --init-from exclude each other: a run that goes on has its weights");
    }
    if (a->new_head && !a->init_from) {
        return ps_fail(PS_USAGE, "--new-head: goes with --init-from: without it every weight is new");
    }
    return PS_OK;
}

static enum ps_status run_paths(const struct arguments *a, struct run *run)
{
    if (a->run_dir) {
        snprintf(run->dir, sizeof run->dir, "%s", a->run_dir);
    } else {
        const char *slash = strrchr(a->config, '/'), *name = slash ? slash + 1 : a->config, *dot = strrchr(name, '.');
        int length = (int)(dot ? dot - name : (long)strlen(name));
        if ((int)strspn(name, ".") >= length) { /* runs/ itself, or what holds it */
            return ps_fail(PS_USAGE, "%s: the run's folder takes its name from the config, which has none: give --run-dir",
                           a->config);
        }
        snprintf(run->dir, sizeof run->dir, "runs/%.*s", length, name);
    }
    if (strlen(run->dir) + 64 > PATH_ROOM) {
        return ps_fail(PS_USAGE, "--run-dir: the path is too long");
    }
    snprintf(run->lock_file, sizeof run->lock_file, "%s/lock", run->dir);
    snprintf(run->config, sizeof run->config, "%s/config.yaml", run->dir);
    snprintf(run->metrics, sizeof run->metrics, "%s/metrics.jsonl", run->dir);
    snprintf(run->test, sizeof run->test, "%s/test.json", run->dir);
    snprintf(run->kept.folder, sizeof run->kept.folder, "%s/checkpoints", run->dir);
    ps_kept_last(&run->kept, run->last);
    ps_kept_best(&run->kept, run->best);
    return PS_OK;
}

/* Takes the folder for this process, once there is one, and refuses one that holds a run, unless told what to do with it. */
static enum ps_status run_take(const struct arguments *a, struct run *run)
{
    if (run->lock < 0 && access(run->dir, F_OK) == 0) {
        enum ps_status status = ps_file_lock(PS_USAGE, run->lock_file, &run->lock);
        if (status == PS_UNSUPPORTED && !run->warned) {
            fprintf(stderr, "train: warning: %s: nothing keeps a second process out of the folder\n", ps_error_message());
            run->warned = 1;
        } else if (status != PS_UNSUPPORTED) {
            PS_TRY(status);
        }
    }
    int holds = ps_kept_any(&run->kept);
    const char *const files[] = {run->config, run->best, run->metrics, run->test};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        holds |= access(files[i], F_OK) == 0;
    }
    if (holds && !a->resume && !a->overwrite) {
        return ps_fail(PS_USAGE, "%s already holds a run: give --resume to go on, --overwrite to discard it, or another --run-dir",
                       run->dir);
    }
    if (a->resume && !ps_kept_any(&run->kept)) {
        return ps_fail(PS_CHECKPOINT, "%s: no such file: nothing to resume: train %s", run->last,
                       holds ? "with --overwrite" : "without --resume");
    }
    return PS_OK;
}

/* One line that names the first few. */
static void warn_constant(const struct ps_session *s)
{
    const char *or_unobserved = s->series->missing > 0 ? ", or not observed," : "";
    if (s->scaler.panel) {
        fprintf(stderr,
                "train: warning: %s: %d series constant%s in the rows that they are scaled by: %s: a standard deviation of 1 "
                "is taken\n",
                s->series->path, s->scaler.constant, or_unobserved, ps_panel_some(s->scaler.panel, s->scaler.is_constant).text);
        return;
    }
    char names[128] = "";
    int found = 0;
    for (int64_t c = 0; c < s->series->channels && found < 4; c++) {
        if (s->scaler.is_constant[c]) {
            size_t used = strlen(names);
            snprintf(names + used, sizeof names - used, "%schannel %lld", found++ ? ", " : "", (long long)c);
        }
    }
    fprintf(stderr, "train: warning: %s: constant%s in the training rows: %s%s: a standard deviation of 1 is taken\n",
            s->series->path, or_unobserved, names, found < s->scaler.constant ? ", ..." : "");
}

/* Series of a panel that training does not see, in one line that names the first few. */
static void warn_left_out(const struct ps_session *s)
{
    const struct ps_panel *panel = s->series->panel;
    const int64_t left_out = panel ? panel->series - s->splits.train_series : 0;
    if (left_out > 0) {
        fprintf(stderr,
                "train: warning: %s: %lld of %lld series have too few training rows for a window, and are left out of "
                "training: %s\n",
                s->series->path, (long long)left_out, (long long)panel->series, ps_panel_some(panel, s->splits.left_out).text);
    }
}

/* Whether this process writes the run, and speaks of it. */
static int is_first(const struct ps_session *s)
{
    return ps_ranks_rank(s->ranks) == 0;
}

/* The last epoch's line, printed and in metrics.jsonl. */
static enum ps_status tell_epoch(struct ps_session *s, void *argument)
{
    struct run *run = argument;
    struct ps_epoch_record *const record = &run->record;
    if (!run->untold) {
        return PS_OK;
    }
    PS_TRY(
        s->device->download(s->device, PS_COPY, &record->lr, s->optimizer.learning_rates + (record->step - 1), sizeof record->lr));
    run->untold = 0;
    ps_progress_epoch(run->progress, record);
    return ps_ranks_check(s->ranks, is_first(s) ? ps_metrics_append(run->metrics, record) : PS_OK);
}

/* Puts the present state on its way to the disk, and the best weights if they are new. Its epochs have been told before. */
static enum ps_status write_checkpoints(struct ps_session *s, void *argument)
{
    struct run *run = argument;
    PS_TRY(tell_epoch(s, run));
    if (run->last_written && run->last_step == s->now.step && run->last_epoch == s->epoch) {
        return PS_OK;
    }
    PS_TRY(ps_session_gather_states(s));
    PS_TRY(ps_ranks_check(s->ranks, run->writer ? ps_writer_submit(run->writer, s->best_holds > 0 && !run->best_written) : PS_OK));
    run->best_written = 1;
    run->last_written = 1;
    run->last_step = s->now.step;
    run->last_epoch = s->epoch;
    return PS_OK;
}

/* The folder and its parents, no leftovers of a crash or of a discarded run. */
static enum ps_status run_begin(const struct arguments *a, struct run *run, struct ps_session *s)
{
    char parent[PATH_ROOM];
    for (size_t i = 1; run->dir[i]; i++) {
        if (run->dir[i] == '/') {
            snprintf(parent, sizeof parent, "%.*s", (int)i, run->dir);
            PS_TRY(ps_folder_make(PS_USAGE, parent));
        }
    }
    PS_TRY(ps_folder_make(PS_USAGE, run->dir));
    PS_TRY(run_take(a, run)); /* another process may have come first */
    PS_TRY(ps_folder_make(PS_USAGE, run->kept.folder));
    const char *const written[] = {run->config, run->metrics, run->test, run->last, run->best};
    for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
        PS_TRY(ps_file_sweep(PS_USAGE, written[i]));
    }
    if (a->overwrite) {
        PS_TRY(ps_kept_discard(&run->kept));
        const char *const old[] = {run->metrics, run->test, run->config};
        for (size_t i = 0; i < sizeof old / sizeof *old; i++) {
            PS_TRY(ps_file_remove(PS_USAGE, old[i]));
        }
    }
    return ps_writer_open(s, &run->kept, &run->writer);
}

static enum ps_status write_config(const struct ps_session *s, const struct run *run)
{
    char *text;
    PS_TRY(ps_config_text(s->config, &text));
    enum ps_status status = ps_file_replace(PS_USAGE, run->config, text, strlen(text));
    free(text);
    return status;
}

/* All that was submitted is on the disk. */
static enum ps_status drain(const struct ps_session *s, const struct run *run)
{
    return ps_ranks_check(s->ranks, run->writer ? ps_writer_drain(run->writer) : PS_OK);
}

/* One line, when the checkpoint is of another program version, other kernel sources or other kernels: what differs. */
static void warn_another_program(const struct ps_session *s, const char *path, const struct ps_checkpoint *c)
{
    const struct {
        const char *what, *here, *there;
    } parts[] = {{"version", ps_version, c->program_version},
                 {"kernel sources", ps_kernel_sources, c->kernel_sources},
                 {"kernels", ps_model_kernels(s->model), c->kernels}};
    char here[512] = "", there[512] = "";
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const char *was = parts[i].there ? parts[i].there : "unknown", *comma = *here ? ", " : "";
        if (strcmp(parts[i].here, was) != 0) {
            size_t n = strlen(here), m = strlen(there);
            snprintf(here + n, sizeof here - n, "%s%s %.127s", comma, parts[i].what, parts[i].here);
            snprintf(there + m, sizeof there - m, "%s%s %.127s", comma, parts[i].what, was);
        }
    }
    for (char *t = there; *t; t++) { /* a file may say anything, a message is one line */
        *t = (unsigned char)*t < ' ' || *t == 0x7f ? '?' : *t;
    }
    if (*here) {
        fprintf(
            stderr,
            "train: warning: %s was written with %s, this program has %s: the run goes on, its bits may differ from those of an "
            "uninterrupted one\n",
            path, there, here);
    }
}

/* One line, when as many ranks did not train it. */
static void warn_other_ranks(const struct ps_session *s, const char *path, const struct ps_checkpoint *c)
{
    const int there = c->ranks ? (int)c->ranks : 1, here = ps_ranks_size(s->ranks);
    if (there != here) {
        fprintf(stderr,
                "train: warning: %s was trained by %d rank%s, here %s %d: the run goes on, its bits may differ from here on\n",
                path, there, there == 1 ? "" : "s", here == 1 ? "is" : "are", here);
    }
}

static enum ps_status resume(struct ps_session *s, struct run *run)
{
    struct ps_resumption r;
    PS_TRY(ps_kept_load(&run->kept, &r));
    if (*r.passed) {
        fprintf(stderr, "train: warning: %s: going on from %s, of step %llu\n", r.passed, r.path, (unsigned long long)r.last.step);
    }
    if (*r.best_passed && r.last.best_epoch > 0) {
        fprintf(stderr, "train: warning: %s: the weights of epoch %llu were found elsewhere, and will be written there again\n",
                r.best_passed, (unsigned long long)r.last.best_epoch);
    }
    enum ps_status status = ps_session_restore(s, &r.last);
    if (status == PS_OK && s->best_epoch > 0) {
        status = ps_session_load_weights(s, &r.best, 1);
        run->best_written = run->kept.best_known && run->kept.best_epoch == s->best_holds;
    }
    if (status == PS_OK) {
        warn_other_ranks(s, r.path, &r.last);
        warn_another_program(s, r.path, &r.last);
        snprintf(run->resumed, sizeof run->resumed, "%s", r.path);
    }
    ps_resumption_free(&r);
    PS_TRY(status);
    run->recorded = s->epoch;
    return ps_metrics_truncate(run->metrics, s->epoch);
}

/* The weights of --init-from; one line where they computed something else there. */
static enum ps_status initialise_from(struct ps_session *s, const struct arguments *a, const struct ps_checkpoint *c)
{
    struct ps_config config;
    char text[512];
    PS_TRY(ps_config_parse_saved(c->config, a->init_from, &config));
    ps_config_differences(&config, s->config, text, sizeof text);
    ps_config_free(&config);
    enum ps_status status = ps_session_initialise_from(s, c, a->new_head);
    if (status != PS_OK) {
        return ps_fail(status, "%s: %s", a->init_from, ps_error_message());
    }
    if (asprintf(&s->init_from, "%s, SHA-256 %s, epoch %llu%s", a->init_from, c->digest, (unsigned long long)c->epoch,
                 a->new_head ? ", with a new head" : "") < 0) {
        s->init_from = NULL;
        return ps_fail(PS_DEVICE, "no memory for the session");
    }
    if (*text) {
        fprintf(stderr, "train: warning: %s: its model and this one differ: %s\n", a->init_from, text);
    }
    return PS_OK;
}

/* What epochs are compared by. */
static double monitored(const struct ps_config *c, const struct ps_score *score)
{
    const int loss = c->train.monitor == PS_MONITOR_LOSS && c->train.loss != PS_LOSS_MSE;
    return loss ? score->loss : c->train.monitor == PS_MONITOR_MAE ? score->mae : score->mse;
}

static const char *monitored_name(const struct ps_config *c)
{
    const int loss = c->train.monitor == PS_MONITOR_LOSS;
    return c->train.monitor == PS_MONITOR_MAE || (loss && c->train.loss == PS_LOSS_MAE)   ? "MAE"
           : c->train.monitor == PS_MONITOR_MSE || (loss && c->train.loss == PS_LOSS_MSE) ? "MSE"
                                                                                          : "loss";
}

/* What --resume, --init-from or the seed say, on every rank, and the run's folder. A new run's first checkpoint comes before its
 * config.yaml: a folder that holds a run can be resumed at every moment. */
static enum ps_status begin(struct ps_session *s, struct run *run, const struct arguments *a, const struct ps_checkpoint *first)
{
    enum ps_status status = PS_OK;
    if (is_first(s)) {
        status = a->resume ? resume(s, run) : a->init_from ? initialise_from(s, a, first) : ps_session_initialise(s);
        status = status == PS_OK ? run_begin(a, run, s) : status;
    }
    PS_TRY(ps_ranks_check(s->ranks, status));
    PS_TRY(ps_session_spread(s));
    if (!a->resume) {
        PS_TRY(write_checkpoints(s, run));
        PS_TRY(ps_ranks_check(s->ranks, ps_session_capture(s))); /* while they are written */
        PS_TRY(drain(s, run));
    }
    return ps_ranks_check(s->ranks, is_first(s) ? write_config(s, run) : PS_OK);
}

/* Validation after an epoch, of which `windows` were trained in `seconds`: record, best weights, patience. Of short steps the epoch
 * is told when the next one's first ones are queued, so that the device need not wait for the disk. */
static enum ps_status after_epoch(struct ps_session *s, struct run *run, double loss, int64_t windows, double seconds)
{
    struct ps_accuracy validation;
    PS_TRY(ps_session_score(s, PS_VALIDATION, &validation));
    if (validation.all.windows == 0) {
        return ps_session_reopen_epoch(s); /* a signal: validated when the run is resumed */
    }
    const double now = monitored(s->config, &validation.all);
    if (now < s->best_validation) {
        s->best_validation = now;
        s->best_epoch = s->epoch;
        s->epochs_since_best = 0;
        run->best_written = 0;
        PS_TRY(ps_session_keep_best(s));
    } else {
        s->epochs_since_best++;
    }
    run->record = (struct ps_epoch_record){.epoch = s->epoch,
                                           .step = s->now.step,
                                           .train_loss = loss,
                                           .val_mse = validation.all.mse,
                                           .val_mae = validation.all.mae,
                                           .loss = s->config->train.loss,
                                           .val_loss = validation.all.loss,
                                           .seconds = seconds,
                                           .windows_per_second = windows > 0 ? (double)windows / seconds : NAN,
                                           .skipped = s->ended.skipped};
    run->untold = 1;
    run->recorded = s->epoch;
    return s->graph_steps > 1 ? PS_OK : tell_epoch(s, run);
}

/* Data or device failed: what was reached is written, where the device still gives it. The error stays the one that is told. */
static enum ps_status save_and_fail(struct ps_session *s, struct run *run, enum ps_status status)
{
    char cause[1024];
    snprintf(cause, sizeof cause, "%s%s", ps_error_message(),
             status == PS_DEVICE ? " (bench --trace names the operation and its shapes)" : "");
    enum ps_status saved = ps_session_recall(s);
    if (saved == PS_OK && s->epoch > run->recorded) { /* its validation failed */
        saved = ps_session_reopen_epoch(s);
    }
    if (saved == PS_OK) {
        saved = write_checkpoints(s, run);
    }
    if (saved == PS_OK) {
        saved = drain(s, run);
    }
    if (saved != PS_OK) {
        return ps_ranks_check(s->ranks, ps_fail(status, "%s; the last checkpoint is %s", cause, run->last));
    }
    return ps_ranks_check(s->ranks, ps_fail(status, "%s; step %llu is kept in %s: go on with --resume", cause,
                                            (unsigned long long)s->now.step, run->last));
}

/* Whether no epoch is left to train: the last one is done, or patience ended. */
static int is_over(const struct ps_session *s)
{
    const int64_t patience = s->config->train.patience;
    return s->epoch >= (uint64_t)s->config->train.epochs || (patience && s->epochs_since_best >= (uint64_t)patience);
}

/* Where a resumed run goes on, or that it was done. */
static void tell_resumption(const struct ps_session *s, const struct run *run)
{
    const long long epoch = (long long)s->epoch, epochs = (long long)s->config->train.epochs;
    if (!is_over(s)) {
        printf("resumed from %s: in epoch %lld/%lld, %lld of its %lld steps done\n", run->resumed, epoch + 1, epochs,
               (long long)s->now.step - epoch * (long long)s->steps_per_epoch, (long long)s->steps_per_epoch);
    } else if (access(run->test, F_OK) == 0) {
        printf("resumed from %s: the run was finished, after epoch %lld/%lld%s: its weights are tested again\n", run->resumed,
               epoch, epochs, epoch < epochs ? " (train.patience)" : "");
    } else {
        printf("resumed from %s: after epoch %lld/%lld%s, the test is left\n", run->resumed, epoch, epochs,
               epoch < epochs ? " (train.patience)" : "");
    }
}

/* Epochs until the last, the patience's end or a signal. */
static enum ps_status train_epochs(struct ps_session *s, struct run *run)
{
    const struct ps_config *c = s->config;
    struct ps_epoch_watch watch = {.progress = run->progress,
                                   .checkpoint_every = c->train.checkpoint_every,
                                   .begun = tell_epoch,
                                   .checkpoint = write_checkpoints,
                                   .argument = run};
    while (!is_over(s) && !ps_session_stopped(s)) {
        int finished;
        int64_t windows = s->train_windows - (int64_t)s->now.cursor;
        double loss, begin = ps_seconds();
        PS_TRY(ps_session_train_epoch(s, &watch, &finished, &loss));
        if (finished) {
            PS_TRY(after_epoch(s, run, loss, windows, ps_seconds() - begin));
            if (!c->train.checkpoint_every || s->now.step % (uint64_t)c->train.checkpoint_every == 0) {
                PS_TRY(write_checkpoints(s, run));
            }
        }
    }
    PS_TRY(write_checkpoints(s, run));
    enum ps_status status = PS_OK;
    if (is_first(s) && !ps_session_stopped(s) && c->train.objective == PS_OBJECTIVE_FORECAST) { /* while they are written */
        status = ps_session_naive(s, PS_TEST, &run->naive);
    }
    PS_TRY(drain(s, run));
    return ps_ranks_check(s->ranks, status);
}

/* The best weights on the test split, beside the naive forecasts, into test.json and a line. */
static enum ps_status test(struct ps_session *s, struct run *run)
{
    uint64_t epoch = s->best_holds;
    if (epoch > 0) {
        PS_TRY(ps_session_take_best(s));
        if (epoch != s->best_epoch && is_first(s)) {
            fprintf(stderr, "train: warning: the weights of epoch %llu are lost: those of epoch %llu, in %s, are tested\n",
                    (unsigned long long)s->best_epoch, (unsigned long long)epoch, run->best);
        }
    } else {
        epoch = s->epoch;
        if (is_first(s)) {
            fprintf(stderr, "train: warning: no epoch's validation %s was finite: the last weights are tested; lower optim.lr\n",
                    monitored_name(s->config));
        }
    }
    struct ps_score validation = {0};
    PS_TRY(ps_ranks_check(s->ranks, is_first(s) ? ps_metrics_validation(run->metrics, epoch, &validation)
                                                : PS_OK)); /* first: a signal counts until there are scores */
    struct ps_accuracy accuracy;
    PS_TRY(ps_session_score(s, PS_TEST, &accuracy));
    if (accuracy.all.windows == 0) {
        run->stopped = ps_session_stopped(s); /* tested when the run is resumed */
        return PS_OK;
    }
    if (!is_first(s)) {
        return PS_OK;
    }
    struct ps_test_record record = {.loss = ps_config_loss(s->config),
                                    .all = accuracy.all,
                                    .full_batches = accuracy.full_batches,
                                    .epoch = epoch,
                                    .step = epoch * (uint64_t)s->steps_per_epoch,
                                    .val_mse = validation.mse,
                                    .val_mae = validation.mae,
                                    .val_loss = validation.loss};
    char full[96] = "", loss[PS_LOSS_TEXT];
    ps_loss_text(&record.loss, &accuracy.all, loss);
    const char *apart = *loss ? "  " : "";
    if (s->config->train.objective == PS_OBJECTIVE_MASKED) {
        printf("test  mse %.4f  mae %.4f%s%s of masked patches  weights of epoch %llu\n", accuracy.all.mse, accuracy.all.mae, apart,
               loss, (unsigned long long)epoch);
        return ps_test_write(run->test, &record);
    }
    const struct ps_naive *const n = &run->naive;
    const int64_t count = accuracy.all.windows;
    record.repeat_last = (struct ps_score){.mse = n->repeat_mse, .mae = n->repeat_mae, .windows = count};
    record.seasonal_naive =
        (struct ps_score){.mse = n->seasonal_mse, .mae = n->seasonal_mae, .windows = isnan(n->seasonal_mse) ? 0 : count};
    if (accuracy.full_batches.windows > 0) {
        snprintf(full, sizeof full, "full batches: mse %.4f  mae %.4f; ", accuracy.full_batches.mse, accuracy.full_batches.mae);
    }
    printf("test  mse %.4f  mae %.4f  %s%s(%srepeat-last: mse %.4f  mae %.4f)  weights of epoch %llu\n", accuracy.all.mse,
           accuracy.all.mae, loss, apart, full, record.repeat_last.mse, record.repeat_last.mae, (unsigned long long)epoch);
    return ps_test_write(run->test, &record);
}

/* Opens the session and, on every rank alike, what the run begins with. */
static enum ps_status open_run(struct arguments *a, const struct ps_config *config, struct ps_ranks *ranks, struct run *run,
                               struct ps_session **session)
{
    const int first_rank = ps_ranks_rank(ranks) == 0;
    struct ps_checkpoint first = {0};
    enum ps_status status = run_paths(a, run);
    status = status == PS_OK && first_rank ? run_take(a, run) : status;
    if (status == PS_OK && first_rank && a->init_from) { /* before there are threads and a device: a child looks at it */
        status = ps_kept_named(&a->init_from, run->from);
        status = status == PS_OK ? ps_checkpoint_load(a->init_from, &first) : status;
    }
    status = ps_ranks_check(ranks, status);
    if (status == PS_OK) {
        status = ps_session_open(
            config,
            &(struct ps_session_options){
                .device = a->device, .training = 1, .scored = 1 << PS_TRAIN | 1 << PS_VALIDATION | 1 << PS_TEST, .ranks = ranks},
            session);
        status = status != PS_OK && ps_ranks_known(ranks) ? status : ps_ranks_check(ranks, status);
    }
    struct ps_session *s = *session;
    status = status == PS_OK ? ps_session_check_same(s) : status;
    if (status == PS_OK) {
        if (first_rank) {
            ps_session_warn_threads(s, "train");
            if (config->train.freeze == PS_FREEZE_ENCODER && !a->init_from && !a->resume) {
                fprintf(stderr, "train: warning: train.freeze: encoder without --init-from: the encoder that is frozen has the "
                                "seed's weights\n");
            }
            if (s->scaler.constant) {
                warn_constant(s);
            }
            warn_left_out(s);
        }
        s->stop = &stop_signal;
        status = begin(s, run, a, &first);
    }
    ps_checkpoint_free(&first);
    return status;
}

static void tell_begin(const struct ps_session *s, const struct run *run)
{
    char description[PS_SESSION_TEXT], ranks[32] = "";
    ps_session_describe(s, description);
    if (s->ranks) {
        snprintf(ranks, sizeof ranks, "%d ranks of ", ps_ranks_size(s->ranks));
    }
    const struct ps_panel *panel = s->series->panel;
    printf("%s: %lld %s, %lld + %lld + %lld windows, %lld steps an epoch; %s%s\n", s->series->path,
           (long long)(panel ? panel->series : s->series->channels), panel ? "series" : "channels",
           (long long)s->splits.count[PS_TRAIN], (long long)s->splits.count[PS_VALIDATION], (long long)s->splits.count[PS_TEST],
           (long long)s->steps_per_epoch, ranks, description);
    if (*run->resumed) {
        tell_resumption(s, run);
    }
    fflush(stdout);
}

static enum ps_status train(struct arguments *a, const struct ps_config *config, struct ps_ranks *ranks, struct run *run)
{
    run->kept.keep_last = config->train.keep_last;
    run->kept.keep_best = config->train.keep_best;
    struct ps_session *s = NULL;
    enum ps_status status = open_run(a, config, ranks, run, &s);
    if (status == PS_OK) {
        if (is_first(s)) {
            tell_begin(s, run);
            run->progress = ps_progress_open(config->train.epochs, s->steps_per_epoch);
        }
        status = train_epochs(s, run);
        if ((status == PS_DATA || status == PS_DEVICE) && ps_ranks_known(ranks)) {
            status = save_and_fail(s, run, status);
        }
        ps_progress_close(run->progress);
    }
    run->stopped = s ? ps_session_stopped(s) : 0;
    if (status == PS_OK && !run->stopped) {
        status = test(s, run);
    }
    ps_writer_close(run->writer);
    if (status == PS_OK && run->stopped && is_first(s)) {
        fprintf(stderr, "train: signal %d: checkpoint written to %s: go on with --resume\n", run->stopped, run->last);
    }
    ps_session_close(s);
    return status;
}

int main(int argc, char **argv)
{
    ps_streams_open();
    ps_wait_passively(argv);
    struct arguments arguments = {0};
    struct ps_config config;
    struct ps_ranks *ranks;
    struct run run = {.lock = -1};
    const struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL); /* before ranks meet, which takes seconds: no signal to one of them is lost */
    enum ps_status status = ps_ranks_open(&ranks);
    if (status == PS_OK) {
        status = ps_ranks_check(ranks, parse(argc, argv, &arguments));
    }
    if (status == PS_OK) {
        status = ps_ranks_load_config(ranks, arguments.config, arguments.overrides.text, arguments.overrides.n, &config);
        if (status == PS_OK) {
            status = train(&arguments, &config, ranks, &run);
            ps_file_unlock(run.lock);
            ps_config_free(&config);
        }
    }
    if (status != PS_OK) {
        ps_ranks_say(ranks, "train");
    }
    ps_ranks_close(ranks, status);
    return status != PS_OK ? (int)status : run.stopped ? 128 + run.stopped : 0;
}
