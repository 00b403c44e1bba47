/* The encoder of encoder/resident/resident.cuh in fp16. */
#include "kernels/cuda/encoder/resident/resident.cuh"

const struct ps_encoder_family ps_encoder_resident_fp16 = ps_resident::family<ps_fp16>;
