#!/usr/bin/env python3
"""Forecasts what comes after a CSV's last line, by a trained model, with ctypes and numpy alone.

    python3 forecast.py best.h5 series.csv

The CSV has a header line and numbers alone, its columns in the model's order. PATCHSTEP_LIBRARY: where the library lies, if the
system does not find libpatchstep.so.0.1 by itself."""
import ctypes
import os
import sys

import numpy

Floats = numpy.ctypeslib.ndpointer(numpy.float32, flags="C_CONTIGUOUS")


class Model:
    """A checkpoint's model; close it, or use it in a with statement."""

    def __init__(self, checkpoint, device="auto", precision=None):
        self._library = library = ctypes.CDLL(os.environ.get("PATCHSTEP_LIBRARY", "libpatchstep.so.0.1"))
        library.patchstep_open.argtypes = [ctypes.c_char_p] * 3 + [ctypes.POINTER(ctypes.c_void_p)]
        library.patchstep_forecast.argtypes = [ctypes.c_void_p, Floats, ctypes.c_int64, Floats]
        library.patchstep_channel_name.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        library.patchstep_close.argtypes, library.patchstep_close.restype = [ctypes.c_void_p], None
        for text in (library.patchstep_error, library.patchstep_channel_name):
            text.restype = ctypes.c_char_p
        self._model = ctypes.c_void_p()
        self._check(library.patchstep_open(os.fsencode(checkpoint), device.encode(), precision and precision.encode(),
                                           ctypes.byref(self._model)))
        sizes = []
        for size in (library.patchstep_channels, library.patchstep_seq_len, library.patchstep_pred_len):
            size.argtypes, size.restype = [ctypes.c_void_p], ctypes.c_int64
            sizes.append(size(self._model))
        self.channels, self.seq_len, self.pred_len = sizes
        names = [library.patchstep_channel_name(self._model, c) for c in range(self.channels)]
        self.names = [name.decode() for name in names] if names[0] is not None else None

    def _check(self, status):
        if status != 0:
            raise RuntimeError(self._library.patchstep_error().decode(errors="replace"))

    def forecast(self, inputs):
        """[n, channels, seq_len] -> [n, channels, pred_len], in the data's own units."""
        inputs = numpy.ascontiguousarray(inputs, numpy.float32)
        if inputs.ndim != 3 or inputs.shape[1:] != (self.channels, self.seq_len):
            raise ValueError(f"inputs are {list(inputs.shape)}, not [n, {self.channels}, {self.seq_len}]")
        forecasts = numpy.empty((len(inputs), self.channels, self.pred_len), numpy.float32)
        self._check(self._library.patchstep_forecast(self._model, inputs, len(inputs), forecasts))
        return forecasts

    def close(self):
        self._library.patchstep_close(self._model)
        self._model = ctypes.c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def main():
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CHECKPOINT SERIES.csv")
    try:
        with Model(sys.argv[1]) as model:
            rows = numpy.loadtxt(sys.argv[2], numpy.float32, delimiter=",", skiprows=1, ndmin=2)[-model.seq_len:]
            forecast = model.forecast(rows.T[numpy.newaxis])[0]
            print(",".join(model.names or ["?"] * model.channels))
            for row in forecast.T:
                print(",".join(f"{x:.9g}" for x in row))
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
