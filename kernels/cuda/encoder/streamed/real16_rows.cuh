/* What encoder/streamed/real16.cuh does by rows, between its products: reading, writing and staging them, LayerNorm, dropout, and
 * the sums of products that rows are read from. */
#ifndef PS_KERNELS_CUDA_ENCODER_REAL16_ROWS_CUH
#define PS_KERNELS_CUDA_ENCODER_REAL16_ROWS_CUH

#include "kernels/cuda/encoder/streamed/real16_tile.cuh"

namespace PS_REAL16_SPACE
{

/* ---- rows: between the products a warp takes its rows four at a time. Lane 8 g + c has, of row g of the four, columns 8 c .. 8 c
 * + 7 and 64 + 8 c .. 64 + 8 c + 7, x[0 .. 7] and x[8 .. 15]; rolled loops, since the backward kernel's code has to stay in the
 * instruction cache ---- */

enum { LANE_COLUMNS = 16, PASS_ROWS = 4, PASSES = WARP_ROWS / PASS_ROWS };

/* A lane's part of a row, 16 bits each. */
struct row_words {
    uint4 part[2];
};

/* Local row of pass i, and the same within the warp's rows. */
static __device__ __forceinline__ int pass_row(int i)
{
    return PASS_ROWS * i + lane_id() / 8;
}

static __device__ __forceinline__ int lane_column(int part)
{
    return 8 * (lane_id() % 8) + 64 * part;
}

static __device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x + __shfl_xor_sync(0xffffffffu, x, 4);
}

/* From a tensor whose first row is the tile's, d wide; zeros beyond `valid` rows and d columns. */
static __device__ __forceinline__ struct row_words row_read(const real16 *rows, int d, int row, int valid)
{
    struct row_words w;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        w.part[i] = make_uint4(0, 0, 0, 0);
        if (row < valid && lane_column(i) < d) {
            w.part[i] = *(const uint4 *)(rows + (int64_t)row * d + lane_column(i));
        }
    }
    return w;
}

static __device__ __forceinline__ void row_write(real16 *rows, int d, int row, int valid, const struct row_words &w)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row < valid && lane_column(i) < d) {
            *(uint4 *)(rows + (int64_t)row * d + lane_column(i)) = w.part[i];
        }
    }
}

/* To the panels of an operand in shared memory; row: of the half. */
static __device__ __forceinline__ void row_stage(unsigned char *panels, int row, const struct row_words &w)
{
    unsigned char *to = panels + row * 128 + ((lane_id() % 8 ^ row % 8) << 4);
    *(uint4 *)to = w.part[0];
    *(uint4 *)(to + PANEL_BYTES) = w.part[1];
}

/* Back from there. */
static __device__ __forceinline__ struct row_words row_staged(const unsigned char *panels, int row)
{
    const unsigned char *from = panels + row * 128 + ((lane_id() % 8 ^ row % 8) << 4);
    struct row_words w;
    w.part[0] = *(const uint4 *)from;
    w.part[1] = *(const uint4 *)(from + PANEL_BYTES);
    return w;
}

static __device__ __forceinline__ void row_unpack(float (&x)[LANE_COLUMNS], const struct row_words &w)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t words[4] = {w.part[i].x, w.part[i].y, w.part[i].z, w.part[i].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[8 * i + 2 * k] = ps_low<real16>(words[k]);
            x[8 * i + 2 * k + 1] = ps_high<real16>(words[k]);
        }
    }
}

template <typename T = real16> static __device__ __forceinline__ struct row_words row_pack(const float (&x)[LANE_COLUMNS])
{
    struct row_words w;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        w.part[i] = make_uint4(ps_pack<T>(x[8 * i], x[8 * i + 1]), ps_pack<T>(x[8 * i + 2], x[8 * i + 3]),
                               ps_pack<T>(x[8 * i + 4], x[8 * i + 5]), ps_pack<T>(x[8 * i + 6], x[8 * i + 7]));
    }
    return w;
}

/* x[4 i .. 4 i + 3] = v. */
static __device__ __forceinline__ void row_four(float (&x)[LANE_COLUMNS], int i, float4 v)
{
    x[4 * i] = v.x;
    x[4 * i + 1] = v.y;
    x[4 * i + 2] = v.z;
    x[4 * i + 3] = v.w;
}

