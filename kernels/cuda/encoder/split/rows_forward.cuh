/* encoder/split/rows.cu's kernels forward: LN1 and W_qkv before attention, W_o and the feed-forward part behind it. */
#ifndef PS_KERNELS_CUDA_ENCODER_SPLIT_ROWS_FORWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_SPLIT_ROWS_FORWARD_CUH

#include "kernels/cuda/encoder/split/rows.cuh"

namespace PS_REAL16_SPACE
{

/* ln1_qkv's warpgroups, and its shared memory: left operands of fp16, W_qkv, its bias, a barrier. */
enum {
    LN1_QKV_GROUPS = 3,
    LN1_QKV_THREADS = LN1_QKV_GROUPS * 128,
    LN1_QKV_PIECES = LN1_QKV_GROUPS * HALF_BYTES,
    LN1_QKV_BIAS = LN1_QKV_PIECES + 6 * HALF_BYTES,
    LN1_QKV_BARRIER = LN1_QKV_BIAS + 3 * D * 4,
    LN1_QKV_SHARED = LN1_QKV_BARRIER + 8
};

/* xhat1 = LN1's of u without gamma and beta, qkv = the products' rows. Draws dropout's bits for the whole layer: in wo_ffn, whose
 * schedulers are busier, that was two fifths of the instructions. */
static __global__ void __launch_bounds__(LN1_QKV_THREADS, 1) ln1_qkv(const __grid_constant__ struct rows_layer x)
{
    seat at;
    const uint32_t shared = ps_shared_address(row_memory), left = shared + at.group * HALF_BYTES;
    const uint32_t pieces = shared + LN1_QKV_PIECES, barrier = shared + LN1_QKV_BARRIER;
    const float *const bias = (const float *)(row_memory + LN1_QKV_BIAS);
    ps_grid_begin();
    stage_vector((float *)(row_memory + LN1_QKV_BIAS), x.b_qkv, 3 * D);
    if (threadIdx.x == 0) {
        ps_mbarrier_init(barrier, 1);
        ps_mbarrier_publish();
        ps_mbarrier_expect(barrier, 6 * HALF_BYTES);
        ps_bulk_fetch(pieces, x.halves, 6 * HALF_BYTES, barrier);
    }
    __syncthreads();
    const uint64_t steps = x.gelu.threshold ? x.gelu.state->step : 0;
    const int64_t step = (int64_t)gridDim.x * LN1_QKV_GROUPS * ROWS;
    int64_t row0 = ((int64_t)at.group * gridDim.x + blockIdx.x) * ROWS;
    float4 rows[4][4];
    take_rows(rows, x.u, D, row0, x.rows, at);
    ps_mbarrier_wait(barrier, 0);
    for (; row0 < x.rows; row0 += step) {
        at.refresh();
        const int count = rows_from(x.rows, row0);
        at.sync(); /* the panels are free */
#pragma unroll
        for (int pass = 0; pass < 4; pass++) {
            const int row = at.passing(pass);
            float4(&v)[4] = rows[pass];
            float sum = 0, squares = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum += (v[j].x + v[j].y) + (v[j].z + v[j].w);
            }
            const float mean = ps_group_sum<8>(sum) * (1.0f / D);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = make_float4(v[j].x - mean, v[j].y - mean, v[j].z - mean, v[j].w - mean);
                squares += (v[j].x * v[j].x + v[j].y * v[j].y) + (v[j].z * v[j].z + v[j].w * v[j].w);
            }
            const float rstd = rsqrtf(fmaf(ps_group_sum<8>(squares), 1.0f / D, x.epsilon));
            const bool keeps = x.xhat1 && row < count;
            __half *const to = x.xhat1 + (row0 + row) * D + at.lane % 8 * 4;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint2 xhat = as_halves(make_float4(v[j].x * rstd, v[j].y * rstd, v[j].z * rstd, v[j].w * rstd));
                put_shared(left + half_row(row, j, at), xhat);
                if (keeps) {
                    put_global(to + 32 * j, xhat);
                }
            }
            if (keeps && at.lane % 8 == 0) {
                x.rstd1[row0 + row] = rstd;
            }
        }
        ps_publish();
        at.sync();
        take_rows(rows, x.u, D, row0 + step, x.rows, at);
        if (x.gelu.threshold) { /* while they come */
            draw_words(x.kept_o + row0 * 4, x.after_o, row0, 4, steps, count, at);
            draw_words(x.kept_gelu + row0 * (x.f / 32), x.gelu, row0, x.f / 32, steps, count, at);
            draw_words(x.kept_output + row0 * 4, x.output, row0, 4, steps, count, at);
        }
#pragma unroll 1
        for (int i = 0; i < 6; i += 2) {
            at.refresh();
            float c[2][8][4];
            ps_wgmma_begin();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                multiply_columns<true>(c[h], left, ps_wgmma_place(pieces + (i + h) * HALF_BYTES));
                ps_wgmma_commit();
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                h ? ps_wgmma_wait<0>() : ps_wgmma_wait<1>();
                ps_pin(c[h]);
                const int column = (i + h) * COLUMNS;
                add_bias(c[h], bias + column, at);
                keep_sums(x.qkv + row0 * (3 * D) + column, 3 * D, c[h], count, at);
            }
        }
    }
}

typedef row_kernel<HALF_BYTES, 10, HALF_BYTES, 2 * D + MOST_HIDDEN> wo_ffn_kernel;

