/* Products of float32 on Hopper's tensor cores where one operand is long: many rows times a weight of few terms, and a weight's
 * gradient, a sum over many rows. gemm/wgmma_float.cuh says how they are multiplied.
 *
 * Rows: c [m, n] = alpha a b + bias + beta addend with a [m, k] row by row, k <= 384. A block keeps the hi and lo of its columns of
 * b in shared memory (8 k N bytes), k permuted so that a lane's fragments of a are 16 consecutive bytes: a passes through stages of
 * shared memory that a warp has to itself, and is split in registers. Warpgroups take 64 rows each, on their own; while one splits
 * and adds, another multiplies. Bytes: 4 m (k + n), a again from L2 for every other tile of columns; 6 m n k FLOPs of tf32.
 * weather's q, k, v (112,896 x 384 x 128): 231 MB, 55 us at 4.2 TB/s; 33 GFLOP, 67 us at wgmma's 495 TFLOP/s. Measured 129 us in
 * fp32 (FFMA 310), 84 in tf32.
 *
 * Gradients: c [m, n] = alpha a' b + beta c with a [k, m], b [k, n] row by row, k long. A block takes 128 x N of c (N up to 128 in
 * fp32, 256 in tf32) and a slab of rows, 32 at a time: a passes through shared memory to registers, b is split and turned on its
 * way to shared memory, since wgmma reads tf32 with the summed dimension contiguous only. The sums of a's or b's columns come on
 * the way. Slabs' sums are added in a fixed order (gemm/split.cu).
 *
 * Why not cuBLASLt: its fp32 is FFMA's, 51 TFLOP/s at best; its first heuristic for tf32 moves 0.5 to 0.77 of the bytes a second
 * that a copy does, and for gradients depends on the workspace: with 16 MiB it does not split the sum, 17 ms instead of 0.1. */
#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/gemm/wgmma_float.cuh"
#include "kernels/cuda/launch.cuh"

enum { ROWS = 64 }; /* of a warpgroup */

