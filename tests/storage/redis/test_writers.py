"""Concurrent writers to the same users."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import storage.redis.requests
import storage.redis.writer
from storage.errors import StorageUnavailable
from storage.records import AppendResult
from storage.redis.requests import Part
from storage.redis.scripts.events import COMMIT
from storage.redis.store import RedisStore
from storage.state.event import Event
from tests.storage.contract.stores import FEW_PARTITIONS
from tests.storage.oracles.random_events import HOT_USERS, click, shared_event
from tests.storage.redis.overtaken import overtake
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import PREFIX, assert_state_is_fold_of_log, ids, opened
from tests.waiting import until

ROOT = Path(__file__).parents[3]


class TestManyWriters:
    def test_concurrent_processes_count_every_event_once(self, server: RedisServer) -> None:
        processes, events = 4, 1200
        command = [sys.executable, "-m", "tests.storage.processes.append_shared", f"redis:{server.url} {PREFIX}"]
        writers = [
            subprocess.Popen([*command, *map(str, (n, processes, events))], stdout=subprocess.PIPE, cwd=ROOT)
            for n in range(processes)
        ]
        counted = [int(writer.communicate(timeout=200)[0]) for writer in writers]
        assert sum(counted) == events

        async def law() -> None:
            sent = [shared_event(number) for number in range(events)]
            async with opened(server.url, partitions=FEW_PARTITIONS) as store:
                for user_id in (*HOT_USERS, *(f"cold{number}" for number in range(0, 200, 5))):
                    assert set(await ids(store, user_id)) == {e.event_id for e in sent if e.user_id == user_id}
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    async def test_a_refused_commit_is_folded_again_on_newer_events(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between read and commit, another store appends so much that the ring forgets the id."""
        others = [click("contended", item=3), *(click(f"other{number}", item=4) for number in range(30))]
        async with opened(any_server.url) as store, opened(any_server.url) as other:
            interfere_once(monkeypatch, other, others)
            answers = await store.append("main", [click("contended", item=3), click("own", item=5)])
            assert [answer.duplicate for answer in answers] == [True, False]
            assert await ids(store) == [*(event.event_id for event in others), "own"]
            await assert_state_is_fold_of_log(store)

    async def test_a_refused_user_does_not_delay_its_partition(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with opened(any_server.url, partitions=1) as store, opened(any_server.url, partitions=1) as other:
            interfere_once(monkeypatch, other, [click("other", "a")])
            answers = await store.append("main", [click("own", "a"), click("own", "b"), click("other", "a")])
            assert [answer.duplicate for answer in answers] == [False, False, True]
            logs = {user_id: await store.events("main", user_id) for user_id in "ab"}
            assert [entry.record.entry_id for entry in logs["a"]] == ["other", "own"]
            assert [entry.seq for entry in logs["b"]] == [2]
            assert [entry.seq for entry in logs["a"]] == [1, 3]
            for user_id in "ab":
                await assert_state_is_fold_of_log(store, user_id)

    def test_the_reason_of_a_refusal_applies_to_the_whole_next_round(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise each resend of a forgotten id would get all events of its user refused."""
        refused: list[Part] = []
        may_retry = Part.may_retry

        def counted(part: Part, why: str) -> bool:
            refused.append(part)
            return may_retry(part, why)

        async def law() -> None:
            async with opened(any_server.url) as store:
                await store.append("main", [click("logged"), *(click(f"other{number}") for number in range(30))])
                sent: list[asyncio.Task[list[AppendResult]]] = []

                async def send_more() -> None:
                    requests = [[click("logged")], [click("own")], [click("logged"), click("last")]]
                    sent.extend(asyncio.create_task(store.append("main", events)) for events in requests)
                    await until(lambda: store.waiting == 4)

                overtake(monkeypatch, COMMIT.sha, send_more)
                answers = await store.append("main", [click("logged")])
                for task in sent:
                    answers += await task
                assert [answer.duplicate for answer in answers] == [True, True, False, True, False]
                assert (await ids(store))[31:] == ["own", "last"]
                await assert_state_is_fold_of_log(store)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Part, "may_retry", counted)
            asyncio.run(law())
        assert len(refused) == 1

    async def test_a_resend_with_another_time_is_still_a_duplicate(self, any_server: RedisServer) -> None:
        """The log's index decides, not the ring with its low-water mark."""
        async with opened(any_server.url) as store:
            await store.append("main", [click(f"e{number}") for number in range(100)])
            again = [click(f"e{number}", timestamp_us=1_800_000_000_000_000) for number in range(100)]
            assert all(answer.duplicate for answer in await store.append("main", again))
            await assert_state_is_fold_of_log(store)

    async def test_a_writer_that_always_loses_the_race_gives_up(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(storage.redis.requests, "TIMEOUT_S", 1.0)
        async with opened(any_server.url) as store, opened(any_server.url) as other:
            interfere_once(monkeypatch, other, [click("other")], for_s=1.1)
            with pytest.raises(StorageUnavailable, match="concurrent writes changed the same users"):
                await store.append("main", [click("own")])
            assert await ids(store) == ["other"]


def interfere_once(
    monkeypatch: pytest.MonkeyPatch, other: RedisStore, events: Sequence[Event], for_s: float = 0
) -> None:
    """Let the other store append events between read and commit of a store."""

    async def interfere() -> None:
        await other.append("main", events)
        await asyncio.sleep(for_s)

    overtake(monkeypatch, COMMIT.sha, interfere)
