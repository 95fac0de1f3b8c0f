"""What commands do, as functions, and what these return. `hflow` exports the commands themselves.

This is the only package that chooses concrete classes for workers, backends and engines. A name's module is
imported at the first use of the name: checking, planning and simulating import neither torch nor ray.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of `_NAMES`, for type checkers
    from hflow.graph.ir import Graph
    from hflow.launch.checkpoints.evaluate import EvaluationOptions, EvaluationReport, evaluate
    from hflow.launch.checkpoints.export import ExportedModel, export
    from hflow.launch.checkpoints.serve import ServedEndpoint, serve
    from hflow.launch.node_catalog import (
        CatalogNode,
        CatalogSetting,
        ready_node,
        ready_nodes,
        ready_settings,
        recipe_nodes,
    )
    from hflow.launch.planning.compile import (
        Compiled,
        compare_plans,
        compile_plan_file,
        compile_recipe,
        compose_recipe,
        explain,
        plan,
        plan_file_text,
        simulate,
    )
    from hflow.launch.planning.plan_file import compose_plan_file
    from hflow.launch.planning.read_recipe import check
    from hflow.launch.planning.size import Sizes, Target, size
    from hflow.launch.planning.what_if import what_if
    from hflow.launch.recipe_copy import NewRecipe, new_recipe
    from hflow.launch.results.compare import Comparison, compare
    from hflow.launch.results.ledger import (
        SAMPLE_COLUMNS,
        count_samples,
        samples,
        samples_with_text,
        why,
        why_output,
        why_texts,
    )
    from hflow.launch.results.runs import RunReport, read_report
    from hflow.launch.results.watch import WatchedRun, watch
    from hflow.launch.running.run_recipe import resume, run, run_plan
    from hflow.launch.running.twin import TwinReport, twin
    from hflow.launch.translation import Translation, translate
    from hflow.planner.plan.rows import Plan
    from hflow.profiling.calibrate import HardwareProfile, measure_hardware
    from hflow.runtime.records.run_summary import RunSummary
    from hflow.runtime.simulation.simulate_plan import Simulation

_NAMES = {
    "hflow.graph.ir": "Graph",
    "hflow.launch.checkpoints.evaluate": "EvaluationOptions EvaluationReport evaluate",
    "hflow.launch.checkpoints.export": "ExportedModel export",
    "hflow.launch.checkpoints.serve": "ServedEndpoint serve",
    "hflow.launch.node_catalog": (
        "CatalogNode CatalogSetting ready_node ready_nodes ready_settings recipe_nodes"
    ),
    "hflow.launch.planning.compile": (
        "Compiled compare_plans compile_plan_file compile_recipe compose_recipe explain plan "
        "plan_file_text simulate"
    ),
    "hflow.launch.planning.plan_file": "compose_plan_file",
    "hflow.launch.planning.read_recipe": "check",
    "hflow.launch.planning.size": "Sizes Target size",
    "hflow.launch.planning.what_if": "what_if",
    "hflow.launch.recipe_copy": "NewRecipe new_recipe",
    "hflow.launch.results.compare": "Comparison compare",
    "hflow.launch.results.ledger": (
        "SAMPLE_COLUMNS count_samples samples samples_with_text why why_output why_texts"
    ),
    "hflow.launch.results.runs": "RunReport read_report",
    "hflow.launch.results.watch": "WatchedRun watch",
    "hflow.launch.running.run_recipe": "resume run run_plan",
    "hflow.launch.running.twin": "TwinReport twin",
    "hflow.launch.translation": "Translation translate",
    "hflow.planner.plan.rows": "Plan",
    "hflow.profiling.calibrate": "HardwareProfile measure_hardware",
    "hflow.runtime.records.run_summary": "RunSummary",
    "hflow.runtime.simulation.simulate_plan": "Simulation",
}
"""Module -> the names of this package that it defines."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES, "exit_without_ray"]


def __getattr__(name: str) -> Any:
    """Import the module that defines a name (PEP 562)."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'hflow.launch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def exit_without_ray(code: str | int | None) -> None:
    """End this process at once if a Ray that it joined does not answer; Ray would wait for it at the exit."""
    actors = sys.modules.get("hflow.workers.ray.ray_actors")
    if actors is not None and actors.is_ray_lost:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)
