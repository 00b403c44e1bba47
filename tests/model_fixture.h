/* A small model on any backend, with random data on its device: what the model's tests share. */
#ifndef PS_TESTS_MODEL_FIXTURE_H
#define PS_TESTS_MODEL_FIXTURE_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/philox.h"
#include "model/layer.h"
#include "model/model.h"
#include "tests/checks.h"
#include "tests/real16.h"

#define OK(expression) ck_assert_msg((expression) == PS_OK, "%s: %s", #expression, ps_error_message())

struct fixture {
    struct ps_device *device;
    struct ps_kernels *k;
    struct ps_model *model;
    struct ps_windows windows;
    struct ps_step_state *state; /* device */
    int64_t batch, count;        /* count: elements of the flat buffers */
};

/* Unit-normal number i of stream `site` (Box and Muller). */
static inline double normal(uint64_t seed, uint64_t i, uint32_t site)
{
    double u = ps_uniform(seed, 2 * i, site, 7), v = ps_uniform(seed, 2 * i + 1, site, 7);
    return sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * v);
}

static inline double *from_device(struct ps_device *device, enum ps_type type, const void *memory, int64_t n)
{
    void *host = malloc((size_t)n * ps_type_bytes(type));
    double *values = malloc((size_t)n * sizeof *values);
    OK(device->download(device, PS_COMPUTE, host, memory, (size_t)n * ps_type_bytes(type)));
    for (int64_t i = 0; i < n; i++) {
        values[i] = type == PS_F64    ? ((double *)host)[i]
                    : type == PS_BF16 ? bf16_value(((uint16_t *)host)[i])
                    : type == PS_F16  ? fp16_value(((uint16_t *)host)[i])
                                      : (double)((float *)host)[i];
    }
    free(host);
    return values;
}

static inline void set_device(struct ps_device *device, enum ps_type type, void *memory, const double *values, int64_t n)
{
    void *host = malloc((size_t)n * ps_type_bytes(type));
    for (int64_t i = 0; i < n; i++) {
        if (type == PS_F64) {
            ((double *)host)[i] = values[i];
        } else if (type == PS_BF16) {
            ((uint16_t *)host)[i] = bf16_bits(values[i]);
        } else if (type == PS_F16) {
            ((uint16_t *)host)[i] = fp16_bits(values[i]);
        } else {
            ((float *)host)[i] = (float)values[i];
        }
    }
    OK(device->upload(device, PS_COMPUTE, memory, host, (size_t)n * ps_type_bytes(type)));
    OK(device->synchronize(device));
    free(host);
}

/* Device memory with n host doubles converted to `type` (values pass through float, so that every precision sees the same). */
static inline void *to_device(struct ps_device *device, enum ps_type type, const double *values, int64_t n)
{
    void *memory;
    double *rounded = malloc((size_t)n * sizeof *rounded);
    for (int64_t i = 0; i < n; i++) {
        rounded[i] = (double)(float)values[i];
    }
    OK(device->allocate(device, (size_t)n * ps_type_bytes(type), &memory));
    set_device(device, type, memory, rounded, n);
    free(rounded);
    return memory;
}

/* The parameters and the running statistics, as they start plus noise. */
static inline double *random_parameters(const struct ps_parameters *layout, uint64_t seed, double noise)
{
    double *values = malloc((size_t)layout->stored * sizeof *values);
    ps_parameters_initialise(layout, seed, values);
    for (int t = 0; t < layout->all; t++) {
        const struct ps_parameter *p = &layout->table[t];
        for (int64_t i = 0; i < ps_parameter_count(p); i++) {
            values[p->offset + i] += noise * normal(seed, (uint64_t)(p->offset + i), 99);
        }
    }
    return values;
}

/* Parameters: initialisation plus unit-normal noise times `noise`, the same floats on every backend. */
static inline void fixture_parameters(struct fixture *f, double noise)
{
    double *parameters = random_parameters(f->model->layout, 11, noise);
    for (int64_t i = 0; i < f->model->layout->stored; i++) {
        parameters[i] = (double)(float)parameters[i];
    }
    set_device(f->device, f->k->parameter, f->model->parameters, parameters, f->model->layout->stored);
    OK(ps_model_refresh_weights(f->model));
    free(parameters);
}

/* Opens everything; `device_kind` "cpu" or "cuda". Parameters: initialisation plus noise. Data: unit-normal windows. */
static inline struct fixture fixture_open_with(const char *backend, const char *device_kind, enum ps_precision precision,
                                               const struct ps_model_shape *shape, int64_t batch,
                                               const struct ps_model_options *options)
{
    struct fixture f = {.batch = batch};
    OK(ps_device_open(device_kind, 2, &f.device));
    OK(ps_kernels_open(backend, f.device, precision, &(struct ps_kernels_options){.tiny_gemm = 1}, &f.k));
    OK(ps_model_open(f.k, shape, batch, options, &f.model));
    f.count = f.model->layout->count;
    fixture_parameters(&f, 0.1);

    int64_t C = shape->channels, L = shape->seq_len, H = shape->pred_len, inputs = batch * C * L, targets = batch * C * H;
    double *values = malloc((size_t)(inputs + targets) * sizeof *values);
    for (int64_t i = 0; i < inputs + targets; i++) {
        values[i] = normal(3, (uint64_t)i, 98);
    }
    f.windows.inputs = ps_tensor_3d(to_device(f.device, f.k->parameter, values, inputs), f.k->parameter, batch, C, L);
    f.windows.targets = ps_tensor_3d(to_device(f.device, f.k->parameter, values + inputs, targets), f.k->parameter, batch, C, H);
    free(values);
    int32_t *index = malloc((size_t)batch * sizeof *index);
    for (int64_t i = 0; i < batch; i++) {
        index[i] = (int32_t)(batch - 1 - i);
    }
    void *memory;
    OK(f.device->allocate(f.device, (size_t)batch * sizeof *index, &memory));
    OK(f.device->upload(f.device, PS_COMPUTE, memory, index, (size_t)batch * sizeof *index));
    OK(f.device->allocate(f.device, sizeof *f.state, (void **)&f.state));
    OK(f.device->synchronize(f.device));
    free(index);
    f.windows.indices = ps_tensor_1d(memory, PS_I32, batch);
    return f;
}

