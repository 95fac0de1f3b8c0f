"""What the plan knows of models that see: tensors, image tokens, FLOPs, memory and traffic."""

import pytest
import torch
import vision_kit as kit
from transformers import AutoConfig, AutoModelForImageTextToText

from hflow.base.errors import PlanError
from hflow.base.shipped import shipped_directory
from hflow.config.yaml_files import read_yaml
from hflow.shapes.architectures import read_shape
from hflow.shapes.model_shape import num_parameters, tensors
from hflow.shapes.vision_shape import num_tower_parameters

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
