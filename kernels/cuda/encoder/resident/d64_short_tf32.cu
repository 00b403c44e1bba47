/* Level layer in tf32 for d_model 64 with short sequences, by encoder/resident/d64_short.cu's kernels: fp16 has tf32's 10 bits of
 * mantissa, so operands are rounded as tf32 rounds them; the residual stream, sums, statistics and gradients of parameters are
 * fp32.
 *
 * fp16's range is what must be seen to. Forward's operands are LayerNorm's rows, softmax's weights, and what weights make of those:
 * none comes near 65,504 (hidden columns, kept twice as large, 32,752) in a model that trains, and what passes it shows as a loss
 * that is not finite. Gradients can be of any size: `peak` finds the largest element of dy, and backward multiplies all by the
 * power of two that brings it to 1 .. 2, which the sums are divided by again, exactly (up to 2^120). 2^15 above that is room for
 * their growth; what lies 2^14 below loses bits, what lies 2^24 below is left out: rows of the batch share the power.
 *
 * Beside encoder/resident/d64_short.cu's kernels: weights to fp16, 6 bytes an element, and the peak, 4 R d bytes. seed28k (105,000
 * elements, 6,400 rows): 0.6 MB and 1.6 MB, from L2. */
#include "kernels/cuda/context.cuh"
#include "kernels/cuda/encoder/resident/device.cuh"

namespace ps_resident
{

enum { CONVERT_THREADS = 256, PEAK_THREADS = 512 };

/* ---- the kernels beside ---- */

/* to = from, rounded: 4 elements a thread. And the counters of encoder/resident/d64_short.cu are zeroed, since other encoders of
 * the same table may have had the workspace. */
static __global__ void __launch_bounds__(CONVERT_THREADS)
    to_halves(uint2 *to, const float4 *from, int64_t fours, unsigned *counters, int count)
{
    ps_grid_begin();
    if (blockIdx.x == 0 && (int)threadIdx.x < count) {
        counters[threadIdx.x] = 0;
    }
    const int64_t i = (int64_t)blockIdx.x * CONVERT_THREADS + threadIdx.x;
    if (i < fours) {
        const float4 v = from[i];
        to[i] = make_uint2(ps_pack<ps_fp16>(v.x, v.y), ps_pack<ps_fp16>(v.z, v.w));
    }
}

/* The bits of the largest magnitude of dy, onto what is there. */
static __global__ void __launch_bounds__(PEAK_THREADS) peak(unsigned *most, const float4 *dy, int64_t fours)
{
    ps_grid_begin();
    unsigned own = 0;
    for (int64_t i = (int64_t)blockIdx.x * PEAK_THREADS + threadIdx.x; i < fours; i += (int64_t)gridDim.x * PEAK_THREADS) {
        const float4 v = dy[i];
        own = max(max(own, __float_as_uint(v.x) & 0x7fffffffu), __float_as_uint(v.y) & 0x7fffffffu);
        own = max(max(own, __float_as_uint(v.z) & 0x7fffffffu), __float_as_uint(v.w) & 0x7fffffffu);
    }
    own = __reduce_max_sync(0xffffffffu, own);
    __shared__ unsigned warps[PEAK_THREADS / 32];
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = own;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        own = __reduce_max_sync(0xffffffffu, threadIdx.x < PEAK_THREADS / 32 ? warps[threadIdx.x] : 0);
        if (threadIdx.x == 0) {
            atomicMax(most, own);
        }
    }
}

/* ---- the host's side ---- */

static enum ps_status halves_plan(const struct ps_kernels *k, const struct ps_encoder_request *e, struct ps_encoder_plan *plan)
{
    const int shared = ps_cuda(k)->shared_bytes;
    if (e->patches < 1 || e->layers < 1 || e->layers > 64 || e->sequences < 1 || e->sequences > INT32_MAX ||
        !ps_encoder_d64_serves(e, shared)) {
        return ps_fail(
            PS_UNSUPPORTED,
            "encoder (cuda, halves): d_model %lld, n_heads %lld, d_ff %lld, %lld patches, %lld layers: d_model 64 with 4 "
            "heads, d_ff 128 or 256, up to 16 patches, are served where the layers' vectors fit %d bytes of shared memory",
            (long long)e->d_model, (long long)e->n_heads, (long long)e->d_ff, (long long)e->patches, (long long)e->layers, shared);
    }
    plan->kernels = "resident/d64_short (fp16 operands)";
    plan->kept_bytes = ps_resident_lse_bytes(e) + ps_resident_deviation_bytes(e) + ps_resident_mask_bytes(e, 1);
    return PS_OK;
}

