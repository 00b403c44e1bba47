/* What the CUDA backend's files share. No header of CUDA's is included outside this folder. */
#ifndef PS_KERNELS_CUDA_CONTEXT_CUH
#define PS_KERNELS_CUDA_CONTEXT_CUH

#include <cuda_runtime.h>

#include "kernels/backends.h"
#include "kernels/philox.h"

struct ps_cuda_gemm;       /* cuBLASLt's handle and plans: gemm/cublaslt_plans.cu */
struct ps_encoder_planned; /* plans of level layer: encoder/choose.cu */

enum { PS_COLUMN_TILES = 4096, PS_TURN_COUNTS = 5, PS_COLUMN_JOBS = 48 };

/* first[i] += sum over rows of partials[row, i] for i < split, second[i - split] += the same for the columns from split on.
 * Where both split and columns are multiples of 4, partials is aligned to 16 bytes. */
struct ps_cuda_columns {
    float *first, *second;
    int64_t split;
    const float *partials;
    int64_t rows, columns;
};

/* Such sums that wait to be added in one, ps_kernels.later_sums; their partials lie in memory. */
struct ps_cuda_later {
    char *memory; /* NULL: none waits */
    size_t bytes, used;
    int count;
    struct ps_cuda_columns job[PS_COLUMN_JOBS];
};

/* ps_kernels.context. */
struct ps_cuda_context {
    cudaStream_t stream; /* PS_COMPUTE */
    int multiprocessors;
    int compute_capability;
    /* Partial sums of the reductions; operations follow one another on the stream, so they share it. */
    void *workspace;
    size_t workspace_bytes;
    mutable struct ps_cuda_later later;
    int shared_bytes; /* the most shared memory that a block can have */
    /* Level layer: partial gradients, packed weights; taken by encoder_prepare, zeroed then. */
    void *encoder_workspace;
    size_t encoder_workspace_bytes;
    struct ps_encoder_planned *encoder_plans;
    struct ps_cuda_gemm *gemm;
    int tiny_gemm;
    /* The stream of what runs beside (table.cu) and its events; while `beside` is set `stream` is that one. */
    cudaStream_t beside_stream;
    cudaEvent_t forked, ended;
    bool beside;
    mutable bool ordered; /* the next launch is a full dependency */
    unsigned *done; /* blocks of the running kernel that have finished; 0 between kernels. From done + 2 on: ends/head_large.cu's */
    unsigned *turns;      /* [2][PS_TURN_COUNTS] encoder/streamed/'s, forward and backward; 0 between their passes */
    unsigned *tiles_done; /* [PS_COLUMN_TILES] the same for each tile of columns: ops/columns.cuh */
};

static inline struct ps_cuda_context *ps_cuda(const struct ps_kernels *k)
{
    return (struct ps_cuda_context *)k->context;
}

/* The stream of a CUDA device. */
cudaStream_t ps_cuda_stream(const struct ps_device *device, enum ps_stream s);

/* PS_OK, or PS_DEVICE with "cuda: <what>: <CUDA's text>". */
enum ps_status ps_cuda_check(cudaError_t error, const char *what);
/* After a launch. */
#define PS_CUDA_LAUNCHED(name) return ps_cuda_check(cudaGetLastError(), name)

/* True when 16-byte accesses may begin at the tensor's data. */
static inline bool ps_cuda_aligned(const struct ps_tensor *t)
{
    return ((uintptr_t)t->data & 15) == 0;
}

/* PS_OK when t is contiguous, of this type and of `count` elements (any rank); else PS_UNSUPPORTED with what is wrong. */
enum ps_status ps_cuda_expect(const char *op, const char *name, const struct ps_tensor *t, enum ps_type type, int64_t count);
/* The last size of t, its row length (1 for rank 0). */
int64_t ps_cuda_width(const struct ps_tensor *t);
/* PS_OK when the workspace holds this many bytes. */
enum ps_status ps_cuda_workspace(const struct ps_cuda_context *c, const char *op, size_t bytes);

