/* What docs/reliability.md promises of a run, tested on the programs: a fault at every call to the system, kill -9 at random
 * moments, two processes on one folder, a full disk, a read-only folder, a clock that jumps.
 *
 * PS_TEST_SEED: of the random moments (default: the time). PS_TEST_FULL=1: every kind of fault at every call, 200 kills. */
#include "tests/programs.h"
#include "tests/suite.h"

#include <dirent.h>
#include <math.h>
#include <sched.h>
#include <sys/mount.h>

enum { EPOCHS = 2, STEPS = 6 /* an epoch */ };

static int full;
static struct path whole, trace, seen; /* a run that nothing disturbed; calls of a disturbed one; last.h5 of each step */
static double whole_seconds;           /* from its start to its end */

static const char config_text[] = "data:\n"
                                  "  path: series.h5\n"
                                  "model:\n"
                                  "  seq_len: 16\n"
                                  "  pred_len: 4\n"
                                  "  patch_len: 4\n"
                                  "  stride: 4\n"
                                  "  padding: none\n" /* or its weights could not be exported */
                                  "  norm: batch\n"   /* running statistics are a part of what is kept */
                                  "  d_model: 8\n"
                                  "  n_heads: 2\n"
                                  "  d_ff: 8\n"
                                  "  n_layers: 1\n"
                                  "optim:\n"
                                  "  lr: 1e-2\n"
                                  "  schedule: constant\n"
                                  "train:\n"
                                  "  epochs: 2\n"
                                  "  batch_size: 32\n"
                                  "  checkpoint_every: 2\n"
                                  "runtime:\n"
                                  "  threads: 1\n";

/* ---- what a run that was cut short leaves ---- */

static int count_partial(const char *dir)
{
    static const char *const folders[] = {"", "checkpoints/"};
    int found = 0;
    for (int i = 0; i < 2; i++) {
        struct dirent **entries;
        int n = scandir(in_run(dir, folders[i]).text, &entries, NULL, NULL);
        for (int j = 0; j < n; j++) {
            found += strstr(entries[j]->d_name, ".partial") != NULL;
            free(entries[j]);
        }
        if (n >= 0) {
            free(entries);
        }
    }
    return found;
}

/* Its checkpoints are whole, and last.h5 has the bytes that every run has at that step. */
static void expect_sound(const char *dir, const char *where)
{
    struct path last = in_run(dir, "checkpoints/last.h5"), best = in_run(dir, "checkpoints/best.h5");
    struct ps_checkpoint c;
    if (file_exists(best.text)) {
        ck_assert_msg(ps_checkpoint_load(best.text, &c) == PS_OK, "%s: %s", where, ps_error_message());
        ps_checkpoint_free(&c);
    }
    if (!file_exists(last.text)) {
        ck_assert_msg(!file_exists(best.text) && !file_exists(in_run(dir, "config.yaml").text), "%s: no last.h5", where);
        return;
    }
    ck_assert_msg(ps_checkpoint_load(last.text, &c) == PS_OK, "%s: %s", where, ps_error_message());
    struct path known = path_of("%.400s/last-%llu.h5", seen.text, (unsigned long long)c.step);
    ps_checkpoint_free(&c);
    if (!file_exists(known.text)) {
        size_t size;
        char *bytes = file_read(last.text, &size);
        file_write(known.text, bytes, size);
        free(bytes);
    }
    ck_assert_msg(files_equal(last.text, known.text), "%s: last.h5 and %s differ", where, known.text);
}

/* Starts the run, or goes on with it once there is something to go on from. */
static struct process start_again(const char *dir)
{
    int begun = file_exists(in_run(dir, "checkpoints/last.h5").text);
    return start_train(dir, begun ? ARGS("--resume") : ARGS());
}

/* The run comes to its end, on the bytes of the undisturbed one, and nothing is left lying about. */
static void expect_recovery(const char *dir, const char *where)
{
    struct process p = start_again(dir);
    struct result r = process_end(&p);
    ck_assert_msg(r.code == 0 && !*r.err, "%s: not resumed: exit code %d: %s", where, r.code, r.err);
    result_free(&r);
    ck_assert_msg(count_partial(dir) == 0, "%s: a temporary file is left", where);
    json_decref(expect_metrics(dir, EPOCHS, STEPS));
    expect_same_run(whole.text, dir);
}

/* ---- a fault at every call ---- */

static const struct kind {
    const char *name, *says; /* says NULL: nothing is lost, and nothing said */
    int lasting;
} kinds[] = {{"die", NULL, 0},
             {"eio", "Input/output error", 0},
             {"enospc", "No space left on device", 0},
             {"enospc", "No space left on device", 1}, /* from that call on */
             {"eintr", NULL, 0},
             {"short", NULL, 0}};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* The path of the first call that went wrong; 0 when none did. *named: whether `message` names a path where one did: the thread
 * that writes checkpoints and the run loop may both come to grief. */
static int faulted_path(const char *message, char path[1024], int *named)
{
    char *text = file_read(trace.text, NULL), *rest = text, found[1024], end[16];
    int faults = 0;
    *named = 0;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
        if (sscanf(line, "%*d %*s %1023s %15s", found, end) == 2) {
            snprintf(path, faults++ ? 0 : sizeof found, "%s", found);
            *named |= strstr(message, found) != NULL;
        }
    }
    free(text);
    return faults > 0;
}

static void plan_fault(const struct kind *kind, int n, char text[32])
{
    snprintf(text, 32, "%d%s:%s", n, kind->lasting ? "+" : "", kind->name);
    remove(trace.text);
    setenv("PS_IO_TRACE", trace.text, 1);
    setenv("PS_IO_FAULT", text, 1);
}

static void forget_fault(void)
{
    unsetenv("PS_IO_FAULT");
    unsetenv("PS_IO_TRACE");
}

/* What a program says and returns when call n goes wrong. *calls: how many were made. */
static void expect_said(struct result *r, const struct kind *kind, const char *fault, int *calls, char where[1200])
{
    char path[1024] = "";
    int named, faulted = faulted_path(r->err, path, &named), dies = strcmp(kind->name, "die") == 0;
    char *text = file_read(trace.text, NULL);
    *calls = lines_of(text);
    free(text);
    snprintf(where, 1200, "PS_IO_FAULT=%s at %s", fault, path);
    if (faulted && dies) {
        ck_assert_msg(r->code == -1, "%s: exit code %d: %s", where, r->code, r->err);
    } else if (faulted && kind->says) {
        int warned = r->code == 0 && strncmp(r->err, "train: warning: ", 16) == 0; /* a file that cannot be read, and another can */
        ck_assert_msg((r->code >= 2 && r->code <= 4) || warned, "%s: exit code %d: %s", where, r->code, r->err);
        ck_assert_msg(lines_of(r->err) == 1 && strstr(r->err, kind->says) && named, "%s: file and cause are not in: %s", where,
                      r->err);
    } else {
        ck_assert_msg(r->code == 0 && !*r->err, "%s: exit code %d: %s", where, r->code, r->err);
    }
    result_free(r);
}

