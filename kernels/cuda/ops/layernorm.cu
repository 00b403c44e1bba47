/* LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019), forward and backward.
 *
 * Why: the rows are short (16 to 1024) and many, so a row is held in the registers of 4 to 32 neighbouring lanes, read once, and
 * its two statistics are sums over those lanes. The variance is that of the differences from the mean, never E[x^2] - E[x]^2.
 *
 * Forward: y, mean, rstd =. Bytes: 8 R d. Flops: 8 R d.
 * Backward: dx =; dgamma, dbeta +=. Bytes: 12 R d, 4 R d more of an addend and of masked, and 8 d (12 d with dbias) for each
 * block's partial rows (L2). Flops: 14 R d. In 16 bits half the bytes of rows; gamma, beta, statistics and sums are fp32, and
 * instructions bound it nearly as much as memory: 166 for a warp's 256 elements, 266 masked. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 256;

/* A row in LANES lanes: lane l holds VEC elements at (item * LANES + l) * VEC. */
template <typename T, int LANES, int VEC, int ITEMS, bool CENTRED>
static __global__ void __launch_bounds__(block)
    layernorm_rows(T *__restrict__ y, float *__restrict__ mean, float *__restrict__ rstd, const T *__restrict__ x,
                   const float *__restrict__ gamma, const float *__restrict__ beta, int64_t rows, int d, float epsilon)
{
    ps_grid_begin();
    const int lane = threadIdx.x % LANES;
    const int64_t row = (int64_t)blockIdx.x * (block / LANES) + threadIdx.x / LANES;
    const bool live = row < rows;
    float v[ITEMS * VEC];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int column = (i * LANES + lane) * VEC;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            v[i * VEC + j] = 0.0f;
        }
        if (live && column < d) {
            ps_load<VEC>(v + i * VEC, x + row * d + column);
        }
    }
    float mu = 0.0f;
    if constexpr (CENTRED) {
#pragma unroll
        for (int i = 0; i < ITEMS * VEC; i++) {
            sum += v[i];
        }
        mu = ps_group_sum<LANES>(sum) / (float)d;
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if ((i * LANES + lane) * VEC < d) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const float difference = v[i * VEC + j] - mu;
                squares += difference * difference;
            }
        }
    }
    const float rs = rsqrtf(ps_group_sum<LANES>(squares) / (float)d + epsilon);
    if (!live) {
        return;
    }
    if (lane == 0) {
        if constexpr (CENTRED) {
            mean[row] = mu;
        }
        rstd[row] = rs;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int column = (i * LANES + lane) * VEC;
        if (column < d) {
            float g[VEC], b[VEC], out[VEC];
            ps_load<VEC>(g, gamma + column);
            if constexpr (CENTRED) {
                ps_load<VEC>(b, beta + column);
            }
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                out[j] = CENTRED ? (v[i * VEC + j] - mu) * rs * g[j] + b[j] : v[i * VEC + j] * rs * g[j];
            }
            ps_store<VEC>(y + row * d + column, out);
        }
    }
}

/* Any d: a block a row, which it reads three times (twice from the caches). */
template <typename T, bool CENTRED>
static __global__ void __launch_bounds__(block)
    layernorm_long_rows(T *__restrict__ y, float *__restrict__ mean, float *__restrict__ rstd, const T *__restrict__ x,
                        const float *__restrict__ gamma, const float *__restrict__ beta, int d, float epsilon)
{
    ps_grid_begin();
    __shared__ float shared[block / 32];
    const int64_t row = blockIdx.x;
    const T *in = x + row * d;
    float sum = 0.0f, squares = 0.0f;
    float mu = 0.0f;
    if constexpr (CENTRED) {
        for (int i = threadIdx.x; i < d; i += block) {
            sum += ps_float(in[i]);
        }
        mu = ps_block_sum<block>(sum, shared) / (float)d;
    }
    for (int i = threadIdx.x; i < d; i += block) {
        const float difference = ps_float(in[i]) - mu;
        squares += difference * difference;
    }
    const float rs = rsqrtf(ps_block_sum<block>(squares, shared) / (float)d + epsilon);
    if (threadIdx.x == 0) {
        if constexpr (CENTRED) {
            mean[row] = mu;
        }
        rstd[row] = rs;
    }
    for (int i = threadIdx.x; i < d; i += block) {
        ps_put(y + row * d + i, (ps_float(in[i]) - mu) * rs * gamma[i] + (CENTRED ? beta[i] : 0.0f));
    }
}

