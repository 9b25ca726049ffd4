"""Sealed states: visitors keep them, and can neither read nor change them.

A sealed state is URL-safe base64, without padding, of

  version     u1     of this format and of the portable state in it
  key         u1[4]  the id of the key
  generation  u1[8]  the tag of the generation that folded the state
  nonce       u1[12] random
  ciphertext         AES-256-GCM of the time in seconds (u4) at which it was sealed, and of the portable state
  tag         u1[16]

The associated data are the version, the key, the generation, the tenant and the audience. So a state that was sealed
with another key or version, or for another tenant or audience, cannot be opened. Nor can a state with any bit changed.
"""

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from struct import Struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag

from app.errors import ErrorDetail, InvalidSealedState, SealedStateExpired, SealingNotConfigured
from app.events.ingest import FOLLOW_JUMPS_AFTER_S
from app.events.steady_clock import SteadyClock
from app.http.auth.seal_keys import SealKeyring
from app.schemas.recommendations import RecommendationRequest
from storage.state.portable_state import SIZE, VERSION, PortableState

HEAD = Struct("<B4s8s")
NONCE_BYTES, TAG_BYTES = 12, 16
TIME = Struct("<I")
BYTES = HEAD.size + NONCE_BYTES + TIME.size + SIZE + TAG_BYTES
CHARACTERS = BYTES * 4 // 3  # BYTES is a multiple of 3, so no character has unused bits
DAY_S = 86_400


class Sealed(NamedTuple):
    """A sealed state and the time at which it expires."""

    text: str
    expires: datetime


class StateSealer:
    """Seals and opens states. A sealed state expires after a number of days.

    A clock that is wrong for seconds expires no state, because its visitor would start again without a history.
    """

    def __init__(self, keyring: SealKeyring, days: int) -> None:
        self._keyring = keyring
        self._ttl_s = days * DAY_S
        self._clock = SteadyClock(FOLLOW_JUMPS_AFTER_S)

    def seal(self, state: PortableState, tenant: str, audience: str) -> Sealed:
        """Seal the state for the keys of the tenant that have this audience."""
        key_id, cipher = self._keyring.primary()
        head, nonce, now_s = HEAD.pack(VERSION, key_id, state.tag), os.urandom(NONCE_BYTES), self._now_s()
        ciphertext = cipher.encrypt(nonce, TIME.pack(now_s) + state.encode(), _associated(head, tenant, audience))
        expires = datetime.fromtimestamp(now_s + self._ttl_s, UTC)
        return Sealed(urlsafe_b64encode(head + nonce + ciphertext).decode(), expires)

    def open(self, text: str, tenant: str, audience: str) -> PortableState:
        """Return the state that was sealed for this tenant and audience.

        raises  InvalidSealedState  when the text cannot be opened, for whatever reason
                SealedStateExpired  when the state was sealed too long ago
        """
        value = _decoded(text)
        head, ciphertext_at = value[: HEAD.size], HEAD.size + NONCE_BYTES
        version, key_id, tag = HEAD.unpack(head)
        cipher = self._keyring.find(key_id) if version == VERSION else None
        if cipher is None:
            raise InvalidSealedState
        try:
            plain = cipher.decrypt(
                value[HEAD.size : ciphertext_at], value[ciphertext_at:], _associated(head, tenant, audience)
            )
        except InvalidTag:
            raise InvalidSealedState from None
        (sealed_at_s,) = TIME.unpack_from(plain)
        if self._now_s() >= sealed_at_s + self._ttl_s:
            raise SealedStateExpired
        return PortableState.decode(tag, plain[TIME.size :])

    def _now_s(self) -> int:
        return self._clock.now_us() // 1_000_000


def require_sealer(sealer: StateSealer | None) -> StateSealer:
    """Return the service's sealer; raises SealingNotConfigured if the service has no seal keys."""
    if sealer is None:
        raise SealingNotConfigured
    return sealer


def open_states(
    sealer: StateSealer | None, requests: Sequence[RecommendationRequest], tenant: str, audience: str
) -> None:
    """Open the sealed states of the requests, unless they are already open.

    raises  InvalidSealedState, SealedStateExpired, SealingNotConfigured
    """
    for place, request in enumerate(requests):
        if (state := request.state) is None or state.opened is not None:
            continue
        try:
            state.opened = require_sealer(sealer).open(state.text, tenant, audience)
        except InvalidSealedState as exc:
            if len(requests) > 1:
                exc.details = [ErrorDetail(field=f"requests.{place}.state", reason=exc.reason)]
            raise


def _associated(head: bytes, tenant: str, audience: str) -> bytes:
    return b"lisarec sealed state\0%b%b\0%b" % (head, tenant.encode(), audience.encode())


def _decoded(text: str) -> bytes:
    """Decode the text; raises InvalidSealedState unless it is exactly the encoding of the bytes."""
    if len(text) != CHARACTERS:
        raise InvalidSealedState
    try:
        value = urlsafe_b64decode(text)
    except ValueError:
        raise InvalidSealedState from None
    if urlsafe_b64encode(value).decode() != text:  # decoding skips characters outside the alphabet
        raise InvalidSealedState
    return value
