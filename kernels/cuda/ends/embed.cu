/* The embedding in 16 bits as one kernel forward and two backward: what gather_patches, a product and bias_position_add, and two
 * bias_grad and a product, do in three and six.
 *
 * Forward: a block takes up to 8 neighbouring sequences (of a window's channels one sector of 32 bytes for each time), fewer where
 * there are few. A warp a sequence takes mean and deviation and leaves it normalised in 16 bits, whose patches, overlapping in
 * shared memory where they do in the window, are the operands of mma.m16n8k16. W_P stays in registers, its columns exchanged so
 * that a thread has 8 neighbouring ones of a row: a whole Philox block and 16 bytes. W_pos + b_P lie in shared memory. u, patches,
 * mean, std =. Bytes: 4 S L + 2 R P + 2 R d, and from L2 4 N d a block. Flops: 2 R P d. Weather: 9.1 M instructions of warps, 17.8
 * us alone; of a block of 7's 12 us 2 pass until its windows are there, 2 with statistics, 1 with patches, 7 with products and
 * draws.
 *
 * Backward: a block takes one patch n of a share of the sequences, a warp 32 columns of 32 sequences at once: it draws their mask
 * while they are on their way, and transposes them through shared memory of its own, so that the tensor cores sum du' patches for
 * W_P, and du' times ones for W_pos and b_P. Partial sums a block, added in a fixed order by ops/reduce.cu. d_weight, d_bias,
 * d_position +=. Bytes: 2 R d + 2 R P (d / 32 times from L2), and the partial sums, which stay in L2. Flops: 2 R P d. Weather: 9.1
 * M instructions of warps, a third of them Philox, 20 us alone. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/windows.cuh"

static const int sequences_at_once = 8;

/* The most elements, at most 8, that patches lie in whole. */
static int unit_of(int patch)
{
    return patch % 8 == 0 ? 8 : patch % 4 == 0 ? 4 : patch % 2 == 0 ? 2 : 1;
}

/* The words of a Philox block as masks of pairs of 16 bits: all ones where the draw is kept. threshold > 0. */
static __device__ __forceinline__ void masks_of(struct ps_block &block, uint32_t threshold)
{
    const uint32_t below = ps_below(threshold), minus_below = ps_minus_below(threshold);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        block.word[j] = ps_kept2(block.word[j], below, minus_below) * 0xffffu;
    }
}

/* ---- forward ---- */

static const int embed_threads = 256, embed_warps = embed_threads / 32;

template <typename T> struct embedding {
    T *u, *patches;
    float *mean, *std;
    const T *weight;
    const float *bias, *position;
    struct ps_cuda_windows windows;
    const struct ps_step_state *state;
    int sequences, channels, length, patch, stride, count /* N */, d;
    int tile /* sequences a block */, pitch /* floats of a sequence in shared memory */, groups /* of 32 columns */;
    int spans, down;        /* warps' columns; warps that share the rows of one */
    bool overlapping;       /* patches of a sequence lie in shared memory as in the window, else one after another */
    int row_pitch, z_pitch; /* from a patch to the next, and from a sequence */
    int revin;
    float epsilon;
    int unit; /* elements that patches lie in whole, at most 8 */
    struct ps_divisor by_channels, by_count, by_pieces /* units of a patch */;
    struct ps_dropout dropout;
};

/* 16 STEPS >= P; SPAN groups of 32 columns are a warp's, the last of which may be empty. Of a group, column 8 q + 2 j + i is column
 * 2 q + i of tile j of the product, so that lane q of a row has 8 neighbouring columns: a block of draws, and 16 bytes. */
template <int STEPS, int SPAN> struct embed_shape {
    static constexpr int span = SPAN, depth = 16 * STEPS, blocks = STEPS > 2 ? 2 : 3 /* a multiprocessor */;
    static __host__ __device__ int table_pitch(int groups)
    {
        return 32 * groups + 4;
    }
    static __host__ __device__ int weight_pitch(int groups)
    {
        return 32 * groups + 8;
    }
    /* W_pos + b_P [N][pitch], values [tile][pitch], W_P [depth][pitch], patches [tile][z_pitch] */
    template <typename T> static size_t bytes(const struct embedding<T> *e)
    {
        return (size_t)(e->count * table_pitch(e->groups) + (e->tile * e->pitch + 3) / 4 * 4) * sizeof(float) +
               (size_t)(depth * weight_pitch(e->groups) + e->tile * e->z_pitch) * sizeof(T);
    }
};

