"""Validate the configurations of vLLM's engines for GPUs, without a GPU.

    build/cuda/bin/python requirements/cuda_configs.py [--out FILE]

`make cuda-configs` makes that environment: the CUDA builds of vLLM and torch beside the packages of
`make env`. A driver that does nothing (`libcuda.so.1`) lets vLLM's libraries load, and a made-up H100 takes
the place of the platform that vLLM would detect. The settings of engines are those that a worker makes of a
plan. vLLM makes its own configuration of them, and chooses a kernel of attention. Nothing is computed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import yaml

from hflow.base.errors import HflowError
from hflow.base.shipped import shipped_recipes
from hflow.config.schema import LoraConfig
from hflow.engines.interface import EngineSetup
from hflow.engines.process.engine import process_settings, write_config
from hflow.engines.process.engine_process import ProcessSettings
from hflow.engines.vllm.engine import vllm_launch
from hflow.launch.planning.compile import Compiled, compile_recipe
from hflow.launch.running.worker_setup import make_setup
from hflow.models.hf_config import read_config
from hflow.models.settings import ModelSettings
from hflow.shapes.architectures import knows_tensors, read_shape
from hflow.shapes.model_shape import ModelShape
from hflow.types.routed_experts import ROUTED_EXPERTS
from hflow.workers.process_setup import device_environment
from hflow.workers.worker import build_engines

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "build" / "cuda-stub"
"""The directory of the driver that does nothing."""
DRIVER_FUNCTIONS = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
)
"""What vLLM 0.32's libraries need to load."""
NO_DEVICE = 100
"""`CUDA_ERROR_NO_DEVICE`, which every function returns."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOKENIZER = ROOT / "configs" / "checkpoints" / "addition"
EIGHT_H100 = "cluster=h100-1x8"
LOCAL_VARIABLES = ("CUDA_VISIBLE_DEVICES", "VLLM_LOGGING_LEVEL")
"""Variables that do not change a configuration."""


@dataclass(frozen=True)
class Case:
    """A recipe with settings."""

    recipe: str
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.recipe, *self.overrides))


@dataclass(frozen=True)
class PlannedEngine:
    """An engine of a plan, as its process receives it."""

    case: str
    replica: str
    settings: ProcessSettings
    environment: dict[str, str]


def cases() -> Iterator[Case]:
    """Yield every shipped recipe, and every command of GSM8K's table."""
    for name in shipped_recipes():
        if not name.startswith("gsm8k/"):
            yield Case(name, (EIGHT_H100,))
    readme = (ROOT / "recipes" / "gsm8k" / "README.md").read_text()
    for command in re.findall(r"^\| `hflow run recipes/(gsm8k/.+?)`", readme, re.MULTILINE):
        recipe, *overrides = command.split()
        yield Case(recipe.removesuffix(".py"), tuple(overrides))
    yield Case("gsm8k/grpo_7b", ("deterministic=true",))
    yield Case("gsm8k/grpo_7b", ("models.actor.gen.max_running=2048",))
    yield Case("gsm8k/grpo_7b", ("models.actor.gen.cuda_graphs=false",))
    yield Case("gsm8k/grpo_7b", ("models.actor.gen.quantization=fp8",))
    yield Case("gsm8k/grpo_7b", ("models.actor.gen.quantization=fp8", "deterministic=true"))
    yield Case("gsm8k/grpo_7b", ("models.actor.gen.cache_dtype=fp8",))
    yield Case("gsm8k/grpo_7b", ("models.actor.gen.cache_dtype=fp8", "deterministic=true"))
    yield Case("gsm8k/grpo_7b", ("models.actor.gen.cache_dtype=fp8", "models.actor.gen.quantization=fp8"))
    replay = ("nodes.actor_gen.routing_replay=true", "models.actor.gen.layout=t2")
    yield Case("grpo", (EIGHT_H100, "model@models.actor=tiny-qwen3-moe", *replay))


def models() -> Iterator[tuple[str, dict[str, Any], ModelShape]]:
    """Yield name, architecture and sizes of every shipped model that vLLM serves."""
    for file in sorted((ROOT / "configs" / "model").glob("*.yaml")):
        architecture = yaml.safe_load(file.read_text())["architecture"]
        shape = read_shape(architecture)
        if shape is not None and knows_tensors(shape):
            yield file.stem, architecture, shape