/* A lane's columns of an fp32 vector. */
static __device__ __forceinline__ void row_vector(float (&x)[LANE_COLUMNS], const float *vector)
{
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 4; i++) {
        row_four(x, i, *(const float4 *)(vector + lane_column(i / 2) + 4 * (i % 2)));
    }
}

/* ---- sums of products in fp32, [64, D] in shared memory. Columns 64 j + 8 n + 4 h .. + 3 of a row are unit 16 j + 8 h + (n ^ (h +
 * 2 (row % 4))) of 16 bytes: no bank conflicts by products' rows and columns, nor by rows ---- */

/* Of 8 groups of 8 columns from 64 part on: where the lane's first row's are, but for n and the second row. */
static __device__ __forceinline__ uint32_t sums_place(unsigned char *stage, int part)
{
    const int row = product_row() + lane_id() / 4, t = lane_id() % 4;
    return ps_shared_address(stage) + row * 512 + part * 256 + t / 2 * 128 + ((t / 2 + 2 * (row % 4)) << 4) + t % 2 * 8;
}

/* Group FIRST + n to columns 64 part + 8 n; ADD: to what is there. */
template <int FIRST, bool ADD, int N>
static __device__ __forceinline__ void sums_store(unsigned char *stage, int part, const float (&x)[N][4])
{
    const uint32_t place = sums_place(stage, part);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const uint32_t to = place ^ (n << 4); /* the stage is aligned */
#pragma unroll
        for (int second = 0; second < 2; second++) {
            float2 v = make_float2(x[FIRST + n][2 * second], x[FIRST + n][2 * second + 1]);
            if (ADD) {
                const float2 old = ps_shared_load2(to + second * 8 * 512);
                v = make_float2(old.x + v.x, old.y + v.y);
            }
            ps_shared_store2(to + second * 8 * 512, v);
        }
    }
}

/* Each side tells the other that it has come, and waits for it. Where the sides' code differs, half_sync would have threads of one
 * barrier wait at two instructions. */
template <int SIDE> static __device__ __forceinline__ void sides_meet()
{
    const int barrier = 3 + 2 * half_id();
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier + SIDE), "n"(THREADS / 2) : "memory");
    asm volatile("bar.sync %0, %1;" ::"r"(barrier + 1 - SIDE), "n"(THREADS / 2) : "memory");
}

/* Both sides' sums over their parts of the depth, added up; between barriers of the half. The branches are kept apart from end to
 * end: meeting between them makes ptxas spill sums, 36 us of a weather step. */
static __device__ __forceinline__ void sums_of_sides(unsigned char *stage, const float (&x)[D / 8][4])
{
    if (side_id() == 0) {
        sums_store<8, false>(stage, 1, x);
        sides_meet<0>();
        sums_store<0, true>(stage, 0, x);
    } else {
        sums_store<0, false>(stage, 0, x);
        sides_meet<1>();
        sums_store<8, true>(stage, 1, x);
    }
}

/* By rows: where the lane's columns 4 h .. of part 0 are, but for h and part. */
static __device__ __forceinline__ float4 *sum_row_at(unsigned char *stage, int row, int i)
{
    return (float4 *)(stage + row * 512 + i / 2 * 256 + i % 2 * 128 + ((lane_id() % 8 ^ (i % 2 + 2 * (row % 4))) << 4));
}

static __device__ __forceinline__ void sum_row(float (&x)[LANE_COLUMNS], unsigned char *stage, int row)
{
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 4; i++) {
        row_four(x, i, *sum_row_at(stage, row, i));
    }
}

static __device__ __forceinline__ void sum_row_store(unsigned char *stage, int row, const float (&x)[LANE_COLUMNS])
{
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 4; i++) {
        *sum_row_at(stage, row, i) = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
}

/* What dropout keeps of the lane's columns of a row, as kept_pairs has its two blocks. row: in the tensor. */
static __device__ __forceinline__ uint32_t row_draw(const struct arguments &p, const struct ps_dropout &drop, uint4 begin,
                                                    int64_t row)
{
    uint32_t bits = ~0u;
    if (drop.threshold) {
        const uint32_t index = drop.first + (uint32_t)row * (uint32_t)(p.d / 8) + lane_id() % 8;
        bits = kept_pairs(p.drawing, begin, index, index + 8);
    }
    return bits;
}

