/* Elementwise operations with a bias and dropout: bias_add, bias_residual_add, bias_activation, activation_backward
 * (but for swiglu: ops/swiglu.cu), bias_position_add, drop.
 *
 * Why: between two products each is one pass over [R, n], so the bias, the activation, the residual and the mask share it. A warp
 * takes 256 consecutive elements and 32 Philox blocks, and a lane draws one of them: no bit is drawn twice. In float a lane holds
 * two float4, in 16 bits the 8 elements of its block. Where widths or addresses are not multiples of 16 bytes, a thread takes the 8
 * elements of one block, one by one.
 *
 * All =, in place where kernels.h says so: an element is read and written by the same thread.
 * Bytes, in float and half of them in 16 bits: bias_add, drop 8 R n; bias_activation, bias_position_add 8 R n; bias_residual_add,
 * activation_backward 12 R n. Flops: 1 to 18 an element, and about 60 integer operations for each 8 elements with dropout. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/activation.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 128;

/* Each operation says: V elements' inputs (load), an element's value before dropout (value), what is made of it after (finish).
 * Element i is at row i / n, column i % n. T: type of y, x, dy and residual. */

template <typename T> struct bias_add_map {
    typedef T element;
    T *y;
    const float *bias;
    uint32_t n;
    template <int V> struct inputs {
        float y[V], bias[V];
    };
    template <int V> __device__ __forceinline__ void load(inputs<V> &in, uint64_t i) const
    {
        ps_load<V>(in.y, y + i);
        ps_load<V>(in.bias, bias + ps_modulo(i, n));
    }
    template <int V> __device__ __forceinline__ float value(const inputs<V> &in, int j) const
    {
        return in.y[j] + in.bias[j];
    }
    template <int V> __device__ __forceinline__ float finish(const inputs<V> &, int, float dropped) const
    {
        return dropped;
    }
};

template <typename T> struct bias_residual_add_map {
    typedef T element;
    T *y;
    const T *x;
    const float *bias;
    const T *residual;
    uint32_t n;
    template <int V> struct inputs {
        float x[V], bias[V], residual[V];
    };
    template <int V> __device__ __forceinline__ void load(inputs<V> &in, uint64_t i) const
    {
        ps_load<V>(in.x, x + i);
        ps_load<V>(in.residual, residual + i);
        ps_load<V>(in.bias, bias + ps_modulo(i, n));
    }
    template <int V> __device__ __forceinline__ float value(const inputs<V> &in, int j) const
    {
        return in.x[j] + in.bias[j];
    }
    template <int V> __device__ __forceinline__ float finish(const inputs<V> &in, int j, float dropped) const
    {
        return in.residual[j] + dropped;
    }
};

template <typename T, enum ps_activation ACTIVATION>
struct bias_activation_map {
    typedef T element; T * y; const T * x; const float * bias; uint32_t n; template <int V> struct inputs{float x[V], bias[V];};
template <int V> __device__ __forceinline__ void load(inputs<V> &in, uint64_t i) const
{
    ps_load<V>(in.x, x + i);
    ps_load<V>(in.bias, bias + ps_modulo(i, n));
}
template <int V> __device__ __forceinline__ float value(const inputs<V> &in, int j) const
{
    return ps_activated<ACTIVATION>(in.x[j] + in.bias[j]);
}
template <int V> __device__ __forceinline__ float finish(const inputs<V> &, int, float dropped) const
{
    return dropped;
}
}
;

/* Dropout's mask multiplies dy and so the product too. */
template <typename T, enum ps_activation ACTIVATION>
struct activation_backward_map {
    typedef T element; T * y; const T * dy, *x; const float * bias; uint32_t n;
    template <int V> struct inputs{float dy[V], x[V], bias[V];};
template <int V> __device__ __forceinline__ void load(inputs<V> &in, uint64_t i) const
{
    ps_load<V>(in.dy, dy + i);
    ps_load<V>(in.x, x + i);
    ps_load<V>(in.bias, bias + ps_modulo(i, n));
}
template <int V> __device__ __forceinline__ float value(const inputs<V> &in, int j) const
{
    return in.dy[j] * ps_activation_slope<ACTIVATION>(in.x[j] + in.bias[j]);
}
template <int V> __device__ __forceinline__ float finish(const inputs<V> &, int, float dropped) const
{
    return dropped;
}
}
;

