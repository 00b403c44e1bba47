/* Errors are values. A function that can fail returns enum ps_status and leaves one line of text for the caller, kept for each
 * thread; only src/ prints it and exits. It lives in the lowest room because every room reports errors. */
#ifndef PS_KERNELS_STATUS_H
#define PS_KERNELS_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers are the programs' exit codes. */
enum ps_status {
    PS_OK = 0,
    PS_UNSUPPORTED = 1, /* this backend or fast path cannot serve this shape: the caller takes another */
    PS_USAGE = 2,       /* command line or config */
    PS_DATA = 3,
    PS_CHECKPOINT = 4,
    PS_DEVICE = 5,
};

/* Records the message (printf format) for this thread and returns status, so that `return ps_fail(...)` reads well. */
enum ps_status ps_fail(enum ps_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The last message recorded on this thread; "" when there is none. Valid until the thread's next ps_fail. */
const char *ps_error_message(void);

/* Returns from the caller when the expression is not PS_OK. */
#define PS_TRY(expression)                     \
    do {                                       \
        enum ps_status ps_try_ = (expression); \
        if (ps_try_ != PS_OK) {                \
            return ps_try_;                    \
        }                                      \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
