"""API keys, in a file that operators edit. It contains hashes, never keys.

A key is ``lisarec_ID_SECRET``. The id has 48 random bits and names the key in the file and in logs; the secret has 256.
A fast hash is enough for this many random bits; passwords would need a slow one. The file has one line of JSON for each
key. Blank lines and lines that begin with # are ignored. docs/reference/data-formats.md describes the fields.
"""

import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from app.http.auth.watched_file import WatchedFile
from app.schemas.fields import Name
from storage.folders.local_folder import make_folder, replace_file, sync

Scope = Literal[
    "events:write",
    "recs:read",
    "portable",
    "catalogue:write",
    "scenarios:write",
    "users:admin",
    "admin",
    "metrics:read",
]
SCOPES: tuple[Scope, ...] = get_args(Scope)
BROWSER_SCOPES: frozenset[Scope] = frozenset({"events:write", "portable"})
INCLUDED: Mapping[Scope, Scope] = {"scenarios:write": "admin"}  # by scope, the scope that includes it
KEY_PREFIX = "lisarec"

ORIGIN = re.compile(r"(https?|capacitor|ionic)://[a-z0-9.-]+(:[0-9]{1,5})?")  # also of web views in apps

logger = logging.getLogger(__name__)


class KeysFileError(ValueError):
    """The file cannot be used. The message names the place and the remedy, and quotes nothing from the file."""


def _as_browsers_send_it(origin: str) -> str:
    """Return the scheme, the host in lower case and ASCII, and the port unless it is the scheme's default.

    raises  ValueError  if there is more than that, or less
    """
    from httpx import URL, InvalidURL  # most services have no key with an origin

    try:
        url = URL(origin)
    except InvalidURL:
        url = URL()
    sent = f"{url.scheme}://{url.netloc.decode()}"
    if not ORIGIN.fullmatch(sent) or url.path != "/" or url.query or url.fragment or url.userinfo:
        raise ValueError("write a scheme, a host and no path, such as https://shop.example or http://localhost:3000")
    return sent


Origin = Annotated[str, StringConstraints(max_length=256), AfterValidator(_as_browsers_send_it)]


class Key(BaseModel, extra="forbid", frozen=True):
    """One line of the file: everything about a key except the key itself."""

    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
    tenant: Name
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    origins: tuple[Origin, ...] = ()  # of the pages that may use the key, which is then public
    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] | None = None  # plain requests
    new_users_per_hour: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None  # None: see RateLimiter
    event_types: tuple[Name, ...] = ()  # that it may post; empty for all
    audience: Name | Literal[""] = ""  # keys with the same audience open each other's sealed states
    note: Annotated[str, StringConstraints(max_length=256)] = ""

    @field_validator("note")
    @classmethod
    def _refuse_key_in_note(cls, note: str) -> str:
        if f"{KEY_PREFIX}_" in note:
            raise ValueError("looks like a key, which does not belong here")
        return note

    @model_validator(mode="after")
    def _browsers_reach_no_user(self) -> Self:
        if self.origins and not BROWSER_SCOPES.issuperset(self.scopes):
            allowed = " and ".join(sorted(BROWSER_SCOPES))
            raise ValueError(f"a key with origins is public, so its only allowed scopes are {allowed}")
        return self

    @model_validator(mode="after")
    def _types_limit_events(self) -> Self:
        if self.event_types and BROWSER_SCOPES.isdisjoint(self.scopes):
            raise ValueError(f"event types need a scope that posts events: {' or '.join(sorted(BROWSER_SCOPES))}")
        return self

    def allows(self, required: Scope) -> bool:
        """Return whether the key has the scope, or one that includes it."""
        return required in self.scopes or INCLUDED.get(required) in self.scopes

    @property
    def is_public(self) -> bool:
        """Whether the key is public, because it is part of a web page."""
        return bool(self.origins)

    def line(self) -> str:
        """Return the key as a line of the file."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True)) + "\n"


DUMMY_KEY = Key(id="0" * 12, tenant="nobody", scopes=("recs:read",), sha256="0" * 64)  # no text has this hash


def make(tenant: str, scopes: Iterable[Scope], origins: Iterable[str] = (), **others: object) -> tuple[str, Key]:
    """Create a new key; return its text, which is shown once, and the entry for the file.

    others  further fields of the key
    raises  ValidationError  when a part is invalid, or the parts contradict each other
    """
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    text = f"{KEY_PREFIX}_{key_id}_{secret}"
    fields = {"id": key_id, "tenant": tenant, "scopes": tuple(scopes), "sha256": _hash(text), "origins": tuple(origins)}
    return text, Key.model_validate(fields | others)


def add(path: Path, key: Key) -> None:
    """Append the key to the file, which is created if it does not exist. It is durable when this returns."""
    if path.exists():
        read(path)  # raises if it is not a keys file, before anything is added
    make_folder(path.parent)
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, 2) - 1))
        lacks_newline = file.read() not in (b"", b"\n")  # an editor may leave the last line open
        file.write((b"\n" if lacks_newline else b"") + key.line().encode())
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def remove(path: Path, key_id: str) -> None:
    """Remove the key from the file, and keep the other lines unchanged.

    raises  KeysFileError  when the file has no such key
    """
    if key_id not in (key.id for key in read(path)):
        raise KeysFileError(f"'{path}' has no key {key_id!r}; list its keys with 'lisarec keys list'")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not (_is_entry(line) and json.loads(line)["id"] == key_id)]
    replace_file(path, "".join(kept).encode(), path.stat().st_mode)


def read(path: Path) -> list[Key]:
    """Return the keys of the file.

    raises  KeysFileError  when the file cannot be read or is invalid
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise KeysFileError(
            f"the keys file '{path}' cannot be read ({reason}); create a key with 'lisarec keys add'"
        ) from None
    keys = [_parse(line, f"'{path}', line {number}") for number, line in enumerate(lines, 1) if _is_entry(line)]
    ids = [key.id for key in keys]
    if len(set(ids)) < len(ids):
        raise KeysFileError(f"'{path}' has two keys with the same id; remove one of the lines")
    return keys


