/* The device table of the CPU: device memory is host memory, every call finishes before it returns, and a graph is its body. */
#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/backends.h"
#include "kernels/cpu/cpu.h"
#include "kernels/uncaptured.h"

enum { ALIGNMENT = 256, HUGE_PAGE = 2 << 20 };

struct ps_event {
    struct timespec time;
    int recorded;
};

/* The value in bytes of a line "Key:   123 kB" of /proc/meminfo; 0 when there is none. */
static size_t meminfo_bytes(const char *key)
{
    size_t bytes = 0, length = strlen(key);
    FILE *file = fopen("/proc/meminfo", "r");
    if (file == NULL) {
        return 0;
    }
    char line[256];
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, key, length) == 0 && line[length] == ':') {
            bytes = (size_t)strtoull(line + length + 1, NULL, 10) * 1024;
            break;
        }
    }
    fclose(file);
    return bytes;
}

static enum ps_status cpu_memory(struct ps_device *d, size_t *free_bytes, size_t *total_bytes)
{
    (void)d;
    *free_bytes = meminfo_bytes("MemAvailable");
    *total_bytes = meminfo_bytes("MemTotal");
    if (*total_bytes == 0) { /* no /proc */
        size_t page = (size_t)sysconf(_SC_PAGESIZE);
        *total_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * page;
        *free_bytes = (size_t)sysconf(_SC_AVPHYS_PAGES) * page;
    }
    return PS_OK;
}

/* Zeroed and aligned. The kernel hands out more memory than there is and kills who touches it, so the size is compared with what is
 * free before anything is asked for. */
static enum ps_status allocate_aligned(struct ps_device *d, size_t bytes, void **memory)
{
    *memory = NULL;
    size_t free_bytes = 0, total_bytes = 0;
    PS_TRY(cpu_memory(d, &free_bytes, &total_bytes));
    if (bytes <= free_bytes) {
        const size_t alignment = bytes < 2 * (size_t)HUGE_PAGE ? ALIGNMENT : HUGE_PAGE;
        size_t rounded = bytes == 0 ? alignment : (bytes + alignment - 1) / alignment * alignment;
        *memory = aligned_alloc(alignment, rounded);
        if (*memory != NULL) {
            if (alignment == HUGE_PAGE) { /* activations are read in strides of whole pages; refused, they have small ones */
                (void)madvise(*memory, rounded, MADV_HUGEPAGE);
            }
            memset(*memory, 0, rounded);
            return PS_OK;
        }
    }
    return ps_fail(PS_DEVICE, "not enough memory: %zu bytes (%.1f MiB) asked, %.1f MiB free of %.1f MiB", bytes,
                   (double)bytes / 0x1p20, (double)free_bytes / 0x1p20, (double)total_bytes / 0x1p20);
}

static enum ps_status cpu_allocate(struct ps_device *d, size_t bytes, void **memory)
{
    PS_TRY(allocate_aligned(d, bytes, memory));
    d->counters.allocations++;
    d->counters.bytes += bytes;
    if (d->counters.bytes > d->counters.peak_bytes) {
        d->counters.peak_bytes = d->counters.bytes;
    }
    return PS_OK;
}

static void cpu_release(struct ps_device *d, void *memory, size_t bytes)
{
    if (memory != NULL) {
        d->counters.bytes -= bytes;
        free(memory);
    }
}

static void cpu_release_host(struct ps_device *d, void *memory)
{
    (void)d;
    free(memory);
}

static enum ps_status cpu_copy(struct ps_device *d, enum ps_stream s, void *to, const void *from, size_t bytes)
{
    (void)d, (void)s;
    if (bytes > 0) {
        memcpy(to, from, bytes);
    }
    return PS_OK;
}

static enum ps_status cpu_fill_zero(struct ps_device *d, enum ps_stream s, void *memory, size_t bytes)
{
    (void)d, (void)s;
    if (bytes > 0) {
        memset(memory, 0, bytes);
    }
    return PS_OK;
}

static enum ps_status cpu_download(struct ps_device *d, enum ps_stream s, void *host, const void *device_memory, size_t bytes)
{
    d->counters.synchronizations++;
    return cpu_copy(d, s, host, device_memory, bytes);
}

static enum ps_status cpu_synchronize(struct ps_device *d)
{
    d->counters.synchronizations++;
    return PS_OK;
}

