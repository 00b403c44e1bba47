/* The backward of encoder/resident/d16_e4_f128.cu; beside it warps that draw the masks of the next step and add the blocks' sums.
 */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_BACKWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_BACKWARD_CUH

#include "kernels/cuda/encoder/embed.cuh"
#include "kernels/cuda/encoder/resident/d16_attention.cuh"
#include "kernels/cuda/encoder/resident/d16_hidden.cuh"

namespace ps_resident
{

/* A unit's matrices, 6 rows of so many:
 * COLUMNS: q, k, v and the gradient of merged, two each (a pair of heads each); then the gradients of q, k, v and of W_o's output.
 * ROWS: xhat of LN1, ones, merged. NORMED: xhat of LN2, ones, the gradient of W_2's output.
 * STAGED: 64 columns of d_ff and of their gradient. In its place, at its end, a head's probabilities and their gradient, 6 matrices
 * each; before those the gradient of W_o's output, and, in the first layer, from NORMED on, the embedding's operands. */
enum {
    SCORES_ROW = 6 * MATRIX,
    TO_ROWS = 6 * COLUMNS_ROW,
    TO_NORMED = TO_ROWS + 6 * ROWS_ROW,
    TO_STAGED = TO_NORMED + 6 * ROWS_ROW,
    UNIT_BYTES = TO_STAGED + 6 * STAGED_ROW,
    TO_SCORES = UNIT_BYTES - 12 * SCORES_ROW,
    TO_GRADIENTS = 6 * SCORES_ROW /* from SCORES: of the scores */
};

/* The threads' stores to shared memory are seen by all of them, wgmma too. */
static __device__ __forceinline__ void publish(int threads)
{
    ps_publish();
    ps_barrier(0, threads);
}

/* The operand gamma xhat + beta of xhat as it is kept. */
template <class T>
static __device__ __forceinline__ void scale_shift_kept(uint32_t (&a)[4], const uint32_t (&xhat)[4], const float *gamma,
                                                        const float *beta, int q)
{
    float v[2][4];
    unpack_operand<T>(v, xhat);
    scale_shift<T>(a, v, gamma, beta, q);
}

/* What backward reads first of a layer. */
struct kept_first {
    uint4 xhat;
    uint32_t masks[3];
    float2 rstd; /* of LN2 */
};

template <bool DROP, class T>
static __device__ __forceinline__ void read_first(struct kept_first &k, const encoder<T> &x, uint64_t step, int layer,
                                                  const d16_place<T> &at)
{
    const char *const p = kept_at(x, layer, at);
    k.xhat = *(const uint4 *)(p + KEPT_XHAT2 + at.lane * 16);
    k.rstd = *(const float2 *)(p + KEPT_ROWS + (at.g * 4 + 1) * 16 + 8);
    if constexpr (DROP) {
        const uint32_t *const m = masks_at(x, step, layer, at.global_tile, at.lane);
        k.masks[0] = m[0], k.masks[1] = m[32], k.masks[2] = m[64];
    }
}

/* Barriers beside 0 and those of the units: of the threads that draw, and of all: those that draw have copied weights, and do not
 * wait. */
enum { WEIGHTS_BARRIER = 14, DRAWING_BARRIER };

/* A block's sums of a layer, in pieces of 16 bytes: the attention's, the feed-forward's, the vectors of each. */
enum { SUMS = layer_sums(D, F) / 4, OF_ATTENTION = 4 * D * D / 4, OF_HIDDEN = 2 * F * D / 4 };
enum { TO_VECTORS = OF_ATTENTION + OF_HIDDEN, VECTORS_OF_ATTENTION = 4 * D / 4, VECTORS_OF_HIDDEN = (F + D) / 4 };
/* Warps that write them. */
enum { HIDDEN_WARPS = 9, ATTENTION_WARPS = 4 };

/* In shared memory behind the units: a place a thread that draws, and a barrier for each section of the sums: [layer][hidden,
 * attention]. */
static __host__ __device__ constexpr int helper_bytes(int layers)
{
    return DRAWING * 16 + layers * 2 * 8;
}

/* Sections in the order in which they come: a layer's feed-forward first, and not the first one's attention. */
template <class T> static __device__ __forceinline__ int section_at(const encoder<T> &x, int i)
{
    return 2 * (x.layers - 1 - i / 2) + i % 2;
}

/* The masks of a step's block, by the DRAWING threads that take no part in the rest: what the schedulers with a warp fewer have
 * time for. `warp` of theirs. Between tiles the first of them announces sections of the sums; the result is how many it has. */
template <class T>
static __device__ __forceinline__ int draw_next(const encoder<T> &x, uint64_t step, int warp, uint32_t barriers,
                                                const d16_place<T> &at)
{
    const int64_t unit = (int64_t)blockIdx.x * x.block_units;
    int announced = 0;
#pragma unroll 1
    for (int i = warp; i < x.block_units * NT * x.layers; i += DRAWING / 32) {
        const int layer = i / (x.block_units * NT), tile = i - layer * (x.block_units * NT);
        uint32_t words[3], *const masks = masks_at(x, step, layer, unit * NT + tile, at.lane);
        draw_tile(words, x, step, layer, (uint32_t)((unit + tile / NT) * x.n + tile % NT * 16 + at.g), at.q);
        masks[0] = words[0], masks[32] = words[1], masks[64] = words[2];
        if (warp == 0 && at.lane == 0 && announced < 2 * x.layers - 1 &&
            ps_mbarrier_ended(barriers + section_at(x, announced) * 8, 0)) {
            ps_count_up(x.sums.finished + section_at(x, announced++), 1);
        }
    }
    ps_barrier(DRAWING_BARRIER, DRAWING);
    if (warp == 0 && at.lane == 0) {
        *tag_at(x, step) = tag_of(x, step);
    }
    return announced;
}

/* Adds the block's slice of what all blocks have left in partial, by the threads that draw; `thread` of theirs,
 * the first of which has announced so many of the block's sections. */
template <class T>
static __device__ __forceinline__ void sum_sections(const encoder<T> &x, float4 *parts, uint32_t barriers, int announced,
                                                    int thread)
{
    const int blocks = (int)gridDim.x;
    const int64_t stride = (int64_t)x.layers * SUMS;
#pragma unroll 1
    for (int i = 0; i < 2 * x.layers - 1; i++) {
        const int section = section_at(x, i), l = section / 2;
        const bool hidden = section % 2 == 0;
        if (thread == 0) {
            if (i >= announced) {
                ps_mbarrier_wait(barriers + section * 8, 0);
                ps_count_up(x.sums.finished + section, 1);
            }
            while (ps_look(x.sums.finished + section) < (unsigned)blocks) {
            }
        }
        ps_barrier(DRAWING_BARRIER, DRAWING);
        const int matrices = hidden ? OF_HIDDEN : OF_ATTENTION,
                  items = matrices + (hidden ? VECTORS_OF_HIDDEN : VECTORS_OF_ATTENTION);
        const int each = (items + blocks - 1) / blocks, end = min(((int)blockIdx.x + 1) * each, items);
        const int lanes = min(each, (int)DRAWING), shares = DRAWING / lanes, share = thread / lanes;
        const float4 *const from = (const float4 *)x.sums.partial + l * SUMS;
        for (int first = (int)blockIdx.x * each; first < end; first += lanes) {
            const int item = first + thread - share * lanes;
            const int at = item < matrices ? item + (hidden ? OF_ATTENTION : 0)
                                           : item - matrices + TO_VECTORS + (hidden ? VECTORS_OF_ATTENTION : 0);
            const bool mine = item < end && share < shares;
            float4 sum = sum_every<8, false>(from + at, stride, share, shares, mine ? blocks : 0);
            parts[thread] = sum;
            ps_barrier(DRAWING_BARRIER, DRAWING);
            if (share == 0 && mine) {
                add_parts(sum, parts + thread, lanes, shares);
                ((float4 *)x.sums.summed)[l * SUMS + at] = sum;
            }
            ps_barrier(DRAWING_BARRIER, DRAWING);
        }
    }
}

template <class T, bool DROP>
static __global__ void __launch_bounds__(THREADS + DRAWING) d16_backward(const __grid_constant__ encoder<T> x)
{
    extern __shared__ uint4 shared_memory[];
    char *const weights = (char *)shared_memory;
    d16_place<T> at;
    const uint32_t units = ps_shared_address(weights + x.layers * LAYER_BYTES), unit = units + (uint32_t)(at.unit * UNIT_BYTES);
    /* Which of four matrices the lane gives the rows of: a row of matrices, and a column. */
    const uint32_t piece = (uint32_t)(at.lane % 8 * 16), odd = (uint32_t)(at.lane / 8 % 2), half = (uint32_t)(at.lane / 16);
    const uint32_t all_columns = unit + (uint32_t)(at.lane / 8 * COLUMNS_ROW) + piece;
    const uint32_t own_columns = unit + ((uint32_t)(at.tile * 2) + odd) * COLUMNS_ROW + half * MATRIX + piece;
    const uint32_t own_rows = unit + TO_ROWS + ((uint32_t)(at.tile * 2) + odd) * ROWS_ROW + half * MATRIX + piece;
    const uint32_t own_staged = unit + TO_STAGED + ((uint32_t)(at.tile * 2) + odd) * STAGED_ROW + half * MATRIX + piece;
    const uint32_t own_branch =
        unit + TO_SCORES - 48 * D * 2 + (uint32_t)(at.tile * 2 + at.lane / 16) * 2 * MATRIX + odd * MATRIX + piece;
    const uint32_t own_scores = unit + TO_SCORES + ((uint32_t)(at.tile * 2) + odd) * SCORES_ROW + half * MATRIX + piece;
    const uint32_t own_keys = unit + TO_SCORES + half * SCORES_ROW + ((uint32_t)(at.tile * 2) + odd) * MATRIX + piece;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    stage_weights(x, (d16_weights<T> *)weights, 0, x.layers); /* written before the forward, like the step */
    const uint64_t step = DROP ? x.state->step : 0;
    at.take(x, (int64_t)blockIdx.x * x.block_units + at.unit);
    ps_grid_wait();
    const int threads = x.block_units * NT * 32; /* but those that draw */
    char *const helpers = weights + x.layers * LAYER_BYTES + x.block_units * UNIT_BYTES;
    const uint32_t section_barriers = ps_shared_address(helpers) + DRAWING * 16;
    if ((int)threadIdx.x >= threads) {
        const int thread = (int)threadIdx.x - threads;
        for (int i = thread; i < 2 * x.layers; i += DRAWING) {
            ps_mbarrier_init(section_barriers + i * 8, i % 2 ? ATTENTION_WARPS : HIDDEN_WARPS);
        }
        ps_copy_wait();
        ps_barrier_arrive(WEIGHTS_BARRIER, (int)blockDim.x);
        if constexpr (DROP) {
            const int announced = draw_next(x, step + 1, warp - threads / 32, section_barriers, at);
            sum_sections(x, (float4 *)helpers, section_barriers, announced, thread);
        }
        return;
    }
    fill_ones<T>(weights + x.layers * LAYER_BYTES + at.unit * UNIT_BYTES + TO_ROWS, 12, (int)threadIdx.x % (NT * 32),
                 NT * 32); /* in ROWS and NORMED */
    const struct d16_attention_places places = {all_columns, own_columns, own_scores,  own_keys,
                                                COLUMNS_ROW, SCORES_ROW,  TO_GRADIENTS};
    float g[2][4];
    struct kept_first kept;
    load_rows(g, (const T *)x.dy, at);
    read_first<DROP>(kept, x, step, x.layers - 1, at);
    ps_copy_wait();
    ps_barrier(WEIGHTS_BARRIER, (int)blockDim.x);
#pragma unroll 1
    for (int l = x.layers - 1; l >= 0; l--) {
        const d16_weights<T> &w = ((const d16_weights<T> *)weights)[l];
        float *const sums = x.sums.partial + ((int64_t)blockIdx.x * x.layers + l) * layer_sums(D, F);
        float *const bias_sums = sums + (4 * D + 2 * F) * D;
        const char *const keep = kept_at(x, l, at);
        if (l == 0) { /* W_h's gradient has had the free multiprocessors */
            ps_grid_release();
        }
        uint32_t xhat[4] = {kept.xhat.x, kept.xhat.y, kept.xhat.z, kept.xhat.w}, a[4];
        const uint32_t row_bits = kept.masks[2];
        float dx[2][4];

        /* y = r + drop(hidden W_2 + b_2) */
        {
            const float rstd[2] = {kept.rstd.x, kept.rstd.y};
            uint32_t dm[4];
            ps_stmatrix4_at(own_rows + TO_NORMED - TO_ROWS, xhat);
            scale_shift_kept<T>(a, xhat, w.ln2_gamma, w.ln2_beta, at.q);
            branch_operand<T, DROP>(dm, g, x.drop_scale * x.half_scale, row_bits, 1);
            ps_stmatrix4_at(own_rows + TO_NORMED - TO_ROWS + 3 * MATRIX, dm);
            clear(dx);
            const struct d16_normed normed = {units + TO_NORMED, ROWS_ROW, x.block_units, UNIT_BYTES};
#pragma unroll 1
            for (int stage = 0; stage < 2; stage++) {
                const uint32_t bits = stage ? kept.masks[1] : kept.masks[0];
                if (stage > 0) {
                    ps_barrier(0, threads);
                }
                hidden_backward<DROP, PS_GELU_TANH>(dx, a, dm, bits, own_staged, hidden_columns(w, stage), at);
                publish(threads);
                if (warp < 4) {
                    put_columns_sums<T, NT, true>(sums, stage, F, warp, units + TO_STAGED, STAGED_ROW, normed, false, at);
                } else if (warp < 8) {
                    put_columns_sums<T, NT, false>(sums, stage, F, warp, units + TO_STAGED, STAGED_ROW, normed, false, at);
                } else if (warp == 8 && stage == 0) {
                    put_b_2_sums<T, NT>(sums, F, normed, false, at);
                }
                if (DROP && warp < HIDDEN_WARPS && stage == (warp < 8)) { /* its sums of this half of the layer are written */
                    __syncwarp();
                    if (at.lane == 0) {
                        ps_mbarrier_arrive(section_barriers + 2 * l * 8);
                    }
                }
            }
            ps_ldmatrix4_at(xhat, own_rows + TO_NORMED - TO_ROWS);
            normalise_backward(g, dx, w.ln2_gamma, xhat, rstd, NULL, at);
        }

        /* r = u + drop(merged W_o + b_o) */
        uint32_t keys_there[2];
        last_keys(keys_there, 0xffffu, x.n, at);
        const uint4 kept_xhat = *(const uint4 *)(keep + KEPT_XHAT1 + at.lane * 16);
        const uint4 kept_merged = *(const uint4 *)(keep + KEPT_MERGED + at.lane * 16);
        const float4 sums0 = *(const float4 *)(keep + KEPT_ROWS + at.g * 64),
                     sums1 = *(const float4 *)(keep + KEPT_ROWS + at.g * 64 + 32);
        float delta[2][2][2]; /* less sum_j A dA, of head, pair, row */
        uint32_t branch[4];
        branch_operand<T, DROP>(branch, g, x.drop_scale, row_bits, 0);
        clear(dx);
        multiply16_transposed(dx, branch, w.w_o, LD, at);
        {
            const uint32_t merged[4] = {kept_merged.x, kept_merged.y, kept_merged.z, kept_merged.w};
            ps_stmatrix4_at(own_rows + 3 * MATRIX, merged);
            less_delta<T>(delta, dx, merged, at.q);
        }
        pack_operand<T>(a, dx[0], dx[1]);
        ps_stmatrix4_at(own_columns + 6 * MATRIX, a);
        xhat[0] = kept_xhat.x, xhat[1] = kept_xhat.y, xhat[2] = kept_xhat.z, xhat[3] = kept_xhat.w;
        ps_stmatrix4_at(own_rows, xhat);
        scale_shift_kept<T>(a, xhat, w.ln1_gamma, w.ln1_beta, at.q);
#pragma unroll
        for (int part = 0; part < 3; part++) {
            uint32_t packed[4];
            project16(dx, a, w.w_qkv + part * D, LD_QKV, w.b_qkv + part * D / 2, at);
            if (part == 0) {
                scale_rows(dx, x.scale_log2e);
            }
            pack_operand<T>(packed, dx[0], dx[1]);
            ps_stmatrix4_at(own_columns + part * 2 * MATRIX, packed);
        }
        ps_barrier(0, threads); /* and the staged columns have been read */
        ps_stmatrix4_at(own_branch, branch);
        const bool embed = l == 0 && x.embed.partial;
        T *const embedding = (T *)((char *)shared_memory + x.layers * LAYER_BYTES + TO_NORMED), /* of the first unit */
            *const own_embedding = embedding + at.unit * (UNIT_BYTES / 2);
        if (embed) {
            stage_patches(own_embedding, x, (int64_t)blockIdx.x * x.block_units + at.unit, at);
        }

        /* A = softmax(q k' / sqrt(e)), merged = A v */
        uint32_t dq[4], dk[4], dv[4];
        attention_backward(dq, dk, dv, delta, sums0, sums1, places, d16_alone(), {}, keys_there, x.scale, at);
        const float2 kept_rstd = *(const float2 *)(keep + KEPT_ROWS + (at.g * 4 + 1) * 16);
        at.sync(); /* q, k, v and merged's gradient have been read */
        ps_ldmatrix4_at(a, own_branch);
        ps_stmatrix4_at(own_columns + 6 * MATRIX, a);
        project_heads_backward(dx, dq, dk, dv, w, own_columns, at);
        ps_ldmatrix4_at(xhat, own_rows);
        const float rstd1[2] = {kept_rstd.x, kept_rstd.y};
        normalise_backward(g, dx, w.ln1_gamma, xhat, rstd1, NULL, at);
        if (l > 0) {
            read_first<DROP>(kept, x, step, l - 1, at);
        }
        if (embed) {
            const int pitch = embed_pitch(D, x.embed.patch);
            embed_operand(a, g, x, DROP, at);
            ps_store_operand(own_embedding + at.row * pitch, pitch * 2, a);
            ps_copy_wait();
        }
        publish(threads);
        if (warp >= 8 && warp < 12) {
            put_attention_sums<T, NT>(sums, bias_sums, warp, units, COLUMNS_ROW, units + TO_ROWS, ROWS_ROW, x.block_units,
                                      UNIT_BYTES, false, at);
            if (DROP) {
                __syncwarp();
                if (at.lane == 0) {
                    ps_mbarrier_arrive(section_barriers + (2 * l + 1) * 8);
                }
            }
        } else if (embed) {
            for (int job = warp < 8 ? warp : warp - 4; job < embed_jobs<D>(x); job += threads / 32 - 4) {
                embed_gradient(x, job, embedding, UNIT_BYTES / 2, true, at);
            }
        }
    }
    if (!x.embed.partial) {
        store_rows((T *)x.du, g, at);
    }
}

} // namespace ps_resident

#endif
