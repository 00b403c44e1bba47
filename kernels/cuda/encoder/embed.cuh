/* The embedding inside the resident kernels: what ends/embed.cu does in kernels of its own, with the same roundings and draws.
 *
 * Forward: the warps of a unit gather its windows into shared memory, each takes mean and deviation of the sequences it has rows
 * of, and its 16 rows of patches are the operand of mma.sync as they are made; W_P's operand comes straight from L2. Bytes: 4 S L +
 * 2 R P beside u. Flops: 2 R P d.
 *
 * Backward: the gradient of u, masked, and the patches lie side by side in shared memory; patches' du is one more product over the
 * block's rows, with ones for b_P, and W_pos's gradient a sum over the block's sequences. A block's sums [P + 1 + N, d] go to
 * memory (W_P, b_P, W_pos), and the kernel that adds the layers' adds them too. */
#ifndef PS_KERNELS_CUDA_ENCODER_EMBED_CUH
#define PS_KERNELS_CUDA_ENCODER_EMBED_CUH

#include "kernels/cuda/encoder/resident/device.cuh"

namespace ps_resident
{

/* Rows of a block's sums. */
static __host__ __device__ __forceinline__ int embed_rows_of(int patch, int n)
{
    return patch + 1 + n;
}

static inline size_t embed_sum_bytes(const struct ps_encoder_request *e)
{
    return (size_t)embed_rows_of((int)e->patch_len, (int)e->patches) * (size_t)e->d_model * sizeof(float);
}

/* Where the masks of the tile's 16 columns of u are kept, for lane's g: [tiles][d/16][8] words. */
template <class T, int D, int NT>
static __device__ __forceinline__ uint32_t *embed_masks_at(const encoder<T> &x, const place<T, D, NT> &at)
{
    return x.embed.masks + (at.global_tile * sharing(D) + at.share) * 8 + at.g;
}

/* What kernels are told of it; sequences: of a unit. Masks and partial sums are for the caller to add. */
template <class T> static void embed_make(const struct ps_encoder_request *e, int sequences, encoder_embedding<T> *x)
{
    const struct ps_embed_forward *f = e->embed;
    const struct ps_embed_backward *b = e->embed_gradient;
    x->length = (int)e->seq_len;
    x->patch = (int)e->patch_len;
    x->sequences = sequences;
    x->all = (uint32_t)e->sequences;
    if (f) {
        x->weight = (const T *)f->weight.data;
        x->bias = (const float *)f->bias.data;
        x->position = (const float *)f->position.data;
        x->patches = (T *)f->patches.data;
        x->mean = (float *)f->mean.data;
        x->std = (float *)f->std.data;
        x->windows = ps_windows_of(&f->inputs, &f->indices);
        x->state = f->state;
        x->stride = (int)f->stride;
        x->revin = f->revin;
        x->epsilon = (float)f->epsilon;
        x->step = (uint32_t)f->step;
        x->by_channels = ps_divisor_make(f->inputs.size[1]);
        x->by_length = ps_divisor_make(e->seq_len);
        x->by_count = ps_divisor_make(e->patches);
        x->site = f->dropout.site;
        x->threshold = f->dropout.threshold;
        x->below = ps_below(f->dropout.threshold);
        x->minus_below = ps_minus_below(f->dropout.threshold);
        x->drop_scale = f->dropout.threshold ? f->dropout.scale : 1.0f;
    }
    if (b) {
        x->threshold = b->dropout.threshold;
        x->drop_scale = b->dropout.threshold ? b->dropout.scale : 1.0f;
        x->patches = (T *)b->patches.data;
        x->d_weight = (float *)b->d_weight.data;
        x->d_bias = (float *)b->d_bias.data;
        x->d_position = (float *)b->d_position.data;
    }
}

/* ---- forward ---- */

/* Where sequence `sequence`'s part of its window begins; NULL when there is no such window. */
template <class T>
static __device__ __forceinline__ const float *window_at(const encoder<T> &x, const struct ps_cuda_windows &w, uint64_t cursor,
                                                         uint32_t sequence)
{
    const bool live = sequence < x.embed.all;
    const uint32_t b = ps_divide(live ? sequence : 0, x.embed.by_channels);
    const uint32_t c = (live ? sequence : 0) - b * x.embed.by_channels.divisor;
    const uint64_t i = cursor + b;
    const bool known = i < (uint64_t)w.index_count;
    const int64_t window = w.indices[known ? i : 0];
    return known && window >= 0 && window < w.count ? w.data + window * w.by_window + c * w.by_channel : NULL;
}

/* The windows of unit u to values [sequences][length], from value `from` on, by the unit's warps; NaN for what is not there. */
template <class T, int D, int NT>
static __device__ __forceinline__ void gather_windows(float *values, const encoder<T> &x, int64_t u, uint64_t cursor, int from,
                                                      const place<T, D, NT> &at)
{
    constexpr int FLIGHT = 4; /* loads under way: no branch may stand between them */
    const int team = at.tiles() * sharing(D) * 32;
    const struct ps_cuda_windows &w = x.embed.windows;
    const int length = x.embed.length, total = (NT == 1 ? x.embed.sequences : 1) * length;
    const uint32_t first = (uint32_t)u * (NT == 1 ? x.embed.sequences : 1);
    const float *const only = NT == 1 ? NULL : window_at(x, w, cursor, first);
#pragma unroll 1
    for (int begin = from + (at.tile * sharing(D) + at.share) * 32 + at.lane; begin < total; begin += FLIGHT * team) {
        float v[FLIGHT];
#pragma unroll
        for (int j = 0; j < FLIGHT; j++) {
            const int i = begin + j * team < total ? begin + j * team : 0;
            const int s = NT == 1 ? (int)ps_divide(i, x.embed.by_length) : 0;
            const float *window = NT == 1 ? window_at(x, w, cursor, first + s) : only;
            v[j] = *(window ? window + (i - s * length) * w.by_time : w.data);
            v[j] = window ? v[j] : NAN;
        }
#pragma unroll
        for (int j = 0; j < FLIGHT; j++) {
            if (begin + j * team < total) {
                values[begin + j * team] = v[j];
            }
        }
    }
}

/* W_P's operand: rows from .. from + 15, the warp's 16 columns; zero from row P on. */
template <class T, int D, int NT>
static __device__ __forceinline__ void load_embed_weight(ps_pair<T> (&b)[2][2], const encoder<T> &x, int from,
                                                         const place<T, D, NT> &at)
{
    const uint16_t *const p = (const uint16_t *)x.embed.weight + at.share * 16 + at.g;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int k = from + 8 * i + 2 * at.q;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const uint32_t low = k < x.embed.patch ? p[k * D + t * 8] : 0, high = k + 1 < x.embed.patch ? p[k * D + D + t * 8] : 0;
            b[t][i] = low | high << 16;
        }
    }
}

