/* c = alpha a b + beta c where the summed dimension k is long, c is small, and both operands lie with k slow: a weight's gradient,
 * x' dy, with k = R rows of the batch. A general product has too few tiles of c to fill the device; here each block takes a slab of
 * rows and a tile of c, keeps the tile in registers while the rows pass through shared memory (cp.async, several stages deep), and
 * writes its partial tile; a second kernel adds the slabs in a fixed order. fp32 multiplies with FFMA, tf32 with mma.m16n8k8 on
 * operands rounded to nearest.
 *
 * Bytes: 4 k (m tiles_n + n tiles_m) read, 8 slabs m n partial sums (they stay in L2), 4 m n or 8 m n of c. FLOPs 2 m n k.
 * 128 x 256 with k = 112,896 in one tile: 173 MB and 7.4 GFLOP; partial sums 2 x 17 MB on 132 multiprocessors. */
#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/mma.cuh"

#define THREADS 256

struct slabs {
    const float *a, *b;
    float *partial;  /* [slabs, tiles, BM, BN] */
    int64_t k, rows; /* rows of a slab */
    int lda, ldb, m, n, tiles_n;
};

/* ROWS lines of WIDTH floats from x[.., first column]; beyond `rows` and `columns` zeros. */
template <int ROWS, int WIDTH, int LD>
__device__ static inline void stage(float *shared, const float *x, int ld, int rows, int columns)
{
    constexpr int PIECES = WIDTH / 4;
#pragma unroll
    for (int i = 0; i < (ROWS * PIECES + THREADS - 1) / THREADS; i++) {
        int piece = i * THREADS + (int)threadIdx.x, row = piece / PIECES, column = piece % PIECES * 4;
        if (ROWS * PIECES % THREADS == 0 || piece < ROWS * PIECES) {
            int bytes = row < rows ? min(4, max(0, columns - column)) * 4 : 0;
            ps_copy_async_part(shared + row * LD + column, bytes ? x + row * ld + column : x, bytes);
        }
    }
}

/* One thread's part of a BM x BN tile, TM x TN, its rows and columns in groups of 4. */
template <int BM, int BN, int TM, int TN> struct ffma_tile {
    static constexpr int UNITS = BM / TM * (BN / TN), LDA = BM, LDB = BN; /* threads that share the tile */
    static constexpr int STEP = 1;                                        /* rows of k a call adds */
    float sum[TM][TN] = {};
    int m, n;

    __device__ ffma_tile(int unit) : m(unit / (BN / TN) * 4), n(unit % (BN / TN) * 4)
    {
    }
    __device__ static int row(int i)
    {
        return i / 4 * (BM / TM) * 4;
    }
    __device__ static int column(int j)
    {
        return j / 4 * (BN / TN) * 4;
    }
    __device__ void add(const float *a, const float *b)
    {
        float fa[TM], fb[TN];
#pragma unroll
        for (int i = 0; i < TM; i += 4) {
            *(float4 *)&fa[i] = *(const float4 *)(a + m + row(i));
        }
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
            *(float4 *)&fb[j] = *(const float4 *)(b + n + column(j));
        }
#pragma unroll
        for (int i = 0; i < TM; i++) {
#pragma unroll
            for (int j = 0; j < TN; j++) {
                sum[i][j] = fmaf(fa[i], fb[j], sum[i][j]);
            }
        }
    }
    __device__ void put(float *out) const
    {
#pragma unroll
        for (int i = 0; i < TM; i++) {
#pragma unroll
            for (int j = 0; j < TN; j += 4) {
                *(float4 *)(out + (m + row(i) + i % 4) * BN + n + column(j)) =
                    make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
            }
        }
    }
};

/* One warp's part, TM x TN, as m16n8 fragments (PTX ISA, mma.m16n8k8 for tf32). Lines 8 floats longer than the tile put the 32
 * elements of a fragment in 32 banks. */
