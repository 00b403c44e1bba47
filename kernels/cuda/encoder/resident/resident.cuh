/* The whole encoder of a model whose layer fits a multiprocessor, forward and backward, each in one kernel. Equations:
 * docs/design.md section 3.
 *
 * A warp owns 16 rows by 16 columns of the residual stream, in registers (fp32), with the heads in those columns of q, k and v and
 * d / 16th of d_ff. The d / 16 warps that share a tile of 16 rows give each other operands and partial sums through shared memory;
 * at d 16 a warp owns its tile alone. A unit is one sequence in ceil(N / 16) tiles, or, when N <= 16, floor(16 / N) sequences in
 * one tile, which must not see each other. A block works on a few units at once; its weights lie in shared memory: of every layer
 * where they fit, else of the layer at hand.
 *
 * Forward keeps what is dear to compute again and small: the residual r after attention (real), the logarithm of softmax's sums
 * and the masks' bits. Backward recomputes the rest from each layer's u and r. Weight gradients: all rows of the block stage their
 * operands in shared memory (real); then each warp owns tiles of the gradient and adds over the block's rows with mma; biases are
 * one more product with a column of ones. A block's sums go to memory, and another kernel adds the blocks in order. What follows a
 * LayerNorm stages xhat and not gamma xhat + beta: with X = xhat' dout, dW = diag(gamma) X + beta db', dgamma_j = sum_k W_jk X_jk
 * and dbeta = W db, so no sum over rows is needed for gamma and beta.
 *
 * gelu(x) = x (1 + tanh) / 2 is computed as x (1 + tanh); the half, and dropout's scale, are put on W_2's output, or on the
 * gradient that enters it.
 *
 * Counts, etth1 (d 16, f 128, N 42 in 48 rows, 3 layers, S 896; 128 blocks of 21 warps): a tile of 16 rows and a layer take 10
 * Philox blocks (of 8 elements), 96 exponentials and 64 tanh a lane, 88 products m16n8k16 forward; backward the same exponentials
 * and tanh, no Philox, 330 products. Forward writes 3.6 MB of u, 3.6 MB of r, 1.8 MB of sums, 2.6 MB of bits; partial gradients
 * 7.9 MB.
 *
 * d_ff, the head's size and what is staged are told at run time. encoder/resident/d16_e4_f128.cu serves d_model 16 with heads of 4
 * columns and N from 33 to 48.
 *
 * The kernels are general_forward.cuh, general_backward.cuh and block_sums.cuh; here is the host's side. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_RESIDENT_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_RESIDENT_CUH

#include "kernels/cuda/encoder/head.cuh"
#include "kernels/cuda/encoder/resident/block_sums.cuh"
#include "kernels/cuda/encoder/resident/general_backward.cuh"
#include "kernels/cuda/encoder/resident/general_forward.cuh"

namespace ps_resident
{

template <class T> using kernel_function = void(const encoder<T>);

/* d_model 64 with longer sequences is level gemm's, which is faster there. */
static constexpr int most_tiles(int d)
{
    return d < 64 ? 4 : 1;
}

/* By tiles; those that do not fit are not compiled. */
template <class T, int D, bool E8> static kernel_function<T> *kernel_of(int tiles, bool backward)
{
    enum { LONG = most_tiles(D) > 1, TWO = LONG ? 2 : 1, THREE = LONG ? 3 : 1, FOUR = LONG ? 4 : 1 };
    static kernel_function<T> *const kernels[2][4] = {{forward_kernel<T, D, 1, E8>, forward_kernel<T, D, TWO, E8>,
                                                       forward_kernel<T, D, THREE, E8>, forward_kernel<T, D, FOUR, E8>},
                                                      {backward_kernel<T, D, 1, E8>, backward_kernel<T, D, TWO, E8>,
                                                       backward_kernel<T, D, THREE, E8>, backward_kernel<T, D, FOUR, E8>}};
    return kernels[backward][tiles - 1];
}

template <class T, bool E8> static kernel_function<T> *kernel_of(int d, int tiles, bool backward)
{
    return d == 64   ? kernel_of<T, 64, E8>(tiles, backward)
           : d == 16 ? kernel_of<T, 16, E8>(tiles, backward)
                     : kernel_of<T, 32, E8>(tiles, backward);
}