static enum ps_encoder_span halves_span(const struct ps_kernels *, const struct ps_encoder_request *,
                                        const struct ps_encoder_plan *)
{
    return PS_SPAN_LAYERS;
}

/* Elements of the flat weights that hold the layers' matrices, from the first on, whose place keeps its alignment. */
struct matrices {
    int64_t first, count;
};

static struct matrices matrices_of(const struct ps_encoder_request *e)
{
    const struct ps_encoder_layout *l = &e->offsets;
    const int64_t d = e->d_model, f = e->d_ff, at[4] = {l->w_qkv, l->w_o, l->w_1, l->w_2},
                  size[4] = {3 * d * d, d * d, d * f, f * d};
    struct matrices m = {at[0], 0};
    int64_t end = 0;
    for (int i = 0; i < 4; i++) {
        m.first = at[i] < m.first ? at[i] : m.first;
        end = at[i] + size[i] > end ? at[i] + size[i] : end;
    }
    m.first = m.first / 64 * 64;
    m.count = (end + (e->layers - 1) * l->matrix_stride - m.first + 3) / 4 * 4;
    return m;
}

/* The workspace: encoder/resident/d64_short.cu's, then the weights. */
static size_t weights_at(const struct ps_kernels *k, const struct ps_encoder_request *e)
{
    return (ps_encoder_d64_workspace(e, ps_resident_units(e), ps_cuda(k)->multiprocessors) + 255) / 256 * 256;
}

static size_t halves_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    return weights_at(k, e) + (size_t)matrices_of(e).count * sizeof(ps_fp16);
}

static encoder<ps_fp16> halves_of(const struct ps_kernels *k, const struct ps_encoder_request *e)
{
    encoder<ps_fp16> x = ps_resident_of<ps_fp16>(e, ps_encoder_d64_blocks(ps_resident_units(e), ps_cuda(k)->multiprocessors));
    x.weights = (const ps_fp16 *)((char *)e->workspace + weights_at(k, e)) - matrices_of(e).first;
    if (e->kept) {
        x.lse = (float *)e->kept;
        x.d64.rstd = (float *)((char *)e->kept + ps_resident_lse_bytes(e));
        if (e->dropout.threshold) {
            x.masks = (uint32_t *)((char *)x.d64.rstd + ps_resident_deviation_bytes(e));
        }
    }
    return x;
}

static enum ps_status halves_forward(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const struct matrices m = matrices_of(e);
    char *const workspace = (char *)e->workspace;
    ps_cuda_launch(c, to_halves, ps_cuda_blocks(m.count / 4, CONVERT_THREADS), CONVERT_THREADS, 0,
                   (uint2 *)(workspace + weights_at(k, e)), (const float4 *)((const float *)e->weights + m.first), m.count / 4,
                   (unsigned *)workspace, (int)FLAGS);
    PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder_forward"));
    return ps_encoder_d64_forward<float>(halves_of(k, e), workspace, c->multiprocessors, c->stream);
}

static enum ps_status halves_backward(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                      const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const encoder<ps_fp16> x = halves_of(k, e);
    const int64_t fours = x.rows * e->d_model / 4;
    const unsigned blocks = ps_cuda_blocks(fours, 4 * PEAK_THREADS), most = (unsigned)c->multiprocessors;
    ps_cuda_launch(c, peak, blocks < most ? blocks : most, PEAK_THREADS, 0, (unsigned *)e->workspace + PEAK, (const float4 *)e->dy,
                   fours);
    PS_TRY(ps_cuda_check(cudaGetLastError(), "encoder_backward"));
    return ps_encoder_d64_backward<float>(x, (char *)e->workspace, c->multiprocessors, c->stream);
}

} // namespace ps_resident

const struct ps_encoder_family ps_encoder_resident_halves = {ps_resident::halves_plan, ps_resident::halves_span,
                                                             ps_resident::halves_workspace_bytes, ps_resident::halves_forward,
                                                             ps_resident::halves_backward};
