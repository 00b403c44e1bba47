/* encoder/split/rows.cu's kernels backward: the feed-forward part and W_o before attention's, W_qkv and LN1 behind it. */
#ifndef PS_KERNELS_CUDA_ENCODER_SPLIT_ROWS_BACKWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_SPLIT_ROWS_BACKWARD_CUH

#include "kernels/cuda/encoder/split/rows.cuh"

namespace PS_REAL16_SPACE
{

typedef row_kernel<HALF_BYTES + WORD_BYTES, 4, WORD_BYTES, MOST_HIDDEN> ffn_wo_backward_kernel;

/* From dy: masked_2 = drop'(dy), hidden, d_hidden, du = dy + LN2's gradient, masked_o = drop'(du), d_merged = masked_o W_o'. */
static __global__ void __launch_bounds__(THREADS, 1) ffn_wo_backward(const __grid_constant__ struct rows_layer x)
{
    typedef ffn_wo_backward_kernel K;
    seat at;
    ps_grid_begin();
    const int hidden = x.f / COLUMNS;
    const row_places pieces(hidden);
    const float *const b_1 = K::vectors();
    stage_vector(K::vectors(), x.b_1, x.f);
    K::ring_of ring = K::ring(3 * hidden + 2);
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            ring.bring(
                turns_of(x.rows), 3 * hidden + 2,
                [&](int i, int &bytes) {
                    const bool half = i < 3 * hidden && i % 3 == 0; /* W_1's, for the hidden columns again */
                    bytes = half ? HALF_BYTES : WORD_BYTES;
                    return half             ? x.halves + (8 + i / 3 * 2) * HALF_BYTES
                           : i < 3 * hidden ? x.words + (i / 3 * 2 + i % 3 - 1) * WORD_BYTES
                                            : x.words + (pieces.w_ot + i - 3 * hidden) * WORD_BYTES;
                },
                [&](int i) {
                    const int64_t tile = blockIdx.x + (int64_t)i * gridDim.x;
                    prefetch_tile(tile, x.rows, x.xhat2, D);
                    prefetch_tile(tile, x.rows, x.dy, D);
                });
        }
        return;
    }
    more_registers();
    const uint32_t gradient = K::left(at), left = gradient + WORD_BYTES; /* xhat2 */
    const bool drops = x.gelu.threshold != 0;
    const float scale = drops ? x.gelu.scale : 1.0f; /* of all three */
    uint32_t kept_rows[4];                           /* of each pass, word c of the row that lane 8 r + c has */
    const auto ahead = [&](int64_t first) {
        copy_rows(left, x.xhat2, first, x.rows, at);
        copy_rows(gradient, x.dy, first, x.rows, at);
#pragma unroll
        for (int pass = 0; pass < 4; pass++) {
            const int64_t row = first + at.passing(pass);
            kept_rows[pass] = drops && row < x.rows ? x.kept_output[row * 4 + at.lane % 4] : ~0u;
        }
    };
    ahead((int64_t)blockIdx.x * TILE + at.group * ROWS);
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows, TILE); tile += (int)gridDim.x) {
        at.refresh();
        const int64_t row0 = (int64_t)tile * TILE + at.group * ROWS;
        const int count = rows_from(x.rows, row0);
        ps_copy_wait(); /* for what the lane itself has asked for */
#pragma unroll
        for (int pass = 0; pass < 4; pass++) {
            const int row = at.passing(pass);
            float *const to = x.masked_2 + (row0 + row) * D + at.lane % 8 * 4;
#pragma unroll
            for (int j = 0; j < 4; j++) { /* columns 4 c .. 4 c + 3 of the word's 32 */
                const uint32_t mask = __shfl_sync(0xffffffffu, kept_rows[pass], (at.lane & 24) + j) >> (at.lane % 8 * 2);
                const uint32_t place = gradient + word_row(row, j, at);
                float4 v = *(const float4 *)(row_memory + (place - ps_shared_address(row_memory)));
                v = as_operand(make_float4(mask & 1 ? v.x * scale : 0, mask >> 16 & 1 ? v.y * scale : 0, mask & 2 ? v.z * scale : 0,
                                           mask >> 17 & 1 ? v.w * scale : 0));
                put_shared(place, v);
                if (row < count) {
                    put_global(to + 32 * j, v);
                }
            }
        }
        ps_publish();
        at.sync();
        float c[16][4];
#pragma unroll 1
        for (int j = 0; j < hidden; j++) {
            at.refresh();
            const int column = COLUMNS * j;
            uint2 kept[2];
            take_kept(kept, x.kept_gelu + row0 * (x.f / 32) + 2 * j, x.f / 32, drops, count, at);
            float z[8][4], d[8][4];
            uint32_t piece = ring.take();
            const uint32_t second = ring.take();
            ps_wgmma_begin();
            multiply_columns<true>(z, left, piece);
            multiply_columns<false>(d, gradient, second);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(z);
            ps_pin(d);
            ring.release();
            ring.release();
            add_bias(z, b_1 + column, at);
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const uint32_t mask = (n / 4 ? kept[k / 2].y : kept[k / 2].x) >> 2 * at.q;
                    const float keep = kept_factor(mask, n % 4, k % 2, scale), v = z[n][k], s = ps_gelu_sigmoid(v);
                    z[n][k] = keep * v * s;
                    d[n][k] *= keep * ps_gelu_slope(v, s);
                }
            }
            keep_sums(x.hidden + row0 * x.f + column, x.f, z, count, at);
            keep_sums(x.d_hidden + row0 * x.f + column, x.f, d, count, at);
            uint32_t h[8][4];
            as_left(h, d);
            piece = ring.take();
            ps_wgmma_begin();
            multiply_rows(c, h, piece, j > 0);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(h);
            ps_pin(c);
            ring.release();
        }
        at.refresh();
        const float_fours dy(x.dy + row0 * D, count, at);
        float rstd[2];
        uint4 kept[2];
        take_rstd(rstd, x.rstd2 + row0, count, at);
        take_kept(kept, x.kept_o + row0 * 4, 4, drops, count, at);
        const fours_place<8> place(left, at);
        normalise_gradient(
            c, rstd, [&](int m, int i) { return dy.of[m][i]; },
            [&](int m, int i) { return as_floats(get_shared(place.of(m, i))); });
        keep_sums(x.du + row0 * D, D, c, count, at);
        drop(c, kept, scale, at);
        at.sync(); /* all have multiplied with the gradient */
        const fours_place<16> gradient_place(gradient, at);
