/* Random bits: Philox's known answers, by itself and as the operations of every table draw them.
 *
 * PS_TEST_SMALL=1 takes CUDA's tables and small tensors alone, for compute-sanitizer. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kernels/philox.h"
#include "tests/asked.h"
#include "tests/suite.h"
#include "tests/tables.h"

/* Known answers of Random123's kat_vectors, philox4x32 10 rounds. */
static const struct answer {
    uint64_t seed, step;
    uint32_t index, site, word[4];
} answers[] = {{0, 0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
               {UINT64_MAX, UINT64_MAX, UINT32_MAX, UINT32_MAX, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
               {0x299f31d0a4093822, 0x0370734413198a2e, 0x243f6a88, 0x85a308d3, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};

START_TEST(test_philox)
{
    for (int i = 0; i < LENGTH(answers); i++) {
        struct ps_block block = ps_philox(answers[i].seed, answers[i].index, answers[i].site, answers[i].step);
        ck_assert_mem_eq(block.word, answers[i].word, sizeof block.word);
    }
    struct ps_block block = {{0x11112222, 0x33334444, 0x55556666, 0x77778888}};
    ck_assert_uint_eq(ps_draw16(&block, 0), 0x2222);
    ck_assert_uint_eq(ps_draw16(&block, 1), 0x1111);
    ck_assert_uint_eq(ps_draw16(&block, 7), 0x7777);
    double sum = 0;
    for (uint64_t i = 0; i < 10000; i++) {
        double u = ps_uniform(1, i, PS_SITE_SAMPLE, 0);
        ck_assert(u >= 0 && u < 1);
        sum += u;
    }
    ck_assert_msg(fabs(sum / 10000 - 0.5) < 0.015, "mean %g", sum / 10000); /* 5 standard deviations */
    ck_assert(ps_uniform(1, 0, PS_SITE_SAMPLE, 0) != ps_uniform(1, 1, PS_SITE_SAMPLE, 0));
}
END_TEST

/* The table's operations draw these words. An element that is kept at threshold w and dropped at w + 1 has drawn the 16 bits w;
 * rows of d elements, in place, up to the block's last one, of a tensor that `first` blocks come before. What is kept is x + 2 > 0.
 */
static void expect_answer(struct table *t, const struct answer *a, int64_t d, uint32_t first)
{
    const struct ps_kernels *k = t->kernels;
    struct ps_device *device = t->device;
    const int64_t elements = 8 * ((int64_t)(a->index - first) + 1);
    const size_t bytes = (size_t)elements * ps_type_bytes(k->real), last = 8 * ps_type_bytes(k->real);
    const struct ps_step_state state = {.step = a->step};
    const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    const double long_ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    struct ps_block block;
    memcpy(block.word, a->word, sizeof block.word);
    void *x, *one, *at;
    ck_assert_msg(device->allocate(device, bytes, &x) == PS_OK, "%s", ps_error_message());
    ck_assert_int_eq(device->allocate(device, sizeof long_ones, &one), PS_OK);
    ck_assert_int_eq(device->allocate(device, sizeof state, &at), PS_OK);
    ck_assert_int_eq(device->upload(device, PS_COMPUTE, one, k->parameter == PS_F64 ? (const void *)long_ones : ones,
                                    8 * ps_type_bytes(k->parameter)),
                     PS_OK);
    ck_assert_int_eq(device->upload(device, PS_COMPUTE, at, &state, sizeof state), PS_OK);
    const struct ps_tensor rows = ps_tensor_2d(x, k->real, elements / d, d);
    for (int i = 0; i < 16; i++) {
        const uint32_t threshold = ps_draw16(&block, i / 2) + (uint32_t)i % 2;
        const struct ps_bias_position_add add = {
            .y = rows,
            .x = rows,
            .bias = ps_tensor_1d(one, k->parameter, d),
            .position = ps_tensor_2d(one, k->parameter, 1, d),
            .dropout = {.threshold = threshold, .scale = 1, .site = a->site, .first = first, .seed = a->seed, .state = at}};
        unsigned char drawn[8 * sizeof(double)];
        ck_assert_msg(k->bias_position_add(k, &add) == PS_OK, "%s", ps_error_message());
        ck_assert_int_eq(device->download(device, PS_COMPUTE, drawn, (char *)x + bytes - last, last), PS_OK);
        for (int j = 0; j < 8; j++) {
            int kept = 0;
            for (size_t byte = 0; byte < last / 8; byte++) {
                kept |= drawn[(size_t)j * last / 8 + byte] != 0;
            }
            ck_assert_msg(kept == (ps_draw16(&block, j) >= threshold),
                          "%s: seed %llx, step %llx, site %x, element %lld: draw %x %s threshold %x", t->name,
                          (unsigned long long)a->seed, (unsigned long long)a->step, a->site, (long long)(elements - 8 + j),
                          ps_draw16(&block, j), kept ? "is kept at" : "is dropped at", threshold);
        }
    }
    device->release(device, x, bytes);
    device->release(device, one, sizeof long_ones);
    device->release(device, at, sizeof state);
}

/* The known answers as each table draws them, and the same counters but for the block, which is near the tensor's beginning. The
 * block of all ones is that of 2^35 elements, and pi's of 4.9e9: the device has room for them, for the former in 16 bits. */
START_TEST(test_philox_drawn)
{
    struct table *t = &tables[_i];
    ck_assert_msg(table_open(t) == PS_OK, "%s", ps_error_message());
    size_t free_bytes, total_bytes;
    ck_assert_int_eq(t->device->memory(t->device, &free_bytes, &total_bytes), PS_OK);
    const int large = _i >= CPU_TABLES && !asked("PS_TEST_SMALL");
    for (int i = 0; i < 2 * LENGTH(answers); i++) {
        struct answer a = answers[i % LENGTH(answers)];
        if (i >= LENGTH(answers)) {
            a.index = 1000 + (uint32_t)i;
            const struct ps_block block = ps_philox(a.seed, a.index, a.site, a.step);
            memcpy(a.word, block.word, sizeof a.word);
        }
        expect_answer(t, &a, 8, a.index - 2);
        expect_answer(t, &a, 1, a.index - 2);
        const double bytes = 8 * ((double)a.index + 1) * (double)ps_type_bytes(t->kernels->real);
        if (bytes > 1e6 && (!large || bytes > 0x1p36)) {
            continue;
        }
        if (bytes + 0x1p30 > (double)free_bytes) {
            printf("skipped: %s: Philox's block %u needs %.1f GiB, %.1f GiB are free\n", t->name, a.index, bytes / 0x1p30,
                   (double)free_bytes / 0x1p30);
            continue;
        }
        expect_answer(t, &a, 8, 0);
        expect_answer(t, &a, 1, 0);
    }
    table_close(t);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("philox");
    if (present() == CPU_TABLES) {
        printf("skipped: Philox's words on CUDA: no CUDA device\n");
    }
    TCase *words = tcase_create("words");
    tcase_add_test(words, test_philox);
    suite_add_tcase(suite, words);
    TCase *drawn = tcase_create("drawn");
    tcase_set_timeout(drawn, 300);
    tcase_add_loop_test(drawn, test_philox_drawn, asked("PS_TEST_SMALL") ? CPU_TABLES : 0, present());
    suite_add_tcase(suite, drawn);

    return run_suite(suite, CK_NOFORK) != 0; /* CUDA and OpenMP do not survive a fork */
}
