/* scripts/compare.py and scripts/plot.py, run as a person runs them, on runs that are done, under way, or none. */
#include "tests/programs.h"
#include "tests/suite.h"

static struct path compare, plot, first, second;
static const char *python = "python3"; /* one with matplotlib and h5py, where there is one */
static int draws;                      /* there is */
enum { LONGEST_COMMAND = 4000, PNG_LEAST = 1000 /* bytes of a picture, at least */ };

static const char config_text[] = "data:\n  path: series.h5\nmodel:\n  seq_len: 24\n  pred_len: 6\n  patch_len: 8\n  stride: 8\n"
                                  "  d_model: 8\n  n_heads: 2\n  d_ff: 8\n  n_layers: 1\noptim:\n  lr: 2e-3\n  schedule: constant\n"
                                  "train:\n  epochs: 2\n  batch_size: 16\nruntime:\n  threads: 2\n";

/* In the suite's folder, as a shell has it. */
static struct result shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static struct result shell(const char *format, ...)
{
    char command[LONGEST_COMMAND];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    ck_assert_int_eq(chdir(folder.text), 0);
    struct process p = process_start("/bin/sh", ARGS("-c", command), 0);
    return process_end(&p);
}

static void expect_picture(const char *name)
{
    size_t size;
    struct path path = new_dir(name);
    free(file_read(path.text, &size));
    ck_assert_msg(size > PNG_LEAST, "%s has %zu bytes", path.text, size);
    remove(path.text);
}

/* Exit code 0, nothing on stderr, every text in stdout. */
static void expect_says(struct result r, char *const *says)
{
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d; stdout: %s; stderr: %s", r.code, r.out, r.err);
    for (int i = 0; says[i]; i++) {
        ck_assert_msg(strstr(r.out, says[i]) != NULL, "\"%s\" is not in: %s", says[i], r.out);
    }
    result_free(&r);
}

/* A row of the table: the run, what differs, the best epoch, and its errors. */
static struct path row_of(const char *dir, const char *name, const char *lr, const char *seed)
{
    json_t *test = read_test(dir);
    struct path row = path_of("%s %s %s %d/2 %.5f %.5f %.5f ", name, lr, seed, (int)number_in(test, "epoch"),
                              number_in(test, "val_mse"), number_in(test, "mse"), number_in(test, "mae"));
    json_decref(test);
    return row;
}

/* Runs of blanks become one. */
static void squeeze(char *text)
{
    char *to = text;
    for (char *from = text; *from; from++) {
        if (*from != ' ' || to == text || to[-1] != ' ') {
            *to++ = *from;
        }
    }
    *to = 0;
}

START_TEST(compares)
{
    file_write(new_dir("runs/notes.txt").text, "mine", 4); /* a file beside the runs */
    struct result r = shell("%s '%s' runs/*", python, compare.text);
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    squeeze(r.out);
    ck_assert_msg(strncmp(r.out, "run optim.lr train.seed best epoch validation MSE test MSE test MAE seconds\n", 75) == 0, "%s",
                  r.out);
    struct path rows[2] = {row_of(first.text, "runs/first", "0.002", "1"), row_of(second.text, "runs/second", "0.0001", "4")};
    const char *at[2] = {strstr(r.out, rows[0].text), strstr(r.out, rows[1].text)};
    ck_assert_msg(at[0] && at[1], "no row \"%s\" or \"%s\" in: %s", rows[0].text, rows[1].text, r.out);
    json_t *a = read_test(first.text), *b = read_test(second.text);
    ck_assert((at[0] < at[1]) == (number_in(a, "val_mse") < number_in(b, "val_mse")));
    json_decref(a);
    json_decref(b);
    ck_assert(strstr(r.out, draws ? "picture: runs/compare.png" : "no picture: matplotlib is not installed") != NULL);
    result_free(&r);
    if (draws) {
        expect_picture("runs/compare.png");
    }
    remove(new_dir("runs/notes.txt").text);
}
END_TEST

