"""Misspelt or invalid settings in the environment: a usage error that names the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.settings import StoreSettings
from tests.app.support import run_command


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Output of a command that ends with a usage error."""
    assert run_command(*arguments) == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("command", [["serve"], ["archive", "--archive-dir", "a"], ["activate", "june"]], ids=" ".join)
def test_a_misspelt_setting_is_refused_with_the_right_name(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISAREC_MAX_REQUEST", "1")
    monkeypatch.setenv("LISAREC_XYZZY", "sesame")
    printed = refused(capsys, *command)
    assert "LISAREC_MAX_REQUEST in the environment is not a setting; did you mean LISAREC_MAX_REQUESTS?" in printed
    assert "LISAREC_XYZZY in the environment is not a setting" in printed
    assert "sesame" not in printed


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("PORT", "http", "port (LISAREC_PORT): Input should be a valid integer"),
        ("MODEL_DIR", "http://shop/m", "model_dir (LISAREC_MODEL_DIR): 'http://' is not a supported location"),
        ("REDIS_URL", "redis:6379", "redis_url (LISAREC_REDIS_URL): begin it with redis://"),
        ("TENANTS", "{books}", 'tenants (LISAREC_TENANTS): write a JSON object of model directories, such as {"books"'),
        ("TENANTS", "[1]", "write a JSON object"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_variable(
    name: str, value: str, hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"LISAREC_{name}", value)
    assert hint in refused(capsys, "serve")


@pytest.mark.parametrize(
    "url",
    [
        "redis://shop:sesame/open@db:6379/0",
        "redis://shop:6379/sesame@db/0",
        "rediss://shop:sesame#open@db",
        "redis://shop:sesame?open@db:6379,db2:6379/0",
        "redis://shop:sesame@db:port/0",
        "redis://shop:sesame@[::1/0",
    ],
)
def test_an_ambiguous_redis_url_is_refused_without_showing_its_password(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISAREC_REDIS_URL", url)
    printed = refused(capsys, "audit")
    assert "a password with special characters encoded" in printed
    assert "sesame" not in printed


@pytest.mark.parametrize(
    "url",
    [
        "redis://db",
        "rediss://shop:s%2Fs@me@db:6379/0?ssl_ca_certs=/secrets/redis.crt",
        "redis://shop@db-1.example:6379,10.0.0.2:6379",
        "redis://[::1]:6379/",
        "redis://:sesame@[fe80::1],db",
        "unix:///run/redis.sock?db=1",
    ],
)
def test_other_redis_urls_are_accepted(url: str) -> None:
    assert StoreSettings(redis_url=url).redis_url == url


def test_commands_without_a_store_name_the_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISAREC_REDIS_URL", "redis:6379")
    for command in (
        ["items", "import", str(tmp_path)],
        ["sign", str(tmp_path)],
        ["verify", str(tmp_path)],
    ):
        assert "redis_url (LISAREC_REDIS_URL): begin it with redis://" in refused(capsys, *command)
