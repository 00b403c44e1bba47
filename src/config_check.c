/* What one key alone cannot tell: which values go together, and which may differ where a run is resumed. */
#include "src/config_keys.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/dates.h"

/* Where the first of the keys that is not a preset came from: the one to blame. */
static const char *blame(const struct ps_config_reader *reader, const char *origin, const char *section, const char *first,
                         const char *second)
{
    const char *where = reader->where[ps_key_index(section, first)];
    if (!*where && second) {
        where = reader->where[ps_key_index(section, second)];
    }
    return *where ? where : origin;
}

static enum ps_status check_split(const double split[3], const char *where)
{
    double sum = split[0] + split[1] + split[2];
    if (split[0] <= 1 && split[1] <= 1 && split[2] <= 1) {
        return sum <= 1 + 1e-9
                   ? PS_OK
                   : ps_config_fail(where, "data.split: the fractions %g, %g and %g sum to %g; they must sum to at most 1",
                                    split[0], split[1], split[2], sum);
    }
    for (int i = 0; i < 3; i++) {
        if (split[i] != floor(split[i]) || split[i] > INT32_MAX) {
            return ps_config_fail(
                where, "data.split: %g is not a count of rows; give three whole numbers, or three fractions that sum to at most 1",
                split[i]);
        }
    }
    return PS_OK;
}

/* Each size alone may be large; together they must not overflow where tensors are laid out. */
static enum ps_status check_parameters(const struct ps_config *c, const char *where)
{
    const double quantiles = c->train.quantiles.n ? (double)c->train.quantiles.n : 1;
    double d = (double)c->model.d_model, patches = (double)((c->model.seq_len - c->model.patch_len) / c->model.stride + 2);
    double count = d * (double)c->model.patch_len + patches * d * (1 + quantiles * (double)c->model.pred_len) +
                   (double)c->model.n_layers * d * (4 * d + 2 * (double)c->model.d_ff);
    return count <= 0x1p40 ? PS_OK : ps_config_fail(where, "model: has %.2g parameters; at most %.2g can be served", count, 0x1p40);
}

/* What the model says of train.objective: masked, at the key that it names, or where the objective is said when that is a preset.
 */
static enum ps_status check_masking(const struct ps_config_reader *reader, const char *origin)
{
    const struct ps_model_shape shape = ps_config_shape(reader->config, 1);
    if (shape.mask_ratio == 0 || ps_model_shape_check(&shape) == PS_OK) {
        return PS_OK;
    }
    char message[512], key[32];
    snprintf(message, sizeof message, "%s", ps_error_message());
    const int named = sscanf(message, "model.%31[a-z_]", key) == 1 && ps_key_index("model", key) >= 0;
    const char *where = named ? reader->where[ps_key_index("model", key)] : "";
    return ps_config_fail(*where ? where : blame(reader, origin, "train", "objective", NULL), "%s (train.objective: masked)",
                          message);
}

static enum ps_status check_freezing(const struct ps_config_reader *reader, const char *origin)
{
    const struct ps_config *c = reader->config;
    if (c->train.freeze == PS_FREEZE_NONE && c->train.freeze_epochs > 0) {
        return ps_config_fail(blame(reader, origin, "train", "freeze_epochs", NULL),
                              "train.freeze_epochs: %" PRId64
                              " says how long train.freeze lasts, which is none: set freeze: encoder",
                              c->train.freeze_epochs);
    }
    if (c->train.freeze == PS_FREEZE_ENCODER && c->train.objective == PS_OBJECTIVE_MASKED) {
        return ps_config_fail(blame(reader, origin, "train", "freeze", "objective"),
                              "train.freeze: encoder freezes what train.objective: masked is there to train: set freeze: none");
    }
    return PS_OK;
}

static enum ps_status check_quantiles(const struct ps_config_reader *reader, const char *origin)
{
    const struct ps_reals *q = &reader->config->train.quantiles;
    const char *where = blame(reader, origin, "train", "quantiles", "loss");
    if (q->n > 0 && reader->config->train.loss != PS_LOSS_QUANTILE) {
        return ps_config_fail(where, "train.quantiles: are what train.loss: quantile trains; set it, or leave them out");
    }
    if (q->n > 0 && reader->config->train.objective == PS_OBJECTIVE_MASKED) {
        return ps_config_fail(
            blame(reader, origin, "train", "loss", "objective"),
            "train.loss: quantile forecasts, and train.objective: masked fills in patches; take mse, mae or huber");
    }
    for (int64_t i = 1; i < q->n; i++) {
        if (q->value[i] <= q->value[i - 1]) {
            return ps_config_fail(where, "train.quantiles: %g stands behind %g; they must rise, as [0.1, 0.5, 0.9]", q->value[i],
                                  q->value[i - 1]);
        }
    }
    return PS_OK;
}

