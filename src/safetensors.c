#include "src/safetensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "data/files.h"
#include "data/text.h"

enum { PREFIX = 8, LONGEST_NAME = 200, LONGEST_HEADER = 1 << 23 /* of JSON: 1024 layers' names and sizes take 3 MiB */ };

static const struct {
    const char *name;
    int bytes;
} dtypes[] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},     {"U64", 8},     {"I32", 4}, {"U32", 4},
              {"I16", 2}, {"U16", 2}, {"I8", 1},  {"U8", 1},   {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"BOOL", 1}};

static int64_t dtype_bytes(const char *dtype)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (strcmp(dtypes[i].name, dtype) == 0) {
            return dtypes[i].bytes;
        }
    }
    return 0;
}

struct ps_shape_text ps_shape_text(int rank, const int64_t *size)
{
    struct ps_shape_text shape = {"["};
    for (int i = 0; i < rank; i++) {
        size_t used = strlen(shape.text);
        snprintf(shape.text + used, sizeof shape.text - used, "%s%" PRId64, i ? ", " : "", size[i]);
    }
    strcat(shape.text, "]");
    return shape;
}

/* ---- reading ---- */

static uint64_t little_endian(const unsigned char *bytes, int n)
{
    uint64_t value = 0;
    for (int i = n - 1; i >= 0; i--) {
        value = value << 8 | bytes[i];
    }
    return value;
}

/* Names go into messages of one line. */
static enum ps_status check_name(const char *path, const char *name)
{
    size_t length = strlen(name);
    int plain = length <= LONGEST_NAME;
    for (size_t i = 0; i < length; i++) {
        plain &= (unsigned char)name[i] >= ' ' && name[i] != 0x7f;
    }
    return plain ? PS_OK
                 : ps_fail(PS_CHECKPOINT, "%s: tensor %s: its name has control characters, or more than %d bytes", path,
                           ps_text_plain(name).text, LONGEST_NAME);
}

/* One tensor's entry: its type, shape and place among `rest` bytes of values. */
static enum ps_status read_entry(const char *path, const char *name, json_t *entry, uint64_t rest, struct ps_safetensor *t,
                                 uint64_t *begin)
{
    PS_TRY(check_name(path, name));
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    json_t *shape = json_object_get(entry, "shape"), *offsets = json_object_get(entry, "data_offsets");
    json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (!dtype || !json_is_array(shape) || json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last) ||
        json_object_size(entry) != 3) {
        return ps_fail(PS_CHECKPOINT, "%s: tensor %s: its entry is not of a dtype, a shape and two whole data_offsets", path, name);
    }
    int64_t each = dtype_bytes(dtype);
    if (each == 0) {
        return ps_fail(PS_CHECKPOINT, "%s: tensor %s: dtype %s is not known", path, name, ps_text_plain(dtype).text);
    }
    if (json_array_size(shape) > PS_SAFETENSOR_RANK) {
        return ps_fail(PS_CHECKPOINT, "%s: tensor %s: has %zu dimensions; at most %d are read", path, name, json_array_size(shape),
                       PS_SAFETENSOR_RANK);
    }
    *t = (struct ps_safetensor){.name = name, .dtype = dtype, .rank = (int)json_array_size(shape), .count = 1};
    for (int i = 0; i < t->rank; i++) {
        json_t *size = json_array_get(shape, (size_t)i);
        t->size[i] = json_is_integer(size) ? json_integer_value(size) : -1;
        if (t->size[i] < 0 || __builtin_mul_overflow(t->count, t->size[i], &t->count)) {
            return ps_fail(PS_CHECKPOINT, "%s: tensor %s: its shape is not one of whole sizes that there can be", path, name);
        }
    }
    int64_t from = json_integer_value(first), to = json_integer_value(last), bytes;
    if (from < 0 || to < from || (uint64_t)to > rest) {
        return ps_fail(PS_CHECKPOINT,
                       "%s: tensor %s: data_offsets [%" PRId64 ", %" PRId64 "] are not within the %" PRIu64 " bytes of values",
                       path, name, from, to, rest);
    }
    if (__builtin_mul_overflow(t->count, each, &bytes) || bytes != to - from) {
        return ps_fail(PS_CHECKPOINT, "%s: tensor %s: %" PRId64 " bytes, which are not those of %s %s", path, name, to - from,
                       dtype, ps_shape_text(t->rank, t->size).text);
    }
    *begin = (uint64_t)from;
    return PS_OK;
}

