"""Triton's interpreter for this process: kernels of modules that are imported later run on the CPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.runtime.interpreter as interpreter

_patch = interpreter._patch_lang_tensor


def _patch_for_numpy(tensor, scope):
    _patch(tensor, scope)
    # Triton 3.6 calls int() with an array of one number, which numpy 2.5 refuses.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_for_numpy
