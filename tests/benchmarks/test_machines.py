"""The three-host benchmark, shortened: kills, an old disk, and network partitions."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness.compose import ROOT
from benchmarks.machines import training
from benchmarks.machines.network import what_is_missing
from benchmarks.machines.switch import Switch
from tests.model.conftest import shop_rows, write_rows
from tests.waiting import PATIENCE_S

WITHIN_S = 600  # on a busy machine; by itself it takes about a minute
EVERYBODY = b"\xff" * 6


def test_acknowledged_events_survive_and_all_hosts_recover(model: Path, tmp_path: Path) -> None:
    if missing := what_is_missing():
        pytest.skip(f"SEVERAL MACHINES WERE NOT TRIED: {missing}")
    options = ["--kills", "2", "--cuts", "1", "--node-timeout-ms", "2000", "--logs", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.machines.run", "--model", str(model), *options],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-5_000:]
    for happened in ("a host is killed", "it comes back with an old disk", "cut between two hosts, healed"):
        assert f"| {happened} | " in done.stdout
    assert "0 acknowledged ones lost, 0 counted twice" in done.stdout
    assert (tmp_path / "consumer-2.log").exists(), "where the host of the consumer has died, it goes on elsewhere"
    assert re.search(r" [1-9][\d,]* of them records of Kafka; ", done.stdout)
    assert re.search(
        r"rounds of the trainer: .*; where it was started last, (waiting|activated|refused): ", done.stdout
    )
    assert "an operator had to accept a loss 0 times" in done.stdout


def test_training_by_two_processes_is_timed_beside_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "shop", shop_rows()[:600])
    training.main(data, epochs=1, repeats=1)
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    (alone, together) = ({"processes": row[0], "efficiency": row[2], "loss": float(row[-1])} for row in rows)
    assert (alone["processes"], alone["efficiency"], together["processes"]) == ("1", "100%", "2")
    assert together["loss"] == pytest.approx(alone["loss"], rel=0.01), "the same batches"
    assert "600 events, one machine" in printed


class TestSwitch:
    @pytest.fixture
    def ends(self) -> Iterator[tuple[list[socket.socket], int]]:
        """The hosts' ends of three lines, and the control socket of the switch."""
        with ExitStack() as stack:
            lines = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
            for end in (end for line in lines for end in line):
                stack.enter_context(end).settimeout(0.2)
            commands, commanding = os.pipe()
            running = threading.Thread(target=Switch([line[1].fileno() for line in lines]).run, args=(commands,))
            running.start()
            yield [line[0] for line in lines], commanding
            os.close(commanding)
            running.join(PATIENCE_S)
            os.close(commands)
            assert not running.is_alive()

    def test_forwards_a_frame_to_the_port_of_its_address(self, ends: tuple[list[socket.socket], int]) -> None:
        hosts, _ = ends
        for sender in range(3):
            for other in range(3):
                if other != sender:
                    assert arrives(hosts, sender, other, EVERYBODY)
        hosts[0].send(address(1) + address(0) + b"to one")
        assert arrives(hosts, 0, 1, address(1))
        with pytest.raises(TimeoutError):
            received(hosts[2], b"to one")

    def test_drops_frames_on_a_cut_line(self, ends: tuple[list[socket.socket], int]) -> None:
        hosts, commanding = ends
        os.write(commanding, json.dumps([[0, 1]]).encode() + b"\n")
        assert arrives(hosts, 0, 2, EVERYBODY)  # the command was read: with it, or before it
        drained(hosts[1])
        hosts[0].send(EVERYBODY + address(0) + b"into the cut")
        with pytest.raises(TimeoutError):
            received(hosts[1], b"into the cut")
        os.write(commanding, b"[]\n")
        assert arrives(hosts, 0, 1, EVERYBODY)


def address(host: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, host])


def arrives(hosts: list[socket.socket], sender: int, other: int, target: bytes) -> bool:
    """Send repeatedly until the frame arrives, because the switch may drop frames."""
    for number in range(100):
        frame = target + address(sender) + str(number).encode()
        hosts[sender].send(frame)
        try:
            received(hosts[other], frame[12:])
        except TimeoutError:
            continue
        return True
    return False


def received(host: socket.socket, content: bytes) -> None:
    """Read until this frame arrives; raises TimeoutError."""
    while host.recv(2048)[12:] != content:
        pass


def drained(host: socket.socket) -> None:
    """Read all pending frames."""
    try:
        while True:
            host.recv(2048)
    except TimeoutError:
        return
