/* Weights' and biases' gradients of encoder/streamed/real16.cuh: products of the operands that backward has written, over rows, and
 * the kernels that form the last of them and add all partial sums up, with LayerNorm's. And the copies of weights that forward
 * begins with. */
#ifndef PS_KERNELS_CUDA_ENCODER_REAL16_WEIGHTS_CUH
#define PS_KERNELS_CUDA_ENCODER_REAL16_WEIGHTS_CUH

#include "kernels/cuda/encoder/streamed/real16_hidden.cuh"
#include "kernels/cuda/encoder/streamed/real16_tile.cuh"

namespace PS_REAL16_SPACE
{

/* The gradients of a layer's parameters, as model/parameters.h names them. */
struct layer_gradients {
    float *w_qkv, *w_o, *w_1, *w_2, *ln1_gamma, *ln1_beta, *b_qkv, *b_o, *ln2_gamma, *ln2_beta, *b_1, *b_2;
    int64_t matrix_stride, vector_stride; /* to the next layer's: of the first four, and of the others */
};

/* A block of backward's launch, or of one of its own, takes a slice of a job: with `slices` blocks a job, every slices-th
 * block of 64 rows of the chunk before. Each warpgroup forms a part, 64 columns of the right operand times 128 of the left (that
 * much of the gradient, transposed). Shared memory bounds it; so cut, the right operand's columns are read once for product and
 * column sums. A
 * stage is 64 rows of the operands, in pairs of panels; the first thread of each warpgroup asks the copy engine for one of them:
 * one thread that asks for all holds its warpgroup up, and so the others. */
enum {
    PART_ROWS = 64,     /* columns of the right operand */
    PART_COLUMNS = 128, /* of the left one */
    /* its sums in the order of the threads' registers, 64 column sums of its right operand, and as many more for whole lines */
    PART_SUMS = PART_ROWS * PART_COLUMNS,
    PART_FLOATS = PART_SUMS + 2 * PART_ROWS,
    PARTS = THREADS / 128, /* of a job */
    JOB_PANELS = 4,        /* of the hidden layer in a job, at most */
    MAX_JOBS = 2 + 2 * ((MAX_F / 64 + JOB_PANELS - 1) / JOB_PANELS),
    GRADIENT_PANELS = 24, /* in shared memory */
    GRADIENT_BYTES = GRADIENT_PANELS * PANEL_BYTES,
    MAX_STAGES = GRADIENT_PANELS / 4, /* of the smallest job */
    JOB_PAIRS = 4,
    ADD_BLOCKS = PART_COLUMNS / 8 + 1, /* of add_gradients for a part: 8 columns of the left operand each, and the biases */
    ADD_WARPS = 8,
};
static_assert(32 * ADD_WARPS == 2 * 128 && NORM_SUMS % 32 == 0, "whole blocks");
static_assert((int)GRADIENT_BYTES <= (int)BACKWARD_BYTES, "the same kernel has both");

/* QK: a' dq, a' dk; VO: a' dv, merged' dr; 1: ln2' d_hidden, 2: hidden' dy, of up to 4 panels of the hidden layer. */
enum gradient_kind { GRADIENT_QK, GRADIENT_VO, GRADIENT_1, GRADIENT_2 };

/* Two panels of an operand, or one: its neighbour in the stage is not filled then, and makes columns that do not exist. */
struct gradient_pair {
    const real16 *from;
    int all, panels; /* of a block of 64 rows, and those of the pair */
};

struct gradient_job {
    int kind, first, panels; /* of the hidden layer's panels */
    int pairs_count;
    int slices, usual_slices; /* of this launch, and of one of backward's: blocks */
    struct gradient_pair pairs[JOB_PAIRS];
};

struct gradient_arguments {
    struct layer_gradients gradients; /* of the first layer; add_gradients only */
    int d, f, layers;
    float attention_scale, output_scale, w_2_scale; /* what partial sums lack; add_gradients only */
    int row_blocks;                                 /* of 64 rows */
    int jobs_count;
    bool add; /* to the partial sums of chunks before */
    struct gradient_job jobs[MAX_JOBS];
    float *partials; /* of this launch, [slices][jobs][PARTS][PART_FLOATS]: a layer's of `beside`, or the last chunk's own */
    /* for add_gradients: [layers from the last][most slices of a job][jobs][PARTS][PART_FLOATS], of launches beside backward, and
     * whether the first layer has any; blocks of layer_backward at most, and those with norm_sums of even and odd chunks of the
     * last layer, and of the others */
    const float *beside;
    bool first_beside;
    int most_slices, most_blocks, norm_blocks[2][2];
    const float *norm_sums; /* [layers from the last][2][most_blocks][NORM_SUMS] */
    int e, head_bits;       /* own_column's; add_gradients only */
};

/* Never fewer than pairs. */
static __device__ __forceinline__ int job_parts(const struct gradient_job &job)
{
    return job.kind == GRADIENT_1 || job.kind == GRADIENT_2 ? (job.panels + 1) / 2 * 2 : PARTS;
}

/* A pair of panels, from there on in device memory, to its place in a stage. */
static __device__ __forceinline__ void ask_pair(const struct gradient_pair &pair, const real16 *from, uint32_t to, uint32_t full)
{
    ps_mbarrier_expect(full, pair.panels * PANEL_BYTES);
    ps_bulk_copy(to, from, pair.panels * PANEL_BYTES, full, ps_cache_once());
}

/* What block `index` of those that form gradients does. The chunk's last tiles may still be in L2, so the row blocks are taken from
 * the last to the first. */
static __device__ __forceinline__ void gradient_block(const struct gradient_arguments &p, const struct turn &turn,
                                                      unsigned char *shared, int index)
{
    __shared__ uint64_t gradient_barriers[2 * MAX_STAGES];
    int number = 0, slice = index;
    for (; slice >= p.jobs[number].slices; number++) {
        slice -= p.jobs[number].slices;
    }
    const struct gradient_job &job = p.jobs[number];
    const int part = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
    const int steps = slice < p.row_blocks ? (p.row_blocks - 1 - slice) / job.slices + 1 : 0;
    const bool tall = job.kind == GRADIENT_2, both = job.kind == GRADIENT_VO;
    const int parts = job_parts(job), panels = 2 * job.pairs_count, stages = GRADIENT_PANELS / panels;
    const uint32_t stage_bytes = panels * PANEL_BYTES, base = ps_shared_address(shared);
    const uint32_t full = ps_shared_address(gradient_barriers), empty = full + 8 * MAX_STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            ps_mbarrier_init(full + 8 * i, job.pairs_count);
            ps_mbarrier_init(empty + 8 * i, 128 * parts);
        }
        ps_mbarrier_publish();
    }
    if (!turn.ended) {
        ps_grid_begin();
    } else { /* all of the launch before is read */
        if (!turn.last) {
            ps_grid_release();
        }
        ps_grid_wait();
    }
    __syncthreads();
    if (part >= parts) {
        return;
    }
    const bool asks = threadIdx.x % 128 == 0 && part < job.pairs_count;
    const struct gradient_pair pair = job.pairs[asks ? part : 0];
    const int64_t row_block = (int64_t)pair.all * (64 * 64); /* reals from one to the next */
    const real16 *next = pair.from + (p.row_blocks - 1 - slice) * row_block;
    const int64_t further = job.slices * row_block;
    const uint32_t place = base + part * (2 * PANEL_BYTES);
    if (asks) {
        for (int s = 0; s < stages && s < steps; s++, next -= further) {
            ask_pair(pair, next, place + s * stage_bytes, full + 8 * s);
        }
    }
    const int first_panel = both ? part / 2 * 4 : tall ? part / 2 * 2 : 0; /* of the left operand */
    const uint32_t left = PANEL_BYTES * first_panel;
    const uint32_t right = PANEL_BYTES * (tall ? panels - 2 + part % 2 : both ? first_panel + 2 + part % 2 : 2 + part);
    const int lane = lane_id(), wj = warp_id() % 4, thread = threadIdx.x % 128;
    const uint32_t right_place = right + (lane % 8 + lane / 16 * 8) * 128 + ((2 * wj + lane / 8 % 2 ^ lane % 8) << 4);
    float *out = p.partials + (int64_t)((slice * p.jobs_count + number) * PARTS + part) * PART_FLOATS;
    float sums[16][4], bias[2] = {};
    ps_zero(sums);
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        const uint32_t stage = base + slot * stage_bytes;
        const uint64_t b = ps_wgmma_whole(ps_wgmma_place(stage + left, PANEL_BYTES));
        uint32_t a[4][4];
        ps_mbarrier_wait(full + 8 * slot, parity);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            ps_ldmatrix4_transposed_at(a[k], stage + right_place + k * 2048);
        }
        ps_wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            multiply_add<1>(sums, a[k], ps_wgmma_further(b, k * 2048));
