"""Devices, links and models by name: every shipped file is right, and a user's own come first."""

import json
import re
from pathlib import Path

import pytest
import yaml
from vision_kit import PUBLISHED as SEEING

from hflow.base.errors import ConfigError, DataError, HflowError, NotYetError, PlanError
from hflow.base.shipped import shipped_directory
from hflow.config import RunConfig, load_config
from hflow.data.text.chat import written_template_problem
from hflow.data.text.tokenizer import TextTokenizer
from hflow.dsl.recipe import load_recipe
from hflow.graph.build import build_graph
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.planning.read_recipe import read_recipe
from hflow.launch.planning.request import (
    cluster_hardware,
    device_calibration,
    known_devices,
    known_links,
    plan_request,
)
from hflow.launch.running.preflight import refuse_unrunnable
from hflow.launch.running.worker_setup import model_settings, tokenizer_settings
from hflow.planner.plan.cluster import used_links
from hflow.planner.plan.request import PlanRequest
from hflow.report.formatting import format_replica_size
from hflow.shapes.architectures import knows_tensors, read_shape
from hflow.shapes.model_shape import active_parameters, num_parameters

RECIPES = Path(__file__).parents[2] / "recipes"
GRPO, PPO = RECIPES / "grpo.py", RECIPES / "ppo.py"

PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-2407": 122_610_069_504,
}
"""Parameters as their safetensors files count them. The files of Qwen3-0.6B and 1.7B repeat the tied output
matrix (751,632,384 and 2,031,739,904 with it); it counts once here."""

PLANNED = {
    "mixtral-8x7b": (46_702_792_704, 12.9),
    "qwen3-30b-a3b": (30_532_122_624, 3.3),
    "qwen3-235b-a22b": (235_093_634_560, 22),
    "deepseek-v3": (671_026_419_200, 37),
    "kimi-k2": (1_026_408_232_448, 32),
    "glm-4.5": (355e9, 32),
    "glm-4.5-air": (106e9, 12),
    "gpt-oss-20b": (20_914_757_184, 3.61),
    "gpt-oss-120b": (116_829_156_672, 5.13),
    "llama-4-scout": (108_641_793_536, 17),
    "llama-4-maverick": (401_583_781_376, 17),
    "gemma-2-2b": (2_614_341_888, None),
    "gemma-2-9b": (9_241_705_984, None),
    "gemma-2-27b": (27_227_128_320, None),
    "gemma-3-1b": (999_885_952, None),
    "gemma-3-4b": (3_884e6, None),
    "gemma-3-12b": (11_771e6, None),
    "gemma-3-27b": (27_016e6, None),
}
"""Published parameters, in all and in billions for each token. Sources: safetensors files; the reports of
DeepSeek-V3, GLM-4.5, Kimi K2, gpt-oss (model card, table 1) and Gemma 3 (table 1, without the vision tower);
model cards. Those of Llama 4 contain a vision tower of 0.87 B."""


