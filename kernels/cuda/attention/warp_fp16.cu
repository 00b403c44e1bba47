/* Attention in tf32 of what is kept in 16 bits: q, k, v and mixed of fp16, which has tf32's 10 bits of mantissa, gradients of
 * float32. Short sequences, heads of 8 or 16: a warp takes 16 columns of a sequence, two heads or one, from global memory to
 * shared memory and from there, by ldmatrix, to operands of mma.m16n8k8 and m16n8k16 as it needs them, turned or not.
 *
 * Backward multiplies gradients as fp16 too, once they have been brought into its range: those of a head, d_mixed, are multiplied
 * by a power of two so that no score's gradient, at most 2 e max|d_mixed| max|v|, passes 2^15. Against tf32 that leaves out bits of
 * elements that are 2^-20 of the head's largest and less. Scores come out turned, 16 keys by 8 queries, as the left operands of dk
 * and dv are; movmatrix turns their gradients back for dq.
 *
 * Bytes: 8 S h N e forward, 24 S h N e backward, and the sums; tensor FLOPs as attention/warp_float.cu's. 42 patches, heads of 8,
 * 43,008 matrices: 116 and 347 MB, 28 and 83 us at 4.2 TB/s; about 630 and 1,150 instructions a matrix. Measured 59 and 127
 * (attention/warp_float.cu on fp32: 85 and 201): forward issues in half of the clocks, backward, of 16 warps a multiprocessor, in
 * less; in 80 or 96 registers it spills a few words in its loop and takes 139. */
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/reduce.cuh"

enum { WARPS = 4, THREADS = WARPS * 32, COLUMNS = 16 };

/* A warp's rows of a tensor in shared memory: two blocks of 8 columns, 16 bytes a row. The gap puts them in different banks. */
template <int TILES> struct stage {
    static constexpr int ROWS = TILES * 16, BLOCK = ROWS * 16 + 64, BYTES = 2 * BLOCK;
};

/* The warp's place: COLUMNS of a sequence, `heads` of them or half of one. Unsigned, and strides in bytes of 32 bits, so that an
 * address is one multiplication and addition. */
template <int ET> struct columns {
    static constexpr int HEADS = 2 / ET;
    uint32_t matrix, sequence, head, lane, g, q; /* the first matrix */

    __device__ __forceinline__ columns(const struct ps_attention_launch &x)
        : lane(threadIdx.x % 32), g(threadIdx.x % 32 / 4), q(threadIdx.x % 4)
    {
        matrix = (blockIdx.x * WARPS + threadIdx.x / 32) * HEADS;
        sequence = matrix / (uint32_t)x.heads;
        head = matrix - sequence * (uint32_t)x.heads;
    }
};

/* Rows of those columns, from column `first` on. */
template <typename T> struct rows {
    char *data;
    uint32_t stride;

    template <int ET>
    __device__ __forceinline__ rows(const struct ps_attention_view &v, const struct columns<ET> &at, uint32_t first)
        : data(v.data + ((int64_t)at.sequence * v.sequence + (int64_t)at.head * v.head + first) * (int64_t)sizeof(T)),
          stride((uint32_t)v.row * (uint32_t)sizeof(T))
    {
        asm("" : "+l"(data)); /* found once: the compiler would do so at each row */
    }
    __device__ __forceinline__ T *at(uint32_t row) const
    {
        return (T *)(data + (uint64_t)row * stride);
    }
};

/* All rows, on their way; zeros where there are none. */
template <int ET, int TILES>
static __device__ __forceinline__ void fetch(uint32_t to, const struct ps_attention_view &v, const struct columns<ET> &at,
                                             uint32_t count)
{
    const rows<__half> from(v, at, at.lane % 2 * 8);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const uint32_t row = at.lane / 2 + 16 * i;
        const bool here = row < count;
        ps_copy_async_part(to + at.lane % 2 * stage<TILES>::BLOCK + row * 16, from.at(here ? row : 0), here ? 16 : 0);
    }
}

/* Rows 16 tile .. 16 tile + 15 of a block as they are, or turned: of each 8 rows a word. */
static __device__ __forceinline__ void load(uint32_t (&r)[2], uint32_t block, uint32_t tile, uint32_t lane)
{
    ps_ldmatrix2_at(r, block + (tile * 16 + lane % 16) * 16);
}

static __device__ __forceinline__ void load_turned(uint32_t (&r)[2], uint32_t block, uint32_t tile, uint32_t lane)
{
    ps_ldmatrix2_transposed_at(r, block + (tile * 16 + lane % 16) * 16);
}

