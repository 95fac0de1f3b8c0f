"""Reads figures of devices and links, and calibrations, from small YAML files.

hflow's own files are in `configs/hardware/devices`, `links` and `calibrations`, and a user's files in
`hardware/devices` and so on beside the recipe, where they replace files of the same name. A file has the
name of the device, link or calibration.

Builds the planner's `PlanRequest` from the configuration: cluster, hardware, models and run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from hflow.base.errors import ConfigError, nearest, shorten
from hflow.base.shipped import shipped_directory
from hflow.base.validation import from_mapping
from hflow.config import ModelConfig, RunConfig, flatten
from hflow.config.schema import ONE_PROCESS, WorkloadConfig
from hflow.config.yaml_files import read_yaml
from hflow.graph.framework_reads import COMPARED
from hflow.graph.ir import Graph
from hflow.graph.model import Model
from hflow.graph.queries import is_library_node, missing_correction, num_firings
from hflow.launch.planning.models import (
    has_chat_template,
    image_model,
    missing_checkpoints,
    model_dtype,
    model_family,
    model_shape,
    overruled_alphabets,
    overruled_architectures,
    replaced_templates,
    unopened_templates,
)
from hflow.planner.models.descriptors import descriptor
from hflow.planner.plan.calibration import (
    MEASURED_WITH,
    Calibration,
    PublishedError,
    changed_figures,
    check_device,
)
from hflow.planner.plan.cluster import PART_SEPARATOR, ClusterSpec, device_of, parse_cluster
from hflow.planner.plan.hardware import Device, Hardware, Link
from hflow.planner.plan.optimizers import OPTIMIZERS
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.traits import BACKENDS, ENGINES
from hflow.planner.plan.workload import PromptImages, image_sizes
from hflow.shapes.model_shape import ModelShape
from hflow.types.kernels import (
    distribution_version,
    flash_versions,
    installed_transformer_engine,
    packed_kernel,
)

HardwareKind = Literal["devices", "links", "calibrations"]


def read_hardware(kind: HardwareKind, recipe: str | Path) -> dict[str, Mapping[str, Any]]:
    """Return the figures of every device, link or calibration that a recipe can use, by name.

    Raises:
        ConfigError: for a file that is not a YAML mapping.
    """
    directories = (shipped_directory("configs") / "hardware" / kind, _own_directory(kind, recipe))
    files = {file.stem: file for directory in directories for file in directory.glob("*.yaml")}
    return {name: read_yaml(files[name]) for name in sorted(files)}


def _own_directory(kind: HardwareKind, recipe: str | Path) -> Path:
    return Path(recipe).parent / "hardware" / kind


T = TypeVar("T", Device, Link, Calibration)


@dataclass(frozen=True)
class LearnedFromRun:
    """What a run says about its hardware and its data."""

    calibration: Calibration
    workload: WorkloadConfig
    """Lengths of its samples."""


Learn = Callable[[str, str], LearnedFromRun]
"""Learns from a run on devices of a name: `profiling.from_run.learn_from_run`, which plans the run again."""


def _learn_nothing(run: str, device: str) -> LearnedFromRun:
    raise AssertionError(f"calibrate={run} is set, and the caller cannot learn from runs")


def known_devices(recipe: str | Path) -> dict[str, Device]:
    """Return the devices that `cluster` may name.

    Raises:
        ConfigError: for a hardware file that is not right.
    """
    return _known(Device, "devices", recipe)


def known_links(recipe: str | Path) -> dict[str, Link]:
    """Return the links that devices and `network` may name. Raises as `known_devices`."""
    return _known(Link, "links", recipe)


def cluster_hardware(
    config: RunConfig, recipe: str | Path, learn: Learn = _learn_nothing
) -> tuple[ClusterSpec, Hardware]:
    """Return the cluster of a configuration, and the figures of its devices and links.

    Raises:
        ConfigError: for an unknown link, a hardware file that is not right, or a run that `calibrate` cannot
            learn from.
        PlanError: for an unknown device, or figures of other devices.
    """
    devices, links = known_devices(recipe), known_links(recipe)
    cluster = parse_cluster(config.cluster, devices)
    if config.calibration is not None and config.calibrate is not None:
        raise ConfigError("calibration and calibrate are both set; remove one of them")
    for key in ("device_memory_gib", "calibration", "calibrate"):
        if cluster.parts and getattr(config, key) is not None:
            raise ConfigError(f"{key} holds for one kind of devices, but cluster={cluster.name} has several")
    if config.cores is not None:
        cluster = replace(cluster, cores=_cores(config, cluster))
    kinds = []
    for part, first in zip(cluster.kinds, cluster.first_devices, strict=True):
        device = devices[device_of(part.name)]
        if config.device_memory_gib is not None:
            device = _with_memory(device, config.device_memory_gib)
            cluster = replace(cluster, memory_bytes=device.memory_bytes)
        if device.rack is not None:
            _check_racks(part, device.rack.devices, first)
        kinds.append((first, _hardware(config, device, links, recipe, learn)))
    return cluster, replace(kinds[0][1], others=tuple(kinds[1:]))


def _hardware(
    config: RunConfig, device: Device, links: dict[str, Link], recipe: str | Path, learn: Learn
) -> Hardware:
    key, rack = f"hardware.devices.{device.name}", None
    intra = _link(f"{key}.link", device.link, links)
    if config.network is not None:
        inter = _link("network", config.network, links)
    else:
        inter = _link(f"{key}.network", device.network, links)
    host = _link(f"{key}.host_link", device.host_link, links)
    if device.rack is not None:
        rack = _link(f"{key}.rack.link", device.rack.link, links)
    if config.calibrate is None:
        calibration = device_calibration(device, recipe, config.calibration)
    else:
        calibration = learn(config.calibrate, device.name).calibration
    return Hardware(device, intra, inter, host, calibration, rack)


def device_calibration(device: Device, recipe: str | Path, file: str | None = None) -> Calibration:
    """Return the calibration of a device: from a file, or else the shipped one that names the device.

    The shipped calibration with the name of the device's type holds for every other device of that type.

    Raises:
        ConfigError: for a file that is not right.
        PlanError: for a file that was measured on other devices.
    """
    if file is not None:
        values = {"name": Path(file).stem, **read_yaml(Path(file))}
        calibration = calibration_of(values, file)
        check_device(calibration, device.name, f"calibration={file}")
        return calibration
    known = _known(Calibration, "calibrations", recipe)
    named = (calibration for calibration in known.values() if device.name in calibration.devices)
    found = next(named, known[device.type])
    is_shipped = not _own_directory("calibrations", recipe).joinpath(f"{found.name}.yaml").exists()
    return replace(found, published=_published_errors(device.name)) if is_shipped else found


def _published_errors(device: str) -> dict[str, PublishedError]:
    """Return the errors of plans with shipped figures against published runs on devices of a family."""
    families = json.loads((shipped_directory("configs") / "hardware" / "accuracy.json").read_text())
    family = next((one for one in families.values() if device in one["devices"]), None)
    return {} if family is None else {kind: PublishedError(**row) for kind, row in family["kinds"].items()}


def calibration_of(values: Mapping[str, Any], file: str | Path) -> Calibration:
    """Return the calibration with the values that are in a file.

    Raises:
        ConfigError: naming the file, the key, and what is expected.
    """
    try:
        return from_mapping(Calibration, values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _known(cls: type[T], kind: HardwareKind, recipe: str | Path) -> dict[str, T]:
    return {
        name: from_mapping(cls, {"name": name, **values}, f"hardware.{kind}.{name}")
        for name, values in read_hardware(kind, recipe).items()
    }


def _cores(config: RunConfig, cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the number of cores of each device of a machine."""
    cores, num_devices = config.cores or (), cluster.devices_per_node
    if config.workers in ONE_PROCESS and num_devices > 1:
        raise ConfigError(
            f"cores gives each of {num_devices} devices cores of its own, but workers={config.workers} "
            "computes them in turn; set cluster=cpu-1x1, or workers=ray"
        )
    if not cores or min(cores) < 1 or len(cores) not in (1, num_devices):
        raise ConfigError(
            f"cores is {list(cores)}; give the number of cores of each of a machine's {num_devices} devices, "
            "or one number for all of them"
        )
    return cores if len(cores) == num_devices else cores * num_devices


