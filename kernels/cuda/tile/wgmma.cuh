/* wgmma on tf32 and on fp16, sm_90a: a warpgroup's 64 rows times N columns, 8 deep (tf32) or 16. Both operands have the summed
 * dimension contiguous: in panels of 128 bytes of it (tile/mma.cuh's ps_wgmma_operand), or, on the left, in registers as mma takes
 * them (m16n8k8 or m16n8k16), warp w's rows from 16 w on. d = a b (add: d += a b), under way until ps_wgmma_wait. PTX ISA,
 * wgmma.mma_async. */
#ifndef PS_KERNELS_CUDA_WGMMA_PANELS_CUH
#define PS_KERNELS_CUDA_WGMMA_PANELS_CUH

#include "kernels/cuda/tile/mma.cuh"

#define PS_SUMS_1(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PS_SUMS_4(d, i) PS_SUMS_1(d, i), PS_SUMS_1(d, i + 1), PS_SUMS_1(d, i + 2), PS_SUMS_1(d, i + 3)
#define PS_SUMS_64(d) PS_SUMS_4(d, 0), PS_SUMS_4(d, 4)
#define PS_SUMS_128(d) PS_SUMS_64(d), PS_SUMS_4(d, 8), PS_SUMS_4(d, 12)

/* KIND: the shape's depth and types; FORM: what fp16 says of its operands besides. */
#define PS_WGMMA_64(KIND, A, B, P, FORM)                                     \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                           \
    "wgmma.mma_async.sync.aligned.m64n64" KIND " {"                          \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " A ", " B ", p, 1, 1" FORM ";\n}"
#define PS_WGMMA_128(KIND, A, B, P, FORM)                                              \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                     \
    "wgmma.mma_async.sync.aligned.m64n128" KIND " {"                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " A ", " B ", p, 1, 1" FORM ";\n}"

/* Left operands in registers, */
#define PS_WGMMA_REGISTERS(NAME, KIND, FORM)                                                                                      \
    template <int N> static __device__ __forceinline__ void NAME(float(&d)[N / 8][4], const uint32_t(&a)[4], uint64_t b, int add) \
    {                                                                                                                             \
        if constexpr (N == 64) {                                                                                                  \
            asm volatile(PS_WGMMA_64(KIND, "{%32, %33, %34, %35}", "%36", "%37", FORM)                                            \
                         : PS_SUMS_64(d)                                                                                          \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                         \
        } else {                                                                                                                  \
            static_assert(N == 128, "64 or 128");                                                                                 \
            asm volatile(PS_WGMMA_128(KIND, "{%64, %65, %66, %67}", "%68", "%69", FORM)                                           \
                         : PS_SUMS_128(d)                                                                                         \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                         \
        }                                                                                                                         \
    }

/* or in shared memory. */
#define PS_WGMMA_SHARED(NAME, KIND, FORM)                                                                              \
    template <int N> static __device__ __forceinline__ void NAME(float(&d)[N / 8][4], uint64_t a, uint64_t b, int add) \
    {                                                                                                                  \
        if constexpr (N == 64) {                                                                                       \
            asm volatile(PS_WGMMA_64(KIND, "%32", "%33", "%34", FORM) : PS_SUMS_64(d) : "l"(a), "l"(b), "r"(add));     \
        } else {                                                                                                       \
            static_assert(N == 128, "64 or 128");                                                                      \
            asm volatile(PS_WGMMA_128(KIND, "%64", "%65", "%66", FORM) : PS_SUMS_128(d) : "l"(a), "l"(b), "r"(add));   \
        }                                                                                                              \
    }

PS_WGMMA_REGISTERS(ps_wgmma_tf32, "k8.f32.tf32.tf32", "")
PS_WGMMA_SHARED(ps_wgmma_tf32, "k8.f32.tf32.tf32", "")
PS_WGMMA_REGISTERS(ps_wgmma_fp16, "k16.f32.f16.f16", ", 0")
PS_WGMMA_SHARED(ps_wgmma_fp16, "k16.f32.f16.f16", ", 0, 0")

#undef PS_SUMS_1
#undef PS_SUMS_4
#undef PS_SUMS_64
#undef PS_SUMS_128
#undef PS_WGMMA_64
#undef PS_WGMMA_128
#undef PS_WGMMA_REGISTERS
#undef PS_WGMMA_SHARED

#endif