template <typename T, bool CENTRED, int LANES, int VEC, int ITEMS>
static void launch_rows(const struct ps_cuda_context *c, const struct ps_layernorm *a, int64_t rows, int d)
{
    ps_cuda_launch(c, layernorm_rows<T, LANES, VEC, ITEMS, CENTRED>, ps_cuda_blocks(rows, block / LANES), block, 0, (T *)a->y.data,
                   (float *)a->mean.data, (float *)a->rstd.data, (const T *)a->x.data, (const float *)a->gamma.data,
                   (const float *)a->beta.data, rows, d, (float)a->epsilon);
}

template <typename T, bool CENTRED> static enum ps_status layernorm_of(const struct ps_kernels *k, const struct ps_layernorm *a)
{
    const char *op = "layernorm";
    const struct ps_cuda_context *c = ps_cuda(k);
    const int64_t d = ps_cuda_width(&a->gamma), count = ps_tensor_count(&a->x), rows = d > 0 ? count / d : 0;
    PS_TRY(ps_cuda_expect(op, "x", &a->x, ps_type_of<T>, rows * d));
    PS_TRY(ps_cuda_expect(op, "y", &a->y, ps_type_of<T>, rows * d));
    PS_TRY(CENTRED ? ps_cuda_expect(op, "mean", &a->mean, PS_F32, rows) : PS_OK);
    PS_TRY(ps_cuda_expect(op, "rstd", &a->rstd, PS_F32, rows));
    PS_TRY(ps_cuda_expect(op, "gamma", &a->gamma, PS_F32, d));
    PS_TRY(CENTRED ? ps_cuda_expect(op, "beta", &a->beta, PS_F32, d) : PS_OK);
    if (rows == 0) {
        return PS_OK;
    }
    const bool vector = d % ps_vector<T> == 0 && ps_cuda_aligned(&a->x) && ps_cuda_aligned(&a->y) && ps_cuda_aligned(&a->gamma) &&
                        ps_cuda_aligned(&a->beta);
    const int n = (int)d;
    if (d > 1024) {
        ps_cuda_launch(c, layernorm_long_rows<T, CENTRED>, (unsigned)rows, block, 0, (T *)a->y.data, (float *)a->mean.data,
                       (float *)a->rstd.data, (const T *)a->x.data, (const float *)a->gamma.data, (const float *)a->beta.data, n,
                       (float)a->epsilon);
    } else if (!vector) {
        if (d <= 32) {
            launch_rows<T, CENTRED, 8, 1, 4>(c, a, rows, n);
        } else if (d <= 128) {
            launch_rows<T, CENTRED, 32, 1, 4>(c, a, rows, n);
        } else {
            launch_rows<T, CENTRED, 32, 1, 32>(c, a, rows, n);
        }
    } else if constexpr (ps_vector<T> == 8) {
        if (d <= 16) {
            launch_rows<T, CENTRED, 2, 8, 1>(c, a, rows, n);
        } else if (d <= 32) {
            launch_rows<T, CENTRED, 4, 8, 1>(c, a, rows, n);
        } else if (d <= 64) {
            launch_rows<T, CENTRED, 8, 8, 1>(c, a, rows, n);
        } else if (d <= 128) {
            launch_rows<T, CENTRED, 8, 8, 2>(c, a, rows, n);
        } else if (d <= 256) {
            launch_rows<T, CENTRED, 16, 8, 2>(c, a, rows, n);
        } else if (d <= 512) {
            launch_rows<T, CENTRED, 32, 8, 2>(c, a, rows, n);
        } else {
            launch_rows<T, CENTRED, 32, 8, 4>(c, a, rows, n);
        }
    } else if (d <= 16) {
        launch_rows<T, CENTRED, 4, 4, 1>(c, a, rows, n);
    } else if (d <= 32) {
        launch_rows<T, CENTRED, 8, 4, 1>(c, a, rows, n);
    } else if (d <= 64) {
        launch_rows<T, CENTRED, 8, 4, 2>(c, a, rows, n);
    } else if (d <= 128) {
        launch_rows<T, CENTRED, 8, 4, 4>(c, a, rows, n);
    } else if (d <= 256) {
        launch_rows<T, CENTRED, 16, 4, 4>(c, a, rows, n);
    } else if (d <= 512) {
        launch_rows<T, CENTRED, 32, 4, 4>(c, a, rows, n);
    } else {
        launch_rows<T, CENTRED, 32, 4, 8>(c, a, rows, n);
    }
    PS_CUDA_LAUNCHED(op);
}

