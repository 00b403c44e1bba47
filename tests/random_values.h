/* Random numbers for the values that tests are given, each drawn from a state that the caller keeps. */
#ifndef PS_TESTS_RANDOM_VALUES_H
#define PS_TESTS_RANDOM_VALUES_H

#include <math.h>
#include <stdint.h>

#define RANDOM_STEP 0x9e3779b97f4a7c15u /* splitmix64's */

/* The state behind so many draws. */
static inline uint64_t random_behind(uint64_t random, int64_t draws)
{
    return random + (uint64_t)draws * RANDOM_STEP;
}

static inline uint64_t random_bits(uint64_t *random)
{
    uint64_t z = *random += RANDOM_STEP;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline double random_uniform(uint64_t *random)
{
    return ((double)(random_bits(random) >> 11) + 0.5) * 0x1p-53;
}

/* Unit normal, rounded to float, by two draws. */
static inline double random_normal(uint64_t *random)
{
    double radius = sqrt(-2 * log(random_uniform(random)));
    return (float)(radius * cos(2 * M_PI * random_uniform(random)));
}

static inline int64_t random_between(uint64_t *random, int64_t low, int64_t high)
{
    return low + (int64_t)(random_bits(random) % (uint64_t)(high - low + 1));
}

#endif
