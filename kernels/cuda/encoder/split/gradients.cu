/* Weights' gradients of a layer of encoder/split/rows.cu, x' dy over all rows, in one launch: x kept in fp16, dy in fp32, tf32
 * products.
 *
 * A block has a tile of 128 columns of dy by 128 of x and a slab of rows, 32 at a time, five of those on their way. wgmma takes
 * tf32 with the summed dimension contiguous only, and there is no instruction that turns words: dy is the left operand, which comes
 * from shared memory to registers element by element; x is turned as 16 bits by ldmatrix and laid out as words for the right one.
 * The sums of dy's columns, biases' gradients, come on the way. What slabs give is added in a fixed order by the kernel that adds
 * encoder/streamed/float.cu's splits (sum_up), since it is laid out as those are. gemm/wgmma.cu's gradient_kernel goes the same way
 * with two operands of fp32, the right one turned word by word, and a product a launch.
 *
 * Why one launch: the eight tiles of a layer (f 256) share the multiprocessors in 16 slabs, where a launch a product has 132 of 64
 * KB each: 4 x 8.6 MB of partial sums to write and read. Tiles of a slab run side by side and find each other's rows in L2. Counts,
 * R rows: 2 R (4 d^2 + 2 d f) FLOPs, 4 R (5 d + f) bytes of dy and 2 R (3 d + f) of x. weather (R 112,896, d 128, f 256): 29.6
 * GFLOP, 71 us at wgmma's 415 TFLOP/s; 549 MB, 131 us at 4.2 TB/s; from L2 693 MB. Measured 168. */
#include "kernels/cuda/encoder/streamed/float.cuh"
#include "kernels/cuda/encoder/streamed/float_device.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

namespace PS_REAL16_SPACE
{

enum {
    D = 128,
    EDGE = 128, /* of a tile */
    THREADS = 256,
    DEEP = 32,
    STAGES = 6,
    CHAIN = 256,          /* pieces that the tensor cores add up, whose sums are cut off; longer ones are added in FADD */
    LEFT_LINE = EDGE + 8, /* floats; lanes of a fragment read 32 banks */
    LEFT_BYTES = DEEP * LEFT_LINE * 4,
    STAGE_BYTES = LEFT_BYTES + DEEP * EDGE * 2,
    PANEL_BYTES = EDGE * DEEP * 4, /* x turned */
    SHARED = 2 * PANEL_BYTES + STAGES * STAGE_BYTES + 1024
};

struct layer_products {
    const float *dy[4]; /* [R, dys] */
    const __half *x[4]; /* [R, xs] */
    int dys[4], xs[4];
    float *to[4], *sums[4]; /* of the first slab: [xs, dys], [dys] */
    int64_t slab;           /* floats from slab to slab */
    int64_t rows, slab_rows;
    int tiles, hidden_tiles;
};

static int tiles_of(const struct ps_encoder_request *e)
{
    return 4 + 2 * (int)((e->d_ff + EDGE - 1) / EDGE);
}

int ps_encoder_rows_slabs(const struct ps_kernels *k, const struct ps_encoder_request *e)
{
    const int64_t most = (e->sequences * e->patches + DEEP - 1) / DEEP;
    const int slabs = ps_cuda(k)->multiprocessors / tiles_of(e);
    return slabs < 1 ? 1 : slabs < most ? slabs : (int)most;
}

static __global__ void __launch_bounds__(THREADS, 1) layer_gradients(const __grid_constant__ struct layer_products x)
{
    ps_grid_begin();
    extern __shared__ uint8_t gradient_memory[];
    const uint32_t shared = (ps_shared_address(gradient_memory) + 1023u) & ~1023u, stages = shared + 2 * PANEL_BYTES;
    const float *const staged = (const float *)(gradient_memory + (stages - ps_shared_address(gradient_memory)));
    /* Tiles: three of W_qkv, one of W_o, W_1's, W_2's. */
    const int tile = (int)blockIdx.x % x.tiles, slab = (int)blockIdx.x / x.tiles;
    const int of = tile < 3 ? 0 : tile < 4 ? 1 : tile < 4 + x.hidden_tiles ? 2 : 3;
    const int part = EDGE * (tile - (of == 0 ? 0 : of == 1 ? 3 : of == 2 ? 4 : 4 + x.hidden_tiles));
    const int m0 = of == 3 ? 0 : part, n0 = of == 3 ? part : 0;
    const int dys = x.dys[of], xs = x.xs[of];
    const int64_t first = slab * x.slab_rows;
    const int rows = (int)(x.rows - first < x.slab_rows ? x.rows - first : x.slab_rows), pieces = (rows + DEEP - 1) / DEEP;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    /* A thread copies 16 bytes of every 8th row of dy and of every 16th of x. Units of x change places by rows 8 i and 8 i + 1. */
    const int m_row = (int)threadIdx.x / 32, m_column = lane * 4, n_row = (int)threadIdx.x / 16, n_unit = (int)threadIdx.x % 16;
    const int m_bytes = m0 + m_column < dys ? 16 : 0, n_bytes = n0 + n_unit * 8 < xs ? 16 : 0;
    const float *dy_from = m_bytes ? x.dy[of] + (first + m_row) * dys + m0 + m_column : x.dy[of];
    const __half *x_from = n_bytes ? x.x[of] + (first + n_row) * xs + n0 + n_unit * 8 : x.x[of];
    const uint32_t dy_to = stages + (m_row * LEFT_LINE + m_column) * 4, x_to = stages + LEFT_BYTES + n_row * (EDGE * 2);
    const int64_t dy_step = m_bytes ? 8 * (int64_t)dys : 0, x_step = n_bytes ? 16 * (int64_t)xs : 0;
    int left = rows, fetch_stage = 0;
    auto fetch = [&]() {
        if (left > 0) {
            const uint32_t stage = (uint32_t)fetch_stage * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < DEEP / 8; i++) { /* rows beyond are not read */
                ps_copy_async_part(dy_to + stage + i * 8 * LEFT_LINE * 4, dy_from, i * 8 < left - m_row ? m_bytes : 0);
                dy_from += dy_step;
            }
#pragma unroll
            for (int i = 0; i < DEEP / 16; i++) {
                const int row = n_row + 16 * i, unit = n_unit ^ (row % 2 + row / 8 * 2);
                ps_copy_async_part(x_to + stage + i * 16 * EDGE * 2 + unit * 16, x_from, row < left ? n_bytes : 0);
                x_from += x_step;
            }
            left -= DEEP;
            fetch_stage = fetch_stage + 1 == STAGES ? 0 : fetch_stage + 1;
        }
        ps_copy_commit();
    };
    /* A warp turns 16 columns; matrix i's row r is row 8 (r / 2) + 2 i + r % 2, so that lane q of four has rows 8 q .. 8 q + 7. */
    const int r = lane % 8;
    const uint32_t turn_from = stages + LEFT_BYTES + (r / 2 * 8 + lane / 8 * 2 + r % 2) * (EDGE * 2);
    auto turn = [&](int p, int stage) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int group = warp * 2 + h;
            uint32_t v[4];
            ps_ldmatrix4_transposed_at(v, turn_from + stage * STAGE_BYTES + ((group ^ r) << 4));
            const uint32_t line = shared + p % 2 * PANEL_BYTES + (group * 8 + g) * 128;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 low = __half22float2(*(const __half2 *)&v[2 * i]),
                             high = __half22float2(*(const __half2 *)&v[2 * i + 1]);
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(line + (((2 * q + i) ^ g) << 4)), "f"(low.x),
                             "f"(low.y), "f"(high.x), "f"(high.y)
                             : "memory");
            }
        }
        ps_publish();
    };
