/* The config: every kind of error names file, line, key, value and what would do; overrides; the resolved text reads back bit for
 * bit; the committed configs load; what may change on resume. */
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/config.h"
#include "tests/suite.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static enum ps_status parse(const char *text, struct ps_config *config)
{
    return ps_config_parse(text, "x.yaml", NULL, 0, config);
}

static void must_fail(const char *text, const char *message)
{
    struct ps_config config;
    enum ps_status status = parse(text, &config);
    ck_assert_msg(status == PS_USAGE, "taken: %s", text);
    ck_assert_msg(strstr(ps_error_message(), message) != NULL, "for\n%s\nexpected: %s\ngot:      %s", text, message,
                  ps_error_message());
    ck_assert_ptr_null(strchr(ps_error_message(), '\n'));
}

static void must_parse(const char *text, struct ps_config *config)
{
    ck_assert_msg(parse(text, config) == PS_OK, "%s", ps_error_message());
}

START_TEST(presets)
{
    struct ps_config c;
    ck_assert_int_eq(parse("data:\n  path: a.h5\n", &c), PS_OK);
    ck_assert_str_eq(c.data.path, "a.h5");
    ck_assert(c.data.split[0] == 0.7 && c.data.split[1] == 0.1 && c.data.split[2] == 0.2);
    ck_assert(c.data.standardize == 1 && c.data.drop_last == 1 && c.data.placement == PS_PLACEMENT_AUTO && c.data.season == 24);
    ck_assert_int_eq(c.data.memory_limit, 0);
    ck_assert(c.model.seq_len == 336 && c.model.pred_len == 96 && c.model.patch_len == 16 && c.model.stride == 8);
    ck_assert(c.model.padding == PS_PADDING_END && c.model.d_model == 128 && c.model.n_heads == 16 && c.model.d_ff == 256);
    ck_assert(c.model.n_layers == 3 && c.model.dropout == 0.2 && c.model.revin == 1);
    ck_assert(c.optim.lr == 1e-4 && c.optim.weight_decay == 1e-2 && c.optim.beta1 == 0.9 && c.optim.beta2 == 0.999);
    ck_assert(c.optim.eps == 1e-8 && c.optim.clip_norm == 0 && c.optim.schedule == PS_SCHEDULE_COSINE);
    ck_assert(c.optim.warmup_steps == 0 && c.optim.min_lr == 0 && c.optim.pct_start == 0.3);
    ck_assert(c.train.epochs == 100 && c.train.batch_size == 128 && c.train.seed == 1 && c.train.patience == 0);
    ck_assert(c.train.checkpoint_every == 0);
    ck_assert(c.train.loss == PS_LOSS_MSE && c.train.huber_delta == 1 && c.train.quantiles.n == 0);
    ck_assert(c.train.monitor == PS_MONITOR_LOSS);
    ck_assert_str_eq(c.runtime.device, "auto");
    ck_assert_str_eq(c.runtime.backend, "auto");
    ck_assert(c.runtime.precision == PS_FP32 && c.runtime.fusion == PS_FUSION_AUTO);
    ck_assert(c.runtime.merge_qkv == 1 && c.runtime.tiny_gemm == 1 && c.runtime.threads == 0);
    ck_assert(c.runtime.attention == PS_ATTENTION_AUTO && c.runtime.epilogue == 1);
    ck_assert_str_eq(c.runtime.tuning, "");
    ps_config_free(&c);
}
END_TEST

/* Every key, away from its preset. */
static const char everything[] =
    "data:\n  path: \"a b: c\\\"#.h5\"\n  split: [8640, 2880, 2880]\n  standardize: false\n"
    "  channels: [b, \"a b\", '12', \"x: [,\"]\n  missing: mask\n"
    "  drop_last: no\n  placement: host\n  memory_limit: 3G\n  season: 0\n"
    "model:\n  seq_len: 24\n  pred_len: 1\n  patch_len: 8\n  stride: 4\n  padding: none\n"
    "  d_model: 12\n  n_heads: 3\n  d_ff: 7\n  n_layers: 1\n  dropout: 0.30000000000000004\n"
    "  revin: off\n"
    "optim:\n  lr: 1.2345678901234567e-3\n  weight_decay: 0\n  beta1: 0.95\n  beta2: 0.98\n"
    "  eps: 4.9406564584124654e-324\n  clip_norm: 1.5\n  schedule: onecycle\n  warmup_steps: 5\n"
    "  min_lr: 1e-7\n  pct_start: 0.2\n"
    "train:\n  epochs: 7\n  batch_size: 3\n  seed: 18446744073709551615\n  patience: 2\n"
    "  checkpoint_every: 10\n  loss: quantile\n  huber_delta: 0.7\n  quantiles: [0.05, 0.5]\n  monitor: mae\n"
    "runtime:\n  device: cuda:1\n  precision: tf32\n  backend: cuda\n  fusion: gemm\n"
    "  attention: tiled\n  merge_qkv: false\n  epilogue: off\n  tiny_gemm: off\n  tuning: a.tune\n  threads: 2\n";

START_TEST(every_key)
{
    struct ps_config c;
    ck_assert_msg(parse(everything, &c) == PS_OK, "%s", ps_error_message());
    ck_assert_str_eq(c.data.path, "a b: c\"#.h5");
    ck_assert(c.data.split[0] == 8640 && c.data.split[1] == 2880 && c.data.split[2] == 2880);
    ck_assert_mem_eq(c.data.channels,
                     "b\0a b\0"
                     "12\0x: [,\0",
                     15);
    const struct ps_reading reading = ps_config_reading(&c, 2);
    ck_assert(c.data.missing == PS_MISSING_MASK && reading.masked && reading.channel_count == 4 && reading.memory.batch == 2);
    ck_assert(!c.data.standardize && !c.data.drop_last && c.data.placement == PS_PLACEMENT_HOST && c.data.season == 0);
    ck_assert_int_eq(c.data.memory_limit, (int64_t)3 << 30);
    ck_assert(c.model.seq_len == 24 && c.model.pred_len == 1 && c.model.patch_len == 8 && c.model.stride == 4);
    ck_assert(c.model.padding == PS_PADDING_NONE && c.model.d_model == 12 && c.model.n_heads == 3 && c.model.d_ff == 7);
    ck_assert(c.model.n_layers == 1 && c.model.dropout == 0.1 + 0.2 && !c.model.revin);
    ck_assert(c.optim.lr == 1.2345678901234567e-3 && c.optim.weight_decay == 0 && c.optim.beta1 == 0.95 && c.optim.beta2 == 0.98);
    ck_assert(c.optim.eps == 4.9406564584124654e-324 && c.optim.clip_norm == 1.5 && c.optim.schedule == PS_SCHEDULE_ONECYCLE);
    ck_assert(c.optim.warmup_steps == 5 && c.optim.min_lr == 1e-7 && c.optim.pct_start == 0.2);
    ck_assert(c.train.epochs == 7 && c.train.batch_size == 3 && c.train.seed == UINT64_MAX && c.train.patience == 2);
    ck_assert(c.train.checkpoint_every == 10);
    ck_assert(c.train.loss == PS_LOSS_QUANTILE && c.train.huber_delta == 0.7 && c.train.monitor == PS_MONITOR_MAE);
    ck_assert(c.train.quantiles.n == 2 && c.train.quantiles.value[0] == 0.05 && c.train.quantiles.value[1] == 0.5);
    ck_assert_str_eq(c.runtime.device, "cuda:1");
    ck_assert_str_eq(c.runtime.backend, "cuda");
    ck_assert(c.runtime.precision == PS_TF32 && c.runtime.fusion == PS_FUSION_GEMM);
    ck_assert(!c.runtime.merge_qkv && !c.runtime.tiny_gemm && c.runtime.threads == 2);
    ck_assert(c.runtime.attention == PS_ATTENTION_TILED && !c.runtime.epilogue);
    ck_assert_str_eq(c.runtime.tuning, "a.tune");
    ps_config_free(&c);
}
END_TEST

