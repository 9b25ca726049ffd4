"""What tests of the benchmarks share."""

from __future__ import annotations

import pytest

from benchmarks.harness.topology import program


def require_servers() -> None:
    try:
        program("redis-server", "valkey-server")
        program("haproxy")
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
