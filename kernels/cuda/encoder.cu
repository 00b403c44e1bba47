/* Level `layer`: the table's fused encoder entries. Two families of kernels serve them: encoder_small.cu, the whole encoder in one
 * launch each way, where a layer's weights stay on one multiprocessor; encoder_large.cu, a layer a launch with weights streamed
 * from L2. Both are for sm_90 and bf16; every other case is refused here and runs at level gemm. */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/encoder_large.cuh"
#include "kernels/cuda/encoder_small.cuh"

/* What both directions are asked for. */
struct request {
    const struct ps_encoder_sizes *sizes;
    int64_t sequences, patches, d_model;
    void *stream; /* bf16 [layers + 1, S, N, d] */
    const void *weights;
    const float *parameters;
    float *gradients;
    void *du;
    const void *dy;
    void *kept;
};

static struct ps_encoder_small small_of(const struct ps_kernels *k, const struct request *r)
{
    const struct ps_encoder_sizes *s = r->sizes;
    const struct ps_encoder_layout *l = &s->layout;
    struct ps_encoder_small e = {};
    e.sequences = r->sequences;
    e.patches = r->patches;
    e.d_model = r->d_model;
    e.n_heads = s->n_heads;
    e.d_ff = s->d_ff;
    e.layers = s->layers;
    e.offsets = *l;
    e.weights = r->weights;
    e.parameters = r->parameters;
    e.gradients = r->gradients;
    e.u = r->stream;
    e.kept = r->kept;
    e.dy = r->dy;
    e.du = r->du;
    e.workspace = ps_cuda(k)->encoder_workspace;
    e.dropout = s->dropout;
    e.epsilon = s->epsilon;
    return e;
}

/* The large family keeps, for each layer, r (bf16 [S, N, d]), the logarithm of softmax's sums (fp32 [S, h, N]) and dropout's bits.
 */
static size_t large_kept_bytes(const struct ps_encoder_large *e)
{
    int64_t rows = e->sequences * e->patches;
    size_t one = (size_t)(2 * rows * e->d_model + 4 * rows * e->n_heads) + ps_cuda_encoder_large_kept_bytes(e);
    return (one + 255) / 256 * 256;
}

static struct ps_encoder_large large_of(const struct ps_kernels *k, const struct request *r, int64_t layer)
{
    const struct ps_encoder_sizes *s = r->sizes;
    const struct ps_encoder_layout *l = &s->layout;
    int64_t rows = r->sequences * r->patches * r->d_model, matrix = layer * l->matrix_stride, vector = layer * l->vector_stride;
    const char *weights = (const char *)r->weights;
    struct ps_encoder_large e = {};
    e.sequences = r->sequences;
    e.patches = r->patches;
    e.d_model = r->d_model;
    e.n_heads = s->n_heads;
    e.d_ff = s->d_ff;
    e.epsilon = (float)s->epsilon;
    e.attention = e.hidden = e.output = s->dropout;
    e.attention.site += 3 * (uint32_t)layer;
    e.hidden.site += 3 * (uint32_t)layer + 1;
    e.output.site += 3 * (uint32_t)layer + 2;
    e.u = (const char *)r->stream + 2 * layer * rows;
    e.residual = (char *)r->kept + (size_t)layer * large_kept_bytes(&e);
    e.softmax = (float *)((char *)e.residual + 2 * rows);
    e.kept = e.softmax + r->sequences * r->patches * s->n_heads;
    e.w_qkv = weights + 2 * (l->w_qkv + matrix);
    e.w_o = weights + 2 * (l->w_o + matrix);
    e.w_1 = weights + 2 * (l->w_1 + matrix);
    e.w_2 = weights + 2 * (l->w_2 + matrix);
    const float *p = r->parameters + vector;
    e.vectors = {p + l->ln1_gamma, p + l->ln1_beta, p + l->b_qkv, p + l->b_o,
                 p + l->ln2_gamma, p + l->ln2_beta, p + l->b_1,   p + l->b_2};
    e.context = ps_cuda(k);
    return e;
}

/* Which family: narrow models, and short sequences of which one tile holds several, are the small one's. */
static enum ps_status choose(const struct ps_kernels *k, const struct request *r, int *small)
{
    struct ps_encoder_small s = small_of(k, r);
    struct ps_encoder_large l = large_of(k, r, 0);
    int narrow = r->d_model <= 32 || r->patches <= 16;
    *small = narrow;
    enum ps_status status = narrow ? ps_encoder_small_supported(&s) : ps_cuda_encoder_large_supported(&l);
    if (status == PS_UNSUPPORTED) {
        *small = !narrow;
        status = narrow ? ps_cuda_encoder_large_supported(&l) : ps_encoder_small_supported(&s);
    }
    return status;
}

