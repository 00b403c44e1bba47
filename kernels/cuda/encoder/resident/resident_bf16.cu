/* The encoder of encoder/resident/resident.cuh in bf16. */
#include "kernels/cuda/encoder/resident/resident.cuh"

const struct ps_encoder_family ps_encoder_resident_bf16 = ps_resident::family<ps_bf16>;
