/* AdamW inside encoder/resident/d64_weights.cuh, with ops/adamw.cuh's arithmetic: the threads that have a gradient's sum update its
 * parameter, so that a step needs no kernel for it. Without an update the sum is left in memory. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_UPDATE_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_UPDATE_CUH

#include "kernels/cuda/encoder/resident/arguments.cuh"

namespace ps_resident
{

/* Two neighbouring gradients and what AdamW keeps beside them. They are fetched while their sums are not there yet: the last kernel
 * that wrote them was this one, of the step before. */
template <class T> struct pair {
    float2 *to; /* NULL: none */
    float2 gradient, parameter, m;
    double2 v;

    __device__ __forceinline__ pair(const encoder<T> &x, float2 *gradients)
    {
        to = gradients;
        gradient = parameter = m = make_float2(0, 0);
        v = make_double2(0, 0);
        if (to) {
            gradient = __ldcg(to);
            if (x.d64.update.parameters) {
                const int64_t at = (float *)to - x.gradients;
                parameter = __ldcg((const float2 *)(x.d64.update.parameters + at));
                m = __ldcg((const float2 *)(x.d64.update.m + at));
                v = __ldcg((const double2 *)(x.d64.update.v + at));
            }
        }
    }

    /* The gradient is `sum` now; or AdamW takes it, and it is zero. */
    __device__ __forceinline__ void put(const encoder<T> &x, const struct ps_adamw_step &s, float2 sum)
    {
        if (!x.d64.update.parameters) {
            *to = sum;
            return;
        }
        if (gradient.x != 0.0f || gradient.y != 0.0f) {
            *to = make_float2(0, 0);
        }
        if (s.halted) {
            return;
        }
        const struct ps_adamw_plain &a = x.d64.update.plain;
        const int64_t at = (float *)to - x.gradients;
        ps_adamw_update(parameter.x, sum.x, m.x, v.x, a, s, at < a.decayed);
        ps_adamw_update(parameter.y, sum.y, m.y, v.y, a, s, at < a.decayed);
        *(float2 *)(x.d64.update.parameters + at) = parameter;
        *(uint32_t *)(x.d64.update.copy + at) = ps_pack<T>(parameter.x, parameter.y);
        *(float2 *)(x.d64.update.m + at) = m;
        *(double2 *)(x.d64.update.v + at) = v;
        if (!isfinite(sum.x) || !isfinite(sum.y)) {
            x.d64.update.state->nonfinite = s.nonfinite;
        }
    }
};

/* The same of one. */
template <class T>
static __device__ __forceinline__ void put_single(const encoder<T> &x, const struct ps_adamw_step &s, float *to, float sum)
{
    if (!x.d64.update.parameters) {
        *to = sum;
        return;
    }
    *to = 0.0f;
    if (s.halted) {
        return;
    }
    const int64_t at = to - x.gradients;
    float parameter = x.d64.update.parameters[at], m = x.d64.update.m[at];
    double v = x.d64.update.v[at];
    ps_adamw_update(parameter, sum, m, v, x.d64.update.plain, s, at < x.d64.update.plain.decayed);
    x.d64.update.parameters[at] = parameter;
    ps_put(x.d64.update.copy + at, parameter);
    x.d64.update.m[at] = m;
    x.d64.update.v[at] = v;
    if (!isfinite(sum)) {
        x.d64.update.state->nonfinite = s.nonfinite;
    }
}

} // namespace ps_resident

#endif
