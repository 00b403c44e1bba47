/* Weights of other implementations of PatchTST: Hugging Face's (a folder of config.json and model.safetensors) and the authors'
 * (a state dict as safetensors, which scripts/pth_to_safetensors.py makes). docs: README.md, "Weights in and out". */
#ifndef PS_SRC_WEIGHTS_H
#define PS_SRC_WEIGHTS_H

#include "model/parameters.h"
#include "src/config.h"
#include "src/safetensors.h"

enum ps_weights_kind { PS_WEIGHTS_HF, PS_WEIGHTS_AUTHORS };

/* What a tensor of theirs holds. */
enum ps_weights_role {
    PS_WEIGHTS_VALUES,  /* values of ours */
    PS_WEIGHTS_SINCOS,  /* the table of positions that ps_positions_fill makes */
    PS_WEIGHTS_SCALE,   /* one number that scores are multiplied by; may be missing */
    PS_WEIGHTS_COUNTER, /* of the batches that BatchNorm saw, which no one reads; may be missing */
};

/* A tensor of theirs, [columns, rows] where it is a product's weights, and where its values lie among ours: element [o, i] is the
 * flat buffer's offset + r(i) * stride + o, with r(i) = i, or n d + j of i = j N + n where the authors' head has them so. */
struct ps_weights_piece {
    char name[128];
    enum ps_weights_role role;
    int variance; /* is not negative */
    int rank;
    int64_t size[2]; /* theirs */
    int64_t rows, columns, offset, stride;
    int64_t patches; /* N of the authors' head; else 0 */
    char scale[128]; /* of the queries' product: the name of its PS_WEIGHTS_SCALE; else "" */
};

/* Calls visit with every tensor that a model of this shape has in their file, until one fails. */
typedef enum ps_status ps_weights_visit(void *argument, const struct ps_weights_piece *piece);
enum ps_status ps_weights_each(enum ps_weights_kind kind, const struct ps_model_shape *shape, const struct ps_parameters *layout,
                               ps_weights_visit *visit, void *argument);

/* The file's values among ours, malloc'ed [layout->stored]. PS_CHECKPOINT naming the tensor that is missing, of another shape, not
 * finite, or that the model has no place for. Nothing is allocated before all shapes are found right. */
enum ps_status ps_weights_convert(enum ps_weights_kind kind, const struct ps_model_shape *shape, const struct ps_parameters *layout,
                                  const struct ps_safetensors *file, float **values);
/* The way back, to Hugging Face's: the bytes of model.safetensors, malloc'ed. */
enum ps_status ps_weights_revert(const char *path, const struct ps_model_shape *shape, const struct ps_parameters *layout,
                                 const float *values, char **bytes, size_t *size);

/* What the authors' tensors tell of the config, and what their layer is where tensors do not tell; *channels: 0 where they do not
 * say. */
enum ps_status ps_weights_authors_known(const struct ps_safetensors *file, struct ps_known *known, int64_t *channels);
/* What a config.json of PatchTSTForPrediction says. PS_CHECKPOINT naming key and value for what has no counterpart here. */
enum ps_status ps_weights_hf_known(const char *path, struct ps_known *known, int64_t *channels);
/* Positions that are said to be sines and cosines, and are not those of ps_positions_fill, are taken as learned ones: the file's
 * table is what their model adds. */
enum ps_status ps_weights_hf_positions(const struct ps_safetensors *file, struct ps_known *known);
#define PS_WEIGHTS_HF_POSITIONS "model.encoder.positional_encoder.position_enc"
/* The same text from a model; malloc'ed. PS_USAGE naming the config's key for what PatchTSTForPrediction has no counterpart of. */
enum ps_status ps_weights_hf_config(const struct ps_config *config, int64_t channels, char **text);

/* ---- the programs ---- */

struct ps_weights_import {
    const char *from, *out;
    const char *config; /* NULL: the presets */
    const char *data;   /* in place of data.path; NULL: that stays */
    char *const *overrides;
    int n_overrides;
    int64_t channels; /* 0: as the weights or the data say */
};
struct ps_weights_done {
    int64_t parameters, channels;
    int scaled; /* the checkpoint has the data's scaler */
};
/* Writes a checkpoint of weights alone. */
enum ps_status ps_weights_import(const struct ps_weights_import *import, struct ps_weights_done *done);

/* Writes config.json and model.safetensors into the folder, which is made when it is missing. *path_dropouts: the rates of both of
 * a layer's branches, of which theirs has the second. */
enum ps_status ps_weights_export(const char *checkpoint, const char *folder, struct ps_weights_done *done, double path_dropouts[2]);
/* Their paths, malloc'ed; NULL without memory. */
char *ps_weights_file(const char *folder, const char *name);
#define PS_WEIGHTS_CONFIG "config.json"
#define PS_WEIGHTS_TENSORS "model.safetensors"
#define PS_WEIGHTS_INDEX PS_WEIGHTS_TENSORS ".index.json" /* of several files in its place */

#endif
