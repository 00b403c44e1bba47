/* Opens the table of operations on CUDA, and what its entries check their tensors with. */
#include <new>

#include <string.h>

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/context.cuh"

#ifdef PS_FUSED_ENCODER
static const bool fused_encoder = true;
#else
static const bool fused_encoder = false;
#endif
static const size_t workspace_bytes = (size_t)32 << 20,
                    beside_bytes = (size_t)4 << 20; /* of what runs beside: sums of few columns */

int64_t ps_cuda_width(const struct ps_tensor *t)
{
    return t->rank > 0 ? t->size[t->rank - 1] : 1;
}

enum ps_status ps_cuda_expect(const char *op, const char *name, const struct ps_tensor *t, enum ps_type type, int64_t count)
{
    if (!t->data && count > 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s is absent, %lld elements are needed", op, name, (long long)count);
    }
    if (t->type != type) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has element type %d, %d is needed", op, name, (int)t->type, (int)type);
    }
    if (t->rank < 0 || t->rank > PS_MAX_RANK || ps_tensor_count(t) != count) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s of rank %d has %lld elements, %lld are needed", op, name, t->rank,
                       t->rank < 0 || t->rank > PS_MAX_RANK ? 0LL : (long long)ps_tensor_count(t), (long long)count);
    }
    if (count > 0 && !ps_tensor_contiguous(t)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s is not contiguous", op, name);
    }
    return PS_OK;
}

enum ps_status ps_cuda_workspace(const struct ps_cuda_context *c, const char *op, size_t bytes)
{
    if (bytes > c->workspace_bytes) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): partial sums need %zu bytes, the workspace has %zu", op, bytes,
                       c->workspace_bytes);
    }
    return PS_OK;
}

/* One count, padded, and two for each group of blocks that wait for one another. */
static size_t done_count(const struct ps_cuda_context *c)
{
    return 2 + 2 * (size_t)c->multiprocessors;
}

enum { TURNS = 2 * PS_TURN_COUNTS };

/* These, those of turns, and one for each tile of columns. */
static size_t done_bytes(const struct ps_cuda_context *c)
{
    return (done_count(c) + TURNS + PS_COLUMN_TILES) * sizeof *c->done;
}

static void table_close(struct ps_kernels *k)
{
    struct ps_cuda_context *c = ps_cuda(k);
    if (c->gemm) {
        ps_cuda_gemm_close(k, c->gemm);
    }
    k->device->release(k->device, c->workspace, workspace_bytes + beside_bytes);
    if (c->done) {
        k->device->release(k->device, c->done, done_bytes(c));
    }
    if (c->beside_stream) {
        (void)cudaStreamDestroy(c->beside_stream);
    }
    if (c->forked) {
        (void)cudaEventDestroy(c->forked);
    }
    if (c->ended) {
        (void)cudaEventDestroy(c->ended);
    }
#ifdef PS_FUSED_ENCODER
    ps_cuda_encoder_plans_free(c);
#endif
    if (c->encoder_workspace) {
        k->device->release(k->device, c->encoder_workspace, c->encoder_workspace_bytes);
    }
    delete c;
    delete k;
}

/* What the context holds; table_close undoes as much as was done. */
static enum ps_status open_context(struct ps_kernels *k)
{
    struct ps_cuda_context *c = ps_cuda(k);
    c->stream = ps_cuda_stream(k->device, PS_COMPUTE);
    PS_TRY(ps_cuda_check(cudaSetDevice(k->device->index), "choosing the device"));
    PS_TRY(ps_cuda_check(cudaDeviceGetAttribute(&c->multiprocessors, cudaDevAttrMultiProcessorCount, k->device->index),
                         "asking for the number of multiprocessors"));
    PS_TRY(ps_cuda_check(cudaDeviceGetAttribute(&c->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, k->device->index),
                         "asking for the shared memory of a block"));
    PS_TRY(k->device->allocate(k->device, workspace_bytes + beside_bytes, &c->workspace)); /* the end for what runs beside */
    c->workspace_bytes = workspace_bytes;
    PS_TRY(k->device->allocate(k->device, done_bytes(c), (void **)&c->done));
    c->turns = c->done + done_count(c);
    c->tiles_done = c->turns + TURNS;
    int priority;
    PS_TRY(ps_cuda_check(cudaStreamGetPriority(c->stream, &priority), "asking for a stream's priority"));
    PS_TRY(ps_cuda_check(cudaStreamCreateWithPriority(&c->beside_stream, cudaStreamNonBlocking, priority), "creating a stream"));
    PS_TRY(ps_cuda_check(cudaEventCreateWithFlags(&c->forked, cudaEventDisableTiming), "creating an event"));
    PS_TRY(ps_cuda_check(cudaEventCreateWithFlags(&c->ended, cudaEventDisableTiming), "creating an event"));
    return ps_cuda_gemm_open(k, &c->gemm);
}

