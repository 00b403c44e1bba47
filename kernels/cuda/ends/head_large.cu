/* head_step of a weight that no block's shared memory holds, on sm_90.
 *
 * Why: products of the library's, a sum of their parts and a kernel for the loss between them read z once and write dz once, but
 * wait for one another: 36 us at weather for 58 MB. Here W_h is cut into slices of its rows, one a block, which stay in shared
 * memory for both products. The blocks of 128 sequences leave their parts of x in L2; as many of them as have something to do wait
 * for all parts and add them up in order, each for 16 of the sequences and some steps ahead; all wait for these, and have the whole
 * dx for their slice's part of dz.
 *
 * dz, dx, partials =. Bytes: 4 S K + 10 S H, from L2 8 S H a slice and 2 K H a tile. Flops: 4 S K H. Weather
 * (S 2,688, K 5,376, H 96): 6 slices of 896 rows for each of 21 tiles; 58 MB, 14 us at 4.2 TB/s. It takes 33 us alone: 8 for z, 7
 * in the two meetings, 11 for dz; in the step 8 less than the three kernels. 28 sequences of 65,536 terms: 128 slices, 23 MB,
 * 19 us. Where the blocks are more than the multiprocessors the library's products are faster (electricity: 45 us of 7,250). */
#include "kernels/cuda/ends/head.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/count.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

enum {
    ROWS = 128, /* sequences of a tile */
    COLUMNS = 96,
    CHUNK = 64, /* rows of the weight at once */
    LEAST_STAGES = 3,
    MOST_STAGES = 8,
    MOST_CHUNKS = 14, /* of a slice: what shared memory holds */
    STAGE_BYTES = ROWS * CHUNK * 2,
    LOW_BYTES = CHUNK * 64 * 2, /* a chunk's first 64 columns, and the other 32 */
    HIGH_BYTES = CHUNK * 32 * 2,
    ASIDE_BYTES = ROWS * 32 * 2, /* dx's last 32 columns; before, a piece's sums and slopes */
    THREADS = 512,
    GROUP = PS_PARTIAL_ROWS,
    EACH = GROUP * COLUMNS / THREADS,
    AT_ONCE = 8,         /* slices whose parts a thread asks for together */
    SIDES = COLUMNS / 8, /* of a group, the most pieces */
};
static_assert(THREADS * 16 <= ASIDE_BYTES && EACH * THREADS == GROUP * COLUMNS, "the sums of a piece");

/* What blocks wait for one another by: the parts of x of all slices, all pieces of dx. The last that comes turns the highest bit,
 * and the others are 0 before and after. */
struct meeting {
    unsigned parts, pieces;
};

template <typename T> struct arguments {
    CUtensorMap z, low, high; /* boxes: of z 64 x rows, of the weight 64 x 64 and 32 x 64 */
    struct ps_cuda_loss<T> loss;
    T *dz;
    float *parts;             /* [tiles][slices][128][96] */
    double *squares;          /* [tiles][8][SIDES], of a piece */
    struct meeting *meetings; /* [tiles] */
    int k, slices, chunks /* of a slice */, stages, rows;
    int columns, across; /* of a piece; pieces of a group */
    struct ps_divisor by_columns;
};

/* As ps_wgmma_operand, in panels of 64-byte rows, units exchanged by half the row's number modulo 4. */
static __device__ __forceinline__ uint64_t narrow_operand(uint32_t place, int further)
{
    return (uint64_t)(2u << 30 | 512 >> 4) << 32 | (place + (further >> 4));
}

/* How a meeting stands. Until this block has come to one its highest bit stays, that of the pieces too, which wait for all parts.
 */
static __device__ __forceinline__ unsigned glance(const unsigned *meeting)
{
    unsigned seen;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(meeting) : "memory");
    return seen;
}

/* One of so many has come; `leads` says that it is the first of them by number. */
static __device__ __forceinline__ void come(unsigned *meeting, unsigned all, bool leads)
{
    ps_count_up(meeting, leads ? 0x80000000u - (all - 1) : 1);
}

/* Until all have, who found it so before. What they wrote can be read past L1. */
static __device__ __forceinline__ void meet(const unsigned *meeting, unsigned before)
{
    while (((ps_look(meeting) ^ before) & 0x80000000u) == 0) {
    }
}

/* Zeros where it is not there. */
static __device__ __forceinline__ float4 past_l1_if(const float4 *p, bool there)
{
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
                 : "l"(p), "r"((int)there));
    return x;
}

