"""Import of a file's items into a running service."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import polars as pl

from app.jobs.replay import RETRY_FOR_S, Retries, ServiceAddress, counted
from app.schemas.properties import NAME_RULE, is_property_name, similar_property_name
from model.data.exports.cells import amounts_in, likely_decimal, looks_like_amounts
from model.data.exports.mapping import TableMapping
from model.data.exports.values import FIRST_USUAL_US
from model.data.interactions import DataError
from model.data.item_vectors import vectors_in
from model.data.readers import YES_OR_NO, categories_in, read_item_table
from model.data.table import VECTOR, Table, rfc_3339, unix_times, with_rfc3339_times
from storage.records import ITEM_TIMES, PropertyType

BATCH = 500  # a request may have 1,000
BATCH_BYTES = 1 << 19  # a body may have 1 MiB

FIELDS = ("item_id", "title", "categories", "available", VECTOR)
VECTOR_DIGITS = 5  # of each number, more than the service stores
TRUTH = {"true": True, "false": False}
JSON_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})$"

LOCAL_TIME = (
    r"^([0-9]{4}[-./][0-9]{1,2}[-./][0-9]{1,2}|[0-9]{1,2}[-./][0-9]{1,2}[-./][0-9]{4})"
    r"([Tt ]+[0-9]{1,2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?)?( ?[AaPp][Mm])?$"
)

AS_IT_IS = TableMapping()

ItemJson = dict[str, Any]

logger = logging.getLogger(__name__)


def held_types(url: str, key: str | None = None) -> dict[str, PropertyType]:
    """Return the types of the service's properties; none if the key may not read them, or no lisarec answers."""
    service = ServiceAddress.of(url, key)
    try:
        with httpx.Client(**service.of_client()) as client:
            answer = client.get("/v1/admin/properties")
        return dict(answer.json()["items"]) if answer.status_code == httpx.codes.OK else {}
    except (httpx.TransportError, ValueError, TypeError, KeyError):
        return {}


def read(
    path: Path, types: Mapping[str, PropertyType], mapping: TableMapping = AS_IT_IS, *, empty_removes: bool = False
) -> list[ItemJson]:
    """Return the items of a table as ``POST /v1/items`` takes them.

    The cells of `vector` are lists, or JSON arrays, of numbers. Columns that are not FIELDS are properties.

    types          of properties; the cells of a column determine any other type, see `column_type`
    mapping        which was applied to the table
    empty_removes  whether an empty cell removes what can be removed, see `_remove_missing`; else it changes nothing

    raises  DataError  which names the line
    """
    table = read_item_table(path, has_properties=True)
    items: list[ItemJson] = [{"item_id": item_id} for item_id in table.frame["item_id"].to_list()]
    names = _properties(table.frame.columns, mapping)
    for name in names:
        _add_property(items, table, name, "time" if name in ITEM_TIMES else types.get(name))
    parse: Mapping[str, Callable[[str], Any]] = {
        "title": str,
        "categories": lambda cell: list(categories_in(cell)),
        "available": lambda cell: YES_OR_NO[cell.lower()],
    }
    for name in parse.keys() & set(table.frame.columns):
        for item, cell in zip(items, table.frame[name].to_list(), strict=True):
            if cell:
                item[name] = parse[name](cell)
    _add_vectors(items, path)
    if empty_removes:
        _remove_missing(items, [*names, *({"categories"} & {*table.frame.columns})])
    return items


def _remove_missing(items: list[ItemJson], names: Sequence[str]) -> None:
    """Remove the values of items that have none in these columns: properties, times or categories."""
    for item in items:
        for name in names:
            if name == "categories":
                item.setdefault(name, [])
            elif name in ITEM_TIMES:
                item.setdefault(name, None)
            else:
                item.setdefault("properties", {}).setdefault(name, None)


