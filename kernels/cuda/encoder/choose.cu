/* Level `layer`: the table's fused encoder entries. Five families of kernels serve them: encoder/resident/resident.cu, the whole
 * encoder in one launch each way, where a layer's weights stay on one multiprocessor, in bf16, fp16 and tf32;
 * encoder/streamed/real16.cu, a layer a launch with weights streamed from L2, in bf16 and fp16; encoder/streamed/float.cu, the
 * whole encoder in one launch with weights streamed, in tf32 and fp32; encoder/split/rows.cu, a layer in kernels by rows around
 * attention's, in tf32; encoder/resident/d64_short_tf32.cu, the small one's kernels of 16 bits for tf32. All are for sm_90; every
 * other case is refused here and runs at level gemm. */
#include "kernels/cuda/context.cuh"
#include "kernels/cuda/encoder/streamed/float.cuh"
#include "kernels/cuda/encoder/resident/d64_short_tf32.cuh"
#include "kernels/cuda/encoder/streamed/real16.cuh"
#include "kernels/cuda/encoder/split/rows.cuh"
#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/tile/windows.cuh"

namespace PS_REAL16_SPACE
{

/* What both directions are asked for, of whichever family: the large one's arguments are made from the small one's. */
static struct ps_encoder_small request_of(const struct ps_kernels *k, const struct ps_encoder_sizes *s)
{
    struct ps_encoder_small e = {};
    e.n_heads = s->n_heads;
    e.d_ff = s->d_ff;
    e.layers = s->layers;
    e.offsets = s->layout;
    e.workspace = ps_cuda(k)->encoder_workspace;
    e.dropout = s->dropout;
    e.epsilon = s->epsilon;
    e.fresh = ps_cuda(k)->ordered;
    return e;
}

/* The large family keeps, for each layer, r (real16 [S, N, d]), the logarithm of softmax's sums (fp32 [S, h, N]) and
 * dropout's bits. */
static size_t large_kept_bytes(const struct ps_encoder_large *e)
{
    int64_t rows = e->sequences * e->patches;
    size_t one = (size_t)(2 * rows * e->d_model + 4 * rows * e->n_heads) + ps_cuda_encoder_large_kept_bytes(e);
    return (one + 255) / 256 * 256;
}

/* Of any layer, without its memory: what support, kept bytes and workspace are asked with. The kept bytes of sizes that are not
 * supported may not be asked. */
static struct ps_encoder_large large_sizes_of(const struct ps_kernels *k, const struct ps_encoder_small *r)
{
    struct ps_encoder_large e = {};
    e.sequences = r->sequences;
    e.patches = r->patches;
    e.d_model = r->d_model;
    e.n_heads = r->n_heads;
    e.d_ff = r->d_ff;
    e.layers = r->layers;
    e.epsilon = (float)r->epsilon;
    e.attention = e.hidden = e.output = r->dropout;
    e.context = ps_cuda(k);
    return e;
}

static struct ps_encoder_large large_of(const struct ps_kernels *k, const struct ps_encoder_small *r, int64_t layer)
{
    const struct ps_encoder_layout *l = &r->offsets;
    int64_t rows = r->sequences * r->patches * r->d_model, matrix = layer * l->matrix_stride, vector = layer * l->vector_stride;
    const char *weights = (const char *)r->weights;
    struct ps_encoder_large e = large_sizes_of(k, r);
    e.number = r->layers - 1 - layer;
    e.attention.site += 3 * (uint32_t)layer;
    e.hidden.site += 3 * (uint32_t)layer + 1;
    e.output.site += 3 * (uint32_t)layer + 2;
    e.u = (const char *)r->u + 2 * layer * rows;
    e.residual = (char *)r->kept + (size_t)layer * large_kept_bytes(&e);
    e.softmax = (float *)((char *)e.residual + 2 * rows);
    e.kept = e.softmax + r->sequences * r->patches * r->n_heads;
    e.w_qkv = weights + 2 * (l->w_qkv + matrix);
    e.w_o = weights + 2 * (l->w_o + matrix);
    e.w_1 = weights + 2 * (l->w_1 + matrix);
    e.w_2 = weights + 2 * (l->w_2 + matrix);
    const float *p = r->parameters + vector;
    e.vectors = {p + l->ln1_gamma, p + l->ln1_beta, p + l->b_qkv, p + l->b_o,
                 p + l->ln2_gamma, p + l->ln2_beta, p + l->b_1,   p + l->b_2};
    return e;
}

enum family { SMALL, LARGE, FLOAT, ROWS, HALVES };

/* Narrow models are the small one's, but in fp32; in 16 bits so are short sequences of which one tile holds several, whose kernels
 * tf32 takes too. */
static enum ps_status choose(const struct ps_kernels *k, const struct ps_encoder_small *r, enum family *family)
{
    if (PS_REAL16 == PS_F32) {
        const bool fp32 = k->precision == PS_FP32;
        if (!fp32 && r->d_model == 64) {
            *family = HALVES;
            const enum ps_status status = level_halves::ps_encoder_halves_supported(r);
            if (status != PS_UNSUPPORTED) {
                return status;
            }
        }
        *family = fp32 ? FLOAT : r->d_model <= 32 ? SMALL : r->d_model <= 64 ? FLOAT : ROWS;
        return *family == SMALL   ? ps_encoder_small_supported(r)
               : *family == FLOAT ? ps_encoder_float_supported(r)
                                  : ps_encoder_rows_supported(r);
    }
    struct ps_encoder_large l = large_sizes_of(k, r);
    int narrow = r->d_model <= 32 || r->patches <= 16;
    *family = narrow ? SMALL : LARGE;
    enum ps_status status = narrow ? ps_encoder_small_supported(r) : ps_cuda_encoder_large_supported(&l);
    if (status == PS_UNSUPPORTED) {
        *family = narrow ? LARGE : SMALL;
        status = narrow ? ps_cuda_encoder_large_supported(&l) : ps_encoder_small_supported(r);
    }
    return status;
}

static size_t workspace_of(const struct ps_kernels *k, const struct ps_encoder_small *r, enum family family)
{
    switch (family) {
    case SMALL:
        return ps_encoder_small_workspace_bytes(r);
    case LARGE: {
        const struct ps_encoder_large l = large_sizes_of(k, r);
        return ps_cuda_encoder_large_workspace(&l);
    }
    case FLOAT:
        return ps_encoder_float_workspace_bytes(k, r);
    case ROWS:
        return ps_encoder_rows_workspace_bytes(k, r);
    default:
        return level_halves::ps_encoder_halves_workspace_bytes(k, r);
    }
}

/* A batch shorter than the one that encoder_prepare saw may not need more than that. */
static enum ps_status check_workspace(const struct ps_kernels *k, const struct ps_encoder_small *r, enum family family)
{
    const size_t needed = workspace_of(k, r, family), there = ps_cuda(k)->encoder_workspace_bytes;
    return needed <= there ? PS_OK
                           : ps_fail(PS_DEVICE, "encoder (cuda): %lld sequences need %zu bytes of workspace, %zu are there",
                                     (long long)r->sequences, needed, there);
}

static bool can_embed(const struct ps_encoder_small *r, enum family family)
{
    return family == SMALL ? ps_encoder_small_embeds(r) : family == FLOAT ? ps_encoder_float_embeds(r) : false;
}

enum ps_status ps_cuda_encoder_prepare(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                                       const struct ps_encoder_shape *shape, struct ps_encoder_needs *needs)
{
    struct ps_cuda_context *c = ps_cuda(k);
    struct ps_encoder_small r = request_of(k, sizes);
    r.sequences = shape->sequences;
    r.patches = shape->patches;
    r.d_model = shape->d_model;
    r.seq_len = shape->seq_len;
    r.patch_len = shape->patch_len;
    r.pred_len = shape->pred_len;
    enum family family;
    PS_TRY(choose(k, &r, &family));
    const size_t workspace = workspace_of(k, &r, family);
    const struct ps_encoder_large l = large_sizes_of(k, &r);
    needs->kept_bytes = family == SMALL   ? ps_encoder_small_kept_bytes(&r)
                        : family == LARGE ? large_kept_bytes(&l) * (size_t)sizes->layers
                        : family == FLOAT ? ps_encoder_float_kept_bytes(&r)
                        : family == ROWS  ? ps_encoder_rows_kept_bytes(&r)
                                          : level_halves::ps_encoder_halves_kept_bytes(&r);
    needs->slower = (family == FLOAT && ps_encoder_float_slower(k, &r)) || (family == ROWS && ps_encoder_rows_slower(&r));
    needs->embeds = can_embed(&r, family);
    needs->heads = family == SMALL && ps_encoder_small_heads(&r);
    needs->ends = family == SMALL && ps_encoder_small_ends(&r);
    if (workspace > c->encoder_workspace_bytes) {
        if (c->encoder_workspace) {
            k->device->release(k->device, c->encoder_workspace, c->encoder_workspace_bytes);
            c->encoder_workspace = NULL;
            c->encoder_workspace_bytes = 0;
        }
        PS_TRY(k->device->allocate(k->device, workspace, &c->encoder_workspace)); /* zeroed, as encoder_small asks */
        c->encoder_workspace_bytes = workspace;
    }
    return PS_OK;
}

/* The stream and the parameters to the request. */
static enum ps_status take(struct ps_encoder_small *r, const struct ps_tensor *stream, const struct ps_tensor *weights,
                           const struct ps_tensor *parameters, void *kept)
{
    if (stream->rank != 4 || stream->size[0] != r->layers + 1 || stream->type != PS_REAL16 || weights->type != PS_REAL16 ||
        parameters->type != PS_F32 || !ps_tensor_contiguous(stream)) {
        return ps_fail(PS_UNSUPPORTED,
                       "encoder: stream must be [%lld, S, N, d] of the activations' type, weights too, parameters float32",
                       (long long)r->layers + 1);
    }
    r->sequences = stream->size[1];
    r->patches = stream->size[2];
    r->d_model = stream->size[3];
    r->u = stream->data;
    r->weights = weights->data;
    r->parameters = (const float *)parameters->data;
    r->kept = kept;
    return PS_OK;
}

/* The embedding is the request's, and the whole is served. */
static enum ps_status check_embed(const struct ps_encoder_small *r, enum family family, const struct ps_dropout *dropout)
{
    const struct ps_dropout *of = &r->dropout;
    if (!can_embed(r, family) || dropout->threshold != of->threshold || dropout->seed != of->seed || dropout->state != of->state) {
        return ps_fail(PS_UNSUPPORTED, "encoder: windows of %lld and patches of %lld are not embedded for d_model %lld",
                       (long long)r->seq_len, (long long)r->patch_len, (long long)r->d_model);
    }
    return PS_OK;
}

static enum ps_status check_embed_forward(struct ps_encoder_small *r, enum family family, const struct ps_embed_forward *a)
{
    const char *op = "encoder_forward";
    struct ps_cuda_windows windows;
    PS_TRY(ps_windows_make(op, "inputs", &a->inputs, &a->indices, a->state, a->batch, &windows));
    const int64_t channels = a->inputs.size[1], rows = r->sequences * r->patches;
    r->embed = a;
    r->seq_len = a->inputs.size[2];
    r->patch_len = ps_cuda_width(&a->patches);
    PS_TRY(check_embed(r, family, &a->dropout));
    if (a->u.data != r->u || channels < 1 || a->batch * channels != r->sequences || a->stride < 1 ||
        (r->seq_len - r->patch_len) / a->stride + 1 + (a->pad_end ? 1 : 0) != r->patches) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): patches of %lld every %lld of %lld x %lld windows of %lld are not [%lld, %lld]",
                       op, (long long)r->patch_len, (long long)a->stride, (long long)a->batch, (long long)channels,
                       (long long)r->seq_len, (long long)r->sequences, (long long)r->patches);
    }
    PS_TRY(ps_cuda_expect(op, "patches", &a->patches, PS_REAL16, rows * r->patch_len));
    PS_TRY(ps_cuda_expect(op, "mean", &a->mean, PS_F32, r->sequences));
    PS_TRY(ps_cuda_expect(op, "std", &a->std, PS_F32, r->sequences));
    PS_TRY(ps_cuda_expect(op, "weight", &a->weight, PS_REAL16, r->patch_len * r->d_model));
    PS_TRY(ps_cuda_expect(op, "bias", &a->bias, PS_F32, r->d_model));
    return ps_cuda_expect(op, "position", &a->position, PS_F32, r->patches * r->d_model);
}

