"""Low-rank adapters of an HF model (Hu et al. 2021), by the library peft.

A module with an adapter computes `W x + scale * B A x` with the frozen weights W. Adapter weights are called
as the module, `model.layers.0.self_attn.q_proj.lora_A.weight`, without peft's own parts of the name.

With DoRA (Liu et al. 2024) it computes `m / |V| * V x`, where `V = W + scale * B A` and |V| is the length of
each row, a constant for gradients (section 4.3). The magnitude m is learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from hflow.base.errors import BackendError, nearest
from hflow.config.schema import ALL_LINEAR
from hflow.models.dtypes import DTYPES
from hflow.models.expert_adapters import add_expert_adapters, as_in_peft, experts_of
from hflow.models.heads import head_prefix, save_head
from hflow.models.hf_config import family_of
from hflow.models.nf4 import Nf4Linear, rounded
from hflow.models.settings import ModelSettings
from hflow.shapes.model_shape import EMBEDDING, EXPERT_TARGETS, MAGNITUDE, OUTPUT

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

ADAPTER_FILE = "adapter_model.safetensors"
"""The weights of a saved adapter, as peft calls them."""
ROUNDING_FILE = "base_rounding.json"
"""How the weights beside a saved adapter were rounded."""
_NAME = "default"
"""What peft calls the only adapter of a model."""
_IN_OLD_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Names of modules that peft takes for those of experts in models that have some. It reads adapters of dense
matrices with these names as adapters of parameters."""


def check_installed(settings: ModelSettings) -> None:
    """Check that peft and bitsandbytes are installed if a model needs them.

    Raises:
        BackendError: if one is missing; says how to install it.
    """
    lora, key = settings.lora, f"models.{settings.name}.lora"
    if lora is not None and find_spec("peft") is None:
        raise BackendError(
            f"{key} needs the package peft, which is not installed; install it with "
            "pip install 'hflow-rl[lora]'"
        )
    if lora is not None and lora.base is not None and find_spec("bitsandbytes") is None:
        raise BackendError(
            f"{key}.base={lora.base} needs the package bitsandbytes, which is not installed; install it with "
            "pip install 'hflow-rl[qlora]'"
        )


def add_adapter(model: PreTrainedModel, settings: ModelSettings) -> None:
    """Add fp32 adapters to a model in place, with A drawn from its seed and B = 0, and freeze the rest.

    Matrices beside them are rounded to 4 bits if the settings say so.

    The adapters have values on the CPU, also where the model's weights are on the meta device. There only
    magnitudes have none, until `set_magnitudes`.

    Raises:
        BackendError: if peft is missing, or the model lacks a targeted module.
    """
    check_installed(settings)
    from peft import inject_adapter_in_model

    lora, config = settings.lora, _peft_config(model, settings)
    assert lora is not None, "the model has no adapters"
    targets = _wanted(model, settings)
    modules = [name for name in targets if name not in EXPERT_TARGETS]
    with torch.random.fork_rng(devices=[]), _without_meta(model), _without_config(model):
        torch.manual_seed(settings.seed)
        if modules:
            changes = {"use_dora": False, "target_modules": set(modules), "target_parameters": None}
            inject_adapter_in_model(replace(config, **changes), model, _NAME)
        add_expert_adapters(model, targets, lora.r, lora.scale)
    if lora.base == "nf4":
        for parent, name, matrix in list(_matrices(model)):
            setattr(parent, name, Nf4Linear(matrix))
    if lora.dora:
        add_magnitudes(model)
    for weight in adapter_weights(model).values():
        weight.data = weight.data.float()


