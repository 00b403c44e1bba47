/* Whether level layer can be tested here. */
#ifndef PS_TESTS_FUSED_H
#define PS_TESTS_FUSED_H

#include "kernels/kernels.h"

/* This build and the first CUDA device have the fused encoder. */
static inline int fused_encoder(void)
{
    struct ps_device *device;
    struct ps_kernels *k;
    if (ps_device_open("cuda", 0, &device) != PS_OK) {
        return 0;
    }
    int there = 0;
    if (ps_kernels_open("cuda", device, PS_PRECISION_BF16, NULL, &k) == PS_OK) {
        there = k->encoder_forward != NULL;
        k->close(k);
    }
    device->close(device);
    return there;
}

#endif
