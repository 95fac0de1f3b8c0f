"""The root module: forward and body in one call, so that sharded weights are whole in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from hflow.backends.torch_model.inputs import Packed
from hflow.backends.torch_model.output import LmOutput, ScalarOutput
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
        wanted: set[str] | None = None,
    ) -> Result | Tensor:
        """Run the backbone and return what `consume` makes of its output.

        Without `consume` the result is a zero that depends on every weight: a rank with nothing to
        do takes part in the gathering of weights and in the reduction of gradients by it.
        """
        hidden = self.backbone(
            input_ids=packed.computed_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            packed_layout=packed.layout,
        ).last_hidden_state[0]
        if packed.layout.shared is not None:
            hidden = hidden.index_select(0, packed.layout.shared.row_of_token)
        if consume is None:
            nothing: Tensor = self.head(hidden[:0]).sum()
            return nothing
        if self.kind == "lm":
            wanted = set() if wanted is None else wanted
            return consume(LmOutput(hidden, self.head, packed, temperature, wanted))
        return consume(ScalarOutput(hidden, self.head, packed, self.kind))
