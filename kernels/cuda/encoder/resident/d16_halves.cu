/* The encoder of a model with BatchNorm behind each residual (post-norm), d_model 16, 1, 2 or 4 heads, d_ff a multiple of 64 and N
 * up to 128: the paper's small models. Residual attention, any activation but swiglu. Equations: docs/design.md section 3.
 *
 * BatchNorm needs sums over all rows, so a layer is cut in halves, a kernel each way each: attention with W_o, and the feed-forward
 * part. A kernel begins with the sums that the one before has left, a pair a block and column: it adds them up in a fixed order, in
 * double, and makes of them two factors a column by which rows are normalised as they are read. It ends with its own. So the stream
 * is written once a half, before the norm, and nothing is normalised in memory but the last layer's output. Backward has the same
 * two sums a norm: those of the gradient and of the gradient times xhat.
 *
 * What a kernel needs beside the sums and rows of the one before it comes before it waits: parameters, what older kernels have
 * left, masks, which are drawn there.
 *
 * A warp owns 16 rows; attention's warps are those of a sequence (a unit), the feed-forward part's tiles are any 16 rows one after
 * another. So what passes from half to half lies by rows; q, k and v lie as the lanes hold them, 16 bytes each. Products, attention
 * and weights' gradients are those of encoder/resident/d16_e4_f128.cu, for any N up to 64; attention of other than 4 heads or more
 * patches is d16_any_attention.cuh's, by blocks of up to 21 warps. Residual attention's scores are a sum
 * over layers of q k': q and k of the layers below come to shared memory beside the layer's own. Each layer leaves their gradients
 * for itself; backward adds them up where it comes to the layer that they are of.
 *
 * The ends ride along. The first kernel forward embeds (encoder/embed.cuh), the last one of a training step goes on to head and
 * loss (d16_halves_loss.cuh), and backward's last one gives the embedding's gradients.
 *
 * Counts, etth1_paper (3 layers, S 896, f 128: 2,688 tiles of sequences, 2,352 of rows): 2 layers + 1 kernels forward, 2 layers + 1
 * backward, one more where the head is a kernel of its own. Forward writes 2 slots of rows of 1.2 MB and 5 of tiles of 1.4 MB a
 * layer, and 1.2 MB of masks; backward reads them, q and k of the layers below too, and writes 2 gradients of 1.2 MB a layer, 2 of
 * 1.4 MB a layer and one below it, and 8.3 MB of partial gradients. All of it stays in L2. A layer's tile takes 96 exponentials and
 * 64 tanh a lane each way, and backward 64 exponentials more for erf's slope. FLOPs: 2 R (4 d^2 + 2 d f) + 4 S N^2 d (l + 1) a
 * layer l forward, over twice that backward. Latency bounds it: barriers, the kernels' begin and end.
 *
 * Evaluation's norms take the running statistics: one kernel, which reads and writes 1.2 MB, with forward's FLOPs. Each block has
 * the parameters of all layers in shared memory (14.6 KB a layer), and a unit's queries and keys (9 KB); where they do not fit, the
 * halves evaluate. */
#include <stdlib.h>

#include "kernels/cuda/encoder/resident/block_sums.cuh"
#include "kernels/cuda/encoder/resident/d16_halves_backward.cuh"
#include "kernels/cuda/encoder/resident/d16_halves_forward.cuh"
#include "kernels/cuda/encoder/resident/d16_halves_loss.cuh"

