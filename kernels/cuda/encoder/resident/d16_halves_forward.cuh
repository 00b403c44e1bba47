/* The forward kernels of encoder/resident/d16_halves.cu. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HALVES_FORWARD_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_D16_HALVES_FORWARD_CUH

#include "kernels/cuda/encoder/resident/d16_halves.cuh"

namespace ps_resident
{

/* Bytes of a row of matrices of a layer below, q's and k's. */
enum { HALVES_BELOW_ROW = 4 * MATRIX };

/* Bytes of a unit: k and v, and q and k of the layers below. */
static __host__ __device__ constexpr int halves_keys_bytes(int tiles, int pieces)
{
    return 2 * tiles * (KV_ROW + pieces * HALVES_BELOW_ROW);
}

/* Those to shared memory; own: the lane's place in the first one's of the warp's rows, the next one's `bytes` further. */
template <class P>
static __device__ __forceinline__ void take_below(uint32_t own, int bytes, int pieces, const struct halves &h, const P &at)
{
#pragma unroll 2
    for (int j = 0; j < pieces; j++) {
        uint32_t q[4], k[4];
        take_rows(q, slot_at(h, j, SLOT_Q, at.global_tile, at.lane), at);
        take_rows(k, slot_at(h, j, SLOT_K, at.global_tile, at.lane), at);
        ps_stmatrix4_at(own + j * bytes, q);
        ps_stmatrix4_at(own + j * bytes + PIECE_KEYS, k);
    }
}

/* v's moments about the columns' pivot, of rows that exist. */
template <class P>
static __device__ __forceinline__ void add_moments(struct halves_sums &sums, float (&v)[2][4], const struct halves_columns &c,
                                                   const P &at)
{
    affine(v, c.one, c.minus_pivot, at.q);
    sums.add(v, v, at);
}

/* The lane's place in matrices of all rows: the first column's of four tiles' halves, or columns first. */
template <int TILES> static __device__ __forceinline__ uint32_t all_rows(int lane, int row)
{
    return TILES == ANY_TILES ? columns_first(lane, row) : (uint32_t)(lane / 8 * row + lane % 8 * 16);
}

/* A lane's place in its unit's matrices from kv on: of operands of all rows, and of its own tile's; then those of the layers below.
 */
template <int TILES> struct halves_rows {
    uint32_t all, own;
    int piece_bytes;
    struct d16_pieces below;

    template <class P>
    __device__ __forceinline__ halves_rows(uint32_t kv, int pieces, const P &at)
        : all(kv + all_rows<TILES>(at.lane, KV_ROW)), own(kv + (uint32_t)(at.tile * 2 * KV_ROW) + rows_first(at.lane, KV_ROW)),
          piece_bytes(2 * at.tiles() * HALVES_BELOW_ROW)
    {
        const uint32_t first = kv + 2 * at.tiles() * KV_ROW;
        below = {first + all_rows<TILES>(at.lane, HALVES_BELOW_ROW),
                 first + (uint32_t)(at.tile * 2 * HALVES_BELOW_ROW) + rows_first(at.lane, HALVES_BELOW_ROW), pieces,
                 HALVES_BELOW_ROW, piece_bytes};
    }
};

/* u + drop(attention(u) W_o + b_o), u the layer's input: norm 2 of the layer below, or what the embedding gives. Before the wait:
 * parameters, q and k of the layers below, which their attention wrote, and the masks. EMBED: the first layer's, which embeds: the
 * kernel before may have written parameters and the step, so that windows, normalised, and masks are those of the step that the
 * forward before expected next, and are made again where it is another. */
