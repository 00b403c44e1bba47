/* The weights' gradients of encoder/resident/d64_short.cu, a kernel that begins while backward runs; and, by the thread that has a
 * gradient's sum, AdamW's update: encoder/resident/update.cuh. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D64_WEIGHTS_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D64_WEIGHTS_CUH

#include "kernels/cuda/encoder/resident/d64_panels.cuh"
#include "kernels/cuda/encoder/resident/update.cuh"

namespace ps_resident
{

enum { STAGES = 6, STAGE = 4 * PANEL, LOADER = THREADS, JOB_FLOATS = 2 * 64 * 64, SLICE = 256, SLICES = JOB_FLOATS / 4 / SLICE };
enum { VECTOR_SLICE = 32 };

static __host__ __device__ constexpr int pairs_of(int p)
{
    return p + 2;
}

static __host__ __device__ constexpr int items_slices(int items)
{
    return (items + VECTOR_SLICE - 1) / VECTOR_SLICE;
}

static __host__ __device__ constexpr int vector_slices(int p)
{
    return items_slices(vector_floats(p * 64) / 4);
}

/* Until the counter has come so far; then what was written before can be read. */
static __device__ __forceinline__ void await_count(const unsigned *counter, unsigned count)
{
    while (ps_look(counter) < count) {
    }
}

/* sum += the column sums of 32 rows: their transpose times ones, every column the same. */
template <class T> static __device__ __forceinline__ void add_columns(float (&sum)[1][4], uint32_t rows, uint32_t ones)
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
        ps_wgmma_onto<T, 1, 0>(sum, ps_wgmma_operand(rows, k * STEP), ps_wgmma_operand(ones, 0));
    }
}

/* A product's job: the gradients of a pair of 64 x 64, over the rows of a split. Pairs: f / 128 of W_1, as many of W_2, W_q and
 * W_k, W_v and W_o. */
struct weight_job {
    int l, pair, split, begin, end; /* groups of 64 rows */

    template <class T> __device__ __forceinline__ weight_job(const encoder<T> &x, int ticket)
    {
        /* A layer's feed-forward comes first. No divisions: the loader is one warp, for which all of the block wait. */
        const int P = x.f >> 6, products = pairs_of(P) * x.d64.splits; /* P is 2 or 4 */
        for (l = x.layers - 1; ticket >= products; l--) {
            ticket -= products;
        }
        const int later = ticket - P * x.d64.splits;
        pair = later < 0 ? ticket & (P - 1) : P + (later & 1);
        split = later < 0 ? ticket >> (P >> 1) : later >> 1;
        begin = split * x.d64.split_groups + min(split, x.d64.split_more);
        end = begin + x.d64.split_groups + (split < x.d64.split_more);
    }
};

/* It is not waited for until it is used: atomicAdd would be, since the compiler lets one lane add for all. */
template <class T> static __device__ __forceinline__ int take_ticket(const encoder<T> &x)
{
    int ticket;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(ticket) : "l"(x.d64.counters + TICKETS) : "memory");
    return ticket;
}

/* Whether the job's operands of up to 32 groups from `group` on are there; AWAIT: until they are. All of the warp. */
template <bool AWAIT, class T>
static __device__ __forceinline__ bool announced(const encoder<T> &x, const struct weight_job &job, int group)
{
    const int lane = (int)threadIdx.x % 32, groups = groups_of(x);
    const unsigned *const flag = x.d64.flags + (int64_t)job.l * groups + group + lane;
    const unsigned wanted = job.pair < x.f / 64 ? 1 : 2;
    unsigned seen = wanted;
    if (group + lane < job.end) {
        do {
            seen = ps_look(flag);
        } while (AWAIT && seen < wanted);
    }
    const bool all = __all_sync(0xffffffffu, seen >= wanted);
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return all;
}

/* The loader's warp: takes tickets and fetches what their jobs need, a stage for 64 rows: three panels that lie together, or four.
 * jobs: the layer, pair, split and groups, in a job's first stage; layer -1: there are no more. At the end it counts the jobs as
 * done. first: lane 0's first ticket. */
