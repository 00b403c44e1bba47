#include "data/prefetch.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Reader: FREE -> FULL. Consumer: FULL -> HELD -> FREE. */
enum slot_state { SLOT_FREE, SLOT_FULL, SLOT_HELD };

struct ps_prefetch {
    struct ps_window_view view;
    int64_t batch;
    float *inputs[2], *targets[2];

    pthread_t thread;
    pthread_mutex_t mutex; /* guards all below */
    pthread_cond_t changed;
    const int32_t *index;
    int64_t position, end; /* of the next window to gather */
    int fill, take;        /* the slots that reader and consumer come to next */
    enum slot_state state[2];
    int64_t windows[2]; /* in a FULL or HELD slot */
    int gathering;      /* the reader is at work outside the mutex */
    int quit;
};

static void *reader(void *argument)
{
    struct ps_prefetch *p = argument;
    pthread_mutex_lock(&p->mutex);
    for (;;) {
        while (!p->quit && (p->position >= p->end || p->state[p->fill] != SLOT_FREE)) {
            pthread_cond_wait(&p->changed, &p->mutex);
        }
        if (p->quit) {
            break;
        }
        int slot = p->fill;
        int64_t n = p->end - p->position < p->batch ? p->end - p->position : p->batch;
        const int32_t *index = p->index + p->position;
        p->gathering = 1;
        pthread_mutex_unlock(&p->mutex);
        ps_windows_gather(&p->view, index, n, p->inputs[slot], p->targets[slot]);
        pthread_mutex_lock(&p->mutex);
        p->gathering = 0;
        p->state[slot] = SLOT_FULL;
        p->windows[slot] = n;
        p->position += n;
        p->fill = 1 - slot;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}

enum ps_status ps_prefetch_open(const struct ps_window_view *view, int64_t batch, float *const inputs[2], float *const targets[2],
                                struct ps_prefetch **prefetch)
{
    *prefetch = NULL;
    if (batch < 1) {
        return ps_fail(PS_USAGE, "prefetch: batch is %" PRId64 ": expected at least 1", batch);
    }
    struct ps_prefetch *p = calloc(1, sizeof *p);
    if (p == NULL) {
        return ps_fail(PS_DATA, "prefetch: out of host memory");
    }
    p->view = *view;
    p->batch = batch;
    memcpy(p->inputs, inputs, sizeof p->inputs);
    memcpy(p->targets, targets, sizeof p->targets);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->changed, NULL);
    /* The thread inherits a full mask, so that signals reach the run loop. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&p->thread, NULL, reader, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        pthread_cond_destroy(&p->changed);
        pthread_mutex_destroy(&p->mutex);
        free(p);
        return ps_fail(PS_DATA, "prefetch: the reader thread cannot be started: %s", strerror(error));
    }
    *prefetch = p;
    return PS_OK;
}

void ps_prefetch_start(struct ps_prefetch *prefetch, const int32_t *index, int64_t begin, int64_t end)
{
    struct ps_prefetch *p = prefetch;
    pthread_mutex_lock(&p->mutex);
    p->position = p->end; /* no new batch of the old epoch; one being gathered is waited for: the old index may then be freed */
    while (p->gathering) {
        pthread_cond_wait(&p->changed, &p->mutex);
    }
    p->index = index;
    p->position = begin;
    p->end = end;
    p->fill = p->take = 0;
    for (int slot = 0; slot < 2; slot++) {
        if (p->state[slot] == SLOT_FULL) {
            p->state[slot] = SLOT_FREE;
        }
    }
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->mutex);
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

enum ps_status ps_prefetch_next(struct ps_prefetch *prefetch, int *slot, int64_t *n, double *waited)
{
    struct ps_prefetch *p = prefetch;
    enum ps_status status = PS_OK;
    pthread_mutex_lock(&p->mutex);
    int take = p->take;
    *slot = take;
    *n = 0;
    if (p->state[take] == SLOT_FREE && p->position < p->end) {
        double begin = seconds_now();
        while (p->state[take] == SLOT_FREE) {
            pthread_cond_wait(&p->changed, &p->mutex);
        }
        *waited += seconds_now() - begin;
    }
    if (p->state[take] == SLOT_FULL) {
        p->state[take] = SLOT_HELD;
        *n = p->windows[take];
        p->take = 1 - take;
    } else if (p->state[take] == SLOT_HELD && p->position < p->end) {
        status =
            ps_fail(PS_UNSUPPORTED, "prefetch: buffer %d must be released before the next batch can be gathered into it", take);
    }
    pthread_mutex_unlock(&p->mutex);
    return status;
}

void ps_prefetch_release(struct ps_prefetch *prefetch, int slot)
{
    pthread_mutex_lock(&prefetch->mutex);
    if (prefetch->state[slot] == SLOT_HELD) {
        prefetch->state[slot] = SLOT_FREE;
        pthread_cond_broadcast(&prefetch->changed);
    }
    pthread_mutex_unlock(&prefetch->mutex);
}

void ps_prefetch_close(struct ps_prefetch *prefetch)
{
    if (prefetch == NULL) {
        return;
    }
    pthread_mutex_lock(&prefetch->mutex);
    prefetch->quit = 1;
    pthread_cond_broadcast(&prefetch->changed);
    pthread_mutex_unlock(&prefetch->mutex);
    pthread_join(prefetch->thread, NULL);
    pthread_cond_destroy(&prefetch->changed);
    pthread_mutex_destroy(&prefetch->mutex);
    free(prefetch);
}
