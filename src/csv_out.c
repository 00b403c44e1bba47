#include "src/csv_out.h"

#include <stdlib.h>
#include <string.h>

void ps_put_field(FILE *to, const char *text)
{
    if (!strpbrk(text, ",\"\n\r")) {
        fputs(text, to);
        return;
    }
    putc('"', to);
    for (; *text; text++) {
        if (*text == '"') {
            putc('"', to);
        }
        putc(*text, to);
    }
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
