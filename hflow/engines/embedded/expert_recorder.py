"""Records which experts of a model compute the tokens of a step, for routing replay.

Axes: R rows of a step, L layers with experts, K experts of a token in a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hflow.engines.embedded.packing import PromptGroup
from hflow.engines.request import GenerationRequest
from hflow.models.expert_replay import routers_of
from hflow.types.routed_experts import ROUTED_EXPERTS, routing_format


class ExpertRecorder:
    """Listens to the routers of a module while a step runs.

    A token's experts are recorded when it is computed first. A sequence that is prefilled again, because of
    new weights, keeps what the old ones chose: with these experts its next token was drawn.

    Attributes:
        kinds: the kinds that it records; none for a dense model.
    """

    def __init__(self, module: nn.Module) -> None:
        """Find the routers of a model of transformers."""
        routers: list[Any] = routers_of(module)
        self.kinds = (ROUTED_EXPERTS,) if routers else ()
        self._num_layers = len(routers)
        self._chosen: list[Tensor] | None = None
        """The experts of the step's rows `[R, K]` in each layer so far; None if they are not recorded."""
        for router in routers:
            router.register_forward_hook(self._listen)
        if routers:
            form = routing_format(len(routers), routers[0].top_k, routers[0].num_experts)
            self._dtype, self._num_bytes = getattr(torch, form.dtype), form.num_bytes

    @contextmanager
    def recording(
        self, running: Sequence[GenerationRequest], groups: Sequence[PromptGroup]
    ) -> Iterator[None]:
        """Record the step that the block runs, for the requests that ask for it.

        The first rows of the step are of the running requests, one each; the prompts of the groups follow.
        """
        requests = chain(running, *(group.members for group in groups))
        if not any(ROUTED_EXPERTS in request.params.record for request in requests):
            yield
            return
        self._chosen = []
        try:
            yield
            rows = self._rows()
        finally:
            self._chosen = None
        for request, row in zip(running, rows, strict=False):
            _record(request, len(request.ids) - 1, [row])
        start = len(running)
        for group in groups:
            prompt = rows[start : start + len(group.ids)]
            for member in group.members:
                _record(member, 0, prompt)
            start += len(group.ids)

    def _listen(self, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._chosen is not None:
            self._chosen.append(output[2])

    def _rows(self) -> list[bytes]:
        """Return the experts of each row of the step."""
        assert self._chosen is not None
        assert len(self._chosen) == self._num_layers, "every router runs once in a step"
        chosen = torch.cat(self._chosen, dim=1).to(self._dtype)
        data = chosen.cpu().numpy().tobytes()  # waits: once per decode step if training replays routing
        size = self._num_bytes
        return [data[start : start + size] for start in range(0, len(data), size)]


def _record(request: GenerationRequest, first: int, rows: list[bytes]) -> None:
    """Add the experts of tokens from position `first` on, of those that have none yet."""
    if ROUTED_EXPERTS in request.params.record:
        recorded = request.recorded.setdefault(ROUTED_EXPERTS, [])
        recorded += rows[len(recorded) - first :]
