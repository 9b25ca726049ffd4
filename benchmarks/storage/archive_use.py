"""What an operator does with an archive in a bucket, each step timed: train, rebuild, switch, back up and restore.

`benchmarks.storage.bucket` runs it on the archive that its killed archivers have left.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from app.serving.model_locations import load_model
from app.serving.served_generation import generation_of
from app.settings import StoreSettings
from benchmarks.harness.compose import ROOT
from benchmarks.harness.ledger import same_states
from benchmarks.harness.topology import redis_server
from benchmarks.storage.s3_server import S3Server
from storage.folders.object_folder import ObjectFolder
from storage.folders.place import ObjectUrl
from storage.redis.store import RedisStore
from storage.state.generation import Generation

TRAIN_ON_EVENTS = 200_000
PAGE = 500  # users
MODEL = "next"

console = Console()


def use_archive(
    server: S3Server, archive: ObjectFolder, directory: Path, redis_url: str, events: int, users: int
) -> list[str]:
    """Train on the archive, switch the store to the model, and restore a back-up into another store.

    Prints the seconds of each step, and the events a second. Returns the users whose states in the two stores differ.
    """
    models, model, backup = server.url("models"), server.url(f"models/{MODEL}"), server.url("backups/log.jsonl.gz")
    archived = ["--archive-dir", str(archive)]
    share = min(1.0, TRAIN_ON_EVENTS / events)
    train = ["train", "--data", str(archive), "--out", model, "--epochs", "1", "--users-sample", f"{share:g}"]
    _timed(f"trained one epoch with {share:.0%} of the users", int(events * share), *train)
    _timed("rebuilt", events, "rebuild", "--model", model, "--redis-url", redis_url, *archived)
    _timed("switched", None, "activate", MODEL, "--models-dir", models, "--redis-url", redis_url)
    _timed("backed up", events, "backup", "--redis-url", redis_url, *archived, "--out", backup)
    other = directory / "other"
    other.mkdir()
    with redis_server(other, "--maxmemory", "8gb") as restored_url:  # nothing is archived there
        _timed("restored", events, "restore", backup, "--model", model, "--redis-url", restored_url)
        generation = generation_of(load_model(ObjectUrl(model), StoreSettings()))
        return asyncio.run(_different(redis_url, archive, restored_url, generation, users))


def _timed(what: str, events: int | None, *arguments: str) -> None:
    """Run a command of lisarec; raise CalledProcessError if it fails."""
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "app", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    elapsed_s = time.perf_counter() - begin_s
    rate = "" if events is None else f", {events / elapsed_s:,.0f} events/s"
    console.print(f"{what}: {elapsed_s:,.1f} s{rate}")


async def _different(
    url: str, archive: ObjectFolder, restored_url: str, generation: Generation, users: int
) -> list[str]:
    """Return a line for each user whose states in the two stores differ, or that one store alone has."""
    served = await RedisStore.open(url, [generation], archive_dir=archive)
    restored = await RedisStore.open(restored_url, [generation])
    wrong, seen = [], 0
    for begin in range(0, users, PAGE):
        ids = [f"user-{number}" for number in range(begin, min(begin + PAGE, users))]
        both = [await store.states("main", ids, generation) for store in (served, restored)]
        seen += sum(state is not None for state in both[0])
        wrong += [user_id for user_id, *pair in zip(ids, *both, strict=True) if not _equal(generation, *pair)]
    await served.close()
    await restored.close()
    console.print(
        f"{seen:,} users have states; {len(wrong):,} of them differ between the served and the restored store"
    )
    return [f"the restored state of {user_id} differs" for user_id in wrong] if seen else ["no user has a state"]


def _equal(generation: Generation, one: bytes | None, other: bytes | None) -> bool:
    if one is None or other is None:
        return one is other
    return same_states(generation, [one], [other])
