/* A build_ function for each operation, or two, which makes one of its cases; at the end the table of all. PS_TEST_FULL=1 adds the
 * sizes of a training step and random ones. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/asked.h"
#include "tests/checks.h"
#include "tests/kernel_cases.h"
#include "tests/length.h"

/* ---- sizes and dropout ---- */

/* Rows and width number `index`: all pairs of the two lists, a few more, and in full those of a training step. 0 when past the
 * end. */
static int row_size(int index, int64_t *rows, int64_t *width)
{
    static const int64_t few_rows[] = {1, 7, 333}, widths[] = {1, 5, 16, 42, 63, 64, 65, 128};
    static const int64_t more[][2] = {{3, 2100}, {4099, 64}, {66, 513}, {2, 1024}, {70001, 3}, {5, 200}, {3, 384}, {9, 24}};
    static const int64_t step[][2] = {{37632, 16}, {37632, 128}, {37632, 42}, {6400, 64}, {6400, 256}};
    if (index < LENGTH(few_rows) * LENGTH(widths)) {
        *rows = few_rows[index / LENGTH(widths)];
        *width = widths[index % LENGTH(widths)];
        return 1;
    }
    index -= LENGTH(few_rows) * LENGTH(widths);
    if (index < LENGTH(more)) {
        *rows = more[index][0];
        *width = more[index][1];
        return 1;
    }
    index -= LENGTH(more);
    if (asked("PS_TEST_FULL") && index < LENGTH(step)) {
        *rows = step[index][0];
        *width = step[index][1];
        return 1;
    }
    index -= LENGTH(step);
    if (asked("PS_TEST_FULL") && index < 12) {
        uint64_t random = 1000 + (uint64_t)index;
        *width = random_between(&random, 1, 700);
        *rows = random_between(&random, 1, 1 + 300000 / *width);
        return 1;
    }
    return 0;
}

/* Without dropout and, alternating, with p 0.1 and 0.5, now and then as a part whose blocks are counted on past the counter's end.
 * The step needs both of its words. */
static const char *set_dropout(struct call *c, int index, struct ps_dropout *dropout, size_t state_offset)
{
    static const double p[] = {0, 0.1, 0, 0.5};
    static const char *const names[] = {"", " p 0.1", "", " p 0.5"};
    *dropout = ps_dropout_make(p[index % 4], 0x123456789abcdefu, 17, NULL);
    if (dropout->threshold) {
        c->has_dropout = 1;
        c->state.step = 0x100000007u;
        dropout->first = index % 8 == 7 ? UINT32_MAX - 4 : 0;
        call_state(c, state_offset);
    }
    return names[index % 4];
}

