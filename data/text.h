/* Text from files that goes into one-line messages. */
#ifndef PS_DATA_TEXT_H
#define PS_DATA_TEXT_H

struct ps_plain {
    char text[64];
};

/* The text with control characters as '?', cut with "..." when it is long. */
struct ps_plain ps_text_plain(const char *text);

#endif
