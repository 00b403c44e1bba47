/* Weights: packed as lanes read them, and brought through a ring of shared memory into products.
 *
 * They pass through a ring in the order in which products take them, a piece of some steps of 16 rows and all of a product's
 * columns at a time. The warps take turns to ask for the next one, into the place of the piece before the one that they have done
 * with. */
#ifndef PS_KERNELS_CUDA_ENCODER_FLOAT_WEIGHTS_CUH
#define PS_KERNELS_CUDA_ENCODER_FLOAT_WEIGHTS_CUH

#include "kernels/cuda/encoder/streamed/float_tile.cuh"

namespace PS_REAL16_SPACE
{

struct piece {
    uint32_t from, bytes; /* 16-byte units from the layer's packed weights on */
};

enum { MOST_PIECES = 5 + MOST_HIDDEN / HIDDEN * 4 }; /* forward's at the largest d_ff: W_qkv 4, W_o 1, and 4 every HIDDEN columns */

/* Of a layer, in the order of its products. */
struct piece_list {
    int count;
    struct piece of[MOST_PIECES];
};

struct ring_shared {
    unsigned long long full[SLOTS], empty[SLOTS];
};

struct ring {
    uint32_t slots, full, empty; /* addresses */
    const float4 *own;           /* the lane's first fragment in the first slot */
    int slot, before;            /* of the piece at hand, of the one before */
    uint32_t parity, parity_before;
    /* What is to be asked for next: a layer's weights, which of its pieces, and how many are left. */
    const uint4 *first, *packed;
    const struct piece_list &pieces; /* the kernel's argument */
    int step_layer, layers, layer, next, left, whose;

    /* By all threads; `first`: the first layer's packed weights in the order of the layers, step_layer fragments apart, `tiles`
     * times. */
    __device__ __forceinline__ ring(const float *memory, struct ring_shared *shared, const struct piece_list &pieces_,
                                    const uint4 *first_, int step_, int layers_, int64_t tiles)
        : slot(0), before(-1), parity(0), parity_before(0), first(first_), packed(first_), pieces(pieces_), step_layer(step_),
          layers(layers_), layer(0), next(0), left((int)tiles * layers_ * pieces_.count), whose(0)
    {
        slots = ps_shared_address(memory);
        full = ps_shared_address(shared->full);
        empty = ps_shared_address(shared->empty);
        own = (const float4 *)memory + threadIdx.x % 32;
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < SLOTS; i++) {
                ps_mbarrier_init(full + 8 * i, 1);
                ps_mbarrier_init(empty + 8 * i, THREADS);
            }
            ps_mbarrier_publish();
        }
        __syncthreads();
    }
    __device__ __forceinline__ void ask(int to, bool mine)
    {
        if (mine) {
            const struct piece p = pieces.of[next];
            ps_mbarrier_expect(full + 8 * to, p.bytes);
            ps_bulk_fetch(slots + (uint32_t)to * SLOT, packed + p.from, p.bytes, full + 8 * to);
        }
        left--;
        if (++next == pieces.count) {
            next = 0;
            packed += step_layer;
            if (++layer == layers) {
                layer = 0;
                packed = first;
            }
        }
    }
    /* Fills the ring, once the weights may be read. */
    __device__ __forceinline__ void begin()
    {
        for (int i = 0; i < SLOTS && left > 0; i++) {
            ask(i, threadIdx.x == 0);
        }
    }
    /* The piece at hand, once it is there: the lane's first fragment. */
    __device__ __forceinline__ const float4 *wait() const
    {
        ps_mbarrier_wait(full + 8 * slot, parity);
        return own + slot * (SLOT / 16);
    }
    __device__ __forceinline__ void release(const lane_place &at)
    {
        ps_mbarrier_arrive(empty + 8 * slot); /* each for itself: racecheck does not follow one lane's arrival for all */
        if (before >= 0 && left > 0) {
            const bool mine = at.lane == 0 && at.warp == whose;
            if (mine) {
                ps_mbarrier_wait(empty + 8 * before, parity_before);
            }
            ask(before, mine);
            whose = (whose + 1) % WARPS;
        }
        before = slot;
        parity_before = parity;
        if (++slot == SLOTS) {
            slot = 0;
            parity ^= 1;
        }
    }
};

/* c += a b of a step of 16 terms: a, the lane's fragments of columns 2k and 2k + 1; b the lane's fragments. */
template <int NT>
static __device__ __forceinline__ void multiply_step(float (&c)[NT][4], const float *even, const float *odd, const float4 *b)
{
    float4 w[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        w[t] = b[t * 32];
    }
    float a[4];
    ps_load<4>(a, even);
#pragma unroll
    for (int t = 0; t < NT; t++) {
        multiply_add(c[t], a, w[t].x, w[t].y);
    }
    ps_load<4>(a, odd);
#pragma unroll
    for (int t = 0; t < NT; t++) {
        multiply_add(c[t], a, w[t].z, w[t].w);
    }
}

/* Steps of 16 rows in a piece of a product of so many columns. */
static __host__ __device__ constexpr int steps_of(int columns)
{
    return SLOT / (columns * 64);
}

/* c += a b over STEPS of 16 terms: a, fragments of COLUMNS columns; b, what comes through the ring. */
template <int STEPS, int NT, int COLUMNS>
static __device__ __forceinline__ void multiply(float (&c)[NT][4], const float *a, ring &weights, const lane_place &at)
{
    constexpr int WIDE = NT * ACROSS, EACH = steps_of(WIDE * 8); /* tiles of columns; steps of a piece */
    static_assert(STEPS % EACH == 0, "whole pieces");
    const float *even = a + at.down * (16 * COLUMNS) + at.lane * 4, *odd = a + at.down * (16 * COLUMNS) + 128 + (at.lane ^ 4) * 4;
#pragma unroll 1
    for (int k = 0; k < STEPS; k += EACH) {
        const float4 *const b = weights.wait() + at.across * NT * 32;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            multiply_step<NT>(c, even + i * 256, odd + i * 256, b + i * (WIDE * 32));
        }
        weights.release(at);
        even += EACH * 256;
        odd += EACH * 256;
    }
}

