/* The few functions of NCCL that are used, as its nccl.h has them throughout major version 2. It is loaded when several ranks need
 * it, so that no build needs its headers, and no program of one rank its library. */
#ifndef PS_KERNELS_CUDA_EXCHANGE_NCCL_H
#define PS_KERNELS_CUDA_EXCHANGE_NCCL_H

#include <cuda_runtime.h>

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef int ncclResult_t; /* enums there, of int */
typedef int ncclDataType_t;
typedef int ncclRedOp_t;

enum { ncclSuccess = 0, ncclRemoteError = 6, ncclSum = 0, ncclUint8 = 1, ncclFloat32 = 7, ncclFloat64 = 8 };

#define PS_NCCL_FUNCTIONS(X)                                                                                            \
    X(ncclResult_t, ncclGetVersion, (int *version))                                                                     \
    X(const char *, ncclGetErrorString, (ncclResult_t result))                                                          \
    X(const char *, ncclGetLastError, (ncclComm_t comm))                                                                \
    X(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id))                                                               \
    X(ncclResult_t, ncclCommInitRank, (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank))                        \
    X(ncclResult_t, ncclAllReduce,                                                                                      \
      (const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t s)) \
    X(ncclResult_t, ncclAllGather,                                                                                      \
      (const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t s))                 \
    X(ncclResult_t, ncclCommAbort, (ncclComm_t comm))

#endif