/* One run with call n going wrong, from what `dir` holds; then its recovery. 0: the run has no call n. */
static int fault_and_recover(const char *dir, const struct kind *kind, int n)
{
    char fault[32], where[1200];
    plan_fault(kind, n, fault);
    struct process p = start_again(dir);
    forget_fault();
    struct result r = process_end(&p);
    int calls;
    expect_said(&r, kind, fault, &calls, where);
    expect_sound(dir, where);
    expect_recovery(dir, where);
    return calls >= n;
}

static void copy_file(const char *from, const char *to)
{
    size_t size;
    char *bytes = file_read(from, &size);
    file_write(to, bytes, size);
    free(bytes);
}

/* A folder as a crash in the middle of the run leaves it, temporary files and half a line of metrics too. */
static void make_crashed(const char *dir)
{
    static const char *const files[] = {"config.yaml", "metrics.jsonl", "checkpoints/last.h5", "checkpoints/best.h5"};
    static struct path crashed;
    if (!*crashed.text) {
        crashed = new_dir("crashed");
        setenv("PS_IO_FAULT", "60:die", 1);
        struct process p = start_again(crashed.text);
        unsetenv("PS_IO_FAULT");
        struct result r = process_end(&p);
        ck_assert_int_eq(r.code, -1);
        result_free(&r);
    }
    mkdir(dir, 0777);
    mkdir(in_run(dir, "checkpoints").text, 0777);
    for (int i = 0; i < 4; i++) {
        if (file_exists(in_run(crashed.text, files[i]).text)) {
            copy_file(in_run(crashed.text, files[i]).text, in_run(dir, files[i]).text);
        }
    }
    static const char *const left[] = {"checkpoints/best.h5.partial", "checkpoints/last.h5.partial", "config.yaml.partial",
                                       "metrics.jsonl.partial", "test.json.partial"};
    for (int i = 0; i < 5; i++) {
        file_write(in_run(dir, left[i]).text, "half", 4);
    }
    FILE *metrics = fopen(in_run(dir, "metrics.jsonl").text, "a");
    fputs("{\"epoch\":2,\"st", metrics);
    fclose(metrics);
}

/* Call 1, 2, 3, ... of a new run, or of one that is resumed, until it has no such call. In the short form every call goes wrong in
 * one of the ways, in turn. */
START_TEST(fault_at_every_call)
{
    int resumed = _i, runs = 0;
    for (int n = 1, more = 1; more; n++) {
        for (int k = 0; k < KINDS; k++) {
            if (!full && k != n % KINDS) {
                continue;
            }
            struct path dir = new_dir("faulted");
            if (resumed) {
                make_crashed(dir.text);
            }
            more = fault_and_recover(dir.text, &kinds[k], n);
            folder_remove(dir.text);
            runs++;
        }
    }
    printf("faults in %s run: %d, all recovered\n", resumed ? "a resumed" : "a new", runs);
    ck_assert_int_gt(runs, 40);
}
END_TEST

/* What others keep in the folder stays, whatever its name: the run's own files are known. */
START_TEST(foreign_files)
{
    static const char *const names[] = {"notes.partial", "checkpoints/mine.h5.partial", "checkpoints/last-6.h5.partial"};
    struct path dir = new_dir("foreign");
    for (int i = 0; i < 3; i++) {
        expect_done(train(dir.text, i == 0 ? ARGS() : i == 1 ? ARGS("--resume") : ARGS("--overwrite")));
        for (int j = 0; j < 3; j++) {
            struct path path = in_run(dir.text, names[j]);
            ck_assert_msg(i == 0 || file_exists(path.text), "%s was removed", names[j]);
            file_write(path.text, "theirs", 6);
        }
    }
}
END_TEST

/* Programs that write one file, over an old one, or some into a folder. {}: that file, or the folder. */
enum { OUTPUTS = 2 };
static const struct writer {
    const char *program;
    int code;                         /* when they cannot be written */
    const char *outputs[OUTPUTS + 1]; /* behind {}, in the order in which they are written, none longer than the first */
    char *arguments[10];
} writers[] = {{"import_csv", 3, {""}, {"small.csv", "{}", "--overwrite"}},
               {"sample_series", 3, {""}, {"{}", "--hours", "5000", "--channels", "3", "--overwrite"}},
               {"sample_series", 3, {""}, {"{}", "--windows", "600", "--seq-len", "24", "--pred-len", "8", "--overwrite"}},
               {"evaluate", 3, {""}, {"whole/checkpoints/best.h5", "--device", "cpu", "--save-forecasts", "{}", "--overwrite"}},
               {"import_weights", 4, {""}, {"exported", "{}", "--channels", "2", "--overwrite"}},
               {"export_weights", 4, {"/model.safetensors", "/config.json"}, {"whole/checkpoints/best.h5", "{}", "--overwrite"}}};
enum { WRITERS = sizeof writers / sizeof *writers };

static struct path output_of(const struct writer *w, const char *path, int i)
{
    return path_of("%.400s%s", path, w->outputs[i]);
}

static struct path partial_of(const struct writer *w, const char *path, int i)
{
    return path_of("%.400s%s.partial", path, w->outputs[i]);
}

static void write_old(const struct writer *w, const char *path)
{
    if (*w->outputs[0]) {
        mkdir(path, 0777);
    }
    for (int i = 0; w->outputs[i]; i++) {
        file_write(output_of(w, path, i).text, "old", 3);
    }
}

static int partials_left(const struct writer *w, const char *path)
{
    int left = 0;
    for (int i = 0; w->outputs[i]; i++) {
        left += file_exists(partial_of(w, path, i).text);
    }
    return left;
}

/* Each is the old one or as good as it must be, and none is new behind an old one; `all`: all are new. Returns how many are. */
static int expect_whole(const struct writer *w, const char *path, const char *good, int all, const char *where)
{
    int fresh = 0;
    for (int i = 0; w->outputs[i]; i++) {
        struct path output = output_of(w, path, i);
        size_t size;
        char *bytes = file_read(output.text, &size);
        int old = size == 3 && memcmp(bytes, "old", 3) == 0;
        free(bytes);
        ck_assert_msg(old || files_equal(output.text, output_of(w, good, i).text), "%s: half a file, by %s", where, w->program);
        ck_assert_msg((old && !all) || (!old && fresh == i), "%s: %s is %s", where, output.text, old ? "old" : "new");
        fresh += !old;
    }
    return fresh;
}

static void output_arguments(const struct writer *w, const char *path, char *arguments[ARGUMENTS + 1])
{
    memset(arguments, 0, (ARGUMENTS + 1) * sizeof *arguments);
    for (int i = 0; w->arguments[i]; i++) {
        arguments[i] = strcmp(w->arguments[i], "{}") == 0 ? (char *)path : w->arguments[i];
    }
}

static struct result write_output(const struct writer *w, const char *path)
{
    char *arguments[ARGUMENTS + 1];
    output_arguments(w, path, arguments);
    ck_assert_int_eq(chdir(folder.text), 0);
    return run(w->program, arguments);
}

