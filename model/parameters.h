/* Parameters: one flat buffer with a table of named tensors, the decayed ones first. Gradient, first and second moment share the
 * layout, so clipping, AdamW and checkpointing are each one pass. */
#ifndef PS_MODEL_PARAMETERS_H
#define PS_MODEL_PARAMETERS_H

#include <stdint.h>

#include "kernels/kernels.h"

enum ps_positions { PS_POSITIONS_LEARNED, PS_POSITIONS_SINCOS, PS_POSITIONS_ROPE, PS_POSITIONS_NONE };

/* Where a model drops out: the embedding, softmax's weights, after W_o, hidden columns, after W_2, what the head reads. */
enum ps_dropout_place {
    PS_DROP_EMBEDDING,
    PS_DROP_ATTENTION_WEIGHTS,
    PS_DROP_ATTENTION,
    PS_DROP_HIDDEN,
    PS_DROP_OUTPUT,
    PS_DROP_HEAD,
    PS_DROP_PLACES
};

/* What is computed: the sizes and the variants of docs/design.md section 3. All variants 0: LayerNorm, pre-norm, gelu's tanh form,
 * learned positions, one head for all channels. */
struct ps_model_shape {
    int64_t channels;          /* C */
    int64_t seq_len, pred_len; /* L, H */
    int64_t quantiles;         /* Q, of each step, quantile by quantile: Q H columns of the head; 0: 1, no quantiles */
    int64_t patch_len, stride; /* P, S */
    int pad_end;               /* the last value repeated `stride` times */
    int64_t d_model, n_heads, d_ff, n_layers;
    double dropout; /* the rate of every place but softmax's weights and the head, which have none .. */
    struct {
        int set;
        double rate;
    } dropout_at[PS_DROP_PLACES]; /* .. unless one is set here */
    int revin;
    enum ps_norm norm;
    enum ps_norm_place norm_place;
    enum ps_activation activation;
    enum ps_positions positions;
    int residual_attention; /* a layer's scores are added to those of the layer below it */
    int individual_head;    /* W_h and b_h of each channel's own */
    int revin_affine, revin_subtract_last;
    int patches_from_end; /* rows that fill no patch are left out at the window's beginning */
    double mask_ratio;    /* 0: the model forecasts; else it reconstructs patches, of which this share is masked */
};

/* N: (L - P)/stride + 1, one more with pad_end. */
int64_t ps_patches(const struct ps_model_shape *shape);
/* Of a sequence's N patches those that are masked: N - floor(N (1 - mask_ratio)); 0 in a model that forecasts. */
int64_t ps_masked_patches(const struct ps_model_shape *shape);
/* The head maps each sequence's N d columns to Q H; of a model that reconstructs each patch's d to P. Rows of `batch` windows .. */
int64_t ps_head_rows(const struct ps_model_shape *shape, int64_t batch);
/* .. the columns that it reads, and those that it gives. */
int64_t ps_head_columns(const struct ps_model_shape *shape);
int64_t ps_head_width(const struct ps_model_shape *shape);
double ps_dropout_rate(const struct ps_model_shape *shape, enum ps_dropout_place place);
/* PS_USAGE naming the value and what would do: sizes that must be positive, d_model % n_heads, patch_len > seq_len, dropout. */
enum ps_status ps_model_shape_check(const struct ps_model_shape *shape);

struct ps_parameter {
    char name[48]; /* e.g. "layers.0.w_qkv" */
    int rank;
    int64_t size[3]; /* 1 beyond the rank */
    int64_t offset;  /* elements, a multiple of PS_PARAMETER_ALIGN; the gaps stay 0 */
};

enum { PS_PARAMETER_ALIGN = 64 };

/* A layer's tensors in order; all weights are [in, out]. */
enum ps_layer_parameter {
    PS_W_QKV, /* [d, 3d] */
    PS_W_O,   /* [d, d] */
    PS_W_1,   /* [d, f]; of swiglu [d, 2f], the gate's first */
    PS_W_2,   /* [f, d]; the last that a product reads */
    PS_NORM1_GAMMA,
    PS_NORM1_BETA,
    PS_B_QKV,
    PS_B_O,
    PS_NORM2_GAMMA,
    PS_NORM2_BETA,
    PS_B_1,
    PS_B_2,
    PS_LAYER_PARAMETERS
};

/* What a layer's BatchNorms know of the batches so far: no parameters. */
enum ps_layer_statistic { PS_RUNNING_MEAN_1, PS_RUNNING_VAR_1, PS_RUNNING_MEAN_2, PS_RUNNING_VAR_2, PS_LAYER_STATISTICS };

struct ps_parameters {
    int n;   /* tensors that are parameters */
    int all; /* with the running statistics, which lie behind them in the same flat buffer: no gradients, no moments */
    struct ps_parameter *table;
    int64_t count;   /* elements of a flat buffer of parameters */
    int64_t stored;  /* with the running statistics */
    int64_t decayed; /* elements before the first that weight decay leaves alone */
    /* Places in the table; -1: the model has none. */
    int w_p, b_p, w_pos, w_h, b_h; /* [P, d], [d], [N, d], [N*d, QH], [QH]; the head's of each channel [C, N*d, QH], [C, QH]; of a
                                      model that reconstructs, named w_r and b_r, [d, P], [P] */
    int revin_weight, revin_bias;  /* [C] */
    int (*layer)[PS_LAYER_PARAMETERS];
    int (*statistics)[PS_LAYER_STATISTICS];
};

int64_t ps_parameter_count(const struct ps_parameter *parameter); /* elements */

enum ps_status ps_parameters_layout(const struct ps_model_shape *shape, struct ps_parameters **parameters);
void ps_parameters_free(struct ps_parameters *parameters); /* NULL is fine */

/* torch's nn.Linear: weights and biases U(-1/sqrt(fan_in), 1/sqrt(fan_in)); gamma 1, beta 0; W_pos U(-0.02, 0.02); RevIN's weight
 * 1, bias 0; running means 0, variances 1. Element i of tensor t is number i of Philox site PS_SITE_INIT + t, keyed by seed. Host
 * buffer of parameters->stored doubles. */
void ps_parameters_initialise(const struct ps_parameters *parameters, uint64_t seed, double *values);

/* Tensor t of a flat buffer of the given type. */
struct ps_tensor ps_parameter_tensor(const struct ps_parameters *parameters, int t, void *flat, enum ps_type type);

/* The table that is added to the embedding, N d doubles: sines and cosines of Vaswani et al. 2017, less their mean and over ten
 * times their standard deviation (as Hugging Face's PatchTST); zeros for the positions that add none. Not for learned ones. */
void ps_positions_fill(const struct ps_model_shape *shape, double *values);
/* RoPE's cosines and sines, [N, columns] doubles, as struct ps_rope has them: the angle of pair i in row n is n 10000^(-2i/e), and
 * 0 behind a head's e columns. */
void ps_rope_angles(const struct ps_model_shape *shape, int64_t columns, double *values);

#endif
