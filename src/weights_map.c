/* Which tensor of theirs is which of ours: one list, for both ways. */
#include "src/weights.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A layer's products, in the order of `products` below. */
enum { PRODUCTS = 6 };

/* What the two call a model's parts. %d: a layer's number, or a channel's. */
struct names {
    const char *embedding, *positions, *layer, *product[PRODUCTS], *norm[2], *batchnorm, *head, *heads, *revin_weight, *revin_bias,
        *scale;
};

static const struct names all_names[] = {
    [PS_WEIGHTS_HF] = {.embedding = "model.encoder.embedder.input_embedding",
                       .positions = PS_WEIGHTS_HF_POSITIONS,
                       .layer = "model.encoder.layers.%d.",
                       .product = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "ff.0",
                                   "ff.3"},
                       .norm = {"norm_sublayer1", "norm_sublayer3"},
                       .batchnorm = ".batchnorm",
                       .head = "head.projection",
                       .heads = "head.projections.%d"},
    [PS_WEIGHTS_AUTHORS] = {.embedding = "backbone.W_P",
                            .positions = "backbone.W_pos",
                            .layer = "backbone.encoder.layers.%d.",
                            .product = {"self_attn.W_Q", "self_attn.W_K", "self_attn.W_V", "self_attn.to_out.0", "ff.0", "ff.3"},
                            .norm = {"norm_attn", "norm_ffn"},
                            .batchnorm = ".1",
                            .head = "head.linear",
                            .heads = "head.linears.%d",
                            .revin_weight = "revin_layer.affine_weight",
                            .revin_bias = "revin_layer.affine_bias",
                            .scale = "self_attn.sdp_attn.scale"},
};

/* W_qkv's three are blocks of its columns. */
static const struct {
    enum ps_layer_parameter weight, bias;
    int block, blocks;
} products[PRODUCTS] = {{PS_W_QKV, PS_B_QKV, 0, 3}, {PS_W_QKV, PS_B_QKV, 1, 3}, {PS_W_QKV, PS_B_QKV, 2, 3},
                        {PS_W_O, PS_B_O, 0, 1},     {PS_W_1, PS_B_1, 0, 1},     {PS_W_2, PS_B_2, 0, 1}};

struct walk {
    const struct ps_parameters *layout;
    ps_weights_visit *visit;
    void *argument;
    char prefix[112];
    int64_t patches; /* of the products that are visited, as struct ps_weights_piece has it */
    char scale[128]; /* likewise */
};

static struct ps_weights_piece name_piece(const struct walk *w, const char *part, const char *end)
{
    struct ps_weights_piece piece = {.role = PS_WEIGHTS_VALUES};
    snprintf(piece.name, sizeof piece.name, "%.40s%.60s%s", w->prefix, part, end);
    return piece;
}

/* A tensor with ours' own shape and order. */
static enum ps_status visit_same(const struct walk *w, const char *part, const char *end, int tensor)
{
    const struct ps_parameter *p = &w->layout->table[tensor];
    struct ps_weights_piece piece = name_piece(w, part, end);
    piece.variance = strcmp(end, ".running_var") == 0;
    piece.rank = p->rank;
    memcpy(piece.size, p->size, sizeof piece.size);
    piece.rows = 1;
    piece.columns = ps_parameter_count(p);
    piece.offset = p->offset;
    return w->visit(w->argument, &piece);
}

/* nn.Linear's weight and bias: columns [block, block + 1) of `blocks` of matrix `channel` of ours. */
static enum ps_status visit_linear(const struct walk *w, const char *part, int weight, int bias, int block, int blocks, int channel)
{
    const struct ps_parameter *p = &w->layout->table[weight];
    int64_t in = p->size[p->rank - 2], stride = p->size[p->rank - 1], out = stride / blocks;
    struct ps_weights_piece piece = name_piece(w, part, ".weight");
    piece.rank = 2;
    piece.size[0] = out;
    piece.size[1] = in;
    piece.rows = in;
    piece.columns = out;
    piece.stride = stride;
    piece.offset = p->offset + channel * in * stride + block * out;
    piece.patches = w->patches;
    memcpy(piece.scale, w->scale, sizeof piece.scale);
    PS_TRY(w->visit(w->argument, &piece));
    piece = name_piece(w, part, ".bias");
    memcpy(piece.scale, w->scale, sizeof piece.scale);
    piece.rank = 1;
    piece.size[0] = piece.columns = out;
    piece.rows = 1;
    piece.offset = w->layout->table[bias].offset + channel * out + block * out;
    return w->visit(w->argument, &piece);
}

