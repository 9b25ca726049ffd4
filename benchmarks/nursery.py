"""A process that has imported the service and forks a `lisarec` command for every line on its standard input.

    python -m benchmarks.nursery WEAKNESS       # lines: JSON arrays, the arguments and at the end the log's path

Importing torch takes seconds, and a bench that kills hundreds of replicas would measure little else. What is forked is
the command as it is, or with a weakness that a bench has to notice:

    none           the command as it is
    without-guard  no event is ever taken for a duplicate: each gets another id before it reaches the store
    unsynced       SQLite does not sync its log at a commit
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import app.main  # noqa: F401, what takes long
import storage.sqlite
from app import cli
from benchmarks.ledger import RENAMED
from storage.redis import RedisStore
from storage.state import Event
from storage.store import Appended

class Nursery:
    """Starts `lisarec` commands in a fraction of a second: each is forked from a process that has imported everything.

    environment  of all of them, beside one's own without LISAREC_*
    """

    def __init__(self, environment: Mapping[str, str] | None = None, *, weakness: str = "none") -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LISAREC_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.nursery", weakness],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=inherited | dict(environment or {}),
            start_new_session=True,
        )

    def spawn(self, arguments: Sequence[str], log: Path) -> int:
        """Start `lisarec` with the arguments; the id of its process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([*arguments, str(log)]).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def switch_off_guard(store: Any) -> None:
    append = store.append

    async def append_renamed(self: Any, tenant: str, events: Sequence[Event]) -> list[Appended]:
        marks = (f"{RENAMED}{os.getpid()}-{number}" for number in numbers)
        renamed = [replace(event, event_id=event.event_id + mark) for event, mark in zip(events, marks, strict=False)]
        appended: list[Appended] = await append(self, tenant, renamed)
        return appended

    numbers = itertools.count()
    store.append = append_renamed


def switch_off_syncs() -> None:
    connect = storage.sqlite._connect

    def connect_unsynced(*args: Any) -> Any:
        connection = connect(*args)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    storage.sqlite._connect = connect_unsynced


def weaken(weakness: str) -> None:
    if weakness == "without-guard":
        switch_off_guard(storage.sqlite.SQLiteStore)
        switch_off_guard(RedisStore)
    elif weakness == "unsynced":
        switch_off_syncs()
    elif weakness != "none":
        raise SystemExit(f"{weakness!r} is none of: none, without-guard, unsynced")


def become(arguments: Sequence[str], log: str) -> None:
    """Turn this forked process into the command."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for standard, descriptor in ((0, nothing), (1, opened), (2, opened)):
        os.dup2(descriptor, standard)
    status = 1
    try:
        if arguments[0] == "writer":
            from benchmarks import writer

            writer.main(*arguments[1:])
        else:
            cli.main(arguments)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(weakness: str) -> None:
    weaken(weakness)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench says when to end, by closing the input
    for line in sys.stdin:
        *arguments, log = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            become(arguments, log)
        print(child, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