static enum ps_status check_head(struct ps_encoder_small *r, const struct ps_head_step *a)
{
    const char *op = "encoder_forward";
    const int64_t rows = a->partials.rank > 0 ? a->partials.size[0] : 0, width = r->patches * r->d_model;
    struct ps_cuda_windows windows;
    PS_TRY(ps_windows_make(op, "targets", &a->targets, &a->indices, a->state, a->batch, &windows));
    r->head = a;
    r->pred_len = a->targets.size[2];
    if (!r->embed || !ps_encoder_small_heads(r) || a->state != r->embed->state || a->batch != r->embed->batch ||
        a->targets.size[1] != r->embed->inputs.size[1] || a->mean.data != r->embed->mean.data ||
        a->std.data != r->embed->std.data || rows < (r->sequences < PS_PARTIAL_BLOCKS ? r->sequences : PS_PARTIAL_BLOCKS) ||
        !ps_cuda_aligned(&a->weight) || a->z.data != (const char *)r->u + sizeof(ps_real) * r->layers * r->sequences * width) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a head of %lld x %lld with %lld rows of sums is not served with %lld windows",
                       op, (long long)width, (long long)r->pred_len, (long long)rows, (long long)a->batch);
    }
    PS_TRY(ps_cuda_expect(op, "dz", &a->dz, PS_REAL16, r->sequences * width));
    PS_TRY(ps_cuda_expect(op, "dx", &a->dx, PS_REAL16, r->sequences * r->pred_len));
    PS_TRY(ps_cuda_expect(op, "partials", &a->partials, PS_F64, rows * (r->pred_len + 1)));
    PS_TRY(ps_cuda_expect(op, "weight", &a->weight, PS_REAL16, width * r->pred_len));
    return ps_cuda_expect(op, "bias", &a->bias, PS_F32, r->pred_len);
}

