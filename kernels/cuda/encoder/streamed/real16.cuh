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

/* ---- a layer ---- */

struct layer {
    int64_t sequences, patches, d_model, n_heads, d_ff; /* S, N, d, h, f */
    int64_t layers, number;                             /* of the encoder; this one's, 0 for the last */
    float epsilon;
    struct ps_dropout attention, hidden, output;
    const void *u;                /* real16 [S, N, d] */
    void *residual;               /* real16 [S, N, d]: r. Forward: =; backward reads it */
    float *softmax;               /* fp32 [S, h, N]: log2 of each query's sum of exponentials. Forward: =; backward reads it */
    void *kept;                   /* dropout's draws, a bit an element. Forward: =; backward reads it */
    const void *w_qkv;            /* real16 [d, 3a] */
    const void *w_o;              /* real16 [a, d] */
    const void *w_1;              /* real16 [d, f] */
    const void *w_2;              /* real16 [f, d] */
    struct layer_vectors vectors; /* fp32; b_qkv [3a], the others but b_1 [a] */
    const struct ps_cuda_context *context;
};

static int group_of(const struct layer *l)
{
    return (int)(ROWS / l->patches);
}

/* Tiles of a layer. */
static int64_t tiles_of(const struct layer *l)
{
    return (l->sequences + group_of(l) - 1) / group_of(l);
}

/* e: columns of a head. */
static int head_of(const struct layer *l)
{
    return (int)(l->d_model / l->n_heads);
}

/* 2^bits are the columns that a head takes of q, k, v and merged: 8, 16 or 32. */
static int head_bits_of(const struct layer *l)
{
    return head_of(l) <= 8 ? 3 : head_of(l) <= 16 ? 4 : 5;
}

/* a: columns of q, k, v and merged; more than d where heads' weights are padded. */
static int64_t width_of(const struct layer *l)
{
    return l->n_heads << head_bits_of(l);
}

static enum ps_status supported(const struct layer *l)
{
    const int64_t d = l->d_model;
    if (d > D || d % 8 || l->d_ff > MAX_F || l->d_ff % 8 || l->patches > 64 || l->n_heads < 1 || d % l->n_heads ||
        head_of(l) > 32 || width_of(l) > D || l->sequences * l->patches > INT32_MAX / 2) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder layer on chip: d_model %lld, n_heads %lld, d_ff %lld, %lld patches of %lld sequences: d_model up to %d "
            "and d_ff up to %d (multiples of 8), heads of up to 32 columns, each padded to 8, 16 or 32, that are %d together, and "
            "up to 64 patches fit",
            (long long)d, (long long)l->n_heads, (long long)l->d_ff, (long long)l->patches, (long long)l->sequences, D, MAX_F, D);
    }
    if (l->context->shared_bytes < BACKWARD_BYTES) {
        return ps_fail(PS_UNSUPPORTED, "encoder layer on chip: needs %d bytes of shared memory a block, the device has %d",
                       (int)BACKWARD_BYTES, l->context->shared_bytes);
    }
    return PS_OK;
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

/* Of dropout's bits in `kept`: bytes from its start. */
struct kept_places {
    size_t hidden, attention, output, bytes;
};

static struct kept_places kept_places_of(const struct layer *l)
{
    const size_t tiles = (size_t)tiles_of(l), chunks = (size_t)((l->d_ff + CHUNK - 1) / CHUNK);
    struct kept_places places = {};
    places.attention = l->hidden.threshold ? tiles * WARPS * chunks * HIDDEN_WORDS * sizeof(uint32_t) : 0;
    places.output = places.attention + (l->attention.threshold ? tiles * THREADS * sizeof(uint32_t) : 0);
    places.bytes = places.output + (l->output.threshold ? tiles * THREADS * sizeof(uint32_t) : 0);
    return places;
}

