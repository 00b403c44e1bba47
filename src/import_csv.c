/* import_csv: a CSV of numbers to the HDF5 series that train reads. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "data/csv.h"
#include "data/dates.h"
#include "data/files.h"
#include "data/import.h"
#include "src/options.h"

static const char usage[] =
    "usage: import_csv IN.csv OUT.h5 [--time-column NAME] [--time-format FORMAT] [--allow-gaps] [--fill previous|linear|nan|none]\n"
    "                                [--delimiter NAME] [--decimal-comma] [--panel ID,TIME,VALUE] [--overwrite]\n"
    "\n"
    "Reads a CSV with a header line and writes /series [rows, channels] as float32, with the channels' names, and /time when a\n"
    "column holds times. Each time must follow the one before by the same step, which may be months or years of the calendar.\n"
    "Every other column must hold finite numbers.\n"
    "\n"
    "  --time-column NAME    the column of times, by default the first one when its values are dates:\n"
    "                        " PS_DATE_FORMS ",\n"
    "                        behind the time Z or an offset such as +01:00, +0100; or Unix seconds or milliseconds\n"
    "  --time-format FORMAT  how the times are written, else; the column is the first one, or --time-column's. %Y year, %y its\n"
    "                        last two digits, %m month, %b its name, %d day, %H or %I hour, %M minute, %S second, %p AM or PM,\n"
    "                        %z offset, %s Unix seconds, the rest itself: \"%m/%d/%Y %I:%M %p\" is 1/31/2022 11:00 PM\n"
    "  --allow-gaps          take rows as they stand where times between them are missing or steps differ: windows then span the\n"
    "                        gaps. Times that are there twice or out of order are refused all the same\n"
    "  --fill HOW            missing values (" PS_MISSING_FORMS ") become the channel's value before\n"
    "                        (previous) or lie on the line from that to the next one (linear, which looks ahead), stay\n"
    "                        NaN, which train takes with data.missing: mask (nan), or are refused (none, the default). Before a\n"
    "                        channel's first value stands that one\n"
    "  --delimiter NAME      what fields are cut at: comma, semicolon, tab or bar; by default what the header has most of\n"
    "  --decimal-comma       numbers have a decimal comma, not a point\n"
    "  --panel ID,TIME,VALUE many series, a row for each time of each: the columns that hold its name, time and value, others are\n"
    "                        not read. Rows may come in any order, each time of a series once, whole steps of one length apart.\n"
    "                        Rows that are missing between others are filled as --fill says, or refused. Writes /values, "
    "/offsets,\n"
    "                        /ids and /start\n"
    "  --overwrite           replace OUT.h5 when it exists\n"
    "  --help                this text\n"
    "\n"
    "Exit codes: 0 done, 2 usage, 3 data.\n";

/* OUT may exist with --overwrite alone, and is never IN. */
static enum ps_status check_output(const char *in, const char *out, int overwrite)
{
    struct stat in_stat, out_stat;
    if (stat(out, &out_stat) != 0) {
        return PS_OK;
    }
    if (!overwrite) {
        return ps_fail(PS_USAGE, "%s exists: choose another name, or replace it with --overwrite", out);
    }
    if (stat(in, &in_stat) == 0 && in_stat.st_dev == out_stat.st_dev && in_stat.st_ino == out_stat.st_ino) {
        return ps_fail(PS_USAGE, "%s is the CSV itself: choose another name", out);
    }
    return PS_OK;
}

static const char *const fills[] = {
    [PS_FILL_NONE] = "none", [PS_FILL_PREVIOUS] = "previous", [PS_FILL_LINEAR] = "linear", [PS_FILL_NAN] = "nan"};

static enum ps_status read_fill(const char *text, enum ps_fill *fill)
{
    for (*fill = PS_FILL_NONE; *fill <= PS_FILL_NAN; ++*fill) {
        if (strcmp(text, fills[*fill]) == 0) {
            return PS_OK;
        }
    }
    return ps_fail(PS_USAGE, "--fill is \"%s\": expected previous, linear, nan or none", text);
}

