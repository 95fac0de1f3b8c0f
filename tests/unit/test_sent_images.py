"""Which images an engine's process gets, and which it keeps."""

from __future__ import annotations

import numpy as np
import pytest

from hflow.engines.process import sent_images
from hflow.engines.process.sent_images import SentImages, without_pixels
from hflow.types.image import Colours, PlacedImage, ProcessedImage


def placed(name: str, num_bytes: int = 10) -> PlacedImage:
    colours = Colours(1.0, (0.0,), (1.0,))
    return PlacedImage(3, ProcessedImage(name, np.ones(num_bytes, np.uint8), (1, 1, 1), 1, colours))


def digests(images: list[ProcessedImage]) -> list[str]:
    return [image.digest for image in images]


def test_each_image_is_sent_once() -> None:
    sent = SentImages()
    new, forgotten = sent.take_new([placed("a"), placed("b"), placed("a")])
    assert (digests(new), forgotten) == (["a", "b"], [])
    new, forgotten = sent.take_new([placed("b"), placed("c")])
    assert (digests(new), forgotten) == (["c"], [])
    assert sent.take_new([placed("a"), placed("c")]) == ([], [])
    assert sent.take_new([]) == ([], [])


def test_the_process_forgets_what_was_not_used_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_images, "KEPT_BYTES", 25)
    sent = SentImages()
    sent.take_new([placed("a"), placed("b")])
    sent.take_new([placed("a")])
    new, forgotten = sent.take_new([placed("c")])
    assert (digests(new), forgotten) == (["c"], ["b"])
    new, forgotten = sent.take_new([placed("b")])
    assert (digests(new), forgotten) == (["b"], ["a"])


def test_a_request_may_have_more_images_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_images, "KEPT_BYTES", 25)
    sent = SentImages()
    sent.take_new([placed("a")])
    new, forgotten = sent.take_new([placed("b", 30), placed("c", 30), placed("b", 30)])
    assert (digests(new), forgotten) == (["b", "c"], ["a"])
    new, forgotten = sent.take_new([placed("c", 30)])
    assert (digests(new), forgotten) == ([], ["b"])


def test_requests_have_no_pixels() -> None:
    ((start, image),) = without_pixels([placed("a")])
    assert (start, image.digest, image.nbytes, image.num_tokens) == (3, "a", 0, 1)
