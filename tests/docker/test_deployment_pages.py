"""docs/how-to/deploy: variables, commands and configurations match the code and the tools."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main

from app.cli.main import cli
from app.main import IDLE_TIMEOUT_S
from app.settings import NAMES_OF_OTHERS, Settings
from benchmarks.harness.compose import COMPOSE_FILE, ROOT
from benchmarks.harness.topology import HAPROXY_CONFIG, program
from tests.waiting import PATIENCE_S
from website.container_variables import HEADING

FOLDER = ROOT / "docs" / "how-to" / "deploy"
PAGES = sorted(FOLDER.glob("*.md"))
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
SETTINGS_PAGE = ROOT / "docs" / "reference" / "settings.md"
KEEP_CLUSTER = ROOT / "docker" / "redis" / "redis-cluster-keep"


def blocks(page: Path, language: str) -> list[str]:
    """Code blocks of the page in this language, without indentation."""
    return [
        re.sub(rf"^{indentation}", "", text, flags=re.MULTILINE)
        for indentation, found, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if found == language
    ]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_variable_is_documented_with_its_default() -> None:
    defaults: dict[str, str] = {}
    for file in (COMPOSE_FILE, HAPROXY_CONFIG, KEEP_CLUSTER):
        found = re.findall(r"\$\{([A-Z_]+):?-([^:}$]*(?:://[^}]*|:\d+)?)\}", file.read_text(encoding="utf-8"))
        defaults = {name: value or "none" for name, value in reversed(found)} | defaults  # the first one counts
    section = SETTINGS_PAGE.read_text(encoding="utf-8").partition(f"## {HEADING}")[2]
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \| [^|]+ \| [A-Z0-9]", section, re.MULTILINE)
    assert dict(rows) == defaults


@pytest.mark.parametrize("page", [*PAGES, SETTINGS_PAGE], ids=lambda page: page.stem)
def test_every_documented_variable_is_read_by_a_program(page: Path) -> None:
    known = {name.upper() for name in Settings.model_fields}.union(NAMES_OF_OTHERS.split())
    named = set(re.findall(r"\bLISAREC_([A-Z0-9_]*[A-Z0-9])\b(?![_*])", page.read_text(encoding="utf-8")))
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_documented_command_has_its_options(page: Path) -> None:
    commands = typer.main.get_command(cli).commands  # type: ignore[attr-defined]
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    for line in re.findall(r"(?:\blisarec|lisarec-admin|bin/lisarec) ([a-z]+ [^`\n;]*)", text):
        name, *words = shlex.split(line.partition("  ")[0].partition(" #")[0], posix=False)
        if name not in commands:
            continue  # a word of a sentence, or a service
        command = commands[name]
        if words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_commands_beside_systemd_have_the_variables_of_the_units(tmp_path: Path) -> None:
    page = FOLDER / "systemd.md"
    (unit,) = [text for text in blocks(page, "ini") if "EnvironmentFile=" in text and "NUMBA_CACHE_DIR" in text]
    (script,) = [text for text in blocks(page, "sh") if text.startswith("#!/bin/sh")]
    (tmp_path / "lisarec.env").touch()
    for path in ("/etc/lisarec/lisarec.env", "/etc/lisarec/secrets/redis_password"):
        script = script.replace(path, str(tmp_path / "lisarec.env"))
    script = script.replace("/var/lib/lisarec\n", f"{tmp_path}\n")
    script = re.sub(r"^exec .*", "exec env", script, flags=re.MULTILINE)
    done = subprocess.run(
        ["/bin/sh", "-ec", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True, env={}
    )
    wanted = set(re.findall(r"^Environment=(\w+)=", unit, re.MULTILINE)) - {"LISAREC_REDIS_PASSWORD_FILE"}
    assert wanted >= {"NUMBA_CACHE_DIR", "LISAREC_CACHE_DIR"}
    assert wanted <= {line.partition("=")[0] for line in done.stdout.splitlines()}


def test_no_systemd_unit_writes_code_that_another_runs() -> None:
    page = (FOLDER / "systemd.md").read_text(encoding="utf-8")
    (common,) = [
        text for text in blocks(FOLDER / "systemd.md", "ini") if "EnvironmentFile=/etc/lisarec/lisarec" in text
    ]
    settings = dict(re.findall(r"^(?:Environment=)?(\w+)=(.*)$", common, re.MULTILINE))
    assert settings["ProtectSystem"] == "strict"  # all that is writable is named
    assert settings["CacheDirectory"] == "%p"  # the unit's name without its instance
    assert settings["NUMBA_CACHE_DIR"].startswith("%C/%p/")
    assert settings["LISAREC_CACHE_DIR"] == "%C/%p"
    units = re.findall(r"`/etc/systemd/system/(lisarec-\w+)@?\.service`", page)
    assert {"lisarec-app", "lisarec-trainer"} <= set(units)
    assert "lisarec" not in units
    assert not re.search(r"^(CacheDirectory|ReadWritePaths|BindPaths)=(?!%p$)", page, re.MULTILINE)


def test_each_command_cache_is_created_before_use_and_not_shared() -> None:
    """Systemd creates those of units at their start, so an upgrade from a shared cache lacks them."""
    page = (FOLDER / "systemd.md").read_text(encoding="utf-8")
    used = re.findall(r"^(.*?)NUMBA_CACHE_DIR=(/var/cache/[\w-]+)/numba", page, re.MULTILINE | re.DOTALL)
    before = ""
    for text, cache in used:
        before += text
        assert re.search(rf"^ *sudo install -d .* -o lisarec .*{cache}$", before, re.MULTILINE), cache
    assert [cache for _, cache in used] == ["/var/cache/lisarec", "/var/cache/lisarec-app"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_compose_accepts_documented_additions(page: Path, tmp_path: Path) -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("Docker Compose is not installed")
    for text in blocks(page, "yaml"):
        if "services:" in text:
            (tmp_path / "override.yml").write_text(text, encoding="utf-8")
            files = ("-f", str(COMPOSE_FILE), "-f", str(tmp_path / "override.yml"))
            run("docker-compose", "--project-directory", str(tmp_path), *files, "config", "--quiet")


def test_haproxy_accepts_the_documented_tls_listener(tmp_path: Path) -> None:
    try:
        haproxy = program("haproxy")
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    (listener,) = blocks(FOLDER / "tls.md", "haproxy")
    name, key = ("-subj", "/CN=recs.shop.example"), ("-newkey", "rsa:2048", "-nodes", "-keyout", str(tmp_path / "key"))
    run("openssl", "req", "-x509", *name, *key, "-out", str(tmp_path / "chain"))
    certificate = (tmp_path / "chain").read_text() + (tmp_path / "key").read_text()
    (tmp_path / "recs.pem").write_text(certificate)
    (tmp_path / "tls.cfg").write_text(listener.replace("/certs/", f"{tmp_path}/"))
    run(haproxy, "-c", "-f", str(HAPROXY_CONFIG), "-f", str(tmp_path / "tls.cfg"))


def test_proxies_close_idle_connections_before_their_upstreams() -> None:
    """Otherwise a request may use a connection that is closing, and few proxies retry a POST."""
    text = (FOLDER / "tls.md").read_text(encoding="utf-8")
    pools = [int(seconds) for seconds in re.findall(r"\bkeepalive(?:_timeout)? (\d+)s\b", text)]
    assert len(pools) >= 4
    (balancer,) = re.findall(r"timeout http-keep-alive (\d+)s", HAPROXY_CONFIG.read_text(encoding="utf-8"))
    assert max(pools) < int(balancer) < IDLE_TIMEOUT_S
    process = text.partition("## A process without load balancer")[2]
    defaults = [int(seconds) for seconds in re.findall(r"(?:ttl=|idle_timeout: )(\d+)", process)]
    assert max(defaults) < IDLE_TIMEOUT_S


def test_passwords_of_an_own_cluster_are_not_readable_by_others(tmp_path: Path) -> None:
    """Containers run as different users, so files are world-readable and only the folders protect them."""
    (script,) = (block for block in blocks(FOLDER / "redis-cluster.md", "sh") if "make-secrets" in block)
    run("sh", "-euc", f"umask 022\n{script.replace(' /', f' {tmp_path}/')}")
    for folder, name in (("secrets", "redis_password"), ("acl", "admin_password")):
        assert (tmp_path / folder / name).stat().st_size > 0
        assert (tmp_path / folder).stat().st_mode & 0o077 == 0


def test_no_page_writes_a_key_to_a_world_readable_file() -> None:
    shells = "\n".join(block for page in (ROOT / "docs").rglob("*.md") for block in blocks(page, "sh"))
    writing = re.findall(r"^.*\bkeys add .*>.*$", shells, re.MULTILINE)
    assert len(writing) == 3
    assert [line for line in writing if not line.startswith("(umask 077; ")] == []
