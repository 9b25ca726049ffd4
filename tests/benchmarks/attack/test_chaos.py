"""The chaos run, shortened, and that its verdict detects faults."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import pytest

from benchmarks.attack.chaos import disruptions, operator_calls, store_disruptions, workload
from benchmarks.attack.chaos.correction_gate import CorrectionGate
from benchmarks.attack.chaos.disruptions import Disruptions, kinds_of
from benchmarks.attack.chaos.environment import ChaosEnvironment, ChaosStore
from benchmarks.attack.chaos.operations import AcceptedLoss, Operation, OperationKind, OperationLog
from benchmarks.attack.chaos.operator_calls import Operator
from benchmarks.attack.chaos.run import ChaosSettings, chaos, list_operations
from benchmarks.attack.chaos.verdict import judge
from benchmarks.harness.ledger import TENANT
from benchmarks.harness.supervised_process import SupervisedProcess
from storage.records import FoldedState
from storage.sqlite.database import FILE_NAME
from storage.sqlite.store import SQLiteStore
from storage.state.fold import fold_event
from tests.app.conftest import write_model
from tests.benchmarks.support import require_servers
from tests.storage.oracles.random_events import click, make_generation
from tests.waiting import PATIENCE_S

GENERATION = make_generation()


class Story:
    """Consecutive operations on a store, recorded as acknowledged whether or not they were applied."""

    def __init__(self, store: SQLiteStore) -> None:
        self.store = store
        self.record = OperationLog()

    def _note(self, kind: OperationKind, user_id: str, event_ids: Sequence[str] = (), visitor: str = "") -> None:
        now_s = float(2 * len(self.record.operations))
        operation = Operation(kind, 0, user_id, now_s, event_ids, visitor, attempts=1)
        operation.end("done", now_s + 1)
        self.record.operations.append(operation)

    async def append(self, user_id: str, *event_ids: str, carry_out: bool = True, note: bool = True) -> None:
        if note:
            self._note("append", user_id, event_ids)
            self.record.items |= {(user_id, event_id): "item1" for event_id in event_ids}
        if carry_out:
            events = [click(event_id, user_id, item=1) for event_id in event_ids]
            await self.store.append(TENANT, events)

    async def undo(self, user_id: str, event_id: str, *, carry_out: bool = True) -> None:
        self._note("undo", user_id, [event_id])
        if carry_out:
            await self.store.undo(TENANT, user_id, event_id)

    async def merge(self, user_id: str, visitor: str, *, carry_out: bool = True) -> None:
        self._note("merge", user_id, visitor=visitor)
        if carry_out:
            await self.store.merge(TENANT, user_id, visitor)

    def lose(self, *archived: str, since_s: float, is_noticed: bool = True) -> None:
        """Record an accepted loss of everything since then, except archived events of Ada."""
        keys = frozenset(("ada", event_id) for event_id in archived)
        until_s = 2.0 * len(self.record.operations) - 0.5
        self.record.losses.append(AcceptedLoss(since_s, until_s, keys, is_noticed))

    async def erase(self, user_id: str, *, carry_out: bool = True) -> None:
        self._note("erase", user_id)
        if carry_out:
            await self.store.erase(TENANT, user_id)


Telling = Callable[[Story], Awaitable[None]]


async def _all_is_well(story: Story) -> None:
    await story.append("ada", "a", "b")
    await story.append("visitor", "c")
    await story.undo("ada", "a")
    await story.merge("ada", "visitor")
    await story.append("ben", "d")
    await story.erase("ben")
    await story.append("ben", "e")


async def _not_logged(story: Story) -> None:
    await story.append("ada", "a")
    await story.append("ada", "b", carry_out=False)


async def _logged_before_the_erasure_only(story: Story) -> None:
    await story.append("ada", "a")
    await story.erase("ada")
    await story.append("ada", "b", carry_out=False)


async def _logged_by_nobody(story: Story) -> None:
    await story.append("ada", "a")
    await story.append("ada", "b", note=False)


async def _not_undone(story: Story) -> None:
    await story.append("ada", "a", "b")
    await story.undo("ada", "a", carry_out=False)


async def _not_merged(story: Story) -> None:
    await story.append("ada", "a")
    await story.append("visitor", "b")
    await story.merge("ada", "visitor", carry_out=False)


async def _merged_without_an_event_of_the_visitor(story: Story) -> None:
    await story.append("ada", "a")
    await story.merge("ada", "visitor")


async def _not_erased(story: Story) -> None:
    await story.append("ada", "a")
    await story.erase("ada", carry_out=False)


async def _gone_with_a_loss(story: Story) -> None:
    await story.append("ada", "a")
    await story.append("ada", "b", carry_out=False)
    story.lose(since_s=1.5)
    await story.append("ada", "c")


async def _gone_with_a_loss_that_nobody_noticed(story: Story) -> None:
    await story.append("ada", "a", "b", carry_out=False)
    story.lose(since_s=0.5, is_noticed=False)


async def _gone_before_a_loss(story: Story) -> None:
    await story.append("ada", "a", carry_out=False)
    story.lose(since_s=1.5)


async def _gone_behind_a_loss(story: Story) -> None:
    story.lose(since_s=-1.0)
    await story.append("ada", "a", carry_out=False)


async def _gone_with_a_loss_although_archived(story: Story) -> None:
    await story.append("ada", "a", "b", carry_out=False)
    story.lose("a", since_s=0.5)


async def _folded_from_something_else(story: Story) -> None:
    await story.append("ada", "a", "b")
    log = await story.store.events(TENANT, "ada")
    other = GENERATION.empty()
    fold_event(GENERATION, other, click("b", "ada", item=2))
    await story.store.save_states(GENERATION, [FoldedState(TENANT, "ada", log[-1].seq, GENERATION.encode(other))])


@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        (_all_is_well, {}),
        (_not_logged, {"lost": 1}),
        (_logged_before_the_erasure_only, {"lost": 1}),
        (_logged_by_nobody, {"unsent": 1}),
        (_not_undone, {"lost_undo": 1}),
        (_not_merged, {"diverged": 1}),
        (_merged_without_an_event_of_the_visitor, {}),
        (_not_erased, {"resurrected": 1}),
        (_folded_from_something_else, {"unfolded": 1}),
        (_gone_with_a_loss, {}),
        (_gone_with_a_loss_that_nobody_noticed, {"unnoticed": 2}),
        (_gone_before_a_loss, {"lost": 1}),
        (_gone_behind_a_loss, {"lost": 1}),
        (_gone_with_a_loss_although_archived, {"lost": 1}),
    ],
)
def test_the_verdict_detects_each_fault(tell: Telling, expected: dict[str, int], tmp_path: Path) -> None:
    async def law() -> dict[str, int]:
        store = await SQLiteStore.open(tmp_path, [GENERATION])
        try:
            story = Story(store)
            await tell(story)
            verdict = await judge(store, [GENERATION], story.record)
        finally:
            await store.close()
        return {name: len(faults) for name, faults in verdict.faults().items() if faults}

    assert asyncio.run(law()) == expected


@pytest.fixture(autouse=True)
def _few_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few clients show the same, and leave CPU time to other tests; calls have time to succeed."""
    monkeypatch.setattr(workload, "CLIENTS", 4)
    monkeypatch.setattr(workload, "PAUSE_S", 0.1)
    monkeypatch.setattr(operator_calls, "RECOVERY_S", PATIENCE_S)  # else that of a machine with nothing else to do


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / "may", seed=7), write_model(folder / "june", seed=11)]


