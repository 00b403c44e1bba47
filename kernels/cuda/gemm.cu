/* Products. Three ways, chosen by shape and layout alone, so that a run always takes the same:
 *  - batches of matrices up to 64 x 64 x 64: tiny_gemm.cu, one launch whatever the strides;
 *  - a long sum over few outputs (a weight's gradient) of float32: split_gemm.cu;
 *  - all others: cuBLASLt, with the first algorithm that its heuristic supports within a fixed workspace. Nothing is timed.
 *
 * A product moves at least (m k + k n + m n) elements a matrix (m n more when beta is not 0) and costs 2 m n k FLOPs. */
#include "kernels/cuda/gemm.cuh"

#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

#define WORKSPACE_BYTES ((size_t)32 << 20)
#define BUCKETS 128
#define MAX_BATCH 65535 /* of one strided-batch call: a grid's z */

/* Everything that cuBLASLt's choice depends on; compared as bytes. */
struct plan_key {
    int64_t m, n, k, batch;
    int64_t ld[3], stride[3]; /* c, a, b, column-major */
    int32_t transposed[2];    /* a, b */
    int32_t alignment[3];     /* bytes, at most 16 */
    int32_t accumulate;       /* beta != 0 */
    int32_t type, c_type;     /* enum ps_type */
};

struct plan {
    struct plan *next;
    struct plan_key key;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t layout[3]; /* c, a, b */
    cublasLtMatmulAlgo_t algorithm;
};

struct ps_cuda_gemm {
    cublasLtHandle_t handle; /* made at the first product that needs it: it costs a third of a second */
    void *workspace;
    int shared_bytes;
    struct plan *plans[BUCKETS];
};

static enum ps_status lt_check(cublasStatus_t status, const char *what)
{
    if (status == CUBLAS_STATUS_SUCCESS) {
        return PS_OK;
    }
    return ps_fail(status == CUBLAS_STATUS_NOT_SUPPORTED ? PS_UNSUPPORTED : PS_DEVICE, "cuda: %s: %s", what,
                   cublasLtGetStatusString(status));
}

enum ps_status ps_cuda_gemm_open(const struct ps_kernels *k, struct ps_cuda_gemm **gemm)
{
    struct ps_cuda_gemm *g = (struct ps_cuda_gemm *)calloc(1, sizeof *g);
    if (!g) {
        return ps_fail(PS_DEVICE, "gemm: out of host memory");
    }
    enum ps_status status = ps_cuda_check(
        cudaDeviceGetAttribute(&g->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, k->device->index), "shared memory limit");
    if (status == PS_OK) {
        status = k->device->allocate(k->device, 2 * WORKSPACE_BYTES, &g->workspace);
    }
    if (status != PS_OK) {
        free(g);
        return status;
    }
    *gemm = g;
    return PS_OK;
}

static void plan_destroy(struct plan *plan)
{
    for (int i = 0; i < 3; i++) {
        if (plan->layout[i]) {
            cublasLtMatrixLayoutDestroy(plan->layout[i]);
        }
    }
    if (plan->operation) {
        cublasLtMatmulDescDestroy(plan->operation);
    }
    free(plan);
}

void ps_cuda_gemm_close(const struct ps_kernels *k, struct ps_cuda_gemm *gemm)
{
    if (!gemm) {
        return;
    }
    for (int i = 0; i < BUCKETS; i++) {
        while (gemm->plans[i]) {
            struct plan *plan = gemm->plans[i];
            gemm->plans[i] = plan->next;
            plan_destroy(plan);
        }
    }
    if (gemm->handle) {
        cublasLtDestroy(gemm->handle);
    }
    k->device->release(k->device, gemm->workspace, 2 * WORKSPACE_BYTES);
    free(gemm);
}

