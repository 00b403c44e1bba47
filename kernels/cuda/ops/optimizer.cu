/* sum_squares, adamw, advance.
 *
 * Why: the optimiser is one pass over the flat buffers. What depends on the step alone is worked out once a block (ops/adamw.cuh),
 * while the block's loads are on their way.
 *
 * sum_squares: gradient_squares =. Bytes: 4 n. Flops: 2 n; double partials a block, summed in a fixed order by a second kernel.
 * adamw: parameters, m, v =, gradients = 0; step, cursor +=. Bytes: 40 n, and 2 n for the copy of 16 bits. Flops: 16 n.
 * Where elements are held, one a thread; while they are, bytes: 8 n, and 32 for each that is trained.
 * advance: step, cursor +=. */
#include "kernels/cuda/ops/adamw.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 256;

/* ---- sum_squares ---- */

/* partials [gridDim.x]; quads float4 from x, then the last few elements by the first threads of block 0. */
static __global__ void __launch_bounds__(block)
    square_partials(double *__restrict__ partials, const float *__restrict__ x, int64_t quads, int64_t count)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    const int64_t thread = (int64_t)blockIdx.x * block + threadIdx.x, threads = (int64_t)gridDim.x * block;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t i = thread; i < quads; i += threads) {
        const float4 v = ((const float4 *)x)[i];
        sum += (double)v.x * v.x + (double)v.y * v.y + ((double)v.z * v.z + (double)v.w * v.w);
    }
    for (int64_t i = 4 * quads + thread; i < count; i += threads) {
        sum += (double)x[i] * x[i];
    }
    sum = ps_block_sum<block>(sum, shared);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

static __global__ void __launch_bounds__(block)
    finish_squares(struct ps_step_state *state, const double *__restrict__ partials, int count)
{
    ps_grid_begin();
    __shared__ double shared[block / 32];
    const double sum = ps_sum_partials<block>(partials, count, 1, shared);
    if (threadIdx.x == 0) {
        state->gradient_squares = sum;
    }
}

extern "C" enum ps_status ps_cuda_sum_squares(const struct ps_kernels *k, const struct ps_sum_squares *a)
{
    const char *op = "sum_squares";
    const struct ps_cuda_context *c = ps_cuda(k);
    const int64_t count = ps_tensor_count(&a->x);
    PS_TRY(ps_cuda_expect(op, "x", &a->x, PS_F32, count));
    const int64_t quads = ps_cuda_aligned(&a->x) ? count / 4 : 0;
    unsigned blocks = ps_cuda_blocks(quads ? quads : count, 2 * block);
    const unsigned most = 4u * (unsigned)c->multiprocessors;
    blocks = blocks < most ? blocks : most;
    PS_TRY(ps_cuda_workspace(c, op, blocks * sizeof(double)));
    ps_cuda_launch(c, square_partials, blocks, block, 0, (double *)c->workspace, (const float *)a->x.data, quads, count);
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    ps_cuda_launch(c, finish_squares, 1, block, 0, a->state, (const double *)c->workspace, (int)blocks);
    PS_CUDA_LAUNCHED(op);
}

/* ---- adamw ---- */

/* Elements a thread: one, or two pairs of neighbours 64 elements apart, so that whatever a warp reads or writes at once, v's
 * doubles too, lies side by side. */
template <int VEC, typename T> static __device__ __forceinline__ void load_items(T *r, const T *p)
{
    if constexpr (VEC == 1) {
        r[0] = *p;
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            using pair = std::conditional_t<sizeof(T) == 8, double2, float2>;
            const pair two = ((const pair *)p)[32 * i];
            r[2 * i] = two.x;
            r[2 * i + 1] = two.y;
        }
    }
}

template <int VEC, typename T> static __device__ __forceinline__ void store_items(T *p, const T *r)
{
    if constexpr (VEC == 1) {
        *p = r[0];
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            using pair = std::conditional_t<sizeof(T) == 8, double2, float2>;
            ((pair *)p)[32 * i] = {r[2 * i], r[2 * i + 1]};
        }
    }
}

/* VEC elements a thread; VEC 4 wants every buffer aligned to 16 bytes, and the last warp takes what is left over. COPY: the type of
 * copy, or void. done [1], zero before and after: the last block to come there advances the state; NULL: none does.
 *
 * What no kernel between two steps writes (parameters, m, v, the step) is read before the gradients are there. */
