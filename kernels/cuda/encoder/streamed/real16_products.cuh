/* Products of encoder/streamed/real16.cuh: the ring through which the copy engine brings chunks of weights, wgmma on half a tile's
 * rows and such a chunk, and the projection to q, k and v. */
#ifndef PS_KERNELS_CUDA_ENCODER_REAL16_PRODUCTS_CUH
#define PS_KERNELS_CUDA_ENCODER_REAL16_PRODUCTS_CUH

#include "kernels/cuda/encoder/streamed/real16_tile.cuh"

namespace PS_REAL16_SPACE
{

/* ---- weights: a ring of chunks in shared memory ---- */

/* A chunk is 64 columns of 128 rows ("tall") or 64 rows of 128 columns ("wide"), in panels of 64 columns: 128 bytes a row, its
 * units of 16 bytes exchanged by the row's number modulo 8. The copy engine brings it as two boxes of 64 x 64. */
struct chunk {
    int weight, column, part, row; /* part: of W_qkv */
    bool wide;
};

/* Chunk number i of the tile, in the order in which forward uses them. */
static __device__ __forceinline__ struct chunk forward_chunk(int i)
{
    if (i < 6) {
        return {WEIGHT_QKV, CHUNK * (i % 2), 2 - i / 2, 0, false};
    }
    if (i < 8) {
        return {WEIGHT_O, CHUNK * (i - 6), 0, 0, false};
    }
    const int at = CHUNK * ((i - 8) / 2);
    return i % 2 ? chunk{WEIGHT_2, 0, 0, at, true} : chunk{WEIGHT_1, at, 0, 0, false};
}

static __device__ __forceinline__ struct chunk backward_chunk(int i, int hidden)
{
    if (i < 2 * hidden) {
        const int at = CHUNK * (i / 2);
        return i % 2 ? chunk{WEIGHT_1, at, 0, 0, false} : chunk{WEIGHT_2, 0, 0, at, true};
    }
    i -= 2 * hidden;
    if (i < 2) {
        return {WEIGHT_O, 0, 0, CHUNK * i, true};
    }
    i -= 2;
    return {WEIGHT_QKV, CHUNK * (i % 2), i < 6 ? 2 - i / 2 : FIRST_REAL16_PART + (i - 6) / 2, 0, false};
}

/* True for the last of so many that come here, after what those before have done; then it starts again. */
static __device__ __forceinline__ bool comes_last(uint32_t counter, int all)
{
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;" : "=r"(before) : "r"(counter), "r"(all - 1) : "memory");
    return before == (uint32_t)all - 1;
}

/* Every warp takes every chunk and releases them in pairs, in their order. The warp that is the last to release a pair asks for the
 * chunks that take their slots. */
template <bool BACKWARD> struct weight_ring {
    const CUtensorMap *maps;
    uint32_t base, full, readers; /* addresses: of the slots, of their barriers, and of how many warps have released a pair that
                                     begins in each */
    int hidden, chunks, left;     /* chunks of the hidden layer; of a tile; of this block, not yet asked for */
    int next, slot, release_slot; /* number in the tile of the next to ask for; slots of the next to take and to release */
    uint32_t parity;

    /* One thread: chunk number i of the tile to this slot. */
    __device__ __forceinline__ void ask(int i, int into) const
    {
        const struct chunk c = BACKWARD ? backward_chunk(i, hidden) : forward_chunk(i);
        const uint32_t to = base + into * STAGE_BYTES, barrier = full + 8 * into;
        ps_mbarrier_expect(barrier, STAGE_BYTES);
        ps_tensor_copy3(to, &maps[c.weight], c.column, c.part, c.row, barrier);
        ps_tensor_copy3(to + PANEL_BYTES, &maps[c.weight], c.column + (c.wide ? CHUNK : 0), c.part, c.row + (c.wide ? 0 : CHUNK),
                        barrier);
    }

    static __device__ __forceinline__ int slot_after(int i)
    {
        return i + 1 == STAGES ? 0 : i + 1;
    }

    __device__ __forceinline__ int chunk_after(int i) const
    {
        return i + 1 == chunks ? 0 : i + 1;
    }

    __device__ __forceinline__ void start(const struct arguments &p, uint32_t shared, uint32_t barriers, int tiles)
    {
        maps = p.weights;
        base = __shfl_sync(0xffffffffu, shared, 0); /* so that they stay in registers */
        full = __shfl_sync(0xffffffffu, barriers, 0);
        readers = full + 8 * STAGES;
        hidden = hidden_chunks_of(p);
        chunks = 2 * hidden + (BACKWARD ? 14 : 8);
        left = tiles * chunks;
        next = slot = release_slot = 0;
        parity = 0;
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) {
                ps_mbarrier_init(full + 8 * i, 1);
                ps_shared_store(readers + 4 * i, 0);
            }
            ps_mbarrier_publish();
            if (!BACKWARD && p.copied) {
                ps_grid_wait();
            }
        }
        __syncthreads();
        for (int i = 0; i < STAGES && left > 0; i++) {
            if (threadIdx.x == 0) {
                ask(next, i);
            }
            next = chunk_after(next);
            left--;
        }
    }

    /* The address of a half's panels, behind the slots. What products have from here takes fewer instructions to make descriptors
     * of. */
    __device__ __forceinline__ uint32_t half_panels(int half) const
    {
        return base + STAGES * STAGE_BYTES + half * HALF_BYTES;
    }

    /* The next chunk, when it has come. */
    __device__ __forceinline__ uint32_t take()
    {
        ps_mbarrier_wait(full + 8 * slot, parity);
        const uint32_t stage = base + slot * STAGE_BYTES;
        slot = slot_after(slot);
        parity ^= slot == 0;
        return stage;
    }

    /* The warp is done with its two oldest chunks. */
    __device__ __forceinline__ void release()
    {
        const int second = slot_after(release_slot), second_next = chunk_after(next);
        if (left > 0 && ps_elect() && comes_last(readers + 4 * release_slot, WARPS)) {
            ask(next, release_slot);
            if (left > 1) {
                ask(second_next, second);
            }
        }
        left -= 2;
        next = chunk_after(second_next);
        release_slot = slot_after(second);
    }
};

