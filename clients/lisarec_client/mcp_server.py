"""A Model Context Protocol server: it lets AI assistants query a running service. It needs the package `mcp`.

All its tools are read-only, unless it is started with `allow_events`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any
from urllib.parse import quote, urlencode

from .arguments import require_id
from .async_client import AsyncClient, new_event
from .responses import LisarecError

INSTRUCTIONS = (
    "Product recommendations of a shop. Use search_items to find item ids. Request a list for a user_id, or for a "
    "history of item ids, oldest first. Scores are comparable within one list only."
)

Tool = Callable[..., Awaitable[dict[str, Any]]]


class Tools:
    """The tools of the server. Assistants read the docstrings as the tools' descriptions."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def search_items(self, query: str, user_id: str | None = None, limit: int = 10) -> dict[str, Any]:
        """Find items by words in their titles or by id: best match first, or ranked for the user if given."""
        return {"items": await self._client.search(query, user_id, limit)}

    async def recommend(
        self,
        user_id: str | None = None,
        history: list[str] | None = None,
        k: int = 10,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """List the best items for a user, or for a history of item ids, oldest first. Pass one of the two.

        The options are fields of POST /v1/recommendations: categories, categories_none, exclude, exclude_seen
        ("none", "recent", "all"), filter (an expression such as "item.price < 20.0"), boost, diversity (0 to 1),
        basket, scenario, params and others.
        """
        return await self._list(user_id, history, {**(options or {}), "k": k})

    async def explain(self, user_id: str | None = None, history: list[str] | None = None, k: int = 3) -> dict[str, Any]:
        """List the best items with the parts that each score adds up: codewords, recent items and what follows them."""
        return await self._list(user_id, history, {"k": k, "explain": True})

    async def similar_items(self, item_id: str, k: int = 10) -> dict[str, Any]:
        """List the items that are most similar to an item."""
        require_id("item_id", item_id)
        return await self._client.call("GET", f"/v1/items/{quote(item_id, safe='')}/similar?{urlencode({'k': k})}")

    async def stats(self) -> dict[str, Any]:
        """Return the active model, and how often lists were shown and led to events, by place and scenario."""
        model = await self._client.call("GET", "/v1/model")
        return {"model": model, **await self._client.call("GET", "/v1/stats")}

    async def record_event(
        self,
        user_id: str,
        item_id: str,
        type: str = "click",  # noqa: A002  # the API's field name
        value: float | None = None,
    ) -> dict[str, Any]:
        """Log an event of a user, such as a click on an item or its purchase. It changes the user's recommendations."""
        event = new_event({"user_id": user_id, "item_id": item_id, "type": type}, value=value)
        return {"event_id": event["event_id"], **await self._client.call("POST", "/v1/events", event)}

    async def _list(self, user_id: str | None, history: list[str] | None, wishes: dict[str, Any]) -> dict[str, Any]:
        whose = {name: value for name, value in (("user_id", user_id), ("history", history)) if value is not None}
        return await self._client.call("POST", "/v1/recommendations", {**wishes, **whose})


def serve(url: str, key: str | None = None, *, version: str = "", allow_events: bool = False) -> None:
    """Serve over standard input and output until the input ends.

    raises  LisarecError  if the service isn't ready, isn't lisarec, or rejects the key
            ImportError   if the package `mcp` is not installed
    """
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ToolAnnotations

    async def run() -> None:
        client = AsyncClient(url, key)
        tools = Tools(client)
        server: Any = MCPServer("lisarec", instructions=INSTRUCTIONS, version=version, log_level="WARNING")
        reading: list[Tool] = [tools.search_items, tools.recommend, tools.explain, tools.similar_items, tools.stats]
        for tool in reading:
            server.add_tool(_answering(tool, ToolError), annotations=ToolAnnotations(read_only_hint=True))
        if allow_events:
            changing = ToolAnnotations(read_only_hint=False, destructive_hint=False)
            server.add_tool(_answering(tools.record_event, ToolError), annotations=changing)
        try:
            await client.check()
            await server.run_stdio_async()
        finally:
            await client.close()

    asyncio.run(run())


def _answering(tool: Tool, failure: type[Exception]) -> Tool:
    """Wrap the tool, so that an error of the service becomes a tool error that the assistant reads."""

    @wraps(tool)
    async def answer(*arguments: Any, **named: Any) -> dict[str, Any]:
        try:
            return await tool(*arguments, **named)
        except (LisarecError, ValueError) as exc:
            raise failure(str(exc)) from exc

    return answer
