/* Level `layer` with fp32 activations: tf32 rounds the operands of products to nearest, fp32 splits each in two (ps_mma_split).
 * d_model 64, heads of 8, 16 or 32 columns, N <= 64, d_ff a multiple of 128.
 *
 * A block of 16 warps takes a tile of whole sequences, up to 64 rows, through all layers; a layer's rows pass through three buffers
 * of shared memory. By rows (LayerNorm, residual, dropout after W_o and W_2) a warp has whole rows; in products 4 x 4 warps share a
 * tile's rows and columns, 16 rows a warp. Weights, 0.13 to 0.33 MB a layer and direction, do not fit beside that: a kernel before
 * (`pack`) lays them out as lanes read them, 16 bytes each, and the copy engine brings them from L2 through a ring of shared
 * memory. Hidden columns come 128 at a time.
 *
 * Backward recomputes softmax's exponentials only: what fits no block is read again from memory (xhat of both LayerNorms, q, k, v,
 * the hidden columns before gelu), and gradients take their places or lie beside them. Weights' gradients are products of their own
 * behind it, over all rows: with G = xhat' dy and s the column sums of dy, that of a weight behind LayerNorm is gamma_i G_ij +
 * beta_i s_j, gamma's own is sum_j W_ij G_ij and beta's sum_j W_ij s_j, so that no sum over rows is formed elsewhere.
 *
 * Counts a layer, R rows. Forward 8 R d^2 + 4 R d f + 4 R N d flops, R exponentials a head and column, 4 R (8 d + f) bytes written
 * (8 R d when nothing is kept) and 8 R d read; weights 4 (4 d^2 + 2 d f) bytes a tile from L2. Backward as many flops of products
 * with weights and 14 R N d; 4 R (10 d + f) bytes read, 4 R (7 d + 2 f) written. Weights' gradients as many flops as forward's
 * products with weights, 4 R (8 d + 2 f) bytes read. seed28k (R 6,400, f 256): forward 0.6 GFLOP and 20 MB.
 *
 * Sequences of a tile share 8-row pieces of attention's products, whose other rows count with a weight of 0: a NaN in one
 * sequence's values may spoil its neighbours in the tile. */
#include "kernels/cuda/encoder/streamed/float.cuh"

#include "kernels/cuda/encoder/streamed/float_backward.cuh"
#include "kernels/cuda/encoder/streamed/float_forward.cuh"
#include "kernels/cuda/encoder/streamed/float_gradients.cuh"
#include "kernels/cuda/tile/math.cuh"

namespace PS_REAL16_SPACE
{

static constexpr size_t shared_bytes(bool backward)
{
    return sizeof(float) * (size_t)(FLOATS_A + FLOATS_B + FLOATS_C + (backward ? FLOATS_SUMS : 0)) + SLOTS * SLOT +
           sizeof(struct ring_shared);
}

typedef void kernel(const struct floats, const struct piece_list);

struct kernels_of {
    kernel *forward, *backward;
};

/* NULL: not served. */
static struct kernels_of kernels_for(int64_t d, int64_t heads)
{
    switch (d == D && heads > 0 && d % heads == 0 ? d / heads : 0) {
    case 8:
        return {forward<8>, backward<8>};
    case 16:
        return {forward<16>, backward<16>};
    case 32:
        return {forward<32>, backward<32>};
    default:
        return {};
    }
}

static enum ps_status supported(const struct ps_encoder_request *e)
{
    if (!kernels_for(e->d_model, e->n_heads).forward || e->patches < 1 || e->patches > 64 || e->d_ff < HIDDEN ||
        e->d_ff > MOST_HIDDEN || e->d_ff % HIDDEN != 0) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda): d_model %lld with %lld heads, d_ff %lld and %lld patches: level layer in %s has d_model 64 with "
            "heads of 8, 16 or 32, d_ff 128, 256, 384 or 512, up to 64 patches",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, exact ? "fp32" : "tf32");
    }
    return PS_OK;
}

/* Floats of a layer in what is kept. */
static int64_t kept_floats(const struct ps_encoder_request *e)
{
    return padded_rows(e) * (8 * e->d_model + 2 * e->d_ff + e->n_heads + 2);
}

/* Of the rows, for weights' gradients; the workspace is of the most. */
static int splits_of(const struct ps_encoder_request *e, int multiprocessors)
{
    const int64_t d = e->d_model / EDGE, f = e->d_ff / EDGE, tiles = e->layers * (4 * d * d + 2 * d * f);
    return (int)(4 * multiprocessors > tiles ? 4 * multiprocessors / tiles : 1);
}