template <class T, int TILES, bool EMBED>
static __global__ void __launch_bounds__(halves_warps(TILES) * 32)
    halves_attention(const __grid_constant__ encoder<T> x, const __grid_constant__ struct halves h)
{
    extern __shared__ uint4 shared_memory[];
    halves_attention_weights<T> &w = *(halves_attention_weights<T> *)shared_memory;
    struct halves_columns &c = *(struct halves_columns *)(&w + 1);
    union halves_scratch &scratch = *(union halves_scratch *)(&c + 1);
    place<T, D, TILES> at = unit_place<T, TILES>(x.n);
    const int pieces = !EMBED && h.residual ? h.layer : 0, unit_bytes = halves_keys_bytes(at.tiles(), pieces);
    float *const values = (float *)((char *)shared_memory + halves_front_bytes(sizeof w)) + at.unit * unit_bytes / 4;
    struct ahead now = {0, 0};
    if (!EMBED) {
        stage_attention(w, x, h.layer);
        now.step = step_of(x, x.threshold);
    } else if (h.training) {
        now = {step_at(&h.ahead->step), step_at(&h.ahead->cursor)};
    }
    const struct halves_norm norm = h.layer > 0 ? look_forward(x, h, h.layer - 1, NORM_2) : halves_norm{};
    set_pivot(c, x, h.layer, NORM_1);
    const halves_rows<TILES> rows(ps_shared_address((char *)shared_memory + halves_front_bytes(sizeof w) + at.unit * unit_bytes),
                                  pieces, at);
    uint32_t last[2];
    last_keys(last, TILES == ANY_TILES ? 0xffffu : ps_one<T>, x.n, at);
    struct halves_sums sums;
    for (int group = (int)blockIdx.x; group * x.block_units < (int)x.units; group += (int)gridDim.x) {
        const bool first = group == (int)blockIdx.x;
        at.take(x, group * x.block_units + at.unit);
        const int64_t tile = at.global_tile;
        uint32_t a[4], q[4], before[4], bits = 0xffffffffu;
        float u[2][4], y[2][4], logs[4];
        if (!first) {
            at.sync(); /* the units before have been read */
        }
        take_below(rows.below.own, rows.piece_bytes, pieces, h, at);
        const auto draw = [&]() {
            if (x.threshold) {
                bits = new_masks(x, now.step, 3 * h.layer, D, 0, NULL, at);
                settle(bits);
            }
        };
        if constexpr (EMBED) {
            int sequence[2], patch[2];
            uint32_t weight[2][2], patches[4], embed_bits = 0xffffffffu;
            float mean = 0, deviation = 1, centre[2], factor[2];
            embed_places(sequence, patch, x, at);
#pragma unroll 1
            for (bool late = !first || !h.training;; late = true) {
                if (late) {
                    if (first) {
                        ps_grid_begin();
                        stage_attention(w, x, 0);
                    }
                    load_embed_sum(u, patch, x, at);
                    load_embed_weight(weight, x, 0, at);
                    const struct ahead found = {step_of(x, x.state), step_at(&x.embed.state->cursor)};
                    if (first && h.training && found.step == now.step && found.cursor == now.cursor) {
                        break;
                    }
                    now = found;
                }
                draw();
                if (x.embed.threshold) {
                    embed_bits = embed_draw(x, now.step, at);
                    settle(embed_bits);
                }
                gather_windows(values, x, group * x.block_units + at.unit, now.cursor, 0, at);
                at.sync();
                if (x.embed.revin) {
                    ps_window_statistics<12, true>(values, x.embed.length, x.embed.epsilon, mean, deviation);
                }
                centre[0] = centre[1] = mean;
                factor[0] = factor[1] = 1.0f / deviation;
                patch_operand(patches, 0, values, sequence, patch, centre, factor, x, at);
                if (late) {
                    break;
                }
                at.sync(); /* the values may be others yet */
            }
            if (x.embed.threshold && h.training && at.q == 0) {
                *embed_masks_at(x, at) = embed_bits;
            }
            if (at.lane == 0 && at.tile == 0 && group * x.block_units + at.unit < x.units) {
                x.embed.mean[group * x.block_units + at.unit] = mean;
                x.embed.std[group * x.block_units + at.unit] = deviation;
            }
            embed_product<true, T>(before, patches, u, weight, embed_bits >> at.q, values, sequence, patch, centre, factor, x, at);
            if (!first) {
                at.sync(); /* the values have been read */
            }
        } else {
            draw();
            if (first) {
                ps_grid_begin();
            }
        }
        if constexpr (EMBED) {
        } else if (h.layer > 0) {
            take_stream(before, stream_at(h, h.layer - 1, SLOT_SUM_2, at), at);
        } else {
            load_rows(u, (const T *)x.u, at);
            pack_operand<T>(before, u[0], u[1]);
        }
        if (first && h.layer > 0) {
            begin_forward(c, x, h, h.layer - 1, NORM_2, norm, scratch);
        } else if (first) {
            ps_copy_wait();
            __syncthreads();
        }
        const auto normalise = [&]() { /* u, twice: it need not be kept meanwhile */
                                       unpack_operand<T>(u, before);
                                       if (h.layer > 0) {
                                           affine(u, c.scale, c.shift, at.q);
                                       }
        };
        normalise();
        if (x.threshold) {
            *halves_masks_at(x, h, MASKS_O, tile, at.lane) = bits;
        }
        pack_operand<T>(a, u[0], u[1]);
        project_heads<T>(q, a, w, x.scale_log2e, rows.own, at, [&](int part, const uint32_t(&operand)[4]) {
            if (part < 2 || h.training) {
                leave_operand(slot_at(h, h.layer, SLOT_Q + part, tile, at.lane), operand);
            }
        });
        at.sync();
        if constexpr (TILES == ANY_TILES) {
            attention(a, logs, q, rows.all, rows.own - at.tile * 2 * KV_ROW + 2 * MATRIX, rows.below, last, x, at);
        } else {
            attention(a, logs, q, rows.all, rows.below, last, x.n, at);
        }
        if (h.training) {
            leave_operand(slot_at(h, h.layer, SLOT_MERGED, tile, at.lane), a);
            if (TILES == ANY_TILES || at.q % 2 == 0) {
                *(float4 *)slot_at(h, h.layer, SLOT_LOGS, tile, at.lane) = make_float4(logs[0], logs[1], logs[2], logs[3]);
            }
        }
        project16(y, a, w.w_o, LD, w.b_o, at);
        normalise();
        add_kept(u, y, bits, x.drop_scale);
        leave_stream<T>(stream_at(h, h.layer, SLOT_SUM_1, at), u, at);
        add_moments(sums, u, c, at);
    }
    if (h.training) {
        leave_sums(h, sums, scratch);
    }
}

