"""Self-play: two policies duel over a sum, and each learns from who came closer.

    hflow run recipes/self_play.py

One episode has two engines: both policies answer at once, and every duel leaves a trajectory in each
of two streams, on which their owners train. What one wins the other loses, and a tie is worth
nothing. Both start from the checkpoint of `recipes/sft.py`; expect both greedy accuracies on
held-out sums (`alice_eval/accuracy`, `bob_eval/accuracy`) to rise.
"""

import asyncio

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
alice = Model("alice", trainable=True)
bob = Model("bob", trainable=True)


def distance(said: str, answer: str) -> float:
    """How far a number is from the right one; what is no number is farther than any."""
    return abs(int(said) - int(answer)) if said.isdigit() else 10.0**6


@generate(alice, bob, group=8, returns=("alice_play", "bob_play", "outcome"))
async def duel(alice: Engine, bob: Engine, prompt: str, answer: str) -> tuple[Trajectory, Trajectory, float]:
    first, second = await asyncio.gather(alice.complete(prompt), bob.complete(prompt))
    one, other = distance(first.completion, answer), distance(second.completion, answer)
    return first, second, float(one < other) - float(one > other)


@compute(per="sample", on="alice_play", returns="reward")
def alice_reward(outcome: float) -> float:
    return outcome


@compute(per="sample", on="bob_play", returns="reward")
def bob_reward(outcome: float) -> float:
    return -outcome


@compute(per="sample", on="alice_eval", returns="accuracy")
def accuracy(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "self_play",
    data,
    [
        duel,
        alice_reward,
        bob_reward,
        use(nodes.group_advantage, name="alice_advantage", on="alice_play"),
        use(nodes.group_advantage, name="bob_advantage", on="bob_play"),
        use(nodes.actor_train, alice, name="alice_train", on="alice_play", minibatches=2, prox="none"),
        use(nodes.actor_train, bob, name="bob_train", on="bob_play", minibatches=2, prox="none"),
        use(nodes.actor_gen, alice, name="alice_eval", data=heldout, every=20, temperature=0.0),
        use(nodes.actor_gen, bob, name="bob_eval", data=heldout, every=20, temperature=0.0),
        accuracy,
        use(accuracy, name="bob_accuracy", on="bob_eval", returns="accuracy"),
    ],
)
