/* One encoder layer, forward and backward, for d_model up to 128: operands of 16 bits (real16: real16_bf16.cu, real16_fp16.cu) on
 * tensor cores, fp32 sums, softmax and LayerNorm.
 *
 * Why: at level gemm a layer's activations cross device memory about 40 times. Here a block of 512 threads owns the 128 rows of
 * G = 128/N whole sequences; they stay in shared memory and registers from LN1 to the residual out. The rows are two halves of
 * 64, each of two warpgroups (sides) that share its products: by columns, or, between the two products of the feed-forward part, by
 * depth, so that a hidden layer's operand stays in registers. The other left operands are in shared memory in the panels that wgmma
 * reads, q, k and v too, of which a warp takes one (sequence, head) at a time. The layer's weights (2 (4 d^2 + 2 d f) bytes: 256 KB
 * at d 128, f 256) are more than an SM holds, so the copy engine streams them from L2 in chunks of 16 KB, five slots of them, each
 * used by all 128 rows; the warp that is the last to release a slot asks for its next chunk.
 *
 * Counts, weather (d 128, h 16, f 256, N 42, R 112,896 rows, 896 tiles of 126 rows, 6.8 a block of 132), a layer; at 1.8 GHz:
 *
 * forward: device memory 512 B a row read and 580 written (58 + 65 MB, 29 us at 4.3 TB/s); weights from L2 256 KB a tile (235 MB,
 * 43 us at 5.5 TB/s, beside the arithmetic); 262 kFLOP a row in the products (8.2 k clocks a tile at wgmma's 4,096 FLOP a clock)
 * and 24 k in attention; exponentials 16 heads x 42 x 48 a sequence and 256 tanh a row (8 k clocks a tile at 16 a clock); Philox 64
 * blocks a row. All in all 81 k instructions of a warp a tile, 20 k clocks at one a clock of each scheduler: 77 us at best; of
 * 95 k it issued in half of the clocks.
 *
 * backward: keeps r, each query's softmax sum and dropout's bits from the forward pass (256 + 4 h + (f + 2 d) / 8 bytes a row, once
 * written and once read: 21 us), which saves the first of two rounds of exponentials, W_o's product and A v before the
 * feed-forward part, the maxima, sums and divisions of the second round, and Philox. 426 kFLOP a row in products (13 k clocks a
 * tile) and 60 k in attention. Weights from L2: 26 chunks, 416 KB a tile. 123 k instructions of a warp a tile: 116 us at best; of
 * 136 k it issued in 0.4 of the clocks. Its code has to be small: straight-line code of 222 KB was fetched from L2 for every tile
 * (an SM caches 128 KB) at 15 clocks an instruction of a warp. So have its registers: a spilled one is read back from L2, for
 * shared memory leaves no L1 to speak of.
 *
 * weights' gradients: dW needs 262 kFLOP a row and 512 KB of fp32 sums a layer. On chip it would take a cluster of four SMs, each
 * with half its registers given to sums, and every operand sent to all four. Instead backward writes the operands once in 16 bits
 * (a, dqkv, merged, dr, ln2_out, d_hidden, hidden, dy masked: 3 KB a row, 352 MB with the empty rows), as panels, a chunk of a
 * layer's tiles a launch, and the last blocks of a launch (21 of 132) form the products and bias gradients of the chunk before: so
 * device memory, which they would wait for if all multiprocessors did that at once (82 us for 352 MB at 4.3 TB/s), is read beside
 * backward's arithmetic. A job's 64 rows are 1,024 clocks of wgmma, in which shared memory brings 96 KB to it and takes 48 to
 * 64 KB from L2; such a block takes 1,160 clocks alone, and beside backward, waiting for operands, 1,420 (1,850 in the job of 64).
 * Launches follow one another without a wait, since a chunk needs what the last launch but one wrote or an older one; operands and
 * scratch have three and two places for that. The last chunk of all is left for a launch of its own (117 MB). Operands are more
 * than L2 holds by the time they are read, so they pass it by (evict_first), and what a block parks for half a tile is held there
 * (evict_last): 30 us of a weather step.
 *
 * Instructions: gelu's 1/2, its polynomial's first factor and dropout's scales are left out of elements and put where sums are
 * finished (real16_tile.cuh); dropout only clears halves of packed words, by masks made of its bits; Philox takes its keys from the
 * arguments and begins with what a site's draws have in common; descriptors of products advance by one instruction.
 *
 * Heads of other widths than 8, 16 and 32 are padded to the next of these: where they make q, k, v and merged wider than d, forward
 * begins with copies of W_qkv, W_o and the vectors that have zeros there, and weights' gradients are added up without those places.
 * In bf16 it always copies W_qkv, as fp16, by which q, k and v are made, and in bf16, for the products backward.
 *
 * Dropout's bits are drawn in forward. Sums over rows are taken in a fixed order: the only atomic additions are of one thread.
 *
 * Here are the launches and the plan of the workspace. The kernels are in real16_forward.cuh, real16_backward.cuh and
 * real16_weights.cuh; what they are made of, in real16_tile.cuh (sizes, arguments, who owns what), real16_products.cuh,
 * real16_rows.cuh, real16_attention.cuh and real16_hidden.cuh. */
