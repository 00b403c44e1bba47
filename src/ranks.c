#include "src/ranks.h"

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/clock.h"
#include "src/heartbeat.h"
#include "src/mpi/transport.h"

enum { MESSAGE = 1024, SMALL = 1 << 14 /* values whose sum takes one message of each to each */ };

struct ps_ranks {
    const struct ps_transport *transport;
    struct ps_heartbeat *heartbeat;
    int threads; /* ps_ranks_threads */
    int known;   /* every rank knows of the last error */
    double seconds;
    void *room; /* for the parts that are summed */
    size_t room_bytes;
    int64_t *begin; /* [size + 1] */
};

int ps_ranks_rank(const struct ps_ranks *r)
{
    return r ? r->transport->rank : 0;
}

int ps_ranks_size(const struct ps_ranks *r)
{
    return r ? r->transport->size : 1;
}

int ps_ranks_local(const struct ps_ranks *r)
{
    return r ? r->transport->local : 0;
}

int ps_ranks_threads(const struct ps_ranks *r)
{
    return r ? r->threads : 0;
}

double ps_ranks_seconds(const struct ps_ranks *r)
{
    return r ? r->seconds : 0;
}

/* ---- opening ---- */

/* The ranks that the environment speaks of; 1: none does. */
static int expected_size(const char **name)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *text = getenv(names[i]);
        if (text && atoi(text) > 1) {
            *name = names[i];
            return atoi(text);
        }
    }
    return 1;
}

static enum ps_status failed(const char *cause)
{
    return ps_fail(PS_DEVICE, "ranks: %s", cause);
}

/* The library beside the one that this is a part of. */
static enum ps_status load(const char *name, int expected, const struct ps_transport **transport)
{
    static const char library[] = "libpatchstep_mpi.so";
    char path[4096], error[256] = "";
    Dl_info here;
    const char *folder = dladdr((void *)(uintptr_t)&ps_ranks_open, &here) && here.dli_fname ? here.dli_fname : "";
    const char *slash = strrchr(folder, '/');
    snprintf(path, sizeof path, "%.*s%s", slash ? (int)(slash + 1 - folder) : 0, folder, library);
    void *handle = dlopen(path, RTLD_NOW | RTLD_GLOBAL); /* MPI's own parts look for its names */
    ps_transport_open_function *open = NULL;
    if (handle) {
        *(void **)(&open) = dlsym(handle, "ps_transport_open");
    }
    if (!open) {
        return ps_fail(PS_DEVICE, "%s is %d, and %s cannot be loaded: %s: install MPI (scripts/setup.sh --mpi) and build again",
                       name, expected, library, dlerror());
    }
    *transport = open(error);
    if (!*transport || (*transport)->version != PS_TRANSPORT_VERSION) {
        return ps_fail(PS_DEVICE, "%s is %d: %s", name, expected,
                       *transport ? "libpatchstep_mpi.so is of another version: build both together" : error);
    }
    if ((*transport)->size != expected) {
        return ps_fail(
            PS_DEVICE,
            "%s is %d, and MPI found %d rank%s: start with the mpirun of the MPI that it was built with (%s), or srun --mpi=pmix",
            name, expected, (*transport)->size, (*transport)->size == 1 ? "" : "s", (*transport)->library);
    }
    return PS_OK;
}

/* Processors of this rank, less the part of others on this host that may run on the same ones. */
static enum ps_status count_threads(struct ps_ranks *r)
{
    struct place {
        char host[64];
        cpu_set_t processors;
    } mine, *all = malloc((size_t)r->transport->size * sizeof *all);
    if (!all) {
        return failed("no memory");
    }
    memset(&mine, 0, sizeof mine);
    memcpy(mine.host, r->transport->host, sizeof mine.host);
    int sharing = 0, count = sched_getaffinity(0, sizeof mine.processors, &mine.processors) == 0 ? CPU_COUNT(&mine.processors) : 1;
    enum ps_status status = ps_ranks_gather(r, &mine, sizeof mine, all);
    for (int i = 0; i < r->transport->size && status == PS_OK; i++) {
        sharing += memcmp(&all[i], &mine, sizeof mine) == 0;
    }
    r->threads = sharing > 0 && count > sharing ? count / sharing : 1;
    free(all);
    return status;
}

