"""Exports of shops: `lisarec check` lists all problems at once, and the options that it suggests fix them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import polars as pl
import pytest

from app.cli.console import console
from app.cli.main import main
from app.jobs.datasets.mapped_copy import data_directory, table_of_items
from app.jobs.import_items import read
from model.data.arrays import MappedArrays
from model.data.exports.checks import examine_items
from model.data.exports.mapping import TableMapping
from model.data.interactions import DataError, Interactions
from model.data.readers import read_interactions, read_items
from model.training import train
from model.training.distributed.processes import Processes
from tests.app.support import run_command

EVENTS = """\ufeffKundennummer;Artikel;Bestelldatum;Aktion;Preis;Rechnung
4711;"KÄSE\x07-1";24.12.2025 18:30;purchase;1.299,00 €;R1
4711;K-2;24.12.2025 18:31;purchase;6,50 €;R1

4712;K-2;25.12.2025 08:00;purchase;6,50 €;R2
4712;K-2;25.12.2025 08:00;purchase;6,50 €;R2
;K-2;25.12.2025 09:00;view;;
4713;K-2;25.12.2025 09:00;bestaunt;zehn;
4713;K-2;Heiligabend;view;;
4713;K-2;01.01.2999;view;-1,00;
Kundennummer;Artikel;Bestelldatum;Aktion;Preis;Rechnung
4714;K-2;25.12.2025 09:00
"""
ITEMS = (
    'Artikel;Bezeichnung;Preis;Neu ab\nK-1;"Käse; mild";1.299,00 €;01.12.2025 00:00\nK-2;Brot;6,50 €;02.12.2025 00:00\n'
)
COLUMNS = {
    "Kundennummer": "user_id",
    "Artikel": "item_id",
    "Bestelldatum": "timestamp",
    "Aktion": "type",
    "Preis": "value",
    "Rechnung": "order_id",
}
OPTIONS = ["--columns", ",".join(f"{own}={name}" for own, name in COLUMNS.items())]
OPTIONS += ["--timezone", "Europe/Berlin", "--decimal", ","]
GERMAN = TableMapping(COLUMNS, "Europe/Berlin", ",")


def shop(directory: Path, events: str = EVENTS) -> Path:
    (directory / "interactions.csv").write_bytes(events.encode("utf-8"))
    (directory / "items.csv").write_bytes(ITEMS.encode("cp1252"))
    return directory


def checked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    return run_command("check", *arguments), capsys.readouterr().out.splitlines()


def events_of(found: Interactions) -> list[tuple[object, ...]]:
    return [
        (
            found.user_ids[found.user[row]],
            found.item_ids[found.item[row]],
            found.type_names[found.type[row]],
            float(found.value[row]),
            found.order_id(row),
            int(found.timestamp_us[row]) // 1_000_000,
        )
        for row in range(len(found))
    ]


def test_all_problems_are_listed_at_once_with_counts_examples_and_fixes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = checked(capsys, shop(tmp_path), *OPTIONS)
    assert status == 1
    about = "\n".join(lines)
    for expected in (
        "interactions.csv: 11 lines of interactions, 4 of them readable",
        "note: 1 line: the line is empty and is skipped (line 4)",
        "error: 1 line: the line has 3 fields, but the header has 6 (line 12)",
        "error: 1 line: the header is repeated (line 11)",
        "error: 1 line: user_id is empty (line 7)",
        "error: 1 line: item_id is not a valid id (line 2: 'KÄSE\\x07-1') -> use 1 to 128",
        "error: 1 line: timestamp is not a valid time (line 9: 'Heiligabend')",
        "note: 1 line: timestamp is in the future (line 10: '01.01.2999')",
        "error: 1 line: value is not a number (line 8: 'zehn')",
        "note: 1 line: value is negative (line 10: '-1,00')",
        "note: 1 line: the line repeats an earlier one (line 6)",
        "items.csv: 2 lines of items, 2 of them readable",
        "note: the encoding is Windows-1252",
    ):
        assert expected in about, expected


def test_missing_columns_are_named_with_the_option_that_maps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = checked(capsys, shop(tmp_path))
    assert status == 1
    (missing,) = [line for line in lines if "no user_id" in line]
    assert "no user_id and no item_id and no timestamp; it has 'Kundennummer', 'Artikel'" in missing
    assert "--columns 'Kundennummer=user_id,Artikel=item_id,Bestelldatum=timestamp'" in missing
    assert "of them readable" not in "".join(lines)  # nobody knows before the columns have names


@pytest.mark.parametrize(
    ("header", "is_of_items"),
    [
        ("Artikelnummer;Bezeichnung;Preis", True),
        ("item_id;title;created_at", True),
        ("SKU;NAME;Warengruppe", True),
        ("Artikelnummer;Kunde;Datum", False),
        ("item_id;title;timestamp", False),
        ("Nummer;Bezeichnung;Preis", False),
    ],
)
def test_a_table_of_items_is_distinguished_from_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: str, is_of_items: bool
) -> None:
    table = tmp_path / "items.csv"
    rows = [f"{number}/{number};a;b\n" for number in range(12)]
    table.write_text(f"{header}\n" + "".join(rows))
    status, lines = checked(capsys, table)
    about = "\n".join(lines)
    assert (status, "this looks like a table of items" in about) == (1, is_of_items)
    assert (f"'lisarec check {tmp_path}'" in about) == is_of_items
    assert (f"'lisarec items import {table}'" in about) == is_of_items
    table.write_text(f"{header}\n" + rows[0] * 2 + "".join(rows))  # events are of items that come again
    assert "this looks like" not in "\n".join(checked(capsys, table)[1])


def test_every_suggested_option_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = "user_id;item_id;timestamp;type;value\nu;i;24.12.2025 18:30;cart_add;1,50\nu;j;24.12.2025 18:31;view;2\n"
    table = tmp_path / "events.csv"
    table.write_text(events)
    status, lines = checked(capsys, table)
    assert status == 1
    about = "\n".join(lines)
    assert "2 lines: timestamp has no time zone (line 2: '24.12.2025 18:30'; line 3" in about
    assert "--timezone Europe/Berlin" in about
    status, lines = checked(capsys, table, "--timezone", "UTC")
    assert (
        "1 line: value is not a plain number (line 2: '1,50') -> pass the decimal separator: --decimal ','"
        in "\n".join(lines)
    )
    status, lines = checked(capsys, table, "--timezone", "UTC", "--decimal", ",")
    assert status == 0
    assert "1 line: type is none of" in "\n".join(lines)
    assert "--event-weight cart_add=1" in "\n".join(lines)
    assert (
        f"lisarec train --data {table} --timezone UTC --decimal , --event-weight cart_add=1 --out models/shop"
        in lines[-1]
    )


def test_a_nonexistent_local_time_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "events.csv"
    table.write_text("user_id,item_id,timestamp\nu,i,31.03.2024 02:30\nu,i,31.03.2024 03:30\n")
    status, lines = checked(capsys, table, "--timezone", "Europe/Berlin")
    assert status == 1
    assert "error: 1 line: this timestamp does not exist in Europe/Berlin" in lines[1]
    assert "(line 2: '31.03.2024 02:30') -> check the time zone, which may be UTC" in lines[1]
    assert checked(capsys, table, "--timezone", "UTC")[0] == 0


def test_a_mapped_export_reads_like_a_data_directory(tmp_path: Path) -> None:
    lines = EVENTS.splitlines()
    whole = "\n".join([lines[0], lines[1].replace("KÄSE\x07", "K"), *lines[2:5]]) + "\n"
    directory, left_out = data_directory(shop(tmp_path, whole), GERMAN, tmp_path / "cache")
    assert left_out == [f"{tmp_path / 'interactions.csv'}: 1 of 4 lines are skipped; 'lisarec check' lists them"]
    assert events_of(read_interactions(directory)) == [
        ("4711", "K-1", "purchase", 1299.0, "R1", 1766597400),
        ("4711", "K-2", "purchase", 6.5, "R1", 1766597460),
        ("4712", "K-2", "purchase", 6.5, "R2", 1766646000),
    ]
    again, _ = data_directory(tmp_path, GERMAN, tmp_path / "cache")
    assert read_interactions(again).sha256 == read_interactions(directory).sha256


def test_bad_lines_of_a_single_table_may_be_skipped(tmp_path: Path) -> None:
    table = tmp_path / "export.csv"
    table.write_text(EVENTS.removeprefix("\ufeff"))
    with pytest.raises(DataError) as refused:
        data_directory(table, GERMAN, tmp_path / "cache")
    for problem in (
        "user_id is empty",
        "item_id is not a valid id",
        "timestamp is not a valid time",
        "value is not a number",
    ):
        assert problem in str(refused.value)
    tolerant = TableMapping(COLUMNS, "Europe/Berlin", ",", skips_bad_lines=True)
    directory, left_out = data_directory(table, tolerant, tmp_path / "cache")
    assert "7 of 11 lines are skipped" in left_out[0]
    assert left_out[1:] == [f"warning: {table}: 60% of the lines are unreadable and are skipped"]
    found = read_interactions(directory)
    assert found.user_ids == ["4711", "4712", "4713"]
    assert len(found) == 4


def test_skipped_lines_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = checked(capsys, shop(tmp_path), *OPTIONS, "--skip-bad-lines")
    assert status == 0
    about = "\n".join(lines)
    assert "left out: 1 line: user_id is empty (line 7) -> correct these lines to keep them" in about
    assert "or skip them" not in about
    assert lines[-2] == f"warning: {tmp_path / 'interactions.csv'}: 60% of the lines are unreadable and are skipped"


def shop_with_items(directory: Path, items: str) -> Path:
    events = "user_id,item_id,timestamp\n" + "".join(f"u,i{number},{number}\n" for number in range(20))
    (directory / "interactions.csv").write_text(events)
    (directory / "items.csv").write_text("item_id,available\n" + items)
    return directory


def test_a_stock_count_is_distinguished_from_booleans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = checked(capsys, shop_with_items(tmp_path, "i1,27\ni2,1\ni3,0\ni4,perhaps\n"))
    assert status == 1
    about = "\n".join(lines)
    assert "1 line: available is a count, not yes or no (line 2: '27') -> map the column to another name" in about
    assert "1 line: available is neither yes nor no; write true or false (line 5: 'perhaps')" in about


@pytest.mark.parametrize("options", [(), ("--skip-bad-lines",)])
def test_a_table_of_items_without_a_readable_line_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    data = shop_with_items(tmp_path, "i1,perhaps\ni2,perhaps\n")
    status, lines = checked(capsys, data, *options)
    assert status == 1
    about = "\n".join(lines)
    assert "items.csv: 2 lines of items, 0 of them readable" in about
    assert "error: 2 lines: available is neither yes nor no; write true or false (line 2: 'perhaps'; line 3" in about
    assert "error: no line is readable" in about
    assert "is not in items.csv" not in about
    tolerant, problem = TableMapping(skips_bad_lines=True), "2 lines: available is neither yes nor no"
    with pytest.raises(DataError, match=problem):
        data_directory(data, tolerant, tmp_path)
    with pytest.raises(DataError, match=problem):
        table_of_items(data / "items.csv", tolerant, tmp_path)


def test_items_of_skipped_lines_are_not_reported_as_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"i{number},yes\n" for number in range(17)) + "i17,perhaps\ni18,perhaps\n"
    about = "\n".join(checked(capsys, shop_with_items(tmp_path, lines), "--skip-bad-lines")[1])
    assert "note: 1 line: the item is not in items.csv (line 21: 'i19') -> such items are learned" in about
    assert "warning: " in about
    lines = "i1,yes\n" + "i2,perhaps\n" * 2
    assert "is not in" not in "".join(checked(capsys, shop_with_items(tmp_path, lines), "--skip-bad-lines")[1])


def test_booleans_of_six_languages_are_read(tmp_path: Path) -> None:
    yes = ("true", "1", "x", "Yes", "JA", "oui", "sí", "SÌ", "Si", "WAHR")
    no = ("false", "0", "no", "Nein", "non", "nee", "FALSCH")
    (tmp_path / "items.csv").write_text(
        "item_id,available\n" + "".join(f"i{row},{cell}\n" for row, cell in enumerate((*yes, *no, "")))
    )
    found = [item.get("available") for item in read(tmp_path / "items.csv", {})]
    assert found == [True] * len(yes) + [False] * len(no) + [None]
    assert not examine_items(tmp_path / "items.csv", TableMapping()).findings


def test_items_are_imported_with_numbers_and_times(tmp_path: Path) -> None:
    names = {"Artikel": "item_id", "Bezeichnung": "title", "Preis": "price", "Neu ab": "published_at"}
    mapping = TableMapping(names, "Europe/Berlin", ",")
    table, _ = table_of_items(shop(tmp_path) / "items.csv", mapping, tmp_path / "cache")
    assert read(table, {}) == [
        {
            "item_id": "K-1",
            "title": "Käse; mild",
            "published_at": "2025-11-30T23:00:00.000000Z",
            "properties": {"price": 1299.0},
        },
        {
            "item_id": "K-2",
            "title": "Brot",
            "published_at": "2025-12-01T23:00:00.000000Z",
            "properties": {"price": 6.5},
        },
    ]
    assert read_items(table.parent).titles == {"K-1": "Käse; mild", "K-2": "Brot"}


def test_a_skipped_line_does_not_turn_prices_into_texts(tmp_path: Path) -> None:
    lines = [
        "item_id;title;price",
        "K-1;Bank;1.299,00 €",
        "item_id;title;price",
        "K-2;Tisch; rund;99,00 €",
        "K-3;Uhr;5",
    ]
    (tmp_path / "items.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    mapping = TableMapping(decimal=",", skips_bad_lines=True)
    table, _ = table_of_items(tmp_path / "items.csv", mapping, tmp_path / "cache")
    prices = {item["item_id"]: item["properties"]["price"] for item in read(table, {})}
    assert prices == {"K-1": 1299.0, "K-3": 5.0}


def test_a_plain_parquet_file_is_not_copied(tmp_path: Path) -> None:
    table = tmp_path / "events.parquet"
    frame = pl.DataFrame({"user_id": ["u", "v"], "item_id": ["i", "j"], "timestamp": [1, 2], "others": [["x"], []]})
    frame.write_parquet(table)
    directory, left_out = data_directory(table, TableMapping(), tmp_path / "cache")
    assert (left_out, [file.name for file in directory.iterdir()]) == ([], ["interactions.parquet"])
    found = read_interactions(directory, MappedArrays(tmp_path / "arrays", 1))
    assert (found.user_ids, found.sha256) == (["u", "v"], hashlib.sha256(table.read_bytes()).hexdigest())
    frame.with_columns(user_id=pl.lit("")).write_parquet(table)
    with pytest.raises(DataError, match=rf"^{re.escape(str(table))}, row 1: user_id '' is not an id"):
        read_interactions(directory)
    frame.rename({"user_id": "customer"}).write_parquet(table)
    with pytest.raises(DataError, match="--columns 'customer=user_id'"):
        data_directory(table, TableMapping(), tmp_path / "cache")


def test_only_one_of_several_processes_reads_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(data: Path, *_: object, **__: object) -> None:
        raise ValueError(f"training on {data}")

    monkeypatch.setattr(train, "train", trained)
    monkeypatch.setattr(Processes, "joined", lambda: Processes(1, 2))
    monkeypatch.setattr(console, "quiet", False)  # the command sets it; later tests read what commands print
    table = tmp_path / "events.csv"
    table.write_text("no table\n")
    with pytest.raises(SystemExit):
        main(["train", "--data", str(table), "--out", str(tmp_path / "model"), "--timezone", "UTC"])
    assert f"lisarec: training on {table}" in capsys.readouterr().err


def test_a_plain_data_directory_is_not_copied(tmp_path: Path) -> None:
    assert data_directory(tmp_path, TableMapping(), tmp_path / "cache") == (tmp_path, [])
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--columns", "Kunde"], "OWN=NAME"),
        (["--columns", "a=user_id,b=user_id"], "each name to one column"),
        (["--timezone", "Berlin"], "'Berlin' is not a known time zone; use a name such as Europe/Berlin"),
        (["--decimal", "x"], "--decimal"),
    ],
)
def test_empty_options_are_refused(
    tmp_path: Path, arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("train", "--data", tmp_path, "--out", tmp_path / "m", *arguments) == 2
    assert hint in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_an_unknown_column_is_named_with_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--data", str(shop(tmp_path)), "--columns", "Kundennumer=user_id"])
    assert "--columns names 'Kundennumer', but no table has this column; did you mean 'Kundennummer'?" in (
        capsys.readouterr().err
    )


def test_commands_read_the_mapped_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by_training: list[Interactions] = []

    def stop(directory: Path, *_: object, **__: object) -> None:
        read_by_training.append(read_interactions(directory))
        raise DataError("far enough")

    monkeypatch.setattr("model.training.train.train", stop)
    monkeypatch.setenv("LISAREC_CACHE_DIR", str(tmp_path / "cache"))
    assert run_command("train", "--data", shop(tmp_path), "--out", tmp_path / "m", *OPTIONS, "--skip-bad-lines") == 1
    (found,) = read_by_training
    assert found.user_ids == ["4711", "4712", "4713"]


def test_an_import_warns_of_ambiguous_columns(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id;kg;price\na;1.299;12,50\nb;2.450;9,90\n")
    _, said = table_of_items(tmp_path / "items.csv", TableMapping(decimal=","), tmp_path / "cache")
    (warning,) = said
    assert "2 lines: kg has '.' only before three digits, so it separates thousands (line 2: '1.299'; " in warning
