/* What the levels' files share: one layer as descriptors, made for each call from the model. Private to model/. */
#ifndef PS_MODEL_LAYER_H
#define PS_MODEL_LAYER_H

#include "model/cache.h"

#define PS_LAYERNORM_EPSILON 1e-5

struct ps_layer {
    const struct ps_kernels *k;
    int64_t S, N, R, d, h, e, f; /* as in docs/design.md section 3 */
    const struct ps_layer_cache *cache;
    const struct ps_shared_cache *shared;
    struct ps_tensor u, y;                        /* input, output [R, d] */
    struct ps_tensor weight[PS_LAYER_PARAMETERS]; /* those of products from model->weights, the others from model->parameters */
    struct ps_tensor gradient[PS_LAYER_PARAMETERS];
    struct ps_dropout attention_dropout, hidden_dropout, output_dropout; /* after W_o; after gelu; after W_2 */
    int merge_qkv, epilogue, tiled_attention;
};

/* Row-major descriptors of the layer's real buffers. */
struct ps_tensor ps_layer_rows(const struct ps_layer *layer, void *buffer, int64_t columns); /* [R, columns] */
struct ps_tensor ps_layer_heads(const struct ps_layer *layer, void *buffer, int64_t parts);  /* [parts, S, h, N, e] */
struct ps_tensor ps_layer_head(const struct ps_layer *layer, void *buffer, int64_t part);    /* [S*h, N, e] of one part */
struct ps_tensor ps_layer_head_rows(const struct ps_layer *layer, void *buffer, int64_t columns,
                                    int64_t part); /* [S, h, N, e] of rows [R, columns], whose part's d columns hold the heads */
struct ps_tensor ps_layer_head_statistics(const struct ps_layer *layer, void *buffer); /* [S, h, N] */
struct ps_tensor ps_layer_attention(const struct ps_layer *layer, void *buffer);       /* [S*h, N, N] */
struct ps_tensor ps_layer_statistics(const struct ps_layer *layer, void *buffer);      /* [R] */

struct ps_model;
/* What layer `layer` reads and the one below it writes; layer n_layers: what the head reads. [R, d] for `batch` windows. */
struct ps_tensor ps_model_stream(const struct ps_model *m, int64_t layer, int64_t batch);

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