START_TEST(words)
{
    static const struct {
        const char *text;
        int schedule, precision, fusion, placement;
    } cases[] = {
        {"optim: {schedule: constant}\nruntime: {precision: fp32, fusion: auto}\ndata: {path: a, placement: auto}",
         PS_SCHEDULE_CONSTANT, PS_FP32, PS_FUSION_AUTO, PS_PLACEMENT_AUTO},
        {"optim: {schedule: cosine}\nruntime: {precision: fp64, backend: reference, fusion: none}\ndata: {path: a, placement: "
         "device}",
         PS_SCHEDULE_COSINE, PS_FP64, PS_FUSION_NONE, PS_PLACEMENT_DEVICE},
        {"optim: {schedule: onecycle}\nruntime: {precision: tf32, fusion: gemm}\ndata: {path: a, placement: host}",
         PS_SCHEDULE_ONECYCLE, PS_TF32, PS_FUSION_GEMM, PS_PLACEMENT_HOST},
        {"optim: {schedule: type3}\nruntime: {precision: bf16, fusion: layer}\ndata: {path: a, placement: host}", PS_SCHEDULE_TYPE3,
         PS_PRECISION_BF16, PS_FUSION_LAYER, PS_PLACEMENT_HOST},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        struct ps_config c;
        ck_assert_msg(parse(cases[i].text, &c) == PS_OK, "%s", ps_error_message());
        ck_assert_int_eq((int)c.optim.schedule, cases[i].schedule);
        ck_assert_int_eq((int)c.runtime.precision, cases[i].precision);
        ck_assert_int_eq((int)c.runtime.fusion, cases[i].fusion);
        ck_assert_int_eq((int)c.data.placement, cases[i].placement);
        ps_config_free(&c);
    }
}
END_TEST

/* Every value of the second config is the first's, to the bit. */
static void same(const struct ps_config *a, const struct ps_config *b)
{
    struct ps_config x = *a, y = *b;
    ck_assert_str_eq(x.data.path, y.data.path);
    ck_assert_str_eq(x.runtime.device, y.runtime.device);
    ck_assert_str_eq(x.runtime.backend, y.runtime.backend);
    ck_assert_str_eq(x.runtime.tuning, y.runtime.tuning);
    x.data.path = y.data.path = x.runtime.device = y.runtime.device = x.runtime.backend = y.runtime.backend = NULL;
    size_t bytes = 1; /* of the lists, their ends too */
    for (; x.data.channels[bytes - 1] || (bytes > 1 && x.data.channels[bytes - 2]); bytes++) {
    }
    ck_assert_mem_eq(x.data.channels, y.data.channels, bytes);
    x.runtime.tuning = y.runtime.tuning = x.data.channels = y.data.channels = NULL;
    ck_assert_mem_eq(&x, &y, sizeof x); /* both began as zeros, the padding too */
}

START_TEST(text_reads_back)
{
    static const char *const paths[] = {"a.h5",    "/x/y.h5",    "a b",    "null",      "True",     "12",      "1e3",    "~",
                                        "-",       "x: y",       "a#b",    "a #b",      "'",        "\\\"",    "\t",     "a\nb",
                                        "[a]",     "&a",         "*a",     "!x",        "%TAG",     "a:",      "{a: b}", "--- ",
                                        "\x7f",    "f\xc3\xbcr", " lead",  "trail ",    "@",        "`",       "?",      "cuda:0",
                                        "../a.h5", "a \u2029z",  "\u2028", " \xc2\x85", "\xc2\x9f", "\ufeffz", "\u00a0"};
    for (int i = -1; i < COUNT(paths); i++) {
        struct ps_config a, b;
        char *text, *again;
        ck_assert_msg(parse(everything, &a) == PS_OK, "%s", ps_error_message());
        if (i >= 0) {
            free(a.data.path);
            a.data.path = strdup(paths[i]);
            a.optim.lr = 0.1 * (i + 1) / 3.0;
            a.model.dropout = i / 1000.0;
            a.data.split[0] = 1.0 / (i + 1.5);
            a.data.split[1] = a.data.split[2] = 0.1;
        }
        ck_assert_int_eq(ps_config_text(&a, &text), PS_OK);
        ck_assert_msg(parse(text, &b) == PS_OK, "%s\n%s", ps_error_message(), text);
        same(&a, &b);
        ck_assert_int_eq(ps_config_text(&b, &again), PS_OK);
        ck_assert_str_eq(text, again);
        free(text);
        free(again);
        ps_config_free(&a);
        ps_config_free(&b);
    }
}
END_TEST

#define OK "data:\n  path: a.h5\n"

START_TEST(bad_keys)
{
    must_fail(OK "model:\n  d_ff: 8\n  d_modle: 8\n", "x.yaml:5: model.d_modle: unknown key; did you mean d_model?");
    must_fail("data:\n  path: a\n\n# note\nmodle:\n  d_model: 8\n", "x.yaml:5: modle: unknown section; did you mean model?");
    must_fail(OK "model:\n  lr: 8\n", "x.yaml:4: model.lr: unknown key; did you mean optim.lr?");
    must_fail(
        OK "train:\n  wibble_wobble: 8\n",
        "x.yaml:4: train.wibble_wobble: unknown key; the keys of train are epochs, batch_size, seed, patience, checkpoint_every");
    must_fail(OK "xyzzyxyzzy: 3\n", "x.yaml:3: xyzzyxyzzy: unknown section; the sections are data, model, optim, train, runtime");
    must_fail(OK "d_model: 3\n", "x.yaml:3: d_model: belongs inside section model");
    must_fail(OK "model:\n  D_MODEL: 3\n", "x.yaml:4: model.D_MODEL: unknown key");
    must_fail(OK "model:\n  \"d\\nx\": 3\n", "model.d");
    must_fail(OK "model:\n  d_model: 8\n  n_heads: 2\n  d_model: 16\n", "x.yaml:6: model.d_model: given twice");
    must_fail(OK "model:\n  d_model: 8\ndata:\n  season: 4\n", "x.yaml:5: data: given twice");
    must_fail(OK "data:\n  path: b\n", "x.yaml:3: data: given twice");
}
END_TEST

