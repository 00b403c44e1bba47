/* The model: parameters, gradients and activation cache on a device, and the way of one batch through them, forward and back.
 *
 * In bf16 and fp16 products read `weights`, a rounded copy of the parameters; all else, biases included, reads the parameters.
 * AdamW writes the copy in its own pass; whoever else writes parameters calls ps_model_refresh_weights. It is derived, so no
 * checkpoint holds it. */
#ifndef PS_MODEL_MODEL_H
#define PS_MODEL_MODEL_H

#include "kernels/exchange.h"
#include "model/cache.h"

struct ps_model_options {
    enum ps_level level;
    int if_faster;       /* level layer: PS_UNSUPPORTED where level gemm is known to be faster */
    int merge_qkv;       /* level gemm: one product for q, k and v, and one for their weights' gradient */
    int epilogue;        /* level gemm: biases, and without dropout residuals, added by the products, where the table can */
    int tiled_attention; /* level gemm: attention by tiles, its scores never in memory */
    int feed_forward;    /* level gemm: one operation each way, its hidden columns never in memory, where the table has it */
    uint64_t seed;       /* keys dropout */
    /* Zero: MSE, every target observed. Of quantiles as many as the shape has. Any other is computed by operations of its own, at
     * every level: fused ones know no other (ps_loss_is_plain). With loss.missing NaN among the inputs is unobserved too, as
     * gather_patches says of `masked`. */
    struct ps_loss loss;
    /* Where ranks share each batch: what they exchange, borrowed, and the windows of a whole step; NULL and 0: this one has all. */
    struct ps_exchange *exchange;
    int64_t whole;
};

/* Which windows the next batch is, of a step that ranks share or that takes several batches. All 0: the batch is the step. */
struct ps_batch_place {
    int64_t first, whole;    /* windows of the step before it; windows of the step, over which the loss is the mean */
    int64_t further;         /* windows by which the place in the pass moves on before the batch after it */
    struct ps_shares shares; /* of the windows that ranks compute together, whose rows are one batch of BatchNorm; ranks 0: none */
    struct ps_exchange *sum; /* of a step's last batch: by what gradients are summed over the ranks, borrowed; NULL: not yet */
};

/* What a training step's gradients of W_h and b_h want, and the loss's sum, where they come later. */
struct ps_head_rest {
    struct ps_head_step step;
    struct ps_step_state *state; /* NULL: there is nothing to do */
    int summed;                  /* the loss's sum is in the state already; else in partials */
};

struct ps_model {
    const struct ps_kernels *k; /* borrowed */
    struct ps_model_shape shape;
    int64_t batch; /* the largest */
    struct ps_model_options options;
    struct ps_parameters *layout;
    void *parameters; /* device, [layout->stored] k->parameter: the running statistics behind the parameters */
    void *weights;    /* device, [layout->count] k->real, of the same layout; the parameters themselves where the types are one */
    void *gradients;  /* device, [layout->count] k->parameter; accumulated, zeroed by AdamW */
    /* ps_model_gradients' are this times the loss's. 1 but in fp16: there the largest power of two up to the step's windows (the
     * largest batch's where no step was placed) times C H, so that the head's are about as large as the errors and fp16's exponents
     * hold them. */
    double gradient_scale;
    /* One device buffer, k->parameter: what is added to the embedding where positions are not learned [N, d], RoPE's angles [N,
     * head], zeros in place of the head's bias where that is added before [QH], and in place of RevIN's mean and deviation, where
     * patches are reconstructed, zeros and ones [R]; data NULL where the model needs none. */
    void *constants;
    size_t constants_bytes;
    struct ps_tensor positions, angles, no_bias, zeros, ones;
    int64_t head;      /* columns that a head lies in, d / h; or at level gemm more, the last ones 0 (ps_padded_head) */
    int strided_heads; /* level gemm: products of attention take heads where they lie in their rows */
    int folded;        /* level gemm: in training BatchNorms are folded into the weights that read them */
    struct ps_cache cache;
    struct ps_batch_place place;
    int64_t wrapped; /* layers, from the first on, whose gradients are still those of padded heads' or folded norms' weights */
    int unfolding;   /* the pass folded norms */
    struct ps_head_rest head_rest; /* of a training pass that goes on */
    int64_t unsummed;              /* elements of the gradients before those of layers' weights whose sums over ranks have begun */
    /* BatchNorm over ranks: statistics of each [ranks, 2, d], and this one's [2, d]; NULL else. */
    void *together;
    size_t together_bytes;
    /* Device, 1: where targets may be missing and a batch is a part of a step, those of the whole step that are observed, over
     * which its loss is the mean. Whoever places batches sets it before the first, by ps_model_count_observed and by what ranks
     * exchange. NULL else. */
    double *observed;
    struct ps_encoder_needs encoder; /* level layer: what encoder_prepare said */
    void *kept;                      /* level layer: what the encoder's backward reads again */
    char kernels[PS_KERNELS_NAME];   /* ps_model_kernels */
};

/* Windows on the device, as gather_patches and gather_targets read them. */
struct ps_windows {
    struct ps_tensor inputs;  /* [W, C, L], any strides */
    struct ps_tensor targets; /* [W, C, H], any strides */
    struct ps_tensor indices; /* int32 */
};