/* The thread's word of a tile, and what of it is for the next pass. */
static __device__ __forceinline__ uint32_t kept_word(const struct ps_dropout &drop, const uint32_t *kept, int tile)
{
    return drop.threshold ? kept[(int64_t)tile * THREADS + threadIdx.x] : ~0u;
}

enum { PASS_BITS = 8 }; /* in each half of the word */

static __device__ __forceinline__ uint32_t kept_next(uint32_t &word)
{
    const uint32_t bits = word;
    word >>= PASS_BITS;
    return bits;
}

/* Zeros where nothing is kept. */
static __device__ __forceinline__ void row_drop(struct row_words &w, uint32_t bits)
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        w.part[j].x &= pair_mask(bits << (7 - j), false);
        w.part[j].y &= pair_mask(bits << (5 - j), false);
        w.part[j].z &= pair_mask(bits << (3 - j), false);
        w.part[j].w &= pair_mask(bits << (1 - j), false);
    }
}

/* x = drop(scale x + bias) + residual, of forward; scale and bias have dropout's scale. kept: the bits of this pass are put to
 * those before. */
static __device__ __forceinline__ void row_branch(float (&x)[LANE_COLUMNS], float scale, const float (&bias)[LANE_COLUMNS],
                                                  const float (&residual)[LANE_COLUMNS], uint32_t bits, int pass, uint32_t &kept)
{
    kept |= bits << PASS_BITS * pass;
#pragma unroll
    for (int bit = 0; bit < LANE_COLUMNS; bit++) { /* in the order of the bits, which predicates are made of by sevens */
        const int k = 8 * (bit % 2) + bit % 8 / 2 * 2 + bit / 8;
        const float branch = fmaf(x[k], scale, bias[k]);
        x[k] = residual[k];
        if (bits & 1u << (bit / 8 * 16 + bit % 8)) {
            x[k] += branch;
        }
    }
}

/* x = (x - mean) rstd of a row over its first d columns (per: 1/d), 0 beyond; x is 0 there on entry. Returns mean, rstd. */
static __device__ __forceinline__ float2 row_normalise(float (&x)[LANE_COLUMNS], int d, float per, float epsilon)
{
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        sum += x[i];
    }
    const float mean = row_sum(sum) * per, means[2] = {lane_column(0) < d ? mean : 0.0f, lane_column(1) < d ? mean : 0.0f};
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        x[i] -= means[i / 8];
        squares += x[i] * x[i];
    }
    const float rstd = rsqrtf(row_sum(squares) * per + epsilon);
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        x[i] *= rstd;
    }
    return make_float2(mean, rstd);
}

/* The products' operand xhat gamma + beta. */
template <typename T = real16>
static __device__ __forceinline__ struct row_words row_affine(const float (&xhat)[LANE_COLUMNS], const float (&gamma)[LANE_COLUMNS],
                                                              const float (&beta)[LANE_COLUMNS])
{
    float x[LANE_COLUMNS];
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        x[i] = xhat[i] * gamma[i] + beta[i];
    }
    return row_pack<T>(x);
}

/* dz becomes the gradient with respect to LayerNorm's input; sums, of the lane's columns, += dz xhat and dz. */
static __device__ __forceinline__ void row_normalise_backward(float (&dz)[LANE_COLUMNS], const float (&xhat)[LANE_COLUMNS],
                                                              float rstd, float per, const float (&gamma)[LANE_COLUMNS],
                                                              float (&sums)[2 * LANE_COLUMNS])
{
    float mean = 0.0f, projection = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        sums[i] += dz[i] * xhat[i];
        sums[LANE_COLUMNS + i] += dz[i];
        dz[i] *= gamma[i];
        mean += dz[i];
        projection += dz[i] * xhat[i];
    }
    mean = row_sum(mean) * per;
    projection = row_sum(projection) * per;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        dz[i] = rstd * (dz[i] - mean - xhat[i] * projection);
    }
}

/* to [2][D], this warp's, += the lanes' sums: dgamma, dbeta. */
static __device__ __forceinline__ void add_column_sums(float *to, float (&v)[2 * LANE_COLUMNS])
{
    const bool odd = lane_id() & 8, high = lane_id() & 16;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) { /* over the four rows of a pass: each lane ends with 8 sums */
        const float got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + LANE_COLUMNS], 8);
        v[i] = (odd ? v[i + LANE_COLUMNS] : v[i]) + got;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 8], 16);
        v[i] = (high ? v[i + 8] : v[i]) + got;
    }
    float4 *place = (float4 *)(to + (odd ? D : 0) + lane_column(high));
