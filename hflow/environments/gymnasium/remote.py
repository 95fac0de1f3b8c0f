"""Runs in the interpreter that has gymnasium: observations become texts, and replies become actions."""

from __future__ import annotations

import re
from typing import Any

MAX_VALUES = 64
"""Most numbers of an observation that becomes a text without a function of the user."""
_HIGHLIGHT = re.compile(r"\x1b\[4[0-9]m(.*?)\x1b\[0m", re.DOTALL)
"""The place of the player in what an environment prints. It is put into brackets."""
_NUMBER = r"-?\d+(?:\.\d+)?"


def load(id: str, options: dict[str, Any], render: str, actions: list[str]) -> Environments:
    """Import gymnasium, make the environment once, and check that it can be played in words."""
    return Environments(id, options, render, actions)


class Environments:
    """Makes environments of one kind."""

    def __init__(self, id: str, options: dict[str, Any], render: str, actions: list[str]) -> None:
        import gymnasium
        from hflow_host import load_name

        self._id, self._options = id, options
        self._make = gymnasium.make
        self.function = load_name(render) if ":" in render else None
        modes = gymnasium.make(id, **options).metadata.get("render_modes", [])
        self.uses_ansi = render == "ansi" or (not render and "ansi" in modes and self._is_plain())
        if render == "ansi" and "ansi" not in modes:
            raise ValueError(
                f"{id} cannot render ansi, only {modes}; set render to observation or a function"
            )
        environment = self.make()
        if render not in ("", "ansi", "observation") and self.function is None:
            raise ValueError(f"render is {render!r}; use ansi, observation or FILE.py:FUNCTION")
        self.actions = _Actions(environment.action_space, actions)
        Game(self, seed=0, instructions="").message()
        environment.close()

    def make(self) -> Any:
        """Make an environment."""
        mode = {"render_mode": "ansi"} if self.uses_ansi else {}
        return self._make(self._id, **{**mode, **self._options})

    def open(self, seed: int, instructions: str) -> Game:
        """Begin a game."""
        return Game(self, seed, instructions)

    def text(self, environment: Any, observation: Any) -> str:
        """Return the text of an observation."""
        if self.function is not None:
            text = self.function(observation)
        elif self.uses_ansi:
            text = environment.render()
        else:
            text = _value_text(observation)
        if not isinstance(text, str):
            raise TypeError(
                f"an observation became {type(text).__name__} and no text; set render to a function"
            )
        text = _HIGHLIGHT.sub(r"[\1]", text).strip()
        if "\x1b" in text:
            raise ValueError(
                f"{self._id} prints colours, which a text has not; set render to observation or a function"
            )
        return text

    def _is_plain(self) -> bool:
        """Return whether what the environment prints means the same without colours."""
        self.uses_ansi = True
        try:
            Game(self, seed=0, instructions=" ")
        except ValueError:
            return False
        return True


class Game:
    """One episode of an environment."""

    def __init__(self, environments: Environments, seed: int, instructions: str) -> None:
        self._environments = environments
        self._environment = environments.make()
        observation, _ = self._environment.reset(seed=seed)
        self._text = environments.text(self._environment, observation)
        self._instructions = instructions or environments.actions.instructions

    def message(self) -> str:
        """Return the instructions and the observation."""
        return f"{self._instructions}\n{self._text}"

    def step(self, reply: str) -> dict[str, Any]:
        """Do what a reply says. The message is the next observation, or that the reply has no action."""
        actions = self._environments.actions
        action = actions.read(reply)
        if action is None:
            return {"message": self.message(), "reward": 0.0, "is_end": False, "is_action": False}
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        self._text = self._environments.text(self._environment, observation)
        is_end = bool(terminated or truncated)
        return {"message": self._text, "reward": float(reward), "is_end": is_end, "is_action": True}


class _Actions:
    """Reads actions from replies."""

    def __init__(self, space: Any, names: list[str]) -> None:
        self._space = space
        self._kind = type(space).__name__
        self._names = names
        if names and (self._kind != "Discrete" or len(names) != space.n):
            raise ValueError(f"actions has {len(names)} names, but the action space is {space}")
        if self._kind == "Discrete":
            first = int(space.start)
            known = names or [str(first + i) for i in range(int(space.n))]
            self._values = {name.lower(): first + i for i, name in enumerate(known)}
            longest_first = sorted(known, key=len, reverse=True)
            self._pattern = re.compile(
                r"(?<![\w-])(?:" + "|".join(map(re.escape, longest_first)) + r")(?!\w)", re.IGNORECASE
            )
            self.instructions = f"Reply with one of: {', '.join(known)}."
        elif self._kind in ("Box", "MultiDiscrete", "MultiBinary"):
            self._count = 1
            for size in space.shape:
                self._count *= size
            if self._count > MAX_VALUES:
                raise ValueError(f"the action space {space} has more than {MAX_VALUES} numbers")
            self.instructions = f"Reply with {self._count} numbers. They are an action of {space}."
        elif self._kind == "Text":
            self.instructions = "Reply with a text."
        else:
            raise ValueError(f"the action space {space} has no form in words; wrap the environment")

    def read(self, reply: str) -> Any:
        """Return the last action in a reply; None if there is none."""
        if self._kind == "Discrete":
            found = self._pattern.findall(reply)
            return self._values[found[-1].lower()] if found else None
        if self._kind == "Text":
            return reply.strip() if self._space.contains(reply.strip()) else None
        import numpy

        numbers = re.findall(_NUMBER, reply)[-self._count :]
        if len(numbers) < self._count:
            return None
        action = numpy.array(list(map(float, numbers))).reshape(self._space.shape).astype(self._space.dtype)
        return action if self._space.contains(action) else None


def _value_text(observation: Any) -> str:
    """Return the text of a small observation.

    Raises:
        TypeError: for one that is no small text, number, or array or collection of them.
    """
    import numpy

    if isinstance(observation, str):
        return observation
    if isinstance(observation, dict):
        return "\n".join(f"{key}: {_value_text(value)}" for key, value in observation.items())
    if isinstance(observation, tuple):
        return ", ".join(map(_value_text, observation))
    array = numpy.asarray(observation)
    if array.dtype == object or array.size > MAX_VALUES:
        raise TypeError(
            f"an observation is {type(observation).__name__} of shape {array.shape}, which has no short "
            "text; set render to FILE.py:FUNCTION, a function that returns its text"
        )
    return numpy.array2string(array, precision=3, separator=", ", max_line_width=200)
