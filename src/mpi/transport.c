/* All calls are the nonblocking ones, waited for in the open: a rank that waits gives its processor to others, of which there may
 * be more than processors. */
#include "src/mpi/transport.h"

#include <limits.h>
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/clock.h"

#define SPIN_SECONDS 2e-5
#define YIELD_SECONDS 5e-3

static struct ps_transport table;
static int *counts, *places; /* [size] */

static const char *said(int error)
{
    static char text[MPI_MAX_ERROR_STRING + 8];
    if (error == MPI_SUCCESS) {
        return NULL;
    }
    int length = 0;
    memcpy(text, "MPI: ", 6);
    MPI_Error_string(error, text + 5, &length);
    text[strcspn(text, "\n")] = 0;
    return text;
}

static const char *finish(int error, MPI_Request *request)
{
    int done = 0;
    double begin = 0;
    for (long looks = 0; error == MPI_SUCCESS && !done; looks++) {
        error = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (!done && looks % 16 == 15) {
            const double now = ps_seconds();
            begin = begin > 0 ? begin : now;
            if (now - begin > YIELD_SECONDS) {
                ps_nap();
            } else if (now - begin > SPIN_SECONDS) {
                sched_yield();
            }
        }
    }
    return said(error);
}

/* How many elements of 8, 4 or 1 bytes a message has. */
static MPI_Datatype type_of(size_t element)
{
    return element == 8 ? MPI_INT64_T : element == 4 ? MPI_INT32_T : MPI_BYTE;
}

static const char *gather(const void *mine, size_t bytes, void *all)
{
    MPI_Request request;
    return bytes > INT_MAX
               ? "a message of more than 2 GiB"
               : finish(MPI_Iallgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD, &request), &request);
}

static const char *broadcast(void *values, size_t bytes, int from)
{
    enum { PIECE = 1 << 28 };
    const char *error = NULL;
    for (size_t done = 0; done < bytes && !error; done += PIECE) {
        MPI_Request request;
        const size_t left = bytes - done;
        error =
            finish(MPI_Ibcast((char *)values + done, (int)(left < PIECE ? left : PIECE), MPI_BYTE, from, MPI_COMM_WORLD, &request),
                   &request);
    }
    return error;
}

/* counts and places of the parts. */
static const char *parts_of(const int64_t *begin)
{
    if (begin[table.size] > INT_MAX) {
        return "a sum of more than 2147483647 values";
    }
    for (int r = 0; r < table.size; r++) {
        places[r] = (int)begin[r];
        counts[r] = (int)(begin[r + 1] - begin[r]);
    }
    return NULL;
}

static const char *scatter(const void *values, size_t element, const int64_t *begin, void *parts)
{
    const char *error = parts_of(begin);
    if (error) {
        return error;
    }
    int *mine = counts + table.size, *from = places + table.size;
    for (int r = 0; r < table.size; r++) {
        mine[r] = counts[table.rank];
        from[r] = r * counts[table.rank];
    }
    MPI_Request request;
    const MPI_Datatype type = type_of(element);
    return finish(MPI_Ialltoallv(values, counts, places, type, parts, mine, from, type, MPI_COMM_WORLD, &request), &request);
}

static const char *collect(void *values, size_t element, const int64_t *begin)
{
    const char *error = parts_of(begin);
    MPI_Request request;
    return error ? error
                 : finish(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, values, counts, places, type_of(element),
                                          MPI_COMM_WORLD, &request),
                          &request);
}

static void abort_all(int code)
{
    MPI_Abort(MPI_COMM_WORLD, code);
}

static void close_all(void)
{
    MPI_Finalize();
    free(counts);
    free(places);
}

const struct ps_transport *ps_transport_open(char error[256])
{
    int provided, length = 0;
    char name[MPI_MAX_PROCESSOR_NAME + 1] = "", library[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
    const char *cause = said(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided));
    if (cause) {
        snprintf(error, 256, "%s", cause);
        return NULL;
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    table = (struct ps_transport){.version = PS_TRANSPORT_VERSION,
                                  .gather = gather,
                                  .broadcast = broadcast,
                                  .scatter = scatter,
                                  .collect = collect,
                                  .abort = abort_all,
                                  .close = close_all};
    MPI_Comm_rank(MPI_COMM_WORLD, &table.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &table.size);
    MPI_Get_processor_name(name, &length);
    MPI_Get_library_version(library, &length);
    library[strcspn(library, ",\n")] = 0;
    snprintf(table.host, sizeof table.host, "%.63s", name);
    snprintf(table.library, sizeof table.library, "%.63s", library);
    MPI_Comm host;
    if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host) == MPI_SUCCESS) {
        MPI_Comm_rank(host, &table.local);
        MPI_Comm_free(&host);
    }
    counts = malloc(2 * (size_t)table.size * sizeof *counts);
    places = malloc(2 * (size_t)table.size * sizeof *places);
    if (!counts || !places) {
        snprintf(error, 256, "no memory");
        return NULL;
    }
    return &table;
}
