"""`torch.compile` of decoder layers: fewer and larger kernels, after some tens of seconds of compilation.

The operations between the matrix products of a layer (norms, activations, rotary embeddings, residuals) are
fused. Attention stays as it is, as its sequences differ from one micro-batch to the next; the number of
tokens is symbolic, so that none of them is compiled for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hflow.backends.packed_attention import PACKED, packed_attention
from hflow.errors import BackendError


def compile_layers(layers: Iterable[nn.Module], name: str) -> None:
    """Compile the forward of layers, for packed sequences. They are compiled when they run first.

    All layers of a kind share their code. Hooks, such as those of FSDP, run outside it.

    Args:
        layers: decoder layers of a model on its device.
        name: of the model, for errors.

    Raises:
        BackendError: if there is no C++ compiler, which torch's and triton's code needs.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BackendError(
            f"models.{name}.compile needs a C++ compiler, and there is no {compiler!r}: install g++, or "
            "remove the key"
        )
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    for layer in layers:
        compiled = torch.compile(layer.forward, dynamic=True)
        layer.forward = partial(_forward, layer.forward, compiled)


def _forward(eager: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the compiled forward on packed sequences; an engine that shares the layer runs its own way."""
    return (compiled if "packed_layout" in kwargs else eager)(*args, **kwargs)
