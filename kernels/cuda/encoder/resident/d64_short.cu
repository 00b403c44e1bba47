/* The whole encoder of a model with d_model 64, heads of 16 columns, N <= 16 and d_ff 128 or 256, forward and backward:
 * what encoder/resident/resident.cuh does, with the products by wgmma. Equations: docs/design.md section 3.
 *
 * A block works on four units of 16 rows, a product's 64 rows. Its four warpgroups have 16 of the 64 columns each, and so a head,
 * and one panel of d_ff; warp u of each has unit u. What one warp knows and all need lies in shared memory in panels of 64 x 64
 * elements, from which wgmma reads both operands; attention is a warp's own and never leaves its registers. A layer's weights are
 * one set of panels, fetched as tensors by one thread; a matrix of the next layer takes the place of this one's as soon as that has
 * been used, behind the products.
 *
 * Forward leaves q, k, v, its LayerNorms' xhat and 1 / deviation, and LN2's output for backward. Weight gradients are a kernel of
 * their own, d64_weights: their operands, the panels, go to memory as they come, by the copy engine, and its blocks begin where
 * backward's leave multiprocessors free, on what backward has announced so far; the first of them form W_h's gradient before.
 * gamma's and beta's gradients are column sums of registers. The thread that has a gradient's sum does AdamW's update of the
 * parameter too where that is asked for: a step is three kernels.
 *
 * Registers: what follows from a warp's place is found anew at each product (refresh). Left to itself the compiler finds all
 * addresses before the first layer and spills them, which made backward slower by a sixth.
 *
 * Counts, seed28k (f 256, 3 x 5 rows in 16, 2 layers; 107 blocks of 16 warps): a layer's panels 96 KB; a warpgroup and a layer take
 * 20 products m64n16k16, 4 m64n48k16 and 4 m64n64k16 forward, 32, none and 8 backward, and 24 movmatrix a warp in place of
 * attention's transposes; 6 barriers each way. q, k, v and xhat 8.8 MB. Weight gradients: operands 28 MB, read 1.2 times, a
 * multiprocessor's copy engine has 24 KB in 600 clocks; partial sums 7 MB (one a block would be 43).
 *
 * The kernels are d64_forward.cuh, d64_backward.cuh and d64_weights.cuh, the update in it update.cuh; what they share is
 * d64_panels.cuh. Here is the host's side.
 *
 * tf32 takes them with operands of fp16, u and gradients in memory of fp32 and no ends: so encoder/tf32.cu's kernels that turn rows
 * to fp16 and back are not needed, which count here. Range and rounding are as that file says, but for the power of two, which is
 * up to 2^120, and hidden columns, which are kept twice as large. Beside these kernels are one that writes the weights as fp16, 6
 * bytes an element, and one that finds dy's largest element, 4 R d bytes. seed28k (105,000 elements, 6,400 rows): 0.6 MB and 1.6
 * MB, from L2. */
#include "kernels/cuda/context.cuh"
#include "kernels/cuda/encoder/resident/d64_backward.cuh"
#include "kernels/cuda/encoder/resident/d64_forward.cuh"
#include "kernels/cuda/encoder/resident/d64_weights.cuh"
#include "kernels/cuda/tensor_map.cuh"