/* Mean and deviation of a sequence, and its patches normalised. */
template <int DEPTH, typename T>
static __device__ __forceinline__ void normalise(const struct embedding<T> &e, const float *value, bool there, T *z, int sequence)
{
    const int lane = threadIdx.x % 32;
    float mu = 0.0f, deviation = 1.0f;
    if (e.revin) {
        ps_window_statistics<12, true>(value, e.length, e.epsilon, mu, deviation);
    }
    mu = there ? mu : NAN;
    deviation = there ? deviation : NAN;
    if (lane == 0) {
        e.mean[sequence] = mu;
        e.std[sequence] = deviation;
    }
    const float factor = 1.0f / deviation;
    /* Beyond the window's end the last value repeats. */
    if (e.overlapping) {
#pragma unroll 4
        for (int l = lane; l < e.z_pitch; l += 32) {
            ps_put(z + l, (value[l < e.length ? l : e.length - 1] - mu) * factor);
        }
    } else {
        for (int i = lane; i < e.count * DEPTH; i += 32) {
            const int n = i / DEPTH, k = i % DEPTH, l = n * e.stride + k;
            ps_put(z + n * e.row_pitch + k, (value[l < e.length ? l : e.length - 1] - mu) * factor);
        }
    }
}

/* Grid: all sequences by tiles. */
template <typename T, int STEPS, int SPAN>
static __global__ void __launch_bounds__(embed_threads, embed_shape<STEPS, SPAN>::blocks)
    embed_block(const __grid_constant__ struct embedding<T> e)
{
    typedef embed_shape<STEPS, SPAN> shape;
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), g = lane / 4, q = lane % 4;
    const int table_pitch = shape::table_pitch(e.groups), weight_pitch = shape::weight_pitch(e.groups);
    float *table = (float *)shared, *values = table + e.count * table_pitch;
    T *weight = (T *)(values + (e.tile * e.pitch + 3) / 4 * 4), *patches = weight + shape::depth * weight_pitch;
    const int first = (int)blockIdx.x * e.tile, live = e.sequences - first < e.tile ? e.sequences - first : e.tile;
    /* A thread has every 32nd value of a sequence, and a warp those that lie together. */
    const bool channels_fastest = e.windows.by_channel < e.windows.by_time;
    const int own = channels_fastest ? (int)threadIdx.x % sequences_at_once : warp;
    const int own_first = channels_fastest ? (int)threadIdx.x / sequences_at_once : lane;
    const int own_sequence = own < live ? first + own : first, b = (int)ps_divide(own_sequence, e.by_channels);
    ps_grid_begin();
    /* The window's number is two loads away: W_pos, b_P and W_P come meanwhile. */
    const uint64_t at = e.state->cursor + (uint64_t)b;
    const uint64_t step = e.state->step;
    const float factor_kept = e.dropout.threshold ? e.dropout.scale : 1.0f;
    constexpr int flight = 6;
    float4 position[flight];
    const auto fetch = [&](int row, int column) {
#pragma unroll
        for (int j = 0; j < flight; j++) {
            const int n = row + j * embed_warps;
            position[j] = *(const float4 *)(e.position + (n < e.count && column < e.d ? n * e.d + column : 0));
        }
    };
    const auto keep = [&](int row, int column) {
        const float4 add = *(const float4 *)(e.bias + (column < e.d ? column : 0));
#pragma unroll
        for (int j = 0; j < flight; j++) {
            const int n = row + j * embed_warps;
            const float4 p = position[j];
            if (n < e.count && column < 32 * e.groups) {
                *(float4 *)(table + n * table_pitch + column) = make_float4(p.x + add.x, p.y + add.y, p.z + add.z, p.w + add.w);
            }
        }
    };
    fetch(warp, 4 * lane);
    for (int row = threadIdx.x / 16; row < shape::depth; row += embed_threads / 16) {
        for (int octet = threadIdx.x % 16; octet < 4 * e.groups; octet += 16) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (row < e.patch && 8 * octet < e.d) {
                v = *(const uint4 *)(e.weight + row * e.d + 8 * octet);
            }
            uint32_t *to = (uint32_t *)(weight + row * weight_pitch + octet / 4 * 32 + octet % 4 * 2);
            to[0] = v.x;
            to[4] = v.y;
            to[8] = v.z;
            to[12] = v.w;
        }
    }
    const bool listed = at < (uint64_t)e.windows.index_count;
    const int64_t window = e.windows.indices[listed ? at : 0];
    keep(warp, 4 * lane);
    const bool there = listed && window >= 0 && window < e.windows.count;
    {
        const float *from = e.windows.data + (there ? window : 0) * e.windows.by_window +
                            (own_sequence - b * e.channels) * e.windows.by_channel + own_first * e.windows.by_time;
        float *to = values + own * e.pitch + own_first;
        const int64_t on = 32 * e.windows.by_time;
#pragma unroll 4
        for (int left = own < live ? e.length - own_first : 0; left > 0; left -= 32) {
            ps_copy_async4(to, from);
            from += on;
            to += 32;
        }
    }
    for (int column = 4 * lane; column < 32 * e.groups; column += 128) {
        for (int row = warp + (column < 128 ? flight * embed_warps : 0); row < e.count; row += flight * embed_warps) {
            fetch(row, column);
            keep(row, column);
        }
    }
    ps_copy_wait();
    __syncthreads();
    const bool warps_there = __shfl_sync(0xffffffffu, there, channels_fastest ? warp : 0);
    if (warp < live) {
        normalise<shape::depth>(e, values + warp * e.pitch, warps_there, patches + warp * e.z_pitch, first + warp);
    }
    __syncthreads();
    const int rows = live * e.count;
    const int64_t base = (int64_t)first * e.count; /* the block's rows are consecutive */
    const auto leave = [&](auto piece) {
        constexpr int elements = sizeof piece / sizeof(T);
        const int pieces = e.patch / elements;
        for (int i = threadIdx.x; i < rows * pieces; i += embed_threads) {
            const int row = (int)ps_divide(i, e.by_pieces), c = (int)ps_divide(row, e.by_count), n = row - c * e.count;
            ((decltype(piece) *)(e.patches + base * e.patch))[i] =
                *(const decltype(piece) *)(patches + c * e.z_pitch + n * e.row_pitch + elements * (i - row * pieces));
        }
    };
    e.unit == 8 ? leave(uint4()) : e.unit == 4 ? leave(uint2()) : e.unit == 2 ? leave(uint32_t()) : leave(T());
    for (int span = warp / e.down; span < e.spans; span += embed_warps / e.down) {
        uint32_t right[shape::span][STEPS][4][2];
#pragma unroll
        for (int group = 0; group < shape::span; group++) {
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    const int column = (span * shape::span + group) * 32;
                    uint32_t r[4];
                    ps_ldmatrix4_transposed(r, weight + (s * 16 + lane % 16) * weight_pitch + (column < e.d ? column : 0) +
                                                   lane / 16 * 8 + j * 8);
                    right[group][s][j][0] = r[0];
                    right[group][s][j][1] = r[1];
                    right[group][s][j + 1][0] = r[2];
                    right[group][s][j + 1][1] = r[3];
                }
            }
        }
        const int column = span * shape::span * 32 + 8 * q, wide = e.d / 8;
        T *u = e.u + base * e.d + column;
        const uint32_t octets = (uint32_t)base * (uint32_t)wide + (uint32_t)column / 8;
        for (int tile = warp % e.down; tile * 16 < rows; tile += e.down) {
            const int own = tile * 16 + lane % 16, row = own < rows ? own : 0, c = (int)ps_divide(row, e.by_count),
                      n = row - c * e.count;
            uint32_t left[STEPS][4];
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                ps_ldmatrix4(left[s], patches + c * e.z_pitch + n * e.row_pitch + 16 * s + lane / 16 * 8);
            }
            const float *add[2];
            add[0] = table + __shfl_sync(0xffffffffu, n, g) * table_pitch + column;
            add[1] = table + __shfl_sync(0xffffffffu, n, g + 8) * table_pitch + column;
            /* Columns from d on are worked out too, of whatever lies there, and not stored. */
            uint32_t out[shape::span][2][4];
