"""Watches the keys file, and records added and removed keys in the audit logs."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress

from app.http.auth.keys import Keyring
from storage.errors import StorageError
from storage.items.audit import KEYS_FILE, AuditEntry, AuditLog, KeysSeen

LOOK_EVERY_S = 1.0


async def follow_keys(keyring: Keyring, logs: Mapping[str, AuditLog]) -> None:
    """Record each added or removed key of each tenant, whether by `lisarec keys` or by hand, once for all processes.

    A change that is made while no process runs is recorded when one starts.
    """
    noted: dict[str, str] = {}
    while True:
        for tenant, log in logs.items():
            with suppress(StorageError):  # the next check finds the same changes
                noted[tenant] = await _note(keyring, tenant, log, noted.get(tenant))
        await asyncio.sleep(LOOK_EVERY_S)


async def _note(keyring: Keyring, tenant: str, log: AuditLog, noted: str | None) -> str:
    """Record the changes since any process last checked, and return the ids of the current keys as JSON."""
    scopes = {key.id: key.scopes for key in keyring.keys_of(tenant)}
    while (now := json.dumps(sorted(scopes))) != noted:
        believed = await log.keys_seen(tenant)
        before = set(json.loads(believed or "[]"))
        new, gone = sorted(scopes.keys() - before), sorted(before - scopes.keys())
        made = [AuditEntry.now(KEYS_FILE, "key.add", key_id, {"scopes": [*scopes[key_id]]}) for key_id in new]
        revoked = [AuditEntry.now(KEYS_FILE, "key.remove", key_id) for key_id in gone]
        if believed == now or await log.append(tenant, [*made, *revoked], KeysSeen(believed, now)):
            noted = now
    return now
