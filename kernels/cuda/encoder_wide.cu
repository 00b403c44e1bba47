/* The whole encoder of a small model with d_model 64, heads of 16 columns, N <= 16 and d_ff 128 or 256, forward and backward:
 * what encoder_small.cu does, with the products by wgmma. Equations: docs/design.md section 3.
 *
 * A block works on four units of 16 rows, a product's 64 rows. Its four warpgroups have 16 of the 64 columns each, and so a head,
 * and one panel of d_ff; warp u of each has unit u. What one warp knows and all need lies in shared memory in panels of 64 x 64
 * bf16, from which wgmma reads both operands; attention is a warp's own and never leaves its registers. A layer's weights are one
 * set of panels; a matrix of the next layer takes the place of this one's as soon as that has been used, behind the products.
 *
 * Weight gradients: a warpgroup owns 64 x 64 of each of three passes, over the block's 64 rows. gamma's and beta's are column sums
 * of registers, the biases' products with ones. A block's sums go to memory in the order of the registers, and wide_sum adds the
 * blocks in order.
 *
 * Registers: what follows from a warp's place is found anew at each product (refresh). Left to itself the compiler finds all
 * addresses before the first layer and spills them, which made backward slower by a sixth.
 *
 * Counts, seed28k (f 256, 3 x 5 rows in 16, 2 layers; 107 blocks of 16 warps): a layer's panels 96 KB; a warpgroup and a layer take
 * 32 products m64n16k16 and 4 m64n64k16 forward, 44 and 20 backward, and 24 movmatrix a warp in place of attention's transposes;
 * 6 and 8 barriers; partial gradients 43 MB. */
#include "kernels/cuda/encoder_head.cuh"

enum { D = 64, UNITS = 4, THREADS = 512, PANEL = 64 * 64 * 2, STEP = 16 * 128, MOST_PANELS = 4 };

typedef place<D, 1> narrow_place;

/* warpgroup = share, warp of it = unit. Addresses in shared memory are of a panel 0; others are so many panels further. */
struct wide_place : narrow_place {
    uint32_t wide;  /* where the warp's rows begin in a panel; 16 i columns further: exclusive or 32 i */
    uint32_t panel; /* of wgmma's operand: its lower word */
    __device__ __forceinline__ wide_place(const void *memory)
    {
        /* The same in all lanes, so that the compiler keeps what follows from it once a warp. */
        const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
        const uint32_t address = ps_shared_address(memory);
        unit = warp % UNITS;
        share = warp / UNITS;
        tile = 0;
        row = 0;
        wide = address + (uint32_t)((unit * 16 + lane % 16) * 128 + ((lane / 16) ^ (lane & 7)) * 16);
        panel = (address >> 4 & 0x3fff) | 1 << 16;
    }
    /* What follows from the warp's place is found anew: kept for all of the kernel it would fill the registers. */
    __device__ __forceinline__ void refresh()
    {
        asm volatile("" : "+r"(panel), "+r"(share), "+r"(wide), "+r"(g), "+r"(q));
    }
    /* The warp's 16 columns. */
    __device__ __forceinline__ uint32_t own() const
    {
        return wide ^ (uint32_t)share * 32;
    }
    /* The operand in another panel; further to the warpgroup's 16 columns, 16 rows, panel. */
    __device__ __forceinline__ uint32_t of(int panels_further) const
    {
        return panel + (uint32_t)panels_further * (PANEL / 16);
    }
    __device__ __forceinline__ uint32_t columns() const
    {
        return (uint32_t)share * 2;
    }
    __device__ __forceinline__ uint32_t rows() const
    {
        return (uint32_t)share * (STEP / 16);
    }
    /* The warpgroup's panel of d_ff; when there are fewer than warpgroups, some do the same. */
    template <int P> __device__ __forceinline__ int mine() const
    {
        return P == 4 ? share : share % P;
    }
};

/* ---- wgmma ---- */

/* An operand in a panel: rows of 128 bytes, 16-byte pieces exchanged by the row's number modulo 8, groups of 8 rows after one
 * another. Its address, in 16 bytes, is the lower word's. */
static __device__ __forceinline__ uint64_t operand_at(uint32_t low)
{
    return (uint64_t)(1024 >> 4 | 1 << 30) << 32 | low;
}

/* d = or += a b, 16 deep, for the warpgroup's 64 rows and 16 or 64 columns. A_ROWS, B_ROWS: the depth runs over the operand's rows.
 */
template <bool A_ROWS, bool B_ROWS> static __device__ __forceinline__ void step(float (&d)[2][4], uint64_t a, uint64_t b, bool add)
{
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, %12;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "l"(a), "l"(b), "r"((int)add), "n"((int)A_ROWS), "n"((int)B_ROWS));
}

template <bool A_ROWS, bool B_ROWS> static __device__ __forceinline__ void step(float (&d)[8][4], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, p, 1, 1, %35, %36;\n}"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                   "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
                   "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
                   "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
                   "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_ROWS), "n"((int)B_ROWS));
}

/* The same, 64 deep: a and b are panels, or the part of one where the columns begin. */
template <bool A_ROWS, bool B_ROWS, int T>
static __device__ __forceinline__ void product(float (&d)[T][4], uint32_t a, uint32_t b, bool add)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        step<A_ROWS, B_ROWS>(d, operand_at(a + k * (A_ROWS ? STEP / 16 : 2)), operand_at(b + k * (B_ROWS ? STEP / 16 : 2)),
                             add || k > 0);
    }
}

