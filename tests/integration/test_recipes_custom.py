"""A recipe whose node type opens a stream of samples of its own."""

from __future__ import annotations

from pathlib import Path

from runs import run, steps_of

REPLAY = "recipes/custom/replay.py"
SMALL = ["workers=inproc", "cluster=cpu-1x1", "models.actor.path=null", "steps=3", "batch=8"]
SMALL += ["data.train.limit=8", "nodes.eval_gen.after=1000", "nodes.answer_gen.group=4"]


def test_kept_samples_come_again_and_are_trained_with_new_ones(tmp_path: Path) -> None:
    steps = steps_of(run(REPLAY, tmp_path, *SMALL, "nodes.answer_gen.share=0.5"))
    assert len(steps) == 3
    assert 0 < steps[-1]["answer_gen/is_replayed"] < 1
    assert all(row["actor_train/grad_norm"] >= 0 for row in steps)
