/* sample_series: a generated series, or windows cut from one. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "data/files.h"
#include "data/import.h"

static const char usage[] =
    "usage: sample_series OUT.h5 [--hours N] [--channels C] [--seed S] [--overwrite]\n"
    "       sample_series OUT.h5 --windows W --seq-len L --pred-len H [--channels C] [--seed S] [--overwrite]\n"
    "\n"
    "Writes a generated hourly series [hours, channels] with trend, daily and weekly seasons and noise; or ready-made windows cut\n"
    "from such a series, an hour apart: inputs [W, C, L] and targets [W, C, H]. Equal arguments make equal values.\n"
    "\n"
    "  --hours N     rows (8760)\n"
    "  --channels C  channels (7)\n"
    "  --seed S      seed (1)\n"
    "  --windows W   how many windows; needs --seq-len and --pred-len\n"
    "  --seq-len L   input rows of a window\n"
    "  --pred-len H  target rows of a window\n"
    "  --overwrite   replace OUT.h5 when it exists\n"
    "  --help        this text\n"
    "\n"
    "Exit codes: 0 done, 2 usage, 3 data.\n";

static int fail(enum ps_status status)
{
    fprintf(stderr, "sample_series: %s\n", ps_error_message());
    return status;
}

struct arguments {
    const char *out;
    uint64_t hours, channels, seed, windows, seq_len, pred_len; /* 0: not given */
    int overwrite;
};

/* A whole decimal number from least to most. */
static enum ps_status read_whole(const char *option, const char *text, uint64_t least, uint64_t most, uint64_t *value)
{
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || number < least || number > most) {
        return ps_fail(PS_USAGE, "--%s is \"%s\": expected a whole number from %" PRIu64 " to %" PRIu64, option, text, least, most);
    }
    *value = number;
    return PS_OK;
}

/* *help = 1 when that was all that was asked. */
static enum ps_status read_arguments(int argc, char **argv, struct arguments *a, int *help)
{
    static const struct option options[] = {{"hours", required_argument, NULL, 'n'},
                                            {"channels", required_argument, NULL, 'c'},
                                            {"seed", required_argument, NULL, 's'},
                                            {"windows", required_argument, NULL, 'w'},
                                            {"seq-len", required_argument, NULL, 'l'},
                                            {"pred-len", required_argument, NULL, 'p'},
                                            {"overwrite", no_argument, NULL, 'o'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    uint64_t *const values[] = {&a->hours, &a->channels, &a->seed, &a->windows, &a->seq_len, &a->pred_len};
    int option, at;
    opterr = 0; /* the message is ours, in one line */
    while ((option = getopt_long(argc, argv, ":h", options, &at)) != -1) {
        switch (option) {
        case 'o':
            a->overwrite = 1;
            break;
        case 'h':
            *help = 1;
            return PS_OK;
        case ':':
            return ps_fail(PS_USAGE, "%s needs a value: see --help", argv[optind - 1]);
        case '?':
            return ps_fail(PS_USAGE, "unknown option %s: see --help", argv[optind - 1]);
        default:
            PS_TRY(read_whole(options[at].name, optarg, option == 's' ? 0 : 1, option == 's' ? UINT64_MAX : INT32_MAX, values[at]));
        }
    }
    if (argc - optind != 1) {
        return ps_fail(PS_USAGE, "needs one OUT.h5, and %d given: see --help", argc - optind);
    }
    a->out = argv[optind];
    if ((a->windows != 0) != (a->seq_len != 0) || (a->windows != 0) != (a->pred_len != 0)) {
        return ps_fail(PS_USAGE, "--windows, --seq-len and --pred-len go together: give all three or none");
    }
    if (a->windows != 0 && a->hours != 0) {
        return ps_fail(PS_USAGE, "--hours and --windows exclude each other: windows bring the hours they need");
    }
    struct stat st;
    if (stat(a->out, &st) == 0 && !a->overwrite) {
        return ps_fail(PS_USAGE, "%s exists: choose another name, or replace it with --overwrite", a->out);
    }
    return PS_OK;
}

int main(int argc, char **argv)
{
    ps_streams_open();
    struct arguments a = {.channels = 7, .seed = 1};
    int help = 0;
    enum ps_status status = read_arguments(argc, argv, &a, &help);
    if (help) {
        fputs(usage, stdout);
        return PS_OK;
    }
    if (status == PS_OK && a.windows != 0) {
        status = ps_sample_windows(a.out, (int64_t)a.windows, (int64_t)a.channels, (int64_t)a.seq_len, (int64_t)a.pred_len, a.seed);
    } else if (status == PS_OK) {
        a.hours = a.hours != 0 ? a.hours : 8760;
        status = ps_sample_series(a.out, (int64_t)a.hours, (int64_t)a.channels, a.seed);
    }
    if (status != PS_OK) {
        return fail(status);
    }
    if (a.windows != 0) {
        printf("%s: %" PRIu64 " windows, %" PRIu64 " channels, seq_len %" PRIu64 ", pred_len %" PRIu64 "\n", a.out, a.windows,
               a.channels, a.seq_len, a.pred_len);
    } else {
        printf("%s: %" PRIu64 " rows, %" PRIu64 " channels, period 1h\n", a.out, a.hours, a.channels);
    }
    return PS_OK;
}
