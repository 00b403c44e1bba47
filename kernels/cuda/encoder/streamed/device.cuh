/* The instructions that encoder/streamed/real16.cu is made of beside tile/mma.cuh's, one function each. */
#ifndef PS_KERNELS_CUDA_ENCODER_STREAMED_DEVICE_CUH
#define PS_KERNELS_CUDA_ENCODER_STREAMED_DEVICE_CUH

#include <cudaTypedefs.h>

#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/encoder/streamed/types.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

/* Two matrices to shared memory, the addresses as for ldmatrix. */
static __device__ __forceinline__ void ps_stmatrix_x2(uint32_t address, uint32_t r0, uint32_t r1)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r0), "r"(r1) : "memory");
}

/* True for the last of so many that come here, after what those before have done; then it starts again. */
static __device__ __forceinline__ bool ps_shared_count(uint32_t counter, int all)
{
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;" : "=r"(before) : "r"(counter), "r"(all - 1) : "memory");
    return before == (uint32_t)all - 1;
}

/* The 128 bytes of global memory around there, to L2. */
static __device__ __forceinline__ void ps_prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* ---- sm_90a: a warpgroup's product, its right operand read from shared memory by the tensor cores ---- */

/* d += a b for the warpgroup's 64 rows and COLUMNS (32 or 64) columns, 16 deep, with both operands in shared memory. */
template <int COLUMNS, int TRANSPOSED> static __device__ __forceinline__ void ps_wgmma_shared(float (*d)[4], uint64_t a, uint64_t b)
{
    if constexpr (COLUMNS == 32) {
        asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
                     "%13, %14, %15}, %16, %17, p, 1, 1, 0, %18;\n}"
                     : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                       "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
                       "+f"(d[3][2]), "+f"(d[3][3])
                     : "l"(a), "l"(b), "n"(TRANSPOSED));
    } else {
        static_assert(COLUMNS == 64, "32 or 64");
        asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
                     "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, "
                     "1, 1, 0, %34;\n}"
                     : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                       "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
                       "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
                       "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
                       "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
                     : "l"(a), "l"(b), "n"(TRANSPOSED));
    }
}

/* d += a b for the warpgroup's 64 rows and 128 columns, 16 deep; warp w's rows are rows 16 w on. Under way until ps_wgmma_wait. */
template <int TRANSPOSED> static __device__ __forceinline__ void ps_wgmma_n128(float (*d)[4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." PS_REAL16_PTX "." PS_REAL16_PTX " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %69;\n}"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
                   "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
                   "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
                   "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
                   "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]),
                   "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
                   "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]),
                   "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
                   "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]),
                   "+f"(d[15][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
}

/* A box of a tensor of three dimensions, from these coordinates on. */
static __device__ __forceinline__ void ps_box_copy(uint32_t to, const CUtensorMap *map, int x, int y, int z, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

#endif
