/* The whole encoder of a small model with d_model 16, heads of 4 columns, d_ff 128 and 33 <= N <= 48, forward and backward: what
 * encoder/resident/resident.cu does with fewer instructions, which are what bounds it. Equations: docs/design.md section 3.
 *
 * A warp owns 16 rows of the residual stream, in registers (fp32); a unit is a sequence in 3 tiles; a block works on up to 7 units
 * at once, with every layer's weights in shared memory.
 *
 * Columns of d_ff lie permuted in shared memory, so that a lane's columns of 4 tiles are 8 that follow one another: those of one
 * Philox block, whose words are then masks of its registers. Position 8 t + n of a group of 32 is column 8 (n / 2) + 2 t + n % 2.
 * q is scaled by log2(e) / sqrt(e) when it is made; softmax is taken without its row's largest score, and again with it by a warp
 * that has found a sum out of range. A score's product with the other head of its 8 columns is zero in q; what both heads of a pair
 * add up is told apart by lanes: q / 2 (place) is the head of the pair.
 *
 * Matrices that warps of a unit share lie in shared memory as 8 x 8 matrices of 128 bytes: no padding, no bank conflicts, and an
 * operand of wgmma.
 *
 * Forward keeps, a tile and layer, in the order of the registers: xhat of both LayerNorms and merged (real16), rstd, the logarithms
 * of softmax's sums, and dropout's bits. 21 warps are 6 on one scheduler and 5 on the others: backward has 3 more, which draw the
 * masks of the next step. Forward finds them by their tag, which names all that they depend on, and draws them itself where it is
 * another: the bits are the same. Before the kernel before has ended it fetches the windows and targets of the step that the
 * forward before expected next, and checks that afterwards.
 *
 * Weight gradients are wgmma over the block's rows, of 64 columns at a time by a warpgroup each, biases a column of ones beside. A
 * block's sums go to memory in encoder/resident/resident.cu's order, and its kernel adds the blocks. With dropout the warps that
 * draw have added most of them by then: each block a slice of what all have finished, a layer's feed-forward or attention at a
 * time, but for the attention of the first layer.
 *
 * Counts, etth1 (3 layers, S 896; 128 blocks of 21 warps): a tile and layer take 96 exponentials, 64 tanh and 88 products m16n8k16
 * and m16n8k8 a lane forward, about 1,250 instructions a warp; backward the same exponentials and tanh, 146 products, about 2,500
 * instructions. Forward writes 16.5 MB of rows; 3.1 MB of masks are read twice and written once; partial gradients 8.2 MB are
 * written, all but 0.6 MB of them read again by backward itself. */
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/encoder/head.cuh"

namespace PS_REAL16_SPACE
{

enum { D = 16, F = 128, NT = 3, THREADS = 672, DRAWING = 96, MATRIX = 128 };

typedef place<D, NT> narrow_place;
enum { LD = D + 8, LD_QKV = 3 * D + 8, LD_F = F + 8 }; /* rows of 16 bytes more: 8 rows of 16 bytes lie in all banks */

/* One layer's parameters. Biases: each two of them twice, as an accumulator has them; all follow one another. */
struct narrow_weights {
    real16 w_qkv[D * LD_QKV], w_o[D * LD], w_1[D * LD_F], w_2[F * LD];
    float4 b_qkv[3 * D / 2], b_o[D / 2], b_2[D / 2], b_1[F / 2];
    float ln1_gamma[D], ln1_beta[D], ln2_gamma[D], ln2_beta[D];
};
enum { LAYER_BYTES = sizeof(narrow_weights) };

/* ---- what is kept: rows of each layer and tile, masks of two steps, their tags ---- */

/* Of a layer and tile, 16 bytes a lane each. */
enum {
    KEPT_XHAT1 = 0,
    KEPT_XHAT2 = 512,
    KEPT_MERGED = 1024,
    KEPT_ROWS = 1536, /* lanes q 0 and 2: log2 of sums, [pair][row g, g + 8] of the head q / 2 of each pair; q 1: rstd [LN][row] */
    KEPT_BYTES = 2048
};

static __device__ __forceinline__ char *kept_at(const struct small &x, int layer, const narrow_place &at)
{
    return (char *)x.masks + ((int64_t)layer * x.kept_tiles + at.global_tile) * KEPT_BYTES;
}

/* Three words a lane: columns 0 .. 63 of d_ff: bit t + 4h + 8 (group of 32) + 16i of position 8t + 2q + i, row g + 8h; 64 .. 127;
 * and those after W_o, element (g + 8h, 8t + 2q + i) in bit 8h + 4t + 16i, and after W_2, one bit further. */
enum { MASKS_BYTES = 3 * 128 };

static __device__ __forceinline__ uint32_t *masks_at(const struct small &x, uint64_t step, int layer, int64_t tile, int lane)
{
    char *const p = (char *)x.masks + x.layers * x.kept_tiles * KEPT_BYTES;
    return (uint32_t *)(p + (((int64_t)(step & 1) * x.layers + layer) * x.kept_tiles + tile) * MASKS_BYTES) + lane;
}

/* What masks depend on: says of a block's in memory whose they are. */
struct tag {
    uint64_t step, seed, draws, tiles;
};

static __host__ __device__ constexpr int64_t tags_of(int64_t tiles)
{
    return tiles / (NARROW_LEAST_UNITS * NT) + 1;
}

static __device__ __forceinline__ struct tag *tag_at(const struct small &x, uint64_t step)
{
    char *const p = (char *)x.masks + x.layers * x.kept_tiles * (KEPT_BYTES + 2 * MASKS_BYTES);
    return (struct tag *)p + (int64_t)(step & 1) * tags_of(x.kept_tiles) + blockIdx.x;
}

static __device__ __forceinline__ struct tag tag_of(const struct small &x, uint64_t step)
{
    return {step + 1, (uint64_t)x.key[0][1] << 32 | x.key[0][0], (uint64_t)x.site << 32 | x.below,
            (uint64_t)x.n << 32 | x.block_units};
}

/* The step and place in the order of windows that a forward expects of the next one. */
struct ahead {
    uint64_t step, cursor;
};

static __device__ __forceinline__ struct ahead *ahead_at(const struct small &x)
{
    char *const p = (char *)x.masks + x.layers * x.kept_tiles * (KEPT_BYTES + 2 * MASKS_BYTES);
    return (struct ahead *)(p + 2 * tags_of(x.kept_tiles) * sizeof(struct tag));
}

/* Draws the masks of a layer's tile whose row g is `first`. */
static __device__ __forceinline__ void draw_tile(uint32_t (&words)[3], const struct small &x, uint64_t step, int layer,
                                                 uint32_t first, int q)
{
    const struct philox_site hidden = philox_site_at(x, step, x.site + 3 * layer + 1);
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int part = i / 2, h = i % 2;
            uint32_t drawn[4];
            philox_draw(drawn, x, hidden, (first + 8 * h) * (F / 8) + half * 8 + part * 4 + q);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                bits += ps_kept2(drawn[t], x.below, x.minus_below) << (t + 4 * h + 8 * part);
            }
        }
        words[0] = half ? words[0] : bits;
        words[1] = bits;
    }
    const uint32_t block = (first + q / 2 * 8) * (D / 8) + q % 2;
    const uint32_t o = draw_masks(x, step, x.site + 3 * layer, block, q) >> q;
    const uint32_t y = draw_masks(x, step, x.site + 3 * layer + 2, block, q) >> q;
    words[2] = (o & 0x11111111u) | (y & 0x11111111u) << 1;
}

/* ---- shared memory ---- */

static __device__ __forceinline__ int column_of(int position)
{
    return (position & ~31) + (position & 6) * 4 + (position >> 2 & 6) + (position & 1);
}