def add_magnitudes(model: nn.Module) -> None:
    """Let the adapters of a model compute as DoRA does."""
    for layer in _adapted_layers(model):
        layer.lora_magnitude_vector[_NAME] = _Magnitude(layer.out_features)
        layer.lora_variant[_NAME] = _Dora
    set_magnitudes(model)


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """Set the magnitudes of a model with DoRA to the lengths of the rows of W, so that it computes W x.

    A rank sets those of its rows. Rows on the meta device have none.
    """
    for layer in _adapted_layers(model):
        weight = layer.get_base_layer().weight
        if _NAME in layer.lora_magnitude_vector and not weight.is_meta:
            layer.lora_magnitude_vector[_NAME].weight.copy_(torch.linalg.vector_norm(weight, dim=1))


def _adapted_layers(model: nn.Module) -> list[Any]:
    """Return peft's modules that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


@torch.no_grad()
def row_lengths(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, column_ranks: ProcessGroup | None = None
) -> Tensor:
    """Return the lengths of the rows of `W + scale * B A`, `[outputs]`, which are constants for gradients.

    Args:
        weight: W `[outputs, inputs]`, or some of its columns.
        a: `[r, inputs]`, the same columns.
        b: `[outputs, r]`.
        column_ranks: the ranks that have the other columns, of which this is a collective; None: there are
            none.
    """
    moved = torch.addmm(weight, b, a, alpha=scale)
    lengths: Tensor = torch.linalg.vector_norm(moved, dim=1)
    if column_ranks is None:
        return lengths
    squares = lengths.float().square()
    dist.all_reduce(squares, group=column_ranks)
    return squares.sqrt().to(weight.dtype)


class _Magnitude(nn.Module):
    """The learned lengths of the rows of a matrix."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows))


