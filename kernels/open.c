#include <math.h>
#include <string.h>

#include "kernels/backends.h"

struct ps_dropout ps_dropout_make(double p, uint64_t seed, uint32_t site, const struct ps_step_state *state)
{
    /* At most 65535, so that the scale of what is kept stays finite. */
    uint32_t threshold = (uint32_t)fmin(round(p * 65536), 65535);
    return (struct ps_dropout){
        .threshold = threshold,
        .scale = (float)(65536.0 / (65536.0 - threshold)),
        .site = site,
        .seed = seed,
        .state = state,
    };
}

static enum ps_status needs_device(const char *backend, const char *kind, const struct ps_device *device)
{
    if (strcmp(device->kind, kind) != 0) {
        return ps_fail(PS_DEVICE, "backend \"%s\" works on a %s device, not on a %s device", backend, kind, device->kind);
    }
    return PS_OK;
}

#ifdef PS_HAVE_CUDA
static const struct ps_kernels_options defaults = {.tiny_gemm = 1};
#endif

enum ps_status ps_kernels_open(const char *backend, struct ps_device *device, enum ps_precision precision,
                               const struct ps_kernels_options *options, struct ps_kernels **kernels)
{
    if (strcmp(backend, "reference") == 0) {
        PS_TRY(needs_device(backend, "cpu", device));
        return ps_reference_kernels_open(device, precision, kernels);
    }
    if (strcmp(backend, "cpu") == 0) {
        PS_TRY(needs_device(backend, "cpu", device));
        return ps_cpu_kernels_open(device, precision, kernels);
    }
    if (strcmp(backend, "cuda") == 0) {
#ifdef PS_HAVE_CUDA
        PS_TRY(needs_device(backend, "cuda", device));
        return ps_cuda_kernels_open(device, precision, options ? options : &defaults, kernels);
#else
        (void)options;
        return ps_fail(PS_DEVICE, "this build has no CUDA backend");
#endif
    }
    return ps_fail(PS_USAGE, "backend \"%s\" does not exist; reference, cpu and cuda do", backend);
}

enum ps_status ps_kernels_choices(const struct ps_gpu *gpu, enum ps_precision precision, const struct ps_kernels_options *options,
                                  struct ps_kernels **kernels)
{
#ifdef PS_HAVE_CUDA
    return ps_cuda_kernels_choices(gpu, precision, options ? options : &defaults, kernels);
#else
    (void)gpu, (void)precision, (void)options, (void)kernels;
    return ps_fail(PS_UNSUPPORTED, "this build has no CUDA backend");
#endif
}
