"""The mapping from a shop's tables to the format of a data directory."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from shlex import quote
from zoneinfo import ZoneInfo

from model.config import NAME_PATTERN, NAME_RULE
from model.data.exports.cells import DecimalSign
from model.data.interactions import DataError

SYNONYMS: Mapping[str, str] = {
    "user_id": "user customer customerid customernumber customerno client clientid visitor visitorid account accountid "
    "member memberid shopper userid userpseudoid email customeremail kunde kundeid kundennr kundennummer",
    "item_id": "item product productid productcode article articleid articlenumber sku stockcode itemid asin variant "
    "lineitemsku variantsku artikel artikelid artikelnr artikelnummer artnr itemno itemnumber produkt produktid",
    "type": "event eventtype eventname interactiontype feedbacktype action activity vorgang typ aktion ereignis",
    "timestamp": "time date datetime when createdat created eventtime eventtimestamp invoicedate orderdate orderedat "
    "purchasedate ts "
    "datum zeit zeitpunkt bestelldatum zeitstempel",
}
"""Other names of the columns, without spaces and signs."""
TYPE_SYNONYMS: Mapping[str, str] = {
    "view": "views viewed viewitem itemview itemviewed viewproduct productview productviewed pageview detailview "
    "detailviews read seen ansicht",
    "click": "clicks clicked klick",
    "cart": "addtocart addedtocart cartaddition cartadditions addtobasket basket warenkorb",
    "purchase": "purchases purchased buy bought order orders ordered transaction transactions kauf bestellung",
    "like": "likes liked favorite favourite bookmark bookmarks star starred wishlist addtowishlist merkzettel",
    "dislike": "dislikes disliked",
    "impression": "impressions viewitemlist",
}
"""Other names of the types of events, in the same form."""
JOIN = "+"  # of the column of days and that of their times, which make the timestamp
EVERY_OTHER = "*"  # type of event, and lines without one
ITEM_ID = "item_id"
OF_EVENTS_ALONE = {"user_id", "timestamp", "type", "value", "order_id"}


@dataclass(frozen=True)
class TableMapping:
    """How to read a shop's tables.

    columns          our names of columns, by the tables' own names; Datum+Uhrzeit are two columns, for the timestamp.
                     Several may be the item_id, because tables name it differently: the first that a table has counts
    timezone         of times without one, such as Europe/Berlin
    decimal          the decimal separator; None if numbers are plain
    skips_bad_lines  whether unreadable lines are left out
    types            our types of events, by the table's own; that of ``*`` is the type of all remaining lines
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    timezone: str | None = None
    decimal: DecimalSign | None = None
    skips_bad_lines: bool = False
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether tables must have the format of a data directory."""
        return self == TableMapping()

    def own_names(self, header: Iterable[str]) -> dict[str, str]:
        """Return the table's own name of each column, by its new name."""
        if self.is_plain:
            return {name: name for name in header}
        own_names = {name.strip(): name for name in header}
        mapped: dict[str, str] = {}
        for own, ours in self.columns.items():
            if own in own_names:
                mapped.setdefault(ours, own)
        names = {own: self.columns.get(own, own) for own in own_names}
        return {ours: own_names[own] for own, ours in names.items() if mapped.get(ours, own) == own}

    def option_with(self, /, **own_names: str) -> str:
        """Return the option that maps the same columns and these, the table's own names by ours."""
        columns = {own_names.get(ours, own): ours for own, ours in self.columns.items()}
        return columns_option({**columns, **{own: ours for ours, own in own_names.items()}}.items())

    def joined(self, header: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Return the table's own names of the days and of their times, by the name of the timestamp that they make.

        It is empty unless the timestamp is mapped to a sum of two columns. A column of that whole name comes first.
        """
        own_names = {name.strip(): name for name in header}
        return {
            own: (own_names[day], own_names[clock])
            for own, ours in self.columns.items()
            if ours == "timestamp" and own not in own_names
            for day, clock in _sums(own)
            if day in own_names and clock in own_names
        }


def parse_columns(texts: Sequence[str]) -> dict[str, str]:
    """Return our names by a table's own, from texts such as ``customer=user_id,sku=item_id``; raises ValueError."""
    pairs = [pair.partition("=") for text in texts for pair in text.split(",")]
    columns = {own.strip(): ours.strip() for own, _, ours in pairs}
    if not all(own.strip() and ours.strip() for own, _, ours in pairs):
        raise ValueError("pass columns as OWN=NAME,OWN=NAME, such as customer=user_id,sku=item_id")
    once = [ours for ours in columns.values() if ours != ITEM_ID]
    if len(columns) < len(pairs) or len(set(once)) < len(once):
        raise ValueError(f"map each column to one name, and each name to one column, {ITEM_ID} to one of each table")
    return columns


def parse_types(texts: Sequence[str]) -> dict[str, str]:
    """Return our types of events by a table's own, from texts such as ``Kauf=purchase,*=view``; raises ValueError."""
    pairs = [pair.rpartition("=") for text in texts for pair in text.split(",")]
    types = {own.strip(): ours.strip() for own, _, ours in pairs}
    if not all(own.strip() and ours.strip() for own, _, ours in pairs):
        raise ValueError("pass types as OWN=TYPE,OWN=TYPE, such as Kauf=purchase,Ansicht=view; *=view is all others")
    if len(types) < len(pairs):
        raise ValueError("give each type one name")
    for ours in types.values():
        if not re.fullmatch(NAME_PATTERN, ours):
            raise ValueError(f"{ours!r} is not a type of event: use {NAME_RULE}")
    return types


def known_timezone(name: str) -> str:
    """Return the name of the time zone. Raise ValueError if it is unknown."""
    try:
        ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{name!r} is not a known time zone; use a name such as Europe/Berlin or UTC") from None
    return name


def require_columns(
    mapping: TableMapping, headers: Sequence[Sequence[str]], may_lack: Container[str] = frozenset()
) -> None:
    """Raise DataError for a column of the mapping that no table has, unless the tables may lack it.

    A column that they have in other capitals is a mistake all the same.
    """
    found = [name.strip() for header in headers for name in header]
    in_any_case = {name.casefold() for name in found}
    for own, ours in mapping.columns.items():
        if own not in found and (ours not in may_lack or own.casefold() in in_any_case):
            raise DataError(f"--columns names {own!r}, but {_why_missing(own, ours, found)}")


def _why_missing(own: str, ours: str, found: Sequence[str]) -> str:
    parts = [part.strip() for part in own.split(JOIN)]
    unknown = [part for part in parts if part not in found]
    if len(parts) == 1:
        return f"no table has this column; {_hint(own, found)}"
    if ours != "timestamp":
        return f"no table has this column, and only a timestamp can be joined from two; map one column to {ours}"
    if len(parts) > 2:
        example = f"{parts[0]}{JOIN}{parts[-1]}"
        return f"a timestamp can be joined from two columns only: pass the day and its time, such as {example}"
    if unknown:
        return f"no table has a column {unknown[0]!r}; {_hint(unknown[0], found)}"
    return "no table has both columns; both must be in the table of events"


def _hint(own: str, found: Sequence[str]) -> str:
    close = get_close_matches(own, found, 1)
    return f"did you mean {close[0]!r}?" if close else f"existing columns: {', '.join(map(repr, found))}"


def _sums(own: str) -> Iterator[tuple[str, str]]:
    """Yield each two names of which this one may be the sum, as a column's name may have the sign, too."""
    for sign in re.finditer(re.escape(JOIN), own):
        yield own[: sign.start()].strip(), own[sign.end() :].strip()


def similar_columns(wanted: Iterable[str], header: Iterable[str]) -> dict[str, str]:
    """Return the table's own names of columns, by ours, where the header, or a field of a record, has a similar one."""
    own_names = list(header)
    own_by_plain = {_plain(own.rpartition(".")[2]): own for own in own_names} | {_plain(own): own for own in own_names}
    like = {ours: (_plain(ours), *SYNONYMS.get(ours, "").split()) for ours in wanted}
    known = {ours: [own_by_plain[plain] for plain in names if plain in own_by_plain] for ours, names in like.items()}
    return {ours: own[0] for ours, own in known.items() if own}


def similar_types(own_types: Iterable[str]) -> dict[str, str]:
    """Return our types of events by the table's own, where one is similar."""
    ours_by_plain = {plain: ours for ours, others in TYPE_SYNONYMS.items() for plain in (ours, *others.split())}
    return {own: ours_by_plain[_plain(own)] for own in own_types if _plain(own) in ours_by_plain}


def _plain(name: str) -> str:
    """Return a name without spaces, signs and capitals."""
    return re.sub(r"[\W_]", "", name.casefold())


def columns_option(columns: Iterable[tuple[str, str]]) -> str:
    """Return the option that maps columns, from pairs of the table's own name and ours."""
    pairs = ",".join(f"{own.strip()}={ours}" for own, ours in columns)
    return f"--columns {quote(pairs)}" if "'" in pairs else f"--columns '{pairs}'"