namespace ps_resident
{

static int blocks_of(int64_t units, int multiprocessors)
{
    const int64_t groups = (units + UNITS - 1) / UNITS, rounds = (groups + multiprocessors - 1) / multiprocessors;
    return (int)((groups + rounds - 1) / rounds);
}

/* Products' jobs of a pair. Of all together there is about one for each of backward's blocks, when they have ended, and two a layer
 * for each multiprocessor that is free before: with more some blocks have a second one, and all wait for it. None has more groups
 * of rows than that leaves, rounded down: the largest is what is waited for. */
template <class T> static int splits_of(const encoder<T> &x, int64_t groups, int multiprocessors)
{
    const int64_t blocks = blocks_of(x.units, multiprocessors);
    const int64_t splits = (blocks + 2 * x.layers * (multiprocessors - blocks)) / (x.layers * pairs_of(x.f / 64));
    const int64_t each = splits < 1 ? groups : splits > groups ? 1 : groups / splits;
    return (int)((groups + each - 1) / each);
}

template <class T> static size_t take_workspace(encoder<T> *x, char *workspace, int multiprocessors)
{
    struct arena m = {workspace, 0};
    const int p = x->f / 64;
    const int64_t groups = (x->units + UNITS - 1) / UNITS, splits = splits_of(*x, groups, multiprocessors);
    x->d64.splits = (int)splits;
    x->d64.split_groups = (int)(groups / splits);
    x->d64.split_more = (int)(groups % splits);
    m.take(x->d64.counters, FLAGS + x->layers * groups);
    x->d64.flags = x->d64.counters + FLAGS;
    m.take(x->d64.norms, groups * x->layers * (4 * D));
    m.take(x->d64.left, groups * x->layers * LEFT * THREADS);
    m.take(x->d64.operands, groups * x->layers * (kept_panels(p) * PANEL));
    m.take(x->d64.column_sums, 2 * splits * x->layers * vector_floats(x->f));
    m.take(x->d64.products, x->layers * pairs_of(p) * splits * JOB_FLOATS);
    m.take(x->d64.head.parts, (int64_t)HEAD_JOBS * x->n * D * x->head.horizon);
    return m.bytes;
}

/* Of the layers and W_h. */
static size_t layers_workspace(const struct ps_encoder_request *e, int multiprocessors)
{
    encoder<ps_bf16> x = {}; /* fp16's is as large */
    x.f = (int)e->d_ff;
    x.layers = (int)e->layers;
    x.n = (int)e->patches;
    x.head.horizon = e->pred_len <= D64_HORIZON ? (int)e->pred_len : 0;
    /* For shorter batches too, whose products may be split more often; not for those that lack more operands than that can add. */
    const int64_t groups = (ps_resident_units(e) + UNITS - 1) / UNITS;
    size_t most = 0;
    for (int64_t i = groups; i > 0 && i > groups - 2 * multiprocessors; i--) {
        x.units = i * UNITS;
        const size_t bytes = take_workspace(&x, NULL, multiprocessors);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* A matrix of all layers, [rows, ld] of the flat weights from `at` on, as panels of 64 rows by `columns` that lie `apart` elements
 * from one another. */
template <class T>
static enum ps_status panel_map(CUtensorMap *map, const encoder<T> &x, int64_t at, int ld, int columns, int panels, int apart)
{
    PFN_cuTensorMapEncodeTiled_v12000 encode;
    PS_TRY(ps_tensor_map_encoder(&encode));
    const cuuint64_t size[4] = {(cuuint64_t)columns, 64, (cuuint64_t)panels, (cuuint64_t)x.layers};
    const cuuint64_t stride[3] = {(cuuint64_t)ld * 2, (cuuint64_t)apart * 2, (cuuint64_t)x.at.matrix_stride * 2};
    const cuuint32_t box[4] = {(cuuint32_t)columns, 64, (cuuint32_t)panels, 1}, one[4] = {1, 1, 1, 1};
    const CUtensorMapDataType type =
        std::is_same<T, ps_fp16>::value ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult status = encode(map, type, 4, (void *)(x.weights + at), size, stride, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? PS_OK
                                  : ps_fail(PS_DEVICE, "encoder: weights at %p, %lld elements a layer: no tensor map (error %d)",
                                            (const void *)(x.weights + at), (long long)x.at.matrix_stride, (int)status);
}

template <class T> static enum ps_status panels_of(const encoder<T> &x, bool backward, struct weight_panels *p)
{
    PS_TRY(backward ? panel_map(&p->qkv, x, x.at.w_qkv, 3 * D, D, 3, D) : panel_map(&p->qkv, x, x.at.w_qkv, 3 * D, 16, 12, 16));
    PS_TRY(panel_map(&p->o, x, x.at.w_o, D, D, 1, D));
    PS_TRY(panel_map(&p->w_1, x, x.at.w_1, x.f, D, x.f / 64, D));
    return panel_map(&p->w_2, x, x.at.w_2, D, D, x.f / 64, 64 * D);
}

template <class T> using d64_kernel = void(const encoder<T>, const struct weight_panels);

template <class T, class S, int P> static d64_kernel<T> *kernel_of_panels(bool drop, bool backward)
{
    return backward ? drop ? d64_backward<T, S, P, true> : d64_backward<T, S, P, false>
           : drop ? d64_forward<T, S, P, true>
                    : d64_forward<T, S, P, false>;
}

template <class T, class S> static d64_kernel<T> *kernel_of(const encoder<T> &x, bool backward)
{
    const bool drop = x.threshold != 0;
    return x.f == 128 ? kernel_of_panels<T, S, 2>(drop, backward) : kernel_of_panels<T, S, 4>(drop, backward);
}

/* Whether forward can do the head. */
static bool can_head(const struct ps_encoder_request *e, int blocks, int shared)
{
    return e->pred_len >= 1 && e->pred_len <= D64_HORIZON && blocks <= PS_PARTIAL_BLOCKS &&
           (int64_t)blocks * UNITS >= ps_resident_units(e) &&
           shared_bytes((int)e->d_ff, e->layers, false) + BARRIERS + head_bytes_d64((int)e->patches, (int)e->pred_len) <=
               (size_t)shared;
}

/* Whether a unit's windows fit where they are gathered. */
static bool can_embed(const struct ps_encoder_request *e)
{
    return e->seq_len >= e->patch_len && e->patch_len >= 1 && e->patch_len <= 32 &&
           ps_resident_sequences(e) * e->seq_len <= D64_WINDOW_FLOATS;
}

/* S: of the stream in memory, T or, of tf32, float. */
template <class T, class S> static constexpr bool IS_TF32 = !std::is_same<S, T>::value;

template <class T> static size_t take_kept(encoder<T> *x, const struct ps_encoder_request *e, char *memory)
{
    struct arena m = {memory, 0};
    const int64_t rows = e->layers * e->sequences * e->patches;
    m.take(x->lse, rows * e->n_heads);
    m.take(x->d64.rstd, rows * 2);
    ps_resident_take_masks(m, x, e, 1);
    return m.bytes;
}

/* As measured (docs/benchmarks.md): a unit costs the same whatever its 16 rows hold, so level gemm is faster at many that are not
 * full. */
static bool is_slower(const struct ps_encoder_request *e, int multiprocessors)
{
    const int64_t full = 15, filled = ps_resident_sequences(e) * e->patches;
    return ps_resident_units(e) * (full - filled) > 66 * multiprocessors;
}

template <class T, class S>
static enum ps_status d64_plan(const struct ps_kernels *k, const struct ps_encoder_request *e, struct ps_encoder_plan *plan)
{
    const int shared = ps_cuda(k)->shared_bytes;
    if (e->d_model != D || e->n_heads != 4 || e->patches < 1 || e->patches > 16 || (e->d_ff != 128 && e->d_ff != 256) ||
        e->layers < 1 || e->layers > 64 || e->sequences < 1 || e->sequences > INT32_MAX ||
        shared_bytes((int)e->d_ff, e->layers, true) + BARRIERS > (size_t)shared || WEIGHTS_SHARED + WEIGHTS_STATIC > shared) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda, d 64): d_model %lld, n_heads %lld, d_ff %lld, %lld patches, %lld layers: d_model 64 with 4 "
            "heads, d_ff 128 or 256, up to 16 patches, are served where the layers' vectors fit %d bytes of shared memory",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, (long long)e->layers, shared);
    }
    encoder<T> x;
    plan->kernels = IS_TF32<T, S> ? "resident/d64_short (fp16 operands)" : "resident/d64_short";
    plan->slower = !IS_TF32<T, S> && is_slower(e, ps_cuda(k)->multiprocessors);
    plan->kept_bytes = take_kept(&x, e, NULL);
    return PS_OK;
}

template <class T, class S>
static enum ps_encoder_span d64_span(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    return IS_TF32<T, S> || e->other_rate || !can_embed(e)                                     ? PS_SPAN_LAYERS
           : can_head(e, blocks_of(ps_resident_units(e), c->multiprocessors), c->shared_bytes) ? PS_SPAN_UPDATE
                                                                                               : PS_SPAN_EMBEDDING;
}

/* The layers', then the embedding's sums, of a shorter batch's blocks too, which may be more, or tf32's weights. */
template <class T, class S>
static size_t d64_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    const int64_t units = ps_resident_units(e), all = ps_cuda(k)->multiprocessors;
    return layers_workspace(e, (int)all) + (IS_TF32<T, S>  ? (size_t)ps_encoder_matrices(e).count * sizeof(T)
                                            : can_embed(e) ? (size_t)(units < all ? units : all) * embed_sum_bytes(e)
                                                           : 0);
}

