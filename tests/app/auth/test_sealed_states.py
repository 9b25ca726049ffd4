"""Sealed states: only the tenant and audience they were sealed for can open them, unchanged and until they expire."""

from __future__ import annotations

import logging
import os
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import timedelta
from errno import ENOSPC
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import InvalidSealedState, SealedStateExpired
from app.http.auth import watched_file
from app.http.auth.seal_keys import SealKey, SealKeyring, SealKeysError, read, rotate
from app.http.auth.sealed_states import BYTES, CHARACTERS, DAY_S, StateSealer
from storage.state.event import Event, event_hash
from storage.state.portable_state import PortableState
from tests.app.support import run_command
from tests.storage.oracles.random_events import make_generation

GENERATION = make_generation()
NOW_S = "app.http.auth.sealed_states.StateSealer._now_s"
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def visited(*item_ids: str) -> PortableState:
    events = [Event(f"e-{name}", "u", name, "click", 1_700_000_000_000_000, None) for name in item_ids]
    return PortableState.empty(GENERATION).folded(GENERATION, events, [event_hash(one.event_id) for one in events])[0]


@cache
def state() -> PortableState:
    return visited("item1", "item7")


@pytest.fixture(scope="module")
def sealer(tmp_path_factory: pytest.TempPathFactory) -> StateSealer:
    return new_sealer(tmp_path_factory.mktemp("keys") / "seal")


def new_sealer(file: Path) -> StateSealer:
    if not file.exists():
        rotate(file)
    return StateSealer(SealKeyring(file), 30)


def assert_refused(sealer: StateSealer, text: str, tenant: str = "main", audience: str = "shop") -> None:
    with pytest.raises(InvalidSealedState) as refusal:
        sealer.open(text, tenant, audience)
    assert not refusal.value.args
    assert refusal.value.__cause__ is None


