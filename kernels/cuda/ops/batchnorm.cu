/* BatchNorm over rows (Ioffe and Szegedy 2015): batchnorm_statistics, bias_residual_statistics, batchnorm_join, batchnorm.
 *
 * Why: the columns are few (16 to 1024) and the rows many (up to 900,000), so a block takes up to 128 columns and a share of the
 * rows, and a thread keeps its columns' sums in registers: of differences from the block's first row, merged by Chan's formula
 * (Chan, Golub and LeVeque 1983). No mean is ever added to a pivot in float, so that a mean far from 0 takes no bits from the
 * variance. The last block of a tile of columns to finish merges the shares in double, in a fixed order: no kernel is launched for
 * that. batchnorm goes from the last rows to the first: the second-level cache still holds the last ones.
 *
 * Memory bounds all. Bytes, in float and half of them in 16 bits: batchnorm_statistics (mean, var =, the running ones moved) 4 R d,
 * flops 4 R d; bias_residual_statistics (y = besides) 12 R d, flops 7 R d; batchnorm (y =) 8 R d, flops 4 R d. Besides, 8 d for
 * each block's partial row (L2). batchnorm_join (mean, var =, the running ones moved) 8 d for each rank, flops 8 d. */
#include "kernels/cuda/ops/columns.cuh"
#include "kernels/cuda/tile/dropout.cuh"

template <typename T> static __device__ __forceinline__ float rounded(float x)
{
    T y;
    ps_put(&y, x);
    return ps_float(y);
}

/* ---- statistics ---- */

struct statistics {
    float *mean, *var, *running_mean, *running_var, *partials;
    unsigned *tickets;
    double momentum;
};

/* Rows below `length` that are `ty` modulo `height`, a power of two. */
static __device__ __forceinline__ float rows_of(int length, int ty, int height)
{
    return length > ty ? (float)((length - ty + height - 1) / height) : 0.0f;
}

/* The block's partial row: its pivot, and from its threads' the sum of differences from it and M2. */
template <int VEC>
static __device__ __forceinline__ void merge_block(float *partials, const float (&pivot)[VEC], const float (&sum)[VEC],
                                                   const float (&squares)[VEC], const place<VEC> &at, int length,
                                                   const struct sharing &s, float *shared)
{
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        shared[j * block + threadIdx.x] = sum[j];
        shared[(VEC + j) * block + threadIdx.x] = squares[j];
    }
    __syncthreads();
    for (int half = s.height / 2; half > 0; half /= 2) {
        if (at.ty < half && at.ty + half < length) {
            const float mine = rows_of(length, at.ty, 2 * half), other = rows_of(length, at.ty + half, 2 * half);
            const float weight = mine * other / (mine + other);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                float *const to = shared + j * block + threadIdx.x, *const from = to + (half << s.tx_bits);
                const float difference = *from / other - *to / mine;
                *to += *from;
                to[VEC * block] += from[VEC * block] + difference * difference * weight;
            }
        }
        __syncthreads();
    }
    if (at.ty == 0 && at.inside) {
        float *const to = partials + (int64_t)at.share * 3 * s.d + at.column;
        float out[VEC];
        ps_store<VEC>(to, pivot);
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                out[j] = shared[(i * VEC + j) * block + threadIdx.x];
            }
            ps_store<VEC>(to + (i + 1) * s.d, out);
        }
    }
}

/* mean and var of n rows; the running ones move unless one is not finite. */
static __device__ __forceinline__ void put_statistics(float *to_mean, float *to_var, float *running_mean, float *running_var,
                                                      double mean, double var, double n, double momentum)
{
    *to_mean = (float)mean;
    *to_var = (float)var;
    if (isfinite((float)mean) && isfinite((float)var)) {
        *running_mean += (float)(momentum * (mean - *running_mean));
        *running_var += (float)(momentum * (var * (n / (n - 1.0)) - *running_var));
    }
}

