/* Products of float32 on Hopper's tensor cores where one operand is long: many rows times a weight of few terms, and a weight's
 * gradient, a sum over many rows. gemm/wgmma_float.cuh says how they are multiplied.
 *
 * Rows: c [m, n] = alpha a b + bias + beta addend with a [m, k] row by row, k <= 384. A block keeps its columns of b in shared
 * memory (4 k N bytes), k permuted so that a lane's fragments of a are 16 consecutive bytes: a passes through stages of shared
 * memory that a warp has to itself, and is split in registers. Warpgroups take 64 rows each, on their own; while one splits and
 * adds, another multiplies. Bytes: 4 m (k + n), a again from L2 for every other tile of columns; 2 m n k FLOPs of tf32, in fp32
 * 6 m n k of fp16. weather's q, k, v (112,896 x 384 x 128): 231 MB, 55 us at 4.2 TB/s; in fp32 33 GFLOP, 42 us at 797 TFLOP/s.
 *
 * Gradients: c [m, n] = alpha a' b + beta c with a [k, m], b [k, n] row by row, k long. A block takes 128 x N of c (N up to 128 in
 * fp32, 256 in tf32) and a slab of rows, 32 at a time: a passes through shared memory to registers, b from there to shared memory
 * again, in tf32 turned, since wgmma reads that with the summed dimension contiguous only, in fp32 split; a's rows take b's scales
 * back before they get their own. The sums of a's or b's columns come on the way. Slabs' sums are added in a fixed order
 * (gemm/split.cu).
 *
 * Why not cuBLASLt: its fp32 is FFMA's, 51 TFLOP/s at best; its first heuristic for tf32 moves 0.5 to 0.77 of the bytes a second
 * that a copy does, and for gradients depends on the workspace: with 16 MiB it does not split the sum, 17 ms instead of 0.1. */
#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/gemm/wgmma_float.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tile/bulk.cuh"

enum { ROWS = 64 }; /* of a warpgroup */

