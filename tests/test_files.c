/* The way to the disk (data/files.h): what each function leaves behind when any one of its calls goes wrong. A plan of faults is
 * read once a process, so each case runs in a child. */
#include "data/files.h"
#include "data/import.h"
#include "tests/run.h"
#include "tests/suite.h"

static struct path folder, file, partial, trace;

static const char old_text[] = "the old file\n", new_text[] = "the new file, which is longer\n";

static int replace(void)
{
    return (int)ps_file_replace(PS_CHECKPOINT, file.text, new_text, sizeof new_text - 1);
}

static int append(void)
{
    return (int)ps_file_append(PS_CHECKPOINT, file.text, new_text, sizeof new_text - 1);
}

/* In parts, the end before the beginning. */
static int in_parts(void)
{
    struct ps_output *output;
    char again[8];
    size_t half = sizeof new_text / 2;
    enum ps_status status = ps_output_open(PS_CHECKPOINT, file.text, &output);
    if (status != PS_OK) {
        return (int)status;
    }
    ps_output_truncate(output, 1000);
    ps_output_write(output, half, new_text + half, sizeof new_text - 1 - half);
    ps_output_write(output, 0, new_text, half);
    ps_output_read(output, 4, again, sizeof again);
    ps_output_truncate(output, sizeof new_text - 1);
    if (memcmp(again, new_text + 4, sizeof again) != 0) { /* not heard when a call has failed */
        status = ps_fail(PS_DATA, "read other bytes than were written");
    }
    return (int)ps_output_finish(output, status);
}

static int discard_file(void)
{
    return (int)ps_file_remove(PS_CHECKPOINT, file.text);
}

static int make_folder(void)
{
    return (int)ps_folder_make(PS_CHECKPOINT, path_of("%.400s/made", folder.text).text);
}

static int sweep(void)
{
    return (int)ps_file_sweep(PS_CHECKPOINT, file.text);
}

static int link_file(void)
{
    return (int)ps_file_link(PS_CHECKPOINT, file.text, path_of("%.400s/linked", folder.text).text);
}

static int lock_file(void)
{
    int lock;
    enum ps_status status = ps_file_lock(PS_CHECKPOINT, file.text, &lock);
    if (status == PS_OK) {
        ps_file_unlock(lock);
    }
    return (int)status;
}

/* The action's status, or -1 when it died; *message (free): the error's text. */
static int in_child(int (*action)(void), const char *fault, char **message)
{
    int ends[2], how;
    ck_assert_int_eq(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        if (fault) {
            setenv("PS_IO_FAULT", fault, 1);
        }
        setenv("PS_IO_TRACE", trace.text, 1);
        int status = action();
        dprintf(ends[1], "%s", ps_error_message());
        _exit(status);
    }
    close(ends[1]);
    *message = calloc(1, 1024);
    ssize_t n = read(ends[0], *message, 1023);
    ck_assert_int_ge((int)n, 0);
    close(ends[0]);
    waitpid(pid, &how, 0);
    return WIFEXITED(how) ? WEXITSTATUS(how) : -1;
}

static void put_old(int with_partial)
{
    file_write(file.text, old_text, sizeof old_text - 1);
    unlink(partial.text);
    if (with_partial) {
        file_write(partial.text, "left by a crash", 15);
    }
    rmdir(path_of("%.400s/made", folder.text).text);
    unlink(trace.text);
}

/* 1: the trace says that the plan's call came, and *call holds its name. */
static int went_wrong(const char *kind, char call[16])
{
    char *text = file_read(trace.text, NULL), *rest = text, name[16], path[512], end[16];
    int found = 0;
    for (char *line; !found && (line = strsep(&rest, "\n")) != NULL;) {
        found = sscanf(line, "%*d %15s %511s %15s", name, path, end) == 3 && strcmp(end, kind) == 0;
    }
    if (found) {
        strcpy(call, name);
    }
    free(text);
    return found;
}

static int holds(const char *path, const char *text)
{
    char *bytes = file_read(path, NULL);
    int same = strcmp(bytes, text) == 0;
    free(bytes);
    return same;
}

