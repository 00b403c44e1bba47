/* The embedding in bf16 as one kernel forward and two backward: what gather_patches, a product and bias_position_add, and two
 * bias_grad and a product, do in three and six.
 *
 * Forward: a block takes up to 8 neighbouring channels of a window (one sector of 32 bytes for each time of a series), a warp a
 * channel takes mean and deviation, and the patches go from shared memory straight into the operands of mma.m16n8k16. A thread
 * then holds two columns of four tiles of 8; four lanes exchange words, so that each draws whole Philox blocks and stores 16
 * bytes. u, patches, mean, std =. Bytes: 4 S L + 2 R P + 2 R d. Flops: 2 R P d.
 *
 * Backward: a block takes a share of the sequences and a range of patches n. A thread owns 8 columns of one n: it draws their mask,
 * adds them up for W_pos, and leaves them in shared memory, where the tensor cores sum patches' du for W_P; a column of ones beside
 * the patches makes the sum for b_P a row of the same product. Partial sums a block, added in a fixed order by reduce.cu.
 * d_weight, d_bias, d_position +=. Bytes: 2 R d + 2 R P, and the partial sums, which stay in L2. Flops: 2 R P d. */
#include "kernels/cuda/warp_mma.cuh"
#include "kernels/cuda/windows.cuh"

static const int channels_at_once = 8;

/* v[j] of lane q (of four neighbouring ones) = v[q] of lane j. All lanes of the warp take part. */
static __device__ __forceinline__ void quad_transpose(uint32_t (&v)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[j] : v[j + 1], 1);
        v[j] = odd ? got : v[j];
        v[j + 1] = odd ? v[j + 1] : got;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? v[j] : v[j + 2], 2);
        v[j] = high ? got : v[j];
        v[j + 2] = high ? v[j + 2] : got;
    }
}

/* The words of a Philox block as masks of pairs of bf16: all ones where the draw is kept. threshold > 0. */
static __device__ __forceinline__ void masks_of(struct ps_block &block, uint32_t threshold)
{
    const uint32_t below = (threshold - 1) * 0x10001u, minus_below = (0x10001u - threshold & 0xffffu) * 0x10001u;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        block.word[j] = ps_kept2(block.word[j], below, minus_below) * 0xffffu;
    }
}

/* ---- forward ---- */

struct embedding {
    ps_bf16 *u, *patches;
    float *mean, *std;
    const ps_bf16 *weight;
    const float *bias, *position;
    struct ps_cuda_windows windows;
    const struct ps_step_state *state;
    int channels, length, patch, stride, count /* N */, d;
    int tile /* channels a block */, tiles, pitch /* floats of a channel in shared memory */, groups /* of 32 columns */;
    int span /* groups that one warp takes of 16 rows */, spans;
    int revin;
    float epsilon;
    struct ps_divisor by_tile, by_length, by_count, by_spans;
    struct ps_dropout dropout;
};

static size_t embed_bytes(const struct embedding *e, int steps)
{
    return (size_t)steps * 16 * (size_t)(e->groups * 32 + 8) * sizeof(ps_bf16) + (size_t)(e->tile * e->pitch) * sizeof(float);
}

/* STEPS * 16 >= P; FULL: d is a multiple of 32. Grid: batch * tiles. Shared memory: W_P [STEPS * 16][groups * 32 + 8], values
 * [tile][pitch]. */
