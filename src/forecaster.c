#include "src/forecaster.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/engine.h"

struct ps_forecaster {
    struct ps_device *device;
    struct ps_kernels *kernels;
    struct ps_model *model;
    struct ps_scaler scaler;
    int64_t channels, seq_len, pred_len;    /* C, L, H */
    int64_t width;                          /* Q H */
    int64_t batch;                          /* windows of a pass */
    int whole_batches;                      /* every pass has `batch` of them */
    int masked;                             /* inputs may have holes */
    float *host;                            /* [batch, C, L] */
    void *inputs, *outputs, *index, *state; /* device: [batch, C, L], [batch, C, Q H], int32 [batch], a step state of zeros */
};

static size_t window_bytes(const struct ps_forecaster *f, int64_t length)
{
    return (size_t)(f->batch * f->channels * length) * sizeof(float);
}

static enum ps_status open_buffers(struct ps_forecaster *f, const struct ps_checkpoint *checkpoint)
{
    struct ps_device *d = f->device;
    const size_t index_bytes = (size_t)f->batch * sizeof(int32_t);
    PS_TRY(ps_scaler_copy(&checkpoint->scaler, &f->scaler));
    f->host = malloc(window_bytes(f, f->seq_len));
    int32_t *index = malloc(index_bytes);
    if (!f->host || !index) {
        free(index);
        return ps_fail(PS_DEVICE, "no memory for %" PRId64 " windows", f->batch);
    }
    ps_sequence(0, f->batch, index);
    const struct ps_step_state start = {0};
    enum ps_status status = d->allocate(d, window_bytes(f, f->seq_len), &f->inputs);
    status = status == PS_OK ? d->allocate(d, window_bytes(f, f->width), &f->outputs) : status;
    status = status == PS_OK ? d->allocate(d, index_bytes, &f->index) : status;
    status = status == PS_OK ? d->allocate(d, sizeof start, &f->state) : status;
    status = status == PS_OK ? d->upload(d, PS_COMPUTE, f->index, index, index_bytes) : status;
    status = status == PS_OK ? d->upload(d, PS_COMPUTE, f->state, &start, sizeof start) : status;
    status = status == PS_OK ? ps_engine_load_weights(d, f->model, checkpoint, NULL) : status;
    free(index);
    return status;
}

enum ps_status ps_forecaster_open(const struct ps_checkpoint *checkpoint, const struct ps_config *config, const char *device,
                                  int64_t at_once, int masked, struct ps_forecaster **forecaster)
{
    struct ps_forecaster *f = calloc(1, sizeof *f);
    if (!f) {
        return ps_fail(PS_DEVICE, "no memory for the forecaster");
    }
    char tuning[PS_DIGEST_HEX];
    enum ps_level level;
    struct ps_config sized = *config; /* shares its texts */
    f->masked = masked;
    f->channels = checkpoint->scaler.channels;
    f->seq_len = config->model.seq_len;
    f->pred_len = config->model.pred_len;
    enum ps_status status = ps_engine_open_device(config, device, NULL, &f->device, &f->kernels, tuning);
    if (status == PS_OK) {
        f->whole_batches = strcmp(f->device->kind, "cpu") != 0;
        f->batch = f->whole_batches || at_once > config->train.batch_size ? config->train.batch_size : at_once;
        sized.train.batch_size = f->batch;
        status = ps_engine_open_model(&sized, f->kernels, f->channels, masked, NULL, &f->model, &level);
    }
    if (status == PS_OK) {
        f->width = ps_head_width(&f->model->shape);
        status = open_buffers(f, checkpoint);
    }
    if (status != PS_OK) {
        ps_forecaster_close(f);
        return status;
    }
    *forecaster = f;
    return PS_OK;
}

static void release(struct ps_forecaster *f, void *memory, size_t bytes)
{
    if (memory) {
        f->device->release(f->device, memory, bytes);
    }
}

void ps_forecaster_close(struct ps_forecaster *f)
{
    if (!f) {
        return;
    }
    if (f->device) {
        f->device->synchronize(f->device); /* an error of it has been or will be reported by others */
        release(f, f->inputs, window_bytes(f, f->seq_len));
        release(f, f->outputs, window_bytes(f, f->width));
        release(f, f->index, (size_t)f->batch * sizeof(int32_t));
        release(f, f->state, sizeof(struct ps_step_state));
        ps_model_close(f->model);
        if (f->kernels) {
            f->kernels->close(f->kernels);
        }
        f->device->close(f->device);
    }
    ps_scaler_free(&f->scaler);
    free(f->host);
    free(f);
}