# Every kind of disruption of a cluster takes minutes: `python -m benchmarks.attack.chaos.run --store cluster`.
KINDS: Mapping[ChaosStore, Sequence[str]] = {
    "sqlite": kinds_of("sqlite"),
    "redis": kinds_of("redis"),
    "cluster": ("app killed", "redis killed", "redis stopped", "model activated", "archiver killed"),
}


@pytest.mark.parametrize("store", KINDS)
def test_chaos_loses_and_duplicates_no_acknowledged_event(
    store: ChaosStore, models: list[Path], tmp_path: Path
) -> None:
    require_servers()
    report = asyncio.run(chaos(ChaosSettings(models, store, 5.0, 3, tmp_path, KINDS[store])))
    assert report.all_faults() == {}
    assert [kind for kind in KINDS[store] if report.injected[kind] == 0] == []
    assert report.verdict.acknowledged > 100
    assert list_operations(report.workload) != []
    if "loss accepted" in KINDS[store]:
        assert report.verdict.restored > 0  # what the archive had of an accepted loss


def test_opening_the_database_during_its_replacement_keeps_the_wal(tmp_path: Path) -> None:
    """Otherwise a reader may start a new WAL, and the services never become ready."""
    environment = ChaosEnvironment("sqlite", [], tmp_path)
    environment.create_data()
    file = environment.data / FILE_NAME
    replaced = threading.Event()

    def open_again_and_again() -> None:
        while not replaced.is_set():
            with suppress(sqlite3.OperationalError), closing(sqlite3.connect(file, timeout=0)) as connection:
                connection.execute("SELECT 1 FROM sqlite_schema").fetchall()

    with closing(sqlite3.connect(file)) as service:
        service.execute("PRAGMA journal_mode = WAL")
        service.execute("CREATE TABLE events (id TEXT)")
        before = {part.name: part.stat().st_ino for part in environment.data.iterdir()}
        with ThreadPoolExecutor() as threads:
            opening = threads.submit(open_again_and_again)
            try:
                for _ in range(200):
                    with environment.replaced_file(None):
                        pass
            finally:
                replaced.set()
            opening.result()
        assert {part.name: part.stat().st_ino for part in environment.data.iterdir()} == before


