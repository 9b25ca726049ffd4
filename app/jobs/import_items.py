"""Import of a file's items into a running service."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from app.jobs.replay import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    RETRIED_STATUSES,
    RETRY_FOR_S,
    TIMEOUT_S,
    ReplayError,
    error_message,
    require_http_url,
)
from model.data.readers import AVAILABLE, categories_in, read_item_table

BATCH = 500  # of the 1,000 that a request may have, so that long titles stay within its bytes

COLUMNS = ("item_id", "title", "categories", "available")

ItemJson = dict[str, Any]


def read(path: Path) -> list[ItemJson]:
    """Return the items of a table as ``POST /v1/items`` takes them; an empty cell changes nothing.

    raises  DataError  which names the line
    """
    frame = read_item_table(path)
    columns = [frame[name].to_list() if name in frame.columns else [None] * len(frame) for name in COLUMNS]
    return [_item(*row) for row in zip(*columns, strict=True)]


def _item(item_id: str, title: str | None, categories: str | None, available: str | None) -> ItemJson:
    item: ItemJson = {"item_id": item_id}
    if title:
        item["title"] = title
    if categories:
        item["categories"] = list(categories_in(categories))
    if available:
        item["available"] = AVAILABLE[available.lower()]
    return item


def send(
    items: list[ItemJson],
    url: str,
    key: str | None = None,
    *,
    retry_for_s: float = RETRY_FOR_S,
    on_sent: Callable[[int], None] = lambda items: None,
) -> int:
    """Post the items; return how many of them no model has learned yet.

    key      one that may write the catalogue, where the service has keys
    raises   ReplayError  when the service refuses an item, or stays away for longer than the patience; the items
                          before are noted, and sending all of them again changes nothing about them
    """
    require_http_url(url)
    unknown = 0
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=headers) as client:
        for begin in range(0, len(items), BATCH):
            batch = items[begin : begin + BATCH]
            unknown += _send(client, batch, begin, retry_for_s)
            on_sent(len(batch))
    return unknown


def _send(client: httpx.Client, batch: list[ItemJson], begin: int, retry_for_s: float) -> int:
    give_up_s, pause_s = time.monotonic() + retry_for_s, FIRST_PAUSE_S
    while True:
        try:
            answer = client.post("/v1/items", json=batch)
        except httpx.TransportError as exc:
            problem = f"cannot be reached ({str(exc) or type(exc).__name__}); start it with 'lisarec serve'"
        else:
            if answer.status_code == httpx.codes.OK:
                return int(answer.json()["unknown_items"])
            problem = f"answers {answer.status_code}: {error_message(answer)}"
            if answer.status_code not in RETRIED_STATUSES:
                raise ReplayError(f"{client.base_url} {problem} (items {begin + 1:,} to {begin + len(batch):,})")
        if time.monotonic() + pause_s > give_up_s:
            raise ReplayError(f"{client.base_url} {problem}; run the same command again when it is back")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
