/* sample_series: a generated series, or windows cut from one. */
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>

#include "data/files.h"
#include "data/import.h"
#include "src/options.h"

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

struct arguments {
    const char *out;
    uint64_t hours, channels, seed, windows, seq_len, pred_len; /* 0: not given */
    int overwrite;
};

static enum ps_status read_arguments(int argc, char **argv, struct arguments *a)
{
    const struct ps_option options[] = {{"hours", .number = &a->hours, .least = 1, .most = INT32_MAX},
                                        {"channels", .number = &a->channels, .least = 1, .most = INT32_MAX},
                                        {"seed", .number = &a->seed, .most = UINT64_MAX},
                                        {"windows", .number = &a->windows, .least = 1, .most = INT32_MAX},
                                        {"seq-len", .number = &a->seq_len, .least = 1, .most = INT32_MAX},
                                        {"pred-len", .number = &a->pred_len, .least = 1, .most = INT32_MAX},
                                        {"overwrite", .given = &a->overwrite},
                                        {0}};
    PS_TRY(ps_options_read(argc, argv, options, 1, "one OUT.h5", usage));
    a->out = argv[argc - 1];
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
    enum ps_status status = read_arguments(argc, argv, &a);
    if (status == PS_OK && a.windows != 0) {
        status = ps_sample_windows(a.out, (int64_t)a.windows, (int64_t)a.channels, (int64_t)a.seq_len, (int64_t)a.pred_len, a.seed);
    } else if (status == PS_OK) {
        a.hours = a.hours != 0 ? a.hours : 8760;
        status = ps_sample_series(a.out, (int64_t)a.hours, (int64_t)a.channels, a.seed);
    }
    if (status != PS_OK) {
        fprintf(stderr, "sample_series: %s\n", ps_error_message());
        return status;
    }
    if (a.windows != 0) {
        printf("%s: %" PRIu64 " windows, %" PRIu64 " channels, seq_len %" PRIu64 ", pred_len %" PRIu64 "\n", a.out, a.windows,
               a.channels, a.seq_len, a.pred_len);
    } else {
        printf("%s: %" PRIu64 " rows, %" PRIu64 " channels, period 1h\n", a.out, a.hours, a.channels);
    }
    return PS_OK;
}
