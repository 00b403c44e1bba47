/* Reads times that are written as text. */
#ifndef PS_DATA_DATES_H
#define PS_DATA_DATES_H

#include <stdint.h>

#include "kernels/status.h"

/* The years 1 to 9999, which a date has room for; no other time is imported or opened. */
#define PS_TIME_EARLIEST INT64_C(-62135596800)
#define PS_TIME_LATEST INT64_C(253402300799)
int ps_date_in_range(int64_t seconds);

/* What ps_date_read takes, for messages. */
#define PS_DATE_FORMS "2016-07-01 00:00:00, 2016-07-01T00:00, 2016/07/01 or 01.07.2016 00:00 (day first), in whole seconds"

/* YEAR-MONTH-DAY, YEAR/MONTH/DAY or DAY.MONTH.YEAR, then nothing or (after T or a space) HOUR:MINUTE[:SECOND[.000]] and then
 * nothing, Z or an offset from UTC such as +01:00, +0100 or +01; as Unix seconds, UTC. 0: it is something else. */
int ps_date_read(const char *text, int64_t *seconds);

/* Whether it has the look of a date, in whatever form. */
int ps_date_suspected(const char *text);

/* The format, for ps_date_read_as, of a date between 1950 and 2050 that is written in digits alone, such as 20160701; else NULL. */
const char *ps_date_compact(const char *text);

/* Unix time as a number, of the years 1973 to 2103, in seconds, or where it is 3e11 and more in milli-, micro- or nanoseconds. A
 * fraction of zeros may follow. 1; -1 when it lies within a second, which *seconds leaves out; 0: it is something else. */
int ps_date_read_unix(const char *text, int64_t *seconds);

/* By a format of strptime's letters: %Y %y %m %b %d %H %I %M %S %p %z %s and %%. A space is any number of spaces, any other
 * character is itself. With %p hours run from 1 to 12. What is not named is the first: of January, or the hour 0. */
int ps_date_read_as(const char *format, const char *text, int64_t *seconds);
/* PS_USAGE in one line when ps_date_read_as does not take the format. */
enum ps_status ps_date_check_format(const char *format);

/* The calendar's day, `days` days after 1970-01-01. */
struct ps_civil {
    int64_t year;
    int month, day, days_of_month; /* from 1 on */
};
struct ps_civil ps_date_civil(int64_t days);
/* And back. */
int64_t ps_date_days(int64_t year, int month, int day);

/* Unix seconds as 2016-07-01 00:00:00. */
struct ps_date_text {
    char text[48];
};
struct ps_date_text ps_date_text(int64_t seconds);

#endif
