/* Graphs that are not captured: capture keeps body and argument, and each replay calls it. The CPU's way; and that of a device
 * whose steps wait for the host, which a captured graph cannot. */
#ifndef PS_KERNELS_UNCAPTURED_H
#define PS_KERNELS_UNCAPTURED_H

#include "kernels/device.h"

/* Before the device's first capture. */
void ps_device_uncapture(struct ps_device *device);

#endif
