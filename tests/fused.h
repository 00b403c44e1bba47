/* Whether level layer can be tested here. */
#ifndef PS_TESTS_FUSED_H
#define PS_TESTS_FUSED_H

#include "kernels/kernels.h"
#include "tests/checks.h"

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

/* Counted over a training step at level layer: the encoder is one call each way, and beside it stand the ends alone: 5 products at
 * most, and 3 sums for biases and positions. */
static inline void expect_encoder_alone(const struct ps_counts *counts)
{
    ck_assert_int_eq(counts->calls[PS_OP_encoder_forward], 1);
    ck_assert_int_eq(counts->calls[PS_OP_encoder_backward], 1);
    for (int op = 0; op < PS_OP_COUNT; op++) {
        enum ps_kind kind = ps_op_kind(op);
        int layers = kind == PS_KIND_SUB || kind == PS_KIND_ELEMENTARY || kind == PS_KIND_GEMM || op == PS_OP_attention ||
                     op == PS_OP_attention_backward;
        int most = !layers ? 1 : op == PS_OP_gemm ? 5 : op == PS_OP_bias_grad ? 3 : 0;
        ck_assert_msg(counts->calls[op] <= most, "%s is called %lld times beside the encoder", ps_op_name(op),
                      (long long)counts->calls[op]);
    }
}

#endif
