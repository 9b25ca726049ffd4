"""Options that several commands share, and the settings from options and environment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import typer

from model.config import MECHANISMS, PRESETS
from storage.folders.place import Place, parse_place
from storage.records import MAIN_TENANT

if TYPE_CHECKING:
    from pydantic import ValidationError

    from app.serving.model_locations import ModelOutput
    from app.settings import Settings, StoreSettings
    from model.data.exports.mapping import TableMapping

SettingsT = TypeVar("SettingsT", bound="StoreSettings")
Device = Literal["cpu", "cuda"]


def place_of(text: str) -> Place:
    """Return the location. Raise BadParameter if it is neither a path nor a bucket URL."""
    try:
        return parse_place(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None


def _data_directory(text: str) -> Path:
    """Return the data directory. One in a bucket is copied first."""
    from app.jobs.datasets.bucket import local_copy

    place = place_of(text)
    return place if isinstance(place, Path) else local_copy(place, store_settings().cache_dir)


OptionalDataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Data directory, or a shop's event table, to use instead of the generated shop.",
        metavar="DIR|FILE|URL",
        parser=_data_directory,
    ),
]
ModelOption = Annotated[
    str, typer.Option("--model", help="Model directory that 'lisarec train' wrote.", metavar="DIR|URL")
]
ModelsDirOption = Annotated[
    str | None,
    typer.Option(
        help="Folder of the models. Default: the folder of LISAREC_MODEL_DIR, else models.", metavar="DIR|URL"
    ),
]
TenantsOption = Annotated[
    list[str] | None, typer.Option(help="Additional tenant and its model. Repeatable.", metavar="NAME=DIR|URL")
]


def models_of_tenants(given: Sequence[str]) -> dict[str, str]:
    """Return the models by tenant; raise BadParameter if one is missing or given twice."""
    pairs = [text.partition("=") for text in given]
    if not all(name and model for name, _, model in pairs) or len({name for name, _, _ in pairs}) < len(pairs):
        raise typer.BadParameter("pass each additional tenant once, as --tenant NAME=DIR")
    return {name: model for name, _, model in pairs}


UrlOption = Annotated[str, typer.Option(help="Address of the service.")]
EventsKeyOption = Annotated[
    Path | None,
    typer.Option(help="File with a key of the scope events:write, if the service has keys.", metavar="FILE"),
]
API_KEY = re.compile("[!-~]+")  # the characters that an HTTP header can carry


def read_key(file: Path | None) -> str | None:
    """Return the API key in the file, None without a file.

    raises  ValueError  unless the file contains one key; the message names the file and does not quote it
            OSError     when the file cannot be read
    """
    if file is None:
        return None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        key = ""
    if API_KEY.fullmatch(key) is None:
        raise ValueError(f"'{file}' must contain one API key and nothing else; create a key with 'lisarec keys add'")
    return key


def moment(text: str) -> datetime:
    """Return a date or time, in UTC by default. Raise BadParameter if the text is neither."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a valid date or time; use a format such as 2026-05-31 or 2026-05-31T06:00Z"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


ThreadsOption = Annotated[
    int,
    typer.Option(
        min=1, help="Number of CPU threads. More than one helps only if other processes leave the cores idle."
    ),
]


def size_in_bytes(text: str) -> int:
    """Return a size such as 4GiB in bytes. Raise BadParameter if the text is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:iB|i|B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a valid size; use a format such as 4GiB or 512MiB")
    number, unit = found.groups()
    return int(float(number) * 1024 ** (1 + "KMGT".index(unit.upper())))


MemoryOption = Annotated[
    int | None,
    typer.Option(
        parser=size_in_bytes,
        help="Memory limit of the training, such as 4GiB. The events are then kept in files next to the model.",
        metavar="SIZE",
    ),
]


def file_to_write(text: str) -> Path:
    """Return the path. Raise BadParameter, before the work begins, if it is a directory or has none to be in."""
    file = Path(text)
    if file.is_dir():
        raise typer.BadParameter(f"{text!r} is a directory; name a file in it")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {str(file.parent)!r}; create it first")
    return file


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", parser=file_to_write, help="Also write the numbers to this JSON file.", metavar="FILE"),
]


def write_json(file: Path | None, numbers: object) -> None:
    """Write the numbers to the file of a JsonOption, if one is given."""
    if file is not None:
        file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


class Address(NamedTuple):
    """An address to listen on."""

    host: str
    port: int


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is not a valid HOST:PORT; use a format such as 127.0.0.1:9464")
    from app.settings import listening_host

    return Address(listening_host(host), int(port))


MetricsOption = Annotated[
    Address | None, typer.Option(parser=_address, help="Serve Prometheus metrics at this address.", metavar="HOST:PORT")
]


@dataclass(frozen=True)
class MappingOptions:
    """Options that map a shop's tables to the format of a data directory."""

    columns: Annotated[
        list[str] | None,
        typer.Option(
            help="Column mapping, such as sku=item_id,date+time=timestamp. Repeatable.", metavar="OWN=NAME,..."
        ),
    ] = None
    timezone: Annotated[
        str | None, typer.Option(help="Time zone of timestamps without one, such as Europe/Berlin.", metavar="ZONE")
    ] = None
    decimal: Annotated[
        Literal[".", ","] | None,
        typer.Option(help="Decimal separator. Thousands separators and currency signs are removed."),
    ] = None
    types: Annotated[
        list[str] | None,
        typer.Option(
            help="Names of event types, such as Kauf=purchase,*=view; * stands for all remaining lines. Repeatable.",
            metavar="OWN=TYPE,...",
        ),
    ] = None
    skip_bad_lines: Annotated[bool, typer.Option("--skip-bad-lines", help="Skip unreadable lines.")] = False

    def mapping(self) -> TableMapping:
        """Return the mapping that the options describe. Raise BadParameter if they are invalid."""
        from model.data.exports.mapping import TableMapping, known_timezone, parse_columns, parse_types

        try:
            timezone = None if self.timezone is None else known_timezone(self.timezone)
            columns, types = parse_columns(self.columns or ()), parse_types(self.types or ())
            return TableMapping(columns, timezone, self.decimal, self.skip_bad_lines, types)
        except ValueError as exc:
            raise typer.BadParameter(str(exc)) from None

    def arguments(self) -> str:
        """Return the options as command-line text, each preceded by a space."""
        given = [(f"--{name}", value) for name in ("timezone", "decimal") if (value := getattr(self, name)) is not None]
        listed = [(f"--{name}", text) for name in ("columns", "types") for text in getattr(self, name) or ()]
        pairs = [*listed, *given]
        switch = " --skip-bad-lines" if self.skip_bad_lines else ""
        return "".join(f" {name} {quote(value)}" for name, value in pairs) + switch


