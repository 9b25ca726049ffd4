"""Millions of strings without an object for each: the ids, titles and categories of items.

A Python string of twelve letters takes 61 bytes, and its entry in a dict some 100 more. In a table it takes its twelve
bytes, four for its end, and five in the index.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import overload

import numba
import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.artifact.letter_pairs import LetterPairs
from model.content.folding import fold

DECODE_CHUNK = 4096  # strings
CHECK_CHUNK = 1 << 24  # bytes
MAX_LOAD = 0.8  # the largest share of an index's slots that are taken
FREE_SLOT = -1
# How a string matches a search, the closest first: as a whole, by its beginning, by that of a word, by any part; by all
# words of the search, each of which begins a word of the string, or is a part of one; and by these with typos.
EXACT, PREFIX, WORD_PREFIX, SUBSTRING, EACH_WORD_PREFIX, EACH_SUBSTRING, TYPO, NO_MATCH = range(8)
FNV_BASIS, FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # of FNV-1a
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio
HALF = np.uint64(32)  # of the bits of a hash
SPACE = ord(" ")


class StringTable(Sequence[str]):
    """N strings in one buffer.

    buffer  (bytes,)  uint8, UTF-8, the concatenated strings
    ends    (N + 1,)  uint32 or uint64: string n is between ends[n] and ends[n + 1]
    """

    def __init__(self, buffer: NDArray[np.uint8], ends: NDArray[np.unsignedinteger]) -> None:
        self.buffer, self.ends = buffer, ends
        self._bytes = buffer.data  # slicing it is faster than slicing an array

    @classmethod
    def of(cls, strings: Iterable[str] | pl.Series) -> StringTable:
        """Pack the strings. Only a series is packed by polars, whose threads do not survive a fork."""
        if isinstance(strings, pl.Series):
            buffer = np.frombuffer((strings.str.join().item() or "").encode(), np.uint8)
            return cls(buffer, ends_of(strings.str.len_bytes().to_numpy()))
        encoded = [text.encode() for text in strings]
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends_of(np.fromiter(map(len, encoded), np.uint32)))

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[row] for row in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(f"{len(self)} names have no place {place}")
        begin, end = self.ends[place : place + 2].tolist()
        return str(self._bytes[begin:end], "utf-8")

    def at(self, places: NDArray[np.integer]) -> list[str]:
        """Return the strings at these places, all of which exist, in order."""
        begins, ends = self.ends[places].tolist(), self.ends[places + 1].tolist()
        return [str(self._bytes[begin:end], "utf-8") for begin, end in zip(begins, ends, strict=True)]

    def __iter__(self) -> Iterator[str]:
        for begin in range(0, len(self), DECODE_CHUNK):
            ends = self.ends[begin : begin + DECODE_CHUNK + 1]
            part = self.buffer[ends[0] : ends[-1]].tobytes()
            yield from (part[one:other].decode() for one, other in pairwise((ends - ends[0]).tolist()))

    def require_intact(self) -> None:
        """Raise ValueError if a string is outside the buffer, or is not UTF-8."""
        ends = self.ends
        if not len(ends) or ends[-1] != len(self.buffer) or not is_ascending(ends):
            raise ValueError("the ends of the names are wrong")
        decoder = getincrementaldecoder("utf-8")()
        for begin in range(0, len(self.buffer), CHECK_CHUNK):
            decoder.decode(self.buffer[begin : begin + CHECK_CHUNK].tobytes())
        decoder.decode(b"", final=True)
        begins = ends[:-1][ends[:-1] < len(self.buffer)]
        if (self.buffer[begins] & 0xC0 == 0x80).any():
            raise ValueError("a name begins in the middle of a character")

    def match_levels(self, wanted: str) -> NDArray[np.uint8]:
        """Return how each string matches a text as a whole, ignoring case: (N,), from EXACT to SUBSTRING, or NO_MATCH.

        If the text has a rare pair of letters, its occurrences are found without scanning the strings one by one.
        """
        folded, text = self.folded, fold(wanted).encode()
        found = folded.pairs.occurrences(text)
        if found is None:
            return folded.match_levels_folded(wanted)
        rows, begins = found
        levels, of_text = np.full(len(self), NO_MATCH, np.uint8), np.full(len(rows), SUBSTRING, np.uint8)
        places = folded.ends[rows].astype(np.int64) + begins
        of_text[(begins > 0) & (folded.buffer[places - 1] == SPACE)] = WORD_PREFIX
        of_text[begins == 0] = PREFIX
        of_text[(begins == 0) & (folded.ends[rows + 1] == places + len(text))] = EXACT
        np.minimum.at(levels, rows, of_text)
        return levels

    def match_levels_folded(self, wanted: str, rows: NDArray[np.int64] | None = None) -> NDArray[np.uint8]:
        """Do what `match_levels` does, for strings that are case-folded already: all, or those in these rows."""
        text = np.frombuffer(fold(wanted).encode(), np.uint8)
        shifts = np.full(256, max(len(text), 1))
        shifts[text[:-1]] = np.arange(len(text) - 1, 0, -1)
        found = np.empty(len(self) if rows is None else len(rows), np.uint8)
        if rows is None:
            _match_levels(self.buffer, self.ends, text, shifts, found)
        else:
            _match_levels_of(self.buffer, self.ends, rows, text, shifts, found)
        return found

    @cached_property
    def pairs(self) -> LetterPairs:
        """An index that finds the strings with a text without reading all of them."""
        return LetterPairs(self.buffer, self.ends)

    @cached_property
    def folded(self) -> StringTable:
        """The case-folded strings, see `fold`."""
        plain = self.buffer.tobytes()
        if not plain.isascii():
            return StringTable.of(map(fold, self))
        lower = plain.lower()
        return self if lower == plain else StringTable(np.frombuffer(lower, np.uint8), self.ends)


class StringIndex(Mapping[str, int]):
    """The rows of distinct strings, in a hash table with open addressing."""

    def __init__(self, names: StringTable, table: NDArray[np.int32]) -> None:
        self._names, self.table = names, table
        self.get("x"), self.rows_of(["x"])  # compile before a request waits for it

    @classmethod
    def of(cls, names: StringTable) -> StringIndex:
        """Index the strings."""
        table = np.full(max(int(len(names) / MAX_LOAD), 1) + 1, FREE_SLOT, np.int32)
        fill(names.buffer, names.ends, table)
        return cls(names, table)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> int:
        row: int = find(self._names.buffer, self._names.ends, self.table, name.encode())
        if row == FREE_SLOT:
            raise KeyError(name)
        return row

    def get(self, name: str, default: int | None = None) -> int | None:  # type: ignore[override]
        """Return the row of a string, or the default."""
        row: int = find(self._names.buffer, self._names.ends, self.table, name.encode())
        return default if row == FREE_SLOT else row

    def rows_of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the rows of the known strings among these, in their order."""
        rows = self.places_of(names)
        known: NDArray[np.int64] = rows[rows != FREE_SLOT]
        return known

    def places_of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the row of each string, FREE_SLOT for unknown ones."""
        wanted, ends = joined(names)
        rows: NDArray[np.int64] = _find_each(self._names.buffer, self._names.ends, self.table, wanted, ends)
        return rows


class Labels(Sequence[tuple[str, ...]]):
    """Any number of labels for each of N items, and the items of each label.

    names  the distinct labels
    codes  (M,)     rows of ``names``, item by item
    ends   (N + 1,) item n has the codes between ends[n] and ends[n + 1]
    items  (M,)     rows of items, label by label
    """

    def __init__(
        self,
        names: StringTable,
        codes: NDArray[np.integer],
        ends: NDArray[np.unsignedinteger],
        items: NDArray[np.int32],
    ) -> None:
        self.names, self.codes, self.ends, self.items = names, codes, ends, items
        self._code_of = {name: code for code, name in enumerate(names)}
        self._first = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(names)))])

    @classmethod
    def of(cls, labels: Iterable[Sequence[str]] | pl.Series) -> Labels:
        """Pack the labels of each item."""
        kind = pl.List(pl.String)
        series = labels if isinstance(labels, pl.Series) else pl.Series([list(names) for names in labels], dtype=kind)
        counts = series.list.len().to_numpy()
        flat = series.filter(series.list.len() > 0).explode()
        names = flat.unique(maintain_order=True).to_list()
        codes = flat.cast(pl.Enum(names)).to_physical().to_numpy()
        kind_of_code = np.uint8 if len(names) <= 256 else np.int32
        owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        items = owners[np.argsort(codes, kind="stable")]
        return cls(StringTable.of(names), codes.astype(kind_of_code), ends_of(counts), items)

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, place: int) -> tuple[str, ...]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[str, ...]]: ...
    def __getitem__(self, place: int | slice) -> tuple[str, ...] | list[tuple[str, ...]]:
        if isinstance(place, slice):
            return [self[row] for row in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(f"{len(self)} items have no place {place}")
        codes = self.codes[self.ends[place] : self.ends[place + 1]]
        return tuple(self.names[code] for code in codes.tolist())

    def at(self, rows: NDArray[np.int64]) -> list[tuple[str, ...]]:
        """Return the labels of these items."""
        codes, ends = self.of_rows(rows)
        labels = self.names.at(codes)
        return [tuple(labels[begin:end]) for begin, end in pairwise(ends.tolist())]

    def number(self, label: str) -> int | None:
        """Return the label's row in ``names``; None for an unknown label."""
        return self._code_of.get(label)

    def of_rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the concatenated codes (M,) of these items, and their ends (rows + 1,)."""
        ends = np.zeros(len(rows) + 1, np.int64)
        return _gather(self.codes, self.ends, rows, ends), ends

    def items_with(self, label: str) -> NDArray[np.int32]:
        """Return the rows of the items that have the label; none for an unknown label."""
        code = self._code_of.get(label)
        return self.items[:0] if code is None else self.items_of(code)

    def items_of(self, number: int) -> NDArray[np.int32]:
        """Return the rows of the items that have the label of this number."""
        return self.items[self._first[number] : self._first[number + 1]]


def joined(strings: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the concatenated strings, and their ends (N + 1,)."""
    text, parts = "".join(strings), strings
    if not text.isascii():
        parts = [string.encode() for string in strings]  # type: ignore[misc]
    ends = np.fromiter(accumulate(map(len, parts), initial=0), np.int64, len(parts) + 1)
    return np.frombuffer(text.encode(), np.uint8), ends


