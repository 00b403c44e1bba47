/* Index arithmetic. */
#ifndef PS_KERNELS_CUDA_DIVIDE_CUH
#define PS_KERNELS_CUDA_DIVIDE_CUH

#include <stdint.h>

/* Division by a divisor fixed on the host: one multiplication. Dividends and divisor below 2^31. Granlund and Montgomery 1994. */
struct ps_divisor {
    uint32_t divisor, multiplier, shift;
};

static inline struct ps_divisor ps_divisor_make(int64_t divisor)
{
    struct ps_divisor d = {(uint32_t)divisor, 0, 0};
    while (((uint64_t)1 << d.shift) < (uint64_t)divisor) {
        d.shift++;
    }
    d.multiplier = (uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << d.shift) - (uint64_t)divisor)) / (uint64_t)divisor + 1);
    return d;
}

static __device__ __forceinline__ uint32_t ps_divide(uint32_t x, struct ps_divisor d)
{
    return (__umulhi(x, d.multiplier) + x) >> d.shift;
}

/* i mod n; 32-bit arithmetic where it will do. */
static __device__ __forceinline__ uint32_t ps_modulo(uint64_t i, uint32_t n)
{
    return i >> 32 ? (uint32_t)(i % n) : (uint32_t)i % n;
}

#endif