/* By the last block of a tile: mean and var of its columns. */
template <int VEC>
static __device__ __forceinline__ void finish_statistics(const struct statistics &m, const struct sharing &s, int tile,
                                                         double *shared)
{
    constexpr int fv = final_vec<VEC>;
    const int bits = s.tx_bits + final_bits<VEC>, tx = threadIdx.x & ((1 << bits) - 1), ty = threadIdx.x >> bits;
    const int column = ((tile << bits) + tx) * fv;
    double first[fv], second[fv];
    float origin[fv];
    add_shares<fv, true>(first, second, origin, m.partials, s, column, ty, bits, shared);
    if (ty > 0 || column >= s.d) {
        return;
    }
#pragma unroll
    for (int j = 0; j < fv; j++) {
        const double n = (double)s.rows, away = first[j] / n, mean = origin[j] + away;
        double var = second[j] / n - away * away;
        var = var < 0.0 ? 0.0 : var; /* what is not a number stays that */
        const int i = column + j;
        put_statistics(m.mean + i, m.var + i, m.running_mean + i, m.running_var + i, mean, var, n, m.momentum);
    }
}

/* What bias_residual_statistics adds; of batchnorm_statistics x alone is there. y may be x or residual. */
template <typename T> struct added {
    T *y;
    const T *x, *residual;
    const float *bias;
};

/* Dropout of `flight` rows of VEC elements from its row `turn` on, which the thread holds. All lanes of a warp take part; with VEC
 * 4 d is a multiple of 8 and tx_bits > 0. */
template <int VEC, int FLIGHT>
static __device__ __forceinline__ void drop_rows(float (&v)[FLIGHT][VEC], const place<VEC> &at, int turn, uint64_t step,
                                                 const struct ps_dropout &dropout)
{
    const uint64_t element = (uint64_t)(at.at + turn * at.step), height = (uint64_t)at.step;
    if constexpr (VEC == 4) {
        static_assert(FLIGHT % 2 == 0, "rows are drawn in pairs");
#pragma unroll
        for (int r = 0; r < FLIGHT; r += 2) {
            uint32_t first_words[2], second_words[2];
            ps_draw_pair(dropout, step, (element + r * height) / 8, (element + (r + 1) * height) / 8, first_words, second_words);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                v[r][j] = ps_dropped(dropout, ps_pair_draw(first_words, j), v[r][j]);
                v[r + 1][j] = ps_dropped(dropout, ps_pair_draw(second_words, j), v[r + 1][j]);
            }
        }
    } else {
#pragma unroll
        for (int r = 0; r < FLIGHT; r++) {
            if constexpr (VEC == 1) {
                v[r][0] = ps_dropped(dropout, ps_draw(dropout, step, element + r * height), v[r][0]);
            } else {
                const struct ps_block draws = ps_draws(dropout, step, (uint32_t)((element + r * height) / 8));
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    v[r][j] = ps_dropped(dropout, ps_draw16(&draws, j), v[r][j]);
                }
            }
        }
    }
}

template <typename T, int VEC, bool ADD, bool DROP>
static __global__ void __launch_bounds__(block, resident)
    column_moments(const struct statistics m, const struct added<T> a, const struct sharing s, const struct ps_dropout dropout)
{
    ps_grid_begin();
    constexpr int flight = (VEC == 8 ? 2 : 4) / (ADD && VEC > 1 ? 2 : 1); /* rows whose loads are under way at once */
    __shared__ double shared[2 * final_vec<VEC> * block];
    __shared__ float first_row[most_columns];
    const place<VEC> at(s);
    const uint64_t step = DROP ? dropout.state->step : 0;
    float pivot[VEC], sum[VEC], squares[VEC], bias[VEC];
    zero(sum);
    zero(squares);
    if constexpr (ADD) {
        load_columns(bias, a.bias, at.column, at.inside);
    }
    /* The bound is the block's, so that lanes stay together to draw. */
    for (int turn = 0; turn < s.turns; turn += flight) {
        float v[flight][VEC], residual[ADD ? flight : 1][VEC];
#pragma unroll
        for (int r = 0; r < flight; r++) {
            const int64_t element = at.at + (turn + r) * at.step;
            zero(v[r]);
            if (turn + r < at.count) {
                ps_load<VEC>(v[r], a.x + element);
            }
            if constexpr (ADD) {
                zero(residual[r]);
                if (turn + r < at.count) {
                    ps_load<VEC>(residual[r], a.residual + element);
                }
            }
        }
        if constexpr (ADD) {
#pragma unroll
            for (int r = 0; r < flight; r++) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    v[r][j] += bias[j];
                }
            }
            if constexpr (DROP) {
                drop_rows<VEC, flight>(v, at, turn, step, dropout);
            }
        }
        if constexpr (ADD) {
#pragma unroll
            for (int r = 0; r < flight; r++) {
                if (turn + r < at.count) {
#pragma unroll
                    for (int j = 0; j < VEC; j++) {
                        v[r][j] = rounded<T>(residual[r][j] + v[r][j]);
                    }
                    ps_store<VEC>(a.y + at.at + (turn + r) * at.step, v[r]);
                }
            }
        }
        if (turn == 0) {
            const int from = at.tx * VEC;
            if (at.ty == 0) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    first_row[from + j] = v[0][j];
                }
            }
            __syncthreads();
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                pivot[j] = first_row[from + j];
            }
        }
