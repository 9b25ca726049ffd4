"""The audit log: who has done what to a tenant's models, lists, keys and users, and when. Nothing changes an entry."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple, Protocol

COMMAND_LINE = "command line"  # who runs `lisarec` on a machine
KEYS_FILE = "keys file"  # who edits that, with or without `lisarec keys`
MARK = "user:"
MARK_CHARS = 32  # 128 bits


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Something that was done.

    time_us  microseconds since the epoch
    actor    the id of the key, COMMAND_LINE or KEYS_FILE; empty in a service without keys
    action   what was done, as ``model.activate``
    subject  to what: a name, or what `user_mark` makes of a user's id
    details  more about it, as JSON has it
    """

    time_us: int
    actor: str
    action: str
    subject: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def now(cls, actor: str, action: str, subject: str = "", details: Mapping[str, Any] | None = None) -> AuditEntry:
        """Return an entry of this moment."""
        return cls(time.time_ns() // 1_000, actor, action, subject, details or {})

    def to_json(self) -> str:
        """Return the text that stores have of it."""
        return json.dumps(astuple(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> AuditEntry:
        """Return the entry of the text."""
        return cls(*json.loads(text))


class NumberedEntry(NamedTuple):
    """An entry and its number, among those of the tenant, from 1."""

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

        keys  what is noted in the same step; where what was noted before is not as believed, nothing is appended, and
              the answer is False
        """
        ...

    async def entries(self, tenant: str, *, after: int = 0, limit: int = 100) -> list[NumberedEntry]:
        """Return the first `limit` entries with numbers above `after`, in order."""
        ...

    async def keys_seen(self, tenant: str) -> str:
        """Return the keys of the tenant at the last check; empty if there was none."""
        ...


def user_mark(secret: bytes, tenant: str, user_id: str) -> str:
    """Return what stands for a user in the audit log: a keyed hash, from which nobody without the secret tells whom.

    secret  of the store
    """
    mac = hmac.new(secret, f"audit\0{tenant}\0{user_id}".encode("utf-8", errors="surrogatepass"), hashlib.sha256)
    return MARK + mac.hexdigest()[:MARK_CHARS]