START_TEST(bad_types)
{
    must_fail("data:\n  path: a.h5\n  missing: skip\n", "x.yaml:3: data.missing: \"skip\" is not one of refuse, mask");
    must_fail("data:\n  path: a.h5\n  channels: load\n", "x.yaml:3: data.channels: needs a list of texts, such as [load, wind]");
    must_fail("data:\n  path: a.h5\n  channels: [[a], b]\n", "x.yaml:3: data.channels: needs a list of texts");
    must_fail("data:\n  path: a.h5\n  channels: [a, b, a]\n", "x.yaml:3: data.channels: \"a\" is in the list twice");
    must_fail("data:\n  path: a.h5\n  channels: [a, '']\n", "x.yaml:3: data.channels: an empty text is in the list");
    must_fail(OK "model:\n  d_model: abc\n", "x.yaml:4: model.d_model: \"abc\" is not a whole number");
    must_fail(OK "model:\n  d_model: 1.5\n", "x.yaml:4: model.d_model: \"1.5\" is not a whole number");
    must_fail(OK "model:\n  d_model: 1e3\n", "x.yaml:4: model.d_model: \"1e3\" is not a whole number");
    must_fail(OK "model:\n  d_model: 0x10\n", "x.yaml:4: model.d_model: \"0x10\" is not a whole number");
    must_fail(OK "model:\n  d_model: null\n", "x.yaml:4: model.d_model: \"null\" is not a whole number");
    must_fail(OK "model:\n  d_model: 12 13\n", "x.yaml:4: model.d_model: \"12 13\" is not a whole number");
    must_fail(OK "model:\n  d_model:\n", "x.yaml:4: model.d_model: \"\" is not a whole number");
    must_fail(OK "model:\n  d_model: -\n", "x.yaml");
    must_fail(OK "model:\n  d_model: [3]\n", "x.yaml:4: model.d_model: needs a whole number");
    must_fail(OK "model:\n  d_model: {a: 3}\n", "x.yaml:4: model.d_model: needs a whole number");
    must_fail(OK "train:\n  seed: -1\n", "x.yaml:4: train.seed: \"-1\" is not a whole number from 0 to 18446744073709551615");
    must_fail(OK "train:\n  seed: 18446744073709551616\n", "train.seed: \"18446744073709551616\" is not a whole number from 0 to");
    must_fail(OK "optim:\n  lr: fast\n", "x.yaml:4: optim.lr: \"fast\" is not a number");
    must_fail(OK "optim:\n  lr: nan\n", "x.yaml:4: optim.lr: \"nan\" is not a number");
    must_fail(OK "optim:\n  lr: inf\n", "x.yaml:4: optim.lr: \"inf\" is not a number");
    must_fail(OK "optim:\n  lr: 1e999\n", "x.yaml:4: optim.lr: \"1e999\" is not a number");
    must_fail(OK "optim:\n  lr: 1e-4x\n", "x.yaml:4: optim.lr: \"1e-4x\" is not a number");
    must_fail(OK "optim:\n  lr: [1e-4]\n", "x.yaml:4: optim.lr: needs a number");
    must_fail(OK "model:\n  revin: maybe\n", "x.yaml:4: model.revin: \"maybe\" is not true or false");
    must_fail(OK "model:\n  revin: 1\n", "x.yaml:4: model.revin: \"1\" is not true or false");
    must_fail(OK "model:\n  revin: []\n", "x.yaml:4: model.revin: needs true or false");
    must_fail(OK "runtime:\n  precision: bf6\n",
              "x.yaml:4: runtime.precision: \"bf6\" is not one of fp64, fp32, tf32, bf16, fp16; did you mean bf16?");
    must_fail(OK "optim:\n  schedule: 1\n", "x.yaml:4: optim.schedule: \"1\" is not one of constant, cosine, onecycle, type3");
    must_fail(OK "runtime:\n  backend: cudaa\n",
              "runtime.backend: \"cudaa\" is not one of auto, reference, cpu, cuda; did you mean cuda?");
    must_fail("data:\n  path: a\n  split: 3\n", "x.yaml:3: data.split: needs a list of three numbers [train, validation, test]");
    must_fail("data:\n  path: a\n  split: [0.7, 0.3]\n", "x.yaml:3: data.split: needs a list of three numbers");
    must_fail("data:\n  path: a\n  split: [1, 2, 3, 4]\n", "x.yaml:3: data.split: needs a list of three numbers");
    must_fail("data:\n  path: a\n  split: [1, 2, x]\n", "x.yaml:3: data.split: \"x\" is not a number");
    must_fail("data:\n  path: a\n  split: [1, 2, [3]]\n", "x.yaml:3: data.split: needs a list of three numbers");
    must_fail("data:\n  path: [a]\n", "x.yaml:2: data.path: needs a text");
    must_fail(OK "model: 3\n", "x.yaml:3: model: needs its keys below it");
    must_fail(OK "model:\n", "x.yaml:3: model: needs its keys below it");
    must_fail(OK "model: [d_model, 3]\n", "x.yaml:3: model: needs its keys below it");
}
END_TEST

