# The CPU's kernels, compiled once for each instruction set; kernels/cpu/isa.c chooses at run time.
target_sources(ps_kernels PRIVATE kernels/cpu/isa/base.c)
set(PS_ISA_FLAGS -fno-trapping-math)
set_source_files_properties(kernels/cpu/isa/base.c PROPERTIES COMPILE_OPTIONS "${PS_ISA_FLAGS}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_sources(ps_kernels PRIVATE kernels/cpu/isa/avx2.c kernels/cpu/isa/avx512.c)
  set_source_files_properties(kernels/cpu/isa/avx2.c PROPERTIES COMPILE_OPTIONS "${PS_ISA_FLAGS};-mavx2;-mfma")
  set_source_files_properties(
    kernels/cpu/isa/avx512.c
    PROPERTIES COMPILE_OPTIONS
               "${PS_ISA_FLAGS};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mprefer-vector-width=512")
endif()
set_source_files_properties(
  kernels/cpu/isa/base.c kernels/cpu/isa/avx2.c kernels/cpu/isa/avx512.c
  PROPERTIES OBJECT_DEPENDS
             "${CMAKE_SOURCE_DIR}/kernels/cpu/isa/operations.inc;${CMAKE_SOURCE_DIR}/kernels/cpu/isa/gemm.inc;${CMAKE_SOURCE_DIR}/kernels/cpu/isa/attention.inc;${CMAKE_SOURCE_DIR}/kernels/cpu/isa/attention_short.inc;${CMAKE_SOURCE_DIR}/kernels/cpu/isa/feed_forward.inc;${CMAKE_SOURCE_DIR}/kernels/cpu/isa/vector.h"
)