/* Begins to copy the parameters of layers first .. end - 1 (ps_copy_wait); d_ff's columns to their positions. */
static __device__ __forceinline__ void stage_weights(const struct small &x, narrow_weights *to, int first, int end)
{
    enum { OF_1 = 256, OF_2 = 512, OF_QKV = 608, OF_O = 640, OF_BIAS = 744, PIECES = 768 }; /* whole warps, but for the last two */
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < (end - first) * PIECES; i += (int)blockDim.x) {
        const int l = i / PIECES, piece = i - l * PIECES;
        narrow_weights &w = to[first + l];
        const real16 *const matrices = x.weights + (first + l) * x.at.matrix_stride;
        const float *const vectors = x.parameters + (first + l) * x.at.vector_stride;
        if (piece < OF_1) { /* W_1: 8 columns of a row */
            const int row = piece / 16, of = piece % 16;
            const real16 *const from = matrices + x.at.w_1 + row * F + of * 8;
            real16 *const p = w.w_1 + row * LD_F + of / 4 * 32 + of % 4 * 2;
#pragma unroll
            for (int t = 0; t < 4; t++) {
                ps_copy_async4(p + t * 8, from + t * 2);
            }
        } else if (piece < OF_2) { /* W_2: half a row */
            const int row = (piece - OF_1) / 2, far = piece % 2 * 8;
            ps_copy_async(w.w_2 + row * LD + far, matrices + x.at.w_2 + column_of(row) * D + far);
        } else if (piece < OF_QKV) { /* W_qkv: 8 columns of a row */
            const int row = (piece - OF_2) / 6, column = (piece - OF_2 - row * 6) * 8;
            ps_copy_async(w.w_qkv + row * LD_QKV + column, matrices + x.at.w_qkv + row * 3 * D + column);
        } else if (piece < OF_O) {
            const int row = (piece - OF_QKV) / 2, column = piece % 2 * 8;
            ps_copy_async(w.w_o + row * LD + column, matrices + x.at.w_o + row * D + column);
        } else if (piece < OF_BIAS) { /* two columns */
            const int item = piece - OF_O;
            const float *const from = vectors + (item < 24   ? x.at.b_qkv + item * 2
                                                 : item < 32 ? x.at.b_o + (item - 24) * 2
                                                 : item < 40 ? x.at.b_2 + (item - 32) * 2
                                                             : x.at.b_1 + column_of((item - 40) * 2));
            float *const pair = (float *)(w.b_qkv + item); /* and those that follow */
            ps_copy_async8(pair, from);
            ps_copy_async8(pair + 2, from);
        } else if (piece < OF_BIAS + 16) { /* LayerNorms: 4 columns */
            const int item = piece - OF_BIAS, which = item / 4;
            ps_copy_async(w.ln1_gamma + item * 4, vectors + item % 4 * 4 +
                                                      (which == 0   ? x.at.ln1_gamma
                                                       : which == 1 ? x.at.ln1_beta
                                                       : which == 2 ? x.at.ln2_gamma
                                                                    : x.at.ln2_beta));
        }
    }
}

/* 0xffff in each half whose bit `bit` (of 0 .. 15) is set: a byte's highest bit is spread. */
static __device__ __forceinline__ uint32_t spread(uint32_t bits, int bit)
{
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(bits << (7 - bit % 8)), "r"(bit < 8 ? 0xaa88 : 0xbb99));
    return mask;
}

/* ---- products ---- */

/* c = the biases of a tile's columns. */
static __device__ __forceinline__ void set_bias(float (&c)[4], const float4 *bias, int q)
{
    const float4 v = bias[q];
    c[0] = v.x, c[1] = v.y, c[2] = v.z, c[3] = v.w;
}

/* c = a w + bias, w [16, 16 columns]. */
static __device__ __forceinline__ void project16(float (&c)[2][4], const uint32_t (&a)[4], const real16 *w, int ld,
                                                 const float4 *bias, const narrow_place &at)
{
    uint32_t b[4];
    set_bias(c[0], bias, at.q);
    set_bias(c[1], bias + 4, at.q);
    ps_ldmatrix4_transposed(b, w + at.near * ld + at.far);
    ps_mma16(c[0], a, b[0], b[1], c[0]);
    ps_mma16(c[1], a, b[2], b[3], c[1]);
}

/* Operands from 6 matrices, `stride` bytes apart, of 48 rows by 8 columns; p is the lane's place in the first. */
static __device__ __forceinline__ void load_rows48(uint32_t (&r)[6], uint32_t p, int stride)
{
    uint32_t low[4], high[2];
    ps_ldmatrix4_at(low, p);
    ps_ldmatrix2_at(high, p + 4 * stride);
    r[0] = low[0], r[1] = low[1], r[2] = low[2], r[3] = low[3], r[4] = high[0], r[5] = high[1];
}

static __device__ __forceinline__ void load_rows48_transposed(uint32_t (&r)[6], uint32_t p, int stride)
{
    uint32_t low[4], high[2];
    ps_ldmatrix4_transposed_at(low, p);
    ps_ldmatrix2_transposed_at(high, p + 4 * stride);
    r[0] = low[0], r[1] = low[1], r[2] = low[2], r[3] = low[3], r[4] = high[0], r[5] = high[1];
}

/* ---- forward ---- */

/* K and V of a unit: 6 x 8 rows by 4 matrices: columns of the first pair of heads and of the second, of K and of V. */
enum { KV_ROW = 4 * MATRIX, KV_BYTES = 6 * KV_ROW };

/* o = sum over keys of exp2(s) v, sum = that of exp2(s), most = what was taken off s: 0 unless MOST. */
template <bool MOST>
static __device__ __forceinline__ void attend(float (&o)[4], float (&sum)[4], float (&most)[2], uint32_t a0, uint32_t a1,
                                              const uint32_t (&keys)[6], const uint32_t (&values)[6], uint32_t last0,
                                              uint32_t last1, int n, const narrow_place &at)
{
    float s[6][4], zero[4] = {0, 0, 0, 0};
#pragma unroll
    for (int t = 0; t < 6; t++) {
        ps_mma8(s[t], a0, a1, keys[t], zero);
    }
    most[0] = most[1] = 0;
    if constexpr (MOST) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = -INFINITY;
#pragma unroll
            for (int i = 0; i < 12; i++) {
                const int column = i / 2 * 8 + at.q * 2 + i % 2;
                float &v = s[i / 2][2 * r + i % 2];
                v = column < n ? v : -INFINITY;
                most[r] = fmaxf(most[r], v);
            }
            most[r] = quad_max(most[r]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        o[i] = sum[i] = 0;
    }
#pragma unroll
    for (int j = 0; j < 3; j++) {
        uint32_t a[4];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float &v = s[2 * j + k / 4][k % 4];
            v = ps_exp2(MOST ? v - most[k % 4 / 2] : v);
        }
        pack_operand(a, s[2 * j], s[2 * j + 1]);
        ps_mma16(o, a, values[2 * j], values[2 * j + 1], o);
        ps_mma16(sum, a, j == 2 ? last0 : PS_REAL16_ONES, j == 2 ? last1 : PS_REAL16_ONES, sum);
    }
}

/* u += scale x where kept; bit 8h + 4t + 16i of bits is element (g + 8h, 8t + 2q + i). */
static __device__ __forceinline__ void add_where(float (&u)[2][4], const float (&x)[2][4], uint32_t bits, float scale)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (bits & 1u << (i % 4 / 2 * 8 + i % 2 * 16 + i / 4 * 4)) {
            u[i / 4][i % 4] = fmaf(x[i / 4][i % 4], scale, u[i / 4][i % 4]);
        }
    }
}

/* The first values of a unit's window, EARLY a thread, and its thread's target, on their way; known: they exist. */
enum { EARLY = 4 };

struct early {
    float window[EARLY], target;
    bool known, target_known;
};

static __device__ __forceinline__ void fetch_early(struct early &v, const struct small &x, int64_t u, uint64_t cursor,
                                                   const narrow_place &at)
{
    const struct ps_cuda_windows &w = x.embed.windows, &t = x.head.targets;
    const int thread = at.tile * 32 + at.lane;
    const float *const from = window_at(x, w, cursor, (uint32_t)u);
    const float *const target = x.head.weight ? window_at(x, t, cursor, (uint32_t)u) : NULL;
    v.known = from;
    v.target_known = target && thread < x.head.horizon;
#pragma unroll
    for (int j = 0; j < EARLY; j++) {
        const int i = thread + j * (NT * 32);
        v.window[j] = *(from && i < x.embed.length ? from + i * w.by_time : w.data);
    }
    v.target = *(v.target_known ? target + thread * t.by_time : w.data);
}

