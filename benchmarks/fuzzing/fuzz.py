"""Check that no input breaks the service: requests by and against its OpenAPI document, and malformed ones.

Each store is fuzzed with keys and without. schemathesis sends what /openapi.json says, with all its checks. Over plain
sockets, directly and through the load balancer, go malformed variants of the same calls. Exit status 1 where a
request is answered with 5xx, or not within 20 s, an error has more than 4 kB or another shape, a process ends, keeps
connections open or writes a traceback, or a number that is not finite is stored. Model directories that nobody has
written are tests/model/artifact/test_model_directory_fuzz.py.

    python -m benchmarks.fuzzing.fuzz --model models/ml-1m --cases 100000
    python -m benchmarks.fuzzing.fuzz --model models/ml-1m --cases 20000 --store redis --keys --seed 7    # a part of it
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, get_args

import httpx
import typer
from rich.console import Console

from app.http.auth.keys import SCOPES, add, make
from app.http.auth.seal_keys import rotate
from benchmarks.fuzzing.malformed_requests import MalformedCase, ServiceCall, calls_of, malformed_cases
from benchmarks.fuzzing.schemathesis_checks import MAX_ERROR_BYTES
from benchmarks.harness.compose import ROOT
from benchmarks.harness.topology import MEMORY, Topology, topology
from storage.state.record_encoding import from_json

Store = Literal["sqlite", "redis"]

CONFIG = ROOT / "benchmarks" / "fuzzing" / "schemathesis.toml"
ANSWER_WITHIN_S = 20.0  # the load balancer gives a request 15 s to arrive
HALF_CLOSE_AFTER_S = 0.05
CONNECTIONS = 48  # fewer than the requests that a process works on at a time
PHASES = "examples,coverage,fuzzing,stateful"
EXAMPLES = (5, 10, 25, 50, 100, 200, 400)  # of schemathesis, for each operation and phase
EXTRA_FILES = 20
MAX_PRINTED_FAULTS = 10
# Short, so that cases which wait for the service to lose patience are no longer waited for than needed.
SHORT_TIMEOUTS = {"LISAREC_HEAD_TIMEOUT_S": "1", "LISAREC_BODY_TIMEOUT_S": "1", "LISAREC_DRAIN_S": "0"}
WAITING_SHARE = {"service": 0.05, "balancer": 0.01}
ANSWER = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?\r\n")

console = Console(width=150)


@dataclass
class Findings:
    """The cases sent to one service, its responses by status, and the faults found."""

    cases: int = 0
    answers: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class FuzzTarget:
    """A running service, and how to reach it.

    logged_before  how long the load balancer's log was when the service was ready
    """

    running: Topology
    key: str | None
    store_options: list[str]
    logged_before: int

    @property
    def url(self) -> str:
        """Return the URL of the replica itself."""
        return f"http://{self.running.replicas[0].address}:{self.running.replica_port}"

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def calls(self) -> list[ServiceCall]:
        """Return every call of the OpenAPI document."""
        lines = tuple(f"{name}: {value}".encode() for name, value in self.headers.items())
        return calls_of(httpx.get(f"{self.url}/openapi.json").json(), lines)

    def number(self, metric: str) -> float:
        """Return the sum of a metric over all labels, as the replica reports it."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers).text
        return sum(float(value) for value in re.findall(rf"^{metric}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


@contextmanager
def fuzz_target(model: Path, store: Store, *, with_keys: bool) -> Iterator[FuzzTarget]:
    """Run the service behind a load balancer, with short timeouts and an empty store.

    The store is in memory where it can be: on a disk that stalls for a second, a 503 is what should come.
    """
    with TemporaryDirectory(prefix="lisarec-fuzz-") as directory:
        rotate(Path(directory) / "seal_keys")
        environment, key = SHORT_TIMEOUTS | {"LISAREC_SEAL_KEYS_FILE": str(Path(directory) / "seal_keys")}, None
        if with_keys:
            key, line = make("main", SCOPES)
            add(Path(directory) / "keys", line)
            environment["LISAREC_KEYS_FILE"] = str(Path(directory) / "keys")
        with topology(model, 1, redis=store == "redis", environment=environment, parent=MEMORY) as running:
            yield FuzzTarget(running, key, list(running.store_options), len(running.balancer_log()))


def fuzz(service: FuzzTarget, count: int, seed: int) -> Findings:
    """Send an eighth of the cases through schemathesis; the rest are malformed, half via the load balancer."""
    findings = Findings()
    files_before = service.number("process_open_fds")
    calls = service.calls()
    for name, url in (("service", service.url), ("balancer", service.running.url)):
        of_seed = malformed_cases(calls, count * 7 // 16, seed, WAITING_SHARE[name])
        asyncio.run(send_all(url, list(of_seed), findings, name))
    run_schemathesis(service, count - findings.cases, seed, findings)
    check_service_afterwards(service, files_before, findings)
    return findings


# ---- malformed requests


async def send_all(url: str, cases: list[MalformedCase], findings: Findings, name: str) -> None:
    """Send the cases over many connections at a time and judge the answers."""
    place = httpx.URL(url)
    remaining = iter(cases)

    async def client() -> None:
        for case in remaining:
            answered = await send(place.host, place.port or 80, case)
            findings.cases += 1
            check_responses(answered, findings, f"{name}: {b''.join(case.pieces)[:300]!r}, {case.end}")

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(client())


async def send(host: str, port: int, case: MalformedCase) -> bytes | None:
    """Return the bytes until the service closes or waits for more requests; None if it hangs."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return None
    answered = b""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            for piece in case.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if case.end == "reset":
                writer.transport.abort()
                return b""
            if case.end == "half-close":
                with suppress(TimeoutError):
                    async with asyncio.timeout(HALF_CLOSE_AFTER_S):
                        answered = await reader.read(1 << 16)
                writer.write_eof()
            while received := await reader.read(1 << 16):
                answered += received
                if case.end == "wait" and ANSWER.match(answered):
                    break
    except TimeoutError:
        return None
    except OSError:
        pass  # it has hung up
    finally:
        writer.transport.abort()
    return answered


def check_responses(answered: bytes | None, findings: Findings, request: str) -> None:
    """Add the faults in the responses of one connection."""
    if answered is None:
        findings.faults[f"no answer within {ANSWER_WITHIN_S:g} s to {request}"] += 1
        return
    if answered and ANSWER.match(answered) is None:
        findings.faults[f"not HTTP: {answered[:100]!r} to {request}"] += 1
    heads = list(ANSWER.finditer(answered))
    ends = [*(head.start() for head in heads[1:]), len(answered)]
    for head, end in zip(heads, ends, strict=False):
        status = int(head[1])
        findings.answers[status] += 1
        body = answered[head.start() : end].partition(b"\r\n\r\n")[2]
        if status >= 500:
            findings.faults[f"{status} {body[:120]!r} to {request}"] += 1
        if status >= 400 and len(body) > MAX_ERROR_BYTES:
            findings.faults[f"an error of {len(body):,} bytes to {request}"] += 1


# ---- what the description says


def run_schemathesis(service: FuzzTarget, count: int, seed: int, findings: Findings, phases: str = PHASES) -> None:
    """Run schemathesis repeatedly, with more examples each time, until it has sent this many cases."""
    sent_cases = 0
    for turn in range(10_000):
        if sent_cases >= count:
            break
        with TemporaryDirectory(prefix="lisarec-fuzz-") as directory:
            examples = EXAMPLES[min(turn, len(EXAMPLES) - 1)]
            command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"]
            command += [f"{service.url}/openapi.json", "--checks", "all", "--max-examples", str(examples)]
            command += [
                "--phases",
                phases,
                "--seed",
                str(seed + turn),
                "--request-timeout",
                str(ANSWER_WITHIN_S),
                "--no-color",
            ]
            command += [word for name, value in service.headers.items() for word in ("-H", f"{name}: {value}")]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
        generated = re.search(r"(\d[\d,]*) generated", done.stdout)
        if generated is None:
            raise RuntimeError(f"schemathesis did not run: {done.stdout[-2_000:]}{done.stderr[-2_000:]}")
        sent_cases += int(generated[1].replace(",", ""))
        if done.returncode != 0:
            findings.faults[f"schemathesis, seed {seed + turn}: {failures_reported(done.stdout)}"] += 1
    findings.cases += sent_cases


def failures_reported(output: str) -> str:
    """Return the sections about errors and failures in schemathesis' output."""
    begin = re.search("(ERRORS|FAILURES) =", output)
    reported = output[begin.start() : output.find("SUMMARY =")] if begin else output
    return re.sub(r"\n\n+", "\n", reported)[:6_000]


# ---- afterwards


def check_service_afterwards(service: FuzzTarget, files_before: float, findings: Findings) -> None:
    """Add faults of processes, logs and store after all requests."""
    replica = service.running.replicas[0]
    if replica.process.poll() is not None:
        findings.faults[
            f"the service ended with {replica.process.returncode}: {service.running.replica_logs()[-500:]}"
        ] += 1
        return
    if "Traceback" in service.running.replica_logs():
        log = service.running.replica_logs()
        findings.faults[f"a traceback in the log: {log[log.find('Traceback') :][:3_000]}"] += 1
    with httpx.Client(base_url=service.running.url, headers=service.headers, timeout=ANSWER_WITHIN_S) as client:
        event = {"event_id": "after", "user_id": "after", "item_id": "item"}
        if not client.post("/v1/events", json=event).is_success:
            findings.faults["an event that is as it should be is no longer taken"] += 1
    text = httpx.get(f"{service.url}/metrics", headers=service.headers).text
    for failed in re.findall(r'^lisarec_request_seconds_count\{.*status="5.."\} .*$', text, re.MULTILINE):
        findings.faults[f"the service counts {failed}"] += 1
    for failed in failures_logged(service.running.balancer_log()[service.logged_before :]):
        findings.faults[f"the load balancer logs {failed}"] += 1
    give_up_at_s = time.monotonic() + ANSWER_WITHIN_S
    while (files := service.number("process_open_fds")) > files_before + EXTRA_FILES:
        if time.monotonic() > give_up_at_s:
            findings.faults[f"{files:g} files are open, {files_before:g} were at the beginning"] += 1
            break
        time.sleep(0.5)
    check_stored_numbers(service, findings)


def failures_logged(log: str) -> list[str]:
    """Return log lines of the load balancer with 5xx, except for clients that had disconnected.

    It notes 503 where a client leaves before a replica has taken the request.
    """
    return [line for line in log.splitlines() if re.search(r" 5\d\d \d+ [^C\s]\S{3} ", line)]


def check_stored_numbers(service: FuzzTarget, findings: Findings) -> None:
    """Add every non-finite number in log and states."""
    with TemporaryDirectory(prefix="lisarec-fuzz-") as directory:
        out = Path(directory) / "log.jsonl.gz"
        command = [sys.executable, "-m", "app", "backup", "--out", str(out), *service.store_options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            findings.faults[f"the log cannot be read back: {done.stderr[-500:]}"] += 1
            return
        with gzip.open(out, "rt", encoding="utf-8") as lines:
            log = [json.loads(line) for line in lines]
    for odd in (one for line in log for one in json_leaves(line) if isinstance(one, float) and not math.isfinite(one)):
        findings.faults[f"{odd} in the log"] += 1
    users = {from_json(line)[1].user_id for line in log if isinstance(line, list)}
    with httpx.Client(base_url=service.url, headers=service.headers, timeout=ANSWER_WITHIN_S) as client:
        for user in users:
            answer = client.get(f"/v1/users/{user}")
            if answer.is_success and not all(map(_is_finite, json_leaves(answer.json()["histogram"]))):
                findings.faults["a state with a number that is not finite"] += 1
    console.print(f"    {len(log):,} entries of the log and {len(users):,} states looked at")


def json_leaves(value: Any) -> Iterator[Any]:
    """Yield every JSON value that is neither an object nor a list."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from json_leaves(inner)
    else:
        yield value


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)  # what is no number would be null


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    count: Annotated[int, typer.Option("--cases", min=8, help="At least so many, on all services together.")] = 100_000,
    store: Annotated[Store | None, typer.Option(help="Just this one.")] = None,
    keys: Annotated[bool | None, typer.Option("--keys/--no-keys", help="Just with them, or without.")] = None,
    seed: int = 1,
) -> None:
    """Fuzz each store with keys and without."""
    stores = get_args(Store) if store is None else (store,)
    kinds = [(one, some) for one in stores for some in ((False, True) if keys is None else (keys,))]
    total, failed = 0, False
    for number, (one, with_keys) in enumerate(kinds):
        begin_s = time.monotonic()
        with fuzz_target(model, one, with_keys=with_keys) as service:
            before = service.number("process_resident_memory_bytes")
            findings = fuzz(service, math.ceil(count / len(kinds)), seed + 1_000 * number)
            grown_mb = (service.number("process_resident_memory_bytes") - before) / 1e6
        total += findings.cases
        failed |= bool(findings.faults)
        took_s, answers = time.monotonic() - begin_s, dict(sorted(findings.answers.items()))
        console.print(f"{one}, {'with' if with_keys else 'without'} keys: {findings.cases:,} cases in {took_s:.0f} s,")
        console.print(f"    {sum(findings.faults.values()):,} faults; memory {grown_mb:+.0f} MB; raw answers {answers}")
        for fault, times in findings.faults.most_common(MAX_PRINTED_FAULTS):
            console.print(f"{times} x {fault}", style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{total:,} cases, {'faults above' if failed else 'no fault'}")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    cli.command()(main)
    cli()