/* Where the warp's rows are: sequence of the unit, patch. */
template <class T, int D, int NT>
static __device__ __forceinline__ void embed_places(int (&sequence)[2], int (&n)[2], const encoder<T> &x, const place<T, D, NT> &at)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = at.tile * 16 + at.g + 8 * h;
        sequence[h] = NT == 1 ? (int)ps_divide(i, x.embed.by_count) : 0;
        n[h] = at.here[h] ? i - sequence[h] * x.n : 0;
    }
}

/* sum = b_P and W_pos of patches n. */
template <class T, int D, int NT>
static __device__ __forceinline__ void load_embed_sum(float (&sum)[2][4], const int (&n)[2], const encoder<T> &x,
                                                      const place<T, D, NT> &at)
{
    const auto &e = x.embed;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const int column = at.share * 16 + t * 8 + at.q * 2;
        const float2 add = *(const float2 *)(e.bias + column);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 more = *(const float2 *)(e.position + n[h] * D + column);
            sum[t][2 * h] = add.x + more.x;
            sum[t][2 * h + 1] = add.y + more.y;
        }
    }
}

/* The operand of the warp's patches, values `from` .. from + 15 of each. */
template <class T, int D, int NT>
static __device__ __forceinline__ void patch_operand(ps_pair<T> (&a)[4], int from, const float *values, const int (&sequence)[2],
                                                     const int (&n)[2], const float (&centre)[2], const float (&factor)[2],
                                                     const encoder<T> &x, const place<T, D, NT> &at)
{
    const auto &e = x.embed;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int h = i % 2, k = from + i / 2 * 8 + 2 * at.q;
        const float *const value = values + (at.here[h] ? sequence[h] : 0) * e.length;
        float z[2];
#pragma unroll
        for (int j = 0; j < 2; j++) { /* beyond the window's end the last value repeats */
            const int l = n[h] * e.stride + k + j;
            z[j] = (value[l < e.length ? l : e.length - 1] - centre[h]) * factor[h];
            z[j] = at.here[h] && k + j < e.patch ? z[j] : 0.0f;
        }
        a[i] = ps_pack<T>(z[0], z[1]);
    }
}

