"""Text of the grid world's observations, and its actions, for the environment's interpreter."""

MOVES = ("UP", "DOWN", "LEFT", "RIGHT")


def cell(observation: dict[str, int]) -> str:
    """Return the cell as two digits."""
    return f"{observation['x']}{observation['y']}"


def move(reply: str) -> dict[str, str] | None:
    """Return the action of a digit: its remainder by 4 is the direction. None for another reply."""
    return {"action": MOVES[int(reply) % 4]} if reply.isdigit() else None
