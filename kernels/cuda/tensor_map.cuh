/* Tensor maps, by which the copy engine finds boxes of a tensor (sm_90). The driver's function is asked for by name: nothing links
 * to the driver. */
#ifndef PS_KERNELS_CUDA_TENSOR_MAP_CUH
#define PS_KERNELS_CUDA_TENSOR_MAP_CUH

#include <cudaTypedefs.h>

#include "kernels/cuda/context.cuh"

static inline enum ps_status ps_tensor_map_encoder(PFN_cuTensorMapEncodeTiled_v12000 *encoder)
{
    static PFN_cuTensorMapEncodeTiled_v12000 known = NULL;
    if (!known) {
        void *found = NULL;
        cudaDriverEntryPointQueryResult result;
        PS_TRY(ps_cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
                             "cuTensorMapEncodeTiled"));
        known = (PFN_cuTensorMapEncodeTiled_v12000)found;
    }
    *encoder = known;
    return known ? PS_OK : ps_fail(PS_DEVICE, "cuda: the driver has no cuTensorMapEncodeTiled");
}

/* Of a matrix [rows, columns] whose rows lie stride_bytes apart (a multiple of 16, as its address): boxes of box_rows, up to 256,
 * and box_columns, with zeros beyond the edges. A box's rows follow one another. */
static inline enum ps_status ps_tensor_map(CUtensorMap *map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const void *data,
                                           int64_t rows, int64_t columns, int64_t stride_bytes, int box_rows, int box_columns)
{
    PFN_cuTensorMapEncodeTiled_v12000 encode;
    PS_TRY(ps_tensor_map_encoder(&encode));
    const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[] = {(cuuint64_t)stride_bytes};
    const cuuint32_t box[] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, every[] = {1, 1};
    const CUresult result = encode(map, type, 2, (void *)data, sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? PS_OK
                                  : ps_fail(PS_DEVICE, "cuda: no tensor map of [%lld, %lld], %lld bytes a row (error %d)",
                                            (long long)rows, (long long)columns, (long long)stride_bytes, (int)result);
}

/* Of 16 bits, 64, 32 or 16 columns: 128, 64 or 32 bytes a row, their 16-byte units exchanged over as many bytes: of 128 as
 * tile/wgmma.cuh reads them, the box aligned to 1,024. */
static inline enum ps_status ps_tensor_map_2d(CUtensorMap *map, const void *data, int64_t rows, int64_t columns,
                                              int64_t stride_bytes, int box_rows, int box_columns)
{
    const CUtensorMapSwizzle swizzle = box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
    return ps_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, swizzle, data, rows, columns, stride_bytes, box_rows, box_columns);
}

/* Of float32: 32 columns, exchanged as those of 128 bytes above, or 16, which lie as they are. */
static inline enum ps_status ps_tensor_map_2d_float(CUtensorMap *map, const void *data, int64_t rows, int64_t columns,
                                                    int64_t stride_bytes, int box_rows, int box_columns)
{
    return ps_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                         box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, data, rows, columns,
                         stride_bytes, box_rows, box_columns);
}

#endif
