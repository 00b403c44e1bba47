/* Checkpoints that a test has changed, with a digest that is right again. */
#ifndef PS_TESTS_SEAL_H
#define PS_TESTS_SEAL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/files.h"
#include "src/digest.h"
#include "tests/checks.h"

static inline void seal(const char *path)
{
    size_t size;
    char *bytes, digest[PS_DIGEST_HEX];
    ck_assert_msg(ps_file_read(PS_DATA, path, 0, &bytes, &size) == PS_OK, "%s", ps_error_message());
    ck_assert_int_eq(ps_digest(bytes + 512, size - 512, digest), 1);
    memset(bytes, 0, 512);
    snprintf(bytes, 512, "PatchStep checkpoint\nformat 1\nlength %zu\nsha256 %s\n", size, digest);
    FILE *file = fopen(path, "r+b");
    ck_assert_msg(file != NULL && fwrite(bytes, 1, 512, file) == 512 && fclose(file) == 0, "%s cannot be written", path);
    free(bytes);
}

#endif
