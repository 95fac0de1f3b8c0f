"""Colours of the page: distinguishable with colour blindness, enough contrast of texts, in both themes."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

BASE = Path(__file__).parents[2] / "hflow" / "report" / "html" / "plan" / "templates" / "base.css"
PAIRS = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", BASE.read_text())
THEMES = {"light": {name: light for name, light, _ in PAIRS}, "dark": {name: dark for name, _, dark in PAIRS}}
CATEGORIES = [f"c{i}" for i in range(1, 9)]

SIGHT = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""What is seen of linear RGB (Machado, Oliveira, Fernandes 2009, full severity)."""
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
"""Linear RGB to cone responses, and their cube roots to OKLab (Ottosson 2020)."""


def linear(colour: str) -> np.ndarray:
    """An sRGB colour, `#rrggbb`, as linear RGB."""
    part = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(colour: str, sight: str) -> np.ndarray:
    seen = np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1)
    return TO_LAB @ np.cbrt(TO_LMS @ seen)


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours, 1 to 21."""
    low, high = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(c)) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_known_answers():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert lab("#ffffff", "full") == pytest.approx([1, 0, 0], abs=1e-3)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", THEMES)
def test_categories_differ(theme, sight):
    """A distance of 0.02 in OKLab is just seen; red and green that look alike are below 0.05."""
    colours = {name: lab(THEMES[theme][name], sight) for name in CATEGORIES}
    near = {
        (a, b): float(np.linalg.norm(colours[a] - colours[b]))
        for a, b in combinations(CATEGORIES, 2)
        if np.linalg.norm(colours[a] - colours[b]) < 0.09
    }
    assert near == {}


@pytest.mark.parametrize("theme", THEMES)
def test_texts_can_be_read(theme):
    """WCAG asks for 4.5."""
    colours = THEMES[theme]
    for text in ("ink", "quiet", "accent", "bad"):
        for ground in ("paper", "surface", "sunken"):
            assert contrast(colours[text], colours[ground]) >= 4.5, f"{text} on {ground}"
