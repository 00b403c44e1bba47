#include "kernels/tensor.h"

size_t ps_type_bytes(enum ps_type type)
{
    switch (type) {
    case PS_F64:
        return 8;
    case PS_BF16:
    case PS_F16:
        return 2;
    case PS_F32:
    case PS_I32:
        break;
    }
    return 4;
}

struct ps_tensor ps_tensor_nd(void *data, enum ps_type type, int rank, const int64_t *size)
{
    struct ps_tensor t = {.data = data, .type = type, .rank = rank};
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; i--) {
        t.size[i] = size[i];
        t.stride[i] = stride;
        stride *= size[i];
    }
    return t;
}

struct ps_tensor ps_tensor_1d(void *data, enum ps_type type, int64_t n0)
{
    return ps_tensor_nd(data, type, 1, (int64_t[]){n0});
}

struct ps_tensor ps_tensor_2d(void *data, enum ps_type type, int64_t n0, int64_t n1)
{
    return ps_tensor_nd(data, type, 2, (int64_t[]){n0, n1});
}

struct ps_tensor ps_tensor_3d(void *data, enum ps_type type, int64_t n0, int64_t n1, int64_t n2)
{
    return ps_tensor_nd(data, type, 3, (int64_t[]){n0, n1, n2});
}

struct ps_tensor ps_tensor_reshape(struct ps_tensor t, int rank, const int64_t *size)
{
    return ps_tensor_nd(t.data, t.type, rank, size);
}

struct ps_tensor ps_tensor_heads(void *data, enum ps_type type, int64_t sequences, int64_t heads, int64_t patches, int64_t e,
                                 int64_t columns)
{
    struct ps_tensor t = ps_tensor_nd(data, type, 4, (int64_t[]){sequences, patches, heads, e});
    t.stride[0] = patches * columns;
    t.stride[1] = columns;
    return ps_tensor_transpose(t, 1, 2);
}

struct ps_tensor ps_tensor_transpose(struct ps_tensor t, int i, int j)
{
    int64_t size = t.size[i], stride = t.stride[i];
    t.size[i] = t.size[j];
    t.stride[i] = t.stride[j];
    t.size[j] = size;
    t.stride[j] = stride;
    return t;
}

struct ps_tensor ps_tensor_slice(struct ps_tensor t, int dim, int64_t begin, int64_t count)
{
    t.data = (char *)t.data + (size_t)(begin * t.stride[dim]) * ps_type_bytes(t.type);
    t.size[dim] = count;
    return t;
}

int64_t ps_tensor_count(const struct ps_tensor *t)
{
    int64_t count = 1;
    for (int i = 0; i < t->rank; i++) {
        count *= t->size[i];
    }
    return count;
}

int ps_tensor_contiguous(const struct ps_tensor *t)
{
    int64_t stride = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        if (t->size[i] != 1 && t->stride[i] != stride) {
            return 0;
        }
        stride *= t->size[i];
    }
    return 1;
}
