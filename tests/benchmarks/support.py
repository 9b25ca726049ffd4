"""What tests of the benchmarks share."""

from __future__ import annotations

import pytest

from benchmarks.harness.topology import program
from model.training.loop import EpochReport


class Silent:
    def stage(self, name: str) -> None: ...
    def batch(self, epoch: int, share: float, loss: float, events: int) -> None: ...
    def epoch(self, report: EpochReport) -> None: ...


def require_servers() -> None:
    try:
        program("redis-server", "valkey-server")
        program("haproxy")
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
