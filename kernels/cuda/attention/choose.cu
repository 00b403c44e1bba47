/* Which way computes attention without its scores in memory: the first that wants the call, by type, shape and layout alone, so
 * that a run always takes the same. What the ways are told is checked here. */
#include "kernels/cuda/attention/attention.cuh"

struct way {
    const char *name;
    bool (*wanted)(const struct ps_kernels *k, const struct ps_attention_call *call);
    ps_attention_function *forward, *backward;
};

static const struct way ways[] = {
    {"warp_float", ps_cuda_attention_warp_float_wanted, ps_cuda_attention_warp_float, ps_cuda_attention_warp_float_backward},
    {"short16", ps_cuda_attention_short16_wanted, ps_cuda_attention_short16, ps_cuda_attention_short16_backward},
    {"long16", ps_cuda_attention_long16_wanted, ps_cuda_attention_long16, ps_cuda_attention_long16_backward},
    {"tiled", ps_cuda_attention_tiled_wanted, ps_cuda_attention_tiled, ps_cuda_attention_tiled_backward},
};

/* The last two want all of their types. */
static const struct way *way_of(const struct ps_kernels *k, const struct ps_attention_call *call)
{
    const struct way *way = ways;
    while (!way->wanted(k, call)) {
        way++;
    }
    return way;
}

/* ---- the operations, checked ---- */

struct shape {
    int64_t sequences, heads, patches, e, pieces;
};

/* A tensor [S, h, N, e] of this shape, of q and k [S, h, N, m, e] too where there are pieces; any strides but the last, which is 1.
 */
static enum ps_status view_of(const char *op, const char *name, const struct ps_tensor *t, enum ps_type type, const struct shape *s,
                              bool keys, struct ps_attention_launch *x, struct ps_attention_view *v)
{
    const int64_t size[4] = {s->sequences, s->heads, s->patches, s->e}, bytes = (int64_t)ps_type_bytes(type);
    const bool cut = keys && t->rank == 5;
    const int last = cut ? 4 : 3;
    bool fits = t->rank == last + 1 && t->type == type && t->data && t->size[last] == s->e &&
                (cut ? t->size[3] == s->pieces : !keys || s->pieces == 1);
    for (int i = 0; i < 3 && fits; i++) {
        fits = t->size[i] == size[i];
    }
    if (!fits || (t->stride[last] != 1 && s->e > 1)) {
        return ps_fail(
            PS_UNSUPPORTED,
            "%s (cuda): %s of rank %d and element type %d is not [%lld, %lld, %lld, %lld] of type %d with rows of stride 1", op,
            name, t->rank, (int)t->type, (long long)s->sequences, (long long)s->heads, (long long)s->patches, (long long)s->e,
            (int)type);
    }
    *v = {(char *)t->data, t->stride[0], t->stride[1], t->stride[2], cut ? t->stride[3] : 0};
    x->pairs = x->pairs && (uintptr_t)t->data % 8 == 0 && t->stride[0] % 2 == 0 && t->stride[1] % 2 == 0 && t->stride[2] % 2 == 0 &&
               t->stride[2] >= 0 && v->piece % 2 == 0;
    while (((int64_t)(uintptr_t)t->data | (t->stride[0] | t->stride[1] | t->stride[2] | v->piece | s->e) * bytes) % x->unit != 0) {
        x->unit /= 2;
    }
    return PS_OK;
}

static enum ps_status shape_of(const struct ps_kernels *k, const char *op, const struct ps_tensor *q, struct shape *s,
                               struct ps_attention_launch *x)
{
    const int most = k->real == PS_F32 ? PS_ATTENTION_PATCHES : INT32_MAX,
              widest = k->real == PS_F32 ? PS_ATTENTION_HEAD : PS_ATTENTION_HEAD16;
    if (q->rank != 4 && q->rank != 5) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): q has rank %d, 4 or 5 is needed", op, q->rank);
    }
    *s = {q->size[0], q->size[1], q->size[2], q->size[q->rank - 1], q->rank == 5 ? q->size[3] : 1};
    const int64_t tiles = (s->patches + PS_ATTENTION_TILE - 1) / PS_ATTENTION_TILE;
    if (s->patches > most || s->e * s->pieces > widest || s->sequences * s->heads * tiles > INT32_MAX) {
        return ps_fail(
            PS_UNSUPPORTED,
            "%s (cuda): %lld x %lld matrices of %lld patches, heads of %lld: at most 2^31 blocks, %d patches, heads of %d", op,
            (long long)s->sequences, (long long)s->heads, (long long)s->patches, (long long)(s->e * s->pieces), most, widest);
    }
    x->heads = (int)s->heads;
    x->patches = (int)s->patches;
    x->e = (int)s->e;
    x->pieces = (int)s->pieces;
    x->columns = (int)(s->e * s->pieces);
    x->tiles = (int)tiles;
    x->matrices = s->sequences * s->heads;
    x->unit = 16;
    x->pairs = s->e % 2 == 0;
    return PS_OK;
}