/* r + drop(drop(activation(r W_1 + b_1)) W_2 + b_2), r what norm 1 gives. Before the wait:
 * parameters and the masks. */
template <class T, enum ps_activation ACTIVATION>
static __global__ void __launch_bounds__(HIDDEN_WARPS * 32)
    halves_hidden(const __grid_constant__ encoder<T> x, const __grid_constant__ struct halves h)
{
    extern __shared__ uint4 shared_memory[];
    const halves_hidden_weights<T> w((char *)shared_memory, x.f);
    struct halves_columns &c = *(struct halves_columns *)((char *)shared_memory + halves_hidden_bytes(x.f));
    union halves_scratch &scratch = *(union halves_scratch *)(&c + 1);
    tile_place<T> at;
    uint32_t *const words = hidden_words(shared_memory, x.f, at.lane);
    stage_hidden(w, x, h.layer);
    const uint64_t step = step_of(x, x.threshold || h.hidden_threshold);
    const struct halves_norm norm = look_forward(x, h, h.layer, NORM_1);
    set_pivot(c, x, h.layer, NORM_2);
    const float scale = h.hidden_scale / d16_times(ACTIVATION);
    struct halves_sums sums;
    for (int group = (int)blockIdx.x; group * ((int)blockDim.x / 32) < h.row_tiles; group += (int)gridDim.x) {
        const bool first = group == (int)blockIdx.x;
        const int tile = take_tile(at, x, group);
        const uint32_t row = x.rows_before + (uint32_t)at.first;
        uint32_t a[4], bits = 0xffffffffu;
        float r[2][4], y[2][4];
        if (h.hidden_threshold) {
            const uint4 site = ps_draws_begin(x.keys, x.site + 3 * h.layer + 1, step);
#pragma unroll 1
            for (int half = 0; half < x.f / 64; half++) {
                words[half * 32] = draw_hidden(x, h.hidden_below, h.hidden_minus_below, site, row, x.f, half, at.q);
            }
        }
        if (x.threshold) {
            bits = draw_masks(x, step, x.site + 3 * h.layer + 2, (row + at.q / 2 * 8) * (D / 8) + at.q % 2, at.q) >> at.q;
            settle(bits);
        }
        if (first) {
            ps_grid_begin();
        }
        take_stream(a, stream_at(h, h.layer, SLOT_SUM_1, at), at);
        if (first) {
            begin_forward(c, x, h, h.layer, NORM_1, norm, scratch);
        }
        unpack_operand<T>(r, a);
        affine(r, c.scale, c.shift, at.q);
        pack_operand<T>(a, r[0], r[1]);
        clear(y);
#pragma unroll 1
        for (int half = 0; half < x.f / 64; half++) {
            if (h.hidden_threshold) {
                const uint32_t word = words[half * 32];
                *halves_masks_at(x, h, MASKS_HIDDEN + half, tile, at.lane) = word;
                feed_forward<true, ACTIVATION>(y, a, word, w.columns(half), at);
            } else {
                feed_forward<false, ACTIVATION>(y, a, 0, w.columns(half), at);
            }
        }
        finish_hidden(y, w, scale, at);
        if (x.threshold) {
            *halves_masks_at(x, h, MASKS_Y, tile, at.lane) = bits;
        }
        add_kept(r, y, bits, x.drop_scale);
        leave_stream<T>(stream_at(h, h.layer, SLOT_SUM_2, at), r, at);
        add_moments(sums, r, c, at);
    }
    if (h.training) {
        leave_sums(h, sums, scratch);
    }
    if (h.layer == 0 && x.embed.weight && h.training && blockIdx.x == 0 && threadIdx.x == 0) { /* who read it has ended */
        *h.ahead = {step_of(x, x.state) + (x.state ? 1 : 0), step_at(&x.embed.state->cursor) + x.embed.step};
    }
}