#pragma unroll
            for (int i = 0; i < 4; i++) { /* while the next product waits for its turn */
                bias[i % 2] += ps_low<real16>(a[k][i]) + ps_high<real16>(a[k][i]);
            }
            asm volatile("" : "+f"(bias[0]), "+f"(bias[1])::"memory");
        }
        ps_wgmma_commit();
        if (asks && s > 0 && s - 1 + stages < steps) { /* the stage of the step before, when all have read it */
            const int before = slot == 0 ? stages - 1 : slot - 1;
            ps_mbarrier_wait(empty + 8 * before, slot == 0 ? parity ^ 1 : parity);
            ask_pair(pair, next, place + before * stage_bytes, full + 8 * before);
            next -= further;
        }
        ps_wgmma_wait<0>();
        ps_pin(sums);
        ps_pin(a);
        ps_mbarrier_arrive(empty + 8 * slot); /* every lane: its own reads of the stage are ordered by its own arrival */
        slot++;
        if (slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    const bool add = p.add;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        float4 *to = (float4 *)out + n * 128 + thread;
        const float4 old = add ? *to : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *to = make_float4(old.x + sums[n][0], old.y + sums[n][1], old.z + sums[n][2], old.w + sums[n][3]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sum = ps_quad_sum(bias[i]);
        if (lane % 4 == 0) {
            float *to = out + PART_SUMS + 16 * wj + 8 * i + lane / 4;
            *to = add ? *to + sum : sum;
        }
    }
}

