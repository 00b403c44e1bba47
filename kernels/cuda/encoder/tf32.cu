/* Level `layer` in tf32, by the kernels of fp16: fp16 has tf32's 10 bits of mantissa, so operands are rounded as tf32 rounds them.
 * The encoder's own rows are fp16 too; parameters, their gradients, sums and statistics are fp32, and so is all around the encoder.
 *
 * fp16's range is what must be seen to. Rows, hidden columns and weights of a model that trains on normalised windows come nowhere
 * near 65,504, and what passes it shows as a loss that is not finite. Gradients can be of any size: `peak` finds the largest
 * element of dy, and backward takes all times the power of two that brings it to 1 .. 2 and gives them back by its reciprocal,
 * exactly (from 2^-64 to 2^64). 2^15 above that is room for their growth; what lies 2^14 below loses bits, what lies 2^24 below is
 * left out: rows of the batch share the power. The encoder adds to gradients that are there, so those are taken times that power as
 * well.
 *
 * Bytes, R d rows' elements, p the layers' parameters: forward 6 (p + R d), and 6 R d of the last layer's rows; backward 10 R d and
 * 8 p each of before and after. weather: 260 MB forward and backward, 60 us at 4.3 TB/s. Flops: none to speak of. */
#include "kernels/cuda/context.cuh"
#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int threads = 256;

/* The power of two for gradients whose largest element has these bits; back: its reciprocal. 1 where that is zero or not finite. */
static __device__ __forceinline__ float power_of(unsigned peak, bool back)
{
    const int biased = (int)(peak >> 23), exponent = biased == 0 || biased == 255 ? 0 : max(-64, min(64, 127 - biased));
    return __int_as_float(((back ? -exponent : exponent) + 127) << 23);
}

/* 4 elements from `from` on, times `by`. */
template <class TO, class FROM> static __device__ __forceinline__ void move4(TO *to, const FROM *from, float by)
{
    float v[4];
    ps_load<4>(v, from);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] *= by;
    }
    ps_store<4>(to, v);
}

/* weights and rows rounded, 4 elements a thread; so many words zero. */
static __global__ void __launch_bounds__(threads)
    take_forward(ps_fp16 *weights, const float *from_weights, int64_t of_weights, ps_fp16 *rows, const float *from_rows,
                 int64_t of_rows, unsigned *zeroed, int words)
{
    ps_grid_begin();
    const int64_t i = ((int64_t)blockIdx.x * threads + threadIdx.x) * 4, row = i - of_weights;
    if (blockIdx.x == 0 && (int)threadIdx.x < words) {
        zeroed[threadIdx.x] = 0;
    }
    if (row < 0) {
        move4(weights + i, from_weights + i, 1.0f);
    } else if (row < of_rows) {
        move4(rows + row, from_rows + row, 1.0f);
    }
}

/* The bits of the largest magnitude of dy, onto what is there. */
static __global__ void __launch_bounds__(threads) find_peak(unsigned *most, const float4 *dy, int64_t fours)
{
    __shared__ unsigned warps[threads / 32];
    ps_grid_begin();
    unsigned own = 0;
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < fours; i += (int64_t)gridDim.x * threads) {
        const float4 v = dy[i];
        own = max(max(own, __float_as_uint(v.x) & 0x7fffffffu), __float_as_uint(v.y) & 0x7fffffffu);
        own = max(max(own, __float_as_uint(v.z) & 0x7fffffffu), __float_as_uint(v.w) & 0x7fffffffu);
    }
    own = __reduce_max_sync(0xffffffffu, own);
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = own;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < threads / 32; w++) {
            own = max(own, warps[w]);
        }
        atomicMax(most, own);
    }
}

/* to = from, of rows, times the power of `peak`, and gradients times it; back: times its reciprocal. peak NULL: rows as they are.
 */