#pragma unroll
            for (int group = 0; group < shape::span; group++) {
                float sum[4][4];
#pragma unroll
                for (int j = 0; j < 4; j++) { /* by two, as the product takes them */
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float2 begin = *(const float2 *)(add[half] + 32 * group + 2 * j);
                        sum[j][2 * half] = begin.x;
                        sum[j][2 * half + 1] = begin.y;
                    }
                }
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        ps_mma16<T>(sum[j], left[s], right[group][s][j][0], right[group][s][j][1], sum[j]);
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        out[group][half][j] = ps_pack<T>(sum[j][2 * half] * factor_kept, sum[j][2 * half + 1] * factor_kept);
                    }
                }
            }
            const int r = tile * 16 + g;
            if (e.dropout.threshold) { /* together, so that none waits for its own chain of products alone */
                const uint32_t octet = octets + (uint32_t)r * (uint32_t)wide;
#pragma unroll
                for (int i = 0; i < 2 * shape::span; i++) {
                    struct ps_block keep = ps_draws(e.dropout, step, octet + i % 2 * (uint32_t)e.d + i / 2 * 4);
                    masks_of(keep, e.dropout.threshold);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        out[i / 2][i % 2][j] &= keep.word[j];
                    }
                }
            }
            T *to = u + r * e.d;
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int group = 0; group < shape::span; group++) {
                    if (r + 8 * half < rows && column + 32 * group < e.d) {
                        *(uint4 *)(to + 32 * group) =
                            make_uint4(out[group][half][0], out[group][half][1], out[group][half][2], out[group][half][3]);
                    }
                }
                to += 8 * e.d;
            }
        }
    }
}