#ifndef PS_KERNELS_CUDA_ENCODER_STREAMED_REAL16_CUH
#define PS_KERNELS_CUDA_ENCODER_STREAMED_REAL16_CUH

#include "kernels/cuda/context.cuh"
#include "kernels/cuda/encoder/streamed/real16_backward.cuh"
#include "kernels/cuda/encoder/streamed/real16_forward.cuh"
#include "kernels/cuda/encoder/streamed/real16_weights.cuh"
#include "kernels/cuda/tensor_map.cuh"

namespace PS_REAL16_SPACE
{

/* ---- sizes ---- */

typedef const struct ps_encoder_request request;

static int group_of(request *r)
{
    return (int)(ROWS / r->patches);
}

/* Tiles of a layer. */
static int64_t tiles_of(request *r)
{
    return (r->sequences + group_of(r) - 1) / group_of(r);
}

/* e: columns of a head. */
static int head_of(request *r)
{
    return (int)(r->d_model / r->n_heads);
}

/* 2^bits are the columns that a head takes of q, k, v and merged: 8, 16 or 32. */
static int head_bits_of(request *r)
{
    return head_of(r) <= 8 ? 3 : head_of(r) <= 16 ? 4 : 5;
}

/* a: columns of q, k, v and merged; more than d where heads' weights are padded. */
static int64_t width_of(request *r)
{
    return r->n_heads << head_bits_of(r);
}

/* Elements of a layer's rows. */
static int64_t elements_of(request *r)
{
    return r->sequences * r->patches * r->d_model;
}

static float drop_scale_of(request *r)
{
    return r->dropout.threshold ? r->dropout.scale : 1.0f;
}

/* A weight [rows, parts * columns] for the copy engine: boxes of 64 rows and 64 columns of a part, zero outside, as panels. */
static enum ps_status weight_map(CUtensorMap *map, const void *weight, int64_t rows, int64_t parts, int64_t columns)
{
    PFN_cuTensorMapEncodeTiled_v12000 encode;
    PS_TRY(ps_tensor_map_encoder(&encode));
    const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)parts, (cuuint64_t)rows};
    const cuuint64_t strides[] = {(cuuint64_t)(2 * columns), (cuuint64_t)(2 * columns * parts)}; /* bytes, of all but the first */
    const cuuint32_t box[] = {64, 1, 64}, every[] = {1, 1, 1};
    if (encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, (void *)weight, sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
        return ps_fail(PS_DEVICE, "cuda: encoder layer: no tensor map of a weight [%lld, %lld]", (long long)rows,
                       (long long)(parts * columns));
    }
    return PS_OK;
}

/* What a layer keeps: r (real16 [S, N, d]), the logarithm of softmax's sums (fp32 [S, h, N]) and, from whole lines on, dropout's
 * bits. Bytes from its start. */
struct kept_places {
    size_t softmax, hidden, attention, output, bytes;
};

static struct kept_places kept_places_of(request *r)
{
    const size_t tiles = (size_t)tiles_of(r), chunks = (size_t)((r->d_ff + CHUNK - 1) / CHUNK), drawn = r->dropout.threshold != 0;
    struct kept_places places = {};
    places.softmax = (size_t)(2 * elements_of(r));
    places.hidden = (places.softmax + (size_t)(4 * r->sequences * r->patches * r->n_heads) + 127) / 128 * 128;
    places.attention = places.hidden + drawn * tiles * WARPS * chunks * HIDDEN_WORDS * sizeof(uint32_t);
    places.output = places.attention + drawn * tiles * THREADS * sizeof(uint32_t);
    places.bytes = (places.output + drawn * tiles * THREADS * sizeof(uint32_t) + 255) / 256 * 256;
    return places;
}

