/* Level `layer`: which kernels run the whole encoder, in order of preference. All are for sm_90; every other shape is refused here
 * and runs at level gemm. d is d_model, e = d / n_heads, N the patches, f d_ff; a family's own limits stand in its plan. Resident:
 * a layer's weights lie on every multiprocessor, and the encoder is one launch each way. Streamed: weights come from L2, in 16 bits
 * a layer a launch. tf32 takes what fp16 does, the layers of it (encoder/tf32.cu), but for d 64, which has a form of its own.
 *
 *     precision    shape                                     kernels                          calls take, at most
 *     bf16, fp16   d 16, e 4, f 128, N 33 to 48              resident/d16_e4_f128.cu          embedding, loss
 *                  d 64, e 16, f 128 or 256, N up to 16      resident/d64_short.cu            embedding, loss, update
 *                  d 16 or 32, N up to 64; d 64, N up to 16  resident/resident.cuh            embedding
 *                  d up to 128, e up to 32, N up to 64       streamed/real16.cuh              layers
 *                  the paper's: d 16, N up to 128, BatchNorm resident/d16_halves.cu           embedding, loss
 *     tf32         d 64, e 16, f 128 or 256, N up to 16      resident/d64_short.cu            layers
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/context.cuh"
#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/tile/windows.cuh"

/* LayerNorm before each branch, gelu by tanh, one rate of dropout. */
static bool is_plain(const struct ps_encoder_request *r)
{
    return r->norm == PS_NORM_LAYER && r->norm_place == PS_NORM_PRE && r->activation == PS_GELU_TANH && !r->residual_attention &&
           r->hidden_dropout.threshold == r->dropout.threshold && r->output_dropout.threshold == r->dropout.threshold;
}

static const struct choice {
    enum ps_precision precision;
    const struct ps_encoder_family *family;
} choices[] =
    {
        {PS_PRECISION_BF16, &ps_encoder_d64_bf16},
        {PS_PRECISION_BF16, &ps_encoder_resident_bf16},
        {PS_PRECISION_BF16, &level_bf16::ps_encoder_streamed},
        {PS_TF32, &ps_encoder_d64_tf32},
        {PS_FP16, &ps_encoder_d64_fp16},
        {PS_FP16, &ps_encoder_resident_fp16},
        {PS_FP16, &level_fp16::ps_encoder_streamed},
},
  others[] = {
      /* of other layers than the plain one */
      {PS_PRECISION_BF16, &ps_encoder_halves_bf16},
      {PS_FP16, &ps_encoder_halves_fp16},
};

/* The first that serves the request; when none does, what the last one asked says. */
static enum ps_status choose(const struct ps_kernels *k, const struct ps_encoder_request *r, struct ps_encoder_plan *plan)
{
    const bool plain = is_plain(r);
    const struct choice *const all = plain ? choices : others;
    const size_t count = plain ? sizeof choices / sizeof *choices : sizeof others / sizeof *others;
    enum ps_status status =
        ps_fail(PS_UNSUPPORTED, "encoder (cuda): no kernels in %s%s", ps_precision_name(k->precision),
                plain ? "" : " for another norm, activation, attention or rates of dropout than the default model's");
    for (size_t i = 0; i < count && status == PS_UNSUPPORTED; i++) {
        const bool fp16 = k->precision == PS_TF32 && all[i].precision == PS_FP16;
        if (fp16 || all[i].precision == k->precision) {
            *plan = {};
            plan->family = all[i].family;
            status = plan->family->plan(k, r, plan);
            if (fp16 && status == PS_OK) {
                ps_encoder_tf32_take_over(r, plan);
            }
        }
    }
    return status;
}

/* What a plan depends on. */
struct plan_key {
    int64_t sequences, patches, d_model, n_heads, d_ff, layers, plain, dropout, norm, norm_place, activation, residual_attention;
};

static struct plan_key key_of(const struct ps_encoder_request *r)
{
    return {r->sequences, r->patches,    r->d_model,    r->n_heads,
            r->d_ff,      r->layers,     is_plain(r),   r->dropout.threshold != 0,
            r->norm,      r->norm_place, r->activation, r->residual_attention};
}

