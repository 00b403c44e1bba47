#include <math.h>
#include <string.h>

#include "data/series.h"
#include "kernels/philox.h"

struct ps_window_view ps_window_view_make(const struct ps_series *series, int64_t seq_len, int64_t pred_len)
{
    int64_t C = series->channels;
    struct ps_window_view view = {.channels = C, .seq_len = seq_len, .pred_len = pred_len};
    if (series->layout == PS_LAYOUT_SERIES) {
        /* Windows overlap: the next one begins a row later. */
        int64_t windows = series->rows - seq_len - pred_len + 1;
        view.windows = windows > 0 ? windows : 0;
        view.inputs = view.targets = series->values;
        if (view.inputs != NULL && view.windows > 0) {
            view.targets += seq_len * C;
        }
        for (int i = 0; i < 3; i++) {
            view.input_stride[i] = view.target_stride[i] = i == 1 ? 1 : C;
        }
    } else {
        view.windows = series->rows;
        view.inputs = series->inputs;
        view.targets = series->targets;
        memcpy(view.input_stride, (int64_t[]){C * seq_len, seq_len, 1}, sizeof view.input_stride);
        memcpy(view.target_stride, (int64_t[]){C * pred_len, pred_len, 1}, sizeof view.target_stride);
    }
    return view;
}

/* to [C, n] dense from one window with strides (channel, row). */
static void gather_window(const float *from, int64_t channel_stride, int64_t row_stride, int64_t C, int64_t n, float *to)
{
    if (row_stride == 1) {
        for (int64_t c = 0; c < C; c++) {
            memcpy(to + c * n, from + c * channel_stride, (size_t)n * sizeof *to);
        }
        return;
    }
    /* A transpose, 16 channels at a time: each row's cache line is read once, and 16 lines are written side by side. */
    for (int64_t c0 = 0; c0 < C; c0 += 16) {
        int64_t c1 = c0 + 16 < C ? c0 + 16 : C;
        for (int64_t l = 0; l < n; l++) {
            for (int64_t c = c0; c < c1; c++) {
                to[c * n + l] = from[c * channel_stride + l * row_stride];
            }
        }
    }
}

/* Of a channel of a window with nothing observed among its n inputs no target is observed either. */
static void leave_out_unseen(const float *input, int64_t n, int64_t pred_len, float *target)
{
    for (int64_t l = 0; l < n; l++) {
        if (!isnan(input[l])) {
            return;
        }
    }
    for (int64_t t = 0; t < pred_len; t++) {
        target[t] = NAN;
    }
}

void ps_windows_gather(const struct ps_window_view *view, const int32_t *index, int64_t n, float *inputs, float *targets)
{
    int64_t C = view->channels, L = view->seq_len, H = view->pred_len;
    for (int64_t b = 0; b < n; b++) {
        const float *input = view->inputs + index[b] * view->input_stride[0];
        const float *target = view->targets + index[b] * view->target_stride[0];
        gather_window(input, view->input_stride[1], view->input_stride[2], C, L, inputs + b * C * L);
        gather_window(target, view->target_stride[1], view->target_stride[2], C, H, targets + b * C * H);
        for (int64_t c = b * C; c < (b + 1) * C; c++) {
            leave_out_unseen(inputs + c * L, L, H, targets + c * H);
        }
    }
}

void ps_sequence(int64_t first, int64_t count, int32_t *index)
{
    for (int64_t i = 0; i < count; i++) {
        index[i] = (int32_t)(first + i);
    }
}

/* The words of blocks 0, 1, 2, ... of one epoch and site, in order. */
struct draws {
    uint64_t seed, epoch, used;
    uint32_t site;
    struct ps_block block;
};

static uint32_t next_word(struct draws *d)
{
    if (d->used % 4 == 0) {
        d->block = ps_philox(d->seed, (uint32_t)(d->used / 4), d->site, d->epoch);
    }
    return d->block.word[d->used++ % 4];
}

/* Uniform in [0, n), every value equally likely: the high half of word * n, drawn again when the low half falls among the
 * 2^32 mod n values that would favour some results (Lemire 2019). */
static uint32_t bounded(struct draws *d, uint32_t n)
{
    uint64_t product = (uint64_t)next_word(d) * n;
    if ((uint32_t)product < n) {
        uint32_t surplus = -n % n;
        while ((uint32_t)product < surplus) {
            product = (uint64_t)next_word(d) * n;
        }
    }
    return (uint32_t)(product >> 32);
}

