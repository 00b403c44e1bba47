/* Level layer in tf32 for d_model 64 with short sequences, by encoder/resident/d64_short.cu's kernels with operands of fp16 and a
 * residual stream of fp32: so encoder/tf32.cu's kernels that turn rows to fp16 and back are not needed, which count here. Range and
 * rounding are as that file says, but for the power of two, which is up to 2^120, and hidden columns, which are kept twice as
 * large.
 *
 * Beside encoder/resident/d64_short.cu's kernels: weights to fp16, 6 bytes an element, and the peak, 4 R d bytes. seed28k (105,000
 * elements, 6,400 rows): 0.6 MB and 1.6 MB, from L2. */
#include "kernels/cuda/context.cuh"
#include "kernels/cuda/encoder/resident/device.cuh"

namespace ps_resident
{

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

/* The workspace: encoder/resident/d64_short.cu's, then the weights. */
static size_t weights_at(const struct ps_kernels *k, const struct ps_encoder_request *e)
{
    return (ps_encoder_d64_workspace(e, ps_resident_units(e), ps_cuda(k)->multiprocessors) + 255) / 256 * 256;
}

static size_t halves_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *)
{
    return weights_at(k, e) + (size_t)ps_encoder_matrices(e).count * sizeof(ps_fp16);
}

static encoder<ps_fp16> halves_of(const struct ps_kernels *k, const struct ps_encoder_request *e)
{
    encoder<ps_fp16> x = ps_resident_of<ps_fp16>(e, ps_encoder_d64_blocks(ps_resident_units(e), ps_cuda(k)->multiprocessors));
    x.weights = (const ps_fp16 *)((char *)e->workspace + weights_at(k, e)) - ps_encoder_matrices(e).first;
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
    char *const workspace = (char *)e->workspace;
    /* And d64_short.cu's counters: other encoders of the same table may have had the workspace. */
    PS_TRY(ps_encoder_tf32_take(k, e, workspace + weights_at(k, e), NULL, (unsigned *)workspace, FLAGS));
    return ps_encoder_d64_forward<float>(halves_of(k, e), workspace, c->multiprocessors, c->stream);
}

static enum ps_status halves_backward(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                      const struct ps_encoder_plan *)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    PS_TRY(ps_encoder_tf32_peak(k, e, (unsigned *)e->workspace + PEAK));
    return ps_encoder_d64_backward<float>(halves_of(k, e), (char *)e->workspace, c->multiprocessors, c->stream);
}

} // namespace ps_resident

const struct ps_encoder_family ps_encoder_resident_halves = {ps_resident::halves_plan, ps_resident::halves_span,
                                                             ps_resident::halves_workspace_bytes, ps_resident::halves_forward,
                                                             ps_resident::halves_backward};