int ps_config_is_device(const char *device)
{
    if (strncmp(device, "cuda:", 5) == 0) {
        size_t digits = strspn(device + 5, "0123456789");
        return digits >= 1 && digits <= 4 && !device[5 + digits];
    }
    return strcmp(device, "auto") == 0 || strcmp(device, "cpu") == 0 || strcmp(device, "cuda") == 0;
}

enum ps_status ps_config_check(const struct ps_config_reader *reader, const char *origin)
{
    const struct ps_config *c = reader->config;
    if (!*c->data.path && !reader->without_data) {
        return ps_config_fail(blame(reader, origin, "data", "path", NULL),
                              "data.path: missing; name the HDF5 file, as \"path: series.h5\"");
    }
    const char *where = blame(reader, origin, "data", "split", NULL);
    if (!c->data.split_dated) {
        PS_TRY(check_split(c->data.split, where));
    } else if (c->data.split_from[0] >= c->data.split_from[1]) {
        return ps_config_fail(where, "data.split: validation begins at %s and test at %s; test must begin later",
                              ps_date_text(c->data.split_from[0]).text, ps_date_text(c->data.split_from[1]).text);
    }
    if (c->model.d_model % c->model.n_heads != 0) {
        return ps_config_fail(blame(reader, origin, "model", "n_heads", "d_model"),
                              "model.n_heads: d_model %" PRId64 " is not divisible by %" PRId64 " heads; change one of them",
                              c->model.d_model, c->model.n_heads);
    }
    if (c->model.patch_len > c->model.seq_len) {
        return ps_config_fail(blame(reader, origin, "model", "patch_len", "seq_len"),
                              "model.patch_len: %" PRId64 " is longer than the window; it must be at most seq_len, %" PRId64,
                              c->model.patch_len, c->model.seq_len);
    }
    if (c->model.positions == PS_POSITIONS_ROPE && c->model.d_model / c->model.n_heads % 2 != 0) {
        return ps_config_fail(blame(reader, origin, "model", "positions", "n_heads"),
                              "model.positions: rope turns pairs of columns, and heads of %" PRId64
                              " columns are odd; change n_heads",
                              c->model.d_model / c->model.n_heads);
    }
    if (!c->model.revin && (c->model.revin_affine || c->model.revin_subtract_last)) {
        const char *key = c->model.revin_affine ? "revin_affine" : "revin_subtract_last";
        return ps_config_fail(blame(reader, origin, "model", key, "revin"),
                              "model.%s: is a part of RevIN, and model.revin is false", key);
    }
    if (c->model.batchnorm == PS_BATCHNORM_LOCAL && c->model.norm != PS_NORM_BATCH) {
        return ps_config_fail(blame(reader, origin, "model", "batchnorm", "norm"),
                              "model.batchnorm: local is of model.norm: batch, which it is not; leave it out");
    }
    if (c->train.accumulate > INT32_MAX / c->train.batch_size) {
        return ps_config_fail(blame(reader, origin, "train", "accumulate", "batch_size"),
                              "train.accumulate: %" PRId64 " batches of %" PRId64 " are more than 2147483647 windows; lower one",
                              c->train.accumulate, c->train.batch_size);
    }
    PS_TRY(check_parameters(c, blame(reader, origin, "model", "d_model", "seq_len")));
    PS_TRY(check_quantiles(reader, origin));
    PS_TRY(check_masking(reader, origin));
    PS_TRY(check_freezing(reader, origin));
    if (c->optim.min_lr > c->optim.lr) {
        return ps_config_fail(blame(reader, origin, "optim", "min_lr", "lr"), "optim.min_lr: %g is above lr; it must be at most %g",
                              c->optim.min_lr, c->optim.lr);
    }
    const char *device = c->runtime.device, *backend = c->runtime.backend, *precision = ps_precision_name(c->runtime.precision);
    if (!ps_config_is_device(device)) {
        return ps_config_fail(blame(reader, origin, "runtime", "device", NULL),
                              "runtime.device: \"%.60s\" is not one of auto, cpu, cuda, cuda:N", device);
    }
    int on_gpu = strncmp(device, "cuda", 4) == 0;
    if ((strcmp(backend, "cuda") == 0 && strcmp(device, "cpu") == 0) ||
        ((strcmp(backend, "cpu") == 0 || strcmp(backend, "reference") == 0) && on_gpu)) {
        return ps_config_fail(blame(reader, origin, "runtime", "backend", "device"),
                              "runtime.backend: %s does not run on device %s; use backend auto, or device %s", backend, device,
                              on_gpu ? "cpu" : "cuda");
    }
    int reference = strcmp(backend, "reference") == 0;
    if (c->runtime.precision == PS_FP64 && !reference) {
        return ps_config_fail(blame(reader, origin, "runtime", "precision", "backend"),
                              "runtime.precision: fp64 needs backend reference, not %s; set precision: fp32", backend);
    }
    if (reference && c->runtime.precision != PS_FP64 && c->runtime.precision != PS_FP32) {
        return ps_config_fail(blame(reader, origin, "runtime", "precision", "backend"),
                              "runtime.precision: backend reference computes in fp32 or fp64, not %s", precision);
    }
    if (c->runtime.fusion == PS_FUSION_NONE && c->runtime.precision != PS_FP64 && c->runtime.precision != PS_FP32) {
        return ps_config_fail(blame(reader, origin, "runtime", "fusion", "precision"),
                              "runtime.fusion: none computes in fp32 or fp64, not %s; set fusion: gemm, or precision: fp32",
                              precision);
    }
    if (c->runtime.fusion == PS_FUSION_NONE && c->train.on_nonfinite == PS_NONFINITE_SKIP && c->model.norm == PS_NORM_BATCH) {
        return ps_config_fail(blame(reader, origin, "train", "on_nonfinite", "fusion"),
                              "train.on_nonfinite: skip leaves out a step, and runtime.fusion: none would keep its numbers in the "
                              "running statistics of model.norm: batch; set fusion: auto, or on_nonfinite: stop");
    }
    return PS_OK;
}

