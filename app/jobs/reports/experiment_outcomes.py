"""The outcomes of an experiment: what each user did with the lists of each arm, from the event log.

No list is stored, so the log has the users whom lists led to an event, and not those who ignored them all. That is
enough, because the shares of the arms are known: see `app.jobs.reports.experiment_result`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from app.events.click_through import OF_PLACES, OF_SCENARIOS
from app.events.recommendation_ids import RecommendationIds, hash_of, scenario_hash_of
from app.jobs.event_log import audit_log
from app.schemas.operations import Experiment
from app.serving.store_factory import opened_store
from app.settings import StoreSettings
from storage.maintenance.backup import complete_logs
from storage.records import KnownGeneration, Tally
from storage.state.corrections import effective_events
from storage.state.event import IMPRESSION, Event, LogRecord, Merge


class Measure(NamedTuple):
    """What is added up: users with an event of this type, the events, or their values."""

    event: str
    of: Literal["users", "events", "value"]


@dataclass(frozen=True)
class StartedExperiment:
    """An experiment as the audit log has it.

    since_us  when its shares last changed; 0 if they never did
    """

    experiment: Experiment
    since_us: int


@dataclass(frozen=True)
class Outcomes:
    """What the lists of each arm led to.

    sums      by measure and arm: the sum of each user who has one
    reached   by arm: the users with an impression of its lists
    lists     by arm: the lists that were shown, also before the shares changed
    per_list  by measure and arm, as `/v1/stats` counts them
    """

    started: StartedExperiment
    sums: Mapping[Measure, Mapping[str, list[float]]]
    reached: Mapping[str, int]
    lists: Mapping[str, float]
    per_list: Mapping[tuple[Measure, str], float]


async def read_outcomes(settings: StoreSettings, name: str | None, on_progress: Callable[[int], None]) -> Outcomes:
    """Read the outcomes of the experiment with this name, or of the newest one, from the whole log.

    raises  StorageError, ValueError
    """
    started = await _started(settings, name)
    async with opened_store(settings) as store:
        ids = RecommendationIds(settings.tenant)
        ids.set_secret(await store.secret())
        lists = _ExperimentLists(started, ids, _arms(started.experiment, await store.generations.known()))
        read = 0
        async for entries in complete_logs(store):
            logs = defaultdict[str, list[LogRecord]](list)
            for tenant, entry in entries:
                if tenant == settings.tenant:
                    logs[entry.record.user_id].append(entry.record)
            for log in logs.values():
                lists.add_user(log)
            read += len(entries)
            on_progress(read)
        shown, per_list = _per_list(started.experiment, await store.tallies(settings.tenant))
    return Outcomes(started, lists.sums, lists.reached, shown, per_list)


async def _started(settings: StoreSettings, name: str | None) -> StartedExperiment:
    starts = [
        one.entry
        async for one in audit_log(settings)
        if one.entry.action == "experiment.start" and name in (None, one.entry.subject)
    ]
    if not starts:
        raise ValueError("no experiment was started on this store" if name is None else f"unknown experiment {name!r}")
    newest = starts[-1]
    of_name = [one for one in starts if one.subject == newest.subject]
    changed = max((place for place, one in enumerate(of_name) if one.details != newest.details), default=None)
    experiment = Experiment(name=newest.subject, **newest.details)
    return StartedExperiment(experiment, 0 if changed is None else of_name[changed + 1].time_us)


def _arms(experiment: Experiment, known: Iterable[KnownGeneration]) -> dict[bytes, str]:
    """Return the arms by what recommendation ids have of them; raise ValueError for a model that was dropped."""
    if experiment.over == "scenarios":
        return {scenario_hash_of(name): name for name in experiment.shares}
    arms = {one.named.tag[:4]: one.named.name for one in known if one.named.name in experiment.shares}
    for name in experiment.shares.keys() - arms.values():
        raise ValueError(
            f"the store has no model {name!r}, so its lists are unknown: it was dropped, or is a copy of another one"
        )
    return arms


@dataclass
class _ExperimentLists:
    """Adds up what an experiment's lists led to, user by user."""

    started: StartedExperiment
    ids: RecommendationIds
    arms: Mapping[bytes, str]
    sums: defaultdict[Measure, defaultdict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    reached: Counter[str] = field(default_factory=Counter)

    def add_user(self, log: Sequence[LogRecord]) -> None:
        if any(isinstance(record, Merge) for record in log):
            return  # the log of the user that this one was merged into has copies
        of_user = defaultdict[tuple[Measure, str], float](float)
        reached_by = set[str]()
        for event in effective_events(log):
            arm = self._arm_of(event)
            if arm is None:
                continue
            if event.type == IMPRESSION:
                reached_by.add(arm)
                continue
            of_user[Measure(event.type, "users"), arm] = 1
            of_user[Measure(event.type, "events"), arm] += 1
            if event.value:
                of_user[Measure(event.type, "value"), arm] += event.value
        self.reached.update(reached_by)
        for (measure, arm), amount in of_user.items():
            self.sums[measure][arm].append(amount)

    def _arm_of(self, event: Event) -> str | None:
        """Return the arm whose list led to the event; None if no list of the experiment did."""
        list_id, experiment = event.recommendation_id, self.started.experiment
        if list_id is None:
            return None
        place = next(filter(None, (self.ids.place(list_id, item_id) for item_id in event.item_ids)), None)
        if place is None or place.experiment != hash_of(experiment.name):
            return None
        if self.ids.time_ms(list_id) < self.started.since_us // 1_000:
            return None
        return self.arms.get(place.scenario if experiment.over == "scenarios" else place.generation)


def _per_list(
    experiment: Experiment, tallies: Mapping[Tally, float]
) -> tuple[Mapping[str, float], Mapping[tuple[Measure, str], float]]:
    """Return the lists of each arm, and what a list led to on average."""
    shown, events, values = (
        ("scenario-list", *OF_SCENARIOS) if experiment.over == "scenarios" else ("shown", *OF_PLACES)
    )
    lists, sums = defaultdict[str, float](float), defaultdict[tuple[Measure, str], float](float)
    for (what, arm, of_experiment, *_, label), amount in tallies.items():
        if of_experiment != experiment.name or arm not in experiment.shares:
            continue
        if what == shown:
            lists[str(arm)] += amount
        elif what in (events, values):
            sums[Measure(str(label), "events" if what == events else "value"), str(arm)] += amount
    return lists, {(measure, arm): total / lists[arm] for (measure, arm), total in sums.items() if lists[arm]}