/* What became of missing values. */
static void print_fate(const char *fill)
{
    if (strcmp(fill, fills[PS_FILL_NAN]) == 0) {
        printf(" kept as NaN");
    } else {
        printf(" filled (%s)", fill);
    }
}

static enum ps_status import_panel(const char *in, const char *out, const char *columns, const struct ps_import_options *how,
                                   const char *fill)
{
    if (how->time_column != NULL || how->allow_gaps) {
        return ps_fail(PS_USAGE, "--panel names the column of times itself, and its gaps are filled: leave out %s",
                       how->time_column != NULL ? "--time-column" : "--allow-gaps");
    }
    struct ps_panel_imported done;
    PS_TRY(ps_import_panel(in, out, columns, how, &done));
    printf("%s: %" PRId64 " series, %" PRId64 " rows, period %s", out, done.series, done.rows, done.period);
    if (done.gaps + done.missing > 0) {
        printf(", %" PRId64 " missing rows in %" PRId64 " series and %" PRId64 " missing values", done.gaps, done.with_gaps,
               done.missing);
        print_fate(fill);
    }
    printf("\n");
    return PS_OK;
}

static enum ps_status import_series(const char *in, const char *out, const struct ps_import_options *how, const char *fill)
{
    struct ps_imported done;
    PS_TRY(ps_import_csv(in, out, how, &done));
    if (done.warning[0] != '\0') {
        fprintf(stderr, "import_csv: warning: %s\n", done.warning);
    }
    const char *period = done.period[0] != '\0' ? done.period : "unknown";
    printf("%s: %" PRId64 " rows, %" PRId64 " channels, period %s", out, done.rows, done.channels, period);
    if (strcmp(done.cut_at, "commas") != 0) {
        printf(", cut at %s", done.cut_at);
    }
    if (done.gaps > 0) {
        printf(", %" PRId64 " gaps", done.gaps);
    }
    if (done.filled > 0) {
        printf(", %" PRId64 " missing values in %" PRId64 " channels", done.filled, done.filled_channels);
        print_fate(fill);
    }
    printf("\n");
    return PS_OK;
}

int main(int argc, char **argv)
{
    ps_streams_open();
    struct ps_import_options how = {0};
    const char *fill = fills[PS_FILL_NONE], *delimiter = NULL, *panel = NULL;
    int overwrite = 0;
    const struct ps_option options[] = {{"time-column", .text = &how.time_column},
                                        {"time-format", .text = &how.time_format},
                                        {"delimiter", .text = &delimiter},
                                        {"decimal-comma", .given = &how.decimal_comma},
                                        {"fill", .text = &fill},
                                        {"allow-gaps", .given = &how.allow_gaps},
                                        {"panel", .text = &panel},
                                        {"overwrite", .given = &overwrite},
                                        {0}};
    enum ps_status status = ps_options_read(argc, argv, options, 2, "IN.csv and OUT.h5", usage);
    const char *in = NULL, *out = NULL;
    if (status == PS_OK) {
        in = argv[argc - 2];
        out = argv[argc - 1];
        status = check_output(in, out, overwrite);
    }
    if (status == PS_OK) {
        status = read_fill(fill, &how.fill);
    }
    if (status == PS_OK && delimiter != NULL && !ps_csv_read_delimiter(delimiter, &how.delimiter)) {
        status = ps_fail(PS_USAGE, "--delimiter is \"%s\": expected comma, semicolon, tab or bar", delimiter);
    }
    if (status == PS_OK) {
        status = panel != NULL ? import_panel(in, out, panel, &how, fill) : import_series(in, out, &how, fill);
    }
    if (status != PS_OK) {
        fprintf(stderr, "import_csv: %s\n", ps_error_message());
    }
    return status;
}
