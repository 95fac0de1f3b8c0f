"""GRPO with a replay buffer, by a custom node type that opens a stream of new and of kept samples.

    hflow run recipes/custom/replay.py

`@Replay(...)` is `@generate(...)` with a memory. It keeps what was generated for each prompt; when the prompt
comes again, a share of its group are kept samples. Their rewards are computed again, and their
`behav_logprobs` are those of the policy that once generated them, so the loss of `actor_train` corrects for
their age (`behav_weight_cap`). To the run they are written, not generated: their tokens have no version, so
that no bound on staleness applies to them. The buffer is not part of a checkpoint; a resumed run begins with
an empty one.
"""

import random
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, ClassVar

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use
from hflow.extend import Context, Option

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Replay(generate):
    """Generate, or return a sample that was generated for the same prompt before.

    Options: `share` of samples that are replayed if there are kept ones; `capacity`, samples to keep for one
    prompt.
    """

    options: ClassVar = generate.options | {
        "share": Option("float", 0.25, minimum=0.0, maximum=1.0),
        "capacity": Option("int", 16, minimum=1),
    }
    kept: dict[str, deque[Trajectory]]

    def setup(self, context: Context) -> None:
        """Begin with an empty buffer, once on each worker that generates."""
        self.kept = defaultdict(lambda: deque(maxlen=context.options["capacity"]))

    async def run(self, context: Context, inputs: Mapping[str, Any]) -> tuple[Trajectory, bool]:
        """Return a kept sample or a new one, and whether it is a kept one."""
        engine, kept = inputs["engine"], self.kept[inputs["prompt"]]

        def take() -> dict[str, Any] | None:
            return as_json(random.choice(kept)) if kept else None

        # The choice goes through the engine, so that it is the same if the episode has to be replayed.
        if engine.random() < context.options["share"] and (taken := await engine.call(take)):
            return written(taken), True
        trajectory = await context.body(**inputs, **context.knobs)
        kept.append(trajectory)
        return trajectory, False

    def read_results(self, hint: Any, function: str, error: Any) -> Any:
        """Return the types of the node's results: the body's trajectory, and whether it is a kept one."""
        if hint is not Trajectory:
            raise error("the body of @Replay must return one Trajectory")
        return super().read_results(tuple[Trajectory, bool], function, error)


def as_json(kept: Trajectory) -> dict[str, Any]:
    """Return what a replayed sample needs as JSON values."""
    names = ("input_ids", "loss_mask", "behav_logprobs", "completion", "stop_reason", "num_turns")
    values = {name: getattr(kept, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def written(taken: Mapping[str, Any]) -> Trajectory:
    """Return a kept sample as one that was written: its tokens have no version."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in taken.items()
    }
    return Trajectory(**fields, versions=(-1,) * len(taken["input_ids"]))


@Replay(actor, group=8, returns="is_replayed")
async def answer_gen(engine: Engine, prompt: str) -> Trajectory:
    return await engine.complete(prompt)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


accuracy = use(score, name="accuracy", on="eval_gen", returns="accuracy")

recipe = Recipe(
    "replay",
    data,
    [
        answer_gen,
        score,
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=2),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        accuracy,
    ],
)
