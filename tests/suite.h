/* Runs a suite. */
#ifndef PS_TESTS_SUITE_H
#define PS_TESTS_SUITE_H

#include <check.h>

/* Check writes down every assertion that holds, to tell where a test crashed: one of a loop over a million values once. */
static inline void mark_once(const char *file, int line)
{
    static const char *last_file;
    static int last_line;
    if (line != last_line || file != last_file) {
        last_file = file;
        last_line = line;
        _mark_point(file, line);
    }
}
#define _mark_point(file, line) mark_once(file, line)

/* How many tests failed. `fork`: CK_NOFORK where tests share what no fork survives, else CK_FORK_GETENV. */
static inline int run_suite(Suite *suite, enum fork_status fork)
{
    SRunner *runner = srunner_create(suite);
    srunner_set_fork_status(runner, fork);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed;
}

#endif
