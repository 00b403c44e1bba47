/* import_weights: another implementation's weights to a checkpoint that evaluate takes and training starts from. */
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>

#include "data/files.h"
#include "src/options.h"
#include "src/weights.h"

static const char usage[] =
    "usage: import_weights FROM OUT.h5 [--config FILE] [--set section.key=value]... [--data FILE] [--channels C] [--overwrite]\n"
    "\n"
    "FROM is a folder of Hugging Face's PatchTSTForPrediction (config.json and model.safetensors), or a state dict of the "
    "authors'\n"
    "PatchTST as safetensors, which scripts/pth_to_safetensors.py makes of a .pth. OUT.h5 is a checkpoint for evaluate, and for\n"
    "train --init-from.\n"
    "\n"
    "  --config FILE            a config, for what the weights do not tell: of the authors' model.seq_len, stride, padding and\n"
    "                           dropout, and where theirs is another one model.norm_place, residual_attention, activation, revin\n"
    "  --set section.key=value  override a key of it; may be repeated\n"
    "  --data FILE              the HDF5 file that the scaler is fitted to, as train does (default: data.path; without one the\n"
    "                           checkpoint does not scale, and evaluate needs --data)\n"
    "  --channels C             how many channels the data have, where neither weights nor data say\n"
    "  --overwrite              replace OUT.h5 when it exists\n"
    "\n"
    "exit codes: 0 done, 2 usage or config, 3 data, 4 weights that cannot be taken\n";

int main(int argc, char **argv)
{
    ps_streams_open();
    int overwrite = 0;
    uint64_t channels = 0;
    struct ps_overrides overrides = {.n = 0};
    struct ps_weights_import import = {0};
    struct ps_weights_done done;
    struct stat there;
    const struct ps_option options[] = {
        {"config", .text = &import.config}, {"set", .overrides = &overrides},
        {"data", .text = &import.data},     {"channels", .number = &channels, .least = 1, .most = 1 << 24},
        {"overwrite", .given = &overwrite}, {0}};
    enum ps_status status = ps_options_read(argc, argv, options, 2, "FROM and OUT.h5", usage);
    if (status == PS_OK) {
        import.from = argv[argc - 2];
        import.out = argv[argc - 1];
        import.channels = (int64_t)channels;
        import.overrides = overrides.text;
        import.n_overrides = overrides.n;
        if (!overwrite && stat(import.out, &there) == 0) {
            status = ps_fail(PS_USAGE, "%s exists: choose another name, or replace it with --overwrite", import.out);
        }
    }
    if (status == PS_OK) {
        status = ps_weights_import(&import, &done);
    }
    if (status != PS_OK) {
        fprintf(stderr, "import_weights: %s\n", ps_error_message());
        return (int)status;
    }
    printf("%s: %" PRId64 " parameters, %" PRId64 " channels, %s\n", import.out, done.parameters, done.channels,
           done.scaled ? "with the data's scaler" : "no scaler");
    return (int)ps_stdout_flush(PS_USAGE);
}
