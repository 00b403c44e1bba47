/* bias_grad: column sums of a gradient, with dropout's mask drawn again and the masked gradient left for the products.
 *
 * Why: the bias's gradient and the masked gradient both need one pass over dy [R, n]. A block takes up to 128 columns and a share
 * of the rows, each thread four columns, four rows in flight; its sums go to a partial row, and ops/reduce.cu adds the partial rows
 * in a fixed order. How rows are shared out depends on the shape and the device alone. In 16 bits a thread takes eight columns, one
 * Philox block; the sums are of the gradient before masked is rounded.
 *
 * masked =, dbias +=. Bytes: 4 R n, 8 R n with masked; half of that in 16 bits. Flops: 2 R n. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/tile/vector.cuh"

static const int block = 256;

/* Rows whose loads a thread has under way at once. */
template <int VEC> static constexpr int rows_in_flight = VEC == 8 ? 2 : 4;

/* Blocks (share, tile), tiles fastest; threads: 2^tx_bits along the columns, VEC columns each, the rest down the rows.
 * partials [shares, n]. masked may be NULL, and may be dy. With VEC 4 and DROP n is a multiple of 8 and tx_bits > 0. */
template <typename T, int VEC, bool DROP>
static __global__ void __launch_bounds__(block, 4)
    column_sums(float *__restrict__ partials, T *masked, const T *dy, int64_t rows, int64_t share_rows, int n, int tiles,
                int tx_bits, const struct ps_dropout dropout)
{
    ps_grid_begin();
    constexpr int flight = rows_in_flight<VEC>;
    __shared__ float shared[VEC][block];
    const int tx = threadIdx.x & ((1 << tx_bits) - 1), ty = threadIdx.x >> tx_bits, height = block >> tx_bits;
    const int64_t share = blockIdx.x / tiles;
    const int column = (int)(((blockIdx.x % tiles) << tx_bits) + tx) * VEC;
    const int64_t begin = share * share_rows, end = begin + share_rows < rows ? begin + share_rows : rows;
    const bool inside = column < n;
    const uint64_t step = DROP ? dropout.state->step : 0;
    float sum[VEC];
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        sum[j] = 0.0f;
    }
    /* The bound is the block's, so that lanes stay together to draw. */
    for (int64_t base = begin; base < end; base += (int64_t)flight * height) {
        float v[flight][VEC];
#pragma unroll
        for (int r = 0; r < flight; r++) {
            const int64_t row = base + ty + r * height;
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                v[r][j] = 0.0f;
            }
            if (inside && row < end) {
                ps_load<VEC>(v[r], dy + row * n + column);
            }
        }
        if constexpr (DROP && VEC == 4) {
#pragma unroll
            for (int r = 0; r < flight; r += 2) {
                const uint64_t first = (uint64_t)(base + ty + r * height) * n + column;
                const uint64_t second = first + (uint64_t)height * n;
                uint32_t first_words[2], second_words[2];
                ps_draw_pair(dropout, step, first / 8, second / 8, first_words, second_words);
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    v[r][j] = ps_dropped(dropout, ps_pair_draw(first_words, j), v[r][j]);
                    v[r + 1][j] = ps_dropped(dropout, ps_pair_draw(second_words, j), v[r + 1][j]);
                }
            }
        } else if constexpr (DROP && VEC == 8) {
#pragma unroll
            for (int r = 0; r < flight; r++) {
                const uint64_t element = (uint64_t)(base + ty + r * height) * n + column;
                const struct ps_block draws = ps_draws(dropout, step, (uint32_t)(element / 8));
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    v[r][j] = ps_dropped(dropout, ps_draw16(&draws, j), v[r][j]);
                }
            }
        } else if constexpr (DROP) {
#pragma unroll
            for (int r = 0; r < flight; r++) {
                const uint64_t element = (uint64_t)(base + ty + r * height) * n + column;
                v[r][0] = ps_dropped(dropout, ps_draw(dropout, step, element), v[r][0]);
            }
        }
#pragma unroll
        for (int r = 0; r < flight; r++) {
            const int64_t row = base + ty + r * height;
            if (masked && inside && row < end) {
                ps_store<VEC>(masked + row * n + column, v[r]);
            }
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                sum[j] += v[r][j];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        shared[j][threadIdx.x] = sum[j];
    }
    __syncthreads();
    for (int half = height / 2; half > 0; half /= 2) {
        if (ty < half) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                shared[j][threadIdx.x] += shared[j][threadIdx.x + (half << tx_bits)];
            }
        }
        __syncthreads();
    }
    if (ty == 0 && inside) {
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            sum[j] = shared[j][tx];
        }
        ps_store<VEC>(partials + share * n + column, sum);
    }
}

