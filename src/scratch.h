/* Files that a program makes for itself while it runs, in a folder of its own, which goes with it: also when a signal ends it. */
#ifndef PS_SRC_SCRATCH_H
#define PS_SRC_SCRATCH_H

#include "kernels/status.h"

enum { PS_SCRATCH_PATH = 400, PS_SCRATCH_FILES = 4 };

/* A path for a file of this name in that folder, which is made below TMPDIR, or /tmp, for the first of them. PS_DATA; at most
 * PS_SCRATCH_FILES of them. */
enum ps_status ps_scratch_file(const char *program, const char *name, char path[PS_SCRATCH_PATH]);
/* Removes the files, and the folder. */
void ps_scratch_remove(void);

#endif