DEVICES = (
    "a10, a100-40g, a100-80g, a100-80g-pcie, b200, b300, cpu, gb200, h100, h100-nvl, h100-pcie, h20, h200, "
    "h800, l4, l40s, mi300x, rtx-4090, rtx-5090"
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe's path in a directory of its own; nothing reads the file."""
    return tmp_path / "mine.py"


def write(recipe: Path, name: str, text: str) -> None:
    """One of the user's own files, `devices/NAME` or `links/NAME`."""
    file = recipe.parent / "hardware" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def requested(recipe: Path, *overrides: str) -> PlanRequest:
    graph = build_graph(load_recipe(recipe).spec())
    return plan_request(load_config(recipe, overrides), graph, recipe)


def refused(message: str, recipe: Path, **keys: object) -> None:
    with pytest.raises(HflowError) as refusal:
        cluster_hardware(RunConfig(name="mine", **{"cluster": "cpu-1x1", **keys}), recipe)
    assert str(refusal.value) == message


def test_every_requested_device_and_link_exists(recipe):
    devices, links = known_devices(recipe), known_links(recipe)
    assert sorted(devices) == DEVICES.split(", ")
    for name, device in devices.items():
        assert device.name == name
        assert {device.link, device.network, device.host_link} <= set(links)
        assert list(device.tflops) == sorted(device.tflops, key=device.tflops.__getitem__)
        assert device.host_memory_gib
        assert device.dollars_per_hour
    assert {name for name in links if name.startswith(("nvlink", "pcie", "ib"))} == {
        *("nvlink-3", "nvlink-4", "nvlink-4-h800", "nvlink-5", "nvlink-c2c"),
        *("pcie-4", "pcie-4-host", "pcie-5", "pcie-5-host", "ib-hdr", "ib-ndr", "ib-xdr"),
    }
    assert links["nvlink-4"].gb_per_s > links["pcie-5"].gb_per_s > links["ethernet-100g"].gb_per_s


def test_one_direction_of_one_device(recipe):
    links = known_links(recipe)
    assert links["nvlink-4"].gb_per_s == 900 / 2  # the sheet gives both directions
    assert links["ib-ndr"].gb_per_s == 400 / 8  # 400 Gb/s
    assert links["ethernet-25g"].gb_per_s == 25 / 8


def test_a_cluster_has_the_figures_of_its_device(recipe):
    cluster, hardware = cluster_hardware(RunConfig(name="mine", cluster="a100-80g-2x8"), recipe)
    assert (cluster.device, cluster.num_nodes, cluster.devices_per_node) == ("cuda", 2, 8)
    assert cluster.memory_bytes == 80 * 2**30
    assert (hardware.device.name, hardware.intra.name, hardware.inter.name) == (
        "a100-80g",
        "nvlink-3",
        "ib-hdr",
    )


def test_network_and_memory_are_the_users(recipe):
    config = RunConfig(name="mine", cluster="h100-8x8", network="ethernet-400g", device_memory_gib=40.0)
    cluster, hardware = cluster_hardware(config, recipe)
    assert hardware.inter.name == "ethernet-400g"
    assert hardware.intra.name == "nvlink-4"
    assert cluster.memory_bytes == hardware.device.memory_bytes == 40 * 2**30


def test_machines_of_a_rack(recipe):
    cluster, hardware = cluster_hardware(RunConfig(name="mine", cluster="gb200-36x4"), recipe)
    assert hardware.rack is not None
    assert hardware.rack.name == "nvlink-5"
    assert (hardware.rack_of(71), hardware.rack_of(72)) == (0, 1)
    assert [where for _, where in used_links(cluster, hardware)] == [
        "within a machine",
        "within a rack",
        "between racks",
    ]
    cluster, hardware = cluster_hardware(RunConfig(name="mine", cluster="gb200-18x4"), recipe)
    assert [link.name for link, _ in used_links(cluster, hardware)] == ["nvlink-5", "nvlink-5"]
    cluster, hardware = cluster_hardware(RunConfig(name="mine", cluster="h100-2x8"), recipe)
    assert [link.name for link, _ in used_links(cluster, hardware)] == ["nvlink-4", "ib-ndr"]
    refused(
        "cluster 'gb200-2x16': a rack has 72 gb200 devices, which machines of 16 do not fill. Set "
        "cluster=gb200-3x12.",
        recipe,
        cluster="gb200-2x16",
    )
    refused(
        "cluster 'gb200-1x144': a rack has 72 gb200 devices, which machines of 144 do not fill. Set "
        "cluster=gb200-2x72.",
        recipe,
        cluster="gb200-1x144",
    )


MINE = """
type: cuda
memory_gib: 24
tflops: {fp32: 30, bf16: 120}
memory_gb_per_s: 900
link: my-bus
network: ethernet-100g
"""


def test_the_users_own_files_extend_and_replace(recipe):
    write(recipe, "devices/rtx-x.1", MINE)
    write(recipe, "devices/h100", MINE.replace("24", "94"))
    write(recipe, "links/my-bus", "gb_per_s: 12\nlatency_us: 9\n")
    cluster, hardware = cluster_hardware(RunConfig(name="mine", cluster="rtx-x.1-1x4"), recipe)
    assert (cluster.num_devices, cluster.memory_bytes) == (4, 24 * 2**30)
    assert hardware.calibration.name == "cuda"
    assert hardware.intra.gb_per_s == 12
    cluster, _ = cluster_hardware(RunConfig(name="mine", cluster="h100-1x4"), recipe)
    assert cluster.memory_bytes == 94 * 2**30


LINKS = (
    "ethernet-100g, ethernet-25g, ethernet-400g, ib-hdr, ib-ndr, ib-xdr, infinity-fabric-4, nvlink-3, "
    "nvlink-4, nvlink-4-h800, nvlink-5, nvlink-c2c, pcie-4, pcie-4-host, pcie-5, pcie-5-host, shared-memory"
)


def test_unknown_names(recipe):
    refused(
        f"cluster 'a100-1x8': unknown device 'a100'; did you mean 'a100-80g'? (known: {DEVICES})",
        recipe,
        cluster="a100-1x8",
    )
    refused(
        f"network: unknown link 'ib-nrd'; did you mean 'ib-ndr'? (known: {LINKS})", recipe, network="ib-nrd"
    )
    write(recipe, "devices/odd", MINE)
    refused(f"hardware.devices.odd.link: unknown link 'my-bus' (known: {LINKS})", recipe, cluster="odd-1x1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("memory_gib: 24", ""), "hardware.devices.odd.memory_gib is missing; it has no default"),
        (
            ("memory_gib: 24", "memory_gib: lots"),
            "hardware.devices.odd.memory_gib is 'lots'; it must be a number",
        ),
        (("memory_gib: 24", "memory_gib: 0"), "hardware.devices.odd.memory_gib is 0; it must be more than 0"),
        (
            ("memory_gib: 24", "memory_gib: .inf"),
            "hardware.devices.odd.memory_gib is inf; it must be a finite number",
        ),
        (("fp32: 30, ", ""), "hardware.devices.odd.tflops.fp32 is missing; it has no default"),
        (
            ("bf16: 120", "bf16: 120, fp6: 200"),
            "hardware.devices.odd.tflops.fp6 is not a known precision (known: fp32, bf16, fp8, fp4)",
        ),
        (("cuda", "gpu"), "hardware.devices.odd.type is 'gpu'; it must be 'cpu' or 'cuda'"),
        (
            ("network:", "overhead_gib: 30\nnetwork:"),
            "hardware.devices.odd.overhead_gib is 30.0; it must be less than memory_gib, 24",
        ),
        (
            ("link:", "lnik:"),
            "unknown key 'hardware.devices.odd.lnik'; did you mean 'hardware.devices.odd.link'?",
        ),
    ],
)
def test_a_device_that_cannot_be(change: tuple[str, str], message: str, recipe):
    write(recipe, "devices/odd", MINE.replace(*change))
    refused(message, recipe)


