/* The head and the loss of a training step at the end of a resident encoder's forward: what ends/head.cu's head_step does, with the
 * same roundings, by blocks that have whole sequences in their registers. dz, which backward begins with, dx and a block's sums of
 * dx and of the squared errors go to memory; W_h and the targets were fetched before.
 *
 * encoder/resident/d16_e4_f128.cu (d 16, a sequence in three tiles, H up to 96): x' = W_h' z' and dz' = W_h dx' by mma.sync with
 * the block's sequences, up to 8, as the columns; the units share the sum over patches. Shared memory: W_h.
 * encoder/resident/d64_short.cu (H up to 8): sums of products in registers. Flops: 4 S N d H. */
#ifndef PS_KERNELS_CUDA_ENCODER_HEAD_CUH
#define PS_KERNELS_CUDA_ENCODER_HEAD_CUH

#include "kernels/cuda/encoder/embed.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace ps_resident
{

/* What kernels are told of it. */
template <class T> static void head_step_make(const struct ps_encoder_request *e, encoder_head<T> *x)
{
    const struct ps_head_step *h = e->head;
    if (h) {
        x->weight = (const T *)h->weight.data;
        x->bias = (const float *)h->bias.data;
        x->targets = ps_windows_of(&h->targets, &h->indices);
        x->dx = (T *)h->dx.data;
        x->dz = (T *)h->dz.data;
        x->partials = (double *)h->partials.data;
        x->rows = (int)h->partials.size[0];
        x->horizon = (int)e->pred_len;
        x->scale = (float)(2.0 * ps_gradient_scale(h->gradient_scale) / ((double)e->sequences * (double)e->pred_len));
    }
}

/* A row of the partial sums a block, zeros in those of no block: sums[t], the last the squared errors'. */
template <class T> static __device__ __forceinline__ void put_head_sum(const encoder<T> &x, int t, double sum)
{
#pragma unroll 1
    for (int row = (int)blockIdx.x; row < x.head.rows; row += (int)gridDim.x) {
        x.head.partials[row * (int64_t)(x.head.horizon + 1) + t] = row == (int)blockIdx.x ? sum : 0.0;
    }
}

/* dx and the squared error of a forecast. */
template <class T>
static __device__ __forceinline__ float head_slope(const encoder<T> &x, float product, float bias, float target, float mean,
                                                   float std, double *square)
{
    const float error = (product + bias) * std + mean - target;
    *square = (double)error * error;
    return x.head.scale * std * error;
}

/* ---- encoder/resident/d16_e4_f128.cu ---- */

enum { HEAD_COLUMNS = 96, HEAD_PITCH = HEAD_COLUMNS + 8, HEAD_SEQUENCES = 8, HEAD_PART = HEAD_COLUMNS + 4 };

template <int NT> static __host__ __device__ constexpr int head_z_pitch()
{
    return NT * 16 * 16 + 8;
}

/* Bytes for W_h [16 N, pitch] and a target a thread; and for z, the units' parts of x, and dx, where the units' buffers lie. */
static inline size_t head_bytes_d16(int n, int units)
{
    return (size_t)n * 16 * HEAD_PITCH * sizeof(uint16_t) + (size_t)units * HEAD_COLUMNS * sizeof(float);
}

template <int NT> static constexpr size_t head_scratch_d16(int units)
{
    return (size_t)HEAD_SEQUENCES * (head_z_pitch<NT>() + HEAD_PITCH) * sizeof(uint16_t) +
           (size_t)units * HEAD_SEQUENCES * HEAD_PART * sizeof(float);
}

/* Begins to copy W_h, and keeps the thread's target: of the unit's sequence, a column a thread (NT 3). */
template <int D, int NT, class T>
static __device__ __forceinline__ void stage_head_d16(const encoder<T> &x, T *weight, float target)
{
    const int horizon = x.head.horizon, rows = x.n * D, zeros = (HEAD_COLUMNS - horizon) / 8;
    stage_matrix(weight, HEAD_PITCH, x.head.weight, rows, horizon / 8);
    for (int i = (int)threadIdx.x; i < rows * zeros; i += (int)blockDim.x) {
        *(uint4 *)(weight + i / zeros * HEAD_PITCH + horizon + i % zeros * 8) = make_uint4(0, 0, 0, 0);
    }
    ((float *)(weight + rows * HEAD_PITCH))[threadIdx.x] = target;
}

/* u: the warp's rows of the last layer's output; u0: the block's first unit, all of whose warps take part; `scratch` is the units'
 * buffers. The warp's place is found anew: kept through the layers it would fill the registers. */
template <int D, int NT, class T>
static __device__ __forceinline__ void head_d16(const float (&u)[2][4], const encoder<T> &x, T *scratch, const T *weight,
                                                int64_t u0)
{
    static_assert(D == 16 && NT == 3, "a column of the forecast a thread of the unit");
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    place<T, D, NT> at(thread);
    at.take(x, u0 + at.unit);
    constexpr int Z = head_z_pitch<NT>(), STEPS = HEAD_COLUMNS / 16;
    T *const z = scratch, *const dx = z + HEAD_SEQUENCES * Z;                                     /* [8][Z], [8][HEAD_PITCH] */
    float *const parts = (float *)(dx + HEAD_SEQUENCES * HEAD_PITCH), *const slopes = (float *)z; /* [units][8][..], [8][96] */
    double *const squares = (double *)(slopes + HEAD_SEQUENCES * HEAD_COLUMNS);
    const int warp = thread / 32, warps = (int)blockDim.x / 32, column = at.tile * 32 + at.lane;
    const int64_t sequence = u0 + at.unit;
    const bool mine = sequence < x.units && column < x.head.horizon;
    uint32_t a[4];
    pack_operand<T>(a, u[0], u[1]);
    __syncthreads(); /* all units have done with their buffers */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (at.here[i % 2]) {
            *(uint32_t *)(z + at.unit * Z + (at.row + at.g + i % 2 * 8) * D + i / 2 * 8 + at.q * 2) = a[i];
        }
    }
    for (int i = thread; i < HEAD_SEQUENCES * HEAD_PITCH / 8; i += (int)blockDim.x) {
        *((uint4 *)dx + i) = make_uint4(0, 0, 0, 0);
    }
    const float mean = x.embed.mean[mine ? sequence : 0], std = x.embed.std[mine ? sequence : 0];
    const float bias = x.head.bias[mine ? column : 0];
    ps_copy_wait();
    __syncthreads();
    {
        float c[2][4];
        clear(c);
        const T *const pa = weight + at.other * HEAD_PITCH + at.tile * 32 + at.across, *const pb = z + at.lane % 8 * Z + at.across;
        for (int k = at.unit; k < x.n; k += x.block_units) {
            uint32_t b[2];
            ps_ldmatrix2(b, pb + k * D);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ps_ldmatrix4_transposed(a, pa + k * D * HEAD_PITCH + i * 16);
                ps_mma16<T>(c[i], a, b[0], b[1], c[i]);
            }
        }
        float *const part = parts + (at.unit * HEAD_SEQUENCES + at.q * 2) * HEAD_PART + at.tile * 32 + at.g;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            part[i % 2 * HEAD_PART + i / 4 * 16 + i % 4 / 2 * 8] = c[i / 4][i % 4];
        }
    }
    __syncthreads();
    double square = 0.0;
    float slope = 0.0f;
    if (mine) {
        const float *const part = parts + at.unit * HEAD_PART + column;
        float product = part[0];
        for (int i = 1; i < x.block_units; i++) {
            product += part[i * HEAD_SEQUENCES * HEAD_PART];
        }
        const float target = *((const float *)(weight + x.n * D * HEAD_PITCH) + thread);
        slope = head_slope(x, product, bias, target, mean, std, &square);
        ps_put(x.head.dx + sequence * x.head.horizon + column, slope);
        ps_put(dx + at.unit * HEAD_PITCH + column, slope);
    }
    slopes[thread] = slope;
    square = ps_group_sum<32>(square);
    if (at.lane == 0) {
        squares[warp] = square;
    }
    __syncthreads();
    if (at.unit == 0 && column < x.head.horizon) {
        double sum = 0.0;
        for (int i = 0; i < x.block_units; i++) {
            sum += slopes[i * HEAD_COLUMNS + column];
        }
        put_head_sum(x, column, sum);
    }
    if (thread == blockDim.x - 1) {
        double sum = 0.0;
        for (int i = 0; i < warps; i++) {
            sum += squares[i];
        }
        put_head_sum(x, x.head.horizon, sum);
    }
    uint32_t b[STEPS][2];
