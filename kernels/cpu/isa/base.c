/* The CPU's kernels for the instruction set "base". */
#define PS_ISA_FILL ps_cpu_fill_base
#include "kernels/cpu/isa/operations.inc"
