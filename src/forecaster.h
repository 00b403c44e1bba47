/* A checkpoint's model that forecasts: windows in the data's own units in, forecasts in the same units out. */
#ifndef PS_SRC_FORECASTER_H
#define PS_SRC_FORECASTER_H

#include "src/checkpoint.h"
#include "src/config.h"

struct ps_forecaster;

/* config: the checkpoint's, as ps_engine_adapt left it; neither is needed afterwards. device: as ps_engine_open_device. at_once:
 * windows in one pass, on the CPU; a GPU takes train.batch_size of them, as evaluate does, since other sizes may run other kernels
 * and give other bits. masked: NaN among the inputs is unobserved, and else refused; the way that evaluate computes data with
 * holes. */
enum ps_status ps_forecaster_open(const struct ps_checkpoint *checkpoint, const struct ps_config *config, const char *device,
                                  int64_t at_once, int masked, struct ps_forecaster **forecaster);
void ps_forecaster_close(struct ps_forecaster *forecaster); /* NULL is fine */

/* The checkpoint's: of a model of quantiles ps_loss_point is the one that stands for the forecast. */
const struct ps_loss *ps_forecaster_loss(const struct ps_forecaster *forecaster);

/* On stderr, of `forecast`: quantiles of steps that were fed back mean little. */
void ps_forecaster_warn(const struct ps_loss *loss, int64_t steps, int64_t pred_len);
/* inputs [n, C, L] -> quantiles [n, C, Q, H], rising, and of any other model forecasts [n, C, H], as evaluate forecasts the same
 * windows, to the bit. PS_DATA naming window, channel and step of an input that is not finite. */
enum ps_status ps_forecaster_run(struct ps_forecaster *forecaster, const float *inputs, int64_t n, float *quantiles);

/* forecasts [n, steps, C]; those beyond pred_len by feeding forecasts back: inputs are then what the last of them were made of.
 * quantiles [n, steps, C, Q]; NULL: not wanted. */
enum ps_status ps_forecaster_extend(struct ps_forecaster *forecaster, float *inputs, int64_t n, int64_t steps, float *forecasts,
                                    float *quantiles);

#endif
