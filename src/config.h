/* The config: one YAML a job, read against a schema (libcyaml), with --set overrides checked by the same schema. Every key has a
 * default but data.path. docs: README.md, "Config reference". */
#ifndef PS_SRC_CONFIG_H
#define PS_SRC_CONFIG_H

#include <stdint.h>

#include "data/series.h"
#include "kernels/kernels.h"
#include "model/parameters.h"
#include "optim/schedule.h"

enum ps_freeze { PS_FREEZE_NONE, PS_FREEZE_ENCODER };
enum ps_objective { PS_OBJECTIVE_FORECAST, PS_OBJECTIVE_MASKED };
enum ps_head { PS_HEAD_SHARED, PS_HEAD_INDIVIDUAL };
enum ps_patches_from { PS_PATCHES_FROM_START, PS_PATCHES_FROM_END };
enum ps_padding { PS_PADDING_NONE, PS_PADDING_END };
enum ps_placement { PS_PLACEMENT_AUTO, PS_PLACEMENT_DEVICE, PS_PLACEMENT_HOST };
enum ps_exchange_kind { PS_EXCHANGE_AUTO, PS_EXCHANGE_NCCL, PS_EXCHANGE_MPI };
enum ps_attention_kind { PS_ATTENTION_AUTO, PS_ATTENTION_GEMM, PS_ATTENTION_TILED };
enum ps_missing { PS_MISSING_REFUSE, PS_MISSING_MASK };
enum ps_on_nonfinite { PS_NONFINITE_STOP, PS_NONFINITE_SKIP };
/* What validation compares, for the best weights and for patience: the loss that is trained, or one of the errors. */
enum ps_monitor { PS_MONITOR_LOSS, PS_MONITOR_MSE, PS_MONITOR_MAE };
/* Whose rows the statistics of norm batch are of, where ranks share a batch: all of them, or each rank's own. */
enum ps_batchnorm_rows { PS_BATCHNORM_SYNC, PS_BATCHNORM_LOCAL };
enum ps_fusion { PS_FUSION_AUTO, PS_FUSION_NONE, PS_FUSION_GEMM, PS_FUSION_LAYER };

/* A list of numbers. */
struct ps_reals {
    int64_t n;
    double value[PS_MOST_QUANTILES];
};

struct ps_config {
    struct {
        char *path;                  /* HDF5 file; relative to the config file's folder when not absolute */
        double split[3];             /* train, validation, test: row counts, or fractions when all <= 1; default 0.7, 0.1, 0.2 */
        int split_dated;             /* the parts are given by times in place of these: */
        int64_t split_from[2];       /* validation and test begin with the first rows from these on, Unix seconds */
        char *channels;              /* names, each with a zero byte behind it, and an empty one at the end: the channels of the
                                      * file that are taken, in this order; none: all of them */
        enum ps_missing missing;     /* NaN in the data: refused, or unobserved; default refuse */
        int standardize;             /* default true */
        int drop_last;               /* training only; default true */
        enum ps_placement placement; /* auto: on the device when it fits */
        int64_t memory_limit;        /* bytes of host memory for the data; 0: any */
        int64_t season;              /* rows; of the seasonal-naive baseline; default 24 */
    } data;
    struct {
        int64_t seq_len, pred_len;                /* 336, 96 */
        int64_t patch_len, stride;                /* 16, 8 */
        enum ps_padding padding;                  /* end */
        int64_t d_model, n_heads, d_ff, n_layers; /* 128, 16, 256, 3 */
        double dropout;                           /* [0, 1); 0.2 */
        double dropout_at[PS_DROP_PLACES]; /* negative: auto, which is dropout; presets auto, but 0 of softmax's weights and head */
        int revin;                         /* true */
        int revin_affine, revin_subtract_last; /* false */
        enum ps_norm norm;                     /* layer */
        enum ps_norm_place norm_place;         /* pre */
        int residual_attention;                /* false */
        enum ps_activation activation;         /* gelu_tanh */
        enum ps_positions positions;           /* learned */
        enum ps_head head;                     /* shared */
        enum ps_patches_from patches_from;     /* start */
        double mask_ratio;                     /* (0, 1), of train.objective masked; 0.4 */
        enum ps_batchnorm_rows batchnorm;      /* of norm batch over several ranks: whose rows; sync */
    } model;
    struct {
        double lr;                      /* 1e-4 */
        double weight_decay;            /* 1e-2 */
        double beta1, beta2, eps;       /* 0.9, 0.999, 1e-8 */
        double clip_norm;               /* 0: off */
        enum ps_schedule_kind schedule; /* cosine */
        int64_t warmup_steps;           /* cosine; 0 */
        double min_lr;                  /* cosine's end; 0 */
        double pct_start;               /* onecycle: the share of steps that rises; 0.3 */
    } optim;
    struct {
        int64_t epochs;                    /* 100 */
        int64_t batch_size;                /* 128 */
        uint64_t seed;                     /* 1 */
        int64_t patience;                  /* epochs in which what is monitored got no better; 0: never stop early */
        int64_t checkpoint_every;          /* steps; 0: at the end of each epoch */
        int64_t keep_last;                 /* states kept, last.h5 included; 2 */
        int64_t keep_best;                 /* best weights kept, best.h5 included; 1 */
        enum ps_on_nonfinite on_nonfinite; /* stop */
        enum ps_objective objective;       /* forecast */
        enum ps_freeze freeze;             /* none */
        int64_t freeze_epochs;             /* how many it lasts; 0: all */
        enum ps_loss_kind loss;            /* mse */
        double huber_delta;                /* 1, in standardised units */
        struct ps_reals quantiles;         /* rising; of loss quantile, where none are given, 0.1, 0.5 and 0.9 */
        enum ps_monitor monitor;           /* loss */
        int64_t accumulate;                /* batches of batch_size that make a step; 1 */
    } train;
    struct {
        char *device;                     /* auto, cpu, cuda, cuda:N */
        enum ps_precision precision;      /* fp32, tf32, bf16, fp16 (fp64: backend reference only) */
        char *backend;                    /* auto, reference, cpu, cuda */
        enum ps_fusion fusion;            /* auto */
        enum ps_attention_kind attention; /* level gemm: products of stored scores, or tiles of them; default auto */
        int epilogue;                     /* level gemm: products add biases and residuals; default true */
        int merge_qkv;                    /* one product for q, k, v; default true */
        int tiny_gemm;                    /* own kernels for attention's products on CUDA; default true */
        char *tuning;                     /* a table of bench --tune for CUDA's products, as data.path; "": none */
        int64_t threads;                  /* CPU; 0: all processors */
        enum ps_exchange_kind exchange;   /* several ranks: auto, which is NCCL on GPUs and MPI on the CPU; nccl; mpi */
    } runtime;
};

