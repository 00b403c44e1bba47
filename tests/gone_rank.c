/* An MPI that notices by itself when a rank is gone, as NCCL does, for LD_PRELOAD: rank PS_GONE_RANK holds a lock on the file
 * PS_GONE_LOCK while its process lives, and the others' exchanges fail once it is free again. */
#include <fcntl.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

static int is_gone(void)
{
    static int file = -1, seen;
    const int holds = strcmp(getenv("OMPI_COMM_WORLD_RANK"), getenv("PS_GONE_RANK")) == 0, opened = file >= 0;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    file = opened ? file : open(getenv("PS_GONE_LOCK"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (holds) {
        return !opened && fcntl(file, F_SETLK, &lock) != 0;
    }
    const int held = fcntl(file, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
    seen |= held;
    return seen && !held;
}

int MPI_Test(MPI_Request *request, int *done, MPI_Status *status)
{
    return is_gone() ? MPI_ERR_OTHER : PMPI_Test(request, done, status);
}
