/* What comes after the end of each series of a panel. */
#ifndef PS_SRC_FORECAST_PANEL_H
#define PS_SRC_FORECAST_PANEL_H

#include "src/checkpoint.h"
#include "src/config.h"

/* `steps` rows for every series, in its own units, in the panel's order. out: FILE.h5, a panel again; another name: CSV with
 * columns id, time and value, and fed_back where there are more than pred_len steps; NULL: the same to stdout. also: another
 * FILE.h5 with the same; NULL: none. config: the checkpoint's, as ps_engine_adapt left it. A series shorter than seq_len is filled
 * on its left with its first value; stderr says how many are. */
enum ps_status ps_forecast_panel(const struct ps_checkpoint *checkpoint, const struct ps_config *config,
                                 const struct ps_series *series, const char *device, int64_t steps, const char *out,
                                 const char *also);

#endif