def test_wrong_hardware_files_are_refused(recipe):
    write(recipe, "links/slow", "gb_per_s: 1\nlatency_us: -3\n")
    refused("hardware.links.slow.latency_us is -3; it must be at least 0", recipe)
    write(recipe, "links/slow", "[1")
    with pytest.raises(ConfigError, match=r"slow.yaml:1: invalid YAML: "):
        known_links(recipe)
    write(recipe, "links/slow", "3")
    with pytest.raises(ConfigError, match=r"slow.yaml must be a mapping of keys to values"):
        known_links(recipe)


CALIBRATION = (shipped_directory("configs") / "hardware" / "calibrations" / "cuda.yaml").read_text()


def calibration(recipe: Path, *changes: tuple[str, str]) -> str:
    """Write a calibration of h100 and return its path."""
    text = CALIBRATION
    for before, after in (("devices: []", "devices: [h100]"), *changes):
        assert before in text
        text = text.replace(before, after)
    file = recipe.parent / "mine-h100.yaml"
    file.write_text(text)
    return str(file)


def test_a_calibration_of_the_users_own(recipe):
    file = calibration(recipe, ("decode: 0.7", "decode: 0.8"))
    _, hardware = cluster_hardware(RunConfig(name="mine", cluster="h100-1x8", calibration=file), recipe)
    assert (hardware.calibration.name, hardware.calibration.memory.decode) == ("mine-h100", 0.8)


def test_a_calibration_of_other_hardware_is_refused(recipe):
    file = calibration(recipe)
    refused(
        f"calibration={file} was measured on h100, but the cluster has a100-80g; measure these devices with "
        "hflow profile, or set calibration=null for the shipped figures",
        recipe,
        cluster="a100-80g-1x8",
        calibration=file,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("decode: 0.7", "decode: 0"), "memory.decode is 0; it must be more than 0"),
        (("disk_gb_per_s", "disc_gb_per_s"), "unknown key 'transfers.disc_gb_per_s'; did you mean"),
        (("  megatron: {}\n", ""), "host.megatron is missing; it has no default"),
        (("  fp32: {share: 0.45}\n", ""), "matmul.fp32 is missing; it has no default"),
    ],
)
def test_a_calibration_that_cannot_be(change: tuple[str, str], message: str, recipe):
    file = calibration(recipe, change)
    with pytest.raises(ConfigError, match=re.escape(f"{file}: {message}")):
        cluster_hardware(RunConfig(name="mine", cluster="h100-1x8", calibration=file), recipe)


def test_no_calibration_file(recipe):
    with pytest.raises(ConfigError, match=r"none.yaml"):
        cluster_hardware(RunConfig(name="mine", cluster="h100-1x8", calibration="none.yaml"), recipe)


