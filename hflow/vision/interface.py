"""`VisionFamily`: what hflow must know of a family of vision-language models, and the registry of families.

Describing a family imports neither torch nor transformers. Its module `encoder` computes with torch.

Axes: T tokens of a sequence, M tokens of images, N patches or tiles, A axes of positions, D hidden.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, cast

from hflow.base.registry import Registry
from hflow.shapes.vision_shape import ImageLoad
from hflow.types.image import PlacedImage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import PIL.Image
    from torch import Tensor, nn

Config = Mapping[str, Any]
Positions: TypeAlias = "npt.NDArray[np.int64]"

FAMILIES = Registry(
    "family of vision-language models",
    "hflow.vision",
    {
        "qwen2_5_vl": "hflow.vision.qwen.family:QWEN2_5_VL",
        "qwen3_vl": "hflow.vision.qwen.family:QWEN3_VL",
        "smolvlm": "hflow.vision.smolvlm.family:SMOLVLM",
    },
)
"""`model_type` of a Hugging Face config -> its family."""


@dataclass(frozen=True)
class ImageFeatures:
    """What the tower made of images, on the model's device."""

    embeddings: Tensor
    """`[M, D]`, image by image."""
    deep: Sequence[Tensor] = ()
    """`[M, D]` each, which the first layers of the language model add to their outputs."""


class Encoder(Protocol):
    """The torch side of a family: functions of the module that `VisionFamily.encoder` names."""

    def encode(self, backbone: nn.Module, pixels: Tensor, grids: Sequence[tuple[int, ...]]) -> ImageFeatures:
        """Run the tower.

        Args:
            backbone: the HF model without its head.
            pixels: normalised colours `[N, ...]` of all images, in the tower's dtype.
            grids: the arrangement of each image.
        """
        ...

    def tower(self, backbone: nn.Module) -> nn.Module:
        """Return the module with the weights of the tower, and of its projection to the language model."""
        ...

    def blocks(self, backbone: nn.Module) -> Iterable[nn.Module]:
        """Return the equal blocks of the tower, in order."""
        ...

    def language_model(self, backbone: nn.Module) -> nn.Module:
        """Return the language model, which takes `inputs_embeds` and `position_ids`."""
        ...

    def deep_arguments(self, rows: Tensor, deep: Sequence[Tensor]) -> dict[str, Any]:
        """Return the language model's arguments for `ImageFeatures.deep`.

        Args:
            rows: bool `[1, T]`, true for tokens of images.
            deep: for each layer `[M, D]`, in the order of these tokens.
        """
        ...


class VisionFamily(abc.ABC):
    """The families of one architecture.

    Attributes:
        name: the `model_type`, by which the registry has it.
        image_token: the token whose embeddings come from an image.
        special_tokens: the tokens that a character tokenizer has for it, in order.
        placeholder: an image in a text that no chat template wrote.
        num_axes: A; with 1, positions are those of any text.
    """

    name: ClassVar[str]
    image_token: ClassVar[str]
    special_tokens: ClassVar[tuple[str, ...]]
    placeholder: ClassVar[str]
    num_axes: ClassVar[int] = 1
    encoder_module: ClassVar[str]

    @property
    def encoder(self) -> Encoder:
        """The torch side, which is imported here."""
        return cast(Encoder, importlib.import_module(self.encoder_module))

    @abc.abstractmethod
    def processor(self, config: Config, saved: Config) -> Any:
        """Return transformers' image processor, which computes with Pillow and numpy.

        Args:
            config: the model's HF config.
            saved: what the checkpoint's `preprocessor_config.json` and the user set; may be empty.
        """

    @abc.abstractmethod
    def process(
        self, processor: Any, picture: PIL.Image.Image
    ) -> tuple[npt.NDArray[np.uint8], tuple[int, ...]]:
        """Return the colours `[N, C, ...]` of an image and its grid, before colours are normalised."""

    @abc.abstractmethod
    def patch_values(self, pixels: Tensor) -> Tensor:
        """Return normalised colours `[N, C, ...]` as the tower takes them."""

    @abc.abstractmethod
    def num_tokens(self, config: Config, grid: tuple[int, ...]) -> int:
        """Return the number of tokens of an image."""

    @abc.abstractmethod
    def expansion(self, config: Config, grid: tuple[int, ...]) -> str:
        """Return the text that replaces the image token of an image: all of its tokens."""

    @abc.abstractmethod
    def grid_of(self, config: Config, saved: Config, width: int, height: int) -> tuple[int, ...]:
        """Return the grid of an image of this size, without its pixels; needs no transformers.

        Args:
            config: the model's HF config, with its defaults.
            saved: settings of the processor, as `processor` takes them.
            width: pixels.
            height: pixels.

        Raises:
            DataError: if the model takes no image of this form.
        """

    @abc.abstractmethod
    def image_load(self, config: Config, grid: tuple[int, ...]) -> ImageLoad:
        """Return the work and the bytes of an image with this grid."""

    @abc.abstractmethod
    def pixel_settings(
        self, config: Config, saved: Config, min_pixels: int | None, max_pixels: int | None
    ) -> Config:
        """Return settings of a processor whose images have pixels between two numbers.

        Args:
            config: the model's HF config.
            saved: the checkpoint's settings; may be empty.
            min_pixels: the least; None: as saved, or the default.
            max_pixels: the most; None: as saved, or the default.

        Raises:
            DataError: if the family has no such limit.
        """

    @abc.abstractmethod
    def smallest_settings(self, config: Config) -> Config:
        """Return settings of a processor that makes an image of one pixel as small as the tower takes it."""

    def positions(
        self, config: Config, input_ids: npt.NDArray[np.int64], images: Sequence[PlacedImage]
    ) -> Positions:
        """Return the position `[A, T]` of each token of a sequence."""
        import numpy as np

        return np.arange(len(input_ids), dtype=np.int64)[None]


def vision_family(config: Config) -> VisionFamily | None:
    """Return the family of a model; None if it only reads text."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        return None
    kind: type[Any] = VisionFamily  # abstract, which mypy allows for no other argument
    found: VisionFamily = FAMILIES.describe(name, kind)
    return found
