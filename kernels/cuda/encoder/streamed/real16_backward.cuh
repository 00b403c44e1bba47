/* encoder/streamed/real16.cuh's backward kernel, whose last blocks form weights' gradients. */
#ifndef PS_KERNELS_CUDA_ENCODER_REAL16_BACKWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_REAL16_BACKWARD_CUH

#include "kernels/cuda/encoder/streamed/real16_attention.cuh"
#include "kernels/cuda/encoder/streamed/real16_hidden.cuh"
#include "kernels/cuda/encoder/streamed/real16_products.cuh"
#include "kernels/cuda/encoder/streamed/real16_rows.cuh"
#include "kernels/cuda/encoder/streamed/real16_weights.cuh"

namespace PS_REAL16_SPACE
{

/* Where the half's panels of an operand are. */
static __device__ __forceinline__ real16 *operand_at(real16 *operand, int panels, int tile, int warp)
{
    return operand + (int64_t)(2 * tile + warp / (WARPS / 2)) * panels * (64 * 64);
}

/* The half's panels to an operand, asked for by its first thread; the writers have published them before a barrier. */
static __device__ __forceinline__ void store_operand(real16 *operand, int panels, int tile, int warp, const unsigned char *from)
{
    if (half_leader(warp)) {
        ps_bulk_store_once(operand_at(operand, panels, tile, warp), ps_shared_address(from), panels * PANEL_BYTES);
    }
}

/* Copies by cp.async what a tile begins with, r, dy and dropout's bits for dy, to where u and softmax's sums will be. Reading them
 * when the tile begins takes longer than all that is done with them. */
static __device__ __forceinline__ void feed_forward_stage(const struct arguments &p, const struct tile &tile,
                                                          const unsigned char *r_panels, const unsigned char *dy_panels,
                                                          float *kept)
{
    const int d = p.d;
    rows_stage(r_panels, p.r + tile.half_row * d, d, tile.valid);
    rows_stage(dy_panels, p.dy + tile.half_row * d, d, tile.valid);
    if (p.output.threshold) {
        ps_copy_async4(kept + threadIdx.x, p.kept.output + (int64_t)tile.number * THREADS + threadIdx.x);
    }
}

/* Operands of the feed-forward part, after a barrier of the half: LN2(r) and the dropped dy, to their panels, of rows that
 * feed_forward_stage asked for; the rows' means and 1/deviation. */
static __device__ __forceinline__ void feed_forward_operands(const struct arguments &p, const float *vectors,
                                                             const unsigned char *r_panels, const unsigned char *staged_dy,
                                                             const float *staged_kept, unsigned char *ln2_panels,
                                                             unsigned char *dy_panels, float2 *stats)
{
    const int d = p.d, first = first_row();
    float gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
    ps_copy_wait();
    uint32_t kept = p.output.threshold ? __float_as_uint(staged_kept[threadIdx.x]) : ~0u;
    half_sync();
    row_vector(gamma, vectors + LN2_GAMMA);
    row_vector(beta, vectors + LN2_BETA);
#pragma unroll 1
    for (int i = 0; i < PASSES; i++) {
        const int row = first + pass_row(i);
        float x[LANE_COLUMNS];
        row_unpack(x, row_staged(r_panels, row));
        struct row_words dy = row_staged(staged_dy, row);
        row_drop(dy, kept_next(kept));
        row_stage(dy_panels, row, dy);
        const float2 s = row_normalise(x, d, p.per, p.epsilon);
        if (lane_id() % 8 == 0) {
            stats[row] = s;
        }
        row_stage(ln2_panels, row, row_affine(x, gamma, beta));
    }
}

/* d_r = the side's part of the gradient of LN2's output. kept_ahead: dropout's bits of the first chunk, then those of the next one,
 * since reading takes longer than the products. */
static __device__ __forceinline__ void feed_forward_backward(const struct arguments &p, struct weight_ring<true> &weights,
                                                             const struct tile &tile, const float *vectors, int warp, uint32_t ln2,
                                                             uint32_t dy, uint32_t (&kept_ahead)[2], float (&d_r)[D / 8][4])
{
    const int hidden_chunks = hidden_chunks_of(p), side = warp / 4 % 2;
    const uint32_t *from = hidden_kept(p, tile, warp), place = fragment_place();
    const int64_t panel = (int64_t)(2 * tile.index + warp / (WARPS / 2)) * hidden_chunks * PANEL_BYTES;
    char *hidden_to = (char *)p.operands.hidden + panel, *d_hidden_to = (char *)p.operands.d_hidden + panel;
    ps_zero(d_r);
#pragma unroll 1
    for (int j = 0; j < hidden_chunks; j++) {
        float dh[4][4], z[4][4];
        uint32_t hidden[2][4], d_hidden[2][4];
        ps_zero(dh);
        add_bias_first(z, vectors + B_1 + CHUNK * j + 32 * side);
        const uint32_t w_2 = weights.take() + side * (PANEL_BYTES / 2), w_1 = weights.take() + 64 * side;
        ps_pin(z);
        ps_wgmma_begin();
        product<8, true>(dh, dy, w_2);
        product<8, false>(z, ln2, w_1);
        ps_wgmma_commit();
        ps_wgmma_wait<0>();
        ps_pin(dh);
        ps_pin(z);
        const uint32_t kept[2] = {kept_ahead[0], kept_ahead[1]};
        if (j + 1 < hidden_chunks) {
            from += HIDDEN_WORDS;
            hidden_read(kept_ahead, p, from);
        }
        hidden_backward(hidden, d_hidden, z, dh, kept);
        fragment_store(hidden, hidden_to + place);
        fragment_store(d_hidden, d_hidden_to + place);
        hidden_to += PANEL_BYTES;
        d_hidden_to += PANEL_BYTES;
        const uint64_t by_w_1 = ps_wgmma_whole(ps_wgmma_place(w_1));
        ps_wgmma_begin();
#pragma unroll
        for (int k = 0; k < 2; k++) {
            multiply_add<0>(d_r, d_hidden[k], ps_wgmma_further(by_w_1, 32 * k));
        }
        ps_wgmma_commit();
        ps_wgmma_wait<0>();
        ps_pin(d_r);
        ps_pin(d_hidden);
        weights.release();
    }
}

/* The thread's parked values, as rows_ahead. */
struct parked_ahead {
    float4 pass[PASSES][LANE_COLUMNS / 4];
};

static __device__ __forceinline__ struct parked_ahead unpark(const float4 *parked)
{
    struct parked_ahead ahead;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
#pragma unroll
        for (int k = 0; k < LANE_COLUMNS / 4; k++) {
            ahead.pass[i][k] = ps_load_keep(parked + (i * (LANE_COLUMNS / 4) + k) * THREADS + threadIdx.x);
        }
    }
    return ahead;
}