static void expect_written(const struct writer *w, const char *path)
{
    struct result r = write_output(w, path);
    ck_assert_msg(r.code == 0 && !*r.err, "%s: exit code %d: %s", w->program, r.code, r.err);
    result_free(&r);
}

START_TEST(fault_at_every_call_of_an_output)
{
    const struct writer *w = &writers[_i];
    struct path good = path_of("%.400s/good-%d", folder.text, _i), out = path_of("%.400s/out-%d", folder.text, _i);
    int runs = 0;
    expect_written(w, good.text);
    for (int n = 1, more = 1; more; n++) {
        for (int k = 0; k < KINDS; k++) {
            if (!full && k != n % KINDS) {
                continue;
            }
            char fault[32], where[1200];
            int calls;
            write_old(w, out.text);
            plan_fault(&kinds[k], n, fault);
            struct result r = write_output(w, out.text);
            forget_fault();
            int code = r.code;
            expect_said(&r, &kinds[k], fault, &calls, where);
            expect_whole(w, out.text, good.text, code == 0, where);
            ck_assert_msg(code <= 0 || code == w->code || code == 4, "%s: exit code %d", where, code);
            ck_assert_msg(code == -1 || kinds[k].lasting || !partials_left(w, out.text), "%s: a partial file is left", where);
            expect_written(w, out.text);
            expect_whole(w, out.text, good.text, 1, where);
            ck_assert_msg(!partials_left(w, out.text), "%s: a partial file is left the next time", where);
            more = calls >= n;
            runs++;
        }
    }
    printf("faults in %s: %d\n", w->program, runs);
    ck_assert_int_gt(runs, 10);
}
END_TEST

/* ---- killed ---- */

static uint64_t moments; /* state of the random moments */

/* xorshift64*; uniform in [0, 1) */
static double moment(void)
{
    moments ^= moments >> 12;
    moments ^= moments << 25;
    moments ^= moments >> 27;
    return (double)(moments * 0x2545f4914f6cdd1du >> 11) * 0x1p-53;
}

START_TEST(killed)
{
    uint64_t seed = getenv("PS_TEST_SEED") ? strtoull(getenv("PS_TEST_SEED"), NULL, 10) : (uint64_t)time(NULL);
    printf("killed at random moments: PS_TEST_SEED=%llu\n", (unsigned long long)seed);
    fflush(stdout); /* a failure would lose it */
    moments = seed * 2 + 1;
    int wanted = full ? 200 : 10, kills = 0, again = 0, partial = 0, resumes = 0;
    while (resumes < wanted) {
        struct path dir = new_dir("killed");
        int killed = 0;
        for (double go_on = 0; go_on < 0.4; go_on = moment()) { /* some are killed again before they have come to their end */
            struct process p = start_again(dir.text);
            sleep_seconds(whole_seconds * moment());
            kill(p.pid, SIGKILL);
            struct result r = process_end(&p);
            ck_assert_msg(r.code == -1 || (r.code == 0 && !*r.err), "exit code %d: %s", r.code, r.err);
            int ended = r.code == 0;
            result_free(&r);
            if (ended) {
                break;
            }
            kills++;
            again += killed;
            killed = 1;
            partial += count_partial(dir.text) > 0;
            expect_sound(dir.text, "killed");
        }
        if (killed) {
            resumes += file_exists(in_run(dir.text, "checkpoints/last.h5").text);
            expect_recovery(dir.text, "killed");
        }
        folder_remove(dir.text);
    }
    printf("%d kills, %d of them of a run that had been killed before, %d with a temporary file left; %d of %d resumes to the same "
           "bits\n",
           kills, again, partial, resumes, resumes);
}
END_TEST

/* The number of the last call whose line in the trace ends so. */
static int last_call(const char *call, const char *end)
{
    char *text = file_read(trace.text, NULL), *rest = text, name[16], path[1024];
    int number, found = 0;
    for (char *line; (line = strsep(&rest, "\n")) != NULL && sscanf(line, "%d %15s %1023s", &number, name, path) == 3;) {
        size_t length = strlen(path), least = strlen(end);
        found = strcmp(name, call) == 0 && length > least && strcmp(path + length - least, end) == 0 ? number : found;
    }
    free(text);
    return found;
}

/* test.json names the epoch whose weights were scored: they are in best.h5, which says the same. */
static void expect_tested(const char *dir, int epoch)
{
    json_t *test = read_test(dir);
    struct result r = run("evaluate", ARGS(in_run(dir, "checkpoints/best.h5").text, "--device", "cpu", "--json"));
    ck_assert_msg(r.code == 0, "exit code %d: %s", r.code, r.err);
    json_t *again = read_json(r.out);
    ck_assert_msg(same_scores(test, again), "test.json and the scores of best.h5 differ: %s", r.out);
    ck_assert_int_eq((int)number_in(test, "epoch"), epoch);
    json_decref(test);
    json_decref(again);
    result_free(&r);
}

/* Killed after best.h5 of a late epoch and before last.h5, a run may end without coming to that epoch again: with less patience. So
 * large a rate ruins the epochs after the first, and some epochs later a better one comes. */
START_TEST(killed_between_best_and_last)
{
    struct path all = new_dir("noisy"), dir = new_dir("between"), patient = new_dir("patient");
    char *more[] = {"--set", "optim.lr=0.3", "--set", "train.checkpoint_every=0", "--set", NULL, "--set", NULL, NULL, NULL, NULL};
    int best = 0, later = 0;
    struct path seed, epochs, patience;
    for (int i = 1; i <= 20 && !later; i++) {
        seed = path_of("train.seed=%d", i);
        more[5] = seed.text;
        more[7] = "train.epochs=12";
        more[8] = "--overwrite";
        expect_done(train(all.text, more));
        json_t *metrics = read_metrics(all.text);
        double least = HUGE_VAL;
        best = 0;
        for (int epoch = 1; epoch <= 12 && !later; epoch++) {
            double mse = number_in(json_array_get(metrics, (size_t)epoch - 1), "val_mse");
            if (mse < least) {
                later = best && epoch - best >= 3 ? epoch : 0;
                best = later ? best : epoch;
                least = mse;
            }
        }
        json_decref(metrics);
    }
    ck_assert_msg(later > 0, "no run of 20 has a best epoch, two worse ones and a better one");
    epochs = path_of("train.epochs=%d", later);
    more[7] = epochs.text;
    remove(trace.text);
    setenv("PS_IO_TRACE", trace.text, 1);
    folder_remove(all.text);
    more[8] = NULL;
    expect_done(train(all.text, more));
    unsetenv("PS_IO_TRACE");
    struct path fault = path_of("%d:die", last_call("rename", "/last.h5"));
    for (int i = 0; i < 2; i++) {
        folder_remove(dir.text);
        setenv("PS_IO_FAULT", fault.text, 1);
        struct result r = train(dir.text, more);
        unsetenv("PS_IO_FAULT");
        ck_assert_int_eq(r.code, -1);
        result_free(&r);
        struct ps_checkpoint c = load(dir.text, "best.h5");
        ck_assert_uint_eq(c.epoch, (uint64_t)later);
        ps_checkpoint_free(&c);
        c = load(dir.text, "last.h5");
        ck_assert(c.epoch == (uint64_t)later - 1 && c.best_epoch == (uint64_t)best);
        ps_checkpoint_free(&c);
        more[8] = "--resume";
        if (i == 0) { /* to the end */
            expect_done(train(dir.text, more));
            expect_same_results(all.text, dir.text);
            ck_assert(!file_exists(path_of("%.400s/checkpoints/best-%d.h5", dir.text, best).text));
            more[8] = NULL;
        }
    }
    /* The state's own best weights are tested, and best.h5 holds them: as if the run had had so little patience from the start. */
    patience = path_of("--set=train.patience=%d", later - 1 - best);
    more[9] = patience.text;
    expect_done(train(dir.text, more));
    expect_tested(dir.text, best);
    more[8] = patience.text;
    more[9] = NULL;
    expect_done(train(patient.text, more));
    expect_same_results(patient.text, dir.text);
    /* Where the state falls back behind the best weights, those are what there is, and are told by their epoch. */
    struct path last = in_run(all.text, "checkpoints/last.h5");
    remove(last.text);
    file_write(last.text, "damaged", 7);
    more[9] = "--resume";
    struct result r = train(all.text, more);
    ck_assert_msg(r.code == 0 && lines_of(r.err) == 2 && strstr(r.err, path_of("weights of epoch %d are lost", best).text),
                  "exit code %d: %s", r.code, r.err);
    result_free(&r);
    expect_tested(all.text, later);
}
END_TEST