static bool is_padded(request *r)
{
    return width_of(r) != r->d_model;
}

/* Elements of a layer's copies (struct copying); 0: none are needed. */
static int64_t copied_of(request *r)
{
    const int64_t d = r->d_model, a = width_of(r);
    return is_padded(r) ? a * ((QKV_PARTS + 1) * d + PADDED_VECTORS) : PROJECTION_APART ? QKV_PARTS * a * d : 0;
}

/* Bytes of a layer's; the workspace begins with those of all layers. */
static int64_t copy_bytes_of(request *r)
{
    return (2 * copied_of(r) + (is_padded(r) ? 2 * width_of(r) * PADDED_VECTORS : 0) + 255) / 256 * 256;
}

static struct layer_vectors vectors_of(request *r, int64_t layer)
{
    const struct ps_encoder_layout *at = &r->layout;
    const float *p = r->parameters + layer * at->vector_stride;
    return {p + at->ln1_gamma, p + at->ln1_beta, p + at->b_qkv, p + at->b_o,
            p + at->ln2_gamma, p + at->ln2_beta, p + at->b_1,   p + at->b_2};
}

/* On W_2's product: dropout's scale behind gelu and behind that product, and what the hidden columns have too much. */
static float w_2_scale_of(request *r)
{
    return drop_scale_of(r) * drop_scale_of(r) / (2.0f * GELU_SCALE);
}

static enum ps_status arguments_of(request *r, int64_t layer, struct arguments *arguments)
{
    const struct ps_encoder_layout *at = &r->layout;
    const int64_t d = r->d_model, a = width_of(r), rows = elements_of(r);
    const real16 *const weights = (const real16 *)r->weights + layer * at->matrix_stride;
    const real16 *w_qkv = weights + at->w_qkv, *w_o = weights + at->w_o;
    struct arguments p = {};
    p.vectors = vectors_of(r, layer);
    if (copied_of(r)) {
        w_qkv = (const real16 *)((const char *)r->workspace + layer * copy_bytes_of(r));
    }
    if (is_padded(r)) {
        w_o = w_qkv + QKV_PARTS * a * d;
        const float *const v = (const float *)(w_o + a * d);
        p.vectors = {v, v + a, v + 2 * a, v + 5 * a, v + 6 * a, v + 7 * a, p.vectors.b_1, v + 8 * a};
    }
    PS_TRY(weight_map(&p.weights[WEIGHT_QKV], w_qkv, d, QKV_PARTS, a));
    PS_TRY(weight_map(&p.weights[WEIGHT_O], w_o, a, 1, d));
    PS_TRY(weight_map(&p.weights[WEIGHT_1], weights + at->w_1, d, 1, r->d_ff));
    PS_TRY(weight_map(&p.weights[WEIGHT_2], weights + at->w_2, r->d_ff, 1, d));
    p.sequences = (int)r->sequences;
    p.N = (int)r->patches;
    p.d = (int)d;
    p.a = (int)a;
    p.heads = (int)r->n_heads;
    p.by_heads = ps_divisor_make(r->n_heads);
    p.f = (int)r->d_ff;
    p.group = group_of(r);
    p.epsilon = (float)r->epsilon;
    p.per = 1.0f / (float)d;
    p.scale = 1.0f / sqrtf((float)head_of(r));
    p.attention = r->dropout;
    p.attention.site += 3 * (uint32_t)layer;
    p.attention.scale = drop_scale_of(r);
    p.hidden = p.output = p.attention;
    p.hidden.site += 1;
    p.hidden.first = ps_hidden_first(r);
    p.output.site += 2;
    p.w_2_scale = w_2_scale_of(r);
    if (r->dropout.threshold) { /* of all three */
        p.drawing = {ps_round_keys_make(r->dropout.seed), ps_below(r->dropout.threshold), ps_minus_below(r->dropout.threshold)};
    }
    const struct kept_places places = kept_places_of(r);
    char *const kept = (char *)r->kept + layer * places.bytes;
    p.u = (const real16 *)r->u + layer * rows;
    p.y = (real16 *)r->u + (layer + 1) * rows;
    p.r = (real16 *)kept;
    p.softmax = (float *)(kept + places.softmax);
    p.kept = {(uint32_t *)(kept + places.hidden), (uint32_t *)(kept + places.attention), (uint32_t *)(kept + places.output)};
    *arguments = p;
    return PS_OK;
}

