/* batchnorm_fold and batchnorm_unfold: a BatchNorm's scale and shift go into the weight and the bias that read it, and come out of
 * their gradients.
 *
 * Why: what a BatchNorm gives is a line through each column. A pass that writes it moves 4 R d bytes in 16 bits; a weight of d n
 * has a thousandth of that. A block takes 8 columns of a weight, a thread every 32nd row of them; sums are in a fixed order. A
 * thread's first rows of parameters and of their gradients, which no kernel right before has written, are read before the wait for
 * that.
 *
 * Bytes: fold 4 d n in 16 bits, flops 5 d n; unfold 16 d n a layer, flops 4 d n. The launch and memory's latency bound both. */
#include "kernels/cuda/context.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/vector.cuh"

enum { COLUMNS = 8, LINES = 32, THREADS = COLUMNS * LINES, AHEAD = 4 };

template <typename T> struct folding {
    T *w_out;
    float *bias_out, *scale, *shift;
    const T *w;
    const float *bias, *mean, *var, *gamma, *beta;
    float epsilon;
    int d, n;
};

/* Of a row of the weight what is a parameter. */
struct known {
    float w, gamma, beta;
};

template <typename T> static __device__ __forceinline__ struct known know(const struct folding<T> &a, int i, int j)
{
    return {i < a.d && j < a.n ? ps_float(a.w[(int64_t)i * a.n + j]) : 0.0f, i < a.d ? a.gamma[i] : 0.0f,
            i < a.d ? a.beta[i] : 0.0f};
}

template <typename T> static __global__ void __launch_bounds__(THREADS) fold_weight(const struct folding<T> a)
{
    __shared__ float sums[LINES][COLUMNS];
    const int column = (int)threadIdx.x % COLUMNS, line = (int)threadIdx.x / COLUMNS, j = (int)blockIdx.x * COLUMNS + column;
    struct known first[AHEAD];
#pragma unroll
    for (int t = 0; t < AHEAD; t++) {
        first[t] = know(a, line + t * LINES, j);
    }
    ps_grid_begin();
    float sum = 0;
    auto row = [&](int i, const struct known &of) {
        const float mean = a.mean[i], scale = of.gamma * rsqrtf(a.var[i] + a.epsilon);
        if (j < a.n) {
            T out;
            ps_put(&out, scale * of.w);
            a.w_out[(int64_t)i * a.n + j] = out;
            sum += of.beta * of.w - mean * ps_float(out);
        }
        if (blockIdx.x == 0 && column == 0) {
            a.scale[i] = scale;
            a.shift[i] = of.beta - mean * scale;
        }
    };
#pragma unroll
    for (int t = 0; t < AHEAD; t++) {
        if (line + t * LINES < a.d) {
            row(line + t * LINES, first[t]);
        }
    }
    for (int i = line + AHEAD * LINES; i < a.d; i += LINES) {
        row(i, know(a, i, j));
    }
    sums[line][column] = sum;
    __syncthreads();
    if (line == 0 && j < a.n) {
        float all = a.bias[j];
#pragma unroll
        for (int l = 0; l < LINES; l++) {
            all += sums[l][column];
        }
        a.bias_out[j] = all;
    }
}

struct unfolding {
    float *dw, *dbias, *g, *g_bias;
    const float *scale, *shift;
    int64_t dw_apart, dbias_apart, scale_apart, shift_apart; /* from a layer to the next */
    int d, n;
};

/* Grid: columns, layers. */
static __global__ void __launch_bounds__(THREADS) unfold_gradients(struct unfolding a)
{
    a.dw += blockIdx.y * a.dw_apart;
    a.dbias += blockIdx.y * a.dbias_apart;
    a.g += (int64_t)blockIdx.y * a.d * a.n;
    a.g_bias += blockIdx.y * a.n;
    a.scale += blockIdx.y * a.scale_apart;
    a.shift += blockIdx.y * a.shift_apart;
    const int column = (int)threadIdx.x % COLUMNS, line = (int)threadIdx.x / COLUMNS, j = (int)blockIdx.x * COLUMNS + column;
    float first[AHEAD];
#pragma unroll
    for (int t = 0; t < AHEAD; t++) {
        const int i = line + t * LINES;
        first[t] = i < a.d && j < a.n ? a.dw[(int64_t)i * a.n + j] : 0.0f;
    }
    ps_grid_begin();
    const float bias = j < a.n ? a.g_bias[j] : 0.0f;
    __syncthreads(); /* all have read it */
    auto row = [&](int i, float before) {
        const int64_t at = (int64_t)i * a.n + j;
        a.dw[at] = before + (a.scale[i] * a.g[at] + a.shift[i] * bias);
        a.g[at] = 0;
    };
#pragma unroll
    for (int t = 0; t < AHEAD; t++) {
        if (line + t * LINES < a.d && j < a.n) {
            row(line + t * LINES, first[t]);
        }
    }
    for (int i = line + AHEAD * LINES; i < a.d && j < a.n; i += LINES) {
        row(i, a.dw[(int64_t)i * a.n + j]);
    }
    if (line == 0 && j < a.n) {
        a.dbias[j] += bias;
        a.g_bias[j] = 0;
    }
}

