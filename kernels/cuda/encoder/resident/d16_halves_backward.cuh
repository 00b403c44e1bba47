/* The backward kernels of encoder/resident/d16_halves.cu. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HALVES_BACKWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HALVES_BACKWARD_CUH

#include "kernels/cuda/encoder/resident/d16_halves_forward.cuh"

namespace ps_resident
{

enum { GRADIENT_R, GRADIENT_U };

/* The sums over rows of dy and dy xhat, xhat that of the last layer's norm 2. */
template <class T>
static __global__ void __launch_bounds__(HIDDEN_WARPS * 32)
    halves_meet(const __grid_constant__ encoder<T> x, const __grid_constant__ struct halves h)
{
    __shared__ struct halves_columns c;
    __shared__ union halves_scratch scratch;
    tile_place<T> at;
    struct halves_sums sums;
    for (int group = (int)blockIdx.x; group * ((int)blockDim.x / 32) < h.row_tiles; group += (int)gridDim.x) {
        const bool first = group == (int)blockIdx.x;
        take_tile(at, x, group);
        uint32_t a[4];
        float g[2][4], s[2][4];
        take_stream(a, stream_at(h, h.layer, SLOT_SUM_2, at), at);
        if (first) {
            ps_grid_begin();
        }
        load_rows(g, (const T *)x.dy, at);
        if (first) { /* forward's last kernel has kept them, and may be the one before */
            set_forward(c, look_kept(x, h, h.layer, NORM_2));
            __syncthreads();
        }
        unpack_operand<T>(s, a);
        affine(s, c.rstd, c.centre, at.q);
        sums.add(g, s, at);
    }
    leave_sums(h, sums, scratch);
}

/* A tile's rows of matrices, two of each: NORMED: what norm 1 gives, ones, the gradient that enters W_2; and STAGED, once or twice:
 * 64 hidden columns and the gradient before the activation. */
enum { HALVES_NORMED = 2 * ROWS_ROW };

static __host__ __device__ constexpr int halves_tile_bytes(int staged)
{
    return HALVES_NORMED + staged * 2 * STAGED_ROW;
}

