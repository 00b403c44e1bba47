/* The two ends of the model: gather_patches and gather_targets; forecast, forecast_loss and forecast_error.
 *
 * Why: windows are gathered on the device by index, so a step never waits for the host. In a series the channels of one time are
 * neighbours and a window's values lie C apart, so a block fetches 8 neighbouring channels at once (one sector of 32 bytes), keeps
 * them in shared memory, and a warp a channel takes mean, deviation and patches from there. Of long windows a block has a part, and
 * a kernel before finds each part's count, mean and squared differences, which are joined by Chan's formula. The loss needs no pass
 * of its own: the pass that makes the gradient leaves a partial sum a block, in double, and one block adds them in a fixed order.
 *
 * gather_patches: patches, mean, std =. Bytes: 4 S L + 4 R P, of long windows 4 S L more from L2. Flops: 6 R P, with masked 8.
 * gather_targets: y =. Bytes: 8 S H, and with inputs 4 S L at most: a warp's first values tell, but of a window with nothing
 * observed. forecast: y =. Bytes: 8 S H. Flops: 3 S H.   forecast_loss: dx =, loss_sum +=. Bytes: 12 S H. Flops: 8 S H.
 * forecast_error: one slot of errors =. Bytes: 8 S H. Flops: 8 S H. In bf16 patches and dx are half as long.
 * A loss that is not plain has passes of its own: forecast_loss reads the targets once more before it, to count those observed.
 * count_observed: count +=. Bytes: 4 S H.
 * With Q quantiles bytes are 4 S H + 8 S Q H, and flops 8 S Q H; putting Q forecasts in order takes Q^2/4 comparisons at most,
 * in registers or, of many, in the cache. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/count.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/vector.cuh"
#include "kernels/cuda/tile/windows.cuh"

static const int block = 256;
static const int channels_at_once = 8;

/* ---- gather ---- */

struct patching {
    int channels, length, patch, stride, patches, tile /* channels a block */, tiles, pitch;
    int parts, each;  /* blocks that share a tile's patches; patches of one */
    int range;        /* values of a channel in shared memory, of long windows those of a part; 0: they do not fit */
    int moment_parts; /* of a long window, with revin */
    int first, revin, subtract_last;
    float epsilon;
    struct ps_divisor by_patch, by_tile, by_range;
};

/* Over a warp: how many values are observed, their sum, the last one's place. */
static __device__ __forceinline__ void sum_over_warp(float &count, float &sum, int &last)
{
    count = ps_group_sum<32>(count);
    sum = ps_group_sum<32>(sum);
    for (int offset = 16; offset > 0; offset /= 2) {
        last = max(last, __shfl_xor_sync(0xffffffffu, last, offset));
    }
}

/* Mean and deviation of what a warp observes among `length` values, in the order of those of a window without a hole, whose bits
 * they then are; `last`: its place. 0 and 1 of nothing. */
template <typename VALUE>
static __device__ __forceinline__ void observed_statistics(const VALUE &value, int length, float epsilon, float &mean,
                                                           float &deviation, int &last)
{
    float sum = 0.0f, squares = 0.0f, count = 0.0f;
    last = -1;
    for (int l = threadIdx.x % 32; l < length; l += 32) {
        const float v = value(l);
        const bool observed = !isnan(v);
        sum += observed ? v : 0.0f;
        count += observed ? 1.0f : 0.0f;
        last = observed ? l : last;
    }
    sum_over_warp(count, sum, last);
    if (count == 0.0f) {
        return;
    }
    mean = sum / count;
    for (int l = threadIdx.x % 32; l < length; l += 32) {
        const float v = value(l), difference = isnan(v) ? 0.0f : v - mean;
        squares += difference * difference;
    }
    deviation = sqrtf(ps_group_sum<32>(squares) / count + epsilon);
}

/* What is observed of a part of a channel: how many values, their mean, their squared differences from it, the last one's place. */
struct alignas(16) moments {
    float count, mean, squares;
    int last;
};

enum { LONGEST = 4096 /* window that is not in parts */, CHUNK = 512, KEPT = CHUNK / (block / channels_at_once) };

/* The sum over the block's threads whose numbers are the same modulo 8, in all of them. */
static __device__ __forceinline__ float sum_of_channel(float value, float (*shared)[8])
{
    value = ps_across_sum<channels_at_once>(value);
    if (threadIdx.x % 32 < channels_at_once) {
        shared[threadIdx.x / 32][threadIdx.x % 32] = value;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < block / 32; i++) {
        sum += shared[i][threadIdx.x % channels_at_once];
    }
    __syncthreads();
    return sum;
}

