"""docs/tutorials/your-own-data.md: its script and its checks print what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.main import main
from app.jobs.datasets.synthetic_shop import generate

TUTORIALS = Path(__file__).parents[4] / "docs" / "tutorials"
PAGE = (TUTORIALS / "your-own-data.md").read_text(encoding="utf-8")
MAP = re.compile(r"^map=\(\n(.*?)^\)\n", re.DOTALL | re.MULTILINE)
CHECKS = re.findall(
    r"^```sh\n((?:(?!```).)*?lisarec check .*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the export of the demo's shop."""
    folder = tmp_path_factory.mktemp("tutorial")
    shop = folder / "var" / "demo" / "shop"
    shop.mkdir(parents=True)
    generate(shop)
    (script,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, timeout=200)
    return folder


def test_the_export_equals_the_page(folder: Path) -> None:
    shown = PAGE.partition("### What it looks like")[2].partition("```text\n")[2].partition("```")[0]
    assert (folder / "export" / "interactions.csv").read_text(encoding="cp1252").startswith(shown)


def test_the_page_has_three_checks() -> None:
    assert len(CHECKS) == 3


@pytest.mark.parametrize(("commands", "shown"), CHECKS, ids=["as it is", "with names", "with all options"])
def test_a_check_prints_the_output_of_the_page(
    folder: Path, commands: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "".join(MAP.findall(commands)).replace("\n", " ")
    command = MAP.sub("", commands).replace('"${map[@]}"', options)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    printed = capsys.readouterr()
    assert printed.out + printed.err == shown


def test_all_pages_use_the_same_model() -> None:
    """Each page shows results of one training of this shop."""
    found = [
        re.search(pattern, (TUTORIALS / name).read_text(encoding="utf-8"))
        for name, pattern in (
            ("your-own-data.md", r"models/shop: 432 items, generation (\w{16})\."),
            ("shop-page.md", r"tenant main: model shop \((\w{16})\), 432 items"),
        )
    ]
    assert len({one and one[1] for one in found}) == 1