template <typename T> static enum ps_status layernorm(const struct ps_kernels *k, const struct ps_layernorm *a)
{
    return a->mean.data || a->beta.data ? layernorm_of<T, true>(k, a) : layernorm_of<T, false>(k, a);
}

extern "C" enum ps_status ps_cuda_layernorm(const struct ps_kernels *k, const struct ps_layernorm *a)
{
    return PS_BY_REAL(k, layernorm, k, a);
}

/* Blocks a multiprocessor holds, by elements a lane (its registers): of eight columns at a time fewer, whose rows come ahead. */
static constexpr int resident(int vec, int items)
{
    return vec * items <= 8 ? (vec == 8 ? 3 : 4) : vec * items <= 16 ? 2 : 1;
}

/* The block's sum of v over its groups of lanes, by column, to out [d]. */
template <int LANES, int VEC, int ITEMS>
static __device__ __forceinline__ void sum_groups(float *out, float (&v)[ITEMS * VEC], float (*shared)[LANES * ITEMS * VEC], int d)
{
    __syncthreads(); /* the memory may have been another's */
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < ITEMS * VEC; i++) {
        v[i] = ps_across_sum<LANES>(v[i]);
        if (threadIdx.x % 32 < LANES) {
            shared[threadIdx.x / 32][(i / VEC * LANES + lane) * VEC + i % VEC] = v[i];
        }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < d; column += block) {
        float sum = shared[0][column];
#pragma unroll
        for (int warp = 1; warp < block / 32; warp++) {
            sum += shared[warp][column];
        }
        out[column] = sum;
    }
}

/* What the backward is told. dx may be dy or addend; addend and masked may be NULL. partials [blocks, 2 d]: a block's dgamma, then
 * its dbeta; of RMSNorm [blocks, d]; bias_partials [blocks, d]: of dbias. */
template <typename T> struct backward_rows {
    T *dx, *masked;
    float *partials, *bias_partials;
    const T *dy, *x, *addend;
    const float *mean, *rstd, *gamma;
    int64_t rows;
    int d, turns; /* the most rows of a group of lanes */
    struct ps_dropout dropout;
};

/* Rows of 16 bits come ahead: a lane has those of so many rows less one on their way while it works on one, in shared memory of its
 * own, since the arithmetic of a row takes as long as its way from memory. */
template <int VEC, int ITEMS> static constexpr int rows_ahead = VEC == 8 ? (ITEMS <= 2 ? 3 : 2) : 0;

/* Shared memory: those rows [rows, dy x addend, ITEMS, block] of 16 bytes, then sums [warps, LANES width]. */
template <int LANES, int VEC, int ITEMS> static constexpr int shared_bytes()
{
    constexpr int ahead = rows_ahead<VEC, ITEMS> * 3 * ITEMS * block * 16, sums = block / 32 * LANES * VEC * ITEMS * 4;
    return ahead > sums ? ahead : sums;
}

/* Neighbouring lanes have a row at a time. What does not depend on the row is out of the loop, whose instructions bound it; in it
 * lanes beyond d and rows beyond the last are zeros, and only stores ask whether they are there. */
