"""Reference pages match the code: generated pages and written ones."""

from __future__ import annotations

import ast
import re
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from zlib import crc32

import numpy as np
import pytest

import app.errors
import app.schemas
from app.events.recommendation_ids import RecommendationIds
from app.http.auth import keys, sealed_states
from app.http.auth.keys import SCOPES, Key
from app.http.error_responses import FRAMEWORK_PROBLEMS, PROBLEMS, STORAGE_REASONS
from app.http.protocol import MAX_HEADERS, MAX_PIPELINED
from app.jobs.lists.resumable_parquet import SCHEMA as LISTS_SCHEMA
from app.jobs.retraining.report import RoundOutcome
from app.main import IDLE_TIMEOUT_S, create_app
from app.schemas import event_rules, events, fields, items, limits, properties, recommendations, scenarios
from app.settings import Settings
from model.artifact import model_directory
from model.config import MECHANISMS, PRESETS, Protocol, SeenRule
from storage import records
from storage.archive import manifest
from storage.maintenance import backup_format
from storage.redis.layout import keys as redis_keys
from storage.sqlite import schema
from storage.state import layout, portable_state, record_encoding
from storage.state.record_encoding import COLUMNS
from website.generated_pages import PAGES, REFERENCE

ROOT = Path(__file__).parents[2]
METHODS = ("get", "put", "post", "delete")
OPERATION = re.compile(r"`(GET|PUT|POST|DELETE) (/[^`]*)`")


def page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert page(name) == PAGES[name](), "run: python -m website"


@pytest.mark.parametrize("name", PAGES)
def test_every_row_has_a_description(name: str) -> None:
    rows = [line for line in page(name).splitlines() if line.startswith("| `") or line.startswith("| [`")]
    assert len(rows) > 30
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize("name", ["host", "port", "workers", "device", "data_dir", "log_format"])
def test_options_of_the_service_show_their_defaults(name: str) -> None:
    section = page("command-line.md").partition("\n## lisarec serve\n")[2].partition("\n## ")[0]
    (row,) = re.findall(rf"^\| `--{name.replace('_', '-')}` .*$", section, re.MULTILINE)
    assert re.search(rf"Default: .*\b{re.escape(str(Settings.model_fields[name].default))}\. \|$", row)


DOCUMENT: Mapping[str, Any] = create_app(Settings()).openapi()
OPERATIONS: Mapping[str, Any] = {
    f"{method.upper()} {path}": operations[method]
    for path, operations in DOCUMENT["paths"].items()
    for method in METHODS
    if method in operations
}
SECTIONS: Mapping[str, str] = {
    " ".join(found.groups()): part
    for part in re.split(r"^(?=##+ )", page("http-api.md"), flags=re.MULTILINE)
    if (found := OPERATION.search(part.partition("\n")[0])) is not None
}


class TestHttpApi:
    """Every operation has a section, with its parameters, the fields of its body and those of its answer."""

    def test_sections_equal_the_operations(self) -> None:
        assert set(SECTIONS) == set(OPERATIONS)

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_sections_document_all_parameters_and_fields(self, name: str) -> None:
        section = SECTIONS[name]
        referred = [" ".join(found) for found in OPERATION.findall(section)]
        text = section + "".join(SECTIONS[one] for one in referred if one in SECTIONS)
        if name.endswith("/together"):
            text += SECTIONS[name.replace("together", "similar")]
        if "/scenarios" in name:
            text += next(part for part in page("http-api.md").split("\n## ") if part.startswith("Scenarios"))
        named = set(re.findall(r"[`\"]([a-z_]+)[`\"]", text))
        assert {one for one in self.names_of(OPERATIONS[name]) if one not in named} == set()

    def names_of(self, operation: Mapping[str, Any]) -> Iterator[str]:
        yield from (one["name"] for one in operation.get("parameters", ()) if one["in"] == "query")
        for content in (operation.get("requestBody"), operation["responses"].get("200")):
            schema_ = ((content or {}).get("content") or {}).get("application/json", {}).get("schema", {})
            yield from self.properties_of(schema_)

    def properties_of(self, schema_: Mapping[str, Any]) -> Iterator[str]:
        if "$ref" in schema_:
            name = schema_["$ref"].rpartition("/")[2]
            schema_ = DOCUMENT["components"]["schemas"][name]
        for part in (*schema_.get("anyOf", ()), *([schema_["items"]] if "items" in schema_ else ())):
            yield from self.properties_of(part)
        yield from schema_.get("properties", ())

    def test_every_scope_is_documented(self) -> None:
        assert set(SCOPES) <= set(re.findall(r"^\| `([a-z:]+)` \|", page("http-api.md"), re.MULTILINE))

    def test_sections_of_browser_calls_name_their_scope(self) -> None:
        scopes = {"POST /v1/events": "events:write", "GET /v1/model": "recs:read", "GET /metrics": "metrics:read"}
        for name, scope in scopes.items():
            assert f"Scope: `{scope}`" in SECTIONS[name]


