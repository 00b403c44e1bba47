#include "src/digest.h"

#include <stdio.h>

#include <openssl/evp.h>

int ps_digest(const void *bytes, size_t size, char hex[PS_DIGEST_HEX])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned length = 0;
    hex[0] = 0;
    if (!EVP_Digest(bytes, size, digest, &length, EVP_sha256(), NULL) || 2 * length + 1 != PS_DIGEST_HEX) {
        return 0;
    }
    for (unsigned i = 0; i < length; i++) {
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
    return 1;
}