/* The weights' gradients of the last chunk. */
static __global__ void __launch_bounds__(THREADS, 1) weight_gradients(const __grid_constant__ struct gradient_arguments p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    gradient_block(p, turn{}, shared, blockIdx.x);
}

/* A head of e columns takes 2^bits of q, k, v and merged, 8, 16 or 32, of which those beyond e are zero. Where such a column is
 * among the d of a parameter: at least d if nowhere. */
static __device__ __forceinline__ int own_column(int column, int e, int bits)
{
    const int within = column & ((1 << bits) - 1);
    return within < e ? (column >> bits) * e + within : INT32_MAX;
}

/* The gradient at the part's column `right` of its right operand and column `left` of its left one += v. */
static __device__ __forceinline__ void add_weight(const struct gradient_arguments &p, const struct gradient_job &job, int part,
                                                  int layer, int right, int left, float v)
{
    const struct layer_gradients &g = p.gradients;
    int column = right + PART_ROWS * (part % 2), rows = p.d, columns = p.d, width = p.d;
    float *to = g.w_o, scale = p.attention_scale;
    if (job.kind == GRADIENT_1) {
        column = hidden_column(right + PART_ROWS * (job.first + part));
        columns = width = p.f;
        to = g.w_1;
        scale = p.w_2_scale;
    } else if (job.kind == GRADIENT_2) {
        left = hidden_column(left + PART_ROWS * job.first + PART_COLUMNS * (part / 2));
        rows = p.f;
        to = g.w_2;
        scale = p.w_2_scale;
    } else if (job.kind == GRADIENT_QK || part < 2) {
        width = 3 * p.d;
        column = own_column(column, p.e, p.head_bits);
        to = g.w_qkv + (job.kind == GRADIENT_QK ? part / 2 : 2) * p.d;
    } else {
        left = own_column(left, p.e, p.head_bits);
    }
    if (left < rows && column < columns) {
        to[layer * g.matrix_stride + (int64_t)left * width + column] += scale * v;
    }
}

