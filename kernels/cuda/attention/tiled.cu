/* Attention without its N x N scores in memory: softmax(scale q k') v by tiles of 64 queries and 64 keys, with the softmax's
 * maximum and sum carried along (Milakov and Gimelshein 2018; Dao et al. 2022). Forward keeps the logarithm of each row's sum;
 * backward computes the scores again from it, once for dq, by tiles of queries, and once for dk and dv, by tiles of keys, so that
 * no sum is shared between blocks and every one has a fixed order.
 *
 * A warp owns 16 rows of a tile: products are mma.sync (tf32, operands rounded to nearest) or FFMA (fp32), operands in shared
 * memory, results in registers; a matrix of scores becomes an operand through the warp's own lines of shared memory. On tensor
 * cores lane q of four holds k = 2q and 2q + 1, as in gemm/tiny.cu.
 *
 * Bytes, forward: 4 S h N e elements and S h N sums, q once, k and v once a tile of queries (from L2 but for the first); backward
 * 9 S h N e. FLOPs: 4 S h N^2 e forward, 14 S h N^2 e backward. The scores would be 2 S h N^2 elements forward, 6 backward. */
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/reduce.cuh"

#define TILE PS_ATTENTION_TILE /* queries, keys */
#define WARPS 4
#define THREADS (WARPS * 32)

enum arithmetic { FFMA, TF32 };

/* Elements from row to row of a tile in shared memory: rows that a fragment reads at once lie in different banks. */
template <int ET> static constexpr int tile_ld = 8 * ET + (ET > 1 ? 8 : 0);
static constexpr int score_ld = TILE + 8;
template <int ET> static constexpr int tile_elements = TILE *tile_ld<ET>;
static constexpr int score_elements = WARPS * 16 * score_ld;

__device__ static __forceinline__ float *rows_of(const struct ps_attention_view &v, int sequence, int head)
{
    return (float *)v.data + sequence * v.sequence + head * v.head;
}

/* Where column c of a row lies: behind it, or in a piece of its own. */
struct columns {
    int count, e; /* columns; of a piece */
    int64_t piece;
    __device__ __forceinline__ columns(const struct ps_attention_launch &x) : count(x.e), e(x.e), piece(0)
    {
    }
    __device__ __forceinline__ columns(const struct ps_attention_launch &x, const struct ps_attention_view &v)
        : count(x.columns), e(x.e), piece(v.piece)
    {
    }
    __device__ __forceinline__ int64_t operator()(int c) const
    {
        return count == e ? c : c / e * piece + c % e;
    }
};

/* 64 rows from row0 on to shared memory; beyond N and the columns zeros. */
template <int ET>
__device__ static __forceinline__ void load_tile(float *to, const float *from, int64_t stride, const struct columns columns,
                                                 int row0, const struct ps_attention_launch &x)
{
    constexpr int V = ps_vector<float>, LD = tile_ld<ET>;
    if (x.unit == 16) {
        constexpr int PIECES = 8 * ET / V;
#pragma unroll
        for (int i = (int)threadIdx.x; i < TILE * PIECES; i += THREADS) {
            const int row = i / PIECES, column = i % PIECES * V;
            const bool inside = row0 + row < x.patches && column < columns.count;
            ps_copy_async_part(ps_shared_address(to + row * LD + column),
                               from + (inside ? (row0 + row) * stride + columns(column) : 0), inside ? 16 : 0);
        }
    } else {
        for (int i = (int)threadIdx.x; i < TILE * 8 * ET; i += THREADS) {
            const int row = i / (8 * ET), column = i % (8 * ET);
            const bool inside = row0 + row < x.patches && column < columns.count;
            to[row * LD + column] = inside ? from[(row0 + row) * stride + columns(column)] : 0.0f;
        }
    }
}

/* What a warp's lane computes of 16 rows by 8 NT columns: rows g and g + 8, of every 8 columns two. Element i of a quadruple lies
 * in row g + 8 (i / 2) and in column 8 j + column_of(i % 2). */
