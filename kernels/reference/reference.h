/* What the reference's files share. Private to kernels/. */
#ifndef PS_KERNELS_REFERENCE_REFERENCE_H
#define PS_KERNELS_REFERENCE_REFERENCE_H

#include "kernels/kernels.h"

/* Fill the entries of the table, computed in float and in double. */
void ps_reference_fill_f32(struct ps_kernels *k);
void ps_reference_fill_f64(struct ps_kernels *k);

enum ps_layout { PS_DENSE, PS_STRIDED };

/* PS_UNSUPPORTED, naming operation, tensor and both shapes, unless t has this type and these sizes (and, PS_DENSE, is row-major
 * contiguous). */
enum ps_status ps_reference_expect(const char *operation, const char *name, const struct ps_tensor *t, enum ps_type type,
                                   enum ps_layout layout, int rank, const int64_t *size);

#endif
