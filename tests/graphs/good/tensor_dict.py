"""Nodes that take all numbers of the batch, or some of them, as a TensorDict, and return one."""

from typing import Annotated

from hflow import (
    Dataset,
    Metrics,
    Model,
    Output,
    PerSequence,
    PerToken,
    Recipe,
    TensorDict,
    Text,
    compute,
    infer,
    nodes,
    train,
    use,
)

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, num_tokens: int) -> float:
    return float(len(completion) + num_tokens)


@infer(actor, returns="gap")
def gap_inf(out: Output, batch: Annotated[TensorDict, {"behav_logprobs": PerToken}]) -> PerToken:
    return out.logprobs - batch["behav_logprobs"].values()


@compute()
def advantages(
    batch: TensorDict, *, scale: float = 2.0
) -> tuple[Annotated[TensorDict, {"advantages": PerToken, "baseline": PerSequence}], Metrics]:
    baseline = batch["reward"].mean().expand(len(batch))
    centred = (batch["reward"] - baseline).unsqueeze(-1)
    result = batch.select("gap")
    result["advantages"] = batch["loss_mask"] * centred * scale + 0 * batch["gap"]
    result["baseline"] = baseline
    return result, {"mean": result["advantages"].values()}


@train(actor, reduce="token-mean")
def actor_train(
    out: Output, batch: Annotated[TensorDict, {"advantages": PerToken, "baseline": PerSequence}]
) -> PerToken:
    return -out.logprobs * batch["advantages"].values()


recipe = Recipe(
    "tensor_dict", data, [use(nodes.actor_gen, actor, group=2), score, gap_inf, advantages, actor_train]
)
