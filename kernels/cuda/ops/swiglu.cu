/* bias_activation and activation_backward of swiglu (Shazeer 2020): y = drop(silu(g) t), a row of x being g, then t.
 *
 * Why: between two products it is one pass, as the other activations are (ops/bias.cu), but a row of x is twice one of y. A thread
 * takes the 8 elements of y of one Philox block: side by side where f is a multiple of 8 and rows are aligned, else one by one.
 *
 * Both =. Bytes, in float and half of them in 16 bits: forward 12 R f, backward 20 R f. Flops: 12 and 18 an element of y. Memory
 * bounds both. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 128;

/* Where element i of y [rows, f] has its gate in x [rows, 2 f]; its t lies f further. *column: i's. */
static __device__ __forceinline__ uint64_t gate_of(uint64_t i, uint32_t f, uint32_t *column)
{
    const uint64_t row = i >> 32 ? i / f : (uint32_t)i / f;
    *column = (uint32_t)(i - row * f);
    return i + row * f;
}

static __device__ __forceinline__ float sigmoid(float g)
{
    return 1.0f / (1.0f + __expf(-g));
}

template <bool DROP> static __device__ __forceinline__ struct ps_block draws_of(const struct ps_dropout &dropout, int64_t index)
{
    struct ps_block draws = {};
    if constexpr (DROP) {
        draws = ps_draws(dropout, dropout.state->step, (uint32_t)index);
    }
    return draws;
}

/* V elements from i on, draws from `first` on. */
template <int V, bool DROP, typename T>
static __device__ __forceinline__ void forward_elements(T *y, const T *x, const float *bias, uint64_t i, uint32_t f,
                                                        const struct ps_dropout &dropout, const struct ps_block &draws, int first)
{
    uint32_t column;
    const uint64_t at = gate_of(i, f, &column);
    float g[V], t[V], gate_bias[V], t_bias[V];
    ps_load<V>(g, x + at);
    ps_load<V>(t, x + at + f);
    ps_load<V>(gate_bias, bias + column);
    ps_load<V>(t_bias, bias + f + column);
#pragma unroll
    for (int j = 0; j < V; j++) {
        const float gate = g[j] + gate_bias[j], value = gate * sigmoid(gate) * (t[j] + t_bias[j]);
        t[j] = DROP ? ps_dropped(dropout, ps_draw16(&draws, first + j), value) : value;
    }
    ps_store<V>(y + i, t);
}

/* dx of the gates and of t. */
template <int V, bool DROP, typename T>
static __device__ __forceinline__ void backward_elements(T *dx, const T *dy, const T *x, const float *bias, uint64_t i, uint32_t f,
                                                         const struct ps_dropout &dropout, const struct ps_block &draws, int first)
{
    uint32_t column;
    const uint64_t at = gate_of(i, f, &column);
    float up[V], g[V], t[V], gate_bias[V], t_bias[V];
    ps_load<V>(up, dy + i);
    ps_load<V>(g, x + at);
    ps_load<V>(t, x + at + f);
    ps_load<V>(gate_bias, bias + column);
    ps_load<V>(t_bias, bias + f + column);
#pragma unroll
    for (int j = 0; j < V; j++) {
        const float gate = g[j] + gate_bias[j], s = sigmoid(gate);
        const float d = DROP ? ps_dropped(dropout, ps_draw16(&draws, first + j), up[j]) : up[j];
        g[j] = s * (1.0f + gate * (1.0f - s)) * (t[j] + t_bias[j]) * d;
        t[j] = gate * s * d;
    }
    ps_store<V>(dx + at, g);
    ps_store<V>(dx + at + f, t);
}

/* Of `count` elements of y a thread takes 8. */
template <typename T, bool DROP, bool VECTOR>
static __global__ void __launch_bounds__(block)
    swiglu_forward(T *y, const T *x, const float *bias, int64_t count, uint32_t f, const struct ps_dropout dropout)
{
    ps_grid_begin();
    const int64_t index = (int64_t)blockIdx.x * block + threadIdx.x, begin = index * 8;
    if (begin >= count) {
        return;
    }
    const struct ps_block draws = draws_of<DROP>(dropout, index);
    if constexpr (VECTOR) {
        forward_elements<8, DROP>(y, x, bias, (uint64_t)begin, f, dropout, draws, 0);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (begin + j < count) {
                forward_elements<1, DROP>(y, x, bias, (uint64_t)(begin + j), f, dropout, draws, j);
            }
        }
    }
}

