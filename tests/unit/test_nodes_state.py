"""The state of nodes is JSON, and is lost where a call fails."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from hflow.base.errors import RunError
from hflow.types import State
from hflow.workers.bodies.batch_node_runner import NodeStates

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_saved_state_is_loaded(memory):
    states = NodeStates({})
    states.save("controller", State(memory))
    assert states.load("controller") == memory
    assert states.load("another") == {}
    assert NodeStates({"controller": states.text("controller")}).load("controller") == memory


def test_changes_that_are_not_saved_are_lost():
    states = NodeStates({})
    states.save("controller", State(beta=0.5, seen=[1]))
    state = states.load("controller")
    state["beta"] = 7.0
    state["seen"].append(2)
    assert states.load("controller") == {"beta": 0.5, "seen": [1]}


@pytest.mark.parametrize("value", [torch.ones(1), float("nan"), float("inf"), {1, 2}, object()])
def test_a_state_that_is_not_json_is_refused(value):
    states = NodeStates({})
    with pytest.raises(
        RunError, match=r"node 'controller': its state cannot be saved as JSON.* such as float\(tensor\)"
    ):
        states.save("controller", State(beta=value))
    assert states.load("controller") == {}
