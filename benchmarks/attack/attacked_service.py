"""A service in its own process with two tenants and keys, and cheap client connections."""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Self

import httpx
import numpy as np
import orjson
import psutil

from app.http.auth import keys, seal_keys
from app.http.auth.keys import SCOPES
from app.jobs.archive import ArchiverMetrics, ArchiverPlan, run_archiver
from app.jobs.loadtest.synthetic_catalogue import item_id, write_enlarged
from app.schemas.events import MAX_EVENTS
from app.settings import StoreSettings
from benchmarks.attack.costly_calls import ARMS, LONG_LOG, LONG_USER, SHORT_HISTORY, Call
from benchmarks.harness.service_process import free_port, inherited_environment, running_process
from benchmarks.harness.topology import redis_server
from storage.archive.reader import ArchiveReader
from storage.folders.local_folder import LocalFolder

Store = Literal["sqlite", "redis"]

USERS = 64
ARCHIVER_TURNS = 6
REDIS_NAMES = "redis-server", "valkey-server"
TENANT, OTHER_TENANT = "main", "books"
RATE = 10_000_000  # a minute, which refuses nothing: keys without a rate are not charged, and cost less
WINDOW_S, IDLE_SHARE = 0.25, 0.1  # of a processor, in such a time: a service that takes less is idle
SETTLED_WITHIN_S = 300.0
KEYS = {"plain": TENANT, "neighbour": TENANT, "stranger": OTHER_TENANT}
"""The tenant of each key: `neighbour` is of the same tenant as `plain`, `stranger` of another one."""


