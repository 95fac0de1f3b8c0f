"""What the plan knows of models that see: tensors, image tokens, FLOPs, memory and traffic."""

from random import Random

import pytest
import torch
import vision_kit as kit
from runs import ROOT
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import get_vision_window_index

from hflow.base.errors import ConfigError, DataError, PlanError
from hflow.base.shipped import shipped_directory
from hflow.config.schema import LoraConfig, ModelConfig, WorkloadImages
from hflow.config.yaml_files import read_yaml
from hflow.launch.planning.compile import compile_recipe
from hflow.planner.forecast.cost.flops import Work, tower_attention, tower_products, work_of
from hflow.planner.forecast.memory.parts import largest_microbatch
from hflow.planner.forecast.traffic import ImageBytes, field_size
from hflow.planner.plan.request import trained_shape
from hflow.planner.plan.workload import PromptImages
from hflow.report.formatting import format_replica_size
from hflow.report.text.plan.assumptions import lengths_text
from hflow.shapes.architectures import read_shape
from hflow.shapes.model_shape import num_parameters, tensors
from hflow.shapes.vision_shape import ImageLoad, num_tower_parameters, whole_vision_config
from hflow.vision.interface import vision_family


def architecture(name):
    if name in kit.ARCHITECTURES:
        return kit.ARCHITECTURES[name]
    return read_yaml(shipped_directory("configs") / "model" / f"{name}.yaml")["architecture"]


def shape_of(name, **changes):
    return read_shape({**architecture(name), **changes})


@pytest.mark.parametrize("name", [*kit.ARCHITECTURES, *kit.PUBLISHED])
def test_tensors_are_those_of_transformers(name):
    values = {key: value for key, value in architecture(name).items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(architecture(name)["model_type"], **values)
        )
    wanted = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    assert [(spec.name, spec.shape) for spec in tensors(shape_of(name))] == wanted


@pytest.mark.parametrize("name", kit.PUBLISHED)
def test_published_models_have_their_parameters(name):
    shape = shape_of(name)
    assert (num_parameters(shape), num_tower_parameters(shape.vision)) == kit.PUBLISHED[name]


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


GEOMETRY = "recipes/geometry3k/grpo.py"


def geometry(*overrides):
    return compile_recipe(ROOT / GEOMETRY, ["models.actor.path=null", *overrides])


def test_prompts_have_the_tokens_of_their_images():
    """700 x 500 is 18 x 25 tokens of 28 x 28 pixels, beside 512 tokens of text."""
    lengths = dict(geometry().plan.forecast.workload)["chat_gen"]
    assert lengths.prompt == 512 + 18 * 25
    assert dict(geometry("workload.prompt=600").plan.forecast.workload)["chat_gen"].prompt == 600
    assert dict(geometry("workload.images.count=0").plan.forecast.workload)["chat_gen"].prompt == 512


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.prompt=300", "1 image of 700 x 500 are 450 tokens, but there are workload.prompt=300"),
        ("workload.images.count=3", "1,350 tokens, but there are 1024 tokens .* raise models.actor.gen"),
        ("models.actor.backend=megatron", "megatron backend does not build model_type 'qwen2_5_vl'"),
        ("+models.actor.lora={}", None),
        ("model@models.actor=qwen2.5-7b", "only reads text, as far as hflow knows"),
    ],
)
def test_what_cannot_be_planned_is_one_line(override, message):
    if message is None:
        with pytest.raises(PlanError, match="freeze=vision has no effect"):
            geometry(override, "models.actor.freeze=vision")
        return
    with pytest.raises((PlanError, ConfigError), match=message):
        geometry(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model@models.actor=qwen2.5-vl-7b",
            r"'qwen2_5_vl' sees images; declare Model\(",
        ),
        ("workload.images.count=2", "no model of the recipe sees"),
        ("models.actor.freeze=vision", "declares actor without vision=True"),
    ],
)
def test_a_recipe_of_texts_has_no_images(override, message):
    with pytest.raises((PlanError, ConfigError), match=message):
        compile_recipe(ROOT / "recipes/gsm8k/grpo.py", ["models.actor.path=null", override])


