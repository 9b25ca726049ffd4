"""The types of events in a shop's table: their column, their translation, and those that training does not know."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from shlex import quote

import polars as pl

from model.config import EVENT_WEIGHTS, IMPRESSION
from model.data.exports.examination import Examination
from model.data.exports.mapping import EVERY_OTHER, TableMapping, similar_columns, similar_types
from model.data.interactions import MAX_NAMED_TYPES, weight_options
from model.data.table import bad_ids


def find_types(found: Examination, mapping: TableMapping) -> None:
    """Note that no column is mapped to the types of events, and that one may have them."""
    own = similar_columns(("type",), found.frame.columns).get("type")
    if own and own not in mapping.columns and "type" not in mapping.own_names(found.frame.columns):
        found.note(f"every line is a click, and {own!r} may have types", f"map it: {mapping.option_with(type=own)}")


def read_types(found: Examination, mapping: TableMapping) -> None:
    """Translate the types as the mapping says, and find those that are none, or have no weight."""
    if mapping.types:
        _translate(found, mapping.types)
    if "type" not in found.frame.columns:
        return
    cells = found.frame["type"].fill_null("")
    is_bad, rule = bad_ids(cells, "type")
    found.find(cells == "", "type is empty", f"name these, too: --types '{_every_other(cells.filter(~is_bad))}'")
    found.find(is_bad, "type is not a valid id", f"use {rule}; translate it with --types OWN=TYPE", column="type")


def find_unknown_types(found: Examination) -> None:
    """Find the types that need a weight for training."""
    similar, weights = translations_and_weights(found)
    if not (similar or weights):
        return
    counted = [name for name, weight in weights.items() if weight]
    named = weight_options(dict(list(weights.items())[:MAX_NAMED_TYPES]))
    fix = "pass their weights"
    if similar:
        fix = f"translate them: {types_option(similar)}"
    elif counted:
        fix = f"translate what is one of these, such as --types '{counted[0]}=purchase'"
    if similar or counted:
        fix += ", and pass weights of the others" if weights else ""
    found.find(
        ~found.frame["type"].is_in([*EVENT_WEIGHTS, IMPRESSION]),
        f"type is none of {', '.join(EVENT_WEIGHTS)}",
        f"{fix} for training, 0 to ignore a type: {named}" if weights else fix,
        column="type",
        stops=False,
    )


def translations_and_weights(found: Examination) -> tuple[dict[str, str], dict[str, int]]:
    """Return our types for those of readable lines that are similar, and weights of others that need one for training.

    The most frequent types come first. A weight is 0 for a type whose values are all negative, as those of returns are,
    and 1 for others.
    """
    if "type" not in found.frame.columns:
        return {}, {}
    types = found.good["type"]
    names: list[str] = (
        types.filter(~types.is_in([*EVENT_WEIGHTS, IMPRESSION])).value_counts(sort=True)["type"].to_list()
    )
    returns = _types_of_returns(found)
    similar = similar_types(name for name in names if name not in returns)
    return similar, {name: 0 if name in returns else 1 for name in names if name not in similar}


def types_option(types: Mapping[str, str]) -> str:
    """Return the option that translates types."""
    return f"--types {quote(','.join(f'{own}={ours}' for own, ours in types.items()))}"


def _types_of_returns(found: Examination) -> set[str]:
    """Return the types of readable lines that have values, all of them negative."""
    if "value" not in found.frame.columns:
        return set()
    values = found.good.select("type", value=pl.col("value").cast(pl.Float64, strict=False)).drop_nulls("value")
    return {*values["type"]} - {*values.filter(pl.col("value") >= 0)["type"]}


def _translate(found: Examination, types: Mapping[str, str]) -> None:
    """Replace the table's own types of events by ours."""
    if "type" not in found.frame.columns:
        if EVERY_OTHER not in types:
            fix = "map it with --columns OWN=type, or give all lines one type: --types '*=purchase'"
            found.note("--types translates types, but the header has no type", fix, stops=True)
            return
        found.set_column("type", pl.repeat("", len(found.frame), eager=True))
    cells = found.frame["type"].fill_null("")
    named = {own: ours for own, ours in types.items() if own != EVERY_OTHER}
    present = {one for one in cells.unique().to_list() if one}
    for own in sorted(named.keys() - present):
        close = get_close_matches(own, sorted(present - named.keys()), 1)
        fix = f"did you mean {close[0]!r}?" if close else "compare --types with the table"
        found.note(f"no line has the type {own!r}, which --types names", fix, stops=bool(close))
    others = pl.repeat(types[EVERY_OTHER], len(cells), eager=True) if EVERY_OTHER in types else cells
    found.set_column("type", cells.replace_strict(named, default=others, return_dtype=pl.String))


def _every_other(types: pl.Series) -> str:
    """Return a translation that keeps these types and names all other lines."""
    kept = types.unique().sort().to_list()[:MAX_NAMED_TYPES]
    return ",".join([*(f"{one}={one}" for one in kept), f"{EVERY_OTHER}=view"])