#pragma unroll
    for (int i = 0; i < 2; i++) { /* no other thread adds to these, so that the order is fixed; and nothing waits for them */
        atomicAdd(place + i, make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]));
    }
}

/* The lane's parts of the warp's rows, asked for before they are needed. Loops over passes are rolled, so that registers cannot be
 * indexed by the pass: rows_next takes the first and moves the others up. */
struct rows_ahead {
    struct row_words pass[PASSES];
};

/* rows: the half's first, of which `valid` exist. */
static __device__ __forceinline__ struct rows_ahead rows_read(const real16 *rows, int d, int valid)
{
    struct rows_ahead ahead;
    asm volatile("" : "+r"(d)); /* else the rows' offsets would be kept, in memory, for the next call */
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        ahead.pass[i] = row_read(rows, d, first_row() + pass_row(i), valid);
    }
    return ahead;
}

static __device__ __forceinline__ struct row_words rows_next(struct rows_ahead &ahead)
{
    const struct row_words next = ahead.pass[0];
#pragma unroll
    for (int i = 1; i < PASSES; i++) {
        ahead.pass[i - 1] = ahead.pass[i];
    }
    return next;
}

/* The warp's rows to L2, long before they are read. */
static __device__ __forceinline__ void rows_prefetch(const real16 *rows, int d, int valid)
{
    const int line = first_row() * d + lane_id() * 64;
    if (lane_id() * 64 < WARP_ROWS * d && line < valid * d) {
        ps_prefetch_near(rows + line);
    }
}

/* The same by cp.async to panels: for rows_staged, of the same thread, after ps_copy_wait. */
static __device__ __forceinline__ void rows_stage(const unsigned char *panels, const real16 *rows, int d, int valid)
{
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int row = first_row() + pass_row(i);
        const uint32_t to = ps_shared_address(panels) + row * 128 + ((lane_id() % 8 ^ row % 8) << 4);
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const bool there = row < valid && lane_column(part) < d;
            ps_copy_async_part(to + part * PANEL_BYTES, there ? rows + (int64_t)row * d + lane_column(part) : rows, there ? 16 : 0);
        }
    }
}

static __device__ __forceinline__ struct rows_ahead rows_staged(const unsigned char *panels)
{
    struct rows_ahead ahead;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        ahead.pass[i] = row_staged(panels, first_row() + pass_row(i));
    }
    return ahead;
}

/* As rows_ahead, of rows that the same thread has put into panels. */
struct rows_kept {
    const unsigned char *panels;
    int pass;
};

static __device__ __forceinline__ struct row_words rows_next(struct rows_kept &kept)
{
    return row_staged(kept.panels, first_row() + pass_row(kept.pass++));
}

/* The projection's operand LN(input) of the warp's rows, to q's panels of the half. BACKWARD: the rows' statistics too, and to the
 * half's panels of `operand` what the gradient of W_qkv is made of. */
template <bool BACKWARD>
static __device__ __forceinline__ void rows_normalise(unsigned char *half, real16 *operand, float2 *stats, struct rows_ahead &input,
                                                      const float *gamma_beta, int d, float per, float epsilon)
{
    const int first = first_row();
    float gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
    row_vector(gamma, gamma_beta);
    row_vector(beta, gamma_beta + D);
#pragma unroll 1
    for (int i = 0; i < PASSES; i++) {
        const int row = first + pass_row(i);
        float x[LANE_COLUMNS];
        row_unpack(x, rows_next(input));
        const float2 s = row_normalise(x, d, per, epsilon);
        if (BACKWARD && lane_id() % 8 == 0) {
            stats[row] = s;
        }
        row_stage(half + Q_PANEL * PANEL_BYTES, row, row_affine<ps_fp16>(x, gamma, beta));
        if (BACKWARD) {
            const struct row_words words = row_affine(x, gamma, beta);
            char *const to = (char *)operand + row * 128 + ((lane_id() % 8 ^ row % 8) << 4);
            ps_store_once((uint4 *)to, words.part[0]);
            ps_store_once((uint4 *)(to + PANEL_BYTES), words.part[1]);
        }
    }
}

} // namespace PS_REAL16_SPACE

#endif
