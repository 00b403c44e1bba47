/* Data that stay in their file: what is read, in which order, in how much memory, and what happens when the file changes.
 *
 * PS_TEST_FULL=1: files of 4 GiB under 1 GiB of address space; else of 64 MiB. */
#include "tests/programs.h"
#include "tests/suite.h"

#include <math.h>
#include <sys/resource.h>

#include "data/batches.h"
#include "data/import.h"
#include "data/series_file.h"

enum { L = 20, H = 4, BATCH = 16 };

static struct path data;

/* ---- files, and the same read whole and streamed ---- */

/* How a file stores what it holds. */
struct storage {
    int windows; /* ready-made ones */
    int wide;    /* float64 */
    hsize_t chunk[2];
    int compressed;
};

static const struct storage storages[] = {
    {0, 0, {0}, 0}, {0, 0, {999, 7}, 0}, {0, 0, {512, 32}, 1}, {0, 1, {100, 5}, 1},
    {1, 0, {0}, 0}, {1, 0, {30, 3}, 1},  {1, 1, {7, 8}, 0},
};
enum { STORAGES = sizeof storages / sizeof *storages };

static void put(hid_t file, const char *name, const struct storage *how, int rank, const hsize_t *size, const float *values)
{
    hid_t space = H5Screate_simple(rank, size, NULL), creation = H5Pcreate(H5P_DATASET_CREATE);
    if (how->chunk[0]) {
        hsize_t chunk[3] = {how->chunk[0], how->chunk[1], rank == 3 ? size[2] : 0};
        H5Pset_chunk(creation, rank, chunk);
    }
    if (how->compressed) {
        H5Pset_shuffle(creation);
        H5Pset_deflate(creation, 1);
    }
    hid_t set = H5Dcreate2(file, name, how->wide ? H5T_IEEE_F64LE : H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    ck_assert_int_ge(set, 0);
    ck_assert_int_ge(H5Dwrite(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), 0);
    H5Dclose(set);
    H5Pclose(creation);
    H5Sclose(space);
}

enum { ROWS = 20011, CHANNELS = 33, WINDOWS = 3001, FEW = 9 }; /* a series; ready-made windows of fewer channels */

/* No two values of a channel are equal. */
static float value_at(int64_t row, int64_t channel)
{
    return (float)row + 10 * sinf((float)(row * 7 + channel));
}

static void write_data(const struct storage *how)
{
    hid_t file = H5Fcreate(data.text, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    ck_assert_int_ge(file, 0);
    static float values[WINDOWS * FEW * (L + 8) > ROWS * CHANNELS ? WINDOWS * FEW * (L + 8) : ROWS * CHANNELS];
    if (!how->windows) {
        for (int64_t i = 0; i < ROWS * CHANNELS; i++) {
            values[i] = value_at(i / CHANNELS, i % CHANNELS);
        }
        put(file, "series", how, 2, (hsize_t[]){ROWS, CHANNELS}, values);
    } else {
        for (int part = 0; part < 2; part++) {
            int64_t length = part == 0 ? L : H;
            for (int64_t i = 0; i < WINDOWS * FEW * length; i++) {
                values[i] = value_at(i / (FEW * length) * 32 + part * L + i % length, i / length % FEW);
            }
            put(file, part == 0 ? "inputs" : "targets", how, 3, (hsize_t[]){WINDOWS, FEW, (hsize_t)length}, values);
        }
    }
    H5Fclose(file);
}

/* One file, opened twice. */
struct pair {
    struct ps_series *whole, *file;
    struct ps_splits splits;
    struct ps_scaler scaler[2];
    struct ps_window_view view; /* of whole, standardised */
    struct ps_groups *groups;
    struct ps_batches *batches;
    float *inputs[2], *targets[2];
};

static int64_t limit_of(const struct storage *how)
{
    return how->windows ? 1300000 + (how->compressed ? 4 * 30 * 3 * L * 4 : 0) : 1500000 + 4 * (how->compressed ? 65536 : 0);
}

static struct ps_memory memory_of(int64_t limit)
{
    return (struct ps_memory){.limit = limit, .seq_len = L, .pred_len = H, .batch = BATCH};
}

static void pair_open(struct pair *p, int64_t limit)
{
    const struct ps_memory memory = memory_of(limit);
    const double split[3] = {0.7, 0.1, 0.2};
    OK(ps_series_open(data.text, &p->whole));
    OK(ps_series_open_within(data.text, &memory, &p->file));
    ck_assert_ptr_nonnull(p->file->file);
    ck_assert(p->file->values == NULL && p->file->inputs == NULL && p->file->targets == NULL);
    OK(ps_splits_make(p->file, split, L, H, &p->splits));
    OK(ps_scaler_fit(p->whole, &p->splits, &p->scaler[0]));
    OK(ps_scaler_fit(p->file, &p->splits, &p->scaler[1]));
    OK(ps_scaler_apply(&p->scaler[0], p->whole));
    p->view = ps_window_view_make(p->whole, L, H);
    OK(ps_groups_open(p->file, &p->scaler[1], L, H, &p->groups));
    for (int i = 0; i < 2; i++) {
        p->inputs[i] = malloc((size_t)(BATCH * p->file->channels * L) * sizeof(float));
        p->targets[i] = malloc((size_t)(BATCH * p->file->channels * H) * sizeof(float));
    }
    const struct ps_window_view sizes = ps_window_view_make(p->file, L, H);
    ck_assert(sizes.inputs == NULL && sizes.targets == NULL && sizes.windows == p->view.windows);
    OK(ps_batches_open(&sizes, p->groups, BATCH, p->inputs, p->targets, &p->batches));
}

static void pair_close(struct pair *p)
{
    ps_batches_close(p->batches);
    ps_groups_close(p->groups);
    for (int i = 0; i < 2; i++) {
        free(p->inputs[i]);
        free(p->targets[i]);
        ps_scaler_free(&p->scaler[i]);
    }
    ps_series_close(p->file);
    ps_series_close(p->whole);
}

static struct ps_order order_of(const struct pair *p, enum ps_split split, int shuffled, uint64_t epoch)
{
    return (struct ps_order){p->splits.first[split], p->splits.count[split], shuffled, 11, epoch, NULL};
}

/* The order as docs/design.md states it. */
static int32_t *expected_order(const struct pair *p, const struct ps_order *order)
{
    int64_t W = p->file->file->plan.windows, G = p->file->file->plan.blocks, done = 0;
    int32_t *index = malloc((size_t)order->count * sizeof *index);
    if (!order->shuffled) {
        ps_sequence(order->first, order->count, index);
        return index;
    }
    int64_t begin = order->first / W, blocks = (order->first + order->count - 1) / W - begin + 1;
    int32_t *of = malloc((size_t)blocks * sizeof *of);
    ps_shuffle(order->seed, order->epoch, begin, blocks, of);
    for (int64_t group = 0; group * G < blocks; group++) {
        int64_t first = done;
        for (int64_t b = group * G; b < (group + 1) * G && b < blocks; b++) {
            for (int64_t w = of[b] * W; w < (of[b] + 1) * W; w++) {
                if (w >= order->first && w < order->first + order->count) {
                    index[done++] = (int32_t)w;
                }
            }
        }
        ps_shuffle_group(order->seed, order->epoch, group, done - first, index + first);
    }
    ck_assert_int_eq(done, order->count);
    free(of);
    return index;
}

/* Takes at most `batches` batches of windows [begin, end) of the order; each has the bits of the windows in memory. */
static void expect_pass(struct pair *p, const struct ps_order *order, int64_t begin, int64_t end, int64_t batches)
{
    static float inputs[BATCH * CHANNELS * L], targets[BATCH * CHANNELS * H];
    int32_t *index = expected_order(p, order);
    int64_t n, C = p->view.channels, at = begin;
    double waited = 0;
    int slot;
    ps_batches_start(p->batches, order, NULL, begin, end);
    for (int64_t b = 0; b < batches; b++) {
        OK(ps_batches_next(p->batches, &slot, &n, &waited));
        ck_assert_int_eq(n, end - at < BATCH ? end - at : BATCH);
        if (n == 0) {
            break;
        }
        ck_assert_int_eq(slot, at / BATCH % 2);
        ps_windows_gather(&p->view, index + at, n, inputs, targets);
        ck_assert_msg(memcmp(p->inputs[slot], inputs, (size_t)(n * C * L) * sizeof(float)) == 0, "inputs of %lld..%lld",
                      (long long)at, (long long)(at + n));
        ck_assert_mem_eq(p->targets[slot], targets, (size_t)(n * C * H) * sizeof(float));
        ps_batches_release(p->batches, slot);
        at += n;
    }
    ck_assert(batches < INT64_MAX || at == end);
    free(index);
}

/* ---- the same data ---- */

/* However it is stored: fingerprint, scaler, naive scores and the windows of every split, to the bit. */
START_TEST(reads_the_same)
{
    struct pair p;
    write_data(&storages[_i]);
    struct stat before, after;
    stat(data.text, &before);
    pair_open(&p, limit_of(&storages[_i]));
    ck_assert_uint_eq(p.file->fingerprint, p.whole->fingerprint);
    ck_assert_int_eq(p.file->layout, p.whole->layout);
    size_t bytes = (size_t)p.file->channels * sizeof(double);
    ck_assert_mem_eq(p.scaler[0].mean, p.scaler[1].mean, bytes);
    ck_assert_mem_eq(p.scaler[0].std, p.scaler[1].std, bytes);
    struct ps_blocks plan = p.file->file->plan;
    ck_assert_int_gt(p.splits.count[PS_TRAIN], 2 * plan.windows * plan.blocks); /* a few groups */
    ck_assert_int_ge(plan.blocks, 4);
    for (int split = PS_TRAIN; split < PS_SPLITS; split++) {
        const struct ps_order order = order_of(&p, split, 0, 0);
        expect_pass(&p, &order, 0, order.count, INT64_MAX);
        struct ps_naive naive = ps_naive_score(&p.view, order.first, order.count, 5), streamed;
        ps_batches_stop(p.batches);
        OK(ps_groups_naive(p.groups, &order, 5, &streamed));
        ck_assert_mem_eq(&naive, &streamed, sizeof naive);
    }
    pair_close(&p);
    stat(data.text, &after);
    ck_assert(before.st_mtim.tv_sec == after.st_mtim.tv_sec && before.st_mtim.tv_nsec == after.st_mtim.tv_nsec);
}
END_TEST

/* A shuffled pass has the documented order, every window once; another one in each epoch, the same again, and from the middle. */
START_TEST(shuffles_by_blocks)
{
    struct pair p;
    write_data(&storages[_i]);
    pair_open(&p, limit_of(&storages[_i]));
    const struct ps_order order = order_of(&p, PS_TRAIN, 1, 3), next = order_of(&p, PS_TRAIN, 1, 4);
    int32_t *index = expected_order(&p, &order), *other = expected_order(&p, &next);
    char *seen = calloc((size_t)order.count, 1);
    int64_t moved = 0;
    for (int64_t i = 0; i < order.count; i++) {
        ck_assert_int_eq(seen[index[i] - order.first]++, 0);
        moved += index[i] != other[i];
    }
    ck_assert_int_gt(moved, order.count * 9 / 10);
    /* Neighbours in the order are seldom neighbours in the file: a batch is drawn from all blocks of its group. */
    int64_t near = 0;
    for (int64_t i = 1; i < order.count; i++) {
        near += index[i] / p.file->file->plan.windows == index[i - 1] / p.file->file->plan.windows;
    }
    ck_assert_int_lt(near, order.count / 3);
    expect_pass(&p, &order, 0, order.count, INT64_MAX);
    expect_pass(&p, &next, 0, order.count - order.count % BATCH, INT64_MAX);
    for (int64_t begin = 0; begin <= order.count; begin += 37 * BATCH) {
        expect_pass(&p, &order, begin, order.count, 3);
    }
    expect_pass(&p, &order, order.count / BATCH * BATCH, order.count, INT64_MAX);
    expect_pass(&p, &order, order.count, order.count, INT64_MAX);
    free(seen);
    free(index);
    free(other);
    pair_close(&p);
}
END_TEST

/* Passes that are left after any number of batches, with buffers held or not, and sessions closed in the middle. */
START_TEST(passes_abandoned)
{
    struct pair p;
    write_data(&storages[0]);
    for (int i = 0; i < 12; i++) {
        pair_open(&p, limit_of(&storages[0]));
        for (int j = 0; j < 20; j++) {
            const struct ps_order order = order_of(&p, j % 3 == 2 ? PS_TEST : PS_TRAIN, j % 3 != 2, (uint64_t)j);
            expect_pass(&p, &order, 0, order.count, i * j % 23);
            if (j % 4 == 3) {
                struct ps_naive naive;
                const struct ps_order validation = order_of(&p, PS_VALIDATION, 0, 0);
                ps_batches_stop(p.batches);
                OK(ps_groups_naive(p.groups, &validation, 0, &naive));
            }
        }
        pair_close(&p);
    }
}
END_TEST

/* What does not fit is refused for the same reasons, what fits is read whole. */
START_TEST(whole_or_refused)
{
    struct ps_series *series;
    struct ps_memory memory = memory_of(1 << 30);
    write_data(&storages[0]);
    OK(ps_series_open_within(data.text, &memory, &series));
    ck_assert(series->file == NULL && series->values != NULL);
    ps_series_close(series);

    /* The least that a message names would do, and one byte less would not. */
    for (int i = 0; i < STORAGES; i += 2) {
        write_data(&storages[i]);
        memory.limit = 1;
        long long least = 0;
        ck_assert_int_eq(ps_series_open_within(data.text, &memory, &series), PS_DATA);
        const char *said = strstr(ps_error_message(), "too few: ");
        ck_assert_msg(said != NULL && sscanf(said, "too few: %lld are needed at least", &least) == 1, "%s", ps_error_message());
        /* What is read at a time, and so the least, grows with the limit. */
        for (int round = 0; round < 50; round++) {
            memory.limit = least;
            if (ps_series_open_within(data.text, &memory, &series) == PS_OK) {
                break;
            }
            sscanf(strstr(ps_error_message(), "too few: "), "too few: %lld are needed at least", &least);
        }
        ck_assert_ptr_nonnull(series);
        ck_assert_ptr_nonnull(series->file);
        ps_series_close(series);
        struct pair p;
        pair_open(&p, least);
        const struct ps_order order = order_of(&p, PS_TRAIN, 1, 0);
        expect_pass(&p, &order, 0, order.count, 20);
        pair_close(&p);
    }

    static float bad[ROWS * CHANNELS];
    for (int64_t i = 0; i < ROWS * CHANNELS; i++) {
        bad[i] = value_at(i / CHANNELS, i % CHANNELS);
    }
    bad[19000 * CHANNELS + 4] = NAN;
    char *names[CHANNELS];
    for (int c = 0; c < CHANNELS; c++) {
        names[c] = c == 4 ? "load" : "other";
    }
    OK(ps_series_write(data.text, bad, ROWS, CHANNELS, names, NULL, NULL, NULL));
    memory.limit = limit_of(&storages[0]);
    ck_assert_int_eq(ps_series_open_within(data.text, &memory, &series), PS_DATA);
    ck_assert_msg(strstr(ps_error_message(), "/series holds NaN in channel 4 (load), row 19000 (counted from 0)") != NULL, "%s",
                  ps_error_message());
    ck_assert_ptr_null(series);
}
END_TEST

/* The limit is of all that the data take, HDF5's own memory included: 896 KiB, and 4 chunks where they are compressed. To the byte,
 * by the figures of docs/design.md, worked out again. */
START_TEST(limit_counts_all)
{
    const struct storage *how = &storages[_i];
    write_data(how);
    int64_t C = how->windows ? FEW : CHANNELS, rows = how->windows ? WINDOWS : ROWS, element = how->wide ? 8 : 4;
    int64_t row = C * (how->windows ? L + H : 1) * 4, overlap = how->windows ? 0 : L + H - 1;
    int64_t chunk = (int64_t)(how->chunk[0] * how->chunk[1]) * (how->windows ? L : 1) * element * how->compressed;
    int64_t hdf5 = (896 << 10) + 4 * chunk, batches = 2 * BATCH * C * (L + H) * 4;
    struct ps_series *series;
    /* The least that holds the whole file: the windows' order is there twice. */
    for (int less = 0; less < 2; less++) {
        const struct ps_memory memory = memory_of(rows * row + 2 * rows * 4 + batches + hdf5 - less);
        OK(ps_series_open_within(data.text, &memory, &series));
        ck_assert_msg((series->file == NULL) == !less, "%s with %lld bytes", less ? "read whole" : "streamed",
                      (long long)memory.limit);
        ps_series_close(series);
    }
    /* Streamed, one block more would be too many. */
    const struct ps_memory memory = memory_of(limit_of(how));
    OK(ps_series_open_within(data.text, &memory, &series));
    struct ps_blocks plan = series->file->plan;
    int64_t block = (plan.windows + overlap) * row + plan.windows * 4;
    int64_t staging = how->windows ? 0 : series->file->dataset[0].piece_rows * row;
    int64_t used = 2 * plan.blocks * block + (rows / plan.windows + 2) * 4 + rows * 4 + batches + staging + hdf5;
    ck_assert_msg(used <= memory.limit && used + 2 * block > memory.limit, "%lld bytes of %lld, in blocks of %lld", (long long)used,
                  (long long)memory.limit, (long long)block);
    ps_series_close(series);
}
END_TEST

/* Ranks hold a part of each batch. Where whole batches fit, all is as of one process; where they do not, half of the limit is for
 * the parts: how many there are changes nothing, and the least that a message names would do. */
START_TEST(parts_are_counted)
{
    struct ps_series *series;
    write_data(&storages[0]);
    struct ps_memory memory = memory_of(limit_of(&storages[0]));
    struct ps_blocks plan[2];
    for (int i = 0; i < 2; i++) {
        memory.held = i ? 1 : 0;
        OK(ps_series_open_within(data.text, &memory, &series));
        plan[i] = series->file->plan;
        ps_series_close(series);
    }
    ck_assert(plan[0].windows == plan[1].windows && plan[0].blocks == plan[1].blocks);
    memory.limit = 3200000;
    memory.batch = 100000;
    memory.held = 0;
    ck_assert_int_eq(ps_series_open_within(data.text, &memory, &series), PS_DATA);
    ck_assert_msg(strstr(ps_error_message(), "for two batches of 100000 windows") != NULL, "%s", ps_error_message());
    for (int i = 0; i < 2; i++) {
        memory.held = 4 << i;
        OK(ps_series_open_within(data.text, &memory, &series));
        plan[i] = series->file->plan;
        const int64_t row = CHANNELS * 4, block = (plan[i].windows + L + H - 1) * row + plan[i].windows * 4;
        const int64_t used = 2 * plan[i].blocks * block + (ROWS / plan[i].windows + 2) * 4 + ROWS * 4 + memory.limit / 2 +
                             series->file->dataset[0].piece_rows * row + (896 << 10);
        ck_assert_msg(used <= memory.limit && used + 2 * block > memory.limit, "%lld bytes of %lld, in blocks of %lld",
                      (long long)used, (long long)memory.limit, (long long)block);
        ps_series_close(series);
    }
    ck_assert(plan[0].windows == plan[1].windows && plan[0].blocks == plan[1].blocks);
    for (int held = 2; held <= 20000; held *= 100) { /* what all else takes counts, and then the parts */
        long long least = 0;
        memory.limit = 1;
        memory.held = held;
        for (int round = 0; round < 50 && ps_series_open_within(data.text, &memory, &series) != PS_OK; round++) {
            const char *said = strstr(ps_error_message(), "too few: "), *of = path_of("for two batches of %d windows", held).text;
            ck_assert_msg(said != NULL && sscanf(said, "too few: %lld are needed at least", &least) == 1 &&
                              strstr(said, of) != NULL,
                          "%s", ps_error_message());
            memory.limit = least;
        }
        ck_assert_ptr_nonnull(series);
        ps_series_close(series);
    }
    /* All of the file beside half of the limit. */
    memory.held = 4;
    memory.limit = 2 * (ROWS * CHANNELS * 4 + 2 * ROWS * 4 + (896 << 10));
    memory.batch = memory.limit;
    OK(ps_series_open_within(data.text, &memory, &series));
    ck_assert(series->file == NULL && series->values != NULL);
    ps_series_close(series);
}
END_TEST

/* What float32 does not hold once it is scaled is refused before anything is read in groups, as it is in memory. */
START_TEST(overflow_refused)
{
    static float values[ROWS * CHANNELS];
    for (int64_t i = 0; i < ROWS * CHANNELS; i++) {
        values[i] = value_at(i / CHANNELS, i % CHANNELS);
    }
    for (int64_t row = 0; row < ROWS; row++) {
        values[row * CHANNELS + 4] = 1e-30f * (float)(row % 2);
    }
    values[19000 * CHANNELS + 4] = 1e10f;
    OK(ps_series_write(data.text, values, ROWS, CHANNELS, NULL, NULL, NULL, NULL));
    const struct ps_memory memory = memory_of(limit_of(&storages[0]));
    struct ps_series *whole, *file;
    struct ps_splits splits;
    struct ps_scaler scaler;
    struct ps_groups *groups;
    OK(ps_series_open(data.text, &whole));
    OK(ps_series_open_within(data.text, &memory, &file));
    ck_assert(whole->largest == 1e10f && file->largest == 1e10f);
    OK(ps_splits_make(file, (double[]){0.7, 0.1, 0.2}, L, H, &splits));
    OK(ps_scaler_fit(file, &splits, &scaler));
    ck_assert_int_eq(ps_groups_open(file, &scaler, L, H, &groups), PS_DATA);
    ck_assert_ptr_null(groups);
    char *said = strdup(ps_error_message());
    ck_assert_msg(strstr(said, "/series holds 1e+10 in channel 4, row 19000 (counted from 0)") != NULL, "%s", said);
    ck_assert_int_eq(ps_scaler_apply(&scaler, whole), PS_DATA);
    ck_assert_str_eq(ps_error_message(), said);
    free(said);
    ps_scaler_free(&scaler);
    ps_series_close(whole);
    ps_series_close(file);
}
END_TEST

/* ---- files that change ---- */

static void shrink(void)
{
    struct stat about;
    stat(data.text, &about);
    ck_assert_int_eq(truncate(data.text, about.st_size - 100), 0);
}

static void vanish(void)
{
    ck_assert_int_eq(unlink(data.text), 0);
}

static void replace(void)
{
    size_t size;
    char *bytes = file_read(data.text, &size);
    vanish();
    file_write(data.text, bytes, size);
    free(bytes);
}

static void write_over(void)
{
    FILE *file = fopen(data.text, "r+b");
    fseek(file, 100000, SEEK_SET);
    fputc(1, file);
    fclose(file);
}

static const struct {
    void (*change)(void);
    const char *says;
} changes[] = {{shrink, "changed while it was being read: it had"},
               {vanish, "went away while it was being read: No such file"},
               {replace, "was replaced by another file while it was being read"},
               {write_over, "was written to while it was being read"}};

START_TEST(file_changes)
{
    struct pair p;
    struct path copy = path_of("%.400s/copy.h5", folder.text);
    write_data(&storages[0]);
    size_t size;
    char *bytes = file_read(data.text, &size);
    file_write(copy.text, bytes, size);
    pair_open(&p, limit_of(&storages[0]));
    const struct ps_order order = order_of(&p, PS_TRAIN, 1, 0);
    expect_pass(&p, &order, 0, order.count, 3);
    usleep(20000); /* a file system's clock may be coarse */
    changes[_i].change();
    /* What was read before may still come; then it ends, and stays so. */
    enum ps_status status = PS_OK;
    double waited = 0;
    int64_t n = 1, taken = 0;
    int slot;
    while (status == PS_OK && n > 0) {
        status = ps_batches_next(p.batches, &slot, &n, &waited);
        if (status == PS_OK) {
            ps_batches_release(p.batches, slot);
            taken += n;
        }
    }
    struct ps_naive naive;
    for (int again = 0; again < 3; again++) {
        ck_assert_int_eq(status, PS_DATA);
        ck_assert_msg(strstr(ps_error_message(), changes[_i].says) && strstr(ps_error_message(), data.text), "%s",
                      ps_error_message());
        if (again == 0) {
            status = ps_batches_next(p.batches, &slot, &n, &waited);
        } else {
            ps_batches_stop(p.batches);
            const struct ps_order test = order_of(&p, PS_TEST, 0, 0);
            status = ps_groups_naive(p.groups, &test, 0, &naive);
        }
    }
    ck_assert_int_lt(taken, order.count);
    pair_close(&p);
    free(bytes);
}
END_TEST

/* The descriptor of the open file may not write. */
START_TEST(opened_read_only)
{
    const struct ps_memory memory = memory_of(limit_of(&storages[0]));
    struct ps_series *series;
    write_data(&storages[0]);
    OK(ps_series_open_within(data.text, &memory, &series));
    int found = 0;
    for (int fd = 3; fd < 64; fd++) {
        char link[1024] = "";
        ssize_t n = readlink(path_of("/proc/self/fd/%d", fd).text, link, sizeof link - 1);
        if (n > 0 && strcmp(link, data.text) == 0) {
            ck_assert_int_eq(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
            found++;
        }
    }
    ck_assert_int_eq(found, 1);
    ps_series_close(series);
}
END_TEST

/* ---- memory ---- */

/* A process of its own, so that the address space can be limited: streams the file, and sees every marked window once. */
struct limited {
    const char *path;
    int64_t limit, space; /* data.memory_limit; RLIMIT_AS, 0: what is mapped now and the limit */
    int64_t seq_len, pred_len, windows;
};

enum { MARK = 64, LIMITED_BATCH = 32 };

/* Of this process, in bytes: "VmSize:", "VmPeak:". */
static int64_t mapped(const char *what)
{
    char line[256];
    long long kilobytes = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) {
        if (strncmp(line, what, strlen(what)) == 0) {
            kilobytes = strtoll(line + strlen(what), NULL, 10);
        }
    }
    if (status) {
        fclose(status);
    }
    return kilobytes << 10;
}

static enum ps_status stream_limited(const struct limited *l, int64_t *seen)
{
    const struct ps_memory memory = {.limit = l->limit, .seq_len = l->seq_len, .pred_len = l->pred_len, .batch = LIMITED_BATCH};
    struct ps_series *series;
    struct ps_splits splits;
    struct ps_scaler scaler;
    struct ps_groups *groups;
    struct ps_batches *batches;
    PS_TRY(ps_series_open_within(l->path, &memory, &series));
    PS_TRY(ps_splits_make(series, (double[]){0.8, 0.1, 0.1}, l->seq_len, l->pred_len, &splits));
    PS_TRY(ps_scaler_fit(series, &splits, &scaler));
    ps_scaler_free(&scaler);
    PS_TRY(ps_scaler_identity(series->channels, &scaler));
    PS_TRY(ps_groups_open(series, &scaler, l->seq_len, l->pred_len, &groups));
    int64_t C = series->channels, n, first = splits.first[PS_TRAIN], count = splits.count[PS_TRAIN];
    float *inputs[2], *targets[2];
    for (int i = 0; i < 2; i++) {
        inputs[i] = malloc((size_t)(LIMITED_BATCH * C * l->seq_len) * sizeof(float));
        targets[i] = malloc((size_t)(LIMITED_BATCH * C * l->pred_len) * sizeof(float));
        if (!inputs[i] || !targets[i]) {
            return ps_fail(PS_DATA, "no memory for the batches");
        }
    }
    const struct ps_window_view view = ps_window_view_make(series, l->seq_len, l->pred_len);
    PS_TRY(ps_batches_open(&view, groups, LIMITED_BATCH, inputs, targets, &batches));
    const struct ps_order order = {first, count, 1, 1, 0, NULL};
    double waited = 0;
    int slot;
    int64_t end = l->windows && l->windows < count ? l->windows : count;
    char *found = calloc((size_t)(series->rows / MARK + 1), 1);
    ps_batches_start(batches, &order, NULL, 0, end);
    for (int64_t done = 0; done < end; done += n) {
        PS_TRY(ps_batches_next(batches, &slot, &n, &waited));
        for (int64_t i = 0; i < n; i++) {
            int64_t mark = (int64_t)inputs[slot][i * C * l->seq_len] - 1;
            if (mark >= 0) {
                if (mark % MARK || found[mark / MARK]++) {
                    return ps_fail(PS_DATA, "window %lld came twice, or is none", (long long)mark);
                }
                ++*seen;
            }
        }
        ps_batches_release(batches, slot);
    }
    ps_batches_close(batches);
    ps_groups_close(groups);
    ps_series_close(series);
    ps_scaler_free(&scaler);
    for (int i = 0; i < 2; i++) {
        free(inputs[i]);
        free(targets[i]);
    }
    free(found);
    return PS_OK;
}

/* The child's main: path, limit, space, seq_len, pred_len, windows. Prints what it saw. */
static int limited_main(char **argv)
{
    const struct limited l = {.path = argv[2],
                              .limit = strtoll(argv[3], NULL, 10),
                              .space = strtoll(argv[4], NULL, 10),
                              .seq_len = strtoll(argv[5], NULL, 10),
                              .pred_len = strtoll(argv[6], NULL, 10),
                              .windows = strtoll(argv[7], NULL, 10)};
    /* Beside the limit, for what it does not count: two threads' stacks, and what the C library maps of its own. */
    int64_t before = mapped("VmSize:"), most = l.space ? l.space : before + l.limit + (4 << 20), seen = 0;
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    printf("skipped: the limit itself, because a sanitizer reserves all of the address space; ");
#else
    if (setrlimit(RLIMIT_AS, &(struct rlimit){(rlim_t)most, (rlim_t)most}) != 0) {
        perror("RLIMIT_AS");
        return 1;
    }
#endif
    enum ps_status status = stream_limited(&l, &seen);
    printf("seen: %lld marks; %lld MiB mapped before, %lld MiB at most, of %lld MiB\n", (long long)seen, (long long)(before >> 20),
           (long long)(mapped("VmPeak:") >> 20), (long long)(most >> 20));
    if (status != PS_OK) {
        fprintf(stderr, "%s\n", ps_error_message());
        _exit((int)status); /* whatever is at work */
    }
    return 0;
}

/* A file of `bytes` that takes little of the disk: holes, and in every MARK-th window or row its number + 1. */
static void write_sparse(int windows, int64_t rows, int64_t C, int64_t length[2])
{
    hid_t file = H5Fcreate(data.text, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER);
    haddr_t place = 0;
    for (int part = 0; part < 1 + windows; part++) {
        hsize_t size[3] = {(hsize_t)rows, (hsize_t)C, (hsize_t)length[part]};
        hid_t space = H5Screate_simple(windows ? 3 : 2, size, NULL);
        hid_t set = H5Dcreate2(file,
                               !windows    ? "series"
                               : part == 0 ? "inputs"
                                           : "targets",
                               H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
        ck_assert_int_ge(set, 0);
        place = part == 0 ? H5Dget_offset(set) : place;
        H5Dclose(set);
        H5Sclose(space);
    }
    H5Pclose(creation);
    H5Fclose(file);
    int fd = open(data.text, O_WRONLY);
    int64_t row = C * (windows ? length[0] : 1) * (int64_t)sizeof(float);
    for (int64_t r = 0; r < rows; r += MARK) {
        float mark = (float)(r + 1);
        ck_assert_int_eq(pwrite(fd, &mark, sizeof mark, (off_t)place + r * row), sizeof mark);
    }
    close(fd);
}

static void expect_within(int64_t limit, int64_t space, int64_t seq_len, int64_t pred_len, int64_t windows, int64_t marks)
{
    char numbers[5][32];
    const int64_t values[5] = {limit, space, seq_len, pred_len, windows};
    for (int i = 0; i < 5; i++) {
        snprintf(numbers[i], sizeof numbers[i], "%lld", (long long)values[i]);
    }
    setenv("OPENBLAS_NUM_THREADS", "1",
           1); /* an OpenBLAS with threads of its own ends them at a fork, once they have room to begin */
    struct process p = process_start("/proc/self/exe",
                                     ARGS("--limited", data.text, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]), 0);
    unsetenv("OPENBLAS_NUM_THREADS");
    struct result r = process_end(&p);
    printf("%s: %s", data.text, r.out);
    ck_assert_msg(r.code == 0, "exit code %d; stdout: %s; stderr: %s", r.code, r.out, r.err);
    long long seen;
    const char *said = strstr(r.out, "seen: ");
    ck_assert(said != NULL && sscanf(said, "seen: %lld marks", &seen) == 1);
    ck_assert_msg(marks < 0 ? seen > 0 : seen == marks, "%lld marks were seen, not %lld", seen, (long long)marks);
    result_free(&r);
}

/* The same size, compressed: zeros and the marks. */
static void write_compressed(int64_t windows, int64_t C, int64_t length[2], int64_t chunk)
{
    const struct storage how = {.chunk = {(hsize_t)chunk, (hsize_t)C}, .compressed = 1};
    hid_t file = H5Fcreate(data.text, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    for (int part = 0; part < 2; part++) {
        float *values = calloc((size_t)(windows * C * length[part]), sizeof *values);
        for (int64_t w = 0; part == 0 && w < windows; w += MARK) {
            values[w * C * length[part]] = (float)(w + 1);
        }
        put(file, part == 0 ? "inputs" : "targets", &how, 3, (hsize_t[]){(hsize_t)windows, (hsize_t)C, (hsize_t)length[part]},
            values);
        free(values);
    }
    H5Fclose(file);
}

/* Ready-made windows: all of them. A series: every row is checked and scaled, and as many windows as the time allows. */
START_TEST(within_the_limit)
{
    const char *all = getenv("PS_TEST_FULL");
    int full = all && strcmp(all, "1") == 0;
    struct stat about;
    int64_t size = full ? (int64_t)4 << 30 : 64 << 20, limit = full ? 640 << 20 : 12 << 20, space = full ? 1 << 30 : 0;
    int64_t windows = size / (16 * 128 * (int64_t)sizeof(float)), rows = size / (512 * (int64_t)sizeof(float));
    write_sparse(1, windows, 16, (int64_t[]){96, 32});
    stat(data.text, &about);
    ck_assert_int_ge(about.st_size, size);
    int64_t train = windows * 8 / 10;
    expect_within(limit, space, 96, 32, 0, (train + MARK - 1) / MARK);
    write_sparse(0, rows, 512, (int64_t[]){1, 1});
    stat(data.text, &about);
    ck_assert_int_ge(about.st_size, size);
    expect_within(limit, space, 24, 8, 20000, -1);
    windows = (64 << 20) / (16 * 128 * (int64_t)sizeof(float));
    write_compressed(windows, 16, (int64_t[]){96, 32}, 128);
    expect_within(12 << 20, 0, 96, 32, 0, (windows * 8 / 10 + MARK - 1) / MARK);
    /* Chunks of 6 MiB, of which HDF5 takes more than the room that is left beside the limit. */
    write_compressed(windows, 16, (int64_t[]){96, 32}, 1024);
    expect_within(52 << 20, 0, 96, 32, 0, (windows * 8 / 10 + MARK - 1) / MARK);
}
END_TEST

/* ---- the programs ---- */

static const char config_text[] = "data: {path: data.h5, memory_limit: 1300000}\n"
                                  "model: {seq_len: 20, pred_len: 4, patch_len: 8, stride: 4, d_model: 8, n_heads: 2, d_ff: 8,\n"
                                  "        n_layers: 1}\n"
                                  "optim: {lr: 1e-3, schedule: constant}\n"
                                  "train: {epochs: 12, batch_size: 16, checkpoint_every: 50}\n"
                                  "runtime: {threads: 1}\n";

/* A run whose data shrink or go away under it ends with exit code 3 and a checkpoint of the last step that was done; with the data
 * back it resumes to the bits of a run that nothing disturbed, and both are evaluated the same, in memory too. */
START_TEST(run_loses_its_data)
{
    struct path whole = new_dir("whole"), run_dir = new_dir(_i == 0 ? "shrunk" : "gone"),
                kept = path_of("%.400s/kept.h5", folder.text);
    write_data(&storages[4]);
    file_write(config.text, config_text, strlen(config_text));
    if (_i == 0) {
        expect_done(train(whole.text, ARGS()));
    }
    rename(data.text, kept.text);
    size_t size;
    char *bytes = file_read(kept.text, &size);
    file_write(data.text, bytes, size);
    struct process p = start_train(run_dir.text, ARGS());
    for (int i = 0; i < 10000 && !file_exists(in_run(run_dir.text, "metrics.jsonl").text); i++) {
        sleep_seconds(0.005); /* until an epoch is done */
    }
    changes[_i].change();
    expect_refused(process_end(&p), 3,
                   ARGS("train: ", data.text, (char *)changes[_i].says, " is kept in ",
                        in_run(run_dir.text, "checkpoints/last.h5").text, "go on with --resume"));
    struct ps_checkpoint c = load(run_dir.text, "last.h5");
    ck_assert_uint_ge(c.step, WINDOWS * 7 / 10 / BATCH);
    ck_assert_uint_lt(c.step, 12 * (WINDOWS * 7 / 10 / BATCH));
    ps_checkpoint_free(&c);
    expect_refused(train(run_dir.text, ARGS("--resume")), 3, ARGS(data.text));
    file_write(data.text, bytes, size);
    expect_done(train(run_dir.text, ARGS("--resume")));
    expect_same_run(whole.text, run_dir.text);
    free(bytes);
}
END_TEST

/* An epoch whose validation meets a changed file is validated once the run is resumed with the data back. */
START_TEST(validation_loses_its_data)
{
    struct path whole = new_dir("validated"), run_dir, kept = path_of("%.400s/kept.h5", folder.text);
    write_data(&storages[4]);
    file_write(config.text, config_text, strlen(config_text));
    /* Nearly all of an epoch's time is validation's. */
    char *split = "data.split=[0.03, 0.94, 0.03]";
    expect_done(train(whole.text, ARGS("--set", split)));
    rename(data.text, kept.text);
    size_t size;
    char *bytes = file_read(kept.text, &size);
    int validating = 0;
    for (int run = 0; run < 8 && !validating; run++) {
        run_dir = new_dir(path_of("cut%d", run).text);
        file_write(data.text, bytes, size);
        struct process p = start_train(run_dir.text, ARGS("--set", split));
        for (int i = 0; i < 10000 && !file_exists(in_run(run_dir.text, "metrics.jsonl").text); i++) {
            sleep_seconds(0.005);
        }
        shrink();
        expect_refused(process_end(&p), 3, ARGS("train: ", data.text, "go on with --resume"));
        struct ps_checkpoint c = load(run_dir.text, "last.h5");
        validating = c.step % (WINDOWS * 3 / 100 / BATCH) == 0;
        ps_checkpoint_free(&c);
    }
    ck_assert(validating);
    file_write(data.text, bytes, size);
    expect_done(train(run_dir.text, ARGS("--resume", "--set", split)));
    expect_same_run(whole.text, run_dir.text);
    free(bytes);
}
END_TEST

START_TEST(evaluates_the_same)
{
    struct path dir = new_dir("evaluated"), best = in_run(dir.text, "checkpoints/best.h5");
    write_data(&storages[5]);
    file_write(config.text, config_text, strlen(config_text));
    expect_done(train(dir.text, ARGS("--set", "data.memory_limit=1400000", "--set", "train.epochs=1")));
    /* The same weights, on data in memory: the checkpoint's own limit is what evaluate keeps to, so the run is repeated without. */
    struct path resident = new_dir("resident");
    expect_done(train(resident.text, ARGS("--set", "data.memory_limit=0", "--set", "train.epochs=1")));
    struct ps_checkpoint c = load(dir.text, "best.h5"), r = load(resident.text, "best.h5");
    memcpy(r.parameters, c.parameters, (size_t)c.layout->count * sizeof *c.parameters);
    struct path other = in_run(resident.text, "checkpoints/best.h5");
    OK(ps_checkpoint_save(other.text, &r));
    ps_checkpoint_free(&c);
    ps_checkpoint_free(&r);
    const char *of[2] = {best.text, other.text};
    struct path forecasts[2];
    for (int split = 0; split < 3; split++) {
        char *scores[2];
        for (int i = 0; i < 2; i++) {
            forecasts[i] = path_of("%.400s/forecasts%d.h5", folder.text, i);
            struct result done =
                run("evaluate", ARGS((char *)of[i], "--device", (char *)device, "--json", "--split", (char *)ps_split_name(split),
                                     "--save-forecasts", forecasts[i].text, "--original-units", "--overwrite"));
            ck_assert_msg(done.code == 0, "%s", done.err);
            scores[i] = done.out;
            free(done.err);
        }
        ck_assert_str_eq(scores[0], scores[1]);
        hid_t file[2] = {H5Fopen(forecasts[0].text, H5F_ACC_RDONLY, H5P_DEFAULT),
                         H5Fopen(forecasts[1].text, H5F_ACC_RDONLY, H5P_DEFAULT)};
        struct compared compared = {.other = file[1], .name = ps_split_name(split)};
        H5Ovisit2(file[0], H5_INDEX_NAME, H5_ITER_NATIVE, compare_dataset, &compared, H5O_INFO_BASIC);
        ck_assert_int_eq(compared.datasets, 3);
        H5Fclose(file[0]);
        H5Fclose(file[1]);
        free(scores[0]);
        free(scores[1]);
    }
}
END_TEST

static void set_up(void)
{
    folder = folder_make();
    config = path_of("%.400s/config.yaml", folder.text);
    data = path_of("%.400s/data.h5", folder.text);
}

static void tear_down(void)
{
    folder_remove(folder.text);
}

int main(int argc, char **argv)
{
    if (argc == 8 && strcmp(argv[1], "--limited") == 0) {
        return limited_main(argv);
    }
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    Suite *suite = suite_create("stream");
    TCase *c = tcase_create("stream");
    tcase_set_timeout(c, 600);
    tcase_add_unchecked_fixture(c, set_up, tear_down);
    tcase_add_loop_test(c, reads_the_same, 0, STORAGES);
    tcase_add_loop_test(c, shuffles_by_blocks, 0, STORAGES);
    tcase_add_test(c, passes_abandoned);
    tcase_add_test(c, whole_or_refused);
    tcase_add_loop_test(c, limit_counts_all, 0, STORAGES);
    tcase_add_test(c, parts_are_counted);
    tcase_add_test(c, overflow_refused);
    tcase_add_loop_test(c, file_changes, 0, (int)(sizeof changes / sizeof *changes));
    tcase_add_test(c, opened_read_only);
    tcase_add_test(c, within_the_limit);
    programs = getenv("PS_PROGRAMS");
    device = getenv("PS_TEST_DEVICE") ? getenv("PS_TEST_DEVICE") : "cpu";
    if (programs != NULL) {
        tcase_add_loop_test(c, run_loses_its_data, 0, 2);
        tcase_add_test(c, validation_loses_its_data);
        tcase_add_test(c, evaluates_the_same);
    } else {
        printf("skipped: the programs, because PS_PROGRAMS is not set\n");
    }
    suite_add_tcase(suite, c);
    return run_suite(suite, CK_NOFORK) != 0; /* OpenMP is used */
}