/* Those, and what is left of the window, to `values`. */
static __device__ __forceinline__ void put_window(float *values, const struct early &v, const struct small &x, int64_t u,
                                                  uint64_t cursor, const narrow_place &at)
{
    const struct ps_cuda_windows &w = x.embed.windows;
    const int thread = at.tile * 32 + at.lane, length = x.embed.length;
#pragma unroll
    for (int j = 0; j < EARLY; j++) {
        if (thread + j * (NT * 32) < length) {
            values[thread + j * (NT * 32)] = v.known ? v.window[j] : NAN;
        }
    }
    if (length > EARLY * NT * 32) {
        const float *const from = window_at(x, w, cursor, (uint32_t)u);
#pragma unroll 1
        for (int i = EARLY * NT * 32 + thread; i < length; i += NT * 32) {
            values[i] = from ? from[i * w.by_time] : NAN;
        }
    }
}

/* The warp's place, found anew: what follows from it would fill the registers, and spills leave the multiprocessor, most of whose
 * first cache is shared memory. */
static __device__ __forceinline__ narrow_place place_again(const struct small &x)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    narrow_place at(thread);
    at.take(x, (int64_t)blockIdx.x * x.block_units + at.unit);
    return at;
}

template <bool DROP> static __global__ void __launch_bounds__(THREADS) narrow_forward(const __grid_constant__ struct small x)
{
    extern __shared__ uint4 shared_memory[];
    __shared__ uint64_t staged_barrier;
    const uint32_t staged = ps_shared_address(&staged_barrier);
    char *const weights = (char *)shared_memory;
    narrow_place at;
    const int64_t own_unit = (int64_t)blockIdx.x * x.block_units + at.unit;
    at.take(x, own_unit);
    float *const values = (float *)(weights + x.layers * LAYER_BYTES + at.unit * 2 * KV_BYTES);
    struct ahead now = {0, 0};
    struct early early = {};
    const bool expects = x.embed.weight && x.masks;
    if (expects) {
        now = *ahead_at(x);
    }
    int sequence[2], patch[2];
    float u[2][4], mean = 0, deviation = 1;
    uint32_t embed_weight[2][2], patches[4], embed_bits = 0xffffffffu;
    uint64_t step = 0;
    embed_places<D, NT>(sequence, patch, x, at);
    /* Round 0: windows and draws of the step that is expected, before the kernel before has ended: no kernel writes what they
     * depend on. Round 1: all else, and windows and draws if they are others. */
#pragma unroll 1
    for (int round = expects ? 0 : 1;; round++) {
        if (round == 1) {
            ps_grid_begin();
            if (x.embed.weight) {
                load_embed_sum<D, NT>(u, patch, x, at);
                load_embed_weight<D, NT>(embed_weight, x, 0, at);
            }
            const struct ahead found = {DROP ? x.state->step : 0, x.embed.weight ? x.embed.state->cursor : 0};
            stage_weights(x, (narrow_weights *)weights, 0, 1);
            if (threadIdx.x == 0) {
                ps_mbarrier_init(staged, (int)blockDim.x);
            }
            step = found.step;
            if (!x.embed.weight || (expects && found.step == now.step && found.cursor == now.cursor)) {
                break;
            }
            now = found;
        }
        fetch_early(early, x, own_unit, now.cursor, at);
        if constexpr (DROP) {
            embed_bits = draw_masks(x, now.step, x.embed.site, ((uint32_t)at.first + at.q / 2 * 8) * (D / 8) + at.q % 2, at.q);
        }
        put_window(values, early, x, own_unit, now.cursor, at);
        at.sync();
        if (x.embed.revin) {
            ps_window_statistics<12, true>(values, x.embed.length, x.embed.epsilon, mean, deviation);
        }
        const float centre[2] = {mean, mean}, factor[2] = {1.0f / deviation, 1.0f / deviation};
        patch_operand<D, NT>(patches, 0, values, sequence, patch, centre, factor, x, at);
        if (round == 1) {
            break;
        }
        at.sync(); /* the values may be others yet */
    }
    bool drawn = false; /* by the backward of the step before */
    if (DROP && x.masks) {
        const struct tag found = *tag_at(x, step), own = tag_of(x, step);
        drawn = found.step == own.step && found.seed == own.seed && found.draws == own.draws && found.tiles == own.tiles;
    }
    if (x.embed.weight) {
        uint32_t rows[4];
        if (DROP && x.embed.masks && at.q == 0 && at.global_tile < x.units * NT) {
            *embed_masks_at<D, NT>(x, at) = embed_bits;
        }
        if (at.lane == 0 && at.tile == 0 && own_unit < x.units) {
            x.embed.mean[own_unit] = mean;
            x.embed.std[own_unit] = deviation;
        }
        const float centre[2] = {mean, mean}, factor[2] = {1.0f / deviation, 1.0f / deviation};
        embed_product<D, NT, DROP>(rows, patches, u, embed_weight, embed_bits >> at.q, values, sequence, patch, centre, factor, x,
                                   at);
        unpack_operand(u, rows);
    } else {
        load_rows<D, NT>(u, x.u, at);
    }
    ps_copy_wait();
    __syncthreads();
    if (x.layers > 1) { /* the other layers' while the first is worked on */
        stage_weights(x, (narrow_weights *)weights, 1, x.layers);
        ps_mbarrier_arrive_copied(staged);
    }
    if (x.head.weight) { /* behind all layers' work */
        stage_head<D, NT>(x, (real16 *)(weights + x.head.at), early.target_known ? early.target : NAN);
    }
#pragma unroll 1
    for (int l = 0; l < x.layers; l++) {
        const narrow_weights &w = ((const narrow_weights *)weights)[l];
        const narrow_place at = place_again(x);
        if (l == 1) {
            ps_mbarrier_wait(staged, 0);
        }
        char *const keep = x.masks ? kept_at(x, l, at) + at.lane * 16 : NULL;
        /* The lane's place in the unit's matrices: of operands of all rows, and of its own tile's. */
        const uint32_t kv = ps_shared_address(weights + x.layers * LAYER_BYTES) + (uint32_t)(at.unit * 2 * KV_BYTES);
        const uint32_t all_rows = kv + (uint32_t)(at.lane / 8 * KV_ROW + at.lane % 8 * 16);
        const uint32_t own_rows =
            kv + (uint32_t)(at.tile * 2 * KV_ROW + at.lane / 8 % 2 * KV_ROW + at.lane / 16 * MATRIX + at.lane % 8 * 16);
        const bool low = at.q < 2; /* the first head of a pair */
        /* Ones where keys 32 .. 47 exist: the operand that adds up the last probabilities. */
        const int last_keys = x.n - 32 - at.q * 2;
        const uint32_t last0 = (last_keys > 0 ? PS_REAL16_ONE : 0u) | (last_keys > 1 ? PS_REAL16_ONE << 16 : 0u);
        const uint32_t last1 = (last_keys > 8 ? PS_REAL16_ONE : 0u) | (last_keys > 9 ? PS_REAL16_ONE << 16 : 0u);
        const uint32_t here0 = at.here[0] ? 0xffffffffu : 0u, here1 = at.here[1] ? 0xffffffffu : 0u;
        const uint32_t buffer = (uint32_t)(l % 2 * KV_BYTES);
        uint32_t a[4], q[4], words[3] = {0, 0, 0xffffffffu};
        float rstd[2], xhat[2][4], c[2][4];
        if constexpr (DROP) {
            uint32_t *const masks = masks_at(x, step, l, at.global_tile, at.lane);
            if (drawn) {
                words[0] = masks[0], words[1] = masks[32], words[2] = masks[64];
            } else {
                draw_tile(words, x, step, l, (uint32_t)at.first, at.q);
                if (keep) {
                    masks[0] = words[0], masks[32] = words[1], masks[64] = words[2];
                }
            }
        }
        normalise<D, NT>(xhat, rstd, u, x.epsilon, NULL, at);
        scale_shift(a, xhat, w.ln1_gamma, w.ln1_beta, at.q);
        project16(c, a, w.w_qkv, LD_QKV, w.b_qkv, at);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            c[i / 4][i % 4] *= x.scale_log2e;
        }
        pack_operand(q, c[0], c[1]);
        {
            uint32_t packed[4];
            project16(c, a, w.w_qkv + D, LD_QKV, w.b_qkv + D / 2, at);
            pack_operand(packed, c[0], c[1]);
            ps_stmatrix4_at(own_rows + buffer, packed);
            project16(c, a, w.w_qkv + 2 * D, LD_QKV, w.b_qkv + D, at);
            pack_operand(packed, c[0], c[1]);
            packed[0] &= here0, packed[1] &= here1, packed[2] &= here0, packed[3] &= here1;
            ps_stmatrix4_at(own_rows + buffer + 2 * MATRIX, packed);
        }
        if (keep) {
            uint32_t packed[4];
            pack_operand(packed, xhat[0], xhat[1]);
            *(uint4 *)(keep + KEPT_XHAT1) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            if (at.q == 1) {
                *(float2 *)(keep + KEPT_ROWS) = make_float2(rstd[0], rstd[1]);
            }
        }
        at.sync(); /* twice as many buffers: the layer before the last has been read */

        /* merged = softmax(q k' / sqrt(e)) v */
        float lse[4];
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint32_t keys[6], values[6];
            float o[4], sum[2], most[2] = {0, 0}, first_o[4], first_sum[4], second_o[4], second_sum[4], none[2];
            load_rows48(keys, all_rows + buffer + p * MATRIX, KV_ROW);
            load_rows48_transposed(values, all_rows + buffer + (2 + p) * MATRIX, KV_ROW);
            const uint32_t q0 = q[2 * p], q1 = q[2 * p + 1];
            attend<false>(first_o, first_sum, none, low ? q0 : 0, low ? q1 : 0, keys, values, last0, last1, x.n, at);
            attend<false>(second_o, second_sum, none, low ? 0 : q0, low ? 0 : q1, keys, values, last0, last1, x.n, at);
            sum[0] = low ? first_sum[0] : second_sum[0];
            sum[1] = low ? first_sum[2] : second_sum[2];
            const bool fine = ps_sums_hold(fminf(sum[0], sum[1]), fmaxf(sum[0], sum[1]));
            if (!__all_sync(0xffffffffu, fine)) {
                float second_most[2];
                attend<true>(first_o, first_sum, most, low ? q0 : 0, low ? q1 : 0, keys, values, last0, last1, x.n, at);
                attend<true>(second_o, second_sum, second_most, low ? 0 : q0, low ? 0 : q1, keys, values, last0, last1, x.n, at);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    sum[r] = low ? first_sum[2 * r] : second_sum[2 * r];
                    most[r] = low ? most[r] : second_most[r];
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                o[i] = (low ? first_o[i] : second_o[i]) * __fdividef(1.0f, sum[i / 2]);
            }
            a[2 * p] = ps_pack(o[0], o[1]);
            a[2 * p + 1] = ps_pack(o[2], o[3]);
            lse[2 * p] = most[0] + ps_log2(sum[0]);
            lse[2 * p + 1] = most[1] + ps_log2(sum[1]);
        }

        const narrow_place again = place_again(x);
        /* u = r = u + drop(merged W_o + b_o) */
        project16(c, a, w.w_o, LD, w.b_o, again);
        add_where(u, c, words[2], x.drop_scale);

        /* u = r + drop(drop(gelu(LN2(r) W_1 + b_1)) W_2 + b_2) */
        normalise<D, NT>(xhat, rstd, u, x.epsilon, NULL, again);
        if (x.masks) {
            char *const keep = kept_at(x, l, again) + again.lane * 16;
            uint32_t packed[4];
            *(uint4 *)(keep + KEPT_MERGED) = make_uint4(a[0], a[1], a[2], a[3]);
            pack_operand(packed, xhat[0], xhat[1]);
            *(uint4 *)(keep + KEPT_XHAT2) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            if (again.q == 1) {
                *(float2 *)(keep + KEPT_ROWS + 8) = make_float2(rstd[0], rstd[1]);
            }
            if (again.q % 2 == 0) {
                *(float4 *)(keep + KEPT_ROWS) = make_float4(lse[0], lse[1], lse[2], lse[3]);
            }
        }
        scale_shift(a, xhat, w.ln2_gamma, w.ln2_beta, again.q);
        clear(c);
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            const uint32_t bits = half ? words[1] : words[0];
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const int column = half * 64 + part * 32;
                float z[4][4];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    uint32_t b[4];
                    set_bias(z[2 * j], w.b_1 + column / 2 + j * 8, again.q);
                    set_bias(z[2 * j + 1], w.b_1 + column / 2 + j * 8 + 4, again.q);
                    ps_ldmatrix4_transposed(b, w.w_1 + column + j * 16 + again.near * LD_F + again.far);
                    ps_mma16(z[2 * j], a, b[0], b[1], z[2 * j]);
                    ps_mma16(z[2 * j + 1], a, b[2], b[3], z[2 * j + 1]);
                }
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    float &v = z[i / 4][i % 4];
                    v = fmaf(v, ps_tanh(v * fmaf(v * v, GELU_B, GELU_A)), v);
                }
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    uint32_t hidden[4], b[4];
                    pack_operand(hidden, z[2 * j], z[2 * j + 1]);
                    if constexpr (DROP) {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            hidden[i] &= spread(bits, 2 * j + i / 2 + i % 2 * 4 + part * 8);
                        }
                    }
                    ps_ldmatrix4_transposed(b, w.w_2 + (column + j * 16 + again.near) * LD + again.far);
                    ps_mma16(c[0], hidden, b[0], b[1], c[0]);
                    ps_mma16(c[1], hidden, b[2], b[3], c[1]);
                }
            }
        }
        set_bias(xhat[0], w.b_2, again.q);
        set_bias(xhat[1], w.b_2 + 4, again.q);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            c[i / 4][i % 4] = fmaf(c[i / 4][i % 4], x.half_scale, xhat[i / 4][i % 4]);
        }
        add_where(u, c, words[2] >> 1, x.drop_scale);
    }
    if (DROP && x.masks && !drawn && threadIdx.x == 0) {
        *tag_at(x, step) = tag_of(x, step);
    }
    if (x.embed.weight && x.masks && blockIdx.x == 0 && threadIdx.x == 0) {
        *ahead_at(x) = {DROP ? step + 1 : 0, x.embed.state->cursor + x.embed.all / x.embed.by_channels.divisor};
    }
    store_rows<D, NT>(x.u + x.layers * x.rows * D, u, at);
    if (x.head.weight) {
        head_narrow<D, NT>(u, x, (real16 *)(weights + x.layers * LAYER_BYTES), (const real16 *)(weights + x.head.at),
                           (int64_t)blockIdx.x * x.block_units);
    }
}

