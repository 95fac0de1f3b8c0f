"""The plan's bytes of models that see are those that torch allocates, within 15 %, or 22 % if recomputed."""

import dataclasses
from typing import Any

import memory_kit
import pytest
import torch_kit
import vision_kit as kit
from transformers import AutoConfig

from hflow.config.schema import OptimConfig
from hflow.data.images.files import read_image
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.forecast.memory.parts import MicroBatch
from hflow.training.fsdp.backend import TorchModel
from hflow.training.fsdp.memory import infer_step, model_state, train_step
from hflow.training.interface import TrainShard
from hflow.vision.interface import vision_family

WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}


def architecture(family: str) -> dict[str, Any]:
    """A model whose activations outweigh what the formulas leave out."""
    tiny = kit.ARCHITECTURES[family]
    text = {**tiny["text_config"], **WIDE, "max_position_embeddings": 2048}
    tower = {**tiny["vision_config"], **WIDE, "patch_size": 8}
    if family == "smolvlm":
        tower |= {"image_size": 128}
    else:
        text["head_dim"] = 32
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [4, 6, 6]}
        tower |= {"num_heads": 4, "out_hidden_size": 128, "depth": 3, "window_size": 64}
    return {**tiny, "text_config": text, "vision_config": tower}


CASES = [
    (family, dtype, changes)
    for family in kit.ARCHITECTURES
    for dtype in ("fp32", "bf16")
    for changes in ({}, {"activation_checkpointing": True}, {"freeze": "vision"})
    if (family, dtype) != ("smolvlm", "bf16")  # whose convolution makes copies on a CPU
]
FAST = [("qwen2_5_vl", "fp32", {}), ("smolvlm", "fp32", {"freeze": "vision"})]


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.long) for case in CASES],
)
def test_a_real_training_step_and_inference(family, dtype, changes):
    values = architecture(family)
    config = AutoConfig.for_model(family, **{k: v for k, v in values.items() if k != "model_type"}).to_dict()
    most = 128 * 128
    tokenizer = TextTokenizer(TokenizerSettings(alphabet=kit.ALPHABET, vision=config, max_pixels=most))
    pictures = [read_image(kit.picture(128, 128, seed)) for seed in range(4)]
    samples = [tokenizer.join("what?", "an answer", [picture]) for picture in pictures]
    batch = kit.batch_of(samples)
    settings = ModelSettings(
        name="m", trainable=True, architecture=values, optim=OptimConfig(), dtype=dtype, **changes
    )
    model, shard = TorchModel(settings, RankPosition()), TrainShard((batch,))
    model.train(memory_kit.TRAIN, [shard], 0)
    trained = memory_kit.peak(lambda: model.train(memory_kit.TRAIN, [shard], 1))
    call = dataclasses.replace(torch_kit.LOGPROBS, node="infers")
    inferred = memory_kit.peak(lambda: model.infer(call, [batch]))

    load = vision_family(config).image_load(config, samples[0].pixels[0].image.grid)
    learned = sum(sum(sample.loss_mask) for sample in samples)
    planned = MicroBatch(batch.num_tokens, learned, 1, False, 4 * load.patches, 4 * load.tokens)
    rank = memory_kit.rank(memory_kit.shape_of(values), dtype=dtype, **changes)
    limit = 0.22 if changes.get("activation_checkpointing") else 0.15
    assert train_step(rank, planned).total() == pytest.approx(trained, rel=limit)
    assert infer_step(rank, planned).total() == pytest.approx(inferred, rel=0.15)


def test_a_frozen_tower_has_no_optimizer_state():
    """54,176 of 264,992 parameters are the tower's: AdamW has two numbers for each of the others."""
    shape = memory_kit.shape_of(kit.ARCHITECTURES["qwen2_5_vl"])
    whole, frozen = (memory_kit.rank(shape, freeze=part) for part in (None, "vision"))
    states = [memory_kit.named(model_state(rank)) for rank in (whole, frozen)]
    assert [state["optimizer"] for state in states] == [8 * 264_992, 8 * (264_992 - 54_176)]
    assert [state["weights"] for state in states] == [4 * 264_992] * 2
