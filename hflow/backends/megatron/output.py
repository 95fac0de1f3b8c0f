"""What a node's body gets on the last stage, on all of its tensor ranks alike."""

from __future__ import annotations

from torch import Tensor

from hflow.backends.common.inputs import Packed
from hflow.backends.common.output import LmOutput, ScalarOutput
from hflow.backends.megatron.model import Stage
from hflow.backends.megatron.vocab import VocabParallelLogits
from hflow.types import Output


def output_of(stage: Stage, packed: Packed, hidden: Tensor, temperature: float, wanted: set[str]) -> Output:
    """The output of a micro-batch.

    Args:
        stage: the last one.
        packed: the micro-batch.
        hidden: its hidden states `[U, D]`.
        temperature: logits are divided by it.
        wanted: shared by the micro-batches of a call, as `LmOutput` says.
    """
    if stage.head != "lm":
        return ScalarOutput(packed.widen(stage.module.output_layer(hidden)), packed, stage.head)
    logits = VocabParallelLogits(
        rows=hidden.index_select(0, packed.computed(packed.targets - 1)),
        part=stage.logits,
        start=stage.vocab_start,
        size=stage.vocab_rows,
        group=stage.grid.groups.tp,
        temperature=temperature,
    )
    return LmOutput(logits, packed, wanted)
