/* The activation cache: one allocation made before the first step and never again. The lists below are its tables: every buffer
 * with its level, its elements, its type and, in the comment, its shape. Sizes as in docs/design.md section 3, for the largest
 * batch; a smaller batch uses the beginning of each buffer. */
#ifndef PS_MODEL_CACHE_H
#define PS_MODEL_CACHE_H

#include "model/parameters.h"

/* How a layer runs (runtime.fusion). */
enum ps_level { PS_LEVEL_NONE = 1, PS_LEVEL_GEMM = 2, PS_LEVEL_LAYER = 4 };
const char *ps_level_name(enum ps_level level); /* "none", "gemm", "layer" */

/* Added to PS_LEVEL_GEMM for the cache of tiled attention, which has no scores and reads q, k, v by row. */
enum { PS_LEVEL_TILED = 8 };
/* Or for that of products that read and write heads in their rows. */
enum { PS_LEVEL_STRIDED = 32 };
/* And for that of a feed-forward in one operation each way, which keeps no hidden columns. */
enum { PS_LEVEL_FED = 16 };
/* And for that of a BatchNorm which is folded into the weights that read it. */
enum { PS_LEVEL_FOLDED = 64 };
/* And for that of heads that lie in more columns than they have: in ps_padded_head. */
enum { PS_LEVEL_PADDED = 128 };

enum { PS_LEVEL_BOTH = PS_LEVEL_NONE | PS_LEVEL_GEMM, PS_LEVEL_ALL = PS_LEVEL_BOTH | PS_LEVEL_LAYER };

/* Once a layer: what backward needs again. X(name, levels, elements, type). a: the columns of q, of k and of v, h e, which are d
 * but of padded heads. Statistics of a norm: `means` and `spreads` are [R], or
 * of BatchNorm [d]; RMSNorm has no means. */
#define PS_LAYER_BUFFERS(X)                                                                                      \
    X(norm1_spread, PS_LEVEL_BOTH, spreads, statistics) /* rstd [R]; of BatchNorm the variance [d] */            \
    X(norm1_mean, PS_LEVEL_BOTH, means, statistics)     /* [R] or [d] */                                         \
    X(norm1_xhat, PS_LEVEL_NONE, R *d, real)            /* (norm 1's input - mean) rstd [R, d] */                \
    X(norm1_out, PS_LEVEL_BOTH, R *d, real)             /* what norm 1 gives [R, d] */                           \
    X(heads, PS_LEVEL_BOTH, 3 * R * a, real)            /* q, k, v [3, S, h, N, e]; or by row [R, 3a] */         \
    X(attention, PS_LEVEL_BOTH, scores, real)           /* A [S, h, N, N]; not when tiled */                     \
    X(logsum, PS_LEVEL_TILED, S *h *N, statistics)      /* tiled: log of the softmax's sums [S, h, N] */         \
    X(merged, PS_LEVEL_BOTH, R *a, real)                /* A v, heads merged [R, a] */                           \
    X(residual, PS_LEVEL_BOTH, R *d, real)              /* u + attention's branch [R, d] */                      \
    X(norm2_spread, PS_LEVEL_BOTH, spreads, statistics) /* as norm 1's */                                        \
    X(norm2_mean, PS_LEVEL_BOTH, means, statistics)                                                              \
    X(norm2_xhat, PS_LEVEL_NONE, R *d, real)                                                                     \
    X(norm2_out, PS_LEVEL_BOTH, pre, real)         /* what norm 2 gives [R, d]; post-norm: the stream has it */  \
    X(sum, PS_LEVEL_BOTH, post, real)              /* post-norm: norm 2's input [R, d] */                        \
    X(hidden_in, PS_LEVEL_BOTH, wide *inner, real) /* gemm: W_1's product, or the slope; none: with b_1 too */   \
    X(hidden_curve, PS_LEVEL_NONE, R *f, real)     /* gelu's tanh or erf, the sigmoid of swiglu's gate [R, f] */ \
    X(hidden, PS_LEVEL_BOTH, wide *f, real)        /* drop(activation(..)) [R, f] */                             \
    X(folded_b_1, PS_LEVEL_FOLDED, f, parameter)   /* b_1 with norm 1 in it [f] */

