/* Small single products of bf16 and fp16 (the head's, forward and backward): a block computes a tile of outputs; it copies its
 * panels of a and b into shared memory, up to 1,024 (448 where it runs beside another kernel) of the summed dimension at once, all
 * loads in flight together; its 8 warps own 32 x 32 outputs each and share the summed dimension (mma m16n8k16), and their sums are
 * added in order. No handle, no workspace, one launch. Where the encoder's blocks leave room beside them (the head's weight's
 * gradient) a block has 2 warps and 224 of the summed dimension at once: so little that it shares a multiprocessor with one of
 * encoder/resident/d16_halves.cu's, whose registers leave room in two of the four parts.
 *
 * A block of 32 x 32 outputs reads 64 k elements for 2048 k FLOPs, so the product moves m n k / 8 bytes, from L2 (half of that with
 * tiles of 64 x 64): meant for products of at most 2^27 multiplications, where cuBLASLt's few microseconds are latency, and its
 * initialisation, a tenth of a second, is dear. */
#include "kernels/cuda/gemm/product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/mma.cuh"

enum { WARPS = 8, SMALL_WARPS = 2, WARP_TILE = 32, CHUNK = 1024, CHUNK_BESIDE = 448, SMALL_CHUNK = 224, PAD = 8 };

/* A matrix whose rows lie `stride` elements apart and are contiguous. */
template <typename T> struct panel {
    const T *data;
    int64_t stride;
    int aligned; /* 16-byte copies may be used */
};

template <typename T> struct panels {
    struct panel<T> a, b;
    void *c;
    int64_t c_row, c_column;
    int m, n, k, chunk;
    int c_is_float;
    float alpha, beta;
};

/* 8 elements, of which `here` exist and the rest is zero. */
template <typename T> static __device__ __forceinline__ void stage_piece(T *to, const T *from, int here, int aligned)
{
    if (here >= 8 && aligned) {
        ps_copy_async(to, from);
    } else if (here <= 0) {
        *(uint4 *)to = make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            to[j] = j < here ? from[j] : T(0.0f);
        }
    }
}

/* rows x columns (a multiple of 8) from `from`, of which rows_here x columns_here exist. NARROW: that many columns, 0: many. */
template <int WARPS, int NARROW, typename T>
static __device__ __forceinline__ void stage(T *to, int ld, const struct panel<T> &p, const T *from, int rows, int columns,
                                             int rows_here, int columns_here)
{
    if constexpr (NARROW > 0) {
        constexpr int PIECES = NARROW / 8;
        const int column = (int)threadIdx.x % PIECES * 8;
        for (int row = (int)threadIdx.x / PIECES; row < rows; row += WARPS * 32 / PIECES) {
            stage_piece(to + row * ld + column, from + row * p.stride + column, row < rows_here ? columns_here - column : 0,
                        p.aligned);
        }
    } else {
        for (int row = (int)threadIdx.x / 32; row < rows; row += WARPS) {
            for (int column = (int)threadIdx.x % 32 * 8; column < columns; column += 32 * 8) {
                stage_piece(to + row * ld + column, from + row * p.stride + column, row < rows_here ? columns_here - column : 0,
                            p.aligned);
            }
        }
    }
}

/* Elements of a panel in shared memory; T: the summed dimension is its rows. */
static __host__ __device__ constexpr int panel_elements(bool t, int tile, int chunk)
{
    return t ? chunk * (tile + PAD) : tile * (chunk + PAD);
}

/* EDGE x EDGE of WARPS warps side by side, the others share the summed dimension with them. A_T: a's rows (m) are contiguous in
 * memory, not its columns; B_T: b's rows (k) are. */
