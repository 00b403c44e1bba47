#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "data/hdf5_util.h"
#include "data/import.h"
#include "data/series.h"
#include "kernels/philox.h"

/* What one channel is made of, in the units of a made-up meter. */
struct channel {
    double level, slope;                   /* slope: a year (8760 h) */
    double daily, half, weekly;            /* amplitudes: once a day, twice a day, once a week */
    int day_phase, half_phase, week_phase; /* hours */
    double persistence, noise;             /* AR(1): e_t = persistence e_(t-1) + noise g_t */
    double scale;
};

enum { WEEK = 168 };

/* The same bits everywhere: no libm, and every product passes through here so that no compiler fuses it with a sum. */
__attribute__((noinline)) static double times(double a, double b)
{
    return a * b;
}

/* sin(2 pi k / 168), by turning a unit vector step by step. */
static void fill_sine(double sine[WEEK])
{
    const double turn_cos = 0x1.ffa4578bdf313p-1, turn_sin = 0x1.324f0492680bdp-5; /* of 2 pi / 168 */
    double x = 1, y = 0;
    for (int k = 0; k < WEEK; k++) {
        sine[k] = y;
        double turned = times(x, turn_cos) - times(y, turn_sin);
        y = times(y, turn_cos) + times(x, turn_sin);
        x = turned;
    }
}

/* Number k of the channel's parameters, uniform in [low, high). Hours draw blocks below 2^31, parameters those above. */
static double parameter(uint64_t seed, int64_t c, int k, double low, double high)
{
    return low + times(high - low, ps_uniform(seed, ((uint64_t)1 << 32) + (uint64_t)k, PS_SITE_SAMPLE, (uint64_t)c));
}

/* The seasons carry most of the variance: repeat-last scores about twice the seasons' variance, a forecast that knows them about
 * the noise's. */
static struct channel draw_channel(uint64_t seed, int64_t c)
{
    struct channel ch = {
        .level = parameter(seed, c, 0, 4, 12),
        .slope = parameter(seed, c, 1, -1, 1),
        .daily = parameter(seed, c, 2, 1, 2),
        .half = parameter(seed, c, 3, 0.2, 0.6),
        .weekly = parameter(seed, c, 4, 0.4, 0.9),
        .day_phase = (int)parameter(seed, c, 5, 0, 24),
        .half_phase = (int)parameter(seed, c, 6, 0, 12),
        .week_phase = (int)parameter(seed, c, 7, 0, WEEK),
        .persistence = parameter(seed, c, 8, 0.5, 0.8),
        .noise = parameter(seed, c, 9, 0.2, 0.35),
        .scale = parameter(seed, c, 10, 0.5, 4),
    };
    return ch;
}

/* Nearly normal, of mean 0 and variance 1: the sum of the 8 sixteen-bit draws of one block (Irwin-Hall), exact before it is scaled.
 */
static double draw_normal(uint64_t seed, int64_t c, int64_t t)
{
    struct ps_block block = ps_philox(seed, (uint32_t)t, PS_SITE_SAMPLE, (uint64_t)c);
    int32_t sum = 0;
    for (int i = 0; i < 8; i++) {
        sum += (int32_t)ps_draw16(&block, i);
    }
    return (sum - 262140) / 53509.92; /* mean 8 * 65535/2, standard deviation sqrt(8 (2^32 - 1)/12) */
}

/* values [hours, channels] = level + trend + seasons + noise of each channel. */
static void generate(float *values, int64_t hours, int64_t channels, uint64_t seed)
{
    double sine[WEEK];
    fill_sine(sine);
    for (int64_t c = 0; c < channels; c++) {
        struct channel ch = draw_channel(seed, c);
        double e = 0;
        for (int64_t t = 0; t < hours; t++) {
            e = times(ch.persistence, e) + times(ch.noise, draw_normal(seed, c, t));
            double season = times(ch.daily, sine[(t + ch.day_phase) * 7 % WEEK]) +
                            times(ch.half, sine[(t + ch.half_phase) * 14 % WEEK]) +
                            times(ch.weekly, sine[(t + ch.week_phase) % WEEK]);
            double value = ch.level + times(ch.slope, (double)t / 8760) + season + e;
            values[t * channels + c] = (float)times(ch.scale, value);
        }
    }
}

static enum ps_status check_size(const char *what, int64_t value)
{
    if (value < 1 || value > INT32_MAX) {
        return ps_fail(PS_USAGE, "%s is %" PRId64 ": expected 1 to %d", what, value, INT32_MAX);
    }
    return PS_OK;
}

static void free_names(char **names, int64_t channels)
{
    for (int64_t c = 0; names != NULL && c < channels; c++) {
        free(names[c]);
    }
    free(names);
}

/* "channel_1", ... */
static char **make_names(int64_t channels)
{
    char **names = calloc((size_t)channels, sizeof *names);
    for (int64_t c = 0; names != NULL && c < channels; c++) {
        if (asprintf(&names[c], "channel_%" PRId64, c + 1) < 0) {
            names[c] = NULL;
            free_names(names, channels);
            return NULL;
        }
    }
    return names;
}

