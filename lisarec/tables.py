"""Shops' tables as trainings and evaluations read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

OPTION = re.compile(
    r"--(?P<name>skip-bad-lines|columns|types|decimal|timezone)"
    r"( '(?P<quoted>[^']*)'| (?P<pair>[^\s=,;]+=[^\s,;]+)|(?<=--timezone) (?P<zone>[\w/]+))?"
)


class TableSettings(TypedDict, total=False):
    """How to map a shop's tables to the format of a data directory.

    columns         a mapping from the shop's column names to the standard names: {"customer": "user_id"}; two columns
                    with the day and its time are joined by a plus: {"date+time": "timestamp"}
    timezone        the time zone of timestamps without one, such as "Europe/Berlin"
    decimal         the decimal separator
    skip_bad_lines  whether to skip unreadable lines
    types           a mapping from the shop's types of events to others: {"Kauf": "purchase"}; "*" stands for all
                    remaining lines
    """

    columns: Mapping[str, str]
    timezone: str
    decimal: Literal[".", ","]
    skip_bad_lines: bool
    types: Mapping[str, str]


def checked(settings: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return settings whose names and types are those of a TypedDict, without those that are None.

    raises  TypeError   when there is no setting of that name
            ValueError  when a value is invalid
    """
    from app.cli.options import bad_values

    if unknown := settings.keys() - kind.__annotations__:
        raise TypeError(f"no setting {min(unknown)!r}; valid settings: {', '.join(kind.__annotations__)}")
    try:
        return dict(TypeAdapter(kind).validate_python({name: one for name, one in settings.items() if one is not None}))
    except ValidationError as exc:
        raise ValueError(bad_values(exc).message) from None


def is_of_a_table(name: str) -> bool:
    """Return whether a setting is one of a table."""
    return name in TableSettings.__annotations__


@contextmanager
def directory_of(data: Path, settings: Mapping[str, Any]) -> Iterator[Path]:
    """Give a data directory with the tables, which is a copy where something is mapped.

    raises  ValueError  which says all that is wrong with the tables
    """
    from app.jobs.datasets.mapped_copy import data_directory
    from model.data.exports.mapping import TableMapping, known_timezone, parse_columns, parse_types
    from model.data.interactions import DataError

    columns = parse_columns([f"{own}={name}" for own, name in settings.get("columns", {}).items()])
    types = parse_types([f"{own}={name}" for own, name in settings.get("types", {}).items()])
    timezone = None if settings.get("timezone") is None else known_timezone(settings["timezone"])
    skips_bad_lines = settings.get("skip_bad_lines", False)
    mapping = TableMapping(columns, timezone, settings.get("decimal"), skips_bad_lines, types)
    with TemporaryDirectory(prefix="lisarec-") as cache:
        try:
            directory, _ = data_directory(data, mapping, Path(cache))
            yield directory
        except DataError as exc:
            raise DataError(OPTION.sub(_argument, str(exc))) from None


def _argument(option: re.Match[str]) -> str:
    """Return the argument that is equivalent to an option of the command line."""
    name, value = option["name"].replace("-", "_"), option["quoted"] or option["pair"] or option["zone"]
    if name == "skip_bad_lines":
        return f"{name}=True"
    if value is None:
        return name
    is_mapping = name in ("columns", "types")
    return f"{name}={dict(pair.rpartition('=')[::2] for pair in value.split(',')) if is_mapping else value!r}"