/* Each run that cannot be read is named in a line, and the others are compared. */
START_TEST(compare_refuses)
{
    expect_done(shell("cp -r runs/first broken && printf '{\"epoch\": 1}\\n' > broken/metrics.jsonl && mkdir empty"));
    struct result r = shell("%s '%s' runs/first broken empty none --out c.png", python, compare.text);
    ck_assert_int_eq(r.code, 2);
    ck_assert_str_eq(r.err, "compare.py: broken: metrics.jsonl: not what train writes\n"
                            "compare.py: empty: no config.yaml: not the folder of a run\n"
                            "compare.py: none: no such folder\n");
    ck_assert_msg(strstr(r.out, "runs/first ") != NULL, "%s", r.out);
    result_free(&r);
    expect_refused(shell("%s '%s' empty", python, compare.text), 2, ARGS("compare.py: empty: no config.yaml"));
    expect_refused(shell("%s '%s' tiny.yaml", python, compare.text), 2, ARGS("compare.py: no folder of a run among tiny.yaml"));
}
END_TEST

/* A run that is not tested yet, and one that was resumed and has become better since its test. */
START_TEST(under_way)
{
    expect_done(shell("mkdir going && cp -r runs/first going/on && rm going/on/test.json && printf '{\"epoch\": 3, \"st' >> "
                      "going/on/metrics.jsonl && cp -r runs/first going/further && printf '{\"epoch\": 3, \"train_loss\": 0.1, "
                      "\"val_mse\": 0.0001, \"seconds\": 1.5}\\n' >> going/further/metrics.jsonl && cp -r runs/first going/new && "
                      "rm going/new/test.json going/new/metrics.jsonl"));
    struct result r = shell("%s '%s' going/*/", python, compare.text);
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    squeeze(r.out);
    json_t *metrics = read_metrics(first.text), *test = read_test(first.text);
    struct path on = path_of("\ngoing/on %d/2 %.5f - - ", (int)number_in(test, "epoch"), number_in(test, "val_mse"));
    ck_assert_msg(strstr(r.out, on.text) && strstr(r.out, "\ngoing/further 3/2 0.00010 - - ") &&
                      strstr(r.out, "\ngoing/new - - - - 0.0\n"),
                  "%s; expected %s", r.out, on.text);
    ck_assert_msg(strstr(r.out, "going/further") < strstr(r.out, "going/on") &&
                      strstr(r.out, "going/on") < strstr(r.out, "going/new"),
                  "not sorted: %s", r.out);
    result_free(&r);
    json_decref(metrics);
    json_decref(test);
    if (draws) {
        expect_says(shell("%s '%s' going/on", python, plot.text),
                    ARGS("going/on: best validation MSE ", "not tested yet", "losses.png"));
        expect_picture("going/on/losses.png");
        expect_refused(shell("%s '%s' going/new", python, plot.text), 1, ARGS("plot.py: going/new: no epoch is done yet"));
    }
}
END_TEST

START_TEST(plots)
{
    if (!draws) {
        printf("skipped: scripts/plot.py: no matplotlib or h5py\n");
        return;
    }
    char *const units[] = {"", "--original-units"};
    for (int i = 0; i < 2; i++) {
        struct result r = shell("'%s/evaluate' runs/first --device cpu --save-forecasts f.h5 --overwrite %s", programs, units[i]);
        ck_assert_msg(r.code == 0 && !*r.err, "%s", r.err);
        result_free(&r);
        expect_says(shell("%s '%s' runs/first --forecasts f.h5 --out p.png", python, plot.text),
                    ARGS("test MSE ", ", repeat-last ", " of it; picture: p.png\n"));
        expect_picture("p.png");
    }
    expect_says(shell("%s '%s' runs/first runs/second", python, plot.text),
                ARGS("runs/second: test MSE ", "runs/first: test MSE "));
    expect_picture("runs/first/losses.png");
    expect_refused(shell("%s '%s' runs/first runs/second --forecasts f.h5", python, plot.text), 1, ARGS("--forecasts", "one run"));
    expect_refused(shell("%s '%s' runs/first --forecasts series.h5", python, plot.text), 1, ARGS("series.h5", "--save-forecasts"));
    expect_refused(shell("%s '%s' runs/first --forecasts none.h5", python, plot.text), 1, ARGS("none.h5"));
    result_free((struct result[]){run("forecast", ARGS(in_run(first.text, "checkpoints/best.h5").text, "--device", (char *)device,
                                                       "--out", new_dir("a.h5").text, "--origin", "300", "--interval", "0.5"))});
    expect_says(shell("%s '%s' --ahead a.h5 --data series.h5", python, plot.text), ARGS("picture: a.png"));
    expect_picture("a.png");
    expect_refused(shell("%s '%s' --ahead series.h5 --data a.h5", python, plot.text), 1, ARGS("series.h5", "forecast --out"));
    expect_refused(shell("%s '%s' --ahead a.h5", python, plot.text), 1, ARGS("--data"));
    expect_refused(shell("%s '%s'", python, plot.text), 1, ARGS("name a run"));
    expect_refused(shell("%s '%s' none", python, plot.text), 1, ARGS("plot.py: none: no such folder"));
    /* The figures that it draws, from the file, are those of evaluate --by. */
    struct result r = shell("cd '%.400s' && %s -c 'import sys; sys.argv[1:] = []\n"
                            "import h5py, plot\n"
                            "ours, naive, variance = plot.squared_errors(h5py.File(\"%.400s/f.h5\"))\n"
                            "print(*ours.mean(axis=1), naive.mean(), *variance)'",
                            path_of("%s/scripts", getenv("PS_SOURCE")).text, python, folder.text);
    double mse[2], naive, variance[2];
    ck_assert_msg(r.code == 0 && sscanf(r.out, "%lf %lf %lf %lf %lf", &mse[0], &mse[1], &naive, &variance[0], &variance[1]) == 5,
                  "%s%s", r.out, r.err);
    result_free(&r);
    r = shell("'%s/evaluate' runs/first --device cpu --json --original-units", programs);
    json_t *scores = read_json(r.out);
    for (int c = 0; c < 2; c++) {
        ck_assert_double_eq_tol(
            number_in(json_array_get(json_object_get(scores, "by_channel"), (size_t)c), "original_mse") / mse[c], 1, 1e-5);
        ck_assert_double_gt(variance[c], 0);
    }
    ck_assert_double_gt(naive, 0);
    json_decref(scores);
    result_free(&r);
}
END_TEST

