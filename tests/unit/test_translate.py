"""`hflow translate`: the tables of keys, known answers for whole configurations, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from hflow.base.validation import COUNTERPARTS
from hflow.config.schema import GenConfig, LoraConfig, ModelConfig, OptimConfig, RunConfig
from hflow.launch import ready_nodes
from hflow.translate import Entry, Peer, RecipeDraft, peers
from hflow.translate.table import find_row

if TYPE_CHECKING:
    from command_line import CommandLine

ROOT = Path(__file__).parents[2]
VERL, TRL = peers()
BY_NAME = pytest.mark.parametrize("peer", peers(), ids=lambda peer: peer.name)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
GRPO = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "/data/train.parquet",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 8,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "trainer.total_training_steps": 10,
}
LOSS_MODES = ("gspo", "sapo", "cispo", "gpg", "geo_mean", "clip_cov", "kl_cov")
VERL_CASES: list[dict[str, Any]] = [
    dict(VERL.defaults),
    {"trainer.test_freq": 5, "algorithm.use_kl_in_reward": True, "data.seed": 3, "trainer.critic_warmup": 3},
    {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo.reweight_method": "max_min"},
    {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo.weight_pow": 3.0},
    {f"critic.{key}": VERL.defaults[f"critic.{key}"] for key in ("ppo_epochs", "loss_agg_mode")},
    {"critic.ppo_mini_batch_size": 512, "critic.loss_scale_factor": 100, "critic.use_dynamic_bsz": True}
    | {"critic.loss_agg_mode": "seq-mean-token-sum-norm", "critic.ppo_max_token_len_per_gpu": 9000},
    *({**GRPO, f"{ACTOR}.policy_loss.loss_mode": mode} for mode in LOSS_MODES),
    {**GRPO, f"{ACTOR}.policy_loss.loss_mode": "dro", f"{ACTOR}.policy_loss.dro_beta": 0.1},
    *({**GRPO, "algorithm.adv_estimator": name} for name in ("grpo_passk", "optimal_token_baseline")),
    {
        **GRPO,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.01,
        f"{ACTOR}.kl_loss_type": "k3+",
        f"{ACTOR}.entropy_coeff": 0.01,
        f"{ACTOR}.clip_ratio": 0.1,
        f"{ACTOR}.clip_ratio_low": None,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor": 100,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 20000,
        f"{ACTOR}.fsdp_config.optimizer_offload": True,
        f"{ACTOR}.optim.lr_scheduler_type": "cosine",
        f"{ACTOR}.optim.min_lr_ratio": 0.1,
        f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1,
        "actor_rollout_ref.ref.fsdp_config.param_offload": True,
        "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.lora_alpha": 32,
        "actor_rollout_ref.model.target_modules": "all-linear",
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "reward",
        "trainer.logger": ["wandb"],
        "trainer.project_name": "mine",
        "trainer.test_freq": 5,
        "data.val_files": "/data/test.parquet",
        "data.val_max_samples": 100,
        **{f"{ROLLOUT}.val_kwargs.{key}": value for key, value in {"do_sample": True, "n": 2}.items()},
        **{f"{ROLLOUT}.val_kwargs.{key}": value for key, value in {"top_p": 0.9, "top_k": 5}.items()},
        **{f"{ROLLOUT}.{key}": value for key, value in {"top_p": 0.95, "top_k": 50}.items()},
        f"{ROLLOUT}.val_kwargs.temperature": 0.6,
    },
    {
        **GRPO,
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_is_threshold": "0.5_2.0",
        f"{CORRECTION}.rollout_is_batch_normalize": True,
        f"{CORRECTION}.rollout_rs": "seq_mean_k1",
        f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0",
    },
    {**GRPO, f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "ppo_clip"},
    {"trainer.total_epochs": 3, "critic.optim.lr_scheduler_type": "cosine", "critic.optim.min_lr_ratio": 0.1},
    {"critic.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 100},
    {"critic.optim.optimizer": "SGD"},
]
TRL_BASE = {"model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "dataset_name": "a/b", "max_steps": 20}
TRL_CASES: list[dict[str, Any]] = [
    dict(TRL.defaults),
    {**TRL_BASE, "dataset_config": "main", "eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}
    | {"num_generations_eval": 2, "dataset_test_split": "test", "dataset_train_split": "train[:9]"}
    | {"report_to": "wandb", "project": "p", "model_revision": "v1"},
    {
        **TRL_BASE,
        "use_vllm": True,
        "beta": 0.1,
        "use_bias_correction_kl": False,
        "mask_truncated_completions": True,
    }
    | {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    | {"top_p": 0.95, "top_k": 50, "min_p": 0.02}
    | {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_correction": True}
    | {"vllm_tensor_parallel_size": 1, "vllm_mode": "colocate", "vllm_max_model_length": 900, "delta": 4.0},
    {**TRL_BASE, "use_vllm": True, "vllm_importance_sampling_cap": 2.0, "generation_batch_size": 64},
    {**TRL_BASE, "loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.1},
    {**TRL_BASE, "loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.1, "use_bias_correction_kl": True},
    {**TRL_BASE, "loss_type": "grpo", "importance_sampling_level": "sequence", "scale_rewards": "batch"},
    {
        **TRL_BASE,
        "loss_type": "dr_grpo",
        "scale_rewards": False,
        "steps_per_generation": 4,
        "entropy_coef": 0.0,
    },
    {
        **TRL_BASE,
        "loss_type": "dapo",
        "entropy_coef": 0.01,
        "use_peft": True,
        "lora_r": 8,
        "lora_alpha": 8,
        "use_dora": True,
        "load_in_4bit": True,
    }
    | {"lora_target_modules": ["q_proj"], "lora_dropout": 0.0},
    {**TRL_BASE, "loss_type": "vespo", "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0}
    | {"vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "off_policy_mask_threshold": 0.5},
    {**TRL_BASE, "loss_type": "luspo", "importance_sampling_level": "sequence", "delta": 4.0},
    {**TRL_BASE, "loss_type": "sapo", "importance_sampling_level": "sequence"},
    {**TRL_BASE, "loss_type": "dapo", "top_entropy_quantile": 0.2},
]
CASES = {VERL.name: VERL_CASES, TRL.name: TRL_CASES}


def translated(peer: Peer, values: dict[str, Any]) -> tuple[RecipeDraft, dict[str, Entry]]:
    """Return the recipe of these values, and what became of each key."""
    given = peer.given(values)
    draft = peer.translate(given, "h100-1x8")
    return draft, {entry.key: entry for entry in given.entries()}


def test_megatron_options_for_fp8_that_vetrainer_factor_on_are_named() -> None:
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe"
    _, entries = translated(VERL, {**VERL.defaults, key: "blockwise"})
    assert (entries[key].place, entries[key].reason) == ("left", "value")
    assert "models.actor.fp8" in entries[key].note
    _, entries = translated(VERL, {**VERL.defaults, key.replace("fp8", "fp7"): "blockwise"})
    assert entries[key.replace("fp8", "fp7")].reason == "unknown"


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_a_cache_in_fp8_that_verl_passes_to_vllm(dtype: str) -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype"
    draft, entries = translated(VERL, {**VERL.defaults, key: dtype})
    found = draft.settings.get("models.actor.gen.cache_dtype"), entries[key].reason
    assert found == (("fp8", "differs") if dtype == "fp8" else (None, "unknown"))


def test_an_eager_engine_of_verl_has_no_graphs() -> None:
    key = "actor_rollout_ref.rollout.enforce_eager"
    found = [translated(VERL, {**VERL.defaults, key: x})[0].settings for x in (True, False)]
    assert [draft.get("models.actor.gen.cuda_graphs") for draft in found] == [False, None]


@BY_NAME
def test_every_key_has_one_row_and_every_row_a_key(peer: Peer) -> None:
    rows = [row.key for row in peer.rows]
    assert [key for key, count in Counter(rows).items() if count > 1] == []
    assert [key for key in peer.defaults if find_row(peer.rows, key) is None] == []
    assert [row.key for row in peer.rows if not any(map(row.matches, peer.defaults))] == []


@BY_NAME
def test_an_automatic_choice_says_where_it_shows(peer: Peer) -> None:
    assert [row.key for row in peer.rows if row.status in ("automatic", "manual") and not row.note] == []


def test_the_keys_of_hflow_that_tables_name_exist() -> None:
    named = re.compile(r"`((?:models|nodes|data|schedule|report|faults|workload)\.[\w.]+)")
    for peer in peers():
        for row in peer.rows:
            texts = " ".join((row.note, *row.values.values()))
            for key in (*row.ours, *named.findall(texts)):
                assert is_key(key.rstrip(".")), (peer.name, row.key, key)


KNOBS = {
    node.name.partition(".")[2]: {option.name for option in (*node.knobs, *node.options)}
    for node in ready_nodes()
}
KNOBS |= dict.fromkeys(("actor_gen", "eval_gen"), KNOBS["chat_gen"])


def is_key(key: str) -> bool:
    """Return whether a dotted key is one of the configuration, or a ready node."""
    first, *others = key.split(".")
    if first == "nodes":
        return others[0] in KNOBS and (len(others) == 1 or others[1] in KNOBS[others[0]])
    place: Any = RunConfig
    parts = [first, *others[1:]] if first in ("models", "data", "env") else [first, *others]
    inner = {"models": ModelConfig, "optim": OptimConfig, "gen": GenConfig, "lora": LoraConfig}
    for part in parts:
        field = getattr(place, "__dataclass_fields__", {}).get(part)
        if field is None:
            return False
        place = inner.get(part) or RunConfig.__dataclass_fields__[first].type
        if isinstance(place, str):
            name = re.sub(r"FrozenMapping\[str, (\w+)\]", r"\1", place)
            place = getattr(__import__("hflow.config.schema", fromlist=["x"]), name, None)
    return True


@BY_NAME
def test_each_key_of_a_file_is_in_one_place(peer: Peer) -> None:
    for values in CASES[peer.name]:
        strange = {**values, "no.such.key": 1}
        given = peer.given(strange)
        peer.translate(given, "h100-1x8")
        found = [entry for entry in given.entries() if entry.is_given]
        assert [entry.key for entry in found] == list(strange)
        for entry in found:
            assert (entry.place == "left") == (entry.reason is not None), entry
            assert not entry.needs_attention or entry.note or entry.reason == "missing", entry
        assert found[-1].reason == "unknown"


@BY_NAME
def test_every_key_that_hflow_has_is_translated_in_some_configuration(peer: Peer) -> None:
    """No key is called the same without code that reads it."""
    done: set[str] = set()
    for values in CASES[peer.name]:
        _, entries = translated(peer, {**peer.defaults, **values})
        done |= {
            key for key, entry in entries.items() if entry.place == "translated" or entry.reason == "differs"
        }
    same = {row.key for row in peer.rows if row.status == "same"}
    assert sorted(same - done) == []


@pytest.mark.parametrize("key", sorted(COUNTERPARTS))
def test_the_hints_for_keys_of_other_libraries_say_the_same(key: str) -> None:
    rows = [row for peer in peers() for row in peer.rows if row.key.rpartition(".")[2] == key and row.ours]
    for row in rows:
        assert COUNTERPARTS[key].name in {ours.rpartition(".")[2] for ours in row.ours}, row


def tables() -> ModuleType:
    """Return the module that writes the tables of the pages."""
    spec = importlib.util.spec_from_file_location("translation", ROOT / "docs/site/translation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@BY_NAME
def test_the_page_has_the_table_of_the_command(peer: Peer) -> None:
    """If this fails: `python docs/site/translation.py`."""
    page = tables().page_of(peer).read_text()
    assert tables().filled(page, peer) == page


SMALL = (
    "cluster=cpu-1x2",
    "model@models.actor=tiny-qwen2",
    "models.actor.path=null",
    "models.actor.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'",
    "batch=8",
    "models.actor.gen.engine=embedded",
    "models.actor.gen.layout=null",
    "models.actor.layout=null",
)
VERL_GRPO = """
algorithm: {adv_estimator: grpo}
data:
  train_files: /data/gsm8k/train.parquet
  val_files: /data/gsm8k/test.parquet
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct, enable_gradient_checkpointing: true}
  actor:
    optim: {lr: 1e-6}
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 40
    use_kl_loss: true
    kl_loss_coef: 0.001
    loss_agg_mode: seq-mean-token-mean
    fsdp_config: {fsdp_size: 4}
  rollout:
    name: vllm
    tensor_model_parallel_size: 2
    gpu_memory_utilization: 0.6
    n: 5
    calculate_log_prob: true