template <typename T, int VEC, bool DROP>
static void launch(const struct ps_cuda_context *c, const struct ps_bias_grad *a, float *partials, T *masked, int64_t rows,
                   int64_t shares, int64_t share_rows, int n, int tiles, int tx_bits)
{
    ps_cuda_launch(c, column_sums<T, VEC, DROP>, (unsigned)(shares * tiles), block, 0, partials, masked, (const T *)a->dy.data,
                   rows, share_rows, n, tiles, tx_bits, a->dropout);
}

template <typename T> static enum ps_status bias_grad(const struct ps_kernels *k, const struct ps_bias_grad *a)
{
    const char *op = "bias_grad";
    const struct ps_cuda_context *c = ps_cuda(k);
    const int64_t n = ps_tensor_count(&a->dbias), count = ps_tensor_count(&a->dy);
    if (n < 1 || n > INT32_MAX / 2 || count % n != 0) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): %lld elements are not rows of a bias of %lld", op, (long long)count,
                       (long long)n);
    }
    PS_TRY(ps_cuda_expect(op, "dy", &a->dy, ps_type_of<T>, count));
    PS_TRY(ps_cuda_expect(op, "dbias", &a->dbias, PS_F32, n));
    if (a->masked.data) {
        PS_TRY(ps_cuda_expect(op, "masked", &a->masked, ps_type_of<T>, count));
    }
    const int64_t rows = count / n;
    if (rows == 0) {
        return PS_OK;
    }
    const bool drop = a->dropout.threshold != 0;
    if (drop && !a->dropout.state) {
        return ps_fail(PS_UNSUPPORTED, "%s (cuda): dropout needs the step's state", op);
    }
    /* Without dropout a masked that is dy holds its values already. */
    T *masked = !drop && a->masked.data == a->dy.data ? NULL : (T *)a->masked.data;
    constexpr int vec = ps_vector<T>;
    const bool vector = n % (drop ? 8 : vec) == 0 && ps_cuda_aligned(&a->dy) && (!masked || ps_cuda_aligned(&a->masked));
    const int64_t columns = vector ? n / vec : n;
    int tx_bits = 0;
    while (tx_bits < 5 && ((int64_t)1 << tx_bits) < columns) {
        tx_bits++;
    }
    const int64_t tiles = (columns + (1 << tx_bits) - 1) >> tx_bits, height = block >> tx_bits,
                  pass = height * (vector ? rows_in_flight<vec> : rows_in_flight<1>);
    int64_t shares = 4LL * c->multiprocessors / tiles, most = (rows + pass - 1) / pass;
    shares = shares < 1 ? 1 : shares > most ? most : shares;
    const int64_t share_rows = ((rows + shares - 1) / shares + pass - 1) / pass * pass;
    shares = (rows + share_rows - 1) / share_rows;
    float *partials = (float *)c->workspace;
    /* Without a mask, as a part of gemm_gradient, it is read before sums that wait are added. */
    PS_TRY(a->masked.data ? ps_cuda_partials(c, op, (size_t)(shares * n), &partials)
                          : ps_cuda_workspace(c, op, (size_t)(shares * n) * sizeof(float)));
    if (vector && drop) {
        launch<T, vec, true>(c, a, partials, masked, rows, shares, share_rows, (int)n, (int)tiles, tx_bits);
    } else if (vector) {
        launch<T, vec, false>(c, a, partials, masked, rows, shares, share_rows, (int)n, (int)tiles, tx_bits);
    } else if (drop) {
        launch<T, 1, true>(c, a, partials, masked, rows, shares, share_rows, (int)n, (int)tiles, tx_bits);
    } else {
        launch<T, 1, false>(c, a, partials, masked, rows, shares, share_rows, (int)n, (int)tiles, tx_bits);
    }
    PS_TRY(ps_cuda_check(cudaGetLastError(), op));
    float *dbias = (float *)a->dbias.data;
    const struct ps_cuda_columns job = {dbias, dbias, n, partials, shares, n};
    return ps_cuda_add_columns(c, op, &job, 1);
}

extern "C" enum ps_status ps_cuda_bias_grad(const struct ps_kernels *k, const struct ps_bias_grad *a)
{
    return PS_BY_REAL(k, bias_grad, k, a);
}
