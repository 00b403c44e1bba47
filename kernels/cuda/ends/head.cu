/* The head of a training step: in 16 bits product, forecast, error and the gradient of the product's input in one kernel
 * (head_step); the same around products of the library's (window_loss), in tf32 too; and the sums over sequences that both leave
 * (head_sums). Larger weights: ends/head_large.cu.
 *
 * Why: of a small head (up to 96 steps ahead, W_h within shared memory) the product, the targets' gathering, the loss, two sums and
 * the product back are kernels of 2 to 5 us each that move next to nothing. Here a block has 16 sequences: its warps share the long
 * sum of z W_h (mma.m16n8k16), their parts are added in order, and W_h, which lies in shared memory still, serves dz = dx W_h'.
 * W_h, targets and indices are fetched before the kernel before has ended: that is the encoder, which writes none of them.
 *
 * head_step: dz, dx, partials =. Bytes: 4 S K + 6 S H, and K H from L2 for each block. Flops: 4 S K H.
 * window_loss: dx, partials =. Bytes: 10 S H. Flops: 8 S H.   head_sums: d_bias, loss_sum +=. Bytes: 8 H groups. */
#include "kernels/cuda/ends/head.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/reduce.cuh"

static const int block = 256, warps = block / 32, group = PS_PARTIAL_ROWS;

/* ---- head_step ---- */

template <typename T> struct head_step {
    struct ps_cuda_loss<T> loss;
    T *dz;
    const T *z, *weight;
    int k /* even */, steps /* of 16 rows of the weight */;
    bool by_vectors; /* weight is copied by 16 bytes */
    struct ps_divisor by_horizon;
};

template <int H> struct head_shape {
    static constexpr int columns = 16 * H, weight_pitch = columns + 8, part_pitch = columns + 4;
    static size_t bytes(int rows)
    {
        return ((size_t)rows * weight_pitch + group * weight_pitch) * sizeof(uint16_t) +
               (size_t)warps * group * part_pitch * sizeof(float);
    }
};

/* 16 H >= horizon. A block a group of sequences. Shared memory: W_h [steps * 16][pitch], dx [16][pitch], the warps' parts of x
 * [warps][16][pitch]. */
template <typename T, int H>
static __global__ void __launch_bounds__(block, 1) head_block(const __grid_constant__ struct head_step<T> e)
{
    typedef head_shape<H> shape;
    extern __shared__ uint4 shared[];
    __shared__ double squares[warps];
    const struct ps_cuda_loss<T> &l = e.loss;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int64_t first = (int64_t)blockIdx.x * group;
    const int steps = e.steps, rows = steps * 16;
    T *weight = (T *)shared, *dx = weight + rows * shape::weight_pitch;
    float *parts = (float *)(dx + group * shape::weight_pitch);
    if (e.by_vectors) {
        /* A thread copies one of the pieces of every row that it comes to. */
        constexpr int pieces = shape::columns / 8, at_once = block / pieces;
        const int column = threadIdx.x % pieces * 8, begin = threadIdx.x / pieces;
        T *to = weight + begin * shape::weight_pitch + column;
        const T *from = e.weight + (int64_t)begin * l.horizon + column;
        for (int row = begin < at_once ? begin : rows; row < rows; row += at_once) {
            if (row < e.k && column < l.horizon) {
                ps_copy_async(to, from);
            } else {
                *(uint4 *)to = make_uint4(0, 0, 0, 0);
            }
            to += at_once * shape::weight_pitch;
            from += at_once * l.horizon;
        }
    } else {
        for (int i = threadIdx.x; i < rows * shape::weight_pitch / 8; i += block) {
            shared[i] = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < e.k * l.horizon; i += block) {
            const int row = (int)ps_divide(i, e.by_horizon);
            weight[row * shape::weight_pitch + i - row * l.horizon] = e.weight[i];
        }
    }
    /* No branch between the loads of one round, so that they are under way together. */
    float target[H], bias[H];
    int64_t window[H];
    int series[H], column[H];
    const uint64_t cursor = l.state->cursor;
#pragma unroll
    for (int j = 0; j < H; j++) {
        const int i = j * block + threadIdx.x;
        const int64_t s = first + i / shape::columns;
        column[j] = i % shape::columns;
        const bool inside = s < l.sequences && column[j] < l.horizon;
        const int b = (int)ps_divide(inside ? (uint32_t)s : 0u, l.by_channels);
        const uint64_t at = cursor + (uint64_t)b;
        series[j] = inside ? (int)s - b * l.channels : 0;
        column[j] = inside ? column[j] : 0;
        window[j] = l.windows.indices[at < (uint64_t)l.windows.index_count ? at : 0];
        window[j] = at < (uint64_t)l.windows.index_count ? window[j] : -1;
        bias[j] = l.bias[column[j]];
    }
#pragma unroll
    for (int j = 0; j < H; j++) {
        const bool there = window[j] >= 0 && window[j] < l.windows.count;
        target[j] = l.windows.data[(there ? window[j] : 0) * l.windows.by_window + series[j] * l.windows.by_channel +
                                   column[j] * l.windows.by_time];
        target[j] = there ? target[j] : NAN;
    }
    ps_grid_begin();
    const bool inside[2] = {first + g < l.sequences, first + g + 8 < l.sequences};
    const T *z[2] = {e.z + (first + g) * e.k + 2 * q, e.z + (first + g + 8) * e.k + 2 * q};
    constexpr int ahead = 6;
    uint32_t a[ahead][4];
    auto fetch = [&](int from) {
#pragma unroll
        for (int i = 0; i < ahead; i++) {
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int k = (from + i * warps) * 16 + part / 2 * 8;
                const bool there = inside[part % 2] && k + 2 * q < e.k;
                const uint32_t word = *(const uint32_t *)(there ? z[part % 2] + k : e.z);
                a[i][part] = there ? word : 0u;
            }
        }
    };
    fetch(warp);
    float mean[H], std[H];
