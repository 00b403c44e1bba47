/* Windows on the device, gathered by index: what gather_patches, gather_targets, the fused ends of the model and the
 * small encoders share. */
#ifndef PS_KERNELS_CUDA_WINDOWS_CUH
#define PS_KERNELS_CUDA_WINDOWS_CUH

#include "kernels/cuda/context.cuh"
#include "kernels/cuda/tile/reduce.cuh"

/* Where windows lie: element (w, c, l) at w*by_window + c*by_channel + l*by_time. */
struct ps_cuda_windows {
    const float *data;
    const int32_t *indices;
    int64_t by_window, by_channel, by_time;
    int64_t count, index_count;
};

/* Element (0, 0) of the window of batch element b; NULL when there is no such index or window: its values are then NaN, so that the
 * mistake shows in the loss instead of reading elsewhere. */
static __device__ __forceinline__ const float *ps_window_of(const struct ps_cuda_windows &w, const struct ps_step_state *state,
                                                            int64_t b)
{
    const uint64_t at = state->cursor + (uint64_t)b;
    if (at >= (uint64_t)w.index_count) {
        return NULL;
    }
    const int64_t window = w.indices[at];
    return window >= 0 && window < w.count ? w.data + window * w.by_window : NULL;
}

/* RevIN's mean and deviation of a window in shared memory, by one warp. The first KEPT of a lane's values stay in registers, so
 * that they are read at once; LONGER: there may be more of them. */
template <int KEPT, bool LONGER>
static __device__ __forceinline__ void ps_window_statistics(const float *value, int length, float epsilon, float &mean,
                                                            float &deviation)
{
    const int lane = threadIdx.x % 32;
    float v[KEPT], sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const int l = lane + 32 * j;
        v[j] = l < length ? value[l] : 0.0f;
        sum += v[j];
    }
#pragma unroll 1
    for (int l = lane + 32 * KEPT; LONGER && l < length; l += 32) {
        sum += value[l];
    }
    mean = ps_group_sum<32>(sum) / (float)length;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const float difference = lane + 32 * j < length ? v[j] - mean : 0.0f;
        squares += difference * difference;
    }
#pragma unroll 1
    for (int l = lane + 32 * KEPT; LONGER && l < length; l += 32) {
        const float difference = value[l] - mean;
        squares += difference * difference;
    }
    deviation = sqrtf(ps_group_sum<32>(squares) / (float)length + epsilon);
}

/* t [W, C, L] float32, any strides; indices int32. */
static inline struct ps_cuda_windows ps_windows_of(const struct ps_tensor *t, const struct ps_tensor *indices)
{
    return {(const float *)t->data,  (const int32_t *)indices->data, t->stride[0], t->stride[1], t->stride[2], t->size[0],
            ps_tensor_count(indices)};
}

static inline enum ps_status ps_windows_make(const char *op, const char *name, const struct ps_tensor *t,
                                             const struct ps_tensor *indices, const struct ps_step_state *state, int64_t batch,
                                             struct ps_cuda_windows *w)
{
    if (t->type != PS_F32 || t->rank != 3 || !t->data) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %s has element type %d and rank %d, %d and 3 are needed", op, name, (int)t->type,
                       t->rank, (int)PS_F32);
    }
    PS_TRY(ps_cuda_expect(op, "indices", indices, PS_I32, ps_tensor_count(indices)));
    if (!state || batch < 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): a batch of %lld %s the step's state", op, (long long)batch,
                       state ? "with" : "without");
    }
    *w = ps_windows_of(t, indices);
    return PS_OK;
}

#endif
