"""The Redis of docker-compose.yml as a local process, with the same command and the same users.

Only paths, address and port differ: local directories replace the volumes of the containers.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
MAKE_SECRETS = ROOT / "docker" / "redis" / "make-secrets"
REDIS_CONFIG = ROOT / "docker" / "redis" / "redis.conf"
CLUSTER_CONFIG = ROOT / "docker" / "redis" / "redis-cluster.conf"
REDIS_START = ROOT / "docker" / "redis" / "redis-start"
REDIS_LOAD_USERS = ROOT / "docker" / "redis" / "redis-load-users"

DEFAULT_OF_VARIABLE = re.compile(r"\$\{\w+:?-([^}]*)\}")


@dataclass(frozen=True)
class RedisUsers:
    """The ACL file that docker/redis/make-secrets creates, and the passwords of two of its users."""

    acl_file: Path
    password: str
    admin_password: str

    def url(self, port: int, host: str = "127.0.0.1") -> str:
        """Return the URL with which services log in."""
        return f"redis://lisarec:{self.password}@{host}:{port}/0"

    def cluster_url(self, ports: Iterable[int]) -> str:
        """Return the URL with which services log in to the nodes of a cluster."""
        return f"redis://lisarec:{self.password}@{','.join(f'127.0.0.1:{port}' for port in ports)}"

    def admin_url(self, port: int, host: str = "127.0.0.1") -> str:
        """Return the URL with which an operator logs in."""
        return f"redis://admin:{self.admin_password}@{host}:{port}/0"


def make_users(directory: Path) -> RedisUsers:
    """Create the users as the service `secrets` does, or return those that the directory already contains."""
    app, redis = directory / "secrets", directory / "acl"
    for folder in (app, redis):
        folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([MAKE_SECRETS, app, redis], check=True, timeout=30)
    read = Path.read_text
    return RedisUsers(redis / "users.acl", read(app / "redis_password"), read(redis / "admin_password"))


def redis_command(server: str, data: Path, users: RedisUsers, port: int, *options: str) -> list[str]:
    """Return the command of the service `redis`, for a server binary, a local data directory and a local port."""
    command = compose_document()["services"]["redis"]["command"]
    return [*_replace_paths(command, _path_replacements(server, data, users)), *_listen_options(port), *options]


def node_command(server: str, data: Path, users: RedisUsers, port: int, *options: str) -> list[str]:
    """Return the command of a cluster node, the service `redis-1`, as `redis_command` does."""
    service = compose_document()["services"]["redis-1"]
    *shell, script = service["command"]
    replacements = _path_replacements(server, data, users) | {
        "/etc/redis-cluster.conf": str(CLUSTER_CONFIG),
        "/acl/replica.conf": str(users.acl_file.with_name("replica.conf")),
        **{f"$${name}": value for name, value in service["environment"].items()},
    }
    (server_command,) = _replace_paths([script], replacements)
    return [*shell, f"{server_command.strip()} {shlex.join([*_listen_options(port), *options])}"]


def replica_options(users: RedisUsers, primary_port: int) -> tuple[str, ...]:
    """Return the options with which a server replicates another one, as the user `replica`."""
    password = users.acl_file.with_name("replica_password").read_text()
    return ("--masteruser", "replica", "--masterauth", password, "--replicaof", "127.0.0.1", str(primary_port))


def _path_replacements(server: str, data: Path, users: RedisUsers) -> dict[str, str]:
    return {
        "redis-start": str(REDIS_START),
        "redis-server": server,
        "/etc/redis.conf": str(REDIS_CONFIG),
        "/acl/users.acl": str(users.acl_file),
        "/data": str(data),
    }


def _listen_options(port: int) -> tuple[str, ...]:
    return ("--bind", "127.0.0.1", "--port", str(port))


@cache
def compose_document() -> Any:
    """Return the content of docker-compose.yml."""
    return yaml.load(COMPOSE_FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)


def _replace_paths(command: Sequence[str], replacements: Mapping[str, str]) -> list[str]:
    """Fill in the defaults of variables, and replace paths of the container by local ones."""
    found = re.compile("|".join(rf"(?<![\w/.-]){re.escape(place)}(?![\w/.-])" for place in replacements))
    words = [DEFAULT_OF_VARIABLE.sub(r"\1", word) for word in command]
    if missing := replacements.keys() - set(found.findall(" ".join(words))):
        raise ValueError(f"in {COMPOSE_FILE} the command {words} has no {', '.join(sorted(missing))}")
    replaced = [found.sub(lambda place: DEFAULT_OF_VARIABLE.sub(r"\1", replacements[place[0]]), word) for word in words]
    return [word.replace("$$", "$") for word in replaced]