/* Grid: batch * ceil(channels / 8) * parts, a part being `chunks` times CHUNK values. */
static __global__ void __launch_bounds__(block)
    window_moments(struct moments *__restrict__ to, const struct ps_cuda_windows w, const struct ps_step_state *__restrict__ state,
                   int channels, int length, int parts, int chunks, bool masked)
{
    ps_grid_begin();
    __shared__ float shared[block / 32][8];
    const int tiles = (channels + channels_at_once - 1) / channels_at_once, part = (int)blockIdx.x % parts,
              place = (int)blockIdx.x / parts, c = place % tiles * channels_at_once + (int)threadIdx.x % channels_at_once;
    const int64_t b = place / tiles;
    const float *window = ps_window_of(w, state, b), *from = window && c < channels ? window + c * w.by_channel : NULL;
    struct moments all = {0.0f, 0.0f, 0.0f, -1};
    for (int chunk = part * chunks; chunk < (part + 1) * chunks && chunk * CHUNK < length; chunk++) {
        float v[KEPT], sum = 0.0f, count = 0.0f, squares = 0.0f;
        bool observed[KEPT];
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            const int l = chunk * CHUNK + (int)threadIdx.x / channels_at_once + j * (block / channels_at_once);
            v[j] = from && l < length ? from[l * w.by_time] : NAN;
            observed[j] = l < length;
        }
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            observed[j] = observed[j] && !(masked && isnan(v[j]));
            sum += observed[j] ? v[j] : 0.0f;
            count += observed[j] ? 1.0f : 0.0f;
            all.last =
                observed[j] ? chunk * CHUNK + (int)threadIdx.x / channels_at_once + j * (block / channels_at_once) : all.last;
        }
        count = sum_of_channel(count, shared);
        sum = sum_of_channel(sum, shared);
        const float mean = count > 0.0f ? sum / count : 0.0f;
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            const float difference = observed[j] ? v[j] - mean : 0.0f;
            squares += difference * difference;
        }
        squares = sum_of_channel(squares, shared);
        if (count > 0.0f) {
            const float apart = mean - all.mean, share = count / (all.count + count);
            all.squares += squares + apart * apart * all.count * share;
            all.mean += apart * share;
            all.count += count;
        }
    }
    int *const lasts = (int *)shared; /* of a warp and a channel */
    for (int offset = channels_at_once; offset < 32; offset *= 2) {
        all.last = max(all.last, __shfl_xor_sync(0xffffffffu, all.last, offset));
    }
    if (threadIdx.x % 32 < channels_at_once) {
        lasts[threadIdx.x / 32 * 8 + threadIdx.x % 32] = all.last;
    }
    __syncthreads();
    if (threadIdx.x < channels_at_once && c < channels) {
        for (int i = 1; i < block / 32; i++) {
            all.last = max(all.last, lasts[i * 8 + threadIdx.x]);
        }
        to[(b * channels + c) * parts + part] = all;
    }
}

/* Mean and deviation of a channel from those of its parts, by a warp; 0 and 1 of nothing. */
static __device__ __forceinline__ void join_moments(const struct moments *of, int parts, float epsilon, float &mean,
                                                    float &deviation, int &last)
{
    float count = 0.0f, sum = 0.0f, squares = 0.0f;
    last = -1;
    for (int i = threadIdx.x % 32; i < parts; i += 32) {
        const struct moments m = of[i];
        count += m.count;
        sum += m.count * m.mean;
        last = max(last, m.last);
    }
    sum_over_warp(count, sum, last);
    if (count == 0.0f) {
        return;
    }
    mean = sum / count;
    for (int i = threadIdx.x % 32; i < parts; i += 32) {
        const struct moments m = of[i];
        squares += m.squares + m.count * (m.mean - mean) * (m.mean - mean);
    }
    deviation = sqrtf(ps_group_sum<32>(squares) / count + epsilon);
}

/* Grid: batch * tiles * parts. The block's channels lie in shared memory [tile][pitch], where they fit: whole, or, LONG, from the
 * first value of the block's patches on. MASKED: a NaN is unobserved, but where there is no window. */