template <typename T, int LANES, int VEC, int ITEMS, bool CENTRED, bool MASKED>
static __global__ void __launch_bounds__(block, resident(VEC, ITEMS)) layernorm_backward_rows(const struct backward_rows<T> a)
{
    ps_grid_begin();
    constexpr int width = ITEMS * VEC, groups = block / LANES, apart = LANES * VEC; /* columns from one item to the next */
    constexpr int ahead = rows_ahead<VEC, ITEMS>, line = block * 16, slot = 3 * ITEMS * line; /* bytes of the ring */
    extern __shared__ float4 shared_memory[];
    uint8_t *const memory = (uint8_t *)shared_memory;
    const uint32_t ring = threadIdx.x * 16, end = ring + ahead * slot;
    const int lane = threadIdx.x % LANES, d = a.d;
    const float share = 1.0f / (float)d;
    float g[width], sum_gamma[width], sum_beta[width], sum_bias[MASKED ? width : 1];
    bool column[ITEMS]; /* is there, where the first one is */
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        column[i] = i == 0 || lane * VEC + i * apart < d;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            g[i * VEC + j] = sum_gamma[i * VEC + j] = sum_beta[i * VEC + j] = sum_bias[MASKED ? i * VEC + j : 0] = 0.0f;
        }
        if (lane * VEC + i * apart < d) {
            ps_load<VEC>(g + i * VEC, a.gamma + lane * VEC + i * apart);
        }
    }
    const bool dropped = MASKED && a.dropout.threshold;
    const uint64_t step = dropped ? a.dropout.state->step : 0;
    const float scale = dropped ? a.dropout.scale : 1.0f;
    /* Without dropout those that keep all. */
    uint32_t below = dropped ? ps_below(a.dropout.threshold) : ~0u;
    uint32_t minus_below = dropped ? ps_minus_below(a.dropout.threshold) : 0x20002u;
    const int64_t stride = (int64_t)gridDim.x * groups; /* rows to the next one, and elements: */
    int64_t further = stride * d;
    asm volatile("" : "+r"(below), "+r"(minus_below), "+l"(further)); /* made here, not at each row */
    const int64_t begin = (int64_t)blockIdx.x * groups, row = begin + threadIdx.x / LANES;
    const int64_t last = (a.turns - 1) * stride;
    const int turns = begin + last < a.rows ? a.turns : a.turns - 1;              /* of a block, whose warps stay together */
    int left = lane * VEC >= d ? 0 : row + last < a.rows ? a.turns : a.turns - 1; /* rows of this lane */
    /* A row's piece of this lane, on its way to a slot of the ring. */
    const auto ask = [&](bool there, int64_t at, uint32_t to) {
        if constexpr (ahead > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const int bytes = there && column[i] ? 16 : 0;
                uint8_t *const place = memory + to + i * line;
                ps_copy_async_part(place, (const uint8_t *)(a.dy + at + i * apart), bytes);
                ps_copy_async_part(place + ITEMS * line, (const uint8_t *)(a.x + at + i * apart), bytes);
                if (a.addend) {
                    ps_copy_async_part(place + 2 * ITEMS * line, (const uint8_t *)(a.addend + at + i * apart), bytes);
                }
            }
            ps_copy_commit();
        }
    };
    int64_t at = row * d + lane * VEC;
    uint32_t drawn = (uint32_t)(at / VEC), from = ring, asked = end - slot;
    for (int i = 0; i < ahead; i++) {
        for (int item = 0; item < ITEMS && !a.addend; item++) {
            *(uint4 *)(memory + ring + i * slot + (2 * ITEMS + item) * line) = make_uint4(0, 0, 0, 0);
        }
        if (i + 1 < ahead) {
            ask(left > i, at + i * further, ring + i * slot);
        }
    }
    const float *mean = a.mean + row, *rstd = a.rstd + row;
    float mu = CENTRED && left > 0 ? *mean : 0.0f, rs = left > 0 ? *rstd : 0.0f;
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
        mean += stride;
        rstd += stride;
        const float next_mu = CENTRED && left > 1 ? *mean : 0.0f, next_rs = left > 1 ? *rstd : 0.0f;
        if constexpr (ahead > 0) {
            ask(left > ahead - 1, at + (ahead - 1) * further, asked);
            ps_copy_wait_group<ahead - 1>();
        }
        /* The lane's i-th piece of the row of dy, x or addend. */
        const auto load = [&](float(&to)[VEC], int which, const T *tensor, int i) {
            if constexpr (ahead > 0) {
                ps_load<VEC>(to, (const T *)(memory + from + (which * ITEMS + i) * line));
            } else {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    to[j] = 0.0f;
                }
                if (tensor && left > 0 && column[i]) {
                    ps_load<VEC>(to, tensor + at + i * apart);
                }
            }
        };
        float up[width], xhat[width], sum, product;
        const float shift = -mu * rs;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            float dy[VEC], x[VEC], of_sum, of_product; /* short chains */
            load(dy, 0, a.dy, i);
            load(x, 1, a.x, i);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const int k = i * VEC + j;
                xhat[k] = CENTRED ? fmaf(x[j], rs, shift) : x[j] * rs;
                sum_beta[k] += dy[j];
                sum_gamma[k] = fmaf(dy[j], xhat[k], sum_gamma[k]);
                up[k] = dy[j] * g[k];
                of_sum = j ? of_sum + up[k] : up[k];
                of_product = j ? fmaf(up[k], xhat[k], of_product) : up[k] * xhat[k];
            }
            sum = i ? sum + of_sum : of_sum;
            product = i ? product + of_product : of_product;
        }
        const float slope = -rs * share * ps_group_sum<LANES>(product);
        const float level = CENTRED ? -rs * share * ps_group_sum<LANES>(sum) : 0.0f;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const bool here = left > 0 && column[i];
            float out[VEC];
            load(out, 2, a.addend, i);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const int k = i * VEC + j;
                out[j] += fmaf(up[k], rs, CENTRED ? fmaf(xhat[k], slope, level) : xhat[k] * slope);
            }
            if constexpr (VEC < 8) {
                if (here) {
                    ps_store<VEC>(a.dx + at + i * apart, out);
                }
            } else {
                uint4 words = make_uint4(ps_pack<T>(out), ps_pack<T>(out + 2), ps_pack<T>(out + 4), ps_pack<T>(out + 6));
                if (here) {
                    *(uint4 *)(a.dx + at + i * apart) = words;
                }
                if constexpr (MASKED) { /* of dx as it is stored; beyond d nobody reads what is summed */
                    const struct ps_block draws = ps_draws(a.dropout, step, drawn + i * LANES);
                    uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float *const sums = sum_bias + i * VEC + 2 * j, pair[2];
                        ps_unpack<T>(pair, each[j]);
                        pair[0] *= scale;
                        pair[1] *= scale;
                        each[j] = ps_pack<T>(pair);
                        each[j] &= ps_kept2(draws.word[j], below, minus_below) * 0xffffu;
                        ps_unpack<T>(pair, each[j]);
                        sums[0] += pair[0];
                        sums[1] += pair[1];
                    }
                    if (here) {
                        *(uint4 *)(a.masked + at + i * apart) = make_uint4(each[0], each[1], each[2], each[3]);
                    }
                }
            }
        }
        at += further;
        drawn += (uint32_t)(further / VEC);
        left--;
        asked = from;
        from = from + slot == end ? ring : from + slot;
        mu = next_mu;
        rs = next_rs;
    }
    float(*const shared)[LANES * width] = (float(*)[LANES * width]) shared_memory;
    ps_copy_wait();
    float *out = a.partials + (int64_t)blockIdx.x * (CENTRED ? 2 : 1) * d;
    sum_groups<LANES, VEC, ITEMS>(out, sum_gamma, shared, d);
    if constexpr (CENTRED) {
        sum_groups<LANES, VEC, ITEMS>(out + d, sum_beta, shared, d);
    }
    if constexpr (MASKED) {
        sum_groups<LANES, VEC, ITEMS>(a.bias_partials + (int64_t)blockIdx.x * d, sum_bias, shared, d);
    }
}