/* Places in the file's values, to see that they follow one another. */
struct place {
    uint64_t begin, end;
    const char *name;
};

static int by_place(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    return (x->end > y->end) - (x->end < y->end);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct ps_safetensor *)a)->name, ((const struct ps_safetensor *)b)->name);
}

static enum ps_status check_places(const char *path, struct place *places, int n, uint64_t rest)
{
    qsort(places, (size_t)n, sizeof *places, by_place);
    uint64_t end = 0;
    for (int i = 0; i < n; i++) {
        if (places[i].begin != end) {
            return ps_fail(PS_CHECKPOINT,
                           "%s: tensor %s: begins at byte %" PRIu64 " of the values, and those before it end at %" PRIu64, path,
                           places[i].name, places[i].begin, end);
        }
        end = places[i].end;
    }
    return end == rest ? PS_OK
                       : ps_fail(PS_CHECKPOINT, "%s: %" PRIu64 " bytes of values, and its tensors take %" PRIu64, path, rest, end);
}

/* All entries of the header; values begin at `values`. */
static enum ps_status read_entries(const char *path, json_t *header, const char *values, uint64_t rest, struct place *places,
                                   struct ps_safetensors *file)
{
    const char *name;
    json_t *entry;
    json_object_foreach(header, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            continue;
        }
        struct ps_safetensor *t = &file->tensor[file->n];
        uint64_t begin = 0;
        PS_TRY(read_entry(path, name, entry, rest, t, &begin));
        t->bytes = values + begin;
        places[file->n++] = (struct place){begin, begin + (uint64_t)(t->count * dtype_bytes(t->dtype)), t->name};
    }
    qsort(file->tensor, (size_t)file->n, sizeof *file->tensor, by_name);
    return check_places(path, places, file->n, rest);
}

static enum ps_status parse(const char *path, const char *bytes, size_t size, struct ps_safetensors *file)
{
    uint64_t length = size < PREFIX ? 0 : little_endian((const unsigned char *)bytes, PREFIX);
    if (size < PREFIX || length > size - PREFIX) {
        return ps_fail(PS_CHECKPOINT, "%s: not safetensors, or cut off: %zu bytes, and its header alone takes %" PRIu64, path, size,
                       size < PREFIX ? (uint64_t)PREFIX : length);
    }
    if (length > LONGEST_HEADER) {
        return ps_fail(PS_CHECKPOINT, "%s: a header of %" PRIu64 " bytes; at most %d are read", path, length, LONGEST_HEADER);
    }
    json_error_t error;
    json_t *header = json_loadb(bytes + PREFIX, length, JSON_REJECT_DUPLICATES, &error);
    file->header = header;
    if (!json_is_object(header)) {
        return ps_fail(PS_CHECKPOINT, "%s: not safetensors: its header is not a JSON object%s%s", path, header ? "" : ": ",
                       header ? "" : ps_text_plain(error.text).text);
    }
    size_t n = json_object_size(header);
    struct place *places = malloc((n + 1) * sizeof *places);
    file->tensor = malloc((n + 1) * sizeof *file->tensor);
    enum ps_status status = places && file->tensor
                                ? read_entries(path, header, bytes + PREFIX + length, size - PREFIX - length, places, file)
                                : ps_fail(PS_CHECKPOINT, "%s: no memory for the table of %zu tensors", path, n);
    free(places);
    return status;
}

enum ps_status ps_safetensors_parse(const char *path, void *bytes, size_t size, struct ps_safetensors *file)
{
    *file = (struct ps_safetensors){.path = strdup(path), .bytes = bytes};
    enum ps_status status = file->path ? parse(path, bytes, size, file) : ps_fail(PS_CHECKPOINT, "%s: no memory", path);
    if (status != PS_OK) {
        ps_safetensors_free(file);
    }
    return status;
}

enum ps_status ps_safetensors_read(const char *path, struct ps_safetensors *file)
{
    char *bytes;
    size_t size;
    *file = (struct ps_safetensors){0};
    PS_TRY(ps_file_read(PS_CHECKPOINT, path, 0, &bytes, &size));
    return ps_safetensors_parse(path, bytes, size, file);
}

