"""The tokens from which sampling drew each token, a `RecordedKind`.

`top_p`, `top_k` and `min_p` leave a part of the vocabulary. `behav_logprobs` are those of the distribution
over this part, so a trainer's log-probs can be compared with them only if they are over the same part: "Keep
Sampling Mask" of DeepSeek-V3.2 (DeepSeek-AI 2025, arXiv:2512.02556, section 3.1).

An entry is empty where no token was drawn, or from all tokens. Otherwise its first byte is the size of an id,
followed by the ids; or 0, followed by a bit for each token, where that is shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hflow.types.recorded import RecordedKind, RowFormat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SAMPLING_MASK = "sampling_mask"
"""The field with the tokens from which each token was drawn: bytes `[T]`."""
SAMPLING_REPLAY = "sampling_replay"
"""The option of a generate node that requests it."""
PLANNED_TOKENS = 64
"""How many tokens a plan expects `top_p` or `min_p` to leave, if not fewer by `top_k`."""

_DTYPES: Mapping[int, npt.DTypeLike] = {2: "<u2", 4: "<u4"}
"""Bytes of an id -> its dtype."""


def pack_ids(ids: npt.NDArray[np.integer[Any]]) -> bytes:
    """Return the entry of a token that was drawn from the tokens `ids`, at least one."""
    import numpy as np

    last = int(ids.max())
    width = 2 if last < 1 << 16 else 4
    if len(ids) * width <= last // 8 + 1:
        return bytes([width]) + ids.astype(_DTYPES[width]).tobytes()
    flags = np.zeros(last + 1, np.bool_)
    flags[ids] = True
    return b"\0" + np.packbits(flags).tobytes()


def unpack_ids(entry: bytes) -> npt.NDArray[np.int32]:
    """Return the tokens of an entry; none of an empty one."""
    import numpy as np

    if not entry:
        return np.empty(0, np.int32)
    width, data = entry[0], np.frombuffer(entry, np.uint8, offset=1)
    ids = data.view(_DTYPES[width]) if width else np.flatnonzero(np.unpackbits(data))
    return ids.astype(np.int32)


def truncates(options: Mapping[str, Any]) -> bool:
    """Return whether sampling options leave a part of the vocabulary."""
    return bool(
        options.get("temperature", 1.0)
        and (options.get("top_p", 1.0) < 1 or options.get("top_k", 0) or options.get("min_p", 0.0))
    )


def _format(shape: Any, options: Mapping[str, Any]) -> RowFormat:
    num = min(options.get("top_k") or shape.vocab, shape.vocab)
    if options.get("top_p", 1.0) < 1 or options.get("min_p", 0.0):
        num = min(num, PLANNED_TOKENS)
    width = 2 if shape.vocab <= 1 << 16 else 4
    return RowFormat.varying(1 + min(num * width, shape.vocab // 8 + 1))


RECORDED = RecordedKind(SAMPLING_MASK, _format, option=SAMPLING_REPLAY, replayed_in="outputs")
