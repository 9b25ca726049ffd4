"""The load generator counts every request and includes stalls in latencies; synthetic models are valid."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError
from rich.console import Console

from app.cli.console import print_table
from app.jobs.loadtest import synthetic_catalogue
from app.jobs.loadtest.load_generator import NO_RESPONSE, Address, LoadGenerator, Responses, ScheduledRequest
from app.jobs.loadtest.rate_sweep import Row, running_redis
from app.jobs.loadtest.table import bench_table
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from tests.app.conftest import ITEMS
from tests.app.http.connection.ipv6 import IPV6_LOOPBACK
from tests.app.service_process import Process
from tests.app.service_process import launch as launch
from tests.app.support import run_command

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
BUSY_FOR_NOW = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\ncontent-length: 0\r\n\r\n"
STALL_S = 0.3


@contextmanager
def server(answer: Callable[[bytes], bytes]) -> Iterator[Address]:
    """Answers each chunk with a given response, also in chunks; closes the connection on an empty one."""

    def serve(connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(65_536):
                response_bytes = answer(asked)
                if not response_bytes:
                    return
                connection.sendall(response_bytes[:20])
                time.sleep(0.001)
                connection.sendall(response_bytes[20:])

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()
        listening.shutdown(socket.SHUT_RDWR)


def outcome(
    answer: Callable[[bytes], bytes], requests: list[ScheduledRequest], connections: int = 4
) -> dict[str, Responses]:
    with server(answer) as address:
        load = LoadGenerator([address], connections)
        found = load.run(requests)
        load.close()
        return found


def test_every_request_has_one_outcome() -> None:
    answers = {b"a": OK, b"b": BUSY, b"c": BUSY_FOR_NOW, b"d": b""}
    requests = [ScheduledRequest(n / 1_000, kind.decode(), kind) for n in range(25) for kind in answers]
    found = outcome(answers.__getitem__, requests)
    assert {kind: one.statuses for kind, one in found.items()} == {
        "a": Counter({200: 25}),
        "b": Counter({503: 25}),
        "c": Counter({503: 25}),
        "d": Counter({NO_RESPONSE: 25}),
    }
    assert [found[kind].unannounced for kind in "abcd"] == [0, 25, 0, 0]
    assert [len(found[kind].latencies_ms) for kind in "abcd"] == [25, 0, 0, 0]


def test_a_stall_counts_for_all_requests_due_during_it() -> None:
    stalls = iter([STALL_S])

    def answer(_: bytes) -> bytes:
        time.sleep(next(stalls, 0))
        return OK

    due_s = [0.0, 0.05, 0.1, 0.2]
    found = outcome(answer, [ScheduledRequest(at_s, "x", b"x") for at_s in due_s], connections=1)
    assert all(ms >= (STALL_S - at_s) * 1e3 for ms, at_s in zip(found["x"].latencies_ms, due_s, strict=True))


def test_unreachable_service() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        load = LoadGenerator([unused.getsockname()], 2)
        found = load.run([ScheduledRequest(0, "x", b"x")] * 5)
    assert found["x"].statuses == {NO_RESPONSE: 5}


def rows_by_number(enlarged: Artifact) -> NDArray[np.int64]:
    return enlarged.items.rows.places_of([synthetic_catalogue.item_id(number) for number in range(len(enlarged.items))])


def numbers_of_rows(enlarged: Artifact) -> NDArray[np.int64]:
    return np.argsort(rows_by_number(enlarged))


class TestEnlarged:
    def test_keeps_the_items_and_copies_their_coarse_codes(self, model_dir: Path, tmp_path: Path) -> None:
        trained = model_directory.load(model_dir)
        synthetic_catalogue.write_enlarged(tmp_path / "large", model_dir, 10 * ITEMS + 7, "trained")
        large = model_directory.load(tmp_path / "large")
        rows, numbers = rows_by_number(large), numbers_of_rows(large)
        original = np.arange(len(large.items)) % ITEMS
        assert len(large.items) == len(set(large.items.ids)) == 10 * ITEMS + 7
        assert np.array_equal(large.target_codes[rows[:ITEMS]], trained.target_codes)
        assert np.array_equal(large.history_codes[rows], trained.history_codes[original])
        coarse = trained.target_codes.shape[1] // 2
        assert np.array_equal(large.target_codes[rows, :coarse], trained.target_codes[original, :coarse])
        assert not np.array_equal(large.target_codes[rows], trained.target_codes[original])
        followers, of_originals = large.model.followers.numpy()[rows], trained.model.followers.numpy()
        followers = np.where(followers < 0, -1, numbers[followers])
        assert np.array_equal(followers[:ITEMS], of_originals)
        second_round = followers[ITEMS : 2 * ITEMS]
        assert np.array_equal(second_round, np.where(of_originals < 0, -1, of_originals + ITEMS))
        assert followers.max() < len(large.items)

    @pytest.mark.parametrize("codes", ["trained", "random"])
    @pytest.mark.parametrize("size", [1, 5, ITEMS, ITEMS + 1, 3 * ITEMS + 5])
    def test_reaches_any_size(
        self, model_dir: Path, tmp_path: Path, size: int, codes: synthetic_catalogue.Codes
    ) -> None:
        synthetic_catalogue.write_enlarged(tmp_path / "other", model_dir, size, codes)
        trained, other = model_directory.load(model_dir), model_directory.load(tmp_path / "other")
        rows, original = rows_by_number(other), np.arange(size) % ITEMS
        assert set(other.items.ids) == {synthetic_catalogue.item_id(number) for number in range(size)}
        assert other.items.titles.at(rows) == [trained.items.titles[int(row)] for row in original]
        assert np.array_equal(other.items.counts[rows], trained.items.counts[original])
        for drawn, given in (
            (other.history_codes, trained.history_codes),
            (other.target_codes, trained.target_codes),
            (other.model.followers.numpy(), trained.model.followers.numpy()),
        ):
            assert drawn.shape == (size, given.shape[1])
        assert other.model.followers.max() < size
        is_changed = (other.target_codes[rows] != trained.target_codes[original]).any(axis=1)
        if codes == "trained":
            assert not is_changed[:ITEMS].any()
            assert size < 2 * ITEMS or 0.05 < is_changed[ITEMS:].mean() < 1
        else:
            assert size < ITEMS or is_changed.mean() > 0.5


def test_the_rate_sweep_ends_at_saturation(model_dir: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--items", "200", "--rate", "50", "--seconds", "1", "--p90-ms", "0.1", "--json", str(numbers)]
    assert run_command("bench", "--model", model_dir, *options) == 0
    ((name, rows),) = json.loads(numbers.read_text()).items()
    assert name == "200 items, trained codes"
    assert len(rows) == 1
    assert rows[0]["errors"].keys() <= {"503"}  # of a machine with other things to do
    assert rows[0]["p99_ms"] >= rows[0]["p90_ms"] > 0.1
    assert rows[0]["service_us"] > 0


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6_LOOPBACK])
def test_a_running_service_is_measured(launch: Callable[..., Process], tmp_path: Path, host: str) -> None:
    service, numbers = launch(host=host), tmp_path / "numbers.json"
    httpx.post(f"{service.url}/v1/events", json={"user_id": "ada", "item_id": "item-1"}).raise_for_status()
    options = ["--rate", "20", "--seconds", "1", "--p90-ms", "0.1", "--json", str(numbers)]
    assert run_command("bench", "--url", service.url, *options) == 0
    (row,) = json.loads(numbers.read_text())[service.url]
    assert row["recommendations_per_s"] > 0
    assert row["resident_mb"][0] > 0


def test_the_redis_of_the_benchmark_has_the_users_of_the_compose_file(tmp_path: Path) -> None:
    with running_redis(tmp_path) as url, Redis.from_url(url) as client:
        assert client.acl_whoami() == "lisarec"
        assert client.config_get("appendfsync") == {"appendfsync": "always"}
        with pytest.raises(NoPermissionError):
            client.flushall()
        address = url.rpartition("@")[2]
        with Redis.from_url(f"redis://{address}") as anybody, pytest.raises(AuthenticationError):
            anybody.ping()


def test_a_piped_table_shows_every_number() -> None:
    printed = StringIO()
    row = Row(12_345, 6_789, 10, 123.4, 234.5, 345.6, 456.7, {"503": 7890}, 0, 1111, 2222, 3333, [4444, 5555, 6666])
    print_table(bench_table("models/small", [row], 7), Console(file=printed, width=80))
    assert all(
        number in printed.getvalue()
        for number in ("12,345", "6,789", "123.4", "234.5", "345.6", "456.7", "7890x503", "1111/2222/3333", "5555 6666")
    )
