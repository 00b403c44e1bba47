/* What the files of kernels/cpu/ share. */
#ifndef PS_KERNELS_CPU_CPU_H
#define PS_KERNELS_CPU_CPU_H

#include "kernels/kernels.h"

/* The instruction sets that the kernels are compiled for; the widest that this processor has is used. */
enum ps_cpu_isa { PS_ISA_BASE, PS_ISA_AVX2, PS_ISA_AVX512 };

enum ps_cpu_isa ps_cpu_isa_best(void);
const char *ps_cpu_isa_name(enum ps_cpu_isa isa); /* "base", "avx2", "avx512" */

#endif