static enum ps_status visit_norm(const struct walk *w, const struct names *names, const struct ps_model_shape *shape, int l, int i)
{
    const int *parameter = w->layout->layer[l], *statistic = w->layout->statistics[l];
    int batch = shape->norm == PS_NORM_BATCH;
    char part[48];
    snprintf(part, sizeof part, "%s%s", names->norm[i], batch ? names->batchnorm : "");
    PS_TRY(visit_same(w, part, ".weight", parameter[i == 0 ? PS_NORM1_GAMMA : PS_NORM2_GAMMA]));
    PS_TRY(visit_same(w, part, ".bias", parameter[i == 0 ? PS_NORM1_BETA : PS_NORM2_BETA]));
    if (!batch) {
        return PS_OK;
    }
    PS_TRY(visit_same(w, part, ".running_mean", statistic[i == 0 ? PS_RUNNING_MEAN_1 : PS_RUNNING_MEAN_2]));
    PS_TRY(visit_same(w, part, ".running_var", statistic[i == 0 ? PS_RUNNING_VAR_1 : PS_RUNNING_VAR_2]));
    struct ps_weights_piece counter = name_piece(w, part, ".num_batches_tracked");
    counter.role = PS_WEIGHTS_COUNTER;
    return w->visit(w->argument, &counter);
}

static enum ps_status visit_layer(struct walk *w, const struct names *names, const struct ps_model_shape *shape, int l)
{
    snprintf(w->prefix, sizeof w->prefix, names->layer, l);
    const int *parameter = w->layout->layer[l];
    if (names->scale) {
        struct ps_weights_piece scale = name_piece(w, names->scale, "");
        scale.role = PS_WEIGHTS_SCALE;
        PS_TRY(w->visit(w->argument, &scale));
        memcpy(w->scale, scale.name, sizeof w->scale);
    }
    for (int i = 0; i < PRODUCTS; i++) {
        PS_TRY(visit_linear(w, names->product[i], parameter[products[i].weight], parameter[products[i].bias], products[i].block,
                            products[i].blocks, 0));
        *w->scale = 0; /* the first are the queries' */
    }
    for (int i = 0; i < 2; i++) {
        PS_TRY(visit_norm(w, names, shape, l, i));
    }
    return PS_OK;
}

/* One head, or one of each channel. */
static enum ps_status visit_heads(struct walk *w, const struct names *names, const struct ps_model_shape *shape, int turned)
{
    w->patches = turned ? ps_patches(shape) : 0;
    int heads = shape->individual_head ? (int)shape->channels : 1;
    for (int c = 0; c < heads; c++) {
        snprintf(w->prefix, sizeof w->prefix, shape->individual_head ? names->heads : names->head, c);
        PS_TRY(visit_linear(w, "", w->layout->w_h, w->layout->b_h, 0, 1, c));
    }
    w->patches = 0;
    *w->prefix = 0;
    return PS_OK;
}

enum ps_status ps_weights_each(enum ps_weights_kind kind, const struct ps_model_shape *shape, const struct ps_parameters *layout,
                               ps_weights_visit *visit, void *argument)
{
    const struct names *names = &all_names[kind];
    struct walk w = {.layout = layout, .visit = visit, .argument = argument};
    PS_TRY(visit_linear(&w, names->embedding, layout->w_p, layout->b_p, 0, 1, 0));
    if (shape->positions == PS_POSITIONS_LEARNED) {
        PS_TRY(visit_same(&w, names->positions, "", layout->w_pos));
    } else if (shape->positions == PS_POSITIONS_SINCOS) {
        struct ps_weights_piece table = name_piece(&w, names->positions, "");
        table.role = PS_WEIGHTS_SINCOS;
        table.rank = 2;
        table.size[0] = ps_patches(shape);
        table.size[1] = shape->d_model;
        PS_TRY(visit(argument, &table));
    }
    for (int l = 0; l < shape->n_layers; l++) {
        PS_TRY(visit_layer(&w, names, shape, l));
    }
    PS_TRY(visit_heads(&w, names, shape, kind == PS_WEIGHTS_AUTHORS));
    if (shape->revin_affine) {
        PS_TRY(visit_same(&w, names->revin_weight, "", layout->revin_weight));
        PS_TRY(visit_same(&w, names->revin_bias, "", layout->revin_bias));
    }
    return PS_OK;
}

