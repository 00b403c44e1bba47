/* What the levels' files share: one layer as descriptors, made for each call from the model. Private to model/. */
#ifndef PS_MODEL_LAYER_H
#define PS_MODEL_LAYER_H

#include "kernels/exchange.h"
#include "model/cache.h"

#define PS_NORM_EPSILON 1e-5 /* of every norm */
#define PS_BATCHNORM_MOMENTUM 0.1

/* What the kernel that wrote the stream's gradient has left besides, of the backward so far. */
struct ps_gradient_notes {
    int means;  /* of the norm that is next on the way down, in shared->norm_means */
    int masked; /* the gradient, dropped out as the branch that is next wants it, in shared->masked */
    int summed; /* and that into the branch's bias's gradient */
};

/* k->beside, where anything can run beside something. */
static inline enum ps_status ps_beside(const struct ps_kernels *k, enum ps_beside what)
{
    return k->beside ? k->beside(k, what) : PS_OK;
}

/* Its END behind what ended with `status`: the first error of both. */
static inline enum ps_status ps_beside_end(const struct ps_kernels *k, enum ps_status status)
{
    const enum ps_status ended = ps_beside(k, PS_BESIDE_END);
    return status == PS_OK ? ended : status;
}

/* Work that is begun later than it is known of. */
struct ps_work {
    enum ps_status (*run)(void *argument);
    void *argument;
};

/* One of a layer's two norms. */
struct ps_layer_norm {
    struct ps_tensor gamma, beta, d_gamma, d_beta; /* [d]; RMSNorm has no beta */
    struct ps_tensor mean, spread;                 /* as the cache's */
    struct ps_tensor running_mean, running_var;    /* BatchNorm's [d] */
    double momentum;                               /* and how far they move */
    struct ps_tensor x, y;                         /* what it reads and gives [R, d] */
    void *xhat;                                    /* level none's */
};

/* BatchNorm whose batch ranks share. */
struct ps_together {
    struct ps_exchange *exchange;
    struct ps_tensor parts, mine; /* [ranks, 2, d], [2, d]: means and variances */
    struct ps_shares shares;
    int64_t rows; /* of a window */
};

struct ps_layer {
    const struct ps_kernels *k;
    int64_t S, N, R, d, h, f, inner; /* as in docs/design.md section 3; columns of W_1: f, of swiglu 2f */
    int64_t e, a;                    /* columns that a head lies in, d / h or padded; of q, of k and of v: h e */
    double scale;                    /* of scores: 1 / sqrt(d / h) */
    int64_t index;                   /* from the bottom */
    int first, last;                 /* of the encoder */
    int training;
    const struct ps_layer_cache *cache, *lowest, *below; /* the layer's, the first layer's, the one's below or NULL */
    int *slope_kept;                                     /* the layer's cache's */
    const struct ps_shared_cache *shared;
    struct ps_tensor u, y;                        /* input, output [R, d] */
    struct ps_tensor weight[PS_LAYER_PARAMETERS]; /* those of products from model->weights, the others from model->parameters */
    struct ps_tensor gradient[PS_LAYER_PARAMETERS];
    struct ps_tensor statistics[PS_LAYER_STATISTICS]; /* BatchNorm's running ones [d] */
    struct ps_tensor angles;                          /* RoPE's [N, e]; absent without */
    /* Of softmax's weights; after W_o; of hidden columns; after W_2. */
    struct ps_dropout weights_dropout, attention_dropout, hidden_dropout, output_dropout;
    enum ps_norm norm;
    enum ps_norm_place norm_place;
    enum ps_activation activation;
    int residual_attention;
    int merge_qkv, epilogue, tiled_attention, feed_forward;
    int strided_heads;                /* products of attention take q, k, v and what they mix by row */
    struct ps_together together;      /* exchange NULL: the batch is this rank's alone */
    int folded;                       /* BatchNorms are folded into the weights behind them, but the last layer's second */
    int gradients_wait;               /* those of weights may, as later_sums says */
    int gradients_together;           /* the gradients of a layer's weights, and their biases with them, are asked for at once */
    struct ps_gradient_notes *notes;  /* backward's */
    struct ps_work *beside_attention; /* of backward, begun where attention's begins; NULL: none */
    int *normed;                      /* forward's: whoever wrote what the layer reads has normalised it for norm 1 too */
    struct ps_layer_norm above_norm1; /* pre-norm's, of the layer above; absent of the last */
    /* Of the layer below, which is absent of the first: post-norm's norm 2; for backward, output_dropout and b_2's gradient. */
    struct ps_layer_norm below_norm2;
    struct ps_dropout below_dropout;
    struct ps_tensor below_db_2;
};