void ps_safetensors_free(struct ps_safetensors *file)
{
    for (int i = 0; i < file->n_shards; i++) {
        ps_safetensors_free(&file->shard[i]);
    }
    free(file->shard);
    json_decref(file->header);
    free(file->tensor);
    free(file->bytes);
    free(file->path);
    *file = (struct ps_safetensors){0};
}

const struct ps_safetensor *ps_safetensors_find(const struct ps_safetensors *file, const char *name)
{
    const struct ps_safetensor key = {.name = name};
    return file->n ? bsearch(&key, file->tensor, (size_t)file->n, sizeof key, by_name) : NULL;
}

/* ---- several files and their index ---- */

/* The place of the file that an entry of the index names, read when it is the first one to. */
static enum ps_status read_shard(const char *path, const char *tensor, json_t *entry, struct ps_safetensors *file, int *at)
{
    const char *name = json_string_value(entry), *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash - path) + 1 : 0;
    char *shard;
    PS_TRY(check_name(path, tensor));
    if (!name || !*name || strchr(name, '/') || strlen(name) > LONGEST_NAME) {
        return ps_fail(PS_CHECKPOINT, "%s: tensor %s: %s is not the name of a file beside it", path, tensor,
                       name ? ps_text_plain(name).text : "its entry");
    }
    if (asprintf(&shard, "%.*s%s", folder, path, name) < 0) {
        return ps_fail(PS_CHECKPOINT, "%s: no memory", path);
    }
    for (*at = 0; *at < file->n_shards && strcmp(file->shard[*at].path, shard) != 0; ++*at) {
    }
    enum ps_status status = PS_OK;
    if (*at == file->n_shards) {
        status = ps_safetensors_read(shard, &file->shard[*at]);
        file->n_shards += status == PS_OK;
    }
    free(shard);
    return status;
}

static enum ps_status read_map(const char *path, json_t *map, struct ps_safetensors *file)
{
    const char *name;
    json_t *entry;
    size_t n = json_object_size(map), held = 0;
    file->shard = calloc(n + 1, sizeof *file->shard);
    file->tensor = malloc((n + 1) * sizeof *file->tensor);
    if (!file->shard || !file->tensor) {
        return ps_fail(PS_CHECKPOINT, "%s: no memory for the table of %zu tensors", path, n);
    }
    json_object_foreach(map, name, entry)
    {
        int at = 0;
        PS_TRY(read_shard(path, name, entry, file, &at));
        const struct ps_safetensor *t = ps_safetensors_find(&file->shard[at], name);
        if (!t) {
            return ps_fail(PS_CHECKPOINT, "%s: tensor %s: is not in %s", path, name, file->shard[at].path);
        }
        file->tensor[file->n++] = *t;
    }
    for (int i = 0; i < file->n_shards; i++) {
        held += (size_t)file->shard[i].n;
    }
    qsort(file->tensor, (size_t)file->n, sizeof *file->tensor, by_name);
    return held == n ? PS_OK : ps_fail(PS_CHECKPOINT, "%s: names %zu tensors, and its files hold %zu", path, n, held);
}

enum ps_status ps_safetensors_read_index(const char *path, struct ps_safetensors *file)
{
    char *text;
    size_t size;
    json_error_t error;
    *file = (struct ps_safetensors){0};
    PS_TRY(ps_file_read(PS_CHECKPOINT, path, LONGEST_HEADER, &text, &size));
    json_t *index = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error), *map = json_object_get(index, "weight_map");
    free(text);
    file->path = strdup(path);
    enum ps_status status = !file->path           ? ps_fail(PS_CHECKPOINT, "%s: no memory", path)
                            : json_is_object(map) ? read_map(path, map, file)
                                                  : ps_fail(PS_CHECKPOINT, "%s: not a JSON object with a weight_map%s%s", path,
                                                            index ? "" : ": ", index ? "" : ps_text_plain(error.text).text);
    json_decref(index);
    if (status != PS_OK) {
        ps_safetensors_free(file);
    }
    return status;
}

/* ---- values ---- */

static double from_half(unsigned bits)
{
    int exponent = bits >> 10 & 31;
    double fraction = bits & 1023, magnitude;
    if (exponent == 31) {
        magnitude = fraction > 0 ? NAN : INFINITY;
    } else {
        magnitude = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    }
    return bits >> 15 ? -magnitude : magnitude;
}

