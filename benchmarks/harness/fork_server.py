"""A process that has imported the service and forks a `lisarec` command for each line on its standard input.

Importing torch takes seconds, and loading the compiled kernels two more. A benchmark that kills hundreds of replicas
would measure little else. The command is forked as it is, or with a weakness that a benchmark must detect:

    none           the command as it is
    without-guard  no event is recognised as a duplicate: each gets a new id before it reaches the store
    without-trust  no store is refused because it lacks acknowledged events
    unsynced       SQLite does not sync its log at a commit
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import importlib
import itertools
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch

import storage.sqlite.database
from app.cli import main as cli
from app.main import create_app
from app.settings import Settings
from benchmarks.harness import store_writer
from benchmarks.harness.compose import ROOT
from benchmarks.harness.faults.faulty_machine import FaultyMachine, library
from benchmarks.harness.ledger import RENAMED
from benchmarks.harness.service_process import inherited_environment
from model.artifact import model_directory
from storage.errors import StorageError
from storage.records import AppendResult
from storage.redis.session.data_loss_check import ServerTrust
from storage.redis.store import RedisStore
from storage.sqlite.connections.open_files import OpenFiles
from storage.sqlite.store import SQLiteStore
from storage.state.event import Event

CLONE_NEWNET = 0x40000000  # <linux/sched.h>

Weakness = Literal["none", "without-guard", "without-trust", "unsynced"]


class ForkServer:
    """Starts commands in a fraction of a second."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=inherited_environment() | {"LD_PRELOAD": str(library())},
            cwd=ROOT,
            start_new_session=True,
        )

    def spawn(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        weakness: Weakness = "none",
        machine: FaultyMachine | None = None,
        environment: Mapping[str, str] | None = None,
        status: Path | None = None,
        network: str | None = None,
    ) -> int:
        """Start `lisarec` with the arguments, on the machine if there is one, and return the process id.

        status   a file to which the process writes its exit status unless it is killed
        network  the file of a network namespace to run in
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        root = str(machine.root) if machine else None
        request = SpawnRequest(
            list(arguments), str(log), weakness, root, dict(environment or {}), str(status) if status else None, network
        )
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process; the processes that it has forked continue."""
        self._process.communicate()


class SpawnRequest(NamedTuple):
    """A line on the standard input: the command to fork, and its circumstances."""

    arguments: list[str]
    log: str
    weakness: Weakness
    machine_root: str | None
    environment: dict[str, str]
    status: str | None
    network: str | None


@cache
def fork_server() -> ForkServer:
    """Return the only fork server, which lives until this process ends."""
    made = ForkServer()
    atexit.register(made.close)
    return made


def disable_deduplication(store: Any) -> None:
    """Make the store give each event a new id, so that none is recognised as a duplicate."""
    append = store.append

    async def append_renamed(self: Any, tenant: str, events: Sequence[Event]) -> list[AppendResult]:
        marks = (f"{RENAMED}{os.getpid()}-{number}" for number in numbers)
        renamed = [replace(event, event_id=event.event_id + mark) for event, mark in zip(events, marks, strict=False)]
        appended: list[AppendResult] = await append(self, tenant, renamed)
        return appended

    numbers = itertools.count()
    store.append = append_renamed


def disable_trust() -> None:
    """Disable all checks that refuse a store because it lacks data."""

    async def require_nothing(*_: object) -> None:
        pass

    async def refuse_nothing(*_: object) -> dict[str, StorageError]:
        return {}

    trust: Any = ServerTrust
    trust.require = trust.require_whole = require_nothing
    trust.refusals = trust.acknowledge = refuse_nothing
    files: Any = OpenFiles
    files.check = lambda _: None


def disable_syncs() -> None:
    """Make SQLite not sync its log at a commit."""
    connect = storage.sqlite.database.connect

    def connect_unsynced(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    storage.sqlite.database.connect = connect_unsynced


def weaken(weakness: Weakness) -> None:
    """Give this process the weakness."""
    if weakness == "without-guard":
        disable_deduplication(SQLiteStore)
        disable_deduplication(RedisStore)
    elif weakness == "without-trust":
        disable_trust()
    elif weakness == "unsynced":
        disable_syncs()


def run_service_as_child(request: SpawnRequest) -> None:
    """Turn this forked process into the command."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    opened = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for standard, descriptor in ((0, nothing), (1, opened), (2, opened)):
        os.dup2(descriptor, standard)
    os.environ.update(request.environment)
    status = 1
    try:
        if request.network is not None:
            enter_network(request.network)
        if request.machine_root is not None:
            ctypes.CDLL(None).machine_begin(request.machine_root.encode())
        weaken(request.weakness)
        if request.arguments[0] == "writer":
            store_writer.main(*request.arguments[1:])
        else:
            cli.main(request.arguments)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if request.status is not None:
            Path(request.status).write_text(str(status))
        os._exit(status)


def enter_network(namespace: str) -> None:
    """Move this process, which has one thread, to the network namespace of the file."""
    opened, libc = os.open(namespace, os.O_RDONLY), ctypes.CDLL(None, use_errno=True)
    if libc.setns(opened, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"no network at {namespace}")
    os.close(opened)


def import_training() -> None:
    """Import what training needs; torch imports hundreds of modules only when the first optimizer is created."""
    importlib.import_module("model.training.train")
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])


async def start_and_stop_service(model: Path) -> None:
    """Start and stop a service once, so that all forked processes share the compiled code."""
    with TemporaryDirectory() as directory:
        app = create_app(Settings(model_dir=model, data_dir=Path(directory)))
        async with app.router.lifespan_context(app):
            pass
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    if any(re.match(r"polars-\d", name) for name in names):
        raise RuntimeError("starting a service has started polars' threads, which no fork has: it would wait for ever")


def main() -> None:
    """Fork a command for every line on the standard input, and print its process id."""
    models, imports_training = set(), False
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # this process does not wait for its children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends this process by closing its input
    for line in sys.stdin:
        request = SpawnRequest(*json.loads(line))
        model = request.arguments[request.arguments.index("--model") + 1] if "--model" in request.arguments else None
        # polars reads a model that is not packed, and its threads do not survive a fork
        if model is not None and model not in models and (Path(model) / model_directory.PACKED).exists():
            asyncio.run(start_and_stop_service(Path(model)))
            models.add(model)
        if request.arguments[0] in ("train", "retrain") and not imports_training:
            import_training()
            imports_training = True
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            run_service_as_child(request)
        print(child, flush=True)


if __name__ == "__main__":
    main()