#pragma unroll
        for (int r = 0; r < flight; r++) {
            if (turn + r < at.count) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    const float difference = v[r][j] - pivot[j];
                    sum[j] += difference;
                    squares[j] += difference * difference;
                }
            }
        }
    }
    const float n = (float)at.count;
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const float left = n > 0.0f ? squares[j] - sum[j] * sum[j] / n : 0.0f;
        squares[j] = left < 0.0f ? 0.0f : left; /* what is not a number stays that */
    }
    merge_block<VEC>(m.partials, pivot, sum, squares, at, share_length(s, at.share), s, (float *)shared);
    if (ps_comes_last(m.tickets + at.tile, (unsigned)s.shares)) {
        finish_statistics<VEC>(m, s, at.tile, shared);
    }
}

/* ---- those of all ranks ---- */

struct joining {
    float *mean, *var, *running_mean, *running_var;
    const float *parts; /* [ranks, 2, d] */
    struct ps_shares shares;
    int64_t rows; /* of a window */
    double momentum;
    int d;
};

/* A thread a column, ranks in their order. */
static __global__ void __launch_bounds__(128) join_columns(const struct joining a)
{
    ps_grid_begin();
    const int i = (int)(blockIdx.x * 128 + threadIdx.x);
    if (i >= a.d) {
        return;
    }
    const double all = (double)(a.shares.windows * a.rows);
    double mean = 0.0, squares = 0.0;
    for (int r = 0; r < a.shares.ranks; r++) {
        const double rows = (double)(ps_share_count(&a.shares, r) * a.rows);
        mean += rows > 0.0 ? rows / all * (double)a.parts[(int64_t)2 * r * a.d + i] : 0.0;
    }
    for (int r = 0; r < a.shares.ranks; r++) {
        const double rows = (double)(ps_share_count(&a.shares, r) * a.rows);
        const float *const part = a.parts + (int64_t)2 * r * a.d + i;
        const double apart = rows > 0.0 ? (double)part[0] - mean : 0.0;
        squares += rows > 0.0 ? rows * ((double)part[a.d] + apart * apart) : 0.0;
    }
    put_statistics(a.mean + i, a.var + i, a.running_mean + i, a.running_var + i, mean, squares / all, all, a.momentum);
}

/* ---- normalisation ---- */

template <typename T> struct normalisation {
    T *y; /* may be x */
    const T *x;
    const float *mean, *var, *gamma, *beta;
    float epsilon;
};

template <typename T, int VEC>
static __global__ void __launch_bounds__(pass_block, pass_resident)
    normalise_columns(const struct normalisation<T> a, const struct sharing s)
{
    constexpr int flight = 4;
    const place<VEC> at(s);
    float mean[VEC], scale[VEC], gamma[VEC], beta[VEC];
    load_columns(gamma, a.gamma, at.column, at.inside); /* the optimiser's */
    load_columns(beta, a.beta, at.column, at.inside);
    ps_grid_begin();
    load_columns(mean, a.mean, at.column, at.inside);
    load_columns(scale, a.var, at.column, at.inside);
    int turn = s.turns - 1;
    int64_t element = at.at + turn * at.step;
    do {
        held<T, VEC> v[flight];
#pragma unroll
        for (int r = 0; r < flight; r++) {
            v[r] = hold<VEC>(a.x + element - r * at.step, turn >= r && turn - r < at.count);
        }
        if (turn == s.turns - 1) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                scale[j] = gamma[j] * rsqrtf(scale[j] + a.epsilon);
            }
        }
