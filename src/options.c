#include "src/options.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { MOST = 30 }; /* options that a program has */

static enum ps_status take(const struct ps_option *o, char *value)
{
    if (o->given) {
        *o->given = 1;
    } else if (o->text) {
        *o->text = value;
    } else if (o->overrides) {
        if (o->overrides->n == PS_OVERRIDES) {
            return ps_fail(PS_USAGE, "--%s: more than %d of them: write a config", o->name, PS_OVERRIDES);
        }
        o->overrides->text[o->overrides->n++] = value;
    } else {
        char *end;
        errno = 0;
        unsigned long long number = strtoull(value, &end, 10);
        /* strtoull also takes leading spaces and signs. */
        if (*value < '0' || *value > '9' || *end || errno || number < o->least || number > o->most) {
            return ps_fail(PS_USAGE, "--%s is \"%s\": expected a whole number from %" PRIu64 " to %" PRIu64, o->name, value,
                           o->least, o->most);
        }
        *o->number = number;
    }
    return PS_OK;
}

enum ps_status ps_options_read(int argc, char **argv, const struct ps_option *options, int n_operands, const char *operands,
                               const char *usage)
{
    struct option table[MOST + 2] = {{"help", no_argument, NULL, 'h'}};
    for (int i = 0; options[i].name && i < MOST; i++) {
        table[i + 1] = (struct option){options[i].name, options[i].given ? no_argument : required_argument, NULL, 0};
    }
    opterr = 0; /* the message is ours, in one line */
    for (int found, at; (found = getopt_long(argc, argv, ":h", table, &at)) != -1;) {
        switch (found) {
        case 'h':
            fputs(usage, stdout);
            exit(0);
        case ':':
            return ps_fail(PS_USAGE, "%s needs a value: see --help", argv[optind - 1]);
        case '?':
            return ps_fail(PS_USAGE, "unknown option %s: see --help", argv[optind - 1]);
        default:
            PS_TRY(take(&options[at - 1], optarg));
        }
    }
    if (argc - optind != n_operands) {
        return ps_fail(PS_USAGE, "needs %s, and %d given: see --help", operands, argc - optind);
    }
    return PS_OK;
}

enum ps_status ps_options_output(const char *option, const char *out, int overwrite, const char *checkpoint, const char *data)
{
    const char *const read[2] = {checkpoint, data};
    struct stat there, in;
    if (stat(out, &there) != 0) {
        return PS_OK;
    }
    for (int i = 0; i < 2; i++) {
        if (read[i] && stat(read[i], &in) == 0 && in.st_dev == there.st_dev && in.st_ino == there.st_ino) {
            return ps_fail(PS_USAGE, "%s: %s is the %s that is read: choose another name", option, out,
                           i == 0 ? "checkpoint" : "data");
        }
    }
    return overwrite ? PS_OK : ps_fail(PS_USAGE, "%s: %s exists: choose another name, or replace it with --overwrite", option, out);
}