/* A series in memory, with names; freed by free_sample. */
struct sample {
    float *values;
    char **names;
    int64_t channels;
};

static void free_sample(struct sample *s)
{
    free(s->values);
    free_names(s->names, s->channels);
}

static enum ps_status make_sample(int64_t hours, int64_t channels, uint64_t seed, struct sample *s)
{
    *s = (struct sample){.channels = channels};
    int64_t count;
    if (__builtin_mul_overflow(hours, channels, &count) || count > INT64_MAX / (int64_t)sizeof(float)) {
        return ps_fail(PS_USAGE, "%" PRId64 " hours of %" PRId64 " channels do not fit memory", hours, channels);
    }
    s->values = malloc((size_t)count * sizeof(float));
    s->names = s->values != NULL ? make_names(channels) : NULL;
    if (s->names == NULL) {
        free_sample(s);
        return ps_fail(PS_DATA, "out of host memory for %" PRId64 " hours of %" PRId64 " channels (%.1f GiB)", hours, channels,
                       (double)count * 0x1p-28);
    }
    generate(s->values, hours, channels, seed);
    return PS_OK;
}

enum ps_status ps_sample_series(const char *path, int64_t hours, int64_t channels, uint64_t seed)
{
    PS_TRY(check_size("hours", hours));
    PS_TRY(check_size("channels", channels));
    struct sample s;
    PS_TRY(make_sample(hours, channels, seed, &s));
    int64_t *time = malloc((size_t)hours * sizeof *time);
    enum ps_status status = PS_OK;
    if (time == NULL) {
        status = ps_fail(PS_DATA, "out of host memory for %" PRId64 " hours", hours);
    } else {
        for (int64_t t = 0; t < hours; t++) {
            time[t] = 1577836800 + 3600 * t; /* from 2020-01-01 00:00 UTC */
        }
        char source[64];
        snprintf(source, sizeof source, "sample_series, seed %" PRIu64, seed);
        status = ps_series_write(path, s.values, hours, channels, s.names, time, "1h", source);
    }
    free(time);
    free_sample(&s);
    return status;
}

/* Windows start an hour after each other; written some at a time. */
static enum ps_status write_windows(struct ps_hdf5_output *out, const struct sample *s, int64_t windows, int64_t seq_len,
                                    int64_t pred_len)
{
    enum { SLAB = 256 };
    struct ps_series series = {
        .layout = PS_LAYOUT_SERIES, .rows = windows + seq_len + pred_len - 1, .channels = s->channels, .values = s->values};
    struct ps_window_view view = ps_window_view_make(&series, seq_len, pred_len);
    hid_t inputs PS_HDF5_SCOPED = H5I_INVALID_HID, targets PS_HDF5_SCOPED = H5I_INVALID_HID;
    hsize_t size[3] = {(hsize_t)windows, (hsize_t)s->channels, (hsize_t)seq_len};
    PS_TRY(ps_hdf5_create_rows(out, "/inputs", H5T_NATIVE_FLOAT, 3, size, &inputs));
    size[2] = (hsize_t)pred_len;
    PS_TRY(ps_hdf5_create_rows(out, "/targets", H5T_NATIVE_FLOAT, 3, size, &targets));
    PS_TRY(ps_hdf5_write_texts(out, inputs, "channels", s->names, size[1]));
    size_t window = (size_t)(s->channels * sizeof(float));
    float *x = malloc(SLAB * window * (size_t)seq_len), *y = malloc(SLAB * window * (size_t)pred_len);
    enum ps_status status = x != NULL && y != NULL ? PS_OK : ps_fail(PS_DATA, "out of host memory for %d windows", SLAB);
    int32_t index[SLAB];
    for (int64_t w = 0; w < windows && status == PS_OK; w += SLAB) {
        int64_t n = windows - w < SLAB ? windows - w : SLAB;
        ps_sequence(w, n, index);
        ps_windows_gather(&view, index, n, x, y);
        status = ps_hdf5_write_rows(out, "/inputs", inputs, (hsize_t)w, (hsize_t)n, x);
        if (status == PS_OK) {
            status = ps_hdf5_write_rows(out, "/targets", targets, (hsize_t)w, (hsize_t)n, y);
        }
    }
    free(x);
    free(y);
    return status;
}

enum ps_status ps_sample_windows(const char *path, int64_t windows, int64_t channels, int64_t seq_len, int64_t pred_len,
                                 uint64_t seed)
{
    PS_TRY(check_size("windows", windows));
    PS_TRY(check_size("channels", channels));
    PS_TRY(check_size("seq_len", seq_len));
    PS_TRY(check_size("pred_len", pred_len));
    int64_t hours = windows + seq_len + pred_len - 1;
    PS_TRY(check_size("windows + seq_len + pred_len - 1", hours));
    struct sample s;
    PS_TRY(make_sample(hours, channels, seed, &s));
    struct ps_hdf5_output out;
    enum ps_status status = ps_hdf5_create(path, &out);
    if (status == PS_OK) {
        status = ps_hdf5_finish(&out, write_windows(&out, &s, windows, seq_len, pred_len));
    }
    free_sample(&s);
    return status;
}