static __device__ __forceinline__ void store_shared(uint32_t at, const uint32_t (&v)[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

static __device__ __forceinline__ void store_shared(uint32_t at, const uint32_t (&v)[2])
{
    ps_shared_store2(at, make_float2(__uint_as_float(v[0]), __uint_as_float(v[1])));
}

static __device__ __forceinline__ void store_shared(uint32_t at, const uint32_t (&v)[1])
{
    ps_shared_store(at, v[0]);
}

static __device__ __forceinline__ void load_shared(float (&v)[2], uint32_t at)
{
    *(float2 *)v = ps_shared_load2(at);
}

static __device__ __forceinline__ void load_shared(float (&v)[4], uint32_t at)
{
    *(uint4 *)v = ps_shared_load4(at);
}

/* ---- rows times a weight ---- */

struct rows_product {
    const float *a, *b, *bias, *addend;
    float *c;
    int64_t m, lda, ldc, b_row, b_column;
    int n, k, tiles_n, pieces; /* of DEEP, to k or beyond */
    float alpha, beta;
};

enum { WARP_STAGE = 16 * LINE }; /* bytes: a warp's rows of one piece */

template <int N, int WARPGROUPS, int STAGES, bool EXACT>
static __global__ void __launch_bounds__(WARPGROUPS * 128, 1) rows_kernel(const __grid_constant__ struct rows_product x)
{
    ps_grid_begin();
    extern __shared__ uint8_t shared_memory[];
    __shared__ float bias[N], unscale[EXACT ? N : 1]; /* unscale: b's columns' scales, to be taken back */
    __shared__ int largest[EXACT ? N : 1];
    const uint32_t shared = (ps_shared_address(shared_memory) + 1023u) & ~1023u;
    constexpr int PANEL = N * LINE;
    const int n0 = (int)blockIdx.x % x.tiles_n * N;
    /* The same for a whole warp, and said so: else the compiler waits after every wgmma. */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int64_t groups = gridDim.x / x.tiles_n, tiles = (x.m + ROWS - 1) / ROWS, step = groups * WARPGROUPS;
    const int64_t first = warp / 4 * groups + blockIdx.x / x.tiles_n;

    /* A warp's rows pass through its own stages; 16-byte units of odd rows change places with those 64 bytes on. */
    const uint32_t stages = shared + x.pieces * PANEL + warp * (STAGES * WARP_STAGE);
    const uint32_t to = stages + lane / 8 * LINE + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
    const uint32_t from = stages + g * LINE + (q ^ (g % 2 * 4)) * 16;
    const int unit = lane % 8 * 4;
    int64_t fetch_tile = first;
    int fetch_piece = 0, fetch_stage = 0, stage = 0;
    const float *source[4];
    auto find = [&]() {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            source[i] = x.a + min(fetch_tile * ROWS + warp % 4 * 16 + i * 4 + lane / 8, x.m - 1) * x.lda + unit;
        }
    };
    auto fetch = [&]() {
        if (fetch_tile < tiles) {
            const int k = fetch_piece * DEEP, bytes = k + unit < x.k ? 16 : 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ps_copy_async_part(to + fetch_stage * WARP_STAGE + i * 4 * LINE, source[i] + (bytes ? k : -unit), bytes);
            }
            if (++fetch_piece == x.pieces) {
                fetch_piece = 0;
                fetch_tile += step;
                find();
            }
            fetch_stage = fetch_stage + 1 == STAGES ? 0 : fetch_stage + 1;
        }
        ps_copy_commit();
    };
    find();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        fetch();
    }
    /* b, a unit at a time. Neighbouring threads take neighbours in memory. */
    constexpr int UNITS = units_of<EXACT>, TERMS = DEEP / UNITS;
    const bool along_k = x.b_row == 1;
    const auto each = [&](auto take) {
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < x.pieces * UNITS * N; i += WARPGROUPS * 128) {
            const int column = along_k ? i / UNITS % N : i % N, unit = along_k ? i % UNITS : i / N % UNITS, panel = i / N / UNITS;
            const uint32_t line = shared + panel * PANEL + column * LINE;
            take(column, panel * DEEP + unit * TERMS, line + (unit ^ column % 8) * 16, line + (unit + 4 ^ column % 8) * 16);
        }
    };
    if ((int)threadIdx.x < N) {
        bias[threadIdx.x] = x.bias && n0 + (int)threadIdx.x < x.n ? x.bias[n0 + threadIdx.x] : 0.0f;
        if (EXACT) {
            largest[threadIdx.x] = 0;
        }
    }
    if (EXACT) {
        __syncthreads();
    }
    each([&](int column, int first, uint32_t to, uint32_t lo_to) {
        uint32_t v[TERMS];
        float most = 0.0f;
#pragma unroll
        for (int t = 0; t < TERMS; t++) {
            const int k = first / DEEP * DEEP + term_at<EXACT>(first % DEEP + t);
            const float b = n0 + column < x.n && k < x.k ? x.b[k * x.b_row + (n0 + column) * x.b_column] : 0.0f;
            most = fmaxf(most, fabsf(b));
            v[t] = EXACT ? __float_as_uint(b) : ps_round_up(b);
        }
        store_shared(to, {v[0], v[1], v[2], v[3]});
        if constexpr (EXACT) { /* as it is, until its column's scale is known */
            store_shared(lo_to, {v[4], v[5], v[6], v[7]});
            atomicMax(&largest[column], __float_as_int(most)); /* in any order, the same */
        }
    });
    if constexpr (EXACT) {
        __syncthreads();
        if ((int)threadIdx.x < N) {
            unscale[threadIdx.x] = scale_of(__int_as_float(largest[threadIdx.x])).from;
        }
        each([&](int column, int, uint32_t to, uint32_t lo_to) {
            float first[4], second[4];
            load_shared(first, to);
            load_shared(second, lo_to);
            const float scale = scale_of(__int_as_float(largest[column])).to;
            uint32_t hi[4], lo[4];
            split_pair(hi[0], lo[0], scale * first[0], scale * first[1]);
            split_pair(hi[1], lo[1], scale * first[2], scale * first[3]);
            split_pair(hi[2], lo[2], scale * second[0], scale * second[1]);
            split_pair(hi[3], lo[3], scale * second[2], scale * second[3]);
            store_shared(to, hi);
            store_shared(lo_to, lo);
        });
    }
    ps_publish();
    __syncthreads();
    const uint32_t place = ps_wgmma_place(shared);
    float sum[N / 8][4], part[EXACT ? N / 8 : 1][4];
    for (int64_t tile = first; tile < tiles; tile += step) {
        if constexpr (EXACT) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                sum[i / 4][i % 4] = 0.0f;
            }
        }
        for (int p = 0; p < x.pieces; p++) {
            ps_copy_wait_group<STAGES - 2>();
            __syncwarp(); /* piece p is there, and all lanes have read the one before */
            fetch();
            float v[2][8];
#pragma unroll
            for (int i = 0; i < 4; i++) { /* odd rows' first 16 of k lie 64 bytes on: as unit ^ 4 says */
                *(uint4 *)&v[i / 2][i % 2 * 4] = ps_shared_load4(stage * WARP_STAGE + (from ^ (i % 2 * 64)) + i / 2 * 8 * LINE);
            }
            struct left_part<EXACT> rows;
            rows.split(v);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            const uint32_t panel = place + ((p * PANEL) >> 4);
            if constexpr (EXACT) {
                piece<N, true>(part, rows, panel, LINE / 2, 0);
                ps_wgmma_wait<0>();
                add_to<N>(sum, part, rows);
            } else {
                piece<N, false>(sum, rows, panel, 0, p);
                ps_wgmma_wait<0>();
            }
        }
        /* All loads before the first store: the compiler must take the addend for c. */
        const int64_t row = tile * ROWS + warp % 4 * 16 + g;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const int j = i / 2, h = i % 2;
            float2 old = make_float2(0, 0);
            if (x.addend && row + h * 8 < x.m && n0 + j * 8 + q * 2 < x.n) {
                old = *(const float2 *)(x.addend + (row + h * 8) * x.ldc + n0 + j * 8 + q * 2);
            }
            const float2 add = *(const float2 *)(bias + j * 8 + q * 2);
            if (EXACT) {
                const float2 back = *(const float2 *)(unscale + j * 8 + q * 2);
                sum[j][h * 2] *= back.x;
                sum[j][h * 2 + 1] *= back.y;
            }
            sum[j][h * 2] = fmaf(x.beta, old.x, fmaf(x.alpha, sum[j][h * 2], add.x));
            sum[j][h * 2 + 1] = fmaf(x.beta, old.y, fmaf(x.alpha, sum[j][h * 2 + 1], add.y));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (row + h * 8 < x.m) {
                float *const c = x.c + (row + h * 8) * x.ldc + n0 + q * 2;
#pragma unroll
                for (int j = 0; j < N / 8; j++) {
                    if (n0 + j * 8 + q * 2 < x.n) {
                        *(float2 *)(c + j * 8) = make_float2(sum[j][h * 2], sum[j][h * 2 + 1]);
                    }
                }
            }
        }
    }
}

