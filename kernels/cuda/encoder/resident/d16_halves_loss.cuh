/* The end of a training step's forward in encoder/resident/d16_halves.cu: what the last norm 2 gives, the head, the loss, and the
 * sums over rows of dz and dz xhat that backward begins with.
 *
 * A block has up to 8 sequences at once, whose rows follow one another, and W_h in shared memory. x' = W_h' z' and dz' = W_h dx'
 * by mma.sync with the sequences as the columns, as encoder/head.cuh has them; the sum over patches is cut among warps and added in
 * order. Before the wait: W_h, targets, all else that older kernels have left. Bytes, etth1_paper: 3.6 MB, and 129 KB of W_h from
 * L2 a block. Flops: 4 S N d H. Latency bounds it. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HALVES_LOSS_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HALVES_LOSS_CUH

#include "kernels/cuda/encoder/head.cuh"
#include "kernels/cuda/encoder/resident/d16_halves.cuh"

namespace ps_resident
{

enum { LOSS_WARPS = 20, LOSS_SPLITS = 5, LOSS_ITEMS = 2 /* a warp's, of a sequence and 32 columns */ };

/* In shared memory, in order: W_h; z [8][z_pitch], and then slopes [8][columns] and squares [warps]; dx [8][columns + 8]; columns'
 * factors; the warps' parts of x [splits][8][columns + 4], and before and after that sums over rows. */
struct halves_loss_places {
    int columns, z_pitch, z, dx, factors, parts, bytes;

    __host__ __device__ __forceinline__ halves_loss_places(int n, int horizon)
    {
        columns = (horizon + 31) / 32 * 32;
        z_pitch = n * D + 8;
        z = n * D * horizon * 2;
        const int z_bytes = HEAD_SEQUENCES * z_pitch * 2, slopes = HEAD_SEQUENCES * columns * 4 + LOSS_WARPS * 8;
        dx = z + (z_bytes > slopes ? z_bytes : slopes);
        factors = dx + HEAD_SEQUENCES * (columns + 8) * 2;
        parts = factors + (int)sizeof(struct halves_columns);
        const int parts_bytes = LOSS_SPLITS * HEAD_SEQUENCES * (columns + 4) * 4, scratch = (int)sizeof(union halves_scratch);
        bytes = parts + (parts_bytes > scratch ? parts_bytes : scratch);
    }
};