/* Once a model: embedding, head, and scratch that every layer uses in turn. */
#define PS_SHARED_BUFFERS(X)                                                                                                   \
    X(patches, PS_LEVEL_ALL, R *P, real)                    /* [R, P] */                                                       \
    X(normalised, PS_LEVEL_ALL, affine *R *P, real)         /* the same before RevIN's affine [R, P] */                        \
    X(d_patches, PS_LEVEL_ALL, affine *R *P, real)          /* their gradient [R, P] */                                        \
    X(d_affine, PS_LEVEL_ALL, affine * 2 * C, parameter)    /* a frozen affine's gradients, read by none [2, C] */             \
    X(revin_mean, PS_LEVEL_ALL, S, statistics)              /* [S] */                                                          \
    X(revin_std, PS_LEVEL_ALL, S, statistics)               /* [S] */                                                          \
    X(targets, PS_LEVEL_ALL, targets, parameter)            /* [S, H]; of a model that reconstructs [R, P] */                  \
    X(stream, PS_LEVEL_ALL, (layers + 1) * R * d, real)     /* what each layer reads, and the head [layers + 1, R, d] */       \
    X(head_in, PS_LEVEL_ALL, head_dropout *R *d, real)      /* what the head reads, dropped out [S, N d] */                    \
    X(head_out, PS_LEVEL_ALL, outputs, parameter)           /* head product, before bias and denormalising [S, QH]; [R, P] */  \
    X(d_head_out, PS_LEVEL_ALL, outputs, real)              /* its gradient */                                                 \
    X(head_partials, PS_LEVEL_ALL, groups *(H + 1), PS_F64) /* of the loss and b_h's gradient [rows, H + 1] */                 \
    X(gradient, PS_LEVEL_ALL, R *d, real)                   /* dy on the way down, du after a layer [R, d] */                  \
    X(masked, PS_LEVEL_BOTH, R *d, real)                    /* drop'(dy), or dy between a layer's branches [R, d] */           \
    X(norm_means, PS_LEVEL_GEMM, 2 * d, statistics)         /* of a BatchNorm's backward: of g and of g xhat [2, d] */         \
    X(masked_o, PS_LEVEL_GEMM, together *R *d, real)        /* the same of W_o's, while W_2's is needed [R, d] */              \
    X(branch, PS_LEVEL_BOTH, R *a, real)                    /* gradient inside a layer's branch [R, d or a] */                 \
    X(rows, PS_LEVEL_BOTH, 3 * R * a * slots,                                                                                  \
      real)                              /* q, k, v by row; their gradients [R, 3a], of residual attention by tiles a layer */ \
    X(mixed, PS_LEVEL_BOTH, split, real) /* A v; its gradient [S, h, N, e]; not by row */                                      \
    X(d_heads, PS_LEVEL_BOTH, 3 * split, real)                      /* [3, S, h, N, e]; not by row */                          \
    X(d_attention, PS_LEVEL_BOTH, scores, real)                     /* [S, h, N, N]; not when tiled */                         \
    X(scores, PS_LEVEL_BOTH, residual *scores, real)                /* residual attention: the sum so far [S, h, N, N] */      \
    X(d_scores, PS_LEVEL_BOTH, residual *scores, real)              /* its gradient [S, h, N, N] */                            \
    X(dropped, PS_LEVEL_BOTH, weights_dropout *scores, real)        /* drop(A) [S, h, N, N] */                                 \
    X(delta, PS_LEVEL_TILED, S *h *N, statistics)                   /* tiled: of attention_backward [S, h, N] */               \
    X(d_hidden, PS_LEVEL_BOTH, wide *f, real)                       /* [R, f] */                                               \
    X(d_hidden_in, PS_LEVEL_BOTH, wide *(inner - f) * 2, real)      /* of swiglu [R, 2f] */                                    \
    X(folded_w, PS_LEVEL_FOLDED, d *PS_LARGER(3 * a, f), real)      /* W_qkv or W_1 with the norm before in it [d, 3a or f] */ \
    X(folded_b_qkv, PS_LEVEL_FOLDED, 3 * a, parameter)              /* [3a] */                                                 \
    X(norm1_lines, PS_LEVEL_FOLDED, layers * 2 * d, parameter)      /* norms 1's scale and shift, folded [layers, 2, d] */     \
    X(norm2_lines, PS_LEVEL_FOLDED, layers * 2 * d, parameter)      /* norms 2's */                                            \
    X(folded_dw_qkv, PS_LEVEL_FOLDED, layers *d * 3 * a, parameter) /* gradients in a backward pass, else 0 [layers, d, 3a] */ \
    X(folded_db_qkv, PS_LEVEL_FOLDED, layers * 3 * a, parameter)    /* [layers, 3a] */                                         \
    X(folded_dw_1, PS_LEVEL_FOLDED, layers *d *f, parameter)        /* [layers, d, f] */                                       \
    X(folded_db_1, PS_LEVEL_FOLDED, layers *f, parameter)           /* [layers, f] */                                          \
    X(padded_w_qkv, PS_LEVEL_PADDED, layers *d * 3 * a, real)       /* W_qkv of heads in more columns [layers, d, 3a] */       \
    X(padded_w_o, PS_LEVEL_PADDED, layers *a *d, real)              /* W_o [layers, a, d] */                                   \
    X(padded_b_qkv, PS_LEVEL_PADDED, layers * 3 * a, parameter)     /* [layers, 3a] */                                         \
    X(padded_dw_qkv, PS_LEVEL_PADDED, layers *d * 3 * a, parameter) /* gradients in a backward pass, else 0 */                 \
    X(padded_dw_o, PS_LEVEL_PADDED, layers *a *d, parameter)                                                                   \
    X(padded_db_qkv, PS_LEVEL_PADDED, layers * 3 * a, parameter)                                                               \
    X(sums, PS_LEVEL_GEMM, k->later_sums ? PS_LATER_SUMS : 0, parameter) /* where parts of gradients' sums wait */             \
    X(wide_a, PS_LEVEL_NONE, PS_LARGER(R *f, S *h *N *N), real)          /* elementary temporaries */                          \
    X(wide_b, PS_LEVEL_NONE, PS_LARGER(R *f, S *h *N *N), real)                                                                \
    X(narrow_a, PS_LEVEL_NONE, R *d, real)                                                                                     \
    X(narrow_b, PS_LEVEL_NONE, R *d, real)                                                                                     \
    X(column_a, PS_LEVEL_NONE, R *h, real) /* one number a row of d, or of a head's N */                                       \
    X(column_b, PS_LEVEL_NONE, R *h, real)

