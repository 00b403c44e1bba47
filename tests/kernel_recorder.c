/* Names every CUDA kernel that a program launches: scripts/sanitize_gpu.sh compares them with those that the library has. CUDA's
 * driver loads it where CUDA_INJECTION64_PATH names it, and calls InitializeInjection. A launch that is captured into a graph
 * counts once, as it is captured. When the program ends, the names are appended to the file PS_KERNELS_LAUNCHED, one a line. */
#include <cupti.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char **names;
static size_t count;

static void record(const char *name)
{
    pthread_mutex_lock(&mutex);
    size_t i = 0;
    while (i < count && strcmp(names[i], name) != 0) {
        i++;
    }
    if (i == count) {
        char **longer = realloc(names, (count + 1) * sizeof *names);
        names = longer ? longer : names;
        if (longer && (names[count] = strdup(name))) {
            count++;
        }
    }
    pthread_mutex_unlock(&mutex);
}

static void CUPTIAPI called(void *unused, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *data)
{
    (void)unused, (void)domain, (void)id;
    const CUpti_CallbackData *call = data;
    if (call->callbackSite == CUPTI_API_ENTER && call->symbolName) {
        record(call->symbolName);
    }
}

static void save(void)
{
    const char *path = getenv("PS_KERNELS_LAUNCHED");
    FILE *file = path ? fopen(path, "a") : NULL;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; file && i < count; i++) {
        fprintf(file, "%s\n", names[i]);
    }
    pthread_mutex_unlock(&mutex);
    if (!file || fclose(file) != 0) {
        fprintf(stderr, "kernel_recorder: PS_KERNELS_LAUNCHED: %s: not written\n", path ? path : "not set");
    }
}

int InitializeInjection(void);
int InitializeInjection(void)
{
    static const CUpti_CallbackId launches[] = {CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz};
    CUpti_SubscriberHandle subscriber;
    int failed = cuptiSubscribe(&subscriber, called, NULL) != CUPTI_SUCCESS;
    for (size_t i = 0; i < sizeof launches / sizeof *launches; i++) {
        failed |= cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, launches[i]) != CUPTI_SUCCESS;
    }
    if (failed || atexit(save) != 0) {
        fprintf(stderr, "kernel_recorder: launches cannot be recorded\n");
        return 0;
    }
    return 1;
}
