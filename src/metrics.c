#include "src/metrics.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/files.h"

/* JSON has no infinity and no NaN. */
json_t *ps_json_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *whole(uint64_t value)
{
    return json_integer((json_int_t)value);
}

enum ps_status ps_metrics_append(const char *path, const struct ps_epoch_record *record)
{
    json_t *object =
        json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "epoch", whole(record->epoch), "step", whole(record->step),
                  "train_loss", ps_json_number(record->train_loss), "val_mse", ps_json_number(record->val_mse), "val_mae",
                  ps_json_number(record->val_mae), "lr", ps_json_number(record->lr), "seconds", ps_json_number(record->seconds),
                  "windows_per_second", ps_json_number(record->windows_per_second), "skipped", whole(record->skipped));
    if (object && record->loss != PS_LOSS_MSE && json_object_set_new(object, "val_loss", ps_json_number(record->val_loss)) != 0) {
        json_decref(object);
        object = NULL;
    }
    /* 17 digits read back as the same double. */
    char *text = object ? json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL, *line = NULL;
    json_decref(object);
    int size = text ? asprintf(&line, "%s\n", text) : -1;
    free(text);
    if (size < 0) {
        return ps_fail(PS_USAGE, "%s: no memory for a line", path);
    }
    enum ps_status status = ps_file_append(PS_USAGE, path, line, (size_t)size);
    free(line);
    return status;
}

enum ps_status ps_metrics_truncate(const char *path, uint64_t epochs)
{
    if (access(path, F_OK) != 0 && errno == ENOENT) {
        return PS_OK;
    }
    char *text, *kept;
    size_t size, used = 0;
    PS_TRY(ps_file_read(PS_USAGE, path, 0, &text, &size));
    kept = malloc(size + 1);
    enum ps_status status = kept ? PS_OK : ps_fail(PS_USAGE, "%s: no memory for %zu bytes", path, size);
    int line = 0;
    for (char *begin = text, *end; status == PS_OK && (end = memchr(begin, '\n', (size_t)(text + size - begin))); begin = end + 1) {
        line++;
        json_t *object = json_loadb(begin, (size_t)(end - begin), JSON_REJECT_DUPLICATES, NULL);
        const json_t *epoch = json_object_get(object, "epoch");
        if (!json_is_integer(epoch)) {
            status = ps_fail(PS_USAGE, "%s:%d: not a line of metrics: an object with a whole number \"epoch\"; move the file away",
                             path, line);
        } else if (json_integer_value(epoch) <= (json_int_t)epochs) {
            memcpy(kept + used, begin, (size_t)(end + 1 - begin));
            used += (size_t)(end + 1 - begin);
        }
        json_decref(object);
    }
    if (status == PS_OK && used != size) {
        status = ps_file_replace(PS_USAGE, path, kept, used);
    }
    free(kept);
    free(text);
    return status;
}

/* Of a number, or null. */
static double real_of(const json_t *value)
{
    return json_is_number(value) ? json_number_value(value) : NAN;
}

enum ps_status ps_metrics_validation(const char *path, uint64_t epoch, struct ps_score *validation)
{
    *validation = (struct ps_score){.mse = NAN, .mae = NAN, .loss = NAN};
    if (access(path, F_OK) != 0 && errno == ENOENT) {
        return PS_OK;
    }
    char *text;
    size_t size;
    PS_TRY(ps_file_read(PS_USAGE, path, 0, &text, &size));
    for (char *begin = text, *end; (end = memchr(begin, '\n', (size_t)(text + size - begin))); begin = end + 1) {
        json_t *object = json_loadb(begin, (size_t)(end - begin), JSON_REJECT_DUPLICATES, NULL);
        const json_t *number = json_object_get(object, "epoch");
        if (json_is_integer(number) && json_integer_value(number) == (json_int_t)epoch) {
            validation->mse = real_of(json_object_get(object, "val_mse"));
            validation->mae = real_of(json_object_get(object, "val_mae"));
            validation->loss = real_of(json_object_get(object, "val_loss"));
        }
        json_decref(object);
    }
    free(text);
    return PS_OK;
}

