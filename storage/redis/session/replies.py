"""Parsers of a server's replies about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage.redis.layout.stream_entries import entry_seq


def process_of(info: Any, connected: int) -> tuple[str, str]:
    """Return an id that changes when the server restarts; without one, every connection counts as a new server."""
    if isinstance(info, Exception) or "run_id" not in info:
        return "", str(connected)
    return str(info["run_id"]), str(info.get("master_replid", ""))


def is_replica(info: Any) -> bool:
    """Return whether a server is a replica; a server that does not report this is not."""
    return not isinstance(info, Exception) and info.get("role") == "slave"


def has_entry(entries: Sequence[tuple[bytes, Any]], entry_id: str) -> bool:
    """Return whether the first entry is that one, or a later one."""
    return bool(entries) and (
        entries[0][0].decode() == entry_id or entry_seq(entries[0][0]) > entry_seq(entry_id.encode())
    )
