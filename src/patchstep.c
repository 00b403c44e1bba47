/* include/patchstep.h over src/forecaster.h: what a library owes to a process that is not its own. */
#include "include/patchstep.h"

#include <cblas.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/engine.h"
#include "src/forecaster.h"
#include "src/kept.h"
#include "src/version.h"

/* Windows of a pass on the CPU: in one thread more of them at once are no faster, and take more memory. */
enum { AT_ONCE = 1 };

struct patchstep_model {
    struct ps_forecaster *forecaster;
    int64_t channels, seq_len, pred_len;
    char *names; /* each with a zero byte behind it; NULL: none */
    char note[PS_ENGINE_NOTE];
};

/* HDF5 need not be thread-safe, and what OpenBLAS is told of threads is the process's. */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* ---- what a call ends with ---- */

/* ps_error_message will not do: a way that is refused inside a call, which takes another and succeeds, leaves its message there. */
static _Thread_local char last_failure[1024];

/* What ps_fail recorded last is what status is of. Arguments are named as the header names them, not as options of a program. */
static enum patchstep_status ended(enum ps_status status)
{
    if (status != PS_OK) {
        const char *message = ps_error_message();
        snprintf(last_failure, sizeof last_failure, "%s", strncmp(message, "--", 2) == 0 ? message + 2 : message);
    }
    return (enum patchstep_status)status;
}

/* ---- what belongs to the caller ---- */

/* OpenMP's settings are the thread's. */
struct callers {
    int threads, dynamic;
};

static struct callers compute_alone(void)
{
    const struct callers before = {omp_get_max_threads(), omp_get_dynamic()};
    omp_set_num_threads(1);
    return before;
}

static void give_back(struct callers before)
{
    omp_set_num_threads(before.threads);
    omp_set_dynamic(before.dynamic);
}

/* ---- opening ---- */

static enum ps_status open_checkpoint(const char *path, const char *device, const char *precision, struct ps_checkpoint *checkpoint,
                                      struct ps_config *config, struct patchstep_model *model)
{
    char found[PS_KEPT_PATH];
    PS_TRY(ps_kept_named(&path, found));
    PS_TRY(ps_checkpoint_load(path, checkpoint));
    PS_TRY(ps_config_parse_saved(checkpoint->config, path, config));
    PS_TRY(ps_engine_check_head(config, path));
    PS_TRY(ps_engine_adapt(config, device, precision, model->note));
    config->runtime.threads = 1;
    if (checkpoint->by_series && !config->model.revin) { /* what scales a window then is not in it */
        return ps_fail(PS_CHECKPOINT,
                       "%s: was trained on a panel without model.revin, each series scaled by its own training rows: "
                       "the program forecast scales them so",
                       path);
    }
    PS_TRY(ps_forecaster_open(checkpoint, config, device, AT_ONCE, config->data.missing == PS_MISSING_MASK, &model->forecaster));
    model->channels = checkpoint->scaler.channels;
    model->seq_len = config->model.seq_len;
    model->pred_len = config->model.pred_len;
    model->names = checkpoint->names;
    checkpoint->names = NULL;
    return PS_OK;
}

enum patchstep_status patchstep_open(const char *path, const char *device, const char *precision, struct patchstep_model **opened)
{
    if (!opened) {
        return ended(ps_fail(PS_USAGE, "patchstep_open: model is NULL"));
    }
    *opened = NULL;
    if (!path) {
        return ended(ps_fail(PS_USAGE, "patchstep_open: checkpoint is NULL"));
    }
    struct patchstep_model *model = calloc(1, sizeof *model);
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0); /* the config's numbers have points */
    if (!model || !plain) {
        free(model);
        return ended(ps_fail(PS_DEVICE, "%s: no memory for the model", path));
    }
    struct ps_checkpoint checkpoint = {0};
    struct ps_config config = {0};
    const locale_t callers_locale = uselocale(plain);
    pthread_mutex_lock(&opening);
    const int blas = openblas_get_num_threads();
    const struct callers before = compute_alone();
    const enum patchstep_status status = ended(open_checkpoint(path, device, precision, &checkpoint, &config, model));
    ps_config_free(&config);
    ps_checkpoint_free(&checkpoint);
    openblas_set_num_threads(blas);
    give_back(before); /* after OpenBLAS, which sets OpenMP's too */
    pthread_mutex_unlock(&opening);
    uselocale(callers_locale);
    freelocale(plain);
    if (status == PATCHSTEP_OK) {
        *opened = model;
    } else {
        patchstep_close(model);
    }
    return status;
}