def _properties(header: Sequence[str], mapping: TableMapping) -> list[str]:
    """Return the columns that are properties or times. Warn of others, unless the mapping names them.

    raises  DataError  when the mapping names a column that can be neither
    """
    names = [name for name in header if name not in FIELDS]
    valid = [name for name in names if name in ITEM_TIMES or is_property_name(name)]
    skipped = [name for name in names if name not in valid]
    for name in skipped:
        if name in mapping.columns.values():
            raise DataError(f"--columns maps a column to {name!r}, which is not a valid name: {NAME_RULE}")
    if skipped:
        way_out = _mapping_option(skipped, header, mapping)
        logger.warning(
            "skipping columns whose names are not valid for properties: %s%s", ", ".join(map(repr, skipped)), way_out
        )
    return valid


def _mapping_option(skipped: Sequence[str], header: Sequence[str], mapping: TableMapping) -> str:
    """Return what to add to a warning: the option that imports those of the columns that an option can name."""
    own_names: dict[str, str] = {}
    for own in skipped:
        bare, taken = own.strip(), {*header, *own_names}
        if bare and not {",", "="} & {*own}:
            is_known = bare in (*FIELDS, *ITEM_TIMES) and bare not in taken
            own_names[bare if is_known else similar_property_name(own, taken)] = own
    return f"; to import them, pass {mapping.option_with(**own_names)}" if own_names else ""


def _add_vectors(items: list[ItemJson], path: Path) -> None:
    """Add the column of vectors to the items."""
    vectors = vectors_in(path)
    if vectors is None:
        return
    for item in items:
        row = vectors.rows.get(item["item_id"])
        if row is not None:
            item[VECTOR] = [round(number, VECTOR_DIGITS) for number in vectors.numbers[row].tolist()]


def _add_property(items: list[ItemJson], table: Table, name: str, declared: PropertyType | None) -> None:
    """Add the column of a property to the items. Spaces around a cell count only in texts."""
    cells, bare = table.frame[name], _bare(table, name)
    times = with_rfc3339_times(bare)
    type_ = column_type(times) if declared is None else declared
    if type_ != "text":
        cells = times if type_ == "time" else bare
    if declared is None and type_ in ("text", "set"):
        _warn_of_numbers(table, name)
        _warn_of_times(table, name)
    if type_ == "boolean":
        bad = ~cells.fill_null("").str.to_lowercase().is_in([*YES_OR_NO, ""])
        table.refuse(bad, f"{name} is a boolean, but {{!r}} is neither yes nor no; write true or false", name)
    if type_ == "time":
        moments = unix_times(cells)
        is_usual = (moments >= FIRST_USUAL_US).fill_null(False)  # unlike the year 2026 and the day 20261224
        cells = rfc_3339(moments).zip_with(is_usual, cells)
    numbers = table.numbers(name).tolist() if type_ == "number" else None
    for place, (item, cell) in enumerate(zip(items, cells.to_list(), strict=True)):
        if cell:
            value = _value(cell, type_) if numbers is None else numbers[place]
            (item if name in ITEM_TIMES else item.setdefault("properties", {}))[name] = value


def _bare(table: Table, name: str) -> pl.Series:
    """Return the cells of a column without spaces around them."""
    return table.frame[name].str.strip_chars()


def _warn_of_numbers(table: Table, name: str) -> None:
    """Warn if most cells of a column are numbers, but not all are, or not as JSON writes them."""
    cells = _bare(table, name)
    known = cells.is_not_null() & (cells != "")
    is_odd = known & ~cells.str.contains(JSON_NUMBER)
    decimal = likely_decimal(cells)
    if looks_like_amounts(cells, decimal):
        is_no_amount = known & amounts_in(cells, decimal).is_null()
        _warn(table, name, is_no_amount, "not a number", "correct the cells")
        if not is_no_amount.any():
            _warn(table, name, is_odd, "not a number", f"pass --decimal '{decimal}'")
    elif 2 * is_odd.sum() < known.sum():
        _warn(table, name, is_odd, "not a number", "correct the cells")