/* ---- */

static const struct action {
    const char *name;
    int (*run)(void);
    int replaces; /* file holds old_text or new_text, whatever happens */
    int with_partial;
} actions[] = {{"replace", replace, 1, 1},     {"in parts", in_parts, 1, 1},  {"append", append, 0, 0},
               {"remove", discard_file, 0, 0}, {"folder", make_folder, 0, 0}, {"sweep", sweep, 0, 1},
               {"link", link_file, 0, 0},      {"lock", lock_file, 0, 0}};
enum { ACTIONS = sizeof actions / sizeof *actions };

static const struct {
    const char *name, *says; /* says NULL: the call is made again, and nothing fails */
} kinds[] = {{"eio", "Input/output error"}, {"enospc", "No space left on device"}, {"eintr", NULL}, {"short", NULL}, {"die", NULL}};
enum { KINDS = sizeof kinds / sizeof *kinds };

static void expect_left(const struct action *a, int kind, int status, const char *message, const char *call, const char *where)
{
    int died = strcmp(kinds[kind].name, "die") == 0, fails = kinds[kind].says != NULL;
    ck_assert_msg(status == (died ? -1 : fails ? PS_CHECKPOINT : PS_OK), "%s: status %d: %s", where, status, message);
    if (fails) {
        ck_assert_msg(strstr(message, kinds[kind].says) && strncmp(message, folder.text, strlen(folder.text)) == 0,
                      "%s: path and cause are not in: %s", where, message);
    }
    if (a->replaces) {
        ck_assert_msg(holds(file.text, old_text) || holds(file.text, new_text), "%s: half a file", where);
        ck_assert_msg(!fails || !file_exists(partial.text) || strcmp(call, "open") == 0, "%s: a partial file is left", where);
    }
    if (!died && !fails && a->replaces) {
        ck_assert_msg(holds(file.text, new_text) && !file_exists(partial.text), "%s: not done", where);
    }
    if (!died && !fails && a->run == append) {
        char *bytes = file_read(file.text, NULL);
        ck_assert_msg(strncmp(bytes, old_text, strlen(old_text)) == 0 && strcmp(bytes + strlen(old_text), new_text) == 0,
                      "%s: appended %s", where, bytes);
        free(bytes);
    }
}

/* Call 1, 2, 3, ... of every function goes wrong in every way, until it has no such call. */
START_TEST(every_call)
{
    const struct action *a = &actions[_i];
    int faults = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        for (int n = 1, more = 1; more; n++) {
            char fault[32], call[16] = "", where[96], *message;
            snprintf(fault, sizeof fault, "%d:%s", n, kinds[kind].name);
            put_old(a->with_partial);
            int status = in_child(a->run, fault, &message);
            more = went_wrong(kinds[kind].name, call);
            snprintf(where, sizeof where, "%s, call %d (%s), %s", a->name, n, call, kinds[kind].name);
            if (more) {
                faults++;
                expect_left(a, kind, status, message, call, where);
            } else if (strcmp(kinds[kind].name, "short") == 0 && n < 20) {
                ck_assert_msg(status == PS_OK, "%s: %s", where, message);
                more = 1; /* writes alone are short */
            } else {
                ck_assert_msg(status == PS_OK, "%s, no fault: %s", where, message);
            }
            /* Whatever was left, the next time all is well. */
            free(message);
            unlink(trace.text);
            ck_assert_msg(in_child(a->run, NULL, &message) == PS_OK, "%s, and again: %s", where, message);
            ck_assert_msg(!a->with_partial || !file_exists(partial.text), "%s: a partial file is left the next time", where);
            free(message);
        }
    }
    ck_assert_int_ge(faults, 6);
    ck_assert(a->run != link_file || files_equal(file.text, path_of("%.400s/linked", folder.text).text));
}
END_TEST

/* ---- the order of flushes ---- */

static int write_series(void)
{
    return (int)ps_series_write(file.text, (const float[]){1, 2, 3, 4}, 2, 2, NULL, NULL, NULL, NULL);
}

static int append_new(void)
{
    unlink(file.text);
    return append();
}

