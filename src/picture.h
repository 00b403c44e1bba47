/* Pictures of what a program wrote, drawn by scripts/plot.py, which needs python3 with matplotlib and h5py. */
#ifndef PS_SRC_PICTURE_H
#define PS_SRC_PICTURE_H

#include "kernels/status.h"

/* Whether a picture can have this name. PS_USAGE names the option. */
enum ps_status ps_picture_check(const char *picture);

/* forecasts: FILE.h5 of forecast --out; data: the series or panel, HDF5, that they are of. PS_USAGE when there is no such python3,
 * or it says what is wrong. */
enum ps_status ps_picture_draw(const char *forecasts, const char *data, const char *picture);

#endif