/* ---- a weight's gradient ---- */

struct gradient {
    float *partial; /* [slabs, slab]: tiles [tiles, HIGH, N] of c, then sums of a's or b's columns */
    int64_t slab;
    bool sum_a, sum_b;
    int64_t k, rows; /* rows of a slab, a multiple of DEEP */
    int m, n, tiles, tiles_n;
};

enum {
    HIGH = 128, /* rows of c, two warpgroups */
    THREADS = 256,
    BOX_COLUMNS = 32,
    BOX = DEEP * BOX_COLUMNS * 4 /* bytes: DEEP rows, their 16-byte units exchanged by the row's number modulo 8 */
};

/* DEEP rows of both operands as they are. */
template <int N> static constexpr int stage_bytes = (HIGH + N) / BOX_COLUMNS *BOX;
template <int N> static constexpr int stages_of = N > 128 ? 3 : 4;

/* While a piece is multiplied, the next one's b is made ready by all threads and then its a, which wants b's scales. Each step is
 * one of several rows at once: what a lane loads, it waits for once. */
template <int N, bool EXACT>
static __global__ void __launch_bounds__(THREADS, 1)
    gradient_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                    const __grid_constant__ struct gradient x)
{
    extern __shared__ uint8_t shared_memory[];
    /* b's side is a panel of lines along its rows, or, EXACT, of 64 columns each, panels of lines across them: hi's, then lo's. */
    constexpr int SIDE = N * LINE, STAGE = stage_bytes<N>, STAGES = stages_of<N>;
    __shared__ __align__(8) uint64_t barriers[STAGES];
    __shared__ __align__(8) float b_scales[2][DEEP];                             /* EXACT: of b's rows, to be taken back */
    const uint32_t shared = (ps_shared_address(shared_memory) + 1023u) & ~1023u; /* two sides of b; then the stages */
    const uint32_t stages = shared + 2 * SIDE, full = ps_shared_address(barriers);
    const int tile = (int)blockIdx.x % x.tiles, m0 = tile / x.tiles_n * HIGH, n0 = tile % x.tiles_n * N;
    const int64_t first = (int64_t)(blockIdx.x / x.tiles) * x.rows;
    const int pieces = ((int)(x.k - first < x.rows ? x.k - first : x.rows) + DEEP - 1) / DEEP;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = warp * 16 + lane / 4, q = lane % 4;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            ps_mbarrier_init(full + 8 * i, 1);
        }
        ps_mbarrier_publish();
    }
    ps_grid_begin();
    auto fetch = [&](int p) {
        if (threadIdx.x == 0 && p < pieces) {
            const uint32_t to = stages + p % STAGES * STAGE, barrier = full + 8 * (p % STAGES);
            const int row = (int)first + p * DEEP;
            ps_mbarrier_expect(barrier, STAGE);
#pragma unroll
            for (int i = 0; i < HIGH / BOX_COLUMNS; i++) {
                ps_tensor_copy2(to + i * BOX, &a_map, m0 + i * BOX_COLUMNS, row, barrier);
            }
#pragma unroll
            for (int i = 0; i < N / BOX_COLUMNS; i++) {
                ps_tensor_copy2(to + (HIGH / BOX_COLUMNS + i) * BOX, &b_map, n0 + i * BOX_COLUMNS, row, barrier);
            }
        }
    };
    auto arrived = [&](int p) { ps_mbarrier_wait(full + 8 * (p % STAGES), p / STAGES % 2); };
    /* The address of a float of a stage's operand. */
    auto place = [&](int p, int operand, int row, int column) {
        return stages + p % STAGES * STAGE + operand + column / BOX_COLUMNS * BOX + row * LINE +
               ((column % BOX_COLUMNS / 4 ^ row % 8) << 4) + column % 4 * 4;
    };
    constexpr int A = 0, B = HIGH / BOX_COLUMNS * BOX;
    constexpr int WIDE = EXACT ? N / 32 : 1; /* columns whose sums a thread has */
    float a_sum[2] = {0, 0}, b_sum[WIDE] = {};
    auto turn = [&](int p) {
        const uint32_t side = shared + p % 2 * SIDE;
        if constexpr (EXACT) { /* a warp has 4 neighbouring rows, a lane as many neighbouring columns as it adds up */
            const int column = lane * WIDE;
            float v[4][WIDE];
            struct scale scale[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                load_shared(v[i], place(p, B, warp * 4 + i, column));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float largest = 0.0f;
#pragma unroll
                for (int j = 0; j < WIDE; j++) {
                    largest = fmaxf(largest, fabsf(v[i][j]));
                }
                scale[i] = scale_of(__uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest))));
            }
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                b_sum[j] += (v[0][j] + v[1][j]) + (v[2][j] + v[3][j]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = warp * 4 + i;
                uint32_t hi[WIDE / 2], lo[WIDE / 2];
#pragma unroll
                for (int j = 0; j < WIDE / 2; j++) {
                    split_pair(hi[j], lo[j], scale[i].to * v[i][2 * j], scale[i].to * v[i][2 * j + 1]);
                }
                const uint32_t to =
                    side + column / 64 * (DEEP * 128) + row * 128 + ((column % 64 / 8 ^ row % 8) << 4) + column % 8 * 2;
                store_shared(to, hi);
                store_shared(to + SIDE / 2, lo);
                if (lane == 0) {
                    b_scales[p % 2][row] = scale[i].from;
                }
            }
        } else {
            /* A thread has SHARE neighbouring rows of a column; of every 8 the even ones come first, as in a lane's fragment. */
            constexpr int SHARE = DEEP * N / THREADS;
            const int column = (int)threadIdx.x % N, row0 = (int)threadIdx.x / N * SHARE;
#pragma unroll
            for (int u = 0; u < SHARE / 4; u++) {
                uint32_t hi[4];
                float value[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    value[i] = __uint_as_float(ps_shared_load(place(p, B, row0 + u / 2 * 8 + 2 * i + u % 2, column)));
                    hi[i] = ps_round_up(value[i]);
                }
                b_sum[0] += (value[0] + value[1]) + (value[2] + value[3]);
                store_shared(side + column * LINE + ((row0 / 4 + u) ^ column % 8) * 16, hi);
            }
        }
        ps_publish();
    };
    /* A lane has rows 2 q and 2 q + 1 of every 8: so the lanes' reads lie in different banks. */
    auto read = [&](struct left_part<EXACT> &part, int p) {
        float v[2][8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int row = j / 2 * 8 + 2 * q + j % 2;
            v[0][j] = __uint_as_float(ps_shared_load(place(p, A, row, g)));
            v[1][j] = __uint_as_float(ps_shared_load(place(p, A, row, g + 8)));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a_sum[i] += ((v[i][0] + v[i][1]) + (v[i][2] + v[i][3])) + ((v[i][4] + v[i][5]) + (v[i][6] + v[i][7]));
#pragma unroll
            for (int j = 0; EXACT && j < 8; j += 2) {
                const float2 back = *(const float2 *)&b_scales[p % 2][j / 2 * 8 + 2 * q];
                v[i][j] *= back.x;
                v[i][j + 1] *= back.y;
            }
        }
        part.split(v);
    };
    __syncthreads(); /* the barriers are there */
    for (int p = 0; p < STAGES; p++) {
        fetch(p);
    }
    arrived(0);
    turn(0);
    __syncthreads();
    struct left_part<EXACT> now, next; /* a lane's parts of the pieces that are and will be multiplied */
    read(now, 0);
    const uint32_t sides = ps_wgmma_place(shared, EXACT ? DEEP * 128 : 0);
    float sum[N / 8][4], part[EXACT ? N / 8 : 1][4];
    ps_zero(sum);
    auto multiply = [&](const struct left_part<EXACT> &rows, struct left_part<EXACT> &others, int p) {
        __syncthreads(); /* piece p is turned; b's other side and p's stage have been read */
        fetch(p + STAGES);
        const uint32_t panel = sides + ((p % 2 * SIDE) >> 4);
        if constexpr (EXACT) {
            piece<N, true, 1>(part, rows, panel, SIDE / 2, 0);
        } else {
            piece<N, false>(sum, rows, panel, 0, 1);
        }
        if (p + 1 < pieces) {
            arrived(p + 1);
            turn(p + 1);
            if (EXACT) {
                __syncthreads(); /* its scales */
            }
            read(others, p + 1);
        }
        ps_wgmma_wait<0>();
        if constexpr (EXACT) {
            ps_pin(part);
            add_to<N>(sum, part, rows);
        }
    };
    for (int p = 0; p < pieces; p += 2) {
        multiply(now, next, p);
        if (p + 1 < pieces) {
            multiply(next, now, p + 1);
        }
    }
    float *const slab = x.partial + (blockIdx.x / x.tiles) * x.slab, *const sums = slab + x.tiles * (HIGH * N);
    if (x.sum_a && n0 == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a_sum[i] += __shfl_xor_sync(0xffffffffu, a_sum[i], 1);
            a_sum[i] += __shfl_xor_sync(0xffffffffu, a_sum[i], 2);
            if (q == 0 && m0 + g + i * 8 < x.m) {
                sums[m0 + g + i * 8] = a_sum[i];
            }
        }
    }
    if (x.sum_b && m0 == 0) { /* of the threads that share a column */
        float *const shares = (float *)(shared_memory + (shared - ps_shared_address(shared_memory)));
        __syncthreads();
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
            shares[(int)threadIdx.x * WIDE + j] = b_sum[j];
        }
        __syncthreads();
        if ((int)threadIdx.x < N && n0 + (int)threadIdx.x < x.n) {
            float sum = shares[threadIdx.x];
#pragma unroll
            for (int i = N; i < THREADS * WIDE; i += N) {
                sum += shares[threadIdx.x + i];
            }
            sums[n0 + threadIdx.x] = sum;
        }
    }
    float *const out = slab + tile * (HIGH * N) + g * N + q * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        *(float2 *)(out + j * 8) = make_float2(sum[j][0], sum[j][1]);
        *(float2 *)(out + 8 * N + j * 8) = make_float2(sum[j][2], sum[j][3]);
    }
}