/* The values are in their registers now: no product under way meets a move of them. */
template <int T> static __device__ __forceinline__ void settle(float (&d)[T][4])
{
#pragma unroll
    for (int t = 0; t < T; t++) {
        asm volatile("" : "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])::"memory");
    }
}

/* Before a batch of products with these sums. Operands' addresses are found anew: kept for all of the kernel they would fill the
 * registers. */
template <typename... SUMS> static __device__ __forceinline__ void products_begin(wide_place &at, SUMS &...sums)
{
    at.refresh();
    (settle(sums), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most PENDING batches are under way, these sums' not among them. */
template <int PENDING, typename... SUMS> static __device__ __forceinline__ void products_wait(SUMS &...sums)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    (settle(sums), ...);
}

/* All the block's stores to shared memory are seen by all, wgmma too. */
static __device__ __forceinline__ void publish()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

/* ---- panels ---- */

/* An operand m16k16 to the warp's rows; to: panel + own, or panel + wide ^ 32 i. */
static __device__ __forceinline__ void put(uint32_t to, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}

static __device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING> static __device__ __forceinline__ void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Begins to copy PANELS panels, ld elements from row to row, `apart` elements from panel to panel. */
template <int PANELS> static __device__ __forceinline__ void stage_panels(char *to, const bf16 *from, int ld, int apart)
{
    const int row = (int)threadIdx.x / 8, piece = (int)threadIdx.x % 8;
    const uint32_t at = ps_shared_address(to) + (uint32_t)(row * 128 + (piece ^ (row & 7)) * 16);
    from += row * ld + piece * 8;
#pragma unroll
    for (int i = 0; i < PANELS; i++) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + i * PANEL), "l"(from + i * apart) : "memory");
    }
}

/* Layer's vectors in shared memory, in order: b_qkv, b_o, b_2, ln1 gamma, beta, ln2 gamma, beta, b_1. */
enum { B_QKV = 0, B_O = 3 * D, B_2 = 4 * D, LN1_GAMMA = 5 * D, LN1_BETA = 6 * D, LN2_GAMMA = 7 * D, LN2_BETA = 8 * D, B_1 = 9 * D };

static __host__ __device__ constexpr int vector_floats(int f)
{
    return 9 * D + f;
}

static __device__ __forceinline__ void stage_vectors(const struct small &x, float *to, int f)
{
    for (int i = (int)threadIdx.x * 4; i < vector_floats(f); i += THREADS * 4) {
        const int64_t of = i < B_O         ? x.at.b_qkv + i
                           : i < B_2       ? x.at.b_o + i - B_O
                           : i < LN1_GAMMA ? x.at.b_2 + i - B_2
                           : i < LN1_BETA  ? x.at.ln1_gamma + i - LN1_GAMMA
                           : i < LN2_GAMMA ? x.at.ln1_beta + i - LN1_BETA
                           : i < LN2_BETA  ? x.at.ln2_gamma + i - LN2_GAMMA
                           : i < B_1       ? x.at.ln2_beta + i - LN2_BETA
                                           : x.at.b_1 + i - B_1;
        for (int l = 0; l < x.layers; l++) {
            ps_copy_async(to + l * vector_floats(f) + i, x.parameters + l * x.at.vector_stride + of);
        }
    }
}

/* Shared memory: panels of W_qkv (3), W_o, W_1 and W_2 (f / 64 each), the working ones, hidden scores' table, statistics, backward
 * column sums [2][units][2][64], the vectors of all layers. */
enum { STATISTICS = 4 * 4 * 16 * 8, COLUMN_SUMS = 2 * UNITS * 2 * D * 4 };

static __host__ __device__ constexpr int panels_of(int p, bool backward)
{
    return 4 + 2 * p + (backward ? 4 + MOST_PANELS + p : 2 + p);
}

static size_t shared_bytes(int f, int64_t layers, bool backward)
{
    return (size_t)panels_of(f / 64, backward) * PANEL + TABLE_BYTES + UNITS * STATISTICS + (backward ? COLUMN_SUMS : 0) +
           (size_t)layers * (size_t)vector_floats(f) * 4;
}

/* ---- rows ---- */

/* Two words of row g and two of row g + 8, as they lie in memory. */
static __device__ __forceinline__ void fetch_rows(uint32_t (&v)[4], const bf16 *from, const narrow_place &at)
{
    const bf16 *p = from + at.first * D + at.share * 16 + at.q * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = at.here[i % 2] ? *(const uint32_t *)(p + i % 2 * 8 * D + i / 2 * 8) : 0;
    }
}

/* y = a b', b [16 rows, 16] in registers as it lies. */
static __device__ __forceinline__ void times_transposed(float (&y)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                                        const float (&c0)[4], const float (&c1)[4])
{
    ps_mma16(y[0], a, b[0], b[2], c0);
    ps_mma16(y[1], a, b[1], b[3], c1);
}

/* y = a b, b [16 rows, 16] in registers as it lies. */
static __device__ __forceinline__ void times(float (&y)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4])
{
    const float zero[4] = {0, 0, 0, 0};
    ps_mma16(y[0], a, transposed(b[0]), transposed(b[1]), zero);
    ps_mma16(y[1], a, transposed(b[2]), transposed(b[3]), zero);
}

/* The operand a'. */
static __device__ __forceinline__ void transpose_operand(uint32_t (&y)[4], const uint32_t (&a)[4])
{
    y[0] = transposed(a[0]);
    y[1] = transposed(a[2]);
    y[2] = transposed(a[1]);
    y[3] = transposed(a[3]);
}

/* ---- forward ---- */

/* A unit's windows are gathered where its rows of a panel will lie. */
enum { WINDOW_FLOATS = 16 * 128 / 4 };

