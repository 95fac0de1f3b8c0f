"""Two ranks equal one process: every reduction, uneven minibatches, unequal micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reduction_cases
import torch
import torch_kit as kit
import torch_ranks
from ranks import start
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hflow.models.expert_tensors import file_tensors, stacked_views
from hflow.training.fsdp.weight_export import merged_weights


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    start(torch_ranks.run, (str(path),), 2)
    return path


@pytest.fixture(scope="module")
def ranks(directory: Path) -> dict:
    return torch.load(directory / "ranks.pt", weights_only=False)


def train_here(call, **changes):
    backend = kit.model(**changes)
    return backend.train(call, kit.whole(kit.make_batch(kit.LENGTHS)), 5), kit.weights(backend)


def assert_same(got, wanted, atol=1e-5) -> None:
    metrics, weights = wanted
    assert got[0] == pytest.approx(metrics, abs=10 * atol)
    assert got[1].keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(got[1][name], tensor, atol=atol, rtol=0)


@pytest.mark.parametrize("name", kit.CALLS)
def test_reduction(ranks, name):
    assert_same(ranks[name], train_here(kit.CALLS[name]))


@pytest.mark.parametrize("case", reduction_cases.CASES)
def test_loss_by_hand(ranks, case):
    wanted = reduction_cases.loss_by_hand(reduction_cases.make_batch(), *case)
    assert ranks["reductions"][case] == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_untied(ranks):
    assert_same(ranks["untied"], train_here(kit.CALLS["token-mean"], **torch_ranks.VARIANTS["untied"]))


def test_value(ranks):
    assert_same(ranks["value"], train_here(kit.VALUE, head="value"))
    assert "value_head.weight" in ranks["value"][1]


def test_activation_checkpointing_changes_nothing(ranks):
    assert_same(ranks["recomputed"], train_here(kit.CALLS["token-mean"]))


@pytest.mark.parametrize("name", ["gathered once", "gradients summed once"])
def test_what_ranks_divide_changes_rounding_only(ranks, name):
    """Also after updates that were skipped, whose whole gradients must be gone."""
    assert_same(ranks[name], train_here(kit.CALLS["token-mean"]))
    assert ranks["skipped"] == 6


def test_experts_that_an_engine_chose(ranks):
    batch, backend = kit.with_experts(kit.make_batch(kit.LENGTHS)), kit.model(architecture=kit.MIXED)
    wanted = backend.train(kit.REPLAYED, kit.whole(batch), 5), kit.weights(backend)
    assert_same(ranks["replayed"], wanted)
    assert wanted[0]["rerouted"] > 0.5


def test_balanced_experts_and_their_biases(ranks):
    """The tokens of the minibatch are counted first, on both ranks."""
    changes = torch_ranks.VARIANTS["balanced"] | {"activation_checkpointing": False}
    wanted = train_here(kit.CALLS["token-mean"], **changes)
    assert_same(ranks["balanced"], wanted)
    assert wanted[0]["balance_loss"] > 1
    moved = [x for name, x in wanted[1].items() if name.endswith("e_score_correction_bias")]
    assert len(moved) == 3
    assert all(bias.abs().max() > 0.9e-3 for bias in moved)


def test_offloading_changes_no_bit(ranks):
    (metrics, weights), (wanted, others) = ranks["offloaded"], ranks["token-mean"]
    assert metrics == wanted
    assert all(torch.equal(weights[name], tensor) for name, tensor in others.items())


@pytest.mark.parametrize("name", [name for name in torch_ranks.VARIANTS if name.endswith(("lora", "dora"))])
def test_adapters(directory, ranks, name):
    pytest.importorskip("peft")
    """Adapters train, are turned off and on, and are merged over ranks as in one process."""
    changes = torch_ranks.VARIANTS[name]
    plain = {key: value for key, value in changes.items() if key != "lora"}
    batch, backend = kit.make_batch(kit.LENGTHS), kit.model(**changes)
    wanted = backend.train(kit.CALLS["token-mean"], kit.whole(batch), 5), kit.weights(backend)
    *got, (without, later) = ranks[name]
    assert all(".lora_" in name for name in got[1])
    assert_same(got, wanted)
    files = (directory / name / "merged").glob("*.safetensors")
    merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
    here = merged_weights(backend._model, backend._runner.module.head, "lm", torch.float32, 2.0)
    family = backend._model.config.model_type
    tensors = file_tensors(family, dict(stacked_views(family, here)))
    for name, tensor in tensors.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-5, rtol=0)
    assert merged.keys() == file_tensors(family, kit.weights(kit.model(**plain))).keys()
    (base,) = kit.model(**plain).infer(kit.LOGPROBS, [batch])
    if changes["lora"].base is None:
        np.testing.assert_allclose(without, base.columns["result"].values, atol=1e-5)
    metrics = backend.train(kit.CALLS["token-mean"], kit.whole(batch), 6)
    assert_same((metrics, later), (metrics, kit.weights(backend)))


def test_bf16_adapters_beside_bf16_weights(ranks):
    pytest.importorskip("peft")
    changes = torch_ranks.VARIANTS["lora recomputed in bf16"]
    metrics, weights = train_here(kit.CALLS["token-mean"], **changes)
    assert ranks["lora recomputed in bf16"][0]["loss"] == pytest.approx(metrics["loss"], abs=2e-3)
    for name, tensor in ranks["lora recomputed in bf16"][1].items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, weights[name], atol=2e-2, rtol=0)


@pytest.mark.parametrize("name", torch_ranks.SHARED)
def test_models_on_one_base_are_those_with_their_own(ranks, name):
    """Three with adapters, and a reference: bit for bit, and the base is there once, also over ranks."""
    pytest.importorskip("peft")
    batch = kit.make_batch(kit.LENGTHS)
    here = torch_ranks.shared_base(None, batch, kit.whole(batch), torch_ranks.SHARED[name])
    for equal in (here, *ranks[f"shared {name}"]):
        assert dict.fromkeys(equal, True) == equal


def test_bf16_is_the_same_up_to_its_precision(ranks):
    metrics, weights = train_here(kit.CALLS["token-mean"], dtype="bf16")
    assert all(tensor.dtype == torch.bfloat16 for tensor in ranks["bf16"][1].values())
    assert ranks["bf16"][0]["loss"] == pytest.approx(metrics["loss"], abs=2e-3)
    start = kit.weights(kit.model())
    moved = torch.cat([(weights[n].float() - start[n]).flatten() for n in start])
    there = torch.cat([(ranks["bf16"][1][n].float() - start[n]).flatten() for n in start])
    assert torch.cosine_similarity(moved, there, dim=0) > 0.95


def test_infer(ranks):
    batch = kit.make_batch(kit.LENGTHS)
    (wanted,) = kit.model().infer(kit.LOGPROBS, [batch])
    np.testing.assert_allclose(np.concatenate(ranks["infer"]), wanted.columns["result"].values, atol=1e-5)


def test_each_rank_holds_rows_of_every_weight(ranks):
    """19 and 18 of 37 token rows, and rows of biases and norms, as in the plan."""
    held, weights = ranks["blocks"]
    for name, whole in weights.items():
        parts = [[(box, x) for tensor, box, x in blocks if tensor == name] for blocks in held]
        edges = [box[0] for ((box, _),) in parts]
        half = -(-len(whole) // 2)
        assert edges == [(0, half), (half, len(whole))]
        assert torch.equal(torch.cat([x for ((_, x),) in parts]), whole)
    assert all(torch.equal(weights[name], x) for name, x in kit.weights(kit.model()).items())


def test_no_rank_has_memory_for_the_whole_model_while_it_draws_it(ranks):
    model = kit.model(architecture=torch_ranks.LARGE)._model
    sizes = [weight.nbytes for weight in model.parameters()]
    for most in ranks["peaks"]:
        assert sum(sizes) / 2 < most < sum(sizes) / 2 + 2 * max(sizes)


@pytest.mark.parametrize("name", torch_ranks.READ)
def test_each_rank_reads_its_rows_of_a_checkpoint(directory, ranks, name):
    if "lora" in torch_ranks.VARIANTS[name]:
        pytest.importorskip("peft")
    loaded, trained = ranks[f"{name} read"]
    here = torch_ranks.from_checkpoint(directory, name, None)
    for key, tensor in kit.weights(here).items():
        assert torch.equal(loaded[key], tensor)
    result = here.train(torch_ranks.call_of(name), kit.whole(kit.make_batch(kit.LENGTHS)), 6)
    assert_same(trained, (result, kit.weights(here)), atol=3e-3 if "bf16" in name else 1e-5)


@pytest.mark.parametrize("name", ["untied", "recomputed"])
def test_saved_from_ranks_loads_in_transformers(directory, ranks, name):
    loaded = AutoModelForCausalLM.from_pretrained(directory / name).state_dict()
    for key, tensor in ranks[name][1].items():
        torch.testing.assert_close(loaded[key], tensor, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["untied", "value", "bf16"])
def test_both_ranks_write_files_of_equal_size(directory, ranks, name):
    first, second = (
        {file for file in files if file.startswith("model-")} for files in ranks[f"{name} files"]
    )
    sizes = [sum((directory / name / file).stat().st_size for file in files) for files in (first, second)]
    assert not first & second
    assert first | second == {path.name for path in (directory / name).glob("model-*")}
    largest = max(tensor.nbytes for tensor in ranks[name][1].values())
    assert abs(sizes[0] - sizes[1]) <= 2 * largest + 1024  # and the files' headers


def test_a_model_without_the_worlds_first_rank_is_saved(directory, ranks):
    loaded = AutoModelForCausalLM.from_pretrained(directory / "on the second rank alone").state_dict()
    for key, tensor in kit.weights(kit.model()).items():
        torch.testing.assert_close(loaded[key], tensor, atol=0, rtol=0)


# ----------------------------------------------------------------------------- a replicate axis
@pytest.fixture(scope="module")
def replicated_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replicated")
    start(torch_ranks.run_replicated, (str(path),), 4)
    return path


@pytest.fixture(scope="module")
def replicated(replicated_files: Path) -> dict:
    return torch.load(replicated_files / "replicated.pt", weights_only=False)


@pytest.mark.parametrize("name", ["untied", "lora", "dora", "gradients summed once"])
@pytest.mark.long
def test_two_sets_of_two_ranks_equal_one_process(replicated, name):
    """Gradients of several micro-batches are summed once, and each weight counts once in their norm."""
    if "lora" in torch_ranks.VARIANTS[name]:
        pytest.importorskip("peft")
    assert_same(replicated[name], train_here(kit.CALLS["token-mean"], **torch_ranks.VARIANTS[name]))


@pytest.mark.long
def test_replicated_bf16_is_the_same_up_to_its_precision(replicated):
    metrics, weights = train_here(kit.CALLS["token-mean"], dtype="bf16")
    assert replicated["bf16"][0]["loss"] == pytest.approx(metrics["loss"], abs=2e-3)
    for name, tensor in weights.items():
        torch.testing.assert_close(replicated["bf16"][1][name], tensor, atol=2e-2, rtol=0)


@pytest.mark.long
def test_replicated_weights_stay_equal_to_the_bit(replicated):
    for name in torch_ranks.REPLICATED:
        first, second, third, last = replicated.get(f"{name} blocks", ([], [], [], []))
        for one, other in ((first, third), (second, last)):
            assert [row[:2] for row in one] == [row[:2] for row in other]
            assert all(torch.equal(mine[2], theirs[2]) for mine, theirs in zip(one, other, strict=True))
    first, second, *_ = replicated["untied blocks"]
    for tensor, whole in replicated["untied"][1].items():
        assert torch.equal(
            torch.cat([x for rows in (first, second) for n, _, x in rows if n == tensor]), whole
        )


@pytest.mark.long
def test_all_replicated_ranks_write_files(replicated_files, replicated):
    files = [{file for file in found if "model-" in file} for found in replicated["untied files"]]
    path = replicated_files / "untied"
    assert all(files)
    assert sum(map(len, files)) == len(set.union(*files)) == len(list(path.glob("model-*")))
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for key, tensor in replicated["untied"][1].items():
        torch.testing.assert_close(loaded[key], tensor, atol=0, rtol=0)


@pytest.mark.long
def test_each_entry_of_replicated_weights_is_saved_once(replicated_files, replicated):
    backend = kit.model(**torch_ranks.VARIANTS["untied"])
    backend.load_shards(str(replicated_files / "shards"))
    for name, tensor in kit.weights(backend).items():
        assert torch.equal(tensor, replicated["untied"][1][name])


@pytest.mark.long
def test_replicated_models_share_their_groups(replicated):
    assert replicated["groups"] == 2


@pytest.mark.long
def test_replicated_infer(replicated):
    batch = kit.make_batch(kit.LENGTHS)
    for rank, values in enumerate(replicated["infer"]):
        rows = [row for row in range(12) if row % 4 == rank and row < 9]
        (wanted,) = kit.model().infer(kit.LOGPROBS, [batch.take(rows)])
        np.testing.assert_allclose(values, wanted.columns["result"].values, atol=1e-5)
