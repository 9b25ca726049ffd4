"""A stage of the run: its options, and the JSON file that it writes after each measurement."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RUNNING, DONE, FAILED, TIMED_OUT, SKIPPED = "running", "done", "failed", "timed out", "skipped"


@dataclass(frozen=True)
class StageOptions:
    """The options of every stage.

    seconds  time limit of the stage; it skips measurements that would not fit
    device   of torch
    is_quick small sizes and few rounds
    data     directory with the data directories ``ml-1m`` and ``completejourney``; None: no training is measured
    items    sizes of catalogues; empty: the stage's own
    model    model directory to serve, with copies of its items; None: a model of a synthetic shop
    """

    out: Path
    seconds: float
    device: str
    is_quick: bool = False
    data: Path | None = None
    items: tuple[int, ...] = ()
    model: Path | None = None

    def sizes(self, *usual: int, quick: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of catalogues to measure."""
        return self.items or (quick if self.is_quick else usual)

    def to_json(self) -> str:
        """Return the options as text for the process of a stage."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> StageOptions:
        """Parse what ``to_json`` returns."""
        given = json.loads(text)
        paths = {name: given[name] and Path(given[name]) for name in ("out", "data", "model")}
        return cls(**given | paths | {"items": tuple(given["items"])})


@dataclass
class StageResult:
    """The results of a stage so far. Rows with ``holds`` state whether a law holds."""

    stage: str
    status: str = RUNNING
    reason: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether the stage has not failed, and every law holds."""
        return self.status != FAILED and all(row.get("holds", True) for row in self.rows)


class StageRecorder:
    """Writes the result of a stage after each row, so that an interrupted stage keeps its measurements."""

    def __init__(self, name: str, options: StageOptions) -> None:
        self.result = StageResult(name)
        self._path = result_path(options.out, name)
        self._begin_s = time.monotonic()
        self._end_s = self._begin_s + options.seconds
        self._write()

    def add(self, measured: str, **values: Any) -> None:
        """Add a row."""
        self.result.rows.append({"measured": measured, **values})
        self._write()

    def fits(self, measured: str, needed_s: float) -> bool:
        """Return whether this much time is left; otherwise add a row that states it."""
        left_s = self._end_s - time.monotonic()
        if needed_s > left_s:
            self.add(measured, skipped=f"would take about {needed_s:.0f} s, and {max(left_s, 0):.0f} s are left")
        return needed_s <= left_s

    @property
    def left_s(self) -> float:
        """The time that the stage has left."""
        return self._end_s - time.monotonic()

    def end(self, status: str, reason: str = "") -> None:
        """Write how the stage has ended."""
        self.result.status, self.result.reason = status, reason
        self._write()

    def _write(self) -> None:
        self.result.seconds = time.monotonic() - self._begin_s
        write_result(self._path, self.result)


def result_path(out: Path, name: str) -> Path:
    """Return the path of a stage's result."""
    return out / f"{name}.json"


def write_result(path: Path, result: StageResult) -> None:
    """Replace the file of a stage's result."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(result), indent=2) + "\n")
    unfinished.replace(path)


def read_result(out: Path, name: str) -> StageResult:
    """Read the result of a stage; a stage without a result has failed."""
    path = result_path(out, name)
    if not path.exists():
        return StageResult(name, FAILED, "the stage ended before it wrote anything")
    return StageResult(**json.loads(path.read_text()))
