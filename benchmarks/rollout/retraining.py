"""Run the whole loop as processes: a shop without a model, its events, the archive, the trainer, a new generation.

A service begins without a model. Shoppers of a made-up shop click; an archiver archives; `lisarec retrain` makes the
first generation, killed now and then with kill -9. Then taste changes and it makes a second one. Then the items in
the data of a third round are mixed up, and what is trained on them must be refused. At last an operator goes back to
the first generation and forth again. Meanwhile somebody asks every replica for recommendations without pause. Exit
status 1 where a request fails, a generation does no better than what it replaced on shoppers who were never posted,
or the spoiled one goes live.

    python -m benchmarks.rollout.retraining                   # two replicas on Redis
    python -m benchmarks.rollout.retraining --store sqlite    # one process
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import numpy as np
import polars as pl
import typer
from rich.console import Console
from uuid_utils import uuid7

from app.jobs.datasets.synthetic_shop import generate
from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import END_TIMEOUT_S, free_port, inherited_environment
from benchmarks.harness.topology import redis_server
from model.data.readers import read_interactions
from model.metrics import metrics
from storage.archive.manifest import archived_through_s
from storage.folders.local_folder import LocalFolder

BATCH = 500
START_WITHIN_S = 600.0
FOLLOW_WITHIN_S = 300.0  # usually one second; a busy machine takes longer
K = 10

console = Console()
Visit = list[str]  # the items that one shopper clicked, in order


@dataclass
class LoopSizes:
    """The sizes of a run; the tests use smaller ones."""

    shoppers: int = 1_500  # who click, in each of the two seasons
    test_shoppers: int = 300  # whose visits are not posted, but predicted
    epochs: int = 3
    kills: int = 3  # of the trainer, in each of its first two rounds
    kill_within_s: float = 6.0  # of the beginning of a round


@dataclass
class LoopTally:
    """The outcomes of the requests, and the results of the loop."""

    requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    generations: Counter[str] = field(default_factory=Counter)
    kills: int = 0  # of the trainer, within a round
    findings: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def require(self, holds: bool, fault: str) -> None:
        """Record the fault unless the condition holds."""
        if not holds:
            self.faults.append(fault)


class RetrainingLoop:
    """Runs the processes of one shop, and follows what they do."""

    def __init__(self, directory: Path, store_options: Sequence[str], replicas: int, sizes: LoopSizes) -> None:
        self.tally = LoopTally()
        self._models = directory / "models"
        self._archive = directory / "archive"
        self._store_options = [*store_options, "--models-dir", str(self._models)]
        self._archive_options = [*store_options, "--archive-dir", str(self._archive)]
        self._urls = [f"http://127.0.0.1:{free_port()}" for _ in range(replicas)]
        self._log = directory / "processes.log"
        self._sizes = sizes
        self._is_over = asyncio.Event()
        self._http = httpx.AsyncClient(timeout=60)

    async def run(self, seasons: list[list[Visit]], *, all_seasons: bool = True) -> None:
        """Run all seasons, or just the first; the last visits of each season are the test shoppers'."""
        with ExitStack() as stack:
            for url in self._urls:
                port = url.rpartition(":")[2]
                stack.enter_context(
                    self._process("serve", *self._store_options, "--port", port, *self._archive_dir_options())
                )
            await self._until(self._is_ready, START_WITHIN_S)
            if self._has_archiver:
                stack.enter_context(self._process("archive", *self._archive_options, "--every", "1"))
            requesting = asyncio.create_task(self._request_continuously(seasons))
            try:
                await self._run_first_season(*self._split_test_visits(seasons[0]))
                if all_seasons:
                    await self._run_later_seasons(seasons)
            finally:
                self._is_over.set()
                await requesting
                await self._http.aclose()

    async def _run_first_season(self, posted: list[Visit], test_shoppers: list[Visit]) -> None:
        await self._post("spring", posted)
        popular = await self._ndcg_at_10(test_shoppers)
        await self._retrain_until_served("first", kills=self._sizes.kills)
        first = await self._ndcg_at_10(test_shoppers)
        self.tally.findings["spring"] = {"popular": popular, "first": first}
        self.tally.require(first > popular, "the first generation is no better than popular items")

    async def _run_later_seasons(self, seasons: list[list[Visit]]) -> None:
        posted, test_shoppers = zip(*(self._split_test_visits(visits) for visits in seasons), strict=True)
        tally, findings = self.tally, self.tally.findings
        first = findings["first generation"]["name"]
        await self._post("autumn", posted[1])
        before = await self._ndcg_at_10(test_shoppers[1])
        second = await self._retrain_until_served("second", kills=self._sizes.kills)
        findings["autumn"] = {"first": before, "second": await self._ndcg_at_10(test_shoppers[1])}
        tally.require(findings["autumn"]["second"] > before, "the second generation is no better than the first")

        await self._post("winter", test_shoppers[1])
        await self._begin_spoiled_round()
        outcome = findings["spoiled"] = await self._run_trainer()
        tally.require(outcome["outcome"] == "refused", "what was trained on mixed up items went live")

        for name in (first, second):
            await self._command("activate", name, *self._store_options)
            await self._until(lambda name=name: self._serves(name), FOLLOW_WITHIN_S)  # type: ignore[misc]
        findings["generations"] = [first, second]

    # ---- the parts of the story

    async def _retrain_until_served(self, what: str, kills: int = 0) -> str:
        """Return the name of the generation that a round of the trainer has made, once all replicas serve it."""
        outcome = await self._run_trainer(kills)
        self.tally.findings[f"{what} generation"] = outcome
        if outcome["outcome"] != "activated":
            raise RuntimeError(f"the {what} generation did not come about: {outcome}")
        begin_s = time.monotonic()
        await self._until(lambda: self._serves(outcome["name"]), FOLLOW_WITHIN_S)
        outcome["followed within s"] = round(time.monotonic() - begin_s, 2)
        await self._until(lambda: self._has_personalised(outcome["name"]), FOLLOW_WITHIN_S)
        return str(outcome["name"])

    async def _has_personalised(self, name: str) -> bool:
        return self.tally.generations[f"{name} personalised"] > 0

    async def _run_trainer(self, kills: int = 0) -> dict[str, Any]:
        """Return the outcome of a round that is killed so many times, or fewer if it ends before."""
        await self._wait_for_archive()
        for kill in range(kills):
            with self._process(*self._retrain) as process:
                await self._until(self._has_begun_round, START_WITHIN_S)
                await asyncio.sleep(random.Random(kill).uniform(0, self._sizes.kill_within_s))
                process.kill()
            if not await self._has_begun_round():
                return self._last_outcome()
            self.tally.kills += 1
        await self._command(*self._retrain, allowed_statuses=(0, 3))
        return self._last_outcome()

    def _last_outcome(self) -> dict[str, Any]:
        return dict(json.loads((self._models / "retrain.json").read_text())["last"])

    async def _begin_spoiled_round(self) -> None:
        """A round that was killed, in whose data for training somebody has mixed up the items."""
        await self._wait_for_archive()
        with self._process(*self._retrain) as process:
            await self._until(self._has_begun_round, START_WITHIN_S)
            process.kill()
        for data in ("past", "all"):
            work = self._models / ".retraining" / data
            shutil.rmtree(work / "model", ignore_errors=True)
            table = pl.read_parquet(work / "data" / "interactions.parquet")
            mixed_up = table.with_columns(pl.col("item_id").shuffle(seed=5))
            mixed_up.write_parquet(work / "data" / "interactions.parquet")

    async def _has_begun_round(self) -> bool:
        return (self._models / ".retraining" / "round.json").exists()

    async def _ndcg_at_10(self, visits: Sequence[Visit]) -> float:
        """NDCG@10 over HTTP: the last item of each visit, asked for with those before it as a history."""
        ranks = []
        for begin in range(0, len(visits), 100):
            batch = visits[begin : begin + 100]
            requests = [{"history": visit[:-1], "k": K, "exclude_seen": "none"} for visit in batch]
            answer = await self._request("POST", self._urls[0], "/v1/recommendations", json={"requests": requests})
            for visit, result in zip(batch, answer["results"], strict=True):
                found = [item["item_id"] for item in result["items"]]
                ranks.append(found.index(visit[-1]) + 1 if visit[-1] in found else K + 41)
        return round(metrics(np.array(ranks))["ndcg_at_10"], 4)

    def _split_test_visits(self, visits: list[Visit]) -> tuple[list[Visit], list[Visit]]:
        return visits[: -self._sizes.test_shoppers], visits[-self._sizes.test_shoppers :]

    async def _post(self, season: str, visits: Sequence[Visit]) -> None:
        # all shoppers are about at the same time, each at his or her own pace
        rng = random.Random(len(visits))
        moments = [sorted(rng.random() for _ in visit) for visit in visits]
        clicks = sorted(
            (moment, f"{season.replace(' ', '-')}-{number}", item)
            for number, visit in enumerate(visits)
            for moment, item in zip(moments[number], visit, strict=True)
        )
        events = [{"event_id": str(uuid7()), "user_id": user_id, "item_id": item} for _, user_id, item in clicks]
        for begin in range(0, len(events), BATCH):
            batch = events[begin : begin + BATCH]
            answer = await self._request("POST", random.choice(self._urls), "/v1/events", json=batch)
            self.tally.require(answer.get("accepted") == len(batch), f"{season}: {len(batch)} events, {answer}")

    async def _request_continuously(self, seasons: list[list[Visit]]) -> None:
        rng = random.Random(1)
        while not self._is_over.is_set():
            user = f"{rng.choice(('spring', 'autumn'))}-{rng.randrange(len(seasons[0]))}"
            answer = await self._request("GET", rng.choice(self._urls), f"/v1/users/{user}/recommendations")
            if answer:
                self.tally.generations[f"{answer['generation']} {answer['source']}"] += 1
            await asyncio.sleep(0.03)

    # ---- processes and requests

    async def _wait_for_archive(self) -> None:
        if self._has_archiver:
            posted_by_s = time.time()

            async def is_archived() -> bool:
                return (archived_through_s(LocalFolder(self._archive)) or 0.0) > posted_by_s

            await self._until(is_archived, START_WITHIN_S)
        else:
            await self._command("archive", *self._archive_options, "--once")

    @property
    def _retrain(self) -> list[str]:
        options = ["--no-warm", "--min-events", "500", "--epochs", str(self._sizes.epochs)]
        return ["retrain", *self._archive_options, "--models-dir", str(self._models), *options]

    @property
    def _has_archiver(self) -> bool:
        """Whether an archiver runs continuously, as Redis needs; SQLite's log is archived on demand."""
        return "--redis-url" in self._store_options

    def _archive_dir_options(self) -> list[str]:
        return ["--archive-dir", str(self._archive)] if self._has_archiver else []

    async def _request(self, method: str, url: str, path: str, **options: Any) -> Any:
        self.tally.requests += 1
        try:
            answer = await self._http.request(method, url + path, **options)
        except httpx.HTTPError as exc:
            self.tally.failures[repr(exc)] += 1
            return {}
        if answer.status_code != httpx.codes.OK:
            self.tally.failures[f"{answer.status_code} {answer.text[:200]}"] += 1
            return {}
        return answer.json()

    async def _is_ready(self) -> bool:
        statuses = [await self._http_status(f"{url}/readyz") for url in self._urls]
        return all(status == httpx.codes.OK for status in statuses)

    async def _http_status(self, url: str) -> int:
        try:
            return (await self._http.get(url)).status_code
        except httpx.HTTPError:
            return 0

    async def _serves(self, name: str) -> bool:
        models = [await self._request("GET", url, "/v1/model") for url in self._urls]
        return all(model.get("generation") == name for model in models)

    async def _until(self, condition: Callable[[], Any], within_s: float) -> None:
        give_up_at_s = time.monotonic() + within_s
        while not await condition():
            if time.monotonic() > give_up_at_s:
                raise RuntimeError(f"waited for {within_s:g} s in vain; {self._log.read_text()[-2000:]}")
            await asyncio.sleep(0.05)

    async def _command(self, *arguments: str, allowed_statuses: Sequence[int] = (0,)) -> None:
        with self._process(*arguments) as process:
            status = await asyncio.to_thread(process.wait)
        if status not in allowed_statuses:
            raise RuntimeError(f"{arguments[0]} ended with {status}: {self._log.read_text()[-2000:]}")

    @contextmanager
    def _process(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = inherited_environment() | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "app", *arguments], cwd=ROOT, stdout=log, stderr=log, env=environment
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(timeout=END_TIMEOUT_S)


