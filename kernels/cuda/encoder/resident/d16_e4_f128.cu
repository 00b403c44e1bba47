/* The whole encoder of a model with d_model 16, heads of 4 columns, d_ff 128 and 33 <= N <= 48, forward and backward: what
 * encoder/resident/resident.cuh does with fewer instructions, which are what bounds it. Equations: docs/design.md section 3.
 *
 * A warp owns 16 rows of the residual stream, in registers (fp32); a unit is a sequence in 3 tiles; a block works on up to 7 units
 * at once, with every layer's weights in shared memory.
 *
 * Columns of d_ff lie permuted in shared memory, so that a lane's columns of 4 tiles are 8 that follow one another: those of one
 * Philox block, whose words are then masks of its registers. Position 8 t + n of a group of 32 is column 8 (n / 2) + 2 t + n % 2.
 * q is scaled by log2(e) / sqrt(e) when it is made; softmax is taken without its row's largest score, and again with it by a warp
 * that has found a sum out of range. A score's product with the other head of its 8 columns is zero in q; what both heads of a pair
 * add up is told apart by lanes: q / 2 (place) is the head of the pair.
 *
 * Matrices that warps of a unit share lie in shared memory as 8 x 8 matrices of 128 bytes: no padding, no bank conflicts, and an
 * operand of wgmma.
 *
 * Forward keeps, a tile and layer, in the order of the registers: xhat of both LayerNorms and merged (16 bits), rstd, the
 * logarithms of softmax's sums, and dropout's bits. 21 warps are 6 on one scheduler and 5 on the others: backward has 3 more, which
 * draw the masks of the next step. Forward finds them by their tag, which names all that they depend on, and draws them itself
 * where it is another: the bits are the same. Before the kernel before has ended it fetches the windows and targets of the step
 * that the forward before expected next, and checks that afterwards.
 *
 * Weight gradients are wgmma over the block's rows, of 64 columns at a time by a warpgroup each, biases a column of ones beside. A
 * block's sums go to memory in encoder/resident/resident.cuh's order, and its kernel adds the blocks. With dropout the warps that
 * draw have added most of them by then: each block a slice of what all have finished, a layer's feed-forward or attention at a
 * time, but for the attention of the first layer.
 *
 * Counts, etth1 (3 layers, S 896; 128 blocks of 21 warps): a tile and layer take 96 exponentials, 64 tanh and 88 products m16n8k16
 * and m16n8k8 a lane forward, about 1,250 instructions a warp; backward the same exponentials and tanh, 146 products, about 2,500
 * instructions. Forward writes 16.5 MB of rows; 3.1 MB of masks are read twice and written once; partial gradients 8.2 MB are
 * written, all but 0.6 MB of them read again by backward itself.
 *
 * The kernels are d16_forward.cuh and d16_backward.cuh, and block_sums.cuh's; what the two share is d16_units.cuh. Here is the
 * host's side. */
#include "kernels/cuda/encoder/resident/d16_backward.cuh"
#include "kernels/cuda/encoder/resident/d16_forward.cuh"

namespace ps_resident
{

bool ps_encoder_d16_serves(const struct ps_encoder_request *e)
{
    return e->d_model == D && e->n_heads == 4 && e->d_ff == F && e->patches > 32 && e->patches <= 48;
}

size_t ps_encoder_d16_shared(const struct ps_encoder_request *e, int block_units)
{
    return (size_t)(e->layers * LAYER_BYTES +
                    (block_units > 7 ? 1 << 20 : block_units * (UNIT_BYTES > 2 * KV_BYTES ? UNIT_BYTES : 2 * KV_BYTES))) +
           helper_bytes((int)e->layers);
}

int64_t ps_encoder_d16_tiles(const struct ps_encoder_request *e)
{
    return (e->sequences + 6) * NT;
}

size_t ps_encoder_d16_layers_bytes(const struct ps_encoder_request *e)
{
    const int64_t tiles = ps_encoder_d16_tiles(e);
    return (size_t)(e->layers * tiles * (KEPT_BYTES + 2 * MASKS_BYTES)) + (size_t)(2 * tags_of(tiles)) * sizeof(struct tag) +
           sizeof(struct ahead);
}

size_t ps_encoder_d16_kept_bytes(const struct ps_encoder_request *e)
{
    return ps_encoder_d16_layers_bytes(e) + (size_t)ps_encoder_d16_tiles(e) * 8 * sizeof(uint32_t);
}

static_assert((int)D16_WINDOW_FLOATS == 2 * KV_BYTES / 4, "of a unit's buffers");

/* Where W_h lies in forward's shared memory: behind what is there with the layers, and with the head. */
static size_t head_at(int64_t layers, int block_units)
{
    const size_t units = (size_t)block_units * 2 * KV_BYTES, head = head_scratch_d16<NT>(block_units);
    return (size_t)layers * LAYER_BYTES + (units > head ? units : head);
}

bool ps_encoder_d16_heads(const struct ps_encoder_request *e, int block_units, int shared)
{
    return e->pred_len % 8 == 0 && e->pred_len <= HEAD_COLUMNS &&
           head_at(e->layers, block_units) + head_bytes_d16((int)e->patches, block_units) + 16 <=
               (size_t)shared; /* and a barrier */
}

template <class T> enum ps_status ps_encoder_d16_forward(const struct ps_cuda_context *c, encoder<T> x, size_t shared)
{
    if (x.head.weight) {
        x.head.at = (int)head_at(x.layers, x.block_units);
        shared = (size_t)x.head.at + head_bytes_d16(x.n, x.block_units);
    }
    return ps_resident_launch(c, "encoder forward", x.threshold ? d16_forward<T, true> : d16_forward<T, false>, (unsigned)x.blocks,
                              x.block_units * NT * 32, shared, x);
}

template <class T> enum ps_status ps_encoder_d16_backward(const struct ps_cuda_context *c, const encoder<T> &x, size_t shared)
{
    return ps_resident_launch(c, "encoder backward", x.threshold ? d16_backward<T, true> : d16_backward<T, false>,
                              (unsigned)x.blocks, x.block_units * NT * 32 + (x.threshold ? DRAWING : 0), shared, x);
}

template enum ps_status ps_encoder_d16_forward(const struct ps_cuda_context *, encoder<ps_bf16>, size_t);
template enum ps_status ps_encoder_d16_forward(const struct ps_cuda_context *, encoder<ps_fp16>, size_t);
template enum ps_status ps_encoder_d16_backward(const struct ps_cuda_context *, const encoder<ps_bf16> &, size_t);
template enum ps_status ps_encoder_d16_backward(const struct ps_cuda_context *, const encoder<ps_fp16> &, size_t);

} // namespace ps_resident