/* ---- the choice, by shape and layout ---- */

static bool aligned(const void *data, int64_t stride, int elements)
{
    return (uintptr_t)data % (sizeof(float) * elements) == 0 && stride % elements == 0;
}

static bool served(const struct ps_cuda_context *context, const struct ps_product *p)
{
    return context->compute_capability == 90 && p->type == PS_F32 && p->batch[0] * p->batch[1] == 1;
}

static int64_t rows_bytes(int64_t k, int64_t columns, int warpgroups, int stages)
{
    return ceil_div(k, DEEP) * LINE * columns + warpgroups * 4 * stages * WARP_STAGE + columns * 12 + 1024;
}

/* From so many terms on gemm/wgmma_long.cu is the faster, in fp32 from fewer where columns are many too. */
bool ps_cuda_rows_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    enum { MOST_TERMS = 384, MOST_TERMS_WIDE = 256, WIDE = 256 };
    const struct ps_cuda_context *context = ps_cuda(k);
    const bool few =
        p->k <= MOST_TERMS && !(ps_cuda_exact(k) && p->k > MOST_TERMS_WIDE && p->n > WIDE && ps_cuda_long_wanted(k, p));
    return few && served(context, p) && p->m >= 1024 && p->n >= 32 && p->n <= 64 * (int64_t)context->multiprocessors &&
           p->n % 2 == 0 && p->k % 4 == 0 && rows_bytes(p->k, 64, ps_cuda_exact(k) ? 3 : 4, 4) <= context->shared_bytes &&
           p->a.column == 1 && p->c.column == 1 && aligned(p->a.data, p->a.row, 4) && aligned(p->c.data, p->c.row, 2) &&
           aligned(p->addend, 0, 2) && aligned(p->bias, 0, 2);
}