@dataclass(frozen=True, kw_only=True)
class DataOptions(MappingOptions):
    """Options that name the input tables and their mapping."""

    data: Annotated[
        Path,
        typer.Option(
            help="Data directory with interactions.tsv.gz, or a shop's event table.",
            metavar="DIR|FILE|URL",
            parser=_data_directory,
        ),
    ]

    def directory(self) -> Path:
        """Return a data directory, and print what is skipped. If a mapping is given, the directory is a copy.

        raises  BadParameter, DataError, OSError
        """
        from app.cli.console import say
        from app.jobs.datasets.mapped_copy import data_directory

        directory, left_out = data_directory(self.data, self.mapping(), store_settings().cache_dir)
        for line in left_out:
            say(line)
        return directory


@dataclass(frozen=True)
class StoreOptions:
    """Options that name the store."""

    redis_url: Annotated[
        str | None,
        typer.Option(
            help="Redis that stores users and the event log. Default: LISAREC_REDIS_URL, else SQLite.", metavar="URL"
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the SQLite store for users and the event log. Default: LISAREC_DATA_DIR, else state.",
            metavar="DIR",
        ),
    ] = None

    def settings(self, **others: object) -> StoreSettings:
        """Return the settings of the store together with others. Raise BadParameter if they are invalid."""
        return store_settings(**vars(self), **others)

    def command(self, command: str, models_dir: Place | str | None = None) -> str:
        """Return a command for the same store and tenant, in quotes, to suggest as the next step.

        It contains no passwords.
        """
        from app.settings import without_password

        options = {
            "--redis-url": None if self.redis_url is None else without_password(self.redis_url),
            "--data-dir": self.data_dir,
            "--models-dir": models_dir,
        }
        given = [part for name, value in options.items() if value is not None for part in (name, quote(str(value)))]
        tenant = self.settings().tenant
        of_tenant = () if tenant == MAIN_TENANT else (f"LISAREC_TENANT={tenant}",)
        return f"'{' '.join((*of_tenant, command, *given))}'"


@dataclass(frozen=True)
class LogOptions(StoreOptions):
    """Options that name the store and its archive."""

    archive_dir: Annotated[
        str | None, typer.Option(help="Archive of older events, written by 'lisarec archive'.", metavar="DIR|URL")
    ] = None


def known_preset(name: str) -> str:
    """Return the name. Raise BadParameter if it is not a preset."""
    if name not in PRESETS:
        raise typer.BadParameter(f"unknown preset {name!r}; valid presets: {', '.join(sorted(PRESETS))}")
    return name


def known_preset_or_mechanism(name: str) -> str:
    """Return the name. Raise BadParameter if it is neither a preset nor a mechanism."""
    return name if name in MECHANISMS else known_preset(name)


def service_settings(**given: object) -> Settings:
    """Return the settings of a service from the options that are not None. Raise BadParameter if they are invalid."""
    from app.settings import Settings

    return _settings(Settings, given)


def store_settings(**given: object) -> StoreSettings:
    """Return the settings of a store from the options that are not None. Raise BadParameter if they are invalid."""
    from app.settings import StoreSettings

    return _settings(StoreSettings, given)


def _settings(kind: type[SettingsT], given: Mapping[str, object]) -> SettingsT:
    """Return the settings. A --data-dir overrides a Redis from the environment."""
    from pydantic import ValidationError

    from app.settings import problem_of_unknown_variables

    if problem := problem_of_unknown_variables():
        raise typer.BadParameter(problem)
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "redis_url" in options and "data_dir" in options:
        raise typer.BadParameter("pass one of --redis-url and --data-dir: users are stored in Redis or in SQLite")
    try:
        return kind(**({"redis_url": None, **options} if "data_dir" in options else options))
    except ValidationError as exc:
        raise bad_values(exc, lambda setting: f"{setting} (LISAREC_{setting.upper()})") from None


def model_output(out: str, resume: bool) -> ModelOutput:
    """Return where to write the model. Raise BadParameter if it cannot be written there."""
    from app.serving.model_locations import ModelOutput

    try:
        output = ModelOutput(place_of(out), store_settings())
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None
    if output.is_finished and not resume:
        raise typer.BadParameter(f"a model for {out} is trained, but not uploaded; pass --resume to upload it")
    return output


def bad_values(exc: ValidationError, name_of: Callable[[Any], str] = str) -> typer.BadParameter:
    """Return the usage error for invalid values. An error about several fields names no single one.

    name_of  gives the name of a field
    """
    return typer.BadParameter(
        "; ".join(
            ": ".join((*map(name_of, error["loc"][:1]), error["msg"].removeprefix("Value error, ")))
            for error in exc.errors()
        )
    )