static __device__ __forceinline__ uint4 past_l1(const uint4 *p)
{
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

/* 8 columns on from column 8 c of a row of dx: in the stage, or aside. */
static __device__ __forceinline__ unsigned char *dx_at(unsigned char *stage, unsigned char *aside, int row, int c)
{
    return c < 8 ? stage + row * 128 + (c ^ row & 7) * 16 : aside + row * 64 + (c - 8 ^ row >> 1 & 3) * 16;
}

/* A lane's sums of N groups of 8 columns, in its two rows. */
template <int N> static __device__ __forceinline__ void parts_store(float *to, const float (&sums)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        *(float2 *)(to + 8 * n) = make_float2(sums[n][0], sums[n][1]);
        *(float2 *)(to + 8 * n + 8 * COLUMNS) = make_float2(sums[n][2], sums[n][3]);
    }
}

/* Grid: tiles * slices, no more than there are multiprocessors, since the blocks of a tile wait for one another. Four warpgroups:
 * two halves of 64 sequences by two sides, of the steps ahead (64 and 32), later of the weight's rows. Shared memory: W_h's first
 * 64 columns and the others in panels, stages of z, what is aside. */
template <typename T>
static __global__ void __launch_bounds__(THREADS, 1) head_slices(const __grid_constant__ struct arguments<T> e)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ double squares[THREADS / 32];
    __shared__ uint64_t barriers[MOST_STAGES + MOST_CHUNKS];
    const struct ps_cuda_loss<T> &l = e.loss;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), g = lane / 4, q = lane % 4;
    const int half = warp / 8, side = warp / 4 % 2, own_row = 64 * half + warp % 4 * 16 + g, horizon = l.horizon;
    const int slice = (int)blockIdx.x % e.slices, tile = (int)blockIdx.x / e.slices;
    const int k0 = slice * e.chunks * CHUNK, width = e.k - k0 < e.chunks * CHUNK ? e.k - k0 : e.chunks * CHUNK;
    unsigned char *high = shared + e.chunks * LOW_BYTES, *stages = high + e.chunks * HIGH_BYTES,
                  *aside = stages + e.stages * STAGE_BYTES;
    const uint32_t low_address = __shfl_sync(0xffffffffu, ps_shared_address(shared), 0);
    const uint32_t high_address = low_address + e.chunks * LOW_BYTES, stages_address = high_address + e.chunks * HIGH_BYTES;
    const uint32_t aside_address = stages_address + e.stages * STAGE_BYTES;
    const uint32_t full = ps_shared_address(barriers), ready = full + 8 * MOST_STAGES;
    const int64_t first = (int64_t)tile * ROWS;
    const int groups = l.sequences - first < ROWS ? ((int)(l.sequences - first) + GROUP - 1) / GROUP : ROWS / GROUP;
    const int pieces = groups * e.across;
    const bool busy = 64 / GROUP * half < groups; /* the warp's half has sequences */
    /* One thread: for a chunk of z. */
    const auto ask = [&](int chunk, int slot) {
        ps_mbarrier_expect(full + 8 * slot, e.rows * CHUNK * 2);
        ps_tensor_copy2(stages_address + slot * STAGE_BYTES, &e.z, k0 + chunk * CHUNK, tile * ROWS, full + 8 * slot);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < MOST_STAGES + e.chunks; i++) {
            ps_mbarrier_init(full + 8 * i, 1);
        }
        ps_mbarrier_publish();
        for (int i = 0; i < e.chunks; i++) { /* AdamW wrote it */
            ps_mbarrier_expect(ready + 8 * i, LOW_BYTES + HIGH_BYTES);
            ps_tensor_copy2(low_address + i * LOW_BYTES, &e.low, 0, k0 + i * CHUNK, ready + 8 * i);
            ps_tensor_copy2(high_address + i * HIGH_BYTES, &e.high, 64, k0 + i * CHUNK, ready + 8 * i);
        }
    }
    ps_grid_begin();
    __syncthreads();
    struct meeting *meeting = e.meetings + tile, before = {};
    if (threadIdx.x == 0) {
        for (int i = 0; i < e.stages; i++) {
            ask(i, i);
        }
        before = {glance(&meeting->parts), glance(&meeting->pieces)};
    }
    const uint64_t cursor = l.state->cursor;
    /* What the loss needs beside x, of an element of a piece each. What the first piece needs comes early. */
    float target[EACH], mean[EACH], std[EACH], bias[EACH];
    bool there[EACH];
    const auto look = [&](int piece) {
        int64_t window[EACH], from[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = j * THREADS + threadIdx.x, row = (int)ps_divide(i, e.by_columns);
            const int64_t own = first + piece / e.across * GROUP + row;
            const int ahead = piece % e.across * e.columns + i - row * e.columns;
            const bool inside = row < GROUP && own < l.sequences && ahead < horizon;
            const int64_t s = inside ? own : first;
            const int column = inside ? ahead : 0, b = (int)ps_divide((uint32_t)s, l.by_channels);
            const uint64_t at = cursor + (uint64_t)b;
            const bool listed = at < (uint64_t)l.windows.index_count;
            window[j] = l.windows.indices[listed ? at : 0];
            window[j] = listed ? window[j] : -1;
            from[j] = (s - (int64_t)b * l.channels) * l.windows.by_channel + column * l.windows.by_time;
            mean[j] = l.mean[s];
            std[j] = l.std[s];
            bias[j] = l.bias[column];
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            there[j] = window[j] >= 0 && window[j] < l.windows.count;
            target[j] = l.windows.data[(there[j] ? window[j] : 0) * l.windows.by_window + from[j]];
        }
    };
    if (slice < pieces) {
        look(slice);
    }
    /* x = z W_h: this slice's part of it. */
    float x_low[8][4], x_high[4][4];
    ps_zero(x_low);
    ps_zero(x_high);
    int stage = 0;
    uint32_t parity = 0;
    for (int chunk = 0; chunk < e.chunks; chunk++) {
        ps_mbarrier_wait(ready + 8 * chunk, 0);
        ps_mbarrier_wait(full + 8 * stage, parity);
        const uint32_t left = ps_wgmma_place(stages_address + stage * STAGE_BYTES + half * (STAGE_BYTES / 2));
        ps_wgmma_begin();
        if (!busy) {
        } else if (side == 0) {
            const uint32_t right = ps_wgmma_place(low_address + chunk * LOW_BYTES);
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++) {
                ps_wgmma<T, 0, 1>(x_low, ps_wgmma_operand(left, 32 * k), ps_wgmma_operand(right, 2048 * k), 1);
            }
        } else {
            const uint32_t right = ps_wgmma_place(high_address + chunk * HIGH_BYTES);
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++) {
                ps_wgmma<T, 0, 1>(x_high, ps_wgmma_operand(left, 32 * k), narrow_operand(right, 1024 * k), 1);
            }
        }
        ps_wgmma_commit();
        ps_wgmma_wait<0>();
        ps_pin(x_low);
        ps_pin(x_high);
        if (chunk + e.stages < e.chunks) {
            __syncthreads();
            if (threadIdx.x == 0) {
                ask(chunk + e.stages, stage);
            }
        }
        stage = stage + 1 == e.stages ? 0 : stage + 1;
        parity ^= stage == 0;
    }
    float *parts = e.parts + (int64_t)tile * e.slices * (ROWS * COLUMNS);
    float *to = parts + (slice * ROWS + own_row) * COLUMNS + 2 * q;
    if (first + own_row - g >= l.sequences) {
    } else if (side == 0) {
        parts_store(to, x_low);
    } else {
        parts_store(to + 64, x_high);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        come(&meeting->parts, e.slices, slice == 0);
        if (slice < pieces) {
            meet(&meeting->parts, before.parts);
        }
    }
    __syncthreads();
    double *squares_of = e.squares + tile * (ROWS / GROUP * SIDES);
    for (int piece = slice; piece < pieces; piece += e.slices) {
        const int group = piece / e.across, column0 = piece % e.across * e.columns, elements = GROUP * e.columns;
        if (piece != slice) {
            look(piece);
        }
        /* Four elements a thread, of every so manieth slice; then the elements' sums in order. */
        float *sums = (float *)aside;
        const int quads = e.columns / 4, ways = THREADS / (GROUP * quads);
        const int way = threadIdx.x / (GROUP * quads), quad = threadIdx.x - way * (GROUP * quads), row = quad / quads;
        if (way < ways) {
            const float *from = parts + (group * GROUP + row) * COLUMNS + column0 + (quad - row * quads) * 4;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int w = way; w < e.slices; w += AT_ONCE * ways) {
                float4 v[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    const int of = w + i * ways;
                    v[i] = past_l1_if((const float4 *)(from + of * (ROWS * COLUMNS)), of < e.slices);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    sum = make_float4(sum.x + v[i].x, sum.y + v[i].y, sum.z + v[i].z, sum.w + v[i].w);
                }
            }
            *(float4 *)(sums + way * elements + 4 * quad) = sum;
        }
        __syncthreads();
        double square = 0.0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = j * THREADS + threadIdx.x, row = (int)ps_divide(i, e.by_columns), column = column0 + i - row * e.columns;
            if (row < GROUP) {
                float x = sums[i], slope = 0.0f;
                for (int w = 1; w < ways; w++) {
                    x += sums[w * elements + i];
                }
                const int64_t s = first + group * GROUP + row;
                if (s < l.sequences && column < horizon) {
                    const float error = (x + bias[j]) * std[j] + mean[j] - (there[j] ? target[j] : NAN);
                    slope = l.scale * std[j] * error;
                    square += (double)error * error;
                    ps_put(l.dx + s * horizon + column, slope);
                }
                sums[i] = slope; /* no other thread reads this sum */
            }
        }
        square = ps_block_sum<THREADS>(square, squares);
        if ((int)threadIdx.x < e.columns && column0 + (int)threadIdx.x < horizon) {
            double total = 0.0;
#pragma unroll
            for (int row = 0; row < GROUP; row++) {
                total += sums[row * e.columns + threadIdx.x];
            }
            l.partials[(first / GROUP + group) * (horizon + 1) + column0 + threadIdx.x] = total;
        }
        if (threadIdx.x == THREADS - 1) {
            squares_of[group * SIDES + piece % e.across] = square;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        if (slice < pieces) {
            come(&meeting->pieces, pieces < e.slices ? pieces : e.slices, slice == 0);
        }
        meet(&meeting->pieces, before.pieces);
    }
    __syncthreads();
    /* The last slice, which may be shorter, adds up the groups' squares; they come with dx. */
    const bool adds = slice == e.slices - 1 && (int)threadIdx.x < groups;
    double square[SIDES];
    if (adds) {
#pragma unroll
        for (int i = 0; i < SIDES; i++) {
            square[i] = __ldcg(squares_of + threadIdx.x * SIDES + (i < e.across ? i : 0));
        }
    }
    /* dz = dx W_h'; dx lies in the first stage, and aside. */
    for (int i = threadIdx.x; i < ROWS * (COLUMNS / 8); i += THREADS) {
        const int row = i / (COLUMNS / 8), c = i % (COLUMNS / 8);
        const int64_t s = (int64_t)tile * ROWS + row;
        *(uint4 *)dx_at(stages, aside, row, c) =
            s < l.sequences && 8 * c < horizon ? past_l1((const uint4 *)(l.dx + s * horizon + 8 * c)) : make_uint4(0, 0, 0, 0);
    }
    ps_publish();
    __syncthreads();
    if (adds) {
        double total = square[0];
#pragma unroll
        for (int i = 1; i < SIDES; i++) {
            total += i < e.across ? square[i] : 0.0;
        }
        l.partials[(first / GROUP + threadIdx.x) * (horizon + 1) + horizon] = total;
    }
    const uint32_t dx_low = ps_wgmma_place(stages_address + half * (STAGE_BYTES / 2));
    const uint32_t dx_high = ps_wgmma_place(aside_address + half * (ASIDE_BYTES / 2));
    for (int column = CHUNK * side; busy && column < width; column += 2 * CHUNK) {
        const uint32_t low_right = ps_wgmma_place(low_address + column * 128);
        const uint32_t high_right = ps_wgmma_place(high_address + column * 64);
        float out[8][4];
        ps_zero(out);
        ps_wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            ps_wgmma<T>(out, ps_wgmma_operand(dx_low, 32 * k), ps_wgmma_operand(low_right, 32 * k), 1);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            ps_wgmma<T>(out, narrow_operand(dx_high, 32 * k), narrow_operand(high_right, 32 * k), 1);
        }
        ps_wgmma_commit();
        ps_wgmma_wait<0>();
        ps_pin(out);
