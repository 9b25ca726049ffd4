"""Tables of other recommenders are read as docs/how-to describes; see also tests/clients."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.jobs.datasets.mapped_copy import data_directory, table_of_items
from app.jobs.import_items import read
from model.data.exports.mapping import TableMapping, parse_columns, parse_types
from model.data.readers import read_interactions
from tests.app.support import run_command
from tests.waiting import PATIENCE_S

PAGE = (Path(__file__).parents[4] / "docs" / "how-to" / "switch.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
MOMENT = 1_760_181_536  # 11 October 2025
MOMENT_IN_WORDS = "2025-10-11T11:18:56Z"
Events = list[tuple[str, str, str, int, float]]


def block(section: str, language: str) -> str:
    return str(re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.DOTALL | re.MULTILINE)[0])


def commands(section: str, directory: Path) -> list[list[str]]:
    """Arguments of each `lisarec` command of a section, as a shell passes them."""
    code = 'lisarec() { printf "%s\\0" "$@"; printf "\\n\\0"; }\n' + block(section, "sh")
    said = subprocess.run(["bash", "-c", code], cwd=directory, check=True, capture_output=True, timeout=PATIENCE_S)
    return [call.strip("\0").split("\0") for call in said.stdout.decode().split("\n\0") if call.strip("\0")]


def mapping_of(arguments: list[str]) -> TableMapping:
    options = [*pairwise(arguments)]
    columns, types = ([text for name, text in options if name == option] for option in ("--columns", "--types"))
    return TableMapping(parse_columns(columns), types=parse_types(types))


def taken_in(
    section: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Events, list[dict[str, Any]]]:
    """Run the script and the check of the section; return the events and items read with its options."""
    monkeypatch.chdir(directory)
    if "```python" in SECTIONS[section]:
        subprocess.run([sys.executable, "-c", block(section, "python")], cwd=directory, check=True, timeout=PATIENCE_S)
    check, *imports = commands(section, directory)
    assert run_command(*check) == 0
    said = capsys.readouterr().out
    assert "type is none of" not in said
    assert "every line is a click" not in said
    copy, _ = data_directory(directory / "shop", mapping_of(check), directory / "cache")
    found = read_interactions(copy)
    events = [
        (
            found.user_ids[found.user[row]],
            found.item_ids[found.item[row]],
            found.type_names[found.type[row]],
            int(found.timestamp_us[row]),
            float(found.value[row]),
        )
        for row in range(len(found))
    ]
    items = []
    for command in imports:
        table, remarks = table_of_items(directory / command[2], mapping_of(command), directory / "cache")
        assert not remarks
        items += read(table, {})
    return events, items


def shop(directory: Path, name: str, records: list[dict[str, Any]]) -> None:
    (directory / "shop").mkdir(exist_ok=True)
    (directory / "shop" / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def test_gorse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    feedback = {"UserId": "u", "ItemId": "a", "Value": 0, "Timestamp": MOMENT_IN_WORDS, "Comment": ""}
    kinds = ("read", "buy", "star", "dislike")
    shop(tmp_path, "interactions.jsonl", [{"FeedbackType": kind, **feedback} for kind in kinds])
    item = {"IsHidden": False, "Categories": ["Tea"], "Timestamp": MOMENT_IN_WORDS, "Labels": {"brand": "Hill"}}
    hidden = {"ItemId": "b", **item, "IsHidden": True, "Categories": None, "Labels": None, "Comment": "B"}
    shop(tmp_path, "items.jsonl", [{"ItemId": "a", **item, "Comment": "A"}, hidden])
    events, items = taken_in("Gorse", tmp_path, monkeypatch, capsys)
    assert [event[:4] for event in events] == [
        ("u", "a", kind, MOMENT * 10**6) for kind in ("view", "purchase", "like", "dislike")
    ]
    assert items == [
        {"item_id": "a", "title": "A", "categories": ["Tea"], "available": True, "published_at": MOMENT_IN_WORDS}
        | {"properties": {"brand": "Hill"}},
        {"item_id": "b", "title": "B", "available": False, "published_at": MOMENT_IN_WORDS},
    ]


def test_personalize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "interactions.csv").write_text(
        "USER_ID,ITEM_ID,EVENT_TYPE,EVENT_VALUE,TIMESTAMP,IMPRESSION\n"
        f"u,a,View,,{MOMENT},a|b\nu,a,AddToCart,,{MOMENT},\nu,a,Purchase,9.5,{MOMENT},\n"
    )
    (tmp_path / "shop" / "items.csv").write_text(
        f"ITEM_ID,PRICE,CATEGORY_L1,PRODUCT_DESCRIPTION,CREATION_TIMESTAMP,GENDER\na,9.5,Tea|Gifts,A,{MOMENT},Women|Men\n"
    )
    events, items = taken_in("Amazon Personalize", tmp_path, monkeypatch, capsys)
    assert [event[2:4] for event in events] == [(kind, MOMENT * 10**6) for kind in ("view", "cart", "purchase")]
    assert events[2][4] == 9.5
    assert items == [
        {"item_id": "a", "title": "A", "categories": ["Tea", "Gifts"], "published_at": "2025-10-11T11:18:56.000000Z"}
        | {"properties": {"PRICE": 9.5, "GENDER": ["Women", "Men"]}}
    ]


def test_recombee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"userId": "u", "itemId": "a", "timestamp": MOMENT + 0.5}
    kinds_of_events: dict[str, dict[str, Any]] = {
        "detailviews": {"duration": None},
        "cartadditions": {"amount": 1.0, "price": 9.0},
        "purchases": {"amount": 2.0, "price": 18.0, "profit": 3},
        "bookmarks": {},
    }
    for name, rest in kinds_of_events.items():
        (tmp_path / f"{name}.json").write_text(json.dumps([{**event, **rest}], indent=1))
    ratings = [{**event, "itemId": item, "rating": rating} for item, rating in (("a", 1), ("b", -0.5), ("c", 0.0))]
    (tmp_path / "ratings.json").write_text(json.dumps(ratings))
    (tmp_path / "shop").mkdir()
    item = {"itemId": "a", "title": "A", "categories": ["Tea"], "price": 9, "available": True, "published": MOMENT}
    (tmp_path / "shop" / "items.json").write_text(json.dumps([{**item, "images": ["http://shop/a.jpg"]}]))
    events, items = taken_in("Recombee", tmp_path, monkeypatch, capsys)
    kinds = ["view", "cart", "purchase", "like", "like", "dislike"]
    assert [event[2:4] for event in events] == [(kind, MOMENT * 10**6 + 500_000) for kind in kinds]
    assert [event[4] for event in events if event[4] == event[4]] == [18.0]
    assert items == [
        {"item_id": "a", "title": "A", "categories": ["Tea"], "available": True}
        | {"published_at": "2025-10-11T11:18:56.000000Z"}
        | {"properties": {"price": 9.0, "images": ["http://shop/a.jpg"]}}
    ]


def test_google_analytics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    event = {
        "event_timestamp": str(MOMENT * 10**6),
        "user_pseudo_id": "u.1",
        "event_params": [{"key": "k", "value": {}}],
    }
    one, other = {"item_id": "a", "item_params": []}, {"item_id": "b", "item_params": [{"key": "k"}]}
    days: dict[str, list[dict[str, Any]]] = {
        "20251011": [
            {"event_name": "view_item", "items": [one], **event},
            {"event_name": "page_view", "items": [], **event},
            {"event_name": "view_item_list", "items": [one, other], **event},
        ],
        "20251012": [{"event_name": "purchase", "items": [one, other], "ecommerce": {"transaction_id": "T"}, **event}],
    }
    (tmp_path / "ga4").mkdir()
    for day, records in days.items():
        (tmp_path / "ga4" / f"events_{day}.json").write_text("\n".join(map(json.dumps, records)))
    events, _ = taken_in("Google Analytics 4", tmp_path, monkeypatch, capsys)
    shown, bought = [("a", "impression"), ("b", "impression")], [("a", "purchase"), ("b", "purchase")]
    assert [event[1:3] for event in events] == [("a", "view"), *shown, *bought]
    assert {event[3] for event in events} == {MOMENT * 10**6}
