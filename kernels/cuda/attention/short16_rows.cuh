/* What attention/short16.cu's kernels are told, which rows a block and its warps have, and the two ways of these between global and
 * shared memory: by the block's threads, in units of 16 bytes or fewer, any layout; and from sm_90 on by the copy engine, in boxes
 * of 64 or 128 bytes of a row by all rows. By threads a unit asks L2 for a sector of 32 bytes wherever copies leave L1 out, and
 * half of a warp's instructions find addresses; a box is asked for by one instruction of one thread. */
#ifndef PS_KERNELS_CUDA_SHORT16_ROWS_CUH
#define PS_KERNELS_CUDA_SHORT16_ROWS_CUH

#include "kernels/cuda/attention/operands16.cuh"
#include "kernels/cuda/context.cuh"
#include "kernels/cuda/tile/bulk.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/wgmma.cuh"

struct short16 {
    float *logsum, *delta;
    struct ps_divisor groups, group;           /* blocks side by side; heads of one */
    uint32_t patches, heads, sequences, taken; /* all; a block's */
    uint32_t chunks_q, chunks_v;
    uint32_t tiles; /* of a warp */
    bool accumulate;
    float scale;
};

/* The block's first sequence and head, and how many sequences and matrices it has. */
struct place {
    uint32_t sequence, head, sequences, matrices;

    __device__ __forceinline__ place(const struct short16 &p)
    {
        const uint32_t before = ps_divide(blockIdx.x, p.groups);
        sequence = before * p.taken;
        head = (blockIdx.x - before * p.groups.divisor) * p.group.divisor;
        sequences = min(p.taken, p.sequences - sequence);
        matrices = sequences * p.group.divisor;
    }
};

/* A warp's tiles of 16 rows, the block's in turn; those of one matrix at a time: rows from `row` to `stop` of the block's matrix
 * `own`, its head `head` of sequence `sequence`, which is `matrix` of all. */
template <int TILES> struct tiles {
    uint32_t own, sequence, head, row, stop, next, end;
    int64_t matrix;

    __device__ __forceinline__ tiles(const struct short16 &p, const struct place &at)
        : next(threadIdx.x / 32 * p.tiles), end(min(next + p.tiles, at.matrices * TILES))
    {
    }
    __device__ __forceinline__ bool more(const struct short16 &p, const struct place &at)
    {
        while (next < end) {
            own = next / TILES;
            row = next % TILES * 16;
            stop = min(TILES * 16u, row + (end - next) * 16);
            next = own * TILES + TILES;
            sequence = ps_divide(own, p.group);
            head = own - sequence * p.group.divisor;
            if (at.head + head < p.heads) {
                matrix = (int64_t)(at.sequence + sequence) * p.heads + at.head + head;
                return true;
            }
        }
        return false;
    }
};

/* ---- rows by the threads: tiles of chunks ---- */

/* A tensor, in bytes: strides, and from the thread's row to its next. */
struct tensor {
    char *data;
    int64_t sequence, head, piece, next_sequence, next_row;
    int32_t near_sequence, near_head, row; /* the same within a block */
};

struct copied : short16 {
    struct tensor mixed, q, k, v, dq, dk, dv, d_mixed;
    /* A thread moves the same unit of `e` columns of every `rows`th row of every `sequences`th of the block's sequences: units of
     * a piece; of the block's heads side by side. */
    struct ps_divisor units, across;
    uint32_t step_sequences, step_rows;
    uint32_t e, pieces;
    uint32_t chunk; /* bytes from chunk to chunk in shared memory */
    int unit;       /* bytes */
    bool near;      /* copies by the first-level cache */
};

