/* The rows of a series, wherever they are: in memory, or in a file that stays open. Private to data/. */
#ifndef PS_DATA_SERIES_FILE_H
#define PS_DATA_SERIES_FILE_H

#include <sys/stat.h>

#include "data/hdf5_util.h"
#include "data/series.h"

/* A dataset that is open, with its sizes. */
struct ps_dataset {
    hid_t id;
    const char *name; /* "/series" */
    int rank;
    int64_t size[3];
    int64_t stored_channels; /* in the file, of which size[1] are taken; 1 of a panel */
    int64_t count;           /* product of the sizes */
    int64_t chunk_rows;      /* stored together; 1 where rows lie one after another */
    int64_t chunk_bytes;     /* of a chunk in memory, where a filter makes HDF5 read it whole; else 0 */
    int64_t piece_rows;      /* read at a time: whole chunks where that takes little memory */
};

/* How a file is streamed (docs/design.md, Streaming): blocks of windows that follow one another, and how many are held at a time.
 */
struct ps_blocks {
    int64_t windows; /* of a block */
    int64_t rows;    /* of a block: series: windows + seq_len + pred_len - 1; windows: windows */
    int64_t blocks;  /* of a group */
};

struct ps_series_file {
    hid_t file;
    struct ps_dataset dataset[2]; /* series; or inputs, targets */
    struct ps_memory memory;
    int masked;      /* NaN is taken */
    int64_t *column; /* [C]: where the channels that are taken stand in the file; NULL: as they stand there */
    struct ps_blocks plan;
    struct stat seen; /* when it was opened */
};

/* Rows (or windows) [first, first + count) of dataset 0 or 1 of a series in a file, as they are stored, in float32. PS_DATA when
 * they cannot be read, and when the file is not the one that was opened, or was changed since. */
enum ps_status ps_series_read(const struct ps_series *series, int dataset, int64_t first, int64_t count, float *to);

/* Calls `sink` with rows [0, rows) of dataset 0 or 1, in order, piece by piece. */
typedef enum ps_status ps_rows_sink(void *argument, int64_t first, int64_t rows, const float *values);
enum ps_status ps_series_each(const struct ps_series *series, int dataset, int64_t rows, ps_rows_sink *sink, void *argument);

/* Where element `at` of dataset 0 or 1 stands, for messages: "channel 1 (load), row 3 (counted from 0)". */
struct ps_place {
    char text[192];
};
struct ps_place ps_series_place(const struct ps_series *series, int dataset, int64_t at);

/* Leaves of an open file the channels that are asked for. */
enum ps_status ps_series_pick(const struct ps_reading *reading, struct ps_series *series);
/* Those of rows as the file has them. */
void ps_rows_pick(const struct ps_series *series, const struct ps_dataset *dataset, int64_t rows, const float *from, float *to);

/* Whether the three numbers of a split can be one: counts of `unit` ("rows"), or *fractions. */
enum ps_status ps_split_check(const double split[3], const char *unit, int *fractions);

/* Whether float32 holds every element once it is scaled. Costs a pass over the data only where their largest might not be. */
enum ps_status ps_scaler_check(const struct ps_scaler *scaler, const struct ps_series *series);

#endif
