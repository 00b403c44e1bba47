#include "kernels/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char message[1024];

enum ps_status ps_fail(enum ps_status status, const char *format, ...)
{
    /* Written aside first: the arguments may quote the message being replaced. */
    char text[sizeof message];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(message, sizeof message, "%s", text);
    return status;
}

const char *ps_error_message(void)
{
    return message;
}