enum ps_norm_number { PS_NORM_1, PS_NORM_2 };
struct ps_layer_norm ps_layer_norm_of(const struct ps_layer *layer, enum ps_norm_number number);
struct ps_tensor ps_layer_norm_means(const struct ps_layer *layer); /* [2, d] */
struct ps_tensor ps_layer_half(struct ps_tensor both, int which);   /* the first or second [d] of [2, d] */
void *ps_layer_masked_o(const struct ps_layer *layer);              /* where W_o's masked gradient lies */
/* y = norm(x). known: BatchNorm's statistics of x are in the cache, of whoever wrote x. */
enum ps_status ps_norm_forward(const struct ps_layer *layer, enum ps_norm_number number, struct ps_tensor y, struct ps_tensor x,
                               int known);
/* Whether BatchNorm's statistics are those of several ranks' rows. */
int ps_norm_is_shared(const struct ps_layer *layer);
/* BatchNorm's statistics of x into the cache, and the running ones moved. */
enum ps_status ps_norm_statistics(const struct ps_layer *layer, const struct ps_layer_norm *norm, struct ps_tensor x);
/* Where ranks share the batch: those that ps_norm_mine gave were this rank's, and become those of all. */
enum ps_status ps_norm_join(const struct ps_layer *layer, const struct ps_layer_norm *norm);
struct ps_layer_norm ps_norm_mine(const struct ps_layer *layer, const struct ps_layer_norm *norm);
/* What a rank without rows does in place of a norm's forward, and of its backward. */
enum ps_status ps_norm_attend(const struct ps_layer *layer, enum ps_norm_number number);
enum ps_status ps_norm_attend_backward(const struct ps_layer *layer);
/* The backward of pre-norm's meeting of stream and branch: gradient = before + norm'(branch); gradient may be before. branch is
 * scratch. `next`: dropout of the branch below; its notes say whether the gradient was masked by it too. */
enum ps_status ps_norm_join_pre(const struct ps_layer *layer, enum ps_norm_number number, struct ps_tensor gradient,
                                struct ps_tensor before, struct ps_tensor branch, struct ps_dropout next);
/* A norm of rows' backward, dx = norm'(dy) + addend, as the operation takes it: masked by `next` for the branch that is next, with
 * its bias's gradient. And notes that it has been done. */
struct ps_layernorm_backward ps_norm_backward_of(const struct ps_layer *layer, enum ps_norm_number number, struct ps_tensor dx,
                                                 struct ps_tensor dy, struct ps_tensor addend, struct ps_dropout next);
void ps_norm_note(const struct ps_layer *layer, const struct ps_layernorm_backward *done);
/* And of post-norm's: gradient = norm'(before + branch), likewise; branch absent: norm'(gradient). */
enum ps_status ps_norm_join_post(const struct ps_layer *layer, enum ps_norm_number number, struct ps_tensor gradient,
                                 struct ps_tensor before, struct ps_tensor branch, struct ps_dropout next);

/* Row-major descriptors of the layer's real buffers. */
struct ps_tensor ps_layer_rows(const struct ps_layer *layer, void *buffer, int64_t columns); /* [R, columns] */
struct ps_tensor ps_layer_heads(const struct ps_layer *layer, void *buffer, int64_t parts);  /* [parts, S, h, N, e] */
struct ps_tensor ps_layer_head(const struct ps_layer *layer, void *buffer, int64_t part);    /* [S*h, N, e] of one part */
struct ps_tensor ps_layer_head_rows(const struct ps_layer *layer, void *buffer, int64_t columns,
                                    int64_t part); /* [S, h, N, e] of rows [R, columns], whose part's a columns hold the heads */
struct ps_tensor ps_layer_head_statistics(const struct ps_layer *layer, void *buffer); /* [S, h, N] */
struct ps_tensor ps_layer_attention(const struct ps_layer *layer, void *buffer);       /* [S*h, N, N] */
struct ps_tensor ps_layer_statistics(const struct ps_layer *layer, void *buffer);      /* [R] */

struct ps_model;
/* What layer `layer` reads and the one below it writes; layer n_layers: what the head reads. [R, d] for `batch` windows. */
struct ps_tensor ps_model_stream(const struct ps_model *m, int64_t layer, int64_t batch);

/* Turns q and k of rows [R, 3a] in place, when the model has RoPE; inverse: their gradients. */
enum ps_status ps_layer_rope(const struct ps_layer *layer, struct ps_tensor rows, int inverse);

/* c = alpha a b + beta c. */
enum ps_status ps_product(const struct ps_kernels *k, struct ps_tensor c, struct ps_tensor a, struct ps_tensor b, double alpha,
                          double beta);
/* The transpose of the last two dimensions. */
struct ps_tensor ps_transposed(struct ps_tensor t);

/* The kernels' own name of the way that attention by tiles takes; NULL where they have one way. */
const char *ps_layer_attention_way(const struct ps_layer *layer);
enum ps_status ps_layer_gemm_forward(const struct ps_layer *layer);
enum ps_status ps_layer_gemm_backward(const struct ps_layer *layer);
enum ps_status ps_layer_none_forward(const struct ps_layer *layer);
enum ps_status ps_layer_none_backward(const struct ps_layer *layer);

#endif
