"""Agents of 20 turns and eight models, for `controller_scale.py`: a run that asks much of the controller.

    hflow plan benchmarks/speed/recipes/eight_models.py

The actor generates and trains, and so does a critic; a reference, two teachers and three reward models read
each batch, on devices of their own.
"""

from hflow import (
    Dataset,
    Engine,
    Model,
    PerSequence,
    PerToken,
    Recipe,
    Sequences,
    Text,
    Trajectory,
    algo,
    compute,
    generate,
    nodes,
    use,
)

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
critic = Model("critic", head="value", trainable=True)
ref = Model("ref")
teachers = [Model(f"teacher_{number}") for number in range(2)]
judges = [Model(f"judge_{number}", head="score") for number in range(3)]


@generate(actor, group=8)
async def agent(engine: Engine, prompt: str, *, max_turns: int = 20) -> Trajectory:
    """Answer and be asked again."""
    talk = await engine.complete(prompt)
    for _ in range(max_turns - 1):
        talk = await engine.complete(talk.add("user", "?"))
    return talk


@compute(per="sample", timeout=5.0, returns="is_right")
def check(completion: str, answer: str) -> float:
    """Return whether the last reply is right."""
    return float(completion.strip() == answer.strip())


@compute(returns="reward")
def total_reward(
    is_right: PerSequence,
    judged_0: PerSequence,
    judged_1: PerSequence,
    judged_2: PerSequence,
) -> PerSequence:
    """Return the sum of all judgements."""
    return is_right + judged_0 + judged_1 + judged_2


@compute(returns="token_reward")
def guided_reward(
    reward: PerSequence,
    behav_logprobs: PerToken,
    ref_logprobs: PerToken,
    taught_0: PerToken,
    taught_1: PerToken,
    seqs: Sequences,
) -> PerToken:
    """Return the reward at the end, less the KL divergence from the reference and both teachers."""
    kl = sum(algo.kl_k1(behav_logprobs, other) for other in (ref_logprobs, taught_0, taught_1))
    return seqs.at_end(reward) - 0.01 * kl


recipe = Recipe(
    "eight_models",
    data,
    [
        agent,
        check,
        use(nodes.ref_inf, ref),
        *(
            use(nodes.ref_inf, m, name=f"teacher_{i}_inf", returns=f"taught_{i}")
            for i, m in enumerate(teachers)
        ),
        *(use(nodes.rew_inf, m, name=f"judge_{i}_inf", returns=f"judged_{i}") for i, m in enumerate(judges)),
        use(nodes.critic_inf, critic),
        total_reward,
        guided_reward,
        nodes.gae,
        use(nodes.critic_train, critic, minibatches=2),
        use(nodes.actor_train, actor, minibatches=2, prox="recompute"),
    ],
)