def _check_racks(cluster: ClusterSpec, rack_devices: int, first: int) -> None:
    """Refuse machines that do not fill a rack. The planner counts racks from the first device of all."""
    size = cluster.devices_per_node
    if first % rack_devices:
        raise ConfigError(f"cluster: {cluster.name} is in racks; name it in front of the other machines")
    if size <= rack_devices and (cluster.num_nodes == 1 or rack_devices % size == 0):
        return
    kind = device_of(cluster.name)
    fitting = max(num for num in range(1, min(size, rack_devices) + 1) if rack_devices % num == 0)
    raise ConfigError(
        f"cluster {cluster.name!r}: a rack has {rack_devices} {kind} devices, which machines of {size} do "
        f"not fill. Set cluster={kind}-{-(-cluster.num_devices // fitting)}x{fitting}."
    )


def _larger_devices(config: RunConfig, device: Device, recipe: str | Path) -> tuple[Device, ...]:
    """Return the devices of the same type with more memory, the smallest first.

    Those in racks are left out, as not every number of machines fills one.
    """
    if config.device_memory_gib is not None or PART_SEPARATOR in config.cluster:
        return ()  # the memory would hold for the others as well
    others = (d for d in known_devices(recipe).values() if d.type == device.type and d.rack is None)
    larger = (other for other in others if other.memory_gib > device.memory_gib)
    return tuple(sorted(larger, key=lambda other: (other.memory_gib, other.name)))


