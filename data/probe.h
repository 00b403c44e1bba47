/* A look at a file from outside, taken in a child process. libhdf5 crashes on some crafted files, loops on others and asks for
 * memory on others again; in a child that is an error like any other. Taken before threads and devices are opened, it costs a
 * fork. */
#ifndef PS_DATA_PROBE_H
#define PS_DATA_PROBE_H

#include <stdint.h>

#include "kernels/status.h"

/* Runs look(argument) in a child with limits: 512 MiB beyond what is mapped now, `seconds` of processor time and ten times that in
 * all. Its status and message come back; a crash, a limit or a child that says nothing is `failure` in one line that names the
 * path. Nothing else that look does reaches this process. */
enum ps_status ps_probe(enum ps_status failure, const char *path, int64_t seconds, enum ps_status (*look)(const void *argument),
                        const void *argument);

/* Seconds for a data file of `bytes`. Inflating is what may take long: one for each 8 MiB, though a fourth of it would do. */
int64_t ps_probe_seconds(int64_t bytes);
/* Milliseconds that one wait of the parent's may take when `seconds` are left: it waits again while some are. */
int ps_probe_wait(double seconds);

#endif