namespace ps_resident
{

struct halves_plan {
    int multiprocessors;
    int tiles, instance; /* of a unit; as kernels are compiled for: the same, or ANY_TILES */
    int64_t units;
    int block_units, blocks, threads;             /* attention's kernels' */
    int row_tiles, hidden_blocks, hidden_threads; /* the others' */
    int staged;
    int forward, backward, hidden, hidden_backward; /* bytes of shared memory */
    int loss_units, loss_blocks;                    /* of the kernel that ends with the loss */
    int evaluation; /* of the one kernel that evaluates; 0: its layers do not fit, and the halves evaluate */
};

/* Backward's. */
static int unit_bytes_of(const struct halves_plan &p, int pieces)
{
    return p.instance == ANY_TILES ? halves_any_bytes(p.tiles, pieces) : halves_unit_bytes(p.tiles, pieces);
}

/* Weights' gradients are by warps of numbers up to 11, the feed-forward part's up to 8. */
enum { LEAST_WARPS = 12, LEAST_HIDDEN_WARPS = 9 };

template <class T>
static enum ps_status plan_make(const struct ps_kernels *k, const struct ps_encoder_request *e, struct halves_plan *p)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const int64_t d = e->d_model, pieces = e->residual_attention ? e->layers - 1 : 0;
    if (e->norm != PS_NORM_BATCH || e->norm_place != PS_NORM_POST || e->activation == PS_SWIGLU || d != D ||
        (e->n_heads != 1 && e->n_heads != 2 && e->n_heads != 4) || e->patches < 1 || e->patches > 128 || e->d_ff < 64 ||
        e->d_ff % 64 != 0 || e->layers < 1 || e->layers > 64 || e->sequences < 1 || e->sequences > INT32_MAX / 128) {
        return ps_fail(PS_UNSUPPORTED,
                       "encoder (cuda, halves): d_model %lld, n_heads %lld, d_ff %lld, %lld patches: not d_model 16 "
                       "with 1, 2 or 4 heads, d_ff a multiple of 64, up to 128 patches, and BatchNorm behind the residual",
                       (long long)d, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches);
    }
    p->multiprocessors = c->multiprocessors;
    p->tiles = ((int)e->patches + 15) / 16;
    p->instance = e->n_heads == 4 && p->tiles <= 4 ? p->tiles : ANY_TILES;
    p->units = e->sequences;
    const int least = (LEAST_WARPS + p->tiles - 1) / p->tiles, weights = (int)sizeof(halves_attention_weights<T>);
    const int front = halves_front_bytes(weights), wide = halves_front_bytes(weights + (int)sizeof(struct halves_columns));
    const int unit = unit_bytes_of(*p, (int)pieces), hidden = halves_front_bytes(halves_hidden_bytes((int)e->d_ff));
    int most = halves_warps(p->instance) / p->tiles;
    most = most < (c->shared_bytes - wide) / unit ? most : (c->shared_bytes - wide) / unit;
    const int words = halves_words_bytes((int)e->d_ff), room = (c->shared_bytes - hidden) / HIDDEN_WARPS;
    p->staged = e->d_ff > 64 && halves_tile_bytes(2) + words <= room ? 2 : 1;
    const int tile = halves_tile_bytes(p->staged) + words;
    const int of_tiles = (c->shared_bytes - hidden) / tile, most_tiles = of_tiles < HIDDEN_WARPS ? of_tiles : HIDDEN_WARPS;
    if (most < least || most_tiles < LEAST_HIDDEN_WARPS) {
        return ps_fail(PS_UNSUPPORTED,
                       "encoder (cuda, halves): %lld layers of %lld patches and d_ff %lld do not fit %d bytes of "
                       "shared memory a block",
                       (long long)e->layers, (long long)e->patches, (long long)e->d_ff, c->shared_bytes);
    }
    const int64_t each = (p->units + c->multiprocessors - 1) / c->multiprocessors, rounds = (each + most - 1) / most;
    p->block_units = (int)((each + rounds - 1) / rounds);
    p->block_units = p->block_units < least ? least : p->block_units;
    const int64_t groups = (p->units + p->block_units - 1) / p->block_units;
    p->blocks = (int)(groups < c->multiprocessors ? groups : c->multiprocessors);
    p->threads = p->block_units * p->tiles * 32;
    p->row_tiles = (int)((p->units * e->patches + 15) / 16);
    const int tiles_each = (p->row_tiles + c->multiprocessors - 1) / c->multiprocessors;
    const int tile_rounds = (tiles_each + most_tiles - 1) / most_tiles;
    int warps = (tiles_each + tile_rounds - 1) / tile_rounds;
    warps = warps < LEAST_HIDDEN_WARPS ? LEAST_HIDDEN_WARPS : warps;
    /* Of several rounds each scheduler's as many: blocks of a round are fewer, not rounds more. */
    const int even = (warps + 3) / 4 * 4;
    warps = tile_rounds > 1 && even <= most_tiles ? even : warps;
    const int tile_groups = (p->row_tiles + warps - 1) / warps;
    p->hidden_blocks = tile_groups < c->multiprocessors ? tile_groups : c->multiprocessors;
    p->hidden_threads = warps * 32;
    p->loss_units = each < HEAD_SEQUENCES ? (int)each : HEAD_SEQUENCES;
    const int64_t loss_groups = (p->units + p->loss_units - 1) / p->loss_units;
    p->loss_blocks = (int)(loss_groups < c->multiprocessors ? loss_groups : c->multiprocessors);
    p->forward = front + p->block_units * halves_keys_bytes(p->tiles, (int)pieces);
    p->backward = wide + p->block_units * unit;
    p->hidden = hidden + warps * words;
    p->hidden_backward = hidden + warps * tile;
    p->evaluation = halves_evaluation_bytes(halves_layer_bytes<T>((int)e->d_ff), (int)e->layers,
                                            halves_keys_bytes(p->tiles, (int)pieces), p->block_units);
    p->evaluation = p->instance != ANY_TILES && p->evaluation <= c->shared_bytes ? p->evaluation : 0;
    return PS_OK;
}

