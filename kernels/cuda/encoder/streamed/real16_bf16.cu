/* encoder/streamed/real16.cuh in bf16. */
#include "kernels/cuda/tile/vector.cuh"

typedef ps_bf16 real16;
#define PS_REAL16_SPACE level_bf16
#define PS_REAL16_PTX "bf16" /* in the names of instructions */

#include "kernels/cuda/encoder/streamed/real16.cuh"
