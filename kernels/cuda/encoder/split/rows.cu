/* Level `layer` in tf32 for d_model 128: all of a layer that goes by rows, in two kernels each way around the table's attention.
 *
 * Why: a layer's weights in fp32, 512 KB at d_ff 256, and what attention wants of a tile do not fit a multiprocessor together, and
 * with mma.sync (encoder/streamed/float.cu) shared memory cannot feed the tensor cores: 6.4 ms at weather, where level gemm
 * takes 4.6. Only attention needs other rows than its own, so a layer is cut there:
 *
 *     ln1_qkv            LN1, W_qkv
 *     (attention)
 *     wo_ffn             W_o, the residual, LN2, the feed-forward part
 *
 *     ffn_wo_backward    the feed-forward part, LN2, W_o'
 *     (attention's backward)
 *     qkv_ln1_backward   W_qkv', LN1
 *
 * Between a kernel's products rows stay in registers; what weights' gradients read is written: encoder/split/gradients.cu.
 *
 * Memory bounds it, so what tf32 would round anyway is kept in 16 bits: fp16 has its 10 bits of mantissa, and forward's operands
 * lie in its range: rows that LayerNorm has made, what weights make of them, weights (one beyond 65,504 shows as a loss that is not
 * finite; below 2^-14 the error stays 2^-25). They are multiplied as fp16 too. The residual stream, sums and statistics are fp32,
 * and so are gradients, whose range nobody knows, and tf32 their products.
 *
 * A warpgroup takes 64 rows of its own through all of a kernel (rows.cuh); wgmma multiplies them, in shared memory or in registers,
 * with pieces of weights (pieces.cuh) that stay in shared memory, or that one thread has the copy engine bring from L2. `pack_rows`
 * lays the pieces out before, the summed dimension contiguous, since wgmma takes tf32 in no other way. It multiplies W_qkv and W_1
 * with LayerNorm's gamma and adds beta W to their biases: the left operand is xhat itself, which is what weights' gradients are
 * made of too (G = xhat' dy; encoder/streamed/float.cu says how the rest follows), and gradients come out as xhat's. The hidden
 * columns before gelu are not kept: backward computes them again. Dropout's bits are, a bit an element.
 *
 * Counts a layer, R rows, beside attention's and those of weights' gradients. Dropout's bits are R (2 d + f) / 8 bytes more in
 * each. The last columns are weather (R 112,896, f 256): us at wgmma's 797 TFLOP/s (fp16) or 415 (tf32), us at 4.2 TB/s, us
 * measured, and the share of the clocks in which schedulers issue.
 *
 *     kernel            FLOPs                 bytes read         written             weights from L2             weather
 *     ln1_qkv           6 R d^2               4 R d              8 R d               96 KB a block               14  41   75  38 %
 *     wo_ffn            2 R d^2 + 4 R d f     6 R d              6 R d               32 + f/2 KB a block, f 256  23  41   99  31 %
 *     ffn_wo_backward   2 R d^2 + 6 R d f     10 R d, dy twice   16 R d + 6 R f      64 + 5 f/4 KB a tile        54 131  192  31 %
 *     qkv_ln1_backward  6 R d^2               18 R d             4 R d               192 KB a tile               27  76  103  15 %
 *
 * A tile is 128 rows. Beyond f 256 wo_ffn's weights come once a tile, too. Eight warps of 240 registers multiply (in ln1_qkv
 * twelve), and their waits for memory and for their own products lie open. */
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/encoder/split/rows_backward.cuh"
#include "kernels/cuda/encoder/split/rows_forward.cuh"
#include "kernels/cuda/encoder/streamed/float.cuh"

namespace PS_REAL16_SPACE
{

static enum ps_status supported(const struct ps_encoder_request *e)
{
    if (e->d_model != D || e->n_heads < D / PS_ATTENTION_HEAD || e->n_heads > D / 2 || D % e->n_heads != 0 || e->patches < 1 ||
        e->patches > PS_ATTENTION_PATCHES || e->d_ff < COLUMNS || e->d_ff > MOST_HIDDEN || e->d_ff % COLUMNS != 0) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda): d_model %lld with %lld heads, d_ff %lld and %lld patches: level layer in tf32 has d_model %d "
            "with heads of 2 to %d, d_ff a multiple of %d up to %d, up to %d patches",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, D, PS_ATTENTION_HEAD, COLUMNS,
            MOST_HIDDEN, PS_ATTENTION_PATCHES);
    }
    return PS_OK;
}

/* Floats of a layer in what is kept; dropout's bits are always there. */
static int64_t kept_floats(const struct ps_encoder_request *e)
{
    return padded_rows(e) * (6 * D / 2 + e->n_heads + 2 + (2 * D + e->d_ff) / 32);
}