static const struct halves_plan &plan_of(const struct ps_encoder_plan *plan)
{
    return *(const struct halves_plan *)plan->own;
}

/* More than there are, since no unit or tile of a block's round is left out. */
static int64_t tiles_of(const struct halves_plan &p)
{
    return (p.units + MOST_WARPS) * p.tiles;
}

/* What is kept. */
template <class T>
static size_t take_kept(encoder<T> *x, struct halves *h, const struct ps_encoder_request *e, const struct halves_plan &p,
                        char *memory)
{
    struct arena m = {memory, 0};
    const int64_t tiles = tiles_of(p);
    m.take(h->kept, e->layers * SLOTS * tiles * SLOT_BYTES);
    m.take(h->masks, e->layers * (MASKS_HIDDEN + e->d_ff / 64) * tiles * 32);
    m.take(x->embed.masks, tiles * 8);
    m.take(h->statistics, e->layers * 2 * 2 * D);
    m.take(h->ahead, 1);
    m.take(h->top, p.multiprocessors * D); /* of the blocks of any kernel, since backward's take turns there */
    return m.bytes;
}

/* The workspace: sums over rows, and then what is kept where nothing is to be, or the gradients. */
template <class T>
static size_t take_workspace(encoder<T> *x, struct halves *h, const struct ps_encoder_request *e, const struct halves_plan &p)
{
    struct arena m = {(char *)e->workspace, 0};
    const int64_t tiles = tiles_of(p), blocks = p.multiprocessors;
    m.take(h->sums, blocks * D);
    m.take(h->before, blocks * D);
    const size_t kept = m.bytes + take_kept(x, h, e, p, e->kept ? (char *)e->kept : m.begin + m.bytes);
    m.take(h->gradient, 2 * tiles * SLOT_BYTES);
    m.take(h->pieces, e->residual_attention ? pair_of((int)e->layers, 0) * 2 * tiles * SLOT_BYTES : 0);
    m.take(x->sums.partial, blocks * e->layers * layer_sums(D, (int)e->d_ff));
    m.take(x->embed.partial, blocks * embed_rows_of((int)e->patch_len, (int)e->patches) * D);
    return m.bytes > kept ? m.bytes : kept;
}

template <class T>
static enum ps_status halves_plan_of(const struct ps_kernels *k, const struct ps_encoder_request *e, struct ps_encoder_plan *plan)
{
    struct halves_plan p;
    encoder<T> x;
    struct halves h;
    PS_TRY(plan_make<T>(k, e, &p));
    plan->own = malloc(sizeof p);
    if (!plan->own) {
        return ps_fail(PS_DEVICE, "encoder: out of host memory");
    }
    *(struct halves_plan *)plan->own = p;
    plan->kernels = "resident/d16_halves";
    plan->kept_bytes = take_kept(&x, &h, e, p, NULL);
    plan->room = true;
    return PS_OK;
}

/* Of the kernel that ends with the embedding's gradients. */
static int embed_backward_bytes(const struct ps_encoder_request *e, const struct halves_plan &p)
{
    return halves_front_bytes((int)(sizeof(halves_attention_weights<ps_bf16>) + sizeof(struct halves_columns))) +
           p.block_units * (unit_bytes_of(p, 0) + halves_patches_bytes(p.tiles, (int)e->patch_len));
}

/* Of shorter sequences the head by itself is as fast, as measured. */
static bool ends_with_loss(const struct ps_kernels *k, const struct ps_encoder_request *e)
{
    return e->patches > 48 && e->pred_len >= 8 && e->pred_len % 8 == 0 && e->pred_len <= HEAD_COLUMNS &&
           halves_loss_places((int)e->patches, (int)e->pred_len).bytes <= ps_cuda(k)->shared_bytes;
}

