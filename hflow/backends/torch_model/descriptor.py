"""The descriptor of the torch backend, which imports no torch."""

from __future__ import annotations

from typing import Any

from hflow.backends.torch_model import memory
from hflow.planner.backends import Backend, BackendTraits


def _make_model(*args: Any) -> Any:
    from hflow.backends.torch_model.backend import TorchModel

    return TorchModel(*args)


BACKEND = Backend(
    name="torch",
    traits=BackendTraits(sharded_over_data="everything", shares_prompts=True),
    factory=_make_model,
    memory=memory,
    packages=("torch", "transformers"),
    install="make env",
    purpose="training and inference",
    is_required=True,
)