static enum ps_status split_plan(const struct ps_kernels *, const struct ps_encoder_request *e, struct ps_encoder_plan *plan)
{
    PS_TRY(supported(e));
    plan->kernels = "split/rows";
    plan->kept_bytes = (size_t)(kept_floats(e) * e->layers) * sizeof(float);
    /* At weather it is faster with a batch of 1, 882 rows; of heads of 32 columns with 42 patches, of 64 never. */
    const int64_t columns = e->d_model / e->n_heads;
    plan->slower = e->sequences * e->patches < 768 || columns > 32 || (columns == 32 && e->patches <= 32);
    return PS_OK;
}

static enum ps_encoder_span split_span(const struct ps_kernels *, const struct ps_encoder_request *, const struct ps_encoder_plan *)
{
    return PS_SPAN_LAYERS;
}

/* The workspace, in floats: where things begin, the pieces first. */
struct row_workspace {
    int64_t biases, parts, hidden, d_hidden, masked_2, masked_o, d_merged, d_qkv, delta, all;
};

static struct row_workspace workspace_of(const struct ps_kernels *k, const struct ps_encoder_request *e)
{
    const int64_t R = padded_rows(e);
    struct row_workspace w = {};
    w.biases = e->layers * layer_bytes((int)(e->d_ff / COLUMNS)) / 4;
    w.parts = w.biases + e->layers * (3 * D + e->d_ff);
    w.hidden = w.parts + ps_encoder_rows_slabs(k, e) * ps_encoder_float_parts(e);
    w.d_hidden = w.hidden + R * e->d_ff / 2;
    w.masked_2 = w.d_hidden + R * e->d_ff;
    w.masked_o = w.masked_2 + R * D;
    w.d_merged = w.masked_o + R * D;
    w.d_qkv = w.d_merged + R * D;
    w.delta = w.d_qkv + R * 3 * D;
    w.all = w.delta + R * e->n_heads;
    return w;
}

static size_t split_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    return (size_t)workspace_of(k, e).all * sizeof(float);
}

static struct rows_layer layer_of(const struct ps_kernels *k, const struct ps_encoder_request *e, int layer)
{
    const struct row_workspace at = workspace_of(k, e);
    const struct ps_encoder_layout *const l = &e->offsets;
    float *const w = (float *)e->workspace, *const stream = (float *)e->u;
    const float *const p = e->parameters + layer * l->vector_stride;
    const int64_t R = padded_rows(e), rows = e->sequences * e->patches;
    struct rows_layer x = {};
    x.rows = rows;
    x.f = (int)e->d_ff;
    x.epsilon = (float)e->epsilon;
    x.halves = (const uint8_t *)w + layer * layer_bytes(x.f / COLUMNS);
    x.words = x.halves + halves_of(x.f / COLUMNS) * HALF_BYTES;
    x.b_qkv = w + at.biases + layer * (3 * D + x.f);
    x.b_o = p + l->b_o;
    x.b_1 = x.b_qkv + 3 * D;
    x.b_2 = p + l->b_2;
    x.u = stream + layer * rows * D;
    x.y = stream + (layer + 1) * rows * D;
    x.qkv = (__half *)(w + at.d_qkv); /* where nothing is kept */
    x.merged = (__half *)(w + at.d_merged);
    x.logsum = w + at.delta;
    x.kept_o = (uint32_t *)(w + at.masked_o);
    x.kept_output = (uint32_t *)(w + at.masked_2);
    x.kept_gelu = (uint32_t *)(w + at.d_hidden);
    if (e->kept) {
        x.xhat1 = (__half *)((float *)e->kept + layer * kept_floats(e));
        x.qkv = x.xhat1 + R * D;
        x.merged = x.qkv + R * 3 * D;
        x.xhat2 = x.merged + R * D;
        x.rstd1 = (float *)(x.xhat2 + R * D);
        x.rstd2 = x.rstd1 + R;
        x.kept_o = (uint32_t *)(x.rstd2 + R);
        x.kept_output = x.kept_o + R * (D / 32);
        x.kept_gelu = x.kept_output + R * (D / 32);
        x.logsum = (float *)(x.kept_gelu + R * (x.f / 32));
    }
    x.dy = layer + 1 == e->layers ? (const float *)e->dy : (const float *)e->du;
    x.d_qkv = w + at.d_qkv;
    x.du = (float *)e->du;
    x.hidden = (__half *)(w + at.hidden);
    x.d_hidden = w + at.d_hidden;
    x.masked_2 = w + at.masked_2;
    x.masked_o = w + at.masked_o;
    x.d_merged = w + at.d_merged;
    x.after_o = at_site(e->dropout, layer, 0);
    x.gelu = at_site(e->dropout, layer, 1);
    x.gelu.first = ps_hidden_first(e);
    x.output = at_site(e->dropout, layer, 2);
    return x;
}

