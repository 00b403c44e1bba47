/* What encoder/streamed/float.cu, encoder/split/rows.cu and encoder/split/gradients.cu share. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_DEVICE_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_DEVICE_CUH

#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/encoder/streamed/types.cuh"

namespace PS_REAL16_SPACE
{

#ifdef PS_COMPILE_FP32
static constexpr bool exact = true;
#else
static constexpr bool exact = false;
#endif

enum { MOST_HIDDEN = 512 }; /* d_ff */

/* R, so that what follows a tensor of rows is aligned. */
static int64_t padded_rows(const struct ps_encoder_request *e)
{
    return (e->sequences * e->patches + 3) / 4 * 4;
}

/* On the context's stream, with the shared memory that it asks for. */
template <typename... P, typename... A>
static enum ps_status launch(const struct ps_cuda_context *c, void (*run)(P...), dim3 grid, unsigned threads, size_t shared,
                             const char *what, const A &...arguments)
{
    if (shared > 0) {
        PS_TRY(ps_cuda_allow_shared((const void *)run, shared, what));
    }
    ps_cuda_launch(c, run, grid, threads, shared, arguments...);
    PS_CUDA_LAUNCHED(what);
}

/* x as weights' gradients read it from memory: rounded in tf32. */
static __device__ __forceinline__ float rounded(float x)
{
    return exact ? x : __uint_as_float(ps_round_up(x) & 0xffffe000u); /* with cvt.rna a step at seed28k takes 1 % longer */
}

/* Dropout of a layer: which 0 after W_o, 1 after gelu, 2 after W_2. */
static __host__ __device__ __forceinline__ struct ps_dropout at_site(const struct ps_dropout &d, int layer, int which)
{
    struct ps_dropout moved = d;
    moved.site += 3 * (uint32_t)layer + (uint32_t)which;
    return moved;
}

/* Each lane draws the 8 elements of block `index`. Of those that lane t of four has drawn, elements 2w and 2w + 1 are kept when
 * bits 4t + w and 4t + w + 16 are set. */
static __device__ __forceinline__ uint32_t quad_bits(const struct ps_dropout &d, uint64_t step, uint32_t index, int q)
{
    const struct ps_block block = ps_draws(d, step, index);
    const uint32_t below = ps_below(d.threshold), minus_below = ps_minus_below(d.threshold);
    uint32_t bits = ps_kept2(block.word[0], below, minus_below) + 2 * ps_kept2(block.word[1], below, minus_below) +
                    4 * ps_kept2(block.word[2], below, minus_below) + 8 * ps_kept2(block.word[3], below, minus_below);
    bits <<= 4 * q;
    bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
    return bits | __shfl_xor_sync(0xffffffffu, bits, 2);
}

} // namespace PS_REAL16_SPACE

#endif