def _is_entry(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _parse(line: str, place: str) -> Key:
    try:
        return Key.model_validate_json(line)
    except ValidationError as exc:
        # without the input, which may be a key pasted into the wrong place
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        field = first["loc"][0] if first["loc"] and first["loc"][0] in Key.model_fields else "the line"
        reason = "is not a field of a key" if first["type"] == "extra_forbidden" else first["msg"]
        reason = "is not JSON" if first["type"] == "json_invalid" else reason
        raise KeysFileError(
            f"{place}: {field}: {reason}; correct the line, or remove it and create another key with 'lisarec keys add'"
        ) from None


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


class Keyring:
    """The keys of a file, which is read again when it changes. If it then cannot be used, the keys stay the same.

    ignores_file  whether the file cannot be used since its last change
    """

    def __init__(self, path: Path, tenants: Iterable[str]) -> None:
        """Read the file; raises KeysFileError if it cannot be used."""
        self.ignores_file = False
        self._file = WatchedFile(path)
        self._tenants = frozenset(tenants)
        self._replace(read(path))

    def find(self, text: str) -> Key | None:
        """Return the key with this text if its tenant is served here. Unknown keys take as long as known ones."""
        self._poll()
        key = self._keys.get(text.partition("_")[2].partition("_")[0], DUMMY_KEY)
        is_same = hmac.compare_digest(_hash(text), key.sha256)
        return key if is_same else None

    def keys_of(self, tenant: str) -> list[Key]:
        """Return the keys of the tenant."""
        self._poll()
        return [key for key in self._keys.values() if key.tenant == tenant]

    def allows(self, origin: str) -> bool:
        """Return whether pages of this origin may use any key."""
        self._poll()
        return origin in self._origins

    def _poll(self) -> None:
        if not self._file.has_changed():
            return
        try:
            self._replace(read(self._file.path))
            self.ignores_file = False
            logger.warning("reloaded the keys file: %d valid keys", len(self._keys))
        except KeysFileError as exc:
            self.ignores_file = True
            logger.error("ignoring the changed keys file: %s", exc)

    def _replace(self, keys: list[Key]) -> None:
        foreign = sorted({key.tenant for key in keys} - self._tenants)
        if foreign:
            logger.warning("ignoring keys of tenants that this service does not serve: %s", ", ".join(foreign))
        self._keys = {key.id: key for key in keys if key.tenant in self._tenants}
        self._origins = frozenset(chain.from_iterable(key.origins for key in self._keys.values()))
        if not self._keys:
            logger.warning("no valid key: the service rejects every call until you create one with 'lisarec keys add'")