def model_engines(directory: Path) -> Iterator[PlannedEngine]:
    """Yield engines of `models`, with 1 to 8 tensor ranks, without a plan."""
    for model_name, architecture, shape in models():
        path = directory / model_name
        write_checkpoint(architecture, path)
        settings = ModelSettings(name="actor", path=str(path), dtype="bf16", device="cuda")
        adapted = dataclasses.replace(settings, lora=LoraConfig(r=8, alpha=8))
        sizes = [size for size in (1, 2, 4, 8) if shape.num_heads % size == 0]
        variants = [(f"t{size}", settings, size, ()) for size in sizes] + [("lora", adapted, 1, ())]
        if shape.vision is None:  # hflow refuses to quantise a model that sees
            variants += [(f"fp8 t{size}", settings, size, ()) for size in sizes]
        variants += [(f"fp8 cache t{size}", settings, size, ()) for size in sizes]
        if shape.experts is not None:
            variants.append(("routing replay", settings, 1, (ROUTED_EXPERTS,)))
        for name, model, size, records in variants:
            options = {"max_running": 256, "max_model_len": 4096, "cache_bytes": 8 << 30}
            if name.startswith("fp8"):
                options["cache_dtype" if "cache" in name else "quantization"] = "fp8"
            devices = tuple(map(str, range(size)))
            setup = EngineSetup(
                model, options, tensor=size, devices=devices, shares_devices=True, records=records
            )
            launch = vllm_launch(setup)
            found = process_settings(setup, launch, directory)
            yield PlannedEngine(f"{model_name}, {name}", "actor@gen", found, dict(launch.environment))


def write_checkpoint(architecture: Mapping[str, Any], directory: Path) -> None:
    """Write a checkpoint without weights: a config, and the tokenizer of a shipped model."""
    settings = ModelSettings(name="actor", architecture=dict(architecture))
    write_config(settings, read_config(settings), directory)
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def compiled(case: Case, directory: Path) -> Compiled:
    """Return the plan of a case. Models that are not on this machine are replaced by their architecture."""
    overrides = list(case.overrides)
    found = compile_recipe(case.recipe, overrides)
    engines = {replica.model for replica in found.plan.replicas if replica.role == "gen"}
    for name, model in found.config.models.items():
        architecture = model.architecture
        if architecture is not None and (name in engines or model.path is not None):
            path = directory / name
            write_checkpoint(architecture, path)
            overrides.append(f"models.{name}.path={path}")
    overrides += [f"models.{name}.gen.engine=vllm" for name in sorted(engines)]
    return compile_recipe(case.recipe, overrides)


def planned_engines(case: Case, directory: Path) -> Iterator[PlannedEngine]:
    """Yield the engines of a case, built by a worker up to the start of their processes."""
    setups: list[EngineSetup] = []
    found = compiled(case, directory)
    factories = defaultdict[str, Any](lambda: lambda setup: setups.append(setup))
    worker_setup = make_setup(found, factories)
    for replica in found.plan.replicas:
        if replica.role == "gen":
            worker = replica.heads[0]
            devices = [str(rank) for rank in range(found.plan.cluster.devices_per_node)]
            build_engines(worker_setup, [replica], [worker], devices, {}, defaultdict(lambda: None))
            launch = vllm_launch(setups[-1])
            variables = device_environment(found.plan, worker) | dict(launch.environment)
            settings = process_settings(setups[-1], launch, directory)
            yield PlannedEngine(str(case), replica.name, settings, variables)


def build_stub() -> None:
    """Build the driver that does nothing."""
    STUB.mkdir(parents=True, exist_ok=True)
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in DRIVER_FUNCTIONS)
    library, name = STUB / "libcuda.so.1", "-Wl,-soname,libcuda.so.1"
    command = ["gcc", "-x", "c", "-shared", "-fPIC", name, "-o", str(library), "-"]
    subprocess.run(command, input=source, text=True, check=True)


