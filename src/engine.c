#include "src/engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/files.h"

enum { LONGEST_TUNING = 1 << 20 };

enum ps_status ps_engine_open_device(const struct ps_config *c, const char *device, const struct ps_ranks *ranks,
                                     struct ps_device **opened, struct ps_kernels **kernels, char digest[PS_DIGEST_HEX])
{
    if (!device) {
        device = c->runtime.device;
    }
    if (!ps_config_is_device(device)) {
        return ps_fail(PS_USAGE, "--device: \"%.60s\" is not one of auto, cpu, cuda, cuda:N", device);
    }
    const char *backend = c->runtime.backend;
    int cpu_backend = strcmp(backend, "cpu") == 0 || strcmp(backend, "reference") == 0;
    if (strcmp(device, "auto") == 0) {
        device = !cpu_backend && ps_cuda_device_count() > 0 ? "cuda" : "cpu";
    }
    char own[32];
    if (ranks && strcmp(device, "cuda") == 0 && ps_cuda_device_count() > 0) {
        snprintf(own, sizeof own, "cuda:%d", ps_ranks_local(ranks) % ps_cuda_device_count());
        device = own;
    }
    PS_TRY(ps_device_open(device, c->runtime.threads ? (int)c->runtime.threads : ps_ranks_threads(ranks), opened));
    if (strcmp(backend, "auto") == 0) {
        backend = (*opened)->kind;
    } else if (cpu_backend != (strcmp((*opened)->kind, "cpu") == 0)) {
        return ps_fail(PS_USAGE, "runtime.backend: %s does not run on device %s: take auto", backend, device);
    }
    if (c->runtime.precision == PS_FP64) {
        return ps_fail(PS_USAGE, "runtime.precision: fp64 is the tests' oracle: take fp32, tf32, bf16 or fp16");
    }
    char *tuning = NULL;
    if (*c->runtime.tuning && strcmp((*opened)->kind, "cuda") == 0) { /* no other device has products to choose for */
        size_t size;
        PS_TRY(ps_file_read(PS_USAGE, c->runtime.tuning, LONGEST_TUNING, &tuning, &size));
        if (!ps_digest(tuning, size, digest)) {
            free(tuning);
            return ps_fail(PS_USAGE, "runtime.tuning: %s: this OpenSSL has no SHA-256 to record it by", c->runtime.tuning);
        }
    }
    const struct ps_kernels_options table = {.tiny_gemm = c->runtime.tiny_gemm, .tuning = tuning};
    enum ps_status status = ps_kernels_open(backend, *opened, c->runtime.precision, &table, kernels);
    free(tuning);
    return status == PS_OK ? PS_OK : ps_fail(PS_USAGE, "runtime: %s", ps_error_message());
}

/* Whether attention is one operation, by tiles, or products around softmax. */
static int tiled_attention(const struct ps_config *c, const struct ps_kernels *k, const struct ps_model_shape *shape)
{
    return c->runtime.attention == PS_ATTENTION_AUTO
               ? k->attention_faster && ps_model_tiles(k, shape) &&
                     k->attention_faster(k, ps_patches(shape), shape->d_model / shape->n_heads,
                                         shape->residual_attention ? shape->n_layers : 1)
               : c->runtime.attention == PS_ATTENTION_TILED;
}

enum ps_status ps_engine_open_model(const struct ps_config *c, struct ps_kernels *kernels, int64_t channels, int masked,
                                    const struct ps_engine_share *share, struct ps_model **model, enum ps_level *level)
{
    struct ps_model_shape shape = ps_config_shape(c, channels);
    int64_t batch = share ? share->batch : c->train.batch_size;
    /* auto: the fastest level that serves the model. */
    static const enum ps_level levels[] = {[PS_FUSION_AUTO] = PS_LEVEL_LAYER,
                                           [PS_FUSION_NONE] = PS_LEVEL_NONE,
                                           [PS_FUSION_GEMM] = PS_LEVEL_GEMM,
                                           [PS_FUSION_LAYER] = PS_LEVEL_LAYER};
    struct ps_model_options options = {.level = levels[c->runtime.fusion],
                                       .if_faster = c->runtime.fusion == PS_FUSION_AUTO,
                                       .merge_qkv = c->runtime.merge_qkv,
                                       .epilogue = c->runtime.epilogue,
                                       .tiled_attention = tiled_attention(c, kernels, &shape),
                                       .feed_forward = c->runtime.epilogue && kernels->feed_forward_faster &&
                                                       kernels->feed_forward_faster(kernels, shape.d_model, shape.d_ff),
                                       .seed = c->train.seed,
                                       .loss = ps_config_loss(c),
                                       .exchange = share ? share->exchange : NULL,
                                       .whole = share ? share->whole : 0};
    options.loss.missing = masked;
    /* The widest activations, as ps_model_open lays them out: their size must not overflow. */
    double patches = (double)ps_patches(&shape), rows = (double)batch * (double)shape.channels * patches;
    double wide = fmax(fmax((double)shape.d_ff, 3.0 * (double)shape.d_model), (double)shape.n_heads * patches);
    double ends = (double)batch * (double)shape.channels * (double)(shape.seq_len + ps_head_width(&shape));
    if (fmax(rows * wide, ends) > 0x1p50) {
        return ps_fail(PS_USAGE, "train.batch_size: a step of %lld windows of %lld channels has %.2g activations: lower %s",
                       (long long)batch, (long long)shape.channels, fmax(rows * wide, ends),
                       batch > 1 ? "it" : "model.seq_len, model.pred_len or model.d_model");
    }
    enum ps_status status = ps_model_open(kernels, &shape, batch, &options, model);
    if (status == PS_UNSUPPORTED && c->runtime.fusion == PS_FUSION_AUTO) {
        options.level = PS_LEVEL_GEMM;
        status = ps_model_open(kernels, &shape, batch, &options, model);
    }
    *level = options.level;
    return status == PS_UNSUPPORTED ? PS_USAGE : status;
}

