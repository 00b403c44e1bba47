#include "kernels/kernels.h"

const char *ps_precision_name(enum ps_precision precision)
{
    switch (precision) {
    case PS_FP64:
        return "fp64";
    case PS_FP32:
        return "fp32";
    case PS_TF32:
        return "tf32";
    case PS_PRECISION_BF16:
        return "bf16";
    case PS_FP16:
        return "fp16";
    }
    return "?";
}
