"""The interface of transports. Each implementation has a file of its own."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

from hflow.workers.weights.buckets import Bucket


class Transport(abc.ABC):
    """Carries buckets between processes. A handle that one process's transport makes is valid in all others.

    The sender puts a bucket once for all its receivers, and frees it when they have loaded it.
    """

    @abc.abstractmethod
    def put(self, bucket: Bucket) -> Any:
        """Store a bucket where receivers can take it; returns its handle, which can be pickled."""

    @abc.abstractmethod
    def take(self, handle: Any) -> Bucket:
        """Return the bucket of a handle. Its payload may be read-only, and is valid until it is freed.

        Raises:
            RunError: when it is missing or incomplete.
        """

    @abc.abstractmethod
    def free(self, handles: Iterable[Any]) -> None:
        """Free buckets."""
