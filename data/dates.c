#include "data/dates.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "data/text.h"

enum { DAY = 86400 };

/* A date and time of day as it is written. */
struct written {
    int year, month, day, hour, minute, second;
    int offset; /* seconds that its clock is ahead of UTC */
};

/* One digit or more, at most `digits` of them; moves *text past them. -1: none there. */
static int read_digits(const char **text, int digits)
{
    int value = 0, n = 0;
    for (; n < digits && isdigit((unsigned char)(*text)[n]); n++) {
        value = 10 * value + ((*text)[n] - '0');
    }
    *text += n;
    return n == 0 ? -1 : value;
}

/* Days from 1970-01-01 in the proleptic Gregorian calendar (Hinnant, chrono-compatible low-level date algorithms). */
int64_t ps_date_days(int64_t year, int month, int day)
{
    int64_t y = month <= 2 ? year - 1 : year;
    int64_t era = (y >= 0 ? y : y - 399) / 400, year_of_era = y - era * 400;
    int64_t day_of_year = (153 * (month > 2 ? month - 3 : month + 9) + 2) / 5 + day - 1;
    return era * 146097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719468;
}

static int days_of_month(int64_t year, int month)
{
    static const int days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    int leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    return days[month - 1] + (leap && month == 2);
}

struct ps_civil ps_date_civil(int64_t days)
{
    int64_t shifted = days + 719468, era = (shifted >= 0 ? shifted : shifted - 146096) / 146097, of_era = shifted - era * 146097;
    int64_t year_of_era = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int64_t of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100), from_march = (5 * of_year + 2) / 153;
    struct ps_civil civil = {
        .year = year_of_era + era * 400 + (from_march >= 10),
        .month = (int)(from_march < 10 ? from_march + 3 : from_march - 9),
        .day = (int)(of_year - (153 * from_march + 2) / 5 + 1),
    };
    civil.days_of_month = days_of_month(civil.year, civil.month);
    return civil;
}

struct ps_date_text ps_date_text(int64_t seconds)
{
    int64_t days = seconds / DAY - (seconds % DAY < 0);
    int of_day = (int)(seconds - days * DAY);
    struct ps_civil civil = ps_date_civil(days);
    struct ps_date_text date;
    snprintf(date.text, sizeof date.text, "%04" PRId64 "-%02d-%02d %02d:%02d:%02d", civil.year, civil.month, civil.day,
             of_day / 3600, of_day / 60 % 60, of_day % 60);
    return date;
}

int ps_date_in_range(int64_t seconds)
{
    return seconds >= PS_TIME_EARLIEST && seconds <= PS_TIME_LATEST;
}

static int to_seconds(const struct written *w, int64_t *seconds)
{
    if (w->month < 1 || w->month > 12 || w->day < 1 || w->day > days_of_month(w->year, w->month) || w->hour > 23 ||
        w->minute > 59 || w->second > 59) {
        return 0;
    }
    *seconds = ps_date_days(w->year, w->month, w->day) * DAY + w->hour * 3600 + w->minute * 60 + w->second - w->offset;
    return ps_date_in_range(*seconds);
}

/* Z or +HH[[:]MM] at *text, as seconds; moves *text past it. */
static int read_offset(const char **text, int *offset)
{
    char sign = **text;
    *offset = 0;
    if (sign != 'Z' && sign != '+' && sign != '-') {
        return 0;
    }
    (*text)++;
    if (sign == 'Z') {
        return 1;
    }
    int parts[2] = {0};
    for (int i = 0; i < 2; i++) {
        if (!isdigit((unsigned char)(*text)[0]) || !isdigit((unsigned char)(*text)[1])) {
            return 0;
        }
        parts[i] = read_digits(text, 2);
        if (i == 0 && **text != ':' && !isdigit((unsigned char)**text)) {
            break;
        }
        *text += i == 0 && **text == ':';
    }
    *offset = (sign == '-' ? -60 : 60) * (parts[0] * 60 + parts[1]);
    return parts[0] < 24 && parts[1] < 60;
}

