/* mask_patches: some of each sequence's patches are hidden from the encoder, and become the targets (Nie et al. 2023).
 *
 * Why: a patch's rank among its sequence's keys says whether it is hidden. A block takes one sequence: its threads draw a key each,
 * for 256 patches at a time, into shared memory, where every patch of the block counts the smaller ones; then the block copies the
 * rows. Nothing of it goes through memory but x, y and targets.
 *
 * y, targets =; y may be x: a thread reads an element before it writes it. Bytes: 4 R P of targets and 8 R P, in 16 bits 4 R P.
 * Flops: none; N Philox blocks and N^2 comparisons a sequence. Memory bounds it up to some hundred patches. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/vector.cuh"
#include "kernels/philox.h"

static const int block = 256;

struct masking {
    uint64_t seed, first;
    int64_t window; /* C N */
    int patches, patch, kept;
};

/* Grid: sequences. */
template <typename T>
static __global__ void __launch_bounds__(block)
    mask_rows(T *y, float *__restrict__ targets, const T *x, const struct ps_step_state *__restrict__ state, const struct masking m)
{
    ps_grid_begin();
    __shared__ uint32_t key[block];
    __shared__ bool hidden[block];
    const int64_t row = (int64_t)blockIdx.x * m.patches;
    const uint64_t place = (state->cursor + m.first) * (uint64_t)m.window + (uint64_t)row, step = state->step;
    for (int first = 0; first < m.patches; first += block) {
        const int mine = first + (int)threadIdx.x;
        const uint32_t own = ps_mask_key(m.seed, place + (uint64_t)mine, step);
        int before = 0;
        for (int other = 0; other < m.patches; other += block) {
            __syncthreads(); /* the keys, and what was hidden, of the round before have been read */
            key[threadIdx.x] = other == first ? own : ps_mask_key(m.seed, place + (uint64_t)(other + threadIdx.x), step);
            __syncthreads();
            const int count = m.patches - other < block ? m.patches - other : block;
            for (int i = 0; i < count; i++) {
                before += key[i] < own || (key[i] == own && other + i < mine);
            }
        }
        hidden[threadIdx.x] = before >= m.kept;
        __syncthreads();
        const int rows = m.patches - first < block ? m.patches - first : block;
        const int64_t from = (row + first) * m.patch;
        for (int i = threadIdx.x; i < rows * m.patch; i += block) {
            const float value = ps_float(x[from + i]);
            const bool hides = hidden[i / m.patch];
            ps_put(y + from + i, hides ? 0.0f : value);
            targets[from + i] = hides ? value : NAN;
        }
    }
}

template <typename T> static enum ps_status mask_patches(const struct ps_kernels *k, const struct ps_mask_patches *a)
{
    const char *op = "mask_patches";
    const int64_t patch = ps_cuda_width(&a->x), count = ps_tensor_count(&a->x), rows = patch > 0 ? count / patch : 0;
    const int64_t sequences = a->patches > 0 ? rows / a->patches : 0;
    if (a->patches < 1 || a->channels < 1 || rows % (a->patches * a->channels) != 0 || a->kept < 0 || a->kept > a->patches) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld rows, %lld kept of %lld patches and %lld channels do not fit together", op,
                       (long long)rows, (long long)a->kept, (long long)a->patches, (long long)a->channels);
    }
    PS_TRY(ps_cuda_expect(op, "x", &a->x, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect(op, "y", &a->y, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect(op, "targets", &a->targets, PS_F32, count));
    if (sequences > INT32_MAX || a->patches > INT32_MAX - block || patch > INT32_MAX / block) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld sequences of %lld patches of %lld are too many", op, (long long)sequences,
                       (long long)a->patches, (long long)patch);
    }
    if (count == 0) {
        return PS_OK;
    }
    const struct masking m = {a->seed, a->first, a->channels * a->patches, (int)a->patches, (int)patch, (int)a->kept};
    ps_cuda_launch(ps_cuda(k), mask_rows<T>, (unsigned)sequences, block, 0, (T *)a->y.data, (float *)a->targets.data,
                   (const T *)a->x.data, a->state, m);
    PS_CUDA_LAUNCHED(op);
}

extern "C" enum ps_status ps_cuda_mask_patches(const struct ps_kernels *k, const struct ps_mask_patches *a)
{
    return PS_BY_REAL(k, mask_patches, k, a);
}
