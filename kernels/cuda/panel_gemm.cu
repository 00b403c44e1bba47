/* Small single products of bf16 (the head's, forward and backward): a block computes 32 x 32 outputs; it copies its panels of a and
 * b into shared memory, up to 512 of the summed dimension at once, all loads in flight together; its 8 warps take turns along that
 * dimension (mma m16n8k16) and their sums are added in order. No handle, no workspace, one launch.
 *
 * A block reads 64 k elements for 2048 k FLOPs, so the product moves m n k / 8 bytes, from L2: meant for products of at most 2^27
 * multiplications, where cuBLASLt's few microseconds are latency, and its initialisation, a tenth of a second, is dear. */
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/warp_mma.cuh"

typedef __nv_bfloat16 bf16;

enum { TILE = 32, WARPS = 8, THREADS = WARPS * 32, CHUNK = 512, PAD = 8 };

/* A matrix whose rows lie `stride` elements apart and are contiguous. */
struct panel {
    const bf16 *data;
    int64_t stride;
    int aligned; /* 16-byte copies may be used */
};

struct panels {
    struct panel a, b;
    void *c;
    int64_t c_row, c_column;
    int m, n, k, chunk;
    int c_is_float;
    float alpha, beta;
};

/* rows x columns (a multiple of 8) from `from`, of which rows_here x columns_here exist and the rest is zero. */
static __device__ __forceinline__ void stage(bf16 *to, int ld, const struct panel &p, const bf16 *from, int rows, int columns,
                                             int rows_here, int columns_here)
{
    const int pieces = columns / 8;
    for (int i = (int)threadIdx.x; i < rows * pieces; i += THREADS) {
        const int row = i / pieces, column = (i - row * pieces) * 8;
        const bf16 *source = from + row * p.stride + column;
        bf16 *target = to + row * ld + column;
        if (p.aligned && row < rows_here && column + 8 <= columns_here) {
            ps_copy_async(target, source);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                target[j] = row < rows_here && column + j < columns_here ? source[j] : __float2bfloat16(0.0f);
            }
        }
    }
}

/* A_T: a's rows (m) are contiguous in memory, not its columns; B_T: b's rows (k) are. */
template <bool A_T, bool B_T>
static __global__ void __launch_bounds__(THREADS) panel_kernel(const __grid_constant__ struct panels x)
{
    extern __shared__ uint4 shared_memory[];
    const int ld_k = x.chunk + PAD, ld_tile = TILE + PAD, half = TILE * ld_k > x.chunk * ld_tile ? TILE * ld_k : x.chunk * ld_tile;
    bf16 *const as = (bf16 *)shared_memory, *const bs = as + half;
    const int lda = A_T ? ld_tile : ld_k, ldb = B_T ? ld_k : ld_tile;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int near = lane % 16, far = lane / 16 * 8, other = (lane & 7) + (lane >> 1 & 8), across = lane & 8;
    const int m0 = (int)blockIdx.x * TILE, n0 = (int)blockIdx.y * TILE;
    const int m_here = min(TILE, x.m - m0), n_here = min(TILE, x.n - n0);
    float c[2][4][4];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        c[i / 16][i / 4 % 4][i % 4] = 0;
    }
    for (int k0 = 0; k0 < x.k; k0 += x.chunk) {
        const int k_here = min(x.chunk, x.k - k0), k_padded = (k_here + 15) / 16 * 16;
        if (k0 > 0) {
            __syncthreads();
        }
        if (A_T) {
            stage(as, lda, x.a, x.a.data + k0 * x.a.stride + m0, k_padded, TILE, k_here, m_here);
        } else {
            stage(as, lda, x.a, x.a.data + m0 * x.a.stride + k0, TILE, k_padded, m_here, k_here);
        }
        if (B_T) {
            stage(bs, ldb, x.b, x.b.data + n0 * x.b.stride + k0, TILE, k_padded, n_here, k_here);
        } else {
            stage(bs, ldb, x.b, x.b.data + k0 * x.b.stride + n0, k_padded, TILE, k_here, n_here);
        }
        ps_copy_wait();
        __syncthreads();
        for (int k = warp * 16; k < k_padded; k += WARPS * 16) {
            uint32_t a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (A_T) {
                    ps_ldmatrix4_transposed(a[i], as + (k + other) * lda + i * 16 + across);
                } else {
                    ps_ldmatrix4(a[i], as + (i * 16 + near) * lda + k + far);
                }
                if (B_T) {
                    ps_ldmatrix4(b[i], bs + (i * 16 + other) * ldb + k + across);
                } else {
                    ps_ldmatrix4_transposed(b[i], bs + (k + near) * ldb + i * 16 + far);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                ps_mma16(c[i / 4][i % 4], a[i / 4], b[i % 4 / 2][i % 2 * 2], b[i % 4 / 2][i % 2 * 2 + 1], c[i / 4][i % 4]);
            }
        }
    }
    __syncthreads();
    float *const sums = (float *)shared_memory; /* [WARPS][TILE][TILE] */
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            *(float2 *)(sums + (warp * TILE + i / 4 * 16 + h * 8 + lane / 4) * TILE + i % 4 * 8 + lane % 4 * 2) =
                make_float2(c[i / 4][i % 4][2 * h], c[i / 4][i % 4][2 * h + 1]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; i++) {
        const int at = (int)threadIdx.x + i * THREADS, row = at / TILE, column = at % TILE;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            sum += sums[w * TILE * TILE + at];
        }
        if (row < m_here && column < n_here) {
            const int64_t to = (m0 + row) * x.c_row + (n0 + column) * x.c_column;
            sum *= x.alpha;
            if (x.c_is_float) {
                float *const p = (float *)x.c + to;
                *p = x.beta == 0.0f ? sum : fmaf(x.beta, *p, sum);
            } else {
                bf16 *const p = (bf16 *)x.c + to;
                *p = __float2bfloat16(x.beta == 0.0f ? sum : fmaf(x.beta, __bfloat162float(*p), sum));
            }
        }
    }
}