template <int BM, int BN, int TM, int TN> struct mma_tile {
    static constexpr int UNITS = BM / TM * (BN / TN) * 32, LDA = BM + 8, LDB = BN + 8;
    static constexpr int STEP = 8;
    float sum[TM / 16][TN / 8][4] = {};
    int m, n, group, lane;

    __device__ mma_tile(int unit)
        : m(unit / 32 / (BN / TN) * TM), n(unit / 32 % (BN / TN) * TN), group(unit % 32 / 4), lane(unit % 4)
    {
    }
    __device__ void add(const float *a, const float *b)
    {
        unsigned fa[TM / 16][4], fb[TN / 8][2];
        a += lane * LDA + m + group;
        b += lane * LDB + n + group;
#pragma unroll
        for (int i = 0; i < TM / 16; i++) {
            fa[i][0] = ps_tf32(a[i * 16]);
            fa[i][1] = ps_tf32(a[i * 16 + 8]);
            fa[i][2] = ps_tf32(a[i * 16 + 4 * LDA]);
            fa[i][3] = ps_tf32(a[i * 16 + 8 + 4 * LDA]);
        }
#pragma unroll
        for (int j = 0; j < TN / 8; j++) {
            fb[j][0] = ps_tf32(b[j * 8]);
            fb[j][1] = ps_tf32(b[j * 8 + 4 * LDB]);
        }
#pragma unroll
        for (int i = 0; i < TM / 16; i++) {
#pragma unroll
            for (int j = 0; j < TN / 8; j++) {
                ps_mma_tf32(sum[i][j], fa[i], fb[j][0], fb[j][1], sum[i][j]);
            }
        }
    }
    __device__ void put(float *out) const
    {
#pragma unroll
        for (int i = 0; i < TM / 16; i++) {
#pragma unroll
            for (int j = 0; j < TN / 8; j++) {
                float *at = out + (m + i * 16 + group) * BN + n + j * 8 + lane * 2;
                *(float2 *)at = make_float2(sum[i][j][0], sum[i][j][1]);
                *(float2 *)(at + 8 * BN) = make_float2(sum[i][j][2], sum[i][j][3]);
            }
        }
    }
};

/* GROUPS of threads share a block's tile: each adds every GROUPS-th step of a stage of BK rows, and they are summed in order. */
template <template <int, int, int, int> class Tile, int BM, int BN, int TM, int TN, int BK, int STAGES> struct shape {
    typedef Tile<BM, BN, TM, TN> tile;
    static constexpr int GROUPS = THREADS / tile::UNITS, STEPS = BK / tile::STEP;
    static constexpr int STAGE = BK * (tile::LDA + tile::LDB); /* floats */
    static constexpr int FLOATS = STAGES * STAGE > GROUPS *BM *BN || GROUPS == 1 ? STAGES *STAGE : GROUPS *BM *BN;
    static_assert(THREADS % tile::UNITS == 0 && STEPS % GROUPS == 0, "every group does the same");
};

template <template <int, int, int, int> class Tile, int BM, int BN, int TM, int TN, int BK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) slab_kernel(const __grid_constant__ struct slabs x)
{
    typedef shape<Tile, BM, BN, TM, TN, BK, STAGES> S;
    typedef typename S::tile T;
    extern __shared__ float4 shared_memory[];
    float *shared = (float *)shared_memory;
    int m0 = (int)blockIdx.x / x.tiles_n * BM, n0 = (int)blockIdx.x % x.tiles_n * BN;
    int64_t first = (int64_t)blockIdx.y * x.rows;
    int rows = (int)(x.k - first < x.rows ? x.k - first : x.rows), stages = (rows + BK - 1) / BK;
    const float *a = x.a + first * x.lda + m0, *b = x.b + first * x.ldb + n0;
    auto fetch = [&](int s) {
        if (s < stages) {
            float *to = shared + s % STAGES * S::STAGE;
            stage<BK, BM, T::LDA>(to, a + (int64_t)s * BK * x.lda, x.lda, rows - s * BK, x.m - m0);
            stage<BK, BN, T::LDB>(to + BK * T::LDA, b + (int64_t)s * BK * x.ldb, x.ldb, rows - s * BK, x.n - n0);
        }
        ps_copy_commit();
    };
    int group = (int)threadIdx.x / T::UNITS;
    T tile((int)threadIdx.x % T::UNITS);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        fetch(s);
    }
    for (int s = 0; s < stages; s++) {
        ps_copy_wait_group<STAGES - 2>();
        __syncthreads(); /* stage s is there, and all have done with stage s - 1, whose place is filled next */
        fetch(s + STAGES - 1);
        const float *at = shared + s % STAGES * S::STAGE, *bt = at + BK * T::LDA;
#pragma unroll 8
        for (int i = 0; i < S::STEPS / S::GROUPS; i++) {
            int step = (i * S::GROUPS + group) * T::STEP;
            tile.add(at + step * T::LDA, bt + step * T::LDB);
        }
    }
    float *out = x.partial + ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * (BM * BN);
    if constexpr (S::GROUPS == 1) {
        tile.put(out);
    } else {
        ps_copy_wait();
        __syncthreads();
        tile.put(shared + group * (BM * BN));
        __syncthreads();
        for (int i = (int)threadIdx.x; i < BM * BN / 4; i += THREADS) {
            float4 sum = shared_memory[i];
#pragma unroll
            for (int g = 1; g < S::GROUPS; g++) {
                float4 v = shared_memory[g * (BM * BN / 4) + i];
                sum.x += v.x;
                sum.y += v.y;
                sum.z += v.z;
                sum.w += v.w;
            }
            ((float4 *)out)[i] = sum;
        }
    }
}