template <int STEPS, bool FULL>
static __global__ void __launch_bounds__(512) embed_block(const __grid_constant__ struct embedding e)
{
    extern __shared__ uint4 shared[];
    __shared__ float centre[channels_at_once], scale[channels_at_once];
    ps_bf16 *weight = (ps_bf16 *)shared;
    const int weight_pitch = e.groups * 32 + 8, threads = blockDim.x;
    float *values = (float *)(weight + STEPS * 16 * weight_pitch);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = threads / 32;
    const int64_t b = blockIdx.x / e.tiles;
    const int first = (int)(blockIdx.x % e.tiles) * e.tile, live = e.channels - first < e.tile ? e.channels - first : e.tile;
    ps_grid_begin();
    for (int i = threadIdx.x; i < STEPS * 16 * e.groups * 4; i += threads) {
        const int row = i / (e.groups * 4), column = i % (e.groups * 4) * 8;
        ps_bf16 *to = weight + row * weight_pitch + column;
        if (row < e.patch && column < e.d) {
            ps_copy_async(to, e.weight + row * e.d + column);
        } else {
            *(uint4 *)to = make_uint4(0, 0, 0, 0);
        }
    }
    const float *window = ps_window_of(e.windows, e.state, b);
    const float *from = (window ? window : e.windows.data) + first * e.windows.by_channel;
    const bool channels_fastest = e.windows.by_channel < e.windows.by_time;
    constexpr int flight = 6; /* loads that a thread has under way: no branch may stand between them */
    for (int begin = threadIdx.x; begin < e.tile * e.length; begin += flight * threads) {
        float v[flight];
        int at[flight];
#pragma unroll
        for (int j = 0; j < flight; j++) {
            const int i = begin + j * threads;
            int c, l;
            if (channels_fastest) {
                l = (int)ps_divide(i, e.by_tile);
                c = i - l * e.tile;
            } else {
                c = (int)ps_divide(i, e.by_length);
                l = i - c * e.length;
            }
            const bool inside = c < live && l < e.length;
            at[j] = inside ? c * e.pitch + l : -1;
            v[j] = from[inside ? c * e.windows.by_channel + l * e.windows.by_time : 0];
        }
#pragma unroll
        for (int j = 0; j < flight; j++) {
            if (at[j] >= 0) {
                values[at[j]] = window ? v[j] : NAN;
            }
        }
    }
    ps_copy_wait();
    __syncthreads();
    for (int c = warp; c < live; c += warps) {
        const float *value = values + c * e.pitch;
        float mu = 0.0f, deviation = 1.0f;
        if (e.revin) {
            ps_window_statistics(value, e.length, e.epsilon, mu, deviation);
        }
        if (lane == 0) {
            e.mean[b * e.channels + first + c] = mu;
            e.std[b * e.channels + first + c] = deviation;
            centre[c] = mu;
            scale[c] = 1.0f / deviation;
        }
    }
    __syncthreads();
    const int g = lane / 4, q = lane % 4, rows = live * e.count, units = (rows + 15) / 16 * e.spans;
    const int64_t base = (b * e.channels + first) * e.count; /* the block's rows are consecutive */
    const uint64_t step = e.dropout.threshold ? e.dropout.state->step : 0;
    const float factor_kept = e.dropout.threshold ? e.dropout.scale : 1.0f;
    for (int unit = warp; unit < units; unit += warps) {
        const int tile = (int)ps_divide(unit, e.by_spans), span = unit - tile * e.spans;
        int64_t to[2];
        const float *place[2];
        bool inside[2];
        uint32_t a[STEPS][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = tile * 16 + g + 8 * half;
            inside[half] = row < rows;
            const int at = inside[half] ? row : 0, c = (int)ps_divide(at, e.by_count), n = at - c * e.count;
            const float *value = values + c * e.pitch;
            const float mu = centre[c], factor = scale[c];
            to[half] = base + row;
            place[half] = e.position + n * e.d + 2 * q;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++) {
                const int k = 8 * i + 2 * q;
                float v[2];
#pragma unroll
                for (int j = 0; j < 2; j++) { /* beyond the window's end the last value repeats */
                    const int l = n * e.stride + k + j;
                    const float z = (value[l < e.length ? l : e.length - 1] - mu) * factor;
                    v[j] = k + j < e.patch ? z : 0.0f;
                }
                a[i / 2][half + 2 * (i % 2)] = ps_pack(v);
            }
        }
        if (span == 0) {
#pragma unroll
            for (int i = 0; i < 4 * STEPS; i++) {
                const int half = i % 2, k = i / 2 * 8 + 2 * q;
                const uint32_t word = a[i / 4][i % 4];
                if (inside[half] && k < e.patch) {
                    ps_bf16 *patch = e.patches + to[half] * e.patch + k;
                    if (e.patch % 2 == 0) {
                        *(uint32_t *)patch = word;
                    } else {
                        *(uint16_t *)patch = (uint16_t)word;
                        if (k + 1 < e.patch) {
                            *((uint16_t *)patch + 1) = (uint16_t)(word >> 16);
                        }
                    }
                }
            }
        }
        const int end = (span + 1) * e.span < e.groups ? (span + 1) * e.span : e.groups;
        for (int group = span * e.span; group < end; group++) {
            const int column = group * 32;
            float sum[4][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int i = FULL || column + 8 * j < e.d ? column + 8 * j : 0;
                const float2 add = *(const float2 *)(e.bias + 2 * q + i);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float2 more = *(const float2 *)(place[half] + i);
                    sum[j][2 * half] = add.x + more.x;
                    sum[j][2 * half + 1] = add.y + more.y;
                }
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                uint32_t operand[2][4];
                const ps_bf16 *at = weight + (s * 16 + lane % 16) * weight_pitch + column + lane / 16 * 8;
                ps_ldmatrix4_transposed(operand[0], at);
                ps_ldmatrix4_transposed(operand[1], at + 16);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    ps_mma16(sum[j], a[s], operand[j / 2][j % 2 * 2], operand[j / 2][j % 2 * 2 + 1], sum[j]);
                }
            }
            /* Transposed, a lane has all 8 columns of tile q: one block of draws and one store. */
            uint32_t out[2][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float v[2] = {sum[j][2 * half] * factor_kept, sum[j][2 * half + 1] * factor_kept};
                    out[half][j] = ps_pack(v);
                }
            }
            quad_transpose(out[0]);
            quad_transpose(out[1]);
            if (e.dropout.threshold) {
                struct ps_block keep[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t octet = (uint32_t)to[half] * (uint32_t)(e.d / 8) + (uint32_t)(column / 8 + q);
                    keep[half] = ps_philox(e.dropout.seed, octet, e.dropout.site, step);
                    masks_of(keep[half], e.dropout.threshold);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        out[half][j] &= keep[half].word[j];
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (inside[half] && (FULL || column + 8 * q < e.d)) {
                    *(uint4 *)(e.u + to[half] * e.d + column + 8 * q) =
                        make_uint4(out[half][0], out[half][1], out[half][2], out[half][3]);
                }
            }
        }
    }
}

