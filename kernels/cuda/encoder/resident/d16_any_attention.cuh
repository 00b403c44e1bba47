/* Attention of d_model 16 with 1, 2 or 4 heads over the tiles of a sequence, both told at run time, for what d16_attention.cuh has
 * no instance of. Its matrices, its warp's 16 queries and, backward, keys; but head after head, and the others' rows tile after
 * tile, of whose scores nothing is left but sums: registers do not grow with N. A head's columns are chosen by zeros in the left
 * operand, and products take all 16: exponentials, 8 a lane, tile, and head, bound it and hide what that costs.
 *
 * Backward goes over the tiles twice, with the warp's rows as queries and as keys, and makes the probabilities again the other way
 * round: warps exchange nothing, where 4 N^2 bytes a unit, and two barriers a head, would have to be.
 *
 * Counts, 99 patches and 4 heads: a warp takes 28 tiles of scores, 224 exponentials a lane, forward, and twice that backward. A
 * unit's bytes of shared memory, t tiles and l layers below: 1,024 t (1 + l) forward, backward 3,840 t + 1,024 t l, and where l > 0
 * 512 t^2 more. FLOPs: 2 N^2 d (l + 2) a sequence forward, 2 N^2 d (4 l + 7) backward; what is made is as many times that as there
 * are heads. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_ANY_ATTENTION_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_ANY_ATTENTION_CUH

#include "kernels/cuda/encoder/resident/d16_attention.cuh"

namespace ps_resident
{

/* The lane's place in four matrices, of a tile's two rows of them and two pairs of columns: in the order of a left operand, or,
 * transposed, of a right one that is summed over the tile's rows; and of a right one that is summed over columns. */
static __device__ __forceinline__ uint32_t rows_first(int lane, int row)
{
    return (uint32_t)(lane / 8 % 2 * row + lane / 16 * MATRIX + lane % 8 * 16);
}

static __device__ __forceinline__ uint32_t columns_first(int lane, int row)
{
    return (uint32_t)(lane / 16 * row + lane / 8 % 2 * MATRIX + lane % 8 * 16);
}

/* The head of the lane's columns of pair p. */
template <class T> static __device__ __forceinline__ int head_of(const encoder<T> &x, int p, int q)
{
    return (8 * p + 2 * q) >> (31 - __clz(x.e));
}

/* Ones where the lane's columns of a pair are the head's. */
struct d16_head {
    uint32_t pair[2];

    template <class T>
    __device__ __forceinline__ d16_head(const encoder<T> &x, int head, int q)
        : pair{head_of(x, 0, q) == head ? 0xffffffffu : 0u, head_of(x, 1, q) == head ? 0xffffffffu : 0u}
    {
    }
    /* The left operand there, of the head's columns. */
    __device__ __forceinline__ void load(uint32_t (&a)[4], uint32_t from) const
    {
        ps_ldmatrix4_at(a, from);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] &= pair[i / 2];
        }
    }
};

/* s += a b', b the tile there. */
template <class T> static __device__ __forceinline__ void add_tile(float (&s)[2][4], const uint32_t (&a)[4], uint32_t from)
{
    uint32_t b[4];
    ps_ldmatrix4_at(b, from);
    ps_mma16<T>(s[0], a, b[0], b[1], s[0]);
    ps_mma16<T>(s[1], a, b[2], b[3], s[1]);
}

/* o += a b, b the tile there. */
template <class T> static __device__ __forceinline__ void add_rows_of(float (&o)[2][4], const uint32_t (&a)[4], uint32_t from)
{
    uint32_t b[4];
    ps_ldmatrix4_transposed_at(b, from);
    ps_mma16<T>(o[0], a, b[0], b[1], o[0]);
    ps_mma16<T>(o[1], a, b[2], b[3], o[1]);
}

/* The same of the layers below, tile j's. OF_KEYS: of keys by queries. */
template <bool OF_KEYS, class T>
static __device__ __forceinline__ void add_tile_below(float (&s)[2][4], const struct d16_pieces &pieces,
                                                      const struct d16_head &head, int j)
{
#pragma unroll 2
    for (int i = 0; i < pieces.count; i++) {
        uint32_t a[4];
        head.load(a, pieces.own + (OF_KEYS ? PIECE_KEYS : 0) + i * pieces.bytes);
        add_tile<T>(s, a, pieces.all + (OF_KEYS ? 0 : PIECE_KEYS) + i * pieces.bytes + j * 2 * pieces.row);
    }
}

/* merged as d16_attention.cuh's. keys, values: the lane's places, of columns and rows first, KV_ROW bytes a row of matrices;
 * pieces.all: of columns first. logs: of rows g and g + 8 of head q. last: all ones for the last tile's keys that exist. */
template <class T>
static __device__ __forceinline__ void attention(uint32_t (&merged)[4], float (&logs)[4], const uint32_t (&q)[4], uint32_t keys,
                                                 uint32_t values, const struct d16_pieces &pieces, const uint32_t (&last)[2],
                                                 const encoder<T> &x, const place<T, D, ANY_TILES> &at)
{
    const int tiles = at.tiles();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        merged[i] = 0;
        logs[i] = 0;
    }