/* A unit's windows lie where its keys will. */
static enum ps_encoder_span halves_span(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                        const struct ps_encoder_plan *plan)
{
    const struct halves_plan &p = plan_of(plan);
    return e->patch_len < 1 || e->patch_len > 32 || e->seq_len < e->patch_len || e->seq_len * 4 > halves_keys_bytes(p.tiles, 0) ||
                   embed_backward_bytes(e, p) > ps_cuda(k)->shared_bytes
               ? PS_SPAN_LAYERS
           : ends_with_loss(k, e) && p.loss_blocks <= PS_PARTIAL_BLOCKS ? PS_SPAN_LOSS
                                                                        : PS_SPAN_EMBEDDING;
}

static size_t halves_workspace_bytes(const struct ps_kernels *, const struct ps_encoder_request *e,
                                     const struct ps_encoder_plan *plan)
{
    encoder<ps_bf16> x; /* fp16's is as large */
    struct halves h;
    return take_workspace(&x, &h, e, plan_of(plan));
}

template <class T>
static void halves_make(const struct ps_encoder_request *e, const struct halves_plan &p, encoder<T> *x, struct halves *h)
{
    *x = ps_resident_of<T>(e, p.blocks);
    x->unit_rows = x->n;
    x->units = p.units;
    x->block_units = p.block_units;
    *h = {};
    (void)take_workspace(x, h, e, p);
    embed_make(e, 1, &x->embed);
    head_step_make(e, &x->head);
    x->sums.plain = true;
    x->sums.apart = true;
    x->sums.hidden_blocks = p.hidden_blocks;
    h->parameters = (float *)e->parameters;
    h->tiles = tiles_of(p);
    h->row_tiles = p.row_tiles;
    h->staged = p.staged;
    h->training = e->training;
    h->residual = e->residual_attention;
    h->momentum = e->momentum;
    h->per_row = 1.0 / (double)x->rows;
    h->unbiased = 1.0 / ((double)x->rows - 1.0);
    h->hidden_threshold = e->hidden_dropout.threshold;
    h->hidden_below = ps_below(h->hidden_threshold);
    h->hidden_minus_below = ps_minus_below(h->hidden_threshold);
    h->hidden_scale = h->hidden_threshold ? e->hidden_dropout.scale : 1.0f;
}

/* The kernel ends with rows that are dropped out so. */
template <class T> static void take_dropout(encoder<T> *x, const struct ps_dropout &d)
{
    x->threshold = d.threshold;
    x->below = ps_below(d.threshold);
    x->minus_below = ps_minus_below(d.threshold);
    x->drop_scale = d.threshold ? d.scale : 1.0f;
}

template <class T> using halves_kernel = void(const encoder<T>, const struct halves);

/* The next kernel; its sums are where those of the one before the last lie. */
template <class T>
static enum ps_status halves_launch(const struct ps_kernels *k, const char *what, halves_kernel<T> *kernel, int blocks, int threads,
                                    int shared, const encoder<T> &x, struct halves &h)
{
    float2 *const other = h.before;
    h.before = h.sums;
    h.sums = other;
    h.blocks_before = h.blocks;
    h.blocks = blocks;
    return ps_resident_launch(ps_cuda(k), what, kernel, (unsigned)blocks, threads, (size_t)shared, x, h);
}

template <class T, bool EMBED> static halves_kernel<T> *attention_of(int instance, bool backward)
{
    switch (instance) {
    case ANY_TILES:
        return backward ? halves_attention_backward<T, ANY_TILES, EMBED> : halves_attention<T, ANY_TILES, EMBED>;
    case 1:
        return backward ? halves_attention_backward<T, 1, EMBED> : halves_attention<T, 1, EMBED>;
    case 2:
        return backward ? halves_attention_backward<T, 2, EMBED> : halves_attention<T, 2, EMBED>;
    case 3:
        return backward ? halves_attention_backward<T, 3, EMBED> : halves_attention<T, 3, EMBED>;
    default:
        return backward ? halves_attention_backward<T, 4, EMBED> : halves_attention<T, 4, EMBED>;
    }
}

template <class T> static halves_kernel<T> *attention_of(int instance, bool backward, bool embed)
{
    return embed ? attention_of<T, true>(instance, backward) : attention_of<T, false>(instance, backward);
}

template <class T> static halves_kernel<T> *hidden_of(enum ps_activation activation, bool backward)
{
    switch (activation) {
    case PS_GELU:
        return backward ? halves_hidden_backward<T, PS_GELU> : halves_hidden<T, PS_GELU>;
    case PS_RELU:
        return backward ? halves_hidden_backward<T, PS_RELU> : halves_hidden<T, PS_RELU>;
    default:
        return backward ? halves_hidden_backward<T, PS_GELU_TANH> : halves_hidden<T, PS_GELU_TANH>;
    }
}