/* ---- backward ---- */

/* A unit's matrices, 6 rows of so many:
 * COLUMNS: q, k, v and the gradient of merged, two each (a pair of heads each); then the gradients of q, k, v and of W_o's output.
 * ROWS: xhat of LN1, ones, merged. NORMED: xhat of LN2, ones, the gradient of W_2's output.
 * STAGED: 64 columns of d_ff and of their gradient. In its place, at its end, a head's probabilities and their gradient, 6 matrices
 * each; before those the gradient of W_o's output, and, in the first layer, from NORMED on, the embedding's operands. */
enum {
    COLUMNS_ROW = 8 * MATRIX,
    ROWS_ROW = 5 * MATRIX,
    STAGED_ROW = 16 * MATRIX,
    SCORES_ROW = 6 * MATRIX,
    TO_ROWS = 6 * COLUMNS_ROW,
    TO_NORMED = TO_ROWS + 6 * ROWS_ROW,
    TO_STAGED = TO_NORMED + 6 * ROWS_ROW,
    UNIT_BYTES = TO_STAGED + 6 * STAGED_ROW,
    TO_SCORES = UNIT_BYTES - 12 * SCORES_ROW,
    TO_GRADIENTS = 6 * SCORES_ROW /* from SCORES: of the scores */
};

/* d += a' b, 16 rows deep, 64 columns of a; both lie as matrices, a row of which is `row` bytes. */
static __device__ __forceinline__ uint64_t operand(uint32_t address, int row)
{
    return (uint64_t)(MATRIX / 16) << 32 | (uint32_t)(row / 16) << 16 | (address >> 4 & 0x3fff);
}

static __device__ __forceinline__ void rows_product(float (&d)[2][4], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 1, 1;"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                   "+f"(d[1][3])
                 : "l"(a), "l"(b));
}

static __device__ __forceinline__ void rows_product(float (&d)[3][4], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n24k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, %12, "
                 "%13, 1, 1, 1, 1, 1;"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                   "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
                 : "l"(a), "l"(b));
}

static __device__ __forceinline__ void rows_product(float (&d)[5][4], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n40k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
                 "%14, %15, %16, %17, %18, %19}, %20, %21, 1, 1, 1, 1, 1;"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                   "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
                   "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])
                 : "l"(a), "l"(b));
}