START_TEST(bad_values)
{
    static const char *const sizes[] = {"seq_len", "pred_len", "patch_len", "stride", "d_model", "n_heads", "d_ff", "n_layers"};
    for (int i = 0; i < COUNT(sizes); i++) {
        char text[128], message[128];
        static const char *const values[] = {"0", "-3", "16777217", "99999999999999999999999"};
        for (int v = 0; v < COUNT(values); v++) {
            snprintf(text, sizeof text, OK "model:\n  %s: %s\n", sizes[i], values[v]);
            snprintf(message, sizeof message, "x.yaml:4: model.%s: %s must be from 1 to %s", sizes[i], values[v],
                     strcmp(sizes[i], "n_layers") == 0 ? "1024" : "16777216");
            must_fail(text, message);
        }
    }
    must_fail("model:\n  d_model: 8\n", "x.yaml: data.path: missing");
    must_fail("data:\n  path: \"\"\n", "x.yaml:2: data.path: missing");
    static const char *const sizes_in_bytes[] = {"12x", "K", "1.5G", "-1", "1KB", "1 G", "0x10"};
    for (int i = 0; i < COUNT(sizes_in_bytes); i++) {
        char text[96], message[160];
        snprintf(text, sizeof text, OK "  memory_limit: %s\n", sizes_in_bytes[i]);
        snprintf(message, sizeof message, "x.yaml:3: data.memory_limit: \"%s\" is not a number of bytes, such as 536870912 or 512M",
                 sizes_in_bytes[i]);
        must_fail(text, message);
    }
    must_fail(OK "  memory_limit: 9223372036854775808\n",
              "x.yaml:3: data.memory_limit: 9223372036854775808 is more than there can be");
    must_fail(OK "  memory_limit: 8388608T\n", "x.yaml:3: data.memory_limit: 8388608T is more than there can be");
    must_fail(OK "  memory_limit: [1]\n", "x.yaml:3: data.memory_limit: needs a number of bytes");
    must_fail("data:\n  season: -1\n", "x.yaml:2: data.season: -1 must be from 0 to 2147483647");
    must_fail(OK "model:\n  d_model: 10\n  n_heads: 4\n", "x.yaml:5: model.n_heads: d_model 10 is not divisible by 4 heads");
    must_fail(OK "model:\n  d_model: 10\n", "x.yaml:4: model.n_heads: d_model 10 is not divisible by 16 heads");
    must_fail(OK "model:\n  patch_len: 400\n",
              "x.yaml:4: model.patch_len: 400 is longer than the window; it must be at most seq_len, 336");
    must_fail(OK "model:\n  seq_len: 8\n",
              "x.yaml:4: model.patch_len: 16 is longer than the window; it must be at most seq_len, 8");
    must_fail(OK "model:\n  dropout: 1\n", "x.yaml:4: model.dropout: 1 must be at least 0 and less than 1");
    must_fail(OK "model:\n  dropout: -0.1\n", "x.yaml:4: model.dropout: -0.1 must be at least 0 and less than 1");
    must_fail(OK "optim:\n  lr: 0\n", "x.yaml:4: optim.lr: 0 must be more than 0");
    must_fail(OK "optim:\n  lr: -1\n", "x.yaml:4: optim.lr: -1 must be more than 0");
    must_fail(OK "optim:\n  weight_decay: -1\n", "optim.weight_decay: -1 must be at least 0");
    must_fail(OK "optim:\n  beta1: 1\n", "optim.beta1: 1 must be at least 0 and less than 1");
    must_fail(OK "optim:\n  beta2: 1.5\n", "optim.beta2: 1.5 must be at least 0 and less than 1");
    must_fail(OK "optim:\n  eps: 0\n", "optim.eps: 0 must be more than 0");
    must_fail(OK "optim:\n  clip_norm: -1\n", "optim.clip_norm: -1 must be at least 0");
    must_fail(OK "optim:\n  warmup_steps: -1\n", "optim.warmup_steps: -1 must be from 0");
    must_fail(OK "optim:\n  min_lr: 1\n", "x.yaml:4: optim.min_lr: 1 is above lr; it must be at most 0.0001");
    must_fail(OK "optim:\n  pct_start: 0\n", "optim.pct_start: 0 must be more than 0 and less than 1");
    must_fail(OK "train:\n  epochs: 0\n", "x.yaml:4: train.epochs: 0 must be from 1 to 2147483647");
    must_fail(OK "train:\n  batch_size: 0\n", "x.yaml:4: train.batch_size: 0 must be from 1");
    must_fail(OK "train:\n  patience: -1\n", "train.patience: -1 must be from 0");
    must_fail(OK "train:\n  checkpoint_every: -1\n", "train.checkpoint_every: -1 must be from 0");
    must_fail(OK "train:\n  loss: rmse\n",
              "x.yaml:4: train.loss: \"rmse\" is not one of mse, mae, huber, quantile; did you mean mse?");
    must_fail(OK "train:\n  huber_delta: 0\n", "x.yaml:4: train.huber_delta: 0 must be more than 0");
    must_fail(OK "train:\n  monitor: val_mse\n", "x.yaml:4: train.monitor: \"val_mse\" is not one of loss, mse, mae");
    must_fail(OK "train:\n  quantiles: [0.1]\n", "x.yaml:4: train.quantiles: are what train.loss: quantile trains");
    must_fail(OK "train:\n  loss: quantile\n  quantiles: 0.5\n", "x.yaml:5: train.quantiles: needs a list of at most 32 numbers");
    must_fail(OK "train:\n  loss: quantile\n  quantiles: [0.5, 0.1]\n",
              "x.yaml:5: train.quantiles: 0.1 stands behind 0.5; they must rise");
    must_fail(OK "train:\n  loss: quantile\n  objective: masked\n",
              "x.yaml:4: train.loss: quantile forecasts, and train.objective: masked");
    must_fail(OK "train:\n  loss: quantile\n  quantiles: [0.5, 0.5]\n", "x.yaml:5: train.quantiles: 0.5 stands behind 0.5");
    must_fail(OK "train:\n  loss: quantile\n  quantiles: [0.5, 1]\n",
              "x.yaml:5: train.quantiles: 1 must be more than 0 and less than 1");
    must_fail(OK "train:\n  loss: quantile\n  quantiles: [0, 0.5]\n",
              "x.yaml:5: train.quantiles: 0 must be more than 0 and less than 1");
    must_fail(OK "train:\n  loss: quantile\n  quantiles: [0.1, half]\n", "x.yaml:5: train.quantiles: \"half\" is not a number");
    must_fail(OK "runtime:\n  threads: -1\n", "runtime.threads: -1 must be from 0");
    must_fail("data:\n  path: a\n  split: [-0.1, 0.5, 0.5]\n", "x.yaml:3: data.split: -0.1 must be at least 0");
    must_fail("data:\n  path: a\n  split: [0.7, 0.2, 0.2]\n",
              "x.yaml:3: data.split: the fractions 0.7, 0.2 and 0.2 sum to 1.1; they must sum to at most 1");
    must_fail("data:\n  path: a\n  split: [100, 20.5, 20]\n", "x.yaml:3: data.split: 20.5 is not a count of rows");
    must_fail("data:\n  path: a\n  split: [100, 0.1, 20]\n", "x.yaml:3: data.split: 0.1 is not a count of rows");
    must_fail(OK "runtime:\n  device: gpu\n", "x.yaml:4: runtime.device: \"gpu\" is not one of auto, cpu, cuda, cuda:N");
    must_fail(OK "runtime:\n  device: \"cuda:\"\n", "runtime.device: \"cuda:\" is not one of");
    must_fail(OK "runtime:\n  device: cuda:x\n", "runtime.device: \"cuda:x\" is not one of");
    must_fail(OK "runtime:\n  device: cpu\n  backend: cuda\n", "x.yaml:5: runtime.backend: cuda does not run on device cpu");
    must_fail(OK "runtime:\n  device: cuda:1\n  backend: cpu\n", "x.yaml:5: runtime.backend: cpu does not run on device cuda:1");
    must_fail(OK "runtime:\n  precision: fp64\n", "x.yaml:4: runtime.precision: fp64 needs backend reference, not auto");
    must_fail(OK "runtime:\n  precision: tf32\n  backend: reference\n",
              "x.yaml:4: runtime.precision: backend reference computes in fp32 or fp64, not tf32");
    must_fail(OK "runtime:\n  fusion: none\n  precision: tf32\n",
              "x.yaml:4: runtime.fusion: none computes in fp32 or fp64, not tf32");
    must_fail(OK "runtime:\n  fusion: none\n  precision: bf16\n",
              "x.yaml:4: runtime.fusion: none computes in fp32 or fp64, not bf16");
    must_fail(
        OK "model:\n  norm: batch\ntrain:\n  on_nonfinite: skip\nruntime:\n  fusion: none\n",
        "x.yaml:6: train.on_nonfinite: skip leaves out a step, and runtime.fusion: none would keep its numbers in the running "
        "statistics of model.norm: batch");
}
END_TEST