static inline struct fixture fixture_open(const char *backend, const char *device_kind, enum ps_precision precision,
                                          const struct ps_model_shape *shape, int64_t batch, enum ps_level level, int merge_qkv)
{
    return fixture_open_with(backend, device_kind, precision, shape, batch,
                             &(struct ps_model_options){.level = level, .merge_qkv = merge_qkv, .seed = 5});
}

static inline void fixture_close(struct fixture *f)
{
    struct ps_device *d = f->device;
    d->release(d, f->windows.inputs.data, (size_t)ps_tensor_count(&f->windows.inputs) * ps_type_bytes(f->k->parameter));
    d->release(d, f->windows.targets.data, (size_t)ps_tensor_count(&f->windows.targets) * ps_type_bytes(f->k->parameter));
    d->release(d, f->windows.indices.data, (size_t)f->batch * sizeof(int32_t));
    d->release(d, f->state, sizeof *f->state);
    ps_model_close(f->model);
    f->k->close(f->k);
    d->close(d);
}

/* The loss's gradient by all parameters, as ps_model_gradients left it. */
static inline double *fixture_gradients(struct fixture *f)
{
    double *gradients = from_device(f->device, f->k->parameter, f->model->gradients, f->count);
    for (int64_t i = 0; i < f->count; i++) {
        gradients[i] /= f->model->gradient_scale;
    }
    return gradients;
}

/* The mean loss, over what is observed, of a batch that took the state from `before`, which may be NULL for zeros, to `state`. */
static inline double fixture_mean(const struct fixture *f, const struct ps_step_state *state, const struct ps_step_state *before)
{
    const double unobserved = (double)(state->unobserved - (before ? before->unobserved : 0));
    return (state->loss_sum - (before ? before->loss_sum : 0)) /
           ((double)f->batch - unobserved / (double)ps_model_targets(&f->model->shape));
}

/* The batch's mean loss; dropout masks are those of step 0. */
static inline double fixture_loss(struct fixture *f)
{
    struct ps_step_state state = {0};
    OK(f->device->upload(f->device, PS_COMPUTE, f->state, &state, sizeof state));
    OK(f->device->fill_zero(f->device, PS_COMPUTE, f->model->gradients, (size_t)f->count * ps_type_bytes(f->k->parameter)));
    OK(ps_model_gradients(f->model, &f->windows, f->state, f->batch));
    OK(f->device->download(f->device, PS_COMPUTE, &state, f->state, sizeof state));
    return fixture_mean(f, &state, NULL);
}

/* docs/design.md, "Comparing gradients": the largest of ||delta_t|| / (||ref_t|| + 1e-3 ||ref||) over the layout's tensors. */
static inline double gradient_error(const struct ps_parameters *layout, const double *got, const double *expected, int *worst)
{
    double all = 0, largest = 0;
    for (int64_t i = 0; i < layout->count; i++) {
        all += expected[i] * expected[i];
    }
    for (int t = 0; t < layout->n; t++) {
        const struct ps_parameter *p = &layout->table[t];
        double delta = 0, norm = 0;
        for (int64_t i = p->offset; i < p->offset + ps_parameter_count(p); i++) {
            delta += (got[i] - expected[i]) * (got[i] - expected[i]);
            norm += expected[i] * expected[i];
        }
        double error = sqrt(delta) / (sqrt(norm) + 1e-3 * sqrt(all));
        if (!(error <= largest)) {
            largest = error;
            *worst = t;
        }
    }
    return largest;
}

/* Takes the tensors out of both whose gradient is less than 3e-3 of the whole: the paper's b_o and b_2, which BatchNorm's mean
 * takes away again, and b_p, nearly. Returns the largest of their gradient_error, which is that of roundings against the whole. */
static inline double take_small(const struct ps_parameters *layout, double *got, const double *expected)
{
    double all = 0, largest = 0;
    for (int64_t i = 0; i < layout->count; i++) {
        all += expected[i] * expected[i];
    }
    for (int t = 0; t < layout->n; t++) {
        const struct ps_parameter *p = &layout->table[t];
        double squares = 0, rounding = 0;
        for (int64_t i = p->offset; i < p->offset + ps_parameter_count(p); i++) {
            squares += expected[i] * expected[i];
            rounding += (got[i] - expected[i]) * (got[i] - expected[i]);
        }
        if (squares > 1e-5 * all) {
            continue;
        }
        double error = sqrt(rounding) / (sqrt(squares) + 1e-3 * sqrt(all));
        largest = !(error <= largest) ? error : largest;
        memcpy(got + p->offset, expected + p->offset, (size_t)ps_parameter_count(p) * sizeof *got);
    }
    return largest;
}

#endif
