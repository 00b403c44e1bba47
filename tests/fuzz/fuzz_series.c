/* The series opener. Input: an HDF5 file. What the look in a child accepts must not harm this process. */
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
        struct ps_series *series;
        status = ps_series_open(path, &series);
        must_explain(status, PS_DATA);
        ps_series_close(series);
    }
    return 0;
}