struct sums {
    const float4 *partial;
    float *c;
    int64_t row, column; /* strides of c */
    int slabs, tiles, tiles_n, tile_m, tile_n, m, n;
    float alpha, beta;
    float *sums; /* of columns, behind the tiles of a slab */
    int n_sums, padded;
};

/* Thread (slab lane y, float4 x) takes slabs y, y + LANES, ..; then the lanes are added pairwise. A block adds 1,024 / LANES
 * elements. */
template <int LANES> __global__ void __launch_bounds__(THREADS) sum_kernel(const __grid_constant__ struct sums x)
{
    ps_grid_begin();
    constexpr int WIDE = THREADS / LANES;
    __shared__ float4 lanes[LANES][WIDE];
    int lane = (int)threadIdx.x / WIDE, part = (int)threadIdx.x % WIDE;
    int tile_size = x.tile_m * x.tile_n, slab_size = (x.tiles * tile_size + x.padded) / 4, at = (int)blockIdx.x * WIDE + part;
    const bool there = at < slab_size;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int slab = lane; there && slab < x.slabs; slab += LANES) {
        float4 v = __ldcg(x.partial + (int64_t)slab * slab_size + at);
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
    }
    lanes[lane][part] = sum;
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) {
            float4 v = lanes[lane + half][part];
            sum.x += v.x;
            sum.y += v.y;
            sum.z += v.z;
            sum.w += v.w;
            lanes[lane][part] = sum;
        }
    }
    if (lane != 0 || !there) {
        return;
    }
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    if (at * 4 >= x.tiles * tile_size) {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const int column = at * 4 - x.tiles * tile_size + q;
            if (column < x.n_sums) {
                x.sums[column] += values[q];
            }
        }
    } else {
        int tile = at * 4 / tile_size, in_tile = at * 4 % tile_size;
        int i = tile / x.tiles_n * x.tile_m + in_tile / x.tile_n, j = tile % x.tiles_n * x.tile_n + in_tile % x.tile_n;
#pragma unroll
        for (int q = 0; q < 4; q++) {
            if (i < x.m && j + q < x.n) {
                float *c = x.c + i * x.row + (j + q) * x.column;
                *c = x.beta != 0 ? fmaf(x.beta, *c, x.alpha * values[q]) : x.alpha * values[q];
            }
        }
    }
}

