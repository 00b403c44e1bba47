/* Some channels of a file, or all of them in another order: what is read is the whole row, and what is kept of it stands here. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/series_file.h"
#include "data/text.h"

static int64_t channel_named(const struct ps_series *series, const char *name)
{
    for (int64_t c = 0; c < series->channels; c++) {
        if (strcmp(series->channel_names[c], name) == 0) {
            return c;
        }
    }
    return -1;
}

static enum ps_status fail_unknown(const struct ps_series *series, const struct ps_reading *reading, const char *name)
{
    char has[256] = "";
    int64_t c = 0;
    for (size_t used = 0; c < series->channels && used < sizeof has / 2; c++) {
        snprintf(has + used, sizeof has - used, "%s\"%.60s\"", c > 0 ? ", " : "", ps_text_plain(series->channel_names[c]).text);
        used = strlen(has);
    }
    return ps_fail(PS_DATA, "%s: has no channel \"%s\", which %s: it has %s%s", series->path, ps_text_plain(name).text,
                   reading->trained ? "the model was trained on" : "data.channels names", has, c < series->channels ? ", ..." : "");
}

/* Keeps of the series' names those of the columns; the rest are freed. */
static void pick_names(struct ps_series *series, const int64_t *column, int64_t n, char **names)
{
    for (int64_t c = 0; c < n; c++) {
        names[c] = series->channel_names[column[c]];
        series->channel_names[column[c]] = NULL;
    }
    for (int64_t c = 0; c < series->channels; c++) {
        free(series->channel_names[c]);
    }
    free(series->channel_names);
    series->channel_names = names;
}

enum ps_status ps_series_pick(const struct ps_reading *reading, struct ps_series *series)
{
    const int64_t n = reading->channel_count;
    if (n == 0 || (reading->trained && series->channel_names == NULL)) {
        return PS_OK;
    }
    if (series->channel_names == NULL) {
        return ps_fail(PS_DATA, "%s: data.channels: %s: leave the key out", series->path,
                       series->panel != NULL
                           ? "a panel is of one channel, without a name"
                           : "the file has no names for its channels (attribute channels, which import_csv writes)");
    }
    int64_t *column = malloc((size_t)n * sizeof *column);
    char **names = calloc((size_t)n, sizeof *names);
    enum ps_status status = column != NULL && names != NULL ? PS_OK : ps_fail(PS_DATA, "%s: out of host memory", series->path);
    const char *name = reading->channels;
    int as_stored = n == series->channels;
    for (int64_t c = 0; c < n && status == PS_OK; c++, name += strlen(name) + 1) {
        column[c] = channel_named(series, name);
        as_stored &= column[c] == c;
        if (column[c] < 0) {
            status = fail_unknown(series, reading, name);
        }
        for (int64_t i = 0; i < c && status == PS_OK; i++) {
            if (column[i] == column[c]) {
                status = ps_fail(PS_DATA, "%s: channel \"%s\" is asked for twice", series->path, ps_text_plain(name).text);
            }
        }
    }
    if (status != PS_OK || as_stored) {
        free(column);
        free(names);
        return status;
    }
    pick_names(series, column, n, names);
    series->channels = n;
    series->file->column = column;
    for (int i = 0; i < 2; i++) {
        struct ps_dataset *d = &series->file->dataset[i];
        if (d->id >= 0) {
            d->count = d->count / d->size[1] * n;
            d->size[1] = n;
        }
    }
    return PS_OK;
}

void ps_rows_pick(const struct ps_series *series, const struct ps_dataset *d, int64_t rows, const float *from, float *to)
{
    const int64_t inner = d->rank > 2 ? d->size[2] : 1;
    for (int64_t r = 0; r < rows; r++, from += d->stored_channels * inner) {
        for (int64_t c = 0; c < series->channels; c++, to += inner) {
            memcpy(to, from + series->file->column[c] * inner, (size_t)inner * sizeof *to);
        }
    }
}
