/* Training by several ranks when one of them is killed, stopped, signalled or fails: the others end within 10 s and say which one
 * it was, and the run goes on to the results of one that nothing disturbed. Without MPI it says that it was skipped.
 * PS_TEST_DEVICE: the --device to run on (default cpu); on GPUs of ranks that each have one. */
#include "tests/ranks.h"
#include "tests/suite.h"

static const char config_text[] = RANKS_MODEL "  n_layers: 1\n"
                                              "train:\n"
                                              "  epochs: 40\n"
                                              "  batch_size: 16\n"
                                              "  checkpoint_every: 7\n"
                                              "runtime:\n"
                                              "  threads: 1\n";
enum { MOST_RANKS = 3, KILLS = 4, MANY_KILLS = 50, END_SECONDS = 10 };
static int ranks; /* of every run */

/* Pid of a rank of mpirun's; 0: it is not there, or not yet. */
static pid_t pid_of_rank(pid_t launcher, int rank)
{
    pid_t all[MOST_RANKS];
    const int n = children_of(launcher, "train", all, ranks);
    struct path wanted = path_of("OMPI_COMM_WORLD_RANK=%d", rank);
    for (int i = 0; i < n; i++) {
        struct path environment = path_of("/proc/%d/environ", (int)all[i]);
        FILE *file = fopen(environment.text, "r");
        char *one = NULL;
        size_t room = 0;
        int found = 0;
        while (file && !found && getdelim(&one, &room, 0, file) > 0) {
            found = strcmp(one, wanted.text) == 0;
        }
        free(one);
        if (file) {
            fclose(file);
        }
        if (found) {
            return all[i];
        }
    }
    return 0;
}

/* Times that text stands in r's stderr. */
static int count_in(const struct result *r, const char *text)
{
    int n = 0;
    for (const char *at = r->err; (at = strstr(at, text)) != NULL; at++) {
        n++;
    }
    return n;
}

/* The lines of the program itself, of which the ranks are to have one; mpirun has its own. */
static void expect_said(const struct result *r, const char *line)
{
    ck_assert_msg(count_in(r, line) == 1, "\"%s\" is not in it once: %s", line, r->err);
    ck_assert_msg(count_in(r, "train: ") == 1, "more than one line: %s", r->err);
}

static int has_begun(const char *dir)
{
    return file_exists(in_run(dir, "config.yaml").text);
}

/* Starts, or goes on with what is there. */
static struct process go_on(const char *dir)
{
    return start_ranks(ranks, dir, has_begun(dir) ? ARGS("--resume") : ARGS("--overwrite"));
}

/* The end of what began then: in the time that is promised. */
static void expect_soon(double begin)
{
    const double seconds = seconds_now() - begin;
    ck_assert_msg(seconds < END_SECONDS, "it ended after %.1f s", seconds);
}

static void wait_begun(const char *dir)
{
    for (double begin = seconds_now(); !file_exists(in_run(dir, "metrics.jsonl").text); sleep_seconds(0.02)) {
        ck_assert_msg(seconds_now() - begin < 60, "no epoch ended within 60 s");
    }
}

/* A random rank at a random moment, in runs that go on from where the last one was killed. PS_KILLS: how often. */
START_TEST(test_kill)
{
    const char *text = getenv("PS_KILLS"), *seed = getenv("PS_SEED");
    const int kills = text ? atoi(text) : getenv("PS_TEST_FULL") ? MANY_KILLS : KILLS;
    unsigned draw = seed ? (unsigned)atoi(seed) : 1;
    struct path whole = new_dir("whole"), killed = new_dir("killed");
    struct process first = go_on(whole.text);
    struct result r = process_end(&first);
    ck_assert_msg(r.code == 0, "exit code %d: %s", r.code, r.err);
    const double longest = r.seconds;
    result_free(&r);
    int clean = 0, resumed = 0, finished = 0;
    double worst = 0;
    while (clean < kills) {
        const int resumes = has_begun(killed.text), rank = rand_r(&draw) % ranks;
        struct process p = go_on(killed.text);
        sleep_seconds(0.6 * longest * rand_r(&draw) / RAND_MAX);
        const pid_t pid = pid_of_rank(p.pid, rank);
        const double begin = seconds_now();
        const int sent = pid > 0 && kill(pid, SIGKILL) == 0;
        r = process_end(&p);
        if (r.code == 0) { /* it was too late, or too early */
            finished++;
            expect_same_results(whole.text, killed.text);
            folder_remove(killed.text);
        } else {
            const double seconds = seconds_now() - begin;
            struct path by_mpirun = path_of("process rank %d ", rank), by_us = path_of("train: rank %d on ", rank);
            ck_assert_msg(sent && r.code == 128 + SIGKILL, "exit code %d: %s", r.code, r.err);
            ck_assert_msg(seconds < END_SECONDS, "it ended after %.1f s: %s", seconds, r.err);
            ck_assert_msg(count_in(&r, by_mpirun.text) == 1, "rank %d: %s", rank, r.err);
            ck_assert_msg(count_in(&r, "train: rank ") == count_in(&r, by_us.text) && count_in(&r, by_us.text) <= 1, "%s", r.err);
            worst = seconds > worst ? seconds : worst;
            clean++;
        }
        resumed += resumes;
        result_free(&r);
    }
    struct process last = go_on(killed.text);
    r = process_end(&last);
    ck_assert_msg(r.code == 0, "exit code %d: %s", r.code, r.err);
    result_free(&r);
    expect_same_results(whole.text, killed.text);
    printf(
        "kill -9 of a random rank: %d times, %d clean ends, the longest after %.2f s; %d runs that were resumed, %d that finished, "
        "to the same bits\n",
        kills, clean, worst, resumed + 1, finished + 1);
}
END_TEST