/* What depends on the launch, which takes this many tiles of the layer, from tile `first` on. */
static void arguments_tiles(struct arguments *p, request *r, int64_t first, int64_t tiles)
{
    const int64_t before = first * p->group, rest = r->sequences - before;
    p->sequences = (int)(rest < tiles * p->group ? rest : tiles * p->group);
    p->first = before * r->patches;
    p->first_tile = (int)first;
}

/* Launch number n of so many, counted where few: those with `blocks` blocks but the first, which has first_blocks, and every
 * second, which has odd_blocks. */
static struct turn turn_of(unsigned *ended, bool few, int64_t n, int64_t launches, int64_t first_blocks, int64_t blocks,
                           int64_t odd_blocks)
{
    struct turn t = {};
    t.late = !few && n > 0;
    t.ended = few ? ended : NULL;
    t.own = (int)(n % COUNTS);
    t.first = n == 0;
    t.last = n + 1 == launches;
    if (n >= 2) {
        const int64_t before = n - 2;
        t.before = (int)(before % COUNTS);
        t.awaited = (unsigned)((before / COUNTS + 1) * (before % 2 ? odd_blocks : blocks));
        if (before % COUNTS == 0) {
            t.awaited += (unsigned)(first_blocks - blocks);
        }
    }
    return t;
}

typedef void forward_kernel(const struct arguments);
typedef void backward_kernel(const struct arguments, const struct gradient_arguments);

/* By heads of up to 8, 16 and 32 columns, and sequences of up to 16, 32, 48 and 64 patches. */
static forward_kernel *forward_of(request *r)
{
    static forward_kernel *const kernels[3][4] = {
        {layer_forward<1, 8>, layer_forward<2, 8>, layer_forward<3, 8>, layer_forward<4, 8>},
        {layer_forward<1, 16>, layer_forward<2, 16>, layer_forward<3, 16>, layer_forward<4, 16>},
        {layer_forward<1, 32>, layer_forward<2, 32>, layer_forward<3, 32>, layer_forward<4, 32>}};
    return kernels[head_bits_of(r) - 3][(r->patches - 1) / 16];
}

static backward_kernel *backward_of(request *r)
{
    static backward_kernel *const kernels[3][4] = {
        {layer_backward<1, 8>, layer_backward<2, 8>, layer_backward<3, 8>, layer_backward<4, 8>},
        {layer_backward<1, 16>, layer_backward<2, 16>, layer_backward<3, 16>, layer_backward<4, 16>},
        {layer_backward<1, 32>, layer_backward<2, 32>, layer_backward<3, 32>, layer_backward<4, 32>}};
    return kernels[head_bits_of(r) - 3][(r->patches - 1) / 16];
}

static enum ps_status shared_bytes(const void *kernel, int bytes)
{
    return ps_cuda_allow_shared(kernel, bytes, "encoder layer: shared memory");
}

static enum ps_status forward_layer(const struct ps_cuda_context *c, request *r, int64_t layer)
{
    struct arguments p;
    PS_TRY(arguments_of(r, layer, &p));
    const int64_t tiles = tiles_of(r), all = c->multiprocessors;
    forward_kernel *const kernel = forward_of(r);
    PS_TRY(shared_bytes((const void *)kernel, FORWARD_BYTES));
    /* Two launches, so that blocks of the next layer's first one fill multiprocessors that this one's second one leaves: of whole
     * waves, or of half the tiles where those are two. */
    const int64_t waves = (tiles + all - 1) / all, most = waves == 2 ? (tiles + 1) / 2 : (waves + 1) / 2 * all;
    const int64_t second = tiles - most < all ? tiles - most : all, first_blocks = most < all ? most : all;
    enum { FEW_WAVES = 3 };
    for (int64_t first = 0; first < tiles; first += most) {
        const int64_t mine = tiles - first < most ? tiles - first : most;
        arguments_tiles(&p, r, first, mine);
        p.blocks = (int)(mine < all ? mine : all);
        p.copied = copied_of(r) && layer == 0 && first == 0;
        if (waves > 1) {
            p.turn =
                turn_of(c->turns, waves <= FEW_WAVES, 2 * layer + first / most, 2 * r->layers, first_blocks, first_blocks, second);
        }
        ps_cuda_launch(c, kernel, (unsigned)p.blocks, THREADS, FORWARD_BYTES, p);
        PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, forward"));
    }
    return PS_OK;
}

/* How the launches share the work: chunks of a layer's tiles, each a launch of layer_backward, whose last blocks form the weights'
 * gradients of the chunk before; those of the last chunk have a launch of their own, and one more adds everything up. */
