"""Tokens, positions and pixels of images are those of transformers' processors."""

import numpy as np
import pytest
import torch
import vision_kit as kit
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm

from hflow.base.errors import DataError
from hflow.data.images.files import read_image
from hflow.vision.embedding import normalised
from hflow.vision.interface import vision_family
from hflow.vision.processor import ImageProcessor, image_rows

SIZES = [(40, 24), (16, 33), (70, 41)]
PROCESSORS = {
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "smolvlm": processing_smolvlm.SmolVLMProcessor,
}


def processor_of(family, tokenizer):
    """Return transformers' processor; that of videos, which needs torchvision, is left out."""
    kind = type(
        "Own", (PROCESSORS[family],), {"check_argument_for_proper_class": lambda self, name, x: type(x)}
    )
    made = tokenizer.images._processor
    return kind(made, tokenizer._hf, None, **({"image_seq_len": 4} if family == "smolvlm" else {}))


@pytest.fixture(autouse=True)
def _number_names(monkeypatch):
    """SmolVLM's processor wants a package that it uses for videos only."""
    monkeypatch.setattr(processing_smolvlm, "num2words", str)


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_the_processor_of_transformers_makes_the_same(family):
    tokenizer, pictures = kit.tokenizer(family), [kit.picture(*size, seed=size[0]) for size in SIZES]
    placeholder = tokenizer.images.family.placeholder
    text = f"{placeholder}what is {placeholder}? and {placeholder}"
    whole = processor_of(family, tokenizer)(
        images=[pictures] if family == "smolvlm" else pictures, text=[text], return_tensors="pt"
    )
    content = [{"type": "text", "text": part} for part in text.split(placeholder)]
    parts = [content[0]]
    for picture, part in zip(pictures, content[1:], strict=True):
        parts += [{"type": "image_url", "image_url": {"url": read_image(picture).url}}, part]
    ids, placed = tokenizer.encode_content(parts)
    assert (
        ids[len(tokenizer.prefix_ids) :]
        == whole["input_ids"][0, -len(ids) + len(tokenizer.prefix_ids) :].tolist()
    )
    wanted = whole["pixel_values"].flatten(0, -4) if family == "smolvlm" else whole["pixel_values"]
    own = torch.cat(
        [
            tokenizer.images.family.patch_values(normalised(torch.from_numpy(x.image.pixels), x.image))
            for x in placed
        ]
    )
    assert torch.equal(own, wanted.view_as(own))
    token = tokenizer.images.config["image_token_id"]
    rows = image_rows(np.array(ids), placed, token)
    assert rows.tolist() == [i for i, x in enumerate(ids) if x == token]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("sizes", [[], [(40, 24)], SIZES, [(8, 64), (64, 8)]])
def test_positions_are_those_of_the_model(family, sizes):
    """M-RoPE of text, of images between text, and of images that follow one another."""
    values = {key: value for key, value in kit.ARCHITECTURES[family].items() if key != "model_type"}
    config = AutoConfig.for_model(family, **values)
    model = AutoModelForImageTextToText.from_config(config).model
    (sample,) = kit.trajectories(family, [sizes])
    ids = torch.tensor(sample.input_ids)[None]
    grids = torch.tensor([x.image.grid for x in sample.pixels]).reshape(-1, 3)
    wanted, _ = model.get_rope_index(ids, (ids == 6).int(), grids if sizes else None)
    found = vision_family(config.to_dict()).positions(config.to_dict(), ids[0].numpy(), sample.pixels)
    np.testing.assert_array_equal(found, wanted[:, 0].numpy())


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
@pytest.mark.parametrize("size", [*SIZES, (200, 8), (1000, 700)])
def test_the_number_of_tokens_follows_from_the_size(family, size):
    images = kit.tokenizer(family).images
    limits = images.family.pixel_settings(images.config, {}, *kit.PIXELS_OF[family])
    grid = images.family.grid_of(images.config, limits, *size)
    image = images.image(read_image(kit.picture(*size)))
    assert (image.grid, image.num_tokens) == (grid, images.family.num_tokens(images.config, grid))


def test_split_tiles_are_those_of_transformers():
    """A larger image of SmolVLM is split into rows and columns of tiles, and the whole."""
    config = kit.config_of("smolvlm")
    family = vision_family(config)
    made = family.processor(config, {})
    pixels, grid = family.process(made, kit.picture(128, 90))
    assert grid == (3, 4)
    assert len(pixels) == 13
    assert family.num_tokens(config, grid) == 13 * 4
    assert family.grid_of(config, {}, 128, 90) == grid
    wanted = processing_smolvlm.get_image_prompt_string(
        *(3, 4, 4, "<fake_token_around_image>", "<image>", "<global-img>")
    )
    assert family.expansion(config, grid) == wanted


def test_an_image_is_made_once():
    images = kit.tokenizer("qwen3_vl").images
    first = images.image(read_image(kit.picture(40, 24)))
    assert images.image(read_image(kit.picture(40, 24)).url) is first
    other = kit.tokenizer("qwen3_vl").images.image(read_image(kit.picture(40, 24)))
    assert other.digest == first.digest
    smaller = {"size": {"shortest_edge": 64, "longest_edge": 64}}
    config = kit.config_of("qwen3_vl")
    changed = ImageProcessor(vision_family(config), config, smaller).image(read_image(kit.picture(40, 24)))
    assert changed.digest != first.digest
    assert changed.num_tokens == 1


def test_a_text_with_an_image_token_is_refused():
    with pytest.raises(DataError, match="no such token into a text"):
        kit.tokenizer("qwen3_vl").encode_content("what <|image_pad|>?")


def test_another_image_token_than_the_models_is_refused():
    config = {**kit.config_of("qwen3_vl"), "image_token_id": 9}
    with pytest.raises(DataError, match="image_token_id is 9"):
        kit.TextTokenizer(kit.TokenizerSettings(alphabet=kit.ALPHABET, vision=config))


def test_extreme_sides_are_refused():
    with pytest.raises(DataError, match="crop it"):
        kit.tokenizer("qwen3_vl").images.image(read_image(kit.picture(1000, 2)))