/* The day, in any of the three orders of its parts. */
static int read_day(const char **text, struct written *w)
{
    const char *begin = *text;
    int first = read_digits(text, 4), year_first = *text - begin == 4;
    char separator = **text;
    if (first < 0 || (year_first ? separator != '-' && separator != '/' : separator != '.' || *text - begin > 2)) {
        return 0;
    }
    (*text)++;
    w->month = read_digits(text, 2);
    if (w->month < 0 || *(*text)++ != separator) {
        return 0;
    }
    begin = *text;
    int last = read_digits(text, year_first ? 2 : 4);
    w->year = year_first ? first : last;
    w->day = year_first ? last : first;
    return last >= 0 && (year_first || *text - begin == 4);
}

static int read_time_of_day(const char **text, struct written *w)
{
    w->hour = read_digits(text, 2);
    if (w->hour < 0 || *(*text)++ != ':' || (w->minute = read_digits(text, 2)) < 0) {
        return 0;
    }
    if (**text == ':') {
        (*text)++;
        w->second = read_digits(text, 2);
        if (w->second < 0) {
            return 0;
        }
        if (**text == '.') {
            size_t zeros = strspn(++*text, "0");
            *text += zeros;
            if (zeros == 0) {
                return 0;
            }
        }
    }
    return **text == '\0' || read_offset(text, &w->offset);
}

int ps_date_read(const char *text, int64_t *seconds)
{
    struct written w = {0};
    if (!read_day(&text, &w)) {
        return 0;
    }
    if (*text == 'T' || *text == ' ') {
        text++;
        if (!read_time_of_day(&text, &w)) {
            return 0;
        }
    }
    return *text == '\0' && to_seconds(&w, seconds);
}

static int read_month_name(const char **text)
{
    static const char *const names[] = {"January", "February", "March",     "April",   "May",      "June",
                                        "July",    "August",   "September", "October", "November", "December"};
    for (int i = 0; i < 12; i++) {
        size_t length = strlen(names[i]);
        if (strncasecmp(*text, names[i], length) == 0 || strncasecmp(*text, names[i], length = 3) == 0) {
            *text += length;
            return i + 1;
        }
    }
    return -1;
}

int ps_date_suspected(const char *text)
{
    int digits = 0, separators = 0, spread = 0;
    const char *at = text;
    if (!isdigit((unsigned char)*text) && read_month_name(&at) < 0) {
        return 0;
    }
    for (; *at != '\0'; at++) {
        digits += isdigit((unsigned char)*at) != 0;
        separators += strchr("-/.:", *at) != NULL;
        spread |= strchr("-/", *at) != NULL;
        if (!isalnum((unsigned char)*at) && strchr("-/.:, +", *at) == NULL) {
            return 0;
        }
    }
    return digits > 0 && (separators > 1 || spread);
}

const char *ps_date_compact(const char *text)
{
    static const char *const formats[] = {"%Y%m%d", "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S"};
    size_t length = strlen(text);
    int64_t seconds;
    if (length < 8 || length > 14 || length % 2 != 0) {
        return NULL;
    }
    const char *format = formats[length / 2 - 4];
    int plausible = strncmp(text, "1950", 4) >= 0 && strncmp(text, "2050", 4) < 0;
    return plausible && ps_date_read_as(format, text, &seconds) ? format : NULL;
}

int ps_date_read_unix(const char *text, int64_t *seconds)
{
    static const uint64_t least = 100000000, most = 4200000000, finer = 300000000000;
    uint64_t value = 0;
    int whole = 1;
    const char *at = text;
    for (; isdigit((unsigned char)*at) && at - text < 19; at++) {
        value = 10 * value + (uint64_t)(*at - '0');
    }
    if (*at == '.') {
        at += 1 + strspn(at + 1, "0");
    }
    for (int i = 0; i < 3 && value >= finer; i++) {
        whole &= value % 1000 == 0;
        value /= 1000;
    }
    if (*at != '\0' || value < least || value > most) {
        return 0;
    }
    *seconds = (int64_t)value;
    return whole ? 1 : -1;
}

