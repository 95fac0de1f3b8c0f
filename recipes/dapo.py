"""DAPO: groups without reward spread are refused and replaced, clip-higher, overlong shaping.

    hflow run recipes/dapo.py

Starts from the checkpoint of `recipes/sft.py`, like `recipes/grpo.py`. DAPO changes GRPO in four ways:

- Dynamic sampling: `has_spread` refuses a group whose answers are all right or all wrong, and generation
  continues until the batch is full.
- Clip-higher: the ratio may rise above 1 by more (`clip_high`) than it may fall below 1 (`clip`).
- The loss is a mean over tokens.
- Overlong shaping: the reward loses nothing up to `limit - buffer` tokens, and up to 1 at `limit`. Answers
  that were cut off are masked.

Expect the held-out accuracy to rise from 0.52 to about 0.90 in 140 steps.

Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", equations 8 to 13.
"""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns=("reward", "train_mask"))
def shaped(right: float, overlong: float, stop_reason: str) -> tuple[float, bool]:
    return 2 * right - 1 + overlong, stop_reason != "length"


@compute(per="group", returns="keep")
def has_spread(right: list[float]) -> bool:
    return 0 < sum(right) < len(right)


recipe = Recipe(
    "dapo",
    data,
    [
        use(nodes.actor_gen, actor, group=8, max_tokens=8),
        use(rewards.exact, name="right", returns="right"),
        use(rewards.overlong, limit=8, buffer=4),
        shaped,
        has_spread,
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=2, prox="none", clip_high=0.28, mask="train_mask"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
