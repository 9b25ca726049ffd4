"""Redis of the compose file: generated passwords, and users with minimal permissions."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.jobs.archive import ArchiverMetrics, ArchiverPlan
from app.jobs.archive import run_archiver as archive
from app.settings import StoreSettings
from benchmarks.harness.compose import (
    MAKE_SECRETS,
    REDIS_LOAD_USERS,
    ROOT,
    RedisUsers,
    compose_document,
    make_users,
    redis_command,
    replica_options,
)
from benchmarks.harness.service_process import free_port
from benchmarks.harness.topology import answers_ping, program, redis_server
from tests.app.conftest import Client
from tests.waiting import PATIENCE_S, wait_until

MANAGED_REDIS = ROOT / "docs" / "how-to" / "deploy" / "managed-redis.md"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Folders for secrets of services, secrets of Redis, and given passwords."""
    made = tmp_path / "app", tmp_path / "redis", tmp_path / "given"
    for folder in made:
        folder.mkdir()
    return made


def make_secrets(folders: tuple[Path, Path, Path]) -> tuple[str, str]:
    subprocess.run([MAKE_SECRETS, *folders], check=True, timeout=PATIENCE_S)
    return (folders[0] / "redis_password").read_text(), (folders[1] / "users.acl").read_text()


def test_passwords_are_generated_once_or_given(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    password, users = make_secrets(folders)
    assert len(password) == 64
    assert password not in users
    assert make_secrets(folders) == (password, users)
    (folders[2] / "redis_password").write_text("given by hand\n")
    given, users_of_given = make_secrets(folders)
    assert given == "given by hand"
    assert users_of_given != users
    (folders[2] / "redis.crt").write_text("of an authority")
    make_secrets(folders)
    assert (folders[0] / "redis.crt").read_text() == "of an authority"
    admin, replica = ((folders[1] / f"{user}_password").read_text() for user in ("admin", "replica"))
    assert len({admin, replica, password, given}) == 4


def test_a_power_cut_leaves_no_empty_file(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty ACL file, Redis requires no password."""
    log = tmp_path / "calls"
    for name in ("sync", "mv"):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho {name} "$@" >>{log}\nexec {shutil.which(name)} "$@"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    make_secrets(folders)
    calls = log.read_text().splitlines()
    named = [call.split()[-1] for call in calls if call.startswith("mv")]
    assert str(folders[1] / "users.acl") in named
    assert calls == [call for file in named for call in (f"sync {file}.new", f"mv -f {file}.new {file}")]


@pytest.mark.parametrize("name", ["redis_password", "redis_password.next", "admin_password", "replica_password.next"])
@pytest.mark.parametrize("given", ["", "\n", "\r\n", "  ", " blank before", "a directory", "unreadable"])
def test_an_invalid_password_file_is_refused(folders: tuple[Path, Path, Path], given: str, name: str) -> None:
    file = folders[2] / name
    if given == "a directory":
        file.mkdir()
    else:
        file.write_text(given)
        file.chmod(0 if given == "unreadable" else 0o444)
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []  # root reads all
    done = subprocess.run([*powerless, MAKE_SECRETS, *folders], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode != 0
    assert str(file) in done.stderr
    assert list(folders[1].iterdir()) == []  # Redis does not start without its users


def may_log_in(port: int, user: str, password: str) -> bool:
    try:
        with redis.Redis(
            port=port, username=user, password=password, retry=Retry(NoBackoff(), 0), socket_timeout=PATIENCE_S
        ) as client:
            return bool(client.ping())
    except redis.AuthenticationError:
        return False


@pytest.mark.usefixtures("alpine_shell")
def test_a_password_change_keeps_existing_connections(tmp_path: Path) -> None:
    port, users, log = free_port(), make_users(tmp_path), tmp_path / "redis.log"
    folders = tmp_path / "secrets", tmp_path / "acl", tmp_path / "given"
    folders[2].mkdir()

    def make_and_load() -> None:
        make_secrets(folders)
        subprocess.run(["sh", REDIS_LOAD_USERS, users.acl_file, "-p", str(port)], check=True, timeout=PATIENCE_S)

    server = start_redis(redis_command(program("redis-server"), data_directory(tmp_path), users, port), log)
    try:
        wait_until(lambda: answers_ping(users, port), log.read_text)
        with redis.Redis.from_url(users.url(port), retry=Retry(NoBackoff(), 0), socket_timeout=PATIENCE_S) as lasting:
            connection = lasting.client_id()
            following = folders[2] / "redis_password.next"
            following.write_text("another one\n")
            make_and_load()
            assert may_log_in(port, "lisarec", "another one")
            assert (folders[0] / "redis_password").read_text() == users.password  # until Redis accepts both
            following.rename(folders[2] / "redis_password")
            make_and_load()
            assert may_log_in(port, "lisarec", users.password)
            assert (folders[0] / "redis_password").read_text() == "another one"
            make_and_load()
            assert may_log_in(port, "lisarec", "another one")
            assert not may_log_in(port, "lisarec", users.password)
            assert lasting.client_id() == connection
    finally:
        server.kill()
        server.wait()


def test_admin_and_replica_passwords_change_while_a_replica_follows(tmp_path: Path) -> None:
    users, log, ports = make_users(tmp_path), tmp_path / "redis.log", [free_port(), free_port()]
    app, acl, given = (tmp_path / name for name in ("secrets", "acl", "given"))
    given.mkdir()
    old = {user: (acl / f"{user}_password").read_text() for user in ("admin", "replica")}

    def make_and_load() -> None:
        make_secrets((app, acl, given))
        for port in ports:
            subprocess.run(["sh", REDIS_LOAD_USERS, users.acl_file, "-p", str(port)], check=True, timeout=PATIENCE_S)

    def as_admin(port: int, *command: str | int) -> Any:
        with redis.Redis.from_url(
            make_users(tmp_path).admin_url(port), retry=Retry(NoBackoff(), 0), socket_timeout=PATIENCE_S
        ) as client:
            return client.execute_command(*command)

    with ExitStack() as stack:
        for port, options in zip(ports, ((), replica_options(users, ports[0])), strict=True):
            (data := tmp_path / str(port)).mkdir()
            server = start_redis(redis_command(program("redis-server"), data, users, port, *options), log)
            stack.callback(server.wait)
            stack.callback(server.kill)
            wait_until(partial(answers_ping, users, port), log.read_text)
        wait_until(lambda: as_admin(ports[0], "WAIT", 1, 100) == 1, log.read_text)
        for user in old:
            (given / f"{user}_password.next").write_text(f"another {user}")
        make_and_load()
        for user, password in old.items():
            assert may_log_in(ports[0], user, password)
            assert may_log_in(ports[0], user, f"another {user}")
            (given / f"{user}_password.next").rename(given / f"{user}_password")
        make_and_load()  # which tells the replica, too
        make_and_load()
        for user, password in old.items():
            assert may_log_in(ports[0], user, f"another {user}")
            assert not may_log_in(ports[0], user, password)
            (given / f"{user}_password").unlink()
        make_and_load()
        as_admin(ports[0], "CLIENT", "KILL", "TYPE", "replica")
        as_admin(ports[0], "SET", "after", 1)
        wait_until(lambda: as_admin(ports[1], "GET", "after") == b"1", log.read_text)


def allowed_by_user(admin: redis.Redis) -> dict[str, dict[str, Any]]:
    """Permissions of each user, without a flag for RESTORE that differs for users from a file."""
    users: dict[str, dict[str, Any]] = {}
    for name in admin.acl_users():
        user: Any = admin.acl_getuser(str(name))
        users[str(name)] = {**user, "flags": {*user["flags"]} - {"sanitize-payload"}}
    return users


@pytest.mark.usefixtures("alpine_shell")
def test_users_have_only_the_permissions_of_the_file(tmp_path: Path) -> None:
    """Permissions added manually or by an earlier file are removed."""
    with redis_server(tmp_path) as url:
        users, port = make_users(tmp_path), int(url.rpartition(":")[2].partition("/")[0])
        with redis.Redis.from_url(users.admin_url(port), decode_responses=True) as admin:
            before = allowed_by_user(admin)
            admin.execute_command("ACL SETUSER", "lisarec", "+@admin", "+@dangerous", ">by hand")
            admin.execute_command("ACL SETUSER", "replica", "+@all", "~*", "nopass")
            admin.execute_command("ACL SETUSER", "default", "on", ">by hand")
            assert allowed_by_user(admin) != before
            subprocess.run(["sh", REDIS_LOAD_USERS, users.acl_file, "-p", str(port)], check=True, timeout=PATIENCE_S)
            assert allowed_by_user(admin) == before


def use_service_and_archiver(start: Callable[..., Client], folder: Path, url: str) -> None:
    """Post, read, merge, archive and erase."""
    named = url.replace(f":{make_users(folder).password}@", "@")
    password_file = folder / "secrets" / "redis_password"
    client = start(folder, redis_url=named, redis_password_file=password_file)
    try:
        client.click("ada", "item-1", "item-2")
        client.click("visitor", "item-3")
        assert client.recommend("ada", exclude_seen="all")["source"] == "personalised"
        assert client.post("/v1/users/ada/merge", json={"from": "visitor"}).status_code == 200
        assert len(client.get("/v1/users/ada/events").json()["events"]) >= 3
        settings = StoreSettings(redis_url=named, redis_password_file=password_file, archive_dir=folder / "archive")
        report_lines: list[str] = []
        archive(settings, ArchiverPlan(None, 0, None), report_lines.append, ArchiverMetrics())
        assert "events archived" in report_lines[0]
        assert client.request("DELETE", "/v1/users/ada").status_code == 202
        archive(settings, ArchiverPlan(None, 0, None), report_lines.append, ArchiverMetrics())
    finally:
        client.close()


def test_the_service_user_has_minimal_permissions(start: Callable[..., Client], tmp_path: Path) -> None:
    with redis_server(tmp_path) as url:
        users = make_users(tmp_path)
        use_service_and_archiver(start, tmp_path, url)
        port = int(url.rpartition(":")[2].partition("/")[0])
        with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as nobody, pytest.raises(redis.AuthenticationError):
            nobody.get("x")
        with redis.Redis(port=port, username="lisarec", password=users.password) as service:
            for command in ("FLUSHALL", "CONFIG SET appendfsync no", "SHUTDOWN", "ACL LIST", "KEYS *"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    service.execute_command(command)


def test_the_documented_user_of_managed_servers_has_minimal_permissions(
    start: Callable[..., Client], tmp_path: Path
) -> None:
    (rules,) = re.findall(r"^user lisarec on #SHA256 (.*)$", MANAGED_REDIS.read_text(), re.MULTILINE)
    with redis_server(tmp_path) as url:
        users, port = make_users(tmp_path), int(url.rpartition(":")[2].partition("/")[0])
        with redis.Redis.from_url(users.admin_url(port)) as admin:
            admin.execute_command("ACL SETUSER", "lisarec", "reset", "on", f">{users.password}", *rules.split())
            admin.mset({"other:key": "of others", "lisarec": "of others"})
            use_service_and_archiver(start, tmp_path, url)
            assert [entry["reason"] for entry in admin.acl_log()] == []
        with redis.Redis.from_url(url) as service:
            for command in ("GET other:key", "SET other:key x", "DEL lisarec", "FLUSHALL", "CONFIG SET appendfsync no"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    service.execute_command(*command.split())
            refusal = "can't access at least one of the keys|No permissions to access a key"  # by 7.0, by 7.2 and later
            with pytest.raises(redis.exceptions.ResponseError, match=refusal):
                service.eval("return redis.call('GET', 'other:key')", 0)


@pytest.mark.usefixtures("alpine_shell")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_redis_has_every_acknowledged_event(
    start: Callable[..., Client], tmp_path: Path, ending: signal.Signals
) -> None:
    port, users, log = free_port(), make_users(tmp_path), tmp_path / "redis.log"
    command = redis_command(program("redis-server"), data_directory(tmp_path), users, port)
    server = start_redis(command, log)
    try:
        wait_until(lambda: is_healthy(users, port), log.read_text)
        client = start(tmp_path, redis_url=users.url(port))
        try:
            for number in range(20):
                client.click(f"user-{number}", "item-1", "item-2")
            before = {f"user-{number}": client.get(f"/v1/users/user-{number}").json() for number in range(20)}
        finally:
            client.close()
        with redis.Redis.from_url(users.url(port)) as service:
            service.set("plain", 1)
            service.eval("redis.call('SET', KEYS[1], 1) redis.call('INCR', KEYS[1])", 1, "script")
            service.pipeline(transaction=True).set("first", 1).set("second", 1).execute()
            keys = service.dbsize()
        server.send_signal(ending)
        server.wait(PATIENCE_S)
        server = start_redis(command, log)
        wait_until(lambda: is_healthy(users, port), log.read_text)
        with redis.Redis.from_url(users.url(port)) as service:
            assert service.dbsize() == keys
            assert service.exists("plain", "script", "first", "second") == 4
        client = start(tmp_path, redis_url=users.url(port))
        try:
            assert {user: client.get(f"/v1/users/{user}").json() for user in before} == before
        finally:
            client.close()
    finally:
        server.kill()
        server.wait()


@pytest.mark.usefixtures("alpine_shell")
def test_a_redis_with_an_unreadable_append_only_file_stops(tmp_path: Path) -> None:
    port, users, log = free_port(), make_users(tmp_path), tmp_path / "redis.log"
    command = redis_command(program("redis-server"), data_directory(tmp_path), users, port)
    server = start_redis(command, log)
    try:
        wait_until(lambda: answers_ping(users, port), log.read_text)
        with redis.Redis.from_url(users.url(port)) as service:
            service.pipeline(transaction=True).set("first", 1).set("second", 1).execute()
        server.terminate()
        server.wait(PATIENCE_S)
        allowed = users.acl_file.read_text()
        users.acl_file.chmod(0o644)
        users.acl_file.write_text(allowed.replace("user default off ~* &* +@all", "user default off"))
        server = start_redis(command, log)
        server.wait(PATIENCE_S)  # it ends by itself
        assert "redis-start: Redis cannot load all of its log" in log.read_text()
        users.acl_file.write_text(allowed)
        server = start_redis(command, log)
        wait_until(lambda: answers_ping(users, port), log.read_text)
        with redis.Redis.from_url(users.url(port)) as service:
            assert service.exists("first", "second") == 2
    finally:
        server.kill()
        server.wait()
    assert not list((tmp_path / "data").glob(".redis-start.*"))


@pytest.mark.usefixtures("alpine_shell")
def test_a_replica_keeps_only_its_append_only_file(tmp_path: Path) -> None:
    users, log, ports = make_users(tmp_path), tmp_path / "redis.log", [free_port(), free_port()]
    with ExitStack() as stack:
        for port, options in zip(ports, ((), replica_options(users, ports[0])), strict=True):
            (data := tmp_path / str(port)).mkdir()
            (data / "appendonlydir").mkdir()
            names = ("temp-1789000000.7.rdb", "temp-rewriteaof-bg-8.aof", "appendonlydir/temp-appendonly.aof.incr")
            for unfinished in names:
                (data / unfinished).touch()
            server = start_redis(redis_command(program("redis-server"), data, users, port, *options), log)
            stack.callback(server.wait)
            stack.callback(server.kill)
            wait_until(partial(answers_ping, users, port), log.read_text)
            assert not any((data / unfinished).exists() for unfinished in names)
        with redis.Redis.from_url(users.url(ports[0])) as service:
            wait_until(lambda: service.wait(1, 100) == 1, log.read_text)
        wait_until(lambda: "sync: Finished with success" in log.read_text(), log.read_text)
        wait_until(lambda: not list(data.glob("*.rdb")), log.read_text)


@pytest.mark.usefixtures("alpine_shell")
def test_a_replica_keeps_the_snapshot_until_it_has_an_append_only_file(tmp_path: Path) -> None:
    users, log, ports = make_users(tmp_path), tmp_path / "redis.log", [free_port(), free_port()]
    slow = ("--rdb-key-save-delay", "60000000")
    with ExitStack() as stack:
        for port, options in zip(ports, ((), (*replica_options(users, ports[0]), *slow)), strict=True):
            (data := tmp_path / str(port)).mkdir()
            server = start_redis(redis_command(program("redis-server"), data, users, port, *options), log)
            stack.callback(server.wait)
            stack.callback(server.kill)
            wait_until(partial(answers_ping, users, port), log.read_text)
            if not options:
                with redis.Redis.from_url(users.url(port)) as service:
                    service.set("key", 1)
        found = wait_until(lambda: re.search(r"file rewriting started by pid (\d+)", log.read_text()), log.read_text)
        is_kept = (data / "dump.rdb").exists()
        os.kill(int(found[1]), signal.SIGKILL)
        assert is_kept


def is_healthy(users: RedisUsers, port: int) -> bool:
    """Result of the health check of docker-compose.yml."""
    _, check = compose_document()["services"]["redis"]["healthcheck"]["test"]
    check = check.replace("$$", "$").replace("/acl/", f"{users.acl_file.parent}/")
    check = check.replace("redis-cli ", f"redis-cli -p {port} ")
    return subprocess.run(["sh", "-c", check], capture_output=True, timeout=PATIENCE_S).returncode == 0


def data_directory(tmp_path: Path) -> Path:
    (data := tmp_path / "data").mkdir()
    return data


def start_redis(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)
