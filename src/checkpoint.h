/* checkpoint.h5: everything a run needs to go on, bit for bit, or to be evaluated elsewhere. Layout: docs/design.md, Files. A
 * SHA-256 of the rest stands in the file's 512-byte user block and is checked before HDF5 opens it. */
#ifndef PS_SRC_CHECKPOINT_H
#define PS_SRC_CHECKPOINT_H

#include <stdint.h>

#include "data/series.h"
#include "kernels/status.h"
#include "model/parameters.h"
#include "src/config.h"
#include "src/digest.h"

enum { PS_CHECKPOINT_FORMAT = 1 };

struct ps_checkpoint {
    /* layout names, shapes and offsets of the flat buffers below; borrowed when saving, owned (own_layout) after loading */
    struct ps_parameters *layout;
    int own_layout;
    float *parameters; /* [layout->stored] */
    float *m;          /* [layout->count]; NULL in a checkpoint of weights alone (best.h5) */
    double *v;         /* NULL likewise */
    struct ps_scaler scaler;
    uint64_t by_series;   /* 1: of a panel scaled by series, whose scaler is fitted to the data anew; this one is the identity */
    char *names;          /* of the channels, each with a zero byte behind it; NULL: the data have none */
    uint64_t names_bytes; /* of all, zero bytes included */
    uint64_t step, epoch; /* optimiser steps done; epochs completed */
    uint64_t cursor;      /* windows consumed of the epoch under way */
    double loss_sum;      /* and their losses */
    uint64_t lost;        /* those of them whose loss was not finite */
    uint64_t skipped;     /* steps of that epoch that were left out */
    uint64_t unobserved;  /* targets of those windows that were missing */
    uint64_t ranks;       /* that trained together; 0: one */
    double *rank_losses;  /* [ranks]: the part of each in loss_sum, lost and unobserved; NULL with one */
    uint64_t *rank_lost, *rank_unobserved;
    uint64_t seed;
    double best_validation; /* HUGE_VAL before the first */
    uint64_t best_epoch, epochs_since_best;
    char *config;                        /* resolved YAML */
    uint64_t fingerprint;                /* ps_series.fingerprint */
    char *level, *algorithms, *versions; /* as text: fusion level, GEMM algorithm rule, backend and library versions */
    /* Who wrote it: ps_version, ps_kernel_sources, ps_model_kernels. NULL: unknown, as in files of versions that did not say. */
    char *program_version, *kernel_sources, *kernels;
    char *init_from; /* what the run began with: path, SHA-256, epoch, whether with a new head; NULL: the seed's weights */
    char digest[PS_DIGEST_HEX]; /* of the file that was loaded */
};

/* Written beside (path + ".partial"), flushed, renamed over path, folder flushed. PS_CHECKPOINT with file and cause. */
enum ps_status ps_checkpoint_save(const char *path, const struct ps_checkpoint *checkpoint);
/* Verifies length and digest first. PS_CHECKPOINT: missing, truncated, altered, not ours, newer format. A right digest says who
 * wrote nothing: a child process looks at the file before this one does (data/probe.h). */
enum ps_status ps_checkpoint_load(const char *path, struct ps_checkpoint *checkpoint);
/* What that child does: checks everything but the tensors' values. bytes: the whole file, which HDF5 reads in place. */
enum ps_status ps_checkpoint_look(const char *path, char *bytes, size_t size);
/* rank_losses and what follows it, malloc'ed, for checkpoint->ranks. */
enum ps_status ps_checkpoint_room(struct ps_checkpoint *checkpoint);
void ps_checkpoint_free(struct ps_checkpoint *checkpoint); /* what load allocated */

/* How a model's data are read: with the channels of the checkpoint, by name; where it has none, or is NULL, as the config says. */
struct ps_reading ps_checkpoint_reading(const struct ps_checkpoint *checkpoint, const struct ps_config *config, int64_t batch);

#endif
