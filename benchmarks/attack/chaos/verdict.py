"""The verdict of a chaos run: logs against acknowledged operations, and states against the folds of logs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from benchmarks.attack.chaos.operations import AcceptedLoss, EventKey, Operation, OperationLog
from benchmarks.harness.ledger import RENAMED, TENANT, is_fold
from storage.archive.reader import ArchiveReader, ArchiveSnapshot
from storage.errors import StorageUnavailable
from storage.protocol import UserStore
from storage.records import LogEntry
from storage.state.corrections import effective_events
from storage.state.event import Event, Undo
from storage.state.generation import Generation
from storage.state.record_encoding import EVENT

WHOLE_LOG = 10**8


@dataclass
class ChaosVerdict:
    """Faults by kind; all lists are empty without faults.

    lost         acknowledged, and not in the log
    doubled      more than once in the log, or in the archive
    unsent       in the log as nobody sent it, or undone by nobody
    resurrected  in the log after an acknowledged erasure
    lost_undo    undone, and still counting
    diverged     users who are one by an acknowledged merge, and have different logs
    denied       undos of acknowledged events that were answered with 404
    unfolded     users and generations whose state is not the fold of the log
    unnoticed    acknowledged, and gone with a loss that no service has noticed
    unarchived   in the log, and not in the archive

    accepted_losses  acknowledged events that are gone with a loss that an operator accepted
    restored         acknowledged events that such a loss did not take, because the archive had them
    """

    users: int = 0
    events: int = 0
    states: int = 0
    acknowledged: int = 0
    accepted_losses: int = 0
    restored: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unsent: list[str] = field(default_factory=list)
    resurrected: list[str] = field(default_factory=list)
    lost_undo: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    denied: list[str] = field(default_factory=list)
    unfolded: list[str] = field(default_factory=list)
    unnoticed: list[str] = field(default_factory=list)
    unarchived: list[str] = field(default_factory=list)

    def faults(self) -> dict[str, list[str]]:
        """Return the faults by kind."""
        return {name: value for name, value in vars(self).items() if isinstance(value, list)}

    def __str__(self) -> str:
        counts = ", ".join(f"{len(found):,} {name}" for name, found in self.faults().items())
        return (
            f"{self.acknowledged:,} events acknowledged; {self.events:,} in the logs of {self.users:,} users, "
            f"{self.states:,} states compared: {counts}; gone with accepted losses {self.accepted_losses:,}, "
            f"brought back by the archive {self.restored:,}"
        )


async def judge(
    store: UserStore, generations: list[Generation], record: OperationLog, archive: Path | None = None
) -> ChaosVerdict:
    """Compare every user's log with the record, every state with the log, and the archive, which has all, with it."""
    verdict = ChaosVerdict()
    logs: dict[str, list[LogEntry]] = {}
    for user_id in record.users():
        logs[user_id] = log = await store.events(TENANT, user_id, limit=WHOLE_LOG)
        verdict.users += 1
        await _judge_states(verdict, store, generations, user_id, log)
    facts = _Facts(record, logs)
    for user_id, log in logs.items():
        facts.judge_log(verdict, user_id, log)
    facts.judge_posts(verdict)
    facts.judge_undos(verdict)
    facts.judge_merges(verdict)
    if archive is not None:
        _judge_archive(verdict, logs, archived_events(archive))
    return verdict


def archived_events(directory: Path) -> Counter[EventKey]:
    """Return how often the archive contains each event, by stored user and id."""

    def read(snapshot: ArchiveSnapshot) -> pl.DataFrame | None:
        paths = snapshot.paths(TENANT)
        events = pl.col("kind") == EVENT
        return pl.scan_parquet(paths).filter(events).select("user_id", "event_id").collect() if paths else None

    try:
        found = ArchiveReader(directory).read(read)
    except StorageUnavailable:  # no archiver has begun it
        found = None
    return Counter() if found is None else Counter(found.iter_rows())


def original(user_id: str, event_id: str) -> EventKey:
    """Return the user and id with which an event was posted; without deduplication the service has changed the id."""
    posted_for, slash, posted_id = event_id.partition("/")
    return (posted_for if slash else user_id), (posted_id if slash else event_id).partition(RENAMED)[0]


def _key(record: Event | Undo) -> EventKey:
    return original(record.user_id, record.event_id)