#pragma unroll 1
    for (int h = 0; h < x.heads; h++) {
        const struct d16_head head(x, h, at.q);
        uint32_t a[4];
        float o[2][4], sum[4], less[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = q[i] & head.pair[i / 2];
        }
        const auto score = [&](float(&s)[2][4], int j) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                s[i / 4][i % 4] = less[i % 4 / 2];
            }
            add_tile<T>(s, a, keys + j * 2 * KV_ROW);
            add_tile_below<false, T>(s, pieces, head, j);
        };
#pragma unroll 1
        for (bool again = false;; again = true) {
            clear(o);
            sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll 2
            for (int j = 0; j < tiles; j++) {
                uint32_t p[4];
                float s[2][4];
                score(s, j);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    s[i / 4][i % 4] = ps_exp2(s[i / 4][i % 4]);
                }
                pack_operand<T>(p, s[0], s[1]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    p[i] &= j == tiles - 1 ? last[i / 2] : 0xffffffffu;
                }
                add_rows_of<T>(o, p, values + j * 2 * KV_ROW);
                ps_mma16<T>(sum, p, ps_ones<T>(), ps_ones<T>(), sum);
            }
            if (again || __all_sync(0xffffffffu, ps_sums_hold<T>(fminf(sum[0], sum[2]), fmaxf(sum[0], sum[2])))) {
                break;
            }
            float most[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
            for (int j = 0; j < tiles; j++) {
                float s[2][4];
                score(s, j);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const bool there = j * 16 + i / 4 * 8 + at.q * 2 + i % 2 < x.n;
                    most[i % 4 / 2] = fmaxf(most[i % 4 / 2], there ? s[i / 4][i % 4] : -INFINITY);
                }
            }
            less[0] = -ps_quad_max(most[0]);
            less[1] = -ps_quad_max(most[1]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float by = __fdividef(1.0f, sum[2 * r]);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                merged[2 * p + r] |= ps_pack<T>(o[p][2 * r] * by, o[p][2 * r + 1] * by) & head.pair[p];
            }
            logs[r] = at.q == h ? ps_log2(sum[2 * r]) - less[r] : logs[r];
        }
    }
}

/* ---- backward ---- */

/* Addresses in shared memory: the lane's places in the unit's columns, COLUMNS_ROW bytes a row of matrices, of columns first, of
 * rows first, and of its own tile's; floats [heads][2][16 tiles], softmax's sums' logarithms and deltas, both negative; and where a
 * tile's gradient of scores is kept for the layers below, 512 bytes further the next one's. */
struct d16_any_places {
    uint32_t columns, rows, own, less;
    char *kept;
};

/* Negative deltas of the warp's rows, as less_delta has them, and logs, of head q, of rows that exist: what does not exist has no
 * probability. */
template <class T>
static __device__ __forceinline__ void leave_less(uint32_t less, const float (&dx)[2][4], const uint32_t (&merged)[4], float2 logs,
                                                  const encoder<T> &x, const place<T, D, ANY_TILES> &at)
{
    const uint32_t to = less + (uint32_t)((at.tile * 16 + at.g) * 4), head_bytes = (uint32_t)(at.tiles() * 128);
    float delta[4]; /* pair i / 2, row i % 2 */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        delta[i] = -dx[i / 2][i % 2 * 2] * ps_low<T>(merged[i]) - dx[i / 2][i % 2 * 2 + 1] * ps_high<T>(merged[i]);
        delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], 1);
        const float other = __shfl_xor_sync(0xffffffffu, delta[i], 2);
        delta[i] += x.e > 4 ? other : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if ((i / 2 * 8 + at.q * 2) % x.e == 0) { /* the head's first columns */
            const float sum = x.e > 8 ? delta[i % 2] + delta[2 + i % 2] : delta[i];
            ps_shared_store(to + head_of(x, i / 2, at.q) * head_bytes + head_bytes / 2 + i % 2 * 32, __float_as_uint(sum));
        }
    }
    if (at.q < x.heads) {
        ps_shared_store(to + at.q * head_bytes, __float_as_uint(at.here[0] ? -logs.x : -INFINITY));
        ps_shared_store(to + at.q * head_bytes + 32, __float_as_uint(at.here[1] ? -logs.y : -INFINITY));
    }
}

/* What a head's scores give, the warp's rows being queries: first = sum over keys of ds k; or, OF_KEYS: first = sum over queries of
 * ds q, second = that of p d_merged. Then the same of the layers below, times `scale`, to `below`. */