template <int ET> static __device__ __forceinline__ void clear(float (&sum)[ET][4])
{
#pragma unroll
    for (int i = 0; i < ET * 4; i++) {
        sum[i / 4][i % 4] = 0.0f;
    }
}

/* sum += rows of a times rows of b, 8 ET columns: a 16, b 8 of them. */
template <int ET>
static __device__ __forceinline__ void scores(float (&sum)[4], const uint32_t (&a)[ET][2], const uint32_t (&b)[ET][2], int which)
{
#pragma unroll
    for (int t = 0; t < ET; t++) {
        ps_mma8<ps_fp16>(sum, a[t][0], a[t][1], b[t][which], sum);
    }
}

/* e = 8 ET, N <= 16 TILES and more than one tile less. */
template <int ET, int TILES>
static __global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ struct ps_attention_launch x)
{
    ps_grid_begin();
    typedef struct stage<TILES> S;
    constexpr int HEADS = columns<ET>::HEADS;
    __shared__ __align__(128) uint8_t memory[WARPS][3 * S::BYTES];
    const struct columns<ET> at(x);
    const uint32_t count = (uint32_t)x.patches;
    if (at.matrix >= (uint32_t)x.matrices) {
        return;
    }
    const uint32_t q = ps_shared_address(memory[threadIdx.x / 32]), k = q + S::BYTES, v = k + S::BYTES;
    fetch<ET, TILES>(k, x.k, at, count);
    fetch<ET, TILES>(q, x.q, at, count);
    fetch<ET, TILES>(v, x.v, at, count);
    ps_copy_wait();
    __syncwarp();
    const float factor = x.scale * PS_LOG2_E;
    float *const logsum = x.logsum + (uint64_t)at.matrix * count;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const uint32_t block = h * ET * S::BLOCK;
        uint32_t keys[TILES][ET][2], values[TILES][ET][2];
#pragma unroll
        for (int i = 0; i < TILES * ET; i++) {
            load(keys[i / ET][i % ET], k + block + i % ET * S::BLOCK, i / ET, at.lane);
            load_turned(values[i / ET][i % ET], v + block + i % ET * S::BLOCK, i / ET, at.lane);
        }
#pragma unroll 1
        for (uint32_t tile = 0; tile < TILES; tile++) {
            uint32_t a[ET][2];
#pragma unroll
            for (int t = 0; t < ET; t++) {
                load(a[t], q + block + t * S::BLOCK, tile, at.lane);
            }
            float s[2 * TILES][4], out[ET][4], most[2] = {-INFINITY, -INFINITY}, sum[1][4];
            clear(s);
            clear(sum);
#pragma unroll
            for (int j = 0; j < 2 * TILES; j++) {
                scores<ET>(s[j], a, keys[j / 2], j % 2);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[j][i] = j < 2 * TILES - 2 || j * 8 + i % 2 + at.q * 2 < count ? s[j][i] : -INFINITY;
                    most[i / 2] = fmaxf(most[i / 2], s[j][i]);
                }
            }
            most[0] = ps_group_max<4>(most[0]) * factor; /* of a key at least: finite */
            most[1] = ps_group_max<4>(most[1]) * factor;
            clear(out);
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                uint32_t weights[4];
#pragma unroll
                for (int i = 0; i < 4; i++) { /* rows g and g + 8 of 8 keys, then of 8 more */
                    float(&w)[4] = s[2 * j + i / 2];
                    const int r = i % 2;
                    w[2 * r] = ps_exp2(fmaf(w[2 * r], factor, -most[r]));
                    w[2 * r + 1] = ps_exp2(fmaf(w[2 * r + 1], factor, -most[r]));
                    weights[i] = ps_pack<ps_fp16>(w[2 * r], w[2 * r + 1]);
                }
                ps_mma16<ps_fp16>(sum[0], weights, ps_ones<ps_fp16>(), ps_ones<ps_fp16>(), sum[0]); /* in every column */
#pragma unroll
                for (int t = 0; t < ET; t++) {
                    ps_mma16<ps_fp16>(out[t], weights, values[j][t][0], values[j][t][1], out[t]);
                }
            }
            __syncwarp(); /* all have read the tile of q, whose place mixed takes */
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t row = tile * 16 + at.g + r * 8;
                if (at.q == 0 && row < count) {
                    logsum[h * count + row] = (most[r] + ps_log2(sum[0][2 * r])) * (1 / PS_LOG2_E);
                }
                const float share = __fdividef(1.0f, sum[0][2 * r]);