struct plan {
    int tiles, chunks;                                 /* of a chunk, but for the last; of a layer */
    int jobs, slices;                                  /* of weights' gradients; of a job beside backward */
    int most_slices, gradient_blocks, blocks;          /* of GRADIENT_VO; of all jobs; those that are left for tiles */
    int last_slices;                                   /* of a job, of the last chunk */
    size_t a, dqkv, merged, dr, ln2, d_hidden, hidden; /* operands of a chunk: bytes from its start, */
    size_t dy, operands;                               /* and of all; there are three of them */
    size_t parked, warp_sums;                          /* of a launch; there are two */
    size_t norm_sums, partials, bytes;                 /* the workspace: [3] operands, [2] parked and warp_sums, then these; the
                                                          last chunk's partial sums lie where operands of an older one were */
};

static size_t part(size_t *end, int64_t bytes)
{
    const size_t begin = *end;
    *end += ((size_t)bytes + 255) / 256 * 256;
    return begin;
}

static int pieces_of(int hidden_panels)
{
    return (hidden_panels + JOB_PANELS - 1) / JOB_PANELS;
}

/* A tile takes 45 us, of more than 48 patches 50, and its gradients 2 times 0.8 us in each of the jobs: one multiprocessor in 26,
 * or 31, keeps up with the others, and one in 22 of GRADIENT_VO, which brings more bytes. Chunks: three tiles a block, and three
 * chunks' operands at most 351 MiB. */
static struct plan plan_of(const struct ps_cuda_context *c, request *r)
{
    struct plan plan = {};
    const int64_t panels = (r->d_ff + 63) / 64, f = 64 * panels, tile = 2 * ROWS * (8 * D + 2 * f);
    const int all = c->multiprocessors;
    plan.jobs = 2 + 2 * pieces_of((int)panels);
    plan.slices = all < 31 ? 1 : all / (r->patches > 48 ? 31 : 26);
    plan.most_slices = all < 22 ? 1 : all / 22;
    plan.gradient_blocks = plan.slices * (plan.jobs - 1) + plan.most_slices;
    plan.blocks = all > plan.gradient_blocks ? all - plan.gradient_blocks : 1;
    plan.last_slices = all / plan.jobs > plan.most_slices ? all / plan.jobs : plan.most_slices;
    const int64_t tiles = tiles_of(r), fit = ((int64_t)351 << 20) / (3 * tile);
    const int64_t three = 3 * plan.blocks, most = three < fit ? three : fit;
    plan.chunks = (int)((tiles + most - 1) / most);
    if (plan.chunks == 1 && tiles > plan.blocks) { /* so that launches overlap */
        plan.chunks = 2;
    }
    plan.tiles = (int)((tiles + plan.chunks - 1) / plan.chunks);
    plan.chunks = (int)((tiles + plan.tiles - 1) / plan.tiles);
    plan.blocks = plan.tiles < plan.blocks ? plan.tiles : plan.blocks;
    const int64_t rows = (tiles < most ? tiles : most) * ROWS; /* so that fewer sequences never need more */
    plan.a = part(&plan.operands, 2 * rows * D);
    plan.dqkv = part(&plan.operands, 6 * rows * D);
    plan.merged = part(&plan.operands, 2 * rows * D);
    plan.dr = part(&plan.operands, 2 * rows * D);
    plan.ln2 = part(&plan.operands, 2 * rows * D);
    plan.d_hidden = part(&plan.operands, 2 * rows * f);
    plan.hidden = part(&plan.operands, 2 * rows * f);
    plan.dy = part(&plan.operands, 2 * rows * D);
    const int64_t partials = plan.jobs * PARTS * (int64_t)(4 * PART_FLOATS); /* of a slice */
    const size_t last_partials = plan.last_slices * partials;                /* where operands of an older chunk were */
    plan.operands = plan.operands > last_partials ? plan.operands : last_partials;
    plan.bytes = 3 * plan.operands;
    plan.parked = (size_t)4 * all * ROWS * D;
    plan.warp_sums = (size_t)4 * all * WARPS * NORM_SUMS;
    part(&plan.bytes, (int64_t)(2 * (plan.parked + plan.warp_sums)));
    plan.norm_sums = part(&plan.bytes, r->layers * 2 * 4 * all * NORM_SUMS);
    plan.partials = part(&plan.bytes, r->layers * plan.most_slices * partials);
    return plan;
}

