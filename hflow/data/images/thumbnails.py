"""Small copies of images, for people to look at."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO

from hflow.base.errors import DataError
from hflow.types.image import Image

SIDE = 256
"""Pixels of the longer side, at most."""


def thumbnail(image: Image) -> str | None:
    """Return a small copy of an image as a data URL; None if the image is damaged."""
    try:
        picture = image.open()
    except DataError:
        return None
    picture.thumbnail((SIDE, SIDE))
    buffer = BytesIO()
    is_small = picture.width * picture.height < 64 * 64
    kind = "PNG" if is_small else "JPEG"
    picture.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{b64encode(buffer.getvalue()).decode()}"
