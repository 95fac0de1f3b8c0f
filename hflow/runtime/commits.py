"""A version of the weights is committed when all who got it confirm that they hold what was sent."""

from __future__ import annotations

from hflow.errors import RunError
from hflow.workers.base import Loaded


def commit(replica: str, version: int, loaded: Loaded) -> str | None:
    """The digest of weights that a generation replica loaded, in hexadecimal; None where it loaded none.

    Where its ranks hold parts of the model, the digests of all are joined.

    Raises:
        RunError: when a rank holds something else than was sent; both digests are named.
    """
    for sent, held in zip(loaded.sent, loaded.held, strict=True):
        if sent != held:
            raise RunError(
                f"{replica} does not hold the weights of version {version}: their digest was {sent:016x} "
                f"where they were taken, and is {held:016x} in the engine"
            )
    return "".join(f"{digest:016x}" for digest in dict.fromkeys(loaded.held)) or None