/* rows = drop(patches W_P + sum), to x.u too, and the patches to memory. a, weight: the operands of the first values of the patches
 * and W_P's first rows. S: of x.u, which is written where it is T. */
template <bool DROP, class S, class T, int D, int NT>
static __device__ __forceinline__ void embed_product(ps_pair<T> (&rows)[4], ps_pair<T> (&a)[4], float (&sum)[2][4],
                                                     ps_pair<T> (&weight)[2][2], uint32_t bits, const float *values,
                                                     const int (&sequence)[2], const int (&n)[2], const float (&centre)[2],
                                                     const float (&factor)[2], const encoder<T> &x, const place<T, D, NT> &at)
{
    const auto &e = x.embed;
#pragma unroll 1
    for (int from = 0;;) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int h = i % 2, k = from + i / 2 * 8 + 2 * at.q;
            if (at.share == 0 && at.here[h] && k < e.patch) {
                T *const patch = e.patches + (at.first + 8 * h) * e.patch + k;
                if (e.patch % 2 == 0) {
                    ps_put_operand(patch, a[i]);
                } else {
                    ps_put_bits(patch, a[i], 0);
                    if (k + 1 < e.patch) {
                        ps_put_bits(patch + 1, a[i], 1);
                    }
                }
            }
        }
        ps_mma16<T>(sum[0], a, weight[0][0], weight[0][1], sum[0]);
        ps_mma16<T>(sum[1], a, weight[1][0], weight[1][1], sum[1]);
        from += 16;
        if (from >= e.patch) {
            break;
        }
        load_embed_weight(weight, x, from, at);
        patch_operand(a, from, values, sequence, n, centre, factor, x, at);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int h = i % 2, t = i / 2;
        rows[i] = at.here[h] ? ps_pack<T>(sum[t][2 * h] * e.drop_scale, sum[t][2 * h + 1] * e.drop_scale) : ps_pair<T>();
    }
    if (DROP) {
        drop_operand(rows, bits);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (std::is_same<S, T>::value && at.here[i % 2]) { /* else it is not asked for */
            ps_put_operand((T *)x.u + (at.first + i % 2 * 8) * D + at.share * 16 + i / 2 * 8 + at.q * 2, rows[i]);
        }
    }
}

/* What the embedding of a unit needs but for its windows, patches n: on its way. */
template <class T> struct embed_ready {
    uint64_t cursor;
    float sum[2][4];
    ps_pair<T> weight[2][2];
    uint32_t bits;
};

/* The masks of the tile's 16 columns of u, as draw_masks gives them. */
template <class T, int D, int NT>
static __device__ __forceinline__ uint32_t embed_draw(const encoder<T> &x, uint64_t step, const place<T, D, NT> &at)
{
    const uint32_t row = x.rows_before + (uint32_t)at.first + at.q / 2 * 8;
    return draw_masks(x, x.embed.below, x.embed.minus_below, step, x.embed.site, row * (D / 8) + at.share * 2 + at.q % 2, at.q);
}

/* Asks for what embed_product will use; it waits for none of it. */
template <bool DROP, class T, int D, int NT>
static __device__ __forceinline__ void embed_begin(embed_ready<T> &r, const int (&n)[2], const encoder<T> &x, uint64_t step,
                                                   const place<T, D, NT> &at)
{
    const auto &e = x.embed;
    r.cursor = e.state->cursor;
    r.bits = 0xffffffffu;
    load_embed_sum(r.sum, n, x, at);
    load_embed_weight(r.weight, x, 0, at);
    if (DROP) {
        r.bits = embed_draw(x, step, at);
        if (e.masks && at.q == 0 && at.global_tile < x.units * NT) {
            *embed_masks_at(x, at) = r.bits;
        }
        r.bits >>= at.q;
    }
}

/* rows = the warp's 16 rows and columns of u, as an operand; also to x.u, with patches, mean and std. All warps of unit u take part
 * at once; `values` is scratch of the unit, free for others after the next wait for one another. */