@dataclass(frozen=True)
class AttackedService:
    """A running service.

    processes  its own, and Redis's where that is its store
    keys       by name
    settings   of its store and archive
    """

    port: int
    processes: Sequence[psutil.Process]
    keys: Mapping[str, str]
    settings: StoreSettings

    @property
    def url(self) -> str:
        """Return the URL of the service."""
        return f"http://127.0.0.1:{self.port}"

    def cpu_s(self) -> float:
        """Return the processor seconds that service and store have used so far, in nanosecond resolution."""
        return sum(time.clock_gettime(_cpu_clock(process.pid)) for process in self.processes)

    def settle(self) -> None:
        """Wait until service and store only poll; raise TimeoutError if they never do."""
        give_up_at_s = time.monotonic() + SETTLED_WITHIN_S
        spent_s = math.inf
        while spent_s > IDLE_SHARE * WINDOW_S:
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(f"the service still takes {spent_s / WINDOW_S:.0%} of a processor")
            before_s = self.cpu_s()
            time.sleep(WINDOW_S)
            spent_s = self.cpu_s() - before_s

    def post(self, key: str, events: Sequence[tuple[str, str, str]], kind: str = "click") -> None:
        """Post events of one type, given by id, user and item."""
        headers = {"Authorization": f"Bearer {self.keys[key]}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60) as client:
            for start in range(0, len(events), MAX_EVENTS):
                some = events[start : start + MAX_EVENTS]
                body = [
                    dict(zip(("event_id", "user_id", "item_id"), one, strict=True)) | {"type": kind} for one in some
                ]
                client.post("/v1/events", json=body).raise_for_status()

    def sealed_state(self, items: int) -> str:
        """Return the sealed state of a visitor with the maximum number of events in a request."""
        events = [{"event_id": f"before-{n}", "item_id": item_id(n * 7 % items)} for n in range(MAX_EVENTS)]
        headers = {"Authorization": f"Bearer {self.keys['plain']}"}
        answer = httpx.post(f"{self.url}/v1/portable/events", json={"events": events}, headers=headers, timeout=60)
        return str(answer.raise_for_status().json()["state"])

    def fill_log(self, user_id: str, events: int, items: int, first: int = 0) -> None:
        """Log this many events for a user of the key `plain`, with ids from the user and a number."""
        numbers = range(first, first + events)
        self.post("plain", [(f"{user_id}-{n}", user_id, item_id(n * 7 % items)) for n in numbers])

    def archive_log(self, user_id: str, events: int, items: int) -> int:
        """Log about this many events for a user of the key `plain`, archive all logs, and return the number of files.

        Each turn archives a quarter of what the one before did, since the archiver would merge files of like sizes.
        """
        for turn in range(ARCHIVER_TURNS):
            rest = events // 4**turn
            self.fill_log(user_id, rest - rest // 4, items, events - rest)
            run_archiver(self.settings, ArchiverPlan(None, 0.0, None), lambda _: None, ArchiverMetrics())
        archive = ArchiveReader(LocalFolder(Path(str(self.settings.archive_dir))))
        return archive.read(lambda snapshot: len(snapshot.files_of(TENANT, user_id)))


def _cpu_clock(pid: int) -> int:
    """Return the id of a process's CPU clock, like clock_getcpuclockid(3) on Linux."""
    return ~pid << 3 | 2


class Connection:
    """A connection for sequential requests that reads only statuses and lengths of responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Self:
        """Connect to the service on this port."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def exchange(self, request: bytes) -> tuple[int, int]:
        """Send a request; return the status and the bytes of the body."""
        self._writer.write(request)
        await self._writer.drain()
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        await self._reader.readexactly(length)
        return int(head.split(b" ", 2)[1]), length

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


def request_bytes(call: Call, key: str, number: int = 0) -> bytes:
    """Return the bytes of the call; `number` is how often it was sent before."""
    body = b"" if call.body is None else orjson.dumps(call.body(number))
    path = call.path.replace("{number}", str(number))
    lines = [f"{call.method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def attacked_service(model: Path, items: int, store: Store = "sqlite") -> Iterator[AttackedService]:
    """Serve the model with this many items to two tenants, whose users have histories."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        models = {tenant: Path(directory) / "models" / tenant / "shop" for tenant in (TENANT, OTHER_TENANT)}
        for enlarged in models.values():
            write_enlarged(enlarged, model, items, "trained")
        for arm in ARMS:
            shutil.copytree(models[TENANT], models[TENANT].with_name(arm))
        texts = {}
        for name, tenant in KEYS.items():
            texts[name], key = keys.make(tenant, SCOPES, requests_per_minute=RATE)
            keys.add(Path(directory) / "keys", key)
        environment = inherited_environment()
        environment |= {"LISAREC_TENANTS": orjson.dumps({OTHER_TENANT: str(models[OTHER_TENANT])}).decode()}
        seal_keys.rotate(Path(directory) / "seal_keys")
        environment |= {"LISAREC_SEAL_KEYS_FILE": f"{directory}/seal_keys"}
        command = [sys.executable, "-m", "app", "serve", "--model", str(models[TENANT])]
        command += ["--port", str(port := free_port())]
        settings = StoreSettings(data_dir=Path(directory) / "state", archive_dir=Path(directory) / "archive")
        command += ["--keys", f"{directory}/keys", "--archive-dir", str(settings.archive_dir)]
        processes = []
        if store == "redis":
            settings = settings.model_copy(update={"redis_url": stack.enter_context(redis_server(Path(directory)))})
            command += ["--redis-url", str(settings.redis_url)]
            processes = [one for one in psutil.Process().children(recursive=True) if one.name() in REDIS_NAMES]
        else:
            command += ["--data-dir", str(settings.data_dir)]
        url = f"http://127.0.0.1:{port}"
        service = stack.enter_context(running_process(command, url, env=environment, stderr=subprocess.DEVNULL))
        attacked = AttackedService(port, [psutil.Process(service.pid), *processes], texts, settings)
        for name in ("plain", "stranger"):
            _post_histories(attacked, name, items)
        yield attacked


def _post_histories(service: AttackedService, key: str, items: int) -> None:
    """Post histories of users, and for LONG_USER as many purchases as are ever read of a user."""
    rng = np.random.default_rng(0)
    users = [f"user-{user}" for user in range(USERS) for _ in range(SHORT_HISTORY)] + [LONG_USER] * LONG_LOG
    rows = rng.integers(0, items, len(users))
    events = [(f"history-{n}", user, item_id(int(rows[n]))) for n, user in enumerate(users)]
    clicks = USERS * SHORT_HISTORY
    service.post(key, events[:clicks])
    service.post(key, events[clicks:], "purchase")
