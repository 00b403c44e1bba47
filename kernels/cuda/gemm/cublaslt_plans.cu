/* cuBLASLt's products: a plan for each shape and layout, made at its first use and kept, with the first algorithm that the
 * library's heuristic supports within a fixed workspace, or the one that a table names. Nothing is timed, but to make such a table
 * (tune). The library itself is loaded by gemm/cublaslt.cu. */
#include "kernels/cuda/gemm/product.cuh"

#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utility>

/* With less than 32 MiB the library's heuristic does not split a weight's gradient in float32, and takes a hundred times as long;
 * with operands of 16 bits it needs less, and only own kernels' partial sums take more. */
#define WORKSPACE_BYTES ((size_t)PS_FLOAT_WORKSPACE)
#define WORKSPACE_BYTES_REAL16 ((size_t)16 << 20)
#define LIBRARY_BYTES_REAL16 ((size_t)8 << 20)
#define BUCKETS 128
#define CANDIDATES 16   /* algorithms that a product has to choose from */
#define MAX_BATCH 65535 /* of one strided-batch call: a grid's z */

/* Everything that cuBLASLt's choice depends on; compared as bytes. */
struct plan_key {
    int64_t m, n, k, batch;
    int64_t ld[3], stride[3]; /* c, a, b, column-major */
    int32_t transposed[2];    /* a, b */
    int32_t alignment[3];     /* bytes, at most 16 */
    int32_t accumulate;       /* beta != 0 */
    int32_t bias;             /* alignment of gemm_bias's bias; 0: none */
    int32_t type, c_type;     /* enum ps_type */
};

struct plan {
    struct plan *next;
    struct plan_key key;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t layout[3]; /* c, a, b */
    cublasLtMatmulAlgo_t algorithm;
    int timed;         /* by tune, or out of a table */
    double seconds[2]; /* of the first algorithm and of this one; 0 out of a table */
};

/* A line of a table. */
struct tuned {
    struct tuned *next;
    struct plan_key key;
    cublasLtMatmulAlgo_t algorithm;
};

struct ps_cuda_gemm {
    cublasLtHandle_t handle; /* made at the first product that needs it: it costs a third of a second */
    void *workspace;
    size_t workspace_bytes, library_bytes; /* one after the other: the second for what runs beside, the library's most in both */
    struct plan *plans[BUCKETS];
    struct tuned *tuned;
    int tuning; /* each plan's first use times its algorithms */
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
    const bool real16 = ps_type_bytes(k->real) == 2;
    g->workspace_bytes = real16 ? WORKSPACE_BYTES_REAL16 : WORKSPACE_BYTES;
    g->library_bytes = real16 ? LIBRARY_BYTES_REAL16 : WORKSPACE_BYTES;
    enum ps_status status = k->device->allocate(k->device, g->workspace_bytes + g->library_bytes, &g->workspace);
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
    while (gemm->tuned) {
        struct tuned *tuned = gemm->tuned;
        gemm->tuned = tuned->next;
        free(tuned);
    }
    if (gemm->handle) {
        cublasLtDestroy(gemm->handle);
    }
    k->device->release(k->device, gemm->workspace, gemm->workspace_bytes + gemm->library_bytes);
    free(gemm);
}

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
    t.c = ps_operand_transposed(p->c);
    t.a = ps_operand_transposed(p->b);
    t.b = ps_operand_transposed(p->a);
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
    const enum ps_type of = (enum ps_type)(i == 0 ? key->c_type : key->type);
    cudaDataType_t type = of == PS_BF16 ? CUDA_R_16BF : of == PS_F16 ? CUDA_R_16F : CUDA_R_32F;
    int32_t batch = (int32_t)key->batch;
    PS_TRY(lt_check(cublasLtMatrixLayoutCreate(layout, type, (uint64_t)rows, (uint64_t)columns, key->ld[i]), "gemm layout"));
    PS_TRY(lt_check(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
                    "gemm batch count"));
    return lt_check(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &key->stride[i],
                                                     sizeof key->stride[i]),
                    "gemm batch stride");
}

