"""API keys: the file that operators edit, and the keyring that follows it."""

from __future__ import annotations

import json
import logging
import os
from errno import ENOSPC
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.http.auth import watched_file
from app.http.auth.keys import SCOPES, Key, Keyring, KeysFileError, add, make, read, remove
from app.settings import Settings
from tests.app.conftest import Client
from tests.app.support import bearer, run_command
from tests.storage.folders.durability import Disk

SHOP = "https://shop.example"
TENANTS = ("main", "books")


def fail_as_full(_: int) -> None:
    raise OSError(ENOSPC, "the disk is full")


class TestTheFile:
    def test_contains_hashes_instead_of_keys(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        text, key = make("main", ["recs:read"], note="the app")
        add(file, key)
        assert read(file) == [key]
        assert not any(part in file.read_text() for part in (text, text.split("_", 2)[2]))

    def test_keeps_other_lines_when_keys_are_added_and_removed(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        made = [make("main", [scope])[1] for scope in SCOPES]
        file.write_text("# who has which key\n\n" + made[0].line().rstrip("\n"))  # as an editor may leave it
        for key in made[1:]:
            add(file, key)
        assert read(file) == made
        remove(file, made[2].id)
        assert read(file) == made[:2] + made[3:]
        assert file.read_text().startswith("# who has which key\n\n")
        with pytest.raises(KeysFileError, match="lisarec keys list"):
            remove(file, made[2].id)

    def test_keeps_an_added_key_after_a_power_cut(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disk, folder = Disk(monkeypatch), tmp_path / "new" / "folder"
        for _ in range(2):
            add(folder / "keys", make("main", ["recs:read"])[1])
            assert disk.lost(tmp_path / "new") == []

    def test_keeps_its_permissions_and_stays_whole_on_a_full_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file, made = tmp_path / "keys", [make("main", [scope])[1] for scope in SCOPES]
        for key in made:
            add(file, key)
        file.chmod(0o640)
        remove(file, made[0].id)
        monkeypatch.setattr(os, "fsync", fail_as_full)
        with pytest.raises(OSError, match="the disk is full"):
            remove(file, made[1].id)
        assert read(file) == made[1:]
        assert file.stat().st_mode & 0o777 == 0o640
        assert [*tmp_path.iterdir()] == [file]

    @pytest.mark.parametrize(
        "line",
        [
            "lisarec_0123456789ab_PASTED",
            '{"id": "lisarec_0123456789ab_PASTED"}',
            '{"lisarec_0123456789ab_PASTED": 1}',
            Key(id="0123456789ab", tenant="main", scopes=("admin",), sha256="0" * 64)
            .line()
            .replace("main", "a b PASTED"),
        ],
    )
    def test_is_refused_without_showing_its_content_if_invalid(self, tmp_path: Path, line: str) -> None:
        file = tmp_path / "keys"
        file.write_text(f"# mine\n{line}\n")
        with pytest.raises(KeysFileError, match="line 2") as refusal:
            read(file)
        assert "PASTED" not in str(refusal.value)

    def test_refuses_duplicate_ids(self, tmp_path: Path) -> None:
        file, (_, key) = tmp_path / "keys", make("main", ["admin"])
        add(file, key)
        add(file, key)
        with pytest.raises(KeysFileError, match="two keys with the same id"):
            read(file)

    def test_limits_browser_keys_to_writing_events(self) -> None:
        make("main", ["events:write"], [SHOP])
        for scopes, origins in (
            (["recs:read"], [SHOP]),
            (["events:write", "admin"], [SHOP]),
            (["events:write"], ["*"]),
            (["events:write"], [f"{SHOP}/path"]),
            (["events:write"], [f"{SHOP}?query"]),
            (["events:write"], [SHOP.replace("//", "//ann@")]),
            (["events:write"], [SHOP.removeprefix("https://")]),
            (["events:write"], ["null"]),
        ):
            with pytest.raises(ValidationError):
                make("main", scopes, origins)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("given", "sent"),
        [
            ("https://shop.example:443", "https://shop.example"),
            ("http://shop.example:80/", "http://shop.example"),
            ("https://shop.example:80", "https://shop.example:80"),
            ("HTTPS://Shop.Example", "https://shop.example"),
            ("https://käse.example/", "https://xn--kse-qla.example"),
            ("https://straße.example", "https://xn--strae-oqa.example"),
            ("http://localhost:3000", "http://localhost:3000"),
            ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
            ("capacitor://localhost", "capacitor://localhost"),  # of an app's web view on iOS
        ],
    )
    def test_normalizes_origins_to_the_form_of_browsers(self, given: str, sent: str) -> None:
        assert make("main", ["events:write"], [given])[1].origins == (sent,)


class TestTheKeyring:
    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(watched_file, "POLL_EVERY_S", 0)
        return tmp_path / "keys"

    def test_finds_keys_only_by_their_exact_text(self, file: Path) -> None:
        text, key = make("main", ["recs:read"])
        other, foreign = make("elsewhere", ["recs:read"])
        add(file, key)
        add(file, foreign)
        ring = Keyring(file, TENANTS)
        assert ring.find(text) == key
        swapped = f"lisarec_{key.id}_{other.rpartition('_')[2]}"
        for wrong in (other, swapped, text[:-1], text + "A", text.upper(), key.id, key.sha256, "", "é", "lisarec__"):
            assert ring.find(wrong) is None

    def test_follows_the_file(self, file: Path) -> None:
        old, old_key = make("main", ["recs:read"])
        new, new_key = make("main", ["recs:read"])
        add(file, old_key)
        ring = Keyring(file, TENANTS)
        assert (ring.find(old), ring.find(new)) == (old_key, None)
        add(file, new_key)
        assert (ring.find(old), ring.find(new)) == (old_key, new_key)
        remove(file, old_key.id)
        assert (ring.find(old), ring.find(new)) == (None, new_key)

    def test_keeps_its_keys_when_the_file_breaks(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        text, key = make("main", ["recs:read"])
        add(file, key)
        ring = Keyring(file, TENANTS)
        file.write_text("{")
        assert ring.find(text) == key
        file.unlink()
        assert ring.find(text) == key
        assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
        file.write_text("")
        assert ring.find(text) is None

    def test_does_not_start_without_a_file(self, file: Path) -> None:
        with pytest.raises(KeysFileError, match="lisarec keys add"):
            Keyring(file, TENANTS)


def test_metrics_show_that_a_broken_file_is_ignored(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "POLL_EVERY_S", 0)
    text, key = make("main", ["metrics:read"])
    add(tmp_path / "keys", key)
    valid = (tmp_path / "keys").read_text()
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path / "state", keys_file=tmp_path / "keys"))
    for content, ignored in ((valid, "0.0"), (valid + "{", "1.0"), (valid, "0.0")):
        (tmp_path / "keys").write_text(content)
        assert f"lisarec_keys_file_ignored {ignored}" in client.get("/metrics", headers=bearer(text)).text
    client.close()


def test_the_cli_creates_lists_and_removes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    def run(*arguments: str) -> str:
        assert run_command("keys", *arguments, "--keys", tmp_path / "new" / "keys") == 0
        return capsys.readouterr().out.strip()

    text = run(
        "add", "--scope", "events:write", "--origin", SHOP, "--tenant", "books", "--rate", "600", "--note", "web"
    )
    (key,) = read(tmp_path / "new" / "keys")
    assert Keyring(tmp_path / "new" / "keys", ["books"]).find(text) == key
    listed = run("list")
    assert all(part in listed for part in (key.id, "books", "events:write", SHOP, "600/min", "web"))
    assert key.sha256 not in listed
    run("remove", key.id)
    assert read(tmp_path / "new" / "keys") == []


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--origin", "https://shop.example/cart", "a host and no path, such as https://shop.example"),
        ("--rate", "20000000", "less than or equal to 10000000"),
        ("--note", "lisarec_secret", "looks like a key"),
        ("--event-type", "a view", "should match pattern"),
    ],
)
def test_the_cli_names_the_option_that_is_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, reason: str
) -> None:

    assert run_command("keys", "add", "--scope", "events:write", "--keys", tmp_path / "keys", option, value) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{option}: " in said
    assert reason in said
    assert "Value error" not in said
    assert "secret" not in said


def test_the_cli_limits_a_key_to_event_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    options = ["--scope", "events:write", "--event-type", "view", "--event-type", "cart", "--keys", file]
    assert run_command("keys", "add", *options) == 0
    assert [key.event_types for key in read(file)] == [("view", "cart")]
    capsys.readouterr()
    assert run_command("keys", "list", "--keys", file) == 0
    assert capsys.readouterr().out.strip().endswith("events:write  only view,cart")


def test_event_types_require_a_scope_for_events() -> None:
    with pytest.raises(ValidationError, match="event types need a scope that posts events: events:write or portable"):
        make("main", ["recs:read"], event_types=["view"])


def test_a_key_line_has_the_documented_form() -> None:
    _, key = make("main", ["recs:read"], note="the app")
    assert list(json.loads(key.line())) == ["id", "tenant", "scopes", "sha256", "note"]
