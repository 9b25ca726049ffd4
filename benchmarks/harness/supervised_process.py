"""A supervised process, which is restarted whenever it ends, as Docker does with `restart: always`."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.redis_cluster import Admin
from benchmarks.harness.retrying_clients import TRANSPORT_ERRORS, HttpConnection
from benchmarks.harness.service_process import END_TIMEOUT_S, START_TIMEOUT_S, inherited_environment
from benchmarks.harness.topology import answers_ping

RESTART_AFTER_S = 0.2


class SupervisedProcess:
    """A process that is restarted whenever it ends.

    kind   the kind of process; others may have the same
    spawn  starts the process and returns its id
    ready  returns whether the process is ready
    """

    def __init__(self, kind: str, spawn: Callable[[], int], ready: Callable[[], Awaitable[bool]]) -> None:
        self.kind = kind
        self._spawn = spawn
        self._ready = ready
        self._pid = 0
        self._pidfd = -1
        self._may_run = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and wait until it is ready."""
        self._may_run.set()
        self._supervisor = self._supervisor or asyncio.create_task(self._supervise())
        await self.is_ready_within(START_TIMEOUT_S)

    async def is_ready_within(self, seconds: float) -> None:
        """Wait until the process is ready; raise TimeoutError if it takes too long."""
        async with asyncio.timeout(seconds):
            while not (self.is_running() and await self._ready()):
                await asyncio.sleep(0.02)

    def is_running(self) -> bool:
        """Return whether the process runs. A pidfd becomes readable when its process ends."""
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP."""
        try:
            status = Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs."""
        with suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send(signal.SIGKILL)

    async def stop_for(self, seconds: float) -> None:
        """Stop the process with SIGSTOP for this long, then continue it."""
        self.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.send(signal.SIGCONT)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the process; it is not restarted until the next `start`."""
        self._may_run.clear()
        self.send(signal.SIGCONT)
        self.send(number)
        async with asyncio.timeout(END_TIMEOUT_S):
            while self.is_running():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        """End the process and its supervision."""
        try:
            await self.end(signal.SIGTERM)
        except TimeoutError:
            await self.end()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        self._clear_process()

    async def _supervise(self) -> None:
        while True:
            await self._may_run.wait()
            self._pid = self._spawn()
            self._pidfd = os.pidfd_open(self._pid)
            await self._end_of_process()
            self._clear_process()
            await asyncio.sleep(RESTART_AFTER_S)

    async def _end_of_process(self) -> None:
        """Wait until the process has ended."""
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, has_ended.set)
        try:
            await has_ended.wait()
        finally:
            loop.remove_reader(self._pidfd)

    def _clear_process(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        with suppress(ChildProcessError):  # the process may be a child of the fork server
            if self._pid:
                os.waitpid(self._pid, os.WNOHANG)
        self._pid = 0


def spawn_program(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Start a program with a log in a new session, and return its process id."""
    output = [
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    own = inherited_environment() | dict(environment or {})
    return os.posix_spawn(command[0], list(command), own, file_actions=output, setsid=True)


async def is_ready(address: Address) -> bool:
    """Return whether a service at the address is ready."""
    connection = HttpConnection(address)
    try:
        return (await connection.request("GET", "/readyz"))[0] == 200
    except TRANSPORT_ERRORS:
        return False
    finally:
        connection.close()


async def is_loaded(users: Admin, port: int) -> bool:
    """Return whether the server has loaded its log and answers."""
    return await asyncio.to_thread(answers_ping, users, port)


async def start_all(stack: AsyncExitStack, processes: Sequence[SupervisedProcess]) -> None:
    """Start the processes, which end with the stack, and wait until they are ready."""
    for process in processes:
        stack.push_async_callback(process.close)
    await asyncio.gather(*(process.start() for process in processes))