template <enum arithmetic ARITHMETIC> __device__ static __forceinline__ int column_of(int half)
{
    const int q = (int)threadIdx.x % 4;
    return ARITHMETIC == FFMA ? q + 4 * half : 2 * q + half;
}

__device__ static __forceinline__ void pair(uint32_t (&to)[2], const float *from)
{
    const float2 v = *(const float2 *)from;
    to[0] = ps_tf32(v.x);
    to[1] = ps_tf32(v.y);
}

__device__ static __forceinline__ void multiply(float (&to)[4], const uint32_t (&upper)[2], const uint32_t (&lower)[2],
                                                const uint32_t (&b)[2])
{
    const uint32_t words[4] = {upper[0], lower[0], upper[1], lower[1]};
    ps_mma_tf32(to, words, b[0], b[1], to);
}

/* sum [16, 8 NT] += a [16, 8 KS] b'; b [8 NT, 8 KS]; both row by row. a is the warp's first row. */
template <enum arithmetic ARITHMETIC, int NT, int KS>
__device__ static __forceinline__ void add_product_turned(float (&sum)[NT][4], const float *a, int lda, const float *b, int ldb)
{
    const int g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
    if constexpr (ARITHMETIC == FFMA) {
        a += g * lda;
        b += q * ldb;
#pragma unroll 2
        for (int k = 0; k < 8 * KS; k += 2) {
            const float2 upper = *(const float2 *)(a + k), lower = *(const float2 *)(a + 8 * lda + k);
#pragma unroll
            for (int j = 0; j < 2 * NT; j++) {
                const float2 v = *(const float2 *)(b + j * 4 * ldb + k);
                sum[j / 2][j % 2] = fmaf(upper.y, v.y, fmaf(upper.x, v.x, sum[j / 2][j % 2]));
                sum[j / 2][2 + j % 2] = fmaf(lower.y, v.y, fmaf(lower.x, v.x, sum[j / 2][2 + j % 2]));
            }
        }
    } else {
        a += g * lda + 2 * q;
        b += g * ldb + 2 * q;
#pragma unroll
        for (int k = 0; k < KS; k++) {
            uint32_t upper[2], lower[2];
            pair(upper, a + k * 8);
            pair(lower, a + 8 * lda + k * 8);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                uint32_t v[2];
                pair(v, b + j * 8 * ldb + k * 8);
                multiply(sum[j], upper, lower, v);
            }
        }
    }
}

/* sum [16, 8 NT] += a [16, 8 KS] b; b [8 KS, 8 NT]; both row by row. */
template <enum arithmetic ARITHMETIC, int NT, int KS>
__device__ static __forceinline__ void add_product(float (&sum)[NT][4], const float *a, int lda, const float *b, int ldb)
{
    const int lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if constexpr (ARITHMETIC == FFMA) {
        a += g * lda;
        b += q;
#pragma unroll 2
        for (int k = 0; k < 8 * KS; k += 2) {
            const float2 upper = *(const float2 *)(a + k), lower = *(const float2 *)(a + 8 * lda + k);
#pragma unroll
            for (int j = 0; j < 2 * NT; j++) {
                const float first = b[k * ldb + j * 4], second = b[(k + 1) * ldb + j * 4];
                sum[j / 2][j % 2] = fmaf(upper.y, second, fmaf(upper.x, first, sum[j / 2][j % 2]));
                sum[j / 2][2 + j % 2] = fmaf(lower.y, second, fmaf(lower.x, first, sum[j / 2][2 + j % 2]));
            }
        }
    } else {
        a += g * lda + 2 * q;
        b += 2 * q * ldb + g;
#pragma unroll
        for (int k = 0; k < KS; k++) {
            uint32_t upper[2], lower[2];
            pair(upper, a + k * 8);
            pair(lower, a + 8 * lda + k * 8);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const uint32_t v[2] = {ps_tf32(b[k * 8 * ldb + j * 8]), ps_tf32(b[(k * 8 + 1) * ldb + j * 8])};
                multiply(sum[j], upper, lower, v);
            }
        }
    }
}

