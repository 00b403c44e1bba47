/* Finds the step between the times of a series: the most common one, in seconds, or in months of the calendar. */
#ifndef PS_DATA_STEPS_H
#define PS_DATA_STEPS_H

#include <stdint.h>

struct ps_steps {
    int64_t seconds;      /* the step; 0: it is `months` */
    int64_t months, day;  /* between days of the month that are this one, or the last where the month is shorter */
    int64_t count;        /* of the steps between two rows that follow each other, those that are this one */
    int64_t irregular_at; /* the first row that does not follow the one before by it; 0: none */
};

/* Of times that rise; rows >= 2. 0: no memory. */
int ps_steps_find(const int64_t *time, int64_t rows, struct ps_steps *steps);

/* The time n steps after `time`. A step of months keeps `day`. */
int64_t ps_steps_after(const struct ps_steps *steps, int64_t time, int64_t n);

/* Rows that are missing between these two times, -1: none would make them regular. */
int64_t ps_steps_missing(const struct ps_steps *steps, int64_t before, int64_t time);

/* "15min", "1h", "1d", "1mo", "1y". */
struct ps_span_text {
    char text[32];
};
struct ps_span_text ps_steps_text(const struct ps_steps *steps);
/* Such a text read: seconds, or months without a day. 0: it is none. */
int ps_steps_read(const char *text, struct ps_steps *steps);
struct ps_span_text ps_seconds_text(int64_t seconds);

#endif
