"""Reinforcement learning of language models as a typed dataflow graph: recipe, plan, run.

Everything that a recipe needs is here, and importing it loads neither torch nor ray.
"""

from typing import TYPE_CHECKING, Any

from hflow import nodes
from hflow.dsl import (
    Dataset,
    Model,
    NodeType,
    Recipe,
    compute,
    encode,
    generate,
    infer,
    sandbox,
    train,
    update,
    use,
)
from hflow.types import (
    Engine,
    Json,
    Metrics,
    Output,
    PerGroup,
    PerSequence,
    PerToken,
    Sequences,
    State,
    Tensor,
    Text,
    Tokenizer,
    Trajectory,
)

if TYPE_CHECKING:
    from hflow import algo

__all__ = [
    "Dataset",
    "Engine",
    "Json",
    "Metrics",
    "Model",
    "NodeType",
    "Output",
    "PerGroup",
    "PerSequence",
    "PerToken",
    "Recipe",
    "Sequences",
    "State",
    "Tensor",
    "Text",
    "Tokenizer",
    "Trajectory",
    "algo",
    "compute",
    "encode",
    "generate",
    "infer",
    "nodes",
    "sandbox",
    "train",
    "update",
    "use",
]


def __getattr__(name: str) -> Any:
    """Give out `algo` without importing it: `from hflow import algo` asks here (PEP 562)."""
    if name == "algo":
        from hflow.lazy import algo

        return algo
    raise AttributeError(f"module 'hflow' has no attribute {name!r}")
