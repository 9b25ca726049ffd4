"""Screen many ideas on one device within a deadline, on validation events alone; no test event is read.

Each job is one training in its own process. It writes its result as a line of ``results.jsonl`` as soon as it has one;
``ranks.npz`` has the ranks of its validation users, up to 11. Students wait for their teachers. After the deadline no
job starts, and running ones end with the epochs that they have.

    python -m benchmarks.quality.training.screening.screen run --data $LISAREC_DATA --out runs/screen --device cuda \\
        --until $(($(date +%s) + 420)) --processes 12
    python -m benchmarks.quality.training.screening.screen show --out runs/screen

The second command prints each idea beside the preset of the same table and seeds, with paired intervals over users.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import pickle
import re
import time
import traceback
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table as TextTable

from benchmarks.quality.training.screening.ideas import Idea
from benchmarks.quality.training.screening.resident import AVERAGE_DECAYS, Average, Training
from benchmarks.quality.training.screening.tables import DENSE_ITEMS, read_table, states, stored_table
from model.metrics import gains, mean_interval_95

RESULTS, RANKS = "results.jsonl", "ranks.npz"
STOP_BEFORE_S, LAST_START_S, POLL_S = 12, 60, 0.3
BIG = "lisa-recent,free,hops=1,twice,recent_items=64,width=192"
PREPARE = "prepare"

app = typer.Typer()
context = multiprocessing.get_context("spawn")  # reading a table has threads, whose locks a fork would inherit


class Job(NamedTuple):
    """A training.

    is_teacher  its scores are kept for students
    averages    also judge averages of its weights
    is_rare     also try lifts and biases for rare items
    """

    table: str
    text: str
    seed: int = 0
    is_teacher: bool = False
    averages: bool = False
    is_rare: bool = False

    @property
    def key(self) -> str:
        """The name of its result."""
        return f"{self.table}|{self.text}|{self.seed}"

    @property
    def teachers(self) -> list[Job]:
        """The jobs that it waits for."""
        if self.text == PREPARE:
            return []
        name = Idea.of(self.text).extras.teacher
        return [Job(self.table, text, seed) for text, seed in TEACHERS[name]] if name else []

    def file(self, work: Path, suffix: str) -> Path:
        """Return a path for this job."""
        return work / (quote(self.key, safe="") + suffix)


_SIX = [(preset, seed) for seed in range(3) for preset in ("lisa-recent", "lisa-mini")]
TEACHERS: dict[str, list[tuple[str, int]]] = {
    "six": _SIX,
    "eight": [*_SIX, (BIG, 0), (BIG, 1)],
    "big": [(BIG, 0), (BIG, 1)],
    "pair": [("lisa-recent", 0), ("lisa-mini", 0)],
    "free": [("lisa-recent,free", 0), ("lisa-mini,free", 0)],
}


def plan() -> list[Job]:
    """Return all jobs, the most valuable ones first."""
    ml = "ml-1m"
    jobs = [Job(table, PREPARE) for table in (ml, "completejourney", "beauty", "online-retail")]
    jobs += [Job(ml, text, seed, is_teacher=True, averages=seed == 0) for text, seed in _SIX]
    jobs += [Job(ml, BIG, 0, is_teacher=True), Job(ml, BIG, 1, is_teacher=True)]
    jobs += [Job(ml, text) for text in ("lisa-recent,mix=2", "lisa-mini,mix=2", "lisa-recent,twice,recent_items=64")]
    six = ["lisa-mini,teacher=six", "lisa-recent,teacher=six"]
    jobs += [Job(ml, text) for text in ("average,teacher=six", *six)]
    jobs += [Job(ml, f"{text},temperature=2") for text in six]
    jobs += [Job(ml, text) for text in ("average,teacher=big", "average,teacher=eight")]
    jobs += [Job(ml, text, seed) for text in six for seed in (1, 2)]
    retail, beauty, journey = "online-retail", "beauty", "completejourney"
    jobs += [Job(retail, text, 0, is_teacher=True, averages=True) for text in ("lisa-recent", "lisa-mini")]
    jobs += [Job(retail, text) for text in ("lisa-recent,gaps,clock", "lisa-recent,gaps", "lisa-mini,clock")]
    jobs += [Job(ml, text) for text in ("lisa-recent,teacher=eight", "lisa-mini,teacher=eight,weight=0.9")]
    jobs += [Job(beauty, "lisa-mini", is_teacher=True, averages=True, is_rare=True)]
    jobs += [Job(beauty, text, 0, is_teacher=True) for text in ("lisa-recent", "lisa-mini,free", "lisa-recent,free")]
    jobs += [Job(ml, "lisa-recent,width=192"), Job(ml, "lisa-recent,mix=4"), Job(ml, "lisa-recent,mix=2,combine=max")]
    jobs += [Job(retail, text) for text in ("lisa-mini,teacher=pair", "lisa-recent,mix=2", "lisa-recent,free")]
    jobs += [Job(beauty, text) for text in ("lisa-mini,teacher=free", "lisa-mini,teacher=pair")]
    jobs += [Job(ml, text) for text in ("lisa-recent,epochs=10,dropout=0.3", "lisa-recent,smoothing=0.1")]
    jobs += [Job(journey, text) for text in ("lisa-mini", "lisa-recent", "lisa-recent,gaps,clock", "lisa-mini,clock")]
    jobs += [Job(ml, "lisa-recent,floor=0.2", averages=True), Job(ml, "lisa-recent,free")]
    jobs += [Job(ml, "lisa-mini,history_codewords=64"), Job(ml, "lisa-mini,decay_rates=0.01/0.06/0.3/1.2")]
    jobs += [Job(ml, "lisa-recent,twice,recent_items=64", seed) for seed in (1, 2)]
    jobs += [Job(ml, "lisa-recent,mix=2", seed) for seed in (1, 2)]
    jobs += [Job(beauty, "lisa-mini,mix=2")]
    jobs += [Job(ml, "lisa-recent,width=256"), Job(ml, "lisa-recent,epochs=14,dropout=0.3")]
    return jobs


class Place(NamedTuple):
    """Where a screening reads and writes, and its limits."""

    data: Path
    out: Path
    work: Path
    device: str
    epochs: int
    users: int | None
    stop_at: float


def work(job: Job, place: Place) -> None:
    """Do a job in a process of its own."""
    begin = time.time()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")

    def emit(suffix: str, numbers: dict[str, Any], ranks: NDArray[np.int64] | None) -> None:
        about = {"table": job.table, "idea": job.text + suffix, "seed": job.seed, **numbers}
        if ranks is not None:
            named = job._replace(text=job.text + suffix)
            part = named.file(place.work, ".ranks")
            with part.open("wb") as file:
                np.savez(file, key=named.key, ranks=np.minimum(ranks, 11).astype(np.uint8))
            part.replace(part.with_suffix(".npz"))
        _append(place.out / RESULTS, about)
        line = {name: about[name] for name in ("ndcg_at_10", "hr_at_10", "by_epoch", "seconds") if name in about}
        print(f"{job.key}{suffix}: {line}", flush=True)

    try:
        if job.text == PREPARE:
            _prepare(job, place)
            emit("", {"seconds": round(time.time() - begin, 1)}, None)
            return
        _train(job, place, begin, emit)
    except BaseException:
        emit(",failed", {"error": traceback.format_exc()[-3000:], "seconds": round(time.time() - begin, 1)}, None)
        raise


def _prepare(job: Job, place: Place) -> None:
    """Count a table once for all of its trainings, and compile what these call."""
    table = read_table(place.data / job.table, place.users)
    shape, training = Idea.of("lisa-mini").settings(1)
    codes = table.codes(shape, job.seed).history.codes
    table.followers(shape.followers, training.lift_count_decay)
    few = table.histories[:2]
    states(few, None, few.starts[1:] - 1, codes, shape, torch.device("cpu"))
    if table.items > DENSE_ITEMS:
        table = table._replace(association=None)  # large, and all trainings have the codes above
    part = place.work / f"{job.table}.part"
    part.write_bytes(pickle.dumps(table))
    part.replace(place.work / f"{job.table}.pickle")


def _train(job: Job, place: Place, begin: float, emit: Any) -> None:
    table, idea = stored_table(place.work / f"{job.table}.pickle"), Idea.of(job.text)
    teachers = [path for one in job.teachers if (path := one.file(place.work, ".pt")).exists()]
    if job.teachers and not teachers:
        raise RuntimeError("no teacher was trained")
    training = Training(table, idea, job.seed, place.epochs, place.device, teachers)
    if idea.is_average:
        judged = training.average()
        emit("", judged.numbers(training.targets) | {"teachers": len(teachers)}, judged.ranks)
        return
    averages = [Average(training.model, decay) for decay in AVERAGE_DECAYS] if job.averages else []
    started_after_s = round(time.time() - begin, 1)
    best = training.fit(
        place.stop_at, averages, lambda suffix, about, ranks: emit(suffix, about | {"setup_s": started_after_s}, ranks)
    )
    if best is None or best.served is None:
        return
    if job.is_teacher:
        training.save(best.served, job.file(place.work, ".pt"))
    if job.is_rare:
        for suffix, judged in training.rare(best.served, best.lift):
            emit(suffix, judged.numbers(training.targets), judged.ranks)


def _append(path: Path, about: dict[str, Any]) -> None:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(about) + "\n")


def _pack(place: Place) -> None:
    """Write all ranks into one file."""
    found = [np.load(path) for path in sorted(place.work.glob("*.npz"))]
    packed = {str(one["key"]): one["ranks"] for one in found}
    part = place.work / "packed"
    with part.open("wb") as file:
        np.savez_compressed(file, **packed)
    (place.out / RANKS).write_bytes(part.read_bytes())


@app.command()
def run(  # noqa: PLR0913 (a command of many options)
    data: Annotated[Path, typer.Option(help="The folder of data directories.")],
    out: Annotated[Path, typer.Option(help="Where results are written.")],
    until: Annotated[float, typer.Option(help="The time, in seconds since 1970, at which nothing runs any more.")],
    work_dir: Annotated[Path, typer.Option(help="Where teachers and ranks are kept.")] = Path("work"),
    device: str = "cpu",
    processes: int = 12,
    epochs: int = 7,
    users: Annotated[int | None, typer.Option(help="Take the first users of each table alone.")] = None,
    only: Annotated[str, typer.Option(help="A regular expression that jobs' names match.")] = "",
    show_plan: bool = False,
) -> None:
    """Run all jobs, the most valuable ones first."""
    jobs = [job for job in plan() if re.search(only, job.key) and (data / job.table).exists()]
    keys = [job.key for job in jobs]
    assert len(set(keys)) == len(keys), "a job is planned twice"
    if show_plan:
        print("\n".join(keys))
        return
    out.mkdir(parents=True, exist_ok=True)
    work_dir.mkdir(parents=True, exist_ok=True)
    place = Place(data, out, work_dir, device, epochs, users, until - STOP_BEFORE_S)
    begin, running, finished = time.time(), dict[str, tuple[Job, Any]](), set[str]()
    print(f"{len(jobs)} jobs, {until - begin:.0f} s left", flush=True)
    while jobs or running:
        ended = [key for key, (_, process) in running.items() if not process.is_alive()]
        for key in ended:
            _, process = running.pop(key)
            finished.add(key)
            if process.exitcode:
                print(f"{key} ended with {process.exitcode}", flush=True)
        if ended:
            _pack(place)
        left = until - time.time()
        if left < LAST_START_S:
            jobs = [job for job in jobs if job.text.startswith("average") and left > STOP_BEFORE_S + 5]
        if left < 0:
            break
        planned = {job.key for job in jobs} | running.keys()
        for job in list(jobs):
            if len(running) >= processes:
                break
            waits = {one.key for one in job.teachers if not one.file(work_dir, ".pt").exists()}
            if (waits | {Job(job.table, PREPARE).key}) & (planned - {job.key}):
                continue
            jobs.remove(job)
            process = context.Process(target=work, args=(job, place))
            process.start()
            running[job.key] = job, process
        time.sleep(POLL_S)
    for _, process in running.values():
        process.terminate()
    _pack(place)
    for _, process in running.values():
        process.join(1)
        process.kill()
    print(f"{len(finished)} jobs ended, {len(running)} were stopped, {len(jobs)} not started", flush=True)


@app.command()
def show(out: Annotated[Path, typer.Option(help="Where results were written.")]) -> None:
    """Print each idea beside the preset that it changes, over the seeds that both have."""
    lines = [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]
    with np.load(out / RANKS) as stored:
        ranks = {key: stored[key].astype(np.int64) for key in stored.files}
    columns = ("table", "idea", "seeds", "HR@10", "NDCG@10", "minus the preset: HR@10", "NDCG@10", "without lift")
    found = TextTable(*columns, "epochs", "NDCG@10 by epoch", "HR@10 by training events", box=box.MARKDOWN)
    by_idea: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for line in lines:
        by_idea.setdefault((line["table"], line["idea"]), {})[line["seed"]] = line
    for (table, idea), by_seed in sorted(by_idea.items()):
        failed = [line["error"].strip().splitlines()[-1] for line in by_seed.values() if "error" in line]
        own = {seed: ranks[key] for seed in by_seed if (key := f"{table}|{idea}|{seed}") in ranks}
        if not own:
            found.add_row(table, idea, ",".join(map(str, by_seed)), *failed)
            continue
        preset = idea.split(",")[0].replace("average", "lisa-recent")
        preset += ",without-lift" if idea.endswith(",without-lift") else ""
        margins = []
        for metric in ("hr_at_10", "ndcg_at_10"):
            pairs = [
                (gains(mine, metric), gains(ranks[key], metric))
                for seed, mine in own.items()
                if (key := f"{table}|{preset}|{seed}") in ranks
            ]
            by_user = np.mean([mine - other for mine, other in pairs], axis=0) if pairs else np.zeros(1)
            low, high = mean_interval_95(np.round(by_user, 9))
            margins.append(f"{by_user.mean():+.4f} ({low:+.4f} to {high:+.4f})" if pairs and idea != preset else "")
        means = [
            f"{np.mean([gains(one, metric).mean() for one in own.values()]):.4f}"
            for metric in ("hr_at_10", "ndcg_at_10")
        ]
        rows = [by_seed[seed] for seed in own]
        plain = f"{np.mean([row.get('ndcg_without_lift', np.nan) for row in rows]):.4f}"
        epochs = "; ".join(str(row.get("epochs", "")) for row in rows)
        curves = "; ".join(" ".join(f"{one:.4f}" for one in row.get("by_epoch", [])) for row in rows[:1])
        buckets = " ".join(f"{name}: {value[0]:.3f}" for name, value in rows[0].get("hr_by_training_count", {}).items())
        found.add_row(table, idea, ",".join(map(str, own)), *means, *margins, plain, epochs, curves, buckets)
    Console(width=400).print(found, soft_wrap=True)


if __name__ == "__main__":
    app()