/* The heuristic's supported results, best first by its lights: at least one, at most CANDIDATES. */
static enum ps_status algorithms_find(const struct ps_cuda_gemm *gemm, const struct plan *plan,
                                      cublasLtMatmulPreference_t preference, cublasLtMatmulAlgo_t *algorithms, int *found)
{
    static const cublasLtMatmulPreferenceAttributes_t alignments[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const size_t workspace = gemm->library_bytes;
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
    cublasLtMatmulHeuristicResult_t results[CANDIDATES];
    int count = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(gemm->handle, plan->operation, plan->layout[1], plan->layout[2], plan->layout[0],
                                       plan->layout[0], preference, CANDIDATES, results, &count);
    *found = 0;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS) {
            algorithms[(*found)++] = results[i].algo;
        }
    }
    if (*found > 0) {
        return PS_OK;
    }
    return ps_fail(PS_UNSUPPORTED, "gemm: cuBLASLt has no algorithm for m %lld, n %lld, k %lld, batch %lld: %s",
                   (long long)plan->key.m, (long long)plan->key.n, (long long)plan->key.k, (long long)plan->key.batch,
                   cublasLtGetStatusString(status));
}

static enum ps_status candidates_of(const struct ps_cuda_gemm *gemm, const struct plan *plan, cublasLtMatmulAlgo_t *algorithms,
                                    int *found)
{
    cublasLtMatmulPreference_t preference;
    PS_TRY(lt_check(cublasLtMatmulPreferenceCreate(&preference), "gemm preference"));
    enum ps_status status = algorithms_find(gemm, plan, preference, algorithms, found);
    cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

/* The table's algorithm where it has the key, else the heuristic's first. */
static enum ps_status algorithm_choose(const struct ps_cuda_gemm *gemm, struct plan *plan)
{
    for (const struct tuned *tuned = gemm->tuned; tuned; tuned = tuned->next) {
        if (memcmp(&tuned->key, &plan->key, sizeof plan->key) == 0) {
            cublasLtMatmulHeuristicResult_t result;
            plan->algorithm = tuned->algorithm;
            plan->timed = 1;
            return lt_check(cublasLtMatmulAlgoCheck(gemm->handle, plan->operation, plan->layout[1], plan->layout[2],
                                                    plan->layout[0], plan->layout[0], &plan->algorithm, &result),
                            "gemm: an algorithm of the tuning table");
        }
    }
    cublasLtMatmulAlgo_t algorithms[CANDIDATES];
    int found;
    PS_TRY(candidates_of(gemm, plan, algorithms, &found));
    plan->algorithm = algorithms[0];
    return PS_OK;
}

static enum ps_status plan_fill(const struct ps_cuda_gemm *gemm, enum ps_precision precision, struct plan *plan)
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
    if (key->bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        PS_TRY(lt_check(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
                        "gemm epilogue"));
    }
    PS_TRY(layout_make(key, 0, key->m, key->n, &plan->layout[0]));
    PS_TRY(layout_make(key, 1, key->transposed[0] ? key->k : key->m, key->transposed[0] ? key->m : key->k, &plan->layout[1]));
    PS_TRY(layout_make(key, 2, key->transposed[1] ? key->n : key->k, key->transposed[1] ? key->k : key->n, &plan->layout[2]));
    return algorithm_choose(gemm, plan);
}

/* The plan of a key, made at its first use; host memory only, so a stream may be capturing. */
static enum ps_status plan_find(struct ps_cuda_gemm *gemm, enum ps_precision precision, const struct plan_key *key,
                                struct plan **found)
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
        status = plan_fill(gemm, precision, plan);
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

void *ps_cuda_gemm_workspace(const struct ps_cuda_context *context, size_t *bytes)
{
    const struct ps_cuda_gemm *gemm = context->gemm;
    *bytes = context->beside ? gemm->library_bytes : gemm->workspace_bytes;
    return (char *)gemm->workspace + (context->beside ? gemm->workspace_bytes : 0);
}