template <typename T, int EDGE, bool A_T, bool B_T, int WARPS>
static __global__ void __launch_bounds__(WARPS * 32, WARPS == SMALL_WARPS ? 9 : 0)
    panel_kernel(const __grid_constant__ struct panels<T> x)
{
    constexpr int THREADS = WARPS * 32, TILE = EDGE * WARP_TILE, SHARES = WARPS / (EDGE * EDGE);
    extern __shared__ uint4 shared_memory[];
    T *const as = (T *)shared_memory, *const bs = as + panel_elements(A_T, TILE, x.chunk);
    const int ld_k = x.chunk + PAD, ld_tile = TILE + PAD, lda = A_T ? ld_tile : ld_k, ldb = B_T ? ld_k : ld_tile;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int share = warp / (EDGE * EDGE), mw = warp / EDGE % EDGE * WARP_TILE, nw = warp % EDGE * WARP_TILE;
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
        if constexpr (A_T) {
            stage<WARPS, TILE>(as, lda, x.a, x.a.data + k0 * x.a.stride + m0, k_padded, TILE, k_here, m_here);
        } else {
            stage<WARPS, 0>(as, lda, x.a, x.a.data + m0 * x.a.stride + k0, TILE, k_padded, m_here, k_here);
        }
        if constexpr (B_T) {
            stage<WARPS, 0>(bs, ldb, x.b, x.b.data + n0 * x.b.stride + k0, TILE, k_padded, n_here, k_here);
        } else {
            stage<WARPS, TILE>(bs, ldb, x.b, x.b.data + k0 * x.b.stride + n0, k_padded, TILE, k_here, n_here);
        }
        ps_copy_wait();
        __syncthreads();
        for (int k = share * 16; k < k_padded; k += SHARES * 16) {
            uint32_t a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (A_T) {
                    ps_ldmatrix4_transposed(a[i], as + (k + other) * lda + mw + i * 16 + across);
                } else {
                    ps_ldmatrix4(a[i], as + (mw + i * 16 + near) * lda + k + far);
                }
                if (B_T) {
                    ps_ldmatrix4(b[i], bs + (nw + i * 16 + other) * ldb + k + across);
                } else {
                    ps_ldmatrix4_transposed(b[i], bs + (k + near) * ldb + nw + i * 16 + far);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                ps_mma16<T>(c[i / 4][i % 4], a[i / 4], b[i % 4 / 2][i % 2 * 2], b[i % 4 / 2][i % 2 * 2 + 1], c[i / 4][i % 4]);
            }
        }
    }
    __syncthreads();
    float *const sums = (float *)shared_memory; /* [SHARES][TILE][TILE] */
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = mw + i / 4 * 16 + h * 8 + lane / 4, column = nw + i % 4 * 8 + lane % 4 * 2;
            *(float2 *)(sums + (share * TILE + row) * TILE + column) =
                make_float2(c[i / 4][i % 4][2 * h], c[i / 4][i % 4][2 * h + 1]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; i++) {
        const int at = (int)threadIdx.x + i * THREADS, row = at / TILE, column = at % TILE;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < SHARES; w++) {
            sum += sums[w * TILE * TILE + at];
        }
        if (row < m_here && column < n_here) {
            const int64_t to = (m0 + row) * x.c_row + (n0 + column) * x.c_column;
            sum *= x.alpha;
            if (x.c_is_float) {
                float *const p = (float *)x.c + to;
                *p = x.beta == 0.0f ? sum : fmaf(x.beta, *p, sum);
            } else {
                T *const p = (T *)x.c + to;
                ps_put(p, x.beta == 0.0f ? sum : fmaf(x.beta, ps_float(*p), sum));
            }
        }
    }
}

template <typename T> using kernel_function = void(const struct panels<T>);

template <typename T, int EDGE> static kernel_function<T> *kernel_of(bool a_t, bool b_t)
{
    return a_t   ? b_t ? panel_kernel<T, EDGE, true, true, WARPS> : panel_kernel<T, EDGE, true, false, WARPS>
             : b_t ? panel_kernel<T, EDGE, false, true, WARPS>
                 : panel_kernel<T, EDGE, false, false, WARPS>;
}