#pragma unroll
    for (int j = 0; j < H; j++) {
        const int64_t s = first + (j * block + threadIdx.x) / shape::columns, here = s < l.sequences ? s : 0;
        mean[j] = l.mean[here];
        std[j] = l.std[here];
    }
    ps_copy_wait();
    __syncthreads();
    float sum[2 * H][4] = {};
    for (int from = warp; from < steps; from += ahead * warps) {
        if (from != warp) {
            fetch(from);
        }
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            const int step = from + i * warps;
            if (step < steps) {
#pragma unroll
                for (int h = 0; h < H; h++) {
                    uint32_t b[4];
                    ps_ldmatrix4_transposed(b, weight + (step * 16 + lane % 16) * shape::weight_pitch + h * 16 + lane / 16 * 8);
                    ps_mma16<T>(sum[2 * h], a[i], b[0], b[1], sum[2 * h]);
                    ps_mma16<T>(sum[2 * h + 1], a[i], b[2], b[3], sum[2 * h + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2 * H; h++) {
        float *to = parts + (warp * group + g) * shape::part_pitch + h * 8 + 2 * q;
        *(float2 *)to = make_float2(sum[h][0], sum[h][1]);
        *(float2 *)(to + 8 * shape::part_pitch) = make_float2(sum[h][2], sum[h][3]);
    }
    __syncthreads();
    double square = 0.0;
    float slope[H], x[H];
#pragma unroll
    for (int j = 0; j < H; j++) {
        const int i = j * block + threadIdx.x;
        const float *part = parts + i / shape::columns * shape::part_pitch + i % shape::columns;
        x[j] = *part;
#pragma unroll
        for (int w = 1; w < warps; w++) {
            x[j] += part[w * group * shape::part_pitch];
        }
    }
#pragma unroll
    for (int j = 0; j < H; j++) {
        const int i = j * block + threadIdx.x, row = i / shape::columns, column = i % shape::columns;
        const int64_t s = first + row;
        slope[j] = 0.0f;
        if (s < l.sequences && column < l.horizon) {
            const float error = (x[j] + bias[j]) * std[j] + mean[j] - target[j];
            slope[j] = l.scale * std[j] * error;
            square += (double)error * error;
            ps_put(l.dx + s * l.horizon + column, slope[j]);
        }
        ps_put(dx + row * shape::weight_pitch + column, slope[j]);
    }
    square = ps_block_sum<block>(square, squares); /* all have read the parts */
#pragma unroll
    for (int j = 0; j < H; j++) {
        const int i = j * block + threadIdx.x;
        parts[i / shape::columns * shape::part_pitch + i % shape::columns] = slope[j];
    }
    __syncthreads();
    if (threadIdx.x < l.horizon) {
        double total = 0.0;
#pragma unroll
        for (int row = 0; row < group; row++) {
            total += parts[row * shape::part_pitch + threadIdx.x];
        }
        l.partials[blockIdx.x * (int64_t)(l.horizon + 1) + threadIdx.x] = total;
    }
    if (threadIdx.x == block - 1) {
        l.partials[blockIdx.x * (int64_t)(l.horizon + 1) + l.horizon] = square;
    }
    uint32_t left[H][4];
#pragma unroll
    for (int h = 0; h < H; h++) {
        ps_ldmatrix4(left[h], dx + lane % 16 * shape::weight_pitch + h * 16 + lane / 16 * 8);
    }
    for (int step = warp; step < steps; step += warps) {
        float out[2][4] = {};
#pragma unroll
        for (int h = 0; h < H; h++) {
            uint32_t b[4]; /* columns step * 16 .. + 15 of W_h' */
            ps_ldmatrix4(b, weight + (step * 16 + lane % 8 + lane / 16 * 8) * shape::weight_pitch + h * 16 + lane / 8 % 2 * 8);
            ps_mma16<T>(out[0], left[h], b[0], b[1], out[0]);
            ps_mma16<T>(out[1], left[h], b[2], b[3], out[1]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int column = step * 16 + j * 8 + 2 * q;
            if (column < e.k) {
                if (inside[0]) {
                    *(uint32_t *)(e.dz + (first + g) * e.k + column) = ps_pack<T>(out[j][0], out[j][1]);
                }
                if (inside[1]) {
                    *(uint32_t *)(e.dz + (first + g + 8) * e.k + column) = ps_pack<T>(out[j][2], out[j][3]);
                }
            }
        }
    }
}

/* What both ways check. */
template <typename T>
static enum ps_status loss_make(const char *op, const struct ps_tensor *dx, const struct ps_tensor *partials,
                                const struct ps_tensor *bias, const struct ps_tensor *mean, const struct ps_tensor *std,
                                const struct ps_tensor *targets, const struct ps_tensor *indices, const struct ps_step_state *state,
                                int64_t batch, double gradient_scale, struct ps_cuda_loss<T> *l)
{
    PS_TRY(ps_windows_make(op, "targets", targets, indices, state, batch, &l->windows));
    const int64_t channels = targets->size[1], horizon = targets->size[2], sequences = batch * channels;
    PS_TRY(ps_cuda_expect(op, "dx", dx, ps_type_of<T>, sequences * horizon));
    PS_TRY(ps_cuda_expect(op, "partials", partials, PS_F64, (sequences + group - 1) / group * (horizon + 1)));
    PS_TRY(ps_cuda_expect(op, "bias", bias, PS_F32, horizon));
    PS_TRY(ps_cuda_expect(op, "mean", mean, PS_F32, sequences));
    PS_TRY(ps_cuda_expect(op, "std", std, PS_F32, sequences));
    if (channels < 1 || targets->size[0] < 1 || ps_tensor_count(indices) < 1 || horizon < 1 || horizon > 1024 ||
        sequences > INT32_MAX) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld sequences, %lld steps ahead: up to 1024 are served", op,
                       (long long)sequences, (long long)horizon);
    }
    l->dx = (T *)dx->data;
    l->partials = (double *)partials->data;
    l->bias = (const float *)bias->data;
    l->mean = (const float *)mean->data;
    l->std = (const float *)std->data;
    l->state = state;
    l->sequences = sequences;
    l->channels = (int)channels;
    l->by_channels = ps_divisor_make(channels);
    l->horizon = (int)horizon;
    l->scale = (float)(2.0 * ps_gradient_scale(gradient_scale) / ((double)sequences * (double)horizon));
    return PS_OK;
}

template <typename T, int H>
static enum ps_status launch_head(const struct ps_cuda_context *c, const char *op, const struct head_step<T> *e)
{
    const size_t bytes = head_shape<H>::bytes(e->steps * 16);
    if (bytes > (size_t)c->shared_bytes - 1024) {
#ifdef PS_FUSED_ENCODER
        if (c->compute_capability == 90) {
            return ps_cuda_head_large(c, op, &e->loss, e->dz, e->z, e->weight, e->k);
        }
#endif
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a weight of %d x %d needs %zu bytes of shared memory, a block has %d", op, e->k,
                       e->loss.horizon, bytes, c->shared_bytes - 1024);
    }
    if (e->loss.sequences == 0) {
        return PS_OK;
    }
    PS_TRY(ps_cuda_allow_shared((const void *)head_block<T, H>, bytes, op));
    ps_cuda_launch(c, head_block<T, H>, ps_cuda_blocks(e->loss.sequences, group), block, bytes, *e);
    PS_CUDA_LAUNCHED(op);
}

template <typename T> static enum ps_status step(const struct ps_kernels *k, const struct ps_head_step *a)
{
    const char *op = "head_step";
    head_step<T> e = {};
    PS_TRY(loss_make(op, &a->dx, &a->partials, &a->bias, &a->mean, &a->std, &a->targets, &a->indices, a->state, a->batch,
                     a->gradient_scale, &e.loss));
    const int64_t width = ps_cuda_width(&a->z), horizon = e.loss.horizon;
    PS_TRY(ps_cuda_expect(op, "z", &a->z, ps_type_of<T>, e.loss.sequences * width));
    PS_TRY(ps_cuda_expect(op, "dz", &a->dz, ps_type_of<T>, e.loss.sequences * width));
    PS_TRY(ps_cuda_expect(op, "weight", &a->weight, ps_type_of<T>, width * horizon));
    if (width % 2 != 0 || width > 65536 || horizon > 96 || (uintptr_t)a->z.data % 4 != 0 || (uintptr_t)a->dz.data % 4 != 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a weight of %lld x %lld: an even number of rows and up to 96 columns are served",
                       op, (long long)width, (long long)horizon);
    }
    e.dz = (T *)a->dz.data;
    e.z = (const T *)a->z.data;
    e.weight = (const T *)a->weight.data;
    e.k = (int)width;
    e.steps = (e.k + 15) / 16;
    e.by_horizon = ps_divisor_make(horizon);
    e.by_vectors = horizon % 8 == 0 && ps_cuda_aligned(&a->weight);
    const struct ps_cuda_context *c = ps_cuda(k);
    return horizon <= 16   ? launch_head<T, 1>(c, op, &e)
           : horizon <= 32 ? launch_head<T, 2>(c, op, &e)
           : horizon <= 48 ? launch_head<T, 3>(c, op, &e)
                           : launch_head<T, 6>(c, op, &e);
}

