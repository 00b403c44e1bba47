/* Cells of CSVs that are written. */
#ifndef PS_SRC_CSV_OUT_H
#define PS_SRC_CSV_OUT_H

#include <stdio.h>

/* Text and suffix in one field; one with a comma, a quote or a line's end stands in quotes. */
void ps_put_field(FILE *to, const char *text, const char *suffix);
/* The shortest decimal that reads back as x. */
void ps_put_value(FILE *to, float x);

#endif