static enum ps_status forward_of(const struct ps_kernels *k, const struct ps_attention *a, struct ps_attention_call *call)
{
    const char *op = "attention";
    struct shape s;
    struct ps_attention_launch &x = call->x;
    PS_TRY(shape_of(k, op, &a->q, &s, &x));
    PS_TRY(view_of(op, "q", &a->q, k->real, &s, true, &x, &x.q));
    PS_TRY(view_of(op, "k", &a->k, k->real, &s, true, &x, &x.k));
    PS_TRY(view_of(op, "v", &a->v, k->real, &s, false, &x, &x.v));
    PS_TRY(view_of(op, "mixed", &a->mixed, k->real, &s, false, &x, &x.mixed));
    PS_TRY(ps_cuda_expect(op, "logsum", &a->logsum, PS_F32, s.sequences * s.heads * s.patches));
    x.logsum = (float *)a->logsum.data;
    x.scale = (float)a->scale;
    return PS_OK;
}

static enum ps_status backward_of(const struct ps_kernels *k, const struct ps_attention_backward *a, struct ps_attention_call *call)
{
    const char *op = "attention_backward";
    struct shape s;
    struct ps_attention_launch &x = call->x;
    call->backward = true;
    PS_TRY(shape_of(k, op, &a->q, &s, &x));
    PS_TRY(view_of(op, "q", &a->q, k->real, &s, true, &x, &x.q));
    PS_TRY(view_of(op, "k", &a->k, k->real, &s, true, &x, &x.k));
    PS_TRY(view_of(op, "v", &a->v, k->real, &s, false, &x, &x.v));
    PS_TRY(view_of(op, "mixed", &a->mixed, k->real, &s, false, &x, &x.mixed));
    PS_TRY(view_of(op, "d_mixed", &a->d_mixed, k->real, &s, false, &x, &x.d_mixed));
    PS_TRY(view_of(op, "dq", &a->dq, k->real, &s, true, &x, &x.dq));
    PS_TRY(view_of(op, "dk", &a->dk, k->real, &s, true, &x, &x.dk));
    PS_TRY(view_of(op, "dv", &a->dv, k->real, &s, false, &x, &x.dv));
    PS_TRY(ps_cuda_expect(op, "logsum", &a->logsum, PS_F32, s.sequences * s.heads * s.patches));
    PS_TRY(ps_cuda_expect(op, "delta", &a->delta, PS_F32, s.sequences * s.heads * s.patches));
    x.logsum = (float *)a->logsum.data;
    x.delta = (float *)a->delta.data;
    x.accumulate = a->accumulate;
    x.scale = (float)a->scale;
    return PS_OK;
}

/* ---- the operations ---- */

static enum ps_status run(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call)
{
    if (call->x.matrices * call->x.tiles == 0 || call->x.e == 0) {
        return PS_OK;
    }
    const struct way *way = way_of(k, call);
    return (call->backward ? way->backward : way->forward)(k, op, call);
}

extern "C" enum ps_status ps_cuda_attention(const struct ps_kernels *k, const struct ps_attention *a)
{
    struct ps_attention_call call = {};
    PS_TRY(forward_of(k, a, &call));
    return run(k, "attention", &call);
}

extern "C" enum ps_status ps_cuda_attention_backward(const struct ps_kernels *k, const struct ps_attention_backward *a)
{
    struct ps_attention_call call = {};
    PS_TRY(backward_of(k, a, &call));
    return run(k, "attention_backward", &call);
}

const char *ps_cuda_attention_way(const struct ps_kernels *k, enum ps_op op, const void *arguments)
{
    struct ps_attention_call call = {};
    const enum ps_status status = op == PS_OP_attention ? forward_of(k, (const struct ps_attention *)arguments, &call)
                                                        : backward_of(k, (const struct ps_attention_backward *)arguments, &call);
    return status == PS_OK ? way_of(k, &call)->name : NULL;
}

int ps_cuda_attention_faster(const struct ps_kernels *k, int64_t patches, int64_t head, int64_t pieces)
{
    enum { LEAST_TF32 = 42, LEAST_FP32 = 128, NARROW = 32 };
    if (k->real != PS_F32) {
        return head * pieces <= PS_ATTENTION_HEAD16;
    }
    /* Scores that a warp's registers hold (warp_float), else tiles in shared memory. */
    const bool held = pieces == 1 && head % 2 == 0 && ((patches <= 64 && head <= 8) || (patches <= 32 && head <= 16));
    return held || (patches >= (k->precision == PS_FP32 ? LEAST_FP32 : LEAST_TF32) && patches <= PS_ATTENTION_PATCHES &&
                    head * pieces <= NARROW);
}

/* In 16 bits from sm_90 on, where the copy engine brings rows of whole 16 bytes; narrower heads would be mostly zeros. */
int64_t ps_cuda_attention_columns(const struct ps_kernels *k, int64_t patches, int64_t head, int64_t pieces)
{
    enum { UNIT = 8, NARROWEST = 4 };
    (void)patches;
    const int64_t wide = (head + UNIT - 1) / UNIT * UNIT;
    const bool pads =
        k->real != PS_F32 && ps_cuda(k)->compute_capability >= 90 && head >= NARROWEST && wide * pieces <= PS_ATTENTION_HEAD16;
    return pads ? wide : head;
}