/* Any d: a block a row at a time; its sums grow in its own partial row, a column always by the same thread. */
template <typename T, bool CENTRED>
static __global__ void __launch_bounds__(block)
    layernorm_backward_long_rows(T *dx, float *__restrict__ partials, const T *dy, const T *__restrict__ x,
                                 const float *__restrict__ mean, const float *__restrict__ rstd, const float *__restrict__ gamma,
                                 const T *addend, int64_t rows, int d)
{
    ps_grid_begin();
    __shared__ float shared[block / 32];
    float *out = partials + (int64_t)blockIdx.x * (CENTRED ? 2 : 1) * d;
    for (int i = threadIdx.x; i < d; i += block) {
        out[i] = out[CENTRED ? d + i : i] = 0.0f;
    }
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const float mu = CENTRED ? mean[row] : 0.0f, rs = rstd[row];
        float sum = 0.0f, product = 0.0f;
        for (int i = threadIdx.x; i < d; i += block) {
            const float up = ps_float(dy[row * d + i]), xhat = (ps_float(x[row * d + i]) - mu) * rs;
            out[i] += up * xhat;
            if constexpr (CENTRED) {
                out[d + i] += up;
            }
            sum += up * gamma[i];
            product += up * gamma[i] * xhat;
        }
        sum = CENTRED ? ps_block_sum<block>(sum, shared) / (float)d : 0.0f;
        product = ps_block_sum<block>(product, shared) / (float)d;
        for (int i = threadIdx.x; i < d; i += block) {
            const float xhat = (ps_float(x[row * d + i]) - mu) * rs;
            const float old = addend ? ps_float(addend[row * d + i]) : 0.0f;
            ps_put(dx + row * d + i, old + rs * (ps_float(dy[row * d + i]) * gamma[i] - sum - xhat * product));
        }
    }
}