/* Stream and workspace of what runs beside, or the usual ones again. */
static void turn(struct ps_cuda_context *c, bool beside)
{
    if (beside != c->beside) {
        cudaStream_t other = c->beside_stream;
        c->beside_stream = c->stream;
        c->stream = other;
        c->workspace = (char *)c->workspace + (beside ? 1 : -1) * (int64_t)workspace_bytes;
        c->workspace_bytes = beside ? beside_bytes : workspace_bytes;
        c->beside = beside;
        c->ordered = true;
    }
}

static enum ps_status cuda_beside(const struct ps_kernels *k, enum ps_beside what)
{
    struct ps_cuda_context *c = ps_cuda(k);
    switch (what) {
    case PS_BESIDE_BEGIN:
        PS_TRY(ps_cuda_check(cudaEventRecord(c->forked, c->stream), "recording an event"));
        PS_TRY(ps_cuda_check(cudaStreamWaitEvent(c->beside_stream, c->forked, 0), "waiting for an event"));
        turn(c, true);
        return PS_OK;
    case PS_BESIDE_END: {
        const enum ps_status status = ps_cuda_check(cudaEventRecord(c->ended, c->stream), "recording an event");
        turn(c, false);
        c->ordered = false; /* the fork changes nothing for the next kernel */
        return status;
    }
    case PS_BESIDE_JOIN: /* the next kernel's ps_grid_begin waits for both streams' */
        return ps_cuda_check(cudaStreamWaitEvent(c->stream, c->ended, 0), "waiting for an event");
    }
    return ps_fail(PS_UNSUPPORTED, "beside (cuda): no such step %d", (int)what);
}

static const char *cuda_way(const struct ps_kernels *k, enum ps_op op, const void *arguments)
{
    switch (op) {
    case PS_OP_gemm:
    case PS_OP_gemm_bias:
    case PS_OP_gemm_gradient:
        return ps_cuda_gemm_way(k, op, arguments);
    case PS_OP_attention:
    case PS_OP_attention_backward:
        return ps_cuda_attention_way(k, op, arguments);
    default:
        return NULL;
    }
}

/* A table without entries and its context, which has nothing of a device yet. */
static enum ps_status table_make(enum ps_precision precision, int compute_capability, const struct ps_kernels_options *options,
                                 struct ps_kernels **kernels)
{
    if (precision != PS_FP32 && precision != PS_TF32 && precision != PS_PRECISION_BF16 && precision != PS_FP16) {
        return ps_fail(PS_UNSUPPORTED, "the cuda backend has no precision %s: fp32, tf32, bf16 or fp16",
                       ps_precision_name(precision));
    }
    struct ps_kernels *k = new (std::nothrow) ps_kernels();
    struct ps_cuda_context *c = new (std::nothrow) ps_cuda_context();
    if (!k || !c) {
        delete k;
        delete c;
        return ps_fail(PS_DEVICE, "cuda: no host memory for the table of operations");
    }
    c->tiny_gemm = options ? options->tiny_gemm : 1;
    c->compute_capability = compute_capability;
    k->backend = "cuda";
    k->precision = precision;
    k->real = precision == PS_PRECISION_BF16 ? PS_BF16 : precision == PS_FP16 ? PS_F16 : PS_F32;
    k->parameter = PS_F32;
    k->statistics = PS_F32;
    k->context = c;
    k->way = cuda_way;
    k->attention_faster = ps_cuda_attention_faster;
    k->strided_heads_faster = ps_cuda_strided_heads_faster;
    k->attention_columns = ps_cuda_attention_columns;
    k->batchnorm_fold_faster = fused_encoder ? ps_cuda_batchnorm_fold_faster : NULL;
    *kernels = k;
    return PS_OK;
}

static void choices_close(struct ps_kernels *k)
{
#ifdef PS_FUSED_ENCODER
    ps_cuda_encoder_plans_free(ps_cuda(k));
#endif
    delete ps_cuda(k);
    delete k;
}

extern "C" enum ps_status ps_cuda_kernels_choices(const struct ps_gpu *gpu, enum ps_precision precision,
                                                  const struct ps_kernels_options *options, struct ps_kernels **kernels)
{
    if (gpu->compute_capability == 90 && !fused_encoder) {
        return ps_fail(PS_UNSUPPORTED, "this build leaves out the kernels of sm_90");
    }
    PS_TRY(table_make(precision, gpu->compute_capability, options, kernels));
    struct ps_cuda_context *c = ps_cuda(*kernels);
    c->multiprocessors = gpu->multiprocessors;
    c->shared_bytes = gpu->shared_bytes;
    (*kernels)->close = choices_close;
#ifdef PS_FUSED_ENCODER
    if (gpu->compute_capability == 90) {
        (*kernels)->encoder_prepare = ps_cuda_encoder_choose;
    }
#endif
    return PS_OK;
}

