/* The type of the files of streamed/ and split/: bf16, fp16 with PS_COMPILE_FP16, tf32 with PS_COMPILE_TF32, and fp32 with
 * PS_COMPILE_FP32 besides. They are compiled once for each (CMakeLists.txt), in a namespace of its own. */
#ifndef PS_KERNELS_CUDA_ENCODER_STREAMED_TYPES_CUH
#define PS_KERNELS_CUDA_ENCODER_STREAMED_TYPES_CUH

#include "kernels/cuda/tile/mma.cuh"

#if defined PS_COMPILE_FP32
#define PS_REAL16_SPACE level_fp32
#elif defined PS_COMPILE_TF32
#define PS_REAL16_SPACE level_tf32
#else
#ifdef PS_COMPILE_FP16
typedef ps_fp16 real16;
#define PS_REAL16_SPACE level_fp16
#define PS_REAL16_PTX "f16" /* in the names of instructions */
#else
typedef ps_bf16 real16;
#define PS_REAL16_SPACE level_bf16
#define PS_REAL16_PTX "bf16"
#endif
#endif

#endif
