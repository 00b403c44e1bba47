/* What the families of kernels for the whole encoder are asked, and what they answer (encoder/choose.cu asks). */
#ifndef PS_KERNELS_CUDA_ENCODER_REQUEST_CUH
#define PS_KERNELS_CUDA_ENCODER_REQUEST_CUH

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

/* R = sequences * patches rows. real: the table's activations. */
struct ps_encoder_request : ps_encoder_sizes {
    int64_t sequences, patches, d_model; /* S, N, d; h, f and what is the same for all batches: the sizes */
    const void *weights;                 /* flat, real */
    const float *parameters;             /* flat, fp32: biases, gamma, beta and, by streamed/ in bf16, W_qkv are read here */
    float *gradients;                    /* flat, fp32, +=; backward only */
    void *u;                             /* real [layers + 1, R, d]: u[0] is read, the others are written */
    void *kept;        /* what backward reads again: the plan's kept_bytes; NULL forward: nothing is kept (inference) */
    size_t kept_bytes; /* of the plan of the most sequences */
    const void *dy;    /* real [R, d], gradient of u[layers] */
    void *du;          /* real [R, d], gradient of u[0]; may be dy */
    void *workspace;   /* of the family's workspace_bytes, zeroed once when it is allocated */
    /* The embedding, of windows of seq_len and patches of patch_len (workspace and kept have room for it when it is served), and
     * the head of a training step, pred_len ahead. */
    int64_t seq_len, patch_len, pred_len;
    const struct ps_embed_forward *embed;           /* forward does it first, or NULL */
    const struct ps_head_step *head;                /* forward ends with it, or NULL; only with embed */
    const struct ps_embed_backward *embed_gradient; /* backward adds its gradients too, and du is scratch; or NULL */
    const struct ps_head_gradient *head_gradient;   /* and these, or NULL; only with embed_gradient */
    const struct ps_adamw *update;                  /* and this, or NULL; only with head_gradient */
    bool fresh;                                     /* the kernel before may have written weights or parameters */
    bool headed;                                    /* backward: the forward had `head`, whose dz is dy */
    bool other_rate;                                /* of dropout the embedding has than W_o */
};

/* Rows before the request's, where it is a part of a batch that ranks share. */
static inline uint32_t ps_rows_before(const struct ps_encoder_request *r)
{
    return (uint32_t)((uint64_t)r->dropout.first * 8 / (uint64_t)r->d_model);
}

/* ps_dropout.first after gelu. */
static inline uint32_t ps_hidden_first(const struct ps_encoder_request *r)
{
    return ps_rows_before(r) * (uint32_t)(r->d_ff / 8);
}

/* Which kernels serve a request, found once for each number of sequences and kept (encoder/choose.cu). */
struct ps_encoder_plan {
    const struct ps_encoder_family *family;
    const char *kernels; /* of the family: the name of those that run */
    void *own;           /* the family's, from malloc; or NULL */
    size_t kept_bytes;
    const struct ps_encoder_family *within; /* ps_encoder_tf32's: fp16's, which does the layers */
    bool slower;                            /* than level gemm, as far as measured */
    bool room;                              /* beside its backward's blocks, as ps_encoder_needs has it */
};

/* A set of kernels for the whole encoder. All but `plan` get a plan of its own for the request's sizes. */
struct ps_encoder_family {
    /* PS_UNSUPPORTED with sizes and limits when it does not serve them. Pointers are not looked at. */
    enum ps_status (*plan)(const struct ps_kernels *k, const struct ps_encoder_request *r, struct ps_encoder_plan *plan);
    /* How much of a step it can be asked for. */
    enum ps_encoder_span (*span)(const struct ps_kernels *k, const struct ps_encoder_request *r,
                                 const struct ps_encoder_plan *plan);
    /* Bytes of both directions' workspace, for all shorter batches too. */
    size_t (*workspace_bytes)(const struct ps_kernels *k, const struct ps_encoder_request *r, const struct ps_encoder_plan *plan);
    /* Enqueued on the context's stream; may be captured. */
    enum ps_status (*forward)(const struct ps_kernels *k, const struct ps_encoder_request *r, const struct ps_encoder_plan *plan);
    enum ps_status (*backward)(const struct ps_kernels *k, const struct ps_encoder_request *r, const struct ps_encoder_plan *plan);
};

/* encoder/tf32.cu: tf32 by fp16's family, whose plan becomes tf32's. */
void ps_encoder_tf32_take_over(const struct ps_encoder_request *e, struct ps_encoder_plan *plan);

/* Of a flat tensor: elements first .. first + count - 1. */
struct ps_encoder_part {
    int64_t first, count;
};
/* The layers' matrices. */
struct ps_encoder_part ps_encoder_matrices(const struct ps_encoder_request *e);
/* Those of the weights to `weights`, and u[0] to `rows` where there are, as fp16; so many words zero, at most 256. */
enum ps_status ps_encoder_tf32_take(const struct ps_kernels *k, const struct ps_encoder_request *e, void *weights, void *rows,
                                    unsigned *zeroed, int words);
/* The bits of dy's largest magnitude, onto what is at `peak`. */
enum ps_status ps_encoder_tf32_peak(const struct ps_kernels *k, const struct ps_encoder_request *e, unsigned *peak);

extern const struct ps_encoder_family ps_encoder_d64_bf16, ps_encoder_d64_fp16, ps_encoder_d64_tf32, ps_encoder_halves_bf16,
    ps_encoder_halves_fp16, ps_encoder_resident_bf16, ps_encoder_resident_fp16;

namespace level_bf16
{
extern const struct ps_encoder_family ps_encoder_streamed;
}
namespace level_fp16
{
extern const struct ps_encoder_family ps_encoder_streamed;
}

#endif
