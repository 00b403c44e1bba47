/* export_weights: a checkpoint's weights as a folder of Hugging Face's PatchTSTForPrediction. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "data/files.h"
#include "src/options.h"
#include "src/weights.h"

static const char usage[] =
    "usage: export_weights CHECKPOINT DIR [--overwrite]\n"
    "\n"
    "Writes DIR/config.json and DIR/model.safetensors, which transformers' PatchTSTForPrediction.from_pretrained loads and which\n"
    "forecast the same. A model that PatchTSTForPrediction cannot be is refused. The data's scaler has no place there: what the\n"
    "exported model reads and forecasts is in standardised units.\n"
    "\n"
    "  --overwrite  replace the two files when they exist\n"
    "\n"
    "exit codes: 0 done, 2 usage, or a model that has no counterpart, 4 checkpoint\n";

/* Files that exist are replaced only when that was asked for. */
static enum ps_status check_output(const char *folder)
{
    const char *const names[] = {PS_WEIGHTS_CONFIG, PS_WEIGHTS_TENSORS};
    for (int i = 0; i < 2; i++) {
        struct stat there;
        char *path = ps_weights_file(folder, names[i]);
        int exists = path && stat(path, &there) == 0;
        free(path);
        if (exists) {
            return ps_fail(PS_USAGE, "%s/%s exists: choose another folder, or replace it with --overwrite", folder, names[i]);
        }
    }
    return PS_OK;
}

int main(int argc, char **argv)
{
    ps_streams_open();
    int overwrite = 0;
    struct ps_weights_done done;
    double path_dropouts[2];
    const char *checkpoint = NULL, *folder = NULL;
    const struct ps_option options[] = {{"overwrite", .given = &overwrite}, {0}};
    enum ps_status status = ps_options_read(argc, argv, options, 2, "one CHECKPOINT and one DIR", usage);
    if (status == PS_OK) {
        checkpoint = argv[argc - 2];
        folder = argv[argc - 1];
        status = overwrite ? PS_OK : check_output(folder);
    }
    if (status == PS_OK) {
        status = ps_weights_export(checkpoint, folder, &done, path_dropouts);
    }
    if (status != PS_OK) {
        fprintf(stderr, "export_weights: %s\n", ps_error_message());
        return (int)status;
    }
    if (path_dropouts[0] != path_dropouts[1]) {
        fprintf(stderr,
                "export_weights: warning: model.dropout_attention is %g and dropout_output %g: path_dropout, which only training "
                "reads, is one for both: %g\n",
                path_dropouts[0], path_dropouts[1], path_dropouts[1]);
    }
    printf("%s: %" PRId64 " parameters, %" PRId64 " channels%s\n", folder, done.parameters, done.channels,
           done.scaled ? ", in standardised units" : "");
    return (int)ps_stdout_flush(PS_USAGE);
}