/* ---- two processes ---- */

START_TEST(second_process)
{
    struct path dir = new_dir("shared"), lock = in_run(dir.text, "lock");
    char *long_run[] = {"--set", "train.epochs=100000", NULL, NULL};
    struct process first = start_train(dir.text, long_run);
    process_read(&first, LONGEST_RUN, 1); /* its first line: it is training */
    char holder[32];
    snprintf(holder, sizeof holder, "process %d", (int)first.pid);
    expect_refused(train(dir.text, ARGS()), 2, ARGS(lock.text, holder));
    expect_refused(train(dir.text, ARGS("--resume")), 2, ARGS(lock.text, holder));
    expect_refused(train(dir.text, ARGS("--overwrite")), 2, ARGS(lock.text, holder));
    kill(first.pid, SIGKILL);
    struct result r = process_end(&first);
    ck_assert_int_eq(r.code, -1);
    result_free(&r);
    /* The lock died with its owner. */
    long_run[2] = "--resume";
    struct process second = start_train(dir.text, long_run);
    process_read(&second, LONGEST_RUN, 1);
    kill(second.pid, SIGTERM);
    expect_refused(process_end(&second), 128 + SIGTERM, ARGS("signal"));
    expect_done(train(dir.text, ARGS("--overwrite")));
    expect_same_run(whole.text, dir.text);
}
END_TEST

/* Several that start at once, in a folder that is not there yet: one trains, the others are refused, and say why. */
START_TEST(simultaneous_starts)
{
    enum { N = 4 };
    struct path dir = new_dir("raced");
    struct process p[N];
    for (int i = 0; i < N; i++) {
        p[i] = start_train(dir.text, ARGS());
    }
    int done = 0;
    for (int i = 0; i < N; i++) {
        struct result r = process_end(&p[i]);
        done += r.code == 0;
        ck_assert_msg(r.code == 0 || (r.code == 2 && (strstr(r.err, "held by process") || strstr(r.err, "already holds a run"))),
                      "exit code %d: %s", r.code, r.err);
        result_free(&r);
    }
    ck_assert_int_eq(done, 1);
    expect_same_run(whole.text, dir.text);
}
END_TEST

/* A file system without locks: a warning, and the run goes on. */
START_TEST(no_locks)
{
    struct path dir = new_dir("unlocked");
    expect_done(train(dir.text, ARGS()));
    remove(trace.text);
    setenv("PS_IO_TRACE", trace.text, 1);
    expect_done(train(dir.text, ARGS("--overwrite")));
    char *text = file_read(trace.text, NULL), *line = strstr(text, " lock "), fault[32];
    ck_assert(line != NULL);
    while (line > text && line[-1] != '\n') {
        line--;
    }
    snprintf(fault, sizeof fault, "%d:enosys", atoi(line));
    free(text);
    setenv("PS_IO_FAULT", fault, 1);
    struct result r = train(dir.text, ARGS("--overwrite"));
    forget_fault();
    ck_assert_msg(r.code == 0 && lines_of(r.err) == 1 && strstr(r.err, "has no locks"), "exit code %d: %s", r.code, r.err);
    result_free(&r);
    expect_same_run(whole.text, dir.text);
}
END_TEST

/* Two that write the same file at once: each ends with the whole file or is refused. The lock ends with
 * the close, so the file must have its name by then. */
START_TEST(simultaneous_writers)
{
    enum { N = 4, ROUNDS = 10 };
    const struct writer *w = &writers[1];
    struct path good = new_dir("good.h5"), out = new_dir("both.h5");
    char *arguments[ARGUMENTS + 1] = {out.text};
    for (int i = 1; w->arguments[i]; i++) {
        arguments[i] = w->arguments[i];
    }
    remove(trace.text);
    setenv("PS_IO_TRACE", trace.text, 1);
    expect_written(w, good.text);
    unsetenv("PS_IO_TRACE");
    char *calls = file_read(trace.text, NULL), *renamed = strstr(calls, " rename ");
    char *closed = renamed ? strstr(renamed, " close ") : NULL;
    ck_assert_msg(closed && strstr(closed, "good.h5.partial"), "closed before it was renamed: %s", calls);
    free(calls);
    int done = 0, refused = 0;
    for (int round = 0; round < ROUNDS; round++) {
        struct process p[N];
        for (int i = 0; i < N; i++) {
            p[i] = start(w->program, arguments);
        }
        for (int i = 0; i < N; i++) {
            struct result r = process_end(&p[i]);
            ck_assert_msg(r.code == 0 || (r.code == 3 && strstr(r.err, "held by ")), "exit code %d: %s", r.code, r.err);
            done += r.code == 0;
            refused += r.code == 3;
            result_free(&r);
        }
        ck_assert_msg(files_equal(good.text, out.text), "two files mixed into one");
        ck_assert(!file_exists(new_dir("both.h5.partial").text));
    }
    printf("writers of one file: %d done, %d refused\n", done, refused);
    ck_assert_int_ge(done, ROUNDS);
}
END_TEST

