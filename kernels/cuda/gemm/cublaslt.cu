/* cuBLASLt, loaded by the first call of it: its half gigabyte costs 40 ms to map (200 ms from a cold disk), which no run should pay
 * that goes without it, be it on the CPU or by own kernels alone. These are the library's own functions by name and type; each
 * forwards. */
#include <dlfcn.h>
#include <stdio.h>

#include <cublasLt.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define LIBRARY "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

static char failure[512];

/* As the loader finds it, else where the toolkit had it at build time. */
static void *open_library(void)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(failure, sizeof failure, "%s", dlerror());
        library = dlopen(PS_CUBLASLT_FOLDER "/" LIBRARY, RTLD_NOW | RTLD_LOCAL);
    }
    return library;
}

/* The library's function; NULL when there is none. */
template <typename F> static F *loaded(const char *name)
{
    static void *const library = open_library();
    return library ? (F *)dlsym(library, name) : NULL;
}

#define FORWARD(name, parameters, arguments)                                \
    cublasStatus_t CUBLASWINAPI name parameters                             \
    {                                                                       \
        static decltype(name) *const there = loaded<decltype(name)>(#name); \
        return there ? there arguments : CUBLAS_STATUS_NOT_INITIALIZED;     \
    }

const char *CUBLASWINAPI cublasLtGetStatusString(cublasStatus_t status)
{
    static decltype(cublasLtGetStatusString) *const there = loaded<decltype(cublasLtGetStatusString)>("cublasLtGetStatusString");
    return there ? there(status) : failure;
}

size_t CUBLASWINAPI cublasLtGetVersion(void)
{
    static decltype(cublasLtGetVersion) *const there = loaded<decltype(cublasLtGetVersion)>("cublasLtGetVersion");
    return there ? there() : 0;
}

FORWARD(cublasLtCreate, (cublasLtHandle_t * handle), (handle))
FORWARD(cublasLtDestroy, (cublasLtHandle_t handle), (handle))
FORWARD(cublasLtMatmul,
        (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,
         const void *b, cublasLtMatrixLayout_t b_layout, const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
         cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes,
         cudaStream_t stream),
        (handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, workspace_bytes,
         stream))
FORWARD(cublasLtMatmulAlgoCheck,
        (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
         cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algorithm,
         cublasLtMatmulHeuristicResult_t *result),
        (handle, operation, a, b, c, d, algorithm, result))
FORWARD(cublasLtMatmulAlgoGetHeuristic,
        (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
         cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted,
         cublasLtMatmulHeuristicResult_t results[], int *count),
        (handle, operation, a, b, c, d, preference, wanted, results, count))
FORWARD(cublasLtMatmulDescCreate, (cublasLtMatmulDesc_t * operation, cublasComputeType_t compute, cudaDataType_t scale),
        (operation, compute, scale))
FORWARD(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t operation), (operation))
FORWARD(cublasLtMatmulDescSetAttribute,
        (cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes),
        (operation, attribute, value, bytes))
FORWARD(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * preference), (preference))
FORWARD(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t preference), (preference))
FORWARD(cublasLtMatmulPreferenceSetAttribute,
        (cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t bytes),
        (preference, attribute, value, bytes))
FORWARD(cublasLtMatrixLayoutCreate,
        (cublasLtMatrixLayout_t * layout, cudaDataType type, uint64_t rows, uint64_t columns, int64_t leading),
        (layout, type, rows, columns, leading))
FORWARD(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout), (layout))
FORWARD(cublasLtMatrixLayoutSetAttribute,
        (cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t bytes),
        (layout, attribute, value, bytes))
