/* A program's command line, read against a table of its options. */
#ifndef PS_SRC_OPTIONS_H
#define PS_SRC_OPTIONS_H

#include <stdint.h>

#include "kernels/status.h"

enum { PS_OVERRIDES = 64 };

/* What --set gave, as ps_config_load takes it. */
struct ps_overrides {
    char *text[PS_OVERRIDES];
    int n;
};

/* One option: its name and where it goes. One of the pointers is not NULL, and says whether a value is taken. */
struct ps_option {
    const char *name; /* without "--"; NULL ends the table */
    int *given;       /* no value; becomes 1 */
    const char **text;
    struct ps_overrides *overrides;
    uint64_t *number; /* whole, from least to most */
    uint64_t least, most;
};

/* Options may stand before, between and behind the operands; afterwards the operands are the last of argv, in their order. --help
 * prints the usage and ends the program. PS_USAGE in one line for an unknown option, a value that is missing or outside its range,
 * and another number of operands; `operands` names those that are needed. */
enum ps_status ps_options_read(int argc, char **argv, const struct ps_option *options, int n_operands, const char *operands,
                               const char *usage);

/* Whether `option` may write `out`: never over the checkpoint or the data that are read (NULL: none), and over another file with
 * --overwrite alone. PS_USAGE. */
enum ps_status ps_options_output(const char *option, const char *out, int overwrite, const char *checkpoint, const char *data);

#endif
