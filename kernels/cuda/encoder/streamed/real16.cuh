/* One encoder layer on the chip for 64 < d_model <= 128, forward and backward, with operands of 16 bits. The launchers of
 * encoder/streamed/real16.cu. */
#ifndef PS_KERNELS_CUDA_ENCODER_LARGE_CUH
#define PS_KERNELS_CUDA_ENCODER_LARGE_CUH

#include "kernels/cuda/context.cuh"
#include "kernels/cuda/encoder/request.cuh"
#include "kernels/cuda/tile/types.cuh"

namespace PS_REAL16_SPACE
{

/* Parameters of a layer, or their gradients, as model/parameters.h names them. */
struct ps_encoder_large_vectors {
    const float *ln1_gamma, *ln1_beta, *b_qkv, *b_o, *ln2_gamma, *ln2_beta, *b_1, *b_2;
};

struct ps_encoder_large_gradients {
    float *w_qkv, *w_o, *w_1, *w_2, *ln1_gamma, *ln1_beta, *b_qkv, *b_o, *ln2_gamma, *ln2_beta, *b_1, *b_2;
    int64_t matrix_stride, vector_stride; /* to the next layer's: of the first four, and of the others */
};

struct ps_encoder_large {
    int64_t sequences, patches, d_model, n_heads, d_ff; /* S, N, d, h, f */
    int64_t layers, number;                             /* of the encoder; this one's, 0 for the last */
    float epsilon;
    struct ps_dropout attention, hidden, output;
    const void *u;     /* real16 [S, N, d] */
    void *residual;    /* real16 [S, N, d]: r. Forward: =; backward reads it */
    float *softmax;    /* fp32 [S, h, N]: log2 of each query's sum of exponentials. Forward: =; backward reads it */
    void *kept;        /* dropout's draws, a bit an element. Forward: =; backward reads it */
    const void *w_qkv; /* real16 [d, 3d] */
    const void *w_o;   /* real16 [d, d] */
    const void *w_1;   /* real16 [d, f] */
    const void *w_2;   /* real16 [f, d] */
    struct ps_encoder_large_vectors vectors; /* fp32 */
    const struct ps_cuda_context *context;
};

} // namespace PS_REAL16_SPACE

#endif
