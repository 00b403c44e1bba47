/* Runs a suite. */
#ifndef PS_TESTS_SUITE_H
#define PS_TESTS_SUITE_H

#include "tests/checks.h"

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