/* The operand as a panel, its rows or its columns, whichever are contiguous. A single one has no stride that matters. */
template <typename T>
static bool panel_of(const struct ps_operand &o, int64_t rows, int64_t columns, struct panel<T> *p, bool *transposed)
{
    *transposed = o.row == 1 && (o.column != 1 || rows > 1);
    const int64_t lines = *transposed ? columns : rows;
    p->data = (const T *)o.data;
    p->stride = lines == 1 ? 0 : *transposed ? o.column : o.row;
    p->aligned = (uintptr_t)o.data % 16 == 0 && p->stride % 8 == 0;
    return *transposed || o.column == 1 || columns == 1;
}

/* Warps along a tile's edge: a short sum leaves nothing to share. */
static int edge_of(const struct ps_product *p)
{
    return p->k <= 256 ? 2 : 1;
}

bool ps_cuda_panel_wanted(const struct ps_kernels *k, const struct ps_product *p)
{
    (void)k;
    struct panel<ps_bf16> panel; /* of fp16 it lies alike */
    bool transposed;
    const int64_t tile = edge_of(p) * WARP_TILE;
    return p->type != PS_F32 && p->batch[0] * p->batch[1] == 1 && p->k <= 2048 && p->m <= 1 << 20 && p->n <= 1 << 20 &&
           ps_cuda_blocks(p->m, tile) * (int64_t)ps_cuda_blocks(p->n, tile) <= 528 && p->m * p->n * p->k <= 1 << 27 &&
           panel_of(p->a, p->m, p->k, &panel, &transposed) && panel_of(p->b, p->k, p->n, &panel, &transposed);
}

template <typename T> static enum ps_status product(const struct ps_cuda_context *context, const struct ps_product *p)
{
    panels<T> x = {};
    bool a_t, b_t;
    panel_of(p->a, p->m, p->k, &x.a, &a_t);
    panel_of(p->b, p->k, p->n, &x.b, &b_t);
    x.c = p->c.data;
    x.c_row = p->c.row;
    x.c_column = p->c.column;
    x.m = (int)p->m;
    x.n = (int)p->n;
    x.k = (int)p->k;
    x.c_is_float = p->c_type == PS_F32;
    x.alpha = p->alpha;
    x.beta = p->beta;
    /* Settled beside: it comes second there, when the encoder's blocks have their places, and takes what those leave. */
    const bool small = context->beside && p->settled && a_t && !b_t;
    const int edge = small ? 1 : edge_of(p), tile = edge * WARP_TILE, warps = small ? SMALL_WARPS : WARPS;
    kernel_function<T> *const kernel = small       ? panel_kernel<T, 1, true, false, SMALL_WARPS>
                                       : edge == 2 ? kernel_of<T, 2>(a_t, b_t)
                                                   : kernel_of<T, 1>(a_t, b_t);
    if (small) { /* as backward of encoder/resident/d16_halves.cu does */
        PS_TRY(ps_cuda_prefer_shared((const void *)kernel, "panel gemm"));
    }
    size_t shared;
    /* CHUNK is twice what fits some devices. Beside another kernel, which leaves few multiprocessors free, two blocks share one. */
    const int most = small ? SMALL_CHUNK : context->beside ? CHUNK_BESIDE : CHUNK;
    for (x.chunk = p->k >= most ? most : ((int)p->k + 15) / 16 * 16;; x.chunk /= 2) {
        const size_t staged = sizeof(T) * (size_t)(panel_elements(a_t, tile, x.chunk) + panel_elements(!b_t, tile, x.chunk));
        const size_t sums = sizeof(float) * (size_t)(warps * WARP_TILE * WARP_TILE);
        shared = staged > sums ? staged : sums;
        if (shared <= (size_t)context->shared_bytes) {
            break;
        }
        x.chunk = (x.chunk + 31) / 32 * 32;
    }
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, shared, "panel gemm"));
    kernel<<<dim3(ps_cuda_blocks(p->m, tile), ps_cuda_blocks(p->n, tile)), warps * 32, shared, context->stream>>>(x);
    PS_CUDA_LAUNCHED("panel gemm");
}

enum ps_status ps_cuda_panel_product(const struct ps_kernels *k, const struct ps_product *p)
{
    return p->type == PS_BF16 ? product<ps_bf16>(ps_cuda(k), p) : product<ps_fp16>(ps_cuda(k), p);
}