def test_images_are_assumed_to_be_smaller_where_they_do_not_fit(tmp_path):
    """64 pixels of this model are a token: 640 x 480 are 4,800 tokens, 320 x 240 are 1,200."""
    plan = compile_recipe(kit.write_recipe(tmp_path, "qwen3_vl")).plan
    images = dict(plan.forecast.workload)["actor_gen"].images
    assert (str(images), images.tokens) == ("1 image of 160 x 120", 20 * 15)


def test_flops_of_a_tower():
    """The tower sees 16 patches in 2 layers, one with windows of 4: D = 32, F = 48, 96 colours, M = 128."""
    tower = shape_of("qwen2_5_vl").vision
    work = Work(1, 1, 0, 0, 0, 0, patches=16, full_pairs=256, windowed_pairs=64)
    block = 4 * 32 * 32 + 3 * 32 * 48
    matrices = 16 * (2 * block + 96 * 32) + 4 * (128 * 128 + 128 * 128)
    assert tower_products(tower, work) == 2 * matrices
    assert tower_attention(tower, work) == 4 * 32 * (256 + 64)


def test_an_image_is_computed_once_for_each_micro_batch_with_its_group():
    images = PromptImages(2, 8, 8, LOAD)
    lengths = [10] * 8  # two groups of four
    assert work_of(lengths, 8, 4, 100, images).patches == 2 * 2 * 16
    assert work_of(lengths, 8, 4, 20, images).patches == 2 * 2 * 16 * 2  # in two micro-batches
    assert work_of(lengths, 8, 4, 100).patches == 0


def test_a_frozen_tower_takes_less_time_and_memory():
    found = [geometry(*more).plan for more in ((), ("models.actor.freeze=vision",))]
    seconds = [{row.node: row.seconds for row in plan.forecast.times}["actor_train"] for plan in found]
    assert seconds[1] < seconds[0]
    peaks = [max(row.total for row in plan.forecast.memory if row.phase == "actor_train") for plan in found]
    assert peaks[1] < peaks[0]


def test_a_micro_batch_has_no_more_patches_than_its_tokens_allow():
    """Four patches of Qwen2.5-VL are a token: a budget of tokens bounds the tower, too."""
    workload = dict(geometry().plan.forecast.workload)["chat_gen"]
    plan, config = geometry().plan, ModelConfig(tokens_per_microbatch=8192)
    batch = largest_microbatch(plan, plan.graph.node("actor_train"), workload, config, 8)
    assert batch.patches == (8192 // 963) * 4 * 450
    assert batch.patches <= 4 * batch.tokens


def test_pixels_move_once_for_a_group():
    images = ImageBytes.of(WorkloadImages(count=2, width=30, height=20), PromptImages(2, 30, 20, LOAD), 8)
    assert images == ImageBytes(files=1200, urls=1600, pixels=2 * 800 // 8)
    graph = geometry().plan.graph
    assert field_size(graph, "chat_gen/pixels", {}, images).of(10, 10) == 200
    assert field_size(graph, "chat_gen/images", {}, images).of(10, 10) == 1200


LOAD = ImageLoad(tokens=4, patches=16, full_pairs=256, windowed_pairs=64, num_bytes=800)


def test_adapters_are_in_the_language_model_only():
    shape = trained_shape(shape_of("qwen2.5-vl-7b"), LoraConfig(r=4))
    assert all(spec.name.startswith("model.language_model.layers.") for spec in tensors(shape))
    assert len(tensors(shape)) == 28 * 7 * 2


def test_plans_name_the_tower():
    compiled = geometry()
    text = format_replica_size(compiled.plan.replicas[0], dict(compiled.plan.shapes)["actor"])
    assert text == "qwen2_5_vl, 8.29 billion, 677 million of them the tower, in bf16"
    lengths = dict(compiled.plan.forecast.workload)["chat_gen"]
    assert "(450 of them 1 image of 700 x 500)" in lengths_text(lengths)