/* positions = N d: position [N, d] repeats every so many elements. */
template <typename T> struct bias_position_add_map {
    typedef T element;
    T *y;
    const T *x;
    const float *bias, *position;
    uint32_t n, positions;
    template <int V> struct inputs {
        float x[V], bias[V], position[V];
    };
    template <int V> __device__ __forceinline__ void load(inputs<V> &in, uint64_t i) const
    {
        const uint32_t p = ps_modulo(i, positions);
        ps_load<V>(in.x, x + i);
        ps_load<V>(in.position, position + p);
        ps_load<V>(in.bias, bias + p % n);
    }
    template <int V> __device__ __forceinline__ float value(const inputs<V> &in, int j) const
    {
        return in.x[j] + in.bias[j] + in.position[j];
    }
    template <int V> __device__ __forceinline__ float finish(const inputs<V> &, int, float dropped) const
    {
        return dropped;
    }
};

template <typename T> struct drop_map {
    typedef T element;
    T *y;
    const T *x;
    template <int V> struct inputs {
        float x[V];
    };
    template <int V> __device__ __forceinline__ void load(inputs<V> &in, uint64_t i) const
    {
        ps_load<V>(in.x, x + i);
    }
    template <int V> __device__ __forceinline__ float value(const inputs<V> &in, int j) const
    {
        return in.x[j];
    }
    template <int V> __device__ __forceinline__ float finish(const inputs<V> &, int, float dropped) const
    {
        return dropped;
    }
};

/* One quad of elements from i. */
template <bool DROP, typename Map>
static __device__ __forceinline__ void finish_quad(const Map &map, const typename Map::template inputs<4> &in, uint64_t i,
                                                   const struct ps_dropout &dropout, const uint32_t (&words)[2])
{
    float out[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float value = map.template value<4>(in, j);
        if constexpr (DROP) {
            value = ps_dropped(dropout, ps_pair_draw(words, j), value);
        }
        out[j] = map.template finish<4>(in, j, value);
    }
    ps_store<4>(map.y + i, out);
}

/* Elements by fours; `quads` of them, rows begin at multiples of 4. */
template <bool DROP, typename Map>
static __global__ void __launch_bounds__(block) map_quads(const Map map, const struct ps_dropout dropout, int64_t quads)
{
    ps_grid_begin();
    const int64_t first = ((int64_t)blockIdx.x * (block / 32) + threadIdx.x / 32) * 64 + threadIdx.x % 32, second = first + 32;
    typename Map::template inputs<4> a, b;
    if (first < quads) {
        map.template load<4>(a, (uint64_t)first * 4);
    }
    if (second < quads) {
        map.template load<4>(b, (uint64_t)second * 4);
    }
    uint32_t first_words[2] = {0, 0}, second_words[2] = {0, 0};
    if constexpr (DROP) {
        ps_draw_pair(dropout, dropout.state->step, (uint64_t)first / 2, (uint64_t)second / 2, first_words, second_words);
    }
    if (first < quads) {
        finish_quad<DROP>(map, a, (uint64_t)first * 4, dropout, first_words);
    }
    if (second < quads) {
        finish_quad<DROP>(map, b, (uint64_t)second * 4, dropout, second_words);
    }
}