/* What train.objective: masked and train.freeze exclude, at the line of the key that says it, or of the objective where that is a
 * preset. */
START_TEST(bad_masking)
{
#define SIDE_BY_SIDE "model:\n  stride: 16\n  padding: none\n"
    struct ps_config c;
    ck_assert_msg(parse(OK SIDE_BY_SIDE "train:\n  objective: masked\n", &c) == PS_OK, "%s", ps_error_message());
    struct ps_model_shape shape = ps_config_shape(&c, 3);
    ck_assert(shape.mask_ratio == 0.4 && ps_patches(&shape) == 21 && ps_masked_patches(&shape) == 9);
    ps_config_free(&c);
    ck_assert_msg(parse(OK "model:\n  mask_ratio: 0.7\n", &c) == PS_OK, "%s", ps_error_message()); /* a forecaster masks nothing */
    ck_assert(ps_config_shape(&c, 3).mask_ratio == 0);
    ps_config_free(&c);
    must_fail(OK "train:\n  objective: wasked\n", "x.yaml:4: train.objective: \"wasked\" is not one of forecast, masked");
    must_fail(OK "model:\n  mask_ratio: 1\n", "x.yaml:4: model.mask_ratio: 1 must be more than 0 and less than 1");
    must_fail(OK "model:\n  mask_ratio: 0\n", "x.yaml:4: model.mask_ratio: 0 must be more than 0 and less than 1");
    must_fail(OK "train:\n  objective: masked\n", "x.yaml:4: model.stride: 8 is less than patch_len, 16");
    must_fail(OK "model:\n  stride: 12\ntrain:\n  objective: masked\n", "x.yaml:4: model.stride: 12 is less than patch_len, 16");
    must_fail(OK "model:\n  stride: 16\ntrain:\n  objective: masked\n", "x.yaml:6: model.padding: end repeats");
    must_fail(OK SIDE_BY_SIDE "  mask_ratio: 0.99\ntrain:\n  objective: masked\n",
              "x.yaml:6: model.mask_ratio: 0.99 masks 21 of 21 patches");
    must_fail(OK SIDE_BY_SIDE "  head: individual\ntrain:\n  objective: masked\n", "x.yaml:6: model.head: individual");
    must_fail(OK SIDE_BY_SIDE "  revin_affine: true\ntrain:\n  objective: masked\n", "x.yaml:6: model.revin_affine");
    must_fail(OK SIDE_BY_SIDE "train:\n  objective: masked\n  freeze: encoder\n", "x.yaml:8: train.freeze: encoder freezes what");
#undef SIDE_BY_SIDE
    must_fail(OK "train:\n  freeze: head\n", "x.yaml:4: train.freeze: \"head\" is not one of none, encoder");
    must_fail(OK "train:\n  freeze_epochs: 3\n",
              "x.yaml:4: train.freeze_epochs: 3 says how long train.freeze lasts, which is none");
    must_fail(OK "train:\n  freeze: encoder\n  freeze_epochs: -1\n", "x.yaml:5: train.freeze_epochs: -1 must be from 0");
}
END_TEST

/* A list of any length, whose length is the head's. */
START_TEST(quantiles)
{
    struct ps_config c;
    must_parse(OK "train:\n  loss: quantile\n", &c);
    struct ps_loss loss = ps_config_loss(&c);
    ck_assert(loss.kind == PS_LOSS_QUANTILE && loss.quantiles == 3 && !loss.missing && loss.delta == 0);
    ck_assert(loss.quantile[0] == 0.1 && loss.quantile[1] == 0.5 && loss.quantile[2] == 0.9);
    ck_assert_int_eq(ps_config_shape(&c, 2).quantiles, 3);
    ps_config_free(&c);
    char text[400] = OK "train:\n  loss: quantile\n  quantiles: [0.01";
    for (int i = 2; i <= PS_MOST_QUANTILES; i++) {
        snprintf(text + strlen(text), sizeof text - strlen(text), ", %.2f", 0.01 * i);
    }
    const size_t end = strlen(text);
    snprintf(text + end, sizeof text - end, "]\n");
    must_parse(text, &c);
    ck_assert(c.train.quantiles.n == PS_MOST_QUANTILES && c.train.quantiles.value[PS_MOST_QUANTILES - 1] == 0.32);
    ps_config_free(&c);
    snprintf(text + end, sizeof text - end, ", 0.5]\n");
    must_fail(text, "x.yaml:5: train.quantiles: needs a list of at most 32 numbers");
    must_parse(OK "train:\n  loss: huber\n  quantiles: []\n  huber_delta: 0.5\n", &c);
    loss = ps_config_loss(&c);
    ck_assert(loss.kind == PS_LOSS_HUBER && loss.delta == 0.5 && ps_config_shape(&c, 2).quantiles == 0);
    ps_config_free(&c);
    /* An override takes them back. */
    char *const overrides[] = {"train.loss=mae", "train.quantiles=[]"};
    ck_assert_int_eq(ps_config_parse(OK "train:\n  loss: quantile\n  quantiles: [0.5]\n", "x.yaml", overrides, 2, &c), PS_OK);
    ck_assert(c.train.loss == PS_LOSS_MAE && c.train.quantiles.n == 0);
    ps_config_free(&c);
    ck_assert_int_eq(ps_config_parse(OK "train:\n  loss: quantile\n  quantiles: [0.5]\n", "x.yaml", overrides, 1, &c), PS_USAGE);
}
END_TEST

START_TEST(bad_yaml)
{
    must_fail("", "x.yaml: empty");
    must_fail("# only a comment\n", "x.yaml: empty");
    must_fail("---\n", "x.yaml: not a mapping of sections");
    must_fail("just words\n", "x.yaml: not a mapping of sections");
    must_fail("- a\n- b\n", "x.yaml: not a mapping of sections");
    must_fail(OK "---\nmodel:\n  d_model: 8\n", "x.yaml:3: a second YAML document begins");
    must_fail(OK "model:\n  d_model: 8\n bad\n", "x.yaml:5: not YAML");
    must_fail(OK "model:\n\td_model: 8\n", "x.yaml:4: not YAML");
    must_fail(OK "model: {d_model: 8\n", "not YAML");
    must_fail(OK "model:\n  d_model: \"8\n", "not YAML");
    must_fail("data:\n  path: \xff\xfe\n", "not YAML");
    /* A million of them would keep libyaml busy for an hour. */
    static const char *const openings[] = {"[", "{a: ", "- ", "? "};
    for (size_t i = 0; i < sizeof openings / sizeof *openings; i++) {
        char *deep = malloc(1 << 20);
        size_t used = (size_t)sprintf(deep, "data:\n  path: %s", i < 2 ? "" : "\n    ");
        for (size_t length = strlen(openings[i]); used + length < 1 << 20; used += length) {
            memcpy(deep + used, openings[i], length + 1);
        }
        must_fail(deep, "nested more than 16 deep");
        free(deep);
    }
    must_fail("data:\n  path: &a x\nruntime:\n  device: *a\n", "x.yaml:4: runtime.device: anchors and aliases are not supported");
    must_fail(OK "? [a, b]\n: 3\n", "x.yaml");
    must_fail(OK "model:\n  ? {a: b}\n  : 3\n", "x.yaml");
}
END_TEST

