#include "src/feed.h"

#include <stdlib.h>
#include <string.h>

#include "data/batches.h"
#include "src/clock.h"

struct ps_feed {
    struct ps_device *device;
    const struct ps_config *config;
    const struct ps_series *series;
    struct ps_window_view view; /* the host's copy, standardised; of a series that stays in its file, the sizes alone */
    struct ps_groups *groups;   /* reads that file; NULL: the data are in host memory */

    struct ps_windows windows; /* as the device reads them */
    int resident;              /* the whole series is there; else batches stream through two slots */
    int32_t *order, *next;     /* pinned, [longest] each: the present order, and one drawn ahead; NULL with groups */
    struct ps_order drawn;     /* what next holds; of no windows: nothing */
    int64_t batch, longest;
    struct ps_feed_share share; /* of a step */
    int64_t room;               /* windows of a slot */
    int64_t short_begin;        /* places from here on are those of a batch that is shorter; -1: of none */
    void *data[2];              /* device memory behind windows, when it is the feed's own */
    size_t data_bytes[2];

    struct ps_batches *batches;
    float *slot_inputs[2], *slot_targets[2]; /* pinned; on the CPU, parts of data[] */
    struct ps_event *slot_uploaded[2], *slot_free[2];
    int64_t position; /* of the pass, when batches stream: windows that have been handed out */
    int slot;         /* of the last batch */
    int held[2];      /* slots whose host buffer is in use */
    double waited;
};

static int on_cpu(const struct ps_feed *f)
{
    return strcmp(f->device->kind, "cpu") == 0;
}

/* A view's windows as the device reads them, from `data`. */
static struct ps_tensor window_tensor(const void *data, int64_t windows, int64_t channels, int64_t length, const int64_t stride[3])
{
    struct ps_tensor t = ps_tensor_3d((void *)data, PS_F32, windows, channels, length);
    memcpy(t.stride, stride, 3 * sizeof *stride);
    return t;
}

static enum ps_status device_copy(struct ps_feed *f, int which, const float *host, size_t bytes)
{
    f->data_bytes[which] = bytes;
    PS_TRY(f->device->allocate(f->device, bytes, &f->data[which]));
    return host ? f->device->upload(f->device, PS_COMPUTE, f->data[which], host, bytes) : PS_OK;
}

/* ps_wanted.next: this rank's. */
static int64_t next_mine(const void *argument, int64_t windows, int64_t from, int64_t *n)
{
    const struct ps_feed_share *s = argument;
    for (int64_t first = from / s->at_once * s->at_once; first < windows; first += s->at_once) {
        const int64_t left = windows - first;
        const struct ps_shares shares = {
            .windows = left < s->at_once ? left : s->at_once, .granule = s->granule, .ranks = s->ranks};
        int64_t begin = first + ps_share_begin(&shares, s->rank);
        const int64_t end = begin + ps_share_count(&shares, s->rank);
        begin = begin < from ? from : begin;
        if (begin < end) {
            *n = end - begin;
            return begin;
        }
    }
    return windows;
}

/* Windows that a batch of so many takes in a slot. */
static int64_t windows_mine(const struct ps_feed *f, int64_t windows)
{
    int64_t mine = 0;
    for (int64_t at = 0, n; f->share.ranks > 1 && (at = next_mine(&f->share, windows, at, &n)) < windows; at += n) {
        mine += n;
    }
    return f->share.ranks > 1 ? mine : windows;
}

/* Where in the slots windows [first, end) of a pass lie, of which each batch has `windows`, or fewer at the end of the pass: those
 * of a batch that are this rank's behind one another. Others are never read. */
static enum ps_status write_places(struct ps_feed *f, int64_t first, int64_t end, int64_t windows)
{
    int32_t places[1024];
    const int64_t room = sizeof places / sizeof *places, B = f->batch;
    int64_t before = 0; /* of the batch: those that are this rank's */
    for (int64_t begin = first; begin < end; begin += room) {
        const int64_t count = end - begin < room ? end - begin : room;
        for (int64_t i = 0; i < count; i++) {
            const int64_t slot = (begin + i) / B % 2, at = (begin + i) % B;
            int64_t n;
            before = at == 0 ? 0 : before;
            places[i] = (int32_t)(slot * f->room + (before < f->room ? before : 0));
            before += f->share.ranks <= 1 || next_mine(&f->share, windows, at, &n) == at;
        }
        PS_TRY(f->device->upload(f->device, PS_COMPUTE, (int32_t *)f->windows.indices.data + begin, places,
                                 (size_t)count * sizeof *places));
    }
    return PS_OK;
}

