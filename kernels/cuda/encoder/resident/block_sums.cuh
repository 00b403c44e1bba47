/* The weights' gradients of encoder/resident/resident.cuh, d16_e4_f128.cu and d16_halves.cu from what backward's blocks have left:
 * the sum over the blocks, in a fixed order. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_BLOCK_SUMS_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_BLOCK_SUMS_CUH

#include "kernels/cuda/encoder/embed.cuh"

namespace ps_resident
{

enum { SUM_THREADS = 512, SUM_TILE = 256, SUM_PARTS = SUM_THREADS / (SUM_TILE / 4) };

/* A block adds 256 / d rows of a layer's partial sums over all blocks, in 8 parts and then those in order, and adds them to the
 * gradients; the last block of a matrix that follows a LayerNorm adds up what the others found of gamma's and beta's. Grid
 * ((4d + 2f) d / 256, layers), and a row of blocks for the embedding. AT_ONCE: a block alone on its multiprocessor. */
template <class T, int D, bool AT_ONCE = false>
static __global__ void __launch_bounds__(SUM_THREADS, AT_ONCE ? 1 : 0) sum_kernel(const __grid_constant__ encoder<T> x)
{
    constexpr int ROWS = SUM_TILE / D, FLIGHT = AT_ONCE ? 17 : 14;
    __shared__ float4 sums[SUM_PARTS][SUM_TILE / 4];
    __shared__ float bias_sums[SUM_PARTS][2 * ROWS], total[ROWS], found[2][SUM_TILE];
    __shared__ bool last;
    const int f = x.f, thread = (int)threadIdx.x, l = (int)blockIdx.y, row0 = (int)blockIdx.x * ROWS, size = layer_sums(D, f);
    const int64_t stride = (int64_t)x.layers * size;
    const bool of_o = row0 >= 3 * D && row0 < 4 * D; /* W_o's blocks add b_2 as well */
    const bool after_norm = row0 < 4 * D + f && !of_o, normed = after_norm && !x.sums.plain;
    const int which = row0 >= 4 * D; /* LN2 */
    float *const matrices = x.gradients + l * x.at.matrix_stride, *const vectors = x.gradients + l * x.at.vector_stride;
    /* The thread's element of the matrices and what it needs beside the sums, all of it written before the backward. */
    int64_t at = 0;
    float weight = 0, gamma = 1, beta = 0, old = 0;
    if (thread < SUM_TILE && l < x.layers) {
        const int j = thread % D, row = row0 + thread / D;
        at = of_o          ? x.at.w_o + j * D + row - 3 * D
             : !after_norm ? x.at.w_2 + (int64_t)(row - 4 * D - f) * D + j
             : which       ? x.at.w_1 + (int64_t)j * f + row - 4 * D
                           : x.at.w_qkv + j * 3 * D + row;
        old = matrices[at];
        if (normed) {
            const float *const p = x.parameters + l * x.at.vector_stride;
            weight = ps_float(x.weights[l * x.at.matrix_stride + at]);
            gamma = p[(which ? x.at.ln2_gamma : x.at.ln1_gamma) + j];
            beta = p[(which ? x.at.ln2_beta : x.at.ln1_beta) + j];
        }
    }
    float *vector = NULL, old_bias = 0; /* the thread's bias */
    if (thread < 2 * ROWS && row0 < 4 * D + f && (thread < ROWS || of_o) && l < x.layers) {
        const int row = row0 + thread % ROWS;
        vector = vectors + (thread >= ROWS ? x.at.b_2 + row - 3 * D
                            : row < 3 * D  ? x.at.b_qkv + row
                            : row < 4 * D  ? x.at.b_o + row - 3 * D
                                           : x.at.b_1 + row - 4 * D);
        old_bias = *vector;
    }
    const bool early = x.sums.apart && l < x.layers && (l > 0 || row0 >= 4 * D); /* written two kernels ago or more */
    if (!early) {
        ps_grid_begin();
    }
    /* Backward may have added the blocks itself. */
    const bool added = x.sums.summed && (l > 0 || row0 >= 4 * D);
    const float *const from = (added ? x.sums.summed : x.sums.partial) + (int64_t)l * size;
    const int blocks_here = added ? 1 : row0 < 4 * D ? x.blocks : x.sums.hidden_blocks;
    if (x.sums.summed && l + blockIdx.x == 0 && thread < 2 * x.layers) {
        x.sums.finished[thread] = 0; /* for the next time */
    }
    if (l == x.layers) {
        add_embedding<D, SUM_THREADS, AT_ONCE ? FLIGHT : 8>(x, sums[0], (int)blockIdx.x, (int)gridDim.x);
        return;
    }
    const float *biases = NULL;
    int bias_count = 0;
    const int bias_first = thread / (2 * ROWS);
    if (thread < SUM_PARTS * 2 * ROWS && row0 < 4 * D + f) {
        const int i = thread % (2 * ROWS);
        if (i < ROWS || of_o) {
            const bool b_2 = i >= ROWS;
            biases = (b_2 && x.sums.summed ? x.sums.summed + (int64_t)l * size : from) + (4 * D + 2 * f) * D +
                     (b_2 ? 4 * D + f + row0 - 3 * D + i - ROWS : row0 + i);
            bias_count = !b_2 ? blocks_here : x.sums.summed ? 1 : x.sums.hidden_blocks;
        }
    }
    const int part = thread / (SUM_TILE / 4), i = thread % (SUM_TILE / 4);
    const float4 *const parts = (const float4 *)(from + (int64_t)row0 * D) + i;
    float bias_part = 0;
    int bias_next = bias_first;
    if constexpr (AT_ONCE) { /* those of 136 blocks are on their way together */
        float4 v[FLIGHT], sum = make_float4(0, 0, 0, 0);
        float bias[FLIGHT];
#pragma unroll
        for (int j = 0; j < FLIGHT; j++) {
            const int b = part + j * SUM_PARTS, c = bias_first + j * SUM_PARTS;
            v[j] = b < blocks_here ? __ldcg(parts + b * (stride / 4)) : make_float4(0, 0, 0, 0);
            bias[j] = c < bias_count ? __ldcg(biases + c * stride) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < FLIGHT; j++) {
            add_four(sum, v[j]);
            bias_part += bias[j];
        }
        for (int b = part + FLIGHT * SUM_PARTS; b < blocks_here; b += SUM_PARTS) {
            add_four(sum, __ldcg(parts + b * (stride / 4)));
        }
        sums[part][i] = sum;
        bias_next += FLIGHT * SUM_PARTS;
    } else {
        sums[part][i] = sum_every<FLIGHT, false>(parts, stride / 4, part, SUM_PARTS, blocks_here);
    }
#pragma unroll 16
    for (int b = bias_next; b < bias_count; b += SUM_PARTS) {
        bias_part += __ldcg(biases + b * stride);
    }
    if (early) {
        ps_grid_begin();
    }
    if (thread < SUM_PARTS * 2 * ROWS) {
        bias_sums[bias_first][thread % (2 * ROWS)] = bias_part;
    }
    __syncthreads();
    if (vector) {
        float sum = bias_sums[0][thread];
        for (int part = 1; part < SUM_PARTS; part++) {
            sum += bias_sums[part][thread];
        }
        if (thread >= ROWS) {
            *vector = old_bias + sum / x.half_scale; /* see feed_forward_backward */
        } else {
            total[thread] = sum;
            *vector = old_bias + sum;
        }
    }
    __syncthreads();
    if (thread < SUM_TILE) {
        float sum = ((const float *)sums[0])[thread];
        for (int part = 1; part < SUM_PARTS; part++) {
            sum += ((const float *)sums[part])[thread];
        }
        if (normed) {
            const float by = total[thread / D];
            matrices[at] = old + (gamma * sum + beta * by);
            found[0][thread] = weight * sum;
            found[1][thread] = weight * by;
        } else {
            matrices[at] = old + sum;
        }
    }
    if (!normed) {
        return;
    }
    const int block0 = which ? 4 * D / ROWS : 0, blocks = (which ? f : 3 * D) / ROWS;
    float *const norms = x.sums.norms + (int64_t)l * gridDim.x * 2 * D;
    __syncthreads();
    if (thread < 2 * D) {
        const int j = thread % D;
        float sum = 0;
        for (int i = 0; i < ROWS; i++) {
            sum += found[thread / D][i * D + j];
        }
        norms[blockIdx.x * 2 * D + thread] = sum;
        __threadfence();
    }
    __syncthreads();
    if (thread == 0) {
        last = atomicAdd(&x.sums.arrived[2 * l + which], 1u) == (unsigned)blocks - 1;
    }
    __syncthreads();
    if (last) {
        __threadfence();
        if (thread < 2 * D) {
            float sum = 0;
#pragma unroll 8
            for (int b = 0; b < blocks; b++) {
                sum += __ldcg(norms + (block0 + b) * 2 * D + thread);
            }
            const int64_t at = which ? thread < D ? x.at.ln2_gamma : x.at.ln2_beta : thread < D ? x.at.ln1_gamma : x.at.ln1_beta;
            vectors[at + thread % D] += sum;
        }
        if (thread == 0) {
            x.sums.arrived[2 * l + which] = 0;
        }
    }
}

template <class T>
static enum ps_status launch_sums(const struct ps_cuda_context *c, void (*kernel)(const encoder<T>), int d, bool embedding,
                                  const encoder<T> &x)
{
    const dim3 grid((unsigned)((4 * d + 2 * x.f) * d / SUM_TILE), (unsigned)(x.layers + embedding));
    return ps_resident_launch(c, "encoder weight gradients", kernel, grid, SUM_THREADS, 0, x);
}

} // namespace ps_resident

#endif
