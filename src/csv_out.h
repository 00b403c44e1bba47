/* Cells of CSVs that are written. */
#ifndef PS_SRC_CSV_OUT_H
#define PS_SRC_CSV_OUT_H

#include <stdio.h>

/* Fields with a comma, a quote or a line's end stand in quotes. */
void ps_put_field(FILE *to, const char *text);
/* The shortest decimal that reads back as x. */
void ps_put_value(FILE *to, float x);

#endif