/* The bias's gradient at the part's column `right` += v. */
static __device__ __forceinline__ void add_bias(const struct gradient_arguments &p, const struct gradient_job &job, int part,
                                                int layer, int right, float v)
{
    const struct layer_gradients &g = p.gradients;
    int column = right + PART_ROWS * (part % 2), columns = p.d;
    float *to = g.b_o, scale = p.attention_scale;
    if (job.kind == GRADIENT_1) {
        column = hidden_column(right + PART_ROWS * (job.first + part));
        columns = p.f;
        to = g.b_1;
        scale = GELU_SCALE * p.w_2_scale;
    } else if (job.kind == GRADIENT_2) {
        columns = part < 2 && job.first == 0 ? p.d : 0;
        to = g.b_2;
        scale = p.output_scale;
    } else if (job.kind == GRADIENT_QK || part < 2) {
        column = own_column(column, p.e, p.head_bits);
        to = g.b_qkv + (job.kind == GRADIENT_QK ? part / 2 : 2) * p.d;
    }
    if (column < columns) {
        to[layer * g.vector_stride + column] += scale * v;
    }
}

static __device__ __forceinline__ float4 sum_of(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Gradients += their partial sums. Blocks: those of the parts, whose threads add up every second slice of 4 floats, two threads for
 * the same ones; then LayerNorm's, for each layer from the last on. */
static __global__ void __launch_bounds__(32 * ADD_WARPS) add_gradients(const __grid_constant__ struct gradient_arguments p)
{
    __shared__ float4 sums[32 * ADD_WARPS / 2];
    const int lane = lane_id(), warp = warp_id(), parts = p.jobs_count * PARTS, blocks = parts * ADD_BLOCKS + NORM_SUMS / 32;
    const int number = blockIdx.x / blocks, layer = p.layers - 1 - number, block = blockIdx.x % blocks, column = block / ADD_BLOCKS;
    ps_grid_begin();
    if (column < parts) {
        const struct gradient_job &job = p.jobs[column / PARTS];
        const int part = column % PARTS, n = block % ADD_BLOCKS, thread = threadIdx.x % 128, odd = threadIdx.x / 128;
        if (part >= job_parts(job)) {
            return;
        }
        const bool biases = n == PART_COLUMNS / 8;
        const int64_t place = (int64_t)column * (PART_FLOATS / 4) + n * 128 + thread, slice = (int64_t)parts * (PART_FLOATS / 4);
        const float4 *beside = (const float4 *)p.beside + number * p.most_slices * slice + place;
        const float4 *last = (const float4 *)p.partials + place;
        const bool there = !biases || thread < PART_ROWS / 4;
        const int beside_slices = there && (layer || p.first_beside) ? job.usual_slices : 0;
        const int last_slices = there && layer == 0 ? job.slices : 0;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int s = odd; s < beside_slices; s += 2) {
            sum = sum_of(sum, beside[s * slice]);
        }
#pragma unroll 8
        for (int s = odd; s < last_slices; s += 2) {
            sum = sum_of(sum, last[s * slice]);
        }
        if (odd) {
            sums[thread] = sum;
        }
        __syncthreads();
        if (odd) {
            return;
        }
        sum = sum_of(sum, sums[thread]);
        if (!biases) {
            const int row = thread / 4 % 8 + 16 * (thread / 32), first = 8 * n + 2 * (thread % 4);
            add_weight(p, job, part, layer, row, first, sum.x);
            add_weight(p, job, part, layer, row, first + 1, sum.y);
            add_weight(p, job, part, layer, row + 8, first, sum.z);
            add_weight(p, job, part, layer, row + 8, first + 1, sum.w);
        } else if (thread < PART_ROWS / 4) {
            const int first = 4 * thread;
            add_bias(p, job, part, layer, first, sum.x);
            add_bias(p, job, part, layer, first + 1, sum.y);
            add_bias(p, job, part, layer, first + 2, sum.z);
            add_bias(p, job, part, layer, first + 3, sum.w);
        }
        return;
    }
    const int index = (block - parts * ADD_BLOCKS) * 32 + lane, vector = index / D, place = index % D;
    float *out = (float *)sums, sum = 0.0f;
    for (int chunk = 0; chunk < 2; chunk++) {
        const float *from = p.norm_sums + (int64_t)(2 * number + chunk) * p.most_blocks * NORM_SUMS + index;
        const int all = p.norm_blocks[number > 0][chunk];
#pragma unroll 8
        for (int b = warp; b < all; b += ADD_WARPS) {
            sum += from[(int64_t)b * NORM_SUMS];
        }
    }
    out[warp * 32 + lane] = sum;
    __syncthreads();
    if (warp > 0 || place >= p.d) {
        return;
    }
#pragma unroll
    for (int i = 1; i < ADD_WARPS; i++) {
        sum += out[i * 32 + lane];
    }
    float *to = vector == 0   ? p.gradients.ln1_gamma
                : vector == 1 ? p.gradients.ln1_beta
                : vector == 2 ? p.gradients.ln2_gamma
                              : p.gradients.ln2_beta;
    to[layer * p.gradients.vector_stride + place] += sum * (vector < 2 ? p.attention_scale : GELU_SCALE * p.w_2_scale);
}