def seasons_of(directory: Path, sizes: LoopSizes) -> list[list[Visit]]:
    """Return the visits of two seasons; in the second, every item has taken the place of another one."""
    rng = np.random.default_rng(3)
    seasons = []
    for season in range(2):
        place = directory / f"season-{season}"
        place.mkdir()
        generate(place, shoppers=sizes.shoppers + sizes.test_shoppers, seed=season)
        table = read_interactions(place)
        names = np.array(table.item_ids)
        items = names if season == 0 else rng.permutation(names)
        visits = [
            items[table.item[begin:end]].tolist() for begin, end in zip(table.starts, table.starts[1:], strict=False)
        ]
        seasons.append([visit for visit in visits if len(visit) > 1])
    return seasons


def measure(store: str, sizes: LoopSizes, *, all_seasons: bool = True) -> LoopTally:
    """Run the loop on an empty store of that kind."""
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        directory = Path(scratch)
        if store == "redis":
            options = ["--redis-url", stack.enter_context(redis_server(directory))]
        else:
            options = ["--data-dir", str(directory / "state")]
        loop = RetrainingLoop(directory, options, 2 if store == "redis" and all_seasons else 1, sizes)
        asyncio.run(loop.run(seasons_of(directory, sizes), all_seasons=all_seasons))
        loop.tally.require(not loop.tally.failures, "requests failed")
        return loop.tally


def main(
    store: Annotated[str, typer.Option(help="redis or sqlite.")] = "redis",
    shoppers: Annotated[int, typer.Option(min=100, help="Of each season.")] = 1_500,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Run the whole loop and print what it found."""
    tally = measure(store, LoopSizes(shoppers=shoppers, epochs=epochs))
    console.print_json(data=tally.findings)
    console.print(f"{tally.requests:,} requests, {tally.failures.total()} failed {dict(tally.failures) or ''}")
    console.print(f"the trainer was killed {tally.kills} times within a round")
    console.print(f"answers: {dict(tally.generations)}")
    for fault in tally.faults:
        console.print(f"fault: {fault}", style="red")
    raise typer.Exit(1 if tally.faults else 0)


if __name__ == "__main__":
    typer.run(main)
