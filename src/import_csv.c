/* import_csv: a CSV of numbers to the HDF5 series that train reads. */
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>

#include "data/files.h"
#include "data/import.h"

static const char usage[] =
    "usage: import_csv IN.csv OUT.h5 [--time-column NAME] [--overwrite]\n"
    "\n"
    "Reads a CSV with a header line and writes /series [rows, channels] as float32, with the channels' names, and /time when a\n"
    "column holds dates, each later than the one before. Every other column must hold finite numbers.\n"
    "\n"
    "  --time-column NAME  the column of dates (default: the first one, when its values are dates)\n"
    "  --overwrite         replace OUT.h5 when it exists\n"
    "  --help              this text\n"
    "\n"
    "Exit codes: 0 done, 2 usage, 3 data.\n";

static int fail(enum ps_status status)
{
    fprintf(stderr, "import_csv: %s\n", ps_error_message());
    return status;
}

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

int main(int argc, char **argv)
{
    ps_streams_open();
    static const struct option options[] = {{"time-column", required_argument, NULL, 't'},
                                            {"overwrite", no_argument, NULL, 'o'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    const char *time_column = NULL;
    int overwrite = 0, option;
    opterr = 0; /* the message is ours, in one line */
    while ((option = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        switch (option) {
        case 't':
            time_column = optarg;
            break;
        case 'o':
            overwrite = 1;
            break;
        case 'h':
            fputs(usage, stdout);
            return PS_OK;
        case ':':
            return fail(ps_fail(PS_USAGE, "%s needs a value: see --help", argv[optind - 1]));
        default:
            return fail(ps_fail(PS_USAGE, "unknown option %s: see --help", argv[optind - 1]));
        }
    }
    if (argc - optind != 2) {
        return fail(ps_fail(PS_USAGE, "needs IN.csv and OUT.h5, and %d given: see --help", argc - optind));
    }
    const char *in = argv[optind], *out = argv[optind + 1];
    struct ps_imported done;
    enum ps_status status = check_output(in, out, overwrite);
    if (status == PS_OK) {
        status = ps_import_csv(in, out, time_column, &done);
    }
    if (status != PS_OK) {
        return fail(status);
    }
    const char *period = done.period[0] != '\0' ? done.period : "unknown";
    printf("%s: %" PRId64 " rows, %" PRId64 " channels, period %s\n", out, done.rows, done.channels, period);
    return PS_OK;
}