/* WIDE: units of 16 bytes. */
template <int ROWS, bool WIDE> struct by_threads {
    typedef copied told;
    static constexpr bool BOXES = false;
    const struct copied &p;
    const struct place &at;
    /* The thread's unit: its first sequence and row of the block's, its head, column of that. */
    uint32_t sequence, row, head, column;

    __device__ __forceinline__ by_threads(const struct copied &told, const struct place &here) : p(told), at(here)
    {
        const uint32_t line = ps_divide(threadIdx.x, p.across), side = threadIdx.x - line * p.across.divisor;
        head = ps_divide(side, p.units);
        column = (side - head * p.units.divisor) * (WIDE ? 8 : (uint32_t)p.unit / 2);
        row = line % ROWS;
        /* Threads that are left over have none. */
        const bool there = line < p.step_sequences * p.step_rows && at.head + head < p.heads;
        sequence = there ? line / ROWS : p.taken;
    }
    __device__ __forceinline__ uint32_t chunks_q() const
    {
        return p.chunks_q;
    }
    __device__ __forceinline__ uint32_t chunks_v() const
    {
        return p.chunks_v;
    }
    __device__ __forceinline__ uint32_t bytes_q() const
    {
        return at.matrices * p.chunks_q * p.chunk;
    }
    __device__ __forceinline__ uint32_t bytes_v() const
    {
        return at.matrices * p.chunks_v * p.chunk;
    }
    /* From a row of the warp's matrix on. */
    __device__ __forceinline__ struct ps_chunked tile(const char *all, uint32_t chunks, const struct tiles<ROWS / 16> &own,
                                                      uint32_t row0) const
    {
        return ps_chunks(all + own.own * chunks * p.chunk + row0 * 16, p.chunk);
    }
    __device__ __forceinline__ char *start(const struct tensor &t) const
    {
        return t.data + (at.sequence * t.sequence + at.head * t.head) +
               (int32_t)(sequence * t.near_sequence + head * t.near_head + row * t.row + column * 2);
    }
    /* The unit's place in tiles `matrix` bytes apart. */
    __device__ __forceinline__ uint32_t in_tile(uint32_t matrix, uint32_t piece) const
    {
        const uint32_t of_head = piece * p.e + column;
        return (sequence * p.group.divisor + head) * matrix + row * 16 + of_head / 8 * p.chunk + of_head % 8 * 2;
    }
    /* Zeros for the columns that fill a head's last chunk, which no unit reaches. */
    __device__ __forceinline__ void begin(char *memory, uint32_t bytes, char *) const
    {
        if (!WIDE && p.e % 8) {
            ps_attention_clear(memory, bytes);
        }
    }
    /* All rows of some tensors, on their way; zeros in place of rows that there are not. */
    template <int COUNT>
    __device__ __forceinline__ void bring(char *const (&to)[COUNT], const struct tensor *const (&t)[COUNT], uint32_t chunks,
                                          uint32_t pieces) const
    {
        const uint32_t matrix = chunks * p.chunk;
        const char *first[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            first[i] = start(*t[i]);
        }
#pragma unroll 1
        for (uint32_t piece = 0; piece < pieces; piece++) {
            uint32_t target = in_tile(matrix, piece);
            const char *side[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                side[i] = first[i];
                first[i] += t[i]->piece;
            }
#pragma unroll 1
            for (uint32_t s = sequence; s < at.sequences; s += p.step_sequences) {
                const char *from[COUNT];
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    from[i] = side[i];
                    side[i] += t[i]->next_sequence;
                }
                uint32_t into = target;
                target += p.step_sequences * p.group.divisor * matrix;
#pragma unroll 1
                for (uint32_t r = row; r < ROWS; r += p.step_rows, into += p.step_rows * 16) {
#pragma unroll
                    for (int i = 0; i < COUNT; i++) {
                        ps_attention_fetch(to[i] + into, from[i], r < p.patches, WIDE ? 16 : p.unit, p.near);
                        from[i] += t[i]->next_row;
                    }
                }
            }
        }
    }
    __device__ __forceinline__ void bring_q(char *const (&to)[2], const struct tensor &a, const struct tensor &b) const
    {
        bring<2>(to, {&a, &b}, p.chunks_q, p.pieces);
    }
    __device__ __forceinline__ void bring_v(char *to, const struct tensor &t) const
    {
        bring<1>({to}, {&t}, p.chunks_v, 1);
    }
    /* Until all that has been asked for is there. */
    __device__ __forceinline__ void wait() const
    {
        ps_copy_wait();
        __syncthreads();
    }
    /* The results are there for those who take them back; */
    __device__ __forceinline__ void end() const
    {
        __syncthreads();
    }
    /* and are taken. */
    __device__ __forceinline__ void finish() const
    {
    }
    template <typename T>
    __device__ __forceinline__ void put(const struct tensor &t, const char *from, uint32_t chunks, uint32_t pieces) const
    {
        char *first = start(t);
#pragma unroll 1
        for (uint32_t piece = 0; piece < pieces; piece++, first += t.piece) {
            const char *source = from + in_tile(chunks * p.chunk, piece);
            char *side = first;
#pragma unroll 1
            for (uint32_t s = sequence; s < at.sequences; s += p.step_sequences) {
                const char *out = source;
                char *to = side;
#pragma unroll 1
                for (uint32_t r = row; r < p.patches; r += p.step_rows, out += p.step_rows * 16, to += t.next_row) {
                    ps_attention_return<T>(to, out, false, WIDE ? 16 : p.unit);
                }
                source += p.step_sequences * p.group.divisor * chunks * p.chunk;
                side += t.next_sequence;
            }
        }
    }
    /* All tiles of a tensor, which the block's threads have written before its last barrier, on their way back. */
    template <typename T> __device__ __forceinline__ void put_q(const struct tensor &t, const char *from) const
    {
        put<T>(t, from, p.chunks_q, p.pieces);
    }
    /* From tiles of so many chunks. */
    template <typename T> __device__ __forceinline__ void put_v(const struct tensor &t, const char *from, uint32_t chunks) const
    {
        put<T>(t, from, chunks, 1);
    }
};

/* ---- rows by the copy engine: boxes of W bytes by all rows ---- */

struct boxed : short16 {
    CUtensorMap mixed, q, k, v, dq, dk, dv, d_mixed; /* [columns, heads, N, S, pieces]; of one head if all are side by side */
    uint32_t parts_q, parts_v, part;                 /* parts of a tensor, and bytes of the block's boxes of one */
    uint32_t e;
    uint32_t shift;        /* chunks of a head in a box: 2^shift */
    uint32_t along, apart; /* from head to head of the map's first coordinate, or of its second */
};

