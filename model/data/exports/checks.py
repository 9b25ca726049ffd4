"""Checks of a shop's tables. They report all problems at once, with counts, examples and fixes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import polars as pl

from model.data.archived_log import ARCHIVE_MANIFEST
from model.data.event_columns import MAX_ORDER_ID_CHARS
from model.data.exports.cells import looks_like_clock, looks_like_days, times_in
from model.data.exports.event_types import find_types, find_unknown_types, read_types
from model.data.exports.examination import EXAMPLES, Examination, opened
from model.data.exports.mapping import (
    ITEM_ID,
    JOIN,
    OF_EVENTS_ALONE,
    TableMapping,
    columns_option,
    require_columns,
    similar_columns,
)
from model.data.exports.values import find_returns, negative_numbers, read_property, read_times, read_values
from model.data.interactions import DataError, most_events
from model.data.readers import OPTIONAL, REQUIRED, YES_OR_NO
from model.data.table import (
    CATEGORIES,
    INEXACT_ID,
    INEXACT_ID_FIX,
    VECTOR,
    bad_ids,
    find_table,
    inexact_ids,
)

MIDNIGHT = r"[ T]00:00(:00(\.0+)?)?$"  # after a day that another column gives the time of
MAX_LOST_OF_ITEMS = 0.5
MIN_DISTINCT_OF_ITEMS = 0.9  # ids of a table of items; those of events repeat
EVENT_COLUMNS = (*REQUIRED, *OPTIONAL)
UNAVAILABLE = "unavailable"
AVAILABILITY = ("available", UNAVAILABLE)
ITEM_COLUMNS = ("item_id", "title", "categories", "available", VECTOR)
INTEGER, INTEGER_AS_FLOAT, ROUNDED_INTEGER = r"^-?\d+$", r"^-?\d+[.,]0$", r"^-?\d+([.,]\d+)?[eE]\+\d+$"


def examine(data: Path, mapping: TableMapping) -> dict[str, Examination]:
    """Check the tables of a data directory, by name, or a single table of interactions.

    The tables then have the columns of a data directory, as far as possible.

    raises  DataError  when there is no table, one cannot be parsed, or no table has a column of the mapping
    """
    if (data / ARCHIVE_MANIFEST).is_file():
        raise DataError(f"{str(data)!r} is an archive of the service; it needs no check and no mapping")
    paths = {"interactions": data} if data.is_file() else _tables(data)
    found = {stem: _opened(path, mapping) for stem, path in paths.items()}
    if "items" not in found:
        _require_no_items(mapping, found["interactions"])
    require_columns(mapping, [one.frame.columns for one in found.values()])
    _examine_interactions(found["interactions"], mapping)
    if "items" in found:
        _examine_items(found["items"], mapping)
        _compare_items(found["interactions"], found["items"])
    return found


def examine_items(path: Path, mapping: TableMapping) -> Examination:
    """Check a table of items. Raise DataError like `examine`."""
    found = _opened(path, mapping)
    mapped = {mapping.columns.get(name.strip()) for name in found.frame.columns}
    require_columns(mapping, [found.frame.columns], OF_EVENTS_ALONE | ({ITEM_ID} & mapped))
    _examine_items(found, mapping)
    return found


def _require_no_items(mapping: TableMapping, events: Examination) -> None:
    """Raise DataError for a column of the mapping that a table of items would have."""
    in_any_case = {name.strip().casefold() for name in events.frame.columns}
    for own, ours in mapping.columns.items():
        if ours not in OF_EVENTS_ALONE | {ITEM_ID} and own.casefold() not in in_any_case:
            raise DataError(
                f"--columns maps {own!r} to {ours}, a column of a table of items, but there is no such table; pass the "
                "directory that has items.csv (or .jsonl, .parquet) beside interactions.csv, or omit this mapping"
            )


def _opened(path: Path, mapping: TableMapping) -> Examination:
    found = opened(path, skips_empty_lines=not mapping.is_plain, skips_bad_lines=mapping.skips_bad_lines)
    for own, parts in mapping.joined(found.frame.columns).items():
        _find_repeated_columns(found, parts)
        day, clock = (pl.col(part).str.strip_chars() for part in parts)
        cells = [day.str.replace(MIDNIGHT, ""), clock]
        found.frame = found.frame.with_columns(pl.concat_str(cells, separator=" ", ignore_nulls=True).alias(own))
    return found


def _tables(directory: Path) -> dict[str, Path]:
    found = {stem: find_table(directory, stem) for stem in ("interactions", "items")}
    paths = {stem: path for stem, path in found.items() if path is not None}
    if "interactions" not in paths:
        raise DataError(
            f"data directory {str(directory)!r} has no interactions.tsv.gz (or .csv, .jsonl, .parquet); name the table "
            "of events so, or give that file instead of the directory"
        )
    return paths


def _examine_interactions(found: Examination, mapping: TableMapping) -> None:
    if _looks_like_items(found, mapping):
        found.note(
            "this looks like a table of items: it has no users, and each item once",
            "name it items.csv (or .jsonl, .parquet), and pass the directory that also has the events, as "
            f"interactions.csv: 'lisarec check {found.path.parent}'; a running service takes it by "
            f"'lisarec items import {found.path}'. If these are events, map their columns: "
            + _suggested_columns(REQUIRED, found.frame),
            stops=True,
        )
        return
    _find_clock(found, mapping)
    find_types(found, mapping)
    own_names = mapping.own_names(found.frame.columns)
    negative = negative_numbers(found.frame.drop(own_names[name] for name in EVENT_COLUMNS if name in own_names))
    _rename(found, mapping, REQUIRED, OPTIONAL)
    for column in ("user_id", "item_id"):
        _find_bad_ids(found, column)
    read_types(found, mapping)
    if "timestamp" in found.frame.columns:
        read_times(found, mapping)
    if "value" in found.frame.columns:
        read_values(found, mapping)
    if "order_id" in found.frame.columns:
        _find_inexact_ids(found, "order_id")
        is_long = found.frame["order_id"].str.len_chars() > MAX_ORDER_ID_CHARS
        found.find(is_long, f"order_id has more than {MAX_ORDER_ID_CHARS} characters", found.remedy, column="order_id")
    find_unknown_types(found)
    if not found.stops:
        find_returns(found, negative)
        _find_duplicates(found)
        if found.frame.is_empty():
            found.note("the table has no lines", "export the table again", stops=True)
        _find_bots(found)
        _find_loss(found)


def _looks_like_items(found: Examination, mapping: TableMapping) -> bool:
    """Return whether a table has neither users nor timestamps, but a column of items that do not repeat."""
    own_names = mapping.own_names(found.frame.columns)
    own_names = {**similar_columns(("user_id", "item_id"), found.frame.columns), **own_names}
    if "item_id" not in own_names or "user_id" in own_names or "timestamp" in own_names or found.frame.width < 2:
        return False
    ids = found.good[own_names["item_id"]]
    return ids.n_unique() >= MIN_DISTINCT_OF_ITEMS * len(ids)


def _examine_items(found: Examination, mapping: TableMapping) -> None:
    _rename(found, mapping, ("item_id",), ITEM_COLUMNS[1:], has_others=True)
    if "item_id" in found.frame.columns:
        _find_bad_ids(found, "item_id")
        ids = found.frame["item_id"]
        again = ids.is_duplicated() & ~ids.is_first_distinct()
        found.find(again, "the item appears twice; the first line counts", found.remedy, column="item_id")
    _read_availability(found, mapping)
    if "categories" in found.frame.columns:
        cells = found.frame["categories"].fill_null("")
        found.find(
            cells.str.contains("[,;>]") & ~cells.str.contains("|", literal=True),
            "categories has no |, so the cell is one category",
            "write Home|Tea, or Home|Home > Tea for levels, unless the sign is part of a name",
            column="categories",
            stops=False,
        )
    for column in found.frame.columns:
        if column not in ITEM_COLUMNS:
            read_property(found, column, mapping)
    if not found.stops:
        _find_loss(found)


def _read_availability(found: Examination, mapping: TableMapping) -> None:
    """Make the opposite of a column that is mapped to ``unavailable`` the availability, and find cells that are none.

    Find items that are not available, too, if most are, and another column than ``available`` says so.
    """
    own = next((own for own, ours in mapping.columns.items() if ours in AVAILABILITY), "available")
    is_opposite = mapping.columns.get(own) == UNAVAILABLE and UNAVAILABLE in found.frame.columns
    if is_opposite and "available" in found.frame.columns:
        found.note("columns are both available and unavailable", "map one of them", stops=True)
    if is_opposite:
        opposite = {word: str(not is_yes).lower() for word, is_yes in YES_OR_NO.items()}
        cells = found.frame[UNAVAILABLE]
        found.set_column("available", cells.str.to_lowercase().replace_strict(opposite, default=cells))
        found.frame = found.frame.drop(UNAVAILABLE)
    if "available" not in found.frame.columns:
        return
    cells = found.frame["available"].fill_null("").str.to_lowercase()
    is_odd = ~cells.is_in([*YES_OR_NO, ""])
    found.find(
        is_odd & cells.str.contains(r"^\d+$"),
        "available is a count, not yes or no",
        "map the column to another name, such as stock, and filter by item.stock > 0.0",
        column="available",
    )
    found.find(is_odd, "available is neither yes nor no; write true or false", found.remedy, column="available")
    is_off = cells.is_in([word for word, is_yes in YES_OR_NO.items() if not is_yes])
    if own != "available" and 2 * is_off.sum() > len(is_off):
        other = "available" if is_opposite else UNAVAILABLE
        fix = f"if {own!r} says the opposite, map it: {columns_option({**mapping.columns, own: other}.items())}"
        found.find(is_off, "the item is not available, as are most", fix, stops=False, assumes=True)


def _find_loss(found: Examination) -> None:
    if found.is_lost:
        found.note("no line is readable", "correct the problem of most lines", stops=True)


def _rename(
    found: Examination,
    mapping: TableMapping,
    required: Sequence[str],
    optional: Sequence[str],
    *,
    has_others: bool = False,
) -> None:
    """Rename the columns, and find missing ones."""
    header = found.frame.columns
    own_names = mapping.own_names(header)
    for name in (*found.left_out, *_lists(found, own_names, (*required, *optional))):
        is_wanted = mapping.columns.get(name, name) in (*required, *optional)
        fix = "convert it, or leave it out" if is_wanted else ""
        found.note(f"column {name!r} has neither numbers nor texts, and is not read", fix, stops=is_wanted)
    _find_other_items(found, mapping)
    _find_repeated_columns(found, [own_names[name] for name in (*required, *optional) if name in own_names])
    missing = [name for name in required if name not in own_names]
    if missing:
        _find_missing_columns(found, missing)
    wanted = [name for name in own_names if has_others or name in (*required, *optional)]
    cells = [pl.col(own_names[name]).alias(name) for name in wanted]
    if not mapping.is_plain:
        cells = [cell.str.strip_chars() for cell in cells]
    found.frame = found.frame.select(cells)
    found.dtypes = {name: found.dtypes[own_names[name]] for name in wanted if own_names[name] in found.dtypes}


def _lists(found: Examination, own_names: Mapping[str, str], wanted: Container[str]) -> list[str]:
    """Return the table's own names of columns that have lists, where they may not."""
    of_one_value = [own for ours, own in own_names.items() if ours in wanted and ours not in (CATEGORIES, VECTOR)]
    return [own for own in of_one_value if isinstance(found.dtypes.get(own), pl.List)]