/* What must come to the disk, and in which order; paths after the test's folder. Between the calls there may be others, but no
 * write to a file that was flushed. */
static const struct order {
    const char *name;
    int (*run)(void);
    struct {
        const char *call, *path;
    } calls[5];
} orders[] = {
    {"replace", replace, {{"write", "file.partial"}, {"fsync", "file.partial"}, {"rename", "file"}, {"fsync", ""}}},
    {"in parts", in_parts, {{"write", "file.partial"}, {"fsync", "file.partial"}, {"rename", "file"}, {"fsync", ""}}},
    {"HDF5", write_series, {{"write", "file.partial"}, {"fsync", "file.partial"}, {"rename", "file"}, {"fsync", ""}}},
    {"append", append, {{"write", "file"}, {"fsync", "file"}}},
    {"append to none", append_new, {{"write", "file"}, {"fsync", "file"}, {"fsync", ""}}},
    {"remove", discard_file, {{"unlink", "file"}, {"fsync", ""}}},
    {"folder", make_folder, {{"mkdir", "made"}, {"fsync", ""}}},
    {"sweep", sweep, {{"unlink", "file.partial"}, {"fsync", ""}}},
};

START_TEST(flushes_in_order)
{
    const struct order *o = &orders[_i];
    char *message, call[16], path[512];
    put_old(1);
    ck_assert_msg(in_child(o->run, NULL, &message) == PS_OK, "%s: %s", o->name, message);
    free(message);
    char *text = file_read(trace.text, NULL), *copy = strdup(text), *rest = copy;
    int found = 0;
    for (char *line; (line = strsep(&rest, "\n")) != NULL && *line;) {
        ck_assert_int_eq(sscanf(line, "%*d %15s %511s", call, path), 2);
        const char *inside = path + strlen(folder.text) + 1; /* of the folder itself: nothing */
        if (o->calls[found].call && strcmp(call, o->calls[found].call) == 0 && strcmp(inside, o->calls[found].path) == 0) {
            found++;
        }
        int flushed = found > 0 && strcmp(o->calls[found - 1].call, "write") != 0;
        ck_assert_msg(!flushed || strcmp(call, "write") != 0, "%s: written to after the flush:\n%s", o->name, text);
    }
    ck_assert_msg(!o->calls[found].call, "%s: %s of \"%s\" is missing, or comes too early:\n%s", o->name, o->calls[found].call,
                  o->calls[found].path, text);
    free(copy);
    free(text);
}
END_TEST

/* Not only one call, but all from there on, as a full disk does. */
START_TEST(stays_wrong)
{
    for (int n = 1; n <= 9; n++) {
        char fault[32], call[16], *message;
        snprintf(fault, sizeof fault, "%d+:enospc", n);
        put_old(0);
        int status = in_child(replace, fault, &message);
        ck_assert_int_eq(status, went_wrong("enospc", call) ? PS_CHECKPOINT : PS_OK);
        ck_assert(holds(file.text, old_text) || holds(file.text, new_text));
        ck_assert(status == PS_OK || strstr(message, "No space left on device"));
        ck_assert_msg(n < 9 || status == PS_OK, "a call more than expected: count them here");
        free(message);
    }
}
END_TEST

/* A writer that fails by itself: its own message, and nothing left. */
START_TEST(given_up)
{
    struct ps_output *output;
    put_old(0);
    OK(ps_output_open(PS_CHECKPOINT, file.text, &output));
    ps_output_write(output, 0, new_text, 4);
    ck_assert_int_eq(ps_output_finish(output, ps_fail(PS_DATA, "the writer's own reason")), PS_DATA);
    ck_assert_str_eq(ps_error_message(), "the writer's own reason");
    ck_assert(holds(file.text, old_text) && !file_exists(partial.text));
}
END_TEST

