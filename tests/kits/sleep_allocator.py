"""vLLM's allocator for engines that sleep, on the pretend device (`vllm/device_allocator/cumem.py`).

Memory that sleeps does not count, and to read it fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pretend_device
import torch
from torch import Tensor, UntypedStorage
from vllm.device_allocator import DEFERRABLE_TAGS


@dataclass
class _Allocation:
    storage: weakref.ref[UntypedStorage]
    size: int
    tag: str
    backup: Tensor | None = None
    is_asleep: bool = False


class SleepAllocator:
    """The interface `vllm.device_allocator.MemAllocator`."""

    def __init__(self) -> None:
        self._allocations: list[_Allocation] = []

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Tag all memory that is allocated inside."""

        def note(storage: UntypedStorage) -> None:
            if storage.nbytes():
                one = _Allocation(weakref.ref(storage), storage.nbytes(), tag or "default")
                self._allocations.append(one)

        with pretend_device.allocations(note):
            yield

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Free all memory; that of some tags keeps its values on the host."""
        kept = ("default",) if offload_tags is None else offload_tags
        for one, storage in self._living():
            if not one.is_asleep:
                one.backup = _bytes(storage).cpu() if one.tag in kept else None
                storage.resize_(0)
                one.is_asleep = True

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Free the memory of some tags without its values."""
        for one, storage in self._living():
            if one.tag in tags and not one.is_asleep:
                storage.resize_(0)
                one.is_asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate the memory of some tags again; what has none of vLLM's two tags always wakes."""
        for one, storage in self._living():
            if one.is_asleep and (tags is None or one.tag in tags or one.tag not in DEFERRABLE_TAGS):
                storage.resize_(one.size)
                one.is_asleep = False
                if one.backup is not None:
                    _bytes(storage).copy_(one.backup)
                    one.backup = None

    def get_current_usage(self) -> int:
        """Return the bytes of the pool, asleep or not."""
        return sum(one.size for one, _ in self._living())

    def bytes_of(self, tag: str) -> int:
        """Return the bytes of a tag that are awake."""
        return sum(one.size for one, _ in self._living() if one.tag == tag and not one.is_asleep)

    def _living(self) -> list[tuple[_Allocation, UntypedStorage]]:
        pairs = [(one, one.storage()) for one in self._allocations]
        living = [(one, storage) for one, storage in pairs if storage is not None]
        self._allocations = [one for one, _ in living]
        return living


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