def _find_missing_columns(found: Examination, missing: Sequence[str]) -> None:
    header = [name.strip() for name in found.frame.columns]
    problem = f"the header has no {' and no '.join(missing)}; it has {', '.join(map(repr, header))}"
    fix = f"map the columns: {_suggested_columns(missing, found.frame)}"
    values = pl.Series(header).filter(times_in(pl.Series(header), "UTC").us.is_not_null())
    if len(values):
        problem = f"the first line has values, such as {values[0]!r}, where the names of the columns belong"
        fix = f"put a line of names above it, or in its place, such as {','.join(missing)}"
    elif len(header) == 1:
        fix = "separate the columns with commas, semicolons, tabs or |"
    found.note(problem, fix, stops=True)


def _find_other_items(found: Examination, mapping: TableMapping) -> None:
    header = {name.strip() for name in found.frame.columns}
    first, *others = [own for own, ours in mapping.columns.items() if ours == ITEM_ID and own in header] or [""]
    if others:
        problem = f"the items are in {first!r}, and not in {', '.join(map(repr, others))}"
        found.note(problem, "if that is wrong, name the column of this table first in --columns")


def _find_repeated_columns(found: Examination, wanted: Container[str]) -> None:
    for name in found.frame.columns:
        own, mark, _ = name.partition("_duplicated_")  # polars' name of the second one
        if mark and own in wanted:
            found.note(f"column {own!r} appears twice", "keep one of them", stops=True)


