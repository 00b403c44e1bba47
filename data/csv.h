/* Reads a text file of rows, line by line, each cut into its fields. */
#ifndef PS_DATA_CSV_H
#define PS_DATA_CSV_H

#include <locale.h>
#include <stdint.h>
#include <stdio.h>

#include "kernels/status.h"

struct ps_csv {
    const char *path;
    FILE *file;
    char delimiter; /* 0 until the first line says it */
    int64_t line_number;
    char *line; /* the current one, cut into fields in place */
    size_t line_room;
    char **field;
    size_t fields, fields_room;
};

/* A delimiter by its name (comma, semicolon, tab, bar) or itself. 0: it is none. */
int ps_csv_read_delimiter(const char *text, char *delimiter);

/* delimiter 0: the one that the first line has most of. *csv is to be closed in every case. */
enum ps_status ps_csv_open(struct ps_csv *csv, const char *path, char delimiter);
/* The next line's fields; *more = 0 at the end of the file. PS_DATA, naming the line, for what is no text of lines. */
enum ps_status ps_csv_read(struct ps_csv *csv, int *more);
/* "commas", "semicolons", "tabs" or "bars". */
const char *ps_csv_cut_at(const struct ps_csv *csv);
void ps_csv_close(struct ps_csv *csv); /* again is fine */

/* A whole field as a decimal number, with a point or a comma: no hexadecimal, nothing after it. NaN and infinity are numbers here.
 * c: the locale "C". */
int ps_csv_number(char *text, int decimal_comma, locale_t c, double *value);

#endif
