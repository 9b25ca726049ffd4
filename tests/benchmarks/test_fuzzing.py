"""`benchmarks.fuzzing`, shortened: malformed requests to a running service, and responses with and without the app."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from benchmarks.fuzzing import fuzz, plain_answers
from benchmarks.fuzzing.fuzz import (
    Findings,
    FuzzTarget,
    check_responses,
    check_service_afterwards,
    failures_reported,
    fuzz_target,
    run_schemathesis,
    send_all,
)
from benchmarks.fuzzing.malformed_requests import MalformedCase, malformed_cases
from tests.app.conftest import write_model
from tests.benchmarks.support import require_servers
from tests.waiting import PATIENCE_S

RAW = {"service": 700, "balancer": 300}
WAITING_SHARE = 0.001


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzTarget]:
    try:
        with fuzz_target(write_model(tmp_path_factory.mktemp("models") / "tiny"), "redis", with_keys=True) as service:
            yield service
    except FileNotFoundError as exc:  # CI turns this into a failure
        pytest.skip(str(exc))


def test_fuzzing_finds_no_fault(service: FuzzTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "ANSWER_WITHIN_S", PATIENCE_S)
    found, files = Findings(), service.number("process_open_fds")
    for name, url in (("service", service.url), ("balancer", service.running.url)):
        asyncio.run(send_all(url, list(malformed_cases(service.calls(), RAW[name], 1, WAITING_SHARE)), found, name))
    assert {200, 400, 401, 404, 405, 422} <= found.answers.keys()
    run_schemathesis(service, 1, 1, found, "examples,coverage")
    assert found.cases > sum(RAW.values()) + 500
    check_service_afterwards(service, files, found)
    assert found.faults == {}


def test_the_same_seed_gives_the_same_cases(service: FuzzTarget) -> None:
    calls = service.calls()
    assert {bytes(call.target) for call in calls} >= {b"/v1/events", b"/v1/users/ada/recommendations", b"/metrics"}
    first, second, other = (list(malformed_cases(calls, 50, seed, 0.1)) for seed in (1, 1, 2))
    assert first == second != other


ODD = {
    b"HTTP/1.1 500 Oh\r\n\r\n{}": "500 b'{}' to it",
    b"HTTP/1.1 200 OK\r\n\r\n{}HTTP/1.1 503 Oh\r\n\r\n": "503 b'' to it",
    b"HTTP/1.1 404 No\r\n\r\n" + b"x" * 4_097: "an error of 4,097 bytes to it",
    b"SSH-2.0": "not HTTP: b'SSH-2.0' to it",
    None: "no answer within 20 s to it",
}


@pytest.mark.parametrize(("answered", "fault"), ODD.items())
def test_faults_are_detected(answered: bytes | None, fault: str) -> None:
    found = Findings()
    check_responses(answered, found, "it")
    assert found.faults == {fault: 1}


def test_hanging_connections_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "ANSWER_WITHIN_S", 0.2)
    found, case = Findings(), MalformedCase((b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",), "half-close")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(send_all(f"http://127.0.0.1:{silent.getsockname()[1]}", [case], found, "silent"))
    assert [fault.partition(" to ")[0] for fault in found.faults] == ["no answer within 0.2 s"]


def test_errors_and_failures_of_schemathesis_are_detected() -> None:
    outputs = [f"3 generated\n\n== {name} ==\n\nread timed out\n\n== SUMMARY ==\n" for name in ("ERRORS", "FAILURES")]
    assert ["read timed out" in failures_reported(output) for output in outputs] == [True, True]
    assert not any("SUMMARY" in failures_reported(output) for output in outputs)
    assert failures_reported("an exception") == "an exception"


LOGGED = "127.0.0.1:4{n} [23/Nov/2026:04:31:55] service app/1 0/0/0/{took}/9 {status} 312 {state} 9/9/9/1/0 0/0 POST x"


def test_load_balancer_failures_are_detected_but_not_client_aborts() -> None:
    lines = [
        LOGGED.format(n=n, took=took, status=status, state=state)
        for n, (took, status, state) in enumerate(
            [
                (-1, 503, "CC--"),
                (-1, 503, "SC--"),
                (502, 200, "----"),
                (7, 400, "PR--"),
                (-1, 504, "sH--"),
                (5, 500, "----"),
            ]
        )
    ]
    assert fuzz.failures_logged("\n".join(lines)) == [lines[1], lines[4], lines[5]]


def test_nested_numbers_are_found() -> None:
    numbers = [random.random() for _ in range(4)]
    assert list(fuzz.json_leaves({"a": [numbers[0], {"b": numbers[1]}], "c": numbers[2:]})) == numbers


@pytest.mark.parametrize("redis", [False, True])
def test_responses_without_the_app_are_byte_identical(tmp_path: Path, redis: bool) -> None:
    if redis:
        require_servers()
    plain_answers.main(write_model(tmp_path / "tiny"), requests=300, redis=redis)


@pytest.mark.parametrize("found", [(1, 0), (0, 1)])
def test_a_different_response_fails_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: tuple[int, int]
) -> None:
    async def differences(*_: object) -> tuple[int, int]:
        return found

    monkeypatch.setattr(plain_answers, "differences", differences)
    with pytest.raises(typer.Exit):
        plain_answers.main(tmp_path, requests=1)
