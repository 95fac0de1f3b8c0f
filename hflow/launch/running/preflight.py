"""Checks before a run starts: that the plan can run, on this machine. They need no model library."""

from __future__ import annotations

import importlib.util
import inspect

from hflow.base.devices import is_gpu
from hflow.base.errors import BackendError, ConfigError, NotYetError
from hflow.config import RunConfig
from hflow.config.schema import ONE_PROCESS, FaultsConfig, ModelConfig
from hflow.environments.client import host_of
from hflow.environments.interface import adapter_of
from hflow.graph.ir import Graph
from hflow.launch.planning.compile import Compiled
from hflow.launch.running.worker_setup import make_processes
from hflow.planner.models.choices import deterministic_variables, te_setting
from hflow.planner.models.descriptors import descriptor, engine_kind
from hflow.planner.plan.rows import Replica
from hflow.planner.plan.traits import ENGINES
from hflow.processes.error_location import relative_path
from hflow.sandboxes.providers import find_problem
from hflow.types.kernels import (
    TE_PACKAGE,
    LayerKernels,
    install_problem,
    installed_transformer_engine,
    kernel_install,
)
from hflow.types.sandbox import LIMITS_OF_KNOBS, sandbox_of
from hflow.workers.process_setup import ray_address


def refuse_unrunnable(compiled: Compiled) -> None:
    """Refuse a plan that cannot run, before anything starts.

    Raises:
        NotYetError: for a reason that `hflow plan` prints too.
        BackendError: for packages that are missing on this machine, or do not fit together.
        RunError: if this is so on a machine that does not have the plan's GPUs.
    """
    for reason in compiled.plan.unrunnable:
        raise NotYetError(reason)
    for replica in compiled.plan.replicas:
        problem = descriptor(replica.backend).find_problem(compiled.plan.cluster.device)
        if problem is not None:
            _refuse_missing_gpus(compiled)  # the cause of other problems where there are none
            instead = _other_engine(replica, compiled.plan.cluster.device)
            raise BackendError(f"{replica.name} uses {replica.backend}, but {problem}{instead}")
    for choice in compiled.plan.layers:
        problem_of_te = install_problem(installed_transformer_engine())
        if choice.kernels is LayerKernels.TRANSFORMER_ENGINE and problem_of_te:
            _refuse_missing_gpus(compiled)
            model = compiled.plan.replica(choice.replica).model
            asked, instead = te_setting(model, compiled.config.models.get(model, ModelConfig()))
            raise BackendError(
                f"{asked}, but {problem_of_te}. Run {kernel_install(TE_PACKAGE)}, or set {instead}"
            )
    check_packages(compiled.graph)


def _refuse_missing_gpus(compiled: Compiled) -> None:
    """Refuse a plan for GPUs on a machine that would start Ray and has too few."""
    if is_gpu(compiled.plan.cluster.device) and compiled.config.workers == "ray":
        make_processes(compiled.plan).refuse_impossible()


def _other_engine(replica: Replica, device: str) -> str:
    """Return the setting of an engine that this machine can run; empty if there is none."""
    if replica.role != "gen":
        return ""
    is_divided = replica.layout.num_shards > 1
    able = (
        name
        for name in ENGINES
        if name != replica.backend
        and (engine_kind(name).traits.is_model_parallel or not is_divided)
        and engine_kind(name).find_problem(device) is None
    )
    return next((f", or set models.{replica.model}.gen.engine={name}" for name in able), "")


def check_packages(graph: Graph) -> None:
    """Check that packages which bodies ask for are installed on this machine.

    Raises:
        BackendError: if one is not.
    """
    for node in graph.nodes:
        asks = any(kind == "tensordict" for _, kind in node.spec.provided)
        if asks and importlib.util.find_spec("tensordict") is None:
            raise BackendError(
                f"{node.name} ({node.spec.where}) asks for a TensorDict, but the package tensordict is not "
                "installed. Run pip install 'hflow-rl[tensordict]'"
            )


def check_environments(compiled: Compiled) -> None:
    """Start the environments of nodes once, if workers are on this machine.

    Raises:
        ConfigError: if one cannot be started.
    """
    if compiled.config.workers == "ray" and ray_address(compiled.plan.cluster) is not None:
        return  # its interpreters are on other machines
    for node in compiled.graph.nodes:
        adapter = adapter_of(compiled.bodies[node.name]) if node.name in compiled.bodies else None
        if adapter is not None:
            try:
                host_of(adapter.name, node.spec.knob_values).start()
            except ConfigError as error:
                raise ConfigError(f"{node.name} ({node.spec.where}): {error}") from None


