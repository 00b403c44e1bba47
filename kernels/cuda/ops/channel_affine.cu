/* channel_affine and its gradient: RevIN's affine map of each channel, and what undoes it (Kim et al. 2022).
 *
 * Why: rows [S, n] of windows or forecasts, row s of channel s % C; small beside the encoder, so one element a thread forward.
 * Backward, a block takes a channel and a share of its rows, and leaves two sums; ops/reduce.cu adds the shares in a fixed order.
 *
 * channel_affine: y =, in place if asked. Bytes: 8 S n. Flops: 2 S n. channel_affine_backward: dx = (where it is there), d_weight,
 * d_bias +=. Bytes: 12 S n. Flops: 4 S n. What is of 16 bits takes half. Memory, and for few rows the launches, bound both. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 256;

/* The scale of channel c; weight may be NULL. */
static __device__ __forceinline__ float scale_of(const float *weight, int64_t c, int inverse)
{
    const float w = weight ? weight[c] : 1.0f;
    return inverse && weight ? 1.0f / (w + 1e-10f) : w;
}

struct affine {
    const float *offset /* [n] or, with own, [C, n] */, *weight, *bias; /* each may be NULL */
    int64_t count;                                                      /* S n */
    uint32_t n, channels;
    int own, inverse;
};

template <typename T> static __global__ void __launch_bounds__(block) map_channels(T *y, const T *x, const struct affine a)
{
    ps_grid_begin();
    const int64_t i = (int64_t)blockIdx.x * block + threadIdx.x;
    if (i >= a.count) {
        return;
    }
    const uint64_t row = (uint64_t)i >> 32 ? (uint64_t)i / a.n : (uint32_t)i / a.n;
    const uint32_t c = ps_modulo(row, a.channels), column = (uint32_t)((uint64_t)i - row * a.n);
    const float scale = scale_of(a.weight, c, a.inverse), shift = a.bias ? a.bias[c] : 0.0f;
    const float in = ps_float(x[i]) + (a.offset ? a.offset[(a.own ? (uint64_t)c * a.n : 0) + column] : 0.0f);
    ps_put(y + i, a.inverse ? (in - shift) * scale : in * scale + shift);
}