def _warn_of_times(table: Table, name: str) -> None:
    """Warn if most cells of a column are times or look like local times, but not all are valid."""
    cells = _bare(table, name)
    known = cells.is_not_null() & (cells != "")
    is_odd = known & ~with_rfc3339_times(cells).str.contains(TIME)
    if 2 * (known & (cells.str.contains(TIME) | cells.str.contains(LOCAL_TIME))).sum() > known.sum():
        _warn(table, name, is_odd, "not a time", "write times with a time zone, such as 2025-07-15T10:00:00+02:00,")


def _warn(table: Table, name: str, is_odd: pl.Series, what: str, way_out: str) -> None:
    """If there is an odd cell, warn that the column does not have a type, and say what to do."""
    if is_odd.any():
        cells, row = table.frame[name], int(is_odd.arg_true()[0])
        logger.warning(
            "column %s is %s, because row %d has %r (this affects %d of %d cells). If it should be one, "
            "%s and import again; if the service already has it as another type, first delete its values with "
            'PUT {"items": {"%s": null}} to /v1/admin/properties',
            name,
            what,
            row + 1,
            cells[row],
            is_odd.sum(),
            (cells.is_not_null() & (cells != "")).sum(),
            way_out,
            name,
        )


def column_type(cells: pl.Series) -> PropertyType:
    """Return the type that all cells of a column fit: the first of boolean, number and time, else set or text.

    Numbers have the form of JSON numbers, so codes such as 007 stay texts. A set has a cell with a "|".
    """
    known = cells.filter(cells.is_not_null() & (cells != ""))
    if known.str.to_lowercase().is_in(list(TRUTH)).all():
        return "boolean"
    if known.str.contains(JSON_NUMBER).all():
        return "number"
    if known.str.contains(TIME).all():
        return "time"
    return "set" if known.str.contains("|", literal=True).any() else "text"


def _value(cell: str, type_: PropertyType) -> str | bool | list[str]:
    if type_ == "boolean":
        return YES_OR_NO[cell.lower()]
    return list(categories_in(cell)) if type_ == "set" else cell


def _batches(items: list[ItemJson]) -> Iterator[tuple[int, list[ItemJson]]]:
    """Yield the items of each request, and the number of items before them."""
    begin, size = 0, 0
    for place, item in enumerate(items):
        item_size = len(json.dumps(item))
        if place - begin == BATCH or (size + item_size > BATCH_BYTES and place > begin):
            yield begin, items[begin:place]
            begin, size = place, 0
        size += item_size
    if items:
        yield begin, items[begin:]


def send(
    items: list[ItemJson],
    url: str,
    key: str | None = None,
    *,
    retry_for_s: float = RETRY_FOR_S,
    on_sent: Callable[[int], None] = lambda items: None,
) -> int:
    """Post the items; return how many of them no model has learned yet.

    key          an API key that may write the catalogue, if the service has keys
    retry_for_s  how long the service may be unreachable or busy
    raises       ReplayError  when the service refuses an item, or is unreachable for longer. Earlier items are set;
                              sending all of them again does not change them
    """
    service = ServiceAddress.of(url, key)
    unknown, warned = 0, set[str]()
    with httpx.Client(**service.of_client()) as client:
        for begin, batch in _batches(items):
            unknown += _send(client, batch, begin, Retries(service.url, retry_for_s, warned))
            on_sent(len(batch))
    return unknown


def _send(client: httpx.Client, batch: list[ItemJson], begin: int, retries: Retries) -> int:
    failure: httpx.Response | httpx.TransportError
    while True:
        try:
            failure = client.post("/v1/items", json=batch)
        except httpx.TransportError as exc:
            failure = exc
        else:
            if failure.status_code == httpx.codes.OK:
                return counted(failure, "unknown_items")[0]
        time.sleep(
            retries.pause_s(failure, lambda index: f"item {batch[index]['item_id']!r} (row {begin + index + 1:,})")
        )