/* Operands of launch number n. */
static struct operands operands_of(const struct plan &plan, char *workspace, int64_t n)
{
    char *w = workspace + n % 3 * plan.operands;
    return {(real16 *)(w + plan.a),   (real16 *)(w + plan.dqkv),     (real16 *)(w + plan.merged), (real16 *)(w + plan.dr),
            (real16 *)(w + plan.ln2), (real16 *)(w + plan.d_hidden), (real16 *)(w + plan.hidden), (real16 *)(w + plan.dy)};
}

/* Of the chunk of launch number n; last: of all, in a launch of its own. */
static struct gradient_arguments gradients_of(request *r, const struct plan &plan, char *workspace, int64_t n, bool last)
{
    const struct operands o = operands_of(plan, workspace, n);
    const int panels = ((int)r->d_ff + 63) / 64, chunk = (int)(n % plan.chunks);
    const int64_t tiles = tiles_of(r), number = n / plan.chunks;
    struct gradient_arguments g = {};
    g.d = (int)r->d_model;
    g.f = (int)r->d_ff;
    g.layers = (int)r->layers;
    g.row_blocks = 2 * (int)(chunk + 1 < plan.chunks ? plan.tiles : tiles - (int64_t)chunk * plan.tiles);
    g.add = !last && chunk > 0;
    g.partials = last ? (float *)(workspace + (n + 1) % 3 * plan.operands)
                      : (float *)(workspace + plan.partials) + number * plan.most_slices * plan.jobs * PARTS * PART_FLOATS;
    const auto panels_of = [](const real16 *from, int first) { return from + (int64_t)first * (64 * 64); };
    g.jobs[g.jobs_count++] = {GRADIENT_QK, 0, 0, 3, 0, 0, {{o.a, 2, 2}, {o.dqkv, 6, 2}, {panels_of(o.dqkv, 2), 6, 2}}};
    g.jobs[g.jobs_count++] = {
        GRADIENT_VO, 0, 0, 4, 0, 0, {{o.a, 2, 2}, {panels_of(o.dqkv, 4), 6, 2}, {o.merged, 2, 2}, {o.dr, 2, 2}}};
    const int pieces = pieces_of(panels);
    for (int i = 0, first = 0; i < pieces; i++) { /* an even number of panels each, but for the last */
        const int rest = panels - first, wide = ((rest + pieces - i - 1) / (pieces - i) + 1) / 2 * 2;
        const int count = wide < rest ? wide : rest;
        struct gradient_job &one = g.jobs[g.jobs_count++], &two = g.jobs[g.jobs_count++];
        one = {GRADIENT_1, first, count, 0, 0, 0, {{o.ln2, 2, 2}}};
        two = {GRADIENT_2, first, count, 0, 0, 0, {}};
        for (int k = 0; k < count; k += 2) {
            const int both = count - k < 2 ? 1 : 2;
            one.pairs[++one.pairs_count] = {panels_of(o.d_hidden, first + k), panels, both};
            two.pairs[two.pairs_count++] = {panels_of(o.hidden, first + k), panels, both};
        }
        one.pairs_count++;
        two.pairs[two.pairs_count++] = {o.dy, 2, 2};
        first += wide;
    }
    for (int i = 0; i < g.jobs_count; i++) {
        struct gradient_job &job = g.jobs[i];
        job.usual_slices = job.kind == GRADIENT_VO ? plan.most_slices : plan.slices;
        job.slices = last ? plan.last_slices : job.usual_slices;
    }
    return g;
}