template <int LANES> static void sum_launch(const struct ps_cuda_context *context, const struct sums &x)
{
    const unsigned each = 4 * THREADS / LANES, all = (unsigned)(x.tiles * x.tile_m * x.tile_n + x.padded);
    ps_cuda_launch(context, sum_kernel<LANES>, (all + each - 1) / each, THREADS, 0, x);
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

enum ps_status ps_cuda_split_sum(const struct ps_cuda_context *context, const struct ps_product *p, const float *partial, int slabs,
                                 int tile_m, int tile_n, int64_t n_sums)
{
    struct sums x = {};
    x.partial = (const float4 *)partial;
    x.c = (float *)p->c.data;
    x.row = p->c.row;
    x.column = p->c.column;
    x.slabs = slabs;
    x.tiles_n = (int)ceil_div(p->n, tile_n);
    x.tiles = (int)ceil_div(p->m, tile_m) * x.tiles_n;
    x.tile_m = tile_m;
    x.tile_n = tile_n;
    x.m = (int)p->m;
    x.n = (int)p->n;
    x.alpha = p->alpha;
    x.beta = p->beta;
    x.sums = p->sums;
    x.n_sums = (int)n_sums;
    x.padded = ps_cuda_split_sums(p->sums, n_sums);
    slabs > 8 ? sum_launch<32>(context, x) : sum_launch<4>(context, x);
    PS_CUDA_LAUNCHED("split gemm sum");
}

/* ---- the choice, by counting ---- */

struct candidate {
    void (*kernel)(struct slabs);
    bool tensor_cores;
    int tile_m, tile_n, shared_bytes, blocks; /* blocks that share a multiprocessor */
};

template <template <int, int, int, int> class Tile, int BM, int BN, int TM, int TN, int BK, int STAGES, int BLOCKS>
static struct candidate candidate_make(bool tensor_cores)
{
    return {slab_kernel<Tile, BM, BN, TM, TN, BK, STAGES, BLOCKS>, tensor_cores, BM, BN,
            shape<Tile, BM, BN, TM, TN, BK, STAGES>::FLOATS * 4,   BLOCKS};
}

/* Wider tiles were tried (128 x 128 to 128 x 256) and lost to cuBLASLt by 1.2 to 1.6 times: those products are left to it. */
static const struct candidate candidates[] = {
    candidate_make<ffma_tile, 16, 16, 4, 4, 64, 4, 3>(false),  candidate_make<ffma_tile, 16, 64, 4, 4, 32, 4, 2>(false),
    candidate_make<ffma_tile, 16, 128, 4, 8, 32, 4, 2>(false), candidate_make<ffma_tile, 64, 64, 8, 8, 32, 4, 2>(false),
    candidate_make<mma_tile, 16, 16, 16, 16, 64, 4, 3>(true),  candidate_make<mma_tile, 16, 64, 16, 16, 32, 4, 3>(true),
    candidate_make<mma_tile, 16, 128, 16, 32, 32, 4, 2>(true), candidate_make<mma_tile, 64, 64, 32, 32, 32, 4, 2>(true),
};

/* What a choice is estimated to take, in seconds, from its bytes and FLOPs, at rates a large Hopper GPU reaches. Only the order of
 * the estimates matters. */
static double estimate(const struct candidate *c, const struct ps_product *p, int64_t slabs, int multiprocessors)
{
    int64_t tiles_m = (p->m + c->tile_m - 1) / c->tile_m, tiles_n = (p->n + c->tile_n - 1) / c->tile_n;
    double outputs = (double)(tiles_m * tiles_n) * c->tile_m * c->tile_n;
    double blocks = (double)(slabs * tiles_m * tiles_n), busy = blocks < multiprocessors ? blocks / multiprocessors : 1;
    double bytes = 4.0 * (double)p->k * (double)(p->m * tiles_n + p->n * tiles_m);
    double flops = 2.0 * outputs * (double)p->k;
    double memory = bytes / (3.5e12 * busy), arithmetic = flops / ((c->tensor_cores ? 200e12 : 45e12) * busy);
    return (memory > arithmetic ? memory : arithmetic) + 8.0 * (double)slabs * outputs / 4e12;
}

static int rows_aligned(const struct ps_operand *o, int64_t ld)
{
    return (uintptr_t)o->data % 16 == 0 && ld % 4 == 0 && ld > 0 && ld < 1 << 24;
}

/* Measured on an H200 against cuBLASLt's first heuristic: 0.4 to 0.85 of its time up to 16 x 128, 0.8 to 1.0 at 64 x 64 to 64 x
 * 192, more beyond. */
bool ps_cuda_split_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    (void)k;
    int64_t narrow = p->m < p->n ? p->m : p->n, outputs = p->m * p->n;
    return p->type == PS_F32 && p->batch[0] * p->batch[1] == 1 && p->a.row == 1 && p->b.column == 1 &&
           rows_aligned(&p->a, p->a.column) && rows_aligned(&p->b, p->b.row) && p->k >= 1024 &&
           (narrow <= 16 ? outputs <= 16 * 512 : outputs <= 64 * 192);
}

