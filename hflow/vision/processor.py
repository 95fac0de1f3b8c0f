"""`ImageProcessor`: makes of the images of samples what a model takes, once for each image."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from hflow.base.errors import DataError
from hflow.base.files import read_json_object
from hflow.data.images.files import read_image
from hflow.types.image import Colours, Image, PlacedImage, ProcessedImage
from hflow.vision.interface import Config, VisionFamily

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RECENT_BYTES = 1 << 28
"""Colours of images that are kept for the next samples that have them."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class ImageProcessor:
    """The image processor of a vision-language model. Not thread-safe.

    It computes what that of transformers computes, but leaves colours as they are. They are normalised on the
    model's device, so that a fourth of the bytes or less is stored and moved.
    """

    def __init__(self, family: VisionFamily, config: Config, saved: Config) -> None:
        """Build the processor with settings of the checkpoint and the user, by transformers' names.

        Raises:
            DataError: if transformers does not take the settings.
        """
        self.family, self.config = family, config
        try:
            self._processor = family.processor(config, saved)
        except (TypeError, ValueError, KeyError) as error:
            raise DataError(f"the image processor of {family.name} cannot be built: {error}") from error
        settings = {key: str(value) for key, value in sorted(self._processor.to_dict().items())}
        salt = json.dumps([family.name, settings]).encode()
        self._key = hashlib.blake2b(salt, digest_size=16).digest()
        made = self._processor
        self._colours = Colours(float(made.rescale_factor), tuple(made.image_mean), tuple(made.image_std))
        self._images: WeakValueDictionary[str, ProcessedImage] = WeakValueDictionary()
        self._recent: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._recent_bytes = 0

    def image(self, value: Any) -> ProcessedImage:
        """Return an `Image`, or a data URL, as the model takes it.

        Raises:
            DataError: if it cannot be decoded, or the model takes no such image.
        """
        content = value.url if isinstance(value, Image) else str(value)
        digest = hashlib.blake2b(content.encode(), digest_size=16, key=self._key).hexdigest()
        found = self._images.get(digest)
        if found is None:
            pixels, grid = self.family.process(self._processor, read_image(value).open())
            num_tokens = self.family.num_tokens(self.config, grid)
            found = ProcessedImage(digest, pixels, grid, num_tokens, self._colours)
            self._images[digest] = found
        self._keep(found)
        return found

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """Return a text with the tokens of each image in place of its image token.

        Raises:
            DataError: if the text has another number of image tokens than there are images.
        """
        parts = text.split(self.family.image_token)
        if len(parts) != len(images) + 1:
            raise DataError(
                f"a text has {self.family.image_token!r} {len(parts) - 1} times, but {len(images)} images; "
                "write images as parts of messages, and no such token into a text"
            )
        expansions = [self.family.expansion(self.config, image.grid) for image in images]
        return parts[0] + "".join(map(str.__add__, expansions, parts[1:]))

    def save(self, directory: Path) -> list[str]:
        """Write what transformers builds the same processor from; return the paths of the files."""
        names: list[str] = self._processor.save_pretrained(directory)
        return names

    def _keep(self, image: ProcessedImage) -> None:
        if image.digest not in self._recent:
            self._recent_bytes += image.nbytes
        self._recent[image.digest] = image
        self._recent.move_to_end(image.digest)
        while self._recent_bytes > RECENT_BYTES and len(self._recent) > 1:
            self._recent_bytes -= self._recent.popitem(last=False)[1].nbytes


def whole_config(config: Config) -> Config:
    """Return an HF config with the defaults of its family."""
    from transformers import AutoConfig

    values: dict[str, Any] = json.loads(json.dumps(dict(config)))
    found: dict[str, Any] = AutoConfig.for_model(values.pop("model_type"), **values).to_dict()
    return found


def saved_settings(directory: Path | None) -> Mapping[str, Any]:
    """Return the settings of a checkpoint's image processor.

    Raises:
        DataError: if it says nothing, though it is a directory.
    """
    if directory is None:
        return {}
    for name in PROCESSOR_FILES:
        if (directory / name).is_file():
            saved = read_json_object(directory / name)
            inner = saved.get("image_processor", saved)
            return inner if isinstance(inner, Mapping) else saved
    raise DataError(
        f"{directory} has no image processor ({' or '.join(PROCESSOR_FILES)}), which the model needs to see; "
        "copy it from the published checkpoint"
    )


def place_images(
    ids: Sequence[int], images: Sequence[ProcessedImage], token: int, offset: int = 0
) -> tuple[PlacedImage, ...]:
    """Return the places of images among tokens that were encoded with them.

    `offset` is the number of tokens before `ids` in their sequence.

    Raises:
        DataError: if the images have another number of tokens.
    """
    places = [i for i, token_id in enumerate(ids) if token_id == token] if images else []
    wanted = sum(image.num_tokens for image in images)
    if len(places) != wanted:
        raise DataError(
            f"{len(images)} images have {wanted} tokens, but their text has {len(places)}; use the tokenizer "
            "and the image processor of one checkpoint"
        )
    starts = accumulate((image.num_tokens for image in images), initial=0)
    return tuple(PlacedImage(offset + places[i], image) for i, image in zip(starts, images, strict=False))


def image_rows(
    ids: npt.NDArray[np.int64], images: Sequence[PlacedImage], token: int
) -> npt.NDArray[np.int64]:
    """Return the positions `[M]` of the tokens of images in a sequence, image by image."""
    import numpy as np

    parts = []
    for start, image in images:
        if (ids[start : start + image.num_tokens] == token).all():
            parts.append(np.arange(start, start + image.num_tokens))
        else:  # other tokens between its own
            parts.append(start + np.flatnonzero(ids[start:] == token)[: image.num_tokens])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