def _judge_archive(verdict: ChaosVerdict, logs: dict[str, list[LogEntry]], archived: Counter[EventKey]) -> None:
    logged = {
        (entry.record.user_id, entry.record.event_id)
        for log in logs.values()
        for entry in log
        if isinstance(entry.record, Event)
    }
    verdict.unarchived += [f"{user_id}: {event_id}" for user_id, event_id in logged if not archived[user_id, event_id]]
    twice = [key for key, times in archived.items() if times > 1]
    verdict.doubled += [f"{user_id}: {event_id} in the archive" for user_id, event_id in twice]


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
    """Operations and logs, indexed for the checks."""

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
            user_id: Counter(_key(one) for one in of_user if isinstance(one, Event))
            for user_id, of_user in records.items()
        }
        self._undone = {
            user_id: {_key(one) for one in of_user if isinstance(one, Undo)} for user_id, of_user in records.items()
        }

    def judge_log(self, verdict: ChaosVerdict, user_id: str, log: list[LogEntry]) -> None:
        """Find log entries that must not exist."""
        logged = self._logged[user_id]
        verdict.events += logged.total()
        verdict.doubled += [f"{user_id}: {key}" for key, times in logged.items() if times > 1]
        for entry in log:
            record = entry.record
            if isinstance(record, Event):
                key = _key(record)
                if self._record.items.get(key) != record.item_id or key not in self._posts:
                    verdict.unsent.append(f"{user_id}: {key}")
                elif self._must_be_gone(key):
                    verdict.resurrected.append(f"{user_id}: {key}")
            elif isinstance(record, Undo) and _key(record) not in self._undos:
                verdict.unsent.append(f"{user_id}: undo of {_key(record)}")

    def judge_posts(self, verdict: ChaosVerdict) -> None:
        """Find acknowledged events that are not in the log."""
        for (user_id, event_id), posts in self._posts.items():
            key = user_id, event_id
            acknowledged = [post for post in posts if post.is_done]
            verdict.acknowledged += bool(acknowledged)
            unerased = [post for post in acknowledged if self._is_unerased(post)]
            if not unerased:
                continue
            losses = [self._losses_of(post, key) for post in unerased]
            is_logged = bool(self._logged[user_id][key])
            if not is_logged and not all(losses):
                verdict.lost.append(f"{user_id}: {event_id}")
            elif not is_logged:
                verdict.accepted_losses += 1
                if not any(loss.is_noticed for of_post in losses for loss in of_post):
                    verdict.unnoticed.append(f"{user_id}: {event_id}")
            elif all(self._record.losses_of(post) for post in unerased) and not all(losses):
                verdict.restored += 1

    def judge_undos(self, verdict: ChaosVerdict) -> None:
        """Find acknowledged undos without effect, and refused undos of existing events."""
        for key, undos in self._undos.items():
            user_id, event_id = key
            for undo in undos:
                before = [post for post in self._posts[key] if post.is_done and post.ended_s < undo.began_s]
                if not any(self._is_unerased(post) and not self._losses_of(post, key) for post in before):
                    continue
                if undo.outcome == "refused":
                    verdict.denied.append(f"{user_id}: {event_id}")
                elif undo.is_done and not self._record.losses_of(undo) and key not in self._undone[user_id]:
                    verdict.lost_undo.append(f"{user_id}: {event_id}")

    def judge_merges(self, verdict: ChaosVerdict) -> None:
        """Find merged users whose logs differ."""
        for merge in self._record.of_kind("merge"):
            if merge.is_done and self._is_unerased(merge) and self._logs[merge.user_id] != self._logs[merge.visitor]:
                verdict.diverged.append(f"{merge.visitor} and {merge.user_id}")

    def _is_unerased(self, operation: Operation) -> bool:
        """Return whether no erasure can have followed the operation."""
        erasures = self._erasures.get(operation.family, ())
        return all(erasure.ended_s < operation.began_s for erasure in erasures)

    def _losses_of(self, post: Operation, key: EventKey) -> list[AcceptedLoss]:
        """Return the accepted losses that may include the event."""
        return [loss for loss in self._record.losses_of(post) if key not in loss.archived]

    def _must_be_gone(self, key: EventKey) -> bool:
        """Return whether an acknowledged erasure started after every possible post of the event."""
        posts = self._posts[key]
        (family,) = {post.family for post in posts}
        last_effect_s = max(post.last_effect_s for post in posts)
        return any(
            erasure.is_done and erasure.user_id == key[0] and last_effect_s < erasure.began_s
            for erasure in self._erasures.get(family, ())
        )
