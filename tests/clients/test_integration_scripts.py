"""Scripts of docs/how-to (integrate, apps, migration), run against the real service; see also pages."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from playwright._impl._driver import compute_driver_executable

from benchmarks.harness.service_process import free_port, wait_until_ready
from clients import lisarec_client
from tests.clients.conftest import HOW_TO, ROOT, Exchange, Proxy, Service
from tests.waiting import PATIENCE_S

NODE = compute_driver_executable()[0]  # the one that Playwright brings
MOVE = (HOW_TO / "switch.md").read_text()
FALLBACK = [{"item_id": "school-bag-red"}]


def environment(service: Service, **more: str) -> dict[str, str]:
    return os.environ | {"LISAREC_URL": service.url, "LISAREC_KEY": service.key} | more


def run(service: Service, command: list[str], **more: str) -> str:
    done = subprocess.run(
        command, env=environment(service, **more), capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stderr in ("", "returning the fallback: TimeoutError\n")  # on a machine with much else to do
    return done.stdout


def script_of_the_move(language: str) -> str:
    """The first script in a language of the migration page."""
    found = re.search(rf"^```{language}\n(.*?)^```$", MOVE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def test_python(service: Service, integration_script: Callable[[str], str]) -> None:
    before = service.log("ann")
    answer, confirmed = run(
        service, [sys.executable, "-c", integration_script("python")], PYTHONPATH=str(ROOT / "clients")
    ).splitlines()
    assert answer.startswith(("popular ['item-", "personalised ['item-", "fallback ['"))
    assert confirmed == "True"
    (event,) = service.log("ann")[len(before) :]
    assert event["type"] == "click"
    assert event["item_id"] in answer


def test_shell(service: Service, integration_script: Callable[[str], str]) -> None:
    posted, recommended, undone = map(
        json.loads, run(service, ["bash", "-euc", integration_script("sh")]).split("\n")[:3]
    )
    assert posted["accepted"] == 1
    assert len(recommended["items"]) == 3
    assert undone == {"user_id": "ann", "event_id": undone["event_id"], "changed": True}


def test_node(service: Service, integration_script: Callable[[str], str]) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    visitor = "visitor-01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11"
    event = {"event_id": "seen-before-login", "user_id": visitor, "item_id": "item-3"}
    assert service.ask("POST", "/v1/events", json=event).status_code == 200
    backend = subprocess.Popen([NODE, "-e", integration_script("js")], env=environment(service, PORT=str(port)))
    try:
        wait_until_ready(url, backend, "/recommendations")
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as browser:
            cookie = {"cookie": f"other=1; lisarec={visitor}"}
            items = browser.get("/recommendations", headers=cookie).json()
            assert len(items) == 3 or items == FALLBACK  # where 250 ms were too short
            assert browser.get("/login", headers=cookie).json() == {"user_id": "ann", "from": visitor, "changed": True}
            # a cookie that says another user's name shows and merges nobody
            for path in ("/recommendations", "/login"):
                assert browser.get(path, headers={"cookie": "lisarec=bob"}).json() == FALLBACK
    finally:
        backend.kill()
        backend.wait()
    assert "seen-before-login" in service.logged_ids("ann")


VISITOR = """
const stored = new Map([["state", "old"]]), posted = []
const key = "KEY", answers = ANSWERS
globalThis.localStorage = new Proxy({}, {
  get: (_, name) => name == "removeItem" ? name => stored.delete(name) : stored.get(name),
  set: (_, name, value) => stored.set(name, String(value)),
})
globalThis.fetch = async (_, { body }) => {
  posted.push(JSON.parse(body).state ?? null)
  const [status, answer] = answers.shift()
  return { ok: status == 200, status, json: async () => answer }
}
process.on("exit", () => console.log(JSON.stringify([stored.get("state"), posted])))
process.on("uncaughtException", () => {})
"""


@pytest.mark.parametrize(
    ("status", "code", "stored", "posted"),
    [
        (429, "too_many_requests", "old", ["old"]),
        (422, "too_many_events", "old", ["old"]),
        (422, "sealed_state_expired", "new", ["old", None, "new"]),
        (422, "invalid_sealed_state", "new", ["old", None, "new"]),
    ],
)
def test_a_page_keeps_its_sealed_state_unless_that_cannot_be_opened(
    status: int, code: str, stored: str, posted: list[str | None]
) -> None:
    page = (HOW_TO / "integrate" / "sealed-states.md").read_text()
    script = re.search(r"^```js\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert script is not None
    answers = [[status, {"error": {"code": code}}], [200, {"state": "new"}], [200, {"items": []}]]
    program = VISITOR.replace("ANSWERS", json.dumps(answers)) + script[1]
    command = [NODE, "--input-type=module", "-e", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert json.loads(done.stdout) == [stored, posted], done.stderr


def test_user_properties_are_sent(service: Service, tmp_path: Path) -> None:
    labels: list[dict[str, Any] | None] = [{"gender": "m", "likes": ["tea"]}, None]
    users = [{"UserId": f"switched-{row}", "Labels": one} for row, one in enumerate(labels)]
    (tmp_path / "users.jsonl").write_text("".join(json.dumps(user) + "\n" for user in users))
    sent = environment(service, PYTHONPATH=str(ROOT / "clients"))
    script = [sys.executable, "-c", script_of_the_move("python")]
    subprocess.run(script, cwd=tmp_path, env=sent, check=True, timeout=PATIENCE_S)
    found = [service.ask("GET", f"/v1/users/switched-{row}/properties").json()["properties"] for row in range(2)]
    assert found == [labels[0], {}]


def test_new_items_are_listed_newest_first(service: Service) -> None:
    items = [item["item_id"] for item in service.ask("GET", "/v1/items", params={"limit": 3}).json()["items"]]
    now = datetime.now(UTC)
    for item_id, days in zip(items, (20, 1, 40), strict=True):
        published_at = (now - timedelta(days=days)).isoformat()
        service.ask("PUT", f"/v1/items/{item_id}", json={"published_at": published_at}).raise_for_status()
    try:
        code = script_of_the_move("sh")
        script = ["bash", "-ec", code]
        said = subprocess.run(script, env=environment(service), check=True, capture_output=True, timeout=PATIENCE_S)
        found = json.loads(said.stdout[said.stdout.index(b'{"recommendation_id"') :])
        assert [item["item_id"] for item in found["items"]] == [items[1], items[0]]
    finally:
        service.ask("DELETE", "/v1/admin/scenarios/latest")
        for item_id in items:
            service.ask("PUT", f"/v1/items/{item_id}", json={"published_at": None}).raise_for_status()


def test_events_of_an_app_count_once_across_losses_and_logins(
    service: Service, proxy: Proxy, ann: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three phones with changing users; the oracle is what happened on them."""
    draw, users, expected = random.Random(0), (ann, f"{ann}-2"), list[str]()

    def play(exchange: Exchange) -> None:
        if (fate := draw.random()) < 0.2:  # only the answer is lost
            exchange.ask_service()
        if fate < 0.4:
            exchange.refuse(503, "storage_unavailable")
        else:
            exchange.forward()

    def visitor() -> str:
        return f"visitor-{uuid4()}"

    proxy.play = play
    monkeypatch.setitem(sys.modules, "lisarec_client", lisarec_client)
    for name, value in environment(service, LISAREC_URL=proxy.url).items():
        monkeypatch.setenv(name, value)
    script = re.search(
        r"^```python\n(.*?)^```$", (HOW_TO / "industries" / "apps.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert script
    backend: dict[str, Any] = {}
    exec(script[1], backend)
    phones: list[tuple[str, list[dict[str, object]]]] = [(visitor(), []) for _ in range(3)]
    for step in range(40):
        at = draw.randrange(3)
        ours, queue = phones[at]
        for item_id in draw.choices(["item-1", "item-2", "", 7], k=draw.randrange(5)):
            event_id = str(uuid4())
            queue.append({"visitor": ours, "event_id": event_id, "type": "tap", "item_id": item_id, "at": step})
            expected += [event_id] if item_id in ("item-1", "item-2") else []
        sent = queue[: draw.randrange(9)]
        for _ in range(draw.randrange(3)):  # the phone gets no answer
            backend["collect"]({"sent_at": step, "events": sent})
        if draw.random() < 0.4:
            ours = backend["login"](draw.choice(users), ours)
        if draw.random() < 0.4:
            backend["collect"]({"sent_at": step, "events": sent})
            del queue[: len(sent)]
        if draw.random() < 0.2:  # after a login
            backend["login"](draw.choice(users), ours)
            ours = visitor()
        phones[at] = ours, queue
    for ours, queue in phones:
        backend["collect"]({"sent_at": 40, "events": queue})
        backend["login"](ann, ours)
    assert backend["login"](ann, users[1]) not in users
    backend["lisarec"].close()
    assert sorted(service.logged_ids(users[0]) + service.logged_ids(users[1])) == sorted(expected)


def test_every_documented_replacement_of_other_recommenders_exists(service: Service) -> None:
    paths = service.ask("GET", "/openapi.json").json()["paths"]
    calls = re.findall(r"`(GET|POST|PUT|DELETE|PATCH) (/v1/[^`?]+)`", MOVE)
    assert len(calls) > 20
    for method, path in calls:
        assert method.lower() in paths[path], f"{method} {path}"
