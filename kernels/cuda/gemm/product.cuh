/* A product's sizes and strides, taken apart once for the six ways to compute it: cuBLASLt (gemm/choose.cu), a long sum over few
 * outputs (gemm/split.cu), many rows and sums over many rows on Hopper (gemm/wgmma.cu), many small matrices (gemm/tiny.cu), of few
 * rows or terms (gemm/warp.cu), a single small one of bf16 (gemm/panel.cu). */
#ifndef PS_KERNELS_CUDA_GEMM_CUH
#define PS_KERNELS_CUDA_GEMM_CUH

#include "kernels/cuda/context.cuh"

/* One matrix of the product: element (i, j) of batch (p, q) is data[p*batch[0] + q*batch[1] + i*row + j*column]. */
struct ps_operand {
    char *data;
    int64_t row, column, batch[2];
};

static inline struct ps_operand ps_operand_transposed(struct ps_operand o)
{
    const int64_t row = o.row;
    o.row = o.column;
    o.column = row;
    return o;
}

struct ps_product {
    enum ps_type type, c_type; /* of a and b; of c: the same, or float32 */
    int64_t m, n, k, batch[2]; /* two batch dimensions that lie evenly are already one: batch[0] is then 1 */
    struct ps_operand c, a, b;
    float alpha, beta;
    /* Of gemm_bias, absent otherwise: a number a column, float32; what takes the place of c beside beta, of c's strides. */
    char *bias, *addend;
    /* Of gemm_gradient: += the sums of b's columns, float32. */
    float *sums;
};

/* Checks ranks, types and sizes (all at least 1). PS_UNSUPPORTED with the sizes in the message. */
enum ps_status ps_cuda_product(const struct ps_gemm *arguments, struct ps_product *product);

/* How a small product multiplies: EXACT as three tf32 products of split float32. */
enum arithmetic { EXACT, TF32, BF16 };

/* gemm/tiny.cu, m, n, k <= 64, PS_UNSUPPORTED otherwise. exact: as good as float32's own products, else tf32. */
enum ps_status ps_cuda_tiny_product(const struct ps_cuda_context *context, const struct ps_product *product, bool exact);
/* gemm/warp.cu: what ps_cuda_warp_wanted takes, from the shape and layout alone. */
int ps_cuda_warp_wanted(const struct ps_product *product);
enum ps_status ps_cuda_warp_product(const struct ps_cuda_context *context, const struct ps_product *product, bool exact);

/* gemm/split.cu: batch 1, a and b both laid out with the summed dimension slow (a transposed view times rows), float32, 16-byte
 * aligned rows; PS_UNSUPPORTED otherwise. tensor_cores: operands rounded to tf32. workspace holds the partial sums. */
enum ps_status ps_cuda_split_product(const struct ps_cuda_context *context, const struct ps_product *product, bool tensor_cores,
                                     void *workspace, size_t workspace_bytes);
/* Whether ps_cuda_gemm takes it, from the shape and layout alone. */
int ps_cuda_split_wanted(const struct ps_product *product);

/* c = alpha the sum of slabs' partial tiles [tiles, tile_m, tile_n] + beta c. Where the product has sums, n_sums of them follow a
 * slab's tiles, padded to ps_cuda_split_sums. gemm/split.cu */
static inline int ps_cuda_split_sums(const float *sums, int64_t n_sums)
{
    return sums ? (int)(n_sums + 31) / 32 * 32 : 0;
}
enum ps_status ps_cuda_split_sum(const struct ps_cuda_context *context, const struct ps_product *product, const float *partial,
                                 int slabs, int tile_m, int tile_n, int64_t n_sums);

/* gemm/wgmma.cu: float32 on sm_90. exact: as good as float32's own products, else operands rounded to tf32. The second pair splits
 * the summed dimension; workspace holds the partial sums. */
int ps_cuda_rows_wanted(const struct ps_cuda_context *context, const struct ps_product *product, bool exact);
enum ps_status ps_cuda_rows_product(const struct ps_cuda_context *context, const struct ps_product *product, bool exact);
int ps_cuda_gradient_wanted(const struct ps_cuda_context *context, const struct ps_product *product);
enum ps_status ps_cuda_gradient_product(const struct ps_cuda_context *context, const struct ps_product *product, bool exact,
                                        void *workspace, size_t workspace_bytes);

/* gemm/panel.cu: what ps_cuda_panel_wanted takes, from the shape and layout alone. */
namespace level_bf16
{
int ps_cuda_panel_wanted(const struct ps_product *product);
enum ps_status ps_cuda_panel_product(const struct ps_cuda_context *context, const struct ps_product *product);
} // namespace level_bf16
namespace level_fp16
{
int ps_cuda_panel_wanted(const struct ps_product *product);
enum ps_status ps_cuda_panel_product(const struct ps_cuda_context *context, const struct ps_product *product);
} // namespace level_fp16

#endif
