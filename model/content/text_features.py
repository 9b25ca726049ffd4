"""Titles and categories as sparse vectors: TF-IDF of words, parts of words and categories, hashed into buckets.

A bucket is the CRC-32 of a term, so that nothing has to be kept of the terms, and a title that comes later is read as
those of the training were. Parts of words find plurals, compounds and words of the same family.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from model.content.folding import ACCENTS

BUCKETS = 16_384
PART_LETTERS = 4
PART_WEIGHT = 0.3  # a word counts 1
VOWELS = (  # of India and its neighbours, and joiners, which `re` does not count as letters
    "\u0900-\u0903\u093a-\u094f\u0951-\u0963\u0981-\u0dff"
    "\u0e31-\u0e3a\u0e47-\u0e4e\u0eb1-\u0ece\u102b-\u103e\u17b4-\u17d3\u200c\u200d\u3099\u309a"
)
WORD = re.compile(rf"[^\W_](?:[^\W_]|[{ACCENTS}{VOWELS}])*")


class Description(NamedTuple):
    """The description of an item."""

    title: str
    categories: Sequence[str] = ()


def term_counts(descriptions: Sequence[Description]) -> sparse.csr_array:
    """Count the terms of each description, parts of words for less: (n, BUCKETS) float32."""
    counts, buckets, ends = list[float](), list[int](), [0]
    for description in descriptions:
        of_one: dict[int, float] = defaultdict(float)
        for term, weight in _terms(description):
            of_one[zlib.crc32(term.encode(errors="surrogatepass")) % BUCKETS] += weight
        buckets += of_one.keys()
        counts += of_one.values()
        ends.append(len(buckets))
    parts = np.array(counts, np.float32), np.array(buckets, np.int32), np.array(ends, np.int32)
    return sparse.csr_array(parts, shape=(len(descriptions), BUCKETS))


def rarities(counts: sparse.csr_array) -> NDArray[np.float32]:
    """Return the inverse document frequency of each bucket, 0 where no description has it: (BUCKETS,)."""
    having = np.bincount(counts.indices, minlength=BUCKETS)
    rare = np.log((1 + counts.shape[0]) / np.maximum(having, 1)) * (having > 0)
    found: NDArray[np.float32] = rare.astype(np.float32)
    return found


def features(counts: sparse.csr_array, rarity: NDArray[np.float32]) -> sparse.csr_array:
    """Weigh terms by their rarity, and make each row's length 1, or 0 where all its terms are unknown: (n, BUCKETS)."""
    weighed = sparse.csr_array(counts * rarity[None, :])
    lengths = np.sqrt(np.asarray((weighed * weighed).sum(axis=1)).ravel())
    scale = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    found = sparse.csr_array(weighed * scale.astype(np.float32)[:, None])
    found.eliminate_zeros()
    return found


def _terms(description: Description) -> Iterator[tuple[str, float]]:
    """Yield the terms of a description, each with its weight."""
    for word in WORD.findall(description.title.casefold()):
        yield f"word {word}", 1.0
        padded = f" {word} "
        for begin in range(len(padded) - PART_LETTERS + 1):
            yield f"part {padded[begin : begin + PART_LETTERS]}", PART_WEIGHT
    for category in description.categories:
        yield f"category {category}", 1.0