template <int NT> __device__ static __forceinline__ void clear(float (&sum)[NT][4])
{
#pragma unroll
    for (int i = 0; i < NT * 4; i++) {
        sum[i / 4][i % 4] = 0.0f;
    }
}

/* The warp's scores to its lines of shared memory, as an operand of the next product. */
template <enum arithmetic ARITHMETIC> __device__ static __forceinline__ void put_scores(float *to, const float (&sum)[TILE / 8][4])
{
    const int g = (int)threadIdx.x % 32 / 4;
    __syncwarp(); /* the product before has read them */
#pragma unroll
    for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float *at = to + (g + r * 8) * score_ld + j * 8 + column_of<ARITHMETIC>(0);
            if constexpr (ARITHMETIC == TF32) {
                *(float2 *)at = make_float2(sum[j][r * 2], sum[j][r * 2 + 1]);
            } else {
                at[0] = sum[j][r * 2];
                at[4] = sum[j][r * 2 + 1];
            }
        }
    }
    __syncwarp();
}

/* 16 rows from row0 on, times a factor for each of the lane's two, to global memory, or added to what is there. */
template <enum arithmetic ARITHMETIC, int ET, typename T>
__device__ static __forceinline__ void put_rows(T *to, int64_t stride, const struct columns columns, bool accumulate,
                                                const float (&sum)[ET][4], int row0, float upper, float lower,
                                                const struct ps_attention_launch &x)
{
    const int g = (int)threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < ET * 4; i++) {
        const int row = row0 + g + i % 4 / 2 * 8, column = i / 4 * 8 + column_of<ARITHMETIC>(i % 2);
        if (row < x.patches && column < columns.count) {
            T *at = to + row * stride + columns(column);
            const float value = sum[i / 4][i % 4] * (i % 4 / 2 ? lower : upper);
            ps_put(at, accumulate ? value + ps_float(*at) : value);
        }
    }
}

/* The block's matrix and first row. Grid: S h tiles, a matrix's tiles side by side. */
struct place {
    int sequence, head, row0;
    int64_t sums; /* of the matrix in logsum and delta */
    __device__ place(const struct ps_attention_launch &x)
    {
        const int matrix = (int)blockIdx.x / x.tiles;
        row0 = ((int)blockIdx.x - matrix * x.tiles) * TILE;
        sequence = matrix / x.heads;
        head = matrix - sequence * x.heads;
        sums = (int64_t)matrix * x.patches;
    }
};