static __device__ __forceinline__ void rest_next(float (&x)[LANE_COLUMNS], struct parked_ahead &ahead)
{
#pragma unroll
    for (int k = 0; k < LANE_COLUMNS / 4; k++) {
        row_four(x, k, ahead.pass[0][k]);
#pragma unroll
        for (int i = 1; i < PASSES; i++) {
            ahead.pass[i - 1][k] = ahead.pass[i][k];
        }
    }
}

static __device__ __forceinline__ void rest_next(float (&x)[LANE_COLUMNS], struct rows_ahead &ahead)
{
    row_unpack(x, rows_next(ahead));
}

/* Both LayerNorms' backward over the warp's rows; stage: the gradient of its output, in fp32; input: r or u; scale: what
 * the stage lacks (of LN2, over GELU_SCALE). LN2: dr = that of its input + dy (rest), to `parked` in fp32, and dropped to the
 * panels of `operand`. LN1: du = that of its input + the parked (rest). sums: see add_column_sums. */
template <bool LN1, typename INPUT, typename REST>
static __device__ __forceinline__ void layernorm_backward(const struct arguments &p, const struct tile &tile, unsigned char *stage,
                                                          const float2 *stats, const float *gamma_vector, float scale, float *sums,
                                                          INPUT &input, REST &rest, uint32_t &kept, float4 *parked,
                                                          unsigned char *operand)
{
    const int d = p.d, first = first_row();
    float column_sums[2 * LANE_COLUMNS];
#pragma unroll
    for (int i = 0; i < 2 * LANE_COLUMNS; i++) {
        column_sums[i] = 0.0f;
    }
#pragma unroll 1
    for (int i = 0; i < PASSES; i++) {
        const int row = first + pass_row(i);
        float x[LANE_COLUMNS], dz[LANE_COLUMNS], gamma[LANE_COLUMNS];
        row_unpack(x, rows_next(input));
        sum_row(dz, stage, row);
        const float2 s = stats[row];
        row_vector(gamma, gamma_vector);
        const float shift = -s.x * s.y, shifts[2] = {lane_column(0) < d ? shift : 0.0f, lane_column(1) < d ? shift : 0.0f};
#pragma unroll
        for (int k = 0; k < LANE_COLUMNS; k++) {
            x[k] = fmaf(x[k], s.y, shifts[k / 8]);
        }
        row_normalise_backward(dz, x, scale * s.y, p.per, gamma, column_sums);
        rest_next(x, rest);
#pragma unroll
        for (int k = 0; k < LANE_COLUMNS; k++) {
            dz[k] += x[k];
        }
        if (LN1) {
            row_write(p.du + tile.half_row * d, d, row, tile.valid, row_pack(dz));
        } else {
#pragma unroll
            for (int k = 0; k < LANE_COLUMNS / 4; k++) {
                ps_store_keep(parked + (i * (LANE_COLUMNS / 4) + k) * THREADS + threadIdx.x,
                              make_float4(dz[4 * k], dz[4 * k + 1], dz[4 * k + 2], dz[4 * k + 3]));
            }
            struct row_words words = row_pack(dz);
            row_drop(words, kept_next(kept));
            row_stage(operand, row, words);
        }
    }
    add_column_sums(sums, column_sums);
}