/* In 16 bits on Hopper, from as many rows on as a pass takes longer than both launches. */
int ps_cuda_batchnorm_fold_faster(const struct ps_kernels *k, int64_t rows, int64_t d_model, int64_t d_ff,
                                  enum ps_activation activation)
{
    enum { LEAST_ELEMENTS = 1 << 21 };
    return k->real != PS_F32 && ps_cuda(k)->compute_capability == 90 && d_model % 8 == 0 && d_ff % 8 == 0 &&
           rows * d_model >= LEAST_ELEMENTS && rows <= INT32_MAX / 2 && activation != PS_SWIGLU;
}

template <typename T> static enum ps_status fold(const struct ps_kernels *k, const struct ps_batchnorm_fold *a)
{
    const char *op = "batchnorm_fold";
    const int64_t n = ps_cuda_width(&a->w), d = n > 0 ? ps_tensor_count(&a->w) / n : 0;
    PS_TRY(ps_cuda_expect(op, "w", &a->w, ps_type_of<T>, d * n));
    PS_TRY(ps_cuda_expect(op, "w_out", &a->w_out, ps_type_of<T>, d * n));
    PS_TRY(ps_cuda_expect(op, "bias", &a->bias, PS_F32, n));
    PS_TRY(ps_cuda_expect(op, "bias_out", &a->bias_out, PS_F32, n));
    PS_TRY(ps_cuda_expect(op, "scale", &a->scale, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "shift", &a->shift, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "mean", &a->mean, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "var", &a->var, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "gamma", &a->gamma, PS_F32, d));
    PS_TRY(ps_cuda_expect(op, "beta", &a->beta, PS_F32, d));
    const struct folding<T> f = {
        (T *)a->w_out.data, (float *)a->bias_out.data, (float *)a->scale.data, (float *)a->shift.data, (const T *)a->w.data,
            (const float *)a->bias.data, (const float *)a->mean.data, (const float *)a->var.data, (const float *)a->gamma.data,
            (const float *)a->beta.data, (float)a->epsilon, (int)d, (int)n
    };
    ps_cuda_launch(ps_cuda(k), fold_weight<T>, ps_cuda_blocks(n, COLUMNS), THREADS, 0, f);
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_batchnorm_fold(const struct ps_kernels *k, const struct ps_batchnorm_fold *a)
{
    return PS_BY_REAL(k, fold, k, a);
}

/* Of each layer `count` elements that lie together, layers any number apart. */
static enum ps_status expect_layers(const char *op, const char *name, const struct ps_tensor *t, int64_t layers, int64_t count)
{
    if (t->rank < 2 || t->size[0] != layers) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s is not that of %lld layers", op, name, (long long)layers);
    }
    const struct ps_tensor first = ps_tensor_slice(*t, 0, 0, 1);
    return ps_cuda_expect(op, name, &first, PS_F32, count);
}

extern "C" enum ps_status ps_cuda_batchnorm_unfold(const struct ps_kernels *k, const struct ps_batchnorm_unfold *a)
{
    const char *op = "batchnorm_unfold";
    const int64_t layers = a->g.rank == 3 ? a->g.size[0] : 0, d = layers ? a->g.size[1] : 0, n = layers ? a->g.size[2] : 0;
    PS_TRY(ps_cuda_expect(op, "g", &a->g, PS_F32, layers * d * n));
    PS_TRY(ps_cuda_expect(op, "g_bias", &a->g_bias, PS_F32, layers * n));
    PS_TRY(expect_layers(op, "dw", &a->dw, layers, d * n));
    PS_TRY(expect_layers(op, "dbias", &a->dbias, layers, n));
    PS_TRY(expect_layers(op, "scale", &a->scale, layers, d));
    PS_TRY(expect_layers(op, "shift", &a->shift, layers, d));
    if (layers < 1 || layers > UINT16_MAX) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld layers: 1 to 65535 are served", op, (long long)layers);
    }
    const struct unfolding u = {(float *)a->dw.data,
                                (float *)a->dbias.data,
                                (float *)a->g.data,
                                (float *)a->g_bias.data,
                                (const float *)a->scale.data,
                                (const float *)a->shift.data,
                                a->dw.stride[0],
                                a->dbias.stride[0],
                                a->scale.stride[0],
                                a->shift.stride[0],
                                (int)d,
                                (int)n};
    ps_cuda_launch(ps_cuda(k), unfold_gradients, dim3(ps_cuda_blocks(n, COLUMNS), (unsigned)layers), THREADS, 0, u);
    PS_CUDA_LAUNCHED(op);
}