/* The operand as a panel, its rows or its columns, whichever are contiguous. A single one has no stride that matters. */
static bool panel_of(const struct ps_operand &o, int64_t rows, int64_t columns, struct panel *p, bool *transposed)
{
    *transposed = o.row == 1 && (o.column != 1 || rows > 1);
    const int64_t lines = *transposed ? columns : rows;
    p->data = (const bf16 *)o.data;
    p->stride = lines == 1 ? 0 : *transposed ? o.column : o.row;
    p->aligned = (uintptr_t)o.data % 16 == 0 && p->stride % 8 == 0;
    return *transposed || o.column == 1 || columns == 1;
}

int ps_cuda_panel_wanted(const struct ps_product *p)
{
    struct panel panel;
    bool transposed;
    return p->type == PS_BF16 && p->batch[0] * p->batch[1] == 1 && p->k <= 2048 && p->m <= 1 << 20 && p->n <= 1 << 20 &&
           ps_cuda_blocks(p->m, TILE) * (int64_t)ps_cuda_blocks(p->n, TILE) <= 640 && p->m * p->n * p->k <= 1 << 27 &&
           panel_of(p->a, p->m, p->k, &panel, &transposed) && panel_of(p->b, p->k, p->n, &panel, &transposed);
}

enum ps_status ps_cuda_panel_product(cudaStream_t stream, const struct ps_product *p)
{
    struct panels x = {};
    bool a_t, b_t;
    panel_of(p->a, p->m, p->k, &x.a, &a_t);
    panel_of(p->b, p->k, p->n, &x.b, &b_t);
    x.c = p->c.data;
    x.c_row = p->c.row;
    x.c_column = p->c.column;
    x.m = (int)p->m;
    x.n = (int)p->n;
    x.k = (int)p->k;
    x.chunk = p->k >= CHUNK ? CHUNK : ((int)p->k + 15) / 16 * 16;
    x.c_is_float = p->c_type == PS_F32;
    x.alpha = p->alpha;
    x.beta = p->beta;
    typedef void kernel_function(const struct panels);
    kernel_function *const kernel = a_t   ? b_t ? panel_kernel<true, true> : panel_kernel<true, false>
                                      : b_t ? panel_kernel<false, true>
                                          : panel_kernel<false, false>;
    const int rows = TILE * (x.chunk + PAD), columns = x.chunk * (TILE + PAD), half = rows > columns ? rows : columns;
    const size_t staged = 2 * (size_t)half * sizeof(bf16), sums = WARPS * TILE * TILE * sizeof(float);
    const size_t shared = staged > sums ? staged : sums;
    PS_TRY(ps_cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                         "panel gemm"));
    kernel<<<dim3(ps_cuda_blocks(p->m, TILE), ps_cuda_blocks(p->n, TILE)), THREADS, shared, stream>>>(x);
    PS_CUDA_LAUNCHED("panel gemm");
}