template <int P, bool DROP>
static __global__ void __launch_bounds__(THREADS, 1) wide_forward(const __grid_constant__ struct small x)
{
    ps_grid_begin();
    extern __shared__ __align__(1024) char memory[];
    constexpr int F = P * 64;
    enum { W_QKV = 0, W_O = 3, W_1 = 4, W_2 = 4 + P, A = 4 + 2 * P, M, H }; /* panels */
    float4 *const table = (float4 *)(memory + panels_of(P, false) * PANEL);
    wide_place at(memory);
    char *const statistics = memory + panels_of(P, false) * PANEL + TABLE_BYTES + at.unit * STATISTICS;
    float *const all_vectors = (float *)(memory + panels_of(P, false) * PANEL + TABLE_BYTES + UNITS * STATISTICS);
    const uint64_t now = DROP ? x.state->step : 0;
    const struct sizes z = {F, 16, F, DROP};
    uint32_t rows[4];
    float *const values = (float *)(memory + A * PANEL) + at.unit * WINDOW_FLOATS;
    /* Of the unit that `at` has taken, number u. */
    const auto begin_rows = [&](int64_t u) {
        if (x.embed.weight) {
            embed_unit<D, 1, DROP>(rows, values, x, u, now, at);
        } else {
            fetch_rows(rows, x.u, at);
        }
    };
    stage_vectors(x, all_vectors, F);
    bf16 *const head = (bf16 *)(memory + x.head.at);
    if (x.head.weight) {
        stage_wide_head(x, head);
    }
    copy_commit();
    stage_panels<3>(memory + W_QKV * PANEL, x.weights + x.at.w_qkv, 3 * D, D);
    copy_commit();
    stage_panels<1>(memory + W_O * PANEL, x.weights + x.at.w_o, D, 0);
    copy_commit();
    stage_panels<P>(memory + W_1 * PANEL, x.weights + x.at.w_1, F, D);
    copy_commit();
    fill_table<D, 1>(table, x.n, at);
    at.take(x, (int64_t)blockIdx.x * UNITS + at.unit);
    begin_rows((int64_t)blockIdx.x * UNITS + at.unit);
    const float target = x.head.weight ? wide_target(x, (int64_t)blockIdx.x * UNITS) : 0.0f;
    copy_wait<3>();
    __syncthreads();
    const int groups = (int)((x.units + UNITS - 1) / UNITS);
    for (int group = (int)blockIdx.x; group < groups; group += (int)gridDim.x) {
        const bool more = group + (int)gridDim.x < groups;
        float u[2][4];
        unpack_operand(u, rows);
#pragma unroll 1
        for (int l = 0; l < x.layers; l++) {
            const float *const vectors = all_vectors + l * vector_floats(F);
            const float *const own_vectors = vectors + at.share * 16;
            uint32_t *const keep = DROP && x.masks && at.global_tile < x.units ? masks_at<D, 1>(x, z, l, at) : NULL;
            /* What takes the place of this layer's weights: the next layer's, or the first one's for the next units. */
            const bool stage = l + 1 < x.layers || more;
            const bf16 *const next = x.weights + (l + 1 < x.layers ? l + 1 : 0) * x.at.matrix_stride;
            uint32_t a[4];
            float rstd[2], xhat[2][4], own[2][4];
            normalise<D, 1>(xhat, rstd, u, x.epsilon, statistics_at<D, 1>(statistics, 0, at), at);
            scale_shift(a, xhat, own_vectors + LN1_GAMMA, own_vectors + LN1_BETA, at.q);
            put(at.own() + A * PANEL, a);
            copy_wait<2>(); /* W_qkv */
            publish();
            stage_panels<P>(memory + W_2 * PANEL, x.weights + l * x.at.matrix_stride + x.at.w_2, D, 64 * D);
            copy_commit();

            /* merged = softmax(q k' / sqrt(e)) v */
            {
                float q[2][4], k[2][4], v[2][4], p[2][4], sum[4], most[2];
                uint32_t rows[4], others[4];
                set_bias(q, own_vectors + B_QKV, at.q);
                set_bias(k, own_vectors + B_QKV + D, at.q);
                set_bias(v, own_vectors + B_QKV + 2 * D, at.q);
                products_begin(at, q, k, v);
                product<false, true>(q, at.of(A), at.of(W_QKV) + at.columns(), true);
                product<false, true>(k, at.of(A), at.of(W_QKV + 1) + at.columns(), true);
                product<false, true>(v, at.of(A), at.of(W_QKV + 2) + at.columns(), true);
                products_commit();
                const float4 low = table[at.lane], high = table[32 + at.lane];
                const float hidden0[4] = {low.x, low.y, low.z, low.w}, hidden1[4] = {high.x, high.y, high.z, high.w};
                products_wait<0>(q, k, v);
                pack_operand(rows, q[0], q[1]);
                pack_operand(others, k[0], k[1]);
                times_transposed(p, rows, others, hidden0, hidden1);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    most[r] = fmaxf(fmaxf(p[0][2 * r], p[0][2 * r + 1]), fmaxf(p[1][2 * r], p[1][2 * r + 1]));
                    most[r] = quad_max(most[r]) * x.scale_log2e;
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    p[i / 4][i % 4] = ps_exp2(fmaf(p[i / 4][i % 4], x.scale_log2e, -most[i % 4 / 2]));
                }
                pack_operand(rows, p[0], p[1]);
                pack_operand(others, v[0], v[1]);
                times(own, rows, others);
                sum[0] = sum[1] = sum[2] = sum[3] = 0;
                add_ones(sum, rows);
                const float scale[2] = {__fdividef(1.0f, sum[0]), __fdividef(1.0f, sum[2])};
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    own[i / 4][i % 4] *= scale[i % 4 / 2];
                }
                pack_operand(a, own[0], own[1]);
                put(at.own() + M * PANEL, a);
                if (x.lse && at.q == 0) {
                    float *lse = x.lse + ((int64_t)l * x.heads + at.share) * x.rows + at.first;
                    if (at.here[0]) {
                        lse[0] = most[0] + ps_log2(sum[0]);
                    }
                    if (at.here[1]) {
                        lse[8] = most[1] + ps_log2(sum[2]);
                    }
                }
            }

            /* u = r = u + drop(merged W_o + b_o) */
            copy_wait<2>(); /* W_o */
            publish();
            if (stage) {
                stage_panels<3>(memory + W_QKV * PANEL, next + x.at.w_qkv, 3 * D, D);
            }
            copy_commit();
            set_bias(own, own_vectors + B_O, at.q);
            products_begin(at, own);
            product<false, true>(own, at.of(M), at.of(W_O) + at.columns(), true);
            products_commit();
            uint32_t bits = 0xffffffffu;
            if (DROP) {
                bits = new_masks<D, 1>(x, now, 3 * l, D, at.share * 16, keep ? keep + at.share * 8 : NULL, at);
            }
            products_wait<0>(own);
            add_kept(u, own, bits, x.drop_scale);
            if (x.r) {
                store_rows<D, 1>(x.r + l * x.rows * D, u, at);
            }

            /* u = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2) */
            normalise<D, 1>(xhat, rstd, u, x.epsilon, statistics_at<D, 1>(statistics, 1, at), at);
            scale_shift(a, xhat, own_vectors + LN2_GAMMA, own_vectors + LN2_BETA, at.q);
            put(at.own() + A * PANEL, a);
            copy_wait<2>(); /* W_1 */
            publish();
            if (stage) {
                stage_panels<1>(memory + W_O * PANEL, next + x.at.w_o, D, 0);
            }
            copy_commit();
            {
                float y[8][4];
                uint32_t drawn[4];
#pragma unroll
                for (int t = 0; t < 8; t++) {
                    const float2 b = *(const float2 *)(vectors + B_1 + at.mine<P>() * 64 + t * 8 + at.q * 2);
                    y[t][0] = y[t][2] = b.x;
                    y[t][1] = y[t][3] = b.y;
                }
                products_begin(at, y);
                product<false, true>(y, at.of(A), at.of(W_1 + at.mine<P>()), true);
                products_commit();
                if (DROP) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int column = at.mine<P>() * 64 + i * 16;
                        drawn[i] = new_masks<D, 1>(x, now, 3 * l + 1, F, column, keep ? keep + D / 2 + column / 2 : NULL, at);
                    }
                }
                products_wait<0>(y);
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    float &v = y[i / 4][i % 4];
                    v = fmaf(v, ps_tanh(v * fmaf(v * v, GELU_B, GELU_A)), v);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    pack_operand(a, y[2 * i], y[2 * i + 1]);
                    if (DROP) {
                        drop_operand(a, drawn[i]);
                    }
                    put((at.wide ^ i * 32) + (H + at.mine<P>()) * PANEL, a);
                }
            }
            copy_wait<2>(); /* W_2 */
            publish();
            if (stage) {
                stage_panels<P>(memory + W_1 * PANEL, next + x.at.w_1, F, D);
            }
            copy_commit();
            products_begin(at, own);
