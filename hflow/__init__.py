"""Reinforcement learning of language models as a typed dataflow graph: recipe, plan, run.

Recipes import everything that they need from here; authors of node types also need `hflow.extend`. Each
command is also a function: `check`, `plan`, `size`, `simulate`, `run`, `resume`, `twin`, `compare`,
`evaluate`, `export`, `serve`; `read_report` returns what `hflow report` shows. Importing hflow imports
neither torch nor ray.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hflow.base.errors import (
    BackendError,
    ConfigError,
    DataError,
    EpisodeError,
    HflowError,
    NotYetError,
    PlanError,
    RecipeError,
    RunError,
    ServiceError,
)

if TYPE_CHECKING:
    from hflow.dsl import (
        Dataset,
        Model,
        Recipe,
        compute,
        encode,
        first_pass,
        generate,
        infer,
        rows,
        sampler,
        sandbox,
        train,
        update,
        use,
    )
    from hflow.launch import (
        Plan,
        RunSummary,
        Simulation,
        check,
        compare,
        evaluate,
        export,
        plan,
        read_report,
        resume,
        run,
        serve,
        simulate,
        size,
        twin,
    )
    from hflow.observer import Observer, RunInfo
    from hflow.services.client import Service
    from hflow.types import (
        Endpoint,
        Engine,
        Image,
        Json,
        Messages,
        Metrics,
        Output,
        PerGroup,
        PerSequence,
        PerToken,
        Sequences,
        State,
        Tensor,
        TensorDict,
        Text,
        Tokenizer,
        ToolCall,
        Trajectory,
    )

_NAMES = {
    "hflow.dsl": "Dataset Model Recipe compute encode first_pass generate infer rows sampler sandbox train "
    "update use",
    "hflow.dsl.lazy": "algo",
    "hflow.launch": "Plan RunSummary Simulation check compare evaluate export plan read_report resume run "
    "serve simulate size twin",
    "hflow.observer": "Observer RunInfo",
    "hflow.services.client": "Service",
    "hflow.types": "Endpoint Engine Image Json Messages Metrics Output PerGroup PerSequence PerToken "
    "Sequences State Tensor TensorDict Text Tokenizer ToolCall Trajectory",
}
"""Module -> its names. The first use of one imports it, so that small processes of hflow start quickly."""
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "BackendError",
    "ConfigError",
    "DataError",
    "Dataset",
    "Endpoint",
    "Engine",
    "EpisodeError",
    "HflowError",
    "Image",
    "Json",
    "Messages",
    "Metrics",
    "Model",
    "NotYetError",
    "Observer",
    "Output",
    "PerGroup",
    "PerSequence",
    "PerToken",
    "Plan",
    "PlanError",
    "Recipe",
    "RecipeError",
    "RunError",
    "RunInfo",
    "RunSummary",
    "Sequences",
    "Service",
    "ServiceError",
    "Simulation",
    "State",
    "Tensor",
    "TensorDict",
    "Text",
    "Tokenizer",
    "ToolCall",
    "Trajectory",
    "algo",
    "check",
    "compare",
    "compute",
    "encode",
    "evaluate",
    "export",
    "first_pass",
    "generate",
    "infer",
    "nodes",
    "plan",
    "read_report",
    "resume",
    "rewards",
    "rows",
    "run",
    "sampler",
    "sandbox",
    "serve",
    "simulate",
    "size",
    "train",
    "twin",
    "update",
    "use",
]


def __getattr__(name: str) -> Any:
    """Import the module of a name in `_LAZY` (PEP 562)."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in ("nodes", "rewards"):
        return importlib.import_module(f"hflow.{name}")
    raise AttributeError(f"module 'hflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return __all__
