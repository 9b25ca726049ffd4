"""The fault bench of Kafka, shortened, and that it detects faults."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.serving.served_generation import generation_of
from app.serving.store_factory import opened_store
from app.settings import StoreSettings
from benchmarks.kafka.consumed_topic import USERS, ConsumedTopic
from benchmarks.kafka.faults import FaultPlan, judge, run_faults
from model.artifact import model_directory
from storage.state.event import Event
from storage.state.generation import Generation
from tests.benchmarks.support import require_servers


def plan(model: Path, records: int) -> FaultPlan:
    return FaultPlan(model, "redis", records, kills=2, cuts=40, rebalances=1, failures=1)


def test_no_event_is_lost_or_duplicated(model: Path) -> None:
    require_servers()
    verdict = run_faults(plan(model, 4_000))
    assert verdict.is_correct, verdict
    assert verdict.logged == 4_000
    assert verdict.letters == 4
    assert verdict.faults["kill -9: consumer"] == 2
    assert verdict.faults["broker down"] == 1


def test_lost_duplicated_and_reordered_events_are_detected(model: Path, tmp_path: Path) -> None:
    logged = {"user-0": [0, 0], "user-1": [USERS + 1, 1], "user-2": [2], "user-4": [4, 4]}
    topic = ConsumedTopic("127.0.0.1:1", "clicks", 1, "lisarec", 2 * USERS)
    topic.copies = {4: 2}  # the producer wrote it twice
    settings = StoreSettings(data_dir=tmp_path)
    asyncio.run(append(settings, generation_of(model_directory.load(model)), logged))
    verdict = asyncio.run(judge(settings, model, topic))
    assert (verdict.logged, verdict.doubled, verdict.disordered) == (7, 1, 1)
    assert verdict.lost == 2 * USERS - 5
    assert not verdict.is_correct


async def append(settings: StoreSettings, generation: Generation, logged: Mapping[str, Sequence[int]]) -> None:
    async with opened_store(settings, generation, is_new=True) as store:
        for user, numbers in logged.items():
            events = [
                Event(f"{user}-{place}", user, "tea", "click", place, None, float(number))
                for place, number in enumerate(numbers)
            ]
            await store.append("main", events)
