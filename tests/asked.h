/* The switches in the environment that choose a suite's form. */
#ifndef PS_TESTS_ASKED_H
#define PS_TESTS_ASKED_H

#include <stdlib.h>
#include <string.h>

/* Whether the variable is 1. */
static inline int asked(const char *variable)
{
    const char *value = getenv(variable);
    return value && strcmp(value, "1") == 0;
}

#endif
