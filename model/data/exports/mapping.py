"""The mapping from a shop's tables to the format of a data directory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from zoneinfo import ZoneInfo

from model.data.exports.cells import DecimalSign
from model.data.interactions import DataError

SYNONYMS: Mapping[str, str] = {
    "user_id": "user customer customerid customernumber customerno client clientid visitor visitorid account accountid "
    "member memberid shopper userid kunde kundeid kundennr kundennummer",
    "item_id": "item product productid productcode article articleid articlenumber sku stockcode itemid asin variant "
    "artikel artikelid artikelnr artikelnummer produkt produktid",
    "timestamp": "time date datetime when createdat created eventtime invoicedate orderdate orderedat purchasedate ts "
    "datum zeit zeitpunkt bestelldatum zeitstempel",
}
"""Other names of the columns, without spaces and signs."""


@dataclass(frozen=True)
class TableMapping:
    """How to read a shop's tables.

    columns          our names of columns, by the tables' own names
    timezone         of times without one, such as Europe/Berlin
    decimal          the decimal separator; None if numbers are plain
    skips_bad_lines  whether unreadable lines are left out
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    timezone: str | None = None
    decimal: DecimalSign | None = None
    skips_bad_lines: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether tables must have the format of a data directory."""
        return self == TableMapping()

    def own_names(self, header: Iterable[str]) -> dict[str, str]:
        """Return the table's own name of each column, by its new name."""
        if self.is_plain:
            return {name: name for name in header}
        names = {name: self.columns.get(name.strip(), name.strip()) for name in header}
        mapped = {ours for own, ours in names.items() if own.strip() in self.columns}
        return {ours: own for own, ours in names.items() if ours not in mapped or own.strip() in self.columns}


def parse_columns(texts: Sequence[str]) -> dict[str, str]:
    """Return our names by a table's own, from texts such as ``customer=user_id,sku=item_id``; raises ValueError."""
    pairs = [pair.partition("=") for text in texts for pair in text.split(",")]
    columns = {own.strip(): ours.strip() for own, _, ours in pairs}
    if not all(own.strip() and ours.strip() for own, _, ours in pairs):
        raise ValueError("pass columns as OWN=NAME,OWN=NAME, such as customer=user_id,sku=item_id")
    if len(columns) < len(pairs) or len(set(columns.values())) < len(pairs):
        raise ValueError("map each column to one name, and each name to one column")
    return columns


def known_timezone(name: str) -> str:
    """Return the name of the time zone. Raise ValueError if it is unknown."""
    try:
        ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{name!r} is not a known time zone; use a name such as Europe/Berlin or UTC") from None
    return name


def require_columns(mapping: TableMapping, headers: Sequence[Sequence[str]]) -> None:
    """Raise DataError for a column of the mapping that no table has."""
    found = [name.strip() for header in headers for name in header]
    for own in mapping.columns:
        if own not in found:
            close = get_close_matches(own, found, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"existing columns: {', '.join(map(repr, found))}"
            raise DataError(f"--columns names {own!r}, but no table has this column; {hint}")


def suggested_columns(missing: Iterable[str], header: Iterable[str]) -> str:
    """Return the option that maps the missing columns. NAME stands for a column without a similar one in the header."""
    own_by_plain = {re.sub(r"[\W_]", "", own.casefold()): own.strip() for own in header}
    pairs = []
    for ours in missing:
        like = (ours.replace("_", ""), *SYNONYMS.get(ours, "").split())
        own = next((own_by_plain[plain] for plain in like if plain in own_by_plain), "NAME")
        pairs.append(f"{own}={ours}")
    return f"--columns '{','.join(pairs)}'"
