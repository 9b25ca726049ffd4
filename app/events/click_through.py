"""Click-through: how often each position of the lists was shown, and how often it led to an event.

Both are counted in memory and flushed to the store at intervals. The store adds up the counts of all processes.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from app.events.recommendation_ids import PLACES, Place, RecommendationIds, hash_of, scenario_hash_of
from app.observability.metrics import Metrics
from app.schemas.operations import ListOutcome, PlaceStats, ScenarioStats, Stats
from app.schemas.recommendations import Recommendations
from storage.protocol import UserStore
from storage.records import OTHER, AppendResult, Tally
from storage.state.event import Event

OF_PLACES, OF_SCENARIOS = ("chosen", "value"), ("scenario-event", "scenario-value")  # event counts, value sums
DECIMALS = 6  # of sums of values


class ClickThrough:
    """Counts shown lists and chosen items of one tenant.

    A tally is ("shown", generation, experiment, length) for lists, where the length is at most PLACES + 1, and
    ("chosen", generation, experiment, place, event type) for events. For a scenario there are also ("scenario-list",
    scenario, experiment, ListOutcome) and ("scenario-event", scenario, experiment, event type). Tallies with "value"
    instead of "chosen" and "scenario-value" instead of "scenario-event" contain the sums of event values.
    """

    def __init__(self, store: UserStore, tenant: str, metrics: Metrics) -> None:
        self.ids = RecommendationIds(tenant)
        self._store = store
        self._tenant = tenant
        self._metrics = metrics
        self._shown = Counter[Tally]()
        self._chosen = Counter[tuple[Place, str]]()
        self._values = defaultdict[tuple[Place, str], float](float)
        self._types: Collection[str] = ()
        self._generations: dict[bytes, str] = {}
        self._known: Collection[bytes] = ()  # those that the store had at the last `sync`
        self._experiments: dict[int, str] = {0: ""}
        self._scenarios: dict[bytes, str] = {}
        self._has_secret = False
        self._flushing = asyncio.Lock()

    def add_generation(self, tag: bytes, name: str, experiment: str, types: Collection[str]) -> None:
        """Start counting lists and events of these types for this generation and experiment."""
        self._generations[tag[:4]] = name
        self._experiments[hash_of(experiment)] = experiment
        self._types = {*self._types, *types}

    def add_scenarios(self, names: Iterable[str]) -> None:
        """Start resolving the names of these scenarios."""
        self._scenarios |= {scenario_hash_of(name): name for name in names}

    def show(self, generation: str, answer: Recommendations, *, is_continued: bool) -> None:
        """Count a list that is sent.

        is_continued  whether it is a later page, which does not count as a list of its scenario
        """
        experiment, length = answer.get("experiment", ""), len(answer["items"])
        self._shown["shown", generation, experiment, min(length, PLACES + 1)] += 1
        if "scenario" in answer and not is_continued:
            self._shown["scenario-list", answer["scenario"], experiment, _outcome(answer)] += 1

    def count(self, events: Sequence[Event], results: Iterable[AppendResult]) -> None:
        """Count the new events that lists led to."""
        for event, result in zip(events, results, strict=True):
            if event.recommendation_id is not None and not result.duplicate and event.type in self._types:
                place = self.ids.place(event.recommendation_id, event.item_id)
                if place is not None:
                    self._chosen[place, event.type] += 1
                    if event.value:
                        self._values[place, event.type] += event.value

    @property
    def generations(self) -> int:
        """How many the store had at the last `sync`."""
        return len(self._known)

    async def sync(self) -> None:
        """Read what decoding ids requires, then flush; raise StorageError if the store cannot be used."""
        if not self._has_secret:
            self.ids.set_secret(await self._store.secret())
            # of experiments that may have ended before this process started
            self._experiments = experiments_in(await self._store.tallies(self._tenant)) | self._experiments
            self._has_secret = True
        known = {one.named.tag[:4]: one.named.name for one in await self._store.generations.known()}
        dropped = {*self._known} - known.keys()
        kept = known | {tag: name for tag, name in self._generations.items() if tag not in dropped}
        if forgotten := {self._generations[tag] for tag in dropped} - {*kept.values()}:
            self._metrics.recommendations.forget(self._tenant, forgotten)
        self._generations = kept
        self._known = known.keys()
        await self.flush()

    async def flush(self) -> None:
        """Write the counts to the store; if that fails, keep them for the next flush."""
        # without the lock, this could return before a concurrent flush has written the counts that it took
        async with self._flushing:
            shown, chosen, values = self._shown, self._chosen, self._values
            self._shown, self._chosen, self._values = Counter(), Counter(), defaultdict(float)
            tallies = defaultdict[Tally, float](float, shown)
            both: tuple[Mapping[tuple[Place, str], float], ...] = chosen, values
            for what, of_scenario, amounts in zip(OF_PLACES, OF_SCENARIOS, both, strict=True):
                for (place, kind), amount in amounts.items():
                    generation = self._generations.get(place.generation, OTHER)
                    experiment = self._experiments.get(place.experiment, OTHER)
                    tallies[what, generation, experiment, place.place, kind] += amount
                    if place.scenario:
                        scenario = self._scenarios.get(place.scenario, OTHER)
                        tallies[of_scenario, scenario, experiment, kind] += amount
            try:
                await self._store.add_tallies(self._tenant, tallies)
            except Exception:
                self._shown.update(shown)
                self._chosen.update(chosen)
                for of_place, value in values.items():
                    self._values[of_place] += value
                raise
            self._metrics.recommendations.count_places(self._tenant, tallies)

    async def tallies(self) -> Mapping[Tally, float]:
        """Return the tallies that all processes have flushed; raise StorageError if they cannot be read."""
        await self.flush()
        return await self._store.tallies(self._tenant)


def _outcome(answer: Recommendations) -> ListOutcome:
    if not answer["items"]:
        return "empty"
    if "short" in answer:
        return "short"
    return "filled" if "fallback" in answer["items"][-1] else "full"


def experiments_in(tallies: Iterable[Tally]) -> dict[int, str]:
    """Return the names of the experiments, also ended ones, that the tallies name, by their hashes."""
    return {hash_of(name): name for tally in tallies if (name := str(tally[2]))}


def stats_of(tallies: Mapping[Tally, float]) -> Stats:
    """Return the statistics by generation, experiment and place, and by scenario and experiment."""
    shown = Counter[tuple[str, str, int]]()
    events = defaultdict[tuple[str, str, int], dict[str, int]](dict)
    values = defaultdict[tuple[str, str, int], dict[str, float]](dict)
    scenarios: dict[tuple[str, str], ScenarioStats] = {}
    for tally, amount in tallies.items():
        match tally:
            case "shown", str(generation), str(experiment), int(length):
                for place in range(1, min(length, PLACES) + 1):
                    shown[generation, experiment, place] += int(amount)
            case "chosen", str(generation), str(experiment), int(place), str(kind):
                events[generation, experiment, place][kind] = int(amount)
            case "value", str(generation), str(experiment), int(place), str(kind):
                values[generation, experiment, place][kind] = round(amount, DECIMALS)
            case "scenario-list" | "scenario-event" | "scenario-value", str(scenario), str(experiment), str(label):
                new = ScenarioStats(scenario=scenario, experiment=experiment or None)
                _add(scenarios.setdefault((scenario, experiment), new), str(tally[0]), label, amount)
    places = [
        PlaceStats(
            generation=at[0],
            experiment=at[1] or None,
            place=at[2],
            shown=shown[at],
            events=events[at],
            value=values[at],
        )
        for at in sorted({*+shown, *events})
    ]
    return Stats(places=places, scenarios=[stats for _, stats in sorted(scenarios.items())])


def _add(stats: ScenarioStats, what: str, label: str, amount: float) -> None:
    """Add a tally of a scenario; the label is a type of events, or the outcome of lists."""
    count = int(amount)
    if what == "scenario-event":
        stats.events[label] = count
    elif what == "scenario-value":
        stats.value[label] = round(amount, DECIMALS)
    else:
        stats.lists += count
        stats.short += count * (label == "short")
        stats.filled += count * (label == "filled")
        stats.empty += count * (label == "empty")