def test_every_shipped_calibration_is_right(recipe):
    devices = known_devices(recipe)
    assert devices.keys() >= {"cpu", "h100"}
    for device in devices.values():
        shipped = device_calibration(device, recipe)
        assert not shipped.is_measured
        assert device.name in shipped.devices or shipped.name == device.type


def test_memory_below_the_runtimes_share_is_refused(recipe):
    refused(
        "device_memory_gib is 0.25, but a cpu needs 0.4 for its runtime; set it to more than 0.4",
        recipe,
        device_memory_gib=0.25,
    )


def test_every_model_size_is_tested():
    files = {file.stem for file in (shipped_directory("configs") / "model").glob("*.yaml")}
    tiny = {"tiny-qwen2", "tiny-qwen3-moe", "tiny-qwen3-vl"}
    assert files == {*PUBLISHED, *PLANNED, *SEEING, *tiny}


@pytest.mark.first(8)
@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_model_by_name_has_the_published_number_of_parameters(name: str, count: int):
    request = requested(GRPO, f"model@models.actor={name}", "models.actor.path=null")
    actor = request.models["actor"]
    assert actor.dtype == "bf16"
    assert num_parameters(request.shapes["actor"]) == count


@pytest.mark.first(6)
@pytest.mark.parametrize(("name", "counts"), PLANNED.items())
def test_other_families_have_the_published_numbers_of_parameters(name, counts):
    total, active = counts
    shape = requested(GRPO, f"model@models.actor={name}", "models.actor.path=null").shapes["actor"]
    known = ("qwen3_moe", "gemma3_text", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss")
    assert knows_tensors(shape) == (shape.family in known)
    assert num_parameters(shape) == pytest.approx(total, rel=0.01)
    if active is None:
        assert active_parameters(shape) == num_parameters(shape)
        return
    # Publishers count both matrices of the vocabulary, the output matrix alone, or neither.
    matrix = shape.vocab * shape.hidden
    counted = [active_parameters(shape) + num * matrix for num in (-1, 0, 1)]
    assert min(abs(num / (active * 1e9) - 1) for num in counted) < 0.02


def test_a_model_with_unknown_tensors_has_a_route_without_rows():
    keys = ["model@models.actor=gemma-2-2b", "models.actor.path=null", "cluster=h100-1x8"]
    plan = compile_recipe(GRPO, keys).plan
    (route,) = plan.weights
    assert route.rows == ()
    assert route.moved_bytes > 0


def test_a_model_by_name_is_one_that_transformers_builds():
    from hflow.models.hf_config import read_config
    from hflow.models.settings import ModelSettings

    for name in sorted({*PUBLISHED, *PLANNED} - {"kimi-k2"}):  # transformers has no family of that name
        architecture = yaml.safe_load((shipped_directory("configs") / "model" / f"{name}.yaml").read_text())[
            "architecture"
        ]
        config = read_config(ModelSettings(name=name, architecture=architecture))
        found = config.to_dict()
        assert {key: found[key] for key in architecture if key in found} == {
            key: value for key, value in architecture.items() if key in found
        }


def test_models_that_start_from_another_share_its_sizes_and_precision():
    request = requested(PPO, "model@models.actor=qwen2.5-7b", "models.actor.path=null")
    critic = request.shapes["critic"]
    assert request.shapes["actor"] == request.shapes["ref"]
    assert (critic.head, critic.hidden) == ("value", 3584)
    assert (request.models["critic"].dtype, request.models["ref"].dtype) == ("bf16", "bf16")
    large = ["model@models.actor=qwen2.5-7b", "models.actor.path=null", "cluster=h100-8x8"]
    run = model_settings(compile_recipe(PPO, large))
    assert {name: settings.dtype for name, settings in run.items()} == dict.fromkeys(run, "bf16")
    mixed = requested(PPO, "+model@models.critic=qwen2.5-0.5b", "models.critic.dtype=fp32")
    assert mixed.models["critic"].dtype == "fp32"
    assert mixed.shapes["critic"].hidden == 896


def test_a_models_other_numbers_reach_the_planner():
    keys = (
        "models.actor.tokens_per_microbatch=4096",
        "models.actor.activation_checkpointing=true",
        "models.actor.gen.max_running=64",
        "models.actor.gen.max_model_len=1024",
        "models.actor.backend=megatron",
        "models.actor.gen.engine=vllm",
    )
    actor = requested(GRPO, *keys).models["actor"]
    assert (actor.tokens_per_microbatch, actor.activation_checkpointing) == (4096, True)
    assert (actor.gen.max_running, actor.gen.max_model_len) == (64, 1024)
    assert (actor.backend, actor.gen.engine) == ("megatron", "vllm")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("null", None)])