/* On W_2's product: dropout's scale behind gelu and behind that product, and what the hidden columns have too much. */
static float w_2_scale_of(const struct layer *l)
{
    return l->hidden.scale * l->output.scale / (2.0f * GELU_SCALE);
}

static enum ps_status arguments_of(const struct layer *l, struct arguments *arguments)
{
    struct arguments p = {};
    PS_TRY(weight_map(&p.weights[WEIGHT_QKV], l->w_qkv, l->d_model, 3, width_of(l)));
    PS_TRY(weight_map(&p.weights[WEIGHT_O], l->w_o, width_of(l), 1, l->d_model));
    PS_TRY(weight_map(&p.weights[WEIGHT_1], l->w_1, l->d_model, 1, l->d_ff));
    PS_TRY(weight_map(&p.weights[WEIGHT_2], l->w_2, l->d_ff, 1, l->d_model));
    p.sequences = (int)l->sequences;
    p.N = (int)l->patches;
    p.d = (int)l->d_model;
    p.a = (int)width_of(l);
    p.heads = (int)l->n_heads;
    p.by_heads = ps_divisor_make(l->n_heads);
    p.f = (int)l->d_ff;
    p.group = group_of(l);
    p.epsilon = l->epsilon;
    p.per = 1.0f / (float)l->d_model;
    p.scale = 1.0f / sqrtf((float)head_of(l));
    p.attention = l->attention;
    p.hidden = l->hidden;
    p.output = l->output;
    p.w_2_scale = w_2_scale_of(l);
    if (l->hidden.threshold) { /* of all three */
        p.drawing = {ps_round_keys_make(l->hidden.seed), ps_below(l->hidden.threshold), ps_minus_below(l->hidden.threshold)};
    }
    p.u = (const real16 *)l->u;
    p.r = (real16 *)l->residual;
    p.softmax = (float *)l->softmax;
    const struct kept_places places = kept_places_of(l);
    p.kept.hidden = (uint32_t *)((char *)l->kept + places.hidden);
    p.kept.attention = (uint32_t *)((char *)l->kept + places.attention);
    p.kept.output = (uint32_t *)((char *)l->kept + places.output);
    p.vectors = l->vectors;
    *arguments = p;
    return PS_OK;
}