static double element(const char *dtype, const unsigned char *bytes)
{
    if (strcmp(dtype, "F64") == 0) {
        uint64_t bits = little_endian(bytes, 8);
        double value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    if (strcmp(dtype, "F16") == 0) {
        return from_half((unsigned)little_endian(bytes, 2));
    }
    /* BF16 is the upper half of an F32. */
    uint32_t bits = strcmp(dtype, "BF16") == 0 ? (uint32_t)little_endian(bytes, 2) << 16 : (uint32_t)little_endian(bytes, 4);
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

enum ps_status ps_safetensors_values(const struct ps_safetensors *file, const struct ps_safetensor *t, float *values)
{
    if (strcmp(t->dtype, "F64") != 0 && strcmp(t->dtype, "F32") != 0 && strcmp(t->dtype, "F16") != 0 &&
        strcmp(t->dtype, "BF16") != 0) {
        return ps_fail(PS_CHECKPOINT, "%s: tensor %s: of dtype %s; F64, F32, F16 and BF16 are read", file->path, t->name, t->dtype);
    }
    int64_t each = dtype_bytes(t->dtype);
    for (int64_t i = 0; i < t->count; i++) {
        values[i] = (float)element(t->dtype, (const unsigned char *)t->bytes + i * each);
        if (!isfinite(values[i])) {
            return ps_fail(PS_CHECKPOINT, "%s: tensor %s: element %" PRId64 " is not finite, or too large for a float", file->path,
                           t->name, i);
        }
    }
    return PS_OK;
}

/* ---- writing ---- */

static int as_stored(const void *a, const void *b)
{
    const struct ps_safetensor *x = *(const struct ps_safetensor *const *)a, *y = *(const struct ps_safetensor *const *)b;
    int64_t wide = dtype_bytes(y->dtype) - dtype_bytes(x->dtype);
    return wide ? (wide > 0 ? 1 : -1) : strcmp(x->name, y->name);
}

/* The header's JSON, with spaces behind it so that values lie on a multiple of 8; malloc'ed. */
static char *make_header(const struct ps_safetensor *const *order, int n, size_t *length)
{
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    int64_t at = 0;
    for (int i = 0; i < n && header; i++) {
        const struct ps_safetensor *t = order[i];
        int64_t end = at + t->count * dtype_bytes(t->dtype);
        json_t *shape = json_array();
        for (int j = 0; j < t->rank; j++) {
            json_array_append_new(shape, json_integer(t->size[j]));
        }
        json_object_set_new(
            header, t->name,
            json_pack("{s:s, s:o, s:[I, I]}", "dtype", t->dtype, "shape", shape, "data_offsets", (json_int_t)at, (json_int_t)end));
        at = end;
    }
    char *text = header ? json_dumps(header, JSON_COMPACT) : NULL, *padded = NULL;
    json_decref(header);
    if (text && asprintf(&padded, "%s%*s", text, (int)(-strlen(text) & 7), "") < 0) {
        padded = NULL;
    }
    free(text);
    *length = padded ? strlen(padded) : 0;
    return padded;
}

enum ps_status ps_safetensors_make(const char *path, const struct ps_safetensor *tensors, int n, char **bytes, size_t *size)
{
    const struct ps_safetensor **order = malloc((size_t)(n + 1) * sizeof *order);
    size_t length = 0, values = 0;
    char *header = NULL;
    *bytes = NULL;
    for (int i = 0; order && i < n; i++) {
        order[i] = &tensors[i];
        values += (size_t)(tensors[i].count * dtype_bytes(tensors[i].dtype));
    }
    if (order) {
        qsort(order, (size_t)n, sizeof *order, as_stored);
        header = make_header(order, n, &length);
    }
    *size = PREFIX + length + values;
    char *out = header ? malloc(*size) : NULL, *at = out;
    if (out) {
        for (int i = 0; i < PREFIX; i++) {
            *at++ = (char)((uint64_t)length >> 8 * i & 255);
        }
        memcpy(at, header, length);
        at += length;
        for (int i = 0; i < n; i++) { /* this project's machines are little-endian, as the format is */
            size_t part = (size_t)(order[i]->count * dtype_bytes(order[i]->dtype));
            memcpy(at, order[i]->bytes, part);
            at += part;
        }
    }
    free(header);
    free(order);
    *bytes = out;
    return out ? PS_OK : ps_fail(PS_CHECKPOINT, "%s: no memory for the file's contents", path);
}