template <class T> static kernel_function<T> *kernel_of(const encoder<T> &x, int d, int tiles, bool backward)
{
    return x.e < 16 ? kernel_of<T, true>(d, tiles, backward) : kernel_of<T, false>(d, tiles, backward);
}

struct plan {
    int tiles, unit_rows; /* of a unit */
    int64_t units;
    int block_units, resident, staged, blocks, threads;
    int d16_e4_f128; /* that file's kernels, not the general ones */
    int multiprocessors;
    size_t shared;
};

static int sizes_fit(const struct ps_encoder_request *e)
{
    const int64_t d = e->d_model, head = e->n_heads > 0 ? d / e->n_heads : 0;
    return (d == 16 || d == 32 || d == 64) && head * e->n_heads == d && (head == 4 || head == 8 || head == 16) && e->patches >= 1 &&
           e->patches <= 16 * most_tiles((int)d) && e->d_ff >= d && e->d_ff <= 256 && e->d_ff % d == 0 && e->layers >= 1 &&
           e->layers <= 64 && e->sequences >= 1 && e->sequences <= INT32_MAX;
}

static void units_of(const struct ps_encoder_request *e, struct plan *p)
{
    p->tiles = ((int)e->patches + 15) / 16;
    p->unit_rows = (int)(ps_resident_sequences(e) * e->patches);
    p->units = ps_resident_units(e);
}

/* Fewest rounds over the units first, then weights that stay, then the fewest stages of d_ff. */
template <class T>
static enum ps_status plan_make(const struct ps_cuda_context *c, const struct ps_encoder_request *e, bool backward,
                                struct plan *best)
{
    const int multiprocessors = c->multiprocessors, shared = c->shared_bytes;
    int64_t best_rounds = INT64_MAX;
    if (sizes_fit(e) && ps_encoder_d16_serves(e)) {
        *best = {};
        units_of(e, best);
        best->d16_e4_f128 = 1;
        best->multiprocessors = multiprocessors;
        best->block_units = (int)((best->units + multiprocessors - 1) / multiprocessors);
        best->block_units = best->block_units < D16_LEAST_UNITS ? D16_LEAST_UNITS : best->block_units;
        best->blocks = (int)((best->units + best->block_units - 1) / best->block_units);
        if (ps_encoder_d16_shared(e, best->block_units) <= (size_t)shared) {
            return PS_OK;
        }
    }
    if (sizes_fit(e)) {
        const int d = (int)e->d_model, f = (int)e->d_ff, W = sharing(d);
        struct plan p = {};
        units_of(e, &p);
        p.multiprocessors = multiprocessors;
        const int warps = p.tiles * W;
        const int most = most_threads(d) / 32 / warps;
        for (int there = (int)e->layers; there >= 1; there = there > 1 ? 1 : 0) {
            p.resident = there == e->layers;
            for (p.staged = f; p.staged >= (backward ? d : f); p.staged -= d) {
                if (f % p.staged != 0) {
                    continue;
                }
                const int64_t weights = TABLE_BYTES + there * (int64_t)layer_bytes<T>(d, f);
                const int64_t unit = unit_bytes<T>(d, p.tiles, backward, p.staged);
                int64_t units = (shared - weights) / unit;
                units = shared < weights ? 0 : units > most ? most : units;
                units = warps > 1 && units > 15 ? 15 : units; /* a barrier each */
                if (units < 1) {
                    continue;
                }
                const int64_t rounds = (p.units + units * multiprocessors - 1) / (units * multiprocessors);
                if (rounds < best_rounds) {
                    best_rounds = rounds;
                    p.block_units = (int)((p.units + rounds * multiprocessors - 1) / (rounds * multiprocessors));
                    const int64_t blocks = (p.units + p.block_units - 1) / p.block_units;
                    p.blocks = (int)((blocks + rounds - 1) / rounds);
                    p.threads = p.block_units * warps * 32;
                    p.shared = (size_t)(weights + p.block_units * unit);
                    *best = p;
                }
            }
        }
    }
    if (best_rounds == INT64_MAX) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda, whole): d_model %lld, n_heads %lld, d_ff %lld, %lld patches, %lld layers are not served with "
            "%d bytes of shared memory a block: d_model 16, 32 or 64, heads of 4, 8 or 16, d_ff a multiple of d_model up to 256, "
            "up to 64 patches (d_model 64: 16)",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, (long long)e->layers, shared);
    }
    return PS_OK;
}