def use_h100() -> None:
    """Let vLLM take this machine for one with eight H100."""
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class MadeUpH100(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 81559 << 20

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    vllm.platforms._current_platform = MadeUpH100()


def validate(file: Path) -> None:
    """Validate the engines of a file, in a process with their environment; print a JSON line for each."""
    use_h100()
    from vllm.device_allocator.cumem import cumem_available

    assert cumem_available, "vLLM's allocator, by which engines sleep, did not load"
    for engine in cloudpickle.loads(file.read_bytes()):
        try:
            row = configured(engine.settings)
        except Exception as error:  # noqa: BLE001  whatever vLLM raises is the result
            row = {"error": " ".join(str(error).split())[:500] or repr(error)}
        print(json.dumps({"case": engine.case, "replica": engine.replica, **row}), flush=True)


def configured(settings: ProcessSettings) -> dict[str, Any]:
    """Return vLLM's choices for an engine."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from hflow.engines.vllm.stepper import engine_config

    config = engine_config(settings)
    model, scheduler, compilation = config.model_config, config.scheduler_config, config.compilation_config
    sizes = compilation.cudagraph_capture_sizes or []
    asked, has_graphs = settings.arguments, bool(sizes)
    assert scheduler.async_scheduling == asked["async_scheduling"], "vLLM turned asynchronous scheduling off"
    assert has_graphs != asked["enforce_eager"], "vLLM turned CUDA graphs on or off"
    assert not has_graphs or max(sizes) >= asked["max_num_seqs"], "vLLM cut the sizes of CUDA graphs"
    with set_current_vllm_config(config):
        selector = AttentionSelectorConfig(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=config.cache_config.cache_dtype,
            block_size=None,
        )
        heads = model.get_num_attention_heads(config.parallel_config)
        attention = current_platform.get_attn_backend_cls(None, selector, heads)
    return {
        "architecture": model.architecture,
        "tensor": config.parallel_config.tensor_parallel_size,
        "length": model.max_model_len,
        "attention": attention.rpartition(".")[2],
        "cache": config.cache_config.cache_dtype,
        "graphs": compilation.cudagraph_mode.name + (f", {len(sizes)} up to {max(sizes)}" if sizes else ""),
        "sleeps": model.enable_sleep_mode,
        "async": scheduler.async_scheduling,
        "v2": config.use_v2_model_runner,
        **({} if model.quantization is None else {"fp8": fp8_kernel(config)}),
    }


def fp8_kernel(config: Any) -> str:
    """Return the kernel that vLLM chooses for the gates and ups of a quantised layer."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod

    model, tensor = config.model_config.hf_config, config.parallel_config.tensor_parallel_size
    with set_current_vllm_config(config):
        method = Fp8PerBlockOnlineLinearMethod()
        kernel = init_fp8_linear_kernel(
            activation_quant_key=method.activation_quant_key,
            weight_quant_key=method.weight_quant_key,
            weight_shape=(2 * model.intermediate_size // tensor, model.hidden_size),
            input_dtype=method.input_dtype,
            out_dtype=config.model_config.dtype,
        )
    return type(kernel).__name__


def main() -> int:
    """Plan all engines, validate them, and write the results. Return 1 if a configuration is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--validate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.validate is not None:
        validate(options.validate)
        return 0
    build_stub()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        engines = list(model_engines(Path(temporary)))
        for number, case in enumerate(cases()):
            found, reason = [], "it generates nothing"
            try:
                found = list(planned_engines(case, Path(temporary, str(number))))
            except HflowError as error:
                reason = str(error)
            engines += found
            if not found:
                rows.append({"case": str(case), "refused": reason})
                print(f"{case}: {reason}", flush=True)
        of_environment = defaultdict[tuple[tuple[str, str], ...], list[PlannedEngine]](list)
        for engine in engines:
            variables = engine.environment.items()
            key = tuple(sorted(pair for pair in variables if pair[0] not in LOCAL_VARIABLES))
            of_environment[key].append(engine)
        for key, members in of_environment.items():
            rows += validated(dict(key), members, Path(temporary, "engines"))
    failed = [row for row in rows if "error" in row]
    num_refused = sum("refused" in row for row in rows)
    print(f"{len(rows) - num_refused} engines, {len(failed)} not validated, {num_refused} cases have none")
    if options.out is not None:
        options.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return bool(failed)


def validated(environment: dict[str, str], engines: list[PlannedEngine], file: Path) -> list[dict[str, Any]]:
    """Return the results of engines that have the same environment."""
    file.write_bytes(cloudpickle.dumps(engines))
    command = [sys.executable, __file__, "--validate", str(file)]
    # With an empty list of devices, vLLM takes Triton for usable although no driver is active.
    variables = {
        **os.environ,
        **environment,
        "LD_LIBRARY_PATH": str(STUB),
        "CUDA_VISIBLE_DEVICES": "",
    }
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        rows = []
        for line in process.stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
                print(line, end="", flush=True)
    if len(rows) != len(engines):
        sys.exit(f"the process that validates ended with {process.returncode}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
