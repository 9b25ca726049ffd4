"""Delimited text: any separator, quoting and encoding gives the same rows."""

from __future__ import annotations

import csv
import io
import os
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.arrays import IN_MEMORY, MappedArrays
from model.data.exports.checks import examine, examine_items
from model.data.exports.mapping import TableMapping
from model.data.formats.delimited_text import DelimitedText, delimited_text
from model.data.interactions import DataError
from model.data.readers import read_interactions, read_items
from model.data.table import read_table

letters = st.text(st.characters(codec="cp1252", exclude_categories=["Cc"]) | st.sampled_from('\n\r"'), max_size=12)
UMLAUTS = "Käse, für; „Größe“|5" * 10  # more than there are letters of titles, which may look like UTF-8


def written(rows: list[list[str]], separator: str, quoting: int) -> str:
    file, quote = io.StringIO(newline=""), None if quoting == csv.QUOTE_NONE else '"'
    csv.writer(file, delimiter=separator, quotechar=quote, quoting=quoting, lineterminator="\r\n").writerows(rows)  # type: ignore[arg-type]
    return file.getvalue()


@settings(max_examples=40)
@given(
    st.lists(letters, min_size=1, max_size=5),
    st.sampled_from([",", ";", "|", "\t"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252"]),
)
def test_every_separator_and_encoding_gives_the_same_titles(
    tmp_path_factory: pytest.TempPathFactory, titles: list[str], separator: str, quoting: int, encoding: str
) -> None:
    if separator == "\t":  # tabs need no quotes, and have none
        quoting, titles = csv.QUOTE_NONE, [re.sub(r"\s", " ", title) for title in titles]
    titles = [UMLAUTS, *titles]  # so that the encoding shows
    rows = [["item_id", "title"], *([f"i{row}", title] for row, title in enumerate(titles))]
    directory = tmp_path_factory.mktemp("shop")
    (directory / "items.csv").write_bytes(written(rows, separator, quoting).encode(encoding))
    assert list(read_items(directory).titles.values()) == titles


def test_a_tsv_may_use_semicolons(tmp_path: Path) -> None:
    (tmp_path / "interactions.tsv").write_text('user_id;item_id;timestamp\n"u";i;1\n')
    assert read_interactions(tmp_path).user_ids == ["u"]


cells = st.sampled_from(["", "x", "é", "x\ny"])


@settings(max_examples=60)
@given(st.lists(st.lists(cells, min_size=2, max_size=4), max_size=5), st.sampled_from(["\t", ";"]), st.booleans())
def test_only_too_short_lines_are_refused(rows: list[list[str]], separator: str, is_quoted: bool) -> None:
    quoting = csv.QUOTE_ALL if is_quoted and separator == ";" else csv.QUOTE_MINIMAL
    if separator == "\t":
        rows = [[cell.replace("\n", " ") for cell in row] for row in rows]
    texts = [written([row], separator, quoting) for row in (["a", "b", "c", "d"], *rows)]
    table = delimited_text(Path("table.tsv"), "".join(texts).encode())
    first_lines = (1 + "".join(texts[:number]).count("\n") for number in range(1, len(texts)))
    short = next((line for line, row in zip(first_lines, rows, strict=True) if len(row) < 4), None)
    if short is None:
        frame = table.frame()
        assert frame.fill_null("").rows() == [tuple(row) for row in rows]
    else:
        with pytest.raises(DataError, match=rf"line {short}: \d fields, but the header has 4"):
            table.frame()


@pytest.mark.parametrize("before", ["", "sep=,\n"])
def test_errors_name_the_line_at_which_a_row_begins(tmp_path: Path, before: str) -> None:
    table, further = tmp_path / "items.csv", before.count("\n")
    table.write_text(before + 'item_id,title,available\na,"A\n\nlong one",yes\nb,B,perhaps\nb,B,yes\n')
    with pytest.raises(DataError, match=f"line {6 + further}: item_id 'b' appears twice, first in line {5 + further}"):
        read_items(tmp_path)
    examples = [one for finding in examine_items(table, TableMapping()).findings for one in finding.examples]
    assert f"line {5 + further}: 'perhaps'" in examples


@pytest.mark.parametrize("later", [None, b"", b'"'])
def test_errors_about_a_file_that_is_not_as_it_was_read_still_say_what_is_wrong(
    tmp_path: Path, later: bytes | None
) -> None:
    path = tmp_path / "items.csv"
    path.write_text('item_id,title\na,"A\nB"\n,C\n')
    table = read_table(path, ["item_id"], ["title"])
    path.unlink()
    if later is None:
        os.mkfifo(path)  # nobody writes to it any more
    else:
        path.write_bytes(later)
    with pytest.raises(DataError, match=r"items\.csv, line 3: "):
        table.require_ids("item_id")


def test_the_name_of_a_folder_is_no_problem_of_its_table() -> None:
    for cell in ("a,b", "x" * 200_000):
        table = delimited_text(Path("fields/table.csv"), f'a,b\n"{cell}",\n'.encode())
        assert table.frame().rows() == [(cell, None)]


def test_trailing_empty_cells_need_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DelimitedText, "_lines")
    table = delimited_text(Path("table.csv"), b"a,b,c\n1,2,\n,,\n3,4,5\n")
    assert table.frame().rows() == [("1", "2", None), (None, None, None), ("3", "4", "5")]


def test_the_second_pass_copies_no_text() -> None:
    table = delimited_text(Path("table.csv"), b"a,b\n" + b'"x",\n' * 500_000)
    tracemalloc.start()
    try:
        assert next(table.broken_lines(), None) is None
        assert tracemalloc.get_traced_memory()[1] < len(table.raw) / 4
    finally:
        tracemalloc.stop()


def test_a_few_invalid_bytes_are_refused(tmp_path: Path) -> None:
    title = "Käse und Brötchen für Größen".encode()
    (tmp_path / "items.csv").write_bytes(b"item_id,title\na," + title + b"\nb,x\xff\n")
    with pytest.raises(DataError, match="line 3: not UTF-8 text"):
        read_items(tmp_path)


def test_bytes_undefined_in_windows_1252_are_refused(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_bytes("item_id,title\na,b\nc,ソーダ\n".encode("cp932"))
    with pytest.raises(DataError, match=r"line 3: neither UTF-8 nor Windows-1252 text; save it as CSV \(UTF-8\)"):
        read_items(tmp_path)


@pytest.mark.parametrize(
    ("title", "encoding", "shown"),
    [
        ("Şişe 5 €", "cp1254", "Þiþe"),
        ("שוקולד", "cp1255", "ùå÷åìã"),
        ("Grzałka 5 €", "cp1250", "Grza\u00b3ka"),
        ("Größe 5 €", "cp1252", "Größe"),
        ("5 m³", "cp1252", None),
        ("5 €", "cp1252", None),
    ],
)
def test_a_check_shows_letters_that_depend_on_the_encoding(
    tmp_path: Path, title: str, encoding: str, shown: str | None
) -> None:
    table = tmp_path / "items.csv"
    table.write_bytes(f"item_id,title\na,5 €\nb,{title}\n".encode(encoding))
    (finding,) = examine_items(table, TableMapping()).findings
    fix = f"if the letters of {shown!r} are wrong, save it as CSV (UTF-8) or Parquet" if shown else ""
    assert (finding.problem, finding.fix) == ("the encoding is Windows-1252", fix)


def test_a_check_of_windows_1252_takes_linear_time(tmp_path: Path) -> None:
    table = tmp_path / "items.csv"
    table.write_bytes(f"item_id,title\na,5 €\nb,{'0f' * 500_000}\n".encode("cp1252"))
    (finding,) = examine_items(table, TableMapping()).findings  # would take hours if each of its letters began a word
    assert (finding.problem, finding.fix) == ("the encoding is Windows-1252", "")


def test_truncated_utf_16_is_reported(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_bytes("item_id,title\na,b\n".encode("utf-16")[:-1])
    with pytest.raises(DataError, match="truncated UTF-16 text"):
        read_items(tmp_path)


def test_spaces_around_times_and_values_are_ignored(tmp_path: Path) -> None:
    lines = "user_id,item_id,timestamp,value", "ann,a, 5, 2.5 ", "ann,b,1970-01-01T00:00:06Z ,"
    (tmp_path / "interactions.csv").write_text("\n".join(lines) + "\n")
    found = read_interactions(tmp_path)
    assert found.timestamp_us.tolist() == [5_000_000, 6_000_000]


def test_remaining_quotes_are_noted(tmp_path: Path) -> None:
    rows = 'item_id,title\na,"Tea"\nb,"12"" pan"\nc,\nd,Cup "to go"\n'
    for name, separator in (("items.csv", ","), ("items.tsv", "\t")):
        (tmp_path / name).write_text(rows.replace(",", separator))
    assert not examine_items(tmp_path / "items.csv", TableMapping()).findings
    found = examine_items(tmp_path / "items.tsv", TableMapping())
    (quoted,) = found.findings
    assert (quoted.problem, quoted.stops) == ("title has quotes around the cell, and keeps them", False)
    assert quoted.examples == ["line 2: '\"Tea\"'", 'line 3: \'"12"" pan"\'']
    assert found.frame["title"][0] == '"Tea"'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "SEP=;"])
def test_the_first_line_may_name_the_separator(tmp_path: Path, line: str, encoding: str) -> None:
    text = f"{line}\r\nitem_id;title, a, b\r\nk;1\r\n"
    (tmp_path / "items.csv").write_bytes(text.replace("title, a, b", "title").encode(encoding))
    assert read_items(tmp_path).titles == {"k": "1"}
    assert delimited_text(Path("items.csv"), text.encode(encoding)).frame().columns == ["item_id", "title, a, b"]


def test_line_numbers_count_the_separator_line(tmp_path: Path) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text("sep=;\nuser_id;item_id;timestamp\nu;i;1\n;i;1\n")
    for arrays in (IN_MEMORY, MappedArrays(tmp_path / "arrays", 1)):
        with pytest.raises(DataError, match="line 4: user_id"):
            read_interactions(tmp_path, arrays)
    assert examine(table, TableMapping())["interactions"].findings[0].examples == ["line 4"]
    table.write_text("sep=;\nuser_id;item_id;timestamp\nu;i;1\nu;i\n")
    with pytest.raises(DataError, match="line 4: 2 fields"):
        read_interactions(tmp_path)
    table.write_text("sep=;\n")
    with pytest.raises(DataError, match="column 'user_id' is missing"):
        read_interactions(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04" + b"\0" * 30, "is a spreadsheet; save it as CSV (UTF-8) or Parquet"),
        (b"\xd0\xcf\x11\xe0" + b"\0" * 30, "is a spreadsheet; save it"),
        (b'{"item_id": "a"}\n', "is JSON; name it .json or .jsonl"),
        (b'\xef\xbb\xbf[\n {"item_id": "a"}]', "is JSON; name it"),
    ],
)
def test_other_files_are_refused_with_a_suggested_format(tmp_path: Path, content: bytes, says: str) -> None:
    for name in ("items.csv", "items.tsv", "items.xlsx"):
        with pytest.raises(DataError, match=re.escape(f"{name} {says}")):
            delimited_text(tmp_path / name, content)
    (tmp_path / "interactions.xlsx").write_bytes(content)
    with pytest.raises(DataError, match=re.escape("interactions.xlsx cannot be read; save it as CSV (UTF-8) or Parqu")):
        read_interactions(tmp_path)


def test_text_in_another_encoding_is_refused_with_a_remedy(tmp_path: Path) -> None:
    content = "item_id\ttitle\nk\tKäse\n".encode("cp1252")
    (tmp_path / "items.tsv").write_bytes(content)
    with pytest.raises(DataError, match=r"line 2: not UTF-8 text; save it as UTF-8, or name it \.csv"):
        read_items(tmp_path)
    (tmp_path / "items.tsv").rename(tmp_path / "items.csv")
    assert read_items(tmp_path).titles == {"k": "Käse"}
