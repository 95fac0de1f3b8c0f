"""Reads images from what datasets and bodies hold: files, bytes, base64, data URLs and Pillow's images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from hflow.base.errors import DataError, reason_of, shorten
from hflow.types.image import Image

MAX_BYTES = 1 << 26
"""The largest file of an image that is read."""
_SECONDS = 30.0
"""Longest wait for a file of the web."""
_WEB = ("http://", "https://")


@dataclass(frozen=True)
class ImageSource:
    """Where images that are given by name may come from."""

    directory: Path | None = None
    """The directory of relative paths; None: paths are refused."""
    fetches: bool = False
    """Whether images of the web are fetched."""
    key: str = "data.NAME"
    """Key of the dataset in the configuration, for errors."""


NOWHERE = ImageSource()
"""For images of bodies and agents, which must not read files of this machine by their names."""


def read_image(value: Any, source: ImageSource = NOWHERE) -> Image:
    """Return an image, with its header checked.

    Args:
        value: an `Image`; a file's content as bytes, base64 or a data URL; an image of Pillow; a mapping with
            `bytes` or `path`, as `datasets.Image` stores one; a path; or a URL.
        source: which names are read.

    Raises:
        DataError: if it is none of these, cannot be read, or is no image that models take.
    """
    if isinstance(value, Image):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Image.of_file(bytes(value))
    if isinstance(value, str):
        return _read_name(value, source)
    if isinstance(value, Mapping):
        return _read_mapping(value, source)
    if isinstance(value, Path):
        return _read_path(value, source)
    if type(value).__module__.partition(".")[0] == "PIL":
        return Image.of_file(_encoded(value))
    raise DataError(
        f"{shorten(repr(value), 60)} is no image; give a path, bytes, base64, a data URL or a Pillow image"
    )


def with_urls(value: Any) -> tuple[Any, bool]:
    """Return a value with data URLs in place of images, and whether it is one, or a list with some."""
    items = value if isinstance(value, list | tuple) else [value]
    is_image = [isinstance(item, Image) or type(item).__module__.startswith("PIL.") for item in items]
    if not any(is_image):
        return value, False
    plain = [
        {"image": read_image(item).url} if image else item
        for item, image in zip(items, is_image, strict=True)
    ]
    return (plain if items is value else plain[0]), True


def with_digests(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with the digest of each image in its place, by which a journal knows them."""
    return {
        name: {"image": value.digest} if isinstance(value, Image) else value
        for name, value in arguments.items()
    }


def with_images_of_urls(value: Any) -> Any:
    """Return a value of which `with_urls` made one with data URLs."""
    if isinstance(value, list):
        return [with_images_of_urls(item) for item in value]
    return read_image(value["image"]) if isinstance(value, Mapping) and {*value} == {"image"} else value


def _read_mapping(value: Mapping[str, Any], source: ImageSource) -> Image:
    """Return the image in a mapping, as `datasets.Image` stores one."""
    for key in ("bytes", "path"):
        if value.get(key) is not None:
            return read_image(value[key], source)
    keys = ", ".join(map(str, value)) or "none"
    raise DataError(f"an image has neither bytes nor path (its keys: {keys}); give one of them")


def _read_name(text: str, source: ImageSource) -> Image:
    """Return the image that a text holds or names."""
    if text.startswith("data:"):
        return Image.of_url(text)
    if text.startswith(_WEB):
        return Image.of_file(_fetched(text, source))
    if text.startswith("file://"):
        return _read_path(Path(text.removeprefix("file://")), source)
    if _is_base64_image(text):
        return Image.of_base64(text)
    return _read_path(Path(text), source)


def _is_base64_image(text: str) -> bool:
    """Return whether a text is an image of a known format in base64, which no path resembles."""
    heads = ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD", "Qk")  # PNG, JPEG, WebP, GIF, BMP
    return len(text) > 64 and text.startswith(heads) and "." not in text[:64]


def _read_path(path: Path, source: ImageSource) -> Image:
    if source.directory is None:
        raise DataError(
            f"the image {shorten(str(path), 60)!r} is a path, which only rows of datasets may have; give the "
            "image itself, as bytes or a data URL"
        )
    file = source.directory / path
    try:
        if file.stat().st_size > MAX_BYTES:
            raise DataError(f"{file} has more than {MAX_BYTES:,} bytes; make the image smaller")
        return Image.of_file(file.read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"the image {file} cannot be read: {reason}; restore the file") from error
    except DataError as error:
        raise DataError(f"{file}: {error}" if str(file) not in str(error) else str(error)) from error


def _fetched(url: str, source: ImageSource) -> bytes:
    """Return a file of the web."""
    if source.directory is None and not source.fetches:
        raise DataError(f"the image {shorten(url, 80)} is a URL, which is not fetched; send it as a data URL")
    if not source.fetches:
        raise DataError(
            f"the image {shorten(url, 80)} is a URL, which is not fetched; store the image in the dataset, "
            f"or set {source.key}.fetch_images=true for rows of datasets"
        )
    import httpx  # a tenth of a second, and only rows with addresses need it

    try:
        with httpx.stream("GET", url, timeout=_SECONDS, follow_redirects=True) as reply:
            reply.raise_for_status()
            content = bytearray()
            for part in reply.iter_bytes():
                content += part
                if len(content) > MAX_BYTES:
                    raise DataError(f"{url} has more than {MAX_BYTES:,} bytes; make the image smaller")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DataError(
            f"the image {shorten(url, 80)} cannot be fetched: {reason_of(error, 120)}; store it in the data"
        ) from error
    return bytes(content)


def _encoded(picture: Any) -> bytes:
    """Return an image of Pillow as a file, without loss."""
    from PIL import ImageOps

    buffer = BytesIO()
    try:
        upright = ImageOps.exif_transpose(picture)
        upright.save(buffer, "PNG")
    except (OSError, ValueError) as error:
        raise DataError(f"an image of Pillow cannot be saved as PNG: {error}; convert it to RGB") from error
    return buffer.getvalue()
