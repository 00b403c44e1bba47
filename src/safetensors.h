/* safetensors, the format of Hugging Face's weights: 8 bytes of little-endian length, so many bytes of JSON
 * {"name": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, .., "__metadata__": {..}}, and the tensors' bytes, which
 * follow one another from the first to the last byte of the rest. */
#ifndef PS_SRC_SAFETENSORS_H
#define PS_SRC_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/status.h"

enum { PS_SAFETENSOR_RANK = 8 };

struct ps_safetensor {
    const char *name, *dtype; /* "F32", .. */
    int rank;
    int64_t size[PS_SAFETENSOR_RANK];
    int64_t count; /* elements */
    const void *bytes;
};

struct ps_safetensors {
    char *path;
    int n;
    struct ps_safetensor *tensor; /* in the order of their names */
    void *header, *bytes;         /* the JSON and the file, which names and values point into */
    int n_shards;
    struct ps_safetensors *shard; /* of an index: its files, which names and values point into instead */
};

/* PS_CHECKPOINT, one line naming file and tensor, for anything but such a file: nothing of a size that the header states is
 * allocated, and no byte outside the file is read. */
enum ps_status ps_safetensors_read(const char *path, struct ps_safetensors *file);
/* All tensors of the files that {"weight_map": {"tensor": "file", ..}} names, which lie beside it: each must hold the tensors that
 * it is named for, and no others. */
enum ps_status ps_safetensors_read_index(const char *path, struct ps_safetensors *file);
/* The same as ps_safetensors_read of bytes in memory, malloc'ed, which it frees when it fails and ps_safetensors_free otherwise. */
enum ps_status ps_safetensors_parse(const char *path, void *bytes, size_t size, struct ps_safetensors *file);
void ps_safetensors_free(struct ps_safetensors *file);

/* NULL: there is none. */
const struct ps_safetensor *ps_safetensors_find(const struct ps_safetensors *file, const char *name);
/* Its elements as float, [count]; F64, F32, F16 and BF16. PS_CHECKPOINT naming the tensor: another type, or a value that is not
 * finite, or too large for a float. */
enum ps_status ps_safetensors_values(const struct ps_safetensors *file, const struct ps_safetensor *tensor, float *values);
/* "[3, 4]", as messages show a shape. */
struct ps_shape_text {
    char text[8 + PS_SAFETENSOR_RANK * 24];
};
struct ps_shape_text ps_shape_text(int rank, const int64_t *size);

/* The file's bytes, malloc'ed, from tensors of any order: F32, or I64, which stands before F32 as the format's own writer has it.
 * The same tensors make the same bytes. */
enum ps_status ps_safetensors_make(const char *path, const struct ps_safetensor *tensors, int n, char **bytes, size_t *size);

#endif
