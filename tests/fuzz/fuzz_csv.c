/* The CSV importer. Input: a CSV; when it begins with byte 1, the rest is one whose column of times is named "date". What is
 * imported must be a series. */
#include "data/import.h"
#include "data/series.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char out[256];
    own_path(out, ".h5");
    int named = size > 0 && data[0] == 1;
    struct ps_imported imported;
    enum ps_status status = ps_import_csv(put_file(data + named, size - (size_t)named), out, named ? "date" : NULL, &imported);
    must_explain(status, PS_DATA);
    if (status == PS_OK) {
        MUST(imported.rows > 0 && imported.channels > 0);
        MUST(ps_series_look(out) == PS_OK);
        MUST(unlink(out) == 0);
    }
    return 0;
}