template <class T>
static __device__ __forceinline__ void load_products(const encoder<T> &x, const char *memory, uint32_t full, uint32_t empty,
                                                     int4 *jobs, int first)
{
    const int P = x.f / 64, lane = (int)threadIdx.x % 32, all = x.layers * pairs_of(P) * x.d64.splits;
    const int64_t stride = (int64_t)x.layers * (kept_panels(P) * PANEL); /* from group to group */
    const uint32_t stages = ps_shared_address(memory);
    const uint64_t once = ps_cache_once();
    int slot = 0, next = first, taken = 0, ticket = __shfl_sync(0xffffffffu, first, 0);
    uint32_t parity = 1;
    bool ready = false;
    while (ticket < all) {
        taken++;
        const weight_job job(x, ticket);
        const uint32_t bytes = (job.pair == P + 1 ? 4 : 3) * PANEL;
        const char *from = kept_at(x, job.begin, job.l) + (2 * job.pair + (job.pair >= P / 2) + (job.pair >= P)) * PANEL;
        if (!ready) {
            announced<true>(x, job, job.begin);
        }
#pragma unroll 1
        for (int i = job.begin; i < job.end; i++, from += stride) {
            if (i > job.begin && (i - job.begin) % 32 == 0) {
                announced<true>(x, job, i);
            }
            if (i == job.end - 1 && i > job.begin) { /* the copy engine still has the stages before */
                ticket = __shfl_sync(0xffffffffu, next, 0);
                ready = ticket < all && announced<false>(x, weight_job(x, ticket), weight_job(x, ticket).begin);
            }
            if (lane == 0) {
                const uint32_t barrier = full + slot * 8;
                ps_mbarrier_wait(empty + slot * 8, parity);
                if (i == job.begin) {
                    jobs[slot] = make_int4(job.l, job.pair, job.split, job.end - job.begin);
                    /* Not before: blocks that begin now would find none left, and this one has two. */
                    next = take_ticket(x);
                }
                ps_mbarrier_expect(barrier, bytes);
                ps_bulk_copy(stages + slot * STAGE, from, bytes, barrier, once);
            }
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            parity ^= slot == 0;
        }
        if (job.end - job.begin == 1) {
            ticket = __shfl_sync(0xffffffffu, next, 0);
            ready = false;
        }
    }
    if (lane == 0) { /* no more */
        ps_mbarrier_wait(empty + slot * 8, parity);
        jobs[slot] = make_int4(-1, 0, 0, 0);
        ps_mbarrier_arrive(full + slot * 8);
        for (int i = 1; i < STAGES; i++) {
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            parity ^= slot == 0;
            ps_mbarrier_wait(empty + slot * 8, parity);
        }
        ps_count_up(x.d64.counters + DONE, taken);
    }
}

/* Shared memory: the stages, eight columns of ones, the sums' parts. */
enum {
    ONES = STAGES * STAGE,
    PARTS = ONES + 8 * 128,
    WEIGHTS_SHARED = PARTS + THREADS * 32,
    WEIGHTS_STATIC = STAGES * (2 * 8 + 16) + (int)sizeof(struct ps_adamw_step) + 8
};

/* The products, to x.d64.products, and the column sums that are the biases' gradients. Two warpgroups have a product, half of its
 * columns each, and the column sums of half of its rows. */
