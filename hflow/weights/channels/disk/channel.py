"""Buckets as safetensors files in a directory that all machines share."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from typing_extensions import override

from hflow.base.errors import RunError
from hflow.models.host_copy import host_payload
from hflow.planner.weights.weight_slices import Receivers
from hflow.weights.buckets import Bucket, BucketHeader, box_text, unpack_bucket
from hflow.weights.channels.interface import ChannelSettings, WeightChannel

_PAYLOAD = "payload"


class BucketFile(NamedTuple):
    """A bucket in a file."""

    path: str
    num_bytes: int
    """Size of the file."""
    header: BucketHeader


class DiskChannel(WeightChannel):
    """Writes each bucket as a safetensors file, which appears complete or not at all; readers map it.

    A file holds slices as `NAME[box]`, or the payload of a bucket whose changes
    are sent. The directory is created with the first bucket.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        self._directory = Path(settings.directory)
        self._numbers = itertools.count()

    @override
    def send(self, receivers: Receivers, bucket: Bucket) -> Any:
        """Write the bucket to a temporary name, then rename it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._settings.owner}-{next(self._numbers)}.safetensors"
        temporary = path.with_suffix(".part")
        host = replace(bucket, payload=host_payload(bucket.payload))
        if host.version is not None:
            tensors = {_PAYLOAD: host.payload}
        else:
            tensors = {_key(one.slice.tensor, one.slice.box): one.values for one in unpack_bucket(host)}
        save_file(tensors, temporary)
        num_bytes = temporary.stat().st_size
        os.replace(temporary, path)
        return BucketFile(str(path), num_bytes, bucket.header)

    @override
    def receive(self, handle: Any, receiver: int) -> Bucket:
        """Map the file."""
        assert isinstance(handle, BucketFile)
        path = Path(handle.path)
        size = path.stat().st_size if path.exists() else None
        if size != handle.num_bytes:
            problem = "is missing" if size is None else f"has {size} bytes instead of {handle.num_bytes}"
            raise RunError(
                f"the weights file {path} {problem}; set out= to a directory that all machines share"
            )
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        if size == 8 + header_bytes:
            payload = torch.empty(0, dtype=torch.uint8)
        else:
            payload = torch.from_numpy(np.memmap(path, np.uint8, "c", offset=8 + header_bytes))
        if _PAYLOAD in header:
            return handle.header.with_payload(payload)
        entries = []
        for entry in handle.header.entries:
            start, end = header[_key(entry.slice.tensor, entry.slice.box)]["data_offsets"]
            entries.append(entry._replace(start=start, end=end))
        return Bucket(tuple(entries), payload)

    @override
    def free(self, handles: Iterable[Any]) -> None:
        """Remove the files; a file that is still mapped stays readable."""
        for handle in handles:
            Path(handle.path).unlink()


def _key(name: str, box: tuple[tuple[int, int], ...]) -> str:
    return name + box_text(box)
