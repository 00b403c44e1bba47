/* What attention/tiled.cu, attention/warp_float.cu and attention/warp_fp16.cu share. */
#ifndef PS_KERNELS_CUDA_ATTENTION_CUH
#define PS_KERNELS_CUDA_ATTENTION_CUH

#include "kernels/cuda/context.cuh"

/* The most patches, and columns of a head. */
enum { PS_ATTENTION_PATCHES = 1024, PS_ATTENTION_HEAD = 64 };

/* A tensor [S, h, N, e], its last stride 1. */
struct ps_attention_view {
    char *data;
    int64_t sequence, head, row; /* strides */
};

struct ps_attention_launch {
    struct ps_attention_view mixed, q, k, v, dq, dk, dv, d_mixed;
    float *logsum, *delta; /* [S, h, N]; of backward: sum over e of d_mixed mixed */
    int64_t matrices;      /* S h, at most 2^31 */
    int heads, patches, e, tiles;
    float scale;
    bool wide;  /* every row begins at a multiple of 16 bytes and is as long */
    bool pairs; /* every row begins at a multiple of two elements, rows follow one another, and e is even */
};

/* attention/warp_float.cu: float32, short sequences of narrow heads. exact: as good as float32's own products, else tf32. */
int ps_cuda_attention_small_wanted(const struct ps_attention_launch *x);
enum ps_status ps_cuda_attention_small(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch *x,
                                       bool backward, bool exact);

/* attention/warp_fp16.cu: tf32 with q, k, v and mixed of fp16, short sequences, heads of 8 or 16. */
int ps_cuda_attention_half_wanted(const struct ps_attention_launch *x, bool backward);
enum ps_status ps_cuda_attention_half(const struct ps_cuda_context *c, const char *op, const struct ps_attention_launch *x,
                                      bool backward);

#endif