/* [S, h, N, e] of rows of `columns`, fp16 what is kept, fp32 gradients. */
template <typename T> static struct ps_tensor heads_of(const struct ps_encoder_request *e, const T *rows, int64_t columns)
{
    return ps_tensor_heads((void *)rows, sizeof(T) == 2 ? PS_F16 : PS_F32, e->sequences, e->n_heads, e->patches, D / e->n_heads,
                           columns);
}

static struct ps_tensor statistics_of(const struct ps_encoder_request *e, float *data)
{
    return ps_tensor_3d(data, PS_F32, e->sequences, e->n_heads, e->patches);
}

/* A block a multiprocessor, or a tile of so many rows. */
static enum ps_status launch_rows(const struct ps_cuda_context *c, void (*run)(const struct rows_layer), int tile, unsigned threads,
                                  size_t shared, const char *what, const struct rows_layer &x)
{
    const int tiles = tiles_of(x.rows, tile);
    return launch(c, run, dim3((unsigned)(tiles < c->multiprocessors ? tiles : c->multiprocessors)), threads, shared, what, x);
}

static enum ps_status split_forward(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const char *name = "encoder_forward";
    const int hidden = (int)(e->d_ff / COLUMNS);
    struct packing pack = {};
    pack.pieces = (uint8_t *)e->workspace;
    pack.biases = (float *)e->workspace + workspace_of(k, e).biases;
    pack.weights = (const float *)e->weights;
    pack.parameters = e->parameters;
    pack.at = e->offsets;
    pack.f = (int)e->d_ff;
    pack.units = (int)((e->kept ? layer_bytes(hidden) : halves_of(hidden) * HALF_BYTES) / 16); /* backward's too, or not */
    PS_TRY(launch(c, pack_rows, dim3(ps_cuda_blocks(pack.units + 3 * D + pack.f, 256), (unsigned)e->layers), 256, 0, name, pack));
    const double scale = 1 / sqrt((double)D / (double)e->n_heads);
    for (int layer = 0; layer < e->layers; layer++) {
        const struct rows_layer x = layer_of(k, e, layer);
        PS_TRY(launch_rows(c, ln1_qkv, ROWS, LN1_QKV_THREADS, LN1_QKV_SHARED, name, x));
        const struct ps_attention attention = {heads_of(e, x.merged, D),          statistics_of(e, x.logsum),
                                               heads_of(e, x.qkv, 3 * D),         heads_of(e, x.qkv + D, 3 * D),
                                               heads_of(e, x.qkv + 2 * D, 3 * D), scale};
        PS_TRY(k->attention(k, &attention));
        PS_TRY(launch_rows(c, wo_ffn, TILE, THREADS, wo_ffn_kernel::SHARED, name, x));
    }
    return PS_OK;
}

static enum ps_status split_backward(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const char *name = "encoder_backward";
    const struct row_workspace at = workspace_of(k, e);
    float *const workspace = (float *)e->workspace;
    const double scale = 1 / sqrt((double)D / (double)e->n_heads);
    for (int layer = (int)e->layers; layer-- > 0;) {
        const struct rows_layer x = layer_of(k, e, layer);
        PS_TRY(launch_rows(c, ffn_wo_backward, TILE, THREADS, ffn_wo_backward_kernel::SHARED, name, x));
        const struct ps_attention_backward attention = {heads_of(e, x.d_qkv, 3 * D),
                                                        heads_of(e, x.d_qkv + D, 3 * D),
                                                        heads_of(e, x.d_qkv + 2 * D, 3 * D),
                                                        statistics_of(e, workspace + at.delta),
                                                        heads_of(e, x.d_merged, D),
                                                        heads_of(e, x.merged, D),
                                                        statistics_of(e, x.logsum),
                                                        heads_of(e, x.qkv, 3 * D),
                                                        heads_of(e, x.qkv + D, 3 * D),
                                                        heads_of(e, x.qkv + 2 * D, 3 * D),
                                                        scale};
        PS_TRY(k->attention_backward(k, &attention));
        PS_TRY(launch_rows(c, qkv_ln1_backward, TILE, THREADS, qkv_ln1_backward_kernel::SHARED, name, x));
        const struct ps_encoder_rows_operands operands = {{x.d_qkv, x.masked_o, x.d_hidden, x.masked_2},
                                                          {x.xhat1, x.merged, x.xhat2, x.hidden}};
        PS_TRY(ps_encoder_rows_gradients(k, e, layer, &operands, workspace + at.parts));
    }
    return ps_encoder_float_add(k, e, workspace + at.parts, ps_encoder_rows_slabs(k, e));
}

const struct ps_encoder_family ps_encoder_split = {split_plan, split_span, split_workspace_bytes, split_forward, split_backward};

} // namespace PS_REAL16_SPACE