/* ---- what forward begins with: copies of weights, which backward reads again. In bf16 of W_qkv, as PROJECTION_APART wants it; and
 * where heads have other widths than 8, 16 and 32 of what makes and reads q, k, v and merged, as wide as those are ---- */

/* Of all layers; a copy has W_qkv [d, QKV_PARTS a] and, where heads are padded, W_o [a, d] and, in fp32, PADDED_VECTORS [a]: all
 * but b_1, as they stand in shared memory, so that kernels know one width of them. */
struct copying {
    const real16 *w_qkv, *w_o; /* the first layer's, as what follows */
    const float *w_qkv_fp32;
    struct layer_vectors vectors;
    int64_t matrix_stride, vector_stride; /* to the next layer's */
    char *copies;
    int64_t copy_bytes; /* from a layer's to the next */
    int d, a, e, head_bits;
    int all; /* elements of a layer's copies */
};

enum { COPY_THREADS = 256, PADDED_VECTORS = B_1 / D };

/* An element a thread, a layer blockIdx.y. Bytes of a layer (d 128): 295 KB read and 197 KB written in bf16; of padded heads (d
 * 104, 4 of 26) 220 and 191 KB, in fp16 90 and 111; latency bounds it. No flops.
 *
 * It reads and writes before its wait. Parameters are older than the kernel before, or that is a full dependency. If it is a
 * forward that still reads the copies, the same values are written again. */
static __global__ void __launch_bounds__(COPY_THREADS) copy_weights(const __grid_constant__ struct copying p)
{
    ps_grid_release();
    const int i = blockIdx.x * COPY_THREADS + threadIdx.x, layer = blockIdx.y, wide = QKV_PARTS * p.a, qkv = p.d * wide,
              matrices = qkv + p.a * p.d;
    real16 *const to = (real16 *)(p.copies + layer * p.copy_bytes);
    const int64_t matrix = layer * p.matrix_stride, vector = layer * p.vector_stride;
    if (i < qkv) {
        const int row = i / wide, part = (i - row * wide) / p.a;
        const int column = own_column(i - row * wide - part * p.a, p.e, p.head_bits);
        const int64_t from = matrix + row * (3 * p.d) + part % 3 * p.d + column;
        if (part < FIRST_REAL16_PART) {
            ((ps_fp16 *)to)[i] = ps_fp16(column < p.d ? p.w_qkv_fp32[from] : 0.0f);
        } else {
            to[i] = column < p.d ? p.w_qkv[from] : real16(0.0f);
        }
    } else if (i < matrices && i < p.all) {
        const int line = (i - qkv) / p.d, row = own_column(line, p.e, p.head_bits);
        to[i] = row < p.d ? p.w_o[matrix + row * p.d + (i - qkv - line * p.d)] : real16(0.0f);
    } else if (i < p.all) {
        const int number = (i - matrices) / p.a, place = i - matrices - number * p.a;
        const int column = number >= B_QKV / D && number < B_O / D ? own_column(place, p.e, p.head_bits) : place;
        ((float *)(to + matrices))[i - matrices] = column < p.d ? vector_at(p.vectors, number, p.d)[vector + column] : 0.0f;
    }
    ps_grid_wait(); /* so that who awaits this kernel has awaited the one before too */
}

} // namespace PS_REAL16_SPACE

#endif
