"""What translations of all libraries need."""

from __future__ import annotations

import re

from hflow.translate.given import Given
from hflow.translate.recipe import RecipeDraft

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""A model of the Hugging Face Hub: `OWNER/NAME`."""

REPLAYED = "the loss takes log-probs over the tokens that are left (`sampling_replay`)"
"""What hflow does with tokens that sampling leaves out."""


def num_devices(cluster: str) -> int:
    """Return the number of devices of a cluster such as `h100-2x8`; 1 if its name does not say it."""
    machines, _, devices = cluster.rpartition("-")[2].partition("x")
    return int(machines) * int(devices) if machines.isdecimal() and devices.isdecimal() else 1


def set_paths(given: Given, draft: RecipeDraft, key: str, ours: str) -> None:
    """Set a path or a list of paths, unless only a shell or another machine knows it."""
    value = given.value(key)
    paths = value if isinstance(value, list) else [value]
    if not all(isinstance(path, str) and path for path in paths):
        given.leave(key, f"it was not understood; set {ours}")
        return
    if any(path.startswith(("~", "$")) or "://" in path for path in paths):
        given.leave(key, f"set {ours} to a path of this machine, written in full")
        return
    draft.set(ours, list(paths) if len(paths) > 1 else paths[0])
    if any(not path.startswith("/") for path in paths):
        given.differs(key, "a relative path is relative to the YAML file here")


def set_model(given: Given, draft: RecipeDraft, key: str, ours: str, revision: str | None = None) -> None:
    """Set the path of a model: a name of the Hub, as `Qwen/Qwen3-0.6B`, at a revision, or a directory."""
    path = given.value(key)
    if not isinstance(path, str) or not HUB_NAME.fullmatch(path):
        set_paths(given, draft, key, ours)
    else:
        draft.set(ours, path if revision is None else f"{path}@{revision}")


def set_sampling_limits(
    given: Given, draft: RecipeDraft, top_p: str, top_k: str, min_p: str | None = None
) -> None:
    """Set which tokens samples are drawn from, where it is not all; in `top_k`, 0 and -1 mean all tokens."""
    limits = [(top_p, "top_p", given.number(top_p) or 1.0, 1.0)]
    limits.append((top_k, "top_k", max(0, given.whole(top_k) or 0), 0))
    if min_p is not None:
        limits.append((min_p, "min_p", given.number(min_p) or 0.0, 0.0))
    for key, name, value, of_all in limits:
        if value != of_all:
            draft.set(f"nodes.actor_gen.{name}", value)
            given.differs(key, REPLAYED)
