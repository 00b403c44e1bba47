/* What comes after the end of each series of a panel, or after any row of it. */
#ifndef PS_SRC_FORECAST_PANEL_H
#define PS_SRC_FORECAST_PANEL_H

#include "src/checkpoint.h"
#include "src/config.h"

struct ps_panel_request {
    int64_t steps;      /* rows of each forecast */
    const char *origin; /* the time of the last row that is known; NULL: each series' last row */
    int64_t last;       /* forecasts of each series: from there, and from each of the rows before, as far as it has them */
    const float *half;  /* [pred_len]: half an interval's width, before a series' own deviation; NULL: no intervals */
    double level;       /* theirs */
    const char *device;
    const char *out;  /* FILE.h5: a panel again, of one forecast a series; another name: CSV; NULL: the same to stdout */
    const char *also; /* another FILE.h5, of the latest forecasts; NULL: none */
};

/* Forecasts in the series' own units and the panel's order. CSV has columns id, with last > 1 origin, time, value, with intervals
 * value_loN and value_hiN, and fed_back where there are more than pred_len steps. config: the checkpoint's, as ps_engine_adapt left
 * it. What is known of a series, where it is shorter than seq_len, is filled on its left with its first value; those that have no
 * row at the origin are left out; stderr says how many. PS_DATA when none has one. */
enum ps_status ps_forecast_panel(const struct ps_checkpoint *checkpoint, const struct ps_config *config,
                                 const struct ps_series *series, const struct ps_panel_request *request);

#endif
