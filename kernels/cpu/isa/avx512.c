/* The CPU's kernels for the instruction set "avx512". */
#define PS_ISA_FILL ps_cpu_fill_avx512
#include "kernels/cpu/isa/operations.inc"
