"""Recommendation ids, which encode the recommended items, so that no list needs to be stored.

  time        6 bytes  milliseconds since the epoch
  chance      4        random, to make ids unique
  generation  4        the first bytes of its tag
  experiment  2        from a hash of its name; 0 for none
  length      2        of the list
  items       2 each   from a hash of the item's id, for the first PLACES items of the list
  scenario    4        from a hash of its name; absent for none
  signature   8        keyed BLAKE2b of all fields above, with a key that no client knows

Ids are in URL-safe base64, with 62 characters for ten items. An id is ignored unless a service on the same data has
signed it.
"""

import os
import random
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple
from zlib import crc32

PLACES = 20  # first positions of a list, which are counted individually
HEAD = Struct(">6s4s4sHH")
SIGNATURE = 8
MAX_LIST_LENGTH = 0xFFFF
MAX_KEPT_HASHES = 16_384


class Place(NamedTuple):
    """The position in a list where a user found an item.

    generation  the first four bytes of its tag
    experiment  two bytes of a hash of its name; 0 for none
    place       the position in the list, from 1
    scenario    four bytes of a hash of its name; empty for none
    """

    generation: bytes
    experiment: int
    place: int
    scenario: bytes = b""


def hash_of(name: str) -> int:
    """Return two bytes of a hash of an experiment's or item's name; 0 for none."""
    return crc32(name.encode()) & 0xFFFF if name else 0


def scenario_hash_of(name: str) -> bytes:
    """Return four bytes of a hash of a scenario's name; empty for none."""
    return crc32(name.encode()).to_bytes(4, "big") if name else b""


def _item_hash(item_id: str) -> bytes:
    return (crc32(item_id.encode()) & 0xFFFF).to_bytes(2, "big")


class _ItemHashes(dict[str, bytes]):
    """Two bytes of a hash of each item's id; the items of the newest lists are kept."""

    def of(self, item_ids: Sequence[str]) -> bytes:
        """Return the hashes, one after the other."""
        if len(self) > MAX_KEPT_HASHES:
            self.clear()
        return b"".join(map(self.__getitem__, item_ids))

    def __missing__(self, item_id: str) -> bytes:
        found = self[item_id] = _item_hash(item_id)
        return found


class RecommendationIds:
    """Makes and reads the ids of one tenant. Ids that were made before `set_secret` cannot be read."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant.encode()
        self._item_hashes = _ItemHashes()
        self.set_secret(os.urandom(32))

    def set_secret(self, secret: bytes) -> None:
        """Start signing with the secret that all services on the same data share."""
        self._key = blake2b(self._tenant, key=secret, digest_size=32).digest()

    def make(self, generation: bytes, experiment: int, item_ids: Sequence[str], scenario: bytes = b"") -> str:
        """Return the id of a list, from a generation's tag and the hashes of an experiment's and a scenario's name."""
        head = HEAD.pack(
            (time.time_ns() // 1_000_000).to_bytes(6, "big"),
            random.getrandbits(32).to_bytes(4),  # makes ids unique; the signature protects them
            generation[:4],
            experiment,
            min(len(item_ids), MAX_LIST_LENGTH),
        )
        items = self._item_hashes.of(item_ids[:PLACES])
        payload = head + items + scenario
        return urlsafe_b64encode(payload + self._signature(payload)).rstrip(b"=").decode()

    def place(self, recommendation_id: str, item_id: str) -> Place | None:
        """Return the item's position; None if the id is not valid, or the item is not among the first PLACES."""
        try:
            read = urlsafe_b64decode(recommendation_id + "=" * (-len(recommendation_id) % 4))
        except ValueError:
            return None
        payload, signature = read[:-SIGNATURE], read[-SIGNATURE:]
        if len(payload) < HEAD.size or signature != self._signature(payload):
            return None
        _, _, generation, experiment, length = HEAD.unpack(payload[: HEAD.size])
        wanted, items = _item_hash(item_id), payload[HEAD.size :]
        places = min(length, PLACES)
        for place in range(places):
            if items[2 * place : 2 * place + 2] == wanted:
                return Place(generation, experiment, place + 1, items[2 * places :])
        return None

    @staticmethod
    def time_ms(recommendation_id: str) -> int:
        """Return when the list of this valid id was made, in milliseconds since the epoch."""
        return int.from_bytes(urlsafe_b64decode(recommendation_id[:8]), "big")

    def _signature(self, payload: bytes) -> bytes:
        return blake2b(payload, key=self._key, digest_size=SIGNATURE).digest()
