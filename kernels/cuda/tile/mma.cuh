/* What a warp does as one: tensor-core products (mma.sync), matrix loads and stores of shared memory, barriers of some warps. PTX
 * ISA sections mma.m16n8k16, ldmatrix, stmatrix, bar. With group g = lane / 4 and q = lane % 4 an accumulator tile m16n8 holds
 * (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1); two neighbouring tiles packed to pairs are the A operand of the next product.
 */
#ifndef PS_KERNELS_CUDA_MMA_CUH
#define PS_KERNELS_CUDA_MMA_CUH

#include "kernels/cuda/tile/operands.cuh"

/* x as the tensor cores' tf32 takes it. EXACT: hi + lo = x but for a part in 2^23 (they leave out lo's last bit or two); else hi
 * alone. A NaN stays one. */
template <bool EXACT> static __device__ __forceinline__ void ps_split(uint32_t &hi, uint32_t &lo, float x)
{
    if constexpr (EXACT) {
        hi = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
        lo = __float_as_uint(x - __uint_as_float(hi));
    } else {
        hi = ps_round_up(x);
        lo = 0;
    }
}

/* d = a b, or d += a b, of operands split so. EXACT: three products, whose sum over these 8 of k is added in FADD. */
template <bool EXACT, bool ADD>
static __device__ __forceinline__ void ps_mma_split(float (&d)[4], const uint32_t (&a_hi)[4], const uint32_t (&a_lo)[4],
                                                    const uint32_t (&b_hi)[2], const uint32_t (&b_lo)[2])
{
    const float zero[4] = {0, 0, 0, 0};
    if constexpr (EXACT) {
        float part[4];
        ps_mma_tf32(part, a_lo, b_hi[0], b_hi[1], zero);
        ps_mma_tf32(part, a_hi, b_lo[0], b_lo[1], part);
        ps_mma_tf32(part, a_hi, b_hi[0], b_hi[1], part);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            d[i] = ADD ? d[i] + part[i] : part[i];
        }
    } else if constexpr (ADD) {
        ps_mma_tf32(d, a_hi, b_hi[0], b_hi[1], d);
    } else {
        ps_mma_tf32(d, a_hi, b_hi[0], b_hi[1], zero);
    }
}

static __device__ __forceinline__ uint32_t ps_shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ uint32_t ps_shared_load(uint32_t address)
{
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ void ps_shared_store(uint32_t address, uint32_t v)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

static __device__ __forceinline__ float2 ps_shared_load2(uint32_t address)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ void ps_shared_store2(uint32_t address, float2 v)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

static __device__ __forceinline__ uint4 ps_shared_load4(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

/* Four 8 x 8 matrices of 16-bit elements; lanes 8i .. 8i + 7 give the addresses of matrix i's rows: in shared memory (_at), or
 * pointers. */
static __device__ __forceinline__ void ps_ldmatrix4_at(uint32_t (&r)[4], uint32_t p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p)
                 : "memory");
}

static __device__ __forceinline__ void ps_ldmatrix4(uint32_t (&r)[4], const void *p)
{
    ps_ldmatrix4_at(r, ps_shared_address(p));
}

static __device__ __forceinline__ void ps_ldmatrix4_transposed_at(uint32_t (&r)[4], uint32_t p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p)
                 : "memory");
}

static __device__ __forceinline__ void ps_ldmatrix4_transposed(uint32_t (&r)[4], const void *p)
{
    ps_ldmatrix4_transposed_at(r, ps_shared_address(p));
}

/* Two matrices; lanes 0 .. 15 give the addresses. */
static __device__ __forceinline__ void ps_ldmatrix2_at(uint32_t (&r)[2], uint32_t p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(p) : "memory");
}

static __device__ __forceinline__ void ps_ldmatrix2(uint32_t (&r)[2], const void *p)
{
    ps_ldmatrix2_at(r, ps_shared_address(p));
}

static __device__ __forceinline__ void ps_ldmatrix2_transposed_at(uint32_t (&r)[2], uint32_t p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(p) : "memory");
}

