#include "src/progress.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static const double redraw = 0.1, line_every = 30; /* seconds */

struct ps_progress {
    int64_t epochs, steps_per_epoch;
    int terminal;
    int drawn;          /* something stands on the terminal's line */
    double epoch_begin; /* when the epoch under way was first seen, and at which step */
    int64_t epoch, epoch_first_step;
    double epoch_seconds; /* of the last whole epoch; 0: none yet */
    double next;          /* when to draw, or to print, again */
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

struct ps_progress *ps_progress_open(int64_t epochs, int64_t steps_per_epoch)
{
    struct ps_progress *p = calloc(1, sizeof *p);
    if (p) {
        p->epochs = epochs;
        p->steps_per_epoch = steps_per_epoch;
        p->terminal = isatty(STDERR_FILENO);
        p->next = now() + (p->terminal ? 0 : line_every);
    }
    return p;
}

/* "1:02:03", "2:03" or "4.5 s". */
static const char *duration(double seconds, char text[32])
{
    int64_t s = (int64_t)(seconds + 0.5);
    if (seconds < 60) {
        snprintf(text, 32, "%.1f s", seconds);
    } else if (s < 3600) {
        snprintf(text, 32, "%d:%02d", (int)(s / 60), (int)(s % 60));
    } else {
        snprintf(text, 32, "%" PRId64 ":%02d:%02d", s / 3600, (int)(s / 60 % 60), (int)(s % 60));
    }
    return text;
}

static void clear(struct ps_progress *p)
{
    if (p->drawn) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
        p->drawn = 0;
    }
}

/* Cut to the terminal's width: a line that wraps cannot be drawn again in place. */
static void draw(struct ps_progress *p, const char *status, double share)
{
    struct winsize window = {0};
    int width = ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0 ? window.ws_col : 80;
    char bar[21];
    for (int i = 0; i < 20; i++) {
        bar[i] = i < (int)(20 * share) ? '#' : '.';
    }
    bar[20] = 0;
    char line[256];
    snprintf(line, sizeof line, "[%s] %s", bar, status);
    fprintf(stderr, "\r%.*s\033[K", width - 1, line);
    fflush(stderr);
    p->drawn = 1;
}

void ps_progress_step(struct ps_progress *p, int64_t epoch, int64_t step, double loss)
{
    if (!p) {
        return;
    }
    double time = now();
    if (epoch != p->epoch) {
        p->epoch = epoch;
        p->epoch_begin = time;
        p->epoch_first_step = step;
    }
    if (time < p->next) {
        return;
    }
    p->next = time + (p->terminal ? redraw : line_every);
    char seconds[32], left[32], loss_text[40] = "", time_text[96] = "";
    if (isfinite(loss)) {
        snprintf(loss_text, sizeof loss_text, ", loss %.4f", loss);
    }
    int64_t done = step - p->epoch_first_step;
    double epoch_seconds = p->epoch_seconds;
    if (epoch_seconds == 0 && done > 0) {
        epoch_seconds = (time - p->epoch_begin) / (double)done * (double)p->steps_per_epoch;
    }
    if (epoch_seconds > 0) {
        double epochs_left = (double)(p->epochs - epoch) + 1 - (double)step / (double)p->steps_per_epoch;
        snprintf(time_text, sizeof time_text, ", %s an epoch, %s left", duration(epoch_seconds, seconds),
                 duration(epoch_seconds * (epochs_left > 0 ? epochs_left : 0), left));
    }
    char status[224];
    snprintf(status, sizeof status, "epoch %" PRId64 "/%" PRId64 ", step %" PRId64 "/%" PRId64 "%s%s", epoch, p->epochs, step,
             p->steps_per_epoch, loss_text, time_text);
    if (p->terminal) {
        double share = ((double)(epoch - 1) + (double)step / (double)p->steps_per_epoch) / (double)p->epochs;
        draw(p, status, share);
    } else {
        printf("%s\n", status);
        fflush(stdout);
    }
}

void ps_progress_epoch(struct ps_progress *p, const struct ps_epoch_record *record)
{
    if (!p) {
        return;
    }
    clear(p);
    char seconds[32], left[32];
    double whole = record->seconds;
    /* A resumed epoch was not seen from its first step. */
    if (p->epoch == (int64_t)record->epoch && p->epoch_first_step <= 1) {
        p->epoch_seconds = whole;
    }
    double epochs_left = (double)p->epochs - (double)record->epoch;
    double each = p->epoch_seconds > 0 ? p->epoch_seconds : whole;
    char skipped[64] = "", speed[48] = "", own[40] = "";
    if (record->loss != PS_LOSS_MSE && record->loss != PS_LOSS_MAE) {
        snprintf(own, sizeof own, "loss %.5f ", record->val_loss);
    }
    if (isfinite(record->windows_per_second)) {
        snprintf(speed, sizeof speed, ", %.0f windows/s", record->windows_per_second);
    }
    if (record->skipped) {
        snprintf(skipped, sizeof skipped, ", %" PRIu64 " steps skipped (not finite)", record->skipped);
    }
    printf("epoch %" PRIu64 "/%" PRId64 ": train loss %.5f, validation %sMSE %.5f MAE %.5f, lr %.3g, %s%s, %s left%s\n",
           record->epoch, p->epochs, record->train_loss, own, record->val_mse, record->val_mae, record->lr,
           duration(whole, seconds), speed, duration(each * (epochs_left > 0 ? epochs_left : 0), left), skipped);
    fflush(stdout);
    p->next = now() + (p->terminal ? 0 : line_every);
}

void ps_progress_close(struct ps_progress *p)
{
    if (p) {
        clear(p);
        free(p);
    }
}
