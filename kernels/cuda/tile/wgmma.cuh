/* wgmma, sm_90a: a warpgroup's 64 rows times N columns, 16 deep (8 of tf32). Operands lie in panels of shared memory
 * (ps_wgmma_operand), or the left one in registers as mma takes it (m16n8k16 or m16n8k8), warp w's rows from 16 w on.
 *
 * ps_wgmma<T>(d, a, b, add): d = a b (add: d += a b), under way until ps_wgmma_wait; d [N / 8][4] says how many columns. T:
 * ps_bf16, ps_fp16, or float, whose words are read as tf32. A panel's lines run along the summed dimension; of 16 bits, A_ACROSS
 * and B_ACROSS say that the operand's lines run across it. ps_wgmma_onto: d += a b of 16 bits, without the predicate, with which
 * ptxas allocates other registers even when it is always true. PTX ISA, wgmma.mma_async. */
#ifndef PS_KERNELS_CUDA_WGMMA_CUH
#define PS_KERNELS_CUDA_WGMMA_CUH

#include <stdint.h>

#include "kernels/cuda/tile/vector.cuh"

/* This thread's ordinary stores to shared memory (cp.async too), for the tensor cores' reads after the next barrier. */
static __device__ __forceinline__ void ps_publish()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Before the first product of a batch: registers are as the program has them. */
static __device__ __forceinline__ void ps_wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* The products asked for since the last commit are a batch. */
static __device__ __forceinline__ void ps_wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most PENDING batches are under way. */
template <int PENDING> static __device__ __forceinline__ void ps_wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Operand in panels of 128-byte rows, 16-byte units exchanged by the row's number modulo 8; the panel aligned to 1,024 bytes.
 * Groups of 8 rows follow one another; panels that stand side by side (of a right operand read transposed) are `far` bytes apart.
 */
static __device__ __forceinline__ uint32_t ps_wgmma_place(uint32_t address, uint32_t far = 0)
{
    return address >> 4 | (far >> 4) << 16;
}

/* `further` bytes from there. */
static __device__ __forceinline__ uint64_t ps_wgmma_operand(uint32_t place, int further)
{
    return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | (place + (further >> 4));
}

/* The same place as a descriptor of 64 bits that ptxas does not take apart: to go further is one instruction then, of a product's
 * two operands two in place of four. */
static __device__ __forceinline__ uint64_t ps_wgmma_whole(uint32_t place)
{
    uint64_t whole = ps_wgmma_operand(place, 0);
    asm("" : "+l"(whole));
    return whole;
}

static __device__ __forceinline__ uint64_t ps_wgmma_further(uint64_t whole, int further)
{
    return whole + (further >> 4);
}

/* ---- products ---- */

/* Sums as operands, and their names in the instruction. */
#define PS_SUMS_4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PS_SUMS_8(d) PS_SUMS_4(d, 0)
#define PS_SUMS_16(d) PS_SUMS_8(d), PS_SUMS_4(d, 1)
#define PS_SUMS_24(d) PS_SUMS_16(d), PS_SUMS_4(d, 2)
#define PS_SUMS_32(d) PS_SUMS_24(d), PS_SUMS_4(d, 3)
#define PS_SUMS_40(d) PS_SUMS_32(d), PS_SUMS_4(d, 4)
#define PS_SUMS_48(d) PS_SUMS_40(d), PS_SUMS_4(d, 5)
#define PS_SUMS_64(d) PS_SUMS_48(d), PS_SUMS_4(d, 6), PS_SUMS_4(d, 7)
#define PS_SUMS_96(d) PS_SUMS_64(d), PS_SUMS_4(d, 8), PS_SUMS_4(d, 9), PS_SUMS_4(d, 10), PS_SUMS_4(d, 11)
#define PS_SUMS_128(d) PS_SUMS_96(d), PS_SUMS_4(d, 12), PS_SUMS_4(d, 13), PS_SUMS_4(d, 14), PS_SUMS_4(d, 15)
#define PS_SUMS_192(d)                                                                                                          \
    PS_SUMS_128(d), PS_SUMS_4(d, 16), PS_SUMS_4(d, 17), PS_SUMS_4(d, 18), PS_SUMS_4(d, 19), PS_SUMS_4(d, 20), PS_SUMS_4(d, 21), \
        PS_SUMS_4(d, 22), PS_SUMS_4(d, 23)
#define PS_SUMS_256(d)                                                                                                          \
    PS_SUMS_192(d), PS_SUMS_4(d, 24), PS_SUMS_4(d, 25), PS_SUMS_4(d, 26), PS_SUMS_4(d, 27), PS_SUMS_4(d, 28), PS_SUMS_4(d, 29), \
        PS_SUMS_4(d, 30), PS_SUMS_4(d, 31)
#define PS_NAMES_8 "%0, %1, %2, %3"
#define PS_NAMES_16 PS_NAMES_8 ", %4, %5, %6, %7"
#define PS_NAMES_24 PS_NAMES_16 ", %8, %9, %10, %11"
#define PS_NAMES_32 PS_NAMES_24 ", %12, %13, %14, %15"
#define PS_NAMES_40 PS_NAMES_32 ", %16, %17, %18, %19"
#define PS_NAMES_48 PS_NAMES_40 ", %20, %21, %22, %23"
#define PS_NAMES_64 PS_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PS_NAMES_96 PS_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PS_NAMES_128 PS_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PS_NAMES_192                                                                                                           \
    PS_NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
                 "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PS_NAMES_256                                                                                              \
    PS_NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* WHAT: the shape's depth and types; A, B: the operands; P: whether to add; REST: which operands lie across. */
