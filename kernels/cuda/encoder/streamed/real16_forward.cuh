/* encoder/streamed/real16.cuh's forward kernel. */
#ifndef PS_KERNELS_CUDA_ENCODER_REAL16_FORWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_REAL16_FORWARD_CUH

#include "kernels/cuda/encoder/streamed/real16_attention.cuh"
#include "kernels/cuda/encoder/streamed/real16_hidden.cuh"
#include "kernels/cuda/encoder/streamed/real16_products.cuh"
#include "kernels/cuda/encoder/streamed/real16_rows.cuh"

namespace PS_REAL16_SPACE
{

template <int KT, int E>
static __global__ void __launch_bounds__(THREADS, 1) layer_forward(const __grid_constant__ struct arguments p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ uint64_t barriers[STAGES + (STAGES + 1) / 2]; /* and how many warps have released each */
    const int warp = uniform_warp_id(), half_index = warp / (WARPS / 2), side = warp / 4 % 2;
    unsigned char *halves = shared + STAGES * STAGE_BYTES, *half = halves + half_index * HALF_BYTES;
    unsigned char *r_sums = half, *y_sums = half + 4 * PANEL_BYTES, *heads = half + HEADS_PANEL * PANEL_BYTES;
    float *vectors = (float *)(halves + 2 * HALF_BYTES);
    unsigned char *aside = (unsigned char *)(vectors + VECTORS) + 16 * warp;
    const int d = p.d, first = first_row(), hidden_chunks = hidden_chunks_of(p);
    const uint32_t half_address = ps_shared_address(halves) + half_index * HALF_BYTES;
    const uint32_t heads_address = half_address + HEADS_PANEL * PANEL_BYTES;
    const int tiles = tiles_of_block(p);
    first_prefetch(p, p.u);
    struct weight_ring<false> weights;
    weights.start(p, ps_shared_address(shared), ps_shared_address(barriers), tiles);
    load_vectors(p, vectors);
    const uint32_t draws = weights.base + BOTH_BYTES; /* [SITES], what ps_draws_after needs of each */
    if (threadIdx.x == 0) {
        const uint64_t step = dropout_step(p);
        const uint32_t sites[SITES] = {p.attention.site, p.hidden.site, p.output.site};
#pragma unroll
        for (int i = 0; i < SITES; i++) {
            ((uint4 *)(shared + BOTH_BYTES))[i] = ps_draws_begin(p.drawing.keys, sites[i], step);
        }
    }
    __syncthreads();
    struct rows_ahead u; /* a tile ahead: reading takes longer than the end of a tile */
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        turn_begin(p.turn, i, tiles);
        const struct tile tile = tile_at(p, blockIdx.x + i * p.blocks, half_index);
        const real16 *u_rows = p.u + tile.half_row * d;
        if (i == 0) {
            u = rows_read(u_rows, d, tile.valid);
        }
        half_sync();
        rows_normalise<false>(half, NULL, NULL, u, vectors + LN1_GAMMA, d, p.per, p.epsilon);
        ps_publish();
        half_sync();
        project_qkv(weights, half, half_address, warp, vectors, p.scale * PS_LOG2_E, tile.valid);
        clear_columns(heads, d);
        if (i + 1 < tiles) {
            const struct tile next = tile_at(p, blockIdx.x + (i + 1) * p.blocks, half_index);
            rows_prefetch(p.u + next.half_row * d, d, next.valid);
        }
        __syncthreads();
        attention_forward<KT, E>(p, ps_shared_address(halves), ps_shared_address(aside), p.softmax + tile.row * p.heads,
                                 tile.sequences);
        ps_publish();
        __syncthreads();

        /* r = u + drop(merged W_o + b_o) */
        u = rows_read(u_rows, d, tile.valid);
        {
            float sums[8][4];
            ps_zero(sums);
            side_product<false>(sums, heads_address, weights, side);
            sums_store<0, false>(r_sums, side, sums);
        }
        {
            float bias[LANE_COLUMNS], gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
            row_vector(bias, vectors + B_O);
            row_vector(gamma, vectors + LN2_GAMMA);
            row_vector(beta, vectors + LN2_BETA);
            uint32_t kept = 0;
            half_sync();
#pragma unroll 1
            for (int pass = 0; pass < PASSES; pass++) {
                const int row = first + pass_row(pass);
                float r[LANE_COLUMNS], x[LANE_COLUMNS];
                row_unpack(x, rows_next(u));
                sum_row(r, r_sums, row);
                row_branch(r, p.attention.scale, bias, x,
                           row_draw(p, p.attention, ps_shared_load4(draws + 16 * SITE_ATTENTION), tile.half_row + row), pass, kept);
                sum_row_store(r_sums, row, r);
                row_write(p.r + tile.half_row * d, d, row, tile.valid, row_pack(r));
                row_normalise(r, d, p.per, p.epsilon);
                row_stage(heads, row, row_affine(r, gamma, beta));
            }
            if (p.attention.threshold) {
                p.kept.attention[(int64_t)tile.number * THREADS + threadIdx.x] = kept;
            }
        }
        ps_publish();
        half_sync();

        /* y = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2): a side has 32 columns of each chunk of the hidden layer, and sums
         * their part of the second product */
        {
            float x[D / 8][4];
            uint32_t hidden[2][4], *to = hidden_kept(p, tile, warp);
            uint32_t index = p.hidden.first + (uint32_t)(tile.row + own_row(0)) * (uint32_t)(p.f / 8) + 4 * side + lane_id() % 4;
            ps_zero(x);
#pragma unroll 1
            for (int j = 0; j < hidden_chunks; j++) {
                float z[4][4];
                uint32_t kept[2];
                add_bias_first(z, vectors + B_1 + CHUNK * j + 32 * side);
                const uint32_t w_1 = weights.take();
                ps_wgmma_begin();
                product<8, false>(z, weights.half_panels(half_index) + HEADS_PANEL * PANEL_BYTES, w_1 + 64 * side);
                ps_wgmma_commit();
                hidden_draw(kept, p, ps_shared_load4(draws + 16 * SITE_HIDDEN), index, to);
                index += CHUNK / 8;
                to += HIDDEN_WORDS;
                ps_wgmma_wait<0>(); /* for the second product of the chunk before, too */
                ps_pin(z);
                if (j > 0) {
                    weights.release();
                }
                hidden_forward(hidden, z, kept);
                const uint64_t w_2 = ps_wgmma_whole(ps_wgmma_place(weights.take() + 2 * side * 2048, PANEL_BYTES));
                ps_wgmma_begin();
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    multiply_add<1>(x, hidden[k], ps_wgmma_further(w_2, k * 2048));
                }
                ps_wgmma_commit();
            }
            ps_wgmma_wait<0>();
            ps_pin(x);
            ps_pin(hidden);
            weights.release();
            half_sync();
            sums_of_sides(y_sums, x);
            half_sync();
        }
        if (i + 1 < tiles) {
            const struct tile next = tile_at(p, blockIdx.x + (i + 1) * p.blocks, half_index);
            u = rows_read(p.u + next.half_row * d, d, next.valid);
        }
        float bias[LANE_COLUMNS];
        uint32_t kept = 0;
        row_vector(bias, vectors + B_2);
#pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++) {
            const int row = first + pass_row(pass);
            float y[LANE_COLUMNS], r[LANE_COLUMNS];
            sum_row(y, y_sums, row);
            sum_row(r, r_sums, row);
            row_branch(y, p.w_2_scale, bias, r,
                       row_draw(p, p.output, ps_shared_load4(draws + 16 * SITE_OUTPUT), tile.half_row + row), pass, kept);
            row_write(p.y + tile.half_row * d, d, row, tile.valid, row_pack(y));
        }
        if (p.output.threshold) {
            p.kept.output[(int64_t)tile.number * THREADS + threadIdx.x] = kept;
        }
    }
    turn_end(p.turn, blockIdx.x == 0);
}

} // namespace PS_REAL16_SPACE

#endif
