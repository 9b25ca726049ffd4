"""Event types of a shop: `--types` translates them."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.jobs.datasets.mapped_copy import data_directory, table_of_items
from lisarec.tables import directory_of
from model.config import EVENT_WEIGHTS
from model.data.exports.mapping import TableMapping, parse_types
from model.data.interactions import DataError
from model.data.readers import read_interactions
from tests.app.support import run_command

OWN = ["Kauf", "Ansicht", "Merk=Zettel", "view", ""]
HEADER = "user_id,item_id,timestamp,type\n"


def types_of(directory: Path, types: dict[str, str], cache: Path) -> list[str]:
    mapping = TableMapping(timezone="UTC", types=types)
    copy, _ = data_directory(directory, mapping, cache)
    return pl.read_csv(copy / "interactions.csv")["type"].to_list()


def checked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = run_command("check", *arguments)
    said = capsys.readouterr()
    return status, said.out + said.err


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(OWN), min_size=1, max_size=8),
    st.dictionaries(st.sampled_from(OWN[:-1]), st.sampled_from(["purchase", "like"]), min_size=1),
    st.sampled_from([None, "view", "cart"]),
)
def test_each_line_gets_its_translated_type(
    tmp_path: Path, own: list[str], types: dict[str, str], others: str | None
) -> None:
    (tmp_path / "interactions.csv").write_text(HEADER + "".join(f"u,i,{n},{one}\n" for n, one in enumerate(own)))
    every_other = {} if others is None else {"*": others}
    expected = [types.get(one, one if others is None else others) for one in own]
    if {"", "Merk=Zettel"} & set(expected):
        with pytest.raises(DataError, match=r"type is (empty|not a valid id)"):
            types_of(tmp_path, types | every_other, tmp_path / "cache")
    else:
        assert types_of(tmp_path, types | every_other, tmp_path / "cache") == expected


def test_a_table_without_types_gets_one_type(tmp_path: Path) -> None:
    (tmp_path / "interactions.csv").write_text("user_id,item_id,timestamp\nu,i,1\nu,j,2\n")
    assert types_of(tmp_path, {"*": "purchase"}, tmp_path / "cache") == ["purchase"] * 2
    with pytest.raises(DataError, match=r"--types translates types, but the header has no type.*--types '\*=purchase'"):
        types_of(tmp_path, {"Kauf": "purchase"}, tmp_path / "cache")


def test_the_check_names_untranslated_and_unused_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text(HEADER + "u,i,1,Kauf\nu,j,2,Kauf\n")
    assert "translate them: --types Kauf=purchase\n" in checked(capsys, table)[1]
    code, said = checked(capsys, table, "--types", "Kauf=purchase,Retoure=return")
    assert (code, "no line has the type 'Retoure'" in said) == (0, True)
    assert "--types Kauf=purchase,Retoure=return" in said.rpartition("Next: ")[2]
    code, said = checked(capsys, table, "--types", "Kuaf=purchase,*=view")
    assert (code, "no line has the type 'Kuaf', which --types names -> did you mean 'Kauf'?" in said) == (1, True)


def test_empty_and_invalid_types_must_be_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text(HEADER + "u,i,1,\nu,j,2,In den Warenkorb\n")
    said = checked(capsys, table)[1]
    assert "type is empty (line 2) -> name these, too: --types '*=view'" in said
    assert "translate it with --types OWN=TYPE" in said
    assert checked(capsys, table, "--types", "In den Warenkorb=cart,*=view")[0] == 0


def test_naming_empty_types_keeps_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text(HEADER + "u,i,1,\nu,j,2,purchase\nu,k,3,own\n")
    assert "name these, too: --types 'own=own,purchase=purchase,*=view'" in checked(capsys, table)[1]
    types = {"own": "own", "purchase": "purchase", "*": "view"}
    assert types_of(tmp_path, types, tmp_path / "cache") == ["view", "purchase", "own"]


def test_a_translated_type_is_not_reported_as_a_misspelling(tmp_path: Path) -> None:
    (tmp_path / "interactions.csv").write_text(HEADER + "u,i,1,Verkauf\n")
    types = {"Kauf": "purchase", "Verkauf": "purchase"}  # on a day without the first
    assert types_of(tmp_path, types, tmp_path / "cache") == ["purchase"]


def test_a_possible_type_column_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "bewegungen.csv"
    table.write_text("Kunde,ArtNr,Datum,Vorgang\n7,12/3,2025-12-24 18:30,Kauf\n")
    assert "--columns 'Kunde=user_id,ArtNr=item_id,Datum=timestamp'" in checked(capsys, table)[1]
    columns = "Kunde=user_id,ArtNr=item_id,Datum=timestamp"
    said = checked(capsys, table, "--timezone", "UTC", "--columns", columns)[1]
    assert f"every line is a click, and 'Vorgang' may have types -> map it: --columns '{columns},Vorgang=type'" in said
    mapped = checked(capsys, table, "--timezone", "UTC", "--columns", f"{columns},Vorgang=type")[1]
    assert "every line is a click" not in mapped


def test_the_suggested_command_weights_every_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text(HEADER + "".join(f"u,i,{row},own-{row}\n" for row in range(30)))
    options = checked(capsys, table)[1].rpartition("Next: ")[2]
    assert all(f"--event-weight own-{row}=1" in options for row in range(30))


def test_a_type_whose_values_are_all_negative_is_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "interactions.csv"
    returns = "u;i;3;Retoure;-5,00\nu;i;4;Retoure;-2,50\nu;i;5;Retoure;\n"
    table.write_text(f"{HEADER.strip().replace(',', ';')};value\nu;i;1;Kauf;5,00\nu;i;2;Storno;-1\n{returns}")
    code, said = checked(capsys, table, "--decimal", ",")
    assert code == 0
    assert "translate them: --types Kauf=purchase, and pass weights of the others" in said
    options = said.rpartition("Next: ")[2]
    assert "--types Kauf=purchase " in options
    assert all(f"--event-weight {option} " in options for option in ("Retoure=0", "Storno=0"))
    said = checked(capsys, table, "--decimal", ",", "--types", "Kauf=purchase")[1]
    assert "-> pass their weights for training, 0 to ignore a type: --event-weight Retoure=0" in said


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        (["View", "AddToCart", "Purchase", "Like", "Dislike"], ["view", "cart", "purchase", "like", "dislike"]),
        (["view_item", "add_to_cart", "add_to_wishlist", "view_item_list"], ["view", "cart", "like", "impression"]),
        (["read", "buy", "star"], ["view", "purchase", "like"]),
        (["detail-view", "CartAddition"], ["view", "cart"]),
    ],
)
def test_the_suggested_command_translates_types_with_other_names(
    own: list[str], ours: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text(HEADER + "".join(f"u,i,{row},{one}\n" for row, one in enumerate([*own, "watch"])))
    types = ",".join(f"{one}={other}" for one, other in zip(own, ours, strict=True))
    assert f"--types {types} --event-weight watch=1 --out" in checked(capsys, table)[1].rpartition("Next: ")[2]


def test_impressions_need_no_weight_and_are_not_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text(HEADER + "u,i,1,view\nu,j,2,impression\nu,k,3,view\n")
    said = checked(capsys, table)[1]
    assert "type is none of" not in said
    assert "--event-weight" not in said
    found = read_interactions(tmp_path)
    for weights in (EVENT_WEIGHTS, {**EVENT_WEIGHTS, "impression": 1.0}):
        stepping = found.stepping(weights)
        assert [stepping.item_ids[row] for row in stepping.item] == ["i", "k"]


def test_the_python_api_accepts_the_same_types(tmp_path: Path) -> None:
    (tmp_path / "interactions.csv").write_text(HEADER + "u,i,1,Kauf\nu,j,2,\n")
    with directory_of(tmp_path, {"types": {"Kauf": "purchase", "*": "view"}}) as directory:
        assert pl.read_csv(directory / "interactions.csv")["type"].to_list() == ["purchase", "view"]


@pytest.mark.parametrize("text", ["Kauf", "=purchase", "Kauf=", "Kauf=purchase,Kauf=view", "Kauf=Käufe"])
def test_a_translation_without_effect_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"OWN=TYPE|give each type one name|not a type of event"):
        parse_types([text])


def test_an_import_of_items_accepts_the_mapping_of_the_whole_shop(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("ArtNr,Marke\n1/2,Haus\n")
    columns = {"Kunde": "user_id", "ArtNr": "item_id", "Datum+Uhrzeit": "timestamp", "Vorgang": "type"}
    table, _ = table_of_items(tmp_path / "items.csv", TableMapping(columns), tmp_path / "cache")
    assert pl.read_csv(table).rows() == [("1/2", "Haus")]
    for wrong in ({"Preis": "price"}, {"marke": "type"}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            table_of_items(tmp_path / "items.csv", TableMapping(columns | wrong), tmp_path / "cache")


def test_an_import_of_items_accepts_event_columns_with_similar_names(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("Artikelnummer,Erstelldatum\nA,heute\n")
    columns = {"Bestellnummer": "order_id", "Artikelnummer": "item_id", "Bestelldatum": "timestamp"}
    table, _ = table_of_items(tmp_path / "items.csv", TableMapping(columns), tmp_path / "cache")
    assert pl.read_csv(table).rows() == [("A", "heute")]