trainer:
  logger: [console, wandb]
  project_name: p
  experiment_name: e
  save_freq: 20
  test_freq: 5
  total_epochs: 15
"""
VERL_PPO = """
- algorithm.adv_estimator=gae
- algorithm.lam=0.95
- algorithm.use_kl_in_reward=true
- algorithm.kl_ctrl.kl_coef=0.01
- data.train_files=[/data/a.parquet,/data/b.parquet]
- data.train_batch_size=512
- data.apply_chat_template_kwargs.enable_thinking=false
- actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct
- actor_rollout_ref.actor.ppo_mini_batch_size=128
- actor_rollout_ref.actor.ppo_epochs=2
- actor_rollout_ref.actor.optim.lr_warmup_steps=10
- actor_rollout_ref.rollout.name=sglang
- critic.model.path=Qwen/Qwen2.5-1.5B-Instruct
- critic.optim.lr=2e-5
- +trainer.critic_warmup=20
- trainer.total_training_steps=300
- trainer.n_gpus_per_node=4
"""
TRL_GRPO = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: openai/gsm8k
dataset_config: main
reward_funcs: [accuracy_reward]
learning_rate: 2e-6
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
steps_per_generation: 8
num_generations: 8
num_iterations: 2
max_completion_length: 512
beta: 0.001
loss_type: dr_grpo
scale_rewards: false
epsilon_high: 0.28
max_steps: 800
save_steps: 100
eval_strategy: steps
eval_steps: 200
use_vllm: true
warmup_steps: 0.1
logging_steps: 1
"""