def _suggested_columns(missing: Sequence[str], frame: pl.DataFrame) -> str:
    """Return the option that maps the missing columns. NAME stands for one without a similar one."""
    names = similar_columns(missing, [name for name in frame.columns if not looks_like_clock(frame[name])])
    if clock := _clock_beside(names.get("timestamp"), frame):
        names["timestamp"] += JOIN + clock
    return columns_option((names.get(ours, "NAME"), ours) for ours in missing)


def _find_clock(found: Examination, mapping: TableMapping) -> None:
    """Note that the timestamps are days, and that another column has their times of day."""
    day = mapping.own_names(found.frame.columns).get("timestamp")
    clock = _clock_beside(day, found.frame)
    if clock is not None:
        fix = f"join both columns: {mapping.option_with(timestamp=f'{day}{JOIN}{clock}')}"
        found.note(f"the days of {day!r} have no time, and {clock!r} has times", fix)


def _clock_beside(day: str | None, frame: pl.DataFrame) -> str | None:
    """Return the first column of times, if this column has days."""
    if day not in frame.columns or not looks_like_days(frame[day]):
        return None
    return next((name for name in frame.columns if looks_like_clock(frame[name])), None)


def _find_bad_ids(found: Examination, column: str) -> None:
    if column not in found.frame.columns:
        return
    cells = found.frame[column].fill_null("")
    found.find(cells == "", f"{column} is empty", found.remedy)
    is_bad, rule = bad_ids(cells, column)
    found.find(is_bad, f"{column} is not a valid id", f"use {rule}; {found.remedy}", column=column)
    _find_inexact_ids(found, column)
    is_float, is_rounded = cells.str.contains(INTEGER_AS_FLOAT), cells.str.contains(ROUNDED_INTEGER)
    if (found.bad | is_float | is_rounded | cells.str.contains(INTEGER)).all():
        problem = f"{column} looks like an integer that was exported as a float"
        fix = "export integers, such as with astype('Int64') in pandas: to the service, 1 and 1.0 are different ids"
        found.find(is_float, problem, fix, column=column, stops=False)
        fix = (
            f"export {column} anew, as text: this table no longer has the digits, and different ids may be equal in it"
        )
        found.find(is_rounded, f"{problem}, and has lost digits", fix, column=column, stops=False)