/* To be called for the last layer first: the weights' gradients of all layers are complete after the first layer's call. */
static enum ps_status backward_layer(const struct ps_cuda_context *c, request *r, int64_t layer)
{
    const struct plan plan = plan_of(c, r);
    const int64_t tiles = tiles_of(r), number = r->layers - 1 - layer;
    const int all = c->multiprocessors;
    backward_kernel *const kernel = backward_of(r);
    PS_TRY(shared_bytes((const void *)kernel, BACKWARD_BYTES));
    char *w = (char *)r->workspace + r->layers * copy_bytes_of(r);
    struct arguments p;
    PS_TRY(arguments_of(r, layer, &p));
    p.dy = (const real16 *)(number ? r->du : r->dy); /* du may be dy */
    p.du = (real16 *)r->du;
    int norm_blocks[2] = {}; /* of this layer's even and odd chunks */
    for (int chunk = 0; chunk < plan.chunks; chunk++) {
        const int64_t n = number * plan.chunks + chunk, first = (int64_t)chunk * plan.tiles;
        const int64_t mine = tiles - first < plan.tiles ? tiles - first : plan.tiles;
        const int64_t first_blocks = all < plan.tiles ? all : plan.tiles, most = n ? plan.blocks : first_blocks;
        char *const of_launch = w + 3 * plan.operands + n % 2 * (plan.parked + plan.warp_sums);
        arguments_tiles(&p, r, first, mine);
        p.blocks = (int)(plan.chunks == 1 && mine < most ? mine : most);
        p.operands = operands_of(plan, w, n);
        p.parked = (float *)of_launch;
        p.warp_sums = (float *)(of_launch + plan.parked);
        p.norm_sums = (float *)(w + plan.norm_sums) + (2 * number + chunk % 2) * all * NORM_SUMS;
        p.first_norms = chunk < 2; /* a layer's even launches share warp_sums, and so do the odd ones */
        p.last_norms = chunk + 2 >= plan.chunks;
        p.norm_blocks = plan.blocks;
        if (plan.chunks > 1) {
            const int64_t blocks = plan.blocks + plan.gradient_blocks;
            p.turn = turn_of(c->turns + PS_TURN_COUNTS, plan.tiles < 2 * plan.blocks, n, r->layers * plan.chunks, first_blocks,
                             blocks, blocks);
        }
        norm_blocks[chunk % 2] = norm_blocks[chunk % 2] > p.blocks ? norm_blocks[chunk % 2] : p.blocks;
        struct gradient_arguments before = {};
        if (n) {
            before = gradients_of(r, plan, w, n - 1, false);
        }
        ps_cuda_launch(c, kernel, (unsigned)(p.blocks + (n ? plan.gradient_blocks : 0)), THREADS, BACKWARD_BYTES, p, before);
        PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, backward"));
    }
    if (number + 1 < r->layers) {
        return PS_OK;
    }
    struct gradient_arguments g = gradients_of(r, plan, w, r->layers * plan.chunks - 1, true);
    const struct ps_encoder_layout *at = &r->layout;
    float *const x = r->gradients;
    g.gradients = {x + at->w_qkv,    x + at->w_o,   x + at->w_1,       x + at->w_2,       x + at->ln1_gamma,
                   x + at->ln1_beta, x + at->b_qkv, x + at->b_o,       x + at->ln2_gamma, x + at->ln2_beta,
                   x + at->b_1,      x + at->b_2,   at->matrix_stride, at->vector_stride};
    g.e = head_of(r);
    g.head_bits = head_bits_of(r);
    g.attention_scale = g.output_scale = drop_scale_of(r);
    g.w_2_scale = w_2_scale_of(r);
    g.norm_sums = (const float *)(w + plan.norm_sums);
    g.beside = (const float *)(w + plan.partials);
    g.first_beside = plan.chunks > 1;
    g.most_slices = plan.most_slices;
    g.most_blocks = all;
    const int64_t first_tiles = plan.chunks > 1 ? plan.tiles : tiles;
    for (int chunk = 0; chunk < 2; chunk++) {
        g.norm_blocks[1][chunk] = norm_blocks[chunk];
        g.norm_blocks[0][chunk] = norm_blocks[chunk];
    }
    g.norm_blocks[0][0] = (int)(first_tiles < all ? first_tiles : all);
    PS_TRY(shared_bytes((const void *)weight_gradients, GRADIENT_BYTES));
    ps_cuda_launch(c, weight_gradients, (unsigned)(plan.last_slices * plan.jobs), THREADS, GRADIENT_BYTES, g);
    PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, weights' gradients"));
    ps_cuda_launch(c, add_gradients, (unsigned)(r->layers * (plan.jobs * PARTS * ADD_BLOCKS + NORM_SUMS / 32)), 32 * ADD_WARPS, 0,
                   g);
    return ps_cuda_check(cudaGetLastError(), "encoder layer, sums of gradients");
}

/* ---- all layers ---- */

/* The copies, if there are to be any. */
static enum ps_status make_copies(const struct ps_cuda_context *c, request *r)
{
    const struct ps_encoder_layout *at = &r->layout;
    const int64_t all = copied_of(r);
    if (!all) {
        return PS_OK;
    }
    const struct copying p = {(const real16 *)r->weights + at->w_qkv,
                              (const real16 *)r->weights + at->w_o,
                              r->parameters + at->w_qkv,
                              vectors_of(r, 0),
                              at->matrix_stride,
                              at->vector_stride,
                              (char *)r->workspace,
                              copy_bytes_of(r),
                              (int)r->d_model,
                              (int)width_of(r),
                              head_of(r),
                              head_bits_of(r),
                              (int)all};
    ps_cuda_launch(c, copy_weights, dim3(ps_cuda_blocks(all, COPY_THREADS), (unsigned)r->layers), COPY_THREADS, 0, p);
    return ps_cuda_check(cudaGetLastError(), "encoder layer, copies of weights");
}

