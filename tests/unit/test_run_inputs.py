"""Fingerprints of the files that a run reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.base.errors import ConfigError
from hflow.launch.checkpoints.fingerprints import (
    BLOCK_BYTES,
    FORMAT,
    RunInputs,
    describe_change,
    fingerprint,
    read_inputs,
)
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.inputs import changed_inputs, run_inputs
from hflow.launch.running.worker_setup import make_setup

ROOT = Path(__file__).parents[2]
BASE = ROOT / "tests/fixtures/checkpoint-format-1/actor"


def written(directory: Path, **contents: bytes) -> list[Path]:
    directory.mkdir(exist_ok=True)
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return sorted(directory.iterdir())


def test_a_large_file_is_known_by_its_size_and_blocks_at_equal_distances(tmp_path: Path) -> None:
    content = bytearray(100 * BLOCK_BYTES)
    before = fingerprint(written(tmp_path, rows=bytes(content)), 3)
    for place in (0, 50 * BLOCK_BYTES, len(content) - 1):  # in the first, the middle and the last block
        content[place] = 1
        change = describe_change(before, fingerprint(written(tmp_path, rows=bytes(content)), 3))
        assert change == f"{tmp_path}/rows has other content"
        content[place] = 0
    longer = fingerprint(written(tmp_path, rows=bytes(content) + b"1"), 3)
    assert (
        describe_change(before, longer) == f"{tmp_path}/rows has other content (6,553,600 -> 6,553,601 bytes)"
    )


def test_every_byte_of_small_files_counts(tmp_path: Path) -> None:
    before = fingerprint(written(tmp_path, a=b"x" * BLOCK_BYTES, b=b"1"), 3)
    middle = b"x" * 999 + b"y" + b"x" * (BLOCK_BYTES - 1000)
    assert (
        describe_change(before, fingerprint(written(tmp_path, a=middle), 3))
        == f"{tmp_path}/a has other content"
    )


def test_files_are_the_same_wherever_they_are_but_not_in_another_order(tmp_path: Path) -> None:
    before = fingerprint(written(tmp_path / "here", a=b"1", b=b"2"), 3)
    assert describe_change(before, fingerprint(written(tmp_path / "there", c=b"1", d=b"2"), 3)) is None
    files = written(tmp_path / "here")
    assert describe_change(before, fingerprint(files[::-1], 3)) == "its files are read in another order"
    found = describe_change(before, fingerprint(written(tmp_path / "there", c=b"3"), 3))
    assert found == f"{tmp_path}/here/a is gone, and 3 more"


@pytest.mark.parametrize("lora", [(), ("models.actor.lora={r: 4}",)])
def test_weights_beside_which_adapters_train_are_compared(lora: tuple[str, ...]) -> None:
    """Others come from the run's checkpoint, and only the tokenizer from the model's path."""
    options = [f"models.actor.path={BASE}", "models.actor.gen.max_model_len=32", *lora]
    compiled = compile_recipe(ROOT / "recipes/ppo.py", options)
    inputs = run_inputs(compiled, {}).inputs
    names = {key: {Path(file.path).name for file in found.files} for key, found in inputs.items()}
    model = {"config.json", "model.safetensors"}
    tokenizer = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names["models.actor"] == tokenizer | (model if lora else set())
    assert names["models.critic"] == tokenizer
    assert names["models.ref"] == tokenizer | model
    assert names["recipe"] == {"ppo.py"}


def test_another_module_beside_the_recipe_is_warned_of(tmp_path: Path) -> None:
    recipe = tmp_path / "own.py"
    recipe.write_text("import score_of_answers\n" + (ROOT / "recipes/sft.py").read_text())
    helper = tmp_path / "score_of_answers.py"
    helper.write_text("BEST = 1\n")
    data = ["+model@models.actor=tiny-qwen2", "+data@data.train=addition", "+data@data.heldout=addition"]
    compiled = compile_recipe(recipe, data)
    before = run_inputs(compiled, {})
    assert [Path(file.path).name for file in before.inputs["recipe"].files] == ["own.py", helper.name]
    helper.write_text("BEST = 100\n")
    (change,) = changed_inputs(before, run_inputs(compiled, {}), compiled.config, compiled)
    assert change.change == f"{helper} has other content (9 -> 11 bytes)"
    assert not change.is_refused


def test_workers_that_start_later_read_the_files_that_the_run_began_with(tmp_path: Path) -> None:
    """A worker that takes another's place must not find the files of a pattern again."""
    row = b'{"prompt": "1+1=", "answer": "2"}\n'
    files = [str(path) for path in written(tmp_path, **{"a.jsonl": row, "b.jsonl": row})]
    options = [f"models.actor.path={BASE}", "models.actor.gen.max_model_len=32", "data.train.generator=null"]
    options += [f"data.train.path=[{tmp_path}/?.jsonl,hf:a/b]", f"data.heldout.path={tmp_path}/c*.jsonl"]
    compiled = compile_recipe(ROOT / "recipes/grpo.py", [*options, "data.heldout.generator=null"])
    datasets = make_setup(compiled).datasets
    assert datasets["train"].path == (*files, "hf:a/b")
    assert datasets["heldout"].path == f"{tmp_path}/c*.jsonl"


def test_a_list_of_inputs_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    assert read_inputs(file) is None
    inputs = RunInputs(FORMAT, {"data.train": fingerprint(written(tmp_path / "rows", a=b"1"), 3)})
    file.write_text(inputs.to_json())
    assert read_inputs(file) == inputs
    for broken in ("{", file.read_text().replace('"format": 1', '"format": 2')):
        file.write_text(broken)
        with pytest.raises(
            ConfigError, match=r"inputs.json does not fit this version of hflow: .* Use the version"
        ):
            read_inputs(file)
