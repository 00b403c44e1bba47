/* gemm/wgmma16.cuh for fp16. */
#include "kernels/cuda/gemm/wgmma16.cuh"

namespace wgmma16
{
PS_WGMMA16_OF(, ps_fp16)
}
