/* Weights of encoder/split/rows.cu's kernels: their layout in pieces, the kernel that packs them so, and the ring through which the
 * copy engine brings them to shared memory. */
#ifndef PS_KERNELS_CUDA_ENCODER_SPLIT_PIECES_CUH
#define PS_KERNELS_CUDA_ENCODER_SPLIT_PIECES_CUH

#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/encoder/streamed/float_device.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

namespace PS_REAL16_SPACE
{

enum {
    D = 128,
    ROWS = 64, /* of a warpgroup */
    COLUMNS = 64,
    GROUPS = 2, /* warpgroups of a block that multiply; one thread of another brings weights. ln1_qkv has its own number */
    THREADS = (GROUPS + 1) * 128,
    TILE = GROUPS * ROWS,
    /* Registers a thread: taken from, and given to, what the block has (else the kernel waits for ever), in steps of 8. */
    FEW_REGISTERS = 24,
    REGISTERS = 240,
    PANEL_BYTES = ROWS * 128, /* 64 columns of fp16, 32 of tf32 */
    HALF_BYTES = D / 64 * PANEL_BYTES,
    WORD_BYTES = D / 32 * PANEL_BYTES
};

static_assert(GROUPS * REGISTERS + FEW_REGISTERS <= (GROUPS + 1) * (65536 / THREADS / 8 * 8), "of the multiprocessor's");

/* Pieces of a layer, in this order, HIDDEN = f / 64. fp16, HALF_BYTES each: of W_qkv 6 and W_o 2, 64 columns each; W_1's 64 columns
 * and W_2's 64 rows in turns, HIDDEN of each. tf32, WORD_BYTES each, backward's: W_2' and W_1' likewise, W_o' 2, W_qkv' 6, 64 rows
 * each. A piece of columns holds [64][128], the product's columns and what it sums over, a piece of rows [128][64]. In panels of
 * 128 bytes of the summed dimension a line, whose units of 16 are exchanged by the line's number modulo 8.
 *
 * Lines of a piece are columns in the order of `spread`, so that a lane's sums of two neighbouring groups of 8 are four columns in
 * a row, 16 bytes of fp32. What sums over hidden columns in registers has them in that order too; tf32 takes the columns 0, 2, 4,
 * 6, 1, 3, 5, 7 of each eight of those (as sums come out). */
static __host__ __device__ __forceinline__ int halves_of(int hidden)
{
    return 8 + 2 * hidden;
}

struct row_places {
    int w_ot, w_qkvt, all; /* pieces of tf32; those of W_2' and W_1' come first */
    __host__ __device__ __forceinline__ explicit row_places(int hidden)
        : w_ot(2 * hidden), w_qkvt(2 * hidden + 2), all(2 * hidden + 8)
    {
    }
};

static __host__ __device__ __forceinline__ int64_t layer_bytes(int hidden)
{
    return (int64_t)halves_of(hidden) * HALF_BYTES + (int64_t)row_places(hidden).all * WORD_BYTES;
}

/* The column that sum 8 n + 2 q + e stands for. */
static __device__ __forceinline__ int spread(int sum)
{
    const int n = sum / 8, q = sum % 8 / 2, e = sum % 2;
    return n / 2 * 16 + q * 4 + n % 2 * 2 + e;
}

/* ---- packing ---- */

struct packing {
    uint8_t *pieces; /* [layers, layer_bytes] */
    float *biases;   /* [layers, 3d + f] */
    const float *weights, *parameters;
    struct ps_encoder_layout at;
    int f, units; /* 16 bytes each, of a layer's pieces */
};

/* Forward: what is summed index k and column n of a piece of fp16. */
static __device__ __forceinline__ float forward_element(const struct packing &x, const float *w, const float *p, int piece, int k,
                                                        int n)
{
    if (piece < 6) {
        return w[x.at.w_qkv + k * (3 * D) + piece * COLUMNS + n] * p[x.at.ln1_gamma + k];
    }
    if (piece < 8) {
        return w[x.at.w_o + k * D + (piece - 6) * COLUMNS + n];
    }
    const int j = (piece - 8) / 2 * COLUMNS;
    return piece % 2 == 0 ? w[x.at.w_1 + k * x.f + j + n] * p[x.at.ln2_gamma + k] : w[x.at.w_2 + (j + k) * D + n];
}

/* Backward, of tf32. */
static __device__ __forceinline__ float backward_element(const struct packing &x, const float *w, const float *p, int piece, int k,
                                                         int n)
{
    const row_places at(x.f / COLUMNS);
    if (piece < at.w_ot) {
        const int j = piece / 2 * COLUMNS;
        return piece % 2 == 0 ? w[x.at.w_2 + (j + n) * D + k] : w[x.at.w_1 + n * x.f + j + k] * p[x.at.ln2_gamma + n];
    }
    if (piece < at.w_qkvt) {
        return w[x.at.w_o + ((piece - at.w_ot) * COLUMNS + n) * D + k];
    }
    return w[x.at.w_qkv + n * (3 * D) + (piece - at.w_qkvt) * COLUMNS + k] * p[x.at.ln1_gamma + n];
}

/* A unit of 16 bytes, or a bias, a thread; a layer to each blockIdx.y. Reads 8 bytes for each element. */
static __global__ void __launch_bounds__(256) pack_rows(const __grid_constant__ struct packing x)
{
    ps_grid_begin();
    const int layer = (int)blockIdx.y, hidden = x.f / COLUMNS, halves = halves_of(hidden) * (HALF_BYTES / 16);
    const row_places at(hidden);
    const float *const w = x.weights + layer * x.at.matrix_stride, *const p = x.parameters + layer * x.at.vector_stride;
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < x.units) {
        const bool half = i < halves;
        const int bytes = half ? HALF_BYTES : WORD_BYTES, from = half ? i : i - halves;
        const int piece = from / (bytes / 16), in = from % (bytes / 16);
        const bool of_rows = half ? piece >= 8 && piece % 2 == 1 : piece >= at.w_qkvt || (piece < at.w_ot && piece % 2 == 1);
        const int lines = of_rows ? D : COLUMNS, line = in / 8 % lines, unit = in % 8 ^ line % 8, panel = in / 8 / lines;
        uint4 out;
        uint32_t *const word = (uint32_t *)&out;
        if (half) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float v[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int k = panel * 64 + unit * 8 + 2 * j + h;
                    v[h] = forward_element(x, w, p, piece, of_rows ? spread(k) : k, spread(line));
                }
                word[j] = ps_pack<ps_fp16>(v);
            }
        } else {
            const bool in_registers = of_rows && piece < at.w_qkvt;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int place = unit % 2 * 4 + j, eight = panel * 32 + unit / 2 * 8;
                const int k = in_registers ? spread(eight + 2 * (place % 4) + place / 4) : eight + place;
                word[j] = ps_tf32(backward_element(x, w, p, piece, k, spread(line)));
            }
        }
        *(uint4 *)(x.pieces + layer * layer_bytes(hidden) + (int64_t)i * 16) = out;
        return;
    }
    i -= x.units;
    if (i < 3 * D + x.f) {
        const bool first = i < 3 * D;
        const int column = first ? i : i - 3 * D, width = first ? 3 * D : x.f;
        const float *const matrix = w + (first ? x.at.w_qkv : x.at.w_1) + column, *const beta =
                                                                                      p + (first ? x.at.ln1_beta : x.at.ln2_beta);
        float sum = p[(first ? x.at.b_qkv : x.at.b_1) + column];
        for (int k = 0; k < D; k++) {
            sum = fmaf(beta[k], matrix[k * width], sum);
        }
        x.biases[layer * (3 * D + x.f) + i] = sum;
    }
}

