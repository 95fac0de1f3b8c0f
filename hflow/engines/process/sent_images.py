"""`SentImages`: the images that the process of an engine has, so that each is sent to it once.

The samples of a group, the turns of an episode and resumed requests have the same images. The worker decides
which ones the process keeps, and names them by their digests.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from hflow.types.image import PlacedImage, ProcessedImage

KEPT_BYTES = 1 << 28
"""Colours of images that a process keeps for later requests."""
_NO_PIXELS = np.zeros(0, np.uint8)


class SentImages:
    """Keeps account of the images that a process has."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Digest -> bytes, the latest used last."""
        self._num_bytes = 0

    def take_new(self, images: Sequence[PlacedImage]) -> tuple[list[ProcessedImage], list[str]]:
        """Count a request's images as sent.

        The request's images all remain until another request is added. Return those to send before it, and
        the digests of those that the process forgets for them.
        """
        new: dict[str, ProcessedImage] = {}
        for _, image in images:
            if image.digest not in self._sizes:
                new[image.digest] = image
                self._num_bytes += image.nbytes
            self._sizes[image.digest] = image.nbytes
            self._sizes.move_to_end(image.digest)
        forgotten, needed = [], len({image.digest for _, image in images})
        while self._num_bytes > KEPT_BYTES and len(self._sizes) > needed:
            digest, num_bytes = self._sizes.popitem(last=False)
            self._num_bytes -= num_bytes
            forgotten.append(digest)
        return list(new.values()), forgotten


def without_pixels(images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
    """Return images as a request has them whose pixels were sent before."""
    return tuple(PlacedImage(start, dataclasses.replace(image, pixels=_NO_PIXELS)) for start, image in images)
