"""Search over the titles and field names of pages (BM25). Attribute values are not indexed.

Equal scores are ordered by document id, so that the same query always gives the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import bm25s
import numpy as np
import Stemmer

_TOKEN = r"(?u)\b\w+\b"


class Searcher(Protocol):
    def search(self, query: str, topk: int) -> tuple[str, ...]:
        """At most `topk` urls, best first; none where no word of the query is known."""
        ...


class Bm25Searcher:
    """BM25 with English stemming: `Bm25Searcher(["w/1"], ["airports in Ohio"]).search("ohio airports", 3)`."""

    def __init__(self, urls: Sequence[str], texts: Sequence[str]) -> None:
        """`texts[k]` is what document k, at `urls[k]`, is found by."""
        self._urls = tuple(urls)
        self._stemmer = Stemmer.Stemmer("english")
        tokens = bm25s.tokenize(
            list(texts), token_pattern=_TOKEN, stopwords=[], stemmer=self._stemmer, show_progress=False
        )
        self._index = bm25s.BM25()
        self._index.index(tokens, show_progress=False)

    def search(self, query: str, topk: int) -> tuple[str, ...]:
        words = bm25s.tokenize(
            [query],
            token_pattern=_TOKEN,
            stopwords=[],
            stemmer=self._stemmer,
            return_ids=False,
            show_progress=False,
        )[0]
        known = [w for w in words if isinstance(w, str) and w in self._index.vocab_dict]
        if not known or topk < 1:
            return ()
        scores_D = self._index.get_scores(known)
        k = min(topk, len(scores_D))
        floor = -np.partition(-scores_D, k - 1)[k - 1]  # from below it is slow: most scores are 0
        best = np.flatnonzero((scores_D >= floor) & (scores_D > 0))
        order = np.lexsort((best, -scores_D[best]))[:k]
        return tuple(self._urls[int(d)] for d in best[order])
