#include "data/dates.h"

#include <ctype.h>

/* Two digits at most, or exactly `digits` when that is 4; moves *text past them. -1: none there. */
static int read_digits(const char **text, int digits)
{
    int value = 0, n = 0;
    for (; n < digits && isdigit((unsigned char)(*text)[n]); n++) {
        value = 10 * value + ((*text)[n] - '0');
    }
    *text += n;
    return n == 0 || (digits == 4 && n != 4) ? -1 : value;
}

/* Days from 1970-01-01 in the proleptic Gregorian calendar (Hinnant, chrono-compatible low-level date algorithms). */
static int64_t days_from_civil(int year, int month, int day)
{
    int64_t y = month <= 2 ? year - 1 : year;
    int64_t era = (y >= 0 ? y : y - 399) / 400, year_of_era = y - era * 400;
    int64_t day_of_year = (153 * (month > 2 ? month - 3 : month + 9) + 2) / 5 + day - 1;
    return era * 146097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719468;
}

int ps_date_read(const char *text, int64_t *seconds)
{
    int part[6] = {0};
    part[0] = read_digits(&text, 4);
    char separator = *text;
    if (part[0] < 0 || (separator != '-' && separator != '/')) {
        return 0;
    }
    for (int i = 1; i < 3; i++) {
        if (*text++ != separator || (part[i] = read_digits(&text, 2)) < 0) {
            return 0;
        }
    }
    if (*text == 'T' || *text == ' ') {
        text++;
        for (int i = 3; i < 6; i++) {
            if (i > 3 && *text++ != ':') {
                return 0;
            }
            part[i] = read_digits(&text, 2);
            if (part[i] < 0) {
                return 0;
            }
            if (i == 4 && *text != ':') {
                break;
            }
        }
        text += *text == 'Z';
    }
    static const int days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    int leap = part[0] % 4 == 0 && (part[0] % 100 != 0 || part[0] % 400 == 0);
    if (*text != '\0' || part[1] < 1 || part[1] > 12 || part[2] < 1 || part[2] > days[part[1] - 1] + (leap && part[1] == 2) ||
        part[3] > 23 || part[4] > 59 || part[5] > 59) {
        return 0;
    }
    *seconds = days_from_civil(part[0], part[1], part[2]) * 86400 + part[3] * 3600 + part[4] * 60 + part[5];
    return 1;
}