static void shuffle(struct draws d, int64_t count, int32_t *index)
{
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = bounded(&d, (uint32_t)(i + 1));
        int32_t kept = index[i];
        index[i] = index[j];
        index[j] = kept;
    }
}

void ps_shuffle(uint64_t seed, uint64_t epoch, int64_t first, int64_t count, int32_t *index)
{
    ps_sequence(first, count, index);
    ps_shuffle_index(seed, epoch, count, index);
}

void ps_shuffle_index(uint64_t seed, uint64_t epoch, int64_t count, int32_t *index)
{
    shuffle((struct draws){.seed = seed, .epoch = epoch, .site = PS_SITE_SHUFFLE}, count, index);
}

void ps_shuffle_group(uint64_t seed, uint64_t epoch, int64_t group, int64_t count, int32_t *index)
{
    shuffle((struct draws){.seed = seed, .epoch = epoch, .site = PS_SITE_SHUFFLE + 1 + (uint32_t)group}, count, index);
}

/* Adds an error, where there is one. */
static void add_error(double error, double sums[2], int64_t *observed)
{
    if (!isnan(error)) {
        sums[0] += error * error;
        sums[1] += fabs(error);
        ++*observed;
    }
}

/* Adds window w: repeat-last squares and absolutes, seasonal squares and absolutes. */
static void naive_window(const struct ps_window_view *v, int64_t w, int64_t season, double sums[4], int64_t observed[2])
{
    for (int64_t c = 0; c < v->channels; c++) {
        const float *x = v->inputs + w * v->input_stride[0] + c * v->input_stride[1];
        const float *y = v->targets + w * v->target_stride[0] + c * v->target_stride[1];
        int64_t l = v->seq_len - 1;
        while (l > 0 && isnan(x[l * v->input_stride[2]])) {
            l--;
        }
        double last = x[l * v->input_stride[2]]; /* NaN where nothing is observed */
        int64_t back = season;                   /* the last season of the input repeats over the horizon */
        for (int64_t t = 0; t < v->pred_len; t++) {
            double truth = y[t * v->target_stride[2]];
            add_error(truth - last, sums, &observed[0]);
            if (season > 0) {
                add_error(truth - x[(v->seq_len - back) * v->input_stride[2]], sums + 2, &observed[1]);
                back = back > 1 ? back - 1 : season;
            }
        }
    }
}

enum { PARTS = sizeof((struct ps_naive_sums *)0)->part / sizeof((struct ps_naive_sums *)0)->part[0] };

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int is_seasonal(const struct ps_naive_sums *sums, const struct ps_window_view *view)
{
    return sums->season > 0 && sums->season <= view->seq_len;
}

/* index NULL: windows begin, begin + 1, ... are first + begin, ... of the view. */
static void naive_add(struct ps_naive_sums *sums, const struct ps_window_view *view, int64_t begin, int64_t n, int64_t first,
                      const int32_t *index)
{
    int64_t season = is_seasonal(sums, view) ? sums->season : 0;
#pragma omp parallel for schedule(dynamic)
    for (int p = 0; p < PARTS; p++) {
        int64_t from = most(begin, sums->count * p / PARTS), to = least(begin + n, sums->count * (p + 1) / PARTS);
        for (int64_t w = from; w < to; w++) {
            naive_window(view, index != NULL ? index[w - begin] : first + w, season, sums->part[p], sums->observed[p]);
        }
    }
}

void ps_naive_add(struct ps_naive_sums *sums, const struct ps_window_view *view, int64_t begin, int64_t n, const int32_t *index)
{
    naive_add(sums, view, begin, n, 0, index);
}

struct ps_naive ps_naive_end(const struct ps_naive_sums *sums, const struct ps_window_view *view)
{
    double total[4] = {0}, n[2] = {0};
    int seasonal = is_seasonal(sums, view);
    for (int p = 0; p < PARTS; p++) {
        for (int i = 0; i < 4; i++) {
            total[i] += sums->part[p][i];
            n[i / 2] += i % 2 ? (double)sums->observed[p][i / 2] : 0;
        }
    }
    return (struct ps_naive){
        .repeat_mse = total[0] / n[0],
        .repeat_mae = total[1] / n[0],
        .seasonal_mse = seasonal ? total[2] / n[1] : NAN,
        .seasonal_mae = seasonal ? total[3] / n[1] : NAN,
    };
}

struct ps_naive ps_naive_score(const struct ps_window_view *view, int64_t first, int64_t count, int64_t season)
{
    struct ps_naive_sums sums = {.count = count, .season = season};
    naive_add(&sums, view, 0, count, first, NULL);
    return ps_naive_end(&sums, view);
}