/* Bytes of device memory that ps_model_open takes (parameters, weights, gradients, cache). */
size_t ps_model_bytes(const struct ps_model_shape *shape, int64_t batch, const struct ps_model_options *options,
                      const struct ps_kernels *k);
/* PS_USAGE for an impossible shape; PS_UNSUPPORTED when the level cannot serve it; PS_DEVICE without memory, saying how much is
 * needed and what lowers it. Parameters (and weights) are zero until uploaded. */
enum ps_status ps_model_open(const struct ps_kernels *k, const struct ps_model_shape *shape, int64_t batch,
                             const struct ps_model_options *options, struct ps_model **model);
void ps_model_close(struct ps_model *model); /* NULL is fine */

/* Whether attention by tiles can serve the model's variants; its sizes apart. */
int ps_model_tiles(const struct ps_kernels *k, const struct ps_model_shape *shape);

/* The name of the kernels that serve the model, as checkpoints record it; the level's where that says which. */
const char *ps_model_kernels(const struct ps_model *model);

/* What the model calls the tensor that an address lies in, the same for every layer: "w_1", "d w_1" (its gradient), "hidden"; ""
 * where it is none of the model's. */
enum { PS_TENSOR_NAME = 56 };
void ps_model_tensor_name(const struct ps_model *model, const void *address, char name[PS_TENSOR_NAME]);

/* Enqueues weights = parameters, rounded; nothing where they are one. After every write to the parameters but AdamW's. */
enum ps_status ps_model_refresh_weights(struct ps_model *m);

/* Windows state->cursor .. + batch of `windows` through embedding, layers and head's product, into cache.shared.head_out. state is
 * device memory. training: dropout on, counted by state->step. Which patches are masked is counted by step and cursor. */
enum ps_status ps_model_forward(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                int64_t batch, int training);
/* A whole training pass over the same windows: forward with dropout, the loss into state->loss_sum, gradients += all the way down.
 * It leaves no forecast: cache.shared.head_out is scratch. */
enum ps_status ps_model_gradients(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state, int64_t batch);
/* The same of a head over an encoder that is frozen: all but the head as in scoring, without dropout and with BatchNorm's running
 * statistics, which stay; gradients += W_h's and b_h's alone. */
enum ps_status ps_model_head_gradients(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state,
                                       int64_t batch);
/* *m->observed += the targets of these windows that are observed. */
enum ps_status ps_model_count_observed(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                       int64_t batch);
/* From now on batches are at that place: dropout draws by it, gradients are those of the step's mean loss, scaled for it. */
void ps_model_place(struct ps_model *m, const struct ps_batch_place *place);
/* The part of a rank that has no window in a batch of the others: what they exchange of it inside the model. */
enum ps_status ps_model_attend(struct ps_model *m);
/* Behind a step's batches: gradients = their sums over the ranks of the last one's place.sum. Those of large layers' weights have
 * begun inside of its backward. */
enum ps_status ps_model_sum_gradients(struct ps_model *m);
/* Windows that are a whole number of dropout's blocks at every site: batches of a shared step begin at multiples of them. */
int64_t ps_model_granule(const struct ps_model_shape *shape);
/* Whether AdamW is a part of ps_model_step's backward: of encoders of level layer that end with all gradients' sums, so that none
 * goes through memory on its way. */
int ps_model_steps(const struct ps_model *m);
/* ps_model_gradients and AdamW as `update` says, whose tensors are the model's, with the bits of the one behind the other: a large
 * W_h is updated beside the encoder's backward, and many layers' weights beside the embedding's. update->clip_norm, skip and held
 * must be 0, since they need all gradients first, and ranks must not share the batch. */
enum ps_status ps_model_step(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state, int64_t batch,
                             const struct ps_adamw *update);
/* Values that a window's loss and errors are of, but for those that are not observed: C H; of a model that reconstructs C N P, of
 * which those that it sees are not. */
int64_t ps_model_targets(const struct ps_model_shape *shape);
/* After a forward: the sums of its errors into errors (float64 [slots, PS_ERRORS], see forecast_error). */
enum ps_status ps_model_errors(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                               int64_t batch, struct ps_tensor errors, int64_t slot_windows);
/* After a forward: yhat into y [batch*C, QH], quantiles in rising order. Of a model that reconstructs the normalised patches [R,
 * P]. */
enum ps_status ps_model_forecast(struct ps_model *m, int64_t batch, struct ps_tensor y);

/* Of such quantiles on the host, [rows, Q, H], those that stand for the forecast: [rows, H]. */
void ps_model_points(const struct ps_loss *loss, int64_t rows, int64_t steps, const float *quantiles, float *points);

/* All encoder layers: from stream 0 to stream n_layers. training as above (state may be NULL when 0); without, nothing is kept for
 * their backward. */
enum ps_status ps_model_encode(struct ps_model *m, const struct ps_step_state *state, int64_t batch, int training);
/* Their backward: cache.shared.gradient holds dy and then du; weight gradients +=. */
enum ps_status ps_model_encode_backward(struct ps_model *m, const struct ps_step_state *state, int64_t batch, int training);

/* FLOPs of one training step's products and sub-kernels at `batch`, from the equations (the same at every level, no recompute). */
double ps_model_step_flops(const struct ps_model_shape *shape, int64_t batch);

#endif