/* A tensor lies part by part: of each the block's sequences, rows of W bytes. CHUNKS: a head's, which are one part of v's and of
 * each piece of q's and k's, or 0; ONE: of these there is one piece. */
template <int ROWS, int W, int CHUNKS, bool ONE> struct by_boxes {
    typedef boxed told;
    static constexpr bool BOXES = true, KNOWN = CHUNKS > 0;
    static_assert(CHUNKS * 16 <= W, "a head fits a row of the box");
    static constexpr int CHUNKS_Q = ONE ? CHUNKS : 0;
    static constexpr uint32_t SHIFT = CHUNKS > 4 ? 3 : CHUNKS > 2 ? 2 : CHUNKS > 1 ? 1 : 0; /* of what a head takes of it */
    const struct boxed &p;
    const struct place &at;
    uint32_t barrier;

    __device__ __forceinline__ by_boxes(const struct boxed &told, const struct place &here) : p(told), at(here)
    {
    }
    __device__ __forceinline__ auto chunks_q() const
    {
        return count<CHUNKS_Q>(p.chunks_q);
    }
    __device__ __forceinline__ auto chunks_v() const
    {
        return count<CHUNKS>(p.chunks_v);
    }
    template <int COUNT> __device__ __forceinline__ static auto count(uint32_t told)
    {
        if constexpr (COUNT > 0) {
            return ps_chunk_count<COUNT>();
        } else {
            return told;
        }
    }
    __device__ __forceinline__ uint32_t parts_q() const
    {
        return KNOWN && ONE ? 1 : p.parts_q;
    }
    __device__ __forceinline__ uint32_t parts_v() const
    {
        return KNOWN ? 1 : p.parts_v;
    }
    __device__ __forceinline__ uint32_t bytes_q() const
    {
        return parts_q() * p.part;
    }
    __device__ __forceinline__ uint32_t bytes_v() const
    {
        return parts_v() * p.part;
    }
    __device__ __forceinline__ ps_boxed<W> tile(const char *all, uint32_t, const struct tiles<ROWS / 16> &own, uint32_t row0) const
    {
        const uint32_t shift = KNOWN ? SHIFT : p.shift;
        return {ps_shared_address(all) + (own.sequence * ROWS + row0) * W, own.head << shift, shift, p.part};
    }
    __device__ __forceinline__ void begin(char *, uint32_t bytes, char *end)
    {
        barrier = ps_shared_address(end);
        if (threadIdx.x == 0) {
            ps_mbarrier_init(barrier, 1);
            ps_mbarrier_publish();
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            ps_mbarrier_expect(barrier, bytes);
        }
    }
    /* One thread: `act` with each part of a tensor, its place and coordinates but for the row. */
    template <class F> __device__ __forceinline__ void each(const char *all, uint32_t parts, F act) const
    {
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (uint32_t i = 0, column = 0, piece = 0; i < parts; i++) {
                act(ps_shared_address(all) + i * p.part, (int)(at.head * p.along + column),
                    CHUNKS == 1 ? 0 : (int)(at.head * p.apart), (int)at.sequence, (int)piece);
                column += W / 2;
                if (KNOWN || column >= p.e) {
                    column = 0;
                    piece++;
                }
            }
        }
    }
    __device__ __forceinline__ void bring(char *to, const CUtensorMap &map, uint32_t parts) const
    {
        each(to, parts, [&](uint32_t box, int column, int head, int sequence, int piece) {
            ps_tensor_copy5(box, &map, column, head, 0, sequence, piece, barrier);
        });
    }
    __device__ __forceinline__ void bring_q(char *const (&to)[2], const CUtensorMap &a, const CUtensorMap &b) const
    {
        bring(to[0], a, parts_q());
        bring(to[1], b, parts_q());
    }
    __device__ __forceinline__ void bring_v(char *to, const CUtensorMap &map) const
    {
        bring(to, map, parts_v());
    }
    __device__ __forceinline__ void wait() const
    {
        ps_mbarrier_wait(barrier, 0);
    }
    __device__ __forceinline__ void end() const
    {
        ps_publish();
        __syncthreads();
    }
    __device__ __forceinline__ void finish() const
    {
        if (threadIdx.x == 0) {
            ps_bulk_commit();
            ps_bulk_wait_read();
        }
    }
    template <bool ADD> __device__ __forceinline__ void put(const CUtensorMap &map, const char *from, uint32_t parts) const
    {
        each(from, parts, [&](uint32_t box, int column, int head, int sequence, int piece) {
            const auto store = ADD ? ps_tensor_add5 : ps_tensor_store5;
            store(&map, box, column, head, 0, sequence, piece);
        });
    }
    template <typename T> __device__ __forceinline__ void put_q(const CUtensorMap &map, const char *from) const
    {
        if (p.accumulate) {
            put<true>(map, from, parts_q());
        } else {
            put<false>(map, from, parts_q());
        }
    }
    template <typename T> __device__ __forceinline__ void put_v(const CUtensorMap &map, const char *from, uint32_t) const
    {
        put<false>(map, from, parts_v());
    }
};

#endif
