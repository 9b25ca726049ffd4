"""`lisarec mcp`, called by the SDK's own client over standard input and output."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.conftest import ROOT, Service
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from mcp import ClientSession

READING = {"search_items", "recommend", "explain", "similar_items", "stats"}
Use = Callable[["ClientSession"], Awaitable[None]]


@pytest.fixture
def key_file(service: Service, tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(service.add_key("recs:read", "events:write") + "\n")
    return path


def with_assistant(use: Use, service: Service, key_file: Path, *options: str) -> None:
    """Start and use the server through the SDK, whose import takes half a second and thus happens here."""
    from mcp import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    arguments = ["-m", "app", "mcp", "--url", service.url, "--key-file", str(key_file), *options]
    server = StdioServerParameters(
        command=sys.executable, args=arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT
    )

    async def run() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            stdio_client(server, errlog=sys.__stderr__ or sys.stderr) as (
                read,
                write,
            ),  # the default is that of its import
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            await use(session)

    asyncio.run(run())


async def called(session: ClientSession, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await session.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert isinstance(result.structured_content, dict)
    return result.structured_content


async def refusal(session: ClientSession, tool: str, **arguments: Any) -> str:
    result = await session.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)  # type: ignore[union-attr]


def test_an_assistant_searches_recommends_explains_and_reads_statistics(
    service: Service, key_file: Path, ann: str
) -> None:
    async def ask(session: ClientSession) -> None:
        tools = (await session.list_tools()).tools
        assert {tool.name for tool in tools} == READING
        assert all(tool.annotations and tool.annotations.read_only_hint and tool.description for tool in tools)
        found = await called(session, "search_items", query="thing", limit=3)
        assert found["items"] == service.ask("GET", "/v1/items", params={"query": "thing", "limit": 3}).json()["items"]
        answer = await called(session, "recommend", history=["item-1", "item-2"], k=4, options={"exclude": ["item-9"]})
        request = {"history": ["item-1", "item-2"], "k": 4, "exclude": ["item-9"]}
        assert answer["items"] == service.ask("POST", "/v1/recommendations", json=request).json()["items"]
        assert (await called(session, "recommend", user_id=ann))["source"] == "popular"
        (explained,) = (await called(session, "explain", history=["item-1"], k=1))["items"]
        assert explained["explanation"]["codewords"]
        assert len((await called(session, "similar_items", item_id="item-1", k=2))["items"]) == 2
        stats = await called(session, "stats")
        assert (stats["model"]["generation"], {"places", "scenarios"} <= stats.keys()) == ("tiny", True)
        assert "exactly one of user_id, history and state" in await refusal(session, "recommend")
        assert "filter at character" in await refusal(session, "recommend", user_id=ann, options={"filter": "item."})
        assert "item_id must be" in await refusal(session, "similar_items", item_id="..")
        assert "item_not_found" in await refusal(session, "similar_items", item_id="../../admin")
        assert "record_event" in await refusal(session, "record_event", user_id=ann, item_id="item-1")

    with_assistant(ask, service, key_file)
    assert service.log(ann) == []


def test_events_are_accepted_if_allowed(service: Service, key_file: Path, ann: str) -> None:
    async def ask(session: ClientSession) -> None:
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert tools.keys() == READING | {"record_event"}
        assert tools["record_event"].annotations
        assert tools["record_event"].annotations.read_only_hint is False
        done = await called(session, "record_event", user_id=ann, item_id="item-1", type="purchase", value=9.5)
        assert (done["accepted"], [one["event_id"] for one in service.log(ann)]) == (1, [done["event_id"]])

    with_assistant(ask, service, key_file, "--allow-events")


@pytest.mark.parametrize(
    ("url", "key", "reason"),
    [
        (None, "lisarec_no-key", "401 unauthenticated"),
        ("http://127.0.0.1:9", "", "cannot be reached"),
        ("here", "", "not a valid base URL"),
    ],
)
def test_it_exits_at_once_without_a_service(
    service: Service, tmp_path: Path, url: str | None, key: str, reason: str
) -> None:
    (tmp_path / "key").write_text(key)
    options = ["--url", url or service.url, *(["--key-file", str(tmp_path / "key")] if key else [])]
    command = [sys.executable, "-m", "app", "mcp", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("lisarec: ")
    assert reason in done.stderr
