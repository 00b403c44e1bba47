#include "src/config_keys.h"

#include <string.h>

static const char *const norms[] = {"layer", "batch", "rms", NULL};
static const char *const batchnorms[] = {"sync", "local", NULL};
static const char *const norm_places[] = {"pre", "post", NULL};
static const char *const activations[] = {"gelu_tanh", "gelu", "relu", "swiglu", NULL};
static const char *const positions[] = {"learned", "sincos", "rope", "none", NULL};
static const char *const heads[] = {"shared", "individual", NULL};
static const char *const patches_from[] = {"start", "end", NULL};
static const char *const freezes[] = {"none", "encoder", NULL};
static const char *const objectives[] = {"forecast", "masked", NULL};
static const char *const paddings[] = {"none", "end", NULL};
static const char *const missings[] = {"refuse", "mask", NULL};
static const char *const placements[] = {"auto", "device", "host", NULL};
static const char *const fusions[] = {"auto", "none", "gemm", "layer", NULL};
static const char *const attentions[] = {"auto", "gemm", "tiled", NULL};
static const char *const exchanges[] = {"auto", "nccl", "mpi", NULL};
static const char *const on_nonfinites[] = {"stop", "skip", NULL};
static const char *const losses[] = {"mse", "mae", "huber", "quantile", NULL};
static const char *const monitors[] = {"loss", "mse", "mae", NULL};
static const char *const schedules[] = {"constant", "cosine", "onecycle", "type3", NULL};
static const char *const precisions[] = {"fp64", "fp32", "tf32", "bf16", "fp16", NULL}; /* as enum ps_precision */
static const char *const backends[] = {"auto", "reference", "cpu", "cuda", NULL};

#define KEY(in, key, kind, ...)                                                                                                  \
    {                                                                                                                            \
        .section = #in, .name = #key, .type = PS_KEY_##kind, .offset = offsetof(struct ps_config, in.key), .preset = __VA_ARGS__ \
    }

#define DROPOUT_KEY(key, place, ...)                                                                              \
    {                                                                                                             \
        .section = "model", .name = "dropout_" #key, .type = PS_KEY_RATE,                                         \
        .offset = offsetof(struct ps_config, model.dropout_at) + (place) * sizeof(double), .preset = __VA_ARGS__, \
        .range = PS_RANGE_FRACTION                                                                                \
    }