def test_every_error_code_is_documented_with_its_status() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (\d+) \|", page("errors.md"), re.MULTILINE))
    for problem in (*PROBLEMS.values(), *FRAMEWORK_PROBLEMS.values()):
        assert rows.get(problem.code) == str(problem.status), problem


def test_every_cause_of_store_failures_is_documented() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+?) \|", page("errors.md"), re.MULTILINE))
    assert {cause: rows.get(cause) for cause in STORAGE_REASONS} == STORAGE_REASONS


@pytest.mark.parametrize(
    ("bound", "number"),
    [
        ("events in one request", events.MAX_EVENTS),
        ("items of one impression", events.MAX_SHOWN),
        ("items in one update", items.MAX_ITEMS),
        ("requests in one batch", recommendations.MAX_REQUESTS),
        ("`k` and `limit`", fields.MAX_K),
        ("ids in `history`, `candidates`, `exclude`", fields.MAX_ITEM_IDS),
        ("items of a `basket`", fields.MAX_BASKET),
        ("types in `exclude_events`", event_rules.MAX_TYPES),
        ("`categories_all`", fields.MAX_CATEGORIES),
        ("characters of a category", fields.MAX_CATEGORY_CHARS),
        ("categories in `boost`", fields.MAX_BOOSTS),
        ("expressions in `boost`", fields.MAX_BOOST_EXPRESSIONS),
        ("properties in `max_per`", limits.MAX_LIMITS),
        ("`params`", fields.MAX_PARAMS),
        ("`value` of an event", int(events.MAX_VALUE)),
        ("headers", MAX_HEADERS),
        ("requests waiting on one connection", MAX_PIPELINED),
        ("time between two requests on one connection", IDLE_TIMEOUT_S),
        ("bytes of a text, or of the texts of a set", properties.MAX_VALUE_BYTES),
        ("scenarios", scenarios.MAX_SCENARIOS),
        ("recent items of a state", layout.ITEM_RING),
        ("shown items of a state", layout.SHOWN_RING),
        ("event ids of a sealed state", layout.ID_RING),
        ("entries of a visitor that is merged", records.MAX_MERGED),
        ("new users in one request of a page key", events.MAX_PUBLIC_NEW_USERS),
        ("events in one request of a page key", events.MAX_PUBLIC_EVENTS),
    ],
)
def test_limits_equal_the_code(bound: str, number: int) -> None:
    (row,) = (line for line in page("limits.md").splitlines() if line.startswith(f"| {bound} |"))
    assert f"{number:,}" in row.split("|")[2]


def test_the_layout_of_a_state_is_documented() -> None:
    text = page("byte-formats.md")
    dtype = layout.state_dtype(3, 8, 32, layout.STEPPED_ITEMS, layout.ID_RING)
    drawn = re.findall(r"^\| `(\w+)` \| ([uif]\d)(?:\[(.*?)\])? \|", text, re.MULTILINE)[: len(dtype.names or ())]
    sizes = {"R": 3, "B": 8, "W": 32, "K": layout.STEPPED_ITEMS}
    shapes = [
        tuple(sizes[size] if size in sizes else int(size) for size in re.findall(r"\w+", one[2])) for one in drawn
    ]
    assert np.dtype([(name, f"<{kind}", shape) for (name, kind, _), shape in zip(drawn, shapes, strict=True)]) == dtype
    assert f"A state has {dtype.itemsize:,} bytes" in text
    versions = ("layout version", layout.LAYOUT_VERSION), ("layout version", redis_keys.LAYOUT_VERSION)
    for what, version in (*versions, ("schema version", schema.SCHEMA_VERSION)):
        assert f"{what} {version}" in text


