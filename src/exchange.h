/* What ranks exchange inside a step, on the device that computes: by MPI on the CPU, by NCCL on GPUs, or between GPUs on the host.
 */
#ifndef PS_SRC_EXCHANGE_H
#define PS_SRC_EXCHANGE_H

#include "src/config.h"
#include "src/ranks.h"

/* *exchange NULL alone. By MPI on GPUs each call waits for the device, and its graphs are no longer captured: slow, but ranks may
 * share a GPU. */
enum ps_status ps_exchange_open(struct ps_ranks *ranks, struct ps_device *device, enum ps_exchange_kind kind,
                                struct ps_exchange **exchange);

#endif
