/* What the ways of attention share; attention/choose.cu chooses. */
#ifndef PS_KERNELS_CUDA_ATTENTION_CUH
#define PS_KERNELS_CUDA_ATTENTION_CUH

#include "kernels/cuda/context.cuh"

/* The most patches, and columns of a head, in fp32 and tf32; columns of a head in 16 bits. Queries and keys of a tile of
 * attention/tiled.cu. */
enum { PS_ATTENTION_PATCHES = 1024, PS_ATTENTION_HEAD = 64, PS_ATTENTION_HEAD16 = 128, PS_ATTENTION_TILE = 64 };

/* A tensor [S, h, N, e], its last stride 1. */
struct ps_attention_view {
    char *data;
    int64_t sequence, head, row; /* strides */
    int64_t piece;               /* from piece to piece of a head's columns */
};

/* What kernels are told. */
struct ps_attention_launch {
    struct ps_attention_view mixed, q, k, v, dq, dk, dv, d_mixed;
    float *logsum, *delta; /* [S, h, N]; of backward: sum over e of d_mixed mixed */
    int64_t matrices;      /* S h, at most 2^31 */
    int heads, patches, tiles;
    int e, pieces, columns; /* of v and mixed, and of a piece of q and k; pieces of these; their columns, e pieces */
    bool accumulate;        /* dq and dk are += */
    float scale;
    int unit;   /* bytes, at most 16: every row begins at a multiple of them and is as long */
    bool pairs; /* every row begins at a multiple of two elements, rows follow one another, and e is even */
};

struct ps_attention_call {
    struct ps_attention_launch x;
    bool backward; /* dq, dk, dv and d_mixed are there */
};

/* ---- the ways, a file each ----
 *
 * _wanted: whether the way takes the call, from the table's precision, shape and layout alone; no GPU is asked. */
typedef enum ps_status ps_attention_function(const struct ps_kernels *k, const char *op, const struct ps_attention_call *call);

/* attention/warp_float.cu: float32, short sequences of narrow heads. */
bool ps_cuda_attention_warp_float_wanted(const struct ps_kernels *k, const struct ps_attention_call *call);
ps_attention_function ps_cuda_attention_warp_float, ps_cuda_attention_warp_float_backward;

/* attention/short16.cu: 16 bits, short sequences. */
bool ps_cuda_attention_short16_wanted(const struct ps_kernels *k, const struct ps_attention_call *call);
ps_attention_function ps_cuda_attention_short16, ps_cuda_attention_short16_backward;

/* attention/long16.cu: 16 bits, the other sequences. */
bool ps_cuda_attention_long16_wanted(const struct ps_kernels *k, const struct ps_attention_call *call);
ps_attention_function ps_cuda_attention_long16, ps_cuda_attention_long16_backward;

/* attention/tiled.cu: fp32 and tf32. */
bool ps_cuda_attention_tiled_wanted(const struct ps_kernels *k, const struct ps_attention_call *call);
ps_attention_function ps_cuda_attention_tiled, ps_cuda_attention_tiled_backward;

#endif
