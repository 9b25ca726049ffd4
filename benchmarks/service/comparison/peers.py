"""Compare plain recommendations with the service that a user would otherwise write, in turns in one run.

The peer is `sasrec_service.py`: FastAPI, a SASRec in torch and FAISS, with the flat index or HNSW. Both have two
processes, the same number of items, users with the same histories, and a Redis, which the peer reads for each request.
The SASRec has random weights, because its cost does not depend on them; its item vectors are those of the model, sums
of codewords. The recall of HNSW is its share of the flat index's lists. wrk creates the load.

    pip install -e '.[bench]' && python -m benchmarks.service.comparison.peers --model models/ml-1m --items 100000
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import numpy as np
import psutil
import torch
import typer
from numpy.typing import NDArray
from redis import Redis
from rich.console import Console
from rich.table import Table

from app.jobs.loadtest.synthetic_catalogue import write_enlarged
from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import free_port, inherited_environment, running_process
from benchmarks.harness.topology import redis_server
from benchmarks.machine import cpu
from benchmarks.service.comparison.histories import USERS, histories_of, post_histories
from benchmarks.service.comparison.wrk import Answered, cpu_s, require_wrk, send
from model.artifact import model_directory

K = 10
WARM_UP_S = 5  # the second process may start later
WORKERS = 2
ITEMS_PER_CHUNK = 1 << 16
LISAREC, FLAT, HNSW = "lisarec", "SASRec and FAISS, flat", "SASRec and FAISS, HNSW"
INDEX_OF = {FLAT: "flat", HNSW: "hnsw"}
SCRIPT = f"""
request = function()
  return wrk.format("GET", "/v1/users/user-" .. math.random(0, {USERS - 1}) .. "/recommendations")
end
"""

console = Console(width=160)


@dataclass(frozen=True)
class Measured:
    """What one service did in one turn.

    answered  by the number of connections
    cpu_us    of the service's processes for each request, by the number of connections
    pss_mb    proportional set size of all processes, after the load
    lists     the items of each user's list
    """

    answered: Mapping[int, Answered]
    cpu_us: Mapping[int, float]
    pss_mb: float
    lists: Sequence[set[str]]


@dataclass(frozen=True)
class Setup:
    """What every turn serves: a model, and the vectors and indexes of the same number of items."""

    model: Path
    directory: Path
    items: int


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    items: Annotated[int, typer.Option(min=1_000)] = 100_000,
    turns: Annotated[int, typer.Option(min=1, help="Of each service.")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="Of each load in each turn.")] = 5,
    connections: Annotated[list[int], typer.Option(min=1)] = [16, 1],  # noqa: B006, typer copies it
    links: Annotated[int, typer.Option(min=2, help="HNSW's M.")] = 32,
    breadth: Annotated[int, typer.Option(min=1, help="HNSW's efConstruction and efSearch.")] = 128,
) -> None:
    """Print rates, times, CPU time, memory and recall of each service."""
    require_wrk()
    if find_spec("faiss") is None:
        raise SystemExit("FAISS is missing: pip install -e '.[bench]', or pip install faiss-cpu")
    from benchmarks.service.comparison.sasrec_service import VECTORS, build_indexes

    with TemporaryDirectory() as name:
        setup = Setup(Path(name) / "model", Path(name), items)
        write_enlarged(setup.model, model, items, "trained")
        np.save(setup.directory / VECTORS, _item_vectors(setup))
        build_indexes(setup.directory, links, breadth)
        measured: dict[str, list[Measured]] = {LISAREC: [], FLAT: [], HNSW: []}
        for turn in range(turns):
            for service, of_turns in measured.items():
                of_turns.append(found := _measure(service, setup, connections, seconds))
                rates = ", ".join(f"{found.answered[count].requests / seconds:,.0f}/s" for count in connections)
                console.print(f"turn {turn + 1}, {service}: {rates}, {found.pss_mb:,.0f} MB")
    console.print(_table(measured, setup, connections, seconds))
    console.print(f"{cpu()}, two processes; HNSW: M {links}, efConstruction and efSearch {breadth}")


def _item_vectors(setup: Setup) -> NDArray[np.float32]:
    trained = model_directory.load(setup.model).model
    parts = [trained.item_vectors(rows) for rows in torch.arange(setup.items).split(ITEMS_PER_CHUNK)]
    vectors: NDArray[np.float32] = torch.cat(parts).numpy(force=True)
    return vectors


def _measure(service: str, setup: Setup, connections: Sequence[int], seconds: int) -> Measured:
    with _running(service, setup) as (url, process):
        answered, cpu_us = {}, {}
        for count in connections:
            send(url, SCRIPT, count, WARM_UP_S)
            begin_s = cpu_s(process)
            answered[count] = send(url, SCRIPT, count, seconds)
            cpu_us[count] = (cpu_s(process) - begin_s) / answered[count].requests * 1e6
        processes = process, *process.children(recursive=True)
        pss_mb = sum(one.memory_full_info().pss for one in processes) / 1e6
        with httpx.Client(base_url=url) as client:
            lists = [client.get(f"/v1/users/user-{user}/recommendations").json()["items"] for user in range(USERS)]
        return Measured(answered, cpu_us, pss_mb, [{item["item_id"] for item in items} for items in lists])


@contextmanager
def _running(service: str, setup: Setup) -> Iterator[tuple[str, psutil.Process]]:
    """Run a service with an empty Redis, and give each user a history."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with ExitStack() as stack:
        redis_url = stack.enter_context(redis_server(Path(stack.enter_context(TemporaryDirectory()))))
        environment = inherited_environment()
        if service == LISAREC:
            command = ["app", "serve", "--model", str(setup.model), "--redis-url", redis_url]
        else:
            command = ["uvicorn", "--factory", "benchmarks.service.comparison.sasrec_service:create_app"]
            command += ["--log-level", "warning", "--no-access-log"]
            environment |= {"SASREC_DIRECTORY": str(setup.directory), "SASREC_INDEX": INDEX_OF[service]}
            environment |= {"SASREC_REDIS_URL": redis_url}
        command = [sys.executable, "-m", *command, "--port", str(port), "--workers", str(WORKERS)]
        process = stack.enter_context(running_process(command, url, cwd=ROOT, env=environment))
        if service == LISAREC:
            post_histories(url, setup.items)
        else:
            _push_histories(redis_url, setup.items)
        yield url, psutil.Process(process.pid)