/* The compiler holds them in their registers here. */
template <int TILES> static __device__ __forceinline__ void settle(float (&d)[TILES][4])
{
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        asm volatile("" : "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])::"memory");
    }
}

/* d = a' b over the rows of the block's units; a and b are addresses of the first unit's. */
template <int TILES>
static __device__ __forceinline__ void block_product(float (&d)[TILES][4], uint32_t a, int a_row, uint32_t b, int b_row, int units)
{
    uint64_t from = operand(a, a_row), by = operand(b, b_row);
    clear(d);
    settle(d);
    ps_wgmma_begin();
#pragma unroll 1
    for (int unit = 0; unit < units; unit++) {
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
            rows_product(d, from + (uint32_t)(tile * 2 * a_row / 16), by + (uint32_t)(tile * 2 * b_row / 16));
        }
        from += UNIT_BYTES / 16;
        by += UNIT_BYTES / 16;
    }
    ps_wgmma_commit();
    ps_wgmma_wait<0>();
    settle(d);
}

/* The threads' stores to shared memory are seen by all of them, wgmma too. */
static __device__ __forceinline__ void publish(int threads)
{
    ps_publish();
    ps_barrier(0, threads);
}

/* 16 columns of rows `row` and `other` of a layer's sums. */
static __device__ __forceinline__ void put_sums(float *sums, int row, int other, const float (&low)[4], const float (&high)[4],
                                                int q)
{
    float *const p = sums + row * D + q * 2, *const o = sums + other * D + q * 2;
    *(float2 *)p = make_float2(low[0], low[1]);
    *(float2 *)(p + 8) = make_float2(high[0], high[1]);
    *(float2 *)o = make_float2(low[2], low[3]);
    *(float2 *)(o + 8) = make_float2(high[2], high[3]);
}

/* The operand gamma xhat + beta of xhat as it is kept. */
static __device__ __forceinline__ void scale_shift_kept(uint32_t (&a)[4], const uint32_t (&xhat)[4], const float *gamma,
                                                        const float *beta, int q)
{
    float v[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i / 2][i % 2 * 2] = ps_low(xhat[i]);
        v[i / 2][i % 2 * 2 + 1] = ps_high(xhat[i]);
    }
    scale_shift(a, v, gamma, beta, q);
}

/* The operand scale g, zero where dropped: bit 8h + 4t + 16i, moved up by `shift`. */
template <bool DROP>
static __device__ __forceinline__ void branch_operand(uint32_t (&a)[4], const float (&g)[2][4], float scale, uint32_t bits,
                                                      int shift)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = ps_pack(g[i / 2][i % 2 * 2] * scale, g[i / 2][i % 2 * 2 + 1] * scale);
        if constexpr (DROP) {
            a[i] &= spread(bits, i % 2 * 8 + i / 2 * 4 + shift);
        }
    }
}

/* c += a w', w [16, 16]. */
static __device__ __forceinline__ void multiply16_transposed(float (&c)[2][4], const uint32_t (&a)[4], const real16 *w, int ld,
                                                             const narrow_place &at)
{
    uint32_t b[4];
    ps_ldmatrix4(b, w + at.other * ld + at.across);
    ps_mma16(c[0], a, b[0], b[1], c[0]);
    ps_mma16(c[1], a, b[2], b[3], c[1]);
}

/* What backward reads first of a layer. */
struct kept_first {
    uint4 xhat;
    uint32_t masks[3];
    float2 rstd; /* of LN2 */
};

template <bool DROP>
static __device__ __forceinline__ void read_first(struct kept_first &k, const struct small &x, uint64_t step, int layer,
                                                  const narrow_place &at)
{
    const char *const p = kept_at(x, layer, at);
    k.xhat = *(const uint4 *)(p + KEPT_XHAT2 + at.lane * 16);
    k.rstd = *(const float2 *)(p + KEPT_ROWS + (at.g * 4 + 1) * 16 + 8);
    if constexpr (DROP) {
        const uint32_t *const m = masks_at(x, step, layer, at.global_tile, at.lane);
        k.masks[0] = m[0], k.masks[1] = m[32], k.masks[2] = m[64];
    }
}

/* Barriers beside 0 and those of the units: of the threads that draw, and of all: those that draw have copied weights, and do not
 * wait. */
enum { WEIGHTS_BARRIER = 14, DRAWING_BARRIER };

/* A block's sums of a layer, in pieces of 16 bytes: the attention's, the feed-forward's, the vectors of each. */
enum { SUMS = layer_sums(D, F) / 4, OF_ATTENTION = 4 * D * D / 4, OF_HIDDEN = 2 * F * D / 4 };
enum { TO_VECTORS = OF_ATTENTION + OF_HIDDEN, VECTORS_OF_ATTENTION = 4 * D / 4, VECTORS_OF_HIDDEN = (F + D) / 4 };
/* Warps that write them. */
enum { HIDDEN_WARPS = 9, ATTENTION_WARPS = 4 };

/* In shared memory behind the units: a place a thread that draws, and a barrier for each section of the sums: [layer][hidden,
 * attention]. */
static __host__ __device__ constexpr int helper_bytes(int layers)
{
    return DRAWING * 16 + layers * 2 * 8;
}

/* Sections in the order in which they come: a layer's feed-forward first, and not the first one's attention. */
static __device__ __forceinline__ int section_at(const struct small &x, int i)
{
    return 2 * (x.layers - 1 - i / 2) + i % 2;
}

/* The block's sums of it are in memory. */
static __device__ __forceinline__ void announce_section(const struct small &x, int section)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(x.finished + section) : "memory");
}

/* The masks of a step's block, by the DRAWING threads that take no part in the rest: what the schedulers with a warp fewer have
 * time for. `warp` of theirs. Between tiles the first of them announces sections of the sums; the result is how many it has. */
static __device__ __forceinline__ int draw_next(const struct small &x, uint64_t step, int warp, uint32_t barriers,
                                                const narrow_place &at)
{
    const int64_t unit = (int64_t)blockIdx.x * x.block_units;
    int announced = 0;
#pragma unroll 1
    for (int i = warp; i < x.block_units * NT * x.layers; i += DRAWING / 32) {
        const int layer = i / (x.block_units * NT), tile = i - layer * (x.block_units * NT);
        uint32_t words[3], *const masks = masks_at(x, step, layer, unit * NT + tile, at.lane);
        draw_tile(words, x, step, layer, (uint32_t)((unit + tile / NT) * x.n + tile % NT * 16 + at.g), at.q);
        masks[0] = words[0], masks[32] = words[1], masks[64] = words[2];
        if (warp == 0 && at.lane == 0 && announced < 2 * x.layers - 1 &&
            ps_mbarrier_ended(barriers + section_at(x, announced) * 8, 0)) {
            announce_section(x, section_at(x, announced++));
        }
    }
    ps_barrier(DRAWING_BARRIER, DRAWING);
    if (warp == 0 && at.lane == 0) {
        *tag_at(x, step) = tag_of(x, step);
    }
    return announced;
}

/* Adds the block's slice of what all blocks have left in partial, by the threads that draw; `thread` of theirs,
 * the first of which has announced so many of the block's sections. */
static __device__ __forceinline__ void sum_sections(const struct small &x, float4 *parts, uint32_t barriers, int announced,
                                                    int thread)
{
    const int blocks = (int)gridDim.x;
    const int64_t stride = (int64_t)x.layers * SUMS;
#pragma unroll 1
    for (int i = 0; i < 2 * x.layers - 1; i++) {
        const int section = section_at(x, i), l = section / 2;
        const bool hidden = section % 2 == 0;
        if (thread == 0) {
            if (i >= announced) {
                ps_mbarrier_wait(barriers + section * 8, 0);
                announce_section(x, section);
            }
            unsigned seen;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(x.finished + section) : "memory");
            } while (seen < (unsigned)blocks);
        }
        ps_barrier(DRAWING_BARRIER, DRAWING);
        const int matrices = hidden ? OF_HIDDEN : OF_ATTENTION,
                  items = matrices + (hidden ? VECTORS_OF_HIDDEN : VECTORS_OF_ATTENTION);
        const int each = (items + blocks - 1) / blocks, end = min(((int)blockIdx.x + 1) * each, items);
        const int lanes = min(each, (int)DRAWING), shares = DRAWING / lanes, share = thread / lanes;
        const float4 *const from = (const float4 *)x.partial + l * SUMS;
        for (int first = (int)blockIdx.x * each; first < end; first += lanes) {
            const int item = first + thread - share * lanes;
            const int at = item < matrices ? item + (hidden ? OF_ATTENTION : 0)
                                           : item - matrices + TO_VECTORS + (hidden ? VECTORS_OF_ATTENTION : 0);
            const bool mine = item < end && share < shares;
            float4 sum = sum_every<8, false>(from + at, stride, share, shares, mine ? blocks : 0);
            parts[thread] = sum;
            ps_barrier(DRAWING_BARRIER, DRAWING);
            if (share == 0 && mine) {
                add_parts(sum, parts + thread, lanes, shares);
                ((float4 *)x.summed)[l * SUMS + at] = sum;
            }
            ps_barrier(DRAWING_BARRIER, DRAWING);
        }
    }
}

