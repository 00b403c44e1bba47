/* What attention/long16.cu's kernels are told, and how a block's threads bring rows to shared memory and back. */
#ifndef PS_KERNELS_CUDA_LONG16_ROWS_CUH
#define PS_KERNELS_CUDA_LONG16_ROWS_CUH

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/attention/operands16.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"

/* Rows of a step; its tiles of 16. */
enum { STEP = 64, STEP_TILES = STEP / 16 };

struct long16 {
    struct ps_attention_launch x;
    struct ps_divisor units_q, units_v; /* of a row of q and k, of v and mixed */
    struct ps_divisor blocks, heads;    /* blocks of a matrix */
    struct ps_divisor piece;            /* columns of a piece of q and k */
    uint32_t chunks_q, chunks_v;
    uint32_t chunk, chunk_step; /* bytes from chunk to chunk of a tile of the block's rows, of a step's */
    int32_t other;              /* bytes from backward's round of keys to the next round's, 0 where there is no room for both */
    uint32_t turn;              /* tiles of queries between two barriers of backward's one kernel */
    uint32_t keys;              /* that a block has: all, or its part where several share a head's */
    uint32_t turned;            /* threads: those that bring a step's values are not the first, which bring its keys */
    uint32_t shared;            /* bytes */
    bool clear;                 /* columns do not fill the chunks */
};

/* The block's head and first row. */
struct place {
    uint32_t matrix, sequence, head, row;

    /* rows: of a block. */
    __device__ __forceinline__ place(const struct long16 &p, uint32_t rows)
    {
        matrix = ps_divide(blockIdx.x, p.blocks);
        row = (blockIdx.x - matrix * p.blocks.divisor) * rows;
        sequence = ps_divide(matrix, p.heads);
        head = matrix - sequence * p.heads.divisor;
    }
};

/* A thread's unit of rows: the same of every `step`th. */
struct unit {
    uint32_t row, step;
    uint32_t piece, column, chunk, byte;

    __device__ __forceinline__ unit(const struct long16 &p, const struct ps_divisor &units, bool pieces)
    {
        uint32_t thread = threadIdx.x + (pieces ? 0 : p.turned);
        thread -= thread >= blockDim.x ? blockDim.x : 0;
        row = ps_divide(thread, units);
        step = ps_divide(blockDim.x, units);
        column = (thread - row * units.divisor) * (p.x.unit / 2);
        row = row < step ? row : INT32_MAX; /* threads that are left over have none */
        chunk = column / 8;
        byte = column % 8 * 2;
        piece = pieces ? ps_divide(column, p.piece) : 0;
        column -= piece * p.piece.divisor;
    }
};

/* The unit in a tensor's rows. */
struct rows {
    char *data;
    int64_t row;

    __device__ __forceinline__ rows(const struct ps_attention_view &v, const struct place &at, const struct unit &u)
        : data(v.data + (at.sequence * v.sequence + at.head * v.head + u.piece * v.piece + u.column) * 2), row(v.row * 2)
    {
    }
};

/* `count` rows from `first` on, on their way to a tile; beyond N the last again, so that what is computed of them is finite. */
static __device__ __forceinline__ void fetch(char *to, uint32_t chunk, const struct rows &from, const struct unit &u,
                                             uint32_t first, uint32_t count, const struct long16 &p)
{
    to += u.chunk * chunk + u.byte;
    for (uint32_t i = u.row; i < count; i += u.step) {
        const uint32_t row = min(first + i, (uint32_t)p.x.patches - 1);
        ps_attention_fetch(to + i * 16, from.data + row * from.row, true, p.x.unit);
    }
}

/* As many rows of a tile to a tensor, or added to what is there. */
template <typename T>
static __device__ __forceinline__ void put(const struct rows &to, const char *from, uint32_t chunk, bool add, const struct unit &u,
                                           uint32_t first, uint32_t count, const struct long16 &p)
{
    from += u.chunk * chunk + u.byte;
    for (uint32_t i = u.row; i < count && first + i < (uint32_t)p.x.patches; i += u.step) {
        ps_attention_return<T>(to.data + (first + i) * to.row, from + i * 16, add, p.x.unit);
    }
}

/* Heads of up to 16 columns: rows of them are multiplied once by what makes scores exponents to the base of 2, and a sum starts
 * with what is taken off. What the factor's rounding leaves is a second part beside the first, in 8 columns that a product has to
 * spare, or in a second product. */
template <int CHUNKS> static constexpr bool holds = CHUNKS <= 2;

/* 16 rows, scaled, as first operands. */
template <typename T, int CHUNKS>
static __device__ __forceinline__ void load_scaled(uint32_t (&to)[CHUNKS][4], uint32_t first, uint32_t chunk, float factor)
{
    static_assert(holds<CHUNKS>, "two parts of 8 columns, or of 16");
    const uint32_t lane = threadIdx.x % 32;
    uint32_t x[2 * CHUNKS];
    if constexpr (CHUNKS == 1) {
        ps_ldmatrix2_at(x, first + lane % 16 * 16);
    } else {
        ps_ldmatrix4_at(x, first + lane % 16 * 16 + lane / 16 * chunk);
    }
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
        const float low = ps_low<T>(x[i]) * factor, high = ps_high<T>(x[i]) * factor;
        const uint32_t part = to[0][i] = ps_pack<T>(low, high);
        to[CHUNKS - 1][i + 4 - 2 * CHUNKS] = ps_pack<T>(low - ps_low<T>(part), high - ps_high<T>(part));
    }
}

typedef void kernel_type(struct long16);

/* cluster: so many blocks are one. */
static enum ps_status launch_kernel(const struct ps_cuda_context *c, const char *op, kernel_type *kernel, int warps,
                                    struct long16 *p, int shared, int cluster = 1)
{
    p->shared = (uint32_t)shared;
    const unsigned blocks = (unsigned)(p->x.matrices * p->blocks.divisor);
    PS_TRY(ps_cuda_allow_shared((const void *)kernel, shared, op));
    if (cluster > 1) {
        ps_cuda_launch_clusters(c, kernel, (unsigned)cluster, blocks, (unsigned)warps * 32, (size_t)shared, *p);
    } else {
        ps_cuda_launch(c, kernel, blocks, (unsigned)warps * 32, (size_t)shared, *p);
    }
    PS_CUDA_LAUNCHED(op);
}

/* attention/long16_wgmma.cu: forward by wgmma, of heads of up to 16 columns in blocks of 128 queries. */
template <typename T, int CHUNKS>
enum ps_status ps_long16_forward_wgmma(const struct ps_cuda_context *c, const char *op, struct long16 *p);

/* attention/long16_wide.cuh: both ways by wgmma, of heads of 33 to 128 columns. */
template <typename T>
enum ps_status ps_long16_wide(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x, bool backward);

/* attention/long16_whole.cuh: backward by wgmma of 65 to 128 patches, in one kernel. */
template <typename T>
enum ps_status ps_long16_whole(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch &x);

#endif
