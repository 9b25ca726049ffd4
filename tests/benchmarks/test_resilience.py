"""The fault bench, shortened, on both stores; and that it detects faults."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis
import typer

from benchmarks.harness import retrying_clients
from benchmarks.harness.compose import make_users, redis_command
from benchmarks.harness.faults.faulty_machine import FaultyMachine
from benchmarks.harness.service_process import free_port
from benchmarks.harness.supervised_process import SupervisedProcess, spawn_program
from benchmarks.harness.topology import program
from benchmarks.resilience import crash_states, degradations, hung_node
from benchmarks.resilience.crash_states import Recording, try_disks
from benchmarks.resilience.crash_workloads import WORKLOADS, Workload
from benchmarks.resilience.degradations import BrokenPromise, Degradation, require_clear_answers
from benchmarks.resilience.environment import StoreKind
from benchmarks.resilience.faults import run_cuts, run_episodes, run_failover, run_hang, run_kills, run_power
from benchmarks.resilience.hung_node import Answers, Phase, misses
from tests.benchmarks.support import require_servers
from tests.waiting import PATIENCE_S, POLL_EVERY_S, until

STORES: list[StoreKind] = ["sqlite", "redis"]


@pytest.fixture(autouse=True)
def _little_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few clients show losses and duplicates as well, and leave CPU time to other tests."""
    monkeypatch.setattr(retrying_clients, "SENDERS", 4)
    monkeypatch.setattr(retrying_clients, "REST_S", 0.01)


