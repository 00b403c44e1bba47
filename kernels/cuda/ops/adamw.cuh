/* AdamW's arithmetic, for the kernels that do it: ops/optimizer.cu's own, and, inside the sums of weight gradients,
 * encoder/resident/update.cuh. What depends on the step alone (learning rate, bias corrections, clipping) is worked out once a
 * block, in double. The second moment is kept in double because 1 - beta2 is far below float's resolution against a long history.
 */
#ifndef PS_KERNELS_CUDA_ADAMW_CUH
#define PS_KERNELS_CUDA_ADAMW_CUH

#include "kernels/cuda/context.cuh"

struct ps_adamw_plain {
    double beta1, beta2, epsilon, weight_decay, clip_norm, gradient_scale;
    int64_t count, decayed, steps;
    int skip;
    uint64_t windows;
};

static inline struct ps_adamw_plain ps_adamw_plain_of(const struct ps_adamw *a)
{
    return {a->beta1,
            a->beta2,
            a->epsilon,
            a->weight_decay,
            a->clip_norm,
            ps_gradient_scale(a->gradient_scale),
            ps_tensor_count(&a->parameters),
            a->decayed,
            ps_tensor_count(&a->learning_rates),
            a->skip,
            a->windows};
}

/* What every element of a step shares. */
struct ps_adamw_step {
    double v_scale; /* 1 / (1 - beta2^t) */
    double clip;
    float lr, m_scale;
    bool halted;        /* nothing changes but the gradient */
    uint64_t nonfinite; /* what a gradient that is not finite leaves in the state */
};

/* base^exponent by squaring: at most 64 rounds, and none of the library's table look-ups. */
static __device__ double ps_adamw_power(double base, uint64_t exponent)
{
    double result = 1.0;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) {
            result *= base;
        }
        base *= base;
    }
    return result;
}

/* By threads 0, 32 and 64, so that the three do not wait for one another: what no kernel between two steps writes. */
static __device__ __forceinline__ void ps_adamw_begin(struct ps_adamw_step &s, const struct ps_adamw_plain &a,
                                                      const double *learning_rates, const struct ps_step_state *state)
{
    if (threadIdx.x == 0) {
        s.m_scale = (float)(1.0 / (1.0 - ps_adamw_power(a.beta1, state->step + 1)));
    } else if (threadIdx.x == 32) {
        s.v_scale = 1.0 / (1.0 - ps_adamw_power(a.beta2, state->step + 1));
    } else if (threadIdx.x == 64) {
        const uint64_t step = state->step;
        /* Beyond the table the step changes no parameter but by NaN, so that it cannot pass unseen. */
        s.lr = step < (uint64_t)a.steps ? (float)learning_rates[step] : NAN;
    }
}

/* By one thread: what the gradients' sum of squares and earlier steps say. Whether this step is left out. */
static __device__ __forceinline__ bool ps_adamw_judge(struct ps_adamw_step &s, const struct ps_adamw_plain &a,
                                                      const struct ps_step_state *state)
{
    s.clip =
        (a.clip_norm > 0.0 ? fmin(1.0, a.clip_norm * a.gradient_scale / sqrt(state->gradient_squares)) : 1.0) / a.gradient_scale;
    /* Another block of this launch may have left step + 1 there already: that halts the next steps, not this one. */
    const uint64_t step = state->step, earlier = state->nonfinite;
    const bool skip = a.skip && !isfinite(state->gradient_squares);
    s.halted = skip || (earlier != 0 && earlier <= step);
    s.nonfinite = step + 1;
    return skip;
}

/* What is fused with an addition is written out, so that every kernel leaves the same bits. */
static __device__ __forceinline__ void ps_adamw_update(float &parameter, float gradient, float &m, double &v,
                                                       const struct ps_adamw_plain &a, const struct ps_adamw_step &s, bool decay)
{
    const double g = (double)gradient * s.clip;
    m = (float)fma(a.beta1, (double)m, (1.0 - a.beta1) * g);
    v = fma(a.beta2, v, (1.0 - a.beta2) * g * g);
    const float denominator = sqrtf((float)(v * s.v_scale)) + (float)a.epsilon;
    const float decayed = decay ? __fmul_rn((float)a.weight_decay, parameter) : 0.0f;
    parameter = fmaf(-s.lr, m * s.m_scale / denominator + decayed, parameter);
}

/* By the one thread that knows all blocks to have read the state. Nothing is waited for. */
static __device__ __forceinline__ void ps_adamw_end(const struct ps_adamw_plain &a, struct ps_step_state *state)
{
    (void)atomicAdd((unsigned long long *)&state->step, 1);
    (void)atomicAdd((unsigned long long *)&state->cursor, a.windows);
}

#endif
