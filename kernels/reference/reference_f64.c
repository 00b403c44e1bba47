typedef double real;
#define REAL PS_F64
#define FILL ps_reference_fill_f64
#include "kernels/reference/operations.inc"
