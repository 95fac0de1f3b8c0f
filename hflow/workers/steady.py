"""Keeps Python's garbage collector from walking through the libraries in every step."""

import gc


def forget_garbage() -> None:
    """Take everything that exists now out of the collector's sight.

    Episodes allocate enough for several full collections a step, each of which would visit the half
    a million objects of torch and transformers: more time than the episodes themselves take.
    """
    gc.unfreeze()  # what an earlier run in this process left
    gc.collect()
    gc.freeze()
