"""PPO: critic, KL in the reward, GAE, decoupled loss."""

from hflow import (
    Dataset,
    Engine,
    Metrics,
    Model,
    Output,
    PerSequence,
    PerToken,
    Recipe,
    Sequences,
    Text,
    Trajectory,
    algo,
    compute,
    generate,
    infer,
    nodes,
    train,
    use,
)

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
critic = Model("critic", head="value", trainable=True)
ref = Model("ref", init_from=actor)


@generate(actor)
async def actor_gen(engine: Engine, prompt: str) -> Trajectory:
    return await engine.complete(prompt)


@compute(per="sample", timeout=5.0, returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


@infer(critic, returns="values")
def critic_inf(out: Output) -> PerToken:
    return out.values


@compute(returns="token_reward")
def kl_reward(
    reward: PerSequence,
    behav_logprobs: PerToken,
    ref_logprobs: PerToken,
    seqs: Sequences,
    *,
    beta: float = 0.05,
) -> tuple[PerToken, Metrics]:
    kl = behav_logprobs - ref_logprobs
    return seqs.at_end(reward) - beta * kl, {"kl": kl}


@compute(returns=("advantages", "value_targets"))
def gae(
    token_reward: PerToken, values: PerToken, seqs: Sequences, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[PerToken, PerToken]:
    advantages = algo.gae(token_reward, values, seqs, gamma, lam)
    return algo.whiten(advantages, seqs), advantages + values


@train(critic, reduce="token-mean", minibatches=4, epochs=2)
def critic_train(out: Output, values: PerToken, value_targets: PerToken, *, clip: float = 0.2) -> PerToken:
    return algo.clipped_value_loss(out.values, values, value_targets, clip)


@train(actor, reduce="token-mean", minibatches=4, epochs=2, prox="recompute")
def actor_train(
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerToken,
    *,
    clip: float = 0.2,
    behav_weight_cap: float = 5.0,
) -> tuple[PerToken, Metrics]:
    loss = algo.decoupled_surrogate(
        out.logprobs, prox_logprobs, behav_logprobs, advantages, clip, behav_weight_cap
    )
    ratio = (out.logprobs - prox_logprobs).exp()
    return loss, {"clip_fraction": (ratio - 1).abs() > clip, "kl": algo.kl_k3(prox_logprobs, out.logprobs)}


recipe = Recipe(
    "ppo",
    data,
    [
        actor_gen,
        score,
        use(nodes.actor_inf, actor),
        use(nodes.ref_inf, ref),
        critic_inf,
        kl_reward,
        gae,
        critic_train,
        actor_train,
    ],
)
