"""The audit log: who did what to a tenant's models, lists, keys and users, and when. Entries never change."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple, Protocol

COMMAND_LINE = "command line"  # someone who runs `lisarec` on a machine
KEYS_FILE = "keys file"  # someone who edits the keys file, with or without `lisarec keys`
MARK = "user:"
MARK_CHARS = 32  # 128 bits


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An action that was performed.

    time_us  microseconds since the epoch
    actor    the id of the key, COMMAND_LINE or KEYS_FILE; empty if the service has no keys
    action   the name of the action, such as ``model.activate``
    subject  the object of the action: a name, or the `user_mark` of a user
    details  additional JSON values
    """

    time_us: int
    actor: str
    action: str
    subject: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def now(cls, actor: str, action: str, subject: str = "", details: Mapping[str, Any] | None = None) -> AuditEntry:
        """Return an entry with the current time."""
        return cls(time.time_ns() // 1_000, actor, action, subject, details or {})

    def to_json(self) -> str:
        """Return the text that stores keep."""
        return json.dumps(astuple(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> AuditEntry:
        """Parse the text that `to_json` returns."""
        return cls(*json.loads(text))


class NumberedEntry(NamedTuple):
    """An entry and its number in the tenant's log, counted from 1."""

    number: int
    entry: AuditEntry


class KeysSeen(NamedTuple):
    """The keys of a tenant at the last check and now."""

    believed: str
    now: str


class AuditLog(Protocol):
    """The audit logs of tenants."""

    async def append(self, tenant: str, entries: Sequence[AuditEntry], keys: KeysSeen | None = None) -> bool:
        """Append the entries in one atomic, durable step.

        keys  what to note in the same step; if the keys noted before differ from `believed`, nothing is appended, and
              False is returned
        """

    async def entries(self, tenant: str, *, after: int = 0, limit: int = 100) -> list[NumberedEntry]:
        """Return the first `limit` entries with numbers above `after`, in order."""

    async def keys_seen(self, tenant: str) -> str:
        """Return the keys of the tenant at the last check; empty if there was none."""


def user_mark(secret: bytes, tenant: str, user_id: str) -> str:
    """Return the pseudonym of a user in the audit log: a keyed hash that reveals nothing without the secret.

    secret  the secret of the store
    """
    mac = hmac.new(secret, f"audit\0{tenant}\0{user_id}".encode("utf-8", errors="surrogatepass"), hashlib.sha256)
    return MARK + mac.hexdigest()[:MARK_CHARS]