static enum ps_status check_embed_backward(struct ps_encoder_small *r, enum family family, const struct ps_embed_backward *a)
{
    const char *op = "encoder_backward";
    r->embed_gradient = a;
    r->patch_len = ps_cuda_width(&a->patches);
    r->seq_len = r->patch_len; /* the windows are not needed again */
    PS_TRY(check_embed(r, family, &a->dropout));
    PS_TRY(ps_cuda_expect(op, "patches", &a->patches, PS_REAL16, r->sequences * r->patches * r->patch_len));
    PS_TRY(ps_cuda_expect(op, "d_weight", &a->d_weight, PS_F32, r->patch_len * r->d_model));
    PS_TRY(ps_cuda_expect(op, "d_bias", &a->d_bias, PS_F32, r->d_model));
    return ps_cuda_expect(op, "d_position", &a->d_position, PS_F32, r->patches * r->d_model);
}

static enum ps_status check_head_gradient(struct ps_encoder_small *r, const struct ps_head_gradient *a)
{
    const char *op = "encoder_backward";
    const int64_t rows = a->partials.rank > 0 ? a->partials.size[0] : 0, width = r->patches * r->d_model;
    r->head_gradient = a;
    r->pred_len = ps_tensor_count(&a->d_bias);
    if (!r->embed_gradient || !ps_encoder_small_ends(r) || !a->state ||
        a->z.data != (const char *)r->u + 2 * r->layers * r->sequences * width || !ps_cuda_aligned(&a->d_weight)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): the gradient of a head of %lld x %lld is not served with %lld sequences", op,
                       (long long)width, (long long)r->pred_len, (long long)r->sequences);
    }
    PS_TRY(ps_cuda_expect(op, "d_weight", &a->d_weight, PS_F32, width * r->pred_len));
    PS_TRY(ps_cuda_expect(op, "d_bias", &a->d_bias, PS_F32, r->pred_len));
    PS_TRY(ps_cuda_expect(op, "z", &a->z, PS_REAL16, r->sequences * width));
    PS_TRY(ps_cuda_expect(op, "dx", &a->dx, PS_REAL16, r->sequences * r->pred_len));
    return ps_cuda_expect(op, "partials", &a->partials, PS_F64, rows * (r->pred_len + 1));
}