static __device__ __forceinline__ void ps_ldmatrix2_transposed(uint32_t (&r)[2], const void *p)
{
    ps_ldmatrix2_transposed_at(r, ps_shared_address(p));
}

/* The transpose of an 8 x 8 matrix of 16-bit elements in ldmatrix's layout. */
static __device__ __forceinline__ uint32_t ps_movmatrix(uint32_t x)
{
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* r to four matrices, or two, of sm_90. */
static __device__ __forceinline__ void ps_stmatrix4_at(uint32_t p, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}

static __device__ __forceinline__ void ps_stmatrix2_at(uint32_t p, const uint32_t (&r)[2])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(p), "r"(r[0]), "r"(r[1]) : "memory");
}

/* The A operand r (m16k16) to 16 rows of shared memory, `stride` bytes apart. */
static __device__ __forceinline__ void ps_store_operand(void *p, int stride, const uint32_t (&r)[4])
{
    const int lane = (int)threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    ps_stmatrix4_at(ps_shared_address((const char *)p + (lane % 16) * stride + lane / 16 * 16), r);
#else
    char *at = (char *)p + lane / 4 * stride + lane % 4 * 4;
    *(uint32_t *)at = r[0];
    *(uint32_t *)(at + 8 * stride) = r[1];
    *(uint32_t *)(at + 16) = r[2];
    *(uint32_t *)(at + 8 * stride + 16) = r[3];
#endif
}

/* 16 bytes from global to shared memory, behind the thread's back. */
static __device__ __forceinline__ void ps_copy_async(void *shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ps_shared_address(shared)), "l"(global) : "memory");
}

/* 16 bytes, of which the first so many are there, and zeros; where none is, `global` is any address. */
template <typename T> static __device__ __forceinline__ void ps_copy_async_part(uint32_t shared, const T *global, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

template <typename T> static __device__ __forceinline__ void ps_copy_async_part(T *shared, const T *global, int bytes)
{
    ps_copy_async_part(ps_shared_address(shared), global, bytes);
}

/* 8 and 4 bytes. */
static __device__ __forceinline__ void ps_copy_async8(void *shared, const void *global)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(ps_shared_address(shared)), "l"(global) : "memory");
}

static __device__ __forceinline__ void ps_copy_async4(void *shared, const void *global)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(ps_shared_address(shared)), "l"(global) : "memory");
}

/* The same; zero where it is not there. */
template <typename T> static __device__ __forceinline__ void ps_copy_async4_if(T *shared, const T *global, bool there)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(ps_shared_address(shared)), "l"(global), "r"(there ? 4 : 0)
                 : "memory");
}

template <typename T> static __device__ __forceinline__ void ps_copy_async8_if(T *shared, const T *global, bool there)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(ps_shared_address(shared)), "l"(global), "r"(there ? 8 : 0)
                 : "memory");
}

/* Waits for all of the thread's copies. */
static __device__ __forceinline__ void ps_copy_wait()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* The copies since the last group are one. */
static __device__ __forceinline__ void ps_copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most PENDING of the thread's groups are under way. */
template <int PENDING> static __device__ __forceinline__ void ps_copy_wait_group()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Barrier `id` of `threads` threads, whole warps. */
static __device__ __forceinline__ void ps_barrier(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Comes to it, and does not wait. */
static __device__ __forceinline__ void ps_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- accumulators ---- */

template <int N> static __device__ __forceinline__ void ps_zero(float (&sums)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[n][i] = 0.0f;
        }
    }
}

/* v[i] of lane t and v[t] of lane i of each quad change places: 16 bytes that one lane holds of one group of 8 columns become its
 * 4 bytes of four groups, and back. */
static __device__ __forceinline__ void ps_quad_transpose(uint32_t (&v)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
        v[i] = odd ? got : v[i];
        v[i + 1] = odd ? v[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2);
        v[i] = high ? got : v[i];
        v[i + 2] = high ? v[i + 2] : got;
    }
}

#endif
