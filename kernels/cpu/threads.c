/* How many threads there are to compute with. OpenMP may give fewer than it is asked for, and then OpenBLAS, which shares a product
 * among as many as it was told of, waits without end for those that are not there. Where address space or processes run out libgomp
 * ends the process, and OpenBLAS asks for its buffers again and again. So all of it is tried first, and then taken. */
#include <cblas.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/cpu/cpu.h"

/* OpenBLAS has a buffer of 128 MiB for each of its threads, those that it began with when it was loaded, and one for whoever asks
 * it for a product. */
static const size_t buffer_bytes = (128u << 20) + (64u << 10);

struct place {
    pthread_t thread; /* of all but the first, which is this one */
    void *room;       /* NULL: it needs none */
};

static void *wait_at(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

static void *map_room(size_t bytes)
{
    void *room = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return room != MAP_FAILED ? room : NULL;
}

/* Of the threads that libgomp will start: OMP_STACKSIZE, "16M", in KiB without a unit. */
static void set_stack(pthread_attr_t *attributes)
{
    const char *text = getenv("OMP_STACKSIZE"), *const units = "BKMG";
    char *end = NULL;
    unsigned long long size = text != NULL ? strtoull(text, &end, 10) : 0;
    if (size > 0) {
        const char *unit = strchr(units, *end & ~0x20);
        size <<= 10 * (*end != '\0' && unit != NULL ? unit - units : 1);
        pthread_attr_setstacksize(attributes, (size_t)size);
    }
}

/* As many of the threads as there are at once, with their buffers; all is given back. Twice as much room is asked for, so that
 * threads leave as much for everything else. 0: not even this one has its buffer. */
static int try_threads(int wanted)
{
    const char *built = strstr(openblas_get_config(), "MAX_THREADS=");
    int most = built != NULL ? atoi(built + strlen("MAX_THREADS=")) : wanted, begun = openblas_get_num_threads(), threads = 0;
    struct place *places = calloc((size_t)wanted, sizeof *places);
    void *own = places != NULL ? map_room(buffer_bytes) : NULL;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    set_stack(&attributes);
    pthread_mutex_lock(&gate);
    for (; own != NULL && threads < wanted; threads++) {
        struct place *place = &places[threads];
        int has_buffer = threads < begun || threads >= most;
        if ((!has_buffer && (place->room = map_room(2 * buffer_bytes)) == NULL) ||
            (threads > 0 && pthread_create(&place->thread, &attributes, wait_at, &gate) != 0)) {
            break;
        }
    }
    pthread_mutex_unlock(&gate);
    for (int i = 1; i < threads; i++) {
        pthread_join(places[i].thread, NULL);
    }
    for (int i = 0; own != NULL && i <= threads && i < wanted; i++) {
        if (places[i].room != NULL) {
            munmap(places[i].room, 2 * buffer_bytes);
        }
    }
    if (own != NULL) {
        munmap(own, buffer_bytes);
    }
    pthread_attr_destroy(&attributes);
    free(places);
    return threads;
}

/* A product of zeros, large enough for OpenBLAS to take all its buffers now: later there might be no room for them. */
static enum ps_status take_buffers(void)
{
    enum { N = 128 };
    float *zeros = calloc(2 * N * N, sizeof *zeros);
    if (zeros == NULL) {
        return ps_fail(PS_DEVICE, "not enough memory for a product of %d by %d", N, N);
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, N, N, 1.0f, zeros, N, zeros, N, 0.0f, zeros + N * N, N);
    free(zeros);
    return PS_OK;
}

enum ps_status ps_cpu_threads(int wanted, int *asked, int *threads)
{
    static int taken; /* by this process: they stay */
    int limit = omp_get_thread_limit(), team = 1;
    if (wanted == 0) {
        wanted = omp_get_num_procs() < limit ? omp_get_num_procs() : limit;
    }
    int n = wanted < limit ? wanted : limit;
    n = n > taken ? try_threads(n) : n;
    if (n == 0) {
        return ps_fail(PS_DEVICE, "not enough memory for OpenBLAS's buffer (%zu MiB of address space): raise ulimit -v",
                       buffer_bytes >> 20);
    }
    omp_set_dynamic(0);
    omp_set_num_threads(n);
#pragma omp parallel
#pragma omp master
    team = omp_get_num_threads();
    n = team < n ? team : n; /* OMP_MAX_ACTIVE_LEVELS=0 */
    omp_set_num_threads(n);
    openblas_set_num_threads(n);
    PS_TRY(take_buffers());
    taken = n > taken ? n : taken;
    *asked = wanted;
    *threads = n;
    return PS_OK;
}
