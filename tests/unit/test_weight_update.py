"""Update bodies on the weights of two small models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_kit as kit

from hflow.base.errors import RunError
from hflow.workers.bodies.batch_node_runner import update_weights
from hflow.workers.interface import NodeProgram


def program(body: Callable[..., Any], **knobs: Any) -> NodeProgram:
    return NodeProgram(
        name="follow",
        verb="update",
        level="batch",
        stream="gen",
        root="gen",
        body=body,
        reads=(),
        provided=(("teacher", "target"), ("student", "source")),
        returns=(),
        metrics=False,
        models=("teacher", "student"),
        knobs=knobs,
        options={},
    )


def follow(teacher, student, *, decay):
    return teacher.lerp(student, 1 - decay)


@pytest.mark.parametrize("changes", [{}, {"dtype": "bf16"}, {"head": "value"}])
def test_all_weights_of_the_target_are_updated_and_none_of_the_source(changes):
    teacher, student = kit.model(seed=1, **changes), kit.model(seed=2, **changes)
    old, other = (
        {block.tensor: block.values.clone() for block in model.blocks()} for model in (teacher, student)
    )
    update_weights(program(follow, decay=0.75), teacher, student)
    for block in teacher.blocks():
        assert block.values.dtype == torch.float32
        name = block.tensor
        torch.testing.assert_close(block.values, 0.75 * old[name] + 0.25 * other[name])
    assert all(torch.equal(block.values, other[block.tensor]) for block in student.blocks())
    assert old.keys() == {name for name, _ in teacher.weights()}


def test_training_starts_from_the_updated_weights():
    teacher, student = kit.model(seed=1), kit.model(seed=2)
    update_weights(program(follow, decay=0.0), teacher, student)
    batch = kit.make_batch(kit.LENGTHS)
    metrics = [model.train(kit.CALLS["token-mean"], kit.whole(batch), 0) for model in (teacher, student)]
    assert metrics[0] == metrics[1]


def test_models_of_two_architectures_are_refused():
    teacher, student = kit.model(head="value"), kit.model()
    before = kit.weights(teacher)
    reason = r"differ in value_head.weight: 'teacher' has shape \[1, 32\], 'student' does not have it"
    with pytest.raises(RunError, match=reason):
        update_weights(program(follow, decay=0.5), teacher, student)
    assert all(torch.equal(weight, before[name]) for name, weight in teacher.weights())


@pytest.mark.parametrize(("result", "got"), [(torch.zeros(2), r"\[2\]"), (0.5, "float"), (None, "NoneType")])
def test_a_body_must_return_a_weight(result, got):
    node = program(lambda teacher, student: result)
    with pytest.raises(RunError, match=f"must return a tensor of shape .*, not {got}"):
        update_weights(node, kit.model(), kit.model())