/* The warp's column sums; found anew each time, else they would be kept in memory. */
static __device__ __forceinline__ float *own_sums(const struct arguments &p)
{
    int block = blockIdx.x, warp = warp_id();
    asm volatile("" : "+r"(block), "+r"(warp));
    return p.warp_sums + ((int64_t)block * WARPS + warp) * NORM_SUMS;
}

template <int KT, int E>
static __global__ void __launch_bounds__(THREADS, 1)
    layer_backward(const __grid_constant__ struct arguments p, const __grid_constant__ struct gradient_arguments gradients)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    if ((int)blockIdx.x >= p.blocks) {
        gradient_block(gradients, p.turn, shared, blockIdx.x - p.blocks);
        turn_end(p.turn, false);
        return;
    }
    __shared__ uint64_t barriers[STAGES + (STAGES + 1) / 2]; /* and how many warps have released each */
    const int warp = uniform_warp_id(), half_index = warp / (WARPS / 2), side = warp / 4 % 2;
    unsigned char *halves = shared + STAGES * STAGE_BYTES, *half = halves + half_index * HALF_BYTES;
    unsigned char *dr = half + 4 * PANEL_BYTES, *heads = half + HEADS_PANEL * PANEL_BYTES;
    const uint32_t half_address = ps_shared_address(halves) + half_index * HALF_BYTES;
    float *vectors = (float *)(halves + 2 * HALF_BYTES);
    unsigned char *aside = (unsigned char *)(vectors + VECTORS) + 16 * warp;
    float2 *stats = (float2 *)((unsigned char *)(vectors + VECTORS) + ASIDE_BYTES) + 64 * half_index;
    float *softmax = (float *)((unsigned char *)(vectors + VECTORS) + ASIDE_BYTES) + 2 * ROWS;
    float4 *parked = (float4 *)p.parked + (int64_t)blockIdx.x * (ROWS * D / 4);
    const int d = p.d;
    const int tiles = tiles_of_block(p);
    first_prefetch(p, p.r);
    first_prefetch(p, p.dy);
    struct weight_ring<true> weights;
    weights.start(p, ps_shared_address(shared), ps_shared_address(barriers), tiles);
    turn_begin(p.turn, 0, tiles > 0 ? tiles : 1);
    if (tiles > 0) {
        int index = blockIdx.x, side_of = half_index;
        asm volatile("" : "+r"(index), "+r"(side_of)); /* as in first_prefetch */
        const struct tile tile = tile_at(p, index, side_of);
        feed_forward_stage(p, tile, dr, heads, softmax);
        kept_prefetch(p, tile);
    }
    load_vectors(p, vectors);
    if (p.first_norms) {
        float *const sums = own_sums(p);
        for (int i = lane_id(); i < NORM_SUMS; i += 32) {
            sums[i] = 0.0f;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        if (i > 0) {
            turn_begin(p.turn, i, tiles);
        }
        const struct tile tile = tile_at(p, blockIdx.x + i * p.blocks, half_index);
        uint32_t first_kept[2];
        hidden_read(first_kept, p, hidden_kept(p, tile, warp));
        feed_forward_operands(p, vectors, dr, heads, softmax, half, half + 2 * PANEL_BYTES, stats);
        for (int k = threadIdx.x; k < tile.sequences * p.N * p.heads; k += THREADS) {
            ps_copy_async4(softmax + k, p.softmax + tile.row * p.heads + k);
        }
        rows_stage(heads, p.u + tile.half_row * d, d, tile.valid); /* as softmax, where the thread has read what was there */
        ps_publish();
        half_sync();
        store_operand(p.operands.ln2, 2, tile.index, warp, half);
        store_operand(p.operands.dy, 2, tile.index, warp, half + 2 * PANEL_BYTES);
        struct rows_ahead dy;
        uint32_t kept;
        {
            float x[D / 8][4];
            feed_forward_backward(p, weights, tile, vectors, warp, half_address, half_address + 2 * PANEL_BYTES, first_kept, x);
            half_stores_wait(warp);
            half_sync();
            dy = rows_read(p.dy + tile.half_row * d, d, tile.valid);
            kept = kept_word(p.attention, p.kept.attention, tile.number);
            sums_of_sides(half, x);
        }
        {
            struct rows_kept r = {dr, 0}; /* each row until its gradient takes its place */
            half_sync();
            layernorm_backward<false>(p, tile, half, stats, vectors + LN2_GAMMA, p.w_2_scale, own_sums(p) + 2 * D, r, dy, kept,
                                      parked, dr);
        }
        ps_copy_wait();
        struct rows_ahead u = rows_staged(heads);
        ps_publish();
        half_sync();
        store_operand(p.operands.dr, 2, tile.index, warp, dr);
        rows_normalise<true>(half, operand_at(p.operands.a, 2, tile.index, warp), stats, u, vectors + LN1_GAMMA, d, p.per,
                             p.epsilon);
        ps_publish();
        {
            float d_heads[8][4];
            ps_zero(d_heads);
            side_product<true>(d_heads, half_address + 4 * PANEL_BYTES, weights, side);
            store_panel(heads + side * PANEL_BYTES, d_heads, 64);
        }
        half_stores_wait(warp);
        half_sync();
        project_qkv(weights, half, weights.half_panels(half_index), warp, vectors, p.scale * PS_LOG2_E, tile.valid);
        if (i + 1 < tiles) {
            const struct tile next = tile_at(p, blockIdx.x + (i + 1) * p.blocks, half_index);
            rows_prefetch(p.r + next.half_row * d, d, next.valid);
            rows_prefetch(p.dy + next.half_row * d, d, next.valid);
            kept_prefetch(p, next);
        }
        __syncthreads();
        attention_backward<KT, E>(p, ps_shared_address(halves), ps_shared_address(aside), softmax, tile.sequences);
        ps_publish();
        __syncthreads();
        store_operand(p.operands.dqkv, 6, tile.index, warp, half);
        store_operand(p.operands.merged, 2, tile.index, warp, heads);
        {
            float x[8][4];
            struct parked_ahead rest = unpark(parked);
            u = rows_read(p.u + tile.half_row * d, d, tile.valid);
            ps_zero(x);
#pragma unroll
            for (int c = 0; c < 6; c++) {
                const uint32_t stage = weights.take();
                ps_wgmma_begin();
                product<4, true>(x, half_address + c * PANEL_BYTES, stage + side * PANEL_BYTES);
                ps_wgmma_commit();
                if (c == 2 || c == 4) { /* those before are done */
                    ps_wgmma_wait<1>();
                    weights.release();
                }
            }
            ps_wgmma_wait<0>();
            ps_pin(x);
            weights.release();
            half_stores_wait(warp);
            half_sync();
            if (i + 1 < tiles) {
                const struct tile next = tile_at(p, blockIdx.x + (i + 1) * p.blocks, half_index);
                feed_forward_stage(p, next, dr, heads, softmax);
            }
            sums_store<0, false>(half, side, x);
            half_sync();
            uint32_t none = 0;
            layernorm_backward<true>(p, tile, half, stats, vectors + LN1_GAMMA, p.attention.scale, own_sums(p), u, rest, none,
                                     parked, NULL);
        }
    }
    if (p.last_norms || (int)blockIdx.x >= p.norm_blocks) {
        __syncthreads();
        for (int i = threadIdx.x; i < NORM_SUMS; i += THREADS) {
            const float *from = p.warp_sums + (int64_t)blockIdx.x * WARPS * NORM_SUMS + i;
            float sum = 0.0f;
            for (int w = 0; w < WARPS; w++) {
                sum += from[w * NORM_SUMS];
            }
            p.norm_sums[(int64_t)blockIdx.x * NORM_SUMS + i] = sum;
        }
    }
    turn_end(p.turn, false);
}

} // namespace PS_REAL16_SPACE

#endif
