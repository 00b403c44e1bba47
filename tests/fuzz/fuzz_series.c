/* The series opener. Input: an HDF5 file. What the look in a child accepts must not harm this process, whether the values fit the
 * memory or stream. */
#include "data/series.h"
#include "tests/fuzz/hdf5.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *path = put_file(data, size);
    enum ps_status status = PS_OK;
    if (!getenv("PS_FUZZ_CONTAINED")) {
        status = ps_series_look(path);
        must_explain(status, PS_DATA);
    }
    if (status == PS_OK) {
        static const int64_t limits[] = {0, 1, 8 << 20};
        const struct ps_memory memory = {.limit = limits[size % 3], .batch = 2, .seq_len = 2, .pred_len = 1};
        struct ps_series *series;
        must_explain(ps_series_open_within(path, &memory, &series), PS_DATA);
        ps_series_close(series);
    }
    return 0;
}