#define PS_LARGER(a, b) ((a) > (b) ? (a) : (b))

/* The most rows of the head's partial sums: of groups of sequences, or of an encoder's blocks. */
static inline int64_t ps_partial_rows(int64_t sequences)
{
    int64_t groups = (sequences + PS_PARTIAL_ROWS - 1) / PS_PARTIAL_ROWS;
    int64_t blocks = sequences < PS_PARTIAL_BLOCKS ? sequences : PS_PARTIAL_BLOCKS;
    return PS_LARGER(groups, blocks);
}

struct ps_layer_cache {
#define PS_X(name, levels, elements, type) void *name;
    PS_LAYER_BUFFERS(PS_X)
    int slope_kept; /* what the last forward left in hidden_in is the activation's slope, dropped out */
};

struct ps_shared_cache {
    PS_SHARED_BUFFERS(PS_X)
#undef PS_X
};

struct ps_cache {
    size_t bytes;
    void *memory;
    struct ps_layer_cache *layers;
    struct ps_shared_cache shared;
};

/* The columns that a head of d / h lies in where k has attention by tiles take it so: as many, or more, whose rest is 0. */
int64_t ps_padded_head(const struct ps_kernels *k, const struct ps_model_shape *shape);

/* Bytes that the cache of `batch` windows takes at a level (PS_LEVEL_TILED, .. added or not), in k's types. */
size_t ps_cache_bytes(const struct ps_kernels *k, const struct ps_model_shape *shape, int64_t batch, int levels);
enum ps_status ps_cache_open(const struct ps_kernels *k, const struct ps_model_shape *shape, int64_t batch, int levels,
                             struct ps_cache *cache);
void ps_cache_close(struct ps_device *device, struct ps_cache *cache);
/* The name of the buffer that an address lies in, the same for every layer; NULL: in none. */
const char *ps_cache_name(const struct ps_cache *cache, int64_t layers, const void *address);

#endif
