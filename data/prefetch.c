#include "data/prefetch.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Reader: FREE -> FULL. Consumer: FULL -> HELD -> FREE. */
enum slot_state { SLOT_FREE, SLOT_FULL, SLOT_HELD };

struct ps_prefetch {
    ps_prefetch_fill *fill;
    void *source;

    pthread_t thread;
    int started;           /* the thread is there: from the first pass on */
    pthread_mutex_t mutex; /* guards all below */
    pthread_cond_t changed;
    int running;   /* a pass is under way, and its end was not reached */
    int put, take; /* the slots that reader and consumer come to next */
    enum slot_state state[2];
    int64_t n[2]; /* in a FULL or HELD slot */
    int filling;  /* the reader is at work outside the mutex */
    int quit;
    enum ps_status status; /* of the fill that ended the pass */
    char message[1024];
};

static void *reader(void *argument)
{
    struct ps_prefetch *p = argument;
    pthread_mutex_lock(&p->mutex);
    for (;;) {
        while (!p->quit && (!p->running || p->state[p->put] != SLOT_FREE)) {
            pthread_cond_wait(&p->changed, &p->mutex);
        }
        if (p->quit) {
            break;
        }
        int slot = p->put;
        int64_t n = 0;
        p->filling = 1;
        pthread_mutex_unlock(&p->mutex);
        enum ps_status status = p->fill(p->source, slot, &n);
        pthread_mutex_lock(&p->mutex);
        p->filling = 0;
        if (!p->running) {
            /* abandoned meanwhile: the slot stays free */
        } else if (status == PS_OK && n > 0) {
            p->state[slot] = SLOT_FULL;
            p->n[slot] = n;
            p->put = 1 - slot;
        } else {
            p->running = 0;
            p->status = status;
            snprintf(p->message, sizeof p->message, "%s", status == PS_OK ? "" : ps_error_message());
        }
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}

enum ps_status ps_prefetch_open(ps_prefetch_fill *fill, void *source, struct ps_prefetch **prefetch)
{
    *prefetch = NULL;
    struct ps_prefetch *p = calloc(1, sizeof *p);
    if (p == NULL) {
        return ps_fail(PS_DATA, "prefetch: out of host memory");
    }
    p->fill = fill;
    p->source = source;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->changed, NULL);
    *prefetch = p;
    return PS_OK;
}

/* The thread inherits a full mask, so that signals reach the run loop. It needs little stack, and less counts where the address
 * space is limited. */
static enum ps_status start_thread(struct ps_prefetch *p)
{
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&p->thread, &attributes, reader, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    p->started = error == 0;
    return error == 0 ? PS_OK : ps_fail(PS_DATA, "prefetch: the reader thread cannot be started: %s", strerror(error));
}

void ps_prefetch_start(struct ps_prefetch *p, int slot)
{
    enum ps_status status = p->started ? PS_OK : start_thread(p);
    pthread_mutex_lock(&p->mutex);
    p->put = p->take = slot;
    p->status = status;
    p->running = status == PS_OK;
    snprintf(p->message, sizeof p->message, "%s", status == PS_OK ? "" : ps_error_message());
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->mutex);
}

void ps_prefetch_stop(struct ps_prefetch *p)
{
    pthread_mutex_lock(&p->mutex);
    p->running = 0;
    p->status = PS_OK;
    while (p->filling) {
        pthread_cond_wait(&p->changed, &p->mutex);
    }
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

enum ps_status ps_prefetch_next(struct ps_prefetch *p, int *slot, int64_t *n, double *waited)
{
    enum ps_status status = PS_OK;
    pthread_mutex_lock(&p->mutex);
    int take = p->take;
    *slot = take;
    *n = 0;
    if (p->state[take] == SLOT_FREE && p->running) {
        double begin = seconds_now();
        while (p->state[take] == SLOT_FREE && p->running) {
            pthread_cond_wait(&p->changed, &p->mutex);
        }
        *waited += seconds_now() - begin;
    }
    if (p->state[take] == SLOT_FULL) {
        p->state[take] = SLOT_HELD;
        *n = p->n[take];
        p->take = 1 - take;
    } else if (p->state[take] == SLOT_HELD && p->running) {
        status = ps_fail(PS_UNSUPPORTED, "prefetch: buffer %d must be released before the next batch can be put into it", take);
    } else if (p->status != PS_OK) {
        status = ps_fail(p->status, "%s", p->message);
    }
    pthread_mutex_unlock(&p->mutex);
    return status;
}

void ps_prefetch_release(struct ps_prefetch *p, int slot)
{
    pthread_mutex_lock(&p->mutex);
    if (p->state[slot] == SLOT_HELD) {
        p->state[slot] = SLOT_FREE;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->mutex);
}

void ps_prefetch_close(struct ps_prefetch *p)
{
    if (p == NULL) {
        return;
    }
    pthread_mutex_lock(&p->mutex);
    p->quit = 1;
    p->running = 0;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->mutex);
    if (p->started) {
        pthread_join(p->thread, NULL);
    }
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->mutex);
    free(p);
}
