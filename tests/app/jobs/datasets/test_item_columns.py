"""Tables that name items or availability in other ways, such as `orders.product_id`."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from app.cli.main import main
from app.jobs.datasets.mapped_copy import data_directory, table_of_items
from app.jobs.import_items import read
from model.data.exports.mapping import TableMapping, parse_columns
from model.data.interactions import DataError
from model.data.readers import read_interactions, read_items

COLUMNS = "customer=user_id,product_id=item_id,id=item_id,at=timestamp,name=title"
LINES = "id,customer,product_id,at\n9001,ann,tea,1700000000\n9002,bob,cup,1700000060\n"


def shop(directory: Path) -> Path:
    (directory / "interactions.csv").write_text(LINES)
    (directory / "items.csv").write_text("id,name\ntea,Green tea\ncup,Blue cup\n")
    return directory


def test_each_table_uses_its_first_mapped_item_column(tmp_path: Path) -> None:
    mapping = TableMapping(parse_columns([COLUMNS]))
    directory, said = data_directory(shop(tmp_path), mapping, tmp_path / "cache")
    assert read_interactions(directory).item_ids == ["tea", "cup"]
    assert read_items(directory).titles == {"tea": "Green tea", "cup": "Blue cup"}
    assert not said
    table, _ = table_of_items(tmp_path / "items.csv", mapping, tmp_path / "cache")
    assert pl.read_csv(table).rows(named=True)[0] == {"item_id": "tea", "title": "Green tea"}


def test_an_import_of_items_still_needs_a_column_of_its_own(tmp_path: Path) -> None:
    mapping = TableMapping(parse_columns(["product_id=item_id,nr=item_id"]))
    with pytest.raises(DataError, match="'product_id', but no table has this column"):
        table_of_items(shop(tmp_path) / "items.csv", mapping, tmp_path / "cache")


def test_an_import_names_columns_that_cannot_be_properties(tmp_path: Path) -> None:
    table = tmp_path / "items.jsonl"
    table.write_text('{"sku": "tea", "brand": "Hill", "parts": [{"name": "bag"}], "sizes": [40, 41]}\n')
    _, said = table_of_items(table, TableMapping({"sku": "item_id"}), tmp_path / "cache")
    assert said == [
        f"warning: {table}: column {name!r} has neither numbers nor texts, and is not read"
        for name in ("parts", "sizes")
    ]


def test_a_suggested_option_keeps_both_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shop(tmp_path) / "interactions.csv").write_text(LINES.replace("at\n", "at,event\n").replace("00\n", "00,view\n"))
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path), "--columns", COLUMNS])
    assert f"--columns '{COLUMNS},event=type'" in capsys.readouterr().out


def test_a_column_of_a_missing_items_table_is_distinguished_from_a_misspelling(tmp_path: Path) -> None:
    (shop(tmp_path) / "items.csv").unlink()
    mapping = TableMapping(parse_columns([COLUMNS.replace("name=title", "price=cost")]))
    with pytest.raises(DataError, match=r"'price' to cost, a column of a table of items, .*items\.csv"):
        data_directory(tmp_path, mapping, tmp_path / "cache")
    mapping = TableMapping(parse_columns([COLUMNS.replace("name=title", "Customer=brand")]))
    with pytest.raises(DataError, match="did you mean 'customer'"):
        data_directory(tmp_path, mapping, tmp_path / "cache")


def test_categories_with_other_separators_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = ("Tea", "Tea|Home > Cups", "Home > Tea", '"Tea, green"', "Tea;Cups")
    lines = [f"{name},{cell}\n" for name, cell in zip(("tea", "cup", "pot", "can", "jar"), cells, strict=True)]
    (shop(tmp_path) / "items.csv").write_text("".join(["id,categories\n", *lines]))
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path), "--columns", COLUMNS.replace(",name=title", "")])
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "one category" in line]
    assert note.strip().startswith("note: 3 lines: ")
    assert "4: 'Home > Tea'" in note
    assert "write Home|Tea" in note


def test_a_column_may_mark_unavailable_items(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("sku,hidden\na,true\nb,No\nc,\nd,false\n")
    hidden, shown = ({"sku": "item_id", "hidden": name} for name in ("unavailable", "available"))
    table, remarks = table_of_items(tmp_path / "items.csv", TableMapping(hidden), tmp_path / "cache")
    assert [item.get("available") for item in read(table, {})] == [False, True, None, True]
    assert not remarks
    (tmp_path / "items.csv").write_text("sku,hidden\na,true\nb,No\nc,no\n")
    table, (remark,) = table_of_items(tmp_path / "items.csv", TableMapping(shown), tmp_path / "cache")
    assert [item["available"] for item in read(table, {})] == [True, False, False]
    assert "2 lines: the item is not available, as are most (line 3; line 4) -> if 'hidden' says the opposite" in remark
    assert "map it: --columns 'sku=item_id,hidden=unavailable'" in remark
    (tmp_path / "items.csv").write_text("sku,hidden,available\na,true,true\nb,perhaps,no\n")
    with pytest.raises(DataError, match="columns are both available and unavailable -> map one of them"):
        table_of_items(tmp_path / "items.csv", TableMapping(hidden), tmp_path / "cache")
    (tmp_path / "items.csv").write_text("sku,hidden\na,true\nb,perhaps\n")
    with pytest.raises(DataError, match=r"neither yes nor no.*line 3: 'perhaps'"):
        table_of_items(tmp_path / "items.csv", TableMapping(hidden), tmp_path / "cache")