template <bool OF_KEYS, class T>
static __device__ __forceinline__ void gradients(float (&first)[2][4], float (&second)[2][4], const struct d16_head &head,
                                                 const struct d16_any_places &to, uint32_t less, const struct d16_pieces &pieces,
                                                 char *below, int64_t further, float scale, const uint32_t (&last)[2],
                                                 const place<T, D, ANY_TILES> &at)
{
    enum { Q = 0, K = 2 * MATRIX, V = 4 * MATRIX, D_MERGED = 6 * MATRIX };
    const int tiles = at.tiles();
    const uint32_t of_delta = (uint32_t)(tiles * 64);
    uint32_t a[4], d[4];
    float own[4]; /* logs of rows g and g + 8, deltas */
    head.load(a, to.own + (OF_KEYS ? K : Q));
    head.load(d, to.own + (OF_KEYS ? V : D_MERGED));
#pragma unroll
    for (int i = 0; i < 4 && !OF_KEYS; i++) {
        own[i] = __uint_as_float(ps_shared_load(less + i / 2 * of_delta + (uint32_t)((at.tile * 16 + at.g) * 4 + i % 2 * 32)));
    }
    clear(first);
    clear(second);
#pragma unroll 2
    for (int j = 0; j < tiles; j++) {
        const uint32_t tile = (uint32_t)(j * 2 * COLUMNS_ROW);
        float s[2][4], ds[2][4];
        uint32_t p[4];
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const uint32_t column = less + (uint32_t)((j * 16 + t * 8 + at.q * 2) * 4);
            const float2 log = OF_KEYS ? ps_shared_load2(column) : make_float2(0, 0),
                         delta = OF_KEYS ? ps_shared_load2(column + of_delta) : make_float2(0, 0);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[t][i] = !OF_KEYS ? own[i / 2] : i % 2 ? log.y : log.x;
                ds[t][i] = !OF_KEYS ? own[2 + i / 2] : i % 2 ? delta.y : delta.x;
            }
        }
        add_tile<T>(s, a, to.columns + tile + (OF_KEYS ? Q : K));
        add_tile<T>(ds, d, to.columns + tile + (OF_KEYS ? D_MERGED : V));
        add_tile_below<OF_KEYS, T>(s, pieces, head, j);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float &v = s[i / 4][i % 4];
            v = ps_exp2(v);
            ds[i / 4][i % 4] *= v;
        }
        if constexpr (OF_KEYS) {
            pack_operand<T>(p, s[0], s[1]);
            add_rows_of<T>(second, p, to.rows + tile + D_MERGED);
        }
        pack_operand<T>(p, ds[0], ds[1]);
#pragma unroll
        for (int i = 0; i < 4 && !OF_KEYS; i++) {
            p[i] &= j == tiles - 1 ? last[i / 2] : 0xffffffffu;
        }
        add_rows_of<T>(first, p, to.rows + tile + (OF_KEYS ? Q : K));
        if (pieces.count > 0) {
            leave_operand(to.kept + j * 512, p);
        }
    }
    const uint32_t others = pieces.own - at.tile * 2 * pieces.row + (OF_KEYS ? 0 : PIECE_KEYS);
#pragma unroll 1
    for (int i = 0; i < pieces.count; i++) {
        float o[2][4];
        clear(o);
#pragma unroll 2
        for (int j = 0; j < tiles; j++) {
            uint32_t p[4];
            take_operand(p, to.kept + j * 512);
            add_rows_of<T>(o, p, others + i * pieces.bytes + j * 2 * pieces.row);
        }
#pragma unroll
        for (int p = 0; p < 2; p++) {
#pragma unroll
            for (int v = 0; v < 4; v++) {
                o[p][v] = at.here[v / 2] ? o[p][v] : 0.0f;
            }
            if (head.pair[p]) {
                put_pair<T>(below + i * further, p, o[p], scale);
            }
        }
    }
}

/* The gradients of q, k and v of the warp's rows, scaled; of rows that do not exist zero. */
template <class T>
static __device__ __forceinline__ void attention_backward(uint32_t (&dq)[4], uint32_t (&dk)[4], uint32_t (&dv)[4],
                                                          const struct d16_any_places &to, const struct d16_pieces &pieces,
                                                          const struct d16_piece_gradients &below, const uint32_t (&last)[2],
                                                          const encoder<T> &x, const place<T, D, ANY_TILES> &at)
{
    const float ln2 = 0.6931471805599453f; /* q was scaled */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        dq[i] = dk[i] = dv[i] = 0;
    }
#pragma unroll 1
    for (int h = 0; h < x.heads; h++) {
        const struct d16_head head(x, h, at.q);
        const uint32_t less = to.less + (uint32_t)(h * at.tiles() * 128);
        const auto put = [&](uint32_t(&operand)[4], const float(&o)[2][4], float scale) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                operand[i] |= ps_pack<T>(o[i / 2][i % 2 * 2] * scale, o[i / 2][i % 2 * 2 + 1] * scale) & head.pair[i / 2];
            }
        };
        float first[2][4], second[2][4];
        gradients<false>(first, second, head, to, less, pieces, below.queries, below.further, x.scale, last, at);
        put(dq, first, x.scale);
        gradients<true>(first, second, head, to, less, pieces, below.keys, below.further, ln2, last, at);
        put(dk, first, ln2);
        put(dv, second, 1.0f);
    }
    clear_missing(dk, at);
    clear_missing(dv, at);
}

} // namespace ps_resident

#endif