static __device__ __forceinline__ void store_shared(uint32_t at, const uint32_t (&v)[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

static __device__ __forceinline__ float4 load_shared(uint32_t at)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
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
    __shared__ float bias[N];
    const uint32_t shared = (ps_shared_address(shared_memory) + 1023u) & ~1023u;
    constexpr int PANEL = N * LINE;
    const int n0 = (int)blockIdx.x % x.tiles_n * N, lo_bytes = x.pieces * PANEL;
    /* The same for a whole warp, and said so: else the compiler waits after every wgmma. */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int64_t groups = gridDim.x / x.tiles_n, tiles = (x.m + ROWS - 1) / ROWS, step = groups * WARPGROUPS;
    const int64_t first = warp / 4 * groups + blockIdx.x / x.tiles_n;

    /* A warp's rows pass through its own stages; 16-byte units of odd rows change places with those 64 bytes on. */
    const uint32_t stages = shared + (EXACT ? 2 : 1) * lo_bytes + warp * (STAGES * WARP_STAGE);
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
    /* b: 16 bytes hold the same quarter of 4 lanes' shares of 16. Neighbouring threads take neighbours in memory. */
    const bool along_k = x.b_row == 1;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < x.pieces * 8 * N; i += WARPGROUPS * 128) {
        const int column = along_k ? i / 8 % N : i % N, eighth = along_k ? i % 8 : i / N % 8, panel = i / N / 8;
        const int k = panel * DEEP + eighth / 4 * 16 + eighth % 4;
        const float *const b = x.b + k * x.b_row + (n0 + column) * x.b_column;
        uint32_t hi[4], lo[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            ps_split<EXACT>(hi[j], lo[j], n0 + column < x.n && k + j * 4 < x.k ? b[j * 4 * x.b_row] : 0.0f);
        }
        const uint32_t at = shared + panel * PANEL + column * LINE + (eighth ^ column % 8) * 16;
        store_shared(at, hi);
        if (EXACT) {
            store_shared(at + lo_bytes, lo);
        }
    }
    if ((int)threadIdx.x < N) {
        bias[threadIdx.x] = x.bias && n0 + (int)threadIdx.x < x.n ? x.bias[n0 + threadIdx.x] : 0.0f;
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
            uint32_t hi[4][4], lo[4][4];
#pragma unroll
            for (int h = 0; h < 2; h++) { /* odd rows' first 16 of k lie 64 bytes on: as unit ^ 4 says */
                const uint32_t at = stage * WARP_STAGE + (from ^ (h * 64));
                const float4 upper = load_shared(at), lower = load_shared(at + 8 * LINE);
                ps_split<EXACT>(hi[h * 2][0], lo[h * 2][0], upper.x);
                ps_split<EXACT>(hi[h * 2][1], lo[h * 2][1], lower.x);
                ps_split<EXACT>(hi[h * 2][2], lo[h * 2][2], upper.y);
                ps_split<EXACT>(hi[h * 2][3], lo[h * 2][3], lower.y);
                ps_split<EXACT>(hi[h * 2 + 1][0], lo[h * 2 + 1][0], upper.z);
                ps_split<EXACT>(hi[h * 2 + 1][1], lo[h * 2 + 1][1], lower.z);
                ps_split<EXACT>(hi[h * 2 + 1][2], lo[h * 2 + 1][2], upper.w);
                ps_split<EXACT>(hi[h * 2 + 1][3], lo[h * 2 + 1][3], lower.w);
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            const uint32_t panel = place + ((p * PANEL) >> 4);
            if constexpr (EXACT) {
                piece<N, true>(part, hi, lo, panel, lo_bytes, 0);
                ps_wgmma_wait<0>();
                add_to<N>(sum, part);
            } else {
                piece<N, false>(sum, hi, lo, panel, 0, p);
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
    const float *a, *b;
    float *partial; /* [slabs, slab]: tiles [tiles, HIGH, N] of c, then sums of a's or b's columns */
    int64_t slab;
    bool sum_a, sum_b;
    int64_t k, rows; /* rows of a slab, a multiple of DEEP */
    int64_t lda, ldb;
    int m, n, tiles, tiles_n;
};

enum {
    HIGH = 128, /* rows of c, two warpgroups */
    THREADS = 256,
    A_LINE = HIGH + 8 /* floats; lanes of a fragment read 32 banks */
};

/* DEEP rows of both operands as they are, in floats. */
template <int N> static constexpr int stage_floats = DEEP *(A_LINE + N);
template <int N> static constexpr int stages_of = N > 128 ? 3 : 4;

template <int N, bool EXACT>
static __global__ void __launch_bounds__(THREADS, 1) gradient_kernel(const __grid_constant__ struct gradient x)
{
    ps_grid_begin();
    extern __shared__ uint8_t shared_memory[];
    constexpr int PANEL = N * LINE, SIDE = PANEL * (EXACT ? 2 : 1), STAGE = stage_floats<N>, STAGES = stages_of<N>;
    const uint32_t shared = (ps_shared_address(shared_memory) + 1023u) & ~1023u; /* b turned, twice; then the stages */
    const uint32_t stages = shared + 2 * SIDE;
    const float *const staged = (const float *)(shared_memory + (stages - ps_shared_address(shared_memory)));
    const int tile = (int)blockIdx.x % x.tiles, m0 = tile / x.tiles_n * HIGH, n0 = tile % x.tiles_n * N;
    const int64_t first = (int64_t)(blockIdx.x / x.tiles) * x.rows;
    const int rows = (int)(x.k - first < x.rows ? x.k - first : x.rows), pieces = (rows + DEEP - 1) / DEEP;
    const int lane = (int)threadIdx.x % 32, g = (int)threadIdx.x / 32 * 16 + lane / 4, q = lane % 4;
    /* A thread copies 16 bytes of every 8th row of a and of every (1,024 / N)th of b, the same columns of each piece. */
    constexpr int B_STEP = THREADS * 4 / N, A_STEP = THREADS * 4 / HIGH;
    const int a_row = (int)threadIdx.x / (HIGH / 4), a_column = (int)threadIdx.x % (HIGH / 4) * 4;
    const int b_row = (int)threadIdx.x / (N / 4), b_column = (int)threadIdx.x % (N / 4) * 4;
    const int a_bytes = min(4, max(0, x.m - m0 - a_column)) * 4, b_bytes = min(4, max(0, x.n - n0 - b_column)) * 4;
    const float *a_from = a_bytes ? x.a + (first + a_row) * x.lda + m0 + a_column : x.a;
    const float *b_from = b_bytes ? x.b + (first + b_row) * x.ldb + n0 + b_column : x.b;
    const uint32_t a_to = stages + (a_row * A_LINE + a_column) * 4, b_to = stages + (DEEP * A_LINE + b_row * N + b_column) * 4;
    const int64_t a_step = a_bytes ? A_STEP * x.lda : 0, b_step = b_bytes ? B_STEP * x.ldb : 0;
    int left = rows, fetch_stage = 0;
    auto fetch = [&]() {
        if (left > 0) {
            const uint32_t stage = (uint32_t)fetch_stage * STAGE * 4;
#pragma unroll
            for (int i = 0; i < DEEP / A_STEP; i++) { /* rows beyond are not read */
                ps_copy_async_part(a_to + stage + i * A_STEP * A_LINE * 4, a_from, i * A_STEP < left - a_row ? a_bytes : 0);
                a_from += a_step;
            }
#pragma unroll
            for (int i = 0; i < DEEP / B_STEP; i++) {
                ps_copy_async_part(b_to + stage + i * B_STEP * N * 4, b_from, i * B_STEP < left - b_row ? b_bytes : 0);
                b_from += b_step;
            }
            left -= DEEP;
            fetch_stage = fetch_stage + 1 == STAGES ? 0 : fetch_stage + 1;
        }
        ps_copy_commit();
    };
    float a_sum[2] = {0, 0}, b_sum = 0;
    /* A thread has SHARE neighbouring rows of a column. */
    auto turn = [&](int p) {
        constexpr int SHARE = DEEP * N / THREADS;
        const int column = (int)threadIdx.x % N, row0 = (int)threadIdx.x / N * SHARE;
        const float *const at = staged + p % STAGES * STAGE + DEEP * A_LINE + row0 * N + column;
#pragma unroll
        for (int u = 0; u < SHARE / 4; u++) {
            uint32_t hi[4], lo[4];
            float value[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                value[i] = at[(u * 4 + i) * N];
                ps_split<EXACT>(hi[i], lo[i], value[i]);
            }
            b_sum += (value[0] + value[1]) + (value[2] + value[3]);
            const uint32_t to = shared + p % 2 * SIDE + column * LINE + ((row0 / 4 + u) ^ column % 8) * 16;
            store_shared(to, hi);
            if (EXACT) {
                store_shared(to + PANEL, lo);
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
    turn(0);
    float next[4][4]; /* a lane's elements of the piece that is multiplied next */
    auto read = [&](int p) {
        const float *const at = staged + p % STAGES * STAGE + q * A_LINE + g;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            next[i / 4][i % 4] = at[(i / 4 * 8 + i % 4 / 2 * 4) * A_LINE + i % 2 * 8];
        }
    };
    read(0);
    const uint32_t place = ps_wgmma_place(shared);
    float sum[N / 8][4], part[EXACT ? N / 8 : 1][4];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        sum[i / 4][i % 4] = 0.0f;
    }
    for (int p = 0; p < pieces; p++) {
        ps_copy_wait_group<STAGES - 3>();
        __syncthreads(); /* piece p is turned, p + 1 is there; b's other side and the stage before p's have been read */
        fetch();
        uint32_t hi[4][4], lo[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ps_split<EXACT>(hi[s][i], lo[s][i], next[s][i]);
            }
            a_sum[0] += next[s][0] + next[s][2];
            a_sum[1] += next[s][1] + next[s][3];
        }
        const uint32_t panel = place + ((p % 2 * SIDE) >> 4);
        if constexpr (EXACT) {
            piece<N, true>(part, hi, lo, panel, PANEL, 0);
        } else {
            piece<N, false>(sum, hi, lo, panel, 0, 1);
        }
        if (p + 1 < pieces) {
            turn(p + 1);
            read(p + 1);
        }
        ps_wgmma_wait<0>();
        if constexpr (EXACT) {
            add_to<N>(sum, part);
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
        shares[threadIdx.x] = b_sum;
        __syncthreads();
        if ((int)threadIdx.x < N && n0 + (int)threadIdx.x < x.n) {
            float sum = shares[threadIdx.x];
#pragma unroll
            for (int i = N; i < THREADS; i += N) {
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

static int64_t rows_bytes(int64_t k, int64_t columns, bool exact, int warpgroups, int stages)
{
    return ceil_div(k, DEEP) * LINE * columns * (exact ? 2 : 1) + warpgroups * 4 * stages * WARP_STAGE + columns * 4 + 1024;
}

/* From so many terms on gemm/wgmma_long.cu is the faster, in fp32 from fewer where columns are many too. */
bool ps_cuda_rows_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    enum { MOST_TERMS = 384, MOST_TERMS_WIDE = 256, WIDE = 256 };
    const struct ps_cuda_context *context = ps_cuda(k);
    const bool few =
        p->k <= MOST_TERMS && !(ps_cuda_exact(k) && p->k > MOST_TERMS_WIDE && p->n > WIDE && ps_cuda_long_wanted(k, p));
    return few && served(context, p) && p->m >= 1024 && p->n >= 32 && p->n <= 64 * (int64_t)context->multiprocessors &&
           p->n % 2 == 0 && p->k % 4 == 0 && rows_bytes(p->k, 64, ps_cuda_exact(k), 2, 2) <= context->shared_bytes &&
           p->a.column == 1 && p->c.column == 1 && aligned(p->a.data, p->a.row, 4) && aligned(p->c.data, p->c.row, 2) &&
           aligned(p->addend, 0, 2) && aligned(p->bias, 0, 2);
}

template <int N, int WARPGROUPS, int STAGES, bool EXACT>
static enum ps_status rows_launch(const struct ps_cuda_context *context, const struct rows_product &x)
{
    void (*const kernel)(struct rows_product) = rows_kernel<N, WARPGROUPS, STAGES, EXACT>;
    const int bytes = (int)rows_bytes(x.k, N, EXACT, WARPGROUPS, STAGES);
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
    const bool wide = p->n > 64 && rows_bytes(p->k, 128, exact, exact ? 2 : 3, 4) <= limit;
    x.tiles_n = (int)ceil_div(p->n, wide ? 128 : 64);
    if (exact) {
        return wide                                        ? rows_launch<128, 2, 4, true>(context, x)
               : rows_bytes(p->k, 64, true, 3, 4) <= limit ? rows_launch<64, 3, 4, true>(context, x)
                                                           : rows_launch<64, 2, 2, true>(context, x);
    }
    return wide ? rows_launch<128, 3, 4, false>(context, x) : rows_launch<64, 4, 4, false>(context, x);
}

/* Columns of a tile, of n: c is turned where it is wider than high. In tf32 as many as registers allow, unless the last tile would
 * be half empty. */
static int gradient_width(const struct ps_kernels *k, int64_t n)
{
    return !ps_cuda_exact(k) && (n - 1) % 256 >= 128 ? 256 : n > 64 ? 128 : 64;
}

/* Floats of a slab's partial sums, of c [m, n], m >= n: tiles, and behind them so many sums of columns. */
static int64_t gradient_slab(int64_t m, int64_t n, int width, int sums)
{
    return ceil_div(m, HIGH) * ceil_div(n, width) * HIGH * width + sums;
}

/* In fp32 all whose slab fits the workspace; in tf32 the library is the faster from some tiles on. */
bool ps_cuda_gradient_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    const int64_t m = p->m > p->n ? p->m : p->n, n = p->m > p->n ? p->n : p->m;
    const int64_t slab = gradient_slab(m, n, gradient_width(k, n), ps_cuda_split_sums(p->sums, p->n));
    const bool few = ps_cuda_exact(k) || ceil_div(m, HIGH) * ceil_div(n, 64) <= 2 * context->multiprocessors;
    return served(context, p) && p->k >= 1024 && n >= 32 && few && slab * (int64_t)sizeof(float) <= PS_FLOAT_WORKSPACE &&
           p->a.row == 1 && p->b.column == 1 && !p->bias && !p->addend && aligned(p->a.data, p->a.column, 4) &&
           aligned(p->b.data, p->b.row, 4);
}

template <int N, bool EXACT>
static enum ps_status gradient_launch(const struct ps_cuda_context *context, const struct ps_product *p, bool sum_a)
{
    size_t workspace_bytes;
    void *const workspace = ps_cuda_gemm_workspace(context, &workspace_bytes);
    struct gradient x = {};
    void (*const kernel)(struct gradient) = gradient_kernel<N, EXACT>;
    const int bytes = 2 * N * LINE * (EXACT ? 2 : 1) + stages_of<N> * stage_floats<N> * (int)sizeof(float) + 1024;
    x.a = (const float *)p->a.data;
    x.b = (const float *)p->b.data;
    x.partial = (float *)workspace;
    x.k = p->k;
    x.lda = p->a.column;
    x.ldb = p->b.row;
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
    ps_cuda_launch(context, kernel, (unsigned)(slabs * x.tiles), THREADS, (size_t)bytes, x);
    PS_TRY(ps_cuda_check(cudaGetLastError(), "gemm"));
    return ps_cuda_split_sum(context, p, x.partial, (int)slabs, HIGH, N, n_sums);
}

enum ps_status ps_cuda_gradient_product(const struct ps_kernels *k, const struct ps_product *product)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    struct ps_product p = *product;
    const bool turned = p.m < p.n; /* tiles are higher than wide */
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