template <typename T, bool LONG, bool MASKED>
static __global__ void __launch_bounds__(block)
    gather_block(T *__restrict__ patches, float *__restrict__ mean, float *__restrict__ std, const struct ps_cuda_windows w,
                 const struct ps_step_state *__restrict__ state, const struct moments *__restrict__ moments,
                 const struct patching p)
{
    extern __shared__ float shared[];
    const bool behind = LONG && p.revin; /* window_moments, which reads the same windows */
    if (!behind) {
        ps_grid_begin();
    }
    const int part = (int)blockIdx.x % p.parts, place = (int)blockIdx.x / p.parts;
    const int64_t b = place / p.tiles;
    const int first = place % p.tiles * p.tile, live = p.channels - first < p.tile ? p.channels - first : p.tile;
    const int n = part * p.each, after = n + p.each < p.patches ? n + p.each : p.patches;
    int begin = 0;
    if constexpr (LONG) {
        begin = p.first + n * p.stride;
        begin = begin < p.length ? begin : p.length - 1;
    }
    const int range = p.length - begin < p.range ? p.length - begin : p.range;
    const float *window = ps_window_of(w, state, b);
    const float *from = window ? window + first * w.by_channel : NULL;
    const bool channels_fastest = w.by_channel < w.by_time;
#pragma unroll 8
    for (int i = threadIdx.x; i < p.tile * p.range; i += block) {
        int c, l;
        if (channels_fastest) {
            l = (int)ps_divide(i, p.by_tile);
            c = i - l * p.tile;
        } else {
            c = (int)ps_divide(i, p.by_range);
            l = i - c * p.range;
        }
        if (c < live && l < range) {
            if (from) {
                ps_copy_async4(shared + c * p.pitch + l, from + c * w.by_channel + (begin + l) * w.by_time);
            } else {
                shared[c * p.pitch + l] = NAN;
            }
        }
    }
    if (behind) {
        ps_grid_begin();
    }
    ps_copy_wait();
    __syncthreads();
    /* Warps that there are more of than channels share a channel's patches, as blocks do; each finds its mean and deviation. */
    const int lane = threadIdx.x % 32, warps = live < block / 32 ? block / 32 / live : 1, warp = threadIdx.x / 32;
    if (warp >= live * warps) {
        return;
    }
    const int c = warp / warps, share = warp % warps;
    const int64_t sequence = b * p.channels + first + c;
    auto value = [&](int l) -> float {
        if (LONG && p.range == 0) {
            return from ? from[c * w.by_channel + l * w.by_time] : NAN;
        }
        return shared[c * p.pitch + l - begin];
    };
    float mu = 0.0f, deviation = 1.0f;
    if constexpr (LONG) {
        if (p.revin) {
            int last;
            join_moments(moments + sequence * p.moment_parts, p.moment_parts, p.epsilon, mu, deviation, last);
            mu = p.subtract_last && last >= 0 ? from ? from[c * w.by_channel + last * w.by_time] : NAN : mu;
        }
    } else if constexpr (MASKED) {
        int last;
        if (p.revin) {
            observed_statistics(value, p.length, p.epsilon, mu, deviation, last);
            mu = p.subtract_last && last >= 0 ? value(last) : mu;
        }
    } else if (p.revin) {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll 8
        for (int l = lane; l < p.length; l += 32) {
            sum += value(l);
        }
        mu = ps_group_sum<32>(sum) / (float)p.length;
#pragma unroll 8
        for (int l = lane; l < p.length; l += 32) {
            const float difference = value(l) - mu;
            squares += difference * difference;
        }
        deviation = sqrtf(ps_group_sum<32>(squares) / (float)p.length + p.epsilon);
        mu = p.subtract_last ? value(p.length - 1) : mu;
    }
    if (lane == 0 && share == 0 && part == 0) {
        mean[sequence] = mu;
        std[sequence] = deviation;
    }
    const float scale = 1.0f / deviation;
    T *to = patches + sequence * p.patches * p.patch;
#pragma unroll 4
    for (int j = n * p.patch + lane + 32 * share; j < after * p.patch; j += 32 * warps) {
        const int row = (int)ps_divide(j, p.by_patch), at = p.first + row * p.stride + (j - row * p.patch);
        auto z = [&]() { return (value(at < p.length ? at : p.length - 1) - mu) * scale; }; /* beyond the end the last repeats */
        if constexpr (MASKED) {
            ps_put(to + j, from && isnan(z()) ? 0.0f : z());
        } else {
            ps_put(to + j, z());
        }
    }
}

template <typename T> static enum ps_status gather_patches(const struct ps_kernels *k, const struct ps_gather_patches *a)
{
    const char *op = "gather_patches";
    const struct ps_cuda_context *c = ps_cuda(k);
    struct ps_cuda_windows w;
    PS_TRY(ps_windows_make(op, "inputs", &a->inputs, &a->indices, a->state, a->batch, &w));
    const int64_t channels = a->inputs.size[1], length = a->inputs.size[2], patch = ps_cuda_width(&a->patches);
    if (channels < 1 || patch < 1 || patch > length || a->stride < 1) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): patches of %lld every %lld do not fit %lld channels of %lld", op,
                       (long long)patch, (long long)a->stride, (long long)channels, (long long)length);
    }
    const int64_t patches = (length - patch) / a->stride + 1 + (a->pad_end ? 1 : 0), sequences = a->batch * channels;
    if (a->first < 0 || a->first + (patches - 1) * a->stride + patch > length + (a->pad_end ? a->stride : 0)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld patches from row %lld do not fit windows of %lld", op, (long long)patches,
                       (long long)a->first, (long long)length);
    }
    PS_TRY(ps_cuda_expect(op, "patches", &a->patches, ps_type_of<T>, sequences * patches * patch));
    PS_TRY(ps_cuda_expect(op, "mean", &a->mean, PS_F32, sequences));
    PS_TRY(ps_cuda_expect(op, "std", &a->std, PS_F32, sequences));
    if (patches * patch + a->stride > INT32_MAX || channels_at_once * length > INT32_MAX || sequences > INT32_MAX) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld sequences of %lld patches of %lld are too many", op, (long long)sequences,
                       (long long)patches, (long long)patch);
    }
    if (sequences == 0) {
        return PS_OK;
    }
    const bool longer = length > LONGEST;
    const int64_t room = 48 * 1024 / (int64_t)sizeof(float);
    int64_t tile = room / ((longer ? patch : length) | 1);
    const bool fits = tile > 0;
    tile = !fits || tile > channels_at_once ? channels_at_once : tile;
    tile = tile < channels ? tile : channels;
    if (!longer) {
        const int64_t each = sequences / c->multiprocessors; /* of few sequences every multiprocessor has some, or a part of one */
        tile = each < 1 ? 1 : each < tile ? each : tile;
    }
    const int64_t tiles = (channels + tile - 1) / tile, free = (longer ? 2 : 1) * c->multiprocessors / (a->batch * tiles);
    int64_t each = free > 1 ? (patches + free - 1) / free : patches, range = length;
    if (longer) {
        const int64_t most = fits ? (((room / tile - 1) | 1) - patch) / a->stride + 1 : each;
        each = each < most ? each : most;
        range = fits ? (each - 1) * a->stride + patch : 0;
    }
    const int64_t parts = (patches + each - 1) / each, pitch = range | 1; /* odd: the channels of one time lie in different banks */
    /* As many values a part as registers hold, unless the parts of all sequences need more room than there is. */
    const int64_t chunks = (length + CHUNK - 1) / CHUNK,
                  most = (int64_t)c->workspace_bytes / (int64_t)sizeof(struct moments) / sequences,
                  chunks_each = most > 0 ? (chunks + most - 1) / most : chunks,
                  moment_parts = (chunks + chunks_each - 1) / chunks_each;
    const struct patching p = {(int)channels,
                               (int)length,
                               (int)patch,
                               (int)a->stride,
                               (int)patches,
                               (int)tile,
                               (int)tiles,
                               (int)pitch,
                               (int)parts,
                               (int)each,
                               (int)range,
                               (int)moment_parts,
                               (int)a->first,
                               a->revin,
                               a->subtract_last,
                               (float)a->epsilon,
                               ps_divisor_make(patch),
                               ps_divisor_make(tile),
                               ps_divisor_make(range > 0 ? range : 1)};
    struct moments *const moments = (struct moments *)c->workspace;
    if (longer && a->revin) {
        PS_TRY(ps_cuda_workspace(c, op, (size_t)(sequences * moment_parts) * sizeof *moments));
        const int64_t places = a->batch * ((channels + channels_at_once - 1) / channels_at_once);
        ps_cuda_launch(c, window_moments, (unsigned)(places * moment_parts), block, 0, moments, w, a->state, (int)channels,
                       (int)length, (int)moment_parts, (int)chunks_each, a->masked != 0);
        PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    }
    const auto kernel = a->masked ? longer ? gather_block<T, true, true> : gather_block<T, false, true>
                        : longer ? gather_block<T, true, false>
                                  : gather_block<T, false, false>;
    ps_cuda_launch(c, kernel, (unsigned)(a->batch * tiles * parts), block, (size_t)(tile * pitch) * sizeof(float),
                   (T *)a->patches.data, (float *)a->mean.data, (float *)a->std.data, w, a->state, moments, p);
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_gather_patches(const struct ps_kernels *k, const struct ps_gather_patches *a)
{
    return PS_BY_REAL(k, gather_patches, k, a);
}