template <class TO, class FROM>
static __global__ void __launch_bounds__(threads)
    exchange(TO *to, const FROM *from, int64_t of_rows, float *matrices, int64_t of_matrices, float *vectors, int64_t of_vectors,
             const unsigned *peak)
{
    ps_grid_begin();
    const int64_t i = ((int64_t)blockIdx.x * threads + threadIdx.x) * 4, matrix = i - of_rows, vector = matrix - of_matrices;
    const float by = peak ? power_of(*peak, std::is_same<TO, float>::value) : 1.0f;
    if (matrix < 0) {
        move4(to + i, from + i, by);
    } else if (vector < 0) {
        move4(matrices + matrix, matrices + matrix, by);
    } else if (vector < of_vectors) {
        move4(vectors + vector, vectors + vector, by);
    }
}

/* ---- the host's side ---- */

/* Of all layers, `first` elements at `at`, so many tensors; a layer's lie `stride` apart. */
static struct ps_encoder_part part_of(const int64_t *at, const int64_t *size, int tensors, int64_t layers, int64_t stride)
{
    int64_t first = at[0], end = 0;
    for (int i = 0; i < tensors; i++) {
        first = at[i] < first ? at[i] : first;
        end = at[i] + size[i] > end ? at[i] + size[i] : end;
    }
    return {first, end + (layers - 1) * stride - first};
}

struct ps_encoder_part ps_encoder_matrices(const struct ps_encoder_request *e)
{
    const struct ps_encoder_layout *l = &e->layout;
    const int64_t d = e->d_model, f = e->d_ff, at[] = {l->w_qkv, l->w_o, l->w_1, l->w_2}, size[] = {3 * d * d, d * d, d * f, f * d};
    return part_of(at, size, 4, e->layers, l->matrix_stride);
}

static struct ps_encoder_part vectors_of(const struct ps_encoder_request *e)
{
    const struct ps_encoder_layout *l = &e->layout;
    const int64_t d = e->d_model, at[] = {l->ln1_gamma, l->ln1_beta, l->b_qkv, l->b_o, l->ln2_gamma, l->ln2_beta, l->b_1, l->b_2},
                  size[] = {d, d, 3 * d, d, d, d, e->d_ff, d};
    return part_of(at, size, 8, e->layers, l->vector_stride);
}