/* Where element i of a column of theirs lies among our rows. */
static int64_t row_of(const struct ps_weights_piece *piece, int64_t i)
{
    int64_t N = piece->patches;
    return N ? i % N * (piece->rows / N) + i / N : i;
}

/* ---- theirs to ours ---- */

struct conversion {
    const struct ps_model_shape *shape;
    const struct ps_safetensors *file;
    char *known;   /* [file->n]: the model has a place for it */
    float *theirs; /* of the largest tensor */
    float *ours;
};

/* What queries are multiplied by, so that scores that the file scales by its own number can be scaled by 1/sqrt(e): 1 where that
 * is its number, to within what float has of it. */
static enum ps_status read_scale(const struct conversion *c, const char *name, double *factor)
{
    const struct ps_safetensor *t = *name ? ps_safetensors_find(c->file, name) : NULL;
    float scale;
    *factor = 1;
    if (!t) {
        return PS_OK;
    }
    PS_TRY(ps_safetensors_values(c->file, t, &scale));
    double whole = (double)scale * sqrt((double)(c->shape->d_model / c->shape->n_heads));
    *factor = fabs(whole - 1) <= 1e-6 ? 1 : whole;
    return PS_OK;
}

static enum ps_status check_piece(void *argument, const struct ps_weights_piece *piece)
{
    struct conversion *c = argument;
    const struct ps_safetensor *t = ps_safetensors_find(c->file, piece->name);
    if (t) {
        c->known[t - c->file->tensor] = 1;
    }
    if (piece->role == PS_WEIGHTS_COUNTER || (piece->role == PS_WEIGHTS_SCALE && !t)) {
        return PS_OK;
    }
    if (!t) {
        return ps_fail(PS_CHECKPOINT, "%s: has no tensor %s", c->file->path, piece->name);
    }
    int same = piece->role == PS_WEIGHTS_SCALE ? t->count == 1 : t->rank == piece->rank;
    for (int i = 0; i < piece->rank && same; i++) {
        same = t->size[i] == piece->size[i];
    }
    return same ? PS_OK
                : ps_fail(PS_CHECKPOINT, "%s: tensor %s: its shape is %s, and the model's is %s", c->file->path, piece->name,
                          ps_shape_text(t->rank, t->size).text, ps_shape_text(piece->rank, piece->size).text);
}

static enum ps_status convert_piece(void *argument, const struct ps_weights_piece *piece)
{
    struct conversion *c = argument;
    const struct ps_safetensor *t = ps_safetensors_find(c->file, piece->name);
    if (piece->role != PS_WEIGHTS_VALUES) {
        return PS_OK;
    }
    double factor;
    PS_TRY(read_scale(c, piece->scale, &factor));
    PS_TRY(ps_safetensors_values(c->file, t, c->theirs));
    for (int64_t i = 0; i < piece->rows; i++) {
        float *row = c->ours + piece->offset + row_of(piece, i) * piece->stride;
        for (int64_t o = 0; o < piece->columns; o++) {
            row[o] = (float)(factor * (double)c->theirs[o * piece->rows + i]);
            if (piece->variance && row[o] < 0) {
                return ps_fail(PS_CHECKPOINT, "%s: tensor %s: element %" PRId64 " is %g, and a variance is not negative",
                               c->file->path, piece->name, o, (double)row[o]);
            }
        }
    }
    return PS_OK;
}

static enum ps_status check_all(enum ps_weights_kind kind, struct conversion *c, const struct ps_parameters *layout)
{
    PS_TRY(ps_weights_each(kind, c->shape, layout, check_piece, c));
    for (int i = 0; i < c->file->n; i++) {
        if (!c->known[i]) {
            return ps_fail(PS_CHECKPOINT, "%s: tensor %s: the model has no place for it", c->file->path, c->file->tensor[i].name);
        }
    }
    return PS_OK;
}