#pragma unroll
                for (int t = 0; t < ET; t++) {
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(q + block + t * S::BLOCK + row * 16 + at.q * 4),
                                 "r"(ps_pack<ps_fp16>(out[t][2 * r] * share, out[t][2 * r + 1] * share))
                                 : "memory");
                }
            }
        }
    }
    __syncwarp();
    const rows<__half> to(x.mixed, at, at.lane % 2 * 8);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const uint32_t row = at.lane / 2 + 16 * i;
        if (row < count) {
            *(uint4 *)to.at(row) = *(const uint4 *)(memory[threadIdx.x / 32] + at.lane % 2 * S::BLOCK + row * 16);
        }
    }
}

/* 16 rows from `row0` on of a head's gradient, times a factor. to: from the lane's columns on. */
template <int ET>
static __device__ __forceinline__ void put(const rows<float> &to, uint32_t row0, const float (&sum)[ET][4], float factor,
                                           uint32_t count, const struct columns<ET> &at)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t row = row0 + at.g + r * 8;
        if (row < count) {
#pragma unroll
            for (int t = 0; t < ET; t++) {
                *(float2 *)(to.at(row) + t * 8) = make_float2(sum[t][2 * r] * factor, sum[t][2 * r + 1] * factor);
            }
        }
    }
}

/* The power of two for gradients up to `most` (its bits), values up to `value` (an fp16's bits). */
template <int ET> static __device__ __forceinline__ int range(uint32_t most, uint32_t value)
{
    const int a = (int)(most >> 23) - 127, b = (int)(value >> 10) - 15; /* most < 2^(a + 1), value < 2^(b + 1) */
    const int exponent = min(15 - (4 + (ET > 1) + 2) - a - b, 14 - a);
    return max(-120, min(120, exponent));
}

static __device__ __forceinline__ float power(int exponent)
{
    return __int_as_float((exponent + 127) << 23);
}

template <int ET, int TILES>
static __global__ void __launch_bounds__(THREADS, ET *TILES > 4    ? 1
                                                  : ET * TILES > 3 ? 3
                                                                   : 4)
    backward_kernel(const __grid_constant__ struct ps_attention_launch x)
{
    ps_grid_begin();
    typedef struct stage<TILES> S;
    constexpr int HEADS = columns<ET>::HEADS;
    struct warp_memory {
        uint8_t rows[4][S::BYTES];                           /* q, k, v, d_mixed in range */
        float logsum[HEADS][S::ROWS], delta[HEADS][S::ROWS]; /* to the base of 2; in range */
    };
    __shared__ __align__(128) struct warp_memory memory[WARPS];
    const struct columns<ET> at(x);
    const uint32_t count = (uint32_t)x.patches;
    if (at.matrix >= (uint32_t)x.matrices) {
        return;
    }
    struct warp_memory &own = memory[threadIdx.x / 32];
    const uint32_t q = ps_shared_address(own.rows), k = q + S::BYTES, v = k + S::BYTES, up = v + S::BYTES;
    fetch<ET, TILES>(v, x.v, at, count);
    fetch<ET, TILES>(k, x.k, at, count);
    fetch<ET, TILES>(q, x.q, at, count);
    /* Four lanes a row: four columns each. */
    const uint32_t part = at.q, mine = part / (2 * ET); /* the lane's head */
    const rows<float> from(x.d_mixed, at, part * 4);
    const rows<__half> mixed(x.mixed, at, part * 4);
    const float *const logsum_of = x.logsum + (uint64_t)at.matrix * count;
    float *const delta_of = x.delta + (uint64_t)(at.matrix + mine) * count;
    float4 u[2 * TILES];
    uint2 m[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        const uint32_t row = at.g + 8 * i;
        const bool here = row < count;
        u[i] = here ? __ldg((const float4 *)from.at(row)) : make_float4(0, 0, 0, 0);
        m[i] = here ? __ldg((const uint2 *)mixed.at(row)) : make_uint2(0, 0);
    }
    constexpr int TURNS = (S::ROWS + 31) / 32;
    float sums[HEADS][TURNS];
#pragma unroll
    for (int i = 0; i < HEADS * TURNS; i++) {
        const uint32_t row = at.lane + i % TURNS * 32;
        sums[i / TURNS][i % TURNS] = row < count ? __ldg(logsum_of + i / TURNS * count + row) : INFINITY; /* a weight of 0 */
    }
    uint32_t most = 0, value = 0;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        most = max(max(most, __float_as_uint(u[i].x) & 0x7fffffffu), __float_as_uint(u[i].y) & 0x7fffffffu);
        most = max(max(most, __float_as_uint(u[i].z) & 0x7fffffffu), __float_as_uint(u[i].w) & 0x7fffffffu);
    }
    ps_copy_wait(); /* for what the lane itself has asked for, */