@pytest.mark.parametrize("store", STORES)
class TestEventsSurvive:
    def test_cut_connections_kills_and_stops(self, model: Path, store: StoreKind) -> None:
        require_servers()
        run_cuts(model, store, events=1_500, faults=50, replicas=2)

    def test_kill_9_of_every_kind_of_process(self, model: Path, store: StoreKind) -> None:
        require_servers()
        run_kills(model, store, count=1, replicas=2)

    def test_power_cuts(self, model: Path, store: StoreKind) -> None:
        require_servers()
        run_power(model, store, times=3, replicas=1)

    def test_full_disks_slow_syncs_freezes_and_clock_jumps(
        self, model: Path, store: StoreKind, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        require_servers()
        for limit in ("RECOVERY_WITHIN_S", "READ_WITHIN_S"):  # else those of a machine with nothing else to do
            monkeypatch.setattr(degradations, limit, PATIENCE_S)
        run_episodes(model, store, outage_s=0.5, replicas=1)


@pytest.mark.parametrize("store", STORES)
class TestTheBenchDetects:
    def test_disabled_deduplication(self, model: Path, store: StoreKind, capsys: pytest.CaptureFixture[str]) -> None:
        require_servers()
        with pytest.raises(typer.Exit):
            run_cuts(model, store, events=1_000, faults=0, replicas=1, without_guard=True)
        printed = capsys.readouterr().out
        assert "counted twice" in printed
        assert " 0 counted twice" not in printed
        assert " 0 acknowledged ones lost" in printed

    def test_acknowledged_events_that_were_not_synced(
        self, model: Path, store: StoreKind, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require_servers()
        with pytest.raises(typer.Exit):
            run_power(model, store, times=2, replicas=1, everysec=True)
        printed = capsys.readouterr().out
        assert "acknowledged ones lost" in printed
        assert " 0 acknowledged ones lost" not in printed


class TestClusterFailover:
    """Only a lagging replica is left; it lacks only events acknowledged without waiting for replicas."""

    def test_no_replicated_event_is_lost(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        require_servers()
        run_failover(model, count=1, replicas=1)
        printed = capsys.readouterr().out
        assert " 0 acknowledged ones lost" in printed
        # meanwhile users of the other nodes were served and written, those of this one got popular items
        assert "events of the lost slots: 503 storage_unavailable" in printed
        assert "recommendations for their users: popular" in printed
        assert re.search(r"events of other slots: 200 \d+$", printed, re.MULTILINE)

    def test_losses_without_waiting_for_replicas_are_reported(
        self, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require_servers()
        run_failover(model, count=1, replicas=0)
        printed = capsys.readouterr().out
        assert "acknowledged ones lost, 0 counted twice, 0 never sent; 0 states are not" in printed
        assert " 0 acknowledged ones lost" not in printed


def test_users_on_other_nodes_do_not_wait_for_a_hung_node(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_servers()
    monkeypatch.setattr(hung_node, "MAX_MORE_MS", 500.0)  # who waited for the node would wait for seconds
    run_hang(model, seconds=1.0)
    printed = capsys.readouterr().out
    assert "one of three hangs: events of that node" in printed
    assert re.search(r"events of users of other nodes: p50 .* ms, of at most .* ms", printed)


@pytest.mark.parametrize(
    ("quiet_ms", "hung_ms", "answer", "is_missed"),
    [
        ([3, 3, 3], [26, 26, 26], "200", False),
        ([3, 3, 3], [27, 27, 27], "200", True),  # more than twice as long and 20 ms
        ([3, 3, 3], [4, 900, 4], "200", False),  # the machine did something else for a moment
        ([3, 3, 3], [4, 900, 900], "200", True),
        ([3, 3, 3], [4, 4, 4], "503 storage_unavailable", True),
    ],
)
def test_waits_for_a_hung_node_are_detected(
    quiet_ms: list[float], hung_ms: list[float], answer: str, is_missed: bool
) -> None:
    def phases(medians_ms: list[float], answer: str) -> list[Phase]:
        return [{"events": Answers(Counter({answer: 3}), [ms / 2, ms, 9_000.0])} for ms in medians_ms]

    assert bool(misses(phases(quiet_ms, "200"), phases(hung_ms, answer))) is is_missed


@pytest.mark.parametrize(
    ("answers", "reads", "recovery_s", "broken"),
    [
        ({"500 internal_error": 1, "503 x": 1}, {"200": 1}, 0.1, "events were answered by 500"),
        ({"no answer": 1, "503 x": 1}, {"200": 1}, 0.1, "events were answered by no answer"),
        ({"200": 5}, {"200": 1}, 0.1, "no event was answered by 503 x"),
        ({"503 x": 1}, {"503": 1}, 0.1, "recommendations were answered by 503"),
        ({"503 x": 1}, {"200": 1}, 10.1, "10.1 s to recover"),
    ],
)
def test_an_unclear_response_fails_an_episode(
    answers: dict[str, int], reads: dict[str, int], recovery_s: float, broken: str
) -> None:
    episode = Degradation("odd", lambda: None, lambda: None, ("503 x",))
    with pytest.raises(BrokenPromise, match=broken):
        require_clear_answers(episode, Counter(answers), Counter(reads), recovery_s)


class TestCrashStates:
    """Disk states that a power cut may leave after any system call of a run."""

    @pytest.fixture(autouse=True)
    def _has_strace(self) -> None:
        try:
            program("strace")
        except FileNotFoundError as exc:
            pytest.skip(str(exc))

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_acknowledged_data_survive_and_partial_files_are_refused(self, name: str) -> None:
        crash_states.run([name], every=40 if name in ("log", "backup") else 3)

    @pytest.mark.parametrize(
        ("sync_file", "sync_folder", "broken"),
        [
            (False, True, {"torn"}),
            (True, False, {"lost"}),
            (True, True, set()),
        ],
    )
    def test_a_missing_sync_is_detected(
        self, tmp_path: Path, sync_file: bool, sync_folder: bool, broken: set[str]
    ) -> None:
        root = tmp_path / "root"
        root.mkdir()
        calls = [
            f"import os; new, named, folder = {str(root / 'new')!r}, {str(root / 'named')!r}, {str(root)!r}",
            "file = os.open(new, os.O_WRONLY | os.O_CREAT); os.write(file, b'whole')",
            "os.fsync(file)" if sync_file else "",
            "os.rename(new, named)",
            "os.fsync(os.open(folder, os.O_RDONLY))" if sync_folder else "",
            "os.write(2, b'acknowledged: it')",
        ]

        def problems(disk: Path, acknowledged: Sequence[str]) -> Iterator[str]:
            if (disk / "named").exists():
                if (disk / "named").read_bytes() != b"whole":
                    yield "torn"
            elif acknowledged:
                yield "lost"

        recording = Recording.of([sys.executable, "-c", "\n".join(calls)], root)
        _, found = try_disks(recording, Workload(lambda _: None, problems), tmp_path / "disk")
        assert {problem.partition(": ")[2] for problem in found} == broken


class TestMachine:
    """After a power cut a process finds exactly what it has synced."""

    @pytest.fixture
    def machine(self, tmp_path: Path) -> FaultyMachine:
        return FaultyMachine(tmp_path / "machine")

    @pytest.fixture
    def run(self, machine: FaultyMachine) -> Callable[[str], str]:
        def run(program: str) -> str:
            environment = os.environ | machine.environment
            command = [sys.executable, "-c", f"import os, time, errno\n{program}"]
            return subprocess.run(
                command, cwd=machine.live, env=environment, capture_output=True, text=True, check=True
            ).stdout

        return run

    @staticmethod
    def cut(machine: FaultyMachine, *, torn: bool = False) -> None:
        seed = next(seed for seed in range(100) if (random.Random(seed).random() < 0.5) is torn)
        machine.cut_power(random.Random(seed))

    def test_unsynced_writes_are_lost(self, machine: FaultyMachine, run: Callable[[str], str]) -> None:
        run(
            "fd = os.open('a', os.O_RDWR | os.O_CREAT)\n"
            "os.write(fd, b'kept ' * 3000); os.fsync(fd)\n"
            "os.pwrite(fd, b'lost', 7000); os.write(fd, b'lost'); os.ftruncate(fd, 15003)\n"
            "os.write(os.open('b', os.O_WRONLY | os.O_CREAT), b'lost')"
        )
        self.cut(machine)
        assert {file.name: file.read_bytes() for file in machine.live.iterdir()} == {"a": b"kept " * 3000}

    def test_synced_truncations_persist(self, machine: FaultyMachine, run: Callable[[str], str]) -> None:
        run(
            "fd = os.open('a', os.O_RDWR | os.O_CREAT)\n"
            "os.write(fd, b'x' * 9000); os.fsync(fd)\n"
            "os.ftruncate(fd, 10); os.pwrite(fd, b'y', 20); os.fdatasync(fd)"
        )
        self.cut(machine)
        assert (machine.live / "a").read_bytes() == b"x" * 10 + bytes(10) + b"y"

    @pytest.mark.parametrize("is_synced", [False, True])
    def test_a_rename_is_durable_with_its_directory(
        self, machine: FaultyMachine, run: Callable[[str], str], is_synced: bool
    ) -> None:
        run(
            "for name in ('old', 'new'):\n"
            "    fd = os.open(name, os.O_WRONLY | os.O_CREAT); os.write(fd, name.encode()); os.fsync(fd)\n"
            "os.rename('new', 'old')\n" + ("os.fsync(os.open('.', os.O_RDONLY))" if is_synced else "")
        )
        self.cut(machine)
        found = {file.name: file.read_bytes() for file in machine.live.iterdir()}
        assert found == ({"old": b"new"} if is_synced else {"old": b"old", "new": b"new"})

    def test_a_torn_write_leaves_a_prefix(self, machine: FaultyMachine, run: Callable[[str], str]) -> None:
        run(
            "fd = os.open('a', os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
            "os.write(fd, b'kept'); os.fsync(fd); os.write(fd, bytes(range(200)))"
        )
        self.cut(machine, torn=True)
        left = (machine.live / "a").read_bytes()
        assert left.startswith(b"kept")
        assert bytes(range(200)).startswith(left[4:])
        assert 4 < len(left) < 204

    def test_a_full_disk_refuses_growth(self, machine: FaultyMachine, run: Callable[[str], str]) -> None:
        run("fd = os.open('a', os.O_WRONLY | os.O_CREAT); os.write(fd, bytes(100))")
        machine.fill_disk(True)
        printed = run(
            "fd = os.open('a', os.O_WRONLY); os.pwrite(fd, b'over', 0)\n"
            "try: os.pwrite(fd, b'more', 98)\n"
            "except OSError as exc: print(exc.errno == errno.ENOSPC)"
        )
        assert (printed, machine.refused) == ("True\n", 1)

    def test_its_clock_jumps_and_its_syncs_take_time(self, machine: FaultyMachine, run: Callable[[str], str]) -> None:
        machine.jump_clock(3600)
        machine.slow_syncs(0.2)
        printed = run(
            "fd = os.open('a', os.O_WRONLY | os.O_CREAT); os.write(fd, b'x')\n"
            "begin = time.monotonic(); os.fsync(fd); print(time.time(), time.monotonic() - begin)"
        )
        now_s, took_s = map(float, printed.split())
        assert now_s > os.stat(machine.live / "a").st_mtime + 3500
        assert took_s >= 0.2


async def test_a_victim_is_restarted_whenever_it_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def has_begun() -> bool:
        return log.exists() and log.read_text().endswith("begun\n")

    process = SupervisedProcess(
        "sleeper", lambda: spawn_program(["/bin/sh", "-c", "echo begun; exec sleep 60"], log), has_begun
    )
    await process.start()
    process.kill()
    await until(lambda: log.read_text().count("begun") == 2)
    await process.end(signal.SIGKILL)
    await asyncio.sleep(0.5)
    assert not process.is_running()
    await process.close()
    assert log.read_text().count("begun") == 2


@pytest.mark.usefixtures("alpine_shell")
class TestRedisStart:
    """`docker/redis/redis-start` on a log whose last transaction is torn at any byte."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        (tmp_path / "data").mkdir()
        return tmp_path / "data"

    @staticmethod
    def served(directory: Path, work: Callable[[redis.Redis], None]) -> None:
        """Start the server as docker-compose.yml does, do the work, and kill it with SIGKILL."""
        port = free_port()
        users = make_users(directory.parent)
        command = redis_command(program("redis-server"), directory, users, port)
        with (directory.parent / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        patient = redis.retry.Retry(redis.backoff.ConstantBackoff(POLL_EVERY_S), int(PATIENCE_S / POLL_EVERY_S))
        try:
            with redis.Redis.from_url(users.url(port), retry=patient) as client:
                while not client.ping():
                    pass
                work(client)
        finally:
            process.kill()
            process.wait()

    @staticmethod
    def transact(value: int) -> Callable[[redis.Redis], None]:
        def work(client: redis.Redis) -> None:
            client.eval("redis.call('INCRBY', 'n', 1) redis.call('SET', ARGV[1], 1)", 0, f"key-{value}")

        return work

    def test_a_torn_tail_is_truncated_to_the_acknowledged_commands(self, directory: Path) -> None:
        require_servers()
        self.served(directory, self.transact(0))
        (log,) = directory.glob("appendonlydir/*.incr.aof")
        whole = log.stat().st_size
        self.served(directory, self.transact(1))
        torn = log.read_bytes()
        for length in range(whole + 1, len(torn), 13):
            log.write_bytes(torn[:length])
            self.served(directory, self.transact(2))

            def check(client: redis.Redis) -> None:
                assert client.get("n") == b"2"
                assert sorted(client.scan_iter()) == [b"key-0", b"key-2", b"n"]

            self.served(directory, check)

    def test_damage_in_the_middle_is_not_truncated(self, directory: Path) -> None:
        require_servers()
        self.served(directory, self.transact(0))
        (log,) = directory.glob("appendonlydir/*.incr.aof")
        damaged = b"?" + log.read_bytes()[1:] + b"*1\r\n$4\r\nPING\r\n" * 3_000_000
        log.write_bytes(damaged)
        command = redis_command(program("redis-server"), directory, make_users(directory.parent), free_port())
        ended = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE_S)
        assert ended.returncode != 0
        assert log.read_bytes() == damaged
