/* The CSV importer. Input: a CSV, and before it the options, each a byte: 1: the column of times is named "date", 2: and is read
 * by the format that follows, up to a line's end, 3: gaps are allowed, 4 and 5: missing values are filled, 6: numbers have a
 * decimal comma, 7: and fields are cut at semicolons, 8: there are many series, named by "id", 11: missing values stay. What is
 * imported must be a series or a panel. */
#include "data/import.h"
#include "data/series.h"
#include "data/times.h"
#include "tests/fuzz/fuzz.h"

/* What was written, with `missing` values that were, is a series and its times; the values are missing in it where they stay. */
static void must_hold(const char *path, int64_t missing, const struct ps_import_options *options)
{
    struct ps_series *series;
    MUST(ps_series_look(path) == PS_OK);
    MUST(ps_series_open_as(path, &(struct ps_reading){.masked = options->fill == PS_FILL_NAN}, &series) == PS_OK);
    MUST(series->missing == (options->fill == PS_FILL_NAN ? missing : 0));
    struct ps_times times;
    MUST(ps_times_read(path, series->rows, &times) == PS_OK);
    ps_times_free(&times);
    ps_series_close(series);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char out[256], format[256];
    struct ps_import_options options = {0};
    int panel = 0;
    for (; size > 0 && ((data[0] >= 1 && data[0] <= 8) || data[0] == 11); data++, size--) {
        const uint8_t *end = memchr(data, '\n', size);
        switch (data[0]) {
        case 1:
            options.time_column = "date";
            break;
        case 2:
            if (end == NULL || end - data > (ptrdiff_t)sizeof format) {
                return -1;
            }
            snprintf(format, sizeof format, "%.*s", (int)(end - data - 1), (const char *)data + 1);
            options.time_format = format;
            size -= (size_t)(end - data);
            data = end;
            break;
        case 3:
            options.allow_gaps = 1;
            break;
        case 6:
            options.decimal_comma = 1;
            break;
        case 7:
            options.delimiter = ';';
            break;
        case 8:
            panel = 1;
            break;
        default:
            options.fill = data[0] == 4 ? PS_FILL_PREVIOUS : data[0] == 5 ? PS_FILL_LINEAR : PS_FILL_NAN;
            break;
        }
    }
    if (panel) {
        struct ps_panel_imported made;
        enum ps_status status = ps_import_panel(put_file(data, size), own_path(out, ".h5"), "id,date,v", &options, &made);
        must_explain(status, status == PS_USAGE && options.time_format != NULL ? PS_USAGE : PS_DATA);
        if (status == PS_OK) {
            MUST(made.series > 0 && made.rows >= made.series);
            MUST(made.missing < made.rows);
            MUST(made.gaps + made.missing == 0 || options.fill != PS_FILL_NONE);
            must_hold(out, made.gaps + made.missing, &options);
            MUST(unlink(out) == 0);
        }
        return 0;
    }
    struct ps_imported imported;
    enum ps_status status = ps_import_csv(put_file(data, size), own_path(out, ".h5"), &options, &imported);
    must_explain(status, status == PS_USAGE && options.time_format != NULL ? PS_USAGE : PS_DATA);
    if (status == PS_OK) {
        MUST(imported.rows > 0 && imported.channels > 0);
        MUST(imported.gaps == 0 || (options.allow_gaps && imported.gaps < imported.rows));
        MUST(imported.filled == 0 || (options.fill != PS_FILL_NONE && imported.filled < imported.rows * imported.channels));
        MUST(strchr(imported.warning, '\n') == NULL);
        must_hold(out, imported.filled, &options);
        MUST(unlink(out) == 0);
    }
    return 0;
}
