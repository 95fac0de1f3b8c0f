"""The output of the last stage's hidden states, which a node's body reads."""

from __future__ import annotations

from torch import Tensor

from hflow.training.loop.inputs import PackedBatch
from hflow.training.loop.output import LmOutput, ScalarOutput
from hflow.training.megatron.context_parallel import DividedLogits, RowDivision
from hflow.training.megatron.model import Stage
from hflow.types import Output


def stage_output(
    stage: Stage,
    packed: PackedBatch,
    division: RowDivision | None,
    hidden: Tensor,
    temperature: float,
    requested: set[str],
) -> Output:
    """Return the output of a micro-batch on the last stage, which a node's body reads on all of its ranks.

    The hidden states are of this rank's rows of the division; None without context parallelism. `requested`
    are the values requested, as in `LmOutput`.
    """
    if stage.head != "lm":
        scalars = stage.module.output_layer(hidden)
        if division is not None:
            rows = slice(0, division.num_queries)
            scalars = division.whole(scalars[rows], division.rows[rows], division.num_rows)
        padding_id = getattr(stage.hf_config, "pad_token_id", None)
        return ScalarOutput(packed.expand(scalars), packed, stage.head, padding_id)
    predictors = packed.computed_rows(packed.targets - 1) if division is None else division.learned_rows
    kept = packed.kept if division is None or packed.kept is None else packed.kept.take(division.learned_here)
    logits = stage.logits(hidden.index_select(0, predictors), temperature, kept)
    if division is None:
        return LmOutput(logits, packed, requested)
    return LmOutput(DividedLogits(logits, division, len(packed.targets)), packed, requested)
