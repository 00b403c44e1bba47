/* Parameters: one flat buffer with a table of named tensors, the decayed ones first. Gradient, first and second moment share the
 * layout, so clipping, AdamW and checkpointing are each one pass. */
#ifndef PS_MODEL_PARAMETERS_H
#define PS_MODEL_PARAMETERS_H

#include <stdint.h>

#include "kernels/kernels.h"

/* What is computed: the sizes of docs/design.md section 3. */
struct ps_model_shape {
    int64_t channels;          /* C */
    int64_t seq_len, pred_len; /* L, H */
    int64_t patch_len, stride; /* P, S */
    int pad_end;               /* the last value repeated `stride` times */
    int64_t d_model, n_heads, d_ff, n_layers;
    double dropout;
    int revin;
};

/* N: (L - P)/stride + 1, one more with pad_end. */
int64_t ps_patches(const struct ps_model_shape *shape);
/* PS_USAGE naming the value and what would do: sizes that must be positive, d_model % n_heads, patch_len > seq_len, dropout. */
enum ps_status ps_model_shape_check(const struct ps_model_shape *shape);

struct ps_parameter {
    char name[48]; /* e.g. "layers.0.w_qkv" */
    int rank;
    int64_t size[2];
    int64_t offset; /* elements, a multiple of PS_PARAMETER_ALIGN; the gaps stay 0 */
};

enum { PS_PARAMETER_ALIGN = 64 };

/* A layer's tensors in order; all weights are [in, out]. */
enum ps_layer_parameter {
    PS_W_QKV, /* [d, 3d] */
    PS_W_O,   /* [d, d] */
    PS_W_1,   /* [d, f] */
    PS_W_2,   /* [f, d]; the last that a product reads */
    PS_LN1_GAMMA,
    PS_LN1_BETA,
    PS_B_QKV,
    PS_B_O,
    PS_LN2_GAMMA,
    PS_LN2_BETA,
    PS_B_1,
    PS_B_2,
    PS_LAYER_PARAMETERS
};

struct ps_parameters {
    int n; /* tensors */
    struct ps_parameter *table;
    int64_t count;   /* elements of the flat buffer */
    int64_t decayed; /* elements before the first that weight decay leaves alone */
    /* Places in the table. */
    int w_p, b_p, w_pos, w_h, b_h; /* [P, d], [d], [N, d], [N*d, H], [H] */
    int (*layer)[PS_LAYER_PARAMETERS];
};

enum ps_status ps_parameters_layout(const struct ps_model_shape *shape, struct ps_parameters **parameters);
void ps_parameters_free(struct ps_parameters *parameters); /* NULL is fine */

/* torch's nn.Linear: weights and biases U(-1/sqrt(fan_in), 1/sqrt(fan_in)); gamma 1, beta 0; W_pos U(-0.02, 0.02). Element i of
 * tensor t is number i of Philox site PS_SITE_INIT + t, keyed by seed. Host buffer of parameters->count doubles. */
void ps_parameters_initialise(const struct ps_parameters *parameters, uint64_t seed, double *values);

/* Tensor t of a flat buffer of the given type. */
struct ps_tensor ps_parameter_tensor(const struct ps_parameters *parameters, int t, void *flat, enum ps_type type);

#endif
