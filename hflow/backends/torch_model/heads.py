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
    """`Linear(D, 1)` on hidden states: `[T, D]` -> `[T]`, always in fp32."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        """Draw weights from N(0, 1 / (D + 1)) as in Stiennon et al. 2020; the bias is 0."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator) / math.sqrt(hidden_size + 1)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return one number for each hidden state."""
        return linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)

    def load(self, directory: Path, kind: str) -> None:
        """Load the weights from a checkpoint's head file.

        Raises:
            BackendError: if there is no such file, or it has other tensors or shapes.
        """
        path = head_file(directory, kind)
        if not path.is_file():
            raise BackendError(
                f"{directory} has no {path.name}: it is not the checkpoint of a {kind} model; set the path "
                "to one"
            )
        tensors = load_file(path)
        expected = {name: list(tensor.shape) for name, tensor in self.state_dict().items()}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if shapes != expected:
            raise BackendError(
                f"{path} holds {shapes}, but a {kind} head of this model has {expected}; set the path to a "
                "checkpoint of this model"
            )
        self.load_state_dict(tensors)


def head_file(directory: Path, kind: str) -> Path:
    """Return the path of a checkpoint's scalar head; `kind` is `value` or `score`."""
    return directory / f"{kind}_head.safetensors"


def save_head(directory: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    """Write the tensors of a scalar head beside the HF weights."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, head_file(directory, kind))
