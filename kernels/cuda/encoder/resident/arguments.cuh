/* What the resident kernels are told. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_ARGUMENTS_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_ARGUMENTS_CUH

#include "kernels/cuda/ops/adamw.cuh"
#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/windows.cuh"

namespace PS_REAL16_SPACE
{

/* A layer's partial sums, all rows of d: W_qkv' [3d], W_o' [d], W_1' [f], W_2 [f]; then b_qkv, b_o, b_1 (one for each of the
 * first 4d + f rows) and b_2 [d]. */
static __host__ __device__ constexpr int layer_sums(int d, int f)
{
    return (4 * d + 2 * f) * d + 5 * d + f;
}

/* The embedding's part of it: encoder/embed.cuh. Forward it is asked for when `weight` is there, backward when `partial` is. */
struct encoder_embedding {
    const ps_real *weight;
    const float *bias, *position;
    ps_real *patches;
    float *mean, *std;
    struct ps_cuda_windows windows;
    const struct ps_step_state *state;
    int length, patch, stride, sequences /* of a unit */, revin;
    uint32_t all; /* S */
    float epsilon;
    struct ps_divisor by_channels, by_length, by_count;
    uint32_t site;
    uint32_t *masks; /* [tiles, d/16, 8] */
    float *partial;  /* [blocks, P + 1 + N, d] */
    float *d_weight, *d_bias, *d_position;
};

/* The head's: encoder/head.cuh. It is asked for when `weight` is there, with the embedding. */
struct encoder_head {
    const ps_real *weight; /* [N d, H] */
    const float *bias;
    struct ps_cuda_windows targets;
    ps_real *dx, *dz;
    double *partials; /* [rows, H + 1] */
    int rows, horizon;
    float scale; /* 2 / (S H) */
    int at;      /* W_h's place in shared memory, bytes */
    /* Backward, encoder/resident/d64_short.cu alone: it is asked for when d_weight is there. */
    float *d_weight, *d_bias;
    float *parts;                /* [jobs, N d, H]: of d_weight */
    struct ps_step_state *state; /* of the loss */
    double loss_scale;           /* B / (S H) */
    int64_t batch;
};

/* AdamW's, encoder/resident/d64_short.cu alone: it is asked for when `parameters` is there. */
struct encoder_update {
    float *parameters, *m;
    double *v;
    ps_real *copy;
    const double *learning_rates;
    struct ps_step_state *state;
    struct ps_adamw_plain plain;
};

/* The residual stream and its gradient in memory. */
#ifdef PS_COMPILE_HALVES
typedef float ps_stream;
#else
typedef ps_real ps_stream;
#endif

/* What the kernels are told. */
struct encoder {
    int n, unit_rows; /* N; rows of a unit that exist: N, or N times the sequences in a tile */
    int e, f, heads, layers;
    int64_t rows, units;       /* R */
    int block_units, resident; /* units a block works on at once; all layers' weights are in shared memory, in
                                * encoder/resident/general_backward_tf32.cuh: how many layers' */
    int staged;                /* columns of f staged at once */
    struct ps_encoder_layout at;
    const ps_real *weights;
    const float *parameters;
    float *gradients;
    ps_stream *u;
    ps_real *r;
    ps_stream *du;
    const ps_stream *dy;
    float *lse;         /* [layers, heads, R]: log2 of softmax's sums */
    float *rstd;        /* encoder/resident/d64_short.cu: [layers, 2, R]: 1 / deviation of LN1's rows, LN2's */
    uint32_t *masks;    /* [layers, tiles, f/16 + 2d/16, 8] */
    int64_t kept_tiles; /* encoder/resident/d16_e4_f128.cu: tiles of a layer that masks has room for */
    float *partial;     /* [blocks, layers, layer_sums]; encoder/resident/d64_short.cu: [layers, pairs, splits, 2, 64, 64] */
    float *norms;       /* [layers, row blocks, 2, d]; encoder/resident/d64_short.cu: [groups of 64 rows, layers, 4, d] */
    unsigned *arrived;  /* [layers, 2]; encoder/resident/d64_short.cu's counters */
    int blocks;
    /* encoder/resident/d16_e4_f128.cu: backward's sums over the blocks, as in partial, of all but the first layer's attention; or
     * NULL. */
    float *summed;
    unsigned *finished; /* [layers, 2]: blocks whose sums of the layer's feed-forward, attention are in memory */
    /* encoder/resident/d64_short.cu alone: */
    int splits; /* of the rows, for weight gradients: groups of 64 in each, and in how many one more */
    int split_groups, split_more;
    uint4 *left;        /* [groups of 64 rows, layers, 5, threads]: what forward's warps leave for backward's; or NULL */
    char *operands;     /* [groups of 64 rows, layers, panels]: what weight gradients are made of */
    unsigned *flags;    /* [layers, groups of 64 rows]: they are there */
    float *column_sums; /* [splits, 2, layers, vectors] */
    float scale, scale_log2e, epsilon; /* scale = 1 / sqrt(e) */
    uint32_t threshold, below, minus_below, site;
    float drop_scale, half_scale; /* 1 without dropout; half of it */
    uint32_t key[10][2];
    const struct ps_step_state *state;
    bool fresh; /* nothing is read before ps_grid_begin: the kernel before may have written weights */
    struct encoder_embedding embed;
    struct encoder_head head;
    struct encoder_update update;
    ps_real *merged; /* encoder/resident/general_backward_tf32.cuh: [layers, R, d]: attention's output before W_o */
};

struct sizes {
    int f, e, staged;
    bool drop;
};

static __device__ __forceinline__ struct sizes sizes_of(const struct encoder &x)
{
    return {x.f, x.e, x.staged, x.threshold != 0};
}

} // namespace PS_REAL16_SPACE

#endif
