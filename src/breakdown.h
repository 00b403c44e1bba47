/* Where a split's errors lie: by step of the horizon and by channel, in standardised and in the data's own units, with the measures
 * of the M competitions; of the model and of the naive forecasts beside it. */
#ifndef PS_SRC_BREAKDOWN_H
#define PS_SRC_BREAKDOWN_H

#include "src/session.h"

enum ps_forecaster { PS_FORECASTER_MODEL, PS_FORECASTER_REPEAT_LAST, PS_FORECASTER_SEASONAL_NAIVE, PS_FORECASTERS };

/* Of targets that are observed (not NaN), and of naive forecasts where what they repeat is: repeat-last takes the last value that
 * is. NaN where something is not computed: MASE without a scale, seasonal-naive with a season of 0 or above seq_len. */
struct ps_measures {
    double mse, mae;                   /* in standardised units */
    double original_mse, original_mae; /* in the data's own; of one channel only, since channels' units differ */
    double mase;                       /* mean over channels of the MAE over the training rows' seasonal-naive MAE; those whose
                                          training rows give 0 left out. Hyndman and Koehler 2006, as in M4 */
    double smape;                      /* percent, in the data's own units: the mean of 200 |y - f| / (|y| + |f|), 0 where both are
                                          0. Makridakis et al. 2020 (M4) */
};

struct ps_breakdown; /* opaque */

/* Of a split of a session's data; season: data.season. The session was opened with `seasonal`. Of a panel MASE is the
 * mean over its series, and there are no errors in the data's own units, which differ from series to series. */
enum ps_status ps_breakdown_open(const struct ps_session *session, enum ps_split split, struct ps_breakdown **breakdown);
void ps_breakdown_close(struct ps_breakdown *breakdown); /* NULL is fine */

/* A batch's windows and forecasts, as a ps_forecast_sink gets them: the same sums for any number of threads. */
void ps_breakdown_add(struct ps_breakdown *breakdown, int64_t first, int64_t n, const float *inputs, const float *targets,
                      const float *forecasts);

struct ps_measures ps_breakdown_all(const struct ps_breakdown *breakdown, enum ps_forecaster forecaster);
struct ps_measures ps_breakdown_channel(const struct ps_breakdown *breakdown, enum ps_forecaster forecaster, int64_t channel);
/* Of a panel alone, of the windows that the series has in the split, *windows of them. */
struct ps_measures ps_breakdown_series(const struct ps_breakdown *breakdown, enum ps_forecaster forecaster, int64_t series,
                                       int64_t *windows);
/* MSE and MAE alone; step 0 is the first row forecast. */
struct ps_measures ps_breakdown_step(const struct ps_breakdown *breakdown, enum ps_forecaster forecaster, int64_t step);

#endif
