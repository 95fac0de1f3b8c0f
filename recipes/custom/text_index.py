"""A small index of texts by similarity: TF-IDF over pairs of characters.

`retrieval.py`, beside it, imports this module on every worker.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator


class TextIndex:
    """Finds the texts that are most similar to a query.

    Args:
        texts: what can be found.
        keys: what a query is compared with, one for each text. Default: the texts.
    """

    def __init__(self, texts: Iterable[str], keys: Iterable[str] | None = None) -> None:
        self.texts = tuple(texts)
        counts = [Counter(terms(key)) for key in (self.texts if keys is None else keys)]
        frequency = Counter(term for count in counts for term in count)
        self._idf = {term: math.log(1 + len(counts) / num) for term, num in frequency.items()}
        self._weights: dict[str, list[tuple[int, float]]] = defaultdict(list)
        """Term -> the texts that have it, with its share of a text of length 1."""
        for number, count in enumerate(counts):
            weights = {term: self._idf[term] * num for term, num in count.items()}
            length = math.sqrt(sum(weight**2 for weight in weights.values()))
            for term, weight in weights.items():
                self._weights[term].append((number, weight / length))

    def search(self, query: str, top: int = 1) -> list[str]:
        """Return the `top` most similar texts, the best first; of equally similar ones the earlier."""
        scores: dict[int, float] = defaultdict(float)
        for term, num in Counter(terms(query)).items():
            for number, weight in self._weights.get(term, ()):
                scores[number] += num * self._idf[term] * weight
        best = sorted(scores, key=lambda number: (-scores[number], number))[:top]
        return [self.texts[number] for number in best]


def terms(text: str) -> Iterator[str]:
    """Yield the pairs of neighbouring characters of a text, the start of the text included."""
    marked = f"^{text}"
    yield from (marked[i : i + 2] for i in range(len(text)))