def _with_memory(device: Device, memory_gib: float) -> Device:
    if memory_gib <= device.overhead_gib:
        raise ConfigError(
            f"device_memory_gib is {memory_gib:g}, but a {device.name} needs {device.overhead_gib:g} for its "
            f"runtime; set it to more than {device.overhead_gib:g}"
        )
    return replace(device, memory_gib=memory_gib)


def _link(key: str, name: str, links: dict[str, Link]) -> Link:
    if name not in links:
        raise ConfigError(f"{key}: unknown link {name!r}{nearest(name, links)} (known: {', '.join(links)})")
    return links[name]


RESULT_KEYS = ("models.", "data.", "services.", "workers")
"""Prefixes of keys that change what a run computes, but not the plan's rows. The plan stores them besides."""


def plan_request(
    config: RunConfig, graph: Graph, recipe: str | Path, learn: Learn = _learn_nothing
) -> PlanRequest:
    """Return the planner's input for a configuration, whose names were checked.

    Raises:
        ConfigError: for an unknown link, or a file that is not what it should be.
        PlanError: for an unknown device.
    """
    cluster, hardware = cluster_hardware(config, recipe, learn)
    models = {spec.name: _model(config, spec, cluster.device) for spec in graph.models}
    shapes = _shapes(config, graph)
    return PlanRequest(
        cluster=cluster,
        hardware=hardware,
        batch=config.batch,
        num_steps=config.steps,
        models=models,
        shapes=shapes,
        families=_families(config, graph),
        groups=config.groups,
        placement=config.placement,
        schedule=config.schedule,
        save_every=config.save_every,
        seed=config.seed,
        deterministic=config.deterministic,
        larger_devices=_larger_devices(config, hardware.device, recipe),
        workload=_workload(config, hardware.device.name, learn),
        images=_images(config, graph),
        settings=_settings(config),
        engine_problems=engine_problems(cluster.device),
        backend_problems=backend_problems(cluster.device),
        flash_attn=flash_versions(),
        transformer_engine=installed_transformer_engine(),
        warnings=(
            *overruled_architectures(config),
            *overruled_alphabets(config, graph),
            *replaced_templates(config),
            *unopened_templates(config, graph),
            *_constant_rates(config),
            *missing_checkpoints(config, graph),
            *_untrained_warnings(config, graph),
            *_chat_warnings(config, graph),
            *_system_warnings(graph),
            *_staleness_warnings(config, graph),
            *_quantization_warnings(config, graph),
            *_reference_warnings(config, graph),
            *_calibration_warnings(models, shapes, hardware, config.deterministic),
        ),
    )


def _calibration_warnings(
    models: Mapping[str, ModelConfig],
    shapes: Mapping[str, ModelShape],
    hardware: Hardware,
    deterministic: bool,
) -> Iterator[str]:
    """Yield the figures of a calibration that were measured with other kernels or packages."""
    flash, installed = flash_versions(), installed_versions()
    for kind in hardware.kinds:
        device = kind.device
        kernels = [
            packed_kernel(
                *(device.type, model.compute_dtype, device.capability, flash),
                deterministic=deterministic,
                has_sinks=name in shapes and shapes[name].has_sinks,
            ).kernel
            for name, model in models.items()
        ]
        yield from changed_figures(kind.calibration, installed, kernels)


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that decide a calibration's figures (`MEASURED_WITH`)."""
    versions = {package: distribution_version(package) for package in MEASURED_WITH}
    return {package: version for package, version in versions.items() if version is not None}