/* What the general kernels keep. */
template <class T> static size_t take_kept(encoder<T> *x, const struct ps_encoder_request *e, const struct plan &p, char *memory)
{
    struct arena m = {memory, 0};
    const int64_t rows = e->layers * e->sequences * e->patches;
    m.take(x->general.r, rows * e->d_model);
    m.take(x->lse, rows * e->n_heads);
    ps_resident_take_masks(m, x, e, p.tiles);
    return m.bytes;
}

/* Of both directions. */
struct plans {
    struct plan forward, backward;
};

static const struct plans &plans_of(const struct ps_encoder_plan *plan)
{
    return *(const struct plans *)plan->own;
}

/* As measured (docs/benchmarks.md). Instructions bound the general kernels, so level gemm is faster from so many rows a
 * multiprocessor on; never at d_model 16, nor at 32 where several sequences share a tile. */
static bool is_slower(const struct ps_encoder_request *e, int multiprocessors)
{
    const bool wide_hidden = e->d_ff > 128;
    const int64_t rows = e->sequences * e->patches / multiprocessors;
    const int64_t most = wide_hidden && e->patches <= 48 ? 170 : 400;
    return e->d_model > 32 ? rows > 100 : e->d_model > 16 && e->patches > 16 && rows > most;
}

template <class T>
static enum ps_status resident_plan(const struct ps_kernels *k, const struct ps_encoder_request *e, struct ps_encoder_plan *plan)
{
    struct plans p;
    encoder<T> x;
    PS_TRY(plan_make<T>(ps_cuda(k), e, false, &p.forward));
    PS_TRY(plan_make<T>(ps_cuda(k), e, true, &p.backward));
    plan->own = malloc(sizeof p);
    if (!plan->own) {
        return ps_fail(PS_DEVICE, "encoder: out of host memory");
    }
    memcpy(plan->own, &p, sizeof p);
    plan->slower = is_slower(e, ps_cuda(k)->multiprocessors);
    plan->kernels = p.forward.d16_e4_f128 ? "resident/d16_e4_f128" : "resident";
    /* The batch size decides which kernels run: the larger of what they keep. */
    const size_t bytes = take_kept(&x, e, p.forward, NULL), d16 = ps_encoder_d16_serves(e) ? ps_encoder_d16_kept_bytes(e) : 0;
    plan->kept_bytes = bytes > d16 ? bytes : d16;
    return PS_OK;
}

/* Whether a unit's windows fit where they are gathered, and du and patches where they are staged. */
template <class T> static bool can_embed(const struct ps_encoder_request *e, const struct plan &p)
{
    if (e->seq_len < e->patch_len || e->patch_len < 1 || e->patch_len > 32) {
        return false;
    }
    const int64_t d = e->d_model, floats = p.unit_rows / e->patches * e->seq_len;
    if (p.d16_e4_f128) {
        return floats <= D16_WINDOW_FLOATS;
    }
    return floats * (int)sizeof(float) <= p.tiles * 16 * (3 * d + 8) * REAL_BYTES<T> &&
           (size_t)(p.tiles * 16 * embed_pitch((int)d, (int)e->patch_len)) * sizeof(T) <=
               (size_t)scratch_bytes<T>((int)d, p.tiles, p.staged);
}

template <class T>
static enum ps_encoder_span resident_span(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                          const struct ps_encoder_plan *plan)
{
    const struct plan &p = plans_of(plan).forward;
    const int shared = ps_cuda(k)->shared_bytes;
    if (e->other_rate || !can_embed<T>(e, plans_of(plan).backward)) {
        return PS_SPAN_LAYERS;
    }
    if (p.blocks > PS_PARTIAL_BLOCKS || e->pred_len < 1) {
        return PS_SPAN_EMBEDDING;
    }
    return p.d16_e4_f128 && ps_encoder_d16_heads(e, p.block_units, shared) ? PS_SPAN_LOSS : PS_SPAN_EMBEDDING;
}