static enum ps_status plan_run(const struct ps_cuda_context *context, const struct ps_product *p, const struct plan *plan,
                               const cublasLtMatmulAlgo_t *algorithm)
{
    const void *old = p->addend ? p->addend : p->c.data;
    size_t workspace_bytes;
    void *const workspace = ps_cuda_gemm_workspace(context, &workspace_bytes); /* library_bytes at least */
    return lt_check(cublasLtMatmul(context->gemm->handle, plan->operation, &p->alpha, p->a.data, plan->layout[1], p->b.data,
                                   plan->layout[2], &p->beta, old, plan->layout[0], p->c.data, plan->layout[0], algorithm,
                                   workspace, workspace_bytes, context->stream),
                    "gemm");
}

/* Times every candidate, the median of 7 groups of 4 runs, and keeps the fastest; the first where others win by less than the
 * 2 % that timings differ by. */
static enum ps_status plan_time(const struct ps_cuda_context *context, const struct ps_product *p, struct plan *plan)
{
    enum { GROUPS = 7, RUNS = 4 };
    cublasLtMatmulAlgo_t algorithms[CANDIDATES];
    cudaEvent_t begin, end;
    int found;
    PS_TRY(candidates_of(context->gemm, plan, algorithms, &found));
    PS_TRY(ps_cuda_check(cudaEventCreate(&begin), "event"));
    enum ps_status status = ps_cuda_check(cudaEventCreate(&end), "event");
    for (int i = 0; i < found && status == PS_OK; i++) {
        float ms[GROUPS];
        for (int j = -1; j < GROUPS && status == PS_OK; j++) { /* the first group warms up */
            status = ps_cuda_check(cudaEventRecord(begin, context->stream), "event");
            for (int r = 0; r < RUNS && status == PS_OK; r++) {
                status = plan_run(context, p, plan, &algorithms[i]);
            }
            if (status == PS_OK) {
                status = ps_cuda_check(cudaEventRecord(end, context->stream), "event");
            }
            if (status == PS_OK) {
                status = ps_cuda_check(cudaEventSynchronize(end), "gemm");
            }
            if (status == PS_OK) {
                float time;
                status = ps_cuda_check(cudaEventElapsedTime(&time, begin, end), "event");
                int at = j < 0 ? 0 : j;
                for (; at > 0 && ms[at - 1] > time; at--) {
                    ms[at] = ms[at - 1];
                }
                ms[at] = time;
            }
        }
        const double seconds = 1e-3 * ms[GROUPS / 2] / RUNS;
        if (status == PS_OK && i == 0) {
            plan->seconds[0] = seconds;
        }
        if (status == PS_OK && (i == 0 || seconds < 0.98 * plan->seconds[0]) && (i == 0 || seconds < plan->seconds[1])) {
            plan->seconds[1] = seconds;
            plan->algorithm = algorithms[i];
        }
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    plan->timed = status == PS_OK;
    return status;
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
    const char *old = p->addend ? p->addend : p->c.data;
    if (alignment_of(old) < key->alignment[0]) {
        key->alignment[0] = alignment_of(old);
    }
    key->bias = p->bias ? alignment_of(p->bias) : 0;
    struct plan *plan;
    PS_TRY(plan_find(context->gemm, k->precision, key, &plan));
    if (p->bias) { /* read at the launch, so the plan serves any */
        PS_TRY(
            lt_check(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, sizeof p->bias),
                     "gemm bias"));
    }
    if (context->gemm->tuning && !plan->timed) {
        PS_TRY(plan_time(context, p, plan));
    }
    return plan_run(context, p, plan, &plan->algorithm);
}

static struct ps_operand batch_from(struct ps_operand o, int64_t i, int64_t j, enum ps_type type)
{
    o.data += (i * o.batch[0] + j * o.batch[1]) * (int64_t)ps_type_bytes(type);
    return o;
}

static int64_t span_of(const struct ps_operand *o, int64_t rows, int64_t columns)
{
    return (rows - 1) * llabs(o->row) + (columns - 1) * llabs(o->column) + 1;
}

/* One strided batch, whatever its size: matrices that span more than 2^31 elements are cut along the longest dimension until none
 * does, so that offsets fit the library's 32-bit kernels too. The first part of a cut sum is what the rest adds to. */