/* Reads the file, applies overrides "section.key=value" in order, fills defaults, and checks what can be checked without data.
 * PS_USAGE, one line: file:line, key, value, what would do. overrides' origin is named "--set". */
enum ps_status ps_config_load(const char *path, char *const *overrides, int n_overrides, struct ps_config *config);
/* The same from text; origin names it in messages. Relative data.path and runtime.tuning stay as they are. */
enum ps_status ps_config_parse(const char *text, const char *origin, char *const *overrides, int n_overrides,
                               struct ps_config *config);
/* The same of a text that ps_config_text made and a file kept: data.path may be missing, where there were no data. */
enum ps_status ps_config_parse_saved(const char *text, const char *origin, struct ps_config *config);
/* Resolved YAML, every key; *text is malloc'ed. Parsing it gives the same config, bit for bit. */
enum ps_status ps_config_text(const struct ps_config *config, char **text);
void ps_config_free(struct ps_config *config);

/* What a file of weights tells of the model: values that stand in the presets' place. */
enum { PS_KNOWN = 48 };
#define PS_KNOWN_NOTHING ""
struct ps_known {
    const char *origin; /* the file, in messages */
    int n;
    struct {
        const char *name; /* of section model */
        char text[32];    /* PS_KNOWN_NOTHING: must be said by the file or an override */
        int fixed;        /* another value contradicts the weights */
    } value[PS_KNOWN];
};
void ps_known_add(struct ps_known *known, const char *name, int fixed, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* As ps_config_load, with those values before the file's; path NULL: no file. data.path may be missing. Also PS_USAGE: a key that
 * the file or an override gives another value than the fixed one, naming both. */
enum ps_status ps_config_load_known(const struct ps_known *known, const char *path, char *const *overrides, int n_overrides,
                                    struct ps_config *config);

/* The model's shape for data of so many channels. */
struct ps_model_shape ps_config_shape(const struct ps_config *config, int64_t channels);
/* What is minimised, of targets that are all there. */
struct ps_loss ps_config_loss(const struct ps_config *config);

/* How the config has its data read, for windows of `batch`. */
struct ps_reading ps_config_reading(const struct ps_config *config, int64_t batch);

/* Whether runtime.device may be this: auto, cpu, cuda or cuda:N, N of at most 4 digits. */
int ps_config_is_device(const char *device);

/* The keys of section model that say what weights compute and that no shape shows, where they differ: "n_heads 4 and 8, ..."; ""
 * where none does. */
void ps_config_differences(const struct ps_config *then, const struct ps_config *now, char *text, size_t room);

/* PS_OK when a run of `saved` may be resumed with `now`: every key equal, but for those that cannot change the result
 * (runtime.device's index, data.path, data.placement, data.season, train.patience, train.checkpoint_every, train.keep_last,
 * train.keep_best, train.on_nonfinite) and train.epochs, which may grow. Otherwise PS_CHECKPOINT naming key, both values. (A
 * schedule that spans the run, cosine or onecycle, fixes train.epochs too.) */
enum ps_status ps_config_compatible(const struct ps_config *saved, const struct ps_config *now);

#endif