/* A plan for each number of sequences of each model that the table has served. */
struct ps_encoder_planned {
    struct ps_encoder_planned *next;
    struct plan_key key;
    struct ps_encoder_plan plan;
};

static enum ps_status plan_of(const struct ps_kernels *k, const struct ps_encoder_request *r, const struct ps_encoder_plan **plan)
{
    struct ps_cuda_context *c = ps_cuda(k);
    const struct plan_key key = key_of(r);
    for (struct ps_encoder_planned *p = c->encoder_plans; p; p = p->next) {
        if (memcmp(&p->key, &key, sizeof key) == 0) {
            *plan = &p->plan;
            return PS_OK;
        }
    }
    struct ps_encoder_planned *p = (struct ps_encoder_planned *)malloc(sizeof *p);
    if (!p) {
        return ps_fail(PS_DEVICE, "encoder: out of host memory");
    }
    *p = {c->encoder_plans, key, {}};
    const enum ps_status status = choose(k, r, &p->plan);
    if (status != PS_OK) {
        free(p);
        return status;
    }
    c->encoder_plans = p;
    *plan = &p->plan;
    return PS_OK;
}

void ps_cuda_encoder_plans_free(struct ps_cuda_context *c)
{
    while (c->encoder_plans) {
        struct ps_encoder_planned *p = c->encoder_plans;
        c->encoder_plans = p->next;
        free(p->plan.own);
        free(p);
    }
}

static struct ps_encoder_request request_of(const struct ps_kernels *k, const struct ps_encoder_sizes *s)
{
    struct ps_encoder_request e = {};
    static_cast<struct ps_encoder_sizes &>(e) = *s;
    e.workspace = ps_cuda(k)->encoder_workspace;
    e.fresh = ps_cuda(k)->ordered;
    return e;
}

/* A batch shorter than the one that encoder_prepare saw may not need more than that. */
static enum ps_status check_workspace(const struct ps_kernels *k, const struct ps_encoder_request *r,
                                      const struct ps_encoder_plan *plan)
{
    const size_t needed = plan->family->workspace_bytes(k, r, plan), there = ps_cuda(k)->encoder_workspace_bytes;
    return needed <= there ? PS_OK
                           : ps_fail(PS_DEVICE, "encoder (cuda): %lld sequences need %zu bytes of workspace, %zu are there",
                                     (long long)r->sequences, needed, there);
}

static enum ps_status needs_of(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                               const struct ps_encoder_shape *shape, struct ps_encoder_needs *needs, size_t *workspace)
{
    static const char *const spans[] = {"layers", "with the embedding", "with the embedding and the loss", "with the update"};
    struct ps_encoder_request r = request_of(k, sizes);
    r.sequences = shape->sequences;
    r.patches = shape->patches;
    r.d_model = shape->d_model;
    r.seq_len = shape->seq_len;
    r.patch_len = shape->patch_len;
    r.pred_len = shape->pred_len;
    r.other_rate = shape->other_rate;
    const struct ps_encoder_plan *plan;
    PS_TRY(plan_of(k, &r, &plan));
    *workspace = plan->family->workspace_bytes(k, &r, plan);
    needs->kept_bytes = plan->kept_bytes;
    needs->slower = plan->slower;
    needs->fp16_rows = plan->within != NULL;
    const enum ps_encoder_span span = plan->family->span(k, &r, plan);
    needs->span = shape->ends_apart ? PS_SPAN_LAYERS : shape->other_loss && span > PS_SPAN_EMBEDDING ? PS_SPAN_EMBEDDING : span;
    /* Behind a forward with the loss, backward's first kernel lets W_h's gradient in before the next one. */
    needs->room = plan->room && !plan->within && needs->span < PS_SPAN_LOSS;
    snprintf(needs->kernels, sizeof needs->kernels, "%s%s %s, d_model %lld, %lld heads, d_ff %lld, %lld patches, %s", plan->kernels,
             plan->within ? " (fp16 operands)" : "", ps_precision_name(k->precision), (long long)r.d_model, (long long)r.n_heads,
             (long long)r.d_ff, (long long)r.patches, spans[needs->span]);
    return PS_OK;
}