/* ---- pieces on their way ---- */

/* The slots that pieces pass through; where there are as many as pieces, these stay. */
template <int SLOTS, int SLOT_BYTES, int FULL> struct piece_ring {
    static constexpr int EMPTY = FULL + 8 * SLOTS; /* where the slots' barriers are, from the first slot on */
    uint32_t slots;                                /* their address */
    int count;                                     /* slots in use */
    int slot, oldest;                              /* of the next piece to take, of the first not yet released */
    uint32_t parity;
    bool stay;

    /* By all threads. readers: warps. pieces: of a turn. */
    __device__ __forceinline__ piece_ring(uint32_t slots_, int readers, int pieces)
        : slots(slots_), count(pieces < SLOTS ? pieces : SLOTS), slot(0), oldest(0), parity(0), stay(pieces <= SLOTS)
    {
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < SLOTS; i++) {
                ps_mbarrier_init(slots + FULL + 8 * i, 1);
                ps_mbarrier_init(slots + EMPTY + 8 * i, readers * 32);
            }
            ps_mbarrier_publish();
        }
        __syncthreads();
    }
    /* One thread, for all readers: `pieces` of them, `times` over; piece(j, bytes) is where number j is, of how many bytes; rows(i)
     * goes before turn i. */
    template <typename P, typename R> __device__ __forceinline__ void bring(int times, int pieces, P piece, R rows)
    {
        int to = 0;
        uint32_t turn = 1; /* the first turn finds the slots empty */
        for (int i = 0; i < times; i++) {
            rows(i);
            for (int j = 0; j < (stay && i > 0 ? 0 : pieces); j++) {
                int bytes;
                const uint8_t *const from = piece(j, bytes);
                ps_mbarrier_wait(slots + EMPTY + 8 * to, turn);
                ps_mbarrier_expect(slots + FULL + 8 * to, bytes);
                ps_bulk_fetch(slots + to * SLOT_BYTES, from, bytes, slots + FULL + 8 * to);
                if (++to == SLOTS) {
                    to = 0;
                    turn ^= 1;
                }
            }
        }
    }
    template <typename P> __device__ __forceinline__ void bring(int times, int pieces, P piece)
    {
        bring(times, pieces, piece, [](int) {});
    }
    /* The next piece, once it is there: its place as wgmma's operand. */
    __device__ __forceinline__ uint32_t take()
    {
        ps_mbarrier_wait(slots + FULL + 8 * slot, parity);
        const uint32_t place = ps_wgmma_place(slots + slot * SLOT_BYTES);
        if (++slot == count) {
            slot = 0;
            parity ^= stay ? 0 : 1;
        }
        return place;
    }
    /* The oldest piece taken, which no product reads any more. */
    __device__ __forceinline__ void release()
    {
        if (!stay) {
            ps_mbarrier_arrive(slots + EMPTY + 8 * oldest);
            oldest = oldest + 1 == SLOTS ? 0 : oldest + 1;
        }
    }
};

} // namespace PS_REAL16_SPACE

#endif