template <bool DROP>
static __global__ void __launch_bounds__(THREADS + DRAWING) narrow_backward(const __grid_constant__ struct small x)
{
    extern __shared__ uint4 shared_memory[];
    char *const weights = (char *)shared_memory;
    narrow_place at;
    const uint32_t units = ps_shared_address(weights + x.layers * LAYER_BYTES), unit = units + (uint32_t)(at.unit * UNIT_BYTES);
    /* Which of four matrices the lane gives the rows of: a row of matrices, and a column. */
    const uint32_t piece = (uint32_t)(at.lane % 8 * 16), odd = (uint32_t)(at.lane / 8 % 2), half = (uint32_t)(at.lane / 16);
    const uint32_t all_columns = unit + (uint32_t)(at.lane / 8 * COLUMNS_ROW) + piece;
    const uint32_t own_columns = unit + ((uint32_t)(at.tile * 2) + odd) * COLUMNS_ROW + half * MATRIX + piece;
    const uint32_t own_rows = unit + TO_ROWS + ((uint32_t)(at.tile * 2) + odd) * ROWS_ROW + half * MATRIX + piece;
    const uint32_t own_staged = unit + TO_STAGED + ((uint32_t)(at.tile * 2) + odd) * STAGED_ROW + half * MATRIX + piece;
    const uint32_t own_branch =
        unit + TO_SCORES - 48 * D * 2 + (uint32_t)(at.tile * 2 + at.lane / 16) * 2 * MATRIX + odd * MATRIX + piece;
    const uint32_t own_scores = unit + TO_SCORES + ((uint32_t)(at.tile * 2) + odd) * SCORES_ROW + half * MATRIX + piece;
    const uint32_t own_keys = unit + TO_SCORES + half * SCORES_ROW + ((uint32_t)(at.tile * 2) + odd) * MATRIX + piece;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    stage_weights(x, (narrow_weights *)weights, 0, x.layers); /* written before the forward, like the step */
    const uint64_t step = DROP ? x.state->step : 0;
    at.take(x, (int64_t)blockIdx.x * x.block_units + at.unit);
    ps_grid_wait();
    const int threads = x.block_units * NT * 32; /* but those that draw */
    char *const helpers = weights + x.layers * LAYER_BYTES + x.block_units * UNIT_BYTES;
    const uint32_t section_barriers = ps_shared_address(helpers) + DRAWING * 16;
    if ((int)threadIdx.x >= threads) {
        const int thread = (int)threadIdx.x - threads;
        for (int i = thread; i < 2 * x.layers; i += DRAWING) {
            ps_mbarrier_init(section_barriers + i * 8, i % 2 ? ATTENTION_WARPS : HIDDEN_WARPS);
        }
        ps_copy_wait();
        ps_barrier_arrive(WEIGHTS_BARRIER, (int)blockDim.x);
        if constexpr (DROP) {
            const int announced = draw_next(x, step + 1, warp - threads / 32, section_barriers, at);
            sum_sections(x, (float4 *)helpers, section_barriers, announced, thread);
        }
        return;
    }
    for (int row = (int)threadIdx.x % (NT * 32); row < 48 * 2; row += NT * 32) { /* ones, in ROWS and NORMED */
        char *const p = (char *)shared_memory + x.layers * LAYER_BYTES + at.unit * UNIT_BYTES + TO_ROWS + row / 8 * ROWS_ROW +
                        2 * MATRIX + row % 8 * 16;
        *(uint4 *)p = make_uint4(PS_REAL16_ONES, PS_REAL16_ONES, PS_REAL16_ONES, PS_REAL16_ONES);
    }
    const bool low = at.q < 2; /* the first head of a pair */
    const int last_keys = x.n - 32 - at.q * 2;
    const uint32_t last0 = (last_keys > 0 ? 0xffffu : 0u) | (last_keys > 1 ? 0xffff0000u : 0u);
    const uint32_t last1 = (last_keys > 8 ? 0xffffu : 0u) | (last_keys > 9 ? 0xffff0000u : 0u);
    float g[2][4];
    struct kept_first kept;
    load_rows<D, NT>(g, x.dy, at);
    read_first<DROP>(kept, x, step, x.layers - 1, at);
    ps_copy_wait();
    ps_barrier(WEIGHTS_BARRIER, (int)blockDim.x);
#pragma unroll 1
    for (int l = x.layers - 1; l >= 0; l--) {
        const narrow_weights &w = ((const narrow_weights *)weights)[l];
        float *const sums = x.partial + ((int64_t)blockIdx.x * x.layers + l) * layer_sums(D, F);
        float *const bias_sums = sums + (4 * D + 2 * F) * D;
        const char *const keep = kept_at(x, l, at);
        if (l == 0) { /* W_h's gradient has had the free multiprocessors */
            ps_grid_release();
        }
        uint32_t xhat[4] = {kept.xhat.x, kept.xhat.y, kept.xhat.z, kept.xhat.w}, a[4];
        const uint32_t row_bits = kept.masks[2];
        float dx[2][4];

        /* y = r + drop(hidden W_2 + b_2) */
        {
            const float rstd[2] = {kept.rstd.x, kept.rstd.y};
            uint32_t dm[4];
            ps_stmatrix4_at(own_rows + TO_NORMED - TO_ROWS, xhat);
            scale_shift_kept(a, xhat, w.ln2_gamma, w.ln2_beta, at.q);
            branch_operand<DROP>(dm, g, x.drop_scale * x.half_scale, row_bits, 1);
            ps_stmatrix4_at(own_rows + TO_NORMED - TO_ROWS + 3 * MATRIX, dm);
            clear(dx);
#pragma unroll 1
            for (int stage = 0; stage < 2; stage++) {
                const uint32_t bits = stage ? kept.masks[1] : kept.masks[0];
                const real16 *const w_1 = w.w_1 + stage * 64, *const w_2 = w.w_2 + stage * 64 * LD;
                const float4 *const bias = w.b_1 + stage * 32;
                if (stage > 0) {
                    ps_barrier(0, threads);
                }
                /* The products of a chunk of 16 columns are made while the one before is worked on. */
                float next_z[2][4], next_dz[2][4];
                const auto begin = [&](int chunk) {
                    uint32_t b[4];
                    set_bias(next_z[0], bias + chunk * 8, at.q);
                    set_bias(next_z[1], bias + chunk * 8 + 4, at.q);
                    ps_ldmatrix4_transposed(b, w_1 + chunk * 16 + at.near * LD_F + at.far);
                    ps_mma16(next_z[0], a, b[0], b[1], next_z[0]);
                    ps_mma16(next_z[1], a, b[2], b[3], next_z[1]);
                    clear(next_dz);
                    multiply16_transposed(next_dz, dm, w_2 + chunk * 16 * LD, LD, at);
                };
                begin(0);
#pragma unroll
                for (int chunk = 0; chunk < 4; chunk++) {
                    uint32_t hidden[4], d_hidden[4];
                    float z[2][4], dz[2][4];
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        z[i / 4][i % 4] = next_z[i / 4][i % 4];
                        dz[i / 4][i % 4] = next_dz[i / 4][i % 4];
                    }
                    if (chunk < 3) {
                        begin(chunk + 1);
                    }
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        float &v = z[i / 4][i % 4];
                        const float square = v * v, t = ps_tanh(v * fmaf(square, GELU_B, GELU_A));
                        const float slope = fmaf(v * fmaf(square, 3 * GELU_B, GELU_A), fmaf(-t, t, 1.0f), t); /* less 1 */
                        dz[i / 4][i % 4] = fmaf(dz[i / 4][i % 4], slope, dz[i / 4][i % 4]);
                        v = fmaf(v, t, v);
                    }
                    pack_operand(hidden, z[0], z[1]);
                    pack_operand(d_hidden, dz[0], dz[1]);
                    if constexpr (DROP) {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const uint32_t mask = spread(bits, chunk % 2 * 2 + i / 2 + i % 2 * 4 + chunk / 2 * 8);
                            hidden[i] &= mask;
                            d_hidden[i] &= mask;
                        }
                    }
                    ps_stmatrix4_at(own_staged + chunk * 2 * MATRIX, hidden);
                    ps_stmatrix4_at(own_staged + (8 + chunk * 2) * MATRIX, d_hidden);
                    multiply16_transposed(dx, d_hidden, w_1 + chunk * 16, LD_F, at);
                }
                publish(threads);
                /* Position 16 w + g of the 64 columns, and the one 8 further. */
                const int column = column_of(stage * 64 + warp % 4 * 16 + at.g);
                if (warp < 4) {
                    float d[3][4];
                    block_product(d, units + TO_STAGED + 8 * MATRIX, STAGED_ROW, units + TO_NORMED, ROWS_ROW, x.block_units);
                    put_sums(sums, 4 * D + column, 4 * D + column + 2, d[0], d[1], at.q);
                    if (at.q == 0) {
                        bias_sums[4 * D + column] = d[2][0];
                        bias_sums[4 * D + column + 2] = d[2][2];
                    }
                } else if (warp < 8) {
                    float d[2][4];
                    block_product(d, units + TO_STAGED, STAGED_ROW, units + TO_NORMED + 3 * MATRIX, ROWS_ROW, x.block_units);
                    put_sums(sums, 4 * D + F + column, 4 * D + F + column + 2, d[0], d[1], at.q);
                } else if (warp == 8 && stage == 0) { /* b_2 */
                    float d[4] = {0, 0, 0, 0};
                    uint32_t p = units + TO_NORMED + half * ROWS_ROW + (3 + odd) * MATRIX + piece;
                    for (int i = 0; i < x.block_units; i++, p += UNIT_BYTES) {
#pragma unroll
                        for (int tile = 0; tile < NT; tile++) {
                            uint32_t r[4];
                            ps_ldmatrix4_transposed_at(r, p + tile * 2 * ROWS_ROW);
                            add_ones(d, r);
                        }
                    }
                    if (at.q == 0) {
                        bias_sums[4 * D + F + at.g] = d[0];
                        bias_sums[4 * D + F + at.g + 8] = d[2];
                    }
                }
                if (DROP && warp < HIDDEN_WARPS && stage == (warp < 8)) { /* its sums of this half of the layer are written */
                    __syncwarp();
                    if (at.lane == 0) {
                        ps_mbarrier_arrive(section_barriers + 2 * l * 8);
                    }
                }
            }
            ps_ldmatrix4_at(xhat, own_rows + TO_NORMED - TO_ROWS);
            normalise_backward<D, NT>(g, dx, w.ln2_gamma, xhat, rstd, NULL, at);
        }

        /* r = u + drop(merged W_o + b_o) */
        const uint4 kept_xhat = *(const uint4 *)(keep + KEPT_XHAT1 + at.lane * 16);
        const uint4 kept_merged = *(const uint4 *)(keep + KEPT_MERGED + at.lane * 16);
        const float4 sums0 = *(const float4 *)(keep + KEPT_ROWS + at.g * 64),
                     sums1 = *(const float4 *)(keep + KEPT_ROWS + at.g * 64 + 32);
        float delta[2][2][2]; /* less sum_j A dA, of head, pair, row */
        uint32_t branch[4];
        branch_operand<DROP>(branch, g, x.drop_scale, row_bits, 0);
        clear(dx);
        multiply16_transposed(dx, branch, w.w_o, LD, at);
        {
            const uint32_t merged[4] = {kept_merged.x, kept_merged.y, kept_merged.z, kept_merged.w};
            ps_stmatrix4_at(own_rows + 3 * MATRIX, merged);
#pragma unroll
            for (int i = 0; i < 4; i++) { /* pair i / 2, row i % 2 */
                float v = -dx[i / 2][i % 2 * 2] * ps_low(merged[i]) - dx[i / 2][i % 2 * 2 + 1] * ps_high(merged[i]);
                v += __shfl_xor_sync(0xffffffffu, v, 1);
                const float other = __shfl_xor_sync(0xffffffffu, v, 2);
                delta[0][i / 2][i % 2] = low ? v : other;
                delta[1][i / 2][i % 2] = low ? other : v;
            }
        }
        pack_operand(a, dx[0], dx[1]);
        ps_stmatrix4_at(own_columns + 6 * MATRIX, a);
        xhat[0] = kept_xhat.x, xhat[1] = kept_xhat.y, xhat[2] = kept_xhat.z, xhat[3] = kept_xhat.w;
        ps_stmatrix4_at(own_rows, xhat);
        scale_shift_kept(a, xhat, w.ln1_gamma, w.ln1_beta, at.q);
        {
            uint32_t packed[4];
            project16(dx, a, w.w_qkv, LD_QKV, w.b_qkv, at);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                dx[i / 4][i % 4] *= x.scale_log2e;
            }
            pack_operand(packed, dx[0], dx[1]);
            ps_stmatrix4_at(own_columns, packed);
            project16(dx, a, w.w_qkv + D, LD_QKV, w.b_qkv + D / 2, at);
            pack_operand(packed, dx[0], dx[1]);
            ps_stmatrix4_at(own_columns + 2 * MATRIX, packed);
            project16(dx, a, w.w_qkv + 2 * D, LD_QKV, w.b_qkv + D, at);
            pack_operand(packed, dx[0], dx[1]);
            ps_stmatrix4_at(own_columns + 4 * MATRIX, packed);
        }
        ps_barrier(0, threads); /* and the staged columns have been read */
        ps_stmatrix4_at(own_branch, branch);
        const bool embed = l == 0 && x.embed.partial;
        real16 *const embedding = (real16 *)((char *)shared_memory + x.layers * LAYER_BYTES + TO_NORMED), /* of the first unit */
            *const own_embedding = embedding + at.unit * (UNIT_BYTES / 2);
        if (embed) {
            stage_patches<D, NT>(own_embedding, x, (int64_t)blockIdx.x * x.block_units + at.unit, at);
        }

        /* A = softmax(q k' / sqrt(e)), merged = A v */
        uint32_t dq[4], dk[4], dv[4];