#pragma unroll
            for (int i = 0; i < P; i++) {
                product<false, true>(own, at.of(H + i), at.of(W_2 + i) + at.columns(), i > 0);
            }
            products_commit();
            if (DROP) {
                const int chunk = D / 16 + F / 16 + at.share;
                bits = new_masks<D, 1>(x, now, 3 * l + 2, D, at.share * 16, keep ? keep + chunk * 8 : NULL, at);
            }
            set_bias(xhat, own_vectors + B_2, at.q);
            products_wait<0>(own);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                own[i / 4][i % 4] = fmaf(own[i / 4][i % 4], x.half_scale, xhat[i / 4][i % 4]);
            }
            add_kept(u, own, bits, x.drop_scale);
            store_rows<D, 1>(x.u + (l + 1) * x.rows * D, u, at);
        }
        if (x.head.weight) {
            head_wide(u, x, (float *)(memory + A * PANEL), head, (int64_t)group * UNITS, target, at); /* A and M are free */
        }
        if (more) { /* nothing reads the panel of the windows any more */
            const int64_t u = (int64_t)(group + (int)gridDim.x) * UNITS + at.unit;
            at.take(x, u);
            begin_rows(u);
        }
    }
}

/* ---- backward ---- */

/* A layer's partial sums: W_qkv (3), W_o, W_1, W_2 (f / 64 each), 64 x 64 each in the order of a warpgroup's registers, then b_qkv,
 * b_o, b_2, ln1 gamma, beta, ln2 gamma, beta and b_1, as in shared memory. */
static __host__ __device__ constexpr int wide_sums(int f)
{
    return (4 + 2 * (f / 64)) * 64 * 64 + vector_floats(f);
}

/* A warpgroup's 64 x 64 to a block's partial sums. */
static __device__ __forceinline__ void put_sums(float *to, const float (&c)[8][4], bool first)
{
    float4 *p = (float4 *)to + threadIdx.x % 128;
#pragma unroll
    for (int t = 0; t < 8; t++) {
        float4 v = make_float4(c[t][0], c[t][1], c[t][2], c[t][3]);
        if (!first) {
            const float4 old = p[t * 128];
            v.x += old.x;
            v.y += old.y;
            v.z += old.z;
            v.w += old.w;
        }
        p[t * 128] = v;
    }
}

/* to[64] = or += the column sums of a panel; warp i of a warpgroup has columns 16 i on. */
static __device__ __forceinline__ void bias_sums(float *to, const char *panel, bool first, const wide_place &at)
{
    float sum[4] = {0, 0, 0, 0}, other[4] = {0, 0, 0, 0};
    const uint32_t p = ps_shared_address(panel) + at.other * 128 + (((at.unit * 2 + at.across / 8) ^ (at.lane & 7)) * 16);
    uint32_t r[4][4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[k][0]), "=r"(r[k][1]), "=r"(r[k][2]), "=r"(r[k][3])
                     : "r"(p + k * STEP)
                     : "memory");
    }
    add_ones(sum, r[0]);
    add_ones(other, r[1]);
    add_ones(sum, r[2]);
    add_ones(other, r[3]);
    sum[0] += other[0];
    sum[2] += other[2];
    if (at.q == 0) {
        to += at.unit * 16 + at.g;
        to[0] = first ? sum[0] : to[0] + sum[0];
        to[8] = first ? sum[2] : to[8] + sum[2];
    }
}

/* What the warp's rows add to gamma's and beta's gradients: [2][64] of the unit. */
static __device__ __forceinline__ void norm_sums(float *to, const float (&dx)[2][4], const uint32_t (&xhat)[4],
                                                 const wide_place &at)
{
    float v[2][2][2]; /* gamma or beta, tile, column */
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float low = __uint_as_float(i ? xhat[2 * t] & 0xffff0000u : xhat[2 * t] << 16);
            const float high = __uint_as_float(i ? xhat[2 * t + 1] & 0xffff0000u : xhat[2 * t + 1] << 16);
            v[0][t][i] = dx[t][i] * low + dx[t][2 + i] * high;
            v[1][t][i] = dx[t][i] + dx[t][2 + i];
        }
    }
    /* Over the rows: lanes give away half of their values at each step, so that each is left with one. */
    const bool beta = at.lane & 16, right = at.lane & 8, odd = at.lane & 4;
    float w[2][2], y[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float give = beta ? v[0][i / 2][i % 2] : v[1][i / 2][i % 2];
        const float keep = beta ? v[1][i / 2][i % 2] : v[0][i / 2][i % 2];
        w[i / 2][i % 2] = keep + __shfl_xor_sync(0xffffffffu, give, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float give = right ? w[0][i] : w[1][i], keep = right ? w[1][i] : w[0][i];
        y[i] = keep + __shfl_xor_sync(0xffffffffu, give, 8);
    }
    const float give = odd ? y[0] : y[1], keep = odd ? y[1] : y[0];
    to[(beta ? D : 0) + at.share * 16 + (right ? 8 : 0) + at.q * 2 + odd] = keep + __shfl_xor_sync(0xffffffffu, give, 4);
}