_LATER_KEYS: Mapping[str, Any] = {
    ".optim.name": OPTIMIZERS.default,
    ".optim.momentum": None,
    ".optim.nesterov": None,
    ".optim.groups": [],
    ".gen.quantization": None,
    ".gen.cache_dtype": None,
    ".gen.cuda_graphs": True,
    ".fp8": None,
    ".zero_stage": 3,
    ".freeze": None,
    ".base_of": None,
    ".lora.rslora": False,
    ".lora.dora": False,
    ".lora.base": None,
    ".balance": None,
    ".images.min_pixels": None,
    ".images.max_pixels": None,
    ".fetch_images": False,
}
"""Ends of keys that did not exist at first, with their defaults."""


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide results, without the defaults of keys that did not exist at first.

    A plan keeps the digest that it had then.
    """
    return {
        key: value
        for key, value in flatten(config)
        if key.startswith(RESULT_KEYS)
        and not any(key.endswith(later) and value == default for later, default in _LATER_KEYS.items())
    }


def _workload(config: RunConfig, device: str, learn: Learn) -> WorkloadConfig:
    """Return the lengths of samples; those of the run of `calibrate` where none are configured."""
    if config.calibrate is None:
        return config.workload
    found, asked = learn(config.calibrate, device).workload, config.workload
    return WorkloadConfig(
        prompt=asked.prompt or found.prompt,
        response_mean=asked.response_mean or found.response_mean,
        response_cv=found.response_cv if asked.response_cv is None else asked.response_cv,
        shares=asked.shares,
        images=asked.images,
    )


def engine_problems(device: str) -> dict[str, str]:
    """Return the engines that this machine cannot run on a kind of device, each with the reason."""
    return _problems(ENGINES, device)


def backend_problems(device: str) -> dict[str, str]:
    """Return the backends that this machine cannot run on a kind of device, each with the reason."""
    return _problems(BACKENDS, device)


def _problems(names: Iterable[str], device: str) -> dict[str, str]:
    problems = {name: descriptor(name).find_problem(device) for name in names}
    return {name: str(problem) for name, problem in problems.items() if problem is not None}


def _model(config: RunConfig, spec: Model, device: str) -> ModelConfig:
    """Return the configuration of a model with its `dtype` decided."""
    return replace(config.models.get(spec.name, ModelConfig()), dtype=model_dtype(config, spec, device))


def _untrained_warnings(config: RunConfig, graph: Graph) -> Iterator[str]:
    """Yield a warning for each train node that never fires, because its `after` is not less than `steps`."""
    for node in graph.nodes:
        if node.spec.verb == "train" and not num_firings(node.spec, config.steps):
            yield (
                f"{node.name} never fires: it starts after {node.spec.after} steps, and the run has "
                f"{config.steps}. Set steps to more than {node.spec.after}, or nodes.{node.name}.after=0."
            )


def _constant_rates(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each model whose learning rate is constant, but has a final value."""
    for name, model in config.models.items():
        if model.optim.schedule == "constant" and model.optim.min_lr_ratio:
            key = f"models.{name}.optim"
            yield (
                f"{key}.min_lr_ratio={model.optim.min_lr_ratio:g} has no effect with {key}.schedule="
                f"constant. Set {key}.schedule to linear or cosine, or {key}.min_lr_ratio=0."
            )


def _chat_warnings(config: RunConfig, graph: Graph) -> Iterator[str]:
    """Yield a warning for each `nodes.actor_gen` that sends texts to a model with a chat template."""
    for node in graph.nodes:
        model = graph.model(node.spec.models[0]) if is_library_node(node.spec, "actor_gen") else None
        if model is not None and has_chat_template(config, model):
            yield (
                f"{node.name} sends plain text to {model.name}, whose tokenizer has a chat template: the "
                "model does not see it as a message of a user. Use nodes.chat_gen, which applies it."
            )


