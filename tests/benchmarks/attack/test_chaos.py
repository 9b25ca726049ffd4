"""The chaos run in short, and that its judgement notices what it is there for."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count, permutations
from pathlib import Path

import edn_format
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attack.chaos import disruptions, store_disruptions, workload
from benchmarks.attack.chaos.correction_gate import CorrectionGate
from benchmarks.attack.chaos.disruptions import Disruptions, kinds_of
from benchmarks.attack.chaos.elle import violations, write_history
from benchmarks.attack.chaos.environment import ChaosEnvironment, ChaosStore
from benchmarks.attack.chaos.operations import AcceptedLoss, Operation, OperationKind, OperationLog, Outcome
from benchmarks.attack.chaos.operator_calls import Operator
from benchmarks.attack.chaos.run import ChaosSettings, chaos, list_operations
from benchmarks.attack.chaos.verdict import judge
from benchmarks.harness.ledger import TENANT
from benchmarks.harness.supervised_process import SupervisedProcess
from storage.records import FoldedState
from storage.sqlite.store import SQLiteStore
from storage.state.fold import fold_event
from tests.app.conftest import write_model
from tests.benchmarks.support import require_servers
from tests.storage.oracles.random_events import click, make_generation

GENERATION = make_generation()
MOMENTS = st.integers(0, 9)


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    """Operations on one list: appends of new values, and reads of any sequence of them."""
    operations, values = [], []
    for number in range(draw(st.integers(0, 3))):
        ids = [f"{number}{part}" for part in range(draw(st.integers(1, 2)))]
        values += ids
        operations.append(_operation(draw, "append", ids))
    for _ in range(draw(st.integers(0, 3))):
        seen = draw(st.permutations(values))[: draw(st.integers(0, len(values)))] if values else []
        if draw(st.booleans()):  # rather a prefix of the appends' own order, or few histories would be possible
            seen = values[: draw(st.integers(0, len(values)))]
        operations.append(_operation(draw, "read", seen))
    return operations


def _operation(draw: st.DrawFn, kind: str, event_ids: Sequence[str]) -> Operation:
    began_s, took_s = draw(MOMENTS), draw(MOMENTS)
    operation = Operation("append" if kind == "append" else "read", -1, "list", began_s, event_ids, attempts=1)
    outcomes: list[Outcome] = ["done", "done", "done", "unknown", "refused"] if kind == "append" else ["done"]
    operation.end(draw(st.sampled_from(outcomes)), began_s + took_s)
    return operation


def is_linearizable(operations: Sequence[Operation]) -> bool:
    """Try every order of every choice of the operations that may have had an effect."""
    certain = [operation for operation in operations if operation.is_done]
    possible = [operation for operation in operations if operation.outcome == "unknown"]
    choices = ([one for bit, one in enumerate(possible) if chosen >> bit & 1] for chosen in range(1 << len(possible)))
    return any(_is_a_run(order) for chosen in choices for order in permutations(certain + chosen))


def _is_a_run(order: Sequence[Operation]) -> bool:
    list_: list[str] = []
    latest_began_s = -math.inf
    for operation in order:
        latest_began_s = max(latest_began_s, operation.began_s)
        if operation.ended_s < latest_began_s:
            return False
        if operation.kind == "append":
            list_ += operation.event_ids
        elif list_ != list(operation.event_ids):
            return False
    return True


def read_history(path: Path) -> list[Operation]:
    """What a checker learns from a file: operations whose times are only the order of the lines.

    Every line has the fields of Jepsen's histories, and every process one invocation and then one completion.
    """
    outcomes: dict[str, Outcome] = {"ok": "done", "fail": "refused", "info": "unknown"}
    pending: dict[int, Operation] = {}
    operations, times = [], []
    for index, line in enumerate(edn_format.loads_all(path.read_text())):
        fields = {keyword.name: value for keyword, value in line.items()}
        assert fields.keys() == {"index", "type", "process", "time", "f", "value"}
        assert (fields["index"], fields["f"].name) == (index, "txn")
        times.append(fields["time"])
        calls = [(call.name, key, value) for call, key, value in fields["value"]]
        (key,) = {key for _, key, _ in calls}
        if fields["type"].name == "invoke":
            assert fields["process"] not in pending
            assert all((value is None) is (call == "r") for call, _, value in calls)
            kind: OperationKind = "read" if calls[0][0] == "r" else "append"
            pending[fields["process"]] = Operation(kind, -1, key, index, attempts=1)
        else:
            operation = pending.pop(fields["process"])
            values = calls[0][2] or [] if operation.kind == "read" else [value for _, _, value in calls]
            operation.event_ids = [str(value) for value in values]
            operation.end(outcomes[fields["type"].name], index)
            operations.append(operation)
    assert pending == {}
    assert times == sorted(times)
    return operations


class Story:
    """Operations on a store, one after the other, each recorded as acknowledged whether it was carried out or not."""

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
        """Note that what ended since then was taken by a loss that is accepted now, but for archived events of Ada."""
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
def test_the_judgement_finds_each_fault(tell: Telling, expected: dict[str, int], tmp_path: Path) -> None:
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


class TestListHistories:
    @given(histories())
    @settings(max_examples=300)
    def test_a_history_has_a_fault_where_no_order_explains_it(self, operations: list[Operation]) -> None:
        assert (not list(violations(operations))) is is_linearizable(operations)

    @given(histories())
    @settings(max_examples=300)
    def test_the_file_for_elle_holds_all_that_decides(
        self, tmp_path_factory: pytest.TempPathFactory, operations: list[Operation]
    ) -> None:
        """An independent reader of EDN reads it, and its order alone leads to the same judgement."""
        file = tmp_path_factory.getbasetemp() / "history.edn"
        assert write_history(operations, file) == len(operations)
        read = read_history(file)
        assert len(read) == len(operations)
        assert is_linearizable(read) is is_linearizable(operations)
        assert (not list(violations(read))) is is_linearizable(read)

    def test_elle_reads_invocations_and_completions_in_the_order_of_time(self, tmp_path: Path) -> None:
        append = Operation("append", -1, "list-1-0", 1.0, ["a", "b"], attempts=1)
        append.end("done", 3.0)
        read = Operation("read", -1, "list-1-0", 2.0, ["a"], attempts=1)
        read.end("done", 4.0)
        lost = Operation("append", -1, "list-1-0", 5.0, ["c"], attempts=2)
        assert write_history([append, read, lost], tmp_path / "history.edn") == 3
        key = '"list-1-0"'
        assert (tmp_path / "history.edn").read_text().splitlines() == [
            f"{{:index 0, :type :invoke, :process 0, :time 1000000000, :f :txn, "
            f":value [[:append {key} 0] [:append {key} 1]]}}",
            f"{{:index 1, :type :invoke, :process 1, :time 2000000000, :f :txn, :value [[:r {key} nil]]}}",
            f"{{:index 2, :type :ok, :process 0, :time 3000000000, :f :txn, "
            f":value [[:append {key} 0] [:append {key} 1]]}}",
            f"{{:index 3, :type :ok, :process 1, :time 4000000000, :f :txn, :value [[:r {key} [0]]]}}",
            f"{{:index 4, :type :invoke, :process 2, :time 5000000000, :f :txn, :value [[:append {key} 2]]}}",
            f"{{:index 5, :type :info, :process 2, :time 5000000000, :f :txn, :value [[:append {key} 2]]}}",
        ]


@pytest.fixture(autouse=True)
def _few_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the processor to other tests, and what they show is the same."""
    monkeypatch.setattr(workload, "CLIENTS", 4)


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
def test_everything_happens_and_nothing_acknowledged_is_lost_doubled_or_wrong(
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


def test_what_others_prevented_all_the_time_is_tried_again_when_nothing_else_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reproduction: in twenty minutes on Redis no `repair` ended before a disruption, and none came later."""
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


class TestTheRunNotices:
    @pytest.mark.parametrize(("store", "lost"), [("sqlite", set()), ("redis", {"lost"})])
    def test_that_a_store_is_trusted_whatever_it_lacks(
        self, store: ChaosStore, lost: set[str], models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is written to SQLite's file while it is away comes back with it."""
        require_servers()
        monkeypatch.setattr(store_disruptions, "REFUSED_WITHIN_S", 3.0)
        monkeypatch.setattr(disruptions, "ATTEMPTS", 1)
        run = ChaosSettings(models, store, 0.0, 3, tmp_path, ["store lost"], weakness="without-trust")
        faults = asyncio.run(chaos(run)).all_faults()
        assert faults.keys() >= {"not refused", "did not happen"} | lost

    @pytest.mark.parametrize("store", ["sqlite", "redis"])
    def test_that_the_guard_against_duplicates_is_off(
        self, store: ChaosStore, models: list[Path], tmp_path: Path
    ) -> None:
        require_servers()
        run = ChaosSettings(models, store, 3.0, 3, tmp_path, ["app killed"], weakness="without-guard")
        assert "doubled" in asyncio.run(chaos(run)).all_faults()

    def test_what_nobody_waited_for_when_a_replica_takes_over(self, models: list[Path], tmp_path: Path) -> None:
        """Services refuse the replica, which lacks what they acknowledged, until an operator accepts that."""
        require_servers()
        run = ChaosSettings(models, "cluster", 0.0, 3, tmp_path, ["lagging replica took over"], replicas=0)
        report = asyncio.run(chaos(run))
        assert report.all_faults() == {}
        assert report.verdict.accepted_losses > 0
        assert report.injected["failover accepted"] == 1