#define PS_WGMMA(N, WHAT, A, B, P, REST)                                                                      \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N WHAT " {" PS_NAMES_##N \
        "}, " A ", " B ", p, 1, 1" REST ";\n}"

/* The same without the question whether to add. */
#define PS_WGMMA_ONTO(N, WHAT, A, B, REST) \
    "wgmma.mma_async.sync.aligned.m64n" #N WHAT " {" PS_NAMES_##N "}, " A ", " B ", 1, 1, 1" REST ";"

/* The products of N columns; I0 .. I6: the names of what follows the sums. */
#define PS_WGMMA_COLUMNS(N, I0, I1, I2, I3, I4, I5, I6)                                                                \
    template <typename T, int A_ACROSS = 0, int B_ACROSS = 0>                                                          \
    static __device__ __forceinline__ void ps_wgmma(float(&d)[N / 8][4], uint64_t a, uint64_t b, int add)              \
    {                                                                                                                  \
        if constexpr (std::is_same<T, float>::value) {                                                                 \
            static_assert(!A_ACROSS && !B_ACROSS, "lines of 32 bits run along the summed dimension");                  \
            asm volatile(PS_WGMMA(N, "k8.f32.tf32.tf32", I0, I1, I2, "") : PS_SUMS_##N(d) : "l"(a), "l"(b), "r"(add)); \
        } else if constexpr (std::is_same<T, ps_fp16>::value) {                                                        \
            asm volatile(PS_WGMMA(N, "k16.f32.f16.f16", I0, I1, I2, ", " I3 ", " I4)                                   \
                         : PS_SUMS_##N(d)                                                                              \
                         : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(B_ACROSS));                                    \
        } else {                                                                                                       \
            static_assert(std::is_same<T, ps_bf16>::value, "float, fp16 or bf16");                                     \
            asm volatile(PS_WGMMA(N, "k16.f32.bf16.bf16", I0, I1, I2, ", " I3 ", " I4)                                 \
                         : PS_SUMS_##N(d)                                                                              \
                         : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(B_ACROSS));                                    \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    template <typename T, int A_ACROSS, int B_ACROSS>                                                                  \
    static __device__ __forceinline__ void ps_wgmma_onto(float(&d)[N / 8][4], uint64_t a, uint64_t b)                  \
    {                                                                                                                  \
        if constexpr (std::is_same<T, ps_fp16>::value) {                                                               \
            asm volatile(PS_WGMMA_ONTO(N, "k16.f32.f16.f16", I0, I1, ", " I2 ", " I3)                                  \
                         : PS_SUMS_##N(d)                                                                              \
                         : "l"(a), "l"(b), "n"(A_ACROSS), "n"(B_ACROSS));                                              \
        } else {                                                                                                       \
            static_assert(std::is_same<T, ps_bf16>::value, "fp16 or bf16");                                            \
            asm volatile(PS_WGMMA_ONTO(N, "k16.f32.bf16.bf16", I0, I1, ", " I2 ", " I3)                                \
                         : PS_SUMS_##N(d)                                                                              \
                         : "l"(a), "l"(b), "n"(A_ACROSS), "n"(B_ACROSS));                                              \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    template <typename T, int B_ACROSS = 0>                                                                            \
    static __device__ __forceinline__ void ps_wgmma(float(&d)[N / 8][4], const uint32_t(&a)[4], uint64_t b, int add)   \
    {                                                                                                                  \
        if constexpr (std::is_same<T, float>::value) {                                                                 \
            static_assert(!B_ACROSS, "lines of 32 bits run along the summed dimension");                               \
            asm volatile(PS_WGMMA(N, "k8.f32.tf32.tf32", "{" I0 ", " I1 ", " I2 ", " I3 "}", I4, I5, "")               \
                         : PS_SUMS_##N(d)                                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                              \
        } else if constexpr (std::is_same<T, ps_fp16>::value) {                                                        \
            asm volatile(PS_WGMMA(N, "k16.f32.f16.f16", "{" I0 ", " I1 ", " I2 ", " I3 "}", I4, I5, ", " I6)           \
                         : PS_SUMS_##N(d)                                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B_ACROSS));               \
        } else {                                                                                                       \
            static_assert(std::is_same<T, ps_bf16>::value, "float, fp16 or bf16");                                     \
            asm volatile(PS_WGMMA(N, "k16.f32.bf16.bf16", "{" I0 ", " I1 ", " I2 ", " I3 "}", I4, I5, ", " I6)         \
                         : PS_SUMS_##N(d)                                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B_ACROSS));               \
        }                                                                                                              \
    }

PS_WGMMA_COLUMNS(8, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
PS_WGMMA_COLUMNS(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
PS_WGMMA_COLUMNS(24, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
PS_WGMMA_COLUMNS(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
PS_WGMMA_COLUMNS(40, "%20", "%21", "%22", "%23", "%24", "%25", "%26")
PS_WGMMA_COLUMNS(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
PS_WGMMA_COLUMNS(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
PS_WGMMA_COLUMNS(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
PS_WGMMA_COLUMNS(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
PS_WGMMA_COLUMNS(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
PS_WGMMA_COLUMNS(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef PS_WGMMA
#undef PS_WGMMA_ONTO
#undef PS_WGMMA_COLUMNS

/* Registers that products write or read stay where they are until here. */
template <int N> static __device__ __forceinline__ void ps_pin(float (&sums)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        asm volatile("" : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])::"memory");
    }
}

template <int N> static __device__ __forceinline__ void ps_pin(const uint32_t (&fragment)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        asm volatile("" ::"r"(fragment[n][0]), "r"(fragment[n][1]), "r"(fragment[n][2]), "r"(fragment[n][3]) : "memory");
    }
}

#endif