template <int N, int WARPGROUPS, int STAGES, bool EXACT>
static enum ps_status rows_launch(const struct ps_cuda_context *context, const struct rows_product &x)
{
    void (*const kernel)(struct rows_product) = rows_kernel<N, WARPGROUPS, STAGES, EXACT>;
    const int bytes = (int)rows_bytes(x.k, N, WARPGROUPS, STAGES);
    const int64_t tiles = ceil_div(x.m, ROWS), groups = context->multiprocessors / x.tiles_n;
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, bytes, "gemm"));
    ps_cuda_launch(context, kernel, (unsigned)((tiles < groups ? tiles : groups) * x.tiles_n), WARPGROUPS * 128, (size_t)bytes, x);
    PS_CUDA_LAUNCHED("gemm");
}

enum ps_status ps_cuda_rows_product(const struct ps_kernels *k, const struct ps_product *p)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    const bool exact = ps_cuda_exact(k);
    struct rows_product x = {};
    x.a = (const float *)p->a.data;
    x.b = (const float *)p->b.data;
    x.c = (float *)p->c.data;
    x.bias = (const float *)p->bias;
    x.addend = p->beta != 0 ? (const float *)(p->addend ? p->addend : p->c.data) : NULL;
    x.m = p->m;
    x.lda = p->a.row;
    x.ldc = p->c.row;
    x.b_row = p->b.row;
    x.b_column = p->b.column;
    x.n = (int)p->n;
    x.k = (int)p->k;
    x.pieces = (int)ceil_div(p->k, DEEP);
    x.alpha = p->alpha;
    x.beta = p->beta;
    const int64_t limit = context->shared_bytes;
    const bool wide = p->n > 64 && rows_bytes(p->k, 128, exact ? 2 : 3, 4) <= limit;
    x.tiles_n = (int)ceil_div(p->n, wide ? 128 : 64);
    if (exact) {
        return wide ? rows_launch<128, 2, 4, true>(context, x) : rows_launch<64, 3, 4, true>(context, x);
    }
    return wide ? rows_launch<128, 3, 4, false>(context, x) : rows_launch<64, 4, 4, false>(context, x);
}