def is_ascending(ends: NDArray[np.unsignedinteger]) -> bool:
    """Return whether the ends begin with 0 and never decrease."""
    return bool(ends[0] == 0 and (ends[1:] >= ends[:-1]).all())


def ends_of(lengths: NDArray[np.integer]) -> NDArray[np.unsignedinteger]:
    """Sum lengths to ends: (N,) -> (N + 1,), beginning with 0; of 4 bytes each if the sum allows it."""
    total = int(lengths.sum(dtype=np.int64))
    if not total:
        return np.broadcast_to(np.uint32(0), len(lengths) + 1)  # takes no memory
    ends: NDArray[np.unsignedinteger] = np.zeros(len(lengths) + 1, np.uint32 if total < 2**32 else np.uint64)
    np.cumsum(lengths, out=ends[1:], dtype=ends.dtype)
    return ends


@numba.njit(nogil=True)
def first_slot(buffer, begin, end, slots):  # type: ignore[no-untyped-def]
    """Return a string's first slot by FNV-1a, mixed once more: the last letters hardly change its upper bits."""
    found = FNV_BASIS
    for place in range(begin, end):
        found = (found ^ np.uint64(buffer[place])) * FNV_PRIME
    found = (found ^ found >> HALF) * GOLDEN
    return np.int64(((found >> HALF) * np.uint64(slots)) >> HALF)