enum ps_status ps_weights_convert(enum ps_weights_kind kind, const struct ps_model_shape *shape, const struct ps_parameters *layout,
                                  const struct ps_safetensors *file, float **values)
{
    struct conversion c = {.shape = shape, .file = file, .known = calloc((size_t)file->n + 1, 1)};
    if (!c.known) {
        return ps_fail(PS_CHECKPOINT, "%s: no memory", file->path);
    }
    enum ps_status status = check_all(kind, &c, layout);
    free(c.known);
    PS_TRY(status);
    int64_t largest = 1;
    for (int i = 0; i < file->n; i++) {
        largest = file->tensor[i].count > largest ? file->tensor[i].count : largest;
    }
    c.theirs = malloc((size_t)largest * sizeof *c.theirs);
    c.ours = calloc((size_t)layout->stored, sizeof *c.ours); /* the gaps between tensors stay 0 */
    status = c.theirs && c.ours ? ps_weights_each(kind, shape, layout, convert_piece, &c)
                                : ps_fail(PS_CHECKPOINT, "%s: no memory for %" PRId64 " parameters", file->path, layout->stored);
    free(c.theirs);
    if (status != PS_OK) {
        free(c.ours);
        c.ours = NULL;
    }
    *values = c.ours;
    return status;
}

/* ---- ours to theirs ---- */

struct reversion {
    const struct ps_model_shape *shape;
    const float *ours;
    int n, room;
    struct ps_safetensor *tensors; /* names and bytes are malloc'ed */
};

static const int64_t no_batches;

static enum ps_status revert_piece(void *argument, const struct ps_weights_piece *piece)
{
    struct reversion *r = argument;
    if (r->n == r->room) {
        r->room = 2 * r->room + 64;
        struct ps_safetensor *larger = realloc(r->tensors, (size_t)r->room * sizeof *larger);
        if (!larger) {
            return ps_fail(PS_CHECKPOINT, "no memory for %d tensors", r->room);
        }
        r->tensors = larger;
    }
    struct ps_safetensor t = {.dtype = "F32", .rank = piece->rank, .count = 1};
    for (int i = 0; i < piece->rank; i++) {
        t.size[i] = piece->size[i];
        t.count *= piece->size[i];
    }
    float *theirs = malloc((size_t)t.count * (piece->role == PS_WEIGHTS_COUNTER ? sizeof no_batches : sizeof *theirs));
    t.name = strdup(piece->name);
    t.bytes = theirs;
    r->tensors[r->n++] = t;
    if (!t.name || !theirs) {
        return ps_fail(PS_CHECKPOINT, "no memory for tensor %s", piece->name);
    }
    if (piece->role == PS_WEIGHTS_COUNTER) {
        r->tensors[r->n - 1].dtype = "I64";
        memcpy(theirs, &no_batches, sizeof no_batches);
    } else if (piece->role == PS_WEIGHTS_SINCOS) {
        double *table = malloc((size_t)t.count * sizeof *table);
        if (!table) {
            return ps_fail(PS_CHECKPOINT, "no memory for tensor %s", piece->name);
        }
        ps_positions_fill(r->shape, table);
        for (int64_t i = 0; i < t.count; i++) {
            theirs[i] = (float)table[i];
        }
        free(table);
    } else {
        for (int64_t i = 0; i < piece->rows; i++) {
            for (int64_t o = 0; o < piece->columns; o++) {
                theirs[o * piece->rows + i] = r->ours[piece->offset + row_of(piece, i) * piece->stride + o];
            }
        }
    }
    return PS_OK;
}

enum ps_status ps_weights_revert(const char *path, const struct ps_model_shape *shape, const struct ps_parameters *layout,
                                 const float *values, char **bytes, size_t *size)
{
    struct reversion r = {.shape = shape, .ours = values};
    *bytes = NULL;
    enum ps_status status = ps_weights_each(PS_WEIGHTS_HF, shape, layout, revert_piece, &r);
    if (status == PS_OK) {
        status = ps_safetensors_make(path, r.tensors, r.n, bytes, size);
    }
    for (int i = 0; i < r.n; i++) {
        free((char *)r.tensors[i].name);
        free((void *)r.tensors[i].bytes);
    }
    free(r.tensors);
    return status;
}