def test_sequence_parallelism_reaches_planner_plan_and_backend(text, value):
    keys = (
        "models.actor.backend=megatron",
        f"models.actor.sequence_parallel={text}",
        "models.actor.path=null",
    )
    compiled = compile_recipe(GRPO, keys)
    assert requested(GRPO, *keys).models["actor"].sequence_parallel is value
    assert dict(compiled.plan.settings)["models.actor.sequence_parallel"] is value
    assert model_settings(compiled)["actor"].sequence_parallel is value


@pytest.mark.parametrize(
    ("changes", "actor", "critic"),
    [
        (("cluster=cpu-1x8",), "fp32", "fp32"),
        (("cluster=h100-1x8",), "bf16", "bf16"),
        (("cluster=h100-1x8", "models.actor.dtype=fp32"), "fp32", "fp32"),  # ref and critic start from it
        (("cluster=h100-1x8", "models.critic.dtype=fp32"), "bf16", "fp32"),
    ],
)
def test_models_compute_in_bf16_on_gpus_unless_their_configuration_says_otherwise(
    changes: tuple[str, ...], actor: str, critic: str
):
    placement = "placement=actor=0-7 actor.gen=0-7 ref=0-7 critic=0-7"
    compiled = compile_recipe(PPO, ["models.actor.path=null", placement, *changes])
    expected = {"actor": actor, "ref": actor, "critic": critic}
    assert {name: settings.dtype for name, settings in model_settings(compiled).items()} == expected
    assert {r.name: r.dtype for r in compiled.plan.replicas} == {
        r.name: expected[r.model] for r in compiled.plan.replicas
    }
    sizes = [format_replica_size(r, dict(compiled.plan.shapes)[r.model]) for r in compiled.plan.replicas]
    assert all(size.endswith(f"in {r.dtype}") for size, r in zip(sizes, compiled.plan.replicas, strict=True))


def test_the_workload_reaches_the_planner():
    workload = requested(GRPO, "workload.prompt=128", "workload.response_cv=null").workload
    assert (workload.prompt, workload.response_mean, workload.response_cv) == (128, 4.0, None)


TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 32,
}


def checkpoint(directory: Path, text: str) -> str:
    (directory / "config.json").write_text(text)
    return f"models.actor.path={directory}"


def test_a_checkpoint_goes_before_the_architecture(tmp_path):
    request = requested(GRPO, checkpoint(tmp_path, json.dumps(TINY)))
    assert request.shapes["actor"] == read_shape(TINY)
    assert request.warnings == (
        f"models.actor: the checkpoint {tmp_path} (hidden_size 64) is used, not the architecture "
        "(hidden_size 128). To silence this, remove model@models.actor from the defaults of the YAML or "
        "from the command line, or set models.actor.architecture=null. To train the architecture from "
        "random weights, set models.actor.path=null.",
    )
    for change in ("models.actor.architecture=null", "~model@models.actor"):
        assert requested(GRPO, checkpoint(tmp_path, json.dumps(TINY)), change).warnings == ()


def test_settings_that_others_overrule():
    def warnings(*overrides: str, recipe: Path = GRPO) -> tuple[str, ...]:
        return requested(recipe, *overrides).warnings

    (warning,) = warnings("models.actor.alphabet=abc")
    assert warning.startswith("models.actor.alphabet is not used, but the tokenizer in ")
    (warning,) = warnings("models.ref.alphabet=abc", recipe=GRPO.with_name("ppo.py"))
    assert warning.startswith("models.ref.alphabet is not used, but the tokenizer of actor, from which it")
    (warning,) = warnings("models.actor.optim.schedule=constant")
    assert "optim.min_lr_ratio=0.1 has no effect with models.actor.optim.schedule=constant" in warning


