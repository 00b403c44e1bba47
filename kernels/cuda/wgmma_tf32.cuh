/* wgmma on tf32, sm_90a: a warpgroup's 64 rows times N columns, 8 deep. Both operands have the summed dimension contiguous: in
 * panels of 32 of it (warp_mma.cuh's ps_wgmma_operand), or, on the left, in registers as mma.m16n8k8 takes them, warp w's rows from
 * 16 w on. PTX ISA, wgmma.mma_async. */
#ifndef PS_KERNELS_CUDA_WGMMA_TF32_CUH
#define PS_KERNELS_CUDA_WGMMA_TF32_CUH

#include "kernels/cuda/warp_mma.cuh"

#define PS_SUMS_1(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PS_SUMS_4(d, i) PS_SUMS_1(d, i), PS_SUMS_1(d, i + 1), PS_SUMS_1(d, i + 2), PS_SUMS_1(d, i + 3)
#define PS_SUMS_64(d) PS_SUMS_4(d, 0), PS_SUMS_4(d, 4)
#define PS_SUMS_128(d) PS_SUMS_64(d), PS_SUMS_4(d, 8), PS_SUMS_4(d, 12)

/* d = a b (add: d += a b). Under way until ps_wgmma_wait. */
template <int N>
static __device__ __forceinline__ void ps_wgmma_tf32(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, int add)
{
    if constexpr (N == 64) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                     "}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}"
                     : PS_SUMS_64(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    } else {
        static_assert(N == 128, "64 or 128");
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                     "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}"
                     : PS_SUMS_128(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    }
}

/* The same with both operands in shared memory. */
template <int N> static __device__ __forceinline__ void ps_wgmma_tf32(float (&d)[N / 8][4], uint64_t a, uint64_t b, int add)
{
    if constexpr (N == 64) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                     "}, %32, %33, p, 1, 1;\n}"
                     : PS_SUMS_64(d)
                     : "l"(a), "l"(b), "r"(add));
    } else {
        static_assert(N == 128, "64 or 128");
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                     "}, %64, %65, p, 1, 1;\n}"
                     : PS_SUMS_128(d)
                     : "l"(a), "l"(b), "r"(add));
    }
}

#undef PS_SUMS_1
#undef PS_SUMS_4
#undef PS_SUMS_64
#undef PS_SUMS_128

#endif
