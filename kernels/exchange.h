/* What ranks that train one model together exchange inside a step: a table beside that of the operations, opened by src/ for the
 * device that computes. Without one (NULL) there is one rank.
 *
 * Both calls are made by every rank, in the same order and with the same sizes. They enqueue on PS_COMPUTE as operations do, and
 * may be captured; on the CPU they return when they are done. All memory is the device's. */
#ifndef PS_KERNELS_EXCHANGE_H
#define PS_KERNELS_EXCHANGE_H

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
    /* all [size][bytes]: what each rank gave. */
    enum ps_status (*gather)(struct ps_exchange *e, void *all, const void *mine, size_t bytes);
    void (*close)(struct ps_exchange *e);
};

#ifdef __cplusplus
}
#endif
#endif