#pragma unroll
    for (int i = 0; i < TILES; i++) { /* v's among it */
        const uint4 w = *(const uint4 *)(own.rows[2] + at.lane % 2 * S::BLOCK + (at.lane / 2 + 16 * i) * 16);
        value = __vmaxu2(value,
                         __vmaxu2(__vmaxu2(w.x & 0x7fff7fffu, w.y & 0x7fff7fffu), __vmaxu2(w.z & 0x7fff7fffu, w.w & 0x7fff7fffu)));
    }
    value = max(value >> 16, value & 0xffffu);
#pragma unroll
    for (int i = 0; i < HEADS * TURNS; i++) {
        const uint32_t row = at.lane + i % TURNS * 32;
        if (S::ROWS % 32 == 0 || row < S::ROWS) {
            own.logsum[i / TURNS][row] = sums[i / TURNS][i % TURNS] * PS_LOG2_E;
        }
    }
    int exponent[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        exponent[h] = range<ET>(__reduce_max_sync(0xffffffffu, mine == h ? most : 0),
                                __reduce_max_sync(0xffffffffu, HEADS == 1 || at.lane % 2 == h ? value : 0));
    }
    const float own_power = power(mine ? exponent[HEADS - 1] : exponent[0]);
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        const uint32_t row = at.g + 8 * i;
        const float delta = ps_group_sum<2 * ET>(
            fmaf(ps_low<ps_fp16>(m[i].x), u[i].x,
                 fmaf(ps_high<ps_fp16>(m[i].x), u[i].y, fmaf(ps_low<ps_fp16>(m[i].y), u[i].z, ps_high<ps_fp16>(m[i].y) * u[i].w))));
        if (part % (2 * ET) == 0) {
            own.delta[mine][row] = delta * own_power;
            if (row < count) {
                delta_of[row] = delta;
            }
        }
        *(uint2 *)(own.rows[3] + part / 2 * S::BLOCK + row * 16 + part % 2 * 8) = make_uint2(
            ps_pack<ps_fp16>(u[i].x * own_power, u[i].y * own_power), ps_pack<ps_fp16>(u[i].z * own_power, u[i].w * own_power));
    }
    __syncwarp();
    const float factor = x.scale * PS_LOG2_E;
#pragma unroll 1
    for (uint32_t h = 0; h < HEADS; h++) {
        const uint32_t block = h * ET * S::BLOCK, first = h * 8 + at.q * 2; /* of the lane's columns */
        const float back = power(-(h ? exponent[HEADS - 1] : exponent[0]));
        uint32_t keys[TILES][ET][2], values[TILES][ET][2];
        float dk[TILES][ET][4], dv[TILES][ET][4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int t = 0; t < ET; t++) {
                load(keys[i][t], k + block + t * S::BLOCK, i, at.lane);
                load(values[i][t], v + block + t * S::BLOCK, i, at.lane);
            }
            clear(dk[i]);
            clear(dv[i]);
        }
        const rows<float> dq_rows(x.dq, at, first);
#pragma unroll 1
        for (uint32_t tile = 0; tile < TILES; tile++) {
            uint32_t queries[ET][2], queries_turned[ET][2], ups[ET][2], ups_turned[ET][2];
#pragma unroll
            for (int t = 0; t < ET; t++) {
                load(queries[t], q + block + t * S::BLOCK, tile, at.lane);
                load_turned(queries_turned[t], q + block + t * S::BLOCK, tile, at.lane);
                load(ups[t], up + block + t * S::BLOCK, tile, at.lane);
                load_turned(ups_turned[t], up + block + t * S::BLOCK, tile, at.lane);
            }
            float2 logsum[2], delta[2];
#pragma unroll
            for (int w = 0; w < 2; w++) {
                logsum[w] = *(const float2 *)&own.logsum[h][tile * 16 + w * 8 + at.q * 2];
                delta[w] = *(const float2 *)&own.delta[h][tile * 16 + w * 8 + at.q * 2];
            }
            float dq[ET][4];
            clear(dq);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                uint32_t weights[4], gradients[4]; /* keys g and g + 8 of 8 queries, then of 8 more */
#pragma unroll
                for (int w = 0; w < 2; w++) {
                    float s[4] = {0, 0, 0, 0}, d[4] = {-delta[w].x, -delta[w].y, -delta[w].x, -delta[w].y};
                    scores<ET>(s, keys[i], queries, w);
                    scores<ET>(d, values[i], ups, w);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float there = ps_exp2(fmaf(s[j], factor, j % 2 ? -logsum[w].y : -logsum[w].x));
                        s[j] = i < TILES - 1 || i * 16 + j / 2 * 8 + at.g < count ? there : 0.0f;
                        d[j] *= s[j];
                    }
                    weights[2 * w] = ps_pack<ps_fp16>(s[0], s[1]);
                    weights[2 * w + 1] = ps_pack<ps_fp16>(s[2], s[3]);
                    gradients[2 * w] = ps_pack<ps_fp16>(d[0], d[1]);
                    gradients[2 * w + 1] = ps_pack<ps_fp16>(d[2], d[3]);
                }
                const uint32_t back_turned[4] = {ps_movmatrix(gradients[0]), ps_movmatrix(gradients[2]), ps_movmatrix(gradients[1]),
                                                 ps_movmatrix(gradients[3])};