/* Whatever bytes come, one line and no crash: every prefix of a good config, and the config with each byte replaced. */
START_TEST(mangled_yaml)
{
    struct ps_config c;
    size_t n = strlen(everything);
    char *text = malloc(n + 1);
    static const char bytes[] = {'\n', ':', '[', '{', '"', '&', '*', '\t', '-', (char)0xff, '%', '?', ' '};
    int taken = 0, refused = 0;
    for (size_t cut = 0; cut <= n; cut++) {
        memcpy(text, everything, cut);
        text[cut] = 0;
        enum ps_status status = parse(text, &c);
        ck_assert(status == PS_OK || (status == PS_USAGE && *ps_error_message() && !strchr(ps_error_message(), '\n')));
        taken += status == PS_OK;
        refused += status != PS_OK;
        ps_config_free(&c);
    }
    for (size_t i = 0; i < n; i++) {
        strcpy(text, everything);
        text[i] = bytes[i % sizeof bytes];
        enum ps_status status = parse(text, &c);
        ck_assert(status == PS_OK || (status == PS_USAGE && *ps_error_message() && !strchr(ps_error_message(), '\n')));
        ps_config_free(&c);
    }
    ck_assert(taken > 0 && refused > 0);
    free(text);
}
END_TEST

static enum ps_status parse_with(const char *override, struct ps_config *c)
{
    char *list[] = {(char *) override};
    return ps_config_parse("data:\n  path: a.h5\nmodel:\n  d_model: 32\n  n_heads: 4\n", "x.yaml", list, 1, c);
}

static void override_must_fail(const char *override, const char *message)
{
    struct ps_config c;
    ck_assert_msg(parse_with(override, &c) == PS_USAGE, "taken: %s", override);
    ck_assert_msg(strstr(ps_error_message(), message) != NULL, "for %s\nexpected: %s\ngot:      %s", override, message,
                  ps_error_message());
    ck_assert_ptr_null(strchr(ps_error_message(), '\n'));
}

/* data.split by times: read as dates are, written so that they read back, and compared by what they say. */
START_TEST(split_by_times)
{
    static const char *const same[] = {"[2017-07-01, 2017-11-01]", "[\"2017-07-01 00:00\", 2017/11/01]",
                                       "[01.07.2017, 2017-11-01T02:00:00+02:00]"};
    for (int i = 0; i < COUNT(same); i++) {
        struct ps_config a, b, counts;
        char document[200], *text, *again, *list[] = {document};
        snprintf(document, sizeof document, "data:\n  path: a\n  split: %s\n", same[i]);
        ck_assert_msg(parse(document, &a) == PS_OK, "%s", ps_error_message());
        ck_assert(a.data.split_dated && a.data.split_from[0] == 1498867200 && a.data.split_from[1] == 1509494400);
        ck_assert_int_eq(ps_config_text(&a, &text), PS_OK);
        ck_assert_ptr_nonnull(strstr(text, "  split: [\"2017-07-01 00:00:00\", \"2017-11-01 00:00:00\"]\n"));
        ck_assert_msg(parse(text, &b) == PS_OK, "%s\n%s", ps_error_message(), text);
        ck_assert_int_eq(ps_config_text(&b, &again), PS_OK);
        ck_assert_str_eq(text, again);
        ck_assert_int_eq(ps_config_compatible(&a, &b), PS_OK);
        snprintf(document, sizeof document, "data.split=[0.7, 0.1, 0.2]");
        ck_assert_int_eq(ps_config_parse(text, "x.yaml", list, 1, &counts), PS_OK);
        ck_assert(!counts.data.split_dated && counts.data.split[0] == 0.7);
        ck_assert_int_eq(ps_config_compatible(&a, &counts), PS_CHECKPOINT);
        ck_assert_ptr_nonnull(strstr(ps_error_message(), "data.split: the checkpoint was made with [\"2017-07-01"));
        free(text);
        free(again);
        ps_config_free(&a);
        ps_config_free(&b);
        ps_config_free(&counts);
    }
    must_fail(
        "data:\n  path: a\n  split: [2017-07-01, 2017-07-01]\n",
        "x.yaml:3: data.split: validation begins at 2017-07-01 00:00:00 and test at 2017-07-01 00:00:00; test must begin later");
    must_fail("data:\n  path: a\n  split: [2017-07-01, soon]\n",
              "x.yaml:3: data.split: \"soon\" is not a time, such as 2016-07-01");
    must_fail("data:\n  path: a\n  split: [0.7, 2017-07-01]\n", "x.yaml:3: data.split: \"0.7\" is not a time");
    must_fail(
        "data:\n  path: a\n  split: [2017-07-01, 2017-08-01, 2017-09-01]\n",
        "x.yaml:3: data.split: needs a list of three numbers [train, validation, test], such as [0.7, 0.1, 0.2], or of the two "
        "times at which validation and test begin, such as [2017-07-01, 2017-11-01]");
    must_fail("data:\n  path: a\n  split: []\n", "x.yaml:3: data.split: needs a list of three numbers");
    must_fail("data:\n  path: a\n  split: [2017-07-01]\n", "x.yaml:3: data.split: needs a list of three numbers");
}
END_TEST