/* A signal once test.json is there, at any moment until the process ends, comes too late to count. */
START_TEST(signal_at_the_end)
{
    struct path dir = new_dir("ending"), test = in_run(dir.text, "test.json");
    int rounds = full ? 200 : 20;
    for (int i = 0; i < rounds; i++) {
        remove(test.text);
        struct process p = start_train(dir.text, ARGS("--overwrite"));
        for (double end = seconds_now() + LONGEST_RUN; !file_exists(test.text) && seconds_now() < end;) {
        }
        for (double end = seconds_now() + 2e-5 * (i % 20); seconds_now() < end;) { /* a sleep would be longer */
        }
        kill(p.pid, SIGTERM);
        expect_done(process_end(&p));
        expect_same_run(whole.text, dir.text);
    }
}
END_TEST

/* A signal at each call to the system from the last checkpoint on: it counts until the scores are there to be written. */
START_TEST(signal_at_the_last_calls)
{
    struct path dir = new_dir("last_calls");
    remove(trace.text);
    setenv("PS_IO_TRACE", trace.text, 1);
    expect_done(train(dir.text, ARGS()));
    char *text = file_read(trace.text, NULL), *rest = text, call[16], path[1024];
    int number, saved = 0, counted = 0, late = 0;
    unsetenv("PS_IO_TRACE");
    for (char *line; (line = strsep(&rest, "\n")) != NULL && sscanf(line, "%d %15s %1023s", &number, call, path) == 3;) {
        saved += strcmp(call, "rename") == 0 && strstr(path, "last.h5") != NULL;
        int writes = counted > 0 && (late > 0 || strstr(path, "test.json") != NULL);
        if (saved < 1 + EPOCHS * STEPS / 2) {
            continue; /* the first state's, and one every other step */
        }
        folder_remove(dir.text); /* what it holds would take more calls, or fewer */
        setenv("PS_IO_FAULT", path_of("%d:term", number).text, 1);
        struct result r = train(dir.text, ARGS());
        unsetenv("PS_IO_FAULT");
        if (writes) {
            ck_assert_msg(r.code == 0 && !*r.err, "at %s: exit code %d, and on stderr: %s", line, r.code, r.err);
            expect_same_run(whole.text, dir.text);
            result_free(&r);
            late++;
        } else {
            expect_refused(r, 128 + SIGTERM, ARGS("signal", "--resume"));
            ck_assert(!file_exists(in_run(dir.text, "test.json").text));
            counted++;
        }
    }
    free(text);
    ck_assert_msg(counted > 2 && late > 5, "signals: %d counted, %d came too late to", counted, late);
}
END_TEST

/* ---- the disk ---- */

/* Mounts of this test's own, which end with it, for `what`. 0 where that is not permitted, and said so. */
static int own_mounts(const char *what)
{
    if (unshare(CLONE_NEWNS) != 0) {
        struct path user = path_of("0 %d 1", (int)geteuid()), group = path_of("0 %d 1", (int)getegid());
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
            printf("skipped: %s: mounts of one's own are not permitted here: %s\n", what, strerror(errno));
            return 0;
        }
        file_write("/proc/self/setgroups", "deny", 4);
        file_write("/proc/self/uid_map", user.text, strlen(user.text));
        file_write("/proc/self/gid_map", group.text, strlen(group.text));
    }
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        printf("skipped: %s: mounts of one's own are not permitted here: %s\n", what, strerror(errno));
        return 0;
    }
    return 1;
}

/* A tmpfs of every size up to what a run takes: the run ends with the cause, and goes on once there is room. */
START_TEST(full_disk)
{
    struct path disk = new_dir("disk"), dir = new_dir("disk/run");
    mkdir(disk.text, 0777);
    if (!own_mounts("a run on a full disk (limited_files does it to single files)")) {
        return;
    }
    int failures = 0, begun = 0;
    for (int kib = 4;; kib += full ? 4 : 20) {
        ck_assert_int_eq(mount("none", disk.text, "tmpfs", 0, path_of("size=%dk", kib).text), 0);
        struct result r = train(dir.text, ARGS());
        int done = r.code == 0;
        if (!done) {
            struct path where = path_of("with %d KiB", kib);
            ck_assert_msg((r.code == 2 || r.code == 4) && lines_of(r.err) == 1 && strstr(r.err, dir.text) &&
                              strstr(r.err, "No space left on device"),
                          "%s: exit code %d: %s", where.text, r.code, r.err);
            failures++;
            begun += file_exists(in_run(dir.text, "checkpoints/last.h5").text);
            ck_assert_msg(count_partial(dir.text) == 0, "%s: a temporary file takes up room", where.text);
            expect_sound(dir.text, where.text);
            ck_assert_int_eq(mount("none", disk.text, "tmpfs", MS_REMOUNT, "size=16m"), 0);
            expect_recovery(dir.text, where.text);
        }
        result_free(&r);
        ck_assert_int_eq(umount(disk.text), 0);
        if (done) {
            break;
        }
    }
    printf("full disks: %d, %d of them after the run had begun\n", failures, begun);
    ck_assert_int_ge(begun, 3);
}
END_TEST

START_TEST(full_disk_for_an_output)
{
    const struct writer *w = &writers[_i];
    struct path disk = new_dir("disk"), good = path_of("%.400s/good-%d", folder.text, _i), out = new_dir("disk/out");
    mkdir(disk.text, 0777);
    expect_written(w, good.text);
    struct stat about;
    ck_assert_int_eq(stat(output_of(w, good.text, 0).text, &about), 0);
    if (!own_mounts("a program's output on a full disk (limited_output limits its size)")) {
        return;
    }
    int failures = 0;
    for (int kib = 8;; kib += full || about.st_size < 1 << 16 ? 4 : (int)(about.st_size >> 14)) {
        ck_assert_int_eq(mount("none", disk.text, "tmpfs", 0, path_of("size=%dk", kib).text), 0);
        write_old(w, out.text);
        struct result r = write_output(w, out.text);
        struct path where = path_of("%s with %d KiB", w->program, kib);
        int done = r.code == 0;
        if (!done) {
            int fresh = expect_whole(w, out.text, good.text, 0, where.text);
            ck_assert_msg(r.code == w->code && lines_of(r.err) == 1 && strstr(r.err, partial_of(w, out.text, fresh).text) &&
                              strstr(r.err, "No space left on device"),
                          "%s: exit code %d: %s", where.text, r.code, r.err);
            ck_assert_msg(!partials_left(w, out.text), "%s: a partial file is left", where.text);
            failures++;
        } else {
            expect_whole(w, out.text, good.text, 1, where.text);
        }
        result_free(&r);
        ck_assert_int_eq(umount(disk.text), 0);
        if (done) {
            break;
        }
    }
    ck_assert_int_ge(failures, 2);
}
END_TEST

/* A program whose files hold at most so many blocks of 512 bytes. The shell sets the limit: Check writes files of its own. */
static struct result run_limited(long blocks, const char *program, char *const *arguments)
{
    struct path path = path_of("%s/%s", programs, program), most = path_of("%ld", blocks);
    char *all[ARGUMENTS + 1] = {"-c", "trap '' XFSZ; ulimit -f \"$0\"; exec \"$@\"", most.text, path.text};
    for (int i = 0; arguments[i]; i++) {
        ck_assert_int_lt(i + 4, ARGUMENTS);
        all[i + 4] = arguments[i];
    }
    struct process p = process_start("/bin/sh", all, 0);
    return process_end(&p);
}

