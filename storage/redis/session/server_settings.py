"""The settings that a server needs to keep its data, from CONFIG, or from INFO if CONFIG is forbidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

POLICY = "maxmemory-policy"
SAFE_SETTINGS = {"appendonly": "yes", "appendfsync": "always", POLICY: "noeviction"}
REQUIRED_SETTINGS = ("appendonly", POLICY)
UNSAFE = "its {name} is {value}. Set it to {safe}, with CONFIG SET and in the configuration of the server"


def keeps_events(policy: str) -> bool:
    """Return whether a server with this maxmemory-policy evicts nothing but states with a time to live."""
    return policy == SAFE_SETTINGS[POLICY] or policy.startswith("volatile-")


def reported_settings(info: Any, *configs: Any) -> dict[str, str]:
    """Parse the replies to INFO and CONFIG GET. An error reply gives no settings."""
    reported: dict[str, str] = {}
    if isinstance(info, Mapping):
        if "aof_enabled" in info:
            reported["appendonly"] = "yes" if info["aof_enabled"] else "no"
        if "maxmemory_policy" in info:
            reported[POLICY] = str(info["maxmemory_policy"])
    for config in configs:
        reported |= config if isinstance(config, Mapping) else {}
    return reported


def unsafe_setting(info: Any, *configs: Any) -> str | None:
    """Return why the server would lose events, by its replies to INFO and to CONFIG GET for REQUIRED_SETTINGS.

    A server that does not report its settings is trusted. If it reports its append-only file only through INFO, it is
    a managed server, which may keep its data in another way, as Amazon MemoryDB does.
    """
    policy = reported_settings(info, *configs).get(POLICY, SAFE_SETTINGS[POLICY])
    if not keeps_events(policy):
        return UNSAFE.format(name=POLICY, value=policy, safe=SAFE_SETTINGS[POLICY])
    if reported_settings(None, *configs).get("appendonly") == "no":
        return UNSAFE.format(name="appendonly", value="no", safe=SAFE_SETTINGS["appendonly"])
    return None


class Evictions:
    """The keys that a server has evicted to free memory while it was watched.

    lost  what is lost, until an operator accepts the loss
    """

    def __init__(self) -> None:
        self.lost: str | None = None
        self._run_id: str | None = None
        self._counted = 0
        self._takes_all = False

    def count(self, info: Any, policy: str) -> None:
        """Record how many keys the server has evicted, and whether these may include others than expiring states."""
        if not isinstance(info, Mapping):
            return
        evicted, run_id, takes_all = int(info.get("evicted_keys", 0)), str(info.get("run_id")), not keeps_events(policy)
        if run_id == self._run_id and evicted > self._counted and (takes_all or self._takes_all):
            self.lost = f"it has evicted {evicted - self._counted} keys to make room"
        self._run_id, self._counted, self._takes_all = run_id, evicted, takes_all