template <int VEC, typename COPY>
static __global__ void __launch_bounds__(block, 4)
    adamw_elements(float *parameters, float *gradients, float *m, double *v, COPY *copy, const double *learning_rates,
                   struct ps_step_state *state, unsigned *done, const struct ps_adamw_plain a)
{
    __shared__ struct ps_adamw_step shared;
    const int lane = (int)threadIdx.x % 32;
    const int64_t base = ((int64_t)blockIdx.x * block + (int)threadIdx.x - lane) * VEC; /* the warp's */
    const int64_t i = base + (VEC == 1 ? lane : 2 * lane);
    const bool whole = VEC == 1 ? i < a.count : base + 32 * VEC <= a.count;
    float p[VEC], g[VEC], first[VEC];
    double second[VEC];
    if (whole) {
        load_items<VEC>(p, parameters + i);
        load_items<VEC>(first, m + i);
        load_items<VEC>(second, v + i);
    }
    ps_adamw_begin(shared, a, learning_rates, state);
    ps_grid_begin();
    if (whole) {
        load_items<VEC>(g, gradients + i);
    }
    if (threadIdx.x == 64 && ps_adamw_judge(shared, a, state) && blockIdx.x == 0) {
        state->skipped++;
    }
    __syncthreads();
    /* The block has read the state: the last to come here may change it. The answer is not waited for until the end. */
    const unsigned before = threadIdx.x == 0 && done ? atomicAdd(done, 1) : UINT_MAX;
    const auto advance = [&]() {
        if (before == gridDim.x - 1) {
            *done = 0;
            ps_adamw_end(a, state);
        }
    };
    const struct ps_adamw_step s = shared;
    const int64_t end = base + 32 * VEC < a.count ? base + 32 * VEC : a.count;
    if (s.halted) {
        for (int64_t j = base + lane; j < end; j += 32) {
            gradients[j] = 0.0f;
        }
        advance();
        return;
    }
    bool finite = true;
    if (whole) {
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            finite = finite && isfinite(g[j]);
            ps_adamw_update(p[j], g[j], first[j], second[j], a, s, i + j / 2 * 64 + j % 2 < a.decayed);
            g[j] = 0.0f;
        }
        store_items<VEC>(parameters + i, p);
        if constexpr (!std::is_void<COPY>::value && VEC == 1) {
            ps_put(copy + i, p[0]);
        } else if constexpr (!std::is_void<COPY>::value) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                ((uint32_t *)(copy + i))[32 * j] = ps_pack<COPY>(p + 2 * j);
            }
        }
        store_items<VEC>(gradients + i, g);
        store_items<VEC>(m + i, first);
        store_items<VEC>(v + i, second);
    } else {
#pragma unroll 1
        for (int64_t j = base + lane; j < end; j += 32) { /* the last few */
            finite = finite && isfinite(gradients[j]);
            ps_adamw_update(parameters[j], gradients[j], m[j], v[j], a, s, j < a.decayed);
            gradients[j] = 0.0f;
            if constexpr (!std::is_void<COPY>::value) {
                ps_put(copy + j, parameters[j]);
            }
        }
    }
    if (!finite) {
        state->nonfinite = s.nonfinite;
    }
    advance();
}

/* Elements of which the rest waits until step `steps`. */
struct held {
    struct ps_range trained[2];
    uint64_t steps;
};

static __device__ __forceinline__ bool is_trained(const struct held &h, int64_t i)
{
    return (i >= h.trained[0].begin && i < h.trained[0].end) || (i >= h.trained[1].begin && i < h.trained[1].end);
}

/* adamw_elements with ps_adamw.held, one element a thread: for linear probes, whose step is the encoder's forward pass. */
template <typename COPY>
static __global__ void __launch_bounds__(block)
    adamw_held(float *parameters, float *gradients, float *m, double *v, COPY *copy, const double *learning_rates,
               struct ps_step_state *state, unsigned *done, const struct ps_adamw_plain a, const struct held h)
{
    ps_grid_begin();
    __shared__ struct ps_adamw_step shared, late; /* of late: bias corrections */
    const int64_t i = (int64_t)blockIdx.x * block + threadIdx.x;
    const uint64_t step = state->step;
    const bool waits = step < h.steps;
    ps_adamw_begin(shared, a, learning_rates, state);
    if (threadIdx.x == 96) {
        late.m_scale = (float)(1.0 / (1.0 - ps_adamw_power(a.beta1, step + 1 - h.steps)));
    } else if (threadIdx.x == 128) {
        late.v_scale = 1.0 / (1.0 - ps_adamw_power(a.beta2, step + 1 - h.steps));
    } else if (threadIdx.x == 64 && ps_adamw_judge(shared, a, state) && blockIdx.x == 0) {
        state->skipped++;
    }
    __syncthreads();
    const unsigned before = threadIdx.x == 0 && done ? atomicAdd(done, 1) : UINT_MAX;
    struct ps_adamw_step s = shared;
    if (i < a.count) {
        const float gradient = gradients[i];
        const bool trained = is_trained(h, i);
        gradients[i] = 0.0f;
        if (!s.halted && (trained || !waits)) {
            float parameter = parameters[i], first = m[i];
            double second = v[i];
            s.m_scale = trained ? s.m_scale : late.m_scale;
            s.v_scale = trained ? s.v_scale : late.v_scale;
            ps_adamw_update(parameter, gradient, first, second, a, s, i < a.decayed);
            parameters[i] = parameter;
            m[i] = first;
            v[i] = second;
            if constexpr (!std::is_void<COPY>::value) {
                ps_put(copy + i, parameter);
            }
        }
        if (!s.halted && !isfinite(gradient)) {
            state->nonfinite = s.nonfinite;
        }
    }
    if (before == gridDim.x - 1) {
        *done = 0;
        ps_adamw_end(a, state);
    }
}