#pragma unroll
        for (int p = 0; p < 2; p++) {
            float dq_of[2][4], dk_of[2][4], dv_of[2][4];
            clear(dq_of);
            clear(dk_of);
            clear(dv_of);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const bool mine = low == (h == 0);
                const float4 logs = h == 0 ? sums0 : sums1;
                const float log0 = p == 0 ? logs.x : logs.z, log1 = p == 0 ? logs.y : logs.w;
                const float less[4] = {-log0, -log0, -log1, -log1};
                const float less_delta[4] = {delta[h][p][0], delta[h][p][0], delta[h][p][1], delta[h][p][1]};
                uint32_t q[2], d_merged[2], keys[6], values[6], keys_across[6];
                ps_ldmatrix2_at(q, own_columns + p * MATRIX);
                ps_ldmatrix2_at(d_merged, own_columns + (6 + p) * MATRIX);
                const uint32_t q0 = mine ? q[0] : 0, q1 = mine ? q[1] : 0;
                const uint32_t d0 = mine ? d_merged[0] : 0, d1 = mine ? d_merged[1] : 0;
                load_rows48(keys, all_columns + (2 + p) * MATRIX, COLUMNS_ROW);
                load_rows48(values, all_columns + (4 + p) * MATRIX, COLUMNS_ROW);
                load_rows48_transposed(keys_across, all_columns + (2 + p) * MATRIX, COLUMNS_ROW);
                if (p + h > 0) {
                    at.sync(); /* the head before has been read */
                }
#pragma unroll
                for (int j = 0; j < 3; j++) {
                    float s[2][4], ds[2][4];
                    ps_mma8(s[0], q0, q1, keys[2 * j], less);
                    ps_mma8(s[1], q0, q1, keys[2 * j + 1], less);
                    ps_mma8(ds[0], d0, d1, values[2 * j], less_delta);
                    ps_mma8(ds[1], d0, d1, values[2 * j + 1], less_delta);
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        s[i / 4][i % 4] = ps_exp2(s[i / 4][i % 4]);
                        ds[i / 4][i % 4] *= s[i / 4][i % 4];
                    }
                    uint32_t packed[4], d_packed[4];
                    pack_operand(packed, s[0], s[1]);
                    pack_operand(d_packed, ds[0], ds[1]);
                    if (j == 2) {
                        packed[0] &= last0, packed[1] &= last0, packed[2] &= last1, packed[3] &= last1;
                        d_packed[0] &= last0, d_packed[1] &= last0, d_packed[2] &= last1, d_packed[3] &= last1;
                    }
                    ps_stmatrix4_at(own_scores + j * 2 * MATRIX, packed);
                    ps_stmatrix4_at(own_scores + TO_GRADIENTS + j * 2 * MATRIX, d_packed);
                    ps_mma16(dq_of[h], d_packed, keys_across[2 * j], keys_across[2 * j + 1], dq_of[h]);
                }
                uint32_t queries[6], d_mixed[6];
                load_rows48_transposed(queries, all_columns + p * MATRIX, COLUMNS_ROW);
                load_rows48_transposed(d_mixed, all_columns + (6 + p) * MATRIX, COLUMNS_ROW);
                at.sync(); /* A and its gradient are there */
