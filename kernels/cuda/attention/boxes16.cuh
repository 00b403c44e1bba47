/* Tensor maps of attention's rows of 16 bits, by which the copy engine brings and returns boxes of them (sm_90). */
#ifndef PS_KERNELS_CUDA_ATTENTION_BOXES16_CUH
#define PS_KERNELS_CUDA_ATTENTION_BOXES16_CUH

#include <type_traits>

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tile/vector.cuh"

/* Of a view as [columns, heads, N, S, pieces]; joined: heads that lie side by side are one. A box has W bytes of `rows` rows of
 * `sequences` sequences; its units of 16 bytes are exchanged over W bytes. */
template <typename T, int W>
static enum ps_status ps_attention_map(CUtensorMap *map, const struct ps_attention_view &v, const struct ps_attention_launch &x,
                                       int pieces, bool joined, int rows, int sequences)
{
    PFN_cuTensorMapEncodeTiled_v12000 encode;
    PS_TRY(ps_tensor_map_encoder(&encode));
    const int heads = joined ? 1 : x.heads;
    const cuuint64_t sizes[] = {(cuuint64_t)(x.heads / heads * x.e), (cuuint64_t)heads, (cuuint64_t)x.patches,
                                (cuuint64_t)(x.matrices / x.heads), (cuuint64_t)pieces};
    /* What is there once has any stride; a map needs one. */
    const auto stride = [](cuuint64_t size, int64_t elements) { return (cuuint64_t)(size > 1 ? elements * 2 : 16); };
    const cuuint64_t strides[] = {stride(sizes[1], v.head), stride(sizes[2], v.row), stride(sizes[3], v.sequence),
                                  stride(sizes[4], v.piece)};
    const cuuint32_t box[] = {W / 2, 1, (cuuint32_t)rows, (cuuint32_t)sequences, 1}, every[] = {1, 1, 1, 1, 1};
    const CUresult result =
        encode(map, std::is_same<T, ps_bf16>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, v.data,
               sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
               W == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
               : W == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                         : CU_TENSOR_MAP_SWIZZLE_32B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? PS_OK
                                  : ps_fail(PS_DEVICE, "cuda: attention: no tensor map of %d patches, %d heads of %d (error %d)",
                                            x.patches, x.heads, x.e, (int)result);
}

#endif