/* Elements by eights, a thread one Philox block; `octets` of them, rows begin at multiples of 8. */
template <bool DROP, typename Map>
static __global__ void __launch_bounds__(block) map_octets(const Map map, const struct ps_dropout dropout, int64_t octets)
{
    ps_grid_begin();
    const int64_t octet = (int64_t)blockIdx.x * block + threadIdx.x;
    if (octet >= octets) {
        return;
    }
    typename Map::template inputs<8> in;
    map.template load<8>(in, (uint64_t)octet * 8);
    struct ps_block draws = {};
    if constexpr (DROP) {
        draws = ps_draws(dropout, dropout.state->step, (uint32_t)octet);
    }
    float out[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float value = map.template value<8>(in, j);
        if constexpr (DROP) {
            value = ps_dropped(dropout, ps_draw16(&draws, j), value);
        }
        out[j] = map.template finish<8>(in, j, value);
    }
    ps_store<8>(map.y + octet * 8, out);
}

/* Any sizes: a thread takes the elements of one Philox block. */
template <bool DROP, typename Map>
static __global__ void __launch_bounds__(block) map_single(const Map map, const struct ps_dropout dropout, int64_t count)
{
    ps_grid_begin();
    const int64_t begin = ((int64_t)blockIdx.x * block + threadIdx.x) * 8;
    if (begin >= count) {
        return;
    }
    struct ps_block draws = {};
    if constexpr (DROP) {
        draws = ps_draws(dropout, dropout.state->step, (uint32_t)(begin / 8));
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (begin + j < count) {
            typename Map::template inputs<1> in;
            map.template load<1>(in, (uint64_t)(begin + j));
            float value = map.template value<1>(in, 0);
            if constexpr (DROP) {
                value = ps_dropped(dropout, ps_draw16(&draws, j), value);
            }
            ps_put(map.y + begin + j, map.template finish<1>(in, 0, value));
        }
    }
}

/* vector: rows are multiples of 16 bytes of activations and every tensor begins at a multiple of 16 bytes. */
template <typename Map>
static enum ps_status launch(const struct ps_cuda_context *c, const char *op, const Map &map, const struct ps_dropout &dropout,
                             int64_t count, bool vector)
{
    if (count == 0) {
        return PS_OK;
    }
    const bool drop = dropout.threshold != 0;
    if (drop && !dropout.state) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): dropout needs the step's state", op);
    }
    if (!vector) {
        const unsigned blocks = ps_cuda_blocks(count, 8 * block);
        if (drop) {
            ps_cuda_launch(c, map_single<true, Map>, blocks, block, 0, map, dropout, count);
        } else {
            ps_cuda_launch(c, map_single<false, Map>, blocks, block, 0, map, dropout, count);
        }
    } else if constexpr (ps_vector<typename Map::element> == 8) {
        const int64_t octets = count / 8;
        const unsigned blocks = ps_cuda_blocks(octets, block);
        if (drop) {
            ps_cuda_launch(c, map_octets<true, Map>, blocks, block, 0, map, dropout, octets);
        } else {
            ps_cuda_launch(c, map_octets<false, Map>, blocks, block, 0, map, dropout, octets);
        }
    } else {
        const int64_t quads = count / 4;
        const unsigned blocks = ps_cuda_blocks(quads, 2 * block);
        if (drop) {
            ps_cuda_launch(c, map_quads<true, Map>, blocks, block, 0, map, dropout, quads);
        } else {
            ps_cuda_launch(c, map_quads<false, Map>, blocks, block, 0, map, dropout, quads);
        }
    }
    PS_CUDA_LAUNCHED(op);
}

/* Width of a bias that fits x's rows. */
static enum ps_status bias_width(const char *op, const struct ps_tensor *x, enum ps_type type, const struct ps_tensor *bias,
                                 int64_t *n)
{
    const int64_t count = ps_tensor_count(x);
    *n = ps_tensor_count(bias);
    if (*n < 1 || *n > INT32_MAX || count % *n != 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld elements are not rows of a bias of %lld", op, (long long)count,
                       (long long)*n);
    }
    PS_TRY(ps_cuda_expect(op, "x", x, type, count));
    return ps_cuda_expect(op, "bias", bias, PS_F32, *n);
}