static enum ps_status lt_product_cut(const struct ps_kernels *k, const struct ps_product *p, const struct plan_key *key)
{
    struct plan_key part_key = *key;
    if (span_of(&p->c, p->m, p->n) <= INT32_MAX && span_of(&p->a, p->m, p->k) <= INT32_MAX &&
        span_of(&p->b, p->k, p->n) <= INT32_MAX) {
        return lt_product(k, p, &part_key);
    }
    struct ps_product part = *p;
    const bool by_k = p->k >= p->m && p->k >= p->n, by_m = !by_k && p->m >= p->n;
    const int64_t size = by_k ? p->k : by_m ? p->m : p->n, first = (size / 2 + 1023) / 1024 * 1024; /* alignments stay */
    if (first >= size || (by_k && p->bias)) {
        return ps_fail(PS_UNSUPPORTED, "gemm: m %lld, n %lld, k %lld: strides too far apart for 32-bit offsets", (long long)p->m,
                       (long long)p->n, (long long)p->k);
    }
    const int64_t bytes = (int64_t)ps_type_bytes(p->type), c_bytes = (int64_t)ps_type_bytes(p->c_type);
    for (int64_t at = 0; at < size; at = first) {
        const int64_t length = at ? size - first : first;
        if (by_k) {
            part.k = part_key.k = length;
            part.a.data = p->a.data + at * p->a.column * bytes;
            part.b.data = p->b.data + at * p->b.row * bytes;
            part.beta = at ? 1.0f : p->beta;
            part_key.accumulate = part.beta != 0;
        } else if (by_m) {
            part.m = part_key.m = length;
            part.a.data = p->a.data + at * p->a.row * bytes;
            part.c.data = p->c.data + at * p->c.row * c_bytes;
            part.addend = p->addend ? p->addend + at * p->c.row * c_bytes : NULL;
            part.bias = p->bias ? p->bias + at * (int64_t)sizeof(float) : NULL; /* turned: a number a row */
        } else {
            part.n = part_key.n = length;
            part.b.data = p->b.data + at * p->b.column * bytes;
            part.c.data = p->c.data + at * p->c.column * c_bytes;
            part.addend = p->addend ? p->addend + at * p->c.column * c_bytes : NULL;
        }
        PS_TRY(lt_product_cut(k, &part, &part_key));
        if (at) {
            break;
        }
    }
    return PS_OK;
}

bool ps_cuda_cublaslt_wanted(const struct ps_kernels *k, const struct ps_product *product)
{
    (void)k;
    struct ps_product p = *product;
    struct plan_key key;
    if (product->bias) {
        return (uintptr_t)product->bias % 16 == 0 && product->m != product->n && lt_orient(&p, &key) == PS_OK && p.m == product->n;
    }
    return lt_orient(&p, &key) == PS_OK;
}

enum ps_status ps_cuda_cublaslt_product(const struct ps_kernels *k, const struct ps_product *product)
{
    struct ps_product p = *product;
    struct plan_key key;
    PS_TRY(lt_orient(&p, &key));
    if (p.batch[0] > p.batch[1]) { /* the outer one, which is looped over, is the shorter */
        struct ps_operand *const operands[3] = {&p.c, &p.a, &p.b};
        std::swap(p.batch[0], p.batch[1]);
        for (int i = 0; i < 3; i++) {
            std::swap(operands[i]->batch[0], operands[i]->batch[1]);
        }
    }
    for (int64_t i = 0; i < p.batch[0]; i++) {
        for (int64_t j = 0; j < p.batch[1]; j += MAX_BATCH) {
            struct ps_product part = p;
            part.batch[0] = 1;
            part.batch[1] = p.batch[1] - j < MAX_BATCH ? p.batch[1] - j : MAX_BATCH;
            part.c = batch_from(p.c, i, j, p.c_type);
            part.a = batch_from(p.a, i, j, p.type);
            part.b = batch_from(p.b, i, j, p.type);
            PS_TRY(lt_product_cut(k, &part, &key));
        }
    }
    return PS_OK;
}

/* ---- tables of algorithms ---- */