@numba.njit(nogil=True)
def probe(buffer, ends, table, wanted, begin, end):  # type: ignore[no-untyped-def]
    """Return the row of the string between these places of `wanted`; FREE_SLOT for an unknown one."""
    slot = first_slot(wanted, begin, end, len(table))
    while True:
        row = table[slot]
        if row == FREE_SLOT:
            return np.int64(FREE_SLOT)
        first, last = np.int64(ends[row]), np.int64(ends[row + 1])
        if last - first == end - begin:
            place = 0
            while place < end - begin and buffer[first + place] == wanted[begin + place]:
                place += 1
            if place == end - begin:
                return np.int64(row)
        slot = slot + 1 if slot + 1 < len(table) else 0


@numba.njit(cache=True, nogil=True)
def find(buffer, ends, table, name):  # type: ignore[no-untyped-def]
    """Return the row of a string in UTF-8; FREE_SLOT for an unknown one."""
    return probe(buffer, ends, table, name, 0, len(name))


@numba.njit(cache=True, nogil=True)
def _find_each(buffer, ends, table, wanted, wanted_ends):  # type: ignore[no-untyped-def]
    rows = np.empty(len(wanted_ends) - 1, np.int64)
    for n in range(len(rows)):
        rows[n] = probe(buffer, ends, table, wanted, np.int64(wanted_ends[n]), np.int64(wanted_ends[n + 1]))
    return rows


