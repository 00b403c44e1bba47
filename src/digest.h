#ifndef PS_SRC_DIGEST_H
#define PS_SRC_DIGEST_H

#include <stddef.h>

enum { PS_DIGEST_HEX = 65 }; /* 64 hexadecimal digits and a zero byte */

/* SHA-256 of the bytes, as sha256sum prints it. 1, or 0 when the library has no SHA-256 to give. */
int ps_digest(const void *bytes, size_t size, char hex[PS_DIGEST_HEX]);

#endif