template <typename T, int STEPS, int SPAN>
static enum ps_status launch_embedding(const struct ps_cuda_context *c, const char *op, struct embedding<T> *e)
{
    typedef embed_shape<STEPS, SPAN> shape;
    e->overlapping = e->stride % 8 == 0;
    e->row_pitch = e->overlapping ? e->stride : shape::depth + 8;
    e->z_pitch = ((e->count - 1) * e->row_pitch + shape::depth + 7) / 8 * 8;
    e->spans = (e->groups + shape::span - 1) / shape::span;
    e->down = e->spans < embed_warps ? embed_warps / e->spans : 1;
    /* Two blocks a multiprocessor; more of them where a block would take too much. */
    const int most = c->shared_bytes - 1024, share = (e->sequences + 2 * c->multiprocessors - 1) / (2 * c->multiprocessors);
    e->tile = share < sequences_at_once ? share : sequences_at_once;
    while (e->tile > 1 && (int)shape::bytes(e) > most) {
        e->tile--;
    }
    const int bytes = (int)shape::bytes(e);
    if (bytes > most) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): d %d, windows of %d and %d patches need %d bytes of shared memory", op, e->d,
                       e->length, e->count, bytes);
    }
    PS_TRY(ps_cuda_allow_shared((const void *)embed_block<T, STEPS, SPAN>, (size_t)bytes, op));
    ps_cuda_launch(c, embed_block<T, STEPS, SPAN>, (unsigned)((e->sequences + e->tile - 1) / e->tile), embed_threads, (size_t)bytes,
                   *e);
    PS_CUDA_LAUNCHED(op);
}

