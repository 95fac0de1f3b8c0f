"""`read_scores`: what an evaluation's nodes gave its samples: means, their errors, and pass@k."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hflow.runtime.ledger.schema import reading, survives

PassAtK = Callable[[int, int, int], float]
"""(samples, correct samples, k) -> the estimate of pass@k for one prompt."""


@dataclass(frozen=True)
class FieldScores:
    """The numbers that one node gave the samples of a stream."""

    field: str
    mean: float
    """Mean over prompts of the mean of each prompt's samples."""
    error: float | None
    """Standard error of this mean, from the spread over prompts; None: there is one prompt."""
    num_prompts: int
    """Prompts with at least one number."""
    pass_at: Mapping[int, float]
    """k -> mean of pass@k over the same prompts for every k: those with as many numbers as the largest k."""
    pass_at_prompts: int
    """The number of these prompts."""


@dataclass(frozen=True)
class StreamScores:
    """The scores of one stream."""

    stream: str
    dataset: str | None
    group_size: int
    """Samples that were drawn of each prompt."""
    num_prompts: int
    """Prompts with at least one sample that was not refused."""
    num_samples: int
    """Samples that were not refused."""
    num_refused: int
    """Samples that a node refused: they are in no mean, since a failure is not a score of 0."""
    fields: tuple[FieldScores, ...]


def read_scores(
    path: Path, pass_at_k: PassAtK, threshold: float = 1.0, pass_at: Sequence[int] = ()
) -> tuple[StreamScores, ...]:
    """Return the scores of all streams that a run has evaluated, of their last evaluation.

    Args:
        threshold: lowest number with which a sample is correct.
        pass_at: values of k, of which those up to the samples of a prompt count; empty: powers of two, if
            there are several samples.

    Raises:
        ConfigError: for a ledger that cannot be read.
    """
    with reading(path) as database:
        streams = database.execute("SELECT id, name, dataset, group_size FROM streams").fetchall()
        scores = []
        for stream, name, dataset, group_size in streams:
            (version,) = database.execute(
                "SELECT MAX(step) FROM ends AS e WHERE stream = ? AND kind = 'evaluated' "
                f"AND {survives('e')}",
                (stream,),
            ).fetchone()
            ended = dict(
                database.execute(
                    f"SELECT kind, COUNT(*) FROM ends AS e WHERE stream = ? AND {survives('e')} "
                    "AND (kind <> 'evaluated' OR step = ?) GROUP BY kind",
                    (stream, version),
                )
            )
            rows = database.execute(
                f"""
                SELECT n.field, e.sample / ?, c.value FROM ends AS e
                JOIN nodes AS n ON n.stream = e.stream AND NOT n.per_group AND n.field IS NOT NULL
                JOIN computed AS c ON c.node = n.id AND c.key = e.sample AND {survives("c")}
                WHERE e.stream = ? AND e.kind = 'evaluated' AND e.step = ? AND {survives("e")}
                AND c.value IS NOT NULL ORDER BY n.id""",
                (group_size, stream, version),
            )
            numbers: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
            for field, prompt, value in rows:
                numbers[field][prompt].append(value)
            ks = [k for k in pass_at or _powers_of_two(group_size) if k <= group_size]
            fields = [
                _score(field, list(prompts.values()), pass_at_k, threshold, ks)
                for field, prompts in numbers.items()
            ]
            num_prompts = max((len(prompts) for prompts in numbers.values()), default=0)
            scores.append(
                StreamScores(
                    name,
                    dataset,
                    group_size,
                    num_prompts,
                    ended.get("evaluated", 0),
                    ended.get("refused", 0),
                    tuple(fields),
                )
            )
    return tuple(scores)


def _score(
    field: str,
    prompts: Sequence[Sequence[float]],
    pass_at_k: PassAtK,
    threshold: float,
    ks: Sequence[int],
) -> FieldScores:
    """Return the scores of one field, given the values of each prompt's samples.

    Where samples were refused, prompts differ in how many they have. A mean over other prompts for each k
    could fall with k, so that prompts with fewer than the largest k are left out for all of them.
    """
    means = [statistics.fmean(values) for values in prompts]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    correct = [(len(values), sum(value >= threshold for value in values)) for values in prompts]
    ks = [k for k in ks if k <= max(n for n, _ in correct)]
    whole = [(n, c) for n, c in correct if n >= max(ks)] if ks else []
    return FieldScores(
        field,
        statistics.fmean(means),
        error,
        len(prompts),
        {k: statistics.fmean(pass_at_k(n, c, k) for n, c in whole) for k in ks},
        len(whole),
    )


def _powers_of_two(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... and the largest number itself, if there is more than one."""
    k = 1
    while most > 1 and k < most:
        yield k
        k *= 2
    if most > 1:
        yield most
