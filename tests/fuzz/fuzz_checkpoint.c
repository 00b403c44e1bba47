/* The checkpoint loader. Input: the file's HDF5 part, which gets a user block with the right digest before it; or, when it begins
 * like a checkpoint, the whole file. */
#include "src/checkpoint.h"
#include "src/digest.h"
#include "tests/fuzz/hdf5.h"

enum { BLOCK = 512 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char magic[] = "PatchStep checkpoint\n";
    int whole = size >= sizeof magic - 1 && memcmp(data, magic, sizeof magic - 1) == 0;
    size_t head = whole ? 0 : BLOCK;
    char *bytes = calloc(1, head + size + 1), digest[PS_DIGEST_HEX];
    memcpy(bytes + head, data, size);
    if (!whole) {
        MUST(ps_digest(data, size, digest));
        snprintf(bytes, BLOCK, "%sformat 1\nlength %zu\nsha256 %s\n", magic, BLOCK + size, digest);
    }
    const char *path = put_file(bytes, head + size);
    enum ps_status status = PS_OK;
    if (!whole && !getenv("PS_FUZZ_CONTAINED")) {
        status = ps_checkpoint_look(path, bytes, head + size);
        must_explain(status, PS_CHECKPOINT);
    }
    if (status == PS_OK) {
        struct ps_checkpoint checkpoint;
        status = ps_checkpoint_load(path, &checkpoint);
        must_explain(status, PS_CHECKPOINT);
        ps_checkpoint_free(&checkpoint);
    }
    free(bytes);
    return 0;
}