#pragma unroll
    for (int i = 0; i < STEPS; i += 2) {
        ps_ldmatrix4(a, dx + at.lane % 8 * HEAD_PITCH + at.lane / 8 * 8 + i * 16);
        b[i][0] = a[0];
        b[i][1] = a[1];
        b[i + 1][0] = a[2];
        b[i + 1][1] = a[3];
    }
    for (int k = warp; k < x.n; k += warps) {
        float c[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            ps_ldmatrix4(a, weight + (k * D + at.near) * HEAD_PITCH + i * 16 + at.far);
            ps_mma16<T>(c, a, b[i][0], b[i][1], c);
        }
        /* Transposed, a lane has two neighbouring elements of sequence g. */
        const uint32_t low = ps_movmatrix(ps_pack<T>(c[0], c[1])), high = ps_movmatrix(ps_pack<T>(c[2], c[3]));
        if (at.g < x.block_units && u0 + at.g < x.units) {
            T *const to = x.head.dz + ((u0 + at.g) * x.n + k) * D + at.q * 2;
            *(uint32_t *)to = low;
            *(uint32_t *)(to + 8) = high;
        }
    }
}

/* ---- encoder/resident/d64_short.cu: four units of 16 rows, 64 columns ---- */

enum { D64_HORIZON = 8, D64_HEAD_UNITS = 4 };