START_TEST(overrides)
{
    struct ps_config c;
    char *list[] = {(char *)"model.d_model=64", (char *)"data.split=[100, 20, 30]", (char *)"data.path=b c: [d].h5",
                    (char *)"model.revin=off",  (char *)"model.d_model=16",         (char *)"runtime.tiny_gemm=off"};
    ck_assert_msg(ps_config_parse("data:\n  path: a.h5\nmodel:\n  d_model: 32\n  n_heads: 4\n", "x.yaml", list, COUNT(list), &c) ==
                      PS_OK,
                  "%s", ps_error_message());
    ck_assert(c.model.d_model == 16 && c.model.n_heads == 4 && !c.model.revin && !c.runtime.tiny_gemm);
    ck_assert(c.data.split[0] == 100 && c.data.split[1] == 20 && c.data.split[2] == 30);
    ck_assert_str_eq(c.data.path, "b c: [d].h5");
    ps_config_free(&c);
    ck_assert_int_eq(parse_with("data.path=x=y", &c), PS_OK);
    ck_assert_str_eq(c.data.path, "x=y");
    ps_config_free(&c);
    override_must_fail("model.d_modle=3", "--set model.d_modle=3: model.d_modle: unknown key; did you mean d_model?");
    override_must_fail("modle.d_model=3", "--set modle.d_model=3: modle: unknown section; did you mean model?");
    override_must_fail("model.d_model=abc", "--set model.d_model=abc: model.d_model: \"abc\" is not a whole number");
    override_must_fail("model.d_model=[3]", "model.d_model: \"[3]\" is not a whole number");
    override_must_fail("model.d_model=", "model.d_model: \"\" is not a whole number");
    override_must_fail("model.d_model", "--set model.d_model: not of the form section.key=value");
    override_must_fail("d_model=3", "not of the form section.key=value");
    override_must_fail("=3", "not of the form section.key=value");
    override_must_fail(".d_model=3", "not of the form section.key=value");
    override_must_fail("model.=3", "not of the form section.key=value");
    override_must_fail("", "not of the form section.key=value");
    override_must_fail("model.n_heads=5", "--set model.n_heads=5: model.n_heads: d_model 32 is not divisible by 5 heads");
    override_must_fail("model.d_model=30", "x.yaml:5: model.n_heads: d_model 30 is not divisible by 4 heads");
    override_must_fail("data.split=[1, 2]", "--set data.split=[1, 2]: data.split: needs a list of three numbers");
    override_must_fail("data.split=0.7", "data.split: needs a list of three numbers");
    override_must_fail("data.split=[1, 2, 3], season: 3", "not YAML");
    override_must_fail("data.split=[1, 2, 3]\n  season: 3", "a list stands on one line");
    override_must_fail("data.season=3\n  placement: host", "is not a whole number");
    override_must_fail("data.path=\xff", "not YAML");
    override_must_fail("model.d_model.x=3", "model.d_model.x: unknown key");
}
END_TEST

static char folder[] = "/tmp/ps_config_XXXXXX";

static char *in_folder(const char *name, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return path;
}

static void put_file(const char *path, const void *bytes, size_t size)
{
    FILE *out = fopen(path, "wb");
    ck_assert_ptr_nonnull(out);
    ck_assert_uint_eq(fwrite(bytes, 1, size, out), size);
    ck_assert_int_eq(fclose(out), 0);
}

START_TEST(files)
{
    char path[PATH_MAX], expected[PATH_MAX + 16];
    struct ps_config c;
    ck_assert_int_eq(ps_config_load(in_folder("none.yaml", path), NULL, 0, &c), PS_USAGE);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "none.yaml: cannot be opened: No such file"));
    ck_assert_int_eq(ps_config_load(folder, NULL, 0, &c), PS_USAGE);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "is a folder"));
    put_file(in_folder("zero.yaml", path), "data:\0\n", 7);
    ck_assert_int_eq(ps_config_load(path, NULL, 0, &c), PS_USAGE);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "zero byte"));
    char *long_text = calloc(1, (1 << 16) + 1);
    memset(long_text, '#', (1 << 16) + 1);
    put_file(in_folder("long.yaml", path), long_text, (1 << 16) + 1);
    free(long_text);
    ck_assert_int_eq(ps_config_load(path, NULL, 0, &c), PS_USAGE);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "at most 65536"));

    /* A relative path, of the data or the tuning table, is seen from the config's folder, by whatever name that is reached. */
    static const struct {
        const char *given, *expected; /* after the folder */
    } cases[] = {{"s.h5", "sub/s.h5"}, {"./s.h5", "sub/s.h5"}, {"../runs/s.h5", "runs/s.h5"}, {"a/../s.h5", "sub/a/../s.h5"}};
    char real[PATH_MAX], old[PATH_MAX];
    ck_assert_ptr_nonnull(realpath(folder, real));
    mkdir(in_folder("sub", path), 0777);
    for (int i = 0; i < COUNT(cases); i++) {
        char text[96];
        int n = snprintf(text, sizeof text, "data:\n  path: %s\nruntime:\n  tuning: %s\n", cases[i].given, cases[i].given);
        put_file(in_folder("sub/a.yaml", path), text, (size_t)n);
        snprintf(expected, sizeof expected, "%s/%s", real, cases[i].expected);
        ck_assert_msg(ps_config_load(path, NULL, 0, &c) == PS_OK, "%s", ps_error_message());
        ck_assert_str_eq(c.data.path, expected);
        ck_assert_str_eq(c.runtime.tuning, expected);
        ps_config_free(&c);
        ck_assert_ptr_nonnull(getcwd(old, sizeof old));
        ck_assert_int_eq(chdir(in_folder("sub", path)), 0);
        ck_assert_int_eq(ps_config_load("a.yaml", NULL, 0, &c), PS_OK);
        ck_assert_int_eq(chdir(old), 0);
        ck_assert_str_eq(c.data.path, expected);
        ps_config_free(&c);
    }
    put_file(in_folder("sub/a.yaml", path), "data:\n  path: /x/y.h5\n", 22);
    ck_assert_int_eq(ps_config_load(path, NULL, 0, &c), PS_OK);
    ck_assert_str_eq(c.data.path, "/x/y.h5");
    ck_assert_str_eq(c.runtime.tuning, ""); /* none stays none */
    ps_config_free(&c);
    put_file(path, "data:\n  path: ../../../../../../../x.h5\n", 40);
    ck_assert_int_eq(ps_config_load(path, NULL, 0, &c), PS_OK);
    ck_assert_str_eq(c.data.path, "/x.h5");
    ps_config_free(&c);

    /* A folder whose name YAML cannot hold. */
    mkdir(in_folder("\xff", path), 0777);
    put_file(in_folder("\xff/a.yaml", path), "data:\n  path: s.h5\n", 19);
    ck_assert_int_eq(ps_config_load(path, NULL, 0, &c), PS_USAGE);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "cannot be written as UTF-8"));
}
END_TEST

START_TEST(committed_configs)
{
    static const struct {
        const char *name;
        int64_t seq_len, pred_len, d_model;
    } cases[] = {{"quickstart", 168, 24, 32},     {"etth1", 336, 96, 16},
                 {"seed28k", 24, 1, 64},          {"weather", 336, 96, 128},
                 {"electricity", 336, 96, 128},   {"etth1_paper", 336, 96, 16},
                 {"weather_paper", 336, 96, 128}, {"electricity_paper", 336, 96, 128},
                 {"traffic_paper", 336, 96, 128}, {"illness_paper", 104, 24, 16},
                 {"pretrain", 336, 96, 16},       {"finetune", 336, 96, 16}};
    const char *source = getenv("PS_SOURCE");
    for (int i = 0; i < COUNT(cases); i++) {
        char path[PATH_MAX];
        struct ps_config c;
        snprintf(path, sizeof path, "%s/configs/%s.yaml", source ? source : ".", cases[i].name);
        ck_assert_msg(ps_config_load(path, NULL, 0, &c) == PS_OK, "%s", ps_error_message());
        ck_assert(c.model.seq_len == cases[i].seq_len && c.model.pred_len == cases[i].pred_len &&
                  c.model.d_model == cases[i].d_model);
        ck_assert(c.data.path[0] == '/' && strstr(c.data.path, "/runs/") && !strstr(c.data.path, ".."));
        if (strstr(cases[i].name, "_paper")) { /* 42 patches, and dropout twice after attention */
            struct ps_model_shape shape = ps_config_shape(&c, 7);
            double kept = 1 - c.model.dropout;
            ck_assert_int_eq(ps_patches(&shape), 42);
            ck_assert_double_eq_tol(ps_dropout_rate(&shape, PS_DROP_ATTENTION), 1 - kept * kept, 1e-12);
            ck_assert(shape.norm == PS_NORM_BATCH && shape.norm_place == PS_NORM_POST && shape.residual_attention);
            ck_assert(shape.activation == PS_GELU && c.optim.weight_decay == 0);
        }
        ps_config_free(&c);
    }
}
END_TEST

