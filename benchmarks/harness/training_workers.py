"""Trainings in forked processes: a single one, or several with the environment that torchrun sets."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.harness.fork_server import fork_server
from benchmarks.harness.service_process import free_port

POLL_S = 0.01
END_WITHIN_S = 30.0  # after a SIGTERM, as torchrun waits
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FIRST_TIME_FIELD = 11  # utime, among the fields after the program's name in /proc/PID/stat
LOOPBACK = "127.0.0.1"


class Worker:
    """A process of a training, which may end at any time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.cpu_s = 0.0
        self._pidfd = -1
        with suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def is_running(self) -> bool:
        """Return whether the process runs, and update its processor time."""
        is_running = self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            if is_running:
                self.cpu_s = sum(map(int, fields[FIRST_TIME_FIELD : FIRST_TIME_FIELD + 2])) / TICKS_PER_S
        return is_running

    def send(self, number: int) -> None:
        """Send the process a signal if it runs."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """Release the process."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class ForkedTraining:
    """A training in one or more processes, started with `lisarec train` and these options.

    networks  files of the network namespaces of the processes; empty: this process's namespace
    """

    def __init__(
        self,
        options: Sequence[str],
        folder: Path,
        count: int = 1,
        *,
        networks: Sequence[str] = (),
        address: str = LOOPBACK,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        self._statuses = [folder / f"status-{rank}" for rank in range(count)]
        for status in self._statuses:
            status.unlink(missing_ok=True)
        given = dict(environment or {})
        if count > 1:
            given |= {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
            given["TORCHELASTIC_RUN_ID"] = "benchmark"
        self.workers = [
            Worker(
                fork_server().spawn(
                    ["train", *options],
                    self.log,
                    environment=given | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}),
                    status=self._statuses[rank],
                    network=networks[rank] if networks else None,
                )
            )
            for rank in range(count)
        ]

    def wait(self) -> None:
        """Wait until all processes have ended; raise RuntimeError if one of them has failed."""
        while self._runs():
            time.sleep(POLL_S)
        self.close()
        if failed := [one for one in self._statuses if not one.exists() or one.read_text() != "0"]:
            raise RuntimeError(f"a training failed, {failed[0].name}: {self.log.read_text()[-2000:]}")

    def end_others(self) -> None:
        """End the remaining processes, as torchrun does when one was killed."""
        for number, patience_s in ((signal.SIGTERM, END_WITHIN_S), (signal.SIGKILL, float("inf"))):
            until_s = time.monotonic() + patience_s
            for worker in self.workers:
                worker.send(number)
            while self._runs() and time.monotonic() < until_s:
                time.sleep(POLL_S)
        self.close()

    def _runs(self) -> bool:
        are_running = [worker.is_running() for worker in self.workers]
        return any(are_running)

    def close(self) -> None:
        """Release all processes."""
        for worker in self.workers:
            worker.close()