template <typename T> static enum ps_status embed_forward(const struct ps_kernels *k, const struct ps_embed_forward *a)
{
    const char *op = "embed_forward";
    const struct ps_cuda_context *c = ps_cuda(k);
    embedding<T> e = {};
    PS_TRY(ps_windows_make(op, "inputs", &a->inputs, &a->indices, a->state, a->batch, &e.windows));
    const int64_t channels = a->inputs.size[1], length = a->inputs.size[2], patch = ps_cuda_width(&a->patches),
                  d = ps_cuda_width(&a->u);
    if (channels < 1 || a->inputs.size[0] < 1 || patch < 1 || patch > length || patch > 64 || a->stride < 1 || d < 8 ||
        d % 8 != 0 || d > 4096 || length > 4096) {
        return ps_fail(PS_UNSUPPORTED,
                       "%s (cuda): patches of %lld every %lld of %lld channels of %lld, d %lld: up to 64 and a d of 8s are served",
                       op, (long long)patch, (long long)a->stride, (long long)channels, (long long)length, (long long)d);
    }
    const int64_t count = (length - patch) / a->stride + 1 + (a->pad_end ? 1 : 0), sequences = a->batch * channels;
    PS_TRY(ps_cuda_expect(op, "u", &a->u, ps_type_of<T>, sequences * count * d));
    PS_TRY(ps_cuda_expect(op, "patches", &a->patches, ps_type_of<T>, sequences * count * patch));
    PS_TRY(ps_cuda_expect(op, "mean", &a->mean, PS_F32, sequences));
    PS_TRY(ps_cuda_expect(op, "std", &a->std, PS_F32, sequences));
    PS_TRY(ps_cuda_expect(op, "weight", &a->weight, ps_type_of<T>, patch * d));
    PS_TRY(ps_cuda_expect(op, "bias", &a->bias, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "position", &a->position, PS_F32, count * d));
    if (a->dropout.threshold && !a->dropout.state) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): dropout needs the step's state", op);
    }
    if (!ps_cuda_aligned(&a->u) || !ps_cuda_aligned(&a->patches) || !ps_cuda_aligned(&a->weight) || !ps_cuda_aligned(&a->bias) ||
        !ps_cuda_aligned(&a->position) || sequences * count > INT32_MAX) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): tensors are not aligned to 16 bytes, or %lld sequences are too many", op,
                       (long long)sequences);
    }
    if (sequences == 0) {
        return PS_OK;
    }
    e.u = (T *)a->u.data;
    e.patches = (T *)a->patches.data;
    e.mean = (float *)a->mean.data;
    e.std = (float *)a->std.data;
    e.weight = (const T *)a->weight.data;
    e.bias = (const float *)a->bias.data;
    e.position = (const float *)a->position.data;
    e.state = a->state;
    e.channels = (int)channels;
    e.length = (int)length;
    e.patch = (int)patch;
    e.stride = (int)a->stride;
    e.count = (int)count;
    e.d = (int)d;
    e.sequences = (int)sequences;
    e.pitch = e.length | 1; /* odd: sequences' values of one time lie in different banks */
    e.groups = (e.d + 31) / 32;
    e.revin = a->revin;
    e.epsilon = (float)a->epsilon;
    e.by_channels = ps_divisor_make(e.channels);
    e.by_count = ps_divisor_make(e.count);
    e.dropout = a->dropout;
    e.unit = unit_of(e.patch);
    e.by_pieces = ps_divisor_make(e.patch / e.unit);
    const bool narrow = e.groups == 1;
    return patch <= 16   ? narrow ? launch_embedding<T, 1, 1>(c, op, &e) : launch_embedding<T, 1, 2>(c, op, &e)
             : patch <= 32 ? narrow ? launch_embedding<T, 2, 1>(c, op, &e) : launch_embedding<T, 2, 2>(c, op, &e)
                           : launch_embedding<T, 4, 1>(c, op, &e);
}

extern "C" enum ps_status ps_cuda_embed_forward(const struct ps_kernels *k, const struct ps_embed_forward *a)
{
    if (a->first || a->subtract_last) {
        return ps_fail(PS_UNSUPPORTED, "embed_forward (cuda): patches from the start, and the mean, only");
    }
    return k->real == PS_F16 ? embed_forward<ps_fp16>(k, a) : embed_forward<ps_bf16>(k, a);
}

/* ---- backward ---- */

template <typename T> struct embed_grad {
    const T *du, *patches;
    float *position, *product; /* partial sums [shares, N d], [shares N, (P + 1) d] */
    int sequences, count /* N */, d, patch;
    int stages, share;           /* of all the sequences; that a block takes */
    int across, down;            /* a block's warps: side by side along d, and those that share the stages */
    int sides;                   /* blocks along d */
    int unit;                    /* elements that patches lie in whole, at most 8 */
    bool settled;                /* du is older than the kernel before */
    struct ps_divisor by_pieces; /* units of a patch */
    struct ps_dropout dropout;
};

/* A warp's stage is 2 KB of du: for 64 / CT sequences, CT tiles of 16 columns. NT - 1 tiles of 8 columns of patches, and ones. */
template <int CT, int NT> struct grad_shape {
    static constexpr int rows = 64 / CT, warps = NT > 5 ? 8 : 24, threads = 32 * warps, pieces = NT - 1;
    static constexpr int patch_bytes = rows * pieces * 16, warp_bytes = 2048 + 2 * patch_bytes;
    static constexpr int sum_rows = 8 * pieces + 1; /* of the product; the last: of ones */
    static __host__ __device__ constexpr int pitch(int across)
    {
        return 16 * CT * across + 4;
    }
    static size_t bytes(int across, int down)
    {
        const size_t sums = (size_t)(down * sum_rows * pitch(across)) * sizeof(float),
                     stages = (size_t)(across * down * warp_bytes);
        return sums > stages ? sums : stages;
    }
};