/* ---- a product taken apart ---- */

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
    if (a->type != b->type || (a->type != PS_F32 && a->type != PS_BF16) || (c->type != a->type && c->type != PS_F32)) {
        return ps_fail(PS_UNSUPPORTED,
                       "gemm: element types c %d, a %d, b %d; a and b must both be float32 or bf16, c likewise or float32",
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
    } else if (p.batch[0] > p.batch[1]) { /* where the outer one must be looped over, it is the shorter */
        int64_t size = p.batch[0];
        p.batch[0] = p.batch[1];
        p.batch[1] = size;
        for (int i = 0; i < 3; i++) {
            int64_t stride = all[i]->batch[0];
            all[i]->batch[0] = all[i]->batch[1];
            all[i]->batch[1] = stride;
        }
    }
    *product = p;
    return PS_OK;
}

/* ---- cuBLASLt ---- */

/* A matrix as cuBLASLt sees it, column-major: rows x columns with unit row stride, or its transpose. 0 when neither stride is 1. */
static int column_major(int64_t rows, int64_t columns, int64_t row, int64_t column, int32_t *transposed, int64_t *ld)
{
    if ((rows == 1 || row == 1) && (columns == 1 || column >= rows)) {
        *transposed = 0;
        *ld = columns == 1 ? rows : column;
        return 1;
    }
    if ((columns == 1 || column == 1) && (rows == 1 || row >= columns)) {
        *transposed = 1;
        *ld = rows == 1 ? columns : row;
        return 1;
    }
    return 0;
}

static struct ps_operand transposed(struct ps_operand o)
{
    int64_t row = o.row;
    o.row = o.column;
    o.column = row;
    return o;
}

/* Fills the key of the product as it stands; 0 when c's rows do not have unit stride or a, b have none. */
static int key_of(const struct ps_product *p, struct plan_key *key)
{
    int32_t c_transposed;
    memset(key, 0, sizeof *key);
    key->m = p->m;
    key->n = p->n;
    key->k = p->k;
    key->type = p->type;
    key->c_type = p->c_type;
    key->accumulate = p->beta != 0;
    return column_major(p->m, p->n, p->c.row, p->c.column, &c_transposed, &key->ld[0]) && !c_transposed &&
           column_major(p->m, p->k, p->a.row, p->a.column, &key->transposed[0], &key->ld[1]) &&
           column_major(p->k, p->n, p->b.row, p->b.column, &key->transposed[1], &key->ld[2]);
}

/* Turns the product into its transpose, c' = b' a', when c is row-major. PS_UNSUPPORTED when cuBLASLt cannot take the strides. */
static enum ps_status lt_orient(struct ps_product *p, struct plan_key *key)
{
    struct ps_product t = *p;
    t.m = p->n;
    t.n = p->m;
    t.c = transposed(p->c);
    t.a = transposed(p->b);
    t.b = transposed(p->a);
    if (key_of(&t, key)) {
        *p = t;
        return PS_OK;
    }
    if (key_of(p, key)) {
        return PS_OK;
    }
    return ps_fail(PS_UNSUPPORTED,
                   "gemm: strides c (%lld, %lld), a (%lld, %lld), b (%lld, %lld) of m %lld, n %lld, k %lld; each needs one of 1",
                   (long long)p->c.row, (long long)p->c.column, (long long)p->a.row, (long long)p->a.column, (long long)p->b.row,
                   (long long)p->b.column, (long long)p->m, (long long)p->n, (long long)p->k);
}

static int32_t alignment_of(const void *pointer)
{
    uintptr_t address = (uintptr_t)pointer;
    return address % 16 == 0 ? 16 : address % 8 == 0 ? 8 : address % 4 == 0 ? 4 : 2;
}

static enum ps_status layout_make(const struct plan_key *key, int i, int64_t rows, int64_t columns, cublasLtMatrixLayout_t *layout)
{
    cudaDataType_t type = (i == 0 ? key->c_type : key->type) == PS_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    int32_t batch = (int32_t)key->batch;
    PS_TRY(lt_check(cublasLtMatrixLayoutCreate(layout, type, (uint64_t)rows, (uint64_t)columns, key->ld[i]), "gemm layout"));
    PS_TRY(lt_check(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
                    "gemm batch count"));
    return lt_check(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &key->stride[i],
                                                     sizeof key->stride[i]),
                    "gemm batch stride");
}

