"""The scalar head of a critic or a reward model, and its file beside the HF weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from hflow.errors import BackendError


class ScalarHead(nn.Module):
    """`Linear(D, 1)` on hidden states, in fp32 whatever the hidden states are in: `[T, D]` -> `[T]`."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        """Weights from N(0, 1 / (D + 1)) as in Stiennon et al. 2020; the bias is 0."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator) / math.sqrt(hidden_size + 1)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """One number for each hidden state."""
        return linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)

    def load(self, directory: Path, kind: str) -> None:
        """Take the weights from a checkpoint's head file.

        Raises:
            BackendError: when there is none, or it has other tensors or shapes.
        """
        path = head_file(directory, kind)
        if not path.is_file():
            raise BackendError(f"{directory} has no {path.name}: it is not the checkpoint of a {kind} model")
        found = load_file(path)
        wanted = {name: list(tensor.shape) for name, tensor in self.state_dict().items()}
        shapes = {name: list(tensor.shape) for name, tensor in found.items()}
        if shapes != wanted:
            raise BackendError(f"{path} holds {shapes}, a {kind} head of this model has {wanted}")
        self.load_state_dict(found)


def head_file(directory: Path, kind: str) -> Path:
    """Where a checkpoint keeps its scalar head; `kind` is `value` or `score`."""
    return directory / f"{kind}_head.safetensors"


def save_head(directory: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    """Write the tensors of a scalar head beside the HF weights."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, head_file(directory, kind))