/* Each size that the run's largest file may not have, in a new run and in one that is resumed: needs no mounts. */
START_TEST(limited_files)
{
    int resumed = _i, failures = 0;
    for (long blocks = 0;; blocks += full ? 1 : 8) {
        struct path dir = new_dir("limited"), where = path_of("with files of %ld blocks", blocks);
        if (resumed) {
            make_crashed(dir.text);
        }
        struct result r = run_limited(
            blocks, "train", ARGS(config.text, "--device", "cpu", "--run-dir", dir.text, resumed ? "--resume" : "--overwrite"));
        int done = r.code == 0;
        if (!done) {
            ck_assert_msg((r.code == 2 || r.code == 4) && lines_of(r.err) == 1 && strstr(r.err, dir.text) &&
                              strstr(r.err, "File too large"),
                          "%s: exit code %d: %s", where.text, r.code, r.err);
            ck_assert_msg(resumed || count_partial(dir.text) == 0, "%s: a temporary file is left", where.text);
            ck_assert_int_ge(file_exists(in_run(dir.text, "checkpoints/last.h5").text), resumed);
            failures++;
        }
        result_free(&r);
        expect_sound(dir.text, where.text);
        expect_recovery(dir.text, where.text);
        folder_remove(dir.text);
        if (done) {
            break;
        }
    }
    printf("limited files in %s run: %d failures, all recovered\n", resumed ? "a resumed" : "a new", failures);
    ck_assert_int_ge(failures, 3);
}
END_TEST

START_TEST(limited_output)
{
    const struct writer *w = &writers[_i];
    struct path good = path_of("%.400s/good-%d", folder.text, _i), out = path_of("%.400s/out-%d", folder.text, _i);
    struct path partial = partial_of(w, out.text, 0);
    char *arguments[ARGUMENTS + 1];
    output_arguments(w, out.text, arguments);
    expect_written(w, good.text);
    struct stat about;
    ck_assert_int_eq(stat(output_of(w, good.text, 0).text, &about), 0);
    for (int i = 0, steps = full ? 64 : 6; i <= steps; i++) {
        long blocks = (long)(about.st_size - 1) / 512 * i / steps; /* at last all but the last bytes */
        struct path where = path_of("%s with %ld blocks", w->program, blocks);
        write_old(w, out.text);
        struct result r = run_limited(blocks, w->program, arguments);
        ck_assert_msg(r.code == w->code && lines_of(r.err) == 1 && strstr(r.err, partial.text) && strstr(r.err, "File too large"),
                      "%s: exit code %d: %s", where.text, r.code, r.err);
        result_free(&r);
        ck_assert_int_eq(expect_whole(w, out.text, good.text, 0, where.text), 0);
        ck_assert_msg(!partials_left(w, out.text), "%s: a partial file is left", where.text);
    }
    expect_done(run_limited((long)about.st_size / 512 + 1, w->program, arguments));
    expect_whole(w, out.text, good.text, 1, "without a limit");
}
END_TEST

static int take_writing(const char *path, const struct stat *about, int type, struct FTW *place)
{
    (void)type, (void)place;
    return chmod(path, about->st_mode & 0555);
}

static int give_writing(const char *path, const struct stat *about, int type, struct FTW *place)
{
    (void)type, (void)place;
    return chmod(path, about->st_mode | 0200);
}

/* What writing below the folder fails with from now on. NULL: neither mounts nor permissions are to be had. */
static const char *make_read_only(const char *path)
{
    if (own_mounts("a folder mounted read-only")) {
        ck_assert_int_eq(mount(path, path, NULL, MS_BIND, NULL), 0);
        ck_assert_int_eq(mount(NULL, path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL), 0);
        return "Read-only file system";
    }
    if (geteuid() != 0) {
        ck_assert_int_eq(nftw(path, take_writing, 16, FTW_DEPTH | FTW_PHYS), 0);
        return "Permission denied";
    }
    printf("skipped: a folder without write permission does not stop root\n");
    return NULL;
}

/* Nothing can be written: said so, and nothing else happens. What only reads does its work. */
START_TEST(read_only_folder)
{
    struct path store = new_dir("store"), dir = new_dir("store/run"), series = new_dir("series.h5"),
                copy = new_dir("store/series.h5");
    mkdir(store.text, 0777);
    copy_file(series.text, copy.text);
    copy_file(config.text, new_dir("store/tiny.yaml").text);
    expect_done(train(dir.text, ARGS()));
    const char *cause = make_read_only(store.text);
    if (!cause) {
        return;
    }
    char *says[] = {in_run(dir.text, "lock").text, (char *)cause, NULL};
    expect_refused(train(dir.text, ARGS("--resume")), 2, says);
    expect_refused(train(dir.text, ARGS("--overwrite")), 2, says);
    expect_refused(train(dir.text, ARGS()), 2, says);
    expect_refused(train(new_dir("store/new").text, ARGS()), 2, ARGS(new_dir("store/new").text, (char *)cause));
    struct path out = new_dir("store/out"), best = in_run(dir.text, "checkpoints/best.h5");
    for (int i = 0; i < WRITERS; i++) { /* a folder cannot even be made */
        struct path first = *writers[i].outputs[0] ? out : partial_of(&writers[i], out.text, 0);
        expect_refused(write_output(&writers[i], out.text), writers[i].code, ARGS(first.text, (char *)cause));
    }
    expect_done(run("evaluate", ARGS(best.text, "--device", "cpu", "--data", copy.text)));
    struct path elsewhere = new_dir("elsewhere");
    expect_done(run("train", ARGS(new_dir("store/tiny.yaml").text, "--device", "cpu", "--run-dir", elsewhere.text)));
    expect_same_results(whole.text, elsewhere.text);
    nftw(store.text, give_writing, 16, FTW_PHYS); /* so that the suite can remove it */
}
END_TEST

