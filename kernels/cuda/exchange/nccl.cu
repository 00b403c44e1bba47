/* What ranks exchange inside a step, by NCCL: one all-reduce or all-gather a call, on the compute stream or beside it, and so a
 * part of its graph. Bytes: 2 (N - 1) / N of a sum's to the next of N GPUs and as many from the one before, by rings. */
#include <dlfcn.h>
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda/context.cuh"
#include "kernels/cuda/exchange/nccl.h"
#include "kernels/exchange.h"

static struct functions {
#define FUNCTION(type, name, parameters) type(*name) parameters;
    PS_NCCL_FUNCTIONS(FUNCTION)
#undef FUNCTION
} nccl;

struct exchange {
    struct ps_exchange table; /* first */
    struct ps_device *device;
    ncclComm_t comm;
    cudaStream_t beside; /* of sums beside what computes */
    cudaEvent_t forked, ended;
};

/* A sum of so many bytes takes some 75 us between two GPUs of a host, of which 20 are there for any. */
static const size_t part_bytes = (size_t)16 << 20;

/* Rings alone, so that a sum's order depends on its length and on where the ranks are. Which of its protocols NCCL takes follows
 * from the same. What it does follows one after another, of graphs and without, so it need not see to that itself, by nodes of its
 * own around each sum. A user who sets another has the say. */
static void set_algorithm(void)
{
    (void)setenv("NCCL_ALGO", "Ring", 0);
    (void)setenv("NCCL_NVLS_ENABLE", "0", 0);
    (void)setenv("NCCL_GRAPH_MIXING_SUPPORT", "0", 0);
}

