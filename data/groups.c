#include "data/groups.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "data/prefetch.h"
#include "data/series_file.h"

/* Room for one group of blocks. */
struct room {
    float *values;  /* series: [blocks, C, rows], each channel's rows side by side; windows: inputs [blocks * windows, C, L] */
    float *targets; /* windows: [blocks * windows, C, H]; series: NULL */
    int32_t *index; /* [blocks * windows] */
    struct ps_window_view view;
    int64_t skip; /* windows of the group that come before the pass's begin */
};

struct ps_groups {
    const struct ps_series *series;
    const struct ps_scaler *scaler;
    struct ps_blocks plan;
    struct room room[2];
    float *staging; /* series: rows as they are stored, [piece_rows, C] */

    /* The pass; changed while the reader is not at work, or by it. */
    struct ps_order order;
    int32_t *blocks; /* in the order in which they are read */
    int64_t n_blocks, next, group, skip;
    atomic_int cancelled;
    struct ps_prefetch *prefetch;
};

/* Block b holds windows *begin up to *end of the pass, in the file's order. Blocks are counted from the one that holds its first
 * window. */
static void block_windows(const struct ps_groups *s, int64_t b, int64_t *begin, int64_t *end)
{
    int64_t W = s->plan.windows, at = (s->order.first / W + b) * W;
    *begin = ps_order_before(&s->order, at);
    *end = ps_order_before(&s->order, at + W);
}

/* from [rows, C] to [C, rows] whose channels lie `stride` apart, 16 channels at a time: a cache line is read once. */
static void transpose(const float *from, int64_t rows, int64_t C, int64_t stride, float *to)
{
    for (int64_t c0 = 0; c0 < C; c0 += 16) {
        int64_t c1 = c0 + 16 < C ? c0 + 16 : C;
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = c0; c < c1; c++) {
                to[c * stride + r] = from[r * C + c];
            }
        }
    }
}

/* Rows [first, first + rows) of a series into a block, piece by piece: pieces end where chunks do. */
static enum ps_status read_rows(struct ps_groups *s, int64_t first, int64_t rows, float *block)
{
    int64_t C = s->series->channels, piece = s->series->file->dataset[0].piece_rows, n;
    for (int64_t r = first; r < first + rows; r += n) {
        n = piece - r % piece;
        n = n < first + rows - r ? n : first + rows - r;
        PS_TRY(ps_series_read(s->series, 0, r, n, s->staging));
        ps_scaler_scale_rows(s->scaler, r, n, s->staging);
        transpose(s->staging, n, C, s->plan.rows, block + (r - first));
    }
    return PS_OK;
}

/* Windows [from, to) as the k-th block of a group, `windows` of which are there. *base: of the first in the view. */
static enum ps_status read_block(struct ps_groups *s, const struct room *room, int64_t k, int64_t windows, int64_t from, int64_t to,
                                 int64_t *base)
{
    int64_t C = s->series->channels, n = to - from;
    if (s->series->layout == PS_LAYOUT_SERIES) {
        *base = k * C * s->plan.rows;
        return read_rows(s, from, n + s->plan.rows - s->plan.windows, room->values + *base);
    }
    int64_t length[2] = {s->series->seq_len, s->series->pred_len};
    float *to_values[2] = {room->values + windows * C * length[0], room->targets + windows * C * length[1]};
    *base = windows;
    for (int i = 0; i < 2; i++) {
        PS_TRY(ps_series_read(s->series, i, from, n, to_values[i]));
        ps_scaler_scale(s->scaler, to_values[i], n, length[i]);
    }
    return PS_OK;
}

static enum ps_status fill_group(void *source, int slot, int64_t *n)
{
    struct ps_groups *s = source;
    struct room *room = &s->room[slot];
    int64_t windows = 0;
    ps_hdf5_quiet();
    for (int64_t k = 0; k < s->plan.blocks && s->next < s->n_blocks; k++) {
        int64_t begin, end, base;
        if (s->cancelled) {
            return PS_OK;
        }
        block_windows(s, s->blocks[s->next++], &begin, &end);
        int64_t from = ps_order_window(&s->order, begin), to = ps_order_window(&s->order, end - 1) + 1;
        PS_TRY(read_block(s, room, k, windows, from, to, &base));
        ps_order_windows(&s->order, begin, end - begin, room->index + windows);
        for (; begin < end; begin++) {
            room->index[windows++] += (int32_t)(base - from);
        }
    }
    if (s->order.shuffled) {
        ps_shuffle_group(s->order.seed, s->order.epoch, s->group, windows, room->index);
    }
    s->group++;
    room->skip = s->skip;
    s->skip = 0;
    *n = windows;
    return PS_OK;
}