/* Every way out of every program: its exit code, at most one line on stderr, and, where the sanitizers look on, nothing leaked. */
static const struct exit_of {
    int code;
    const char *command; /* in the suite's folder */
} exits[] = {
    {0, "train --help"},
    {2, "train"},
    {2, "train none.yaml"},
    {2, "train tiny.yaml tiny.yaml"},
    {2, "train tiny.yaml --resume --overwrite"},
    {2, "train tiny.yaml --set x"},
    {2, "train tiny.yaml --device abacus --run-dir never"},
    {2, "train tiny.yaml --run-dir whole"},
    {2, "train tiny.yaml --run-dir tiny.yaml/x"},
    {2, "train tiny.yaml --run-dir never --set runtime.fusion=layer"},
    {2, "train tiny.yaml --run-dir never --set runtime.backend=cuda --device cpu"},
    {2, "train tiny.yaml --run-dir never --set train.batch_size=5000"},
    {3, "train tiny.yaml --run-dir never --set data.path=none.h5"},
    {3, "train tiny.yaml --run-dir never --set data.path=small.csv"},
    {3, "train tiny.yaml --run-dir never --set model.seq_len=400"},
    {4, "train tiny.yaml --run-dir never --resume"},
    {4, "train tiny.yaml --run-dir whole --resume --device cpu --set optim.lr=5"},
    {5, "train tiny.yaml --run-dir never --device cpu --set train.batch_size=100000000 --set data.drop_last=false"},
    {0, "evaluate --help"},
    {2, "evaluate"},
    {2, "evaluate whole/checkpoints/best.h5 --split no"},
    {2, "evaluate whole/checkpoints/best.h5 --save-forecasts whole/checkpoints/best.h5"},
    {3, "evaluate whole/checkpoints/best.h5 --save-forecasts never/out.h5"},
    {2, "evaluate whole/checkpoints/best.h5 --save-forecasts whole"},
    {2, "evaluate whole/checkpoints/best.h5 --save-forecasts small.csv"},
    {3, "evaluate whole/checkpoints/best.h5 --save-forecasts whole --overwrite"},
    {3, "evaluate whole/checkpoints/best.h5 --data small.csv"},
    {3, "evaluate whole/checkpoints/best.h5 --data none.h5"},
    {4, "evaluate none.h5"},
    {4, "evaluate small.csv"},
    {0, "evaluate whole"},
    {0, "evaluate whole --split all --by step --json"},
    {2, "evaluate whole --by row"},
    {4, "evaluate exported"},
    {0, "evaluate whole/checkpoints/last.h5 --split val --json"},
    {0, "evaluate whole/checkpoints/best.h5 --save-forecasts exits.h5"},
    {0, "bench --help"},
    {2, "bench"},
    {2, "bench none.yaml"},
    {2, "bench tiny.yaml --steps 0"},
    {2, "bench tiny.yaml --set train.batch_size=5000"},
    {3, "bench tiny.yaml --set data.path=small.csv"},
    {0, "bench tiny.yaml --steps 4 --epochs 1 --json"},
    {0, "import_csv --help"},
    {2, "import_csv"},
    {2, "import_csv small.csv"},
    {2, "import_csv small.csv series.h5"},
    {2, "import_csv small.csv small.csv --overwrite"},
    {3, "import_csv none.csv exits.h5 --overwrite"},
    {3, "import_csv tiny.yaml exits.h5 --overwrite"},
    {3, "import_csv small.csv never/exits.h5"},
    {3, "import_csv small.csv whole --overwrite"},
    {3, "import_csv small.csv exits.h5 --overwrite --time-column none"},
    {0, "sample_series --help"},
    {2, "sample_series"},
    {2, "sample_series exits.h5 --hours 0"},
    {2, "sample_series exits.h5 --windows 3"},
    {2, "sample_series series.h5"},
    {3, "sample_series never/exits.h5"},
    {0, "import_weights --help"},
    {2, "import_weights"},
    {2, "import_weights exported series.h5"},
    {2, "import_weights exported imported.h5 --channels 3"},
    {3, "import_weights exported imported.h5 --data none.h5"},
    {4, "import_weights none imported.h5"},
    {4, "import_weights small.csv imported.h5"},
    {4, "import_weights exported never/imported.h5"},
    {0, "import_weights exported imported.h5 --data series.h5"},
    {0, "export_weights --help"},
    {2, "export_weights"},
    {2, "export_weights whole/checkpoints/best.h5 exported"},
    {4, "export_weights none.h5 exits"},
    {4, "export_weights small.csv exits"},
    {4, "export_weights whole/checkpoints/best.h5 never/exits"},
    {4, "export_weights whole/checkpoints/best.h5 small.csv"},
    {0, "export_weights imported.h5 exits"},
};

START_TEST(every_exit)
{
    for (size_t i = 0; i < sizeof exits / sizeof *exits; i++) {
        char command[1200];
        snprintf(command, sizeof command, "cd '%.400s' && exec '%.400s'/%s", folder.text, programs, exits[i].command);
        struct process p = process_start("/bin/sh", ARGS("-c", command), 0);
        struct result r = process_end(&p);
        ck_assert_msg(r.code == exits[i].code && lines_of(r.err) == (r.code != 0), "%s: exit code %d: %s", exits[i].command, r.code,
                      r.err);
        result_free(&r);
    }
    ck_assert(!file_exists(new_dir("never").text));
}
END_TEST