template <enum arithmetic ARITHMETIC, int ET>
__global__ void __launch_bounds__(THREADS) attention_kernel(const __grid_constant__ struct ps_attention_launch x)
{
    extern __shared__ float4 shared_memory[];
    constexpr int LD = tile_ld<ET>;
    float *q = (float *)shared_memory, *k = q + tile_elements<ET>, *v = k + tile_elements<ET>;
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4;
    float *scores = v + tile_elements<ET> + warp * 16 * score_ld;
    const struct place p(x);
    const float *from_k = rows_of(x.k, p.sequence, p.head), *from_v = rows_of(x.v, p.sequence, p.head);
    load_tile<ET>(q, rows_of(x.q, p.sequence, p.head), x.q.row, columns(x, x.q), p.row0, x);
    const float factor = x.scale * PS_LOG2_E;
    float out[ET][4], max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    clear(out);
    for (int key0 = 0; key0 < x.patches; key0 += TILE) {
        load_tile<ET>(k, from_k, x.k.row, columns(x, x.k), key0, x);
        load_tile<ET>(v, from_v, x.v.row, columns(x), key0, x);
        ps_copy_wait();
        __syncthreads();
        float s[TILE / 8][4];
        clear(s);
        add_product_turned<ARITHMETIC, TILE / 8, ET>(s, q + warp * 16 * LD, LD, k, LD);
        float most[2] = {max[0], max[1]};
#pragma unroll
        for (int i = 0; i < TILE / 8 * 4; i++) {
            float &value = s[i / 4][i % 4];
            value = key0 + i / 4 * 8 + column_of<ARITHMETIC>(i % 2) < x.patches ? value * factor : -INFINITY;
            most[i % 4 / 2] = fmaxf(most[i % 4 / 2], value);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = ps_group_max<4>(most[r]); /* of a key at least: finite */
            const float rescale = exp2f(max[r] - most[r]);
            max[r] = most[r];
            sum[r] *= rescale;
#pragma unroll
            for (int j = 0; j < ET; j++) {
                out[j][r * 2] *= rescale;
                out[j][r * 2 + 1] *= rescale;
            }
        }
#pragma unroll
        for (int i = 0; i < TILE / 8 * 4; i++) {
            float &value = s[i / 4][i % 4];
            value = exp2f(value - max[i % 4 / 2]);
            sum[i % 4 / 2] += value;
        }
        put_scores<ARITHMETIC>(scores, s);
        add_product<ARITHMETIC, ET, TILE / 8>(out, scores, score_ld, v, LD);
        __syncthreads(); /* k and v are read */
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] = ps_group_sum<4>(sum[r]);
        const int row = p.row0 + warp * 16 + g + r * 8;
        if (threadIdx.x % 4 == 0 && row < x.patches) {
            x.logsum[p.sums + row] = (max[r] + log2f(sum[r])) / PS_LOG2_E;
        }
    }
    put_rows<ARITHMETIC, ET>(rows_of(x.mixed, p.sequence, p.head), x.mixed.row, columns(x), false, out, p.row0 + warp * 16,
                             1.0f / sum[0], 1.0f / sum[1], x);
}

/* dq, and delta on the way. */
template <enum arithmetic ARITHMETIC, int ET>
__global__ void __launch_bounds__(THREADS) query_gradient_kernel(const __grid_constant__ struct ps_attention_launch x)
{
    extern __shared__ float4 shared_memory[];
    constexpr int LD = tile_ld<ET>;
    float *q = (float *)shared_memory, *up = q + tile_elements<ET>, *k = up + tile_elements<ET>, *v = k + tile_elements<ET>;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4;
    float *scores = v + tile_elements<ET> + warp * 16 * score_ld;
    const struct place p(x);
    const float *from_k = rows_of(x.k, p.sequence, p.head), *from_v = rows_of(x.v, p.sequence, p.head);
    load_tile<ET>(q, rows_of(x.q, p.sequence, p.head), x.q.row, columns(x, x.q), p.row0, x);
    load_tile<ET>(up, rows_of(x.d_mixed, p.sequence, p.head), x.d_mixed.row, columns(x), p.row0, x);
    ps_copy_wait();
    __syncthreads();
    const int own = p.row0 + warp * 16 + lane / 2; /* two lanes a row */
    float sum = 0.0f;
    if (own < x.patches) {
        const float *mixed = rows_of(x.mixed, p.sequence, p.head) + own * x.mixed.row;
        for (int i = lane % 2; i < x.e; i += 2) {
            sum = fmaf(ps_float(mixed[i]), ps_float(up[(warp * 16 + lane / 2) * LD + i]), sum);
        }
    }
    sum = ps_group_sum<2>(sum);
    if (own < x.patches && lane % 2 == 0) {
        x.delta[p.sums + own] = sum;
    }
    const float factor = x.scale * PS_LOG2_E;
    float delta[2], logsum[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = p.row0 + warp * 16 + g + r * 8;
        delta[r] = __shfl_sync(0xffffffffu, sum, (g + r * 8) * 2);
        logsum[r] = row < x.patches ? x.logsum[p.sums + row] * PS_LOG2_E : INFINITY;
    }
    float out[ET][4];
    clear(out);
    for (int key0 = 0; key0 < x.patches; key0 += TILE) {
        load_tile<ET>(k, from_k, x.k.row, columns(x, x.k), key0, x);
        load_tile<ET>(v, from_v, x.v.row, columns(x), key0, x);
        ps_copy_wait();
        __syncthreads();
        float s[TILE / 8][4], d[TILE / 8][4];
        clear(s);
        clear(d);
        add_product_turned<ARITHMETIC, TILE / 8, ET>(s, q + warp * 16 * LD, LD, k, LD);
        add_product_turned<ARITHMETIC, TILE / 8, ET>(d, up + warp * 16 * LD, LD, v, LD);
#pragma unroll
        for (int i = 0; i < TILE / 8 * 4; i++) {
            float &value = s[i / 4][i % 4];
            const bool inside = key0 + i / 4 * 8 + column_of<ARITHMETIC>(i % 2) < x.patches;
            value = inside ? exp2f(fmaf(value, factor, -logsum[i % 4 / 2])) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < TILE / 8 * 4; i++) {
            s[i / 4][i % 4] *= d[i / 4][i % 4] - delta[i % 4 / 2];
        }
        put_scores<ARITHMETIC>(scores, s);
        add_product<ARITHMETIC, ET, TILE / 8>(out, scores, score_ld, k, LD);
        __syncthreads();
    }
    put_rows<ARITHMETIC, ET>(rows_of(x.dq, p.sequence, p.head), x.dq.row, columns(x, x.dq), x.accumulate, out, p.row0 + warp * 16,
                             x.scale, x.scale, x);
}