enum ps_status ps_cuda_encoder_choose(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                                      const struct ps_encoder_shape *shape, struct ps_encoder_needs *needs)
{
    size_t workspace;
    return needs_of(k, sizes, shape, needs, &workspace);
}

enum ps_status ps_cuda_encoder_prepare(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                                       const struct ps_encoder_shape *shape, struct ps_encoder_needs *needs)
{
    struct ps_cuda_context *c = ps_cuda(k);
    size_t workspace;
    PS_TRY(needs_of(k, sizes, shape, needs, &workspace));
    if (workspace > c->encoder_workspace_bytes) {
        if (c->encoder_workspace) {
            k->device->release(k->device, c->encoder_workspace, c->encoder_workspace_bytes);
            c->encoder_workspace = NULL;
            c->encoder_workspace_bytes = 0;
        }
        PS_TRY(k->device->allocate(k->device, workspace, &c->encoder_workspace)); /* zeroed, as families ask */
        c->encoder_workspace_bytes = workspace;
    }
    return PS_OK;
}

/* The stream and the parameters to the request. */
static enum ps_status take(const struct ps_kernels *k, struct ps_encoder_request *r, const struct ps_tensor *stream,
                           const struct ps_tensor *weights, const struct ps_tensor *parameters, void *kept, size_t kept_bytes)
{
    if (stream->rank != 4 || stream->size[0] != r->layers + 1 || stream->type != k->real || weights->type != k->real ||
        parameters->type != PS_F32 || !ps_tensor_contiguous(stream)) {
        return ps_fail(PS_UNSUPPORTED,
                       "encoder: stream must be [%lld, S, N, d] of the activations' type, weights too, parameters float32",
                       (long long)r->layers + 1);
    }
    r->sequences = stream->size[1];
    r->patches = stream->size[2];
    r->d_model = stream->size[3];
    if (r->dropout.threshold && (uint64_t)r->dropout.first * 8 % (uint64_t)r->d_model != 0) {
        return ps_fail(PS_UNSUPPORTED, "encoder (cuda): a part that begins within a row of %lld, at block %u",
                       (long long)r->d_model, r->dropout.first);
    }
    r->u = stream->data;
    r->weights = weights->data;
    r->parameters = (const float *)parameters->data;
    r->kept = kept;
    r->kept_bytes = kept_bytes;
    return PS_OK;
}

/* The embedding is the request's, and the whole is served. */
static enum ps_status check_embed(const struct ps_kernels *k, struct ps_encoder_request *r, const struct ps_encoder_plan *plan,
                                  const struct ps_dropout *dropout)
{
    const struct ps_dropout *of = &r->dropout;
    r->other_rate = dropout->threshold != of->threshold;
    if (plan->family->span(k, r, plan) < PS_SPAN_EMBEDDING || dropout->seed != of->seed || dropout->state != of->state ||
        ((dropout->threshold || of->threshold) && dropout->first != of->first)) {
        return ps_fail(PS_UNSUPPORTED, "encoder: windows of %lld and patches of %lld are not embedded for d_model %lld",
                       (long long)r->seq_len, (long long)r->patch_len, (long long)r->d_model);
    }
    return PS_OK;
}