/* Output that is the program's whole point is not lost unnoticed. */
START_TEST(full_stdout)
{
    static const struct {
        const char *program;
        char *arguments[8];
    } cases[] = {{"evaluate", {"whole/checkpoints/best.h5", "--device", "cpu"}},
                 {"evaluate", {"whole/checkpoints/best.h5", "--device", "cpu", "--json"}},
                 {"bench", {"tiny.yaml", "--device", "cpu", "--steps", "6", "--epochs", "0", "--json"}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char command[1024];
        int used = snprintf(command, sizeof command, "cd '%.400s' && '%.400s/%s'", folder.text, programs, cases[i].program);
        for (int j = 0; j < 8 && cases[i].arguments[j]; j++) {
            used += snprintf(command + used, sizeof command - (size_t)used, " %s", cases[i].arguments[j]);
        }
        snprintf(command + used, sizeof command - (size_t)used, " > /dev/full");
        struct process p = process_start("/bin/sh", ARGS("-c", command), 0);
        expect_refused(process_end(&p), 2, ARGS("stdout", "No space left on device"));
    }
}
END_TEST

/* A program whose standard streams are closed opens no file in their place, and writes no text into one. */
START_TEST(closed_streams)
{
    struct path dir = new_dir("closed"), lock = in_run(dir.text, "lock"), copy = new_dir("closed.h5");
    static const char *const closed[] = {">&-", "<&- >&- 2>&-", "<&-", "2>&-"};
    for (int i = 0; i < 4; i++) {
        struct path command = path_of("exec '%.250s/train' '%.250s' --device cpu --run-dir '%.250s' --overwrite %s", programs,
                                      config.text, dir.text, closed[i]);
        struct process p = process_start("/bin/sh", ARGS("-c", command.text), 0);
        expect_done(process_end(&p));
        struct stat about;
        ck_assert_int_eq(stat(lock.text, &about), 0);
        ck_assert_msg(about.st_size == 0, "with %s %lld bytes were written into the lock", closed[i], (long long)about.st_size);
        expect_same_run(whole.text, dir.text);
    }
    /* What is printed is the point of some, and its loss is an error. */
    static const char *const printing[] = {"evaluate' whole/checkpoints/best.h5 --device cpu --save-forecasts closed.h5",
                                           "bench' tiny.yaml --device cpu --steps 6 --epochs 0"};
    for (int i = 0; i < 2; i++) {
        struct path command = path_of("cd '%.250s' && exec '%.250s/%s >&-", folder.text, programs, printing[i]);
        struct process p = process_start("/bin/sh", ARGS("-c", command.text), 0);
        expect_refused(process_end(&p), 2, ARGS("stdout: cannot be written", "Bad file descriptor"));
    }
    ck_assert(file_exists(copy.text));
    for (int i = 0; i < 2; i++) {
        struct path command = path_of("cd '%.250s' && exec '%.250s/%s <&- >&- 2>&-", folder.text, programs,
                                      i == 0 ? "import_csv' small.csv closed.h5 --overwrite"
                                             : "sample_series' closed.h5 --hours 320 --channels 2 --overwrite");
        struct process p = process_start("/bin/sh", ARGS("-c", command.text), 0);
        expect_done(process_end(&p));
    }
    ck_assert(files_equal(copy.text, new_dir("series.h5").text));
}
END_TEST

/* As with `train | head -1`: the reader has gone, and the run goes on to its end. What only prints says that it could not. */
START_TEST(no_reader)
{
    struct path dir = new_dir("unread");
    struct process p = start_train(dir.text, ARGS("--set", "train.epochs=40"));
    process_read(&p, LONGEST_RUN, 1);
    close(p.fd[0]);
    p.fd[0] = -1;
    expect_done(process_end(&p));
    json_decref(expect_metrics(dir.text, 40, STEPS));
    json_decref(read_test(dir.text));
    p = start("evaluate", ARGS(in_run(dir.text, "checkpoints/best.h5").text, "--device", "cpu"));
    close(p.fd[0]);
    p.fd[0] = -1;
    expect_refused(process_end(&p), 2, ARGS("stdout: cannot be written", "Broken pipe"));
    p = start("bench", ARGS(config.text, "--device", "cpu", "--steps", "6", "--compare"));
    close(p.fd[0]);
    p.fd[0] = -1;
    expect_refused(process_end(&p), 2, ARGS("stdout: cannot be written", "Broken pipe"));
}
END_TEST

/* ---- the clock ---- */

/* The wall clock is set back and forth by a day at each look: durations stay what they are, and so do the results. */
START_TEST(clock_that_jumps)
{
    struct path dir = new_dir("jumping");
    setenv("LD_PRELOAD", path_of("%.900s/tests/libjumping_clock.so", programs).text, 1);
    setenv("ASAN_OPTIONS", "verify_asan_link_order=0", 1);
    struct process p = process_start("/bin/date", ARGS("+%s"), 0);
    struct result date = process_end(&p);
    double begin = seconds_now();
    struct result r = train(dir.text, ARGS()),
                  bench = run("bench", ARGS(config.text, "--device", "cpu", "--steps", "12", "--json"));
    double seconds = seconds_now() - begin;
    unsetenv("LD_PRELOAD");
    unsetenv("ASAN_OPTIONS");
    ck_assert_msg(llabs(strtoll(date.out, NULL, 10) - (long long)time(NULL)) > 80000, "the clock did not jump: %s", date.out);
    result_free(&date);
    expect_done(r);
    expect_same_run(whole.text, dir.text);
    json_t *metrics = expect_metrics(dir.text, EPOCHS, STEPS);
    for (size_t i = 0; i < json_array_size(metrics); i++) {
        const json_t *record = json_array_get(metrics, i);
        ck_assert_double_gt(number_in(record, "seconds"), 0);
        ck_assert_double_lt(number_in(record, "seconds"), seconds);
        ck_assert_double_gt(number_in(record, "windows_per_second"), 0);
    }
    json_decref(metrics);
    ck_assert_msg(bench.code == 0 && !*bench.err, "exit code %d: %s", bench.code, bench.err);
    json_t *object = read_json(bench.out);
    const json_t *step = json_object_get(object, "ms_per_step");
    ck_assert_double_gt(number_in(step, "min"), 0);
    ck_assert_double_lt(number_in(step, "max"), 1e3 * seconds);
    ck_assert_double_lt(number_in(object, "seconds_per_epoch"), seconds);
    json_decref(object);
    result_free(&bench);
}
END_TEST

/* ---- the suite ---- */

static void set_up(void)
{
    folder = folder_make();
    config = new_dir("tiny.yaml");
    whole = new_dir("whole");
    trace = new_dir("trace");
    seen = new_dir("seen");
    mkdir(seen.text, 0777);
    file_write(config.text, config_text, strlen(config_text));
    FILE *csv = fopen(new_dir("small.csv").text, "w");
    fputs("date,north,south\n", csv);
    for (int i = 0; i < 3000; i++) {
        fprintf(csv, "2020-01-%02d %02d:%d0:00,%d,%d\n", 1 + i / 144, i / 6 % 24, i % 6, i, i * i % 97);
    }
    fclose(csv);
    expect_done(run("sample_series", ARGS(new_dir("series.h5").text, "--hours", "320", "--channels", "2")));
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    double begin = seconds_now();
    expect_done(train(whole.text, ARGS()));
    whole_seconds = seconds_now() - begin;
    json_decref(expect_metrics(whole.text, EPOCHS, STEPS));
    expect_done(run("export_weights", ARGS(in_run(whole.text, "checkpoints/best.h5").text, new_dir("exported").text)));
}

static void tear_down(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    const char *form = getenv("PS_TEST_FULL");
    programs = getenv("PS_PROGRAMS");
    device = "cpu";
    full = form && strcmp(form, "1") == 0;
    if (!programs) {
        fprintf(stderr, "PS_PROGRAMS: not set: the folder that holds the programs\n");
        return 1;
    }
    if (!full && access("/dev/shm", W_OK) == 0) {
        setenv("TMPDIR", "/dev/shm", 0); /* flushes there take no time; the full form takes the disk */
    }
    Suite *suite = suite_create("reliability");
    TCase *tests = tcase_create("reliability");
    tcase_set_timeout(tests, full ? 3000 : 500);
    tcase_add_unchecked_fixture(tests, set_up, tear_down);
    tcase_add_loop_test(tests, fault_at_every_call, 0, 2);
    tcase_add_test(tests, foreign_files);
    tcase_add_loop_test(tests, fault_at_every_call_of_an_output, 0, WRITERS);
    tcase_add_test(tests, killed);
    tcase_add_test(tests, killed_between_best_and_last);
    tcase_add_test(tests, second_process);
    tcase_add_test(tests, simultaneous_starts);
    tcase_add_test(tests, no_locks);
    tcase_add_test(tests, simultaneous_writers);
    tcase_add_test(tests, signal_at_the_end);
    tcase_add_test(tests, signal_at_the_last_calls);
    tcase_add_test(tests, full_disk);
    tcase_add_loop_test(tests, full_disk_for_an_output, 0, WRITERS);
    tcase_add_loop_test(tests, limited_files, 0, 2);
    tcase_add_loop_test(tests, limited_output, 0, WRITERS);
    tcase_add_test(tests, read_only_folder);
    tcase_add_test(tests, every_exit);
    tcase_add_test(tests, full_stdout);
    tcase_add_test(tests, closed_streams);
    tcase_add_test(tests, no_reader);
    tcase_add_test(tests, clock_that_jumps);
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