extern "C" enum ps_status ps_cuda_head_step(const struct ps_kernels *k, const struct ps_head_step *a)
{
    return k->real == PS_F16 ? step<ps_fp16>(k, a) : step<ps_bf16>(k, a);
}

/* ---- window_loss ---- */

/* A block 16 sequences, a warp two of them. Shared memory: sums [warps][horizon]. */
template <typename T> static __global__ void __launch_bounds__(block) loss_block(const __grid_constant__ struct ps_cuda_loss<T> l)
{
    extern __shared__ float sums[];
    __shared__ double squares[warps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first = (int64_t)blockIdx.x * group + 2 * warp;
    ps_grid_begin();
    const float *window[2];
    bool inside[2], there[2];
    float mean[2], std[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        inside[r] = first + r < l.sequences;
        const int64_t s = inside[r] ? first + r : 0, b = (int64_t)ps_divide((uint32_t)s, l.by_channels);
        const float *begin = ps_window_of(l.windows, l.state, b);
        there[r] = begin;
        window[r] = (begin ? begin : l.windows.data) + (s - b * l.channels) * l.windows.by_channel;
        mean[r] = l.mean[s];
        std[r] = l.std[s];
    }
    double square = 0.0;
    constexpr int flight = 3; /* columns whose loads are under way at once: no branch stands between them */
    for (int begin = lane; begin < l.horizon; begin += 32 * flight) {
        float x[flight][2], target[flight][2], bias[flight];
#pragma unroll
        for (int j = 0; j < flight; j++) {
            const int t = begin + 32 * j < l.horizon ? begin + 32 * j : 0;
            bias[j] = l.bias[t];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                x[j][r] = l.x[(inside[r] ? first + r : 0) * l.horizon + t];
                target[j][r] = window[r][t * l.windows.by_time];
            }
        }
#pragma unroll
        for (int j = 0; j < flight; j++) {
            const int t = begin + 32 * j;
            if (t < l.horizon) {
                float sum = 0.0f;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (inside[r]) {
                        const float error = (x[j][r] + bias[j]) * std[r] + mean[r] - (there[r] ? target[j][r] : NAN);
                        const float slope = l.scale * std[r] * error;
                        ps_put(l.dx + (first + r) * l.horizon + t, slope);
                        sum += slope;
                        square += (double)error * error;
                    }
                }
                sums[warp * l.horizon + t] = sum;
            }
        }
    }
    square = ps_block_sum<block>(square, squares);
    double *partials = l.partials + blockIdx.x * (int64_t)(l.horizon + 1);
    for (int t = threadIdx.x; t < l.horizon; t += block) {
        double total = 0.0;
#pragma unroll
        for (int w = 0; w < warps; w++) {
            total += sums[w * l.horizon + t];
        }
        partials[t] = total;
    }
    if (threadIdx.x == 0) {
        partials[l.horizon] = square;
    }
}