static json_t *score(const struct ps_score *score)
{
    if (score->windows == 0) {
        return json_null();
    }
    return json_pack("{s:o, s:o, s:I}", "mse", ps_json_number(score->mse), "mae", ps_json_number(score->mae), "windows",
                     (json_int_t)score->windows);
}

void ps_loss_text(const struct ps_loss *loss, const struct ps_score *score, char text[PS_LOSS_TEXT])
{
    *text = 0;
    if (loss->kind == PS_LOSS_HUBER) {
        snprintf(text, PS_LOSS_TEXT, "huber loss %.4f", score->loss);
    } else if (loss->kind == PS_LOSS_QUANTILE) {
        int used = snprintf(text, PS_LOSS_TEXT, "pinball loss %.4f", score->loss);
        if (loss->quantiles > 1) {
            snprintf(text + used, (size_t)(PS_LOSS_TEXT - used), ", %.4f within quantiles %g to %g", score->coverage,
                     loss->quantile[0], loss->quantile[loss->quantiles - 1]);
        }
    }
}

static json_t *loss_object(const struct ps_loss *loss, const struct ps_score *score)
{
    static const char *const kinds[] = {"mse", "mae", "huber", "quantile"};
    const int known = score->windows > 0;
    json_t *object = json_pack("{s:s, s:o}", "kind", kinds[loss->kind], "value", ps_json_number(known ? score->loss : NAN));
    if (object && loss->kind == PS_LOSS_HUBER) {
        json_object_set_new(object, "delta", json_real(loss->delta));
    }
    if (object && loss->kind == PS_LOSS_QUANTILE) {
        json_t *quantiles = json_array();
        for (int q = 0; q < loss->quantiles; q++) {
            json_array_append_new(quantiles, json_real(loss->quantile[q]));
        }
        json_object_set_new(object, "quantiles", quantiles);
        json_object_set_new(object, "coverage", ps_json_number(known && loss->quantiles > 1 ? score->coverage : NAN));
    }
    return object;
}

json_t *ps_test_object(const struct ps_test_record *record)
{
    json_t *object = score(&record->all);
    if (!json_is_object(object)) { /* no window: the same keys, with nothing in them */
        json_decref(object);
        object = json_pack("{s:n, s:n, s:i}", "mse", "mae", "windows", 0);
    }
    int failed = json_object_set_new(object, "full_batches", score(&record->full_batches)) |
                 json_object_set_new(object, "repeat_last", score(&record->repeat_last)) |
                 json_object_set_new(object, "seasonal_naive", score(&record->seasonal_naive)) |
                 json_object_set_new(object, "epoch", whole(record->epoch)) |
                 json_object_set_new(object, "step", whole(record->step));
    if (record->loss.kind != PS_LOSS_MSE) {
        failed |= json_object_set_new(object, "loss", loss_object(&record->loss, &record->all));
    }
    if (failed) {
        json_decref(object);
        return NULL;
    }
    return object;
}

char *ps_json_text(json_t *object)
{
    char *text = object ? json_dumps(object, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(object);
    return text;
}

enum ps_status ps_test_write(const char *path, const struct ps_test_record *record)
{
    json_t *object = ps_test_object(record);
    int failed = object ? json_object_set_new(object, "val_mse", ps_json_number(record->val_mse)) |
                              json_object_set_new(object, "val_mae", ps_json_number(record->val_mae))
                        : 1;
    if (!failed && record->loss.kind != PS_LOSS_MSE) {
        failed = json_object_set_new(object, "val_loss", ps_json_number(record->val_loss));
    }
    if (failed) {
        json_decref(object);
        object = NULL;
    }
    char *text = ps_json_text(object), *line = NULL;
    if (!text || asprintf(&line, "%s\n", text) < 0) {
        free(text);
        return ps_fail(PS_USAGE, "%s: no memory for the scores", path);
    }
    enum ps_status status = ps_file_replace(PS_USAGE, path, line, strlen(line));
    free(text);
    free(line);
    return status;
}