/* From the gradient of the layer's output to that of what norm 1 gives. Before the wait: all but that gradient and its sums. */
template <class T, enum ps_activation ACTIVATION>
static __global__ void __launch_bounds__(HIDDEN_WARPS * 32)
    halves_hidden_backward(const __grid_constant__ encoder<T> x, const __grid_constant__ struct halves h)
{
    extern __shared__ uint4 shared_memory[];
    const halves_hidden_weights<T> w((char *)shared_memory, x.f);
    struct halves_columns &c = *(struct halves_columns *)((char *)shared_memory + halves_hidden_bytes(x.f));
    union halves_scratch &scratch = *(union halves_scratch *)(&c + 1);
    char *const tiles =
        (char *)shared_memory + halves_front_bytes(halves_hidden_bytes(x.f)) + (int)blockDim.x / 32 * halves_words_bytes(x.f);
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), warps = (int)blockDim.x / 32;
    const int tile_bytes = halves_tile_bytes(h.staged);
    const bool top = h.layer + 1 == x.layers;
    const bool late =
        top && x.n > 48; /* the next kernel: W_h's gradient, a large one, gets the multiprocessors that this leaves free */
    tile_place<T> at;
    uint32_t *const words = hidden_words(shared_memory, x.f, at.lane);
    stage_hidden(w, x, h.layer);
    fill_ones<T>(tiles + warp * tile_bytes, 2, at.lane, 32);
    struct halves_norm norm = {};
    if (!top) {
        norm = look_backward(x, h, h.layer, NORM_2);
    }
    set_forward(c, look_kept(x, h, h.layer, NORM_1));
    ps_copy_wait();
    __syncthreads();
    const float scale = h.hidden_scale / d16_times(ACTIVATION);
    const uint32_t first_tile = ps_shared_address(tiles), staged = first_tile + HALVES_NORMED;
    const uint32_t half_row = (uint32_t)(at.lane / 8 % 2), place = (uint32_t)(at.lane / 16 * MATRIX + at.lane % 8 * 16);
    const uint32_t own_normed = first_tile + warp * tile_bytes + half_row * ROWS_ROW + place;
    const uint32_t own_staged = staged + warp * tile_bytes + half_row * STAGED_ROW + place;
    const struct d16_normed normed = {first_tile, ROWS_ROW, warps, tile_bytes};
    float *const partial = x.sums.partial + ((int64_t)blockIdx.x * x.layers + h.layer) * layer_sums(D, x.f);
    struct halves_sums sums;
    for (int group = (int)blockIdx.x; group * ((int)blockDim.x / 32) < h.row_tiles; group += (int)gridDim.x) {
        const bool first = group == (int)blockIdx.x;
        const int tile = take_tile(at, x, group);
        uint32_t a[4], dm[4], before[4], after[4], bits = 0;
        float g[2][4], s[2][4], dx[2][4];
        if (!first) {
            __syncthreads(); /* the tiles before have been read */
        }
        if (h.hidden_threshold) {
            for (int half = 0; half < x.f / 64; half++) {
                ps_copy_async4(words + half * 32, halves_masks_at(x, h, MASKS_HIDDEN + half, tile, at.lane));
            }
        }
        if (x.threshold) {
            bits = __ldcg(halves_masks_at(x, h, MASKS_Y, tile, at.lane));
        }
        take_stream(after, stream_at(h, h.layer, SLOT_SUM_2, at), at);
        take_stream(before, stream_at(h, h.layer, SLOT_SUM_1, at), at);
        unpack_operand<T>(s, before);
        affine(s, c.scale, c.shift, at.q);
        pack_operand<T>(a, s[0], s[1]);
        ps_stmatrix4_at(own_normed, a);
        ps_copy_wait();
        if (first) {
            ps_grid_wait();
            if (!late) {
                ps_grid_release();
            }
        }
        if (top) {
            if (first) { /* forward's last kernel has kept it, and may be the one before */
                norm = look_backward(x, h, h.layer, NORM_2);
            }
            load_rows(g, (const T *)x.dy, at);
        } else {
            take_stream(dm, gradient_at(h, GRADIENT_U, at), at);
        }
        if (first) {
            begin_backward(c, x, h, h.layer, NORM_2, norm, scratch);
        }
        if (!top) {
            unpack_operand<T>(g, dm);
        }
        unpack_operand<T>(s, after);
        norm_backward(g, s, c, at);
        if (x.threshold) {
            branch_operand<T, true>(dm, g, x.drop_scale * scale, bits, 0);
        } else {
            branch_operand<T, false>(dm, g, x.drop_scale * scale, 0, 0);
        }
        ps_stmatrix4_at(own_normed + 3 * MATRIX, dm);
        clear(dx);
#pragma unroll 1
        for (int half = 0; half < x.f / 64; half += h.staged) {
            const int end = half + h.staged < x.f / 64 ? half + h.staged : x.f / 64;
            if (half > 0) {
                __syncthreads(); /* the columns before have been read */
            }
#pragma unroll 1
            for (int i = half; i < end; i++) {
                const uint32_t own = own_staged + (i - half) * 2 * STAGED_ROW;
                if (h.hidden_threshold) {
                    hidden_backward<true, ACTIVATION>(dx, a, dm, words[i * 32], own, w.columns(i), at);
                } else {
                    hidden_backward<false, ACTIVATION>(dx, a, dm, 0, own, w.columns(i), at);
                }
            }
            ps_publish();
            if (end == x.f / 64) {
                add_rows(g, dx);
                leave_stream<T>(gradient_at(h, GRADIENT_R, at), g, at);
                unpack_operand<T>(s, before);
                affine(s, c.rstd, c.centre, at.q);
                sums.add(g, s, at);
            }
            __syncthreads();
            /* Two products for 64 columns, each by four warps. */
            for (int i = warp / 4; i < 2 * (end - half) && warp < warps / 4 * 4; i += warps / 4) {
                const uint32_t columns = staged + i / 2 * 2 * STAGED_ROW;
                if (i % 2 == 0) {
                    put_columns_sums<T, 1, true>(partial, half + i / 2, x.f, warp, columns, STAGED_ROW, normed, !first, at);
                } else {
                    put_columns_sums<T, 1, false>(partial, half + i / 2, x.f, warp, columns, STAGED_ROW, normed, !first, at);
                }
            }
            if (half == 0 && warp == warps - 1) {
                put_b_2_sums<T, 1>(partial, x.f, normed, !first, at);
            }
        }
    }
    if (late) {
        ps_grid_release();
    }
    leave_sums(h, sums, scratch);
}