#pragma unroll
                for (int t = 0; t < ET; t++) {
                    ps_mma16<ps_fp16>(dv[i][t], weights, ups_turned[t][0], ups_turned[t][1], dv[i][t]);
                    ps_mma16<ps_fp16>(dk[i][t], gradients, queries_turned[t][0], queries_turned[t][1], dk[i][t]);
                    uint32_t keys_turned[2];
                    load_turned(keys_turned, k + block + t * S::BLOCK, i, at.lane);
                    ps_mma16<ps_fp16>(dq[t], back_turned, keys_turned[0], keys_turned[1], dq[t]);
                }
            }
            put<ET>(dq_rows, tile * 16, dq, x.scale * back, count, at);
        }
        const rows<float> dk_rows(x.dk, at, first), dv_rows(x.dv, at, first);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            put<ET>(dk_rows, i * 16, dk[i], x.scale * back, count, at);
            put<ET>(dv_rows, i * 16, dv[i], back, count, at);
        }
    }
}

/* ---- launching ---- */

/* Two heads lie side by side, and rows are near enough for 32 bits. */
static bool in_pairs(const struct ps_attention_view &v, int e)
{
    return (e == COLUMNS || v.head == e) && v.row >= 0 && v.row < 1 << 24;
}

bool ps_cuda_attention_warp_fp16_wanted(const struct ps_kernels *k, const struct ps_attention_call *call)
{
    const struct ps_attention_launch *x = &call->x;
    return x->pieces == 1 && !x->accumulate && call->kept != k->real && x->pairs && x->unit == 16 && x->scale > 0 &&
           x->patches <= 64 && (x->e == COLUMNS || (x->e == COLUMNS / 2 && x->heads % 2 == 0)) && in_pairs(x->q, x->e) &&
           in_pairs(x->k, x->e) && in_pairs(x->v, x->e) && in_pairs(x->mixed, x->e) &&
           (!call->backward ||
            (in_pairs(x->d_mixed, x->e) && in_pairs(x->dq, x->e) && in_pairs(x->dk, x->e) && in_pairs(x->dv, x->e)));
}

template <int ET, int TILES>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x, bool backward)
{
    ps_cuda_launch(c, backward ? backward_kernel<ET, TILES> : forward_kernel<ET, TILES>,
                   ps_cuda_blocks(x.matrices, WARPS * columns<ET>::HEADS), THREADS, 0, x);
    PS_CUDA_LAUNCHED(op);
}

template <int ET>
static enum ps_status launch_size(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                  bool backward)
{
    return x.patches <= 16   ? launch<ET, 1>(c, op, x, backward)
           : x.patches <= 32 ? launch<ET, 2>(c, op, x, backward)
           : x.patches <= 48 ? launch<ET, 3>(c, op, x, backward)
                             : launch<ET, 4>(c, op, x, backward);
}

enum ps_status ps_cuda_attention_warp_fp16(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return call->x.e == COLUMNS ? launch_size<2>(ps_cuda(k), op, call->x, false) : launch_size<1>(ps_cuda(k), op, call->x, false);
}

enum ps_status ps_cuda_attention_warp_fp16_backward(const struct ps_kernels *k, const char *op,
                                                    const struct ps_attention_call *call)
{
    return call->x.e == COLUMNS ? launch_size<2>(ps_cuda(k), op, call->x, true) : launch_size<1>(ps_cuda(k), op, call->x, true);
}
