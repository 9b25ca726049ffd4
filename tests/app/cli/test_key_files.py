"""Files with an API key: every command refuses a faulty one at once, without showing its content."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.options import read_key
from tests.app.support import run_command

CONTENTS = {
    "empty": b"\n",
    "two lines": b"created key c6b6fc2026f7 for tenant main\nlisarec_secret\n",
    "not ASCII": "lisarec_secret\u00e9\n".encode(),
    "not UTF-8": "lisarec_secret\n".encode("utf-16"),
}
COMMANDS = {
    "replay": ("--data", "{table}"),
    "items import": ("{items}",),
    "consume": ("--brokers", "127.0.0.1:9", "--topic", "clicks"),
    "mcp": (),
}


def never(*_: object, **__: object) -> None:
    raise AssertionError("the key has to be refused before anything is sent")


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize(("command", "arguments"), COMMANDS.items(), ids=COMMANDS)
def test_a_file_without_exactly_one_key_is_refused(
    command: str,
    arguments: tuple[str, ...],
    content: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for sender in ("app.jobs.replay.wait_for_service", "app.jobs.kafka.consumer.run_consumer"):
        monkeypatch.setattr(sender, never)
    monkeypatch.setattr("clients.lisarec_client.mcp_server.serve", never)
    table, items, key = (tmp_path / name for name in ("events.tsv", "items.tsv", "import_key"))
    table.write_text("user_id\titem_id\ttimestamp\nu\ta\t10\n")
    items.write_text("item_id\na\n")
    key.write_bytes(content)
    given = [argument.format(table=table, items=items) for argument in arguments]
    assert run_command(*command.split(), *given, "--key-file", key) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"'{key}' must contain one API key and nothing else" in said
    assert "secret" not in said


def test_whitespace_around_the_key_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("lisarec_c6b6fc2026f7_secret\r\n\n")
    assert read_key(tmp_path / "key") == "lisarec_c6b6fc2026f7_secret"
    assert read_key(None) is None