extern "C" enum ps_status ps_cuda_kernels_open(struct ps_device *device, enum ps_precision precision,
                                               const struct ps_kernels_options *options, struct ps_kernels **kernels)
{
    *kernels = NULL;
    if (strcmp(device->kind, "cuda") != 0) {
        return ps_fail(PS_UNSUPPORTED, "the cuda backend works on a cuda device, not on %s", device->kind);
    }
    struct ps_kernels *k;
    PS_TRY(table_make(precision, device->compute_capability, options, &k));
    k->device = device;
    k->gemm = ps_cuda_gemm;
    k->layernorm = ps_cuda_layernorm;
    k->bias_add = ps_cuda_bias_add;
    k->head_split = ps_cuda_head_split;
    k->softmax = ps_cuda_softmax;
    k->head_merge = ps_cuda_head_merge;
    k->pad_heads = ps_cuda_pad_heads;
    k->unpad_heads = ps_cuda_unpad_heads;
    k->bias_residual_add = ps_cuda_bias_residual_add;
    k->bias_activation = ps_cuda_bias_activation;
    k->batchnorm_statistics = ps_cuda_batchnorm_statistics;
    k->batchnorm_join = ps_cuda_batchnorm_join;
    k->batchnorm = ps_cuda_batchnorm;
    k->batchnorm_fold = ps_cuda_batchnorm_fold;
    k->batchnorm_unfold = ps_cuda_batchnorm_unfold;
    k->bias_residual_statistics = ps_cuda_bias_residual_statistics;
    k->rope = ps_cuda_rope;
    k->layernorm_backward = ps_cuda_layernorm_backward;
    k->activation_backward = ps_cuda_activation_backward;
    k->softmax_backward = ps_cuda_softmax_backward;
    k->batchnorm_backward = ps_cuda_batchnorm_backward;
    k->bias_grad = ps_cuda_bias_grad;
    k->add = ps_cuda_add;
    k->affine = ps_cuda_affine;
    k->unary = ps_cuda_unary;
    k->binary = ps_cuda_binary;
    k->reduce = ps_cuda_reduce;
    k->drop = ps_cuda_drop;
    k->strided_copy = ps_cuda_strided_copy;
    k->gather_patches = ps_cuda_gather_patches;
    k->gather_targets = ps_cuda_gather_targets;
    k->bias_position_add = ps_cuda_bias_position_add;
    k->channel_affine = ps_cuda_channel_affine;
    k->channel_affine_backward = ps_cuda_channel_affine_backward;
    k->forecast = ps_cuda_forecast;
    k->forecast_loss = ps_cuda_forecast_loss;
    k->forecast_error = ps_cuda_forecast_error;
    k->count_observed = ps_cuda_count_observed;
    k->mask_patches = ps_cuda_mask_patches;
    k->sum_squares = ps_cuda_sum_squares;
    k->adamw = ps_cuda_adamw;
    k->advance = ps_cuda_advance;
    if (k->real == PS_F32) { /* there the library takes rounded biases only */
        k->gemm_bias = ps_cuda_gemm_bias;
        k->gemm_gradient = ps_cuda_gemm_gradient;
    }
#ifdef PS_FUSED_ENCODER
    if (device->compute_capability == 90) {
        k->gemm_finish = ps_cuda_gemm_finish;
        k->gemm_bias = ps_cuda_gemm_bias;
    }
#endif
    k->attention = ps_cuda_attention;
    k->attention_backward = ps_cuda_attention_backward;
    k->attention_patches = k->real == PS_F32 ? PS_ATTENTION_PATCHES : 0;
    k->attention_head = k->real == PS_F32 ? PS_ATTENTION_HEAD : PS_ATTENTION_HEAD16;
    k->beside = cuda_beside;
    k->later_sums = ps_cuda_later_sums;
    if (k->real != PS_F32) {
        k->embed_forward = ps_cuda_embed_forward;
        k->embed_backward = ps_cuda_embed_backward;
        k->head_step = ps_cuda_head_step;
    }
    if (k->real != PS_F32 || (fused_encoder && device->compute_capability == 90)) {
        k->window_loss = ps_cuda_window_loss;
        k->head_sums = ps_cuda_head_sums;
    }
#ifdef PS_FUSED_ENCODER
    if (device->compute_capability == 90) {
        k->encoder_forward = ps_cuda_encoder_forward;
        k->encoder_backward = ps_cuda_encoder_backward;
        k->encoder_prepare = ps_cuda_encoder_prepare;
        if (k->real != PS_F32) {
            k->gemm_gradient = ps_cuda_gemm_gradient;
            k->gemm_gradients = ps_cuda_gemm_gradients;
        }
    }
#endif
    k->tune = ps_cuda_gemm_tune;
    k->tuning = ps_cuda_gemm_tuning;
    k->close = table_close;
    enum ps_status status = open_context(k);
    if (status == PS_OK && options && options->tuning) {
        status = ps_cuda_gemm_load(k, options->tuning);
    }
    if (status != PS_OK) {
        table_close(k);
        return status;
    }
    *kernels = k;
    return PS_OK;
}