def test_a_model_that_starts_from_another_may_have_its_own_chat_template():
    chat = GRPO.with_name("ppo.py")
    compiled = compile_recipe(chat, ["models.ref.chat_template='{{ messages }}'"])
    settings = tokenizer_settings(compiled)
    assert (settings["ref"].chat_template, settings["actor"].chat_template) == ("{{ messages }}", None)
    assert settings["ref"].path == settings["actor"].path


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "'{{ bos_token }}How are you?'",
            "renders 'How are you?' whatever the messages are, so every prompt ",
        ),
        ("'{% for m in messages %}{{ m.text }}{% endfor %}'", "renders '' whatever the messages are"),
        ("'{% for m in messages %}'", "is not a Jinja template: "),
    ],
)
def test_a_chat_template_that_ignores_the_messages_is_refused_while_planning(template: str, problem: str):
    with pytest.raises(ConfigError) as refusal:
        compile_recipe(GRPO.with_name("grpo_chat.py"), [f"models.actor.chat_template={template}"])
    assert str(refusal.value).startswith(f"models.actor.chat_template {problem}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content[0].text }}",  # parts in place of texts
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('no') if messages[0].role != 'system' else messages }}",
        "{% for m in messages %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endfor %}",
        "{{ raise_exception('tools are needed') if not tools }}",
    ],
)
def test_templates_that_accept_only_some_messages_are_planned(template: str):
    assert written_template_problem(template) is None


def test_a_chat_template_without_the_token_that_begins_texts():
    def warnings(template: str) -> list[str]:
        chosen = f"models.actor.chat_template='{template}'"
        return [x for x in requested(GRPO.with_name("grpo_chat.py"), chosen).warnings if "begins texts" in x]

    (warning,) = warnings("{{ messages }}")
    assert warning.startswith(
        "the tokenizer of actor begins texts with <bos>, but its chat template does not"
    )
    assert warnings("<bos>{{ messages }}") == warnings("{{ bos_token }}{{ messages }}") == []


def test_stop_tokens_of_a_configured_architecture():
    """They are those of the checkpoint that the run saves."""
    changes = ["models.actor.path=null", "models.actor.architecture.eos_token_id=[2,3]"]
    compiled = compile_recipe(GRPO, ["model@models.actor=tiny-qwen2", *changes])
    assert TextTokenizer(tokenizer_settings(compiled)["actor"]).stop_ids == (2, 3)
    with pytest.raises(
        DataError, match=r"models.actor.architecture: eos_token_id is -1; it must be a token's"
    ):
        tokenizer_settings(compile_recipe(GRPO, [*changes[:1], "models.actor.architecture.eos_token_id=-1"]))


def test_plain_text_for_a_model_with_a_chat_template(tmp_path):
    def warnings(*overrides: str, recipe: Path = GRPO) -> list[str]:
        found = requested(recipe, "models.actor.architecture=null", *overrides).warnings
        return [
            warning.partition(" sends plain text to actor, whose tokenizer has a chat")[0]
            for warning in found
        ]

    actor = checkpoint(tmp_path, json.dumps(TINY))
    assert warnings(actor) == []
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "<bos>{{ messages }}"}')
    assert warnings(actor) == ["actor_gen", "eval_gen"]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert warnings(actor) == []
    (tmp_path / "chat_template.jinja").write_text("<bos>{{ messages }}")
    assert warnings(actor) == ["actor_gen", "eval_gen"]
    assert "Use nodes.chat_gen" in requested(GRPO, actor, "models.actor.architecture=null").warnings[0]
    chat = GRPO.with_name("grpo_chat.py")
    (warning,) = warnings(actor, recipe=chat)
    assert warning.startswith(f"models.actor.chat_template replaces the chat template of {tmp_path}: ")
    assert warnings(actor, "models.actor.chat_template=null", recipe=chat) == []
    (tmp_path / "chat_template.jinja").write_text("<bos>{{ messages }}")
    assert warnings(actor, "models.actor.chat_template='<bos>{{ messages }}'", recipe=chat) == []


def test_a_system_message_that_evaluation_lacks():
    def warnings(*overrides: str) -> tuple[str, ...]:
        chat = GRPO.with_name("grpo_chat.py")
        config, graph, _ = read_recipe(chat, ["models.actor.architecture=null", *overrides])
        return plan_request(config, graph, chat).warnings

    system = "nodes.chat_gen.system='1+1=002'"
    assert warnings(system) == ()
    (warning,) = warnings(system, "nodes.eval_gen.system=null")
    assert warning == (
        "nodes.chat_gen.system is '1+1=002', but nodes.eval_gen.system is not set: actor gets a different "
        "prompt in each. Set both to the same text."
    )


def test_a_node_of_messages_needs_a_chat_template_while_planning(tmp_path):
    chat, error = (
        GRPO.with_name("grpo_chat.py"),
        "chat_gen encodes messages, but the tokenizer of actor has no chat",
    )
    with pytest.raises(ConfigError, match=error):
        read_recipe(chat, ["models.actor.chat_template=null"])
    with pytest.raises(ConfigError, match=error):
        read_recipe(chat, ["models.actor.chat_template=null", "models.actor.path=null"])
    elsewhere = ["models.actor.chat_template=null", "models.actor.alphabet=null"]
    read_recipe(chat, [*elsewhere, "models.actor.path=/not/here", "model@models.actor=qwen2.5-0.5b"])


