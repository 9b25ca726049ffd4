"""Check that the running service is as good as the offline evaluation says.

Replays everything before the last event of some users through ``POST /v1/events``, requests their recommendations, and
ranks the held-out items. HR@10 and NDCG@10 must equal those of ``lisarec evaluate`` for the same users within 0.002;
otherwise the exit status is 1.

    python -m benchmarks.quality.served_equals_offline --data data/ml-1m --model models/ml-1m --exclude-seen all

With ``--replicas 3`` the service is three replicas on one Redis behind HAProxy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from app.jobs.replay import ReplayCounts, histories, replay
from benchmarks.harness.service_process import running_service
from benchmarks.harness.topology import topology
from model.artifact import model_directory
from model.data.interactions import Interactions
from model.data.readers import read_interactions
from model.evaluation.evaluate import evaluate
from model.metrics import metrics

TOLERANCE = 0.002
ASKED_AT_ONCE = 50
METRICS = ("hr_at_10", "ndcg_at_10")

console = Console()


def main(
    data: Annotated[Path, typer.Option(help="Data directory the model was trained on.")],
    model: Annotated[Path, typer.Option(help="Model directory, trained on the split 'loo'.")],
    exclude_seen: Annotated[Literal["none", "recent", "all"], typer.Option(help="The seen rule of both sides.")],
    users: Annotated[int, typer.Option(help="How many users are replayed.")] = 1000,
    replicas: Annotated[int, typer.Option(help="So many on Redis behind HAProxy; 0: one with SQLite.")] = 0,
    url: Annotated[str | None, typer.Option(help="A running service with an empty store; default: start one.")] = None,
) -> None:
    """Compare the metrics of the running service with those of the evaluation."""
    trained = model_directory.load(model)
    report = evaluate([trained], data, "loo_full", exclude_seen)
    interactions = read_interactions(data).stepping(trained.config.event_weights)
    chosen = np.random.default_rng(0).permutation(len(report.users))[:users]
    user_rows, ranks = report.users[chosen], report.ranks[chosen]
    with service(model, replicas, url) as running_url:
        served = serve_ranks(interactions, user_rows.tolist(), running_url, exclude_seen)
    offline, online = metrics(ranks), metrics(served)
    table = Table("", "offline", "served", "difference", title=f"{data.name}, {len(chosen)} users, seen {exclude_seen}")
    for name in METRICS:
        difference = online[name] - offline[name]
        table.add_row(name, f"{offline[name]:.4f}", f"{online[name]:.4f}", f"{difference:+.4f}")
    console.print(table)
    if any(abs(online[name] - offline[name]) > TOLERANCE for name in METRICS):
        console.print(f"[red]the service differs from the evaluation by more than {TOLERANCE}")
        raise typer.Exit(1)


@contextmanager
def service(model: Path, replicas: int, url: str | None) -> Iterator[str]:
    """Yield the URL of a service with an empty store: the given one, or one that runs until the block ends."""
    if url is not None:
        yield url
    elif replicas:
        with topology(model, replicas) as running:
            yield running.url
    else:
        with running_service(model) as own_url:
            yield own_url


def serve_ranks(
    interactions: Interactions, user_rows: Sequence[int], url: str, exclude_seen: str
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the rank of each user's last item among the ten served; 11 if it is not served."""
    wanted = {interactions.user_ids[row] for row in user_rows}
    replayed = [events for events in histories(interactions, hold_out=1) if events[0]["user_id"] in wanted]
    started_s = time.monotonic()
    counts = asyncio.run(replay(replayed, url))
    elapsed_s = time.monotonic() - started_s
    _require_complete(counts, sum(map(len, replayed)))
    console.print(f"{counts.accepted} events accepted in {elapsed_s:.1f} s ({counts.accepted / elapsed_s:.0f}/s)")
    ranks = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for begin in range(0, len(user_rows), ASKED_AT_ONCE):
            ranks += _ask(client, interactions, user_rows[begin : begin + ASKED_AT_ONCE], exclude_seen)
    return np.array(ranks)


def _require_complete(counts: ReplayCounts, events: int) -> None:
    if counts.accepted != events or counts.unknown_items:
        raise RuntimeError(f"of {events} events {counts.accepted} were accepted, {counts.unknown_items} items unknown")


def _ask(client: httpx.Client, interactions: Interactions, user_rows: Sequence[int], exclude_seen: str) -> list[int]:
    requests = [{"user_id": interactions.user_ids[row], "k": 10, "exclude_seen": exclude_seen} for row in user_rows]
    answer = client.post("/v1/recommendations", json={"requests": requests})
    answer.raise_for_status()
    ranks = []
    for row, result in zip(user_rows, answer.json()["results"], strict=True):
        last = interactions.item_ids[interactions.item[interactions.starts[row + 1] - 1]]
        served = [item["item_id"] for item in result["items"]]
        ranks.append(served.index(last) + 1 if last in served else 11)
    return ranks


if __name__ == "__main__":
    typer.run(main)