/* sum += the operand there. */
template <class T> static __device__ __forceinline__ void add_left(float (&sum)[2][4], const char *from)
{
    uint32_t a[4];
    float v[2][4];
    take_left(a, from);
    unpack_operand<T>(v, a);
    add_rows(sum, v);
}

template <class T> static __device__ __forceinline__ void add_operand(uint32_t (&a)[4], const uint32_t (&b)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = ps_pack<T>(ps_low<T>(a[i]) + ps_low<T>(b[i]), ps_high<T>(a[i]) + ps_high<T>(b[i]));
    }
}

/* A unit's matrices, in rows of so many: COLUMNS: q, k, v and the gradient of merged, two each (a pair of heads each), then the
 * gradients of q, k, v and of W_o's output. ROWS: what the layer reads, ones, merged. SCORES: a head's probabilities, then their
 * gradient. Then q and k of each layer below, two each. */
static __host__ __device__ constexpr int halves_unit_bytes(int tiles, int pieces)
{
    return 2 * tiles * (COLUMNS_ROW + ROWS_ROW + 2 * 2 * tiles * MATRIX + pieces * HALVES_BELOW_ROW);
}

/* Of ANY_TILES, in the scores' place: less [4][2][16 tiles], floats, and where there are layers below each warp's gradients of a
 * head's scores. */
static __host__ __device__ constexpr int halves_any_bytes(int tiles, int pieces)
{
    return 2 * tiles * (COLUMNS_ROW + ROWS_ROW + pieces * HALVES_BELOW_ROW) + tiles * 512 * (pieces > 0 ? 1 + tiles : 1);
}

/* Of the embedding's gradient and patches, in rows of embed_pitch, behind a unit of the first layer. */
static __host__ __device__ __forceinline__ int halves_patches_bytes(int tiles, int patch)
{
    return (tiles * 16 * embed_pitch(D, patch) * 2 + 127) / 128 * 128;
}

/* From there to the gradient of what the layer reads. Before the wait: all but the gradient that the feed-forward part has left,
 * and its sums. EMBED: the first layer's, which gives the embedding's gradients instead. */
