/* The config loader. Input: a config's text; after a zero byte, overrides, each ended by one. What is accepted must be written and
 * read back as it is. */
#include "src/config.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { OVERRIDES = 4 };
    char *text = malloc(size + 1), *overrides[OVERRIDES];
    memcpy(text, data, size);
    text[size] = 0;
    int n = 0;
    for (size_t at = strlen(text) + 1; at < size && n < OVERRIDES; at += strlen(text + at) + 1) {
        overrides[n++] = text + at;
    }
    struct ps_config config, again;
    enum ps_status status = ps_config_parse(text, "fuzz.yaml", overrides, n, &config);
    must_explain(status, PS_USAGE);
    if (status == PS_OK) {
        char *written, *rewritten;
        MUST(ps_config_text(&config, &written) == PS_OK);
        /* A text that is not UTF-8 cannot be written as YAML; ps_config_load refuses it. */
        if (ps_config_parse(written, "written", NULL, 0, &again) == PS_OK) {
            MUST(ps_config_text(&again, &rewritten) == PS_OK);
            MUST(strcmp(written, rewritten) == 0);
            MUST(ps_config_compatible(&config, &again) == PS_OK);
            free(rewritten);
            ps_config_free(&again);
        } else {
            MUST(strstr(ps_error_message(), "not YAML") != NULL);
        }
        free(written);
        ps_config_free(&config);
    }
    free(text);
    return 0;
}
