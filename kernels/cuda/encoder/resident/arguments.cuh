/* What the resident kernels are told. T is the type of weights, of products' operands and of most of what is in memory, here and in
 * all files beside: ps_bf16 or ps_fp16. */
#ifndef PS_KERNELS_CUDA_ENCODER_RESIDENT_ARGUMENTS_CUH
#define PS_KERNELS_CUDA_ENCODER_RESIDENT_ARGUMENTS_CUH

#include "kernels/cuda/ops/adamw.cuh"
#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile/divide.cuh"
#include "kernels/cuda/tile/dropout.cuh"
#include "kernels/cuda/tile/math.cuh"
#include "kernels/cuda/tile/mma.cuh"
#include "kernels/cuda/tile/windows.cuh"

namespace ps_resident
{

/* A layer's partial sums, all rows of d: W_qkv' [3d], W_o' [d], W_1' [f], W_2 [f]; then b_qkv, b_o, b_1 (one for each of the
 * first 4d + f rows) and b_2 [d]. */
static __host__ __device__ constexpr int layer_sums(int d, int f)
{
    return (4 * d + 2 * f) * d + 5 * d + f;
}

/* The embedding's part of it: encoder/embed.cuh. Forward it is asked for when `weight` is there, backward when `partial` is. */
template <class T> struct encoder_embedding {
    const T *weight;
    const float *bias, *position;
    T *patches;
    float *mean, *std;
    struct ps_cuda_windows windows;
    const struct ps_step_state *state;
    int length, patch, stride, sequences /* of a unit */, revin;
    uint32_t all, step; /* S; windows by which the next step's cursor is expected to be further */
    float epsilon;
    struct ps_divisor by_channels, by_length, by_count;
    uint32_t site, threshold, below, minus_below; /* its own rate of dropout, like the scale */
    float drop_scale;
    uint32_t *masks; /* [tiles, d/16, 8] */
    float *partial;  /* [blocks, P + 1 + N, d] */
    float *d_weight, *d_bias, *d_position;
};

/* The head's: encoder/head.cuh. It is asked for when `weight` is there, with the embedding. */
template <class T> struct encoder_head {
    const T *weight; /* [N d, H] */
    const float *bias;
    struct ps_cuda_windows targets;
    T *dx, *dz;
    double *partials; /* [rows, H + 1] */
    int rows, horizon;
    float scale; /* 2 / (S H) */
    int at;      /* W_h's place in shared memory, bytes */
};

/* encoder/resident/resident.cuh's own. */
template <class T> struct general_arguments {
    int resident; /* all layers' weights are in shared memory */
    int staged;   /* columns of f staged at once */
    T *r;
};

/* encoder/resident/d16_e4_f128.cu's own: what is kept, d16_units.cuh; tiles of a layer that it has room for. */
struct d16_arguments {
    char *kept;
    int64_t tiles;
};

/* What the blocks of both leave of the weights' gradients, and block_sums.cuh adds. */
struct block_sums {
    bool apart;        /* the last kernel of the backward has left those of the first layer's attention, and no others */
    bool plain;        /* the rows that W_qkv and W_1 have read are in them as they are, not LayerNorm's xhat */
    int hidden_blocks; /* of the feed-forward part's and b_2's; `blocks` of all others */
    float *partial;    /* [blocks, layers, layer_sums] */
    float *norms;      /* [layers, row blocks, 2, d] */
    unsigned *arrived; /* [layers, 2] */
    /* d16_backward.cuh's sums over the blocks, as in partial, of all but the first layer's attention; or NULL. */
    float *summed;
    unsigned *finished; /* [layers, 2]: blocks whose sums of the layer's feed-forward, attention are in memory */
};

/* The rest of the head's backward. It is asked for when d_weight is there. */
struct d64_head {
    float *d_weight, *d_bias;
    float *parts;                /* [jobs, N d, H]: of d_weight */
    struct ps_step_state *state; /* of the loss */
    double loss_scale;           /* B / (S H) */
    int64_t batch;
};

/* AdamW's: update.cuh. It is asked for when `parameters` is there. */
template <class T> struct d64_update {
    float *parameters, *m;
    double *v;
    T *copy;
    const double *learning_rates;
    struct ps_step_state *state;
    struct ps_adamw_plain plain;
};

/* encoder/resident/d64_short.cu's own. A group is 64 rows. */
template <class T> struct d64_arguments {
    bool fresh;         /* nothing is read before ps_grid_begin: the kernel before may have written weights */
    float *rstd;        /* [layers, 2, R]: 1 / deviation of LN1's rows, LN2's */
    unsigned *counters; /* d64_panels.cuh */
    unsigned *flags;    /* [layers, groups]: operands are there */
    uint4 *left;        /* [groups, layers, 5, threads]: what forward's warps leave for backward's; or NULL */
    /* The weights' gradients: what they are made of, and the rows' splits: groups in each, and in how many one more. */
    char *operands; /* [groups, layers, panels] */
    int splits, split_groups, split_more;
    float *products;    /* [layers, pairs, splits, 2, 64, 64] */
    float *column_sums; /* [splits, 2, layers, vectors] */
    float *norms;       /* [groups, layers, 4, d] */
    struct d64_head head;
    d64_update<T> update;
};

/* What the kernels are told. */
template <class T> struct encoder {
    int n, unit_rows; /* N; rows of a unit that exist: N, or N times the sequences in a tile */
    int e, f, heads, layers;
    int64_t rows, units;     /* R */
    int blocks, block_units; /* units a block works on at once */
    struct ps_encoder_layout at;
    const T *weights;
    const float *parameters;
    float *gradients;
    void *u, *du; /* of T, but of float where encoder/resident/d64_short.cu serves tf32 */
    const void *dy;
    float *lse;                                                /* [layers, heads, R]: log2 of softmax's sums */
    uint32_t *masks;                                           /* [layers, tiles, f/16 + 2d/16, 8] */
    float scale, scale_log2e, epsilon;                         /* scale = 1 / sqrt(e) */
    uint32_t threshold, below, minus_below, site, rows_before; /* of the batch, where ranks share one: dropout counts them */
    float drop_scale, half_scale;                              /* 1 without dropout; half of it */
    struct ps_round_keys keys;
    const struct ps_step_state *state;
    encoder_embedding<T> embed;
    encoder_head<T> head;
    general_arguments<T> general;
    struct d16_arguments d16;
    struct block_sums sums;
    d64_arguments<T> d64;
};

} // namespace ps_resident

#endif