extern "C" enum ps_status ps_nccl_load(void)
{
    static const char library[] = "libnccl.so.2";
    set_algorithm();
    void *const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    const char *missing = handle ? NULL : library;
#define LOAD(type, name, parameters)                 \
    if (handle && !missing) {                        \
        *(void **)&nccl.name = dlsym(handle, #name); \
        missing = nccl.name ? NULL : #name;          \
    }
    PS_NCCL_FUNCTIONS(LOAD)
#undef LOAD
    return !missing
               ? PS_OK
               : ps_fail(PS_DEVICE,
                         "several ranks on GPUs sum by NCCL, which cannot be loaded: %s: install it (libnccl2, or pip install "
                         "nvidia-nccl-cu13 with its lib folder in LD_LIBRARY_PATH); runtime.exchange: mpi does without, slowly",
                         dlerror());
}

static int lost;

extern "C" int ps_nccl_lost(void)
{
    return lost;
}

static enum ps_status check(const struct exchange *e, ncclResult_t result, const char *what)
{
    lost |= result == ncclRemoteError;
    return result == ncclSuccess ? PS_OK
                                 : ps_fail(PS_DEVICE, "nccl: %s: %s: %.300s", what, nccl.ncclGetErrorString(result),
                                           nccl.ncclGetLastError(e ? e->comm : NULL));
}

static enum ps_status sum_on(const struct exchange *e, cudaStream_t stream, void *values, enum ps_type type, int64_t count)
{
    return check(
        e, nccl.ncclAllReduce(values, values, (size_t)count, type == PS_F64 ? ncclFloat64 : ncclFloat32, ncclSum, e->comm, stream),
        "a sum");
}

static enum ps_status nccl_sum(struct ps_exchange *table, void *values, enum ps_type type, int64_t count)
{
    const struct exchange *e = (const struct exchange *)table->context;
    return sum_on(e, ps_cuda_stream(e->device, PS_COMPUTE), values, type, count);
}

/* What is enqueued on `later` from now on waits for what is on `earlier`. */
static enum ps_status order(cudaStream_t earlier, cudaStream_t later, cudaEvent_t event)
{
    PS_TRY(ps_cuda_check(cudaEventRecord(event, earlier), "recording an event"));
    return ps_cuda_check(cudaStreamWaitEvent(later, event, 0), "waiting for an event");
}

/* NCCL lets a communicator's operations follow one another, of whatever streams. */
static enum ps_status nccl_sum_beside(struct ps_exchange *table, void *values, enum ps_type type, int64_t count)
{
    const struct exchange *e = (const struct exchange *)table->context;
    PS_TRY(order(ps_cuda_stream(e->device, PS_COMPUTE), e->beside, e->forked));
    return sum_on(e, e->beside, values, type, count);
}

static enum ps_status nccl_join(struct ps_exchange *table)
{
    const struct exchange *e = (const struct exchange *)table->context;
    return order(e->beside, ps_cuda_stream(e->device, PS_COMPUTE), e->ended);
}

static enum ps_status nccl_gather(struct ps_exchange *table, void *all, const void *mine, size_t bytes)
{
    const struct exchange *e = (const struct exchange *)table->context;
    const cudaStream_t stream = ps_cuda_stream(e->device, PS_COMPUTE);
    return check(e, nccl.ncclAllGather(mine, all, bytes, ncclUint8, e->comm, stream), "a gathering");
}

/* ncclCommAbort, since ncclCommDestroy waits for the other ranks, which may have ended by an error. Nothing is under way any more;
 * where an error has left the GPU, the process is about to end. */
static void nccl_close(struct ps_exchange *table)
{
    struct exchange *e = (struct exchange *)table->context;
    (void)cudaSetDevice(e->device->index);
    if (e->comm && cudaStreamSynchronize(ps_cuda_stream(e->device, PS_COMPUTE)) == cudaSuccess) {
        (void)nccl.ncclCommAbort(e->comm);
    }
    if (e->beside) {
        (void)cudaStreamDestroy(e->beside);
    }
    for (cudaEvent_t event : {e->forked, e->ended}) {
        if (event) {
            (void)cudaEventDestroy(event);
        }
    }
    delete e;
}

/* What ranks tell each other before NCCL is opened: which GPU, and rank 0's key. */
struct introduction {
    char host[64], gpu[32];
    ncclUniqueId id;
    int32_t failed;
};

static enum ps_status introduce(const struct ps_device *device, struct ps_exchange *host, ncclUniqueId *id)
{
    struct introduction mine = {}, *const all = new (std::nothrow) struct introduction[(size_t)host->size]();
    if (!all) {
        return ps_fail(PS_DEVICE, "nccl: no host memory for %d ranks", host->size);
    }
    enum ps_status status = ps_cuda_check(cudaDeviceGetPCIBusId(mine.gpu, sizeof mine.gpu, device->index), "asking for its bus");
    (void)gethostname(mine.host, sizeof mine.host - 1);
    if (status == PS_OK && host->rank == 0) {
        status = check(NULL, nccl.ncclGetUniqueId(&mine.id), "opening");
    }
    mine.failed = status != PS_OK;
    const enum ps_status told = host->gather(host, all, &mine, sizeof mine);
    for (int r = 0; r < host->size && status == PS_OK && told == PS_OK; r++) {
        status = all[r].failed ? ps_fail(PS_DEVICE, "nccl: rank %d could not open it", r) : PS_OK;
    }
    for (int r = 1; r < host->size && status == PS_OK && told == PS_OK; r++) {
        for (int i = 0; i < r && status == PS_OK; i++) {
            if (memcmp(all[r].host, all[i].host, sizeof mine.host) == 0 && memcmp(all[r].gpu, all[i].gpu, sizeof mine.gpu) == 0) {
                status = ps_fail(PS_USAGE,
                                 "ranks %d and %d share the GPU %s of %s, and NCCL wants one a rank: start as many ranks as there "
                                 "are GPUs, or set runtime.exchange: mpi, which sums on the host, slowly",
                                 i, r, all[r].gpu, all[r].host);
            }
        }
    }
    *id = all[0].id;
    delete[] all;
    return told != PS_OK ? told : status;
}

/* Its kernels' few blocks go before those of what computes, which waits for them at the end. */
static enum ps_status open_beside(struct exchange *e)
{
    int least, greatest;
    PS_TRY(ps_cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for streams' priorities"));
    PS_TRY(ps_cuda_check(cudaStreamCreateWithPriority(&e->beside, cudaStreamNonBlocking, greatest), "creating a stream"));
    PS_TRY(ps_cuda_check(cudaEventCreateWithFlags(&e->forked, cudaEventDisableTiming), "creating an event"));
    return ps_cuda_check(cudaEventCreateWithFlags(&e->ended, cudaEventDisableTiming), "creating an event");
}

/* Connects, which no capture may have to do. */
static enum ps_status try_each(struct exchange *e)
{
    struct ps_exchange *t = &e->table;
    void *memory;
    const size_t bytes = (size_t)(t->size + 1) * sizeof(double);
    PS_TRY(e->device->allocate(e->device, bytes, &memory));
    enum ps_status status = t->sum(t, memory, PS_F32, 1);
    status = status == PS_OK ? t->sum(t, memory, PS_F64, 1) : status;
    status = status == PS_OK ? t->gather(t, (double *)memory + 1, memory, sizeof(double)) : status;
    status = status == PS_OK ? e->device->synchronize(e->device) : status;
    e->device->release(e->device, memory, bytes);
    return status;
}

extern "C" enum ps_status ps_nccl_open(struct ps_device *device, struct ps_exchange *host, struct ps_exchange **exchange)
{
    ncclUniqueId id;
    int version = 0;
    *exchange = NULL;
    PS_TRY(ps_cuda_check(cudaSetDevice(device->index), "choosing the device"));
    PS_TRY(introduce(device, host, &id));
    struct exchange *e = new (std::nothrow) struct exchange();
    if (!e) {
        return ps_fail(PS_DEVICE, "nccl: no host memory");
    }
    e->device = device;
    e->table.rank = host->rank;
    e->table.size = host->size;
    e->table.context = e;
    e->table.sum = nccl_sum;
    e->table.sum_beside = nccl_sum_beside;
    e->table.join = nccl_join;
    e->table.part = part_bytes;
    e->table.gather = nccl_gather;
    e->table.close = nccl_close;
    enum ps_status status = check(e, nccl.ncclGetVersion(&version), "asking for its version");
    (void)snprintf(e->table.carrier, sizeof e->table.carrier, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    status = status == PS_OK ? open_beside(e) : status;
    status = status == PS_OK ? check(e, nccl.ncclCommInitRank(&e->comm, host->size, id, host->rank), "opening") : status;
    status = status == PS_OK ? try_each(e) : status;
    if (status != PS_OK) {
        nccl_close(&e->table);
        return status;
    }
    *exchange = &e->table;
    return PS_OK;
}
