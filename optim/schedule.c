#include "optim/schedule.h"

#include <math.h>

#define PI 3.14159265358979323846

/* Half a cosine from `from` (share 0) to `to` (share 1). */
static double anneal(double from, double to, double share)
{
    return to + (from - to) * (1 + cos(PI * share)) / 2;
}

static double cosine(const struct ps_schedule *s, int64_t step, int64_t steps)
{
    if (step < s->warmup_steps) {
        return s->lr * (double)(step + 1) / (double)s->warmup_steps;
    }
    int64_t last = steps - 1 - s->warmup_steps;
    return last <= 0 ? s->lr : anneal(s->lr, s->min_lr, (double)(step - s->warmup_steps) / (double)last);
}

static double onecycle(const struct ps_schedule *s, int64_t step, int64_t steps)
{
    double start = s->lr / 25, end = start / 1e4, peak = s->pct_start * (double)steps - 1, last = (double)(steps - 1);
    if ((double)step <= peak) {
        return peak <= 0 ? s->lr : anneal(start, s->lr, (double)step / peak);
    }
    return last <= peak ? s->lr : anneal(s->lr, end, ((double)step - peak) / (last - peak));
}

void ps_schedule_fill(const struct ps_schedule *s, double *rates)
{
    int64_t steps = s->steps_per_epoch * s->epochs;
    for (int64_t i = 0; i < steps; i++) {
        int64_t epoch = i / s->steps_per_epoch;
        switch (s->kind) {
        case PS_SCHEDULE_CONSTANT:
            rates[i] = s->lr;
            break;
        case PS_SCHEDULE_COSINE:
            rates[i] = cosine(s, i, steps);
            break;
        case PS_SCHEDULE_ONECYCLE:
            rates[i] = onecycle(s, i, steps);
            break;
        case PS_SCHEDULE_TYPE3:
            rates[i] = epoch < 3 ? s->lr : s->lr * pow(0.9, (double)(epoch - 3));
            break;
        }
    }
}
