"""What the plan knows of models that see: tensors, image tokens, FLOPs, memory and traffic."""

from random import Random

import pytest
import torch
import vision_kit as kit
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import get_vision_window_index

from hflow.base.errors import DataError, PlanError
from hflow.base.shipped import shipped_directory
from hflow.config.yaml_files import read_yaml
from hflow.shapes.architectures import read_shape
from hflow.shapes.model_shape import num_parameters, tensors
from hflow.shapes.vision_shape import num_tower_parameters, whole_vision_config
from hflow.vision.interface import vision_family

PARAMETERS = {
    "qwen2.5-vl-3b": (3_754_622_976, 668_684_288),
    "qwen2.5-vl-7b": (8_292_166_656, 676_550_144),
    "qwen2.5-vl-72b": (73_410_777_344, 704_573_696),
    "qwen3-vl-2b": (2_127_532_032, 406_957_056),
    "qwen3-vl-4b": (4_437_815_808, 415_347_712),
    "qwen3-vl-8b": (8_767_123_696, 576_388_336),
    "smolvlm2-256m": (256_484_928, 93_510_912),
    "smolvlm2-500m": (507_482_304, 98_229_504),
    "smolvlm2-2.2b": (2_246_784_880, 434_220_912),
}
"""Model -> the parameters of its checkpoint, as the Hub counts them, and those of its tower."""


def architecture(name):
    if name in kit.ARCHITECTURES:
        return kit.ARCHITECTURES[name]
    return read_yaml(shipped_directory("configs") / "model" / f"{name}.yaml")["architecture"]


def shape_of(name, **changes):
    return read_shape({**architecture(name), **changes})


@pytest.mark.parametrize("name", [*kit.ARCHITECTURES, *PARAMETERS])
def test_tensors_are_those_of_transformers(name):
    values = {key: value for key, value in architecture(name).items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(architecture(name)["model_type"], **values)
        )
    wanted = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    assert [(spec.name, spec.shape) for spec in tensors(shape_of(name))] == wanted


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models_have_their_parameters(name):
    shape = shape_of(name)
    assert (num_parameters(shape), num_tower_parameters(shape.vision)) == PARAMETERS[name]


def test_older_configs_have_the_language_model_outside():
    """Published configs of Qwen2.5-VL have no `text_config`."""
    config = dict(architecture("qwen2.5-vl-7b"))
    flat = {**config.pop("text_config"), **config}
    assert read_shape(flat) == shape_of("qwen2.5-vl-7b")


def test_a_size_of_a_tower_is_checked():
    config = architecture("qwen3_vl")
    with pytest.raises(PlanError, match=r"vision_config.depth is 0"):
        read_shape({**config, "vision_config": {**config["vision_config"], "depth": 0}})
    text = {**architecture("smolvlm")["text_config"], "model_type": "mistral"}
    with pytest.raises(PlanError, match="must be 'llama'"):
        shape_of("smolvlm", text_config=text)


SETTINGS = {
    "qwen2.5-vl-7b": {"min_pixels": 3136, "max_pixels": 12845056},
    "qwen3-vl-4b": {"size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    "smolvlm2-256m": {},
    "smolvlm2-2.2b": {"size": {"longest_edge": 1152}},
}
"""Settings of published processors, and one of a user."""


@pytest.mark.parametrize("name", [*kit.ARCHITECTURES, *SETTINGS])
def test_grids_are_those_of_the_processors(name):
    """For sizes on both sides of all limits; the smaller images are processed, too."""
    config = whole_vision_config(architecture(name))
    family, saved = vision_family(config), SETTINGS.get(name, {})
    processor, random = family.processor(config, saved), Random(name)
    sizes = [(1, 1), (28, 28), (7, 900), (640, 480), (5000, 4000), (8, 1600), (4097, 4095)]
    sizes += [(random.randint(1, 3000), random.randint(20, 3000)) for _ in range(200)]
    for width, height in sizes:
        if max(width, height) > 200 * min(width, height):
            continue
        found = family.grid_of(config, saved, width, height)
        if name.startswith("smol"):
            _, rows, columns = processor.get_number_of_image_patches(height, width, {})
            assert found == ((rows, columns) if rows * columns > 1 else (0, 0)), (width, height)
        else:
            patches = processor.get_number_of_image_patches(height, width, {})
            assert found[1] * found[2] == patches, (width, height)
        if width * height < 10_000:
            pixels, grid = family.process(processor, kit.picture(width, height))
            load = family.image_load(config, grid)
            assert (found, load.num_bytes) == (grid, pixels.nbytes), (width, height)


def test_the_users_limits_replace_those_of_the_checkpoint():
    config, saved = architecture("qwen2.5-vl-7b"), SETTINGS["qwen2.5-vl-7b"]
    family = vision_family(config)
    limited = {**saved, **family.pixel_settings(config, saved, None, 28 * 28 * 4)}
    grid = family.grid_of(config, limited, 640, 480)
    assert family.num_tokens(config, grid) <= 4
    assert family.process(family.processor(config, limited), kit.picture(640, 480))[1] == grid


def test_an_image_that_is_too_long_is_refused():
    config = architecture("qwen3_vl")
    with pytest.raises(DataError, match="2000 x 9 is too long"):
        vision_family(config).grid_of(config, {}, 2000, 9)


@pytest.mark.parametrize("size", [(640, 480), (448, 448), (1000, 90)])
def test_pairs_of_windows_are_those_of_transformers(size):
    config = architecture("qwen2.5-vl-7b")
    family = vision_family(config)
    grid = family.grid_of(config, {}, *size)
    _, lengths = get_vision_window_index(
        torch.tensor([grid]), spatial_merge_size=2, window_size=112, patch_size=14, kwargs={}
    )
    of_windows = torch.diff(lengths).square().sum().item()
    load = family.image_load(config, grid)
    assert load.windowed_pairs == of_windows
    assert load.full_pairs == (grid[1] * grid[2]) ** 2


def test_image_tokens_of_known_images():
    """640 x 480 is 34 x 46 patches of 14, and 30 x 40 of 16; four are a token. 17 tiles of 8 x 8 tokens."""
    cases = {"qwen2.5-vl-7b": 17 * 23, "qwen3-vl-4b": 15 * 20, "smolvlm2-256m": (4 * 3 + 1) * 64}
    for name, tokens in cases.items():
        config = architecture(name)
        family = vision_family(config)
        assert family.image_load(config, family.grid_of(config, {}, 640, 480)).tokens == tokens
