/* Learning rates, all computed before the run: the device reads them from a table by step. */
#ifndef PS_OPTIM_SCHEDULE_H
#define PS_OPTIM_SCHEDULE_H

#include <stdint.h>

enum ps_schedule_kind { PS_SCHEDULE_CONSTANT, PS_SCHEDULE_COSINE, PS_SCHEDULE_ONECYCLE, PS_SCHEDULE_TYPE3 };

struct ps_schedule {
    enum ps_schedule_kind kind;
    double lr;            /* the largest */
    int64_t warmup_steps; /* cosine: linear from lr/warmup_steps */
    double min_lr;        /* cosine: the last step's */
    double pct_start;     /* onecycle: the share of steps that rises */
    int64_t steps_per_epoch, epochs;
};

/* rates [steps_per_epoch * epochs].
 * constant: lr. cosine: warm-up, then half a cosine to min_lr (Loshchilov and Hutter 2017). onecycle: torch's OneCycleLR, cosine
 * annealing, from lr/25 to lr to lr/250000 (Smith and Topin 2018). type3: the PatchTST authors': epochs 0 to 3 have lr, epoch
 * i > 3 has lr 0.9^(i - 3). */
void ps_schedule_fill(const struct ps_schedule *schedule, double *rates);

#endif