enum ps_status ps_ranks_open(struct ps_ranks **ranks)
{
    const char *name = NULL;
    const int expected = expected_size(&name);
    *ranks = NULL;
    if (expected == 1) {
        return PS_OK;
    }
    const struct ps_transport *transport;
    PS_TRY(load(name, expected, &transport));
    struct ps_ranks *r = calloc(1, sizeof *r);
    if (r) {
        *r = (struct ps_ranks){.transport = transport, .begin = malloc(((size_t)transport->size + 1) * sizeof *r->begin)};
    }
    if (!r || !r->begin) {
        return failed("no memory");
    }
    *ranks = r;
    PS_TRY(count_threads(r));
    return ps_heartbeat_open(transport, &r->heartbeat);
}

void ps_ranks_close(struct ps_ranks *r, enum ps_status status)
{
    if (!r) {
        return;
    }
    const int ends_all = status != PS_OK && !r->known;
    ps_heartbeat_close(r->heartbeat, ends_all);
    if (ends_all) {
        fflush(NULL);
        r->transport->abort((int)status);
    }
    r->transport->close();
    free(r->room);
    free(r->begin);
    free(r);
}

void ps_ranks_end(struct ps_ranks *r, enum ps_status status)
{
    r->known = 0;
    ps_ranks_say(r, program_invocation_short_name);
    ps_ranks_close(r, status);
}

int ps_ranks_known(const struct ps_ranks *r)
{
    return !r || r->known;
}

/* Seconds that an error which the others do not know of waits for the one that it may follow from. Where NCCL says that a rank is
 * gone, the heartbeat finds out which one, or that one has an error of its own; else rank 0 goes first. */
static double patience(const struct ps_ranks *r)
{
    return ps_nccl_lost() ? PS_SILENCE + 1 : r->transport->rank == 0 ? 0.5 : 1;
}

void ps_ranks_say(const struct ps_ranks *r, const char *program)
{
    if (r && !r->known) {
        ps_heartbeat_wait(r->heartbeat, patience(r));
        fprintf(stderr, "%s: rank %d on %s: %s\n", program, r->transport->rank, r->transport->host, ps_error_message());
    } else if (ps_ranks_rank(r) == 0) {
        fprintf(stderr, "%s: %s\n", program, ps_error_message());
    }
}

/* ---- what all know ---- */

enum ps_status ps_ranks_gather(struct ps_ranks *r, const void *mine, size_t bytes, void *all)
{
    if (!r) {
        memcpy(all, mine, bytes);
        return PS_OK;
    }
    const char *error = r->transport->gather(mine, bytes, all);
    return error ? failed(error) : PS_OK;
}

enum ps_status ps_ranks_broadcast(struct ps_ranks *r, void *values, size_t bytes)
{
    const char *error = r ? r->transport->broadcast(values, bytes, 0) : NULL;
    return error ? failed(error) : PS_OK;
}

/* The lowest rank's error, told to all. statuses [size]. */
static enum ps_status tell(struct ps_ranks *r, const int32_t *statuses)
{
    char line[MESSAGE] = "";
    int first = 0, failures = 0;
    for (int i = r->transport->size; i-- > 0;) {
        failures += statuses[i] != PS_OK;
        first = statuses[i] != PS_OK ? i : first;
    }
    if (r->transport->rank == first && failures == r->transport->size) {
        snprintf(line, sizeof line, "%s", ps_error_message());
    } else if (r->transport->rank == first) {
        snprintf(line, sizeof line, "rank %d on %s: %.900s", first, r->transport->host, ps_error_message());
    }
    const char *error = r->transport->broadcast(line, sizeof line, first);
    if (error) {
        return failed(error);
    }
    r->known = 1;
    line[sizeof line - 1] = 0;
    return ps_fail((enum ps_status)statuses[first], "%s", line);
}

enum ps_status ps_ranks_check(struct ps_ranks *r, enum ps_status mine)
{
    if (!r) {
        return mine;
    }
    if (mine != PS_OK && r->known) { /* an error that all have left something for, before this */
        return mine;
    }
    r->known = 0;
    int32_t status = (int32_t)mine, *all = malloc((size_t)r->transport->size * sizeof *all);
    if (!all) {
        return failed("no memory");
    }
    enum ps_status result = ps_ranks_gather(r, &status, sizeof status, all);
    for (int i = 0; i < r->transport->size && result == PS_OK; i++) {
        if (all[i] != PS_OK) {
            result = tell(r, all);
        }
    }
    free(all);
    return result;
}