def check_sandboxes(compiled: Compiled) -> None:
    """Check the sandboxes of bodies, and of the tools in their modules, if workers are on this machine.

    Raises:
        ConfigError: for the first one whose calls cannot run here.
    """
    if compiled.config.workers == "ray" and ray_address(compiled.plan.cluster) is not None:
        return  # its calls run on other machines
    for node in compiled.graph.nodes:
        limits_of = getattr(compiled.bodies.get(node.name), LIMITS_OF_KNOBS, None)
        if limits_of is not None and (problem := find_problem(limits_of(node.spec.knob_values))) is not None:
            raise ConfigError(f"the sandbox of {node.name} ({node.spec.where}) cannot be made: {problem}")
    for body in compiled.bodies.values():
        for tool in getattr(inspect.unwrap(body), "__globals__", {}).values():
            limits = sandbox_of(tool) if inspect.isfunction(tool) else None
            if limits is not None and (problem := find_problem(limits)) is not None:
                where = f"{relative_path(tool.__code__.co_filename)}:{tool.__code__.co_firstlineno}"
                raise ConfigError(f"the sandbox of {tool.__name__} ({where}) cannot be made: {problem}")


def check_ray(config: RunConfig) -> None:
    """Check that Ray is installed, if workers are its actors.

    Raises:
        BackendError: if it is not.
    """
    if config.workers == "ray" and importlib.util.find_spec("ray") is None:
        raise BackendError(
            "workers=ray needs the package ray, which is not installed. Run pip install ray, or set "
            "workers=inproc, which uses one process and one device"
        )


def check_variables(config: RunConfig) -> None:
    """Check that there are processes whose environment variables `env` sets.

    Raises:
        ConfigError: if there are none.
    """
    if config.env and config.workers in ONE_PROCESS:
        raise ConfigError(
            "env sets variables of worker processes, but workers=inproc has none; remove env, and set them "
            "before `hflow run`"
        )


def check_determinism(compiled: Compiled) -> None:
    """Check that `env` leaves alone what makes two runs equal.

    Raises:
        ConfigError: for the first variable that it changes.
    """
    for worker in range(compiled.plan.cluster.num_devices):
        for name, value in deterministic_variables(compiled.plan, worker).items():
            own = compiled.config.env.get(name, value)
            if own != value:
                raise ConfigError(
                    f"env.{name} is {own}, but deterministic=true needs {value}; remove env.{name}, or set "
                    "deterministic=false"
                )


def check_faults(config: RunConfig) -> None:
    """Check that there are processes that could fail on their own.

    Raises:
        ConfigError: if there are none.
    """
    for name in ("max_restarts", "hang_seconds"):
        default = getattr(FaultsConfig(), name)
        if config.workers in ONE_PROCESS and getattr(config.faults, name) != default:
            raise ConfigError(
                f"faults.{name} is about worker processes, but workers=inproc has none; set it to its "
                f"default, {default}, or set workers=ray"
            )


def check_saving(config: RunConfig, graph: Graph) -> None:
    """Check that checkpoints are taken when the metric is known that chooses the best of them.

    Raises:
        ConfigError: if they are not.
    """
    if config.keep_best is not None and not config.save_every:
        raise ConfigError(
            f"keep_best={config.keep_best} needs checkpoints at the steps where it is known; set save_every "
            "to the `every` of the evaluation"
        )
    name = (config.keep_best or "").removeprefix("-").partition("/")[0]
    stream = next((stream for stream in graph.streams if stream.name == name), None)
    if stream is None or graph.root_stream(name).trained:
        return
    source = graph.node(graph.root_stream(name).source).spec
    evaluated = [steps for steps in range(source.after, config.steps, source.every) if steps]
    if evaluated and all(steps % config.save_every for steps in evaluated):
        raise ConfigError(
            f"keep_best={config.keep_best} is known every {source.every} steps from step {source.after} on, "
            f"but save_every={config.save_every} takes no checkpoint then; set save_every={source.every}, "
            f"and nodes.{source.name}.after to a multiple of it"
        )