/* A block a sequence. MASKED: of a sequence with nothing observed in its `length` inputs x, NaN. */
template <bool MASKED>
static __global__ void __launch_bounds__(block)
    copy_targets(float *__restrict__ y, const struct ps_cuda_windows w, const struct ps_step_state *__restrict__ state,
                 int channels, int horizon, const struct ps_cuda_windows x, int length)
{
    ps_grid_begin();
    const int64_t b = blockIdx.x / channels, c = blockIdx.x % channels;
    const float *window = ps_window_of(w, state, b);
    if constexpr (MASKED) {
        const float *inputs = ps_window_of(x, state, b);
        int observed = 0;
        for (int first = 0; inputs && first < length && !observed; first += blockDim.x) {
            const int l = first + threadIdx.x;
            observed = __syncthreads_or(l < length && !isnan(inputs[c * x.by_channel + l * x.by_time]));
        }
        window = observed ? window : NULL;
    }
    for (int t = threadIdx.x; t < horizon; t += blockDim.x) {
        y[(int64_t)blockIdx.x * horizon + t] = window ? window[c * w.by_channel + t * w.by_time] : NAN;
    }
}

extern "C" enum ps_status ps_cuda_gather_targets(const struct ps_kernels *k, const struct ps_gather_targets *a)
{
    const char *op = "gather_targets";
    struct ps_cuda_windows w;
    PS_TRY(ps_windows_make(op, "targets", &a->targets, &a->indices, a->state, a->batch, &w));
    const int64_t channels = a->targets.size[1], horizon = a->targets.size[2], sequences = a->batch * channels;
    PS_TRY(ps_cuda_expect(op, "y", &a->y, PS_F32, sequences * horizon));
    if (sequences > INT32_MAX || horizon > INT32_MAX / 2) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld sequences of %lld are too many", op, (long long)sequences,
                       (long long)horizon);
    }
    if (sequences * horizon == 0) {
        return PS_OK;
    }
    struct ps_cuda_windows x = {};
    const bool masked = a->inputs.data != NULL;
    if (masked) {
        PS_TRY(ps_windows_make(op, "inputs", &a->inputs, &a->indices, a->state, a->batch, &x));
        if (a->inputs.size[0] != a->targets.size[0] || a->inputs.size[1] != channels || a->inputs.size[2] > INT32_MAX / 2) {
            return ps_fail(PS_UNSUPPORTED, "%s (cuda): inputs of %lld windows of %lld channels of %lld do not go with the targets",
                           op, (long long)a->inputs.size[0], (long long)a->inputs.size[1], (long long)a->inputs.size[2]);
        }
    }
    const unsigned threads = horizon >= block ? (unsigned)block : (unsigned)((horizon + 31) / 32 * 32);
    ps_cuda_launch(ps_cuda(k), masked ? copy_targets<true> : copy_targets<false>, (unsigned)sequences, threads, 0,
                   (float *)a->y.data, w, a->state, (int)channels, (int)horizon, x, masked ? (int)a->inputs.size[2] : 0);
    PS_CUDA_LAUNCHED(op);
}

/* ---- forecast and loss ---- */

/* What turns x [S, H] into a forecast. */
struct head {
    const float *x, *bias, *mean, *std;
    int64_t count; /* S H */
    uint32_t horizon;
};

static __device__ __forceinline__ float forecast_of(const struct head &h, int64_t i, float *std)
{
    const int64_t s = (uint64_t)i >> 32 ? i / h.horizon : (int64_t)((uint32_t)i / h.horizon);
    *std = h.std[s];
    return (h.x[i] + h.bias[i - s * h.horizon]) * *std + h.mean[s];
}