/* Windows first .. first + n of inputs, standardised, to the device; what is left of the batch repeats the last of them. */
static enum ps_status upload_windows(struct ps_forecaster *f, const float *inputs, int64_t first, int64_t n, int64_t batch)
{
    const int64_t C = f->channels, L = f->seq_len, window = C * L;
    for (int64_t w = 0; w < batch; w++) {
        memcpy(f->host + w * window, inputs + (first + (w < n ? w : n - 1)) * window, (size_t)window * sizeof *f->host);
    }
    ps_scaler_scale(&f->scaler, f->host, batch, L);
    for (int64_t i = 0; i < n * window; i++) {
        if (!isfinite(f->host[i]) && !(f->masked && isnan(f->host[i]))) {
            return ps_fail(PS_DATA,
                           "input of window %" PRId64 ", channel %" PRId64 ", step %" PRId64
                           " (counted from 0) is %g: every value must be finite in float32, scaled too%s",
                           first + i / window, i / L % C, i % L, (double)inputs[first * window + i],
                           isnan(f->host[i]) ? "; a model trained with data.missing: mask takes NaN" : "");
        }
    }
    return f->device->upload(f->device, PS_COMPUTE, f->inputs, f->host, (size_t)(batch * window) * sizeof *f->host);
}

const struct ps_loss *ps_forecaster_loss(const struct ps_forecaster *f)
{
    return &f->model->options.loss;
}

void ps_forecaster_warn(const struct ps_loss *loss, int64_t steps, int64_t pred_len)
{
    if (loss->quantiles > 1 && steps > pred_len) {
        fprintf(stderr,
                "forecast: warning: quantiles of steps beyond %" PRId64
                " take the forecasts fed back for what came: they lie too close together\n",
                pred_len);
    }
}

enum ps_status ps_forecaster_run(struct ps_forecaster *f, const float *inputs, int64_t n, float *quantiles)
{
    const int64_t C = f->channels, L = f->seq_len, H = f->pred_len, W = f->width;
    struct ps_device *d = f->device;
    const enum ps_type type = f->kernels->parameter;
    const struct ps_windows windows = {.inputs = ps_tensor_3d(f->inputs, type, f->batch, C, L),
                                       .targets = ps_tensor_3d(NULL, type, 0, C, H),
                                       .indices = ps_tensor_1d(f->index, PS_I32, f->batch)};
    for (int64_t first = 0; first < n; first += f->batch) {
        const int64_t count = n - first < f->batch ? n - first : f->batch, batch = f->whole_batches ? f->batch : count;
        PS_TRY(upload_windows(f, inputs, first, count, batch));
        PS_TRY(ps_model_forward(f->model, &windows, f->state, batch, 0));
        PS_TRY(ps_model_forecast(f->model, batch, ps_tensor_2d(f->outputs, type, batch * C, W)));
        PS_TRY(d->download(d, PS_COMPUTE, quantiles + first * C * W, f->outputs, (size_t)(count * C * W) * sizeof *quantiles));
        for (int64_t w = first; w < first + count; w++) {
            ps_scaler_restore(&f->scaler, w, W, quantiles + w * C * W);
        }
    }
    return PS_OK;
}

/* The inputs' last rows become the forecasts', whose first `rows` they take in. inputs [lines, L], forecasts [lines, H]. */
static void feed_back(float *inputs, int64_t lines, int64_t L, const float *forecasts, int64_t H)
{
    const int64_t kept = L > H ? L - H : 0, taken = L - kept;
    for (int64_t i = 0; i < lines; i++) {
        memmove(inputs + i * L, inputs + i * L + (L - kept), (size_t)kept * sizeof *inputs);
        memcpy(inputs + i * L + kept, forecasts + i * H + (H - taken), (size_t)taken * sizeof *inputs);
    }
}

enum ps_status ps_forecaster_extend(struct ps_forecaster *f, float *inputs, int64_t n, int64_t steps, float *forecasts,
                                    float *quantiles)
{
    const int64_t C = f->channels, L = f->seq_len, H = f->pred_len, Q = f->width / H;
    float *all = malloc((size_t)(n * C * (f->width + H)) * sizeof *all), *part = all + n * C * f->width;
    if (!all) {
        return ps_fail(PS_DATA, "no memory for %" PRId64 " forecasts", n);
    }
    enum ps_status status = PS_OK;
    for (int64_t done = 0; done < steps && status == PS_OK; done += H) {
        if (done > 0) {
            feed_back(inputs, n * C, L, part, H);
        }
        status = ps_forecaster_run(f, inputs, n, all);
        if (status == PS_OK) {
            ps_model_points(ps_forecaster_loss(f), n * C, H, all, part);
        }
        for (int64_t i = 0; i < n * C && status == PS_OK; i++) {
            for (int64_t t = 0; t < H && done + t < steps; t++) {
                const int64_t at = (i / C * steps + done + t) * C + i % C;
                forecasts[at] = part[i * H + t];
                for (int64_t q = 0; quantiles && q < Q; q++) {
                    quantiles[at * Q + q] = all[(i * Q + q) * H + t];
                }
            }
        }
    }
    free(all);
    return status;
}