/* Killed while it trains: the line that names it. */
START_TEST(test_killed_line)
{
    struct path dir = new_dir("line");
    struct process p = go_on(dir.text);
    wait_begun(dir.text);
    const double begin = seconds_now();
    kill(pid_of_rank(p.pid, _i), SIGKILL);
    struct result r = process_end(&p);
    ck_assert_int_eq(r.code, 128 + SIGKILL);
    expect_soon(begin);
    expect_said(&r, path_of("train: rank %d on ", _i).text);
    expect_said(&r, " is gone: its process was ended");
    result_free(&r);
}
END_TEST

/* The same where the others' exchanges fail as soon as a rank is gone, as NCCL's do, instead of waiting for ever: that failure is
 * not what is told. */
START_TEST(test_killed_noticed)
{
    struct path dir = new_dir("noticed");
    setenv("PS_GONE_LOCK", path_of("%.900s/gone.lock", folder.text).text, 1);
    setenv("PS_GONE_RANK", path_of("%d", _i).text, 1);
    setenv("ASAN_OPTIONS", "verify_asan_link_order=0", 1);
    setenv("LD_PRELOAD", path_of("%.900s/tests/libgone_rank.so", programs).text, 1);
    struct process p = go_on(dir.text);
    unsetenv("LD_PRELOAD");
    unsetenv("ASAN_OPTIONS");
    wait_begun(dir.text);
    const double begin = seconds_now();
    kill(pid_of_rank(p.pid, _i), SIGKILL);
    struct result r = process_end(&p);
    ck_assert_msg(r.code == 128 + SIGKILL, "exit code %d: %s", r.code, r.err);
    expect_soon(begin);
    expect_said(&r, path_of("train: rank %d on ", _i).text);
    expect_said(&r, " is gone: its process was ended");
    result_free(&r);
}
END_TEST

/* A rank that only stands still, as one does whose host is gone. */
START_TEST(test_silent)
{
    struct path dir = new_dir("silent");
    struct process p = go_on(dir.text);
    wait_begun(dir.text);
    const double begin = seconds_now();
    kill(pid_of_rank(p.pid, _i), SIGSTOP);
    struct result r = process_end(&p);
    ck_assert_msg(r.code == 5, "exit code %d: %s", r.code, r.err);
    expect_soon(begin);
    expect_said(&r, path_of("train: rank %d on ", _i).text);
    expect_said(&r, " is gone: nothing was heard of it");
    result_free(&r);
}
END_TEST

/* All of them stopped and continued, as a scheduler or a terminal does: no rank is missed. */
START_TEST(test_suspended)
{
    struct path dir = new_dir("suspended");
    struct process p = start_ranks(ranks, dir.text, ARGS("--set", "train.epochs=80"));
    wait_begun(dir.text);
    pid_t pids[MOST_RANKS];
    for (int i = 0; i < ranks; i++) {
        pids[i] = pid_of_rank(p.pid, i);
        ck_assert_int_gt(pids[i], 0);
        kill(pids[i], SIGSTOP);
    }
    sleep_seconds(8);
    for (int i = 0; i < ranks; i++) {
        kill(pids[i], SIGCONT);
    }
    expect_done(process_end(&p));
}
END_TEST

/* SIGTERM to mpirun: a checkpoint, and no other is written here, from which the run goes on to the same bits. What the ranks print
 * then mpirun may lose. */
START_TEST(test_launcher_signalled)
{
    struct path whole = new_dir("undisturbed"), dir = new_dir("signalled");
    struct process p = go_on(whole.text);
    expect_done(process_end(&p));
    setenv("OMPI_MCA_odls_base_sigkill_timeout", "3", 1);
    p = start_ranks(ranks, dir.text, ARGS("--set", "train.checkpoint_every=1000000"));
    wait_begun(dir.text);
    const double begin = seconds_now();
    kill(p.pid, SIGTERM);
    struct result r = process_end(&p);
    unsetenv("OMPI_MCA_odls_base_sigkill_timeout");
    ck_assert_msg(r.code != 0, "exit code %d: %s", r.code, r.err);
    expect_soon(begin);
    ck_assert_msg(count_in(&r, "train: ") == count_in(&r, "train: signal 15: checkpoint written to "), "%s", r.err);
    result_free(&r);
    struct ps_checkpoint c = load(dir.text, "last.h5");
    ck_assert_uint_gt(c.step, 0);
    ps_checkpoint_free(&c);
    p = go_on(dir.text);
    expect_done(process_end(&p));
    expect_same_results(whole.text, dir.text);
}
END_TEST

