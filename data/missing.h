/* Values that a table leaves out, and what takes their place. */
#ifndef PS_DATA_MISSING_H
#define PS_DATA_MISSING_H

#include <stdint.h>

/* How a cell without a value is written, for messages: in capitals and small letters. */
#define PS_MISSING_FORMS "empty, NA, N/A, NaN, null, none or ?"

enum ps_fill {
    PS_FILL_NONE,
    PS_FILL_PREVIOUS, /* the channel's last value before */
    PS_FILL_LINEAR,   /* on the line between the values before and after, by the times; behind the last one, that one */
    PS_FILL_NAN,      /* NaN, which train takes with data.missing: mask */
};

int ps_missing_text(const char *text);

/* Fills the NaNs of one channel of values [rows, channels]; those before its first value become that one. time: [rows], or NULL:
 * rows are equally far apart. 0: the channel has no value. */
int ps_missing_fill(float *values, int64_t rows, int64_t channels, int64_t channel, const int64_t *time, enum ps_fill fill);

#endif
