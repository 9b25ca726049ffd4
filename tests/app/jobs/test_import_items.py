"""Import of item properties from tables: the type of each column is declared or inferred from all its cells."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import polars as pl
import pytest

from app.http.auth.keys import add, make
from app.jobs.datasets.mapped_copy import table_of_items
from app.jobs.import_items import BATCH, BATCH_BYTES, _batches, held_types, read, send
from app.jobs.replay import ReplayError
from app.settings import Settings
from model.data.exports.mapping import TableMapping
from model.data.interactions import DataError
from model.data.readers import read_items
from tests.app.conftest import Client, item_id
from tests.app.support import run_command

ITEMS_PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "integrate" / "items.md"
TABLE = """item_id,title,price,brand,organic,made,tags,code,empty,available_until
tea,Tea,4.50,Hill,TRUE,2026-05-01T08:00:00Z,loose|green,007,,2026-12-24T12:00:00+01:00
cup,,,,,,,,,
pot,Pot,12,Hill,false,2026-05-01 08:00:00.5+02:00,iron,12,,
"""


def reached(client: Client, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL by which the command reaches this service."""
    monkeypatch.setattr(httpx.Client, "post", lambda _self, path, **options: client.request("POST", path, **options))
    monkeypatch.setattr(httpx.Client, "get", lambda _self, path, **options: client.request("GET", path, **options))
    return "http://service"


