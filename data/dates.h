/* Reads times that are written as text. */
#ifndef PS_DATA_DATES_H
#define PS_DATA_DATES_H

#include <stdint.h>

/* YEAR-MONTH-DAY or YEAR/MONTH/DAY, then nothing or (after T or a space) HOUR:MINUTE[:SECOND][Z], as Unix seconds, UTC. 0: it is
 * something else. */
int ps_date_read(const char *text, int64_t *seconds);

#endif
