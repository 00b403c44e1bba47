#include "src/exchange.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/uncaptured.h"

/* ---- a device's memory, by what exchanges the host's ---- */

struct staged {
    struct ps_exchange table; /* first */
    struct ps_exchange *host;
    struct ps_device *device;
    void *room; /* pinned */
    size_t bytes;
};

static enum ps_status make_room(struct staged *s, size_t bytes)
{
    if (bytes <= s->bytes) {
        return PS_OK;
    }
    PS_TRY(s->device->synchronize(s->device));
    s->device->release_host(s->device, s->room);
    s->bytes = 0;
    PS_TRY(s->device->allocate_host(s->device, bytes, &s->room));
    s->bytes = bytes;
    return PS_OK;
}

static enum ps_status staged_sum(struct ps_exchange *e, void *values, enum ps_type type, int64_t count)
{
    struct staged *s = e->context;
    const size_t bytes = (size_t)count * ps_type_bytes(type);
    PS_TRY(make_room(s, bytes));
    PS_TRY(s->device->download(s->device, PS_COMPUTE, s->room, values, bytes));
    PS_TRY(s->host->sum(s->host, s->room, type, count));
    return s->device->upload(s->device, PS_COMPUTE, values, s->room, bytes);
}

static enum ps_status staged_gather(struct ps_exchange *e, void *all, const void *mine, size_t bytes)
{
    struct staged *s = e->context;
    const size_t together = (size_t)e->size * bytes;
    PS_TRY(make_room(s, together + bytes));
    char *const own = (char *)s->room + together;
    PS_TRY(s->device->download(s->device, PS_COMPUTE, own, mine, bytes));
    PS_TRY(s->host->gather(s->host, s->room, own, bytes));
    return s->device->upload(s->device, PS_COMPUTE, all, s->room, together);
}

static void staged_close(struct ps_exchange *e)
{
    struct staged *s = e->context;
    s->device->release_host(s->device, s->room);
    s->host->close(s->host);
    free(s);
}

static enum ps_status open_staged(struct ps_device *device, struct ps_exchange *host, struct ps_exchange **exchange)
{
    struct staged *s = malloc(sizeof *s);
    if (!s) {
        return ps_fail(PS_DEVICE, "no memory for what ranks exchange");
    }
    *s = (struct staged){.table = *host, .host = host, .device = device};
    s->table.context = s;
    s->table.sum = staged_sum;
    s->table.gather = staged_gather;
    s->table.close = staged_close;
    ps_device_uncapture(device); /* a captured step cannot wait for the host */
    *exchange = &s->table;
    return PS_OK;
}

/* ---- which ---- */

static enum ps_status open_nccl(struct ps_ranks *ranks, struct ps_device *device, struct ps_exchange *host,
                                struct ps_exchange **exchange)
{
    PS_TRY(ps_ranks_check(ranks, ps_nccl_load()));
    const enum ps_status status = ps_nccl_open(device, host, exchange);
    if (status == PS_DEVICE) {
        ps_ranks_end(ranks, status);
    }
    return status;
}

enum ps_status ps_exchange_open(struct ps_ranks *ranks, struct ps_device *device, enum ps_exchange_kind kind,
                                struct ps_exchange **exchange)
{
    struct ps_exchange *host;
    *exchange = NULL;
    PS_TRY(ps_ranks_exchange(ranks, &host));
    if (!host) {
        return PS_OK;
    }
    const int gpu = strcmp(device->kind, "cpu") != 0;
    if (!gpu && kind != PS_EXCHANGE_NCCL) {
        *exchange = host;
        return PS_OK;
    }
    enum ps_status status = PS_OK;
    if (!gpu) {
        status = ps_fail(PS_USAGE, "runtime.exchange: nccl is between GPUs, and the device is the CPU: take auto");
    } else if (kind == PS_EXCHANGE_MPI) {
        status = open_staged(device, host, exchange);
    } else {
        status = open_nccl(ranks, device, host, exchange);
    }
    if (!*exchange || kind != PS_EXCHANGE_MPI) {
        host->close(host);
    }
    return status;
}
