/* A small tensor descriptor: where the elements are, of what type, and how they are laid out. A transpose, a slice or a broadcast
 * is another descriptor of the same elements. */
#ifndef PS_KERNELS_TENSOR_H
#define PS_KERNELS_TENSOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PS_MAX_RANK 5

enum ps_type { PS_F32, PS_F64, PS_BF16, PS_F16, PS_I32 };

struct ps_tensor {
    void *data; /* NULL: the tensor is absent (an optional argument) */
    enum ps_type type;
    int rank;
    int64_t size[PS_MAX_RANK];   /* [0, rank) */
    int64_t stride[PS_MAX_RANK]; /* in elements; 0 repeats (broadcast), sources only */
    int settled;                 /* the operation just before the one that reads it has not written it: it may be read early */
};

size_t ps_type_bytes(enum ps_type type);

/* Row-major contiguous tensor of the given sizes. */
struct ps_tensor ps_tensor_1d(void *data, enum ps_type type, int64_t n0);
struct ps_tensor ps_tensor_2d(void *data, enum ps_type type, int64_t n0, int64_t n1);
struct ps_tensor ps_tensor_3d(void *data, enum ps_type type, int64_t n0, int64_t n1, int64_t n2);
struct ps_tensor ps_tensor_nd(void *data, enum ps_type type, int rank, const int64_t *size);

/* [sequences, heads, patches, e] of rows [sequences * patches, columns], of which `heads` e columns hold the heads from data on. */
struct ps_tensor ps_tensor_heads(void *data, enum ps_type type, int64_t sequences, int64_t heads, int64_t patches, int64_t e,
                                 int64_t columns);

/* The same contiguous elements seen with other sizes (their product unchanged). */
struct ps_tensor ps_tensor_reshape(struct ps_tensor t, int rank, const int64_t *size);
/* Dimensions i and j exchanged. */
struct ps_tensor ps_tensor_transpose(struct ps_tensor t, int i, int j);
/* Elements [begin, begin + count) of dimension dim. */
struct ps_tensor ps_tensor_slice(struct ps_tensor t, int dim, int64_t begin, int64_t count);

int64_t ps_tensor_count(const struct ps_tensor *t);
/* True when the elements are dense and row-major (sizes of 1 may have any stride). */
int ps_tensor_contiguous(const struct ps_tensor *t);

#ifdef __cplusplus
}
#endif
#endif
