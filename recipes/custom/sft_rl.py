"""Supervised and reinforcement learning of one actor in one step, by two custom node types.

    hflow run recipes/custom/sft_rl.py

`@Taught(...)` is `@generate(...)` in which some samples of each group are the dataset's answer instead of the
model's. `@SftAndRl(...)` is `@train(...)` whose body returns the loss of reinforcement learning; on the
examples it is replaced by the supervised loss. Both are part of the same optimizer steps, and the examples'
rewards are part of their group's baseline.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from hflow import (
    Dataset,
    Engine,
    Metrics,
    Model,
    Output,
    PerToken,
    Recipe,
    Text,
    Tokenizer,
    Trajectory,
    algo,
    compute,
    generate,
    nodes,
    train,
    use,
)
from hflow.extend import Context, Option

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Taught(generate):
    """Generate, but write a share of the samples from the dataset's answer.

    The body needs `tokenizer: Tokenizer`, `prompt: str` and `answer: str`. Option: `share`.
    """

    needs: ClassVar = ("engine", "tokenizer")
    options: ClassVar = generate.options | {"share": Option("float", 0.125, minimum=0.0, maximum=1.0)}

    async def run(self, context: Context, inputs: Mapping[str, Any]) -> tuple[Trajectory, bool]:
        """Return an example or the body's sample, and whether it is an example."""
        if inputs["engine"].random() < context.options["share"]:
            return inputs["tokenizer"].join(inputs["prompt"], inputs["answer"]), True
        return await context.body(**inputs, **context.knobs), False

    def read_results(self, hint: Any, function: str, error: Any) -> Any:
        """Return the types of the node's results: the body's trajectory, and whether it is an example."""
        if hint is not Trajectory:
            raise error("the body of @Taught must return one Trajectory")
        return super().read_results(tuple[Trajectory, bool], function, error)


class SftAndRl(train):
    """Train with the body's loss, except on examples, where it is the negative log-prob.

    The body needs `out: Output` and `is_example: PerToken`. Option: `sft_weight` of the supervised loss.
    """

    options: ClassVar = train.options | {"sft_weight": Option("float", 0.5, minimum=0.0)}

    def run(self, context: Context, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the loss of each token, and the metrics."""
        loss, metrics = context.body(**inputs, **context.knobs)
        is_example, sft = inputs["is_example"], -inputs["out"].logprobs
        combined = (context.options["sft_weight"] * sft).where(is_example, loss)
        return combined, {**metrics, "example_share": is_example}


@Taught(actor, group=8, returns="is_example")
async def answer_gen(engine: Engine, tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    return await engine.complete(prompt)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


@SftAndRl(actor, reduce="token-mean", minibatches=2)
def actor_train(
    out: Output, behav_logprobs: PerToken, advantages: PerToken, is_example: PerToken, *, clip: float = 0.2
) -> tuple[PerToken, Metrics]:
    return algo.clipped_surrogate(out.logprobs, behav_logprobs, advantages, clip), {}


accuracy = use(score, name="accuracy", on="eval_gen", returns="accuracy")

recipe = Recipe(
    "sft_rl",
    data,
    [
        answer_gen,
        score,
        nodes.group_advantage,
        actor_train,
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        accuracy,
    ],
)
