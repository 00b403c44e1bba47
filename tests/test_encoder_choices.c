/* Which kernels of level layer serve which shape on an H200 (132 multiprocessors, 227 KB of shared memory a block), by the name
 * that bench and train print and checkpoints record: another choice means other bits, and shows here first. Needs no GPU. */
#include <stdio.h>
#include <string.h>

#include "kernels/kernels.h"
#include "tests/length.h"
#include "tests/suite.h"

static const struct ps_gpu h200 = {90, 132, 232448};

static const struct choice {
    enum ps_precision precision;
    int64_t batch, channels, seq_len, pred_len, patch_len, patches, d_model, n_heads, d_ff, layers;
    double dropout;
    const char *kernels; /* NULL: refused */
} choices[] = {
#define SEED28K 64, 20, 24, 1, 8, 5, 64, 4, 256, 2, 0.0
#define ETTH1 128, 7, 336, 96, 16, 42, 16, 4, 128, 3, 0.3
#define WEATHER 128, 21, 336, 96, 16, 42, 128, 16, 256, 3, 0.2
#define ELECTRICITY 32, 321, 336, 96, 16, 42, 128, 16, 256, 3, 0.2
    {PS_PRECISION_BF16, SEED28K, "resident/d64_short bf16, d_model 64, 4 heads, d_ff 256, 5 patches, with the update"},
    {PS_FP16, SEED28K, "resident/d64_short fp16, d_model 64, 4 heads, d_ff 256, 5 patches, with the update"},
    {PS_TF32, SEED28K, "resident/d64_short (fp16 operands) tf32, d_model 64, 4 heads, d_ff 256, 5 patches, layers"},
    {PS_FP32, SEED28K, NULL},
    {PS_PRECISION_BF16, ETTH1,
     "resident/d16_e4_f128 bf16, d_model 16, 4 heads, d_ff 128, 42 patches, with the embedding and the loss"},
    {PS_FP16, ETTH1, "resident/d16_e4_f128 fp16, d_model 16, 4 heads, d_ff 128, 42 patches, with the embedding and the loss"},
    {PS_TF32, ETTH1, "resident/d16_e4_f128 (fp16 operands) tf32, d_model 16, 4 heads, d_ff 128, 42 patches, layers"},
    {PS_FP32, ETTH1, NULL},
    {PS_PRECISION_BF16, WEATHER, "streamed/real16 bf16, d_model 128, 16 heads, d_ff 256, 42 patches, layers"},
    {PS_FP16, WEATHER, "streamed/real16 fp16, d_model 128, 16 heads, d_ff 256, 42 patches, layers"},
    {PS_PRECISION_BF16, 2, 21, 336, 96, 16, 42, 128, 16, 256, 3, 0.2,
     "streamed/real16 bf16, d_model 128, 16 heads, d_ff 256, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 4, 21, 336, 96, 16, 42, 128, 16, 256, 3, 0.2,
     "streamed/real16 bf16, d_model 128, 16 heads, d_ff 256, 42 patches, layers"},
    {PS_TF32, WEATHER, "streamed/real16 (fp16 operands) tf32, d_model 128, 16 heads, d_ff 256, 42 patches, layers"},
    {PS_FP32, WEATHER, NULL},
    {PS_PRECISION_BF16, ELECTRICITY, "streamed/real16 bf16, d_model 128, 16 heads, d_ff 256, 42 patches, layers"},
    {PS_TF32, ELECTRICITY, "streamed/real16 (fp16 operands) tf32, d_model 128, 16 heads, d_ff 256, 42 patches, layers"},
    {PS_PRECISION_BF16, 1, 7, 336, 96, 16, 42, 16, 4, 128, 3, 0,
     "resident/d16_e4_f128 bf16, d_model 16, 4 heads, d_ff 128, 42 patches, with the embedding and the loss"},
    {PS_PRECISION_BF16, 128, 7, 336, 96, 16, 32, 16, 4, 128, 3, 0,
     "resident bf16, d_model 16, 4 heads, d_ff 128, 32 patches, with the embedding"},
    {PS_PRECISION_BF16, 128, 7, 336, 192, 16, 42, 16, 4, 128, 3, 0,
     "resident/d16_e4_f128 bf16, d_model 16, 4 heads, d_ff 128, 42 patches, with the embedding"},
    {PS_PRECISION_BF16, 128, 7, 512, 720, 16, 64, 16, 4, 128, 3, 0,
     "resident bf16, d_model 16, 4 heads, d_ff 128, 64 patches, with the embedding"},
    {PS_PRECISION_BF16, 128, 7, 336, 96, 16, 42, 32, 4, 128, 3, 0,
     "resident bf16, d_model 32, 4 heads, d_ff 128, 42 patches, with the embedding"},
    {PS_PRECISION_BF16, 128, 7, 336, 96, 16, 42, 64, 8, 256, 3, 0,
     "streamed/real16 bf16, d_model 64, 8 heads, d_ff 256, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 8, 21, 336, 96, 16, 42, 64, 8, 256, 3, 0,
     "streamed/real16 bf16, d_model 64, 8 heads, d_ff 256, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 16, 7, 336, 96, 16, 42, 72, 9, 256, 3, 0,
     "streamed/real16 bf16, d_model 72, 9 heads, d_ff 256, 42 patches, layers"},
    {PS_FP16, 64, 21, 336, 96, 16, 42, 96, 6, 192, 3, 0.2,
     "streamed/real16 fp16, d_model 96, 6 heads, d_ff 192, 42 patches, layers, slower"},
    {PS_FP16, 64, 21, 336, 96, 16, 42, 96, 12, 192, 3, 0.2,
     "streamed/real16 fp16, d_model 96, 12 heads, d_ff 192, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 4, 21, 336, 96, 16, 42, 96, 6, 192, 3, 0.2,
     "streamed/real16 bf16, d_model 96, 6 heads, d_ff 192, 42 patches, layers"},
    {PS_PRECISION_BF16, 64, 21, 512, 96, 16, 64, 128, 8, 256, 3, 0.2,
     "streamed/real16 bf16, d_model 128, 8 heads, d_ff 256, 64 patches, layers"},
    {PS_FP16, 64, 21, 336, 96, 16, 42, 96, 3, 192, 3, 0.2,
     "streamed/real16 fp16, d_model 96, 3 heads, d_ff 192, 42 patches, layers, slower"},
    {PS_FP16, 64, 21, 336, 96, 16, 42, 80, 5, 160, 3, 0.2,
     "streamed/real16 fp16, d_model 80, 5 heads, d_ff 160, 42 patches, layers, slower"},
    /* heads that are padded to 8, 16 or 32 columns: 128 of them fit, 192 do not */
    {PS_PRECISION_BF16, 64, 21, 336, 96, 16, 42, 96, 8, 384, 3, 0.2,
     "streamed/real16 bf16, d_model 96, 8 heads, d_ff 384, 42 patches, layers"},
    {PS_FP16, 64, 21, 336, 96, 16, 42, 96, 4, 384, 3, 0.2,
     "streamed/real16 fp16, d_model 96, 4 heads, d_ff 384, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 64, 21, 336, 96, 16, 42, 104, 4, 416, 3, 0.2,
     "streamed/real16 bf16, d_model 104, 4 heads, d_ff 416, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 64, 21, 512, 96, 16, 64, 112, 4, 448, 3, 0.2,
     "streamed/real16 bf16, d_model 112, 4 heads, d_ff 448, 64 patches, layers, slower"},
    {PS_FP16, 64, 21, 336, 96, 16, 42, 80, 8, 320, 3, 0.2,
     "streamed/real16 fp16, d_model 80, 8 heads, d_ff 320, 42 patches, layers"},
    {PS_PRECISION_BF16, 8, 7, 336, 96, 16, 42, 80, 4, 320, 3, 0.2,
     "streamed/real16 bf16, d_model 80, 4 heads, d_ff 320, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 16, 7, 336, 96, 16, 42, 80, 4, 320, 3, 0.2,
     "streamed/real16 bf16, d_model 80, 4 heads, d_ff 320, 42 patches, layers"},
    {PS_FP16, 16, 7, 336, 96, 16, 42, 72, 8, 256, 3, 0, "streamed/real16 fp16, d_model 72, 8 heads, d_ff 256, 42 patches, layers"},
    {PS_PRECISION_BF16, 64, 21, 336, 96, 16, 42, 48, 12, 192, 3, 0.2,
     "streamed/real16 bf16, d_model 48, 12 heads, d_ff 192, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 64, 21, 336, 96, 16, 42, 24, 2, 96, 3, 0.2,
     "streamed/real16 bf16, d_model 24, 2 heads, d_ff 96, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 64, 21, 336, 96, 16, 42, 120, 6, 480, 3, 0.2, NULL},
    {PS_PRECISION_BF16, 64, 21, 512, 96, 16, 32, 128, 4, 512, 3, 0.2,
     "streamed/real16 bf16, d_model 128, 4 heads, d_ff 512, 32 patches, layers"},
    {PS_PRECISION_BF16, 1, 21, 512, 96, 16, 64, 128, 4, 512, 3, 0.2,
     "streamed/real16 bf16, d_model 128, 4 heads, d_ff 512, 64 patches, layers, slower"},
    {PS_PRECISION_BF16, 32, 21, 336, 96, 16, 42, 32, 4, 128, 3, 0.2,
     "resident bf16, d_model 32, 4 heads, d_ff 128, 42 patches, with the embedding"},
    {PS_PRECISION_BF16, 128, 21, 336, 96, 16, 42, 32, 4, 128, 3, 0.2,
     "resident bf16, d_model 32, 4 heads, d_ff 128, 42 patches, with the embedding, slower"},
    {PS_FP16, 32, 21, 336, 96, 16, 42, 32, 4, 256, 3, 0.2,
     "resident fp16, d_model 32, 4 heads, d_ff 256, 42 patches, with the embedding, slower"},
    {PS_FP16, 1024, 20, 24, 1, 8, 5, 32, 4, 128, 2, 0,
     "resident fp16, d_model 32, 4 heads, d_ff 128, 5 patches, with the embedding"},
    {PS_PRECISION_BF16, 1024, 21, 512, 96, 16, 64, 16, 4, 256, 3, 0.2,
     "resident bf16, d_model 16, 4 heads, d_ff 256, 64 patches, with the embedding"},
    {PS_PRECISION_BF16, 64, 20, 24, 1, 8, 5, 64, 8, 64, 2, 0,
     "resident bf16, d_model 64, 8 heads, d_ff 64, 5 patches, with the embedding"},
    {PS_PRECISION_BF16, 512, 20, 24, 1, 8, 5, 64, 8, 64, 2, 0,
     "resident bf16, d_model 64, 8 heads, d_ff 64, 5 patches, with the embedding, slower"},
    {PS_PRECISION_BF16, 128, 7, 336, 96, 16, 42, 64, 16, 256, 3, 0,
     "streamed/real16 bf16, d_model 64, 16 heads, d_ff 256, 42 patches, layers, slower"},
    {PS_PRECISION_BF16, 128, 7, 96, 96, 16, 11, 128, 16, 256, 3, 0,
     "streamed/real16 bf16, d_model 128, 16 heads, d_ff 256, 11 patches, layers"},
    {PS_PRECISION_BF16, 128, 7, 96, 96, 16, 11, 64, 4, 192, 3, 0,
     "resident bf16, d_model 64, 4 heads, d_ff 192, 11 patches, with the embedding"},
    {PS_PRECISION_BF16, 64, 20, 24, 3, 8, 16, 64, 4, 256, 2, 0,
     "resident/d64_short bf16, d_model 64, 4 heads, d_ff 256, 16 patches, with the embedding"},
    {PS_PRECISION_BF16, 64, 20, 24, 9, 8, 5, 64, 4, 128, 2, 0,
     "resident/d64_short bf16, d_model 64, 4 heads, d_ff 128, 5 patches, with the embedding"},
    {PS_PRECISION_BF16, 128, 7, 44, 96, 8, 10, 64, 4, 256, 2, 0.1,
     "resident/d64_short bf16, d_model 64, 4 heads, d_ff 256, 10 patches, with the embedding"},
    {PS_PRECISION_BF16, 512, 7, 44, 96, 8, 10, 64, 4, 256, 2, 0.1,
     "resident/d64_short bf16, d_model 64, 4 heads, d_ff 256, 10 patches, with the embedding, slower"},
    {PS_PRECISION_BF16, 64, 20, 24, 3, 8, 17, 64, 4, 128, 2, 0,
     "streamed/real16 bf16, d_model 64, 4 heads, d_ff 128, 17 patches, layers, slower"},
    /* whole sequences that fill a tile, or do not */
    {PS_PRECISION_BF16, 64, 21, 400, 96, 16, 19, 128, 16, 256, 2, 0.2,
     "streamed/real16 bf16, d_model 128, 16 heads, d_ff 256, 19 patches, layers"},
    {PS_PRECISION_BF16, 128, 21, 400, 96, 16, 26, 128, 8, 256, 2, 0.2,
     "streamed/real16 bf16, d_model 128, 8 heads, d_ff 256, 26 patches, layers, slower"},
    {PS_PRECISION_BF16, 64, 21, 400, 96, 16, 43, 128, 16, 256, 2, 0.2,
     "streamed/real16 bf16, d_model 128, 16 heads, d_ff 256, 43 patches, layers, slower"},
    {PS_PRECISION_BF16, 4, 21, 400, 96, 16, 43, 128, 16, 256, 2, 0.2,
     "streamed/real16 bf16, d_model 128, 16 heads, d_ff 256, 43 patches, layers"},
    {PS_PRECISION_BF16, 64, 21, 480, 96, 16, 58, 128, 16, 512, 2, 0.2,
     "streamed/real16 bf16, d_model 128, 16 heads, d_ff 512, 58 patches, layers, slower"},
    {PS_PRECISION_BF16, 64, 21, 480, 96, 16, 58, 128, 8, 512, 2, 0.2,
     "streamed/real16 bf16, d_model 128, 8 heads, d_ff 512, 58 patches, layers, slower"},
    {PS_PRECISION_BF16, 16, 21, 456, 96, 16, 56, 128, 8, 256, 3, 0.2,
     "streamed/real16 bf16, d_model 128, 8 heads, d_ff 256, 56 patches, layers"},
    {PS_PRECISION_BF16, 64, 21, 336, 96, 16, 36, 128, 4, 256, 2, 0.2,
     "streamed/real16 bf16, d_model 128, 4 heads, d_ff 256, 36 patches, layers, slower"},
    {PS_PRECISION_BF16, 128, 7, 336, 96, 16, 42, 256, 16, 512, 3, 0, NULL},
    {PS_PRECISION_BF16, 128, 7, 1024, 96, 16, 128, 128, 16, 256, 3, 0, NULL},
    {PS_FP16, 128, 7, 1024, 96, 16, 65, 16, 4, 128, 3, 0, NULL},
    {PS_TF32, 128, 21, 336, 96, 16, 42, 32, 4, 128, 3, 0,
     "resident (fp16 operands) tf32, d_model 32, 4 heads, d_ff 128, 42 patches, layers"},
    {PS_TF32, 64, 21, 336, 96, 16, 42, 128, 2, 256, 3, 0.2, NULL},
    {PS_TF32, 64, 21, 512, 96, 16, 32, 128, 4, 512, 3, 0.2,
     "streamed/real16 (fp16 operands) tf32, d_model 128, 4 heads, d_ff 512, 32 patches, layers"},
    {PS_TF32, 48, 7, 336, 96, 16, 42, 64, 8, 256, 3, 0,
     "streamed/real16 (fp16 operands) tf32, d_model 64, 8 heads, d_ff 256, 42 patches, layers"},
    {PS_TF32, 64, 20, 24, 3, 8, 5, 64, 8, 128, 2, 0,
     "resident (fp16 operands) tf32, d_model 64, 8 heads, d_ff 128, 5 patches, layers"},
    {PS_TF32, 128, 7, 336, 96, 16, 42, 48, 8, 128, 3, 0,
     "streamed/real16 (fp16 operands) tf32, d_model 48, 8 heads, d_ff 128, 42 patches, layers"},
    {PS_TF32, 128, 7, 512, 96, 16, 128, 128, 8, 512, 3, 0, NULL},
    {PS_FP32, 128, 7, 336, 96, 16, 42, 64, 8, 256, 3, 0, NULL},
};

/* Of other layers than the default model's. */
static const struct variant {
    struct choice choice;
    enum ps_norm norm;
    enum ps_norm_place norm_place;
    enum ps_activation activation;
    int residual_attention;
} variants[] = {
#define PAPER PS_NORM_BATCH, PS_NORM_POST, PS_GELU, 1
    {{PS_PRECISION_BF16, ETTH1, "resident/d16_halves bf16, d_model 16, 4 heads, d_ff 128, 42 patches, with the embedding"}, PAPER},
    {{PS_FP16, ETTH1, "resident/d16_halves fp16, d_model 16, 4 heads, d_ff 128, 42 patches, with the embedding"}, PAPER},
    {{PS_PRECISION_BF16, 128, 7, 512, 96, 16, 64, 16, 4, 128, 3, 0.3,
      "resident/d16_halves bf16, d_model 16, 4 heads, d_ff 128, 64 patches, with the embedding and the loss"},
     PAPER},
    {{PS_PRECISION_BF16, 16, 7, 104, 24, 16, 13, 16, 4, 128, 3, 0.3,
      "resident/d16_halves bf16, d_model 16, 4 heads, d_ff 128, 13 patches, with the embedding"},
     PAPER},
    {{PS_PRECISION_BF16, 128, 7, 336, 192, 16, 42, 16, 4, 128, 3, 0.3,
      "resident/d16_halves bf16, d_model 16, 4 heads, d_ff 128, 42 patches, with the embedding"},
     PAPER},
    {{PS_FP16, 128, 7, 336, 96, 16, 64, 16, 4, 64, 2, 0.1,
      "resident/d16_halves fp16, d_model 16, 4 heads, d_ff 64, 64 patches, with the embedding and the loss"},
     PS_NORM_BATCH,
     PS_NORM_POST,
     PS_RELU,
     0},
    {{PS_TF32, ETTH1, "resident/d16_halves (fp16 operands) tf32, d_model 16, 4 heads, d_ff 128, 42 patches, layers"}, PAPER},
    {{PS_PRECISION_BF16, 17, 21, 800, 96, 16, 99, 16, 4, 256, 3, 0.2,
      "resident/d16_halves bf16, d_model 16, 4 heads, d_ff 256, 99 patches, with the embedding"},
     PAPER},
    {{PS_FP16, 8, 7, 512, 24, 16, 128, 16, 2, 128, 6, 0.2,
      "resident/d16_halves fp16, d_model 16, 2 heads, d_ff 128, 128 patches, with the embedding and the loss"},
     PAPER},
    {{PS_TF32, 128, 7, 336, 96, 16, 42, 16, 1, 128, 3, 0.3,
      "resident/d16_halves (fp16 operands) tf32, d_model 16, 1 heads, d_ff 128, 42 patches, layers"},
     PAPER},
    {{PS_PRECISION_BF16, 128, 7, 336, 96, 16, 42, 16, 8, 128, 3, 0.3, NULL}, PAPER},
    {{PS_PRECISION_BF16, 128, 7, 1032, 96, 16, 129, 16, 4, 128, 3, 0.3, NULL}, PAPER},
    {{PS_PRECISION_BF16, 128, 7, 1024, 96, 16, 128, 16, 4, 128, 7, 0.3, NULL}, PAPER},
    {{PS_PRECISION_BF16, WEATHER, NULL}, PAPER},
    {{PS_PRECISION_BF16, 128, 7, 336, 96, 16, 42, 16, 4, 96, 3, 0.3, NULL}, PAPER},
    {{PS_PRECISION_BF16, ETTH1, NULL}, PS_NORM_LAYER, PS_NORM_POST, PS_GELU_TANH, 0},
    {{PS_PRECISION_BF16, ETTH1, NULL}, PS_NORM_LAYER, PS_NORM_PRE, PS_GELU, 0},
};

/* What prepare says of it to a table. */
static enum ps_status prepare(struct ps_kernels *k, const struct variant *v, double hidden_rate, int other_rate,
                              struct ps_encoder_needs *needs)
{
    const struct choice *c = &v->choice;
    const struct ps_encoder_sizes sizes = {.n_heads = c->n_heads,
                                           .d_ff = c->d_ff,
                                           .layers = c->layers,
                                           .epsilon = 1e-5,
                                           .dropout = ps_dropout_make(c->dropout, 0, 0, NULL),
                                           .hidden_dropout = ps_dropout_make(hidden_rate, 0, 1, NULL),
                                           .output_dropout = ps_dropout_make(c->dropout, 0, 2, NULL),
                                           .norm = v->norm,
                                           .norm_place = v->norm_place,
                                           .activation = v->activation,
                                           .residual_attention = v->residual_attention,
                                           .training = 1};
    const struct ps_encoder_shape shape = {.sequences = c->batch * c->channels,
                                           .patches = c->patches,
                                           .d_model = c->d_model,
                                           .seq_len = c->seq_len,
                                           .patch_len = c->patch_len,
                                           .pred_len = c->pred_len,
                                           .other_rate = other_rate};
    return k->encoder_prepare(k, &sizes, &shape, needs);
}

static enum ps_status needs_of(const struct variant *v, int other_rate, struct ps_encoder_needs *needs)
{
    struct ps_kernels *k;
    ck_assert_int_eq(ps_kernels_choices(&h200, v->choice.precision, NULL, &k), PS_OK);
    const enum ps_status status = prepare(k, v, v->choice.dropout, other_rate, needs);
    k->close(k);
    return status;
}

/* _i: of `choices`, then of `variants`. */
START_TEST(encoder_kernels)
{
    const int other = _i >= LENGTH(choices);
    const struct variant v = other ? variants[_i - LENGTH(choices)] : (struct variant){.choice = choices[_i]};
    const struct choice *c = &v.choice;
    struct ps_encoder_needs needs;
    const enum ps_status status = needs_of(&v, 0, &needs);
    if (!c->kernels) {
        ck_assert_msg(status == PS_UNSUPPORTED, "row %d is served: %s", _i, needs.kernels);
        return;
    }
    ck_assert_msg(status == PS_OK, "row %d: %s", _i, ps_error_message());
    char name[sizeof needs.kernels + 16];
    snprintf(name, sizeof name, "%s%s", needs.kernels, needs.slower ? ", slower" : "");
    ck_assert_int_eq(needs.fp16_rows, c->precision == PS_TF32 && !strstr(name, "d64_short"));
    ck_assert_msg(strcmp(name, c->kernels) == 0, "row %d: %s, not %s", _i, name, c->kernels);
    /* Only the halves leave room for W_h's gradient, and where they do the head their backward lets it in before. */
    ck_assert_msg(needs.room == (strstr(name, "d16_halves ") && !strstr(name, "fp16 operands") && needs.span < PS_SPAN_LOSS),
                  "row %d", _i);
}
END_TEST

/* The embedding's own rate of dropout: the paper's small layer takes it inside, the default model's kernels leave it outside. */
START_TEST(other_rate)
{
    static const struct variant plain = {.choice = {PS_PRECISION_BF16, ETTH1, NULL}},
                                paper = {{PS_PRECISION_BF16, ETTH1, NULL}, PAPER};
    struct ps_encoder_needs needs;
    ck_assert_int_eq(needs_of(&plain, 0, &needs), PS_OK);
    ck_assert_int_eq(needs.span, PS_SPAN_LOSS);
    ck_assert_int_eq(needs.room, 0);
    ck_assert_int_eq(needs_of(&plain, 1, &needs), PS_OK);
    ck_assert_int_eq(needs.span, PS_SPAN_LAYERS);
    ck_assert_int_eq(needs_of(&paper, 1, &needs), PS_OK);
    ck_assert_int_eq(needs.span, PS_SPAN_EMBEDDING);
    ck_assert_int_eq(needs.room, 1);
}
END_TEST

/* A table keeps plans: not of one rate of dropout for a model of the same sizes that has several. */
START_TEST(rates_apart)
{
    static const struct variant v = {.choice = {PS_PRECISION_BF16, ETTH1, NULL}};
    struct ps_encoder_needs needs;
    struct ps_kernels *k;
    ck_assert_int_eq(ps_kernels_choices(&h200, PS_PRECISION_BF16, NULL, &k), PS_OK);
    ck_assert_int_eq(prepare(k, &v, v.choice.dropout, 0, &needs), PS_OK);
    ck_assert_int_eq(prepare(k, &v, v.choice.dropout / 2, 0, &needs), PS_UNSUPPORTED);
    k->close(k);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("encoder kernels");
    TCase *tests = tcase_create("encoder kernels");
    struct ps_kernels *k;
    if (ps_kernels_choices(&h200, PS_PRECISION_BF16, NULL, &k) == PS_OK) {
        k->close(k);
        tcase_add_loop_test(tests, encoder_kernels, 0, LENGTH(choices) + LENGTH(variants));
        tcase_add_test(tests, other_rate);
        tcase_add_test(tests, rates_apart);
    } else {
        printf("skipped: which kernels serve level layer: %s\n", ps_error_message());
    }
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
