/* What ranks send each other through MPI: the table of libpatchstep_mpi, the one library that is linked to MPI, which src/ranks.c
 * loads where there is more than one rank. */
#ifndef PS_SRC_MPI_TRANSPORT_H
#define PS_SRC_MPI_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

enum { PS_TRANSPORT_VERSION = 1 };

/* Every call but abort and close is made by all ranks in the same order. They return NULL, or in one line what MPI says. */
struct ps_transport {
    int version;
    int rank, size;
    int local; /* the rank's number among those of its host */
    char host[64], library[64];
    /* all [size][bytes]: what each rank gave. */
    const char *(*gather)(const void *mine, size_t bytes, void *all);
    /* bytes of rank `from` to every rank. */
    const char *(*broadcast)(void *values, size_t bytes, int from);
    /* values [begin[size]] are in as many parts as there are ranks, of elements of 4 or 8 bytes, part r from begin[r] on. scatter:
     * parts [size][begin[rank + 1] - begin[rank]] = every rank's part number `rank`; collect: each rank's own part to all. */
    const char *(*scatter)(const void *values, size_t element, const int64_t *begin, void *parts);
    const char *(*collect)(void *values, size_t element, const int64_t *begin);
    /* Ends every rank. */
    void (*abort)(int code);
    void (*close)(void);
};

/* MPI_Init, and the table; NULL with what MPI says in error. */
typedef const struct ps_transport *ps_transport_open_function(char error[256]);
ps_transport_open_function ps_transport_open;

#endif