template <bool DROP, class T, int D, int NT>
static __device__ __forceinline__ void embed_unit(ps_pair<T> (&rows)[4], float *values, const encoder<T> &x, int64_t u,
                                                  uint64_t step, const place<T, D, NT> &at)
{
    const auto &e = x.embed;
    embed_ready<T> r;
    int sequence[2], n[2];
    embed_places(sequence, n, x, at);
    embed_begin<DROP>(r, n, x, step, at);
    gather_windows(values, x, u, r.cursor, 0, at); /* waits for three loads after one another */
    at.sync();
    float centre[2] = {0, 0}, factor[2] = {1, 1};
    const int sequences = NT == 1 ? e.sequences : 1;
    const uint32_t first = (uint32_t)u * sequences;
    for (int s = 0; s < sequences; s++) {
        float mean = 0.0f, deviation = 1.0f;
        if (e.revin) {
            ps_window_statistics<12, true>(values + s * e.length, e.length, e.epsilon, mean, deviation);
        }
        if (at.lane == 0 && at.tile == 0 && at.share == 0 && first + s < e.all) {
            e.mean[first + s] = mean;
            e.std[first + s] = deviation;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            centre[h] = NT > 1 || sequence[h] == s ? mean : centre[h];
            factor[h] = NT > 1 || sequence[h] == s ? 1.0f / deviation : factor[h];
        }
    }
    ps_pair<T> a[4];
    patch_operand(a, 0, values, sequence, n, centre, factor, x, at);
    embed_product<DROP, T>(rows, a, r.sum, r.weight, r.bits, values, sequence, n, centre, factor, x, at);
}

/* ---- backward ---- */

/* The operand g, zero where dropped or where there is no row; not scaled yet. */
template <class T, int D, int NT>
static __device__ __forceinline__ void embed_operand(ps_pair<T> (&a)[4], const float (&g)[2][4], const encoder<T> &x, bool drop,
                                                     const place<T, D, NT> &at)
{
    pack_operand<T>(a, g[0], g[1]);
    if (drop) {
        drop_operand(a, at.global_tile < x.units * NT ? *embed_masks_at(x, at) >> at.q : 0);
    }
}

/* Columns 8 piece .. + 7 of a row: the patch (NULL: a row of zeros), then zeros; with n >= 0 ones in columns P and P + 1 + n. The
 * copy may still be under way (ps_copy_wait). */
template <class T> static __device__ __forceinline__ void stage_patch(T *to, const T *row, int piece, int patch, int n)
{
    const int from = piece * 8;
    if (row && from < patch && patch % 8 == 0) {
#pragma unroll
        for (int j = 0; j < 8; j += ps_vector<T>) {
            ps_copy_async(to + j, row + from + j);
        }
        return;
    }
    ps_pair<T> word[4] = {};
    if (row) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int k = from + j;
            const uint32_t v = k < patch                                      ? *(const uint16_t *)(row + k)
                               : n >= 0 && (k == patch || k == patch + 1 + n) ? ps_one<T>
                                                                              : 0;
            word[j / 2] |= v << j % 2 * 16;
        }
    }
    *(uint4 *)to = make_uint4(word[0], word[1], word[2], word[3]);
}

/* Columns of patches in shared memory; elements of a row of du and patches there. */
static __host__ __device__ __forceinline__ int patch_columns(int patch)
{
    return (patch + 15) / 16 * 16;
}

static __host__ __device__ __forceinline__ int embed_pitch(int d, int patch)
{
    return d + patch_columns(patch) + 8;
}

/* Begins to copy the patches of unit u behind the d columns of `to` [rows][embed_pitch]. */
template <class T, int D, int NT>
static __device__ __forceinline__ void stage_patches(T *to, const encoder<T> &x, int64_t u, const place<T, D, NT> &at)
{
    constexpr int SHARE = 2 * sharing(D); /* threads a row */
    const int thread = (at.tile * sharing(D) + at.share) * 32 + at.lane, i = thread / SHARE,
              pieces = patch_columns(x.embed.patch) / 8;
    const int64_t row = u * x.unit_rows + i;
    const bool here = u < x.units && i < x.unit_rows && row < x.rows;
    const T *const from = here ? x.embed.patches + row * x.embed.patch : NULL;
    to += i * embed_pitch(D, x.embed.patch) + D;
    for (int piece = thread % SHARE; piece < pieces; piece += SHARE) {
        stage_patch(to + piece * 8, from, piece, x.embed.patch, -1);
    }
}

/* Jobs of a warp: 16 rows by 8 columns of W_P's gradient each (b_P's with the first), then 32 pairs of columns of W_pos's each. */
template <int D, class T> static __device__ __forceinline__ int embed_jobs(const encoder<T> &x)
{
    return patch_columns(x.embed.patch) / 16 * (D / 8) + (x.n * (D / 2) + 31) / 32;
}