def test_disruptions_that_never_succeeded_are_retried_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine others may interrupt every attempt."""
    monkeypatch.setattr(disruptions, "PAUSE_S", (0.0, 0.0))
    often, tries = 10 * disruptions.ATTEMPTS, count(1)

    async def law() -> Counter[str]:
        environment, archiver = (
            ChaosEnvironment("sqlite", [], tmp_path),
            SupervisedProcess("archiver", os.getpid, ready),
        )
        run = Disruptions(environment, archiver, CorrectionGate(), 3, ["store repaired"])
        is_over = False

        async def repair(_: Operator, name: str) -> bool:
            nonlocal is_over
            was_over, is_over = is_over, next(tries) >= often
            return was_over

        monkeypatch.setattr(Operator, "command", repair)
        await run.run(lambda: is_over)
        return run.injected

    async def ready() -> bool:
        return True

    assert asyncio.run(law()) == {"store repaired": 1}


def test_a_rebuild_that_ends_before_its_kill_is_killed_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fast machine every rebuild may end before its kill."""

    async def rebuild(_: Operator, *_arguments: str, killed_after_s: float) -> bool | None:
        return True if killed_after_s > 0.01 else None

    async def ready() -> bool:
        return True

    environment = ChaosEnvironment("sqlite", [tmp_path], tmp_path)
    archiver = SupervisedProcess("archiver", os.getpid, ready)
    run = Disruptions(environment, archiver, CorrectionGate(), 3, ["rebuild killed"])
    monkeypatch.setattr(Operator, "command", rebuild)
    asyncio.run(run.run(lambda: True))
    assert run.injected == {"rebuild killed": 1}


def test_operations_are_retried_while_the_service_is_disrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine disruptions may follow each other for minutes."""
    monkeypatch.setattr(workload, "CLIENTS", 1)
    monkeypatch.setattr(workload, "GIVE_UP_S", 0.01)
    clients = workload.Workload([("127.0.0.1", 1)], ["item"], 3, CorrectionGate())  # where nobody answers
    disturbed = iter([True] * 20)
    clients.is_disturbed = lambda: next(disturbed, False)
    asyncio.run(clients.run(lambda: clients.given_up != []))
    assert clients.record.operations[0].attempts > 20


class TestTheRunDetects:
    @pytest.mark.parametrize(("store", "lost"), [("sqlite", set()), ("redis", {"lost"})])
    def test_a_missing_data_loss_check(
        self, store: ChaosStore, lost: set[str], models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Writes to the SQLite file while it is moved away return with it."""
        require_servers()
        monkeypatch.setattr(store_disruptions, "REFUSED_WITHIN_S", 3.0)
        monkeypatch.setattr(disruptions, "ATTEMPTS", 1)
        run = ChaosSettings(models, store, 0.0, 3, tmp_path, ["store lost"], weakness="without-trust")
        faults = asyncio.run(chaos(run)).all_faults()
        assert faults.keys() >= {"not refused", "did not happen"} | lost

    @pytest.mark.parametrize("store", ["sqlite", "redis"])
    def test_disabled_deduplication(self, store: ChaosStore, models: list[Path], tmp_path: Path) -> None:
        require_servers()
        run = ChaosSettings(models, store, 3.0, 3, tmp_path, ["app killed"], weakness="without-guard")
        assert "doubled" in asyncio.run(chaos(run)).all_faults()

    def test_unreplicated_writes_lost_in_a_failover(self, models: list[Path], tmp_path: Path) -> None:
        """Services refuse the replica, which lacks acknowledged events, until an operator accepts the loss."""
        require_servers()
        run = ChaosSettings(models, "cluster", 0.0, 3, tmp_path, ["lagging replica took over"], replicas=0)
        report = asyncio.run(chaos(run))
        assert report.all_faults() == {}
        assert report.verdict.accepted_losses > 0
        assert report.injected["failover accepted"] == 1
