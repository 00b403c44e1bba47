/* The series opener. Input: an HDF5 file. What the look in a child accepts must not harm this process, whether the values fit the
 * memory or stream, some may be missing, or some channels are taken; windows of a panel must not leave their series. */
#include <stdlib.h>

#include "data/order.h"
#include "data/panel.h"
#include "tests/fuzz/hdf5.h"

static void must_keep_borders(const struct ps_series *series)
{
    enum { L = 2, H = 1 };
    const double split[3] = {0.5, 0.25, 0.25};
    struct ps_splits splits;
    enum ps_status status = ps_splits_make(series, split, L, H, &splits);
    if (status != PS_OK) {
        must_explain(status, PS_DATA);
        return;
    }
    for (int part = 0; part < PS_SPLITS; part++) {
        const struct ps_order order = {.first = splits.first[part], .count = splits.count[part], .runs = &splits.runs[part]};
        int32_t *index = malloc((size_t)order.count * sizeof *index);
        MUST(index != NULL);
        ps_order_draw(&order, index);
        for (int64_t i = 0; i < order.count; i++) {
            int64_t of = ps_panel_series(series->panel, index[i]);
            MUST(index[i] >= series->panel->offsets[of] && index[i] + L + H <= series->panel->offsets[of + 1]);
            MUST(i == 0 || index[i] > index[i - 1]);
        }
        free(index);
    }
    ps_splits_free(&splits);
}

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
        const struct ps_reading reading = {.memory = {.limit = limits[size % 3], .batch = 2, .seq_len = 2, .pred_len = 1},
                                           .masked = size / 3 % 2,
                                           .channels = "b\0a",
                                           .channel_count = size / 6 % 2 ? 2 : 0,
                                           .trained = size / 12 % 2};
        struct ps_series *series;
        must_explain(ps_series_open_as(path, &reading, &series), PS_DATA);
        if (series != NULL && series->panel != NULL) {
            must_keep_borders(series);
        }
        ps_series_close(series);
    }
    return 0;
}