template <class T, int TILES> static halves_kernel<T> *evaluation_by(enum ps_activation activation)
{
    return activation == PS_GELU   ? halves_evaluation<T, TILES, PS_GELU>
           : activation == PS_RELU ? halves_evaluation<T, TILES, PS_RELU>
                                   : halves_evaluation<T, TILES, PS_GELU_TANH>;
}

template <class T> static halves_kernel<T> *evaluation_of(int tiles, enum ps_activation activation)
{
    switch (tiles) {
    case 1:
        return evaluation_by<T, 1>(activation);
    case 2:
        return evaluation_by<T, 2>(activation);
    case 3:
        return evaluation_by<T, 3>(activation);
    default:
        return evaluation_by<T, 4>(activation);
    }
}

template <class T>
static enum ps_status halves_forward(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                     const struct ps_encoder_plan *plan)
{
    const struct halves_plan &p = plan_of(plan);
    const char *const what = "encoder forward";
    encoder<T> x;
    struct halves h;
    halves_make(e, p, &x, &h);
    if (!e->training && p.evaluation) {
        return halves_launch(k, what, evaluation_of<T>(p.tiles, e->activation), p.blocks, p.threads, p.evaluation, x, h);
    }
    ps_cuda(k)->ordered = ps_cuda(k)->ordered && !e->embed; /* which reads none of what others write early */
    for (int l = 0; l < x.layers; l++) {
        h.layer = l;
        take_dropout(&x, e->dropout);
        PS_TRY(
            halves_launch(k, what, attention_of<T>(p.instance, false, l == 0 && e->embed), p.blocks, p.threads, p.forward, x, h));
        take_dropout(&x, e->output_dropout);
        PS_TRY(halves_launch(k, what, hidden_of<T>(e->activation, false), p.hidden_blocks, p.hidden_threads, p.hidden, x, h));
    }
    if (e->head) {
        x.block_units = p.loss_units;
        h.before = h.top; /* becomes the kernel's own */
        return halves_launch(k, what, halves_loss<T>, p.loss_blocks, LOSS_WARPS * 32, halves_loss_places(x.n, x.head.horizon).bytes,
                             x, h);
    }
    return halves_launch(k, what, halves_output<T>, p.hidden_blocks, p.hidden_threads, 0, x, h);
}

template <class T>
static enum ps_status halves_backward(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                      const struct ps_encoder_plan *plan)
{
    const struct halves_plan &p = plan_of(plan);
    const char *const what = "encoder backward";
    encoder<T> x;
    struct halves h;
    halves_make(e, p, &x, &h);
    x.half_scale = h.hidden_scale / d16_times(e->activation);
    h.layer = x.layers - 1;
    if (e->headed) {
        h.before = h.sums;
        h.sums = h.top;
        h.blocks = p.loss_blocks;
    } else {
        PS_TRY(halves_launch(k, what, halves_meet<T>, p.hidden_blocks, p.hidden_threads, 0, x, h));
    }
    halves_kernel<T> *const hidden = hidden_of<T>(e->activation, true);
    if (!e->headed) { /* a block of gemm/panel.cu's is to fit beside */
        PS_TRY(ps_cuda_prefer_shared((const void *)hidden, what));
    }
    for (int l = x.layers - 1; l >= 0; l--) {
        h.layer = l;
        take_dropout(&x, e->output_dropout);
        PS_TRY(halves_launch(k, what, hidden, p.hidden_blocks, p.hidden_threads, p.hidden_backward, x, h));
        take_dropout(&x, e->dropout);
        const bool embed = l == 0 && e->embed_gradient;
        PS_TRY(halves_launch(k, what, attention_of<T>(p.instance, true, embed), p.blocks, p.threads,
                             embed ? embed_backward_bytes(e, p) : p.backward, x, h));
    }
    return launch_sums(ps_cuda(k), sum_kernel<T, D, true>, D, e->embed_gradient, x);
}

} // namespace ps_resident

const struct ps_encoder_family ps_encoder_halves_bf16 = {ps_resident::halves_plan_of<ps_bf16>, ps_resident::halves_span,
                                                         ps_resident::halves_workspace_bytes, ps_resident::halves_forward<ps_bf16>,
                                                         ps_resident::halves_backward<ps_bf16>};
const struct ps_encoder_family ps_encoder_halves_fp16 = {ps_resident::halves_plan_of<ps_fp16>, ps_resident::halves_span,
                                                         ps_resident::halves_workspace_bytes, ps_resident::halves_forward<ps_fp16>,
                                                         ps_resident::halves_backward<ps_fp16>};