/* What depends on the launch, which takes this many tiles of the layer, from tile `first` on. */
static void arguments_tiles(struct arguments *p, const struct layer *l, int64_t first, int64_t tiles)
{
    const int64_t before = first * p->group, rest = l->sequences - before;
    p->sequences = (int)(rest < tiles * p->group ? rest : tiles * p->group);
    p->first = before * l->patches;
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
static forward_kernel *forward_of(const struct layer *l)
{
    static forward_kernel *const kernels[3][4] = {
        {layer_forward<1, 8>, layer_forward<2, 8>, layer_forward<3, 8>, layer_forward<4, 8>},
        {layer_forward<1, 16>, layer_forward<2, 16>, layer_forward<3, 16>, layer_forward<4, 16>},
        {layer_forward<1, 32>, layer_forward<2, 32>, layer_forward<3, 32>, layer_forward<4, 32>}};
    return kernels[head_bits_of(l) - 3][(l->patches - 1) / 16];
}

static backward_kernel *backward_of(const struct layer *l)
{
    static backward_kernel *const kernels[3][4] = {
        {layer_backward<1, 8>, layer_backward<2, 8>, layer_backward<3, 8>, layer_backward<4, 8>},
        {layer_backward<1, 16>, layer_backward<2, 16>, layer_backward<3, 16>, layer_backward<4, 16>},
        {layer_backward<1, 32>, layer_backward<2, 32>, layer_backward<3, 32>, layer_backward<4, 32>}};
    return kernels[head_bits_of(l) - 3][(l->patches - 1) / 16];
}

static enum ps_status shared_bytes(const void *kernel, int bytes)
{
    return ps_cuda_allow_shared(kernel, bytes, "encoder layer: shared memory");
}

/* y = the layer of u; residual = r. y real16 [S, N, d], 16-byte aligned like every such tensor here. */
static enum ps_status forward_layer(const struct layer *l, void *y)
{
    PS_TRY(supported(l));
    struct arguments p;
    PS_TRY(arguments_of(l, &p));
    p.y = (real16 *)y;
    const int64_t tiles = tiles_of(l), all = l->context->multiprocessors;
    forward_kernel *const kernel = forward_of(l);
    PS_TRY(shared_bytes((const void *)kernel, FORWARD_BYTES));
    /* Two launches, so that blocks of the next layer's first one fill multiprocessors that this one's second one leaves: of whole
     * waves, or of half the tiles where those are two. */
    const int64_t waves = (tiles + all - 1) / all, most = waves == 2 ? (tiles + 1) / 2 : (waves + 1) / 2 * all;
    const int64_t second = tiles - most < all ? tiles - most : all, first_blocks = most < all ? most : all;
    const int64_t layer = l->layers - 1 - l->number;
    enum { FEW_WAVES = 3 };
    for (int64_t first = 0; first < tiles; first += most) {
        const int64_t mine = tiles - first < most ? tiles - first : most;
        arguments_tiles(&p, l, first, mine);
        p.blocks = (int)(mine < all ? mine : all);
        if (waves > 1) {
            p.turn = turn_of(l->context->turns, waves <= FEW_WAVES, 2 * layer + first / most, 2 * l->layers, first_blocks,
                             first_blocks, second);
        }
        ps_cuda_launch(l->context, kernel, (unsigned)p.blocks, THREADS, FORWARD_BYTES, p);
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
static struct plan plan_of(const struct layer *l)
{
    struct plan plan = {};
    const int64_t panels = (l->d_ff + 63) / 64, f = 64 * panels, tile = 2 * ROWS * (8 * D + 2 * f);
    const int all = l->context->multiprocessors;
    plan.jobs = 2 + 2 * pieces_of((int)panels);
    plan.slices = all < 31 ? 1 : all / (l->patches > 48 ? 31 : 26);
    plan.most_slices = all < 22 ? 1 : all / 22;
    plan.gradient_blocks = plan.slices * (plan.jobs - 1) + plan.most_slices;
    plan.blocks = all > plan.gradient_blocks ? all - plan.gradient_blocks : 1;
    plan.last_slices = all / plan.jobs > plan.most_slices ? all / plan.jobs : plan.most_slices;
    const int64_t tiles = tiles_of(l), fit = ((int64_t)351 << 20) / (3 * tile);
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
    plan.norm_sums = part(&plan.bytes, l->layers * 2 * 4 * all * NORM_SUMS);
    plan.partials = part(&plan.bytes, l->layers * plan.most_slices * partials);
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
static struct gradient_arguments gradients_of(const struct layer *l, const struct plan &plan, char *workspace, int64_t n, bool last)
{
    const struct operands o = operands_of(plan, workspace, n);
    const int panels = ((int)l->d_ff + 63) / 64, chunk = (int)(n % plan.chunks);
    const int64_t tiles = tiles_of(l), number = n / plan.chunks;
    struct gradient_arguments g = {};
    g.d = (int)l->d_model;
    g.f = (int)l->d_ff;
    g.layers = (int)l->layers;
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

/* du =, gradients += (fp32). du may be dy; dy, du real16 [S, N, d]. To be called for the last layer first, each with the same
 * workspace: the weights' gradients of all layers are complete after the first layer's call, which is given its own. */
static enum ps_status backward_layer(const struct layer *l, void *du, const void *dy, const struct layer_gradients *gradients,
                                     void *workspace)
{
    PS_TRY(supported(l));
    const struct plan plan = plan_of(l);
    const int64_t tiles = tiles_of(l), number = l->number;
    const int all = l->context->multiprocessors;
    backward_kernel *const kernel = backward_of(l);
    PS_TRY(shared_bytes((const void *)kernel, BACKWARD_BYTES));
    char *w = (char *)workspace;
    struct arguments p;
    PS_TRY(arguments_of(l, &p));
    p.dy = (const real16 *)dy;
    p.du = (real16 *)du;
    int norm_blocks[2] = {}; /* of this layer's even and odd chunks */
    for (int chunk = 0; chunk < plan.chunks; chunk++) {
        const int64_t n = number * plan.chunks + chunk, first = (int64_t)chunk * plan.tiles;
        const int64_t mine = tiles - first < plan.tiles ? tiles - first : plan.tiles;
        const int64_t first_blocks = all < plan.tiles ? all : plan.tiles, most = n ? plan.blocks : first_blocks;
        char *const of_launch = w + 3 * plan.operands + n % 2 * (plan.parked + plan.warp_sums);
        arguments_tiles(&p, l, first, mine);
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
            p.turn = turn_of(l->context->turns + PS_TURN_COUNTS, plan.tiles < 2 * plan.blocks, n, l->layers * plan.chunks,
                             first_blocks, blocks, blocks);
        }
        norm_blocks[chunk % 2] = norm_blocks[chunk % 2] > p.blocks ? norm_blocks[chunk % 2] : p.blocks;
        struct gradient_arguments before = {};
        if (n) {
            before = gradients_of(l, plan, w, n - 1, false);
        }
        ps_cuda_launch(l->context, kernel, (unsigned)(p.blocks + (n ? plan.gradient_blocks : 0)), THREADS, BACKWARD_BYTES, p,
                       before);
        PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, backward"));
    }
    if (number + 1 < l->layers) {
        return PS_OK;
    }
    struct gradient_arguments g = gradients_of(l, plan, w, l->layers * plan.chunks - 1, true);
    g.gradients = *gradients;
    g.e = head_of(l);
    g.head_bits = head_bits_of(l);
    g.attention_scale = l->attention.scale;
    g.output_scale = l->output.scale;
    g.w_2_scale = w_2_scale_of(l);
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
    ps_cuda_launch(l->context, weight_gradients, (unsigned)(plan.last_slices * plan.jobs), THREADS, GRADIENT_BYTES, g);
    PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder layer, weights' gradients"));
    ps_cuda_launch(l->context, add_gradients, (unsigned)(l->layers * (plan.jobs * PARTS * ADD_BLOCKS + NORM_SUMS / 32)),
                   32 * ADD_WARPS, 0, g);
    return ps_cuda_check(cudaGetLastError(), "encoder layer, sums of gradients");
}

/* ---- all layers ---- */

/* What a layer keeps: r (real16 [S, N, d]) and the logarithm of softmax's sums (fp32 [S, h, N]); then, from whole lines on,
 * dropout's bits. */
static size_t bits_place(const struct layer *l)
{
    const int64_t rows = l->sequences * l->patches;
    return (size_t)(2 * rows * l->d_model + 4 * rows * l->n_heads + 127) / 128 * 128;
}

static size_t layer_kept_bytes(const struct layer *l)
{
    return (bits_place(l) + kept_places_of(l).bytes + 255) / 256 * 256;
}

/* Of any layer, without its memory. */
static struct layer sizes_of(const struct ps_kernels *k, const struct ps_encoder_request *r)
{
    struct layer l = {};
    l.sequences = r->sequences;
    l.patches = r->patches;
    l.d_model = r->d_model;
    l.n_heads = r->n_heads;
    l.d_ff = r->d_ff;
    l.layers = r->layers;
    l.epsilon = (float)r->epsilon;
    l.attention = r->dropout;
    l.attention.scale = r->dropout.threshold ? r->dropout.scale : 1.0f;
    l.hidden = l.output = l.attention;
    l.hidden.first = ps_hidden_first(r);
    l.context = ps_cuda(k);
    return l;
}

/* Bytes of a layer's padded weights (struct padding), with which the workspace begins; 0: none are needed. */
static int64_t copy_bytes_of(const struct layer *l)
{
    const int64_t a = width_of(l);
    return a == l->d_model ? 0 : (4 * a * (2 * l->d_model + PADDED_VECTORS) + 255) / 256 * 256;
}

static struct layer_vectors vectors_of(const struct ps_encoder_request *r, int64_t layer)
{
    const struct ps_encoder_layout *at = &r->offsets;
    const float *p = r->parameters + layer * at->vector_stride;
    return {p + at->ln1_gamma, p + at->ln1_beta, p + at->b_qkv, p + at->b_o,
            p + at->ln2_gamma, p + at->ln2_beta, p + at->b_1,   p + at->b_2};
}

static struct layer layer_of(const struct ps_kernels *k, const struct ps_encoder_request *r, int64_t layer)
{
    const struct ps_encoder_layout *at = &r->offsets;
    const int64_t rows = r->sequences * r->patches * r->d_model, matrix = layer * at->matrix_stride;
    const char *weights = (const char *)r->weights;
    struct layer l = sizes_of(k, r);
    l.number = r->layers - 1 - layer;
    l.attention.site += 3 * (uint32_t)layer;
    l.hidden.site += 3 * (uint32_t)layer + 1;
    l.output.site += 3 * (uint32_t)layer + 2;
    l.u = (const char *)r->u + 2 * layer * rows;
    l.residual = (char *)r->kept + (size_t)layer * layer_kept_bytes(&l);
    l.softmax = (float *)((char *)l.residual + 2 * rows);
    l.kept = (char *)l.residual + bits_place(&l);
    l.w_qkv = weights + 2 * (at->w_qkv + matrix);
    l.w_o = weights + 2 * (at->w_o + matrix);
    l.w_1 = weights + 2 * (at->w_1 + matrix);
    l.w_2 = weights + 2 * (at->w_2 + matrix);
    l.vectors = vectors_of(r, layer);
    if (copy_bytes_of(&l)) {
        const char *const copy = (const char *)r->workspace + layer * copy_bytes_of(&l);
        const int64_t a = width_of(&l), matrix = 2 * a * l.d_model;
        const float *const v = (const float *)(copy + 4 * matrix);
        l.w_qkv = copy;
        l.w_o = copy + 3 * matrix;
        l.vectors = {v, v + a, v + 2 * a, v + 5 * a, v + 6 * a, v + 7 * a, l.vectors.b_1, v + 8 * a};
    }
    return l;
}

/* The copies, if there are to be any. */
static enum ps_status pad_weights(const struct ps_kernels *k, const struct ps_encoder_request *r)
{
    const struct ps_encoder_layout *at = &r->offsets;
    const struct layer l = sizes_of(k, r);
    if (!copy_bytes_of(&l)) {
        return PS_OK;
    }
    const struct padding p = {(const real16 *)r->weights + at->w_qkv,
                              (const real16 *)r->weights + at->w_o,
                              vectors_of(r, 0),
                              at->matrix_stride,
                              at->vector_stride,
                              (char *)r->workspace,
                              copy_bytes_of(&l),
                              (int)l.d_model,
                              (int)width_of(&l),
                              head_of(&l),
                              head_bits_of(&l)};
    const int64_t elements = width_of(&l) * (4 * l.d_model + PADDED_VECTORS);
    ps_cuda_launch(l.context, pad_heads, dim3(ps_cuda_blocks(elements, PAD_THREADS), (unsigned)l.layers), PAD_THREADS, 0, p);
    l.context->ordered = true; /* blocks ask for weights before they wait */
    return ps_cuda_check(cudaGetLastError(), "encoder layer, padded weights");
}

/* As measured (docs/benchmarks.md). A tile costs the same whatever d is and whatever of its rows whole sequences fill, while level
 * gemm pays for what is there: a row about as much as 128 columns more, and columns by 16, those of heads in whole 8 among them.
 * Its many launches cost some tiles more: where there are no more tiles than multiprocessors that decides, but very few leave
 * multiprocessors idle. And the kernels of wider heads have too few registers for many patches. */
static bool is_slower(const struct layer *l)
{
    const int64_t tiles = tiles_of(l), all = l->context->multiprocessors, n = l->patches, e = l->d_model / l->n_heads;
    const int64_t taken = 1 << head_bits_of(l), least = taken > 16 ? (n > 32 ? 129 : 116) : taken > 8 ? (n > 48 ? 121 : 112) : 116;
    const int64_t wide = (e + 7) / 8 * 8 * l->n_heads, columns = ((wide > l->d_model ? wide : l->d_model) + 15) / 16 * 16;
    const int64_t filled = ROWS / n * n * (128 + columns) / 2, launches = all * 3 / 16;
    return tiles < (all + 4) / 5 || l->d_model <= 64 || (taken > 16 && n > 48) ||
           (tiles > all && (tiles - launches) * least * ROWS > tiles * filled);
}

static enum ps_status streamed_plan(const struct ps_kernels *k, const struct ps_encoder_request *r, struct ps_encoder_plan *plan)
{
    const struct layer l = sizes_of(k, r);
    PS_TRY(supported(&l));
    plan->slower = is_slower(&l);
    plan->kernels = "streamed/real16";
    plan->kept_bytes = layer_kept_bytes(&l) * (size_t)r->layers;
    return PS_OK;
}

static enum ps_encoder_span streamed_span(const struct ps_kernels *, const struct ps_encoder_request *,
                                          const struct ps_encoder_plan *)
{
    return PS_SPAN_LAYERS;
}

/* The rows are taken in chunks, so that it stays below 400 MiB whatever S, and 4 to 6 MB a layer. */
static size_t streamed_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_request *r,
                                       const struct ps_encoder_plan *)
{
    const struct layer l = sizes_of(k, r);
    return (size_t)(l.layers * copy_bytes_of(&l)) + plan_of(&l).bytes;
}

static enum ps_status streamed_forward(const struct ps_kernels *k, const struct ps_encoder_request *r,
                                       const struct ps_encoder_plan *)
{
    const int64_t rows = r->sequences * r->patches * r->d_model;
    PS_TRY(pad_weights(k, r));
    for (int64_t layer = 0; layer < r->layers; layer++) {
        const struct layer l = layer_of(k, r, layer);
        PS_TRY(forward_layer(&l, (char *)r->u + 2 * (layer + 1) * rows));
    }
    return PS_OK;
}

static enum ps_status streamed_backward(const struct ps_kernels *k, const struct ps_encoder_request *r,
                                        const struct ps_encoder_plan *)
{
    const struct ps_encoder_layout *at = &r->offsets;
    for (int64_t layer = r->layers; layer-- > 0;) {
        const struct layer l = layer_of(k, r, layer);
        float *matrix = r->gradients + layer * at->matrix_stride, *vector = r->gradients + layer * at->vector_stride;
        const struct layer_gradients g = {matrix + at->w_qkv,     matrix + at->w_o,      matrix + at->w_1,   matrix + at->w_2,
                                          vector + at->ln1_gamma, vector + at->ln1_beta, vector + at->b_qkv, vector + at->b_o,
                                          vector + at->ln2_gamma, vector + at->ln2_beta, vector + at->b_1,   vector + at->b_2,
                                          at->matrix_stride,      at->vector_stride};
        PS_TRY(backward_layer(&l, r->du, layer == r->layers - 1 ? r->dy : r->du, &g,
                              (char *)r->workspace + r->layers * copy_bytes_of(&l)));
    }
    return PS_OK;
}

const struct ps_encoder_family ps_encoder_streamed = {streamed_plan, streamed_span, streamed_workspace_bytes, streamed_forward,
                                                      streamed_backward};

} // namespace PS_REAL16_SPACE

#endif
