"""The root module: forward and body in one call, so that sharded weights are whole in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from hflow.backends.common.inputs import Packed
from hflow.backends.common.output import LmOutput, ScalarOutput
from hflow.backends.torch_model.logits import WholeLogits
from hflow.types import Output

Result = TypeVar("Result")


class PackedModel(nn.Module):
    """An HF backbone and a head over packed sequences."""

    def __init__(self, backbone: nn.Module, head: nn.Module, kind: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.kind = kind

    def forward(
        self,
        packed: Packed,
        consume: Callable[[Output], Result] | None,
        temperature: float = 1.0,
        wanted: Callable[[], set[str]] = set,
    ) -> Result | Tensor:
        """Run the backbone and return what `consume` makes of its output.

        Without `consume` the result is a zero that depends on every weight: a rank with nothing to
        do takes part in the gathering of weights and in the reduction of gradients by it. `wanted` returns
        the set that `LmOutput` shares between calls: FSDP would hand on a copy of the set itself.
        """
        hidden = self.backbone(
            input_ids=packed.computed_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            packed_layout=packed.layout,
        ).last_hidden_state[0]
        if consume is None:
            nothing: Tensor = self.head(hidden[:0]).sum()
            return nothing
        if self.kind == "lm":
            rows = hidden.index_select(0, packed.computed(packed.targets - 1))
            logits = WholeLogits(rows, self.head, temperature)
            return consume(LmOutput(logits, packed, wanted()))
        return consume(ScalarOutput(packed.widen(self.head(hidden)), packed, self.kind))