static __global__ void __launch_bounds__(block) write_forecast(float *y, const struct head h)
{
    ps_grid_begin();
    const int64_t i = (int64_t)blockIdx.x * block + threadIdx.x;
    if (i < h.count) {
        float std;
        y[i] = forecast_of(h, i, &std);
    }
}

/* partials [gridDim.x]; scale = gradient_scale 2 / (S H). */
template <typename T>
static __global__ void __launch_bounds__(block)
    loss_partials(double *__restrict__ partials, T *dx, const float *__restrict__ targets, const struct head h, float scale)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    double sum = 0.0;
    for (int64_t i = (int64_t)blockIdx.x * block + threadIdx.x; i < h.count; i += (int64_t)gridDim.x * block) {
        float std;
        const float error = forecast_of(h, i, &std) - targets[i];
        ps_put(dx + i, scale * std * error);
        sum += (double)error * error;
    }
    sum = ps_block_sum<block>(sum, shared);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

/* scale = B / (S H). */
static __global__ void __launch_bounds__(block)
    finish_loss(struct ps_step_state *state, const double *__restrict__ partials, int count, double scale, int64_t batch)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    const double sum = ps_sum_partials<block>(partials, count, 1, shared);
    if (threadIdx.x == 0) {
        if (isfinite(scale * sum)) {
            state->loss_sum += scale * sum;
        } else if (state->nonfinite == 0) {
            state->lost += (uint64_t)batch;
        }
    }
}

/* ---- other losses than MSE of targets that are all there ---- */

/* ps_loss as kernels read it. */
struct loss {
    enum ps_loss_kind kind;
    int missing, quantiles, point;
    float delta, quantile[PS_MOST_QUANTILES];
};

static struct loss loss_make(const struct ps_loss *l)
{
    struct loss made = {l->kind, l->missing, (int)ps_loss_outputs(l), ps_loss_point(l), (float)l->delta, {}};
    for (int q = 0; q < PS_MOST_QUANTILES; q++) {
        made.quantile[q] = (float)l->quantile[q];
    }
    return made;
}

static enum ps_status check_quantiles(const char *op, int64_t quantiles, int64_t width)
{
    return quantiles >= 1 && quantiles <= PS_MOST_QUANTILES && width % quantiles == 0
               ? PS_OK
               : ps_fail(PS_UNSUPPORTED, "%s (cuda): rows of %lld are not %lld quantiles, of which there are 1 to %d", op,
                         (long long)width, (long long)quantiles, PS_MOST_QUANTILES);
}

/* Sequence and step of target i of [S, H], H = h.horizon / quantiles; then its forecasts are those of columns t, t + H, .. */
struct place {
    int64_t s;
    int t, steps;
};

static __device__ __forceinline__ struct place place_of(const struct head &h, int quantiles, int64_t i)
{
    const int steps = (int)h.horizon / quantiles;
    const int64_t s = i / steps;
    return {s, (int)(i - s * steps), steps};
}

static __device__ __forceinline__ float quantile_at(const struct head &h, const struct place &p, int q, float *std)
{
    return forecast_of(h, p.s * h.horizon + (int64_t)q * p.steps + p.t, std);
}

/* Insertion: few, and mostly in order. */
static __device__ __forceinline__ void put_in_order(float *y, int n)
{
    for (int i = 1; i < n; i++) {
        for (int j = i; j > 0 && y[j] < y[j - 1]; j--) {
            const float swapped = y[j];
            y[j] = y[j - 1];
            y[j - 1] = swapped;
        }
    }
}

static __global__ void __launch_bounds__(block) write_quantiles(float *y, const struct head h, int quantiles)
{
    ps_grid_begin();
    const int64_t i = (int64_t)blockIdx.x * block + threadIdx.x;
    if (i < h.count / quantiles) {
        const struct place p = place_of(h, quantiles, i);
        float at[PS_MOST_QUANTILES], std;
        for (int q = 0; q < quantiles; q++) {
            at[q] = quantile_at(h, p, q, &std);
        }
        put_in_order(at, quantiles);
        for (int q = 0; q < quantiles; q++) {
            y[p.s * h.horizon + (int64_t)q * p.steps + p.t] = at[q];
        }
    }
}

static __device__ __forceinline__ float loss_of(const struct loss &l, int q, float e)
{
    const float size = fabsf(e);
    switch (l.kind) {
    case PS_LOSS_MAE:
        return size;
    case PS_LOSS_HUBER:
        return size <= l.delta ? 0.5f * e * e : l.delta * (size - 0.5f * l.delta);
    case PS_LOSS_QUANTILE:
        return e < 0.0f ? -l.quantile[q] * e : (1.0f - l.quantile[q]) * e;
    default:
        return e * e;
    }
}

/* Its slope; of MSE half of it. */
static __device__ __forceinline__ float slope_of(const struct loss &l, int q, float e)
{
    switch (l.kind) {
    case PS_LOSS_MAE:
        return e > 0.0f ? 1.0f : e < 0.0f ? -1.0f : e;
    case PS_LOSS_HUBER:
        return e > l.delta ? l.delta : e < -l.delta ? -l.delta : e;
    case PS_LOSS_QUANTILE:
        return e > 0.0f ? 1.0f - l.quantile[q] : e < 0.0f ? -l.quantile[q] : e;
    default:
        return e;
    }
}