template <class T>
static __global__ void __launch_bounds__(LOSS_WARPS * 32)
    halves_loss(const __grid_constant__ encoder<T> x, const __grid_constant__ struct halves h)
{
    extern __shared__ uint4 shared_memory[];
    char *const memory = (char *)shared_memory;
    const int horizon = x.head.horizon, pieces = horizon / 8;
    const struct halves_loss_places to(x.n, horizon);
    const int dx_pitch = to.columns + 8, part_pitch = to.columns + 4, chunks = to.columns / 32;
    T *const weight = (T *)memory, *const z = (T *)(memory + to.z), *const dx = (T *)(memory + to.dx);
    float *const slopes = (float *)z, *const parts = (float *)(memory + to.parts);
    double *const squares = (double *)(slopes + HEAD_SEQUENCES * to.columns);
    struct halves_columns &c = *(struct halves_columns *)(memory + to.factors);
    union halves_scratch &scratch = *(union halves_scratch *)parts;
    tile_place<T> at;
    const int thread = (int)threadIdx.x, warp = __shfl_sync(0xffffffffu, thread / 32, 0);
    /* A row's pieces of 16 bytes are turned, so that those of 8 rows lie in all banks. */
    const int odd = pieces % 2 ? 3 : pieces % 4 ? 2 : pieces % 8 ? 1 : 0, turn = (at.lane & 7) >> odd;
    const auto turned = [&](int piece, int by) { return (piece + by < pieces ? piece + by : piece + by - pieces) * 8; };
    {
        const int step_row = (int)blockDim.x / pieces, step_piece = (int)blockDim.x - step_row * pieces;
        int row = thread / pieces, piece = thread - row * pieces;
        while (row < x.n * D) {
            ps_copy_async(weight + row * horizon + turned(piece, (row & 7) >> odd), x.head.weight + row * horizon + piece * 8);
            row += step_row;
            piece += step_piece;
            if (piece >= pieces) {
                piece -= pieces;
                row++;
            }
        }
    }
    for (int i = thread; i < HEAD_SEQUENCES * dx_pitch / 8; i += (int)blockDim.x) {
        ((uint4 *)dx)[i] = make_uint4(0, 0, 0, 0);
    }
    const struct halves_norm norm = look_forward(x, h, h.layer, NORM_2);
    const uint64_t cursor = step_at(&x.embed.state->cursor);
    struct halves_sums sums;
    double total = 0; /* the thread's column's sum of dx, or the last thread's of the squared errors */
#pragma unroll 1
    for (int u0 = (int)blockIdx.x * x.block_units; u0 < (int)x.units; u0 += (int)gridDim.x * x.block_units) {
        const bool first = u0 == (int)blockIdx.x * x.block_units;
        const int count = min(x.block_units, (int)x.units - u0);
        float target[LOSS_ITEMS], bias[LOSS_ITEMS], mean[LOSS_ITEMS], std[LOSS_ITEMS];
#pragma unroll
        for (int i = 0; i < LOSS_ITEMS; i++) {
            const int item = warp + i * LOSS_WARPS, s = item / chunks, column = (item - s * chunks) * 32 + at.lane;
            const bool mine = s < count && column < horizon;
            const float *const from = window_at(x, x.head.targets, cursor, (uint32_t)(u0 + (mine ? s : 0)));
            target[i] = *(from && mine ? from + column * x.head.targets.by_time : x.head.targets.data);
            target[i] = from ? target[i] : NAN;
            bias[i] = __ldcg(x.head.bias + (mine ? column : 0));
            mean[i] = __ldcg(x.embed.mean + u0 + (mine ? s : 0));
            std[i] = __ldcg(x.embed.std + u0 + (mine ? s : 0));
        }
        if (first) {
            ps_grid_begin();
        } else {
            __syncthreads(); /* the sequences before have been read */
        }
        for (int tile = warp; (first && tile == warp) || tile * 16 < count * x.n; tile += LOSS_WARPS) {
            const int row = tile * 16 + at.g;
            uint32_t a[4];
            float y[2][4];
            at.first = (int64_t)u0 * x.n + row;
            at.here[0] = row < count * x.n;
            at.here[1] = row + 8 < count * x.n;
            take_stream(a, stream_at(h, h.layer, SLOT_SUM_2, at), at);
            if (first && tile == warp) {
                begin_forward(c, x, h, h.layer, NORM_2, norm, scratch);
            }
            unpack_operand<T>(y, a);
            affine(y, c.scale, c.shift, at.q);
            store_rows((T *)x.u + x.layers * x.rows * D, y, at);
            pack_operand<T>(a, y[0], y[1]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (at.here[i % 2]) {
                    const int r = row + i % 2 * 8, s = (int)ps_divide(r, x.embed.by_count);
                    *(uint32_t *)(z + r * D + s * 8 + i / 2 * 8 + at.q * 2) = a[i];
                }
            }
        }
        __syncthreads();
        if (warp < LOSS_SPLITS * chunks) {
            const int chunk = warp % chunks, split = warp / chunks;
            float v[2][4];
            clear(v);
            for (int k = split; k < x.n; k += LOSS_SPLITS) {
                uint32_t a[4], b[2];
                ps_ldmatrix2(b, z + at.lane % 8 * to.z_pitch + at.across + k * D);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (chunk * 32 + i * 16 < horizon) {
                        ps_ldmatrix4_transposed(a, weight + (k * D + at.other) * horizon +
                                                       turned(chunk * 4 + i * 2 + at.across / 8, turn));
                        ps_mma16<T>(v[i], a, b[0], b[1], v[i]);
                    }
                }
            }
            float *const part = parts + (split * HEAD_SEQUENCES + at.q * 2) * part_pitch + chunk * 32 + at.g;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                part[i % 2 * part_pitch + i / 4 * 16 + i % 4 / 2 * 8] = v[i / 4][i % 4];
            }
        }
        at.first = (int64_t)(u0 + at.g) * x.n + warp;
        at.here[0] = at.g < count && warp < x.n;
        at.here[1] = false;
        uint32_t row[4]; /* of what the norm has read, patch k of sequence g */
        take_stream(row, stream_at(h, h.layer, SLOT_SUM_2, at), at);
        __syncthreads();
        double square = 0.0;
