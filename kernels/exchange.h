/* What ranks that train one model together exchange inside a step: a table beside that of the operations, opened by src/ for the
 * device that computes. Without one (NULL) there is one rank.
 *
 * All calls are made by every rank, in the same order and with the same sizes. They enqueue on PS_COMPUTE as operations do, and
 * may be captured; on the CPU they return when they are done. All memory is the device's. */
#ifndef PS_KERNELS_EXCHANGE_H
#define PS_KERNELS_EXCHANGE_H

#include "kernels/device.h"
#include "kernels/status.h"
#include "kernels/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ps_exchange {
    int rank, size;
    void *context;
    /* values [count] = the sum of all ranks' values, in an order that depends on count and the number of ranks alone: the same bits
     * on every rank and in every run. type: PS_F32 or PS_F64. */
    enum ps_status (*sum)(struct ps_exchange *e, void *values, enum ps_type type, int64_t count);
    /* The same, of what is enqueued so far, beside what follows: `join` is where that waits. NULL, both: nothing runs beside. */
    enum ps_status (*sum_beside)(struct ps_exchange *e, void *values, enum ps_type type, int64_t count);
    enum ps_status (*join)(struct ps_exchange *e);
    size_t part; /* bytes from which on a sum of its own beside others is worth a call */
    /* all [size][bytes]: what each rank gave. */
    enum ps_status (*gather)(struct ps_exchange *e, void *all, const void *mine, size_t bytes);
    void (*close)(struct ps_exchange *e);
    char carrier[48]; /* what carries it, where that is a library whose version bits depend on; else "" */
};

/* By NCCL, one GPU a rank, enqueued; only where the build has CUDA. Loads it: PS_DEVICE with what to install. */
enum ps_status ps_nccl_load(void);
/* Then on every rank that trains together: `host` exchanges host memory, here and then no more. PS_USAGE where ranks share a GPU,
 * on all of them alike. PS_DEVICE may be one rank's alone, for which the others then wait: end them. */
enum ps_status ps_nccl_open(struct ps_device *device, struct ps_exchange *host, struct ps_exchange **exchange);
/* Whether an error of its calls was that another rank, or the way to it, is gone. */
int ps_nccl_lost(void);

#ifdef __cplusplus
}
#endif
#endif
