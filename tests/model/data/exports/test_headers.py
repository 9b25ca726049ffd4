"""Tables without a header or with an unsupported separator."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.data.exports.checks import examine
from model.data.exports.mapping import TableMapping

NAMES = "put a line of names above it, or in its place, such as user_id,item_id,timestamp"
SEPARATORS = "separate the columns with commas, semicolons, tabs or |"


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("A39,0205616461,5.0,1369699200\n", "the first line has values, such as '0205616461'", NAMES),
        ("ann;tea;24.12.2025 18:30\n", "the first line has values, such as '24.12.2025 18:30'", NAMES),
        ("1::1193::5::978300760\n", "the header has no user_id and no item_id and no timestamp", SEPARATORS),
        (
            "Name,Email,Created at,Lineitem sku\n",
            "the header has no user_id and no item_id and no timestamp",
            "map the columns: --columns 'Email=user_id,Lineitem sku=item_id,Created at=timestamp'",
        ),
        (
            "event_timestamp,event_name,user_pseudo_id,items.item_id\n",
            "the header has no user_id and no item_id and no timestamp",
            "--columns 'user_pseudo_id=user_id,items.item_id=item_id,event_timestamp=timestamp'",
        ),
        ("Customer,Number,When\n", "the header has no user_id and no item_id and no timestamp", "map the columns"),
    ],
)
def test_the_first_line_is_shown_if_it_is_no_header(tmp_path: Path, text: str, problem: str, fix: str) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text(2 * text)
    finding = next(one for one in examine(table, TableMapping()).popitem()[1].findings if one.stops and not one.count)
    assert problem in finding.problem
    assert fix in finding.fix