def test_sealed_states_and_recommendation_ids_are_as_long_as_the_page_says() -> None:
    text = page("byte-formats.md")
    assert f"{sealed_states.CHARACTERS:,} characters" in text
    assert f"{portable_state.SIZE:,} bytes" in text
    ten = [f"item-{number}" for number in range(10)]
    without, with_scenario = (len(RecommendationIds("main").make(bytes(8), 0, ten, of)) for of in (b"", bytes(4)))
    assert f"{without} characters for ten items, {with_scenario} with a scenario" in text


@pytest.mark.parametrize(
    ("module", "page_"),
    [
        (app.errors, "errors.md"),
        (app.schemas, "http-api.md"),
        (keys, "data-formats.md"),
        (model_directory, "data-formats.md"),
        (manifest, "data-formats.md"),
        (backup_format, "data-formats.md"),
        (layout, "byte-formats.md"),
        (record_encoding, "byte-formats.md"),
        (redis_keys, "byte-formats.md"),
        (schema, "byte-formats.md"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_format_definitions_link_to_the_contract_page(module: ModuleType, page_: str) -> None:
    assert f"docs/reference/{page_}" in str(module.__doc__)
    assert (REFERENCE / page_).exists()


def test_every_action_that_is_audited_is_in_the_table_of_the_audit_log() -> None:
    audited = set[str]()
    for path in (ROOT / "app").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("audit", "audit_command", "AuditEntry.now"):
                values = [one.value for one in call.args if isinstance(one, ast.Constant)]
                audited.update(str(value) for value in values if re.fullmatch(r"[a-z]+\.[a-z_]+", str(value)))
    text = (ROOT / "docs" / "how-to" / "operate" / "audit-log.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[a-z]+\..*?) \|", text, re.MULTILINE)
    assert audited == set(re.findall(r"`([a-z.\_]+)`", " ".join(rows)))
    assert len(audited) > 15


def test_every_table_and_key_is_documented() -> None:
    text = page("byte-formats.md")
    tables = re.findall(r"CREATE TABLE (\w+)", schema.SCHEMA)
    assert [name for name in tables if f"`{name}`" not in text] == []
    drawn = re.findall(r"^  (PREFIX:\S+)", redis_keys.__doc__ or "", re.MULTILINE)
    assert len(drawn) > 30
    suffixes = {key.rpartition("}:")[2].partition(":")[0] for key in drawn if "}" in key}
    assert [one for one in suffixes if f":{one}" not in text] == []


def test_files_and_columns_are_documented() -> None:
    text = page("data-formats.md")
    named = set(re.findall(r"`([\w.]+)`", text))
    assert {*model_directory.FILES, model_directory.MANIFEST} <= named
    assert {*manifest.COLUMNS, *COLUMNS} <= named
    assert set(Key.model_fields) <= named
    assert {*LISTS_SCHEMA} <= named
    assert set(RoundOutcome.__dataclass_fields__) <= named
    assert f"version {manifest.VERSION}" in text
    assert f"version {backup_format.VERSION}" in text


def test_column_changes_require_a_new_version() -> None:
    """If it fails, raise the version: the stores and archives in use lack the new column."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    schema.create_schema(db, Path())
    columns = db.execute(
        "SELECT t.name, c.name, c.type FROM sqlite_master AS t JOIN pragma_table_info(t.name) AS c "
        "WHERE t.type = 'table' ORDER BY t.name, c.cid"
    )
    assert (schema.SCHEMA_VERSION, crc32(repr(columns.fetchall()).encode())) == (17, 207816251)
    assert (manifest.VERSION, crc32(repr(manifest.COLUMNS).encode())) == (4, 3781283576)
    db.close()


def test_protocols_rules_and_presets_are_documented() -> None:
    protocols, model = page("protocols.md"), page("model.md")
    assert [name for name in (*get_args(Protocol), *get_args(SeenRule)) if f"`{name}`" not in protocols] == []
    assert [name for name in (*PRESETS, *MECHANISMS) if f"`{name}`" not in model] == []