/* Where piece c (16 bytes) of a row of W of them lies in shared memory, so that neither rows nor pieces meet in a bank. */
template <int W> static __device__ __forceinline__ int piece_at(int row, int c)
{
    const int i = row * W + c;
    return (i ^ (i >> 3 & 7)) * 16;
}

/* 8 (NT - 1) >= P. Grid (share, n, side), sides fastest. No warp waits for another before the sums. */
template <typename T, int CT, int NT>
static __global__ void __launch_bounds__(grad_shape<CT, NT>::threads, 1)
    embed_gradients(const __grid_constant__ struct embed_grad<T> e)
{
    typedef grad_shape<CT, NT> shape;
    constexpr int loads = 4, apart = 16 / CT /* rows from one of a lane's loads to the next */, pieces = shape::pieces;
    constexpr int copies = shape::rows * pieces / 32;
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    char *masked = (char *)shared + warp * shape::warp_bytes, *patches = masked + 2048;
    const int side = (int)(blockIdx.x % e.sides), at = (int)(blockIdx.x / e.sides), n = at % e.count;
    const int begin = at / e.count * e.share, end = begin + e.share < e.stages ? begin + e.share : e.stages;
    const int first = (side * e.across + warp % e.across) * 16 * CT; /* of the warp's columns */
    const int row = lane / (2 * CT), column = first + lane % (2 * CT) * 8;
    /* Columns and rows that no stage fills stay zero. */
    for (int i = lane; i < 2 * shape::patch_bytes / 16; i += 32) {
        ((uint4 *)patches)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    const int wide = e.count * e.d, stride = e.down * shape::rows; /* sequences from a stage of the warp to its next */
    int stage = begin + warp / e.across, left = e.sequences - (stage * shape::rows + row); /* sequences from the lane's first on */
    const T *from = e.du + (int64_t)(stage * shape::rows + row) * wide + n * e.d + column;
    uint32_t octet = (uint32_t)(stage * shape::rows + row) * (uint32_t)(wide / 8) + (uint32_t)(n * e.d + column) / 8;
    uint4 words[loads];
    const auto fetch = [&](bool there) {
#pragma unroll
        for (int i = 0; i < loads; i++) {
            const bool inside = there && i * apart < left && column < e.d;
            words[i] = __ldcg((const uint4 *)(inside ? from + i * apart * wide : e.du)); /* what L1 has may be older */
            words[i] = inside ? words[i] : make_uint4(0, 0, 0, 0);
        }
    };
    const auto fetch_patches = [&](int of, char *to) {
        const int s0 = of * shape::rows;
        if (of >= end) {
        } else if (e.unit == 8) {
#pragma unroll
            for (int i = 0; i < copies; i++) {
                const int j = lane + 32 * i, s = s0 + j / pieces, c = j % pieces;
                if (s < e.sequences && 8 * c < e.patch) {
                    ps_copy_async(to + piece_at<pieces>(j / pieces, c), e.patches + ((int64_t)s * e.count + n) * e.patch + 8 * c);
                }
            }
        } else {
            const int across = e.patch / e.unit;
#pragma unroll 1
            for (int i = lane; i < shape::rows * across; i += 32) {
                const int s = (int)ps_divide(i, e.by_pieces), c = (i - s * across) * e.unit;
                const T *const from = e.patches + ((int64_t)(s0 + s) * e.count + n) * e.patch + c;
                T *const place = (T *)(to + piece_at<pieces>(s, c / 8)) + c % 8;
                if (s0 + s >= e.sequences) {
                } else if (e.unit == 4) {
                    ps_copy_async8(place, from);
                } else if (e.unit == 2) {
                    ps_copy_async4(place, from);
                } else {
                    *place = *from;
                }
            }
        }
        ps_copy_commit();
    };
    if (!e.settled) {
        ps_grid_begin();
    }
    const uint64_t step = e.dropout.threshold ? e.dropout.state->step : 0;
    float sums[CT][NT][4] = {};
    if (first < e.d) {
        int buffer = 0;
        fetch(stage < end);
        fetch_patches(stage, patches);
        for (; stage < end; stage += e.down) {
            fetch_patches(stage + e.down, patches + (buffer ^ shape::patch_bytes));
            if (e.dropout.threshold) {
#pragma unroll
                for (int i = 0; i < loads; i++) {
                    struct ps_block keep = ps_draws(e.dropout, step, octet + (uint32_t)(i * apart) * (uint32_t)(wide / 8));
                    masks_of(keep, e.dropout.threshold);
                    words[i].x &= keep.word[0];
                    words[i].y &= keep.word[1];
                    words[i].z &= keep.word[2];
                    words[i].w &= keep.word[3];
                }
            }
#pragma unroll
            for (int i = 0; i < loads; i++) {
                *(uint4 *)(masked + piece_at<2 * CT>(row + i * apart, lane % (2 * CT))) = words[i];
            }
            left -= stride;
            from += (int64_t)stride * wide;
            octet += (uint32_t)stride * (uint32_t)(wide / 8);
            fetch(stage + e.down < end);
            ps_copy_wait_group<1>();
            __syncwarp();
#pragma unroll
            for (int k = 0; k < shape::rows; k += 16) {
                uint32_t right[pieces][2];
#pragma unroll
                for (int j = 0; j < pieces; j += 2) {
                    uint32_t b[4];
                    ps_ldmatrix4_transposed(b, patches + buffer + piece_at<pieces>(k + lane % 16, j + lane / 16));
                    right[j][0] = b[0];
                    right[j][1] = b[1];
                    right[j + 1][0] = b[2];
                    right[j + 1][1] = b[3];
                }
#pragma unroll
                for (int m = 0; m < CT; m++) {
                    uint32_t a[4];
                    ps_ldmatrix4_transposed(a, masked + piece_at<2 * CT>(k + lane % 8 + lane / 16 * 8, 2 * m + lane / 8 % 2));
#pragma unroll
                    for (int j = 0; j < pieces; j++) {
                        ps_mma16<T>(sums[m][j], a, right[j][0], right[j][1], sums[m][j]);
                    }
                    ps_mma16<T>(sums[m][pieces], a, ps_ones<T>(), ps_ones<T>(), sums[m][pieces]);
                }
            }
            __syncwarp();
            buffer ^= shape::patch_bytes;
        }
    }
    if (e.settled) {
        ps_grid_begin();
    }
    /* The sums of the warps that shared the stages, in order. */
    __syncthreads();
    const int pitch = shape::pitch(e.across), width = 16 * CT * e.across;
    float *parts = (float *)shared;
    float *part = parts + warp / e.across * shape::sum_rows * pitch + warp % e.across * 16 * CT + lane / 4;
#pragma unroll
    for (int m = 0; m < CT; m++) {
#pragma unroll
        for (int j = 0; j < pieces; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                part[(8 * j + lane % 4 * 2 + i % 2) * pitch + 16 * m + i / 2 * 8] = sums[m][j][i];
            }
        }
        if (lane % 4 == 0) {
            part[8 * pieces * pitch + 16 * m] = sums[m][pieces][0];
            part[8 * pieces * pitch + 16 * m + 8] = sums[m][pieces][2];
        }
    }
    __syncthreads();
    const float scale = e.dropout.threshold ? e.dropout.scale : 1.0f;
    for (int p = warp; p <= e.patch; p += e.across * e.down) {
        for (int c = lane; c < width && side * width + c < e.d; c += 32) {
            const float *part = parts + (p < e.patch ? p : 8 * pieces) * pitch + c;
            float total = part[0];
            for (int j = 1; j < e.down; j++) {
                total += part[j * shape::sum_rows * pitch];
            }
            e.product[((int64_t)at * (e.patch + 1) + p) * e.d + side * width + c] = scale * total;
            if (p == e.patch) { /* b_P's gradient is the sum of W_pos's over n */
                e.position[(int64_t)(at / e.count) * wide + n * e.d + side * width + c] = scale * total;
            }
        }
    }
}

