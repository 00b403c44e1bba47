/* Elementary operations over any strides (affine, unary, binary, strided_copy, reduce), and add.
 *
 * Why: they are what fusion level `none` is made of, the yardstick of the others. The host drops dimensions of size 1, orders the
 * rest so that neighbouring threads write neighbouring elements, and joins dimensions that lie evenly in every operand, so that
 * most calls become one or two dimensions with 16-byte accesses; what cannot goes element by element. All are of float32, but add
 * is of the activations' type and strided_copy converts between it and float32.
 *
 * All =, in place where the operands are the same view; reduce = or += by its argument. Bytes: those of the elements named. Flops:
 * at most 2 an element. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 256;

/* The dimensions of a call, innermost first, with OPERANDS strides each; operand 0 is written. */
template <int OPERANDS> struct layout {
    int rank; /* at least 1 */
    int64_t size[PS_MAX_RANK];
    int64_t stride[OPERANDS][PS_MAX_RANK];
    struct ps_divisor divisor[PS_MAX_RANK];
};

/* From `rank` leading dimensions of the tensors, whose sizes agree (checked by the caller). */
template <int OPERANDS> static void layout_make(struct layout<OPERANDS> *l, int rank, const struct ps_tensor *const (&t)[OPERANDS])
{
    int order[PS_MAX_RANK], count = 0;
    for (int i = rank - 1; i >= 0; i--) {
        if (t[0]->size[i] == 1) {
            continue;
        }
        int at = count++;
        for (; at > 0 && t[0]->stride[order[at - 1]] > t[0]->stride[i]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
    l->rank = 0;
    for (int i = 0; i < count; i++) {
        bool even = l->rank > 0; /* this dimension continues the one inside it, in every operand */
        for (int k = 0; k < OPERANDS && even; k++) {
            even = t[k]->stride[order[i]] == l->stride[k][l->rank - 1] * l->size[l->rank - 1];
        }
        if (even) {
            l->size[l->rank - 1] *= t[0]->size[order[i]];
            continue;
        }
        l->size[l->rank] = t[0]->size[order[i]];
        for (int k = 0; k < OPERANDS; k++) {
            l->stride[k][l->rank] = t[k]->stride[order[i]];
        }
        l->rank++;
    }
    if (l->rank == 0) { /* one element */
        l->rank = 1;
        l->size[0] = 1;
        for (int k = 0; k < OPERANDS; k++) {
            l->stride[k][0] = 1;
        }
    }
}

/* When it may be walked by `vec` elements of at most 16 bytes, counts the innermost dimension in those and says so. Operands that
 * repeat along it are exempt. */
template <int OPERANDS> static bool layout_vector(struct layout<OPERANDS> *l, const struct ps_tensor *const (&t)[OPERANDS], int vec)
{
    if (l->size[0] % vec != 0 || l->stride[0][0] != 1) {
        return false;
    }
    for (int k = 0; k < OPERANDS; k++) {
        if (l->stride[k][0] == 0) {
            continue;
        }
        if (l->stride[k][0] != 1 || !ps_cuda_aligned(t[k])) {
            return false;
        }
        for (int i = 1; i < l->rank; i++) {
            if (l->stride[k][i] % vec != 0) {
                return false;
            }
        }
    }
    l->size[0] /= vec;
    for (int k = 0; k < OPERANDS; k++) {
        l->stride[k][0] *= vec;
    }
    return true;
}

template <int OPERANDS> static int64_t layout_finish(struct layout<OPERANDS> *l)
{
    int64_t count = 1;
    for (int i = 0; i < l->rank; i++) {
        count *= l->size[i];
    }
    if (count <= INT32_MAX) {
        for (int i = 0; i < l->rank; i++) {
            l->divisor[i] = ps_divisor_make(l->size[i]);
        }
    }
    return count;
}

/* Each operand's offset of element `index`, the innermost dimension fastest. WIDE: there are 2^31 elements or more. */
template <bool WIDE, int OPERANDS>
static __device__ __forceinline__ void locate(int64_t (&offset)[OPERANDS], const struct layout<OPERANDS> &l, int64_t index)
{
#pragma unroll
    for (int k = 0; k < OPERANDS; k++) {
        offset[k] = 0;
    }
#pragma unroll
    for (int i = 0; i < PS_MAX_RANK; i++) {
        if (i < l.rank) {
            int64_t quotient = 0, rest = index;
            if (i + 1 < l.rank) {
                quotient = WIDE ? index / l.size[i] : (int64_t)ps_divide((uint32_t)index, l.divisor[i]);
                rest = index - quotient * l.size[i];
            }
#pragma unroll
            for (int k = 0; k < OPERANDS; k++) {
                offset[k] += rest * l.stride[k][i];
            }
            index = quotient;
        }
    }
}

struct affine_function {
    float scale, shift;
    __device__ __forceinline__ float operator()(float x, float) const
    {
        return scale * x + shift;
    }
};

struct unary_function {
    enum ps_unary_function function;
    __device__ __forceinline__ float operator()(float x, float) const
    {
        switch (function) {
        case PS_EXP:
            return expf(x);
        case PS_TANH:
            return tanhf(x);
        case PS_SQUARE:
            return x * x;
        case PS_RSQRT:
            return rsqrtf(x);
        case PS_ERF:
            return erff(x);
        case PS_MAX_0:
            return x > 0.0f || x != x ? x : 0.0f;
        case PS_STEP:
            return x > 0.0f ? 1.0f : 0.0f;
        case PS_RECIPROCAL:
            break;
        }
        return 1.0f / x;
    }
};

struct binary_function {
    enum ps_binary_function function;
    __device__ __forceinline__ float operator()(float a, float b) const
    {
        switch (function) {
        case PS_ADD:
            return a + b;
        case PS_SUBTRACT:
            return a - b;
        case PS_MULTIPLY:
            return a * b;
        case PS_DIVIDE:
            break;
        }
        return a / b;
    }
};

struct copy_function {
    __device__ __forceinline__ float operator()(float x, float) const
    {
        return x;
    }
};

/* V elements of a source: consecutive, or one repeated. */
template <int V, typename T> static __device__ __forceinline__ void load_source(float *r, const T *p, bool repeats)
{
    if (V > 1 && repeats) {
#pragma unroll
        for (int j = 0; j < V; j++) {
            r[j] = ps_float(*p);
        }
    } else {
        ps_load<V>(r, p);
    }
}

/* A thread writes V elements; operand 0 is y, of type Y, then one or two sources, of type X. */
template <int OPERANDS, int V, bool WIDE, typename Function, typename Y, typename X>
static __global__ void __launch_bounds__(block)
    elementwise(Y *y, const X *a, const X *b, const struct layout<OPERANDS> l, int64_t count, const Function function)
{
    ps_grid_begin();
    const int64_t index = (int64_t)blockIdx.x * block + threadIdx.x;
    if (index >= count) {
        return;
    }
    int64_t offset[OPERANDS];
    locate<WIDE>(offset, l, index);
    float first[V], second[V], out[V];
    load_source<V>(first, a + offset[1], l.stride[1][0] == 0);
    if constexpr (OPERANDS == 3) {
        load_source<V>(second, b + offset[2], l.stride[2][0] == 0);
    }
#pragma unroll
    for (int j = 0; j < V; j++) {
        out[j] = function(first[j], OPERANDS == 3 ? second[j] : 0.0f);
    }
    ps_store<V>(y + offset[0], out);
}

/* Type and sizes of an operand against y's; only sources may repeat elements. */
static enum ps_status check_operand(const char *op, const char *name, const struct ps_tensor *t, enum ps_type type, int rank,
                                    const int64_t *size)
{
    if (t->type != type) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has element type %d, %d is needed", op, name, (int)t->type, (int)type);
    }
    if (t->rank != rank || rank < 0 || rank > PS_MAX_RANK) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has rank %d, %d is needed (at most %d)", op, name, t->rank, rank,
                       PS_MAX_RANK);
    }
    int64_t count = 1;
    for (int i = 0; i < rank; i++) {
        if (t->size[i] != size[i] || size[i] < 0) {
            return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has size %lld in dimension %d, %lld is needed", op, name,
                           (long long)t->size[i], i, (long long)size[i]);
        }
        if (t->stride[i] < 0) {
            return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has stride %lld in dimension %d, none below 0 is served", op, name,
                           (long long)t->stride[i], i);
        }
        count *= size[i];
    }
    if (!t->data && count > 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s is absent", op, name);
    }
    return PS_OK;
}