/* Whether t is a part of the flat tensor. */
static bool is_part(const struct ps_tensor *flat, const struct ps_tensor *t)
{
    const float *const from = (const float *)flat->data, *const part = (const float *)t->data;
    return part >= from && part + ps_tensor_count(t) <= from + ps_tensor_count(flat);
}

static enum ps_status check_update(struct ps_encoder_small *r, const struct ps_encoder_backward *a)
{
    const char *op = "encoder_backward";
    const struct ps_adamw *u = a->update;
    const int64_t count = ps_tensor_count(&a->gradients);
    r->update = u;
    if (!r->head_gradient || u->parameters.data != a->parameters.data || u->gradients.data != a->gradients.data ||
        u->copy.data != a->weights.data || u->clip_norm > 0.0 || u->skip || u->state != a->head->state ||
        !is_part(&a->gradients, &a->embed->d_weight) || !is_part(&a->gradients, &a->embed->d_bias) ||
        !is_part(&a->gradients, &a->embed->d_position) || !is_part(&a->gradients, &a->head->d_weight) ||
        !is_part(&a->gradients, &a->head->d_bias) || !ps_cuda_aligned(&u->parameters) || !ps_cuda_aligned(&u->gradients) ||
        !ps_cuda_aligned(&u->m) || !ps_cuda_aligned(&u->v) || !ps_cuda_aligned(&u->copy) || u->decayed % 2 != 0) {
        return ps_fail(PS_UNSUPPORTED,
                       "%s (cuda): adamw goes with the head's gradient, over the encoder's own flat tensors, aligned "
                       "to 16 bytes, without clipping or skipping",
                       op);
    }
    PS_TRY(ps_cuda_expect(op, "parameters", &u->parameters, PS_F32, count));
    PS_TRY(ps_cuda_expect(op, "gradients", &u->gradients, PS_F32, count));
    PS_TRY(ps_cuda_expect(op, "m", &u->m, PS_F32, count));
    PS_TRY(ps_cuda_expect(op, "v", &u->v, PS_F64, count));
    PS_TRY(ps_cuda_expect(op, "copy", &u->copy, PS_REAL16, count));
    return ps_cuda_expect(op, "learning_rates", &u->learning_rates, PS_F64, ps_tensor_count(&u->learning_rates));
}

