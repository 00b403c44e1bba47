#include "model/layer.h"

#include "model/model.h"

struct ps_tensor ps_layer_rows(const struct ps_layer *l, void *buffer, int64_t columns)
{
    return ps_tensor_2d(buffer, l->k->real, l->R, columns);
}

struct ps_tensor ps_layer_heads(const struct ps_layer *l, void *buffer, int64_t parts)
{
    return ps_tensor_nd(buffer, l->k->real, 5, (int64_t[]){parts, l->S, l->h, l->N, l->e});
}

struct ps_tensor ps_layer_head(const struct ps_layer *l, void *buffer, int64_t part)
{
    char *begin = (char *)buffer + (size_t)(part * l->R * l->a) * ps_type_bytes(l->k->real);
    return ps_tensor_3d(begin, l->k->real, l->S * l->h, l->N, l->e);
}

struct ps_tensor ps_layer_head_rows(const struct ps_layer *l, void *buffer, int64_t columns, int64_t part)
{
    char *begin = (char *)buffer + (size_t)(part * l->a) * ps_type_bytes(l->k->real);
    return ps_tensor_heads(begin, l->k->real, l->S, l->h, l->N, l->e, columns);
}

struct ps_tensor ps_layer_head_statistics(const struct ps_layer *l, void *buffer)
{
    return ps_tensor_3d(buffer, l->k->statistics, l->S, l->h, l->N);
}

struct ps_tensor ps_layer_attention(const struct ps_layer *l, void *buffer)
{
    return ps_tensor_3d(buffer, l->k->real, l->S * l->h, l->N, l->N);
}

struct ps_tensor ps_layer_statistics(const struct ps_layer *l, void *buffer)
{
    return ps_tensor_1d(buffer, l->k->statistics, l->R);
}

struct ps_tensor ps_transposed(struct ps_tensor t)
{
    return ps_tensor_transpose(t, t.rank - 2, t.rank - 1);
}

enum ps_status ps_layer_rope(const struct ps_layer *l, struct ps_tensor rows, int inverse)
{
    for (int part = 0; l->angles.data && part < 2; part++) {
        struct ps_tensor heads = ps_layer_head_rows(l, rows.data, 3 * l->a, part);
        PS_TRY(l->k->rope(l->k, &(struct ps_rope){.y = heads, .x = heads, .angles = l->angles, .inverse = inverse}));
    }
    return PS_OK;
}

enum ps_status ps_product(const struct ps_kernels *k, struct ps_tensor c, struct ps_tensor a, struct ps_tensor b, double alpha,
                          double beta)
{
    return k->gemm(k, &(struct ps_gemm){.c = c, .a = a, .b = b, .alpha = alpha, .beta = beta});
}

struct ps_tensor ps_model_stream(const struct ps_model *m, int64_t layer, int64_t batch)
{
    int64_t R = batch * m->shape.channels * ps_patches(&m->shape), d = m->shape.d_model;
    char *begin = (char *)m->cache.shared.stream + (size_t)(layer * R * d) * ps_type_bytes(m->k->real);
    return ps_tensor_2d(begin, m->k->real, R, d);
}
