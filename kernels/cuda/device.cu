/* The device table on CUDA: two non-blocking streams, events, and graphs captured from PS_COMPUTE. */
#include <new>

#include <stdio.h>
#include <string.h>

#include "kernels/cuda/context.cuh"

struct cuda_device {
    cudaStream_t streams[2]; /* by enum ps_stream */
};

struct ps_event {
    cudaEvent_t event;
};

struct ps_graph {
    cudaGraphExec_t executable;
    struct ps_graph_nodes nodes;
};

static const double mebibyte = 1024.0 * 1024.0;

enum ps_status ps_cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) {
        return PS_OK;
    }
    (void)cudaGetLastError(); /* or the next launch would report it as its own */
    return ps_fail(
        PS_DEVICE, "cuda: %s: %s%s", what, cudaGetErrorString(error),
        error == cudaErrorNoKernelImageForDevice ? ": this build is for other GPUs: build again with scripts/build.sh --all" : "");
}

cudaStream_t ps_cuda_stream(const struct ps_device *device, enum ps_stream s)
{
    return ((const struct cuda_device *)device->context)->streams[s];
}

/* The current device belongs to the host thread; any thread may call the table. */
static enum ps_status use(const struct ps_device *d)
{
    return ps_cuda_check(cudaSetDevice(d->index), "choosing the device");
}

static enum ps_status device_memory(struct ps_device *d, size_t *free_bytes, size_t *total_bytes)
{
    PS_TRY(use(d));
    return ps_cuda_check(cudaMemGetInfo(free_bytes, total_bytes), "asking for free memory");
}

static enum ps_status device_allocate(struct ps_device *d, size_t bytes, void **memory)
{
    *memory = NULL;
    PS_TRY(use(d));
    void *p = NULL;
    cudaError_t error = cudaMalloc(&p, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        size_t free_bytes = 0, total_bytes = 0;
        PS_TRY(device_memory(d, &free_bytes, &total_bytes));
        return ps_fail(PS_DEVICE, "not enough memory on %s (cuda:%d): an allocation needs %.1f MiB, %.1f MiB free of %.1f MiB",
                       d->name, d->index, (double)bytes / mebibyte, (double)free_bytes / mebibyte, (double)total_bytes / mebibyte);
    }
    PS_TRY(ps_cuda_check(error, "allocating device memory"));
    cudaStream_t stream = ps_cuda_stream(d, PS_COMPUTE);
    error = cudaMemsetAsync(p, 0, bytes ? bytes : 1, stream);
    if (error == cudaSuccess) {
        error = cudaStreamSynchronize(stream); /* the other stream may use the memory at once */
    }
    if (error != cudaSuccess) {
        (void)cudaFree(p);
        return ps_cuda_check(error, "zeroing new device memory");
    }
    *memory = p;
    d->counters.allocations++;
    d->counters.bytes += bytes;
    if (d->counters.bytes > d->counters.peak_bytes) {
        d->counters.peak_bytes = d->counters.bytes;
    }
    return PS_OK;
}

static void device_release(struct ps_device *d, void *memory, size_t bytes)
{
    if (!memory) {
        return;
    }
    (void)cudaSetDevice(d->index);
    if (cudaFree(memory) != cudaSuccess) {
        (void)cudaGetLastError(); /* of earlier work: synchronize reports it */
    }
    d->counters.bytes -= bytes;
}

static enum ps_status device_allocate_host(struct ps_device *d, size_t bytes, void **memory)
{
    *memory = NULL;
    PS_TRY(use(d));
    void *p = NULL;
    cudaError_t error = cudaMallocHost(&p, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return ps_fail(PS_DEVICE, "cuda: %.1f MiB of pinned host memory are not to be had", (double)bytes / mebibyte);
    }
    PS_TRY(ps_cuda_check(error, "allocating pinned host memory"));
    memset(p, 0, bytes);
    *memory = p;
    return PS_OK;
}

static void device_release_host(struct ps_device *d, void *memory)
{
    if (!memory) {
        return;
    }
    (void)cudaSetDevice(d->index);
    if (cudaFreeHost(memory) != cudaSuccess) {
        (void)cudaGetLastError();
    }
}