/* Two slots through which batches stream: the batch of window w of a pass lies in slot w / batch % 2. The reader fills buffers of
 * the host that are uploaded to the slots, and on the CPU the slots themselves. */
static enum ps_status place_slots(struct ps_feed *f)
{
    struct ps_device *device = f->device;
    int64_t C = f->view.channels, L = f->view.seq_len, H = f->view.pred_len, B = f->room;
    int64_t inputs = B * C * L, targets = B * C * H;
    PS_TRY(device_copy(f, 0, NULL, 2 * (size_t)inputs * sizeof(float)));
    PS_TRY(device_copy(f, 1, NULL, 2 * (size_t)targets * sizeof(float)));
    f->windows.inputs = ps_tensor_3d(f->data[0], PS_F32, 2 * B, C, L);
    f->windows.targets = ps_tensor_3d(f->data[1], PS_F32, 2 * B, C, H);
    for (int slot = 0; slot < 2; slot++) {
        if (on_cpu(f)) {
            f->slot_inputs[slot] = (float *)f->data[0] + slot * inputs;
            f->slot_targets[slot] = (float *)f->data[1] + slot * targets;
        } else {
            PS_TRY(device->allocate_host(device, (size_t)inputs * sizeof(float), (void **)&f->slot_inputs[slot]));
            PS_TRY(device->allocate_host(device, (size_t)targets * sizeof(float), (void **)&f->slot_targets[slot]));
        }
        PS_TRY(device->event_create(device, &f->slot_uploaded[slot]));
        PS_TRY(device->event_create(device, &f->slot_free[slot]));
    }
    PS_TRY(write_places(f, 0, f->longest, f->batch));
    PS_TRY(ps_batches_open(&f->view, f->groups, f->batch, f->slot_inputs, f->slot_targets, &f->batches));
    if (f->share.ranks > 1) {
        ps_batches_want(f->batches, &(struct ps_wanted){.next = next_mine, .argument = &f->share});
    }
    return PS_OK;
}

/* The whole series on the device, or the slots. */
static enum ps_status place_data(struct ps_feed *f)
{
    struct ps_device *device = f->device;
    const struct ps_window_view *v = &f->view;
    enum ps_placement placement = f->config->data.placement;
    if (f->groups && placement == PS_PLACEMENT_DEVICE) {
        return ps_fail(PS_USAGE,
                       "data.placement: device needs the whole series in host memory first, and data.memory_limit %lld is less: "
                       "raise it, or set data.placement: auto",
                       (long long)f->config->data.memory_limit);
    }
    if (f->groups || placement == PS_PLACEMENT_HOST) {
        return place_slots(f);
    }
    int is_series = f->series->layout == PS_LAYOUT_SERIES;
    int64_t C = v->channels, L = v->seq_len, H = v->pred_len;
    size_t bytes[2] = {(size_t)(f->series->rows * C) * sizeof(float), 0};
    if (!is_series) {
        bytes[0] *= (size_t)L;
        bytes[1] = (size_t)(f->series->rows * C * H) * sizeof(float);
    }
    size_t free_bytes, total_bytes;
    PS_TRY(device->memory(device, &free_bytes, &total_bytes));
    f->resident = placement == PS_PLACEMENT_DEVICE || on_cpu(f) || bytes[0] + bytes[1] <= free_bytes / 2;
    if (!f->resident) {
        return place_slots(f);
    }
    if (on_cpu(f)) {
        f->windows.inputs = window_tensor(v->inputs, v->windows, C, L, v->input_stride);
        f->windows.targets = window_tensor(v->targets, v->windows, C, H, v->target_stride);
        return PS_OK;
    }
    if (bytes[0] + bytes[1] > free_bytes) {
        return ps_fail(PS_DEVICE, "data.placement: the data needs %.0f MiB on the device, %.0f MiB are free: set it to host",
                       (double)(bytes[0] + bytes[1]) / 0x1p20, (double)free_bytes / 0x1p20);
    }
    PS_TRY(device_copy(f, 0, v->inputs, bytes[0]));
    const float *targets = (const float *)f->data[0] + (v->targets - v->inputs);
    if (!is_series) {
        PS_TRY(device_copy(f, 1, v->targets, bytes[1]));
        targets = f->data[1];
    }
    f->windows.inputs = window_tensor(f->data[0], v->windows, C, L, v->input_stride);
    f->windows.targets = window_tensor(targets, v->windows, C, H, v->target_stride);
    return device->synchronize(device);
}