/* AM or PM: the hour that is added to those from 0 to 11; else -1. */
static int read_half(const char **text)
{
    int half = strncasecmp(*text, "AM", 2) == 0 ? 0 : strncasecmp(*text, "PM", 2) == 0 ? 12 : -1;
    *text += half < 0 ? 0 : 2;
    return half;
}

static int read_unix(const char **text, int64_t *seconds)
{
    int negative = **text == '-', digits = 0;
    *text += negative;
    for (*seconds = 0; isdigit((unsigned char)**text) && digits < 12; digits++) {
        *seconds = 10 * *seconds + (*(*text)++ - '0');
    }
    *seconds = negative ? -*seconds : *seconds;
    return digits > 0;
}

/* One letter of a format; moves *text past what it stands for. */
static int read_letter(char letter, const char **text, struct written *w, int *half, int64_t *seconds)
{
    const char *begin;
    int short_year;
    switch (letter) {
    case 'Y':
        begin = *text;
        w->year = read_digits(text, 4);
        return *text - begin == 4;
    case 'y':
        short_year = read_digits(text, 2);
        w->year = short_year + (short_year < 69 ? 2000 : 1900); /* as POSIX has it */
        return short_year >= 0;
    case 'm':
        return (w->month = read_digits(text, 2)) >= 0;
    case 'b':
        return (w->month = read_month_name(text)) >= 0;
    case 'd':
        return (w->day = read_digits(text, 2)) >= 0;
    case 'H':
    case 'I':
        return (w->hour = read_digits(text, 2)) >= 0;
    case 'M':
        return (w->minute = read_digits(text, 2)) >= 0;
    case 'S':
        return (w->second = read_digits(text, 2)) >= 0;
    case 'p':
        return (*half = read_half(text)) >= 0;
    case 'z':
        return read_offset(text, &w->offset);
    case 's':
        return read_unix(text, seconds);
    default:
        return *(*text)++ == '%';
    }
}

int ps_date_read_as(const char *format, const char *text, int64_t *seconds)
{
    struct written w = {.year = 1970, .month = 1, .day = 1};
    int half = -1;
    int64_t since_1970 = INT64_MIN;
    for (; *format != '\0'; format++) {
        if (*format == ' ') {
            text += strspn(text, " ");
        } else if (*format == '%') {
            if (!read_letter(*++format, &text, &w, &half, &since_1970)) {
                return 0;
            }
        } else if (*text++ != *format) {
            return 0;
        }
    }
    if (*text != '\0' || (half >= 0 && (w.hour < 1 || w.hour > 12))) {
        return 0;
    }
    if (half >= 0) {
        w.hour = w.hour % 12 + half;
    }
    if (since_1970 != INT64_MIN) {
        *seconds = since_1970;
        return ps_date_in_range(since_1970);
    }
    return to_seconds(&w, seconds);
}

enum ps_status ps_date_check_format(const char *format)
{
    int dated = 0;
    for (const char *at = strchr(format, '%'); at != NULL; at = strchr(at + 2, '%')) {
        if (at[1] == '\0' || strchr("YymbdHIMSpzs%", at[1]) == NULL) {
            return ps_fail(PS_USAGE,
                           "--time-format is \"%s\": \"%s\" is unknown: expected %%Y %%y %%m %%b %%d %%H %%I %%M %%S %%p %%z %%s",
                           ps_text_plain(format).text, ps_text_plain(at).text);
        }
        dated |= strchr("Yys", at[1]) != NULL;
    }
    if (!dated) {
        return ps_fail(PS_USAGE, "--time-format is \"%s\": it names no year: expected %%Y, %%y or %%s, as in %%m/%%d/%%Y %%H:%%M",
                       ps_text_plain(format).text);
    }
    return PS_OK;
}
