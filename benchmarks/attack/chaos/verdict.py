"""The judgement of a chaos run: every log against what clients were told, every state against the fold of its log."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from benchmarks.attack.chaos.operations import EventKey, Operation, OperationLog
from benchmarks.harness.ledger import TENANT, is_fold
from storage.protocol import UserStore
from storage.records import LogEntry
from storage.state.corrections import effective_events, posted_as
from storage.state.event import Event, Undo
from storage.state.generation import Generation

WHOLE_LOG = 10**8


@dataclass
class ChaosVerdict:
    """What is wrong; nothing if all lists are empty.

    lost         acknowledged, and not in the log
    doubled      more than once in the log
    unsent       in the log as nobody sent it, or undone by nobody
    resurrected  in the log after an acknowledged erasure
    lost_undo    undone, and still counting
    diverged     users who are one by an acknowledged merge, and have different logs
    denied       undos of acknowledged events that were answered with 404
    unfolded     users and generations whose state is not the fold of the log
    """

    users: int = 0
    events: int = 0
    states: int = 0
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unsent: list[str] = field(default_factory=list)
    resurrected: list[str] = field(default_factory=list)
    lost_undo: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    denied: list[str] = field(default_factory=list)
    unfolded: list[str] = field(default_factory=list)

    def faults(self) -> dict[str, list[str]]:
        """Return the faults by kind."""
        return {name: value for name, value in vars(self).items() if isinstance(value, list)}

    @property
    def is_correct(self) -> bool:
        """Return whether nothing is wrong."""
        return not any(self.faults().values())

    def __str__(self) -> str:
        counts = ", ".join(f"{len(found):,} {name}" for name, found in self.faults().items())
        return (
            f"{self.acknowledged:,} events acknowledged; {self.events:,} in the logs of {self.users:,} users, "
            f"{self.states:,} states compared: {counts}"
        )


async def judge(store: UserStore, generations: list[Generation], record: OperationLog) -> ChaosVerdict:
    """Compare every user's log with the record, and every state with the log."""
    verdict = ChaosVerdict()
    logs: dict[str, list[LogEntry]] = {}
    for user_id in sorted({operation.user_id for operation in record.operations}):
        logs[user_id] = log = await store.events(TENANT, user_id, limit=WHOLE_LOG)
        verdict.users += 1
        await _judge_states(verdict, store, generations, user_id, log)
    facts = _Facts(record, logs)
    for user_id, log in logs.items():
        facts.judge_log(verdict, user_id, log)
    facts.judge_posts(verdict)
    facts.judge_undos(verdict)
    facts.judge_merges(verdict)
    return verdict


async def _judge_states(
    verdict: ChaosVerdict, store: UserStore, generations: list[Generation], user_id: str, log: list[LogEntry]
) -> None:
    effective = list(effective_events(entry.record for entry in log))
    for number, generation in enumerate(generations):
        (value,) = await store.states(TENANT, [user_id], generation)
        verdict.states += 1
        is_empty = bool(log) and not effective  # every event was undone
        if value != generation.encoded_empty if is_empty else not is_fold(generation, value, effective):
            verdict.unfolded.append(f"{user_id} of generation {number}")


class _Facts:
    """The record and the logs, in the orders in which the laws need them."""

    def __init__(self, record: OperationLog, logs: dict[str, list[LogEntry]]) -> None:
        self._record = record
        self._logs = logs
        self._posts = record.posts()
        self._erasures = record.erasures()
        self._undos: defaultdict[EventKey, list[Operation]] = defaultdict(list)
        for undo in record.of_kind("undo"):
            self._undos[undo.user_id, undo.event_ids[0]].append(undo)
        records = {user_id: [entry.record for entry in log] for user_id, log in logs.items()}
        self._logged = {
            user_id: Counter(posted_as(one) for one in of_user if isinstance(one, Event))
            for user_id, of_user in records.items()
        }
        self._undone = {
            user_id: {posted_as(one) for one in of_user if isinstance(one, Undo)}
            for user_id, of_user in records.items()
        }

    def judge_log(self, verdict: ChaosVerdict, user_id: str, log: list[LogEntry]) -> None:
        """Find what stands in the log and must not."""
        logged = self._logged[user_id]
        verdict.events += logged.total()
        verdict.doubled += [f"{user_id}: {key}" for key, times in logged.items() if times > 1]
        for entry in log:
            record = entry.record
            if isinstance(record, Event):
                key = posted_as(record)
                if self._record.items.get(key) != record.item_id or key not in self._posts:
                    verdict.unsent.append(f"{user_id}: {key}")
                elif self._must_be_gone(key):
                    verdict.resurrected.append(f"{user_id}: {key}")
            elif isinstance(record, Undo) and posted_as(record) not in self._undos:
                verdict.unsent.append(f"{user_id}: undo of {posted_as(record)}")

    def judge_posts(self, verdict: ChaosVerdict) -> None:
        """Find acknowledged events that are not in the log."""
        for (user_id, event_id), posts in self._posts.items():
            acknowledged = [post for post in posts if post.is_done]
            verdict.acknowledged += bool(acknowledged)
            if any(self._stays(post) for post in acknowledged) and not self._logged[user_id][user_id, event_id]:
                verdict.lost.append(f"{user_id}: {event_id}")

    def judge_undos(self, verdict: ChaosVerdict) -> None:
        """Find acknowledged undos that changed nothing, and refused ones of events that were there."""
        for key, undos in self._undos.items():
            user_id, event_id = key
            for undo in undos:
                before = [post for post in self._posts[key] if post.is_done and post.ended_s < undo.began_s]
                if not any(self._stays(post) for post in before):
                    continue
                if undo.outcome == "refused":
                    verdict.denied.append(f"{user_id}: {event_id}")
                elif undo.is_done and key not in self._undone[user_id]:
                    verdict.lost_undo.append(f"{user_id}: {event_id}")

    def judge_merges(self, verdict: ChaosVerdict) -> None:
        """Find merged users whose logs are not one."""
        for merge in self._record.of_kind("merge"):
            if merge.is_done and self._stays(merge) and self._logs[merge.user_id] != self._log_of(merge.visitor):
                verdict.diverged.append(f"{merge.visitor} and {merge.user_id}")

    def _log_of(self, user_id: str) -> list[LogEntry]:
        return self._logs.get(user_id, [])

    def _stays(self, operation: Operation) -> bool:
        """Return whether no erasure can have come after what the operation did."""
        erasures = self._erasures.get(operation.family, ())
        return all(erasure.ended_s < operation.began_s for erasure in erasures)

    def _must_be_gone(self, key: EventKey) -> bool:
        """Return whether an acknowledged erasure of its user began after all that can have posted the event."""
        posts = self._posts[key]
        (family,) = {post.family for post in posts}
        last_effect_s = max(post.last_effect_s for post in posts)
        return any(
            erasure.is_done and erasure.user_id == key[0] and last_effect_s < erasure.began_s
            for erasure in self._erasures.get(family, ())
        )