template <typename T> static enum ps_status window_loss(const struct ps_kernels *k, const struct ps_window_loss *a)
{
    const char *op = "window_loss";
    ps_cuda_loss<T> l = {};
    PS_TRY(loss_make(op, &a->dx, &a->partials, &a->bias, &a->mean, &a->std, &a->targets, &a->indices, a->state, a->batch,
                     a->gradient_scale, &l));
    PS_TRY(ps_cuda_expect(op, "x", &a->x, PS_F32, l.sequences * l.horizon));
    if (l.sequences == 0) {
        return PS_OK;
    }
    l.x = (const float *)a->x.data;
    ps_cuda_launch(ps_cuda(k), loss_block<T>, ps_cuda_blocks(l.sequences, group), block,
                   (size_t)(warps * l.horizon) * sizeof(float), l);
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_window_loss(const struct ps_kernels *k, const struct ps_window_loss *a)
{
    return PS_BY_REAL(k, window_loss, k, a);
}

/* ---- head_sums ---- */

/* 8 columns a block, 8 threads down the rows: so few that a block shares a multiprocessor with one of the encoder's. */
enum { SUM_THREADS = 64 };
static __global__ void __launch_bounds__(SUM_THREADS) add_head(float *d_bias, struct ps_step_state *state, const double *partials,
                                                               int64_t rows, int horizon, double scale, int64_t batch)
{
    __shared__ double shared[SUM_THREADS / 32][8];
    const int column = (int)blockIdx.x * 8 + threadIdx.x % 8;
    ps_grid_begin();
    const bool live = column <= horizon;
    const double total = ps_column_sum<SUM_THREADS>(partials, rows, horizon + 1, column, live, shared);
    if (threadIdx.x < 8 && live) {
        if (column < horizon) {
            d_bias[column] = (float)(d_bias[column] + total);
        } else if (isfinite(scale * total)) {
            state->loss_sum += scale * total;
        } else if (state->nonfinite == 0) {
            state->lost += (uint64_t)batch;
        }
    }
}

extern "C" enum ps_status ps_cuda_head_sums(const struct ps_kernels *k, const struct ps_head_sums *a)
{
    const char *op = "head_sums";
    const int64_t horizon = ps_tensor_count(&a->d_bias), rows = a->partials.rank > 0 ? a->partials.size[0] : 0;
    PS_TRY(ps_cuda_expect(op, "d_bias", &a->d_bias, PS_F32, horizon));
    PS_TRY(ps_cuda_expect(op, "partials", &a->partials, PS_F64, rows * (horizon + 1)));
    if (!a->state || a->sequences < 1 || horizon > INT32_MAX / 2) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld sequences of %lld %s the step's state", op, (long long)a->sequences,
                       (long long)horizon, a->state ? "with" : "without");
    }
    ps_cuda_launch(ps_cuda(k), add_head, ps_cuda_blocks(horizon + 1, 8), SUM_THREADS, 0, (float *)a->d_bias.data, a->state,
                   (const double *)a->partials.data, rows, (int)horizon,
                   (double)a->batch / ((double)a->sequences * (double)horizon), a->batch);
    PS_CUDA_LAUNCHED(op);
}
