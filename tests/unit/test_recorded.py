"""Records of engines beside tokens: kinds that are not hflow's own pass all places that carry one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cost_kit import SMALL
from safetensors.numpy import load_file, save_file

from hflow.base.errors import BackendError, PlanError, RecipeError, ReturnError
from hflow.dsl import load_recipe
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.engines.request import new_request
from hflow.episodes.trajectories import append_messages, append_turn, prompt_trajectory
from hflow.graph.build import build_graph
from hflow.graph.ir import Graph, Parameter
from hflow.planner.forecast.traffic import field_size
from hflow.types import Trajectory, Unit
from hflow.types.recorded import (
    RECORDED_KINDS,
    RecordedKind,
    RowFormat,
    cut_recorded,
    recorded_kind,
    requested_kinds,
)
from hflow.types.routed_experts import ROUTED_EXPERTS
from hflow.workers.interface import NodeProgram
from hflow.workers.storage.sample_files import SampleFiles, SampleFilesReader
from hflow.workers.storage.sample_store import SampleStore
from hflow.workers.storage.sample_writer import SampleWriter

MASS = RecordedKind("kept_mass", lambda shape, options: RowFormat("float32"), option="keep_mass")
"""A number of each token, as the probability that top-p leaves would be."""
STATE = RecordedKind(
    "last_state",
    lambda shape, options: RowFormat("float16", (shape.hidden,)),
    option="keep_state",
    unit=Unit.SEQUENCE,
)
"""Several numbers of the sequence."""
OPTIONS = {"keep_mass": True, "keep_state": True}
RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("kept_mass", "MASS"), ("last_state", "STATE")):
        monkeypatch.setitem(RECORDED_KINDS.own, name, f"{__name__}:{kind}")


def mass(*values: float) -> tuple[bytes, ...]:
    return tuple(np.float32(value).tobytes() for value in values)


def test_an_option_requests_a_kind() -> None:
    assert requested_kinds(OPTIONS) == (MASS, STATE)
    assert requested_kinds({"keep_mass": False, "temperature": 1.0}) == ()
    with pytest.raises(PlanError, match="unknown recorded kind 'kept_mas'; did you mean 'kept_mass'"):
        recorded_kind("kept_mas")


def test_an_engine_refuses_what_it_does_not_record() -> None:
    params = SamplingParams(record=("kept_mass",))
    assert new_request(0, [1], params, 8, 10, None, ["kept_mass"]).recorded == {}
    with pytest.raises(BackendError, match="keep_mass is set, but the engine does not record kept_mass"):
        new_request(0, [1], params, 8, 10, None, [ROUTED_EXPERTS])


def test_turns_extend_records_and_a_shorter_conversation_cuts_them() -> None:
    first = GenerationResult((6,), (-1.0,), (0,), "stop", {"kept_mass": mass(1, 2), "last_state": (b"old",)})
    later = GenerationResult(
        (8,), (-1.0,), (1,), "stop", {"kept_mass": mass(9, 9, 3, 4), "last_state": (b"new",)}
    )
    turn = append_messages(append_turn(prompt_trajectory([4, 5], ()), first, ""), [7])
    both = append_turn(turn, later, "")
    assert both.recorded == {"kept_mass": mass(1, 2, 3, 4), "last_state": (b"new",)}
    assert append_turn(turn, replace(later, recorded={}), "").recorded == first.recorded
    assert cut_recorded(both.recorded, 3) == {"kept_mass": mass(1, 2, 3), "last_state": ()}
    with pytest.raises(ValueError, match="kept_mass has 6 entries, but the trajectory has 5 tokens"):
        replace(both, recorded={"kept_mass": mass(*range(6))})
    with pytest.raises(ValueError, match="last_state has 2 entries"):
        replace(both, recorded={"last_state": (b"a", b"b")})


def graph(reads: str = "kept_mass", **options: Any) -> Graph:
    """Return the graph of a recipe whose train node reads a field."""
    spec = load_recipe(RECIPE).spec()
    nodes = []
    for node in spec.nodes:
        if node.name == "actor_gen":
            node = replace(node, options=(*node.options, *options.items()))
        if node.name == "actor_train":
            node = replace(node, parameters=(*node.parameters, Parameter("x", reads, Unit.TOKEN, "tensor")))
        nodes.append(node)
    return build_graph(replace(spec, nodes=tuple(nodes)))


def test_a_record_is_a_field_of_its_stream() -> None:
    found = graph(keep_mass=True)
    (read,) = (read for read in found.node("actor_train").reads if read.field == "kept_mass")
    assert (read.producer, read.source_unit) == ("actor_gen", Unit.TOKEN)
    shapes = {"actor": SMALL}
    assert field_size(found, "actor_gen/kept_mass", shapes).of(prompt=3, response=5) == 8 * 4
    assert field_size(found, "actor_gen/last_state", shapes).of(prompt=3, response=5) == 2 * SMALL.hidden
    with pytest.raises(RecipeError, match="keep_state has no effect, as no node reads last_state"):
        graph(keep_mass=True, keep_state=True)


def test_records_are_stored_with_their_sample() -> None:
    store = SampleStore()
    program = NodeProgram(
        "gen", "generate", "sample", "gen", "gen", print, (), (), (), False, True, ("actor",), {}, OPTIONS
    )
    formats = ((MASS, RowFormat("float32")), (STATE, RowFormat("float16", (2,))))
    writer = SampleWriter(program, ("gen",), store, formats)
    state = np.array([1, 2], np.float16).tobytes()
    for sample, recorded in enumerate(({"kept_mass": mass(0.5), "last_state": (state,)}, {})):
        trajectory = replace(prompt_trajectory([4, 5, 6], ()), recorded=recorded)
        writer.write(sample, 0, writer.read(trajectory), {})
    batch = store.gather("gen", ["gen/kept_mass", "gen/last_state"], [0, 1])
    found = np.asarray(batch.columns["kept_mass"].values)
    assert found[0] == 0.5
    assert np.isnan(found[1:]).all()
    assert batch.columns["last_state"].unit is Unit.SEQUENCE
    assert np.asarray(batch.columns["last_state"].values)[0].tolist() == [1, 2]
    with pytest.raises(ReturnError, match="last_state of a trajectory has 3 bytes for 1 sequences"):
        writer.read(Trajectory((1,), (False,), (0.0,), (-1,), recorded={"last_state": (b"abc",)}))


PACKED = {"unit": "token", "samples": [3], "lengths": [2]}
FIELDS = [
    {"field": "input_ids", "form": "python", "tensor": "0.0", **PACKED},
    {"field": ROUTED_EXPERTS, "form": "packed", "tensor": "0.1", **PACKED},
]
ENTRY = {
    "kind": "complete",
    "model": "actor",
    "is_done": True,
    "request": {"prompt": "ab", "num_prompt": 1, "max_tokens": 9, "stop": []},
    "num_tokens": 2,
    "stop_reason": "stop",
}
SAVED = {
    "format": 1,
    "streams": {"gen": {"samples": [3], "lengths": [2], "groups": [1], "fields": FIELDS}},
    "journals": {"gen": {"5": [ENTRY]}},
}
TENSORS = {
    "0.0": np.array([1, 2]),
    "0.1": np.array([[1, 2], [255, 255]], np.uint8),
    "journals.ids": np.array([7, 8]),
    "journals.logprobs": np.array([-0.25, -1.5]),
    "journals.versions": np.array([4, 4]),
}


def test_files_of_a_checkpoint_keep_their_form(tmp_path: Path) -> None:
    """The form is older than the registry: experts are a column, and a journal has tokens alone."""
    (tmp_path / "old.json").write_text(json.dumps(SAVED))
    save_file(TENSORS, tmp_path / "old.safetensors")
    reader = SampleFilesReader(tmp_path, "old")
    stored, journal = reader.samples(["gen"], [3])["gen"], reader.journal("gen", 5)
    store = SampleStore()
    store.put_stored("gen", stored)
    (rows,) = store.values("gen", ROUTED_EXPERTS, [3])
    assert np.asarray(rows).tolist() == [[1, 2], [255, 255]]
    assert journal is not None
    assert journal.entries[0].outcome == GenerationResult((7, 8), (-0.25, -1.5), (4, 4), "stop")
    SampleFiles(tmp_path, "new", {"gen": {"gen": stored}}, {"gen": {5: journal}}).write()
    assert json.loads((tmp_path / "new.json").read_text()) == SAVED
    written = load_file(tmp_path / "new.safetensors")
    assert written.keys() == TENSORS.keys()
    assert all(np.array_equal(written[name], value) for name, value in TENSORS.items())
