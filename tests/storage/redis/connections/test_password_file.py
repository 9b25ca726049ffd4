"""Password changes in the file and in Redis while services run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from app.settings import StoreSettings
from storage.archiver.redis_source import RedisSource
from storage.errors import StorageUnavailable
from storage.redis.store import RedisStore
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisCluster, RedisServer, redis_users
from tests.storage.redis.stores import GENERATION, ids, opened, until_applied
from tests.waiting import wait_until

OLD = redis_users().password


def url_of(server: RedisServer, file: Path) -> str:
    address = server.url.replace(f":{OLD}@", "@")
    return StoreSettings(redis_url=address, redis_password_file=file).redis_url_with_password


@pytest.mark.parametrize("is_file_first", [True, False], ids=["the file is changed first", "Redis is changed first"])
def test_services_use_the_new_password_without_failed_requests(
    any_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_file_first: bool
) -> None:
    file = tmp_path / "redis_password"
    file.write_text(OLD)
    url = url_of(any_server, file)

    def acl_setuser(rule: str) -> None:
        any_server.client.execute_command("ACL SETUSER", "lisarec", rule)

    steps: list[Callable[[], object]] = [lambda: file.write_text("a new one\n"), lambda: acl_setuser(">a new one")]

    async def law() -> None:
        number = 0

        async def post(store: RedisStore) -> None:
            nonlocal number
            number += 1
            await store.append("main", [click(str(number))])

        async def post_by_new_connections(store: RedisStore) -> None:
            any_server.client.execute_command("CLIENT KILL", "USER", "lisarec")
            await until_applied(store, [click("after the cut")])
            await post(store)

        async with opened(url) as store:
            await post(store)
            for step in steps if is_file_first else steps[::-1]:
                step()
                await post(store)
                await post_by_new_connections(store)
            await post(store)
            acl_setuser(f"<{OLD}")
            await post(store)  # by the connections that there are
            await post_by_new_connections(store)
            file.write_text("")  # as while somebody writes it
            await post_by_new_connections(store)
            file.write_text("a new one")
            with RedisSource.open(url) as archiver:
                assert archiver.memory_usage()
            assert len(await ids(store)) == number + 1
        said = [record.getMessage() for record in caplog.records if "new password" in record.getMessage()]
        assert any("Redis does not accept" in line for line in said) == is_file_first

    caplog.set_level(logging.INFO)
    asyncio.run(law())


def test_a_cluster_accepts_a_password_file(cluster: RedisCluster, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(OLD)
    address, _, prefix = cluster.new_address().partition(" ")
    url = f"{address.replace(f':{OLD}@', '@')}?password_file={tmp_path / 'password'}"

    async def law() -> None:
        users = [f"user-{number}" for number in range(20)]  # on every node
        async with opened(f"{url} {prefix}") as store:
            await store.append("main", [click("e", user_id) for user_id in users])
            assert all(await store.states("main", users, GENERATION))

    asyncio.run(law())
    before = connections(cluster)
    with RedisSource.open(url, prefix) as archiver:
        assert len(archiver.memory_usage()) >= len(cluster.primaries)
        assert len(connections(cluster) - before) >= len(cluster.primaries)
    wait_until(lambda: connections(cluster) <= before)  # all of the archiver's are closed


def connections(cluster: RedisCluster) -> set[tuple[int, str]]:
    """Connections to each primary by port and id."""
    return {(node.port, client["id"]) for node in cluster.primaries for client in node.client.client_list()}


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), ("", "it is empty"), ("wrong", "invalid")])
def test_an_invalid_password_file_is_refused_at_startup(
    any_server: RedisServer, tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "redis_password"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StorageUnavailable, match=said):
        asyncio.run(RedisStore.open(url_of(any_server, file), [GENERATION]))