template <typename T, bool DROP, bool VECTOR>
static __global__ void __launch_bounds__(block)
    swiglu_backward(T *dx, const T *dy, const T *x, const float *bias, int64_t count, uint32_t f, const struct ps_dropout dropout)
{
    ps_grid_begin();
    const int64_t index = (int64_t)blockIdx.x * block + threadIdx.x, begin = index * 8;
    if (begin >= count) {
        return;
    }
    const struct ps_block draws = draws_of<DROP>(dropout, index);
    if constexpr (VECTOR) {
        backward_elements<8, DROP>(dx, dy, x, bias, (uint64_t)begin, f, dropout, draws, 0);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (begin + j < count) {
                backward_elements<1, DROP>(dx, dy, x, bias, (uint64_t)(begin + j), f, dropout, draws, j);
            }
        }
    }
}

/* The sizes of y [R, f], narrow, and x [R, 2 f], wide, which have to fit. */
static enum ps_status check(const char *op, enum ps_type real, const char *narrow_name, const struct ps_tensor *narrow,
                            const struct ps_tensor *x, const struct ps_tensor *bias, const struct ps_dropout *dropout, int64_t *f)
{
    const int64_t count = ps_tensor_count(narrow), width = ps_tensor_count(bias);
    *f = width / 2;
    if (width < 2 || width % 2 != 0 || width > INT32_MAX || count % *f != 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld elements are not rows of half a bias of %lld", op, (long long)count,
                       (long long)width);
    }
    PS_TRY(ps_cuda_expect(op, narrow_name, narrow, real, count));
    PS_TRY(ps_cuda_expect(op, "x", x, real, 2 * count));
    PS_TRY(ps_cuda_expect(op, "bias", bias, PS_F32, width));
    if (dropout->threshold != 0 && !dropout->state) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): dropout needs the step's state", op);
    }
    return PS_OK;
}

template <typename T> static enum ps_status forward(const struct ps_kernels *k, const struct ps_bias_activation *a)
{
    const char *op = "bias_activation";
    int64_t f;
    PS_TRY(check(op, ps_type_of<T>, "y", &a->y, &a->x, &a->bias, &a->dropout, &f));
    const int64_t count = ps_tensor_count(&a->y);
    if (count == 0) {
        return PS_OK;
    }
    const bool vector = f % 8 == 0 && ps_cuda_aligned(&a->y) && ps_cuda_aligned(&a->x) && ps_cuda_aligned(&a->bias),
               drop = a->dropout.threshold != 0;
    const auto kernel = vector ? drop ? swiglu_forward<T, true, true> : swiglu_forward<T, false, true>
                        : drop ? swiglu_forward<T, true, false>
                               : swiglu_forward<T, false, false>;
    ps_cuda_launch(ps_cuda(k), kernel, ps_cuda_blocks(count, 8 * block), block, 0, (T *)a->y.data, (const T *)a->x.data,
                   (const float *)a->bias.data, count, (uint32_t)f, a->dropout);
    PS_CUDA_LAUNCHED(op);
}

enum ps_status ps_cuda_swiglu(const struct ps_kernels *k, const struct ps_bias_activation *a)
{
    return PS_BY_REAL(k, forward, k, a);
}

template <typename T> static enum ps_status backward(const struct ps_kernels *k, const struct ps_activation_backward *a)
{
    const char *op = "activation_backward";
    int64_t f;
    PS_TRY(check(op, ps_type_of<T>, "dy", &a->dy, &a->x, &a->bias, &a->dropout, &f));
    const int64_t count = ps_tensor_count(&a->dy);
    PS_TRY(ps_cuda_expect(op, "dx", &a->dx, ps_type_of<T>, 2 * count));
    if (count == 0) {
        return PS_OK;
    }
    const bool vector = f % 8 == 0 && ps_cuda_aligned(&a->dx) && ps_cuda_aligned(&a->dy) && ps_cuda_aligned(&a->x) &&
                        ps_cuda_aligned(&a->bias),
               drop = a->dropout.threshold != 0;
    const auto kernel = vector ? drop ? swiglu_backward<T, true, true> : swiglu_backward<T, false, true>
                        : drop ? swiglu_backward<T, true, false>
                               : swiglu_backward<T, false, false>;
    ps_cuda_launch(ps_cuda(k), kernel, ps_cuda_blocks(count, 8 * block), block, 0, (T *)a->dx.data, (const T *)a->dy.data,
                   (const T *)a->x.data, (const float *)a->bias.data, count, (uint32_t)f, a->dropout);
    PS_CUDA_LAUNCHED(op);
}

enum ps_status ps_cuda_swiglu_backward(const struct ps_kernels *k, const struct ps_activation_backward *a)
{
    return PS_BY_REAL(k, backward, k, a);
}
