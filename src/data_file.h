/* What --data names: HDF5 as it stands, or a CSV, which becomes a series or a panel in a file for a while. */
#ifndef PS_SRC_DATA_FILE_H
#define PS_SRC_DATA_FILE_H

#include "src/checkpoint.h"
#include "src/scratch.h"

struct ps_data_file {
    char made[PS_SCRATCH_PATH]; /* "": it was HDF5 */
    const char *path;           /* of HDF5 */
};

/* path: what --data says, or the run's data. panel: "ID,TIME,VALUE" of --panel, NULL: none. PS_USAGE for columns
 * that are named of no CSV, or not named of one that a panel's model (the checkpoint's) is to read; PS_DATA as import_csv says it.
 * With the config's data.missing: mask what is missing stays NaN. The file is gone after ps_scratch_remove. */
enum ps_status ps_data_file_open(const char *program, const char *path, const char *panel, const struct ps_checkpoint *checkpoint,
                                 const struct ps_config *config, struct ps_data_file *file);

#endif