/* Returns the number of blocks: as many as the device holds at once, fewer when there are fewer rows. */
template <typename T, bool CENTRED, int LANES, int VEC, int ITEMS>
static unsigned launch_backward(const struct ps_cuda_context *c, struct backward_rows<T> a)
{
    const unsigned most = (unsigned)(c->multiprocessors * resident(VEC, ITEMS));
    unsigned blocks = ps_cuda_blocks(a.rows, block / LANES);
    blocks = blocks < most ? blocks : most;
    a.turns = (int)((a.rows + (int64_t)blocks * (block / LANES) - 1) / ((int64_t)blocks * (block / LANES)));
    constexpr int shared = shared_bytes<LANES, VEC, ITEMS>();
    auto kernel = layernorm_backward_rows<T, LANES, VEC, ITEMS, CENTRED, false>;
    if constexpr (VEC == 8) {
        kernel = a.masked ? layernorm_backward_rows<T, LANES, VEC, ITEMS, CENTRED, true> : kernel;
    }
    if (shared > 48 << 10) { /* an error is the launch's too */
        (void)ps_cuda_allow_shared((const void *)kernel, shared, "layernorm_backward");
    }
    ps_cuda_launch(c, kernel, blocks, block, shared, a);
    return blocks;
}

template <typename T, bool CENTRED>
static enum ps_status backward_of(const struct ps_kernels *k, const struct ps_layernorm_backward *a)
{
    const char *op = "layernorm_backward";
    const struct ps_cuda_context *c = ps_cuda(k);
    const int64_t d = ps_cuda_width(&a->gamma), count = ps_tensor_count(&a->x), rows = d > 0 ? count / d : 0;
    PS_TRY(ps_cuda_expect(op, "x", &a->x, ps_type_of<T>, rows * d));
    PS_TRY(ps_cuda_expect(op, "dx", &a->dx, ps_type_of<T>, rows * d));
    PS_TRY(ps_cuda_expect(op, "dy", &a->dy, ps_type_of<T>, rows * d));
    PS_TRY(CENTRED ? ps_cuda_expect(op, "mean", &a->mean, PS_F32, rows) : PS_OK);
    PS_TRY(ps_cuda_expect(op, "rstd", &a->rstd, PS_F32, rows));
    PS_TRY(ps_cuda_expect(op, "gamma", &a->gamma, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "dgamma", &a->dgamma, PS_F32, d));
    PS_TRY(CENTRED ? ps_cuda_expect(op, "dbeta", &a->dbeta, PS_F32, d) : PS_OK);
    PS_TRY(a->addend.data ? ps_cuda_expect(op, "addend", &a->addend, ps_type_of<T>, rows * d) : PS_OK);
    if (a->masked.data) {
        PS_TRY(ps_cuda_expect(op, "masked", &a->masked, ps_type_of<T>, rows * d));
        PS_TRY(ps_cuda_expect(op, "dbias", &a->dbias, PS_F32, d));
    }
    if (rows == 0) {
        return PS_OK;
    }
    const bool vector = d % ps_vector<T> == 0 && ps_cuda_aligned(&a->x) && ps_cuda_aligned(&a->dx) && ps_cuda_aligned(&a->dy) &&
                        ps_cuda_aligned(&a->gamma) && ps_cuda_aligned(&a->addend) && ps_cuda_aligned(&a->masked);
    const int n = (int)d;
    const int64_t most = c->multiprocessors * (d <= 1024 ? 4 : 1); /* blocks */
    float *partials;
    PS_TRY(ps_cuda_partials(c, op, (size_t)(most * 3 * d), &partials));
    const bool masked_here = a->masked.data && vector && ps_vector<T> == 8 && d <= 1024;
    struct backward_rows<T> x = {
    };
    x.dx = (T *)a->dx.data;
    x.masked = masked_here ? (T *)a->masked.data : NULL;
    x.partials = partials;
    x.bias_partials = x.partials + most * 2 * d;
    x.dy = (const T *)a->dy.data;
    x.x = (const T *)a->x.data;
    x.addend = (const T *)a->addend.data;
    x.mean = (const float *)a->mean.data;
    x.rstd = (const float *)a->rstd.data;
    x.gamma = (const float *)a->gamma.data;
    x.rows = rows;
    x.d = n;
    x.dropout = a->dropout;
    unsigned blocks;
    if (d > 1024) {
        blocks = rows < c->multiprocessors ? (unsigned)rows : (unsigned)c->multiprocessors;
        ps_cuda_launch(c, layernorm_backward_long_rows<T, CENTRED>, blocks, block, 0, (T *)a->dx.data, partials,
                       (const T *)a->dy.data, (const T *)a->x.data, (const float *)a->mean.data, (const float *)a->rstd.data,
                       (const float *)a->gamma.data, (const T *)a->addend.data, rows, n);
    } else if (!vector) {
        if (d <= 32) {
            blocks = launch_backward<T, CENTRED, 8, 1, 4>(c, x);
        } else if (d <= 128) {
            blocks = launch_backward<T, CENTRED, 32, 1, 4>(c, x);
        } else {
            blocks = launch_backward<T, CENTRED, 32, 1, 32>(c, x);
        }
    } else if constexpr (ps_vector<T> == 8) {
        if (d <= 16) {
            blocks = launch_backward<T, CENTRED, 2, 8, 1>(c, x);
        } else if (d <= 32) {
            blocks = launch_backward<T, CENTRED, 4, 8, 1>(c, x);
        } else if (d <= 64) {
            blocks = launch_backward<T, CENTRED, 8, 8, 1>(c, x);
        } else if (d <= 96) {
            blocks = launch_backward<T, CENTRED, 4, 8, 3>(c, x);
        } else if (d <= 128) {
            blocks = launch_backward<T, CENTRED, 16, 8, 1>(c, x);
        } else if (d <= 192) {
            blocks = launch_backward<T, CENTRED, 8, 8, 3>(c, x);
        } else if (d <= 256) {
            blocks = launch_backward<T, CENTRED, 32, 8, 1>(c, x);
        } else if (d <= 384) {
            blocks = launch_backward<T, CENTRED, 16, 8, 3>(c, x);
        } else if (d <= 512) {
            blocks = launch_backward<T, CENTRED, 32, 8, 2>(c, x);
        } else {
            blocks = launch_backward<T, CENTRED, 32, 8, 4>(c, x);
        }
    } else if (d <= 16) {
        blocks = launch_backward<T, CENTRED, 4, 4, 1>(c, x);
    } else if (d <= 32) {
        blocks = launch_backward<T, CENTRED, 8, 4, 1>(c, x);
    } else if (d <= 64) {
        blocks = launch_backward<T, CENTRED, 16, 4, 1>(c, x);
    } else if (d <= 128) {
        blocks = launch_backward<T, CENTRED, 16, 4, 2>(c, x);
    } else if (d <= 256) {
        blocks = launch_backward<T, CENTRED, 32, 4, 2>(c, x);
    } else if (d <= 512) {
        blocks = launch_backward<T, CENTRED, 32, 4, 4>(c, x);
    } else {
        blocks = launch_backward<T, CENTRED, 32, 4, 8>(c, x);
    }
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    const struct ps_cuda_columns jobs[] = {
        {(float *)a->dgamma.data, (float *)a->dbeta.data, d, x.partials, blocks, (CENTRED ? 2 : 1) * d},
        {(float *)a->dbias.data, NULL, d, x.bias_partials, blocks, d}};
    PS_TRY(ps_cuda_add_columns(c, op, jobs, masked_here ? 2 : 1));
    const struct ps_bias_grad rest = {a->dbias, a->masked, a->dx, a->dropout};
    return a->masked.data && !masked_here ? ps_cuda_bias_grad(k, &rest) : PS_OK;
}

template <typename T> static enum ps_status layernorm_backward(const struct ps_kernels *k, const struct ps_layernorm_backward *a)
{
    return a->mean.data || a->dbeta.data ? backward_of<T, true>(k, a) : backward_of<T, false>(k, a);
}

extern "C" enum ps_status ps_cuda_layernorm_backward(const struct ps_kernels *k, const struct ps_layernorm_backward *a)
{
    return PS_BY_REAL(k, layernorm_backward, k, a);
}