static __device__ __forceinline__ void add_pair(float *to, float low, float high, float scale, bool first)
{
    float2 v = make_float2(low * scale, high * scale);
    if (!first) {
        const float2 old = *(const float2 *)to;
        v.x += old.x;
        v.y += old.y;
    }
    *(float2 *)to = v;
}

/* One of them, to or onto the block's sums; staged [units][rows][embed_pitch], unit elements apart. */
template <class T, int D, int NT>
static __device__ __forceinline__ void embed_gradient(const encoder<T> &x, int job, const T *staged, int unit, bool first,
                                                      const place<T, D, NT> &at)
{
    const int patch = x.embed.patch, pitch = embed_pitch(D, patch), products = patch_columns(patch) / 16 * (D / 8);
    float *const sums = x.embed.partial + (int64_t)blockIdx.x * (embed_rows_of(patch, x.n) * D);
    if (job < products) {
        const int row = job / (D / 8) * 16, column = job % (D / 8) * 8;
        const ps_pair<T> ones[4] = {ps_ones<T>(), ps_ones<T>(), ps_ones<T>(), ps_ones<T>()};
        const T *pa = lane_a_transposed(staged, pitch, at) + D + row, *pb = lane_b<2>(staged, pitch, at) + column;
        float c[4] = {0, 0, 0, 0}, bias[4] = {0, 0, 0, 0};
        for (int i = 0; i < x.block_units; i++, pa += unit, pb += unit) {
#pragma unroll
            for (int tile = 0; tile < at.tiles(); tile++) {
                ps_pair<T> a[4], b[2];
                ps_ldmatrix4_transposed(a, pa + tile * 16 * pitch);
                load_b(b, pb + tile * 16 * pitch);
                ps_mma16<T>(c, a, b[0], b[1], c);
                ps_mma16<T>(bias, ones, b[0], b[1], bias);
            }
        }
        float *const to = sums + row * D + column + at.q * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (row + at.g + 8 * h < patch) {
                add_pair(to + (at.g + 8 * h) * D, c[2 * h], c[2 * h + 1], x.embed.drop_scale, first);
            }
        }
        if (row == 0 && at.g == 0) {
            add_pair(to + patch * D, bias[0], bias[1], x.embed.drop_scale, first);
        }
        return;
    }
    const int pair = (job - products) * 32 + at.lane, n = pair / (D / 2), column = pair % (D / 2) * 2;
    if (n < x.n) {
        float low = 0, high = 0;
        for (int i = 0; i < x.block_units; i++) {
            for (int row = n; row < x.unit_rows; row += x.n) {
                const ps_pair<T> v = *(const ps_pair<T> *)(staged + i * unit + row * pitch + column);
                low += ps_low<T>(v);
                high += ps_high<T>(v);
            }
        }
        add_pair(sums + (patch + 1 + n) * D + column, low, high, x.embed.drop_scale, first);
    }
}

/* Where a float4 of [P + 1 + N, d] stands among the gradients. */
template <int D, class T> static __device__ __forceinline__ float4 *embed_item_at(const encoder<T> &x, int item)
{
    const int weights = x.embed.patch * D / 4, positions = weights + D / 4;
    return item < weights     ? (float4 *)x.embed.d_weight + item
           : item < positions ? (float4 *)x.embed.d_bias + item - weights
                              : (float4 *)x.embed.d_position + item - positions;
}

/* The blocks' sums to the gradients, 64 float4 a block of THREADS threads at once, in THREADS / 64 parts and then those in order;
 * parts [THREADS]. This block is `block` of `blocks`. */
template <int D, int THREADS, int FLIGHT, class T>
static __device__ __forceinline__ void add_embedding(const encoder<T> &x, float4 *parts, int block, int blocks)
{
    constexpr int PARTS = THREADS / 64;
    const int items = embed_rows_of(x.embed.patch, x.n) * D / 4, thread = (int)threadIdx.x;
    for (int begin = block * 64; begin < items; begin += blocks * 64) {
        const int item = begin + thread % 64;
        const bool live = thread < 64 && item < items;
        const float4 *const from = (const float4 *)x.embed.partial + item;
        float4 *const to = live ? embed_item_at<D>(x, item) : NULL;
        float4 old = live ? *to : make_float4(0, 0, 0, 0);
        float4 sum = sum_every<FLIGHT, true>(from, items, thread / 64, PARTS, item < items ? x.blocks : 0);
        __syncthreads();
        parts[thread] = sum;
        __syncthreads();
        if (live) {
            add_parts(sum, parts + thread, 64, PARTS);
            add_four(old, sum);
            *to = old;
        }
    }
}

} // namespace ps_resident

#endif
