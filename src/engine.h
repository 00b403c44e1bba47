/* What computes a config's model: its device, its table of kernels and the model on it. A session opens them to train and score, a
 * forecaster to forecast. */
#ifndef PS_SRC_ENGINE_H
#define PS_SRC_ENGINE_H

#include "model/model.h"
#include "src/checkpoint.h"
#include "src/config.h"
#include "src/digest.h"
#include "src/ranks.h"

/* device: "auto", "cpu", "cuda", "cuda:N"; NULL: the config's. Each of several ranks has the GPU of its number on the host, where
 * the device is "auto" or "cuda", and its part of the CPU, where runtime.threads is 0; NULL: one process. tuning: the digest of
 * runtime.tuning's file; "" when there is none, or not on CUDA. Messages name config keys. What was opened when an error came is
 * the caller's to close. */
enum ps_status ps_engine_open_device(const struct ps_config *config, const char *device, const struct ps_ranks *ranks,
                                     struct ps_device **opened, struct ps_kernels **kernels, char tuning[PS_DIGEST_HEX]);
/* Batches of at most so many windows, as parts of steps of `whole`, whose BatchNorm ranks share by this exchange (NULL: they do
 * not). */
struct ps_engine_share {
    int64_t batch, whole;
    struct ps_exchange *exchange;
};

/* For data of so many channels, at the level that runtime.fusion names. masked: windows may have holes. share: NULL:
 * batches of train.batch_size. */
enum ps_status ps_engine_open_model(const struct ps_config *config, struct ps_kernels *kernels, int64_t channels, int masked,
                                    const struct ps_engine_share *share, struct ps_model **model, enum ps_level *level);

/* The checkpoint's weights and running statistics: into device memory of their size, or where that is NULL into the model.
 * PS_CHECKPOINT naming the first tensor that the model has not, or has in another shape. */
enum ps_status ps_engine_load_weights(struct ps_device *device, struct ps_model *model, const struct ps_checkpoint *checkpoint,
                                      void *into);

/* PS_CHECKPOINT, saying what to do, when the checkpoint's model reconstructs masked patches and has no forecast head. */
enum ps_status ps_engine_check_head(const struct ps_config *config, const char *checkpoint);

/* Changes what a checkpoint's config says of the machine to what this one can compute with: a device that is not there, a backend
 * of another kind, a precision that the CPU has not. precision: a name that the user gave, or NULL; device: likewise. note: what
 * was changed, in words, for the user; "": nothing. PS_USAGE for a device or a precision that does not exist. */
enum { PS_ENGINE_NOTE = 256 };
enum ps_status ps_engine_adapt(struct ps_config *config, const char *device, const char *precision, char note[PS_ENGINE_NOTE]);

#endif