#pragma unroll
        for (int r = 0; r < flight; r++) {
            if (turn >= r && turn - r < at.count) {
                float x[VEC];
                unpack<VEC, T>(x, v[r]);
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    x[j] = (x[j] - mean[j]) * scale[j] + beta[j];
                }
                ps_store<VEC>(a.y + element - r * at.step, x);
            }
        }
        turn -= flight;
        element -= flight * at.step;
    } while (turn >= 0);
}

/* ---- the operations ---- */

/* A tensor that a kernel reads or writes by 16 bytes. */
static bool vector_rows(int64_t d, int vec, const struct ps_tensor *const *t, int count)
{
    bool vector = d % vec == 0;
    for (int i = 0; i < count; i++) {
        vector = vector && ps_cuda_aligned(t[i]);
    }
    return vector;
}

template <typename T, int VEC, bool ADD>
static enum ps_status launch_moments(const struct ps_cuda_context *c, const char *op, struct statistics m, const struct added<T> &a,
                                     int64_t rows, int64_t d, const struct ps_dropout &dropout)
{
    struct sharing s;
    PS_TRY(sharing_of_sum(c, op, rows, d, VEC, &s));
    m.partials = (float *)c->workspace;
    m.tickets = c->tiles_done;
    if constexpr (ADD) {
        if (dropout.threshold != 0) {
            ps_cuda_launch(c, column_moments<T, VEC, true, true>, sharing_blocks(s), block, 0, m, a, s, dropout);
            PS_CUDA_LAUNCHED(op);
        }
    }
    ps_cuda_launch(c, column_moments<T, VEC, ADD, false>, sharing_blocks(s), block, 0, m, a, s, dropout);
    PS_CUDA_LAUNCHED(op);
}

/* Checks what both have: the statistics, and x's rows. */
static enum ps_status statistics_make(const char *op, const struct ps_tensor *mean, const struct ps_tensor *var,
                                      const struct ps_tensor *running_mean, const struct ps_tensor *running_var,
                                      const struct ps_tensor *x, enum ps_type real, double momentum, struct statistics *m,
                                      int64_t *rows, int64_t *d)
{
    *d = ps_cuda_width(mean);
    *rows = x->size[0];
    PS_TRY(ps_cuda_expect(op, "x", x, real, *rows * *d));
    PS_TRY(ps_cuda_expect(op, "mean", mean, PS_F32, *d));
    PS_TRY(ps_cuda_expect(op, "var", var, PS_F32, *d));
    PS_TRY(ps_cuda_expect(op, "running_mean", running_mean, PS_F32, *d));
    PS_TRY(ps_cuda_expect(op, "running_var", running_var, PS_F32, *d));
    if (*rows < 2) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld row has no variance, 2 are needed", op, (long long)*rows);
    }
    *m = {(float *)mean->data, (float *)var->data, (float *)running_mean->data, (float *)running_var->data, NULL, NULL, momentum};
    return PS_OK;
}

template <typename T>
static enum ps_status batchnorm_statistics(const struct ps_kernels *k, const struct ps_batchnorm_statistics *a)
{
    const char *op = "batchnorm_statistics";
    struct statistics m;
    int64_t rows, d;
    PS_TRY(statistics_make(op, &a->mean, &a->var, &a->running_mean, &a->running_var, &a->x, ps_type_of<T>, a->momentum, &m, &rows,
                           &d));
    const struct added<T> source = {
        NULL, (const T *)a->x.data, NULL, NULL
    };
    const struct ps_dropout none = {};
    const struct ps_tensor *const t[] = {&a->x};
    return vector_rows(d, ps_vector<T>, t, 1) ? launch_moments<T, ps_vector<T>, false>(ps_cuda(k), op, m, source, rows, d, none)
                                              : launch_moments<T, 1, false>(ps_cuda(k), op, m, source, rows, d, none);
}

extern "C" enum ps_status ps_cuda_batchnorm_statistics(const struct ps_kernels *k, const struct ps_batchnorm_statistics *a)
{
    return PS_BY_REAL(k, batchnorm_statistics, k, a);
}