enum ps_status ps_engine_check_head(const struct ps_config *c, const char *checkpoint)
{
    return c->train.objective == PS_OBJECTIVE_FORECAST
               ? PS_OK
               : ps_fail(PS_CHECKPOINT,
                         "%s: has no forecast head: it reconstructs masked patches (train.objective: masked); "
                         "train --init-from it with --new-head and train.objective: forecast",
                         checkpoint);
}

static enum ps_status set_text(char **place, const char *text)
{
    char *copy = strdup(text);
    if (!copy) {
        return ps_fail(PS_USAGE, "no memory for the config");
    }
    free(*place);
    *place = copy;
    return PS_OK;
}

static enum ps_status precision_named(const char *name, enum ps_precision *precision)
{
    static const enum ps_precision all[] = {PS_FP32, PS_TF32, PS_PRECISION_BF16, PS_FP16};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (strcmp(name, ps_precision_name(all[i])) == 0) {
            *precision = all[i];
            return PS_OK;
        }
    }
    return ps_fail(PS_USAGE, "--precision: \"%.60s\" is not one of fp32, tf32, bf16, fp16", name);
}

enum ps_status ps_engine_adapt(struct ps_config *c, const char *device, const char *precision, char note[PS_ENGINE_NOTE])
{
    *note = 0;
    if (device && !ps_config_is_device(device)) {
        return ps_fail(PS_USAGE, "--device: \"%.60s\" is not one of auto, cpu, cuda, cuda:N", device);
    }
    const char *backend = c->runtime.backend;
    const int on_cpu = strcmp(backend, "cpu") == 0 || strcmp(backend, "reference") == 0, gpus = ps_cuda_device_count() > 0;
    if (!device && strncmp(c->runtime.device, "cuda", 4) == 0 && !gpus) {
        PS_TRY(set_text(&c->runtime.device, "auto"));
    }
    const char *where = device ? device : c->runtime.device;
    const int cpu = strcmp(where, "cpu") == 0 || (strcmp(where, "auto") == 0 && (on_cpu || !gpus));
    const int moved = strcmp(backend, "auto") != 0 && on_cpu != cpu;
    if (moved) {
        PS_TRY(set_text(&c->runtime.backend, "auto"));
    }
    const enum ps_precision trained = c->runtime.precision;
    if (precision) {
        PS_TRY(precision_named(precision, &c->runtime.precision));
    } else if (cpu && trained != PS_FP64 && strcmp(c->runtime.backend, "reference") != 0) {
        c->runtime.precision = PS_FP32;
    }
    if (!precision && c->runtime.precision != trained) {
        snprintf(note, PS_ENGINE_NOTE, "trained in %s, computed in %s%s", ps_precision_name(trained),
                 ps_precision_name(c->runtime.precision), cpu ? " on the CPU" : "");
    }
    /* Levels and ways of attention that were asked for by name need not be there. */
    if (cpu || moved || c->runtime.precision != trained) {
        c->runtime.fusion = c->runtime.fusion == PS_FUSION_LAYER ? PS_FUSION_AUTO : c->runtime.fusion;
        c->runtime.attention = c->runtime.attention == PS_ATTENTION_TILED ? PS_ATTENTION_AUTO : c->runtime.attention;
    }
    return PS_OK;
}

/* The same tensors, or which one differs. */
static enum ps_status same_layout(const struct ps_parameters *ours, const struct ps_parameters *theirs)
{
    for (int t = 0; t < ours->all; t++) {
        const struct ps_parameter *a = &ours->table[t], *b = t < theirs->all ? &theirs->table[t] : NULL;
        if (!b || strcmp(a->name, b->name) != 0 || memcmp(a->size, b->size, sizeof a->size) != 0) {
            return ps_fail(PS_CHECKPOINT, "the checkpoint is of another model: %s is [%lld, %lld] here and %s [%lld, %lld] there",
                           a->name, (long long)a->size[0], (long long)a->size[1], b ? b->name : "nothing",
                           b ? (long long)b->size[0] : 0LL, b ? (long long)b->size[1] : 0LL);
        }
    }
    return ours->all == theirs->all
               ? PS_OK
               : ps_fail(PS_CHECKPOINT, "the checkpoint is of another model: %d tensors here, %d there", ours->all, theirs->all);
}

enum ps_status ps_engine_load_weights(struct ps_device *device, struct ps_model *model, const struct ps_checkpoint *c, void *into)
{
    PS_TRY(same_layout(model->layout, c->layout));
    PS_TRY(device->upload(device, PS_COMPUTE, into ? into : model->parameters, c->parameters,
                          (size_t)model->layout->stored * sizeof *c->parameters));
    if (!into) {
        PS_TRY(ps_model_refresh_weights(model));
    }
    return device->synchronize(device);
}