static size_t packed_bytes(const struct ps_encoder_request *e)
{
    return (size_t)e->layers * (size_t)places_of(D, (int)e->d_ff).all * sizeof(uint4);
}

/* Floats of all sums of a split. */
static int64_t split_floats(const struct ps_encoder_request *e)
{
    return ps_encoder_float_parts(e) + (EDGE + 1) * e->d_model;
}

static enum ps_status float_plan(const struct ps_kernels *k, const struct ps_encoder_request *e, struct ps_encoder_plan *plan)
{
    PS_TRY(supported(e));
    const int turns = exact ? 1 : 2; /* measured at seed28k, and at weather with d 64 */
    plan->kernels = "streamed/float";
    plan->kept_bytes = (size_t)(kept_floats(e) * e->layers) * sizeof(float);
    plan->slower = e->sequences > turns * (ROWS / e->patches) * ps_cuda(k)->multiprocessors;
    return PS_OK;
}

static enum ps_encoder_span float_span(const struct ps_kernels *, const struct ps_encoder_request *e,
                                       const struct ps_encoder_plan *)
{
    const int64_t most = ROWS / e->patches;
    return e->patch_len >= 1 && e->patch_len + e->patches <= EDGE && e->patch_len * D <= ROWS * HIDDEN &&
                   most * (e->seq_len + 2) + 2 <= ROWS * HIDDEN
               ? PS_SPAN_EMBEDDING
               : PS_SPAN_LAYERS;
}

static size_t float_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    return packed_bytes(e) + (size_t)split_floats(e) * (size_t)splits_of(e, ps_cuda(k)->multiprocessors) * sizeof(float);
}

static struct floats floats_of(const struct ps_encoder_request *e, int blocks)
{
    struct floats x = {};
    x.rows = e->sequences * e->patches;
    x.n = (int)e->patches;
    /* As many sequences as fill the device evenly. */
    const int64_t most = ROWS / e->patches, turns = (e->sequences + most * blocks - 1) / (most * blocks);
    x.tile_sequences = (int)((e->sequences + turns * blocks - 1) / (turns * blocks));
    x.tiles = (e->sequences + x.tile_sequences - 1) / x.tile_sequences;
    x.heads = (int)e->n_heads;
    x.f = (int)e->d_ff;
    x.layers = (int)e->layers;
    x.epsilon = (float)e->epsilon;
    x.scale = (float)(1 / sqrt((double)e->d_model / (double)e->n_heads));
    x.scale_log2e = x.scale * PS_LOG2_E;
    x.parameters = e->parameters;
    x.at = e->offsets;
    x.packed = (const uint4 *)e->workspace;
    x.stream = (float *)e->u;
    x.dropout = e->dropout;
    x.hidden_first = ps_hidden_first(e);
    if (e->kept) {
        const int64_t R = padded_rows(e), d = e->d_model;
        x.xhat1 = (float *)e->kept;
        x.qkv = x.xhat1 + R * d;
        x.merged = x.qkv + R * 3 * d;
        x.xhat2 = x.merged + R * d;
        x.hidden = x.xhat2 + R * d;
        x.d_hidden = x.hidden + R * x.f;
        x.masked_o = x.d_hidden + R * x.f;
        x.masked_2 = x.masked_o + R * d;
        x.logsum = x.masked_2 + R * d;
        x.rstd1 = x.logsum + R * x.heads;
        x.rstd2 = x.rstd1 + R;
        x.kept_layer = kept_floats(e);
    }
    x.dy = (const float *)e->dy;
    x.du = (float *)e->du;
    if (e->embed) {
        const struct ps_embed_forward *a = e->embed;
        x.embed.weight = (const float *)a->weight.data;
        x.embed.bias = (const float *)a->bias.data;
        x.embed.position = (const float *)a->position.data;
        x.embed.patches = (float *)a->patches.data;
        x.embed.mean = (float *)a->mean.data;
        x.embed.std = (float *)a->std.data;
        x.embed.windows = ps_windows_of(&a->inputs, &a->indices);
        x.embed.state = a->state;
        x.embed.length = (int)e->seq_len;
        x.embed.patch = (int)e->patch_len;
        x.embed.stride = (int)a->stride;
        x.embed.revin = a->revin;
        x.embed.epsilon = (float)a->epsilon;
        x.embed.by_channels = ps_divisor_make(a->inputs.size[1]);
        x.embed.dropout = a->dropout;
    }
    if (e->embed_gradient) {
        const struct ps_embed_backward *a = e->embed_gradient;
        x.embed.patches = (float *)a->patches.data;
        x.embed.patch = (int)e->patch_len;
        x.embed.dropout = a->dropout;
        x.embed.d_weight = (float *)a->d_weight.data;
        x.embed.d_bias = (float *)a->d_bias.data;
        x.embed.d_position = (float *)a->d_position.data;
    }
    return x;
}

