/* The tables of kernels under test, of every backend and precision, and the double reference that they are compared with. */
#ifndef PS_TESTS_TABLES_H
#define PS_TESTS_TABLES_H

#include "kernels/cpu/cpu.h"
#include "kernels/kernels.h"
#include "tests/checks.h"
#include "tests/length.h"

struct table {
    const char *name, *backend, *device_kind;
    enum ps_precision precision;
    int tiny_gemm;
    void (*fill)(struct ps_kernels *table); /* another instruction set's entries in place of the best one's; or NULL */
    struct ps_device *device;
    struct ps_kernels *kernels;
    char *memory; /* device memory that calls are laid out in */
    size_t capacity;
};

static inline enum ps_status table_open(struct table *t)
{
    struct ps_kernels_options options = {.tiny_gemm = t->tiny_gemm};
    PS_TRY(ps_device_open(t->device_kind, 0, &t->device));
    PS_TRY(ps_kernels_open(t->backend, t->device, t->precision, &options, &t->kernels));
    if (t->fill) {
        t->fill(t->kernels);
    }
    return PS_OK;
}

static inline void table_close(struct table *t)
{
    if (t->kernels) {
        t->kernels->close(t->kernels);
    }
    if (t->memory) {
        t->device->release(t->device, t->memory, t->capacity);
    }
    if (t->device) {
        t->device->close(t->device);
    }
    t->kernels = NULL;
    t->memory = NULL;
    t->capacity = 0;
    t->device = NULL;
}

enum { REFERENCE_TABLES = 2, CPU_TABLES = 5 }; /* come first */

static inline void fill_avx2(struct ps_kernels *table)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        ps_cpu_fill_avx2(table);
        return;
    }
#endif
    ps_cpu_fill_base(table);
}

static struct table tables[] = {
    {.name = "reference fp64", .backend = "reference", .device_kind = "cpu", .precision = PS_FP64},
    {.name = "reference fp32", .backend = "reference", .device_kind = "cpu", .precision = PS_FP32},
    {.name = "cpu fp32", .backend = "cpu", .device_kind = "cpu", .precision = PS_FP32},
    {.name = "cpu tf32, avx2", .backend = "cpu", .device_kind = "cpu", .precision = PS_TF32, .fill = fill_avx2},
    {.name = "cpu fp32, base", .backend = "cpu", .device_kind = "cpu", .precision = PS_FP32, .fill = ps_cpu_fill_base},
    {.name = "cuda fp32", .backend = "cuda", .device_kind = "cuda", .precision = PS_FP32, .tiny_gemm = 1},
    {.name = "cuda fp32 tiny_gemm off", .backend = "cuda", .device_kind = "cuda", .precision = PS_FP32},
    {.name = "cuda tf32", .backend = "cuda", .device_kind = "cuda", .precision = PS_TF32, .tiny_gemm = 1},
    {.name = "cuda tf32 tiny_gemm off", .backend = "cuda", .device_kind = "cuda", .precision = PS_TF32},
    {.name = "cuda bf16", .backend = "cuda", .device_kind = "cuda", .precision = PS_PRECISION_BF16, .tiny_gemm = 1},
    {.name = "cuda bf16 tiny_gemm off", .backend = "cuda", .device_kind = "cuda", .precision = PS_PRECISION_BF16},
    {.name = "cuda fp16", .backend = "cuda", .device_kind = "cuda", .precision = PS_FP16, .tiny_gemm = 1},
    {.name = "cuda fp16 tiny_gemm off", .backend = "cuda", .device_kind = "cuda", .precision = PS_FP16}};

/* How many of the tables this machine has. */
static inline int present(void)
{
    return ps_cuda_device_count() == 0 ? CPU_TABLES : LENGTH(tables);
}

/* Tables take other values by their type of 16 bits, if they have one. */
static inline enum ps_type kind_of(const struct table *t)
{
    return t->precision == PS_PRECISION_BF16 ? PS_BF16 : t->precision == PS_FP16 ? PS_F16 : PS_F32;
}

/* Whether the table has the operation; the optional ones may be absent. */
static inline int has_entry(const struct table *t, enum ps_op op)
{
    switch (op) {
#define PS_X(name, kind, n, flops) \
    case PS_OP_##name:             \
        return t->kernels->name != NULL;
        PS_KERNEL_LIST(PS_X)
#undef PS_X
    case PS_OP_COUNT:
        break;
    }
    return 0;
}

static struct table oracle = {.name = "oracle", .backend = "reference", .device_kind = "cpu", .precision = PS_FP64};

static inline void open_oracle(void)
{
    ck_assert_msg(table_open(&oracle) == PS_OK, "%s", ps_error_message());
}

static inline void close_oracle(void)
{
    table_close(&oracle);
}

#endif
