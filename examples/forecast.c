/* Forecasts what comes after a CSV's last line, by a trained model, with nothing but the installed library:
 *
 *     cc forecast.c $(pkg-config --cflags --libs patchstep) -o forecast
 *     ./forecast best.h5 series.csv
 *
 * The CSV has a header line and numbers alone, its columns in the model's order. With a third argument N the forecast is made N
 * times, and stderr says how long one takes. */
#include <inttypes.h>
#include <patchstep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The last seq_len lines as window [channels, seq_len]. 0: the file cannot be read, or is shorter, or has other columns. */
static int read_window(const char *path, int64_t channels, int64_t seq_len, float *window)
{
    char *line = NULL;
    size_t room = 0;
    int64_t rows = 0;
    FILE *file = fopen(path, "r");
    int good = file && getline(&line, &room, file) > 0;
    while (good && getline(&line, &room, file) > 0) {
        char *at = line;
        for (int64_t c = 0; c < channels && good; c++) {
            char *end;
            float *values = window + c * seq_len;
            memmove(values, values + 1, (size_t)(seq_len - 1) * sizeof *values);
            values[seq_len - 1] = strtof(at, &end);
            good = end > at && *end == (c < channels - 1 ? ',' : '\n');
            at = end + 1;
        }
        rows++;
    }
    free(line);
    if (file) {
        fclose(file);
    }
    return good && rows >= seq_len;
}

static double milliseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Makes the forecast n times and says on stderr how long the fastest, the middle one and nine tenths took. */
static enum patchstep_status time_forecasts(struct patchstep_model *model, const float *window, int n, float *forecast)
{
    double *times = malloc((size_t)n * sizeof *times);
    enum patchstep_status status = PATCHSTEP_OK;
    for (int i = 0; times && i < n && status == PATCHSTEP_OK; i++) {
        const double begin = milliseconds();
        status = patchstep_forecast(model, window, 1, forecast);
        times[i] = milliseconds() - begin;
    }
    if (times && status == PATCHSTEP_OK) {
        qsort(times, (size_t)n, sizeof *times, ascending);
        fprintf(stderr, "a forecast: %.3f ms at best, median %.3f ms, 90 %% within %.3f ms\n", times[0], times[n / 2],
                times[n * 9 / 10]);
    }
    free(times);
    return status;
}

static void print_forecast(const struct patchstep_model *model, const float *forecast)
{
    const int64_t channels = patchstep_channels(model), pred_len = patchstep_pred_len(model);
    for (int64_t c = 0; c < channels; c++) {
        const char *name = patchstep_channel_name(model, c);
        printf("%s%s", c > 0 ? "," : "", name ? name : "?");
    }
    printf("\n");
    for (int64_t h = 0; h < pred_len; h++) {
        for (int64_t c = 0; c < channels; c++) {
            printf("%s%.9g", c > 0 ? "," : "", (double)forecast[c * pred_len + h]);
        }
        printf("\n");
    }
}

int main(int argc, char **argv)
{
    struct patchstep_model *model;
    const int times = argc > 3 ? atoi(argv[3]) : 0;
    if (argc < 3) {
        fprintf(stderr, "usage: %s CHECKPOINT SERIES.csv [N]\n", argv[0]);
        return 2;
    }
    if (patchstep_open(argv[1], "auto", NULL, &model) != PATCHSTEP_OK) {
        fprintf(stderr, "%s\n", patchstep_error());
        return 1;
    }
    const int64_t channels = patchstep_channels(model), seq_len = patchstep_seq_len(model), pred_len = patchstep_pred_len(model);
    float *window = calloc((size_t)(channels * seq_len), sizeof *window);
    float *forecast = malloc((size_t)(channels * pred_len) * sizeof *forecast);
    int failed = 1;
    if (!window || !forecast) {
        fprintf(stderr, "no memory\n");
    } else if (!read_window(argv[2], channels, seq_len, window)) {
        fprintf(stderr, "%s: needs a header and %" PRId64 " lines of %" PRId64 " numbers\n", argv[2], seq_len, channels);
    } else if ((times > 0 ? time_forecasts(model, window, times, forecast) : patchstep_forecast(model, window, 1, forecast)) !=
               PATCHSTEP_OK) {
        fprintf(stderr, "%s\n", patchstep_error());
    } else {
        print_forecast(model, forecast);
        failed = 0;
    }
    free(window);
    free(forecast);
    patchstep_close(model);
    return failed;
}