static enum ps_status cpu_event_create(struct ps_device *d, struct ps_event **event)
{
    (void)d;
    *event = calloc(1, sizeof **event);
    return *event != NULL ? PS_OK : ps_fail(PS_DEVICE, "not enough memory for an event (%zu bytes)", sizeof **event);
}

static void cpu_event_destroy(struct ps_device *d, struct ps_event *event)
{
    (void)d;
    free(event);
}

static enum ps_status cpu_event_record(struct ps_device *d, enum ps_stream s, struct ps_event *event)
{
    (void)d, (void)s;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    event->recorded = 1;
    return PS_OK;
}

static enum ps_status cpu_event_wait(struct ps_device *d, enum ps_stream s, struct ps_event *event)
{
    (void)d, (void)s, (void)event;
    return PS_OK;
}

static enum ps_status cpu_event_query(struct ps_device *d, struct ps_event *event, int *happened)
{
    (void)d, (void)event;
    *happened = 1;
    return PS_OK;
}

static enum ps_status cpu_event_elapsed(struct ps_device *d, struct ps_event *from, struct ps_event *to, double *ms)
{
    (void)d;
    if (!from->recorded || !to->recorded) {
        return ps_fail(PS_DEVICE, "elapsed time asked of an event that was never recorded");
    }
    *ms = (double)(to->time.tv_sec - from->time.tv_sec) * 1e3 + (double)(to->time.tv_nsec - from->time.tv_nsec) * 1e-6;
    return PS_OK;
}

static void cpu_close(struct ps_device *d)
{
    free(d);
}

/* "model name" of /proc/cpuinfo. */
static void processor_name(char *name, size_t size)
{
    snprintf(name, size, "CPU");
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (file == NULL) {
        return;
    }
    char line[512];
    while (fgets(line, sizeof line, file) != NULL) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon != NULL) {
            colon += strspn(colon, ": \t");
            colon[strcspn(colon, "\n")] = '\0';
            snprintf(name, size, "%.*s", (int)size - 1, colon);
            break;
        }
    }
    fclose(file);
}

/* What the bits of a result depend on: "OpenBLAS 0.3.21 SkylakeX, 2 threads, avx512". */
static void library_version(char *version, size_t size, int threads)
{
    char name[16] = "OpenBLAS", number[16] = "?";
    sscanf(openblas_get_config(), "%15s %15s", name, number);
    snprintf(version, size, "%s %s %.12s, %d thread%s, %s", name, number, openblas_get_corename(), threads, threads == 1 ? "" : "s",
             ps_cpu_isa_name(ps_cpu_isa_best()));
}

/* The thread count is the process's: OpenMP and OpenBLAS keep one setting each. */
enum ps_status ps_cpu_device_open(int threads, struct ps_device **device)
{
    *device = NULL;
    if (threads < 0) {
        return ps_fail(PS_DEVICE, "threads is %d; it must be 0 (all processors) or more", threads);
    }
    int asked;
    PS_TRY(ps_cpu_threads(threads, &asked, &threads));
    struct ps_device *d = calloc(1, sizeof *d);
    if (d == NULL) {
        return ps_fail(PS_DEVICE, "not enough memory for the device's table (%zu bytes)", sizeof *d);
    }
    *d = (struct ps_device){
        .kind = "cpu",
        .threads_asked = asked,
        .threads = threads,
        .allocate = cpu_allocate,
        .release = cpu_release,
        .allocate_host = allocate_aligned,
        .release_host = cpu_release_host,
        .memory = cpu_memory,
        .upload = cpu_copy,
        .copy = cpu_copy,
        .fill_zero = cpu_fill_zero,
        .download = cpu_download,
        .download_async = cpu_copy,
        .synchronize = cpu_synchronize,
        .event_create = cpu_event_create,
        .event_destroy = cpu_event_destroy,
        .event_record = cpu_event_record,
        .event_wait = cpu_event_wait,
        .event_query = cpu_event_query,
        .event_elapsed = cpu_event_elapsed,
        .close = cpu_close,
    };
    ps_device_uncapture(d);
    processor_name(d->name, sizeof d->name);
    library_version(d->version, sizeof d->version, threads);
    *device = d;
    return PS_OK;
}
