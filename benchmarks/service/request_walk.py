"""Count the files and functions that one event and one recommendation pass through, and the returns to earlier files.

    python -m benchmarks.service.request_walk --model models/ml-1m

The service runs in this process over an embedded store. After a warm-up the command sends one plain
``POST /v1/events`` and one plain ``GET /v1/users/{id}/recommendations`` as ASGI calls, which bypass the framework. A
server answers the latter without the app, and shares everything behind the middleware. The command records each call of
a Python function of this project's packages, in every thread and task, until the request has no work left. A resumed
coroutine counts as a call, and so does a comprehension.

A *return* is a step into a file that the request has already entered and left. Exits with 1 if a walk exceeds its
limit. To analyse another copy of the code, run this file with that copy in PYTHONPATH:
``PYTHONPATH=COPY python -P benchmarks/service/request_walk.py``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from starlette.types import ASGIApp

from benchmarks.harness.service_process import call_app

PACKAGES = ("app", "storage", "model")
HISTORY = 10  # events of the user, so that popular items are not blended into the model's list
ROUNDS = 20  # of each request; the shortest walk counts, because the others include background work
REST_S = 0.02

console = Console()


class Call(NamedTuple):
    """A call of a function."""

    file: str
    function: str


class Length(NamedTuple):
    """The number of files that a walk enters, and of returns to files that it has left."""

    files: int
    returns: int


LIMITS = {"event": Length(27, 38), "recommendation": Length(34, 26)}


class Recorder:
    """Records calls of this project's packages while it is on."""

    def __init__(self, root: Path) -> None:
        self._root = f"{root}/"
        self._packages = tuple(f"{root}/{package}/" for package in PACKAGES)
        self._is_on = False
        self._steps: list[Call] = []
        threading.setprofile(self._note)  # applies to threads that start later, so before the service starts

    def start(self) -> None:
        """Begin a new walk."""
        self._steps, self._is_on = [], True
        sys.setprofile(self._note)

    def stop(self) -> list[Call]:
        """End the walk and return its steps."""
        sys.setprofile(None)
        self._is_on = False
        return self._steps

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if self._is_on and event == "call" and code.co_filename.startswith(self._packages):
            self._steps.append(Call(code.co_filename.removeprefix(self._root), code.co_name))


def length(steps: Sequence[Call]) -> Length:
    """Return the length of a walk."""
    visits = [file for file, _ in groupby(step.file for step in steps)]
    return Length(files := len(set(visits)), len(visits) - files)


async def send(app: ASGIApp, state: Any, method: str, path: str, body: object = None) -> None:
    """Send a request to the application; raise RuntimeError if it fails."""
    response = await call_app(app, state, method, path, b"" if body is None else json.dumps(body).encode())
    if response.status != 200:
        raise RuntimeError(f"{method} {path} was answered {response.status}")


async def walks(model: Path, data_dir: Path) -> dict[str, list[Call]]:
    """Return the steps of both requests."""
    import app.main
    from app.settings import Settings

    recorder = Recorder(Path(app.main.__file__).parent.parent)
    service = app.main.create_app(Settings(model_dir=model, data_dir=data_dir))
    found = {}
    async with service.router.lifespan_context(service) as state:
        assert state is not None
        (tenant,) = state["services"].by_tenant.values()
        items = [tenant.catalogue.item_ids[row] for row in range(HISTORY + 1)]
        for item in items:
            await send(service, state, "POST", "/v1/events", {"user_id": "ada", "item_id": item})
        requests = {
            "event": ("POST", "/v1/events", {"user_id": "ada", "item_id": items[0]}),
            "recommendation": ("GET", "/v1/users/ada/recommendations", None),
        }
        for name, request in requests.items():
            every = []
            for _ in range(ROUNDS):
                await send(service, state, *request)
                await asyncio.sleep(REST_S)
                recorder.start()
                await send(service, state, *request)
                await asyncio.sleep(REST_S)
                every.append(recorder.stop())
            found[name] = min(every, key=len)
    return found


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    verbose: Annotated[bool, typer.Option(help="List the steps, too.")] = False,
) -> None:
    """Print the walks."""
    with TemporaryDirectory() as data_dir:
        found = asyncio.run(walks(model, Path(data_dir)))
    lengths = {name: length(steps) for name, steps in found.items()}
    table = Table("request", "files", "at most", "functions", "returns to a file already left", "at most")
    for name, (files, returns) in lengths.items():
        limit = LIMITS[name]
        table.add_row(name, *map(str, (files, limit.files, len(set(found[name])), returns, limit.returns)))
    console.print(table)
    if verbose:
        for name, steps in found.items():
            console.print(f"\n{name}")
            left: set[str] = set()
            for file, calls in groupby(steps, key=lambda step: step.file):
                console.print(f"{'<-' if file in left else '  '} {file}: {', '.join(call.function for call in calls)}")
                left.add(file)
    if any(files > LIMITS[name].files or returns > LIMITS[name].returns for name, (files, returns) in lengths.items()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
