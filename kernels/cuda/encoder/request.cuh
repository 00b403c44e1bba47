/* The whole encoder forward in one kernel and backward in one (plus the sum of the weight gradients), for models whose layer stays
 * on one multiprocessor: d_model 16, 32 or 64, heads of 4, 8 or 16 columns, N <= 64, d_ff <= 256. Operands of 16 bits, fp32 sums.
 * encoder/resident/resident.cu chooses and launches; encoder/resident/d64_short.cu has the kernels for d_model 64 with short
 * sequences. */
#ifndef PS_KERNELS_CUDA_ENCODER_SMALL_CUH
#define PS_KERNELS_CUDA_ENCODER_SMALL_CUH

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/tile/types.cuh"
#include "kernels/kernels.h"

/* R = sequences * patches rows. real: the table's activations. */
struct ps_encoder_small {
    int64_t sequences, patches, d_model, n_heads, d_ff, layers; /* S, N, d, h, f */
    struct ps_encoder_layout offsets;
    const void *weights;     /* flat, real */
    const float *parameters; /* flat, fp32: biases, gamma and beta are read here */
    float *gradients;        /* flat, fp32, +=; backward only */
    void *u;                 /* real [layers + 1, R, d]: u[0] is read, the others are written */
    void *kept;              /* what backward reads again: the family's kept_bytes; NULL forward: nothing is kept (inference) */
    const void *dy;          /* real [R, d], gradient of u[layers] */
    void *du;                /* real [R, d], gradient of u[0]; may be dy */
    void *workspace;         /* of the family's workspace_bytes, zeroed once when it is allocated; the small family's is backward's
                                alone */
    /* The first layer's sites are dropout.site (after W_o), + 1 (after gelu), + 2 (after W_2); three more a layer. */
    struct ps_dropout dropout;
    double epsilon;
    /* The embedding, of windows of seq_len and patches of patch_len (workspace and kept have room for it when it is served), and
     * the head of a training step, pred_len ahead. */
    int64_t seq_len, patch_len, pred_len;
    const struct ps_embed_forward *embed;           /* forward does it first, or NULL */
    const struct ps_head_step *head;                /* forward ends with it, or NULL; only with embed */
    const struct ps_embed_backward *embed_gradient; /* backward adds its gradients too, and du is scratch; or NULL */
    const struct ps_head_gradient *head_gradient;   /* and these, or NULL; only with embed_gradient */
    const struct ps_adamw *update;                  /* and this, or NULL; only with head_gradient */
    bool fresh;                                     /* the kernel before may have written weights or parameters */
};

namespace PS_REAL16_SPACE
{

#ifndef PS_COMPILE_FP32
/* Bytes kept between forward and backward: the residual stream after attention (real), log of softmax's sums (fp32), and one bit
 * an element of dropout's masks when `dropout`. 0 for sizes that are not served. */
size_t ps_encoder_small_kept_bytes(const struct ps_encoder_small *e);
/* Bytes of the partial weight gradients, on the current device. 0 for sizes that are not served. */
size_t ps_encoder_small_workspace_bytes(const struct ps_encoder_small *e);
/* Whether it can be asked for the embedding too. */
int ps_encoder_small_embeds(const struct ps_encoder_small *e);
/* Whether forward can be asked for the head too; and backward for the rest of it. */
int ps_encoder_small_heads(const struct ps_encoder_small *e);
int ps_encoder_small_ends(const struct ps_encoder_small *e);
/* PS_OK when the current device serves these sizes, else PS_UNSUPPORTED with the sizes and limits. Pointers are not looked at. */
enum ps_status ps_encoder_small_supported(const struct ps_encoder_small *e);

/* Enqueued on `stream` (a cudaStream_t); may be captured. */
enum ps_status ps_encoder_small_forward(const struct ps_encoder_small *e, void *stream);
enum ps_status ps_encoder_small_backward(const struct ps_encoder_small *e, void *stream);
#else
PS_ABSENT(size_t, ps_encoder_small_kept_bytes, 0)
PS_ABSENT(size_t, ps_encoder_small_workspace_bytes, 0)
PS_ABSENT(int, ps_encoder_small_embeds, 0)
PS_ABSENT(int, ps_encoder_small_heads, 0)
PS_ABSENT(int, ps_encoder_small_ends, 0)
PS_ABSENT(ps_status, ps_encoder_small_supported, PS_UNSUPPORTED)
PS_ABSENT(ps_status, ps_encoder_small_forward, PS_UNSUPPORTED)
PS_ABSENT(ps_status, ps_encoder_small_backward, PS_UNSUPPORTED)
#endif

} // namespace PS_REAL16_SPACE

#endif
