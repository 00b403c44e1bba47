/* The one way to the disk: whatever a program writes passes through these functions, and so does every file that is read whole.
 * A file is written beside its place (path + ".partial"), flushed and renamed, and its folder flushed, so that a crash or a full
 * disk leaves the old file or the new one, never half of one. Threads may call at the same time, for different paths.
 *
 * Each call to the system can be made to fail, to test what becomes of a run. Two environment variables, read at the first call:
 *
 *   PS_IO_FAULT=N:KIND   call N, counted from 1, goes wrong; N+: that one and all later ones do. KIND: eio, enospc, enosys, eintr
 *                        (fails with that errno), short (a write takes half of its bytes; other calls do not mind), die (the
 *                        process is killed there, inside a write after half of its bytes), term (SIGTERM comes, and the call is
 *                        made).
 *   PS_IO_TRACE=FILE     a line is appended for each call: number, name, path, and KIND where it went wrong.
 *
 * Unset, they change nothing; a PS_IO_FAULT that is none makes every call fail with EINVAL. */
#ifndef PS_DATA_FILES_H
#define PS_DATA_FILES_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/status.h"

/* Every function but ps_file_read returns `status`, with "path: cause" as the message, when it fails. */

/* *bytes is malloc'ed and has a zero byte after its *size bytes. `status` with "path: cause" when the file is missing, a folder,
 * not readable, or longer than `longest` bytes (0: any length). */
enum ps_status ps_file_read(enum ps_status status, const char *path, size_t longest, char **bytes, size_t *size);

/* The whole file, new. On failure what stood at path still does, and nothing is left beside it; but when the folder alone could
 * not be flushed the new file stands there, and might not after a power cut. */
enum ps_status ps_file_replace(enum ps_status status, const char *path, const void *bytes, size_t size);

/* The same in parts, at any place of the file. `status` when another process is writing the same one. The first failure is
 * remembered for finish, and nothing is written after it. */
struct ps_output;
enum ps_status ps_output_open(enum ps_status status, const char *path, struct ps_output **output);
void ps_output_write(struct ps_output *output, uint64_t at, const void *bytes, size_t size);
void ps_output_read(struct ps_output *output, uint64_t at, void *bytes, size_t size); /* zeros behind the end, and on failure */
void ps_output_truncate(struct ps_output *output, uint64_t size);
/* What is written so far goes to the disk while the caller does something else; only finish waits for it, or says that it failed.
 */
void ps_output_start(struct ps_output *output);
int ps_output_failed(const struct ps_output *output);
/* With PS_OK flushes and puts the file at its path; with another status, or after a failure, removes what was written. Returns the
 * failure's status, else `so_far`. */
enum ps_status ps_output_finish(struct ps_output *output, enum ps_status so_far);

/* Adds bytes at the end, in one write where the system takes them so, and flushes; makes the file when there is none. A failure or
 * a crash may leave a part of them. */
enum ps_status ps_file_append(enum ps_status status, const char *path, const void *bytes, size_t size);

/* Gives the file at `path` a second name, in place of what stood there; where files cannot have two names, renames it. Not flushed:
 * the next change of the folder is to be. */
enum ps_status ps_file_link(enum ps_status status, const char *path, const char *name);

/* A file that is missing, and a folder that is there, are fine. The change itself is flushed; not by drop: a power cut may bring
 * the file back. */
enum ps_status ps_file_drop(enum ps_status status, const char *path);
enum ps_status ps_file_remove(enum ps_status status, const char *path);
enum ps_status ps_folder_make(enum ps_status status, const char *path);

/* Removes what a crash while `path` was written left beside it. No one may be writing it. */
enum ps_status ps_file_sweep(enum ps_status status, const char *path);

/* Takes the file (made when there is none, and left there) as a lock that no other process gets until this one unlocks it or
 * dies: POSIX record locks, which a child does not inherit. *lock: for ps_file_unlock. `status` when another has it: "path: held by
 * process N", or "another process" where the system does not tell. PS_UNSUPPORTED where the file system has no locks. A process
 * must not lock one file twice. */
enum ps_status ps_file_lock(enum ps_status status, const char *path, int *lock);
void ps_file_unlock(int lock);

/* What main calls first: stdin, stdout and stderr that are closed are taken, so that no file is opened in their place, and gets
 * what is printed. Reading and writing them still fails. */
void ps_streams_open(void);

/* Whether all that was printed to stdout is out. */
enum ps_status ps_stdout_flush(enum ps_status status);

#endif