template <class T>
static __device__ __forceinline__ void weight_products(const encoder<T> &x, char *memory, uint32_t full, uint32_t empty,
                                                       const int4 *jobs, panel_place<T> &at)
{
    const int P = x.f / 64, half = at.share / 2, part = at.share % 2;
    int slot = 0;
    uint32_t parity = 0;
    for (;;) {
        ps_mbarrier_wait(full + slot * 8, parity);
        const int l = jobs[slot].x, pair = jobs[slot].y, split = jobs[slot].z, groups = jobs[slot].w;
        if (l < 0) {
            return;
        }
        const bool of_2 = pair >= P / 2 && pair < P, of_o = pair == P + 1;
        /* The panel that both products of the pair share stands behind the others or before them. */
        const bool behind = pair == 0 || pair == P / 2 || pair == P;
        const int shared = behind ? KEPT_MIDDLE : 0, own = behind ? half : 1 + half;
        const int left = of_2 ? own : of_o ? 2 * half : shared, right = of_2 ? shared : of_o ? 1 + 2 * half : own;
        float c[4][4], columns[1][4];
        int before = 0;
        clear(c);
        clear(columns);
#pragma unroll 1
        for (int i = 0; i < groups; i++) {
            ps_mbarrier_wait(full + slot * 8, parity);
            products_begin(at, c, columns);
            product<T, true, true>(c, at.of(4 * slot + left), at.of(4 * slot + right) + (uint32_t)part * 4, true);
            add_columns<T>(columns, at.of(4 * slot + right) + (uint32_t)part * (2 * STEP / 16), at.panel + ONES / 16);
            ps_wgmma_commit();
            if (i > 0) {
                ps_wgmma_wait<1>();
                /* Every lane: what it has read is then ordered by its own arrival. It costs nothing. */
                ps_mbarrier_arrive(empty + before * 8);
            }
            before = slot;
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            parity ^= slot == 0;
        }
        products_wait<0>(c, columns);
        float4 *const to = (float4 *)x.d64.products +
                           ((int64_t)(l * pairs_of(P) + pair) * x.d64.splits + split) * (JOB_FLOATS / 4) +
                           (half * 8 + part * 4) * 128 + threadIdx.x % 128;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            to[t * 128] = make_float4(c[t][0], c[t][1], c[t][2], c[t][3]);
        }
        if ((!of_2 || (pair == P / 2 && half == 0)) && at.q == 0) { /* the others' are the same once more */
            const int first = pair < P / 2 ? B_1 + (2 * pair + half) * 64
                              : pair < P   ? (int)B_2
                              : pair == P  ? B_QKV + half * D
                              : half       ? (int)B_O
                                           : B_QKV + 2 * D;
            float *const vector = x.d64.column_sums + ((int64_t)(2 * split + part) * x.layers + l) * vector_floats(x.f) + first;
            vector[at.unit * 16 + at.g] = columns[0][0];
            vector[at.unit * 16 + at.g + 8] = columns[0][2];
        }
        ps_mbarrier_arrive(empty + before * 8); /* the loader takes the job for done with its last stage */
    }
}

/* Parts of W_h's gradient: fewer than the multiprocessors that backward leaves free at seed28k. */
enum { HEAD_JOBS = 24 };

template <class T> static __host__ __device__ __forceinline__ int head_jobs(const encoder<T> &x)
{
    const int groups = groups_of(x);
    return !x.d64.head.d_weight ? 0 : groups < HEAD_JOBS ? groups : (int)HEAD_JOBS;
}

/* A part: z' dx over some of the sequences, to x.d64.head.parts; all of the block but the loader. parts: [threads][8]. forward, two
 * kernels ago, has written both: backward's blocks, all of which have begun, have waited for its end. */
template <class S, class T> static __device__ __forceinline__ void head_products(const encoder<T> &x, float4 *parts, int job)
{
    const int horizon = x.head.horizon, pieces = x.n * (D / 8), rows = THREADS / pieces, jobs = head_jobs(x);
    const int thread = (int)threadIdx.x, row = thread / pieces, piece = thread - row * pieces;
    const int all = (int)x.embed.all, begin = all * job / jobs, end = all * (job + 1) / jobs;
    const uint4 *const z = (const uint4 *)((const S *)x.u + x.layers * x.rows * D) + piece;
#pragma unroll 1
    for (int t = 0; t < horizon; t++) {
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 4
        for (int s = begin + row; s < (row < rows ? end : 0); s += rows) {
            const uint4 v = __ldcg(z + (int64_t)s * pieces);
            const float by = ps_low<T>(__ldcg((const uint16_t *)x.head.dx + s * horizon + t));
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[2 * i] = fmaf(ps_low<T>(words[i]), by, sum[2 * i]);
                sum[2 * i + 1] = fmaf(ps_high<T>(words[i]), by, sum[2 * i + 1]);
            }
        }
        parts[2 * thread] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        parts[2 * thread + 1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        ps_barrier(0, THREADS);
#pragma unroll 1
        for (int k = thread; k < pieces * 8; k += THREADS) {
            const float *const part = (const float *)parts + k;
            float all_rows = part[0];
            for (int i = 1; i < rows; i++) {
                all_rows += part[i * pieces * 8];
            }
            x.d64.head.parts[((int64_t)job * pieces * 8 + k) * horizon + t] = all_rows;
        }
        ps_barrier(0, THREADS);
    }
    if (thread == 0) {
        ps_count_up(x.d64.counters + DONE, 1);
    }
}