#pragma unroll
        for (int i = 0; i < 4; i++) { /* 32 columns of a row of the lane's two */
            const int n = i / 2 * 4, second = i % 2, at = column + 8 * n + 8 * q;
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                words[j] = ps_pack<T>(out[n + j][2 * second], out[n + j][2 * second + 1]);
            }
            ps_quad_transpose(words);
            const int64_t s = (int64_t)tile * ROWS + own_row + 8 * second;
            if (s < l.sequences && at < width) {
                *(uint4 *)(e.dz + s * e.k + k0 + at) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

template <typename T>
enum ps_status ps_cuda_head_large(const struct ps_cuda_context *c, const char *op, const struct ps_cuda_loss<T> *loss, T *dz,
                                  const T *z, const T *weight, int k)
{
    const int chunks = (k + CHUNK - 1) / CHUNK, room = c->shared_bytes - 1024 - ASIDE_BYTES;
    const int fit = (room - LEAST_STAGES * STAGE_BYTES) / (LOW_BYTES + HIGH_BYTES), most = fit < MOST_CHUNKS ? fit : MOST_CHUNKS;
    arguments<T> e = {};
    e.loss = *loss;
    e.dz = dz;
    e.k = k;
    const int64_t tiles = (loss->sequences + ROWS - 1) / ROWS, free = tiles > 0 ? c->multiprocessors / tiles : 1;
    e.slices = most < 1 ? chunks : (chunks + most - 1) / most;
    e.slices = e.slices < free ? (int)free : e.slices; /* no multiprocessor stays idle that shortens a slice */
    e.chunks = (chunks + e.slices - 1) / e.slices;
    e.slices = (chunks + e.chunks - 1) / e.chunks;
    const int64_t blocks = tiles * e.slices;
    if (k % 8 != 0 || loss->horizon % 8 != 0 || loss->horizon > COLUMNS ||
        ((uintptr_t)z | (uintptr_t)dz | (uintptr_t)weight | (uintptr_t)loss->dx) % 16 != 0 || most < 1 ||
        blocks > c->multiprocessors) {
        return ps_fail(
            PS_UNSUPPORTED,
            "%s (cuda): %lld sequences and a weight of %d x %d: multiples of 8, aligned, are served where %lld blocks have a "
            "multiprocessor each, here %d",
            op, (long long)loss->sequences, k, loss->horizon, (long long)blocks, c->multiprocessors);
    }
    if (loss->sequences == 0) {
        return PS_OK;
    }
    const int stages = (room - e.chunks * (LOW_BYTES + HIGH_BYTES)) / STAGE_BYTES,
              held = stages < MOST_STAGES ? stages : MOST_STAGES;
    e.stages = e.chunks < held ? e.chunks : held;
    /* As few columns a piece as leave a block one of them. */
    const int64_t alike = loss->sequences < ROWS ? loss->sequences : ROWS, groups = (alike + GROUP - 1) / GROUP;
    e.rows = (int)groups * GROUP;
    do {
        e.columns += 8;
        e.across = (loss->horizon + e.columns - 1) / e.columns;
    } while (COLUMNS % e.columns != 0 || (e.across > 1 && groups * e.across > e.slices));
    e.by_columns = ps_divisor_make(e.columns);
    PS_TRY(ps_tensor_map_2d(&e.z, z, loss->sequences, k, 2 * k, e.rows, CHUNK));
    PS_TRY(ps_tensor_map_2d(&e.low, weight, k, loss->horizon, 2 * loss->horizon, CHUNK, 64));
    PS_TRY(ps_tensor_map_2d(&e.high, weight, k, loss->horizon, 2 * loss->horizon, CHUNK, 32));
    const size_t bytes = (size_t)(e.chunks * (LOW_BYTES + HIGH_BYTES) + e.stages * STAGE_BYTES + ASIDE_BYTES);
    const size_t parts = (size_t)blocks * ROWS * COLUMNS;
    PS_TRY(ps_cuda_workspace(c, op, parts * sizeof(float) + (size_t)tiles * (ROWS / GROUP * SIDES) * sizeof(double)));
    e.parts = (float *)c->workspace;
    e.squares = (double *)(e.parts + parts);
    e.meetings = (struct meeting *)(c->done + 2);
    PS_TRY(ps_cuda_allow_shared((const void *)head_slices<T>, bytes, op));
    ps_cuda_launch(c, head_slices<T>, (unsigned)blocks, THREADS, bytes, e);
    PS_CUDA_LAUNCHED(op);
}

template enum ps_status ps_cuda_head_large(const struct ps_cuda_context *c, const char *op,
                                           const struct ps_cuda_loss<ps_bf16> *loss, ps_bf16 *dz, const ps_bf16 *z,
                                           const ps_bf16 *weight, int k);
template enum ps_status ps_cuda_head_large(const struct ps_cuda_context *c, const char *op,
                                           const struct ps_cuda_loss<ps_fp16> *loss, ps_fp16 *dz, const ps_fp16 *z,
                                           const ps_fp16 *weight, int k);
