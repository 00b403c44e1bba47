/* What stands before and after the encoder layers. Private to model/. */
#ifndef PS_MODEL_EMBEDDING_H
#define PS_MODEL_EMBEDDING_H

#include "model/model.h"

/* The fused embedding's arguments, for the operations of their own or inside the encoder's. */
struct ps_embed_forward ps_embed_forward_of(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                            int64_t batch, struct ps_dropout dropout);
struct ps_embed_backward ps_embed_backward_of(struct ps_model *m, int64_t batch, struct ps_dropout dropout);

/* Windows -> RevIN -> patches, some of them masked -> u = drop(patches W_P + b_P + W_pos) at the stream's beginning. */
enum ps_status ps_embedding_forward(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                    int64_t batch, struct ps_dropout dropout);
/* From cache.shared.gradient (du): gradients of W_P, b_P and W_pos +=. */
enum ps_status ps_embedding_backward(struct ps_model *m, int64_t batch, struct ps_dropout dropout);

/* cache.shared.head_out = drop(flatten(y)) W_h; y [R, d] is the last layer's output. With heads of each channel's own, or RevIN's
 * affine, b_h is added too, and the affine undone. */
enum ps_status ps_head_forward(struct ps_model *m, int64_t batch, struct ps_tensor y, struct ps_dropout dropout);
/* Of the head's input; state may be NULL when training is 0. */
struct ps_dropout ps_head_dropout(const struct ps_model *m, const struct ps_step_state *state, int training);
/* What forecast and its like add to head_out: b_h, or zeros where ps_head_forward has added it. */
struct ps_tensor ps_head_bias(const struct ps_model *m);
/* The arguments of head_step, for the operation of its own (partials of groups) or inside the encoder's (`rows` of them). */
struct ps_head_step ps_head_step_of(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                    int64_t batch, int64_t rows);
/* The head and the loss of a training step: gradients of W_h and b_h +=, the loss into state, cache.shared.gradient = dy. W_h's and
 * b_h's come beside what follows (k->beside): the caller joins. done: the encoder has done it, but for those two gradients and the
 * loss's sum; else NULL. alone: no gradient but W_h's and b_h's is wanted, and no dy. rest: takes what those two gradients
 * and the loss's sum want, and ps_head_gradients does them; NULL: they are done here. cache.shared.head_out is scratch. */
enum ps_status ps_head_train(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state, int64_t batch,
                             const struct ps_head_step *done, int alone, struct ps_head_rest *rest);
/* Those gradients and the loss's sum, once. */
enum ps_status ps_head_gradients(struct ps_model *m, struct ps_head_rest *rest, int alone);

/* What ps_head_train does when the encoder has done the rest, for the encoder's backward. */
struct ps_head_gradient ps_head_gradient_of(struct ps_model *m, struct ps_step_state *state, const struct ps_head_step *done);

/* Descriptors for `batch` windows: [S, QH] of the head's output; [S, H] of cache.shared.targets; [S] of RevIN's statistics. */
struct ps_tensor ps_head_tensor(const struct ps_model *m, void *buffer, int64_t batch);
struct ps_tensor ps_target_tensor(const struct ps_model *m, int64_t batch);
struct ps_tensor ps_revin_tensor(const struct ps_model *m, void *buffer, int64_t batch);
/* What forecast and its like multiply head_out by, and add: [S], or of a model that reconstructs [R]. */
struct ps_tensor ps_head_mean(const struct ps_model *m, int64_t batch);
struct ps_tensor ps_head_std(const struct ps_model *m, int64_t batch);
enum ps_status ps_gather_targets_of(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                    int64_t batch);

#endif