/* Pieces of 16 bytes of the embedding's gradients. */
template <class T> static __device__ __forceinline__ int embed_items(const encoder<T> &x)
{
    return x.embed.partial ? embed_rows_of(x.embed.patch, x.n) * D / 4 : 0;
}

/* .. and of W_h's. */
template <class T> static __device__ __forceinline__ int head_items(const encoder<T> &x)
{
    return x.d64.head.d_weight ? x.n * D / 4 * x.head.horizon : 0;
}

/* What a thread has of a slice of partial sums: from[i] for i < count, `stride` apart, go onto low and high, times scale. A slice
 * has so many items, powers of two; thread / items has a part of an item's sum, and the first threads put them together. */
template <class T> struct summands {
    const float4 *from;
    int64_t stride;
    int count, items;
    float scale;
    float2 *low, *high;

    /* Of a pair, over the splits. */
    __device__ __forceinline__ void of_matrix(const encoder<T> &x, int l, int pair, int slice)
    {
        const int P = x.f / 64, pairs = pairs_of(P), item = slice * SLICE + (int)threadIdx.x % SLICE;
        /* Where the float4 of warpgroup item / 512 lies. */
        const int share = item / 512, lane = item % 32, row = item / 32 % 4 * 16 + lane / 4;
        const int column = share % 2 * 32 + item / 128 % 4 * 8 + lane % 4 * 2, half = share / 2;
        float *to = x.gradients + l * x.at.matrix_stride;
        int ld = D;
        if (pair < P / 2) {
            to += x.at.w_1 + (2 * pair + half) * D;
            ld = x.f;
        } else if (pair < P) {
            to += x.at.w_2 + (2 * pair - P + half) * 64 * D;
        } else if (pair == P + 1 && half) {
            to += x.at.w_o;
        } else {
            to += x.at.w_qkv + ((pair - P) * 2 + half) * D;
            ld = 3 * D;
        }
        low = (float2 *)(to + row * ld + column);
        high = (float2 *)(to + (row + 8) * ld + column);
        from = (const float4 *)x.d64.products + (int64_t)(l * pairs + pair) * x.d64.splits * (JOB_FLOATS / 4) + item;
        stride = JOB_FLOATS / 4;
        count = x.d64.splits;
        items = SLICE;
        scale = 1.0f;
    }

    /* Of the vectors: biases' over the splits, LayerNorms' over the groups of rows. */
    __device__ __forceinline__ void of_vectors(const encoder<T> &x, int l, int slice)
    {
        const int i = (slice * VECTOR_SLICE + (int)threadIdx.x % VECTOR_SLICE) * 4;
        const bool here = i < vector_floats(x.f), of_norm = i >= LN1_GAMMA && i < B_1;
        const int groups = groups_of(x), width = of_norm ? 4 * D : vector_floats(x.f);
        float *const p = x.gradients + l * x.at.vector_stride;
        low = (float2 *)(here ? p + vector_at(x, i) : p);
        high = low + 1;
        from = (const float4 *)(of_norm ? x.d64.norms + l * 4 * D + i - LN1_GAMMA : x.d64.column_sums + l * vector_floats(x.f) + i);
        stride = (int64_t)x.layers * (width / 4);
        count = !here ? 0 : of_norm ? groups : 2 * x.d64.splits;
        items = VECTOR_SLICE;
        scale = i / D == B_2 / D ? 1.0f / x.half_scale : 1.0f; /* G holds half_scale times the gradient */
    }

    /* Of `all` items of 16 bytes, of which `parts` sums follow one another in memory. */
    __device__ __forceinline__ void of_items(const float *partial, int item, int all, int parts)
    {
        high = low + 1;
        from = (const float4 *)partial + item;
        stride = all;
        count = item < all ? parts : 0;
        items = VECTOR_SLICE;
        scale = 1.0f;
    }

    /* Of the embedding, over backward's blocks. */
    __device__ __forceinline__ void of_embedding(const encoder<T> &x, int slice)
    {
        const int all = embed_items(x), item = slice * VECTOR_SLICE + (int)threadIdx.x % VECTOR_SLICE;
        low = (float2 *)embed_item_at<D>(x, item < all ? item : 0);
        of_items(x.embed.partial, item, all, x.blocks);
    }

    /* Of W_h, over its parts. */
    __device__ __forceinline__ void of_head(const encoder<T> &x, int slice)
    {
        const int all = head_items(x), item = slice * VECTOR_SLICE + (int)threadIdx.x % VECTOR_SLICE;
        low = (float2 *)(x.d64.head.d_weight + (item < all ? item : 0) * 4);
        of_items(x.d64.head.parts, item, all, head_jobs(x));
    }

    __device__ __forceinline__ summands(const encoder<T> &x, int job)
    {
        const int P = x.f / 64, pairs = pairs_of(P), matrices = x.layers * pairs * SLICES;
        const int vectors = matrices + x.layers * vector_slices(P), embedding = vectors + items_slices(embed_items(x));
        if (job < matrices) {
            of_matrix(x, job / (pairs * SLICES), job / SLICES % pairs, job % SLICES);
        } else if (job < vectors) {
            of_vectors(x, (job - matrices) / vector_slices(P), (job - matrices) % vector_slices(P));
        } else if (job < embedding) {
            of_embedding(x, job - vectors);
        } else {
            of_head(x, job - embedding);
        }
    }

    /* The pair of an item that the thread finishes: low by the first threads, high by as many more; or NULL. */
    __device__ __forceinline__ float2 *own() const
    {
        return count == 0 ? NULL : threadIdx.x < items ? low : threadIdx.x < 2 * items ? high : NULL;
    }

    /* All of the block but the loader: the pair's sum, times scale and back, onto `sum`; parts [2][threads]. The order is fixed. */
    __device__ __forceinline__ void add(float2 *parts, float back, float2 &sum) const
    {
        const int all = THREADS / items, thread = (int)threadIdx.x;
        const float4 v = sum_every<11, false>(from, stride, thread / items, all, count);
        parts[thread] = make_float2(v.x, v.y);
        parts[THREADS + thread] = make_float2(v.z, v.w);
        ps_barrier(0, THREADS);
        if (thread < 2 * items) {
            const float2 *const part = parts + thread / items * THREADS + thread % items;
            float2 total = part[0];
            for (int i = 1; i < all; i++) {
                total.x += part[i * items].x;
                total.y += part[i * items].y;
            }
            sum = make_float2(fmaf(total.x, scale * back, sum.x), fmaf(total.y, scale * back, sum.y));
        }
    }
};