/* r = u + drop(merged W_o + b_o), xhat2 of it, y = r + drop(drop(gelu(z)) W_2 + b_2) of z = xhat2 W_1 + b_1. */
static __global__ void __launch_bounds__(THREADS, 1) wo_ffn(const __grid_constant__ struct rows_layer x)
{
    typedef wo_ffn_kernel K;
    seat at;
    ps_grid_begin();
    const int hidden = x.f / COLUMNS;
    const float *const b_o = K::vectors(), *const b_2 = b_o + D, *const b_1 = b_2 + D;
    stage_vector(K::vectors(), x.b_o, D);
    stage_vector(K::vectors() + D, x.b_2, D);
    stage_vector(K::vectors() + 2 * D, x.b_1, x.f);
    K::ring_of ring = K::ring(2 + 2 * hidden);
    if (at.group == GROUPS) {
        fewer_registers();
        if (at.warp == 0 && at.lane == 0) {
            ring.bring(turns_of(x.rows), 2 + 2 * hidden, [&](int i, int &bytes) {
                bytes = HALF_BYTES;
                return x.halves + (6 + i) * HALF_BYTES;
            });
        }
        return;
    }
    more_registers();
    const uint32_t left = K::left(at);
    const bool drops = x.gelu.threshold != 0;
    const float scale = x.gelu.scale; /* of all three */
    uint4 rows[4][2];
    take_rows(rows, x.merged, (int64_t)blockIdx.x * TILE + at.group * ROWS, x.rows, at);
    for (int tile = (int)blockIdx.x; tile < tiles_of(x.rows, TILE); tile += (int)gridDim.x) {
        at.refresh();
        const int64_t row0 = (int64_t)tile * TILE + at.group * ROWS;
        const int count = rows_from(x.rows, row0);
        at.sync();
        put_rows(left, rows, at);
        ps_publish();
        at.sync();
        if (at.group == 0 && at.warp == 0 && at.lane == 0) { /* the bringing warpgroup is done where pieces stay */
            const int64_t next = tile + (int64_t)gridDim.x;
            prefetch_tile(next, x.rows, x.u, D);
            if (drops) {
                prefetch_tile(next, x.rows, x.kept_o, 4);
                prefetch_tile(next, x.rows, x.kept_gelu, x.f / 32);
                prefetch_tile(next, x.rows, x.kept_output, 4);
            }
        }
        const float_fours u(x.u + row0 * D, count, at);
        float r[2][8][4]; /* halves of the columns */
        uint2 kept[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            take_kept(kept[h], x.kept_o + row0 * 4 + 2 * h, 4, drops, count, at);
        }
        multiply_square<true>(r, left, ring);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            add_bias(r[h], b_o + COLUMNS * h, at);
            if (drops) {
                drop(r[h], kept[h], scale, at);
            }
        }
        at.sync(); /* merged has been read */
        const fours_place<8> place(left, at);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = 0, squares = 0;
#pragma unroll
            for (int m = 0; m < 8; m++) {
                float *const low = &r[m / 4][m % 4 * 2][2 * i], *const high = &r[m / 4][m % 4 * 2 + 1][2 * i];
                low[0] += u.of[m][i].x;
                low[1] += u.of[m][i].y;
                high[0] += u.of[m][i].z;
                high[1] += u.of[m][i].w;
                sum += (low[0] + low[1]) + (high[0] + high[1]);
            }
            const float mean = ps_group_sum<4>(sum) * (1.0f / D);
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const float *const v = &r[n / 8][n % 8][2 * i];
                squares += (v[0] - mean) * (v[0] - mean) + (v[1] - mean) * (v[1] - mean);
            }
            const float rstd = rsqrtf(fmaf(ps_group_sum<4>(squares), 1.0f / D, x.epsilon));
            const bool keeps = x.xhat2 && at.row(i) < count;
            if (keeps && at.q == 0) {
                x.rstd2[row0 + at.row(i)] = rstd;
            }
            __half *const to = x.xhat2 + (row0 + at.row(i)) * D + 4 * at.q;
#pragma unroll
            for (int m = 0; m < 8; m++) {
                const float4 v = four(r[m / 4], m % 4, i);
                const uint2 xhat =
                    as_halves(make_float4((v.x - mean) * rstd, (v.y - mean) * rstd, (v.z - mean) * rstd, (v.w - mean) * rstd));
                put_shared(place.of(m, i), xhat);
                if (keeps) {
                    put_global(to + 16 * m, xhat);
                }
            }
        }
        ps_publish();
        at.sync();
        float c[16][4];
#pragma unroll 1
        for (int j = 0; j < hidden; j++) {
            at.refresh();
            uint2 kept[2];
            take_kept(kept, x.kept_gelu + row0 * (x.f / 32) + 2 * j, x.f / 32, drops, count, at);
            float z[8][4];
            uint32_t piece = ring.take();
            ps_wgmma_begin();
            multiply_columns<true>(z, left, piece);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(z);
            ring.release();
            add_bias(z, b_1 + COLUMNS * j, at);
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    z[n][k] *= ps_gelu_sigmoid(z[n][k]);
                }
            }
            if (drops) {
                drop(z, kept, scale, at);
            }
            uint32_t h[4][4];
            as_left(h, z);
            piece = ring.take();
            ps_wgmma_begin();
            multiply_rows(c, h, piece, j > 0);
            ps_wgmma_commit();
            ps_wgmma_wait<0>();
            ps_pin(h);
            ps_pin(c);
            ring.release();
        }
        uint4 kept_output[2];
        take_kept(kept_output, x.kept_output + row0 * 4, 4, drops, count, at);
        add_bias(c, b_2, at);
        if (drops) {
            drop(c, kept_output, scale, at);
        }
#pragma unroll
        for (int n = 0; n < 16; n++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                c[n][k] += r[n / 8][n % 8][k];
            }
        }
        take_rows(rows, x.merged, row0 + (int64_t)gridDim.x * TILE, x.rows, at);
        keep_sums(x.y + row0 * D, D, c, count, at);
    }
}

} // namespace PS_REAL16_SPACE

#endif