static enum ps_status check_written(const char *op, const struct ps_tensor *y)
{
    for (int i = 0; i < y->rank; i++) {
        if (y->stride[i] == 0 && y->size[i] > 1) {
            return ps_fail(PS_UNSUPPORTED, "%s (cuda): y repeats its elements along dimension %d", op, i);
        }
    }
    return PS_OK;
}

template <int V, typename Y, typename X, int OPERANDS, typename Function>
static void launch(const struct ps_cuda_context *c, const struct ps_tensor *const (&t)[OPERANDS], const struct layout<OPERANDS> &l,
                   int64_t count, const Function &function)
{
    Y *y = (Y *)t[0]->data;
    const X *a = (const X *)t[1]->data, *b = OPERANDS == 3 ? (const X *)t[OPERANDS - 1]->data : NULL;
    const unsigned blocks = ps_cuda_blocks(count, block);
    if (count > INT32_MAX) {
        ps_cuda_launch(c, elementwise<OPERANDS, V, true, Function, Y, X>, blocks, block, 0, y, a, b, l, count, function);
    } else {
        ps_cuda_launch(c, elementwise<OPERANDS, V, false, Function, Y, X>, blocks, block, 0, y, a, b, l, count, function);
    }
}

template <typename Y, typename X, int OPERANDS, typename Function>
static enum ps_status apply(const struct ps_kernels *k, const char *op, const struct ps_tensor *const (&t)[OPERANDS],
                            const Function &function)
{
    static const char *const names[] = {"y", OPERANDS == 3 ? "a" : "x", "b"};
    for (int i = 0; i < OPERANDS; i++) {
        PS_TRY(check_operand(op, names[i], t[i], i == 0 ? ps_type_of<Y> : ps_type_of<X>, t[0]->rank, t[0]->size));
    }
    PS_TRY(check_written(op, t[0]));
    if (ps_tensor_count(t[0]) == 0) {
        return PS_OK;
    }
    struct layout<OPERANDS> l = {
    };
    layout_make(&l, t[0]->rank, t);
    constexpr int vec = ps_vector<Y> < ps_vector<X> ? ps_vector<Y> : ps_vector<X>;
    const bool vector = layout_vector(&l, t, vec);
    const int64_t count = layout_finish(&l);
    if (vector) {
        launch<vec, Y, X>(ps_cuda(k), t, l, count, function);
    } else {
        launch<1, Y, X>(ps_cuda(k), t, l, count, function);
    }
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_affine(const struct ps_kernels *k, const struct ps_affine *a)
{
    const struct ps_tensor *const t[2] = {&a->y, &a->x};
    return apply<float, float>(k, "affine", t, affine_function{(float)a->scale, (float)a->shift});
}

extern "C" enum ps_status ps_cuda_unary(const struct ps_kernels *k, const struct ps_unary *a)
{
    const struct ps_tensor *const t[2] = {&a->y, &a->x};
    if (a->function > PS_STEP) {
        return ps_fail(PS_UNSUPPORTED, "unary (cuda): no such function");
    }
    return apply<float, float>(k, "unary", t, unary_function{a->function});
}

extern "C" enum ps_status ps_cuda_binary(const struct ps_kernels *k, const struct ps_binary *a)
{
    const struct ps_tensor *const t[3] = {&a->y, &a->a, &a->b};
    return apply<float, float>(k, "binary", t, binary_function{a->function});
}

/* From X to the same or to float, and from float to all: nothing changes one type of 16 bits for the other. */
template <typename X>
static enum ps_status copy_to(const struct ps_kernels *k, enum ps_type to, const struct ps_tensor *const (&t)[2])
{
    const char *op = "strided_copy";
    if constexpr (std::is_same<X, float>::value) {
        if (to == PS_BF16) {
            return apply<ps_bf16, X>(k, op, t, copy_function{});
        }
        if (to == PS_F16) {
            return apply<ps_fp16, X>(k, op, t, copy_function{});
        }
    }
    return to == ps_type_of<X> ? apply<X, X>(k, op, t, copy_function{}) : apply<float, X>(k, op, t, copy_function{});
}

static enum ps_status copy(const struct ps_kernels *k, const struct ps_strided_copy *a)
{
    const struct ps_tensor *const t[2] = {&a->y, &a->x};
    return a->x.type == PS_BF16  ? copy_to<ps_bf16>(k, a->y.type, t)
           : a->x.type == PS_F16 ? copy_to<ps_fp16>(k, a->y.type, t)
                                 : copy_to<float>(k, a->y.type, t);
}

extern "C" enum ps_status ps_cuda_strided_copy(const struct ps_kernels *k, const struct ps_strided_copy *a)
{
    const enum ps_status status = copy(k, a);
    ps_cuda(k)->ordered = true; /* it may have written what products read, and head_step reads that early */
    return status;
}

template <typename T> static enum ps_status add(const struct ps_kernels *k, const struct ps_add *a)
{
    const struct ps_tensor *const t[3] = {&a->y, &a->a, &a->b};
    const int64_t count = ps_tensor_count(&a->y);
    PS_TRY(ps_cuda_expect("add", "y", &a->y, k->real, count));
    PS_TRY(ps_cuda_expect("add", "a", &a->a, k->real, count));
    PS_TRY(ps_cuda_expect("add", "b", &a->b, k->real, count));
    return apply<T, T>(k, "add", t, binary_function{PS_ADD});
}

extern "C" enum ps_status ps_cuda_add(const struct ps_kernels *k, const struct ps_add *a)
{
    return PS_BY_REAL(k, add, k, a);
}

/* ---- reduce ---- */

/* The summed (or searched) dimension of x: its length and stride, cut into shares of share_n, one to a partial row. */
struct reduced {
    int64_t outputs, n, stride, shares, share_n;
    enum ps_reduce_function function;
    int accumulate;
};

static __device__ __forceinline__ float combine(enum ps_reduce_function function, float a, float b)
{
    return function == PS_SUM ? a + b : fmaxf(a, b);
}

template <int LANES> static __device__ __forceinline__ float combine_group(enum ps_reduce_function function, float value)
{
    return function == PS_SUM ? ps_group_sum<LANES>(value) : ps_group_max<LANES>(value);
}

/* To y when there is one share, else to partials [shares, outputs]. */
static __device__ __forceinline__ void put_reduced(float *y, float *partials, const struct layout<2> &l, const struct reduced &r,
                                                   int64_t share, int64_t output, float value)
{
    if (r.shares > 1) {
        partials[share * r.outputs + output] = value;
        return;
    }
    int64_t offset[2];
    locate<false>(offset, l, output);
    y[offset[0]] = r.accumulate ? y[offset[0]] + value : value;
}

/* The reduced dimension is the dense one: LANES lanes an output. Grid: outputs fastest. */
template <int LANES>
static __global__ void __launch_bounds__(block) reduce_rows(float *y, float *partials, const float *__restrict__ x,
                                                            const struct layout<2> l, const struct reduced r, unsigned tiles)
{
    ps_grid_begin();
    const int lane = threadIdx.x % LANES;
    const int64_t share = blockIdx.x / tiles, output = (int64_t)(blockIdx.x % tiles) * (block / LANES) + threadIdx.x / LANES;
    const int64_t begin = share * r.share_n, end = begin + r.share_n < r.n ? begin + r.share_n : r.n;
    float value = r.function == PS_SUM ? 0.0f : -INFINITY;
    if (output < r.outputs) {
        int64_t offset[2];
        locate<false>(offset, l, output);
#pragma unroll 4
        for (int64_t i = begin + lane; i < end; i += LANES) {
            value = combine(r.function, value, x[offset[1] + i * r.stride]);
        }
    }
    value = combine_group<LANES>(r.function, value);
    if (lane == 0 && output < r.outputs) {
        put_reduced(y, partials, l, r, share, output, value);
    }
}

/* Outputs lie denser than the reduced dimension: 32 neighbouring outputs by 8 threads down it. */
static __global__ void __launch_bounds__(block) reduce_columns(float *y, float *partials, const float *__restrict__ x,
                                                               const struct layout<2> l, const struct reduced r, unsigned tiles)
{
    ps_grid_begin();
    __shared__ float shared[block / 32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t share = blockIdx.x / tiles, output = (int64_t)(blockIdx.x % tiles) * 32 + lane;
    const int64_t begin = share * r.share_n, end = begin + r.share_n < r.n ? begin + r.share_n : r.n;
    float value = r.function == PS_SUM ? 0.0f : -INFINITY;
    if (output < r.outputs) {
        int64_t offset[2];
        locate<false>(offset, l, output);
#pragma unroll 4
        for (int64_t i = begin + warp; i < end; i += block / 32) {
            value = combine(r.function, value, x[offset[1] + i * r.stride]);
        }
    }
    shared[warp][lane] = value;
    __syncthreads();
    if (warp == 0 && output < r.outputs) {
#pragma unroll
        for (int i = 1; i < block / 32; i++) {
            value = combine(r.function, value, shared[i][lane]);
        }
        put_reduced(y, partials, l, r, share, output, value);
    }
}

/* The shares of an output, a warp each. */
static __global__ void __launch_bounds__(block)
    reduce_shares(float *y, const float *__restrict__ partials, const struct layout<2> l, const struct reduced r)
{
    ps_grid_begin();
    const int lane = threadIdx.x % 32;
    const int64_t output = (int64_t)blockIdx.x * (block / 32) + threadIdx.x / 32;
    if (output >= r.outputs) {
        return; /* whole warps */
    }
    float value = r.function == PS_SUM ? 0.0f : -INFINITY;
    for (int64_t i = lane; i < r.shares; i += 32) {
        value = combine(r.function, value, partials[i * r.outputs + output]);
    }
    value = combine_group<32>(r.function, value);
    if (lane == 0) {
        int64_t offset[2];
        locate<false>(offset, l, output);
        y[offset[0]] = r.accumulate ? y[offset[0]] + value : value;
    }
}

/* Cuts the reduced dimension so that `tiles` blocks a share fill the device, a share not below `least` elements. */
static void share_out(const struct ps_cuda_context *c, struct reduced *r, int64_t tiles, int64_t least)
{
    int64_t shares = 4LL * c->multiprocessors / tiles;
    const int64_t most = (r->n + least - 1) / least;
    shares = shares < 1 ? 1 : shares > most ? most : shares;
    r->share_n = (r->n + shares - 1) / shares;
    r->shares = (r->n + r->share_n - 1) / r->share_n;
}

template <int LANES>
static enum ps_status launch_rows(const struct ps_cuda_context *c, float *y, const float *x, const struct layout<2> &l,
                                  struct reduced *r)
{
    const unsigned tiles = ps_cuda_blocks(r->outputs, block / LANES);
    share_out(c, r, tiles, 32 * LANES);
    PS_TRY(ps_cuda_workspace(c, "reduce", r->shares > 1 ? (size_t)(r->shares * r->outputs) * sizeof(float) : 0));
    ps_cuda_launch(c, reduce_rows<LANES>, tiles * (unsigned)r->shares, block, 0, y, (float *)c->workspace, x, l, *r, tiles);
    PS_CUDA_LAUNCHED("reduce");
}

static enum ps_status launch_columns(const struct ps_cuda_context *c, float *y, const float *x, const struct layout<2> &l,
                                     struct reduced *r)
{
    const unsigned tiles = ps_cuda_blocks(r->outputs, 32);
    share_out(c, r, tiles, 64);
    PS_TRY(ps_cuda_workspace(c, "reduce", r->shares > 1 ? (size_t)(r->shares * r->outputs) * sizeof(float) : 0));
    ps_cuda_launch(c, reduce_columns, tiles * (unsigned)r->shares, block, 0, y, (float *)c->workspace, x, l, *r, tiles);
    PS_CUDA_LAUNCHED("reduce");
}

extern "C" enum ps_status ps_cuda_reduce(const struct ps_kernels *k, const struct ps_reduce *a)
{
    const char *op = "reduce";
    const struct ps_cuda_context *c = ps_cuda(k);
    if (a->accumulate && a->function != PS_SUM) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): only a sum can accumulate", op);
    }
    if (a->x.rank < 1) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): x has rank %d, at least 1 is needed", op, a->x.rank);
    }
    const int outer = a->x.rank - 1;
    PS_TRY(check_operand(op, "x", &a->x, PS_F32, a->x.rank, a->x.size));
    PS_TRY(check_operand(op, "y", &a->y, PS_F32, outer, a->x.size));
    PS_TRY(check_written(op, &a->y));
    const int64_t outputs = ps_tensor_count(&a->y), n = a->x.size[outer];
    if (outputs == 0) {
        return PS_OK;
    }
    if (outputs > INT32_MAX || n < 1) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld results of %lld elements each are not served", op, (long long)outputs,
                       (long long)n);
    }
    const struct ps_tensor *const t[2] = {&a->y, &a->x};
    struct layout<2> l = {
    };
    layout_make(&l, outer, t);
    layout_finish(&l);
    struct reduced r = {outputs, n, a->x.stride[outer], 1, n, a->function, a->accumulate};
    float *y = (float *)a->y.data;
    const float *x = (const float *)a->x.data;
    if (outputs >= 8 && l.stride[1][0] < r.stride) {
        PS_TRY(launch_columns(c, y, x, l, &r));
    } else if (n <= 16) {
        PS_TRY(launch_rows<4>(c, y, x, l, &r));
    } else if (n <= 64) {
        PS_TRY(launch_rows<8>(c, y, x, l, &r));
    } else {
        PS_TRY(launch_rows<32>(c, y, x, l, &r));
    }
    if (r.shares > 1) {
        ps_cuda_launch(c, reduce_shares, ps_cuda_blocks(outputs, block / 32), block, 0, y, (const float *)c->workspace, l, r);
    }
    PS_CUDA_LAUNCHED(op);
}
