/* A product's sizes and strides, taken apart once for all ways to compute it, and the ways: gemm/choose.cu chooses. */
#ifndef PS_KERNELS_CUDA_PRODUCT_CUH
#define PS_KERNELS_CUDA_PRODUCT_CUH

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
    bool settled; /* b, as its tensor says */
    /* Of gemm_bias, absent otherwise: a number a column, float32; what takes the place of c beside beta, of c's strides. */
    char *bias, *addend;
    /* Of gemm_gradient: whether c and sums may wait; += the sums of b's columns, float32, or absent. */
    bool gradient, waits;
    float *sums;
};

/* Checks ranks, types and sizes (all at least 1). PS_UNSUPPORTED with the sizes in the message. gemm/product.cu */
enum ps_status ps_cuda_product(const struct ps_gemm *arguments, struct ps_product *product);

/* How a small product multiplies: EXACT as three tf32 products of split float32, REAL16 bf16 or fp16 as they are. */
enum arithmetic { EXACT, TF32, REAL16 };

/* Products of float32 as good as float32's own; else operands are rounded to tf32. */
static inline bool ps_cuda_exact(const struct ps_kernels *k)
{
    return k->precision == PS_FP32;
}

/* ---- the ways, a file each ----
 *
 * _wanted: whether the way takes the product, from the table's precision, the context's numbers, shape and layout alone; no GPU is
 * asked. _product computes one. */

/* gemm/tiny.cu: m, n, k <= 64, PS_UNSUPPORTED otherwise. */
enum ps_status ps_cuda_tiny_product(const struct ps_kernels *k, const struct ps_product *product);

/* gemm/warp.cu: of those the ones of few rows or terms. */
bool ps_cuda_warp_wanted(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_warp_product(const struct ps_kernels *k, const struct ps_product *product);

/* gemm/split.cu: batch 1, a and b both laid out with the summed dimension slow (a transposed view times rows), float32, 16-byte
 * aligned rows; PS_UNSUPPORTED otherwise. */
bool ps_cuda_split_wanted(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_split_product(const struct ps_kernels *k, const struct ps_product *product);

/* gemm/wgmma.cu: float32 on sm_90; rows times a weight of few terms, and sums over many rows. */
bool ps_cuda_rows_wanted(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_rows_product(const struct ps_kernels *k, const struct ps_product *product);
bool ps_cuda_gradient_wanted(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_gradient_product(const struct ps_kernels *k, const struct ps_product *product);

/* gemm/wgmma_long.cu: float32 on sm_90; rows times a weight of more terms, and with what ps_gemm_finish says but sums over rows,
 * checked by who calls. */
bool ps_cuda_long_wanted(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_long_product(const struct ps_kernels *k, const struct ps_product *product);
bool ps_cuda_long_finishes(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_long_finish(const struct ps_kernels *k, const struct ps_product *product, const struct ps_gemm_finish *f);

/* gemm/wgmma16.cuh: bf16 and fp16 on sm_90, many rows times a weight or its transpose, with a bias and an addend; and with all that
 * ps_gemm_finish says, checked by who calls. */
bool ps_cuda_wgmma16_serves(const struct ps_kernels *k, const struct ps_product *product);
bool ps_cuda_wgmma16_wanted(const struct ps_kernels *k, const struct ps_product *product); /* of products that end so */
enum ps_status ps_cuda_wgmma16_product(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_wgmma16_finish(const struct ps_kernels *k, const struct ps_product *product, const struct ps_gemm_finish *f);

/* gemm/gradient16.cu: 16 bits on sm_90; gemm_gradient's, up to PS_GRADIENTS at once, each of which is wanted and none of which has
 * another's output. */
enum { PS_GRADIENTS = 8 };
bool ps_cuda_gradient16_wanted(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_gradient16_product(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_gradient16_products(const struct ps_kernels *k, const struct ps_product *each, int count);

/* gemm/gradient16_wide.cu: the larger of those. _serves: m and n are such as it takes; _wanted: it is the faster where all that it
 * serves have so many outputs together, and the longest of their shorter sides is `side`. All of the same k. */
bool ps_cuda_gradient16_wide_serves(const struct ps_product *product);
bool ps_cuda_gradient16_wide_wanted(int64_t outputs, int64_t side);
enum ps_status ps_cuda_gradient16_wide_products(const struct ps_cuda_context *context, const struct ps_product *each, int count);

/* gemm/panel.cu: a single small one of 16 bits. */
bool ps_cuda_panel_wanted(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_panel_product(const struct ps_kernels *k, const struct ps_product *product);

/* gemm/cublaslt_plans.cu: strides that the library takes; else the message says which it does not. With a bias it wants c turned
 * into its transpose, since the library's bias is a number a row, and the bias aligned. */
bool ps_cuda_cublaslt_wanted(const struct ps_kernels *k, const struct ps_product *product);
enum ps_status ps_cuda_cublaslt_product(const struct ps_kernels *k, const struct ps_product *product);

/* ---- what ways share ---- */

/* For partial sums: the library's workspace, or its second part for what runs beside; of float32 both have so many bytes.
 * gemm/cublaslt_plans.cu */
enum { PS_FLOAT_WORKSPACE = 32 << 20 };
void *ps_cuda_gemm_workspace(const struct ps_cuda_context *context, size_t *bytes);

/* c = alpha the sum of slabs' partial tiles [tiles, tile_m, tile_n] + beta c. Where the product has sums, n_sums of them follow a
 * slab's tiles, padded to ps_cuda_split_sums. gemm/split.cu */
static inline int ps_cuda_split_sums(const float *sums, int64_t n_sums)
{
    return sums ? (int)(n_sums + 31) / 32 * 32 : 0;
}
enum ps_status ps_cuda_split_sum(const struct ps_cuda_context *context, const struct ps_product *product, const float *partial,
                                 int slabs, int tile_m, int tile_n, int64_t n_sums);

#endif
