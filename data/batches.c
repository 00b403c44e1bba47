#include "data/batches.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/prefetch.h"

struct ps_batches {
    struct ps_window_view view;
    struct ps_groups *groups;
    int64_t batch;
    float *inputs[2], *targets[2];
    struct ps_wanted wanted; /* next NULL: all */

    /* The pass; changed while the reader is not at work, or by it. */
    const int32_t *index;
    int64_t position, end; /* of the next window */
    struct ps_group group; /* in use, and used up to `used` */
    int64_t used;
    struct ps_prefetch *prefetch;
};

/* Where a batch of so many windows goes. */
struct target {
    int64_t windows, gathered;
    float *inputs, *targets;
};

/* Of windows [first, first + n) of the batch, which index names in the view, those that are wanted. */
static void gather(struct ps_batches *b, struct target *to, const struct ps_window_view *view, const int32_t *index, int64_t first,
                   int64_t n)
{
    const int64_t C = b->view.channels, end = first + n;
    for (int64_t at = first, count = n; at < end; at += count) {
        at = b->wanted.next ? b->wanted.next(b->wanted.argument, to->windows, at, &count) : at;
        count = count < end - at ? count : end - at;
        if (count > 0) {
            ps_windows_gather(view, index + (at - first), count, to->inputs + to->gathered * C * b->view.seq_len,
                              to->targets + to->gathered * C * b->view.pred_len);
            to->gathered += count;
        } else {
            return;
        }
    }
}

/* The next windows from as many groups as it takes; *done: how many there were, fewer only when they were stopped. */
static enum ps_status gather_groups(struct ps_batches *b, struct target *to, int64_t *done)
{
    const int64_t n = to->windows;
    for (*done = 0; *done < n;) {
        if (b->used == b->group.n) {
            if (b->group.n > 0) {
                ps_groups_release(b->groups, &b->group);
            }
            b->used = 0;
            PS_TRY(ps_groups_next(b->groups, &b->group));
            if (b->group.n == 0) {
                return PS_OK;
            }
        }
        int64_t part = b->group.n - b->used < n - *done ? b->group.n - b->used : n - *done;
        gather(b, to, &b->group.view, b->group.index + b->used, *done, part);
        b->used += part;
        *done += part;
    }
    return PS_OK;
}

static enum ps_status fill_batch(void *source, int slot, int64_t *n)
{
    struct ps_batches *b = source;
    int64_t windows = b->end - b->position < b->batch ? b->end - b->position : b->batch;
    struct target to = {.windows = windows, .inputs = b->inputs[slot], .targets = b->targets[slot]};
    if (b->groups != NULL) {
        PS_TRY(gather_groups(b, &to, n));
    } else {
        gather(b, &to, &b->view, b->index + b->position, 0, windows);
        *n = windows;
    }
    b->position += *n;
    return PS_OK;
}

enum ps_status ps_batches_open(const struct ps_window_view *view, struct ps_groups *groups, int64_t batch, float *const inputs[2],
                               float *const targets[2], struct ps_batches **batches)
{
    *batches = NULL;
    if (batch < 1) {
        return ps_fail(PS_USAGE, "batches: batch is %" PRId64 ": expected at least 1", batch);
    }
    struct ps_batches *b = calloc(1, sizeof *b);
    if (b == NULL) {
        return ps_fail(PS_DATA, "batches: out of host memory");
    }
    b->view = *view;
    b->groups = groups;
    b->batch = batch;
    memcpy(b->inputs, inputs, sizeof b->inputs);
    memcpy(b->targets, targets, sizeof b->targets);
    enum ps_status status = ps_prefetch_open(fill_batch, b, &b->prefetch);
    if (status != PS_OK) {
        free(b);
        return status;
    }
    *batches = b;
    return PS_OK;
}

void ps_batches_want(struct ps_batches *b, const struct ps_wanted *wanted)
{
    b->wanted = *wanted;
}

void ps_batches_start(struct ps_batches *b, const struct ps_order *order, const int32_t *index, int64_t begin, int64_t end)
{
    ps_batches_stop(b);
    b->index = index;
    b->position = begin;
    b->end = end;
    if (b->groups != NULL) {
        ps_groups_start(b->groups, order, begin);
    }
    ps_prefetch_start(b->prefetch, (int)(begin / b->batch % 2));
}

void ps_batches_stop(struct ps_batches *b)
{
    if (b->groups != NULL) {
        ps_groups_cancel(b->groups); /* the reader may be waiting for it */
    }
    ps_prefetch_stop(b->prefetch);
    if (b->groups != NULL) {
        ps_groups_stop(b->groups);
        b->group = (struct ps_group){0};
        b->used = 0;
    }
}

enum ps_status ps_batches_next(struct ps_batches *b, int *slot, int64_t *n, double *waited)
{
    return ps_prefetch_next(b->prefetch, slot, n, waited);
}

void ps_batches_release(struct ps_batches *b, int slot)
{
    ps_prefetch_release(b->prefetch, slot);
}

void ps_batches_close(struct ps_batches *b)
{
    if (b == NULL) {
        return;
    }
    ps_batches_stop(b);
    ps_prefetch_close(b->prefetch);
    free(b);
}
