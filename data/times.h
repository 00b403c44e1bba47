/* The times of a series' rows: `/time` of its file, int64 Unix seconds, UTC. */
#ifndef PS_DATA_TIMES_H
#define PS_DATA_TIMES_H

#include <stdint.h>

#include "kernels/status.h"

/* Rows follow one another by `months` calendar months, or where that is 0 by `seconds`: by most of their differences. */
struct ps_times {
    int64_t rows;
    int64_t *time; /* [rows]; NULL: the file has none */
    int64_t seconds, months;
};

/* Looks at the file in a child process first, as ps_series_open does. PS_DATA: /time that has another number of rows, is no
 * integer, or does not rise. */
enum ps_status ps_times_read(const char *path, int64_t rows, struct ps_times *times);
void ps_times_free(struct ps_times *times);

/* The time n steps after `from`. A step of months keeps the day of the month, and the last day of a month stays the last. */
int64_t ps_time_after(const struct ps_times *times, int64_t from, int64_t n);

/* "2016-07-01 00:00:00" */
struct ps_time_text {
    char text[32];
};
struct ps_time_text ps_time_text(int64_t seconds);
/* The same read: date and, after a space or T, hours and minutes, and seconds; 1, or 0 for another text. */
int ps_time_parse(const char *text, int64_t *seconds);

#endif
