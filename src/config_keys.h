/* The table of the config's keys, and what src/config*.c and src/weights_hf.c do with it. Private to them. */
#ifndef PS_SRC_CONFIG_KEYS_H
#define PS_SRC_CONFIG_KEYS_H

#include <stddef.h>
#include <stdio.h>

#include "src/config.h"

/* RATE: a real number, or auto, which is -1. LIST: texts, see struct ps_config. REALS: a list of up to PS_MOST_QUANTILES. */
enum ps_key_type {
    PS_KEY_TEXT,
    PS_KEY_WHOLE,
    PS_KEY_SEED,
    PS_KEY_BYTES,
    PS_KEY_REAL,
    PS_KEY_RATE,
    PS_KEY_SWITCH,
    PS_KEY_CHOICE,
    PS_KEY_SPLIT,
    PS_KEY_LIST,
    PS_KEY_REALS
};
enum ps_key_range {
    PS_RANGE_ANY,
    PS_RANGE_SIZE,
    PS_RANGE_LAYERS,
    PS_RANGE_COUNT,
    PS_RANGE_LIMIT,
    PS_RANGE_FRACTION,
    PS_RANGE_INSIDE,
    PS_RANGE_POSITIVE,
    PS_RANGE_NOT_NEGATIVE
};

struct ps_key {
    const char *section, *name;
    enum ps_key_type type;
    size_t offset;         /* in struct ps_config */
    const char *preset[3]; /* NULL: the list is shorter */
    enum ps_key_range range;
    const char *const *choices; /* the word for 0, 1, ...; NULL-terminated */
    int free_on_resume;         /* cannot change the result */
};

/* In the order of struct ps_config, which is the order of the resolved text. */
enum { PS_KEYS = 74, PS_SECTIONS = 5 };
extern const struct ps_key *const ps_keys; /* [PS_KEYS] */
extern const char *const ps_sections[PS_SECTIONS];
int ps_key_index(const char *section, const char *name); /* -1: there is none */

enum { PS_KEY_NAME = 64, PS_WHERE = 320 }; /* bytes of a key's name; of a place in messages */

/* Presets, then the file, then each override are put into `config`; where[i] says where key i's value came from, as the beginning
 * of a message ("configs/x.yaml:12"), "" while it is the preset. */
struct ps_config_reader {
    struct ps_config *config;
    char where[PS_KEYS][PS_WHERE];
    int without_data; /* data.path may be missing */
};

/* PS_USAGE "where: ..." in one line, whatever the quoted values hold. */
enum ps_status ps_config_fail(const char *where, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The names that could have stood where a word stood, and the one nearest to it; zero to begin with. */
struct ps_names {
    const char *nearest; /* NULL: none is near */
    int edits;
    char list[256];
};
void ps_names_add(struct ps_names *names, const char *word, const char *name);

int ps_key_is_list(const struct ps_key *key);

/* Puts a key's text, or the n texts of a list (of PS_KEY_SPLIT three numbers, or two times), into the config. */
enum ps_status ps_config_put(struct ps_config_reader *reader, const struct ps_key *key, const char *const *text, int n,
                             const char *where);

/* Puts one YAML document, the file or an override, into the config. */
enum ps_status ps_config_read(struct ps_config_reader *reader, const char *text, const char *origin);
/* Whether the text is YAML at all. */
enum ps_status ps_config_parses(const char *text, const char *origin);

/* What one key alone cannot tell. */
enum ps_status ps_config_check(const struct ps_config_reader *reader, const char *origin);

/* As a YAML scalar: plain where every YAML reader takes it as text, else double-quoted. */
void ps_config_print_text(FILE *out, const char *text);
/* What PS_KEY_SPLIT must be. */
#define PS_SPLIT_FORM                                                                                                      \
    "a list of three numbers [train, validation, test], such as [0.7, 0.1, 0.2], or of the two times at which validation " \
    "and test begin, such as [2017-07-01, 2017-11-01]"
/* A key's value as the resolved text has it, malloc'ed; NULL without memory. */
char *ps_config_value_text(const struct ps_config *config, const struct ps_key *key);

#endif
