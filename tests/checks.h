/* Check, which writes down each assertion that holds, to tell where a test crashed; one that holds a million times in a loop is
 * written once, since that takes longer than what it compares. */
#ifndef PS_TESTS_CHECKS_H
#define PS_TESTS_CHECKS_H

#include <check.h>

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

#endif