/* The first supported of the heuristic's results. */
static enum ps_status algorithm_choose(cublasLtHandle_t handle, struct plan *plan, cublasLtMatmulPreference_t preference)
{
    static const cublasLtMatmulPreferenceAttributes_t alignments[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    size_t workspace = WORKSPACE_BYTES;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* or none; never in place, whose order is not fixed */
    PS_TRY(lt_check(
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace),
        "gemm workspace"));
    PS_TRY(lt_check(
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction),
        "gemm reduction scheme"));
    for (int i = 0; i < 4; i++) {
        uint32_t alignment = (uint32_t)plan->key.alignment[i % 3];
        PS_TRY(lt_check(cublasLtMatmulPreferenceSetAttribute(preference, alignments[i], &alignment, sizeof alignment),
                        "gemm alignment"));
    }
    cublasLtMatmulHeuristicResult_t results[4];
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, plan->operation, plan->layout[1], plan->layout[2],
                                                           plan->layout[0], plan->layout[0], preference, 4, results, &count);
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS) {
            plan->algorithm = results[i].algo;
            return PS_OK;
        }
    }
    return ps_fail(PS_UNSUPPORTED, "gemm: cuBLASLt has no algorithm for m %lld, n %lld, k %lld, batch %lld: %s",
                   (long long)plan->key.m, (long long)plan->key.n, (long long)plan->key.k, (long long)plan->key.batch,
                   cublasLtGetStatusString(status));
}

static enum ps_status plan_fill(cublasLtHandle_t handle, enum ps_precision precision, struct plan *plan)
{
    const struct plan_key *key = &plan->key;
    cublasComputeType_t compute = precision == PS_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    PS_TRY(lt_check(cublasLtMatmulDescCreate(&plan->operation, compute, CUDA_R_32F), "gemm operation"));
    for (int i = 0; i < 2; i++) {
        cublasOperation_t operation = key->transposed[i] ? CUBLAS_OP_T : CUBLAS_OP_N;
        PS_TRY(lt_check(cublasLtMatmulDescSetAttribute(plan->operation,
                                                       i == 0 ? CUBLASLT_MATMUL_DESC_TRANSA : CUBLASLT_MATMUL_DESC_TRANSB,
                                                       &operation, sizeof operation),
                        "gemm transpose"));
    }
    PS_TRY(layout_make(key, 0, key->m, key->n, &plan->layout[0]));
    PS_TRY(layout_make(key, 1, key->transposed[0] ? key->k : key->m, key->transposed[0] ? key->m : key->k, &plan->layout[1]));
    PS_TRY(layout_make(key, 2, key->transposed[1] ? key->n : key->k, key->transposed[1] ? key->k : key->n, &plan->layout[2]));
    cublasLtMatmulPreference_t preference;
    PS_TRY(lt_check(cublasLtMatmulPreferenceCreate(&preference), "gemm preference"));
    enum ps_status status = algorithm_choose(handle, plan, preference);
    cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

/* The plan of a key, made at its first use; host memory only, so a stream may be capturing. */
static enum ps_status plan_find(struct ps_cuda_gemm *gemm, enum ps_precision precision, const struct plan_key *key,
                                const struct plan **found)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++) {
        hash = (hash ^ ((const unsigned char *)key)[i]) * 1099511628211u;
    }
    struct plan **bucket = &gemm->plans[hash % BUCKETS];
    for (struct plan *plan = *bucket; plan; plan = plan->next) {
        if (memcmp(&plan->key, key, sizeof *key) == 0) {
            *found = plan;
            return PS_OK;
        }
    }
    struct plan *plan = (struct plan *)calloc(1, sizeof *plan);
    if (!plan) {
        return ps_fail(PS_DEVICE, "gemm: out of host memory");
    }
    plan->key = *key;
    /* The library may load code while it makes its handle; a capture elsewhere on this thread must not forbid that. */
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    enum ps_status status = ps_cuda_check(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode");
    if (status == PS_OK && !gemm->handle) {
        status = lt_check(cublasLtCreate(&gemm->handle), "cuBLASLt");
    }
    if (status == PS_OK) {
        status = plan_fill(gemm->handle, precision, plan);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (status != PS_OK) {
        plan_destroy(plan);
        return status;
    }
    plan->next = *bucket;
    *bucket = plan;
    *found = plan;
    return PS_OK;
}

/* The second half is for what runs beside. */
static void *workspace_of(const struct ps_cuda_context *context)
{
    return (char *)context->gemm->workspace + (context->beside ? WORKSPACE_BYTES : 0);
}

/* One strided batch. key holds the matrices' layouts. */
static enum ps_status lt_product(const struct ps_kernels *k, const struct ps_product *p, struct plan_key *key)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    const struct ps_operand *operands[3] = {&p->c, &p->a, &p->b};
    key->batch = p->batch[1];
    for (int i = 0; i < 3; i++) {
        key->stride[i] = p->batch[1] > 1 ? operands[i]->batch[1] : 0;
        key->alignment[i] = alignment_of(operands[i]->data);
    }
    const struct plan *plan;
    PS_TRY(plan_find(context->gemm, k->precision, key, &plan));
    return lt_check(cublasLtMatmul(context->gemm->handle, plan->operation, &p->alpha, p->a.data, plan->layout[1], p->b.data,
                                   plan->layout[2], &p->beta, p->c.data, plan->layout[0], p->c.data, plan->layout[0],
                                   &plan->algorithm, workspace_of(context), WORKSPACE_BYTES, context->stream),
                    "gemm");
}