extern "C" enum ps_status ps_cuda_embed_forward(const struct ps_kernels *k, const struct ps_embed_forward *a)
{
    const char *op = "embed_forward";
    const struct ps_cuda_context *c = ps_cuda(k);
    struct embedding e = {};
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
    PS_TRY(ps_cuda_expect(op, "u", &a->u, PS_BF16, sequences * count * d));
    PS_TRY(ps_cuda_expect(op, "patches", &a->patches, PS_BF16, sequences * count * patch));
    PS_TRY(ps_cuda_expect(op, "mean", &a->mean, PS_F32, sequences));
    PS_TRY(ps_cuda_expect(op, "std", &a->std, PS_F32, sequences));
    PS_TRY(ps_cuda_expect(op, "weight", &a->weight, PS_BF16, patch * d));
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
    e.u = (ps_bf16 *)a->u.data;
    e.patches = (ps_bf16 *)a->patches.data;
    e.mean = (float *)a->mean.data;
    e.std = (float *)a->std.data;
    e.weight = (const ps_bf16 *)a->weight.data;
    e.bias = (const float *)a->bias.data;
    e.position = (const float *)a->position.data;
    e.state = a->state;
    e.channels = (int)channels;
    e.length = (int)length;
    e.patch = (int)patch;
    e.stride = (int)a->stride;
    e.count = (int)count;
    e.d = (int)d;
    e.tiles = (e.channels + channels_at_once - 1) / channels_at_once;
    e.tile = (e.channels + e.tiles - 1) / e.tiles;
    e.pitch = e.length | 1; /* odd: the channels of one time lie in different banks */
    e.groups = (e.d + 31) / 32;
    e.span = e.groups < 2 ? 1 : 2;
    e.spans = (e.groups + e.span - 1) / e.span;
    e.by_spans = ps_divisor_make(e.spans);
    e.revin = a->revin;
    e.epsilon = (float)a->epsilon;
    e.by_tile = ps_divisor_make(e.tile);
    e.by_length = ps_divisor_make(e.length);
    e.by_count = ps_divisor_make(e.count);
    e.dropout = a->dropout;
    const bool full = d % 32 == 0;
    void (*kernel)(struct embedding) = patch <= 16   ? full ? embed_block<1, true> : embed_block<1, false>
                                         : patch <= 32 ? full ? embed_block<2, true> : embed_block<2, false>
                                         : full ? embed_block<4, true>
                                                     : embed_block<4, false>;
    const size_t bytes = embed_bytes(&e, patch <= 16 ? 1 : patch <= 32 ? 2 : 4);
    if (bytes > (size_t)c->shared_bytes - 1024) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): d %lld and windows of %lld need %zu bytes of shared memory", op, (long long)d,
                       (long long)length, bytes);
    }
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), op));
    const unsigned blocks = (unsigned)(a->batch * e.tiles); /* larger ones where they are few and have much to do */
    const unsigned threads = blocks <= (unsigned)c->multiprocessors && e.tile * e.length > 1024 ? 512 : 256;
    ps_cuda_launch(c, kernel, blocks, threads, bytes, e);
    PS_CUDA_LAUNCHED(op);
}