extern "C" enum ps_status ps_cuda_encoder_prepare(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                                                  int64_t sequences, int64_t patches, int64_t d_model, size_t *kept_bytes)
{
    struct ps_cuda_context *c = ps_cuda(k);
    struct request r = {};
    r.sizes = sizes;
    r.sequences = sequences;
    r.patches = patches;
    r.d_model = d_model;
    int small;
    PS_TRY(choose(k, &r, &small));
    struct ps_encoder_small s = small_of(k, &r);
    struct ps_encoder_large l = large_of(k, &r, 0);
    size_t workspace = small ? ps_encoder_small_workspace_bytes(&s) : ps_cuda_encoder_large_workspace(&l);
    *kept_bytes = small ? ps_encoder_small_kept_bytes(&s) : large_kept_bytes(&l) * (size_t)sizes->layers;
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

static struct request request_of(const struct ps_encoder_sizes *sizes, const struct ps_tensor *stream,
                                 const struct ps_tensor *weights, const struct ps_tensor *parameters, void *kept)
{
    struct request r = {};
    r.sizes = sizes;
    r.sequences = stream->size[1];
    r.patches = stream->size[2];
    r.d_model = stream->size[3];
    r.stream = stream->data;
    r.weights = weights->data;
    r.parameters = (const float *)parameters->data;
    r.kept = kept;
    return r;
}

static enum ps_status check(const struct ps_encoder_sizes *sizes, const struct ps_tensor *stream, const struct ps_tensor *weights,
                            const struct ps_tensor *parameters)
{
    if (stream->rank != 4 || stream->size[0] != sizes->layers + 1 || stream->type != PS_BF16 || weights->type != PS_BF16 ||
        parameters->type != PS_F32 || !ps_tensor_contiguous(stream)) {
        return ps_fail(PS_UNSUPPORTED, "encoder: stream must be bf16 [%lld, S, N, d], weights bf16, parameters float32",
                       (long long)sizes->layers + 1);
    }
    return PS_OK;
}

extern "C" enum ps_status ps_cuda_encoder_forward(const struct ps_kernels *k, const struct ps_encoder_forward *a)
{
    PS_TRY(check(&a->sizes, &a->stream, &a->weights, &a->parameters));
    struct request r = request_of(&a->sizes, &a->stream, &a->weights, &a->parameters, a->kept);
    int small;
    PS_TRY(choose(k, &r, &small));
    if (small) {
        struct ps_encoder_small e = small_of(k, &r);
        return ps_encoder_small_forward(&e, ps_cuda(k)->stream);
    }
    int64_t rows = r.sequences * r.patches * r.d_model;
    for (int64_t layer = 0; layer < a->sizes.layers; layer++) {
        struct ps_encoder_large e = large_of(k, &r, layer);
        PS_TRY(ps_cuda_encoder_large_forward(&e, (char *)r.stream + 2 * (layer + 1) * rows));
    }
    return PS_OK;
}

extern "C" enum ps_status ps_cuda_encoder_backward(const struct ps_kernels *k, const struct ps_encoder_backward *a)
{
    PS_TRY(check(&a->sizes, &a->stream, &a->weights, &a->parameters));
    struct request r = request_of(&a->sizes, &a->stream, &a->weights, &a->parameters, a->kept);
    r.gradients = (float *)a->gradients.data;
    r.du = a->du.data;
    r.dy = a->dy.data;
    int small;
    PS_TRY(choose(k, &r, &small));
    if (small) {
        struct ps_encoder_small e = small_of(k, &r);
        return ps_encoder_small_backward(&e, ps_cuda(k)->stream);
    }
    const struct ps_encoder_layout *l = &a->sizes.layout;
    for (int64_t layer = a->sizes.layers; layer-- > 0;) {
        struct ps_encoder_large e = large_of(k, &r, layer);
        float *matrix = r.gradients + layer * l->matrix_stride, *vector = r.gradients + layer * l->vector_stride;
        struct ps_encoder_large_gradients g = {matrix + l->w_qkv,     matrix + l->w_o,      matrix + l->w_1,   matrix + l->w_2,
                                               vector + l->ln1_gamma, vector + l->ln1_beta, vector + l->b_qkv, vector + l->b_o,
                                               vector + l->ln2_gamma, vector + l->ln2_beta, vector + l->b_1,   vector + l->b_2};
        const void *dy = layer == a->sizes.layers - 1 ? r.dy : r.du;
        PS_TRY(
            ps_cuda_encoder_large_backward(&e, r.du, dy, &g, ps_cuda(k)->encoder_workspace, ps_cuda(k)->encoder_workspace_bytes));
    }
    return PS_OK;
}
