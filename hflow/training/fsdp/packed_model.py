"""The root module: runs the forward pass and the body in one call, so that sharded weights are whole in both.

Axes: T packed tokens, U computed tokens, N learned tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.functional import linear

from hflow.models.adapter import output_adapter
from hflow.models.expert_balance import BALANCED
from hflow.models.expert_replay import REPLAYED
from hflow.models.host_offload import activations_in_host_memory
from hflow.training.loop.inputs import PackedBatch
from hflow.training.loop.logprobs import MatrixLogits, OutputMatrix
from hflow.training.loop.output import LmOutput, ScalarOutput
from hflow.types import Output
from hflow.vision.batches import SequencesWithImages
from hflow.vision.embedding import encode_images, hidden_states, smallest_image

Result = TypeVar("Result")


class PackedModel(nn.Module):
    """An HF backbone and a head over packed sequences.

    Args:
        offload_activations: keep what the backbone saves for its backward pass in host memory.
        vision: reads the images of sequences; None: the model only reads text.
        joins_tower: whether the tower runs for every micro-batch, as other ranks have parts of its weights.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        head_kind: str,
        offload_activations: bool = False,
        vision: SequencesWithImages | None = None,
        joins_tower: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.head_kind = head_kind
        self.offload_activations = offload_activations
        self.vision, self.joins_tower = vision, joins_tower

    def forward(
        self,
        packed: PackedBatch,
        consume: Callable[[Output], Result] | None,
        temperature: float = 1.0,
        get_requested: Callable[[], set[str]] = set,
    ) -> Result | Tensor:
        """Run the backbone; return what `consume` makes of its output.

        Args:
            consume: computes the result from the output. Without it the result is a zero that depends on
                every weight, so that a rank without samples joins the gathering of weights and the reduction
                of gradients.
            get_requested: returns the set that `LmOutput` shares between micro-batches. FSDP would pass on a
                copy of the set itself.
        """
        of_routers = {REPLAYED: packed.replayed, BALANCED: packed.balanced}
        passed = {name: value for name, value in of_routers.items() if value is not None}
        with activations_in_host_memory(self.offload_activations):
            hidden = self._hidden(packed, packed_layout=packed.layout, **passed)
        if consume is None:
            zero: Tensor = self.head(hidden[:0]).sum()
            return zero
        if self.head_kind == "lm":
            rows = hidden.index_select(0, packed.computed_rows(packed.targets - 1))
            layer, adapter = output_adapter(self.head)
            low = None if adapter is None else linear(rows, adapter.a) * adapter.scale
            matrix = OutputMatrix(layer.weight, layer.bias, added=None if adapter is None else adapter.b)
            logits = MatrixLogits(rows, matrix, temperature, packed.kept, low)
            return consume(LmOutput(logits, packed, get_requested()))
        config: Any = self.backbone.config
        padding_id = getattr(config.get_text_config(), "pad_token_id", None)
        return consume(ScalarOutput(packed.expand(self.head(hidden)), packed, self.head_kind, padding_id))

    def _hidden(self, packed: PackedBatch, **arguments: Any) -> Tensor:
        """Return the last layer's output `[U, D]`."""
        if self.vision is None:
            found: Tensor = self.backbone(
                input_ids=packed.computed_ids[None],
                position_ids=packed.position_ids[None],
                use_cache=False,
                **arguments,
            ).last_hidden_state[0]
            return found
        family = self.vision.family
        seen = () if packed.images is None else packed.images.images
        if not seen and self.joins_tower:
            seen = (smallest_image(family, self.vision.config),)
        device = packed.computed_ids.device
        features = encode_images(self.backbone, family, seen, device) if seen else None
        return hidden_states(
            self.backbone,
            family,
            packed.computed_ids,
            packed.position_ids,
            packed.images,
            features,
            **arguments,
        )