static struct ps_operand batch_from(struct ps_operand o, int64_t i, int64_t j, enum ps_type type)
{
    o.data += (i * o.batch[0] + j * o.batch[1]) * (int64_t)ps_type_bytes(type);
    return o;
}

extern "C" enum ps_status ps_cuda_gemm(const struct ps_kernels *k, const struct ps_gemm *arguments)
{
    const struct ps_cuda_context *context = ps_cuda(k);
    struct ps_product p;
    PS_TRY(ps_cuda_product(arguments, &p));
    int tiny = p.c_type == p.type && p.m <= 64 && p.n <= 64 && p.k <= 64;
    if (tiny && context->tiny_gemm && p.batch[0] * p.batch[1] >= 2) {
        return ps_cuda_tiny_product(context, &p);
    }
    if (ps_cuda_split_wanted(&p)) {
        struct ps_cuda_split split = {};
        split.workspace = workspace_of(context);
        split.workspace_bytes = WORKSPACE_BYTES;
        split.multiprocessors = context->multiprocessors;
        split.shared_bytes = context->gemm->shared_bytes;
        split.tensor_cores = k->precision == PS_TF32;
        split.stream = context->stream;
        return ps_cuda_split_product(&split, &p);
    }
    struct plan_key key;
    enum ps_status status = lt_orient(&p, &key);
    if (status != PS_OK) {
        return tiny ? ps_cuda_tiny_product(context, &p) : status;
    }
    for (int64_t i = 0; i < p.batch[0]; i++) {
        for (int64_t j = 0; j < p.batch[1]; j += MAX_BATCH) {
            struct ps_product part = p;
            part.batch[0] = 1;
            part.batch[1] = p.batch[1] - j < MAX_BATCH ? p.batch[1] - j : MAX_BATCH;
            part.c = batch_from(p.c, i, j, p.c_type);
            part.a = batch_from(p.a, i, j, p.type);
            part.b = batch_from(p.b, i, j, p.type);
            PS_TRY(lt_product(k, &part, &key));
        }
    }
    return PS_OK;
}