class TestSealedState:
    def test_opens_unchanged_and_is_encrypted(self, sealer: StateSealer) -> None:
        texts = [sealer.seal(state(), "main", "shop").text for _ in range(2)]
        assert [sealer.open(text, "main", "shop") for text in texts] == [state()] * 2
        assert texts[0] != texts[1]
        assert {len(text) for text in texts} == {CHARACTERS}
        assert CHARACTERS < 5_000
        assert all(b"item" not in urlsafe_b64decode(text) for text in texts)

    def test_has_a_constant_length(self, sealer: StateSealer) -> None:
        many = visited(*(f"item-{number}" for number in range(300)))
        assert {len(sealer.seal(one, "main", "").text) for one in (state(), many)} == {CHARACTERS}

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_is_refused_with_a_flipped_bit(self, sealer: StateSealer, data: st.DataObject) -> None:
        value = bytearray(urlsafe_b64decode(sealer.seal(state(), "main", "shop").text))
        for at in data.draw(st.sets(st.integers(0, 8 * BYTES - 1), min_size=1, max_size=4)):
            value[at // 8] ^= 1 << at % 8
        assert_refused(sealer, urlsafe_b64encode(value).decode())

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_is_refused_with_a_changed_character(self, sealer: StateSealer, data: st.DataObject) -> None:
        text = sealer.seal(state(), "main", "shop").text
        at = data.draw(st.integers(0, CHARACTERS - 1))
        other = data.draw(st.one_of(st.sampled_from([*ALPHABET, *"+/=\n .", "\0", "é", "\ud800", ""]), st.text()))
        if other != text[at]:
            assert_refused(sealer, text[:at] + other + text[at + 1 :])

    @given(st.integers(0, CHARACTERS - 1), st.text(alphabet=ALPHABET, min_size=1, max_size=9))
    @settings(max_examples=50, deadline=None)
    def test_is_refused_if_truncated_or_extended(self, sealer: StateSealer, length: int, more: str) -> None:
        text = sealer.seal(state(), "main", "shop").text
        for wrong in (text[:length], text + more, more + text, text[length:] + text[:length] if length else text * 2):
            assert_refused(sealer, wrong)

    def test_is_refused_for_another_tenant_audience_or_key(self, sealer: StateSealer, tmp_path: Path) -> None:
        text = sealer.seal(state(), "main", "shop").text
        for tenant, audience in (("books", "shop"), ("main", ""), ("main", "app"), ("mainshop", ""), ("shop", "main")):
            assert_refused(sealer, text, tenant, audience)
        assert_refused(new_sealer(tmp_path / "seal"), text)
        empty = new_sealer(tmp_path / "seal").seal(state(), "main", "").text
        key = read(tmp_path / "seal")[0]
        (tmp_path / "same id").write_text(SealKey(key.id, bytes(32)).line())
        assert_refused(new_sealer(tmp_path / "same id"), empty, audience="")

    def test_expires(self, sealer: StateSealer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(NOW_S, lambda _: 1_800_000_000)
        text, expires = sealer.seal(state(), "main", "")
        assert expires.timestamp() == 1_800_000_000 + 30 * DAY_S
        monkeypatch.setattr(NOW_S, lambda _: int(expires.timestamp()) - 1)
        assert sealer.open(text, "main", "") == state()
        monkeypatch.setattr(NOW_S, lambda _: int(expires.timestamp()))
        with pytest.raises(SealedStateExpired):
            sealer.open(text, "main", "")
        assert_refused(sealer, text, "books", "")  # nobody learns the age of another's state

    @pytest.mark.parametrize("years", [1, -1])
    def test_tolerates_clock_skew_of_seconds(
        self, sealer: StateSealer, monkeypatch: pytest.MonkeyPatch, years: int
    ) -> None:
        before, now_s, now_ns = sealer.seal(state(), "main", ""), time.time, time.time_ns
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda: now_s() + years * 365 * DAY_S)
            patch.setattr("time.time_ns", lambda: now_ns() + years * 365 * DAY_S * 10**9)
            assert sealer.open(before.text, "main", "") == state()
            during = sealer.seal(state(), "main", "")
        assert sealer.open(during.text, "main", "") == state()
        assert before.expires <= during.expires < before.expires + timedelta(days=1)


class TestSealKeys:
    @pytest.fixture(autouse=True)
    def _looked_at_each_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watched_file, "POLL_EVERY_S", 0)

    def test_rotate_without_a_restart(self, tmp_path: Path) -> None:
        file = tmp_path / "seal"
        sealer = new_sealer(file)
        first = sealer.seal(state(), "main", "").text
        stale = StateSealer(SealKeyring(tmp_path / "stale"), 30) if rotate(tmp_path / "stale") else sealer
        (tmp_path / "stale").write_text(file.read_text())  # the file of a machine that a rotation has not reached
        rotate(file)
        second = sealer.seal(state(), "main", "").text
        assert sealer.open(first, "main", "") == state()
        assert stale.open(second, "main", "") == state()  # the next key was in the file before it sealed
        for _ in range(3):
            rotate(file)
        assert_refused(sealer, first, audience="")
        assert len(read(file)) == 4
        assert file.stat().st_mode & 0o077 == 0

    def test_are_unchanged_by_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "seal"
        keys = rotate(file)

        def fail(_: int) -> None:
            raise OSError(ENOSPC, "the disk is full")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="the disk is full"):
            rotate(file)
        assert read(file) == keys
        assert [*tmp_path.iterdir()] == [file]

    def test_are_reloaded_when_a_state_names_an_unknown_key(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "seal"
        here = new_sealer(file)
        monkeypatch.setattr(watched_file, "POLL_EVERY_S", 3_600)
        here.seal(state(), "main", "")
        rotate(file)
        rotate(file)
        assert here.open(new_sealer(file).seal(state(), "main", "").text, "main", "") == state()

    def test_are_kept_when_the_file_breaks(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        file = tmp_path / "seal"
        sealer = new_sealer(file)
        text = sealer.seal(state(), "main", "").text
        secret = read(file)[0].secret.hex()
        for broken in ("", f"{secret}\n", file.read_text() * 2):
            file.write_text(broken)
            with pytest.raises(SealKeysError) as refusal:
                SealKeyring(file)
            assert secret not in str(refusal.value)
            assert sealer.open(text, "main", "") == state()
        assert {record.levelno for record in caplog.records} == {logging.ERROR}
        assert secret not in caplog.text

    def test_are_created_and_rotated_by_the_cli(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

        file = tmp_path / "new" / "seal"
        for _ in range(2):
            assert run_command("keys", "seal", "--seal-keys", file) == 0
        sealing, following, older = (key.id.hex() for key in read(file))
        said = capsys.readouterr().out
        assert f"sealing key {sealing}, next key {following}; older keys still open states: {older}" in said
        assert not any(key.secret.hex() in said for key in read(file))