enum ps_status ps_feed_open(struct ps_device *device, const struct ps_config *config, const struct ps_series *series,
                            struct ps_groups *groups, int64_t batch, int64_t longest, const struct ps_feed_share *share,
                            struct ps_feed **feed)
{
    struct ps_feed *f = calloc(1, sizeof *f);
    if (!f) {
        return ps_fail(PS_DEVICE, "no memory for the session");
    }
    *f = (struct ps_feed){.device = device,
                          .config = config,
                          .series = series,
                          .view = ps_window_view_make(series, config->model.seq_len, config->model.pred_len),
                          .groups = groups,
                          .batch = batch,
                          .longest = longest,
                          .share = *share,
                          .room = share->most,
                          .short_begin = -1};
    void *indices = NULL;
    enum ps_status status = PS_OK;
    if (!groups) { /* which draws the order of one group at a time */
        status = device->allocate_host(device, (size_t)longest * sizeof *f->order, (void **)&f->order);
    }
    if (!groups && status == PS_OK) {
        status = device->allocate_host(device, (size_t)longest * sizeof *f->next, (void **)&f->next);
    }
    if (status == PS_OK) {
        status = device->allocate(device, (size_t)longest * sizeof(int32_t), &indices);
    }
    f->windows.indices = ps_tensor_1d(indices, PS_I32, longest);
    if (status == PS_OK) {
        status = place_data(f);
    }
    if (status != PS_OK) {
        ps_feed_close(f);
        return status;
    }
    *feed = f;
    return PS_OK;
}

static void release(struct ps_feed *f, void *memory, size_t bytes)
{
    if (memory) {
        f->device->release(f->device, memory, bytes);
    }
}

void ps_feed_close(struct ps_feed *f)
{
    if (!f) {
        return;
    }
    struct ps_device *device = f->device;
    ps_batches_close(f->batches);
    device->synchronize(device); /* nothing may still be running on what is freed */
    for (int slot = 0; slot < 2; slot++) {
        if (f->slot_inputs[slot] && !on_cpu(f)) {
            device->release_host(device, f->slot_inputs[slot]);
        }
        if (f->slot_targets[slot] && !on_cpu(f)) {
            device->release_host(device, f->slot_targets[slot]);
        }
        if (f->slot_uploaded[slot]) {
            device->event_destroy(device, f->slot_uploaded[slot]);
        }
        if (f->slot_free[slot]) {
            device->event_destroy(device, f->slot_free[slot]);
        }
        release(f, f->data[slot], f->data_bytes[slot]);
    }
    release(f, f->windows.indices.data, (size_t)f->longest * sizeof(int32_t));
    if (f->order) {
        device->release_host(device, f->order);
    }
    if (f->next) {
        device->release_host(device, f->next);
    }
    free(f);
}

int ps_feed_resident(const struct ps_feed *f)
{
    return f->resident;
}

const struct ps_windows *ps_feed_windows(const struct ps_feed *f)
{
    return &f->windows;
}

/* ---- one pass ---- */

void ps_feed_prepare(struct ps_feed *f, const struct ps_order *order)
{
    if (!f->groups) {
        ps_order_draw(order, f->next);
        f->drawn = *order;
    }
}

/* f->order becomes that order. */
static void take_order(struct ps_feed *f, const struct ps_order *order)
{
    const struct ps_order *d = &f->drawn;
    if (d->first != order->first || d->count != order->count || d->runs != order->runs || d->shuffled != order->shuffled ||
        d->seed != order->seed || d->epoch != order->epoch) {
        ps_order_draw(order, f->order);
        return;
    }
    int32_t *const before = f->order;
    f->order = f->next;
    f->next = before;
    f->drawn.count = 0;
}

