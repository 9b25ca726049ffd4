"""Settings of the environment that are misspelt or have a wrong value: a usage error that names the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.support import run_command


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command with wrong usage prints."""
    assert run_command(*arguments) == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("command", [["serve"], ["archive", "--archive-dir", "a"], ["activate", "june"]], ids=" ".join)
def test_a_misspelt_setting_is_refused_and_the_right_one_named(
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
def test_a_wrong_setting_is_refused_by_the_name_of_its_variable(
    name: str, value: str, hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"LISAREC_{name}", value)
    assert hint in refused(capsys, "serve")


def test_commands_without_a_store_name_the_variable_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISAREC_REDIS_URL", "redis:6379")
    for command in (
        ["items", "import", str(tmp_path)],
        ["sign", str(tmp_path)],
        ["verify", str(tmp_path)],
    ):
        assert "redis_url (LISAREC_REDIS_URL): begin it with redis://" in refused(capsys, *command)
