/* What the files of kernels/cpu/ share. */
#ifndef PS_KERNELS_CPU_CPU_H
#define PS_KERNELS_CPU_CPU_H

#include "kernels/kernels.h"

/* The instruction sets that the kernels are compiled for; the widest that this processor has is used. */
enum ps_cpu_isa { PS_ISA_BASE, PS_ISA_AVX2, PS_ISA_AVX512 };

enum ps_cpu_isa ps_cpu_isa_best(void);
const char *ps_cpu_isa_name(enum ps_cpu_isa isa); /* "base", "avx2", "avx512" */

/* The table with what stands behind it. The entries that are not overridden are the reference's and find the reference's context in
 * table.context. */
struct ps_cpu {
    struct ps_kernels table;
    struct ps_kernels *reference;
    int threads;   /* parts that every operation is cut into, whatever the number of threads that run them */
    char *scratch; /* partial sums and packed matrices; kept from call to call, grown when a call needs more */
    size_t scratch_bytes;
};

static inline struct ps_cpu *ps_cpu(const struct ps_kernels *k)
{
    return (struct ps_cpu *)k;
}

/* At least `bytes` of scratch, aligned to 64 bytes, valid until the next call of this. */
enum ps_status ps_cpu_scratch(struct ps_cpu *cpu, size_t bytes, void **scratch);

/* Sets OpenMP and OpenBLAS to `wanted` threads (0: one a processor, as far as OMP_THREAD_LIMIT allows), or to as many as there are:
 * *threads; *asked: as many as there were to be. One setting of the process, made by one thread. PS_DEVICE: not even one. */
enum ps_status ps_cpu_threads(int wanted, int *asked, int *threads);

/* Overrides the entries of table that this folder computes faster. One for each instruction set: kernels/cpu/isa/. */
void ps_cpu_fill_base(struct ps_kernels *table);
void ps_cpu_fill_avx2(struct ps_kernels *table);
void ps_cpu_fill_avx512(struct ps_kernels *table);

#endif
