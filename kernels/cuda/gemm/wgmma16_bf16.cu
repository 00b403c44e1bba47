/* gemm/wgmma16.cuh for bf16, and which products it takes. */
#include "kernels/cuda/gemm/wgmma16.cuh"

namespace wgmma16
{
PS_WGMMA16_OF(, ps_bf16)
PS_WGMMA16_OF(extern, ps_fp16)
} // namespace wgmma16

static bool aligned(const char *data, int64_t stride)
{
    return ((uintptr_t)data & 15) == 0 && stride % 8 == 0 && stride > 0;
}

bool ps_cuda_wgmma16_serves(const struct ps_kernels *k, const struct ps_product *p)
{
    enum { FARTHEST_ROW = 1 << 24 }; /* elements, of which a tile's fit 32 bits */
    const bool across = p->b.column == 1;
    return k->real != PS_F32 && p->type == k->real && p->c_type == k->real && ps_cuda(k)->compute_capability == 90 &&
           p->batch[0] * p->batch[1] == 1 && p->n % 8 == 0 && p->a.column == 1 && aligned(p->a.data, p->a.row) &&
           p->c.column == 1 && aligned(p->c.data, p->c.row) && p->c.row <= FARTHEST_ROW && (across || p->b.row == 1) &&
           aligned(p->b.data, across ? p->b.row : p->b.column) && ((uintptr_t)p->bias & 15) == 0 &&
           ((uintptr_t)p->addend & 15) == 0 && p->alpha == 1.0f && p->beta == (p->addend ? 1.0f : 0.0f) && p->m <= INT32_MAX / 2 &&
           p->n <= INT32_MAX / 2 && p->k <= INT32_MAX / 2;
}

/* The library is better at few rows, and at long sums. */
bool ps_cuda_wgmma16_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    enum { LEAST_ROWS = 1024, MOST_TERMS = 512 };
    return p->m >= LEAST_ROWS && p->k <= MOST_TERMS && p->n <= 4 * MOST_TERMS && ps_cuda_wgmma16_serves(k, p);
}

enum ps_status ps_cuda_wgmma16_product(const struct ps_kernels *k, const struct ps_product *p)
{
    return k->real == PS_BF16 ? wgmma16::product<ps_bf16>(ps_cuda(k), "gemm", p) : wgmma16::product<ps_fp16>(ps_cuda(k), "gemm", p);
}

enum ps_status ps_cuda_wgmma16_finish(const struct ps_kernels *k, const struct ps_product *p, const struct ps_gemm_finish *f)
{
    return k->real == PS_BF16 ? wgmma16::finish<ps_bf16>(ps_cuda(k), "gemm_finish", p, f)
                              : wgmma16::finish<ps_fp16>(ps_cuda(k), "gemm_finish", p, f);
}
