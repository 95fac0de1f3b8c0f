"""The outline of a node's card. Each verb has its own, so that colour is not the only distinction."""

from __future__ import annotations

from collections.abc import Mapping

VERBS: Mapping[str, str] = {
    "generate": "an engine writes answers to prompts",
    "encode": "texts become tokens, no model is asked",
    "compute": "plain Python or tensor code, such as rewards and advantages",
    "infer": "a forward pass without learning",
    "train": "forward, backward and optimizer steps: the weights change",
    "update": "weights are blended into another copy, as in a moving average",
    "own": "a kind of node that the recipe defines",
}
"""Verb -> what such a node does."""


def known_verb(verb: str) -> str:
    """Return the verb, or `own` for a user's node type."""
    return verb if verb in VERBS else "own"


def outline(verb: str, width: float, height: float) -> str:
    """Return an SVG path around a box at (0, 0)."""
    corners = {
        "generate": _round(width, height, (14, 14, 14, 14)),
        "encode": _round(width, height, (14, 3, 3, 14)),
        "infer": _cut(width, height, (9, 9, 9, 9)),
        "update": _cut(width, height, (14, 0, 14, 0)),
        "train": _round(width, height, (3, 14, 14, 3)),
    }
    return corners.get(verb, _round(width, height, (3, 3, 3, 3)))


def _round(w: float, h: float, radii: tuple[int, int, int, int]) -> str:
    a, b, c, d = radii
    return (
        f"M{a} 0H{w - b:g}A{b} {b} 0 0 1 {w:g} {b}V{h - c:g}A{c} {c} 0 0 1 {w - c:g} {h:g}"
        f"H{d}A{d} {d} 0 0 1 0 {h - d:g}V{a}A{a} {a} 0 0 1 {a} 0Z"
    )


def _cut(w: float, h: float, cuts: tuple[int, int, int, int]) -> str:
    a, b, c, d = cuts
    return f"M{a} 0H{w - b:g}L{w:g} {b}V{h - c:g}L{w - c:g} {h:g}H{d}L0 {h - d:g}V{a}Z"