/* As measured (docs/benchmarks.md). A tile costs the same whatever d is and whatever of its rows whole sequences fill, while level
 * gemm pays for what is there: a row about as much as 128 columns more, and fewer columns less, where d_model is a multiple of 16
 * and heads have 8, 16 or 32. Its many launches cost some tiles more: where there are no more tiles than multiprocessors that
 * decides, but very few leave multiprocessors idle. And the kernels of wider heads have too few registers for many patches. */
static bool is_slower(request *r, int64_t all)
{
    const int64_t tiles = tiles_of(r), d = r->d_model, n = r->patches;
    const int64_t taken = 1 << head_bits_of(r), least = taken > 16 ? (n > 32 ? 137 : 123) : taken > 8 && n <= 48 ? 121 : 125;
    const int64_t columns = d % 16 == 0 && head_of(r) == taken ? d : 128;
    const int64_t filled = ROWS / n * n * (128 + columns) / 2, launches = all * 3 / 16;
    return tiles < (all + 4) / 5 || d <= 64 || (taken > 16 && n > 48) ||
           (tiles > all && (tiles - launches) * least * ROWS > tiles * filled);
}

static enum ps_status streamed_plan(const struct ps_kernels *k, request *r, struct ps_encoder_plan *plan)
{
    const int64_t d = r->d_model;
    const struct ps_cuda_context *c = ps_cuda(k);
    if (d > D || d % 8 || r->d_ff > MAX_F || r->d_ff % 8 || r->patches > 64 || r->n_heads < 1 || d % r->n_heads ||
        head_of(r) > 32 || width_of(r) > D || r->sequences * r->patches > INT32_MAX / 2) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder layer on chip: d_model %lld, n_heads %lld, d_ff %lld, %lld patches of %lld sequences: d_model up to %d "
            "and d_ff up to %d (multiples of 8), heads of up to 32 columns, each padded to 8, 16 or 32, that are %d together, and "
            "up to 64 patches fit",
            (long long)d, (long long)r->n_heads, (long long)r->d_ff, (long long)r->patches, (long long)r->sequences, D, MAX_F, D);
    }
    if (c->shared_bytes < BACKWARD_BYTES) {
        return ps_fail(PS_UNSUPPORTED, "encoder layer on chip: needs %d bytes of shared memory a block, the device has %d",
                       (int)BACKWARD_BYTES, c->shared_bytes);
    }
    plan->slower = is_slower(r, c->multiprocessors);
    plan->kernels = "streamed/real16";
    plan->kept_bytes = kept_places_of(r).bytes * (size_t)r->layers;
    return PS_OK;
}

static enum ps_encoder_span streamed_span(const struct ps_kernels *, request *, const struct ps_encoder_plan *)
{
    return PS_SPAN_LAYERS;
}

/* The rows are taken in chunks, so that it stays below 400 MiB whatever S, and 4 to 6 MB a layer. */
static size_t streamed_workspace_bytes(const struct ps_kernels *k, request *r, const struct ps_encoder_plan *)
{
    return (size_t)(r->layers * copy_bytes_of(r)) + plan_of(ps_cuda(k), r).bytes;
}

static enum ps_status streamed_forward(const struct ps_kernels *k, request *r, const struct ps_encoder_plan *)
{
    PS_TRY(make_copies(ps_cuda(k), r));
    for (int64_t layer = 0; layer < r->layers; layer++) {
        PS_TRY(forward_layer(ps_cuda(k), r, layer));
    }
    return PS_OK;
}

static enum ps_status streamed_backward(const struct ps_kernels *k, request *r, const struct ps_encoder_plan *)
{
    for (int64_t layer = r->layers; layer-- > 0;) {
        PS_TRY(backward_layer(ps_cuda(k), r, layer));
    }
    return PS_OK;
}

const struct ps_encoder_family ps_encoder_streamed = {streamed_plan, streamed_span, streamed_workspace_bytes, streamed_forward,
                                                      streamed_backward};

} // namespace PS_REAL16_SPACE

#endif