/* Fragments of a layer: W_qkv [d, 3d], W_o [d, d], W_1 [d, f] by HIDDEN columns, W_2 [f, d]; then W_2' by HIDDEN columns, W_1',
 * W_o', W_qkv'. In a matrix, or what it is divided in, that of 16 rows (step), 8 columns and a lane: rows 2q, 2q + 1, 2q + 8,
 * 2q + 9 of column g, rounded in tf32. */
struct packed_places {
    int w_qkv, w_o, w_1, w_2, w_2t, w_1t, w_ot, w_qkvt, all;
};

static __host__ __device__ __forceinline__ struct packed_places places_of(int d, int f)
{
    struct packed_places p = {};
    p.w_o = 3 * d * d / 4;
    p.w_1 = p.w_o + d * d / 4;
    p.w_2 = p.w_1 + d * f / 4;
    p.w_2t = p.w_2 + f * d / 4;
    p.w_1t = p.w_2t + f * d / 4;
    p.w_ot = p.w_1t + d * f / 4;
    p.w_qkvt = p.w_ot + d * d / 4;
    p.all = p.w_qkvt + 3 * d * d / 4;
    return p;
}

/* weights: the flat ones; group: columns of q, k and v that go together. One fragment a thread, a layer to each blockIdx.y; count:
 * fragments of a layer, transposes or not. 4 bytes read and written for each weight and direction. */
static __global__ void __launch_bounds__(256)
    pack(uint4 *packed, const float *weights, const struct ps_encoder_layout at, int d, int f, int group, int count)
{
    ps_grid_begin();
    const struct packed_places p = places_of(d, f);
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) {
        return;
    }
    const bool transposed = i >= p.w_2t;
    int64_t from;
    int first, deep, wide; /* of the product's right side: rows, and columns that go together */
    if (!transposed) {
        first = i >= p.w_2 ? p.w_2 : i >= p.w_1 ? p.w_1 : i >= p.w_o ? p.w_o : 0;
        from = i >= p.w_2 ? at.w_2 : i >= p.w_1 ? at.w_1 : i >= p.w_o ? at.w_o : at.w_qkv;
        deep = i >= p.w_2 ? f : d;
        wide = i >= p.w_2 ? d : i >= p.w_1 ? (int)HIDDEN : i >= p.w_o ? d : 3 * group;
    } else {
        first = i >= p.w_qkvt ? p.w_qkvt : i >= p.w_ot ? p.w_ot : i >= p.w_1t ? p.w_1t : p.w_2t;
        from = i >= p.w_qkvt ? at.w_qkv : i >= p.w_ot ? at.w_o : i >= p.w_1t ? at.w_1 : at.w_2;
        deep = i >= p.w_qkvt ? 3 * d : i >= p.w_ot ? d : i >= p.w_1t ? f : d;
        wide = i >= p.w_1t ? d : (int)HIDDEN;
    }
    const int fragment = (i - first) % (deep * wide / 4), part = (i - first) / (deep * wide / 4), lane = fragment % 32;
    const int tile = fragment / 32, row = tile / (wide / 8) * 16 + lane % 4 * 2;
    int column = tile % (wide / 8) * 8 + lane / 4;
    column = i < p.w_o ? column / group * d + part * group + column % group : part * wide + column;
    const int width = i < p.w_o                 ? 3 * d
                      : i >= p.w_1 && i < p.w_2 ? f
                                                : d; /* of the weight as it lies, where it is not transposed */
    const float *w = weights + blockIdx.y * at.matrix_stride + from;
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int r = row + j / 2 * 8 + j % 2;
        v[j] = transposed ? w[column * deep + r] : w[r * width + column];
    }
    packed[(int64_t)blockIdx.y * p.all + i] = make_uint4(__float_as_uint(operand(v[0])), __float_as_uint(operand(v[1])),
                                                         __float_as_uint(operand(v[2])), __float_as_uint(operand(v[3])));
}

/* The pieces of a layer in the order of its products. */
static struct piece_list list_pieces(int f, bool backward)
{
    struct piece_list list = {};
    const struct packed_places p = places_of(D, f);
    /* `rows` rows, from `row` on, of the right side, in `columns` columns, whose fragments begin at `first`. */
    const auto add = [&](int first, int columns, int row, int rows) {
        const int steps = steps_of(columns), fragments = steps * columns * 4;
        for (int i = row / 16 / steps; i < (row + rows) / 16 / steps; i++) {
            list.of[list.count++] = {(uint32_t)(first + i * fragments), (uint32_t)fragments * 16};
        }
    };
    if (!backward) {
        add(0, QKV, 0, D);
        add(p.w_o, D, 0, D);
    }
    for (int chunk = 0; chunk < f; chunk += HIDDEN) {
        add(backward ? p.w_2t : p.w_1, HIDDEN, chunk / HIDDEN * D, D);
        add(backward ? p.w_1t : p.w_2, D, chunk, HIDDEN);
    }
    if (backward) {
        add(p.w_ot, D, 0, D);
        add(p.w_qkvt, D, 0, QKV);
    }
    return list;
}

} // namespace PS_REAL16_SPACE

#endif