enum ps_status ps_ranks_same(struct ps_ranks *r, const char *what, const char *text)
{
    if (!r) {
        return PS_OK;
    }
    uint64_t length = strlen(text) + 1;
    PS_TRY(ps_ranks_broadcast(r, &length, sizeof length));
    char *first = calloc(length, 1);
    if (!first) {
        return failed("no memory");
    }
    if (r->transport->rank == 0) {
        memcpy(first, text, length);
    }
    enum ps_status status = ps_ranks_broadcast(r, first, length);
    if (status == PS_OK && strcmp(first, text) != 0) {
        size_t i = 0, line = 0;
        for (; first[i] && first[i] == text[i]; i++) {
            line = first[i] == '\n' ? i + 1 : line;
        }
        status = ps_fail(PS_USAGE, "its %s is not rank 0's: \"%.*s\" here, \"%.*s\" there", what, (int)strcspn(text + line, "\n"),
                         text + line, (int)strcspn(first + line, "\n"), first + line);
    }
    free(first);
    return ps_ranks_check(r, status);
}

/* ---- sums ---- */

static enum ps_status make_room(struct ps_ranks *r, size_t bytes)
{
    if (bytes > r->room_bytes) {
        free(r->room);
        r->room = malloc(bytes);
        r->room_bytes = r->room ? bytes : 0;
    }
    return bytes == 0 || r->room ? PS_OK : failed("no memory for sums");
}

/* sum [count] of parts [size][count], in their order, in double. */
static void add_parts(void *sum, enum ps_type type, int64_t count, int size, const void *parts)
{
    enum { TOGETHER = 256 };
    for (int64_t begin = 0; begin < count; begin += TOGETHER) {
        double total[TOGETHER] = {0};
        const int64_t n = count - begin < TOGETHER ? count - begin : TOGETHER;
        for (int r = 0; r < size; r++) {
            if (type == PS_F64) {
                const double *part = (const double *)parts + r * count + begin;
                for (int64_t i = 0; i < n; i++) {
                    total[i] += part[i];
                }
            } else {
                const float *part = (const float *)parts + r * count + begin;
                for (int64_t i = 0; i < n; i++) {
                    total[i] += (double)part[i];
                }
            }
        }
        for (int64_t i = 0; i < n; i++) {
            if (type == PS_F64) {
                ((double *)sum)[begin + i] = total[i];
            } else {
                ((float *)sum)[begin + i] = (float)total[i];
            }
        }
    }
}

/* Few values: each rank sums all. More: each sums a part, which the others get. */
enum ps_status ps_ranks_sum(struct ps_ranks *r, void *values, enum ps_type type, int64_t count)
{
    if (!r) {
        return PS_OK;
    }
    const size_t element = ps_type_bytes(type);
    const int size = r->transport->size, rank = r->transport->rank, whole = count <= SMALL / size;
    for (int i = 0; i <= size; i++) {
        r->begin[i] = count * i / size;
    }
    const int64_t mine = r->begin[rank + 1] - r->begin[rank];
    PS_TRY(make_room(r, (size_t)((whole ? count : mine) * size) * element));
    const char *error;
    if (whole) {
        error = r->transport->gather(values, (size_t)count * element, r->room);
        if (!error) {
            add_parts(values, type, count, size, r->room);
        }
    } else {
        error = r->transport->scatter(values, element, r->begin, r->room);
        if (!error) {
            add_parts((char *)values + (size_t)r->begin[rank] * element, type, mine, size, r->room);
            error = r->transport->collect(values, element, r->begin);
        }
    }
    return error ? failed(error) : PS_OK;
}

/* ---- inside a step, of host memory ---- */

static enum ps_status host_sum(struct ps_exchange *e, void *values, enum ps_type type, int64_t count)
{
    struct ps_ranks *r = e->context;
    const double begin = ps_seconds();
    const enum ps_status status = ps_ranks_sum(r, values, type, count);
    r->seconds += ps_seconds() - begin;
    return status;
}

static enum ps_status host_gather(struct ps_exchange *e, void *all, const void *mine, size_t bytes)
{
    struct ps_ranks *r = e->context;
    const double begin = ps_seconds();
    const enum ps_status status = ps_ranks_gather(r, mine, bytes, all);
    r->seconds += ps_seconds() - begin;
    return status;
}

static void host_close(struct ps_exchange *e)
{
    free(e);
}

enum ps_status ps_ranks_exchange(struct ps_ranks *r, struct ps_exchange **exchange)
{
    *exchange = NULL;
    if (!r) {
        return PS_OK;
    }
    struct ps_exchange *e = malloc(sizeof *e);
    if (!e) {
        return failed("no memory");
    }
    *e = (struct ps_exchange){.rank = r->transport->rank,
                              .size = r->transport->size,
                              .context = r,
                              .sum = host_sum,
                              .gather = host_gather,
                              .close = host_close};
    *exchange = e;
    return PS_OK;
}