/* gamma's and beta's sums over the units to the block's partial sums. */
static __device__ __forceinline__ void put_norm_sums(float *to, const float *from, bool first)
{
    if (threadIdx.x < 2 * D) {
        float sum = from[threadIdx.x];
#pragma unroll
        for (int u = 1; u < UNITS; u++) {
            sum += from[u * 2 * D + threadIdx.x];
        }
        to[threadIdx.x] = first ? sum : to[threadIdx.x] + sum;
    }
}

/* The operand scale * g, zero where dropped. */
template <bool DROP>
static __device__ __forceinline__ void branch_operand(uint32_t (&a)[4], const float (&g)[2][4], float scale, uint32_t bits)
{
    float v[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i / 4][i % 4] = g[i / 4][i % 4] * scale;
    }
    pack_operand(a, v[0], v[1]);
    if (DROP) {
        drop_operand(a, bits);
    }
}

/* Begins to fill a panel for the block's units from `unit` on: a row's patch, a one, and a one for its place in the sequence. */
static __device__ __forceinline__ void stage_embed_panel(char *panel, const struct small &x, int64_t unit)
{
    const int row = (int)threadIdx.x / 8, piece = (int)threadIdx.x % 8, i = row % 16;
    unit += row / 16;
    const int64_t from = unit * x.unit_rows + i;
    const bool here = unit < x.units && i < x.unit_rows && from < x.rows;
    stage_patch((bf16 *)(panel + row * 128 + (piece ^ (row & 7)) * 16), here ? x.embed.patches + from * x.embed.patch : NULL, piece,
                x.embed.patch, i % x.n);
}

/* The panel's columns' du: [P + 1 + N, d] of the block, to or onto its sums. */
static __device__ __forceinline__ void embed_gradient_panels(const struct small &x, wide_place &at, uint32_t panel, uint32_t du,
                                                             bool first)
{
    const int rows = embed_rows_of(x.embed.patch, x.n);
    float c[2][4];
    products_begin(at, c);
    product<true, true>(c, panel, du, false);
    products_commit();
    products_wait<0>(c);
    float *const to = x.embed.partial + (int64_t)blockIdx.x * (rows * D) + at.share * 16 + at.q * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = at.unit * 16 + at.g + 8 * h;
        if (row < rows) {
            add_pair(to + row * D, c[0][2 * h], c[0][2 * h + 1], x.drop_scale, first);
            add_pair(to + row * D + 8, c[1][2 * h], c[1][2 * h + 1], x.drop_scale, first);
        }
    }
}

template <int P, bool DROP, bool ONCE>
static __global__ void __launch_bounds__(THREADS, 1) wide_backward(const __grid_constant__ struct small x)
{
    ps_grid_begin();
    extern __shared__ __align__(1024) char memory[];
    constexpr int F = P * 64;
    /* Panels. M, N: LN2's output, LN1's. G, K: the gradient that enters W_2, W_o. H: hidden; then the gradients of q, k, v, and
     * merged. E: the gradient of hidden. */
    enum { W_QKV = 0, W_O = 3, W_1 = 4, W_2 = 4 + P, M = 4 + 2 * P, N, G, K, H, E = H + MOST_PANELS };
    float4 *const table = (float4 *)(memory + panels_of(P, true) * PANEL);
    wide_place at(memory);
    char *const statistics = memory + panels_of(P, true) * PANEL + TABLE_BYTES + at.unit * STATISTICS;
    float *const column_sums = (float *)(memory + panels_of(P, true) * PANEL + TABLE_BYTES + UNITS * STATISTICS);
    float *const all_vectors = column_sums + COLUMN_SUMS / 4, *const norms = column_sums + at.unit * 2 * D;
    const struct sizes z = {F, 16, F, DROP};
    uint32_t gradient[4], residual[4];
    at.take(x, (int64_t)blockIdx.x * UNITS + at.unit);
    fetch_rows(gradient, x.dy, at);
    fetch_rows(residual, x.r + (x.layers - 1) * x.rows * D, at);
    stage_vectors(x, all_vectors, F);
    copy_commit();
    {
        const bf16 *const w = x.weights + (x.layers - 1) * x.at.matrix_stride;
        stage_panels<P>(memory + W_1 * PANEL, w + x.at.w_1, F, D);
        stage_panels<P>(memory + W_2 * PANEL, w + x.at.w_2, D, 64 * D);
        copy_commit();
    }
    fill_table<D, 1>(table, x.n, at);
    copy_wait<1>();
    __syncthreads();
    const int groups = (int)((x.units + UNITS - 1) / UNITS);
    for (int group = (int)blockIdx.x; group < groups; group += (int)gridDim.x) {
        const bool first = ONCE || group == (int)blockIdx.x, more = !ONCE && group + (int)gridDim.x < groups;
        float g[2][4];
        unpack_operand(g, gradient);
#pragma unroll 1
        for (int l = x.layers - 1; l >= 0; l--) {
            const float *const vectors = all_vectors + l * vector_floats(F), *const own_vectors = vectors + at.share * 16;
            /* The block's partial sums, found anew for the registers' sake. */
            const auto sums = [&]() {
                int layer = l;
                asm volatile("" : "+r"(layer));
                return x.partial + ((int64_t)blockIdx.x * x.layers + layer) * wide_sums(F);
            };
            const auto vector_sums = [&]() { return sums() + (4 + 2 * P) * 64 * 64; };
            const bf16 *const weights = x.weights + l * x.at.matrix_stride;
            /* Units beyond the last read some masks: their gradients are zero. */
            const uint32_t *const masks = !DROP ? NULL : at.global_tile < x.units ? masks_at<D, 1>(x, z, l, at) : x.masks + at.g;
            uint32_t xhat[4], a[4], stream[4];
            float rstd[2], dx[2][4], v[2][4], c[8][4];

            /* y = r + drop(hidden W_2 + b_2) */
            unpack_operand(dx, residual);
            normalise<D, 1>(v, rstd, dx, x.epsilon, statistics_at<D, 1>(statistics, 0, at), at);
            pack_operand(xhat, v[0], v[1]);
            scale_shift(a, v, own_vectors + LN2_GAMMA, own_vectors + LN2_BETA, at.q);
            put(at.own() + M * PANEL, a);
            branch_operand<DROP>(a, g, x.drop_scale * x.half_scale, DROP ? masks[(D / 16 + F / 16 + at.share) * 8] >> at.q : 0);
            put(at.own() + G * PANEL, a);
            copy_wait<0>(); /* W_1, W_2 */
            publish();
            if (l + 1 < x.layers) { /* what the layer before left */
                put_norm_sums(vector_sums() + wide_sums(F) + LN1_GAMMA, column_sums + UNITS * 2 * D, first);
            }
            stage_panels<3>(memory + W_QKV * PANEL, weights + x.at.w_qkv, 3 * D, D);
            stage_panels<1>(memory + W_O * PANEL, weights + x.at.w_o, D, 0);
            copy_commit();
            {
                float y[8][4];
                uint32_t bits[4];
#pragma unroll
                for (int t = 0; t < 8; t++) {
                    const float2 b = *(const float2 *)(vectors + B_1 + at.mine<P>() * 64 + t * 8 + at.q * 2);
                    y[t][0] = y[t][2] = b.x;
                    y[t][1] = y[t][3] = b.y;
                }
                products_begin(at, y, c);
                product<false, true>(y, at.of(M), at.of(W_1 + at.mine<P>()), true);
                product<false, false>(c, at.of(G), at.of(W_2 + at.mine<P>()), false);
                products_commit();
                if (DROP) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        bits[i] = masks[D / 2 + at.mine<P>() * 32 + i * 8] >> at.q;
                    }
                }
                products_wait<0>(y, c);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint32_t d_hidden[4];
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        float &h = y[2 * i + j / 4][j % 4];
                        const float square = h * h, t = ps_tanh(h * fmaf(square, GELU_B, GELU_A)), one = 1.0f + t;
                        c[2 * i + j / 4][j % 4] *= fmaf(h * fmaf(square, 3 * GELU_B, GELU_A), fmaf(-t, t, 1.0f), one);
                        h *= one;
                    }
                    pack_operand(a, y[2 * i], y[2 * i + 1]);
                    pack_operand(d_hidden, c[2 * i], c[2 * i + 1]);
                    if (DROP) {
                        drop_operand(a, bits[i]);
                        drop_operand(d_hidden, bits[i]);
                    }
                    put((at.wide ^ i * 32) + (H + at.mine<P>()) * PANEL, a);
                    put((at.wide ^ i * 32) + (E + at.mine<P>()) * PANEL, d_hidden);
                }
            }
            publish();
            fetch_rows(stream, x.u + l * x.rows * D, at);
            products_begin(at, dx, c);
