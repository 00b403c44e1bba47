/* What a state dict of the authors' PatchTST tells of its model: sizes by the tensors' shapes, variants by their names. */
#include "src/weights.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

/* A tensor that has `rank` dimensions. */
static enum ps_status find(const struct ps_safetensors *file, const char *name, int rank, const struct ps_safetensor **tensor)
{
    *tensor = ps_safetensors_find(file, name);
    if (!*tensor) {
        return ps_fail(PS_CHECKPOINT,
                       "%s: has no tensor %s: not a state dict of the authors' PatchTST as scripts/pth_to_safetensors.py writes it",
                       file->path, name);
    }
    return (*tensor)->rank == rank && (*tensor)->count > 0
               ? PS_OK
               : ps_fail(PS_CHECKPOINT, "%s: tensor %s: its shape is %s, not one of %d dimensions", file->path, name,
                         ps_shape_text((*tensor)->rank, (*tensor)->size).text, rank);
}

/* Their layers are numbered from 0. */
static int64_t count_layers(const struct ps_safetensors *file)
{
    char name[112];
    int64_t n = 0;
    while (snprintf(name, sizeof name, "backbone.encoder.layers.%" PRId64 ".self_attn.W_Q.weight", n),
           ps_safetensors_find(file, name)) {
        n++;
    }
    return n;
}

/* Their heads, when each channel has its own. */
static int64_t count_heads(const struct ps_safetensors *file)
{
    char name[112];
    int64_t n = 0;
    while (snprintf(name, sizeof name, "head.linears.%" PRId64 ".weight", n), ps_safetensors_find(file, name)) {
        n++;
    }
    return n;
}

/* Scores are scaled by 1/sqrt(e), which tells the heads' size; a scale that was trained says nothing. */
static enum ps_status know_heads(const struct ps_safetensors *file, int64_t d_model, struct ps_known *known)
{
    const struct ps_safetensor *scale = ps_safetensors_find(file, "backbone.encoder.layers.0.self_attn.sdp_attn.scale");
    float value = 0;
    if (scale && scale->count == 1) {
        PS_TRY(ps_safetensors_values(file, scale, &value));
    }
    double e = value > 0 ? round(1 / ((double)value * (double)value)) : 0;
    if (e >= 1 && e <= (double)d_model && d_model % (int64_t)e == 0 && fabs((double)value - 1 / sqrt(e)) <= 1e-6) {
        ps_known_add(known, "n_heads", 1, "%" PRId64, d_model / (int64_t)e);
    } else {
        ps_known_add(known, "n_heads", 1, "%s", PS_KNOWN_NOTHING);
    }
    return PS_OK;
}

enum ps_status ps_weights_authors_known(const struct ps_safetensors *file, struct ps_known *known, int64_t *channels)
{
    const struct ps_safetensor *embedding, *hidden, *head, *affine = ps_safetensors_find(file, "revin_layer.affine_weight");
    *known = (struct ps_known){.origin = file->path};
    PS_TRY(find(file, "backbone.W_P.weight", 2, &embedding));
    PS_TRY(find(file, "backbone.encoder.layers.0.ff.0.weight", 2, &hidden));
    int64_t heads = count_heads(file);
    PS_TRY(find(file, heads > 0 ? "head.linears.0.weight" : "head.linear.weight", 2, &head));
    const int batchnorm = ps_safetensors_find(file, "backbone.encoder.layers.0.norm_attn.1.weight") != NULL;
    *channels = heads > 0 ? heads : affine && affine->rank == 1 ? affine->size[0] : 0;
    /* Of the weights. */
    ps_known_add(known, "d_model", 1, "%" PRId64, embedding->size[0]);
    ps_known_add(known, "patch_len", 1, "%" PRId64, embedding->size[1]);
    ps_known_add(known, "d_ff", 1, "%" PRId64, hidden->size[0]);
    ps_known_add(known, "seq_len", 1, "%s", PS_KNOWN_NOTHING); /* windows of several lengths have as many patches */
    ps_known_add(known, "pred_len", 1, "%" PRId64, head->size[0]);
    ps_known_add(known, "n_layers", 1, "%" PRId64, count_layers(file));
    ps_known_add(known, "norm", 1, batchnorm ? "batch" : "layer");
    ps_known_add(known, "positions", 1, "learned");
    ps_known_add(known, "head", 1, heads > 0 ? "individual" : "shared");
    ps_known_add(known, "revin_affine", 1, affine ? "true" : "false");
    PS_TRY(know_heads(file, embedding->size[0], known));
    /* Of their layer, which no tensor tells. */
    ps_known_add(known, "norm_place", 0, "post");
    ps_known_add(known, "residual_attention", 0, "true");
    ps_known_add(known, "activation", 0, "gelu");
    return PS_OK;
}