static enum ps_status device_upload(struct ps_device *d, enum ps_stream s, void *device_memory, const void *host, size_t bytes)
{
    PS_TRY(use(d));
    return ps_cuda_check(cudaMemcpyAsync(device_memory, host, bytes, cudaMemcpyHostToDevice, ps_cuda_stream(d, s)), "upload");
}

static enum ps_status device_copy(struct ps_device *d, enum ps_stream s, void *to, const void *from, size_t bytes)
{
    PS_TRY(use(d));
    return ps_cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, ps_cuda_stream(d, s)), "copy");
}

static enum ps_status device_fill_zero(struct ps_device *d, enum ps_stream s, void *memory, size_t bytes)
{
    PS_TRY(use(d));
    return ps_cuda_check(cudaMemsetAsync(memory, 0, bytes, ps_cuda_stream(d, s)), "fill with zero");
}

static enum ps_status device_download_async(struct ps_device *d, enum ps_stream s, void *host, const void *device_memory,
                                            size_t bytes)
{
    PS_TRY(use(d));
    return ps_cuda_check(cudaMemcpyAsync(host, device_memory, bytes, cudaMemcpyDeviceToHost, ps_cuda_stream(d, s)), "download");
}

static enum ps_status device_download(struct ps_device *d, enum ps_stream s, void *host, const void *device_memory, size_t bytes)
{
    PS_TRY(device_download_async(d, s, host, device_memory, bytes));
    d->counters.synchronizations++;
    return ps_cuda_check(cudaStreamSynchronize(ps_cuda_stream(d, s)), "waiting for a download");
}

static enum ps_status device_synchronize(struct ps_device *d)
{
    PS_TRY(use(d));
    d->counters.synchronizations++;
    cudaError_t copying = cudaStreamSynchronize(ps_cuda_stream(d, PS_COPY));
    PS_TRY(ps_cuda_check(cudaStreamSynchronize(ps_cuda_stream(d, PS_COMPUTE)), "waiting for the compute stream"));
    return ps_cuda_check(copying, "waiting for the copy stream");
}

static enum ps_status device_event_create(struct ps_device *d, struct ps_event **event)
{
    *event = NULL;
    PS_TRY(use(d));
    struct ps_event *e = new (std::nothrow) ps_event();
    if (!e) {
        return ps_fail(PS_DEVICE, "cuda: no host memory for an event");
    }
    enum ps_status status = ps_cuda_check(cudaEventCreate(&e->event), "creating an event");
    if (status != PS_OK) {
        delete e;
        return status;
    }
    *event = e;
    return PS_OK;
}

static void device_event_destroy(struct ps_device *d, struct ps_event *event)
{
    if (!event) {
        return;
    }
    (void)cudaSetDevice(d->index);
    if (cudaEventDestroy(event->event) != cudaSuccess) {
        (void)cudaGetLastError();
    }
    delete event;
}

static enum ps_status device_event_record(struct ps_device *d, enum ps_stream s, struct ps_event *event)
{
    PS_TRY(use(d));
    return ps_cuda_check(cudaEventRecord(event->event, ps_cuda_stream(d, s)), "recording an event");
}

static enum ps_status device_event_wait(struct ps_device *d, enum ps_stream s, struct ps_event *event)
{
    PS_TRY(use(d));
    return ps_cuda_check(cudaStreamWaitEvent(ps_cuda_stream(d, s), event->event, cudaEventWaitDefault), "waiting for an event");
}

static enum ps_status device_event_query(struct ps_device *d, struct ps_event *event, int *happened)
{
    *happened = 0;
    PS_TRY(use(d));
    cudaError_t error = cudaEventQuery(event->event);
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return PS_OK;
    }
    PS_TRY(ps_cuda_check(error, "asking for an event"));
    *happened = 1;
    return PS_OK;
}