/* ---- backward ---- */

static const int grad_threads = 256, grad_warps = grad_threads / 32;

struct embed_grad {
    const ps_bf16 *du, *patches;
    float *position, *product; /* partial sums [shares, N d], [shares * tiles, (P + 1) d] */
    int64_t sequences;
    int count /* N */, d, patch;
    int part /* patches n a block */, tiles, octets /* part d/8 */, lanes /* sequences side by side */, share /* sequences */;
    int rows;        /* of a stage in shared memory, a multiple of 16 */
    int across;      /* warps side by side along d; the others share the rows */
    int d_pitch;     /* bf16 of a row of du in shared memory */
    bool by_vectors; /* patches are copied by 16 bytes */
    int pieces;      /* of a patch */
    struct ps_divisor by_pieces, by_part;
    struct ps_dropout dropout;
};

/* M * 16 > P; across * PAIRS * 16 >= d; a thread has U sequences of a stage under way. Grid (share, tile), tiles fastest. */
template <int M, int PAIRS, int U>
static __global__ void __launch_bounds__(grad_threads, M *PAIRS <= 2 ? 3 : 1)
    embed_gradients(const __grid_constant__ struct embed_grad e)
{
    constexpr int patch_pitch = M * 16 + 8;
    extern __shared__ uint4 shared[];
    ps_bf16 *masked = (ps_bf16 *)shared, *patches = masked + e.rows * e.d_pitch; /* [rows][d_pitch], [2][rows][patch_pitch] */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, eighth = e.d / 8;
    const int tile = (int)(blockIdx.x % e.tiles), n0 = tile * e.part, live = e.count - n0 < e.part ? e.count - n0 : e.part;
    const int64_t begin = (int64_t)(blockIdx.x / e.tiles) * e.share;
    const int64_t end = begin + e.share < e.sequences ? begin + e.share : e.sequences;
    const int octet = threadIdx.x % e.octets, side = threadIdx.x / e.octets, at_once = e.lanes * U;
    const bool active = side < e.lanes && octet < live * eighth;
    const int n = n0 + octet / eighth, column = octet % eighth * 8;
    /* What no stage writes stays zero: the rows and columns that only fill tiles. */
    for (int i = threadIdx.x; i < e.rows * (e.d_pitch + 2 * patch_pitch) / 8; i += grad_threads) {
        shared[i] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * e.rows; i += grad_threads) {
        ps_put(patches + i * patch_pitch + e.patch, 1.0f);
    }
    ps_grid_begin();
    const uint64_t step = e.dropout.threshold ? e.dropout.state->step : 0;
    uint4 words[U];
    float sum[8] = {};
    float product[M][2 * PAIRS][4] = {};
    /* The thread's first octet of a stage, and how far the next sequence of it lies. */
    const uint4 *octets = (const uint4 *)e.du + ((begin + side) * e.count + n) * eighth + column / 8;
    uint32_t index = (uint32_t)(((begin + side) * e.count + n) * eighth + column / 8);
    const int next = e.lanes * e.count * eighth;
    ps_bf16 *mine = masked + (side * e.part + n - n0) * e.d_pitch + column;
    auto fetch = [&](int64_t from, int buffer) {
        const int left_here = active ? (int)(end - from) - side : 0;
#pragma unroll
        for (int u = 0; u < U; u++) {
            const bool inside = u * e.lanes < left_here;
            words[u] = *(inside ? octets + (int64_t)u * next : (const uint4 *)e.du);
            words[u] = inside ? words[u] : make_uint4(0, 0, 0, 0);
        }
        octets += (int64_t)U * next;
        const int64_t left = end - from;
        const int whole = (int)(left < at_once ? left : at_once);
        for (int i = threadIdx.x; i < whole * e.part * e.pieces; i += grad_threads) {
            const int row = (int)ps_divide(i, e.by_pieces), s = (int)ps_divide(row, e.by_part), m = row - s * e.part;
            const int in = (i - row * e.pieces) * (e.by_vectors ? 8 : 1);
            if (m >= live) {
                continue;
            }
            const ps_bf16 *source = e.patches + ((from + s) * e.count + n0 + m) * e.patch + in;
            ps_bf16 *to = patches + (buffer * e.rows + row) * patch_pitch + in;
            if (e.by_vectors) {
                ps_copy_async(to, source);
            } else {
                *to = *source;
            }
        }
    };
    fetch(begin, 0);
    int buffer = 0;
    for (int64_t from = begin; from < end; from += at_once, buffer ^= 1) {
        if (e.dropout.threshold) { /* all at once: the rounds of one block of draws wait for one another */
            struct ps_block keep[U];
#pragma unroll
            for (int u = 0; u < U; u++) {
                keep[u] = ps_philox(e.dropout.seed, index + (uint32_t)(u * next), e.dropout.site, step);
                masks_of(keep[u], e.dropout.threshold);
            }
            index += (uint32_t)(U * next);
#pragma unroll
            for (int u = 0; u < U; u++) {
                words[u].x &= keep[u].word[0];
                words[u].y &= keep[u].word[1];
                words[u].z &= keep[u].word[2];
                words[u].w &= keep[u].word[3];
            }
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            const uint32_t word[4] = {words[u].x, words[u].y, words[u].z, words[u].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float v[2];
                ps_unpack(v, word[j]);
                sum[2 * j] += v[0];
                sum[2 * j + 1] += v[1];
            }
            if (active) {
                *(uint4 *)(mine + u * e.lanes * e.part * e.d_pitch) = words[u];
            }
        }
        ps_copy_wait();
        __syncthreads();
        if (from + at_once < end) {
            fetch(from + at_once, buffer ^ 1);
        }
        const ps_bf16 *left = patches + buffer * e.rows * patch_pitch;
        for (int k = warp / e.across * 16; k < e.rows; k += grad_warps / e.across * 16) {
            uint32_t a[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
                ps_ldmatrix4_transposed(a[m], left + (k + lane % 8 + lane / 16 * 8) * patch_pitch + m * 16 + lane / 8 % 2 * 8);
            }
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                uint32_t b[4];
                ps_ldmatrix4_transposed(b, masked + (k + lane % 16) * e.d_pitch + (warp % e.across * PAIRS + pair) * 16 +
                                               lane / 16 * 8);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    ps_mma16(product[m][2 * pair], a[m], b[0], b[1], product[m][2 * pair]);
                    ps_mma16(product[m][2 * pair + 1], a[m], b[2], b[3], product[m][2 * pair + 1]);
                }
            }
        }
        __syncthreads();
    }
    /* The sums of the block's threads, and of warps that shared the rows, in order. */
    const float scale = e.dropout.threshold ? e.dropout.scale : 1.0f;
    float *sums = (float *)shared;
    if (active) {
        ps_store<8>(sums + (side * e.octets + octet) * 8, sum);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < live * e.d; i += grad_threads) {
        float total = sums[i];
        for (int j = 1; j < e.lanes; j++) {
            total += sums[j * e.octets * 8 + i];
        }
        e.position[(blockIdx.x / e.tiles) * (int64_t)(e.count * e.d) + n0 * e.d + i] = scale * total;
    }
    __syncthreads();
    const int width = e.across * PAIRS * 16;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; j++) {
            float *to =
                sums + (warp / e.across * M * 16 + m * 16 + lane / 4) * width + warp % e.across * PAIRS * 16 + j * 8 + lane % 4 * 2;
            *(float2 *)to = make_float2(product[m][j][0], product[m][j][1]);
            *(float2 *)(to + 8 * width) = make_float2(product[m][j][2], product[m][j][3]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < (e.patch + 1) * e.d; i += grad_threads) {
        const int row = i / e.d, at = row * width + i - row * e.d;
        float total = sums[at];
        for (int j = 1; j < grad_warps / e.across; j++) {
            total += sums[j * M * 16 * width + at];
        }
        e.product[blockIdx.x * (int64_t)((e.patch + 1) * e.d) + i] = scale * total;
    }
}