/* counts [gridDim.x]: targets that are observed, exact whatever the order of their sum. */
static __global__ void __launch_bounds__(block)
    observed_partials(double *__restrict__ counts, const float *__restrict__ targets, int64_t count)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    int64_t observed = 0;
    for (int64_t i = (int64_t)blockIdx.x * block + threadIdx.x; i < count; i += (int64_t)gridDim.x * block) {
        observed += !isnan(targets[i]);
    }
    const double sum = ps_block_sum<block>((double)observed, shared);
    if (threadIdx.x == 0) {
        counts[blockIdx.x] = sum;
    }
}

static __global__ void __launch_bounds__(block) add_observed(double *count, const double *__restrict__ counts, int blocks)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    const double sum = ps_sum_partials<block>(counts, blocks, 1, shared);
    if (threadIdx.x == 0) {
        *count += sum;
    }
}

/* Targets that are observed: all, or the sum of counts [gridDim.x]. */
static __device__ __forceinline__ double observed_of(const double *counts, int blocks, int64_t all, const struct loss &l,
                                                     double *shared)
{
    return l.missing ? ps_sum_partials<block>(counts, blocks, 1, shared) : (double)all;
}

/* partials [gridDim.x]; factor = gradient_scale / Q, of MSE twice that. of_step: the targets that the mean is over; NULL: these. */
template <typename T>
static __global__ void __launch_bounds__(block)
    any_loss_partials(double *__restrict__ partials, T *dx, const float *__restrict__ targets, const double *__restrict__ counts,
                      const double *__restrict__ of_step, const struct head h, const struct loss l, double factor)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    const int64_t all = h.count / l.quantiles;
    const float scale = (float)(factor / (of_step ? *of_step : observed_of(counts, (int)gridDim.x, all, l, shared)));
    double sum = 0.0;
    for (int64_t i = (int64_t)blockIdx.x * block + threadIdx.x; i < all; i += (int64_t)gridDim.x * block) {
        const struct place p = place_of(h, l.quantiles, i);
        const float target = targets[i];
        const bool left_out = l.missing && isnan(target);
        for (int q = 0; q < l.quantiles; q++) {
            float std;
            const float error = quantile_at(h, p, q, &std) - target;
            ps_put(dx + p.s * h.horizon + (int64_t)q * p.steps + p.t, left_out ? 0.0f : scale * std * slope_of(l, q, error));
            sum += left_out ? 0.0 : (double)loss_of(l, q, error);
        }
    }
    sum = ps_block_sum<block>(sum, shared);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

/* scale = B / (S Q H). */
static __global__ void __launch_bounds__(block)
    finish_any_loss(struct ps_step_state *state, const double *__restrict__ partials, const double *__restrict__ counts, int count,
                    double scale, int64_t all, int64_t batch, const struct loss l)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    const double sum = ps_sum_partials<block>(partials, count, 1, shared);
    const double observed = observed_of(counts, count, all, l, shared);
    if (threadIdx.x == 0) {
        if (isfinite(scale * sum)) {
            state->loss_sum += scale * sum;
            state->unobserved += (uint64_t)(all - (int64_t)observed);
        } else if (state->nonfinite == 0) {
            state->lost += (uint64_t)batch;
        }
    }
}

/* Where errors go: slots that there are, windows of each; done [1]: 0 before and after. */
struct slots {
    double *errors;
    int64_t count, windows;
    const struct ps_step_state *state;
    unsigned *done;
};

/* partials [gridDim.x, PS_ERRORS]. A slot that does not exist is not written: the caller finds it as it left it. */
static __global__ void __launch_bounds__(block)
    any_errors(double *partials, const float *__restrict__ targets, const struct head h, const struct loss l, const struct slots to)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    double sums[PS_ERRORS] = {0.0};
    const int64_t all = h.count / l.quantiles;
    for (int64_t i = (int64_t)blockIdx.x * block + threadIdx.x; i < all; i += (int64_t)gridDim.x * block) {
        const float target = targets[i];
        if (l.missing && isnan(target)) {
            continue;
        }
        const struct place p = place_of(h, l.quantiles, i);
        float y[PS_MOST_QUANTILES], std;
        for (int q = 0; q < l.quantiles; q++) {
            y[q] = quantile_at(h, p, q, &std);
        }
        put_in_order(y, l.quantiles);
        double loss = 0.0;
        for (int q = 0; q < l.quantiles; q++) {
            loss += (double)loss_of(l, q, y[q] - target);
        }
        const double error = (double)(y[l.point] - target);
        sums[PS_ERROR_SQUARES] += error * error;
        sums[PS_ERROR_ABSOLUTES] += fabs(error);
        sums[PS_ERROR_OBSERVED] += 1.0;
        sums[PS_ERROR_LOSS] += loss / l.quantiles;
        sums[PS_ERROR_WITHIN] += l.kind == PS_LOSS_QUANTILE && y[0] <= target && target <= y[l.quantiles - 1] ? 1.0 : 0.0;
    }
    for (int j = 0; j < PS_ERRORS; j++) {
        const double sum = ps_block_sum<block>(sums[j], shared);
        if (threadIdx.x == 0) {
            partials[(int64_t)PS_ERRORS * blockIdx.x + j] = sum;
        }
    }
    if (!ps_comes_last(to.done, gridDim.x)) {
        return;
    }
    const uint64_t slot = to.state->cursor / (uint64_t)to.windows;
    for (int j = 0; j < PS_ERRORS; j++) {
        const double sum = ps_sum_partials<block>(partials + j, (int)gridDim.x, PS_ERRORS, shared);
        if (threadIdx.x == 0 && slot < (uint64_t)to.count) {
            to.errors[PS_ERRORS * slot + j] = sum;
        }
    }
}

