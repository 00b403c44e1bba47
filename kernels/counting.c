#include <stdio.h>
#include <stdlib.h>

#include "kernels/kernels.h"

static const struct {
    const char *name;
    enum ps_kind kind;
    int tensors;
    double flops; /* an element of the largest tensor */
} operations[PS_OP_COUNT] = {
#define PS_X(name, kind, tensors, flops) {#name, kind, tensors, flops},
    PS_KERNEL_LIST(PS_X)
#undef PS_X
};

/* The tensors can be read off the front of any argument struct. */
#define PS_X(name, kind, tensors, flops) \
    _Static_assert(sizeof(struct ps_##name) >= (tensors) * sizeof(struct ps_tensor), "tensors of " #name);
PS_KERNEL_LIST(PS_X)
#undef PS_X

const char *ps_op_name(enum ps_op op)
{
    return operations[op].name;
}

enum ps_kind ps_op_kind(enum ps_op op)
{
    return operations[op].kind;
}

int ps_op_tensors(enum ps_op op)
{
    return operations[op].tensors;
}

/* Elements of tensor i that the call touches: 0 when absent; a repeated element once; of a table that the state's counters point
 * into, what is pointed at. */
static double elements(enum ps_op op, const void *arguments, int i)
{
    const struct ps_tensor *t = (const struct ps_tensor *)arguments + i;
    if (!t->data) {
        return 0;
    }
    double count = 1;
    for (int dim = 0; dim < t->rank; dim++) {
        if (t->stride[dim] != 0) {
            count *= (double)t->size[dim];
        }
    }
    if (op == PS_OP_gather_patches && i >= 3) { /* inputs, indices */
        count *= (double)((const struct ps_gather_patches *)arguments)->batch / (double)t->size[0];
    } else if (op == PS_OP_gather_targets && i >= 1) { /* targets, indices, inputs */
        count *= (double)((const struct ps_gather_targets *)arguments)->batch / (double)t->size[0];
    } else if (op == PS_OP_embed_forward && (i == 4 || i == 5)) { /* inputs, indices */
        count *= (double)((const struct ps_embed_forward *)arguments)->batch / (double)t->size[0];
    } else if (op == PS_OP_head_step && i >= 8) { /* targets, indices */
        count *= (double)((const struct ps_head_step *)arguments)->batch / (double)t->size[0];
    } else if (op == PS_OP_window_loss && i >= 6) { /* targets, indices */
        count *= (double)((const struct ps_window_loss *)arguments)->batch / (double)t->size[0];
    } else if (op == PS_OP_forecast_error && i == 0) { /* one slot */
        count = 2;
    } else if (op == PS_OP_adamw && i == 4) { /* one learning rate */
        count = 1;
    }
    return count;
}

/* Tensor i is read and written by the call, under one name. */
static int in_place(enum ps_op op, const void *arguments, int i)
{
    switch (op) {
    case PS_OP_gemm:
        return i == 0 && ((const struct ps_gemm *)arguments)->beta != 0;
    case PS_OP_reduce:
        return i == 0 && ((const struct ps_reduce *)arguments)->accumulate;
    case PS_OP_bias_add:
    case PS_OP_bias_grad:
    case PS_OP_head_sums:
    case PS_OP_count_observed:
        return i == 0;
    case PS_OP_embed_backward:
        return i < 3;
    case PS_OP_gemm_gradient:
        return i < 2;
    case PS_OP_feed_forward_backward:
        return i > 0 && i < 5;
    case PS_OP_layernorm_backward:
    case PS_OP_batchnorm_backward:
    case PS_OP_channel_affine_backward:
        return i == 1 || i == 2;
    case PS_OP_batchnorm_statistics:
    case PS_OP_batchnorm_join:
        return i == 2 || i == 3;
    case PS_OP_bias_residual_statistics:
        return i == 3 || i == 4;
    case PS_OP_gemm_finish:
        return i == 3 || i == 4 || i == 7 || i == 8 || i == 18;
    case PS_OP_adamw:
        return i < 4;
    case PS_OP_batchnorm_unfold:
        return i < 4;
    case PS_OP_unpad_heads:
        return 1;
    case PS_OP_encoder_backward:
        return i == 1;
    default:
        return 0;
    }
}

/* GEMMs of the layers' forward (docs/design.md section 3): w_qkv, w_o, w_1, w_2 and the two of attention. */
static double encoder_flops(const struct ps_tensor *stream, const struct ps_encoder_sizes *sizes)
{
    double sequences = (double)stream->size[1], patches = (double)stream->size[2], d = (double)stream->size[3],
           f = (double)sizes->d_ff;
    double rows = sequences * patches;
    return (double)sizes->layers *
           (2 * rows * d * (3 * d) + 2 * rows * d * d + 4 * rows * d * f + 4 * sequences * patches * patches * d);
}

/* The rest of the head inside an encoder's backward: a product, and head_sums. */
static struct ps_head_sums head_sums_of(const struct ps_head_gradient *head)
{
    return (struct ps_head_sums){.d_bias = head->d_bias, .partials = head->partials};
}

static double head_flops(const struct ps_head_gradient *head)
{
    const struct ps_head_sums sums = head_sums_of(head);
    return 2 * (double)ps_tensor_count(&head->z) * (double)ps_tensor_count(&head->d_bias) + ps_op_flops(PS_OP_head_sums, &sums);
}

static double head_bytes(const struct ps_head_gradient *head)
{
    const struct ps_head_sums sums = head_sums_of(head);
    return 2 * (double)(ps_tensor_count(&head->d_weight) * (int64_t)ps_type_bytes(head->d_weight.type)) +
           (double)(ps_tensor_count(&head->dx) * (int64_t)ps_type_bytes(head->dx.type)) + ps_op_bytes(PS_OP_head_sums, &sums);
}

double ps_op_flops(enum ps_op op, const void *arguments)
{
    if (op == PS_OP_gemm) {
        const struct ps_gemm *gemm = arguments;
        return 2 * (double)ps_tensor_count(&gemm->c) * (double)gemm->a.size[gemm->a.rank - 1];
    }
    if (op == PS_OP_gemm_bias) {
        const struct ps_gemm_bias *gemm = arguments;
        return 2 * (double)ps_tensor_count(&gemm->c) * (double)gemm->a.size[1];
    }
    if (op == PS_OP_gemm_finish) {
        const struct ps_gemm_finish *gemm = arguments;
        return 2 * (double)ps_tensor_count(&gemm->c) * (double)gemm->a.size[1];
    }
    if (op == PS_OP_gemm_gradient) {
        const struct ps_gemm_gradient *gemm = arguments;
        return 2 * (double)ps_tensor_count(&gemm->dw) * (double)gemm->x.size[0];
    }
    if (op == PS_OP_attention || op == PS_OP_attention_backward) { /* two products; five, the scores' own again among them */
        const struct ps_tensor *q = op == PS_OP_attention ? &((const struct ps_attention *)arguments)->q
                                                          : &((const struct ps_attention_backward *)arguments)->q;
        return (op == PS_OP_attention ? 4 : 10) * (double)ps_tensor_count(q) * (double)q->size[2];
    }
    if (op == PS_OP_feed_forward) {
        const struct ps_feed_forward *feed = arguments;
        return 2 * (double)feed->x.size[0] * (double)(ps_tensor_count(&feed->w_1) + ps_tensor_count(&feed->w_2));
    }
    if (op == PS_OP_feed_forward_backward) { /* two products for each of the forward's, and w_1's again */
        const struct ps_feed_forward_backward *feed = arguments;
        return 2 * (double)feed->x.size[0] * (double)(3 * ps_tensor_count(&feed->w_1) + 2 * ps_tensor_count(&feed->w_2));
    }
    if (op == PS_OP_encoder_forward) {
        const struct ps_encoder_forward *encoder = arguments;
        return encoder_flops(&encoder->stream, &encoder->sizes) +
               (encoder->embed ? ps_op_flops(PS_OP_embed_forward, encoder->embed) : 0) +
               (encoder->head ? ps_op_flops(PS_OP_head_step, encoder->head) : 0);
    }
    if (op == PS_OP_encoder_backward) {
        /* The forward again, and two products for each of its own. */
        const struct ps_encoder_backward *encoder = arguments;
        return 3 * encoder_flops(&encoder->stream, &encoder->sizes) +
               (encoder->embed ? ps_op_flops(PS_OP_embed_backward, encoder->embed) : 0) +
               (encoder->head ? head_flops(encoder->head) : 0) + (encoder->update ? ps_op_flops(PS_OP_adamw, encoder->update) : 0);
    }
    /* Products of the ends. */
    if (op == PS_OP_embed_forward) {
        const struct ps_embed_forward *embed = arguments;
        return 2 * (double)ps_tensor_count(&embed->patches) * (double)ps_tensor_count(&embed->bias);
    }
    if (op == PS_OP_embed_backward) {
        const struct ps_embed_backward *embed = arguments;
        return 2 * (double)ps_tensor_count(&embed->patches) * (double)ps_tensor_count(&embed->d_bias);
    }
    if (op == PS_OP_head_step) {
        const struct ps_head_step *head = arguments;
        return 4 * (double)ps_tensor_count(&head->z) * (double)ps_tensor_count(&head->bias);
    }
    double largest = 0;
    for (int i = 0; i < operations[op].tensors; i++) {
        double count = elements(op, arguments, i);
        largest = count > largest ? count : largest;
    }
    return operations[op].flops * largest;
}

double ps_op_bytes(enum ps_op op, const void *arguments)
{
    double bytes = 0;
    for (int i = 0; i < operations[op].tensors; i++) {
        const struct ps_tensor *t = (const struct ps_tensor *)arguments + i;
        bytes += elements(op, arguments, i) * (double)ps_type_bytes(t->type) * (in_place(op, arguments, i) ? 2 : 1);
    }
    /* Of the ends inside an encoder what is not the encoder's: all but u, z and du. */
    if (op == PS_OP_encoder_forward) {
        const struct ps_encoder_forward *encoder = arguments;
        if (encoder->embed) {
            struct ps_embed_forward embed = *encoder->embed;
            embed.u.data = NULL;
            bytes += ps_op_bytes(PS_OP_embed_forward, &embed);
        }
        if (encoder->head) {
            struct ps_head_step head = *encoder->head;
            head.z.data = NULL;
            bytes += ps_op_bytes(PS_OP_head_step, &head);
        }
    } else if (op == PS_OP_encoder_backward) {
        const struct ps_encoder_backward *encoder = arguments;
        if (encoder->embed) {
            struct ps_embed_backward embed = *encoder->embed;
            embed.du.data = NULL;
            bytes += ps_op_bytes(PS_OP_embed_backward, &embed);
        }
        bytes += encoder->head ? head_bytes(encoder->head) : 0;
        if (encoder->update) { /* gradients, parameters and weights are the encoder's, but written too */
            struct ps_adamw update = *encoder->update;
            update.gradients.data = NULL;
            bytes += ps_op_bytes(PS_OP_adamw, &update) -
                     (double)(ps_tensor_count(&update.parameters) * (int64_t)ps_type_bytes(update.parameters.type));
        }
    }
    return bytes;
}

void ps_op_shapes(enum ps_op op, const void *arguments, char text[PS_SHAPES_TEXT])
{
    const struct ps_tensor *tensor = arguments;
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < ps_op_tensors(op) && used + 1 < PS_SHAPES_TEXT; i++) {
        if (!tensor[i].data) {
            continue;
        }
        for (int j = 0; j < tensor[i].rank && used + 1 < PS_SHAPES_TEXT; j++) {
            used += (size_t)snprintf(text + used, PS_SHAPES_TEXT - used, "%s%lld%s",
                                     j      ? ","
                                     : used ? " ["
                                            : "[",
                                     (long long)tensor[i].size[j], j + 1 == tensor[i].rank ? "]" : "");
        }
    }
}

enum ps_status ps_op_result(enum ps_op op, const void *arguments, enum ps_status status)
{
    char shapes[PS_SHAPES_TEXT];
    if (status != PS_DEVICE) {
        return status;
    }
    ps_op_shapes(op, arguments, shapes);
    return ps_fail(PS_DEVICE, "%s %s: %s", ps_op_name(op), shapes, ps_error_message());
}

/* ---- a table around another ---- */

struct hooked {
    const struct ps_kernels *inner;
    ps_hook *hook;
    void *argument;
};

#define PS_X(name, kind, tensors, flops)                                                                    \
    static enum ps_status hooked_##name(const struct ps_kernels *k, const struct ps_##name *arguments)      \
    {                                                                                                       \
        const struct hooked *h = k->context;                                                                \
        h->hook(h->argument, PS_OP_##name, arguments, 0);                                                   \
        enum ps_status status = ps_op_result(PS_OP_##name, arguments, h->inner->name(h->inner, arguments)); \
        if (status != PS_UNSUPPORTED) {                                                                     \
            h->hook(h->argument, PS_OP_##name, arguments, 1);                                               \
        }                                                                                                   \
        return status;                                                                                      \
    }
PS_KERNEL_LIST(PS_X)
#undef PS_X

static enum ps_status hooked_beside(const struct ps_kernels *k, enum ps_beside what)
{
    const struct hooked *h = k->context;
    return h->inner->beside(h->inner, what);
}

/* The first has the time of all. */
static enum ps_status hooked_gemm_gradients(const struct ps_kernels *k, const struct ps_gemm_gradient *each, int count)
{
    const struct hooked *h = k->context;
    enum ps_status status = PS_OK;
    for (int i = 0; i < count; i++) {
        h->hook(h->argument, PS_OP_gemm_gradient, &each[i], 0);
        if (i == 0) {
            status = ps_op_result(PS_OP_gemm_gradient, each, h->inner->gemm_gradients(h->inner, each, count));
        }
        h->hook(h->argument, PS_OP_gemm_gradient, &each[i], 1);
    }
    return status;
}

static enum ps_status hooked_later_sums(const struct ps_kernels *k, void *memory, size_t bytes)
{
    const struct hooked *h = k->context;
    return h->inner->later_sums(h->inner, memory, bytes);
}

static const char *hooked_way(const struct ps_kernels *k, enum ps_op op, const void *arguments)
{
    const struct hooked *h = k->context;
    return h->inner->way(h->inner, op, arguments);
}

static void hooked_close(struct ps_kernels *k)
{
    free(k->context);
    free(k);
}

enum ps_status ps_kernels_hooked(const struct ps_kernels *inner, ps_hook *hook, void *argument, struct ps_kernels **kernels)
{
    struct ps_kernels *k = malloc(sizeof *k);
    struct hooked *h = malloc(sizeof *h);
    if (!k || !h) {
        free(k);
        free(h);
        return ps_fail(PS_DEVICE, "hooked kernels: out of memory");
    }
    *h = (struct hooked){.inner = inner, .hook = hook, .argument = argument};
    *k = *inner;
    k->context = h;
    k->close = hooked_close;
    k->tune = NULL; /* the inner table's own business */
    k->tuning = NULL;
    k->way = inner->way ? hooked_way : NULL;
    k->beside = inner->beside ? hooked_beside : NULL;
    k->gemm_gradients = inner->gemm_gradients ? hooked_gemm_gradients : NULL;
    k->later_sums = inner->later_sums ? hooked_later_sums : NULL;
#define PS_X(name, kind, tensors, flops) k->name = inner->name ? hooked_##name : NULL;
    PS_KERNEL_LIST(PS_X)
#undef PS_X
    *kernels = k;
    return PS_OK;
}

void ps_count_hook(void *counts, enum ps_op op, const void *operation_arguments, int after)
{
    struct ps_counts *c = counts;
    if (!after) {
        return;
    }
    c->calls[op]++;
    c->flops[op] += ps_op_flops(op, operation_arguments);
    c->bytes[op] += ps_op_bytes(op, operation_arguments);
}

int64_t ps_counts_calls(const struct ps_counts *counts, enum ps_kind kind)
{
    int64_t calls = 0;
    for (int op = 0; op < PS_OP_COUNT; op++) {
        calls += operations[op].kind == kind ? counts->calls[op] : 0;
    }
    return calls;
}

int ps_counts_kinds(const struct ps_counts *counts, enum ps_kind kind)
{
    int kinds = 0;
    for (int op = 0; op < PS_OP_COUNT; op++) {
        kinds += operations[op].kind == kind && counts->calls[op] > 0;
    }
    return kinds;
}