def files(
    hflow: CommandLine, folder: Path, text: str, *options: str
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Translate a file. Return the recipe, its settings, and the keys by reason or place."""
    source = folder / "given.yaml"
    source.write_text(text)
    made = json.loads(hflow.prints("translate", source, folder / "mine", *options, "--json"))
    keys: dict[str, Any] = {}
    for key in made["keys"]:
        keys.setdefault(key["reason"] or key["place"], []).append(key["key"])
    recipe = folder / "mine" / "given.py"
    settings = yaml.safe_load(recipe.with_suffix(".yaml").read_text())
    hflow.prints("check", recipe, *SMALL)
    hflow.prints("plan", recipe, *SMALL)
    return recipe, settings, keys


def test_grpo_of_verl(tmp_path: Path, hflow: CommandLine) -> None:
    recipe, settings, keys = files(hflow, tmp_path, VERL_GRPO)
    assert settings["nodes"] == {
        "actor_gen": {"group": 5, "max_tokens": 1024, "temperature": 1.0},
        "group_advantage": {"eps": 1e-6},
        "actor_train": {
            "minibatches": 4,
            "epochs": 1,
            "clip": 0.2,
            "clip_high": 0.2,
            "dual_clip": 3.0,
            "kl_coef": 0.001,
            "kl_estimator": "k3",
            "reduce": "seq-mean-token-mean",
            "prox": "recompute",
        },
        "eval_gen": {"every": 5, "max_tokens": 1024, "temperature": 0.0, "group": 1},
    }
    assert settings["defaults"] == [{"model@models.actor": "qwen2.5-7b"}, "_self_"]
    assert (settings["batch"], settings["cluster"], settings["save_every"]) == (1024, "h100-1x8", 20)
    assert settings["report"] == {"wandb": "p"}
    actor = settings["models"]["actor"]
    assert (actor["layout"], actor["gen"]["layout"]) == ("d8r2", "d4t2")
    assert actor["gen"]["max_model_len"] == 1536
    assert actor["optim"]["weight_decay"] == 0.01
    assert actor["optim"]["lr"] == 1e-6
    assert "unweighted" in recipe.read_text()
    assert keys["unknown"] == [f"{ROLLOUT}.calculate_log_prob"]
    assert keys["value"] == ["trainer.total_epochs"]
    assert keys["automatic"] == [f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.gpu_memory_utilization"]
    assert keys["differs"] == ["trainer.n_gpus_per_node"]
    assert (
        "did you mean 'actor_rollout_ref.rollout.calculate_log_probs'"
        in recipe.with_suffix(".yaml").read_text()
    )


def test_ppo_of_verl_from_overrides(tmp_path: Path, hflow: CommandLine) -> None:
    recipe, settings, keys = files(hflow, tmp_path, VERL_PPO, "--cluster", "a100-80g-1x4")
    nodes = settings["nodes"]
    assert nodes["gae"] == {"gamma": 1.0, "lam": 0.95}
    assert nodes["kl_reward"] == {"beta": 0.01, "estimator": "k1"}
    assert nodes["critic_train"] == {"minibatches": 4, "epochs": 2, "clip": 0.5, "reduce": "token-mean"}
    assert nodes["actor_train"]["after"] == nodes["unweighted"]["after"] == 19
    actor, critic = settings["models"]["actor"], settings["models"]["critic"]
    assert actor["optim"]["warmup_steps"] == 80
    assert actor["template_kwargs"] == {"enable_thinking": False}
    assert critic["optim"]["lr"] == 2e-5
    assert settings["data"]["train"]["path"] == ["/data/a.parquet", "/data/b.parquet"]
    assert (settings["cluster"], settings["steps"]) == ("a100-80g-1x4", 300)
    assert 'Model("critic", head="value", trainable=True, init_from=actor)' in recipe.read_text()
    assert keys["value"] == [f"{ROLLOUT}.name"]
    assert "engine" not in actor["gen"]


def test_grpo_of_trl(tmp_path: Path, hflow: CommandLine) -> None:
    _, settings, keys = files(hflow, tmp_path, TRL_GRPO, "--cluster", "h100-1x8")
    assert settings["batch"] == 128  # 16 completions x 8 processes x 8 passes / 8 of a group
    nodes = settings["nodes"]
    assert nodes["actor_train"] == {
        "minibatches": 2,
        "epochs": 2,
        "clip": 0.2,
        "clip_high": 0.28,
        "reduce": "token-sum/262144",  # 512 completions of a minibatch x 512 tokens
        "kl_coef": 0.001,
        "kl_importance": True,
        "prox": "recompute",
    }
    assert nodes["behav_weights"] == {"level": "sequence", "lower": None, "upper": 3.0, "outside": "mask"}
    assert nodes["group_advantage"] == {"std": False}
    assert (settings["steps"], settings["save_every"]) == (200, 25)
    assert (nodes["eval_gen"]["every"], nodes["eval_gen"]["after"], nodes["eval_gen"]["group"]) == (50, 50, 8)
    optim = settings["models"]["actor"]["optim"]
    assert (optim["schedule"], optim["warmup_steps"], optim["lr"]) == ("linear", 80, 2e-6)
    assert settings["data"]["train"] == {"path": "hf:openai/gsm8k/main", "split": "train"}
    assert keys["manual"] == ["reward_funcs"]
    assert keys["automatic"] == ["logging_steps"]
    assert set(keys["differs"]) == {"dataset_name", "use_bias_correction_kl", "vllm_max_model_length"}


OFTEN = ["vanilla", "gspo"]
RARE = [pytest.param(mode, marks=pytest.mark.long) for mode in LOSS_MODES if mode not in OFTEN]


@pytest.mark.parametrize("mode", [*OFTEN, *RARE])
def test_the_recipe_of_every_loss_is_accepted(mode: str, tmp_path: Path, hflow: CommandLine) -> None:
    overrides = {**GRPO, f"{ACTOR}.policy_loss.loss_mode": mode, "algorithm.filter_groups.enable": True}
    if mode == "vanilla":
        overrides |= {f"{CORRECTION}.rollout_is": "sequence", f"{CORRECTION}.rollout_rs": "token_k2"}
        overrides |= {f"{CORRECTION}.rollout_rs_threshold": 0.1}
    files(hflow, tmp_path, yaml.safe_dump(overrides))


@pytest.mark.parametrize(
    "case", [2, *(pytest.param(case, marks=pytest.mark.long) for case in (1, *range(3, len(TRL_CASES))))]
)
def test_every_configuration_of_trl_is_accepted(case: int, tmp_path: Path, hflow: CommandLine) -> None:
    source = tmp_path / "given.yaml"
    source.write_text(yaml.safe_dump(TRL_CASES[case]))
    hflow.prints("translate", source, tmp_path / "mine", "--cluster", "h100-1x8")
    small = [key for key in SMALL if "layout" not in key]
    hflow.prints("check", tmp_path / "mine" / "given.py", *small)


def test_optimizers_have_their_names() -> None:
    for peer, values, model in (
        (TRL, {**TRL_BASE, "optim": "sgd", "learning_rate": 0.1}, "actor"),
        (VERL, {"critic.optim.optimizer": "SGD", "critic.optim.lr": 0.1}, "critic"),
    ):
        settings = translated(peer, values)[0].settings
        key = f"models.{model}.optim"
        assert (settings[f"{key}.name"], settings[f"{key}.lr"]) == ("sgd", 0.1)
        assert f"{key}.betas" not in settings
    for peer, values, model in (
        (TRL, {**TRL_BASE, "optim": "adamw_bnb_8bit", "adam_beta2": 0.95}, "actor"),
        (VERL, {"critic.optim.optimizer": "AdamW8bit", "critic.optim.betas": [0.9, 0.95]}, "critic"),
    ):
        settings = translated(peer, values)[0].settings
        key = f"models.{model}.optim"
        assert (settings[f"{key}.name"], settings[f"{key}.betas"]) == ("adamw_8bit", [0.9, 0.95])


def test_parameters_of_experts_are_targets_of_adapters() -> None:
    given = {**TRL_BASE, "use_peft": True, "lora_target_modules": "all-linear"}
    settings = translated(TRL, {**given, "lora_target_parameters": ["mlp.experts.down_proj"]})[0].settings
    assert settings["models.actor.lora.targets"] == ["all-linear", "experts.down_proj"]


def test_masks_of_trl_that_another_loss_does_not_have_are_left() -> None:
    given = {**TRL_BASE, "loss_type": "cispo", "epsilon_high": 5.0, "top_entropy_quantile": 0.2}
    draft, entries = translated(TRL, given)
    assert draft.loss == "cispo_train"
    assert "nodes.high_entropy_train has PPO's loss" in entries["top_entropy_quantile"].note
    _, entries = translated(TRL, {**TRL_BASE, "top_entropy_quantile": 0.2, "delta": 3.0})
    assert "has no dual_clip" in entries["delta"].note
    _, entries = translated(TRL, {**TRL_BASE, "loss_type": "vespo", "importance_sampling_level": "sequence"})
    assert "no ratios of whole sequences" in entries["importance_sampling_level"].note
    _, entries = translated(TRL, {**TRL_BASE, "off_policy_mask_threshold": 0.5})
    assert entries["off_policy_mask_threshold"].reason == "differs"


def test_what_is_left_is_printed_by_kind(tmp_path: Path, hflow: CommandLine) -> None:
    (tmp_path / "run.yaml").write_text(VERL_GRPO)
    lines = hflow.prints("translate", tmp_path / "run.yaml", tmp_path / "mine").splitlines()
    titles = [line for line in lines if line and not line.startswith((" ", str(tmp_path)))]
    assert titles[:3] == [
        "Unknown keys",
        "Values that were not translated",
        "Translated, with another meaning",
    ]
    assert any("steps = 15 * rows / 1024" in line for line in lines)
    assert any("automatic" not in line and "keys of verl 0.9.1: " in line for line in lines)


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        (f"{ACTOR}.clip_ratio_high", "high", "'high' was not understood; a number is expected"),
        (f"{ACTOR}.use_kl_loss", 3, "3 was not understood; true or false is expected"),
        (f"{ROLLOUT}.n", 2.5, "2.5 was not understood; a whole number is expected"),
        ("algorithm.adv_estimator", "mine", "hflow has no counterpart of 'mine'"),
        (f"{ROLLOUT}.do_sample", False, "samples are drawn"),
        (f"{ACTOR}.kl_loss_type", "kl", ""),
    ],
)
def test_a_value_that_means_nothing_here_is_left(key: str, value: Any, note: str) -> None:
    _, entries = translated(VERL, {**GRPO, f"{ACTOR}.use_kl_loss": True, key: value})
    assert entries[key].reason == "value"
    assert note in entries[key].note


REFUSALS = {
    "a: [": "bad.yaml:1: invalid YAML",
    "just text": "is neither a mapping of keys to values nor a list of key=value",
    "": "is neither a mapping of keys to values nor a list of key=value",
    "cluster: here\nbatch: 3\nsteps: 4\nseed: 1": "'cluster' and most other keys are not theirs",
    "{}": "it has no keys",
    "- algorithm.gamma": "is not key=value, as Hydra writes it",
    "- 3": "is not key=value, as Hydra writes it",
    "a: ${b}\nb: ${a}\nlearning_rate: 1": "most other keys are not theirs",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_file_that_cannot_be_translated_is_refused(text: str, tmp_path: Path, hflow: CommandLine) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert REFUSALS[text] in hflow.refused("translate", tmp_path / "bad.yaml", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_missing_file_and_one_that_would_be_replaced_are_refused(
    tmp_path: Path, hflow: CommandLine
) -> None:
    assert "No such file" in hflow.refused("translate", tmp_path / "none.yaml", tmp_path / "mine")
    (tmp_path / "run.yaml").write_text(TRL_GRPO)
    hflow.prints("translate", tmp_path / "run.yaml", tmp_path / "mine")
    refused = hflow.refused("translate", tmp_path / "run.yaml", tmp_path / "mine")
    assert "exists already and is not overwritten" in refused
