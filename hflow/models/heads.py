"""The scalar head of a critic or a reward model, and where checkpoints have it.

A reward model is a Hugging Face `*ForSequenceClassification` with one label: its head is `score.weight` among
the model's weights, without a bias. Hugging Face has no layout for critics: theirs is a file of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from hflow.base.errors import BackendError
from hflow.models.hf_config import auto_model
from hflow.models.weight_files import open_weight_files

SCORE = "score.weight"
"""The head of a reward model in its checkpoint."""

_CLASSIFIERS: Any = AutoModelForSequenceClassification


class ScalarHead(nn.Module):
    """`Linear(D, 1)` on hidden states: `[T, D]` -> `[T]`, always in fp32. Only a `value` head has a bias."""

    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, seed: int, kind: str) -> None:
        """Draw weights from N(0, 1 / (D + 1)) as in Stiennon et al. 2020; the bias is 0."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator) / math.sqrt(hidden_size + 1)
        self.weight = nn.Parameter(weight)
        self.register_parameter("bias", nn.Parameter(torch.zeros(1)) if kind == "value" else None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return one number for each hidden state."""
        bias = None if self.bias is None else self.bias.float()
        return linear(hidden.float(), self.weight.float(), bias).squeeze(-1)

    def load(self, directory: Path, kind: str) -> bool:
        """Load the weights from a checkpoint. Return False if it has no such head.

        Raises:
            BackendError: if the checkpoint's head has other tensors or shapes.
        """
        tensors = _read_head(directory, kind)
        if tensors is None:
            return False
        expected = {name: list(tensor.shape) for name, tensor in self.state_dict().items()}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if shapes != expected:
            raise BackendError(
                f"the {kind} head in {directory} has {shapes}, but that of this model has {expected}; set "
                "the path to a checkpoint of this model"
            )
        self.load_state_dict(tensors)
        return True


def head_prefix(kind: str) -> str:
    """Return the prefix of the names of a scalar head's weights; `kind` is `value` or `score`."""
    return "score." if kind == "score" else f"{kind}_head."


def missing_head(directory: Path, kind: str) -> BackendError:
    """Return the error for a frozen model whose checkpoint has no head of its kind."""
    what = (
        f"{SCORE}: it is not a reward model (*ForSequenceClassification)"
        if kind == "score"
        else f"{head_file(directory).name}: it is not the checkpoint of a {kind} model"
    )
    return BackendError(f"{directory} has no {what}; set the path to one")


def head_file(directory: Path) -> Path:
    """Return the path of the value head in a checkpoint."""
    return directory / "value_head.safetensors"


def save_head(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of a value head beside the HF weights."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, head_file(directory))


def saved_config(config: PreTrainedConfig, kind: str, dtype: torch.dtype) -> PreTrainedConfig:
    """Return a model's config as it is saved with weights of a dtype and a head of this kind."""
    saved = copy.deepcopy(config)
    saved.dtype = dtype
    name = auto_model(config)._model_mapping[type(config)].__name__
    if kind == "score":
        saved.num_labels = 1
        known = type(config) in _CLASSIFIERS._model_mapping
        classifier = _CLASSIFIERS._model_mapping[type(config)].__name__ if known else None
        name = classifier or name.replace("ForCausalLM", "ForSequenceClassification")
    saved.architectures = [name]
    return saved


def _read_head(directory: Path, kind: str) -> dict[str, Tensor] | None:
    if kind != "score":
        path = head_file(directory)
        return load_file(path) if path.is_file() else None
    with ExitStack() as files:
        weight = open_weight_files(directory, files).get(SCORE)
        return None if weight is None else {"weight": weight[:].float()}