void ps_config_differences(const struct ps_config *then, const struct ps_config *now, char *text, size_t room)
{
    *text = 0;
    for (int i = 0; i < PS_KEYS; i++) {
        const struct ps_key *key = &ps_keys[i];
        if (strcmp(key->section, "model") != 0 || strncmp(key->name, "dropout", 7) == 0 || strcmp(key->name, "pred_len") == 0 ||
            strcmp(key->name, "mask_ratio") == 0 || strcmp(key->name, "batchnorm") == 0) {
            continue;
        }
        char *was = ps_config_value_text(then, key), *is = ps_config_value_text(now, key);
        size_t used = strlen(text);
        if (was && is && strcmp(was, is) != 0) {
            snprintf(text + used, room - used, "%s%s %s and %s", used ? ", " : "", key->name, was, is);
        }
        free(was);
        free(is);
    }
}

enum ps_status ps_config_compatible(const struct ps_config *saved, const struct ps_config *now)
{
    enum ps_status status = PS_OK;
    for (int i = 0; i < PS_KEYS && status == PS_OK; i++) {
        const struct ps_key *key = &ps_keys[i];
        if (key->free_on_resume) {
            continue;
        }
        char *then = ps_config_value_text(saved, key), *text = ps_config_value_text(now, key);
        if (!then || !text) {
            status = ps_fail(PS_CHECKPOINT, "%s.%s: no memory to compare", key->section, key->name);
        } else if (strcmp(key->name, "device") == 0) {
            if (strcspn(then, ":") != strcspn(text, ":") || strncmp(then, text, strcspn(then, ":")) != 0) {
                status = ps_fail(PS_CHECKPOINT,
                                 "runtime.device: the checkpoint was made with %.60s, this run has %.60s; resume with "
                                 "the same",
                                 then, text);
            }
        } else if (strcmp(key->name, "epochs") == 0 && now->train.epochs > saved->train.epochs &&
                   (saved->optim.schedule == PS_SCHEDULE_CONSTANT || saved->optim.schedule == PS_SCHEDULE_TYPE3)) {
            /* A longer run whose learning rates so far are the same. */
        } else if (strcmp(key->name, "epochs") == 0 && strcmp(then, text) != 0 &&
                   (saved->optim.schedule == PS_SCHEDULE_COSINE || saved->optim.schedule == PS_SCHEDULE_ONECYCLE)) {
            char *schedule = ps_config_value_text(saved, &ps_keys[ps_key_index("optim", "schedule")]);
            status = ps_fail(PS_CHECKPOINT,
                             "train.epochs: the checkpoint was made with %.60s, this run has %.60s, and optim.schedule %s spans "
                             "the whole run, so that every step's learning rate depends on its length; resume with the same, or "
                             "begin a new run, which --init-from gives these weights",
                             then, text, schedule ? schedule : "");
            free(schedule);
        } else if (strcmp(then, text) != 0) {
            status = ps_fail(PS_CHECKPOINT,
                             "%s.%s: the checkpoint was made with %.60s, this run has %.60s; resume with the same, or "
                             "begin a new run",
                             key->section, key->name, then, text);
        }
        free(then);
        free(text);
    }
    return status;
}
