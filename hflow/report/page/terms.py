"""The words of the page, explained to somebody who never saw hflow."""

from __future__ import annotations

TERMS: tuple[tuple[str, str], ...] = (
    ("step", "One round: samples are generated and scored, then the models learn from them once."),
    ("period", "Seconds from one step to the next once the run has settled. Steps may overlap."),
    (
        "critical cycle",
        "The loop of nodes that sets the period: each waits for the one before it, and the first, in "
        "the next step, for the last. Making anything else faster changes nothing.",
    ),
    ("throughput", "Samples and tokens that a settled run works through in a second."),
    ("peak", "The most memory that any one device holds in any phase, beside what it has."),
    (
        "staleness",
        "How many versions of the weights may lie between the one that wrote a token and the one that learns "
        "from it. 0 is on policy: answers are always those of the newest weights.",
    ),
    ("node", "One function of the recipe. What it reads and returns are its edges."),
    ("lag", "How many steps an edge crosses: with lag 1, what one step made is read by the next."),
    ("replica", "One copy of a model on some devices: actor@train learns, actor@gen writes answers."),
    (
        "layout",
        "How a replica is split over devices: d2t4p1 is 2 copies of the data axis, each with 4 tensor shards "
        "and 1 pipeline stage.",
    ),
    ("dp-head", "The device of a data rank that receives its samples and returns its results."),
    ("group", "Devices whose replicas take turns in a fixed order."),
    (
        "redistribution",
        "Moving samples to the devices that need them next. "
        "The lower bound is what no balanced split avoids.",
    ),
    ("weight route", "Which slice of which tensor goes from training devices to generating ones."),
    ("phase", "A part of a step with memory needs of its own: generation, waking, or one batch node."),
    ("digest", "A fingerprint of all that decides a run. Equal digests run alike."),
)
"""(word, explanation)."""
