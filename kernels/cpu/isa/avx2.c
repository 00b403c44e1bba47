/* The CPU's kernels for the instruction set "avx2". */
#define PS_ISA_FILL ps_cpu_fill_avx2
#include "kernels/cpu/isa/operations.inc"
