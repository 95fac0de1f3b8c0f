"""A recipe for the tests of workers: generation, bodies of every level, views, training."""

from __future__ import annotations

from hflow import (
    Dataset,
    Metrics,
    Model,
    Output,
    PerSequence,
    PerToken,
    Recipe,
    Sequences,
    Text,
    Tokenizer,
    Trajectory,
    compute,
    encode,
    infer,
    nodes,
    train,
    use,
)

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", timeout=1.0, returns=("reward", "hint"))
def score(
    completion: str, answer: str, num_tokens: int, *, hang: str = "", fail: str = ""
) -> tuple[float, str]:
    if answer == fail:
        raise ValueError(f"no score for {answer}")
    while answer == hang:
        pass
    return len(completion) + 0.5, f"{answer}/{num_tokens}"


@compute(per="sample")
async def judged(hint: str) -> int:
    return len(hint)


@compute(per="group", returns="keep")
def long_enough(reward: list[float], *, least: float = 0.0) -> bool:
    return max(reward) >= least


@encode(actor, on="actor_gen")
def view(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    return tokenizer.join(prompt, answer)


@infer(actor, on="view", returns="view_logprobs")
def view_inf(out: Output) -> PerToken:
    return out.logprobs


@infer(actor, on="actor_gen", returns="theta_logprobs")
def recheck(out: Output) -> PerToken:
    return out.logprobs


@compute(on="actor_gen", returns=("advantages", "baseline"))
def advantage(
    reward: PerSequence, seqs: Sequences, judged: PerSequence, *, raises: bool = False
) -> tuple[PerToken, PerSequence, Metrics]:
    if raises:
        raise ZeroDivisionError("by request")
    mean = seqs.group_sum(reward) / seqs.group_count()
    centred = reward - mean[seqs.group]
    return seqs.widen(centred), mean[seqs.group], {"spread": centred.abs(), "longest.max": seqs.lengths}


@compute(per="sample", on="actor_gen")
def shifted(baseline: float) -> float:
    return baseline + 1.0


@train(actor, on="actor_gen", reduce="token-mean")
def learn(out: Output, advantages: PerToken, shifted: PerSequence) -> PerToken:
    return -out.logprobs * advantages


@compute(on="view")
def view_mean(view_logprobs: PerToken, seqs: Sequences) -> PerSequence:
    return seqs.mean(view_logprobs)


recipe = Recipe(
    "workers",
    data,
    [
        use(nodes.actor_gen, actor, group=2),
        score,
        judged,
        long_enough,
        view,
        view_inf,
        view_mean,
        recheck,
        advantage,
        shifted,
        learn,
    ],
)
