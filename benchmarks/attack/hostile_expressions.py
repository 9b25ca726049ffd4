"""Send thousands of hostile expressions: none may return 5xx, take long, or leak memory.

They are deep, long, full of huge constants, of wrong types, of any character, of names that do not exist, and of what
takes longest. Every request goes the whole way, from the ASGI call to the answer's bytes.

    python -m benchmarks.attack.hostile_expressions --model models/ml-1m --items 100000 --count 10000

A request may take so long in processor time of this process, as other programs share the machine. The command fails
where one takes longer, is answered 5xx, or where the second half of them leaves more memory than is allowed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console

from app.jobs.loadtest import synthetic_catalogue
from app.main import freeze_loaded_objects
from app.schemas.fields import MAX_EXPRESSION_CHARS
from app.settings import Settings
from benchmarks.harness.service_process import in_process_service
from storage.records import HeldProperties

MAX_CPU_S = 0.05
MAX_GROWN_BYTES = 32 << 20
NAMES = ["item.title", "item.categories", "item.price", "item.brand", "item.labels", "item.nothing", "current.brand"]
NAMES += ["params.text", "params.number", "params.texts", "params.numbers", "now", "user", "nobody", "x" * 500, "in"]
CONSTANTS = ["1" * 1_000, "-1e999", "1e-999", "0x" + "f" * 400, "''", '"' + "é" * 300 + '"', "null", "b'x'", "true"]
CONSTANTS += ["[" + ",".join(["1.5"] * 200) + "]", "{}", '"\\U0010FFFF"', "'\\x00'", "9223372036854775807", "0.5"]
FUNCTIONS = ["size({})", "!{}", "-{}", "known({})", "({})", "double({})", "timestamp({})", "duration({})", "[{}]"]
FUNCTIONS += ["{}.matches({})", "{}.contains({})", "{} < {}", "{} == {}", "{} in {}", "{} + {}", "{} / {}", "{} * {}"]
FUNCTIONS += [
    "{} && {}",
    "{} || {}",
    "{} ? {} : {}",
    "{}.exists(x, {})",
    "{}.all(x, x == {})",
    "{}.map(x, {})",
    "{}[{}]",
]
REGULAR = ["(a*)*" * 300, "(" * 300 + ")" * 300, "[" * 100, "a{1000}{1000}", "\\\\pL{400}", "(x+x+)+y", ".*" * 500]

console = Console()


class Answer(NamedTuple):
    """The status of a response, and its processor seconds in this process."""

    status: int
    cpu_s: float


def expression(rng: random.Random) -> str:
    """Return a hostile expression."""
    kinds: list[Callable[[], str]] = [
        lambda: _tree(rng, rng.randrange(1, 6)),
        lambda: rng.choice(["(", "[", "!", "-", "size(", "{"]) * rng.randrange(1, MAX_EXPRESSION_CHARS),
        lambda: " || ".join(_tree(rng, 1) for _ in range(rng.randrange(1, 60))),
        lambda: " && ".join(f"item.labels.exists(x, x.contains('{n}'))" for n in range(rng.randrange(1, 40))),
        lambda: " + ".join(["item.price * 2.0"] * rng.randrange(1, 70)) + " > 1.0",
        lambda: f'item.brand.matches("{rng.choice(REGULAR)}")',
        lambda: "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x10FFFF)])) for _ in range(300)),
        lambda: f"item.brand in [{','.join(repr(str(n)) for n in range(rng.randrange(300)))}]",
        lambda: f"item.price in [{','.join(f'{n}.0' for n in range(rng.randrange(300)))}]",
    ]
    text = rng.choice(kinds)()[:MAX_EXPRESSION_CHARS]
    return text.encode("utf-8", "replace").decode() or "x"


def _tree(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(NAMES + CONSTANTS)
    form = rng.choice(FUNCTIONS)
    return form.format(*(_tree(rng, rng.randrange(depth)) for _ in range(form.count("{}"))))


def request(rng: random.Random) -> dict[str, Any]:
    """Return a request with a hostile filter or boost."""
    params = {"text": "a" * rng.randrange(500), "number": rng.random(), "texts": ["a", "b"] * 20, "numbers": [0.5] * 90}
    text, wish = expression(rng), rng.choice(["filter", "boost"])
    return {"user_id": "ada", wish: text, "params": params, "current_item": synthetic_catalogue.item_id(1)}


async def attack(model: Path, data_dir: Path, number: int, seed: int) -> tuple[list[Answer], int]:
    """Return the responses to this many requests, and the memory growth of the second half."""
    rng, found = random.Random(seed), list[Answer]()
    async with in_process_service(Settings(model_dir=model, data_dir=data_dir)) as service:
        _set_properties(service.tenant.catalogue.properties, random.Random(0))

        async def answer(body: bytes) -> Answer:
            response = await service.call("POST", "/v1/recommendations", body)
            return Answer(response.status, response.cpu_s)

        await answer(json.dumps({"user_id": "ada", "filter": 'item.title.contains("a")'}).encode())
        freeze_loaded_objects()  # as every process that serves does
        halfway = 0
        for n in range(number):
            if n == number // 2:
                halfway = resident_bytes()
            wanted = request(rng)
            found.append(await answer(json.dumps(wanted).encode()))
            if found[-1].status >= 500 or found[-1].cpu_s > MAX_CPU_S:
                console.print(n, found[-1], str(wanted)[:300], markup=False)
        return found, resident_bytes() - halfway


def _set_properties(properties: Any, rng: random.Random) -> None:
    properties.hold(HeldProperties({"item": {"price": "number", "brand": "text", "labels": "set"}, "user": {}}))
    for begin in range(0, properties.rows, 1_000):
        rows = np.arange(begin, min(begin + 1_000, properties.rows))
        properties.set("price", rows, [rng.random() for _ in rows])
        properties.set("brand", rows, [f"brand-{rng.randrange(1_000)}" for _ in rows])
        properties.set("labels", rows, [(f"l{rng.randrange(100)}", f"l{rng.randrange(100)}") for _ in rows])


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    items: Annotated[int, typer.Option(help="Items of the catalogue: the model's, and copies of them.")] = 100_000,
    number: Annotated[int, typer.Option("--count", help="Requests.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the requests: the same ones again.")] = 0,
) -> None:
    """Print a summary of the responses."""
    with TemporaryDirectory() as directory:
        large = Path(directory) / "large"
        synthetic_catalogue.write_enlarged(large, model, items, "trained")
        found, grown = asyncio.run(attack(large, Path(directory) / "state", number, seed))
    statuses, longest = Counter(one.status for one in found), max(one.cpu_s for one in found)
    took = sorted(one.cpu_s for one in found)
    console.print(f"{number:,} requests for one of {items:,} items: {dict(statuses)}")
    console.print(f"processor time: median {took[len(took) // 2] * 1e3:.1f} ms, longest {longest * 1e3:.1f} ms")
    console.print(f"memory: {grown / 2**20:+.1f} MiB in the second half")
    is_fault = max(statuses) >= 500 or longest > MAX_CPU_S or grown > MAX_GROWN_BYTES
    raise typer.Exit(int(is_fault))


if __name__ == "__main__":
    typer.run(main)
