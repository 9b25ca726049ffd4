"""Cursors: opaque texts with the items of earlier pages, so that no later page shows them again.

A cursor contains only item ids. It is validated like a list of items to exclude, because it has the same effect. The
service stores nothing between pages.
"""

import zlib
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.schemas.fields import are_ids, checked_by

PACKED, PLAIN = b"\x01", b"\x02"  # the first byte; after it come the ids, compressed or plain
MIN_COMPRESSED_BYTES = 1024  # compressing shorter texts is not worth the time
MAX_ITEMS = 10_000  # on all pages together
MAX_BYTES = MAX_ITEMS * 513  # ids of 128 characters of 4 bytes, each with a separator
MAX_RATIO = 32  # of bytes to compressed bytes, so that no short cursor takes long to read


class BadCursor(ValueError):
    """The text is not a cursor."""


def cursor_after(shown: Iterable[str]) -> str:
    """Return the cursor after these shown items, at most MAX_ITEMS."""
    text = "\n".join(shown).encode()
    payload = PLAIN + text if len(text) < MIN_COMPRESSED_BYTES else PACKED + _compress(text)
    return urlsafe_b64encode(payload).rstrip(b"=").decode()


def shown_before(cursor: str) -> Sequence[str]:
    """Return the ids of the shown items, in order; none for the empty text. The ids are not validated.

    raises BadCursor
    """
    if not cursor:
        return ()
    try:
        payload = b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        text = payload[1:] if payload[:1] == PLAIN else _decompress(payload)
        if text.count(b"\n") >= MAX_ITEMS:  # before they are split
            raise BadCursor
        return text.decode().split("\n")
    except (ValueError, zlib.error) as exc:
        raise BadCursor from exc


def _compress(text: bytes) -> bytes:
    compressed = zlib.compress(text, level=1)
    if len(text) <= MAX_RATIO * len(compressed):
        return compressed
    packing = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)  # at least one bit for each byte
    return packing.compress(text) + packing.flush()


def _decompress(payload: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(payload[1:], min(MAX_BYTES, MAX_RATIO * len(payload)))
    if payload[:1] != PACKED or not unpacking.eof or unpacking.unused_data:
        raise BadCursor
    return text


def _shown_before(value: object) -> tuple[str, ...]:
    """Return the item ids in a cursor."""
    if isinstance(value, tuple):
        return value  # already decoded
    try:
        if not isinstance(value, str) or not are_ids(ids := shown_before(value)):
            raise BadCursor
    except BadCursor:
        raise PydanticCustomError(
            "not_a_cursor",
            "is not a cursor; send that of the previous page unchanged, or an empty one for the first page",
        ) from None
    return tuple(ids)


CursorText = Annotated[str, checked_by(_shown_before)]
Cursor = Annotated[tuple[str, ...], PlainValidator(_shown_before), WithJsonSchema({"type": "string"})]