/* Columns of a tile, of n. In tf32 as many as registers allow, unless the last tile would be half empty. */
static int gradient_width(const struct ps_kernels *k, int64_t n)
{
    return !ps_cuda_exact(k) && (n - 1) % 256 >= 128 ? 256 : n > 64 ? 128 : 64;
}

/* Whether c is turned, since it has no more rows than a narrow tile has columns. */
static bool gradient_turned(const struct ps_product *p)
{
    return p->m <= 64 && p->m < p->n;
}

/* Floats of a slab's partial sums, of c [m, n]: tiles, and behind them so many sums of columns. */
static int64_t gradient_slab(int64_t m, int64_t n, int width, int sums)
{
    return ceil_div(m, HIGH) * ceil_div(n, width) * HIGH * width + sums;
}

/* In fp32 all whose slab fits the workspace; in tf32 the library is the faster from some tiles on. */
bool ps_cuda_gradient_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    const bool turned = gradient_turned(p);
    const int64_t m = turned ? p->n : p->m, n = turned ? p->m : p->n;
    const int64_t slab = gradient_slab(m, n, gradient_width(k, n), ps_cuda_split_sums(p->sums, p->n));
    const bool few = ps_cuda_exact(k) || ceil_div(m, HIGH) * ceil_div(n, 64) <= 2 * context->multiprocessors;
    return served(context, p) && p->k >= 1024 && p->k < INT32_MAX - 1024 && m >= 32 && n >= 32 && few &&
           slab * (int64_t)sizeof(float) <= PS_FLOAT_WORKSPACE && p->a.row == 1 && p->b.column == 1 && !p->bias && !p->addend &&
           aligned(p->a.data, p->a.column, 4) && aligned(p->b.data, p->b.row, 4);
}