static size_t whole(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static int64_t elements_of(const struct ps_encoder_request *e)
{
    return e->sequences * e->patches * e->d_model;
}

static size_t rows_bytes(const struct ps_encoder_request *e)
{
    return whole(sizeof(ps_fp16) * (size_t)((e->layers + 1) * elements_of(e)));
}

/* What there is besides the family's. Its rows are the last that is kept, so that those of a shorter batch do not lie where a
 * longer one has left masks for its next step. Behind the workspace, which begins where it always does: the peak, weights, rows'
 * gradients.
 */
struct places {
    ps_fp16 *rows, *weights, *gradient;
    unsigned *peak;
    size_t bytes; /* of the workspace */
};

static struct places places_of(const struct ps_kernels *k, const struct ps_encoder_request *e, const struct ps_encoder_plan *plan)
{
    char *const behind = (char *)e->workspace + whole(plan->within->workspace_bytes(k, e, plan));
    struct places p;
    p.rows = (ps_fp16 *)((char *)e->kept + e->kept_bytes - rows_bytes(e));
    p.peak = (unsigned *)behind;
    p.weights = (ps_fp16 *)(behind + 256);
    p.gradient = (ps_fp16 *)((char *)p.weights + whole(sizeof(ps_fp16) * (size_t)ps_encoder_matrices(e).count));
    p.bytes = (size_t)((char *)(p.gradient + elements_of(e)) - (char *)e->workspace);
    return p;
}

static size_t tf32_workspace_bytes(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                   const struct ps_encoder_plan *plan)
{
    return places_of(k, e, plan).bytes;
}

/* As the family is asked. */
static struct ps_encoder_request request_of(const struct ps_encoder_request *e, const struct places &p)
{
    struct ps_encoder_request inner = *e;
    inner.weights = p.weights - ps_encoder_matrices(e).first;
    inner.u = p.rows;
    inner.dy = inner.du = p.gradient;
    return inner;
}

template <class TO, class FROM>
static enum ps_status launch_exchange(const struct ps_kernels *k, const struct ps_encoder_request *e, TO *to, const FROM *from,
                                      const unsigned *peak)
{
    const struct ps_encoder_part matrices = ps_encoder_matrices(e), vectors = vectors_of(e);
    const int64_t rows = elements_of(e), of_matrices = peak ? matrices.count : 0, of_vectors = peak ? vectors.count : 0;
    ps_cuda_launch(ps_cuda(k), exchange<TO, FROM>, ps_cuda_blocks(rows + of_matrices + of_vectors, 4 * threads), threads, 0, to,
                   from, rows, e->gradients + matrices.first, of_matrices, e->gradients + vectors.first, of_vectors, peak);
    PS_CUDA_LAUNCHED("encoder, tf32");
}

enum ps_status ps_encoder_tf32_take(const struct ps_kernels *k, const struct ps_encoder_request *e, void *weights, void *rows,
                                    unsigned *zeroed, int words)
{
    const struct ps_encoder_part matrices = ps_encoder_matrices(e);
    const int64_t of_rows = rows ? elements_of(e) : 0;
    ps_cuda_launch(ps_cuda(k), take_forward, ps_cuda_blocks(matrices.count + of_rows, 4 * threads), threads, 0, (ps_fp16 *)weights,
                   (const float *)e->weights + matrices.first, matrices.count, (ps_fp16 *)rows, (const float *)e->u, of_rows,
                   zeroed, words);
    PS_CUDA_LAUNCHED("encoder, tf32");
}

enum ps_status ps_encoder_tf32_peak(const struct ps_kernels *k, const struct ps_encoder_request *e, unsigned *peak)
{
    const int64_t fours = elements_of(e) / 4;
    const unsigned blocks = ps_cuda_blocks(fours, 4 * threads), most = 2 * (unsigned)ps_cuda(k)->multiprocessors;
    ps_cuda_launch(ps_cuda(k), find_peak, blocks < most ? blocks : most, threads, 0, peak, (const float4 *)e->dy, fours);
    PS_CUDA_LAUNCHED("encoder, tf32");
}

static enum ps_status tf32_forward(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                   const struct ps_encoder_plan *plan)
{
    const struct places p = places_of(k, e, plan);
    const int64_t all = e->layers * elements_of(e);
    struct ps_encoder_request inner = request_of(e, p);
    PS_TRY(ps_encoder_tf32_take(k, e, p.weights, p.rows, p.peak, 1)); /* the next backward's peak is nothing yet */
    inner.fresh = ps_cuda(k)->ordered = true;                         /* weights have just been written */
    PS_TRY(plan->within->forward(k, &inner, plan));
    return launch_exchange(k, e, (float *)e->u + all, p.rows + all, NULL);
}

static enum ps_status tf32_backward(const struct ps_kernels *k, const struct ps_encoder_request *e,
                                    const struct ps_encoder_plan *plan)
{
    const struct places p = places_of(k, e, plan);
    const struct ps_encoder_request inner = request_of(e, p);
    PS_TRY(ps_encoder_tf32_peak(k, e, p.peak));
    PS_TRY(launch_exchange(k, e, p.gradient, (const float *)e->dy, p.peak));
    ps_cuda(k)->ordered = true; /* gradients have just been scaled */
    PS_TRY(plan->within->backward(k, &inner, plan));
    return launch_exchange(k, e, (float *)e->du, p.gradient, p.peak);
}

static enum ps_encoder_span tf32_span(const struct ps_kernels *, const struct ps_encoder_request *, const struct ps_encoder_plan *)
{
    return PS_SPAN_LAYERS;
}

/* encoder/choose.cu asks fp16's families for a plan first. */
static const struct ps_encoder_family tf32 = {NULL, tf32_span, tf32_workspace_bytes, tf32_forward, tf32_backward};

void ps_encoder_tf32_take_over(const struct ps_encoder_request *e, struct ps_encoder_plan *plan)
{
    plan->within = plan->family;
    plan->family = &tf32;
    plan->kept_bytes = whole(plan->kept_bytes) + rows_bytes(e);
    plan->slower = false; /* level gemm is slower in tf32 than in 16 bits, as measured (docs/benchmarks.md) */
}