/* b_h's gradient and the loss, in head_sums' order; all of the block but the loader. parts: [warps][8]. */
template <class T>
static __device__ __forceinline__ void add_head_sums(const encoder<T> &x, const struct ps_adamw_step &s, double *parts)
{
    constexpr int GROUP = 256;
    const int thread = (int)threadIdx.x, horizon = x.head.horizon, column = thread / GROUP * 8 + thread % 8;
    double sum = 0.0;
    if (column <= horizon) {
#pragma unroll 8
        for (int row = thread % GROUP / 8; row < x.head.rows; row += GROUP / 8) {
            sum += __ldcg(x.head.partials + row * (int64_t)(horizon + 1) + column);
        }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    if (thread % 32 < 8) {
        parts[thread / 32 * 8 + thread % 8] = sum;
    }
    ps_barrier(0, THREADS);
    if (thread % GROUP < 8 && column <= horizon) {
        const double *const part = parts + thread / 32 * 8 + thread % 8;
        sum = part[0];
#pragma unroll
        for (int i = 1; i < GROUP / 32; i++) {
            sum += part[i * 8];
        }
        const double loss = x.d64.head.loss_scale * sum;
        struct ps_step_state *const state = x.d64.head.state;
        if (column < horizon) {
            put_single(x, s, x.d64.head.d_bias + column, (float)(x.d64.head.d_bias[column] + sum));
        } else if (isfinite(loss)) {
            state->loss_sum += loss;
        } else if (x.d64.update.parameters ? !s.halted : state->nonfinite == 0) { /* this launch may have left its note there */
            state->lost += (uint64_t)x.d64.head.batch;
        }
    }
    ps_barrier(0, THREADS);
}

/* Beside a block there are registers for 256 threads of 64: AdamW, where it is a kernel of its own, begins before this one has
 * ended. */
enum { WEIGHTS_BOUND = 736 }; /* threads for which 88 registers are left */

/* First the products, by ticket from the last layer to the first: each waits for what it needs of backward alone, so the blocks
 * that find a multiprocessor free while backward still runs begin with what that has left. Then the sums of all. */
template <class T, class S>
static __global__ void __launch_bounds__(WEIGHTS_BOUND, 1) d64_weights(const __grid_constant__ encoder<T> x)
{
    extern __shared__ __align__(1024) char memory[];
    __shared__ uint64_t barriers[2 * STAGES];
    __shared__ int4 jobs[STAGES];
    __shared__ struct ps_adamw_step step;
    __shared__ int ticket;
    const uint32_t full = ps_shared_address(barriers), empty = full + 8 * STAGES;
    unsigned *const counters = x.d64.counters;
    const int first = threadIdx.x == LOADER ? take_ticket(x) : 0;
    if (threadIdx.x < STAGES) {
        ps_mbarrier_init(full + threadIdx.x * 8, 1);
        ps_mbarrier_init(empty + threadIdx.x * 8, THREADS);
        ps_mbarrier_publish();
    }
    if (threadIdx.x < 8 * 128 / 4) {
        *((uint32_t *)(memory + ONES) + threadIdx.x) = ps_ones<T>();
    }
    publish();
    if (threadIdx.x >= LOADER) {
        load_products(x, memory, full, empty, jobs, first);
        return;
    }
    if (x.d64.update.parameters) {
        ps_adamw_begin(step, x.d64.update.plain, x.d64.update.learning_rates, x.d64.update.state);
        if (threadIdx.x == 96) {
            (void)ps_adamw_judge(step, x.d64.update.plain, x.d64.update.state);
        }
    }
    panel_place<T> at(memory);
    /* The first blocks begin on free multiprocessors, where backward has announced nothing yet. */
    for (int job = (int)blockIdx.x; job < head_jobs(x); job += (int)gridDim.x) {
        head_products<S>(x, (float4 *)(memory + PARTS), job);
    }
    weight_products(x, memory, full, empty, jobs, at);
    const int P = x.f / 64, sums = x.layers * (pairs_of(P) * SLICES + vector_slices(P)) + items_slices(embed_items(x)) +
                                   items_slices(head_items(x));
    const int slices = sums + (x.d64.head.d_weight ? 1 : 0), parts = x.layers * pairs_of(P) * x.d64.splits + head_jobs(x);
    /* In the order in which the blocks come here: the last ones, for which all wait, have none where there are more blocks. */
    if (threadIdx.x == 0) {
        ticket = (int)atomicAdd(counters + SLICE_TICKETS, 1);
    }
    ps_grid_begin();
    const float back = gradient_range<T, S>(counters + PEAK, true);
    ps_barrier(0, THREADS);
    unsigned ended = 0;
    if (threadIdx.x == 0 && ticket >= slices) {
        ended = atomicAdd(counters + ENDED, 1) + 1;
    }
#pragma unroll 1
    for (int turn = ticket; turn < slices; turn += (int)gridDim.x) {
        const int slice = turn - (slices - sums);
        const summands s(x, slice < 0 ? 0 : slice);
        pair own(x, slice < 0 ? NULL : s.own());
        if (slice < 0) { /* it waits for nothing */
            add_head_sums(x, step, (double *)(memory + PARTS));
        }
        if (turn == ticket && threadIdx.x == 0) {
            await_count(counters + DONE, (unsigned)parts);
        }
        ps_barrier(0, THREADS);
        if (turn == ticket && threadIdx.x == 0) {
            ended = atomicAdd(counters + ENDED, 1) + 1;
        }
        if (slice >= 0) {
            float2 sum = own.gradient;
            s.add((float2 *)(memory + PARTS), back, sum);
            if (own.to) {
                own.put(x, step, sum);
            }
        }
    }
    if (threadIdx.x == 0 && ended == gridDim.x) { /* no block looks at them any more; for the next time */
        counters[TICKETS] = counters[DONE] = counters[ENDED] = counters[SLICE_TICKETS] = 0;
        if (!std::is_same<S, T>::value) {
            counters[PEAK] = 0;
        }
        if (x.d64.update.parameters) {
            ps_adamw_end(x.d64.update.plain, x.d64.update.state);
        }
    }
}

} // namespace ps_resident

#endif