template <typename T>
static enum ps_status bias_residual_statistics(const struct ps_kernels *k, const struct ps_bias_residual_statistics *a)
{
    const char *op = "bias_residual_statistics";
    struct statistics m;
    int64_t rows, d;
    PS_TRY(statistics_make(op, &a->mean, &a->var, &a->running_mean, &a->running_var, &a->x, ps_type_of<T>, a->momentum, &m, &rows,
                           &d));
    PS_TRY(ps_cuda_expect(op, "y", &a->y, ps_type_of<T>, rows * d));
    PS_TRY(ps_cuda_expect(op, "residual", &a->residual, ps_type_of<T>, rows * d));
    PS_TRY(ps_cuda_expect(op, "bias", &a->bias, PS_F32, d));
    const bool drop = a->dropout.threshold != 0;
    if (drop && !a->dropout.state) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): dropout needs the step's state", op);
    }
    const struct added<T> source = {
        (T *)a->y.data, (const T *)a->x.data, (const T *)a->residual.data, (const float *)a->bias.data
    };
    const struct ps_tensor *const t[] = {&a->y, &a->x, &a->residual};
    return vector_rows(d, drop ? 8 : ps_vector<T>, t, 3)
               ? launch_moments<T, ps_vector<T>, true>(ps_cuda(k), op, m, source, rows, d, a->dropout)
               : launch_moments<T, 1, true>(ps_cuda(k), op, m, source, rows, d, a->dropout);
}

extern "C" enum ps_status ps_cuda_bias_residual_statistics(const struct ps_kernels *k, const struct ps_bias_residual_statistics *a)
{
    return PS_BY_REAL(k, bias_residual_statistics, k, a);
}

extern "C" enum ps_status ps_cuda_batchnorm_join(const struct ps_kernels *k, const struct ps_batchnorm_join *a)
{
    const char *op = "batchnorm_join";
    const int64_t d = ps_cuda_width(&a->mean);
    PS_TRY(ps_cuda_expect(op, "parts", &a->parts, PS_F32, 2 * d * a->shares.ranks));
    PS_TRY(ps_cuda_expect(op, "mean", &a->mean, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "var", &a->var, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "running_mean", &a->running_mean, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "running_var", &a->running_var, PS_F32, d));
    if (a->shares.windows * a->rows < 2) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld row has no variance, 2 are needed", op,
                       (long long)(a->shares.windows * a->rows));
    }
    const struct joining j = {(float *)a->mean.data,
                              (float *)a->var.data,
                              (float *)a->running_mean.data,
                              (float *)a->running_var.data,
                              (const float *)a->parts.data,
                              a->shares,
                              a->rows,
                              a->momentum,
                              (int)d};
    ps_cuda_launch(ps_cuda(k), join_columns, ps_cuda_blocks(d, 128), 128, 0, j);
    PS_CUDA_LAUNCHED(op);
}

template <typename T> static enum ps_status batchnorm(const struct ps_kernels *k, const struct ps_batchnorm *a)
{
    const char *op = "batchnorm";
    const struct ps_cuda_context *c = ps_cuda(k);
    const int64_t d = ps_cuda_width(&a->gamma), rows = d > 0 ? ps_tensor_count(&a->x) / d : 0;
    PS_TRY(ps_cuda_expect(op, "x", &a->x, ps_type_of<T>, rows * d));
    PS_TRY(ps_cuda_expect(op, "y", &a->y, ps_type_of<T>, rows * d));
    PS_TRY(ps_cuda_expect(op, "mean", &a->mean, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "var", &a->var, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "gamma", &a->gamma, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "beta", &a->beta, PS_F32, d));
    if (rows == 0) {
        return PS_OK;
    }
    const struct normalisation<T> n = {
        (T *)a->y.data, (const T *)a->x.data, (const float *)a->mean.data, (const float *)a->var.data, (const float *)a->gamma.data,
            (const float *)a->beta.data, (float)a->epsilon
    };
    const struct ps_tensor *const t[] = {&a->y, &a->x};
    const bool vector = vector_rows(d, ps_vector<T>, t, 2);
    struct sharing s;
    PS_TRY(sharing_of_pass(c, op, rows, d, vector ? ps_vector<T> : 1, &s));
    if (vector) {
        ps_cuda_launch(c, normalise_columns<T, ps_vector<T>>, sharing_blocks(s), pass_block, 0, n, s);
    } else {
        ps_cuda_launch(c, normalise_columns<T, 1>, sharing_blocks(s), pass_block, 0, n, s);
    }
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_batchnorm(const struct ps_kernels *k, const struct ps_batchnorm *a)
{
    return PS_BY_REAL(k, batchnorm, k, a);
}
