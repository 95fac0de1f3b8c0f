"""`Image`: an image of a sample as bodies receive it, and `ProcessedImage`: as a model receives it."""

from __future__ import annotations

import hashlib
import warnings
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from hflow.base.errors import DataError

if TYPE_CHECKING:  # numpy takes a tenth of a command's time
    import numpy as np
    import numpy.typing as npt
    import PIL.Image

MAX_PIXELS = 1 << 26
"""Pixels of the largest image that is read. A small file can decode to any number of them."""
_TOO_LARGE = f"an image has more than the {MAX_PIXELS:,} pixels that are read; make it smaller"
_MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
}
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Pillow's modes with 8 bits or less for a colour. Others would be clipped."""
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values for an image that is turned by a quarter."""


@dataclass(frozen=True)
class Image:
    """An encoded image whose header was checked. Two images are equal if their files are."""

    data: bytes = field(repr=False)
    """The file."""
    media_type: str
    """`image/png`, `image/jpeg`, `image/webp`, `image/gif` or `image/bmp`."""
    width: int
    height: int

    @classmethod
    def of_file(cls, data: bytes) -> Image:
        """Return the image in a file's content. Only its header is read.

        Raises:
            DataError: if it is no image of a known format, is animated, or has too many pixels or more than
                8 bits for a colour.
        """
        with _decoding(data) as picture:
            media_type = _MEDIA_TYPES.get(picture.format or "")
            if media_type is None:
                known = ", ".join(_MEDIA_TYPES)
                raise DataError(f"an image has the format {picture.format}; save it as one of {known}")
            if picture.width * picture.height > MAX_PIXELS:
                raise DataError(_TOO_LARGE)
            if picture.mode not in _MODES:
                raise DataError(
                    f"an image has colours of mode {picture.mode}, which 8 bits cannot hold; save it as RGB"
                )
            if (frames := getattr(picture, "n_frames", 1)) > 1:
                raise DataError(f"an image is an animation of {frames} frames; save one of them")
            size = picture.size
            # Reading EXIF data that the header lacks would decode the image.
            if "exif" in picture.info and picture.getexif().get(_ORIENTATION) in _TURNED:
                size = size[::-1]
        return cls(data, media_type, *size)

    @classmethod
    def of_url(cls, url: str) -> Image:
        """Return the image in a data URL, `data:image/png;base64,...`.

        Raises:
            DataError: if it is another URL, and for the reasons of `of_file`.
        """
        head, _, content = url.partition(",")
        if not head.startswith("data:") or not head.endswith(";base64"):
            raise DataError(f"a data URL begins with {head[:40]!r}; write data:image/png;base64,...")
        return cls.of_base64(content)

    @classmethod
    def of_base64(cls, text: str) -> Image:
        """Return the image in a base64 text.

        Raises:
            DataError: if it is not base64, and for the reasons of `of_file`.
        """
        try:
            return cls.of_file(b64decode("".join(text.split()), validate=True))
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"an image is not base64: {error}; encode it again") from error

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits that identify the file."""
        return hashlib.blake2b(self.data, digest_size=16).hexdigest()

    @cached_property
    def url(self) -> str:
        """The image as a data URL, as messages have it."""
        return f"data:{self.media_type};base64,{b64encode(self.data).decode()}"

    def open(self) -> PIL.Image.Image:
        """Return the decoded image in mode RGB, turned as its EXIF data says. What is transparent is white.

        Raises:
            DataError: if the file is damaged.
        """
        from PIL import Image as Pillow
        from PIL import ImageOps

        with _decoding(self.data) as picture:
            upright = ImageOps.exif_transpose(picture)
            if "transparency" in upright.info or upright.mode in ("LA", "PA", "RGBA"):
                layer = upright.convert("RGBA")
                background = Pillow.new("RGBA", layer.size, "white")
                upright = Pillow.alpha_composite(background, layer)
            return upright.convert("RGB")

    def __hash__(self) -> int:
        return hash(self.digest)


@contextmanager
def _decoding(data: bytes) -> Iterator[PIL.Image.Image]:
    """Open an image with Pillow, and turn what it raises into a `DataError`."""
    try:
        from PIL import Image as Pillow
        from PIL import UnidentifiedImageError
    except ImportError as error:
        raise DataError("images need the package Pillow; pip install 'hflow-rl[images]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)  # the limit is ours
            with Pillow.open(BytesIO(data)) as picture:
                yield picture
    except UnidentifiedImageError as error:
        raise DataError(f"{len(data):,} bytes are no image that Pillow can read; restore the file") from error
    except Pillow.DecompressionBombError as error:
        raise DataError(_TOO_LARGE) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"an image cannot be decoded: {error}; restore the file") from error


class Colours(NamedTuple):
    """How a model normalises colours from 0 to 255: `(colour * factor - mean) / deviation` by channel."""

    factor: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


class PlacedImage(NamedTuple):
    """An image of a sequence."""

    start: int
    """The position of its first token. Its tokens are the next `num_tokens` image tokens of the sequence."""
    image: ProcessedImage


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as the processor of a model made it, before its colours are normalised.

    A process has one object for each image, however many samples have it.
    """

    digest: str
    """Identifies image and processor."""
    pixels: npt.NDArray[np.uint8] = field(repr=False)
    """Colours `[N, ...]` of N patches or tiles, as the model's family lays them out."""
    grid: tuple[int, ...]
    """How the patches or tiles are arranged, as the family defines it."""
    num_tokens: int
    """Number of tokens of a sequence that get their embeddings from the image."""
    colours: Colours

    @property
    def nbytes(self) -> int:
        """Bytes of the colours."""
        return self.pixels.nbytes

    @property
    def identity(self) -> int:
        """63 bits of the digest, by which tokens of equal images are equal."""
        return int(self.digest[:16], 16) >> 1
