"""Additional checks for schemathesis, which benchmarks/fuzzing/schemathesis.toml imports."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import schemathesis

MAX_ERROR_BYTES = 4_096


@schemathesis.check
def errors_are_short_and_numbers_finite(
    _context: schemathesis.CheckContext, response: schemathesis.Response, _case: schemathesis.Case[Any]
) -> None:
    """Check that errors have the common shape and at most 4 kB, and numbers are finite."""
    if response.status_code >= 400 and response.content:
        assert len(response.content) <= MAX_ERROR_BYTES, f"an error of {len(response.content):,} bytes"
        assert set(response.json()) == {"error"}, "an error of another shape"
    if "json" in "".join(response.headers.get("content-type", [])):
        json.loads(response.content or b"null", parse_constant=_refuse)


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} in an answer")