#pragma unroll
                for (int j = 0; j < 3; j++) {
                    uint32_t r[4];
                    ps_ldmatrix4_transposed_at(r, own_keys + j * 2 * SCORES_ROW);
                    ps_mma16(dv_of[h], r, d_mixed[2 * j], d_mixed[2 * j + 1], dv_of[h]);
                    ps_ldmatrix4_transposed_at(r, own_keys + TO_GRADIENTS + j * 2 * SCORES_ROW);
                    ps_mma16(dk_of[h], r, queries[2 * j], queries[2 * j + 1], dk_of[h]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float ln2 = 0.6931471805599453f; /* q was scaled */
                dq[2 * p + i] = ps_pack((low ? dq_of[0][2 * i] : dq_of[1][2 * i]) * x.scale,
                                        (low ? dq_of[0][2 * i + 1] : dq_of[1][2 * i + 1]) * x.scale);
                dk[2 * p + i] = ps_pack((low ? dk_of[0][2 * i] : dk_of[1][2 * i]) * ln2,
                                        (low ? dk_of[0][2 * i + 1] : dk_of[1][2 * i + 1]) * ln2);
                dv[2 * p + i] = ps_pack(low ? dv_of[0][2 * i] : dv_of[1][2 * i], low ? dv_of[0][2 * i + 1] : dv_of[1][2 * i + 1]);
            }
        }
        const float2 kept_rstd = *(const float2 *)(keep + KEPT_ROWS + (at.g * 4 + 1) * 16);
        at.sync(); /* q, k, v and merged's gradient have been read */
        ps_stmatrix4_at(own_columns, dq);
        ps_stmatrix4_at(own_columns + 2 * MATRIX, dk);
        ps_stmatrix4_at(own_columns + 4 * MATRIX, dv);
        ps_ldmatrix4_at(a, own_branch);
        ps_stmatrix4_at(own_columns + 6 * MATRIX, a);
        clear(dx);
        multiply16_transposed(dx, dq, w.w_qkv, LD_QKV, at);
        multiply16_transposed(dx, dk, w.w_qkv + D, LD_QKV, at);
        multiply16_transposed(dx, dv, w.w_qkv + 2 * D, LD_QKV, at);
        ps_ldmatrix4_at(xhat, own_rows);
        const float rstd1[2] = {kept_rstd.x, kept_rstd.y};
        normalise_backward<D, NT>(g, dx, w.ln1_gamma, xhat, rstd1, NULL, at);
        if (l > 0) {
            read_first<DROP>(kept, x, step, l - 1, at);
        }
        if (embed) {
            const int pitch = embed_pitch(D, x.embed.patch);
            embed_operand<D, NT, DROP>(a, g, x, at);
            ps_store_operand(own_embedding + at.row * pitch, pitch * 2, a);
            ps_copy_wait();
        }
        publish(threads);
        if (warp >= 8 && warp < 12) {
            float d[5][4];
            block_product(d, units, COLUMNS_ROW, units + TO_ROWS, ROWS_ROW, x.block_units);
            const int row = warp % 4 * 16 + at.g;
            if (warp == 11) {
                put_sums(sums, row, row + 8, d[3], d[4], at.q);
            } else {
                put_sums(sums, row, row + 8, d[0], d[1], at.q);
            }
            if (at.q == 0) {
                bias_sums[row] = d[2][0];
                bias_sums[row + 8] = d[2][2];
            }
            if (DROP) {
                __syncwarp();
                if (at.lane == 0) {
                    ps_mbarrier_arrive(section_barriers + (2 * l + 1) * 8);
                }
            }
        } else if (embed) {
            for (int job = warp < 8 ? warp : warp - 4; job < embed_jobs<D>(x); job += threads / 32 - 4) {
                embed_gradient<D, NT>(x, job, embedding, UNIT_BYTES / 2, true, at);
            }
        }
    }
    if (!x.embed.partial) {
        store_rows<D, NT>(x.du, g, at);
    }
}

/* ---- the host's side ---- */

bool ps_encoder_narrow_serves(const struct ps_encoder_small *e)
{
    return e->d_model == D && e->n_heads == 4 && e->d_ff == F && e->patches > 32 && e->patches <= 48;
}

size_t ps_encoder_narrow_shared(const struct ps_encoder_small *e, int block_units)
{
    return (size_t)(e->layers * LAYER_BYTES +
                    (block_units > 7 ? 1 << 20 : block_units * (UNIT_BYTES > 2 * KV_BYTES ? UNIT_BYTES : 2 * KV_BYTES))) +
           helper_bytes((int)e->layers);
}

int64_t ps_encoder_narrow_tiles(const struct ps_encoder_small *e)
{
    return (e->sequences + 6) * NT;
}

size_t ps_encoder_narrow_layers_bytes(const struct ps_encoder_small *e)
{
    const int64_t tiles = ps_encoder_narrow_tiles(e);
    return (size_t)(e->layers * tiles * (KEPT_BYTES + 2 * MASKS_BYTES)) + (size_t)(2 * tags_of(tiles)) * sizeof(struct tag) +
           sizeof(struct ahead);
}

size_t ps_encoder_narrow_kept_bytes(const struct ps_encoder_small *e)
{
    return ps_encoder_narrow_layers_bytes(e) + (size_t)ps_encoder_narrow_tiles(e) * 8 * sizeof(uint32_t);
}

int ps_encoder_narrow_window_floats()
{
    return 2 * KV_BYTES / (int)sizeof(float);
}

/* Where W_h lies in forward's shared memory: behind what is there with the layers, and with the head. */
static size_t head_at(int64_t layers, int block_units)
{
    const size_t units = (size_t)block_units * 2 * KV_BYTES, head = head_scratch<NT>(block_units);
    return (size_t)layers * LAYER_BYTES + (units > head ? units : head);
}

bool ps_encoder_narrow_heads(const struct ps_encoder_small *e, int block_units, int shared)
{
    return e->pred_len % 8 == 0 && e->pred_len <= HEAD_COLUMNS &&
           head_at(e->layers, block_units) + head_bytes((int)e->patches, block_units) + 16 <= (size_t)shared; /* and a barrier */
}

enum ps_status ps_encoder_narrow_forward(struct small x, size_t shared, cudaStream_t stream)
{
    if (x.head.weight) {
        x.head.at = (int)head_at(x.layers, x.block_units);
        shared = (size_t)x.head.at + head_bytes(x.n, x.block_units);
    }
    return ps_small_launch(x.threshold ? narrow_forward<true> : narrow_forward<false>, dim3((unsigned)x.blocks),
                           x.block_units * NT * 32, shared, stream, "encoder forward", x);
}

enum ps_status ps_encoder_narrow_backward(const struct small &x, size_t shared, cudaStream_t stream)
{
    return ps_small_launch(x.threshold ? narrow_backward<true> : narrow_backward<false>, dim3((unsigned)x.blocks),
                           x.block_units * NT * 32 + (x.threshold ? DRAWING : 0), shared, stream, "encoder backward", x);
}

} // namespace PS_REAL16_SPACE
