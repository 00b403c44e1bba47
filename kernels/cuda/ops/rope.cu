/* rope: pairs of columns of queries and keys turn by their position's angle (Su et al. 2021).
 *
 * Why: q and k lie in heads or in rows of qkv, any strides; each is turned where it lies, in one pass. A thread takes 16 bytes
 * where heads and strides are multiples of that, else one pair; the angles [N, e] stay in the caches.
 *
 * y =, in place if asked: a thread reads its own elements first. Bytes: 8 S h N e, half of that in 16 bits. Flops: 3 an element.
 * Memory bounds it. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 256;

/* Sizes of [S, h, N, e / V], and strides of S, h, N in elements. */
struct turning {
    int64_t y_stride[3], x_stride[3];
    int count, e;
    float sign; /* -1: by -a */
    struct ps_divisor by_units /* e / V */, by_patches, by_heads;
};

/* V elements of memory: V 2 one by one. */
template <int V, typename T> static __device__ __forceinline__ void load(float (&r)[V], const T *p)
{
    if constexpr (V == 2) {
        r[0] = ps_float(p[0]);
        r[1] = ps_float(p[1]);
    } else {
        ps_load<V>(r, p);
    }
}

template <int V, typename T> static __device__ __forceinline__ void store(T *p, const float (&r)[V])
{
    if constexpr (V == 2) {
        ps_put(p, r[0]);
        ps_put(p + 1, r[1]);
    } else {
        ps_store<V>(p, r);
    }
}

template <typename T, int V>
static __global__ void __launch_bounds__(block) turn_pairs(T *y, const T *x, const float *angles, const struct turning t)
{
    ps_grid_begin();
    const uint32_t index = blockIdx.x * (uint32_t)block + threadIdx.x;
    if (index >= (uint32_t)t.count) {
        return;
    }
    const uint32_t row = ps_divide(index, t.by_units), head = ps_divide(row, t.by_patches), s = ps_divide(head, t.by_heads);
    const uint32_t column = (index - row * t.by_units.divisor) * V, n = row - head * t.by_patches.divisor,
                   j = head - s * t.by_heads.divisor;
    float v[V], angle[V], out[V];
    load<V>(v, x + s * t.x_stride[0] + j * t.x_stride[1] + n * t.x_stride[2] + column);
    load<V>(angle, angles + (int64_t)n * t.e + column);
#pragma unroll
    for (int i = 0; i < V; i += 2) {
        const float cosine = angle[i], sine = t.sign * angle[i + 1];
        out[i] = v[i] * cosine - v[i + 1] * sine;
        out[i + 1] = v[i] * sine + v[i + 1] * cosine;
    }
    store<V>(y + s * t.y_stride[0] + j * t.y_stride[1] + n * t.y_stride[2] + column, out);
}

/* Type, sizes and strides of x or y [S, h, N, e]; *vector stays true where 16-byte accesses will do. */
template <typename T>
static enum ps_status check(const char *op, const char *name, const struct ps_tensor *t, const int64_t *size, bool written,
                            int64_t (&stride)[3], bool *vector)
{
    if (t->rank != 4 || t->type != ps_type_of<T>) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has rank %d and element type %d, 4 and %d are needed", op, name, t->rank,
                       (int)t->type, (int)ps_type_of<T>);
    }
    int64_t count = 1;
    for (int i = 0; i < 4; i++) {
        count *= size[i];
        if (t->size[i] != size[i]) {
            return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has size %lld in dimension %d, %lld is needed", op, name,
                           (long long)t->size[i], i, (long long)size[i]);
        }
        if (i < 3) {
            stride[i] = t->stride[i];
            *vector = *vector && (size[i] == 1 || stride[i] % ps_vector<T> == 0);
            if (stride[i] < 0 || (written && stride[i] == 0 && size[i] > 1)) {
                return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has stride %lld in dimension %d", op, name, (long long)stride[i], i);
            }
        }
    }
    if (t->stride[3] != 1 && size[3] > 1) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has stride %lld along a head, 1 is needed", op, name,
                       (long long)t->stride[3]);
    }
    if (!t->data && count > 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s is absent", op, name);
    }
    *vector = *vector && size[3] % ps_vector<T> == 0 && ps_cuda_aligned(t);
    return PS_OK;
}

template <typename T, int V>
static void launch(const struct ps_cuda_context *c, const struct ps_rope *a, struct turning t, int64_t count)
{
    t.count = (int)(count / V);
    t.by_units = ps_divisor_make(t.e / V);
    ps_cuda_launch(c, turn_pairs<T, V>, ps_cuda_blocks(t.count, block), block, 0, (T *)a->y.data, (const T *)a->x.data,
                   (const float *)a->angles.data, t);
}

template <typename T> static enum ps_status rope(const struct ps_kernels *k, const struct ps_rope *a)
{
    const char *op = "rope";
    const int64_t *size = a->x.size, count = ps_tensor_count(&a->x);
    struct turning t = {};
    bool vector = ps_cuda_aligned(&a->angles);
    PS_TRY(check<T>(op, "x", &a->x, size, false, t.x_stride, &vector));
    PS_TRY(check<T>(op, "y", &a->y, size, true, t.y_stride, &vector));
    PS_TRY(ps_cuda_expect(op, "angles", &a->angles, PS_F32, size[2] * size[3]));
    if (size[3] % 2 != 0 || count > INT32_MAX) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld elements in heads of %lld columns, which have to be pairs", op,
                       (long long)count, (long long)size[3]);
    }
    if (count == 0) {
        return PS_OK;
    }
    t.e = (int)size[3];
    t.sign = a->inverse ? -1.0f : 1.0f;
    t.by_patches = ps_divisor_make(size[2]);
    t.by_heads = ps_divisor_make(size[1]);
    if (vector) {
        launch<T, ps_vector<T>>(ps_cuda(k), a, t, count);
    } else {
        launch<T, 2>(ps_cuda(k), a, t, count);
    }
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_rope(const struct ps_kernels *k, const struct ps_rope *a)
{
    return PS_BY_REAL(k, rope, k, a);
}
