/* The number of an array's elements. */
#ifndef PS_TESTS_LENGTH_H
#define PS_TESTS_LENGTH_H

#define LENGTH(array) ((int)(sizeof(array) / sizeof((array)[0])))

#endif