/* ---- MSE of targets that are all there ---- */

/* partials [gridDim.x, 2]: squares, absolute values. */
static __global__ void __launch_bounds__(block)
    plain_errors(double *partials, const float *__restrict__ targets, const struct head h, const struct slots to)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    double squares = 0.0, absolutes = 0.0;
    for (int64_t i = (int64_t)blockIdx.x * block + threadIdx.x; i < h.count; i += (int64_t)gridDim.x * block) {
        float std;
        const double error = (double)(forecast_of(h, i, &std) - targets[i]);
        squares += error * error;
        absolutes += fabs(error);
    }
    squares = ps_block_sum<block>(squares, shared);
    absolutes = ps_block_sum<block>(absolutes, shared);
    if (threadIdx.x == 0) {
        partials[2 * blockIdx.x] = squares;
        partials[2 * blockIdx.x + 1] = absolutes;
    }
    if (!ps_comes_last(to.done, gridDim.x)) {
        return;
    }
    squares = ps_sum_partials<block>(partials, (int)gridDim.x, 2, shared);
    absolutes = ps_sum_partials<block>(partials + 1, (int)gridDim.x, 2, shared);
    const uint64_t slot = to.state->cursor / (uint64_t)to.windows;
    if (threadIdx.x == 0 && slot < (uint64_t)to.count) {
        double *at = to.errors + PS_ERRORS * slot;
        at[PS_ERROR_SQUARES] = squares;
        at[PS_ERROR_ABSOLUTES] = absolutes;
        at[PS_ERROR_OBSERVED] = (double)h.count;
        at[PS_ERROR_LOSS] = squares;
        at[PS_ERROR_WITHIN] = 0.0;
    }
}

static enum ps_status head_make(const char *op, const struct ps_tensor *x, const struct ps_tensor *bias,
                                const struct ps_tensor *mean, const struct ps_tensor *std, struct head *h)
{
    const int64_t count = ps_tensor_count(x), horizon = ps_tensor_count(bias);
    if (horizon < 1 || horizon > INT32_MAX || count % horizon != 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld elements are not rows of a bias of %lld", op, (long long)count,
                       (long long)horizon);
    }
    PS_TRY(ps_cuda_expect(op, "x", x, PS_F32, count));
    PS_TRY(ps_cuda_expect(op, "bias", bias, PS_F32, horizon));
    PS_TRY(ps_cuda_expect(op, "mean", mean, PS_F32, count / horizon));
    PS_TRY(ps_cuda_expect(op, "std", std, PS_F32, count / horizon));
    *h = {(const float *)x->data, (const float *)bias->data, (const float *)mean->data, (const float *)std->data, count,
          (uint32_t)horizon};
    return PS_OK;
}

/* Blocks of a pass that leaves a partial sum each. */
static unsigned partial_blocks(const struct ps_cuda_context *c, int64_t count)
{
    const unsigned blocks = ps_cuda_blocks(count, 2 * block), most = 4u * (unsigned)c->multiprocessors;
    return blocks < most ? blocks : most;
}

extern "C" enum ps_status ps_cuda_forecast(const struct ps_kernels *k, const struct ps_forecast *a)
{
    struct head h;
    PS_TRY(head_make("forecast", &a->x, &a->bias, &a->mean, &a->std, &h));
    PS_TRY(ps_cuda_expect("forecast", "y", &a->y, PS_F32, h.count));
    if (h.count == 0) {
        return PS_OK;
    }
    const int64_t quantiles = a->quantiles > 0 ? a->quantiles : 1;
    PS_TRY(check_quantiles("forecast", quantiles, h.horizon));
    if (quantiles == 1) {
        ps_cuda_launch(ps_cuda(k), write_forecast, ps_cuda_blocks(h.count, block), block, 0, (float *)a->y.data, h);
    } else {
        ps_cuda_launch(ps_cuda(k), write_quantiles, ps_cuda_blocks(h.count / quantiles, block), block, 0, (float *)a->y.data, h,
                       (int)quantiles);
    }
    PS_CUDA_LAUNCHED("forecast");
}

