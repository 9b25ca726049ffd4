"""Judging list operations of the chaos run, and their export for the checker Elle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import edn_format
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attack.chaos.elle import violations, write_history
from benchmarks.attack.chaos.operations import Operation, OperationKind, Outcome

MOMENTS = st.integers(0, 9)


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    """Operations on a list: appends of new values, and reads of any sequences."""
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
    """Try every order of every subset of operations that may have taken effect."""
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


class TestListHistories:
    @given(histories())
    @settings(max_examples=300)
    def test_a_history_without_a_valid_order_is_a_fault(self, operations: list[Operation]) -> None:
        assert (not list(violations(operations))) is is_linearizable(operations)

    @given(histories())
    @settings(max_examples=300)
    def test_the_file_for_elle_is_complete(
        self, tmp_path_factory: pytest.TempPathFactory, operations: list[Operation]
    ) -> None:
        """An independent EDN parser reads it, and the order alone gives the same verdict."""
        file = tmp_path_factory.getbasetemp() / "history.edn"
        assert write_history(operations, file) == len(operations)
        read = read_history(file)
        assert len(read) == len(operations)
        assert is_linearizable(read) is is_linearizable(operations)
        assert (not list(violations(read))) is is_linearizable(read)

    def test_the_file_for_elle_is_in_order_of_time(self, tmp_path: Path) -> None:
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