def test_staleness_without_a_proximal_policy():
    def warnings(*overrides: str) -> tuple[str, ...]:
        config, graph, _ = read_recipe(GRPO, ["models.actor.architecture=null", *overrides])
        return plan_request(config, graph, GRPO).warnings

    ahead = "schedule.max_staleness=2"
    (warning,) = warnings(ahead)
    assert "with nodes.actor_train.prox=none the loss clips what changed since they were drawn" in warning
    assert "Set nodes.actor_train.prox=recompute" in warning
    assert warnings(ahead, "nodes.actor_train.prox=recompute") == warnings() == ()
    (warning,) = warnings("nodes.actor_train.prox=loglinear")
    assert "nodes.actor_train.prox=loglinear does what prox=none does" in warning
    assert warnings(ahead, "nodes.actor_train.prox=loglinear") == ()


def test_knobs_that_only_later_updates_of_a_step_need():
    recompute, once = "nodes.actor_train.prox=recompute", "nodes.actor_train.minibatches=1"
    knobs = ["nodes.actor_train.clip_high=0.3", "nodes.actor_train.dual_clip=3.0"]
    (warning,) = read_recipe(GRPO, [recompute, once, *knobs])[1].warnings
    assert "actor_train: hardly anything depends on clip_high=0.3 and dual_clip=3.0 with one" in warning
    for fewer in ([recompute, once], [once, *knobs], [recompute, *knobs]):
        assert read_recipe(GRPO, fewer)[1].warnings == ()


def test_a_train_node_that_never_fires():
    (warning,) = requested(PPO, "steps=10", "models.actor.path=null").warnings
    assert warning.startswith("actor_train never fires: it starts after 10 steps, and the run has 10.")
    assert requested(PPO, "steps=11", "models.actor.path=null").warnings == ()