@pytest.fixture
def url(client: Client, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL by which the command reaches the service of this test."""
    return reached(client, monkeypatch)


def imported(file: Path, url: str, *options: str) -> int:
    return run_command("items", "import", file, "--url", url, *options)


def properties(client: Client, item_id: str) -> dict[str, Any]:
    return dict(client.get(f"/v1/items/{item_id}").json()["properties"])


def test_column_types_are_inferred_from_all_cells(client: Client, url: str, tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(TABLE)
    for _ in range(2):
        assert imported(tmp_path / "items.csv", url) == 0
    assert properties(client, "tea") == {
        "price": 4.5,
        "brand": "Hill",
        "organic": True,
        "made": "2026-05-01T08:00:00Z",
        "tags": ["green", "loose"],
        "code": "007",
    }
    assert properties(client, "pot") | {"made": ""} == {
        "price": 12.0,
        "brand": "Hill",
        "organic": False,
        "made": "",
        "tags": ["iron"],
        "code": "12",
    }
    assert properties(client, "cup") == {}
    assert client.get("/v1/items/tea").json()["available_until"] == "2026-12-24T11:00:00Z"
    types = {"price": "number", "brand": "text", "organic": "boolean", "made": "time", "tags": "set", "code": "text"}
    assert client.get("/v1/admin/properties").json()["items"] == types


def test_an_empty_cell_removes_a_value_only_on_request(client: Client, url: str, tmp_path: Path) -> None:
    header = "item_id,title,categories,available,available_until,price,tags,brand\n"
    (tmp_path / "items.csv").write_text(header + "tea,Tea,a|b,true,2099-01-01T00:00:00Z,4.5,x|y,Hill\n")
    imported(tmp_path / "items.csv", url)
    before = client.get("/v1/items/tea").json()
    (tmp_path / "empty.csv").write_text(header.replace(",brand", "") + "tea,,,,,,\nnew,,,,,,\n")
    imported(tmp_path / "empty.csv", url)
    assert client.get("/v1/items/tea").json() == before
    assert imported(tmp_path / "empty.csv", url, "--empty-removes") == 0
    assert properties(client, "tea") == {"brand": "Hill"}
    after = client.get("/v1/items/tea").json()
    kept = {name: before[name] for name in ("item_id", "title", "available")}
    assert {name: after.get(name) for name in kept} == kept
    assert (after["categories"], after.get("available_until")) == ([], None)


def test_declared_types_override_inferred_ones(client: Client, url: str, tmp_path: Path) -> None:
    types = {"price": "text", "brand": "set", "organic": "boolean", "code": "number", "empty": "text"}
    client.request("PUT", "/v1/admin/properties", json={"items": types})
    (tmp_path / "items.csv").write_text(TABLE)
    assert imported(tmp_path / "items.csv", url) == 0
    found = properties(client, "tea")
    assert (found["price"], found["brand"], found["code"]) == ("4.50", ["Hill"], 7.0)
    assert held_types(url) == types | {"made": "time", "tags": "set"}


def test_unix_times_are_accepted(client: Client, url: str, tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(
        "item_id,published_at,available_until,made\n"
        "tea,1735689600,2026-12-24T12:00:00Z,1735689600500\ncup,1735689600.25,,\n"
    )
    (tmp_path / "items.jsonl").write_text(
        '{"sku": "pot", "published_at": 1735689600000000}\n{"sku": "jar", "published_at": 1735689600.0}\n'
    )
    client.request("PUT", "/v1/admin/properties", json={"items": {"made": "time"}})
    assert imported(tmp_path / "items.csv", url) == 0
    assert imported(tmp_path / "items.jsonl", url, "--columns", "sku=item_id") == 0
    found = {id_: client.get(f"/v1/items/{id_}").json() for id_ in ("tea", "cup", "pot", "jar")}
    published = {id_: datetime.fromisoformat(item["published_at"]).timestamp() for id_, item in found.items()}
    assert published == {"tea": 1735689600, "cup": 1735689600.25, "pot": 1735689600, "jar": 1735689600}
    assert datetime.fromisoformat(found["tea"]["properties"]["made"]).timestamp() == 1735689600.5


def test_parquet_gives_the_same_types(client: Client, url: str, tmp_path: Path) -> None:
    made = [datetime(2026, 5, 1, 8, 0, 0, 5, UTC), None]
    columns = {"item_id": ["tea", "cup"], "price": [4.5, None], "organic": [None, False], "made": made, "stock": [3, 4]}
    pl.DataFrame(columns).write_parquet(tmp_path / "items.parquet")
    assert imported(tmp_path / "items.parquet", url) == 0
    assert properties(client, "tea") == {"price": 4.5, "made": "2026-05-01T08:00:00.000005Z", "stock": 3.0}
    assert properties(client, "cup") == {"organic": False, "stock": 4.0}


@pytest.mark.parametrize(
    ("table", "declared", "says"),
    [
        ("item_id\tp\tp\na\t1\t2\n", {}, "column 'p' appears twice"),
        ("item_id\tprice\na\t1\nb\tmuch\n", {"price": "number"}, "line 3: price 'much' is not a finite number"),
        (
            "item_id\tnew\na\t1\nb\tperhaps\n",
            {"new": "boolean"},
            "line 3: new is a boolean, but 'perhaps' is neither yes nor no",
        ),
        ("item_id\tmade\na\t2026\n", {"made": "time"}, "made is neither an RFC 3339 time"),
        ("item_id\tavailable_from\na\ttomorrow\n", {}, "is neither an RFC 3339 time"),
    ],
)
def test_faults_are_named(
    client: Client,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    table: str,
    declared: dict[str, str],
    says: str,
) -> None:
    client.request("PUT", "/v1/admin/properties", json={"items": declared})
    (tmp_path / "items.tsv").write_text(table)
    assert imported(tmp_path / "items.tsv", url) == 1
    assert says in " ".join(capsys.readouterr().err.split())
    assert client.get("/v1/items/a").status_code == 404


def test_columns_that_cannot_be_properties_are_skipped_with_the_option_that_imports_them(
    client: Client, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "Artikel.csv"
    own.write_text("Nummer;Art.-Nr.;art_nr;Größe (cm);in;2;中;文;a,b;self?;Hersteller's\ntea;7;5;6;x;y;z;!;n;me;u\n")
    assert imported(own, url, "--columns", "Nummer=item_id") == 0
    assert properties(client, "tea") == {"art_nr": 5}
    (warning,) = caplog.messages
    assert "'Art.-Nr.', 'Größe (cm)', 'in', '2', '中', '文', 'a,b', 'self?', \"Hersteller's\"; to import" in warning
    _, option = shlex.split(warning[warning.index("--columns") :])
    assert option == (
        "Nummer=item_id,Art.-Nr.=art_nr_2,Größe (cm)=groesse_cm,in=_in,2=_2,中=_,文=__2,self?=self,"
        "Hersteller's=hersteller_s"
    )
    assert imported(own, url, "--columns", option) == 0
    others = {"art_nr_2": 7, "groesse_cm": 6, "_in": "x", "_2": "y", "_": "z", "__2": "!", "self": "me"}
    assert properties(client, "tea") == {"art_nr": 5, "hersteller_s": "u", **others}


def test_the_option_that_imports_columns_with_spaces_around_their_names_keeps_what_they_mean(
    client: Client, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "items.csv").write_text(
        "item_id,categories, title, price, published_at, categories\ntea,,Tea,7,2026-05-01T08:00:00Z,x\n"
    )
    assert imported(tmp_path / "items.csv", url) == 0
    _, option = shlex.split(caplog.messages[0][caplog.messages[0].index("--columns") :])
    assert imported(tmp_path / "items.csv", url, "--columns", option) == 0
    item = client.get("/v1/items/tea").json()
    assert (item["title"], item["published_at"]) == ("Tea", "2026-05-01T08:00:00Z")
    assert item["properties"] == {"price": 7.0, "_categories": "x"}


def test_errors_of_a_mapped_table_name_options_and_the_original_file(
    client: Client, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "Artikel.csv"
    own.write_text("Nummer,price\ntea,much\n")
    assert imported(own, url, "--columns", "Nummer=item_id,price=List price") == 1
    assert "--columns maps a column to 'List price', which is not a valid name" in " ".join(
        capsys.readouterr().err.split()
    )
    client.request("PUT", "/v1/admin/properties", json={"items": {"price": "number"}})
    assert imported(own, url, "--columns", "Nummer=item_id") == 1
    assert f"{own}, line 2: price 'much' is not a finite number" in " ".join(capsys.readouterr().err.split())


def test_types_are_inferred_if_the_key_cannot_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held_types("http://127.0.0.1:9") == {}
    of_others = [httpx.Response(200, content=body) for body in (b"<html>", b"[]", b"{}", b'{"items": 7}')]
    for response in (httpx.Response(403), *of_others):
        monkeypatch.setattr(httpx.Client, "get", lambda *_, response=response, **__: response)
        assert held_types("http://service", "key") == {}


def test_a_missing_key_is_reported_with_the_option(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path / "keys", make("main", scopes=["catalogue:write"])[1])
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path / "state", keys_file=tmp_path / "keys"))
    (tmp_path / "items.csv").write_text("item_id\ntea\n")
    assert imported(tmp_path / "items.csv", reached(client, monkeypatch)) == 1
    assert "pass a file with a valid key, with --key-file" in " ".join(capsys.readouterr().err.split())
    client.close()


def test_an_exhausted_quota_is_waited_for_by_retry_after(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    for module in ("replay", "import_items"):
        monkeypatch.setattr(f"app.jobs.{module}.time", clock)

    def answer(*_: object, **__: object) -> httpx.Response:
        if sum(pauses) < 65:
            return httpx.Response(429, headers={"retry-after": "58"}, json={"error": {"message": "rate limit"}})
        return httpx.Response(200, json={"unknown_items": 0})

    monkeypatch.setattr(httpx.Client, "post", answer)
    assert send([{"item_id": "tea"}], "http://service") == 0
    assert pauses == [58, 58]
    assert caplog.messages == ["waiting as long as the service asks: http://service answers 429: rate limit"]


def test_a_rejected_item_is_named(client: Client, url: str) -> None:
    items = [{"item_id": f"i{number}"} for number in range(BATCH + 2)]
    with pytest.raises(ReplayError, match=r"the first problem: item 'i501' \(row 502\): title "):
        send([*items[:-1], {"item_id": "i501", "title": 7}], url)


def test_requests_stay_within_the_body_limit(client: Client, url: str, tmp_path: Path) -> None:
    text = "x" * 1_000
    header = "\t".join(["item_id", *(f"p{number}" for number in range(20))])
    lines = ["\t".join([f"i{number}", *[text] * 20]) for number in range(120)]
    (tmp_path / "items.tsv").write_text("\n".join([header, *lines]))
    items = read(tmp_path / "items.tsv", {})
    assert [item for _, batch in _batches(items) for item in batch] == items
    assert max(len(str(batch)) for _, batch in _batches(items)) < 1.1 * BATCH_BYTES
    assert send(items, url) == 120
    assert properties(client, "i119")["p19"] == text


def test_spaces_around_separators_of_sets_are_removed(client: Client, url: str, tmp_path: Path) -> None:
    tea, categories = item_id(0), ["Tee", "Tee > Grün", "Geschenke"]
    cells = "Tee | Tee > Grün || Geschenke ,loose | green"
    (tmp_path / "items.csv").write_text(f"item_id,categories,tags\n{tea},{cells}\n")
    assert imported(tmp_path / "items.csv", url) == 0
    assert client.get(f"/v1/items/{tea}").json()["categories"] == categories
    assert properties(client, tea)["tags"] == ["green", "loose"]
    assert read_items(tmp_path).categories[tea] == tuple(categories)
    for wanted in ({"categories": ["Geschenke"]}, {"filter": 'item.categories.exists(c, c.startsWith("Tee"))'}):
        found = client.request("POST", "/v1/recommendations", json={"history": [], "k": 5, **wanted}).json()
        assert [item["item_id"] for item in found["items"]] == [tea]


@pytest.mark.parametrize("name", ["made", "available_from"])
def test_numeric_days_are_times_if_a_time_zone_is_given(name: str, tmp_path: Path) -> None:
    def sent(cells: list[str], timezone: str | None) -> tuple[list[Any], str]:
        file = tmp_path / "items.csv"
        file.write_text(f"item_id,{name}\n" + "".join(f"i{row},{cell}\n" for row, cell in enumerate(cells)))
        mapping = TableMapping(timezone=timezone, skips_bad_lines=True)
        table, remarks = table_of_items(file, mapping, tmp_path / "cache")
        values = [(item | item.get("properties", {})).get(name) for item in read(table, {}, mapping)]
        return values, "\n".join(remarks)

    days = ["2025-12-23T23:00:00.000000Z", "2026-06-30T22:00:00.000000Z", None]
    for cells in (["20251224", "20260701", ""], ["20251224000000", "20260701000000", ""]):
        values, remark = sent(cells, "Europe/Berlin")
        assert values == days
        assert f"{name} has numbers that are read as days" in remark
        assert "if they are numbers, leave out --timezone" in remark
    others, none = sent(["20251224", "20251399"], "Europe/Berlin"), sent(["20251224"], None)
    assert [float(value) for value in (*others[0], *none[0])] == [20251224, 20251399, 20251224]
    assert (others[1], none[1]) == ("", "")


def test_an_empty_table_has_no_properties(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,price\na,\n")
    assert read(tmp_path / "items.csv", {}) == [{"item_id": "a"}]
    with pytest.raises(DataError):
        read(tmp_path / "none.csv", {})


def test_the_documented_script_finds_changes(
    client: Client, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"^```python\n(import polars.*?)^```", ITEMS_PAGE.read_text(), re.DOTALL | re.MULTILINE)
    nights: list[list[dict[str, Any]]] = [
        [],
        [{"item_id": "same", "price": 1}, {"item_id": "dearer", "price": 2}, {"item_id": "gone", "price": 3}],
        [{"item_id": "same", "price": 1}, {"item_id": "dearer", "price": 4}, {"item_id": "new", "price": 5}],
        [{"item_id": "gone", "price": 3}, {"item_id": "dearer", "price": 4}],
    ]
    changes = [{"same", "dearer", "gone"}, {"dearer", "gone", "new"}, {"same", "gone", "new"}]
    for (before, now), changed in zip(pairwise(nights), changes, strict=True):
        for name, items in (("yesterday", before), ("today", now)):
            frame = pl.DataFrame(items, {"item_id": pl.String, "price": pl.Decimal(8, 2)})
            frame.with_columns(categories=pl.concat_list("item_id")).write_parquet(f"{name}.parquet")
        exec(script, {})
        assert {*pl.read_parquet("changes.parquet")["item_id"]} == changed
        assert imported(tmp_path / "changes.parquet", url) == 0
        found = {item["item_id"]: client.get(f"/v1/items/{item['item_id']}").json() for item in chain(*nights)}
        on_sale = {item_id: item["properties"]["price"] for item_id, item in found.items() if item.get("available")}
        assert on_sale == {item["item_id"]: item["price"] for item in now}