template <class T> static void head_make(const struct ps_encoder_request *e, encoder_head<T> *x, struct d64_head *rest)
{
    const struct ps_head_gradient *g = e->head_gradient;
    head_step_make(e, x);
    if (g) {
        rest->d_weight = (float *)g->d_weight.data;
        rest->d_bias = (float *)g->d_bias.data;
        x->dx = (T *)g->dx.data;
        x->partials = (double *)g->partials.data;
        x->rows = (int)g->partials.size[0];
        x->horizon = (int)e->pred_len;
        rest->state = g->state;
        rest->loss_scale = (double)g->batch / ((double)e->sequences * (double)e->pred_len);
        rest->batch = g->batch;
    }
}

template <class T> static void update_make(const struct ps_encoder_request *e, d64_update<T> *x)
{
    const struct ps_adamw *u = e->update;
    if (u) {
        x->parameters = (float *)u->parameters.data;
        x->m = (float *)u->m.data;
        x->v = (double *)u->v.data;
        x->copy = (T *)u->copy.data;
        x->learning_rates = (const double *)u->learning_rates.data;
        x->state = u->state;
        x->plain = ps_adamw_plain_of(u);
    }
}

template <class T, class S> static encoder<T> arguments_of(const struct ps_cuda_context *c, const struct ps_encoder_request *e)
{
    encoder<T> x = ps_resident_of<T>(e, blocks_of(ps_resident_units(e), c->multiprocessors));
    if (e->kept) {
        (void)take_kept(&x, e, (char *)e->kept);
        (void)take_workspace(&x, (char *)e->workspace, c->multiprocessors);
    }
    if (IS_TF32<T, S>) {
        x.weights = (const T *)((char *)e->workspace + layers_workspace(e, c->multiprocessors)) - ps_encoder_matrices(e).first;
    }
    embed_make(e, (int)ps_resident_sequences(e), &x.embed);
    head_make(e, &x.head, &x.d64.head);
    update_make(e, &x.d64.update);
    return x;
}