static inline size_t head_bytes_d64(int n, int horizon)
{
    return (size_t)n * 64 * (size_t)horizon * sizeof(uint16_t);
}

/* Begins to copy W_h. */
template <class T> static __device__ __forceinline__ void stage_head_d64(const encoder<T> &x, T *weight)
{
    for (int i = (int)threadIdx.x * 8; i < x.n * 64 * x.head.horizon; i += (int)blockDim.x * 8) {
        ps_copy_async(weight + i, x.head.weight + i);
    }
}

/* u: the warp's 16 rows and columns of the last layer's output; parts: [4 shares][64 rows][H] and more, of 16 KB; target: the
 * thread's. */
template <typename AT, class T>
static __device__ __forceinline__ void head_d64(const float (&u)[2][4], const encoder<T> &x, float *parts, const T *weight,
                                                int64_t u0, float target, const AT &at)
{
    const int horizon = x.head.horizon, sequences = x.embed.sequences, count = D64_HEAD_UNITS * sequences * horizon;
    float *const rounded = parts + 4 * 64 * D64_HORIZON, *const slopes = rounded + 64 * D64_HORIZON;
    double *const squares = (double *)(slopes + 64 * D64_HORIZON);
    const int thread = (int)threadIdx.x, s = thread / horizon, column = thread - s * horizon;
    const uint32_t sequence = (uint32_t)u0 * sequences + s;
    const bool mine = thread < count && sequence < x.embed.all;
    const float mean = x.embed.mean[mine ? sequence : 0], std = x.embed.std[mine ? sequence : 0];
    const float bias = x.head.bias[mine ? column : 0];
    int of[2]; /* the row's sequence in the unit */
    const T *w[2];
    uint32_t words[4];
    float v[2][4];
    pack_operand<T>(words, u[0], u[1]);
    unpack_operand<T>(v, words);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = at.here[h] ? at.g + 8 * h : 0;
        of[h] = (int)ps_divide(i, x.embed.by_count);
        w[h] = weight + ((i - of[h] * x.n) * 64 + at.share * 16 + at.q * 2) * horizon;
    }
#pragma unroll 1
    for (int t = 0; t < horizon; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum += v[i / 2][2 * h + i % 2] * ps_float(w[h][(i / 2 * 8 + i % 2) * horizon + t]);
            }
            sum = ps_quad_sum(sum);
            if (at.q == 0) {
                parts[(at.share * 64 + at.unit * 16 + at.g + 8 * h) * horizon + t] = sum;
            }
        }
    }
    __syncthreads();
    double square = 0.0;
    float slope = 0.0f;
    if (mine) {
        const int unit = s / sequences;
        const float *const part = parts + (unit * 16 + (s - unit * sequences) * x.n) * horizon + column;
        float product = 0;
#pragma unroll 1
        for (int n = 0; n < x.n; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                product += part[(i * 64 + n) * horizon];
            }
        }
        slope = head_slope(x, product, bias, target, mean, std, &square);
        ps_put(x.head.dx + (int64_t)sequence * horizon + column, slope);
    }
    if (thread < count) {
        slopes[thread] = slope;
        T as_kept;
        ps_put(&as_kept, slope);
        rounded[thread] = ps_float(as_kept);
        squares[thread] = square;
    }
    __syncthreads();
    float d[2][4];
    clear(d);
#pragma unroll 1
    for (int t = 0; t < horizon; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float by = rounded[(at.unit * sequences + of[h]) * horizon + t];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                d[i / 2][2 * h + i % 2] += by * ps_float(w[h][(i / 2 * 8 + i % 2) * horizon + t]);
            }
        }
    }
    store_rows(x.head.dz, d, at);
    const int warp = thread / 32; /* a column's sum a warp, the last the squared errors' */
    if (warp <= horizon) {
        double sum = 0.0;
#pragma unroll 1
        for (int i = at.lane; i * (warp < horizon ? horizon : 1) < count; i += 32) {
            sum += warp < horizon ? (double)slopes[i * horizon + warp] : squares[i];
        }
        sum = ps_group_sum<32>(sum);
        if (at.lane == 0) {
            put_head_sum(x, warp, sum);
        }
    }
}

} // namespace ps_resident

#endif
