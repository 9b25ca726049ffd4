"""Histories of single users' logs in the format of the checkers Elle and Jepsen, and a checker of our own.

A user's log is a list to which events are appended and that is read as a whole. `elle-cli --model list-append FILE`
(https://github.com/ligurio/elle-cli) judges such a file. `violations` needs nothing: with one key a transaction, and
values that are appended once, a history is linearizable if and only if its laws hold: they name every pair of
operations whose order in the list contradicts the order in which the one ended and the other began.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path

from benchmarks.attack.chaos.operations import Operation

TYPE_OF_OUTCOME = {"done": ":ok", "refused": ":fail", "unknown": ":info"}


def write_history(operations: Sequence[Operation], path: Path) -> int:
    """Write the invocations and completions of appends and reads, one per line; return the number of operations.

    What was never answered completes at the end, as `:info`: Elle takes it for concurrent with all that began later,
    and cannot read an invocation without a completion. Of what happened at the same time, invocations come first.
    """
    numbers: dict[tuple[str, str], int] = {}
    moments: list[tuple[float, bool, str]] = []
    answered_s = [operation.ended_s for operation in operations if math.isfinite(operation.ended_s)]
    latest_s = max([*answered_s, *(operation.began_s for operation in operations)], default=0.0)
    for process, operation in enumerate(operations):
        key = f'"{operation.user_id}"'
        values = [numbers.setdefault((operation.user_id, id_), len(numbers)) for id_ in operation.event_ids]
        if operation.kind == "append":
            invoked = completed = " ".join(f"[:append {key} {value}]" for value in values)
        else:
            invoked, completed = f"[:r {key} nil]", f"[:r {key} [{' '.join(map(str, values))}]]"
        if not operation.is_done:
            completed = invoked
        kind, ended_s = TYPE_OF_OUTCOME[operation.outcome], min(operation.ended_s, latest_s)
        moments.append((operation.began_s, False, _line(":invoke", process, invoked, operation.began_s)))
        moments.append((operation.ended_s, True, _line(kind, process, completed, ended_s)))
    in_order = sorted(moments, key=lambda moment: moment[:2])
    lines = (f"{line.format(index=index)}\n" for index, (_, _, line) in enumerate(in_order))
    path.write_text("".join(lines), encoding="utf-8")
    return len(operations)


def _line(kind: str, process: int, value: str, at_s: float) -> str:
    fields = f":index {{index}}, :type {kind}, :process {process}, :time {round(at_s * 1e9)}, :f :txn"
    return f"{{{{{fields}, :value [{value}]}}}}"


def violations(operations: Sequence[Operation]) -> Iterator[str]:
    """Yield violations of linearizability in the histories of the users."""
    by_user: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_user[operation.user_id].append(operation)
    for user_id, of_user in by_user.items():
        for fault in _faults_of_list(of_user):
            yield f"{user_id}: {fault}"


def _faults_of_list(operations: Sequence[Operation]) -> Iterator[str]:
    """Yield the violations of one list.

    Reads are prefixes of one order; what was appended before a read began is in it, what was appended after it ended
    is not; the order of appends that did not overlap is theirs; one append's values stand together.
    """
    appends = [operation for operation in operations if operation.kind == "append"]
    reads = sorted(
        (operation for operation in operations if operation.kind == "read" and operation.is_done),
        key=lambda read: len(read.event_ids),
    )
    for shorter, longer in pairwise(reads):
        if list(longer.event_ids[: len(shorter.event_ids)]) != list(shorter.event_ids):
            yield "two reads are not prefixes of one order"
    yield from _stale_reads(reads)
    for read in reads:
        yield from _faults_of_read(read, appends)
    yield from _faults_of_order(reads[-1].event_ids if reads else (), appends)


def _stale_reads(reads: Sequence[Operation]) -> Iterator[str]:
    """Yield the reads, given by ascending length, that saw less than one that ended before they began."""
    earliest_end_s = math.inf
    for _, group in groupby(reversed(reads), key=lambda read: len(read.event_ids)):
        of_one_length = list(group)
        for read in of_one_length:
            if earliest_end_s < read.began_s:
                yield "a read saw less than one that had ended before"
        earliest_end_s = min(earliest_end_s, *(read.ended_s for read in of_one_length))


def _faults_of_read(read: Operation, appends: Sequence[Operation]) -> Iterator[str]:
    values = set(read.event_ids)
    if len(values) < len(read.event_ids):
        yield "a read saw an event twice"
    for append in appends:
        present = sum(event_id in values for event_id in append.event_ids)
        if append.is_done and append.ended_s < read.began_s and present < len(append.event_ids):
            yield "a read lacks what was acknowledged before it began"
        if present and (append.began_s > read.ended_s or append.outcome == "refused"):
            yield "a read saw what was not appended yet"
        if 0 < present < len(append.event_ids):
            yield "a read saw a part of one append"
    if unsent := values.difference(*(append.event_ids for append in appends)):
        yield f"a read saw {len(unsent)} events that nobody sent"


def _faults_of_order(order: Sequence[str], appends: Sequence[Operation]) -> Iterator[str]:
    place = {event_id: number for number, event_id in enumerate(order)}
    applied = sorted(
        (append for append in appends if append.event_ids and append.event_ids[0] in place),
        key=lambda append: place[append.event_ids[0]],
    )
    for append in applied:
        first = place[append.event_ids[0]]
        if list(order[first : first + len(append.event_ids)]) != list(append.event_ids):
            yield "the events of one append do not stand together, in its order"
    # what was acknowledged and no read saw comes behind all that some read saw
    unseen = (append for append in appends if append.is_done and append not in applied)
    earliest_end_s = min((append.ended_s for append in unseen), default=math.inf)
    for append in reversed(applied):
        if earliest_end_s < append.began_s:
            yield "an append stands before one that had ended before it began"
        earliest_end_s = min(earliest_end_s, append.ended_s)