/* ps_cuda_launch; of what runs beside at the least priority, so that its blocks come where none of another kernel waits for a
 * place. */
template <typename... P, typename... A>
static void launch_elements(const struct ps_cuda_context *c, void (*kernel)(P...), unsigned blocks, A... arguments)
{
    if (!c->beside) {
        ps_cuda_launch(c, kernel, blocks, block, 0, arguments...);
        return;
    }
    cudaLaunchAttribute priority = {}; /* 0 */
    priority.id = cudaLaunchAttributePriority;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(block);
    config.stream = c->stream;
    config.attrs = &priority;
    config.numAttrs = 1;
    (void)cudaLaunchKernelEx(&config, kernel, P(arguments)...);
}

template <int VEC, typename COPY>
static void launch_items(const struct ps_cuda_context *c, const struct ps_adamw *a, const struct ps_adamw_plain &plain)
{
    launch_elements(c, adamw_elements<VEC, COPY>, ps_cuda_blocks(plain.count, VEC * block), (float *)a->parameters.data,
                    (float *)a->gradients.data, (float *)a->m.data, (double *)a->v.data, (COPY *)a->copy.data,
                    (const double *)a->learning_rates.data, a->state, a->more ? NULL : c->done, plain);
}

template <typename COPY>
static void launch_adamw(const struct ps_cuda_context *c, const struct ps_adamw *a, const struct ps_adamw_plain &plain)
{
    if (a->held > 0) {
        const struct held h = {{a->trained[0], a->trained[1]}, a->held};
        ps_cuda_launch(c, adamw_held<COPY>, ps_cuda_blocks(plain.count, block), block, 0, (float *)a->parameters.data,
                       (float *)a->gradients.data, (float *)a->m.data, (double *)a->v.data, (COPY *)a->copy.data,
                       (const double *)a->learning_rates.data, a->state, a->more ? NULL : c->done, plain, h);
    } else if (ps_cuda_aligned(&a->parameters) && ps_cuda_aligned(&a->gradients) && ps_cuda_aligned(&a->m) &&
               ps_cuda_aligned(&a->v) && ps_cuda_aligned(&a->copy)) {
        launch_items<4, COPY>(c, a, plain);
    } else {
        launch_items<1, COPY>(c, a, plain);
    }
    c->ordered = !a->more; /* the next step's would read early what this one writes */
}

extern "C" enum ps_status ps_cuda_adamw(const struct ps_kernels *k, const struct ps_adamw *a)
{
    const char *op = "adamw";
    const struct ps_cuda_context *c = ps_cuda(k);
    const int64_t count = ps_tensor_count(&a->parameters), steps = ps_tensor_count(&a->learning_rates);
    PS_TRY(ps_cuda_expect(op, "parameters", &a->parameters, PS_F32, count));
    PS_TRY(ps_cuda_expect(op, "gradients", &a->gradients, PS_F32, count));
    PS_TRY(ps_cuda_expect(op, "m", &a->m, PS_F32, count));
    PS_TRY(ps_cuda_expect(op, "v", &a->v, PS_F64, count));
    PS_TRY(ps_cuda_expect(op, "learning_rates", &a->learning_rates, PS_F64, steps));
    if (a->copy.data) {
        PS_TRY(ps_cuda_expect(op, "copy", &a->copy, a->copy.type == PS_F16 ? PS_F16 : PS_BF16, count));
    }
    const struct ps_adamw_plain plain = ps_adamw_plain_of(a);
    if (!a->copy.data) {
        launch_adamw<void>(c, a, plain);
    } else if (a->copy.type == PS_F16) {
        launch_adamw<ps_fp16>(c, a, plain);
    } else {
        launch_adamw<ps_bf16>(c, a, plain);
    }
    PS_CUDA_LAUNCHED(op);
}

/* ---- advance ---- */

static __global__ void advance_state(struct ps_step_state *state, uint64_t steps, uint64_t windows)
{
    ps_grid_begin();
    state->step += steps;
    state->cursor += windows;
}

extern "C" enum ps_status ps_cuda_advance(const struct ps_kernels *k, const struct ps_advance *a)
{
    ps_cuda_launch(ps_cuda(k), advance_state, 1, 1, 0, a->state, a->steps, a->windows);
    ps_cuda(k)->ordered = true; /* adamw reads the step early */
    PS_CUDA_LAUNCHED("advance");
}
