"""The location of a folder: a path, or the URL of a bucket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from storage.folders.folder import Folder
from storage.folders.local_folder import LocalFolder

SCHEMES = ("s3", "gs", "az")


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """The URL of a prefix in a bucket, without a trailing slash."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectUrl:
        """The URL without its last part."""
        return ObjectUrl(self.url.rpartition("/")[0])

    def __truediv__(self, name: str) -> ObjectUrl:
        return ObjectUrl(f"{self.url}/{name}")


Place: TypeAlias = Path | ObjectUrl


def parse_place(given: str | Place) -> Place:
    """Parse a location that an operator gives.

    raises  ValueError  if a URL is not that of a bucket, or contains more than the location
    """
    if not isinstance(given, str):
        return given
    scheme, separator, _ = given.partition("://")
    if not separator:
        return Path(given)
    parts = urlsplit(given)
    if scheme not in SCHEMES or not parts.hostname:
        raise ValueError(
            f"'{scheme}://' is not a supported location; use a path, or s3://, gs:// or az://BUCKET/PREFIX"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"'{scheme}://...' must be only a bucket and a prefix; credentials come from the environment")
    return ObjectUrl(given.rstrip("/"))


def open_folder(place: Place, cache: Path) -> Folder:
    """Return the folder at this place; the cache keeps copies of a bucket's objects."""
    if isinstance(place, Path):
        return LocalFolder(place)
    from storage.folders.object_folder import ObjectFolder  # without a bucket, its library is not loaded

    return ObjectFolder(place.url, cache)


def as_folder(folder: Path | Folder) -> Folder:
    """Return the folder, or the folder at this path."""
    return LocalFolder(folder) if isinstance(folder, Path) else folder