def _find_inexact_ids(found: Examination, column: str) -> None:
    bad = inexact_ids(found.frame[column].fill_null(""), found.dtypes.get(column))
    found.find(bad, f"{column} is {INEXACT_ID}", INEXACT_ID_FIX, column=column)


def _find_duplicates(found: Examination) -> None:
    again = found.frame.is_duplicated() & ~found.frame.select(pl.struct(pl.all()).is_first_distinct()).to_series()
    found.find(again, "the line repeats an earlier one", "each of them counts: remove copies of one event", stops=False)


def _find_bots(found: Examination) -> None:
    """Find users who have far more events than others."""
    counts = found.good["user_id"].value_counts(sort=True)
    if counts.is_empty():
        return
    many = counts.filter(pl.col("count") > most_events(counts["count"].to_numpy())).rows()
    named = ", ".join(f"{user!r} ({count:,})" for user, count in many[:EXAMPLES])
    found.find(
        found.frame["user_id"].is_in([user for user, _ in many]),
        f"some users have far more events than others: {named}",
        "leave out bots, and ids that many people share",
        stops=False,
    )


def _compare_items(interactions: Examination, items: Examination) -> None:
    """Find events of items that are missing from the other table, unless too little of that table is readable."""
    if interactions.stops or items.stops or items.lost_share > MAX_LOST_OF_ITEMS:
        return
    ids, known = interactions.frame["item_id"], items.frame["item_id"]
    is_unknown = ~ids.is_in(known.to_list())
    lacks_zeros = is_unknown & _without_zeros(ids).is_in(_without_zeros(known).to_list())
    interactions.find(
        lacks_zeros,
        f"the item is in {items.path.name} with other leading zeros",
        "export item_id as text in both tables: to the service, 007 and 7 are different ids",
        column="item_id",
        stops=False,
    )
    interactions.find(
        is_unknown & ~lacks_zeros,
        f"the item is not in {items.path.name}",
        "such items are learned and recommended without a title: add them there, with available=false where they are "
        "no longer sold, and tell the service with 'lisarec items import'",
        column="item_id",
        stops=False,
    )


def _without_zeros(ids: pl.Series) -> pl.Series:
    """Return ids of digits as a spreadsheet shows them: 7 for 007."""
    return ids.str.replace(r"^0+(\d+)$", "$1")
