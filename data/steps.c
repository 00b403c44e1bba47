#include "data/steps.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/dates.h"

enum { DAY = 86400, SHORTEST_MONTH = 28 * DAY };

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* The most common value above 0, the smallest of several, and how often it is there; sorts them. 0: none is. */
static int64_t most_common(int64_t *value, int64_t n, int64_t *count)
{
    int64_t best = 0;
    *count = 0;
    qsort(value, (size_t)n, sizeof *value, compare);
    for (int64_t begin = 0, end; begin < n; begin = end) {
        for (end = begin + 1; end < n && value[end] == value[begin]; end++) {
        }
        if (value[begin] > 0 && end - begin > *count) {
            best = value[begin];
            *count = end - begin;
        }
    }
    return best;
}

static struct ps_civil civil_of(int64_t time, int64_t *second_of_day)
{
    int64_t days = time / DAY - (time % DAY < 0);
    *second_of_day = time - days * DAY;
    return ps_date_civil(days);
}

static int on_day(struct ps_civil civil, int64_t day)
{
    return civil.day == (day < civil.days_of_month ? day : civil.days_of_month);
}

/* The months between two times, when both lie on that day of their months, at the same second; else 0. */
static int64_t months_between(int64_t before, int64_t time, int64_t day)
{
    int64_t second_before, second;
    struct ps_civil from = civil_of(before, &second_before), to = civil_of(time, &second);
    return on_day(from, day) && on_day(to, day) && second_before == second ? 12 * (to.year - from.year) + to.month - from.month : 0;
}

/* The day of the month that most times have: 31 for the last of each. */
static int64_t common_day(const int64_t *time, int64_t rows)
{
    int64_t count[32] = {0}, second, best = 1;
    for (int64_t i = 0; i < rows; i++) {
        struct ps_civil civil = civil_of(time[i], &second);
        for (int64_t day = civil.day; day <= (civil.day == civil.days_of_month ? 31 : civil.day); day++) {
            count[day]++;
        }
    }
    for (int64_t day = 2; day <= 31; day++) {
        best = count[day] > count[best] ? day : best;
    }
    return best;
}

static int64_t first_irregular(const struct ps_steps *steps, const int64_t *time, int64_t rows)
{
    for (int64_t i = 1; i < rows; i++) {
        if (ps_steps_missing(steps, time[i - 1], time[i]) != 0) {
            return i;
        }
    }
    return 0;
}

int ps_steps_find(const int64_t *time, int64_t rows, struct ps_steps *steps)
{
    *steps = (struct ps_steps){.seconds = time[1] - time[0], .count = rows - 1};
    if (steps->seconds < SHORTEST_MONTH && first_irregular(steps, time, rows) == 0) {
        return 1;
    }
    int64_t *step = malloc((size_t)(rows - 1) * sizeof *step), count;
    if (step == NULL) {
        return 0;
    }
    for (int64_t i = 1; i < rows; i++) {
        step[i - 1] = time[i] - time[i - 1];
    }
    steps->seconds = most_common(step, rows - 1, &steps->count);
    if (steps->seconds >= SHORTEST_MONTH) {
        int64_t day = common_day(time, rows);
        for (int64_t i = 1; i < rows; i++) {
            step[i - 1] = months_between(time[i - 1], time[i], day);
        }
        int64_t months = most_common(step, rows - 1, &count);
        if (count >= steps->count) {
            *steps = (struct ps_steps){.months = months, .day = day, .count = count};
        }
    }
    free(step);
    steps->irregular_at = first_irregular(steps, time, rows);
    return 1;
}

int64_t ps_steps_missing(const struct ps_steps *steps, int64_t before, int64_t time)
{
    int64_t length = steps->seconds > 0 ? steps->seconds : steps->months;
    int64_t between = steps->seconds > 0 ? time - before : months_between(before, time, steps->day);
    return between > 0 && between % length == 0 ? between / length - 1 : -1;
}

int64_t ps_steps_after(const struct ps_steps *steps, int64_t time, int64_t n)
{
    if (steps->seconds > 0) {
        return time + n * steps->seconds;
    }
    int64_t second;
    const struct ps_civil from = civil_of(time, &second);
    const int64_t month = 12 * from.year + from.month - 1 + n * steps->months;
    const int64_t first = ps_date_days(month / 12, (int)(month % 12) + 1, 1), days = ps_date_civil(first).days_of_month;
    return (first + (steps->day < days ? steps->day : days) - 1) * DAY + second;
}

struct ps_span_text ps_seconds_text(int64_t seconds)
{
    static const struct {
        int64_t seconds;
        const char *name;
    } units[] = {{DAY, "d"}, {3600, "h"}, {60, "min"}, {1, "s"}};
    int u = 0;
    while (seconds % units[u].seconds != 0) {
        u++;
    }
    struct ps_span_text span;
    snprintf(span.text, sizeof span.text, "%" PRId64 "%s", seconds / units[u].seconds, units[u].name);
    return span;
}

struct ps_span_text ps_steps_text(const struct ps_steps *steps)
{
    if (steps->seconds > 0) {
        return ps_seconds_text(steps->seconds);
    }
    int years = steps->months % 12 == 0;
    struct ps_span_text span;
    snprintf(span.text, sizeof span.text, "%" PRId64 "%s", years ? steps->months / 12 : steps->months, years ? "y" : "mo");
    return span;
}

int ps_steps_read(const char *text, struct ps_steps *steps)
{
    static const struct {
        const char *name;
        int64_t seconds, months;
    } units[] = {{"s", 1, 0}, {"min", 60, 0}, {"h", 3600, 0}, {"d", DAY, 0}, {"mo", 0, 1}, {"y", 0, 12}};
    enum { MOST = 1000000 };
    char *unit;
    int64_t n = text[0] >= '0' && text[0] <= '9' ? strtoll(text, &unit, 10) : 0;
    if (n < 1 || n > MOST) {
        return 0;
    }
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcmp(unit, units[i].name) == 0) {
            *steps = (struct ps_steps){.seconds = n * units[i].seconds, .months = n * units[i].months};
            return 1;
        }
    }
    return 0;
}
