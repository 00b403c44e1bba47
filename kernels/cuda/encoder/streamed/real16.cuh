/* One encoder layer on the chip for 64 < d_model <= 128, forward and backward, with operands of 16 bits. The launchers of
 * encoder/streamed/real16.cu. */
#ifndef PS_KERNELS_CUDA_ENCODER_LARGE_CUH
#define PS_KERNELS_CUDA_ENCODER_LARGE_CUH

#include "kernels/cuda/context.cuh"
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

#ifndef PS_COMPILE_TF32
/* y = the layer of u; residual = r. y real16 [S, N, d], 16-byte aligned like every such tensor here. */
enum ps_status ps_cuda_encoder_large_forward(const struct ps_encoder_large *layer, void *y);

/* du =, gradients += (fp32). du may be dy; dy, du real16 [S, N, d]. To be called for the last layer first, each with the same
 * workspace: the weights' gradients of all layers are complete after the first layer's call, which is given its own. */
enum ps_status ps_cuda_encoder_large_backward(const struct ps_encoder_large *layer, void *du, const void *dy,
                                              const struct ps_encoder_large_gradients *gradients, void *workspace,
                                              size_t workspace_bytes);

/* Bytes of layer->kept: 0 without dropout. */
size_t ps_cuda_encoder_large_kept_bytes(const struct ps_encoder_large *layer);

/* Bytes of backward's workspace; the rows are taken in chunks, so that it stays below 400 MiB whatever S, and 4 to 6 MB a layer. */
size_t ps_cuda_encoder_large_workspace(const struct ps_encoder_large *layer);

/* PS_OK, or PS_UNSUPPORTED with the sizes: what neither launcher can serve. */
enum ps_status ps_cuda_encoder_large_supported(const struct ps_encoder_large *layer);
#else
PS_ABSENT(ps_status, ps_cuda_encoder_large_forward, PS_UNSUPPORTED)
PS_ABSENT(ps_status, ps_cuda_encoder_large_backward, PS_UNSUPPORTED)
PS_ABSENT(size_t, ps_cuda_encoder_large_kept_bytes, 0)
PS_ABSENT(size_t, ps_cuda_encoder_large_workspace, 0)
PS_ABSENT(ps_status, ps_cuda_encoder_large_supported, PS_UNSUPPORTED)
#endif

} // namespace PS_REAL16_SPACE

#endif
