/* Text from files that goes into one-line messages, and names of files. */
#ifndef PS_DATA_TEXT_H
#define PS_DATA_TEXT_H

struct ps_plain {
    char text[64];
};

/* The text with control characters as '?', cut with "..." when it is long. */
struct ps_plain ps_text_plain(const char *text);

/* Whether the text ends so, as the name of a file of a kind. */
int ps_text_ends(const char *text, const char *end);

#endif