/* By a program: what is drawn beside what is written as ever, and what is said where it cannot be. */
START_TEST(forecast_draws)
{
    expect_done(shell("'%s/forecast' runs/first --device cpu > without.csv", programs));
    expect_refused(shell("PYTHONHOME=/nowhere '%s/forecast' runs/first --device cpu --plot f.png --out with.csv", programs), 2,
                   ARGS("forecast: --plot f.png: ", "needs python3 with matplotlib and h5py", "the forecasts are written"));
    ck_assert(files_equal(new_dir("with.csv").text, new_dir("without.csv").text));
    expect_refused(shell("'%s/forecast' runs/first --plot f.jpg", programs), 2, ARGS("\"f.jpg\"", ".png, .pdf or .svg"));
    expect_refused(shell("echo > f.png && '%s/forecast' runs/first --plot f.png", programs), 2, ARGS("--plot: f.png exists"));
    expect_refused(shell("cp series.h5 s.png && '%s/forecast' runs/first --data s.png --plot s.png --overwrite", programs), 2,
                   ARGS("--plot: s.png is the data"));
    if (!draws) {
        printf("skipped: forecast --plot: no matplotlib or h5py\n");
        return;
    }
    expect_refused(shell("'%s/forecast' runs/first --device cpu --plot none/f.png > with.csv", programs), 2,
                   ARGS("--plot none/f.png: the forecasts are written, but not drawn: plot.py: none/f.png: No such file"));
    ck_assert(files_equal(new_dir("with.csv").text, new_dir("without.csv").text));
    expect_done(
        shell("mkdir tmp && TMPDIR=tmp '%s/forecast' runs/first --device cpu --plot f.png --overwrite > with.csv", programs));
    ck_assert(files_equal(new_dir("with.csv").text, new_dir("without.csv").text));
    expect_picture("f.png");
    /* A CSV, whose rows become a file for a while, and a panel, from which a few series are drawn. */
    expect_done(shell(
        "awk 'BEGIN { OFS = \",\"; print \"channel_2,channel_1\"; for (i = 0; i < 90; i++) print i %% 7, i %% 5 }' > two.csv && "
        "TMPDIR=tmp '%s/forecast' runs/first --device cpu --data two.csv --last 2 --out two.h5 --plot f.svg",
        programs));
    expect_picture("f.svg");
    struct result r =
        shell("awk 'BEGIN { print \"id,month,x\"; for (s = 0; s < 6; s++) for (i = 0; i < 60 + s; i++) printf "
              "\"s%%d,%%d-%%02d-28,%%d\\n\", "
              "s, 2000 + int(i / 12), i %% 12 + 1, i %% 7 }' > long.csv && '%s/import_csv' long.csv panel.h5 --panel id,month,x && "
              "'%s/train' tiny.yaml --device cpu --run-dir panel --set data.path=panel.h5 && "
              "TMPDIR=tmp '%s/forecast' panel --device cpu --plot f.png --out p.csv && "
              "TMPDIR=tmp '%s/forecast' panel --device cpu --out p.h5 && rmdir tmp",
              programs, programs, programs, programs);
    ck_assert_msg(r.code == 0, "%s", r.err);
    result_free(&r);
    expect_picture("f.png");
    /* What it draws of the panel's last series: its last rows, and its forecasts. */
    expect_says(shell("cd '%.400s' && %s -c 'import sys; sys.argv[1:] = []\n"
                      "import h5py, plot\n"
                      "name, past, truth, ahead, between = list(plot.panel_ahead(h5py.File(\"%.400s/p.h5\"), "
                      "h5py.File(\"%.400s/panel.h5\")))[-1]\n"
                      "print(name, past.astype(int)[-4:], len(past), len(truth), len(ahead), between)'",
                      path_of("%s/scripts", getenv("PS_SOURCE")).text, python, folder.text, folder.text),
                ARGS("s5 [5 6 0 1] 48 0 6 None"));
}
END_TEST

