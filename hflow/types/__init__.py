"""The types that recipes and runs share. Importing them imports neither torch nor ray."""

from hflow.types.engine import Endpoint, Engine, EpisodeState, State, Tokenizer
from hflow.types.image import Image
from hflow.types.output import Output
from hflow.types.sequences import SeparateSequences, Sequences
from hflow.types.trajectory import STOP_REASONS, ToolCall, Trajectory
from hflow.types.units import (
    Json,
    Messages,
    Metrics,
    PerGroup,
    PerSequence,
    PerToken,
    Tensor,
    TensorDict,
    Text,
    Unit,
)

__all__ = [
    "STOP_REASONS",
    "Endpoint",
    "Engine",
    "EpisodeState",
    "Image",
    "Json",
    "Messages",
    "Metrics",
    "Output",
    "PerGroup",
    "PerSequence",
    "PerToken",
    "SeparateSequences",
    "Sequences",
    "State",
    "Tensor",
    "TensorDict",
    "Text",
    "Tokenizer",
    "ToolCall",
    "Trajectory",
    "Unit",
]