#define SET_DROPOUT(c, index, operation) \
    set_dropout(c, index, &(c)->arguments.operation.dropout, offsetof(struct ps_##operation, dropout.state))

/* ---- products ---- */

/* How a matrix [.., rows, columns] lies in memory. */
enum gemm_layout {
    DENSE,
    TURNED,       /* the transpose of a dense matrix */
    SLICE,        /* the middle third of rows three times as long */
    TURNED_SLICE, /* the transpose of a slice */
    HEADS,        /* the second batch dimension lies inside the rows: q, k or v within rows of W_qkv's product */
    TURNED_HEADS,
    SPREAD,   /* every second element */
    REPEATED, /* one matrix for the whole batch */
};

static const char *const gemm_layout_names[] = {"", "^T", "slice", "slice^T", "heads", "heads^T", "spread", "repeated"};

static void place_matrix(struct call *c, int slot, enum role role, enum mode mode, enum fill fill, int batch_rank,
                         const int64_t *batch, int64_t rows, int64_t columns, enum gemm_layout layout)
{
    int64_t size[4], stride[4], lead = 0, matrix = rows * columns;
    int64_t row_stride = columns, column_stride = 1, heads = batch_rank == 2 ? batch[1] : 1;
    switch (layout) {
    case DENSE:
    case REPEATED:
        break;
    case TURNED:
        row_stride = 1;
        column_stride = rows;
        break;
    case SLICE:
        row_stride = 3 * columns;
        lead = columns;
        matrix *= 3;
        break;
    case TURNED_SLICE:
        row_stride = 1;
        column_stride = 3 * rows;
        lead = rows;
        matrix *= 3;
        break;
    case HEADS:
        row_stride = 3 * heads * columns;
        lead = heads * columns;
        matrix = 3 * heads * rows * columns;
        break;
    case TURNED_HEADS:
        row_stride = 1;
        column_stride = 3 * heads * rows;
        lead = heads * rows;
        matrix = 3 * heads * rows * columns;
        break;
    case SPREAD:
        row_stride = 2 * columns;
        column_stride = 2;
        matrix *= 2;
        break;
    }
    for (int i = 0; i < batch_rank; i++) {
        size[i] = batch[i];
        stride[i] = layout == REPEATED ? 0 : i == batch_rank - 1 ? matrix : matrix * batch[i + 1];
    }
    if (batch_rank == 2 && (layout == HEADS || layout == TURNED_HEADS)) {
        stride[0] = matrix;
        stride[1] = layout == HEADS ? columns : rows;
    }
    size[batch_rank] = rows;
    size[batch_rank + 1] = columns;
    stride[batch_rank] = row_stride;
    stride[batch_rank + 1] = column_stride;
    place_strided(c, slot, role, mode, fill, lead, batch_rank + 2, size, stride);
}

static void build_gemm_case(struct call *c, int scales, int batch_rank, const int64_t *batch, const int64_t *mnk,
                            enum gemm_layout to, enum gemm_layout left, enum gemm_layout right)
{
    static const double alphas[] = {1, 1, 0.5, -1.25}, betas[] = {0, 1, 0, 0.75};
    int64_t m = mnk[0], n = mnk[1], k = mnk[2], batches = 1;
    for (int i = 0; i < batch_rank; i++) {
        batches *= batch[i];
    }
    /* The relative error of a few sums of normal values says more about their cancellation than about the product. */
    enum fill fill = batches * m * n < 16 ? POSITIVE : NORMAL;
    double alpha = fill == POSITIVE ? fabs(alphas[scales % 4]) : alphas[scales % 4], beta = betas[scales % 4];
    c->arguments.gemm.alpha = alpha;
    c->arguments.gemm.beta = beta;
    /* As a weight's gradient or the head's output, or as an activation. */
    enum role role = (scales + batch_rank) % 3 == 1 ? PARAMETER : REAL;
    place_matrix(c, 0, role, beta == 0 ? OUT : ADD, fill, batch_rank, batch, m, n, to);
    place_matrix(c, 1, REAL, IN, fill, batch_rank, batch, m, k, left);
    place_matrix(c, 2, REAL, IN, fill, batch_rank, batch, k, n, right);
    c->may_refuse = to == SPREAD || left == SPREAD || right == SPREAD;
    char batches_text[32] = "";
    if (batch_rank) {
        snprintf(batches_text, sizeof batches_text, "%lldx%lld of ", (long long)batch[0],
                 (long long)(batch_rank == 2 ? batch[1] : 1));
    }
    call_label(c, "%sm %lld n %lld k %lld c%s a%s b%s alpha %g beta %g", batches_text, (long long)m, (long long)n, (long long)k,
               gemm_layout_names[to], gemm_layout_names[left], gemm_layout_names[right], alpha, beta);
}

static int build_gemm(struct call *c, int index)
{
    /* Plain products, with every transpose. */
    static const int64_t flat[][3] = {{1, 1, 1},      {1, 1, 128},     {5, 42, 63},   {64, 64, 64},    {65, 1, 5},
                                      {1, 65, 42},    {128, 5, 64},    {63, 128, 65}, {42, 42, 1},     {16, 48, 5000},
                                      {333, 128, 64}, {333, 64, 16},   {7, 63, 128},  {128, 128, 128}, {129, 127, 130},
                                      {5, 5, 5},      {64, 192, 333},  {210, 16, 16}, {256, 64, 210},  {96, 672, 35},
                                      {2, 3, 1000},   {131, 1030, 129}};
    static const enum gemm_layout outputs[] = {DENSE, DENSE, SLICE, TURNED};
    if (index < 4 * LENGTH(flat)) {
        int i = index / 4;
        build_gemm_case(c, i + index, 0, NULL, flat[i], outputs[(i + index / 2) % 4], index & 1 ? TURNED : DENSE,
                        index & 2 ? TURNED : DENSE);
        return 1;
    }
    index -= 4 * LENGTH(flat);
    /* One of q, k and v out of W_qkv: leading dimension 3d. */
    static const int64_t sliced[][3] = {{63, 64, 65}, {333, 16, 128}, {7, 128, 64}, {128, 64, 333}, {5, 5, 5}};
    if (index < 8 * LENGTH(sliced)) {
        build_gemm_case(c, index, 0, NULL, sliced[index / 8], index & 4 ? SLICE : DENSE, index & 1 ? TURNED_SLICE : SLICE,
                        index & 2 ? TURNED_SLICE : SLICE);
        return 1;
    }
    index -= 8 * LENGTH(sliced);
    /* Attention: tiny products, one and two batch dimensions, every transpose. */
    static const int64_t tiny[][3] = {{12, 12, 64}, {12, 64, 12}, {42, 42, 8}, {42, 8, 42},  {42, 42, 4},  {42, 4, 42},
                                      {5, 5, 16},   {5, 16, 5},   {1, 1, 1},   {64, 64, 64}, {65, 65, 9},  {65, 9, 65},
                                      {10, 20, 28}, {16, 36, 20}, {4, 64, 4},  {7, 8, 64},   {16, 16, 16}, {41, 43, 4},
                                      {33, 62, 4},  {63, 34, 8},  {17, 64, 4}};
    static const int64_t one[] = {11}, two[] = {7, 4};
    if (index < 4 * LENGTH(tiny)) {
        build_gemm_case(c, index / 4, 1, one, tiny[index / 4], index & 1 ? DENSE : TURNED, index & 1 ? TURNED : DENSE,
                        index & 2 ? TURNED : DENSE);
        return 1;
    }
    index -= 4 * LENGTH(tiny);
    if (index < 8 * LENGTH(tiny)) {
        enum gemm_layout plain = index & 4 ? HEADS : DENSE, turned = index & 4 ? TURNED_HEADS : TURNED;
        build_gemm_case(c, index / 8 + index, 2, two, tiny[index / 8], plain, index & 1 ? turned : plain,
                        index & 2 ? turned : plain);
        return 1;
    }
    index -= 8 * LENGTH(tiny);
    static const struct {
        int batch_rank;
        int64_t batch[2], mnk[3];
        enum gemm_layout to, left, right;
    } others[] = {{1, {6, 0}, {9, 20, 13}, DENSE, DENSE, REPEATED},     {2, {3, 5}, {9, 20, 13}, DENSE, REPEATED, DENSE},
                  {0, {0, 0}, {9, 20, 13}, SPREAD, DENSE, DENSE},       {0, {0, 0}, {9, 20, 13}, DENSE, SPREAD, SPREAD},
                  {2, {1, 1}, {42, 42, 8}, DENSE, HEADS, TURNED_HEADS}, {2, {300, 2}, {12, 12, 16}, DENSE, HEADS, TURNED_HEADS},
                  {1, {3, 0}, {130, 70, 90}, DENSE, DENSE, TURNED},     {2, {2, 2}, {100, 40, 65}, HEADS, DENSE, HEADS},
                  {2, {1, 9}, {17, 19, 23}, HEADS, TURNED, HEADS},      {2, {9, 1}, {17, 19, 23}, HEADS, TURNED, HEADS},
                  {1, {70001, 0}, {5, 3, 2}, DENSE, DENSE, TURNED},     {2, {3, 5}, {33, 50, 4}, HEADS, HEADS, TURNED_HEADS},
                  {2, {4, 7}, {63, 34, 4}, DENSE, DENSE, TURNED},       {2, {4, 7}, {64, 16, 4}, DENSE, DENSE, TURNED},
                  {2, {4, 7}, {63, 34, 8}, DENSE, DENSE, TURNED}};
    if (index < LENGTH(others)) {
        build_gemm_case(c, 0, others[index].batch_rank, others[index].batch, others[index].mnk, others[index].to,
                        others[index].left, others[index].right);
        return 1;
    }
    index -= LENGTH(others);
    /* Many rows, and sums over many: all dense, or c or one operand a slice and b or c turned. */
    static const int64_t rows[][3] = {{1030, 34, 20},  {1091, 130, 68},  {1027, 66, 164},   {1025, 34, 384}, {1025, 34, 800},
                                      {1026, 34, 420}, {17005, 36, 388}, {17001, 100, 388}, {8601, 196, 392}};
    static const int64_t sums[][3] = {{132, 36, 1100}, {68, 132, 1060},  {36, 36, 4099},  {16, 128, 2080},
                                      {64, 64, 3000},  {100, 120, 1792}, {80, 132, 1600}, {88, 88, 1472}};
    if (index < 2 * LENGTH(rows)) {
        build_gemm_case(c, index + index / 2, 0, NULL, rows[index / 2], index & 1 ? SLICE : DENSE, DENSE,
                        index & 1 ? TURNED : DENSE);
        return 1;
    }
    index -= 2 * LENGTH(rows);
    if (index < 2 * LENGTH(sums)) {
        build_gemm_case(c, index + 1, 0, NULL, sums[index / 2], index & 1 ? TURNED : DENSE, TURNED, index & 1 ? SLICE : DENSE);
        return 1;
    }
    index -= 2 * LENGTH(sums);
    static const struct {
        int batch_rank;
        int64_t batch[2], mnk[3];
        enum gemm_layout to, left, right;
        int scales;
    } step[] = {{0, {0, 0}, {37632, 48, 16}, DENSE, DENSE, DENSE, 0},      {0, {0, 0}, {37632, 128, 16}, DENSE, DENSE, DENSE, 0},
                {0, {0, 0}, {37632, 16, 128}, DENSE, DENSE, TURNED, 0},    {0, {0, 0}, {16, 48, 37632}, DENSE, TURNED, DENSE, 1},
                {0, {0, 0}, {128, 16, 37632}, DENSE, TURNED, DENSE, 1},    {0, {0, 0}, {896, 96, 672}, DENSE, DENSE, DENSE, 0},
                {0, {0, 0}, {672, 96, 896}, DENSE, TURNED, DENSE, 1},      {0, {0, 0}, {26880, 384, 128}, DENSE, DENSE, DENSE, 0},
                {0, {0, 0}, {26880, 128, 128}, DENSE, DENSE, SLICE, 0},    {0, {0, 0}, {128, 256, 26880}, DENSE, TURNED, DENSE, 1},
                {0, {0, 0}, {6400, 256, 64}, DENSE, DENSE, DENSE, 0},      {0, {0, 0}, {6400, 64, 192}, DENSE, DENSE, TURNED, 0},
                {2, {896, 4}, {42, 42, 4}, DENSE, HEADS, TURNED_HEADS, 2}, {2, {896, 4}, {42, 4, 42}, HEADS, DENSE, HEADS, 0},
                {2, {640, 16}, {42, 42, 8}, DENSE, DENSE, TURNED, 2},      {2, {640, 16}, {42, 8, 42}, DENSE, DENSE, DENSE, 0},
                {2, {640, 16}, {42, 8, 42}, DENSE, TURNED, DENSE, 0},      {2, {1280, 4}, {5, 5, 16}, DENSE, DENSE, TURNED, 2},
                {2, {1280, 4}, {5, 16, 5}, DENSE, DENSE, DENSE, 0},        {2, {100, 8}, {64, 64, 64}, DENSE, DENSE, TURNED, 0},
                {0, {0, 0}, {1024, 264, 16388}, DENSE, DENSE, DENSE, 0}};
    if (asked("PS_TEST_FULL") && index < LENGTH(step)) {
        build_gemm_case(c, step[index].scales, step[index].batch_rank, step[index].batch, step[index].mnk, step[index].to,
                        step[index].left, step[index].right);
        return 1;
    }
    index -= LENGTH(step);
    if (asked("PS_TEST_FULL") && index < 30) {
        uint64_t random = 2000 + (uint64_t)index;
        int64_t mnk[3], batch[2];
        int64_t largest = index % 3 ? 70 : 700;
        for (int i = 0; i < 3; i++) {
            mnk[i] = random_between(&random, 1, largest);
        }
        batch[0] = random_between(&random, 1, 40);
        batch[1] = random_between(&random, 1, 9);
        static const enum gemm_layout any[] = {DENSE, TURNED, SLICE, TURNED_SLICE, HEADS, TURNED_HEADS};
        build_gemm_case(c, index, index % 3, batch, mnk, any[random_between(&random, 0, 5)], any[random_between(&random, 0, 5)],
                        any[random_between(&random, 0, 5)]);
        return 1;
    }
    return 0;
}

/* Every other case with an addend, c and it dense or slices of wider rows, the bias aligned or not. */
static int build_gemm_bias(struct call *c, int index)
{
    static const int64_t mnk[][3] = {{333, 64, 16},    {210, 192, 64},   {129, 63, 42},   {7, 5, 3},       {1, 16, 16},
                                     {64, 64, 64},     {500, 384, 128},  {33, 1, 9},      {4099, 128, 32}, {40, 48, 672},
                                     {8601, 200, 388}, {22678, 136, 16}, {700, 160, 640}, {17001, 72, 8}};
    if (index >= 8 * LENGTH(mnk)) {
        return 0;
    }
    const int64_t *size = mnk[index / 8], result[2] = {size[0], size[1]}, one = 1;
    int addend = index & 1, slice = index & 2, shifted = index & 4;
    const int64_t stride[2] = {slice ? 3 * size[1] : size[1], 1};
    place_strided(c, 0, REAL, OUT, NORMAL, slice ? size[1] : 0, 2, result, stride);
    place(c, 1, REAL, IN, NORMAL, size[0], size[2]);
    place(c, 2, REAL, IN, NORMAL, size[2], size[1]);
    place_strided(c, 3, PARAMETER, IN, NORMAL, shifted ? 1 : 0, 1, &size[1], &one);
    if (addend) {
        place_strided(c, 4, REAL, IN, NORMAL, slice ? size[1] : 0, 2, result, stride);
    }
    call_label(c, "m %lld n %lld k %lld%s%s%s", (long long)size[0], (long long)size[1], (long long)size[2],
               addend ? " with an addend" : "", slice ? " slice" : "", shifted ? " bias shifted" : "");
    return 1;
}

static int build_gemm_gradient(struct call *c, int index)
{
    static const int64_t mnk[][3] = {
        {64, 16, 333},    {5, 3, 7},        {1, 1, 16},       {132, 36, 1100},  {68, 132, 1060},  {36, 36, 4099},   {40, 136, 1024},
        {136, 40, 1025},  {132, 132, 1030}, {33, 65, 1500},   {8, 8, 256},      {8, 8, 255},      {16, 48, 5000},   {64, 64, 2000},
        {16, 128, 1030},  {24, 136, 600},   {128, 16, 1030},  {264, 24, 700},   {136, 200, 1500}, {128, 128, 4099}, {8, 16384, 256},
        {16384, 8, 300},  {512, 512, 257},  {72, 1024, 300},  {528, 1000, 300}, {584, 576, 257},  {2088, 128, 300}, {72, 3712, 260},
        {300, 200, 1060}, {140, 396, 1100}, {132, 100, 1030}, {160, 1696, 300}, {144, 2000, 257}};
    static const int64_t step[][3] = {{16, 48, 37632},   {16, 16, 37632},   {16, 128, 37632},  {128, 16, 37632},
                                      {128, 384, 26880}, {128, 256, 26880}, {256, 128, 26880}, {2088, 1160, 1024}};
    enum { OTHERS = 6 }; /* of the last ones: dw alone, and x or dy off its alignment */
    const int full = asked("PS_TEST_FULL") ? LENGTH(step) : 0;
    static const int64_t others[OTHERS][3] = {{40, 48, 999},  {56, 72, 999},  {72, 56, 999},
                                              {136, 72, 999}, {64, 64, 1100}, {64, 64, 1100}};
    if (index >= LENGTH(mnk) + OTHERS + full) {
        return 0;
    }
    const int other = index - LENGTH(mnk), alone = other >= 0 && other < 4;
    const int64_t *size = other < 0 ? mnk[index] : other < OTHERS ? others[other] : step[other - OTHERS];
    place(c, 0, PARAMETER, ADD, NORMAL, size[0], size[1]);
    if (!alone) {
        place(c, 1, PARAMETER, ADD, NORMAL, size[1]);
    }
    c->shift = other == 4;
    place(c, 2, REAL, IN, NORMAL, size[2], size[0]);
    c->shift = other == 5;
    place(c, 3, REAL, IN, NORMAL, size[2], size[1]);
    call_label(c, "m %lld n %lld k %lld%s%s", (long long)size[0], (long long)size[1], (long long)size[2], alone ? " dw alone" : "",
               other == 4   ? " x shifted"
               : other == 5 ? " dy shifted"
                            : "");
    return 1;
}

/* -1, 0 or 1, and of a bias half of an odd number: what the product and the bias come to is exact in every precision, and never 0,
 * where ReLU's slope jumps. */
static void make_whole(struct call *c, int slot, int halves)
{
    const int64_t count = operand_count(&c->operands[slot]);
    for (int64_t i = 0; i < count; i++) {
        const double x = (double)random_between(&c->random, -1, 1);
        set_value(c, slot, i, halves ? x + 0.5 : x);
    }
}

/* Rows of one tile, of several, of so many that sums are merged twice, and of several tiles a warp of 132 multiprocessors; the last
 * two have tiles of 96 columns, one a block and two. float32 takes the larger of them. */
static const int64_t finished_sizes[][3] = {
    {333, 64, 16},    {129, 48, 16},     {2, 16, 16},      {7, 8, 8},        {500, 384, 128},  {4099, 128, 40},   {9001, 24, 16},
    {260, 200, 72},   {65, 136, 264},    {300, 16, 520},   {128, 40, 192},   {2500, 192, 96},  {2061, 1128, 520}, {4097, 232, 520},
    {1100, 72, 1032}, {1700, 376, 1096}, {36111, 72, 128}, {1027, 264, 264}, {1500, 200, 344}, {700, 160, 640},   {6000, 288, 520}};

/* Rows so many that each of 132 multiprocessors holds several tiles of columns, of one slice and of two. In the first and the last
 * three an activation and its slope have six warpgroups a block: with a tile each, two tiles of columns each, two turns of two
 * panels. */
static const int64_t held_sizes[][3] = {{22678, 136, 16}, {21701, 72, 16}, {25609, 200, 16}, {54919, 200, 16},
                                        {34001, 40, 72},  {19501, 200, 8}, {23000, 136, 72}};

/* Every end, with sums over rows and without, of weights as they lie and turned. Of an activation some keep no slope. */
static int build_gemm_finish(struct call *c, int index)
{
    static const enum ps_finish ends[] = {PS_FINISH_SUM,      PS_FINISH_SUM,        PS_FINISH_SUM,  PS_FINISH_RESIDUAL,
                                          PS_FINISH_RESIDUAL, PS_FINISH_ACTIVATION, PS_FINISH_SLOPE};
    static const char *const names[] = {"sum",  "sum with an addend", "sum, counted", "residual", "residual, counted", "activation",
                                        "slope"};
    static const enum ps_activation activations[] = {PS_GELU_TANH, PS_GELU, PS_RELU};
    const int size = index / LENGTH(ends), which = index % LENGTH(ends);
    if (size >= LENGTH(finished_sizes) + LENGTH(held_sizes)) {
        return 0;
    }
    const int64_t *const mnk = size < LENGTH(finished_sizes) ? finished_sizes[size] : held_sizes[size - LENGTH(finished_sizes)];
    const int64_t m = mnk[0], n = mnk[1], depth = mnk[2];
    const int64_t weight[2] = {depth, n}, turned[2] = {1, depth}, lies[2] = {n, 1};
    const enum ps_finish finish = ends[which];
    const int forward = finish == PS_FINISH_RESIDUAL || finish == PS_FINISH_ACTIVATION, counted = which == 2 || which == 4;
    const int unkept = finish == PS_FINISH_ACTIVATION && size % 8 == 1;
    struct ps_gemm_finish *a = &c->arguments.gemm_finish;
    place(c, 0, REAL, OUT, NORMAL, m, n);
    if ((finish == PS_FINISH_ACTIVATION && !unkept) || finish == PS_FINISH_SLOPE) {
        place(c, 1, REAL, forward ? OUT : IN, NORMAL, m, n);
    }
    if (finish == PS_FINISH_SUM && counted) {
        place(c, 2, STATISTICS, OUT, NORMAL, 2, n);
        place(c, 3, PARAMETER, ADD, NORMAL, n);
        place(c, 4, PARAMETER, ADD, NORMAL, n);
        place(c, 5, STATISTICS, IN, NORMAL, n);
        place(c, 6, STATISTICS, IN, POSITIVE, n);
        place(c, 13, REAL, IN, NORMAL, m, n);
    } else if (counted) {
        place(c, 5, STATISTICS, OUT, NORMAL, n);
        place(c, 6, STATISTICS, OUT, NORMAL, n);
        place(c, 7, STATISTICS, ADD, NORMAL, n);
        place(c, 8, STATISTICS, ADD, POSITIVE, n);
    }
    place(c, 9, REAL, IN, NORMAL, m, depth);
    place_strided(c, 10, REAL, IN, NORMAL, 0, 2, weight, forward ? lies : turned);
    if (forward) {
        place(c, 11, PARAMETER, IN, NORMAL, n);
    }
    if (finish == PS_FINISH_RESIDUAL || which == 1 || (which == 2 && size % 2)) {
        place(c, 12, REAL, IN, NORMAL, m, n);
    }
    const int scaled = finish == PS_FINISH_RESIDUAL && (size + which) % 2;
    if (scaled) {
        place(c, 14, PARAMETER, IN, NORMAL, n);
        place(c, 15, PARAMETER, IN, NORMAL, n);
    }
    const char *p = forward ? SET_DROPOUT(c, size, gemm_finish) : "";
    c->has_dropout = 0; /* not every output is dropped */
    a->finish = finish;
    a->activation = activations[size % LENGTH(activations)];
    if (finish == PS_FINISH_ACTIVATION && a->activation == PS_RELU) {
        make_whole(c, 9, 0);
        make_whole(c, 10, 0);
        make_whole(c, 11, 1);
    }
    a->momentum = 0.1;
    a->epsilon = 1e-5;
    call_label(c, "m %lld n %lld k %lld %s%s%s", (long long)m, (long long)n, (long long)depth, names[which],
               scaled   ? ", scaled"
               : unkept ? ", nothing kept"
                        : "",
               p);
    return 1;
}

/* The ends that are a norm of rows or its backward, LayerNorm and RMSNorm; besides those sizes rows of several tiles a warpgroup,
 * of each width that kernels have, and as many terms as leave fewer warpgroups or short rings. */
static int build_gemm_finish_normed(struct call *c, int index)
{
    static const int64_t more[][3] = {{60000, 32, 64},   {40011, 64, 72},  {9000, 40, 1000},  {700, 64, 1280},  {700, 32, 1280},
                                      {34001, 128, 136}, {17001, 96, 200}, {9000, 80, 200},   {1001, 120, 704}, {200, 104, 8},
                                      {5000, 72, 64},    {9001, 144, 288}, {20003, 160, 160}, {700, 192, 448},  {17001, 256, 256},
                                      {301, 200, 320},   {17001, 136, 8},  {9001, 200, 8},    {70, 248, 72}};
    static const char *const names[] = {"residual, LayerNorm",  "residual, RMSNorm", "sum, LayerNorm, masked",
                                        "sum, RMSNorm, masked", "sum, LayerNorm",    "sum, RMSNorm"};
    const int size = index / LENGTH(names), which = index % LENGTH(names), centred = which % 2 == 0, masked = which / 2 == 1;
    if (size >= LENGTH(finished_sizes) + LENGTH(more)) {
        return 0;
    }
    const int64_t *const mnk = size < LENGTH(finished_sizes) ? finished_sizes[size] : more[size - LENGTH(finished_sizes)];
    const int64_t m = mnk[0], n = mnk[1], depth = mnk[2];
    const int64_t weight[2] = {depth, n}, turned[2] = {1, depth}, lies[2] = {n, 1};
    const int forward = which < 2;
    const enum mode statistics = forward ? OUT : IN;
    struct ps_gemm_finish *a = &c->arguments.gemm_finish;
    place(c, 0, REAL, OUT, NORMAL, m, n);
    if (!forward) {
        place(c, 3, PARAMETER, ADD, NORMAL, n);
    }
    if (!forward && centred) {
        place(c, 4, PARAMETER, ADD, NORMAL, n);
    }
    place(c, 9, REAL, IN, NORMAL, m, depth);
    place_strided(c, 10, REAL, IN, NORMAL, 0, 2, weight, forward ? lies : turned);
    if (forward) {
        place(c, 11, PARAMETER, IN, NORMAL, n);
    }
    if (forward || masked || size % 2) {
        place(c, 12, REAL, IN, NORMAL, m, n);
    }
    place(c, forward ? 16 : 13, REAL, forward ? OUT : IN, NORMAL, m, n);
    if (masked) {
        place(c, 17, REAL, OUT, NORMAL, m, n);
        place(c, 18, PARAMETER, ADD, NORMAL, n);
    }
    if (centred) {
        place(c, 19, STATISTICS, statistics, NORMAL, m);
    }
    place(c, 20, STATISTICS, statistics, forward ? NORMAL : POSITIVE, m);
    place(c, 21, PARAMETER, IN, NORMAL, n);
    if (forward && centred) {
        place(c, 22, PARAMETER, IN, NORMAL, n);
    }
    const char *p = forward || masked ? SET_DROPOUT(c, size + 1, gemm_finish) : "";
    c->has_dropout = 0; /* not every output is dropped */
    a->finish = forward ? PS_FINISH_RESIDUAL : PS_FINISH_SUM;
    a->epsilon = size % 2 ? 0.5 : 1e-5;
    call_label(c, "m %lld n %lld k %lld %s%s%s", (long long)m, (long long)n, (long long)depth, names[which],
               !forward && c->operands[12].buffer >= 0 ? " with an addend" : "", p);
    return 1;
}

/* Weights of more rows than a block has lines and of less, of whole tiles of columns and others. */
static int fold_size(int index, int64_t *d, int64_t *n)
{
    static const int64_t sizes[][2] = {{128, 384}, {16, 48}, {7, 5}, {1, 1}, {33, 9}, {200, 136}};
    if (index >= LENGTH(sizes)) {
        return 0;
    }
    *d = sizes[index][0], *n = sizes[index][1];
    return 1;
}

static int build_batchnorm_fold(struct call *c, int index)
{
    int64_t d, n;
    if (!fold_size(index, &d, &n)) {
        return 0;
    }
    place(c, 0, REAL, OUT, NORMAL, d, n);
    place(c, 1, PARAMETER, OUT, NORMAL, n);
    place(c, 2, PARAMETER, OUT, NORMAL, d);
    place(c, 3, PARAMETER, OUT, NORMAL, d);
    place(c, 4, REAL, IN, NORMAL, d, n);
    place(c, 5, PARAMETER, IN, NORMAL, n);
    place(c, 6, STATISTICS, IN, NORMAL, d);
    place(c, 7, STATISTICS, IN, POSITIVE, d);
    place(c, 8, PARAMETER, IN, NORMAL, d);
    place(c, 9, PARAMETER, IN, NORMAL, d);
    c->sums_rounded = 1; /* bias_out is of w_out as it is stored */
    c->arguments.batchnorm_fold.epsilon = 1e-5;
    call_label(c, "[%lld, %lld]", (long long)d, (long long)n);
    return 1;
}

/* Tensor `slot` of layers further apart than they are long. */
static void place_layers(struct call *c, int slot, enum role role, enum mode mode, int64_t layers, int64_t units, int64_t n)
{
    place_strided(c, slot, role, mode, NORMAL, slot, 3, (int64_t[]){layers, units, n}, (int64_t[]){units * n + 13, n, 1});
}

static int build_batchnorm_unfold(struct call *c, int index)
{
    const int64_t layers = 1 + index % 3;
    int64_t d, n;
    if (!fold_size(index, &d, &n)) {
        return 0;
    }
    place_layers(c, 0, PARAMETER, ADD, layers, d, n);
    place_strided(c, 1, PARAMETER, ADD, NORMAL, 1, 2, (int64_t[]){layers, n}, (int64_t[]){n + 5, 1});
    place(c, 2, PARAMETER, ADD, NORMAL, layers, d, n);
    place(c, 3, PARAMETER, ADD, NORMAL, layers, n);
    for (int i = 4; i < 6; i++) { /* scale and shift: the halves of a layer's line */
        place_strided(c, i, PARAMETER, IN, NORMAL, 0, 2, (int64_t[]){layers, d}, (int64_t[]){2 * d, 1});
    }
    call_label(c, "%lld layers [%lld, %lld]", (long long)layers, (long long)d, (long long)n);
    return 1;
}

/* Weights around attention, few columns in slots from `few` on, many in those from `many` on. */
static int padded_heads(struct call *c, int index, int few, int many, enum role weight, enum mode to, enum mode from)
{
    static const int64_t sizes[][5] = {{3, 12, 3, 4, 8},  {1, 15, 3, 5, 8}, {2, 26, 1, 26, 32},  {1, 1, 1, 1, 1}, {2, 72, 8, 9, 16},
                                       {1, 7, 2, 12, 13}, {2, 16, 2, 8, 8}, {3, 120, 12, 10, 16}}; /* layers, d, h, e, wide */
    if (index >= LENGTH(sizes)) {
        return 0;
    }
    const int64_t *size = sizes[index], layers = size[0], d = size[1], h = size[2], e = size[3], wide = size[4];
    place_layers(c, few, weight, few ? from : to, layers, 3 * d * h, e);
    place_layers(c, few + 1, weight, few ? from : to, layers, h, e * d);
    place_layers(c, few + 2, PARAMETER, few ? from : to, layers, 3 * h, e);
    place(c, many, weight, few ? to : from, NORMAL, layers, 3 * d * h, wide);
    place(c, many + 1, weight, few ? to : from, NORMAL, layers, h, wide * d);
    place(c, many + 2, PARAMETER, few ? to : from, NORMAL, layers, 3 * h, wide);
    call_label(c, "%lld layers, d %lld, %lld heads of %lld in %lld", (long long)layers, (long long)d, (long long)h, (long long)e,
               (long long)wide);
    return 1;
}

static int build_pad_heads(struct call *c, int index)
{
    return padded_heads(c, index, 3, 0, REAL, OUT, IN);
}

static int build_unpad_heads(struct call *c, int index)
{
    return padded_heads(c, index, 0, 3, PARAMETER, ADD, ADD);
}

/* ---- within rows, and sums over them ---- */

static int layernorm_call(struct call *c, int index, int centred)
{
    int64_t rows, d;
    if (!row_size(index, &rows, &d)) {
        return 0;
    }
    place(c, 0, REAL, OUT, NORMAL, rows, d);
    if (centred) {
        place(c, 1, STATISTICS, OUT, NORMAL, rows);
    }
    place(c, 2, STATISTICS, OUT, NORMAL, rows);
    place(c, 3, REAL, IN, NORMAL, rows, d);
    place(c, 4, PARAMETER, IN, NORMAL, d);
    if (centred) {
        place(c, 5, PARAMETER, IN, NORMAL, d);
    }
    c->arguments.layernorm.epsilon = index % 2 ? 0.5 : 1e-5; /* the first shows in every precision */
    call_label(c, "[%lld, %lld]%s", (long long)rows, (long long)d, centred ? "" : " RMSNorm");
    return 1;
}

static int build_layernorm(struct call *c, int index)
{
    return layernorm_call(c, index, 1);
}

static int build_rmsnorm(struct call *c, int index)
{
    return layernorm_call(c, index, 0);
}

/* Every width that 16 bits have a kernel for, with an addend and masked and without either; as many rows as take their rings round
 * on 132 multiprocessors, with all and with nothing; then row_size's. */
static int row_backward_size(int index, int64_t *rows, int64_t *d)
{
    static const int64_t widths[] = {16, 32, 64, 96, 128, 192, 256, 384, 512, 1024};
    static const int64_t many[][2] = {{13001, 256}, {20001, 72}, {200001, 8}, {9001, 192}};
    if (index < 4 * LENGTH(widths)) {
        *rows = 9;
        *d = widths[index / 4];
        return 1;
    }
    index -= 4 * LENGTH(widths);
    if (index < LENGTH(many)) {
        *rows = many[index][0];
        *d = many[index][1];
        return 1;
    }
    return row_size(index - LENGTH(many), rows, d);
}

static int layernorm_backward_call(struct call *c, int index, int centred)
{
    int64_t rows, d;
    if (!row_backward_size(index, &rows, &d)) {
        return 0;
    }
    place(c, 0, REAL, OUT, NORMAL, rows, d);
    place(c, 1, PARAMETER, ADD, NORMAL, d);
    if (centred) {
        place(c, 2, PARAMETER, ADD, NORMAL, d);
    }
    place(c, 3, REAL, IN, NORMAL, rows, d);
    place(c, 4, REAL, IN, NORMAL, rows, d);
    if (centred) {
        place(c, 5, STATISTICS, IN, NORMAL, rows);
    }
    place(c, 6, STATISTICS, IN, POSITIVE, rows);
    place(c, 7, PARAMETER, IN, NORMAL, d);
    if (index & 1) {
        place(c, 8, REAL, IN, NORMAL, rows, d);
    }
    const char *p = "";
    if (index & 2) {
        place(c, 9, REAL, OUT, NORMAL, rows, d);
        place(c, 10, PARAMETER, ADD, NORMAL, d);
        p = SET_DROPOUT(c, index / 2, layernorm_backward);
        c->has_dropout = 0; /* not every output is dropped */
        c->sums_rounded = 1;
    }
    call_label(c, "[%lld, %lld]%s%s%s%s", (long long)rows, (long long)d, centred ? "" : " RMSNorm",
               index & 1 ? " with an addend" : "", index & 2 ? " masked" : "", p);
    return 1;
}

static int build_layernorm_backward(struct call *c, int index)
{
    return layernorm_backward_call(c, index, 1);
}

static int build_rmsnorm_backward(struct call *c, int index)
{
    return layernorm_backward_call(c, index, 0);
}

/* ---- over the rows of a column ---- */

/* Those of row_size with two rows at least, and large ones. */
static int batch_size(int index, int64_t *rows, int64_t *d)
{
    static const int64_t more[][2] = {{20011, 65}, {70001, 16}, {20113, 104}};
    if (index < LENGTH(more)) {
        *rows = more[index][0];
        *d = more[index][1];
        return 1;
    }
    int built = row_size(index - LENGTH(more), rows, d);
    *rows += *rows == 1;
    return built;
}

/* Where column i lies, and how far about. In fp32 a sum of squares keeps no digit of a variance of 0.01 about 1000. The first
 * column varies in every precision. */
static void column_place(int index, int64_t i, double *centre, double *spread)
{
    static const double places[][2] = {{0, 1}, {1000, 0.1}, {-30, 0.5}, {3, 0.01}};
    const double *place = places[index % 3 == 0 ? 0 : index % 3 == 1 ? 1 : i % LENGTH(places)];
    *centre = i == 0 ? 0 : place[0];
    *spread = place[1];
}

static const char *const column_names[] = {"", " about 1000", " about several"};

/* x = centre + spread x for every column of tensor `slot`, whose last dimension the columns are. */
static void place_columns(struct call *c, int slot, int index, int64_t d)
{
    int64_t count = operand_count(&c->operands[slot]);
    for (int64_t i = 0; i < count; i++) {
        double centre, spread;
        column_place(index, i % d, &centre, &spread);
        set_value(c, slot, i, (float)(centre + spread * get_value(c, slot, i)));
    }
}

/* mean and var of no batch, but near x's: their gradient would be all cancellation where rows are few. */
static void place_moments(struct call *c, int mean, int var, int index, int64_t d)
{
    place(c, mean, STATISTICS, IN, NORMAL, d);
    place_columns(c, mean, index, d);
    place(c, var, STATISTICS, IN, POSITIVE, d);
    for (int64_t i = 0; i < d; i++) {
        double centre, spread;
        column_place(index, i, &centre, &spread);
        set_value(c, var, i, (float)(spread * spread * get_value(c, var, i)));
    }
}

static int build_batchnorm_statistics(struct call *c, int index)
{
    int64_t rows, d;
    if (!batch_size(index, &rows, &d)) {
        return 0;
    }
    place(c, 0, STATISTICS, OUT, NORMAL, d);
    place(c, 1, STATISTICS, OUT, NORMAL, d);
    place(c, 2, STATISTICS, ADD, NORMAL, d);
    place(c, 3, STATISTICS, ADD, POSITIVE, d);
    place(c, 4, REAL, IN, NORMAL, rows, d);
    place_columns(c, 4, index, d);
    c->arguments.batchnorm_statistics.momentum = index % 2 ? 0.1 : 0.75;
    call_label(c, "[%lld, %lld]%s", (long long)rows, (long long)d, column_names[index % 3]);
    return 1;
}

static int build_batchnorm_join(struct call *c, int index)
{
    static const struct ps_shares all[] = {{7, 1, 2}, {5, 4, 4}, {1000, 1, 3}, {2, 1, 1}};
    int64_t rows, d;
    if (index >= 2 * LENGTH(all) || !row_size(index, &rows, &d)) {
        return 0;
    }
    const struct ps_shares shares = all[index % LENGTH(all)];
    place(c, 0, STATISTICS, OUT, NORMAL, d);
    place(c, 1, STATISTICS, OUT, NORMAL, d);
    place(c, 2, STATISTICS, ADD, NORMAL, d);
    place(c, 3, STATISTICS, ADD, POSITIVE, d);
    place(c, 4, STATISTICS, IN, POSITIVE, shares.ranks, 2, d);
    for (int64_t i = 0; i < shares.ranks * 2 * d; i++) { /* those of no rows are not read */
        if (ps_share_count(&shares, (int)(i / (2 * d))) == 0) {
            set_value(c, 4, i, NAN);
        }
    }
    c->arguments.batchnorm_join.shares = shares;
    c->arguments.batchnorm_join.rows = 1 + 41 * (index % 2);
    c->arguments.batchnorm_join.momentum = index % 2 ? 0.1 : 0.75;
    call_label(c, "%d ranks, %lld windows by %lld, [%lld]", shares.ranks, (long long)shares.windows, (long long)shares.granule,
               (long long)d);
    return 1;
}

static int build_batchnorm(struct call *c, int index)
{
    int64_t rows, d;
    if (!batch_size(index, &rows, &d)) {
        return 0;
    }
    place(c, 0, REAL, OUT, NORMAL, rows, d);
    place(c, 1, REAL, IN, NORMAL, rows, d);
    place_columns(c, 1, index, d);
    place_moments(c, 2, 3, index, d);
    place(c, 4, PARAMETER, IN, NORMAL, d);
    place(c, 5, PARAMETER, IN, NORMAL, d);
    c->arguments.batchnorm.epsilon = index % 2 ? 0.5 : 1e-5;
    call_label(c, "[%lld, %lld]%s", (long long)rows, (long long)d, column_names[index % 3]);
    return 1;
}

/* Its sums alone are of rows that are a fifth of all. */
static int build_batchnorm_backward(struct call *c, int index)
{
    static const char *const names[] = {
        "",           " with more",          " with an addend", " with means and an addend", " with means, masked",
        ", its sums", ", its sums with more"};
    int64_t rows, d;
    int other = index % LENGTH(names), size = index / LENGTH(names);
    if (!batch_size(size, &rows, &d)) {
        return 0;
    }
    if (other < 5) {
        place(c, 0, REAL, OUT, NORMAL, rows, d);
    }
    place(c, 1, PARAMETER, ADD, NORMAL, d);
    place(c, 2, PARAMETER, ADD, NORMAL, d);
    place(c, 4, REAL, IN, NORMAL, rows, d);
    if (other == 1 || other == 6) {
        place(c, 5, REAL, IN, NORMAL, rows, d);
    }
    place(c, 6, REAL, IN, NORMAL, rows, d);
    place_columns(c, 6, size + other, d);
    place_moments(c, 7, 8, size + other, d);
    place(c, 9, PARAMETER, IN, NORMAL, d);
    if (other == 2 || other == 3) {
        place(c, 10, REAL, IN, NORMAL, rows, d);
    }
    if (other >= 3) {
        place(c, 11, STATISTICS, other >= 5 ? OUT : IN, NORMAL, 2, d);
    }
    const char *p = "";
    if (other == 4) {
        place(c, 3, REAL, OUT, NORMAL, rows, d);
        p = SET_DROPOUT(c, size, batchnorm_backward);
        c->has_dropout = 0; /* not every output is dropped */
    }
    c->arguments.batchnorm_backward.rows = 5 * rows;
    c->arguments.batchnorm_backward.epsilon = size % 2 ? 0.5 : 1e-5;
    call_label(c, "[%lld, %lld]%s%s%s", (long long)rows, (long long)d, column_names[(size + other) % 3], names[other], p);
    return 1;
}

/* Tensor `slot` again, in few bits: normal values times `spread`, about `centre`, to the next multiple of `step`. */
static void place_steps(struct call *c, int slot, double centre, double spread, double step)
{
    int64_t count = operand_count(&c->operands[slot]);
    for (int64_t i = 0; i < count; i++) {
        set_value(c, slot, i, centre + step * round(spread / step * get_value(c, slot, i)));
    }
}

/* The statistics are those of y as it is stored: its values are such as every precision holds, dropout's scale 2. */
static int build_bias_residual_statistics(struct call *c, int index)
{
    int64_t rows, d;
    if (!batch_size(index / 2, &rows, &d)) {
        return 0;
    }
    int far = index / 2 % 2;
    place(c, 0, REAL, OUT, NORMAL, rows, d);
    place(c, 1, STATISTICS, OUT, NORMAL, d);
    place(c, 2, STATISTICS, OUT, NORMAL, d);
    place(c, 3, STATISTICS, ADD, NORMAL, d);
    place(c, 4, STATISTICS, ADD, POSITIVE, d);
    place(c, 5, REAL, IN, NORMAL, rows, d);
    place_steps(c, 5, 0, far ? 1.5 : 0.5, far ? 1 : 0.125);
    place(c, 6, PARAMETER, IN, NORMAL, d);
    place_steps(c, 6, 0, far ? 1 : 0.25, far ? 1 : 0.125);
    place(c, 7, REAL, IN, NORMAL, rows, d);
    place_steps(c, 7, far ? 192 : 0, far ? 2 : 1, far ? 1 : 0.125);
    const char *p = SET_DROPOUT(c, index % 2 ? 3 : 0, bias_residual_statistics);
    c->has_dropout = 0; /* no output is dropped itself */
    c->arguments.bias_residual_statistics.momentum = 0.1;
    call_label(c, "[%lld, %lld]%s%s", (long long)rows, (long long)d, far ? " about 192" : "", p);
    return 1;
}

static int build_bias_add(struct call *c, int index)
{
    int64_t rows, n;
    if (!row_size(index, &rows, &n)) {
        return 0;
    }
    place(c, 0, REAL, ADD, NORMAL, rows, n);
    place(c, 1, PARAMETER, IN, NORMAL, n);
    call_label(c, "[%lld, %lld]", (long long)rows, (long long)n);
    return 1;
}

/* parts, S, h, N, e */
static int head_size(int index, int64_t *size)
{
    static const int64_t sizes[][5] = {{3, 7, 4, 42, 4}, {1, 1, 1, 1, 1}, {3, 5, 2, 5, 8},  {1, 33, 16, 42, 8},
                                       {3, 2, 3, 13, 7}, {1, 7, 5, 1, 9}, {3, 9, 4, 5, 16}, {2, 3, 1, 65, 63}};
    static const int64_t step[][5] = {{3, 896, 4, 42, 4}, {1, 640, 16, 42, 8}, {3, 640, 16, 42, 8}};
    if (index < LENGTH(sizes)) {
        memcpy(size, sizes[index], sizeof sizes[index]);
        return 1;
    }
    index -= LENGTH(sizes);
    if (asked("PS_TEST_FULL") && index < LENGTH(step)) {
        memcpy(size, step[index], sizeof step[index]);
        return 1;
    }
    return 0;
}

static int build_heads(struct call *c, int index, int heads_slot)
{
    int64_t s[5];
    if (!head_size(index, s)) {
        return 0;
    }
    place(c, heads_slot, REAL, heads_slot == 0 ? OUT : IN, NORMAL, s[0], s[1], s[2], s[3], s[4]);
    place(c, 1 - heads_slot, REAL, heads_slot == 0 ? IN : OUT, NORMAL, s[1] * s[3], s[0] * s[2] * s[4]);
    call_label(c, "parts %lld S %lld h %lld N %lld e %lld", (long long)s[0], (long long)s[1], (long long)s[2], (long long)s[3],
               (long long)s[4]);
    return 1;
}

static int build_head_split(struct call *c, int index)
{
    return build_heads(c, index, 0);
}

static int build_head_merge(struct call *c, int index)
{
    return build_heads(c, index, 1);
}

/* Same-shaped dense tensors: rank 2, or rank 4 for every third. */
static int build_rows(struct call *c, int index, enum role role, int outputs, int inputs)
{
    int64_t rows, n;
    if (!row_size(index, &rows, &n)) {
        return 0;
    }
    int rank = index % 3 == 2 ? 4 : 2;
    int64_t size[4] = {1, 3, rows, n};
    for (int slot = 0; slot < outputs + inputs; slot++) {
        place_dense(c, slot, role, slot < outputs ? OUT : IN, NORMAL, rank, size + 4 - rank);
    }
    call_label(c, "%s[%lld, %lld]", rank == 4 ? "3 x " : "", (long long)rows, (long long)n);
    return 1;
}

static int build_softmax(struct call *c, int index)
{
    return build_rows(c, index, REAL, 1, 1);
}

static int build_softmax_backward(struct call *c, int index)
{
    return build_rows(c, index, REAL, 1, 2);
}

static int build_softmax_backward_addend(struct call *c, int index)
{
    return build_rows(c, index, REAL, 1, 3);
}

static int build_add(struct call *c, int index)
{
    return build_rows(c, index, REAL, 1, 2);
}

static int drop_call(struct call *c, int index, enum role role)
{
    int built = build_rows(c, index / 4, role, 1, 1);
    if (built) {
        const char *p = SET_DROPOUT(c, index, drop);
        strncat(c->label, p, sizeof c->label - strlen(c->label) - 1);
    }
    return built;
}

static int build_drop(struct call *c, int index)
{
    return drop_call(c, index, PARAMETER);
}

static int build_drop_real(struct call *c, int index)
{
    return drop_call(c, index, REAL);
}

static int build_bias_residual_add(struct call *c, int index)
{
    int64_t rows, d;
    if (!row_size(index / 2, &rows, &d)) {
        return 0;
    }
    place(c, 0, REAL, OUT, NORMAL, rows, d);
    place(c, 1, REAL, IN, NORMAL, rows, d);
    place(c, 2, PARAMETER, IN, NORMAL, d);
    place(c, 3, REAL, IN, NORMAL, rows, d);
    const char *p = SET_DROPOUT(c, index, bias_residual_add);
    call_label(c, "[%lld, %lld]%s", (long long)rows, (long long)d, p);
    return 1;
}

static const char *const activation_names[] = {"", " gelu", " relu", " swiglu"};

static int bias_activation_call(struct call *c, int size, int dropout, enum ps_activation activation)
{
    int64_t rows, f;
    if (!row_size(size, &rows, &f)) {
        return 0;
    }
    int64_t width = activation == PS_SWIGLU ? 2 * f : f;
    place(c, 0, REAL, OUT, NORMAL, rows, f);
    place(c, 1, REAL, IN, NORMAL, rows, width);
    place(c, 2, PARAMETER, IN, NORMAL, width);
    c->arguments.bias_activation.activation = activation;
    const char *p = SET_DROPOUT(c, dropout, bias_activation);
    call_label(c, "[%lld, %lld]%s%s", (long long)rows, (long long)f, activation_names[activation], p);
    return 1;
}

static int build_bias_activation(struct call *c, int index)
{
    return bias_activation_call(c, index / 2, index, PS_GELU_TANH);
}

static int build_bias_other_activation(struct call *c, int index)
{
    return bias_activation_call(c, index / 3, index / 3 + index % 3, (enum ps_activation)(PS_GELU + index % 3));
}

static int activation_backward_call(struct call *c, int size, int dropout, enum ps_activation activation)
{
    int64_t rows, f;
    if (!row_size(size, &rows, &f)) {
        return 0;
    }
    int64_t width = activation == PS_SWIGLU ? 2 * f : f;
    place(c, 0, REAL, OUT, NORMAL, rows, width);
    place(c, 1, REAL, IN, NORMAL, rows, f);
    place(c, 2, REAL, IN, NORMAL, rows, width);
    place(c, 3, PARAMETER, IN, NORMAL, width);
    c->arguments.activation_backward.activation = activation;
    const char *p = SET_DROPOUT(c, dropout, activation_backward);
    call_label(c, "[%lld, %lld]%s%s", (long long)rows, (long long)f, activation_names[activation], p);
    return 1;
}

static int build_activation_backward(struct call *c, int index)
{
    return activation_backward_call(c, index / 2, index, PS_GELU_TANH);
}

static int build_other_activation_backward(struct call *c, int index)
{
    return activation_backward_call(c, index / 3, index / 3 + index % 3, (enum ps_activation)(PS_GELU + index % 3));
}

/* R, d, f: blocks of rows that are not full, widths of whole vectors and others, more hidden columns than are drawn for at once. */
static int feed_forward_size(int index, int64_t size[3])
{
    static const int64_t sizes[][3] = {{333, 16, 128}, {7, 5, 3}, {1, 64, 256},   {300, 24, 33}, {127, 63, 42},
                                       {1025, 3, 20},  {5, 8, 1}, {40, 12, 1100}, {252, 48, 64}};
    if (index >= 4 * LENGTH(sizes)) {
        return 0;
    }
    memcpy(size, sizes[index / 4], sizeof sizes[0]);
    return 1;
}

/* What both directions read: x, the weights and b_1 from operand `first` on. */
static void place_feed_forward(struct call *c, int first, const int64_t size[3], int64_t inner)
{
    place(c, first, REAL, IN, NORMAL, size[0], size[1]);
    place(c, first + 1, REAL, IN, NORMAL, size[1], inner);
    place(c, first + 2, PARAMETER, IN, NORMAL, inner);
    place(c, first + 3, REAL, IN, NORMAL, size[2], size[1]);
}

static int build_feed_forward(struct call *c, int index)
{
    struct ps_feed_forward *a = &c->arguments.feed_forward;
    int64_t size[3];
    if (!feed_forward_size(index, size)) {
        return 0;
    }
    const int64_t rows = size[0], d = size[1], f = size[2];
    a->activation = (enum ps_activation)(index % 4);
    const int64_t inner = a->activation == PS_SWIGLU ? 2 * f : f;
    place(c, 0, REAL, OUT, NORMAL, rows, d);
    place_feed_forward(c, 1, size, inner);
    place(c, 5, PARAMETER, IN, NORMAL, d);
    place(c, 6, REAL, IN, NORMAL, rows, d);
    const char *p = set_dropout(c, index / 4 + index, &a->hidden_dropout, offsetof(struct ps_feed_forward, hidden_dropout.state));
    const char *q = set_dropout(c, index / 4 + 1, &a->output_dropout, offsetof(struct ps_feed_forward, output_dropout.state));
    c->has_dropout = 0; /* the output is a sum */
    call_label(c, "[%lld, %lld, %lld]%s%s,%s", (long long)rows, (long long)d, (long long)f, activation_names[a->activation], p, q);
    return 1;
}

/* Every other case with an addend. */
static int build_feed_forward_backward(struct call *c, int index)
{
    struct ps_feed_forward_backward *a = &c->arguments.feed_forward_backward;
    int64_t size[3];
    if (!feed_forward_size(index, size)) {
        return 0;
    }
    const int64_t rows = size[0], d = size[1], f = size[2];
    a->activation = (enum ps_activation)(index % 4);
    const int64_t inner = a->activation == PS_SWIGLU ? 2 * f : f;
    place(c, 0, REAL, OUT, NORMAL, rows, d);
    place(c, 1, PARAMETER, ADD, NORMAL, d, inner);
    place(c, 2, PARAMETER, ADD, NORMAL, inner);
    place(c, 3, PARAMETER, ADD, NORMAL, f, d);
    place(c, 4, PARAMETER, ADD, NORMAL, d);
    place(c, 5, REAL, IN, NORMAL, rows, d);
    place_feed_forward(c, 6, size, inner);
    if (index / 4 % 2) {
        place(c, 10, REAL, IN, NORMAL, rows, d);
    }
    const char *p =
        set_dropout(c, index / 4 + index, &a->hidden_dropout, offsetof(struct ps_feed_forward_backward, hidden_dropout.state));
    const char *q =
        set_dropout(c, index / 4 + 1, &a->output_dropout, offsetof(struct ps_feed_forward_backward, output_dropout.state));
    c->has_dropout = 0;
    call_label(c, "[%lld, %lld, %lld]%s%s,%s%s", (long long)rows, (long long)d, (long long)f, activation_names[a->activation], p, q,
               index / 4 % 2 ? " with an addend" : "");
    return 1;
}

static int build_bias_grad(struct call *c, int index)
{
    int64_t rows, n;
    if (!row_size(index / 3, &rows, &n)) {
        return 0;
    }
    place(c, 0, PARAMETER, ADD, NORMAL, n);
    if (index % 3) {
        place(c, 1, REAL, OUT, NORMAL, rows, n);
    }
    place(c, 2, REAL, IN, NORMAL, rows, n);
    const char *p = SET_DROPOUT(c, index % 3 == 2 ? 1 + 2 * (index / 3 % 2) : 0, bias_grad);
    call_label(c, "[%lld, %lld]%s%s", (long long)rows, (long long)n, index % 3 ? "" : " no masked", p);
    return 1;
}

/* ---- elementary operations ---- */

/* How an operand of an elementary operation lies in memory. */
enum layout {
    PLAIN,
    PERMUTED,      /* the dimensions in reverse order */
    GAPPED,        /* a slice: 3 elements after each row, 5 before the first */
    REPEAT_LAST,   /* stride 0 in the last dimension: a value a row */
    REPEAT_LEADING /* stride 0 in all but the last: one row */
};

static const char *const layout_names[] = {"plain", "permuted", "gapped", "repeat last", "repeat leading"};

static void place_layout(struct call *c, int slot, enum role role, enum mode mode, enum fill fill, int rank, const int64_t *size,
                         enum layout layout)
{
    int64_t stride[PS_MAX_RANK] = {0}, step = 1;
    if (layout == PERMUTED) {
        for (int i = 0; i < rank; i++) {
            stride[i] = step;
            step *= size[i];
        }
    } else {
        for (int i = rank - 1; i >= 0; i--) {
            int repeated = (layout == REPEAT_LAST && i == rank - 1) || (layout == REPEAT_LEADING && i < rank - 1);
            stride[i] = repeated ? 0 : step;
            step *= repeated ? 1 : size[i];
            step += layout == GAPPED && i == rank - 1 ? 3 : 0;
        }
    }
    place_strided(c, slot, role, mode, fill, layout == GAPPED ? 5 : 0, rank, size, stride);
}

static const struct {
    int rank;
    int64_t size[PS_MAX_RANK];
} elementary_sizes[] = {{1, {7}},
                        {2, {1, 1}},
                        {2, {333, 5}},
                        {2, {42, 64}},
                        {4, {2, 3, 42, 16}},
                        {5, {2, 3, 5, 7, 11}},
                        {4, {1, 65, 1, 63}},
                        {2, {3, 2100}},
                        {3, {128, 5, 42}},
                        /* of a training step, in full only */
                        {2, {37632, 16}},
                        {5, {3, 224, 4, 42, 4}},
                        {3, {896, 42, 42}}};

static int elementary_count(void)
{
    return asked("PS_TEST_FULL") ? LENGTH(elementary_sizes) : LENGTH(elementary_sizes) - 3;
}

static void label_elementary(struct call *c, int shape, const char *what, const char *y, const char *a, const char *b)
{
    char sizes[80] = "";
    for (int i = 0; i < elementary_sizes[shape].rank; i++) {
        size_t used = strlen(sizes);
        snprintf(sizes + used, sizeof sizes - used, "%s%lld", i ? "x" : "", (long long)elementary_sizes[shape].size[i]);
    }
    call_label(c, "%s %s: %s <- %s%s%s", what, sizes, y, a, b ? ", " : "", b ? b : "");
}

/* y and x of a unary, affine or copying operation. */
static int build_pair(struct call *c, int index, enum role y, enum role x, enum fill fill, const char *what)
{
    static const enum layout pairs[][2] = {{PLAIN, PLAIN},     {PLAIN, PERMUTED},      {PERMUTED, PLAIN},
                                           {GAPPED, GAPPED},   {PLAIN, REPEAT_LAST},   {PLAIN, REPEAT_LEADING},
                                           {GAPPED, PERMUTED}, {PERMUTED, REPEAT_LAST}};
    int shape = index / LENGTH(pairs), pair = index % LENGTH(pairs);
    if (shape >= elementary_count()) {
        return 0;
    }
    int rank = elementary_sizes[shape].rank;
    place_layout(c, 0, y, OUT, NORMAL, rank, elementary_sizes[shape].size, pairs[pair][0]);
    place_layout(c, 1, x, IN, fill, rank, elementary_sizes[shape].size, pairs[pair][1]);
    label_elementary(c, shape, what, layout_names[pairs[pair][0]], layout_names[pairs[pair][1]], NULL);
    return 1;
}

static int build_affine(struct call *c, int index)
{
    static const double values[][2] = {{1, 0}, {0.125, 0}, {-2.5, 0.75}, {0, 1.5}};
    c->arguments.affine.scale = values[index % 4][0];
    c->arguments.affine.shift = values[index % 4][1];
    return build_pair(c, index, PARAMETER, PARAMETER, NORMAL, "affine");
}

static int build_unary(struct call *c, int index)
{
    static const char *const names[] = {"exp", "tanh", "square", "rsqrt", "reciprocal", "erf", "max_0", "step"};
    enum ps_unary_function function = (enum ps_unary_function)(index % LENGTH(names));
    c->arguments.unary.function = function;
    int built = build_pair(c, index / LENGTH(names), PARAMETER, PARAMETER,
                           function == PS_RSQRT || function == PS_RECIPROCAL ? POSITIVE : NORMAL, names[function]);
    if (built && (function == PS_MAX_0 || function == PS_STEP)) {
        set_value(c, 1, 0, 0);
    }
    return built;
}

static int build_strided_copy(struct call *c, int index)
{
    static const enum role roles[][2] = {{PARAMETER, PARAMETER}, {REAL, PARAMETER}, {PARAMETER, REAL}, {REAL, REAL}};
    return build_pair(c, index / 4, roles[index % 4][0], roles[index % 4][1], NORMAL, "copy");
}

static int build_binary(struct call *c, int index)
{
    static const char *const names[] = {"add", "subtract", "multiply", "divide"};
    static const enum layout triples[][3] = {
        {PLAIN, PLAIN, PLAIN},    {PLAIN, PLAIN, REPEAT_LAST}, {PLAIN, PLAIN, REPEAT_LEADING}, {PLAIN, REPEAT_LAST, PLAIN},
        {GAPPED, GAPPED, GAPPED}, {PERMUTED, PLAIN, GAPPED},   {PLAIN, PERMUTED, PLAIN},       {GAPPED, REPEAT_LEADING, PERMUTED}};
    enum ps_binary_function function = (enum ps_binary_function)(index % 4);
    const enum layout *triple = triples[index / 4 % LENGTH(triples)];
    int shape = index / 4 / LENGTH(triples);
    if (shape >= elementary_count()) {
        return 0;
    }
    int rank = elementary_sizes[shape].rank;
    const int64_t *size = elementary_sizes[shape].size;
    c->arguments.binary.function = function;
    place_layout(c, 0, PARAMETER, OUT, NORMAL, rank, size, triple[0]);
    place_layout(c, 1, PARAMETER, IN, NORMAL, rank, size, triple[1]);
    place_layout(c, 2, PARAMETER, IN, function == PS_DIVIDE ? POSITIVE : NORMAL, rank, size, triple[2]);
    label_elementary(c, shape, names[function], layout_names[triple[0]], layout_names[triple[1]], layout_names[triple[2]]);
    return 1;
}

static int build_reduce(struct call *c, int index)
{
    static const char *const names[] = {"sum", "sum +=", "max"};
    static const enum layout pairs[][2] = {{PLAIN, PLAIN},   {PLAIN, PERMUTED},       {PERMUTED, PLAIN},
                                           {GAPPED, GAPPED}, {PLAIN, REPEAT_LEADING}, {PERMUTED, REPEAT_LAST}};
    int what = index % 3, shape = index / 3 / LENGTH(pairs);
    const enum layout *pair = pairs[index / 3 % LENGTH(pairs)];
    if (shape >= elementary_count()) {
        return 0;
    }
    int rank = elementary_sizes[shape].rank;
    const int64_t *size = elementary_sizes[shape].size;
    int64_t sums = 1;
    for (int i = 0; i < rank - 1; i++) {
        sums *= size[i];
    }
    enum fill fill = sums < 16 ? POSITIVE : NORMAL; /* as in gemm */
    c->arguments.reduce.function = what == 2 ? PS_MAX : PS_SUM;
    c->arguments.reduce.accumulate = what == 1;
    place_layout(c, 0, PARAMETER, what == 1 ? ADD : OUT, fill, rank - 1, size, pair[0]);
    place_layout(c, 1, PARAMETER, IN, fill, rank, size, pair[1]);
    label_elementary(c, shape, names[what], layout_names[pair[0]], layout_names[pair[1]], NULL);
    return 1;
}

/* ---- windows in, forecasts out ---- */

/* Windows: B of them out of W, L (or H) values of C channels; ready made, or views of a series in which they overlap. */
struct window_size {
    int64_t batch, channels, windows, length, horizon, patch, stride;
    int pad_end, revin, series;
    uint64_t cursor;
};

static const struct window_size window_sizes[] = {{4, 7, 30, 336, 96, 16, 8, 1, 1, 1, 3},
                                                  {3, 20, 9, 24, 1, 8, 4, 0, 1, 0, 6},
                                                  {5, 3, 11, 37, 5, 5, 3, 1, 1, 1, 0},
                                                  {5, 3, 11, 37, 5, 5, 3, 0, 0, 0, 5},
                                                  {1, 1, 1, 16, 1, 16, 8, 0, 1, 0, 0},
                                                  {1, 1, 2, 5, 63, 1, 1, 1, 0, 1, 1},
                                                  {2, 65, 5, 65, 42, 7, 9, 1, 1, 1, 2},
                                                  {7, 2, 40, 512, 7, 64, 32, 1, 1, 0, 9},
                                                  {2, 1, 4, 96, 720, 16, 8, 1, 0, 1, 1},
                                                  {3, 50, 9, 24, 96, 8, 4, 0, 1, 1, 2},
                                                  {2, 2, 3, 12301, 5, 100, 90, 1, 1, 0, 1}, /* in parts */
                                                  {2, 21, 2, 12912, 1, 16, 16, 0, 1, 1, 1},
                                                  {1, 3, 2, 5009, 1, 4, 10, 1, 1, 1, 0}, /* the last one begins behind the end */
                                                  {1, 3, 2, 4100, 1, 24, 8, 1, 0, 1, 0},
                                                  {1, 2, 2, 13000, 16, 12400, 300, 0, 1, 1, 0}, /* more than shared memory */
                                                  {300, 1, 40, 36, 3, 12, 6, 1, 1, 1, 2},       /* several sequences a block */
                                                  {130, 3, 20, 40, 5, 12, 12, 0, 1, 0, 3},
                                                  {47, 23, 12, 30, 4, 10, 10, 0, 1, 1, 1},
                                                  {400, 7, 30, 24, 2, 6, 6, 1, 0, 1, 0},
                                                  /* in full only: ETTh1, seed28k, 321 channels */
                                                  {128, 7, 8209, 336, 96, 16, 8, 1, 1, 1, 4096},
                                                  {64, 20, 2000, 24, 1, 8, 4, 0, 1, 0, 640},
                                                  {4, 321, 200, 336, 96, 16, 8, 1, 1, 1, 64}};

static int window_size(int index, struct window_size *w)
{
    if (index >= (asked("PS_TEST_FULL") ? LENGTH(window_sizes) : LENGTH(window_sizes) - 3)) {
        return 0;
    }
    *w = window_sizes[index];
    return 1;
}

static void place_windows(struct call *c, int slot, const struct window_size *w, int64_t length)
{
    int64_t size[] = {w->windows, w->channels, length};
    int64_t ready[] = {w->channels * length, length, 1}, series[] = {w->channels, 1, w->channels};
    place_strided(c, slot, PARAMETER, IN, NORMAL, 0, 3, size, w->series ? series : ready);
}

/* Indices of the epoch's windows; those before the cursor must not be looked at. */
static void place_indices(struct call *c, int slot, const struct window_size *w)
{
    int64_t count = (int64_t)w->cursor + w->batch + 2;
    place(c, slot, INDEX, IN, NORMAL, count);
    for (int64_t i = 0; i < count; i++) {
        int needed = i >= (int64_t)w->cursor && i < (int64_t)w->cursor + w->batch;
        set_value(c, slot, i, needed ? (double)random_between(&c->random, 0, w->windows - 1) : -1);
    }
    set_value(c, slot, (int64_t)w->cursor, (double)(w->windows - 1));
    c->state.cursor = w->cursor;
}

static int gather_patches_call(struct call *c, int index, int from_end, int subtract_last)
{
    struct window_size w;
    if (!window_size(index, &w)) {
        return 0;
    }
    int64_t sequences = w.batch * w.channels, patches = (w.length - w.patch) / w.stride + 1 + w.pad_end;
    place(c, 0, REAL, OUT, NORMAL, sequences * patches, w.patch);
    place(c, 1, STATISTICS, OUT, NORMAL, sequences);
    place(c, 2, STATISTICS, OUT, NORMAL, sequences);
    place_windows(c, 3, &w, w.length);
    place_indices(c, 4, &w);
    struct ps_gather_patches *a = &c->arguments.gather_patches;
    a->batch = w.batch;
    a->stride = w.stride;
    a->first = from_end ? (w.length - w.patch) % w.stride : 0;
    a->revin = w.revin;
    a->subtract_last = subtract_last;
    a->pad_end = w.pad_end;
    a->epsilon = index % 3 ? 1e-5 : 0.5;
    call_state(c, offsetof(struct ps_gather_patches, state));
    call_label(c, "B %lld C %lld L %lld P %lld stride %lld%s%s%s%s%s", (long long)w.batch, (long long)w.channels,
               (long long)w.length, (long long)w.patch, (long long)w.stride, from_end ? " from the end" : "",
               w.pad_end ? " padded" : "", w.revin ? " revin" : "", subtract_last ? " of the last value" : "",
               w.series ? " series" : "");
    return 1;
}

static int build_gather_patches(struct call *c, int index)
{
    return gather_patches_call(c, index, 0, 0);
}

/* From the end of the window, less its last value, and both. */
static int build_gather_end(struct call *c, int index)
{
    return gather_patches_call(c, index / 3, index % 3 != 1, index % 3 != 0);
}

/* Shares of values that are not observed, in percent. */
static const int hole_shares[] = {0, 10, 50, 100};

/* NaN in that share of windows placed in a slot, at random; and where there are any, nothing is left of the first channel of the
 * batch's first window. */
static int make_holes(struct call *c, int slot, const struct window_size *w, int64_t length, int share)
{
    const struct buffer *b = &c->buffer[c->operands[slot].buffer];
    for (int64_t i = b->begin + GUARD; i < b->begin + b->count - GUARD; i++) {
        c->values[i] = random_between(&c->random, 0, 99) < share ? NAN : c->values[i];
    }
    for (int64_t l = 0; l < length && share > 0; l++) {
        set_value(c, slot, (w->windows - 1) * w->channels * length + l, NAN);
    }
    return share;
}

/* With holes: from the end, less the last value, neither and both. */
static int build_masked_gather(struct call *c, int index)
{
    struct window_size w;
    const int share = hole_shares[index % LENGTH(hole_shares)], kind = index / LENGTH(hole_shares) % 2;
    index /= LENGTH(hole_shares);
    if (!gather_patches_call(c, index, kind, !kind) || !window_size(index, &w)) {
        return 0;
    }
    make_holes(c, 3, &w, w.length, share);
    c->arguments.gather_patches.masked = 1;
    size_t used = strlen(c->label);
    snprintf(c->label + used, sizeof c->label - used, ", %d %% holes", share);
    return 1;
}

static int build_gather_targets(struct call *c, int index)
{
    struct window_size w;
    if (!window_size(index, &w)) {
        return 0;
    }
    place(c, 0, PARAMETER, OUT, NORMAL, w.batch * w.channels, w.horizon);
    place_windows(c, 1, &w, w.horizon);
    place_indices(c, 2, &w);
    c->arguments.gather_targets.batch = w.batch;
    call_state(c, offsetof(struct ps_gather_targets, state));
    call_label(c, "B %lld C %lld H %lld%s", (long long)w.batch, (long long)w.channels, (long long)w.horizon,
               w.series ? " series" : "");
    return 1;
}

/* Of windows with holes. */
static int build_masked_targets(struct call *c, int index)
{
    struct window_size w;
    const int share = hole_shares[index % LENGTH(hole_shares)];
    index /= LENGTH(hole_shares);
    if (!build_gather_targets(c, index) || !window_size(index, &w)) {
        return 0;
    }
    place_windows(c, 3, &w, w.length);
    make_holes(c, 1, &w, w.horizon, share);
    make_holes(c, 3, &w, w.length, share);
    c->may_be_nan = 1;
    size_t used = strlen(c->label);
    snprintf(c->label + used, sizeof c->label - used, ", %d %% holes", share);
    return 1;
}

static int build_bias_position_add(struct call *c, int index)
{
    static const int64_t sizes[][3] = {{7, 42, 16}, {1, 1, 1},   {5, 5, 64},   {33, 42, 128}, {3, 13, 63},
                                       {2, 65, 65}, {9, 1, 130}, {1, 12, 300}, {896, 42, 16}, {640, 42, 128}}; /* S, N, d */
    int shape = index / 4;
    if (shape >= (asked("PS_TEST_FULL") ? LENGTH(sizes) : LENGTH(sizes) - 2)) {
        return 0;
    }
    int64_t rows = sizes[shape][0] * sizes[shape][1], patches = sizes[shape][1], d = sizes[shape][2];
    place(c, 0, REAL, OUT, NORMAL, rows, d);
    place(c, 1, REAL, IN, NORMAL, rows, d);
    place(c, 2, PARAMETER, IN, NORMAL, d);
    place(c, 3, PARAMETER, IN, NORMAL, patches, d);
    const char *p = SET_DROPOUT(c, index, bias_position_add);
    call_label(c, "S %lld N %lld d %lld%s", (long long)sizes[shape][0], (long long)patches, (long long)d, p);
    return 1;
}

/* C, B C, n */
static int channel_size(int index, int64_t *size)
{
    static const int64_t sizes[][3] = {{7, 28, 96}, {1, 1, 1},     {20, 60, 1},   {3, 15, 65},
                                       {1, 9, 720}, {65, 130, 42}, {321, 642, 7}, {2, 4098, 16}};
    if (index >= LENGTH(sizes)) {
        return 0;
    }
    memcpy(size, sizes[index], sizeof sizes[index]);
    return 1;
}

static int build_channel_affine(struct call *c, int index)
{
    static const char *const offsets[] = {"", " offset", " offset a channel"};
    int64_t size[3];
    int offset = index % 3, weighted = index / 3 % 2, inverse = index / 6 % 2;
    enum role role = index / 12 % 2 ? PARAMETER : REAL;
    if (!channel_size(index / 24, size)) {
        return 0;
    }
    place(c, 0, role, OUT, NORMAL, size[1], size[2]);
    place(c, 1, role, IN, NORMAL, size[1], size[2]);
    if (offset == 1) {
        place(c, 2, PARAMETER, IN, NORMAL, size[2]);
    } else if (offset == 2) {
        place(c, 2, PARAMETER, IN, NORMAL, size[0], size[2]);
    }
    if (weighted) {
        place(c, 3, PARAMETER, IN, inverse ? POSITIVE : NORMAL, size[0]);
        place(c, 4, PARAMETER, IN, NORMAL, size[0]);
    }
    c->arguments.channel_affine.channels = size[0];
    c->arguments.channel_affine.inverse = inverse;
    call_label(c, "C %lld [%lld, %lld]%s%s%s%s", (long long)size[0], (long long)size[1], (long long)size[2], offsets[offset],
               weighted ? " weight and bias" : "", inverse ? " inverse" : "", role == REAL ? "" : " parameter");
    return 1;
}

static int build_channel_affine_backward(struct call *c, int index)
{
    int64_t size[3];
    int inverse = index % 2, last = index / 2 % 2;
    enum role role = index / 4 % 2 ? PARAMETER : REAL, kept = index / 8 % 2 ? PARAMETER : REAL;
    if (!channel_size(index / 16, size)) {
        return 0;
    }
    enum fill fill = size[0] < 16 ? POSITIVE : NORMAL; /* as in gemm */
    if (!last) {
        place(c, 0, role, OUT, NORMAL, size[1], size[2]);
    }
    place(c, 1, PARAMETER, ADD, NORMAL, size[0]);
    place(c, 2, PARAMETER, ADD, NORMAL, size[0]);
    place(c, 3, role, IN, fill, size[1], size[2]);
    place(c, 4, kept, IN, fill, size[1], size[2]);
    place(c, 5, PARAMETER, IN, inverse ? POSITIVE : NORMAL, size[0]);
    c->arguments.channel_affine_backward.channels = size[0];
    c->arguments.channel_affine_backward.inverse = inverse;
    call_label(c, "C %lld [%lld, %lld]%s%s%s%s", (long long)size[0], (long long)size[1], (long long)size[2],
               inverse ? " inverse" : "", last ? " no dx" : "", role == REAL ? "" : " parameter",
               kept == REAL ? "" : ", kept parameter");
    return 1;
}

/* S, H */
static int forecast_size(int index, int64_t *sequences, int64_t *horizon)
{
    static const int64_t sizes[][2] = {{28, 96}, {1, 1}, {60, 1}, {7, 5}, {333, 42}, {130, 65}, {1, 720}, {896, 96}, {1280, 1}};
    if (index >= LENGTH(sizes)) {
        return 0;
    }
    *sequences = sizes[index][0];
    *horizon = sizes[index][1];
    return 1;
}

/* bias, mean and std from slot `first` on. */
static void place_forecast(struct call *c, int first, int64_t sequences, int64_t horizon)
{
    place(c, first, PARAMETER, IN, NORMAL, horizon);
    place(c, first + 1, STATISTICS, IN, NORMAL, sequences);
    place(c, first + 2, STATISTICS, IN, POSITIVE, sequences);
    call_label(c, "[%lld, %lld]", (long long)sequences, (long long)horizon);
}

/* Losses: each kind with targets that are all there, and with holes of so many of a hundred, where a NaN is no mistake. 0 when
 * there are no more. */
static int set_loss(int index, struct ps_loss *loss, int *holes, const char **name)
{
    static const char *const names[] = {"", " mae", " huber", " quantile", " median"};
    static const int percent[] = {-1, 0, 10, 50, 100};
    if (index >= LENGTH(names) * LENGTH(percent)) {
        return 0;
    }
    const int kind = index % LENGTH(names);
    *holes = percent[index / LENGTH(names)];
    *name = names[kind];
    *loss = (struct ps_loss){.missing = *holes >= 0};
    switch (kind) {
    case 1:
        loss->kind = PS_LOSS_MAE;
        break;
    case 2:
        loss->kind = PS_LOSS_HUBER;
        loss->delta = 0.75;
        break;
    case 3: /* of an even number, whose point is neither end */
        *loss = (struct ps_loss){PS_LOSS_QUANTILE, loss->missing, 4, 0, {0.125, 0.375, 0.75, 0.875}};
        break;
    case 4:
        *loss = (struct ps_loss){PS_LOSS_QUANTILE, loss->missing, 1, 0, {0.5}};
        break;
    default:
        break;
    }
    return 1;
}

/* x, bias, mean, std and targets from slot 1 on, for this loss. No target lies so near to a forecast that the sign of their
 * difference is a matter of rounding. */
static int place_loss_case(struct call *c, int index, struct ps_loss *loss)
{
    int64_t sequences, horizon, quantiles;
    int holes;
    const char *name;
    const int variant = index / 9;
    if (!forecast_size(index % 9, &sequences, &horizon) || !set_loss(variant, loss, &holes, &name)) {
        return 0;
    }
    quantiles = ps_loss_outputs(loss);
    place(c, 1, PARAMETER, IN, NORMAL, sequences, quantiles * horizon);
    place_forecast(c, 2, sequences, quantiles * horizon);
    place(c, 5, PARAMETER, IN, NORMAL, sequences, horizon);
    for (int64_t i = 0; i < sequences * horizon; i++) {
        const int64_t s = i / horizon, t = i % horizon;
        for (int64_t q = 0, again = 0; q < quantiles; q++) {
            const double x = get_value(c, 1, (s * quantiles + q) * horizon + t) + get_value(c, 2, q * horizon + t);
            if (fabs(x * get_value(c, 4, s) + get_value(c, 3, s) - get_value(c, 5, i)) < 1e-4 && again < 8) {
                set_value(c, 5, i, (float)(get_value(c, 5, i) + 0.01));
                again++;
                q = -1;
            }
        }
        if (holes > 0 && (int)(random_normal(&c->random) * 1e4) % 100 * (holes < 100) + 100 < 2 * holes) {
            set_value(c, 5, i, NAN);
        }
    }
    call_label(c, "[%lld, %lld]%s%s", (long long)sequences, (long long)(quantiles * horizon), name,
               holes < 0     ? ""
               : holes == 0  ? " no holes"
               : holes == 10 ? " 10 % holes"
               : holes == 50 ? " 50 % holes"
                             : " nothing observed");
    return 1;
}

static int build_forecast(struct call *c, int index)
{
    static const int64_t quantiles[] = {0, 3, PS_MOST_QUANTILES};
    int64_t sequences, horizon, Q = index / 9 < LENGTH(quantiles) ? quantiles[index / 9] : 0;
    if (index / 9 >= LENGTH(quantiles) || !forecast_size(index % 9, &sequences, &horizon)) {
        return 0;
    }
    horizon *= Q > 0 ? Q : 1;
    place(c, 0, PARAMETER, OUT, NORMAL, sequences, horizon);
    place(c, 1, PARAMETER, IN, NORMAL, sequences, horizon);
    place_forecast(c, 2, sequences, horizon);
    c->arguments.forecast.quantiles = Q;
    return 1;
}

static int build_forecast_loss(struct call *c, int index)
{
    struct ps_forecast_loss *a = &c->arguments.forecast_loss;
    struct ps_loss loss;
    if (!place_loss_case(c, index, &loss)) {
        return 0;
    }
    place(c, 0, REAL, OUT, NORMAL, c->operands[1].size[0], c->operands[1].size[1]);
    a->batch = 1 + index % 9;
    a->gradient_scale = index % 3 == 1 ? 64 : 0;
    a->loss = loss;
    c->state.unobserved = 5;
    call_state(c, offsetof(struct ps_forecast_loss, state));
    return 1;
}

/* Of a step with more targets than the batch's. */
static int build_forecast_loss_of_part(struct call *c, int index)
{
    if (!build_forecast_loss(c, index)) {
        return 0;
    }
    place(c, 6, DOUBLE, IN, POSITIVE, 1);
    set_value(c, 6, 0, 1 + 1.5 * (double)(c->operands[5].size[0] * c->operands[5].size[1]));
    return 1;
}

static int build_count_observed(struct call *c, int index)
{
    struct ps_loss loss;
    if (!place_loss_case(c, index, &loss)) {
        return 0;
    }
    const struct operand targets = c->operands[5];
    for (int i = 1; i < 6; i++) {
        c->operands[i].buffer = -1;
    }
    c->operands[1] = targets;
    place(c, 0, DOUBLE, ADD, POSITIVE, 1);
    return 1;
}

static int build_forecast_error(struct call *c, int index)
{
    struct ps_forecast_error *a = &c->arguments.forecast_error;
    struct ps_loss loss;
    if (!place_loss_case(c, index, &loss)) {
        return 0;
    }
    place(c, 0, DOUBLE, ADD, NORMAL, 4, PS_ERRORS); /* preloaded: the other slots keep what they hold */
    a->slot_windows = 32;
    a->loss = loss;
    c->state.cursor = 32 * (uint64_t)(index % 4) + (index % 2 ? 31 : 0);
    call_state(c, offsetof(struct ps_forecast_error, state));
    return 1;
}

/* ---- masked pre-training ---- */

static int build_mask_patches(struct call *c, int index)
{
    static const struct {
        int64_t windows, channels, patches, patch, kept;
        uint64_t cursor, step;
    } sizes[] = {{4, 7, 28, 12, 16, 0, 0},      {1, 1, 2, 1, 1, 3, 7},
                 {3, 1, 5, 8, 0, 128, 1},       {2, 3, 42, 16, 25, 8064, 0x300000005},
                 {1, 2, 257, 3, 100, 1, 2},     {1, 1, 700, 5, 699, 0, 9},
                 {5, 3, 64, 7, 64, 7, 11},      {2, 3, 33, 4, 20, UINT64_C(1) << 30, 1}, /* blocks beyond 2^32 */
                 {128, 7, 28, 12, 16, 128, 64}, {1, 1, 32, 1, 31, 0, 1}};
    if (index >= LENGTH(sizes)) {
        return 0;
    }
    const int64_t rows = sizes[index].windows * sizes[index].channels * sizes[index].patches, patch = sizes[index].patch;
    place(c, 0, REAL, OUT, NORMAL, rows, patch);
    place(c, 1, PARAMETER, ADD, NORMAL, rows, patch); /* preloaded: NaN is what it may hold */
    place(c, 2, REAL, IN, NORMAL, rows, patch);
    struct ps_mask_patches *a = &c->arguments.mask_patches;
    a->seed = 0x123456789abcdefu + (uint64_t)index;
    a->channels = sizes[index].channels;
    a->patches = sizes[index].patches;
    a->kept = sizes[index].kept;
    a->first = index % 3 == 1 ? 37 : 0;
    c->state.step = sizes[index].step;
    c->state.cursor = sizes[index].cursor;
    c->may_be_nan = 1;
    call_state(c, offsetof(struct ps_mask_patches, state));
    call_label(c, "[%lld, %lld] %lld of %lld kept", (long long)rows, (long long)patch, (long long)a->kept, (long long)a->patches);
    return 1;
}

/* ---- the optimiser ---- */

static int build_sum_squares(struct call *c, int index)
{
    static const int64_t sizes[] = {1, 5, 63, 64, 65, 1000, 4097, 100003, 1 << 20, 5000011};
    if (index >= (asked("PS_TEST_FULL") ? LENGTH(sizes) : LENGTH(sizes) - 2)) {
        return 0;
    }
    place(c, 0, PARAMETER, IN, NORMAL, sizes[index]);
    call_state(c, offsetof(struct ps_sum_squares, state));
    call_label(c, "[%lld]", (long long)sizes[index]);
    return 1;
}

static int adamw_call(struct call *c, int index)
{
    static const int64_t sizes[] = {1, 7, 64, 65, 1000, 40003, 1 << 20, 3000001};
    static const uint64_t steps[] = {0, 9, 1234};
    static const double clips[] = {0, 1, 1e6}; /* off; active; too large to act */
    int shape = index / 3;
    if (shape >= (asked("PS_TEST_FULL") ? LENGTH(sizes) : LENGTH(sizes) - 2)) {
        return 0;
    }
    int64_t n = sizes[shape];
    place(c, 0, PARAMETER, ADD, NORMAL, n);
    place(c, 1, PARAMETER, ADD, NORMAL, n);
    place(c, 2, PARAMETER, ADD, NORMAL, n);
    place(c, 3, DOUBLE, ADD, POSITIVE, n);
    place(c, 4, DOUBLE, IN, POSITIVE, 1235);
    place(c, 5, REAL, OUT, NORMAL, n);
    struct ps_adamw *a = &c->arguments.adamw;
    *a = (struct ps_adamw){.decayed = (shape + index) % 3 * n / 2,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .epsilon = 1e-8,
                           .weight_decay = 0.01,
                           .clip_norm = clips[index % 3],
                           .gradient_scale = index % 2 ? 1024 : 0,
                           .windows = (uint64_t)(64 * index)};
    c->state.step = steps[(shape + index) % 3];
    c->state.gradient_squares = 7.5 * (double)n;
    call_state(c, offsetof(struct ps_adamw, state));
    call_label(c, "[%lld] step %llu decayed %lld clip %g", (long long)n, (unsigned long long)c->state.step, (long long)a->decayed,
               a->clip_norm);
    return 1;
}

static int build_adamw(struct call *c, int index)
{
    return adamw_call(c, index);
}

/* Before the step from which on the others change too, at it and after it. */
static int build_adamw_held(struct call *c, int index)
{
    if (!adamw_call(c, index)) {
        return 0;
    }
    struct ps_adamw *a = &c->arguments.adamw;
    const int64_t n = c->operands[0].size[0];
    place(c, 5, REAL, ADD, NORMAL, n); /* of what is held the copy stays too */
    a->held = index % 4 == 3 ? UINT64_MAX : c->state.step + 1 - (uint64_t)(index % 3);
    a->held += a->held == 0;
    a->trained[0] = (struct ps_range){n / 5, n / 3};
    a->trained[1] = (struct ps_range){n - n / 7, n};
    const size_t used = strlen(c->label);
    snprintf(c->label + used, sizeof c->label - used, " held to %llu", (unsigned long long)a->held);
    return 1;
}

static int build_advance(struct call *c, int index)
{
    static const uint64_t counts[][2] = {{1, 128}, {0, 64}, {7, 0}};
    if (index >= LENGTH(counts)) {
        return 0;
    }
    c->arguments.advance.steps = counts[index][0];
    c->arguments.advance.windows = counts[index][1];
    c->state.step = 0xffffffffu;
    c->state.cursor = 0xfffffff0u;
    call_state(c, offsetof(struct ps_advance, state));
    call_label(c, "steps %llu windows %llu", (unsigned long long)counts[index][0], (unsigned long long)counts[index][1]);
    return 1;
}

/* ---- attention ---- */

/* q, k, v or the like, [S, h, N, e]: dense, or heads side by side in rows three times as long. */
static void place_heads(struct call *c, int slot, enum role role, enum mode mode, const int64_t *size, int by_row)
{
    int64_t row = 3 * size[1] * size[3], stride[4] = {size[2] * row, size[3], row, 1};
    if (by_row) {
        place_strided(c, slot, role, mode, NORMAL, size[1] * size[3], 4, size, stride);
    } else {
        place_dense(c, slot, role, mode, NORMAL, 4, size);
    }
}

/* Patches of the cases whose scores grow by far from key 64 on. */
enum { GROWING = 201, GROWING_LONG = 521 };

/* 0 when there is no such case. */
static int attention_size(int index, int64_t *size)
{
    static const int64_t patches[] = {1, 5, 42, 63, 64, 65, 200}, widths[] = {4, 8, 5, 16, 33, 64};
    static const int64_t more[][4] = {
        {1, 1, 1024, 16},     {1, 1, 1000, 64},        {7001, 10, 2, 4}, {2, 4, 130, 32},  {3, 2, 9, 1},
        {5, 3, 24, 16},       {2, 5, 13, 6},           {3, 3, 30, 8},    {2, 3, 14, 12},   {1, 2, 66, 24},
        {1, 1, 5, 300},       {3, 5, 16, 8},           {2, 2, 31, 24},   {1, 2, 48, 8},    {2, 1, 32, 32},
        {2, 16, 42, 4},       {2, 3, 360, 8},          {1, 2, 100, 128}, {1, 1, 1030, 4},  {1, 1, 64, 101},
        {1, 3, 360, 16},      {1, 2, 144, 48},         {1, 1, 97, 97},   {1, 2, 100, 8},   {14, 5, 100, 8},
        {2, 40, 89, 6},       {67, 1, 520, 4},         {11, 7, 66, 16},  {11, 6, 65, 20},  {1, 2, GROWING, 8},
        {11, 6, 65, 26},      {2, 1, GROWING, 16},     {1, 2, 140, 13},  {67, 1, 600, 12}, {67, 1, 1030, 9},
        {1, 2, 530, 8},       {1, 2, GROWING_LONG, 8}, {2, 3, 129, 40},  {1, 2, 213, 48},  {2, 1, 333, 64},
        {1, 2, 200, 96},      {2, 1, 129, 72},         {1, 2, 332, 104}, {190, 5, 98, 8},  {1, 2, GROWING, 64},
        {1, 1, GROWING, 128}, {3, 2, 384, 56},         {1, 1, 530, 128}, {11, 6, 807, 8},  {1, 1, 257, 8},
        {7, 8, 359, 16},      {1, 2, 161, 16},         {11, 6, 257, 24}, {33, 2, 359, 24}, {1, 1, 145, 24},
        {1, 1, 2900, 8},      {1, 1, 1600, 16},        {1, 1, 900, 32},  {1, 14, 720, 16}, {2, 1, 1030, 8},
        {600, 1, 70, 16},     {133, 1, 145, 4},        {265, 1, 129, 4}, {133, 1, 385, 4}, {67, 1, 193, 9},
        {3, 3, 67, 9},        {265, 1, 129, 9},        {1, 2, 131, 24},  {67, 1, 145, 24}};
    if (index < LENGTH(patches) * LENGTH(widths)) {
        size[0] = 2;
        size[1] = 1 + index % 3;
        size[2] = patches[index / LENGTH(widths)];
        size[3] = widths[index % LENGTH(widths)];
        return 1;
    }
    index -= LENGTH(patches) * LENGTH(widths);
    if (index < LENGTH(more)) {
        memcpy(size, more[index], sizeof more[index]);
        return 1;
    }
    return 0;
}

/* At the edges of tiles, in other layouts: heads that rows hold in part, wide ones, odd numbers of them. */
static int attention_edges_size(int index, int64_t *size)
{
    static const int64_t patches[] = {1, 15, 16, 17, 42, 48, 49, 64, 65, 96, 110, 128, 130},
                         heads[][2] = {{2, 8}, {4, 16}, {5, 8}, {2, 4}, {1, 32}, {3, 64}};
    if (index >= LENGTH(patches) * LENGTH(heads)) {
        return 0;
    }
    size[0] = 3;
    size[1] = heads[index % LENGTH(heads)][0];
    size[2] = patches[index / LENGTH(heads)];
    size[3] = heads[index % LENGTH(heads)][1];
    return 1;
}

void ps_attention_call(struct call *c, const int64_t *size, int mixed_by_row, int by_row)
{
    c->arguments.attention.scale = 0.5 / sqrt((double)size[3]); /* a score's rounding in tf32, of its size, is its weight's error */
    c->may_refuse = size[3] > 64 || size[2] > 1024;
    place_heads(c, 0, REAL, OUT, size, mixed_by_row);
    place_dense(c, 1, STATISTICS, OUT, NORMAL, 3, size);
    for (int slot = 2; slot < 5; slot++) {
        place_heads(c, slot, REAL, IN, size, by_row);
    }
    call_label(c, "[%lld, %lld, %lld, %lld]%s", (long long)size[0], (long long)size[1], (long long)size[2], (long long)size[3],
               by_row ? " by row" : "");
}

static int build_attention(struct call *c, int index)
{
    int64_t size[4];
    if (!attention_size(index, size)) {
        return 0;
    }
    ps_attention_call(c, size, index % 3 == 1, index % 2);
    for (int64_t i = 0; (size[2] == GROWING || size[2] == GROWING_LONG) && i < size[0] * size[1] * size[2] * size[3];
         i++) { /* exact in every type */
        set_value(c, 2, i, rint(4 * get_value(c, 2, i)) / 4);
        set_value(c, 3, i, rint(4 * get_value(c, 3, i)) / 4 * (i / size[3] % size[2] < 64 ? 1 : 64));
    }
    return 1;
}

static int build_attention_edges(struct call *c, int index)
{
    int64_t size[4];
    if (!attention_edges_size(index, size)) {
        return 0;
    }
    ps_attention_call(c, size, index % 5 > 0, index % 4 > 0);
    return 1;
}

/* Short sequences as the model has them, all heads side by side in rows, of every number of tiles of 16 rows: heads that fill a box
 * of the copy engine, in part or more than one, of each of its widths; then heads of which each has boxes that it does not fill;
 * then as many sequences as give each multiprocessor all the blocks that it holds, and the widest boxes of few long ones. */
static int attention_rows_size(int index, int64_t *size)
{
    static const int64_t patches[] = {5, 16, 17, 31, 42, 48, 63, 64, 66, 80, 91, 96, 98, 112, 120, 128},
                         heads[2][5] = {{16, 3, 1, 2, 1}, {5, 4, 6, 3, 2}},
                         unfilled[2][5] = {{24, 40, 56, 72, 104}, {24, 48, 88, 96, 112}},
                         others[][4] = {{700, 5, 42, 8}, {700, 3, 42, 16}, {700, 2, 33, 32}, {900, 1, 63, 16},
                                        {400, 8, 17, 8}, {1, 2, 109, 32},  {1, 2, 128, 32}};
    const int width = index % 5, of = index / 5 % LENGTH(patches), form = index / 5 / LENGTH(patches);
    if (form > 1) {
        const int last = index - 2 * 5 * LENGTH(patches);
        memcpy(size, others[last % LENGTH(others)], sizeof *others);
        return last < LENGTH(others);
    }
    size[0] = of < 2 ? 13 : 5 - of % 3 - form;
    size[1] = form ? 1 + (of + width) % 2 : heads[of % 2][width];
    size[2] = patches[of] - (form && of % 2); /* odd numbers */
    size[3] = form ? unfilled[of % 2][width] : 8 << width;
    return 1;
}

static int build_attention_by_rows(struct call *c, int index)
{
    int64_t size[4];
    if (!attention_rows_size(index, size)) {
        return 0;
    }
    ps_attention_call(c, size, 1, 1);
    return 1;
}

/* y and x dense, heads side by side in rows three times as long, or with rows at odd elements. */
static void place_rope(struct call *c, int slot, enum mode mode, const int64_t *size, int layout)
{
    int64_t row = size[3] + 1, stride[4] = {size[1] * size[2] * row, size[2] * row, row, 1};
    if (layout == 2) {
        place_strided(c, slot, REAL, mode, NORMAL, 1, 4, size, stride);
    } else {
        place_heads(c, slot, REAL, mode, size, layout);
    }
}

static int build_rope(struct call *c, int index)
{
    static const int64_t sizes[][4] = {{2, 3, 42, 8},  {3, 2, 5, 16},  {1, 1, 1, 2},    {7, 4, 13, 4},
                                       {2, 1, 65, 64}, {2, 5, 63, 34}, {301, 16, 42, 8}}; /* S, h, N, e */
    static const int layouts[][2] = {{0, 0}, {1, 1}, {0, 1}, {1, 0}, {2, 2}};
    static const char *const names[] = {"dense", "by row", "at odd elements"};
    int shape = index / (2 * LENGTH(layouts)), inverse = index % 2;
    const int *layout = layouts[index / 2 % LENGTH(layouts)];
    if (shape >= LENGTH(sizes)) {
        return 0;
    }
    const int64_t *size = sizes[shape], N = size[2], e = size[3];
    place_rope(c, 0, OUT, size, layout[0]);
    place_rope(c, 1, IN, size, layout[1]);
    place(c, 2, PARAMETER, IN, NORMAL, N, e);
    for (int64_t i = 0; i < N * e; i += 2) {
        double angle = (double)(i / e) * pow(10000, -(double)(i % e) / (double)e);
        set_value(c, 2, i, (float)cos(angle));
        set_value(c, 2, i + 1, (float)sin(angle));
    }
    c->arguments.rope.inverse = inverse;
    call_label(c, "[%lld, %lld, %lld, %lld] %s from %s%s", (long long)size[0], (long long)size[1], (long long)N, (long long)e,
               names[layout[0]], names[layout[1]], inverse ? " inverse" : "");
    return 1;
}

/* Values of q, k or v such as bf16 holds, in the call too. */
static void take_rounded(struct call *c, int slot, double *values)
{
    for (int64_t i = 0; i < operand_count(&c->operands[slot]); i++) {
        values[i] = bf16_value(bf16_bits(get_value(c, slot, i)));
        set_value(c, slot, i, values[i]);
    }
}

/* mixed and logsum that belong to q, k, v (slots 5 to 9), heads of q and k so many columns wide, in all their pieces. */
static void fill_attention(struct call *c, const int64_t *size, int64_t columns, double scale)
{
    if (call_left_out(c)) {
        return;
    }
    int64_t matrices = size[0] * size[1], N = size[2], e = size[3], rows = matrices * N;
    double *heads = malloc((size_t)(rows * (2 * columns + e) + N) * sizeof *heads);
    ck_assert_ptr_nonnull(heads);
    double *keys = heads + rows * columns, *values = keys + rows * columns, *weight = values + rows * e;
    take_rounded(c, 7, heads);
    take_rounded(c, 8, keys);
    take_rounded(c, 9, values);
    for (int64_t r = 0; r < rows; r++) {
        const double *q = heads + r * columns, *k = keys + r / N * N * columns, *v = values + r / N * N * e;
        double sum = 0;
        for (int64_t j = 0; j < N; j++) {
            double score = 0;
            for (int64_t i = 0; i < columns; i++) {
                score += q[i] * k[j * columns + i];
            }
            weight[j] = exp(scale * score);
            sum += weight[j];
        }
        set_value(c, 6, r, log(sum));
        for (int64_t i = 0; i < e; i++) {
            double mixed = 0;
            for (int64_t j = 0; j < N; j++) {
                mixed += weight[j] * v[j * e + i];
            }
            set_value(c, 5, r * e + i, mixed / sum);
        }
    }
    free(heads);
}

static void attention_backward_call(struct call *c, const int64_t *size, int mixed_by_row, int by_row)
{
    c->arguments.attention_backward.scale = 0.5 / sqrt((double)size[3]);
    c->may_refuse = size[3] > 64 || size[2] > 1024;
    for (int slot = 0; slot < 3; slot++) {
        place_heads(c, slot, REAL, OUT, size, by_row);
    }
    place_dense(c, 3, STATISTICS, OUT, NORMAL, 3, size);
    place_heads(c, 4, REAL, IN, size, mixed_by_row);
    place_heads(c, 5, REAL, IN, size, mixed_by_row);
    place_dense(c, 6, STATISTICS, IN, NORMAL, 3, size);
    for (int slot = 7; slot < 10; slot++) {
        place_heads(c, slot, REAL, IN, size, by_row);
    }
    fill_attention(c, size, size[3], c->arguments.attention_backward.scale);
    call_label(c, "[%lld, %lld, %lld, %lld]%s", (long long)size[0], (long long)size[1], (long long)size[2], (long long)size[3],
               by_row ? " by row" : "");
}

static int build_attention_backward(struct call *c, int index)
{
    int64_t size[4];
    if (!attention_size(index, size)) {
        return 0;
    }
    size[2] += size[2] == 1; /* of one patch dq and dk are 0: nothing for a relative bound */
    attention_backward_call(c, size, index % 3 == 1, index % 2);
    return 1;
}

static int build_attention_backward_by_rows(struct call *c, int index)
{
    int64_t size[4];
    if (!attention_rows_size(index, size)) {
        return 0;
    }
    attention_backward_call(c, size, 1, 1);
    return 1;
}

/* Every other case has heads whose gradients are far from 1, each 64 times the one before or its 64th. */
static int build_attention_backward_edges(struct call *c, int index)
{
    int64_t size[4];
    if (!attention_edges_size(index, size)) {
        return 0;
    }
    size[2] += size[2] == 1;
    attention_backward_call(c, size, index % 5 > 0, index % 4 > 0);
    const int64_t head = size[2] * size[3];
    for (int64_t i = 0; index % 2 && i < size[0] * size[1] * head; i++) {
        set_value(c, 4, i, ldexp(get_value(c, 4, i), (int)(index % 4 == 1 ? -30 - i / head * 6 : -100 + i / head * 6)));
    }
    return 1;
}

/* Residual attention's: q and k, and their gradients, in pieces. */

/* S, h, N, m, e, and the layout; 0 when there is no such case. */
static int pieces_size(int index, int64_t *size, int *layout)
{
    enum { LAYOUTS = 3 };
    static const int64_t sizes[][5] = {
        {2, 3, 5, 2, 4},   {3, 2, 13, 3, 8},   {2, 1, 42, 2, 16},  {1, 2, 63, 3, 16},  {2, 2, 64, 4, 16}, {2, 1, 65, 2, 32},
        {1, 3, 130, 3, 5}, {2, 4, 17, 5, 6},   {3, 16, 42, 3, 8},  {1, 1, 200, 7, 9},  {2, 2, 24, 3, 1},  {2, 5, 12, 1, 8},
        {1, 2, 9, 3, 33},  {1, 1, 500, 2, 24}, {5, 6, 11, 3, 4},   {1, 2, 33, 2, 16},  {2, 2, 100, 3, 4}, {1, 1, 127, 4, 32},
        {1, 2, 360, 3, 8}, {5, 16, 70, 3, 4},  {2, 6, 31, 2, 32},  {1, 8, 16, 5, 8},   {3, 2, 48, 2, 64}, {1, 8, 64, 16, 8},
        {2, 5, 42, 16, 8}, {1, 4, 64, 8, 16},  {2, 8, 96, 3, 8},   {2, 3, 112, 2, 16}, {3, 3, 42, 3, 24}, {2, 3, 77, 2, 40},
        {2, 2, 33, 2, 56}, {1, 3, 63, 5, 24},  {4, 2, 15, 2, 48},  {1, 2, 91, 3, 40},  {2, 5, 117, 1, 8}, {3, 3, 125, 2, 8},
        {1, 2, 93, 1, 40}, {2, 3, 81, 3, 24},  {1, 2, 128, 3, 32}, {2, 1, 65, 1, 16},  {1, 4, 100, 4, 8}, {280, 1, 70, 2, 8},
        {2, 3, 70, 2, 8},  {2, 3, 96, 2, 8}};
    if (index < LAYOUTS * LENGTH(sizes)) {
        memcpy(size, sizes[index / LAYOUTS], sizeof *sizes);
        *layout = index % LAYOUTS;
        return 1;
    }
    /* As the model has them: each number of tiles of 16 rows, heads that fill boxes of either width. */
    static const int64_t heads[2][4] = {{5, 3, 1, 1}, {8, 4, 2, 3}};
    const int of = index - LAYOUTS * LENGTH(sizes), width = of % 4, tile = of / 4 % 8, wide = of / 4 / 8;
    const int64_t regular[5] = {3, heads[wide % 2][width], 16 * (tile + 1) - of % 5, 2 + of % 2, 8 << width};
    memcpy(size, regular, sizeof regular);
    *layout = 1;
    return wide < 2;
}

/* q, k or the like [S, h, N, m, e], of a single piece [S, h, N, e]: dense; as the model has them, a head's columns of each layer in
 * rows three times as long (layout 1); or the same with rows and layers at odd elements (2). */
static void place_pieces(struct call *c, int slot, enum mode mode, const int64_t *size, int layout)
{
    const int64_t odd = layout == 2, row = 3 * size[1] * size[4] + odd, layer = size[0] * size[2] * row + 5 * odd;
    const int64_t stride[5] = {size[2] * row, size[4], row, layer, 1}, whole[4] = {size[0], size[1], size[2], size[4]};
    if (size[3] == 1) {
        place_heads(c, slot, REAL, mode, whole, layout > 0);
    } else if (layout) {
        place_strided(c, slot, REAL, mode, NORMAL, size[1] * size[4] + odd, 5, size, stride);
    } else {
        place_dense(c, slot, REAL, mode, NORMAL, 5, size);
    }
}

static void label_pieces(struct call *c, const int64_t *size, int layout)
{
    static const char *const layouts[] = {"", " by row", " at odd elements"};
    call_label(c, "[%lld, %lld, %lld, %lld x %lld]%s", (long long)size[0], (long long)size[1], (long long)size[2],
               (long long)size[3], (long long)size[4], layouts[layout]);
}

static int build_attention_in_pieces(struct call *c, int index)
{
    int64_t size[5];
    int layout;
    if (!pieces_size(index, size, &layout)) {
        return 0;
    }
    const int64_t whole[4] = {size[0], size[1], size[2], size[4]};
    c->arguments.attention.scale = 0.5 / sqrt((double)(size[3] * size[4]));
    c->may_refuse = size[3] * size[4] > 64;
    place_heads(c, 0, REAL, OUT, whole, layout > 0);
    place_dense(c, 1, STATISTICS, OUT, NORMAL, 3, whole);
    place_pieces(c, 2, IN, size, layout);
    place_pieces(c, 3, IN, size, layout);
    place_heads(c, 4, REAL, IN, whole, layout > 0);
    label_pieces(c, size, layout);
    return 1;
}

/* Every other case adds to dq and dk, which hold what a layer above may have left: an eighth of a normal number, so that a
 * gradient's error shows beside it. */
static int build_attention_backward_in_pieces(struct call *c, int index)
{
    int64_t size[5];
    int layout;
    const int adds = index % 2;
    if (!pieces_size(index / 2, size, &layout)) {
        return 0;
    }
    const int64_t whole[4] = {size[0], size[1], size[2], size[4]}, columns = size[3] * size[4];
    c->arguments.attention_backward.scale = 0.5 / sqrt((double)columns);
    c->arguments.attention_backward.accumulate = adds;
    c->may_refuse = columns > 64;
    for (int slot = 0; slot < 2; slot++) {
        place_pieces(c, slot, adds ? ADD : OUT, size, layout);
        for (int64_t i = 0; adds && i < operand_count(&c->operands[slot]); i++) {
            set_value(c, slot, i, get_value(c, slot, i) / 8);
        }
    }
    place_heads(c, 2, REAL, OUT, whole, layout > 0);
    place_dense(c, 3, STATISTICS, OUT, NORMAL, 3, whole);
    place_heads(c, 4, REAL, IN, whole, layout > 0);
    place_heads(c, 5, REAL, IN, whole, layout > 0);
    place_dense(c, 6, STATISTICS, IN, NORMAL, 3, whole);
    place_pieces(c, 7, IN, size, layout);
    place_pieces(c, 8, IN, size, layout);
    place_heads(c, 9, REAL, IN, whole, layout > 0);
    fill_attention(c, whole, columns, c->arguments.attention_backward.scale);
    label_pieces(c, size, layout);
    strncat(c->label, adds ? " added" : "", sizeof c->label - strlen(c->label) - 1);
    return 1;
}

/* ---- the ends of the model in one: 16 bits on CUDA ---- */

static int build_embed_forward(struct call *c, int index)
{
    static const int64_t widths[] = {16, 64, 40, 24, 8, 128, 136, 32, 7};
    struct window_size w;
    if (!window_size(index / 4, &w)) {
        return 0;
    }
    int64_t d = widths[index % LENGTH(widths)], sequences = w.batch * w.channels;
    int64_t patches = (w.length - w.patch) / w.stride + 1 + w.pad_end;
    place(c, 0, REAL, OUT, NORMAL, sequences * patches, d);
    place(c, 1, REAL, OUT, NORMAL, sequences * patches, w.patch);
    place(c, 2, STATISTICS, OUT, NORMAL, sequences);
    place(c, 3, STATISTICS, OUT, NORMAL, sequences);
    place_windows(c, 4, &w, w.length);
    place_indices(c, 5, &w);
    place(c, 6, REAL, IN, NORMAL, w.patch, d);
    place(c, 7, PARAMETER, IN, NORMAL, d);
    place(c, 8, PARAMETER, IN, NORMAL, patches, d);
    struct ps_embed_forward *a = &c->arguments.embed_forward;
    a->batch = w.batch;
    a->stride = w.stride;
    a->revin = w.revin;
    a->pad_end = w.pad_end;
    a->epsilon = index % 3 ? 1e-5 : 0.5;
    call_state(c, offsetof(struct ps_embed_forward, state));
    const char *p = SET_DROPOUT(c, index, embed_forward);
    c->may_refuse = d % 8 != 0 || w.patch > 64 || w.length > 4096;
    call_label(c, "B %lld C %lld L %lld P %lld stride %lld%s%s%s d %lld%s", (long long)w.batch, (long long)w.channels,
               (long long)w.length, (long long)w.patch, (long long)w.stride, w.pad_end ? " padded" : "", w.revin ? " revin" : "",
               w.series ? " series" : "", (long long)d, p);
    return 1;
}

static int build_embed_backward(struct call *c, int index)
{
    static const int64_t sizes[][4] = {{28, 42, 16, 16},   {60, 5, 8, 64},    {1, 1, 1, 8},      {333, 7, 16, 128},
                                       {400, 42, 16, 128}, {5, 13, 33, 24},   {65, 9, 7, 40},    {3, 64, 64, 512},
                                       {17, 3, 47, 256},   {3500, 5, 8, 64},  {1700, 9, 15, 16}, {31, 70, 32, 8},
                                       {70, 6, 12, 72},    {333, 5, 22, 40},  {9, 4, 5, 7}, /* in full only */
                                       {896, 42, 16, 16},  {640, 42, 16, 128}};             /* S, N, P, d */
    int shape = index / 4;
    if (shape >= (asked("PS_TEST_FULL") ? LENGTH(sizes) : LENGTH(sizes) - 2)) {
        return 0;
    }
    int64_t sequences = sizes[shape][0], patches = sizes[shape][1], patch = sizes[shape][2], d = sizes[shape][3];
    place(c, 0, PARAMETER, ADD, NORMAL, patch, d);
    place(c, 1, PARAMETER, ADD, NORMAL, d);
    place(c, 2, PARAMETER, ADD, NORMAL, patches, d);
    place(c, 3, REAL, IN, NORMAL, sequences * patches, d);
    place(c, 4, REAL, IN, NORMAL, sequences * patches, patch);
    const char *p = SET_DROPOUT(c, index, embed_backward);
    c->has_dropout = 0; /* no output is dropped itself */
    c->may_refuse = d % 8 != 0;
    call_label(c, "S %lld N %lld P %lld d %lld%s", (long long)sequences, (long long)patches, (long long)patch, (long long)d, p);
    return 1;
}

static int64_t groups_of(int64_t sequences)
{
    return (sequences + PS_PARTIAL_ROWS - 1) / PS_PARTIAL_ROWS;
}

/* bias, mean, std, targets, indices from slot `first` on. */
static void place_loss(struct call *c, int first, const struct window_size *w)
{
    place(c, first, PARAMETER, IN, NORMAL, w->horizon);
    place(c, first + 1, STATISTICS, IN, NORMAL, w->batch * w->channels);
    place(c, first + 2, STATISTICS, IN, POSITIVE, w->batch * w->channels);
    place_windows(c, first + 3, w, w->horizon);
    place_indices(c, first + 4, w);
}

static int build_head_step(struct call *c, int index)
{
    static const int64_t widths[] = {672, 320, 34, 2, 5, 800, 96, 2104, 6152};
    struct window_size w;
    if (!window_size(index / LENGTH(widths), &w)) {
        return 0;
    }
    int64_t K = widths[index % LENGTH(widths)], sequences = w.batch * w.channels;
    place(c, 0, REAL, OUT, NORMAL, sequences, K);
    place(c, 1, REAL, OUT, NORMAL, sequences, w.horizon);
    place(c, 2, DOUBLE, OUT, NORMAL, groups_of(sequences), w.horizon + 1);
    place(c, 3, REAL, IN, NORMAL, sequences, K);
    place(c, 4, REAL, IN, NORMAL, K, w.horizon);
    place_loss(c, 5, &w);
    c->arguments.head_step.batch = w.batch;
    c->arguments.head_step.gradient_scale = index % 3 == 1 ? 64 : 0;
    call_state(c, offsetof(struct ps_head_step, state));
    c->may_refuse = K % 2 != 0 || w.horizon > 96 || (K > 700 && (w.horizon > 48 || K > 800) && w.horizon % 8 != 0);
    call_label(c, "B %lld C %lld K %lld H %lld%s", (long long)w.batch, (long long)w.channels, (long long)K, (long long)w.horizon,
               w.series ? " series" : "");
    return 1;
}

static int build_window_loss(struct call *c, int index)
{
    struct window_size w;
    if (!window_size(index, &w)) {
        return 0;
    }
    int64_t sequences = w.batch * w.channels;
    place(c, 0, REAL, OUT, NORMAL, sequences, w.horizon);
    place(c, 1, DOUBLE, OUT, NORMAL, groups_of(sequences), w.horizon + 1);
    place(c, 2, PARAMETER, IN, NORMAL, sequences, w.horizon);
    place_loss(c, 3, &w);
    c->arguments.window_loss.batch = w.batch;
    c->arguments.window_loss.gradient_scale = index % 3 == 1 ? 64 : 0;
    call_state(c, offsetof(struct ps_window_loss, state));
    call_label(c, "B %lld C %lld H %lld%s", (long long)w.batch, (long long)w.channels, (long long)w.horizon,
               w.series ? " series" : "");
    return 1;
}

static int build_head_sums(struct call *c, int index)
{
    int64_t sequences, horizon;
    if (!forecast_size(index, &sequences, &horizon)) {
        return 0;
    }
    place(c, 0, PARAMETER, ADD, NORMAL, horizon);
    place(c, 1, DOUBLE, IN, NORMAL, groups_of(sequences), horizon + 1);
    c->arguments.head_sums.batch = 1 + index;
    c->arguments.head_sums.sequences = sequences;
    call_state(c, offsetof(struct ps_head_sums, state));
    call_label(c, "S %lld H %lld", (long long)sequences, (long long)horizon);
    return 1;
}

/* ---- all of them ---- */

const struct operation ps_operations[] = {{PS_OP_gemm, build_gemm, 0},
                                          {PS_OP_layernorm, build_layernorm, 0},
                                          {PS_OP_bias_add, build_bias_add, 0},
                                          {PS_OP_head_split, build_head_split, 0},
                                          {PS_OP_softmax, build_softmax, 0},
                                          {PS_OP_head_merge, build_head_merge, 0},
                                          {PS_OP_bias_residual_add, build_bias_residual_add, 0},
                                          {PS_OP_bias_activation, build_bias_activation, 0},
                                          {PS_OP_layernorm_backward, build_layernorm_backward, 0},
                                          {PS_OP_activation_backward, build_activation_backward, 0},
                                          {PS_OP_softmax_backward, build_softmax_backward, 0},
                                          {PS_OP_bias_grad, build_bias_grad, 0},
                                          {PS_OP_add, build_add, 0},
                                          {PS_OP_affine, build_affine, 0},
                                          {PS_OP_unary, build_unary, 0},
                                          {PS_OP_binary, build_binary, 0},
                                          {PS_OP_reduce, build_reduce, 1u << 1},
                                          {PS_OP_strided_copy, build_strided_copy, 0},
                                          {PS_OP_drop, build_drop, 0},
                                          {PS_OP_gather_patches, build_gather_patches, 1u << 0 | 1u << 3 | 1u << 4},
                                          {PS_OP_gather_targets, build_gather_targets, 1u << 2},
                                          {PS_OP_gather_targets, build_masked_targets, 1u << 2 | 1u << 3},
                                          {PS_OP_bias_position_add, build_bias_position_add, 0},
                                          {PS_OP_forecast, build_forecast, 0},
                                          {PS_OP_forecast_loss, build_forecast_loss, 0},
                                          {PS_OP_forecast_error, build_forecast_error, 0},
                                          {PS_OP_mask_patches, build_mask_patches, 0},
                                          {PS_OP_sum_squares, build_sum_squares, 1u << 0},
                                          {PS_OP_adamw, build_adamw, 1u << 4},
                                          {PS_OP_adamw, build_adamw_held, 1u << 4},
                                          {PS_OP_advance, build_advance, 0},
                                          {PS_OP_gemm_bias, build_gemm_bias, 0},
                                          {PS_OP_gemm_gradient, build_gemm_gradient, 0},
                                          {PS_OP_gemm_finish, build_gemm_finish, 0},
                                          {PS_OP_gemm_finish, build_gemm_finish_normed, 0},
                                          {PS_OP_attention, build_attention, 0},
                                          {PS_OP_attention_backward, build_attention_backward, 0},
                                          {PS_OP_feed_forward, build_feed_forward, 0},
                                          {PS_OP_feed_forward_backward, build_feed_forward_backward, 0},
                                          {PS_OP_embed_forward, build_embed_forward, 1u << 4 | 1u << 5},
                                          {PS_OP_embed_backward, build_embed_backward, 0},
                                          {PS_OP_head_step, build_head_step, 1u << 9},
                                          {PS_OP_window_loss, build_window_loss, 1u << 7},
                                          {PS_OP_head_sums, build_head_sums, 0},
                                          {PS_OP_attention, build_attention_by_rows, 0},
                                          {PS_OP_attention_backward, build_attention_backward_by_rows, 0},
                                          {PS_OP_attention, build_attention_edges, 0},
                                          {PS_OP_attention_backward, build_attention_backward_edges, 0},
                                          {PS_OP_batchnorm_statistics, build_batchnorm_statistics, 0},
                                          {PS_OP_batchnorm, build_batchnorm, 0},
                                          {PS_OP_batchnorm_backward, build_batchnorm_backward, 0},
                                          {PS_OP_batchnorm_fold, build_batchnorm_fold, 0},
                                          {PS_OP_batchnorm_unfold, build_batchnorm_unfold, 0},
                                          {PS_OP_batchnorm_join, build_batchnorm_join, 0},
                                          {PS_OP_bias_residual_statistics, build_bias_residual_statistics, 0},
                                          {PS_OP_rope, build_rope, 0},
                                          {PS_OP_channel_affine, build_channel_affine, 0},
                                          {PS_OP_channel_affine_backward, build_channel_affine_backward, 0},
                                          {PS_OP_layernorm, build_rmsnorm, 0},
                                          {PS_OP_layernorm_backward, build_rmsnorm_backward, 0},
                                          {PS_OP_bias_activation, build_bias_other_activation, 0},
                                          {PS_OP_activation_backward, build_other_activation_backward, 0},
                                          {PS_OP_softmax_backward, build_softmax_backward_addend, 0},
                                          {PS_OP_drop, build_drop_real, 0},
                                          {PS_OP_gather_patches, build_gather_end, 1u << 0 | 1u << 3 | 1u << 4},
                                          {PS_OP_gather_patches, build_masked_gather, 1u << 0 | 1u << 3 | 1u << 4},
                                          {PS_OP_attention, build_attention_in_pieces, 0},
                                          {PS_OP_attention_backward, build_attention_backward_in_pieces, 0},
                                          {PS_OP_forecast_loss, build_forecast_loss_of_part, 0},
                                          {PS_OP_count_observed, build_count_observed, 1u << 1},
                                          {PS_OP_pad_heads, build_pad_heads, 0},
                                          {PS_OP_unpad_heads, build_unpad_heads, 0}};

const int ps_operation_count = LENGTH(ps_operations);
