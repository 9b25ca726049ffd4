"""Measure the CPU time of Redis for an event: reading the states of a round, and committing it with new ones.

Each call commits 64 events of random users, as a round of the service does, with states of 4,000 random bytes. The
times are of the whole server, with every write synced. To measure another copy of the code, run this file with that
copy in PYTHONPATH, in turns: ``PYTHONPATH=COPY python -P benchmarks/storage/commit_script.py``.

    python -m benchmarks.storage.commit_script
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from redis import Redis
from rich.console import Console
from uuid_utils import uuid7

from benchmarks.harness.topology import redis_server
from storage.redis.layout.keys import Keyspace, User
from storage.redis.layout.stream_entries import Change, Entry
from storage.redis.scripts.events import COMMIT, commit_arguments
from storage.state.event import Event

USERS = 1_000
PARTITIONS = 64
ROUND = 64
CALLS = 5  # of a turn
TAG = "0011223344556677"

console = Console()


class Committer:
    """Commits rounds of random users' events, each of whom has one state."""

    def __init__(self, redis: Redis, state_bytes: int) -> None:
        self._redis: Any = redis
        self._keys = Keyspace("lisarec", PARTITIONS)
        self._random = random.Random(0)
        self._states = [self._random.randbytes(state_bytes) for _ in range(16)]
        self._heads: dict[User, bytes] = {}
        redis.script_load(COMMIT.text)

    def commit(self) -> None:
        """Read the states of a round's users, and commit one event of each."""
        numbers = self._random.sample(range(USERS), ROUND)
        users = [self._keys.user("main", f"user-{number}") for number in numbers]
        self._redis.mget([key for user in users for key in (user.head, user.state_of_tag(TAG))])
        changes = defaultdict[str, list[Change]](list)
        by_partition = defaultdict[str, list[User]](list)
        for user in users:
            event = Event(str(uuid7()), user.user_id, "item-1", "click", 1_732_613_614_000_000, None)
            states = {user.state_of_tag(TAG): self._random.choice(self._states)}
            head = self._heads.get(user, b"")
            changes[user.partition].append(Change(user.head, user.id_index, head, [Entry.of("main", event)], states))
            by_partition[user.partition].append(user)
        replies = self._redis.execute_command(*COMMIT.command(*commit_arguments(changes, 0)).args)
        for user, reply in zip([one for own in by_partition.values() for one in own], replies, strict=True):
            self._heads[user] = b"%016d" % int(reply.partition(b"-")[0])

    def cpu_us(self) -> float:
        """Return the CPU time that the server has used."""
        cpu = self._redis.info("cpu")
        return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"]) * 1e6


def main(
    turns: Annotated[int, typer.Option(min=1)] = 25,
    state_bytes: Annotated[int, typer.Option(min=1)] = 4_000,
) -> None:
    """Print the least and the median time of an event."""
    with TemporaryDirectory() as directory, redis_server(Path(directory)) as url, closing(Redis.from_url(url)) as redis:
        committer = Committer(redis, state_bytes)
        for _ in range(USERS // ROUND):
            committer.commit()
        found = []
        for _ in range(turns):
            begin_us = committer.cpu_us()
            for _ in range(CALLS):
                committer.commit()
            found.append((committer.cpu_us() - begin_us) / (CALLS * ROUND))
    console.print(f"{statistics.median(found):.1f} µs of Redis's CPU an event, at least {min(found):.1f}")


if __name__ == "__main__":
    typer.run(main)