/* counts [blocks] = those of targets [count]. */
static enum ps_status count_parts(const struct ps_cuda_context *c, const char *op, unsigned blocks, double *counts,
                                  const float *targets, int64_t count)
{
    ps_cuda_launch(c, observed_partials, blocks, block, 0, counts, targets, count);
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_count_observed(const struct ps_kernels *k, const struct ps_count_observed *a)
{
    const char *op = "count_observed";
    const struct ps_cuda_context *c = ps_cuda(k);
    const int64_t count = ps_tensor_count(&a->targets);
    const unsigned blocks = partial_blocks(c, count);
    double *counts = (double *)c->workspace;
    PS_TRY(ps_cuda_expect(op, "count", &a->count, PS_F64, 1));
    PS_TRY(ps_cuda_expect(op, "targets", &a->targets, PS_F32, count));
    PS_TRY(ps_cuda_workspace(c, op, blocks * sizeof(double)));
    PS_TRY(count_parts(c, op, blocks, counts, (const float *)a->targets.data, count));
    ps_cuda_launch(c, add_observed, 1, block, 0, (double *)a->count.data, (const double *)counts, (int)blocks);
    PS_CUDA_LAUNCHED(op);
}

/* Losses that are not plain, and means over more targets than these. */
template <typename T>
static enum ps_status any_loss(const struct ps_cuda_context *c, const struct ps_forecast_loss *a, const struct head &h)
{
    const char *op = "forecast_loss";
    const struct loss l = loss_make(&a->loss);
    const int64_t all = h.count / l.quantiles;
    const unsigned blocks = partial_blocks(c, all);
    PS_TRY(ps_cuda_workspace(c, op, 2 * blocks * sizeof(double)));
    double *partials = (double *)c->workspace, *counts = partials + blocks;
    const float *targets = (const float *)a->targets.data;
    if (l.missing) {
        PS_TRY(count_parts(c, op, blocks, counts, targets, all));
    }
    const double factor = (l.kind == PS_LOSS_MSE ? 2.0 : 1.0) * ps_gradient_scale(a->gradient_scale) / l.quantiles;
    ps_cuda_launch(c, any_loss_partials<T>, blocks, block, 0, partials, (T *)a->dx.data, targets, (const double *)counts,
                   (const double *)a->observed.data, h, l, factor);
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    ps_cuda_launch(c, finish_any_loss, 1, block, 0, a->state, (const double *)partials, (const double *)counts, (int)blocks,
                   (double)a->batch / (double)h.count, all, a->batch, l);
    PS_CUDA_LAUNCHED(op);
}

template <typename T> static enum ps_status forecast_loss(const struct ps_kernels *k, const struct ps_forecast_loss *a)
{
    const char *op = "forecast_loss";
    const struct ps_cuda_context *c = ps_cuda(k);
    struct head h;
    PS_TRY(head_make(op, &a->x, &a->bias, &a->mean, &a->std, &h));
    const int64_t quantiles = ps_loss_outputs(&a->loss);
    PS_TRY(check_quantiles(op, quantiles, h.horizon));
    PS_TRY(ps_cuda_expect(op, "dx", &a->dx, ps_type_of<T>, h.count));
    PS_TRY(ps_cuda_expect(op, "targets", &a->targets, PS_F32, h.count / quantiles));
    if (a->observed.data) {
        PS_TRY(ps_cuda_expect(op, "observed", &a->observed, PS_F64, 1));
    }
    if (h.count == 0) {
        return PS_OK;
    }
    if (!ps_loss_is_plain(&a->loss) || a->observed.data) {
        return any_loss<T>(c, a, h);
    }
    const unsigned blocks = partial_blocks(c, h.count);
    PS_TRY(ps_cuda_workspace(c, op, blocks * sizeof(double)));
    ps_cuda_launch(c, loss_partials<T>, blocks, block, 0, (double *)c->workspace, (T *)a->dx.data, (const float *)a->targets.data,
                   h, (float)(2.0 * ps_gradient_scale(a->gradient_scale) / (double)h.count));
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    ps_cuda_launch(c, finish_loss, 1, block, 0, a->state, (const double *)c->workspace, (int)blocks,
                   (double)a->batch / (double)h.count, a->batch);
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_forecast_loss(const struct ps_kernels *k, const struct ps_forecast_loss *a)
{
    return PS_BY_REAL(k, forecast_loss, k, a);
}

static struct slots slots_of(const struct ps_cuda_context *c, const struct ps_forecast_error *a)
{
    return {(double *)a->errors.data, ps_tensor_count(&a->errors) / PS_ERRORS, a->slot_windows, a->state, c->done};
}

/* Of losses that are not plain. */
static enum ps_status any_error(const struct ps_cuda_context *c, const struct ps_forecast_error *a, const struct head &h)
{
    const char *op = "forecast_error";
    const struct loss l = loss_make(&a->loss);
    const unsigned blocks = partial_blocks(c, h.count / l.quantiles);
    PS_TRY(ps_cuda_workspace(c, op, PS_ERRORS * blocks * sizeof(double)));
    ps_cuda_launch(c, any_errors, blocks, block, 0, (double *)c->workspace, (const float *)a->targets.data, h, l, slots_of(c, a));
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_forecast_error(const struct ps_kernels *k, const struct ps_forecast_error *a)
{
    const char *op = "forecast_error";
    const struct ps_cuda_context *c = ps_cuda(k);
    struct head h;
    PS_TRY(head_make(op, &a->x, &a->bias, &a->mean, &a->std, &h));
    const int64_t quantiles = ps_loss_outputs(&a->loss);
    PS_TRY(check_quantiles(op, quantiles, h.horizon));
    PS_TRY(ps_cuda_expect(op, "targets", &a->targets, PS_F32, h.count / quantiles));
    const int64_t errors = ps_tensor_count(&a->errors);
    PS_TRY(ps_cuda_expect(op, "errors", &a->errors, PS_F64, errors));
    if (a->slot_windows < 1 || ps_cuda_width(&a->errors) != PS_ERRORS) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): slots of %lld errors and of %lld windows do not fit, %d and at least 1 do", op,
                       (long long)ps_cuda_width(&a->errors), (long long)a->slot_windows, (int)PS_ERRORS);
    }
    if (!ps_loss_is_plain(&a->loss)) {
        return any_error(c, a, h);
    }
    const unsigned blocks = partial_blocks(c, h.count);
    PS_TRY(ps_cuda_workspace(c, op, 2 * blocks * sizeof(double)));
    ps_cuda_launch(c, plain_errors, blocks, block, 0, (double *)c->workspace, (const float *)a->targets.data, h, slots_of(c, a));
    PS_CUDA_LAUNCHED(op);
}