/* What the last layer's norm 2 gives, by rows. */
template <class T>
static __global__ void __launch_bounds__(HIDDEN_WARPS * 32)
    halves_output(const __grid_constant__ encoder<T> x, const __grid_constant__ struct halves h)
{
    __shared__ struct halves_columns c;
    __shared__ union halves_scratch scratch;
    tile_place<T> at;
    const struct halves_norm norm = look_forward(x, h, h.layer, NORM_2);
    ps_grid_begin();
    for (int group = (int)blockIdx.x; group * ((int)blockDim.x / 32) < h.row_tiles; group += (int)gridDim.x) {
        take_tile(at, x, group);
        uint32_t a[4];
        float y[2][4];
        take_stream(a, stream_at(h, h.layer, SLOT_SUM_2, at), at);
        if (group == (int)blockIdx.x) {
            begin_forward(c, x, h, h.layer, NORM_2, norm, scratch);
        }
        unpack_operand<T>(y, a);
        affine(y, c.scale, c.shift, at.q);
        store_rows((T *)x.u + x.layers * x.rows * D, y, at);
    }
}

/* ---- evaluation: the running statistics serve, and no rows meet ---- */

/* A layer's norms in shared memory: y = x scale + shift. */
struct halves_factors {
    float scale[2][D], shift[2][D];
};

/* All of a layer there. */
template <class T> struct halves_layer {
    struct halves_factors &norms;
    halves_attention_weights<T> &attention;
    halves_hidden_weights<T> hidden;

    __device__ __forceinline__ halves_layer(char *p, int f)
        : norms(*(struct halves_factors *)p), attention(*(halves_attention_weights<T> *)(&norms + 1)),
          hidden((char *)(&attention + 1), f)
    {
    }
};

template <class T> static __host__ __device__ constexpr int halves_layer_bytes(int f)
{
    return (int)sizeof(struct halves_factors) + (int)sizeof(halves_attention_weights<T>) + halves_hidden_bytes(f);
}

static __host__ __device__ constexpr int halves_evaluation_bytes(int layer, int layers, int unit, int units)
{
    return (layer * layers + 127) / 128 * 128 + unit * units;
}

/* The whole encoder, in the operations of the kernels above. Rows stay in registers, rounded where those leave them; q and k of the
 * layers below stay in shared memory, and so do all parameters, which come before the wait. */
