"""`measure_hardware`: a calibration of the device at hand, and the file that holds it."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from hflow.base.devices import is_gpu
from hflow.base.errors import ConfigError
from hflow.config import RunConfig
from hflow.config.schema import GenConfig, ModelConfig
from hflow.launch.planning.request import cluster_hardware, installed_versions, known_devices
from hflow.launch.planning.this_machine import device_file, device_of_product
from hflow.planner.forecast.cost.collectives import RankPlacement
from hflow.planner.forecast.cost.flops import Work, work_of
from hflow.planner.forecast.cost.generation import decode_step
from hflow.planner.forecast.cost.kernels import elementwise_bytes
from hflow.planner.forecast.cost.rank_collectives import Passes, fsdp_gathers, fsdp_scatters, total_time
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.cost.training import forward, train
from hflow.planner.plan.calibration import (
    Calibration,
    HostTimes,
    LinkRate,
    MatmulRate,
    MemoryRate,
    TrainerTimes,
)
from hflow.planner.plan.hardware import Device, Hardware
from hflow.planner.plan.traits import BACKENDS, ENGINES, traits
from hflow.profiling import measure
from hflow.profiling.fit import (
    ProductTime,
    ShardedTime,
    StepTime,
    cold_seconds,
    decode_seconds,
    fit_decode,
    fit_link,
    fit_loads,
    fit_matmul,
    fit_memory,
    fit_sharded,
    fit_training,
    held_out_error,
    link_seconds,
    training_seconds,
)
from hflow.profiling.short_run import ShortRunError, measure_overheads
from hflow.shapes.architectures import read_shape
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import DTYPE_BYTES
from hflow.types.kernels import flash_versions, packed_kernel

NUM_PROCESSES = 2
"""Processes that are measured together on a CPU."""
SHARDED = "torch"
"""The backend whose collectives are measured on a CPU."""
MIN_SHARE = 0.05
"""Least part of a sharded step that sharding is taken for, as differences of times may be negative."""
ENGINE = "embedded"
"""The engine whose decode steps are measured."""
NEVER_MEASURED = ("inter", *(name for name in ENGINES if name != ENGINE))
"""Parts that one machine, or a few small kernels, cannot show."""


@dataclass(frozen=True)
class HardwareProfile:
    """A calibration, and the file that it was written to."""

    calibration: Calibration
    file: Path


@dataclass(frozen=True)
class LayerTime:
    """A pass through some layers, their embedding and their output matrix, on one device."""

    model: measure.SmallModel
    num_tokens: int
    dtype: str
    trains: bool
    """Whether it is a training step: forward, backward and the optimizer."""
    seconds: float
    expected_seconds: float
    """What plans count with."""


def measure_hardware(
    device: str | None = None,
    file: Path | None = None,
    report_progress: Callable[[str], None] = lambda line: None,
) -> HardwareProfile:
    """Measure the device at hand and write a calibration for `calibration=FILE`.

    Args:
        device: the device's name in the hardware files; None: `cpu`, or what CUDA calls its first device.
        file: where to write it; None: `DEVICE.yaml` in the working directory.
        report_progress: called with a line for each part.

    Raises:
        ConfigError: for an unknown device, CUDA that is not there, or a file that cannot be written.
    """
    name = device_at_hand() if device is None else device
    file = file or Path(f"{name}.yaml")
    hardware = machine_hardware(name)
    kind = hardware.device.type
    if is_gpu(kind) and not torch.cuda.is_available():
        raise ConfigError(f"{name} cannot be measured: torch finds no CUDA device; set --device cpu")
    _check_writable(file)
    threads = torch.get_num_threads()
    measure.use_one_core(kind)
    try:
        calibration = _calibration(hardware, report_progress, file.stem)
    finally:
        torch.set_num_threads(threads)
    _write(calibration, file)
    calibration = _with_overheads(calibration, file, hardware, report_progress)
    _write(calibration, file)
    return HardwareProfile(calibration, file)


def layer_times(backend: str, kind: str) -> list[LayerTime]:
    """Return the seconds of some layers on the device at hand, by kind, beside those that plans count with.

    Raises:
        ConfigError: if no hardware file is for the device.
    """
    hardware = machine_hardware(device_at_hand() if is_gpu(kind) else "cpu")
    dtype = _dtype(kind)
    model, batch = measure.LAYERS[kind]
    host = hardware.calibration.host_times(backend)
    costs = replace(_costs(backend, model, hardware, dtype), host=host)
    times = []
    for _, num, tokens, trains, seconds in measure.training_steps(backend, kind, dtype, [model], [batch]):
        planned = _planned_seconds(costs, _work(num, tokens), trains)
        times.append(LayerTime(model, num * tokens, dtype, trains, seconds, planned))
    return times


def device_at_hand(recipe: Path = Path("recipe.py")) -> str:
    """Return the name in the hardware files of what CUDA calls its first device; `cpu` without one.

    A user's hardware files are beside the recipe.

    Raises:
        ConfigError: if no file is for this device.
    """
    if not torch.cuda.is_available():
        return "cpu"
    product = torch.cuda.get_device_name(0)
    name = device_of_product(product, known_devices(recipe))
    if name is None:
        raise ConfigError(
            f"hflow has no figures of {product}; describe it in {device_file(product)}, or name a device "
            "that it has with --device"
        )
    return name


def similar_device(recipe: Path) -> Device | None:
    """Return figures with which runs on CUDA's first device can be planned; None if there are none.

    Those of another device with its compute capability, which decides the kernels, where it has no own ones.
    A user's hardware files are beside the recipe.
    """
    known = known_devices(recipe)
    with suppress(ConfigError):
        return known[device_at_hand(recipe)]
    capability = torch.cuda.get_device_capability(0)
    return next((device for device in known.values() if device.capability == capability), None)


def machine_hardware(name: str) -> Hardware:
    """Return the figures of a machine with as many of these devices as are at hand, at least two."""
    devices = known_devices(Path("recipe.py"))
    is_cuda = name in devices and is_gpu(devices[name].type)
    num = max(2, torch.cuda.device_count()) if is_cuda else 2
    return cluster_hardware(RunConfig(name="profile", cluster=f"{name}-1x{num}"), Path("recipe.py"))[1]


def _calibration(hardware: Hardware, report: Callable[[str], None], name: str) -> Calibration:
    device, shipped = hardware.device, hardware.calibration
    kind = device.type
    missed: dict[str, float] = {}
    unmeasured = list(NEVER_MEASURED)

    report("collectives")
    num_ranks = torch.cuda.device_count() if is_gpu(kind) else NUM_PROCESSES
    sharded = measure.sharded_steps(num_ranks) if kind == "cpu" else []
    found = replace(
        shipped,
        name=name,
        devices=(device.name,),
        source=f"hflow profile on {platform.machine()}, {datetime.date.today().isoformat()}",
        is_measured=True,
        versions=installed_versions(),
        published={},
        trainer=TrainerTimes(),  # whole training steps are measured
    )
    if is_gpu(kind) and num_ranks > 1:
        sizes, link = measure.collectives(kind, num_ranks), hardware.intra
        found = replace(found, intra=fit_link(sizes, link))
        missed["collectives"] = held_out_error(
            sizes, partial(fit_link, link=link), partial(link_seconds, link=link)
        )
    elif is_gpu(kind):
        unmeasured.append("intra")

    with measure.neighbours(kind, num_ranks - 1) as neighbours_train:
        found = _with_kernels(replace(hardware, calibration=found), report, missed)
        neighbours_train.set()
        found = _with_training(replace(hardware, calibration=found), sharded, report, missed)
    if is_gpu(kind):
        unmeasured.append("time per tensor")
    return replace(found, missed=missed, unmeasured=tuple(unmeasured))


def _with_kernels(hardware: Hardware, report: Callable[[str], None], missed: dict[str, float]) -> Calibration:
    """Return a calibration with the kernels of a device and its engine; adds their errors to `missed`."""
    device, found = hardware.device, hardware.calibration
    kind, bandwidth = device.type, device.memory_gb_per_s * 1e9
    report("matrix products")
    matmul = dict(found.matmul)
    for precision in ("fp32", "bf16"):
        rows, peak = measure.products(kind, precision), device.tflops[precision] * 1e12
        matmul[precision] = fit_matmul(rows, peak)
        missed[f"matmul {precision}"] = held_out_error(
            rows, partial(fit_matmul, peak=peak), partial(_product_seconds, peak=peak)
        )

    report("memory, attention and disk")
    dtype = _dtype(kind)
    cold = measure.cold_products(kind, dtype)
    reading = _Reading(matmul[dtype], device.tflops[dtype] * 1e12, bandwidth, DTYPE_BYTES[dtype])
    memory = replace(reading.fit(cold), stream=measure.copy_rate(kind) / bandwidth)
    missed["weights from memory"] = held_out_error(cold, reading.fit, reading.seconds)
    attention = measure.attention_flops(kind, dtype) / (device.tflops[dtype] * 1e12)
    host_copy = LinkRate(share=measure.host_copy_rate(kind) / (hardware.host.gb_per_s * 1e9))
    transfers = replace(
        found.transfers,
        store_gb_per_s=measure.copy_rate("cpu") / 2e9,
        disk_gb_per_s=measure.disk_rate() / 1e9,
        checksum_gb_per_s=None,
    )

    if kind == "cpu":
        report("new weights")
        loads, checksum_rate = measure.loads(dtype), measure.checksum_rate()
        # They are copied once, and summed where they come from and where they arrive.
        of_byte = 2 / (memory.stream * bandwidth) + 2 / checksum_rate
        of_tensor = fit_loads(loads, of_byte)
        transfers = replace(transfers, tensor_us=of_tensor * 1e6, checksum_gb_per_s=checksum_rate / 1e9)
        missed["new weights"] = held_out_error(
            loads,
            partial(fit_loads, seconds_per_byte=of_byte),
            lambda row, of_tensor: of_tensor * row.num_tensors + of_byte * row.num_bytes,
        )

    report("decode steps")
    found = replace(
        found,
        matmul=matmul,
        attention=attention,
        attention_of={_attention_kernel(device, dtype): attention},
        memory=memory,
        host_copy=host_copy,
        transfers=transfers,
    )
    host = dict(found.host)
    figures = replace(hardware, calibration=found)
    steps = _decode_times(figures, dtype)
    host[ENGINE] = _with_experts(fit_decode(steps), host[ENGINE])
    missed["decode"] = held_out_error(steps, fit_decode, decode_seconds)
    return replace(found, host=host)


def _attention_kernel(device: Device, dtype: Literal["fp32", "bf16"]) -> str:
    """Return the kernel that computes attention on this machine."""
    return packed_kernel(device.type, dtype, device.capability, flash_versions(), deterministic=False).kernel


def _with_experts(found: HostTimes, shipped: HostTimes) -> HostTimes:
    """Return times with those of layers with experts, of which there are none in the measured models."""
    return replace(
        found,
        expert_us=shipped.expert_us,
        exchange_us=shipped.exchange_us,
        expert_launch_us=shipped.expert_launch_us,
        expert_loop_us=shipped.expert_loop_us,
    )


def _with_training(
    hardware: Hardware,
    sharded: Sequence[float],
    report: Callable[[str], None],
    missed: dict[str, float],
) -> Calibration:
    """Return a calibration with the times of backends, and on a CPU of collectives; adds to `missed`."""
    found, kind = hardware.calibration, hardware.device.type
    dtype, is_ahead = _dtype(kind), kind != "cpu"
    host, intra = dict(found.host), found.intra
    for backend in BACKENDS:
        report(f"training with {backend}")
        calls = _training_times(backend, hardware, dtype)
        host[backend] = _with_experts(fit_training(calls, is_ahead), host[backend])
        missed[backend] = held_out_error(
            calls, partial(fit_training, is_ahead=is_ahead), partial(training_seconds, is_ahead=is_ahead)
        )
        if backend == SHARDED and sharded:
            rows = _sharded_steps(sharded, calls, hardware, dtype)
            rate, step = fit_sharded(rows)
            intra = LinkRate(share=rate / (hardware.intra.gb_per_s * 1e9))
            host[backend] = replace(host[backend], step_us=step * 1e6)
            missed["collectives"] = held_out_error(
                rows, fit_sharded, lambda row, fitted: row.moved_bytes / fitted[0] + fitted[1]
            )
    return replace(found, host=host, intra=intra)


def _dtype(kind: str) -> Literal["bf16", "fp32"]:
    return "bf16" if is_gpu(kind) else "fp32"


def _sharded_steps(
    sharded: Sequence[float], calls: Sequence[StepTime], hardware: Hardware, dtype: Literal["fp32", "bf16"]
) -> list[ShardedTime]:
    """Return the seconds by which sharded training takes longer than the same on one rank.

    `sharded` has the seconds of each model's training, with the first batch on each rank; `calls` those of
    one rank, for batch inference and training of each model. The hardware's calibration gives the seconds of
    copies and of the optimizer.
    """
    alone, rows = calls[1 :: 2 * len(measure.BATCHES)], []
    work, passes = _work(*measure.BATCHES[0]), Passes.of(1, 2)
    for model, seconds, one in zip(measure.MODELS, sharded, alone, strict=True):
        whole = _costs(SHARDED, model, hardware, dtype)
        costs = replace(
            whole, layout=Layout(data=NUM_PROCESSES), data=RankPlacement(per_machine=NUM_PROCESSES)
        )
        collectives = [*fsdp_gathers(costs, passes), *fsdp_scatters(costs, passes)]
        time = total_time(collectives, costs)
        without = _planned_seconds(costs, work, True) - time.seconds
        others = one.seconds + without - _planned_seconds(whole, work, True) + time.latency
        moved = sum(each.times * each.num_bytes for each in collectives) * (1 - 1 / NUM_PROCESSES)
        rows.append(ShardedTime(moved, max(seconds - others, MIN_SHARE * seconds)))
    return rows


def _with_overheads(
    calibration: Calibration, file: Path, hardware: Hardware, report: Callable[[str], None]
) -> Calibration:
    """Return a calibration, which the file has too, with the time of samples and messages."""
    report("a short run")
    device = hardware.device
    num_devices = NUM_PROCESSES
    if is_gpu(device.type):
        num_devices = max(1, torch.cuda.device_count())
        torch.cuda.empty_cache()  # the run needs the memory
    try:
        found = measure_overheads(calibration, file, device.name, num_devices)
    except ShortRunError as error:
        report(f"nothing, as the short run failed: {error}")
        return replace(calibration, unmeasured=(*calibration.unmeasured, "samples and messages"))
    missed = {**calibration.missed, "step of a short run": found.missed}
    process = min(found.node_us, calibration.process_us)  # the run used processes
    node = found.node_us - process
    return replace(calibration, sample_us=found.sample_us, node_us=node, process_us=process, missed=missed)


@dataclass(frozen=True)
class _Reading:
    """Predicts products whose weights come from memory."""

    rate: MatmulRate
    peak: float
    bytes_per_s: float
    itemsize: int

    def fit(self, rows: Sequence[ProductTime]) -> MemoryRate:
        share, sharpness = fit_memory(rows, self.rate, self.peak, self.bytes_per_s, self.itemsize)
        return MemoryRate(share, 1.0, sharpness)

    def seconds(self, row: ProductTime, memory: MemoryRate) -> float:
        return cold_seconds(row, self.rate, memory, self.peak, self.bytes_per_s, self.itemsize)


def _product_seconds(row: ProductTime, rate: MatmulRate, peak: float) -> float:
    return rate.seconds(row.rows, row.inner, row.columns, peak)


def _decode_times(hardware: Hardware, dtype: Literal["fp32", "bf16"]) -> list[StepTime]:
    """Return measured decode steps with the seconds of their kernels by the cost model."""
    rows = []
    for model, sequences, context, seconds in measure.decode_steps(hardware.device.type, dtype):
        costs, num_layers = _costs(ENGINE, model, hardware, dtype), model.num_layers
        kernels = decode_step(costs, sequences, context).seconds
        others = num_layers * _pass_seconds(costs, sequences)
        rows.append(StepTime(seconds, kernels, others, num_layers, sequences))
    return rows


def _training_times(backend: str, hardware: Hardware, dtype: Literal["fp32", "bf16"]) -> list[StepTime]:
    """Return measured calls of a backend with the seconds of their kernels by the cost model."""
    rows = []
    timed = measure.training_steps(backend, hardware.device.type, dtype, measure.MODELS, measure.BATCHES)
    for model, sequences, tokens, trains, seconds in timed:
        costs = _costs(backend, model, hardware, dtype)
        work = _work(sequences, tokens)
        kernels = _planned_seconds(costs, work, trains)
        # A backward pass costs as much as two forward passes, and launches its kernels once.
        others = model.num_layers * (3 if trains else 1) * _pass_seconds(costs, work.rows)
        num_layers = model.num_layers * (2 if trains else 1)
        rows.append(StepTime(seconds, kernels, others, num_layers, sequences))
    return rows


def _work(num_sequences: int, num_tokens: int) -> Work:
    """Return the work of what `measure.training_steps` computes."""
    return work_of([num_tokens] * num_sequences, num_tokens // 4, 1)


def _planned_seconds(costs: ReplicaCosts, work: Work, trains: bool) -> float:
    """Return the seconds of one micro-batch by the cost model."""
    parts = train(costs, work, 1) if trains else forward(costs, work)
    return sum(part.seconds for part in parts)


def _costs(
    backend: str, model: measure.SmallModel, hardware: Hardware, dtype: Literal["fp32", "bf16"]
) -> ReplicaCosts:
    """Return the costs of a model whose host and element-wise kernels take no time."""
    one, shape = RankPlacement(), read_shape(model.architecture)
    assert shape is not None
    return ReplicaCosts(
        shape=shape,
        config=ModelConfig(dtype=dtype, gen=GenConfig(engine=ENGINE)),
        layout=Layout(),
        traits=traits(backend),
        host=HostTimes(passes=0.0),
        hardware=hardware,
        data=one,
        tensor=one,
        pipe=one,
    )


def _pass_seconds(costs: ReplicaCosts, rows: float) -> float:
    """Return the seconds in which a layer's element-wise kernels read or write everything once."""
    once = replace(costs, host=HostTimes(passes=1.0))
    return elementwise_bytes(once, rows) / costs.rates.stream


def _check_writable(file: Path) -> None:
    """Find a path that cannot be written before minutes of measuring."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write the calibration {str(file)!r}: {error.strerror or error}") from error


def _write(calibration: Calibration, file: Path) -> None:
    import yaml

    values: dict[str, Any] = asdict(calibration)
    del values["name"]
    text = yaml.safe_dump(_plain(values), sort_keys=False, width=110)
    heading = f"# Measured by hflow profile; use it with calibration={file}"
    file.write_text(f"{heading}\n{text}", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return numbers with five digits, and plain lists and dictionaries."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
