#include "data/text.h"

#include <string.h>

struct ps_plain ps_text_plain(const char *text)
{
    struct ps_plain plain;
    size_t room = sizeof plain.text - 1, length = strnlen(text, room + 1);
    size_t kept = length > room ? room - 3 : length;
    for (size_t i = 0; i < kept; i++) {
        unsigned char c = (unsigned char)text[i];
        plain.text[i] = c < 0x20 || c == 0x7f ? '?' : text[i];
    }
    if (length > room) {
        memcpy(plain.text + kept, "...", 3);
        kept += 3;
    }
    plain.text[kept] = '\0';
    return plain;
}

int ps_text_ends(const char *text, const char *end)
{
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}
