"""Taking a new version of the weights into a module, in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hflow.errors import BackendError, nearest


def load_in_place(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `(Hugging Face name, full tensor)` pairs into a module.

    Tied tensors are one storage: any of their names fills it.

    Raises:
        BackendError: for a name that the module lacks, a wrong shape, or a tensor left out.
    """
    targets = module.state_dict(keep_vars=True)
    missing = {tensor.data_ptr(): name for name, tensor in reversed(targets.items())}
    with torch.no_grad():
        for name, tensor in weights:
            if name not in targets:
                raise BackendError(
                    f"new weights hold {name!r}, which the engine's model lacks{nearest(name, targets)}"
                )
            target = targets[name]
            if target.shape != tensor.shape:
                raise BackendError(
                    f"new weights have {name!r} of shape {tuple(tensor.shape)}, the engine's model "
                    f"{tuple(target.shape)}; give both the same architecture"
                )
            target.copy_(tensor)
            missing.pop(target.data_ptr(), None)
    if missing:
        names = sorted(missing.values())
        raise BackendError(
            f"new weights lack {len(names)} tensors of the engine's model, the first is {names[0]!r}"
        )
