/* A product taken apart, and checked, for all ways. */
#include "kernels/cuda/gemm/product.cuh"

static struct ps_operand operand(const struct ps_tensor *t)
{
    struct ps_operand o = {};
    o.data = (char *)t->data;
    o.row = t->stride[t->rank - 2];
    o.column = t->stride[t->rank - 1];
    for (int i = 0; i < t->rank - 2; i++) {
        o.batch[i + 4 - t->rank] = t->stride[i];
    }
    return o;
}

enum ps_status ps_cuda_product(const struct ps_gemm *arguments, struct ps_product *product)
{
    const struct ps_tensor *c = &arguments->c, *a = &arguments->a, *b = &arguments->b;
    int rank = c->rank;
    if (rank < 2 || rank > 4 || a->rank != rank || b->rank != rank) {
        return ps_fail(PS_UNSUPPORTED, "gemm: ranks c %d, a %d, b %d; all must be the same, 2 to 4", c->rank, a->rank, b->rank);
    }
    if (a->type != b->type || (a->type != PS_F32 && a->type != PS_BF16 && a->type != PS_F16) ||
        (c->type != a->type && c->type != PS_F32)) {
        return ps_fail(PS_UNSUPPORTED,
                       "gemm: element types c %d, a %d, b %d; a and b must both be float32, bf16 or fp16, c likewise or float32",
                       (int)c->type, (int)a->type, (int)b->type);
    }
    struct ps_product p = {};
    p.type = a->type;
    p.c_type = c->type;
    p.m = c->size[rank - 2];
    p.n = c->size[rank - 1];
    p.k = a->size[rank - 1];
    p.batch[0] = rank == 4 ? c->size[0] : 1;
    p.batch[1] = rank >= 3 ? c->size[rank - 3] : 1;
    int fits = a->size[rank - 2] == p.m && b->size[rank - 2] == p.k && b->size[rank - 1] == p.n && p.m > 0 && p.n > 0 && p.k > 0 &&
               p.batch[0] > 0 && p.batch[1] > 0;
    for (int i = 0; i < rank - 2; i++) {
        fits = fits && a->size[i] == c->size[i] && b->size[i] == c->size[i];
    }
    if (!fits) {
        return ps_fail(PS_UNSUPPORTED,
                       "gemm: sizes do not fit: c [.., %lld, %lld], a [.., %lld, %lld], b [.., %lld, %lld], rank %d",
                       (long long)p.m, (long long)p.n, (long long)a->size[rank - 2], (long long)p.k, (long long)b->size[rank - 2],
                       (long long)b->size[rank - 1], rank);
    }
    p.c = operand(c);
    p.a = operand(a);
    p.b = operand(b);
    p.settled = b->settled;
    p.alpha = (float)arguments->alpha;
    p.beta = (float)arguments->beta;
    struct ps_operand *all[3] = {&p.c, &p.a, &p.b};
    int even = 1;
    for (int i = 0; i < 3; i++) {
        if (p.batch[1] == 1) {
            all[i]->batch[1] = all[i]->batch[0];
        }
        even = even && (p.batch[0] == 1 || p.batch[1] == 1 || all[i]->batch[0] == all[i]->batch[1] * p.batch[1]);
    }
    if (even) {
        p.batch[1] *= p.batch[0];
        p.batch[0] = 1;
    }
    *product = p;
    return PS_OK;
}