template <int N, bool EXACT>
static enum ps_status gradient_launch(const struct ps_cuda_context *context, const struct ps_product *p, bool sum_a)
{
    size_t workspace_bytes;
    void *const workspace = ps_cuda_gemm_workspace(context, &workspace_bytes);
    struct gradient x = {};
    auto *const kernel = gradient_kernel<N, EXACT>;
    const int bytes = 2 * N * LINE + stages_of<N> * stage_bytes<N> + 1024;
    CUtensorMap a, b;
    PS_TRY(ps_tensor_map_2d_float(&a, p->a.data, p->k, p->m, 4 * p->a.column, DEEP, BOX_COLUMNS));
    PS_TRY(ps_tensor_map_2d_float(&b, p->b.data, p->k, p->n, 4 * p->b.row, DEEP, BOX_COLUMNS));
    x.partial = (float *)workspace;
    x.k = p->k;
    x.m = (int)p->m;
    x.n = (int)p->n;
    x.tiles_n = (int)ceil_div(p->n, N);
    x.tiles = (int)ceil_div(p->m, HIGH) * x.tiles_n;
    const int64_t n_sums = sum_a ? p->m : p->n;
    x.slab = gradient_slab(p->m, p->n, N, ps_cuda_split_sums(p->sums, n_sums));
    x.sum_a = p->sums && sum_a;
    x.sum_b = p->sums && !sum_a;
    const int64_t most = (int64_t)(workspace_bytes / ((size_t)x.slab * sizeof(float)));
    /* As many slabs as all multiprocessors take at once, or more where that leaves too many idle: each costs a pass over its sums.
     */
    enum { MOST_SLABS = 16 };
    auto busy = [&](int64_t count) {
        const int64_t blocks = count * x.tiles, rounds = ceil_div(blocks, context->multiprocessors);
        return (double)blocks / (double)(rounds * context->multiprocessors);
    };
    int64_t slabs = context->multiprocessors / x.tiles;
    slabs = slabs < 1 ? 1 : slabs;
    slabs = slabs < most ? slabs : most;
    for (int64_t count = slabs + 1; count <= MOST_SLABS && count <= most; count++) {
        slabs = busy(count) > 1.05 * busy(slabs) ? count : slabs;
    }
    if (slabs < 1) {
        return ps_fail(PS_UNSUPPORTED, "gemm: m %lld, n %lld: partial sums do not fit the workspace", (long long)p->m,
                       (long long)p->n);
    }
    x.rows = ceil_div(ceil_div(p->k, slabs), DEEP) * DEEP;
    slabs = ceil_div(p->k, x.rows);
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, bytes, "gemm"));
    ps_cuda_launch(context, kernel, (unsigned)(slabs * x.tiles), THREADS, (size_t)bytes, a, b, x);
    PS_TRY(ps_cuda_check(cudaGetLastError(), "gemm"));
    return ps_cuda_split_sum(context, p, x.partial, (int)slabs, HIGH, N, n_sums);
}

enum ps_status ps_cuda_gradient_product(const struct ps_kernels *k, const struct ps_product *product)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    struct ps_product p = *product;
    const bool turned = gradient_turned(product);
    if (turned) {
        p.m = product->n;
        p.n = product->m;
        p.a = ps_operand_transposed(product->b);
        p.b = ps_operand_transposed(product->a);
        p.c = ps_operand_transposed(product->c);
    }
    const int width = gradient_width(k, p.n);
    if (ps_cuda_exact(k)) {
        return width == 128 ? gradient_launch<128, true>(context, &p, turned) : gradient_launch<64, true>(context, &p, turned);
    }
    return width == 256   ? gradient_launch<256, false>(context, &p, turned)
           : width == 128 ? gradient_launch<128, false>(context, &p, turned)
                          : gradient_launch<64, false>(context, &p, turned);
}