template <class T, int TILES, bool EMBED>
static __global__ void __launch_bounds__(halves_warps(TILES) * 32)
    halves_attention_backward(const __grid_constant__ encoder<T> x, const __grid_constant__ struct halves h)
{
    extern __shared__ uint4 shared_memory[];
    halves_attention_weights<T> &w = *(halves_attention_weights<T> *)shared_memory;
    struct halves_columns &c = *(struct halves_columns *)(&w + 1), &input = *(struct halves_columns *)(&c + 1);
    union halves_scratch &scratch = *(union halves_scratch *)(&input + 1);
    char *const units = (char *)shared_memory + halves_front_bytes(sizeof w + sizeof input);
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    place<T, D, TILES> at = unit_place<T, TILES>(x.n);
    constexpr bool ANY = TILES == ANY_TILES;
    const int pieces = !EMBED && h.residual ? h.layer : 0;
    const int matrices = 2 * at.tiles(), scores_row = matrices * MATRIX, to_rows = matrices * COLUMNS_ROW;
    const int to_scores = to_rows + matrices * ROWS_ROW;
    const int to_below = to_scores + (ANY ? at.tiles() * 512 : 2 * matrices * scores_row);
    const auto bytes_of = [&](int below) { return ANY ? halves_any_bytes(at.tiles(), below) : halves_unit_bytes(TILES, below); };
    const int unit_bytes = bytes_of(pieces) + (EMBED ? halves_patches_bytes(at.tiles(), x.embed.patch) : 0);
    T *const embedding = (T *)(units + bytes_of(0));
    stage_attention(w, x, h.layer);
    fill_ones<T>(units + at.unit * unit_bytes + to_rows, matrices, at.tile * 32 + at.lane, at.tiles() * 32);
    const struct halves_norm norm = look_backward(x, h, h.layer, NORM_1);
    if (h.layer > 0) {
        set_forward(input, look_kept(x, h, h.layer - 1, NORM_2));
    }
    ps_copy_wait();
    __syncthreads();
    const uint32_t first_unit = ps_shared_address(units), unit = first_unit + (uint32_t)(at.unit * unit_bytes);
    /* Which of four matrices the lane gives the rows of: a row of matrices, and a column. */
    const uint32_t piece = (uint32_t)(at.lane % 8 * 16), own = (uint32_t)(at.tile * 2 + at.lane / 8 % 2),
                   half = (uint32_t)(at.lane / 16);
    const uint32_t own_columns = unit + own * COLUMNS_ROW + half * MATRIX + piece;
    const uint32_t own_rows = unit + to_rows + own * ROWS_ROW + half * MATRIX + piece;
    const uint32_t own_below = unit + to_below + own * HALVES_BELOW_ROW + half * MATRIX + piece;
    const struct d16_attention_places places = {unit + (uint32_t)(at.lane / 8 * COLUMNS_ROW) + piece,
                                                own_columns,
                                                unit + to_scores + own * scores_row + half * MATRIX + piece,
                                                unit + to_scores + half * scores_row + own * MATRIX + piece,
                                                COLUMNS_ROW,
                                                scores_row,
                                                matrices * scores_row};
    const struct d16_any_places any_places = {unit + columns_first(at.lane, COLUMNS_ROW), unit + rows_first(at.lane, COLUMNS_ROW),
                                              own_columns, unit + to_scores,
                                              units + at.unit * unit_bytes + to_below + matrices * pieces * HALVES_BELOW_ROW +
                                                  (at.tile * at.tiles() * 32 + at.lane) * 16};
    uint32_t last[2];
    last_keys(last, 0xffffu, x.n, at);
    float *const partial = x.sums.partial + ((int64_t)blockIdx.x * x.layers + h.layer) * layer_sums(D, x.f);
    const struct d16_pieces of = {unit + to_below + all_rows<TILES>(at.lane, HALVES_BELOW_ROW), own_below, pieces, HALVES_BELOW_ROW,
                                  matrices * HALVES_BELOW_ROW};
    const bool top = h.layer + 1 == x.layers;
    const int64_t further = h.tiles * SLOT_BYTES;
    struct halves_sums sums;
    for (int group = (int)blockIdx.x; group * x.block_units < (int)x.units; group += (int)gridDim.x) {
        const bool first = group == (int)blockIdx.x;
        at.take(x, group * x.block_units + at.unit);
        const int64_t tile = at.global_tile;
        uint32_t a[4], branch[4], before[4] = {}, after[4], bits = 0, embed_bits = 0xffffffffu;
        float g[2][4], v[2][4], dx[2][4], delta[2][2][2];
        if (!first) {
            __syncthreads(); /* the units before have been read */
        }
        if (EMBED) {
            stage_patches(embedding + at.unit * unit_bytes / 2, x, group * x.block_units + at.unit, at);
            if (x.embed.threshold) {
                embed_bits = __ldcg(embed_masks_at(x, at)) >> at.q;
            }
        }
#pragma unroll
        for (int part = 0; part < 3; part++) {
            take_rows(a, slot_at(h, h.layer, SLOT_Q + part, tile, at.lane), at);
            ps_stmatrix4_at(own_columns + 2 * part * MATRIX, a);
        }
        take_rows(a, slot_at(h, h.layer, SLOT_MERGED, tile, at.lane), at);
        ps_stmatrix4_at(own_rows + 3 * MATRIX, a);
        take_below(own_below, matrices * HALVES_BELOW_ROW, pieces, h, at);
        if (h.layer > 0) {
            take_stream(before, stream_at(h, h.layer - 1, SLOT_SUM_2, at), at);
            unpack_operand<T>(v, before);
            affine(v, input.scale, input.shift, at.q);
        } else {
            load_rows(v, (const T *)x.u, at);
        }
        pack_operand<T>(a, v[0], v[1]);
        ps_stmatrix4_at(own_rows, a);
        take_stream(after, stream_at(h, h.layer, SLOT_SUM_1, at), at);
        if (x.threshold) {
            bits = __ldcg(halves_masks_at(x, h, MASKS_O, tile, at.lane));
        }
        uint32_t more_q[4] = {}, more_k[4] = {}; /* what the layers above have found */
        if (h.residual && !top) {
            float of_q[2][4], of_k[2][4];
            clear(of_q);
            clear(of_k);
#pragma unroll 2
            for (int j = h.layer + 1; j < x.layers; j++) {
                const char *const from = piece_at(h, j, h.layer, tile, at.lane);
                add_left<T>(of_q, from);
                add_left<T>(of_k, from + further);
            }
            pack_operand<T>(more_q, of_q[0], of_q[1]);
            pack_operand<T>(more_k, of_k[0], of_k[1]);
        }
        const char *const logs = slot_at(h, h.layer, SLOT_LOGS, tile, ANY ? at.lane : at.g * 4);
        const float4 sums0 = __ldcg((const float4 *)logs), sums1 = ANY ? float4() : __ldcg((const float4 *)(logs + 32));
        if (first) {
            ps_grid_begin();
        }
        take_stream(a, gradient_at(h, GRADIENT_R, at), at);
        if (first) {
            begin_backward(c, x, h, h.layer, NORM_1, norm, scratch);
        }
        unpack_operand<T>(v, after);
        unpack_operand<T>(g, a);
        norm_backward(g, v, c, at);
        if (x.threshold) {
            branch_operand<T, true>(branch, g, x.drop_scale, bits, 0);
        } else {
            branch_operand<T, false>(branch, g, x.drop_scale, 0, 0);
        }
        clear(dx);
        multiply16_transposed(dx, branch, w.w_o, LD, at);
        pack_operand<T>(a, dx[0], dx[1]);
        ps_stmatrix4_at(own_columns + 6 * MATRIX, a);
        if constexpr (ANY) {
            __syncwarp();
            ps_ldmatrix4_at(a, own_rows + 3 * MATRIX);
            leave_less(unit + to_scores, dx, a, make_float2(sums0.x, sums0.y), x, at);
        }
        at.sync();
        if constexpr (!ANY) {
            ps_ldmatrix4_at(a, own_rows + 3 * MATRIX);
            less_delta<T>(delta, dx, a, at.q);
        }

        uint32_t dq[4], dk[4], dv[4];
        char *const pieces_at = piece_at(h, h.layer, 0, tile, at.lane);
        const struct d16_piece_gradients to = {pieces_at, pieces_at + further, 2 * further};
        if constexpr (ANY) {
            attention_backward(dq, dk, dv, any_places, of, to, last, x, at);
        } else {
            attention_backward(dq, dk, dv, delta, sums0, sums1, places, of, to, last, x.scale, at);
        }
        if (h.residual && !top) {
            add_operand<T>(dq, more_q);
            add_operand<T>(dk, more_k);
        }
        at.sync(); /* q, k, v and merged's gradient have been read */
        ps_stmatrix4_at(own_columns + 6 * MATRIX, branch);
        project_heads_backward(dx, dq, dk, dv, w, own_columns, at);
        add_rows(g, dx);
        if constexpr (EMBED) {
            const int pitch = embed_pitch(D, x.embed.patch);
            pack_operand<T>(a, g[0], g[1]);
            drop_operand(a, embed_bits);
            clear_missing(a, at);
            ps_store_operand(embedding + at.unit * unit_bytes / 2 + at.row * pitch, pitch * 2, a);
            ps_copy_wait();
        } else if (h.layer > 0) {
            leave_stream<T>(gradient_at(h, GRADIENT_U, at), g, at);
            unpack_operand<T>(v, before);
            affine(v, input.rstd, input.centre, at.q);
            sums.add(g, v, at);
        } else {
            store_rows((T *)x.du, g, at);
        }
        ps_publish();
        __syncthreads();
        if (warp >= 8 && warp < 12) {
            put_attention_sums<T, TILES>(partial, partial + (4 * D + 2 * x.f) * D, warp, first_unit, COLUMNS_ROW,
                                         first_unit + to_rows, ROWS_ROW, x.block_units, unit_bytes, !first, at);
        } else if (EMBED) {
            for (int job = warp < 8 ? warp : warp - 4; job < embed_jobs<D>(x); job += (int)blockDim.x / 32 - 4) {
                embed_gradient(x, job, embedding, unit_bytes / 2, first, at);
            }
        }
    }
    if (h.layer > 0) {
        leave_sums(h, sums, scratch);
    }
}

} // namespace ps_resident

#endif