def _system_warnings(graph: Graph) -> Iterator[str]:
    """Yield a warning for each `nodes.chat_gen` with another system message than the model's first one."""
    first: dict[str, tuple[str, str | None]] = {}
    for node in graph.nodes:
        if not is_library_node(node.spec, "chat_gen"):
            continue
        model = node.spec.models[0]
        system = node.spec.knob_values["system"]
        other, expected = first.setdefault(model, (node.name, system))
        if system != expected:
            yield (
                f"nodes.{other}.system is {_shown(expected)}, but nodes.{node.name}.system is "
                f"{_shown(system)}: {model} gets a different prompt in each. Set both to the same text."
            )


def _staleness_warnings(config: RunConfig, graph: Graph) -> Iterator[str]:
    """Yield a warning for each train node whose `prox` does not fit the lags of its tokens."""
    for node in graph.nodes:
        prox = node.spec.option("prox") if node.spec.verb == "train" else None
        is_generated = graph.node(graph.stream(node.stream).source).spec.verb == "generate"
        if prox == "loglinear" and is_generated and not config.schedule.certified_lag:
            yield (
                f"nodes.{node.name}.prox=loglinear does what prox=none does, as no sample is older than its "
                "step's weights with schedule.max_staleness=0. Set schedule.max_staleness, or prox=none."
            )
        if prox == "none" and config.schedule.max_staleness:
            yield (
                f"schedule.max_staleness={config.schedule.max_staleness} trains samples of older weights, "
                f"but with nodes.{node.name}.prox=none the loss clips what changed since they were drawn, "
                f"and not what the step changes. Set nodes.{node.name}.prox=recompute."
            )


def _quantization_warnings(config: RunConfig, graph: Graph) -> Iterator[str]:
    """Yield a warning for each train node whose loss takes a quantised engine for the trained policy."""
    for node in graph.nodes:
        if all(read.parameter != COMPARED for read in node.reads):
            continue
        name, missing = node.spec.models[0], missing_correction(node)
        model = config.models.get(name, ModelConfig())
        settings = {f"gen.{key}": value for key, value in model.gen.precisions.items()}
        for key, value in (settings | {"fp8": model.fp8}).items():
            if value is not None and missing is not None:
                yield (
                    f"models.{name}.{key}={value} makes the engine draw from another policy than the "
                    f"trainer's, which can stop learning. {missing}"
                )


def _reference_warnings(config: RunConfig, graph: Graph) -> Iterator[str]:
    """Yield a warning for each frozen model that rounds products otherwise than the model it started from."""
    for spec in graph.models:
        if spec.init_from is None or spec.trainable or spec.head != spec.init_from.head:
            continue
        ours, theirs = (config.models.get(one.name, ModelConfig()).fp8 for one in (spec, spec.init_from))
        if ours != theirs:
            key, other = f"models.{spec.name}.fp8", f"models.{spec.init_from.name}.fp8"
            yield (
                f"{key} is {ours or 'null'}, but {other} is {theirs or 'null'}: with the same weights, their "
                f"log-probs differ by FP8's rounding. Set {key}={theirs or 'null'} for equal ones."
            )


def _shown(system: str | None) -> str:
    return "not set" if system is None else repr(shorten(system, 40))


def _shapes(config: RunConfig, graph: Graph) -> dict[str, ModelShape]:
    shapes = {spec.name: model_shape(config, graph, spec) for spec in graph.models}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _images(config: RunConfig, graph: Graph) -> dict[str, PromptImages]:
    """Return the images of the prompts of each model that sees, by the settings of its processor."""
    sizes, found = config.workload.images, {}
    for spec in graph.models:
        known = image_model(config, graph, spec) if spec.vision and sizes.count else None
        if known is not None:
            family, architecture, saved = known
            most = config.models.get(spec.name, ModelConfig()).gen.max_model_len // 2
            for width, height in image_sizes(sizes):
                grid = family.grid_of(architecture, saved, width, height)
                images = PromptImages(sizes.count, width, height, family.image_load(architecture, grid))
                if images.tokens <= most:
                    break
            found[spec.name] = images
    return found


def _families(config: RunConfig, graph: Graph) -> dict[str, str]:
    families = {spec.name: model_family(config, graph, spec) for spec in graph.models}
    return {name: family for name, family in families.items() if family is not None}
