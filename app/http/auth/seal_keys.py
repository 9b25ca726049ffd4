"""The keys that seal visitors' states, in a file that operators rotate. It contains the keys themselves.

The file has one line for each key: its id, a space, and its 256 bits, both in hexadecimal digits. The first key seals
states, and all keys open them. Blank lines and lines that begin with # are ignored.
"""

import logging
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from app.http.auth.watched_file import WatchedFile
from storage.folders.local_folder import make_folder, replace_file

ID_BYTES, KEY_BYTES = 4, 32
_LINE = re.compile(f"([0-9a-f]{{{2 * ID_BYTES}}}) ([0-9a-f]{{{2 * KEY_BYTES}}})")

logger = logging.getLogger(__name__)


class SealKeysError(ValueError):
    """The file cannot be used. The message names the place and the remedy, and quotes nothing from the file."""


class SealKey(NamedTuple):
    """One line of the file."""

    id: bytes
    secret: bytes

    def line(self) -> str:
        """Return the key as a line of the file."""
        return f"{self.id.hex()} {self.secret.hex()}\n"


def read(path: Path) -> list[SealKey]:
    """Return the keys of the file, at least one.

    raises  SealKeysError  when the file cannot be read or is invalid, or has no key
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise SealKeysError(
            f"the seal keys '{path}' cannot be read ({reason}); create them with 'lisarec keys seal'"
        ) from None
    keys = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            match = _LINE.fullmatch(line.rstrip())
            if match is None:
                raise SealKeysError(
                    f"'{path}', line {number} is not a seal key; remove it, and make keys with 'lisarec keys seal'"
                )
            keys.append(SealKey(bytes.fromhex(match[1]), bytes.fromhex(match[2])))
    if not keys:
        raise SealKeysError(f"the file '{path}' has no seal key; create keys with 'lisarec keys seal'")
    if len({key.id for key in keys}) < len(keys):
        raise SealKeysError(f"'{path}' has two seal keys with the same id; remove one of the lines")
    return keys


def rotate(path: Path, keep: int = 4) -> list[SealKey]:
    """Move the file's second key to the first place, so that it seals, add a new second key, and return the keys.

    The second key has been in the file since the previous rotation. So every process knows it already, even if the file
    takes long to reach its machine. Of the older keys, the newest remain, up to `keep` keys in all.

    raises  SealKeysError  when the file exists but cannot be used
    """
    primary, *others = read(path) if path.exists() else [_new_key()]
    following = others[:1] or [primary]
    older = [key for key in (primary, *others[1:]) if key not in following]
    keys = [*following, _new_key(), *older][:keep]
    make_folder(path.parent)
    mode = path.stat().st_mode if path.exists() else 0o600
    replace_file(path, "".join(key.line() for key in keys).encode(), mode)
    return keys


def _new_key() -> SealKey:
    return SealKey(secrets.token_bytes(ID_BYTES), secrets.token_bytes(KEY_BYTES))


class SealKeyring:
    """The keys of a file, which is read again when it changes. If it then cannot be used, the keys stay the same."""

    def __init__(self, path: Path) -> None:
        """Read the file; raises SealKeysError if it cannot be used."""
        self._file = WatchedFile(path)
        self._replace(read(path))

    def primary(self) -> tuple[bytes, AESGCM]:
        """Return the id and the cipher of the key that seals."""
        self._follow(now=False)
        return self._primary, self._ciphers[self._primary]

    def find(self, key_id: bytes) -> AESGCM | None:
        """Return the cipher of the key with this id, after a check for a new file if the id is unknown."""
        self._follow(now=key_id not in self._ciphers)
        return self._ciphers.get(key_id)

    def _follow(self, *, now: bool) -> None:
        if not self._file.has_changed(now=now):
            return
        try:
            self._replace(read(self._file.path))
            logger.warning("reloaded the seal keys: the sealing key is %s", self._primary.hex())
        except SealKeysError as exc:
            logger.error("ignoring the changed seal keys: %s", exc)

    def _replace(self, keys: list[SealKey]) -> None:
        self._ciphers = {key.id: AESGCM(key.secret) for key in keys}
        self._primary = keys[0].id