static enum ps_status device_event_elapsed(struct ps_device *d, struct ps_event *from, struct ps_event *to, double *ms)
{
    float elapsed = 0.0f;
    *ms = 0.0;
    PS_TRY(use(d));
    PS_TRY(ps_cuda_check(cudaEventElapsedTime(&elapsed, from->event, to->event), "time between two events"));
    *ms = (double)elapsed;
    return PS_OK;
}

static enum ps_status count_nodes(cudaGraph_t graph, struct ps_graph_nodes *nodes)
{
    size_t count = 0;
    PS_TRY(ps_cuda_check(cudaGraphGetNodes(graph, NULL, &count), "counting a graph's nodes"));
    if (count == 0) {
        return PS_OK;
    }
    cudaGraphNode_t *list = new (std::nothrow) cudaGraphNode_t[count];
    if (!list) {
        return ps_fail(PS_DEVICE, "cuda: no host memory for %zu graph nodes", count);
    }
    enum ps_status status = ps_cuda_check(cudaGraphGetNodes(graph, list, &count), "listing a graph's nodes");
    for (size_t i = 0; i < count && status == PS_OK; i++) {
        enum cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
        status = ps_cuda_check(cudaGraphNodeGetType(list[i], &type), "asking for a graph node's type");
        if (type == cudaGraphNodeTypeKernel) {
            nodes->kernels++;
        } else if (type == cudaGraphNodeTypeMemcpy) {
            nodes->copies++;
        } else if (type == cudaGraphNodeTypeMemset) {
            nodes->fills++;
        } else {
            nodes->others++;
        }
    }
    delete[] list;
    return status;
}

/* The executable graph of a captured one. */
static enum ps_status instantiate(struct ps_device *d, cudaGraph_t captured, struct ps_graph **graph)
{
    struct ps_graph_nodes nodes = {};
    PS_TRY(count_nodes(captured, &nodes));
    struct ps_graph *g = new (std::nothrow) ps_graph();
    if (!g) {
        return ps_fail(PS_DEVICE, "cuda: no host memory for a graph");
    }
    g->nodes = nodes;
    enum ps_status status = ps_cuda_check(cudaGraphInstantiate(&g->executable, captured, cudaGraphInstantiateFlagUseNodePriority),
                                          "instantiating the captured graph");
    if (status == PS_OK) {
        status = ps_cuda_check(cudaGraphUpload(g->executable, ps_cuda_stream(d, PS_COMPUTE)), "uploading the captured graph");
        if (status != PS_OK) {
            (void)cudaGraphExecDestroy(g->executable);
        }
    }
    if (status != PS_OK) {
        delete g;
        return status;
    }
    *graph = g;
    return PS_OK;
}

static enum ps_status device_capture(struct ps_device *d, enum ps_status (*body)(void *argument), void *argument,
                                     struct ps_graph **graph)
{
    *graph = NULL;
    PS_TRY(use(d));
    cudaStream_t stream = ps_cuda_stream(d, PS_COMPUTE);
    PS_TRY(ps_cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture"));
    enum ps_status status = body(argument);
    cudaGraph_t captured = NULL;
    cudaError_t ended = cudaStreamEndCapture(stream, &captured);
    if (status != PS_OK) {
        (void)cudaGetLastError(); /* body's message stays the last one */
    } else {
        status = ps_cuda_check(ended, "ending a capture");
    }
    if (status == PS_OK) {
        status = instantiate(d, captured, graph);
    }
    if (captured && cudaGraphDestroy(captured) != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return status;
}

static enum ps_status device_replay(struct ps_device *d, struct ps_graph *graph)
{
    PS_TRY(use(d));
    PS_TRY(ps_cuda_check(cudaGraphLaunch(graph->executable, ps_cuda_stream(d, PS_COMPUTE)), "replaying a graph"));
    d->counters.launches++;
    return PS_OK;
}

static void device_graph_nodes(struct ps_device *d, const struct ps_graph *graph, struct ps_graph_nodes *nodes)
{
    (void)d;
    *nodes = graph->nodes;
}

static void device_graph_destroy(struct ps_device *d, struct ps_graph *graph)
{
    if (!graph) {
        return;
    }
    (void)cudaSetDevice(d->index);
    if (cudaGraphExecDestroy(graph->executable) != cudaSuccess) {
        (void)cudaGetLastError();
    }
    delete graph;
}

static void device_close(struct ps_device *d)
{
    struct cuda_device *context = (struct cuda_device *)d->context;
    (void)cudaSetDevice(d->index);
    for (int s = 0; s < 2; s++) {
        if (context->streams[s] && cudaStreamDestroy(context->streams[s]) != cudaSuccess) {
            (void)cudaGetLastError();
        }
    }
    delete context;
    delete d;
}

extern "C" int ps_cuda_device_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        (void)cudaGetLastError();
        return 0;
    }
    return count;
}