static enum ps_status open_rooms(struct ps_groups *s, int64_t seq_len, int64_t pred_len)
{
    const struct ps_series *series = s->series;
    int is_series = series->layout == PS_LAYOUT_SERIES;
    int64_t C = series->channels, windows = s->plan.blocks * s->plan.windows;
    size_t values = (size_t)(is_series ? s->plan.blocks * C * s->plan.rows : windows * C * seq_len) * sizeof(float);
    size_t targets = (size_t)(windows * C * pred_len) * sizeof(float);
    int failed = 0;
    for (int slot = 0; slot < 2; slot++) {
        struct room *room = &s->room[slot];
        room->values = malloc(values);
        room->targets = is_series ? NULL : malloc(targets);
        room->index = malloc((size_t)windows * sizeof *room->index);
        failed |= room->values == NULL || room->index == NULL || (!is_series && room->targets == NULL);
        room->view = ps_window_view_make(series, seq_len, pred_len);
        room->view.inputs = room->values;
        room->view.targets = room->targets;
        if (is_series && !failed) {
            room->view.targets = room->values + seq_len;
            for (int i = 0; i < 3; i++) {
                room->view.input_stride[i] = room->view.target_stride[i] = i == 1 ? s->plan.rows : 1;
            }
        }
    }
    s->blocks = malloc((size_t)(series->rows / s->plan.windows + 2) * sizeof *s->blocks);
    if (is_series) {
        s->staging = malloc((size_t)(series->file->dataset[0].piece_rows * C) * sizeof *s->staging);
    }
    if (failed || s->blocks == NULL || (is_series && s->staging == NULL)) {
        return ps_fail(PS_DATA, "%s: no memory for the %" PRId64 " MiB that data.memory_limit allows", series->path,
                       series->file->memory.limit >> 20);
    }
    return PS_OK;
}

enum ps_status ps_groups_open(const struct ps_series *series, const struct ps_scaler *scaler, int64_t seq_len, int64_t pred_len,
                              struct ps_groups **groups)
{
    *groups = NULL;
    PS_TRY(ps_scaler_check(scaler, series));
    struct ps_groups *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return ps_fail(PS_DATA, "%s: out of host memory", series->path);
    }
    s->series = series;
    s->scaler = scaler;
    s->plan = series->file->plan;
    enum ps_status status = open_rooms(s, seq_len, pred_len);
    if (status == PS_OK) {
        status = ps_prefetch_open(fill_group, s, &s->prefetch);
    }
    if (status != PS_OK) {
        ps_groups_close(s);
        return status;
    }
    *groups = s;
    return PS_OK;
}

void ps_groups_close(struct ps_groups *s)
{
    if (s == NULL) {
        return;
    }
    s->cancelled = 1;
    ps_prefetch_close(s->prefetch);
    for (int slot = 0; slot < 2; slot++) {
        free(s->room[slot].values);
        free(s->room[slot].targets);
        free(s->room[slot].index);
    }
    free(s->blocks);
    free(s->staging);
    free(s);
}

/* The blocks that hold a window of the pass, in the file's order. */
static void list_blocks(struct ps_groups *s)
{
    s->n_blocks = 0;
    for (int64_t b = 0, done = 0; done < s->order.count; b++) {
        int64_t begin;
        block_windows(s, b, &begin, &done);
        if (done > begin) {
            s->blocks[s->n_blocks++] = (int32_t)b;
        }
    }
}

void ps_groups_start(struct ps_groups *s, const struct ps_order *order, int64_t begin)
{
    s->order = *order;
    list_blocks(s);
    if (order->shuffled) {
        ps_shuffle_index(order->seed, order->epoch, s->n_blocks, s->blocks);
    }
    /* The group that holds the window `begin`. */
    int64_t before = 0;
    for (s->next = s->group = 0; s->next < s->n_blocks; s->group++) {
        int64_t end = s->next + s->plan.blocks < s->n_blocks ? s->next + s->plan.blocks : s->n_blocks, windows = 0, w[2];
        for (int64_t b = s->next; b < end; b++) {
            block_windows(s, s->blocks[b], &w[0], &w[1]);
            windows += w[1] - w[0];
        }
        if (before + windows > begin) {
            break;
        }
        before += windows;
        s->next = end;
    }
    s->skip = begin - before;
    s->cancelled = 0;
    ps_prefetch_start(s->prefetch, 0);
}

void ps_groups_cancel(struct ps_groups *s)
{
    s->cancelled = 1;
}

void ps_groups_stop(struct ps_groups *s)
{
    ps_groups_cancel(s);
    ps_prefetch_stop(s->prefetch);
    for (int slot = 0; slot < 2; slot++) {
        ps_prefetch_release(s->prefetch, slot);
    }
}

enum ps_status ps_groups_next(struct ps_groups *s, struct ps_group *group)
{
    double waited = 0;
    int64_t n;
    *group = (struct ps_group){0};
    PS_TRY(ps_prefetch_next(s->prefetch, &group->slot, &n, &waited));
    if (n > 0) {
        const struct room *room = &s->room[group->slot];
        group->view = room->view;
        group->index = room->index + room->skip;
        group->n = n - room->skip;
    }
    return PS_OK;
}

void ps_groups_release(struct ps_groups *s, const struct ps_group *group)
{
    ps_prefetch_release(s->prefetch, group->slot);
}

enum ps_status ps_groups_naive(struct ps_groups *s, const struct ps_order *order, int64_t season, struct ps_naive *naive)
{
    struct ps_naive_sums sums = {.count = order->count, .season = season};
    enum ps_status status = PS_OK;
    ps_groups_start(s, order, 0);
    for (int64_t done = 0; done < order->count && status == PS_OK;) {
        struct ps_group group;
        status = ps_groups_next(s, &group);
        if (status == PS_OK) {
            ps_naive_add(&sums, &group.view, done, group.n, group.index);
            done += group.n;
            ps_groups_release(s, &group);
        }
    }
    ps_groups_stop(s);
    *naive = ps_naive_end(&sums, &s->room[0].view);
    return status;
}
