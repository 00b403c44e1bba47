#include "src/writer.h"

#include <hdf5.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/clock.h"
#include "src/snapshot.h"

struct copy {
    struct ps_snapshot last, best;
    int with_best;
    int queued; /* from submit until its files are durable */
};

struct ps_writer {
    struct ps_kept *kept;
    struct copy copy[2];
    int fill, take; /* the copies that the run loop and the thread come to next */
    struct ps_writer_times times;

    pthread_t thread;
    int started;
    pthread_mutex_t mutex; /* guards what is queued, and all below */
    pthread_cond_t changed;
    enum ps_status status; /* of the first write that failed */
    char message[1024];
    int quit;
};

/* Parameters may overflow while every gradient is finite. */
static enum ps_status check_finite(const struct ps_checkpoint *c)
{
    const struct ps_parameters *layout = c->layout;
    for (int t = 0; t < layout->all; t++) {
        const struct ps_parameter *p = &layout->table[t];
        for (int64_t i = 0; i < ps_parameter_count(p); i++) {
            if (!isfinite(c->parameters[p->offset + i])) {
                return ps_fail(PS_USAGE, "step %llu: %s has a value that is not finite, and is not written: lower optim.lr",
                               (unsigned long long)c->step, p->name);
            }
        }
    }
    return PS_OK;
}

static enum ps_status write_copy(struct ps_writer *w, struct copy *copy)
{
    PS_TRY(ps_snapshot_wait(&copy->last));
    if (copy->last.state->nonfinite) {
        return PS_OK; /* the run loop comes to see it too, and ends the run; the last good checkpoint stays */
    }
    PS_TRY(check_finite(&copy->last.checkpoint));
    double begin = ps_seconds();
    if (copy->with_best) {
        PS_TRY(ps_snapshot_wait(&copy->best));
        PS_TRY(ps_kept_save(w->kept, &copy->best.checkpoint));
    }
    PS_TRY(ps_kept_save(w->kept, &copy->last.checkpoint));
    double seconds = ps_seconds() - begin;
    w->times.writing += seconds;
    w->times.longest_write = seconds > w->times.longest_write ? seconds : w->times.longest_write;
    return PS_OK;
}

static void *work(void *argument)
{
    struct ps_writer *w = argument;
    pthread_mutex_lock(&w->mutex);
    for (;;) {
        struct copy *copy = &w->copy[w->take];
        while (!w->quit && !copy->queued) {
            pthread_cond_wait(&w->changed, &w->mutex);
        }
        if (!copy->queued) {
            break;
        }
        if (w->status == PS_OK) {
            pthread_mutex_unlock(&w->mutex);
            enum ps_status status = write_copy(w, copy);
            pthread_mutex_lock(&w->mutex);
            if (status != PS_OK) {
                w->status = status;
                snprintf(w->message, sizeof w->message, "%s", ps_error_message());
            }
        }
        copy->queued = 0;
        w->take = 1 - w->take;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

enum ps_status ps_writer_open(struct ps_session *session, struct ps_kept *kept, struct ps_writer **writer)
{
    *writer = NULL;
    hbool_t safe = 0;
    if (H5is_library_threadsafe(&safe) < 0 || !safe) {
        return ps_fail(PS_CHECKPOINT, "libhdf5 is built without thread safety: checkpoints are written by a thread: take a build "
                                      "with it, such as Debian's");
    }
    struct ps_writer *w = calloc(1, sizeof *w);
    if (!w) {
        return ps_fail(PS_CHECKPOINT, "no memory for the checkpoints' thread");
    }
    w->kept = kept;
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->changed, NULL);
    enum ps_status status = PS_OK;
    for (int i = 0; i < 4 && status == PS_OK; i++) {
        struct copy *copy = &w->copy[i / 2];
        status = ps_snapshot_open(session, i % 2, i % 2 ? &copy->best : &copy->last);
    }
    if (status == PS_OK) {
        /* The thread inherits a full mask, so that signals reach the run loop. */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int error = pthread_create(&w->thread, NULL, work, w);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        w->started = error == 0;
        status = error ? ps_fail(PS_CHECKPOINT, "the checkpoints' thread cannot be started: %s", strerror(error)) : PS_OK;
    }
    if (status != PS_OK) {
        ps_writer_close(w);
        return status;
    }
    *writer = w;
    return PS_OK;
}

/* With the mutex held. */
static enum ps_status result(const struct ps_writer *w)
{
    return w->status == PS_OK ? PS_OK : ps_fail(w->status, "%s", w->message);
}

enum ps_status ps_writer_submit(struct ps_writer *w, int with_best)
{
    struct copy *copy = &w->copy[w->fill];
    double begin = ps_seconds();
    pthread_mutex_lock(&w->mutex);
    while (copy->queued) {
        pthread_cond_wait(&w->changed, &w->mutex);
    }
    enum ps_status status = result(w);
    pthread_mutex_unlock(&w->mutex);
    PS_TRY(status);
    copy->with_best = with_best;
    if (with_best) {
        PS_TRY(ps_snapshot_take(&copy->best));
    }
    PS_TRY(ps_snapshot_take(&copy->last));
    pthread_mutex_lock(&w->mutex);
    copy->queued = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
    w->fill = 1 - w->fill;
    double seconds = ps_seconds() - begin;
    w->times.checkpoints++;
    w->times.stalled += seconds;
    w->times.longest_stall = seconds > w->times.longest_stall ? seconds : w->times.longest_stall;
    return PS_OK;
}

enum ps_status ps_writer_drain(struct ps_writer *w)
{
    pthread_mutex_lock(&w->mutex);
    while (w->copy[0].queued || w->copy[1].queued) {
        pthread_cond_wait(&w->changed, &w->mutex);
    }
    enum ps_status status = result(w);
    pthread_mutex_unlock(&w->mutex);
    return status;
}

struct ps_writer_times ps_writer_times(const struct ps_writer *w)
{
    return w->times;
}

void ps_writer_close(struct ps_writer *w)
{
    if (!w) {
        return;
    }
    if (w->started) {
        pthread_mutex_lock(&w->mutex);
        w->quit = 1;
        pthread_cond_broadcast(&w->changed);
        pthread_mutex_unlock(&w->mutex);
        pthread_join(w->thread, NULL);
    }
    for (int i = 0; i < 2; i++) {
        ps_snapshot_close(&w->copy[i].last);
        ps_snapshot_close(&w->copy[i].best);
    }
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->mutex);
    free(w);
}