def test_a_family_that_the_backend_does_not_build(tmp_path):
    gpt2 = checkpoint(tmp_path, json.dumps({"model_type": "gpt2"}))
    assert "actor" not in requested(GRPO, gpt2).shapes
    message = (
        f"{tmp_path}/config.json: the megatron backend does not build model_type 'gpt2' (it builds llama, "
        "mistral, qwen2, qwen3, qwen2_moe, qwen3_moe, gemma3_text, glm4, gpt_oss, mixtral, glm4_moe, "
        "deepseek_v2, deepseek_v3); set models.actor.backend=torch"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        requested(GRPO, gpt2, "models.actor.backend=megatron")


def test_a_checkpoint_that_does_not_exist_yet(tmp_path):
    path = f"models.actor.path={tmp_path}/later"
    missing = f"models.actor.path is {tmp_path}/later, which does not exist on this machine"
    with pytest.raises(ConfigError) as refusal:
        compile_recipe(GRPO, [path])
    assert str(refusal.value) == (
        f"{missing}, and its architecture is the recipe's. Correct the path, or name the sizes of a model "
        "that only other machines have, as model@models.actor=qwen2.5-0.5b."
    )
    plan = compile_recipe(GRPO, [path, "model@models.actor=qwen2.5-0.5b", "cluster=h100-1x8"]).plan
    assert dict(plan.shapes)["actor"].hidden == 896
    assert (
        f"{missing}. Its sizes are those of the architecture; a run needs a checkpoint there."
        in plan.warnings
    )
    (warning,) = requested(GRPO, path, "models.actor.architecture=null").warnings
    assert warning == (
        f"models.actor.path is {tmp_path}/later, which does not exist on this machine. A run needs a "
        "checkpoint there. Correct the path, or plan with an architecture, as "
        "model@models.actor=qwen2.5-0.5b."
    )
    (tmp_path / "later").mkdir()
    (warning,) = requested(GRPO, path, "models.actor.architecture=null").warnings
    assert warning.startswith(f"models.actor.path is {tmp_path}/later, which has no config.json. ")
    inside = tmp_path / "later" / "checkpoints" / "latest" / "actor"
    inside.mkdir(parents=True)
    (inside / "config.json").write_text("{}")
    (warning,) = requested(GRPO, path, "models.actor.architecture=null").warnings
    assert f"{tmp_path}/later, which has no config.json ({inside} has one). " in warning
    (warning,) = requested(GRPO, "models.actor.path=later", "models.actor.architecture=null").warnings
    assert "is later, which does not exist on this machine (a model of the Hub is OWNER/NAME). " in warning


def test_an_architecture_on_the_command_line_goes_before_the_checkpoint_of_the_recipe():
    other, cluster = "model@models.actor=qwen3-30b-a3b", "cluster=h100-4x8"
    compiled = compile_recipe(GRPO, [other, cluster])
    assert dict(compiled.plan.shapes)["actor"].family == "qwen3_moe"
    assert compiled.config.models["actor"].path is None
    (warning,) = [text for text in compiled.plan.warnings if text.startswith("models.actor: ")]
    assert "(hidden_size 128) is not used, as the command line has another architecture" in warning
    silent = compile_recipe(GRPO, [other, cluster, "models.actor.path=null"])
    assert silent.plan.digest == compiled.plan.digest
    assert not [text for text in silent.plan.warnings if text.startswith("models.actor: ")]
    same = compile_recipe(GRPO, ["model@models.actor=tiny-qwen2"])
    assert same.config.models["actor"].path is not None, "it has the sizes of the checkpoint"


def test_a_plan_names_the_path_without_a_checkpoint(tmp_path):
    keys = [f"models.actor.path={tmp_path}/later", "models.actor.architecture=null"]
    forecast = compile_recipe(PPO, keys).plan.forecast
    causes = {line.partition(": ")[0]: line.partition(": ")[2] for line in forecast.missing}
    for model in ("actor", "ref"):  # the reference begins as a copy of the actor
        cause, _, _ = causes[model].partition(", so its memory")
        assert cause == f"there is no checkpoint in {tmp_path}/later (models.actor.path)"


def test_a_family_that_the_planner_does_not_know(tmp_path):
    unknown = checkpoint(tmp_path, json.dumps(TINY | {"model_type": "mamba"}))
    assert "actor" not in requested(GRPO, unknown, "models.actor.architecture=null").shapes
    assert "actor" not in requested(GRPO, "models.actor.path=null", "models.actor.architecture=null").shapes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_size": "many"},
            "architecture 'llama': hidden_size is 'many'; it must be a whole number of at least 1",
        ),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 8 is not a multiple of num_key_value_heads 3; set num_key_value_heads to 4",
        ),
        (
            {"hidden_size": 68},
            "hidden_size 68 is not a multiple of num_attention_heads 8; set num_attention_heads to 4, or "
            "set head_dim",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be(change: dict[str, object], message: str, tmp_path):
    override = checkpoint(tmp_path, json.dumps(TINY | change))
    with pytest.raises(ConfigError) as refusal:
        requested(GRPO, override)
    assert str(refusal.value) == f"{tmp_path}/config.json: {message}"


def test_a_checkpoint_that_is_not_json(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json is not a JSON file: invalid JSON: "):
        requested(GRPO, checkpoint(tmp_path, "{"))
    with pytest.raises(
        ConfigError, match=r"config.json is not a JSON file: it must be a JSON object, but it is \[\]"
    ):
        requested(GRPO, checkpoint(tmp_path, "[]"))


def test_an_architecture_that_cannot_be():
    with pytest.raises(ConfigError) as refusal:
        requested(GRPO, "models.actor.path=null", "models.actor.architecture.vocab_size=-1")
    assert str(refusal.value) == (
        "models.actor: architecture 'qwen2': vocab_size is -1; it must be a whole number of at least 1"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["models.actor.layout=t2"],
            "actor@train has layout d1t2p1, but torch supports data parallelism only. Set "
            "models.actor.backend=megatron",
        ),
        (
            ["models.actor.backend=megatron", "models.actor.layout=t2", "workers=inproc"],
            "actor@train has layout d1t2p1, for which megatron needs a process for each rank. Set workers",
        ),
    ],
)
def test_layouts_that_are_planned_but_not_run(overrides: list[str], message: str):
    with pytest.raises(NotYetError, match=message):
        refuse_unrunnable(compile_recipe(GRPO, overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.actor.backend=megatorn", "models.actor.backend is 'megatorn'.* did you mean 'megatron'"),
        ("models.actor.gen.engine=vlm", "models.actor.gen.engine is 'vlm'; it must be 'embedded' or 'vllm'"),
    ],
)
def test_a_backend_that_is_not_registered(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        compile_recipe(GRPO, [override])


def test_an_unknown_device_is_refused_when_planning():
    with pytest.raises(PlanError, match=r"unknown device 'h10'; did you mean 'h100'\?"):
        compile_recipe(GRPO, ["cluster=h10-1x8"])