/* What a table is good for, its first line. */
static void table_head(const struct ps_kernels *k, char *text, size_t size)
{
    snprintf(text, size, "patchstep tuning 2; cuBLASLt %zu; %s; %s; %zu + %zu bytes, workspace %zu", cublasLtGetVersion(),
             k->device->name, ps_precision_name(k->precision), sizeof(struct plan_key), sizeof(cublasLtMatmulAlgo_t),
             ps_cuda(k)->gemm->library_bytes);
}

/* size bytes from 2 size hexadecimal digits; the text behind them, NULL when they are none. */
static const char *bytes_read(const char *text, void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        unsigned byte;
        if (!strchr("0123456789abcdef", text[0]) || !text[0] || !strchr("0123456789abcdef", text[1]) || !text[1] ||
            sscanf(text, "%2x", &byte) != 1) {
            return NULL;
        }
        ((unsigned char *)bytes)[i] = (unsigned char)byte;
        text += 2;
    }
    return *text == ' ' ? text + 1 : NULL;
}

enum ps_status ps_cuda_gemm_load(const struct ps_kernels *k, const char *text)
{
    struct ps_cuda_gemm *gemm = ps_cuda(k)->gemm;
    char head[256];
    table_head(k, head, sizeof head);
    const size_t length = strcspn(text, "\n");
    if (length != strlen(head) || strncmp(text, head, length) != 0) {
        return ps_fail(PS_UNSUPPORTED, "the tuning table is of \"%.*s\", this is \"%s\": tune again",
                       length < 200 ? (int)length : 200, text, head);
    }
    int line = 2;
    for (text += length; *text && *++text; text += strcspn(text, "\n"), line++) {
        struct tuned *tuned = (struct tuned *)calloc(1, sizeof *tuned);
        if (!tuned) {
            return ps_fail(PS_DEVICE, "gemm: out of host memory");
        }
        tuned->next = gemm->tuned;
        gemm->tuned = tuned;
        const char *rest = bytes_read(text, &tuned->key, sizeof tuned->key);
        if (!rest || !bytes_read(rest, &tuned->algorithm, sizeof tuned->algorithm)) {
            return ps_fail(PS_UNSUPPORTED, "the tuning table's line %d is not a product and an algorithm", line);
        }
    }
    return PS_OK;
}

extern "C" enum ps_status ps_cuda_gemm_tune(const struct ps_kernels *k)
{
    ps_cuda(k)->gemm->tuning = 1;
    return PS_OK;
}

extern "C" enum ps_status ps_cuda_gemm_tuning(const struct ps_kernels *k, char **text)
{
    const struct ps_cuda_gemm *gemm = ps_cuda(k)->gemm;
    const size_t longest = 2 * (sizeof(struct plan_key) + sizeof(cublasLtMatmulAlgo_t)) + 256;
    size_t lines = 1, used;
    for (int i = 0; i < BUCKETS; i++) {
        for (const struct plan *plan = gemm->plans[i]; plan; plan = plan->next) {
            lines++;
        }
    }
    char *out = (char *)malloc(lines * longest);
    if (!out) {
        return ps_fail(PS_DEVICE, "gemm: out of host memory");
    }
    table_head(k, out, longest);
    used = strlen(out);
    out[used++] = '\n';
    for (int i = 0; i < BUCKETS; i++) {
        for (const struct plan *plan = gemm->plans[i]; plan; plan = plan->next) {
            if (!plan->timed) {
                continue;
            }
            for (size_t j = 0; j < sizeof plan->key; j++) {
                used += (size_t)sprintf(out + used, "%02x", ((const unsigned char *)&plan->key)[j]);
            }
            out[used++] = ' ';
            for (size_t j = 0; j < sizeof plan->algorithm; j++) {
                used += (size_t)sprintf(out + used, "%02x", ((const unsigned char *)&plan->algorithm)[j]);
            }
            used +=
                (size_t)sprintf(out + used, " m %lld n %lld k %lld batch %lld%s: %.2f us, the first %.2f us\n",
                                (long long)plan->key.m, (long long)plan->key.n, (long long)plan->key.k, (long long)plan->key.batch,
                                plan->key.bias ? " with a bias" : "", 1e6 * plan->seconds[1], 1e6 * plan->seconds[0]);
        }
    }
    out[used] = 0;
    *text = out;
    return PS_OK;
}