#pragma unroll
            for (int i = 0; i < P; i++) {
                product<false, false>(dx, at.of(E + i), at.of(W_1 + i) + at.rows(), i > 0);
            }
            products_commit();
            product<true, true>(c, at.of(M), at.of(E + at.mine<P>()), false);
            products_commit();
            products_wait<1>(dx);
            norm_sums(norms, dx, xhat, at);
            normalise_backward<D, 1>(g, dx, own_vectors + LN2_GAMMA, xhat, rstd, statistics_at<D, 1>(statistics, 1, at), at);
            if (at.share < P) {
                bias_sums(vector_sums() + B_1 + at.mine<P>() * 64, memory + (E + at.mine<P>()) * PANEL, first, at);
            }
            if (at.share == 0) {
                bias_sums(vector_sums() + B_2, memory + G * PANEL, first, at);
            }
            products_wait<0>(c);
            if (at.share < P) {
                put_sums(sums() + (4 + at.mine<P>()) * 64 * 64, c, first);
            }
            products_begin(at, c);
            product<true, true>(c, at.of(H + at.mine<P>()), at.of(G), false);
            products_commit();

            /* r = u + drop(merged W_o + b_o) */
            branch_operand<DROP>(a, g, x.drop_scale, DROP ? masks[at.share * 8] >> at.q : 0);
            put(at.own() + K * PANEL, a);
            unpack_operand(dx, stream);
            normalise<D, 1>(v, rstd, dx, x.epsilon, statistics_at<D, 1>(statistics, 2, at), at);
            pack_operand(xhat, v[0], v[1]);
            scale_shift(a, v, own_vectors + LN1_GAMMA, own_vectors + LN1_BETA, at.q);
            put(at.own() + N * PANEL, a);
            float log_sum[2]; /* rows that do not exist see nothing */
            {
                const float *lse = x.lse + ((int64_t)l * x.heads + at.share) * x.rows + at.first;
                log_sum[0] = at.here[0] ? lse[0] : 1e30f;
                log_sum[1] = at.here[1] ? lse[8] : 1e30f;
            }
            products_wait<0>(c);
            if (at.share < P) {
                put_sums(sums() + (4 + P + at.mine<P>()) * 64 * 64, c, first);
            }
            copy_wait<0>(); /* W_qkv, W_o */
            publish();
            put_norm_sums(vector_sums() + LN2_GAMMA, column_sums, first);
            if (l > 0 || more) {
                const bf16 *const next = x.weights + (l > 0 ? l - 1 : x.layers - 1) * x.at.matrix_stride;
                stage_panels<P>(memory + W_1 * PANEL, next + x.at.w_1, F, D);
                stage_panels<P>(memory + W_2 * PANEL, next + x.at.w_2, D, 64 * D);
            }
            if (l == 0 && x.embed.partial) {
                stage_embed_panel(memory + M * PANEL, x, (int64_t)group * UNITS);
            }
            copy_commit();
            if (l > 0) {
                fetch_rows(residual, x.r + (l - 1) * x.rows * D, at);
            }

            /* A = softmax(q k' / sqrt(e)), merged = A v */
            {
                uint32_t queries[4], keys[4], values[4], d_merged[4], p_operand[4], operand[4];
                {
                    float q[2][4], k[2][4], w[2][4];
                    set_bias(q, own_vectors + B_QKV, at.q);
                    set_bias(k, own_vectors + B_QKV + D, at.q);
                    set_bias(w, own_vectors + B_QKV + 2 * D, at.q);
                    products_begin(at, q, k, w, dx);
                    product<false, true>(q, at.of(N), at.of(W_QKV) + at.columns(), true);
                    product<false, true>(k, at.of(N), at.of(W_QKV + 1) + at.columns(), true);
                    product<false, true>(w, at.of(N), at.of(W_QKV + 2) + at.columns(), true);
                    product<false, false>(dx, at.of(K), at.of(W_O) + at.rows(), false);
                    products_commit();
                    products_wait<0>(q, k, w, dx);
                    pack_operand(queries, q[0], q[1]);
                    pack_operand(keys, k[0], k[1]);
                    pack_operand(values, w[0], w[1]);
                    pack_operand(d_merged, dx[0], dx[1]);
                }
                float p[2][4], y[2][4], delta[4];
                {
                    const float4 low = table[at.lane], high = table[32 + at.lane];
                    const float hidden0[4] = {low.x, low.y, low.z, low.w}, hidden1[4] = {high.x, high.y, high.z, high.w};
                    times_transposed(p, queries, keys, hidden0, hidden1);
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    p[i / 4][i % 4] = ps_exp2(fmaf(p[i / 4][i % 4], x.scale_log2e, -log_sum[i % 4 / 2]));
                }
                pack_operand(p_operand, p[0], p[1]);
                times(y, p_operand, values);
                pack_operand(a, y[0], y[1]);
                put(at.own() + (H + 3) * PANEL, a);
                /* sum_j A dA = sum over the head's columns of merged and its gradient */
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float sum = 0;
#pragma unroll
                    for (int t = 0; t < 2; t++) {
                        sum -= y[t][2 * r] * __uint_as_float(d_merged[2 * t + r] << 16);
                        sum -= y[t][2 * r + 1] * __uint_as_float(d_merged[2 * t + r] & 0xffff0000u);
                    }
                    delta[2 * r] = delta[2 * r + 1] = quad_sum(sum);
                }
                times_transposed(y, d_merged, values, delta, delta);
                transpose_operand(operand, p_operand);
                times(v, operand, d_merged); /* of values */
                pack_operand(a, v[0], v[1]);
                put(at.own() + (H + 2) * PANEL, a);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    y[i / 4][i % 4] *= p[i / 4][i % 4];
                }
                pack_operand(p_operand, y[0], y[1]);
                times(v, p_operand, keys); /* of queries */
                transpose_operand(operand, p_operand);
                times(y, operand, queries); /* of keys */
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    v[i / 4][i % 4] *= x.scale;
                    y[i / 4][i % 4] *= x.scale;
                }
                pack_operand(a, v[0], v[1]);
                put(at.own() + H * PANEL, a);
                pack_operand(a, y[0], y[1]);
                put(at.own() + (H + 1) * PANEL, a);
            }
            publish();
            products_begin(at, dx, c);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                product<false, false>(dx, at.of(H + i), at.of(W_QKV + i) + at.rows(), i > 0);
            }
            products_commit();
            const bool of_o = at.share == 3;
            product<true, true>(c, at.of(of_o ? H + 3 : N), at.of(of_o ? K : H + at.share), false);
            products_commit();
            products_wait<1>(dx);
            norm_sums(norms + UNITS * 2 * D, dx, xhat, at);
            normalise_backward<D, 1>(g, dx, own_vectors + LN1_GAMMA, xhat, rstd, statistics_at<D, 1>(statistics, 3, at), at);
            bias_sums(vector_sums() + B_QKV + at.share * 64, memory + (of_o ? K : H + at.share) * PANEL, first, at);
            products_wait<0>(c);
            put_sums(sums() + at.share * 64 * 64, c, first);
        }
        if (x.embed.partial) {
            uint32_t a[4];
            embed_operand<D, 1, DROP>(a, g, x, at);
            put(at.own() + G * PANEL, a);
            copy_wait<0>(); /* the patches */
            publish();
            embed_gradient_panels(x, at, at.of(M), at.of(G) + at.columns(), first);
            if (more) {
                __syncthreads();
            }
        } else {
            __syncthreads();
            store_rows<D, 1>(x.du, g, at);
        }
        put_norm_sums(x.partial + (int64_t)blockIdx.x * x.layers * wide_sums(F) + (4 + 2 * P) * 64 * 64 + LN1_GAMMA,
                      column_sums + UNITS * 2 * D, first);
        if (more) {
            at.take(x, (int64_t)(group + (int)gridDim.x) * UNITS + at.unit);
            fetch_rows(gradient, x.dy, at);
            fetch_rows(residual, x.r + (x.layers - 1) * x.rows * D, at);
        }
    }
}

