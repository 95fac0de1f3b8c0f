"""The root module: runs the forward pass and the body in one call, so that sharded weights are whole in both.

Axes: T packed tokens, U computed tokens, N learned tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from hflow.models.expert_replay import REPLAYED
from hflow.models.host_offload import activations_in_host_memory
from hflow.training.loop.inputs import PackedBatch
from hflow.training.loop.logprobs import MatrixLogits, OutputMatrix
from hflow.training.loop.output import LmOutput, ScalarOutput
from hflow.types import Output

Result = TypeVar("Result")


class PackedModel(nn.Module):
    """An HF backbone and a head over packed sequences.

    Args:
        backbone: returns hidden states.
        head: the module that is applied to the hidden states.
        head_kind: `lm`, `value` or `score`.
        offload_activations: keep what the backbone saves for its backward pass in host memory.
    """

    def __init__(
        self, backbone: nn.Module, head: nn.Module, head_kind: str, offload_activations: bool = False
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.head_kind = head_kind
        self.offload_activations = offload_activations

    def forward(
        self,
        packed: PackedBatch,
        consume: Callable[[Output], Result] | None,
        temperature: float = 1.0,
        get_requested: Callable[[], set[str]] = set,
    ) -> Result | Tensor:
        """Run the backbone; return what `consume` makes of its output.

        Args:
            packed: the micro-batch.
            consume: computes the result from the output. Without it the result is a zero that depends on
                every weight, so that a rank without samples joins the gathering of weights and the reduction
                of gradients.
            temperature: logits are divided by it.
            get_requested: returns the set that `LmOutput` shares between micro-batches. FSDP would pass on a
                copy of the set itself.
        """
        replayed = {} if packed.replayed is None else {REPLAYED: packed.replayed}
        with activations_in_host_memory(self.offload_activations):
            hidden = self.backbone(
                input_ids=packed.computed_ids[None],
                position_ids=packed.position_ids[None],
                use_cache=False,
                packed_layout=packed.layout,
                **replayed,
            ).last_hidden_state[0]
        if consume is None:
            zero: Tensor = self.head(hidden[:0]).sum()
            return zero
        if self.head_kind == "lm":
            rows = hidden.index_select(0, packed.computed_rows(packed.targets - 1))
            assert isinstance(self.head, nn.Linear)
            logits = MatrixLogits(rows, OutputMatrix(self.head.weight, self.head.bias), temperature)
            return consume(LmOutput(logits, packed, get_requested()))
        padding_id = getattr(self.backbone.config, "pad_token_id", None)
        return consume(ScalarOutput(packed.expand(self.head(hidden)), packed, self.head_kind, padding_id))
