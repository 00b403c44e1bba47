#include "src/data_file.h"

#include <stdio.h>
#include <string.h>

#include "data/import.h"
#include "data/text.h"

static enum ps_status import(const char *csv, const char *path, const char *panel, const struct ps_import_options *how)
{
    struct ps_panel_imported imported;
    return panel ? ps_import_panel(csv, path, panel, how, &imported) : ps_import_csv(csv, path, how, NULL);
}

enum ps_status ps_data_file_open(const char *program, const char *path, const char *panel, const struct ps_checkpoint *checkpoint,
                                 const struct ps_config *config, struct ps_data_file *file)
{
    const int is_csv = ps_text_ends(path, ".csv") || ps_text_ends(path, ".CSV");
    *file = (struct ps_data_file){.path = path};
    if (panel && !is_csv) {
        return ps_fail(PS_USAGE, "--panel names columns of a CSV, and %s is none", path);
    }
    if (!is_csv) {
        return PS_OK;
    }
    if (!panel && checkpoint->by_series) {
        return ps_fail(PS_USAGE,
                       "%s: the model was trained on a panel: --panel ID,TIME,VALUE says in which columns the CSV has the series' "
                       "names, times and values",
                       path);
    }
    const char *slash = strrchr(path, '/');
    char name[128]; /* messages may name the file */
    snprintf(name, sizeof name, "%.120s.h5", slash ? slash + 1 : path);
    PS_TRY(ps_scratch_file(program, name, file->made));
    const struct ps_import_options how = {.fill = config->data.missing == PS_MISSING_MASK ? PS_FILL_NAN : PS_FILL_NONE};
    const enum ps_status status = import(path, file->made, panel, &how);
    file->path = file->made;
    if (status != PS_OK && strstr(ps_error_message(), " --") && !strstr(ps_error_message(), "--panel")) {
        return ps_fail(status, "%s (an option of import_csv, whose file is read here too)", ps_error_message());
    }
    return status;
}