/* ---- the sum over blocks ---- */

enum { SUM_THREADS = 256, SUM_ITEMS = 64, SUM_PARTS = SUM_THREADS / SUM_ITEMS, SUM_FLIGHT = 9 };

/* A block adds 64 float4 of a layer's partial sums over all blocks, in 4 parts and then those in order, and adds them to the
 * gradients. Grid (wide_sums / 256 rounded up, layers), and a row of blocks for the embedding. */
static __global__ void __launch_bounds__(SUM_THREADS) wide_sum(const __grid_constant__ struct small x)
{
    ps_grid_begin();
    __shared__ float4 parts[SUM_PARTS][SUM_ITEMS];
    const int thread = (int)threadIdx.x, part = thread / SUM_ITEMS, item = (int)blockIdx.x * SUM_ITEMS + thread % SUM_ITEMS;
    const int l = (int)blockIdx.y, size = wide_sums(x.f), panels = x.f / 64;
    if (l == x.layers) {
        add_embedding<D, SUM_THREADS>(x, parts[0], (int)blockIdx.x, (int)gridDim.x);
        return;
    }
    const int64_t stride = (int64_t)x.layers * (size / 4);
    const float4 *const from = (const float4 *)x.partial + (int64_t)l * (size / 4) + item;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int begin = part; item < size / 4 && begin < x.blocks; begin += SUM_PARTS * SUM_FLIGHT) {
        float4 v[SUM_FLIGHT];
#pragma unroll
        for (int i = 0; i < SUM_FLIGHT; i++) {
            const int b = begin + i * SUM_PARTS;
            v[i] = b < x.blocks ? __ldcs(from + b * stride) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < SUM_FLIGHT; i++) {
            sum.x += v[i].x;
            sum.y += v[i].y;
            sum.z += v[i].z;
            sum.w += v[i].w;
        }
    }
    parts[part][thread % SUM_ITEMS] = sum;
    __syncthreads();
    if (thread >= SUM_ITEMS || item >= size / 4) {
        return;
    }
    for (int i = 1; i < SUM_PARTS; i++) {
        const float4 v = parts[i][thread];
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
    }
    const int matrices = (4 + 2 * panels) * 1024;
    if (item < matrices) {
        const int job = item / 1024, t = item / 128 % 8, lane = item % 32;
        const int row = item / 32 % 4 * 16 + lane / 4, column = t * 8 + lane % 4 * 2;
        float *to = x.gradients + l * x.at.matrix_stride;
        int ld = D;
        if (job < 3) {
            to += x.at.w_qkv + job * D;
            ld = 3 * D;
        } else if (job == 3) {
            to += x.at.w_o;
        } else if (job < 4 + panels) {
            to += x.at.w_1 + (job - 4) * D;
            ld = x.f;
        } else {
            to += x.at.w_2 + (job - 4 - panels) * 64 * D;
        }
        float2 *const low = (float2 *)(to + row * ld + column), *const high = (float2 *)(to + (row + 8) * ld + column);
        const float2 a = *low, b = *high;
        *low = make_float2(a.x + sum.x, a.y + sum.y);
        *high = make_float2(b.x + sum.z, b.y + sum.w);
    } else {
        const int i = (item - matrices) * 4, part_of = i / D;
        float *const p = x.gradients + l * x.at.vector_stride;
        float4 *const to = (float4 *)(i < B_O         ? p + x.at.b_qkv + i
                                      : i < B_2       ? p + x.at.b_o + i - B_O
                                      : i < LN1_GAMMA ? p + x.at.b_2 + i - B_2
                                      : i < LN1_BETA  ? p + x.at.ln1_gamma + i - LN1_GAMMA
                                      : i < LN2_GAMMA ? p + x.at.ln1_beta + i - LN1_BETA
                                      : i < LN2_BETA  ? p + x.at.ln2_gamma + i - LN2_GAMMA
                                      : i < B_1       ? p + x.at.ln2_beta + i - LN2_BETA
                                                      : p + x.at.b_1 + i - B_1);
        const float scale = part_of == B_2 / D ? 1.0f / x.half_scale : 1.0f; /* G holds half_scale times the gradient */
        const float4 old = *to;
        *to = make_float4(old.x + sum.x * scale, old.y + sum.y * scale, old.z + sum.z * scale, old.w + sum.w * scale);
    }
}