template <typename T, int CT, int NT>
static enum ps_status launch_gradients(const struct ps_cuda_context *c, const char *op, const struct ps_embed_backward *a,
                                       struct embed_grad<T> *e)
{
    typedef grad_shape<CT, NT> shape;
    const int tiles = (e->d + 16 * CT - 1) / (16 * CT);
    e->sides = (tiles + 7) / 8;
    e->across = (tiles + e->sides - 1) / e->sides;
    e->down = shape::warps / e->across;
    e->stages = (e->sequences + shape::rows - 1) / shape::rows;
    int shares = c->multiprocessors / (e->count * e->sides);
    shares = shares < 1 ? 1 : shares < e->stages ? shares : e->stages;
    e->share = (e->stages + shares - 1) / shares;
    shares = (e->stages + e->share - 1) / e->share;
    e->down = e->down < e->share ? e->down : e->share; /* of few sequences blocks are small, and several a multiprocessor */
    const int64_t positions = (int64_t)e->count * e->d, columns = (int64_t)(e->patch + 1) * e->d,
                  parts = (int64_t)shares * e->count;
    PS_TRY(ps_cuda_partials(c, op, (size_t)(shares * positions + parts * columns), &e->position));
    e->product = e->position + shares * positions;
    const size_t bytes = shape::bytes(e->across, e->down);
    if (bytes > (size_t)c->shared_bytes) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): patches of %d need %zu bytes of shared memory", op, e->patch, bytes);
    }
    PS_TRY(ps_cuda_allow_shared((const void *)embed_gradients<T, CT, NT>, bytes, op));
    ps_cuda_launch(c, embed_gradients<T, CT, NT>, (unsigned)(parts * e->sides), (unsigned)(32 * e->across * e->down), bytes, *e);
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    const struct ps_cuda_columns jobs[2] = {
        {(float *)a->d_position.data, (float *)a->d_position.data, positions, e->position, shares, positions},
        {(float *)a->d_weight.data, (float *)a->d_bias.data, columns - e->d, e->product, parts, columns}};
    return ps_cuda_add_columns(c, op, jobs, 2);
}