static enum ps_status compatible(const char *then, const char *now)
{
    char a[256], b[256];
    struct ps_config saved, present;
    snprintf(a, sizeof a, "data: {path: a.h5}\n%s", then);
    snprintf(b, sizeof b, "data: {path: b.h5, placement: host, season: 7}\n%s", now);
    ck_assert_msg(parse(a, &saved) == PS_OK && parse(b, &present) == PS_OK, "%s", ps_error_message());
    enum ps_status status = ps_config_compatible(&saved, &present);
    ps_config_free(&saved);
    ps_config_free(&present);
    return status;
}

START_TEST(resume)
{
    ck_assert_int_eq(compatible("", ""), PS_OK);
    ck_assert_int_eq(compatible("train: {patience: 3, checkpoint_every: 5}", "train: {patience: 0, checkpoint_every: 7}"), PS_OK);
    ck_assert_int_eq(compatible("runtime: {device: cuda}", "runtime: {device: 'cuda:3'}"), PS_OK);
    ck_assert_int_eq(compatible("runtime: {device: 'cuda:1'}", "runtime: {device: 'cuda:3'}"), PS_OK);
    static const char *const longer = "train: {epochs: 5}", *const schedules[] = {"constant", "type3", "cosine", "onecycle"};
    for (int i = 0; i < COUNT(schedules); i++) {
        char then[96], now[96];
        snprintf(then, sizeof then, "optim: {schedule: %s}\n%s", schedules[i], longer);
        snprintf(now, sizeof now, "optim: {schedule: %s}\ntrain: {epochs: 6}", schedules[i]);
        ck_assert_int_eq(compatible(then, now), i < 2 ? PS_OK : PS_CHECKPOINT);
        ck_assert_int_eq(compatible(now, then), PS_CHECKPOINT);
        ck_assert_ptr_nonnull(strstr(ps_error_message(), "train.epochs: the checkpoint was made with 6, this run has 5"));
    }
    /* Each of the others, changed alone, is refused by name with both values. */
    static const struct {
        const char *section, *key, *value;
    } cases[] = {{"model", "seq_len", "337"},
                 {"model", "pred_len", "95"},
                 {"model", "patch_len", "15"},
                 {"model", "stride", "7"},
                 {"model", "padding", "none"},
                 {"model", "d_model", "64"},
                 {"model", "n_heads", "8"},
                 {"model", "d_ff", "3"},
                 {"model", "n_layers", "2"},
                 {"model", "dropout", "0.25"},
                 {"model", "revin", "false"},
                 {"optim", "lr", "0.0002"},
                 {"optim", "weight_decay", "0"},
                 {"optim", "beta1", "0.8"},
                 {"optim", "beta2", "0.99"},
                 {"optim", "eps", "1e-07"},
                 {"optim", "clip_norm", "1"},
                 {"optim", "schedule", "type3"},
                 {"optim", "warmup_steps", "1"},
                 {"optim", "min_lr", "1e-06"},
                 {"optim", "pct_start", "0.2"},
                 {"train", "batch_size", "64"},
                 {"train", "seed", "2"},
                 {"train", "loss", "mae"},
                 {"train", "huber_delta", "0.5"},
                 {"train", "monitor", "mse"},
                 {"runtime", "device", "cuda"},
                 {"runtime", "precision", "tf32"},
                 {"runtime", "backend", "cpu"},
                 {"runtime", "fusion", "gemm"},
                 {"runtime", "attention", "tiled"},
                 {"runtime", "merge_qkv", "false"},
                 {"runtime", "epilogue", "false"},
                 {"runtime", "tiny_gemm", "false"},
                 {"runtime", "threads", "1"}};
    for (int i = 0; i < COUNT(cases); i++) {
        char now[96], name[64];
        snprintf(now, sizeof now, "%s: {%s: %s}", cases[i].section, cases[i].key, cases[i].value);
        snprintf(name, sizeof name, "%s.%s: the checkpoint was made with ", cases[i].section, cases[i].key);
        ck_assert_msg(compatible("", now) == PS_CHECKPOINT, "%s", now);
        ck_assert_msg(strncmp(ps_error_message(), name, strlen(name)) == 0 && strstr(ps_error_message(), cases[i].value), "%s",
                      ps_error_message());
    }
    static const char *const data[] = {"split: [0.6, 0.2, 0.2]", "standardize: false", "drop_last: false", "memory_limit: 1G"};
    for (int i = 0; i < COUNT(data); i++) {
        char now[96];
        struct ps_config saved, present;
        snprintf(now, sizeof now, "data: {path: a.h5, %s}", data[i]);
        ck_assert_int_eq(parse(OK, &saved), PS_OK);
        ck_assert_int_eq(parse(now, &present), PS_OK);
        ck_assert_int_eq(ps_config_compatible(&saved, &present), PS_CHECKPOINT);
        ps_config_free(&saved);
        ps_config_free(&present);
    }
}
END_TEST

int main(void)
{
    if (!mkdtemp(folder)) {
        perror(folder);
        return 1;
    }
    Suite *suite = suite_create("config");
    TCase *tests = tcase_create("config");
    tcase_set_timeout(tests, 120);
    tcase_add_test(tests, presets);
    tcase_add_test(tests, every_key);
    tcase_add_test(tests, words);
    tcase_add_test(tests, text_reads_back);
    tcase_add_test(tests, bad_keys);
    tcase_add_test(tests, bad_types);
    tcase_add_test(tests, bad_values);
    tcase_add_test(tests, quantiles);
    tcase_add_test(tests, bad_yaml);
    tcase_add_test(tests, mangled_yaml);
    tcase_add_test(tests, overrides);
    tcase_add_test(tests, split_by_times);
    tcase_add_test(tests, files);
    tcase_add_test(tests, bad_masking);
    tcase_add_test(tests, committed_configs);
    tcase_add_test(tests, resume);
    suite_add_tcase(suite, tests);
    int failed = run_suite(suite, CK_NOFORK);
    char command[PATH_MAX];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) != 0 || failed > 0;
}
