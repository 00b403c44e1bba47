/* Opens the CPU's table: the reference's, with the entries of kernels/cpu/isa/ in place of those worth it. */
#include <omp.h>
#include <stdlib.h>

#include "kernels/backends.h"
#include "kernels/cpu/cpu.h"

enum { SCRATCH_ALIGNMENT = 64, SCRATCH_FIRST = 1 << 20 };

enum ps_status ps_cpu_scratch(struct ps_cpu *cpu, size_t bytes, void **scratch)
{
    if (bytes > cpu->scratch_bytes) {
        size_t rounded = (bytes + SCRATCH_ALIGNMENT - 1) / SCRATCH_ALIGNMENT * SCRATCH_ALIGNMENT;
        char *grown = aligned_alloc(SCRATCH_ALIGNMENT, rounded);
        if (grown == NULL) {
            return ps_fail(PS_DEVICE, "not enough memory for scratch: %zu bytes asked", rounded);
        }
        free(cpu->scratch);
        cpu->scratch = grown;
        cpu->scratch_bytes = rounded;
    }
    *scratch = cpu->scratch;
    return PS_OK;
}

static void cpu_close(struct ps_kernels *k)
{
    struct ps_cpu *cpu = ps_cpu(k);
    cpu->reference->close(cpu->reference);
    free(cpu->scratch);
    free(cpu);
}

/* Pieces' scores are computed again in each layer: with wide heads and short sequences a product of stored ones is less work. */
static int attention_faster(const struct ps_kernels *k, int64_t patches, int64_t head, int64_t pieces)
{
    (void)k;
    return pieces == 1 || head * pieces <= 24 || patches >= 128;
}

/* While the weights and their sums stay in the second-level cache. */
static int feed_forward_faster(const struct ps_kernels *k, int64_t d_model, int64_t d_ff)
{
    (void)k;
    return d_model * d_ff <= 1 << 17;
}

enum ps_status ps_cpu_kernels_open(struct ps_device *device, enum ps_precision precision, struct ps_kernels **kernels)
{
    *kernels = NULL;
    if (precision != PS_FP32 && precision != PS_TF32) {
        return ps_fail(PS_UNSUPPORTED, "the cpu backend computes in fp32 (tf32 is computed as fp32), not %s",
                       ps_precision_name(precision));
    }
    struct ps_cpu *cpu = calloc(1, sizeof *cpu);
    if (cpu == NULL) {
        return ps_fail(PS_DEVICE, "not enough memory for the cpu backend's table (%zu bytes)", sizeof *cpu);
    }
    void *scratch = NULL;
    enum ps_status status = ps_reference_kernels_open(device, PS_FP32, &cpu->reference);
    if (status == PS_OK) {
        status = ps_cpu_scratch(cpu, SCRATCH_FIRST, &scratch);
        if (status != PS_OK) {
            cpu->reference->close(cpu->reference);
        }
    }
    if (status != PS_OK) {
        free(cpu);
        return status;
    }
    cpu->threads = omp_get_max_threads();
    cpu->table = *cpu->reference;
    cpu->table.backend = "cpu";
    cpu->table.precision = precision;
    cpu->table.close = cpu_close;
    cpu->table.attention_faster = attention_faster;
    cpu->table.feed_forward_faster = feed_forward_faster;
    cpu->table.bias_residual_statistics = NULL; /* as two, both fast */
    cpu->table.gemm_finish = NULL;
    cpu->table.batchnorm_fold = NULL;
    cpu->table.batchnorm_unfold = NULL;
    cpu->table.batchnorm_fold_faster = NULL;
    switch (ps_cpu_isa_best()) {
#if defined(__x86_64__)
    case PS_ISA_AVX512:
        ps_cpu_fill_avx512(&cpu->table);
        break;
    case PS_ISA_AVX2:
        ps_cpu_fill_avx2(&cpu->table);
        break;
#endif
    default:
        ps_cpu_fill_base(&cpu->table);
        break;
    }
    *kernels = &cpu->table;
    return PS_OK;
}
