"""`Transport`: the one protocol of all ways between processes. A file for each implementation."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

from hflow.workers.weights.buckets import Bucket


class Transport(abc.ABC):
    """A way for buckets. Every process has one; a handle made by one can be used by all others.

    The sender puts a bucket once, whoever takes it, and frees it when all receivers have what they need.
    """

    @abc.abstractmethod
    def put(self, bucket: Bucket) -> Any:
        """Keep a bucket where receivers can take it; returns its handle, which can be pickled."""

    @abc.abstractmethod
    def take(self, handle: Any) -> Bucket:
        """The bucket behind a handle; its payload may be read-only, and is valid until it is freed.

        Raises:
            RunError: when it is not there, or not whole.
        """

    @abc.abstractmethod
    def free(self, handles: Iterable[Any]) -> None:
        """Give up what was put."""
