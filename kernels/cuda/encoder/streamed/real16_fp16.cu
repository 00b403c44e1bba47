/* encoder/streamed/real16.cuh in fp16. */
#include "kernels/cuda/tile/vector.cuh"

typedef ps_fp16 real16;
#define PS_REAL16_SPACE level_fp16
#define PS_REAL16_PTX "f16" /* in the names of instructions */

#include "kernels/cuda/encoder/streamed/real16.cuh"