static const struct ps_key table[] = {
    KEY(data, path, TEXT, {""}, .free_on_resume = 1),
    KEY(data, split, SPLIT, {"0.7", "0.1", "0.2"}, .range = PS_RANGE_NOT_NEGATIVE),
    KEY(data, channels, LIST, {NULL}),
    KEY(data, missing, CHOICE, {"refuse"}, .choices = missings, .free_on_resume = 1), /* other data are refused in any case */
    KEY(data, standardize, SWITCH, {"true"}),
    KEY(data, drop_last, SWITCH, {"true"}),
    KEY(data, placement, CHOICE, {"auto"}, .choices = placements, .free_on_resume = 1),
    KEY(data, memory_limit, BYTES, {"0"}),
    KEY(data, season, WHOLE, {"24"}, .range = PS_RANGE_LIMIT, .free_on_resume = 1),
    KEY(model, seq_len, WHOLE, {"336"}, .range = PS_RANGE_SIZE),
    KEY(model, pred_len, WHOLE, {"96"}, .range = PS_RANGE_SIZE),
    KEY(model, patch_len, WHOLE, {"16"}, .range = PS_RANGE_SIZE),
    KEY(model, stride, WHOLE, {"8"}, .range = PS_RANGE_SIZE),
    KEY(model, padding, CHOICE, {"end"}, .choices = paddings),
    KEY(model, d_model, WHOLE, {"128"}, .range = PS_RANGE_SIZE),
    KEY(model, n_heads, WHOLE, {"16"}, .range = PS_RANGE_SIZE),
    KEY(model, d_ff, WHOLE, {"256"}, .range = PS_RANGE_SIZE),
    KEY(model, n_layers, WHOLE, {"3"}, .range = PS_RANGE_LAYERS),
    KEY(model, dropout, REAL, {"0.2"}, .range = PS_RANGE_FRACTION),
    DROPOUT_KEY(embedding, PS_DROP_EMBEDDING, {"auto"}),
    DROPOUT_KEY(attention_weights, PS_DROP_ATTENTION_WEIGHTS, {"0"}),
    DROPOUT_KEY(attention, PS_DROP_ATTENTION, {"auto"}),
    DROPOUT_KEY(hidden, PS_DROP_HIDDEN, {"auto"}),
    DROPOUT_KEY(output, PS_DROP_OUTPUT, {"auto"}),
    DROPOUT_KEY(head, PS_DROP_HEAD, {"0"}),
    KEY(model, revin, SWITCH, {"true"}),
    KEY(model, revin_affine, SWITCH, {"false"}),
    KEY(model, revin_subtract_last, SWITCH, {"false"}),
    KEY(model, norm, CHOICE, {"layer"}, .choices = norms),
    KEY(model, norm_place, CHOICE, {"pre"}, .choices = norm_places),
    KEY(model, residual_attention, SWITCH, {"false"}),
    KEY(model, activation, CHOICE, {"gelu_tanh"}, .choices = activations),
    KEY(model, positions, CHOICE, {"learned"}, .choices = positions),
    KEY(model, head, CHOICE, {"shared"}, .choices = heads),
    KEY(model, patches_from, CHOICE, {"start"}, .choices = patches_from),
    KEY(model, mask_ratio, REAL, {"0.4"}, .range = PS_RANGE_INSIDE),
    KEY(model, batchnorm, CHOICE, {"sync"}, .choices = batchnorms),
    KEY(optim, lr, REAL, {"1e-4"}, .range = PS_RANGE_POSITIVE),
    KEY(optim, weight_decay, REAL, {"1e-2"}, .range = PS_RANGE_NOT_NEGATIVE),
    KEY(optim, beta1, REAL, {"0.9"}, .range = PS_RANGE_FRACTION),
    KEY(optim, beta2, REAL, {"0.999"}, .range = PS_RANGE_FRACTION),
    KEY(optim, eps, REAL, {"1e-8"}, .range = PS_RANGE_POSITIVE),
    KEY(optim, clip_norm, REAL, {"0"}, .range = PS_RANGE_NOT_NEGATIVE),
    KEY(optim, schedule, CHOICE, {"cosine"}, .choices = schedules),
    KEY(optim, warmup_steps, WHOLE, {"0"}, .range = PS_RANGE_LIMIT),
    KEY(optim, min_lr, REAL, {"0"}, .range = PS_RANGE_NOT_NEGATIVE),
    KEY(optim, pct_start, REAL, {"0.3"}, .range = PS_RANGE_INSIDE),
    KEY(train, epochs, WHOLE, {"100"}, .range = PS_RANGE_COUNT),
    KEY(train, batch_size, WHOLE, {"128"}, .range = PS_RANGE_COUNT),
    KEY(train, seed, SEED, {"1"}, .range = PS_RANGE_ANY),
    KEY(train, patience, WHOLE, {"0"}, .range = PS_RANGE_LIMIT, .free_on_resume = 1),
    KEY(train, checkpoint_every, WHOLE, {"0"}, .range = PS_RANGE_LIMIT, .free_on_resume = 1),
    KEY(train, keep_last, WHOLE, {"2"}, .range = PS_RANGE_COUNT, .free_on_resume = 1),
    KEY(train, keep_best, WHOLE, {"1"}, .range = PS_RANGE_COUNT, .free_on_resume = 1),
    KEY(train, on_nonfinite, CHOICE, {"stop"}, .choices = on_nonfinites, .free_on_resume = 1),
    KEY(train, objective, CHOICE, {"forecast"}, .choices = objectives),
    KEY(train, freeze, CHOICE, {"none"}, .choices = freezes),
    KEY(train, freeze_epochs, WHOLE, {"0"}, .range = PS_RANGE_LIMIT),
    KEY(train, loss, CHOICE, {"mse"}, .choices = losses),
    KEY(train, huber_delta, REAL, {"1"}, .range = PS_RANGE_POSITIVE),
    KEY(train, quantiles, REALS, {NULL}, .range = PS_RANGE_INSIDE),
    KEY(train, monitor, CHOICE, {"loss"}, .choices = monitors),
    KEY(train, accumulate, WHOLE, {"1"}, .range = PS_RANGE_COUNT),
    KEY(runtime, device, TEXT, {"auto"}),
    KEY(runtime, precision, CHOICE, {"fp32"}, .choices = precisions),
    KEY(runtime, backend, TEXT, {"auto"}, .choices = backends),
    KEY(runtime, fusion, CHOICE, {"auto"}, .choices = fusions),
    KEY(runtime, attention, CHOICE, {"auto"}, .choices = attentions),
    KEY(runtime, merge_qkv, SWITCH, {"true"}),
    KEY(runtime, epilogue, SWITCH, {"true"}),
    KEY(runtime, tiny_gemm, SWITCH, {"true"}),
    KEY(runtime, tuning, TEXT, {""}, .free_on_resume = 1), /* the algorithms that are recorded say which */
    KEY(runtime, threads, WHOLE, {"0"}, .range = PS_RANGE_LIMIT),
    KEY(runtime, exchange, CHOICE, {"auto"}, .choices = exchanges, .free_on_resume = 1), /* the library is recorded */
};
_Static_assert(sizeof table / sizeof *table == PS_KEYS, "PS_KEYS counts the table");
const struct ps_key *const ps_keys = table;

const char *const ps_sections[PS_SECTIONS] = {"data", "model", "optim", "train", "runtime"};

int ps_key_is_list(const struct ps_key *key)
{
    return key->type == PS_KEY_SPLIT || key->type == PS_KEY_LIST || key->type == PS_KEY_REALS;
}

int ps_key_index(const char *section, const char *name)
{
    for (int i = 0; i < PS_KEYS; i++) {
        if (strcmp(section, ps_keys[i].section) == 0 && strcmp(name, ps_keys[i].name) == 0) {
            return i;
        }
    }
    return -1;
}
