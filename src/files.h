/* Whole files, in and out: read at once; written beside (path + ".partial"), flushed and renamed, so that a crash or a full disk
 * leaves the old file or the new one, never half of one. */
#ifndef PS_SRC_FILES_H
#define PS_SRC_FILES_H

#include <stddef.h>

#include "kernels/status.h"

/* *bytes is malloc'ed and has a zero byte after its *size bytes. `status` with "path: cause" when the file is missing, a folder,
 * not readable, or longer than `longest` bytes (0: any length). */
enum ps_status ps_file_read(enum ps_status status, const char *path, size_t longest, char **bytes, size_t *size);

/* `status` with "path: cause" on failure; then what stood at path still does, and nothing is left beside it. */
enum ps_status ps_file_replace(enum ps_status status, const char *path, const void *bytes, size_t size);

#endif