static enum ps_status check_embed_forward(const struct ps_kernels *k, struct ps_encoder_request *r,
                                          const struct ps_encoder_plan *plan, const struct ps_embed_forward *a)
{
    const char *op = "encoder_forward";
    struct ps_cuda_windows windows;
    PS_TRY(ps_windows_make(op, "inputs", &a->inputs, &a->indices, a->state, a->batch, &windows));
    const int64_t channels = a->inputs.size[1], rows = r->sequences * r->patches;
    r->embed = a;
    r->seq_len = a->inputs.size[2];
    r->patch_len = ps_cuda_width(&a->patches);
    PS_TRY(check_embed(k, r, plan, &a->dropout));
    if (a->u.data != r->u || channels < 1 || a->batch * channels != r->sequences || a->stride < 1 ||
        (r->seq_len - r->patch_len) / a->stride + 1 + (a->pad_end ? 1 : 0) != r->patches) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): patches of %lld every %lld of %lld x %lld windows of %lld are not [%lld, %lld]",
                       op, (long long)r->patch_len, (long long)a->stride, (long long)a->batch, (long long)channels,
                       (long long)r->seq_len, (long long)r->sequences, (long long)r->patches);
    }
    PS_TRY(ps_cuda_expect(op, "patches", &a->patches, k->real, rows * r->patch_len));
    PS_TRY(ps_cuda_expect(op, "mean", &a->mean, PS_F32, r->sequences));
    PS_TRY(ps_cuda_expect(op, "std", &a->std, PS_F32, r->sequences));
    PS_TRY(ps_cuda_expect(op, "weight", &a->weight, k->real, r->patch_len * r->d_model));
    PS_TRY(ps_cuda_expect(op, "bias", &a->bias, PS_F32, r->d_model));
    return ps_cuda_expect(op, "position", &a->position, PS_F32, r->patches * r->d_model);
}

static enum ps_status check_head(const struct ps_kernels *k, struct ps_encoder_request *r, const struct ps_encoder_plan *plan,
                                 const struct ps_head_step *a)
{
    const char *op = "encoder_forward";
    const int64_t rows = a->partials.rank > 0 ? a->partials.size[0] : 0, width = r->patches * r->d_model;
    struct ps_cuda_windows windows;
    PS_TRY(ps_windows_make(op, "targets", &a->targets, &a->indices, a->state, a->batch, &windows));
    r->head = a;
    r->pred_len = a->targets.size[2];
    if (!r->embed || plan->family->span(k, r, plan) < PS_SPAN_LOSS || a->state != r->embed->state || a->batch != r->embed->batch ||
        a->targets.size[1] != r->embed->inputs.size[1] || a->mean.data != r->embed->mean.data ||
        a->std.data != r->embed->std.data || rows < (r->sequences < PS_PARTIAL_BLOCKS ? r->sequences : PS_PARTIAL_BLOCKS) ||
        !ps_cuda_aligned(&a->weight) ||
        a->z.data != (const char *)r->u + ps_type_bytes(k->real) * r->layers * r->sequences * width) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a head of %lld x %lld with %lld rows of sums is not served with %lld windows",
                       op, (long long)width, (long long)r->pred_len, (long long)rows, (long long)a->batch);
    }
    PS_TRY(ps_cuda_expect(op, "dz", &a->dz, k->real, r->sequences * width));
    PS_TRY(ps_cuda_expect(op, "dx", &a->dx, k->real, r->sequences * r->pred_len));
    PS_TRY(ps_cuda_expect(op, "partials", &a->partials, PS_F64, rows * (r->pred_len + 1)));
    PS_TRY(ps_cuda_expect(op, "weight", &a->weight, k->real, width * r->pred_len));
    return ps_cuda_expect(op, "bias", &a->bias, PS_F32, r->pred_len);
}

static enum ps_status check_embed_backward(const struct ps_kernels *k, struct ps_encoder_request *r,
                                           const struct ps_encoder_plan *plan, const struct ps_embed_backward *a)
{
    const char *op = "encoder_backward";
    r->embed_gradient = a;
    r->patch_len = ps_cuda_width(&a->patches);
    r->seq_len = r->patch_len; /* the windows are not needed again */
    PS_TRY(check_embed(k, r, plan, &a->dropout));
    PS_TRY(ps_cuda_expect(op, "patches", &a->patches, k->real, r->sequences * r->patches * r->patch_len));
    PS_TRY(ps_cuda_expect(op, "d_weight", &a->d_weight, PS_F32, r->patch_len * r->d_model));
    PS_TRY(ps_cuda_expect(op, "d_bias", &a->d_bias, PS_F32, r->d_model));
    return ps_cuda_expect(op, "d_position", &a->d_position, PS_F32, r->patches * r->d_model);
}