/* dk and dv: rows of a tile of scores are keys, its columns queries. */
template <enum arithmetic ARITHMETIC, int ET>
__global__ void __launch_bounds__(THREADS) key_gradient_kernel(const __grid_constant__ struct ps_attention_launch x)
{
    extern __shared__ float4 shared_memory[];
    __shared__ float logsum[TILE], delta[TILE];
    constexpr int LD = tile_ld<ET>;
    float *q = (float *)shared_memory, *up = q + tile_elements<ET>, *k = up + tile_elements<ET>, *v = k + tile_elements<ET>;
    const int warp = (int)threadIdx.x / 32;
    float *scores = v + tile_elements<ET> + warp * 16 * score_ld;
    const struct place p(x);
    const float *from_q = rows_of(x.q, p.sequence, p.head);
    const float *from_up = rows_of(x.d_mixed, p.sequence, p.head);
    load_tile<ET>(k, rows_of(x.k, p.sequence, p.head), x.k.row, columns(x, x.k), p.row0, x);
    load_tile<ET>(v, rows_of(x.v, p.sequence, p.head), x.v.row, columns(x), p.row0, x);
    const float factor = x.scale * PS_LOG2_E;
    float dk[ET][4], dv[ET][4];
    clear(dk);
    clear(dv);
    for (int query0 = 0; query0 < x.patches; query0 += TILE) {
        load_tile<ET>(q, from_q, x.q.row, columns(x, x.q), query0, x);
        load_tile<ET>(up, from_up, x.d_mixed.row, columns(x), query0, x);
        if ((int)threadIdx.x < TILE) {
            const int row = query0 + (int)threadIdx.x;
            logsum[threadIdx.x] = row < x.patches ? x.logsum[p.sums + row] * PS_LOG2_E : INFINITY; /* a score of 0 */
            delta[threadIdx.x] = row < x.patches ? x.delta[p.sums + row] : 0.0f;
        }
        ps_copy_wait();
        __syncthreads();
        float s[TILE / 8][4], d[TILE / 8][4];
        clear(s);
        clear(d);
        add_product_turned<ARITHMETIC, TILE / 8, ET>(s, k + warp * 16 * LD, LD, q, LD);
        add_product_turned<ARITHMETIC, TILE / 8, ET>(d, v + warp * 16 * LD, LD, up, LD);
#pragma unroll
        for (int i = 0; i < TILE / 8 * 4; i++) {
            const int column = i / 4 * 8 + column_of<ARITHMETIC>(i % 2);
            s[i / 4][i % 4] = exp2f(fmaf(s[i / 4][i % 4], factor, -logsum[column]));
            d[i / 4][i % 4] = s[i / 4][i % 4] * (d[i / 4][i % 4] - delta[column]);
        }
        put_scores<ARITHMETIC>(scores, s);
        add_product<ARITHMETIC, ET, TILE / 8>(dv, scores, score_ld, up, LD);
        put_scores<ARITHMETIC>(scores, d);
        add_product<ARITHMETIC, ET, TILE / 8>(dk, scores, score_ld, q, LD);
        __syncthreads();
    }
    put_rows<ARITHMETIC, ET>(rows_of(x.dk, p.sequence, p.head), x.dk.row, columns(x, x.dk), x.accumulate, dk, p.row0 + warp * 16,
                             x.scale, x.scale, x);
    put_rows<ARITHMETIC, ET>(rows_of(x.dv, p.sequence, p.head), x.dv.row, columns(x), false, dv, p.row0 + warp * 16, 1.0f, 1.0f, x);
}