template <typename T> static enum ps_status bias_add(const struct ps_kernels *k, const struct ps_bias_add *a)
{
    int64_t n;
    PS_TRY(bias_width("bias_add", &a->y, ps_type_of<T>, &a->bias, &n));
    const bias_add_map<T> map = {(T *)a->y.data, (const float *)a->bias.data, (uint32_t)n};
    const struct ps_dropout none = {};
    return launch(ps_cuda(k), "bias_add", map, none, ps_tensor_count(&a->y),
                  n % ps_vector<T> == 0 && ps_cuda_aligned(&a->y) && ps_cuda_aligned(&a->bias));
}

extern "C" enum ps_status ps_cuda_bias_add(const struct ps_kernels *k, const struct ps_bias_add *a)
{
    return PS_BY_REAL(k, bias_add, k, a);
}

template <typename T> static enum ps_status bias_residual_add(const struct ps_kernels *k, const struct ps_bias_residual_add *a)
{
    const char *op = "bias_residual_add";
    const int64_t count = ps_tensor_count(&a->x);
    int64_t n;
    PS_TRY(bias_width(op, &a->x, ps_type_of<T>, &a->bias, &n));
    PS_TRY(ps_cuda_expect(op, "y", &a->y, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect(op, "residual", &a->residual, ps_type_of<T>, count));
    const bias_residual_add_map<T> map = {(T *)a->y.data, (const T *)a->x.data, (const float *)a->bias.data,
                                          (const T *)a->residual.data, (uint32_t)n};
    return launch(ps_cuda(k), op, map, a->dropout, count,
                  n % ps_vector<T> == 0 && ps_cuda_aligned(&a->y) && ps_cuda_aligned(&a->x) && ps_cuda_aligned(&a->bias) &&
                      ps_cuda_aligned(&a->residual));
}

extern "C" enum ps_status ps_cuda_bias_residual_add(const struct ps_kernels *k, const struct ps_bias_residual_add *a)
{
    return PS_BY_REAL(k, bias_residual_add, k, a);
}

template <typename T, enum ps_activation ACTIVATION>
static enum ps_status launch_activation(const struct ps_kernels *k, const char *op, const struct ps_bias_activation *a, int64_t n)
{
    const bias_activation_map<T, ACTIVATION> map = {(T *)a->y.data, (const T *)a->x.data, (const float *)a->bias.data, (uint32_t)n};
    return launch(ps_cuda(k), op, map, a->dropout, ps_tensor_count(&a->x),
                  n % ps_vector<T> == 0 && ps_cuda_aligned(&a->y) && ps_cuda_aligned(&a->x) && ps_cuda_aligned(&a->bias));
}

template <typename T> static enum ps_status bias_activation(const struct ps_kernels *k, const struct ps_bias_activation *a)
{
    const char *op = "bias_activation";
    int64_t n;
    PS_TRY(bias_width(op, &a->x, ps_type_of<T>, &a->bias, &n));
    PS_TRY(ps_cuda_expect(op, "y", &a->y, ps_type_of<T>, ps_tensor_count(&a->x)));
    switch (a->activation) {
    case PS_GELU_TANH:
        return launch_activation<T, PS_GELU_TANH>(k, op, a, n);
    case PS_GELU:
        return launch_activation<T, PS_GELU>(k, op, a, n);
    case PS_RELU:
        return launch_activation<T, PS_RELU>(k, op, a, n);
    case PS_SWIGLU:
        break;
    }
    return ps_fail(PS_UNSUPPORTED, "%s (cuda): no such activation, %d", op, (int)a->activation);
}

extern "C" enum ps_status ps_cuda_bias_activation(const struct ps_kernels *k, const struct ps_bias_activation *a)
{
    return a->activation == PS_SWIGLU ? ps_cuda_swiglu(k, a) : PS_BY_REAL(k, bias_activation, k, a);
}

template <typename T, enum ps_activation ACTIVATION>
static enum ps_status launch_activation_backward(const struct ps_kernels *k, const char *op, const struct ps_activation_backward *a,
                                                 int64_t n)
{
    const activation_backward_map<T, ACTIVATION> map = {(T *)a->dx.data, (const T *)a->dy.data, (const T *)a->x.data,
                                                        (const float *)a->bias.data, (uint32_t)n};
    return launch(ps_cuda(k), op, map, a->dropout, ps_tensor_count(&a->x),
                  n % ps_vector<T> == 0 && ps_cuda_aligned(&a->dx) && ps_cuda_aligned(&a->dy) && ps_cuda_aligned(&a->x) &&
                      ps_cuda_aligned(&a->bias));
}

template <typename T> static enum ps_status activation_backward(const struct ps_kernels *k, const struct ps_activation_backward *a)
{
    const char *op = "activation_backward";
    const int64_t count = ps_tensor_count(&a->x);
    int64_t n;
    PS_TRY(bias_width(op, &a->x, ps_type_of<T>, &a->bias, &n));
    PS_TRY(ps_cuda_expect(op, "dx", &a->dx, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect(op, "dy", &a->dy, ps_type_of<T>, count));
    switch (a->activation) {
    case PS_GELU_TANH:
        return launch_activation_backward<T, PS_GELU_TANH>(k, op, a, n);
    case PS_GELU:
        return launch_activation_backward<T, PS_GELU>(k, op, a, n);
    case PS_RELU:
        return launch_activation_backward<T, PS_RELU>(k, op, a, n);
    case PS_SWIGLU:
        break;
    }
    return ps_fail(PS_UNSUPPORTED, "%s (cuda): no such activation, %d", op, (int)a->activation);
}

extern "C" enum ps_status ps_cuda_activation_backward(const struct ps_kernels *k, const struct ps_activation_backward *a)
{
    return a->activation == PS_SWIGLU ? ps_cuda_swiglu_backward(k, a) : PS_BY_REAL(k, activation_backward, k, a);
}

template <typename T> static enum ps_status bias_position_add(const struct ps_kernels *k, const struct ps_bias_position_add *a)
{
    const char *op = "bias_position_add";
    const int64_t count = ps_tensor_count(&a->x), positions = ps_tensor_count(&a->position);
    int64_t n;
    PS_TRY(bias_width(op, &a->x, ps_type_of<T>, &a->bias, &n));
    PS_TRY(ps_cuda_expect(op, "y", &a->y, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect(op, "position", &a->position, PS_F32, positions));
    if (positions < 1 || positions > INT32_MAX || positions % n != 0 || count % positions != 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld elements do not repeat %lld positions of width %lld", op, (long long)count,
                       (long long)positions, (long long)n);
    }
    const bias_position_add_map<T> map = {
        (T *)a->y.data, (const T *)a->x.data, (const float *)a->bias.data, (const float *)a->position.data,
        (uint32_t)n,    (uint32_t)positions};
    return launch(ps_cuda(k), op, map, a->dropout, count,
                  n % ps_vector<T> == 0 && ps_cuda_aligned(&a->y) && ps_cuda_aligned(&a->x) && ps_cuda_aligned(&a->bias) &&
                      ps_cuda_aligned(&a->position));
}

extern "C" enum ps_status ps_cuda_bias_position_add(const struct ps_kernels *k, const struct ps_bias_position_add *a)
{
    return PS_BY_REAL(k, bias_position_add, k, a);
}

template <typename T> static enum ps_status drop(const struct ps_kernels *k, const struct ps_drop *a)
{
    const int64_t count = ps_tensor_count(&a->x);
    PS_TRY(ps_cuda_expect("drop", "x", &a->x, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect("drop", "y", &a->y, ps_type_of<T>, count));
    const drop_map<T> map = {(T *)a->y.data, (const T *)a->x.data};
    return launch(ps_cuda(k), "drop", map, a->dropout, count,
                  count % ps_vector<T> == 0 && ps_cuda_aligned(&a->y) && ps_cuda_aligned(&a->x));
}

extern "C" enum ps_status ps_cuda_drop(const struct ps_kernels *k, const struct ps_drop *a)
{
    return PS_BY_TYPE(a->x.type == k->real ? k->real : PS_F32, drop, k, a);
}
