"""The limit of concurrent requests in a process, and how tenants and keys share it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from app.http.auth.keys import Keyring, add, make
from app.http.middleware.load_shedding import LoadShedding, RequestsInProgress, Source


class TestLimit:
    """The middleware over an app that waits until it is released."""

    SCOPE: Scope = {"type": "http", "path": "/v1/x", "method": "POST", "headers": []}  # noqa: RUF012

    class Bounded:
        def __init__(self, max_in_progress: int, keyring: Keyring | None = None) -> None:
            self._state = {"services": SimpleNamespace(keyring=keyring)}
            self.at_work = self.most_at_work = 0
            self.may_end = asyncio.Event()
            self.body_comes = asyncio.Event()
            self.bound = LoadShedding(self._work, RequestsInProgress(max_in_progress))

        async def _work(self, _scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
            await self.may_end.wait()
            self.at_work -= 1
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def ask(self, *, slowly: bool = False, key: str = "") -> int:
            statuses: list[int] = []

            async def receive() -> Message:
                if slowly:
                    await self.body_comes.wait()
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message: Message) -> None:
                statuses.append(message.get("status", 0))

            headers = [(b"authorization", f"Bearer {key}".encode())]
            await self.bound({**TestLimit.SCOPE, "state": dict(self._state), "headers": headers}, receive, send)
            return statuses[0]

    async def test_limits_concurrent_requests(self) -> None:
        bounded = self.Bounded(3)
        asked = [asyncio.create_task(bounded.ask()) for _ in range(10)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bounded.may_end.set()
        assert sorted(await asyncio.gather(*asked)) == [200] * 3 + [503] * 7
        assert bounded.most_at_work == 3
        assert await bounded.ask() == 200

    async def test_does_not_count_requests_whose_body_is_arriving(self) -> None:
        bounded = self.Bounded(2)
        slow = [asyncio.create_task(bounded.ask(slowly=True)) for _ in range(50)]
        await asyncio.sleep(0)
        quick = [asyncio.create_task(bounded.ask()) for _ in range(2)]
        await asyncio.sleep(0)
        assert bounded.at_work == 2
        bounded.may_end.set()
        assert [await one for one in quick] == [200, 200]
        bounded.body_comes.set()
        await asyncio.gather(*slow, return_exceptions=True)
        assert bounded.most_at_work == 2

    async def test_counts_a_finished_response_once(self) -> None:
        """Responses with files receive and send concurrently."""

        async def respond(_scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            gone = asyncio.ensure_future(receive())
            await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            await gone

        bounded = self.Bounded(1)
        bounded.bound = LoadShedding(respond, RequestsInProgress(1))
        assert [await bounded.ask() for _ in range(3)] == [200] * 3


class TestShares:
    """12 slots, shared by two keys of one tenant and keys of others."""

    MOST = 12
    GREEDY, MODEST, OTHER, THIRD = Source("main", "a"), Source("main", "b"), Source("books", "c"), Source("toys", "d")

    def filled(self, in_progress: RequestsInProgress, source: Source) -> int:
        begun = 0
        while in_progress.has_room(source):
            in_progress.begin(source)
            begun += 1
        return begun

    def test_one_source_gets_everything_until_others_arrive(self) -> None:
        in_progress = RequestsInProgress(self.MOST)
        assert self.filled(in_progress, self.GREEDY) == 12
        assert self.filled(in_progress, self.OTHER) == 6  # two tenants
        assert self.filled(in_progress, self.MODEST) == 3  # two keys of one of two tenants
        assert self.filled(in_progress, self.THIRD) == 4  # three tenants
        assert not any(map(in_progress.has_room, (self.GREEDY, self.OTHER, self.MODEST, self.THIRD)))

    @given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=200))
    def test_a_source_below_its_share_is_always_admitted(self, steps: list[tuple[str, bool]]) -> None:
        in_progress, counts = RequestsInProgress(self.MOST), Counter[str]()
        for key_id, begins in steps:
            source = Source(key_id, key_id)
            if begins and in_progress.has_room(source):
                in_progress.begin(source)
                counts[key_id] += 1
            elif counts[key_id]:
                in_progress.end(source)
                counts[key_id] -= 1
            for other in "abcde":
                sources = sum(counts[one] > 0 for one in "abcde") + (counts[other] == 0)
                expected = counts.total() < self.MOST or counts[other] < self.MOST / sources
                assert in_progress.has_room(Source(other, other)) == expected

    def test_a_busy_key_leaves_other_keys_their_share(self, tmp_path: Path) -> None:
        """With real requests through the middleware."""
        texts = {}
        for name, tenant in (("greedy", "main"), ("modest", "main"), ("other", "books")):
            texts[name], key = make(tenant, ["recs:read"])
            add(tmp_path / "keys", key)

        async def law() -> None:
            bounded = TestLimit.Bounded(self.MOST, Keyring(tmp_path / "keys", ["main", "books"]))
            greedy = [asyncio.create_task(bounded.ask(key=texts["greedy"])) for _ in range(30)]
            await asyncio.sleep(0)
            rest = [asyncio.create_task(bounded.ask(key=texts[name])) for name in ("modest", "other", "greedy")]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            bounded.may_end.set()
            assert sorted(await asyncio.gather(*greedy)) == [200] * self.MOST + [503] * 18
            assert await asyncio.gather(*rest) == [200, 200, 503]

        asyncio.run(law())

    async def test_forged_keys_get_no_share_and_take_none(self, tmp_path: Path) -> None:
        """Otherwise a client that knows or invents key ids could take slots of a valid key."""
        text, key = make("main", ["recs:read"])
        add(tmp_path / "keys", key)
        made_up = [f"lisarec_{key.id}_{n}" for n in range(self.MOST)] + [f"lisarec_{n:012}_x" for n in range(30)]
        bounded = TestLimit.Bounded(self.MOST, Keyring(tmp_path / "keys", ["main", "books"]))
        wrong = [asyncio.create_task(bounded.ask(key=one)) for one in made_up]
        await asyncio.sleep(0)
        right = [asyncio.create_task(bounded.ask(key=text)) for _ in range(self.MOST + 1)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bounded.may_end.set()
        assert sorted(await asyncio.gather(*wrong)) == [200] * self.MOST + [503] * 30
        assert await asyncio.gather(*right) == [200] * self.MOST + [503]
