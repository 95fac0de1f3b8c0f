"""Rows of `routed_experts`, made of the arrays with which vLLM returns experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from hflow.base.errors import BackendError
from hflow.types.recorded import RowFormat

_WITHOUT_EXPERTS = "set models.NAME.gen.engine=embedded, or remove routing_replay"


@dataclass(frozen=True)
class ExpertRows:
    """The format of a model's rows of `routed_experts`, into which it converts what vLLM returns.

    Axes: T tokens, N layers of the model, K experts of a token in a layer.

    vLLM returns the experts of a request with the tokens that it draws: first those of the prompt, then those
    of each token that is drawn, when it is computed. A preempted request is computed again, but vLLM returns
    rows only from where it was, so that tokens keep the experts that computed them first.
    """

    layers: Sequence[int]
    """Numbers of the layers that have experts."""
    per_token: int
    """K."""
    form: RowFormat

    def pack(self, experts: npt.NDArray[Any] | None, num_tokens: int) -> list[bytes]:
        """Return the row of each of T tokens, which were computed and have no row yet.

        vLLM returns `experts`, `[T, N, K]`, with unused entries in layers without experts.

        Raises:
            BackendError: if a token or a layer has no experts.
        """
        if experts is None:
            raise BackendError(f"vLLM returned no experts for {num_tokens} tokens; {_WITHOUT_EXPERTS}")
        found, per_token, num_layers = experts.shape, self.per_token, max(self.layers) + 1
        if found[0] != num_tokens or found[1] < num_layers or found[2] != per_token:
            raise BackendError(
                f"vLLM returned experts of shape {list(found)} for {num_tokens} tokens, {num_layers} layers "
                f"and {per_token} experts each; {_WITHOUT_EXPERTS}"
            )
        rows = experts[:, self.layers]
        if per_token > 1 and (rows[..., 0] == rows[..., 1]).any():
            raise BackendError(
                f"vLLM returned the same expert twice, so a layer was not recorded; {_WITHOUT_EXPERTS}"
            )
        data = rows.astype(self.form.dtype).tobytes()
        size = self.form.num_bytes
        return [data[start : start + size] for start in range(0, len(data), size)]
