/* The encoder of encoder/resident/resident.cuh in tf32. */
#include "kernels/cuda/encoder/resident/resident.cuh"

const struct ps_encoder_family ps_encoder_resident_tf32 = ps_resident::family<float>;