/* ---- launching ---- */

typedef void attention_kernel_type(struct ps_attention_launch);

template <enum arithmetic ARITHMETIC, int ET>
static enum ps_status launch_width(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                   unsigned blocks, bool backward)
{
    const int forward_bytes = (3 * tile_elements<ET> + score_elements) * (int)sizeof(float);
    const int backward_bytes = (4 * tile_elements<ET> + score_elements) * (int)sizeof(float);
    attention_kernel_type *const kernels[3] = {attention_kernel<ARITHMETIC, ET>, query_gradient_kernel<ARITHMETIC, ET>,
                                               key_gradient_kernel<ARITHMETIC, ET>};
    for (int i = backward ? 1 : 0; i < (backward ? 3 : 1); i++) {
        const int bytes = backward ? backward_bytes : forward_bytes; /* at most 92 KiB: every device since sm_80 has them */
        PS_TRY(ps_cuda_allow_shared((const void *)kernels[i], bytes, op));
        kernels[i]<<<blocks, THREADS, (size_t)bytes, c->stream>>>(x);
        PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    }
    return PS_OK;
}

template <enum arithmetic ARITHMETIC>
static enum ps_status launch_arithmetic(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x,
                                        unsigned blocks, bool backward)
{
    return x.columns <= 8    ? launch_width<ARITHMETIC, 1>(c, op, x, blocks, backward)
           : x.columns <= 16 ? launch_width<ARITHMETIC, 2>(c, op, x, blocks, backward)
           : x.columns <= 32 ? launch_width<ARITHMETIC, 4>(c, op, x, blocks, backward)
                             : launch_width<ARITHMETIC, 8>(c, op, x, blocks, backward);
}

bool ps_cuda_attention_tiled_wanted(const struct ps_kernels *k, const struct ps_attention_call *call)
{
    return k->real == PS_F32;
}

static enum ps_status launch(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call, bool backward)
{
    const struct ps_cuda_context *c = ps_cuda(k);
    const struct ps_attention_launch &x = call->x;
    const unsigned blocks = (unsigned)(x.matrices * x.tiles);
    return k->precision == PS_TF32 ? launch_arithmetic<TF32>(c, op, x, blocks, backward)
                                   : launch_arithmetic<FFMA>(c, op, x, blocks, backward);
}

enum ps_status ps_cuda_attention_tiled(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return launch(k, op, call, false);
}

enum ps_status ps_cuda_attention_tiled_backward(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    return launch(k, op, call, true);
}
