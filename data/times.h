/* The times of a series' rows: `/time` of its file, int64 Unix seconds, UTC. */
#ifndef PS_DATA_TIMES_H
#define PS_DATA_TIMES_H

#include <stdint.h>

#include "data/steps.h"
#include "kernels/status.h"

struct ps_times {
    int64_t rows;
    int64_t *time; /* [rows]; NULL: the file has none, or one alone */
    struct ps_steps steps;
};

/* Looks at the file in a child process first, as ps_series_open does. PS_DATA: /time that has another number of rows, is no
 * integer, or does not rise. */
enum ps_status ps_times_read(const char *path, int64_t rows, struct ps_times *times);
void ps_times_free(struct ps_times *times);

#endif