enum ps_status ps_feed_start(struct ps_feed *f, const struct ps_order *order, int64_t begin, int64_t end)
{
    f->position = begin;
    if (!f->groups) {
        take_order(f, order);
    }
    if (f->resident) {
        return f->device->upload(f->device, PS_COMPUTE, f->windows.indices.data, f->order, (size_t)end * sizeof *f->order);
    }
    if (f->share.ranks > 1) { /* a short batch is shared otherwise than a full one */
        const int64_t B = f->batch, again = f->short_begin, full = end / B * B;
        PS_TRY(again < 0 ? PS_OK : write_places(f, again, again + B < f->longest ? again + B : f->longest, B));
        PS_TRY(write_places(f, full, end, end - full));
        f->short_begin = full < end ? full : -1;
    }
    ps_batches_start(f->batches, order, f->order, begin, end);
    return PS_OK;
}

/* Gives back the host's buffers that the device has taken; waits for the one that the next batch needs. */
static enum ps_status release_slots(struct ps_feed *f, int needed)
{
    for (int slot = 0; slot < 2; slot++) {
        int happened = 0;
        while (f->held[slot]) {
            PS_TRY(f->device->event_query(f->device, f->slot_uploaded[slot], &happened));
            if (happened) {
                ps_batches_release(f->batches, slot);
                f->held[slot] = 0;
            } else if (slot == needed) {
                ps_nap();
            } else {
                break;
            }
        }
    }
    return PS_OK;
}

enum ps_status ps_feed_next(struct ps_feed *f)
{
    if (f->resident) {
        return PS_OK;
    }
    struct ps_device *device = f->device;
    int64_t B = f->room, C = f->view.channels, L = f->view.seq_len, H = f->view.pred_len, n;
    int slot = (int)(f->position / f->batch % 2), idle = 0;
    double waited = 0;
    PS_TRY(release_slots(f, slot));
    PS_TRY(ps_batches_next(f->batches, &f->slot, &n, &waited));
    f->held[slot] = 1;
    f->position += n;
    PS_TRY(device->event_query(device, f->slot_free[1 - slot], &idle)); /* the step before is done: nothing is queued */
    f->waited += idle ? waited : 0;
    PS_TRY(device->event_wait(device, PS_COPY, f->slot_free[slot]));
    char *inputs = (char *)f->data[0] + (size_t)(slot * B * C * L) * sizeof(float);
    char *targets = (char *)f->data[1] + (size_t)(slot * B * C * H) * sizeof(float);
    n = windows_mine(f, n);
    if (inputs != (char *)f->slot_inputs[slot] && n > 0) {
        PS_TRY(device->upload(device, PS_COPY, inputs, f->slot_inputs[slot], (size_t)(n * C * L) * sizeof(float)));
        PS_TRY(device->upload(device, PS_COPY, targets, f->slot_targets[slot], (size_t)(n * C * H) * sizeof(float)));
    }
    PS_TRY(device->event_record(device, PS_COPY, f->slot_uploaded[slot]));
    return device->event_wait(device, PS_COMPUTE, f->slot_uploaded[slot]);
}

enum ps_status ps_feed_used(struct ps_feed *f)
{
    return f->resident ? PS_OK : f->device->event_record(f->device, PS_COMPUTE, f->slot_free[f->slot]);
}

void ps_feed_stop(struct ps_feed *f)
{
    for (int slot = 0; slot < 2; slot++) {
        if (f->held[slot]) {
            ps_batches_release(f->batches, slot);
            f->held[slot] = 0;
        }
    }
    if (!f->resident) { /* a pass that was cut short leaves the reader at work: the order is about to be written again */
        ps_batches_stop(f->batches);
    }
}

const int32_t *ps_feed_order(const struct ps_feed *f)
{
    return f->order;
}

void ps_feed_batch(const struct ps_feed *f, const float **inputs, const float **targets)
{
    *inputs = f->slot_inputs[f->slot];
    *targets = f->slot_targets[f->slot];
}

double ps_feed_waited(const struct ps_feed *f)
{
    return f->waited;
}