/* Of backward, by so many blocks. Counters, norms, encoder/resident/d16_e4_f128.cu's sums, partial sums, the embedding's. */
template <class T>
static size_t take_workspace(encoder<T> *x, const struct ps_encoder_request *e, const struct plan &p, int64_t blocks)
{
    struct arena m = {(char *)e->workspace, 0};
    const int64_t d = e->d_model, f = e->d_ff, sums = e->layers * layer_sums((int)d, (int)f);
    m.take(x->sums.arrived, e->layers * 4);
    m.take(x->sums.norms, e->layers * ((4 * d + 2 * f) * d / SUM_TILE) * 2 * d);
    m.take(x->sums.summed, sums);
    m.take(x->sums.partial, blocks * sums);
    m.take(x->embed.partial, can_embed<T>(e, p) ? blocks * embed_rows_of((int)e->patch_len, (int)e->patches) * d : 0);
    return m.bytes;
}

template <class T>
static size_t resident_workspace_bytes(const struct ps_kernels *, const struct ps_encoder_request *e,
                                       const struct ps_encoder_plan *plan)
{
    const struct plan &p = plans_of(plan).backward;
    encoder<T> x;
    /* A shorter batch may have more blocks, of fewer units each: 980 units are 123 blocks of 8, 660 are 132 of 5. */
    return take_workspace(&x, e, p, p.units < p.multiprocessors ? p.units : p.multiprocessors);
}

template <class T> static encoder<T> arguments_make(const struct ps_encoder_request *e, const struct plan *p)
{
    encoder<T> x = ps_resident_of<T>(e, p->blocks);
    x.block_units = p->block_units;
    x.general.resident = p->resident;
    x.general.staged = p->staged;
    if (p->d16_e4_f128) {
        x.d16.kept = (char *)e->kept;
        x.d16.tiles = ps_encoder_d16_tiles(e);
        if (e->kept && e->dropout.threshold) {
            x.embed.masks = (uint32_t *)((char *)e->kept + ps_encoder_d16_layers_bytes(e));
        }
    } else if (e->kept) {
        (void)take_kept(&x, e, *p, (char *)e->kept);
    }
    embed_make(e, p->unit_rows / (int)e->patches, &x.embed);
    head_step_make(e, &x.head);
    return x;
}

template <class T>
static enum ps_status resident_forward(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                       const struct ps_encoder_plan *plan)
{
    const struct plan &p = plans_of(plan).forward;
    struct ps_cuda_context *c = ps_cuda(k);
    c->ordered = false; /* `fresh` takes care of what was */
    encoder<T> x = arguments_make<T>(e, &p);
    if (p.d16_e4_f128) {
        return ps_encoder_d16_forward(c, x, ps_encoder_d16_shared(e, p.block_units));
    }
    return ps_resident_launch(c, "encoder forward", kernel_of(x, (int)e->d_model, p.tiles, false), (unsigned)p.blocks, p.threads,
                              p.shared, x);
}

template <class T>
static enum ps_status resident_backward(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                        const struct ps_encoder_plan *plan)
{
    const struct plan &p = plans_of(plan).backward;
    struct ps_cuda_context *c = ps_cuda(k);
    c->ordered = false;
    encoder<T> x = arguments_make<T>(e, &p);
    const int d = (int)e->d_model;
    (void)take_workspace(&x, e, p, p.blocks);
    x.sums.finished = x.sums.arrived + 2 * e->layers;
    x.sums.summed = p.d16_e4_f128 && x.threshold ? x.sums.summed : NULL;
    x.embed.partial = e->embed_gradient ? x.embed.partial : NULL;
    kernel_function<T> *const sum = d == 64 ? sum_kernel<T, 64> : d == 16 ? sum_kernel<T, 16> : sum_kernel<T, 32>;
    if (p.d16_e4_f128) {
        PS_TRY(ps_encoder_d16_backward(c, x, ps_encoder_d16_shared(e, p.block_units)));
    } else {
        PS_TRY(
            ps_resident_launch(c, "encoder backward", kernel_of(x, d, p.tiles, true), (unsigned)p.blocks, p.threads, p.shared, x));
    }
    return launch_sums(c, sum, d, e->embed_gradient, x);
}

template <class T>
static constexpr struct ps_encoder_family family = {resident_plan<T>, resident_span<T>, resident_workspace_bytes<T>,
                                                    resident_forward<T>, resident_backward<T>};

} // namespace ps_resident

#endif
