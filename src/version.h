/* What a checkpoint says of the program that wrote it. */
#ifndef PS_SRC_VERSION_H
#define PS_SRC_VERSION_H

extern const char ps_version[];
/* 16 hexadecimal digits of the SHA-256 that src/version.cmake makes of all sources below kernels/ when they are built. */
extern const char ps_kernel_sources[];

#endif