static enum ps_status check_head_gradient(const struct ps_kernels *k, struct ps_encoder_request *r,
                                          const struct ps_encoder_plan *plan, const struct ps_head_gradient *a)
{
    const char *op = "encoder_backward";
    const int64_t rows = a->partials.rank > 0 ? a->partials.size[0] : 0, width = r->patches * r->d_model;
    r->head_gradient = a;
    r->pred_len = ps_tensor_count(&a->d_bias);
    if (!r->embed_gradient || plan->family->span(k, r, plan) < PS_SPAN_UPDATE || !a->state ||
        a->z.data != (const char *)r->u + 2 * r->layers * r->sequences * width || !ps_cuda_aligned(&a->d_weight)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): the gradient of a head of %lld x %lld is not served with %lld sequences", op,
                       (long long)width, (long long)r->pred_len, (long long)r->sequences);
    }
    PS_TRY(ps_cuda_expect(op, "d_weight", &a->d_weight, PS_F32, width * r->pred_len));
    PS_TRY(ps_cuda_expect(op, "d_bias", &a->d_bias, PS_F32, r->pred_len));
    PS_TRY(ps_cuda_expect(op, "z", &a->z, k->real, r->sequences * width));
    PS_TRY(ps_cuda_expect(op, "dx", &a->dx, k->real, r->sequences * r->pred_len));
    return ps_cuda_expect(op, "partials", &a->partials, PS_F64, rows * (r->pred_len + 1));
}

/* Whether t is a part of the flat tensor. */
static bool is_part(const struct ps_tensor *flat, const struct ps_tensor *t)
{
    const float *const from = (const float *)flat->data, *const part = (const float *)t->data;
    return part >= from && part + ps_tensor_count(t) <= from + ps_tensor_count(flat);
}

static enum ps_status check_update(const struct ps_kernels *k, struct ps_encoder_request *r, const struct ps_encoder_backward *a)
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
    PS_TRY(ps_cuda_expect(op, "copy", &u->copy, k->real, count));
    return ps_cuda_expect(op, "learning_rates", &u->learning_rates, PS_F64, ps_tensor_count(&u->learning_rates));
}

enum ps_status ps_cuda_encoder_forward(const struct ps_kernels *k, const struct ps_encoder_forward *a)
{
    struct ps_encoder_request r = request_of(k, &a->sizes);
    const struct ps_encoder_plan *plan;
    PS_TRY(take(k, &r, &a->stream, &a->weights, &a->parameters, a->kept, a->kept_bytes));
    PS_TRY(plan_of(k, &r, &plan));
    if (a->embed) {
        PS_TRY(check_embed_forward(k, &r, plan, a->embed));
    }
    if (a->head) {
        PS_TRY(check_head(k, &r, plan, a->head));
    }
    PS_TRY(check_workspace(k, &r, plan));
    return plan->family->forward(k, &r, plan);
}

enum ps_status ps_cuda_encoder_backward(const struct ps_kernels *k, const struct ps_encoder_backward *a)
{
    struct ps_encoder_request r = request_of(k, &a->sizes);
    const struct ps_encoder_plan *plan;
    PS_TRY(take(k, &r, &a->stream, &a->weights, &a->parameters, a->kept, a->kept_bytes));
    PS_TRY(plan_of(k, &r, &plan));
    r.gradients = (float *)a->gradients.data;
    r.du = a->du.data;
    r.headed = a->headed;
    r.dy = a->dy.data;
    if (a->embed) {
        PS_TRY(check_embed_backward(k, &r, plan, a->embed));
    }
    if (a->head) {
        PS_TRY(check_head_gradient(k, &r, plan, a->head));
    }
    if (a->update) {
        PS_TRY(check_update(k, &r, a));
    }
    PS_TRY(check_workspace(k, &r, plan));
    return plan->family->backward(k, &r, plan);
}
