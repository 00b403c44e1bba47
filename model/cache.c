#include "model/cache.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGN = 256 };

const char *ps_level_name(enum ps_level level)
{
    return level == PS_LEVEL_NONE ? "none" : level == PS_LEVEL_GEMM ? "gemm" : "layer";
}

/* Hands out the next piece; base NULL only counts. */
static void *take(char *base, size_t *offset, int used, int64_t elements, enum ps_type type)
{
    if (!used || elements == 0) {
        return NULL;
    }
    void *piece = base ? base + *offset : NULL;
    *offset += ((size_t)elements * ps_type_bytes(type) + ALIGN - 1) / ALIGN * ALIGN;
    return piece;
}

int64_t ps_padded_head(const struct ps_kernels *k, const struct ps_model_shape *shape)
{
    const int64_t head = shape->d_model / shape->n_heads, pieces = shape->residual_attention ? shape->n_layers : 1;
    return k->attention_columns ? k->attention_columns(k, ps_patches(shape), head, pieces) : head;
}

static size_t lay_out(const struct ps_kernels *k, const struct ps_model_shape *shape, int64_t batch, int level, char *base,
                      struct ps_layer_cache *tables, struct ps_shared_cache *shared)
{
    enum ps_type real = k->real, parameter = k->parameter, statistics = k->statistics;
    int64_t S = batch * shape->channels, N = ps_patches(shape), R = S * N, P = shape->patch_len, H = shape->pred_len;
    int64_t outputs = ps_head_rows(shape, batch) * ps_head_width(shape), targets = shape->mask_ratio > 0 ? outputs : S * H;
    int64_t d = shape->d_model, f = shape->d_ff, h = shape->n_heads, layers = shape->n_layers;
    int64_t a = level & PS_LEVEL_PADDED ? h * ps_padded_head(k, shape) : d;
    int64_t scores = level & PS_LEVEL_TILED ? 0 : S * h * N * N, split = level & (PS_LEVEL_TILED | PS_LEVEL_STRIDED) ? 0 : R * d;
    int64_t wide = level & PS_LEVEL_FED ? 0 : R; /* rows of hidden columns */
    int64_t groups = ps_partial_rows(S), inner = shape->activation == PS_SWIGLU ? 2 * f : f;
    int64_t spreads = shape->norm == PS_NORM_BATCH ? d : R, means = shape->norm == PS_NORM_RMS ? 0 : spreads;
    int64_t post = shape->norm_place == PS_NORM_POST ? R * d : 0, pre = R * d - post;
    int64_t C = shape->channels, affine = shape->revin_affine != 0, residual = shape->residual_attention != 0;
    int64_t slots = residual && (level & PS_LEVEL_TILED) ? layers : 1;
    int64_t weights_dropout = ps_dropout_rate(shape, PS_DROP_ATTENTION_WEIGHTS) > 0;
    int64_t head_dropout = ps_dropout_rate(shape, PS_DROP_HEAD) > 0;
    int64_t together =
        k->gemm_gradients && ps_dropout_rate(shape, PS_DROP_ATTENTION) > 0 && ps_dropout_rate(shape, PS_DROP_OUTPUT) > 0;
    size_t offset = 0;
    for (int64_t l = 0; l < layers; l++) {
        struct ps_layer_cache layer = {.slope_kept = 0};
#define PS_X(name, levels, elements, type) layer.name = take(base, &offset, (levels)&level, elements, type);
        PS_LAYER_BUFFERS(PS_X)
        if (tables) {
            tables[l] = layer;
        }
    }
    struct ps_shared_cache all;
#undef PS_X
#define PS_X(name, levels, elements, type) all.name = take(base, &offset, (levels)&level, elements, type);
    PS_SHARED_BUFFERS(PS_X)
#undef PS_X
    if (shared) {
        *shared = all;
    }
    return offset;
}

size_t ps_cache_bytes(const struct ps_kernels *k, const struct ps_model_shape *shape, int64_t batch, int level)
{
    return lay_out(k, shape, batch, level, NULL, NULL, NULL);
}

enum ps_status ps_cache_open(const struct ps_kernels *k, const struct ps_model_shape *shape, int64_t batch, int level,
                             struct ps_cache *cache)
{
    memset(cache, 0, sizeof *cache);
    cache->bytes = ps_cache_bytes(k, shape, batch, level);
    cache->layers = calloc((size_t)shape->n_layers, sizeof *cache->layers);
    if (!cache->layers) {
        return ps_fail(PS_DEVICE, "no memory for the table of %lld layers", (long long)shape->n_layers);
    }
    enum ps_status status = k->device->allocate(k->device, cache->bytes, &cache->memory);
    if (status != PS_OK) {
        free(cache->layers);
        cache->layers = NULL;
        return status;
    }
    lay_out(k, shape, batch, level, cache->memory, cache->layers, &cache->shared);
    return PS_OK;
}

/* Buffers lie one after another: an address is in the last that begins at or before it. */
static void nearer(const char *name, const void *begin, const char *address, const char **found, const char **nearest)
{
    if (begin && (const char *)begin <= address && (const char *)begin >= *nearest) {
        *nearest = begin;
        *found = name;
    }
}

const char *ps_cache_name(const struct ps_cache *cache, int64_t layers, const void *address)
{
    const char *at = address, *nearest = cache->memory, *found = NULL;
    if (at < nearest || at >= nearest + cache->bytes) {
        return NULL;
    }
#define PS_X(name, levels, elements, type) nearer(#name, cache->layers[l].name, at, &found, &nearest);
    for (int64_t l = 0; l < layers; l++) {
        PS_LAYER_BUFFERS(PS_X)
    }
#undef PS_X
#define PS_X(name, levels, elements, type) nearer(#name, cache->shared.name, at, &found, &nearest);
    PS_SHARED_BUFFERS(PS_X)
#undef PS_X
    return found;
}

void ps_cache_close(struct ps_device *device, struct ps_cache *cache)
{
    if (cache->memory) {
        device->release(device, cache->memory, cache->bytes);
    }
    free(cache->layers);
    memset(cache, 0, sizeof *cache);
}
