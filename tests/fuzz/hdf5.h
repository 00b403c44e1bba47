/* For targets whose input is an HDF5 file. */
#ifndef PS_TESTS_FUZZ_HDF5_H
#define PS_TESTS_FUZZ_HDF5_H

#include "tests/fuzz/fuzz.h"

/* libhdf5 forgets memory where it gives up on a file; the child that this happens in ends. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libhdf5\nleak:H5\n";
}

/* libhdf5's own sum (Jenkins' lookup3); exported, not declared for programs. */
uint32_t H5_checksum_metadata(const void *data, size_t size, uint32_t start);

static inline void put_sum(uint8_t *begin, size_t length, const uint8_t *end)
{
    if (begin + length + 4 <= end) {
        uint32_t sum = H5_checksum_metadata(begin, length, 0);
        memcpy(begin + length, &sum, 4);
    }
}

/* Headers of the newer format carry sums, at which a mutation would end: superblocks and object headers get theirs again. */
static inline void put_sums(uint8_t *data, size_t size)
{
    uint8_t *end = data + size;
    for (uint8_t *at = data; at + 16 <= end; at++) {
        if (memcmp(at, "\x89HDF", 4) == 0 && (at[8] == 2 || at[8] == 3)) {
            put_sum(at, 44, end);
        } else if (memcmp(at, "OHDR", 4) == 0 && at[4] == 2) {
            size_t head = 6 + (at[5] & 0x20 ? 16 : 0) + (at[5] & 0x10 ? 4 : 0), wide = (size_t)1 << (at[5] & 3);
            uint64_t length = 0;
            if (at + head + wide <= end) {
                memcpy(&length, at + head, wide);
                if (length < size) {
                    put_sum(at, head + wide + length, end);
                }
            }
        }
    }
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed)
{
    size = LLVMFuzzerMutate(data, size, most);
    if (seed % 8) {
        put_sums(data, size);
    }
    return size;
}

#endif