template <typename T> static enum ps_status map(const struct ps_kernels *k, const struct ps_channel_affine *a)
{
    const char *op = "channel_affine";
    const int64_t count = ps_tensor_count(&a->x), n = ps_cuda_width(&a->x), channels = a->channels;
    if (channels < 1 || channels > INT32_MAX || n < 1 || n > INT32_MAX || count % n != 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld elements are not rows of %lld of %lld channels", op, (long long)count,
                       (long long)n, (long long)channels);
    }
    PS_TRY(ps_cuda_expect(op, "x", &a->x, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect(op, "y", &a->y, ps_type_of<T>, count));
    const bool own = a->offset.rank == 2; /* each channel's offset */
    PS_TRY(a->offset.data ? ps_cuda_expect(op, "offset", &a->offset, PS_F32, own ? channels * n : n) : PS_OK);
    if (a->weight.data || a->bias.data) {
        PS_TRY(ps_cuda_expect(op, "weight", &a->weight, PS_F32, channels));
        PS_TRY(ps_cuda_expect(op, "bias", &a->bias, PS_F32, channels));
    }
    if (count == 0) {
        return PS_OK;
    }
    const struct affine map = {(const float *)a->offset.data,
                               (const float *)a->weight.data,
                               (const float *)a->bias.data,
                               count,
                               (uint32_t)n,
                               (uint32_t)channels,
                               own,
                               a->inverse};
    ps_cuda_launch(ps_cuda(k), map_channels<T>, ps_cuda_blocks(count, block), block, 0, (T *)a->y.data, (const T *)a->x.data, map);
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_channel_affine(const struct ps_kernels *k, const struct ps_channel_affine *a)
{
    return PS_BY_TYPE(a->x.type == k->real ? k->real : PS_F32, map, k, a);
}

/* Block (share, channel), channels fastest: rows c, c + C, .. of a share of the windows. partials [shares, 2, C]: of d_weight, of
 * d_bias. dx may be dy, or NULL. */
template <typename G, typename K>
static __global__ void __launch_bounds__(block)
    channel_sums(float *__restrict__ partials, G *dx, const G *dy, const K *kept, const float *weight, int64_t rows,
                 int64_t share_windows, int channels, int n, int inverse)
{
    ps_grid_begin();
    __shared__ float shared[block / 32];
    const int c = (int)(blockIdx.x % channels);
    const int64_t share = blockIdx.x / channels, begin = share * share_windows, windows = (rows - c + channels - 1) / channels,
                  end = begin + share_windows < windows ? begin + share_windows : windows;
    const float scale = scale_of(weight, c, inverse);
    float weight_sum = 0.0f, bias_sum = 0.0f;
    /* As many threads a row as it has elements, so that short rows go side by side. */
    const int width = n < block ? n : block, abreast = block / width, tx = threadIdx.x % width, ty = threadIdx.x / width;
    for (int64_t window = begin + ty; ty < abreast && window < end; window += abreast) {
        const int64_t row = (window * channels + c) * n;
        for (int i = tx; i < n; i += width) {
            const float up = ps_float(dy[row + i]), down = up * scale, upstream = inverse ? -down : up;
            weight_sum += upstream * ps_float(kept[row + i]);
            bias_sum += upstream;
            if (dx) {
                ps_put(dx + row + i, down);
            }
        }
    }
    weight_sum = ps_block_sum<block>(weight_sum, shared);
    bias_sum = ps_block_sum<block>(bias_sum, shared);
    if (threadIdx.x == 0) {
        partials[share * 2 * channels + c] = weight_sum;
        partials[(share * 2 + 1) * channels + c] = bias_sum;
    }
}

template <typename G, typename K>
static enum ps_status backward(const struct ps_kernels *k, const struct ps_channel_affine_backward *a)
{
    const char *op = "channel_affine_backward";
    const struct ps_cuda_context *c = ps_cuda(k);
    const int64_t count = ps_tensor_count(&a->dy), n = ps_cuda_width(&a->dy), channels = a->channels;
    if (channels < 1 || channels > INT32_MAX / 2 || n < 1 || n > INT32_MAX / 2 || count % n != 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld elements are not rows of %lld of %lld channels", op, (long long)count,
                       (long long)n, (long long)channels);
    }
    PS_TRY(ps_cuda_expect(op, "dy", &a->dy, ps_type_of<G>, count));
    PS_TRY(ps_cuda_expect(op, "kept", &a->kept, ps_type_of<K>, count));
    PS_TRY(a->dx.data ? ps_cuda_expect(op, "dx", &a->dx, ps_type_of<G>, count) : PS_OK);
    PS_TRY(ps_cuda_expect(op, "weight", &a->weight, PS_F32, channels));
    PS_TRY(ps_cuda_expect(op, "d_weight", &a->d_weight, PS_F32, channels));
    PS_TRY(ps_cuda_expect(op, "d_bias", &a->d_bias, PS_F32, channels));
    const int64_t rows = count / n, windows = (rows + channels - 1) / channels; /* of the first channel: the most */
    if (windows == 0) {
        return PS_OK;
    }
    int64_t shares = (4LL * c->multiprocessors + channels - 1) / channels;
    shares = shares < windows ? shares : windows;
    const int64_t share_windows = (windows + shares - 1) / shares;
    shares = (windows + share_windows - 1) / share_windows;
    float *partials;
    PS_TRY(ps_cuda_partials(c, op, (size_t)(shares * 2 * channels), &partials));
    ps_cuda_launch(c, channel_sums<G, K>, (unsigned)(shares * channels), block, 0, partials, (G *)a->dx.data, (const G *)a->dy.data,
                   (const K *)a->kept.data, (const float *)a->weight.data, rows, share_windows, (int)channels, (int)n, a->inverse);
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    const struct ps_cuda_columns job = {
        (float *)a->d_weight.data, (float *)a->d_bias.data, channels, partials, shares, 2 * channels};
    return ps_cuda_add_columns(c, op, &job, 1);
}

/* T: the table's activations. */
template <typename T> static enum ps_status backward_of(const struct ps_kernels *k, const struct ps_channel_affine_backward *a)
{
    const bool kept = a->kept.type == ps_type_of<T>;
    if (a->dy.type == ps_type_of<T>) {
        return kept ? backward<T, T>(k, a) : backward<T, float>(k, a);
    }
    return kept ? backward<float, T>(k, a) : backward<float, float>(k, a);
}

extern "C" enum ps_status ps_cuda_channel_affine_backward(const struct ps_kernels *k, const struct ps_channel_affine_backward *a)
{
    return PS_BY_REAL(k, backward_of, k, a);
}
