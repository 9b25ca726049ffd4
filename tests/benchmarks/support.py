"""Helpers of the benchmarks' tests."""

from __future__ import annotations

import pytest

from benchmarks.harness.topology import program


def require_servers(*others: str) -> None:
    try:
        program("redis-server", "valkey-server")
        for name in ("haproxy", *others):
            program(name)
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