template <class T, class S>
static enum ps_status forward(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    struct ps_cuda_context *c = ps_cuda(k);
    encoder<T> x = arguments_of<T, S>(c, e);
    struct weight_panels panels;
    if (IS_TF32<T, S>) { /* and the counters: other encoders of the same table may have had the workspace */
        PS_TRY(
            ps_encoder_tf32_take(k, e, (void *)(x.weights + ps_encoder_matrices(e).first), NULL, (unsigned *)e->workspace, FLAGS));
    }
    PS_TRY(panels_of(x, false, &panels));
    const size_t bytes = shared_bytes(x.f, x.layers, false);
    x.head.at = (int)bytes;
    c->ordered = false; /* `fresh` takes care of what was */
    return ps_resident_launch(c, "encoder forward", kernel_of<T, S>(x, false), (unsigned)x.blocks, THREADS,
                              bytes + (x.head.weight ? head_bytes_d64(x.n, x.head.horizon) : 0), x, panels);
}

template <class T, class S>
static enum ps_status backward(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    struct ps_cuda_context *c = ps_cuda(k);
    encoder<T> x = arguments_of<T, S>(c, e);
    struct weight_panels panels;
    if (IS_TF32<T, S>) {
        PS_TRY(ps_encoder_tf32_peak(k, e, x.d64.counters + PEAK));
    }
    if (e->embed_gradient) {
        x.embed.partial = (float *)((char *)e->workspace + layers_workspace(e, c->multiprocessors));
    }
    PS_TRY(panels_of(x, true, &panels));
    c->ordered = false; /* `fresh` takes care of what was */
    PS_TRY(ps_resident_launch(c, "encoder backward", kernel_of<T, S>(x, true), (unsigned)x.blocks, THREADS,
                              shared_bytes(x.f, x.layers, true), x, panels));
    PS_TRY(ps_resident_launch(c, "encoder weight gradients", d64_weights<T, S>, (unsigned)c->multiprocessors, THREADS + 32,
                              WEIGHTS_SHARED, x));
    c->ordered = e->update != NULL; /* the weights have just been written: the next kernel must not prefetch them */
    return PS_OK;
}

template <class T, class S>
static constexpr struct ps_encoder_family d64_family = {d64_plan<T, S>, d64_span<T, S>, d64_workspace_bytes<T, S>, forward<T, S>,
                                                        backward<T, S>};

} // namespace ps_resident

const struct ps_encoder_family ps_encoder_d64_bf16 = ps_resident::d64_family<ps_bf16, ps_bf16>;
const struct ps_encoder_family ps_encoder_d64_fp16 = ps_resident::d64_family<ps_fp16, ps_fp16>;
const struct ps_encoder_family ps_encoder_d64_tf32 = ps_resident::d64_family<ps_fp16, float>;