void patchstep_close(struct patchstep_model *model)
{
    if (model) {
        ps_forecaster_close(model->forecaster);
        free(model->names);
        free(model);
    }
}

/* ---- an open model ---- */

const char *patchstep_version(void)
{
    return ps_version;
}

const char *patchstep_error(void)
{
    return last_failure;
}

int64_t patchstep_channels(const struct patchstep_model *model)
{
    return model->channels;
}

int64_t patchstep_seq_len(const struct patchstep_model *model)
{
    return model->seq_len;
}

int64_t patchstep_pred_len(const struct patchstep_model *model)
{
    return model->pred_len;
}

const char *patchstep_channel_name(const struct patchstep_model *model, int64_t c)
{
    if (!model->names || c < 0 || c >= model->channels) {
        return NULL;
    }
    const char *name = model->names;
    for (; c > 0; c--) {
        name += strlen(name) + 1;
    }
    return name;
}

const char *patchstep_note(const struct patchstep_model *model)
{
    return model->note;
}

int64_t patchstep_quantiles(const struct patchstep_model *model)
{
    const struct ps_loss *loss = ps_forecaster_loss(model->forecaster);
    return loss->kind == PS_LOSS_QUANTILE ? loss->quantiles : 0;
}

double patchstep_quantile(const struct patchstep_model *model, int64_t q)
{
    return q >= 0 && q < patchstep_quantiles(model) ? ps_forecaster_loss(model->forecaster)->quantile[q] : NAN;
}

static enum ps_status check_arguments(const char *call, const struct patchstep_model *model, const float *inputs, int64_t n,
                                      const float *outputs)
{
    const char *wrong = !model                           ? "model is NULL"
                        : n < 0                          ? "n is less than 0"
                        : n > 0 && (!inputs || !outputs) ? "inputs or forecasts is NULL"
                                                         : NULL;
    return wrong ? ps_fail(PS_USAGE, "%s: %s", call, wrong) : PS_OK;
}

static enum ps_status run_points(struct patchstep_model *model, const float *inputs, int64_t n, float *forecasts)
{
    const int64_t rows = n * model->channels, H = model->pred_len, Q = patchstep_quantiles(model);
    if (Q == 0) {
        return ps_forecaster_run(model->forecaster, inputs, n, forecasts);
    }
    float *quantiles = malloc((size_t)(rows * Q * H) * sizeof *quantiles);
    enum ps_status status = quantiles || rows == 0 ? ps_forecaster_run(model->forecaster, inputs, n, quantiles)
                                                   : ps_fail(PS_DEVICE, "patchstep_forecast: no memory for %" PRId64 " windows", n);
    if (status == PS_OK) {
        ps_model_points(ps_forecaster_loss(model->forecaster), rows, H, quantiles, forecasts);
    }
    free(quantiles);
    return status;
}

enum patchstep_status patchstep_forecast(struct patchstep_model *model, const float *inputs, int64_t n, float *forecasts)
{
    enum ps_status status = check_arguments("patchstep_forecast", model, inputs, n, forecasts);
    if (status == PS_OK) {
        const struct callers before = compute_alone();
        status = run_points(model, inputs, n, forecasts);
        give_back(before);
    }
    return ended(status);
}

enum patchstep_status patchstep_forecast_quantiles(struct patchstep_model *model, const float *inputs, int64_t n, float *quantiles)
{
    enum ps_status status = check_arguments("patchstep_forecast_quantiles", model, inputs, n, quantiles);
    if (status == PS_OK && patchstep_quantiles(model) == 0) {
        status = ps_fail(PS_USAGE, "patchstep_forecast_quantiles: the model was not trained with train.loss: quantile");
    }
    if (status == PS_OK) {
        const struct callers before = compute_alone();
        status = ps_forecaster_run(model->forecaster, inputs, n, quantiles);
        give_back(before);
    }
    return ended(status);
}
