/* PatchStep's library: forecasts by a trained model, from programs of one's own.
 *
 *     struct patchstep_model *model;
 *     if (patchstep_open("best.h5", "auto", NULL, &model) != PATCHSTEP_OK ||
 *         patchstep_forecast(model, inputs, n, forecasts) != PATCHSTEP_OK) {
 *         fprintf(stderr, "%s\n", patchstep_error());
 *     }
 *     patchstep_close(model);
 *
 * Threads. Any number of models may be open. One model serves one thread at a time, whichever that is; models of their own serve
 * threads at the same time. On the CPU a forecast is computed by the thread that asks for it, and by no other: threads are the
 * caller's to start, and what the caller set of OpenMP and OpenBLAS stays as it was.
 *
 * A process. Nothing is printed and nothing ends the process. Models are opened one after another, and each patchstep_open forks:
 * the child looks at the file, so that one which crashes libhdf5 ends the child instead of this process. Meanwhile the caller's
 * other threads are not to use libhdf5, and an allocator that is not glibc's must bear forks beside other threads. A model is not
 * to be used in a child of a fork. */
#ifndef PATCHSTEP_H
#define PATCHSTEP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct patchstep_model;

enum patchstep_status {
    PATCHSTEP_OK = 0,
    PATCHSTEP_ARGUMENT = 2,   /* an argument that no call or this model cannot take; a precision that the device has not */
    PATCHSTEP_DATA = 3,       /* an input that is not finite */
    PATCHSTEP_CHECKPOINT = 4, /* missing, damaged, or none of ours */
    PATCHSTEP_DEVICE = 5,     /* not there, or out of memory */
};

/* Of the library that runs: "0.1.0". */
const char *patchstep_version(void);

/* What the last call that failed on this thread said, in one line; "" before the first. Valid until the thread's next call. */
const char *patchstep_error(void);

/* Opens the model of a checkpoint that `train` or `import_weights` wrote; of a run's folder its best, or the last where there is
 * none. device: "auto" (a GPU when there is one), "cpu", "cuda", "cuda:N"; NULL: as it was trained where this machine can, else
 * "auto". precision: "fp32", "tf32", "bf16", "fp16"; NULL: as it was trained where the device can, else fp32. *model is NULL when
 * it fails. */
enum patchstep_status patchstep_open(const char *checkpoint, const char *device, const char *precision,
                                     struct patchstep_model **model);
void patchstep_close(struct patchstep_model *model); /* NULL is fine */

int64_t patchstep_channels(const struct patchstep_model *model);
int64_t patchstep_seq_len(const struct patchstep_model *model);  /* rows that the model sees */
int64_t patchstep_pred_len(const struct patchstep_model *model); /* rows that it forecasts */

/* The name of channel 0 <= c < channels, as the data that it was trained on had it, and the model's until it is closed; NULL: these
 * had no names. */
const char *patchstep_channel_name(const struct patchstep_model *model, int64_t c);

/* What is computed otherwise than it was trained, such as "trained in bf16, computed in fp32 on the CPU"; "": nothing. */
const char *patchstep_note(const struct patchstep_model *model);

/* inputs [n, channels, seq_len] -> forecasts [n, channels, pred_len], both in the data's own units, the last dimension's values
 * side by side, the last known row last. The values of a window do not depend on the windows beside it. NaN among the inputs is
 * a missing value, which a model takes that was trained with data.missing: mask, and others refuse. When it fails, what
 * forecasts holds is undefined; the model can be used on unless the device failed. Of a model of quantiles these are the forecasts
 * of the one nearest to 0.5. */
enum patchstep_status patchstep_forecast(struct patchstep_model *model, const float *inputs, int64_t n, float *forecasts);

/* How many quantiles the model forecasts of each step, Q; 0: it was not trained with train.loss: quantile. Quantile 0 <= q < Q,
 * rising, such as 0.1; NaN for any other q. */
int64_t patchstep_quantiles(const struct patchstep_model *model);
double patchstep_quantile(const struct patchstep_model *model, int64_t q);
/* As patchstep_forecast, all of them: quantiles [n, channels, Q, pred_len], of each step in rising order. PATCHSTEP_ARGUMENT when
 * the model has none. */
enum patchstep_status patchstep_forecast_quantiles(struct patchstep_model *model, const float *inputs, int64_t n, float *quantiles);

#ifdef __cplusplus
}
#endif
#endif