#pragma unroll
        for (int m = 0; m < 8; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                put_shared(gradient_place.of(m, i), as_operand(four(c, m, i)));
            }
        }
        ps_publish();
        at.sync();
        keep_sums(x.masked_o + row0 * D, D, c, count, at);
        float m[2][8][4];
        multiply_square<false>(m, gradient, ring);
        at.sync(); /* the panels are free */
        ahead(row0 + (int64_t)gridDim.x * TILE);
        keep_sums(x.d_merged + row0 * D, D, m[0], count, at);
        keep_sums(x.d_merged + row0 * D + COLUMNS, D, m[1], count, at);
    }
}

typedef row_kernel<WORD_BYTES, 5, WORD_BYTES, 0> qkv_ln1_backward_kernel;

/* du += LN1's gradient of d_qkv W_qkv'. */
static __global__ void __launch_bounds__(THREADS, 1) qkv_ln1_backward(const __grid_constant__ struct rows_layer x)
{
    typedef qkv_ln1_backward_kernel K;
    seat at;
    ps_grid_begin();
    K::ring_of ring = K::ring(6);
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            const int first = row_places(x.f / COLUMNS).w_qkvt;
            ring.bring(turns_of(x.rows), 6, [&](int i, int &bytes) {
                bytes = WORD_BYTES;
                return x.words + (first + i) * WORD_BYTES;
            });
        }
        return;
    }
    more_registers();
    const uint32_t left = K::left(at);
    float4 rows[4][4];
    take_rows(rows, x.d_qkv, 3 * D, (int64_t)blockIdx.x * TILE + at.group * ROWS, x.rows, at);
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows, TILE); tile += (int)gridDim.x) {
        at.refresh();
        const int64_t row0 = (int64_t)tile * TILE + at.group * ROWS;
        const int count = rows_from(x.rows, row0);
        float c[16][4];
#pragma unroll
        for (int part = 0; part < 3; part++) {
            at.refresh();
            at.sync();
            put_rows(left, rows, at);
            ps_publish();
            at.sync();
            const uint32_t first = ring.take(), second = ring.take();
            ps_wgmma_begin();
            multiply_rows(c, left, first, part > 0);
            multiply_rows(c, left + 2 * PANEL_BYTES, second, 1);
            ps_wgmma_commit();
            if (part < 2) {
                take_rows(rows, x.d_qkv + (part + 1) * D, 3 * D, row0, x.rows, at);
                ps_wgmma_wait<0>();
                ps_pin(c);
                ring.release();
                ring.release();
            }
        }
        at.refresh();
        float rstd[2];
        take_rstd(rstd, x.rstd1 + row0, count, at);
        const half_fours xhat(x.xhat1 + row0 * D, count, at);
        const float_fours residual(x.du + row0 * D, count, at);
        ps_wgmma_wait<0>();
        ps_pin(c);
        ring.release();
        ring.release();
        normalise_gradient(
            c, rstd, [&](int m, int i) { return residual.of[m][i]; }, [&](int m, int i) { return as_floats(xhat.of[m][i]); });
        at.refresh();
        take_rows(rows, x.d_qkv, 3 * D, row0 + (int64_t)gridDim.x * TILE, x.rows, at);
        keep_sums(x.du + row0 * D, D, c, count, at);
    }
}

} // namespace PS_REAL16_SPACE

#endif