typedef void embed_gradients_kernel(struct embed_grad);

template <int M, int PAIRS> static embed_gradients_kernel *grad_kernel_of(int sequences)
{
    return sequences == 4 ? embed_gradients<M, PAIRS, 4> : embed_gradients<M, PAIRS, 2>;
}

template <int M> static embed_gradients_kernel *grad_kernel_of(int pairs, int sequences)
{
    return pairs == 1   ? grad_kernel_of<M, 1>(sequences)
           : pairs == 2 ? grad_kernel_of<M, 2>(sequences)
                        : grad_kernel_of<M, 4>(sequences);
}

extern "C" enum ps_status ps_cuda_embed_backward(const struct ps_kernels *k, const struct ps_embed_backward *a)
{
    const char *op = "embed_backward";
    const struct ps_cuda_context *c = ps_cuda(k);
    struct embed_grad e = {};
    const int64_t d = ps_tensor_count(&a->d_bias), patch = ps_cuda_width(&a->patches), positions = ps_tensor_count(&a->d_position),
                  elements = ps_tensor_count(&a->du);
    if (d < 8 || d % 8 != 0 || d > 512 || patch < 1 || patch > 79 || positions < d || positions % d != 0 || positions > INT32_MAX ||
        elements % positions != 0) {
        return ps_fail(PS_UNSUPPORTED,
                       "%s (cuda): %lld elements of d %lld, %lld positions, patches of %lld: up to 79 and a d of 8s up to 512 are "
                       "served",
                       op, (long long)elements, (long long)d, (long long)positions, (long long)patch);
    }
    e.sequences = elements / positions;
    e.count = (int)(positions / d);
    PS_TRY(ps_cuda_expect(op, "du", &a->du, PS_BF16, elements));
    PS_TRY(ps_cuda_expect(op, "patches", &a->patches, PS_BF16, elements / d * patch));
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
    e.du = (const ps_bf16 *)a->du.data;
    e.patches = (const ps_bf16 *)a->patches.data;
    e.d = (int)d;
    e.patch = (int)patch;
    e.by_vectors = patch % 8 == 0;
    e.pieces = e.by_vectors ? e.patch / 8 : e.patch;
    e.by_pieces = ps_divisor_make(e.pieces);
    e.dropout = a->dropout;
    const int most = d >= 1024 ? 1 : (int)(1024 / d); /* 128 octets */
    e.tiles = (e.count + most - 1) / most;
    e.part = (e.count + e.tiles - 1) / e.tiles;
    e.tiles = (e.count + e.part - 1) / e.part;
    e.by_part = ps_divisor_make(e.part);
    e.octets = e.part * e.d / 8;
    e.lanes = grad_threads / e.octets;
    /* Few sequences at once where there would be fewer blocks than places for them otherwise. */
    const int64_t places = (patch < 32 && d <= 128 ? 3 : 1) * c->multiprocessors;
    const int sequences = e.tiles * ((e.sequences + 4 * e.lanes - 1) / (4 * e.lanes)) >= places ? 4 : 2,
              at_once = e.lanes * sequences;
    const int64_t stages = (e.sequences + at_once - 1) / at_once, most_shares = places / e.tiles > 1 ? places / e.tiles : 1;
    e.share = (int)((stages + most_shares - 1) / most_shares) * at_once;
    const int64_t shares = (e.sequences + e.share - 1) / e.share;
    e.rows = (at_once * e.part + 15) / 16 * 16;
    int pairs = (e.d + 15) / 16;
    e.across = pairs > 4 ? 8 : pairs > 2 ? 4 : pairs;
    pairs = (pairs + e.across - 1) / e.across;
    pairs = pairs > 2 ? 4 : pairs;
    e.d_pitch = e.across * pairs * 16 + 8;
    const int m = patch < 16 ? 1 : patch < 32 ? 2 : patch < 48 ? 3 : 5;
    embed_gradients_kernel *kernel = m == 1   ? grad_kernel_of<1>(pairs, sequences)
                                     : m == 2 ? grad_kernel_of<2>(pairs, sequences)
                                     : m == 3 ? grad_kernel_of<3>(pairs, sequences)
                                              : grad_kernel_of<5>(pairs, sequences);
    size_t bytes = (size_t)(e.rows * (e.d_pitch + 2 * (m * 16 + 8))) * sizeof(ps_bf16);
    const size_t sums = (size_t)(grad_warps / e.across * m * 16 * e.across * pairs * 16) * sizeof(float);
    bytes = bytes > sums ? bytes : sums;
    bytes = bytes > grad_threads * 8 * sizeof(float) ? bytes : grad_threads * 8 * sizeof(float);
    if (bytes > (size_t)c->shared_bytes) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): d %lld and patches of %lld need %zu bytes of shared memory", op, (long long)d,
                       (long long)patch, bytes);
    }
    const int64_t wide = (patch + 1) * d;
    PS_TRY(ps_cuda_workspace(c, op, (size_t)(shares * positions + shares * e.tiles * wide) * sizeof(float)));
    e.position = (float *)c->workspace;
    e.product = e.position + shares * positions;
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), op));
    ps_cuda_launch(c, kernel, (unsigned)(shares * e.tiles), grad_threads, bytes, e);
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    const struct ps_cuda_columns jobs[2] = {
        {(float *)a->d_position.data, (float *)a->d_position.data, positions, e.position, shares, positions},
        {(float *)a->d_weight.data, (float *)a->d_bias.data, patch * d, e.product, shares * e.tiles, wide}};
    return ps_cuda_add_columns(c, op, jobs, 2);
}
