/* Intervals around forecasts that promise nothing of how errors are distributed: split-conformal (Vovk et al. 2005; Lei et al.
 * 2018). The half width at a channel and a step is a quantile of the absolute errors there over the validation windows. Of data
 * like those, an interval of level 0.9 holds nine targets of ten. */
#ifndef PS_SRC_INTERVALS_H
#define PS_SRC_INTERVALS_H

#include "src/session.h"

struct ps_intervals {
    double level;
    int64_t windows; /* that the quantiles are of: all of the validation's, or evenly many where errors would take too much */
    int64_t channels, pred_len; /* C, H */
    float *half;                /* [C, H], in standardised units */
};

/* "0.9": above 0 and below 1. PS_USAGE names the option. */
enum ps_status ps_intervals_level(const char *text, double *level);

/* Forecasts the validation windows with the session's weights. PS_USAGE for a model of quantiles, and when they are too few for the
 * level: with n of them the ceil((n + 1) level)-th smallest error is taken. */
enum ps_status ps_intervals_fit(struct ps_session *session, double level, struct ps_intervals *intervals);
void ps_intervals_free(struct ps_intervals *intervals);

/* How many of a batch's targets [n, C, H] lie within; *observed += those that are not NaN. */
int64_t ps_intervals_within(const struct ps_intervals *intervals, int64_t n, const float *targets, const float *forecasts,
                            int64_t *observed);
double ps_intervals_mean_width(const struct ps_intervals *intervals);

#endif
