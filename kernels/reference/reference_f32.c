typedef float real;
#define REAL PS_F32
#define FILL ps_reference_fill_f32
#include "kernels/reference/operations.inc"