/* mpirun -n 1 [-x VARIABLE] train ... : -n OTHERS -wdir WHERE train ... OTHERS' */
static struct result train_unlike(const char *dir, const char *variable, const char *where, char *const *others)
{
    struct path program = path_of("%.900s/train", programs), number = path_of("%d", ranks - 1);
    char *const train_it[] = {program.text, config.text, "--device", (char *)device, "--run-dir", (char *)dir, NULL};
    char *const first[] = {"--oversubscribe", "--bind-to", "none", "-n", "1", variable ? "-x" : NULL, (char *)variable, NULL};
    char *const rest[] = {":", "-n", number.text, "-wdir", (char *)where, NULL};
    char *const *const lists[] = {first, train_it, rest, train_it, others};
    char *arguments[ARGUMENTS + 1] = {NULL};
    int count = 0;
    for (size_t list = 0; list < sizeof lists / sizeof *lists; list++) {
        for (char *const *one = lists[list]; *one; one++) {
            arguments[count++] = *one;
        }
    }
    struct process p = process_start(mpirun.text, arguments, 0);
    return process_end(&p);
}

/* An error that a single rank meets, or all but rank 0. */
START_TEST(test_one_fails)
{
    struct path other = new_dir("other"), config_of_all = config, longer = path_of("%.900s/series.h5", other.text);
    ck_assert_int_eq(mkdir(other.text, 0700), 0);
    expect_done(run("sample_series", ARGS(longer.text, "--hours", "999", "--channels", "3")));
    char *text = file_read(config.text, NULL), *path = strstr(text, "series.h5");
    struct path here = path_of("%.*s/proc/self/cwd/%s", (int)(path - text), text, path); /* each rank's own */
    config = path_of("%.900s/unlike.yaml", folder.text);
    file_write(config.text, here.text, strlen(here.text));
    free(text);
    ck_assert_int_eq(chdir(folder.text), 0);
    const struct {
        const char *variable;
        char *const *others;
        const char *where;
        int code;
        const char *rank, *says;
    } cases[] = {{NULL, ARGS("--set", "train.seed=2"), folder.text, 2, "train: rank 1 on ",
                  "its config is not rank 0's: \"  seed: 2\" here"},
                 {NULL, ARGS(), other.text, 2, "train: rank 1 on ", "its data file's fingerprint is not rank 0's"},
                 {NULL, ARGS(), "/", 3, "train: rank 1 on ", "No such file or directory"},
                 {"PS_IO_FAULT=40+:enospc", ARGS(), folder.text, 0, "train: rank 0 on ", ": No space left on device"},
                 {"PS_IO_FAULT=120:die", ARGS(), folder.text, 128 + SIGKILL, "train: rank 0 on ", "its process was ended"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct path dir = path_of("%.400s/unlike%zu", folder.text, i);
        struct result r = train_unlike(dir.text, cases[i].variable, cases[i].where, cases[i].others);
        const int told = r.code == 2 || r.code == 4; /* of the folder, or of a checkpoint */
        ck_assert_msg(cases[i].code ? r.code == cases[i].code : told, "exit code %d: %s", r.code, r.err);
        ck_assert_msg(r.seconds < END_SECONDS, "it ended after %.1f s", r.seconds);
        expect_said(&r, cases[i].rank);
        expect_said(&r, cases[i].says);
        result_free(&r);
    }
    config = config_of_all;
}
END_TEST

static void begin(void)
{
    begin_ranks(config_text, "998");
}

int main(void)
{
    programs = getenv("PS_PROGRAMS");
    device = getenv("PS_TEST_DEVICE") ? getenv("PS_TEST_DEVICE") : "cpu";
    if (!programs) {
        fprintf(stderr, "test_ranks_faults: PS_PROGRAMS: must name the folder of the programs\n");
        return 2;
    }
    Suite *suite = suite_create("ranks_faults");
    const char *missing = ranks_missing();
    missing = missing || strcmp(device, "cpu") == 0 ? missing : nccl_missing();
    if (missing) {
        printf("skipped: faults of several ranks: %s\n", missing);
        return 0;
    }
    ranks = usual_ranks();
    TCase *kills = tcase_create("kill"), *stops = tcase_create("stop"),
          *others = tcase_create("other"), *const all[] = {kills, stops, others};
    for (int i = 0; i < 3; i++) {
        tcase_set_timeout(all[i], 3000);
        tcase_add_checked_fixture(all[i], begin, end_ranks);
        suite_add_tcase(suite, all[i]);
    }
    tcase_add_test(kills, test_kill);
    tcase_add_loop_test(kills, test_killed_line, 0, ranks);
    tcase_add_loop_test(kills, test_killed_noticed, 0, ranks);
    tcase_add_loop_test(stops, test_silent, 0, 2);
    tcase_add_test(stops, test_suspended);
    tcase_add_test(others, test_launcher_signalled);
    tcase_add_test(others, test_one_fails);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