class _Dora:
    """DoRA as a variant of peft's layers. peft's own multiplies an identity matrix for each layer."""

    @staticmethod
    def forward(layer: Any, *, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Return the output `[..., outputs]` of peft's linear layer, whose output without it is `result`."""
        a, b, scale = layer.lora_A[_NAME], layer.lora_B[_NAME], layer.scaling[_NAME]
        base = layer.get_base_layer()
        lengths = row_lengths(base.weight, a.weight, b.weight, scale)
        factor = layer.lora_magnitude_vector[_NAME].weight / lengths
        scaled: Tensor = factor * torch.add(result, b(a(x)), alpha=scale)
        return scaled if base.bias is None else scaled + (1 - factor) * base.bias


@contextmanager
def _without_meta(model: nn.Module) -> Iterator[None]:
    """Replace parameters on the meta device, to which peft would move adapters, by ones without memory."""
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                if weight not in stand_ins:
                    empty = torch.empty(1, dtype=weight.dtype).expand(weight.shape)
                    stand_ins[weight] = nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = stand_ins[weight]
    yield
    weights = {stand_in: weight for weight, stand_in in stand_ins.items()}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight in weights:
                module._parameters[name] = weights[weight]


@contextmanager
def _without_config(model: nn.Module) -> Iterator[None]:
    """Hide a model's config from peft, which would give the adapters of dense matrices to experts.

    In files of old versions these have the same names (`_IN_OLD_EXPERTS`).
    """
    config = model.__dict__.pop("config")
    try:
        yield
    finally:
        model.config = config


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter weights of a model by name; empty if it has no adapters."""
    named = model.named_parameters(remove_duplicate=False)
    return {_adapter_name(name): weight for name, weight in named if ".lora_" in name}


def _adapter_name(name: str) -> str:
    """Return the name of an adapter's weight, given that in the module."""
    name = re.sub(r"\.adapters\.(\w+\.lora_[AB])$", r".\1.weight", name)  # those of experts
    return re.sub(rf"\.{_NAME}(?=\.|$)", "", name)  # of an embedding's adapter it is the last part


def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model but adapters, by HF name. Matrices in 4 bits are made whole one by one."""
    for name, weight in base_parameters(model).items():
        yield name, weight.detach()
    for path, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            yield f"{path.removesuffix('.base_layer')}.weight", module.weight


def base_buffers(model: nn.Module) -> list[Tensor]:
    """Return the memory of the matrices in 4 bits."""
    return [x for module in model.modules() if isinstance(module, Nf4Linear) for x in module.buffers()]


def base_parameters(model: nn.Module, *, with_tied: bool = False) -> dict[str, nn.Parameter]:
    """Return the parameters of a model but adapters, by HF name: tied ones once, or under each name."""
    named = model.named_parameters(remove_duplicate=not with_tied)
    return {_hf_name(name): weight for name, weight in named if ".lora_" not in name}


def _hf_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


def share_parameters(model: nn.Module, owner: nn.Module) -> None:
    """Let a model, whose adapters have values, use the parameters of another where its own are on meta.

    `owner` is of the same architecture, with other adapters.
    """
    held = base_parameters(owner, with_tied=True)
    for path, weight in list(model.named_parameters(remove_duplicate=False)):
        if weight.is_meta:
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._parameters[name] = held[_hf_name(path)]


class OutputAdapter(NamedTuple):
    """The adapter of an output matrix."""

    a: Tensor
    """`[r, D]`."""
    b: Tensor
    """`[V, r]`."""
    scale: float


def output_adapter(head: nn.Module) -> tuple[nn.Linear, OutputAdapter | None]:
    """Return a language model's output layer, and its adapter, if it has one that is on."""
    if isinstance(head, nn.Linear):
        return head, None
    layer: Any = head
    base: nn.Linear = layer.get_base_layer()
    if layer.disable_adapters:
        return base, None
    a, b = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
    return base, OutputAdapter(a, b, layer.scaling[_NAME])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let a model of either backend compute without its adapters.

    peft's own method also turns gradients off, of parameters that FSDP has replaced meanwhile.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def saved_peft_config(model: PreTrainedModel, settings: ModelSettings) -> PeftConfig:
    """Return peft's configuration of a model's saved adapters."""
    config = _peft_config(model, settings)
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # a set, whose order would differ in every process
    if settings.head == "score":  # among the weights, as peft saves what it trains besides adapters
        config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
    return config


def write_adapter(
    directory: Path,
    config: PeftConfig,
    head: str,
    weights: Mapping[str, Tensor],
    rounding: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write trained weights in peft's layout, so that `PeftModel.from_pretrained` and vLLM load them.

    A value head has a file of its own, and so has the rounding of the weights beside adapters. Returns the
    paths.

    Args:
        config: what `saved_peft_config` returned.
        weights: adapters and a scalar head's weights by name, whole.
        rounding: what `rounding_of` returned.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = dict(weights)
    if head == "value":
        prefix = head_prefix(head)
        names = [name for name in weights if name.startswith(prefix)]
        save_head(directory, {name.removeprefix(prefix): weights.pop(name) for name in names})
    config.save_pretrained(str(directory))
    if rounding is not None:
        (directory / ROUNDING_FILE).write_text(json.dumps(rounding) + "\n", encoding="utf-8")
    saved = as_in_peft(weights, config.target_parameters or ())
    named = {f"base_model.model.{_file_name(name)}": x.contiguous() for name, x in saved.items()}
    save_file(named, directory / ADAPTER_FILE, metadata={"format": "pt"})
    return [path for path in directory.iterdir() if path.is_file()]


def rounding_of(settings: ModelSettings) -> dict[str, str] | None:
    """Return the format and the dtype of the rounded weights that a model's adapters are trained beside."""
    lora = settings.lora
    return None if lora is None or lora.base is None else {"base": lora.base, "dtype": settings.dtype}


def round_base(model: PreTrainedModel, directory: Path) -> None:
    """Round the weights of a model as those that a saved adapter was trained beside, if they were."""
    file = directory / ROUNDING_FILE
    if file.is_file():
        dtype = DTYPES[json.loads(file.read_text(encoding="utf-8"))["dtype"]]
        for _, _, matrix in _matrices(model):
            weight = matrix.weight.data
            matrix.weight.data = rounded(weight.to(dtype)).to(weight.dtype)


def _file_name(name: str) -> str:
    """Return the name of a weight in peft's files."""
    return name.removesuffix(".weight") if name.endswith(MAGNITUDE) else name


def _peft_config(model: PreTrainedModel, settings: ModelSettings) -> PeftConfig:
    """Return peft's configuration of a model's adapters.

    Raises:
        BackendError: if the model lacks a target, or peft cannot read its adapter.
    """
    from peft import LoraConfig

    lora, wanted = settings.lora, _wanted(model, settings)
    assert lora is not None, "the model has no adapters"
    has_experts = bool(experts_of(model))
    dense = [name for name in wanted if has_experts and name in _IN_OLD_EXPERTS]
    if dense and lora.dora:
        raise BackendError(
            f"models.{settings.name}.lora.dora is set, but peft reads no magnitudes of {dense[0]} in a model "
            f"with experts; set models.{settings.name}.lora.targets without it, or dora=false"
        )
    parameters = [f"{name}.weight" if name in dense else name for name in (*EXPERT_TARGETS, *dense)]
    base, revision = settings.base or settings.path, None
    if settings.base is not None and not Path(settings.base).is_dir():  # a model of the Hub, with its commit
        base, _, revision = settings.base.partition("@")
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=[name for name in wanted if name not in (*EXPERT_TARGETS, *dense)],
        target_parameters=[name for name in parameters if name.removesuffix(".weight") in wanted] or None,
        exclude_modules=_outside_language_model(model),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision or None,
    )


def _wanted(model: PreTrainedModel, settings: ModelSettings) -> tuple[str, ...]:
    """Return the targets of a model's adapters.

    Raises:
        BackendError: if the model lacks one of them.
    """
    assert settings.lora is not None, "the model has no adapters"
    targets = _targets(model)
    wanted = settings.lora.chosen(sorted(targets))
    targets |= {*_outer_targets(model, settings.head), *(EXPERT_TARGETS if experts_of(model) else ())}
    for name in wanted:
        if name not in targets:
            raise BackendError(
                f"models.{settings.name}.lora.targets: the model has no module {name!r}"
                f"{nearest(name, targets)} (known: {ALL_LINEAR}, {', '.join(sorted(targets))})"
            )
    return wanted


def _language_model(model: PreTrainedModel) -> nn.Module:
    """Return the module with the decoder layers. The tower of a model that sees is beside it."""
    family = family_of(model.config)
    return model.base_model if family is None else family.encoder.language_model(model.base_model)


def _outside_language_model(model: PreTrainedModel) -> str | None:
    """Return a pattern of modules without adapters, whatever their names; None where there is no tower."""
    inside = _language_model(model)
    if inside is model.base_model:
        return None
    name = next(name for name, module in model.named_modules() if module is inside)
    return rf"(?!{re.escape(name)}\.).*"


def _outer_targets(model: PreTrainedModel, head: str) -> set[str]:
    """Return the names of embedding and output matrix where these can have adapters."""
    if family_of(model.config) is not None or model.config.tie_word_embeddings:
        return set()
    return {EMBEDDING, OUTPUT} if head == "lm" else {EMBEDDING}


def _targets(model: PreTrainedModel) -> set[str]:
    """Return the names of the matrices of the decoder layers."""
    paths = {module: path for path, module in model.named_modules()}
    parents = ((paths[parent].rpartition(".")[2], name) for parent, name, _ in _matrices(model))
    return {module if name == "base_layer" else name for module, name in parents}


def _matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield each matrix of the decoder layers but adapters, after the module that has it and its name."""
    layers = set(model._no_split_modules or ())
    for module in _language_model(model).modules():
        if type(module).__name__ in layers:
            for path, parent in module.named_modules():
                for name, inner in parent.named_children():
                    if isinstance(inner, nn.Linear) and ".lora_" not in f"{path}.":
                        yield parent, name, inner
