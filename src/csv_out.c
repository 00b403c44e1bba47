#include "src/csv_out.h"

#include <stdlib.h>
#include <string.h>

static void put_quoted(FILE *to, const char *text)
{
    for (; *text; text++) {
        if (*text == '"') {
            putc('"', to);
        }
        putc(*text, to);
    }
}

void ps_put_field(FILE *to, const char *text, const char *suffix)
{
    if (!strpbrk(text, ",\"\n\r") && !strpbrk(suffix, ",\"\n\r")) {
        fputs(text, to);
        fputs(suffix, to);
        return;
    }
    putc('"', to);
    put_quoted(to, text);
    put_quoted(to, suffix);
    putc('"', to);
}

void ps_put_value(FILE *to, float x)
{
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)x);
        if (strtof(text, NULL) == x) {
            break;
        }
    }
    fputs(text, to);
}