/* Room for the partials of one or two such jobs: where sums wait, if it has so much, else the workspace. ops/reduce.cu */
enum ps_status ps_cuda_partials(const struct ps_cuda_context *c, const char *op, size_t floats, float **partials);
/* Room where sums wait for the partials of `count` jobs of weights, aligned to 16 bytes; NULL where it would be more than half of
 * what is left, which others want too. */
float *ps_cuda_waiting_room(const struct ps_cuda_context *c, size_t floats, int count);
/* Adds what the jobs say in one launch, or lets them wait, where all their partials lie. */
enum ps_status ps_cuda_add_columns(const struct ps_cuda_context *c, const char *op, const struct ps_cuda_columns *jobs, int count);
/* ps_kernels.later_sums */
enum ps_status ps_cuda_later_sums(const struct ps_kernels *k, void *memory, size_t bytes);

/* bias_activation and activation_backward of swiglu: ops/swiglu.cu */
enum ps_status ps_cuda_swiglu(const struct ps_kernels *k, const struct ps_bias_activation *a);
enum ps_status ps_cuda_swiglu_backward(const struct ps_kernels *k, const struct ps_activation_backward *a);

/* The entries of the table. */
#define PS_X(name, kind, tensors, flops) \
    extern "C" enum ps_status ps_cuda_##name(const struct ps_kernels *k, const struct ps_##name *arguments);
PS_KERNEL_LIST(PS_X)
#undef PS_X
/* ps_kernels.gemm_gradients: gemm/choose.cu */
enum ps_status ps_cuda_gemm_gradients(const struct ps_kernels *k, const struct ps_gemm_gradient *each, int count);
enum ps_status ps_cuda_encoder_prepare(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                                       const struct ps_encoder_shape *shape, struct ps_encoder_needs *needs);
/* The same, but for the workspace. */
enum ps_status ps_cuda_encoder_choose(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                                      const struct ps_encoder_shape *shape, struct ps_encoder_needs *needs);
void ps_cuda_encoder_plans_free(struct ps_cuda_context *c);

/* ps_kernels.way of products (gemm/choose.cu) and of attention (attention/choose.cu). */
const char *ps_cuda_gemm_way(const struct ps_kernels *k, enum ps_op op, const void *arguments);
int ps_cuda_strided_heads_faster(const struct ps_kernels *k, int64_t patches, int64_t head);
int ps_cuda_attention_faster(const struct ps_kernels *k, int64_t patches, int64_t head, int64_t pieces);
int64_t ps_cuda_attention_columns(const struct ps_kernels *k, int64_t patches, int64_t head, int64_t pieces);
const char *ps_cuda_attention_way(const struct ps_kernels *k, enum ps_op op, const void *arguments);

/* ps_kernels.batchnorm_fold_faster: ops/batchnorm_fold.cu */
int ps_cuda_batchnorm_fold_faster(const struct ps_kernels *k, int64_t rows, int64_t d_model, int64_t d_ff,
                                  enum ps_activation activation);

/* The library's workspace is its own, of fixed size, so that a plan never depends on what ran before. gemm/cublaslt_plans.cu */
enum ps_status ps_cuda_gemm_open(const struct ps_kernels *k, struct ps_cuda_gemm **gemm);
/* ps_kernels_options.tuning, ps_kernels.tune and ps_kernels.tuning. */
enum ps_status ps_cuda_gemm_load(const struct ps_kernels *k, const char *text);
extern "C" enum ps_status ps_cuda_gemm_tune(const struct ps_kernels *k);
extern "C" enum ps_status ps_cuda_gemm_tuning(const struct ps_kernels *k, char **text);
void ps_cuda_gemm_close(const struct ps_kernels *k, struct ps_cuda_gemm *gemm);

#endif