#pragma unroll
    for (int p = 0; p < STAGES - 1; p++) {
        fetch();
    }
    ps_copy_wait_group<STAGES - 2>();
    __syncthreads();
    turn(0, 0);
    const uint32_t place = ps_wgmma_place(shared);
    float sum[EDGE / 8][4], total[EDGE / 8][4], column_sum[2] = {0, 0};
    ps_zero(sum);
    ps_zero(total);
    int stage = 0;
    for (int p = 0; p < pieces; p++) {
        ps_copy_wait_group<STAGES - 3>();
        __syncthreads(); /* piece p is turned, p + 1 is there; the other side and the stage before p's have been read */
        fetch();
        const float *const at = staged + stage * (STAGE_BYTES / 4) + q * LEFT_LINE + warp * 16 + g;
        uint32_t a[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            float value[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                value[i] = at[(s * 8 + i / 2 * 4) * LEFT_LINE + i % 2 * 8];
                a[s][i] = ps_round_up(value[i]);
            }
            column_sum[0] += value[0] + value[2];
            column_sum[1] += value[1] + value[3];
        }
        ps_wgmma_begin();
#pragma unroll
        for (int s = 0; s < 4; s++) {
            ps_wgmma<float>(sum, a[s], ps_wgmma_operand(place + ((p % 2 * PANEL_BYTES) >> 4), s * 32), 1);
        }
        ps_wgmma_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if (p + 1 < pieces) {
            turn(p + 1, stage);
        }
        ps_wgmma_wait<0>();
        ps_pin(a);
        ps_pin(sum);
        if ((p + 1) % CHAIN == 0 || p + 1 == pieces) {
#pragma unroll
            for (int i = 0; i < EDGE / 2; i++) {
                total[i / 4][i % 4] += sum[i / 4][i % 4];
            }
            ps_zero(sum);
        }
    }
    const int m = m0 + warp * 16 + g;
    if (n0 == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            column_sum[i] = ps_group_sum<4>(column_sum[i]);
            if (q == 0 && m + 8 * i < dys) {
                (x.sums[of] + slab * x.slab)[m + 8 * i] = column_sum[i];
            }
        }
    }
    float *const out = x.to[of] + slab * x.slab + m;
#pragma unroll
    for (int j = 0; j < EDGE / 8; j++) {
        if (n0 + j * 8 < xs) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (m + i / 2 * 8 < dys) {
                    out[(n0 + j * 8 + q * 2 + i % 2) * dys + i / 2 * 8] = total[j][i];
                }
            }
        }
    }
}

enum ps_status ps_encoder_rows_gradients(const struct ps_kernels *k, const struct ps_encoder_request *e, int layer,
                                         const struct ps_encoder_rows_operands *operands, float *parts)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const int d = (int)e->d_model, f = (int)e->d_ff, slabs = ps_encoder_rows_slabs(k, e);
    const int xs[4] = {d, d, d, f}, dys[4] = {3 * d, d, f, d};
    struct layer_products x = {};
    for (int i = 0; i < 4; i++) {
        x.dy[i] = operands->dy[i];
        x.x[i] = operands->x[i];
        x.dys[i] = dys[i];
        x.xs[i] = xs[i];
        ps_encoder_float_part(e, layer, i, parts, &x.to[i], &x.sums[i]);
    }
    x.slab = ps_encoder_float_parts(e);
    x.rows = e->sequences * e->patches;
    x.slab_rows = ((x.rows + slabs - 1) / slabs + DEEP - 1) / DEEP * DEEP;
    x.tiles = tiles_of(e);
    x.hidden_tiles = (f + EDGE - 1) / EDGE;
    return launch(c, layer_gradients, dim3((unsigned)(slabs * x.tiles)), THREADS, SHARED, "encoder_backward", x);
}

} // namespace PS_REAL16_SPACE
