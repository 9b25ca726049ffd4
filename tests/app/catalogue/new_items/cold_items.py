"""Cold items in a shop: helpers to add them, and to compare their codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.events import cold_item_learner
from model.artifact.model_directory import Artifact
from tests.app.conftest import ITEMS, Client, item_id
from tests.app.support import finish_background_work
from tests.storage.oracles.naive_fold import assert_state_is
from tests.storage.oracles.naive_fold import fold as naive_fold

NEW = "new-1"


def sample_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a few events as a sample of all users."""
    monkeypatch.setattr(cold_item_learner, "EVENTS_PER_SAMPLE", 2)
    monkeypatch.setattr(cold_item_learner, "MIN_SAMPLE_INTERVAL_S", 0.0)


def codes_of(client: Client, new: str = NEW) -> Any:
    return client.service.switcher.current.cold_items[new]


@torch.inference_mode()
def nearness(trained: Artifact, codes: Sequence[bytes], rows: Sequence[int]) -> float:
    """Mean cosine of each code with its learned item minus the mean over all pairs; vectors are centred."""
    books = trained.model.target_codebooks.numpy()

    def vectors(targets: NDArray[np.uint8]) -> NDArray[np.float32]:
        around: NDArray[np.float32] = sum(books[book, words] for book, words in enumerate(targets.T))
        around = around - trained.content.mean
        scaled: NDArray[np.float32] = around / np.linalg.norm(around, axis=1, keepdims=True)
        return scaled

    cosines = vectors(np.stack([np.frombuffer(own, np.uint8) for own in codes])) @ vectors(trained.target_codes[rows]).T
    return float(np.diag(cosines).mean() - cosines.mean())


def introduce(client: Client, users: int = 13, first: int = 0) -> None:
    """Let users who have clicked some items click the new one."""
    for user in range(first, first + users):
        client.click(f"u{user}", *(item_id(user % 3 + 4 * n) for n in range(3)))
        client.click(f"u{user}", NEW)
    finish_background_work(client)


def everything(client: Client, user_id: str = "u0", **params: Any) -> dict[str, Any]:
    answer = client.recommend(user_id, **({"exclude_seen": "none", "k": ITEMS + 9} | params))
    return {item["item_id"]: item for item in answer["items"]}


def state_of(client: Client, user_id: str) -> bytes | None:
    service = client.service
    generation = service.switcher.current.generation
    states: list[bytes | None] = client.runner.run(service.store.states(client.settings.tenant, [user_id], generation))
    return states[0]


def assert_states_are_folds(client: Client, users: list[str]) -> None:
    generation = client.service.switcher.current.generation
    for user_id in users:
        assert_state_is(state_of(client, user_id), naive_fold(generation, client.log(user_id)))


def put(client: Client, new: str = NEW, **words: Any) -> None:
    assert client.request("PUT", f"/v1/items/{new}", json=words).status_code == 200
    finish_background_work(client)  # assigns codes
    finish_background_work(client)  # serves them