template <class T, int TILES, enum ps_activation ACTIVATION>
static __global__ void __launch_bounds__(halves_warps(TILES) * 32)
    halves_evaluation(const __grid_constant__ encoder<T> x, const __grid_constant__ struct halves h)
{
    extern __shared__ uint4 shared_memory[];
    char *const memory = (char *)shared_memory;
    const int layer_bytes = halves_layer_bytes<T>(x.f), unit_bytes = halves_keys_bytes(TILES, h.residual ? x.layers - 1 : 0);
    place<T, D, TILES> at;
    for (int l = 0; l < x.layers; l++) {
        const halves_layer<T> w(memory + l * layer_bytes, x.f);
        stage_attention(w.attention, x, l);
        stage_hidden(w.hidden, x, l);
    }
    for (int i = (int)threadIdx.x; i < x.layers * 2 * D; i += (int)blockDim.x) {
        const int l = i / (2 * D), norm = i / D % 2, column = i % D;
        const float gamma = __ldcg(x.parameters + vector_at(x, norm == NORM_2 ? x.at.ln2_gamma : x.at.ln1_gamma, l) + column);
        const float beta = __ldcg(x.parameters + vector_at(x, norm == NORM_2 ? x.at.ln2_beta : x.at.ln1_beta, l) + column);
        const float mean = __ldcg(running_of(x, h, l, 2 * norm, column));
        const float scale = gamma * rsqrtf(__ldcg(running_of(x, h, l, 2 * norm + 1, column)) + x.epsilon);
        const halves_layer<T> w(memory + l * layer_bytes, x.f);
        w.norms.scale[norm][column] = scale;
        w.norms.shift[norm][column] = fmaf(-mean, scale, beta);
    }
    float *const values = (float *)(memory + halves_evaluation_bytes(layer_bytes, x.layers, unit_bytes, at.unit));
    halves_rows<TILES> rows(ps_shared_address(values), 0, at);
    const float hidden_scale = 1.0f / d16_times(ACTIVATION);
    uint32_t last[2];
    last_keys(last, ps_one<T>, x.n, at);
    for (int group = (int)blockIdx.x; group * x.block_units < (int)x.units; group += (int)gridDim.x) {
        const bool first = group == (int)blockIdx.x;
        at.take(x, group * x.block_units + at.unit);
        float u[2][4];
        uint32_t stream[4]; /* what the layer's first norm, or the embedding, is of */
        if (first) {
            ps_grid_begin();
        }
        if (x.embed.weight) {
            if (!first) {
                at.sync(); /* the unit before has been read */
            }
            embed_unit<false>(stream, values, x, group * x.block_units + at.unit, 0, at);
        } else {
            load_rows(u, (const T *)x.u, at);
            pack_operand<T>(stream, u[0], u[1]);
        }
        if (first) {
            ps_copy_wait();
            __syncthreads();
        }
#pragma unroll 1
        for (int l = 0; l < x.layers; l++) {
            const halves_layer<T> w(memory + l * layer_bytes, x.f);
            const struct halves_factors &before = *(const struct halves_factors *)(memory + (l > 0 ? l - 1 : 0) * layer_bytes);
            uint32_t a[4], q[4];
            float y[2][4], logs[4];
            rows.below.count = h.residual ? l : 0;
            const auto normalise = [&]() {
                unpack_operand<T>(u, stream);
                if (l > 0) {
                    affine(u, before.scale[NORM_2], before.shift[NORM_2], at.q);
                }
            };
            /* As leave_stream does. */
            const auto round = [&]() {
                pack_operand<T>(stream, u[0], u[1]);
                clear_missing(stream, at);
            };
            const auto leave_below = [&](uint32_t to, const uint32_t(&operand)[4]) {
                uint32_t left[4];
                copy_operand(left, operand);
                clear_missing(left, at);
                ps_stmatrix4_at(to + l * rows.piece_bytes, left);
            };
            const bool is_read = h.residual && l + 1 < x.layers; /* by layers above */
            if (!first || l > 0) {
                at.sync(); /* the unit, or the layer, before has been read */
            }
            normalise();
            pack_operand<T>(a, u[0], u[1]);
            project_heads<T>(q, a, w.attention, x.scale_log2e, rows.own, at, [&](int part, const uint32_t(&operand)[4]) {
                if (part == 1 && is_read) {
                    leave_below(rows.below.own, q);
                    leave_below(rows.below.own + PIECE_KEYS, operand);
                }
            });
            at.sync();
            attention(a, logs, q, rows.all, rows.below, last, x.n, at);
            project16(y, a, w.attention.w_o, LD, w.attention.b_o, at);
            normalise();
            add_kept(u, y, 0xffffffffu, 1.0f);
            round();
            unpack_operand<T>(u, stream);
            affine(u, w.norms.scale[NORM_1], w.norms.shift[NORM_1], at.q);
            pack_operand<T>(a, u[0], u[1]);
            clear(y);
#pragma unroll 1
            for (int half = 0; half < x.f / 64; half++) {
                feed_forward<false, ACTIVATION>(y, a, 0, w.hidden.columns(half), at);
            }
            finish_hidden(y, w.hidden, hidden_scale, at);
            add_kept(u, y, 0xffffffffu, 1.0f);
            round();
        }
        const halves_layer<T> top(memory + (x.layers - 1) * layer_bytes, x.f);
        unpack_operand<T>(u, stream);
        affine(u, top.norms.scale[NORM_2], top.norms.shift[NORM_2], at.q);
        store_rows((T *)x.u + x.layers * x.rows * D, u, at);
    }
}

} // namespace ps_resident

#endif
