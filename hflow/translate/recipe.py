"""`RecipeDraft`: the recipe and the settings that a translation leads to, and their text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

_SCORE = '''@compute(per="sample", timeout=60.0, returns="reward")
def score(completion: str) -> float:
    """Return the reward of an answer. A column that it needs, as `answer: str`, is declared in `train`."""
    raise NotImplementedError("write the reward")'''

_BODIES = {
    "ended": '''@compute(per="sample", returns="ended")
def ended(stop_reason: str) -> bool:
    """Return whether an answer ended by itself. Others are left out of the loss."""
    return stop_reason != "length"''',
    "has_spread": '''@compute(per="group", returns="keep")
def has_spread(reward: list[float]) -> bool:
    """Return whether the rewards of a prompt differ. Other prompts are replaced."""
    return min(reward) < max(reward)''',
    "reward_at_end": '''@compute(returns="token_reward")
def reward_at_end(reward: PerSequence, seqs: Sequences) -> PerToken:
    """Return the reward on the last token of each answer."""
    return seqs.at_end(reward)''',
    "unweighted": '''@compute(returns="behav_weights")
def unweighted(prox_logprobs: PerToken) -> PerToken:
    """Return the weight 1 for each token: the loss is not corrected for the engine's log-probs."""
    return prox_logprobs.new_ones(prox_logprobs.shape)''',
}
"""Functions that a recipe may need, in the order of their use."""


@dataclass
class RecipeDraft:
    """A recipe that trains an actor with a reward of the user, as nodes to choose from and their settings."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted key of the configuration -> value."""
    advantage: str = "group_advantage"
    """The node that returns advantages."""
    loss: str = "actor_train"
    """The train node of the actor."""
    has_reference: bool = False
    kl_in_reward: bool = False
    has_critic: bool = False
    is_critic_of_actor: bool = True
    """Whether the critic starts from the actor's weights."""
    weights: Literal["unweighted", "behav_weights"] | None = None
    """The node that weighs tokens, in the place of `exp(prox - behav)`."""
    is_trusted: bool = False
    """Whether the node `is_trusted` masks tokens."""
    resamples: bool = False
    """Whether the node `resample` says how often each sample counts."""
    filters_groups: bool = False
    masks_truncated: bool = False
    evaluates: bool = False

    def set(self, key: str, value: Any) -> None:
        """Set a key of the configuration."""
        self.settings[key] = value

    def set_loss(self, **knobs: Any) -> None:
        """Set knobs and options of the train node."""
        self.settings |= {f"nodes.{self.loss}.{name}": value for name, value in knobs.items()}

    def delay_training(self, steps: int) -> None:
        """Let the actor's training begin after some steps, with the nodes that read `prox_logprobs`."""
        readers = [self.weights, "is_trusted" if self.is_trusted else None, self.loss]
        self.settings |= {f"nodes.{node}.after": steps for node in readers if node is not None}

    @property
    def needs_token_rewards(self) -> bool:
        """Whether the advantages are made of a reward per token."""
        return self.advantage in ("gae", "returns_to_go")

    def recipe_text(self, name: str, origin: str) -> str:
        """Return the Python file of a recipe with this name; the docstring says its origin."""
        bodies = [
            text
            for body, text in _BODIES.items()
            if {
                "ended": self.masks_truncated,
                "has_spread": self.filters_groups,
                "reward_at_end": self.needs_token_rewards and not self.kl_in_reward,
                "unweighted": self.weights == "unweighted",
            }[body]
        ]
        text = "\n\n\n".join([_SCORE, *bodies])
        names = ["Dataset", "Messages", "Model", "Recipe", "compute", "nodes", "use"]
        names += [name for name in ("PerSequence", "PerToken", "Sequences") if f": {name}" in text]
        lines = [  # names are sorted as ruff does: classes before functions
            f'"""Translated from {origin}: the body of `score` is left to write, see there."""',
            "",
            f"from hflow import {', '.join(sorted(names, key=lambda name: (name.islower(), name)))}",
            "",
            'train = Dataset("train", prompt=Messages)',
            *(['heldout = Dataset("heldout", prompt=Messages)'] if self.evaluates else []),
            'actor = Model("actor", trainable=True)',
            *self._models(),
            "\n",
            text,
            "\n",
            "recipe = Recipe(",
            f'    "{name}",',
            "    train,",
            "    [",
            *(f"        {node}," for node in self._nodes()),
            "    ],",
            ")",
            "",
        ]
        return "\n".join(lines)

    def _models(self) -> list[str]:
        source = ", init_from=actor" if self.is_critic_of_actor else ""
        return [
            *([f'critic = Model("critic", head="value", trainable=True{source})'] if self.has_critic else []),
            *(['ref = Model("ref", init_from=actor)'] if self.has_reference else []),
        ]

    def _nodes(self) -> list[str]:
        unbootstrapped = 'returns=("values", "end_values")'
        chosen = [
            ('use(nodes.chat_gen, actor, name="actor_gen")', True),
            ("score", True),
            ("has_spread", self.filters_groups),
            ("ended", self.masks_truncated),
            ("use(nodes.ref_inf, ref)", self.has_reference),
            (f"use(nodes.critic_inf, critic, {unbootstrapped})", self.has_critic),
            ("nodes.kl_reward", self.kl_in_reward),
            ("reward_at_end", self.needs_token_rewards and not self.kl_in_reward),
            ("use(nodes.logit_gradient_inf, actor)", self.advantage == "optimal_token_advantage"),
            (f"nodes.{self.advantage}", True),
            ("unweighted", self.weights == "unweighted"),
            ("nodes.behav_weights", self.weights == "behav_weights"),
            ("nodes.is_trusted", self.is_trusted),
            ("nodes.resample", self.resamples),
            ("use(nodes.critic_train, critic)", self.has_critic),
            (f"use(nodes.{self.loss}, actor)", True),
            ('use(nodes.chat_gen, actor, name="eval_gen", data=heldout)', self.evaluates),
            ('use(score, name="accuracy", on="eval_gen", returns="accuracy")', self.evaluates),
        ]
        return [node for node, is_used in chosen if is_used]