/* Name, versions and streams of a device whose index is known to exist. */
static enum ps_status describe(struct ps_device *d)
{
    struct cudaDeviceProp properties;
    PS_TRY(ps_cuda_check(cudaGetDeviceProperties(&properties, d->index), "asking for the device's properties"));
    snprintf(d->name, sizeof d->name, "%.127s", properties.name);
    d->compute_capability = 10 * properties.major + properties.minor;
    if (d->compute_capability < 80) {
        return ps_fail(PS_DEVICE, "cuda:%d (%s) has compute capability %d.%d: 8.0 or later is needed", d->index, d->name,
                       properties.major, properties.minor);
    }
    int driver = 0, runtime = 0;
    PS_TRY(ps_cuda_check(cudaDriverGetVersion(&driver), "asking for the driver's version"));
    PS_TRY(ps_cuda_check(cudaRuntimeGetVersion(&runtime), "asking for the runtime's version"));
    snprintf(d->version, sizeof d->version, "driver %d.%d, runtime %d.%d", driver / 1000, driver % 1000 / 10, runtime / 1000,
             runtime % 1000 / 10);
    PS_TRY(use(d));
    struct cuda_device *context = (struct cuda_device *)d->context;
    int least, greatest;
    PS_TRY(ps_cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for streams' priorities"));
    for (int s = 0; s < 2; s++) { /* before what takes what is left (ops/optimizer.cu) */
        PS_TRY(ps_cuda_check(cudaStreamCreateWithPriority(&context->streams[s], cudaStreamNonBlocking, greatest),
                             "creating a stream"));
    }
    return PS_OK;
}

extern "C" enum ps_status ps_cuda_device_open(int index, struct ps_device **device)
{
    *device = NULL;
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return ps_fail(PS_DEVICE, "no CUDA device was found: use --device cpu (%s)", cudaGetErrorString(error));
    }
    if (count < 1) {
        return ps_fail(PS_DEVICE, "no CUDA device was found: use --device cpu");
    }
    if (index < 0 || index >= count) {
        return ps_fail(PS_DEVICE, "cuda:%d does not exist: this machine has %d CUDA device(s)", index, count);
    }
    struct ps_device *d = new (std::nothrow) ps_device();
    struct cuda_device *context = new (std::nothrow) cuda_device();
    if (!d || !context) {
        delete d;
        delete context;
        return ps_fail(PS_DEVICE, "cuda: no host memory for a device");
    }
    d->kind = "cuda";
    d->index = index;
    d->context = context;
    d->allocate = device_allocate;
    d->release = device_release;
    d->allocate_host = device_allocate_host;
    d->release_host = device_release_host;
    d->memory = device_memory;
    d->upload = device_upload;
    d->copy = device_copy;
    d->fill_zero = device_fill_zero;
    d->download = device_download;
    d->download_async = device_download_async;
    d->synchronize = device_synchronize;
    d->event_create = device_event_create;
    d->event_destroy = device_event_destroy;
    d->event_record = device_event_record;
    d->event_wait = device_event_wait;
    d->event_query = device_event_query;
    d->event_elapsed = device_event_elapsed;
    d->capture = device_capture;
    d->replay = device_replay;
    d->graph_nodes = device_graph_nodes;
    d->graph_destroy = device_graph_destroy;
    d->close = device_close;
    enum ps_status status = describe(d);
    if (status != PS_OK) {
        device_close(d);
        return status;
    }
    *device = d;
    return PS_OK;
}