/* ---- the host's side ---- */

bool ps_encoder_wide_serves(const struct ps_encoder_small *e, int shared)
{
    return e->d_model == D && e->n_heads == 4 && e->patches <= 16 && (e->d_ff == 128 || e->d_ff == 256) &&
           shared_bytes((int)e->d_ff, e->layers, true) <= (size_t)shared;
}

int ps_encoder_wide_blocks(int64_t units, int multiprocessors)
{
    const int64_t groups = (units + UNITS - 1) / UNITS, rounds = (groups + multiprocessors - 1) / multiprocessors;
    return (int)((groups + rounds - 1) / rounds);
}

int ps_encoder_wide_window_floats(void)
{
    return WINDOW_FLOATS;
}

size_t ps_encoder_wide_sums(const struct ps_encoder_small *e)
{
    return (size_t)e->layers * (size_t)wide_sums((int)e->d_ff) * sizeof(float);
}

typedef void wide_kernel(const struct small);

template <int P> static wide_kernel *kernel_of_panels(bool backward, bool drop, bool once)
{
    if (!backward) {
        return drop ? wide_forward<P, true> : wide_forward<P, false>;
    }
    if (once) {
        return drop ? wide_backward<P, true, true> : wide_backward<P, false, true>;
    }
    return drop ? wide_backward<P, true, false> : wide_backward<P, false, false>;
}

static wide_kernel *kernel_of(const struct small &x, bool backward)
{
    const bool drop = x.threshold != 0, once = (int64_t)x.blocks * UNITS >= x.units;
    return x.f == 128 ? kernel_of_panels<2>(backward, drop, once) : kernel_of_panels<4>(backward, drop, once);
}

static enum ps_status launch(wide_kernel *kernel, dim3 grid, int threads, size_t shared, const struct small &x, cudaStream_t stream,
                             const char *what)
{
    if (shared > 48 * 1024) {
        PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                             what));
    }
    kernel<<<grid, (unsigned)threads, shared, stream>>>(x);
    return ps_cuda_check(cudaGetLastError(), what);
}

bool ps_encoder_wide_heads(const struct ps_encoder_small *e, int blocks, int shared)
{
    const int64_t sequences = 16 / e->patches, units = (e->sequences + sequences - 1) / sequences;
    return e->pred_len <= WIDE_HORIZON && (int64_t)blocks * UNITS >= units &&
           shared_bytes((int)e->d_ff, e->layers, false) + wide_head_bytes((int)e->patches, (int)e->pred_len) <= (size_t)shared;
}

enum ps_status ps_encoder_wide_forward(struct small x, cudaStream_t stream)
{
    const size_t bytes = shared_bytes(x.f, x.layers, false);
    x.head.at = (int)bytes;
    return launch(kernel_of(x, false), dim3((unsigned)x.blocks), THREADS,
                  bytes + (x.head.weight ? wide_head_bytes(x.n, x.head.horizon) : 0), x, stream, "encoder forward");
}

enum ps_status ps_encoder_wide_backward(const struct small &x, cudaStream_t stream)
{
    PS_TRY(launch(kernel_of(x, true), dim3((unsigned)x.blocks), THREADS, shared_bytes(x.f, x.layers, true), x, stream,
                  "encoder backward"));
    const unsigned pieces = ((unsigned)wide_sums(x.f) / 4 + SUM_ITEMS - 1) / SUM_ITEMS;
    return launch(wide_sum, dim3(pieces, (unsigned)(x.layers + (x.embed.partial ? 1 : 0))), SUM_THREADS, 0, x, stream,
                  "encoder weight gradients");
}