def _push_histories(redis_url: str, items: int) -> None:
    from benchmarks.service.comparison.sasrec_service import history_key

    with Redis.from_url(redis_url) as client:
        for user, rows in enumerate(histories_of(items)):
            client.rpush(history_key(f"user-{user}"), *rows)


def _table(measured: Mapping[str, Sequence[Measured]], setup: Setup, connections: Sequence[int], seconds: int) -> Table:
    columns = [f"{column}, {count}" for count in connections for column in ("requests/s", "p50", "p90", "CPU")]
    turns = len(measured[LISAREC])
    title = f"{setup.items:,} items, medians of {turns} turns; times in µs by the number of connections"
    table = Table("", *columns, "MB (PSS)", f"recall@{K}", title=title)
    exact = measured[FLAT][0].lists
    for service, of_turns in measured.items():
        numbers: list[float] = []
        for count in connections:
            answered = [one.answered[count] for one in of_turns]
            numbers += [
                median(one.requests / seconds for one in answered),
                median(one.p50_us for one in answered),
                median(one.p90_us for one in answered),
                median(one.cpu_us[count] for one in of_turns),
            ]
        numbers.append(median(one.pss_mb for one in of_turns))
        recall = recall_of(of_turns[0].lists, exact) if service == HNSW else 1.0  # the other scans are exact
        table.add_row(service, *(f"{number:,.0f}" for number in numbers), f"{recall:.3f}")
    return table


def recall_of(lists: Sequence[set[str]], exact: Sequence[set[str]]) -> float:
    """Return the mean share of the exact lists that the lists contain."""
    return float(np.mean([len(own & best) / len(best) for own, best in zip(lists, exact, strict=True)]))


if __name__ == "__main__":
    typer.run(main)
