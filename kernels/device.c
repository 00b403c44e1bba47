/* Chooses the device table by name. */
#include "kernels/device.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backends.h"
#include "kernels/exchange.h"

#ifndef PS_HAVE_CUDA
static enum ps_status without_cuda(void)
{
    return ps_fail(PS_DEVICE, "nccl: this build has no CUDA");
}

int ps_cuda_device_count(void)
{
    return 0;
}

enum ps_status ps_nccl_load(void)
{
    return without_cuda();
}

enum ps_status ps_nccl_open(struct ps_device *device, struct ps_exchange *host, struct ps_exchange **exchange)
{
    (void)device, (void)host, (void)exchange;
    return without_cuda();
}

int ps_nccl_lost(void)
{
    return 0;
}
#endif

/* "cuda" is GPU 0, "cuda:N" GPU N. */
static enum ps_status open_cuda(const char *kind, struct ps_device **device)
{
    long index = 0;
    if (kind[4] == ':') {
        char *end = NULL;
        errno = 0;
        index = strtol(kind + 5, &end, 10);
        if (end == kind + 5 || *end != '\0' || index < 0 || index > INT_MAX || errno != 0) {
            return ps_fail(PS_DEVICE, "device \"%s\": what follows \"cuda:\" must be a GPU's number, counted from 0", kind);
        }
    }
#ifndef PS_HAVE_CUDA
    (void)device;
    return ps_fail(PS_DEVICE,
                   "device \"%s\": this build has no CUDA: use \"cpu\", or build again with scripts/build.sh where the GPU is, or "
                   "with scripts/build.sh --all",
                   kind);
#else
    int count = ps_cuda_device_count();
    if (count == 0) {
        return ps_fail(PS_DEVICE, "device \"%s\": no CUDA device was found; use \"cpu\"", kind);
    }
    if (index >= count) {
        return ps_fail(PS_DEVICE, "device \"%s\": there %s %d CUDA device%s, numbered from 0", kind, count == 1 ? "is" : "are",
                       count, count == 1 ? "" : "s");
    }
    return ps_cuda_device_open((int)index, device);
#endif
}

enum ps_status ps_device_open(const char *kind, int threads, struct ps_device **device)
{
    *device = NULL;
    if (strcmp(kind, "cpu") == 0) {
        return ps_cpu_device_open(threads, device);
    }
    if (strncmp(kind, "cuda", 4) == 0 && (kind[4] == '\0' || kind[4] == ':')) {
        return open_cuda(kind, device);
    }
    return ps_fail(PS_DEVICE, "device \"%s\" is not known; use \"cpu\", \"cuda\" or \"cuda:N\"", kind);
}