#pragma unroll
        for (int i = 0; i < LOSS_ITEMS; i++) {
            const int item = warp + i * LOSS_WARPS, s = item / chunks, column = (item - s * chunks) * 32 + at.lane;
            float slope = 0.0f;
            if (s < count && column < horizon) {
                const float *const part = parts + s * part_pitch + column;
                float product = part[0];
#pragma unroll
                for (int j = 1; j < LOSS_SPLITS; j++) {
                    product += part[j * HEAD_SEQUENCES * part_pitch];
                }
                double error;
                slope = head_slope(x, product, bias[i], target[i], mean[i], std[i], &error);
                square += error;
                ps_put(x.head.dx + (int64_t)(u0 + s) * horizon + column, slope);
                ps_put(dx + s * dx_pitch + column, slope);
            }
            if (s < HEAD_SEQUENCES) {
                slopes[s * to.columns + column] = slope;
            }
        }
        square = ps_group_sum<32>(square);
        if (at.lane == 0) {
            squares[warp] = square;
        }
        __syncthreads();
        if (thread < horizon) {
            for (int s = 0; s < count; s++) {
                total += slopes[s * to.columns + thread];
            }
        } else if (thread == LOSS_WARPS * 32 - 1) {
            for (int i = 0; i < LOSS_WARPS; i++) {
                total += squares[i];
            }
        }
        uint32_t b[HEAD_COLUMNS / 16][2];
#pragma unroll
        for (int i = 0; i < HEAD_COLUMNS / 16; i += 2) {
            if (i * 16 < horizon) {
                uint32_t a[4];
                ps_ldmatrix4(a, dx + at.lane % 8 * dx_pitch + at.lane / 8 * 8 + i * 16);
                b[i][0] = a[0], b[i][1] = a[1], b[i + 1][0] = a[2], b[i + 1][1] = a[3];
            }
        }
#pragma unroll 1
        for (int k = warp; k < x.n; k += LOSS_WARPS) {
            float v[4] = {0, 0, 0, 0}, g[2][4], s[2][4];
#pragma unroll
            for (int i = 0; i < HEAD_COLUMNS / 16; i++) {
                if (i * 16 < horizon) {
                    uint32_t a[4];
                    ps_ldmatrix4(a, weight + (k * D + at.near) * horizon + turned(i * 2 + at.far / 8, turn));
                    ps_mma16<T>(v, a, b[i][0], b[i][1], v);
                }
            }
            /* Transposed, a lane has columns 2q and 2q + 1 of each half of sequence g's row. */
            const uint32_t dz[4] = {ps_movmatrix(ps_pack<T>(v[0], v[1])), 0, ps_movmatrix(ps_pack<T>(v[2], v[3])), 0};
            unpack_operand<T>(g, dz);
            unpack_operand<T>(s, row);
            affine(s, c.rstd, c.centre, at.q);
            sums.add(g, s, at);
            store_rows(x.head.dz, g, at);
            at.first += LOSS_WARPS;
            at.here[0] = at.here[0] && k + LOSS_WARPS < x.n;
            take_stream(row, stream_at(h, h.layer, SLOT_SUM_2, at), at);
        }
    }
    if (thread < horizon) {
        put_head_sum(x, thread, total);
    } else if (thread == LOSS_WARPS * 32 - 1) {
        put_head_sum(x, horizon, total);
    }
    leave_sums(h, sums, scratch);
}

} // namespace ps_resident

#endif
