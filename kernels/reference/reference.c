#include "kernels/reference/reference.h"

#include <stdio.h>
#include <stdlib.h>

#include "kernels/backends.h"

static const char *type_name(enum ps_type type)
{
    switch (type) {
    case PS_F32:
        return "float32";
    case PS_F64:
        return "float64";
    case PS_BF16:
        return "bfloat16";
    case PS_F16:
        return "float16";
    case PS_I32:
        return "int32";
    }
    return "?";
}

/* "[2, 3]". */
static void sizes_text(char *text, size_t capacity, int rank, const int64_t *size)
{
    size_t used = (size_t)snprintf(text, capacity, "[");
    for (int i = 0; i < rank && i < PS_MAX_RANK; i++) {
        used += (size_t)snprintf(text + used, capacity - used, "%s%lld", i ? ", " : "", (long long)size[i]);
    }
    snprintf(text + used, capacity - used, "]");
}

enum ps_status ps_reference_expect(const char *operation, const char *name, const struct ps_tensor *t, enum ps_type type,
                                   enum ps_layout layout, int rank, const int64_t *size)
{
    int fits = t->data && t->type == type && t->rank == rank;
    for (int i = 0; fits && i < rank; i++) {
        fits = t->size[i] == size[i];
    }
    if (fits && (layout == PS_STRIDED || ps_tensor_contiguous(t))) {
        return PS_OK;
    }
    char is[128], expected[128];
    sizes_text(is, sizeof is, t->rank, t->size);
    sizes_text(expected, sizeof expected, rank, size);
    return ps_fail(PS_UNSUPPORTED, "%s: %s is %s%s %s, not %s%s %s", operation, name, t->data ? "" : "absent, ", type_name(t->type),
                   is, layout == PS_DENSE ? "contiguous " : "", type_name(type), expected);
}

static void reference_close(struct ps_kernels *k)
{
    free(k);
}

enum ps_status ps_reference_kernels_open(struct ps_device *device, enum ps_precision precision, struct ps_kernels **kernels)
{
    if (precision != PS_FP32 && precision != PS_FP64) {
        return ps_fail(PS_UNSUPPORTED, "reference: precision %s is not supported; fp32 and fp64 are", ps_precision_name(precision));
    }
    struct ps_kernels *k = calloc(1, sizeof *k);
    if (!k) {
        return ps_fail(PS_DEVICE, "reference: out of memory");
    }
    k->backend = "reference";
    k->precision = precision;
    k->real = k->parameter = k->statistics = precision == PS_FP64 ? PS_F64 : PS_F32;
    k->device = device;
    k->close = reference_close;
    if (precision == PS_FP64) {
        ps_reference_fill_f64(k);
    } else {
        ps_reference_fill_f32(k);
    }
    *kernels = k;
    return PS_OK;
}