START_TEST(malformed_plan)
{
    static const char *const plans[] = {"", "eio", "0:eio", "-1:eio", "1:", "1:EIO", "1eio", "1+:eintr", "1:eio ", "1:invalid"};
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        char *message;
        put_old(0);
        ck_assert_msg(in_child(replace, plans[i], &message) == PS_CHECKPOINT, "\"%s\" is taken for a plan", plans[i]);
        ck_assert_msg(strstr(message, "Invalid argument") != NULL, "\"%s\": %s", plans[i], message);
        ck_assert(holds(file.text, old_text));
        free(message);
    }
}
END_TEST

/* A full disk that is none of our making. */
START_TEST(full_device)
{
    ck_assert_int_eq(ps_file_append(PS_USAGE, "/dev/full", "text", 4), PS_USAGE);
    ck_assert_str_eq(ps_error_message(), "/dev/full: cannot be written: No space left on device");
}
END_TEST

START_TEST(missing_folder)
{
    struct path nowhere = path_of("%.400s/no/file", folder.text);
    ck_assert_int_eq(ps_file_replace(PS_USAGE, nowhere.text, "", 0), PS_USAGE);
    ck_assert(strstr(ps_error_message(), "no/file.partial: cannot be written: No such file or directory"));
    ck_assert_int_eq(ps_folder_make(PS_USAGE, nowhere.text), PS_USAGE);
    ck_assert_int_eq(ps_file_sweep(PS_USAGE, nowhere.text), PS_OK);
    ck_assert_int_eq(ps_file_remove(PS_USAGE, nowhere.text), PS_OK);
}
END_TEST

/* The file's own ".partial" goes, everything else stays. */
START_TEST(sweeping)
{
    static const char *const names[] = {"a.h5.partial", "a.h5", "b.partial", "a.partial", ".partial", "a.h5.partial.partial"};
    for (int i = 0; i < 6; i++) {
        file_write(path_of("%.400s/%s", folder.text, names[i]).text, "x", 1);
    }
    OK(ps_file_sweep(PS_USAGE, path_of("%.400s/a.h5", folder.text).text));
    for (int i = 0; i < 6; i++) {
        struct path path = path_of("%.400s/%s", folder.text, names[i]);
        ck_assert_msg(file_exists(path.text) == (i > 0), "%s", names[i]);
        unlink(path.text);
    }
}
END_TEST

/* One holder at a time; the lock dies with it, however it ends. */
START_TEST(locking)
{
    int lock, ready[2];
    char byte;
    ck_assert_int_eq(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        _exit(ps_file_lock(PS_USAGE, file.text, &lock) == PS_OK && write(ready[1], "x", 1) == 1 ? pause() : 1);
    }
    ck_assert_int_eq((int)read(ready[0], &byte, 1), 1);
    ck_assert_int_eq(ps_file_lock(PS_USAGE, file.text, &lock), PS_USAGE);
    ck_assert_str_eq(ps_error_message(),
                     path_of("%.400s: held by process %d: wait for its end, or choose another folder", file.text, (int)pid).text);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    OK(ps_file_lock(PS_USAGE, file.text, &lock));
    char *message;
    ck_assert_int_eq(in_child(lock_file, NULL, &message), PS_CHECKPOINT);
    free(message);
    ps_file_unlock(lock);
    ck_assert_int_eq(in_child(lock_file, NULL, &message), PS_OK);
    free(message);
}
END_TEST

static void set_up(void)
{
    folder = folder_make();
    file = path_of("%.400s/file", folder.text);
    partial = path_of("%.400s/file.partial", folder.text);
    trace = path_of("%.400s/trace", folder.text);
}

static void tear_down(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    Suite *suite = suite_create("files");
    TCase *tests = tcase_create("files");
    tcase_set_timeout(tests, 120);
    tcase_add_checked_fixture(tests, set_up, tear_down);
    tcase_add_loop_test(tests, every_call, 0, ACTIONS);
    tcase_add_loop_test(tests, flushes_in_order, 0, sizeof orders / sizeof *orders);
    tcase_add_test(tests, stays_wrong);
    tcase_add_test(tests, given_up);
    tcase_add_test(tests, malformed_plan);
    tcase_add_test(tests, full_device);
    tcase_add_test(tests, missing_folder);
    tcase_add_test(tests, sweeping);
    tcase_add_test(tests, locking);
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
