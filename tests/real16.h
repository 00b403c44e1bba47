/* bf16 and fp16 on the host. */
#ifndef PS_TESTS_REAL16_H
#define PS_TESTS_REAL16_H

#include <stdint.h>
#include <string.h>

#include "kernels/tensor.h"

/* A bf16 is the high half of a float. */
static inline double bf16_value(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return (double)value;
}

/* Of the float nearest to value, rounded to nearest, ties to even; NaN stays NaN. */
static inline uint16_t bf16_bits(double value)
{
    float rounded = (float)value;
    uint32_t word;
    memcpy(&word, &rounded, sizeof word);
    if (value != value) {
        return 0x7fff;
    }
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

__extension__ typedef _Float16 fp16;

static inline double fp16_value(uint16_t bits)
{
    fp16 value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Of the float nearest to value, as above; infinite from 65520 on. */
static inline uint16_t fp16_bits(double value)
{
    fp16 rounded = (fp16)(float)value;
    uint16_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}

/* value as `type` holds it: a type of 16 bits, or float for all others. */
static inline double rounded_to(enum ps_type type, double value)
{
    return type == PS_BF16 ? bf16_value(bf16_bits(value)) : type == PS_F16 ? fp16_value(fp16_bits(value)) : (double)(float)value;
}

#endif
