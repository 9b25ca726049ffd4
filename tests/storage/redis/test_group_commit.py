"""Group commit: order, overlap and completeness, for random requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from storage.errors import StorageUnavailable
from storage.group_commit import GroupCommit, GroupCommitByNode

MAX_SIZE, MAX_GROUPS = 8, 3


@dataclass(eq=False)
class Numbered:
    """A request with its place among those of its key."""

    key: str
    number: int
    size: int = 1
    answers: list[Exception | None] = field(default_factory=list)

    def fail(self, cause: Exception) -> None:
        self.answers.append(cause)


class Groups:
    """Work that takes a random number of turns, and notes what overlaps.

    repeat_share  of the requests
    """

    def __init__(self, rng: random.Random, repeat_share: float = 0.0) -> None:
        self._rng = rng
        self._repeat_share = repeat_share
        self.running: list[list[Numbered]] = []
        self.most = 0
        self.sizes_beside_others: list[int] = []
        self.answered: list[Numbered] = []
        self.has_repeated = False
        self.begun_after_repeats = 0

    async def work(self, group: list[Numbered]) -> list[Numbered]:
        size = sum(request.size for request in group)
        if self.running:
            self.sizes_beside_others.append(size)
            self.begun_after_repeats += self.has_repeated
            busy = {request.key for other in self.running for request in other}
            assert busy.isdisjoint(request.key for request in group)
        self.running.append(group)
        self.most = max(self.most, len(self.running))
        for _ in range(self._rng.randrange(1, 6)):
            await asyncio.sleep(0)
        self.running.remove(group)
        first_repeated: dict[str, int] = {}
        for request in group:
            if self._rng.random() < self._repeat_share:
                first_repeated.setdefault(request.key, request.number)
        again = [one for one in group if one.number >= first_repeated.get(one.key, one.number + 1)]
        self.has_repeated = bool(again)
        for request in group:
            if request not in again:
                request.answers.append(None)
                self.answered.append(request)
        return again


def random_requests(rng: random.Random, count: int, keys: int) -> list[Numbered]:
    numbers = Counter[str]()
    requests = []
    for _ in range(count):
        key = f"key-{rng.randrange(keys)}"
        requests.append(Numbered(key, numbers[key], rng.randrange(1, 4)))
        numbers[key] += 1
    return requests


async def put_in_bursts(rng: random.Random, commit: GroupCommit[Numbered], requests: list[Numbered]) -> None:
    left = list(requests)
    while left:
        count = rng.choice((1, 2, 40))
        commit.put(left[:count])
        del left[:count]
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    await all_done(commit)


async def all_done(commit: GroupCommit[Numbered]) -> None:
    while commit.tasks:
        await asyncio.wait(commit.tasks)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("repeat_share", [0.0, 0.05])
@pytest.mark.parametrize("keys", [1, 5, 1_000])
def test_each_request_is_answered_once_and_in_the_order_of_its_key(keys: int, repeat_share: float, seed: int) -> None:
    async def law() -> None:
        rng = random.Random(seed)
        groups = Groups(rng, repeat_share)
        commit = GroupCommit(groups.work, max_size=MAX_SIZE, max_groups=MAX_GROUPS)
        requests = random_requests(rng, 400, keys)
        await put_in_bursts(rng, commit, requests)
        assert [one.answers for one in requests] == [[None]] * len(requests)
        by_key: dict[str, list[int]] = {}
        for one in groups.answered:
            by_key.setdefault(one.key, []).append(one.number)
        assert all(numbers == sorted(numbers) for numbers in by_key.values())
        assert (commit.waiting_size, groups.begun_after_repeats) == (0, 0)
        assert all(size >= MAX_SIZE for size in groups.sizes_beside_others)
        assert groups.most <= min(keys, MAX_GROUPS)
        if keys == 1_000 and not repeat_share:
            assert groups.most == MAX_GROUPS

    asyncio.run(law())


@pytest.mark.parametrize("seed", range(10))
def test_rare_keys_keep_their_places_among_requests_of_a_busy_one(seed: int) -> None:
    async def law() -> None:
        rng = random.Random(seed)
        groups = Groups(rng)
        commit = GroupCommit(groups.work, max_size=MAX_SIZE, max_groups=MAX_GROUPS)
        keys = ["busy"] * 200 + [f"rare-{number}" for number in range(MAX_SIZE - 1)]  # which never fill a group
        rng.shuffle(keys)
        requests = [Numbered(key, 0) for key in keys]
        await put_in_bursts(rng, commit, requests)
        assert groups.answered == requests

    asyncio.run(law())


def test_groups_that_are_not_full_wait_for_each_other() -> None:
    async def law() -> None:
        groups = Groups(random.Random(0))
        commit = GroupCommit(groups.work, max_size=MAX_SIZE, max_groups=MAX_GROUPS)
        for number in range(50):
            commit.put([Numbered(f"key-{number}", 0)])
            if number % (MAX_SIZE - 1) == 0:
                await all_done(commit)
        await all_done(commit)
        assert groups.most == 1

    asyncio.run(law())


def test_a_failed_group_fails_alone_unless_the_store_is_unavailable() -> None:
    async def answers(failure: Exception) -> list[bool]:
        async def work(group: list[Numbered]) -> list[Numbered]:
            await asyncio.sleep(0)
            if any(request.number == 0 for request in group):
                raise failure
            for request in group:
                request.answers.append(None)
            return []

        commit = GroupCommit(work, max_size=1, max_groups=1)
        requests = [Numbered("key", number) for number in range(3)]
        commit.put(requests)
        await all_done(commit)
        assert commit.waiting_size == 0
        commit.put([later := Numbered("key", 3)])
        await all_done(commit)
        assert later.answers == [None]
        return [one.answers == [failure] for one in requests]

    assert asyncio.run(answers(ValueError())) == [True, False, False]
    assert asyncio.run(answers(StorageUnavailable("it is down", "timeout"))) == [True, True, True]


def test_closing_waits_for_overlapping_groups() -> None:
    async def law() -> None:
        rng = random.Random(0)
        groups = Groups(rng)
        commits = GroupCommitByNode(groups.work, lambda key: key[-1], max_size=MAX_SIZE, max_groups=MAX_GROUPS)
        requests = random_requests(rng, 400, 1_000)
        commits.put(requests)
        await commits.close()
        assert groups.most > MAX_GROUPS  # each node has its own
        assert [one.answers for one in requests] == [[None]] * len(requests)
        with pytest.raises(StorageUnavailable):
            commits.put(requests[:1])

    asyncio.run(law())
