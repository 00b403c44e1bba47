/* Tensors for the double reference, whose device is the CPU: host memory serves. */
#ifndef PS_TESTS_REFERENCE_H
#define PS_TESTS_REFERENCE_H

#include <math.h>

#include "tests/random_values.h"
#include "tests/tables.h"

static inline void fill_normal(double *values, int64_t count, uint64_t seed)
{
    for (int64_t i = 0; i < count; i++) {
        values[i] = random_normal(&seed);
    }
}

static inline struct ps_tensor vector(double *values, int64_t n)
{
    return ps_tensor_1d(values, PS_F64, n);
}

static inline struct ps_tensor matrix(double *values, int64_t rows, int64_t columns)
{
    return ps_tensor_2d(values, PS_F64, rows, columns);
}

static inline void expect_close(double result, double right, double tolerance)
{
    ck_assert_msg(fabs(result - right) <= tolerance * (1 + fabs(right)), "%.17g, not %.17g", result, right);
}

#endif
