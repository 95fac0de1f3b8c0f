"""Writes a safetensors file tensor by tensor; the library's own writer wants all of them at once.

The format: the header's length (8 bytes, little-endian), a JSON header that says where each tensor lies
behind it, then the tensors, without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def write_fp32(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write fp32 tensors as they come, in any order.

    Args:
        path: of the file.
        shapes: of exactly the tensors that will come, by name.
        tensors: each is let go before the next is asked for.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    missing = set(shapes)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        for name, tensor in tensors:
            assert tuple(tensor.shape) == shapes[name], f"{name} has another shape than was said"
            file.seek(begin + header[name]["data_offsets"][0])
            file.write(tensor.float().cpu().contiguous().numpy().data)
            missing.remove(name)
    assert not missing, f"{path} lacks {sorted(missing)}"