enum ps_status ps_cuda_split_product(const struct ps_kernels *k, const struct ps_product *product)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    const bool tensor_cores = k->precision == PS_TF32;
    size_t workspace_bytes;
    void *const workspace = ps_cuda_gemm_workspace(context, &workspace_bytes);
    struct ps_product p = *product;
    if (!(p.type == PS_F32 && p.batch[0] * p.batch[1] == 1 && p.a.row == 1 && p.b.column == 1 && rows_aligned(&p.a, p.a.column) &&
          rows_aligned(&p.b, p.b.row) && p.m <= 4096 && p.n <= 4096)) {
        return ps_fail(PS_UNSUPPORTED, "gemm: m %lld, n %lld, k %lld cannot be split along k: layout or alignment", (long long)p.m,
                       (long long)p.n, (long long)p.k);
    }
    if (p.m > p.n) { /* tiles are wider than high */
        p.m = product->n;
        p.n = product->m;
        p.a = ps_operand_transposed(product->b);
        p.b = ps_operand_transposed(product->a);
        p.c = ps_operand_transposed(product->c);
    }
    const struct candidate *best = NULL;
    int64_t best_slabs = 0;
    double best_seconds = 0;
    for (size_t i = 0; i < sizeof candidates / sizeof candidates[0]; i++) {
        const struct candidate *c = &candidates[i];
        if (c->tensor_cores != tensor_cores || c->shared_bytes > context->shared_bytes) {
            continue;
        }
        int64_t tiles = ceil_div(p.m, c->tile_m) * ceil_div(p.n, c->tile_n);
        int64_t most = (int64_t)(workspace_bytes / ((size_t)tiles * c->tile_m * c->tile_n * 4));
        for (int part = 1; part <= 8; part *= 2) {
            int64_t slabs = (int64_t)context->multiprocessors * c->blocks / (tiles * part);
            slabs = slabs > most ? most : slabs;
            slabs = slabs > ceil_div(p.k, 64) ? ceil_div(p.k, 64) : slabs;
            if (slabs < 1) {
                continue;
            }
            double seconds = estimate(c, &p, slabs, context->multiprocessors);
            if (!best || seconds < best_seconds) {
                best = c;
                best_slabs = slabs;
                best_seconds = seconds;
            }
        }
    }
    if (!best) {
        return ps_fail(PS_UNSUPPORTED, "gemm: m %lld, n %lld, k %lld: no split fits the workspace", (long long)p.m, (long long)p.n,
                       (long long)p.k);
    }
    struct slabs x = {};
    x.a = (const float *)p.a.data;
    x.b = (const float *)p.b.data;
    x.partial = (float *)workspace;
    x.lda = (int)p.a.column;
    x.ldb = (int)p.b.row;
    x.k = p.k;
    x.rows = ceil_div(ceil_div(p.k, best_slabs), 8) * 8;
    x.m = (int)p.m;
    x.n = (int)p.n;
    x.tiles_n = (int)ceil_div(p.n, best->tile_n);
    int tiles = (int)ceil_div(p.m, best->tile_m) * x.tiles_n;
    int slabs = (int)ceil_div(p.k, x.rows);
    PS_TRY(ps_cuda_allow_shared((const void *)best->kernel, best->shared_bytes, "split gemm"));
    best->kernel<<<dim3((unsigned)tiles, (unsigned)slabs), THREADS, (size_t)best->shared_bytes, context->stream>>>(x);
    PS_TRY(ps_cuda_check(cudaGetLastError(), "split gemm"));

    return ps_cuda_split_sum(context, &p, x.partial, slabs, best->tile_m, best->tile_n, 0);
}