static dim3 blocks_of(const struct ps_cuda_context *c, const struct floats &x)
{
    return dim3((unsigned)(x.tiles < c->multiprocessors ? x.tiles : c->multiprocessors));
}

static enum ps_status float_forward(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const struct kernels_of kernels = kernels_for(e->d_model, e->n_heads);
    const struct floats x = floats_of(e, c->multiprocessors);
    const struct packed_places places = places_of(D, x.f);
    const int count = e->kept ? places.all : places.w_2t;
    PS_TRY(launch(c, pack, dim3((unsigned)(count + 255) / 256, (unsigned)x.layers), 256, 0, "encoder_forward",
                  (uint4 *)e->workspace, (const float *)e->weights, e->offsets, (int)D, x.f, (int)GROUP, count));
    return launch(c, kernels.forward, blocks_of(c, x), THREADS, shared_bytes(false), "encoder_forward", x, list_pieces(x.f, false));
}

int64_t ps_encoder_float_parts(const struct ps_encoder_request *e)
{
    return e->layers * sums_of((int)e->d_model, (int)e->d_ff).all;
}

void ps_encoder_float_part(const struct ps_encoder_request *e, int layer, int which, float *parts, float **products, float **sums)
{
    const struct sum_places places = sums_of((int)e->d_model, (int)e->d_ff);
    parts += (int64_t)layer * places.all;
    *products = parts + places.w[which];
    *sums = parts + places.b[which];
}

enum ps_status ps_encoder_float_add(const struct ps_kernels *k, const struct ps_encoder_request *e, const float *parts, int splits)
{
    struct float_sums x = {};
    x.of.f = (int)e->d_ff;
    x.of.layers = (int)e->layers;
    x.of.parameters = e->parameters;
    x.of.at = e->offsets;
    x.parts = (float *)parts;
    x.split_floats = ps_encoder_float_parts(e);
    x.gradients = e->gradients;
    x.d = (int)e->d_model;
    x.splits = splits;
    return launch(ps_cuda(k), sum_up, dim3((3 * (unsigned)x.d + (unsigned)x.of.f) / SUM_ROWS, (unsigned)x.of.layers), SUM_THREADS,
                  0, "encoder_backward", x);
}

static enum ps_status float_backward(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const struct kernels_of kernels = kernels_for(e->d_model, e->n_heads);
    struct float_sums x = {};
    x.of = floats_of(e, c->multiprocessors);
    x.parts = (float *)((char *)e->workspace + packed_bytes(e));
    x.gradients = e->gradients;
    x.d = (int)e->d_model;
    x.split_floats = split_floats(e);
    const char *name = "encoder_backward";
    PS_TRY(launch(c, kernels.backward, blocks_of(c, x.of), THREADS, shared_bytes(true), name, x.of, list_pieces(x.of.f, true)));
    const unsigned d = (unsigned)x.d, f = (unsigned)x.of.f, layers = (unsigned)x.of.layers;
    const int splits = splits_of(e, c->multiprocessors);
    x.split_rows = ((x.of.rows + splits - 1) / splits + DEEP - 1) / DEEP * DEEP;
    x.splits = (int)((x.of.rows + x.split_rows - 1) / x.split_rows);
    const unsigned embeds = e->embed_gradient ? 1 : 0; /* one layer more */
    const unsigned tiles = d / EDGE * (4 * d / EDGE + 2 * f / EDGE) * layers + embeds * (d / EDGE);
    PS_TRY(launch(c, products, dim3(tiles, (unsigned)x.splits), PRODUCT_THREADS, 0, name, x));
    return launch(c, sum_up, dim3((3 * d + f) / SUM_ROWS, layers + embeds), SUM_THREADS, 0, name, x);
}

const struct ps_encoder_family ps_encoder_streamed = {float_plan, float_span, float_workspace_bytes, float_forward, float_backward};

} // namespace PS_REAL16_SPACE
