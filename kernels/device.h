/* The table of the device: memory, the two streams, events, capture and replay. One struct of function pointers for each device; on
 * the CPU every call finishes before it returns and a captured graph is the function itself.
 *
 * Everything enqueued on one stream runs in order. PS_COMPUTE carries the step, PS_COPY the batches that stream from the host; an
 * event orders one after the other without the host. */
#ifndef PS_KERNELS_DEVICE_H
#define PS_KERNELS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum ps_stream { PS_COMPUTE, PS_COPY };

struct ps_event; /* opaque */
struct ps_graph; /* opaque */

/* What a captured graph holds. On the CPU all are 0. */
struct ps_graph_nodes {
    int kernels, copies, fills, others;
};

struct ps_device_counters {
    uint64_t allocations;      /* calls of allocate that succeeded */
    uint64_t synchronizations; /* calls that made the host wait: synchronize, download */
    uint64_t launches;         /* graph replays */
    size_t bytes, peak_bytes;  /* device memory held now, and the most ever */
};

struct ps_device {
    const char *kind;       /* "cpu" or "cuda" */
    char name[128];         /* the processor, e.g. "NVIDIA H200" */
    char version[64];       /* of driver and libraries, as checkpoints record them */
    int index;              /* of the GPU; 0 on the CPU */
    int compute_capability; /* 90 for sm_90; 0 on the CPU */
    int threads_asked;      /* that the CPU was to compute with, and those that there are; 0 on a GPU */
    int threads;
    struct ps_device_counters counters;
    void *context; /* the device's own */

    /* Zeroed, aligned to 256 bytes. PS_DEVICE when there is not enough; the message says how much was asked and how much is free.
     */
    enum ps_status (*allocate)(struct ps_device *d, size_t bytes, void **memory);
    void (*release)(struct ps_device *d, void *memory, size_t bytes);
    /* Host memory that copies fast (pinned on CUDA). */
    enum ps_status (*allocate_host)(struct ps_device *d, size_t bytes, void **memory);
    void (*release_host)(struct ps_device *d, void *memory);
    enum ps_status (*memory)(struct ps_device *d, size_t *free_bytes, size_t *total_bytes);

    /* Enqueued; the source must stay unchanged until the stream has passed (pageable sources are safe once the call returns). */
    enum ps_status (*upload)(struct ps_device *d, enum ps_stream s, void *device_memory, const void *host, size_t bytes);
    enum ps_status (*copy)(struct ps_device *d, enum ps_stream s, void *to, const void *from, size_t bytes);
    enum ps_status (*fill_zero)(struct ps_device *d, enum ps_stream s, void *memory, size_t bytes);
    /* Waits for the stream, then copies: the host has the bytes when it returns. */
    enum ps_status (*download)(struct ps_device *d, enum ps_stream s, void *host, const void *device_memory, size_t bytes);
    /* Enqueued copy to pinned host memory; an event says when it is there. */
    enum ps_status (*download_async)(struct ps_device *d, enum ps_stream s, void *host, const void *device_memory, size_t bytes);
    /* Waits for both streams and reports any error they met. */
    enum ps_status (*synchronize)(struct ps_device *d);

    enum ps_status (*event_create)(struct ps_device *d, struct ps_event **event);
    void (*event_destroy)(struct ps_device *d, struct ps_event *event);
    enum ps_status (*event_record)(struct ps_device *d, enum ps_stream s, struct ps_event *event);
    /* The stream, not the host, waits until the event has happened. */
    enum ps_status (*event_wait)(struct ps_device *d, enum ps_stream s, struct ps_event *event);
    /* *happened = 1 once all work before the event is done (also when it was never recorded). Does not wait. */
    enum ps_status (*event_query)(struct ps_device *d, struct ps_event *event, int *happened);
    /* Milliseconds between two events that have happened. */
    enum ps_status (*event_elapsed)(struct ps_device *d, struct ps_event *from, struct ps_event *to, double *ms);

    /* Records what body enqueues on PS_COMPUTE without running it (CUDA), or keeps body and argument (CPU). */
    enum ps_status (*capture)(struct ps_device *d, enum ps_status (*body)(void *argument), void *argument, struct ps_graph **graph);
    enum ps_status (*replay)(struct ps_device *d, struct ps_graph *graph);
    void (*graph_nodes)(struct ps_device *d, const struct ps_graph *graph, struct ps_graph_nodes *nodes);
    void (*graph_destroy)(struct ps_device *d, struct ps_graph *graph);

    void (*close)(struct ps_device *d); /* releases the struct itself; NULL-safe callers test first */
};

/* How many CUDA devices can be used; 0 where none is, or where this build has no CUDA. */
int ps_cuda_device_count(void);

/* kind: "cpu", "cuda" or "cuda:N". PS_DEVICE with a message when there is no such device. threads: OpenMP threads on the CPU, 0 for
 * as many as there are processors; fewer are taken where there are no more, and the device says so. */
enum ps_status ps_device_open(const char *kind, int threads, struct ps_device **device);

#ifdef __cplusplus
}
#endif
#endif