/* A pre-trained run beside one that forecasts: its errors are of something else, so it stands last, and there is no repeat-last. */
START_TEST(masked_runs)
{
    expect_done(run("train", ARGS(config.text, "--device", (char *)device, "--run-dir", new_dir("masked").text, "--set",
                                  "train.objective=masked", "--set", "model.padding=none")));
    struct result r = shell("%s '%s' masked runs/first runs/second", python, compare.text);
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    squeeze(r.out);
    json_t *test = read_test(new_dir("masked").text);
    struct path row = path_of("\nmasked none 0.002 1 masked %d/2 %.5f %.5f %.5f ", (int)number_in(test, "epoch"),
                              number_in(test, "val_mse"), number_in(test, "mse"), number_in(test, "mae"));
    json_decref(test);
    const char *at = strstr(r.out, row.text), *end = strstr(r.out, "train.objective masked: errors of masked patches");
    ck_assert_msg(at && end && strstr(r.out, "runs/first ") < at && strstr(r.out, "runs/second ") < at && at < end,
                  "no row \"%s\" behind the others in: %s", row.text, r.out);
    result_free(&r);
    if (draws) {
        expect_picture("compare.png");
        expect_says(shell("%s '%s' masked", python, plot.text), ARGS("masked: test MSE ", " of masked patches; picture: "));
        expect_says(shell("%s '%s' runs/first masked", python, plot.text), ARGS("masked: test MSE ", " of masked patches\n"));
    }
}
END_TEST

static void set_up(void)
{
    folder = folder_make();
    config = new_dir("tiny.yaml");
    first = new_dir("runs/first");
    second = new_dir("runs/second");
    file_write(config.text, config_text, strlen(config_text));
    mkdir(new_dir("runs").text, 0777);
    expect_done(run("sample_series", ARGS(new_dir("series.h5").text, "--hours", "600", "--channels", "2")));
    expect_done(train(first.text, ARGS()));
    expect_done(train(second.text, ARGS("--set", "optim.lr=1e-4", "--set", "train.seed=4", "--set", "train.keep_last=3")));
}

static void tear_down(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    const char *source = getenv("PS_SOURCE"), *const pythons[] = {"python3", "/usr/bin/python3"};
    programs = getenv("PS_PROGRAMS");
    device = "cpu";
    if (!programs || !source) {
        fprintf(stderr, "set PS_PROGRAMS to the folder that holds the programs, and PS_SOURCE to the project's root\n");
        return 1;
    }
    compare = path_of("%.400s/scripts/compare.py", source);
    plot = path_of("%.400s/scripts/plot.py", source);
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
    if (system("python3 --version >/dev/null 2>&1") != 0) {
        printf("skipped: scripts/compare.py and scripts/plot.py: no python3\n");
        return 0;
    }
    for (int i = 0; i < 2 && !draws; i++) {
        draws = system(path_of("%s -c 'import matplotlib, h5py' 2>/dev/null", pythons[i]).text) == 0;
        python = draws ? pythons[i] : python;
    }
    Suite *suite = suite_create("run_scripts");
    TCase *tests = tcase_create("run_scripts");
    tcase_set_timeout(tests, 300);
    tcase_add_unchecked_fixture(tests, set_up, tear_down);
    tcase_add_test(tests, compares);
    tcase_add_test(tests, compare_refuses);
    tcase_add_test(tests, under_way);
    tcase_add_test(tests, plots);
    tcase_add_test(tests, forecast_draws);
    tcase_add_test(tests, masked_runs);
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
