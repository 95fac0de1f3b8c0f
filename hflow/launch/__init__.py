"""Checks, plans, simulates and runs recipes, and reads what runs have written.

This is the only package that chooses concrete classes for workers, backends and engines. `check`, `plan` and
`simulate` import neither torch nor ray; `run` and `twin` import them when called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hflow.launch.checkpoints.evaluation_options import EvaluationOptions
from hflow.launch.new_recipe import NewRecipe, new_recipe
from hflow.launch.node_catalog import CatalogNode, ready_node, ready_nodes, recipe_nodes
from hflow.launch.planning.compile import (
    Compiled,
    check,
    compare_plans,
    compile_plan_file,
    compile_recipe,
    compose_recipe,
    plan,
    plan_file_text,
)
from hflow.launch.planning.plan_file import compose_plan_file
from hflow.launch.planning.variants import Target, size, what_if
from hflow.launch.results.compare import compare_runs
from hflow.launch.results.ledger import (
    SAMPLE_COLUMNS,
    count_samples,
    samples,
    samples_with_text,
    why,
    why_texts,
)
from hflow.launch.results.runs import read_report
from hflow.report.text.summary import RunSummary

if TYPE_CHECKING:
    from hflow.launch.checkpoints.evaluate import EvaluationReport
    from hflow.launch.checkpoints.export import Dtype, ExportedModel
    from hflow.launch.checkpoints.serve import ServedEndpoint
    from hflow.launch.running.twin import TwinReport
    from hflow.profiling.calibrate import HardwareProfile
    from hflow.runtime.simulation.simulate_plan import Simulation

__all__ = [
    "SAMPLE_COLUMNS",
    "CatalogNode",
    "Compiled",
    "EvaluationOptions",
    "NewRecipe",
    "Target",
    "check",
    "compare_plans",
    "compare_runs",
    "compile_plan_file",
    "compile_recipe",
    "compose_plan_file",
    "compose_recipe",
    "count_samples",
    "evaluate",
    "exit_without_ray",
    "export",
    "new_recipe",
    "plan",
    "plan_file_text",
    "profile",
    "read_report",
    "ready_node",
    "ready_nodes",
    "recipe_nodes",
    "resume",
    "run",
    "run_plan",
    "samples",
    "samples_with_text",
    "serve",
    "simulate",
    "size",
    "twin",
    "what_if",
    "why",
    "why_texts",
]


def exit_without_ray(code: str | int | None) -> None:
    """End this process at once if a Ray that it joined does not answer; Ray would wait for it at the exit.

    Args:
        code: the exit code.
    """
    actors = sys.modules.get("hflow.workers.ray.ray_actors")
    if actors is not None and actors.is_ray_lost:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


def run(recipe: str | Path, overrides: Sequence[str] = (), live: bool | None = None) -> RunSummary:
    """Run a recipe.

    Args:
        recipe: path of the recipe's Python file.
        overrides: configuration as `key=value`.
        live: show a live panel (True) or plain lines (False); None: a panel if the output is a terminal.

    Raises:
        HflowError: for any error that a user can fix, before or during the run.
    """
    from hflow.launch.running.run_recipe import run_compiled

    return run_compiled(compile_recipe(recipe, overrides), live)


def run_plan(
    file: str | Path,
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    live: bool | None = None,
) -> RunSummary:
    """Run exactly the plan in a plan file or in the directory of an earlier run.

    Args:
        file: a file printed by `hflow plan RECIPE --json`, or a run's directory.
        recipe: the recipe's file, if it has moved; None: the stored path.
        overrides: configuration to change that does not change the plan, such as `out=elsewhere`.
        live: as for `run`.

    Raises:
        HflowError: as `run`, and if the recipe's plan differs from the stored one.
    """
    from hflow.launch.running.run_recipe import run_compiled

    return run_compiled(compile_plan_file(file, recipe, overrides), live)


def resume(run: str | Path, overrides: Sequence[str] = (), live: bool | None = None) -> RunSummary:
    """Continue a run from its last checkpoint, in its own directory.

    Args:
        run: a run's directory, NAME for the latest run in `runs/NAME`, or the directory of a checkpoint.
        overrides: configuration to change, such as `steps=500`.
        live: as for `run`.

    Raises:
        HflowError: as `run`, and if the run cannot continue.
    """
    from hflow.launch.running.run_recipe import resume_run

    return resume_run(str(run), overrides, live)


def evaluate(
    target: str,
    overrides: Sequence[str] = (),
    options: EvaluationOptions | None = None,
    live: bool | None = None,
    *,
    is_quiet: bool = False,
) -> EvaluationReport:
    """Score the models of a checkpoint on whole datasets.

    Args:
        target: a run's directory, NAME for the latest run in `runs/NAME`, or a checkpoint's directory.
        overrides: keys of the configuration to change, such as `data.heldout.path=test.jsonl`.
        options: what is evaluated.
        live: as for `run`.
        is_quiet: show nothing while it runs.

    Raises:
        HflowError: if there is no checkpoint or recipe, or nothing scores samples; and as `run`.
    """
    from hflow.launch.checkpoints.evaluate import evaluate_checkpoint

    return evaluate_checkpoint(target, overrides, options or EvaluationOptions(), live, is_quiet=is_quiet)


def export(
    target: str, directory: Path, model: str | None = None, dtype: Dtype | None = None
) -> ExportedModel:
    """Write a saved model as plain Hugging Face files, without its optimizer state.

    Args:
        target: a run's directory, NAME for the latest run in `runs/NAME`, or a checkpoint's directory.
        directory: where to write; it must not exist.
        model: the model of a checkpoint; None: the only one.
        dtype: precision of the weights; None: that of the checkpoint.

    Raises:
        HflowError: if there is no such model, a file of it is damaged, or the directory exists.
    """
    from hflow.launch.checkpoints.export import export_model

    return export_model(target, directory, model, dtype)


def serve(
    target: str,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    engine: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    report_progress: Callable[[str], None] = lambda line: None,
    on_ready: Callable[[ServedEndpoint], None] = lambda endpoint: None,
) -> bool:
    """Serve a checkpoint with OpenAI's API until Ctrl-C, SIGTERM or SIGHUP.

    Args:
        target: a checkpoint directory, a run's directory, or NAME for the latest run in `runs/NAME`.
        overrides: keys of `models.NAME` as `key=value`, such as `gen.max_model_len=4096`.
        model: the model of a run; None: the only one that generates.
        engine: `embedded` or `vllm`; None: vLLM on CUDA where it is installed, else the embedded engine.
        host: address to listen on.
        port: 0 for a free one.
        api_key: key that requests need; None: none.
        report_progress: called with a line when the engine starts.
        on_ready: called when requests can be sent.

    Returns:
        Whether Ctrl-C ended it.

    Raises:
        HflowError: if there is no checkpoint, the port is in use, or the engine fails.
    """
    from hflow.launch.checkpoints.serve import ServeOptions, run_server
    from hflow.launch.checkpoints.served import find_checkpoint

    checkpoint = find_checkpoint(target, overrides, model)
    return run_server(checkpoint, ServeOptions(host, port, api_key, engine), report_progress, on_ready)


def profile(
    device: str | None = None,
    file: Path | None = None,
    report_progress: Callable[[str], None] = lambda line: None,
) -> HardwareProfile:
    """Measure the hardware at hand, and write what programs reach on it as a calibration file.

    Args:
        device: its name in the hardware files; None: the first CUDA device, or else `cpu`.
        file: where to write; None: `DEVICE.yaml` in the working directory.
        report_progress: called with a line for each part.

    Raises:
        ConfigError: for an unknown device, CUDA that is not there, or a file that cannot be written.
    """
    from hflow.profiling.calibrate import measure_hardware

    return measure_hardware(device, file, report_progress)


def simulate(
    recipe: str | Path, overrides: Sequence[str] = (), steps: int | None = None, seed: int = 0
) -> Simulation:
    """Run a recipe's plan on a virtual clock. No device is needed.

    Args:
        recipe: path of the recipe's Python file.
        overrides: configuration as `key=value`.
        steps: training steps; None: those of the plan, or as many as show a steady speed.
        seed: seed of the response lengths.

    Raises:
        HflowError: as `plan`, and if the plan has no estimates of time.
    """
    from hflow.runtime.simulation.simulate_plan import simulate_plan

    if steps is not None:
        overrides = (*overrides, f"steps={steps}")
    return simulate_plan(plan(recipe, overrides), steps, seed)


def twin(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    layouts: Sequence[str] | None = (),
    steps: int = 3,
    report_progress: Callable[[str], None] = lambda line: None,
) -> TwinReport:
    """Check that a recipe distributed over many ranks computes the same as in one process.

    Args:
        recipe: path of the recipe's Python file.
        overrides: configuration as `key=value`.
        layouts: layouts to compare, each used for all models, on megatron; empty: `twin_run.LAYOUTS`, as far
            as this machine can hold them; None: as configured.
        steps: training steps.
        report_progress: called with a line when a run starts.

    Raises:
        HflowError: as `run`.
    """
    from hflow.launch.running.twin import default_layouts, run_twin

    if layouts is not None and not layouts:
        layouts = default_layouts(recipe, overrides, report_progress)
    return run_twin(recipe, overrides, layouts, steps, report_progress)
