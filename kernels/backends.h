/* What kernels/device.c and kernels/open.c choose among. Private to kernels/. */
#ifndef PS_KERNELS_BACKENDS_H
#define PS_KERNELS_BACKENDS_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum ps_status ps_cpu_device_open(int threads, struct ps_device **device);

/* fp64 and fp32. Fills every entry but the optional ones; works on a cpu device. */
enum ps_status ps_reference_kernels_open(struct ps_device *device, enum ps_precision precision, struct ps_kernels **kernels);
/* fp32; tf32 too, computed as fp32. Starts from the reference's entries and overrides those worth it. */
enum ps_status ps_cpu_kernels_open(struct ps_device *device, enum ps_precision precision, struct ps_kernels **kernels);

/* Only where the build has CUDA (PS_HAVE_CUDA). */
enum ps_status ps_cuda_device_open(int index, struct ps_device **device);
enum ps_status ps_cuda_kernels_open(struct ps_device *device, enum ps_precision precision, const struct ps_kernels_options *options,
                                    struct ps_kernels **kernels);
enum ps_status ps_cuda_kernels_choices(const struct ps_gpu *gpu, enum ps_precision precision,
                                       const struct ps_kernels_options *options, struct ps_kernels **kernels);

#ifdef __cplusplus
}
#endif
#endif
