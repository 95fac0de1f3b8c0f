"""How often this process's garbage is collected."""

from __future__ import annotations

import gc

GC_THRESHOLDS = (20_000, 20, 50)
"""Arguments of `gc.set_threshold`. A controller holds some 100,000 objects of samples in flight, which are
freed without the collector's help. At Python's own thresholds the collector visits all of them several times
a step, for 0.1 s each time."""


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection, and let it run less often.

    Modules are never garbage, and commands import and plan in a tenth less time if they are not visited.
    Episodes allocate enough for several full collections a step. Each would visit the half a million objects
    of torch and transformers, which takes more time than the episodes themselves.
    """
    gc.unfreeze()  # objects that an earlier run in this process froze
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