enum ps_status ps_cuda_encoder_forward(const struct ps_kernels *k, const struct ps_encoder_forward *a)
{
    struct ps_encoder_small r = request_of(k, &a->sizes);
    PS_TRY(take(&r, &a->stream, &a->weights, &a->parameters, a->kept));
    enum family family;
    PS_TRY(choose(k, &r, &family));
    if (a->embed) {
        PS_TRY(check_embed_forward(&r, family, a->embed));
    }
    if (a->head) {
        PS_TRY(check_head(&r, a->head));
    }
    PS_TRY(check_workspace(k, &r, family));
    if (family == FLOAT) {
        return ps_encoder_float_forward(k, &r);
    }
    if (family == ROWS) {
        return ps_encoder_rows_forward(k, &r);
    }
    if (family == HALVES) {
        return level_halves::ps_encoder_halves_forward(k, &r);
    }
    if (family == SMALL) {
        ps_cuda(k)->ordered = false; /* `fresh` takes care of it */
        return ps_encoder_small_forward(&r, ps_cuda(k)->stream);
    }
    int64_t rows = r.sequences * r.patches * r.d_model;
    for (int64_t layer = 0; layer < r.layers; layer++) {
        struct ps_encoder_large e = large_of(k, &r, layer);
        PS_TRY(ps_cuda_encoder_large_forward(&e, (char *)r.u + 2 * (layer + 1) * rows));
    }
    return PS_OK;
}

enum ps_status ps_cuda_encoder_backward(const struct ps_kernels *k, const struct ps_encoder_backward *a)
{
    struct ps_encoder_small r = request_of(k, &a->sizes);
    PS_TRY(take(&r, &a->stream, &a->weights, &a->parameters, a->kept));
    r.gradients = (float *)a->gradients.data;
    r.du = a->du.data;
    r.dy = a->dy.data;
    enum family family;
    PS_TRY(choose(k, &r, &family));
    if (a->embed) {
        PS_TRY(check_embed_backward(&r, family, a->embed));
    }
    if (a->head) {
        PS_TRY(check_head_gradient(&r, a->head));
    }
    if (a->update) {
        PS_TRY(check_update(&r, a));
    }
    PS_TRY(check_workspace(k, &r, family));
    if (family == FLOAT) {
        return ps_encoder_float_backward(k, &r);
    }
    if (family == ROWS) {
        return ps_encoder_rows_backward(k, &r);
    }
    if (family == HALVES) {
        return level_halves::ps_encoder_halves_backward(k, &r);
    }
    if (family == SMALL) {
        ps_cuda(k)->ordered =
            a->update != NULL; /* `fresh` takes care of what was; the next one would read early what this one writes */
        return ps_encoder_small_backward(&r, ps_cuda(k)->stream);
    }
    const struct ps_encoder_layout *l = &r.offsets;
    for (int64_t layer = r.layers; layer-- > 0;) {
        struct ps_encoder_large e = large_of(k, &r, layer);
        float *matrix = r.gradients + layer * l->matrix_stride, *vector = r.gradients + layer * l->vector_stride;
        struct ps_encoder_large_gradients g = {matrix + l->w_qkv,     matrix + l->w_o,      matrix + l->w_1,   matrix + l->w_2,
                                               vector + l->ln1_gamma, vector + l->ln1_beta, vector + l->b_qkv, vector + l->b_o,
                                               vector + l->ln2_gamma, vector + l->ln2_beta, vector + l->b_1,   vector + l->b_2,
                                               l->matrix_stride,      l->vector_stride};
        const void *dy = layer == r.layers - 1 ? r.dy : r.du;
        PS_TRY(
            ps_cuda_encoder_large_backward(&e, r.du, dy, &g, ps_cuda(k)->encoder_workspace, ps_cuda(k)->encoder_workspace_bytes));
    }
    return PS_OK;
}

} // namespace PS_REAL16_SPACE