/* ---- products: 64 rows of a half times a weight. Left operands in a half's panels, or a warp's fragments. All are under way until
 * ps_wgmma_wait ---- */

/* sums += left B, 16 K deep, for 8 NT columns: B's row k and column n at row k, column n of the panel; TRANSPOSED: at row n, column
 * k of the panels. */
template <int K, bool TRANSPOSED, typename T = real16, int NT>
static __device__ __forceinline__ void product(float (&sums)[NT][4], uint32_t left, uint32_t panel)
{
    const uint64_t a = ps_wgmma_whole(ps_wgmma_place(left)), b = ps_wgmma_whole(ps_wgmma_place(panel));
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int column = k / 4 * PANEL_BYTES + k % 4 * 32;
        multiply_add<!TRANSPOSED, T>(sums, ps_wgmma_further(a, column), ps_wgmma_further(b, TRANSPOSED ? column : k * 2048));
    }
}

/* sums += left times the side's chunk of the next two, of which each side takes one; TRANSPOSED as above. It has ended. */
template <bool TRANSPOSED, typename T = real16, bool BACKWARD>
static __device__ __forceinline__ void side_product(float (&sums)[8][4], uint32_t left, struct weight_ring<BACKWARD> &weights,
                                                    int side)
{
    const uint32_t first = weights.take(), second = weights.take();
    ps_wgmma_begin();
    product<8, TRANSPOSED, T>(sums, left, side ? second : first);
    ps_wgmma_commit();
    ps_wgmma_wait<0>();
    ps_pin(sums);
    weights.release();
}

/* What a product's sums begin with. */
template <int NT> static __device__ __forceinline__ void add_bias_first(float (&sums)[NT][4], const float *bias)
{
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 b = *(const float2 *)(bias + 8 * n + lane_id() % 4 * 2);
        sums[n][0] = sums[n][2] = b.x;
        sums[n][1] = sums[n][3] = b.y;
    }
}

/* [16, 64] to the warp's rows of a panel, rows from `valid` of the half on as zeros. */
static __device__ __forceinline__ void store_panel(unsigned char *panel, const float (&x)[8][4], int valid)
{
    const int lane = lane_id(), row = product_row() + lane / 4;
    const bool there[2] = {row < valid, row + 8 < valid};
    const uint32_t to = ps_shared_address(panel) + (product_row() + lane % 16) * 128, unit = ((lane / 16) ^ (lane % 8)) << 4;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            words[2 * i] = there[0] ? ps_pack<real16>(x[n + i][0], x[n + i][1]) : 0;
            words[2 * i + 1] = there[1] ? ps_pack<real16>(x[n + i][2], x[n + i][3]) : 0;
        }
        ps_stmatrix4_at(to + (unit ^ (n << 4)), words);
    }
}

/* q, k, v = a W_qkv + b_qkv of the half, of fp16, q times q_scale; a, its address, is where q goes. */
template <bool BACKWARD>
static __device__ __forceinline__ void project_qkv(struct weight_ring<BACKWARD> &weights, unsigned char *half, uint32_t a, int warp,
                                                   const float *vectors, float q_scale, int valid)
{
    const int side = warp / 4 % 2;
#pragma unroll 1
    for (int part = 2; part >= 0; part--) {
        float sums[8][4];
        add_bias_first(sums, vectors + B_QKV + part * D + CHUNK * side);
        side_product<false, ps_fp16>(sums, a, weights, side);
        if (part == 0) {
            half_sync();
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[n][i] *= q_scale;
                }
            }
        }
        store_panel(half + (2 * part + side) * PANEL_BYTES, sums, valid);
    }
}

} // namespace PS_REAL16_SPACE

#endif