template <typename T> static enum ps_status embed_backward(const struct ps_kernels *k, const struct ps_embed_backward *a)
{
    const char *op = "embed_backward";
    const struct ps_cuda_context *c = ps_cuda(k);
    embed_grad<T> e = {};
    const int64_t d = ps_tensor_count(&a->d_bias), patch = ps_cuda_width(&a->patches), positions = ps_tensor_count(&a->d_position),
                  elements = ps_tensor_count(&a->du);
    if (d < 8 || d % 8 != 0 || d > 4096 || patch < 1 || patch > 80 || positions < d || positions % d != 0 ||
        positions > INT32_MAX || elements % positions != 0 || elements / 8 > INT32_MAX) {
        return ps_fail(PS_UNSUPPORTED,
                       "%s (cuda): %lld elements of d %lld, %lld positions, patches of %lld: up to 80 and a d of 8s up to 4096 are "
                       "served",
                       op, (long long)elements, (long long)d, (long long)positions, (long long)patch);
    }
    e.sequences = (int)(elements / positions);
    e.count = (int)(positions / d);
    PS_TRY(ps_cuda_expect(op, "du", &a->du, ps_type_of<T>, elements));
    PS_TRY(ps_cuda_expect(op, "patches", &a->patches, ps_type_of<T>, elements / d * patch));
    PS_TRY(ps_cuda_expect(op, "d_weight", &a->d_weight, PS_F32, patch * d));
    PS_TRY(ps_cuda_expect(op, "d_bias", &a->d_bias, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "d_position", &a->d_position, PS_F32, positions));
    if (a->dropout.threshold && !a->dropout.state) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): dropout needs the step's state", op);
    }
    if (!ps_cuda_aligned(&a->du) || !ps_cuda_aligned(&a->patches)) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): tensors are not aligned to 16 bytes", op);
    }
    if (elements == 0) {
        return PS_OK;
    }
    e.du = (const T *)a->du.data;
    e.patches = (const T *)a->patches.data;
    e.d = (int)d;
    e.patch = (int)patch;
    e.unit = unit_of(e.patch);
    e.settled = a->du.settled;
    e.by_pieces = ps_divisor_make(e.patch / e.unit);
    e.dropout = a->dropout;
    return patch > 32   ? launch_gradients<T, 1, 11>(c, op, a, &e)
           : patch > 16 ? launch_gradients<T, 2, 5>(c, op, a, &e)
           : d > 16     ? launch_gradients<T, 2, 3>(c, op, a, &e)
                        : launch_gradients<T, 1, 3>(c, op, a, &e);
}

extern "C" enum ps_status ps_cuda_embed_backward(const struct ps_kernels *k, const struct ps_embed_backward *a)
{
    if (!a->d_position.data) {
        return ps_fail(PS_UNSUPPORTED, "embed_backward (cuda): with learned positions only");
    }
    return k->real == PS_F16 ? embed_backward<ps_fp16>(k, a) : embed_backward<ps_bf16>(k, a);
}