@numba.njit(cache=True, nogil=True)
def fill(buffer, ends, table):  # type: ignore[no-untyped-def]
    """Fill an empty index of distinct strings."""
    for row in range(len(ends) - 1):
        slot = first_slot(buffer, np.int64(ends[row]), np.int64(ends[row + 1]), len(table))
        while table[slot] != FREE_SLOT:
            slot = slot + 1 if slot + 1 < len(table) else 0
        table[slot] = row


@numba.njit(nogil=True)
def _match_level(buffer, begin, end, wanted, shifts):  # type: ignore[no-untyped-def]
    """Return how the string between these places matches.

    shifts  (256,)  the distance to the text's next possible place, by the byte where the text would end

    Source: Horspool, Practical fast searching in strings, 1980.
    """
    size = len(wanted)
    if size == 0:
        return EXACT if begin == end else PREFIX
    level, place = NO_MATCH, begin
    while level > WORD_PREFIX and place + size <= end:
        same = 0
        while same < size and buffer[place + same] == wanted[same]:
            same += 1
        if same == size:
            if place == begin:
                level = EXACT if end - begin == size else PREFIX
            elif buffer[place - 1] == SPACE:
                level = WORD_PREFIX
            else:
                level = SUBSTRING
        place += shifts[buffer[place + size - 1]]
    return level


@numba.njit(cache=True, nogil=True)
def _match_levels(buffer, ends, wanted, shifts, found):  # type: ignore[no-untyped-def]
    for row in range(len(found)):
        found[row] = _match_level(buffer, np.int64(ends[row]), np.int64(ends[row + 1]), wanted, shifts)


@numba.njit(cache=True, nogil=True)
def _match_levels_of(buffer, ends, rows, wanted, shifts, found):  # type: ignore[no-untyped-def]
    for place in range(len(rows)):
        begin, end = np.int64(ends[rows[place]]), np.int64(ends[rows[place] + 1])
        found[place] = _match_level(buffer, begin, end, wanted, shifts)


@numba.njit(cache=True, nogil=True)
def _gather(codes, ends, rows, own):  # type: ignore[no-untyped-def]
    for place in range(len(rows)):
        row = rows[place]
        own[place + 1] = own[place] + np.int64(ends[row + 1]) - np.int64(ends[row])
    found = np.empty(own[-1], np.int64)
    for place in range(len(rows)):
        first = np.int64(ends[rows[place]])
        for n in range(own[place + 1] - own[place]):
            found[own[place] + n] = codes[first + n]
    return found
