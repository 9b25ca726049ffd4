"""Kernels are compiled before the service is ready, so that no request waits for a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CALLS = """
import sys
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from app.settings import Settings
from tests.app.conftest import Client

def compiled():
    named = {id(one): one for module in [*sys.modules.values()] for one in vars(module).values()
             if isinstance(one, Dispatcher) and one.targetoptions.get("cache", True)}
    return {(one.__module__, one.__name__, signature) for one in named.values() for signature in one.signatures}

client = Client(Settings(model_dir=Path(sys.argv[1]), data_dir=Path(sys.argv[2])))
before = compiled()
for query in ("k", "red", "red kettle", "item-3"):
    assert client.get("/v1/items", params={"query": query}).status_code == 200
for text in ("item.title.startsWith('A')", "item.title < 'm'", "'tea' in item.categories"):
    assert client.get("/v1/users/ann/recommendations", params={"filter": text}).status_code == 200
client.close()
for one in sorted(compiled() - before, key=str):
    print(*one)
"""


def test_searches_and_filters_compile_nothing_after_startup(model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CALLS, str(model_dir), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
