/* Which instruction set the kernels of this process use. */
#include "kernels/cpu/cpu.h"

enum ps_cpu_isa ps_cpu_isa_best(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return PS_ISA_AVX512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return PS_ISA_AVX2;
    }
#endif
    return PS_ISA_BASE;
}

const char *ps_cpu_isa_name(enum ps_cpu_isa isa)
{
    static const char *const names[] = {"base", "avx2", "avx512"};
    return names[isa];
}
